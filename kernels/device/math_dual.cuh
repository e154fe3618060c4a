// The functions of math.cuh for dual numbers: the chain rule.
#pragma once

#include "number.cuh"

namespace jitact {

// `slope` is the derivative of f, in terms of x and y = f(x).
#define JITACT_CHAIN(f, slope)                                            \
  template <typename T>                                                   \
  JITACT_INLINE Dual<T> f(Dual<T> dual) {                                 \
    [[maybe_unused]] const T x = dual.value, y = f(x);                    \
    return {y, times_derivative(T(slope), dual.derivative), dual.varies}; \
  }
// The same where the slope is finite for every finite x, so that a derivative of 0 needs no care unless x may be chosen.
#define JITACT_CHAIN_FINITE(f, slope)                                                  \
  template <typename T>                                                                \
  JITACT_INLINE Dual<T> f(Dual<T> dual) {                                              \
    [[maybe_unused]] const T x = dual.value, y = f(x);                                 \
    return {y, times_derivative(T(slope), dual.derivative, dual.varies), dual.varies}; \
  }
// The same of a function that has a form for use beside its slope.
#define JITACT_CHAIN_FINITE_BESIDE(f, slope)                                           \
  template <typename T>                                                                \
  JITACT_INLINE Dual<T> f(Dual<T> dual) {                                              \
    [[maybe_unused]] const T x = dual.value, y = f##_beside_slope(x);                  \
    return {y, times_derivative(T(slope), dual.derivative, dual.varies), dual.varies}; \
  }                                                                                    \
  template <typename T>                                                                \
  JITACT_INLINE Dual<T> f##_beside_slope(Dual<T> dual) { return f(dual); }
// A step function, which is constant almost everywhere.
#define JITACT_STEPS(f) \
  template <typename T> \
  JITACT_INLINE Dual<T> f(Dual<T> dual) { return f(dual.value); }

JITACT_CHAIN(exp, y)
JITACT_CHAIN(exp2, y * 0.6931471805599453)
JITACT_CHAIN(expm1, exp(x))
JITACT_CHAIN(log, 1 / x)
JITACT_CHAIN(log2, 1.4426950408889634 / x)
JITACT_CHAIN(log10, 0.4342944819032518 / x)
JITACT_CHAIN(log1p, 1 / (1 + x))
JITACT_CHAIN(decay, -y)
JITACT_CHAIN(log1p_unit, 1 / (1 + x))
JITACT_CHAIN(reciprocal, -y * y)
JITACT_CHAIN(one_over, -y * y)
JITACT_CHAIN(root_of, 1 / (2 * y))
JITACT_CHAIN(sqrt, 1 / (2 * y))
JITACT_CHAIN(square_root, 1 / (2 * y))
JITACT_CHAIN(rsqrt, -y / (2 * x))
JITACT_CHAIN(cbrt, 1 / (3 * y * y))
JITACT_CHAIN_FINITE(sin, cos(x))
JITACT_CHAIN_FINITE(cos, -sin(x))
JITACT_CHAIN(tan, 1 + y * y)
JITACT_CHAIN(asin, rsqrt((1 - x) * (1 + x)))
JITACT_CHAIN(acos, -rsqrt((1 - x) * (1 + x)))
JITACT_CHAIN_FINITE(atan, 1 / (1 + x * x))
JITACT_CHAIN(sinh, cosh(x))
JITACT_CHAIN(cosh, sinh(x))
JITACT_CHAIN_FINITE_BESIDE(tanh, tanh_slope(x))
JITACT_CHAIN_FINITE(tanh_slope, -2 * y * tanh(x))
JITACT_CHAIN_FINITE(asinh, abs(x) < 0x1p60 ? rsqrt(x * x + 1) : 1 / abs(x))
JITACT_CHAIN(acosh, rsqrt(x - 1) * rsqrt(x + 1))
JITACT_CHAIN(atanh, 1 / ((1 - x) * (1 + x)))
JITACT_STEPS(floor)
JITACT_STEPS(ceil)
JITACT_STEPS(trunc)
JITACT_STEPS(round)
JITACT_STEPS(rint)
JITACT_CHAIN_FINITE(erf, 1.1283791670955126 * exp_minus_square(x))
JITACT_CHAIN_FINITE(erfc, -1.1283791670955126 * exp_minus_square(x))
JITACT_CHAIN_FINITE(exp_minus_square, x * y * -2)
JITACT_CHAIN_FINITE(sigmoid, y * sigmoid(-x))
JITACT_CHAIN_FINITE(softplus, sigmoid(x))
JITACT_CHAIN_FINITE(normal_pdf, -x * y)
JITACT_CHAIN_FINITE(normal_cdf, normal_pdf(x))
JITACT_CHAIN_FINITE(normal_tail, -normal_pdf(x))
JITACT_CHAIN(times_normal_tail, times_normal_tail_slope(x))
JITACT_CHAIN_FINITE(times_normal_tail_slope, x * (x * normal_pdf(x)) - 2 * normal_pdf(x))
JITACT_CHAIN_FINITE(x_minus_tanh, tanh(x) * tanh(x))

#undef JITACT_CHAIN
#undef JITACT_CHAIN_FINITE
#undef JITACT_CHAIN_FINITE_BESIDE
#undef JITACT_STEPS

// The derivative of tanh(softplus(x)).
template <typename T>
JITACT_INLINE T tanh_softplus_slope(T x) {
  const T t = times_tanh_softplus(T(1), x);
  return (1 - t) * (1 + t) * sigmoid(x);
}

// The second derivative of x sigmoid(x).
template <typename T>
JITACT_INLINE T sigmoid_curve(T x) {
  const T s = sigmoid(x), rest = sigmoid(-x);
  return s * rest * (2 + x * (rest - s));
}

// `by_first` and `by_second` are the partial derivatives of f, in terms of a, b and y = f(a, b). Either argument may be a
// plain number.
#define JITACT_CHAIN_2(f, by_first, by_second)                                            \
  template <typename T>                                                                   \
  JITACT_INLINE Dual<T> f(Dual<T> first, Dual<T> second) {                                \
    [[maybe_unused]] const T a = first.value, b = second.value, y = f(a, b);              \
    return {y,                                                                            \
            sum_of(times_derivative(T(by_first), first.derivative), first.varies,         \
                   times_derivative(T(by_second), second.derivative), second.varies),     \
            joined(first.varies, second.varies)};                                         \
  }                                                                                       \
  template <typename T, typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>> \
  JITACT_INLINE Dual<T> f(Dual<T> first, N second) { return f(first, Dual<T>(second)); }  \
  template <typename T, typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>> \
  JITACT_INLINE Dual<T> f(N first, Dual<T> second) { return f(Dual<T>(first), second); }

JITACT_CHAIN_2(pow, times_derivative(pow(a, b - 1), b), a == 0 && b >= 0 ? T(0) : y * log(a))
template <typename T>
JITACT_INLINE Dual<T> pow(Dual<T> x, int n) { return whole_power(x, n); }
JITACT_CHAIN_2(fmod, T(1), -trunc(a / b))
JITACT_CHAIN_2(atan2, a * a + b * b == 0 ? T(0) : b / (a * a + b * b), a * a + b * b == 0 ? T(0) : -a / (a * a + b * b))
JITACT_CHAIN_2(hypot, a / y, b / y)
JITACT_CHAIN_2(times_sigmoid, sigmoid(b), y * sigmoid(-b))
JITACT_CHAIN_2(times_tanh_softplus, times_tanh_softplus(T(1), b), tanh_softplus_slope(b) * a)
JITACT_CHAIN_2(x_times_sigmoid, x_times_sigmoid_slope(a, b), a * a * sigmoid(a * b) * sigmoid(-a * b))
JITACT_CHAIN_2(x_times_sigmoid_slope, sigmoid_curve(a * b) * b, sigmoid_curve(a * b) * a)
JITACT_CHAIN_2(x_plus_sin_squared, x_plus_sin_squared_slope(a, b), (a * sin(2 * a * b) - (y - a)) / b)
JITACT_CHAIN_2(x_plus_sin_squared_slope, 2 * b * cos(2 * a * b), 2 * a * cos(2 * a * b))

#undef JITACT_CHAIN_2

template <typename T>
JITACT_INLINE SinCos<Dual<T>> sincos(Dual<T> x) { return {sin(x), cos(x)}; }

template <typename T>
JITACT_INLINE Dual<T> select(bool condition, Dual<T> a, std::type_identity_t<Dual<T>> b) {
  return {select(condition, a.value, b.value), select(condition, a.derivative, b.derivative), either(a.varies, b.varies)};
}
template <typename T, typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>>
JITACT_INLINE Dual<T> select(bool condition, N a, Dual<T> b) { return select(condition, Dual<T>(a), b); }

template <typename T>
JITACT_INLINE Dual<T> normal_cdf(Dual<T> x, Dual<T> mu, Dual<T> sigma) {
  const Dual<T> by_z = normal_cdf((x - mu) / sigma);
  return {normal_cdf(x.value, mu.value, sigma.value), by_z.derivative, by_z.varies};
}

// The rounding error of a literal has no derivative.
template <typename T>
JITACT_INLINE Dual<T> rest(Dual<T> rounded, double x) { return rest(rounded.value, x); }

template <typename T>
JITACT_INLINE Dual<T> x_times_sigmoid(Dual<T> x, Dual<T> t, Dual<T> w, Dual<T> low) {
  const Dual<T> a = select(x < -t, -t, x);
  const Dual<T> y = times_sigmoid(a, a * (w + low) * 0.6931471805599453);
  return {x_times_sigmoid(x.value, t.value, w.value, low.value), y.derivative, y.varies};
}

template <typename T>
JITACT_INLINE Dual<T> times_sigmoid(Dual<T> a, bool left, Dual<T> t, Dual<T> low) {
  const Dual<T> y = times_sigmoid(a, left ? -(t + low) : t + low);
  return {times_sigmoid(a.value, left, t.value, low.value), y.derivative, y.varies};
}

}  // namespace jitact
