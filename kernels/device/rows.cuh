// For kernel files of activations of rows (softmax and its relatives), in addition to elementwise.cuh. A row is the elements
// along one dimension, each times the call's scale. Such a file defines
//
//   T forward(T kept, Fold<T> row)                       the result, from what the fold keeps of an element
//   T fold_from_output(T dy, T y)                        an element's term of the sum over the row that backward needs
//   T backward_from_output(T dy, T y, Sum<T> row)        the gradient, without the factor `scale`
//
// all of which may take the same operands after these: Number<T>, and Row<T>, of a tensor with one value for each row. If it
// has any of the latter, the file also defines
//
//   T backward_of_row(Sum<T> row, operands...)           the gradient of the row's value; of several, Many<T, n>
//
// Fold is one of the following, for elements t:
//
//   SumOfExp<T>    keeps e^t; .share(kept) is e^t / sum of e^t
//   LogSumExp<T>   keeps t; .log_share(kept) is the logarithm of that share, accurate also for shares close to 1
//
// Sum<T> has .total, and .times_exp(y), which is e^y times the total, for y up to 46. If fold_from_output returns several
// terms, as Many<T, n>, the sums are a Sum<T, n>: .of[k] is the sum of term k, and .total the first. If an element is NaN or
// +inf, or all are -inf, the row is NaN, as in PyTorch.
//
// The loops fold in two passes: first the peak (the largest t), then sums of weights, 2^60 e^(t - peak). The factor keeps the
// weights of the smallest normal shares from being subnormal. A GPU folds rows that do not fit in registers in one pass, each
// thread relative to its own running peak; weights are rescaled by powers of two to the row's peak at the end.
#pragma once

#include "elementwise.cuh"

#define JITACT_ROWS

namespace jitact {

// Whether the peak is to be subtracted before anything else; for such large peaks the rounding of t - peak does not matter.
// True for infinite peaks and NaN as well.
template <typename T>
JITACT_INLINE bool is_far(T peak) { return !(abs(peak) < 0x1p20); }

// The factor, with the scale's sign, that brings a far peak of unscaled 16-bit elements to between 2^20 and 2^21. Any other
// element differs from the peak by at least 2^-11 of it, so its weight is 0, as it is with the scale.
JITACT_INLINE float factor_of_far(float peak, float scale) {
  const uint32_t exponent = single::to_bits(peak) & 0x7f800000u, sign = single::to_bits(scale) & 0x80000000u;
  return single::from_bits((274u << 23) - exponent | sign);
}

// For 16-bit results, one fma and one exponential. The rounding error of the shift scales all weights of a row alike.
template <typename T>
class Weights {
 public:
  Weights() = default;
  JITACT_INLINE explicit Weights(T peak) : times_(narrow::kLog2e), shift_(fmaf(-narrow::kLog2e, peak.v, 60.0f)) {}
  // For unscaled elements.
  JITACT_INLINE Weights(T peak, T scale) : times_(scale.v * narrow::kLog2e) {
    if (is_far(peak * scale)) times_ = factor_of_far(peak.v, scale.v);
    shift_ = fmaf(-times_, peak.v, 60.0f);
  }
  JITACT_INLINE T of(T t) const { return narrow::exp2(fmaf(t.v, times_, shift_)); }
  // A sum of weights divided by the weight of t.
  JITACT_INLINE T over(T sum, T t) const { return sum / of(t); }
  // The exponent (at most 0) of the power of two that converts weights relative to this peak to those relative to a higher one.
  JITACT_INLINE T exponent_to(const Weights& higher) const { return higher.shift_ - shift_; }
  static JITACT_INLINE T power(T exponent) { return narrow::exp2(exponent.v); }

 private:
  float times_, shift_;
};

// For float32, 2^n 2^f with t log2(e) = n + f and integer n. t - peak, whose rounding alone would cost 64 ulp at a distance
// of 80, is never computed: the constant that extracts n includes the peak's. 0.9 ulp. NaN has weight 0: its row's peak is NaN.
template <>
class Weights<Single> {
 public:
  Weights() = default;
  JITACT_INLINE explicit Weights(Single peak) {
    const float n = fmaf(peak.v, narrow::kLog2e, kWhole) - kWhole;
    whole_ = kWhole + (60.0f - n);
    least_ = (n - 184.0f) * 0.693147182f;  // where the weight is near the smallest normal number, and the share 0
  }
  JITACT_INLINE Single of(Single t) const {
    const Parts parts(*this, t);
    return parts.weight();
  }
  // Corrected for the rounding error of the weight.
  JITACT_INLINE Single over(Single sum, Single t) const {
    const Parts parts(*this, t);
    const float weight = parts.weight(), inverse = 1.0f / weight, rest = fmaf(parts.slope, parts.f, 1.0f - parts.power);
    const float near = sum.v * inverse, quotient = fmaf(fmaf(-near, weight, sum.v), inverse, near);
    return fmaf(-quotient, rest * single::rough_reciprocal(parts.power), quotient);
  }
  // An integer, as the peak affects n only.
  JITACT_INLINE Single exponent_to(const Weights& higher) const { return higher.whole_ - whole_; }
  static JITACT_INLINE Single power(Single exponent) {
    return single::from_bits(single::to_bits(single::at_least(exponent.v, -127.0f) + (kWhole + 127.0f)) << 23);
  }

