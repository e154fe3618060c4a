#include "gated.cuh"

// geglu_tanh(gate, up) = gelu_tanh(gate) up
// by gate gelu_tanh'(gate) up, by up gelu_tanh(gate)
// Source: Shazeer, GLU Variants Improve Transformer (2020); the feed-forward of Gemma.

ELEMENTWISE T forward(T gate, T up) { return rounded(gelu_tanh_::forward(gate)) * up; }

// The slope of gelu_tanh is of less error here, as products add their own.
ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up) {
  const T e = gelu_tanh_::fall<T>(gate), slope = gelu_tanh_::slope<T>(gate, e, one_over_one_plus<T>(e));
  return {from_gate(into_gate(dy, up) * slope, dy, up), dy * rounded(gelu_tanh_::forward(gate))};
}
