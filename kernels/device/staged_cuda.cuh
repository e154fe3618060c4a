// Rows that threads find in shared memory: a block copies rows that follow one another there, by vectors as they lie, and its
// threads put the results in their place. For strided 16-bit rows of which few are adjacent, in small planes, which are found as if
// they were contiguous; for contiguous rows that do not fill vectors, whose ends would take more instructions in global memory; and
// for those of few whole vectors, of which neighbouring threads would access memory far apart.
#pragma once

#include "row_sums_cuda.cuh"
#ifdef JITACT_ROW_INPUT
#include "row_types_cuda.cuh"
#endif

namespace jitact::rows {

// Bytes of an element as threads hold it.
inline int held_bytes(const Call& call) {
#ifdef JITACT_ROW_INPUT
  if (call.op != Op::forward) return sizeof(Output);
  return 16 / (call.length < kLongInput ? Storage<Computed<Op::forward>>::size : Storage<ComputedIfLong>::size);
#else
  return int(bytes_of(call.dtype));
#endif
}

constexpr int kPlaneThreads = 256, kShortRowThreads = 128;    // per block
constexpr int kFewOfPlane = 2, kManyOfPlane = 4;              // vectors of a row in a thread, in each tensor
constexpr int kMostAdjacent = 31;                             // rows
constexpr int kBeyondPlanes = (7 * kMostAdjacent + 7) / 8 * 4;  // words that a vector in which a row ends may take behind a block's
constexpr int kFewOfRow = 2, kMidOfRow = 9, kManyOfRow = 12;  // as above, the latter two in all tensors
constexpr int kLowOfRow = 7;                                  // only of rows that are converted
constexpr int kFewOfWhole = 6, kManyOfWhole = 10;             // in all tensors, of rows of whole vectors
constexpr int kLongestStaged = 600, kLongestStagedInTwo = 384;  // elements, the latter where two tensors are read
constexpr int kLeastStagedAgain = 1019, kMostStagedAgain = 1152;  // of 16 bits, which would fill little of twice as many threads
constexpr int kLongestConverted = 704;  // of rows that are converted from 16 bits
#ifdef JITACT_ROW_INPUT
constexpr bool kStagesRows = kMasks ? !kConverts && sizeof(Input) <= (kAdds ? 2 : 4) : kWidens, kStagesWhole = false;
#else
constexpr bool kStagesRows = true, kStagesWhole = true;  // the latter: with kernels for rows of whole vectors
#endif
constexpr bool stages(Op op) { return kStagesRows && (kStagesWhole || op == Op::forward); }

// Of these vectors, those of each tensor.
constexpr int of_each(int vectors, int tensors) { return vectors == kFewOfRow ? vectors : vectors / tensors; }
// For how many of each thread a block has memory: of rows that are converted, which take more of it, for no more than there are.
constexpr int of_memory(int vectors) { return vectors == kFewOfRow || kStagesWhole ? kManyOfRow : vectors; }
constexpr bool is_of_whole(int vectors) { return vectors == kFewOfWhole || vectors == kManyOfWhole; }
// Minimum blocks per multiprocessor, for __launch_bounds__.
constexpr int short_row_blocks(int vectors) {
  return vectors == kFewOfWhole || vectors == kLowOfRow ? 9 : vectors == kMidOfRow ? 8 : vectors == kManyOfWhole ? 7 : 6;
}

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

// How a block has contiguous rows, a multiple of 8, so that the first begins with a vector. Its threads have several, one after the
// other, if there are enough.
struct ShortRows {
  int part;             // elements of a row in a thread
  int log_group = 0;    // threads per row
  int turns;            // rows per thread
  int vectors;          // of a thread's part in each tensor, at most, of_each of one of the above
  uint32_t begins = 0;  // of whole vectors, for each of 8 threads 4 bits: the one of its part with which it begins

