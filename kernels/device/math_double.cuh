// Functions of Double, as double -> double, where the platform's are slow: these have no branch, no table and no call, so
// the CPU's compiler vectorises them. Polynomials and rational functions interpolate at Chebyshev points. Errors given are
// the largest, in ulp, of a million random arguments.
#pragma once

#include "number.cuh"

namespace jitact::wide {

JITACT_INLINE double from_bits(uint64_t u) { return bit_cast<double>(u); }
JITACT_INLINE uint64_t to_bits(double d) { return bit_cast<uint64_t>(d); }

// 1 / b for 2^-1000 <= |b| <= 2^1000.
JITACT_INLINE double reciprocal(double b) {
#ifdef __CUDA_ARCH__
  const double r = ptx::reciprocal(b);
  const double e = ::fma(-r, b, 1.0);
  return ::fma(r, ::fma(e, e, e), r);
#else
  return 1.0 / b;
#endif
}

constexpr double kLargest = 0x1.fffffffffffffp1023;

// 1 / p, clamped to finite values. On a CPU without ?:, for the same reason as single::held.
JITACT_INLINE double one_over(double p) {
#ifdef __CUDA_ARCH__
  return clamp(1 / Double(p), -kLargest, kLargest).v;
#else
  const uint64_t bits = to_bits(1 / p);
  return from_bits(bits - uint64_t(bits << 1 == uint64_t(0x7ff) << 53));
#endif
}
JITACT_INLINE double root_of(double p) { return ::sqrt(p); }

#ifdef JITACT_LIBMVEC
// The platform's. Of |x|, by bits, as of sin and cos of the same x gcc would make a call of sincos, which it does not vectorise.
JITACT_INLINE double cos(double x) { return ::cos(from_bits(to_bits(x) << 1 >> 1)); }
#endif

// exp(x) = 2^n exp(r) with integer n, |r| <= ln(2) / 2 and exp(r) = 1 + r + r^2 q. |x| is at most 2^20.
struct Reduced {
  double r, q;
  uint64_t n;  // in the lowest 12 bits
  JITACT_INLINE double times(double b) const { return ::fma(b * r, ::fma(r, q, 1.0), b); }
  // 2^(n + k), which must be from 2^-1022 to 2^1023.
  JITACT_INLINE double power(int k) const { return from_bits((n << 52) + (uint64_t(1023 + k) << 52)); }
};
JITACT_INLINE Reduced reduce(double x) {
  // Adding 1.5 * 2^52 puts the rounded integer into the lowest bits of the sum.
  const double shifted = ::fma(x, 1.4426950408889634, 6755399441055744.0), n = shifted - 6755399441055744.0;
  const double r = ::fma(n, -2.3190468138462996e-17, ::fma(n, -0.6931471805599453, x));
  double q = 2.510038549551032e-08;
  q = ::fma(q, r, 2.7620088445409746e-07);
  q = ::fma(q, r, 2.7557268459997064e-06);
  q = ::fma(q, r, 2.4801521295954376e-05);
  q = ::fma(q, r, 0.00019841269863053618);
  q = ::fma(q, r, 0.0013888888917213717);
  q = ::fma(q, r, 0.008333333333330062);
  q = ::fma(q, r, 0.04166666666662413);
  q = ::fma(q, r, 0.16666666666666669);
  q = ::fma(q, r, 0.5000000000000001);
  return {r, q, to_bits(shifted)};
}

// 0.91 ulp.
JITACT_INLINE double exp(double x) {
#ifdef __CUDA_ARCH__
  return ::exp(x);  // faster there
#else
  const double held = x < -746.0 ? -746.0 : x > 710.0 ? 710.0 : x;
  const Reduced e = reduce(held);
  // 2^n in two factors, so that it neither overflows nor underflows early.
  const bool down = held < 0;
  return e.times(e.power(down ? 64 : -1)) * (down ? 0x1p-64 : 2.0);
#endif
}

// 2.2 ulp.
JITACT_INLINE double expm1(double x) {
  const double held = x < -40.0 ? -40.0 : x > 710.0 ? 710.0 : x;
  const Reduced e = reduce(held);
  const double half_power = e.power(-1), y = 2.0 * ::fma(half_power, ::fma(e.r * e.r, e.q, e.r), half_power - 0.5);
  return fabs(x) < 0x1p-54 ? x : y;
}

// Of tanh: e = exp(-2 a), e - 1, and 1 / (1 + e), for a >= 0. e is at least exp(-708).
struct Falling { double e, below, r; };
JITACT_INLINE Falling falling(double a) {
  const Reduced e = reduce(-2.0 * (a > 354.0 ? 354.0 : a));
  const double power = e.power(0), below = ::fma(power, ::fma(e.r * e.r, e.q, e.r), power - 1.0);
  return {e.times(power), below, reciprocal(2.0 + below)};
}

// (1 - e) / (1 + e). 3.2 ulp, and less where the slope is small.
JITACT_INLINE double tanh(double x) {
  const double a = magnitude(x);
  const Falling f = falling(a);
  const double y = a > 0.5 ? ::fma(-2.0 * f.e, f.r, 1.0) : -f.below * f.r;
  return copysign(a < 0x1p-30 ? a : y, x);
}
JITACT_INLINE double tanh_beside_slope(double x) { return tanh(x); }
// With c = 1 - tanh(|x|) it is c (2 - c).
JITACT_INLINE double tanh_slope(double x) {
  const double a = magnitude(x);
  const Falling f = falling(a);
  const double c = 2.0 * f.e * f.r;
  return a > 354.0 ? 0.0 : c * (2.0 - c);
}

// log(1 + x) = 2 atanh(s) with s = x / (2 + x), for 0 <= x <= 1. 2.5 ulp.
JITACT_INLINE double log1p_unit(double x) {
  const double s = x * reciprocal(2.0 + x), u = s * s;
  double p = 0.08082022805971766;
  p = ::fma(p, u, 0.04400369243072337);
  p = ::fma(p, u, 0.06000536404795356);
  p = ::fma(p, u, 0.06657072104827468);
  p = ::fma(p, u, 0.07692785032479312);
  p = ::fma(p, u, 0.09090894718066429);
  p = ::fma(p, u, 0.11111111358713932);
  p = ::fma(p, u, 0.1428571428355438);
  p = ::fma(p, u, 0.20000000000007292);
  p = ::fma(p, u, 0.3333333333333333);
  return 2.0 * ::fma(s * u, p, s);
}

// 2^100 exp(-t^2 / 2 - kMissing t^2) for |t| up to 40; callers correct for kMissing. With integer n and |r| <= ln(2),
//   exp(-t^2 / 2) = 2^n exp(-r / 2), r = t^2 + n 2 ln(2)
// 2 ln(2) is given with 42 bits, so that only r is rounded. Its error changes r by a multiple of r, which the
// coefficients include, and by a multiple of t^2, which is kMissing.
constexpr double kMissing = 3.9659131371402376e-14;
JITACT_INLINE double bell(double t) {
  const double shifted = ::fma(t * t, -0.7213475204444817, 6755399441055744.0);
  const double r = ::fma(t, t, ::fma(shifted, 1.3862943611197807, -9364972152247296.0));
  double e = -1.5542367649549089e+19;
  e = ::fma(e, r, 3.420756967279255e+20);
  e = ::fma(e, r, -6.822842373311677e+21);
  e = ::fma(e, r, 1.2281100744752673e+23);
  e = ::fma(e, r, -1.964984194176532e+24);
  e = ::fma(e, r, 2.750977877650267e+25);
  e = ::fma(e, r, -3.3011734380902125e+26);
  e = ::fma(e, r, 3.3011734380812355e+27);
  e = ::fma(e, r, -2.6409387504761085e+28);
  e = ::fma(e, r, 1.584563250285544e+29);
  e = ::fma(e, r, -6.33825300114165e+29);
  e = ::fma(e, r, 1.2676506002282294e+30);
  return from_bits(to_bits(e) + (to_bits(shifted) << 52));
}

// Q(t) = P(N > t) = bell(t) p / q for a standard normal N and t = |x|, with polynomials p and q of positive coefficients in t.
// q is scaled by 2^100, which keeps precision where Q(t) is subnormal. t is clamped; 0 from t = 38.6. 7.7 ulp.
constexpr double kTailEnd = 38.7;
JITACT_INLINE double held(double x) {
  const double t = magnitude(x);
  return t > kTailEnd ? kTailEnd : t;
}
struct Tail {
  double t, bell, p, inverse_q;
};
JITACT_INLINE Tail tail(double x) {
  const double t = held(x);
  double p = 7.180257644236436e-18;
  p = ::fma(p, t, 6.701471456238554e-07);
  p = ::fma(p, t, 2.084706979877297e-05);
  p = ::fma(p, t, 0.00030658929418549054);
  p = ::fma(p, t, 0.002798331318211107);
  p = ::fma(p, t, 0.017457717133505808);
  p = ::fma(p, t, 0.07725154192169734);
  p = ::fma(p, t, 0.24318517086760275);
  p = ::fma(p, t, 0.5285884515226079);
  p = ::fma(p, t, 0.7290021277886592);
  p = ::fma(p, t, 0.5);
  double q = 2.129411882333767e+24;
  q = ::fma(q, t, 6.624216530498032e+25);
  q = ::fma(q, t, 9.763257417428274e+26);
  q = ::fma(q, t, 8.958020411372059e+27);
  q = ::fma(q, t, 5.644234239612819e+28);
  q = ::fma(q, t, 2.542281939611272e+29);
  q = ::fma(q, t, 8.262747790661638e+29);
  q = ::fma(q, t, 1.9079329666388108e+30);
  q = ::fma(q, t, 2.987999208633564e+30);
  q = ::fma(q, t, 2.8596788121325094e+30);
  q = ::fma(q, t, 1.2676506002282294e+30);
  return {t, bell(t), p, reciprocal(q)};
}

JITACT_INLINE double normal_tail(double x) {
  const Tail q = tail(x);
  return q.bell * q.p * q.inverse_q;
}
JITACT_INLINE double times_normal_tail(double x) {
  const Tail q = tail(x);
  return q.bell * (q.t * q.p) * q.inverse_q;
}
JITACT_INLINE double normal_cdf(double x) {
  const double y = normal_tail(x);
  return x < 0 ? y : 1.0 - y;
}
// 2.5 ulp.
JITACT_INLINE double normal_pdf(double x) {
  constexpr double factor = 0.3989422804014327 * 0x1p-100;  // 1 / sqrt(2 pi), and bell's scale
  const double t = held(x);
  return bell(t) * ::fma(t * t, kMissing * factor, factor);
}
JITACT_INLINE double times_normal_tail_slope(double x) { return normal_tail(x) - held(x) * normal_pdf(x); }

}  // namespace jitact::wide
