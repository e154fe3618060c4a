// To use several cores, the loader compiles the kernels of a file in parts at the same time, and links them. JITACT_PARTS is
// their number and JITACT_PART the index of this part; without them, everything is compiled at once.
#pragma once

#include <utility>

#include "dtype.h"

namespace jitact::parts {

// The pieces that can be compiled separately, for each dtype if there are several: forward, backward and, where costly, another
// kind of backward: with sums, or from the output. The loader has the same numbers.
#if defined JITACT_ROW_INPUT || defined JITACT_ROW_ONLY  // one dtype, and backward is from the output, or all there is
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

// Whether the kernel for an operation and a dtype belongs to this part.
template <auto op, typename S>
constexpr bool kIsHere = part_of(op, kDtype<S>) == JITACT_PART;

// Calls f.template operator()<part>() for the part with the kernels of a call.
template <typename Call, typename F, int... part>
void for_part_of(const Call& call, const F& f, std::integer_sequence<int, part...>) {
  const int wanted = part_of(call.op, call.dtype);
  ((part == wanted ? f.template operator()<part>() : void()), ...);
}
template <typename Call, typename F>
void for_part_of(const Call& call, const F& f) { for_part_of(call, f, std::make_integer_sequence<int, JITACT_PARTS>()); }

}  // namespace jitact::parts
