#include "elementwise.cuh"

// gelu(x)  = x cdf(x) = max(x, 0) - |x| cdf(-|x|), for the cdf and pdf of the standard normal distribution
// gelu'(x) = cdf(x) + x pdf(x)
// Source: torch.nn.GELU; Hendrycks and Gimpel, Gaussian Error Linear Units (2016). x (1 + erf(x / sqrt(2))) / 2 loses the
// left tail; this keeps it, down to the limit -0 at -inf.

ELEMENTWISE T forward(T x) { return right_part(x) - times_normal_tail(folded(x)); }

ELEMENTWISE T backward(T dy, T x) {
  const T left = times_normal_tail_slope(folded(x));  // the slope at -|x|; at |x| it is 1 - left
  return dy * select(x < 0, left, 1 - left);
}
