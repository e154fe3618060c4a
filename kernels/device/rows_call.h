// What binding.cpp hands to the loops over rows.
#pragma once

#include "dtype.h"
#include "rows.cuh"

namespace jitact::rows {

using loops::Dtype;

enum class Op { forward, backward, backward_from_output };

// How many tensors an operation reads: x, or dy and what is kept.
constexpr int reads(Op op) { return op == Op::forward ? 1 : 2; }

#ifdef JITACT_ROW_INPUT
// A build for one type of x, one of the result, and a mask, where the loader names them:
//
//   JITACT_ROW_INPUT    float, Half, Bfloat16 or an integer: what x is read as, and its gradient written
//   JITACT_ROW_OUTPUT   float, Half or Bfloat16: of the result, and of the gradient that comes in
//   JITACT_ROW_MASK     bool, true for what takes part; float, Half or Bfloat16, which is added to scale x; or void
//
// Rows lie along the last dimension. The one backward, where the types differ, is from the output, and needs no mask.
using loops::Bfloat16;
using loops::Half;
using Input = JITACT_ROW_INPUT;
using Output = JITACT_ROW_OUTPUT;
using MaskElement = JITACT_ROW_MASK;

constexpr bool kConverts = !std::is_same_v<Input, Output>, kHasGradient = kConverts && !std::is_integral_v<Input>;
constexpr bool kMasks = !std::is_void_v<MaskElement>, kAdds = kMasks && !std::is_same_v<MaskElement, bool>;
using MaskBits = std::conditional_t<kAdds, MaskElement, uint8_t>;  // compilers do less with bool

// How many masks an operation reads.
constexpr int masks(Op op) { return kMasks && op == Op::forward; }

// What tensors hold that are read beside the mask, and what is written.
template <Op op> using Read = std::conditional_t<op == Op::forward, Input, Output>;
template <Op op> using Written = std::conditional_t<op == Op::forward, Output, Input>;

// Where a mask lies. Rows are numbered through three dimensions, of which `sizes` has the last two; strides are in elements, and
// `step` from one element of a row to the next is 1 or 0.
struct Mask {
  const void* data;
  int64_t sizes[2], strides[3], step;
  float scale;  // of x, where the mask is added; the call's own is 1 then
};
#else
constexpr int masks(Op) { return 0; }
#endif

// Tensors of outer x length x inner elements, one after the other in memory. A row is `length` elements, `inner` apart.
struct Call {
  Op op;
  Dtype dtype;  // not f64; of what is written
  int64_t outer, length, inner;
  float scale;  // finite and not 0
  const void* read[2];
  void* written;
#ifdef JITACT_ROW_INPUT
  Mask mask;
#endif
};

void run_cpu(const Call& call);

constexpr int kMostBlocks = 16;  // of a GPU's cluster
constexpr int64_t kMostVectors = 196608;  // of 16 bytes, that a row of the GPU's touches in all tensors that are read
// How many it touches at most, with `size` elements in each, in a tensor that begins on 16 bytes.
constexpr int64_t vectors_touched(int64_t length, int64_t size) {
  return (length % size == 0 ? length : length + size - 1 + size - 1) / size;
}

// Whether a GPU takes rows that lie side by side across memory: in whole words of 4 bytes, which are numbered by 32 bits.
constexpr bool takes_columns(int64_t outer, int64_t inner, int64_t size) {
  return inner * size % 4 == 0 && outer * inner * size < int64_t(1) << 34;
}

#ifdef JITACT_ROW_INPUT
// How many elements a GPU computes as a vector of 16 bytes: x as it is, or as float where it is converted or added to.
template <Op op>
constexpr int64_t kVectorSize = op == Op::forward && !kConverts && !kAdds ? 16 / sizeof(Input) : 4;
constexpr int64_t kHeldVectors = 65536;  // of a row, that the registers of a cluster hold, of x and the mask
// Whether a GPU takes rows along the last dimension.
template <Op op>
constexpr bool is_held(int64_t length) {
  const int64_t vectors = (reads(op) + masks(op)) * vectors_touched(length, kVectorSize<op>);
  return vectors <= (op == Op::forward ? kHeldVectors : kMostVectors);
}
#endif

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
