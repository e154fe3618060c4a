// The kernels that write the gradients of elements, and partial sums of those of broadcast operands, see reduce_cuda.cuh.
//
// Memory consists of planes: runs of `inner` elements that use the same value of an operand; plane p has value p % count.
//   Longer planes, or a single value: segment_sums. Each thread has a few vectors; a block sums the parts of planes that are in it.
//     A plane has `slots` partial sums, one for each block that it may be in.
//   Shorter planes: column_sums, see column_sums_cuda.cuh.
#pragma once

#include "computation_cuda.cuh"

namespace jitact::loops {

// Not from <algorithm> and <numeric>, which nvcc would compile several times in every build.
constexpr int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t greater(int64_t a, int64_t b) { return a < b ? b : a; }
constexpr int64_t between(int64_t x, int64_t low, int64_t high) { return greater(low, lesser(x, high)); }

template <typename T>
JITACT_DEVICE T warp_sum(T v, int lanes = 32) {
  for (int step = lanes / 2; step > 0; step /= 2) v += __shfl_down_sync(0xffffffffu, v, step, lanes);
  return v;
}

// The sum of v over the block's threads, by all of which it is called.
template <int threads, typename V>
JITACT_DEVICE V block_sum(V v) {
  __shared__ V of_warps[threads / 32];
  v = warp_sum(v);
  __syncthreads();  // the last sum has been read
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = v;
  __syncthreads();
  V sum = of_warps[0];
  JITACT_UNROLL for (int w = 1; w < threads / 32; w++) sum += of_warps[w];
  return sum;
}

// Calls keep(c, sum) with the sum of each column of a matrix in shared memory, in some thread of the block, by all of which it is
// called after they have written. The matrix has at most kAtOnce elements for each thread. It may be overwritten, and other threads
// may still read it when a thread returns.
template <int threads, typename V, typename Keep>
JITACT_DEVICE void sum_columns(V* matrix, int rows, int width, const Keep& keep) {
  constexpr int kAtOnce = 8;  // rows that a thread loads at once: it adds up as many, or up to twice as many
  for (const int t = threadIdx.x;;) {
    const int parts = rows < 2 * kAtOnce ? 1 : rows / kAtOnce, left = parts * width, all = rows * width;
    V sum = 0;
    __syncthreads();
#pragma unroll 1
    for (int c = t; c < left; c += threads) {
      sum = 0;
#pragma unroll 1
      for (int from = c; from < all; from += kAtOnce * left)
        JITACT_UNROLL for (int r = 0; r < kAtOnce; r++)
          if (from + r * left < all) sum += matrix[from + r * left];
      if (parts == 1) keep(c, sum);
    }
    if (parts == 1) return;
    __syncthreads();
    if (t < left) matrix[t] = sum;
    rows = parts;
  }
}

template <typename S> using Value = typename Storage<S>::T::Value;

// Adds a gradient to a sum. Never contracted to an fma with the gradient's last product: the compiler would do that in some
// loops only, and sums would depend on the layout of tensors.
template <typename T>
JITACT_DEVICE void add_to(T& sum, T gradient) { sum = T(ptx::add(sum.v, gradient.v)); }

// Whether operand k has a single value: one partial sum for each block.
JITACT_DEVICE bool is_single(const Launch& launch, int k) { return k >= kMany || launch.broadcast[k].count == 1; }

template <Op op> constexpr bool kDense = reads_bits(op) || !kAlwaysRows;

// The loaded data of a vector's elements.
template <Op op, typename S>
struct Inputs {
  typename Storage<S>::Vector words[reads(op)];
  unsigned bits = 0;  // the vector's mask bits are the lowest
};
template <Op op, typename S>
JITACT_DEVICE void load_if(bool exists, const Launch& launch, int64_t at, Inputs<op, S>& inputs) {
  if (!exists) return;
  const auto read = [&](const auto& vector) {
    JITACT_UNROLL for (int r = 0; r < reads(op); r++) inputs.words[r] = vector(r, at);
  };
  if constexpr (kDense<op>) read([&](int r, int64_t at) { return read_vector<op, S, true>(launch, r, at); });
  else read_rows<op, S>(launch, read);
  if constexpr (reads_bits(op)) inputs.bits = launch.mask[at >> 3] >> (at & 7);
}

// Computes a vector that has been loaded, and calls write with its results.
template <Op op, typename S, typename Add, typename Write>
JITACT_DEVICE void compute_vector(const Computation<op, S, Storage<S>::size, Add>& computation, Inputs<op, S>& inputs,
                                  const Write& write) {
  using T = typename Storage<S>::T;
  constexpr int ins = reads(op);
  const Launch& launch = computation.launch;
  T in[ins][Storage<S>::size], out[writes(op)][Storage<S>::size];
  if constexpr (!kDense<op> && reads_two(op)) separate<S>(launch.alternating_in, inputs.words[ins - 2], inputs.words[ins - 1]);
  JITACT_UNROLL for (int r = 0; r < ins; r++) Storage<S>::widen(inputs.words[r], in[r]);
  computation.elements(in, inputs.bits, [&](int w, int i, T result) { out[w][i] = result; });
  write(out);
}

// Reads, computes and writes one element, of the last block or of unaligned memory.
template <Op op, typename S, typename Add>
JITACT_DEVICE void compute_alone(const Computation<op, S, 1, Add>& computation, int64_t at) {
  bool bit = false;
  if constexpr (reads_bits(op)) bit = computation.launch.mask[at >> 3] >> (at & 7) & 1;
  computation.template one<kDense<op>>(at, bit);
}

// The division of memory into planes.
struct Cut {
  int64_t count, inner;
  Divisor by_inner;

