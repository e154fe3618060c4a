// Functions for gated activations, act(gate) * up: gradients without overflow or underflow of intermediate products.
#pragma once

#include "elementwise.cuh"
#include "rounded.cuh"

namespace jitact {

#ifdef JITACT_UNFUSED
constexpr bool kUnfused = true;
#else
constexpr bool kUnfused = false;
#endif

// a * b * c, where the product of two may overflow or underflow though that of all three does not: the larger of a and b is
// multiplied by the smallest first; where c is the largest, a * b comes first. Single is rounded only once; 16-bit results
// do not need that.
template <typename T>
JITACT_INLINE T product(T a, T b, T c) {
  const bool in_order = abs(a) >= abs(b);
  const T large = select(in_order, a, b), small = select(in_order, b, a);
  const bool smallest = abs(small) <= abs(c);
  const T first = select(smallest, small, c), second = select(smallest, c, small), p = large * first, all = p * second;
  if constexpr (std::is_same_v<T, Single>) return select(abs(all) < INFINITY, fma(p, second, fma(large, first, -p) * second), all);
  else return all;
}

// times_normal_tail of math.cuh, more accurate in float32, as the product adds an error of its own, and in unfused builds for
// 16-bit types, whose results must round as those of eager mode's float32 functions do.
template <typename T>
JITACT_INLINE T times_normal_tail_closely(T t) {
  if constexpr (std::is_same_v<T, Single> || (kUnfused && sizeof(t) == 4)) return single::times_normal_tail_closely(t.v);
  else return times_normal_tail(t);
}

// The slope of x sigmoid(alpha x), more accurate in float32.
template <typename T>
JITACT_INLINE T x_times_sigmoid_slope_closely(T x, T alpha) {
  if constexpr (std::is_same_v<T, Single>) return single::x_times_sigmoid_slope_closely(x.v, alpha.v);
  else return x_times_sigmoid_slope(x, alpha);
}

// 1 / (1 + e) for 0 <= e <= 1; in float32, corrected for the rounding error of the sum.
template <typename T>
JITACT_INLINE T one_over_one_plus(T e) {
  if constexpr (std::is_same_v<T, Single>) return single::divide_by_one_plus(1.0f, e.v);
  else return reciprocal(1 + e);
}

// The gradient by the gate is from_gate(act_::backward(into_gate(dy, up), gate), dy, up).
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
