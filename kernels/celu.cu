#include "elementwise.cuh"

// celu(x)  = x for x > 0, else alpha * (exp(x / alpha) - 1)
// celu'(x) = 1 for x > 0, else exp(x / alpha) = y / alpha + 1 (1 at the kink)
// Source: torch.nn.CELU, for alpha > 0. A y that was rounded beyond -alpha has no slope.

// x / alpha may be too small for a T where x is not.
ELEMENTWISE T forward(T x, Number<T> alpha) { return select(x > -0x1p-100 * alpha, x, alpha * expm1(x * one_over(alpha))); }

ELEMENTWISE T backward(T dy, T x, Number<T> alpha) { return select(x > 0, dy, dy * exp(x * one_over(alpha))); }

ELEMENTWISE T backward_from_output(T dy, T y, Number<T> alpha) {
  return select(y > 0, dy, dy * max(y * one_over(alpha) + 1, 0));
}
