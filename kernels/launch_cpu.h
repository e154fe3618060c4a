// The CPU loop: blocks that stay in the first-level cache, widened, computed and narrowed by loops that the compiler
// vectorises. Bytes that will not fit a cache are written past it, which saves reading each line before overwriting it.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "launch.cuh"
#include "torch_abi.h"

namespace jitact {

constexpr int64_t kBlock = 1024;                   // elements; a multiple of 8, so that no mask byte is shared
constexpr int64_t kLanes = 64;                     // elements; no vector is longer
constexpr int64_t kGrain = 32;                     // blocks that are worth a thread
constexpr int64_t kLargeBytes = int64_t(8) << 20;  // outputs from here on get huge pages and are written past the cache


using Bytes32 = long long __attribute__((vector_size(32)));

inline int64_t bytes_of(const Call& call) {
  return call.n * (call.dtype == Dtype::f64 ? 8 : call.dtype == Dtype::f32 ? 4 : 2);
}
// In place, the output is in the cache already when it is written.
inline bool is_large_output(const Call& call) { return call.out != call.a && bytes_of(call) >= kLargeBytes; }

inline float as_float(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
inline uint32_t as_bits(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }

template <typename S> struct Storage;

template <> struct Storage<double> {
  using T = Double;
  static void widen(const double* s, T* t, int64_t n) {
    for (int64_t i = 0; i < n; i++) t[i].v = s[i];
  }
  static void narrow(const T* t, double* s, int64_t n) {
    for (int64_t i = 0; i < n; i++) s[i] = t[i].v;
  }
};

template <> struct Storage<float> {
  using T = Single;
  static void widen(const float* s, T* t, int64_t n) {
    for (int64_t i = 0; i < n; i++) t[i].v = s[i];
  }
  static void narrow(const T* t, float* s, int64_t n) {
    for (int64_t i = 0; i < n; i++) s[i] = t[i].v;
  }
};

template <> struct Storage<Bfloat16> {
  using T = Narrow;
  static void widen(const Bfloat16* s, T* t, int64_t n) {
    for (int64_t i = 0; i < n; i++) t[i].v = as_float(uint32_t(s[i].bits) << 16);
  }
  static void narrow(const T* t, Bfloat16* s, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
      const uint32_t u = as_bits(t[i].v);
      const uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
      s[i].bits = uint16_t(t[i].v != t[i].v ? 0x7fc0 : rounded);
    }
  }
};

template <> struct Storage<Half> {
  using T = Narrow;
  static void widen(const Half* s, T* t, int64_t n) {
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8) {
      Bytes32 wide;
      asm("vcvtph2ps %1, %0" : "=x"(wide) : "m"(*reinterpret_cast<const char(*)[16]>(s + i)));
      std::memcpy(&t[i].v, &wide, 32);
    }
#endif
    for (; i < n; i++) t[i].v = widen_one(s[i].bits);
  }
  static void narrow(const T* t, Half* s, int64_t n) {
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8) {
      Bytes32 wide;
      std::memcpy(&wide, &t[i].v, 32);
      asm("vcvtps2ph $0, %1, %0" : "=m"(*reinterpret_cast<char(*)[16]>(s + i)) : "x"(wide));  // $0: to nearest even
    }
#endif
    for (; i < n; i++) s[i].bits = narrow_one(t[i].v);
  }

 private:
  // Exponent and mantissa moved into a float's place and scaled by 2^112, the difference of the exponents' biases.
  static float widen_one(uint16_t h) {
    const uint32_t magnitude = h & 0x7fff;
    const float f = magnitude >= 0x7c00 ? as_float(magnitude << 13 | 0x7f800000) : as_float(magnitude << 13) * 0x1p112f;
    return as_float(as_bits(f) | uint32_t(h & 0x8000) << 16);
  }
  static uint16_t narrow_one(float f) {
    const uint32_t sign = as_bits(f) >> 16 & 0x8000;
    const float magnitude = std::fabs(f);
    if (f != f) return uint16_t(sign | 0x7e00);
    if (magnitude >= 65520.0f) return uint16_t(sign | 0x7c00);
    // Below 2^-14 the result is a multiple of 2^-24: adding 1/2 makes the addition round there.
    if (magnitude < 0x1p-14f) return uint16_t(sign | (as_bits(magnitude + 0.5f) - as_bits(0.5f)));
    const uint32_t u = as_bits(magnitude);
    return uint16_t(sign | (((u + 0xfff + (u >> 13 & 1)) >> 13) - (112u << 10)));
  }
};

