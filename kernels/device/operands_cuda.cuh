// The values that channel, row and random operands have for a vector's elements.
#pragma once

#include "vectors_cuda.cuh"

namespace jitact::loops {

// Loads the values of channels, rows and random operands for the elements of a vector.
template <typename S>
struct Operands {
  using T = typename Storage<S>::T;
  static constexpr int size = Storage<S>::size;

  const Launch& launch;

  // Values shared by all elements of a block: operands of a single value, prepared, and the seed.
  struct Common {
    T value[kBroadcast + 1];
    uint64_t seed;
  };
  // All threads of a block must call it.
  JITACT_DEVICE Common common() const {
    Common common;
    if constexpr (kPrepares) {
      // One thread prepares for the block: it takes tens of instructions.
      __shared__ typename T::Value shared[kBroadcast];
      if (threadIdx.x == 0) {
        for (int b = 0; b < kBroadcast; b++) common.value[b] = value(b, 0);
        prepare_all(common.value + kUnprepared);
        for (int b = 0; b < kBroadcast; b++) shared[b] = common.value[b].v;
      }
      __syncthreads();
      JITACT_UNROLL for (int b = 0; b < kBroadcast; b++) common.value[b] = shared[b];
    } else {
      JITACT_UNROLL for (int b = 0; b < kBroadcast; b++)
        if (b >= kMany || launch.broadcast[b].count == 1) common.value[b] = value(b, 0);
    }
    if constexpr (kRandom > 0) common.seed = uint64_t(*launch.seed);
    return common;
  }

  // The values for `width` consecutive elements.
  template <int width>
  struct Values {
    T broadcast[kBroadcast + 1][width];
    Random16 random[kRandom + 1];
  };
  // Operands of a vector, loaded together with its elements. Where they follow the elements: raw vectors or, for a wide operand,
  // which would take twice the registers, only the index of its first value.
  struct Ready {
    Words broadcast[kMany + 1];
  };
  // The values from element `first` on, for a vector or one element. `common_only`: all broadcast operands are single values.
  template <int width, bool common_only = kMany == 0>
  JITACT_DEVICE Values<width> from(const Common& common, int64_t first) const {
    return from<width, common_only, false>(common, first, Ready());
  }
  // Those for a vector, with the operands in `ready` and without random numbers.
  JITACT_DEVICE Values<size> when_ready(const Common& common, int64_t first, const Ready& ready) const {
    return from<size, kMany == 0, true>(common, first, ready);
  }
  // The random numbers only.
  JITACT_DEVICE void draw(Random16 (&random)[kRandom + 1], const Common& common, int64_t first) const {
    JITACT_UNROLL for (int r = 0; r < kRandom; r++) random[r] = philox(uint64_t(first) / size, common.seed, r);
  }
  // The index of a block's first value, for each operand b with follows[b].
  struct Begins { uint32_t of[kMany + 1]; };
  JITACT_DEVICE Begins begins(int64_t first) const {
    Begins begins;
    begins.of[kMany] = 0;  // unused: silences nvcc's warning where there are no operands
    JITACT_UNROLL for (int b = 0; b < kMany; b++)
      if (launch.follows[b]) begins.of[b] = uint32_t(in_operand(b, first));
    return begins;
  }
  // Issues the loads of those operands for the vector that begins `within` elements after the start of the block.
  JITACT_DEVICE void load(Ready& ready, const Begins& begins, int within) const {
    JITACT_UNROLL for (int b = 0; b < kMany; b++) {
      if (!launch.follows[b]) continue;
      const uint32_t c = wrapped(b, begins.of[b] + within);
      if (is_wide(b)) ready.broadcast[b].w[0] = c;
      else ready.broadcast[b] = *reinterpret_cast<const Words*>(static_cast<const S*>(launch.broadcast[b].data) + c);
    }
  }

  // The values of element i of a vector.
  static JITACT_DEVICE Values<1> one_of(const Values<size>& vector, int i) {
    Values<1> one;
    JITACT_UNROLL for (int b = 0; b < kBroadcast; b++) one.broadcast[b][0] = vector.broadcast[b][i];
    JITACT_UNROLL for (int r = 0; r < kRandom; r++) one.random[r] = vector.random[r];
    return one;
  }

  // Value i of broadcast operand b.
  JITACT_DEVICE T value(int b, int64_t i) const {
    if constexpr (sizeof(S) == 2) {
      if (is_wide(b)) return static_cast<const float*>(launch.broadcast[b].data)[i];
    }
    return Storage<S>::load(static_cast<const S*>(launch.broadcast[b].data) + i);
  }

