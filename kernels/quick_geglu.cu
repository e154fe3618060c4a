#include "gated.cuh"

// quick_geglu(gate, up) = quick_gelu(gate) up
// by gate quick_gelu'(gate) up, by up quick_gelu(gate)
// Source: TransformerEngine's qgeglu, without its offset of up.

ELEMENTWISE T forward(T gate, T up) { return rounded(quick_gelu_::forward(gate)) * up; }

ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up) {
  return {from_gate(quick_gelu_::backward(into_gate(dy, up), gate), dy, up), dy * rounded(quick_gelu_::forward(gate))};
}
