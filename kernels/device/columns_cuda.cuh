// The GPU's loop over rows that lie across memory, side by side. A block, or a cluster of blocks that share the length, has a tile
// of them, which it copies to shared memory as it lies. There each thread goes down the row, or the two rows, of a word.
#pragma once

#include "rows_cuda.cuh"

namespace jitact::rows {

constexpr int kTileThreads = 256;
constexpr int kLogMost = 8, kLogLine = 5, kLogFewest = 3;  // words of a tile side by side: the most, 128 bytes, the fewest

struct Tiling {
  int log_wide;  // words side by side
  int blocks;    // of a cluster
  int steps;     // of the length, in each block
  int bytes;     // of shared memory
};

// How tiles are cut for rows of `length` elements, whose tensors have so many words side by side.
constexpr Tiling tiling_of(int64_t length, int64_t words, int tensors) {
  const auto bytes = [&](int64_t steps, int log_wide) { return steps * (int64_t(4 * tensors) << log_wide); };
  int log_wide = kLogMost;
  while (log_wide > kLogLine && bytes(length, log_wide) > kTileBytes) log_wide--;
  while (log_wide > kLogFewest && int64_t(1) << (log_wide - 1) >= words) log_wide--;
  int64_t blocks = 1, steps = length;
  for (;; log_wide--) {
    const int64_t wanted = (bytes(length, log_wide) + kTileBytes - 1) / kTileBytes;
    blocks = wanted < kMostBlocks ? wanted : kMostBlocks;
    steps = (length + blocks - 1) / blocks;
    if (log_wide == kLogFewest || bytes(steps, log_wide) <= 2 * kTileBytes) break;
  }
  return {log_wide, int(blocks), int(steps), int(bytes(steps, log_wide))};
}

struct Columns {
  Tiling tiling;
  int length;
  unsigned tiles;  // side by side
  int64_t words;   // the same, of the tensors
  float scale;
  const void* read[2];
  void* written;
};

// What blocks send each other: once for each `turn`, so many values for each word.
template <int turn, int values>
struct TileExchange {
  float of_warps[values][kTileThreads], of_blocks[values][kMostBlocks][1 << kLogLine];
};
struct TileArrivals {
  ptx::Barrier of_turn[3];
};

template <Op op, typename S>
class Tile {
 public:
  using T = typename Storage<S>::T;

  JITACT_DEVICE explicit Tile(const Columns& columns)
      : columns_(columns), scale_(columns.scale), wide_(1 << columns.tiling.log_wide),
        word_(int(threadIdx.x) & (wide_ - 1)), group_(int(threadIdx.x) >> columns.tiling.log_wide),
        groups_(kTileThreads >> columns.tiling.log_wide), begin_(ptx::cluster_rank() * columns.tiling.steps) {
    const unsigned id = ptx::cluster_id(), outer = id / columns.tiles;
    const int64_t first = int64_t(id - outer * columns.tiles) << columns.tiling.log_wide;
    words_ = int(::min(columns.words - first, int64_t(wide_)));
    count_ = ::min(columns.length - begin_, columns.tiling.steps);
    first_ = (int64_t(outer) * columns.length + begin_) * columns.words + first;
  }

  JITACT_DEVICE void run() {
    if (columns_.tiling.blocks > 1) {
      for (int i = 0; threadIdx.x == 0 && i < 3; i++) ptx::start(&ptx::shared<TileArrivals>().of_turn[i]);
      ptx::cluster_started();
    }
    copy();
    if (word_ >= words_) count_ = 0;  // from here on, of the thread's word
    ptx::wait_for_copies(0);
    __syncthreads();
    if (columns_.tiling.blocks > 1) ptx::cluster_wait();  // until all blocks are there
    if constexpr (op == Op::backward_from_output)
      backward<0>([&](int step, T (&y)[each]) { read(1, step, y); });
    else fold();
  }

 private:
  static constexpr int each = 4 / int(sizeof(S)), tensors = reads(op);  // elements of a word, one of each of its rows

  JITACT_DEVICE unsigned slot(int tensor, int step, int word) const {
    return ptx::dynamic_shared() + 4u * unsigned(((tensor * columns_.tiling.steps + step) << columns_.tiling.log_wide) + word);
  }
  JITACT_DEVICE int64_t place(int step, int word) const { return first_ + step * columns_.words + word; }

