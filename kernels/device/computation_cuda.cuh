// What a GPU's loops over elements compute: the values that broadcast and random operands have for a vector's elements, and the
// results and gradients of these.
#pragma once

#include "vectors_cuda.cuh"

namespace jitact::loops {

// Loads the values of channels, rows and random operands for the elements of a vector.
template <typename S>
struct Operands {
  using T = typename Storage<S>::T;
  static constexpr int size = Storage<S>::size;
  // Whether planes are counted from the start of a block. With random numbers that changed registers so that operands along the
  // last dimension were 2 to 3 % slower; with several operands, or double, it takes too many.
  static constexpr bool kByPlane = kMany == 1 && kRandom == 0 && sizeof(S) < 8;

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
  // which would take twice the registers, only the index of its first value. Where planes are in order: the index of the first
  // element's value, and how many elements are left of its plane.
  struct Ready {
    Words broadcast[kMany + 1];
  };
  // The values from element `first` on, for a vector or one element. `common_only`: all broadcast operands are single values.
  template <int width, bool common_only = kMany == 0>
  JITACT_DEVICE Values<width> from(const Common& common, int64_t first) const {
    return from<width, common_only, false>(common, first, Ready());
  }
  // The same; if `is_ready`, with the operands in `ready` and without random numbers.
  template <int width, bool common_only, bool is_ready>
  JITACT_DEVICE Values<width> from(const Common& common, int64_t first, const Ready& ready) const {
    Values<width> values;
    JITACT_UNROLL for (int b = 0; b < kBroadcast; b++) {
      const int64_t count = launch.broadcast[b].count, inner = launch.broadcast[b].inner;
      const bool is_common = common_only || b >= kMany;
      if constexpr (is_ready && !common_only) {
        if (!is_common && launch.follows[b]) {
          if (is_wide(b)) load_vector(b, ready.broadcast[b].w[0], values.broadcast[b]);
          else Storage<S>::widen(ready.broadcast[b], values.broadcast[b]);
          continue;
        }
        if constexpr (kByPlane) {
          if (!is_common && launch.in_order[b]) {
            const uint32_t c = ready.broadcast[b].w[0];
            const int left = int(ready.broadcast[b].w[1]);
            const T own = value(b, c);
            JITACT_UNROLL for (int i = 0; i < width; i++) values.broadcast[b][i] = own;
            if (left < width) {
              const T next = value(b, c + 1 == count ? 0 : c + 1);
              JITACT_UNROLL for (int i = 1; i < width; i++) values.broadcast[b][i] = i < left ? own : next;
            }
            continue;
          }
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
  // The random numbers only.
  JITACT_DEVICE void draw(Random16 (&random)[kRandom + 1], const Common& common, int64_t first) const {
    JITACT_UNROLL for (int r = 0; r < kRandom; r++) random[r] = philox(uint64_t(first) / size, common.seed, r);
  }
  // The index of a block's first value, and the elements of its plane that are before the block, for each operand b with follows[b]
  // or in_order[b].
  struct Begins { uint32_t of[kMany + 1], before[kMany + 1]; };
  JITACT_DEVICE Begins begins(int64_t first) const {
    Begins begins;
    begins.of[kMany] = begins.before[kMany] = 0;  // unused: silences nvcc's warning where there are no operands
    JITACT_UNROLL for (int b = 0; b < kMany; b++) {
      if (launch.follows[b]) begins.of[b] = uint32_t(in_operand(b, first));
      if (!kByPlane || !launch.in_order[b]) continue;
      const Plane plane = in_plane(b, first);
      begins.of[b] = uint32_t(plane.c), begins.before[b] = uint32_t(first - plane.number * launch.broadcast[b].inner);
    }
    return begins;
  }
  // Issues the loads of those operands for the vector that begins `within` elements after the start of the block.
  JITACT_DEVICE void load(Ready& ready, const Begins& begins, int within) const {
    JITACT_UNROLL for (int b = 0; b < kMany; b++) {
      const uint32_t count = uint32_t(launch.broadcast[b].count), inner = uint32_t(launch.broadcast[b].inner);
      const auto wrapped = [&](uint32_t beyond) { return min(beyond, beyond - count); };  // the latter is huge if it wraps
      if constexpr (kByPlane) {
        if (launch.in_order[b]) {
          const uint32_t at = begins.before[b] + within, planes = launch.by_inner[b].divide_small(at);
          ready.broadcast[b].w[0] = wrapped(begins.of[b] + planes), ready.broadcast[b].w[1] = (planes + 1) * inner - at;
          continue;
        }
      }
      if (!launch.follows[b]) continue;
      const uint32_t c = wrapped(begins.of[b] + within);
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

 private:
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

  // Whether value i of operand b is aligned for vector loads.
  JITACT_DEVICE bool is_vector(int b, int64_t i) const {
    const auto data = reinterpret_cast<uintptr_t>(launch.broadcast[b].data);
    return is_wide(b) ? (data + i * 4) % 16 == 0 : (data + i * sizeof(S)) % sizeof(typename Storage<S>::Vector) == 0;
  }
  JITACT_DEVICE void load_vector(int b, int64_t i, T (&to)[size]) const {
    if constexpr (sizeof(S) == 2) {
      if (is_wide(b)) {
        const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(launch.broadcast[b].data) + i);
        JITACT_UNROLL for (int f = 0; f < size / 4; f++) {
          const float4 four = from[f];
          to[4 * f] = four.x, to[4 * f + 1] = four.y, to[4 * f + 2] = four.z, to[4 * f + 3] = four.w;
        }
        return;
      }
    }
    using Vector = typename Storage<S>::Vector;
    Storage<S>::widen(*reinterpret_cast<const Vector*>(static_cast<const S*>(launch.broadcast[b].data) + i), to);
  }

  // Values for consecutive elements: the first `left` use value c.
  template <int width>
  JITACT_DEVICE void fill(int b, int64_t count, int64_t inner, int64_t c, int64_t left, T (&to)[width]) const {
    bool filled = false;
    if (width == 1 || left >= width) {
      const T one = value(b, c);
      JITACT_UNROLL for (int i = 0; i < width; i++) to[i] = one;
      filled = true;
    } else if (inner == 1 && c + width <= count) {
      if constexpr (width == size) {
        filled = is_vector(b, c);
        if (filled) load_vector(b, c, to);
      }
    }
    if (!filled) {
      const int whole = int(min(inner, int64_t(width)));
      int rest = int(left);
      JITACT_UNROLL for (int i = 0; i < width; i++) {
        to[i] = value(b, c);
        if (--rest == 0) rest = whole, c = c + 1 == count ? 0 : c + 1;
      }
    }
  }
};

// The values of element i of a vector, or of a single element.
template <typename S, int tensors, int width = Storage<S>::size>
struct Source {
  using T = typename Storage<S>::T;
  const T (&in)[tensors][width];
  const typename Operands<S>::template Values<width>& others;
  const Numbers<T>& numbers;
  int i;

  template <int t> JITACT_DEVICE T element() const { return in[t][width == 1 ? 0 : i]; }
  template <int k> JITACT_DEVICE T number() const { return numbers.values[k]; }
  template <int b> JITACT_DEVICE T broadcast() const { return others.broadcast[b][width == 1 ? 0 : i]; }
  template <int r> JITACT_DEVICE Random<T> random() const {
    // Not indexed by a run-time value, for which the compiler would use local memory.
    const auto word = [&](int k) {
      uint32_t found = others.random[r].w[0];
      JITACT_UNROLL for (int other = 1; other < 4; other++) found = other == k ? others.random[r].w[other] : found;
      return found;
    };
    if constexpr (sizeof(S) == 8) return Random<T>(uint64_t(word(2 * i + 1)) << 32 | word(2 * i));
    else if constexpr (sizeof(S) == 4) return Random<T>(word(i));
    else return Random<T>::at_top(i % 2 ? word(i / 2) : word(i / 2) << 16);
  }
};

struct NoSums {};  // for operations that sum no gradients

// Computes the elements of a vector, or one element.
template <Op op, typename S, int width = Storage<S>::size, typename Add = NoSums>
struct Computation {
  using T = typename Storage<S>::T;
  static constexpr int ins = reads(op), outs = writes(op);

  const Launch& launch;
  const typename Operands<S>::template Values<width>& others;
  const Numbers<T>& numbers;
  Add add;  // called as add(i, k, gradient) with the summed gradients of element i of the vector

  // Computes the element that is the i-th of its vector, and calls keep(w, at, result) for each result.
  template <typename Keep>
  JITACT_DEVICE void element(const T (&in)[ins][width], int i, int at, bool& bit, const Keep& keep) const {
    const Source<S, ins, width> source{
        .in = in,
        .others = others,
        .numbers = numbers,
        .i = i,
    };
    const auto result = results<op, T>(source, bit);
    for_each<outs>([&](auto w) { keep(w, at, result.of[kWrittenResult<op, w>]); });
    for_each<summed(op)>([&](auto k) { add(i, k, result.of[kSummedGradient<k>]); });
  }
  // The same for all elements of a vector, with their mask bits.
  template <typename Keep>
  JITACT_DEVICE void elements(const T (&in)[ins][width], unsigned& bits, const Keep& keep) const {
    JITACT_UNROLL for (int i = 0; i < width; i++) {
      bool bit = bits >> i & 1;
      element(in, i, i, bit, keep);
      if constexpr (op == Op::forward_bit) bits |= bit ? 1u << i : 0;
    }
  }

  // One element, of the last block or of unaligned memory.
  template <bool dense>
  JITACT_DEVICE void one(int64_t at, bool& bit) const {
    T in[ins][1];
    JITACT_UNROLL for (int t = 0; t < ins; t++) in[t][0] = Storage<S>::load(launch.at<const S, dense>(launch.read[t], at));
    const auto keep = [&](int w, int, T result) {
      const Elements& to = launch.written[w];
      if ((outs == 1 && summed(op) == 0) || to.data) Storage<S>::store(launch.at<S, dense>(to, at), result);
    };
    element(in, int(at % Storage<S>::size), 0, bit, keep);
  }
};

}  // namespace jitact::loops
