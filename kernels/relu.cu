#include "elementwise.cuh"

// relu(x)  = max(x, 0)
// relu'(x) = 1 for x > 0, else 0 (0 at the kink)
// Source: torch.nn.ReLU. Written with `<` and `<=` so that NaN and -0 come through forward, and dy through a NaN input.

ELEMENTWISE T forward(T x) { return x < 0 ? 0 : x; }

ELEMENTWISE bool keeps(T x) { return !(x <= 0); }

ELEMENTWISE T backward_from_bit(T dy, bool positive) { return positive ? dy : 0; }
