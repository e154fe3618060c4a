// The GPU's backward, from the output, of strided rows that are too long for tiles, or for any but narrow tiles that share their
// sectors of memory with others. dy and y are read twice, which is fastest if blocks read adjacent memory. One kernel sums strips
// of rows, one adds up the strips of each row, and one writes gradients. Strips depend on the length only, and so do the bits of
// a row's sums.
#pragma once

#include "columns_cuda.cuh"
#include "early_cuda.cuh"

namespace jitact::rows {

constexpr int kLogStripThreads = 8, kStripThreads = 1 << kLogStripThreads;  // per block; at most as many words wide
constexpr int kStripWords = 8;  // of each tensor, that a thread loads before it computes
constexpr int kSummedStrip = 256, kWrittenStrip = 8;  // elements; short blocks write fastest
constexpr int kFoldThreads = 1024, kFoldWords = 32;  // per block that adds up strips, and its width in words

constexpr int64_t strips_of(int64_t length, int each) { return (length + each - 1) / each; }
template <typename S>
constexpr int kStripSums = kEach<S> * kParts<typename Storage<S>::T>;  // for a word's rows
static_assert(kStripSums<float> == kStripSums<Half>);

struct Strips : Columns {
  int log_wide;   // width of a block in words
  unsigned wide;  // blocks per strip
  float* sums;    // of shape [strips, sums, words]

  // The rows of a word: the first one's index in all, and where it is.
  struct Rows {
    unsigned plane, column;
    int64_t first;
    int count;
  };
  template <int each>
  JITACT_DEVICE Rows rows_of(unsigned word) const {
    const unsigned plane = word / words, column = (word - plane * words) * each;
    return {plane, column, int64_t(plane) * inner + column, int(::min(unsigned(each), inner - column))};
  }
};

// A thread's strip of `length` elements of a word's rows. odd: words of an odd number of adjacent 16-bit rows, each second of
// which does not lie on 4 bytes, and is read and written in halves; the last one has a single row, which is its second one too.
template <typename S, int length, bool odd>
class Strip {
 public:
  using T = typename Storage<S>::T;

  JITACT_DEVICE Strip(const Strips& strips, unsigned block) : strips_(strips) {
    const unsigned above = block / strips.wide;
    word_ = ((block - above * strips.wide) << strips.log_wide) + (threadIdx.x & ((1u << strips.log_wide) - 1));
    number_ = int64_t(above) << (kLogStripThreads - strips.log_wide) | threadIdx.x >> strips.log_wide;
    const int64_t begin = number_ * length;
    if (word_ < strips.all_words && begin < strips.length) count_ = int(::min(int64_t(length), strips.length - begin));
    const Strips::Rows rows = strips.template rows_of<each>(word_);
    rows_ = rows.count;
    start_ = (int64_t(rows.plane) * strips.length + begin) * strips.inner + rows.column;
    if constexpr (kOperands > 0) formulas_.take_numbers(strips.operands);
    if constexpr (kRowValues > 0)
      JITACT_UNROLL for (int e = 0; e < each; e++)
        if (count_ > 0 && e < rows_) formulas_.take_row(strips.operands, e, rows.first + e);
  }

  JITACT_DEVICE void add_up() const {
    T parts[each][kParts<T>] = {};
    each_word([&](int64_t, const T (&dy)[each], const T (&y)[each]) {
      JITACT_UNROLL for (int e = 0; e < each; e++) add_terms(parts[e], formulas_.terms(dy[e], y[e], e), true);
    });
    float* to = strips_.sums + number_ * kStripSums<S> * strips_.all_words + word_;
    if (count_ > 0)
      JITACT_UNROLL for (int s = 0; s < kStripSums<S>; s++, to += strips_.all_words) *to = parts[s / kParts<T>][s % kParts<T>].v;
  }

  // Writes the gradients. The sums of whole rows have replaced those of the first strip.
  JITACT_DEVICE void write() const {
    if (count_ == 0) return;
    Sums<T> sums[each];
    const float* from = strips_.sums + word_;
    JITACT_UNROLL for (int e = 0; e < each; e++) {
      T parts[kParts<T>];
      JITACT_UNROLL for (int p = 0; p < kParts<T>; p++, from += strips_.all_words) parts[p] = *from;
      sums[e] = sums_of(parts);
    }
    each_word([&](int64_t at, const T (&dy)[each], const T (&y)[each]) {
      T dx[each];
      JITACT_UNROLL for (int e = 0; e < each; e++) dx[e] = T(strips_.scale) * formulas_.gradient(dy[e], y[e], sums[e], e);
      write_word(static_cast<S*>(strips_.written) + at, narrow_word<S>(dx));
    });
  }

