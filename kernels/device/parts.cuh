// To use several cores, the loader compiles the kernels of a file in parts at the same time, and links them. JITACT_PARTS is
// their number and JITACT_PART the index of this part; without them, everything is compiled at once.
#pragma once

#include <utility>

#include "dtype.h"
#ifdef JITACT_ROW_INPUT
#include "rows_call.h"
#endif

namespace jitact::parts {

// The pieces that can be compiled separately, for each dtype if there are several: forward, backward and, where costly, another
// kind of backward: with sums, or from the output. For one dtype, or one type of x, of rows, a GPU's kernels for several shapes of
// rows are apart, see shape_of. The loader has the same numbers.
#if defined JITACT_ROW_INPUT
constexpr int kDtypes = 1, kKinds = rows::kHasGradient ? 2 : 1;
#elif defined JITACT_ROW_ONLY
constexpr int kDtypes = 1, kKinds = JITACT_ROW_INPUT_KEPT ? 1 : 2;
#elif defined JITACT_ROWS
constexpr int kDtypes = 4, kKinds = 3;
#else
constexpr int kDtypes = 4, kKinds = loops::kSums > 0 ? 3 : 2;
#endif
#if defined JITACT_ROW_INPUT && defined __CUDACC__
constexpr int kShapes = 3;
#elif defined JITACT_ROW_ONLY && defined __CUDACC__ && !(JITACT_ROW_ACROSS && JITACT_ROW_INPUT_KEPT)
constexpr int kShapes = JITACT_ROW_ACROSS ? 2 : 3;
#else
constexpr int kShapes = 1;
#endif
constexpr int kPieces = kDtypes * kKinds * kShapes;

template <typename Op>
constexpr int kind_of(Op op) {
  if (op < Op::backward || kKinds == 1) return 0;
  return op == Op::backward ? 1 : kKinds - 1;
}
template <typename Op>
constexpr int part_of(Op op, loops::Dtype dtype, int shape) {
  return (kShapes * (kKinds * (int(dtype) % kDtypes) + kind_of(op)) + shape) * JITACT_PARTS / kPieces;
}

template <typename Call>
int shape_among(const Call& call) {
  if constexpr (kShapes > 1) return shape_of(call);
  else return 0;
}

template <typename S>
constexpr loops::Dtype kDtype = std::is_same_v<S, double> ? loops::Dtype::f64
                                : std::is_same_v<S, float> ? loops::Dtype::f32
                                : std::is_same_v<S, loops::Half> ? loops::Dtype::f16
                                                                 : loops::Dtype::bf16;

// Whether the kernel for an operation, a dtype and a shape of rows belongs to this part.
template <auto op, typename S, int shape = 0>
constexpr bool kIsHere = part_of(op, kDtype<S>, shape) == JITACT_PART;

// Calls f.template operator()<part>() for the part with the kernels of a call.
template <typename Call, typename F, int... part>
void for_part_of(const Call& call, const F& f, std::integer_sequence<int, part...>) {
  const int wanted = part_of(call.op, call.dtype, shape_among(call));
  ((part == wanted ? f.template operator()<part>() : void()), ...);
}
template <typename Call, typename F>
void for_part_of(const Call& call, const F& f) { for_part_of(call, f, std::make_integer_sequence<int, JITACT_PARTS>()); }

}  // namespace jitact::parts
