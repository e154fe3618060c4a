// The CPU loop: blocks that stay in the first-level cache, computed by loops that the compiler vectorises. Outputs in memory
// that was never touched are written past the cache, which saves reading each line before overwriting it.
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
// Outputs from here on get huge pages and are written past the cache: glibc maps memory anew for each, where smaller ones
// get what others gave back.
constexpr int64_t kLargeBytes = int64_t(32) << 20;

using Bytes32 = long long __attribute__((vector_size(32)));

inline int64_t bytes_of(const Call& call) {
  return call.n * (call.dtype == Dtype::f64 ? 8 : call.dtype == Dtype::f32 ? 4 : 2);
}
// In place, the output is in the cache already when it is written.
inline bool is_large_output(const Call& call) { return call.out != call.a && bytes_of(call) >= kLargeBytes; }

// Elements as they lie in memory and as they are computed.
template <typename S> struct Storage;

template <typename Number> struct AsItIs {
  using T = Number;
  using S = typename T::Value;
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
  using T = Narrow;
  static void widen(const Bfloat16* s, T* t, int64_t n) {
    for (int64_t i = 0; i < n; i++) t[i].v = single::from_bits(uint32_t(s[i].bits) << 16);
  }
  static void narrow(const T* t, Bfloat16* s, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
      const uint32_t u = single::to_bits(t[i].v);
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
    for (; i + kWide <= n; i += kWide) {
      Wide wide;
      asm("vcvtph2ps %1, %0" : "=v"(wide) : "m"(*reinterpret_cast<const char(*)[2 * kWide]>(s + i)));
      std::memcpy(&t[i].v, &wide, sizeof(wide));
    }
#endif
    for (; i < n; i++) t[i].v = widen_one(s[i].bits);
  }
  static void narrow(const T* t, Half* s, int64_t n) {
    int64_t i = 0;
#ifdef __F16C__
    for (; i + kWide <= n; i += kWide) {
      Wide wide;
      std::memcpy(&wide, &t[i].v, sizeof(wide));
      asm("vcvtps2ph $0, %1, %0" : "=m"(*reinterpret_cast<char(*)[2 * kWide]>(s + i)) : "v"(wide));  // $0: to nearest even
    }
#endif
    for (; i < n; i++) s[i].bits = narrow_one(t[i].v);
  }

 private:
#ifdef __AVX512F__
  using Wide = long long __attribute__((vector_size(64)));
#else
  using Wide = Bytes32;
#endif
  static constexpr int64_t kWide = sizeof(Wide) / 4;  // elements

  // Exponent and mantissa moved into a float's place and scaled by 2^112, the difference of the exponents' biases.
  static float widen_one(uint16_t h) {
    const uint32_t magnitude = h & 0x7fff;
    const uint32_t u = magnitude << 13;
    const float f = magnitude >= 0x7c00 ? single::from_bits(u | 0x7f800000) : single::from_bits(u) * 0x1p112f;
    return single::from_bits(single::to_bits(f) | uint32_t(h & 0x8000) << 16);
  }
  static uint16_t narrow_one(float f) {
    const uint32_t sign = single::to_bits(f) >> 16 & 0x8000;
    const float magnitude = std::fabs(f);
    if (f != f) return uint16_t(sign | 0x7e00);
    if (magnitude >= 65520.0f) return uint16_t(sign | 0x7c00);
    // Below 2^-14 the result is a multiple of 2^-24: adding 1/2 makes the addition round there.
    if (magnitude < 0x1p-14f) return uint16_t(sign | (single::to_bits(magnitude + 0.5f) - single::to_bits(0.5f)));
    const uint32_t u = single::to_bits(magnitude);
    return uint16_t(sign | (((u + 0xfff + (u >> 13 & 1)) >> 13) - (112u << 10)));
  }
};

