// What binding.cpp hands to the loops over rows.
#pragma once

#include <utility>

#include "dtype.h"
#include "rows.cuh"

namespace jitact::rows {

using loops::Dtype;

// What the kernel file's `forward` takes after what it keeps of an element, and the fold.
template <typename R, typename K, typename F, typename... A>
struct Taken {
  using Fold = F;
  static constexpr int count = sizeof...(A);
  static constexpr bool is_row[count + 1] = {std::is_same_v<A, Row<Single>>...};

  // How many of the first `end` are values of rows, and how many are numbers.
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

// What the kernel file's rows fold to.
template <typename T>
using Fold = typename decltype(taken_by(&::forward<T>))::Fold;

// Where the operands of a call are: values in the order of rows, and as many for the gradients, of one operand after the other.
struct Operands {
  float numbers[kNumbers + 1];
  const float* of_rows[kRowValues + 1];
  float* gradients;
};

// Operand k, of several rows.
template <typename T, int rows, size_t k>
class Given {
 public:
  JITACT_INLINE void take_number(const Operands& operands) {
    if constexpr (!kIsRow) values_[0] = operands.numbers[Operand::numbers(k)];
  }
  // Of the row `number` of a call, as row r here.
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

// The kernel file's functions, of several rows with their operands. Without operands it is empty, so that compilers see nothing.
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
  // Writes the gradients of what the row `number`, of `count`, has.
  template <typename Sums>
  JITACT_INLINE void give_row(const Operands& operands, int r, int64_t number, int64_t count, const Sums& sums) const {
    const auto found = many<T>(backward_of_row(sums, Given<T, rows, k>::get(r)...));
    for (int i = 0; i < kRowValues; i++) operands.gradients[i * count + number] = found.of[i].v;
  }
};

// How many sums of a row backward needs.
template <typename M> constexpr int kCount = 0;
template <typename T, int n> constexpr int kCount<Many<T, n>> = n;
constexpr int kTerms = kCount<decltype(Formulas<Single, 1>().terms(Single(), Single(), 0))>;
static_assert(kTerms <= 2, "fold_from_output returns more terms than blocks have shared memory for");
template <typename T>
using Sums = Sum<T, kTerms>;
// Whether terms are 0 where dy is: what stands beside a row, in a vector that it shares, then needs no further look.
#ifdef JITACT_ROW_COUNTED  // the loader says so of a term that is not dy, or a product with it
constexpr bool kVanishing = false;
#else
constexpr bool kVanishing = kTerms == 1 && kOperands == 0;
#endif
// Rows whose peak is far from 0 are folded as if it were 0. Whether the file has to see elements and the fold where they were, as
// it may take distances between others than elements and the peak.
#ifdef JITACT_ROW_PLACED  // the loader says so of a `forward` that has more of a LogSumExp than the logarithms of shares
constexpr bool kPlaced = true;
#else
constexpr bool kPlaced = kOperands > 0 && Fold<Single>::as_it_is;
#endif

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

#ifdef JITACT_ROW_HIDES  // the loader says so for a mask of bool, where x can have a gradient
// A gradient of x, to be 0 where the mask leaves an element out: in all rows or, where backward gives 0 there unless a sum is
// not finite, in those whose first gradient is not.
struct Hidden {
  Input* gradient;
  int64_t rows, length;
  Mask mask;
  bool all_rows;
};
JITACT_INLINE bool is_finite(float x) { return x - x == 0; }
JITACT_INLINE bool is_finite(Half x) { return (x.bits & 0x7c00) != 0x7c00; }
JITACT_INLINE bool is_finite(Bfloat16 x) { return (x.bits & 0x7f80) != 0x7f80; }

void hide_cpu(const Hidden& call);
#endif
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
  void* workspace;  // on a GPU
#ifdef JITACT_ROW_INPUT
  Mask mask;
#endif
};

// What calls of a file with operands are.
struct OperatedCall : Call {
  Operands operands;
};
inline const Operands& operands_of(const Call& call) { return static_cast<const OperatedCall&>(call).operands; }

void run_cpu(const Call& call);

constexpr int kClusterBlocks = 16;  // of a GPU's cluster
constexpr int64_t kMostVectors = 196608;  // of 16 bytes, that a row of the GPU's touches in all tensors that are read
// How many it touches at most, with `size` elements in each, in a tensor that begins on 16 bytes.
constexpr int64_t vectors_touched(int64_t length, int64_t size) {
  return (length % size == 0 ? length : length + size - 1 + size - 1) / size;
}

// Whether a GPU takes rows that lie side by side across memory: in whole words of 4 bytes, which are numbered by 32 bits, as a
// row's elements are by 31, and some beyond its end.
constexpr int64_t kMostAcross = int64_t(1) << 34, kLongestAcross = int64_t(1) << 30;  // bytes side by side; elements
constexpr bool takes_columns(const Call& call, int64_t size) {
  return call.inner * size % 4 == 0 && call.outer * call.inner * size < kMostAcross && call.length < kLongestAcross;
}

#ifdef JITACT_ROW_INPUT
// How many elements a GPU computes as a vector of 16 bytes: x as it is, or as float where it is converted or added to.
template <Op op>
constexpr int64_t kVectorSize = op == Op::forward && !kConverts && !kAdds ? 16 / sizeof(Input) : 4;
constexpr int64_t kHeldVectors = 98304;  // of a row, that the registers of a cluster hold
// Whether a GPU takes rows along the last dimension.
template <Op op>
constexpr bool is_held(int64_t length) {
  const int64_t vectors = reads(op) * vectors_touched(length, kVectorSize<op>);
  return vectors <= (op == Op::forward ? kHeldVectors : kMostVectors);
}
#endif

#ifdef JITACT_CUDA

// What a call needs of workspace on a GPU.
extern "C" int64_t workspace_bytes(const Call& call);

// Queues the call, of rows that a GPU takes, and tensors that begin on 16 bytes, on `stream` of the current device; returns null
// or CUDA's message.
const char* run_cuda(const Call& call, void* stream);
#ifdef JITACT_ROW_HIDES
const char* hide_cuda(const Hidden& call, void* stream);
#endif
#endif

}  // namespace jitact::rows
