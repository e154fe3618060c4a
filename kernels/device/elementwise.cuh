// All that a kernel file may use: arithmetic on T and the functions of math.cuh. A kernel file defines, with ELEMENTWISE,
//
//   T forward(T x, operands...)
//
// where the type of each operand says what it is, as operands.cuh lists them, and whichever of these its backward can be
// computed from:
//
//   T backward(T dy, T x, operands...)                     keeps the inputs
//   T backward_from_output(T dy, T y, others...)           keeps the output; others are the operands that are no elements
//   bool keeps(T x, operands...)  and
//   T backward_from_bit(T dy, bool b, others...)           keep one bit per element
//
// With none of them, backward is derived from forward by dual numbers when the file is compiled. A backward of several
// gradients returns Many<T, n>, in the order of forward's arguments that have one: elements, channels and rows; operands after
// the last have none. So does a backward_from_bit: the gradient of x, and those of channels and rows right after it. What a
// channel or a row is broadcast over is summed by the loops. A file whose functions want something else in place of its
// channels as they are, or of the last of them, which are of one value each, says what; the chain rule takes the gradients back:
//
//   void prepare(Channel<T>& operands...)
#pragma once

#include "math.cuh"
#include "operands.cuh"