  ShortRows() = default;
  explicit ShortRows(const Call& call) : ShortRows(reads(call.op), held_bytes(call), int(call.length) * held_bytes(call)) {
    const int64_t busy = 4 * gpu::device_has(cudaDevAttrMultiProcessorCount), most = call.outer / (kShortRowThreads * busy);
    turns = ::max(1, int(::min(int64_t(turns), most)));
  }
  // Whether the rows of a call are staged: those that were measured to be faster so.
  static bool takes(const Call& call) {
    const int tensors = reads(call.op), size = int(bytes_of(call.dtype));
    const int64_t bytes = call.length * size, vectors = bytes / 16;
    const bool odd = vectors % 2 != 0;
    if (!stages(call.op)) return false;
    if (!kStagesWhole) return takes_input(call.length, 16 / held_bytes(call));
    if (bytes % 16 == 0) {
      if (tensors > 1) return vectors <= 10 || (size == 2 && odd && vectors < 16);
      if (odd) return vectors < 32;
      return size == 2 ? vectors < 24 && vectors % 8 != 0 : vectors < 20;
    }
    const bool empty = size == 4 && call.length > 224 && call.length % 224 < 24;  // much of 8 or 16 threads' parts of 32 words is
    const bool again = size == 2 && call.length >= kLeastStagedAgain && call.length <= kMostStagedAgain;
    if (tensors == 1) return call.length <= kLongestStaged ? !empty : again;
    if (call.length > kLongestStagedInTwo) return false;
    const int words = int(bytes + 3) / 4, log_group = log_threads(words, kManyOfRow / tensors);
    return log_group < (size == 2 ? 3 : 4) || words >= 14 << log_group;  // many threads must have enough to do
  }
  JITACT_INLINE int rows() const { return turns * (kShortRowThreads >> log_group); }  // of a block

 private:
  // The same of rows that are converted or have a mask, of which a thread has `each` elements in 16 bytes.
  static bool takes_input(int64_t length, int each) {
    const bool in_vectors = length % each == 0;
    if (length % 16 == 0) return false;  // many threads would share banks of shared memory
#ifdef JITACT_ROW_INPUT
    if (kMasks && kAdds) return length <= 64 && !in_vectors;
    if (kMasks && each == 4) return length <= 72 && length % 32 != 8;
    if (kMasks) return in_vectors ? length > 64 && length <= 128 : length <= (length % 2 == 0 ? 128 : 224);
#endif
    int64_t full = 128;  // elements that the threads have which would hold a row: nearly full, they are as fast
    while (full < each * vectors_touched(length, each)) full *= 2;
    return length <= kLongestConverted && length * 8 < full * (in_vectors ? 6 : 7);
  }
  static int log_threads(int words, int vectors) {
    int log_group = 0;
    while (4 * vectors << log_group < words) log_group++;
    return log_group;
  }
  ShortRows(int tensors, int size, int bytes) {
    const bool whole = kStagesWhole && bytes % 16 == 0 && bytes > 16;
    const int words = (bytes + 3) / 4, few = kFewOfWhole / tensors, many = kManyOfWhole / tensors;
    const bool in_few = whole && log_threads(words, few) == log_threads(words, many);  // as many threads, and more blocks
    const int most = in_few ? few : whole ? many : kManyOfRow / tensors;
    log_group = log_threads(words, most);
    int best = ((words - 1 >> log_group) / 4 + 1) * 4;  // whole vectors
    if (whole) {
      vectors = most, begins = begins_of(bytes / 16, best / 4);
    } else {
      const bool is_few = words <= 4 * kFewOfRow;
      int least = cost(best, bytes, size);
      for (int longer = best + 4; longer <= 4 * (is_few ? kFewOfRow : most) && longer * instructions(size) < least; longer += 4)
        if (const int found = cost(longer, bytes, size); found < least) best = longer, least = found;
      const int mid = kMidOfRow / tensors;  // more blocks do not help shorter ones
      if constexpr (kStagesWhole) vectors = is_few ? kFewOfRow : best * tensors > 16 && best <= 4 * mid ? mid : most;
      else vectors = is_few ? kFewOfRow : best <= 4 * kLowOfRow ? kLowOfRow : best <= 4 * mid ? mid : most;
    }
    part = best * 4 / size, turns = 16 * (kStagesWhole ? most : of_memory(vectors)) / bytes;  // 0 if threads share rows
  }
  // Of 8 threads, which access shared memory at the same time, none begins in the banks in which another does: where their parts
  // would, it begins with a later vector, and goes on around its part.
  uint32_t begins_of(int vectors_of_row, int vectors_of_part) const {
    unsigned begins = 0, banks = 0;
    for (int thread = 0; thread < 8; thread++) {
      const int within = (thread & ((1 << log_group) - 1)) * vectors_of_part;
      const int first = (thread >> log_group) * vectors_of_row + within, count = ::min(vectors_of_part, vectors_of_row - within);
      int later = 0;
      while (later < count && banks >> (first + later) % 8 & 1) later++;
      if (later >= count) continue;
      banks |= 1u << (first + later) % 8, begins |= unsigned(later) << 4 * thread;
    }
    return begins;
  }
  // The instructions for a word, in cycles of which a multiprocessor takes four at once.
  static constexpr int instructions(int size) { return size == 2 ? 20 : 32; }
  // What it costs if parts have so many words: instructions, or accesses of shared memory, where the threads of a warp that share a
  // bank wait for each other.
  int cost(int part_words, int bytes, int size) const {
    int of_bank[32] = {}, most = 0;
    for (int lane = 0; lane < 32; lane++) {
      const int word = (lane >> log_group) * bytes / 4 + (lane & ((1 << log_group) - 1)) * part_words;
      most = ::max(most, ++of_bank[word % 32]);
    }
    return part_words * ::max(instructions(size), 8 * most);
  }
};
// Enough threads for 8 rows.
static_assert(std::max({kLongestStaged, kLongestConverted, kMostStagedAgain / 2}) <= 4 * kManyOfRow * kShortRowThreads / 8);

// A block's part of the tensors in shared memory. Its first element, `first`, may lie within a vector; it has `there` elements. A
// block has memory for `vectors` of each tensor, and may read as many words as `beyond` says from behind what it has.
template <typename S, int tensors, int vectors, int beyond>
class Staged {
 public:
  static constexpr int size = Storage<S>::size;

