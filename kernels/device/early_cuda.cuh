// Launches of kernels that begin while the one before ends. They wait for it themselves, by ptx::wait_for_last, before they read
// what it writes; it may call ptx::let_next_begin as soon as it has begun.
#pragma once

#include "ptx.cuh"

namespace jitact::early {

// What `find` finds for the current device, which is not 0 and is asked for once for each.
constexpr int kDevices = 64;  // that are remembered
template <typename Find>
int64_t of_device(int64_t (&known)[kDevices], const Find& find) {
  int device = 0;
  cudaGetDevice(&device);
  if (device >= kDevices) return find();
  int64_t found = __atomic_load_n(known + device, __ATOMIC_RELAXED);
  if (found == 0) __atomic_store_n(known + device, found = find(), __ATOMIC_RELAXED);
  return found;
}

// Whether a kernel's code waits, which code that is older than the GPU does not.
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
