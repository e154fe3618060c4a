#include "elementwise.cuh"

// snake(x)  = x + sin(alpha x)^2 / alpha
// snake'(x) = 1 + sin(2 alpha x) = (sin(alpha x) + cos(alpha x))^2
// Source: Ziyin et al., Neural Networks Fail to Learn Periodic Functions and How to Fix It (2020). For alpha > 0. The slope at
// +-inf is NaN.

ELEMENTWISE T forward(T x, T alpha) {
  const T s = sin(min(abs(alpha * x), 0x1p120));  // finite: out there only x matters
  return fma(s * (1 / alpha), s, x);
}

ELEMENTWISE T backward(T dy, T x, T alpha) {
  const auto [sine, cosine] = sincos(alpha * x);
  const T s = sine + cosine;
  return dy * (s * s);
}