 protected:
  // The values from element `first` on; if `is_ready`, with the operands in `ready` and without random numbers.
  template <int width, bool common_only, bool is_ready>
  JITACT_DEVICE Values<width> from(const Common& common, int64_t first, const Ready& ready) const {
    Values<width> values;
    JITACT_UNROLL for (int b = 0; b < kBroadcast; b++) {
      const int64_t count = launch.broadcast[b].count, inner = launch.broadcast[b].inner;
      const bool is_common = common_only || b >= kMany;
      if constexpr (is_ready && !common_only) {
        if (!is_common && launch.follows[b]) {
          if (is_wide(b)) load_wide(b, ready.broadcast[b].w[0], values.broadcast[b]);
          else Storage<S>::widen(ready.broadcast[b], values.broadcast[b]);
          continue;
        }
      }
      if (!is_common && count > 1) {
        const Plane plane = in_plane(b, first);
        fill(b, count, inner, plane.c, (plane.number + 1) * inner - first, values.broadcast[b]);
      } else {
        JITACT_UNROLL for (int i = 0; i < width; i++) values.broadcast[b][i] = common.value[b];
      }
    }
    if constexpr (!is_ready) draw(values.random, common, first);
    return values;
  }

  // An index that may be beyond the last value of operand b, once.
  JITACT_DEVICE uint32_t wrapped(int b, uint32_t beyond) const {
    return min(beyond, beyond - uint32_t(launch.broadcast[b].count));  // the latter is huge if it wraps
  }
  // The plane (run of elements with one value of operand b) of element i, and its value's index. 32 bits: 1/4 the instructions.
  struct Plane { int64_t number, c; };
  JITACT_DEVICE Plane in_plane(int b, int64_t i) const {
    int64_t number;
    if (launch.is_small) number = launch.by_inner[b].divide_small(uint32_t(i));
    else number = launch.by_inner[b].divide(i);
    return {number, in_operand(b, number)};
  }
  JITACT_DEVICE int64_t in_operand(int b, int64_t plane) const {
    const int64_t count = launch.broadcast[b].count;
    if (!launch.is_small) return plane - launch.by_count[b].divide(plane) * count;
    const uint32_t p = uint32_t(plane);
    return p - launch.by_count[b].divide_small(p) * uint32_t(count);
  }
  JITACT_DEVICE bool is_wide(int b) const { return sizeof(S) == 2 && launch.broadcast[b].wide; }

  // Values of a wide operand, of which the first is on 16 bytes.
  JITACT_DEVICE void load_wide(int b, int64_t i, T (&to)[size]) const {
    if constexpr (sizeof(S) == 2) {
      const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(launch.broadcast[b].data) + i);
      JITACT_UNROLL for (int f = 0; f < size / 4; f++) {
        const float4 four = from[f];
        to[4 * f] = four.x, to[4 * f + 1] = four.y, to[4 * f + 2] = four.z, to[4 * f + 3] = four.w;
      }
    }
  }
  // Values of any operand, at any address.
  JITACT_DEVICE void load_vector(int b, int64_t i, T (&to)[size]) const {
    if (sizeof(S) == 2 && !is_wide(b))
      Storage<S>::widen(load_side_by_side(static_cast<const S*>(launch.broadcast[b].data) + i).words(), to);
    else
      JITACT_UNROLL for (int e = 0; e < size; e++) to[e] = value(b, i + e);
  }

  // Values for consecutive elements: the first `left` use value c.
  template <int width>
  JITACT_DEVICE void fill(int b, int64_t count, int64_t inner, int64_t c, int64_t left, T (&to)[width]) const {
    if (width == 1 || inner >= width) {
      const T own = value(b, c);
      JITACT_UNROLL for (int i = 0; i < width; i++) to[i] = own;
      if (width == 1 || left >= width) return;
      const T next = value(b, c + 1 == count ? 0 : c + 1);
      JITACT_UNROLL for (int i = 1; i < width; i++) to[i] = i < left ? own : next;
      return;
    }
    if constexpr (width == size) {
      if (inner == 1 && c + width <= count) return load_vector(b, c, to);
    }
    const int whole = int(min(inner, int64_t(width)));
    int rest = int(left);
    JITACT_UNROLL for (int i = 0; i < width; i++) {
      to[i] = value(b, c);
      if (--rest == 0) rest = whole, c = c + 1 == count ? 0 : c + 1;
    }
  }
};

// The same where all channel and row operands have the same planes, which are counted from the start of a block: one division of 32
// bits for each vector, in kernels of its own. Kernels that could do either took 6 to 8 registers more.
template <typename S>
struct CountedOperands : Operands<S> {
  using Base = Operands<S>;
  using typename Base::T;
  static constexpr int size = Base::size;
  // Whether values are loaded together with a vector's elements. In 16 bits, where packing them would wait for them, and beside
  // random numbers, with their registers, they are loaded when it is the vector's turn.
  static constexpr bool kLoaded = sizeof(S) == 4 && kRandom == 0;

