// What a kernel file may use whose functions get learned weights. It defines, with ELEMENTWISE,
//
//   T forward(T x, T weights..., T params...)
//   T backward(T dy, T x, T weights..., T params...)
//   Gradients<T, K> weight_gradients(T dy, T x, T weights..., T params...)   what the element adds to the gradients of the
//                                                                            first K weights
//
// and, where one bit per element is enough while no weight wants a gradient, keeps and backward_from_bit as elementwise.cuh
// has them, with the weights after the others. Where the functions want something else in place of the weights as they are,
// the file says what, and the chain rule takes the gradients back to the weights:
//
//   void prepare(T& weights...)
#pragma once

#include "elementwise.cuh"

namespace jitact {

template <typename T, int K>
struct Gradients {
  T of[K];

  JITACT_INLINE Gradients& operator+=(const Gradients& b) {
    for (int k = 0; k < K; k++) of[k] += b.of[k];
    return *this;
  }
};

}  // namespace jitact

using jitact::Gradients;
