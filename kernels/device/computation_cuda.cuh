// What a GPU's loops over elements compute: the results and gradients of a vector's elements.
#pragma once

#include "operands_cuda.cuh"

namespace jitact::loops {

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
