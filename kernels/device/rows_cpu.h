// The CPU's loops over rows. A strip is `steps` times kLanes widened elements: of one contiguous row or, for strided rows, of
// adjacent rows, one per lane. It stays in the cache, so that tensors are read and written once. One thread computes a row, and
// the result does not depend on the rows next to it.
#pragma once

#include <algorithm>
#include <cstring>
#include <new>

#include "memory_cpu.h"
#include "rows_call.h"
#include "torch_abi.h"
#ifdef JITACT_PART
#include "parts.cuh"
#endif

namespace jitact::rows {

using loops::Storage;

constexpr int kLanes = 32;
constexpr int64_t kBlock = 32;              // steps that are widened, narrowed and summed together
constexpr int64_t kWorthAThread = 1 << 15;  // elements

#ifdef JITACT_ROW_INPUT
// Conversion of elements E in memory to and from T.
template <typename E, typename T>
struct Converted {
  static void widen(const E* from, T* to, int64_t n) {
    if constexpr (std::is_arithmetic_v<E>) {
      for (int64_t i = 0; i < n; i++) to[i].v = float(from[i]);
    } else if constexpr (std::is_same_v<E, Bfloat16>) {
      for (int64_t i = 0; i < n; i++) to[i].v = single::from_bits(uint32_t(from[i].bits) << 16);
    } else if constexpr (std::is_same_v<typename Storage<E>::T, T>) {
      Storage<E>::widen(from, to, n);
    } else {
      in_pieces<E>(n, [&](int64_t i, auto* piece, int64_t count) {
        Storage<E>::widen(from + i, piece, count);
        for (int64_t j = 0; j < count; j++) to[i + j].v = piece[j].v;
      });
    }
  }
  static void narrow(const T* from, E* to, int64_t n) {
    if constexpr (std::is_arithmetic_v<E>) {
      for (int64_t i = 0; i < n; i++) to[i] = E(from[i].v);
    } else if constexpr (std::is_same_v<typename Storage<E>::T, T>) {
      Storage<E>::narrow(from, to, n);
    } else {
      in_pieces<E>(n, [&](int64_t i, auto* piece, int64_t count) {
        for (int64_t j = 0; j < count; j++) piece[j].v = from[i + j].v;
        Storage<E>::narrow(piece, to + i, count);
      });
    }
  }

 private:
  template <typename Stored, typename F>
  static void in_pieces(int64_t n, const F& f) {
    constexpr int64_t size = 256;
    alignas(64) typename Storage<Stored>::T piece[size];
    for (int64_t i = 0; i < n; i += size) f(i, piece, std::min(size, n - i));
  }
};

// The address of a row of a mask.
inline const MaskBits* row_of(const Mask& mask, int64_t row) {
  const int64_t last = row % mask.sizes[1], others = row / mask.sizes[1];
  return static_cast<const MaskBits*>(mask.data) + others / mask.sizes[0] * mask.strides[0] +
         others % mask.sizes[0] * mask.strides[1] + last * mask.strides[2];
}
#endif

// The position of a strip in the tensors of a call.
struct Place {
  int64_t first;   // element
  int64_t steps;
  int64_t stride;  // elements from step to step
  int64_t lanes;   // lanes in use: the number of rows, or kLanes for one row
  int64_t length;  // elements, if the strip is one row
  int64_t row;     // index of the first row

  // The number of elements in `count` steps from `step` on, if the strip is one row.
  int64_t elements(int64_t step, int64_t count) const { return std::min(count * kLanes, length - step * kLanes); }
};

template <Op op, typename S, bool across>
class Strip {
 public:
  using T = typename Storage<S>::T;

