#include "elementwise.cuh"

// mish(x)  = x t with t = tanh(softplus(x)) = n / (n + 2), n = exp(x) (exp(x) + 2)
// mish'(x) = t + x sigmoid(x) (1 - t^2) = t + 4 x exp(x) (exp(x) + 1) / (n + 2)^2
// Source: torch.nn.Mish; Misra, Mish (2019). The limit at -inf is -0.

// From x = -1000 down both are 0 in every type, and 0 * inf would be NaN.
ELEMENTWISE T forward(T x) { return times_tanh_softplus(max(x, -1000), max(x, -1000)); }

ELEMENTWISE T backward(T dy, T x) {
  const T c = clamp(x, -1000, 20), e = exp(c);  // from x = 20 up the slope is 1, and n would overflow
  const T n = e * (e + 2), r = reciprocal(n + 2);
  return dy * (n * r + 4 * c * (e * (e + 1) * r * r));
}
