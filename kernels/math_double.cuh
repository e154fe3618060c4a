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

// exp(x) = 2^n exp(r), with n whole, |r| <= ln(2) / 2 and exp(r) = 1 + r + r^2 q. x is within 2^20.
struct Reduced {
  double r, q;
  uint64_t n;  // in the lowest 12 bits
  JITACT_INLINE double times(double b) const { return ::fma(b * r, ::fma(r, q, 1.0), b); }
  // 2^(n + k), which must be from 2^-1022 to 2^1023.
  JITACT_INLINE double power(int k) const { return from_bits((n << 52) + (uint64_t(1023 + k) << 52)); }
};
JITACT_INLINE Reduced reduce(double x) {
  // Adding 1.5 * 2^52 leaves the rounded integer in the lowest bits of the sum.
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
  // 2^n in two factors, so that neither end of the range is lost.
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

// (1 - e) / (1 + e) with e = exp(-2 |x|). 3.2 ulp, and less where the slope, 1 - y^2, is small.
JITACT_INLINE double tanh(double x) {
  const double a = fabs(x), held = a > 20.0 ? 20.0 : a;
  const Reduced e = reduce(-2.0 * held);
  const double power = e.power(0), m = ::fma(power, ::fma(e.r * e.r, e.q, e.r), power - 1.0), r = reciprocal(2.0 + m);
  const double y = a > 0.5 ? ::fma(-2.0 * e.times(power), r, 1.0) : -m * r;
  return copysign(a < 0x1p-30 ? a : y, x);
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

// exp(-t^2 / 2) = 2^n exp(-r / 2), likewise, for |t| up to 40.
struct Bell {
  double r, q;
  uint64_t n;
  JITACT_INLINE double times(double b) const { return ::fma(b * r, ::fma(r, q, -0.5), b); }
  // 2^n, scaled by 2^100: what it is multiplied with is scaled by 2^-100, so that no bits are lost.
  JITACT_INLINE double power() const { return from_bits((n << 52) + (uint64_t(1023 + 100) << 52)); }
};
JITACT_INLINE Bell bell(double t) {
  const double s = t * t, shifted = ::fma(s, -0.7213475204444817, 6755399441055744.0), n = shifted - 6755399441055744.0;
  const double r = ::fma(n, 1.3862943611198906, s) + ::fma(n, 4.638093627692599e-17, ::fma(t, t, -s));
  double q = -1.2256047605229649e-11;
  q = ::fma(q, r, 2.6972742622470455e-10);
  q = ::fma(q, r, -5.3822789960931766e-09);
  q = ::fma(q, r, 9.688094256232178e-08);
  q = ::fma(q, r, -1.5500992080510639e-06);
  q = ::fma(q, r, 2.1701388933146432e-05);
  q = ::fma(q, r, -0.0002604166666665644);
  q = ::fma(q, r, 0.002604166666664008);
  q = ::fma(q, r, -0.020833333333333336);
  q = ::fma(q, r, 0.12500000000000003);
  return {r, q, to_bits(shifted)};
}

// Q(t) = P(N > t) = exp(-t^2 / 2) r p for a standard normal N and t >= 0, with r = 1 / (t + 5), and for p a polynomial in
// w = (t - 5) / (t + 5) (after M. Shepherd and J. Laframboise, 1981), scaled by 2^-100. 0 from t = 38.6, where t is held.
// 8 ulp.
struct Tail {
  Bell bell;
  double t, p, r;
};
JITACT_INLINE Tail tail(double x) {
  const double t = x > 38.7 ? 38.7 : x, r = reciprocal(t + 5.0), w = ::fma(-10.0, r, 1.0);
  double p = -1.1987844400470329e-40;
  p = ::fma(p, w, 1.3987562062347546e-39);
  p = ::fma(p, w, 6.044719871475848e-39);
  p = ::fma(p, w, -7.388269202007001e-39);
  p = ::fma(p, w, -5.20434221117951e-38);
  p = ::fma(p, w, 3.339267796806821e-38);
  p = ::fma(p, w, 3.417275529515393e-37);
  p = ::fma(p, w, -2.655664163879175e-37);
  p = ::fma(p, w, -2.184596505759669e-36);
  p = ::fma(p, w, 3.140384701504832e-36);
  p = ::fma(p, w, 1.3159170372287623e-35);
  p = ::fma(p, w, -3.925593934217345e-35);
  p = ::fma(p, w, -4.6839193959516414e-35);
  p = ::fma(p, w, 4.298495693610712e-34);
  p = ::fma(p, w, -6.2940797538182945e-34);
  p = ::fma(p, w, -2.3613579088088957e-33);
  p = ::fma(p, w, 1.6404415219838303e-32);
  p = ::fma(p, w, -5.452499189750816e-32);
  p = ::fma(p, w, 1.3017811543707477e-31);
  p = ::fma(p, w, -2.4733404978852645e-31);
  p = ::fma(p, w, 3.907272365751264e-31);
  p = ::fma(p, w, -5.248942435480727e-31);
  p = ::fma(p, w, 6.0678632551554545e-31);
  return {bell(t), t, p, r};
}

JITACT_INLINE double normal_tail(double x) {
  const Tail q = tail(x);
  return q.bell.times(q.r) * q.bell.power() * q.p;
}
JITACT_INLINE double times_normal_tail(double x) {
  const Tail q = tail(x);
  return q.bell.times(q.t * q.r) * q.bell.power() * q.p;
}
JITACT_INLINE double normal_cdf(double x) {
  const double y = normal_tail(fabs(x));
  return x < 0 ? y : 1.0 - y;
}
JITACT_INLINE double normal_pdf(double x) {
  const double t = fabs(x) > 38.7 ? 38.7 : fabs(x);
  const Bell e = bell(t);
  return e.times(0.3989422804014327) * e.power() * 0x1p-100;
}

}  // namespace jitact::wide
