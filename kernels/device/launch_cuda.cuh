// The GPU loop: a thread processes one to three 16-byte vectors, a block's width apart, and loads all before it computes. The
// best number depends on how much is computed; measurements are in docs/decisions.md.
#pragma once

#include "gpu_cuda.cuh"
#include "launch.cuh"
#include "memory_cuda.cuh"
#ifdef JITACT_PART
#include "parts.cuh"
#endif

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
    if (e.step == 0) continue;
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

// The argument of kernels: a call and what the GPU needs in addition. One type for all kernels keeps the launch code small.
struct Launch : Call {
  bool aligned;  // whether tensors can be read and written in aligned 16-byte vectors
  bool is_small;  // whether element indices fit into 31 bits
  bool is_simple;  // is_small, and rows are contiguous in all tensors that are not interleaved
  Divisor by_columns;
  Divisor by_inner[kBroadcast + 1], by_count[kBroadcast + 1];
  float singles[kNumbers + 1];
  double doubles[kNumbers + 1];
  Alternating alternating_in, alternating_out;
  bool follows[kBroadcast + 1];  // whether operand b is along the last dimension, in aligned vectors, and at least a block long

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
    by_columns = Divisor(call.columns);
    is_small = call.n < int64_t(1) << 31;
    const int in = alternating_in.is ? 2 : 0, out = alternating_out.is ? 2 : 0;  // interleaved tensors, with twice the indices
    is_simple = call.n < int64_t(1) << (in + out ? 30 : 31) && side_by_side(call.read, reads(call.op) - in) &&
                side_by_side(call.written, writes(call.op) - out);
    for (int b = 0; b < kBroadcast; b++) {
      by_count[b] = Divisor(call.broadcast[b].count);
      by_inner[b] = Divisor(call.broadcast[b].inner);
      const Broadcasts& operand = call.broadcast[b];
      const bool whole = operand.count % (16 / bytes_of(call.dtype)) == 0 && operand.count < int64_t(1) << 31;
      follows[b] = operand.inner == 1 && whole && on_16_bytes(operand.data) && operand.count >= block_elements;
    }
    for (int k = 0; k < kNumbers; k++) singles[k] = float(doubles[k] = call.numbers[k]);
  }

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
  return *reinterpret_cast<const typename Storage<S>::Vector*>(p);
}
// The same if launch.is_simple: general addresses would cost more than the maths of a gated activation.
template <Op op, typename S, bool interleaved>
JITACT_DEVICE typename Storage<S>::Vector read_simply(const Launch& launch, int t, int64_t at) {
  using Vector = typename Storage<S>::Vector;
  constexpr int first = reads(op) - 2;
  if (!interleaved || t < first) return *reinterpret_cast<const Vector*>(launch.simply_at<const S>(launch.read[t], at));
  return reinterpret_cast<const Vector*>(launch.simply_at<const S, true>(launch.read[first], at, launch.alternating_in))[t - first];
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

// Loads the values of channels, rows and random operands for the elements of a vector.
template <typename S>
struct Operands {
  using T = typename Storage<S>::T;
  static constexpr int size = Storage<S>::size;

  const Launch& launch;

  // Values shared by all elements of a block: operands of a single value, prepared, and the seed.
  struct Common {
    T value[kBroadcast + 1];
    uint64_t seed;
  };
  // All threads of a block must call it.
  JITACT_DEVICE Common common() const {
    Common common;
    if constexpr (kPrepares) {
      // One thread prepares for the block: it takes tens of instructions.
      __shared__ typename T::Value shared[kBroadcast];
      if (threadIdx.x == 0) {
        for (int b = 0; b < kBroadcast; b++) common.value[b] = value(b, 0);
        prepare_all(common.value + kUnprepared);
        for (int b = 0; b < kBroadcast; b++) shared[b] = common.value[b].v;
      }
      __syncthreads();
      JITACT_UNROLL for (int b = 0; b < kBroadcast; b++) common.value[b] = shared[b];
    } else {
      JITACT_UNROLL for (int b = 0; b < kBroadcast; b++)
        if (b >= kMany || launch.broadcast[b].count == 1) common.value[b] = value(b, 0);
    }
    if constexpr (kRandom > 0) common.seed = uint64_t(*launch.seed);
    return common;
  }

  // The values for `width` consecutive elements.
  template <int width>
  struct Values {
    T broadcast[kBroadcast + 1][width];
    Random16 random[kRandom + 1];
  };
  // Operands of a vector, loaded together with its elements: raw vectors or, for a wide operand, which would take twice the
  // registers, only the index of its first value.
  struct Ready {
    Words broadcast[kMany + 1];
  };
  // The values from element `first` on, for a vector or one element. `common_only`: all broadcast operands are single values.
  template <int width, bool common_only = kMany == 0>
  JITACT_DEVICE Values<width> from(const Common& common, int64_t first) const {
    return from<width, common_only, false>(common, first, Ready());
  }
  // The same; if `is_ready`, with the operands in `ready` and without random numbers.
  template <int width, bool common_only, bool is_ready>
  JITACT_DEVICE Values<width> from(const Common& common, int64_t first, const Ready& ready) const {
    Values<width> values;
    JITACT_UNROLL for (int b = 0; b < kBroadcast; b++) {
      const int64_t count = launch.broadcast[b].count, inner = launch.broadcast[b].inner;
      const bool is_common = common_only || b >= kMany;
      if constexpr (is_ready && !common_only) {
        if (!is_common && launch.follows[b]) {
          if (is_wide(b)) load_vector(b, ready.broadcast[b].w[0], values.broadcast[b]);
          else Storage<S>::widen(ready.broadcast[b], values.broadcast[b]);
          continue;
        }
      }
      if (!is_common && count > 1) {
        const Plane plane = in_plane(b, first);
        fill(b, count, inner, plane.c, (plane.number + 1) * inner - first, values.broadcast[b]);
      } else {
        JITACT_UNROLL for (int i = 0; i < width; i++) values.broadcast[b][i] = common.value[b];
      }
    }
    if constexpr (!is_ready) draw(values.random, common, first);
    return values;
  }
  // The random numbers only.
  JITACT_DEVICE void draw(Random16 (&random)[kRandom + 1], const Common& common, int64_t first) const {
    JITACT_UNROLL for (int r = 0; r < kRandom; r++) random[r] = philox(uint64_t(first) / size, common.seed, r);
  }
  // The index of a block's first value, for each operand b with follows[b].
  struct Begins { uint32_t of[kMany + 1]; };
  JITACT_DEVICE Begins begins(int64_t first) const {
    Begins begins;
    begins.of[kMany] = 0;  // unused: silences nvcc's warning where there are no operands
    JITACT_UNROLL for (int b = 0; b < kMany; b++)
      if (launch.follows[b]) begins.of[b] = uint32_t(in_operand(b, first));
    return begins;
  }
  // Issues the loads of those operands for the vector that begins `within` elements after the start of the block.
  JITACT_DEVICE void load(Ready& ready, const Begins& begins, int within) const {
    JITACT_UNROLL for (int b = 0; b < kMany; b++) {
      if (!launch.follows[b]) continue;
      const uint32_t beyond = begins.of[b] + within;
      const uint32_t c = min(beyond, beyond - uint32_t(launch.broadcast[b].count));  // the latter is huge if it wraps
      if (is_wide(b)) ready.broadcast[b].w[0] = c;
      else ready.broadcast[b] = *reinterpret_cast<const Words*>(static_cast<const S*>(launch.broadcast[b].data) + c);
    }
  }

  // The values of element i of a vector.
  static JITACT_DEVICE Values<1> one_of(const Values<size>& vector, int i) {
    Values<1> one;
    JITACT_UNROLL for (int b = 0; b < kBroadcast; b++) one.broadcast[b][0] = vector.broadcast[b][i];
    JITACT_UNROLL for (int r = 0; r < kRandom; r++) one.random[r] = vector.random[r];
    return one;
  }
  // The values of the only broadcast operand, for a vector that begins `left` elements before the end of a plane.
  JITACT_DEVICE Values<size> in_planes(int64_t plane, int left) const {
    Values<size> values;
    const int64_t count = launch.broadcast[0].count, c = in_operand(0, plane);
    const T own = value(0, c);
    const T next = left < size ? value(0, c + 1 == count ? 0 : c + 1) : own;
    JITACT_UNROLL for (int i = 0; i < size; i++) values.broadcast[0][i] = i < left ? own : next;
    return values;
  }

  // Value i of broadcast operand b.
  JITACT_DEVICE T value(int b, int64_t i) const {
    if constexpr (sizeof(S) == 2) {
      if (is_wide(b)) return static_cast<const float*>(launch.broadcast[b].data)[i];
    }
    return Storage<S>::load(static_cast<const S*>(launch.broadcast[b].data) + i);
  }

 private:
  // The plane (run of elements with one value of operand b) of element i, and its value's index. 32 bits: 1/4 the instructions.
  struct Plane { int64_t number, c; };
  JITACT_DEVICE Plane in_plane(int b, int64_t i) const {
    int64_t number;
    if (launch.is_small) number = launch.by_inner[b].divide_small(uint32_t(i));
    else number = launch.by_inner[b].divide(i);
    return {number, in_operand(b, number)};
  }
  JITACT_DEVICE int64_t in_operand(int b, int64_t plane) const {
    const int64_t count = launch.broadcast[b].count;
    if (!launch.is_small) return plane - launch.by_count[b].divide(plane) * count;
    const uint32_t p = uint32_t(plane);
    return p - launch.by_count[b].divide_small(p) * uint32_t(count);
  }
  JITACT_DEVICE bool is_wide(int b) const { return sizeof(S) == 2 && launch.broadcast[b].wide; }

  // Whether value i of operand b is aligned for vector loads.
  JITACT_DEVICE bool is_vector(int b, int64_t i) const {
    const auto data = reinterpret_cast<uintptr_t>(launch.broadcast[b].data);
    return is_wide(b) ? (data + i * 4) % 16 == 0 : (data + i * sizeof(S)) % sizeof(typename Storage<S>::Vector) == 0;
  }
  JITACT_DEVICE void load_vector(int b, int64_t i, T (&to)[size]) const {
    if constexpr (sizeof(S) == 2) {
      if (is_wide(b)) {
        const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(launch.broadcast[b].data) + i);
        JITACT_UNROLL for (int f = 0; f < size / 4; f++) {
          const float4 four = from[f];
          to[4 * f] = four.x, to[4 * f + 1] = four.y, to[4 * f + 2] = four.z, to[4 * f + 3] = four.w;
        }
        return;
      }
    }
    using Vector = typename Storage<S>::Vector;
    Storage<S>::widen(*reinterpret_cast<const Vector*>(static_cast<const S*>(launch.broadcast[b].data) + i), to);
  }

  // Values for consecutive elements: the first `left` use value c.
  template <int width>
  JITACT_DEVICE void fill(int b, int64_t count, int64_t inner, int64_t c, int64_t left, T (&to)[width]) const {
    bool filled = false;
    if (width == 1 || left >= width) {
      const T one = value(b, c);
      JITACT_UNROLL for (int i = 0; i < width; i++) to[i] = one;
      filled = true;
    } else if (inner == 1 && c + width <= count) {
      if constexpr (width == size) {
        filled = is_vector(b, c);
        if (filled) load_vector(b, c, to);
      }
    }
    if (!filled) {
      const int whole = int(min(inner, int64_t(width)));
      int rest = int(left);
      JITACT_UNROLL for (int i = 0; i < width; i++) {
        to[i] = value(b, c);
        if (--rest == 0) rest = whole, c = c + 1 == count ? 0 : c + 1;
      }
    }
  }
};

