// How the GPU moves elements: 16-byte vectors, what is in them, and where they are.
#pragma once

#include "dtype.h"
#include "ptx.cuh"

namespace jitact::loops {

// A 16-byte vector as it moves, and the elements in it.
struct alignas(16) Words { uint32_t w[4]; };

// How the words of a vector become elements and back. 16-bit elements go in pairs, one word at a time, because the
// hardware rounds two floats into a word in one instruction. `load` and `store` move a single element.
template <typename S> struct Storage;

template <> struct Storage<double> {
  using T = Double;
  static constexpr int size = 2;
  static __device__ __forceinline__ void widen(const Words& v, T* t) {
    for (int i = 0; i < 2; i++) t[i] = __hiloint2double(v.w[2 * i + 1], v.w[2 * i]);
  }
  static __device__ __forceinline__ void narrow(const T* t, Words& v) {
    for (int i = 0; i < 2; i++) v.w[2 * i] = __double2loint(t[i].v), v.w[2 * i + 1] = __double2hiint(t[i].v);
  }
  static __device__ __forceinline__ T load(const double* p) { return *p; }
  static __device__ __forceinline__ void store(double* p, T t) { *p = t.v; }
};

template <> struct Storage<float> {
  using T = Single;
  static constexpr int size = 4;
  static __device__ __forceinline__ void widen(const Words& v, T* t) {
    for (int i = 0; i < 4; i++) t[i] = __uint_as_float(v.w[i]);
  }
  static __device__ __forceinline__ void narrow(const T* t, Words& v) {
    for (int i = 0; i < 4; i++) v.w[i] = __float_as_uint(t[i].v);
  }
  static __device__ __forceinline__ T load(const float* p) { return *p; }
  static __device__ __forceinline__ void store(float* p, T t) { *p = t.v; }
};

template <typename S> struct Storage16 {
  using T = Narrow;
  static constexpr int size = 8;
  static __device__ __forceinline__ void widen(const Words& v, T* t) {
    for (int i = 0; i < 4; i++) Storage<S>::widen_pair(v.w[i], t[2 * i], t[2 * i + 1]);
  }
  static __device__ __forceinline__ void narrow(const T* t, Words& v) {
    for (int i = 0; i < 4; i++) v.w[i] = Storage<S>::narrow_pair(t[2 * i], t[2 * i + 1]);
  }
  static __device__ __forceinline__ T load(const S* p) {
    T low, high;
    Storage<S>::widen_pair(p->bits, low, high);
    return low;
  }
  static __device__ __forceinline__ void store(S* p, T t) { p->bits = uint16_t(Storage<S>::narrow_pair(t, T(0))); }
};

template <> struct Storage<Half> : Storage16<Half> {
  static __device__ __forceinline__ void widen_pair(uint32_t word, T& low, T& high) { ptx::widen_half(word, low.v, high.v); }
  static __device__ __forceinline__ uint32_t narrow_pair(T low, T high) { return ptx::narrow_half(low.v, high.v); }
};

template <> struct Storage<Bfloat16> : Storage16<Bfloat16> {
  static __device__ __forceinline__ void widen_pair(uint32_t word, T& low, T& high) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
  }
  static __device__ __forceinline__ uint32_t narrow_pair(T low, T high) { return ptx::narrow_bfloat16(low.v, high.v); }
};

JITACT_INLINE bool on_16_bytes(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Division of 0 <= n < 2^63 by a constant 0 < d <= 2^62 in one multiplication (Granlund and Montgomery, Division by
// Invariant Integers using Multiplication, 1994).
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(int64_t d);
  __device__ __forceinline__ int64_t divide(int64_t n) const { return factor_ ? divide_by_many(n) : n; }
  // The same for n < 2^31.
  __device__ __forceinline__ uint32_t divide_small(uint32_t n) const {
    return small_factor_ ? __umulhi(n, small_factor_) >> shift_ : n;
  }
  // The same where d > 1.
  __device__ __forceinline__ int64_t divide_by_many(int64_t n) const {
    return int64_t(__umul64hi(uint64_t(n), factor_) >> shift_);
  }

 private:
  uint64_t factor_ = 0;
  uint32_t small_factor_ = 0;
  int shift_ = -1;
};
__attribute__((noinline)) Divisor::Divisor(int64_t d) {
  if (d == 1) return;
  while (int64_t(1) << (shift_ + 1) < d) shift_++;
  factor_ = uint64_t(((unsigned __int128)1 << (64 + shift_)) / (unsigned __int128)d) + 1;
  if (shift_ < 31) small_factor_ = uint32_t((uint64_t(1) << (32 + shift_)) / uint64_t(d)) + 1;
}

}  // namespace jitact::loops
