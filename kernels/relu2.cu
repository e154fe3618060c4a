#include "elementwise.cuh"

// relu2(x)  = max(x, 0)^2
// relu2'(x) = 2 max(x, 0) = 2 sqrt(y)
// Source: So et al., Primer (2021); transformers' relu2.

ELEMENTWISE T forward(T x) {
  const T r = x < 0 ? 0 : x;
  return r * r;
}

ELEMENTWISE T backward(T dy, T x) { return dy * (2 * (x < 0 ? 0 : x)); }

ELEMENTWISE T backward_from_output(T dy, T y) { return dy * (2 * sqrt(y)); }
