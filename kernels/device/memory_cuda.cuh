// Loads and stores on the GPU: 16-byte vectors, the elements in them, and index arithmetic.
#pragma once

#include "dtype.h"
#include "ptx.cuh"

namespace jitact::loops {

// A 16-byte vector as loaded and stored.
struct alignas(16) Words { uint32_t w[4]; };

// Converts a whole vector to elements and back, so that it takes one load or store. `load` and `store` are for one element.
template <typename S> struct Storage;

template <typename R> struct AsItIs {
  using T = R;
  using Vector = Words;
  using S = decltype(T::v);
  static constexpr int size = 16 / sizeof(S);
  static JITACT_DEVICE void widen(const Words& v, T* t) {
    for (int i = 0; i < size; i++)
      if constexpr (sizeof(S) == 8) t[i] = __hiloint2double(v.w[2 * i + 1], v.w[2 * i]);
      else t[i] = __uint_as_float(v.w[i]);
  }
  static JITACT_DEVICE uint32_t word(const T* t, int i) {
    if constexpr (sizeof(S) == 8) return i % 2 ? __double2hiint(t[i / 2].v) : __double2loint(t[i / 2].v);
    else return __float_as_uint(t[i].v);
  }
  static JITACT_DEVICE Words narrow(const T* t) { return {word(t, 0), word(t, 1), word(t, 2), word(t, 3)}; }
  static JITACT_DEVICE T load(const S* p) { return *p; }
  static JITACT_DEVICE void store(S* p, T t) { *p = t.v; }
};
template <> struct Storage<double> : AsItIs<Double> {};
template <> struct Storage<float> : AsItIs<Single> {};

// In pairs, as one instruction rounds two floats into a word.
template <typename S, typename R> struct Storage16 {
  using T = R;
  using Vector = Words;
  static constexpr int size = 8;
  static JITACT_DEVICE void widen(const Words& v, T* t) {
    for (int i = 0; i < 4; i++) Storage<S>::widen_pair(v.w[i], t[2 * i], t[2 * i + 1]);
  }
  static JITACT_DEVICE uint32_t word(const T* t, int i) { return Storage<S>::narrow_pair(t[2 * i], t[2 * i + 1]); }
  static JITACT_DEVICE Words narrow(const T* t) { return {word(t, 0), word(t, 1), word(t, 2), word(t, 3)}; }
  static JITACT_DEVICE T load(const S* p) {
    T low, high;
    Storage<S>::widen_pair(p->bits, low, high);
    return low;
  }
  static JITACT_DEVICE void store(S* p, T t) { p->bits = uint16_t(Storage<S>::narrow_pair(t, T(0))); }
};

template <> struct Storage<Half> : Storage16<Half, Narrow> {
  static JITACT_DEVICE void widen_pair(uint32_t word, T& low, T& high) { ptx::widen_half(word, low.v, high.v); }
  static JITACT_DEVICE uint32_t narrow_pair(T low, T high) { return ptx::narrow_half(low.v, high.v); }
  static JITACT_DEVICE uint32_t max_pair(uint32_t a, uint32_t b) { return ptx::max_halves(a, b); }
  static JITACT_DEVICE uint32_t equal_pair(uint32_t a, uint32_t b) { return ptx::equal_halves(a, b); }
};

template <> struct Storage<Bfloat16> : Storage16<Bfloat16, Brain> {
  static JITACT_DEVICE void widen_pair(uint32_t word, T& low, T& high) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
  }
  static JITACT_DEVICE uint32_t narrow_pair(T low, T high) { return ptx::narrow_bfloat16(low.v, high.v); }
  static JITACT_DEVICE uint32_t max_pair(uint32_t a, uint32_t b) { return ptx::max_bfloat16s(a, b); }
  static JITACT_DEVICE uint32_t equal_pair(uint32_t a, uint32_t b) { return ptx::equal_bfloat16s(a, b); }
};

// Cuts out of two adjacent vectors of n words what begins `offset` bytes into the first; offset is less than the bytes of a vector,
// and a multiple of `unit`.
template <int unit, int n>
JITACT_DEVICE void cut(uint32_t (&to)[n], const uint32_t (&low)[n], const uint32_t (&high)[n], int offset) {
  uint32_t w[2 * n];
  JITACT_UNROLL for (int i = 0; i < n; i++) w[i] = low[i], w[n + i] = high[i];
  JITACT_UNROLL for (int step = n / 2; 4 * step >= unit && step > 0; step /= 2)
    JITACT_UNROLL for (int i = 0; i < 2 * n - step; i++) w[i] = offset & 4 * step ? w[i + step] : w[i];
  JITACT_UNROLL for (int i = 0; i < n; i++) to[i] = unit < 4 ? __funnelshift_r(w[i], w[i + 1], 8 * (offset & 3)) : w[i];
}
template <typename S>
JITACT_DEVICE Words cut(const Words& low, const Words& high, int offset) {
  Words words;
  cut<sizeof(S)>(words.w, low.w, high.w, offset);
  return words;
}

// Two adjacent aligned vectors, from which 16 bytes at `offset` are to be extracted.
template <typename S>
struct Around {
  Words low, high;
  int offset;

  JITACT_DEVICE Words words() const { return cut<S>(low, high, offset); }
};

