// How the kernels that sum go through memory: a thread has vectors a stride apart, of which several are on their way to it.
#pragma once

#include "sums_cuda.cuh"

namespace jitact::loops {

// Whether vectors come through shared memory.
template <Op op> constexpr bool kCopied = kDense<op> && reads(op) <= 4;

// About how many registers a kernel that sums needs; ptxas takes up to a third more.
template <Op op, typename S>
constexpr int registers_of_sums() {
  constexpr int of_operands = Storage<S>::size * (int(lesser(summed(op), kMany)) + kMany), of_random = 8 * kRandom;
  constexpr int tensors = int(lesser(reads(op), 1 + writes(op)));  // others that it reads are rarely used, as a residual
  return 12 + of_operands + (kCopied<op> ? 8 : 16) * tensors + of_random;
}
// Minimum blocks per multiprocessor, for __launch_bounds__: as many as have 64 registers for each thread, or 80.
template <Op op, typename S>
constexpr int least_blocks_of_sums(int threads) {
  constexpr int registers = registers_of_sums<op, S>();
  if (sizeof(S) == 8 || kMostBlocks == 0 || registers > 80) return 0;
  return (registers > 64 ? 768 : 1024) / threads;
}

// What a block has in shared memory: its threads' vectors that are on their way and then, in their place, its sums.
template <Op op, typename S, int threads>
struct WalkMemory {
  static constexpr int tensors = kCopied<op> ? reads(op) : 1;
  static constexpr bool with_bits = kCopied<op> && reads_bits(op);
  // The turns whose vectors are on their way to a thread: as many as 48 KB hold, which a block has without asking for more.
  static constexpr int places = kCopied<op> ? int(lesser(4, 48128 / (threads * (16 * tensors + 4 * with_bits)))) : 2;
  union {
    struct {  // turns are multiples of 128 bytes apart: with 16 more, copies of two tensors were 2 % slower
      typename Storage<S>::Vector vectors[kCopied<op> ? places : 1][tensors][threads];
      uint32_t bits[with_bits ? places : 1][with_bits ? threads : 1];  // words in which the vectors' mask bits are
    };
    Value<S> sums[threads * Storage<S>::size];
  };
  static_assert(places >= 2 && sizeof(sums) <= 16384);
};

// The vectors of a thread: `count` from v on, `stride` apart, one in each turn. Turns have places, one after
// another; take(turn) returns the turn's vector; advance(turn) ends it, and starts to load the vector that has its place next.
// Where vectors are copied to shared memory, to places that no other thread reads, no register waits for them, and no thread for
// another. Else places are registers, and need code for each: `turn` is below `unrolled`.
template <Op op, typename S, int threads>
class Vectors {
  using Vector = typename Storage<S>::Vector;
  using Memory = WalkMemory<op, S, threads>;
  static constexpr int tensors = reads(op), places = Memory::places;

 public:
  static constexpr int unrolled = kCopied<op> ? 1 : places;

  JITACT_DEVICE Vectors(const Launch& launch, int64_t v, int count, int64_t stride)
      : launch_(launch), stride_(stride), v_(v), left_(count) {
    JITACT_UNROLL for (int r = 0; r < tensors; r++) {
      place_of_[r] = r;
      JITACT_UNROLL for (int other = r - 1; other >= 0; other--)
        if (launch.read[r].data == launch.read[other].data) place_of_[r] = other;  // in the place of what is not read
    }
    JITACT_UNROLL for (int p = 0; p < places; p++) load(p, p);
  }
  JITACT_DEVICE bool is_left() const { return left_ > 0; }
  JITACT_DEVICE int64_t here() const { return v_; }

  JITACT_DEVICE Inputs<op, S>& take(int turn) {
    if constexpr (kCopied<op>) {
      ptx::wait_for_copies(places - 1);
      JITACT_UNROLL for (int r = 0; r < tensors; r++) inputs_[turn].words[r] = *copied(place_, place_of_[r]);
      if constexpr (reads_bits(op)) {
        const int64_t at = v_ * Storage<S>::size;
        inputs_[turn].bits = *copied_bits(place_) >> ((byte_of(at) % 4 * 8) | (at & 7));
      }
    }
    return inputs_[turn];
  }
  // Memory is slower if the next vector is asked for before results are written.
  JITACT_DEVICE void advance(int turn) {
    load(kCopied<op> ? place_ : turn, places);
    v_ += stride_, left_--;
    place_ = place_ + 1 < places ? place_ + 1 : 0;
  }

