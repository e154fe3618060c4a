// The gradients of elements and of broadcast operands on a GPU, in one pass over dy and the saved tensors. Each block writes
// partial sums for its elements, in float (double for float64), which fold_sums adds up. There are no atomics, so the same call
// always gives the same bits.
//
// Operands with the same planes, see sums_cuda.cuh, are summed in one sweep, which also sums operands of a single value: one
// partial sum for each block. Any other operand takes another sweep, which only reads.
#pragma once

#include "column_sums_cuda.cuh"
#include "early_cuda.cuh"
#include "plane_sums_cuda.cuh"

namespace jitact::loops {

constexpr int64_t kLongPlane = 32;       // elements of planes for plane_sums, at least; or whole vectors, if values do not repeat
constexpr int64_t kFewVectors = 64;      // of longer planes for column_sums, at most, if values repeat
constexpr int64_t kManyRepeats = 128;    // so often, and kRowsPerVector times for each vector of a plane
constexpr int64_t kRowsPerVector = 16;
constexpr int64_t kSumsPerBlock = 8192;  // of fold_sums
constexpr int kFoldThreads = 512;
constexpr int64_t kFewFolds = 512;  // blocks of fold_sums that most GPUs begin while the last tiles of a large sweep are summed

// The shape of what fold_sums adds up for an operand: outer x count x inner sums, reduced over outer and inner.
struct FoldShape {
  static constexpr int kWide = 32, kManyValues = 8192;  // sums that use whole cache lines; of fewer values, half as many
  int64_t outer, count, inner;
  int wide;        // values of an operand per block
  int active;      // threads per block in use: all, or a multiple of wide * inner
  int64_t length;  // sums per block, of outer * wide * inner
  int64_t planes;  // the same in units of wide * inner, of outer
  int64_t splits;  // blocks that share the same values

  FoldShape(int64_t outer, int64_t count, int64_t inner) : outer(outer), count(count), inner(inner) {
    const int64_t few = kSumsPerBlock / 16 / outer;  // so a block has some sums where there are not many for each value
    wide = int(between((inner == 1 && count < kManyValues ? kWide / 2 : greater(kWide, few)) / inner, 1, count));
    const int64_t all = outer * wide * inner;
    splits = between(parts_of(all, kSumsPerBlock), 1, kSumsPerBlock / kWide);  // so after() has one
    active = wide == 1 ? kFoldThreads : int(kFoldThreads / (wide * inner) * (wide * inner));
    length = parts_of(parts_of(all, splits), active) * active;
    planes = length / (wide * inner);
  }
  int64_t size() const { return outer * count * inner; }
  int64_t folded() const { return splits * count; }
  FoldShape after() const { return FoldShape(splits, count, 1); }  // of what adds up the results
};

// What fold_sums does: into gradients, or into its results, which are added up once more.
struct Folds {
  FoldShape planes, single;      // for operands with the sweep's planes, and for those of a single value
  int64_t apart, results_apart;  // distances between the sums, and the results, of two operands
  void* gradients[kSums];        // null for an operand that is not summed now
  bool wide[kSums];              // whether the gradient is float32 though elements have 16 bits
  bool is_single[kSums];
  bool is_last;    // whether it computes gradients
  bool rehearses;  // see fold_sums

