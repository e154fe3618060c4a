// The GPU's loops over rows. A row is read once: the threads that share it (part of a warp, a block, or a cluster of blocks)
// hold it in registers. Longer rows are held in shared memory: then blocks are persistent, and as soon as a thread is done with
// a vector, it starts the asynchronous copy of the next row's vector to its slot. Rows may begin and end within vectors:
// elements of other rows in these are ignored. Some rows are found in shared memory, see staged_cuda.cuh.
#pragma once

#include "staged_cuda.cuh"
#ifdef JITACT_ROW_INPUT
#include "row_types_cuda.cuh"
#endif

namespace jitact::rows {

constexpr int kLogLeast = 7, kLogThreads = 9, kThreads = 1 << kLogThreads;  // per block, fewest and most
constexpr int kChunk = 4;  // vectors, of all tensors, per group of a thread's copies
constexpr int kFew = 8, kMany = 24;  // vectors of all tensors that a thread holds in registers
constexpr int kLogOfMany = 8;        // most threads per block with kMany vectors each: two blocks fit on a multiprocessor
constexpr int kChunksOfTwo = 3, kMostChunks = 6;  // per thread, for two blocks per multiprocessor, and for one
static_assert(kMostVectors == int64_t(kMostChunks) * kChunk * kThreads * kClusterBlocks);
#ifdef JITACT_ROW_INPUT
static_assert(kHeldVectors == int64_t(kMany * kClusterBlocks) << kLogOfMany);
#endif

struct Launch {
  int threads, log_threads;  // per block
  int group, log_group;      // threads per block that share a row
  int blocks;                // per cluster, whose blocks share rows too
  int held;                  // if rows are held in registers: the most vectors per thread
  int nearly_full;           // of one tensor: all or half of these, if each thread has them, or all but the last; else 0
  int chunks;                // if not: chunks of a row per thread
  float unit;                // see unit_of
  int64_t rows, at_once;     // the latter: rows processed at the same time
  int length;  // elements per row
  float scale;
  const void* read[2];
  uint32_t outside[2];  // for each of them, or x and its mask, a word of neutral elements, which add nothing to a row
  void* written;
#ifdef JITACT_ROW_INPUT
  MaskOfRows mask;
  bool gives_shares;
#endif
  Operands operands;
};
template <typename Tile>
struct StagedLaunch : Launch { Tile tile; };
struct InPlace {  // of rows that are not staged
  struct Tile {};
  static constexpr bool kInParts = false;
};

// The shared memory in which combine() exchanges values, at most once per row for each `turn`. Rows alternate between two
// buffers, as one thread may still read when another is already at the next row.
template <int turn, int n>
struct Exchange {
  float of_warps[2][n][kThreads / 32], of_blocks[2][n][kClusterBlocks];
};
// Barriers for the arrival of values of all blocks.
template <int turns>
struct Arrivals {
  ptx::Barrier of_turn[turns][2];
};

// The position of a thread's part of a row.
struct Place {
  int64_t first;   // vector in the tensors
  int begin, end;  // of the row, in elements relative to that vector
};

// A thread's part of rows: every (blocks * group)-th vector of each, from the thread's first on, in chunks. `ragged` rows may
// begin and end within vectors. If `held` is not 0, a thread has one row, with up to that many vectors in registers. Rows that
// are in shared memory, as `Here` says, are ragged; a thread may have several, one after the other, and of each adjacent elements.
template <Op op, typename S, bool ragged, int held, typename Here = InPlace>
class Rows {
 public:
  using T = typename Storage<S>::T;
  static constexpr bool kStaged = !std::is_same_v<Here, InPlace>;
  using Launched = std::conditional_t<kStaged, StagedLaunch<typename Here::Tile>, Launch>;

  JITACT_DEVICE explicit Rows(const Launched& launch)
      : launch_(launch), scale_(launch.scale), step_(Here::kInParts ? 1 : launch.blocks * launch.group),
        slots_(held ? 0 : ptx::dynamic_shared() + unsigned(sizeof(Words) * threadIdx.x)) {
    if constexpr (kOperands > 0) formulas_.take_numbers(launch.operands);
  }

  JITACT_DEVICE void run() {
    if constexpr (kStaged) return run_staged();
    const int64_t first = int64_t(ptx::cluster_id()) << (launch_.log_threads - launch_.log_group);
    int64_t left = launch_.rows - first, row = first + (threadIdx.x >> launch_.log_group);
#ifdef JITACT_ROW_INPUT
    if constexpr (masks(op) > 0 && held) row = launch_.mask.row_at(unsigned(row));
#endif
    if (launch_.blocks > 1) {
      ptx::Barrier* const arrivals = ptx::shared<Arrivals<turns>>().of_turn[0];
      for (int i = 0; threadIdx.x == 0 && i < 2 * turns; i++) ptx::start(&arrivals[i]);
      ptx::cluster_started();
    }
    next_ = place_of(row, left);
    Held words;
    if constexpr (held) {
      take_row(row, left);
      place_ = next_;
#ifdef JITACT_ROW_INPUT
      if constexpr (op == Op::forward) load_masked(words);
      else
#endif
      load(words);
      if (launch_.blocks > 1) ptx::cluster_wait();  // until all blocks are there
      walk(words);
    } else {
      for (int c = 0; c < launch_.chunks; c++) copy(c, next_);
      if (launch_.blocks > 1) ptx::cluster_wait();
      while (left > 0) {
        take_row(row, left);
        place_ = next_, next_ = place_of(row += launch_.at_once, left -= launch_.at_once);
        walk(words);
        walked_++;
      }
    }
  }
  JITACT_DEVICE void run_staged() {
    const auto& tile = launch_.tile;
    const int64_t first = int64_t(blockIdx.x) * tile.rows();
    const int there = int(::min(launch_.rows - first, int64_t(tile.rows())));
    staged_ = Here(tile, first * launch_.length, there * launch_.length);
    staged_.copy_from(launch_.read);
    int before = 0;  // rows of earlier turns
    do {
      const int row = before + (int(threadIdx.x) >> launch_.log_group);
      take_row(first + row, there - before);
      find_staged(first, row, there);
      Held words;
      each_of(0, place_.end, [&](int v, bool) {
        JITACT_UNROLL for (int r = 0; r < tensors; r++) words.of[r][v] = staged_.get(r, at(0, v), launch_.outside[r]);
      });
      walk(words);
      before += kShortRowThreads >> launch_.log_group;
    } while (Here::kInParts && before < tile.rows());
    staged_.copy_to(launch_.written);
  }

