#include "elementwise.cuh"

// softshrink(x)  = x - clamp(x, -lambd, lambd)
// softshrink'(x) = 1 for |x| > lambd, else 0 (0 at both kinks, 1 for NaN)
// Source: torch.nn.Softshrink.

ELEMENTWISE T forward(T x, Number<T> lambd) { return x - clamp(x, -lambd, lambd); }

ELEMENTWISE bool keeps(T x, Number<T> lambd) { return !(abs(x) <= lambd); }

ELEMENTWISE T backward_from_bit(T dy, bool outside, Number<T>) { return outside ? dy : 0; }
