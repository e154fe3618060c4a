// The GPU loop: a thread takes one to three 16-byte vectors, a block's width apart, all loaded before any is computed. How
// many is best differs by how much there is to compute; the measurement is in docs/decisions.md.
#pragma once

#include "launch.cuh"

// For elements of 8, 4 and 2 bytes. The loader says what suits the activation; these suit one of which nothing is known.
#ifndef JITACT_FORWARD_VECTORS_8
#define JITACT_FORWARD_VECTORS_8 3
#define JITACT_FORWARD_VECTORS_4 3
#define JITACT_FORWARD_VECTORS_2 2
#define JITACT_BACKWARD_VECTORS_8 3
#define JITACT_BACKWARD_VECTORS_4 3
#define JITACT_BACKWARD_VECTORS_2 2
#endif

namespace jitact {

constexpr int kThreads = 128;

constexpr int vectors_per_thread(bool forward, int bytes) {
  if (bytes == 8) return forward ? JITACT_FORWARD_VECTORS_8 : JITACT_BACKWARD_VECTORS_8;
  if (bytes == 4) return forward ? JITACT_FORWARD_VECTORS_4 : JITACT_BACKWARD_VECTORS_4;
  return forward ? JITACT_FORWARD_VECTORS_2 : JITACT_BACKWARD_VECTORS_2;
}
template <Op op, typename S>
constexpr int kVectors = vectors_per_thread(op == Op::forward || op == Op::forward_bit, sizeof(S));

// Whether vectors are loaded through shared memory.
#ifdef JITACT_STAGED
template <Op op> constexpr bool kStaged = op == Op::forward;
#else
template <Op op> constexpr bool kStaged = false;
#endif

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
  static __device__ __forceinline__ void widen_pair(uint32_t word, T& low, T& high) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(low.v), "=f"(high.v) : "r"(word));
  }
  static __device__ __forceinline__ uint32_t narrow_pair(T low, T high) {
    uint32_t word;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high.v), "f"(low.v));
#else
    asm("{ .reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h}; }"
        : "=r"(word) : "f"(low.v), "f"(high.v));
#endif
    return word;
  }
};

template <> struct Storage<Bfloat16> : Storage16<Bfloat16> {
  static __device__ __forceinline__ void widen_pair(uint32_t word, T& low, T& high) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
  }
  static __device__ __forceinline__ uint32_t narrow_pair(T low, T high) {
#if __CUDA_ARCH__ >= 800
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high.v), "f"(low.v));
    return word;
#else
    const auto round = [](T t) {
      const uint32_t u = __float_as_uint(t.v);
      return isnan(t) ? 0x7fffu : (u + 0x7fff + (u >> 16 & 1)) >> 16;
    };
    return round(low) | round(high) << 16;
#endif
  }
};

// The bits of a vector's elements, the first of which is `at`: threads side by side put theirs together until one of them
// has a byte. All threads of a warp must call it.
template <int size>
__device__ __forceinline__ void store_bits(unsigned bits, uint8_t* mask, int64_t at, int64_t n) {
#pragma unroll
  for (int lanes = 1; lanes * size < 8; lanes *= 2) bits |= __shfl_down_sync(0xffffffffu, bits, lanes) << (lanes * size);
  if ((at & 7) == 0 && at < n) mask[at >> 3] = uint8_t(bits);
}

// From memory to shared memory, without waiting. Each call is a group of its own.
__device__ __forceinline__ void copy_async(Words* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16; cp.async.commit_group;"
               :: "r"(unsigned(__cvta_generic_to_shared(to))), "l"(from) : "memory");
#else
  *to = *static_cast<const Words*>(from);
#endif
}

