// Copies a tensor into another memory order on the GPU, as between channels_last and the default. Square tiles go through
// shared memory, so that reads and writes are both coalesced.
#pragma once

#include "early_cuda.cuh"
#include "transpose.h"

namespace jitact::loops {

constexpr int kWarpsOfTile = 8;
constexpr int kTileBlock = 32 * kWarpsOfTile;  // threads

// A thread reads and writes a Word: one element, or two of 16 bits. 32 Words are a row of a tile.
template <typename E, typename Word>
__global__ void __launch_bounds__(kTileBlock) transpose_tiles(const __grid_constant__ Transposition t) {
  ptx::wait_for_last();
  constexpr int each = sizeof(Word) / sizeof(E), size = 32 * each;
  alignas(sizeof(Word)) __shared__ E tile[size][size + each];
  const unsigned down = unsigned((t.rows + size - 1) / size), across = unsigned((t.columns + size - 1) / size);
  const unsigned id = blockIdx.x, n = id / (down * across), r = id / across % down, c = id % across;
  const int64_t row = int64_t(r) * size, column = int64_t(c) * size, first = int64_t(n) * t.rows * t.columns;
  const int at = int(threadIdx.x % 32) * each, warp = int(threadIdx.x / 32);
  const E* const from = static_cast<const E*>(t.from) + first + row + at;
  E* const to = static_cast<E*>(t.to) + first + column + at;

  JITACT_UNROLL for (int k = 0; k < size; k += kWarpsOfTile) {
    const int i = k + warp;
    if (row + at < t.rows && column + i < t.columns)
      *reinterpret_cast<Word*>(&tile[i][at]) = *reinterpret_cast<const Word*>(from + (column + i) * t.rows);
  }
  __syncthreads();
  JITACT_UNROLL for (int k = 0; k < size; k += kWarpsOfTile) {
    const int i = k + warp;
    Word word = tile[at][i];
    if constexpr (each == 2) word |= Word(tile[at + 1][i]) << 16;
    if (column + at < t.columns && row + i < t.rows) *reinterpret_cast<Word*>(to + (row + i) * t.columns) = word;
  }
}

constexpr int64_t tiles_of(const Transposition& t) {
  const int64_t size = t.bytes == 2 ? 64 : 32;
  return t.batch * ((t.rows + size - 1) / size) * ((t.columns + size - 1) / size);
}

bool takes_transposition(const Transposition& t) {
  const bool in_pairs = t.rows % 2 == 0 && t.columns % 2 == 0 && uintptr_t(t.from) % 4 == 0 && uintptr_t(t.to) % 4 == 0;
  const int64_t tiles = tiles_of(t);
  return (t.bytes > 2 || in_pairs) && tiles > 0 && tiles < int64_t(1) << 31;
}

const char* transpose(const Transposition& t, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const unsigned blocks = unsigned(tiles_of(t));
  if (t.bytes == 2) early::launch<transpose_tiles<uint16_t, uint32_t>>(blocks, kTileBlock, 0, s, t);
  else if (t.bytes == 4) early::launch<transpose_tiles<uint32_t, uint32_t>>(blocks, kTileBlock, 0, s, t);
  else early::launch<transpose_tiles<uint64_t, uint64_t>>(blocks, kTileBlock, 0, s, t);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace jitact::loops
