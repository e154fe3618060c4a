// The vectors of a GPU's loops over elements: how many a thread has, where they are in memory, and how they are read and written.
#pragma once

#include "gpu_cuda.cuh"
#include "launch.cuh"
#include "memory_cuda.cuh"

// Vectors per thread for elements of 8, 4 and 2 bytes. The loader defines what is best for the activation; these are defaults.
#ifndef JITACT_FORWARD_VECTORS_8
#define JITACT_FORWARD_VECTORS_8 3
#define JITACT_FORWARD_VECTORS_4 3
#define JITACT_FORWARD_VECTORS_2 2
#define JITACT_BACKWARD_VECTORS_8 3
#define JITACT_BACKWARD_VECTORS_4 3
#define JITACT_BACKWARD_VECTORS_2 2
#endif

namespace jitact::loops {

constexpr int kThreads = 128;

constexpr int pick(Op op, int forward, int backward) {
  return op == Op::forward || op == Op::forward_bit ? forward : backward;
}
// How many vectors a thread processes.
template <Op op, typename S>
constexpr int vectors_of() {
  if (sizeof(S) == 8) return pick(op, JITACT_FORWARD_VECTORS_8, JITACT_BACKWARD_VECTORS_8);
  if (sizeof(S) == 4) return pick(op, JITACT_FORWARD_VECTORS_4, JITACT_BACKWARD_VECTORS_4);
  return pick(op, JITACT_FORWARD_VECTORS_2, JITACT_BACKWARD_VECTORS_2);
}

// Whether vectors are loaded through shared memory.
#ifdef JITACT_STAGED  // 1 forward, 2 backward, 3 both
template <Op op>
constexpr bool kStaged = op == Op::forward ? JITACT_STAGED % 2 && reads(op) == 1
                         : op == Op::backward || op == Op::backward_from_output ? JITACT_STAGED >= 2 && reads(op) == 2 : false;
#else
template <Op op> constexpr bool kStaged = false;
#endif

// Minimum blocks per multiprocessor, for __launch_bounds__. Forward with much arithmetic or random numbers needs the highest
// occupancy, for which ptxas tends to use a few registers too many. With more blocks than these, registers would spill.
#if __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000 || __CUDA_ARCH__ == 1030
constexpr int kMostBlocks = 2048 / kThreads;
#else
constexpr int kMostBlocks = 0;  // no more than 1536 threads: leave it to ptxas
#endif
template <Op op, typename S, bool dense>
constexpr int least_blocks() {
  if constexpr (kRandom == 1 && kBroadcast == 1) {  // an activation of x fused with dropout, a bias and a residual
    constexpr int blocks = kNumbers > 1 ? 9 : std::is_same_v<S, Half> ? 10 : 12;  // 9 if it has numbers besides p
    return sizeof(S) == 2 && reads(op) > 1 ? pick(op, kMostBlocks * blocks / 16, 0) : 0;
  }
#ifdef JITACT_STAGED
  if (JITACT_STAGED % 2 && op == Op::forward && (dense || kAlwaysRows)) {
    if (sizeof(S) == 4) return kStaged<op> && kNumbers == 0 ? kMostBlocks : 0;
    if (sizeof(S) == 2) return kMostBlocks;
  }
#endif
  return 0;
}

// Stores the mask bits of the vector at element `at`, joined with its neighbours' to bytes. All threads of a warp must call it.
template <int size>
JITACT_DEVICE void store_bits(unsigned bits, uint8_t* mask, int64_t at, int64_t n) {
  JITACT_UNROLL for (int lanes = 1; lanes * size < 8; lanes *= 2)
    bits |= __shfl_down_sync(~0u, bits, lanes) << (lanes * size);
  if ((at & 7) == 0 && at < n) mask[at >> 3] = uint8_t(bits);
}

// Whether the last two tensors that are read, or written, are interleaved: each is every second element of the same memory.
// Then one vector of each is in two adjacent vectors of memory.
struct Alternating {
  bool is = false, swapped = false;  // swapped: the second tensor comes first in memory
  int shift[2] = {0, 0};  // offset of the first vector from the first tensor's element, of the second from the second's

