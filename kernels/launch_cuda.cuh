// The GPU loop: one 16-byte vector per thread, no loop inside. Measured against 2, 4 and 8 vectors per thread, cache
// hints and larger blocks, this reaches the rate of a plain copy; see docs/decisions.md.
#pragma once

#include "launch.cuh"

namespace jitact {

constexpr int kThreads = 256;

// How a storage type becomes a T and back. 16-bit types go in pairs, one 32-bit word at a time, because the hardware
// rounds two floats to a pair in one instruction.
template <typename S> struct Storage;

template <> struct Storage<double> {
  using T = Double;
  static __device__ __forceinline__ void widen(const double* s, T* t) { t[0] = s[0], t[1] = s[1]; }
  static __device__ __forceinline__ void narrow(const T* t, double* s) { s[0] = t[0].v, s[1] = t[1].v; }
};

template <> struct Storage<float> {
  using T = Single;
  static __device__ __forceinline__ void widen(const float* s, T* t) { t[0] = s[0], t[1] = s[1]; }
  static __device__ __forceinline__ void narrow(const T* t, float* s) { s[0] = t[0].v, s[1] = t[1].v; }
};

struct alignas(2) Half { uint16_t bits; };
struct alignas(2) Bfloat16 { uint16_t bits; };

template <> struct Storage<Half> {
  using T = Narrow;
  static __device__ __forceinline__ void widen(const Half* s, T* t) {
    for (int i = 0; i < 2; i++) asm("cvt.f32.f16 %0, %1;" : "=f"(t[i].v) : "h"(s[i].bits));
  }
  static __device__ __forceinline__ void narrow(const T* t, Half* s) {
#if __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(t[1].v), "f"(t[0].v));
    s[0].bits = uint16_t(pair), s[1].bits = uint16_t(pair >> 16);
#else
    for (int i = 0; i < 2; i++) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(s[i].bits) : "f"(t[i].v));
#endif
  }
};

template <> struct Storage<Bfloat16> {
  using T = Narrow;
  static __device__ __forceinline__ void widen(const Bfloat16* s, T* t) {
    for (int i = 0; i < 2; i++) t[i] = __uint_as_float(uint32_t(s[i].bits) << 16);
  }
  static __device__ __forceinline__ void narrow(const T* t, Bfloat16* s) {
#if __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(t[1].v), "f"(t[0].v));
    s[0].bits = uint16_t(pair), s[1].bits = uint16_t(pair >> 16);
#else
    for (int i = 0; i < 2; i++) {
      const uint32_t u = __float_as_uint(t[i].v);
      s[i].bits = isnan(t[i]) ? 0x7fff : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
#endif
  }
};

// The elements that one thread takes.
template <typename S>
struct alignas(16) Vector {
  static constexpr int size = 16 / sizeof(S);
  S elements[size];
};

// `whole` vectors move in one instruction; the last ones of a tensor, and all of one that does not lie on 16 bytes, move
// element by element.
template <typename S>
__device__ __forceinline__ Vector<S> load(const S* p, int64_t count, bool whole) {
  if (whole) return *reinterpret_cast<const Vector<S>*>(p);
  Vector<S> v{};
#pragma unroll
  for (int i = 0; i < Vector<S>::size; i++)
    if (i < count) v.elements[i] = p[i];
  return v;
}

template <typename S>
__device__ __forceinline__ void store(S* p, const Vector<S>& v, int64_t count, bool whole) {
  if (whole) {
    *reinterpret_cast<Vector<S>*>(p) = v;
    return;
  }
#pragma unroll
  for (int i = 0; i < Vector<S>::size; i++)
    if (i < count) p[i] = v.elements[i];
}

template <Op op, typename S>
__global__ void __launch_bounds__(kThreads)
    elementwise(const S* a, const void* b, S* out, uint8_t* mask, int64_t n, bool aligned,
                const Params<typename Storage<S>::T> params) {
  using T = typename Storage<S>::T;
  constexpr int size = Vector<S>::size;
  const int64_t first = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * size;
  const int64_t count = n - first;  // elements left from here on; none or negative past the end
  const bool whole = aligned && count >= size;

  const Vector<S> va = load(a + first, count, whole);
  Vector<S> vb{};
  if constexpr (reads_two(op)) vb = load(static_cast<const S*>(b) + first, count, whole);
  unsigned bits = 0;
  if constexpr (op == Op::backward_from_bit)
    if (count > 0) bits = static_cast<const uint8_t*>(b)[first / 8] >> (first % 8);

  Vector<S> result;
#pragma unroll
  for (int i = 0; i < size; i += 2) {
    T ta[2], tb[2];
    Storage<S>::widen(va.elements + i, ta);
    Storage<S>::widen(vb.elements + i, tb);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      bool bit = bits >> (i + j) & 1;
      ta[j] = element<op>(ta[j], tb[j], bit, params);
      if constexpr (op == Op::forward_bit) bits |= unsigned(bit) << (i + j);
    }
    Storage<S>::narrow(ta, result.elements + i);
  }
  store(out + first, result, count, whole);

  if constexpr (op == Op::forward_bit) {
    // Threads side by side put their bits together until one of them has a byte.
#pragma unroll
    for (int lanes = 1; lanes * size < 8; lanes *= 2)
      bits |= __shfl_down_sync(0xffffffffu, bits, lanes) << (lanes * size);
    if (first % 8 == 0 && count > 0) mask[first / 8] = uint8_t(bits);
  }
}

template <Op op, typename S>
void launch(const Call& call, cudaStream_t stream) {
  const auto on_16_bytes = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const bool aligned = on_16_bytes(call.a) && on_16_bytes(call.out) && (!reads_two(op) || on_16_bytes(call.b));
  constexpr int64_t per_block = int64_t(kThreads) * Vector<S>::size;
  elementwise<op, S><<<unsigned((call.n + per_block - 1) / per_block), kThreads, 0, stream>>>(
      static_cast<const S*>(call.a), call.b, static_cast<S*>(call.out), static_cast<uint8_t*>(call.mask), call.n,
      aligned, Params<typename Storage<S>::T>(call.params));
}

const char* run_cuda(const Call& call, void* stream) {
  dispatch(call.op, [&]<Op op>() {
    const auto s = static_cast<cudaStream_t>(stream);
    switch (call.dtype) {
      case Dtype::f64: return launch<op, double>(call, s);
      case Dtype::f32: return launch<op, float>(call, s);
      case Dtype::f16: return launch<op, Half>(call, s);
      case Dtype::bf16: return launch<op, Bfloat16>(call, s);
    }
  });
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace jitact