// Waits for all groups but the last `left`, which the compiler must know.
__device__ __forceinline__ void wait_for_copies(int left) {
#if __CUDA_ARCH__ >= 800
  if (left == 0) asm volatile("cp.async.wait_group 0;" ::: "memory");
  if (left == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
  if (left == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
#endif
}

template <Op op, typename S>
__global__ void __launch_bounds__(kThreads)
    elementwise(const S* a, const void* b, S* out, uint8_t* mask, int64_t n, bool aligned,
                const Params<typename Storage<S>::T> params) {
  using T = typename Storage<S>::T;
  constexpr int size = Storage<S>::size, stride = kThreads * size, vectors = kVectors<op, S>;
  const int64_t block = int64_t(blockIdx.x) * (stride * vectors);
  const int64_t first = block + int(threadIdx.x) * size;  // of this thread's first vector; the next is `stride` further on
  const auto* saved = static_cast<const S*>(b);
  const auto* saved_bits = static_cast<const uint8_t*>(b);
  unsigned bits[vectors] = {};

  if (aligned && block + stride * vectors <= n) {
    // All loads are issued before the first of them is waited for.
    Words va[vectors], vb[vectors];
    [[maybe_unused]] __shared__ Words shared[kStaged<op> ? vectors : 1][kThreads];
#pragma unroll
    for (int v = 0; v < vectors; v++) {
      const int64_t at = first + v * stride;
      if constexpr (kStaged<op>) copy_async(&shared[v][threadIdx.x], a + at);
      else va[v] = *reinterpret_cast<const Words*>(a + at);
      if constexpr (reads_two(op)) vb[v] = *reinterpret_cast<const Words*>(saved + at);
      if constexpr (op == Op::backward_from_bit) bits[v] = saved_bits[at >> 3] >> (at & 7);
    }
#pragma unroll
    for (int v = 0; v < vectors; v++) {
      T ta[size], tb[size];
      if constexpr (kStaged<op>) {
        wait_for_copies(vectors - 1 - v);
        va[v] = shared[v][threadIdx.x];
      }
      Storage<S>::widen(va[v], ta);
      if constexpr (reads_two(op)) Storage<S>::widen(vb[v], tb);
#pragma unroll
      for (int i = 0; i < size; i++) {
        bool bit = bits[v] >> i & 1;
        ta[i] = element<op>(ta[i], tb[i], bit, params);
        if constexpr (op == Op::forward_bit) bits[v] |= unsigned(bit) << i;
      }
      Storage<S>::narrow(ta, va[v]);
      *reinterpret_cast<Words*>(out + first + v * stride) = va[v];
    }
  } else {
    // The tensor's last block, or memory that does not lie on 16 bytes: element by element.
#pragma unroll 1
    for (int v = 0; v < vectors; v++) {
      const int64_t at = first + v * stride;
      const int count = int(min(int64_t(size), n - at));
      if (op == Op::backward_from_bit && count > 0) bits[v] = saved_bits[at >> 3] >> (at & 7);
#pragma unroll 1
      for (int i = 0; i < count; i++) {
        const T ta = Storage<S>::load(a + at + i);
        const T tb = reads_two(op) ? Storage<S>::load(saved + at + i) : T();
        bool bit = bits[v] >> i & 1;
        Storage<S>::store(out + at + i, element<op>(ta, tb, bit, params));
        if constexpr (op == Op::forward_bit) bits[v] |= unsigned(bit) << i;
      }
    }
  }

  if constexpr (op == Op::forward_bit) {
#pragma unroll
    for (int v = 0; v < vectors; v++) store_bits<size>(bits[v], mask, first + v * stride, n);
  }
}

inline bool on_16_bytes(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Starts one of the loops above or below; `last` are the arguments that follow those that all of them have.
template <Op op, typename S, typename Loop, typename... Last>
void start(Loop loop, const Call& call, cudaStream_t stream, const Last&... last) {
  const bool aligned = on_16_bytes(call.a) && on_16_bytes(call.out) && (!reads_two(op) || on_16_bytes(call.b));
  constexpr int64_t per_block = int64_t(kThreads) * Storage<S>::size * kVectors<op, S>;
  loop<<<unsigned((call.n + per_block - 1) / per_block), kThreads, 0, stream>>>(
      static_cast<const S*>(call.a), call.b, static_cast<S*>(call.out), static_cast<uint8_t*>(call.mask), call.n, aligned,
      last..., Params<typename Storage<S>::T>(call.params));
}

const char* run_cuda(const Call& call, void* stream) {
  dispatch(call.op, [&]<Op op>() {
    dispatch_dtype(call.dtype, [&]<typename S>() { start<op, S>(elementwise<op, S>, call, static_cast<cudaStream_t>(stream)); });
  });
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace jitact
