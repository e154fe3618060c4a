// The functions for kernel files, for each T: correct over the whole range of T (NaN, infinities, -0 included), free of
// branches so that the host compiler vectorises them, and as accurate as T's storage type needs.
//
//   Double   math_double.cuh, and the platform's library: a few ulp of float64
//   Single   math_single.cuh: a few ulp of float32
//   Narrow   math_narrow.cuh: relative error below 2e-5, a hundredth of an ulp of bfloat16
//   Dual<T>  math_dual.cuh: the chain rule
//
// In addition to the functions of C's <math.h> (those that the three headers lack are the platform's: on a CPU calls, which are
// vectorised where the loader finds vectors of them, see math_libmvec.h):
//
//   sigmoid(x)                 1 / (1 + exp(-x))
//   softplus(x)                log(1 + exp(x)), without overflow
//   sincos(x, low)             sin and cos of x + low: const auto [s, c] = sincos(x)
//   decay(x)                   exp(-x) for x >= 0, in fewer instructions than exp takes
//   log1p_unit(x)              log(1 + x) for 0 <= x <= 1, in fewer instructions than log1p
//   normal_pdf(x)              exp(-x^2 / 2) / sqrt(2 pi)
//   exp_minus_square(x)        exp(-x^2), without the rounding error of x^2
//   normal_cdf(x)              P(N < x) for a standard normal N
//   normal_cdf(x, mu, sigma)   P(mu + sigma N < x) for sigma > 0
//   normal_tail(x)             P(N > x) for x >= 0
//   times_normal_tail(x)       x P(N > x) for x >= 0, 0 at inf; times_normal_tail_slope(x) is its derivative
//   times_sigmoid(a, x)        a sigmoid(x)
//   times_sigmoid(a, left, t, low)   the same of x = t + low >= 0, or, if left, of -x
//   x_times_sigmoid(x, a)      x sigmoid(a x) for a > 0, -0 at -inf; x_times_sigmoid_slope(x, a) is its derivative by x
//   x_times_sigmoid(x, t, w, low)   x sigmoid(ln(2) x (w + low)) for w > 0; t is |x|, or less where the result is 0 or x anyway
//   times_tanh_softplus(a, x)  a tanh(softplus(x))
//   x_minus_tanh(x)            x - tanh(x), without the cancellation
//   tanh_slope(x)              1 - tanh(x)^2, without the cancellation
//   tanh_beside_slope(x)       tanh(x), in fewer instructions where tanh_slope(x) is computed too, and closer near 0 in float32
//   x_plus_sin_squared(x, a)   x + sin(a x)^2 / a, and x at infinite x; x_plus_sin_squared_slope(x, a) is 1 + sin(2 a x)
//   rsqrt(x)                   1 / sqrt(x)
//   reciprocal(x)              1 / x for |x| from 2^-126 to 2^126, without the slow path that the GPU's division has
//   one_over(p), root_of(p)    1 / p and sqrt(p) for a parameter p, correctly rounded; 1 / p is clamped to finite values
//   square_root(x)             sqrt(x) for 0, and from 2^-126 to inf, without the slow path of the GPU's square root
//   select(condition, a, b)    condition ? a : b with both computed, where ?: would be a branch on the GPU
//   rest(T(c), c)              c - T(c) for a literal c: its rounding error
//   folded(x), right_part(x)   |x| and max(x, -0), with derivative 1 at 0: for smooth functions that are computed in two halves
//                              by x < 0, all derivatives are correct at 0
//
// The times_ functions are accurate also where the factor of a alone would underflow; there, |a| must be at most 2^100.
// `low`, which is optional, is the rounding error of a finite x: it matters where the function falls steeply.
//
// With JITACT_FAST_MATH, Single uses Narrow's functions, with relative errors up to 3e-5. In unfused builds, Narrow and Brain
// use Single's, so that results round as PyTorch's do.
#pragma once

