// What kernel files may use: arithmetic on T and the functions of math.cuh. A kernel file defines, marked ELEMENTWISE,
//
//   T forward(T x, operands...)
//
// where an operand's type says what it is (see operands.cuh), and one of the following, by what backward can be computed
// from:
//
//   T backward(T dy, T x, operands...)                     saves the inputs
//   T backward_from_output(T dy, T y, others...)           saves the output; others are the operands that are not elements
//   bool keeps(T x, operands...)  and
//   T backward_from_bit(T dy, bool b, others...)           save one bit per element
//
// Without any of them, backward is derived from forward by dual numbers at compile time. A backward with several gradients
// returns Many<T, n>, in the order of forward's arguments that have one: elements, channels and rows; the last arguments may be
// left out. So does backward_from_bit: the gradient of x, then those of the channels and rows right after it. The loops sum the
// gradients of channels and rows over what these are broadcast over. To transform its last channels, of one value each, once
// for all elements, each by itself, a file defines the following; the loops apply the chain rule to their gradients:
//
//   void prepare(Channel<T>& operands...)
#pragma once

#include "math.cuh"
#include "operands.cuh"
