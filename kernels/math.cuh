// The functions of a kernel file, for each T: correct over the whole range of T (NaN, infinities, -0 included), free of
// branches so that the host compiler vectorises them, and as accurate as T's storage type needs.
//
//   Double   the platform's library
//   Single   a few ulp of float32
//   Narrow   relative error below 2e-5, a hundredth of an ulp of bfloat16; on the GPU by its special-function unit
#pragma once

#include "number.cuh"

namespace jitact {

namespace detail {

JITACT_INLINE float bits_to_float(uint32_t u) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(u);
#else
  float f;
  std::memcpy(&f, &u, 4);
  return f;
#endif
}

JITACT_INLINE uint32_t float_to_bits(float f) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(f);
#else
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
#endif
}

// x = n ln 2 + r with n whole and |r| <= ln(2) / 2; `power` is 2^n. x is in [-87, 88].
struct Reduced { float n, r, power; };
JITACT_INLINE Reduced reduce_by_ln2(float x) {
  // Adding 1.5 * 2^23 leaves the rounded integer in the lowest bits of the sum.
  const float shifted = fmaf(x, 1.44269504f, 12582912.0f);
  const float n = shifted - 12582912.0f;
  float r = fmaf(n, -6.93145752e-1f, x);
  r = fmaf(n, -1.42860677e-6f, r);
  return {n, r, bits_to_float((float_to_bits(shifted) << 23) + 0x3f800000u)};
}

}  // namespace detail

JITACT_INLINE Double exp(Double x) { return ::exp(x.v); }
JITACT_INLINE Single exp(Single x) { return expf(x.v); }
JITACT_INLINE Narrow exp(Narrow x) { return expf(x.v); }
JITACT_INLINE Double expm1(Double x) { return ::expm1(x.v); }
JITACT_INLINE Single expm1(Single x) { return expm1f(x.v); }
JITACT_INLINE Narrow expm1(Narrow x) { return expm1f(x.v); }

// The chain rule, once for each function.
template <typename T> JITACT_INLINE Dual<T> exp(Dual<T> x) {
  const T y = exp(x.value);
  return {y, y * x.derivative};
}
template <typename T> JITACT_INLINE Dual<T> expm1(Dual<T> x) { return {expm1(x.value), exp(x.value) * x.derivative}; }

}  // namespace jitact
