// The loops that apply a kernel file's functions to tensors: one for the GPU, one for the CPU. The loader includes this
// after the kernel file.
//
// A tensor is given as memory: n dense elements in memory order, or rows of elements with a row stride. Bit i % 8 of byte
// i / 8 of a mask belongs to element i in that order.
#pragma once

#ifdef JITACT_ROWS
namespace jitact::rows {
struct Call;
// The C functions that an exported file, or binding.cpp, calls.
extern "C" void run_cpu(const Call& call);
extern "C" const char* run_cuda(const Call& call, void* stream);
extern "C" int64_t workspace_bytes(const Call& call);
}  // namespace jitact::rows
#include "rows_call.h"
#ifdef __CUDACC__
#include "rows_cuda.cuh"
#else
#include "rows_cpu.h"
#endif
#else

#include "call.h"

namespace jitact::loops {

template <typename T>
struct Numbers {
  T values[kNumbers + 1];
};

// Calls f with the values of arguments K... for one element. A source returns values by role and index within the role;
// `first` is how many tensors, such as dy, are read before forward's elements.
template <int first, typename T, size_t k, typename Source>
JITACT_INLINE Argument<T, k> argument(const Source& source) {
  constexpr int place = place_of(k);
  if constexpr (is_element(kRoles.of[k])) return source.template element<first + place>();
  else if constexpr (is_number(kRoles.of[k])) return source.template number<place>();
  else if constexpr (is_random(kRoles.of[k])) return source.template random<place>();
  else if constexpr (is_broadcast(kRoles.of[k])) return source.template broadcast<place>();
}
template <int first, typename T, typename Source, typename F, size_t... K>
JITACT_INLINE auto call_with(const Source& source, const F& f, std::index_sequence<K...>) {
  return f(argument<first, T, K>(source)...);
}
// The same, as n results. On a CPU they are not copied: of three, gcc would copy bytes, and then not vectorise the loop.
template <int first, int n, typename T, typename Source, typename F, typename Arguments>
JITACT_INLINE Many<T, n> many_with(const Source& source, const F& f, Arguments arguments) {
#ifdef __CUDA_ARCH__
  return many<T>(call_with<first, T>(source, f, arguments));
#else
  if constexpr (n > 1) return call_with<first, T>(source, f, arguments);
  else return many<T>(call_with<first, T>(source, f, arguments));
#endif
}

// The same values as dual numbers; argument `at` has a derivative of 1, the others of 0.
template <typename T, int at, typename Source>
struct Dualized {
  const Source& source;