 private:
  static constexpr int each = kEach<S>;

  JITACT_DEVICE uint32_t word_at(const S* p) const {
    if constexpr (!odd) return *reinterpret_cast<const uint32_t*>(p);
    const auto* halves = reinterpret_cast<const uint16_t*>(p);
    return halves[0] | uint32_t(halves[rows_ - 1]) << 16;
  }
  JITACT_DEVICE void write_word(S* p, uint32_t word) const {
    if (!odd || (rows_ > 1 && reinterpret_cast<uintptr_t>(p) % 4 == 0)) {
      *reinterpret_cast<uint32_t*>(p) = word;
    } else {
      auto* halves = reinterpret_cast<uint16_t*>(p);
      halves[0] = uint16_t(word);
      if (rows_ > 1) halves[1] = uint16_t(word >> 16);
    }
  }
  // Visits words of dy and y, with the index of their first elements.
  template <typename Visit>
  JITACT_DEVICE void each_word(const Visit& visit) const {
    int i = 0;
#pragma unroll 1
    for (; i + kStripWords <= count_; i += kStripWords) several<kStripWords>(i, visit);
#pragma unroll 1
    for (; i < count_; i++) several<1>(i, visit);
  }
  template <int n, typename Visit>
  JITACT_DEVICE void several(int first, const Visit& visit) const {
    const int64_t apart = strips_.inner, at = start_ + first * apart;
    uint32_t words[2][n];
    JITACT_UNROLL for (int r = 0; r < 2; r++)
      JITACT_UNROLL for (int i = 0; i < n; i++) words[r][i] = word_at(static_cast<const S*>(strips_.read[r]) + at + i * apart);
    JITACT_UNROLL for (int i = 0; i < n; i++) {
      T dy[each], y[each];
      widen_word<S>(words[0][i], dy), widen_word<S>(words[1][i], y);
      visit(at + i * apart, dy, y);
    }
  }