 private:
  // 2^f is 1 + slope f, and the weight is 2^n times that; `shifted` has n in its lowest bits.
  struct Parts {
    float f, shifted, slope, power;
    JITACT_INLINE Parts(const Weights& weights, Single t) {
      const float x = single::raised_to(t.v, weights.least_);
      shifted = fmaf(x, narrow::kLog2e, weights.whole_);
      f = fmaf(x, 1.92596303e-8f, fmaf(x, narrow::kLog2e, -(shifted - weights.whole_)));
      slope = 1.532647148e-4f;
      slope = fmaf(slope, f, 1.339080743e-3f);
      slope = fmaf(slope, f, 9.618505836e-3f);
      slope = fmaf(slope, f, 5.550359935e-2f);
      slope = fmaf(slope, f, 2.402264774e-1f);
      slope = fmaf(slope, f, 6.931471825e-1f);
      power = fmaf(slope, f, 1.0f);
    }
    JITACT_INLINE float weight() const {
      return single::from_bits(single::to_bits(power) + (single::to_bits(shifted) << 23));
    }
  };
  static constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: adding it puts the rounded integer into the lowest bits
  float whole_, least_;
};

// t times 2^exponent, where 2^exponent may underflow.
template <typename T>
JITACT_INLINE T times_power(T t, T exponent) {
  const T high = max(exponent, T(-120));
  return t * Weights<T>::power(high) * Weights<T>::power(exponent - high);
}

// A sum of weights in several parts, each of which is summed over the row separately.
template <typename T>
struct Weighed {
  static constexpr int parts = 1;
  static constexpr float start = 0;
  static JITACT_INLINE void add(T* part, T weight) { part[0] += weight; }
  // Multiplies a sum, from which the start has been subtracted, by 2^exponent.
  static JITACT_INLINE void move(T* part, T exponent) { part[0] = times_power(part[0], exponent); }
};
// In float32 the first part starts with such a large value that it adds the high bits of each weight, exactly for thousands of
// weights; the second adds the low bits. Plain additions would cost a share some ulp.
template <>
struct Weighed<Single> {
  static constexpr int parts = 2;
  static constexpr float start = 0x1.8p72f;
  static JITACT_INLINE void add(Single* part, Single weight) {
    const Single before = part[0];
    part[0] += weight;
    part[1] += weight - (part[0] - before);
  }
  static JITACT_INLINE void move(Single* part, Single exponent) {
    const Single sum = times_power(part[0], exponent), high = (start + sum) - start;
    part[0] = high;
    part[1] = times_power(part[1], exponent) + (sum - high);
  }
};

// How the loops use a fold: the first of its parts starts at `start`, the others at 0; add() adds an element to them and
// returns what is kept of it, as kept() does; the constructor takes the parts, without the start, summed over the row.
// `invalid` is NaN if the peak is not finite, else 0. An `as_it_is` fold keeps the elements themselves; one that
// `counts` elements at the peak adds faster if told that an element is not one. If elements and peak are unscaled, add() gets
// them so, and the constructor the scale. Scaled elements may be up to `slack` above the peak used; move() rescales parts to a
// higher peak.
template <typename T>
class SumOfExp {
 public:
  static constexpr int parts = Weighed<T>::parts;
  static constexpr float start = Weighed<T>::start, slack = 3;
  static constexpr bool as_it_is = false, counts = false;

  static JITACT_INLINE T kept(const Weights<T>& weights, T t) { return weights.of(t); }
  template <bool may_be_peak = true>
  static JITACT_INLINE T add(T (&part)[parts], const Weights<T>& weights, T, T t) {
    const T weight = weights.of(t);
    Weighed<T>::add(part, weight);
    return weight;
  }
  static JITACT_INLINE void move(T (&part)[parts], const Weights<T>& from, T, const Weights<T>& to, T) {
    Weighed<T>::move(part, from.exponent_to(to));
  }
  SumOfExp() = default;
  JITACT_INLINE SumOfExp(T, T invalid, const Weights<T>&, const T (&part)[parts], T = 1) {
    const T sum = total(part) + invalid;
    inverse_ = 1 / sum;
    if constexpr (parts == 2) rest_ = fma(-sum, inverse_, 1) * inverse_ - (part[1] - (sum - part[0])) * inverse_ * inverse_;
  }

  // For kept weights that are relative to another peak and therefore larger: weight * power is that relative to the row's peak.
  JITACT_INLINE void divide_kept(T power) {
    inverse_ *= power;
    if constexpr (parts == 2) rest_ *= power;
  }

