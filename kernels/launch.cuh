// The loops that run a kernel file's functions over memory: one for the GPU, one for the CPU. The loader includes this
// after the kernel file, so the functions that the file defines are in sight here.
//
// A tensor arrives as plain memory: n elements in whatever order they lie. Bit i of byte i / 8 of a mask belongs to
// element i of that memory.
#pragma once

#include <utility>

#include "call.h"
#include "elementwise.cuh"

namespace jitact {

// 16-bit elements as they lie in memory.
struct Half { uint16_t bits; };
struct Bfloat16 { uint16_t bits; };

template <typename T>
struct Params {
  T values[JITACT_PARAMS + 1];
  explicit Params(const double* p) {
    for (int i = 0; i < JITACT_PARAMS; i++) values[i] = T(p[i]);
  }
};

// Whether the kernel file defines these. Not by `requires`: over a pack of parameters nvcc 13.0 finds it false.
template <typename T, typename... P>
auto has_backward(int) -> decltype(backward(T(), T(), P()...), std::true_type());
template <typename T, typename... P>
std::false_type has_backward(...);
template <typename T, typename... P>
auto has_backward_from_bit(int) -> decltype(backward_from_bit(T(), keeps(T(), P()...), P()...), std::true_type());
template <typename T, typename... P>
std::false_type has_backward_from_bit(...);

// What one element goes through, by operation. `a` is x or dy, `b` the saved tensor, `bit` the mask bit read or written.
template <Op op, typename T, typename... P>
JITACT_INLINE T element(T a, T b, bool& bit, P... params) {
  if constexpr (op == Op::forward) return forward(a, params...);
  if constexpr (op == Op::forward_bit) {
    bit = keeps(a, params...);
    return forward(a, params...);
  }
  if constexpr (op == Op::backward) {
    if constexpr (decltype(has_backward<T, P...>(0))::value) {
      return backward(a, b, params...);
    } else if constexpr (decltype(has_backward_from_bit<T, P...>(0))::value) {
      return backward_from_bit(a, keeps(b, params...), params...);
    } else {
      return a * forward(Dual<T>(b, T(1)), Dual<T>(params)...).derivative;
    }
  }
  if constexpr (op == Op::backward_from_output) return backward_from_output(a, b, params...);
  if constexpr (op == Op::backward_from_bit) return backward_from_bit(a, bit, params...);
}

template <Op op, typename T, size_t... I>
JITACT_INLINE T element(T a, T b, bool& bit, const Params<T>& params, std::index_sequence<I...>) {
  return element<op>(a, b, bit, params.values[I]...);
}

template <Op op, typename T>
JITACT_INLINE T element(T a, T b, bool& bit, const Params<T>& params) {
  return element<op>(a, b, bit, params, std::make_index_sequence<JITACT_PARAMS>());
}

// Calls f.template operator()<op>() for the operation of the call, among those that the activation declares.
template <typename F>
void dispatch([[maybe_unused]] Op op, [[maybe_unused]] const F& f) {
#ifndef JITACT_EXTRAS  // functions that take more arguments than these loops have are launch_extras.cuh's
  switch (op) {
    case Op::forward: return f.template operator()<Op::forward>();
    case Op::backward: return f.template operator()<Op::backward>();
#ifdef JITACT_SAVES_OUTPUT
    case Op::backward_from_output: return f.template operator()<Op::backward_from_output>();
#endif
#ifdef JITACT_SAVES_BIT
    case Op::forward_bit: return f.template operator()<Op::forward_bit>();
    case Op::backward_from_bit: return f.template operator()<Op::backward_from_bit>();
#endif
    default: return;
  }
#endif
}

// Calls f.template operator()<S>() for the dtype of the call.
template <typename F>
auto dispatch_dtype(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::f64: return f.template operator()<double>();
    case Dtype::f32: return f.template operator()<float>();
    case Dtype::f16: return f.template operator()<Half>();
    default: return f.template operator()<Bfloat16>();
  }
}

JITACT_INLINE constexpr bool reads_two(Op op) { return op == Op::backward || op == Op::backward_from_output; }

}  // namespace jitact

#ifdef __CUDACC__
#include "launch_cuda.cuh"
#else
#include "launch_cpu.h"
#endif

#ifdef JITACT_EXTRAS
#include "launch_extras.cuh"
#endif
