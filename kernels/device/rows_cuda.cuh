// The GPU's loops over rows. A row is read once: the threads that share it hold it in registers, up to four 16-byte vectors of
// each tensor in each thread. They are some of a warp, a block, or a cluster of blocks, which exchange what they fold through
// each other's shared memory. Rows may begin and end within vectors: what a vector has of others stays out.
#pragma once

#include <algorithm>
#include <type_traits>

#include "memory_cuda.cuh"
#include "rows_call.h"

namespace jitact::rows {

using loops::Bfloat16;
using loops::Half;
using loops::Storage;
using loops::Words;

constexpr int kVectors = 4;  // of each tensor that a thread holds
constexpr int kLogThreads = 9, kThreads = 1 << kLogThreads;  // the most of a block
constexpr int kMostBlocks = kMostVectors / (kThreads * kVectors);  // of a cluster

struct Launch {
  int threads, log_threads;  // of a block
  int group, log_group;      // threads of a block that share a row
  int blocks, log_blocks;    // of a cluster, which shares rows too
  int64_t rows;
  int length;        // elements of a row
  float scale;
  const void* read[2];
  uint32_t outside[2];  // for each of them, a word of elements that add nothing to a row
  void* written;
};

// What takes the values of one thread and another's to those of both.
struct Highest {
  template <typename T>
  JITACT_DEVICE void operator()(T (&t)[1], const T (&other)[1]) const { t[0] = max(t[0], other[0]); }
};
struct Totals {
  template <typename T, int n>
  JITACT_DEVICE void operator()(T (&t)[n], const T (&other)[n]) const {
    JITACT_UNROLL for (int i = 0; i < n; i++) t[i] += other[i];
  }
};
struct Joined {
  template <typename T, int n>
  JITACT_DEVICE void operator()(T (&t)[n], const T (&other)[n]) const { Adding<T>::join(t, other); }
};

// Where combine() passes values, once in a launch for each `turn`.
template <int turn, int n>
struct Exchange {
  float of_warps[n][kThreads / 32], of_blocks[n][kMostBlocks];
};

// The vectors of one row that a thread holds: every blocks * group-th, from its own on. `ragged` rows may begin and end within
// vectors.
template <typename S, bool ragged>
class Row {
 public:
  using T = typename Storage<S>::T;
  static constexpr int size = Storage<S>::size;

  JITACT_DEVICE explicit Row(const Launch& launch) : launch_(launch), step_(launch.blocks * launch.group) {
    rank_ = int(blockIdx.x) & (launch.blocks - 1);
    const int own = rank_ * launch.group + (int(threadIdx.x) & (launch.group - 1));
    const int64_t rows_before = int64_t(blockIdx.x >> launch.log_blocks) << (launch.log_threads - launch.log_group);
    const int64_t row = rows_before + (threadIdx.x >> launch.log_group);
    const uint64_t first = uint64_t(row) * unsigned(launch.length);
    const int before = ragged ? int(first % size) : 0;  // elements in the row's first vector that are not the row's
    place_ = int64_t(first / size) + own;
    begin_ = before - own * size;
    end_ = row < launch.rows ? begin_ + launch.length : 0;
  }

  JITACT_DEVICE void load(int tensor, Words (&words)[kVectors]) const {
    const Words* from = static_cast<const Words*>(launch_.read[tensor]) + place_;
    const uint32_t outside = launch_.outside[tensor];
    JITACT_UNROLL for (int v = 0; v < kVectors; v++, from += step_) {
      words[v] = {outside, outside, outside, outside};
      if (at(v) < end_) words[v] = *from;
    }
  }
  // What loaded vectors have of other rows is replaced by what adds nothing.
  JITACT_DEVICE void trim(int tensor, Words (&words)[kVectors]) const {
    constexpr int each = size / 4;  // elements of a word
    JITACT_UNROLL for (int v = 0; v < (ragged ? kVectors : 0); v++) {
      if (is_inside(v)) continue;
      JITACT_UNROLL for (int w = 0; w < 4; w++) {
        const int i = at(v) + each * w;
        const uint32_t low = each == 2 ? 0xffffu : 0xffffffffu, high = each == 2 ? 0xffff0000u : 0;
        const uint32_t kept = (is_inside_at(i) ? low : 0) | (is_inside_at(i + 1) ? high : 0);
        words[v].w[w] = (words[v].w[w] & kept) | (launch_.outside[tensor] & ~kept);
      }
    }
  }

