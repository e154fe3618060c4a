// Instructions without a CUDA function. The tests' CUDA emulation on a CPU has its own versions.
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
JITACT_DEVICE float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
JITACT_DEVICE float sin(float x) {
  float y;
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Both halves of a 64-bit product.
JITACT_DEVICE void multiply(uint32_t a, uint32_t b, uint32_t& low, uint32_t& high) {
  asm("{ .reg .b64 p; mul.wide.u32 p, %2, %3; mov.b64 {%0, %1}, p; }" : "=r"(low), "=r"(high) : "r"(b), "r"(a));
}

// A product, and a sum, that the compiler does not contract to an fma.
JITACT_DEVICE float product(float a, float b) { return __fmul_rn(a, b); }
JITACT_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
JITACT_DEVICE double add(double a, double b) { return __dadd_rn(a, b); }

#if __CUDA_ARCH__ >= 800
// NaN if either argument is.
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

// A word whose lowest n bits are set, all if n >= 32.
JITACT_DEVICE uint32_t low_bits(unsigned n) {
  uint32_t bits;
  asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(bits) : "r"(n));
  return bits;
}

// The two 16-bit halves of a word to floats, and back.
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

// The maximum of each half; NaN if either is.
JITACT_DEVICE uint32_t max_halves(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 800
  uint32_t word;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  return word;
#else
  float low[2], high[2];
  widen_half(a, low[0], high[0]), widen_half(b, low[1], high[1]);
  const auto larger = [](const float (&t)[2]) { return t[0] > t[1] || t[0] != t[0] ? t[0] : t[1]; };
  return narrow_half(larger(low), larger(high));
#endif
}
JITACT_DEVICE uint32_t max_bfloat16s(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 800
  uint32_t word;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  return word;
#else
  const auto larger = [](uint32_t a, uint32_t b) {
    const float s = __uint_as_float(a), t = __uint_as_float(b);
    return s > t || s != s ? a : b;
  };
  return larger(a << 16, b << 16) >> 16 | larger(a & 0xffff0000u, b & 0xffff0000u);
#endif
}

// All bits of those halves that are equal floats.
JITACT_DEVICE uint32_t equal_halves(uint32_t a, uint32_t b) {
  uint32_t equal;
  asm("set.eq.u32.f16x2 %0, %1, %2;" : "=r"(equal) : "r"(a), "r"(b));
  return equal;
}
JITACT_DEVICE uint32_t equal_bfloat16s(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 900
  uint32_t equal;
  asm("set.eq.u32.bf16x2 %0, %1, %2;" : "=r"(equal) : "r"(a), "r"(b));
  return equal;
#else
  const auto equal = [](uint32_t a, uint32_t b) { return __uint_as_float(a) == __uint_as_float(b); };
  return (equal(a << 16, b << 16) ? 0xffffu : 0) | (equal(a & 0xffff0000u, b & 0xffff0000u) ? 0xffff0000u : 0);
#endif
}

// How the L2 cache keeps what is read: for compute capability 9.0, by the values that CUTLASS has for it (CacheHintSm90).
using Policy = uint64_t;
constexpr Policy kEvictNormal = 0x1000000000000000, kEvictLast = 0x14f0000000000000;
// Loads words of global memory: one, two, or a multiple of four.
template <typename Words>
JITACT_DEVICE Words load(const Words* p, Policy policy) {
#if __CUDA_ARCH__ == 900
  constexpr int count = sizeof(Words) / 4;
  Words v;
  if constexpr (count == 1) {
    asm volatile("ld.global.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(v.w[0]) : "l"(p), "l"(policy));
  } else if constexpr (count == 2) {
    asm volatile("ld.global.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;" : "=r"(v.w[0]), "=r"(v.w[1]) : "l"(p), "l"(policy));
  } else {
    JITACT_UNROLL for (int i = 0; i < count; i += 4)
      asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                   : "=r"(v.w[i]), "=r"(v.w[i + 1]), "=r"(v.w[i + 2]), "=r"(v.w[i + 3]) : "l"(p->w + i), "l"(policy));
  }
  return v;
#else
  return *p;
#endif
}

