// Strided 16-bit rows of which few are adjacent, in small planes: a block copies planes that follow one another to shared memory,
// by vectors as they lie. There its threads find their rows, as if these were contiguous, and put the results.
#pragma once

#include "row_sums_cuda.cuh"

namespace jitact::rows {

constexpr int kPlaneThreads = 256;                // per block
constexpr int kFewOfPlane = 2, kManyOfPlane = 4;  // vectors of a row in a thread, in each tensor
constexpr int kMostAdjacent = 31;                 // rows

// How a block has planes.
struct SmallPlanes {
  int count = 0;      // per block; 0 if there are too few rows for its threads
  int vectors;        // kFewOfPlane or kManyOfPlane
  int log_group = 0;  // threads per row
  int inner;          // adjacent rows
  int elements;       // of a plane
  Divisor by_inner;

  SmallPlanes() = default;
  explicit SmallPlanes(const Call& call) {
    if (call.inner > kMostAdjacent || call.length > 8 * kManyOfPlane * 32) return;
    inner = int(call.inner), elements = int(call.length) * inner, by_inner = Divisor(inner);
    vectors = call.length <= 8 * kFewOfPlane ? kFewOfPlane : kManyOfPlane;
    while (8 * vectors << log_group < call.length) log_group++;
    // Planes of 128 bytes, 256 bytes, ... begin in the same bank of shared memory.
    const bool share_banks = elements % 64 == 0;
    // Where an even number of rows are adjacent, tiles of two rows to a word are as fast, but where they need two threads for it.
    if (inner % 2 == 0 && (inner > kMostAdjacent / 2 || call.length <= 8 || log_group > 0 || share_banks)) return;
    if (share_banks && inner << log_group < 32 && vectors == kManyOfPlane) vectors = kFewOfPlane, log_group++;  // fewer in a warp
    const int most = ::min(kPlaneThreads / (inner << log_group), (8 * vectors * kPlaneThreads - 7) / elements);
    if (most * (inner << log_group) * 8 < kPlaneThreads * 5) return;
    // Whole sectors of memory, or else vectors, if that leaves few threads without a row.
    for (const int unit : {16, 8, 1}) {
      int together = unit;
      while (together > 1 && together / 2 * elements % unit == 0) together /= 2;
      count = most - most % together;
      if (count * 8 >= most * 7) return;
    }
  }
  JITACT_DEVICE int rows() const { return count * inner; }  // of a block
};

// A block's shared memory. The vector in which a row ends is read as a whole.
template <int tensors, int vectors>
struct Staged {
  struct alignas(16) { uint16_t bits[8 * vectors * kPlaneThreads + 7 * kMostAdjacent]; } of[tensors];
};

// The planes of a block in shared memory. A row's elements are `inner` apart there.
template <typename S, int tensors, int vectors>
class StagedPlanes {
 public:
  static constexpr int size = Storage<S>::size;

  StagedPlanes() = default;
  // The block's planes begin at element `first` of the tensors, and have `there` of these. The thread has a part, which begins at
  // element `begin`, of the block's n-th row.
  JITACT_DEVICE StagedPlanes(const SmallPlanes& planes, uint64_t first, int there, int n, int begin)
      : inner_(planes.inner), lead_(int(first % size)), end_(lead_ + there), vector_(int64_t(first / size)) {
    const int plane = int(planes.by_inner.divide_small_by_many(unsigned(n)));
    part_ = lead_ + plane * (planes.elements - inner_) + n + begin * inner_;
  }
  JITACT_DEVICE void copy_from(const void* const (&read)[2]) const {
    JITACT_UNROLL for (int r = 0; r < tensors; r++) {
      const Words* const from = static_cast<const Words*>(read[r]) + vector_ + threadIdx.x;
      each_vector([&](int v) { ptx::copy_async(own_vector(r) + v, from + v); });
    }
    ptx::commit_copies();
    ptx::wait_for_copies(0);
    __syncthreads();
  }
  // Elements i, i + 1, ... of the part; those beyond the row's end are any.
  JITACT_DEVICE Words get(int tensor, int i) const {
    const uint16_t* from = shared().of[tensor].bits + part_ + i * inner_;
    Words words;
    JITACT_UNROLL for (uint32_t& word : words.w) word = from[0] | uint32_t(from[inner_]) << 16, from += 2 * inner_;
    return words;
  }
  // Puts a vector's first `count` elements in the place of the first tensor's.
  JITACT_DEVICE void put(const Words& words, int i, int count) const {
    uint16_t* const to = shared().of[0].bits + part_ + i * inner_;
    const auto put_one = [&](int e) { to[e * inner_] = uint16_t(words.w[e / 2] >> 16 * (e % 2)); };
    if (count >= size) {
      JITACT_UNROLL for (int e = 0; e < size; e++) put_one(e);
    } else {
      JITACT_UNROLL for (int e = 0; e < size - 1; e++)
        if (e < count) put_one(e);
    }
  }
  JITACT_DEVICE void copy_to(void* written) const {
    __syncthreads();
    Words* const to = static_cast<Words*>(written) + vector_ + threadIdx.x;
    each_vector([&](int v) {
      const Words words = own_vector(0)[v];
      const int at = (int(threadIdx.x) + v) * size, begin = ::max(lead_ - at, 0), end = ::min(end_ - at, size);
      if (begin == 0 && end == size) to[v] = words;
      else JITACT_UNROLL for (int e = 0; e < size; e++)
        if (e >= begin && e < end) reinterpret_cast<uint16_t*>(to + v)[e] = uint16_t(words.w[e / 2] >> 16 * (e % 2));
    });
  }

 private:
  static JITACT_DEVICE Staged<tensors, vectors>& shared() { return ptx::shared<Staged<tensors, vectors>>(); }
  // The thread's first vector of a tensor; the others are kPlaneThreads, 2 kPlaneThreads, ... further on.
  static JITACT_DEVICE Words* own_vector(int tensor) {
    return reinterpret_cast<Words*>(shared().of[tensor].bits) + threadIdx.x;
  }
  template <typename Visit>
  JITACT_DEVICE void each_vector(const Visit& visit) const {
    JITACT_UNROLL for (int v = 0; v < vectors * kPlaneThreads; v += kPlaneThreads)
      if ((int(threadIdx.x) + v) * size < end_) visit(v);
  }

  int inner_, lead_, end_;  // lead_, end_: where the planes begin and end in shared memory
  int64_t vector_;          // the first one in the tensors
  int part_;                // where the thread's part begins
};

}  // namespace jitact::rows
