#include "elementwise.cuh"

// softplus(x)  = log(1 + exp(beta x)) / beta, and x itself where beta x > threshold
// softplus'(x) = sigmoid(beta x) = 1 - exp(-beta y), and 1 there
// Source: torch.nn.Softplus. No threshold is too large: nothing overflows.

ELEMENTWISE T forward(T x, Number<T> beta, Number<T> threshold) {
  return select(beta * x > threshold, x, softplus(beta * x) * (1 / beta));
}

ELEMENTWISE T backward(T dy, T x, Number<T> beta, Number<T> threshold) {
  return select(beta * x > threshold, dy, dy * sigmoid(beta * x));
}

ELEMENTWISE T backward_from_output(T dy, T y, Number<T> beta, Number<T> threshold) {
  return select(beta * y > threshold, dy, dy * -expm1(-beta * y));
}