  JITACT_DEVICE void copy() const {
    const int log_vectors = columns_.tiling.log_wide - 2, vector = int(threadIdx.x) & ((1 << log_vectors) - 1);
    if (4 * vector < words_)
#pragma unroll 4
      for (int step = int(threadIdx.x) >> log_vectors; step < count_; step += kTileThreads >> log_vectors)
        JITACT_UNROLL for (int r = 0; r < tensors; r++)
          ptx::copy_async(slot(r, step, 4 * vector), static_cast<const uint32_t*>(columns_.read[r]) + place(step, 4 * vector));
    ptx::commit_copies();
  }

  JITACT_DEVICE void read(int tensor, int step, T (&t)[each]) const {
    const uint32_t word = ptx::load_shared(slot(tensor, step, word_));
    if constexpr (sizeof(S) == 2) Storage<S>::widen_pair(word, t[0], t[1]);
    else t[0] = __uint_as_float(word);
  }
  static JITACT_DEVICE uint32_t word_of(const T (&t)[each]) {
    if constexpr (sizeof(S) == 2) return Storage<S>::narrow_pair(t[0], t[1]);
    else return __float_as_uint(t[0].v);
  }

  template <typename Visit>
  JITACT_DEVICE void each_step(const Visit& visit) const {
#pragma unroll 4
    for (int step = group_; step < count_; step += groups_) visit(step);
  }
  template <typename Result>
  JITACT_DEVICE void write(const Result& result) const {
    each_step([&](int step) {
      T t[each];
      result(step, t);
      static_cast<uint32_t*>(columns_.written)[place(step, word_)] = word_of(t);
    });
  }

  // Folds rows of x, the last tensor, and goes on to their results or gradients.
  JITACT_DEVICE void fold() {
    using F = Fold<T>;
    constexpr bool stored = each == 1 && !F::as_it_is;  // what is kept of elements takes their place
    T base[each] = {}, invalid[each], peak[each][1], sums[each][F::parts] = {};
    F folded[each];
    const auto elements = [&](int step, T (&t)[each]) {
      read(tensors - 1, step, t);
      JITACT_UNROLL for (int e = 0; e < each; e++) t[e] = fma(t[e], scale_, -base[e]);
    };

    JITACT_UNROLL for (int e = 0; e < each; e++) peak[e][0] = -INFINITY, sums[e][0] = F::start;
    each_step([&](int step) {
      T t[each];
      elements(step, t);
      JITACT_UNROLL for (int e = 0; e < each; e++) peak[e][0] = max(peak[e][0], t[e]);
    });
    combine<0>(peak, Highest());
    JITACT_UNROLL for (int e = 0; e < each; e++) {
      invalid[e] = peak[e][0] - peak[e][0];
      if (is_far(peak[e][0])) base[e] = peak[e][0], peak[e][0] = 0;
    }
    each_step([&](int step) {
      T t[each];
      elements(step, t);
      JITACT_UNROLL for (int e = 0; e < each; e++) t[e] = F::add(sums[e], Weights<T>(peak[e][0]), peak[e][0], t[e]);
      if constexpr (stored) ptx::store_shared(slot(tensors - 1, step, word_), word_of(t));
    });
    JITACT_UNROLL for (int e = 0; e < each; e++) sums[e][0] -= F::start;
    combine<1>(sums, Totals());
    JITACT_UNROLL for (int e = 0; e < each; e++) folded[e] = F(peak[e][0], invalid[e], Weights<T>(peak[e][0]), sums[e]);

    const auto result = [&](int step, T (&y)[each]) {
      if constexpr (stored) read(tensors - 1, step, y);
      else elements(step, y);
      JITACT_UNROLL for (int e = 0; e < each; e++)
        y[e] = forward(stored ? y[e] : F::kept(Weights<T>(peak[e][0]), y[e]), folded[e]);
    };
    if constexpr (op == Op::forward) write(result);
    else backward<2>(result);
  }

