// The part of a row that a GPU's thread has: where it is, how it is loaded and stored, and which of its elements are the row's.
// Rows may begin and end within vectors: elements of other rows in these are ignored. Some rows are found in shared memory, see
// staged_cuda.cuh.
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
// Whether threads that hold so many have as many of y in shared memory, beside those of dy in registers.
constexpr bool is_beside(Op op, int held) { return op == Op::backward_from_output && held == kMany; }
constexpr int kChunksOfTwo = 3, kMostChunks = 6;  // per thread, for two blocks per multiprocessor, and for one
static_assert(kMostVectors == int64_t(kMostChunks) * kChunk * kThreads * kClusterBlocks);
#ifdef JITACT_ROW_INPUT
static_assert(kHeldVectors == int64_t(kMany * kClusterBlocks) << kLogOfMany);
#endif

// Whether blocks fetch their shares of rows further on, see Rows::fetch_share, if a launch says so.
#ifdef JITACT_ROW_INPUT
template <Op op, typename S, bool ragged, int held>
constexpr bool kFetchesAhead = op == Op::forward && held == kFew && !kIsPrecise<S> &&
                               (kMasks ? kAdds != ragged : kWidens && !Fold<Single>::as_it_is);
#else
template <Op op, typename S, bool ragged, int held>
constexpr bool kFetchesAhead = op != Op::backward && held == kFew && sizeof(S) <= 4;
#endif

struct Launch {
  int threads, log_threads;  // per block
  int group, log_group;      // threads per block that share a row
  int blocks;                // per cluster, whose blocks share rows too
  int held;                  // if rows are held in registers: the most vectors per thread
  int nearly_full;           // of one tensor: all or half of these, if each thread has them, or all but the last; else 0
  int chunks;                // if not: chunks of a row per thread
  ptx::Policy policy;        // for what is read
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
  int64_t ahead;  // how many rows further on is the one that is fetched to the L2 cache; 0: none is
  Operands operands;
};
template <typename Tile>
struct StagedLaunch : Launch { Tile tile; };
struct InPlace {  // of rows that are not staged
  struct Tile {};
  static constexpr bool kInParts = false;
};

// The position of a thread's part of a row.
struct Place {
  int64_t first;   // vector in the tensors
  int begin, end;  // of the row, in elements relative to that vector
};

// A thread's part of rows: every (blocks * group)-th vector of each, from the thread's first on, in chunks. `ragged` rows may
// begin and end within vectors. If `held` is not 0, a thread has one row, with up to that many vectors in registers (and as many
// more beside them, see is_beside). Of rows that are in shared memory, as `Here` says, a thread may have several, one after the
// other, and of each adjacent elements.
template <Op op, typename S, bool ragged, int held, typename Here = InPlace>
class PartOfRows {
 public:
  using T = typename Storage<S>::T;
  static constexpr bool kStaged = !std::is_same_v<Here, InPlace>;
  using Launched = std::conditional_t<kStaged, StagedLaunch<typename Here::Tile>, Launch>;

  JITACT_DEVICE explicit PartOfRows(const Launched& launch)
      : launch_(launch), scale_(launch.scale), step_(Here::kInParts ? 1 : launch.blocks * launch.group),
        slots_(held && !kBeside ? 0 : ptx::dynamic_shared() + unsigned(sizeof(Words) * threadIdx.x)) {
    if constexpr (kOperands > 0) formulas_.take_numbers(launch.operands);
  }

