// Where there are cores, the loader has the kernels of a file compiled in several parts at the same time, and joins them. It says
// by JITACT_PARTS how many there are, and by JITACT_PART which of them this is; without both this is all.
#pragma once

#include <utility>

#include "dtype.h"

namespace jitact::parts {

// What can be compiled apart, of each dtype where there are several: forward, backward and, where much else belongs to
// backward, that: to sum, or to start from the output. The loader counts them as well.
#ifdef JITACT_ROW_INPUT  // of one dtype, and backward starts from the output
constexpr int kKinds = 2, kPieces = kKinds;
#else
#ifdef JITACT_ROWS
constexpr int kKinds = 3;
#else
constexpr int kKinds = loops::kSums > 0 ? 3 : 2;
#endif
constexpr int kPieces = 4 * kKinds;
#endif

template <typename Op>
constexpr int kind_of(Op op) {
  if (op < Op::backward) return 0;
  return op == Op::backward ? 1 : kKinds - 1;
}
template <typename Op>
constexpr int part_of(Op op, loops::Dtype dtype) {
  return (kKinds * int(dtype) % kPieces + kind_of(op)) * JITACT_PARTS / kPieces;
}

template <typename S>
constexpr loops::Dtype kDtype = std::is_same_v<S, double> ? loops::Dtype::f64
                                : std::is_same_v<S, float> ? loops::Dtype::f32
                                : std::is_same_v<S, loops::Half> ? loops::Dtype::f16
                                                                 : loops::Dtype::bf16;

// Whether the kernel of an operation and a dtype belongs to this part.
template <auto op, typename S>
constexpr bool kIsHere = part_of(op, kDtype<S>) == JITACT_PART;

// Calls f.template operator()<part>() for the part that has the kernels of a call.
template <typename Call, typename F, int... part>
void for_part_of(const Call& call, const F& f, std::integer_sequence<int, part...>) {
  const int wanted = part_of(call.op, call.dtype);
  ((part == wanted ? f.template operator()<part>() : void()), ...);
}
template <typename Call, typename F>
void for_part_of(const Call& call, const F& f) { for_part_of(call, f, std::make_integer_sequence<int, JITACT_PARTS>()); }

}  // namespace jitact::parts
