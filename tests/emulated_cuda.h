// Emulates enough of CUDA to run kernels on a CPU, one cluster after another, for tests without a GPU. Each thread of a cluster
// has a stack of its own and runs until it has to wait for others, in an order that is shuffled repeatedly. The functions of
// ptx.cuh are plain C++ here, rounded where the GPU's instructions are approximations.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#define __CUDA_ARCH__ 900
#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __restrict__
#define __shared__ static

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMemoryClockRate = 36,
  cudaDevAttrGlobalMemoryBusWidth = 37,
  cudaDevAttrL2CacheSize = 38,
  cudaDevAttrMaxThreadsPerMultiProcessor = 39,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
  cudaDevAttrReservedSharedMemoryPerBlock = 111,
};
inline void cudaGetDevice(int* device) { *device = 0; }
namespace emulated { inline int processors = 2; }
inline void cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? emulated::processors
           : attribute == cudaDevAttrMaxThreadsPerMultiProcessor ? 1024 : 1 << 18;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const Kernel&, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

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
inline uint32_t __byte_perm(uint32_t low, uint32_t high, unsigned selector) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  uint32_t picked = 0;
  for (int i = 0; i < 4; i++) picked |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return picked;
}
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 threadIdx(0, 0, 0), blockIdx(0, 0, 0), gridDim;

namespace emulated {

// A barrier.
struct Meeting {
  int expected, arrived = 0, turn = 0;
  double given[32] = {};

  int arrive() {
    const int mine = turn;
    if (++arrived == expected) arrived = 0, turn++;
    return mine;
  }
};

constexpr size_t kStatic = 1 << 20, kShared = kStatic + (1 << 18);  // bytes of shared memory per block: static, and in total

// An asynchronous copy. None is carried out before it is waited for.
struct Copy {
  void* to;
  const void* from;
  unsigned bytes;
};

struct Block {
  dim3 index;
  Meeting all;
  std::vector<Meeting> warps;
  char* memory;  // shared memory, NaN until written
  std::vector<Copy> copies;  // by the whole block
};

struct Cluster {
  Meeting all;
  std::vector<Block> blocks;
};

// Groups of a thread's copies, the last of which is still open.
using Copies = std::deque<std::vector<Copy>>;

struct Thread {
  Copies copies;
  void* place[5];                 // where it waits
  std::unique_ptr<char[]> stack;  // made when it first runs
  Block* block;
  int index, turn = 0;  // turn: for the cluster's barrier
  bool done = false;
};

inline Cluster* cluster;
inline Thread* current;
inline std::vector<Thread> all;                          // for a cluster's threads and blocks, one cluster after another
inline std::vector<std::unique_ptr<char[]>> memories;
inline void* scheduler[5];                               // where it waits
inline std::function<void()> body;

// Switches between stacks. Those of setjmp and ucontext take a system call each for signals, which nobody masks here.
[[noreturn, gnu::noinline]] inline void go_to(void** place) { __builtin_longjmp(place, 1); }
[[gnu::noinline]] inline void let_others_run() {
  if (!__builtin_setjmp(current->place)) go_to(scheduler);
}

inline void wait(const Meeting& meeting, int turn) {
  while (meeting.turn == turn) let_others_run();
}
inline void meet(Meeting& meeting) { wait(meeting, meeting.arrive()); }
inline Meeting& warp() { return current->block->warps[current->index / 32]; }

// A thread of one cluster after another.
inline void run_threads() {
  while (true) {
    body();
    meet(current->block->all);
    current->done = true;
    let_others_run();
  }
}

[[gnu::noinline]] inline void run_until_it_waits(Thread& thread) {
  if (__builtin_setjmp(scheduler)) return;
  if (thread.stack) go_to(thread.place);
  constexpr size_t bytes = 1 << 16;
  thread.stack.reset(new char[bytes]);
  ucontext_t start;
  getcontext(&start);
  start.uc_stack.ss_sp = thread.stack.get();
  start.uc_stack.ss_size = bytes;
  start.uc_link = nullptr;
  makecontext(&start, run_threads, 0);
  setcontext(&start);
}

inline void run_cluster(int threads, size_t count) {
  for (size_t t = 0; t < count; t++) {
    Thread& thread = all[t];
    thread.block = &cluster->blocks[t / threads];
    thread.index = int(t % threads);
    thread.done = false;
    thread.copies = Copies(1);
  }
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  static std::minstd_rand random;
  while (!order.empty()) {
    std::shuffle(order.begin(), order.end(), random);
    for (const int t : order) {
      current = &all[t];
      threadIdx = dim3(current->index, 0, 0);
      blockIdx = current->block->index;
      run_until_it_waits(all[t]);
    }
    order.erase(std::remove_if(order.begin(), order.end(), [&](int t) { return all[t].done; }), order.end());
  }
}

inline size_t shared_bytes = 0;
template <typename T>
struct Place { static inline const size_t offset = (shared_bytes += (sizeof(T) + 15) / 16 * 16) - (sizeof(T) + 15) / 16 * 16; };

// Runs clusters of `blocks` blocks, which are adjacent in x.
template <typename Kernel, typename... Arguments>
void launch_clusters(dim3 grid, int threads, unsigned blocks, const Kernel& kernel, const Arguments&... arguments) {
  if (shared_bytes > kStatic) std::abort();  // all kernels' objects have places of their own
  gridDim = grid;
  body = [&] { kernel(arguments...); };
  while (memories.size() < blocks) {
    memories.emplace_back(new char[kShared]);
    std::memset(memories.back().get(), 0xff, kShared);
  }
  const size_t count = threads * blocks;
  if (all.size() < count) all.resize(count);
  for (unsigned z = 0; z < grid.z; z++)
    for (unsigned y = 0; y < grid.y; y++)
      for (unsigned x = 0; x < grid.x; x += blocks) {
        Cluster here{{int(count)}, {}};
        for (unsigned b = 0; b < blocks; b++) {
          char* const memory = memories[b].get();
          std::memset(memory, 0xff, shared_bytes);  // what kernels may have written before
          std::memset(memory + kStatic, 0xff, kShared - kStatic);
          here.blocks.push_back({dim3(x + b, y, z), {threads}, std::vector<Meeting>((threads + 31) / 32, Meeting{32}), memory});
        }
        cluster = &here;
        run_cluster(threads, count);
      }
}

}  // namespace emulated

