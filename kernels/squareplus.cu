#include "elementwise.cuh"

// squareplus(x)  = (x + sqrt(x^2 + b)) / 2
// squareplus'(x) = (1 + x / sqrt(x^2 + b)) / 2 = y^2 / (y^2 + b / 4)
// Source: Barron, Squareplus (2021); jax.nn.squareplus. For b > 0. Left of 0 the sum cancels, and
// (b / 2) / (sqrt(x^2 + b) - x) is the same.

// sqrt(x^2 + b), where x^2 may overflow.
ELEMENTWISE T root(T x, Number<T> b) { return select(abs(x) > 0x1p60, abs(x), sqrt(x * x + b)); }

ELEMENTWISE T forward(T x, Number<T> b) {
  const T s = root(x, b);
  return select(x < 0, b / 16 / (s / 8 - x / 8), x / 2 + s / 2);  // eighths: Narrow divides by 2^126 at most
}

ELEMENTWISE T backward(T dy, T x, Number<T> b) {
  const T t = min(abs(x), 0x1p60), s = sqrt(t * t + b);
  const T left = b / 2 * reciprocal(s * (s + t));  // the slope at -t; at t it is 1 - left
  return dy * select(x < 0, left, 1 - left);
}

ELEMENTWISE T backward_from_output(T dy, T y, Number<T> b) { return dy / (1 + b / 4 / (y * y)); }
