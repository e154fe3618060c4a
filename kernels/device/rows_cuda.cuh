// How the GPU's loops over rows are chosen and started.
#pragma once

#include "long_columns_cuda.cuh"
#include "row_walk_cuda.cuh"
#ifdef JITACT_PART
#include "parts.cuh"
#endif

namespace jitact::rows {

// The shapes of rows with kernels of their own. Along the last dimension: those that fill vectors, or end within them, or are
// staged. Across it: others, or those whose length has code of its own.
constexpr int kWholeShape = 0, kRaggedShape = 1, kStagedShape = 2, kExactShape = 1;
inline int shape_of(const Call& call) {
  const int64_t size = held_bytes(call);
  if (call.inner > 1) return log_exact_wide(call, size) > 0 ? kExactShape : 0;
  bool in_order = true;  // whether rows are processed as they lie, which those that are staged have to be
#ifdef JITACT_ROW_INPUT
  in_order = !(kMasks && MaskOfRows(call.mask, call.length, true).turns());
#endif
  if (in_order && ShortRows::takes(call)) return kStagedShape;
  return call.length * size % 16 == 0 ? kWholeShape : kRaggedShape;
}
// Whether the kernels for an operation, a type and a shape of rows are compiled here.
#ifdef JITACT_PART
template <Op op, typename S, int shape>
constexpr bool kIsHere = parts::kIsHere<op, S, (parts::kShapes > 1 ? shape : 0)>;
#else
template <Op op, typename S, int shape>
constexpr bool kIsHere = true;
#endif

// The least n with 2^n >= count.
inline int log_of(int64_t count) {
  int n = 0;
  while (int64_t(1) << n < count) n++;
  return n;
}

// Whether long rows are held by fewer threads with kMany vectors each, which leaves more registers for elements.
template <Op op, typename S> constexpr bool holds_many = op == Op::forward;
#ifdef JITACT_ROW_INPUT
template <> constexpr bool holds_many<Op::forward, Precise<Input>> = false;  // a quarter of the memory's rate
template <> constexpr bool holds_many<Op::forward, float> =
    !kWidens || kLongInput > int64_t(kFew * kClusterBlocks * Storage<float>::size) << kLogOfMany;  // else not needed
#endif

// Whether threads with kMany vectors each hold gradients that no two blocks of a multiprocessor can hold in shared memory alone.
template <Op op, typename S> constexpr bool holds_beside = op == Op::backward_from_output;
#ifdef JITACT_ROW_INPUT
template <typename S> constexpr bool holds_beside<Op::backward_from_output, S> = !kHides;  // a bit for each element takes registers
#endif

// How threads share rows of `vectors` vectors. Small blocks, which do not wait for each other, were fastest in measurements. For
// backward large ones were, where they have no more threads, and from the input only if a row takes no more than one. For the
// shortest rows, more threads than hold them: with 4 vectors of 16-bit elements each, and of those with a mask or a conversion
// where a power of two of vectors would lie in as few banks of the cache.
template <Op op, typename S, bool ragged>
Launch shared_by(int64_t vectors) {
  constexpr int64_t each = kFew / reads(op);
  const auto share = [&](int held, int64_t most, int log_most) {
    Launch launch{};
    const int64_t threads = (vectors + most - 1) / most;
    launch.held = held, launch.log_group = std::min(log_of(threads), log_most);
    while (kClusterBlocks << launch.log_group < threads && launch.log_group < kLogThreads) launch.log_group++;
    launch.blocks = int((threads + (1 << launch.log_group) - 1) >> launch.log_group);
    return launch;
  };
  const auto threads_of = [](const Launch& launch) { return launch.blocks << launch.log_group; };
  // Whether threads have less than `percent` of the vectors that they could have.
  const auto have_less = [&](const Launch& launch, int64_t percent) {
    return 100 * vectors < percent * (launch.held / reads(op)) * threads_of(launch);
  };
  const bool is_short = kStagesWhole ? sizeof(S) == 2 && vectors <= 32 : vectors <= 8 || (masks(op) > 0 && vectors == 16);
  Launch launch = share(kFew, op == Op::forward && is_short ? 4 : each, op == Op::forward ? kLogLeast : kLogThreads);
  if constexpr (op != Op::forward) {
    const Launch small = share(kFew, each, kLogLeast);
    if (10 * threads_of(small) < 9 * threads_of(launch) || (op == Op::backward && launch.blocks > 1)) launch = small;
  }
  if constexpr (holds_many<op, S>) {
    const Launch many = share(kMany, kMany, kLogLeast);
    bool has_few = false;  // whether threads have so few of kFew vectors that a fraction of them with kMany was faster
    if constexpr (kStagesWhole && sizeof(S) == 4)
      has_few = vectors > (ragged ? 256 : 64) && have_less(launch, launch.blocks > 1 ? 85 : 62);
    else if constexpr (kStagesWhole && !ragged)
      has_few = launch.blocks > 1 && have_less(launch, 60);
    if (launch.log_group > kLogOfMany && many.log_group <= kLogLeast) {
      launch = many;
    } else if (launch.blocks > kClusterBlocks && many.log_group <= kLogOfMany) {
      launch = many, launch.log_group = kLogOfMany, launch.blocks = kClusterBlocks;  // fewer blocks could not hold all rows
    } else if (has_few && many.blocks == 1 && have_less(many, 95) && !have_less(many, 60)) {
      launch = many;
    }
  }
  if (launch.blocks > kClusterBlocks) {
    constexpr int64_t chunk = kChunk * kThreads;  // vectors of a block's chunk
    const int64_t chunks = (reads(op) * vectors + chunk - 1) / chunk;
    launch.log_group = kLogThreads, launch.held = 0, launch.blocks = kClusterBlocks;  // fewer leave multiprocessors idle
    launch.chunks = int((chunks + launch.blocks - 1) / launch.blocks);
    if (holds_beside<op, S> && launch.chunks > kChunksOfTwo)
      launch.held = kMany, launch.log_group = kLogOfMany, launch.chunks = 0;
  }
  launch.log_threads = std::max(launch.log_group, kLogLeast);
  launch.threads = 1 << launch.log_threads, launch.group = 1 << launch.log_group;
  return launch;
}

// How many clusters of a launch run at the same time on the current device. Queried once per launch shape.
template <auto kernel>
cudaError_t clusters_at_once(const Launch& launch, const cudaLaunchConfig_t& config, int64_t& count) {
  static int64_t known[kLogThreads - kLogLeast + 1][kMostChunks + 1][kClusterBlocks + 1][gpu::kDevices];
  cudaError_t error = cudaSuccess;
  count = gpu::of_device(known[launch.log_threads - kLogLeast][launch.chunks][launch.blocks], [&]() -> int64_t {
    int found = 0;
    int64_t processors = 1;
    const int shared = int(gpu::device_has(cudaDevAttrMaxSharedMemoryPerBlockOptin)) - int(sizeof(Exchange<0, 4>)) * 4;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (launch.blocks == 1) {
      processors = gpu::device_has(cudaDevAttrMultiProcessorCount);
      if (!error) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found, kernel, launch.threads, config.dynamicSmemBytes);
    } else {
      if (!error && launch.blocks > 8) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (!error) error = cudaOccupancyMaxActiveClusters(&found, kernel, &config);
    }
    return error ? 0 : found * processors;  // 0 is not cached
  });
  if (error) return error;
  return count > 0 ? cudaSuccess : cudaErrorInvalidValue;
}