  Staged() = default;
  JITACT_DEVICE Staged(uint64_t first, int there)
      : lead_(int(first % size)), end_(lead_ + there), vector_(int64_t(first / size)) {}
  JITACT_DEVICE void copy_from(const void* const (&read)[2]) const {
    const unsigned bytes = unsigned((end_ - 1) / size + 1) * sizeof(Words);
    ptx::Barrier* const arrived = &ptx::shared<Memory>().arrived;
    ptx::expect_by_block(arrived, bytes * tensors);
    JITACT_UNROLL for (int r = 0; r < tensors; r++)
      ptx::load_by_block(words(r), static_cast<const Words*>(read[r]) + vector_, bytes, arrived);
    ptx::wait_by_block(arrived);
  }
  JITACT_DEVICE void copy_to(void* written) const {
    const int whole = (lead_ + size - 1) / size, end = end_ / size;  // vectors
    Words* const to = static_cast<Words*>(written) + vector_;
    ptx::store_by_block(to + whole, words(0) + 4 * whole, unsigned(::max(end - whole, 0)) * sizeof(Words));
    const auto store = [&](int from, int up_to) {
      const int i = from + int(threadIdx.x);
      if (i < up_to) reinterpret_cast<Bits*>(to)[i] = reinterpret_cast<const Bits*>(words(0))[i];
    };
    store(lead_, ::min(whole * size, end_)), store(::max(end, whole) * size, end_);
  }

 protected:
  using Bits = std::conditional_t<sizeof(S) == 2, uint16_t, uint32_t>;
  struct Memory {
    struct alignas(16) { uint32_t words[4 * vectors + beyond]; } of[tensors];
    ptx::Barrier arrived;
  };
  static JITACT_DEVICE uint32_t* words(int tensor) { return ptx::shared<Memory>().of[tensor].words; }
  static JITACT_DEVICE uint16_t* halves(int tensor) { return reinterpret_cast<uint16_t*>(words(tensor)); }

  int lead_, end_;  // where the block's part begins and ends in shared memory
  int64_t vector_;  // the first one in the tensors
};

// The planes of a block in shared memory. A row's elements are `inner` apart there; the vector in which it ends is read as a whole.
template <typename S, int tensors, int vectors>
class StagedPlanes : public Staged<S, tensors, vectors * kPlaneThreads, kBeyondPlanes> {
 public:
  using Base = Staged<S, tensors, vectors * kPlaneThreads, kBeyondPlanes>;
  using Tile = SmallPlanes;
  using Vector = Words;
  using Base::size;
  static constexpr bool kInParts = false;

