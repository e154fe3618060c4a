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
  int64_t width;    // sums that a block writes; if period is longer than a block, each thread writes its own
  bool repeat;      // whether all of a thread's vectors use the same values of broadcast operands
};

// Whether vectors come through shared memory.
template <Op op> constexpr bool kCopied = kDense<op> && reads(op) <= 8;
// The turns whose vectors are on their way to a thread of column_sums.
template <Op op> constexpr int kPlaces = kCopied<op> && reads(op) <= 4 ? 3 : 2;

// Minimum blocks per multiprocessor, for __launch_bounds__: ptxas takes up to a third more registers than suffice, which are
// estimated here. More than 8 blocks are of no use.
template <Op op, typename S>
constexpr int blocks_of_sums() {
  if (sizeof(S) == 8 || kMostBlocks == 0) return 0;
  constexpr int of_operands = Storage<S>::size * (int(lesser(summed(op), kMany)) + kMany), of_random = 8 * kRandom;
  constexpr int tensors = int(lesser(reads(op), 1 + writes(op)));  // others that it reads are rarely used, as a residual
  constexpr int of_vectors = (kCopied<op> ? 12 : 16) * tensors;
  return int(lesser(8, 65536 / kThreads / (12 + of_operands + of_vectors + of_random)));
}

// The vectors of a thread of column_sums, which are columns.threads apart: one in each turn. Turns have places, one after another;
// take(place) returns the turn's vector; advance(place) ends the turn, and starts to load the vector that has its place next. Where
// vectors are copied to shared memory, to places that no other thread reads, no register waits for them, and no thread for another.
template <Op op, typename S>
class Vectors {
  using Vector = typename Storage<S>::Vector;
  static constexpr int tensors = reads(op);
  struct Memory {
    Vector vectors[kPlaces<op>][tensors][kThreads];
    uint32_t bits[reads_bits(op) ? kPlaces<op> : 1][reads_bits(op) ? kThreads : 1];  // words in which the vectors' mask bits are
  };
  static_assert(sizeof(Memory) <= 40960);  // of 48 KB, which a block has without asking for more

 public:
  static constexpr int places = kPlaces<op>;

  JITACT_DEVICE Vectors(const Launch& launch, const ColumnWalk& columns)
      : launch_(launch), threads_(columns.threads), v_(int64_t(blockIdx.x) * columns.active + threadIdx.x) {
    if (launch.aligned && int(threadIdx.x) < columns.active && v_ < threads_) end_ = launch.n / Storage<S>::size;
    JITACT_UNROLL for (int r = 0; r < tensors; r++) {
      place_of_[r] = r;
      JITACT_UNROLL for (int other = r - 1; other >= 0; other--)
        if (launch.read[r].data == launch.read[other].data) place_of_[r] = other;  // in the place of what is not read
    }
    JITACT_UNROLL for (int p = 0; p < places; p++) load(p, v_ + p * threads_);
  }
  JITACT_DEVICE bool is_left() const { return v_ < end_; }
  JITACT_DEVICE int64_t here() const { return v_; }

  JITACT_DEVICE Inputs<op, S>& take(int place) {
    if constexpr (kCopied<op>) {
      ptx::wait_for_copies(places - 1);
      JITACT_UNROLL for (int r = 0; r < tensors; r++) inputs_[place].words[r] = *copied(place, place_of_[r]);
      if constexpr (reads_bits(op)) {
        const int64_t at = v_ * Storage<S>::size;
        inputs_[place].bits = *copied_bits(place) >> ((byte_of(at) % 4 * 8) | (at & 7));
      }
    }
    return inputs_[place];
  }
  // Memory is slower if the next vector is asked for before results are written.
  JITACT_DEVICE void advance(int place) {
    load(place, v_ + places * threads_);
    v_ += threads_;
  }

 private:
  static JITACT_DEVICE Vector* copied(int place, int tensor) {
    return &ptx::shared<Memory>().vectors[place][tensor][threadIdx.x];
  }
  static JITACT_DEVICE uint32_t* copied_bits(int place) { return &ptx::shared<Memory>().bits[place][threadIdx.x]; }
  // The address of the byte that has an element's mask bit. Its word may have bytes beside the mask, in the same page.
  JITACT_DEVICE uintptr_t byte_of(int64_t at) const { return reinterpret_cast<uintptr_t>(launch_.mask) + (at >> 3); }
  JITACT_DEVICE void load(int place, int64_t v) {
    const int64_t at = v * Storage<S>::size;
    if constexpr (kCopied<op>) {
      if (v < end_) {
        JITACT_UNROLL for (int r = 0; r < tensors; r++)
          if (place_of_[r] == r) ptx::copy_async(copied(place, r), static_cast<const Vector*>(launch_.read[r].data) + v);
        if constexpr (reads_bits(op)) ptx::copy_word_async(copied_bits(place), byte_of(at) / 4 * 4);
      }
      ptx::commit_copies();
    } else {
      load_if<op, S>(v < end_, launch_, at, inputs_[place]);
    }
  }

  const Launch& launch_;
  const int64_t threads_;
  int64_t v_, end_ = 0;
  int place_of_[tensors];  // the tensor in whose place each is, if it is the same as another
  Inputs<op, S> inputs_[places];
};

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
  Vectors<op, S> vectors(launch, columns);
  const int64_t g = vectors.here();
  const bool takes_part = t < columns.active && g < columns.threads;
  const auto common = operands.common();
  T sums[kSummed][size];  // one for each value of an operand; if it is known to have a single value, the first is for all
  const auto sum_of = [&](int i, int k) -> T& { return sums[k][k >= kMany ? 0 : i]; };
  JITACT_UNROLL for (int k = 0; k < kSummed; k++)
    JITACT_UNROLL for (int i = 0; i < size; i++) sums[k][i] = 0;
  auto others = operands.template from<size>(common, g * size);

  const auto find_others = [&](int64_t v) {
    if (kBroadcast > 1 && !columns.repeat) others = operands.template from<size>(common, v * size);
    else operands.draw(others.random, common, v * size);
  };
  const auto walk = [&]<bool repeats>() {
#pragma unroll 1
    while (vectors.is_left()) {
      JITACT_UNROLL for (int place = 0; place < vectors.places; place++) {
        if (place > 0 && !vectors.is_left()) break;
        Inputs<op, S>& inputs = vectors.take(place);
        const int64_t at = vectors.here() * size;
        if (!repeats) find_others(vectors.here());
        const auto add = [&](int i, int k, T gradient) { add_to(sum_of(i, k), gradient); };
        const Computation<op, S, size, std::decay_t<decltype(add)>> computation{
            .launch = launch,
            .others = others,
            .numbers = numbers,
            .add = add,
        };
        compute_vector(computation, inputs, [&](const auto& out) { write_vectors<op, S, kDense<op>>(launch, out, at); });
        vectors.advance(place);
      }
    }
  };
  // Finding others in each turn is more code than a turn, which is slow where it is skipped.
  constexpr bool split = kBroadcast > 1 && kRandom == 0;
  if (split && columns.repeat) walk.template operator()<split>();
  else walk.template operator()<false>();
  // The last elements, or unaligned memory.
  for (int64_t v = vectors.here(); takes_part && v * size < n; v += columns.threads) {
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
