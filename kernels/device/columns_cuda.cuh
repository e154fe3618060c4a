// The GPU's loop over strided rows, which are adjacent in memory. A block, or a cluster of blocks that divide the length, has a
// tile of them. Each thread goes along the one row, or two rows, of a 4-byte word, and holds its part in registers. Where an odd
// number of 16-bit rows are adjacent, kernels of their own have tiles of an odd width, see TilePlace. Longer rows are in strips,
// see long_columns_cuda.cuh.
#pragma once

#include "row_sums_cuda.cuh"
#include "tiling_cuda.cuh"

namespace jitact::rows {

constexpr int kSummed = 8;  // words per plain sum, see LongSums

struct Columns {
  Tiling tiling;
  int length;
  unsigned inner;             // adjacent rows
  unsigned words, all_words;  // in which these are, of which the last may have a single row; and those of all `outer`
  int planes;                 // see planes_of
  bool together;              // whether warps write together, as neighbours' words share sectors
  unsigned apart, tiles;      // words from one tile to the next; or the tiles of an odd plane of which they are parts
  Divisor by_plane;           // divides by the words of a plane, or by those tiles
  int64_t rows;               // of all `outer`
  float scale, unit;  // the latter: see unit_of
  const void* read[2];
  uint32_t outside[2];  // for each of them, a word of neutral elements, which add nothing to a row
  void* written;
  Operands operands;
};

// The elements of a word: one for each of its rows.
template <typename S> constexpr int kEach = 4 / int(sizeof(S));

// Where a thread of a tile begins: the word, at element `at` of its rows, and which rows these are. A tile has whole planes, or
// words that follow one another in one or several.
//
// If `odd`, an odd number of 16-bit rows are adjacent, so that only every second element of a row begins a word: there the words of
// a plane have its rows 0 and 1, 2 and 3, and so on. At the others they begin one row `early`: -1 and 0, 1 and 2, and so on. The
// elements of a thread are an even number apart, so that all of its words are early or none is. Where threads exchange values, a
// row is where it is in words that are not early: the first row of one that is early is the second row of the thread before it. So
// a tile that is a part of a plane has one row less than its words have elements. At an edge the other half of a word is read too:
// a neighbour's, or the rest of the 4 bytes in which memory ends.
template <typename S, bool odd>
struct TilePlace {
  static constexpr int each = kEach<S>;
  int64_t start;
  int64_t row[each];
  bool has[each];  // whether the tile, and the tensor, have the row
  bool early = false;

  TilePlace() = default;
  // The word is the plane's `own`th from its row `begin` on; the tile has rows up to `end`. In `single` ones, none is early.
  JITACT_DEVICE TilePlace(const Columns& columns, unsigned plane, unsigned own, unsigned begin, unsigned end, int64_t at,
                          bool single = false) {
    const int64_t element = int64_t(plane) * columns.length + at, first = element * columns.inner + begin;
    if constexpr (odd) early = !single && first % 2 != 0, start = first / 2 + own;
    else start = element * columns.words + own;
    JITACT_UNROLL for (int e = 0; e < each; e++) {
      const unsigned column = begin + unsigned(each) * own + unsigned(e - early);  // huge if it is left of the tensor
      row[e] = int64_t(plane) * columns.inner + column;
      has[e] = begin <= column && column < end;
    }
  }
  JITACT_DEVICE bool has_any() const { return has[0] || has[each - 1]; }

