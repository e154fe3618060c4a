#include "elementwise.cuh"

// gelu_10(x)  = clamp(gelu(x), -10, 10), where only the upper bound is ever met
// gelu_10'(x) = gelu'(x) for x <= 10, else 0
// Source: transformers' gelu_10. For gelu itself see gelu.cu.

ELEMENTWISE T forward(T x) { return min((x < 0 ? T(-0.0) : x) - times_normal_tail(abs(x)), 10); }

ELEMENTWISE T backward(T dy, T x) {
  const T t = min(abs(x), 40), left = normal_tail(t) - t * normal_pdf(t);
  return select(x > 10, 0, dy * select(x < 0, left, 1 - left));
}
