// Programmatic dependent launch: a kernel begins while the one before it ends, or still runs if that one calls
// ptx::let_next_begin. It calls ptx::wait_for_last before it reads or writes memory, whoever launched the one before.
#pragma once

#include "gpu_cuda.cuh"
#include "ptx.cuh"

namespace jitact::early {

// Whether the kernel's code waits: code compiled from PTX for GPUs before compute capability 9.0 does not.
template <auto kernel>
bool waits_for_last() {
  static int64_t known[gpu::kDevices];
  return gpu::of_device(known, [] {
           cudaFuncAttributes code{};
           return cudaFuncGetAttributes(&code, kernel) == cudaSuccess && code.ptxVersion >= 90 ? 1 : -1;
         }) > 0;
}

inline cudaLaunchAttribute attribute() {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

template <auto kernel, typename... Arguments>
cudaError_t launch(dim3 blocks, int threads, size_t shared, cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute early = attribute();
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = waits_for_last<kernel>();
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace jitact::early