// Takes what a launch needs of a call but for how threads share rows.
template <Op op, typename S>
void take(Launch& launch, const Call& call) {
  launch.rows = call.outer * call.inner, launch.length = int(call.length), launch.scale = call.scale, launch.written = call.written;
  launch.unit = unit_of<S>(call.scale);
  launch.policy = gpu::policy_of_reads(launch.rows * call.length * int64_t(sizeof(S)) * (reads(op) + 1));
  for (int r = 0; r < reads(op); r++) launch.read[r] = call.read[r];
  if (op != Op::backward_from_output) launch.outside[reads(op) - 1] = lowest<S>(call.scale);
  if constexpr (kOperands > 0) launch.operands = operands_of(call);
#ifdef JITACT_ROW_INPUT
  if constexpr (masks(op) > 0) {
    launch.mask = MaskOfRows(call.mask, call.length, op == Op::forward || !call.gives_shares);
    launch.gives_shares = call.gives_shares;
    if constexpr (op == Op::forward) launch.outside[1] = kAdds ? lowest<MaskBits>(1) : 0;
  }
#endif
}

// Whether a row further on is fetched: where that was faster in measurements, and only if threads share a single row.
template <Op op, typename S, bool ragged, int held>
bool fetches_ahead(const Launch& launch, const Call& call) {
  if constexpr (!kFetchesAhead<op, S, ragged, held>) return false;
#ifdef JITACT_ROW_INPUT
  constexpr int64_t least = !kMasks ? 0 : kAdds && sizeof(MaskBits) == 2 ? 98304 : 49152;
  return launch.threads == launch.group && call.length >= least;
#else
  constexpr bool is_heavy = op != Op::forward && sizeof(S) == 4 && ragged && Fold<Single>::as_it_is;
  const bool is_uneven = launch.blocks > 8 && launch.blocks < kClusterBlocks;  // such clusters leave multiprocessors idle
  return launch.log_group > kLogLeast && (is_uneven || (is_heavy && launch.blocks == 7));
#endif
}

