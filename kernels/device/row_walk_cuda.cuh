// The GPU's loops over rows. A row is read once: the threads that share it (part of a warp, a block, or a cluster of blocks)
// hold it in registers. Longer rows are held in shared memory: then blocks are persistent, and as soon as a thread is done with
// a vector, it starts the asynchronous copy of the next row's vector to its slot.
#pragma once

#include "row_part_cuda.cuh"

namespace jitact::rows {

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

// Computes the results, or the gradient, of the rows of which threads have a part.
template <Op op, typename S, bool ragged, int held, typename Here = InPlace>
class Rows : PartOfRows<op, S, ragged, held, Here> {
  using Base = PartOfRows<op, S, ragged, held, Here>;
  using typename Base::T, typename Base::Held, typename Base::F;
  using Base::kStaged, Base::pairs, Base::kUnscaled, Base::kPrecise, Base::size, Base::tensors, Base::vectors, Base::x;
  using Base::stored, Base::kSetsAside, Base::kIsScaled, Base::kBeside;
  using Base::launch_, Base::scale_, Base::times_, Base::place_, Base::next_, Base::staged_, Base::formulas_;
  using Base::chunks, Base::at, Base::is_inside, Base::each_of, Base::slot, Base::place_of, Base::take_row;
  using Base::find_staged, Base::load, Base::load_beside, Base::copy, Base::forget, Base::trim_slots, Base::words_of, Base::read;
  using Base::elements, Base::finish, Base::keep, Base::write;
  using Base::give_row;  // on a line of its own: exported files without row operands have neither
#ifdef JITACT_ROW_INPUT
  using Base::load_masked, Base::load_staged, Base::taking_part;
#endif

