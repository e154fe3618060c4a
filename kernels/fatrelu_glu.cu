#include "gated.cuh"

// fatrelu_glu(gate, up) = gate up for gate > threshold, else 0
// by gate up for gate > threshold, else 0 (0 at the step, up for NaN); by up gate for gate > threshold, else 0
// Source: vLLM's fatrelu_and_mul; Song et al., MiniCPM-S (2024).

ELEMENTWISE T forward(T gate, T up, Number<T> threshold) { return threshold_::forward(gate, threshold, 0) * up; }

ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up, Number<T> threshold) {
  return {threshold_::backward(dy * up, gate, threshold, 0), dy * threshold_::forward(gate, threshold, 0)};
}