  Alternating() = default;
  Alternating(const Elements* two, int64_t size) {
    const int64_t apart = static_cast<const char*>(two[1].data) - static_cast<const char*>(two[0].data), bytes = 16 / size;
    is = two[0].step == 2 && two[1].step == 2 && two[0].row_stride == two[1].row_stride && (apart == bytes || apart == -bytes);
    if (!is) return;
    swapped = apart < 0;
    shift[0] = swapped ? -1 : 0;
    shift[1] = int(swapped ? size : size - 1);
  }
};

// Whether an operation reads, or writes, two tensors that may be interleaved.
constexpr bool reads_two(Op op) { return kElements == 2 && reads(op) >= 2 && op != Op::backward_from_output; }
constexpr bool writes_two(Op op) { return kElements == 2 && writes(op) == 2; }

// Whether tensors that are not dense can be read or written as aligned vectors; the last two may be interleaved.
inline bool rows_on_16_bytes(const Call& call, const Elements* elements, int used, int64_t size) {
  if (call.columns % size != 0 && call.columns != call.n) return false;
  for (int t = 0; t < used; t++) {
    const Elements& e = elements[t];
    if (e.step == 0 || !e.data) continue;
    if (e.row_stride % size != 0) return false;
    if (e.step == 2) {
      if (kElements != 2 || used < 2 || t < used - 2) return false;
      const Alternating last(elements + used - 2, size);
      if (!last.is || !on_16_bytes(elements[used - (last.swapped ? 1 : 2)].data)) return false;
      continue;
    }
    if (!on_16_bytes(e.data)) return false;
  }
  return true;
}
// Whether rows are contiguous in all tensors that are wanted.
inline bool side_by_side(const Elements* first, int used) {
  return used == 0 || ((first->step == 1 || !first->data) && side_by_side(first + 1, used - 1));
}
inline bool all_on_16_bytes(const Elements* first, int used) {
  return used == 0 || (on_16_bytes(first->data) && all_on_16_bytes(first + 1, used - 1));
}

#ifndef JITACT_EXPORTED
// How much memory a call's tensors take. One that is changed in place, or that stands for others that are not read, counts once.
inline int64_t bytes_of_memory(const Call& call) {
  int tensors = 0;
  for (int w = 0; w < writes(call.op); w++) tensors += call.written[w].data ? 1 : 0;
  for (int r = 0; r < reads(call.op); r++) {
    bool is_another = call.read[r].data != call.written[0].data;
    for (int q = 0; q < r; q++) is_another = is_another && call.read[r].data != call.read[q].data;
    tensors += is_another ? 1 : 0;
  }
  return call.n * bytes_of(call.dtype) * tensors;
}
#endif

// Whether two operands use the same value for the same elements.
inline bool same_planes(const Broadcasts& a, const Broadcasts& b) { return a.count == b.count && a.inner == b.inner; }

// The argument of kernels: a call and what the GPU needs in addition. One type for all kernels keeps the launch code small.
struct Launch : Call {
  bool aligned;  // whether tensors can be read and written in aligned 16-byte vectors
  bool is_small;  // whether element indices fit into 31 bits
  bool is_simple;  // is_small, and rows are contiguous in all tensors that are not interleaved
  ptx::Policy policy = ptx::kEvictNormal;  // for what is read; exported files load as usual, which takes fewer lines
  Divisor by_columns;
  Divisor by_inner[kBroadcast + 1], by_count[kBroadcast + 1];
  float singles[kNumbers + 1];
  double doubles[kNumbers + 1];
  Alternating alternating_in, alternating_out;
  bool follows[kBroadcast + 1];   // whether operand b is along the last dimension, in aligned vectors, and at least a block long
  bool counted;  // whether CountedOperands fit: operands are not along the last dimension, or not in aligned vectors