  const Strips& strips_;
  unsigned word_;
  int64_t number_, start_;  // the strip's index, and its first element
  int rows_;                // of the word
  int count_ = 0;           // elements of each
  Formulas<T, each> formulas_;
};

template <typename S, bool odd>
__global__ void __launch_bounds__(kStripThreads, 4) add_up_strips(const __grid_constant__ Strips strips) {
  ptx::let_next_begin();
  Strip<S, kSummedStrip, odd>(strips, blockIdx.x).add_up();
}

// Adds up the sums of strips, and writes gradients of row operands.
template <typename S>
__global__ void __launch_bounds__(kFoldThreads) fold_strips(const __grid_constant__ Strips strips) {
  using T = typename Storage<S>::T;
  constexpr int groups = kFoldThreads / kFoldWords, each = kEach<S>;
  __shared__ float shared[groups][kStripSums<S>][kFoldWords];
  const int group = int(threadIdx.x) / kFoldWords, own = int(threadIdx.x) % kFoldWords;
  const unsigned word = blockIdx.x * kFoldWords + own;
  const int64_t count = strips_of(strips.length, kSummedStrip), apart = strips.all_words;
  T parts[each][kParts<T>] = {};
  const auto join = [&](const auto& value) {
    T others[each][kParts<T>];
    JITACT_UNROLL for (int s = 0; s < kStripSums<S>; s++) others[s / kParts<T>][s % kParts<T>] = value(s);
    JITACT_UNROLL for (int e = 0; e < each; e++) Joined()(parts[e], others[e]);
  };
  const bool is_there = word < strips.all_words;
  ptx::let_next_begin();
  ptx::wait_for_last();
#pragma unroll 4
  for (int64_t i = group; is_there && i < count; i += groups)
    join([&](int s) { return strips.sums[(i * kStripSums<S> + s) * apart + word]; });
  JITACT_UNROLL for (int s = 0; s < kStripSums<S>; s++) shared[group][s][own] = parts[s / kParts<T>][s % kParts<T>].v;
  __syncthreads();
  if (group > 0 || !is_there) return;
  for (int other = 1; other < groups; other++) join([&](int s) { return shared[other][s][own]; });
  JITACT_UNROLL for (int s = 0; s < kStripSums<S>; s++)
    strips.sums[s * apart + word] = parts[s / kParts<T>][s % kParts<T>].v;
  if constexpr (kRowValues > 0) {
    const Strips::Rows rows = strips.template rows_of<each>(word);
    for (int e = 0; e < rows.count; e++) {
      Formulas<T, 1> formulas;
      formulas.take_numbers(strips.operands), formulas.take_row(strips.operands, 0, rows.first + e);
      formulas.give_row(strips.operands, 0, rows.first + e, strips.rows, sums_of(parts[e]));
    }
  }
}

template <typename S, bool odd>
__global__ void __launch_bounds__(kStripThreads, 4) write_strips(const __grid_constant__ Strips strips) {
  const Strip<S, kWrittenStrip, odd> strip(strips, gridDim.x - 1 - blockIdx.x);  // from the last, which the cache may still hold
  ptx::wait_for_last();
  strip.write();
}

// Whether backward from the output is done so.
inline bool in_strips(const Call& call, int64_t size, const Tiling& tiling) {
  const bool is_narrow = tiling.log_wide < kLogLine && words_across(call.inner, size) > 1 << tiling.log_wide;
  return !tiling.held || (is_narrow && tiling.blocks > 1 && share_sectors(call.inner, size));
}
// The workspace that this needs.
inline int64_t strip_bytes(const Call& call) {
  const int64_t size = call.dtype == Dtype::f32 ? sizeof(float) : sizeof(Half), words = call.outer * words_across(call.inner, size);
  if (call.op != Op::backward_from_output || call.inner == 1 || !in_strips(call, size, tiling_of(call, size, 2))) return 0;
  return strips_of(call.length, kSummedStrip) * kStripSums<float> * words * int64_t(sizeof(float));
}

template <typename S, bool odd>
cudaError_t start_strips(const Call& call, const Columns& columns, cudaStream_t stream) {
  Strips strips{columns};
  while (strips.log_wide < kLogStripThreads && 1u << strips.log_wide < strips.all_words) strips.log_wide++;
  strips.wide = unsigned((int64_t(strips.all_words) + (1 << strips.log_wide) - 1) >> strips.log_wide);
  strips.sums = static_cast<float*>(call.workspace);
  const auto blocks_of = [&](int strip) {
    const int64_t groups = int64_t(1) << (kLogStripThreads - strips.log_wide), count = strips_of(call.length, strip);
    return unsigned((count + groups - 1) / groups) * strips.wide;
  };
  Clusters shape(1, kStripThreads, 0, stream);
  shape.count(blocks_of(kSummedStrip));
  if (const cudaError_t error = cudaLaunchKernelEx(&shape.config, add_up_strips<S, odd>, strips)) return error;
  const unsigned folding = (strips.all_words + kFoldWords - 1) / kFoldWords;
  if (const cudaError_t error = early::launch<fold_strips<S>>(folding, kFoldThreads, stream, strips)) return error;
  return early::launch<write_strips<S, odd>>(blocks_of(kWrittenStrip), kStripThreads, stream, strips);
}

template <Op op, typename S, bool odd>
cudaError_t start_columns(const Columns& columns, const Call& call, cudaStream_t stream) {
  if constexpr (op == Op::backward_from_output) {
    if (in_strips(call, sizeof(S), columns.tiling)) return start_strips<S, odd>(call, columns, stream);
  } else {
    if (!columns.tiling.held) return start_tiles<op, S, false, odd>(columns, stream);
  }
  return start_tiles<op, S, true, odd>(columns, stream);
}
template <Op op, typename S>
cudaError_t start_columns(const Call& call, cudaStream_t stream) {
  const Columns columns = columns_of<op, S>(call);
  if constexpr (sizeof(S) == 2)
    if (is_odd(call.inner, sizeof(S))) return start_columns<op, S, true>(columns, call, stream);
  return start_columns<op, S, false>(columns, call, stream);
}

}  // namespace jitact::rows
