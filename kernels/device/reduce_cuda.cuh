// The gradients of elements and of broadcast operands on a GPU, in one pass over dy and the saved tensors. Each block writes
// partial sums for its elements, in float (double for float64), which fold_sums adds up. There are no atomics, so the same call
// always gives the same bits.
//
// Memory consists of planes: runs of `inner` elements that use the same value of an operand; plane p has value p % count.
//   Planes of at least kLongPlane elements, or a single value: segment_sums. Each thread has a few vectors; a block sums the
//     parts of planes that are in it. A plane has `slots` partial sums, one for each block that it may be in.
//   Shorter planes: column_sums. The values repeat after `period` vectors, so a thread that advances by a multiple of it always
//     has the same values and can sum in registers.
// Operands with the same planes are summed in one sweep, which also sums operands of a single value: one partial sum for each
// block. Any other operand takes another sweep, which only reads.
#pragma once

#include "early_cuda.cuh"
#include "computation_cuda.cuh"

namespace jitact::loops {

constexpr int64_t kLongPlane = 32;
constexpr int64_t kRowsPerThread = 16;   // of column_sums, at least: so partial sums are little of the memory traffic
constexpr int64_t kSumsPerBlock = 8192;  // of fold_sums

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
template <typename V>
JITACT_DEVICE V block_sum(V v) {
  __shared__ V of_warps[kThreads / 32];
  v = warp_sum(v);
  __syncthreads();  // the last sum has been read
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = v;
  __syncthreads();
  V sum = of_warps[0];
  JITACT_UNROLL for (int w = 1; w < kThreads / 32; w++) sum += of_warps[w];
  return sum;
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
    const Value<S> total = block_sum(own);
    if (t == 0) partials[k * apart + blockIdx.x] = total;
  }
}

// How column_sums iterates over memory, in vectors.
struct ColumnWalk {
  int64_t period;   // after which values repeat
  int64_t threads;  // in use: a multiple of period
  int active;       // threads per block in use: all, or a multiple of period
  int turns;        // whole vectors of each thread; the first `rest` threads have one more
  int64_t rest;
  int64_t width;    // sums that a block writes; if period is longer than a block, each thread writes its own
  bool repeat;      // whether all of a thread's vectors use the same values of broadcast operands
};

// 16-bit elements in vectors of 8 bytes.
struct alignas(8) TwoWords { uint32_t w[2]; };
template <typename S> struct Short : S {};
template <typename S> struct Storage<Short<S>> : Storage<S> {
  using typename Storage<S>::T;
  using Vector = TwoWords;
  static constexpr int size = 4;
  static JITACT_DEVICE void widen(const Vector& v, T* t) {
    for (int i = 0; i < 2; i++) Storage<S>::widen_pair(v.w[i], t[2 * i], t[2 * i + 1]);
  }
  static JITACT_DEVICE Vector narrow(const T* t) { return {Storage<S>::word(t, 0), Storage<S>::word(t, 1)}; }
};

// The elements of column_sums' vectors: with several sums for each element, vectors of 16 bytes would take too many registers.
template <Op op, typename S>
constexpr bool kShort = sizeof(S) == 2 && lesser(summed(op), kMany) > 1 && kRandom == 0 && kElements == 1;
template <Op op, typename S> using Summed = std::conditional_t<kShort<op, S>, Short<S>, S>;
template <typename V> constexpr int kWordsOf = int(sizeof(typename Storage<V>::Vector)) / 4;

// The vectors that a thread of column_sums loads while it computes another one: more if only dy is read.
template <Op op, typename V>
constexpr int kAhead = kWordsOf<V> < 4 ? 2 : reads(op) > 1 ? 1 : sizeof(V) == 2 ? 2 : 3;

// Minimum blocks per multiprocessor, for __launch_bounds__: ptxas takes up to a third more registers than suffice, which are
// estimated here. More than 8 blocks, or twice as many with vectors of half the bytes, are of no use.
template <Op op, typename V>
constexpr int blocks_of_sums() {
  if (sizeof(V) == 8 || kMostBlocks == 0) return 0;
  constexpr int tensors = int(lesser(reads(op), 1 + writes(op)));  // others that it reads are rarely used, as a residual
  constexpr int of_operands = Storage<V>::size * (int(lesser(summed(op), kMany)) + kMany), of_random = 8 * kRandom;
  constexpr int of_vectors = (kWordsOf<V> * (kAhead<op, V> + 1) + 8) * tensors;
  return int(lesser(32 / kWordsOf<V>, 65536 / kThreads / (8 + of_operands + of_vectors + of_random)));
}

