// rounded(v) rounds v to the tensor's dtype, as eager PyTorch does after each operation. Only in unfused builds; elsewhere
// rounded(v) is v.
#pragma once

#include "math_single.cuh"
#include "number.cuh"

namespace jitact {

#ifdef JITACT_UNFUSED
JITACT_INLINE Double rounded(Double v) { return v; }
JITACT_INLINE Single rounded(Single v) { return v; }

#ifdef __CUDA_ARCH__
JITACT_INLINE Narrow rounded(Narrow v) {
  float low, high;
  ptx::widen_half(ptx::narrow_half(v.v, 0), low, high);
  return low;
}
JITACT_INLINE Brain rounded(Brain v) { return single::from_bits(ptx::narrow_bfloat16(v.v, 0) << 16); }
#else
// The same without branches, so that the compiler vectorises it.
JITACT_INLINE Narrow rounded(Narrow v) {
  const uint32_t u = single::to_bits(v.v), magnitude = u & 0x7fffffffu;
  const float m = single::from_bits(magnitude);
  const float normal = single::from_bits((magnitude + 0xfff + (magnitude >> 13 & 1)) & ~0x1fffu);
  const float small = (m + 0.5f) - 0.5f;  // a multiple of 2^-24, the spacing below 2^-14
  const float finite = single::select(m < 0x1p-14f, small, normal);
  const float result = single::select(m < 65520.0f, finite, single::select(m == m, INFINITY, m));
  return single::from_bits(single::to_bits(result) | (u & 0x80000000u));
}
JITACT_INLINE Brain rounded(Brain v) {
  const uint32_t u = single::to_bits(v.v);
  return single::select(v.v == v.v, single::from_bits((u + 0x7fff + (u >> 16 & 1)) & 0xffff0000u), v.v);
}
#endif

template <typename T>
JITACT_INLINE Dual<T> rounded(Dual<T> v) { return {rounded(v.value), v.derivative, v.varies}; }
#else
template <typename T>
JITACT_INLINE T rounded(T v) { return v; }
#endif

// PyTorch's GPU kernels round after each operation of these slopes, while its CPU kernels compute them in float32; and its GPU
// kernels divide by a scalar by multiplying by its reciprocal.
#if defined JITACT_UNFUSED && defined __CUDA_ARCH__
template <typename T>
JITACT_INLINE T rounded_on_gpu(T v) { return rounded(v); }
template <typename T>
JITACT_INLINE T divided(T a, T b) { return a * (T(1) / b); }
#else
template <typename T>
JITACT_INLINE T rounded_on_gpu(T v) { return v; }
template <typename T>
JITACT_INLINE T divided(T a, T b) { return a / b; }
#endif
// dh times the slope of sigmoid, s (1 - s), and of tanh, 1 - t^2.
template <typename T>
JITACT_INLINE T by_sigmoid(T dh, T s) { return rounded(rounded_on_gpu(dh * rounded_on_gpu(1 - s)) * s); }
template <typename T>
JITACT_INLINE T by_tanh(T dh, T t) { return rounded(dh * rounded_on_gpu(1 - rounded_on_gpu(t * t))); }

}  // namespace jitact

using jitact::by_sigmoid;
using jitact::by_tanh;
using jitact::divided;
using jitact::rounded;
