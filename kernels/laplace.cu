#include "elementwise.cuh"

// laplace(x)  = cdf(z) with z = (x - mu) / sigma, for the cdf and pdf of the standard normal distribution
// laplace'(x) = pdf(z) / sigma
// Source: Ma et al., Mega (2022); transformers' laplace: (1 + erf((x - mu) / (sigma sqrt(2)))) / 2. For sigma > 0.

// z, held where the cdf is 0 or 1 in every type.
ELEMENTWISE T held(T x, T mu, T sigma) { return clamp(x, mu - 40 * sigma, mu + 40 * sigma); }

ELEMENTWISE T forward(T x, T mu, T sigma) {
  // z + low: the cdf's left tail turns absolute errors of z into relative ones, so what rounding takes is kept.
  const T c = held(x, mu, sigma), d = c - mu, b = d - c, d_low = (c - (d - b)) - (mu + b);
  const T inverse = 1 / sigma, z = d * inverse;
  const T low = fma(d_low, inverse, fma(d, inverse, -z)) + z * fma(-inverse, sigma, 1);
  return normal_cdf(z, low);
}

ELEMENTWISE T backward(T dy, T x, T mu, T sigma) {
  const T inverse = 1 / sigma;
  return dy * (normal_pdf((held(x, mu, sigma) - mu) * inverse) * inverse);
}