// The vectors of a thread of column_sums, which are columns.threads apart. By index:
template <Op op, typename S, bool by_address>
class Vectors {
 public:
  JITACT_DEVICE Vectors(const Launch& launch, const ColumnWalk& columns, int64_t first, bool takes_part)
      : launch_(launch), threads_(columns.threads), v_(first), end_(takes_part && launch.aligned ? launch.n / Storage<S>::size : 0) {}
  // Whether there is another one, its index, and that after the last.
  JITACT_DEVICE bool is_left() const { return v_ < end_; }
  JITACT_DEVICE int64_t here() const { return v_; }
  JITACT_DEVICE int64_t end() const { return v_; }
  JITACT_DEVICE void advance() { v_ += threads_; }
  // Loads the vector that is `ahead` further on, if there is one.
  JITACT_DEVICE void load(int ahead, Inputs<op, S>& inputs) const {
    const int64_t from = v_ + ahead * threads_;
    load_if<op, S>(from < end_, launch_, from * Storage<S>::size, inputs);
  }
  template <typename T>
  JITACT_DEVICE void write(const T (&values)[writes(op)][Storage<S>::size]) const {
    write_vectors<op, S, kDense<op>>(launch_, values, v_ * Storage<S>::size);
  }

 private:
  const Launch& launch_;
  const int64_t threads_;
  int64_t v_;
  const int64_t end_;
};

// By addresses, which take fewer instructions to advance than to find, but more registers; of dense tensors. Vectors are loaded in
// order, and the last one again after it, so that there is always one to load.
template <Op op, typename S>
class Vectors<op, S, true> {
  using Vector = typename Storage<S>::Vector;

 public:
  JITACT_DEVICE Vectors(const Launch& launch, const ColumnWalk& columns, int64_t first, bool takes_part)
      : launch_(launch), threads_(columns.threads), first_(first), v_(first),
        turns_(takes_part && launch.aligned ? columns.turns + (first < columns.rest) : 0), left_(turns_) {
    JITACT_UNROLL for (int r = 0; r < reads(op); r++) from_[r] = address(launch.read[r].data, first);
    JITACT_UNROLL for (int w = 0; w < writes(op); w++) to_[w] = address(launch.written[w].data, first);
  }
  JITACT_DEVICE bool is_left() const { return left_ > 0; }
  JITACT_DEVICE int64_t here() const { return v_; }
  JITACT_DEVICE int64_t end() const { return first_ + turns_ * threads_; }
  JITACT_DEVICE void advance() { left_--, v_ += threads_; }
  JITACT_DEVICE void load(int ahead, Inputs<op, S>& inputs) {
    const int64_t step = left_ > ahead + 1 ? threads_ * int64_t(sizeof(Vector)) : 0;
    JITACT_UNROLL for (int r = 0; r < reads(op); r++) {
      ptx::load_global(inputs.words[r], from_[r]);
      from_[r] += step;
      ptx::forget(from_[r]);  // else addresses are found from the first one again
    }
  }
  template <typename T>
  JITACT_DEVICE void write(const T (&values)[writes(op)][Storage<S>::size]) {
    JITACT_UNROLL for (int w = 0; w < writes(op); w++) {
      if (launch_.written[w].data) ptx::store_global(to_[w], Storage<S>::narrow(values[w]));
      to_[w] += threads_ * int64_t(sizeof(Vector));
      ptx::forget(to_[w]);
    }
  }

 private:
  static JITACT_DEVICE int64_t address(const void* data, int64_t vector) {
    return reinterpret_cast<int64_t>(static_cast<const Vector*>(data) + vector);
  }

  const Launch& launch_;
  const int64_t threads_, first_;
  int64_t v_;
  const int turns_;
  int left_;  // vectors from this one on
  int64_t from_[reads(op)], to_[writes(op)];
};

// Sums for several operands need the registers, and random numbers and bits need the index anyway.
template <Op op> constexpr bool kByAddress = kDense<op> && lesser(summed(op), kMany) == 1 && kRandom == 0 && !reads_bits(op);

