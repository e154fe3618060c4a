#include "gated.cuh"

// reglu(gate, up) = relu(gate) up
// by gate up for gate > 0, else 0 (0 at the kink, up for NaN); by up relu(gate)
// Source: Shazeer, GLU Variants Improve Transformer (2020).

ELEMENTWISE T forward(T gate, T up) { return relu_::forward(gate) * up; }

ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up) { return {relu_::backward(dy * up, gate), dy * relu_::forward(gate)}; }
