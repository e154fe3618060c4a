// Sets gradients of masked-out elements to 0, on a GPU, in builds with a bool mask.
#pragma once

#include "row_sums_cuda.cuh"
#include "row_types_cuda.cuh"

namespace jitact::rows {

constexpr int kHiding = 256, kPartOfRow = 1024;  // threads per block; elements of a row per blockIdx.y

// A warp processes one row at a time or, unless all rows need it, those of 32 whose first gradient is not finite.
__global__ void __launch_bounds__(kHiding) hide(const Hidden call, const MaskOfRows masks) {
  const int lane = threadIdx.x % 32;
  const int64_t at_once = call.all_rows ? 1 : 32, step = int64_t(gridDim.x) * (kHiding / 32) * at_once;
  for (int64_t first = (int64_t(blockIdx.x) * (kHiding / 32) + threadIdx.x / 32) * at_once; first < call.rows; first += step) {
    const int64_t own = first + lane;
    const bool is_wanted = lane < at_once && own < call.rows && (call.all_rows || !is_finite(call.gradient[own * call.length]));
    for (unsigned wanted = __ballot_sync(0xffffffffu, is_wanted); wanted != 0; wanted &= wanted - 1) {
      const int64_t row = first + __ffs(int(wanted)) - 1;
      const MaskBits* mask = masks.of(unsigned(row));
      Input* gradient = call.gradient + row * call.length;
      for (int64_t i = int64_t(blockIdx.y) * 32 + lane; i < call.length; i += int64_t(gridDim.y) * 32)
        if (!mask[i * masks.step]) gradient[i] = Input{};
    }
  }
}

const char* hide_cuda(const Hidden& call, void* stream) {
  constexpr int64_t most_blocks = 4096, most_parts = 64;
  const int64_t rows_of_block = kHiding / 32 * (call.all_rows ? 1 : 32), blocks = (call.rows + rows_of_block - 1) / rows_of_block;
  const int64_t parts = call.all_rows ? (call.length + kPartOfRow - 1) / kPartOfRow : 1;
  const dim3 grid(unsigned(blocks < most_blocks ? blocks : most_blocks), unsigned(parts < most_parts ? parts : most_parts));
  Clusters shape(1, kHiding, 0, static_cast<cudaStream_t>(stream));
  shape.config.gridDim = grid;
  return message(cudaLaunchKernelEx(&shape.config, hide, call, MaskOfRows(call.mask, call.length)));
}

}  // namespace jitact::rows
