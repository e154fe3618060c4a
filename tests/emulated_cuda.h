// Enough of CUDA to run kernels as threads of the CPU, block after block: for testing where there is no GPU.
#pragma once

#include <barrier>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __restrict__
#define __shared__ static

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }

struct double2 { double x, y; };
struct float2 { float x, y; };
struct uint4 { uint32_t x, y, z, w; };
using __half = _Float16;
struct __half2 { __half x, y; };
inline float2 __half22float2(__half2 p) { return {float(p.x), float(p.y)}; }
inline __half2 __float22half2_rn(float2 p) { return {__half(p.x), __half(p.y)}; }
struct __nv_bfloat16 { uint16_t bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline float __bfloat162float(__nv_bfloat16 b) {
  const uint32_t bits = uint32_t(b.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};  // no NaN comes here
}
inline float2 __bfloat1622float2(__nv_bfloat162 p) { return {__bfloat162float(p.x), __bfloat162float(p.y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 p) { return {__float2bfloat16_rn(p.x), __float2bfloat16_rn(p.y)}; }

template <typename V>
void __stcg(V* to, const V& v) {
  *to = v;
}

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
inline void __pipeline_commit() {}
inline void __pipeline_wait_prior(int) {}

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
V __shfl_down_sync(unsigned, V value, int step, int width = 32) {
  const int lane = threadIdx.x % 32, from = lane % width + step < width ? lane + step : lane;
  warp_of_thread->given[lane] = double(value);
  warp_of_thread->barrier.arrive_and_wait();
  const V result = V(warp_of_thread->given[from]);
  warp_of_thread->barrier.arrive_and_wait();
  return result;
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
