#include "elementwise.cuh"

// hardswish(x)  = x clamp(x + 3, 0, 6) / 6
// hardswish'(x) = 0 for x <= -3, x / 3 + 1/2 for x < 3, else 1 (1 for NaN)
// Source: torch.nn.Hardswish. Written so that nothing overflows, and the limit at -inf is -0.

ELEMENTWISE T forward(T x) {
  const T c = max(x, -3);
  return select(x < 3, c * (c + 3) / 6, x);
}

ELEMENTWISE T backward(T dy, T x) { return x <= -3 ? 0 : select(x < 3, dy * ((2 * x + 3) / 6), dy); }
