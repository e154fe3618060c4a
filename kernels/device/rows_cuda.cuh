// The GPU's loops over rows. A row is read once: the threads that share it hold it in registers, up to four 16-byte vectors of
// each tensor in each thread. They are some of a warp, a block, or a cluster of blocks, which exchange what they fold through
// each other's shared memory.
#pragma once

#include <algorithm>
#include <cstdio>
#include <type_traits>

#include "memory_cuda.cuh"
#include "rows_call.h"

namespace jitact::rows {

using loops::Storage;
using loops::Words;

constexpr int kVectors = 4;    // of each tensor that a thread holds
constexpr int kThreads = 512;  // the most of a block
constexpr int kMostBlocks = kMostVectors / (kThreads * kVectors);  // of a cluster

struct Launch {
  int threads;     // of a block
  int group;       // threads of a block that share a row
  int blocks;      // of a cluster, which shares rows too
  int64_t rows;
  int vectors;     // of a row
  const Words* read[2];
  Words* written;
};

// What the blocks of a cluster do together. Older GPUs have no clusters, and never come here.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
// Writes to the place in another block's shared memory that `here` is in this one's.
__device__ __forceinline__ void store_there(float* here, unsigned block, float v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .b32 a; mapa.shared::cluster.u32 a, %0, %1; st.shared::cluster.f32 [a], %2; }"
               :: "r"(unsigned(__cvta_generic_to_shared(here))), "r"(block), "f"(v) : "memory");
#endif
}

struct Highest {
  template <typename T> __device__ __forceinline__ void operator()(T* a, const T* b) const { a[0] = max(a[0], b[0]); }
};
// Sums and, behind them, what rounding took from each: 3 to 6 roundings of a float32 sum would be as many ulp of a share.
template <int parts, bool exact>
struct Totals {
  template <typename T> __device__ __forceinline__ void operator()(T* a, const T* b) const {
#pragma unroll
    for (int p = 0; p < parts; p++) {
      const T sum = a[p] + b[p];
      if constexpr (exact) {
        const T added = sum - a[p];
        a[parts + p] = (a[parts + p] + b[parts + p]) + ((a[p] - (sum - added)) + (b[p] - added));
      }
      a[p] = sum;
    }
  }
};

// The rows of one launch, as a thread sees them: its vectors of one row.
template <Op op, typename S>
class Held {
 public:
  using T = typename Storage<S>::T;
  static constexpr int size = Storage<S>::size, ins = reads(op);

  __device__ __forceinline__ explicit Held(const Launch& launch) : launch_(launch) {
    const int t = int(threadIdx.x);
    rank_ = int(blockIdx.x) & (launch.blocks - 1);
    const int64_t row = int64_t(blockIdx.x / unsigned(launch.blocks)) * (launch.threads / launch.group) + t / launch.group;
    first_ = row * launch.vectors;
#pragma unroll
    for (int v = 0; v < kVectors; v++) {
      number_[v] = (v * launch.blocks + rank_) * launch.group + (t & (launch.group - 1));
      live_[v] = row < launch.rows && number_[v] < launch.vectors;
#pragma unroll
      for (int r = 0; r < ins; r++)
        if (live_[v]) words_[v][r] = launch.read[r][first_ + number_[v]];
    }
  }

  // What the row folds to, of term(the values that are read of an element).
  template <typename F, typename Term>
  __device__ __forceinline__ F fold(const Term& term) {
    constexpr bool exact = std::is_same_v<T, Single>;
    constexpr int parts = F::parts, sums = exact ? 2 * parts : parts;
    T peak[1] = {T(-INFINITY)};
    if constexpr (F::has_peak) {
      each([&](int, const T* in, int) { peak[0] = max(peak[0], term(in)); });
      combine<true>(peak, Highest());
    }
    const typename F::Weights weights(peak[0]);
    const Totals<parts, exact> totals;
    T all[2 * parts] = {};
    T partial[exact ? kVectors : 1][4][parts] = {};
    each([&](int v, const T* in, int i) { F::add(partial[exact ? v : 0][i % 4], weights, term(in)); });
#pragma unroll
    for (int v = 0; v < (exact ? kVectors : 1); v++) {
      T vector[2 * parts] = {};
#pragma unroll
      for (int p = 0; p < parts; p++)
        vector[p] = (partial[v][0][p] + partial[v][1][p]) + (partial[v][2][p] + partial[v][3][p]);
      totals(all, vector);
    }
    T shared[sums];
#pragma unroll
    for (int s = 0; s < sums; s++) shared[s] = all[s];
    combine<!F::has_peak>(shared, totals);
    T rests[parts] = {};
#pragma unroll
    for (int p = 0; exact && p < parts; p++) {
      const T rest = shared[sums - parts + p];
      rests[p] = rest == rest ? rest : T(0);  // of an infinite sum
    }
    return F(peak[0], weights, shared, rests);
  }

  template <typename F>
  __device__ __forceinline__ void write(const F& f) {
#pragma unroll
    for (int v = 0; v < kVectors; v++) {
      if (!live_[v]) continue;
      T results[size];
      for_elements(v, [&](int, const T* in, int i) { results[i] = f(in); });
      Words narrowed;
      Storage<S>::narrow(results, narrowed);
      launch_.written[first_ + number_[v]] = narrowed;
    }
  }

