#include "elementwise.cuh"

// softcap(x)  = c * tanh(x / c)
// softcap'(x) = 4 e / (1 + e)^2 with e = exp(-2 |x / c|), which is (1 - y / c) (1 + y / c)
// Source: Gemma Team, Gemma 2 (2024). For c > 0. A y that was rounded beyond c has no slope.

// x / c may be too small for a T where x is not. It is mostly near 0, where tanh_beside_slope is closer than tanh in float32.
ELEMENTWISE T forward(T x, Number<T> c) { return select(abs(x) < 0x1p-100 * c, x, c * tanh_beside_slope(x * one_over(c))); }

ELEMENTWISE T backward(T dy, T x, Number<T> c) {
  const T e = decay(2 * abs(x * one_over(c))), r = reciprocal(1 + e);
  return dy * (4 * e * r * r);
}

ELEMENTWISE T backward_from_output(T dy, T y, Number<T> c) {
  const T t = y * one_over(c);
  return dy * max((1 - t) * (1 + t), 0);
}
