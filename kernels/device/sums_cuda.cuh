// The kernels that write the gradients of elements, and partial sums of those of broadcast operands, see reduce_cuda.cuh.
//
// Memory consists of planes: runs of `inner` elements that use the same value of an operand; plane p has value p % count.
//   Longer planes, or a single value: segment_sums. Each thread has a few vectors; a block sums the parts of planes that are in it.
//     A plane has `slots` partial sums, one for each block that it may be in.
//   Shorter planes: column_sums. The values repeat after `period` vectors, so a thread that advances by a multiple of it always
//     has the same values and can sum in registers.
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
      : launch_(launch), threads_(columns.threads), v_(first),
        end_(takes_part && launch.aligned ? launch.n / Storage<S>::size : 0) {}
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
  JITACT_DEVICE int64_t end() const { return first_ + turns_ * threads_; }  // v_, which the loop then need not count up
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

// Sums for several operands, and float64, need the registers; random numbers and bits need the index anyway.
template <Op op, typename S>
constexpr bool kByAddress = kDense<op> && summed(op) == 1 && sizeof(S) < 8 && kRandom == 0 && !reads_bits(op);

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

  Vectors<op, S, kByAddress<op, S>> vectors(launch, columns, g, takes_part);
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

}  // namespace jitact::loops
