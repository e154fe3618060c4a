#include "elementwise.cuh"

// hardshrink(x)  = x for |x| > lambd, else 0
// hardshrink'(x) = 1 for |x| > lambd, else 0 (0 at both steps, 1 for NaN)
// Source: torch.nn.Hardshrink.

ELEMENTWISE T forward(T x, Number<T> lambd) { return abs(x) <= lambd ? 0 : x; }

ELEMENTWISE bool keeps(T x, Number<T> lambd) { return !(abs(x) <= lambd); }

ELEMENTWISE T backward_from_bit(T dy, bool outside, Number<T>) { return outside ? dy : 0; }
