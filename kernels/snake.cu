#include "elementwise.cuh"

// snake(x)  = x + sin(alpha x)^2 / alpha
// snake'(x) = 1 + sin(2 alpha x) = (sin(alpha x) + cos(alpha x))^2
// Source: Ziyin et al., Neural Networks Fail to Learn Periodic Functions and How to Fix It (2020). For alpha > 0. The
// slope at +-inf is NaN.

ELEMENTWISE T forward(T x, T alpha) { return x_plus_sin_squared(x, alpha); }

// alpha x is v and what rounding took from it. From |v| = 2^15 on, this is the slope at the rounded v.
ELEMENTWISE T backward(T dy, T x, T alpha) {
  const T v = alpha * x;
  const auto [sine, cosine] = sincos(v, fma(alpha, x, -v));
  const T s = sine + cosine;
  return dy * (s * s);
}