 private:
  // Whether vectors beyond the row are skipped by branches: for rows whose vectors do not fill whole warps, and because the
  // compiler does not interleave code across branches, which would take more registers.
  static constexpr bool pairs = sizeof(S) == 2, kBranches = !held || ragged || pairs;
  static constexpr bool kNearlyFull = kBranches && held == kFew && op == Op::forward && !kStaged;  // whether `nearly_full` is used
  static constexpr int size = Storage<S>::size, tensors = reads(op), kEach = size / 4;  // the latter: elements of a word
  static constexpr int vectors = held ? held / tensors : kChunk / tensors;
  static constexpr int turns = held ? 3 : 4, x = tensors - 1;  // exchanges per row; index of the tensor that is folded
  using F = Fold<T>;
  static constexpr bool kSetsAside = F::counts && std::is_same_v<T, Single>;  // see put_aside
  static constexpr bool stored = sizeof(S) == sizeof(float) && !F::as_it_is;  // kept values replace elements
  struct Held { Words of[held ? tensors : 1][held ? vectors : 1]; };
#ifdef JITACT_ROW_INPUT
  static constexpr bool kIsScaled = op == Op::forward && kAdds;  // whether elements are scaled as the mask is added to them
  using Results = Packed<Written<op>, T, size>;
  using Vector = typename Results::Vector;
  using Element = typename Results::Element;
#else
  static constexpr bool kIsScaled = false;
  using Results = Storage<S>;
  using Vector = Words;
  using Element = S;
#endif

  JITACT_DEVICE int chunks() const { return held ? 1 : launch_.chunks; }
  // The thread's part of a row; `left` is how many rows there are from the block's first on.
  JITACT_DEVICE Place place_of(int64_t row, int64_t left) const {
    const int64_t element = row * launch_.length;
    const int own = ptx::cluster_rank() * launch_.group + (int(threadIdx.x) & (launch_.group - 1));
    const int begin = (ragged && !kStaged ? int(element % size) : 0) - own * size;
    const bool there = int(threadIdx.x) >> launch_.log_group < left;
    return {int64_t(uint64_t(element) / size) + own, begin, there ? begin + launch_.length : 0};
  }
  // Of a block's staged rows, of which the first is `first` of all.
  JITACT_DEVICE void find_staged(int64_t first, int row, int there) {
    if constexpr (Here::kInParts) {
      const int skipped = (int(threadIdx.x) & (launch_.group - 1)) * launch_.tile.part;
      const int begin = staged_.take_part(row * launch_.length, skipped) - skipped;
      place_ = {0, begin, row < there ? ::min(begin + launch_.length, launch_.tile.part) : 0};
    } else {
      place_ = place_of(first + row, there);
      staged_.take_row(row, -place_.begin);
    }
  }
  // The distance, in vectors and in elements, from this thread's first vector to the v-th of chunk c.
  JITACT_DEVICE int vectors_to(int c, int v) const { return (c * vectors + v) * step_; }
  JITACT_DEVICE int at(int c, int v) const { return vectors_to(c, v) * size; }
  JITACT_DEVICE bool is_inside(int i) const { return i >= place_.begin && i < place_.end; }
  // The row's part of a vector: elements from `skipped`, which is 0 but in the row's first vector, up to `left`, if that is less
  // than a vector has. `full`: whether the row is known to go on to the vector's end.
  JITACT_DEVICE int skipped(int c, int v) const { return ragged && !kStaged && v == 0 && c == 0 ? ::max(place_.begin, 0) : 0; }
  JITACT_DEVICE int left(int c, int v, bool full) const { return full ? size : place_.end - at(c, v); }
  // Whether the row begins or ends within a vector.
  JITACT_DEVICE bool is_cut(int c, int v, bool full) const {
    return ragged && (unsigned(left(c, v, full) - 1) < unsigned(size - 1) || skipped(c, v) > 0);
  }
  // The address of a vector's slot in shared memory.
  JITACT_DEVICE unsigned slot(int c, int v, int tensor) const {
    return slots_ + unsigned((c * vectors + v) * tensors + tensor) * unsigned(sizeof(Words) * kThreads);
  }

