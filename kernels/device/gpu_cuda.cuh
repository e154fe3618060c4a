// Facts of the current GPU, cached for each.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace jitact::gpu {

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

inline int64_t device_has(cudaDeviceAttr what) {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, what, device);
  return count > 1 ? count : 1;
}

// For a kernel that reads and writes so many bytes. If these do not fit into the L2 cache, what is read leaves it last: then memory
// is 1 to 4 % faster on an H200. Else it may be read again, and leaves it as usual.
inline ptx::Policy policy_of_reads(int64_t bytes) {
  static int64_t known[kDevices];
  const bool fits = bytes <= int64_t(1) << 20 || bytes <= of_device(known, [] { return device_has(cudaDevAttrL2CacheSize); });
  return fits ? ptx::kEvictNormal : ptx::kEvictLast;
}

// Has multiprocessors of the current device give a kernel this much of what shared memory and the first-level cache have together:
// else there may be as little as the kernel before it needed, for fewer blocks. Kernels that are to run at the same time must agree
// in it; loads to registers that are on their way need the cache.
template <auto kernel, int percent = cudaSharedmemCarveoutMaxShared>
cudaError_t prefer_shared() {
  static int64_t done[kDevices];
  cudaError_t error = cudaSuccess;
  of_device(done, [&] {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, percent);
    return error ? 0 : 1;  // 0 is not cached
  });
  return error;
}

// A number of blocks on a multiprocessor, or of bytes, that was best on an H100, for this GPU: memory is slower if more of its
// places are read and written at once than keep it busy. More are best where memory moves more bytes for each multiprocessor.
inline int64_t best_for_memory(int64_t best) {
  constexpr int64_t measured = int64_t(2619000) * 5120 / 132;  // kHz, bits and multiprocessors of an H100
  const int64_t rate = device_has(cudaDevAttrMemoryClockRate) * device_has(cudaDevAttrGlobalMemoryBusWidth) /
                       device_has(cudaDevAttrMultiProcessorCount);
  return rate > measured ? best * rate / measured : best;
}

}  // namespace jitact::gpu
