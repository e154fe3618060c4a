#include "elementwise.cuh"

// tanhshrink(x)  = x - tanh(x)
// tanhshrink'(x) = tanh(x)^2
// Source: torch.nn.Tanhshrink.

ELEMENTWISE T forward(T x) { return x_minus_tanh(x); }

ELEMENTWISE T backward(T dy, T x) {
  const T t = tanh(x);
  return dy * (t * t);
}