  Strip(const Call& call, int64_t steps) : call_(call) {
    const int64_t held = op == Op::backward_from_output ? 0 : steps * kLanes;
    buffer_ = static_cast<T*>(::operator new(held * sizeof(T), kAligned));  // not zeroed
    const int64_t bytes = call.outer * call.length * call.inner * int64_t(sizeof(To));
    past_cache_ = loops::kStreams && !across && bytes >= loops::kLargeBytes;
    if constexpr (kOperands > 0) formulas_.take_numbers(operands_of(call));
  }
  Strip(const Strip&) = delete;
  ~Strip() {
    ::operator delete(buffer_, kAligned);
    loops::fence();
  }

  void run(const Place& place) {
    place_ = place;
    held_ = buffer_;
    if constexpr (kRowValues > 0)
      for (int j = 0; j < rows(); j++) formulas_.take_row(operands_of(call_), j, place.row + j);
    if constexpr (kIsWritten && op == Op::forward)
      if (!past_cache_ && place.length % kLanes == 0) held_ = static_cast<T*>(call_.written) + place.first;
    if constexpr (op != Op::backward_from_output) fold();
    if constexpr (op != Op::forward) backward();
  }

 private:
  static constexpr std::align_val_t kAligned{64};
#ifdef JITACT_ROW_INPUT
  using From = Read<op>;
  using To = Written<op>;
  using Reading = Converted<From, T>;
  using Writing = Converted<To, T>;
#else
  using From = S;
  using To = S;
  using Reading = Storage<S>;
  using Writing = Storage<S>;
#endif
  // Whether elements are read, and written, without conversion.
  static constexpr bool kIsRead = std::is_same_v<From, typename T::Value> && !across;
  static constexpr bool kIsWritten = std::is_same_v<To, typename T::Value> && !across;
  using Wide = std::conditional_t<std::is_same_v<T, Single>, double, float>;      // for sums of many terms of either sign
  static constexpr int kRows = across ? kLanes : 1;                               // per strip

  // The number of the strip's rows.
  int rows() const { return across ? int(place_.lanes) : 1; }
  template <typename F>
  void each_block(const F& f) const {
    for (int64_t step = 0; step < place_.steps; step += kBlock) f(step, std::min(kBlock, place_.steps - step));
  }

  // `count` steps of a tensor from `step` on, in place or widened into a buffer. Lanes and elements beyond rows are `outside`.
  const T* read(int r, int64_t step, int64_t count, T outside, T* to) const {
    const From* from = static_cast<const From*>(call_.read[r]) + place_.first + step * place_.stride;
    if constexpr (across) {
      for (int64_t i = 0; i < count; i++) {
        Reading::widen(from + i * place_.stride, to + i * kLanes, place_.lanes);
        std::fill(to + i * kLanes + place_.lanes, to + (i + 1) * kLanes, outside);
      }
    } else {
      const int64_t n = place_.elements(step, count);
      if constexpr (kIsRead)
        if (n == count * kLanes) return reinterpret_cast<const T*>(from);
      Reading::widen(from, to, n);
      std::fill(to + n, to + count * kLanes, outside);
    }
    return to;
  }
  // Has f write `count` steps of the result from `step` on.
  template <typename F>
  void write(int64_t step, int64_t count, const F& f) {
    To* to = static_cast<To*>(call_.written) + place_.first + step * place_.stride;
    if constexpr (across) {
      f(results_);
      for (int64_t i = 0; i < count; i++) Writing::narrow(results_ + i * kLanes, to + i * place_.stride, place_.lanes);
    } else {
      const int64_t n = place_.elements(step, count), bytes = n * int64_t(sizeof(To));
      const bool past_cache = past_cache_ && reinterpret_cast<uintptr_t>(to) % 32 == 0;
      if constexpr (kIsWritten)
        if (n == count * kLanes && !past_cache) return f(reinterpret_cast<T*>(to));
      f(results_);
      if (kIsWritten && past_cache) return loops::store_past_cache(to, results_, bytes);
      if (!past_cache) return Writing::narrow(results_, to, n);
      Writing::narrow(results_, narrowed_, n);
      loops::store_past_cache(to, narrowed_, bytes);
    }
  }

#ifdef JITACT_ROW_INPUT
  // The mask of n elements of the row from `step` on.
  const T* masks_of(int64_t step, int64_t n) {
    const Mask& mask = call_.mask;
    const MaskBits* of_row = row_of(mask, place_.first / place_.length);
    if (mask.step && std::is_same_v<MaskBits, typename T::Value>) return reinterpret_cast<const T*>(of_row + step * kLanes);
    Converted<MaskBits, T>::widen(of_row + step * kLanes * mask.step, mask_, mask.step ? n : 1);
    if (mask.step == 0) std::fill(mask_ + 1, mask_ + n, mask_[0]);
    return mask_;
  }
  // `count` steps of x from `step` on with the mask applied, in a buffer that already has the elements beyond the row.
  const T* masked(const T* x, int64_t step, int64_t count, T lowest, T* to) {
    const int64_t n = place_.elements(step, count);
    const T* masks = masks_of(step, n);
    const T scale = call_.mask.scale;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; i++) {
      const T in = x[i], m = masks[i];
      to[i] = kAdds ? fma(in, scale, m) : m.v != 0 ? in : lowest;
    }
    return to;
  }
  // Sets elements of `count` steps from `step` on to 0 that a bool mask leaves out.
  void hide(T* t, int64_t step, int64_t count) {
    const int64_t n = place_.elements(step, count);
    const T* masks = masks_of(step, n);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; i++) t[i] = masks[i].v != 0 ? t[i] : T(0);
  }
