#include "elementwise.cuh"

// softplus(x)  = log(1 + exp(beta x)) / beta, and x itself where beta x > threshold
// softplus'(x) = sigmoid(beta x) = 1 - exp(-beta y), and 1 there
// Source: torch.nn.Softplus. No threshold is too large: nothing overflows. The slope from y needs threshold >= 20: around it
// some y belong to two x, one on each side, whose slopes 1 and 1 - exp(-beta y) are one only then.

ELEMENTWISE T forward(T x, Number<T> beta, Number<T> threshold) {
  const T u = beta * x;
  return select(u > threshold, x, log1p_unit(decay(folded(u))) * one_over(beta) + (x < 0 ? 0 : x));
}

ELEMENTWISE T backward(T dy, T x, Number<T> beta, Number<T> threshold) {
  return select(beta * x > threshold, dy, dy * sigmoid(beta * x));
}

ELEMENTWISE T backward_from_output(T dy, T y, Number<T> beta, Number<T> threshold) {
  return select(beta * y > threshold, dy, dy * -expm1(-beta * y));
}
