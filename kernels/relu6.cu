#include "elementwise.cuh"

// relu6(x)  = clamp(x, 0, 6)
// relu6'(x) = 1 for 0 < x < 6, else 0 (0 at both kinks, 1 for NaN)
// Source: torch.nn.ReLU6. The lower bound is written with `<` so that -0 comes through.

ELEMENTWISE T forward(T x) { return x < 0 ? 0 : min(x, 6); }

ELEMENTWISE bool keeps(T x) { return !(x <= 0 || x >= 6); }

ELEMENTWISE T backward_from_bit(T dy, bool inside) { return inside ? dy : 0; }
