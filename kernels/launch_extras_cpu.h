// The CPU loop with extras: as launch_cpu.h's, whose blocks it shares, with an array for each extra.
#pragma once

#include "launch_extras.cuh"

namespace jitact {

#ifdef JITACT_WEIGHTS

// Memory that is given back; <memory> takes longer to compile than it.
template <typename T>
class Array {
 public:
  explicit Array(int64_t n) : data_(new T[n]()) {}
  Array(const Array&) = delete;
  ~Array() { delete[] data_; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  T* data_;
};

// The weights of a call, prepared.
template <typename S>
class Extras {
 public:
  using T = typename Storage<S>::T;

  explicit Extras(const Call& call)
      : channels_(call.channels), inner_(call.inner), table_(kExtras * call.channels) {
    for (int k = 0; k < kExtras; k++) Storage<S>::widen(static_cast<const S*>(call.weights[k]), row(k), channels_);
    for (int64_t c = 0; c < channels_; c++) {
      T w[kExtras];
      for (int k = 0; k < kExtras; k++) w[k] = row(k)[c];
      prepare_weights(w);
      for (int k = 0; k < kExtras; k++) row(k)[c] = w[k];
    }
  }

  // Whether all blocks get the same.
  bool constant() const { return channels_ == 1; }

  // For the n elements from `first` on, or a whole block if constant.
  void fill(int64_t first, int64_t n, T (*extra)[kBlock]) const {
    if (constant()) first = 0, n = kBlock;
    for_runs(first, n, [&](int64_t i, int64_t count, int64_t c, bool across) {
      for (int k = 0; k < kExtras; k++) {
        if (across) std::copy(row(k) + c, row(k) + c + count, extra[k] + i);
        else std::fill(extra[k] + i, extra[k] + i + count, row(k)[c]);
      }
    });
  }

  // Calls f(i, count, c, across) for stretches of the n elements from `first` on: `count` from the i-th, of channel c or,
  // if `across`, of the channels from c on.
  template <typename F>
  void for_runs(int64_t first, int64_t n, const F& f) const {
    if (constant()) return f(0, n, 0, false);
    const bool across = inner_ == 1;
    int64_t c = first / inner_ % channels_, left = across ? channels_ - c : inner_ - first % inner_;
    for (int64_t i = 0; i < n;) {
      const int64_t count = std::min(left, n - i);
      f(i, count, c, across);
      i += count;
      left = across ? channels_ : inner_;
      c = across || c + 1 == channels_ ? 0 : c + 1;
    }
  }

 private:
  T* row(int k) const { return &table_[k * channels_]; }

  int64_t channels_, inner_;
  Array<T> table_;
};

#else

// The random numbers of a call.
template <typename S>
class Extras {
 public:
  using T = typename Storage<S>::T;

  explicit Extras(const Call& call) : seed_(uint64_t(*call.seed)), uniform_(call.params[0], call.params[1]) {}

  static bool constant() { return false; }

  // For the block that begins with the element `first`.
  void fill(int64_t first, int64_t, T (*extra)[kBlock]) const {
    constexpr int64_t calls = kBlock * int64_t(sizeof(S)) / 16;
    alignas(64) Random16 random[calls];
    const uint64_t place = uint64_t(first) * sizeof(S) / 16;
    for (int64_t i = 0; i < calls; i++) random[i] = philox(place + uint64_t(i), seed_);
    alignas(64) Bits bits[kBlock];
    std::memcpy(bits, random, sizeof(bits));
    for (int64_t i = 0; i < kBlock; i++) extra[0][i] = uniform_(bits[i]);
  }

