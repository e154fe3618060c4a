#include "gated.cuh"

// swiglu(gate, up) = silu(gate) up
// by gate silu'(gate) up, by up silu(gate)
// Source: Shazeer, GLU Variants Improve Transformer (2020); the feed-forward of Llama.

ELEMENTWISE T forward(T gate, T up) { return rounded(silu_::forward(gate)) * up; }

ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up) {
  return gradients_of_product(dy, silu_::forward(gate), [=](T t) { return silu_::backward(t, gate); }, up);
}
