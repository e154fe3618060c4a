// Partial sums of planes that are shorter than those of plane_sums: the values of the operands that are summed repeat after
// `period` vectors. So memory is a matrix whose rows are a period long, and its columns, of vectors, are summed.
//
// Each block has a tile: narrow, many rows, and soon at its end. A thread goes down the tile and adds up in registers; the block
// then adds up its threads' sums. Blocks that run at the same time have tiles beside one another, so that memory is read and
// written in one stretch; and as tiles have many rows, partial sums are few.
#pragma once

#include "sums_cuda.cuh"

namespace jitact::loops {

// Whether vectors come through shared memory.
template <Op op> constexpr bool kCopied = kDense<op> && reads(op) <= 4;

// About how many registers column_sums needs; ptxas takes up to a third more.
template <Op op, typename S>
constexpr int registers_of_sums() {
  constexpr int of_operands = Storage<S>::size * (int(lesser(summed(op), kMany)) + kMany), of_random = 8 * kRandom;
  constexpr int tensors = int(lesser(reads(op), 1 + writes(op)));  // others that it reads are rarely used, as a residual
  return 12 + of_operands + (kCopied<op> ? 8 : 16) * tensors + of_random;
}
// The threads of a block: large blocks have fewer sums; small ones wait for fewer threads at their ends, which suits what computes
// much for each byte or has several sums, and leave room for more tensors in shared memory.
template <Op op, typename S>
constexpr int kTileThreads = sizeof(S) == 8 || (sizeof(S) == 2 && kRandom > 0) || reads(op) > 2 || lesser(summed(op), kMany) > 1 ||
                                     registers_of_sums<op, S>() > 56 ? 256 : 512;
// Minimum blocks per multiprocessor, for __launch_bounds__: as many as have 64 registers for each thread, or 80.
template <Op op, typename S>
constexpr int least_tiles(int threads) {
  constexpr int registers = registers_of_sums<op, S>();
  if (sizeof(S) == 8 || kMostBlocks == 0 || registers > 80) return 0;
  return (registers > 64 ? 768 : 1024) / threads;
}

// How column_sums divides the matrix, in vectors.
struct Tiles {
  static constexpr int kWidth = 16;  // columns: 256 bytes of each row
  // Rows of a thread. Below kLarge vectors: at most kTurns, and so few that most GPUs have a tile for each block that they run at
  // once. Above: as many as make tiles of kRows rows, and about kMost tiles at most for each of a block's threads.
  static constexpr int kLarge = 1 << 23, kWave = 1 << 17, kTurns = 16, kRows = 256, kMost = 32;
  int64_t period = 0, vectors = 0;
  int64_t across = 0, down = 0;    // tiles
  int64_t stride = 0, length = 0;  // from a thread's vector to its next one, and from a tile to the one below it
  int64_t longer = 0;              // columns that have a row more than the others, at the end
  int width = 1, side = 1;         // of the tile's columns, and of the rows that its threads have at one time
  int turns = 0, last_rows = 0;    // vectors of a thread; rows of a tile at the end
  Divisor by_width, by_side;

  Tiles() = default;
  Tiles(int64_t period, int64_t vectors, int threads) : period(period), vectors(vectors) {
    const auto parts = [](int64_t whole, int64_t part) { return (whole + part - 1) / part; };
    const int64_t rows = parts(vectors, period), most = parts(rows, 2);  // no fewer than two turns, if there are two rows
    across = parts(period, greater(kWidth, threads / most));
    width = int(parts(period, across)), by_width = Divisor(width);
    side = int(lesser(threads / width, most));
    int64_t turns = between(vectors / kWave, 2, kTurns);
    if (vectors >= kLarge) turns = greater(parts(kRows, side), 4 * parts(vectors, 4 * kMost * int64_t(threads) * threads));
    turns = lesser(turns, parts(rows, side));
    stride = side * period, length = turns * stride;
    down = parts(rows, side * turns);
    last_rows = int(vectors / period - (down - 1) * side * turns), longer = vectors % period;
    by_side = Divisor(side), this->turns = int(turns);
  }
};

// What a block of column_sums has in shared memory: its threads' vectors that are on their way and then, in their place, its sums.
template <Op op, typename S, int threads>
struct TileMemory {
  static constexpr int tensors = kCopied<op> ? reads(op) : 1;
  static constexpr bool with_bits = kCopied<op> && reads_bits(op);
  // The turns whose vectors are on their way to a thread: as many as 48 KB hold, which a block has without asking for more.
  static constexpr int places = kCopied<op> ? int(lesser(4, 48128 / (threads * (16 * tensors + 4 * with_bits)))) : 2;
  union {
    struct {  // turns are multiples of 128 bytes apart: with 16 more, copies of two tensors were 2 % slower
      typename Storage<S>::Vector vectors[kCopied<op> ? places : 1][tensors][threads];
      uint32_t bits[with_bits ? places : 1][with_bits ? threads : 1];  // words in which the vectors' mask bits are
    };
    Value<S> sums[threads * Storage<S>::size];
  };
  static_assert(places >= 2 && sizeof(sums) <= 16384);
};

// The vectors of a thread of column_sums: `count` from v on, `stride` apart, one in each turn. Turns have places, one after
// another; take(turn) returns the turn's vector; advance(turn) ends it, and starts to load the vector that has its place next.
// Where vectors are copied to shared memory, to places that no other thread reads, no register waits for them, and no thread for
// another. Else places are registers, and need code for each: `turn` is below `unrolled`.
template <Op op, typename S, int threads>
class Vectors {
  using Vector = typename Storage<S>::Vector;
  using Memory = TileMemory<op, S, threads>;
  static constexpr int tensors = reads(op), places = Memory::places;

