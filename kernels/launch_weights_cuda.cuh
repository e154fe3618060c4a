// dx and the gradients of the weights on a GPU, in one pass over dy and x. Each block adds up what its elements contribute
// and writes partial sums in float (double for float64), which fold_sums adds up: nothing is atomic, so the same call
// always gives the same bits.
//
// Memory is cut into planes, stretches of `inner` elements of one channel: plane p is of channel p % channels.
//   Planes of kLongPlane elements and more, or one channel: segment_sums, each thread a few vectors; a block adds up the parts
//     of the planes that lie in it. The partial sums of a plane fill `slots` places, one for each block that it lies in.
//   Shorter planes: column_sums. After `period` vectors the channels repeat, so a thread that goes on by a multiple of them
//     stays with its channels and adds up in registers.
#pragma once

#include "launch_extras_cuda.cuh"

namespace jitact {

constexpr int64_t kLongPlane = 32;
constexpr int kColumnThreads = 1 << 18;  // of column_sums: what fills a large GPU
constexpr int64_t kRowsPerThread = 16;   // of column_sums, at least: their partial sums are then a small part of the traffic
constexpr int64_t kSumsPerBlock = 8192;  // of fold_sums

// Without <algorithm> and <numeric>, which three compilers would read for every build.
constexpr int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t greater(int64_t a, int64_t b) { return a < b ? b : a; }
constexpr int64_t clamp(int64_t x, int64_t low, int64_t high) { return greater(low, lesser(x, high)); }

template <typename T>
__device__ __forceinline__ T warp_sum(T v, int lanes = 32) {
  for (int step = lanes / 2; step > 0; step /= 2) v += __shfl_down_sync(0xffffffffu, v, step, lanes);
  return v;
}

// How the planes lie in the blocks of segment_sums.
struct Segments {
  int64_t slots;   // blocks that a plane may lie in
  int64_t planes;
  int lanes;       // threads that add up a plane's part of a block: a power of 2, at most 32
};

template <typename S, bool has_channels>
__global__ void __launch_bounds__(kThreads)
    segment_sums(const S* __restrict__ dy, const S* __restrict__ x, S* __restrict__ dx,
                 typename Storage<S>::T::Value* __restrict__ partials, int64_t n, bool aligned, const Extras<S> extras,
                 const Segments segments, const Params<typename Storage<S>::T> params) {
  using T = typename Storage<S>::T;
  using Value = typename T::Value;
  constexpr int size = Storage<S>::size, stride = kThreads * size, vectors = kVectors<Op::backward, S>;
  constexpr int per_block = stride * vectors;
  const int t = threadIdx.x;
  const int64_t block = int64_t(blockIdx.x) * per_block;
  const int64_t first = block + t * size;  // of this thread's first vector; the next is `stride` further on
  const bool whole = aligned && block + per_block <= n;
  Words vdy[vectors], vx[vectors];
#pragma unroll
  for (int v = 0; v < vectors; v++) {
    if (whole) {
      vdy[v] = *reinterpret_cast<const Words*>(dy + first + v * stride);
      vx[v] = *reinterpret_cast<const Words*>(x + first + v * stride);
    }
  }
  const auto common = extras.common();
  // The block begins `rest` elements into plane `plane`.
  int64_t plane = 0, rest = block;
  if constexpr (has_channels) {
    plane = extras.by_inner.divide(block);
    rest = block - plane * extras.inner;
  }

  // Sums in the order of memory. With channels, a vector has two: for the plane where it begins and for the next one.
  constexpr int entries = kThreads * (has_channels ? 2 * vectors : 1);
  __shared__ Value sums[kLearned][entries];
  Gradients<T, kLearned> sum{}, next_sum{};
#pragma unroll
  for (int v = 0; v < vectors; v++) {
    const int64_t at = first + v * stride;
    T w[kExtras], next_w[kExtras];
    int left = size;  // elements of the vector that are of the plane where it begins
    if constexpr (has_channels) {
      const int64_t offset = at - block + rest;
      const int64_t step = extras.inner >= per_block ? offset >= extras.inner : unsigned(offset) / unsigned(extras.inner);
      left = int(min(int64_t(size), (step + 1) * extras.inner - offset));
      const int64_t c = plane + step - extras.by_channels.divide(plane + step) * extras.channels;
      extras.load(c, w);
      if (left < size) extras.load(c + 1 == extras.channels ? 0 : c + 1, next_w);
      sum = next_sum = {};
    } else {
      for (int k = 0; k < kExtras; k++) w[k] = common.w[k];
    }

    T tdy[size], tx[size];
    if (whole) {
      Storage<S>::widen(vdy[v], tdy);
      Storage<S>::widen(vx[v], tx);
    } else {
      load_some<S>(dy, at, n, tdy);
      load_some<S>(x, at, n, tx);
    }
#pragma unroll
    for (int i = 0; i < size; i++) {
      const bool next = has_channels && i >= left;
      const auto weight = [&](size_t k) { return next ? next_w[k] : w[k]; };
      const auto gain = weight_gradients_with<T>(tdy[i], tx[i], weight, params);
      for (int k = 0; k < kLearned; k++) {
        sum.of[k] += next ? 0 : gain.of[k];
        if constexpr (has_channels) next_sum.of[k] += next ? gain.of[k] : 0;
      }
      bool bit = false;
      tdy[i] = element_with<Op::backward>(tdy[i], tx[i], bit, weight, params);
    }
    if (whole && dx) {
      Storage<S>::narrow(tdy, vdy[v]);
      *reinterpret_cast<Words*>(dx + at) = vdy[v];
    } else if (dx) {
      store_some<S>(dx, at, n, tdy);
    }
    if constexpr (has_channels) {
      for (int k = 0; k < kLearned; k++) {
        sums[k][(v * kThreads + t) * 2] = sum.of[k].v;
        sums[k][(v * kThreads + t) * 2 + 1] = next_sum.of[k].v;
      }
    }
  }

  if constexpr (!has_channels) {
    for (int k = 0; k < kLearned; k++) sums[k][t] = sum.of[k].v;
    __syncthreads();
    const int k = t / 32;
    static_assert(kLearned <= kThreads / 32);
    if (k >= kLearned) return;
    Value v = 0;
#pragma unroll
    for (int i = 0; i < kThreads; i += 32) v += sums[k][i + t % 32];
    v = warp_sum(v);
    if (t % 32 == 0) partials[k * segments.slots + blockIdx.x] = v;
  } else {
    __syncthreads();
    const int64_t inner = extras.inner;
    const int valid = int(min(int64_t(per_block), n - block));
    const int count = inner >= per_block ? 1 + (rest + valid > inner) : (unsigned(rest) + valid - 1) / unsigned(inner) + 1;
    const int lanes = segments.lanes, groups = kThreads / lanes, lane = t % lanes;
    // Where the sums of the plane that begins `offset` elements into the block begin: with the second sum of the vector
    // that it shares with the plane before.
    const auto entry = [&](int64_t offset) { return 2 * int((offset + size - 1) / size) - 1; };
    for (int base = 0; base < count; base += groups) {
      const int q = base + t / lanes;
      const bool exists = q < count, ends = (q + 1) * inner - rest <= per_block;
      const int from = q == 0 ? 0 : entry(q * inner - rest);
      const int to = q + 1 >= count ? entries : entry((q + 1) * inner - rest);
      const int64_t slot = q == 0 ? (rest + per_block - 1) / per_block : 0;  // blocks that the plane lies in before this one
      for (int k = 0; k < kLearned; k++) {
        Value v = 0;
        if (exists)
          for (int i = from + lane; i < to; i += lanes) v += sums[k][i];
        v = warp_sum(v, lanes);
        Value* place = partials + (k * segments.planes + plane + q) * segments.slots + slot;
        if (exists && lane == 0) {
          place[0] = v;
          if (ends && slot + 1 < segments.slots) place[1] = 0;
        }
      }
    }
  }
}

#ifdef JITACT_CHANNELS

// How column_sums walks memory, in vectors.
struct Columns {
  int64_t period;   // after which channels repeat
  int64_t threads;  // that take part: a multiple of period
  int active;       // threads of a block that take part: all, or a multiple of period
  int64_t width;    // sums that a block writes, unless period is longer than a block: then each thread writes its own
};

template <typename S>
__global__ void __launch_bounds__(kThreads)
    column_sums(const S* __restrict__ dy, const S* __restrict__ x, S* __restrict__ dx,
                typename Storage<S>::T::Value* __restrict__ partials, int64_t n, bool aligned, const Extras<S> extras,
                const Columns columns, int64_t places, const Params<typename Storage<S>::T> params) {
  using T = typename Storage<S>::T;
  using Value = typename T::Value;
  constexpr int size = Storage<S>::size;
  const int t = threadIdx.x;
  const int64_t g = int64_t(blockIdx.x) * columns.active + t;
  const bool takes_part = t < columns.active && g < columns.threads;
  T extra[kExtras][size];
  Gradients<T, kLearned> sums[size] = {};
  extras.fill(extras.common(), g * size, extra);

  const auto compute = [&](T& tdy, T tx, int i) {
    const auto weight = [&](size_t k) { return extra[k][i]; };
    sums[i] += weight_gradients_with<T>(tdy, tx, weight, params);
    bool bit = false;
    tdy = element_with<Op::backward>(tdy, tx, bit, weight, params);
  };
  int64_t v = g;
  const int64_t vectors = takes_part && aligned ? n / size : 0;
#pragma unroll 2
  for (; v < vectors; v += columns.threads) {
    Words vdy = *reinterpret_cast<const Words*>(dy + v * size);
    const Words vx = *reinterpret_cast<const Words*>(x + v * size);
    T tdy[size], tx[size];
    Storage<S>::widen(vdy, tdy);
    Storage<S>::widen(vx, tx);
#pragma unroll
    for (int i = 0; i < size; i++) compute(tdy[i], tx[i], i);
    Storage<S>::narrow(tdy, vdy);
    if (dx) *reinterpret_cast<Words*>(dx + v * size) = vdy;
  }
  // The end, or memory that does not lie on 16 bytes.
  for (; takes_part && v * size < n; v += columns.threads) {
#pragma unroll
    for (int i = 0; i < size; i++) {
      if (v * size + i < n) {
        T tdy = Storage<S>::load(dy + v * size + i);
        compute(tdy, Storage<S>::load(x + v * size + i), i);
        if (dx) Storage<S>::store(dx + v * size + i, tdy);
      }
    }
  }

  if (columns.period > kThreads) {
    for (int k = 0; takes_part && k < kLearned; k++)
#pragma unroll
      for (int i = 0; i < size; i++) partials[k * places + g * size + i] = sums[i].of[k].v;
    return;
  }
  __shared__ Value shared[kThreads * size];
  const int width = int(columns.width);
  for (int k = 0; k < kLearned; k++) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < size; i++) shared[t * size + i] = sums[i].of[k].v;
    __syncthreads();
    for (int j = t; j < width; j += kThreads) {
      Value sum = 0;
      for (int i = j; i < columns.active * size; i += width) sum += shared[i];
      partials[k * places + blockIdx.x * columns.width + j] = sum;
    }
  }
}

