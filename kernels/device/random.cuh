// Random numbers, recomputed in backward from an 8-byte seed. They are those of Philox4x32 (Salmon et al., Parallel Random
// Numbers: As Easy as 1, 2, 3, 2011) with 7 rounds, the fewest that pass all of the tests there. The counter consists of the
// seed, the element's position in memory, and the stream; each Random argument of a function has its own stream. The key is
// fixed, so the keys of all rounds are compile-time constants; two seeds never share a counter.
//
// One call of the generator makes 16 random bytes, for the elements of a 16-byte vector: 16 bits each for float16 and
// bfloat16, 32 (of which 23 are used) for float32, 64 (52) for float64. CPU and GPU make the same numbers.
#pragma once

#include "math.cuh"

namespace jitact {

struct Random16 { uint32_t w[4]; };

constexpr uint32_t kRounds = 7, kFactor0 = 0xD2511F53u, kFactor2 = 0xCD9E8D57u;
JITACT_INLINE constexpr uint32_t key0(uint32_t round) { return 0xA4093822u + round * 0x9E3779B9u; }
JITACT_INLINE constexpr uint32_t key2(uint32_t round) { return 0x299F31D0u + round * 0xBB67AE85u; }

// A 32 x 32 bit product. nvcc extracts the upper half of a 64-bit one by an addition of 0, a quarter of the generator's time.
struct Product { uint32_t low, high; };
template <uint32_t factor>
JITACT_INLINE constexpr Product times(uint32_t a) {
#ifdef __CUDA_ARCH__
  Product product{};
  ptx::multiply(factor, a, product.low, product.high);
  return product;
#else
  const uint64_t product = uint64_t(factor) * a;
  return {uint32_t(product), uint32_t(product >> 32)};
#endif
}

// `place` is the index of a 16-byte vector, so it is below 2^59; the bits above hold the stream, at most 15.
template <uint32_t rounds = kRounds>
JITACT_INLINE constexpr Random16 philox(uint64_t place, uint64_t seed, uint32_t stream) {
  uint32_t c0 = uint32_t(place), c1 = uint32_t(place >> 32) | stream << 28, c2 = uint32_t(seed), c3 = uint32_t(seed >> 32);
  for (uint32_t round = 0; round < rounds; round++) {
    const Product a = times<kFactor0>(c0), b = times<kFactor2>(c2);
    c0 = b.high ^ c1 ^ key0(round);
    c1 = b.low;
    c2 = a.high ^ c3 ^ key2(round);
    c3 = a.low;
  }
  return {c0, c1, c2, c3};
}

// Random bits as the mantissa of a float or double, where they count steps above a base: cheaper than a conversion. They are
// the top bits of a word; the bits below them are ignored.
template <typename T> struct Mantissa;

template <> struct Mantissa<Narrow> {
  using Bits = uint16_t;
  using Word = uint32_t;
  static constexpr int count = 16;
  static constexpr double base = 0x1p23, step = 1;
  static JITACT_INLINE float of(Word random) { return single::from_bits(0x4b000000u | random >> 16); }
};

JITACT_BRAIN(template <> struct Mantissa<Brain> : Mantissa<Narrow> {};)

template <> struct Mantissa<Single> {
  using Bits = uint32_t;
  using Word = uint32_t;
  static constexpr int count = 23;
  static constexpr double base = 1, step = 0x1p-23;
  static JITACT_INLINE float of(Word random) { return single::from_bits(0x3f800000u | random >> 9); }
};

template <> struct Mantissa<Double> {
  using Bits = uint64_t;
  using Word = uint64_t;
  static constexpr int count = 52;
  static constexpr double base = 1, step = 0x1p-52;
  static JITACT_INLINE double of(Word random) { return wide::from_bits(0x3ff0000000000000u | random >> 12); }
};

template <typename T>
class Random {
  using M = Mantissa<T>;
  using Word = typename M::Word;

 public:
  using Bits = typename M::Bits;
  static constexpr double steps = double(uint64_t(1) << M::count);

  JITACT_INLINE explicit Random(Bits bits) : word_(Word(bits) << (8 * (sizeof(Word) - sizeof(Bits)))) {}
  // From the top bits of a word.
  static JITACT_INLINE Random at_top(Word word) {
    Random random{Bits()};
    random.word_ = word;
    return random;
  }

  // Uniform between two numbers: the midpoint of one of 2^count equal intervals.
  JITACT_INLINE T between(T lower, T upper) const {
    constexpr double scale = 1 / (M::step * steps);
    const T range = upper - lower;
    return fma(T(M::of(word_)), range * scale, fma(range, -(M::base * scale - 0.5 / steps), lower));
  }

  // True with probability `share`, rounded to a multiple of 2^-count.
  JITACT_INLINE bool below(T share) const {
#ifdef __CUDA_ARCH__
    // Compares words, which saves the conversion of each to a number.
    if constexpr (sizeof(T) == 4) {
      const float part = parts(share).v;
      return (word_ < uint32_t(part) << (32 - M::count)) | (part >= float(steps));
    }
#endif
    return T(M::of(word_)) < fma(parts(share), M::step, M::base);
  }
  // `share` rounded, in units of 2^-count.
  static JITACT_INLINE T parts(T share) { return rint(share * steps); }

 private:
  Word word_;
};

// 0 with probability p, also for NaN and infinite values, else value / (1 - p). p is rounded as Random rounds it, so that the
// scale matches the actual probability. The quotient is a reciprocal corrected by its residual: the slow path of a division
// would delay the loads of elements.
template <typename T>
JITACT_INLINE T dropout(std::type_identity_t<T> value, Random<T> random, std::type_identity_t<T> p) {
  constexpr double steps = Random<T>::steps;
  const T left = steps - Random<T>::parts(p), rough = steps * reciprocal(left);
  return select(random.below(p), T(0), value * fma(rough * (1 / steps), fma(-left, rough, steps), rough));
}

// For dual numbers; the random number itself has no derivative.
template <typename T>
class Random<Dual<T>> {
 public:
  JITACT_INLINE explicit Random(Random<T> number) : number_(number) {}
  JITACT_INLINE Random<T> number() const { return number_; }

  JITACT_INLINE Dual<T> between(Dual<T> lower, Dual<T> upper) const {
    const T t = number_.between(T(0), T(1));
    return {number_.between(lower.value, upper.value), fma(t, upper.derivative, (1 - t) * lower.derivative),
            joined(lower.varies, upper.varies)};
  }

 private:
  Random<T> number_;
};

template <typename T>
JITACT_INLINE Dual<T> dropout(std::type_identity_t<Dual<T>> value, Random<Dual<T>> random, std::type_identity_t<Dual<T>> p) {
  return {dropout(value.value, random.number(), p.value), dropout(value.derivative, random.number(), p.value), value.varies};
}

}  // namespace jitact