// Both vectors hold at least one of the elements, so nothing is read outside of aligned vectors that belong to the tensor.
template <typename S>
JITACT_DEVICE Around<S> load_side_by_side(const S* p) {
  const int offset = int(reinterpret_cast<uintptr_t>(p) & 15);
  const Words* vector = reinterpret_cast<const Words*>(reinterpret_cast<const char*>(p) - offset);
  return {vector[0], vector[offset != 0], offset};
}

// Store the first n elements of a vector, or those from the n-th on, with 0 < n < 16 / size, by the fewest stores.
template <int size>
JITACT_DEVICE void store_first(Words* to, const Words& v, int n) {
  const int bytes = n * size;
  uint32_t* const words = to->w;
  if (bytes & 8) *reinterpret_cast<uint64_t*>(words) = v.w[0] | uint64_t(v.w[1]) << 32;
  if (bytes & 4) words[bytes & 8 ? 2 : 0] = bytes & 8 ? v.w[2] : v.w[0];
  if (size == 2 && bytes & 2) {
    const uint32_t low = bytes & 4 ? v.w[1] : v.w[0], high = bytes & 4 ? v.w[3] : v.w[2];
    reinterpret_cast<uint16_t*>(words)[n - 1] = uint16_t(bytes & 8 ? high : low);
  }
}
template <int size>
JITACT_DEVICE void store_last(Words* to, const Words& v, int n) {
  const int bytes = 16 - n * size;  // that are stored
  uint32_t* const words = to->w;
  if (bytes & 8) *reinterpret_cast<uint64_t*>(words + 2) = v.w[2] | uint64_t(v.w[3]) << 32;
  if (bytes & 4) words[bytes & 8 ? 1 : 3] = bytes & 8 ? v.w[1] : v.w[3];
  if (size == 2 && bytes & 2) {
    const uint32_t low = bytes & 4 ? v.w[0] : v.w[1], high = bytes & 4 ? v.w[2] : v.w[3];
    reinterpret_cast<uint16_t*>(words)[n] = uint16_t((bytes & 8 ? low : high) >> 16);
  }
}

// Every second element of two adjacent vectors, from the first on, or from the second on if `odd`.
template <typename S>
JITACT_DEVICE Words every_second(const Words& low, const Words& high, bool odd) {
  Words picked;
  JITACT_UNROLL for (int i = 0; i < 4; i++) {
    if constexpr (sizeof(S) == 2) {
      const Words& from = i < 2 ? low : high;
      picked.w[i] = __byte_perm(from.w[2 * (i % 2)], from.w[2 * (i % 2) + 1], odd ? 0x7632 : 0x5410);
    } else {
      constexpr int words = sizeof(S) / 4;  // of an element
      const Words& from = i < 2 ? low : high;
      const int first = words == 1 ? 2 * (i % 2) : i % 2;
      picked.w[i] = odd ? from.w[first + words] : from.w[first];
    }
  }
  return picked;
}

// Interleaves the elements of `a` and `b`, b's first if `swapped`; returns the first or the second vector of the result.
template <typename S, bool second_half>
JITACT_DEVICE Words alternate(const Words& a, const Words& b, bool swapped) {
  Words both;
  JITACT_UNROLL for (int i = 0; i < 4; i++) {
    constexpr int skipped = second_half ? 2 : 0;  // words
    if constexpr (sizeof(S) == 2) {
      const int from = i / 2 + skipped, low = swapped ? 0x1054 : 0x5410, high = swapped ? 0x3276 : 0x7632;
      both.w[i] = __byte_perm(a.w[from], b.w[from], i % 2 ? high : low);
    } else {
      constexpr int words = sizeof(S) / 4;
      const int from = (words == 1 ? i / 2 : i % 2) + skipped;
      const bool of_b = i / words % 2;
      both.w[i] = of_b != swapped ? b.w[from] : a.w[from];
    }
  }
  return both;
}

JITACT_INLINE bool on_16_bytes(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Division of 0 <= n < 2^63 by a constant 0 < d <= 2^62 in one multiplication (Granlund and Montgomery, Division by
// Invariant Integers using Multiplication, 1994).
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(int64_t d);
  JITACT_DEVICE int64_t divide(int64_t n) const { return factor_ ? divide_by_many(n) : n; }
  // The same for n < 2^31.
  JITACT_DEVICE uint32_t divide_small(uint32_t n) const {
    return small_factor_ ? __umulhi(n, small_factor_) >> shift_ : n;
  }
  // The same for d > 1. For d = 1 they return 0, which is right where there is a single element.
  JITACT_DEVICE uint32_t divide_small_by_many(uint32_t n) const { return __umulhi(n, small_factor_) >> shift_; }
  JITACT_DEVICE int64_t divide_by_many(int64_t n) const {
    return int64_t(__umul64hi(uint64_t(n), factor_) >> shift_);
  }

 private:
  uint64_t factor_ = 0;
  uint32_t small_factor_ = 0;
  int shift_ = 0;
};
inline __attribute__((noinline)) Divisor::Divisor(int64_t d) {
  if (d == 1) return;
  while (int64_t(2) << shift_ < d) shift_++;
  factor_ = uint64_t(((unsigned __int128)1 << (64 + shift_)) / (unsigned __int128)d) + 1;
  if (shift_ < 31) small_factor_ = uint32_t((uint64_t(1) << (32 + shift_)) / uint64_t(d)) + 1;
}

}  // namespace jitact::loops
