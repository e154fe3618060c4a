// Strips of strided rows, see long_columns_cuda.cuh: what a thread does with some elements of a word's rows.
#pragma once

#include "columns_cuda.cuh"

namespace jitact::rows {

constexpr int kLogStripThreads = 8, kStripThreads = 1 << kLogStripThreads;  // per block; at most as many words wide
constexpr int kStripWords = 16;    // of all tensors, that a thread loads before it computes
// The elements of a strip, and the strips of a row. Where an odd number of 16-bit rows are adjacent, these are in pairs, which have
// every second element each, so that all words of a strip are early or none is, see TilePlace.
constexpr int summed_strip(int64_t length) { return length < 32768 ? 128 : 256; }
constexpr int written_strip(Op op) { return kStripWords / reads(op); }  // short blocks write fastest
inline int64_t strips_of(int64_t length, int each, bool odd) {
  const int64_t at_once = odd ? 2 : 1, all = at_once * each;
  return length / all * at_once + ::min(length % all, at_once);
}

// What a row folds to. base: a float32 peak that is far from 0, which is subtracted from elements first; else 0.
template <typename T>
struct FoldedRow {
  T peak, base;
  Fold<T> fold;
};

// The rows of a word, of which the last of an odd plane, and its first if they are early, may have one alone.
template <int each>
struct WordRows {
  unsigned word;
  bool has[each], early;

  // Where a row's values are: in order of the words that are not early.
  JITACT_DEVICE unsigned slot(int e) const { return word * each + unsigned(e) - early; }
  // e, or else the row that there is.
  JITACT_DEVICE int existing(int e) const { return has[e] ? e : each - 1 - e; }
};

struct Strips : Columns {
  int log_wide;    // width of a block in words
  unsigned wide;   // blocks per strip
  int64_t summed;  // strips of a row that are summed
  void* folded;    // a FoldedRow for each row of each word that is not early
  float* values;   // of these strips, of shape [strips, values, words]

  // The rows of a word that is not early.
  template <int each>
  JITACT_DEVICE WordRows<each> rows_of(unsigned word) const {
    WordRows<each> rows{word, {}, false};
    JITACT_UNROLL for (int e = 0; e < each; e++) rows.has[e] = word % words * each + unsigned(e) < inner;
    return rows;
  }
  // The values of a strip's rows, n for each of them.
  template <int n, typename T, int each>
  JITACT_DEVICE void get(int64_t strip, const WordRows<each>& rows, T (&of)[each][n]) const {
    JITACT_UNROLL for (int v = 0; v < each * n; v++) of[v / n][v % n] = *value<n>(strip, rows, rows.existing(v / n), v % n);
  }
  template <int n, typename T, int each>
  JITACT_DEVICE void put(int64_t strip, const WordRows<each>& rows, const T (&of)[each][n]) const {
    JITACT_UNROLL for (int v = 0; v < each * n; v++)
      if (rows.has[v / n]) *value<n>(strip, rows, v / n, v % n) = of[v / n][v % n].v;
  }

 private:
  template <int n, int each>
  JITACT_DEVICE float* value(int64_t strip, const WordRows<each>& rows, int e, int v) const {
    const unsigned slot = rows.slot(e);
    return values + (strip * (each * n) + slot % each * n + v) * all_words + slot / each;
  }
};

// Whether the rounding error of a scaled peak is too large for exponentials. Then elements are scaled and rounded like the
// peak; else they are not rounded before the peak is subtracted.
template <typename T>
JITACT_DEVICE bool is_beyond(T peak) { return !(abs(peak) < 0x1p28f); }

// A word's rows once their peaks are known.
template <typename S>
struct FoldedWord {
  using T = typename Storage<S>::T;
  using F = Fold<T>;
  static constexpr int each = kEach<S>;
  T scale;
  FoldedRow<T> row[each];
  Weights<T> weights[each];