#ifdef JITACT_LIBMVEC
#include "math_libmvec.h"
#endif
#include "math_double.cuh"
#include "math_narrow.cuh"
#include "math_sine.cuh"
#include "math_single.cuh"
#include "number.cuh"

namespace jitact {

#ifdef JITACT_FAST_MATH
namespace for_single = narrow;
#else
namespace for_single = single;
#endif
#ifdef JITACT_UNFUSED
namespace for_narrow = single;
#else
namespace for_narrow = narrow;
#endif

#define JITACT_OWN(name)                                                   \
  JITACT_INLINE Single name(Single x) { return for_single::name(x.v); }    \
  JITACT_INLINE Narrow name(Narrow x) { return for_narrow::name(x.v); }    \
  JITACT_BRAIN(JITACT_INLINE Brain name(Brain x) { return for_narrow::name(x.v); })
#define JITACT_OWN_2(name)                                                              \
  JITACT_INLINE Single name(Single a, Single b) { return for_single::name(a.v, b.v); } \
  JITACT_INLINE Narrow name(Narrow a, Narrow b) { return for_narrow::name(a.v, b.v); } \
  JITACT_BRAIN(JITACT_INLINE Brain name(Brain a, Brain b) { return for_narrow::name(a.v, b.v); })
#define JITACT_OWN_4(name)                                                                                                    \
  JITACT_INLINE Single name(Single a, Single b, Single c, Single d) { return for_single::name(a.v, b.v, c.v, d.v); }       \
  JITACT_INLINE Narrow name(Narrow a, Narrow b, Narrow c, Narrow d) { return for_narrow::name(a.v, b.v, c.v, d.v); }       \
  JITACT_BRAIN(JITACT_INLINE Brain name(Brain a, Brain b, Brain c, Brain d) { return for_narrow::name(a.v, b.v, c.v, d.v); })
#define JITACT_WIDE(name) \
  JITACT_INLINE Double name(Double x) { return wide::name(x.v); }
#define JITACT_PLATFORM_DOUBLE(name) \
  JITACT_INLINE Double name(Double x) { return ::name(x.v); }
#define JITACT_PLATFORM(name)                                     \
  JITACT_PLATFORM_DOUBLE(name)                                    \
  JITACT_INLINE Single name(Single x) { return ::name##f(x.v); }  \
  JITACT_INLINE Narrow name(Narrow x) { return ::name##f(x.v); }  \
  JITACT_BRAIN(JITACT_INLINE Brain name(Brain x) { return ::name##f(x.v); })
#define JITACT_PLATFORM_2(name)                                                     \
  JITACT_INLINE Double name(Double a, Double b) { return ::name(a.v, b.v); }        \
  JITACT_INLINE Single name(Single a, Single b) { return ::name##f(a.v, b.v); }     \
  JITACT_INLINE Narrow name(Narrow a, Narrow b) { return ::name##f(a.v, b.v); }     \
  JITACT_BRAIN(JITACT_INLINE Brain name(Brain a, Brain b) { return ::name##f(a.v, b.v); })

JITACT_OWN(exp)    JITACT_WIDE(exp)
JITACT_OWN(expm1)  JITACT_WIDE(expm1)
JITACT_OWN(log)    JITACT_PLATFORM_DOUBLE(log)
JITACT_OWN(log1p)  JITACT_PLATFORM_DOUBLE(log1p)
JITACT_OWN(tanh)   JITACT_WIDE(tanh)
JITACT_OWN(erf)    JITACT_PLATFORM_DOUBLE(erf)
JITACT_OWN(erfc)   JITACT_PLATFORM_DOUBLE(erfc)
JITACT_OWN(sin)    JITACT_PLATFORM_DOUBLE(sin)
#ifdef JITACT_LIBMVEC
JITACT_OWN(cos)    JITACT_WIDE(cos)
#else
JITACT_OWN(cos)    JITACT_PLATFORM_DOUBLE(cos)
#endif
JITACT_INLINE Double sqrt(Double x) { return ::sqrt(x.v); }
JITACT_INLINE Double square_root(Double x) { return sqrt(x); }
JITACT_INLINE Single sqrt(Single x) { return ::sqrtf(x.v); }
#ifdef JITACT_UNFUSED
JITACT_INLINE Narrow sqrt(Narrow x) { return ::sqrtf(x.v); }
JITACT_INLINE Brain sqrt(Brain x) { return ::sqrtf(x.v); }
JITACT_INLINE Brain square_root(Brain x) { return sqrt(x); }
#else
JITACT_INLINE Narrow sqrt(Narrow x) { return narrow::sqrt(x.v); }
#endif
JITACT_INLINE Single square_root(Single x) { return single::square_root(x.v); }
JITACT_INLINE Narrow square_root(Narrow x) { return sqrt(x); }
JITACT_OWN(sigmoid)
JITACT_OWN(softplus)
JITACT_OWN(decay)
JITACT_OWN(log1p_unit)               JITACT_WIDE(log1p_unit)
JITACT_OWN(reciprocal)
JITACT_OWN(one_over)                 JITACT_WIDE(one_over)
JITACT_OWN(root_of)                  JITACT_WIDE(root_of)
JITACT_OWN(normal_pdf)               JITACT_WIDE(normal_pdf)
JITACT_OWN(normal_cdf)               JITACT_WIDE(normal_cdf)
JITACT_OWN(normal_tail)              JITACT_WIDE(normal_tail)
JITACT_OWN(times_normal_tail)        JITACT_WIDE(times_normal_tail)
JITACT_OWN(times_normal_tail_slope)  JITACT_WIDE(times_normal_tail_slope)
JITACT_OWN(x_minus_tanh)
JITACT_OWN(tanh_slope)               JITACT_WIDE(tanh_slope)
JITACT_OWN(tanh_beside_slope)        JITACT_WIDE(tanh_beside_slope)

JITACT_PLATFORM(exp2)
JITACT_PLATFORM(log2)
JITACT_PLATFORM(log10)
JITACT_PLATFORM(cbrt)
JITACT_PLATFORM(tan)
JITACT_PLATFORM(asin)
JITACT_PLATFORM(acos)
JITACT_PLATFORM(atan)
JITACT_PLATFORM(sinh)
JITACT_PLATFORM(cosh)
JITACT_PLATFORM(asinh)
JITACT_PLATFORM(acosh)
JITACT_PLATFORM(atanh)
JITACT_PLATFORM(floor)
JITACT_PLATFORM(ceil)
JITACT_PLATFORM(trunc)
JITACT_PLATFORM(round)
JITACT_PLATFORM(rint)
JITACT_PLATFORM_2(pow)
// The power by a literal. Small ones are products, as in PyTorch: the platform's function is slow, most of all for negative x.
template <typename T>
JITACT_INLINE T whole_power(T x, int n) { return n == 3 ? x * x * x : n == 4 ? x * x * (x * x) : pow(x, T(n)); }
template <typename V, Accuracy accuracy, typename N, typename = std::enable_if_t<std::is_same_v<N, int>>>
JITACT_INLINE Real<V, accuracy> pow(Real<V, accuracy> x, N n) { return whole_power(x, n); }
JITACT_PLATFORM_2(fmod)
JITACT_PLATFORM_2(atan2)
JITACT_PLATFORM_2(hypot)

template <typename V, Accuracy accuracy>
JITACT_INLINE Real<V, accuracy> rest(Real<V, accuracy> rounded, double x) { return x - double(rounded.v); }

template <typename V, Accuracy accuracy>
JITACT_INLINE Real<V, accuracy> exp_minus_square(Real<V, accuracy> x) {
  const Real<V, accuracy> t = min(abs(x), 28), s = t * t, e = exp(-s);  // 0 from 27.3 on
  return fma(-fma(t, t, -s), e, e);
}

JITACT_OWN_2(times_sigmoid)
JITACT_OWN_2(times_tanh_softplus)
JITACT_OWN_2(x_times_sigmoid)
JITACT_OWN_2(x_times_sigmoid_slope)
JITACT_OWN_2(x_plus_sin_squared)
JITACT_OWN_2(x_plus_sin_squared_slope)
// For a literal a; in float32 with its rounding error.
JITACT_INLINE Single x_times_sigmoid(Single x, double a) {
  return for_single::x_times_sigmoid(x.v, float(a), rest(Single(a), a).v);
}
JITACT_INLINE Narrow x_times_sigmoid(Narrow x, double a) { return for_narrow::x_times_sigmoid(x.v, float(a)); }
JITACT_BRAIN(JITACT_INLINE Brain x_times_sigmoid(Brain x, double a) { return for_narrow::x_times_sigmoid(x.v, float(a)); })
JITACT_INLINE Single times_sigmoid(Single a, bool left, Single t, Single low) {
  return for_single::times_sigmoid(a.v, left, t.v, low.v);
}
JITACT_OWN_4(x_times_sigmoid)
JITACT_INLINE Single normal_cdf(Single x, Single mu, Single sigma) { return for_single::normal_cdf(x.v, mu.v, sigma.v); }
JITACT_INLINE Narrow normal_cdf(Narrow x, Narrow mu, Narrow sigma) { return for_narrow::normal_cdf(x.v, mu.v, sigma.v); }
JITACT_INLINE Narrow times_sigmoid(Narrow a, bool left, Narrow t, Narrow low) {
  return for_narrow::times_sigmoid(a.v, left, t.v, low.v);
}
JITACT_BRAIN(
    JITACT_INLINE Brain normal_cdf(Brain x, Brain mu, Brain sigma) { return for_narrow::normal_cdf(x.v, mu.v, sigma.v); }
    JITACT_INLINE Brain times_sigmoid(Brain a, bool left, Brain t, Brain low) {
      return for_narrow::times_sigmoid(a.v, left, t.v, low.v);
    })

JITACT_INLINE Double select(bool condition, Double a, Double b) { return condition ? a.v : b.v; }
JITACT_INLINE Single select(bool condition, Single a, Single b) { return condition ? a.v : b.v; }
JITACT_INLINE Narrow select(bool condition, Narrow a, Narrow b) { return condition ? a.v : b.v; }
JITACT_BRAIN(JITACT_INLINE Brain select(bool condition, Brain a, Brain b) { return condition ? a.v : b.v; })
JITACT_INLINE Double reciprocal(Double x) { return wide::reciprocal(x.v); }
template <typename T> struct SinCos { T sin, cos; };
JITACT_INLINE SinCos<Double> sincos(Double x, Double = 0) { return {sin(x), cos(x)}; }
template <Accuracy accuracy>
JITACT_INLINE SinCos<Real<float, accuracy>> sincos(Real<float, accuracy> x) {
  const single::SinCos y = single::sincos(x.v);
  return {y.sin, y.cos};
}
template <Accuracy accuracy>
JITACT_INLINE SinCos<Real<float, accuracy>> sincos(Real<float, accuracy> x, Real<float, accuracy> low) {
  const single::SinCos y = single::sincos(x.v, low.v);
  return {y.sin, y.cos};
}

JITACT_INLINE Double decay(Double x) { return exp(-x); }
JITACT_INLINE Double sigmoid(Double x) {
  const Double e = exp(-abs(x));
  return (x < 0 ? e : 1) * reciprocal(1 + e);
}
JITACT_INLINE Double softplus(Double x) { return log1p_unit(exp(-abs(x))) + (x < 0 ? 0 : x); }
JITACT_INLINE Double times_sigmoid(Double a, bool left, Double t, Double low) {
  const Double h = exp((t + low) / -2);
  return (left ? a * h * h : a) * reciprocal(1 + h * h);
}
JITACT_INLINE Double times_sigmoid(Double a, Double x) { return times_sigmoid(a, x < 0, abs(x), 0); }
JITACT_INLINE Double x_times_sigmoid(Double x, Double a, Double bound) {  // for |x| above the bound sigmoid is 0 or 1
  const Double t = min(abs(x), bound), v = a * t;
  return times_sigmoid(max(x, -bound), x < 0, v, fma(a, t, -v));
}
JITACT_INLINE Double x_times_sigmoid(Double x, Double a) { return x_times_sigmoid(x, a, min(1000 * one_over(a), 0x1p100)); }
JITACT_INLINE Double x_times_sigmoid(Double x, double a) { return x_times_sigmoid(x, Double(a), 0x1p100); }
JITACT_INLINE Double x_times_sigmoid(Double x, Double t, Double w, Double low) {
  constexpr double ln2 = 0.6931471805599453, rest = 2.3190468138462996e-17;
  const Double p = t * w, p_low = fma(t, w, -p) + t * low;
  return times_sigmoid(max(x, -t), x < 0, fma(p, ln2, fma(p, rest, ln2 * p_low)), 0);
}
JITACT_INLINE Double x_times_sigmoid_slope(Double x, Double a) {
  const Double t = min(a * abs(x), 1000), e = decay(t), r = reciprocal(1 + e);
  return r * (x < 0 ? e * (1 - t * r) : 1 + t * e * r);
}
JITACT_INLINE Double times_tanh_softplus(Double a, Double x) {
  const Double h = exp(min(x, 20) / 2), e = h * h;
  const bool left = x < 0;
  return (left ? a * h : a) * ((left ? h : e) * (e + 2) / (e * (e + 2) + 2));
}
JITACT_INLINE Double normal_cdf(Double x, Double mu, Double sigma) { return normal_cdf((x - mu) / sigma); }
JITACT_INLINE Double x_plus_sin_squared(Double x, Double alpha) {
  const Double s = sin(clamp(alpha * x, -wide::kLargest, wide::kLargest));
  return fma(s * s, one_over(alpha), x);
}
JITACT_INLINE Double x_plus_sin_squared_slope(Double x, Double alpha) {
  const Double v = clamp(alpha * x, -wide::kLargest, wide::kLargest) + 0 * x, s = sin(v) + cos(v);
  return s * s;
}
JITACT_INLINE Double x_minus_tanh(Double x) {
  // Minimax on |x| <= 5/8, where the difference cancels.
  const Double u = x * x;
  Double s = 1.724487449484433e-05;
  s = fma(s, u, -7.959955735264808e-05);
  s = fma(s, u, 0.00023077616269519857);
  s = fma(s, u, -0.0005874372860094381);
  s = fma(s, u, 0.001455309297534642);
  s = fma(s, u, -0.0035920589774734554);
  s = fma(s, u, 0.008863229830925709);
  s = fma(s, u, -0.021869488260559115);
  s = fma(s, u, 0.05396825396139557);
  s = fma(s, u, -0.13333333333326658);
  s = fma(s, u, 0.3333333333333332);
  return select(abs(x) < 0.625, x * u * s, x - tanh(x));
}

#undef JITACT_OWN
#undef JITACT_OWN_2
#undef JITACT_OWN_4
#undef JITACT_WIDE
#undef JITACT_PLATFORM_DOUBLE
#undef JITACT_PLATFORM
#undef JITACT_PLATFORM_2

JITACT_INLINE Double rsqrt(Double x) { return 1 / sqrt(x); }
JITACT_INLINE Single rsqrt(Single x) { return 1 / sqrt(x); }
JITACT_INLINE Narrow rsqrt(Narrow x) { return 1 / sqrt(x); }
JITACT_BRAIN(JITACT_INLINE Brain rsqrt(Brain x) { return 1 / sqrt(x); })

}  // namespace jitact

#include "math_dual.cuh"
