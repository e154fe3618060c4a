#include "random.cuh"

// rrelu(x)  = x for x > 0, else slope * x, with a random slope for each element
// rrelu'(x) = 1 for x > 0 and for NaN, else slope (at the kink too)
// Source: torch.nn.RReLU in training; Xu et al., Empirical Evaluation of Rectified Activations (2015).

ELEMENTWISE T forward(T x, T slope) { return x <= 0 ? slope * x : x; }

ELEMENTWISE bool keeps(T x, T) { return !(x <= 0); }

ELEMENTWISE T backward_from_bit(T dy, bool positive, T slope) { return positive ? dy : slope * dy; }