// S: of memory, or Short of it.
template <Op op, typename S>
__global__ void __launch_bounds__(kThreads, blocks_of_sums<op, S>())
    column_sums(const __grid_constant__ Launch launch, Value<S>* __restrict__ partials, int64_t apart, const ColumnWalk columns) {
  using T = typename Storage<S>::T;
  ptx::let_next_begin();
  const Operands<S> operands{launch};
  const auto numbers = launch.numbers_as<T>();
  const int64_t n = launch.n;
  constexpr int size = Storage<S>::size, kSummed = summed(op);
  const int t = threadIdx.x;
  const int64_t g = int64_t(blockIdx.x) * columns.active + t;
  const bool takes_part = t < columns.active && g < columns.threads;
  const auto common = operands.common();
  T sums[kSummed][size];  // one for each value of an operand; if it is known to have a single value, the first is for all
  const auto sum_of = [&](int i, int k) -> T& { return sums[k][k >= kMany ? 0 : i]; };
  JITACT_UNROLL for (int k = 0; k < kSummed; k++)
    JITACT_UNROLL for (int i = 0; i < size; i++) sums[k][i] = 0;
  auto others = operands.template from<size>(common, g * size);

  Vectors<op, S, kByAddress<op>> vectors(launch, columns, g, takes_part);
  const auto find_others = [&](int64_t v) {
    if (kBroadcast > 1 && !columns.repeat) others = operands.template from<size>(common, v * size);
    else operands.draw(others.random, common, v * size);
  };
  const auto walk = [&]<int places, bool repeats>() {
    Inputs<op, S> inputs[places];  // of this vector and the next ones
    if (vectors.is_left())
      JITACT_UNROLL for (int a = 0; a < places - 1; a++) vectors.load(a, inputs[a]);
    // Each turn has its place: moved to another one, a vector would be waited for. The first is not asked again whether there is a
    // vector, which took dyt's sweep a tenth more instructions, and registers that it does not have.
#pragma unroll 1
    while (vectors.is_left()) {
      JITACT_UNROLL for (int turn = 0; turn < places; turn++) {
        if (turn > 0 && !vectors.is_left()) break;
        vectors.load(places - 1, inputs[(turn + places - 1) % places]);
        if (!repeats) find_others(vectors.here());
        const auto add = [&](int i, int k, T gradient) { add_to(sum_of(i, k), gradient); };
        const Computation<op, S, size, std::decay_t<decltype(add)>> computation{
            .launch = launch,
            .others = others,
            .numbers = numbers,
            .add = add,
        };
        compute_vector(computation, inputs[turn], [&](const auto& out) { vectors.write(out); });
        vectors.advance();
      }
    }
  };
  // Finding others in each turn is more code than a turn, beside which short vectors are slow even where it is skipped.
  constexpr int places = kAhead<op, S> + 1;
  constexpr bool split = kBroadcast > 1 && kWordsOf<S> < 4;
  if (split && columns.repeat) walk.template operator()<places, split>();
  else walk.template operator()<split ? 2 : places, false>();
  // The last elements, or unaligned memory.
  for (int64_t v = vectors.end(); takes_part && v * size < n; v += columns.threads) {
    find_others(v);
    JITACT_UNROLL for (int i = 0; i < size; i++) {
      if (v * size + i < n) {
        const auto own = Operands<S>::one_of(others, i);
        const auto add = [&](int, int k, T gradient) { add_to(sum_of(i, k), gradient); };
        const Computation<op, S, 1, std::decay_t<decltype(add)>> computation{
            .launch = launch,
            .others = own,
            .numbers = numbers,
            .add = add,
        };
        compute_alone(computation, v * size + i);
      }
    }
  }

  JITACT_UNROLL for (int k = 0; k < kSummed; k++) {
    if (!is_single(launch, k)) continue;
    Value<S> own = 0;
    JITACT_UNROLL for (int i = 0; i < (k >= kMany ? 1 : size); i++) own += sums[k][i].v;
    const Value<S> total = block_sum(own);
    if (t == 0) partials[k * apart + blockIdx.x] = total;
  }
  if (columns.period > kThreads) {
    if (!takes_part) return;
    JITACT_UNROLL for (int k = 0; k < kSummed; k++) {
      if (is_single(launch, k)) continue;
      JITACT_UNROLL for (int i = 0; i < size; i++) partials[k * apart + g * size + i] = sums[k][i].v;
    }
    return;
  }
  __shared__ Value<S> shared[kThreads * size];
  const int width = int(columns.width);
  JITACT_UNROLL for (int k = 0; k < kSummed; k++) {
    if (is_single(launch, k)) continue;
    __syncthreads();
    JITACT_UNROLL for (int i = 0; i < size; i++) shared[t * size + i] = sums[k][i].v;
    __syncthreads();
    for (int j = t; j < width; j += kThreads) {
      Value<S> sum = 0;
      for (int i = j; i < columns.active * size; i += width) sum += shared[i];
      partials[k * apart + blockIdx.x * columns.width + j] = sum;
    }
  }
}

