#include "elementwise.cuh"

// leaky_relu(x)  = x for x > 0, else negative_slope * x
// leaky_relu'(x) = 1 for x > 0, else negative_slope (at the kink, and for NaN, too)
// Source: torch.nn.LeakyReLU.

ELEMENTWISE T forward(T x, Number<T> negative_slope) { return x > 0 ? x : negative_slope * x; }

ELEMENTWISE bool keeps(T x, Number<T>) { return x > 0; }

ELEMENTWISE T backward_from_bit(T dy, bool positive, Number<T> negative_slope) { return positive ? dy : negative_slope * dy; }