template <Op op, typename S, bool ragged, int held>
cudaError_t start(Launch& launch, const Call& call, cudaStream_t stream) {
  take<op, S>(launch, call);
  constexpr int each = is_beside(op, held) ? held : held / reads(op);
  const int64_t threads = int64_t(launch.blocks) * launch.group;
  for (const int most : {each, each / 2})
    if (launch.nearly_full == 0 && (most - 1) * Storage<S>::size * threads <= call.length &&
        vectors_touched(call.length, Storage<S>::size) <= most * threads)
      launch.nearly_full = most;

  const int slots = is_beside(op, held) ? held : held ? 0 : kChunk * launch.chunks;  // of a thread, in shared memory
  if constexpr (is_beside(op, held))
    if (const cudaError_t error = gpu::prefer_shared<walk_rows<op, S, ragged, held>>()) return error;
  const int64_t bytes = int64_t(sizeof(Words)) * slots * launch.threads;
  Clusters shape(launch.blocks, launch.threads, bytes, stream);
  const int64_t rows_of_cluster = launch.threads / launch.group;
  int64_t clusters = (call.outer + rows_of_cluster - 1) / rows_of_cluster;
  const bool ahead = fetches_ahead<op, S, ragged, held>(launch, call);
  if (!held || launch.blocks > 8 || ahead) {
    int64_t at_once = 0;
    const cudaError_t error = clusters_at_once<walk_rows<op, S, ragged, held>>(launch, shape.config, at_once);
    if (error != cudaSuccess) return error;
    if (!held) clusters = std::min(clusters, at_once);
    if (ahead) launch.ahead = at_once / 2;  // measured: less or more is slower
  }
  launch.at_once = clusters * rows_of_cluster;
  shape.count(clusters);
  return shape.start<walk_rows<op, S, ragged, held>>(launch);
}

// Starts a kernel of blocks that have `each` of `count` rows, or planes, in shared memory.
template <Op op, typename S, auto kernel, typename Tile>
cudaError_t start_staged(const Tile& tile, int64_t count, int each, int threads, const Call& call, cudaStream_t stream) {
  if (const cudaError_t error = gpu::prefer_shared<kernel>()) return error;
  StagedLaunch<Tile> launch{};
  take<op, S>(launch, call);
  launch.tile = tile, launch.blocks = 1;
  launch.log_group = tile.log_group, launch.group = 1 << tile.log_group;
  Clusters shape(1, threads, 0, stream);
  shape.count((count - 1) / each + 1);
  return shape.start<kernel>(launch);
}

template <Op op, typename S>
cudaError_t start_short(const Call& call, cudaStream_t stream) {
  const ShortRows rows(call);
  cudaError_t error = cudaErrorInvalidValue;
  const auto start_if = [&]<int vectors>() {
    if (rows.vectors == of_each(vectors, reads(op)))
      error = start_staged<op, S, walk_short_rows<op, S, vectors>>(rows, call.outer, rows.rows(), kShortRowThreads, call, stream);
  };
  start_if.template operator()<kFewOfRow>(), start_if.template operator()<kMidOfRow>(), start_if.template operator()<kManyOfRow>();
  if constexpr (kStagesWhole) start_if.template operator()<kFewOfWhole>(), start_if.template operator()<kManyOfWhole>();
  else start_if.template operator()<kLowOfRow>();
  return error;
}