// n bytes of 0 or 1 to as many bits, and back. The bytes go on, with whatever values, to a multiple of 32.
inline void pack(const uint8_t* bytes, uint8_t* bits, int64_t n) {
  int64_t i = 0;
#ifdef __AVX2__
  for (; i + 32 <= n; i += 32) {
    Bytes32 vector;
    uint32_t word;
    std::memcpy(&vector, bytes + i, 32);
    vector <<= 7;
    asm("vpmovmskb %1, %0" : "=r"(word) : "x"(vector));
    std::memcpy(bits + i / 8, &word, 4);
  }
#endif
  for (; i < n; i += 8) {
    uint64_t word;
    std::memcpy(&word, bytes + i, 8);
    bits[i / 8] = uint8_t((word & 0x0101010101010101u) * 0x0102040810204080u >> 56);
  }
}
inline void unpack(const uint8_t* bits, uint8_t* bytes, int64_t n) {
  int64_t i = 0;
#ifdef __AVX2__
  const Bytes32 places = {0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303};
  const long long each = int64_t(0x8040201008040201u);
  const Bytes32 bit = {each, each, each, each};
  for (; i + 32 <= n; i += 32) {
    uint32_t word;
    std::memcpy(&word, bits + i / 8, 4);
    Bytes32 vector;
    asm("vmovd %1, %x0\n\tvpbroadcastd %x0, %0" : "=x"(vector) : "r"(word));
    asm("vpshufb %2, %1, %0" : "=x"(vector) : "x"(vector), "x"(places));
    vector &= bit;
    asm("vpcmpeqb %2, %1, %0" : "=x"(vector) : "x"(vector), "x"(bit));
    std::memcpy(bytes + i, &vector, 32);
  }
#endif
  for (; i < n; i += 8) {
    const uint64_t spread = bits[i / 8] * 0x0101010101010101u & 0x8040201008040201u;
    const uint64_t word = (spread + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
    std::memcpy(bytes + i, &word, 8);
  }
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

// Computes up to kBlock elements at a time.
template <Op op, typename S>
class Block {
 public:
  explicit Block(const double* params) : params_(params) {}

  // n elements; where n is no multiple of kLanes, some more past the end of all that is read and written: each element goes
  // through the same instructions, wherever it stands. `bits` are read or written as bytes.
  void run(const S* a, const S* b, S* out, uint8_t* bits, int64_t n) {
    const int64_t padded = (n + kLanes - 1) & -kLanes;  // which tells the compiler that no single ones are left
    if constexpr (kSame) {
#pragma GCC ivdep
      for (int64_t i = 0; i < padded; i++) {
        bool bit = op == Op::backward_from_bit && bits[i];
        out[i] = element<op>(T(a[i]), reads_two(op) ? T(b[i]) : T(), bit, params_).v;
        if constexpr (op == Op::forward_bit) bits[i] = bit;
      }
    } else {
      Storage<S>::widen(a, a_, padded);
      if constexpr (reads_two(op)) Storage<S>::widen(b, b_, padded);
#pragma GCC ivdep
      for (int64_t i = 0; i < padded; i++) {
        bool bit = op == Op::backward_from_bit && bits[i];
        a_[i] = element<op>(a_[i], reads_two(op) ? b_[i] : T(), bit, params_);
        if constexpr (op == Op::forward_bit) bits[i] = bit;
      }
      Storage<S>::narrow(a_, out, n);
    }
  }

 private:
  using T = typename Storage<S>::T;
  static constexpr bool kSame = std::is_same_v<S, typename T::Value>;  // in memory and in computation
  const Params<T> params_;
  alignas(64) T a_[kSame ? 1 : kBlock], b_[kSame ? 1 : kBlock];
};

// The n elements of a last block in `copy`, with zeros up to a multiple of kLanes.
template <typename S>
const S* with_zeros(const S* last, S* copy, int64_t n) {
  std::memcpy(copy, last, n * sizeof(S));
  std::memset(copy + n, 0, (-n & (kLanes - 1)) * sizeof(S));
  return copy;
}

template <Op op, typename S>
void run_blocks(const Call& call, int64_t begin, int64_t end) {
  Block<op, S> compute(call.params);
  const bool past_cache = is_large_output(call) && reinterpret_cast<uintptr_t>(call.out) % 32 == 0;
  alignas(64) S copy_a[kBlock], copy_b[kBlock], result[kBlock];
  alignas(64) uint8_t bits[kBlock];

  for (int64_t block = begin; block < end; block++) {
    const int64_t first = block * kBlock, n = std::min(kBlock, call.n - first);
    const auto *a = static_cast<const S*>(call.a) + first, *b = static_cast<const S*>(call.b) + (reads_two(op) ? first : 0);
    S* const out = static_cast<S*>(call.out) + first;
    if constexpr (op == Op::backward_from_bit) unpack(static_cast<const uint8_t*>(call.b) + first / 8, bits, n);
    if (n < kBlock) {
      a = with_zeros(a, copy_a, n);
      if constexpr (reads_two(op)) b = with_zeros(b, copy_b, n);
    }
    S* const to = past_cache || n < kBlock ? result : out;
    compute.run(a, b, to, bits, n);
    if (past_cache) stream(out, result, n * int64_t(sizeof(S)));
    else if (to != out) std::memcpy(out, result, n * sizeof(S));
    if constexpr (op == Op::forward_bit) pack(bits, static_cast<uint8_t*>(call.mask) + first / 8, n);
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