  // Where a word is to be written: if the thread has the second row alone, from there on.
  JITACT_DEVICE char* in(void* tensor, int64_t word) const {
    return static_cast<char*>(tensor) + word * 4 + (odd && !has[0] ? 2 : 0);
  }
  JITACT_DEVICE void write(char* to, uint32_t word) const {
    if (!odd || (has[0] && has[each - 1])) *reinterpret_cast<uint32_t*>(to) = word;
    else *reinterpret_cast<uint16_t*>(to) = uint16_t(word >> (has[0] ? 0 : 16));
  }
};

template <typename S, typename T>
JITACT_DEVICE void widen_word(uint32_t word, T (&t)[kEach<S>]) {
  if constexpr (kEach<S> == 2) Storage<S>::widen_pair(word, t[0], t[1]);
  else t[0] = __uint_as_float(word);
}
template <typename S, typename T>
JITACT_DEVICE uint32_t narrow_word(const T (&t)[kEach<S>]) {
  if constexpr (kEach<S> == 2) return Storage<S>::narrow_pair(t[0], t[1]);
  else return __float_as_uint(t[0].v);
}

// A thread's sums, with plain sums of kSummed words added by Adding, as plain sums of many words would be too inaccurate: in
// tiles for float32, whose first part is exact for thousands of words, only the second part.
template <typename S, bool in_tiles>
struct LongSums {
  using T = typename Storage<S>::T;
  using F = Fold<T>;
  static constexpr int each = kEach<S>, parts = Adding<T>::parts;
  static constexpr int begin = in_tiles ? (each == 2 ? F::parts : 1) : 0, end = in_tiles && each == 1 ? 2 : F::parts;
  T of[each][F::parts][parts] = {};

  JITACT_DEVICE explicit LongSums(T (&sums)[each][F::parts]) {
    JITACT_UNROLL for (int e = 0; e < each; e++)
      JITACT_UNROLL for (int p = 0; p < F::parts; p++) sums[e][p] = p == 0 ? F::start : 0;
  }
  JITACT_DEVICE void take(T (&sums)[each][F::parts]) {
    JITACT_UNROLL for (int e = 0; e < each; e++)
      JITACT_UNROLL for (int p = begin; p < end; p++) {
        const T start = p == 0 ? F::start : 0;
        Adding<T>::add(of[e][p], sums[e][p] - start);
        sums[e][p] = start;
      }
  }
  // Rescales one row's sums, after take(), from one peak to a higher one.
  JITACT_DEVICE void move(int e, const Weights<T>& from, T peak, const Weights<T>& to, T higher) {
    T moved[F::parts];
    JITACT_UNROLL for (int p = 0; p < F::parts; p++) moved[p] = Adding<T>::total(of[e][p]);
    F::move(moved, from, peak, to, higher);
    JITACT_UNROLL for (int p = 0; p < F::parts; p++)
      JITACT_UNROLL for (int r = 0; r < parts; r++) of[e][p][r] = r == 0 ? moved[p] : T(0);
  }
  // The complete sums, without the start.
  JITACT_DEVICE void total(T (&sums)[each][F::parts]) const {
    JITACT_UNROLL for (int e = 0; e < each; e++) {
      sums[e][0] -= F::start;
      JITACT_UNROLL for (int p = begin; p < end; p++) sums[e][p] += Adding<T>::total(of[e][p]);
    }
  }
};

// The shared memory for exchanges between threads and blocks: one per `turn`, of `values` values for each word.
template <int turn, int values>
struct TileExchange {
  float of_threads[values][kTileThreads], of_blocks[kClusterBlocks][values << kLogLine];
};
struct TileArrivals {
  ptx::Barrier of_turn[3];
};

// What the tiles of a kernel may have: parts of planes alone, or whole planes too. few: these, if threads have few_words at most,
// so that there can be more of them.
enum class Planes { parts, whole, few };

// n / d for up to 2^11 of both, in fewer instructions.
JITACT_DEVICE int small_quotient(int n, int d) { return int((float(n) + 0.5f) * ptx::reciprocal(float(d))); }

// odd: see TilePlace. exact: the length, if the code is for this one alone; then a thread has all elements of its rows. If `odd`
// too, a tile is a single warp's. Where a thread's two rows lie in two words there, it gets its second half from the next thread,
// and gives away its own.
template <Op op, typename S, bool odd, Planes planes, int exact = 0>
class Tile {
 public:
  using T = typename Storage<S>::T;

