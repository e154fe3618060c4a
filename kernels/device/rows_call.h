// What binding.cpp hands to the loops over rows.
#pragma once

#include "dtype.h"
#include "rows.cuh"

namespace jitact::rows {

using loops::Dtype;

enum class Op { forward, backward, backward_from_output };

// How many tensors an operation reads: x, or dy and what is kept.
constexpr int reads(Op op) { return op == Op::forward ? 1 : 2; }

// Tensors of outer x length x inner elements, one after the other in memory. A row is `length` elements, `inner` apart.
struct Call {
  Op op;
  Dtype dtype;  // not f64
  int64_t outer, length, inner;
  float scale;  // finite and not 0
  const void* read[2];
  void* written;
};

void run_cpu(const Call& call);

constexpr int kMostBlocks = 16;  // of a GPU's cluster
constexpr int64_t kMostVectors = 196608;  // of 16 bytes, that a row of the GPU's touches in all tensors that are read
// How many it touches at most, with `size` elements in each, in a tensor that begins on 16 bytes.
constexpr int64_t vectors_touched(int64_t length, int64_t size) {
  return (length % size == 0 ? length : length + size - 1 + size - 1) / size;
}

// Where rows lie side by side across memory, a block of the GPU's has some steps down a tile of them, so many bytes if it can be.
constexpr int64_t kTileBytes = 1 << 15;
// Whether a GPU takes such rows, of so many tensors: the narrowest tile is of 32 bytes side by side, and rows begin on 16 bytes.
constexpr bool takes_columns(int64_t length, int64_t inner, int64_t size, int tensors) {
  return inner * size % 16 == 0 && (length + kMostBlocks - 1) / kMostBlocks * 32 * tensors <= 3 * kTileBytes;
}

#ifdef JITACT_CUDA

// Queues the call, of rows that a GPU takes, and tensors that begin on 16 bytes, on `stream` of the current device; returns null
// or CUDA's message.
const char* run_cuda(const Call& call, void* stream);
#endif

template <typename R, typename K, typename F>
F fold_of(R (*)(K, F));
// What the kernel file's rows fold to.
template <typename T>
using Fold = decltype(fold_of(&::forward<T>));

}  // namespace jitact::rows
