// The CPU loop: blocks that fit in the L1 cache, computed by loops that the compiler vectorises. Large outputs are written
// with non-temporal stores, which saves reading each cache line before overwriting it.
#pragma once

#include <cstring>

#include "launch.cuh"
#include "memory_cpu.h"
#include "random_cpu.h"
#include "torch_abi.h"
#ifdef JITACT_PART
#include "parts.cuh"
#endif

namespace jitact::loops {

// Elements per block (a multiple of 8, as blocks must not share mask bytes) and of the longest vector; blocks worth a thread.
constexpr int64_t kBlock = 1024, kLanes = 64, kGrain = 32;

// Not from <algorithm>, which would slow down every build.
constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
template <typename V>
void fill_all(V* values, int64_t n, V value) {
  for (int64_t i = 0; i < n; i++) values[i] = value;
}

inline int64_t bytes_of(const Call& call) { return call.n * bytes_of(call.dtype); }
// Whether the elements of a tensor are contiguous in memory.
inline bool is_dense(const Call& call, const Elements& tensor) {
  if (call.dense) return true;
  return tensor.step == 1 && (tensor.row_stride == call.columns || call.columns == call.n);
}
// Not in place: there, the output's cache lines have just been read.
inline bool is_large_output(const Call& call, const Elements& out) {
  return kStreams && out.data && out.data != call.read[0].data && bytes_of(call) >= kLargeBytes;
}
// Bytes from the start of a tensor's first element to the end of its last.
inline int64_t extent(const Call& call, const Elements& tensor) {
  if (is_dense(call, tensor)) return bytes_of(call);
  const int64_t last = (call.n / call.columns - 1) * tensor.row_stride + (call.columns - 1) * tensor.step;
  return (last + 1) * bytes_of(call.dtype);
}

// Packs n bytes of 0 or 1 into bits, and back. The array of bytes has room for a multiple of 32.
inline void pack(uint8_t* bytes, uint8_t* bits, int64_t n) {
  std::memset(bytes + n, 0, -n & 7);  // unused bits of the last byte are 0
#ifdef __AVX2__
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    Bytes32 vector;
    uint32_t word;
    std::memcpy(&vector, bytes + i, 32);
    vector <<= 7;
    asm("vpmovmskb %1, %0" : "=r"(word) : "x"(vector));
    std::memcpy(bits + i / 8, &word, 4);
  }
  for (; i < n; i += 8) {
#else
  for (int64_t i = 0; i < n; i += 8) {
#endif
    uint64_t word;
    std::memcpy(&word, bytes + i, 8);
    bits[i / 8] = uint8_t((word & 0x0101010101010101u) * 0x0102040810204080u >> 56);
  }
}
inline void unpack(const uint8_t* bits, uint8_t* bytes, int64_t n) {
#ifdef __AVX2__
  int64_t i = 0;
  const Bytes32 places = {0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303};
  const long long each = int64_t(0x8040201008040201u);
  const Bytes32 bit = {each, each, each, each};
  for (; i + 32 <= n; i += 32) {
    uint32_t word;
    std::memcpy(&word, bits + i / 8, 4);
    Bytes32 vector;
    asm("vmovd %1, %x0\n\tvpbroadcastd %x0, %0" : "=x"(vector) : "r"(word));
    asm("vpshufb %2, %1, %0" : "=x"(vector) : "x"(vector), "x"(places));
    vector &= bit;
    asm("vpcmpeqb %2, %1, %0" : "=x"(vector) : "x"(vector), "x"(bit));
    std::memcpy(bytes + i, &vector, 32);
  }
  for (; i < n; i += 8) {
#else
  for (int64_t i = 0; i < n; i += 8) {
#endif
    const uint64_t spread = bits[i / 8] * 0x0101010101010101u & 0x8040201008040201u;
    const uint64_t word = (spread + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
    std::memcpy(bytes + i, &word, 8);
  }
}

// Splits the n elements from `first` on into runs and calls f(i, count, value, across) for each: the `count` elements from the
// i-th all have the broadcast operand's value with index `value` or, if `across`, its consecutive values from `value` on.
template <typename F>
void for_runs(const Broadcasts& operand, int64_t first, int64_t n, const F& f) {
  if (operand.count == 1) return f(0, n, 0, false);
  const bool across = operand.inner == 1;
  const int64_t size = across ? operand.count : operand.inner;
  int64_t value = first / operand.inner % operand.count, left = across ? size - value : size - first % size;
  for (int64_t i = 0; i < n;) {
    const int64_t count = least(left, n - i);
    f(i, count, value, across);
    i += count;
    left = size;
    value = across || value + 1 == operand.count ? 0 : value + 1;
  }
}

// The values of a broadcast operand.
template <typename S>
void widen_all(const Broadcasts& operand, typename Storage<S>::T* values) {
  if (operand.wide)
    for (int64_t i = 0; i < operand.count; i++) values[i].v = static_cast<const float*>(operand.data)[i];
  else Storage<S>::widen(static_cast<const S*>(operand.data), values, operand.count);
}

// The broadcast operands of a call, widened and prepared.
template <typename S>
class Broadcast {
 public:
  using T = typename Storage<S>::T;

  explicit Broadcast(const Call& call) : call_(call), table_(offset(kBroadcast)) {
    for (int b = 0; b < kBroadcast; b++) {
      const Broadcasts& operand = call.broadcast[b];
      widen_all<S>(operand, &table_[offset(b)]);
    }
    if constexpr (kPrepares) prepare_all(&table_[offset(kUnprepared)]);  // of one value each
  }

  // Whether operand b is a single value.
  bool constant(int b) const { return call_.broadcast[b].count == 1; }

  // The values of operand b for the n elements from `first` on; for a whole block if constant.
  void fill(int b, int64_t first, int64_t n, T* values) const {
    const T* own = &table_[offset(b)];
    if (constant(b)) n = kBlock;
    for_runs(call_.broadcast[b], first, n, [&](int64_t i, int64_t count, int64_t value, bool across) {
      if (across)
        for (int64_t j = 0; j < count; j++) values[i + j] = own[value + j];
      else fill_all(values + i, count, own[value]);
    });
  }

 private:
  int64_t offset(int b) const {
    int64_t sum = 0;
    for (int i = 0; i < b; i++) sum += call_.broadcast[i].count;
    return sum;
  }

  const Call& call_;
  Array<T> table_;
};

// The random bits of the block that begins at element `first`.
template <typename Bits>
void fill_random(Bits* bits, int64_t first, uint64_t seed, uint32_t stream) {
  constexpr int64_t calls = kBlock * int64_t(sizeof(Bits)) / 16;
  alignas(64) uint64_t words[2 * calls];
  fill_philox(words, uint64_t(first) * sizeof(Bits) / 16, seed, stream, calls);
  std::memcpy(bits, words, sizeof(words));
}

// Splits the n elements from `first` on at the ends of rows and calls f(i, offset in the tensor, count) for each part.
template <typename F>
void for_rows(const Call& call, const Elements& tensor, int64_t first, int64_t n, const F& f) {
  for (int64_t i = 0; i < n;) {
    const int64_t row = (first + i) / call.columns, column = (first + i) - row * call.columns;
    const int64_t count = least(call.columns - column, n - i);
    f(i, row * tensor.row_stride + column * tensor.step, count);
    i += count;
  }
}
template <typename S>
void gather(const Call& call, const Elements& tensor, int64_t first, int64_t n, S* to) {
  const S* from = static_cast<const S*>(tensor.data);
  for_rows(call, tensor, first, n, [&](int64_t i, int64_t at, int64_t count) {
    if (tensor.step == 1) std::memcpy(to + i, from + at, count * sizeof(S));
    else if (tensor.step == 0) fill_all(to + i, count, from[at]);
    else
      for (int64_t j = 0; j < count; j++) to[i + j] = from[at + 2 * j];
  });
}
template <typename S>
void scatter(const Call& call, const Elements& tensor, int64_t first, int64_t n, const S* from) {
  S* to = static_cast<S*>(tensor.data);
  for_rows(call, tensor, first, n, [&](int64_t i, int64_t at, int64_t count) {
    if (tensor.step == 1) std::memcpy(to + at, from + i, count * sizeof(S));
    else
      for (int64_t j = 0; j < count; j++) to[at + 2 * j] = from[i + j];
  });
}

// The sum of up to kBlock values, in lanes so that the compiler vectorises it.
template <typename V>
double total(const V* t, int64_t n) {
  constexpr int lanes = 16;
  V sums[lanes] = {};
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (int j = 0; j < lanes; j++) sums[j] += t[i + j];
  double sum = 0;
  for (; i < n; i++) sum += double(t[i]);
  for (int j = 0; j < lanes; j++) sum += double(sums[j]);
  return sum;
}

// Data shared by the blocks of a call.
template <typename S>
struct Shared {
  const Call& call;
  const Broadcast<S> operands{call};
};

// Computes up to kBlock elements at a time.
template <Op op, typename S>
class Block {
 public:
  using T = typename Storage<S>::T;
  static constexpr int kReads = reads(op), kWrites = writes(op);
  static constexpr int kSummed = summed(op);

  explicit Block(const Shared<S>& shared) : shared_(shared) {
    for (int k = 0; k < kNumbers; k++) numbers_.values[k] = T(shared.call.numbers[k]);
    for (int b = 0; b < kBroadcast; b++)
      if (shared.operands.constant(b)) shared.operands.fill(b, 0, kBlock, values_[b]);
  }

  // Computes n elements from `first` on, rounded up to a multiple of kLanes beyond what is read and written, so that each
  // element is computed by the same instructions wherever it is. `bits` has one byte per element, read or written.
  void run(const S* const* in, S* const* out, uint8_t* bits, int64_t first, int64_t n) {
    const int64_t padded = (n + kLanes - 1) & -kLanes;  // from which the compiler sees that it needs no scalar remainder loop
    for (int b = 0; b < kBroadcast; b++)
      if (!shared_.operands.constant(b)) shared_.operands.fill(b, first, n, values_[b]);
    for (int r = 0; r < kRandom; r++) fill_random(random_[r], first, uint64_t(*shared_.call.seed), r);
    if constexpr (kInLoop) compute(in, out, bits, padded);
    else {
      for (int r = 0; r < kReads; r++) Storage<S>::widen(in[r], wide_[r], padded);
      compute(wide_, wide_, bits, padded);
      for (int w = 0; w < kWrites; w++) Storage<S>::narrow(wide_[w], out[w], n);
    }
  }

  // Adds the gradients of the broadcast operands to `sums`, which has the values of one operand after those of another.
  void add_up(int64_t first, int64_t n, double* sums) const {
    for (int s = 0; s < kSummed; s++) {
      const Broadcasts& operand = shared_.call.broadcast[s];
      for_runs(operand, first, n, [&](int64_t i, int64_t count, int64_t value, bool across) {
        if (across)
          for (int64_t j = 0; j < count; j++) sums[value + j] += double(gains_[s][i + j]);
        else
          sums[value] += total(gains_[s] + i, count);
      });
      sums += operand.count;
    }
  }

 private:
  static constexpr bool kInLoop = Storage<S>::kParts > 0;  // elements are converted where they are computed
  using Bits = typename Mantissa<T>::Bits;

  // How the loop reads and writes memory: that of elements, or of a block of computed values.
  using Memory = std::conditional_t<kInLoop, Storage<S>, AsItIs<T>>;
  using Unit = typename Memory::Unit;

  // The values of element i, which is element `part` of unit u.
  template <int part>
  struct Source {
    const Block& block;
    const Unit* units;
    int64_t i;
    template <int r> JITACT_INLINE T element() const { return T(Memory::template widened<part>(units[r])); }
    template <int k> JITACT_INLINE T number() const { return block.numbers_.values[k]; }
    template <int b> JITACT_INLINE T broadcast() const { return block.values_[b][i]; }
    template <int r> JITACT_INLINE Random<T> random() const { return Random<T>(block.random_[r][i]); }
  };

  // `from`, `to` and `bits` are aliased by nothing: what is read through other pointers would be loaded again after each store.
  template <typename In, typename Out>
  void compute(const In& in, Out& out, uint8_t* __restrict bits, int64_t padded) {
    constexpr int kParts = Memory::kParts;
    const int64_t units = int64_t(uint64_t(padded) / kParts);  // unsigned: then it is seen to be a multiple, too
    using Kept [[gnu::may_alias]] = std::conditional_t<kParts == 1, uint8_t, uint16_t>;  // the bytes of a unit's bits
    const Unit* from[kReads];
    Unit* to[kWrites];
    for_each<kReads>([&](auto r) { from[r] = reinterpret_cast<const Unit*>(in[r]); });
    for_each<kWrites>([&](auto w) { to[w] = reinterpret_cast<Unit*>(out[w]); });
#pragma GCC ivdep
    for (int64_t u = 0; u < units; u++) {
      Unit read[kReads], written[kWrites];
      [[maybe_unused]] Kept kept = reads_bits(op) ? reinterpret_cast<const Kept*>(bits)[u] : Kept(0);
      for_each<kReads>([&](auto r) { read[r] = from[r][u]; });
      for_each<kParts>([&](auto part) __attribute__((always_inline)) {  // there may be two calls of it
        bool bit = reads_bits(op) && uint8_t(kept >> 8 * part);
        const Source<part> source{
            .block = *this,
            .units = read,
            .i = u * kParts + part,
        };
        if constexpr (kPlain) {
          const T result = plain_result<op>(source.template element<0>(), source.template element<kReads - 1>(), bit);
          Memory::template narrow_into<part>(written[0], result.v);
        } else {
          const auto result = results<op, T>(source, bit);
          for_each<kWrites>([&](auto w) {
            Memory::template narrow_into<part>(written[w], result.of[kWrites == 1 ? 0 : kWrittenResult<op, w>].v);
          });
          for_each<kSummed>([&](auto s) { gains_[s][source.i] = result.of[kSummedGradient<s>].v; });
        }
        if constexpr (op == Op::forward_bit) kept |= Kept(bit) << 8 * part;
      });
      for_each<kWrites>([&](auto w) { to[w][u] = written[w]; });
      if constexpr (op == Op::forward_bit) reinterpret_cast<Kept*>(bits)[u] = kept;
    }
  }

  const Shared<S>& shared_;
  Numbers<T> numbers_;
  alignas(64) T wide_[kInLoop ? 1 : kReads > kWrites ? kReads : kWrites][kInLoop ? 1 : kBlock];
  alignas(64) T values_[kBroadcast + 1][kBroadcast ? kBlock : 1];
  alignas(64) Bits random_[kRandom + 1][kRandom ? kBlock : 1];
  alignas(64) typename T::Value gains_[kSummed + 1][kSummed ? kBlock : 1];
};

// Computes blocks `begin` to `end` and adds the gradients of broadcast operands to `totals`.
template <Op op, typename S>
void run_blocks(const Shared<S>& shared, int64_t begin, int64_t end, [[maybe_unused]] double* totals) {
  constexpr int kReads = reads(op), kWrites = writes(op);
  const Call& call = shared.call;
  Block<op, S> compute(shared);
  [[maybe_unused]] bool past_cache[kWrites] = {};
  for (int w = 0; w < kWrites; w++)
    if (kStreams && is_dense(call, call.written[w]) && is_large_output(call, call.written[w]))
      past_cache[w] = reinterpret_cast<uintptr_t>(call.written[w].data) % 32 == 0;
  alignas(64) S copies[kReads][kBlock], buffers[kWrites][kBlock];
  alignas(64) uint8_t bits[kBlock];

  for (int64_t block = begin; block < end; block++) {
    const int64_t first = block * kBlock, n = least(kBlock, call.n - first);
    const S* in[kReads];
    S* out[kWrites];
    for (int r = 0; r < kReads; r++) {
      in[r] = static_cast<const S*>(call.read[r].data) + first;
      if (n == kBlock)
        if (call.dense || is_dense(call, call.read[r])) continue;
      if (call.dense || is_dense(call, call.read[r])) std::memcpy(copies[r], in[r], n * sizeof(S));
      else gather(call, call.read[r], first, n, copies[r]);
      std::memset(copies[r] + n, 0, (-n & (kLanes - 1)) * sizeof(S));
      in[r] = copies[r];
    }
    for (int w = 0; w < kWrites; w++) {
      out[w] = buffers[w];
      if (n == kBlock && call.written[w].data)
        if (call.dense || is_dense(call, call.written[w])) out[w] = static_cast<S*>(call.written[w].data) + first;
      if (kStreams && past_cache[w]) out[w] = buffers[w];
    }
    if constexpr (reads_bits(op)) unpack(static_cast<const uint8_t*>(call.mask) + first / 8, bits, n);
    compute.run(in, out, bits, first, n);
    for (int w = 0; w < kWrites; w++) {
      if (out[w] != buffers[w] || call.written[w].data == nullptr) continue;
      S* const to = static_cast<S*>(call.written[w].data) + first;
      if (kStreams && past_cache[w]) store_past_cache(to, buffers[w], n * int64_t(sizeof(S)));
      else if (call.dense || is_dense(call, call.written[w])) std::memcpy(to, buffers[w], n * sizeof(S));
      else scatter(call, call.written[w], first, n, buffers[w]);
    }
    if constexpr (op == Op::forward_bit) pack(bits, static_cast<uint8_t*>(call.mask) + first / 8, n);
    if constexpr (summed(op) > 0) compute.add_up(first, n, totals);
  }
  if (kStreams) fence();
}

// Each of a fixed number of chunks has its own sums, added up in order, so the result does not depend on the number of threads.
template <Op op, typename S>
void run_sums(const Call& call) {
  using T = typename Storage<S>::T;
  constexpr int kSummed = summed(op);
  constexpr int64_t most_chunks = 256;
  int64_t values = 0;
  for (int s = 0; s < kSummed; s++) values += call.broadcast[s].count;
  const int64_t blocks = (call.n + kBlock - 1) / kBlock;
  const int64_t worth = least(blocks / kGrain, call.n / (16 * values)), chunks = worth < 1 ? 1 : least(worth, most_chunks);
  struct Work {
    const Shared<S> shared;
    const int64_t blocks, chunks, values;
    const Array<double> totals;
  } work{{call}, blocks, chunks, values, Array<double>(chunks * values)};

  const auto run = [](int64_t begin, int64_t end, void* context) {
    const Work& w = *static_cast<const Work*>(context);
    for (int64_t i = begin; i < end; i++)
      run_blocks<op, S>(w.shared, w.blocks * i / w.chunks, w.blocks * (i + 1) / w.chunks, &w.totals[i * w.values]);
  };
  in_parallel(chunks, 1, run, &work);

  for (int64_t i = 1; i < chunks; i++)
    for (int64_t j = 0; j < values; j++) work.totals[j] += work.totals[i * values + j];
  const double* sum = &work.totals[0];
  for (int s = 0; s < kSummed; sum += call.broadcast[s++].count) {
    if (call.sums[s] == nullptr) continue;
    for (int64_t c = 0; c < call.broadcast[s].count; c++) {
      T w[kPrepared + 1];
      for (int b = 0; b < kPrepared; b++) widen_all<S>(call.broadcast[kUnprepared + b], w + b);  // of one value each
      const T gradient = T(sum[c]) * prepare_slope(w, s);
      if (call.broadcast[s].wide) static_cast<float*>(call.sums[s])[c] = float(gradient.v);
      else Storage<S>::narrow(&gradient, static_cast<S*>(call.sums[s]) + c, 1);
    }
  }
}

#ifdef JITACT_PART
template <int part>
void run_part(const Call& call);
#if !JITACT_PART
extern "C" void run_cpu(const Call& call) {
  parts::for_part_of(call, [&]<int part>() { run_part<part>(call); });
}
#endif
template <>
void run_part<JITACT_PART>(const Call& call) {
#else
extern "C" void run_cpu(const Call& call) {
#endif
  for (int w = 0; w < writes(call.op); w++)
    if (kStreams && is_large_output(call, call.written[w])) prefer_huge_pages(call.written[w].data, extent(call, call.written[w]));
  if (summed(call.op) > 0) {
    return dispatch_sums(call.op, [&]<Op op>() {
      for_dtype_of(call, [&]<typename S>() {
#ifdef JITACT_PART
        if constexpr (parts::kIsHere<op, S>)
#endif
        run_sums<op, S>(call);
      });
    });
  }
  const auto run = [](int64_t begin, int64_t end, void* context) {
    const Call& call = *static_cast<const Call*>(context);
    dispatch(call.op, [&]<Op op>() {
      for_dtype_of(call, [&]<typename S>() {
#ifdef JITACT_PART
        if constexpr (parts::kIsHere<op, S>)
#endif
        run_blocks<op, S>(Shared<S>{call}, begin, end, nullptr);
      });
    });
  };
  in_parallel((call.n + kBlock - 1) / kBlock, kGrain, run, &call);
}

}  // namespace jitact::loops