  // Calls visit(v, full) for each vector of a chunk that begins before `end`. There are no branches between them if all do, or all
  // but the last one of `nearly_full`; these are known to be full.
  template <typename Visit>
  JITACT_DEVICE void each_of(int c, int end, const Visit& visit) const {
    const auto all_but_last = [&](int most) {
      JITACT_UNROLL for (int v = 0; v < most - 1; v++) visit(v, true);
      if (at(c, most - 1) < end) visit(most - 1, false);
    };
    if (kNearlyFull && launch_.nearly_full == vectors && end > 0) {
      all_but_last(vectors);
    } else if (kNearlyFull && pairs && launch_.nearly_full == vectors / 2 && end > 0) {
      all_but_last(vectors / 2);
    } else if (!held && at(c, vectors - 1) < end) {
      JITACT_UNROLL for (int v = 0; v < vectors; v++) visit(v, false);
    } else {
      constexpr int together = kBranches ? kFew / 2 : kFew;  // where none of these begins, none is asked for by itself
      JITACT_UNROLL for (int first = 0; first < vectors; first += together)
        if (first == 0 || at(c, first) < end)
          JITACT_UNROLL for (int v = first; v < vectors && v < first + together; v++)
            if (!kBranches || at(c, v) < end) visit(v, false);
    }
  }

  // Loads the operands of the thread's row, if it has one.
  JITACT_DEVICE void take_row(int64_t row, int64_t left) {
    if constexpr (kRowValues > 0 || masks(op) > 0) row_ = row;
    if constexpr (kRowValues > 0)
      if (int(threadIdx.x) >> launch_.log_group < left) formulas_.take_row(launch_.operands, 0, row_);
  }
  JITACT_DEVICE void give_row(const Sums<T>& sums) const {
    const bool is_first = ptx::cluster_rank() == 0 && (int(threadIdx.x) & (launch_.group - 1)) == 0;
    if (is_first && place_.end > 0) formulas_.give_row(launch_.operands, 0, row_, launch_.rows, sums);
  }

  // Starts the copy of a chunk of a row, if there is a row.
  JITACT_DEVICE void copy(int c, const Place& place) const {
    const int64_t first = place.first + vectors_to(c, 0);
    each_of(c, place.end, [&](int v, bool) {
      JITACT_UNROLL for (int r = 0; r < tensors; r++)
        ptx::copy_async(slot(c, v, r), static_cast<const Words*>(launch_.read[r]) + first + v * step_);
    });
    ptx::commit_copies();
  }

  // Calls load(v) for those of the thread's vectors from `first` up to `end` that begin in the row, and before that, or in place of
  // it, set_absent(v) unless it is known that the vector does; and advance() after each vector. There are no branches between
  // them if all begin in the row, or all but the last.
  template <typename Load, typename SetAbsent, typename Advance>
  JITACT_DEVICE void load_each(int first, int end, const Load& load, const SetAbsent& set_absent, const Advance& advance) const {
    const auto load_if_there = [&](int v) {
      set_absent(v);
      if (at(0, v) < place_.end) load(v);
      advance();
    };
    if (launch_.nearly_full == vectors ? place_.end > 0 : at(0, vectors - 1) < place_.end) {
      JITACT_UNROLL for (int v = first; v < end && v < vectors - 1; v++) load(v), advance();
      if (end == vectors) load_if_there(vectors - 1);
    } else {
      JITACT_UNROLL for (int v = first; v < end; v++) load_if_there(v);
    }
  }

  JITACT_DEVICE void load(Held& words) const {
    JITACT_UNROLL for (int r = 0; r < tensors; r++) {
      const Words* from = static_cast<const Words*>(launch_.read[r]) + place_.first;
      load_each(0, vectors, [&](int v) { words.of[r][v] = *from; },
                [&](int v) {  // where there are branches, only put_aside looks at them
                  JITACT_UNROLL for (int w = 0; (!kBranches || kSetsAside) && w < 4; w++) words.of[r][v].w[w] = launch_.outside[r];
                },
                [&] { from += step_; });
    }
  }

#ifdef JITACT_ROW_INPUT
  JITACT_DEVICE AlignedMask<size> mask_of_row() const {
    return AlignedMask<size>(launch_.mask, unsigned(row_), place_.begin);
  }
  // For a bool mask: one bit for each element of a chunk, beginning with the lowest, 1 if it takes part.
  JITACT_DEVICE unsigned taking_part(int c) const {
    static_assert(vectors * size <= 32);
    const AlignedMask<size> aligned = mask_of_row();
    const auto by = [&](const auto& mask) {
      using Mask = std::decay_t<decltype(mask)>;
      constexpr int at_once = std::min(vectors, Mask::kAtOnce);
      unsigned bits = 0;
      JITACT_UNROLL for (int first = 0; first < vectors; first += at_once) {
        typename Mask::Loaded loaded[at_once];
        JITACT_UNROLL for (int v = 0; v < at_once; v++) {
          loaded[v] = mask.repeated(0);
          if (at(c, first + v) < place_.end) loaded[v] = mask.load(vectors_to(c, first + v));
        }
        JITACT_UNROLL for (int v = 0; v < at_once; v++) bits |= mask.words(loaded[v]).bits() << (first + v) * size;
      }
      return bits;
    };
    return aligned.is_aligned() ? by(aligned) : by(AnyMask<size>(aligned, place_.begin, place_.end));
  }
  // Loads x with the mask applied. All loads of x are issued before those of masks.
  JITACT_DEVICE void load_masked(Held& words) const {
    const auto* const from = static_cast<const SideWords<Input, size>*>(launch_.read[0]) + place_.first;
    SideWords<Input, size> x[vectors];
    load_each(0, vectors, [&](int v) { x[v] = from[vectors_to(0, v)]; }, [&](int v) { x[v] = {}; }, [] {});
    if constexpr (!kMasks) {
      take_input(words, x, Unmasked());
    } else {
      const AlignedMask<size> mask = mask_of_row();
      if (mask.is_aligned()) take_input(words, x, mask);
      else take_input(words, x, AnyMask<size>(mask, place_.begin, place_.end));
    }
  }
  // Converts vectors of x to words, with their masks.
  template <typename Mask>
  JITACT_DEVICE void take_input(Held& words, const SideWords<Input, size> (&x)[vectors], const Mask& mask) const {
    constexpr int at_once = Mask::kAtOnce;
    JITACT_UNROLL for (int first = 0; first < vectors; first += at_once) {
      typename Mask::Loaded masks[at_once];
      if constexpr (kMasks)
        load_each(first, first + at_once, [&](int v) { masks[v - first] = mask.load(vectors_to(0, v)); },
                  [&](int v) { masks[v - first] = mask.repeated(launch_.outside[1]); }, [] {});
      JITACT_UNROLL for (int v = first; v < first + at_once; v++) {
        Words& made = words.of[0][v];
        if (!kMasks && at(0, v) >= place_.end) {
          JITACT_UNROLL for (uint32_t& w : made.w) w = launch_.outside[0];
          continue;
        }
        if constexpr (kAdds || kConverts) {
          T t[size];
          widen(x[v], t);
          if constexpr (kAdds) {
            T added[size];
            widen(mask.words(masks[v - first]), added);
            JITACT_UNROLL for (int e = 0; e < size; e++) t[e] = fma(t[e], T(launch_.mask.scale), added[e]);
          }
          made = Storage<S>::narrow(t);
        } else {
          made = bit_cast<Words>(x[v]);
        }
        if constexpr (kMasks && !kAdds) {
          const MaskWords<size> bools = mask.words(masks[v - first]);
          JITACT_UNROLL for (int w = 0; w < 4; w++) {
            const uint32_t taking_part = bools.spread(w);
            made.w[w] = (made.w[w] & taking_part) | (launch_.outside[0] & ~taking_part);
          }
        }
      }
    }
  }
#endif

