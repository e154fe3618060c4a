// What gated activations, act(gate) * up, have in common: gradients that neither overflow nor vanish on the way.
#pragma once

#include "elementwise.cuh"
#include "rounded.cuh"

namespace jitact {

// a * b * c, where one product of two may overflow or vanish that the third brings back: the larger of a and b is multiplied
// by the smallest first. Where c is the largest of all, a * b comes first.
template <typename T>
JITACT_INLINE T product(T a, T b, T c) {
  const bool in_order = abs(a) >= abs(b);
  const T large = select(in_order, a, b), small = select(in_order, b, a);
  const bool smallest = abs(small) <= abs(c);
  return large * select(smallest, small, c) * select(smallest, c, small);
}

// The gradient by the gate: from_gate(act_::backward(into_gate(dy, up), gate), dy, up).
template <typename T>
JITACT_INLINE T into_gate(T dy, T up) {
#ifdef JITACT_UNFUSED
  return rounded(dy * up);
#else
  return 1;
#endif
}
template <typename T>
JITACT_INLINE T from_gate(T slope, T dy, T up) {
#ifdef JITACT_UNFUSED
  return slope;
#else
  return product(dy, up, slope);
#endif
}

}  // namespace jitact

using jitact::from_gate;
using jitact::into_gate;
using jitact::product;