  // Index of the value of the vector's first element, and how many elements are left of its plane.
  struct Ready {
    uint32_t c;
    int left;
    T loaded[kLoaded ? kMany : 1][size];  // where there are two values at most, these come first
  };
  // The same of the block's first element: index, and how many elements of its plane are before it.
  struct Begins { uint32_t c, before; };
  JITACT_DEVICE Begins begins(int64_t first) const {
    const typename Base::Plane plane = this->in_plane(0, first);
    return {uint32_t(plane.c), uint32_t(first - plane.number * inner())};
  }
  JITACT_DEVICE void load(Ready& ready, const Begins& begins, int within) const {
    const uint32_t at = begins.before + within, planes = this->launch.by_inner[0].divide_small(at);
    ready.c = this->wrapped(0, begins.c + planes);
    ready.left = int((planes + 1) * inner() - at);
    if constexpr (kLoaded) {
      if (has_two_at_most()) {
        const uint32_t next = this->wrapped(0, ready.c + 1);
        JITACT_UNROLL for (int b = 0; b < kMany; b++) {
          ready.loaded[b][0] = this->value(b, ready.c);
          ready.loaded[b][1] = this->value(b, next);
        }
      } else {
        load_each(ready, ready.loaded);
      }
    }
  }
  using Values = typename Base::template Values<size>;
  JITACT_DEVICE Values when_ready(const typename Base::Common& common, int64_t, const Ready& ready) const {
    Values values;
    JITACT_UNROLL for (int b = kMany; b < kBroadcast; b++)
      JITACT_UNROLL for (int i = 0; i < size; i++) values.broadcast[b][i] = common.value[b];
    if (!has_two_at_most()) {
      if constexpr (kLoaded)
        JITACT_UNROLL for (int b = 0; b < kMany; b++)
          JITACT_UNROLL for (int i = 0; i < size; i++) values.broadcast[b][i] = ready.loaded[b][i];
      else load_each(ready, values.broadcast);
    } else if constexpr (kLoaded) {
      JITACT_UNROLL for (int b = 0; b < kMany; b++) {
        const T own = ready.loaded[b][0], next = ready.loaded[b][1];
        JITACT_UNROLL for (int i = 0; i < size; i++) values.broadcast[b][i] = i < ready.left ? own : next;
      }
    } else {
      T own[kMany];
      JITACT_UNROLL for (int b = 0; b < kMany; b++) {
        own[b] = this->value(b, ready.c);
        JITACT_UNROLL for (int i = 0; i < size; i++) values.broadcast[b][i] = own[b];
      }
      if (ready.left < size) {
        const uint32_t c = this->wrapped(0, ready.c + 1);
        JITACT_UNROLL for (int b = 0; b < kMany; b++) {
          const T next = this->value(b, c);
          JITACT_UNROLL for (int i = 1; i < size; i++) values.broadcast[b][i] = i < ready.left ? own[b] : next;
        }
      }
    }
    return values;
  }

 private:
  JITACT_DEVICE uint32_t count() const { return uint32_t(this->launch.broadcast[0].count); }
  JITACT_DEVICE uint32_t inner() const { return uint32_t(this->launch.broadcast[0].inner); }
  // Whether a vector has values of two planes at most.
  JITACT_DEVICE bool has_two_at_most() const { return size == 2 || inner() >= size - 1; }
  // Loads a value for each element.
  template <int operands>
  JITACT_DEVICE void load_each(const Ready& ready, T (&to)[operands][size]) const {
    if (inner() == 1 && ready.c + size <= count()) {
      JITACT_UNROLL for (int b = 0; b < kMany; b++) this->load_vector(b, ready.c, to[b]);
      return;
    }
    uint32_t c = ready.c, left = ready.left;
    JITACT_UNROLL for (int i = 0; i < size; i++) {
      // Loads together with elements are issued soonest if no index waits for another; the others have less to compute so.
      if constexpr (kLoaded) c = this->wrapped(0, ready.c + this->launch.by_inner[0].divide_small(i + inner() - ready.left));
      JITACT_UNROLL for (int b = 0; b < kMany; b++) to[b][i] = this->value(b, c);
      if (!kLoaded && --left == 0) left = inner(), c = this->wrapped(0, c + 1);
    }
  }
};

template <bool counted, typename S>
using OperandsOf = std::conditional_t<counted, CountedOperands<S>, Operands<S>>;

}  // namespace jitact::loops
