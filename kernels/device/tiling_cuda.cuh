// How the GPU divides strided rows into tiles, see columns_cuda.cuh. Sizes and widths are in elements and 4-byte words.
#pragma once

#include "rows_call.h"

namespace jitact::rows {

constexpr int kLogTileLeast = 7, kLogTileThreads = 9, kTileThreads = 1 << kLogTileThreads;  // per block, fewest and most
constexpr int kWords = 32;         // of all tensors, in a thread's registers
constexpr int kLogFewThreads = 8;  // per block, at most, where words are few
constexpr int kLeastWords = 8, kSideBySide = 24;  // of small planes: words of a row in a thread; of adjacent words in threads
constexpr int kLogLine = 5, kLogFewest = 4;  // width of a tile in words: 128 bytes, and the narrowest

// The most words of x in a thread's registers where they are few, of elements of this size.
constexpr int few_words(int64_t size) { return size == 4 ? 24 : 12; }
// The elements of the longest rows for whose length there is code of its own, and of those with a kernel with fewer registers.
constexpr int longest_exact(Op op) { return op == Op::forward ? 12 : op == Op::backward_from_output ? 8 : 0; }
constexpr int kShortest = 5;

struct Tiling {
  int log_threads;     // per block
  int log_wide;        // width in words
  int blocks;          // per cluster
  int steps;           // of the length, per block
  bool held;           // whether registers hold the rows
  bool exact = false;  // whether the length has code of its own, see Tile
};

// Whether `inner` adjacent elements are no whole words, see TilePlace.
constexpr bool is_odd(int64_t inner, int64_t size) { return inner * size % 4 != 0; }
// Whether a tile's edges are in sectors of memory that its neighbours read and write too. Then width comes first.
constexpr bool share_sectors(int64_t inner, int64_t size) {
  return inner * size % 32 != 0 && (inner * size >= 4 << kLogLine || is_odd(inner, size));
}

// In `odd` tiles that are parts of a plane: their rows, and how many of them a plane has.
constexpr unsigned odd_width(int log_wide) { return (2u << log_wide) - 1; }
constexpr unsigned tiles_across(unsigned inner, int log_wide) { return (inner - 1) / odd_width(log_wide) + 1; }
// How many whole planes of adjacent rows a tile has, so that no sector of memory is written by two blocks. 0 if it has parts of one
// or several, as where a quarter of it would be empty otherwise, and in backward from the input: that computes most, and would pay
// more for threads without rows than it gains.
constexpr int planes_of(const Call& call, int64_t size, int log_wide) {
  const int64_t words = words_across(call.inner, size), planes = (int64_t(1) << log_wide) / words;
  const bool gains = planes * words * 4 >= 3 << log_wide && call.op != Op::backward;
  return is_odd(call.inner, size) || gains ? int(planes) : 0;
}
// Whether fewer than five eighths of such a tile would be filled.
constexpr bool is_wasteful(const Call& call, int64_t size, int log_wide) {
  if (!is_odd(call.inner, size)) return false;
  const int64_t planes = planes_of(call, size, log_wide), tiles = planes > 0 ? 1 : tiles_across(unsigned(call.inner), log_wide);
  return ::max(planes, int64_t(1)) * call.inner * 8 < tiles * odd_width(log_wide) * 5;
}

// The width of a tile of rows whose length has code of its own. 0 where there is none; where others read more adjacent memory; and
// where less than half of the tile would be filled.
constexpr int log_exact_wide(const Call& call, int64_t size) {
  if (call.length < 2 || call.length > longest_exact(call.op)) return 0;
  if (!is_odd(call.inner, size)) return call.length > kLeastWords && call.inner * size < 64 ? 0 : kLogFewThreads;
  return 2 * call.inner >= tiles_across(unsigned(call.inner), kLogLine) * odd_width(kLogLine) ? kLogLine : 0;
}

// The tiling for a call's rows: as wide as a block of 128 threads can hold (of 256, where tiles share sectors and a thread holds a
// row); then larger blocks, then clusters; and a cache line wide where these cannot hold them. Tiles of 64 bytes reach 87 % of a
// line's bandwidth; of 32 bytes 67 %, at which reading rows twice, in strips, is as fast. Of small planes, so many threads go along
// a row that they read about a line of adjacent memory.
inline Tiling tiling_of(const Call& call, int64_t size, int tensors) {
  const int64_t length = call.length, inner = call.inner, words = words_across(inner, size), most = kWords / tensors;
  const bool shared = share_sectors(inner, size);
  if (const int log_wide = log_exact_wide(call, size); log_wide > 0)
    return {kLogFewThreads, log_wide, 1, int(length), true, true};
  const auto tiling = [&](int log_threads, int log_wide) -> Tiling {
    const int64_t all = most << (log_threads - log_wide), blocks = (length + all - 1) / all;
    return {log_threads, log_wide, int(::min(blocks, int64_t(kClusterBlocks + 1))), int((length + blocks - 1) / blocks), true};
  };
  int log_groups = is_odd(inner, size);
  while (words << log_groups < kSideBySide && length >= 2 * kLeastWords << log_groups) log_groups++;
  while (length > most << log_groups) log_groups++;
  for (int log_threads = kLogTileLeast; log_threads <= kLogTileThreads; log_threads++) {
    const int log_wide = log_threads - log_groups;
    if (log_wide < kLogFewest || log_wide > kLogTileLeast || is_wasteful(call, size, log_wide)) continue;
    if (planes_of(call, size, log_wide) > 0) return tiling(log_threads, log_wide);
  }
  if (shared && !is_odd(inner, size) && length <= (call.op == Op::forward ? few_words(size) : most))
    return tiling(kLogFewThreads, kLogFewThreads);
  const int first_most = shared ? kLogTileThreads : kLogTileLeast;
  for (const bool wasteful : {false, true}) {
    for (int log_wide = kLogTileLeast; log_wide >= kLogLine; log_wide--) {
      if (is_wasteful(call, size, log_wide) != wasteful) continue;
      for (int log_threads = ::max(kLogTileLeast, log_wide + shared); log_threads <= first_most; log_threads++)
        if (const Tiling t = tiling(log_threads, log_wide); t.blocks == 1) return t;
    }
  }
  for (int log_threads = kLogTileLeast + 1; log_threads <= kLogTileThreads; log_threads++)
    if (const Tiling t = tiling(log_threads, kLogLine); t.blocks == 1) return t;

  struct Shape { int log_threads, log_wide; };
  constexpr Shape shapes[2][3] = {{{8, 5}, {8, 4}, {9, 4}}, {{8, 5}, {9, 5}, {9, 4}}};
  for (const auto [log_threads, log_wide] : shapes[shared ? 1 : tensors - 1])
    if (const Tiling t = tiling(log_threads, log_wide); t.blocks <= kClusterBlocks) return t;
  return {kLogTileThreads, kLogLine, kClusterBlocks, int((length + kClusterBlocks - 1) / kClusterBlocks), false};
}

}  // namespace jitact::rows
