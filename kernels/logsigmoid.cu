#include "elementwise.cuh"

// logsigmoid(x)  = log(1 / (1 + exp(-x))) = -softplus(-x)
// logsigmoid'(x) = sigmoid(-x) = 1 - exp(y)
// Source: torch.nn.LogSigmoid.

ELEMENTWISE T forward(T x) { return -softplus(-x); }

ELEMENTWISE T backward(T dy, T x) { return dy * sigmoid(-x); }

ELEMENTWISE T backward_from_output(T dy, T y) { return dy * -expm1(y); }
