// The GPU's loops over strided rows that are too long for tiles, and backward from the output of rows for which only narrow tiles
// would do, that share their sectors of memory with others. Elements are read once more for results, which is fastest if blocks
// read adjacent memory: one kernel folds or sums strips of rows, one joins the strips of each row, and one writes. Strips depend
// on the length only, and so do the bits of a row's sums.
#pragma once

#include "strips_cuda.cuh"

namespace jitact::rows {

constexpr int kJoinThreads = 1024, kJoinWords = 8;  // per block that joins strips, and its width in words

// The block's place in memory. Kernels go through it in turns from its beginning and its end, which the cache may still hold.
template <bool from_end>
JITACT_DEVICE unsigned turn() { return from_end ? gridDim.x - 1 - blockIdx.x : blockIdx.x; }

// Of x, the only tensor that it gets.
template <typename S, bool odd>
__global__ void __launch_bounds__(kStripThreads, 4) fold_strips(const __grid_constant__ Strips strips) {
  ptx::let_next_begin();
  ptx::wait_for_last();
  Strip<Op::forward, S, odd>::of_thread(strips, blockIdx.x, summed_strip(strips.length)).fold();
}
template <Op op, typename S, bool odd>
__global__ void __launch_bounds__(kStripThreads, 4) add_up_strips(const __grid_constant__ Strips strips) {
  ptx::let_next_begin();
  const auto strip = Strip<op, S, odd>::of_thread(strips, turn<op == Op::backward>(), summed_strip(strips.length));
  ptx::wait_for_last();
  strip.add_up();
}
template <Op op, typename S, bool odd>
__global__ void __launch_bounds__(kStripThreads, 4) write_strips(const __grid_constant__ Strips strips) {
  const auto strip = Strip<op, S, odd>::of_thread(strips, turn<op != Op::backward>(), written_strip(op));
  ptx::wait_for_last();
  strip.write();
}

// A thread that joins some of a word's strips, each group-th from its own on.
class Joining {
 public:
  static constexpr int groups = kJoinThreads / kJoinWords;
  const unsigned word;

  JITACT_DEVICE explicit Joining(const Strips& strips)
      : word(blockIdx.x * kJoinWords + threadIdx.x % kJoinWords), is_there(word < strips.all_words),
        count_(is_there ? strips.summed : 0) {}

  template <typename Visit>
  JITACT_DEVICE void each_strip(const Visit& visit) const {
#pragma unroll 4
    for (int64_t strip = threadIdx.x / kJoinWords; strip < count_; strip += groups) visit(strip);
  }
  // Reduces t over the threads of a word. The first warp gets the result, or all threads.
  template <bool for_all, typename T, int n, typename F>
  JITACT_DEVICE void combine(T (&t)[n], const F& f) const {
    constexpr int warps = kJoinThreads / 32;
    __shared__ float of_warps[n][warps][kJoinWords];
    const int own = int(threadIdx.x) % kJoinWords;
    const auto join = [&](const auto& value) {
      T other[n];
      JITACT_UNROLL for (int v = 0; v < n; v++) other[v] = value(v);
      f(t, other);
    };
    JITACT_UNROLL for (int lanes = kJoinWords; lanes < 32; lanes *= 2)
      join([&](int v) { return __shfl_xor_sync(0xffffffffu, t[v].v, lanes); });
    JITACT_UNROLL for (int v = 0; v < n; v++) of_warps[v][threadIdx.x / 32][own] = t[v].v;
    __syncthreads();
    if (!for_all && threadIdx.x >= 32) return;
    JITACT_UNROLL for (int v = 0; v < n; v++) t[v] = of_warps[v][0][own];
#pragma unroll 4
    for (int warp = 1; warp < warps; warp++) join([&](int v) { return of_warps[v][warp][own]; });
  }
  JITACT_DEVICE bool has_result() const { return is_there && threadIdx.x < kJoinWords; }

