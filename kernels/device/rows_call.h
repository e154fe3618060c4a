// What binding.cpp gives to the loops over rows.
#pragma once

#include <utility>

#include "dtype.h"
#include "rows.cuh"

namespace jitact::rows {

using loops::Dtype;

// The operands of the kernel file's `forward`: its arguments after `kept` and the fold.
template <typename R, typename K, typename F, typename... A>
struct Taken {
  using Fold = F;
  static constexpr int count = sizeof...(A);
  static constexpr bool is_row[count + 1] = {std::is_same_v<A, Row<Single>>...};

  // How many of the first `end` are Rows, and how many are numbers.
  static constexpr int rows(int end = count) {
    int found = 0;
    for (int k = 0; k < end; k++) found += is_row[k];
    return found;
  }
  static constexpr int numbers(int end = count) { return end - rows(end); }
};
template <typename R, typename K, typename F, typename... A>
Taken<R, K, F, A...> taken_by(R (*)(K, F, A...));
using Operand = decltype(taken_by(&::forward<Single>));
constexpr int kOperands = Operand::count, kRowValues = Operand::rows(), kNumbers = Operand::numbers();

// The kernel file's Fold type.
template <typename T>
using Fold = typename decltype(taken_by(&::forward<T>))::Fold;

// The operands of a call: row values in row order, and the gradients, those of one operand after those of another.
struct Operands {
  float numbers[kNumbers + 1];
  const float* of_rows[kRowValues + 1];
  float* gradients;
};

// Operand k, for several rows.
template <typename T, int rows, size_t k>
class Given {
 public:
  JITACT_INLINE void take_number(const Operands& operands) {
    if constexpr (!kIsRow) values_[0] = operands.numbers[Operand::numbers(k)];
  }
  // Sets the value of row r to that of the call's row `number`.
  JITACT_INLINE void take_row(const Operands& operands, int r, int64_t number) {
    if constexpr (kIsRow) values_[r] = operands.of_rows[Operand::rows(k)][number];
  }
  JITACT_INLINE auto get(int r) const {
    if constexpr (kIsRow) return Row<T>(values_[r]);
    else return Number<T>(values_[0]);
  }

