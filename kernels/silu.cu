#include "elementwise.cuh"

// silu(x)  = x sigmoid(x)
// silu'(x) = s + x s (1 - s) with s = sigmoid(x)
// Source: torch.nn.SiLU. The limit at -inf is -0.

// From |x| = 1000 on both are constant in every type, and 0 * inf would be NaN. Exponentials are of an x that is not clamped, so
// that one serves for both.
ELEMENTWISE T forward(T x) { return times_sigmoid(max(x, -1000), x); }

ELEMENTWISE T backward(T dy, T x) {
  const T t = min(folded(x), 1000), e = decay(folded(x)), r = reciprocal(1 + e);
  return dy * (r * select(x < 0, e * (1 - t * r), 1 + t * e * r));
}
