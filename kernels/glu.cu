#include "gated.cuh"

// glu(up, gate) = up sigmoid(gate), the gate last
// by up sigmoid(gate), by gate up sigmoid'(gate)
// Source: torch.nn.GLU; Dauphin et al., Language Modeling with Gated Convolutional Networks (2017).

ELEMENTWISE T forward(T up, T gate) { return up * rounded(sigmoid_::forward(gate)); }

ELEMENTWISE Many<T, 2> backward(T dy, T up, T gate) {
  return {dy * rounded(sigmoid_::forward(gate)), from_gate(sigmoid_::backward(into_gate(dy, up), gate), dy, up)};
}