 private:
  using Bits = std::conditional_t<sizeof(S) == 8, uint64_t, std::conditional_t<sizeof(S) == 4, uint32_t, uint16_t>>;
  uint64_t seed_;
  Uniform<T, sizeof(S)> uniform_;
};

#endif

// The blocks from `begin` to `end`. For backward_weights, sums[k * channels + c] gains the gradient of weight k's value c.
template <Op op, typename S>
void run_blocks_with(const Call& call, const Extras<S>& extras, int64_t begin, int64_t end, [[maybe_unused]] double* sums) {
  using T = typename Storage<S>::T;
  constexpr bool two = reads_two(op) || op == Op::backward_weights, same = std::is_same_v<S, typename T::Value>;
  const Params<T> params(call.params);
  const bool past_cache = call.out && is_large_output(call) && reinterpret_cast<uintptr_t>(call.out) % 32 == 0;
  alignas(64) T ta[kBlock], tb[two ? kBlock : 1], extra[kExtras][kBlock];
  alignas(64) S result[kBlock];
  alignas(64) uint8_t bits[kBlock];
#ifdef JITACT_WEIGHTS
  alignas(64) T gains[op == Op::backward_weights ? kLearned : 1][kBlock];
#endif

  for (int64_t block = begin; block < end; block++) {
    const int64_t first = block * kBlock, n = std::min(kBlock, call.n - first);
    S* const out = call.out ? static_cast<S*>(call.out) + first : nullptr;
    Storage<S>::widen(static_cast<const S*>(call.a) + first, ta, n);
    if constexpr (two) Storage<S>::widen(static_cast<const S*>(call.b) + first, tb, n);
    if constexpr (op == Op::backward_from_bit) unpack(static_cast<const uint8_t*>(call.b) + first / 8, bits, n);
    if (block == begin || !extras.constant()) extras.fill(first, n, extra);
    // float and double go straight where they belong.
    S* const to = past_cache || out == nullptr || n < kBlock ? result : out;

    const int64_t padded = (n + kLanes - 1) & -kLanes;  // as in launch_cpu.h
    std::fill(ta + n, ta + padded, T(0));
#pragma GCC ivdep
    for (int64_t i = 0; i < padded; i++) {
      const auto at = [&](size_t k) { return extra[k][i]; };
      bool bit = op == Op::backward_from_bit && bits[i];
      const T y = element_with<op == Op::backward_weights ? Op::backward : op>(ta[i], two ? tb[i] : T(), bit, at, params);
#ifdef JITACT_WEIGHTS
      if constexpr (op == Op::backward_weights) {
        const auto gain = weight_gradients_with<T>(ta[i], tb[i], at, params);
        for (int k = 0; k < kLearned; k++) gains[k][i].v = gain.of[k].v;
      }
#endif
      if constexpr (same) to[i] = y.v;
      else ta[i] = y;
      if constexpr (op == Op::forward_bit) bits[i] = bit;
    }

    if constexpr (!same)
      if (out) Storage<S>::narrow(ta, to, n);
    if (past_cache) stream(out, result, n * int64_t(sizeof(S)));
    else if (out && to != out) std::memcpy(out, result, n * sizeof(S));
    if constexpr (op == Op::forward_bit) pack(bits, static_cast<uint8_t*>(call.mask) + first / 8, n);
#ifdef JITACT_WEIGHTS
    if constexpr (op == Op::backward_weights)
      extras.for_runs(first, n, [&](int64_t i, int64_t count, int64_t c, bool across) {
        for (int k = 0; k < kLearned; k++) {
          double* sum = sums + k * call.channels + c;
          if (across)
            for (int64_t j = 0; j < count; j++) sum[j] += double(gains[k][i + j].v);
          else
            *sum += total(gains[k] + i, count);
        }
      });
#endif
  }
  if (past_cache) stream_fence();
}

#ifdef JITACT_WEIGHTS

// The sum of up to kBlock values, in lanes so that the compiler vectorises it.
template <typename T>
double total(const T* t, int64_t n) {
  constexpr int lanes = 16;
  typename T::Value sums[lanes] = {};
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (int j = 0; j < lanes; j++) sums[j] += t[i + j].v;
  double sum = 0;
  for (; i < n; i++) sum += double(t[i].v);
  for (int j = 0; j < lanes; j++) sum += double(sums[j]);
  return sum;
}

// In chunks, each with its own sums, which are added up in order: the result is the same for any number of threads.
template <typename S>
void run_backward_weights(const Call& call) {
  using T = typename Storage<S>::T;
  constexpr int64_t most_chunks = 256;
  const int64_t blocks = (call.n + kBlock - 1) / kBlock, values = kLearned * call.channels;
  const int64_t chunks = std::clamp(std::min(blocks / kGrain, call.n / (16 * values)), int64_t(1), most_chunks);
  struct Work {
    const Call& call;
    const Extras<S> extras;
    const int64_t blocks, chunks, values;
    const Array<double> sums;
  } work{call, Extras<S>(call), blocks, chunks, values, Array<double>(chunks * values)};

  const auto run = [](int64_t begin, int64_t end, void* context) {
    const Work& w = *static_cast<const Work*>(context);
    for (int64_t i = begin; i < end; i++)
      run_blocks_with<Op::backward_weights>(w.call, w.extras, w.blocks * i / w.chunks, w.blocks * (i + 1) / w.chunks,
                                            &w.sums[i * w.values]);
  };
  torch_parallel_for(0, chunks, 1, run, &work);

  for (int64_t i = 1; i < chunks; i++)
    for (int64_t j = 0; j < values; j++) work.sums[j] += work.sums[i * values + j];
  for (int k = 0; k < kLearned; k++) {
    if (call.gradients[k] == nullptr) continue;
    for (int64_t c = 0; c < call.channels; c++) {
      T w[kExtras];
      for (int i = 0; i < kExtras; i++) Storage<S>::widen(static_cast<const S*>(call.weights[i]) + c, w + i, 1);
      const T gradient = T(work.sums[k * call.channels + c]) * prepare_slope(w, k);
      Storage<S>::narrow(&gradient, static_cast<S*>(call.gradients[k]) + c, 1);
    }
  }
}

#endif

void run_cpu_with_extras(const Call& call) {
  if (call.out && is_large_output(call)) prefer_huge_pages(call.out, bytes_of(call));
#ifdef JITACT_WEIGHTS
  if (call.op == Op::backward_weights) return dispatch_dtype(call.dtype, [&]<typename S>() { run_backward_weights<S>(call); });
#endif
  const auto run = [](int64_t begin, int64_t end, void* context) {
    const Call& call = *static_cast<const Call*>(context);
    dispatch_with_extras(call.op, [&]<Op op>() {
      dispatch_dtype(call.dtype, [&]<typename S>() {
        run_blocks_with<op>(call, Extras<S>(call), begin, end, nullptr);
      });
    });
  };
  torch_parallel_for(0, (call.n + kBlock - 1) / kBlock, kGrain, run, const_cast<Call*>(&call));
}

}  // namespace jitact
