#include "elementwise.cuh"

// laplace(x)  = cdf(z) with z = (x - mu) / sigma, for the cdf and pdf of the standard normal distribution
// laplace'(x) = pdf(z) / sigma
// Source: Ma et al., Mega (2022); transformers' laplace: (1 + erf((x - mu) / (sigma sqrt(2)))) / 2. For sigma > 0.

ELEMENTWISE T forward(T x, Number<T> mu, Number<T> sigma) { return normal_cdf(x, mu, sigma); }

ELEMENTWISE T backward(T dy, T x, Number<T> mu, Number<T> sigma) {
  const T r = one_over(sigma);
  return dy * (normal_pdf((x - mu) * r) * r);
}
