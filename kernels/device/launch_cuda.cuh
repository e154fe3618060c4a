// The GPU loop: a thread processes one to three 16-byte vectors, a block's width apart, and loads all before it computes. The
// best number depends on how much is computed; measurements are in docs/decisions/elementwise.md.
#pragma once

#include "launch_cuda_anywhere.cuh"
#include "reduce_cuda.cuh"
#ifdef JITACT_PART
#include "parts.cuh"
#endif

namespace jitact::loops {

template <Op op, typename S, bool dense, bool counted = false>
__global__ void __launch_bounds__(kThreads, least_blocks<op, S, dense>()) elementwise(const __grid_constant__ Launch launch) {
  using T = typename Storage<S>::T;
#ifndef JITACT_EXPORTED
  ptx::wait_for_last();
#endif
  constexpr int ins = reads(op), size = Storage<S>::size, stride = kThreads * size, vectors = vectors_of<op, S>();
  // In float32 also beside operands that are counted: the compiler had sunk loads to registers below what the values take.
  constexpr bool staged = dense && (kStaged<op> || (counted && sizeof(S) == 4 && ins == 1));
  const int64_t block = int64_t(blockIdx.x) * (stride * vectors), n = launch.n;
  const int64_t first = block + int(threadIdx.x) * size;  // this thread's first element; its next vector is `stride` further on
  const OperandsOf<counted, S> operands{launch};
  const auto numbers = launch.numbers_as<T>();

  if (launch.aligned && block + stride * vectors <= n) {
    // Whether operands are loaded before the elements. Elsewhere that takes too many registers.
    constexpr bool early = op == Op::backward ? kBroadcast == 0 : ins == 1 && !reads_bits(op);
    const auto begins = operands.begins(block);
    typename OperandsOf<counted, S>::Ready ready[vectors];
    const auto load_operands = [&](int v) {
      operands.load(ready[v], begins, int(threadIdx.x) * size + v * stride);
    };
    if constexpr (kBroadcast > 0 && early)  // first, as their addresses take longest to compute
      JITACT_UNROLL for (int v = 0; v < vectors; v++) load_operands(v);
    // All loads are issued before any of their results is used.
    Words in[ins][vectors];
    unsigned bits[vectors] = {};
    [[maybe_unused]] __shared__ Words shared[staged ? vectors : 1][ins][kThreads];
    JITACT_UNROLL for (int v = 0; v < vectors; v++) {
      const int64_t at = first + v * stride;
      if constexpr (staged) {
        JITACT_UNROLL for (int t = 0; t < ins; t++)
          ptx::copy_async(&shared[v][t][threadIdx.x], launch.at<const S, dense>(launch.read[t], at), launch.policy);
        ptx::commit_copies();
      } else if constexpr (dense) {
        JITACT_UNROLL for (int t = 0; t < ins; t++) in[t][v] = launch.load(launch.at<const S, dense>(launch.read[t], at));
      }
      if constexpr (op == Op::backward_from_bit) bits[v] = launch.mask[at >> 3] >> (at & 7);
    }
    if constexpr (!dense)
      read_rows<op, S>(launch, [&](const auto& vector) {
        JITACT_UNROLL for (int v = 0; v < vectors; v++)
          JITACT_UNROLL for (int t = 0; t < ins; t++) in[t][v] = vector(t, first + v * stride);
      });
    const auto common = operands.common();
    Random16 random[vectors][kRandom + 1];
    const auto draw = [&](int v) { operands.draw(random[v], common, first + v * stride); };
    if constexpr (kRandom > 0 && early)
      JITACT_UNROLL for (int v = 0; v < vectors; v++) draw(v);
    JITACT_UNROLL for (int v = 0; v < vectors; v++) {
      T values[ins][size], out[writes(op)][size];
      if constexpr (staged) {
        ptx::wait_for_copies(vectors - 1 - v);
        JITACT_UNROLL for (int t = 0; t < ins; t++) in[t][v] = shared[v][t][threadIdx.x];
      }
      if constexpr (!dense && reads_two(op)) separate<S>(launch.alternating_in, in[ins - 2][v], in[ins - 1][v]);
      JITACT_UNROLL for (int t = 0; t < ins; t++) Storage<S>::widen(in[t][v], values[t]);
      if constexpr (kPlain) {
        JITACT_UNROLL for (int i = 0; i < size; i++) {
          bool bit = bits[v] >> i & 1;
          out[0][i] = plain_result<op>(values[0][i], values[ins - 1][i], bit);
          if constexpr (op == Op::forward_bit) bits[v] |= bit ? 1u << i : 0;
        }
      } else {
        if constexpr (kBroadcast > 0 && !early) load_operands(v);
        auto others = operands.when_ready(common, first + v * stride, ready[v]);
        if constexpr (kRandom > 0 && !early) draw(v);
        JITACT_UNROLL for (int r = 0; r < kRandom; r++) others.random[r] = random[v][r];
        const Computation<op, S> computation{
            .launch = launch,
            .others = others,
            .numbers = numbers,
        };
        computation.elements(values, bits[v], [&](int w, int i, T result) { out[w][i] = result; });
      }
      if constexpr (kPlain && dense)
        *reinterpret_cast<Words*>(launch.at<S, dense>(launch.written[0], first + v * stride)) = Storage<S>::narrow(out[0]);
      else write_vectors<op, S, dense>(launch, out, first + v * stride);
      if constexpr (op == Op::forward_bit) store_bits<size>(bits[v], launch.mask, first + v * stride, n);
    }
  } else {
    // The last block, or unaligned memory: one by one. Consecutive threads have consecutive elements or, with bits, a vector each.
    constexpr bool with_bits = op == Op::forward_bit || op == Op::backward_from_bit;
    const auto common = operands.common();
#pragma unroll 1
    for (int v = 0; v < vectors; v++) {
      const int64_t begin = with_bits ? first + v * stride : block + v * stride + threadIdx.x;
      unsigned own = op == Op::backward_from_bit && begin < n ? launch.mask[begin >> 3] >> (begin & 7) : 0;
#pragma unroll 1
      for (int i = 0; i < size; i++) {
        const int64_t at = with_bits ? begin + i : begin + i * kThreads;
        if (at >= n) break;
        if constexpr (kPlain) {
          bool bit = own >> i & 1;
          const auto value = [&](int t) { return Storage<S>::load(launch.at<const S, dense>(launch.read[t], at)); };
          Storage<S>::store(launch.at<S, dense>(launch.written[0], at), plain_result<op>(value(0), value(ins - 1), bit));
          if constexpr (op == Op::forward_bit) own |= bit ? 1u << i : 0;
        } else {
          const auto others = operands.template from<1>(common, at);
          bool bit = own >> i & 1;
          const Computation<op, S, 1> computation{
              .launch = launch,
              .others = others,
              .numbers = numbers,
          };
          computation.template one<dense>(at, bit);
          if constexpr (op == Op::forward_bit) own |= bit ? 1u << i : 0;
        }
      }
      if constexpr (op == Op::forward_bit) store_bits<size>(own, launch.mask, begin, n);
    }
  }
}

#ifndef JITACT_EXPORTED  // which exported files define: they are shorter so
// Shared memory of a block where so many are to run on a multiprocessor; 0 if no more than those can.
template <int best>
size_t shared_of_a_block() {
  static int64_t known[gpu::kDevices];
  return size_t(gpu::of_device(known, []() -> int64_t {
           const int64_t blocks = gpu::best_for_memory(best);
           if (blocks * kThreads >= gpu::device_has(cudaDevAttrMaxThreadsPerMultiProcessor)) return 1;
           const int64_t all = gpu::device_has(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
           return all / blocks - gpu::device_has(cudaDevAttrReservedSharedMemoryPerBlock);
         })) / 128 * 128;
}
// Shared memory that a block of `elementwise` asks for and does not use, to keep others from running beside it: where threads have
// several vectors on their way, and compute the activation alone, for which fewer threads suffice; fewer yet where many vectors
// come through shared memory, all before anything is computed.
template <Op op, typename S>
size_t unused_shared(bool dense) {
  constexpr int loaded = reads(op) * vectors_of<op, S>();
  if constexpr (loaded < 2 || writes(op) > 1 || sizeof(S) == 8 || kBroadcast > 0 || kRandom > 0) return 0;
  const size_t shared = shared_of_a_block<kStaged<op> && loaded >= 4 ? 6 : 12>();
  const size_t used = kStaged<op> && dense ? loaded * kThreads * sizeof(Words) : 0;
  return shared > used ? shared - used : 0;
}
#endif

#ifdef JITACT_EXPORTED
template <auto kernel>
void start(const Launch& l, int64_t each, int, void* s) { kernel<<<(l.n + each - 1) / each, kThreads, 0, cudaStream_t(s)>>>(l); }
#else
// Starts a kernel, each of whose blocks processes so many elements.
template <auto kernel>
void start(const Launch& launch, int64_t each, size_t shared, void* stream) {
  early::launch<kernel>(unsigned((launch.n + each - 1) / each), kThreads, shared, static_cast<cudaStream_t>(stream), launch);
}
#endif

#ifdef JITACT_PART
template <int part>
const char* run_part(const Call& call, void* stream);
#if !JITACT_PART
extern "C" const char* run_cuda(const Call& call, void* stream) {
  const char* error = nullptr;
  parts::for_part_of(call, [&]<int part>() { error = run_part<part>(call, stream); });
  return error;
}
#endif
template <>
const char* run_part<JITACT_PART>(const Call& call, void* stream) {
#else
extern "C" const char* run_cuda(const Call& call, void* stream) {
#endif
  if (summed(call.op) > 0) {
    dispatch_sums(call.op, [&]<Op op>() {
      for_dtype_of(call, [&]<typename S>() {
#ifdef JITACT_PART
        if constexpr (parts::kIsHere<op, S>)
#endif
          launch_sums<op, S>(call, static_cast<cudaStream_t>(stream));
      });
    });
  }
  dispatch(call.op, [&]<Op op>() {
    for_dtype_of(call, [&]<typename S>() {
#ifdef JITACT_PART
      if constexpr (parts::kIsHere<op, S>) {
#endif
#ifdef JITACT_EXPORTED
      constexpr int64_t block = int64_t(kThreads) * Storage<S>::size * vectors_of<op, S>(), shared = 0;
#else
      constexpr int64_t block = int64_t(kThreads) * Storage<S>::size * vectors_of<op, S>();
      const size_t shared = unused_shared<op, S>(!kAlwaysRows && call.dense);
      // 12 blocks, as with 40 registers, rather than 16, whose shared memory leaves no cache for a bias of 14336 values: those had
      // 100 and 95 %.
      if constexpr (kStaged<op> && op == Op::backward && kBroadcast > 0 && sizeof(S) == 4)
        gpu::prefer_shared<elementwise<op, S, true>, 70>();
#endif
      const Launch launch(call, block);
      if constexpr (kElements > 1 && (op == Op::forward || op == Op::backward))
        if (!call.dense && !launch.aligned)
          return start<elementwise_anywhere<op, S>>(launch, kThreads * Storage<S>::size, 0, stream);
      if constexpr (kMany > 0 && (op == Op::forward || op == Op::forward_bit))
        if (launch.counted && (kAlwaysRows || call.dense))
          return start<elementwise<op, S, !kAlwaysRows, true>>(launch, block, shared, stream);
      if constexpr (op != Op::backward_from_bit)  // which needs dense memory, in whose order its bits are
        if (kAlwaysRows || !call.dense)
          return start<elementwise<op, S, false>>(launch, block, shared, stream);
      if constexpr (!kAlwaysRows || op == Op::backward_from_bit)
        start<elementwise<op, S, true>>(launch, block, shared, stream);
#ifdef JITACT_PART
      }
#endif
    });
  });
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace jitact::loops
