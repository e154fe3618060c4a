// Loads and stores on the CPU: conversion of blocks, and non-temporal stores where they pay off.
#pragma once

#include <sys/mman.h>

#include <cstring>

#include "dtype.h"
#include "math_single.cuh"

namespace jitact::loops {

// From this size on, outputs get huge pages and, with AVX2, non-temporal stores: glibc maps new memory for each of them, while
// smaller ones reuse freed memory.
constexpr int64_t kLargeBytes = int64_t(32) << 20;
#ifdef __AVX2__
constexpr bool kStreams = true;
#else
constexpr bool kStreams = false;
#endif

using Bytes32 = long long __attribute__((vector_size(32)));

// Conversion between elements in memory and those computed, by units as wide as a computed value: nothing moves between lanes.
template <typename S> struct Storage;

template <typename R> struct AsItIs {
  using T = R;
  using S = typename T::Value;
  using Unit = S;
  static constexpr int kParts = 1;  // elements of a unit, or 0 if elements are converted a block at a time
  template <int> static JITACT_INLINE S widened(S unit) { return unit; }
  template <int> static JITACT_INLINE void narrow_into(S& unit, S value) { unit = value; }
  static void widen(const S* s, T* t, int64_t n) {
    for (int64_t i = 0; i < n; i++) t[i].v = s[i];
  }
  static void narrow(const T* t, S* s, int64_t n) {
    for (int64_t i = 0; i < n; i++) s[i] = t[i].v;
  }
};
template <> struct Storage<double> : AsItIs<Double> {};
template <> struct Storage<float> : AsItIs<Single> {};

template <> struct Storage<Bfloat16> {
  using T = Brain;
  using Unit [[gnu::may_alias, gnu::aligned(2)]] = uint32_t;  // two elements
  static constexpr int kParts = 2;
  template <int k> static JITACT_INLINE float widened(uint32_t unit) {
    return single::from_bits(k == 0 ? unit << 16 : unit & 0xffff0000);
  }
  template <int k, typename U> static JITACT_INLINE void narrow_into(U& unit, float value) {
    const uint32_t u = single::to_bits(value), rounded = value != value ? 0x7fc00000 : u + 0x7fff + (u >> 16 & 1);
    unit = k == 0 ? rounded >> 16 : unit | (rounded & 0xffff0000);
  }
  static void widen(const Bfloat16* s, T* t, int64_t n) {
    for (int64_t i = 0; i < n; i++) t[i].v = widened<0>(s[i].bits);
  }
  static void narrow(const T* t, Bfloat16* s, int64_t n) {
    for (int64_t i = 0; i < n; i++) narrow_into<0>(s[i].bits, t[i].v);
  }
};

template <> struct Storage<Half> {
  using T = Narrow;
  static constexpr int kParts = 0;
  static void widen(const Half* s, T* t, int64_t n) {
#ifdef __F16C__
    int64_t i = 0;
    for (; i + kWide <= n; i += kWide) {
      Wide wide;
      asm("vcvtph2ps %1, %0" : "=v"(wide) : "m"(*reinterpret_cast<const char(*)[2 * kWide]>(s + i)));
      std::memcpy(&t[i].v, &wide, sizeof(wide));
    }
    for (; i < n; i++) t[i].v = widen_one(s[i].bits);
#else
    for (int64_t i = 0; i < n; i++) t[i].v = widen_one(s[i].bits);
#endif
  }
  static void narrow(const T* t, Half* s, int64_t n) {
#ifdef __F16C__
    int64_t i = 0;
    for (; i + kWide <= n; i += kWide) {
      Wide wide;
      std::memcpy(&wide, &t[i].v, sizeof(wide));
      asm("vcvtps2ph $0, %1, %0" : "=m"(*reinterpret_cast<char(*)[2 * kWide]>(s + i)) : "v"(wide));  // $0: to nearest even
    }
    for (; i < n; i++) s[i].bits = narrow_one(t[i].v);
#else
    for (int64_t i = 0; i < n; i++) s[i].bits = narrow_one(t[i].v);
#endif
  }

#ifdef __AVX512F__
  using Wide = long long __attribute__((vector_size(64)));
#else
  using Wide = Bytes32;
#endif
  static constexpr int64_t kWide = sizeof(Wide) / 4;  // elements

  // Exponent and mantissa are shifted into a float's, which is scaled by 2^112, the difference of the exponents' biases.
  static float widen_one(uint16_t h) {
    const uint32_t absolute = h & 0x7fff, u = absolute << 13;
    const float f = absolute >= 0x7c00 ? single::from_bits(u | 0x7f800000) : single::from_bits(u) * 0x1p112f;
    return single::from_bits(single::to_bits(f) | uint32_t(h & 0x8000) << 16);
  }
  static uint16_t narrow_one(float f) {
    const uint32_t sign = single::to_bits(f) >> 16 & 0x8000;
    const float absolute = std::fabs(f);
    if (f != f) return uint16_t(sign | 0x7e00);
    if (absolute >= 65520.0f) return uint16_t(sign | 0x7c00);
    // Below 2^-14 the result is a multiple of 2^-24: adding 1/2 makes the addition round there.
    if (absolute < 0x1p-14f) return uint16_t(sign | (single::to_bits(absolute + 0.5f) - single::to_bits(0.5f)));
    const uint32_t u = single::to_bits(absolute);
    return uint16_t(sign | (((u + 0xfff + (u >> 13 & 1)) >> 13) - (112u << 10)));
  }
};

// Copies with non-temporal stores; `to` is aligned to 32 bytes.
inline void store_past_cache([[maybe_unused]] void* to, [[maybe_unused]] const void* from, [[maybe_unused]] int64_t bytes) {
#ifdef __AVX2__
  auto* t = static_cast<char*>(to);
  const auto* f = static_cast<const char*>(from);
  int64_t i = 0;
  for (; i + 32 <= bytes; i += 32) {
    Bytes32 vector;
    std::memcpy(&vector, f + i, 32);
    asm volatile("vmovntdq %1, %0" : "=m"(*reinterpret_cast<char(*)[32]>(t + i)) : "x"(vector));
  }
  std::memcpy(t + i, f + i, bytes - i);
#endif
}

// Orders non-temporal stores before what follows.
inline void fence() {
#ifdef __AVX2__
  asm volatile("sfence" ::: "memory");
#endif
}

// Asks for huge pages for a large new tensor: its first use then takes one page fault per 2 MB, not per 4 KB. Page faults
// are most of the time of a large output.
inline void prefer_huge_pages(void* p, int64_t bytes) {
  constexpr uintptr_t page = uintptr_t(2) << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(p) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(p) + bytes) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

// An owned array. Not from <memory>, which takes long to compile.
template <typename T>
class Array {
 public:
  explicit Array(int64_t n) : data_(new T[n]()) {}
  Array(const Array&) = delete;
  ~Array() { delete[] data_; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  T* data_;
};

}  // namespace jitact::loops
