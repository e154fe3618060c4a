// What binding.cpp hands to the loops over rows, which are the GPU's alone.
#pragma once

#include "dtype.h"
#include "rows.cuh"

namespace jitact::rows {

using loops::Dtype;

enum class Op { forward, backward_from_output };

// How many tensors an operation reads: x, or dy and y.
constexpr int reads(Op op) { return op == Op::forward ? 1 : 2; }

constexpr int64_t kVectorBytes = 16;
constexpr int64_t kMostVectors = 16384;  // of a row

// Rows one after the other in memory, each of whole vectors.
struct Call {
  Op op;
  Dtype dtype;     // not f64
  int64_t rows;
  int64_t vectors; // of a row, up to kMostVectors
  const void* read[2];
  void* written;
};

#ifdef JITACT_CUDA
// Queues the call on `stream` of the current device; returns null or CUDA's message.
const char* run_cuda(const Call& call, void* stream);
#endif

}  // namespace jitact::rows
