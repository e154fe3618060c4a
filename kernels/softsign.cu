#include "elementwise.cuh"

// softsign(x)  = x / (1 + |x|)
// softsign'(x) = 1 / (1 + |x|)^2 = (1 - |y|)^2
// Source: torch.nn.Softsign. At +-inf this gives the limit, +-1 and slope 0, where x / (1 + |x|) would be NaN.

// |x|, held where 1 + |x| is still finite and the ratio already rounds to 1 in every type.
ELEMENTWISE T bounded_abs(T x) { return min(abs(x), T(0x1p60)); }

ELEMENTWISE T forward(T x) {
  const T a = bounded_abs(x);
  return copysign(a / (1 + a), x);
}

ELEMENTWISE T backward(T dy, T x) {
  const T d = 1 + bounded_abs(x);
  return dy / (d * d);
}

ELEMENTWISE T backward_from_output(T dy, T y) {
  const T r = 1 - abs(y);
  return dy * (r * r);
}
