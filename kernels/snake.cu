#include "elementwise.cuh"

// snake(x)  = x + sin(alpha x)^2 / alpha
// snake'(x) = 1 + sin(2 alpha x)
// Source: Ziyin et al., Neural Networks Fail to Learn Periodic Functions and How to Fix It (2020). For alpha > 0. The
// slope at +-inf is NaN.

ELEMENTWISE T forward(T x, Number<T> alpha) { return x_plus_sin_squared(x, alpha); }

ELEMENTWISE T backward(T dy, T x, Number<T> alpha) { return dy * x_plus_sin_squared_slope(x, alpha); }
