// Enough of CUDA to run kernels as threads of the CPU, block after block: for testing where there is no GPU. What ptx.cuh has
// for a GPU is here in plain C++, rounded where its instructions are approximations.
#pragma once

#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#define __CUDA_ARCH__ 900
#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)
#define __restrict__
#define __shared__ static

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
constexpr int cudaDevAttrMultiProcessorCount = 16;
inline void cudaGetDevice(int* device) { *device = 0; }
inline void cudaDeviceGetAttribute(int* value, int, int) { *value = 2; }
template <typename Kernel>
void cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const Kernel&, int, size_t) { *blocks = 2; }

struct float4 { float x, y, z, w; };

template <typename To, typename From>
To same_bits(From from) {
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline float __uint_as_float(uint32_t u) { return same_bits<float>(u); }
inline uint32_t __float_as_uint(float f) { return same_bits<uint32_t>(f); }
inline int __double2hiint(double d) { return int(same_bits<uint64_t>(d) >> 32); }
inline int __double2loint(double d) { return int(same_bits<uint64_t>(d)); }
inline double __hiloint2double(int high, int low) { return same_bits<double>(uint64_t(uint32_t(high)) << 32 | uint32_t(low)); }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) { return uint64_t((unsigned __int128)a * b >> 64); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint32_t(uint64_t(a) * b >> 32); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, unsigned by) {
  return uint32_t((uint64_t(high) << 32 | low) >> (by & 31));
}
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selected) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) result |= uint32_t(bytes >> 8 * (selected >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
inline float __fdividef(float a, float b) { return a / b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

namespace jitact::ptx {

inline float reciprocal(float x) { return 1 / x; }
inline double reciprocal(double x) { return float(1 / x); }  // fewer bits than a double has, as the instruction gives
inline float rsqrt(float x) { return 1 / std::sqrt(x); }
inline float sqrt(float x) { return std::sqrt(x); }
inline float exp2(float x) { return std::exp2(x); }
inline float sin(float x) { return std::sin(x); }
inline float min(float a, float b) { return a != a || b != b ? NAN : a < b ? a : b; }
inline float max(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }
inline void widen_half(uint32_t word, float& low, float& high) {
  low = same_bits<_Float16>(uint16_t(word));
  high = same_bits<_Float16>(uint16_t(word >> 16));
}
inline uint32_t narrow_half(float low, float high) {
  return same_bits<uint16_t>(_Float16(low)) | uint32_t(same_bits<uint16_t>(_Float16(high))) << 16;
}
inline uint32_t narrow_bfloat16(float low, float high) {
  const auto bits = [](float f) {
    const uint32_t u = same_bits<uint32_t>(f);
    return f != f ? 0x7fffu : (u + 0x7fff + (u >> 16 & 1)) >> 16;
  };
  return bits(low) | bits(high) << 16;
}
inline void copy_async(void* to, const void* from) { std::memcpy(to, from, 16); }
inline void wait_for_copies(int) {}

}  // namespace jitact::ptx

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline thread_local dim3 threadIdx(0, 0, 0), blockIdx(0, 0, 0);
inline dim3 gridDim;

struct Meeting {
  explicit Meeting(int threads) : barrier(threads) {}
  std::barrier<> barrier;
  double given[32] = {};
};
inline thread_local Meeting *block_of_thread, *warp_of_thread;

inline void __syncthreads() { block_of_thread->barrier.arrive_and_wait(); }

template <typename V>
V from_lane(V value, int lane, int from) {
  warp_of_thread->given[lane] = double(value);
  warp_of_thread->barrier.arrive_and_wait();
  const V result = V(warp_of_thread->given[from]);
  warp_of_thread->barrier.arrive_and_wait();
  return result;
}
template <typename V>
V __shfl_down_sync(unsigned, V value, int step, int width = 32) {
  const int lane = threadIdx.x % 32;
  return from_lane(value, lane, lane % width + step < width ? lane + step : lane);
}
template <typename V>
V __shfl_up_sync(unsigned, V value, int step) {
  const int lane = threadIdx.x % 32;
  return from_lane(value, lane, lane < step ? lane : lane - step);
}

template <typename Kernel, typename... Arguments>
void launch_emulated(dim3 grid, int threads, const Kernel& kernel, const Arguments&... arguments) {
  gridDim = grid;
  Meeting block(threads);
  std::vector<Meeting*> warps;
  for (int i = 0; i < threads; i += 32) warps.push_back(new Meeting(32));
  std::vector<std::thread> running;
  for (int t = 0; t < threads; t++) {
    running.emplace_back([&, t] {
      threadIdx = dim3(t, 0, 0);
      block_of_thread = &block;
      warp_of_thread = warps[t / 32];
      for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
          for (unsigned x = 0; x < grid.x; x++) {
            blockIdx = dim3(x, y, z);
            kernel(arguments...);
            block.barrier.arrive_and_wait();
          }
    });
  }
  for (std::thread& thread : running) thread.join();
  for (Meeting* warp : warps) delete warp;
}