template <typename Kernel, typename... Arguments>
void launch_emulated(dim3 grid, int threads, const Kernel& kernel, const Arguments&... arguments) {
  emulated::launch_clusters(grid, threads, 1, kernel, arguments...);
}

inline void __syncthreads() { emulated::meet(emulated::current->block->all); }
inline void __syncwarp() { emulated::meet(emulated::warp()); }

template <typename V>
V value_of_lane(V value, int from) {
  emulated::Meeting& warp = emulated::warp();
  warp.given[threadIdx.x % 32] = double(value);
  emulated::meet(warp);
  const V result = V(warp.given[from]);
  emulated::meet(warp);
  return result;
}
template <typename V>
V __shfl_down_sync(unsigned, V value, int step, int width = 32) {
  const int lane = threadIdx.x % 32;
  return value_of_lane(value, lane % width + step < width ? lane + step : lane);
}
template <typename V>
V __shfl_up_sync(unsigned, V value, int step) {
  const int lane = threadIdx.x % 32;
  return value_of_lane(value, lane < step ? lane : lane - step);
}
template <typename V>
V __shfl_sync(unsigned, V value, int lane) { return value_of_lane(value, lane); }
template <typename V>
V __shfl_xor_sync(unsigned, V value, int lanes) { return value_of_lane(value, int(threadIdx.x % 32) ^ lanes); }

inline unsigned __ballot_sync(unsigned, bool value) {
  unsigned lanes = 0;
  for (int lane = 0; lane < 32; lane++) lanes |= unsigned(value_of_lane(value, lane)) << lane;
  return lanes;
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }

