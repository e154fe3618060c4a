// sin and cos of Single and Narrow, as float -> float, over the whole range of float. No branch on the CPU, and none that
// typical inputs take on the GPU. Largest errors: 1.5 ulp for |x| below 2^15, 1e-7 beyond.
#pragma once

#include "math_single.cuh"

namespace jitact::single {

// x = n pi / 2 + r with integer n and |r| <= pi / 4.
struct Quadrant {
  float r;
  uint32_t n;  // in the lowest 2 bits
};

// For |x| from 2^15 on (Payne and Hanek): x is a 24-bit integer times 2^(k - 8), so that integer times the bits of
// 2^-8 / (2 pi) from the k-th on is the fraction of a turn.
JITACT_INLINE Quadrant far_quadrant(float x) {
  const uint32_t k = (to_bits(x) >> 23 & 0xff) - 142, number = (to_bits(x) & 0x7fffff) | 0x800000, shift = k & 31;
  const bool by_64 = k & 64, by_32 = k & 32;
  uint32_t a = by_64 ? 0x4a7f09d5u : 0x0028be60u, b = by_64 ? 0xf47d4d37u : 0xdb939105u;
  uint32_t c = by_64 ? 0x7036d8a5u : 0x4a7f09d5u;
  const uint32_t d = by_64 ? 0x664f10e4u : 0xf47d4d37u;
  a = by_32 ? b : a, b = by_32 ? c : b, c = by_32 ? d : c;
  const uint32_t high = a << shift | b >> 1 >> (31 - shift), low = b << shift | c >> 1 >> (31 - shift);
  const uint32_t magnitude = number * high + uint32_t(uint64_t(number) * low >> 32);
  const uint32_t turn = x < 0 ? 0u - magnitude : magnitude;
  return {float(int32_t(turn << 2)) * (1.57079633f * 0x1p-32f), (turn + 0x20000000u) >> 30};
}

// For x + low; low is used for |x| below 2^15 only.
JITACT_INLINE Quadrant quadrant(float x, float low, float at_infinity) {
  const float shifted = fmaf(x, 0.636619772f, 12582912.0f), n = shifted - 12582912.0f;
  const float r = fmaf(n, 1.715124510e-15f, fmaf(n, 4.371138829e-08f, fmaf(n, -1.570796371f, x)));
  Quadrant q = {r + low, to_bits(shifted)};
  if (fabsf(x) >= 0x1p15f) {
#ifdef __CUDA_ARCH__
    asm volatile("");  // computing this for every x would cost three times the rest: keeps it behind a branch
#endif
    q = far_quadrant(x);
    q.r = fabsf(x) < INFINITY ? q.r : at_infinity;
  }
  return q;
}

JITACT_INLINE float sin_near_zero(float r) {
  const float u = r * r;
  return fmaf(r * u, fmaf(fmaf(-1.951809973e-4f, u, 8.332188241e-3f), u, -1.666665524e-1f), r);
}
JITACT_INLINE float cos_near_zero(float r) {
  const float u = r * r;
  const float s = fmaf(fmaf(2.443232734e-5f, u, -1.388730947e-3f), u, 4.166664556e-2f);
  return fmaf(fmaf(s, u, -0.5f), u, 1.0f);
}
JITACT_INLINE float sine(Quadrant q) {
  const float y = select(q.n & 1, cos_near_zero(q.r), sin_near_zero(q.r));
  return from_bits(to_bits(y) ^ (q.n << 30 & 0x80000000u));
}

struct SinCos { float sin, cos; };
JITACT_INLINE SinCos sincos(float x, float low = -0.0f) {
  const Quadrant q = quadrant(x, low, NAN);
  return {sine(q), sine({q.r, q.n + 1})};
}
JITACT_INLINE float sin(float x) { return sincos(x).sin; }
JITACT_INLINE float cos(float x) { return sincos(x).cos; }

// x + sin(alpha x)^2 / alpha, with sin^2 as 1 - sin(r)^2 in odd quadrants, which cancels less.
JITACT_INLINE float x_plus_sin_squared(float x, float alpha) {
  const float v = alpha * x, inverse = one_over(alpha);
  const Quadrant q = quadrant(v, fmaf(alpha, x, -v), 0.0f);
  const float s = sin_near_zero(q.r), t = s * inverse;
  return fmaf(select(q.n & 1, -t, t), s, select(q.n & 1, x + inverse, x));
}
// 1 + sin(2 alpha x), without the cancellation. From |alpha x| = 2^15 on, for the rounded product alpha x.
JITACT_INLINE float x_plus_sin_squared_slope(float x, float alpha) {
  const float v = alpha * x;
  const Quadrant q = quadrant(v, fmaf(alpha, x, -v), fabsf(x) < INFINITY ? 0.0f : NAN);
  const float s = sine(q) + sine({q.r, q.n + 1});
  return s * s;
}

}  // namespace jitact::single

namespace jitact::narrow {

// sin(r) for |r| <= pi / 2, on the GPU <= pi, with an absolute error of 2^-21.
JITACT_INLINE float sine(float r) {
#ifdef __CUDA_ARCH__
  return ptx::sin(r);
#else
  const float u = r * r;
  const float p = fmaf(fmaf(fmaf(2.624901072e-6f, u, -1.981950918e-4f), u, 8.333216421e-3f), u, -1.666666567e-1f);
  return fmaf(r * u, p, r);
#endif
}

// The same. From |alpha x| = 2^15 on, the added term is less than half an ulp of x, so any small value will do.
JITACT_INLINE float x_plus_sin_squared(float x, float alpha) {
  const float v = alpha * x, n = fmaf(v, 0.318309886f, 12582912.0f) - 12582912.0f;
  const float near = fmaf(n, 8.74227766e-08f, fmaf(n, -3.14159274f, v));  // distance to the nearest multiple of pi
  const float s = sine(single::select(fabsf(v) < 0x1p15f, near, 0.0f));
  return fmaf(s * s, single::one_over(alpha), x);
}

// A 16-bit gradient here never has an ulp below 2^-18, so the cancellation does no harm.
JITACT_INLINE float x_plus_sin_squared_slope(float x, float alpha) {
  const float a = 2.0f * alpha, v = a * x, n = fmaf(v, 0.159154943f, 12582912.0f) - 12582912.0f;
  // The distance to the nearest multiple of 2 pi.
  float r = fmaf(n, 1.74845553e-07f, fmaf(n, -6.28318548f, v)) + fmaf(a, x, -v);
  if (fabsf(v) >= 0x1p16f) {
#ifdef __CUDA_ARCH__
    asm volatile("");  // as in quadrant()
#endif
    const single::Quadrant q = single::far_quadrant(alpha * x);
    r = fabsf(x) < INFINITY ? (q.n & 1 ? -2.0f : 2.0f) * q.r : NAN;
  }
#ifndef __CUDA_ARCH__
  r = fabsf(r) > 1.57079633f ? copysignf(3.14159274f, r) - r : r;
#endif
  return 1.0f + sine(r);
}

}  // namespace jitact::narrow
