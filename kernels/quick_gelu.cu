#include "elementwise.cuh"

// quick_gelu(x)  = x sigmoid(1.702 x)
// quick_gelu'(x) = s + 1.702 x s (1 - s) with s = sigmoid(1.702 x)
// Source: Hendrycks and Gimpel, Gaussian Error Linear Units (2016); transformers' quick_gelu. The limit at -inf is -0.

// From |x| = 1000 on both are constant in every type, and 0 * inf would be NaN.
ELEMENTWISE T forward(T x) {
  // |1.702 x| = v + low: exp turns absolute errors of the exponent into relative ones, so what rounding takes is kept.
  const T t = min(abs(x), 1000), v = 1.702 * t;
  return times_sigmoid(max(x, -1000), x < 0, v, fma(rest(T(1.702), 1.702), t, fma(T(1.702), t, -v)));
}

ELEMENTWISE T backward(T dy, T x) {
  const T t = min(1.702 * abs(x), 1000), e = decay(t), r = reciprocal(1 + e);
  return dy * (r * select(x < 0, e * (1 - t * r), 1 + t * e * r));
}
