// The argument types of a kernel file's functions. An argument's type says where its value comes from:
//
//   T x           an element of a tensor; all such tensors of one call have the same shape
//   Number<T> a   a number, the same for all elements
//   Channel<T> w  of a tensor with one value per index of a dimension, or a single value
//   Row<T> r      of a tensor with one value per row: it spans all dimensions but the last
//   Random<T> u   a random number for this element, the same in forward and backward
//
// Number, Channel and Row derive from T, so they compute as T does. They are distinct types so that the loops can read the
// roles from the type of `forward`.
#pragma once

#include "number.cuh"
#include "random.cuh"

namespace jitact {

#define JITACT_OPERAND(name)                                 \
  template <typename T>                                      \
  struct name : T {                                          \
    JITACT_INLINE constexpr name(const T& t) : T(t) {}       \
    template <typename N, typename = std::enable_if_t<std::is_arithmetic_v<N>>> \
    JITACT_INLINE constexpr name(N n) : T(n) {}              \
  };

JITACT_OPERAND(Number)
JITACT_OPERAND(Channel)
JITACT_OPERAND(Row)

#undef JITACT_OPERAND

// Several gradients, in the order of forward's arguments.
template <typename T, int n>
struct Many {
  T of[n];
};

// What a function of a kernel file returns, as a Many.
template <typename T, int n>
JITACT_INLINE Many<T, n> many(Many<T, n> results) { return results; }
template <typename T>
JITACT_INLINE Many<T, 1> many(T result) { return {result}; }

}  // namespace jitact

using jitact::Channel;
using jitact::Many;
using jitact::Number;
using jitact::Random;
using jitact::Row;
