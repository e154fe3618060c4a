// Programmatic dependent launch: a kernel begins while the one before it still runs. It calls ptx::wait_for_last before it
// reads what that one writes, which may call ptx::let_next_begin as soon as it has begun.
#pragma once

#include "ptx.cuh"

namespace jitact::early {

// find() for the current device, cached. find() must not return 0.
constexpr int kDevices = 64;  // of which results are cached
template <typename Find>
int64_t of_device(int64_t (&known)[kDevices], const Find& find) {
  int device = 0;
  cudaGetDevice(&device);
  if (device >= kDevices) return find();
  int64_t found = __atomic_load_n(known + device, __ATOMIC_RELAXED);
  if (found == 0) __atomic_store_n(known + device, found = find(), __ATOMIC_RELAXED);
  return found;
}

// Whether the kernel's code waits: code compiled from PTX for GPUs before compute capability 9.0 does not.
template <auto kernel>
bool waits_for_last() {
  static int64_t known[kDevices];
  return of_device(known, [] {
           cudaFuncAttributes code{};
           return cudaFuncGetAttributes(&code, kernel) == cudaSuccess && code.ptxVersion >= 90 ? 1 : -1;
         }) > 0;
}

template <auto kernel, typename... Arguments>
cudaError_t launch(dim3 blocks, int threads, cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(unsigned(threads));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = waits_for_last<kernel>();
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace jitact::early
