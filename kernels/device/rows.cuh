// What the file of an activation of rows may use beside elementwise.cuh. A row is the elements along the last dimension. Such
// a file defines
//
//   T fold(T x)                                         the term that an element adds to what its row folds to
//   T forward(T x, Fold<T> row)                         an element, given what its row folds to
//   T fold_from_output(T dy, T y)                       the term that an element adds in backward
//   T backward_from_output(T dy, T y, Sum<T> row)       the gradient by an element, given the sum of those terms
//
// where Fold is one of, for terms t,
//
//   SumOfExp<T>    .share(t): exp(t) / sum of exp(t)
//   LogSumExp<T>   .log_share(t): the logarithm of that, exact where the share is next to 1
//   Sum<T>         .total: the sum of t
//
// Where a term is NaN or +inf, or all are -inf, exponentials share NaN, as PyTorch's do.
#pragma once

#include "elementwise.cuh"

#define JITACT_ROWS

namespace jitact {

// exp(t - peak) for terms up to a peak, but for a factor that all have in common.
template <typename T>
struct Weights {
  T peak;

  // Where all terms are -inf the peak is held where it is finite: their weights are 0.
  JITACT_INLINE explicit Weights(T peak) : peak(max(peak, T(-0x1.fffffep127))) {}
  JITACT_INLINE T of(T t) const { return exp(t - peak); }
};

// exp(t) is 2^n exp(r) with n whole and |r| <= ln(2) / 2: the weight is 2^(n - m + 24) exp(r), where m is the n of the peak.
// So nothing is lost in t - peak, whose rounding alone would be 64 ulp at a distance of 80, and the factor of 2^24 keeps all
// bits of weights that are subnormal beside the peak's.
template <>
struct Weights<Single> {
  float peak, shift, low;
  uint32_t exponent;

  JITACT_INLINE explicit Weights(Single at) {
    peak = single::at_least(at.v, -single::kLargest);
    // Beyond 2^20, n would need more bits than there are. But there, t - peak is exact wherever the weight is not 0.
    shift = fabsf(peak) < 0x1p20f ? 0.0f : peak;
    const float shifted = fmaf(peak - shift, 1.44269502e+0f, 12582912.0f);
    low = (shifted - (12582912.0f + 151.0f)) * 0.693147182f;  // where the weight is 0
    exponent = ((127u + 24u) << 23) - (single::to_bits(shifted) << 23);
  }
  JITACT_INLINE Single of(Single t) const {
    const single::Reduced e = single::reduce(single::at_least(t.v - shift, low));
    return e.mantissa() * single::from_bits((e.n << 23) + exponent);
  }
};

// Divides by a sum and what rounding took from it. For Single with what rounding takes from the inverse too, so that only the
// quotient is rounded.
template <typename T>
struct Inverse {
  T v;
  JITACT_INLINE Inverse(T sum, T rest) : v(1 / (sum + rest)) {}
  JITACT_INLINE T times(T t) const { return t * v; }
};
template <>
struct Inverse<Single> {
  Single v, rest;
  JITACT_INLINE Inverse(Single sum, Single lost) : v(1 / sum), rest(fma(-lost, v, fma(-sum, v, 1)) * v) {}
  JITACT_INLINE Single times(Single t) const { return fma(t, v, t * rest); }
};

// A fold as the loops make it: from the peak of all terms, if it has one, and parts, which are sums over the terms, each with
// a rest that rounding took from it.
template <typename T>
class Sum {
 public:
  struct Weights {
    JITACT_INLINE explicit Weights(T) {}
  };
  static constexpr bool has_peak = false;
  static constexpr int parts = 1;

  T total;

  JITACT_INLINE Sum(T, const Weights&, const T* part, const T* rest) : total(part[0] + rest[0]) {}
  static JITACT_INLINE void add(T* part, const Weights&, T t) { part[0] += t; }
};

template <typename T>
class SumOfExp {
 public:
  using Weights = jitact::Weights<T>;
  static constexpr bool has_peak = true;
  static constexpr int parts = 1;

  JITACT_INLINE SumOfExp(T peak, const Weights& weights, const T* part, const T* rest)
      : weights_(weights), inverse_(part[0] + (peak - peak), rest[0]) {}  // NaN for an infinite peak
  static JITACT_INLINE void add(T* part, const Weights& weights, T t) { part[0] += weights.of(t); }

  JITACT_INLINE T share(T t) const { return inverse_.times(weights_.of(t)); }

 private:
  Weights weights_;
  Inverse<T> inverse_;
};

// The sum beside the peak is kept apart: log_share of the peak is -log1p of it, which float32 would lose in 1 + 2.1e-9.
template <typename T>
class LogSumExp {
 public:
  using Weights = jitact::Weights<T>;
  static constexpr bool has_peak = true;
  static constexpr int parts = 2;  // the sum of the weights below the peak; how many terms are the peak

  JITACT_INLINE LogSumExp(T peak, const Weights& weights, const T* part, const T* rest) : peak_(peak) {
    const T top = weights.of(weights.peak);
    tail_ = log1p((part[0] + rest[0] + (part[1] - 1) * top + (peak - peak)) / top);
  }
  static JITACT_INLINE void add(T* part, const Weights& weights, T t) {
    const bool top = t == weights.peak;
    const T weight = weights.of(t);
    part[0] += top ? T(0) : weight;
    part[1] += top ? T(1) : T(0);
  }

  JITACT_INLINE T log_share(T t) const { return (t - peak_) - tail_; }

 private:
  T peak_, tail_;
};

}  // namespace jitact

using jitact::LogSumExp;
using jitact::Sum;
using jitact::SumOfExp;
