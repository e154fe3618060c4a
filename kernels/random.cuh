// What a kernel file may use whose functions get a random number after x, uniform between the first two parameters, lower
// and upper, and the same in forward and in backward. The numbers come from Philox4x32-10 (Salmon et al., Parallel Random
// Numbers: As Easy as 1, 2, 3, 2011), whose counter is made of the seed and the place of the element in memory. The key is
// fixed, so that the compiler knows the keys of all rounds; two seeds never share a counter.
//
// One call of the generator makes 16 random bytes, which serve as many elements as a 16-byte vector holds: 16 bits each for
// float16 and bfloat16, 32 (of which 23 are used) for float32, 64 (52) for float64. CPU and GPU make the same numbers.
#pragma once

#include "elementwise.cuh"

namespace jitact {

struct Random16 { uint32_t w[4]; };

JITACT_INLINE constexpr Random16 philox(uint64_t place, uint64_t seed) {
  uint32_t c0 = uint32_t(place), c1 = uint32_t(place >> 32), c2 = uint32_t(seed), c3 = uint32_t(seed >> 32);
  for (uint32_t round = 0; round < 10; round++) {
    const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(b >> 32) ^ c1 ^ (0xA4093822u + round * 0x9E3779B9u);
    c1 = uint32_t(b);
    c2 = uint32_t(a >> 32) ^ c3 ^ (0x299F31D0u + round * 0xBB67AE85u);
    c3 = uint32_t(a);
  }
  return {c0, c1, c2, c3};
}

// Random bits as the mantissa of a float or a double, where they count steps above a base: cheaper than a conversion.
template <int bytes> struct Mantissa;

template <> struct Mantissa<2> {
  static constexpr double base = 0x1p23, step = 1, steps = 0x1p16;
  static JITACT_INLINE float of(uint32_t random) { return single::from_bits(0x4b000000u | random); }
};

template <> struct Mantissa<4> {
  static constexpr double base = 1, step = 0x1p-23, steps = 0x1p23;
  static JITACT_INLINE float of(uint32_t random) { return single::from_bits(0x3f800000u | random >> 9); }
};

template <> struct Mantissa<8> {
  static constexpr double base = 1, step = 0x1p-52, steps = 0x1p52;
  static JITACT_INLINE double of(uint64_t random) { return wide::from_bits(0x3ff0000000000000u | random >> 12); }
};

// Makes random bits numbers between lower and upper, the middles of as many parts as there are values of the bits.
template <typename T, int bytes>
class Uniform {
 public:
  Uniform(double lower, double upper)
      : scale_((upper - lower) / (M::step * M::steps)),
        offset_(lower - (upper - lower) * (M::base / (M::step * M::steps) - 0.5 / M::steps)) {}
  JITACT_INLINE T operator()(uint64_t random) const { return fma(T(M::of(random)), scale_, offset_); }

 private:
  using M = Mantissa<bytes>;
  T scale_, offset_;
};

}  // namespace jitact
