#include "gated.cuh"

// swiglu_step(gate, up) = min(silu(gate), limit) u, with u = clamp(up, -limit, limit)
// by gate silu'(gate) u for silu(gate) <= limit, else 0; by up min(silu(gate), limit) for |up| <= limit, else 0
// Source: vLLM's swiglustep_and_mul (Step-3.5). clamped_swiglu clamps before its activation, this one after.

ELEMENTWISE T forward(T gate, T up, Number<T> limit) {
  return min(rounded(silu_::forward(gate)), limit) * clamp(up, -limit, limit);
}

ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up, Number<T> limit) {
  const T act = rounded(silu_::forward(gate)), u = clamp(up, -limit, limit);
  const T by_gate = from_gate(silu_::backward(into_gate(dy, u), gate), dy, u), by_up = dy * min(act, limit);
  return {select(act > limit, 0, by_gate), select(abs(up) > limit, 0, by_up)};
}