  // What the row folds to. Elements become what the fold keeps of them.
  template <typename F>
  JITACT_DEVICE F fold(T (&t)[kVectors][size]) const {
    T highest[4] = {t[0][0], t[0][1], t[0][2], t[0][3]};
    JITACT_UNROLL for (int v = 0; v < kVectors; v++)
      JITACT_UNROLL for (int i = v == 0 ? 4 : 0; i < size; i++) highest[i % 4] = max(highest[i % 4], t[v][i]);
    T peak[1] = {max(max(highest[0], highest[1]), max(highest[2], highest[3]))};
    combine<0>(peak, Highest());
    const T invalid = peak[0] - peak[0];
    if (is_far(peak[0])) {
      JITACT_UNROLL for (int v = 0; v < kVectors; v++)
        JITACT_UNROLL for (int i = 0; i < size; i++) t[v][i] -= peak[0];
      peak[0] = 0;
    }
    const Weights<T> weights(peak[0]);
    T partial[4][F::parts];
    JITACT_UNROLL for (int i = 0; i < 4 * F::parts; i++) partial[i / F::parts][i % F::parts] = i % F::parts == 0 ? F::start : 0;
    JITACT_UNROLL for (int v = 0; v < kVectors; v++)
      JITACT_UNROLL for (int i = 0; i < size; i++) F::add(partial[i % 4], weights, peak[0], t[v][i]);
    T sums[F::parts];
    JITACT_UNROLL for (int p = 0; p < F::parts; p++) {
      JITACT_UNROLL for (int i = 0; p == 0 && i < 4; i++) partial[i][p] -= F::start;
      sums[p] = (partial[0][p] + partial[1][p]) + (partial[2][p] + partial[3][p]);
    }
    combine<1>(sums, Totals());
    return F(peak[0], invalid, weights, sums);
  }

  // The sum of `term(dy, y)` over the row's elements, which widen() makes of vector v; `is_first` where no fold comes before it.
  template <bool is_first, typename Widen, typename Term>
  JITACT_DEVICE Sum<T> sum(const Widen& widen, const Term& term) const {
    T partial[2][Adding<T>::parts] = {};
    JITACT_UNROLL for (int v = 0; v < kVectors; v++) {
      if (at(v) >= end_) continue;  // what is branched around is not spread over registers
      T dy[size], y[size];
      widen(v, dy, y);
      JITACT_UNROLL for (int i = 0; i < size; i++) Adding<T>::add(partial[i % 2], term(dy[i], y[i]));
    }
    Adding<T>::join(partial[0], partial[1]);
    combine<is_first ? 0 : 2>(partial[0], Joined());
    return {Adding<T>::total(partial[0])};
  }

  // Writes the elements of vector v, which result() makes.
  template <typename Result>
  JITACT_DEVICE void write(const Result& result) const {
    Words* to = static_cast<Words*>(launch_.written) + place_;
    JITACT_UNROLL for (int v = 0; v < kVectors; v++, to += step_) {
      if (at(v) >= end_) continue;
      T results[size];
      result(v, results);
      if (!ragged || is_inside(v)) {
        Words words;
        Storage<S>::narrow(results, words);
        *to = words;
      } else {
        JITACT_UNROLL for (int i = 0; i < size; i++)
          if (is_inside_at(at(v) + i)) Storage<S>::store(reinterpret_cast<S*>(to) + i, results[i]);
      }
    }
  }

 private:
  // Elements from the first of this thread's vectors to the v-th; begin_ and end_ of the row are counted so too.
  JITACT_DEVICE int at(int v) const { return v * step_ * size; }
  JITACT_DEVICE bool is_inside_at(int i) const { return i >= begin_ && i < end_; }
  JITACT_DEVICE bool is_inside(int v) const { return at(v) >= begin_ && at(v) + size <= end_; }

  template <int n, typename F>
  static JITACT_DEVICE void combine_lanes(T (&t)[n], int lanes, const F& f) {
    JITACT_UNROLL for (int step = 1; step < 32; step *= 2) {
      if (step >= lanes) break;
      T other[n];
      JITACT_UNROLL for (int i = 0; i < n; i++) other[i] = __shfl_xor_sync(0xffffffffu, t[i].v, step);
      f(t, other);
    }
  }

  // What all threads that share a row have, by f.
  template <int turn, int n, typename F>
  JITACT_DEVICE void combine(T (&t)[n], const F& f) const {
    combine_lanes(t, launch_.group, f);
    if (launch_.group <= 32) return;
    Exchange<turn, n>& exchange = ptx::shared<Exchange<turn, n>>();
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = unsigned(launch_.group) / 32;
    if (lane == 0)
      JITACT_UNROLL for (int i = 0; i < n; i++) exchange.of_warps[i][warp] = t[i].v;
    __syncthreads();
    JITACT_UNROLL for (int i = 0; i < n; i++) t[i] = exchange.of_warps[i][(warp & -warps) | (lane & (warps - 1))];
    combine_lanes(t, warps, f);
    if (launch_.blocks == 1) return;
    if (turn == 0) ptx::cluster_wait();  // until all blocks are there
    if (threadIdx.x < unsigned(launch_.blocks))
      JITACT_UNROLL for (int i = 0; i < n; i++) ptx::store_there(&exchange.of_blocks[i][rank_], threadIdx.x, t[i].v);
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
    JITACT_UNROLL for (int i = 0; i < n; i++) t[i] = exchange.of_blocks[i][lane & (launch_.blocks - 1)];
    combine_lanes(t, launch_.blocks, f);
  }

