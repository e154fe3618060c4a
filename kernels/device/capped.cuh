// What situ_glu is made of: c(x, b) = b tanh(x / b), which is x near 0 and b far out; c(x, 0) = x.
//
//   capped_product(gate, up, beta, beta2)         c(gate, beta) sigmoid(gate) c(up, beta2)
//   capped_gradients(dy, gate, up, beta, beta2)   its gradients by gate and by up
#pragma once

#include "gated.cuh"

namespace jitact {

// For 16 bits, where special functions and instructions are what limits a GPU.
namespace narrow {

// 1 / b for b > 0. A quotient has a slow path, and a reciprocal is 0 where b is above 2^126.
JITACT_INLINE float inverse(float b) {
#ifdef __CUDA_ARCH__
  const float r = ptx::rsqrt(b);
  return r * r;
#else
  return 1.0f / b;
#endif
}

// 2^t where narrow's own, which is of relative error 2^-18 on a CPU, would show: a slope that crosses 0 is a difference.
JITACT_INLINE float exp2_closely(float t) {
#ifdef __CUDA_ARCH__
  return exp2(t);
#else
  return single::exp(0.693147182f * t);
#endif
}

// c(x, b) = x P(u) / Q(u) with u = (x / b)^2, and |x / b| held where tanh is 1: relative error 1e-5. Several of these have one
// reciprocal together. `over` is scaled by 2^-8.
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
  // 1 + exp(-gate), scaled by 2^-16, as the numerators together are.
  const float divisor = exp2(fmaf(-kLog2e, gate, -16.0f)) + 0x1p-16f;
  return a.over * reciprocal(divisor * a.under * b.under) * b.over;
}

// c(x, b) times a power of two, and a quarter of its slope, which is r (1 - r) with r = 1 / (1 + exp(2 |x| / b)). |c| is
// b (1 - 2 r), and near 0 c is x times a function of the slope: relative error 6e-6.
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
  // With the slope first where dy is large, and c(up) where it is small, nothing overflows or vanishes on the way.
  const bool large = fabsf(dy) >= 1;
  const float half = dy * select(large, slope, b.value) * select(large, b.value, slope);
  return {half + half, dy * b.quarter * (a.value * s)};
}

}  // namespace narrow

// t is tanh(x / c). x / c may be too small for a T where x is not.
template <typename T>
JITACT_INLINE T capped(T x, T c, T t) { return select(abs(x) < 0x1p-100 * c, x, c * t); }
// (1 - t)(1 + t), by whichever form loses less.
template <typename T>
JITACT_INLINE T tanh_slope(T q, T t) {
  const T e = decay(2 * abs(q)), r = one_over_one_plus(e);
  return select(abs(t) < 0.7, fma(-t, t, 1), 4 * e * r * r);
}

template <typename T>
JITACT_INLINE T capped_product(T gate, T up, T beta, T beta2) {
  if constexpr (std::is_same_v<T, Narrow>) {
    return narrow::capped_product(gate.v, up.v, beta.v, beta2.v);
  } else {
    const bool tiny = abs(gate) < 0x1p-100 * beta, tiny2 = abs(up) < 0x1p-100 * beta2;
    const T s = times_sigmoid_closely<T>(select(tiny, 1, beta), max(gate, -1000));
    const T t = select(tiny, gate, tanh(quotient<T>(gate, beta)));
    const T q = quotient<T>(up, beta2), t2 = tanh(q);
    const T factor = select(beta2 == 0, 1, select(tiny2, 1, beta2)), of = select(beta2 == 0, up, select(tiny2, up, t2));
    // What rounding takes from the quotient changes the tanh by its slope.
    const T lost = fma(-q, beta2, up) * one_over(beta2) * fma(-t2, t2, 1);
    return product<T>(s, t, factor, of, select(beta2 == 0, 0, select(tiny2, 0, select(abs(q) < 16, lost, 0))));
  }
}

template <typename T>
JITACT_INLINE Many<T, 2> capped_gradients(T dy, T gate, T up, T beta, T beta2) {
  if constexpr (std::is_same_v<T, Narrow>) {
    const narrow::Gradients g = narrow::capped_gradients(dy.v, gate.v, up.v, beta.v, beta2.v);
    return {g.by_gate, g.by_up};
  } else {
    const T q = quotient<T>(gate, beta), t = tanh(q), q2 = quotient<T>(up, beta2), t2 = tanh(q2), bound = max(gate, -1000);
    // 1 - s is sigmoid(-gate), so that it does not cancel.
    const T slope = times_sigmoid(fma(capped<T>(gate, beta, t), sigmoid(-gate), tanh_slope<T>(q, t)), bound);
    const T by_gate = product<T>(dy, select(beta2 == 0, up, capped<T>(up, beta2, t2)), slope);
    const T act = times_sigmoid_closely<T>(capped<T>(gate, beta, t), bound);
    return {by_gate, product<T>(dy, act, select(beta2 == 0, 1, tanh_slope<T>(q2, t2)))};
  }
}

}  // namespace jitact

using jitact::capped_gradients;
using jitact::capped_product;