  JITACT_INLINE const FoldShape& shape(int k) const { return is_single[k] ? single : planes; }
};

// What fold_sums needs of a call: the operands that are prepared, whose gradients depend on their values.
struct Nothing { explicit Nothing(const Call&) {} };
using FoldLaunch = std::conditional_t<kPrepares, Launch, Nothing>;

// Block (x, y, z) adds up part y for the values of operand z from x * wide on.
template <typename S>
__global__ void __launch_bounds__(kFoldThreads, kMostBlocks * kThreads / kFoldThreads)
    fold_sums(const Value<S>* partials, Value<S>* results, const __grid_constant__ Folds folds,
              const __grid_constant__ FoldLaunch launch) {
  using T = typename Storage<S>::T;
  const int t = threadIdx.x, k = blockIdx.z;
  const FoldShape& shape = folds.shape(k);
  const int64_t c0 = int64_t(blockIdx.x) * shape.wide, all = shape.count * shape.inner;
  if (folds.gradients[k] == nullptr || c0 >= shape.count || blockIdx.y >= shape.splits) return;
  partials += k * folds.apart;

  const int inner = shape.wide > 1 ? int(shape.inner) : 1, span = shape.wide * inner;
  const Value<S>* begin = partials + c0 * shape.inner;
  const int64_t first = blockIdx.y * shape.length + t, all_of_value = shape.outer * shape.inner;
  int64_t step = kFoldThreads;
  int rows = kFoldThreads, count;  // sums of the thread: at most a length, which fits an int
  if (shape.wide > 1) {            // a thread always has the same value and inner index
    const int row = t / span, place = t - row * span;
    const int64_t plane = blockIdx.y * shape.planes + row;
    rows = shape.active / span, step = rows * all, count = 0;
    if (row < rows && c0 * shape.inner + place < all)
      count = int(min((blockIdx.y + 1) * shape.planes, shape.outer) - plane);
    begin += plane * all + place;
  } else {
    count = int(min((blockIdx.y + 1) * shape.length, all_of_value) - first);
    if (shape.outer == 1) begin += first;
  }
  __shared__ Value<S> shared[kFoldThreads], of_span[kFoldThreads];

  // Blocks that begin while a long sweep still runs add up twice. The first sums are of no use, but then the code, and the sums
  // that the sweep wrote long ago, are in caches when it has ended.
  Value<S> v;
#pragma unroll 1
  for (bool is_final = !ptx::kBeginsEarly || !folds.rehearses;; is_final = true) {
    if (is_final) ptx::wait_for_last();
    v = 0;
    if (shape.wide > 1 || shape.outer == 1) {
      constexpr int loads = 32 / sizeof(Value<S>);  // at once, which take as long as one
      const Value<S>* from = begin;
#pragma unroll 1
      for (int left = count; left > 0;) {
        Value<S> found[loads];
        JITACT_UNROLL for (int l = 0; l < loads; l++, from += step, left -= rows) found[l] = left > 0 ? ptx::load_anew(from) : 0;
        JITACT_UNROLL for (int l = 0; l < loads; l++) v += found[l];
      }
    } else {
      const int64_t at = blockIdx.y * shape.length + t;  // `first`, found again: no register keeps it meanwhile
#pragma unroll 1
      for (int i = 0; i < count; i += kFoldThreads) {
        const int64_t outer = (at + i) / shape.inner;
        v += ptx::load_anew(begin + (outer * all + (at + i - outer * shape.inner)));
      }
    }
    shared[t] = v;
    sum_columns<kFoldThreads>(shared, rows, span, [&](int place, Value<S> sum) { of_span[place] = sum; });
    __syncthreads();
    if (is_final) break;
  }
  if (t >= shape.wide) return;
  v = 0;
#pragma unroll 1
  for (int i = 0; i < inner; i++) v += of_span[t * inner + i];
  const int64_t c = c0 + t;
  if (c >= shape.count) return;
  if (!folds.is_last) {
    results[k * folds.results_apart + blockIdx.y * shape.count + c] = v;
    return;
  }
  T slope = 1;
  if constexpr (kPrepares) {
    T values[kPrepared];
    for (int b = 0; b < kPrepared; b++) values[b] = Operands<S>{launch}.value(kUnprepared + b, 0);
    slope = prepare_slope(values, k);
  }
  const T gradient = T(v) * slope;
  if (folds.wide[k]) static_cast<float*>(folds.gradients[k])[c] = float(gradient.v);
  else Storage<S>::store(static_cast<S*>(folds.gradients[k]) + c, gradient);
}

// The fewest vectors of `size` elements, a power of 2, that are a multiple of `elements`.
constexpr int64_t period_of(int64_t elements, int64_t size) {
  for (; elements % 2 == 0 && size > 1; elements /= 2) size /= 2;
  return elements;
}

// The parameters of one sweep, which sums operands with the same planes.
template <Op op, typename S>
struct Sweep {
  static constexpr int64_t size = Storage<S>::size;
  const Broadcasts& like;
  const int64_t count = like.count, inner = like.inner;
  bool columnwise;
  bool repeat = true;  // whether what is not summed uses the same values as what is
  int64_t blocks = 0;
  Tiles tiles;
  Parts parts;
  FoldShape sums, of_blocks;  // of operands with its planes, and of those of a single value
  int64_t apart, results_apart;  // see Folds