// The blocks on a multiprocessor with which column_sums is fastest: more where more is computed for each byte, or where mask bits
// come with vectors of four elements; and more with vectors of fewer bytes.
template <Op op, typename V>
constexpr int64_t kBest = (6 + (summed(op) > 1 || (kRandom > 0 && (reads(op) > 1 || reads_bits(op))) ||
                                (reads_bits(op) && sizeof(V) == 4))) * 4 / kWordsOf<V>;
// The number of threads of column_sums on the GPU: of kBest blocks, or of fewer if fewer run at once.
template <Op op, typename V>
int64_t column_threads() {
  static int64_t known[gpu::kDevices];
  return gpu::of_device(known, [] {
    int blocks = 0;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, column_sums<op, V>, kThreads, 0);
    const int64_t best = gpu::blocks_for_memory(kBest<op, V>), at_once = greater(1, blocks);
    return gpu::device_has(cudaDevAttrMultiProcessorCount) * kThreads * lesser(best, at_once);
  });
}
// An upper bound of that, without asking about the kernel, which may be compiled in another part.
inline int64_t most_column_threads() {
  static int64_t known[gpu::kDevices];
  return gpu::of_device(known, [] {
    return gpu::device_has(cudaDevAttrMultiProcessorCount) * gpu::device_has(cudaDevAttrMaxThreadsPerMultiProcessor);
  });
}

// The shape of what fold_sums adds up for an operand: outer x count x inner sums, reduced over outer and inner.
struct FoldShape {
  static constexpr int kWide = 8;  // values that use whole memory sectors, and still give many blocks
  int64_t outer, count, inner;
  int wide;        // values of an operand per block
  int active;      // threads per block in use: all, or a multiple of wide * inner
  int64_t length;  // sums per block, of outer * wide * inner
  int64_t planes;  // the same in units of wide * inner, of outer
  int64_t splits;  // blocks that share the same values

