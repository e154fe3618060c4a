// Makes the functions of a kernel file available to another: silu.cu's are silu_::forward and silu_::backward. They take
// literals and operands as well as T, and return T.
//
// The derivative of a used forward is the used backward, not that of its arithmetic, so that its care about tails and
// overflow applies to derived gradients as well. Only by arguments for which the used file has no gradient, such as its
// numbers, the derivative is that of the arithmetic.
#pragma once

#include "elementwise.cuh"

namespace jitact::uses {

template <typename A>
concept HasDerivative = requires(const A& a) { a.derivative; };

// An argument without its derivative; literals have none.
template <typename A>
JITACT_INLINE auto value(const A& a) {
  if constexpr (HasDerivative<A>) return a.value;
  else return a;
}
template <typename T>
JITACT_INLINE Random<T> value(const Random<Dual<T>>& random) { return random.number(); }

// The T of the arguments: the type of their sum.
template <typename A> A term(const A&);
template <typename T> int term(const Random<T>&);
template <typename... A> using NumberOf = decltype((0 + ... + term(std::declval<A>())));

// The contribution of an argument without gradient, or of a literal, to a derivative.
struct Nothing {
  template <typename T> friend JITACT_INLINE T operator+(Nothing, T t) { return t; }
  template <typename T> friend JITACT_INLINE T operator+(T t, Nothing) { return t; }
  friend JITACT_INLINE Nothing operator+(Nothing, Nothing) { return {}; }
};

template <typename T, int n> JITACT_INLINE T get(const Many<T, n>& slopes, int g) { return slopes.of[g]; }
template <typename T> JITACT_INLINE T get(T slope, int) { return slope; }

// The contribution of an argument by the used file's own gradients.
template <int gradient, typename S, typename A>
JITACT_INLINE auto written(const S& slopes, const A& a) {
  if constexpr (HasDerivative<A> && gradient >= 0) return times_derivative(get(slopes, gradient), a.derivative);
  else return Nothing();
}
// The argument without its derivative if the used file has a gradient for it.
template <int gradient, typename A>
JITACT_INLINE auto unwritten(const A& a) {
  if constexpr (gradient >= 0) return value(a);
  else return a;
}
template <int gradient, typename T>
JITACT_INLINE auto unwritten(const Channel<Dual<T>>& a) {
  if constexpr (gradient >= 0) return Channel<Dual<T>>(Dual<T>(T(a.value)));
  else return a;
}

template <typename Used, typename... A> JITACT_INLINE auto forward(A... a);

// The value is computed by the used forward, so that for a T that is dual itself its derivative is the used backward too.
template <typename Used, typename T, typename... A, size_t... K>
JITACT_INLINE Dual<T> one_function(std::index_sequence<K...>, A... a) {
  const T y = forward<Used>(value(a)...);
  const auto slopes = Used::template backward<T>(T(1), value(a)...);
  const auto derivative = (Nothing() + ... + written<Used::gradients[K]>(slopes, a));
  if constexpr ((... || (HasDerivative<A> && Used::gradients[K] < 0)))
    return {y, derivative + Used::template forward<Dual<T>>(unwritten<Used::gradients[K]>(a)...).derivative, Varies::by_choice};
  else return {y, derivative, Varies::by_choice};
}

template <typename Used, typename... A>
JITACT_INLINE auto forward(A... a) {
  using T = NumberOf<A...>;
  static_assert(!std::is_arithmetic_v<T>, "a function of another kernel file wants a number of T among its arguments");
  if constexpr (HasDerivative<T> && Used::has_slope)
    return one_function<Used, decltype(T::value)>(std::index_sequence_for<A...>(), a...);
  else return T(Used::template forward<T>(a...));
}
template <typename Used, typename... A>
JITACT_INLINE auto backward(A... a) { return Used::template backward<NumberOf<A...>>(a...); }

// An argument of a file whose gradients are derived, as a dual number; `wanted` marks the one to differentiate by.
template <typename T, bool wanted, typename A>
JITACT_INLINE Dual<T> dual(const A& a) { return Dual<T>(T(a), T(wanted ? 1 : 0), wanted ? Varies::always : Varies::never); }
template <typename T, bool, typename R>
JITACT_INLINE Random<Dual<T>> dual(const Random<R>& a) { return Random<Dual<T>>(a); }

template <typename Used, typename T, int g, size_t... K, typename... A>
JITACT_INLINE T derived_slope(std::index_sequence<K...>, A... a) {
  return Used::template forward<Dual<T>>(dual<T, Used::gradients[K] == g>(a)...).derivative;
}
template <typename Used, typename T, size_t... G, typename... A>
JITACT_INLINE auto derived_backward(std::index_sequence<G...>, T dy, A... a) {
  constexpr std::index_sequence_for<A...> all;
  if constexpr (sizeof...(G) == 1) return dy * derived_slope<Used, T, 0>(all, a...);
  else return Many<T, sizeof...(G)>{dy * derived_slope<Used, T, G>(all, a...)...};
}

}  // namespace jitact::uses

// For the namespace of a used file, whose text is in `file`: how many gradients it has and how they are computed, and for each
// argument of forward the index of its gradient, or -1.
#define JITACT_USED(count, slope, ...)                                                                                   \
  struct Used {                                                                                                          \
    static constexpr int gradients[] = {__VA_ARGS__};                                                                    \
    template <typename T, typename... A>                                                                                 \
    static JITACT_INLINE T forward(A... a) { return file::forward<T>(a...); }                                     \
    JITACT_SLOPE_##slope(count)                                                                                          \
  };                                                                                                                     \
  template <typename... A> JITACT_INLINE auto forward(A... a) { return jitact::uses::forward<Used>(a...); }       \
  template <typename... A> JITACT_INLINE auto backward(A... a) { return jitact::uses::backward<Used>(a...); }

#define JITACT_SLOPE_own(count)                                                                                          \
  static constexpr bool has_slope = true;                                                                                \
  template <typename T, typename... A>                                                                                   \
  static JITACT_INLINE auto backward(A... a) { return file::backward<T>(a...); }

#define JITACT_SLOPE_bit(count)                                                                                          \
  static constexpr bool has_slope = true;                                                                                \
  template <typename T, typename D, typename X, typename... A>                                                           \
  static JITACT_INLINE auto backward(D dy, X x, A... a) {                                           \
    return file::backward_from_bit<T>(dy, file::keeps<T>(x, a...), a...);                                                \
  }

#define JITACT_SLOPE_derived(count)                                                                                      \
  static constexpr bool has_slope = false;                                                                               \
  template <typename T, typename D, typename... A>                                                                       \
  static JITACT_INLINE auto backward(D dy, A... a) {                                                       \
    return jitact::uses::derived_backward<Used, T>(std::make_index_sequence<count>(), T(dy), a...);                      \
  }