enum { cudaLaunchAttributeClusterDimension, cudaLaunchAttributeProgrammaticStreamSerialization };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributeNonPortableClusterSizeAllowed };
enum { cudaFuncAttributePreferredSharedMemoryCarveout = 9, cudaSharedmemCarveoutDefault = -1, cudaSharedmemCarveoutMaxShared = 100 };
struct cudaLaunchAttribute {
  int id;
  struct {
    dim3 clusterDim{1};
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
struct cudaFuncAttributes { int ptxVersion; };
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* code, const Kernel&) {
  code->ptxVersion = 90;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(const Kernel&, int, int) { return cudaSuccess; }
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const Kernel&, const cudaLaunchConfig_t*) {
  *clusters = emulated::processors;
  return cudaSuccess;
}
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* c, void (*kernel)(Parameters...), const Arguments&... arguments) {
  emulated::launch_clusters(c->gridDim, c->blockDim.x, c->numAttrs ? c->attrs[0].val.clusterDim.x : 1, kernel, arguments...);
  return cudaSuccess;
}

namespace jitact::ptx {

inline float reciprocal(float x) { return 1 / x; }
inline double reciprocal(double x) { return float(1 / x); }  // as inaccurate as the instruction
inline float rsqrt(float x) { return 1 / std::sqrt(x); }
inline float sqrt(float x) { return std::sqrt(x); }
using Policy = uint64_t;
constexpr Policy kEvictNormal = 0, kEvictLast = 1;
template <typename Words>
Words load(const Words* p, Policy) { return *p; }
inline uint32_t load_with_neighbours(const uint32_t* p) { return *p; }
inline float exp2(float x) { return x < -126 ? 0 : std::exp2(x); }
inline float log2(float x) { return std::log2(x); }
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
inline void multiply(uint32_t a, uint32_t b, uint32_t& low, uint32_t& high) {
  const uint64_t product = uint64_t(a) * b;
  low = uint32_t(product), high = uint32_t(product >> 32);
}
template <typename F>
F add(F a, F b) { return a + b; }
inline float product(float a, float b) { return a * b; }
inline uint32_t low_bits(unsigned n) { return n < 32 ? (1u << n) - 1 : ~0u; }
inline uint32_t max_halves(uint32_t a, uint32_t b) {
  float low[2], high[2];
  widen_half(a, low[0], high[0]), widen_half(b, low[1], high[1]);
  return narrow_half(max(low[0], low[1]), max(high[0], high[1]));
}
inline uint32_t max_bfloat16s(uint32_t a, uint32_t b) {
  const auto upper = [](uint32_t bits) { return same_bits<float>(bits & 0xffff0000u); };
  return narrow_bfloat16(max(upper(a << 16), upper(b << 16)), max(upper(a), upper(b)));
}
inline uint32_t equal_halves(uint32_t a, uint32_t b) {
  float low[2], high[2];
  widen_half(a, low[0], high[0]), widen_half(b, low[1], high[1]);
  return (low[0] == low[1] ? 0xffffu : 0) | (high[0] == high[1] ? 0xffff0000u : 0);
}
inline uint32_t equal_bfloat16s(uint32_t a, uint32_t b) {
  const auto are_equal = [](uint32_t a, uint32_t b) { return same_bits<float>(a) == same_bits<float>(b); };
  return (are_equal(a << 16, b << 16) ? 0xffffu : 0) | (are_equal(a & 0xffff0000u, b & 0xffff0000u) ? 0xffff0000u : 0);
}
inline void copy_async(void* to, const void* from, Policy) { emulated::current->copies.back().push_back({to, from, 16}); }
inline void copy_async_if(bool wanted, void* to, const void* from, Policy policy) {
  if (wanted) copy_async(to, from, policy);
}
inline void copy_word_async_if(bool wanted, uint32_t* to, uintptr_t from) {
  if (wanted) emulated::current->copies.back().push_back({to, reinterpret_cast<const void*>(from), 4});
}
inline uint32_t spread_signs(uint32_t w, uint32_t places) {
  uint32_t spread = 0;
  for (int byte = 0; byte < 4; byte++) spread |= (w >> (places >> 4 * byte & 3) * 8 & 0x80 ? 0xffu : 0) << 8 * byte;
  return spread;
}
inline void forget(uint32_t&) {}
inline void forget(int64_t&) {}
inline void let_next_begin() {}
inline void wait_for_last() {}
constexpr bool kBeginsEarly = true;
template <typename V>
V load_anew(const V* p) { return *p; }
inline void commit_copies() { emulated::current->copies.emplace_back(); }
inline void wait_for_copies(int left) {
  for (auto& groups = emulated::current->copies; int(groups.size()) - 1 > std::min(left, 3); groups.pop_front())
    for (const emulated::Copy& copy : groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
}

template <typename T>
T& shared() { return *reinterpret_cast<T*>(&emulated::current->block->memory[emulated::Place<T>::offset]); }
inline unsigned dynamic_shared() { return emulated::kStatic; }
inline void copy_async(unsigned to, const void* from, Policy policy) {
  copy_async(&emulated::current->block->memory[to], from, policy);
}
inline void load_shared(unsigned from, uint32_t (&w)[4]) { std::memcpy(w, &emulated::current->block->memory[from], 16); }
inline void store_shared(unsigned to, const uint32_t (&w)[4]) { std::memcpy(&emulated::current->block->memory[to], w, 16); }
inline void cluster_started() { emulated::current->turn = emulated::cluster->all.arrive(); }
inline int cluster_rank() { return int(emulated::current->block - emulated::cluster->blocks.data()); }
inline unsigned cluster_id() { return blockIdx.x / unsigned(emulated::cluster->blocks.size()); }
inline void cluster_wait() { emulated::wait(emulated::cluster->all, emulated::current->turn); }

struct Barrier { int16_t phase, pending; int32_t bytes; };
inline void check_phase(Barrier* barrier) {
  if (barrier->pending == 0 && barrier->bytes == 0) barrier->phase ^= 1, barrier->pending = 1;
}
inline void start(Barrier* barrier) { *barrier = {0, 1, 0}; }
inline void expect(Barrier* barrier, unsigned bytes) {
  barrier->bytes += int(bytes), barrier->pending--;
  check_phase(barrier);
}
inline void wait(Barrier* barrier, int phase) {
  while (barrier->phase == phase) emulated::let_others_run();
}
inline void send(float* here, unsigned block, float v, Barrier* barrier) {
  const auto there = [&](void* p) {
    return &emulated::cluster->blocks[block].memory[reinterpret_cast<char*>(p) - emulated::current->block->memory];
  };
  std::memcpy(there(here), &v, sizeof v);
  Barrier* const other = reinterpret_cast<Barrier*>(there(barrier));
  other->bytes -= int(sizeof v);
  check_phase(other);
}

inline void fetch_to_l2(const void* from, unsigned bytes) {  // reads what has to be there
  if (bytes % 16 || uintptr_t(from) % 16) std::abort();
  const volatile char* const read = static_cast<const char*>(from);
  if (bytes) read[0], read[bytes - 1];
}
inline void expect_by_block(Barrier* barrier, unsigned bytes) {
  if (threadIdx.x == 0) start(barrier), expect(barrier, bytes);
}
inline void copy_by_block(void* to, const void* from, unsigned bytes) {
  if (bytes % 16 || uintptr_t(to) % 16 || uintptr_t(from) % 16) std::abort();
  std::memcpy(to, from, bytes);
}
inline void load_by_block(uint32_t* to, const void* from, unsigned bytes, Barrier*) {
  if (threadIdx.x == 0) emulated::current->block->copies.push_back({to, from, bytes});
}
inline void wait_by_block(Barrier* barrier) {
  __syncthreads();
  for (const auto& copy : std::exchange(emulated::current->block->copies, {})) {
    copy_by_block(copy.to, copy.from, copy.bytes);
    barrier->bytes -= int(copy.bytes);
    check_phase(barrier);
  }
  wait(barrier, 0);
}
inline void store_by_block(void* to, const uint32_t* from, unsigned bytes) {
  __syncthreads();
  if (threadIdx.x == 0) copy_by_block(to, from, bytes);
}

}  // namespace jitact::ptx
