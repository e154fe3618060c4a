#include "elementwise.cuh"

// sigmoid(x)  = 1 / (1 + exp(-x))
// sigmoid'(x) = e / (1 + e)^2 with e = exp(-|x|), which is y (1 - y)
// Source: torch.nn.Sigmoid.

ELEMENTWISE T forward(T x) { return sigmoid(x); }

ELEMENTWISE T backward(T dy, T x) {
  const T e = decay(abs(x)), r = reciprocal(1 + e);
  return dy * (e * r * r);
}

ELEMENTWISE T backward_from_output(T dy, T y) { return dy * (y * (1 - y)); }