  JITACT_DEVICE explicit Tile(const Columns& columns)
      : columns_(columns), scale_(columns.scale), wide_(1 << columns.tiling.log_wide), slot_(int(threadIdx.x)) {
    const int log_wide = columns.tiling.log_wide, log_groups = exact > 0 ? 0 : columns.tiling.log_threads - log_wide;
    const int first = rank() * columns.tiling.steps, last = ::min(columns.length, first + columns.tiling.steps);
    const unsigned tile = few ? blockIdx.x : ptx::cluster_id();
    int group = exact > 0 ? 0 : slot_ >> log_wide;
    unsigned plane, own = exact > 0 && !single ? threadIdx.x : unsigned(slot_ & (wide_ - 1)), begin = 0, end = columns.inner;
    if constexpr (single) {
      const unsigned of_warp = (tile << (columns.tiling.log_threads - 5)) + threadIdx.x / 32, width = odd_width(log_wide);
      plane = columns.by_plane.divide_small(of_warp), begin = (of_warp - plane * columns.tiles) * width;
      end = plane * columns.words < columns.all_words ? ::min(begin + width, end) : 0;
      splits_ = ((plane & unsigned(columns.length)) ^ begin) & 1, loads_ = begin + 2 * own <= end && end > 0;
    } else if (has_planes()) {
      // The threads of a plane are side by side, and read memory side by side; those that are left have no rows.
      const int words = int(columns.words), of_plane = words << log_groups;
      const int whole = ::min(small_quotient(slot_, of_plane), columns.planes), of_own = slot_ - whole * of_plane;
      const int own_words = whole < columns.planes ? words : ::max(wide_ - whole * words, 1);
      group = small_quotient(of_own, own_words);
      const int word = of_own - group * own_words;
      slot_ = group * wide_ + whole * words + word;
      plane = tile * unsigned(columns.planes) + unsigned(whole), own = unsigned(word);
      if (whole == columns.planes || plane * columns.words >= columns.all_words) end = 0;
    } else if (odd) {
      const unsigned width = odd_width(log_wide);
      plane = columns.by_plane.divide_small(tile), begin = (tile - plane * columns.tiles) * width, end = ::min(begin + width, end);
      if (log_wide < 5) group = (group & ~3) | (group & 1) << 1 | (group >> 1 & 1);  // a warp's are all early, or none is
    } else {
      unsigned of_all = tile * columns.apart + own;
      if (of_all >= columns.all_words) end = 0;
      if (exact > 0) of_all = ::min(of_all, columns.all_words - 1);  // what it loads is not written
      plane = few ? columns.by_plane.divide_small(of_all) : of_all / columns.words, own = of_all - plane * columns.words;
    }
    const int at = first + group, left = last - at + (1 << log_groups) - 1;
    place_ = TilePlace<S, odd>(columns, plane, own, begin, end, at, single);
    count_ = place_.has_any() ? left >> log_groups : 0;
    apart_ = odd ? int64_t(columns.inner) << (single ? 0 : log_groups - 1) : int64_t(columns.words) << log_groups;
    visited_ = (columns.tiling.steps + (1 << log_groups) - 1) >> log_groups;
    if constexpr (kOperands > 0) formulas_.take_numbers(columns.operands);
    if constexpr (kRowValues > 0) {
      is_first_ = group == 0 && rank() == 0;
      JITACT_UNROLL for (int e = 0; e < each; e++)
        if (place_.has[e]) formulas_.take_row(columns.operands, e, place_.row[e]);
    }
  }

  JITACT_DEVICE void run() {
    if (blocks() > 1) {
      for (int i = 0; threadIdx.x == 0 && i < 3; i++) ptx::start(&ptx::shared<TileArrivals>().of_turn[i]);
      ptx::cluster_started();
    }
    Held words;
    if constexpr (single) load_single(words);
    else load(words);
    // Else nvcc keeps the words' addresses in registers until they are written. For log_softmax, it would then spill them.
    if constexpr (op == Op::backward_from_output || !Fold<T>::as_it_is) ptx::forget(place_.start), ptx::forget(apart_);
    if (blocks() > 1) ptx::cluster_wait();  // until all blocks are there
    if constexpr (op == Op::backward_from_output)
      backward<0>(words, [&](int i, T (&y)[each]) { read(words, i, 1, y); });
    else fold(words);
  }

