// What the arguments of a kernel file's functions are. The type of an argument says where its value comes from:
//
//   T x           an element of a tensor; where there are several such tensors, they have one shape
//   Number<T> a   a number, the same for every element
//   Channel<T> w  of a tensor with one value for each index of a dimension, or one for all
//   Row<T> r      of a tensor with one value for each row, which is all dimensions but the last
//   Random<T> u   a random number of the element's own, the same in forward and in backward
//
// Number, Channel and Row derive from T, so they compute as a T does. They are types of their own so that the loops, which
// look at the type of `forward`, know them.
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

// Several results: the gradients, in the order of forward's arguments.
template <typename T, int n>
struct Many {
  T of[n];
};

// What a function of a kernel file returns, as several results.
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
