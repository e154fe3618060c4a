// Loads and stores of the GPU's loop over rows in a build for one type of x, one of the result, and a mask: as many adjacent
// elements as a vector of the type they are computed in has.
#pragma once

#include "memory_cuda.cuh"
#include "rows_call.h"

namespace jitact::rows {

struct Floats { float v; };  // stored as float, computed as 16-bit types are

}  // namespace jitact::rows

namespace jitact::loops {

template <> struct Storage<rows::Floats> : AsItIs<Narrow> {};

}  // namespace jitact::loops

namespace jitact::rows {

static_assert(!kConverts || std::is_same_v<Output, float>);
// The element type in which rows are held.
template <Op op>
using Computed = std::conditional_t<kVectorSize<op> == 8, Input, std::conditional_t<std::is_same_v<Output, float>, float, Floats>>;

template <typename E, int size>
struct alignas(sizeof(E) * size < 16 ? sizeof(E) * size : 16) Side { E of[size]; };

template <typename T, typename E, int size>
JITACT_DEVICE void widen(const Side<E, size>& from, T (&t)[size]) {
  if constexpr (std::is_arithmetic_v<E>) {
    JITACT_UNROLL for (int i = 0; i < size; i++) t[i] = float(from.of[i]);
  } else {
    JITACT_UNROLL for (int i = 0; i < size; i += 2) {
      typename loops::Storage<E>::T low, high;
      loops::Storage<E>::widen_pair(from.of[i].bits | uint32_t(from.of[i + 1].bits) << 16, low, high);
      t[i] = low.v, t[i + 1] = high.v;
    }
  }
}

// Converts results T to elements E.
template <typename E, typename T, int count>
struct Packed {
  using Element = E;
  using Vector = Side<E, count>;
  static JITACT_DEVICE Vector narrow(const T (&t)[count]) {
    Vector to;
    if constexpr (std::is_arithmetic_v<E>) {
      JITACT_UNROLL for (int i = 0; i < count; i++) to.of[i] = E(t[i].v);
    } else {
      JITACT_UNROLL for (int i = 0; i < count; i += 2) {
        const uint32_t word = loops::Storage<E>::narrow_pair(t[i].v, t[i + 1].v);
        to.of[i].bits = uint16_t(word), to.of[i + 1].bits = uint16_t(word >> 16);
      }
    }
    return to;
  }
};

// The layout of a mask's rows, and the order in which rows are processed. Rows that share a row of the mask but are far apart,
// as those of attention heads, are processed one after another if the cache would not keep the mask from one head to the next.
class MaskOfRows {
 public:
  MaskOfRows() = default;
  MaskOfRows(const Mask& mask, int64_t length)
      : step(int(mask.step)), scale(mask.scale), data_(mask.data), by_middle_(mask.sizes[0]), by_last_(mask.sizes[1]),
        middle_(int(mask.sizes[0])), last_(int(mask.sizes[1])), strides_{mask.strides[0], mask.strides[1], mask.strides[2]} {
    const int64_t bytes = length * int64_t(sizeof(MaskBits));
    turns_ = mask.strides[1] == 0 && mask.strides[2] != 0 && length * int64_t(sizeof(Input)) >= kApart && last_ * bytes >= kCached;
  }
  // The row that is processed as the n-th.
  JITACT_DEVICE unsigned row_at(unsigned n) const {
    if (!turns_) return n;
    const unsigned others = by_middle_.divide_small(n), first = by_last_.divide_small(others);
    return (first * middle_ + (n - others * middle_)) * last_ + (others - first * last_);
  }
  JITACT_DEVICE const MaskBits* of(unsigned row) const {
    const unsigned others = by_last_.divide_small(row), first = by_middle_.divide_small(others);
    const int64_t begin = int64_t(first) * strides_[0] + int64_t(others - first * middle_) * strides_[1] +
                          int64_t(row - others * last_) * strides_[2];
    return static_cast<const MaskBits*>(data_) + begin;
  }

  int step;  // stride within a row: 1 or 0
  float scale;

 private:
  // Bytes from which a row may be processed apart from its neighbours, and from which a mask would not stay in the cache.
  static constexpr int64_t kApart = 2048, kCached = 6 << 20;

  const void* data_;
  loops::Divisor by_middle_, by_last_;
  int middle_, last_;
  bool turns_;
  int64_t strides_[3];
};

// Vectors whose masks are loaded at the same time.
constexpr int kMasksAtOnce = !kMasks || sizeof(MaskBits) == 4 ? 4 : 8;

// Adjacent elements as words: if loaded as elements, the compiler would wait for them at once.
template <typename E, int size>
struct alignas(alignof(Side<E, size>)) SideWords {
  uint32_t w[size * sizeof(E) / 4];

  JITACT_DEVICE Side<E, size> side() const { return bit_cast<Side<E, size>>(*this); }
};
template <int size>
struct MaskWords : SideWords<MaskBits, size> {
  static constexpr int bytes = sizeof(MaskBits);
  using SideWords<MaskBits, size>::w;

  JITACT_DEVICE void set(int e, MaskBits value) {
    using Bits = std::conditional_t<bytes == 4, uint32_t, std::conditional_t<bytes == 2, uint16_t, uint8_t>>;
    w[e * bytes / 4] |= uint32_t(bit_cast<Bits>(value)) << (e * bytes % 4 * 8);
  }
  // For bool: all bits of those elements of the vector's word i that take part.
  JITACT_DEVICE uint32_t spread(int i) const {
    constexpr int each = size / 4;  // elements of a word
    const uint32_t bools = w[i * each / 4], signs = ((bools & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bools;
    return ptx::spread_signs(signs, (each == 1 ? 0x8888u : 0x9988u) + 0x1111u * uint32_t(i * each % 4));
  }
};

}  // namespace jitact::rows