  // In effect rounded once in float32, as the inverse has two parts.
  JITACT_INLINE T share(T kept) const {
    if constexpr (parts == 2) return fma(kept, inverse_, kept * rest_);
    return kept * inverse_;
  }

 private:
  static JITACT_INLINE T total(const T* part) { return parts == 2 ? part[0] + part[1] : part[0]; }

  T inverse_, rest_;
};

// The sum of weights below the peak is separate: log_share of the peak is -log1p of it, which 1 + 2.1e-9 would lose in float32.
template <typename T>
class LogSumExp {
 public:
  static constexpr int weighed = Weighed<T>::parts, parts = weighed + 1;  // weights below the peak; count at it
  static constexpr float start = Weighed<T>::start, slack = 0;
  static constexpr bool as_it_is = true, counts = true;

  static JITACT_INLINE T kept(const Weights<T>&, T t) { return t; }
  template <bool may_be_peak = true>
  static JITACT_INLINE T add(T (&part)[parts], const Weights<T>& weights, T peak, T t) {
    T weight = weights.of(t);
    if constexpr (may_be_peak) {
      const T is_peak = t == peak ? T(1) : T(0);
      part[weighed] += is_peak;
      weight = fma(-weight, is_peak, weight);  // 0 for the peak; for ?: nvcc would emit a branch
    }
    Weighed<T>::add(part, weight);
    return t;
  }
  static JITACT_INLINE void move(T (&part)[parts], const Weights<T>& from, T peak, const Weights<T>& to, T higher) {
    if (peak == higher) return;
    T of_peak[weighed] = {part[weighed] * from.of(peak)};
    const T exponent = from.exponent_to(to);
    Weighed<T>::move(part, exponent), Weighed<T>::move(of_peak, exponent);
    for (int p = 0; p < weighed; p++) part[p] += of_peak[p];
    part[weighed] = 0;
  }
  LogSumExp() = default;
  JITACT_INLINE LogSumExp(T peak, T invalid, const Weights<T>& weights, const T (&part)[parts], T scale = 1)
      : peak_(scale * peak) {
    const T below = weighed == 2 ? part[0] + part[1] : part[0];
    tail_ = log1p(weights.over(below, peak) + (part[weighed] - 1)) + invalid;
  }

  // Adds back the peak, if the row was folded after subtracting it.
  JITACT_INLINE void move(T peak) { peak_ += peak; }

  JITACT_INLINE T log_share(T kept) const { return (kept - peak_) - tail_; }

 private:
  T peak_, tail_;
};

// The sums over a row of the terms of fold_from_output; if there are several, `of` has all.
template <typename T, int n = 1>
struct Sum : Sum<T> {
  T of[n];

  Sum() = default;
  JITACT_INLINE explicit Sum(const T (&totals)[n]) : Sum<T>({totals[0]}) {
    for (int k = 0; k < n; k++) of[k] = totals[k];
  }
};
template <typename T>
struct Sum<T, 1> {
  T total;

  Sum() = default;
  JITACT_INLINE explicit Sum(const T (&totals)[1]) : total(totals[0]) {}

  // Scales the exponential, which may underflow where the product does not, up and the total down, by 2^24 or (16 bits) 2^60.
  JITACT_INLINE T times_exp(T y) const {
    if constexpr (std::is_same_v<T, Single>) return T(single::exp_scaled(-y.v)) * (total * T(single::kUnscale));
    else return T(narrow::exp2(fmaf(y.v, narrow::kLog2e, 60.0f))) * (total * T(0x1p-60f));
  }
};

// How GPU threads add up terms of either sign, and then each other's sums: in float32 with compensation, as otherwise the
// rounding errors of these additions would be as large as all others of a gradient.
template <typename T>
struct Adding {
  static constexpr int parts = 1;
  static JITACT_INLINE void add(T* to, T t) { to[0] += t; }
  static JITACT_INLINE void join(T* to, const T* other) { to[0] += other[0]; }
  static JITACT_INLINE T total(const T* of) { return of[0]; }
};
template <>
struct Adding<Single> {
  static constexpr int parts = 2;
  static JITACT_INLINE void add(Single* to, Single t) {
    const Single sum = to[0] + t, added = sum - to[0];
    to[1] += (to[0] - (sum - added)) + (t - added);
    to[0] = sum;
  }
  static JITACT_INLINE void join(Single* to, const Single* other) {
    to[1] += other[1];  // first, so that both threads get the same result
    add(to, other[0]);
  }
  static JITACT_INLINE Single total(const Single* of) {
    const Single sum = of[0] + of[1];
    return sum == sum ? sum : of[0];  // of[1] is NaN if the sum is infinite
  }
};

}  // namespace jitact

using jitact::LogSumExp;
using jitact::Sum;
using jitact::SumOfExp;
