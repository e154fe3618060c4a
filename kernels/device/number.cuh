// The number types that a kernel file's `T` stands for.
//
//   Double   what float64 tensors are computed in
//   Single   what float32 tensors are computed in
//   Narrow   what float16 and bfloat16 tensors are computed in: float registers, functions just accurate enough
//   Brain    Narrow, but in unfused builds a type of its own for bfloat16, as results are rounded on the way (rounded.cuh)
//   Dual<T>  a value and its derivative, which is how a kernel file that has no backward gets one
//
// A literal beside a T becomes a T, so `0.5 * x` is float arithmetic when T is Single and double arithmetic when T is
// Double; nothing is ever promoted behind the author's back.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __CUDACC__
#define JITACT_INLINE __host__ __device__ __forceinline__
#define JITACT_DEVICE __device__ __forceinline__
#define JITACT_UNROLL _Pragma("unroll")
#include "ptx.cuh"
#else
#define JITACT_INLINE inline __attribute__((always_inline))
#endif

// Marks a function of a kernel file: one definition serves every T, on the CPU and on the GPU.
#define ELEMENTWISE template <typename T> JITACT_INLINE

namespace jitact {

enum class Accuracy { full, narrow, brain };

// The number that has the bits of another of its size.
template <typename To, typename From>
JITACT_INLINE To bit_cast(From from) {
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// |x|. On the GPU, fabs takes a double-precision operation wherever its result is kept; this does not.
JITACT_INLINE double magnitude(double x) {
#ifdef __CUDA_ARCH__
  return __hiloint2double(__double2hiint(x) & 0x7fffffff, __double2loint(x));
#else
  return std::fabs(x);
#endif
}

template <typename V, Accuracy accuracy>
struct Real {
  using Value = V;
  V v;

  JITACT_INLINE Real() : v(0) {}
#ifndef JITACT_NO_CPU  // which a file for GPUs alone defines
  // Written out, so that `c ? a : b` of two variables is a choice of values, which g++ vectorises, and not of addresses.
  JITACT_INLINE constexpr Real(const Real& b) : v(b.v) {}
  JITACT_INLINE constexpr Real& operator=(const Real& b) { v = b.v; return *this; }
#endif
  template <typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>>
  JITACT_INLINE constexpr Real(N n) : v(static_cast<V>(n)) {}

  JITACT_INLINE Real operator-() const { return Real(-v); }
  JITACT_INLINE Real operator+() const { return *this; }
  JITACT_INLINE Real& operator+=(Real b) { v += b.v; return *this; }
  JITACT_INLINE Real& operator-=(Real b) { v -= b.v; return *this; }
  JITACT_INLINE Real& operator*=(Real b) { v *= b.v; return *this; }
  JITACT_INLINE Real& operator/=(Real b) { return *this = *this / b; }
  friend JITACT_INLINE Real operator+(Real a, Real b) { return Real(a.v + b.v); }
  friend JITACT_INLINE Real operator-(Real a, Real b) { return Real(a.v - b.v); }
  friend JITACT_INLINE Real operator*(Real a, Real b) { return Real(a.v * b.v); }
  friend JITACT_INLINE Real operator/(Real a, Real b) {
#if defined(__CUDA_ARCH__) && !defined(JITACT_UNFUSED)
    // One multiplication and one special-function instruction. Zero for |b| above 2^126: keep divisors below that.
    if constexpr (accuracy == Accuracy::narrow) return Real(__fdividef(a.v, b.v));
#endif
    return Real(a.v / b.v);
  }
  friend JITACT_INLINE bool operator<(Real a, Real b) { return a.v < b.v; }
  friend JITACT_INLINE bool operator<=(Real a, Real b) { return a.v <= b.v; }
  friend JITACT_INLINE bool operator>(Real a, Real b) { return a.v > b.v; }
  friend JITACT_INLINE bool operator>=(Real a, Real b) { return a.v >= b.v; }
  friend JITACT_INLINE bool operator==(Real a, Real b) { return a.v == b.v; }
  friend JITACT_INLINE bool operator!=(Real a, Real b) { return a.v != b.v; }

  // Unlike fminf and fmaxf, these give NaN when either argument is NaN, as torch's do.
  friend JITACT_INLINE Real min(Real a, Real b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if constexpr (std::is_same_v<V, float>) return Real(ptx::min(a.v, b.v));
#endif
    const V r = b.v < a.v ? b.v : a.v;
    return Real(b.v != b.v ? b.v : r);  // on values, one at a time: g++ vectorises that
  }
  friend JITACT_INLINE Real max(Real a, Real b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if constexpr (std::is_same_v<V, float>) return Real(ptx::max(a.v, b.v));
#endif
    const V r = b.v > a.v ? b.v : a.v;
    return Real(b.v != b.v ? b.v : r);  // on values, one at a time: g++ vectorises that
  }
  // x held between lo and hi; NaN stays NaN, also where a bound is NaN.
  friend JITACT_INLINE Real clamp(Real x, Real lo, Real hi) { return min(max(x, lo), hi); }
  friend JITACT_INLINE Real abs(Real x) {
    if constexpr (std::is_same_v<V, float>) return Real(fabsf(x.v));
    return Real(magnitude(x.v));
  }
  // |x| and max(x, -0), of functions that are smooth at 0 though they are written in these: to Dual, 0 is right of 0.
  friend JITACT_INLINE Real folded(Real x) { return abs(x); }
  friend JITACT_INLINE Real right_part(Real x) { return max(x, Real(-0.0)); }
  friend JITACT_INLINE Real copysign(Real x, Real sign) {
    if constexpr (std::is_same_v<V, float>) return Real(copysignf(x.v, sign.v));
    return Real(::copysign(x.v, sign.v));
  }
  friend JITACT_INLINE bool isnan(Real x) { return x.v != x.v; }
  // a * b + c, rounded once.
  friend JITACT_INLINE Real fma(Real a, Real b, Real c) {
    if constexpr (std::is_same_v<V, float>) return Real(fmaf(a.v, b.v, c.v));
    return Real(::fma(a.v, b.v, c.v));
  }
};

using Double = Real<double, Accuracy::full>;
using Single = Real<float, Accuracy::full>;
using Narrow = Real<float, Accuracy::narrow>;
#ifdef JITACT_UNFUSED
using Brain = Real<float, Accuracy::brain>;
#define JITACT_BRAIN(...) __VA_ARGS__  // what is needed where Brain is a type of its own
#else
using Brain = Narrow;
#define JITACT_BRAIN(...)
#endif

// A part of a derivative, by the chain rule. What does not vary has no part in it, also where the slope is infinite or NaN;
// where that is known when this is compiled, nothing is left of it.
template <typename T>
JITACT_INLINE T times_derivative(T slope, T derivative) { return derivative == 0 ? derivative : slope * derivative; }
// And divided by what it varies with.
template <typename T>
JITACT_INLINE T derivative_over(T derivative, T divisor) { return derivative == 0 ? derivative : derivative / divisor; }

// value + derivative * epsilon, with epsilon^2 = 0. Comparisons look at the value alone.
template <typename T>
struct Dual {
  T value, derivative;

  JITACT_INLINE Dual() : value(0), derivative(0) {}
  template <typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>>
  JITACT_INLINE Dual(N n) : value(n), derivative(0) {}
  JITACT_INLINE Dual(T v) : value(v), derivative(0) {}
  JITACT_INLINE Dual(T v, T d) : value(v), derivative(d) {}

  JITACT_INLINE Dual operator-() const { return {-value, -derivative}; }
  JITACT_INLINE Dual operator+() const { return *this; }
  JITACT_INLINE Dual& operator+=(Dual b) { return *this = *this + b; }
  JITACT_INLINE Dual& operator-=(Dual b) { return *this = *this - b; }
  JITACT_INLINE Dual& operator*=(Dual b) { return *this = *this * b; }
  JITACT_INLINE Dual& operator/=(Dual b) { return *this = *this / b; }
  friend JITACT_INLINE Dual operator+(Dual a, Dual b) { return {a.value + b.value, a.derivative + b.derivative}; }
  friend JITACT_INLINE Dual operator-(Dual a, Dual b) { return {a.value - b.value, a.derivative - b.derivative}; }
  friend JITACT_INLINE Dual operator*(Dual a, Dual b) {
    return {a.value * b.value, times_derivative(b.value, a.derivative) + times_derivative(a.value, b.derivative)};
  }
  friend JITACT_INLINE Dual operator/(Dual a, Dual b) {
    const T q = a.value / b.value, d = a.derivative - times_derivative(q, b.derivative);
    return {q, derivative_over(d, b.value)};
  }
  // A literal has no derivative.
  template <typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>>
  friend JITACT_INLINE Dual operator+(Dual a, N n) { return {a.value + n, a.derivative}; }
  template <typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>>
  friend JITACT_INLINE Dual operator+(N n, Dual a) { return {n + a.value, a.derivative}; }
  template <typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>>
  friend JITACT_INLINE Dual operator-(Dual a, N n) { return {a.value - n, a.derivative}; }
  template <typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>>
  friend JITACT_INLINE Dual operator-(N n, Dual a) { return {n - a.value, -a.derivative}; }
  template <typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>>
  friend JITACT_INLINE Dual operator*(Dual a, N n) { return {a.value * n, a.derivative * n}; }
  template <typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>>
  friend JITACT_INLINE Dual operator*(N n, Dual a) { return {n * a.value, n * a.derivative}; }
  template <typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>>
  friend JITACT_INLINE Dual operator/(Dual a, N n) { return {a.value / n, a.derivative / n}; }
  friend JITACT_INLINE bool operator<(Dual a, Dual b) { return a.value < b.value; }
  friend JITACT_INLINE bool operator<=(Dual a, Dual b) { return a.value <= b.value; }
  friend JITACT_INLINE bool operator>(Dual a, Dual b) { return a.value > b.value; }
  friend JITACT_INLINE bool operator>=(Dual a, Dual b) { return a.value >= b.value; }
  friend JITACT_INLINE bool operator==(Dual a, Dual b) { return a.value == b.value; }
  friend JITACT_INLINE bool operator!=(Dual a, Dual b) { return a.value != b.value; }

  friend JITACT_INLINE Dual min(Dual a, Dual b) { return a.value < b.value || isnan(a.value) ? a : b; }
  friend JITACT_INLINE Dual max(Dual a, Dual b) { return a.value > b.value || isnan(a.value) ? a : b; }
  friend JITACT_INLINE Dual clamp(Dual x, Dual lo, Dual hi) { return min(max(x, lo), hi); }
  friend JITACT_INLINE Dual abs(Dual x) {
    return {abs(x.value), times_derivative(x.value > T(0) ? T(1) : x.value < T(0) ? T(-1) : x.value, x.derivative)};
  }
  friend JITACT_INLINE Dual folded(Dual x) { return {folded(x.value), x.value < 0 ? -x.derivative : x.derivative}; }
  friend JITACT_INLINE Dual right_part(Dual x) { return {right_part(x.value), x.value < 0 ? T(0) : x.derivative}; }
  friend JITACT_INLINE Dual copysign(Dual magnitude, Dual sign) {
    const Dual a = abs(magnitude);
    return {copysign(a.value, sign.value), times_derivative(copysign(T(1), sign.value), a.derivative)};
  }
  friend JITACT_INLINE bool isnan(Dual x) { return isnan(x.value); }
  friend JITACT_INLINE Dual fma(Dual a, Dual b, Dual c) { return a * b + c; }
};

// A derivative that is 0 here may vary all the same.
template <typename T>
JITACT_INLINE Dual<T> times_derivative(Dual<T> slope, Dual<T> derivative) {
  return {times_derivative(slope.value, derivative.value),
          times_derivative(slope.value, derivative.derivative) + times_derivative(slope.derivative, derivative.value)};
}
template <typename T>
JITACT_INLINE Dual<T> derivative_over(Dual<T> derivative, Dual<T> divisor) {
  const T q = derivative_over(derivative.value, divisor.value);
  return {q, derivative_over(derivative.derivative - times_derivative(q, divisor.derivative), divisor.value)};
}

}  // namespace jitact