 private:
  static constexpr int each = kEach<S>, tensors = reads(op);
  static constexpr bool single = exact > 0 && odd, few = planes == Planes::few;
  static constexpr int most = exact > 0 ? exact : (few ? few_words(sizeof(S)) : kWords) / tensors;
  static constexpr int batch = few ? 4 : most;  // words loaded without a branch
  static constexpr int at_once = exact > 0 ? exact : few && each == 2 ? 2 : 4;  // words visited without a branch
  struct Held { uint32_t of[tensors][most]; };

  JITACT_DEVICE static int rank() { return few ? 0 : ptx::cluster_rank(); }
  JITACT_DEVICE int blocks() const { return few ? 1 : columns_.tiling.blocks; }  // per cluster
  JITACT_DEVICE bool has_planes() const { return planes != Planes::parts && exact == 0 && columns_.planes > 0; }
  // For `single`: whether the thread's two elements i are in two words, and the words from its first of them to that of the next.
  JITACT_DEVICE bool are_split(int i) const { return splits_ != (i % 2 != 0); }
  // Two bits, for even and odd elements, of what is true of those in one word and of those in two.
  JITACT_DEVICE uint32_t by_element(bool in_one, bool in_two) const {
    uint32_t bits = splits_ ? unsigned(in_two) | unsigned(in_one) << 1 : unsigned(in_one) | unsigned(in_two) << 1;
    ptx::forget(bits);  // else nvcc computes them again for each element
    return bits;
  }
  JITACT_DEVICE int64_t words_after(int i) const { return int64_t(columns_.inner >> 1) + are_split(i); }
  JITACT_DEVICE const uint32_t* from(int r) const { return static_cast<const uint32_t*>(columns_.read[r]) + place_.start; }
  // Loads the thread's words into registers. The cache fetches what the next tiles will load too.
  JITACT_DEVICE void load(Held& words) const {
    JITACT_UNROLL for (int r = 0; r < tensors; r++) {
      const uint32_t* word = from(r);
      if (exact > 0 || (!few && most <= count_)) {
        JITACT_UNROLL for (int i = 0; i < most; i++, word += apart_) words.of[r][i] = ptx::load_with_neighbours(word);
      } else {
        JITACT_UNROLL for (int first = 0; first < most; first += batch) {
          if ((few || Fold<T>::as_it_is) && first >= visited_) break;  // for log_softmax in all, as nvcc spills less then
          JITACT_UNROLL for (int i = first; i < first + batch; i++, word += apart_) {
            words.of[r][i] = columns_.outside[r];
            if (i < count_) words.of[r][i] = ptx::load_with_neighbours(word);
          }
        }
      }
    }
  }
  JITACT_DEVICE void load_single(Held& words) const {
    const uint32_t loaded = by_element(place_.has[0], loads_);
    JITACT_UNROLL for (int r = 0; r < tensors; r++) {
      const uint32_t* word = from(r);
      JITACT_UNROLL for (int i = 0; i < most; i++) {
        words.of[r][i] = columns_.outside[r];
        if (loaded & 1u << i % 2) words.of[r][i] = ptx::load_with_neighbours(word);
        word += words_after(i);
      }
    }
    JITACT_UNROLL for (int r = 0; r < tensors; r++)
      JITACT_UNROLL for (int i = 0; i < most; i++) {
        const uint32_t next = __shfl_down_sync(0xffffffffu, words.of[r][i], 1);
        words.of[r][i] = __byte_perm(words.of[r][i], next, are_split(i) ? 0x5432 : 0x3210);
      }
  }
  // Keeps the compiler from holding values converted from words in registers, which takes more of them than the words do.
  static JITACT_DEVICE void forget(Held& words) {
    JITACT_UNROLL for (int r = 0; r < tensors; r++)
      JITACT_UNROLL for (int i = 0; i < most; i++) ptx::forget(words.of[r][i]);
  }

