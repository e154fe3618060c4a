#include "elementwise.cuh"

// prelu(x)  = x for x > 0, else weight * x
// prelu'(x) = 1 for x > 0, else weight (at the kink, and for NaN, too); by the weight, 0 for x > 0, else x
// Source: torch.nn.PReLU; He et al., Delving Deep into Rectifiers (2015).

ELEMENTWISE T forward(T x, Channel<T> weight) { return x > 0 ? x : weight * x; }

ELEMENTWISE Many<T, 2> backward(T dy, T x, Channel<T> weight) { return {x > 0 ? dy : weight * dy, x > 0 ? 0 : dy * x}; }

ELEMENTWISE bool keeps(T x, Channel<T>) { return x > 0; }

ELEMENTWISE T backward_from_bit(T dy, bool positive, Channel<T> weight) { return positive ? dy : weight * dy; }
