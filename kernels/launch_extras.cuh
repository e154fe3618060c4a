// The loops for kernel files whose functions get extras: weights, as weights.cuh says, or a random number, as random.cuh
// says. They differ from those of launch.cuh in one more argument for each extra, and in the sums that make the gradients of
// weights.
#pragma once

#include "launch.cuh"

namespace jitact {

#ifdef JITACT_WEIGHTS
constexpr int kExtras = JITACT_WEIGHTS;
#else
constexpr int kExtras = 1;
#endif

// Calls f(extras..., params...), where extra(k) is the extra number k.
template <typename T, typename Extra, typename F, size_t... K, size_t... P>
JITACT_INLINE auto call_with(const F& f, const Extra& extra, const Params<T>& params, std::index_sequence<K...>,
                             std::index_sequence<P...>) {
  return f(extra(K)..., params.values[P]...);
}
template <typename T, typename Extra, typename F>
JITACT_INLINE auto call_with(const F& f, const Extra& extra, const Params<T>& params) {
#ifdef JITACT_RANDOM  // whose parameters shape the random number, and go no further
  return call_with<T>(f, extra, params, std::make_index_sequence<kExtras>(), std::index_sequence<>());
#else
  return call_with<T>(f, extra, params, std::make_index_sequence<kExtras>(), std::make_index_sequence<JITACT_PARAMS>());
#endif
}

// As launch.cuh's element, with extras.
template <Op op, typename T, typename Extra>
JITACT_INLINE T element_with(T a, T b, bool& bit, const Extra& extra, const Params<T>& params) {
  const auto apply = [&](auto... rest) {
    if constexpr (op != Op::backward) return element<op>(a, b, bit, rest...);
#ifdef JITACT_WEIGHTS
    else return backward(a, b, rest...);
#else
    else return backward_from_bit(a, keeps(b, rest...), rest...);
#endif
  };
  return call_with<T>(apply, extra, params);
}

// Calls f.template operator()<op>() for the operation of the call, except backward_weights.
template <typename F>
void dispatch_with_extras(Op op, const F& f) {
  switch (op) {
    case Op::forward: return f.template operator()<Op::forward>();
    case Op::backward: return f.template operator()<Op::backward>();
#ifdef JITACT_SAVES_BIT
    case Op::forward_bit: return f.template operator()<Op::forward_bit>();
    case Op::backward_from_bit: return f.template operator()<Op::backward_from_bit>();
#endif
    default: return;
  }
}

#ifdef JITACT_WEIGHTS
constexpr int kLearned = JITACT_LEARNED;

// Whether the kernel file has a prepare, and what its functions get in place of the weights, which may be Duals. (In a
// function, nvcc 13.0 answers some requires-expressions with parameter packs wrongly; in a concept, it does not.)
template <typename... T>
concept Prepares = requires(T&... w) { prepare(w...); };
template <typename T, size_t>
using Same = T;
template <typename T, size_t... K>
constexpr bool has_prepare(std::index_sequence<K...>) { return Prepares<Same<T, K>...>; }
template <typename T>
constexpr bool kPrepares = has_prepare<T>(std::make_index_sequence<JITACT_WEIGHTS>());

template <typename T, size_t... K>
JITACT_INLINE void prepare_weights(T* w, std::index_sequence<K...>) {
  prepare(w[K]...);
}
template <typename T>
JITACT_INLINE void prepare_weights(T* w) {
  if constexpr (kPrepares<T>) prepare_weights(w, std::make_index_sequence<JITACT_WEIGHTS>());
}
// Narrow's functions would do for 16 bits, but where terms cancel an error in a weight shows, and this is not done often.
JITACT_INLINE void prepare_weights(Narrow* w) {
  Single full[JITACT_WEIGHTS];
  for (int k = 0; k < JITACT_WEIGHTS; k++) full[k] = w[k].v;
  prepare_weights(full);
  for (int k = 0; k < JITACT_WEIGHTS; k++) w[k] = full[k].v;
}

// The derivative of what the functions get in place of weight k by weight k, given all weights as they are.
template <typename T>
JITACT_INLINE T prepare_slope(const T* weights, int k) {
  Dual<T> w[JITACT_WEIGHTS];
  for (int i = 0; i < JITACT_WEIGHTS; i++) w[i] = Dual<T>(weights[i], T(i == k ? 1 : 0));
  prepare_weights(w);
  T slope = 0;
  for (int i = 0; i < kLearned; i++) slope = i == k ? w[i].derivative : slope;
  return slope;
}

template <typename T, typename Extra>
JITACT_INLINE Gradients<T, kLearned> weight_gradients_with(T dy, T x, const Extra& extra, const Params<T>& params) {
  return call_with<T>([&](auto... rest) { return weight_gradients(dy, x, rest...); }, extra, params);
}
#endif

}  // namespace jitact

#ifdef __CUDACC__
#include "launch_extras_cuda.cuh"
#else
#include "launch_extras_cpu.h"
#endif
