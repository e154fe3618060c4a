// The GPU loop with extras: as launch_cuda.cuh's, with registers for each extra.
#pragma once

#include "launch_extras.cuh"

namespace jitact {

#ifdef JITACT_WEIGHTS

// Division of 0 <= n < 2^63 by a constant 0 < d <= 2^62 in one multiplication (Granlund and Montgomery, Division by
// Invariant Integers using Multiplication, 1994).
class Divisor {
 public:
  explicit Divisor(int64_t d) : factor_(0), shift_(-1) {
    if (d == 1) return;
    while (int64_t(1) << (shift_ + 1) < d) shift_++;
    factor_ = uint64_t(((unsigned __int128)1 << (64 + shift_)) / (unsigned __int128)d) + 1;
  }
  __device__ __forceinline__ int64_t divide(int64_t n) const {
    return factor_ ? int64_t(__umul64hi(uint64_t(n), factor_) >> shift_) : n;
  }

 private:
  uint64_t factor_;
  int shift_;
};

template <typename S>
struct Extras {
  using T = typename Storage<S>::T;
  static constexpr int size = Storage<S>::size;

  const S* weights[kExtras];
  int64_t channels, inner;
  Divisor by_inner, by_channels;

  explicit Extras(const Call& call)
      : channels(call.channels), inner(call.inner), by_inner(call.inner), by_channels(call.channels) {
    for (int k = 0; k < kExtras; k++) weights[k] = static_cast<const S*>(call.weights[k]);
  }

  // The values of a channel, as they are.
  __device__ __forceinline__ void load(int64_t channel, T (&w)[kExtras]) const {
#pragma unroll
    for (int k = 0; k < kExtras; k++) w[k] = Storage<S>::load(weights[k] + channel);
  }

  // What the elements of a block have in common: the values, prepared, if there is one channel. All threads must call it.
  struct Common { T w[kExtras]; };
  __device__ __forceinline__ Common common() const {
    Common result;
    if constexpr (kPrepares<T>) {
      // One thread prepares for all: it takes tens of instructions.
      __shared__ typename T::Value shared[kExtras];
      if (threadIdx.x == 0) {
        load(0, result.w);
        prepare_weights(result.w);
        for (int k = 0; k < kExtras; k++) shared[k] = result.w[k].v;
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kExtras; k++) result.w[k] = shared[k];
    } else {
      load(0, result.w);
    }
    return result;
  }

  // For each of the elements from `first` on.
  __device__ __forceinline__ void fill(const Common& common, int64_t first, T (&extra)[kExtras][size]) const {
#pragma unroll
    for (int k = 0; k < kExtras; k++) {
#ifdef JITACT_CHANNELS
      if (channels > 1) {
        const int64_t plane = by_inner.divide(first);
        fill_channels(weights[k], plane - by_channels.divide(plane) * channels, (plane + 1) * inner - first, extra[k]);
        continue;
      }
#endif
#pragma unroll
      for (int i = 0; i < size; i++) extra[k][i] = common.w[k];
    }
  }

#ifdef JITACT_CHANNELS
  static_assert(!kPrepares<T>, "weights with channels are read where they are used, as they are");

  // For elements the first of which are of channel c, `left` of them.
  __device__ __forceinline__ void fill_channels(const S* w, int64_t c, int64_t left, T (&extra)[size]) const {
    if (left >= size) {
      const T one = Storage<S>::load(w + c);
#pragma unroll
      for (int i = 0; i < size; i++) extra[i] = one;
    } else if (inner == 1 && c + size <= channels && reinterpret_cast<uintptr_t>(w + c) % 16 == 0) {
      Storage<S>::widen(*reinterpret_cast<const Words*>(w + c), extra);
    } else {
#pragma unroll
      for (int i = 0; i < size; i++) {
        extra[i] = Storage<S>::load(w + c);
        if (--left == 0) left = inner, c = c + 1 == channels ? 0 : c + 1;
      }
    }
  }
#endif
};

#else

// Random numbers: one call of the generator for each vector.
template <typename S>
struct Extras {
  using T = typename Storage<S>::T;
  static constexpr int size = Storage<S>::size;

  const int64_t* seed;
  Uniform<T, sizeof(S)> uniform;

  explicit Extras(const Call& call) : seed(call.seed), uniform(call.params[0], call.params[1]) {}

  struct Common { uint64_t seed; };
  __device__ __forceinline__ Common common() const { return {uint64_t(*seed)}; }

