#include "elementwise.cuh"

// laplace(x)  = cdf(z) with z = (x - mu) / sigma, for the cdf and pdf of the standard normal distribution
// laplace'(x) = pdf(z) / sigma
// Source: Ma et al., Mega (2022); transformers' laplace: (1 + erf((x - mu) / (sigma sqrt(2)))) / 2. For sigma > 0.

// x, held where the cdf is 0 in every type.
ELEMENTWISE T held(T x, T mu, T sigma) { return max(x, mu - 40 * sigma); }

ELEMENTWISE T forward(T x, T mu, T sigma) {
  // The cdf's left tail turns absolute errors of z into relative ones, so what rounding takes from it is kept for z < 0:
  // d_low from d = c - mu, where the lesser of c and -mu is then the greater in magnitude, and the rest from the division.
  const T c = held(x, mu, sigma), d = c - mu, d_low = (min(c, -mu) - d) + max(c, -mu);
  const T inverse = reciprocal(sigma), z = d * inverse;
  const T low = fma(d_low, inverse, fma(d, inverse, -z)) + z * fma(-inverse, sigma, 1);
  return normal_cdf(z, low);
}

ELEMENTWISE T backward(T dy, T x, T mu, T sigma) {
  const T inverse = reciprocal(sigma);
  return dy * (normal_pdf((held(x, mu, sigma) - mu) * inverse) * inverse);
}