  // Keeps the compiler from holding values converted from words in registers, which takes more of them than the words do.
  static JITACT_DEVICE void forget(Held& words) {
    JITACT_UNROLL for (int r = 0; held && r < tensors; r++)
      JITACT_UNROLL for (int v = 0; v < vectors; v++)
        JITACT_UNROLL for (int w = 0; w < 4; w++) ptx::forget(words.of[r][v].w[w]);
  }

  JITACT_DEVICE void walk(Held& words) {
    if constexpr (op == Op::backward_from_output)
      backward<true>(words, [&](int c, int v, T (&y)[size]) { read(words, c, v, 1, y); });
    else fold(words);
  }
  // Replaces elements of other rows by neutral ones.
  JITACT_DEVICE void trim(Words& words, int c, int v, int tensor, bool full) const {
    if (!is_cut(c, v, full)) return;
    const int begin = skipped(c, v), end = left(c, v, full);
    JITACT_UNROLL for (int w = 0; w < 4; w++) {
      const auto before = [&](int i) { return ptx::low_bits(unsigned(::max(i - w * kEach, 0)) * (32 / kEach)); };
      const uint32_t kept = before(end) & ~(kStaged ? 0 : before(begin));
      words.w[w] = (words.w[w] & kept) | (launch_.outside[tensor] & ~kept);
    }
  }
  JITACT_DEVICE void trim_slots(int c, int v) const {
    if (!is_cut(c, v, false)) return;
    JITACT_UNROLL for (int r = 0; r < tensors; r++) {
      Words words;
      ptx::load_shared(slot(c, v, r), words.w);
      trim(words, c, v, r, false);
      ptx::store_shared(slot(c, v, r), words.w);
    }
  }
  JITACT_DEVICE Words words_of(const Held& words, int c, int v, int tensor) const {
    Words loaded;
    if constexpr (held) loaded = words.of[tensor][v];
    else ptx::load_shared(slot(c, v, tensor), loaded.w);
    return loaded;
  }
  JITACT_DEVICE void read(const Held& words, int c, int v, int tensor, T (&t)[size]) const {
    Storage<S>::widen(words_of(words, c, v, tensor), t);
  }

  // Visits the thread's vectors. The `first` time it waits for their copies and replaces elements of other rows.
  template <bool first, typename Visit>
  JITACT_DEVICE void each(Held& words, const Visit& visit) const {
    for (int c = 0; c < chunks(); c++) {
      if (first && !held) ptx::wait_for_copies(chunks() - 1 - c);
      each_of(c, place_.end, [&](int v, bool full) {
        if constexpr (first && !held) trim_slots(c, v);
        if constexpr (first && held) {
          JITACT_UNROLL for (int r = 0; r < tensors; r++) trim(words.of[r][v], c, v, r, full);
        }
        visit(c, v);
      });
    }
  }