  FoldShape(int64_t outer, int64_t count, int64_t inner) : outer(outer), count(count), inner(inner) {
    wide = int(between((inner == 1 ? kWide : 32) / inner, 1, count));
    const int64_t all = outer * wide * inner;
    splits = between((all + kSumsPerBlock - 1) / kSumsPerBlock, 1, kSumsPerBlock / kWide);  // so after() has one
    active = wide == 1 ? kThreads : int(kThreads / (wide * inner) * (wide * inner));
    length = ((all + splits - 1) / splits + active - 1) / active * active;
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
  bool is_last;  // whether it computes gradients

  JITACT_INLINE const FoldShape& shape(int k) const { return is_single[k] ? single : planes; }
};

// Block (x, y, z) adds up part y for the values of operand z from x * wide on.
template <typename S>
__global__ void __launch_bounds__(kThreads, kMostBlocks)
    fold_sums(const Value<S>* partials, Value<S>* results, const __grid_constant__ Folds folds,
              const __grid_constant__ Launch launch) {
  using T = typename Storage<S>::T;
  const int t = threadIdx.x, k = blockIdx.z;
  const FoldShape& shape = folds.shape(k);
  const int64_t c0 = int64_t(blockIdx.x) * shape.wide, all = shape.count * shape.inner;
  if (folds.gradients[k] == nullptr || c0 >= shape.count || blockIdx.y >= shape.splits) return;
  partials += k * folds.apart;

  const Value<S>* from = partials + c0 * shape.inner;
  int64_t at = blockIdx.y * shape.length + t, end = min((blockIdx.y + 1) * shape.length, shape.outer * shape.inner), step = 0;
  int at_once = kThreads;
  if (shape.wide > 1) {  // a thread always has the same value and inner index
    const int span = shape.wide * int(shape.inner), place = t % span;
    at_once = shape.active / span, step = at_once * all;
    at = blockIdx.y * shape.planes + t / span;
    end = t < shape.active && c0 * shape.inner + place < all ? min((blockIdx.y + 1) * shape.planes, shape.outer) : 0;
    from += at * all + place;
  }
  ptx::wait_for_last();

  Value<S> v = 0;
  if (shape.wide > 1) {
#pragma unroll 8
    for (; at < end; at += at_once, from += step) v += *from;
  } else {
#pragma unroll 4
    for (; at < end; at += kThreads) {
      const int64_t outer = shape.outer == 1 ? 0 : at / shape.inner;
      v += from[outer * all + (at - outer * shape.inner)];
    }
  }
  __shared__ Value<S> shared[kThreads];
  if (shape.wide == 1) {
    v = warp_sum(v);
    if (t % 32 == 0) shared[t / 32] = v;
    __syncthreads();
    v = warp_sum(t < kThreads / 32 ? shared[t] : Value<S>(0));
  } else {
    shared[t] = v;
    __syncthreads();
    v = 0;
    const int inner = int(shape.inner);
    for (int row = 0; t < shape.wide && row < shape.active; row += shape.wide * inner)
      for (int i = 0; i < inner; i++) v += shared[row + t * inner + i];
  }
  const int64_t c = c0 + t;
  if (t >= shape.wide || c >= shape.count) return;
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
  static constexpr int64_t size = Storage<S>::size, per_block = kThreads * size * vectors_of<op, S>();
  static constexpr int64_t of_columns = Storage<Summed<op, S>>::size;  // elements of column_sums' vectors
  const Cut cut;
  bool columnwise;
  int64_t blocks;
  Segments segments{};
  ColumnWalk columns{};
  FoldShape sums, of_blocks;  // of operands with its planes, and of those of a single value
  int64_t apart, results_apart;  // see Folds

  // `threads`: the most for column_sums.
  Sweep(const Call& call, const Broadcasts& like, int64_t threads)
      : cut(like.count, like.inner),
        columnwise(cut.count > 1 && cut.inner < kLongPlane),
        blocks((call.n + per_block - 1) / per_block),
        sums(first_sums(call, threads)),
        of_blocks(1, 1, blocks),
        apart(greater(sums.size(), of_blocks.size())),
        results_apart(greater(sums.folded(), of_blocks.folded())) {}

  bool sums_up(const Broadcasts& operand) const { return operand.count == cut.count && operand.inner == cut.inner; }

 private:
  void set_threads(const Call& call, int64_t threads) {
    const int64_t vectors = call.n / of_columns;
    columns.threads = threads, columns.turns = int(vectors / threads), columns.rest = vectors % threads;
  }
  FoldShape first_sums(const Call& call, int64_t threads) {
    if (cut.count == 1) return FoldShape(1, 1, blocks);
    if (columnwise) {
      const int64_t plane_set = cut.count * cut.inner, period = period_of(plane_set, of_columns);
      const int64_t vectors = (call.n + of_columns - 1) / of_columns;
      columns.period = period;
      columns.repeat = true;
      for (int b = 0; b < kBroadcast; b++)
        columns.repeat = columns.repeat && (call.broadcast[b].count == 1 || sums_up(call.broadcast[b]));
      if (period <= kThreads) {
        columns.active = int(kThreads / period * period);
        columns.width = period * of_columns;
        blocks = between(vectors / (columns.active * kRowsPerThread), 1, threads / kThreads);
        set_threads(call, blocks * columns.active);
        return FoldShape(blocks * columns.width / plane_set, cut.count, cut.inner);
      }
      const int64_t rows = lesser(threads / period, vectors / (period * kRowsPerThread));
      columns.active = kThreads;
      set_threads(call, greater(1, rows) * period);
      blocks = (columns.threads + kThreads - 1) / kThreads;
      return FoldShape(columns.threads * of_columns / plane_set, cut.count, cut.inner);
    }
    const int64_t entries = 2 * lesser(per_block, cut.inner) / size;  // of a plane in a block
    segments = {(cut.inner - 1 + per_block - 1) / per_block + 1, 1};
    while (segments.lanes < 32 && segments.lanes * 8 <= entries) segments.lanes *= 2;
    return FoldShape(call.n / cut.inner / cut.count, cut.count, segments.slots);
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
        if (same(call.broadcast[of[p]], call.broadcast[k])) is_new = false;
      if (is_new) of[count++] = k;
    }
    if (count == 0) count = 1;
  }
  static bool same(const Broadcasts& a, const Broadcasts& b) { return a.count == b.count && a.inner == b.inner; }
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
        const Sweep<op, S> sweep(call, call.broadcast[sweeps.of[p]], most_column_threads());
        bytes = greater(bytes, workspace_values(sweep) * int64_t(sizeof(Value<S>)));
      }
    });
  });
  return bytes;
}
#endif