#endif

// What fold_sums adds up: for each weight, `outer` times `channels` times `inner` sums.
struct Sums {
  int64_t outer, channels, inner;
  int wide;        // channels that a block takes
  int64_t length;  // of what a block takes, of outer * wide * inner
  int64_t splits;  // blocks that share the same channels

  Sums(int64_t outer, int64_t channels, int64_t inner) : outer(outer), channels(channels), inner(inner) {
    wide = int(clamp(32 / inner, 1, channels));
    const int64_t all = outer * wide * inner;
    splits = clamp((all + kSumsPerBlock - 1) / kSumsPerBlock, 1, kSumsPerBlock / wide);
    const int64_t step = active();
    length = ((all + splits - 1) / splits + step - 1) / step * step;
  }
  __host__ __device__ int active() const { return wide == 1 ? kThreads : int(kThreads / (wide * inner) * (wide * inner)); }
  int64_t count() const { return kLearned * outer * channels * inner; }
};

template <typename S> struct WeightGradients { S* of[kLearned]; };

// Block (x, y, z) adds up, of weight z, channels from x * wide on, part y: to `folded`, laid out [splits, channels], or, if
// there is but one part, to the gradients.
template <typename S>
__global__ void __launch_bounds__(kThreads)
    fold_sums(const typename Storage<S>::T::Value* partials, typename Storage<S>::T::Value* folded, const Sums sums,
              const Extras<S> extras, const WeightGradients<S> gradients) {
  using T = typename Storage<S>::T;
  using Value = typename T::Value;
  const int t = threadIdx.x, k = blockIdx.z;
  const int64_t c0 = int64_t(blockIdx.x) * sums.wide, span = sums.wide * sums.inner, active = sums.active();
  const int64_t begin = blockIdx.y * sums.length, end = min(begin + sums.length, sums.outer * span);
  partials += k * sums.outer * sums.channels * sums.inner;

  Value v = 0;
  if (t < active) {
    for (int64_t i = begin + t; i < end; i += active) {
      const int64_t outer = i / span, place = c0 * sums.inner + (i - outer * span);
      if (place < sums.channels * sums.inner) v += partials[outer * sums.channels * sums.inner + place];
    }
  }
  __shared__ Value shared[kThreads];
  if (sums.wide == 1) {
    v = warp_sum(v);
    if (t % 32 == 0) shared[t / 32] = v;
    __syncthreads();
    v = warp_sum(t < kThreads / 32 ? shared[t] : Value(0));
  } else {
    shared[t] = v;
    __syncthreads();
    v = 0;
    const int inner = int(sums.inner);
    for (int row = 0; t < sums.wide && row < active; row += int(span))
      for (int i = 0; i < inner; i++) v += shared[row + t * inner + i];
  }
  const int64_t c = c0 + t;
  if (t >= sums.wide || c >= sums.channels) return;
  if (sums.splits > 1) {
    folded[(k * sums.splits + blockIdx.y) * sums.channels + c] = v;
  } else {
    T weights[kExtras];
    for (int i = 0; i < kExtras; i++) weights[i] = Storage<S>::load(extras.weights[i] + c);
    Storage<S>::store(gradients.of[k] + c, T(v) * prepare_slope(weights, k));
  }
}