  // highest: see Rising.
  JITACT_DEVICE FoldedWord(const Strips& strips, const T (&highest)[each]) : scale(strips.scale) {
    JITACT_UNROLL for (int e = 0; e < each; e++) {
      row[e].peak = signed_peak<S>(highest[e], scale), row[e].base = 0;
      if (each == 1 && is_far(row[e].peak)) row[e].base = row[e].peak, row[e].peak = 0;
      weights[e] = weights_beside<S>(row[e].peak, scale);
    }
  }
  JITACT_DEVICE FoldedWord(const Strips& strips, const WordRows<each>& rows) : scale(strips.scale) {
    JITACT_UNROLL for (int e = 0; e < each; e++) {
      row[e] = static_cast<const FoldedRow<T>*>(strips.folded)[rows.slot(rows.existing(e))];
      weights[e] = weights_beside<S>(row[e].peak, scale);
    }
  }
  JITACT_DEVICE void elements(uint32_t word, T (&t)[each]) const {
    widen_word<S>(word, t);
    if constexpr (each == 1) {
      const T base = row[0].base;
      t[0] = is_beyond(base) ? T(ptx::add((t[0] * scale).v, -base.v)) : fma(t[0], scale, -base);
    }
  }
  JITACT_DEVICE void results(uint32_t word, const Formulas<T, each>& formulas, T (&y)[each]) const {
    elements(word, y);
    JITACT_UNROLL for (int e = 0; e < each; e++) {
      if (each == 2 && F::as_it_is) y[e] *= scale;
      y[e] = formulas.result(F::kept(weights[e], y[e]), row[e].fold, e);
    }
  }
};

// Folds words as they come, relative to peaks that rise with them.
template <typename S>
class Rising {
 public:
  using T = typename Storage<S>::T;
  using F = Fold<T>;
  static constexpr int each = kEach<S>, values = 2 + F::parts;  // of a strip: its highest element, the peak, and the sums

  JITACT_DEVICE explicit Rising(const Columns& columns) : scale_(columns.scale), unit_(columns.unit), long_sums_(sums_) {
    JITACT_UNROLL for (int e = 0; e < each; e++)
      highest_[e] = -INFINITY, peak_[e] = kLowest * unit_, weights_[e] = weights_of(peak_[e]);
  }
  template <int n>
  JITACT_DEVICE void take(const uint32_t (&words)[n]) {
    T t[n][each], highest[each];
    JITACT_UNROLL for (int i = 0; i < n; i++) {
      widen_word<S>(words[i], t[i]);
      if constexpr (each == 1) t[i][0] *= scale_, highest[0] = i == 0 ? t[i][0] : max(highest[0], t[i][0]);
    }
    if constexpr (each == 2) {
      const uint32_t signs = scale_ < 0 ? 0x80008000u : 0;
      uint32_t of_words = words[0] ^ signs;
      JITACT_UNROLL for (int i = 1; i < n; i++) of_words = Storage<S>::max_pair(of_words, words[i] ^ signs);
      Storage<S>::widen_pair(of_words, highest[0], highest[1]);
    }
    JITACT_UNROLL for (int e = 0; e < each; e++) {
      highest_[e] = max(highest_[e], highest[e]);
      if (highest[e] <= peak_[e] + F::slack * unit_) continue;  // not if NaN
      const T higher = max(peak_[e], highest[e]);
      const Weights<T> next = weights_of(higher);
      long_sums_.move(e, weights_[e], signed_peak<S>(peak_[e], scale_), next, signed_peak<S>(higher, scale_));
      peak_[e] = higher, weights_[e] = next;
    }
    JITACT_UNROLL for (int i = 0; i < n; i++) {
      JITACT_UNROLL for (int e = 0; e < each; e++) F::add(sums_[e], weights_[e], signed_peak<S>(peak_[e], scale_), t[i][e]);
      if ((i + 1) % kSummed == 0 || i + 1 == n) long_sums_.take(sums_);
    }
  }
  JITACT_DEVICE void give(T (&of)[each][values]) {
    long_sums_.total(sums_);
    JITACT_UNROLL for (int e = 0; e < each; e++) {
      of[e][0] = highest_[e], of[e][1] = peak_[e];
      JITACT_UNROLL for (int p = 0; p < F::parts; p++) of[e][2 + p] = sums_[e][p];
    }
  }
  // Makes the sums of a strip relative to the peak of its row.
  static JITACT_DEVICE void move(const FoldedWord<S>& word, int e, const T (&of)[values], T (&sums)[F::parts]) {
    const T peak = signed_peak<S>(of[1], word.scale);
    JITACT_UNROLL for (int p = 0; p < F::parts; p++) sums[p] = of[2 + p];
    F::move(sums, weights_beside<S>(peak, word.scale), peak, word.weights[e], word.row[e].peak);
  }