template <typename S>
void fold(const Folds& folds, const Value<S>* partials, Value<S>* results, const Call& call, int operands, cudaStream_t stream) {
  int64_t blocks = 0, splits = 0;
  for (int k = 0; k < operands; k++) {
    if (folds.gradients[k] == nullptr) continue;
    const FoldShape& shape = folds.shape(k);
    blocks = greater(blocks, (shape.count + shape.wide - 1) / shape.wide), splits = greater(splits, shape.splits);
  }
  if (blocks == 0) return;
  const dim3 grid{unsigned(blocks), unsigned(splits), unsigned(operands)};
  early::launch<fold_sums<S>>(grid, kThreads, stream, partials, results, folds, Launch(call));
}

// Computes gradients from the partial sums of a sweep: of the operands with its planes and, in the first sweep, of those of a
// single value.
template <Op op, typename S>
void fold_sweep(const Sweep<op, S>& sweep, const Call& call, bool first, cudaStream_t stream) {
  constexpr int kSummed = summed(op);
  auto* partials = static_cast<Value<S>*>(call.workspace);
  auto* results = partials + kSummed * sweep.apart;
  Folds folds{sweep.sums, sweep.of_blocks, sweep.apart, sweep.results_apart};
  folds.is_last = true;
  for (int k = 0; k < kSummed; k++) {
    const Broadcasts& operand = call.broadcast[k];
    folds.is_single[k] = operand.count == 1, folds.wide[k] = operand.wide;
    if (!(folds.is_single[k] ? first : sweep.sums_up(operand)) || call.sums[k] == nullptr) continue;
    folds.gradients[k] = call.sums[k];
    if (folds.shape(k).splits > 1) folds.is_last = false;
  }
  fold<S>(folds, partials, results, call, kSummed, stream);
  if (folds.is_last) return;
  folds.planes = folds.planes.after(), folds.single = folds.single.after(), folds.apart = folds.results_apart, folds.is_last = true;
  fold<S>(folds, results, nullptr, call, kSummed, stream);
}

template <Op op, typename S>
void launch_sums(const Call& call, cudaStream_t stream) {
  const Sweeps sweeps(call);
  Call reading = call;  // a sweep that only reads
  for (Elements& written : reading.written) written.data = nullptr;
  for (int p = 0; p < sweeps.count; p++) {
    const Call& now = p == 0 ? call : reading;
    using V = Summed<op, S>;
    const Sweep<op, S> sweep(now, now.broadcast[sweeps.of[p]], column_threads<op, V>());
    const Launch launch(now);
    auto* partials = static_cast<Value<S>*>(now.workspace);
    const unsigned blocks = unsigned(sweep.blocks);
    if (sweep.columnwise)
      column_sums<op, V><<<blocks, kThreads, 0, stream>>>(launch, partials, sweep.apart, sweep.columns);
    else if (sweep.cut.count == 1)
      segment_sums<op, S, true><<<blocks, kThreads, 0, stream>>>(launch, partials, sweep.apart, sweep.cut, sweep.segments);
    else
      segment_sums<op, S, false><<<blocks, kThreads, 0, stream>>>(launch, partials, sweep.apart, sweep.cut, sweep.segments);
    fold_sweep(sweep, call, p == 0, stream);
  }
}

}  // namespace jitact::loops
