// The functions of Narrow, as float -> float, for results that are rounded to 8 or 11 bits: relative error below 2e-5
// (for times_normal_tail and functions based on it, 3e-5 for |x| > 5). On the GPU, 2^t and 1 / b are one special-function
// instruction each, with relative errors of 2^-22 and 2^-23; on the CPU a quartic, with 2^-18, and a division.
// Results below 2^-126 may be 0.
#pragma once

#include "math_sine.cuh"
#include "math_single.cuh"
#include "number.cuh"

namespace jitact::narrow {

using single::log;
using single::one_over;
using single::root_of;
using single::select;

#ifdef JITACT_LIBMVEC
JITACT_INLINE float sin(float x) { return ::sinf(x); }
JITACT_INLINE float cos(float x) { return ::cosf(single::from_bits(single::to_bits(x) << 1 >> 1)); }  // as wide::cos
#else
using single::cos;
using single::sin;
#endif

constexpr float kLog2e = 1.44269502f;

// 2^t; 0 below t = -126.
JITACT_INLINE float exp2(float t) {
#ifdef __CUDA_ARCH__
  return ptx::exp2(t);
#else
  // The rounded t is in the lowest bits of the sum, and clamped to 127 there: one integer instruction, where comparing
  // floats takes two. For a larger t, the large remainder r makes the polynomial p overflow.
  const int32_t sum = int32_t(single::to_bits(t + 12582912.0f)), top = 0x4b400000 + 127;
  const uint32_t n = uint32_t(sum < top ? sum : top);
  const float r = t - (single::from_bits(n) - 12582912.0f);
  float p = 9.582745843e-3f;
  p = fmaf(p, r, 5.590716004e-2f);
  p = fmaf(p, r, 2.402410507e-1f);
  p = fmaf(p, r, 6.931241155e-1f);
  p = fmaf(p, r, 1.0f);
  return select_bits(t < -126.0f, 0.0f, p * single::from_bits((n << 23) + 0x3f800000u));
#endif
}

JITACT_INLINE float reciprocal(float b) { return single::rough_reciprocal(b); }

// a / b. On the GPU 0 for |b| above 2^126, as the reciprocal is.
JITACT_INLINE float divide(float a, float b) {
#ifdef __CUDA_ARCH__
  return a * reciprocal(b);
#else
  return a / b;
#endif
}

JITACT_INLINE float sqrt(float x) {
#ifdef __CUDA_ARCH__
  return ptx::sqrt(x);
#else
  return sqrtf(x);
#endif
}

JITACT_INLINE float exp(float x) { return exp2(x * kLog2e); }
JITACT_INLINE float decay(float a) { return exp2(a * -kLog2e); }

#ifdef __CUDA_ARCH__
// The logarithm's absolute error is 2^-22 near 1.
JITACT_INLINE float log1p(float x) {
  float s = 2.137947290e-1f;
  s = fmaf(s, x, -2.636935554e-1f);
  s = fmaf(s, x, 3.330192403e-1f);
  s = fmaf(s, x, -4.997824935e-1f);
  return select(fabsf(x) < 0.25f, x * fmaf(s, x, 1.000000993f), ptx::log2(1.0f + x) * 0.693147182f);
}
#else
using single::log1p;
#endif

JITACT_INLINE float expm1(float x) {
  float s = 4.161014035e-2f;
  s = fmaf(s, x, 1.674979478e-1f);
  s = fmaf(s, x, 5.000165701e-1f);
  return select(fabsf(x) < 0.25f, x * fmaf(s, x, 1.0f), exp(x) - 1.0f);
}

// log(1 + e) for 0 <= e <= 1.
JITACT_INLINE float log1p_unit(float e) {
  float s = -2.386785299e-2f;
  s = fmaf(s, e, 1.012190878e-1f);
  s = fmaf(s, e, -2.100459337e-1f);
  s = fmaf(s, e, 3.252057135e-1f);
  s = fmaf(s, e, -4.993612468e-1f);
  return e * fmaf(s, e, 9.999915957e-1f);
}

JITACT_INLINE float softplus(float x) { return log1p_unit(decay(fabsf(x))) + select(x < 0, 0.0f, x); }

JITACT_INLINE float sigmoid(float x) { return divide(1.0f, 1.0f + exp2(-kLog2e * x)); }

// a and the divisor are scaled by 2^-8, so that exp(-x) does not overflow down to x = -92, where a sigmoid(x) underflows.
JITACT_INLINE float times_sigmoid(float a, float x) {
  return divide(a * 0x1p-8f, exp2(fmaf(-kLog2e, x, -8.0f)) + 0x1p-8f);
}
JITACT_INLINE float times_sigmoid(float a, bool left, float t, float) { return times_sigmoid(a, left ? -t : t); }

// Below -bound, x sigmoid(alpha x) has underflowed; above bound it is x. About 1000 / alpha, computed from the exponent, as a
// division would take longer than everything else.
JITACT_INLINE float sigmoid_bound(float alpha) {
  return single::held(0x1p10f * single::from_bits(0x7f000000u - single::to_bits(alpha)), 0.0f, 0x1p127f);
}
// exp(-alpha a) + 1, scaled by 2^-8.
JITACT_INLINE float sigmoid_divisor(float a, float alpha) {
  return exp2(fmaf(-kLog2e * single::held(alpha, 0.0f, 0x1p127f), a, -8.0f)) + 0x1p-8f;
}
// The last argument is the rounding error of alpha, which fast_math's Single gives: too small to matter here.
JITACT_INLINE float x_times_sigmoid(float x, float alpha, float = 0.0f) {
  const float a = single::at_least(x, -sigmoid_bound(alpha));
  return divide(a * 0x1p-8f, sigmoid_divisor(a, alpha));
}
// x sigmoid(ln(2) x w); t is |x|, clamped where the result is 0 or x anyway.
JITACT_INLINE float x_times_sigmoid(float x, float t, float w, float) {
  const float a = single::at_least(x, -t);
  return divide(a * 0x1p-8f, exp2(fmaf(-a, w, -8.0f)) + 0x1p-8f);
}
// s (1 + alpha x (1 - s)), computed from 2^8 s.
JITACT_INLINE float x_times_sigmoid_slope(float x, float alpha) {
  const float bound = sigmoid_bound(alpha), a = single::at_least(x, -bound), s = reciprocal(sigmoid_divisor(a, alpha));
  return s * fmaf(single::at_most(a, bound), fmaf(s, alpha * -0x1p-16f, alpha * 0x1p-8f), 0x1p-8f);
}

// Scaled by 2^8, to avoid underflow.
JITACT_INLINE float times_tanh_softplus(float a, float x) {
  const float e = exp2(fmaf(kLog2e, single::at_most(x, 20.0f), 8.0f)), n = e * fmaf(e, 0x1p-8f, 2.0f);
  return a * 0x1p-8f * divide(n, fmaf(n, 0x1p-8f, 2.0f));
}

// 1 - tanh(x).
JITACT_INLINE float tanh_complement(float x) { return reciprocal(exp2(fmaf(2 * kLog2e, x, -1.0f)) + 0.5f); }

JITACT_INLINE float tanh(float x) {
  const float outside = 1.0f - tanh_complement(x);
#ifdef __CUDA_ARCH__
  return select(fabsf(x) < 0x1p-7f, 0.99999f * x, outside);
#else
  return select(fabsf(x) < 0.15f, x * fmaf(x * x, -0.3309f, 1.0f), outside);
#endif
}
JITACT_INLINE float tanh_beside_slope(float x) { return copysignf(tanh(fabsf(x)), x); }

JITACT_INLINE float tanh_slope(float x) {
  const float c = tanh_complement(fabsf(x));
  return fmaf(c, 1.0f - c, c);
}

JITACT_INLINE float x_minus_tanh(float x) {
  const float a = fabsf(x), u = x * x;
  float s = 5.236560479e-3f;
  s = fmaf(s, u, -2.028026432e-2f);
  s = fmaf(s, u, 5.366570130e-2f);
  s = fmaf(s, u, -1.333126277e-1f);
  s = fmaf(s, u, 3.333331048e-1f);
  return copysignf(select(a < 0.75f, a * u * s, (a - 1.0f) + tanh_complement(a)), x);
}

// exp(-t^2 / 2), and g with Q(t) = exp(-t^2 / 2) g(t) for t >= 0: a polynomial in r = 1 / (1 + 0.3 t), after
// C. Hastings, 1955, but fitted for relative error.
JITACT_INLINE float bell(float t) { return exp2(-0.5f * kLog2e * t * t); }
JITACT_INLINE float tail(float t) {
  const float r = reciprocal(fmaf(0.3f, t, 1.0f));
  float s = -8.096532524e-2f;
  s = fmaf(s, r, 2.276526988e-1f);
  s = fmaf(s, r, -3.018449061e-2f);
  s = fmaf(s, r, 1.512842327e-1f);
  s = fmaf(s, r, 1.119793579e-1f);
  s = fmaf(s, r, 1.202344596e-1f);
  return s * r;
}
JITACT_INLINE float normal_tail(float t) { return bell(t) * tail(t); }
JITACT_INLINE float times_normal_tail(float t) {
  const float h = single::at_most(t, 40.0f);
  return h * bell(h) * tail(h);
}
JITACT_INLINE float times_normal_tail_slope(float t) {
  const float h = single::at_most(t, 40.0f);
  return bell(h) * fmaf(h, -0.398942280f, tail(h));
}
JITACT_INLINE float normal_cdf(float x) {
  const float y = bell(x) * tail(fabsf(x));
  return select(x < 0, y, 1.0f - y);
}
JITACT_INLINE float normal_cdf(float x, float mu, float sigma) { return normal_cdf((x - mu) * one_over(sigma)); }
JITACT_INLINE float normal_pdf(float x) { return 0.398942280f * bell(x); }

JITACT_INLINE float erfc(float x) {
  const float t = 1.41421356f * fabsf(x), y = 2.0f * bell(t) * tail(t);
  return select(x < 0, 2.0f - y, y);
}
JITACT_INLINE float erf(float x) {
  const float a = fabsf(x), u = x * x, t = 1.41421356f * a;
  const float s = fmaf(fmaf(fmaf(-2.428339608e-2f, u, 1.124217287e-1f), u, -3.761046231e-1f), u, 1.128378987f);
  return copysignf(select(a < 0.5f, s * a, 1.0f - 2.0f * bell(t) * tail(t)), x);
}

}  // namespace jitact::narrow
