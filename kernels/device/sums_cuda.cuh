// The kernels that write the gradients of elements, and partial sums of those of broadcast operands, see reduce_cuda.cuh.
//
// Memory consists of planes: runs of `inner` elements that use the same value of an operand; plane p has value p % count.
//   Longer planes, or a single value: plane_sums, see plane_sums_cuda.cuh.
//   Shorter planes, or many of a few vectors: column_sums, see column_sums_cuda.cuh.
#pragma once

#include "computation_cuda.cuh"

namespace jitact::loops {

// Not from <algorithm> and <numeric>, which nvcc would compile several times in every build.
constexpr int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t greater(int64_t a, int64_t b) { return a < b ? b : a; }
constexpr int64_t between(int64_t x, int64_t low, int64_t high) { return greater(low, lesser(x, high)); }
// How many parts a whole has, of which the last may be shorter.
constexpr int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

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

}  // namespace jitact::loops
