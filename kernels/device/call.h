// What binding.cpp gives to the loops.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "signature.cuh"

namespace jitact::loops {

enum class Op { forward, forward_bit, backward, backward_from_output, backward_from_bit, backward_sums, backward_from_bit_sums };

constexpr bool reads_bits(Op op) { return op == Op::backward_from_bit || op == Op::backward_from_bit_sums; }
// How many element tensors an operation reads (including dy or y) and writes.
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

// With several elements, dense tensors are also processed as rows (as one row): as fast, and fewer kernels to compile. Not with
// random operands, as the dense index would have to be found for each vector; sums then need dense memory, as with one element.
constexpr bool kAlwaysRows = kElements > 1 && kRandom == 0;

struct Elements {
  void* data = nullptr;
  // Strides of rows and of columns, in elements. `step` is 0 or 1, with several elements also 2. A dense call has one row, and
  // steps of 1.
  int64_t row_stride = 0, step = 1;
};

// A channel or row operand: the element at memory index i uses value i / inner % count. With 16-bit elements it may be `wide`:
// float32, and so is its gradient.
struct Broadcasts {
  const void* data = nullptr;
  int64_t count = 1, inner = 1;
  bool wide = false;
};

struct Call {
  Op op;
  Dtype dtype;
  int64_t n;  // elements of each tensor
  int64_t columns;  // elements per row
  bool dense;       // whether all tensors are dense, in the same memory order
  const double* numbers;            // kNumbers values
  uint8_t* mask = nullptr;  // one bit per element: written by forward_bit, read by backward_from_bit
  const int64_t* seed = nullptr;    // of random operands, on the tensors' device
  void* workspace = nullptr;        // for sums on a GPU
  void* sums[kSums + 1] = {};       // the gradients of the first broadcast operands; null if not wanted
  Elements read[kElements + 1] = {}, written[kElements] = {};  // data is null if not wanted
  Broadcasts broadcast[kBroadcast + 1] = {};
};

extern "C" void run_cpu(const Call& call);
#ifdef JITACT_CUDA
// Queues the call on `stream` of the current device; returns null or CUDA's message.
extern "C" const char* run_cuda(const Call& call, void* stream);
// How large a workspace sums need on a GPU, of a call whose outputs are set.
extern "C" int64_t workspace_bytes(const Call& call);
#endif

}  // namespace jitact::loops
