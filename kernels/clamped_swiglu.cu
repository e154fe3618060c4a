#include "gated.cuh"

// clamped_swiglu(gate, up) = g sigmoid(alpha g) (u + beta), with g = min(gate, limit) and u = clamp(up, -limit, limit)
// by gate s (1 + alpha g (1 - s)) (u + beta) for gate <= limit, else 0, with s = sigmoid(alpha g);
// by up g s for |up| <= limit, else 0
// Source: gpt-oss, with alpha = 1.702, limit = 7 and beta = 1; DeepSeek-V4's, with 1, its limit and 0; swiglu, with 1, inf and 0.

#ifdef JITACT_UNFUSED
ELEMENTWISE T forward(T gate, T up, Number<T> alpha, Number<T> limit, Number<T> beta) {
  const T g = min(gate, limit), u = clamp(up, -limit, limit);
  return rounded(g * rounded(sigmoid(rounded(alpha * g)))) * rounded(u + beta);
}

ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up, Number<T> alpha, Number<T> limit, Number<T> beta) {
  const T g = min(gate, limit), w = rounded(clamp(up, -limit, limit) + beta);
  const T s = rounded(sigmoid(rounded(alpha * g))), dh = rounded(dy * w);
  const T by_gate = rounded(dh * s) + rounded(by_sigmoid<T>(rounded(dh * g), s) * alpha);
  return {select(gate > limit, 0, by_gate), select(abs(up) > limit, 0, dy * rounded(g * s))};
}
#else
ELEMENTWISE T forward(T gate, T up, Number<T> alpha, Number<T> limit, Number<T> beta) {
  return x_times_sigmoid(min(gate, limit), alpha) * (clamp(up, -limit, limit) + beta);
}

ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up, Number<T> alpha, Number<T> limit, Number<T> beta) {
  const T g = min(gate, limit), u = clamp(up, -limit, limit);
  const T by_gate = product<T>(dy, u + beta, x_times_sigmoid_slope_closely<T>(g, alpha)), by_up = dy * x_times_sigmoid(g, alpha);
  return {select(gate > limit, 0, by_gate), select(abs(up) > limit, 0, by_up)};
}
#endif
