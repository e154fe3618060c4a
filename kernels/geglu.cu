#include "gated.cuh"

// geglu(gate, up) = gelu(gate) up
// by gate gelu'(gate) up, by up gelu(gate)
// Source: Shazeer, GLU Variants Improve Transformer (2020), with the gelu of torch.nn.GELU.

// gelu of the gate.
ELEMENTWISE T act(T gate) { return right_part(gate) - times_normal_tail_closely<T>(folded(gate)); }

ELEMENTWISE T forward(T gate, T up) { return rounded(act<T>(gate)) * up; }

ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up) {
  return {from_gate(gelu_::backward(into_gate(dy, up), gate), dy, up), dy * rounded(act<T>(gate))};
}
