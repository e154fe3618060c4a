// Loads and stores of the GPU's loop over rows in a build for one type of x, one of the result, and a mask: as many adjacent
// elements as a vector of the type they are computed in has.
#pragma once

#include "memory_cuda.cuh"
#include "row_sums_cuda.cuh"

namespace jitact::rows {

struct Floats { float v; };  // stored as float, computed as 16-bit types are
template <typename E> struct Precise { uint16_t bits; };  // stored as E, of 16 bits, computed as float is

}  // namespace jitact::rows

namespace jitact::loops {

template <> struct Storage<rows::Floats> : AsItIs<Narrow> {};
template <typename E> struct Storage<rows::Precise<E>> : Storage16<rows::Precise<E>, Single> {
  using Of = Storage<E>;
  static JITACT_DEVICE void widen_pair(uint32_t word, Single& low, Single& high) {
    typename Of::T of_low, of_high;
    Of::widen_pair(word, of_low, of_high);
    low = of_low.v, high = of_high.v;
  }
  static JITACT_DEVICE uint32_t narrow_pair(Single low, Single high) { return Of::narrow_pair(low.v, high.v); }
  static JITACT_DEVICE uint32_t max_pair(uint32_t a, uint32_t b) { return Of::max_pair(a, b); }
  static JITACT_DEVICE uint32_t equal_pair(uint32_t a, uint32_t b) { return Of::equal_pair(a, b); }
};

}  // namespace jitact::loops

namespace jitact::rows {

static_assert(!kConverts || std::is_same_v<Output, float>);
template <> constexpr bool kIsHalf<Precise<Half>> = true;
// The element type in which rows are held.
template <Op op>
using Computed = std::conditional_t<kVectorSize<op> == 8, Input, std::conditional_t<std::is_same_v<Output, float>, float, Floats>>;
// The length from which on rows are held as x is, which takes half the registers: where blocks of 128 threads cannot hold them as
// float32, and much earlier if results do not need the weight of each element, which is computed twice then, as it cannot be kept.
constexpr int64_t kLongInput = Fold<Single>::as_it_is ? 28672 : 196609;
using ComputedIfLong = std::conditional_t<kWidens, Precise<Input>, Computed<Op::forward>>;

// Adjacent elements as words: if loaded as elements, the compiler would wait for them at once.
template <typename E, int size>
struct alignas(sizeof(E) * size < 16 ? sizeof(E) * size : 16) SideWords {
  uint32_t w[size * sizeof(E) / 4];
  struct Elements { E of[size]; };
};

template <typename T, typename E, int size>
JITACT_DEVICE void widen(const SideWords<E, size>& from, T (&t)[size]) {
  if constexpr (std::is_arithmetic_v<E>) {
    const auto elements = bit_cast<typename SideWords<E, size>::Elements>(from);
    JITACT_UNROLL for (int i = 0; i < size; i++) t[i] = float(elements.of[i]);
  } else {
    JITACT_UNROLL for (int i = 0; i < size; i += 2) {
      typename loops::Storage<E>::T low, high;
      loops::Storage<E>::widen_pair(from.w[i / 2], low, high);
      t[i] = low.v, t[i + 1] = high.v;
    }
  }
}

// Converts results T to elements E.
template <typename E, typename T, int count>
struct Packed {
  using Element = E;
  using Vector = SideWords<E, count>;
  static JITACT_DEVICE Vector narrow(const T (&t)[count]) {
    if constexpr (std::is_arithmetic_v<E>) {
      typename Vector::Elements to;
      JITACT_UNROLL for (int i = 0; i < count; i++) to.of[i] = E(t[i].v);
      return bit_cast<Vector>(to);
    } else {
      Vector to;
      JITACT_UNROLL for (int i = 0; i < count; i += 2) to.w[i / 2] = loops::Storage<E>::narrow_pair(t[i].v, t[i + 1].v);
      return to;
    }
  }
};

// The layout of a mask's rows, and the order in which rows are processed. Rows that share a row of the mask but are far apart,
// as those of attention heads, are processed one after another if the cache would not keep the mask from one head to the next:
// of short rows, runs of 2^log_run_ that are side by side.
class MaskOfRows {
 public:
  MaskOfRows() = default;
  // `is_read`: whether all rows of the mask are.
  MaskOfRows(const Mask& mask, int64_t length, bool is_read)
      : step(int(mask.step)), scale(mask.scale), data_(mask.data), by_middle_(mask.sizes[0]), by_last_(mask.sizes[1]),
        middle_(int(mask.sizes[0])), last_(int(mask.sizes[1])), strides_{mask.strides[0], mask.strides[1], mask.strides[2]} {
    const int64_t bytes = length * int64_t(sizeof(MaskBits));
    if (!is_read || mask.strides[1] != 0 || mask.strides[2] == 0 || last_ * bytes < kCached) return;
    while (last_ % (2 << log_run_) == 0 && (length * int64_t(sizeof(Input)) << log_run_) < kApart) log_run_++;
    turns_ = (length * int64_t(sizeof(Input)) << log_run_) >= kApart;
  }
  // Whether rows are processed in another order than that in which they lie.
  bool turns() const { return turns_; }
  // The row that is processed as the n-th.
  JITACT_DEVICE unsigned row_at(unsigned n) const {
    if (!turns_) return n;
    const unsigned run = n >> log_run_, others = by_middle_.divide_small(run), of_last = others << log_run_;
    const unsigned first = by_last_.divide_small(of_last);
    return (first * middle_ + (run - others * middle_)) * last_ + (of_last - first * last_) + (n - (run << log_run_));
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
  // Bytes from which a run of rows may be processed apart from its neighbours, and from which a mask would not stay in the cache.
  static constexpr int64_t kApart = 1024, kCached = 6 << 20;

  const void* data_;
  loops::Divisor by_middle_, by_last_;
  int middle_, last_, log_run_ = 0;
  bool turns_ = false;
  int64_t strides_[3];
};

template <int size>
struct MaskWords : SideWords<MaskBits, size> {
  static constexpr int bytes = sizeof(MaskBits);
  using SideWords<MaskBits, size>::w;