  StagedPlanes() = default;
  JITACT_DEVICE StagedPlanes(const SmallPlanes& planes, uint64_t first, int there) : Base(first, there), planes_(&planes) {}
  // The thread has a part, which begins at element `begin`, of the block's n-th row.
  JITACT_DEVICE void take_row(int n, int begin) {
    const int plane = int(planes_->by_inner.divide_small_by_many(unsigned(n)));
    part_ = this->lead_ + plane * (planes_->elements - planes_->inner) + n + begin * planes_->inner;
  }
  // Elements i, i + 1, ... of the part; those beyond the row's end are any.
  JITACT_DEVICE Words get(int tensor, int i, uint32_t) const {
    const int inner = planes_->inner;
    const uint16_t* from = Base::halves(tensor) + part_ + i * inner;
    Words words;
    JITACT_UNROLL for (uint32_t& word : words.w) word = from[0] | uint32_t(from[inner]) << 16, from += 2 * inner;
    return words;
  }
  // Puts a vector's elements up to `end` in the place of the first tensor's.
  JITACT_DEVICE void put(const Words& words, int i, int end) const {
    const int inner = planes_->inner;
    uint16_t* const to = Base::halves(0) + part_ + i * inner;
    const auto put_one = [&](int e) { to[e * inner] = uint16_t(words.w[e / 2] >> 16 * (e % 2)); };
    if (end >= size) {
      JITACT_UNROLL for (int e = 0; e < size; e++) put_one(e);
    } else {
      JITACT_UNROLL for (int e = 0; e < size - 1; e++)
        if (e < end) put_one(e);
    }
  }

 private:
  const SmallPlanes* planes_;
  int part_;  // where the thread's part begins
};

// Contiguous rows of a block in shared memory. Parts begin at words, the first one of a row with the word in which the row begins.
template <typename S, int tensors, int vectors>
class StagedRows : public Staged<S, tensors, vectors * kShortRowThreads, 8> {
 public:
  using Base = Staged<S, tensors, vectors * kShortRowThreads, 8>;
  using Tile = ShortRows;
  using Vector = Words;
  using Base::size;
  static constexpr bool kInParts = true;

  StagedRows() = default;
  JITACT_DEVICE StagedRows(const ShortRows&, uint64_t first, int there) : Base(first, there) {}
  // The thread has a part from element `skipped` on, counted from a word, of the row that begins at this element of the block's and
  // has `length`. Returns where in the word that is.
  JITACT_DEVICE int take_part(int begin, int skipped, int) {
    const bool odd = skipped == 0 && begin % kEach != 0;
    part_ = (begin + skipped) / kEach, odd_ = odd;  // lead_ is 0, see ShortRows
    kept_ = odd ? 0x3254 : 0x3210;  // bytes of the first word, and the first two of a neutral one
    return begin % kEach;
  }
  // The half word before the row, and what is behind it, may be written meanwhile: they are replaced by neutral elements.
  JITACT_DEVICE Words get(int tensor, int i, uint32_t neutral) const {
    const uint32_t* const from = Base::words(tensor) + part_ + i / kEach;
    Words words;
    JITACT_UNROLL for (int w = 0; w < 4; w++) words.w[w] = from[w];
    if (kEach == 2 && i == 0) words.w[0] = __byte_perm(words.w[0], neutral, kept_);
    return words;
  }
  JITACT_DEVICE void put(const Words& words, int i, int end) const {
    uint32_t* const to = Base::words(0) + part_ + i / kEach;
    uint16_t* const halves = reinterpret_cast<uint16_t*>(to);
    const auto put_each = [&](int end) {
      JITACT_UNROLL for (int w = 0; w < 4; w++) {
        const bool odd = kEach == 2 && i + w == 0 && odd_;
        if ((w + 1) * kEach <= end && !odd) to[w] = words.w[w];
        if (kEach == 2 && w * 2 + 1 == end) halves[w * 2] = uint16_t(words.w[w]);
        if (odd) halves[1] = uint16_t(words.w[0] >> 16);
      }
    };
    if (end >= size) put_each(size);
    else put_each(end);
  }

 protected:
  int part_;  // the word at which the thread's part begins

