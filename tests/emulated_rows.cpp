// The GPU's loops over rows, as threads of the CPU, for tests, which give KERNEL and what a build is for.
#define __CUDACC__
#include "emulated_cuda.h"

#include "elementwise.cuh"
#include KERNEL
#include "rows_cuda.cuh"

#ifdef JITACT_ROW_INPUT
static jitact::rows::Mask mask;  // of the next call
extern "C" void set_mask(const void* data, const int64_t* sizes, const int64_t* strides, int64_t step) {
  mask = {data, {sizes[0], sizes[1]}, {strides[0], strides[1], strides[2]}, step};
}
#endif

static jitact::rows::Operands operands;  // of the next calls
extern "C" void set_operands(const float* numbers, const float* const* of_rows, float* gradients) {
  for (int i = 0; i < jitact::rows::kNumbers; i++) operands.numbers[i] = numbers[i];
  for (int i = 0; i < jitact::rows::kRowValues; i++) operands.of_rows[i] = of_rows[i];
  operands.gradients = gradients;
}

extern "C" const char* run(int op, int dtype, int64_t outer, int64_t length, int64_t inner, float scale, const void* first,
                           const void* second, void* to) {
  using namespace jitact;
  emulated::processors = 1;  // so that few rows are several for each thread
  rows::OperatedCall call{{rows::Op(op), loops::Dtype(dtype), outer, length, inner, scale, {first, second}, to}, operands};
#ifdef JITACT_ROW_INPUT
  call.mask = mask;
  if (rows::kAdds && call.op == rows::Op::forward) call.mask.scale = scale, call.scale = 1;
#endif
  return rows::run_cuda(call, nullptr);
}

#ifdef JITACT_ROW_HIDES
extern "C" const char* hide(void* gradient, int64_t rows, int64_t length, bool all_rows) {
  return jitact::rows::hide_cuda({static_cast<jitact::rows::Input*>(gradient), rows, length, mask, all_rows}, nullptr);
}
#endif