 private:
  static JITACT_DEVICE Vector* copied(int place, int tensor) {
    return &ptx::shared<Memory>().vectors[place][tensor][threadIdx.x];
  }
  static JITACT_DEVICE uint32_t* copied_bits(int place) { return &ptx::shared<Memory>().bits[place][threadIdx.x]; }
  // The address of the byte that has an element's mask bit. Its word may have bytes beside the mask, in the same page.
  JITACT_DEVICE uintptr_t byte_of(int64_t at) const { return reinterpret_cast<uintptr_t>(launch_.mask) + (at >> 3); }
  // Starts to load the vector that is `ahead` turns ahead.
  JITACT_DEVICE void load(int place, int ahead) {
    const bool exists = left_ > ahead;
    const int64_t v = v_ + ahead * stride_, at = v * Storage<S>::size;
    if constexpr (kCopied<op>) {
      JITACT_UNROLL for (int r = 0; r < tensors; r++)
        ptx::copy_async_if(exists && place_of_[r] == r, copied(place, r), static_cast<const Vector*>(launch_.read[r].data) + v,
                           launch_.policy);
      if constexpr (reads_bits(op)) ptx::copy_word_async_if(exists, copied_bits(place), byte_of(at) / 4 * 4);
      ptx::commit_copies();
    } else {
      load_if<op, S>(exists, launch_, at, inputs_[place]);
    }
  }

  const Launch& launch_;
  const int64_t stride_;
  int64_t v_;
  int left_, place_ = 0;
  int place_of_[tensors];  // the tensor in whose place each is, if it is the same as another
  Inputs<op, S> inputs_[unrolled];
};

// A function that changes `others` to those of vector v: random numbers, and operands unless they `repeat`.
template <typename S, int size>
JITACT_DEVICE auto finding(const Operands<S>& operands, const typename Operands<S>::Common& common, const bool& repeat,
                           typename Operands<S>::template Values<size>& others) {
  return [&](int64_t v) {
    if (kBroadcast > 1 && !repeat) others = operands.template from<size>(common, v * size);
    else operands.draw(others.random, common, v * size);
  };
}

// Computes a thread's vectors. find_others(v) is called before vector v, for what is not the same for all; it knows what `repeat`
// says: whether only random numbers are not.
template <Op op, typename S, int threads, typename Add, typename Find>
JITACT_DEVICE void walk(const Launch& launch, Vectors<op, S, threads>& vectors, const Numbers<typename Storage<S>::T>& numbers,
                        const typename Operands<S>::template Values<Storage<S>::size>& others, const Add& add, bool repeat,
                        const Find& find_others) {
  const auto walk = [&]<bool repeats>() {
#pragma unroll 1
    while (vectors.is_left()) {
      JITACT_UNROLL for (int turn = 0; turn < vectors.unrolled; turn++) {
        if (turn > 0 && !vectors.is_left()) break;
        Inputs<op, S>& inputs = vectors.take(turn);
        const int64_t at = vectors.here() * Storage<S>::size;
        if (!repeats) find_others(vectors.here());
        const Computation<op, S, Storage<S>::size, Add> computation{
            .launch = launch,
            .others = others,
            .numbers = numbers,
            .add = add,
        };
        compute_vector(computation, inputs, [&](const auto& out) { write_vectors<op, S, kDense<op>>(launch, out, at); });
        vectors.advance(turn);
      }
    }
  };
  // Finding others in each turn is more code than a turn, which is slow where it is skipped.
  constexpr bool split = kBroadcast > 1 && kRandom == 0;
  if (split && repeat) walk.template operator()<split>();
  else walk.template operator()<false>();
}

}  // namespace jitact::loops
