// The GPU's instructions that CUDA has no function for. What tests run on a CPU in place of a GPU has its own of these.
#pragma once

#include <cstdint>

namespace jitact::ptx {

JITACT_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
JITACT_DEVICE double reciprocal(double x) {
  double y;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));  // to 20 bits
  return y;
}
JITACT_DEVICE float rsqrt(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
JITACT_DEVICE float sqrt(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
JITACT_DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
JITACT_DEVICE float sin(float x) {
  float y;
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#if __CUDA_ARCH__ >= 800
// NaN when either argument is.
JITACT_DEVICE float min(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
JITACT_DEVICE float max(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
#endif

// The two halves of a word, as floats and back.
JITACT_DEVICE void widen_half(uint32_t word, float& low, float& high) {
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(low), "=f"(high) : "r"(word));
}
JITACT_DEVICE uint32_t narrow_half(float low, float high) {
  uint32_t word;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
  asm("{ .reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h}; }"
      : "=r"(word) : "f"(low), "f"(high));
#endif
  return word;
}
JITACT_DEVICE uint32_t narrow_bfloat16(float low, float high) {
#if __CUDA_ARCH__ >= 800
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  const auto bits = [](float f) {
    const uint32_t u = __float_as_uint(f);
    return f != f ? 0x7fffu : (u + 0x7fff + (u >> 16 & 1)) >> 16;
  };
  return bits(low) | bits(high) << 16;
#endif
}

// 16 bytes from memory to shared memory, without waiting. Each call is a group of its own.
JITACT_DEVICE void copy_async(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16; cp.async.commit_group;"
               :: "r"(unsigned(__cvta_generic_to_shared(to))), "l"(from) : "memory");
#else
  *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
#endif
}

// Waits for all groups but the last `left`, which the compiler must know.
JITACT_DEVICE void wait_for_copies(int left) {
#if __CUDA_ARCH__ >= 800
  if (left == 0) asm volatile("cp.async.wait_group 0;" ::: "memory");
  if (left == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
  if (left == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
#endif
}

// Shared memory of a type: one object for each block and type.
template <typename T>
JITACT_DEVICE T& shared() {
  __shared__ T object;
  return object;
}

// What the blocks of a cluster do together. Older GPUs have no clusters, and never come here. `started` says that a block is
// there, `arrive` that what it wrote is, too.
JITACT_DEVICE void cluster_started() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
JITACT_DEVICE void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
}
JITACT_DEVICE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
// Writes to the place in another block's shared memory that `here` is in this one's.
JITACT_DEVICE void store_there(float* here, unsigned block, float v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .b32 a; mapa.shared::cluster.u32 a, %0, %1; st.shared::cluster.f32 [a], %2; }"
               :: "r"(unsigned(__cvta_generic_to_shared(here))), "r"(block), "f"(v) : "memory");
#endif
}

}  // namespace jitact::ptx