  static JITACT_DEVICE void read(const Held& words, int i, int tensor, T (&t)[each]) {
    widen_word<S>(words.of[tensor][i], t);
  }

  // Visits the thread's words, including some beyond the row's end, and calls `after` every kSummed words. The branches keep
  // the compiler from interleaving code, which would take more registers.
  template <typename Visit, typename After>
  JITACT_DEVICE void each_word(Held& words, const Visit& visit, const After& after) {
    JITACT_UNROLL for (int i = 0; i < most; i += at_once)
      if (exact > 0 || i < visited_) {
        JITACT_UNROLL for (int j = 0; j < at_once; j++) visit(i + j);
        if ((i + at_once) % kSummed == 0) after();
      }
  }
  template <typename Visit>
  JITACT_DEVICE void each_word(Held& words, const Visit& visit) {
    each_word(words, visit, [] {});
  }
  JITACT_DEVICE bool is_there(int i) const { return exact > 0 || i < count_; }
  template <typename Result>
  JITACT_DEVICE void write(Held& words, const Result& result) {
    if (columns_.together) __syncthreads();
    if constexpr (single) return write_single(words, result);
    char* to = place_.in(columns_.written, place_.start);
    each_word(words, [&](int i) {
      T t[each];
      result(i, t);
      if (exact > 0 ? place_.has_any() : is_there(i)) place_.write(to, narrow_word<S>(t));
      to += 4 * apart_;
    });
  }

  template <typename Result>
  JITACT_DEVICE void write_single(Held& words, const Result& result) {
    uint32_t* to = static_cast<uint32_t*>(columns_.written) + place_.start;
    const bool low = place_.has[0], high = place_.has[each - 1], before = loads_ && threadIdx.x % 32 > 0;
    const uint32_t whole = by_element(low && high, before && low), half = by_element(low != high, before != low);
    const uint32_t upper = by_element(!low, !before);
    each_word(words, [&](int i) {
      T t[each];
      result(i, t);
      const uint32_t own = narrow_word<S>(t), last = __shfl_up_sync(0xffffffffu, own, 1);
      const uint32_t word = __byte_perm(last, own, are_split(i) ? 0x5432 : 0x7654);
      const uint32_t is_upper = upper >> i % 2 & 1;
      if (whole & 1u << i % 2) *to = word;
      if (half & 1u << i % 2) reinterpret_cast<uint16_t*>(to)[is_upper] = uint16_t(word >> 16 * is_upper);
      to += words_after(i);
    });
  }

