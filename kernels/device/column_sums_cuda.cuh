// Partial sums of planes that are shorter than those of plane_sums: the values of the operands that are summed repeat after
// `period` vectors. So memory is a matrix whose rows are a period long, and its columns, of vectors, are summed.
//
// Each block has a tile: narrow, many rows, and soon at its end. A thread goes down the tile and adds up in registers; the block
// then adds up its threads' sums. Blocks that run at the same time have tiles beside one another, so that memory is read and
// written in one stretch; and as tiles have many rows, partial sums are few.
#pragma once

#include "sums_walk_cuda.cuh"

namespace jitact::loops {

// The threads of a block: large blocks have fewer sums; small ones wait for fewer threads at their ends, which suits what computes
// much for each byte or has several sums, and leave room for more tensors in shared memory.
template <Op op, typename S>
constexpr int kTileThreads = sizeof(S) == 8 || (sizeof(S) == 2 && kRandom > 0) || reads(op) > 2 || lesser(summed(op), kMany) > 1 ||
                                     registers_of_sums<op, S>() > 56 ? 256 : 512;

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
    const int64_t rows = parts_of(vectors, period), most = parts_of(rows, 2);  // no fewer than two turns, if there are two rows
    across = parts_of(period, greater(kWidth, threads / most));
    width = int(parts_of(period, across)), by_width = Divisor(width);
    side = int(lesser(threads / width, most));
    int64_t turns = between(vectors / kWave, 2, kTurns);
    if (vectors >= kLarge) turns = greater(parts_of(kRows, side), 4 * parts_of(vectors, 4 * kMost * int64_t(threads) * threads));
    turns = lesser(turns, parts_of(rows, side));
    stride = side * period, length = turns * stride;
    down = parts_of(rows, side * turns);
    last_rows = int(vectors / period - (down - 1) * side * turns), longer = vectors % period;
    by_side = Divisor(side), this->turns = int(turns);
  }
};

template <Op op, typename S>
__global__ void __launch_bounds__(kTileThreads<op, S>, least_blocks_of_sums<op, S>(kTileThreads<op, S>))
    column_sums(const __grid_constant__ Launch launch, Value<S>* __restrict__ partials, int64_t apart, const Tiles tiles,
                bool repeat) {
  using T = typename Storage<S>::T;
  ptx::let_next_begin();
  ptx::wait_for_last();
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
  auto others = operands.when_ready(common, first, ready);
  const auto find_others = finding<S, size>(operands, common, repeat, others);
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

  Value<S>* shared = ptx::shared<WalkMemory<op, S, threads>>().sums;
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