 private:
  JITACT_DEVICE Weights<T> weights_of(T peak) const { return weights_beside<S>(signed_peak<S>(peak, scale_), scale_); }

  const T scale_, unit_;
  T highest_[each], peak_[each], sums_[each][F::parts];  // the former two in the order of scaled elements, see signed_peak
  Weights<T> weights_[each];
  LongSums<S, false> long_sums_;
};

// Some elements of a word's rows. odd: see TilePlace.
template <Op op, typename S, bool odd>
class Strip {
 public:
  using T = typename Storage<S>::T;
  static constexpr int each = kEach<S>;

  // The number-th of the word's strips, which have up to `most` elements.
  JITACT_DEVICE Strip(const Strips& strips, unsigned word, int64_t number, int most) : strips_(strips), number_(number) {
    constexpr int step = odd ? 2 : 1;
    const int64_t first = number / step * step * most, begin = first + number % step;
    const int64_t left = ::min(first + int64_t(step) * most, int64_t(strips.length)) - begin;
    if (word < strips.all_words && left > 0) count_ = int((left + step - 1) / step);
    const unsigned plane = word / strips.words;
    place_ = TilePlace<S, odd>(strips, plane, word - plane * strips.words, 0, strips.inner, begin);
    rows_.word = word, rows_.early = place_.early;
    JITACT_UNROLL for (int e = 0; e < each; e++) rows_.has[e] = !odd || place_.has[e];
    if constexpr (kOperands > 0) formulas_.take_numbers(strips.operands);
    if constexpr (kRowValues > 0)
      JITACT_UNROLL for (int e = 0; e < each; e++)
        if (count_ > 0 && rows_.has[e]) formulas_.take_row(strips.operands, e, place_.row[e]);
  }
  // That of this thread, in a block that has strips side by side, and one above another if rows are few.
  static JITACT_DEVICE Strip of_thread(const Strips& strips, unsigned block, int most) {
    const unsigned above = block / strips.wide, beside = block - above * strips.wide;
    const unsigned word = (beside << strips.log_wide) + (threadIdx.x & ((1u << strips.log_wide) - 1));
    return {strips, word, int64_t(above) << (kLogStripThreads - strips.log_wide) | threadIdx.x >> strips.log_wide, most};
  }