// The values of element i of a vector, or of a single element.
template <typename S, int tensors, int width = Storage<S>::size>
struct Source {
  using T = typename Storage<S>::T;
  const T (&in)[tensors][width];
  const typename Operands<S>::template Values<width>& others;
  const Numbers<T>& numbers;
  int i;

  template <int t> JITACT_DEVICE T element() const { return in[t][width == 1 ? 0 : i]; }
  template <int k> JITACT_DEVICE T number() const { return numbers.values[k]; }
  template <int b> JITACT_DEVICE T broadcast() const { return others.broadcast[b][width == 1 ? 0 : i]; }
  template <int r> JITACT_DEVICE Random<T> random() const {
    // Not indexed by a run-time value, for which the compiler would use local memory.
    const auto word = [&](int k) {
      uint32_t found = others.random[r].w[0];
      JITACT_UNROLL for (int other = 1; other < 4; other++) found = other == k ? others.random[r].w[other] : found;
      return found;
    };
    if constexpr (sizeof(S) == 8) return Random<T>(uint64_t(word(2 * i + 1)) << 32 | word(2 * i));
    else if constexpr (sizeof(S) == 4) return Random<T>(word(i));
    else return Random<T>::at_top(i % 2 ? word(i / 2) : word(i / 2) << 16);
  }
};