 private:
  static constexpr bool kIsRow = Operand::is_row[k];
  T values_[kIsRow ? rows : 1];
};

// The kernel file's functions for several rows with their operands. Empty without operands, so that it does not cost anything.
template <typename T, int rows, typename = std::make_index_sequence<kOperands>>
class Formulas;
template <typename T, int rows, size_t... k>
class Formulas<T, rows, std::index_sequence<k...>> : Given<T, rows, k>... {
 public:
  JITACT_INLINE void take_numbers(const Operands& operands) { (Given<T, rows, k>::take_number(operands), ...); }
  JITACT_INLINE void take_row(const Operands& operands, int r, int64_t number) {
    (Given<T, rows, k>::take_row(operands, r, number), ...);
  }
  JITACT_INLINE T result(T kept, const Fold<T>& fold, int r) const { return forward(kept, fold, Given<T, rows, k>::get(r)...); }
  JITACT_INLINE auto terms(T dy, T y, int r) const { return many<T>(fold_from_output(dy, y, Given<T, rows, k>::get(r)...)); }
  template <typename Sums>
  JITACT_INLINE T gradient(T dy, T y, const Sums& sums, int r) const {
    return backward_from_output(dy, y, sums, Given<T, rows, k>::get(r)...);
  }
  // Writes the gradients of the operands of the call's row `number`, of `count`.
  template <typename Sums>
  JITACT_INLINE void give_row(const Operands& operands, int r, int64_t number, int64_t count, const Sums& sums) const {
    const auto found = many<T>(backward_of_row(sums, Given<T, rows, k>::get(r)...));
    for (int i = 0; i < kRowValues; i++) operands.gradients[i * count + number] = found.of[i].v;
  }
};

// How many sums over a row backward needs.
template <typename M> constexpr int kCount = 0;
template <typename T, int n> constexpr int kCount<Many<T, n>> = n;
constexpr int kTerms = kCount<decltype(Formulas<Single, 1>().terms(Single(), Single(), 0))>;
static_assert(kTerms <= 2, "fold_from_output returns more terms than blocks have shared memory for");
template <typename T>
using Sums = Sum<T, kTerms>;
// Whether terms are 0 where dy is: then elements of other rows in a vector need no check, as their dy is replaced by 0.
#ifdef JITACT_ROW_COUNTED  // defined by the loader if a term is not dy or a product with it
constexpr bool kVanishing = false;
#else
constexpr bool kVanishing = kTerms == 1 && kOperands == 0;
#endif
// A far peak is subtracted from elements before folding. Whether the file must get the original elements and fold, as it uses
// them otherwise than by their distance to the peak.
#ifdef JITACT_ROW_PLACED  // defined by the loader if `forward` uses more of a LogSumExp than log_share
constexpr bool kPlaced = true;
#else
constexpr bool kPlaced = kOperands > 0 && Fold<Single>::as_it_is;
#endif

enum class Op { forward, backward, backward_from_output };

// How many tensors an operation reads: x, or dy and the saved tensor.
constexpr int reads(Op op) { return op == Op::forward ? 1 : 2; }

#ifdef JITACT_ROW_INPUT
// The loader defines these for a build for one type of x, one of the result, and a mask:
//
//   JITACT_ROW_INPUT    float, Half, Bfloat16 or an integer: the type of x and its gradient
//   JITACT_ROW_OUTPUT   float, Half or Bfloat16: the type of the result and the incoming gradient
//   JITACT_ROW_MASK     bool, true for elements that take part; float, Half or Bfloat16, added to scale * x; or void
//
// Rows are along the last dimension. Backward, from the output, exists where the types differ, or the mask is bool: it then gives
// 0 for elements that do not take part.
using loops::Bfloat16;
using loops::Half;
using Input = JITACT_ROW_INPUT;
using Output = JITACT_ROW_OUTPUT;
using MaskElement = JITACT_ROW_MASK;

constexpr bool kConverts = !std::is_same_v<Input, Output>;
constexpr bool kMasks = !std::is_void_v<MaskElement>, kAdds = kMasks && !std::is_same_v<MaskElement, bool>;
// Whether 16-bit elements are converted, without a mask; integers are left out, which hardly anybody has in such rows.
constexpr bool kWidens = kConverts && !kMasks && sizeof(Input) == 2 && !std::is_integral_v<Input>;
constexpr bool kHides = kMasks && !kAdds, kHasGradient = (kConverts || kHides) && !std::is_integral_v<Input>;
using MaskBits = std::conditional_t<kAdds, MaskElement, uint8_t>;  // not bool, which compilers optimise less

constexpr bool exists(Op op) { return op == Op::forward || kHasGradient; }
// How many masks an operation reads.
constexpr int masks(Op op) { return op == Op::forward ? kMasks : kHides; }

// The element types of the tensors that are read, other than the mask, and written.
template <Op op> using Read = std::conditional_t<op == Op::forward, Input, Output>;
template <Op op> using Written = std::conditional_t<op == Op::forward, Output, Input>;

// The layout of a mask. Rows are numbered through three dimensions, of which `sizes` has the last two. Strides are in elements;
// `step` is the stride within a row, 1 or 0.
struct Mask {
  const void* data;
  int64_t sizes[2], strides[3], step;
  float scale;  // of x if the mask is added; Call::scale is 1 then
};
template <typename S>
constexpr bool kIsBuilt = std::is_same_v<S, Output>;
constexpr bool kHasAlong = true, kHasAcross = false;
#else
constexpr int masks(Op) { return 0; }
#ifdef JITACT_ROW_ONLY
// The loader defines these for a build of a part of the file:
//
//   JITACT_ROW_ONLY        float, Half or Bfloat16: the type of all tensors
//   JITACT_ROW_ACROSS      1 if rows are along another than the last dimension, else 0
//   JITACT_ROW_INPUT_KEPT  1 for backward from the input alone; 0 for forward, and backward from the output
using loops::Bfloat16;
using loops::Half;
constexpr bool exists(Op op) { return (op == Op::backward) == bool(JITACT_ROW_INPUT_KEPT); }
template <typename S>
constexpr bool kIsBuilt = std::is_same_v<S, JITACT_ROW_ONLY>;
constexpr bool kHasAcross = JITACT_ROW_ACROSS, kHasAlong = !kHasAcross;
#else
constexpr bool exists(Op) { return true; }
template <typename S>
constexpr bool kIsBuilt = !std::is_same_v<S, double>;
constexpr bool kHasAlong = true, kHasAcross = true;
#endif
#endif

// Contiguous tensors of outer x length x inner elements. A row is `length` elements with stride `inner`.
struct Call {
  Op op;
  Dtype dtype;  // of the result; not f64
  int64_t outer, length, inner;
  float scale;  // finite and not 0
  const void* read[2];
  void* written;
  void* workspace;  // on a GPU
#ifdef JITACT_ROW_INPUT
  Mask mask;
  bool gives_shares;  // see has_to_hide
#endif
};

// Calls of files with operands.
struct OperatedCall : Call {
  Operands operands;
};
inline const Operands& operands_of(const Call& call) { return static_cast<const OperatedCall&>(call).operands; }

#ifdef JITACT_ROW_INPUT
// Whether the gradients that a bool mask leaves out have to be set to 0 in a row. They are 0 where outputs are shares, as these are
// 0 and gradients share * (dy - sum), unless the sum is NaN, as where no element takes part, or dy - sum may be infinite.
template <typename T>
JITACT_INLINE bool has_to_hide(const Sums<T>& sums, bool gives_shares) {
  return !gives_shares || !(abs(sums.total) < T(0x1p100f));
}
#endif

void run_cpu(const Call& call);

constexpr int kClusterBlocks = 16;  // at most, in a GPU's cluster
constexpr int64_t kMostVectors = 196608;  // 16-byte vectors that a row may span on a GPU, in all tensors read
// How many vectors of `size` elements a row spans at most, in a tensor aligned to 16 bytes: it begins at a multiple of the largest
// power of 2 that divides its length.
constexpr int64_t vectors_touched(int64_t length, int64_t size) {
  const int64_t apart = length & -length;
  return (length + (apart < size ? size - apart : 0) + size - 1) / size;
}

// The 4-byte words of `inner` adjacent elements.
constexpr int64_t words_across(int64_t inner, int64_t size) { return (inner * size + 3) / 4; }
// Whether the GPU kernels support these strided rows: word indices, which go somewhat beyond the last word, have 32 bits, and
// element indices within a row, which go somewhat beyond its end, 31.
constexpr int64_t kMostAcross = int64_t(1) << 31, kLongestAcross = int64_t(1) << 30;  // words of all planes; elements of a row
constexpr bool takes_columns(const Call& call, int64_t size) {
  return call.outer * words_across(call.inner, size) < kMostAcross && call.length < kLongestAcross;
}

#ifdef JITACT_ROW_INPUT
// Elements per 16-byte vector on a GPU: those of x or, where it is converted or a mask is added, of float; in backward of dy.
template <Op op>
constexpr int64_t kVectorSize = op != Op::forward ? 16 / sizeof(Output) : !kConverts && !kAdds ? 16 / sizeof(Input) : 4;
constexpr int64_t kHeldVectors = 98304;  // of a row, that fit in the registers of a cluster
// Whether the GPU kernels support rows of this length.
template <Op op>
constexpr bool is_held(int64_t length) {
  const int64_t vectors = reads(op) * vectors_touched(length, kVectorSize<op>);
  return vectors <= (op == Op::forward ? kHeldVectors : kMostVectors);
}
#endif

#ifdef JITACT_CUDA

// How large a workspace a call needs on a GPU.
extern "C" int64_t workspace_bytes(const Call& call);

// Queues the call on `stream` of the current device; returns null or CUDA's message. Rows must be supported, see above, and
// tensors aligned to 16 bytes.
const char* run_cuda(const Call& call, void* stream);
#endif

}  // namespace jitact::rows