  Cut(int64_t count, int64_t inner) : count(count), inner(inner), by_inner(inner) {}
};

// The layout of segment_sums' partial sums.
struct Segments {
  int64_t slots;  // blocks that a plane may be in
  int lanes;      // threads that sum a plane's part of a block: a power of 2, at most 32
};

// Writes the block's sum for each plane in it. The block has `valid` elements, and begins `rest` elements into the first plane.
// Each vector of `size` elements has two adjacent sums.
template <int size, int kSummed, int entries, typename V>
JITACT_DEVICE void write_sums_of_planes(const Launch& launch, const V (&sums)[kSummed][entries], V* partials, int64_t apart,
                                        const Cut& cut, const Segments& segments, int64_t plane, int64_t rest, int valid) {
  constexpr int per_block = entries / 2 * size;
  const int t = threadIdx.x;
  const int64_t inner = cut.inner;
  const int count = inner >= per_block ? 1 + (rest + valid > inner) : (unsigned(rest) + valid - 1) / unsigned(inner) + 1;
  const int lanes = segments.lanes, groups = kThreads / lanes, lane = t % lanes;
  // The index of the first sum of the plane that begins `offset` elements into the block: the second sum of the vector
  // that it shares with the previous plane.
  const auto begin_of = [&](int64_t offset) { return 2 * int((offset + size - 1) / size) - 1; };
  for (int base = 0; base < count; base += groups) {
    const int q = base + t / lanes;
    const bool exists = q < count, ends = (q + 1) * inner - rest <= per_block;
    const int from = q == 0 ? 0 : begin_of(q * inner - rest);
    const int to = q + 1 >= count ? entries : begin_of((q + 1) * inner - rest);
    const int64_t slot = q == 0 ? (rest + per_block - 1) / per_block : 0;  // blocks before this one that have part of the plane
    for (int k = 0; k < kSummed; k++) {
      if (is_single(launch, k)) continue;
      V v = 0;
      if (exists)
        for (int i = from + lane; i < to; i += lanes) v += sums[k][i];
      v = warp_sum(v, lanes);
      V* place = partials + k * apart + (plane + q) * segments.slots + slot;
      if (exists && lane == 0) {
        place[0] = v;
        if (ends && slot + 1 < segments.slots) place[1] = 0;
      }
    }
  }
}

template <Op op, typename S, bool one_value>
__global__ void __launch_bounds__(kThreads)
    segment_sums(const __grid_constant__ Launch launch, Value<S>* __restrict__ partials, int64_t apart, const Cut cut,
                 const Segments segments) {
  using T = typename Storage<S>::T;
  ptx::let_next_begin();
  const Operands<S> operands{launch};
  const auto numbers = launch.numbers_as<T>();
  const int64_t n = launch.n;
  constexpr int size = Storage<S>::size, stride = kThreads * size, vectors = vectors_of<op, S>(), kSummed = summed(op);
  constexpr int per_block = stride * vectors;
  const int t = threadIdx.x;
  const int64_t block = int64_t(blockIdx.x) * per_block;
  const int64_t first = block + t * size;  // this thread's first element; its next vector is `stride` further on
  const bool whole = launch.aligned && block + per_block <= n;
  Inputs<op, S> inputs[vectors];
  JITACT_UNROLL for (int v = 0; v < vectors; v++) load_if<op, S>(whole, launch, first + v * stride, inputs[v]);
  const auto common = operands.common();
  // The block begins `rest` elements into plane `plane`.
  int64_t plane = 0, rest = block;
  if constexpr (!one_value) {
    plane = cut.by_inner.divide(block);
    rest = block - plane * cut.inner;
  }

  // Sums in memory order, two for each vector: for the plane in which it begins and for the next one.
  constexpr int entries = kThreads * 2 * vectors;
  __shared__ Value<S> sums[one_value ? 1 : kSummed][one_value ? 1 : entries];
  T sum[kSummed], next_sum[kSummed];
  JITACT_UNROLL for (int v = 0; v < vectors; v++) {
    const int64_t at = first + v * stride;
    int64_t step = 0;  // planes from the block's first to the one in which the vector begins
    int left = size;   // elements of the vector that are of that plane
    if constexpr (!one_value) {
      if (cut.inner >= per_block) {
        const int64_t offset = at - block + rest;
        step = offset >= cut.inner;
        left = int(min(int64_t(size), (step + 1) * cut.inner - offset));
      } else {  // 32 bits take a fraction of the instructions
        const uint32_t offset = uint32_t(at - block) + uint32_t(rest), inner = uint32_t(cut.inner);
        const uint32_t planes = cut.by_inner.divide_small(offset);
        step = planes;
        left = min(size, int((planes + 1) * inner - offset));
      }
      JITACT_UNROLL for (int k = 0; k < kSummed; k++) sum[k] = next_sum[k] = 0;
    }
    const auto add = [&](int i, int k, T gradient) {
      const bool next = !one_value && i >= left;
      add_to(sum[k], next ? T(0) : gradient);
      if constexpr (!one_value) add_to(next_sum[k], next ? gradient : T(0));
    };
    if (whole) {
      typename Operands<S>::template Values<size> others;
      if constexpr (!one_value && kBroadcast == 1 && kRandom == 0) others = operands.in_planes(plane + step, left);
      else others = operands.template from<size, kMany == 0 || (one_value && kSummed == kBroadcast)>(common, at);
      const auto compute = [&](const auto& with) {
        const Computation<op, S, size, std::decay_t<decltype(with)>> computation{
            .launch = launch,
            .others = others,
            .numbers = numbers,
            .add = with,
        };
        compute_vector(computation, inputs[v], [&](const auto& out) { write_vectors<op, S, kDense<op>>(launch, out, at); });
      };
      if constexpr (one_value) {
        compute(add);
      } else {
        T found[kSummed][size];
        compute([&](int i, int k, T gradient) { found[k][i] = gradient; });
        JITACT_UNROLL for (int k = 0; k < kSummed; k++) {
          if (left == size) {  // true for most vectors: a quarter of the instructions
            JITACT_UNROLL for (int i = 0; i < size; i++) add_to(sum[k], found[k][i]);
          } else {
            JITACT_UNROLL for (int i = 0; i < size; i++) add(i, k, found[k][i]);
          }
        }
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < size && at + i < n; i++) {
        const auto others = operands.template from<1>(common, at + i);
        const Computation<op, S, 1, std::decay_t<decltype(add)>> computation{
            .launch = launch,
            .others = others,
            .numbers = numbers,
            .add = add,
        };
        compute_alone(computation, at + i);
      }
    }
    if constexpr (!one_value) {
      JITACT_UNROLL for (int k = 0; k < kSummed; k++) {
        sums[k][(v * kThreads + t) * 2] = sum[k].v;
        sums[k][(v * kThreads + t) * 2 + 1] = next_sum[k].v;
      }
    }
  }

  if constexpr (!one_value) {
    __syncthreads();
    const int valid = int(min(int64_t(per_block), n - block));
    write_sums_of_planes<size>(launch, sums, partials, apart, cut, segments, plane, rest, valid);
  }
  JITACT_UNROLL for (int k = 0; k < kSummed; k++) {
    if (!one_value && !is_single(launch, k)) continue;
    Value<S> own = sum[k].v;
    if constexpr (!one_value) {
      own = 0;
      for (int i = t; i < entries; i += kThreads) own += sums[k][i];
    }
    const Value<S> total = block_sum<kThreads>(own);
    if (t == 0) partials[k * apart + blockIdx.x] = total;
  }
}

}  // namespace jitact::loops