// The fewest vectors of `size` elements, a power of 2, that hold a multiple of `elements`.
constexpr int64_t period_of(int64_t elements, int64_t size) {
  for (; elements % 2 == 0 && size > 1; elements /= 2) size /= 2;
  return elements;
}

// How a call is carried out.
template <typename S>
struct WeightPlan {
  static constexpr int64_t size = Storage<S>::size, per_block = kThreads * size * kVectors<Op::backward, S>;
  bool columnwise;
  int64_t blocks;
  Segments segments{};
#ifdef JITACT_CHANNELS
  Columns columns{};
#endif
  Sums sums, folded;

  explicit WeightPlan(const Call& call)
      : columnwise(call.channels > 1 && call.inner < kLongPlane),
        blocks((call.n + per_block - 1) / per_block),
        sums(first_sums(call)),
        folded(sums.splits, call.channels, 1) {}

  int64_t bytes() const { return (sums.count() + folded.count()) * int64_t(sizeof(typename Storage<S>::T::Value)); }

 private:
  Sums first_sums(const Call& call) {
    if (call.channels == 1) {
      segments = {blocks, 1, 32};
      return Sums(1, 1, blocks);
    }
#ifdef JITACT_CHANNELS
    if (columnwise) {
      const int64_t plane_set = call.channels * call.inner, period = period_of(plane_set, size);
      const int64_t vectors = (call.n + size - 1) / size;
      columns.period = period;
      if (period <= kThreads) {
        columns.active = int(kThreads / period * period);
        columns.width = period * size;
        blocks = clamp(vectors / (columns.active * kRowsPerThread), 1, kColumnThreads / kThreads);
        columns.threads = blocks * columns.active;
        return Sums(blocks * columns.width / plane_set, call.channels, call.inner);
      }
      const int64_t rows = lesser(kColumnThreads / period, vectors / (period * kRowsPerThread));
      columns.active = kThreads;
      columns.threads = greater(1, rows) * period;
      blocks = (columns.threads + kThreads - 1) / kThreads;
      return Sums(columns.threads * size / plane_set, call.channels, call.inner);
    }
#endif
    const int64_t entries = 2 * lesser(per_block, call.inner) / size;  // that a plane has in a block
    segments = {(call.inner - 1 + per_block - 1) / per_block + 1, call.n / call.inner, 1};
    while (segments.lanes < 32 && segments.lanes * 8 <= entries) segments.lanes *= 2;
    return Sums(segments.planes / call.channels, call.channels, segments.slots);
  }
};