 protected:
  // Whether vectors beyond the row are skipped by branches: for rows whose vectors do not fill whole warps, and because the
  // compiler does not interleave code across branches, which would take more registers.
  static constexpr bool pairs = sizeof(S) == 2, kBeside = !kStaged && is_beside(op, held);
  static constexpr bool kBranches = !held || ragged || pairs || kStaged || kBeside;
  static constexpr bool kUnscaled = kScaledByWeights<S>, kPrecise = pairs && !kUnscaled;  // of words of two elements
  static constexpr bool kNearlyFull = kBranches && held == kFew && op == Op::forward && !kStaged;  // whether `nearly_full` is used
  // Whether groups of vectors that all threads have are visited without branches. With a mask or a conversion, registers spill.
  static constexpr bool kGroups = held && ragged && op == Op::forward && !kStaged && kStagesWhole;
  static constexpr int size = Storage<S>::size, tensors = reads(op), kEach = size / 4;  // the latter: elements of a word
  static constexpr int in_registers = !held ? 0 : kBeside ? 1 : tensors;  // the first ones; others are in shared memory
  static constexpr int vectors = held ? held / in_registers : kChunk / tensors;
  static constexpr int x = tensors - 1;  // index of the tensor that is folded
  using F = Fold<T>;
  static constexpr bool kSetsAside = F::counts && std::is_same_v<T, Single> && !pairs;  // see put_aside
  static constexpr bool stored = sizeof(S) == sizeof(float) && !F::as_it_is;  // kept values replace elements
  // Adjacent vectors of a thread: where none of these begins in the row, none is asked for by itself.
  static constexpr int together = kBeside ? vectors / 4 : kBranches ? kFew / 2 : kFew;
  struct Held { Words of[held ? in_registers : 1][held ? vectors : 1]; };
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
      const int begin = staged_.take_part(row * launch_.length, skipped, launch_.length) - skipped;
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
    if constexpr (kBeside) return slots_ + unsigned(v * launch_.threads) * unsigned(sizeof(Words));
    return slots_ + unsigned((c * vectors + v) * tensors + tensor) * unsigned(sizeof(Words) * kThreads);
  }

  // Calls visit(v, full) for each vector of a chunk that begins before `end`. There are no branches between them if all do, or all
  // but the last one of `nearly_full`, or between those of a group, in 16 bits but the last one, if no row ends there; these are
  // known to be full.
  template <typename Visit>
  JITACT_DEVICE void each_of(int c, int end, const Visit& visit) const {
    const auto all_but_last = [&](int first, int most) {
      JITACT_UNROLL for (int v = first; v < first + most - 1; v++) visit(v, true);
      if (at(c, first + most - 1) < end) visit(first + most - 1, false);
    };
    if (kNearlyFull && launch_.nearly_full == vectors && end > 0) {
      all_but_last(0, vectors);
    } else if (kNearlyFull && pairs && launch_.nearly_full == vectors / 2 && end > 0) {
      all_but_last(0, vectors / 2);
    } else if (!held && at(c, vectors - 1) < end) {
      JITACT_UNROLL for (int v = 0; v < vectors; v++) visit(v, false);
    } else {
      JITACT_UNROLL for (int first = 0; first < vectors; first += together) {
        const int full = first + together - (pairs ? 1 : 0);
        if (kGroups && full * step_ * size <= launch_.length && end > 0) {
          if constexpr (pairs) all_but_last(first, together);
          else JITACT_UNROLL for (int v = first; v < full; v++) visit(v, true);
        } else if (first == 0 || at(c, first) < end) {
          JITACT_UNROLL for (int v = first; v < vectors && v < first + together; v++)
            if (!kBranches || at(c, v) < end) visit(v, false);
        }
      }
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

  // Starts the copy to shared memory of a chunk of a row, if there is a row.
  JITACT_DEVICE void copy(int c, const Place& place) const {
    const int64_t first = place.first + vectors_to(c, 0);
    each_of(c, place.end, [&](int v, bool) {
      JITACT_UNROLL for (int r = in_registers; r < tensors; r++)
        ptx::copy_async(slot(c, v, r), static_cast<const Words*>(launch_.read[r]) + first + v * step_, launch_.policy);
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
      load_each(0, vectors, [&](int v) { words.of[r][v] = ptx::load(from, launch_.policy); },
                [&](int v) {  // where there are branches, only put_aside looks at them
                  JITACT_UNROLL for (int w = 0; (!kBranches || kSetsAside) && w < 4; w++) words.of[r][v].w[w] = launch_.outside[r];
                },
                [&] { from += step_; });
    }
  }

  // Loads dy, and starts to copy y beside it in groups, for which each() waits one after the other.
  JITACT_DEVICE void load_beside(Held& words) const {
    const Words* dy = static_cast<const Words*>(launch_.read[0]) + place_.first;
    const Words* y = static_cast<const Words*>(launch_.read[1]) + place_.first;
    JITACT_UNROLL for (int first = 0; first < vectors; first += together) {
      load_each(first, first + together,
                [&](int v) { ptx::copy_async(slot(0, v, 1), y, launch_.policy), words.of[0][v] = ptx::load(dy, launch_.policy); },
                [](int) {}, [&] { dy += step_, y += step_; });
      ptx::commit_copies();
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
          if (at(c, first + v) < place_.end) loaded[v] = mask.load(vectors_to(c, first + v), launch_.policy);
        }
        JITACT_UNROLL for (int v = 0; v < at_once; v++) bits |= mask.words(loaded[v]).bits() << (first + v) * size;
      }
      return bits;
    };
    return aligned.is_aligned() ? by(aligned) : by(AnyMask<size>(aligned, place_.begin, place_.end));
  }
  // Where x takes half the bytes of results, a thread of a warp that is all within the row has half of two vectors in place of
  // one, so that the warp's stores are of adjacent bytes: the distance, in halves, from vector v to the h-th that it has.
  JITACT_DEVICE int half_at(int v, int h) const {
    const int lane = int(threadIdx.x) & 31, first = at(0, v) - lane * size;
    const bool all = first >= place_.begin && first + 32 * size <= place_.end;
    return all ? 32 * h - lane : h;
  }
  JITACT_DEVICE SideWords<Input, size> load_input(const SideWords<Input, size>* from, int v) const {
    if constexpr (kPrecise) {
      const auto half = [&](int h) {
        return ptx::load(reinterpret_cast<const SideWords<Input, size / 2>*>(from) + half_at(v, h), launch_.policy);
      };
      const auto first = half(0), second = half(1);
      return {{first.w[0], first.w[1], second.w[0], second.w[1]}};
    } else {
      return ptx::load(from, launch_.policy);
    }
  }
  JITACT_DEVICE void store_result(Vector* to, const Vector& vector, int v) const {
    if constexpr (kPrecise) {
      struct Halves { Words of[2]; };
      const auto halves = bit_cast<Halves>(vector);
      JITACT_UNROLL for (int h = 0; h < 2; h++) reinterpret_cast<Words*>(to)[half_at(v, h)] = halves.of[h];
    } else {
      *to = vector;
    }
  }
  // Loads x with the mask applied. All loads of x are issued before those of masks.
  JITACT_DEVICE void load_masked(Held& words) const {
    const auto* from = static_cast<const SideWords<Input, size>*>(launch_.read[0]) + place_.first;
    SideWords<Input, size> x[vectors];
    load_each(0, vectors, [&](int v) { x[v] = load_input(from, v); }, [&](int v) { x[v] = {}; },
              [&] { from += step_; });
    if constexpr (!kMasks) {
      take_input(words, x, Unmasked());
    } else {
      const AlignedMask<size> mask = mask_of_row();
      if (mask.is_aligned()) take_input(words, x, mask);
      else take_input(words, x, AnyMask<size>(mask, place_.begin, place_.end));
    }
  }
  // The same of staged rows.
  JITACT_DEVICE void load_staged(Held& words) const {
    SideWords<Input, size> x[vectors];
    JITACT_UNROLL for (int v = 0; v < vectors; v++) {
      x[v] = {};
      if (at(0, v) < place_.end) x[v] = bit_cast<SideWords<Input, size>>(staged_.get(0, at(0, v), launch_.outside[0]));
    }
    take_input(words, x, AnyMask<size>(mask_of_row(), place_.begin, place_.end));
  }
  // Converts vectors of x to words, with their masks.
  template <typename Mask>
  JITACT_DEVICE void take_input(Held& words, const SideWords<Input, size> (&x)[vectors], const Mask& mask) const {
    constexpr int at_once = Mask::kAtOnce;
    JITACT_UNROLL for (int first = 0; first < vectors; first += at_once) {
      typename Mask::Loaded masks[at_once];
      if constexpr (kMasks)
        load_each(first, ::min(first + at_once, +vectors),
                  [&](int v) { masks[v - first] = mask.load(vectors_to(0, v), launch_.policy); },
                  [&](int v) { masks[v - first] = mask.repeated(launch_.outside[1]); }, [] {});
      JITACT_UNROLL for (int v = first; v < first + at_once && v < vectors; v++) {
        Words& made = words.of[0][v];
        if (!kMasks && at(0, v) >= place_.end) {
          JITACT_UNROLL for (uint32_t& w : made.w) w = launch_.outside[0];
          continue;
        }
        if constexpr (!kPrecise && (kAdds || kConverts)) {
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
    JITACT_UNROLL for (int r = 0; r < in_registers; r++)
      JITACT_UNROLL for (int v = 0; v < vectors; v++)
        JITACT_UNROLL for (int w = 0; w < 4; w++) ptx::forget(words.of[r][v].w[w]);
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
    JITACT_UNROLL for (int r = in_registers; r < tensors; r++) {
      Words words;
      ptx::load_shared(slot(c, v, r), words.w);
      trim(words, c, v, r, false);
      ptx::store_shared(slot(c, v, r), words.w);
    }
  }
  JITACT_DEVICE Words words_of(const Held& words, int c, int v, int tensor) const {
    Words loaded;
    if (tensor < in_registers) loaded = words.of[tensor][v];
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
        if constexpr (first) {
          if (kBeside && v % together == 0) ptx::wait_for_copies((vectors - 1 - v) / together);
          if constexpr (in_registers < tensors) trim_slots(c, v);
          JITACT_UNROLL for (int r = 0; r < in_registers; r++) trim(words.of[r][v], c, v, r, full);
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
        if constexpr (kStaged) staged_.put(bit_cast<typename Here::Vector>(vector), at(c, v), left(c, v, full));
#ifdef JITACT_ROW_INPUT
        else if (!is_cut(c, v, full)) store_result(to + vectors_to(c, v), vector, v);
#else
        else if (!is_cut(c, v, full)) to[vectors_to(c, v)] = vector;
#endif
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

  // Elements of the folded tensor, scaled unless kUnscaled, and minus `base`. If neither kPlaced nor kPrecise, base is already
  // subtracted in registers or shared memory.
  JITACT_DEVICE void elements(const Held& words, int c, int v, T base, T (&t)[size]) const {
    read(words, c, v, x, t), finish(base, t);
  }
  JITACT_DEVICE void finish(T base, T (&t)[size]) const {
    JITACT_UNROLL for (int i = 0; i < size; i++) {
      if (kPrecise) t[i] = fma(t[i], times_, -base);
      if (!held && !pairs) t[i] *= times_;
      if (kPlaced && !kPrecise) t[i] -= base;
    }
  }
  JITACT_DEVICE void keep(Held& words, int c, int v, const T (&t)[size]) const {
    const Words kept = Storage<S>::narrow(t);
    if constexpr (held) words.of[x][v] = kept;
    else ptx::store_shared(slot(c, v, x), kept.w);
  }

  const Launched& launch_;
  const T scale_;
  T times_;  // the factor that scales the row's stored elements: 1 if they are scaled already
  const int step_;
  const unsigned slots_;
  Formulas<T, 1> formulas_;
  int64_t row_;  // set if it has operands or a mask
  Place place_, next_;  // of the row, and of the next one
  Here staged_;
};

}  // namespace jitact::rows