  template <size_t k>
  JITACT_INLINE Argument<Dual<T>, k> get() const {
    const auto value = argument<1, T, k>(source);
    if constexpr (is_random(kRoles.of[k])) return Random<Dual<T>>(value);
    else return Dual<T>(value, T(int(k) == at ? 1 : 0), int(k) == at ? Varies::always : Varies::never);
  }
  template <size_t... K>
  JITACT_INLINE T slope(std::index_sequence<K...>) const { return forward(get<K>()...).derivative; }
};

template <typename T, typename Source, size_t... G>
JITACT_INLINE Many<T, kGradients> derived_gradients(T dy, const Source& source, std::index_sequence<G...>) {
  return {dy * Dualized<T, gradient_argument(G), Source>{source}.slope(All())...};
}

// The gradients of one element for which its mask bit suffices.
template <typename T, typename Source>
JITACT_INLINE Many<T, kBitGradients> gradients_from_bit(T dy, bool bit, const Source& source) {
  return many_with<1, kBitGradients, T>(source, [&](auto... a) { return backward_from_bit(dy, bit, a...); }, Others());
}

// All gradients of one element; dy is the first tensor read.
template <typename T, typename Source>
JITACT_INLINE Many<T, kGradients> gradients(const Source& source) {
  const T dy = source.template element<0>();
  if constexpr (kHasBackward) {
    return many_with<1, kGradients, T>(source, [&](auto... a) { return backward(dy, a...); }, All());
  } else if constexpr (kSavesBit) {
    const bool bit = call_with<1, T>(source, [](auto... a) { return keeps(a...); }, All());
    return gradients_from_bit(dy, bit, source);
  } else {
    return derived_gradients(dy, source, std::make_index_sequence<kGradients>());
  }
}

// The result of an operation with one result, for one element. `bit` is the mask bit read or written.
template <Op op, typename T, typename Source>
JITACT_INLINE T element(const Source& source, bool& bit) {
  if constexpr (op == Op::forward_bit) bit = call_with<0, T>(source, [](auto... a) { return keeps(a...); }, All());
  if constexpr (op == Op::forward || op == Op::forward_bit)
    return call_with<0, T>(source, [](auto... a) { return T(forward(a...)); }, All());
  const T dy = source.template element<0>();
  if constexpr (op == Op::backward_from_output) {
    const T y = source.template element<1>();
    return call_with<1, T>(source, [&](auto... a) { return T(backward_from_output(dy, y, a...)); }, Others());
  }
  if constexpr (op == Op::backward_from_bit) return gradients_from_bit(dy, bit, source).of[0];
}

// All results for one element: the gradients, to be written or summed, or the one result of other operations.
template <Op op, typename T, typename Source>
JITACT_INLINE auto results(const Source& source, bool& bit) {
  if constexpr (op == Op::backward || op == Op::backward_sums) return gradients<T>(source);
  else if constexpr (op == Op::backward_from_bit_sums) return gradients_from_bit(source.template element<0>(), bit, source);
  else return many<T>(element<op, T>(source, bit));
}

// The result where x is the only argument. a is x in forward, else dy; b is x or y. `bit` is the mask bit.
template <Op op, typename T>
JITACT_INLINE T plain_result(T a, T b, bool& bit) {
  if constexpr (op == Op::forward_bit) bit = keeps(a);
  if constexpr (op == Op::forward || op == Op::forward_bit) return forward(a);
  else if constexpr (op == Op::backward_from_bit) return backward_from_bit(a, bit);
  else if constexpr (op == Op::backward_from_output) return backward_from_output(a, b);
  else if constexpr (kHasBackward) return backward(a, b);
  else if constexpr (kSavesBit) return backward_from_bit(a, keeps(b));
  else return a * forward(Dual<T>(b, T(1))).derivative;
}

// The indices in results() of the gradients of element w and of broadcast operand s.
template <int w> constexpr int kWrittenGradient = count(has_gradient, argument_of(is_element, w));
template <int s> constexpr int kSummedGradient = count(has_gradient, argument_of(is_broadcast, s));
template <Op op, int w>
constexpr int written_result() {
  if constexpr (op == Op::backward || op == Op::backward_sums) return kWrittenGradient<w>;
  return 0;
}
template <Op op, int w> constexpr int kWrittenResult = written_result<op, w>();

// Calls f with each of 0 .. n - 1 as a compile-time constant.
template <typename F, size_t... I>
JITACT_INLINE void for_each(const F& f, std::index_sequence<I...>) {
  (f(std::integral_constant<int, I>()), ...);
}
template <int n, typename F>
JITACT_INLINE void for_each(const F& f) { for_each(f, std::make_index_sequence<n>()); }

// Calls f.template operator()<op>() for the call's operation, if it sums gradients.
template <typename F>
void dispatch_sums(Op op, const F& f) {
  if constexpr (kSums > 0)
    if (op == Op::backward_sums) f.template operator()<Op::backward_sums>();
  if constexpr (kBitSums > 0)
    if (op == Op::backward_from_bit_sums) f.template operator()<Op::backward_from_bit_sums>();
}

// Calls f.template operator()<op>() for the call's operation, if it is another one that the kernel file supports.
template <typename F>
void dispatch(Op op, const F& f) {
  if (op == Op::forward) f.template operator()<Op::forward>();
  if (op == Op::backward) f.template operator()<Op::backward>();
  if constexpr (kSavesOutput)
    if (op == Op::backward_from_output) f.template operator()<Op::backward_from_output>();
  if constexpr (kSavesBit) {
    if (op == Op::forward_bit) f.template operator()<Op::forward_bit>();
    if (op == Op::backward_from_bit) f.template operator()<Op::backward_from_bit>();
  }
}

}  // namespace jitact::loops

#ifdef __CUDACC__
#include "launch_cuda.cuh"
#if !JITACT_PART
#include "transpose_cuda.cuh"
#endif
#else
#include "launch_cpu.h"
#endif

#endif  // JITACT_ROWS
