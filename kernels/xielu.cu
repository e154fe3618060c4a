#include "elementwise.cuh"

// xielu(x)  = p x^2 + beta x                                    for x > 0
//             (n + beta) (exp(min(x, eps)) - 1 - x) + beta x    else, with p = softplus(alpha_p), n = softplus(alpha_n)
// xielu'(x) = 2 p x + beta for x > 0, (n + beta) (exp(x) - 1) + beta for x <= eps, and -n between
// Source: transformers' XIELUActivation, whose autograd has that -n too, at 0 as well; Huang and Schlag, Deriving Activation
// Functions Using Integration (2024).

// Once for each call: below, alpha_p and alpha_n are p and n.
ELEMENTWISE void prepare(Channel<T>& alpha_p, Channel<T>& alpha_n, Channel<T>&, Channel<T>&) {
  alpha_p = softplus(alpha_p);
  alpha_n = softplus(alpha_n);
}

// With the x's put together, the left side loses less where it crosses 0, and -inf gives inf, the limit.
ELEMENTWISE T forward(T x, Channel<T> alpha_p, Channel<T> alpha_n, Channel<T> beta, Channel<T> eps) {
  return select(x > 0, x * fma(alpha_p, x, beta), fma(alpha_n + beta, expm1(min(x, eps)), -alpha_n * x));
}

// beta and eps have no gradient.
ELEMENTWISE Many<T, 3> backward(T dy, T x, Channel<T> alpha_p, Channel<T> alpha_n, Channel<T> beta, Channel<T> eps) {
  const T e = expm1(min(x, eps)), left = select(x > eps, -alpha_n, fma(alpha_n + beta, e, beta));
  return {dy * select(x > 0, fma(alpha_p + alpha_p, x, beta), left), select(x > 0, dy * x * x, 0), select(x > 0, 0, dy * (e - x))};
}