  __attribute__((noinline)) Launch(const Call& call, int64_t block_elements = 0) : Call(call) {
    if (call.dense) {
      aligned = all_on_16_bytes(call.read, reads(call.op)) && all_on_16_bytes(call.written, writes(call.op));
    } else {
      const int ins = reads(call.op), outs = writes(call.op);
      const int64_t size = 16 / bytes_of(call.dtype);
      aligned = rows_on_16_bytes(call, call.read, ins, size) && rows_on_16_bytes(call, call.written, outs, size);
      if (reads_two(call.op)) alternating_in = Alternating(call.read + ins - 2, size);
      if (writes_two(call.op)) alternating_out = Alternating(call.written, size);
    }
#ifndef JITACT_EXPORTED
    policy = gpu::policy_of_reads(bytes_of_memory(call));
#endif
    by_columns = Divisor(call.columns);
    is_small = call.n < int64_t(1) << 31;
    const int in = alternating_in.is ? 2 : 0, out = alternating_out.is ? 2 : 0;  // interleaved tensors, with twice the indices
    is_simple = call.n < int64_t(1) << (in + out ? 30 : 31) && side_by_side(call.read, reads(call.op) - in) &&
                side_by_side(call.written, writes(call.op) - out);
    bool are_alike = true, all_follow = true;
    for (int b = 0; b < kBroadcast; b++) {
      const Broadcasts& operand = call.broadcast[b];
      const int64_t count = operand.count, inner = operand.inner, size = 16 / bytes_of(call.dtype);
      by_count[b] = Divisor(count), by_inner[b] = Divisor(inner);
      const bool differ = count > 1 && count < int64_t(1) << 31 && count * inner >= block_elements;  // values in a block
      follows[b] = differ && inner == 1 && count % size == 0 && on_16_bytes(operand.data);
      if (b >= kMany) continue;
      are_alike = are_alike && differ && inner < int64_t(1) << 30 && same_planes(operand, call.broadcast[0]);
      all_follow = all_follow && follows[b];
    }
    counted = are_alike && !all_follow;
    for (int k = 0; k < kNumbers; k++) singles[k] = float(doubles[k] = call.numbers[k]);
  }

#ifndef JITACT_EXPORTED
  template <typename S>
  JITACT_DEVICE Words load(const S* p) const { return ptx::load(reinterpret_cast<const Words*>(p), policy); }
#else
  template <typename S>
  JITACT_DEVICE Words load(const S* p) const { return *reinterpret_cast<const Words*>(p); }
#endif
  // The row and column of an element.
  struct Place { int64_t row, column; };
  JITACT_DEVICE Place place(int64_t i) const {
    const int64_t row = by_columns.divide_by_many(i);  // not dense implies more than one column
    return {row, i - row * this->columns};
  }
  template <typename S>
  static JITACT_DEVICE S* in_rows(const Elements& e, Place place) {
    return static_cast<S*>(e.data) + (place.row * e.row_stride + place.column * e.step);
  }
  // The address of the element with memory index i.
  template <typename S, bool dense>
  JITACT_DEVICE S* at(const Elements& e, int64_t i) const {
    if constexpr (dense) return static_cast<S*>(e.data) + i;
    else return in_rows<S>(e, place(i));
  }
  // The same if is_simple. `interleaved`: e is the first of two such tensors, and this is where the vectors of both begin.
  template <typename S, bool interleaved = false>
  JITACT_DEVICE S* simply_at(const Elements& e, int64_t i, const Alternating& alternating = {}) const {
    const uint32_t row = by_columns.divide_small_by_many(uint32_t(i)), column = uint32_t(i) - row * uint32_t(this->columns);
    const int64_t in_row = interleaved ? int64_t(int(column) * 2 + alternating.shift[0]) : column;
    return static_cast<S*>(e.data) + (row * e.row_stride + in_row);
  }
  // The numbers in registers, so that what depends only on them is computed once per thread.
  template <typename T>
  JITACT_DEVICE Numbers<T> numbers_as() const {
    Numbers<T> numbers;
    JITACT_UNROLL for (int k = 0; k < kNumbers; k++) {
      if constexpr (sizeof(T) == 8) numbers.values[k] = doubles[k];
      else numbers.values[k] = singles[k];
    }
    return numbers;
  }
};

// A vector of copies of one element.
template <typename S>
JITACT_DEVICE auto repeated(const S* p) {
  const auto word = [&](int i) {
    if constexpr (sizeof(S) == 2) return uint32_t(p->bits) * 0x10001u;
    else if constexpr (sizeof(S) == 4) return __float_as_uint(*p);
    else return uint32_t(i % 2 ? __double2hiint(*p) : __double2loint(*p));
  };
  typename Storage<S>::Vector vector;
  for (int i = 0; i < int(sizeof vector) / 4; i++) vector.w[i] = word(i);
  return vector;
}

// The aligned vector of tensor t at memory index `at`.
template <Op op, typename S, bool dense>
JITACT_DEVICE typename Storage<S>::Vector read_vector(const Launch& launch, int t, int64_t at) {
  const S* p = launch.at<const S, dense>(launch.read[t], at);
  // For interleaved tensors, this is one half of their common memory; separate() gets the two vectors from both halves.
  if constexpr (!dense && reads_two(op)) p += t < reads(op) - 2 ? 0 : launch.alternating_in.shift[t - (reads(op) - 2)];
  if (!dense && launch.read[t].step == 0) return repeated(p);
  return launch.load(p);
}
// The same if launch.is_simple: general addresses would cost more than the maths of a gated activation.
template <Op op, typename S, bool interleaved>
JITACT_DEVICE typename Storage<S>::Vector read_simply(const Launch& launch, int t, int64_t at) {
  constexpr int first = reads(op) - 2;
  const bool alone = !interleaved || t < first;
  const S* p;
  if (alone) p = launch.simply_at<const S>(launch.read[t], at);
  else p = launch.simply_at<const S, true>(launch.read[first], at, launch.alternating_in);
  return launch.load(reinterpret_cast<const Words*>(p) + (alone ? 0 : t - first));
}
// Calls read(vector), where vector(t, at) is the vector of tensor t at memory index `at`, of strided rows.
template <Op op, typename S, typename Read>
JITACT_DEVICE void read_rows(const Launch& launch, const Read& read) {
  if (!launch.is_simple) read([&](int t, int64_t at) { return read_vector<op, S, false>(launch, t, at); });
  else if (reads_two(op) && launch.alternating_in.is)
    read([&](int t, int64_t at) { return read_simply<op, S, reads_two(op)>(launch, t, at); });
  else read([&](int t, int64_t at) { return read_simply<op, S, false>(launch, t, at); });
}
template <typename S>
JITACT_DEVICE void separate(const Alternating& alternating, Words& a, Words& b) {
  if (!alternating.is) return;
  const Words low = a, high = b;
  a = every_second<S>(low, high, alternating.swapped);
  b = every_second<S>(low, high, !alternating.swapped);
}

// Writes a vector to each wanted tensor.
template <Op op, typename S, bool dense, typename T, int outs, int size>
JITACT_DEVICE void write_vectors(const Launch& launch, const T (&values)[outs][size], int64_t at) {
  if constexpr (!dense && writes_two(op)) {
    const Alternating& alternating = launch.alternating_out;
    if (alternating.is) {
      const Words a = Storage<S>::narrow(values[0]), b = Storage<S>::narrow(values[1]);
      S* p;
      if (launch.is_simple) p = launch.simply_at<S, true>(launch.written[0], at, alternating);
      else p = launch.at<S, dense>(launch.written[0], at) + alternating.shift[0];
      // One right after the other: with 20 instructions between them, all is 8 % slower.
      reinterpret_cast<Words*>(p)[0] = alternate<S, false>(a, b, alternating.swapped);
      reinterpret_cast<Words*>(p)[1] = alternate<S, true>(a, b, alternating.swapped);
      return;
    }
  }
  JITACT_UNROLL for (int w = 0; w < outs; w++) {
    if ((writes(op) > 1 || summed(op) > 0) && launch.written[w].data == nullptr) continue;  // not wanted
    S* to;
    if constexpr (dense) to = launch.at<S, dense>(launch.written[w], at);
    else to = launch.is_simple ? launch.simply_at<S>(launch.written[w], at) : launch.at<S, dense>(launch.written[w], at);
    *reinterpret_cast<typename Storage<S>::Vector*>(to) = Storage<S>::narrow(values[w]);
  }
}

}  // namespace jitact::loops
