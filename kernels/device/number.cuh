// The number types that `T` in a kernel file may be.
//
//   Double   computes float64 tensors
//   Single   computes float32 tensors
//   Narrow   computes float16 and bfloat16 tensors: float registers, functions just accurate enough
//   Brain    Narrow; in unfused builds a distinct type for bfloat16, as intermediate results are rounded (rounded.cuh)
//   Dual<T>  a value and its derivative: derives a backward for kernel files without one
//
// A literal combined with a T becomes a T, so `0.5 * x` is float arithmetic when T is Single and double arithmetic when T is
// Double; nothing is promoted implicitly.
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

// Whether a value is known when compiled. nvcc cannot tell: there, true.
#ifdef __CUDACC__
namespace jitact { JITACT_INLINE constexpr bool is_known(int) { return true; } }
#else
namespace jitact { JITACT_INLINE constexpr bool is_known(int value) { return __builtin_constant_p(value); } }
#endif

// Marks a function of a kernel file: one definition serves every T, on the CPU and on the GPU.
#define ELEMENTWISE template <typename T> JITACT_INLINE

namespace jitact {

enum class Accuracy { full, narrow, brain };

// The bits of a value as another type of the same size.
template <typename To, typename From>
JITACT_INLINE To bit_cast(From from) {
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// condition ? a : b, with both computed. On a CPU by bits: where a choice depends on another one, or gives a constant that
// another depends on, gcc makes branches of them, and does not vectorise the loop.
template <typename V>
JITACT_INLINE V select_bits(bool condition, V a, V b) {
#ifdef __CUDA_ARCH__
  return condition ? a : b;
#else
  using Word = std::conditional_t<sizeof(V) == 4, uint32_t, uint64_t>;
  const Word mask = -Word(condition);  // all bits, or none
  return bit_cast<V>((bit_cast<Word>(a) & mask) | (bit_cast<Word>(b) & ~mask));
#endif
}

// |x|. On the GPU, fabs costs a double-precision instruction where its result is stored in a register; this does not.
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
#ifndef JITACT_NO_CPU  // defined by files exported for GPUs only
  // Not defaulted, so that `c ? a : b` of two variables selects values, which g++ vectorises, and not addresses.
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

  // Unlike fminf and fmaxf, NaN if either argument is NaN, as in torch.
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
  // NaN if any argument is NaN.
  friend JITACT_INLINE Real clamp(Real x, Real lo, Real hi) { return min(max(x, lo), hi); }
  friend JITACT_INLINE Real abs(Real x) {
    if constexpr (std::is_same_v<V, float>) return Real(fabsf(x.v));
    return Real(magnitude(x.v));
  }
  // |x| and max(x, -0) for use in functions that are smooth at 0: Dual's derivatives at 0 are those for x > 0.
  friend JITACT_INLINE Real folded(Real x) { return abs(x); }
  friend JITACT_INLINE Real right_part(Real x) { return max(x, Real(-0.0)); }
  friend JITACT_INLINE Real copysign(Real x, Real sign) {
    if constexpr (std::is_same_v<V, float>) return Real(copysignf(x.v, sign.v));
    return Real(::copysign(x.v, sign.v));
  }
  friend JITACT_INLINE Real select_bits(bool condition, Real a, Real b) { return Real(jitact::select_bits(condition, a.v, b.v)); }
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
#define JITACT_BRAIN(...) __VA_ARGS__  // code needed only where Brain is a distinct type
#else
using Brain = Narrow;
#define JITACT_BRAIN(...)
#endif

// A term of the chain rule: 0 where the derivative is 0, even if the slope is infinite or NaN.
template <typename T>
JITACT_INLINE T times_derivative(T slope, T derivative) { return derivative == 0 ? derivative : slope * derivative; }
// The same for a division.
template <typename T>
JITACT_INLINE T derivative_over(T derivative, T divisor) { return derivative == 0 ? derivative : derivative / divisor; }

// How a dual number varies, as it is known when compiled: but not after `condition ? a : b`, which takes all of a or of b.
enum class Varies {
  never = 0,      // constant: the derivative is 0
  always = 1,
  by_choice = 3,  // the derivative may be 0 because a constant was chosen, which may be infinite or NaN
};
// Of what is computed from two numbers.
JITACT_INLINE constexpr Varies joined(Varies a, Varies b) { return Varies(int(a) | int(b)); }
// Of a choice between two numbers: known even if it is not known of both.
JITACT_INLINE constexpr Varies either(Varies a, Varies b) {
  return a == Varies::always && b == Varies::always ? Varies::always : Varies::by_choice;
}
// gcc does not vectorise a loop in which terms are left out for some elements only, so it has to be known of all.
JITACT_INLINE constexpr bool is_constant(Varies varies) { return is_known(int(varies)) && varies == Varies::never; }

// A term of the chain rule by a slope that is finite for every finite value of the dual number.
template <typename T>
JITACT_INLINE T times_derivative(T slope, T derivative, Varies varies) {
  if (is_constant(varies)) return derivative;
  return is_known(int(varies)) && varies != Varies::by_choice ? slope * derivative : times_derivative(slope, derivative);
}
// The sum of two terms, and their difference. A constant's term is left out: adding 0 is an instruction, as -0 + 0 is not -0.
template <typename T>
JITACT_INLINE T sum_of(T a, Varies of_a, T b, Varies of_b) { return is_constant(of_b) ? a : is_constant(of_a) ? b : a + b; }
template <typename T>
JITACT_INLINE T difference_of(T a, Varies of_a, T b, Varies of_b) {
  return is_constant(of_b) ? a : is_constant(of_a) ? -b : a - b;
}

// A number without its derivative.
template <typename T>
JITACT_INLINE T as_constant(T x) { return x; }

// value + derivative * epsilon, with epsilon^2 = 0. Comparisons compare values only. Terms of a derivative are not named: where
// a chosen variable ends, gcc keeps a mark, and does not vectorise a loop with conditions.
template <typename T>
struct Dual {
  T value, derivative;
  Varies varies;

  JITACT_INLINE Dual() : value(0), derivative(0), varies(Varies::never) {}
  template <typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>>
  JITACT_INLINE Dual(N n) : value(n), derivative(0), varies(Varies::never) {}
  JITACT_INLINE Dual(T v) : value(v), derivative(0), varies(Varies::never) {}
  JITACT_INLINE Dual(T v, T d, Varies varies = Varies::always) : value(v), derivative(d), varies(varies) {}

  JITACT_INLINE Dual operator-() const { return {-value, -derivative, varies}; }
  JITACT_INLINE Dual operator+() const { return *this; }
  JITACT_INLINE Dual& operator+=(Dual b) { return *this = *this + b; }
  JITACT_INLINE Dual& operator-=(Dual b) { return *this = *this - b; }
  JITACT_INLINE Dual& operator*=(Dual b) { return *this = *this * b; }
  JITACT_INLINE Dual& operator/=(Dual b) { return *this = *this / b; }
  friend JITACT_INLINE Dual operator+(Dual a, Dual b) {
    return {a.value + b.value, sum_of(a.derivative, a.varies, b.derivative, b.varies), joined(a.varies, b.varies)};
  }
  friend JITACT_INLINE Dual operator-(Dual a, Dual b) {
    return {a.value - b.value, difference_of(a.derivative, a.varies, b.derivative, b.varies), joined(a.varies, b.varies)};
  }
  friend JITACT_INLINE Dual operator*(Dual a, Dual b) {
    return {a.value * b.value,
            sum_of(times_derivative(b.value, a.derivative), a.varies, times_derivative(a.value, b.derivative), b.varies),
            joined(a.varies, b.varies)};
  }
  friend JITACT_INLINE Dual operator/(Dual a, Dual b) {
    const T q = a.value / b.value;
    return {q, derivative_over(difference_of(a.derivative, a.varies, times_derivative(q, b.derivative), b.varies), b.value),
            joined(a.varies, b.varies)};
  }
  // A literal has no derivative.
  template <typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>>
  friend JITACT_INLINE Dual operator+(Dual a, N n) { return {a.value + n, a.derivative, a.varies}; }
  template <typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>>
  friend JITACT_INLINE Dual operator+(N n, Dual a) { return {n + a.value, a.derivative, a.varies}; }
  template <typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>>
  friend JITACT_INLINE Dual operator-(Dual a, N n) { return {a.value - n, a.derivative, a.varies}; }
  template <typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>>
  friend JITACT_INLINE Dual operator-(N n, Dual a) { return {n - a.value, -a.derivative, a.varies}; }
  template <typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>>
  friend JITACT_INLINE Dual operator*(Dual a, N n) { return {a.value * n, a.derivative * n, a.varies}; }
  template <typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>>
  friend JITACT_INLINE Dual operator*(N n, Dual a) { return {n * a.value, n * a.derivative, a.varies}; }
  template <typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>>
  friend JITACT_INLINE Dual operator/(Dual a, N n) { return {a.value / n, a.derivative / n, a.varies}; }
  friend JITACT_INLINE bool operator<(Dual a, Dual b) { return a.value < b.value; }
  friend JITACT_INLINE bool operator<=(Dual a, Dual b) { return a.value <= b.value; }
  friend JITACT_INLINE bool operator>(Dual a, Dual b) { return a.value > b.value; }
  friend JITACT_INLINE bool operator>=(Dual a, Dual b) { return a.value >= b.value; }
  friend JITACT_INLINE bool operator==(Dual a, Dual b) { return a.value == b.value; }
  friend JITACT_INLINE bool operator!=(Dual a, Dual b) { return a.value != b.value; }

  friend JITACT_INLINE Dual select_bits(bool condition, Dual a, Dual b) {
    return {select_bits(condition, a.value, b.value), select_bits(condition, a.derivative, b.derivative),
            either(a.varies, b.varies)};
  }
  friend JITACT_INLINE Dual min(Dual a, Dual b) { return select_bits((a.value < b.value) | isnan(a.value), a, b); }
  friend JITACT_INLINE Dual max(Dual a, Dual b) { return select_bits((a.value > b.value) | isnan(a.value), a, b); }
  friend JITACT_INLINE Dual clamp(Dual x, Dual lo, Dual hi) { return min(max(x, lo), hi); }
  friend JITACT_INLINE Dual as_constant(Dual x) { return Dual(as_constant(x.value)); }
  friend JITACT_INLINE Dual abs(Dual x) {
    return {abs(x.value),
            times_derivative(x.value > T(0) ? T(1) : x.value < T(0) ? T(-1) : as_constant(x.value), x.derivative), x.varies};
  }
  friend JITACT_INLINE Dual folded(Dual x) { return {folded(x.value), x.value < 0 ? -x.derivative : x.derivative, x.varies}; }
  friend JITACT_INLINE Dual right_part(Dual x) { return {right_part(x.value), x.value < 0 ? T(0) : x.derivative, x.varies}; }
  friend JITACT_INLINE Dual copysign(Dual magnitude, Dual sign) {
    const Dual a = abs(magnitude);
    return {copysign(a.value, sign.value), times_derivative(copysign(T(1), sign.value), a.derivative), a.varies};
  }
  friend JITACT_INLINE bool isnan(Dual x) { return isnan(x.value); }
  friend JITACT_INLINE Dual fma(Dual a, Dual b, Dual c) { return a * b + c; }
};

// For second derivatives: a first derivative that is 0 at this point may have a derivative other than 0.
template <typename T>
JITACT_INLINE Dual<T> times_derivative(Dual<T> slope, Dual<T> derivative) {
  return {times_derivative(slope.value, derivative.value),
          sum_of(times_derivative(slope.value, derivative.derivative), derivative.varies,
                 times_derivative(slope.derivative, derivative.value), slope.varies),
          joined(derivative.varies, slope.varies)};
}
template <typename T>
JITACT_INLINE Dual<T> derivative_over(Dual<T> derivative, Dual<T> divisor) {
  const T q = derivative_over(derivative.value, divisor.value);
  return {q,
          derivative_over(difference_of(derivative.derivative, derivative.varies, times_derivative(q, divisor.derivative),
                                        divisor.varies),
                          divisor.value),
          joined(derivative.varies, divisor.varies)};
}

}  // namespace jitact
