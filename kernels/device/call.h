// What binding.cpp hands to the loops.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "signature.cuh"

namespace jitact::loops {

enum class Op { forward, forward_bit, backward, backward_from_output, backward_from_bit, backward_sums, backward_from_bit_sums };

constexpr bool reads_bits(Op op) { return op == Op::backward_from_bit || op == Op::backward_from_bit_sums; }
// How many tensors of elements an operation reads, dy first, and writes.
constexpr int reads(Op op) {
  if (op == Op::backward_from_output) return 2;
  if (op == Op::backward || op == Op::backward_sums) return 1 + kElements;
  if (kPlain || reads_bits(op)) return 1;
  return kElements;
}
constexpr int writes(Op op) {
  if (!kPlain && (op == Op::backward || op == Op::backward_sums)) return kElementGradients;
  return 1;
}

// How many gradients an operation sums.
constexpr int summed(Op op) { return op == Op::backward_sums ? kSums : op == Op::backward_from_bit_sums ? kBitSums : 0; }

// Several elements are walked by rows also where they lie densely, in one row: as fast, and less to compile. Not beside random
// numbers, whose place in memory would have to be found for each vector; their sums go over dense memory, as those for one do.
constexpr bool kAlwaysRows = kElements > 1 && kRandom == 0;

struct Elements {
  void* data = nullptr;
  // From row to row and from element to element, counted in elements: a step is 0 or 1 or, where there are several elements, 2.
  // A dense call has one row, and steps of 1.
  int64_t row_stride = 0, step = 1;
};

// A channel or row operand: element i of memory has the value i / inner % count. Beside 16-bit elements it may be `wide`,
// which is float32, as its gradient is then.
struct Broadcasts {
  const void* data = nullptr;
  int64_t count = 1, inner = 1;
  bool wide = false;
};

struct Call {
  Op op;
  Dtype dtype;
  int64_t n;  // elements of each tensor
  int64_t columns;  // elements of a row
  bool dense;       // whether the elements of all tensors lie side by side, in one order
  const double* numbers;            // kNumbers values
  uint8_t* mask = nullptr;  // the bits, which forward_bit writes and backwards from bits read
  const int64_t* seed = nullptr;    // of random operands, where the tensors are
  void* workspace = nullptr;        // for sums on a GPU
  void* sums[kSums + 1] = {};       // the gradients of the first broadcast operands; null where one is not wanted
  Elements read[kElements + 1] = {}, written[kElements] = {};  // null where one is not wanted
  Broadcasts broadcast[kBroadcast + 1] = {};
};

extern "C" void run_cpu(const Call& call);
#ifdef JITACT_CUDA
// Queues the call on `stream` of the current device; returns null or CUDA's message.
extern "C" const char* run_cuda(const Call& call, void* stream);
// What sums need of workspace on a GPU.
extern "C" int64_t workspace_bytes(const Call& call);
#endif

}  // namespace jitact::loops
