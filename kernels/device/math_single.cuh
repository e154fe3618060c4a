// The functions of Single, as float -> float: no branch, no table, no call, and the same arithmetic on the CPU (whose
// compiler vectorises it) and on the GPU, but for divisions. Polynomials are minimax fits with float32 coefficients, by
// Lawson's iteration. Errors given are the largest, in ulp, on the CPU against the double library, for normal results and
// every float32 with 2^-12 <= |x| < 2^7, every 61st elsewhere.
#pragma once

#include "number.cuh"

namespace jitact::single {

JITACT_INLINE float from_bits(uint32_t u) { return bit_cast<float>(u); }
JITACT_INLINE uint32_t to_bits(float f) { return bit_cast<uint32_t>(f); }

// condition ? a : b with both computed: for ?:, nvcc emits a branch around an expensive operand.
JITACT_INLINE float select(bool condition, float a, float b) { return condition ? a : b; }

// min(x, bound) and max(x, bound) for a bound that is not NaN; NaN if x is NaN.
JITACT_INLINE float at_most(float x, float bound) {
#ifdef __CUDA_ARCH__
  return min(Single(x), Single(bound)).v;
#else
  return select_bits(x > bound, bound, x);  // else gcc computes with the bound, too, and chooses among results
#endif
}
JITACT_INLINE float at_least(float x, float bound) {
#ifdef __CUDA_ARCH__
  return max(Single(x), Single(bound)).v;
#else
  return select_bits(x < bound, bound, x);
#endif
}
// max(x, bound), but the bound if x is NaN.
JITACT_INLINE float raised_to(float x, float bound) {
#ifdef __CUDA_ARCH__
  return fmaxf(x, bound);
#else
  return x > bound ? x : bound;
#endif
}

// sqrt(x) for 0, and from 2^-126 to inf, at most 1 ulp off.
JITACT_INLINE float square_root(float x) {
#ifdef __CUDA_ARCH__
  const float r = ptx::rsqrt(x), y = x * r, corrected = fmaf(fmaf(-y, y, x), 0.5f * r, y);
  return corrected == corrected ? corrected : x;  // 0 and inf
#else
  return sqrtf(x);
#endif
}

// 1 / b for 2^-126 <= |b| <= 2^126, at most 1 ulp off on the GPU. 0 for infinite b.
JITACT_INLINE float rough_reciprocal(float b) {
#ifdef __CUDA_ARCH__
  return ptx::reciprocal(b);
#else
  return 1.0f / b;
#endif
}

// The same to 0.6 ulp, but NaN for infinite b.
JITACT_INLINE float reciprocal(float b) {
#ifdef __CUDA_ARCH__
  const float r = rough_reciprocal(b);
  return fmaf(r, fmaf(-r, b, 1.0f), r);
#else
  return 1.0f / b;
#endif
}

constexpr float kLargest = 0x1.fffffep127f;

// x clamped between two bounds, for parameters; NaN if x is NaN. On the GPU not by at_most and at_least, as their inline
// assembly is not hoisted out of the loop over elements.
JITACT_INLINE float held(float x, float low, float high) {
  return select_bits(x < low, low, select_bits(x > high, high, x));
}

// 1 / p and sqrt(p) of a parameter, correctly rounded; 1 / p is clamped to finite values.
JITACT_INLINE float one_over(float p) { return held(1.0f / p, -kLargest, kLargest); }
JITACT_INLINE float root_of(float p) { return sqrtf(p); }

// a / (b + low) for b from 1 to 2, |low| tiny and finite a, in effect rounded once: the residual corrects the quotient. It is
// negated, as -0 + 0 is 0: so a quotient of -0 keeps its sign.
JITACT_INLINE float divide_finite(float a, float b, float low) {
  const float r = rough_reciprocal(b), q = a * r;
  return fmaf(fmaf(low, q, fmaf(b, q, -a)), -r, q);
}
// The same for any a: an infinite one's residual is NaN.
JITACT_INLINE float divide(float a, float b, float low) {
  const float q = a * rough_reciprocal(b);
  return select(fabsf(q) <= 3.40282347e38f, divide_finite(a, b, low), q);
}

// exp(x + low) = 2^n exp(r) with integer n, |r| <= ln(2) / 2 (Cody and Waite) and exp(r) = 1 + r + r^2 q. |x| is at most 2^21,
// low tiny.
struct Reduced {
  float r, q;
  uint32_t n;  // in the lowest 9 bits
  // exp(r) and exp(r) - 1.
  JITACT_INLINE float mantissa() const { return fmaf(r, fmaf(r, q, 1.0f), 1.0f); }
  JITACT_INLINE float mantissa_m1() const { return fmaf(r * r, q, r); }
  // 2^(n + k), which must be from 2^-127 (returned as 0) to 2^128 (returned as inf).
  JITACT_INLINE float power(int k = 0) const { return from_bits((n << 23) + (uint32_t(127 + k) << 23)); }
};
JITACT_INLINE Reduced reduce(float x, float low = -0.0f) {  // adding -0 costs nothing
  // Adding 1.5 * 2^23 puts the rounded integer into the lowest bits of the sum.
  const float shifted = fmaf(x, 1.44269502e+0f, 12582912.0f);
  const float n = shifted - 12582912.0f;
  const float r = fmaf(n, 1.90465421e-9f, fmaf(n, -6.93147182e-1f, x)) + low;
  float q = 1.387069467e-3f;
  q = fmaf(q, r, 8.366271853e-3f);
  q = fmaf(q, r, 4.166743532e-2f);
  q = fmaf(q, r, 1.666654646e-1f);
  q = fmaf(q, r, 4.999999702e-1f);
  return {r, q, to_bits(shifted)};
}

// exp(-a + low) * 2^24 for a >= 0: the factor of 2^24 keeps full precision where exp itself is subnormal. 0 from a = 104.4.
// 0.92 ulp.
constexpr float kUnscale = 0x1p-24f;
JITACT_INLINE float exp_scaled(float a, float low = -0.0f) {
  const Reduced e = reduce(-at_most(a, 104.7f), low);
  return e.mantissa() * e.power(24);
}
JITACT_INLINE float decay(float a) { return exp_scaled(a) * kUnscale; }

// 0.92 ulp.
JITACT_INLINE float exp(float x) {
  const Reduced e = reduce(at_most(at_least(x, -104.7f), 89.0f));  // where power() is 0: subnormals would be slow
  // 2^n in two factors, so that it neither overflows nor underflows early.
  const bool down = x < 0;
  return e.mantissa() * e.power(down ? 24 : -1) * (down ? kUnscale : 2.0f);
}

// 1.53 ulp; 0.95 for x < 0.
JITACT_INLINE float expm1(float x) {
  const Reduced e = reduce(at_most(at_least(x, -18.0f), 89.0f));
  const float half_power = e.power(-1);
  return select(fabsf(x) < 0x1p-25f, x, 2.0f * fmaf(half_power, e.mantissa_m1(), half_power - 0.5f));
}

// log(1 + f) for -1/4 <= f <= 1/2.
JITACT_INLINE float log1p_near_zero(float f) {
  float s = -4.515225440e-2f;
  s = fmaf(s, f, 1.047255024e-1f);
  s = fmaf(s, f, -1.316393614e-1f);
  s = fmaf(s, f, 1.447762996e-1f);
  s = fmaf(s, f, -1.664687842e-1f);
  s = fmaf(s, f, 1.999084800e-1f);
  s = fmaf(s, f, -2.500011027e-1f);
  s = fmaf(s, f, 3.333345056e-1f);
  s = fmaf(s, f, -5.000000000e-1f);
  return fmaf(f * f, s, f);
}

// k << 23, for the k with x / 2^k in [3/4, 3/2).
JITACT_INLINE uint32_t exponent_bits(float x) { return (to_bits(x) - 0x3f400000u) & 0xff800000u; }
JITACT_INLINE float times_ln2(uint32_t exponent, float plus) {
  return fmaf(float(int32_t(exponent)), 0.693147182f * 0x1p-23f, plus);
}

// 0.93 ulp.
JITACT_INLINE float log(float x) {
  const bool tiny = x < 0x1p-126f;
  const float normal = select(tiny, x * 0x1p24f, x);
  const uint32_t k = exponent_bits(normal);
  const float y = times_ln2(k - (tiny ? 24u << 23 : 0u), log1p_near_zero(from_bits(to_bits(normal) - k) - 1.0f));
  const float edge = select_bits(x == 0, -INFINITY, select_bits(x > 0, x, NAN));
  return select_bits((x > 0) & (x < INFINITY), y, edge);
}

// After N. Juffa: 1 + x = 2^k (1 + f), where f = (2^-k - 1) + 2^-k x avoids the rounding of 1 + x.
// 1.27 ulp.
JITACT_INLINE float log1p(float x) {
  const uint32_t k = exponent_bits(1.0f + x);
  const float f = fmaf(0.25f, from_bits(to_bits(4.0f) - k), -1.0f) + from_bits(to_bits(x) - k);
  const float y = times_ln2(k, log1p_near_zero(f));
  const float inside = select_bits((fabsf(x) < 0x1p-25f) | (x == INFINITY), x, y);
  return select_bits(x > -1, inside, select_bits(x == -1, -INFINITY, NAN));
}

// log(1 + e) for 0 <= e <= 1, all that softplus needs: from e = 1/2 on, 1 + e = 2 (1 + f). 0.91 ulp.
JITACT_INLINE float log1p_unit(float e) {
  const float half = e > 0.5f ? 0.5f : 0.0f;  // one selection: with two, g++ would compute the polynomial twice
  return fmaf(half, 1.38629436f, log1p_near_zero(fmaf(-half, e, e) - half));
}

// max(x, 0) + log1p(exp(-|x|)): never overflows. 1.66 ulp.
JITACT_INLINE float softplus(float x) { return log1p_unit(decay(fabsf(x))) + select(x < 0, 0.0f, x); }

// In terms of e = exp(-|x|), which keeps the divisor, 1 + e, in [1, 2]. sigmoid: 1.48 ulp.
JITACT_INLINE float divide_by_one_plus(float a, float e) {
  const float b = 1.0f + e;
  return divide(a, b, (1.0f - b) + e);
}
JITACT_INLINE float sigmoid(float x) {
  const float e = decay(fabsf(x)), b = 1.0f + e;
  return divide_finite(select(x < 0, e, 1.0f), b, (1.0f - b) + e);
}

// a sigmoid(x) with scaled = exp(-|x|) * 2^24; left: x < 0, where |a| is at most 2^100. x sigmoid(x): 2.38 ulp.
JITACT_INLINE float times_sigmoid_of(float a, bool left, float scaled) {
  return divide_by_one_plus(select(left, a * scaled * kUnscale, a), scaled * kUnscale);
}
JITACT_INLINE float times_sigmoid(float a, float x) { return times_sigmoid_of(a, x < 0, exp_scaled(fabsf(x))); }
JITACT_INLINE float times_sigmoid(float a, bool left, float t, float low) {
  return times_sigmoid_of(a, left, exp_scaled(t, -low));
}

// x sigmoid((alpha + rest) x) for alpha > 0. |alpha x| = v + low: exp turns absolute errors of its argument into relative ones,
// so the rounding error is kept. From |alpha x| = 1000 on sigmoid is 0 or 1 in every type, and 0 * inf would be NaN.
JITACT_INLINE float x_times_sigmoid(float x, float alpha, float rest = 0.0f) {
  const float far = 1000.0f * one_over(alpha), bound = far < 0x1p100f ? far : 0x1p100f;  // not at_most: constant for a literal
  const float t = at_most(fabsf(x), bound), v = alpha * t;
  return times_sigmoid(at_least(x, -bound), x < 0, v, fmaf(rest, t, fmaf(alpha, t, -v)));
}
// x sigmoid(ln(2) x (w + low)) for w > 0; t is |x|, clamped where the result is 0 or x anyway. With powers of two, argument
// reduction is fused with the multiplication: t w is never rounded.
JITACT_INLINE float x_times_sigmoid(float x, float t, float w, float low) {
  const float shifted = fmaf(-t, w, 12582912.0f), n = shifted - 12582912.0f;  // as in reduce()
  const float r = fmaf(-t, low, fmaf(-t, w, -n));
  float s = 1.532647002e-4f;  // 2^r, to a relative error of 3e-9
  s = fmaf(s, r, 1.339080743e-3f);
  s = fmaf(s, r, 9.618505836e-3f);
  s = fmaf(s, r, 5.550359935e-2f);
  s = fmaf(s, r, 2.402264774e-1f);
  s = fmaf(s, r, 6.931471825e-1f);
  s = fmaf(s, r, 1.0f);
  // 2^(n + 24), 0 from n = -151 on.
  const int32_t sum = int32_t(to_bits(shifted)), least = 0x4b400000 - 151;
  const float scaled = s * from_bits((uint32_t(sum > least ? sum : least) << 23) + (uint32_t(127 + 24) << 23));
  return divide_by_one_plus(select(x < 0, -t * scaled * kUnscale, x), scaled * kUnscale);
}
// With r = 1 / (1 + e), e = exp(-t), t = |alpha x|.
JITACT_INLINE float x_times_sigmoid_slope_of(float x, float t, float e, float r) {
  return r * select(x < 0, e * (1.0f - t * r), 1.0f + t * e * r);
}
JITACT_INLINE float x_times_sigmoid_slope(float x, float alpha) {
  const float t = at_most(alpha * fabsf(x), 1000.0f), e = decay(t);
  return x_times_sigmoid_slope_of(x, t, e, reciprocal(1.0f + e));
}
// The same with a smaller error, for products.
JITACT_INLINE float x_times_sigmoid_slope_closely(float x, float alpha) {
  const float t = at_most(alpha * fabsf(x), 1000.0f), e = decay(t);
  return x_times_sigmoid_slope_of(x, t, e, divide_by_one_plus(1.0f, e));
}

// a tanh(softplus(x)), for |a| up to 2^100 where x < 0. With e = exp(-|x|),
//   x < 0    a e (1 - k), k = (e + e^2) / (e^2 + 2 e + 2)
//   x >= 0   a (1 - k),   k = 2 e^2 / (2 e^2 + 2 e + 1)
// With a = x: 2.87 ulp.
JITACT_INLINE float times_tanh_softplus(float a, float x) {
  const bool left = x < 0;
  const float scaled = exp_scaled(fabsf(x)), e = scaled * kUnscale, w = fmaf(e, e, e);
  const float k = select(left, w, 2.0f * e * e) *
                  reciprocal(select(left, fmaf(e, e + 2.0f, 2.0f), fmaf(2.0f, w, 1.0f)));
  const float b = select(left, a * scaled * kUnscale, a);
  return copysignf(fmaf(-at_most(b, kLargest), k, b), a);  // a 0 has the sign of a; at_most, as inf - inf would be NaN
}

// (x - tanh(x)) / x^3 as a polynomial in u = x^2, for |x| <= 5/4.
JITACT_INLINE float tanh_residual(float u) {
  float s = 2.866978139e-5f;
  s = fmaf(s, u, -2.551895450e-4f);
  s = fmaf(s, u, 1.109842444e-3f);
  s = fmaf(s, u, -3.380868584e-3f);
  s = fmaf(s, u, 8.799713105e-3f);
  s = fmaf(s, u, -2.186708339e-2f);
  s = fmaf(s, u, 5.397121981e-2f);
  s = fmaf(s, u, -1.333338022e-1f);
  return fmaf(s, u, 3.333333433e-1f);
}
// 1 - tanh(a) = 2 / (exp(2 a) + 1) for a >= 0.
JITACT_INLINE float tanh_complement(float a) {
  const float e = decay(2 * a);
  return 2.0f * e * rough_reciprocal(1.0f + e);
}

// m / (m + 2) with m = exp(2 |x|) - 1. The residual corrects the quotient, also for the rounding of m + 2. 1.71 ulp.
JITACT_INLINE float tanh(float x) {
  const Reduced e = reduce(2.0f * at_most(fabsf(x), 9.1f));
  const float power = e.power(), m = fmaf(power, e.mantissa_m1(), power - 1.0f), b = m + 2.0f, low = m - (b - 2.0f);
  const float r = rough_reciprocal(b), q = m * r;
  return copysignf(fmaf(fmaf(low, q, fmaf(b, q, -m)), -r, q), x);
}
// 1.48 ulp. tanh_slope computes most of it too.
JITACT_INLINE float tanh_beside_slope(float x) {
  const float a = fabsf(x), u = x * x;
  const float inside = fmaf(a * u, -tanh_residual(u), a);
  return copysignf(select(a > 1.25f, 1.0f - tanh_complement(a), inside), x);
}

JITACT_INLINE float tanh_slope(float x) {
  const float c = tanh_complement(fabsf(x));
  return c * (2.0f - c);
}

// 3.26 ulp.
JITACT_INLINE float x_minus_tanh(float x) {
  const float a = fabsf(x), u = x * x;
  const float inside = a * u * tanh_residual(u);
  return copysignf(select(a > 1.25f, (a - 1.0f) + tanh_complement(a), inside), x);
}

// exp(-(h^2 + low) / 2) = 2^n exp(-r / 2) with integer n, |r| <= ln(2) and exp(-r / 2) = 1 - r / 2 + r^2 q. For |h| up to 16.
struct Bell {
  float r, q;
  uint32_t n;  // n + 64, in the lowest 9 bits: factors are scaled by 2^-64, so that nothing becomes subnormal early
  JITACT_INLINE float times(float b) const { return fmaf(b * r, fmaf(r, q, -0.5f), b); }
  JITACT_INLINE float power() const { return from_bits((n << 23) + (127u << 23)); }
  // The same as times(b) * power(), for b from 2^-5 to 1.
  JITACT_INLINE float scaled_times(float b) const { return from_bits(to_bits(times(b)) + (n << 23)); }
};
JITACT_INLINE Bell bell_of_square(float s, float low) {
  const float shifted = fmaf(s, -7.213475108e-1f, 12582912.0f + 64.0f), n = shifted - (12582912.0f + 64.0f);
  const float r = fmaf(n, -3.80930842e-9f, fmaf(n, 1.386294365f, s)) + low;
  float q = 2.167296043e-5f;
  q = fmaf(q, r, -2.614459954e-4f);
  q = fmaf(q, r, 2.604214707e-3f);
  q = fmaf(q, r, -2.083318308e-2f);
  q = fmaf(q, r, 1.249999925e-1f);
  return {r, q, to_bits(shifted)};
}
JITACT_INLINE Bell bell(float h) {
  const float s = h * h;
  return bell_of_square(s, fmaf(h, h, -s));
}
// The same, given half of low.
JITACT_INLINE Bell bell(float h, float half_low) {
  const float s = h * h;
  return bell_of_square(s, fmaf(2.0f, half_low, fmaf(h, h, -s)));
}

// Q(t) = P(N > t) = exp(-t^2 / 2) r p for a standard normal N and t >= 0, with r = 1 / (t + 5/2), and for p a polynomial
// in v = t r (after M. Shepherd and J. Laframboise, 1981), scaled by 2^-64. 0 from t = 14.46. cdf: 3.95 ulp;
// max(x, 0) - |x| Q(|x|), which is gelu: 3.70 ulp.
struct Tail {
  Bell bell;
  float p, r, v;
  JITACT_INLINE float q() const { return bell.scaled_times(r) * p; }
};
JITACT_INLINE float tail_reciprocal(float t) {
  const float r = rough_reciprocal(t + 2.5f);
  return fmaf(r, fmaf(-r, t, fmaf(-r, 2.5f, 1.0f)), r);
}
JITACT_INLINE float tail_polynomial(float v) {
  float p = -4.276153797e-21f;
  p = fmaf(p, v, 1.498443657e-20f);
  p = fmaf(p, v, -1.671894061e-20f);
  p = fmaf(p, v, 7.267137110e-21f);
  p = fmaf(p, v, -8.019826231e-21f);
  p = fmaf(p, v, 3.011821156e-21f);
  p = fmaf(p, v, 1.582587959e-20f);
  p = fmaf(p, v, 9.194166631e-21f);
  p = fmaf(p, v, -6.740442134e-20f);
  p = fmaf(p, v, 6.776263578e-20f);
  return p;
}
constexpr float kTailEnd = 15.0f;  // Q(t), t Q(t) and t pdf(t) are 0 from 14.6 on
JITACT_INLINE Tail tail(float t) {
  const float h = at_most(t, kTailEnd), r = tail_reciprocal(h), v = h * r;
  return {bell(h), tail_polynomial(v), r, v};
}
// Q(t + low) for t up to 16, by the slope of log Q, about -(t + 1.4 r).
JITACT_INLINE Tail tail(float t, float low) {
  const float r = tail_reciprocal(t), v = t * r;
  return {bell(t, low * fmaf(1.4f, r, t)), tail_polynomial(v), r, v};
}

JITACT_INLINE float normal_tail(float t) { return tail(t).q(); }
JITACT_INLINE float times_normal_tail(float t) {
  const Tail q = tail(t);
  return q.bell.times(q.v) * q.bell.power() * q.p;
}
// The parts of t Q(t) where errors have to be small: those of v and of the polynomial's last step are kept. The polynomial is
// in w = 1 - v, which cancels less for large t.
struct CloseTail {
  Bell bell;
  float h, v, w, p, p_low;
};
JITACT_INLINE CloseTail close_tail(float t) {
  const float h = at_most(t, kTailEnd), s = h + 2.5f, s_low = h - (s - 2.5f), r = rough_reciprocal(s), u = h * r;
  const float v = fmaf(fmaf(-u, s_low, fmaf(-u, s, h)), r, u), w = 1.0f - v;
  float p = 4.364205316e-21f;
  p = fmaf(p, w, -2.395240889e-20f);
  p = fmaf(p, w, 5.178325441e-20f);
  p = fmaf(p, w, -5.064437857e-20f);
  p = fmaf(p, w, 1.614702761e-20f);
  p = fmaf(p, w, -3.607755916e-21f);
  p = fmaf(p, w, 1.236627584e-20f);
  p = fmaf(p, w, 1.804663658e-20f);
  p = fmaf(p, w, 2.163319478e-20f);
  const float all = fmaf(p, w, 2.162658542e-20f);
  return {bell(h), h, v, w, all, fmaf(p, w, 2.162658542e-20f - all)};
}
// times_normal_tail to a relative error of 3.3 * 2^-24, for products, which add an error of their own: that of the bell's
// product is kept too.
JITACT_INLINE float times_normal_tail_closely(float t) {
  const CloseTail of = close_tail(t);
  const Bell& e = of.bell;
  const float fall = of.v * e.r * fmaf(e.r, e.q, -0.5f), b = of.v + fall, b_low = (of.v - b) + fall;
  const float scaled = b * e.power();  // first, as the polynomial is small
  return fmaf(scaled, of.p, fmaf(scaled, of.p_low, b_low * e.power() * of.p));
}
// Q(t) - t pdf(t) = exp(-t^2 / 2) (r p - t / sqrt(2 pi)), with r = w / (5/2): near its zero, errors of the bell do not matter.
JITACT_INLINE float times_normal_tail_slope(float t) {
  const CloseTail of = close_tail(t);
  const Bell& e = of.bell;
  const float rest = fmaf(of.w, of.p_low, of.h * (-2.5f * 0.398942280f * 0x1p-64f)), difference = fmaf(of.w, of.p, rest);
  return e.power() * fmaf(0.4f * e.r, fmaf(e.r, e.q, -0.5f), 0.4f) * difference;
}
JITACT_INLINE float normal_cdf(float x, Tail tail) {
  const float y = tail.q();
  return select(x < 0, y, 1.0f - y);
}
JITACT_INLINE float normal_cdf(float x) { return normal_cdf(x, tail(fabsf(x))); }
JITACT_INLINE float normal_pdf(float x) {
  const Bell e = bell(at_most(fabsf(x), kTailEnd));
  return e.times(0.398942280f) * e.power() * 0x1p-64f;
}

// P(N < z) with z = (x - mu) / sigma. The left tail turns absolute errors of z into relative ones, so for z < 0 its rounding
// error is kept: d_low, of d = x - mu, for which the smaller of x and -mu is then the larger in magnitude, and that of the
// division. From 15 sigma on, the result is 0 or 1 regardless.
JITACT_INLINE float normal_cdf(float x, float mu, float sigma) {
  const float s = held(sigma, 0x1p-126f, kLargest), r = one_over(s);
  const float d = x - mu, z = d * r, d_low = (at_most(x, -mu) - d) + at_least(x, -mu);
  const float low = fmaf(z, fmaf(-r, s, 1.0f), fmaf(d_low, r, fmaf(d, r, -z)));
  return normal_cdf(z, tail(at_most(fabsf(z), 15.0f), fabsf(z) < 15.0f ? -low : 0.0f));
}

// erfc(a) = 2 Q(a sqrt(2)), with a sqrt(2) in two parts. erfc: 4.00 ulp, erf: 1.70 ulp.
JITACT_INLINE float erfc_positive(float a) {
  const float t = a * 1.41421354f;
  return 2.0f * tail(t, fmaf(a, 2.42035735e-8f, fmaf(a, 1.41421354f, -t))).q();
}
JITACT_INLINE float erfc(float x) {
  const float y = erfc_positive(at_most(fabsf(x), 11.0f));
  return select(x < 0, 2.0f - y, y);
}
JITACT_INLINE float erf(float x) {
  const float a = fabsf(x), u = x * x;
  float s = -6.429718342e-4f;
  s = fmaf(s, u, 5.095020402e-3f);
  s = fmaf(s, u, -2.683216333e-2f);
  s = fmaf(s, u, 1.128340140e-1f);
  s = fmaf(s, u, -3.761262298e-1f);
  s = fmaf(s, u, 1.283791661e-1f);
  return copysignf(select(a > 0.6f, 1.0f - erfc_positive(at_most(a, 11.0f)), fmaf(s, a, a)), x);
}

}  // namespace jitact::single
