#include "weights.cuh"

// xielu(x)  = p x^2 + beta x                                    for x > 0
//             (n + beta) (exp(min(x, eps)) - 1 - x) + beta x    else, with p = softplus(alpha_p), n = softplus(alpha_n)
// xielu'(x) = 2 p x + beta for x > 0, (n + beta) (exp(x) - 1) + beta for x <= eps, and -n between
// Source: transformers' XIELUActivation, whose autograd has that -n too, at 0 as well; Huang and Schlag, Deriving Activation
// Functions Using Integration (2024).

ELEMENTWISE void prepare(T& alpha_p, T& alpha_n, T&, T&) {
  alpha_p = softplus(alpha_p);
  alpha_n = softplus(alpha_n);
}

// With the x's put together, the left side loses less where it passes 0, and -inf gives inf, the limit.
ELEMENTWISE T forward(T x, T p, T n, T beta, T eps) {
  return select(x > 0, x * fma(p, x, beta), fma(n + beta, expm1(min(x, eps)), -n * x));
}

ELEMENTWISE T backward(T dy, T x, T p, T n, T beta, T eps) {
  const T left = select(x > eps, -n, fma(n + beta, expm1(min(x, eps)), beta));
  return dy * select(x > 0, fma(p + p, x, beta), left);
}

ELEMENTWISE Gradients<T, 2> weight_gradients(T dy, T x, T, T, T, T eps) {
  return {select(x > 0, dy * x * x, 0), select(x > 0, 0, dy * (expm1(min(x, eps)) - x))};
}
