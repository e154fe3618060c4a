// The generator of random.cuh on a CPU, for a block of elements.
#pragma once

#include <cstring>

#include "random.cuh"

namespace jitact::loops {

// The 16 random bytes of each of `calls` places from `place` on; `calls` is a multiple of 8.
#ifdef __AVX2__
// Several places per vector, in the lower halves of 64-bit lanes, as vpmuludq multiplies those. Compilers do not find this and
// use three times as many instructions.
#ifdef __AVX512F__
using Places = uint64_t __attribute__((vector_size(64)));
#else
using Places = uint64_t __attribute__((vector_size(32)));
#endif
inline Places times_low_halves(Places a, Places b) {
  Places product;
  asm("vpmuludq %2, %1, %0" : "=v"(product) : "v"(a), "v"(b));
  return product;
}
inline void fill_philox(uint64_t* words, uint64_t place, uint64_t seed, uint32_t stream, int64_t calls) {
  constexpr int64_t side = sizeof(Places) / 8;
  const Places by0 = Places{} + kFactor0, by2 = Places{} + kFactor2;
  Places at;
  for (int64_t k = 0; k < side; k++) at[k] = place + uint64_t(k);
  for (int64_t i = 0; i < calls; i += side, at += uint64_t(side)) {
    Places c0 = at, c1 = at >> 32 | uint64_t(stream) << 28, c2 = Places{} + seed, c3 = Places{} + (seed >> 32);
    for (uint32_t round = 0; round < kRounds; round++) {
      const Places a = times_low_halves(c0, by0), b = times_low_halves(c2, by2);
      c0 = b >> 32 ^ c1 ^ uint64_t(key0(round));
      c1 = b;
      c2 = a >> 32 ^ c3 ^ uint64_t(key2(round));
      c3 = a;
    }
    const Places first = (c0 & 0xffffffffu) | c1 << 32, second = (c2 & 0xffffffffu) | c3 << 32;
    for (int64_t k = 0; k < side; k++) {
      words[2 * (i + k)] = first[k];
      words[2 * (i + k) + 1] = second[k];
    }
  }
}
#else
inline void fill_philox(uint64_t* words, uint64_t place, uint64_t seed, uint32_t stream, int64_t calls) {
  for (int64_t i = 0; i < calls; i++) {
    const Random16 random = philox(place + uint64_t(i), seed, stream);
    std::memcpy(words + 2 * i, &random, sizeof(random));
  }
}
#endif

}  // namespace jitact::loops