// Starts to fetch bytes, a multiple of 16 from an address that is one, to the L2 cache.
JITACT_DEVICE void fetch_to_l2(const void* from, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");
#endif
}

// Asynchronous copy of 16 bytes to shared memory. A thread's copies up to commit_copies() form a group.
JITACT_DEVICE void copy_async(unsigned to, const void* from, Policy policy) {
#if __CUDA_ARCH__ == 900
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "l"(policy) : "memory");
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
#else
  const uint4 v = *static_cast<const uint4*>(from);
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" :: "r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
}
JITACT_DEVICE void copy_async(void* to, const void* from, Policy policy) {
  copy_async(unsigned(__cvta_generic_to_shared(to)), from, policy);
}
// The same if it is wanted; and of a word, at an address of global memory. Without a branch, in which compilers put what finds the
// addresses.
JITACT_DEVICE void copy_async_if(bool wanted, void* to, const void* from, Policy policy) {
#if __CUDA_ARCH__ == 900
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %3; }"
               :: "r"(unsigned(__cvta_generic_to_shared(to))), "l"(from), "r"(unsigned(wanted)), "l"(policy) : "memory");
#elif __CUDA_ARCH__ >= 800
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16; }"
               :: "r"(unsigned(__cvta_generic_to_shared(to))), "l"(from), "r"(unsigned(wanted)) : "memory");
#else
  if (wanted) copy_async(to, from, policy);
#endif
}
JITACT_DEVICE void copy_word_async_if(bool wanted, uint32_t* to, uintptr_t from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], 4; }"
               :: "r"(unsigned(__cvta_generic_to_shared(to))), "l"(from), "r"(unsigned(wanted)) : "memory");
#else
  if (wanted) *to = *reinterpret_cast<const uint32_t*>(from);
#endif
}
JITACT_DEVICE void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the thread's last `left` groups are incomplete.
JITACT_DEVICE void wait_for_copies(int left) {
#if __CUDA_ARCH__ >= 800
  if (left == 0) asm volatile("cp.async.wait_group 0;" ::: "memory");
  else if (left == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
  else if (left == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
  else asm volatile("cp.async.wait_group 3;" ::: "memory");
#endif
}

// Byte i of the result is 0xff or 0, by the sign of that byte of w whose index + 8 is hex digit i of `places`, from the lowest.
JITACT_DEVICE uint32_t spread_signs(uint32_t w, uint32_t places) {
  uint32_t spread;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(spread) : "r"(w), "r"(places));
  return spread;
}

// The compiler must assume that this changes the value, so it keeps nothing derived from it in registers.
JITACT_DEVICE void forget(uint32_t& w) { asm volatile("" : "+r"(w)); }
JITACT_DEVICE void forget(int64_t& n) { asm volatile("" : "+l"(n)); }

// Loads a word of global memory, and has the L2 cache fetch the 256 bytes around it.
JITACT_DEVICE uint32_t load_with_neighbours(const uint32_t* p) {
#if __CUDA_ARCH__ >= 800
  uint32_t word;
  asm volatile("ld.global.L2::256B.u32 %0, [%1];" : "=r"(word) : "l"(p));
  return word;
#else
  return *p;
#endif
}

// let_next_begin allows the next kernel to start, if launched by early::launch; wait_for_last, in that kernel, waits until the
// ones before have ended.
JITACT_DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
JITACT_DEVICE void wait_for_last() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Whether kernels that wait may begin early.
#if __CUDA_ARCH__ >= 900
constexpr bool kBeginsEarly = true;
#else
constexpr bool kBeginsEarly = false;
#endif
// Loads what another kernel may have written since it was loaded last: not from the first-level cache.
template <typename V>
JITACT_DEVICE V load_anew(const V* p) { return __ldcg(p); }

// Static shared memory: one object per block and type.
template <typename T>
JITACT_DEVICE T& shared() {
  __shared__ T object;
  return object;
}

// The address of dynamic shared memory; loads and stores of 16 bytes of shared memory.
JITACT_DEVICE unsigned dynamic_shared() {
  extern __shared__ uint4 dynamic[];
  return unsigned(__cvta_generic_to_shared(dynamic));
}
JITACT_DEVICE void load_shared(unsigned from, uint32_t (&w)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(from) : "memory");
}
JITACT_DEVICE void store_shared(unsigned to, const uint32_t (&w)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" :: "r"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}

// Operations of a cluster of blocks; a single block is a cluster too, also on older GPUs. cluster_started announces that a
// block has initialised its barriers.
JITACT_DEVICE void cluster_started() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
JITACT_DEVICE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
JITACT_DEVICE int cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return int(rank);
}
JITACT_DEVICE unsigned cluster_id() {
#if __CUDA_ARCH__ >= 900
  unsigned id;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(id));
  return id;