 private:
  bool is_there;
  int64_t count_;
};

// Joins the folds of strips. Rows whose peaks are far from 0 are folded again, relative to these.
template <typename S, bool odd>
__global__ void __launch_bounds__(kJoinThreads) join_folds(const __grid_constant__ Strips strips) {
  using T = typename Storage<S>::T;
  using F = Fold<T>;
  constexpr int each = kEach<S>, parts = F::parts * Adding<T>::parts;
  const Joining joining(strips);
  ptx::let_next_begin();
  ptx::wait_for_last();

  const auto rows = strips.template rows_of<each>(joining.word);
  T of[each][Rising<S>::values], highest[each];
  JITACT_UNROLL for (int e = 0; e < each; e++) highest[e] = -INFINITY;
  joining.each_strip([&](int64_t strip) {
    strips.get(strip, rows, of);
    JITACT_UNROLL for (int e = 0; e < each; e++) highest[e] = max(highest[e], of[e][0]);
  });
  joining.template combine<true>(highest, [](T (&t)[each], const T (&other)[each]) {
    JITACT_UNROLL for (int e = 0; e < each; e++) t[e] = max(t[e], other[e]);
  });
  FoldedWord<S> folded(strips, highest);

  T sums[each * parts] = {};
  joining.each_strip([&](int64_t strip) {
    strips.get(strip, rows, of);
    JITACT_UNROLL for (int e = 0; e < each; e++) {
      T moved[F::parts];
      Rising<S>::move(folded, e, of[e], moved);
      JITACT_UNROLL for (int p = 0; p < F::parts; p++) Adding<T>::add(sums + e * parts + p * Adding<T>::parts, moved[p]);
    }
  });
  const auto is_near = [&](int e) { return abs(highest[e]) < kFar * strips.unit; };
  if (!is_near(0) || !is_near(each - 1)) {
    T again[each][F::parts];
    LongSums<S, false> long_sums(again);
    joining.each_strip([&](int64_t strip) {
      Strip<Op::forward, S, odd>(strips, joining.word, strip, summed_strip(strips.length)).weigh(folded, again, long_sums);
    });
    JITACT_UNROLL for (int v = 0; v < each * parts; v++)
      if (!is_near(v / parts)) sums[v] = (&long_sums.of[0][0][0])[v];
  }
  joining.template combine<false>(sums, Joined());
  if (!joining.has_result()) return;
  JITACT_UNROLL for (int e = 0; e < each; e++) {
    T totals[F::parts];
    JITACT_UNROLL for (int p = 0; p < F::parts; p++) totals[p] = Adding<T>::total(sums + e * parts + p * Adding<T>::parts);
    FoldedRow<T>& row = folded.row[e];
    row.fold = F(row.peak, highest[e] - highest[e], folded.weights[e], totals, each == 2 ? folded.scale : T(1));
    if constexpr (kPlaced) row.fold.move(row.base), row.base = 0;
    static_cast<FoldedRow<T>*>(strips.folded)[int64_t(joining.word) * each + e] = row;
  }
}

// Adds up the sums of strips, in place of those of the first, and writes gradients of row operands.
template <typename S>
__global__ void __launch_bounds__(kJoinThreads) join_sums(const __grid_constant__ Strips strips) {
  using T = typename Storage<S>::T;
  constexpr int each = kEach<S>;
  const Joining joining(strips);
  ptx::let_next_begin();
  ptx::wait_for_last();
  const auto rows = strips.template rows_of<each>(joining.word);
  T sums[each * kParts<T>] = {}, of[each][kParts<T>];
  joining.each_strip([&](int64_t strip) {
    strips.get(strip, rows, of);
    T values[each * kParts<T>];
    JITACT_UNROLL for (int v = 0; v < each * kParts<T>; v++) values[v] = of[v / kParts<T>][v % kParts<T>];
    Joined()(sums, values);
  });
  joining.template combine<false>(sums, Joined());
  if (!joining.has_result()) return;
  JITACT_UNROLL for (int v = 0; v < each * kParts<T>; v++) of[v / kParts<T>][v % kParts<T>] = sums[v];
  strips.put(0, rows, of);
  if constexpr (kRowValues > 0) {
    const unsigned plane = joining.word / strips.words;
    const int64_t first = int64_t(plane) * strips.inner + (joining.word - plane * strips.words) * each;
    for (int e = 0; e < each && rows.has[e]; e++) {
      Formulas<T, 1> formulas;
      formulas.take_numbers(strips.operands), formulas.take_row(strips.operands, 0, first + e);
      formulas.give_row(strips.operands, 0, first + e, strips.rows, sums_of(of[e]));
    }
  }
}

// Whether rows are in strips.
inline bool in_strips(const Call& call, int64_t size, const Tiling& tiling) {
  const bool is_narrow = tiling.log_wide < kLogLine && words_across(call.inner, size) > 1 << tiling.log_wide;
  const bool suits = is_narrow && tiling.blocks > 1 && share_sectors(call.inner, size);
  return !tiling.held || (suits && call.op != Op::backward);
}
// The workspace that this needs: of a word's rows, folded, and of its strips.
template <typename S>
int64_t strip_bytes(const Call& call) {
  using T = typename Storage<S>::T;
  if (call.inner == 1 || !in_strips(call, sizeof(S), tiling_of(call, sizeof(S), reads(call.op)))) return 0;
  const int of_folds = Rising<S>::values, of_sums = kParts<T>;
  const int values = call.op == Op::forward ? of_folds : call.op == Op::backward ? std::max(of_folds, of_sums) : of_sums;
  const int64_t strips = strips_of(call.length, summed_strip(call.length), is_odd(call.inner, sizeof(S)));
  const int64_t of_strips = strips * values * int64_t(sizeof(float));
  return call.outer * words_across(call.inner, sizeof(S)) * kEach<S> * (int64_t(sizeof(FoldedRow<T>)) + of_strips);
}

template <Op op, typename S, bool odd>
cudaError_t start_strips(const Call& call, const Columns& columns, cudaStream_t stream) {
  Strips strips{columns};
  while (strips.log_wide < kLogStripThreads && 1u << strips.log_wide < strips.all_words) strips.log_wide++;
  strips.wide = unsigned((int64_t(strips.all_words) + (1 << strips.log_wide) - 1) >> strips.log_wide);
  auto* const folded = static_cast<FoldedRow<typename Storage<S>::T>*>(call.workspace);
  strips.folded = folded, strips.values = reinterpret_cast<float*>(folded + int64_t(strips.all_words) * kEach<S>);
  strips.summed = strips_of(call.length, summed_strip(call.length), odd);
  const auto blocks_of = [&](int strip) {
    const int64_t groups = int64_t(1) << (kLogStripThreads - strips.log_wide), count = strips_of(call.length, strip, odd);
    return unsigned((count + groups - 1) / groups) * strips.wide;
  };
  const unsigned summing = blocks_of(summed_strip(call.length)), joining = (strips.all_words - 1) / kJoinWords + 1;
  cudaError_t error = cudaSuccess;
  const auto then = [&]<auto kernel>(unsigned blocks, int threads, const Strips& given) {
    if (error == cudaSuccess) error = early::launch<kernel>(blocks, threads, 0, stream, given);
  };
  if constexpr (op != Op::backward_from_output) {
    Strips of_x = strips;
    of_x.read[0] = strips.read[reads(op) - 1];
    then.template operator()<fold_strips<S, odd>>(summing, kStripThreads, of_x);
    then.template operator()<join_folds<S, odd>>(joining, kJoinThreads, of_x);
  }
  if constexpr (op != Op::forward) {
    then.template operator()<add_up_strips<op, S, odd>>(summing, kStripThreads, strips);
    then.template operator()<join_sums<S>>(joining, kJoinThreads, strips);
  }
  then.template operator()<write_strips<op, S, odd>>(blocks_of(written_strip(op)), kStripThreads, strips);
  return error;
}

template <Op op, typename S, bool exact, bool odd>
cudaError_t start_columns(const Columns& columns, const Call& call, cudaStream_t stream) {
  if constexpr (exact) return start_exact_tiles<op, S, odd>(columns, stream);
  else if (in_strips(call, sizeof(S), columns.tiling)) return start_strips<op, S, odd>(call, columns, stream);
  else return start_tiles<op, S, odd>(columns, stream);
}
template <Op op, typename S, bool exact>
cudaError_t start_columns(const Call& call, cudaStream_t stream) {
  const Columns columns = columns_of<op, S>(call);
  if constexpr (sizeof(S) == 2)
    if (is_odd(call.inner, sizeof(S))) return start_columns<op, S, exact, true>(columns, call, stream);
  return start_columns<op, S, exact, false>(columns, call, stream);
}

}  // namespace jitact::rows
