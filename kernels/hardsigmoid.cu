#include "elementwise.cuh"

// hardsigmoid(x)  = clamp(x + 3, 0, 6) / 6
// hardsigmoid'(x) = 1/6 for -3 < x < 3, else 0 (0 at both kinks, and for NaN)
// Source: torch.nn.Hardsigmoid.

ELEMENTWISE T forward(T x) { return clamp(x + 3, 0, 6) / 6; }

ELEMENTWISE bool keeps(T x) { return x > -3 && x < 3; }

ELEMENTWISE T backward_from_bit(T dy, bool inside) { return inside ? dy / 6 : 0; }
