// All that a kernel file may use: arithmetic on T and the functions of math.cuh. A kernel file defines, with ELEMENTWISE,
//
//   T forward(T x, T params...)
//
// and whichever of these its backward can be computed from (params follow in each, in the order of the table's record):
//
//   T backward(T dy, T x)                                     keeps the input
//   T backward_from_output(T dy, T y)                         keeps the output
//   bool keeps(T x)  and  T backward_from_bit(T dy, bool b)   keep one bit per element
//
// With none of them, backward is derived from forward by dual numbers when the file is compiled.
#pragma once

#include "math.cuh"
#include "number.cuh"