#else
  return blockIdx.x;
#endif
}
// A barrier for bytes sent to a block. In each of the two alternating phases, one thread declares how many are expected.
using Barrier = uint64_t;
JITACT_DEVICE void start(Barrier* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster;"
               :: "r"(unsigned(__cvta_generic_to_shared(barrier))) : "memory");
#endif
}
JITACT_DEVICE void expect(Barrier* barrier, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(unsigned(__cvta_generic_to_shared(barrier))), "r"(bytes) : "memory");
#endif
}
JITACT_DEVICE void wait(Barrier* barrier, int phase) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .pred p; again_%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again_%=; }"
               :: "r"(unsigned(__cvta_generic_to_shared(barrier))), "r"(phase) : "memory");
#endif
}
// Stores v at the address of `here` in another block's shared memory, and counts its bytes at that block's barrier.
JITACT_DEVICE void send(float* here, unsigned block, float v, Barrier* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .b32 a, b; mapa.shared::cluster.u32 a, %0, %1; mapa.shared::cluster.u32 b, %2, %1; "
               "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [a], %3, [b]; }"
               :: "r"(unsigned(__cvta_generic_to_shared(here))), "r"(block),
                  "r"(unsigned(__cvta_generic_to_shared(barrier))), "f"(v) : "memory");
#endif
}

// Copies between global and shared memory for a block, all of whose threads call these; addresses and sizes are multiples of 16
// bytes. expect_by_block prepares a barrier, once, for the bytes that load_by_block copies; wait_by_block returns when they are
// there.
JITACT_DEVICE void expect_by_block(Barrier* barrier, unsigned bytes) {
  if (threadIdx.x != 0) return;
  start(barrier);
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  expect(barrier, bytes);
}
JITACT_DEVICE void load_by_block(uint32_t* to, const void* from, unsigned bytes, Barrier* barrier) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(unsigned(__cvta_generic_to_shared(to))), "l"(from), "r"(bytes),
                    "r"(unsigned(__cvta_generic_to_shared(barrier))) : "memory");
#else
  for (unsigned i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16)
    copy_async(reinterpret_cast<char*>(to) + i, static_cast<const char*>(from) + i, kEvictNormal);
  commit_copies();
#endif
}
JITACT_DEVICE void wait_by_block(Barrier* barrier) {
#if __CUDA_ARCH__ >= 900
  __syncthreads();  // until the barrier has been prepared
  wait(barrier, 0);
#else
  wait_for_copies(0);
  __syncthreads();
#endif
}
// What the block has written before is stored. It must not write there again.
JITACT_DEVICE void store_by_block(void* to, const uint32_t* from, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0 && bytes > 0)
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2; cp.async.bulk.commit_group; "
                 "cp.async.bulk.wait_group.read 0;"
                 :: "l"(to), "r"(unsigned(__cvta_generic_to_shared(from))), "r"(bytes) : "memory");
#else
  __syncthreads();
  for (unsigned i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16)
    *reinterpret_cast<uint4*>(static_cast<char*>(to) + i) = *reinterpret_cast<const uint4*>(from + i / 4);
#endif
}

}  // namespace jitact::ptx
