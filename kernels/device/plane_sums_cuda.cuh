// Partial sums of planes that are no shorter than a vector, and of operands of a single value, for which all is one plane. A plane
// is cut into parts; a group of threads goes through a part, and adds up in registers. What is not whole vectors, at the ends of a
// plane, they compute one by one.
#pragma once

#include "sums_walk_cuda.cuh"

namespace jitact::loops {

constexpr int kPlaneThreads = 256;  // of a block; 512 were 1 to 2 % slower

// How plane_sums cuts planes of `inner` elements.
struct Parts {
  // Vectors of a thread at most: fewer below kWave vectors for each, so that a GPU has a block for each place. Small groups have
  // kFewTurns at most, as they read short pieces of memory.
  static constexpr int kTurns = 8, kLeastTurns = 2, kWave = 1 << 17, kFewTurns = 3, kLogSmall = 3;
  int64_t inner = 1, each = 1, all = 0;  // parts of a plane, and of all
  int64_t length = 0;                    // vectors of a part
  int log_group = 0;
  Divisor by_each;

  Parts() = default;
  Parts(int64_t planes, int64_t inner, int64_t size) : inner(inner) {
    const int64_t plane = inner / size, most = between(planes * plane / kWave, kLeastTurns, kTurns);
    log_group = inner % size != 0 ? 2 : plane > 1;  // the former for what is beside whole vectors
    while (2 << log_group <= kPlaneThreads && plane > (log_group < kLogSmall ? kFewTurns : most) << log_group) log_group++;
    each = greater(parts_of(plane, most << log_group), 1), by_each = Divisor(each), all = planes * each;
    length = parts_of(parts_of(plane, each), 1 << log_group) << log_group;
  }
};

template <Op op, typename S>
__global__ void __launch_bounds__(kPlaneThreads, least_blocks_of_sums<op, S>(kPlaneThreads))
    plane_sums(const __grid_constant__ Launch launch, Value<S>* __restrict__ partials, int64_t apart, const Parts parts,
               bool repeat) {
  using T = typename Storage<S>::T;
  ptx::let_next_begin();
  ptx::wait_for_last();
  const Operands<S> operands{launch};
  const auto numbers = launch.numbers_as<T>();
  constexpr int size = Storage<S>::size, kSummed = summed(op);
  const int t = threadIdx.x, group = 1 << parts.log_group, lane = t & (group - 1);
  const int64_t part = (int64_t(blockIdx.x) * kPlaneThreads + t) >> parts.log_group, plane = parts.by_each.divide(part);
  const int64_t before = part - plane * parts.each, begin = plane * parts.inner, end = begin + parts.inner;
  const int64_t first = (begin + size - 1) / size + before * parts.length;  // vector of the part
  const bool exists = part < parts.all;
  const int64_t vectors = exists ? between(end / size - first, 0, parts.length) : 0;
  const int count = int((vectors - lane + group - 1) >> parts.log_group);  // of the thread

  Vectors<op, S, kPlaneThreads> own(launch, first + lane, launch.aligned ? count : 0, group);
  const auto common = operands.common();
  T sums[kSummed];
  JITACT_UNROLL for (int k = 0; k < kSummed; k++) sums[k] = 0;
  const auto add = [&](int, int k, T gradient) { add_to(sums[k], gradient); };
  auto others = operands.template from<size>(common, (count > 0 ? first + lane : 0) * size);
  const auto find_others = finding<S, size>(operands, common, repeat, others);
  walk(launch, own, numbers, others, add, repeat, find_others);

  // One by one: the elements of the thread's vectors, in the same order, where memory is not aligned; what is beside vectors.
  const int64_t from = before == 0 ? begin : first * size, to = before + 1 == parts.each ? end : (first + parts.length) * size;
  const int64_t of_vectors = launch.aligned ? 0 : int64_t(count) * size, beside = exists ? to - from - vectors * size : 0;
  const int64_t alone = of_vectors + ((beside - lane + group - 1) >> parts.log_group);
#pragma unroll 1
  for (int64_t i = 0; i < alone; i++) {
    const int64_t of_part = from + lane + ((i - of_vectors) << parts.log_group);
    const int64_t at = i < of_vectors ? (first + lane + (i / size << parts.log_group)) * size + i % size
                                      : of_part + (of_part < first * size ? 0 : vectors * size);
    const auto others = operands.template from<1>(common, at);
    const Computation<op, S, 1, std::decay_t<decltype(add)>> computation{
        .launch = launch,
        .others = others,
        .numbers = numbers,
        .add = add,
    };
    compute_alone(computation, at);
  }

  __shared__ Value<S> of_warps[kPlaneThreads / 32];
  JITACT_UNROLL for (int k = 0; k < kSummed; k++) {
    if (is_single(launch, k)) {
      const Value<S> total = block_sum<kPlaneThreads>(Value<S>(sums[k].v));
      if (t == 0) partials[k * apart + blockIdx.x] = total;
      continue;
    }
    Value<S> sum = warp_sum(Value<S>(sums[k].v), ::min(group, 32));
    if (group > 32) {
      __syncthreads();  // the last sums have been read
      if (t % 32 == 0) of_warps[t / 32] = sum;
      __syncthreads();
      if (lane == 0)
        for (int w = 1; w < group / 32; w++) sum += of_warps[t / 32 + w];
    }
    if (lane == 0 && exists) partials[k * apart + part] = sum;
  }
}

}  // namespace jitact::loops
