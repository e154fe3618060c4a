#include "elementwise.cuh"

// elu(x)  = x for x > 0, else alpha * (exp(x) - 1)
// elu'(x) = 1 for x > 0, else alpha * exp(x) = y + alpha (alpha at the kink)
// Source: torch.nn.ELU. The slope from y needs alpha > 0; a y that was rounded beyond -alpha has none.

ELEMENTWISE T forward(T x, Number<T> alpha) { return select(x > 0, x, alpha * expm1(x)); }

ELEMENTWISE T backward(T dy, T x, Number<T> alpha) { return select(x > 0, dy, dy * (alpha * exp(x))); }

ELEMENTWISE T backward_from_output(T dy, T y, Number<T> alpha) { return select(y > 0, dy, dy * max(y + alpha, 0)); }
