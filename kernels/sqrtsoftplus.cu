#include "elementwise.cuh"

// sqrtsoftplus(x)  = sqrt(log(1 + exp(x)))
// sqrtsoftplus'(x) = sigmoid(x) / (2 y) = (1 - exp(-y^2)) / (2 y)
// Source: transformers' sqrtsoftplus. Below x = -40 this is exp(x / 2) in every type, also where exp(x) is too small for
// it.

ELEMENTWISE T forward(T x) {
  const T h = decay(folded(x) / 2);
  return select(x < -40, h, square_root(log1p_unit(h * h) + (x < 0 ? 0 : x)));
}

ELEMENTWISE T backward(T dy, T x) {
  const T h = decay(folded(x) / 2), e = h * h;
  const T y = square_root(log1p_unit(e) + select(x < 0, 0, min(x, 0x1p100)));
  return dy * select(x < -40, h / 2, select(x < 0, e, 1) * reciprocal((1 + e) * (2 * y)));
}

ELEMENTWISE T backward_from_output(T dy, T y) { return dy * select(y < 0x1p-30, y / 2, -expm1(-y * y) / (2 * y)); }
