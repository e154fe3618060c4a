// Where there are cores, the loader has the CUDA kernels of a file compiled in several parts at the same time, and joins them. It
// says by JITACT_PARTS how many there are, and by JITACT_PART which of them this is; without both this is all. run_part is the
// loops' own.
#pragma once

#include <utility>

#include "dtype.h"

namespace jitact::parts {

// What can be compiled apart: forward and backward, of each dtype. plan.py counts them as well.
#ifdef JITACT_ROW_INPUT
constexpr int kPieces = 2;
#elif defined(JITACT_ROWS)
constexpr int kPieces = 6;  // none in float64
#else
constexpr int kPieces = 8;
#endif

template <typename Op>
constexpr int part_of(Op op, loops::Dtype dtype) {
  const int of_dtype = kPieces == 2 ? 0 : 2 * int(dtype) - (8 - kPieces);
  return (of_dtype + (op >= Op::backward)) * JITACT_PARTS / kPieces;
}

template <typename S>
constexpr loops::Dtype kDtype = std::is_same_v<S, double> ? loops::Dtype::f64
                                : std::is_same_v<S, float> ? loops::Dtype::f32
                                : std::is_same_v<S, loops::Half> ? loops::Dtype::f16
                                                                 : loops::Dtype::bf16;

// Whether the kernel of an operation and a dtype belongs to this part.
template <auto op, typename S>
constexpr bool kIsHere = part_of(op, kDtype<S>) == JITACT_PART;

// Queues a call, by the part that has its kernel.
template <typename Call, int... part>
const char* run_any(const Call& call, void* stream, std::integer_sequence<int, part...>) {
  const int wanted = part_of(call.op, call.dtype);
  const char* error = nullptr;
  ((part == wanted ? void(error = run_part<part>(call, stream)) : void()), ...);
  return error;
}
template <typename Call>
const char* run_any(const Call& call, void* stream) {
  return run_any(call, stream, std::make_integer_sequence<int, JITACT_PARTS>());
}

}  // namespace jitact::parts