  // Folds rows of x, the last tensor, and then computes results or gradients.
  JITACT_DEVICE void fold(Held& words) {
    using F = Fold<T>;
    constexpr int x = tensors - 1;
    constexpr bool pairs = each == 2, stored = !pairs && !F::as_it_is;  // whether kept values replace x
    T base = 0, invalid[each], peak[each][1], sums[each][F::parts];
    F folded[each];
    const auto elements = [&](int i, T (&t)[each]) {
      read(words, i, x, t);
      if constexpr (!pairs && kPlaced) t[0] -= base;
    };

    if constexpr (pairs) {
      const uint32_t signs = scale_ < 0 ? 0x80008000u : 0;
      uint32_t highest = columns_.outside[x] ^ signs;
      each_word(words, [&](int i) { highest = Storage<S>::max_pair(highest, words.of[x][i] ^ signs); });
      Storage<S>::widen_pair(highest, peak[0][0], peak[1][0]);
    } else {
      peak[0][0] = -INFINITY;
      each_word(words, [&](int i) {
        T t[each];
        elements(i, t);
        t[0] *= scale_, words.of[x][i] = narrow_word<S>(t);
        peak[0][0] = max(peak[0][0], t[0]);
      });
    }
    forget(words);
    combine<0>(peak, Highest());
    JITACT_UNROLL for (int e = 0; e < each; e++)
      invalid[e] = peak[e][0] - peak[e][0], peak[e][0] = signed_peak<S>(peak[e][0], scale_);
    if (!pairs && is_far(peak[0][0])) {
      base = peak[0][0], peak[0][0] = 0;
      if constexpr (!kPlaced)
        each_word(words, [&](int i) { words.of[x][i] = __float_as_uint(__uint_as_float(words.of[x][i]) - base.v); });
    }
    const Weights<T> first = weights_beside<S>(peak[0][0], scale_), last = weights_beside<S>(peak[each - 1][0], scale_);
    const auto weights = [&](int e) -> const Weights<T>& { return e == 0 ? first : last; };
    LongSums<S, true> long_sums(sums);
    if constexpr (pairs && F::counts) {
      PeaksApart<S> apart(peak[0][0], peak[each - 1][0], columns_.outside[x]);
      each_word(words, [&](int i) {
        T t[each];
        widen_word<S>(apart.without(words.of[x][i]), t);
        JITACT_UNROLL for (int e = 0; e < each; e++) F::template add<false>(sums[e], weights(e), peak[e][0], t[e]);
      });
      sums[0][F::parts - 1] = apart.low(), sums[each - 1][F::parts - 1] = apart.high();
    } else {
      each_word(words, [&](int i) {
        T t[each];
        elements(i, t);
        JITACT_UNROLL for (int e = 0; e < each; e++) t[e] = F::add(sums[e], weights(e), peak[e][0], t[e]);
        if constexpr (stored) words.of[x][i] = narrow_word<S>(t);
      }, [&] { long_sums.take(sums); });
    }
    forget(words);
    long_sums.total(sums);
    combine<1>(sums, Totals());
    JITACT_UNROLL for (int e = 0; e < each; e++) folded[e] = F(peak[e][0], invalid[e], weights(e), sums[e], pairs ? scale_ : T(1));
    if constexpr (kPlaced) folded[0].move(base), base = 0;

    const auto result = [&](int i, T (&y)[each]) {
      elements(i, y);
      JITACT_UNROLL for (int e = 0; e < each; e++) {
        if (pairs && F::as_it_is) y[e] *= scale_;
        y[e] = formulas_.result(stored ? y[e] : F::kept(weights(e), y[e]), folded[e], e);
      }
    };
    if constexpr (op == Op::forward) write(words, result);
    else backward<2>(words, result);
  }

  // The gradient, from dy, the first tensor, and y as computed by `result`.
  template <int turn, typename Result>
  JITACT_DEVICE void backward(Held& words, const Result& result) {
    T parts[each][kParts<T>] = {};
    each_word(words, [&](int i) {
      T dy[each], y[each];
      read(words, i, 0, dy), result(i, y);
      JITACT_UNROLL for (int e = 0; e < each; e++) add_terms(parts[e], formulas_.terms(dy[e], y[e], e), is_there(i));
    });
    forget(words);
    combine<turn>(parts, Joined());
    if constexpr (kRowValues > 0) {
      JITACT_UNROLL for (int e = 0; e < each; e++)
        if (is_first_ && place_.has[e])
          formulas_.give_row(columns_.operands, e, place_.row[e], columns_.rows, sums_of(parts[e]));
    }
    write(words, [&](int i, T (&dx)[each]) {
      T dy[each], y[each];
      read(words, i, 0, dy), result(i, y);
      JITACT_UNROLL for (int e = 0; e < each; e++) dx[e] = scale_ * formulas_.gradient(dy[e], y[e], sums_of(parts[e]), e);
    });
  }