#endif

  // Combines all lanes, if the strip is one row.
  template <typename V, typename F>
  static void combine(V (&t)[kLanes], const F& f) {
    for (int lanes = kLanes / 2; !across && lanes > 0; lanes /= 2)
      for (int j = 0; j < lanes; j++) t[j] = f(t[j], t[j + lanes]);
  }

  // Folds x, and writes the result or, for backward, keeps it.
  void fold() {
    T peaks[kLanes];
    std::fill(peaks, peaks + kLanes, T(-INFINITY));
    const T* elements = held_;  // of the row, scaled
    if constexpr (kIsRead && masks(op) == 0 && !kPlaced)  // elements may stay where they are
      if (call_.scale == 1 && place_.length % kLanes == 0)
        elements = static_cast<const T*>(call_.read[reads(op) - 1]) + place_.first;
    each_block([&](int64_t step, int64_t count) {
      const T scale = call_.scale, lowest = call_.scale > 0 ? -INFINITY : INFINITY;
      T* to = held_ + step * kLanes;
      const T* from = read(reads(op) - 1, step, count, lowest, to);
#ifdef JITACT_ROW_INPUT
      if constexpr (kMasks) from = masked(from, step, count, lowest, to);
#endif
      if (call_.scale == 1 && (from == to || elements != held_)) {
        for (int64_t i = 0; i < count; i++, from += kLanes)
#pragma GCC ivdep
          for (int j = 0; j < kLanes; j++) peaks[j] = max(peaks[j], from[j]);
        return;
      }
      for (int64_t i = 0; i < count; i++, from += kLanes, to += kLanes)
#pragma GCC ivdep
        for (int j = 0; j < kLanes; j++) {
          const T scaled = from[j] * scale;
          to[j] = scaled;
          peaks[j] = max(peaks[j], scaled);
        }
    });
    combine(peaks, [](T a, T b) { return max(a, b); });
    T invalid[kRows], base[kRows];
    bool any_far = false;
    for (int j = 0; j < kRows; j++) {
      const bool far = is_far(peaks[j]);
      invalid[j] = peaks[j] - peaks[j];
      base[j] = far ? peaks[j] : T(0);
      peaks[j] = far ? T(0) : peaks[j];
      any_far |= far;
    }
    if constexpr (!kPlaced)
      if (any_far) {
        for (int64_t i = 0; i < place_.steps * kLanes; i++) held_[i] = elements[i] - base[i % kRows];
        elements = held_;
      }

    using F = Fold<T>;
    double sums[F::parts][kLanes] = {};
    const Weights<T> weights(peaks[0]);
    each_block([&](int64_t step, int64_t count) {
      T parts[F::parts][kLanes] = {};
      std::fill(parts[0], parts[0] + kLanes, T(F::start));
      const T* from = elements + step * kLanes;
      T* t = held_ + step * kLanes;
      for (int64_t i = 0; i < count; i++, from += kLanes, t += kLanes)
#pragma GCC ivdep
        for (int j = 0; j < kLanes; j++) {
          T part[F::parts];
          for (int p = 0; p < F::parts; p++) part[p] = parts[p][j];
          const T from_base = kPlaced ? from[j] - base[across ? j : 0] : from[j];
          const T kept = F::add(part, across ? Weights<T>(peaks[j]) : weights, peaks[across ? j : 0], from_base);
          if constexpr (!kPlaced) t[j] = kept;
          for (int p = 0; p < F::parts; p++) parts[p][j] = part[p];
        }
      for (int j = 0; j < kLanes; j++) parts[0][j] -= F::start;
      for (int p = 0; p < F::parts; p++)
        for (int j = 0; j < kLanes; j++) sums[p][j] += double(parts[p][j].v);
    });
    for (int p = 0; p < F::parts; p++) combine(sums[p], [](double a, double b) { return a + b; });

    F folded[kRows];
    for (int j = 0; j < kRows; j++) {
      T of_row[F::parts];
      for (int p = 0; p < F::parts; p++) {
        of_row[p] = sums[p][j];
        if (p == 0 && Weighed<T>::parts == 2) sums[1][j] += sums[0][j] - double(of_row[0].v);
      }
      folded[j] = F(peaks[j], invalid[j], Weights<T>(peaks[j]), of_row);
      if constexpr (kPlaced) folded[j].move(base[j]);
    }
    each_block([&](int64_t step, int64_t count) {
      const auto finish = [&](T* to) {
        const T* kept = held_ + step * kLanes;
        for (int64_t i = 0; i < count; i++, kept += kLanes, to += kLanes)
#pragma GCC ivdep
          for (int j = 0; j < kLanes; j++) to[j] = formulas_.result(kept[j], folded[across ? j : 0], across ? j : 0);
      };
      if constexpr (op == Op::forward) write(step, count, finish);
      else finish(held_ + step * kLanes);
    });
  }

  void backward() {
    const auto read_y = [&](int64_t step, int64_t count) -> const T* {
      if constexpr (op == Op::backward) return held_ + step * kLanes;
      else return read(1, step, count, T(0), y_);
    };
    double sums[kTerms][kRows] = {};
    each_block([&](int64_t step, int64_t count) {
      const T *dy = read(0, step, count, T(0), dy_), *y = read_y(step, count);
      Wide block[kTerms][kLanes] = {};
      for (int64_t i = 0; i < count; i++, dy += kLanes, y += kLanes) {
        const int lanes = kVanishing || across ? kLanes : int(place_.elements(step + i, 1));
#pragma GCC ivdep
        for (int j = 0; j < kLanes; j++) {
          const auto terms = formulas_.terms(dy[j], y[j], across ? j : 0);
          for (int k = 0; k < kTerms; k++) block[k][j] += kVanishing || j < lanes ? Wide(terms.of[k].v) : Wide(0);
        }
      }
      for (int k = 0; k < kTerms; k++) {
        combine(block[k], [](Wide a, Wide b) { return a + b; });
        for (int j = 0; j < kRows; j++) sums[k][j] += double(block[k][j]);
      }
    });
    Sums<T> of_rows[kRows];
    for (int j = 0; j < kRows; j++) {
      T totals[kTerms];
      for (int k = 0; k < kTerms; k++) totals[k] = sums[k][j];
      of_rows[j] = Sums<T>(totals);
    }
    if constexpr (kRowValues > 0)
      for (int j = 0; j < rows(); j++)
        formulas_.give_row(operands_of(call_), j, place_.row + j, call_.outer * call_.inner, of_rows[j]);
    const T scale = call_.scale;
    each_block([&](int64_t step, int64_t count) {
      const T *dy = read(0, step, count, T(0), dy_), *y = read_y(step, count);
      write(step, count, [&](T* dx) {
        T* to = dx;
        for (int64_t i = 0; i < count; i++, dy += kLanes, y += kLanes, to += kLanes)
#pragma GCC ivdep
          for (int j = 0; j < kLanes; j++)
            to[j] = scale * formulas_.gradient(dy[j], y[j], of_rows[across ? j : 0], across ? j : 0);
#ifdef JITACT_ROW_INPUT
        if constexpr (kHides)
          if (has_to_hide(of_rows[0], call_.gives_shares)) hide(dx, step, count);
#endif
      });
    });
  }

  const Call& call_;
  T *buffer_, *held_;
  bool past_cache_;
  Formulas<T, kRows> formulas_;
  Place place_;
  alignas(64) T dy_[kBlock * kLanes], y_[kBlock * kLanes], results_[kBlock * kLanes];
  alignas(64) To narrowed_[kBlock * kLanes];