  MaskWords() = default;
  JITACT_DEVICE explicit MaskWords(uint32_t repeated) { JITACT_UNROLL for (uint32_t& word : w) word = repeated; }
  // Four bytes of the first element.
  JITACT_DEVICE uint32_t first() const {
    return bytes == 4 ? w[0] : bytes == 2 ? (w[0] & 0xffffu) * 0x10001u : (w[0] & 0xffu) * 0x1010101u;
  }
  // For bool: one bit for each element, 1 if it takes part.
  JITACT_DEVICE uint32_t bits() const {
    uint32_t bits = 0;
    JITACT_UNROLL for (int i = 0; i < size / 4; i++) bits |= ((signs(i) >> 7 & 0x01010101u) * 0x10204080u >> 28) << 4 * i;
    return bits;
  }
  // For bool: all bits of those elements of the vector's word i that take part.
  JITACT_DEVICE uint32_t spread(int i) const {
    constexpr int each = size / 4;  // elements of a word
    return ptx::spread_signs(signs(i * each / 4), (each == 1 ? 0x8888u : 0x9988u) + 0x1111u * uint32_t(i * each % 4));
  }

 private:
  // The highest bit of each byte that is not 0, beside others.
  JITACT_DEVICE uint32_t signs(int i) const { return ((w[i] & 0x7f7f7f7fu) + 0x7f7f7f7fu) | w[i]; }
};

// The mask of a thread's part of a row, whose vectors are numbered from the part's first one on. words() takes what load() returned
// for a vector, so that other loads may be issued between the two. Elements of other rows get any mask. Vectors that have an
// element of the row are read whole, as of x, and may go beyond the mask by less than a vector.
template <int size>
class AlignedMask {
 public:
  using Loaded = MaskWords<size>;
  static constexpr int kAtOnce = sizeof(MaskBits) == 4 ? 4 : 8;  // vectors that are loaded at the same time

  // The row begins `begin` elements after the part's first vector does.
  JITACT_DEVICE AlignedMask(const MaskOfRows& masks, unsigned row, int begin)
      : is_one_(masks.step == 0), from_(reinterpret_cast<const char*>(masks.of(row) - begin * masks.step)),
        skipped_(int(reinterpret_cast<uintptr_t>(from_) % sizeof(Loaded))) {}
  JITACT_DEVICE bool is_aligned() const { return !is_one_ && skipped_ == 0; }
  JITACT_DEVICE Loaded load(int v, ptx::Policy policy) const {
    return ptx::load(reinterpret_cast<const Loaded*>(from_) + v, policy);
  }
  static JITACT_DEVICE Loaded repeated(uint32_t word) { return Loaded(word); }
  static JITACT_DEVICE MaskWords<size> words(const Loaded& loaded) { return loaded; }

 protected:
  bool is_one_;  // whether all elements have the same
  const char* from_;
  int skipped_;  // bytes of an aligned vector, before `from_`
};
// The same of any mask. Elements of 4 bytes are loaded one by one; of others, the two aligned vectors in which the vector lies.
// A vector without an element of the row is not read.
template <int size>
class AnyMask : AlignedMask<size> {
 public:
  struct Loaded { MaskWords<size> first, second; };
  static constexpr int kAtOnce = AlignedMask<size>::kAtOnce / 4;  // more take too many registers

  JITACT_DEVICE AnyMask(const AlignedMask<size>& mask, int begin, int end)
      : AlignedMask<size>(mask), begin_(begin), end_(end),
        vectors_(reinterpret_cast<const MaskWords<size>*>(this->from_ - this->skipped_)),
        least_(this->is_one_ ? 0 : vector_of(begin)), most_(this->is_one_ ? 0 : vector_of(end - 1)) {}
  JITACT_DEVICE Loaded load(int v, ptx::Policy policy) const {
    if constexpr (kByElement) {
      Loaded loaded;
      JITACT_UNROLL for (int e = 0; e < size; e++) {
        const int i = v * size + e;
        loaded.first.w[e] = i >= begin_ && i < end_ ? reinterpret_cast<const uint32_t*>(this->from_)[this->is_one_ ? 0 : i] : 0;
      }
      return loaded;
    } else {
      return {vectors_[::min(::max(v, least_), most_)], vectors_[::min(v + 1, most_)]};
    }
  }
  static JITACT_DEVICE Loaded repeated(uint32_t word) { return {MaskWords<size>(word), MaskWords<size>(word)}; }
  JITACT_DEVICE MaskWords<size> words(const Loaded& loaded) const {
    if constexpr (kByElement) {
      return loaded.first;
    } else {
      MaskWords<size> words;
      loops::cut<sizeof(MaskBits)>(words.w, loaded.first.w, loaded.second.w, this->skipped_);
      return this->is_one_ ? MaskWords<size>(words.first()) : words;
    }
  }

 private:
  static constexpr bool kByElement = sizeof(MaskBits) == 4;

  // The number of the aligned vector that has element i.
  JITACT_DEVICE int vector_of(int i) const {
    return (i * int(sizeof(MaskBits)) + this->skipped_) / int(sizeof(MaskWords<size>));
  }

  int begin_, end_;
  const MaskWords<size>* vectors_;
  int least_, most_;
};
struct Unmasked {
  struct Loaded {};
  static constexpr int kAtOnce = 4;
};

}  // namespace jitact::rows