  // The gradient, of dy, the first tensor, and what `result` gives.
  template <int turn, typename Result>
  JITACT_DEVICE void backward(const Result& result) {
    T sums[each][Adding<T>::parts] = {};
    each_step([&](int step) {
      T dy[each], y[each];
      read(0, step, dy), result(step, y);
      JITACT_UNROLL for (int e = 0; e < each; e++) Adding<T>::add(sums[e], T(fold_from_output(dy[e], y[e])));
    });
    combine<turn>(sums, Joined());
    write([&](int step, T (&dx)[each]) {
      T dy[each], y[each];
      read(0, step, dy), result(step, y);
      JITACT_UNROLL for (int e = 0; e < each; e++) {
        const Sum<T> sum{Adding<T>::total(sums[e])};
        dx[e] = scale_ * T(backward_from_output(dy[e], y[e], sum));
      }
    });
  }

  // What all threads of the rows have, by f, which takes one row's.
  template <int turn, int n, typename F>
  JITACT_DEVICE void combine(T (&t)[each][n], const F& f) const {
    constexpr int values = each * n;
    const auto join = [&](const auto& other_value) {
      JITACT_UNROLL for (int e = 0; e < each; e++) {
        T other[n];
        JITACT_UNROLL for (int i = 0; i < n; i++) other[i] = other_value(e, i);
        f(t[e], other);
      }
    };
    JITACT_UNROLL for (int lanes = 1 << kLogFewest; lanes < 32; lanes *= 2)
      if (lanes >= wide_) join([&](int e, int i) { return __shfl_xor_sync(0xffffffffu, t[e][i].v, lanes); });
    auto& [of_warps, of_blocks] = ptx::shared<TileExchange<turn, values>>();
    const int apart = wide_ < 32 ? 32 : wide_;  // threads whose values are of different words, or the same
    if (apart < kTileThreads) {
      const auto all = [&](const auto& visit) {
        JITACT_UNROLL for (int e = 0; e < each; e++)
          JITACT_UNROLL for (int i = 0; i < n; i++) visit(e, i);
      };
      all([&](int e, int i) { of_warps[e * n + i][threadIdx.x] = t[e][i].v; });
      __syncthreads();
      all([&](int e, int i) { t[e][i] = of_warps[e * n + i][word_]; });
      for (int from = apart + word_; from < kTileThreads; from += apart)
        join([&](int e, int i) { return of_warps[e * n + i][from]; });
    }
    const int blocks = columns_.tiling.blocks;
    if (blocks == 1) return;
    ptx::Barrier* const arrival = &ptx::shared<TileArrivals>().of_turn[turn];
    for (int block = group_; block < blocks; block += groups_)
      JITACT_UNROLL for (int v = 0; v < values; v++)
        ptx::send(&of_blocks[v][ptx::cluster_rank()][word_], unsigned(block), t[v / n][v % n].v, arrival);
    if (threadIdx.x == 0) ptx::expect(arrival, 4u * values * unsigned(wide_ * blocks));
    ptx::wait(arrival, 0);
    JITACT_UNROLL for (int v = 0; v < values; v++) t[v / n][v % n] = of_blocks[v][0][word_];
    for (int block = 1; block < blocks; block++)
      join([&](int e, int i) { return of_blocks[e * n + i][block][word_]; });
  }

  const Columns& columns_;
  const T scale_;
  const int wide_, word_, group_, groups_, begin_;
  int words_, count_;  // side by side, and steps, that there are
  int64_t first_;      // word of the tensors
};

template <Op op, typename S>
__global__ void __launch_bounds__(kTileThreads, 4) walk_columns(const __grid_constant__ Columns columns) {
  Tile<op, S>(columns).run();
}

template <Op op, typename S>
cudaError_t start_columns(const Call& call, cudaStream_t stream) {
  Columns columns{};
  columns.words = call.inner * int64_t(sizeof(S)) / 4;
  columns.tiling = tiling_of(call.length, columns.words, reads(op));
  columns.length = int(call.length), columns.scale = call.scale, columns.written = call.written;
  for (int r = 0; r < reads(op); r++) columns.read[r] = call.read[r];
  const auto [log_wide, blocks, steps, bytes] = columns.tiling;
  columns.tiles = unsigned((columns.words + (int64_t(1) << log_wide) - 1) >> log_wide);

  cudaError_t error = cudaFuncSetAttribute(walk_columns<op, S>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (!error && blocks > 8) error = cudaFuncSetAttribute(walk_columns<op, S>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error) return error;
  Clusters shape(blocks, kTileThreads, bytes, stream);
  shape.count(call.outer * columns.tiles);
  return cudaLaunchKernelEx(&shape.config, walk_columns<op, S>, columns);
}

}  // namespace jitact::rows
