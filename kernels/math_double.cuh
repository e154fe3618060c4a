// Functions of Double, as double -> double, where the platform's are slow: these have no branch, no table and no call, and
// the CPU's compiler vectorises them. Polynomials are interpolated at Chebyshev's points. Worst errors, in ulp, were found
// on a million random arguments.
#pragma once

#include "number.cuh"

namespace jitact::wide {

JITACT_INLINE double from_bits(uint64_t u) {
#ifdef __CUDA_ARCH__
  return __longlong_as_double(int64_t(u));
#else
  double d;
  std::memcpy(&d, &u, 8);
  return d;
#endif
}

JITACT_INLINE uint64_t to_bits(double d) {
#ifdef __CUDA_ARCH__
  return uint64_t(__double_as_longlong(d));
#else
  uint64_t u;
  std::memcpy(&u, &d, 8);
  return u;
#endif
}

// 1 / b for 2^-1000 <= |b| <= 2^1000.
JITACT_INLINE double reciprocal(double b) {
#ifdef __CUDA_ARCH__
  double r;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(b));  // 20 bits
  const double e = ::fma(-r, b, 1.0);
  return ::fma(r, ::fma(e, e, e), r);
#else
  return 1.0 / b;
#endif
}

// exp(x + low) = 2^n exp(r), with n whole, |r| <= ln(2) / 2 and exp(r) = 1 + r + r^2 q. x is within 2^20, low tiny.
struct Reduced {
  double r, q;
  uint64_t n;  // in the lowest 12 bits
  JITACT_INLINE double times(double b) const { return ::fma(b * r, ::fma(r, q, 1.0), b); }
  // 2^(n + k), which must be from 2^-1022 to 2^1023.
  JITACT_INLINE double power(int k) const { return from_bits((n << 52) + (uint64_t(1023 + k) << 52)); }
};
JITACT_INLINE Reduced reduce(double x, double low = -0.0) {
  // Adding 1.5 * 2^52 leaves the rounded integer in the lowest bits of the sum.
  const double shifted = ::fma(x, 1.4426950408889634, 6755399441055744.0), n = shifted - 6755399441055744.0;
  const double r = ::fma(n, -2.3190468138462996e-17, ::fma(n, -0.6931471805599453, x)) + low;
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
  const double held = x < -746.0 ? -746.0 : x > 710.0 ? 710.0 : x;
  const Reduced e = reduce(held);
  // 2^n in two factors, so that neither end of the range is lost.
  return held < 0 ? e.times(e.power(64)) * 0x1p-64 : e.times(e.power(-1)) * 2.0;
}

// 2.2 ulp.
JITACT_INLINE double expm1(double x) {
  const double held = x < -40.0 ? -40.0 : x > 710.0 ? 710.0 : x;
  const Reduced e = reduce(held);
  const double half_power = e.power(-1), y = 2.0 * ::fma(half_power, ::fma(e.r * e.r, e.q, e.r), half_power - 0.5);
  return fabs(x) < 0x1p-54 ? x : y;
}

// 3.2 ulp.
JITACT_INLINE double tanh(double x) {
  const double m = expm1(-2.0 * fabs(x));
  return copysign(m * reciprocal(2.0 + m), x);
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

// Q(t) = P(N > t) = exp(-t^2 / 2) r p for a standard normal N and t >= 0, with r = 1 / (t + 5), and for p a polynomial in
// w = (t - 5) / (t + 5) (after M. Shepherd and J. Laframboise, 1981). 0 from t = 38.6, where t is held. The exponential is
// scaled by 2^100, so that no bits are lost. 8 ulp.
struct Tail {
  Reduced bell;
  double t, p, r;
  JITACT_INLINE double times(double b) const { return bell.times(b) * bell.power(100) * 0x1p-100; }
};
JITACT_INLINE Tail tail(double x) {
  const double t = x > 38.7 ? 38.7 : x, r = reciprocal(t + 5.0), w = ::fma(-10.0, r, 1.0), s = t * t;
  double p = -1.519639814969883e-10;
  p = ::fma(p, w, 1.7731341444064477e-09);
  p = ::fma(p, w, 7.662592773287865e-09);
  p = ::fma(p, w, -9.365743888571916e-09);
  p = ::fma(p, w, -6.597287527794816e-08);
  p = ::fma(p, w, 4.233024826944964e-08);
  p = ::fma(p, w, 4.3319113761354283e-07);
  p = ::fma(p, w, -3.366454271346035e-07);
  p = ::fma(p, w, -2.769305071782737e-06);
  p = ::fma(p, w, 3.980910551810149e-06);
  p = ::fma(p, w, 1.6681230220935938e-05);
  p = ::fma(p, w, -4.9762815069629136e-05);
  p = ::fma(p, w, -5.937573233698744e-05);
  p = ::fma(p, w, 0.0005448990646084079);
  p = ::fma(p, w, -0.0007978693977812107);
  p = ::fma(p, w, -0.002993376770455273);
  p = ::fma(p, w, 0.020795066799821127);
  p = ::fma(p, w, -0.06911863870631556);
  p = ::fma(p, w, 0.16502036617038757);
  p = ::fma(p, w, -0.3135331566713043);
  p = ::fma(p, w, 0.49530561596997635);
  p = ::fma(p, w, -0.6653825028900567);
  p = ::fma(p, w, 0.769193049750063);
  return {reduce(-0.5 * s, -0.5 * ::fma(t, t, -s)), t, p, r};
}

JITACT_INLINE double normal_tail(double x) {
  const Tail q = tail(x);
  return q.times(q.r * q.p);
}
JITACT_INLINE double times_normal_tail(double x) {
  const Tail q = tail(x);
  return q.times(q.t * q.r * q.p);
}
JITACT_INLINE double normal_cdf(double x) {
  const double y = normal_tail(fabs(x));
  return x < 0 ? y : 1.0 - y;
}
JITACT_INLINE double normal_pdf(double x) { return tail(fabs(x)).times(0.3989422804014327); }

}  // namespace jitact::wide
