#include "gated.cuh"

// swiglu(gate, up) = silu(gate) up
// by gate silu'(gate) up, by up silu(gate)
// Source: Shazeer, GLU Variants Improve Transformer (2020); the feed-forward of Llama.

ELEMENTWISE T forward(T gate, T up) { return rounded(silu_::forward(gate)) * up; }

ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up) {
  return {from_gate(silu_::backward(into_gate(dy, up), gate), dy, up), dy * rounded(silu_::forward(gate))};
}
