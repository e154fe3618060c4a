#include "gated.cuh"

// geglu_tanh(gate, up) = gelu_tanh(gate) up
// by gate gelu_tanh'(gate) up, by up gelu_tanh(gate)
// Source: Shazeer, GLU Variants Improve Transformer (2020); the feed-forward of Gemma.

ELEMENTWISE T forward(T gate, T up) { return rounded(gelu_tanh_::forward(gate)) * up; }

ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up) {
  return {from_gate(gelu_tanh_::backward(into_gate(dy, up), gate), dy, up), dy * rounded(gelu_tanh_::forward(gate))};
}