struct NoSums {};  // for operations that sum no gradients

// Computes the elements of a vector, or one element.
template <Op op, typename S, int width = Storage<S>::size, typename Add = NoSums>
struct Computation {
  using T = typename Storage<S>::T;
  static constexpr int ins = reads(op), outs = writes(op);

  const Launch& launch;
  const typename Operands<S>::template Values<width>& others;
  const Numbers<T>& numbers;
  Add add;  // called as add(i, k, gradient) with the summed gradients of element i of the vector

  // Computes the element that is the i-th of its vector, and calls keep(w, at, result) for each result.
  template <typename Keep>
  JITACT_DEVICE void element(const T (&in)[ins][width], int i, int at, bool& bit, const Keep& keep) const {
    const Source<S, ins, width> source{
        .in = in,
        .others = others,
        .numbers = numbers,
        .i = i,
    };
    const auto result = results<op, T>(source, bit);
    for_each<outs>([&](auto w) { keep(w, at, result.of[kWrittenResult<op, w>]); });
    for_each<summed(op)>([&](auto k) { add(i, k, result.of[kSummedGradient<k>]); });
  }
  // The same for all elements of a vector, with their mask bits.
  template <typename Keep>
  JITACT_DEVICE void elements(const T (&in)[ins][width], unsigned& bits, const Keep& keep) const {
    JITACT_UNROLL for (int i = 0; i < width; i++) {
      bool bit = bits >> i & 1;
      element(in, i, i, bit, keep);
      if constexpr (op == Op::forward_bit) bits |= bit ? 1u << i : 0;
    }
  }