  Sweep(const Call& call, const Broadcasts& like)
      : like(like),
        columnwise(count > 1 && inner < kFewVectors * size && call.n / count / inner >= least_repeats()),
        sums(first_sums(call)),
        of_blocks(1, 1, blocks),
        apart(greater(sums.size(), of_blocks.size())),
        results_apart(greater(sums.folded(), of_blocks.folded())) {}

 private:
  // How often values repeat at least for column_sums.
  int64_t least_repeats() const {
    if (inner >= kLongPlane) return greater(kManyRepeats, inner / size * kRowsPerVector);
    return inner % size == 0 ? 2 : 1;
  }
  FoldShape first_sums(const Call& call) {
    for (int b = 0; b < kBroadcast; b++) repeat = repeat && (call.broadcast[b].count == 1 || same_planes(call.broadcast[b], like));
    if (columnwise) {
      const int64_t plane_set = count * inner;
      tiles = Tiles(period_of(plane_set, size), parts_of(call.n, size), kTileThreads<op, S>);
      blocks = tiles.across * tiles.down;
      return FoldShape(tiles.down * tiles.period * size / plane_set, count, inner);
    }
    const int64_t planes = count == 1 ? 1 : call.n / inner;
    parts = Parts(planes, call.n / planes, size), blocks = parts_of(parts.all << parts.log_group, kPlaneThreads);
    return count == 1 ? FoldShape(1, 1, blocks) : FoldShape(planes / count, count, parts.each);
  }
};

// The sweeps: for each, the first of the operands with its planes whose gradient is wanted. Operands of a single value are part of
// the first sweep.
struct Sweeps {
  int count = 0, of[kSums + 1] = {};