 public:
  static constexpr int unrolled = kCopied<op> ? 1 : places;

  JITACT_DEVICE Vectors(const Launch& launch, int64_t v, int count, int64_t stride)
      : launch_(launch), stride_(stride), v_(v), left_(count) {
    JITACT_UNROLL for (int r = 0; r < tensors; r++) {
      place_of_[r] = r;
      JITACT_UNROLL for (int other = r - 1; other >= 0; other--)
        if (launch.read[r].data == launch.read[other].data) place_of_[r] = other;  // in the place of what is not read
    }
    JITACT_UNROLL for (int p = 0; p < places; p++) load(p, p);
  }
  JITACT_DEVICE bool is_left() const { return left_ > 0; }
  JITACT_DEVICE int64_t here() const { return v_; }

  JITACT_DEVICE Inputs<op, S>& take(int turn) {
    if constexpr (kCopied<op>) {
      ptx::wait_for_copies(places - 1);
      JITACT_UNROLL for (int r = 0; r < tensors; r++) inputs_[turn].words[r] = *copied(place_, place_of_[r]);
      if constexpr (reads_bits(op)) {
        const int64_t at = v_ * Storage<S>::size;
        inputs_[turn].bits = *copied_bits(place_) >> ((byte_of(at) % 4 * 8) | (at & 7));
      }
    }
    return inputs_[turn];
  }
  // Memory is slower if the next vector is asked for before results are written.
  JITACT_DEVICE void advance(int turn) {
    load(kCopied<op> ? place_ : turn, places);
    v_ += stride_, left_--;
    place_ = place_ + 1 < places ? place_ + 1 : 0;
  }

 private:
  static JITACT_DEVICE Vector* copied(int place, int tensor) {
    return &ptx::shared<Memory>().vectors[place][tensor][threadIdx.x];
  }
  static JITACT_DEVICE uint32_t* copied_bits(int place) { return &ptx::shared<Memory>().bits[place][threadIdx.x]; }
  // The address of the byte that has an element's mask bit. Its word may have bytes beside the mask, in the same page.
  JITACT_DEVICE uintptr_t byte_of(int64_t at) const { return reinterpret_cast<uintptr_t>(launch_.mask) + (at >> 3); }
  // Starts to load the vector that is `ahead` turns ahead.
  JITACT_DEVICE void load(int place, int ahead) {
    const bool exists = left_ > ahead;
    const int64_t v = v_ + ahead * stride_, at = v * Storage<S>::size;
    if constexpr (kCopied<op>) {
      JITACT_UNROLL for (int r = 0; r < tensors; r++)
        ptx::copy_async_if(exists && place_of_[r] == r, copied(place, r), static_cast<const Vector*>(launch_.read[r].data) + v,
                           launch_.policy);
      if constexpr (reads_bits(op)) ptx::copy_word_async_if(exists, copied_bits(place), byte_of(at) / 4 * 4);
      ptx::commit_copies();
    } else {
      load_if<op, S>(exists, launch_, at, inputs_[place]);
    }
  }

