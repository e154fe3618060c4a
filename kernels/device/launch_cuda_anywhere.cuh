// The GPU loop for several elements whose rows are not aligned to 16 bytes, or whose layouts differ: halves of rows of odd
// length, or every second element of one tensor. A thread computes one vector of the result. It extracts the operands from the
// aligned 16-byte vectors that contain them, and exchanges elements with its neighbours to store aligned vectors.
#pragma once

#include "computation_cuda.cuh"

namespace jitact::loops {

template <typename S>
JITACT_DEVICE Around<S> load_anywhere(const S* p, int64_t step) {
  constexpr int size = Storage<S>::size;
  if (step == 1) return load_side_by_side(p);
  if (step == 0) return {repeated(p), repeated(p), 0};
  // The element after the last may not exist, so the second half is loaded from one element earlier.
  const Words low = load_side_by_side(p).words(), high = load_side_by_side(p + size - 1).words();
  const Words even = every_second<S>(low, low, false), odd = every_second<S>(high, high, true);
  return {{even.w[0], even.w[1], odd.w[2], odd.w[3]}, {}, 0};
}

// Writes a vector of elements at any alignment. All threads of a warp must call it. `joined` says that the previous thread's
// vector ends where this one begins, `joins` that the next thread's begins where this one ends: they share aligned vectors.
template <typename S>
JITACT_DEVICE void store_anywhere(S* p, const typename Storage<S>::T (&values)[Storage<S>::size], bool exists,
                                  bool joined, bool joins) {
  constexpr int size = Storage<S>::size;
  const Words own = Storage<S>::narrow(values);
  Words before;
  JITACT_UNROLL for (int i = 0; i < 4; i++) before.w[i] = __shfl_up_sync(0xffffffffu, own.w[i], 1);
  if (!exists) return;
  const int offset = int(reinterpret_cast<uintptr_t>(p) & 15);
  if (offset == 0) {
    *reinterpret_cast<Words*>(p) = own;
    return;
  }
  const int ahead = offset / int(sizeof(S));  // elements of the first aligned vector that belong to the previous thread
  if (joined) *reinterpret_cast<Words*>(p - ahead) = cut<S>(before, own, 16 - offset);
  JITACT_UNROLL for (int i = 0; i < size; i++)
    if (i < size - ahead ? !joined : !joins) Storage<S>::store(p + i, values[i]);
}

template <Op op, typename S>
__global__ void __launch_bounds__(kThreads) elementwise_anywhere(const __grid_constant__ Launch launch) {
  using T = typename Storage<S>::T;
#ifndef JITACT_EXPORTED
  ptx::wait_for_last();
#endif
  constexpr int size = Storage<S>::size, ins = reads(op), outs = writes(op);
  const int64_t at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * size, n = launch.n;
  const auto place = launch.place(at);
  const bool whole = at + size <= n && place.column + size <= launch.columns;
  const Operands<S> operands{launch};
  const auto numbers = launch.numbers_as<T>();
  const auto common = operands.common();
  T out[outs][size];
  if (whole) {
    Around<S> loaded[ins];
    JITACT_UNROLL for (int t = 0; t < ins; t++)
      loaded[t] = load_anywhere(Launch::in_rows<const S>(launch.read[t], place), launch.read[t].step);
    T values[ins][size];
    JITACT_UNROLL for (int t = 0; t < ins; t++) Storage<S>::widen(loaded[t].words(), values[t]);
    const auto others = operands.template from<size>(common, at);
    unsigned bits = 0;
    const Computation<op, S> computation{
        .launch = launch,
        .others = others,
        .numbers = numbers,
    };
    computation.elements(values, bits, [&](int w, int i, T result) { out[w][i] = result; });
  }
  const int lane = threadIdx.x % 32;
  const bool joined = lane > 0 && place.column >= size;
  const bool joins = lane < 31 && place.column + 2 * size <= launch.columns && at + 2 * size <= n;
  JITACT_UNROLL for (int w = 0; w < outs; w++) {
    const Elements& to = launch.written[w];
    if (to.data == nullptr) continue;
    S* p = Launch::in_rows<S>(to, place);
    if (to.step == 1) {
      store_anywhere<S>(p, out[w], whole, joined, joins);
    } else if (whole) {
      JITACT_UNROLL for (int i = 0; i < size; i++) Storage<S>::store(p + i * to.step, out[w][i]);
    }
  }
  if (whole) return;
#pragma unroll 1
  for (int i = 0; i < size && at + i < n; i++) {
    bool bit = false;
    const auto others = operands.template from<1>(common, at + i);
    const Computation<op, S, 1> computation{
        .launch = launch,
        .others = others,
        .numbers = numbers,
    };
    computation.template one<false>(at + i, bit);
  }
}

}  // namespace jitact::loops