  JITACT_DEVICE void fold() const {
    Rising<S> rising(strips_);
    each_batch([&]<int n>(int64_t, const uint32_t (&words)[1][n]) { rising.take(words[0]); });
    T of[each][Rising<S>::values];
    rising.give(of);
    if (count_ > 0) strips_.put(number_, rows_, of);
  }
  // Adds what elements weigh beside a peak that is known, of the rows of a word that is not early.
  JITACT_DEVICE void weigh(const FoldedWord<S>& word, T (&sums)[each][Fold<T>::parts], LongSums<S, false>& long_sums) const {
    each_batch([&]<int n>(int64_t at, const uint32_t (&words)[1][n]) {
      JITACT_UNROLL for (int i = 0; i < n; i++) {
        T t[each];
        word.elements(place_.early ? second_row_on(words[0][i], at + i * apart()) : words[0][i], t);
        JITACT_UNROLL for (int e = 0; e < each; e++) Fold<T>::add(sums[e], word.weights[e], word.row[e].peak, t[e]);
        if ((i + 1) % kSummed == 0 || i + 1 == n) long_sums.take(sums);
      }
    });
  }
  JITACT_DEVICE void add_up() const {
    if (count_ == 0) return;
    T sums[each][kParts<T>] = {};
    each_pair([&](int64_t, const T (&dy)[each], const T (&y)[each]) {
      JITACT_UNROLL for (int e = 0; e < each; e++) add_terms(sums[e], formulas_.terms(dy[e], y[e], e), true);
    });
    strips_.put(number_, rows_, sums);
  }
  // Writes results or gradients. The sums of rows have replaced those of the first strip.
  JITACT_DEVICE void write() const {
    if (count_ == 0) return;
    if constexpr (op == Op::forward) {
      const FoldedWord<S> folded(strips_, rows_);
      each_batch([&]<int n>(int64_t at, const uint32_t (&words)[1][n]) {
        JITACT_UNROLL for (int i = 0; i < n; i++) {
          T y[each];
          folded.results(words[0][i], formulas_, y);
          place_.write(place_.in(strips_.written, at + i * apart()), narrow_word<S>(y));
        }
      });
    } else {
      T parts[each][kParts<T>];
      strips_.get(0, rows_, parts);
      Sums<T> sums[each];
      JITACT_UNROLL for (int e = 0; e < each; e++) sums[e] = sums_of(parts[e]);
      each_pair([&](int64_t at, const T (&dy)[each], const T (&y)[each]) {
        T dx[each];
        JITACT_UNROLL for (int e = 0; e < each; e++) dx[e] = T(strips_.scale) * formulas_.gradient(dy[e], y[e], sums[e], e);
        place_.write(place_.in(strips_.written, at), narrow_word<S>(dx));
      });
    }
  }

 private:
  static constexpr int tensors = reads(op);

  // Words from one element to the next.
  JITACT_DEVICE int64_t apart() const { return odd ? strips_.inner : strips_.words; }
  JITACT_DEVICE uint32_t word_at(int r, int64_t at) const { return static_cast<const uint32_t*>(strips_.read[r])[at]; }
  // A word's second row, and the first of the next, if there is one.
  JITACT_DEVICE uint32_t second_row_on(uint32_t word, int64_t at) const {
    const bool goes_on = (rows_.word + 1) % strips_.words != 0;
    return word >> 16 | (goes_on ? word_at(0, at + 1) << 16 : 0);
  }
  // Visits the words of all tensors, several at once, with the index of the first.
  template <typename Visit>
  JITACT_DEVICE void each_batch(const Visit& visit) const {
    constexpr int most = kStripWords / tensors;
    int i = 0;
#pragma unroll 1
    for (; i + most <= count_; i += most) batch<most>(i, visit);
#pragma unroll 1
    for (; i < count_; i++) batch<1>(i, visit);
  }
  template <int n, typename Visit>
  JITACT_DEVICE void batch(int first, const Visit& visit) const {
    const int64_t at = place_.start + first * apart();
    uint32_t words[tensors][n];
    JITACT_UNROLL for (int r = 0; r < tensors; r++)
      JITACT_UNROLL for (int i = 0; i < n; i++) words[r][i] = word_at(r, at + i * apart());
    visit(at, words);
  }
  // Visits dy and y, with the index of their word.
  template <typename Visit>
  JITACT_DEVICE void each_pair(const Visit& visit) const {
    const auto each_of = [&](const auto& output) {
      each_batch([&]<int n>(int64_t at, const uint32_t (&words)[2][n]) {
        JITACT_UNROLL for (int i = 0; i < n; i++) {
          T dy[each], y[each];
          widen_word<S>(words[0][i], dy), output(words[1][i], y);
          visit(at + i * apart(), dy, y);
        }
      });
    };
    if constexpr (op == Op::backward_from_output) {
      each_of([](uint32_t word, T (&y)[each]) { widen_word<S>(word, y); });
    } else {
      const FoldedWord<S> folded(strips_, rows_);
      each_of([&](uint32_t word, T (&y)[each]) { folded.results(word, formulas_, y); });
    }
  }

  const Strips& strips_;
  const int64_t number_;     // the strip's index
  TilePlace<S, odd> place_;  // of its first word
  WordRows<each> rows_;
  int count_ = 0;            // elements of each row
  Formulas<T, each> formulas_;
};

}  // namespace jitact::rows
