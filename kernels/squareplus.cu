#include "elementwise.cuh"

// squareplus(x)  = (x + sqrt(x^2 + b)) / 2
// squareplus'(x) = (1 + x / sqrt(x^2 + b)) / 2 = y^2 / (y^2 + b / 4)
// Source: Barron, Squareplus (2021); jax.nn.squareplus. For b > 0. With u = |x| / sqrt(b) and w = u + sqrt(u^2 + 1) it is
// sqrt(b) / 2 times w for x >= 0, where the sum cancels left of 0 but 1 / w does not, and nothing that counts overflows.

ELEMENTWISE T forward(T x, Number<T> b) {
  const T r = root_of(b), u = folded(x) * one_over(r), w = u + select(u > 0x1p30, u, sqrt(u * u + 1));
  return select(x < 0, r / 2 / w, select(u > 0x1p30, x, r / 2 * w));
}

ELEMENTWISE T backward(T dy, T x, Number<T> b) {
  const T u = min(folded(x) * one_over(root_of(b)), 0x1p60), s = sqrt(u * u + 1);
  const T left = reciprocal(2 * s * (s + u));  // the slope at -u; at u it is 1 - left
  return dy * select(x < 0, left, 1 - left);
}

ELEMENTWISE T backward_from_output(T dy, T y, Number<T> b) {
  const T w = 2 * y * one_over(root_of(b));
  return dy / (1 + 1 / (w * w));
}