template <Op op, typename S, bool ragged>
cudaError_t start_along(const Call& call, cudaStream_t stream) {
  Launch launch = shared_by<op, S, ragged>(vectors_touched(call.length, Storage<S>::size));
  if (launch.held == kFew) return start<op, S, ragged, kFew>(launch, call, stream);
  if constexpr (holds_many<op, S> || holds_beside<op, S>)
    if (launch.held == kMany) return start<op, S, ragged, kMany>(launch, call, stream);
#ifdef JITACT_ROW_INPUT
  if constexpr (op == Op::forward) return cudaErrorInvalidValue;
  else
#endif
  return start<op, S, ragged, 0>(launch, call, stream);
}

template <Op op, typename S, bool exact>
cudaError_t start_across(const Call& call, cudaStream_t stream) {
  if constexpr (sizeof(S) == 2 && !exact) {
    if (const SmallPlanes planes(call); planes.count > 0) {
      const auto start = [&]<auto kernel>() {
        return start_staged<op, S, kernel>(planes, call.outer, planes.count, kPlaneThreads, call, stream);
      };
      if (planes.vectors == kFewOfPlane) return start.template operator()<walk_planes<op, S, kFewOfPlane>>();
      return start.template operator()<walk_planes<op, S, kManyOfPlane>>();
    }
  }
  return start_columns<op, S, exact>(call, stream);
}

#if !JITACT_PART
int64_t workspace_bytes(const Call& call) {
  return loops::dispatch_dtype(call.dtype, [&]<typename S>() -> int64_t {
    if constexpr (kIsBuilt<S> && kHasAcross) return strip_bytes<S>(call);
    else return 0;
  });
}
#endif

#ifdef JITACT_PART
template <int part>
const char* run_part(const Call& call, void* stream);
#if !JITACT_PART
const char* run_cuda(const Call& call, void* stream) {
  const char* error = nullptr;
  parts::for_part_of(call, [&]<int part>() { error = run_part<part>(call, stream); });
  return error;
}
#endif
template <>
const char* run_part<JITACT_PART>(const Call& call, void* stream) {
#else
const char* run_cuda(const Call& call, void* stream) {
#endif
  cudaError_t error = cudaErrorInvalidValue;
  const auto s = static_cast<cudaStream_t>(stream);
  // What depends on the part is here: functions of the same name, in several parts, would become one.
  const auto start_if = [&]<Op op, typename S>() {
    if constexpr (exists(op)) {
      if (call.op != op) return;
      const int found = shape_of(call);
      const auto start_shape = [&]<int shape>() {
        if constexpr (kIsHere<op, S, shape>) {
          if (found != shape) return;
          if constexpr (kHasAcross && shape != kStagedShape)
            if (call.inner > 1) error = start_across<op, S, shape == kExactShape>(call, s);
          if constexpr (kHasAlong && shape != kStagedShape)
            if (call.inner == 1) error = start_along<op, S, shape == kRaggedShape>(call, s);
          if constexpr (kHasAlong && shape == kStagedShape && stages(op) && !kIsPrecise<S>) error = start_short<op, S>(call, s);
        }
      };
      start_shape.template operator()<0>(), start_shape.template operator()<1>(), start_shape.template operator()<kStagedShape>();
    }
  };
#ifdef JITACT_ROW_INPUT
  if (call.length < kLongInput) start_if.template operator()<Op::forward, Computed<Op::forward>>();
  else start_if.template operator()<Op::forward, ComputedIfLong>();
  start_if.template operator()<Op::backward_from_output, Output>();
#else
  loops::dispatch_dtype(call.dtype, [&]<typename S>() {
    if constexpr (kIsBuilt<S>) {
      start_if.template operator()<Op::forward, S>();
      start_if.template operator()<Op::backward, S>();
      start_if.template operator()<Op::backward_from_output, S>();
    }
  });
#endif
  return message(error);
}

}  // namespace jitact::rows
