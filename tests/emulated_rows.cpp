// The GPU's loops over rows, as threads of the CPU, for test_rows.py, which gives KERNEL.
#define __CUDACC__
#include "emulated_cuda.h"

#include "elementwise.cuh"
#include KERNEL
#include "rows_cuda.cuh"

extern "C" const char* run(int op, int dtype, int64_t outer, int64_t length, int64_t inner, float scale, const void* first,
                           const void* second, void* to) {
  using namespace jitact;
  emulated::processors = 1;  // so that few rows are several for each thread
  return rows::run_cuda({rows::Op(op), loops::Dtype(dtype), outer, length, inner, scale, {first, second}, to}, nullptr);
}