  // One element, of the last block or of unaligned memory.
  template <bool dense>
  JITACT_DEVICE void one(int64_t at, bool& bit) const {
    T in[ins][1];
    JITACT_UNROLL for (int t = 0; t < ins; t++) in[t][0] = Storage<S>::load(launch.at<const S, dense>(launch.read[t], at));
    const auto keep = [&](int w, int, T result) {
      const Elements& to = launch.written[w];
      if ((outs == 1 && summed(op) == 0) || to.data) Storage<S>::store(launch.at<S, dense>(to, at), result);
    };
    element(in, int(at % Storage<S>::size), 0, bit, keep);
  }
};

template <Op op, typename S, bool dense>
__global__ void __launch_bounds__(kThreads, least_blocks<op, S, dense>()) elementwise(const __grid_constant__ Launch launch) {
  using T = typename Storage<S>::T;
  constexpr int ins = reads(op), size = Storage<S>::size, stride = kThreads * size, vectors = vectors_of<op, S>();
  const int64_t block = int64_t(blockIdx.x) * (stride * vectors), n = launch.n;
  const int64_t first = block + int(threadIdx.x) * size;  // this thread's first element; its next vector is `stride` further on
  const Operands<S> operands{launch};
  const auto numbers = launch.numbers_as<T>();

  if (launch.aligned && block + stride * vectors <= n) {
    // Whether operands are loaded before the elements. Elsewhere that takes too many registers.
    constexpr bool early = op == Op::backward ? kBroadcast == 0 : ins == 1 && !reads_bits(op);
    const auto begins = operands.begins(block);
    typename Operands<S>::Ready ready[vectors];
    const auto load_operands = [&](int v) {
      operands.load(ready[v], begins, int(threadIdx.x) * size + v * stride);
    };
    if constexpr (kBroadcast > 0 && early)  // first, as their addresses take longest to compute
      JITACT_UNROLL for (int v = 0; v < vectors; v++) load_operands(v);
    // All loads are issued before any of their results is used.
    Words in[ins][vectors];
    unsigned bits[vectors] = {};
    [[maybe_unused]] __shared__ Words shared[kStaged<op> && dense ? vectors : 1][ins][kThreads];
    JITACT_UNROLL for (int v = 0; v < vectors; v++) {
      const int64_t at = first + v * stride;
      if constexpr (kStaged<op> && dense) {
        JITACT_UNROLL for (int t = 0; t < ins; t++)
          ptx::copy_async(&shared[v][t][threadIdx.x], launch.at<const S, dense>(launch.read[t], at));
        ptx::commit_copies();
      } else if constexpr (dense) {
        JITACT_UNROLL for (int t = 0; t < ins; t++)
          in[t][v] = *reinterpret_cast<const Words*>(launch.at<S, dense>(launch.read[t], at));
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
      if constexpr (kStaged<op> && dense) {
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
        auto others = operands.template from<size, kMany == 0, true>(common, first + v * stride, ready[v]);
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
    // The last block, or unaligned memory: element by element. Consecutive threads process consecutive elements or, with mask
    // bits, each thread the elements of one vector.
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

#ifndef JITACT_ALL_THREADS  // which exported files define: they are shorter so
// Shared memory of a block where so many are to run on a multiprocessor; 0 if no more than those can.
template <int best>
size_t shared_of_a_block() {
  static int64_t known[gpu::kDevices];
  return size_t(gpu::of_device(known, []() -> int64_t {
           const int64_t blocks = gpu::blocks_for_memory(best);
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

inline unsigned blocks_of(const Call& call, int64_t per_block) { return unsigned((call.n + per_block - 1) / per_block); }

}  // namespace jitact::loops

#include "launch_cuda_anywhere.cuh"
#include "reduce_cuda.cuh"

namespace jitact::loops {

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
  const auto s = static_cast<cudaStream_t>(stream);
  if (summed(call.op) > 0) {
    dispatch_sums(call.op, [&]<Op op>() {
      for_dtype_of(call, [&]<typename S>() {
#ifdef JITACT_PART
        if constexpr (parts::kIsHere<op, S>)
#endif
          launch_sums<op, S>(call, s);
      });
    });
  }
  dispatch(call.op, [&]<Op op>() {
    for_dtype_of(call, [&]<typename S>() {
#ifdef JITACT_PART
      if constexpr (parts::kIsHere<op, S>) {
#endif
#ifdef JITACT_ALL_THREADS
      constexpr int64_t block = int64_t(kThreads) * Storage<S>::size * vectors_of<op, S>(), shared = 0;
#else
      constexpr int64_t block = int64_t(kThreads) * Storage<S>::size * vectors_of<op, S>();
      const size_t shared = unused_shared<op, S>(!kAlwaysRows && call.dense);
#endif
      const Launch launch(call, block);
      if constexpr (kElements > 1 && (op == Op::forward || op == Op::backward))
        if (!call.dense && !launch.aligned)
          return elementwise_anywhere<op, S><<<blocks_of(call, kThreads * Storage<S>::size), kThreads, 0, s>>>(launch);
      if constexpr (op != Op::backward_from_bit)  // which needs dense memory, in whose order its bits are
        if (kAlwaysRows || !call.dense)
          return elementwise<op, S, false><<<blocks_of(call, block), kThreads, shared, s>>>(launch);
      if constexpr (!kAlwaysRows || op == Op::backward_from_bit)
        elementwise<op, S, true><<<blocks_of(call, block), kThreads, shared, s>>>(launch);
#ifdef JITACT_PART
      }
#endif
    });
  });
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace jitact::loops