 private:
  static constexpr int kEach = size / 4;  // elements of a word
  bool odd_;
  unsigned kept_;
};

#ifdef JITACT_ROW_INPUT
// The same of 16-bit rows with a float32 result. What is read has memory of its own.
template <typename E, int vectors>
class StagedInput : public StagedRows<float, 1, vectors> {
 public:
  using Rows = StagedRows<float, 1, vectors>;
  using Rows::Rows;

  JITACT_DEVICE void copy_from(const void* const (&read)[2]) const {
    constexpr int size = 16 / sizeof(E);
    const unsigned bytes = unsigned((this->end_ - 1) / size + 1) * sizeof(Words);
    ptx::Barrier* const arrived = &ptx::shared<typename Rows::Base::Memory>().arrived;
    ptx::expect_by_block(arrived, bytes);
    ptx::load_by_block(ptx::shared<Read>().words, static_cast<const Words*>(read[0]) + this->vector_ / 2, bytes, arrived);
    ptx::wait_by_block(arrived);
  }
  JITACT_DEVICE Words get(int, int i, uint32_t) const {
    const E* const from = reinterpret_cast<const E*>(ptx::shared<Read>().words) + this->part_ + i;
    Words words;
    JITACT_UNROLL for (int w = 0; w < 4; w++) words.w[w] = __float_as_uint(Storage<E>::load(from + w).v);
    return words;
  }

 private:
  struct alignas(16) Read { uint32_t words[2 * vectors * kShortRowThreads + 4]; };
};

// Contiguous rows of 16-bit elements, in a block's shared memory, that threads have as float32. Parts begin at elements.
template <int vectors>
class StagedHalves : public Staged<Input, 1, vectors * kShortRowThreads / 2, 8> {
 public:
  using Base = Staged<Input, 1, vectors * kShortRowThreads / 2, 8>;
  using Tile = ShortRows;
  static constexpr bool kInParts = true;
  struct alignas(8) Vector { uint16_t of[4]; };

  StagedHalves() = default;
  JITACT_DEVICE StagedHalves(const ShortRows&, uint64_t first, int there) : Base(first, there) {}
  JITACT_DEVICE int take_part(int begin, int skipped, int) {
    part_ = begin + skipped;
    return 0;
  }
  JITACT_DEVICE Vector get(int, int i, uint32_t) const {
    Vector four;
    JITACT_UNROLL for (int e = 0; e < 4; e++) four.of[e] = Base::halves(0)[part_ + i + e];
    return four;
  }
  JITACT_DEVICE void put(const Vector& four, int i, int end) const {
    JITACT_UNROLL for (int e = 0; e < 4; e++)
      if (e < end) Base::halves(0)[part_ + i + e] = four.of[e];
  }

 private:
  int part_;
};
#endif

// The same of rows that fill vectors; their parts are whole vectors.
template <typename S, int tensors, int vectors>
class StagedVectors : public Staged<S, tensors, vectors * kShortRowThreads, 0> {
 public:
  using Base = Staged<S, tensors, vectors * kShortRowThreads, 0>;
  using Tile = ShortRows;
  using Vector = Words;
  using Base::size;
  static constexpr bool kInParts = true;

  StagedVectors() = default;
  JITACT_DEVICE StagedVectors(const ShortRows& rows, uint64_t first, int there)
      : Base(first, there), rows_(&rows), begin_(rows.begins >> threadIdx.x % 8 * 4 & 15) {}
  JITACT_DEVICE int take_part(int begin, int skipped, int length) {
    first_ = unsigned(begin + skipped) / size, count_ = unsigned(::max(::min(length - skipped, rows_->part), 0)) / size;
    return 0;
  }
  JITACT_DEVICE Words get(int tensor, int i, uint32_t) const { return *at(tensor, i / size + begin_); }
  JITACT_DEVICE void put(const Words& words, int i, int) const {
    uint32_t begin = begin_;
    ptx::forget(begin);  // else the addresses of all vectors would stay in registers
    *at(0, i / size + begin) = words;
  }

 private:
  JITACT_DEVICE Words* at(int tensor, uint32_t turned) const {
    return reinterpret_cast<Words*>(Base::words(tensor)) + first_ + (turned < count_ ? turned : turned - count_);
  }

  const ShortRows* rows_;
  uint32_t begin_;          // the vector of its part with which the thread begins
  uint32_t first_, count_;  // of the part's vectors
};

}  // namespace jitact::rows