 public:
  using Base::Base;

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
      if constexpr (kBeside) load_beside(words);
      else load(words);
      if constexpr (kFetchesAhead<op, S, ragged, held>)
        if (launch_.ahead > 0) fetch_share();
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
#ifdef JITACT_ROW_INPUT
      if constexpr (masks(op) > 0) load_staged(words);
      else
#endif
      each_of(0, place_.end, [&](int v, bool) {
        JITACT_UNROLL for (int r = 0; r < tensors; r++) words.of[r][v] = staged_.get(r, at(0, v), launch_.outside[r]);
      });
      walk(words);
      before += kShortRowThreads >> launch_.log_group;
    } while (Here::kInParts && before < tile.rows());
    staged_.copy_to(launch_.written);
  }

 private:
  static constexpr int turns = held ? 3 : 4;  // exchanges per row

  // Starts to fetch the block's share of a row to the L2 cache. Of long rows, as many threads as there can be hold little of x, as
  // it is converted or beside its mask, and clusters of many blocks leave multiprocessors idle: not enough is on its way to keep
  // the memory busy.
  JITACT_DEVICE void fetch_share() const {
    unsigned row = ptx::cluster_id() + unsigned(launch_.ahead);
    if (row >= launch_.rows) return;
#ifdef JITACT_ROW_INPUT
    if constexpr (kMasks) row = launch_.mask.row_at(row);
    constexpr int size = sizeof(Input);
#else
    constexpr int size = sizeof(S);
#endif
    const unsigned bytes = launch_.length * size, share = bytes / launch_.blocks & ~15u;
    const int64_t begin = (int64_t(row) * bytes & ~int64_t(15)) + ptx::cluster_rank() * share;
    if (threadIdx.x == 0)
      JITACT_UNROLL for (int r = 0; r < tensors; r++)
        ptx::fetch_to_l2(static_cast<const char*>(launch_.read[r]) + begin, share);
  }

  template <bool first, typename Visit>
  JITACT_DEVICE void each(Held& words, const Visit& visit) const { Base::template each<first>(words, visit); }
  JITACT_DEVICE void walk(Held& words) {
    if constexpr (op == Op::backward_from_output)
      backward<true>(words, [&](int c, int v, T (&y)[size]) { read(words, c, v, 1, y); });
    else fold(words);
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
    F folded(peak, invalid, weights, sums, kUnscaled ? scale_ : T(1));
    if constexpr (kPlaced || (kPrecise && F::as_it_is)) folded.move(base), peak += base, base = 0;
    if constexpr (!held && stored) {
      if (exponent < -32) move_kept(chunks(), exponent), exponent = 0;  // else factors of shares could be subnormal
      folded.divide_kept(Weights<T>::power(exponent));
    }

    const auto result = [&](int c, int v, T (&y)[size]) {
      if constexpr (stored || (kPrecise && F::as_it_is)) read(words, c, v, x, y);
      else elements(words, c, v, base, y);
      JITACT_UNROLL for (int i = 0; i < size; i++) {
        if (kUnscaled && F::as_it_is) y[i] *= scale_;
        if (kPrecise && F::as_it_is) y[i] = T(ptx::product(y[i].v, scale_.v));  // rounded, as the peak is
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
    peak = of_row[0];
    const T stored_peak = pairs && scale_ < 0 ? -peak : peak;  // as it is in words
    if constexpr (kPrecise) peak = T(ptx::product(stored_peak.v, scale_.v));
    invalid = peak - peak;
    // In most rows only one of many warps has the peak.
    const bool with_peak = F::counts && !kSetsAside && __ballot_sync(0xffffffffu, !(own < of_row[0])) != 0;
    peak = signed_peak(peak);
    if (!kUnscaled && is_far(peak)) {
      base = peak, peak = 0;
      if constexpr (!kPlaced && !kPrecise)
        each<false>(words, [&](int c, int v) {
          T t[size];
          read(words, c, v, x, t);
          JITACT_UNROLL for (int i = 0; i < size; i++) t[i] -= base;
          keep(words, c, v, t);
        });
    }

    T subtracted = base;
    if (kPrecise && base != 0) times_ = factor_of_far(stored_peak.v, scale_.v), subtracted = stored_peak * times_;
    weights = weights_beside<S>(peak, scale_);
    T aside = 0;
    if constexpr (kSetsAside)
      if (own == of_row[0]) aside = put_aside(words, highest, own, kPlaced ? own : peak);
    Partial partial;
    const auto weigh = [&]<bool may_be_peak>() {
      each<false>(words, [&](int c, int v) {
        T t[size];
        elements(words, c, v, subtracted, t);
        JITACT_UNROLL for (int i = 0; i < size; i++) t[i] = F::template add<may_be_peak>(partial.of[i % 4], weights, peak, t[i]);
        if constexpr (stored) keep(words, c, v, t);
      });
    };
    if (!with_peak) weigh.template operator()<!F::counts>();
    if constexpr (F::counts && pairs) {
      if (with_peak) {
        PeaksApart<S> apart(stored_peak, stored_peak, launch_.outside[x]);
        each<false>(words, [&](int c, int v) {
          Words loaded = words_of(words, c, v, x);
          T t[size];
          JITACT_UNROLL for (uint32_t& word : loaded.w) word = apart.without(word);
          Storage<S>::widen(loaded, t);
          if constexpr (kPrecise) finish(subtracted, t);
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
    if (kPrecise && !F::as_it_is) base = subtracted;
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

  int walked_ = 0, folded_in_two_ = 0;  // rows
};

template <Op op, typename S, bool ragged, int held>
__global__ void __launch_bounds__(held == kMany ? 1 << kLogOfMany : kThreads, 2) walk_rows(const __grid_constant__ Launch launch) {
  ptx::wait_for_last();
  Rows<op, S, ragged, held>(launch).run();
}
template <Op op, typename S, int vectors>
__global__ void __launch_bounds__(kPlaneThreads) walk_planes(const __grid_constant__ StagedLaunch<SmallPlanes> launch) {
  ptx::wait_for_last();
  Rows<op, S, true, vectors * reads(op), StagedPlanes<S, reads(op), vectors>>(launch).run();
}
template <Op op, typename S, int vectors>
__global__ void __launch_bounds__(kShortRowThreads, short_row_blocks(vectors))
    walk_short_rows(const __grid_constant__ StagedLaunch<ShortRows> launch) {
  ptx::wait_for_last();
  constexpr int each = of_each(vectors, reads(op));
#ifdef JITACT_ROW_INPUT
  constexpr int most = of_memory(vectors);
  using Masked = std::conditional_t<std::is_same_v<S, Floats>, StagedHalves<most>, StagedRows<S, 1, most>>;
  using Here = std::conditional_t<kMasks, Masked, StagedInput<Input, most>>;
#else
  using Here = std::conditional_t<is_of_whole(vectors), StagedVectors<S, reads(op), each>,
                                  StagedRows<S, reads(op), kManyOfRow / reads(op)>>;
#endif
  Rows<op, S, !is_of_whole(vectors), each * reads(op), Here>(launch).run();
}

}  // namespace jitact::rows