// Eight bytes of 0 or 1 to the bits of one byte, and back.
inline uint8_t pack(const uint8_t* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, 8);
  return uint8_t(word * 0x0102040810204080u >> 56);
}
inline void unpack(uint8_t bits, uint8_t* bytes) {
  const uint64_t spread = bits * 0x0101010101010101u & 0x8040201008040201u;
  const uint64_t word = (spread + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
  std::memcpy(bytes, &word, 8);
}

// Copies past the cache where the processor can; `to` lies on 32 bytes.
inline void stream(void* to, const void* from, int64_t bytes) {
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
#else
  std::memcpy(to, from, bytes);
#endif
}

// Orders streamed writes before what follows.
inline void stream_fence() {
#ifdef __AVX2__
  asm volatile("sfence" ::: "memory");
#endif
}

// Asks for huge pages under a large new tensor: touching it for the first time then takes a page fault for every 2 MB in
// place of 4 KB, which is where most of the time of a large output goes.
inline void prefer_huge_pages(void* p, int64_t bytes) {
  constexpr uintptr_t page = uintptr_t(2) << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(p) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(p) + bytes) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

template <Op op, typename S>
void run_blocks(const Call& call, int64_t begin, int64_t end) {
  using T = typename Storage<S>::T;
  const Params<T> params(call.params);
  const auto* a = static_cast<const S*>(call.a);
  auto* out = static_cast<S*>(call.out);
  const bool past_cache = is_large_output(call) && reinterpret_cast<uintptr_t>(call.out) % 32 == 0;
  alignas(64) T ta[kBlock], tb[kBlock];
  alignas(64) S result[kBlock];
  alignas(64) uint8_t bits[kBlock] = {};  // pack() wants 0 or 1 past the end too

  for (int64_t block = begin; block < end; block++) {
    const int64_t first = block * kBlock;
    const int64_t n = std::min(kBlock, call.n - first);
    Storage<S>::widen(a + first, ta, n);
    if constexpr (reads_two(op)) Storage<S>::widen(static_cast<const S*>(call.b) + first, tb, n);
    if constexpr (op == Op::backward_from_bit)
      for (int64_t i = 0; i < n; i += 8) unpack(static_cast<const uint8_t*>(call.b)[(first + i) / 8], bits + i);

    // Whole vectors, past the end too: every element goes through the same instructions, wherever it stands.
    const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
#pragma GCC ivdep
    for (int64_t i = 0; i < padded; i++) {
      bool bit = false;
      if constexpr (op == Op::backward_from_bit) bit = bits[i];
      ta[i] = element<op>(ta[i], reads_two(op) ? tb[i] : T(), bit, params);
      if constexpr (op == Op::forward_bit) bits[i] = bit;
    }

    if (past_cache) {
      Storage<S>::narrow(ta, result, n);
      stream(out + first, result, n * int64_t(sizeof(S)));
    } else {
      Storage<S>::narrow(ta, out + first, n);
    }
    if constexpr (op == Op::forward_bit)
      for (int64_t i = 0; i < n; i += 8) static_cast<uint8_t*>(call.mask)[(first + i) / 8] = pack(bits + i);
  }
  if (past_cache) stream_fence();
}

void run_cpu(const Call& call) {
  if (is_large_output(call)) prefer_huge_pages(call.out, bytes_of(call));
  const auto blocks = [](int64_t begin, int64_t end, void* context) {
    const Call& call = *static_cast<const Call*>(context);
    dispatch(call.op, [&]<Op op>() {
      dispatch_dtype(call.dtype, [&]<typename S>() { run_blocks<op, S>(call, begin, end); });
    });
  };
  torch_parallel_for(0, (call.n + kBlock - 1) / kBlock, kGrain, blocks, const_cast<Call*>(&call));
}

}  // namespace jitact