  __device__ __forceinline__ void fill(const Common& common, int64_t first, T (&extra)[1][size]) const {
    const Random16 random = philox(uint64_t(first) / size, common.seed);
#pragma unroll
    for (int i = 0; i < size; i++) {
      if constexpr (size == 2)
        extra[0][i] = uniform(uint64_t(random.w[2 * i + 1]) << 32 | random.w[2 * i]);
      else if constexpr (size == 4)
        extra[0][i] = uniform(random.w[i]);
      else
        extra[0][i] = uniform(i % 2 ? random.w[i / 2] >> 16 : random.w[i / 2] & 0xffff);
    }
  }
};

#endif

// A vector of the tensor's last block, or in memory that does not lie on 16 bytes: element by element, 0 past the end.
template <typename S>
__device__ __forceinline__ void load_some(const S* from, int64_t at, int64_t n, typename Storage<S>::T* t) {
#pragma unroll
  for (int i = 0; i < Storage<S>::size; i++) t[i] = at + i < n ? Storage<S>::load(from + at + i) : 0;
}
template <typename S>
__device__ __forceinline__ void store_some(S* to, int64_t at, int64_t n, const typename Storage<S>::T* t) {
#pragma unroll
  for (int i = 0; i < Storage<S>::size; i++)
    if (at + i < n) Storage<S>::store(to + at + i, t[i]);
}

template <Op op, typename S>
__global__ void __launch_bounds__(kThreads)
    elementwise_with_extras(const S* a, const void* b, S* out, uint8_t* mask, int64_t n, bool aligned, const Extras<S> extras,
                            const Params<typename Storage<S>::T> params) {
  using T = typename Storage<S>::T;
  constexpr int size = Storage<S>::size, stride = kThreads * size, vectors = kVectors<op, S>;
  const int64_t block = int64_t(blockIdx.x) * (stride * vectors);
  const int64_t first = block + int(threadIdx.x) * size;  // of this thread's first vector; the next is `stride` further on
  const auto* saved = static_cast<const S*>(b);
  const bool whole = aligned && block + stride * vectors <= n;
  unsigned bits[vectors] = {};
  Words va[vectors], vb[vectors];

  // All loads are issued before the first of them is waited for.
#pragma unroll
  for (int v = 0; v < vectors; v++) {
    const int64_t at = first + v * stride;
    if (whole) {
      va[v] = *reinterpret_cast<const Words*>(a + at);
      if constexpr (reads_two(op)) vb[v] = *reinterpret_cast<const Words*>(saved + at);
    }
    if (op == Op::backward_from_bit && at < n) bits[v] = static_cast<const uint8_t*>(b)[at >> 3] >> (at & 7);
  }
  const auto common = extras.common();

#pragma unroll
  for (int v = 0; v < vectors; v++) {
    const int64_t at = first + v * stride;
    T ta[size], tb[size], extra[kExtras][size];
    extras.fill(common, at, extra);
    if (whole) {
      Storage<S>::widen(va[v], ta);
      if constexpr (reads_two(op)) Storage<S>::widen(vb[v], tb);
    } else {
      load_some<S>(a, at, n, ta);
      if constexpr (reads_two(op)) load_some<S>(saved, at, n, tb);
    }
#pragma unroll
    for (int i = 0; i < size; i++) {
      bool bit = bits[v] >> i & 1;
      ta[i] = element_with<op>(ta[i], tb[i], bit, [&](size_t k) { return extra[k][i]; }, params);
      if constexpr (op == Op::forward_bit) bits[v] |= unsigned(bit) << i;
    }
    if (whole) {
      Storage<S>::narrow(ta, va[v]);
      *reinterpret_cast<Words*>(out + at) = va[v];
    } else {
      store_some<S>(out, at, n, ta);
    }
    if constexpr (op == Op::forward_bit) store_bits<size>(bits[v], mask, at, n);
  }
}

}  // namespace jitact

#ifdef JITACT_WEIGHTS
#include "launch_weights_cuda.cuh"
#endif

namespace jitact {

const char* run_cuda_with_extras(const Call& call, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
#ifdef JITACT_WEIGHTS
  if (call.op == Op::backward_weights) {
    dispatch_dtype(call.dtype, [&]<typename S>() { launch_backward_weights<S>(call, s); });
  }
#endif
  dispatch_with_extras(call.op, [&]<Op op>() {
    dispatch_dtype(call.dtype, [&]<typename S>() { start<op, S>(elementwise_with_extras<op, S>, call, s, Extras<S>(call)); });
  });
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace jitact