  // Writes the `result` of each vector. If rows are not held, it then starts the copy of the next row to the same slots. With
  // `taking_part`, elements whose bit in its result for a chunk is not set get 0.
  struct All {};
  template <typename Result, typename TakingPart = All>
  JITACT_DEVICE void write(const Result& result, const TakingPart& taking_part = {}) const {
    Vector* const to = static_cast<Vector*>(launch_.written) + place_.first;
    for (int c = 0; c < chunks(); c++) {
      unsigned bits = 0;
      if constexpr (!std::is_same_v<TakingPart, All>) bits = taking_part(c);
      each_of(c, place_.end, [&](int v, bool full) {
        if (!kBranches && at(c, v) >= place_.end) return;
        T results[size];
        result(c, v, results);
        if constexpr (!std::is_same_v<TakingPart, All>)
          JITACT_UNROLL for (int i = 0; i < size; i++) results[i] = bits >> (v * size + i) & 1 ? results[i] : T(0);
        const Vector vector = Results::narrow(results);
        if constexpr (kStaged) staged_.put(vector, at(c, v), left(c, v, full));
        else if (!is_cut(c, v, full)) to[vectors_to(c, v)] = vector;
        else store_part(to + vectors_to(c, v), vector, skipped(c, v), left(c, v, full));
      });
      if (!held) copy(c, next_);
    }
  }
  // Stores the elements of a vector from `begin` up to `end`, one of which may be at the vector's own.
  static JITACT_DEVICE void store_part(Vector* to, const Vector& vector, int begin, int end) {
    if constexpr (std::is_same_v<Vector, Words>) {
      if (begin == 0) return loops::store_first<int(sizeof(S))>(to, vector, end);
      if (end >= size) return loops::store_last<int(sizeof(S))>(to, vector, begin);
    }
    struct Elements { Element of[size]; };
    const Elements elements = bit_cast<Elements>(vector);
    JITACT_UNROLL for (int e = 0; e < size; e++)
      if (e >= begin && e < end) reinterpret_cast<Element*>(to)[e] = elements.of[e];
  }

  // Elements of the folded tensor: unscaled if 16-bit, else scaled, and minus `base`. If not kPlaced, base is already
  // subtracted in registers or shared memory.
  JITACT_DEVICE void elements(const Held& words, int c, int v, T base, T (&t)[size]) const {
    read(words, c, v, x, t);
    JITACT_UNROLL for (int i = 0; !held && !pairs && i < size; i++) t[i] *= times_;
    JITACT_UNROLL for (int i = 0; kPlaced && i < size; i++) t[i] -= base;
  }
  JITACT_DEVICE void keep(Held& words, int c, int v, const T (&t)[size]) const {
    const Words kept = Storage<S>::narrow(t);
    if constexpr (held) words.of[x][v] = kept;
    else ptx::store_shared(slot(c, v, x), kept.w);
  }

  // Folds the row of x, the last tensor, and then computes results or gradients.
  JITACT_DEVICE void fold(Held& words) {
    T base = 0, invalid = 0, peak, sums[F::parts], exponent = 0;
    Weights<T> weights;
    times_ = scale_;
    if constexpr (held) {
      fold_in_two(words, base, invalid, peak, weights, sums);
    } else if (!fold_as_it_comes(peak, weights, sums, exponent)) {
      for (int c = 0; stored && c < chunks(); c++) copy(c, place_);
      fold_in_two(words, base, invalid, peak, weights, sums);
      exponent = 0, folded_in_two_++;
    }
    F folded(peak, invalid, weights, sums, pairs ? scale_ : T(1));
    if constexpr (kPlaced) folded.move(base), peak += base, base = 0;
    if constexpr (!held && stored) {
      if (exponent < -32) move_kept(chunks(), exponent), exponent = 0;  // else factors of shares could be subnormal
      folded.divide_kept(Weights<T>::power(exponent));
    }

    const auto result = [&](int c, int v, T (&y)[size]) {
      if constexpr (stored) read(words, c, v, x, y);
      else elements(words, c, v, base, y);
      JITACT_UNROLL for (int i = 0; i < size; i++) {
        if (pairs && F::as_it_is) y[i] *= scale_;
        if (kSetsAside) y[i] = T(fminf(y[i].v, peak.v));  // NaN, which put_aside wrote, becomes the peak again
        y[i] = formulas_.result(stored ? y[i] : F::kept(weights, y[i]), folded, 0);
      }
    };
    if constexpr (op == Op::forward) write(result);
    else backward<false>(words, result);
  }

