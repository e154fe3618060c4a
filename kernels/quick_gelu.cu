#include "elementwise.cuh"

// quick_gelu(x)  = x sigmoid(1.702 x)
// quick_gelu'(x) = s + 1.702 x s (1 - s) with s = sigmoid(1.702 x)
// Source: Hendrycks and Gimpel, Gaussian Error Linear Units (2016); transformers' quick_gelu. The limit at -inf is -0.

ELEMENTWISE T forward(T x) { return x_times_sigmoid(x, 1.702); }

ELEMENTWISE T backward(T dy, T x) { return dy * x_times_sigmoid_slope(x, T(1.702)); }