  const Launch& launch_;
  const int step_;
  int rank_, begin_, end_;
  int64_t place_;  // of the first of this thread's vectors
};

template <Op op, typename S, bool ragged>
__global__ void __launch_bounds__(kThreads, 2) held_rows(const __grid_constant__ Launch launch) {
  using T = typename Storage<S>::T;
  constexpr int size = Storage<S>::size;
  if (launch.blocks > 1) ptx::cluster_started();
  const Row<S, ragged> row(launch);
  Words words[2][kVectors];
  JITACT_UNROLL for (int r = 0; r < reads(op); r++) row.load(r, words[r]);
  JITACT_UNROLL for (int r = 0; r < reads(op); r++) row.trim(r, words[r]);
  const T scale = launch.scale;

  [[maybe_unused]] T t[kVectors][size];  // x, what is kept of it, and then y
  [[maybe_unused]] const auto fold_x = [&] {
    JITACT_UNROLL for (int v = 0; v < kVectors; v++) Storage<S>::widen(words[reads(op) - 1][v], t[v]);
    if (scale != 1) {
      JITACT_UNROLL for (int v = 0; v < kVectors; v++)
        JITACT_UNROLL for (int i = 0; i < size; i++) t[v][i] *= scale;
    }
    const auto folded = row.template fold<Fold<T>>(t);
    JITACT_UNROLL for (int v = 0; v < kVectors; v++)
      JITACT_UNROLL for (int i = 0; i < size; i++) t[v][i] = forward(t[v][i], folded);
  };
  if constexpr (op == Op::forward) {
    fold_x();
    row.write([&](int v, T (&y)[size]) {
      JITACT_UNROLL for (int i = 0; i < size; i++) y[i] = t[v][i];
    });
  } else {
    if constexpr (op == Op::backward) fold_x();
    const auto widen = [&](int v, T (&dy)[size], T (&y)[size]) {
      Storage<S>::widen(words[0][v], dy);
      if constexpr (op == Op::backward_from_output) Storage<S>::widen(words[1][v], y);
      JITACT_UNROLL for (int i = 0; op == Op::backward && i < size; i++) y[i] = t[v][i];
    };
    const Sum<T> sum = row.template sum<op == Op::backward_from_output>(
        widen, [](T dy, T y) { return T(fold_from_output(dy, y)); });
    row.write([&](int v, T (&dx)[size]) {
      T dy[size], y[size];
      widen(v, dy, y);
      JITACT_UNROLL for (int i = 0; i < size; i++) dx[i] = scale * T(backward_from_output(dy[i], y[i], sum));
    });
  }
}

// The least n with 2^n >= count.
inline int log_of(int64_t count) {
  int n = 0;
  while (int64_t(1) << n < count) n++;
  return n;
}

// A word of infinity, in the dtype, with the sign that makes it -inf times the scale.
template <typename S>
uint32_t lowest(float scale) {
  const uint32_t bits = std::is_same_v<S, float> ? 0x7f800000u : std::is_same_v<S, Half> ? 0x7c007c00u : 0x7f807f80u;
  const uint32_t signs = std::is_same_v<S, float> ? 0x80000000u : 0x80008000u;
  return scale > 0 ? bits | signs : bits;
}

template <Op op, typename S, bool ragged>
cudaError_t start(const Call& call, cudaStream_t stream) {
  constexpr int size = Storage<S>::size;
  Launch launch{
      .rows = call.outer,
      .length = int(call.length),
      .scale = call.scale,
      .written = call.written,
  };
  for (int r = 0; r < reads(op); r++) launch.read[r] = call.read[r];
  if (op != Op::backward_from_output) launch.outside[reads(op) - 1] = lowest<S>(call.scale);
  const int log_sharing = log_of((vectors_touched(call.length, size) + kVectors - 1) / kVectors);
  launch.log_group = std::min(log_sharing, kLogThreads);
  launch.log_blocks = log_sharing - launch.log_group;
  launch.log_threads = std::max(launch.log_group, 7);
  launch.threads = 1 << launch.log_threads, launch.group = 1 << launch.log_group, launch.blocks = 1 << launch.log_blocks;
  const int64_t at_once = launch.threads / launch.group, grid = (call.outer + at_once - 1) / at_once * launch.blocks;

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
  return cudaLaunchKernelEx(&config, held_rows<op, S, ragged>, launch);
}

template <Op op, typename S>
cudaError_t start(const Call& call, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return call.length % Storage<S>::size ? start<op, S, true>(call, s) : start<op, S, false>(call, s);
}

const char* run_cuda(const Call& call, void* stream) {
  const cudaError_t error = loops::dispatch_dtype(call.dtype, [&]<typename S>() -> cudaError_t {
    if constexpr (std::is_same_v<S, double>) return cudaErrorInvalidValue;
    else if (call.op == Op::forward) return start<Op::forward, S>(call, stream);
    else if (call.op == Op::backward) return start<Op::backward, S>(call, stream);
    else return start<Op::backward_from_output, S>(call, stream);
  });
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // or whoever asks next would take it for theirs
  return cudaGetErrorString(error);
}

}  // namespace jitact::rows
