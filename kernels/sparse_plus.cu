#include "elementwise.cuh"

// sparse_plus(x)  = 0 for x <= -1, (x + 1)^2 / 4 for x < 1, else x
// sparse_plus'(x) = clamp((x + 1) / 2, 0, 1)
// Source: jax.nn.sparse_plus.

ELEMENTWISE T forward(T x) {
  const T r = max(x, -1) + 1;
  return select(x < 1, r * r / 4, x);
}

ELEMENTWISE T backward(T dy, T x) { return dy * clamp((x + 1) / 2, 0, 1); }
