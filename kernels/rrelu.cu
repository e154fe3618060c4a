#include "elementwise.cuh"

// rrelu(x)  = x for x > 0, else slope * x, with a random slope for each element, uniform between lower and upper
// rrelu'(x) = 1 for x > 0 and for NaN, else slope (at the kink too)
// Source: torch.nn.RReLU in training; Xu et al., Empirical Evaluation of Rectified Activations (2015).

ELEMENTWISE T forward(T x, Random<T> u, Number<T> lower, Number<T> upper) {
  return select(x <= 0, u.between(lower, upper) * x, x);
}

ELEMENTWISE bool keeps(T x, Random<T>, Number<T>, Number<T>) { return !(x <= 0); }

ELEMENTWISE T backward_from_bit(T dy, bool positive, Random<T> u, Number<T> lower, Number<T> upper) {
  return select(positive, dy, u.between(lower, upper) * dy);
}
