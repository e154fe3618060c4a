// What gated activations, act(gate) * up, have in common: gradients that neither overflow nor vanish on the way.
#pragma once

#include "elementwise.cuh"
#include "rounded.cuh"

namespace jitact {

#ifdef JITACT_UNFUSED
constexpr bool kUnfused = true;
#else
constexpr bool kUnfused = false;
#endif

// a * b * c, where one product of two may overflow or vanish that the third brings back: the larger of a and b is multiplied
// by the smallest first. Where c is the largest of all, a * b comes first. In float32, whose results are not rounded to fewer
// bits, rounded once.
template <typename T>
JITACT_INLINE T product(T a, T b, T c) {
  const bool in_order = abs(a) >= abs(b);
  const T large = select(in_order, a, b), small = select(in_order, b, a);
  const bool smallest = abs(small) <= abs(c);
  const T first = select(smallest, small, c), second = select(smallest, c, small), p = large * first, all = p * second;
  if constexpr (std::is_same_v<T, Single>) return select(abs(all) < INFINITY, fma(p, second, fma(large, first, -p) * second), all);
  else return all;
}

// times_normal_tail of math.cuh, with an error of less in float32, to which the product adds its own, and where results are
// rounded as eager's are, which of 16-bit types are of functions of float32.
template <typename T>
JITACT_INLINE T times_normal_tail_closely(T t) {
  if constexpr (std::is_same_v<T, Single> || (kUnfused && sizeof(t) == 4)) return single::times_normal_tail_closely(t.v);
  else return times_normal_tail(t);
}

// The slope of x sigmoid(alpha x), likewise.
template <typename T>
JITACT_INLINE T x_times_sigmoid_slope_closely(T x, T alpha) {
  if constexpr (std::is_same_v<T, Single>) return single::x_times_sigmoid_slope_closely(x.v, alpha.v);
  else return x_times_sigmoid_slope(x, alpha);
}

// 1 / (1 + e) for e from 0 to 1, in float32 with what rounding takes from the sum.
template <typename T>
JITACT_INLINE T one_over_one_plus(T e) {
  if constexpr (std::is_same_v<T, Single>) return single::divide_by_one_plus(1.0f, e.v);
  else return reciprocal(1 + e);
}

// The gradient by the gate: from_gate(act_::backward(into_gate(dy, up), gate), dy, up).
template <typename T>
JITACT_INLINE T into_gate(T dy, T up) {
#ifdef JITACT_UNFUSED
  return rounded(dy * up);
#else
  return 1;
#endif
}
template <typename T>
JITACT_INLINE T from_gate(T slope, T dy, T up) {
#ifdef JITACT_UNFUSED
  return slope;
#else
  return product(dy, up, slope);
#endif
}

}  // namespace jitact

using jitact::from_gate;
using jitact::into_gate;
using jitact::one_over_one_plus;
using jitact::product;
using jitact::times_normal_tail_closely;
using jitact::x_times_sigmoid_slope_closely;
