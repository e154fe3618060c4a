// What gated activations, act(gate) * up, have in common: gradients that neither overflow nor vanish on the way.
#pragma once

#include "elementwise.cuh"

namespace jitact {

#ifdef JITACT_UNFUSED
constexpr bool kUnfused = true;
#else
constexpr bool kUnfused = false;
template <typename T>
JITACT_INLINE T rounded(T v) { return v; }
#endif

JITACT_INLINE Double with_signs(Double magnitude, Double a, Double b, Double c) {
  const uint64_t signs = (bit_cast<uint64_t>(a.v) ^ bit_cast<uint64_t>(b.v) ^ bit_cast<uint64_t>(c.v)) & uint64_t(1) << 63;
  return bit_cast<double>(bit_cast<uint64_t>(magnitude.v) | signs);
}
template <Accuracy accuracy>
JITACT_INLINE Real<float, accuracy> with_signs(
    Real<float, accuracy> magnitude, Real<float, accuracy> a, Real<float, accuracy> b, Real<float, accuracy> c) {
  const uint32_t signs = (bit_cast<uint32_t>(a.v) ^ bit_cast<uint32_t>(b.v) ^ bit_cast<uint32_t>(c.v)) & uint32_t(1) << 31;
  return bit_cast<float>(bit_cast<uint32_t>(magnitude.v) | signs);
}

// a * b * c, where one product of two may overflow or vanish that the third brings back: the larger of a and b is multiplied
// by the smallest first. Where c is the largest of all, a * b comes first.
template <typename T>
JITACT_INLINE T product(T a, T b, T c) {
  const T high = max(abs(a), abs(b)), low = min(abs(a), abs(b)), third = abs(c);
  return with_signs((high * min(low, third)) * max(low, third), a, b, c);
}

// The gradients by gate and by up. `slope(t)` is t times the slope of act at the gate.
template <typename T, typename F>
JITACT_INLINE Many<T, 2> gradients_of_product(T dy, T act, const F& slope, T up) {
  if constexpr (kUnfused) return {slope(rounded(dy * up)), dy * rounded(act)};
  return {product(dy, up, slope(T(1))), dy * act};
}

}  // namespace jitact

using jitact::gradients_of_product;
using jitact::kUnfused;
using jitact::product;
using jitact::rounded;