int64_t workspace_bytes(const Call& call) {
  return dispatch_dtype(call.dtype, [&]<typename S>() { return WeightPlan<S>(call).bytes(); });
}

template <typename S>
void fold(const Sums& sums, const typename Storage<S>::T::Value* partials, typename Storage<S>::T::Value* folded,
          const Call& call, cudaStream_t stream) {
  WeightGradients<S> gradients;
  for (int k = 0; k < kLearned; k++) gradients.of[k] = static_cast<S*>(call.gradients[k]);
  const dim3 grid(unsigned((sums.channels + sums.wide - 1) / sums.wide), unsigned(sums.splits), kLearned);
  fold_sums<S><<<grid, kThreads, 0, stream>>>(partials, folded, sums, Extras<S>(call), gradients);
}

template <typename S>
void launch_backward_weights(const Call& call, cudaStream_t stream) {
  using Value = typename Storage<S>::T::Value;
  const WeightPlan<S> plan(call);
  const auto* dy = static_cast<const S*>(call.a);
  const auto* x = static_cast<const S*>(call.b);
  auto* dx = static_cast<S*>(call.out);
  const bool aligned = on_16_bytes(dy) && on_16_bytes(x) && on_16_bytes(dx);
  const Extras<S> extras(call);
  const Params<typename Storage<S>::T> params(call.params);
  auto* partials = static_cast<Value*>(call.workspace);
  Value* folded = partials + plan.sums.count();
  const unsigned blocks = unsigned(plan.blocks);

  if (call.channels == 1) {
    segment_sums<S, false><<<blocks, kThreads, 0, stream>>>(dy, x, dx, partials, call.n, aligned, extras, plan.segments, params);
  } else {
#ifdef JITACT_CHANNELS
    if (plan.columnwise)
      column_sums<S><<<blocks, kThreads, 0, stream>>>(dy, x, dx, partials, call.n, aligned, extras, plan.columns,
                                                      plan.sums.count() / kLearned, params);
    else
      segment_sums<S, true><<<blocks, kThreads, 0, stream>>>(dy, x, dx, partials, call.n, aligned, extras, plan.segments, params);
#endif
  }
  fold<S>(plan.sums, partials, folded, call, stream);
  if (plan.sums.splits > 1) fold<S>(plan.folded, folded, nullptr, call, stream);
}

}  // namespace jitact
