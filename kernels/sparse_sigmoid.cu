#include "elementwise.cuh"

// sparse_sigmoid(x)  = clamp((x + 1) / 2, 0, 1)
// sparse_sigmoid'(x) = 1/2 for -1 < x < 1, else 0 (0 at both kinks, and for NaN)
// Source: jax.nn.sparse_sigmoid.

ELEMENTWISE T forward(T x) { return clamp((x + 1) / 2, 0, 1); }

ELEMENTWISE bool keeps(T x) { return x > -1 && x < 1; }

ELEMENTWISE T backward_from_bit(T dy, bool inside) { return inside ? dy / 2 : 0; }