  // Reduces t over all threads of the rows by f, which is for one row. Few threads do this, while the others wait.
  template <int turn, int n, typename F>
  JITACT_DEVICE void combine(T (&t)[each][n], const F& f) const {
    if constexpr (exact > 0) return;
    constexpr int values = each * n;
    const auto all = [&](const auto& visit) {
      JITACT_UNROLL for (int v = 0; v < values; v++) visit(v, t[v / n][v % n].v);
    };
    // The same with the value and the slot that these would be if no thread were early.
    const auto all_in_place = [&](const auto& visit) {
      all([&](int v, float& own) {
        if (!odd || !place_.early) visit(v, slot_, own);
        else if (v >= n) visit(v - n, slot_, own);
        else if (place_.has[0]) visit(v + n, slot_ - 1, own);
      });
    };
    const auto join = [&](const auto& other_value) {
      T others[each][n];
      JITACT_UNROLL for (int v = 0; v < values; v++) others[v / n][v % n] = other_value(v);
      JITACT_UNROLL for (int e = 0; e < each; e++) f(t[e], others[e]);
    };
    const bool in_pairs = wide_ < 32 && !has_planes();  // two lanes of a warp have the same rows
    static_assert(kLogFewest == 4);
    if (in_pairs) join([&](int v) { return __shfl_xor_sync(0xffffffffu, t[v / n][v % n].v, 16); });
    const int threads = 1 << columns_.tiling.log_threads, apart = in_pairs ? 32 : wide_;
    if (threads == apart && blocks() == 1) return;
    auto& [of_threads, of_blocks] = ptx::shared<TileExchange<turn, values>>();
    const int thread = int(threadIdx.x), word = thread & (wide_ - 1);
    all_in_place([&](int v, int slot, float& own) { of_threads[v][slot] = own; });
    __syncthreads();
    if (thread < apart) {
      if (planes != Planes::parts) all([&](int v, float& own) { own = of_threads[v][thread]; });
#pragma unroll 4
      for (int other = thread + apart; other < threads; other += apart) join([&](int v) { return of_threads[v][other]; });
      if (blocks() > 1) {
        ptx::Barrier* const arrival = &ptx::shared<TileArrivals>().of_turn[turn];
        for (int block = 0; thread < wide_ && block < blocks(); block++)
          all([&](int v, float& own) {
            ptx::send(&of_blocks[rank()][v * wide_ + word], unsigned(block), own, arrival);
          });
        if (thread == 0) ptx::expect(arrival, 4u * values * unsigned(wide_ * blocks()));
        ptx::wait(arrival, 0);
        all([&](int v, float& own) { own = of_blocks[0][v * wide_ + word]; });
#pragma unroll 4
        for (int block = 1; block < blocks(); block++) join([&](int v) { return of_blocks[block][v * wide_ + word]; });
      }
      all([&](int v, float& own) { of_threads[v][thread] = own; });
    }
    __syncthreads();
    all_in_place([&](int v, int slot, float& own) { own = of_threads[v][slot & (apart - 1)]; });
  }