  explicit Sweeps(const Call& call) {
    for (int k = summed(call.op) - 1; k >= 0; k--)
      if (call.broadcast[k].count > 1) of[0] = k;  // if none is wanted; a sweep for a single value expects that all have one
    for (int k = 0; k < summed(call.op); k++) {
      bool is_new = call.broadcast[k].count > 1 && call.sums[k] != nullptr;
      for (int p = 0; p < count; p++)
        if (same_planes(call.broadcast[of[p]], call.broadcast[k])) is_new = false;
      if (is_new) of[count++] = k;
    }
    if (count == 0) count = 1;
  }
};

// The workspace that the folds of a sweep need, in values: for the partial sums, and for the results of a first fold.
template <Op op, typename S>
int64_t workspace_values(const Sweep<op, S>& sweep) { return summed(op) * (sweep.apart + sweep.results_apart); }

#if !JITACT_PART
extern "C" int64_t workspace_bytes(const Call& call) {
  int64_t bytes = 0;
  dispatch_sums(call.op, [&]<Op op>() {
    for_dtype_of(call, [&]<typename S>() {
      const Sweeps sweeps(call);
      for (int p = 0; p < sweeps.count; p++) {
        const Sweep<op, S> sweep(call, call.broadcast[sweeps.of[p]]);
        bytes = greater(bytes, workspace_values(sweep) * int64_t(sizeof(Value<S>)));
      }
    });
  });
  return bytes;
}
#endif

template <typename S>
void fold(Folds folds, const Value<S>* partials, Value<S>* results, const Call& call, int operands, cudaStream_t stream) {
  int64_t blocks = 0, splits = 0, all = 0;
  for (int k = 0; k < operands; k++) {
    if (folds.gradients[k] == nullptr) continue;
    const FoldShape& shape = folds.shape(k);
    const int64_t own = parts_of(shape.count, shape.wide);
    blocks = greater(blocks, own), splits = greater(splits, shape.splits), all += own * shape.splits;
  }
  if (blocks == 0) return;
  const dim3 grid{unsigned(blocks), unsigned(splits), unsigned(operands)};
  folds.rehearses = folds.rehearses && all <= kFewFolds;
  gpu::prefer_shared<fold_sums<S>>();
  early::launch<fold_sums<S>>(grid, kFoldThreads, 0, stream, partials, results, folds, FoldLaunch(call));
}

// Computes gradients from the partial sums of a sweep: of the operands with its planes and, in the first sweep, of those of a
// single value.
template <Op op, typename S>
void fold_sweep(const Sweep<op, S>& sweep, const Call& call, bool first, cudaStream_t stream) {
  constexpr int kSummed = summed(op);
  auto* partials = static_cast<Value<S>*>(call.workspace);
  auto* results = partials + kSummed * sweep.apart;
  Folds folds{sweep.sums, sweep.of_blocks, sweep.apart, sweep.results_apart};
  folds.is_last = true, folds.rehearses = call.n / sweep.size >= Tiles::kLarge;
  for (int k = 0; k < kSummed; k++) {
    const Broadcasts& operand = call.broadcast[k];
    folds.is_single[k] = operand.count == 1, folds.wide[k] = operand.wide;
    if (!(folds.is_single[k] ? first : same_planes(operand, sweep.like)) || call.sums[k] == nullptr) continue;
    folds.gradients[k] = call.sums[k];
    if (folds.shape(k).splits > 1) folds.is_last = false;
  }
  fold<S>(folds, partials, results, call, kSummed, stream);
  if (folds.is_last) return;
  folds.planes = folds.planes.after(), folds.single = folds.single.after(), folds.apart = folds.results_apart;
  folds.is_last = true, folds.rehearses = false;
  fold<S>(folds, results, nullptr, call, kSummed, stream);
}

template <Op op, typename S>
void launch_sums(const Call& call, cudaStream_t stream) {
  const Sweeps sweeps(call);
  Call reading = call;  // a sweep that only reads
  for (Elements& written : reading.written) written.data = nullptr;
  for (int p = 0; p < sweeps.count; p++) {
    const Call& now = p == 0 ? call : reading;
    const Sweep<op, S> sweep(now, now.broadcast[sweeps.of[p]]);
    const Launch launch(now);
    auto* partials = static_cast<Value<S>*>(now.workspace);
    constexpr int shared = kCopied<op> ? cudaSharedmemCarveoutMaxShared : 45;  // the fold has the former
    if (sweep.columnwise) {
      constexpr int threads = kTileThreads<op, S>;
      const dim3 grid{unsigned(sweep.tiles.across), unsigned(sweep.tiles.down)};
      gpu::prefer_shared<column_sums<op, S>, shared>();
      early::launch<column_sums<op, S>>(grid, threads, 0, stream, launch, partials, sweep.apart, sweep.tiles, sweep.repeat);
    } else {
      const unsigned blocks = unsigned(sweep.blocks);
      gpu::prefer_shared<plane_sums<op, S>, shared>();
      early::launch<plane_sums<op, S>>(blocks, kPlaneThreads, 0, stream, launch, partials, sweep.apart, sweep.parts, sweep.repeat);
    }
    fold_sweep(sweep, call, p == 0, stream);
  }
}

}  // namespace jitact::loops
