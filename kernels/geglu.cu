#include "gated.cuh"

// geglu(gate, up) = gelu(gate) up
// by gate gelu'(gate) up, by up gelu(gate)
// Source: Shazeer, GLU Variants Improve Transformer (2020), with the gelu of torch.nn.GELU.

ELEMENTWISE T forward(T gate, T up) { return rounded(gelu_::forward(gate)) * up; }

ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up) {
  return {from_gate(gelu_::backward(into_gate(dy, up), gate), dy, up), dy * rounded(gelu_::forward(gate))};
}
