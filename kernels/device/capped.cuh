// The functions of situ_glu: c(x, b) = b tanh(x / b), which is about x near 0 and +-b for large |x|; c(x, 0) = x.
//
//   capped_product(gate, up, beta, beta2)         c(gate, beta) sigmoid(gate) c(up, beta2)
//   capped_gradients(dy, gate, up, beta, beta2)   its gradients by gate and by up
#pragma once

#include "gated.cuh"

namespace jitact {

// For 16-bit types, where the number of instructions and special functions limits a GPU.
namespace narrow {

// 1 / b for b > 0. Not by division, which has a slow path, nor ptx::reciprocal, which is 0 for b above 2^126.
JITACT_INLINE float inverse(float b) {
#ifdef __CUDA_ARCH__
  const float r = ptx::rsqrt(b);
  return r * r;
#else
  return 1.0f / b;
#endif
}

// 2^t where narrow::exp2, with its relative error of 2^-18 on a CPU, is too inaccurate: a slope near its zero is a difference.
JITACT_INLINE float exp2_closely(float t) {
#ifdef __CUDA_ARCH__
  return exp2(t);
#else
  return single::exp(0.693147182f * t);
#endif
}

// c(x, b) = x P(u) / Q(u) with u = (x / b)^2 and |x / b| clamped where tanh is 1: relative error 1e-5. As a fraction, so that
// several can share one reciprocal. `over` is scaled by 2^-8.
struct Capped {
  float over, under;
};
JITACT_INLINE Capped capped(float x, float b, bool uncapped) {
  const float bound = select(uncapped, single::kLargest, single::held(5.82021826f * b, 0.0f, single::kLargest));
  const float r = select(uncapped, 0.0f, inverse(b));
  const float h = single::at_most(single::at_least(x, -bound), bound), q = h * r, u = q * q;
  const float p = fmaf(fmaf(1.490094117e-3f * 0x1p-8f, u, 1.144509315e-1f * 0x1p-8f), u, 9.999909401e-1f * 0x1p-8f);
  return {select(uncapped, x, h) * p, fmaf(fmaf(fmaf(5.472020712e-5f, u, 1.746728271e-2f), u, 4.477236867e-1f), u, 1.0f)};
}
JITACT_INLINE float capped_product(float gate, float up, float beta, float beta2) {
  const Capped a = capped(gate, beta, false), b = capped(up, beta2, beta2 == 0);
  // 1 + exp(-gate), scaled by 2^-16, as the product of the numerators is.
  const float divisor = exp2(fmaf(-kLog2e, gate, -16.0f)) + 0x1p-16f;
  return a.over * reciprocal(divisor * a.under * b.under) * b.over;
}

// c(x, b) times `scale`, and a quarter of its slope, which is r (1 - r) with r = 1 / (1 + exp(2 |x| / b)). |c| is
// b (1 - 2 r); near 0, c is x times a function of the slope: relative error 6e-6.
struct CappedSlope {
  float value, quarter;
};
JITACT_INLINE CappedSlope capped_slope(float x, float b, bool uncapped, float scale) {
  const float k = select(uncapped, 0x1p-149f, 2 * kLog2e * inverse(b)), near_zero = select(uncapped, INFINITY, 0.14f * b);
  const float r = reciprocal(1.0f + exp2_closely(k * fabsf(x))), quarter = fmaf(-r, r, r);
  const float inside = x * fmaf(quarter, 1.339089f * scale, 0.66522775f * scale);
  const float outside = copysignf(fmaf(r, -2.0f * scale * b, scale * b), x);
  return {select(fabsf(x) <= near_zero, inside, outside), select(uncapped, 0.25f, quarter)};
}
struct Gradients {
  float by_gate, by_up;
};
JITACT_INLINE Gradients capped_gradients(float dy, float gate, float up, float beta, float beta2) {
  const CappedSlope a = capped_slope(gate, beta, false, 0x1p-6f), b = capped_slope(up, beta2, beta2 == 0, 1.0f);
  const float s = reciprocal(exp2(fmaf(-kLog2e, gate, -8.0f)) + 0x1p-8f);  // 2^8 sigmoid(gate)
  const float slope = fmaf(a.value, fmaf(s, -0x1p-4f, 0x1p4f), a.quarter) * (s * 0x1p-7f);  // half of the slope: below 1
  // Multiplying by the slope first where |dy| is large, and by c(up) first where it is small, avoids over- and underflow.
  const bool large = fabsf(dy) >= 1;
  const float half = dy * select(large, slope, b.value) * select(large, b.value, slope);
  return {half + half, dy * b.quarter * (a.value * s)};
}

}  // namespace narrow

// For float32: terms that are rounded more than once are subtracted from larger ones.
namespace single {

// exp(-2 q) for q >= 0 where a relative error of 2^-22 suffices.
JITACT_INLINE float rough_decay(float q) {
#ifdef __CUDA_ARCH__
  return ptx::exp2(-2.88539008f * q);
#else
  return decay(2.0f * q);
#endif
}
// 1 / b, and 0 for b above 2^126.
JITACT_INLINE float reciprocal_or_0(float b) {
#ifdef __CUDA_ARCH__
  return ptx::reciprocal(b);
#else
  return select(b > 0x1p126f, 0.0f, 1.0f / b);
#endif
}

// c(x, b) and its slope. With q = |x| / b, |c| is |x| (1 - fall) for small q, where fall is a rational function of q^2, and
// b (1 - fall) for large q, where fall = 2 e / (1 + e), e = exp(-2 q).
struct Capped {
  float value, slope;
};
JITACT_INLINE Capped capped(float x, float b, bool uncapped) {
  const float rough = narrow::inverse(b), inverse = select(uncapped, 0.0f, fmaf(rough, fmaf(-b, rough, 1.0f), rough));
  const float a = fabsf(x), q = a * inverse, u = q * q, e = rough_decay(q);
  const bool far = q > 1.15f;  // where both have about the same error
  const float all = select(far, b, a), over = select(far, e, u * fmaf(7.295106538e-3f, u, 1.666666418e-1f));
  const float near = fmaf(fmaf(7.802606095e-3f, u, 2.218848318e-1f), u, 0.5f);
  const float r = reciprocal(select(far, fmaf(e, 0.5f, 0.5f), near)), fall = over * r;
  const float value = fmaf(-all, fall, all), t = fmaf(-q, fall, q);  // t: tanh(q) for small q
  const float slope = select(far, fall * r, fmaf(-t, t, 1.0f));
  return {copysignf(select(uncapped, a, value), x), select(uncapped, 1.0f, slope)};
}

// 2^8 sigmoid(x) = 1 / (divisor + low), where low is the rounding error of the divisor, and exp = 2^-8 exp(-x). The scale
// keeps exp(-x) finite down to x = -92.9, where x sigmoid(x) underflows; below, rough is 0, and from x = 82.2 on exp is.
struct Sigmoid {
  float divisor, low, exp, rough;
  // a 2^8 sigmoid(x), rounded once, for |a| up to 2^119.
  JITACT_INLINE float times(float a) const {
    const float y = a * rough;
    return fmaf(fmaf(-low, y, fmaf(-divisor, y, a)), rough, y);
  }
};
JITACT_INLINE Sigmoid sigmoid_parts(float x) {
  const Reduced e = reduce(at_most(at_least(-x, -82.5f), 93.8f));
  const float p = e.power(-8), m = e.mantissa_m1(), sum = p + 0x1p-8f, divisor = fmaf(p, m, sum);
  return {divisor, fmaf(p, m, sum - divisor), fmaf(p, m, p), reciprocal_or_0(divisor)};
}

JITACT_INLINE float capped_product(float gate, float up, float beta, float beta2) {
  const float act = sigmoid_parts(gate).times(capped(gate, beta, false).value);
  return act * 0x1p-8f * capped(up, beta2, beta2 == 0).value;
}

// a b c, rounded once.
JITACT_INLINE float product_in_order(float a, float b, float c) {
  const float p = a * b, all = p * c;
  return select(fabsf(all) < INFINITY, fmaf(p, c, fmaf(a, b, -p) * c), all);
}
struct Gradients {
  float by_gate, by_up;
};
JITACT_INLINE Gradients capped_gradients(float dy, float gate, float up, float beta, float beta2) {
  const Capped a = capped(gate, beta, false), b = capped(up, beta2, beta2 == 0);
  const Sigmoid sigmoid = sigmoid_parts(gate);
  const float s = sigmoid.times(1.0f), act = sigmoid.times(a.value) * 0x1p-8f;
  const float half = s * 0x1p-9f * fmaf(a.value, sigmoid.exp * s, a.slope);  // half of the act's slope, so it is below 1
  // Multiplying by slopes first where |dy| is large, and last where it is small, avoids over- and underflow.
  const bool large = fabsf(dy) >= 1;
  const float by_gate = product_in_order(dy, select(large, half, b.value), select(large, b.value, half));
  return {by_gate + by_gate, product_in_order(dy, select(large, b.slope, act), select(large, act, b.slope))};
}

}  // namespace single

// For float64. t is tanh(x / c). x / c may underflow where x does not.
template <typename T>
JITACT_INLINE T capped(T x, T c, T t) { return select(abs(x) < 0x1p-100 * c, x, c * t); }
// (1 - t)(1 + t), by the more accurate of two forms.
template <typename T>
JITACT_INLINE T tanh_slope(T q, T t) {
  return select(abs(t) < 0.7, fma(-t, t, 1), tanh_slope(q));
}

template <typename T>
JITACT_INLINE T capped_product(T gate, T up, T beta, T beta2) {
  if constexpr (std::is_same_v<T, Narrow>) {
    return narrow::capped_product(gate.v, up.v, beta.v, beta2.v);
  } else if constexpr (std::is_same_v<T, Single>) {
    return single::capped_product(gate.v, up.v, beta.v, beta2.v);
  } else {
    const T t = tanh(gate * one_over(beta)), t2 = tanh(up * one_over(beta2));
    return times_sigmoid(capped<T>(gate, beta, t), max(gate, -1000)) * select(beta2 == 0, up, capped<T>(up, beta2, t2));
  }
}

template <typename T>
JITACT_INLINE Many<T, 2> capped_gradients(T dy, T gate, T up, T beta, T beta2) {
  if constexpr (std::is_same_v<T, Narrow>) {
    const narrow::Gradients g = narrow::capped_gradients(dy.v, gate.v, up.v, beta.v, beta2.v);
    return {g.by_gate, g.by_up};
  } else if constexpr (std::is_same_v<T, Single>) {
    const single::Gradients g = single::capped_gradients(dy.v, gate.v, up.v, beta.v, beta2.v);
    return {g.by_gate, g.by_up};
  } else {
    const T q = gate * one_over(beta), t = tanh(q), q2 = up * one_over(beta2), t2 = tanh(q2);
    const T act = capped<T>(gate, beta, t), bound = max(gate, -1000);
    // sigmoid(-gate) in place of 1 - sigmoid(gate), which would cancel.
    const T slope = times_sigmoid(fma(act, sigmoid(-gate), tanh_slope<T>(q, t)), bound);
    const T by_gate = product<T>(dy, select(beta2 == 0, up, capped<T>(up, beta2, t2)), slope);
    return {by_gate, product<T>(dy, times_sigmoid(act, bound), select(beta2 == 0, 1, tanh_slope<T>(q2, t2)))};
  }
}

}  // namespace jitact

using jitact::capped_gradients;
using jitact::capped_product;
