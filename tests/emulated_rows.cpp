// The GPU's loops over rows, emulated on the CPU. Tests define KERNEL and the types of the build.
#define __CUDACC__
#include "emulated_cuda.h"

#include "elementwise.cuh"
#include KERNEL
#include "rows_cuda.cuh"

#if !JITACT_PART
#ifdef JITACT_ROW_INPUT
static jitact::rows::Mask mask;  // of the next calls
static bool shares;              // whether the results of those that it had are shares
extern "C" void set_mask(const void* data, const int64_t* sizes, const int64_t* strides, int64_t step, bool gives_shares) {
  mask = {data, {sizes[0], sizes[1]}, {strides[0], strides[1], strides[2]}, step}, shares = gives_shares;
}
#endif

static jitact::rows::Operands operands;  // for the next calls
extern "C" void set_operands(const float* numbers, const float* const* of_rows, float* gradients) {
  for (int i = 0; i < jitact::rows::kNumbers; i++) operands.numbers[i] = numbers[i];
  for (int i = 0; i < jitact::rows::kRowValues; i++) operands.of_rows[i] = of_rows[i];
  operands.gradients = gradients;
}

extern "C" const char* run(int op, int dtype, int64_t outer, int64_t length, int64_t inner, float scale, const void* first,
                           const void* second, void* to) {
  using namespace jitact;
  emulated::processors = 1;  // so that with few rows, each thread has several
  rows::OperatedCall call{{rows::Op(op), loops::Dtype(dtype), outer, length, inner, scale, {first, second}, to}, operands};
  std::vector<char> workspace(rows::workspace_bytes(call));
  call.workspace = workspace.data();
#ifdef JITACT_ROW_INPUT
  call.mask = mask, call.gives_shares = shares;
  if (rows::kAdds && call.op == rows::Op::forward) call.mask.scale = scale, call.scale = 1;
#endif
  return rows::run_cuda(call, nullptr);
}

#if !defined JITACT_ROW_INPUT && !defined JITACT_PART
// The same with persistent clusters of small blocks, as for rows that do not fit in registers.
extern "C" const char* run_in_chunks(int log_threads, int blocks, int op, int dtype, int64_t outer, int64_t length, float scale,
                                     const void* first, const void* second, void* to) {
  using namespace jitact;
  using namespace jitact::rows;
  emulated::processors = 1;
  const OperatedCall call{{Op(op), loops::Dtype(dtype), outer, length, 1, scale, {first, second}, to}, operands};
  return message(loops::dispatch_dtype(call.dtype, [&]<typename S>() -> cudaError_t {
    const auto start_op = [&]<Op known>() -> cudaError_t {
      if constexpr (std::is_same_v<S, double>) return cudaErrorInvalidValue;
      else {
        constexpr int64_t size = Storage<S>::size;
        const int64_t vectors = reads(known) * vectors_touched(length, size), chunk = int64_t(kChunk * blocks) << log_threads;
        Launch launch{};
        launch.threads = launch.group = 1 << log_threads, launch.log_threads = launch.log_group = log_threads;
        launch.blocks = blocks, launch.chunks = int((vectors + chunk - 1) / chunk);
        if (length % size) return start<known, S, true, false>(launch, call, nullptr);
        return start<known, S, false, false>(launch, call, nullptr);
      }
    };
    if (call.op == Op::forward) return start_op.template operator()<Op::forward>();
    if (call.op == Op::backward) return start_op.template operator()<Op::backward>();
    return start_op.template operator()<Op::backward_from_output>();
  }));
}
#endif
#endif
