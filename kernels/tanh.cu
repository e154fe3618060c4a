#include "elementwise.cuh"

// tanh(x)  = (exp(x) - exp(-x)) / (exp(x) + exp(-x))
// tanh'(x) = 4 e / (1 + e)^2 with e = exp(-2 |x|), which is (1 - y) (1 + y)
// Source: torch.nn.Tanh.

ELEMENTWISE T forward(T x) { return tanh(x); }

ELEMENTWISE T backward(T dy, T x) {
  const T e = decay(2 * abs(x)), r = reciprocal(1 + e);
  return dy * (4 * e * r * r);
}

ELEMENTWISE T backward_from_output(T dy, T y) { return dy * ((1 - y) * (1 + y)); }