  // Two passes: the peak, then weights relative to it. float32 elements are scaled in place. A far peak becomes `base`, which
  // is subtracted first: distances to it are exact.
  JITACT_DEVICE void fold_in_two(Held& words, T& base, T& invalid, T& peak, Weights<T>& weights, T (&sums)[F::parts]) {
    T of_row[1], highest[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    if constexpr (pairs) {
      const uint32_t signs = scale_ < 0 ? 0x80008000u : 0;
      uint32_t of_words[2] = {launch_.outside[x] ^ signs, launch_.outside[x] ^ signs};
      each<true>(words, [&](int c, int v) {
        const Words loaded = words_of(words, c, v, x);
        JITACT_UNROLL for (int w = 0; w < 4; w++) of_words[w % 2] = Storage<S>::max_pair(of_words[w % 2], loaded.w[w] ^ signs);
      });
      Storage<S>::widen_pair(Storage<S>::max_pair(of_words[0], of_words[1]), highest[0], highest[1]);
    } else {
      each<true>(words, [&](int c, int v) {
        T t[size];
        read(words, c, v, x, t);
        JITACT_UNROLL for (int i = 0; !kIsScaled && i < size; i++) t[i] *= scale_;
        JITACT_UNROLL for (int i = 0; i < size; i++) highest[quarter(v)] = max(highest[quarter(v)], t[i]);
        if constexpr (!kIsScaled) keep(words, c, v, t);
      });
      times_ = 1;
    }
    const T own = max(max(highest[0], highest[1]), max(highest[2], highest[3]));
    of_row[0] = own;
    forget(words);
    combine<held ? 0 : 3>(of_row, Highest(), folded_in_two_);
    peak = of_row[0], invalid = peak - peak;
    // In most rows only one of many warps has the peak.
    const bool with_peak = F::counts && !kSetsAside && __ballot_sync(0xffffffffu, !(own < peak)) != 0;
    peak = signed_peak(peak);
    if (!pairs && is_far(peak)) {
      base = peak, peak = 0;
      if constexpr (!kPlaced)
        each<false>(words, [&](int c, int v) {
          T t[size];
          read(words, c, v, x, t);
          JITACT_UNROLL for (int i = 0; i < size; i++) t[i] -= base;
          keep(words, c, v, t);
        });
    }

    weights = weights_beside<S>(peak, scale_);
    T aside = 0;
    if constexpr (kSetsAside)
      if (own == of_row[0]) aside = put_aside(words, highest, own, kPlaced ? own : peak);
    Partial partial;
    const auto weigh = [&]<bool may_be_peak>() {
      each<false>(words, [&](int c, int v) {
        T t[size];
        elements(words, c, v, base, t);
        JITACT_UNROLL for (int i = 0; i < size; i++) t[i] = F::template add<may_be_peak>(partial.of[i % 4], weights, peak, t[i]);
        if constexpr (stored) keep(words, c, v, t);
      });
    };
    if (!with_peak) weigh.template operator()<!F::counts>();
    if constexpr (F::counts && pairs) {
      if (with_peak) {
        PeaksApart<S> apart(peak, peak, launch_.outside[x]);
        each<false>(words, [&](int c, int v) {
          Words loaded = words_of(words, c, v, x);
          T t[size];
          JITACT_UNROLL for (uint32_t& word : loaded.w) word = apart.without(word);
          Storage<S>::widen(loaded, t);
          JITACT_UNROLL for (int i = 0; i < size; i++) F::template add<false>(partial.of[i % 4], weights, peak, t[i]);
        });
        aside = apart.low() + apart.high();
      }
    } else if constexpr (F::counts && !kSetsAside) {
      if (with_peak) weigh.template operator()<true>();
    }
    forget(words);
    partial.total(sums);
    if constexpr (F::counts && (pairs || kSetsAside)) sums[F::parts - 1] = aside;
    combine<1>(sums, Totals(), folded_in_two_);
  }

  // Replaces elements at the row's peak, which is also the thread's `own`, by NaN, whose weight is 0 in float32, and returns
  // their number. Weights then take few instructions, as many in all warps, else all would wait for the one with the peak.
  // `highest` has the maximum of each quarter of the vectors, and `placed` is the value stored for elements at the peak.
  JITACT_DEVICE T put_aside(Held& words, const T (&highest)[4], T own, T placed) const {
    T count = 0;
    JITACT_UNROLL for (int q = 0; q < 4; q++) {
      if (highest[q] != own) continue;
      for (int c = 0; c < chunks(); c++)
        JITACT_UNROLL for (int v = 0; v < vectors; v++) {
          if (quarter(v) != q || ((kStaged || !held) && at(c, v) >= place_.end)) continue;
          T t[size];
          read(words, c, v, x, t);
          JITACT_UNROLL for (int i = 0; i < size; i++) {
            const bool is_peak = t[i] == placed;
            t[i] = is_peak ? T(NAN) : t[i], count += is_peak ? T(1) : T(0);
          }
          keep(words, c, v, t);
        }
      forget(words);
    }
    return count;
  }
  static constexpr int quarter(int v) { return v * 4 / vectors; }

  // Folds the row in one pass, as its chunks arrive: each thread's weights are relative to its own running peak, and at the end
  // all are rescaled to the highest. Kept weights would have to be multiplied by 2^exponent for that. Returns false if that
  // peak is far from 0, or not finite.
  JITACT_DEVICE bool fold_as_it_comes(T& peak, Weights<T>& weights, T (&sums)[F::parts], T& exponent) {
    const T unit = launch_.unit;
    T own = kLowest * unit;  // without signed_peak
    weights = weights_of(own);
    Partial partial;
    for (int c = 0; c < chunks(); c++) {
      ptx::wait_for_copies(chunks() - 1 - c);
      Words loaded[vectors];
      take(c, loaded);
      T t[vectors][size];
      const T highest = highest_of(loaded, t);
      if (!(highest <= own + F::slack * unit)) {  // or NaN
        const T higher = max(own, highest);
        const Weights<T> next = weights_of(higher);
        if (c > 0) {
          partial.total(sums);
          F::move(sums, weights, signed_peak(own), next, signed_peak(higher));
          partial = Partial(sums);
          if constexpr (stored) move_kept(c, weights.exponent_to(next));
        }
        own = higher, weights = next;
      }
      JITACT_UNROLL for (int v = 0; v < vectors; v++) {
        if constexpr (pairs) Storage<S>::widen(loaded[v], t[v]);
        JITACT_UNROLL for (int i = 0; i < size; i++) t[v][i] = F::add(partial.of[i % 4], weights, signed_peak(own), t[v][i]);
        if constexpr (stored) ptx::store_shared(slot(c, v, x), Storage<S>::narrow(t[v]).w);
      }
    }
    partial.total(sums);
    T all[1 + F::parts] = {own};
    JITACT_UNROLL for (int p = 0; p < F::parts; p++) all[1 + p] = sums[p];
    combine<0>(all, Beside{*this, kLowest * launch_.unit}, walked_);
    JITACT_UNROLL for (int p = 0; p < F::parts; p++) sums[p] = all[1 + p];
    const Weights<T> of_row = weights_of(all[0]);
    exponent = weights.exponent_to(of_row), weights = of_row;
    peak = signed_peak(all[0]);
    return __ballot_sync(0xffffffffu, abs(peak) < kFar * unit) != 0;  // uniform, which nvcc does not know
  }
  // Four independent sums, which shortens the dependency chain of additions.
  struct Partial {
    T of[4][F::parts];

    JITACT_DEVICE Partial() {
      JITACT_UNROLL for (int i = 0; i < 4 * F::parts; i++) of[i / F::parts][i % F::parts] = i % F::parts == 0 ? F::start : 0;
    }
    JITACT_DEVICE explicit Partial(const T (&sums)[F::parts]) : Partial() {
      JITACT_UNROLL for (int p = 0; p < F::parts; p++) of[0][p] += sums[p];
    }
    JITACT_DEVICE void total(T (&sums)[F::parts]) {
      JITACT_UNROLL for (int p = 0; p < F::parts; p++) {
        JITACT_UNROLL for (int i = 0; p == 0 && i < 4; i++) of[i][p] -= F::start;
        sums[p] = (of[0][p] + of[1][p]) + (of[2][p] + of[3][p]);
      }
    }
  };
  JITACT_DEVICE Weights<T> weights_of(T peak) const { return weights_beside<S>(signed_peak(peak), scale_); }
  JITACT_DEVICE T signed_peak(T peak) const { return rows::signed_peak<S>(peak, scale_); }
  // Loads a chunk of x that has arrived, with neutral elements beyond the row.
  JITACT_DEVICE void take(int c, Words (&words)[vectors]) const {
    const auto load = [&](int v) { trim_slots(c, v), ptx::load_shared(slot(c, v, x), words[v].w); };
    if (at(c, vectors - 1) < place_.end) {
      JITACT_UNROLL for (int v = 0; v < vectors; v++) load(v);
    } else {
      JITACT_UNROLL for (int v = 0; v < vectors; v++) {
        JITACT_UNROLL for (uint32_t& w : words[v].w) w = launch_.outside[x];
        if (at(c, v) < place_.end) load(v);
      }
    }
  }
  // The largest of a chunk's elements; for float32, t gets the scaled elements.
  JITACT_DEVICE T highest_of(const Words (&words)[vectors], T (&t)[vectors][size]) const {
    T highest[4];
    if constexpr (pairs) {
      const uint32_t signs = scale_ < 0 ? 0x80008000u : 0;
      uint32_t of_words[2] = {words[0].w[0] ^ signs, words[0].w[1] ^ signs};
      JITACT_UNROLL for (int w = 2; w < 4 * vectors; w++)
        of_words[w % 2] = Storage<S>::max_pair(of_words[w % 2], words[w / 4].w[w % 4] ^ signs);
      Storage<S>::widen_pair(Storage<S>::max_pair(of_words[0], of_words[1]), highest[0], highest[1]);
      return max(highest[0], highest[1]);
    } else {
      JITACT_UNROLL for (int v = 0; v < vectors; v++) {
        Storage<S>::widen(words[v], t[v]);
        JITACT_UNROLL for (int i = 0; i < size; i++) {
          t[v][i] *= scale_;
          highest[i] = v == 0 ? t[v][i] : max(highest[i], t[v][i]);
        }
      }
      return max(max(highest[0], highest[1]), max(highest[2], highest[3]));
    }
  }
  // Multiplies kept values of the first chunks by 2^exponent.
  JITACT_DEVICE void move_kept(int chunks, T exponent) const {
#pragma unroll 1
    for (int v = 0; v < chunks * vectors; v++) {
      Words words;
      T t[size];
      ptx::load_shared(slot(0, v, x), words.w);
      Storage<S>::widen(words, t);
      JITACT_UNROLL for (int i = 0; i < size; i++) t[i] = times_power(t[i], exponent);
      ptx::store_shared(slot(0, v, x), Storage<S>::narrow(t).w);
    }
  }

  // The gradient, from dy, the first tensor, and y as computed by `result`. `first` if no vectors have been visited yet.
  template <bool first, typename Result>
  JITACT_DEVICE void backward(Held& words, const Result& result) {
#ifdef JITACT_ROW_INPUT
    unsigned known = 0;
    if constexpr (kHides && held)
      if (!launch_.gives_shares) known = taking_part(0);  // while dy and y are on their way
#endif
    T partial[2][kParts<T>] = {};
    each<first>(words, [&](int c, int v) {
      if (at(c, v) >= place_.end) return;  // see kBranches
      T dy[size], y[size];
      read(words, c, v, 0, dy), result(c, v, y);
      JITACT_UNROLL for (int i = 0; i < size; i++) {
        const bool is_of_row = !ragged || is_inside(at(c, v) + i);
        add_terms(partial[i % 2], formulas_.terms(dy[i], y[i], 0), is_of_row);
      }
    });
    forget(words);
    Joined()(partial[0], partial[1]);
    combine<first ? 0 : 2>(partial[0], Joined(), walked_);
    const Sums<T> sums = sums_of(partial[0]);
    if constexpr (kRowValues > 0) give_row(sums);
    const auto gradient = [&](int c, int v, T (&dx)[size]) {
      T dy[size], y[size];
      read(words, c, v, 0, dy), result(c, v, y);
      JITACT_UNROLL for (int i = 0; i < size; i++) dx[i] = scale_ * formulas_.gradient(dy[i], y[i], sums, 0);
    };
#ifdef JITACT_ROW_INPUT
    if constexpr (kHides) {
      if (held && !launch_.gives_shares) return write(gradient, [&](int) { return known; });
      if (has_to_hide(sums, launch_.gives_shares)) return write(gradient, [&](int c) { return taking_part(c); });
    }
#endif
    write(gradient);
  }

  template <int n, typename Join>
  static JITACT_DEVICE void combine_lanes(T (&t)[n], int lanes, const Join& join) {
    JITACT_UNROLL for (int step = 1; step < 32; step *= 2) {
      if (lanes < 32 && step >= lanes) break;
      T other[n];
      JITACT_UNROLL for (int i = 0; i < n; i++) other[i] = __shfl_xor_sync(0xffffffffu, t[i].v, step);
      join(t, other);
    }
  }

  // The reduction of peaks together with the parts relative to them. Threads without a row have `lowest`.
  struct Beside {
    const Rows& rows;
    T lowest;

    JITACT_DEVICE T neutral(int i) const { return i == 0 ? lowest : T(0); }
  };
  static JITACT_DEVICE void combine_lanes(T (&t)[1 + F::parts], int lanes, const Beside& beside) {
    T peak[1] = {t[0]}, part[F::parts];
    combine_lanes(peak, lanes, Highest());
    JITACT_UNROLL for (int p = 0; p < F::parts; p++) part[p] = t[1 + p];
    const Rows& rows = beside.rows;
    F::move(part, rows.weights_of(t[0]), rows.signed_peak(t[0]), rows.weights_of(peak[0]), rows.signed_peak(peak[0]));
    combine_lanes(part, lanes, Totals());
    t[0] = peak[0];
    JITACT_UNROLL for (int p = 0; p < F::parts; p++) t[1 + p] = part[p];
  }

  // Reduces t over all threads that share a row. `rows` is how many rows have used this turn before.
  template <int turn, int n, typename Join>
  JITACT_DEVICE void combine(T (&t)[n], const Join& join, int rows) const {
    combine_lanes(t, held ? launch_.group : 32, join);
    if (kStaged || (held && launch_.group <= 32)) return;
    const int parity = rows & 1;
    auto& [of_warps, of_blocks] = ptx::shared<Exchange<turn, n>>();
    const unsigned lane = threadIdx.x % 32, warps = unsigned(launch_.group) / 32;
    const unsigned warp = held ? threadIdx.x / 32 : __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // uniform, for nvcc
    if (lane == 0)
      JITACT_UNROLL for (int i = 0; i < n; i++) of_warps[parity][i][warp] = t[i].v;
    __syncthreads();
    if (held || launch_.blocks == 1 || warp == 0) {  // else the other warps wait for what blocks send
      JITACT_UNROLL for (int i = 0; i < n; i++) t[i] = of_warps[parity][i][(warp & -warps) | (lane & (warps - 1))];
      combine_lanes(t, warps, join);
    }
    if (launch_.blocks == 1) return;
    ptx::Barrier* const arrival = &ptx::shared<Arrivals<turns>>().of_turn[turn][parity];
    if (threadIdx.x < unsigned(launch_.blocks))
      JITACT_UNROLL for (int i = 0; i < n; i++) ptx::send(&of_blocks[parity][i][ptx::cluster_rank()], threadIdx.x, t[i].v, arrival);
    if (threadIdx.x == 0) ptx::expect(arrival, unsigned(sizeof(float)) * n * launch_.blocks);
    ptx::wait(arrival, rows >> 1 & 1);
    const unsigned block = lane % kClusterBlocks;
    const bool is_there = block < unsigned(launch_.blocks);
    JITACT_UNROLL for (int i = 0; i < n; i++) t[i] = is_there ? T(of_blocks[parity][i][block]) : T(join.neutral(i));
    combine_lanes(t, kClusterBlocks, join);
  }

  const Launched& launch_;
  const T scale_;
  T times_;  // the factor that scales the row's stored elements: 1 if they are scaled already
  const int step_;
  const unsigned slots_;
  Formulas<T, 1> formulas_;
  int64_t row_;    // set if it has operands or a mask
  int walked_ = 0, folded_in_two_ = 0;  // rows
  Place place_, next_;  // of the row, and of the next one
  Here staged_;
};

template <Op op, typename S, bool ragged, int held>
__global__ void __launch_bounds__(held == kMany ? 1 << kLogOfMany : kThreads, 2) walk_rows(const __grid_constant__ Launch launch) {
  Rows<op, S, ragged, held>(launch).run();
}
template <Op op, typename S, int vectors>
__global__ void __launch_bounds__(kPlaneThreads) walk_planes(const __grid_constant__ StagedLaunch<SmallPlanes> launch) {
  Rows<op, S, true, vectors * reads(op), StagedPlanes<S, reads(op), vectors>>(launch).run();
}
template <Op op, typename S, int vectors>
__global__ void __launch_bounds__(kShortRowThreads, 6) walk_short_rows(const __grid_constant__ StagedLaunch<ShortRows> launch) {
  Rows<op, S, true, vectors * reads(op), StagedRows<S, reads(op), kManyOfRow / reads(op)>>(launch).run();
}

}  // namespace jitact::rows