 private:
  template <typename F>
  __device__ __forceinline__ void for_elements(int v, const F& f) const {
    T in[ins][size];
#pragma unroll
    for (int r = 0; r < ins; r++) Storage<S>::widen(words_[v][r], in[r]);
#pragma unroll
    for (int i = 0; i < size; i++) {
      T values[ins];
#pragma unroll
      for (int r = 0; r < ins; r++) values[r] = in[r][i];
      f(v, values, i);
    }
  }
  template <typename F>
  __device__ __forceinline__ void each(const F& f) const {
#pragma unroll
    for (int v = 0; v < kVectors; v++)
      if (live_[v]) for_elements(v, f);
  }

  template <int n, typename F>
  static __device__ __forceinline__ void combine_lanes(T (&t)[n], int end, const F& f) {
    for (int lanes = 1; lanes < end; lanes *= 2) {
      T others[n];
#pragma unroll
      for (int i = 0; i < n; i++) others[i] = T(__shfl_xor_sync(0xffffffffu, t[i].v, lanes));
      f(t, others);
    }
  }

  // What all threads that share a row have, by f, which takes the second into the first: the same for each of them.
  template <bool is_first, int n, typename F>
  __device__ __forceinline__ void combine(T (&t)[n], const F& f) {
    combine_lanes(t, launch_.group < 32 ? launch_.group : 32, f);
    if (launch_.group <= 32) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = launch_.group / 32;
    __shared__ float of_warps[n][32], of_blocks[n][kMostBlocks];  // for each exchange, as the template has its parameters
    if (lane == 0)
#pragma unroll
      for (int i = 0; i < n; i++) of_warps[i][warp] = t[i].v;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < n; i++) t[i] = of_warps[i][(warp & -warps) + (lane & (warps - 1))];
    combine_lanes(t, warps, f);
    if (launch_.blocks == 1) return;
    if (is_first) cluster_wait();  // until all blocks are there
    if (threadIdx.x < unsigned(launch_.blocks))
#pragma unroll
      for (int i = 0; i < n; i++) store_there(&of_blocks[i][rank_], threadIdx.x, t[i].v);
    __syncwarp();
    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (int i = 0; i < n; i++) t[i] = of_blocks[i][lane & (launch_.blocks - 1)];
    combine_lanes(t, launch_.blocks, f);
  }

  const Launch& launch_;
  int rank_;
  int64_t first_;
  int number_[kVectors];
  bool live_[kVectors];
  Words words_[kVectors][ins];
};

template <typename R, typename X, typename F>
F fold_of(R (*)(X, F));
template <typename T>
using Fold = decltype(fold_of(&::forward<T>));

template <Op op, typename S>
__global__ void __launch_bounds__(kThreads, 2) held_rows(const __grid_constant__ Launch launch) {
  using T = typename Storage<S>::T;
  if (launch.blocks > 1) cluster_arrive();
  Held<op, S> held(launch);
  if constexpr (op == Op::forward) {
    const auto row = held.template fold<Fold<T>>([](const T* in) { return T(fold(in[0])); });
    held.write([&](const T* in) { return T(forward(in[0], row)); });
  } else {
    const auto row = held.template fold<Sum<T>>([](const T* in) { return T(fold_from_output(in[0], in[1])); });
    held.write([&](const T* in) { return T(backward_from_output(in[0], in[1], row)); });
  }
}

inline int power_of_2_from(int n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

template <Op op, typename S>
const char* start(const Call& call, cudaStream_t stream) {
  Launch launch{};
  launch.rows = call.rows;
  launch.vectors = int(call.vectors);
  for (int r = 0; r < reads(op); r++) launch.read[r] = static_cast<const Words*>(call.read[r]);
  launch.written = static_cast<Words*>(call.written);
  const int sharing = power_of_2_from((launch.vectors + kVectors - 1) / kVectors);
  launch.group = std::min(sharing, kThreads);
  launch.blocks = sharing / launch.group;
  launch.threads = std::max(launch.group, 128);
  const int64_t at_once = launch.threads / launch.group, grid = (call.rows + at_once - 1) / at_once * launch.blocks;

  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = launch.blocks;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(grid));
  config.blockDim = dim3(unsigned(launch.threads));
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = launch.blocks > 1;
  void* arguments[] = {&launch};
  const cudaError_t error = cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(held_rows<op, S>), arguments);
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // or whoever asks next would take it for theirs
  static thread_local char message[160];
  snprintf(message, sizeof message, "%s (grid %lld, block %d, cluster %d)", cudaGetErrorString(error), (long long)grid,
           launch.threads, launch.blocks);
  return message;
}

const char* run_cuda(const Call& call, void* stream) {
  return loops::dispatch_dtype(call.dtype, [&]<typename S>() -> const char* {
    if constexpr (std::is_same_v<S, double>) return "no kernel for float64";
    else if (call.op == Op::forward) return start<Op::forward, S>(call, static_cast<cudaStream_t>(stream));
    else return start<Op::backward_from_output, S>(call, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace jitact::rows