  const Launch& launch_;
  const int64_t stride_;
  int64_t v_;
  int left_, place_ = 0;
  int place_of_[tensors];  // the tensor in whose place each is, if it is the same as another
  Inputs<op, S> inputs_[unrolled];
};

// Computes a thread's vectors. find_others(v) is called before vector v, for what is not the same for all; it knows what `repeat`
// says: whether only random numbers are not.
template <Op op, typename S, int threads, typename Add, typename Find>
JITACT_DEVICE void walk(const Launch& launch, Vectors<op, S, threads>& vectors, const Numbers<typename Storage<S>::T>& numbers,
                        const typename Operands<S>::template Values<Storage<S>::size>& others, const Add& add, bool repeat,
                        const Find& find_others) {
  const auto walk = [&]<bool repeats>() {
#pragma unroll 1
    while (vectors.is_left()) {
      JITACT_UNROLL for (int turn = 0; turn < vectors.unrolled; turn++) {
        if (turn > 0 && !vectors.is_left()) break;
        Inputs<op, S>& inputs = vectors.take(turn);
        const int64_t at = vectors.here() * Storage<S>::size;
        if (!repeats) find_others(vectors.here());
        const Computation<op, S, Storage<S>::size, Add> computation{
            .launch = launch,
            .others = others,
            .numbers = numbers,
            .add = add,
        };
        compute_vector(computation, inputs, [&](const auto& out) { write_vectors<op, S, kDense<op>>(launch, out, at); });
        vectors.advance(turn);
      }
    }
  };
  // Finding others in each turn is more code than a turn, which is slow where it is skipped.
  constexpr bool split = kBroadcast > 1 && kRandom == 0;
  if (split && repeat) walk.template operator()<split>();
  else walk.template operator()<false>();
}

template <Op op, typename S>
__global__ void __launch_bounds__(kTileThreads<op, S>, least_tiles<op, S>(kTileThreads<op, S>))
    column_sums(const __grid_constant__ Launch launch, Value<S>* __restrict__ partials, int64_t apart, const Tiles tiles,
                bool repeat) {
  using T = typename Storage<S>::T;
  ptx::let_next_begin();
  const Operands<S> operands{launch};
  const auto numbers = launch.numbers_as<T>();
  constexpr int size = Storage<S>::size, kSummed = summed(op), threads = kTileThreads<op, S>;
  const int64_t n = launch.n, stride = tiles.stride;
  const int t = threadIdx.x, row = int(tiles.by_width.divide_small(t));
  const int64_t first_column = int64_t(blockIdx.x) * tiles.width, column = first_column + (t - row * tiles.width);
  int64_t v = blockIdx.y * tiles.length + row * tiles.period + column;
  int count = row < tiles.side && column < tiles.period ? tiles.turns : 0;  // vectors of the thread
  int whole = launch.aligned ? count : 0;                                   // of which this many are whole
  if (blockIdx.y + 1 == gridDim.y && count > 0) {  // tiles at the end may have fewer rows
    const int rows = tiles.last_rows + (column < tiles.longer);
    count = int(tiles.by_side.divide_small(rows + tiles.side - 1 - row));
    whole = launch.aligned ? count : 0;
    if (n % size != 0 && whole > 0 && v + (whole - 1) * stride == tiles.vectors - 1) whole--;
  }
  const int64_t first = count > 0 ? column * size : 0;  // an element with the thread's values of operands

  Vectors<op, S, threads> vectors(launch, v, whole, stride);
  typename Operands<S>::Ready ready;
  operands.load(ready, operands.begins(first), 0);
  const auto common = operands.common();
  T sums[kSummed][size];  // one for each value of an operand; if it is known to have a single value, the first is for all
  JITACT_UNROLL for (int k = 0; k < kSummed; k++)
    JITACT_UNROLL for (int i = 0; i < size; i++) sums[k][i] = 0;
  const auto add = [&](int i, int k, T gradient) { add_to(sums[k][k >= kMany ? 0 : i], gradient); };
  auto others = operands.template from<size, kMany == 0, true>(common, first, ready);
  const auto find_others = [&](int64_t v) {
    if (kBroadcast > 1 && !repeat) others = operands.template from<size>(common, v * size);
    else operands.draw(others.random, common, v * size);
  };
  walk(launch, vectors, numbers, others, add, repeat, find_others);
  // The last elements, or unaligned memory.
  v = vectors.here();
  for (count -= whole; count > 0; count--, v += stride) {
    find_others(v);
    JITACT_UNROLL for (int i = 0; i < size; i++) {
      if (v * size + i < n) {
        const auto own = Operands<S>::one_of(others, i);
        const auto add_own = [&](int, int k, T gradient) { add(i, k, gradient); };
        const Computation<op, S, 1, std::decay_t<decltype(add_own)>> computation{
            .launch = launch,
            .others = own,
            .numbers = numbers,
            .add = add_own,
        };
        compute_alone(computation, v * size + i);
      }
    }
  }

  Value<S>* shared = ptx::shared<TileMemory<op, S, threads>>().sums;
  JITACT_UNROLL for (int k = 0; k < kSummed; k++) {
    if (is_single(launch, k)) {
      Value<S> own = 0;
      JITACT_UNROLL for (int i = 0; i < (k >= kMany ? 1 : size); i++) own += sums[k][i].v;
      const Value<S> total = block_sum<threads>(own);
      if (t == 0) partials[k * apart + blockIdx.y * tiles.across + blockIdx.x] = total;
      continue;
    }
    __syncthreads();  // the last vectors, and the last sums, have been read
    JITACT_UNROLL for (int i = 0; i < size; i++) shared[t * size + i] = sums[k][i].v;
    Value<S>* to = partials + k * apart + (blockIdx.y * tiles.period + first_column) * size;
    const int64_t left = (tiles.period - first_column) * size;
    sum_columns<threads>(shared, tiles.side, tiles.width * size, [&](int c, Value<S> sum) { if (c < left) to[c] = sum; });
  }
}

}  // namespace jitact::loops