  const Columns& columns_;
  const T scale_;
  const int wide_;          // the tile's width in words
  int slot_;                // where the thread's values are exchanged: `wide_` times its group, and its word in the tile
  int count_, visited_;     // the number of the thread's words, and the most of any thread
  bool splits_, loads_;     // for `single`: see are_split, of element 0; whether it loads words that begin before its first row
  Formulas<T, each> formulas_;
  bool is_first_;           // whether this thread writes the operands' gradients
  TilePlace<S, odd> place_;  // of the thread's first word
  int64_t apart_;            // words between its own
};

template <Op op, typename S, bool odd, Planes planes>
__global__ void __launch_bounds__(planes < Planes::few ? kTileThreads : 1 << kLogFewThreads,
                                  planes < Planes::few ? 2 : sizeof(S) == 4 ? 5 : 6)
walk_columns(const __grid_constant__ Columns columns) {
  ptx::wait_for_last();
  Tile<op, S, odd, planes>(columns).run();
}

// Runs the tile that is for the length of the rows, from n to `last` elements.
template <Op op, typename S, bool odd, int n, int last>
JITACT_DEVICE void walk_exactly(const Columns& columns) {
  if (n < last && columns.length != n) walk_exactly<op, S, odd, n < last ? n + 1 : n, last>(columns);
  else Tile<op, S, odd, Planes::few, n>(columns).run();
}
// The shortest rows have a kernel with fewer registers, so that there are more threads.
template <Op op, typename S, bool odd>
__global__ void __launch_bounds__(1 << kLogFewThreads, 8) walk_shortest_columns(const __grid_constant__ Columns columns) {
  ptx::wait_for_last();
  walk_exactly<op, S, odd, 2, kShortest>(columns);
}
template <Op op, typename S, bool odd>
__global__ void __launch_bounds__(1 << kLogFewThreads, odd && op != Op::forward ? 5 : 6)
walk_short_columns(const __grid_constant__ Columns columns) {
  ptx::wait_for_last();
  walk_exactly<op, S, odd, kShortest + 1, longest_exact(op)>(columns);
}

template <Op op, typename S>
Columns columns_of(const Call& call) {
  Columns columns{};
  columns.inner = unsigned(call.inner), columns.rows = call.outer * call.inner;
  columns.words = unsigned(words_across(call.inner, sizeof(S))), columns.all_words = unsigned(call.outer) * columns.words;
  columns.tiling = tiling_of(call, sizeof(S), reads(op));
  const int log_wide = columns.tiling.log_wide;
  columns.planes = columns.tiling.exact ? 0 : planes_of(call, sizeof(S), log_wide);
  columns.together = share_sectors(call.inner, sizeof(S)) && (columns.tiling.exact || columns.tiling.log_threads == log_wide);
  columns.apart = columns.planes > 0 ? columns.planes * columns.words : 1u << log_wide;
  if (is_odd(call.inner, sizeof(S)) && columns.planes == 0) columns.tiles = tiles_across(columns.inner, log_wide);
  columns.by_plane = Divisor(columns.tiles > 0 ? columns.tiles : columns.words);
  columns.length = int(call.length), columns.scale = call.scale, columns.written = call.written;
  columns.unit = unit_of<S>(call.scale);
  for (int r = 0; r < reads(op); r++) columns.read[r] = call.read[r];
  if constexpr (kOperands > 0) columns.operands = operands_of(call);
  if (op != Op::backward_from_output) columns.outside[reads(op) - 1] = lowest<S>(call.scale);
  return columns;
}

template <auto kernel>
cudaError_t start(const Columns& columns, cudaStream_t stream) {
  const Tiling& tiling = columns.tiling;
  if (tiling.blocks > 8) {
    const auto allowed = cudaFuncAttributeNonPortableClusterSizeAllowed;
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, allowed, 1)) return error;
  }
  Clusters shape(tiling.blocks, 1 << tiling.log_threads, 0, stream);
  const int64_t tiles = int64_t(columns.all_words / columns.words) * columns.tiles;
  const int64_t of_block = tiling.exact ? int64_t(1) << (tiling.log_threads - tiling.log_wide) : 1;
  shape.count(tiles > 0 ? (tiles - 1) / of_block + 1 : (columns.all_words - 1) / columns.apart + 1);
  return shape.start<kernel>(columns);
}
template <Op op, typename S, bool odd>
cudaError_t start_tiles(const Columns& columns, cudaStream_t stream) {
  const Tiling& tiling = columns.tiling;
  if constexpr (op == Op::forward)
    if (tiling.blocks == 1 && tiling.log_threads <= kLogFewThreads &&
        tiling.steps <= few_words(sizeof(S)) << (tiling.log_threads - tiling.log_wide))
      return start<walk_columns<op, S, odd, Planes::few>>(columns, stream);
  if constexpr (!odd && op != Op::backward)
    if (columns.planes > 0) return start<walk_columns<op, S, odd, Planes::whole>>(columns, stream);
  return start<walk_columns<op, S, odd, odd ? Planes::whole : Planes::parts>>(columns, stream);
}
template <Op op, typename S, bool odd>
cudaError_t start_exact_tiles(const Columns& columns, cudaStream_t stream) {
  if constexpr (longest_exact(op) == 0) return cudaErrorInvalidValue;
  else if (columns.length <= kShortest) return start<walk_shortest_columns<op, S, odd>>(columns, stream);
  else return start<walk_short_columns<op, S, odd>>(columns, stream);
}

}  // namespace jitact::rows