#ifdef JITACT_ROW_INPUT
  alignas(64) T mask_[kBlock * kLanes];
#endif
};

template <Op op, typename S, bool across>
void run_strips(const Call& call, int64_t begin, int64_t end) {
  const int64_t per_outer = across ? (call.inner + kLanes - 1) / kLanes : 1;
  const int64_t steps = across ? call.length : (call.length + kLanes - 1) / kLanes;
  Strip<op, S, across> strip(call, steps);
  for (int64_t s = begin; s < end; s++) {
    const int64_t outer = s / per_outer, column = s % per_outer * kLanes;
    strip.run({
        .first = outer * call.length * call.inner + column,
        .steps = steps,
        .stride = across ? call.inner : kLanes,
        .lanes = std::min(int64_t(kLanes), call.inner - column),
        .length = call.length,
        .row = outer * call.inner + column,
    });
  }
}

#ifdef JITACT_PART
template <int part>
void run_part(const Call& call);
#if !JITACT_PART
void run_cpu(const Call& call) {
  parts::for_part_of(call, [&]<int part>() { run_part<part>(call); });
}
#endif
template <>
void run_part<JITACT_PART>(const Call& call) {
#else
void run_cpu(const Call& call) {
#endif
  const int64_t bytes = call.outer * call.length * call.inner * bytes_of(call.dtype);
  if (bytes >= loops::kLargeBytes) loops::prefer_huge_pages(call.written, bytes);
  const auto run = [](int64_t begin, int64_t end, void* context) {
    const Call& call = *static_cast<const Call*>(context);
    const auto run_if = [&]<Op op, typename S, bool across>() {
      if constexpr (exists(op))
#ifdef JITACT_PART
        if constexpr (parts::kIsHere<op, S>)
#endif
          if constexpr (across ? kHasAcross : kHasAlong)
            if (call.op == op && (call.inner > 1) == across) run_strips<op, S, across>(call, begin, end);
    };
#ifdef JITACT_ROW_INPUT
    run_if.template operator()<Op::forward, Output, false>();
    run_if.template operator()<Op::backward_from_output, Output, false>();
#else
    loops::dispatch_dtype(call.dtype, [&]<typename S>() {
      if constexpr (kIsBuilt<S>) {
        const auto for_op = [&]<Op op>() {
          run_if.template operator()<op, S, false>();
          run_if.template operator()<op, S, true>();
        };
        for_op.template operator()<Op::forward>();
        for_op.template operator()<Op::backward>();
        for_op.template operator()<Op::backward_from_output>();
      }
    });
#endif
  };
  const bool across = call.inner > 1;
  const int64_t strips = call.outer * (across ? (call.inner + kLanes - 1) / kLanes : 1);
  const int64_t grain = std::max(int64_t(1), kWorthAThread / (call.length * (across ? kLanes : 1)));
  loops::in_parallel(strips, grain, run, &call);
}

}  // namespace jitact::rows
