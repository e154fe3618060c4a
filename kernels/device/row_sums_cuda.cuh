// What the GPU's loops over contiguous and strided rows share: how launches are configured, how elements and peaks are scaled, and
// how the values of threads are combined.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "early_cuda.cuh"
#include "memory_cuda.cuh"
#include "rows_call.h"

namespace jitact::rows {

using loops::Bfloat16;
using loops::Divisor;
using loops::Half;
using loops::Storage;
using loops::Words;

// The configuration of a launch in clusters of blocks.
struct Clusters {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};

  Clusters(int blocks, int threads, int64_t bytes, cudaStream_t stream) {
    cudaLaunchAttribute& shape = attributes[0];
    shape.id = cudaLaunchAttributeClusterDimension;
    shape.val.clusterDim.x = blocks;
    shape.val.clusterDim.y = shape.val.clusterDim.z = 1;
    config.blockDim = dim3(unsigned(threads));
    config.dynamicSmemBytes = size_t(bytes);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = blocks > 1;
    count(1);
  }
  void count(int64_t clusters) {
    config.gridDim = dim3(unsigned(clusters) * (config.numAttrs ? attributes[0].val.clusterDim.x : 1));
  }
  // Called once, after count.
  template <auto kernel, typename Argument>
  cudaError_t start(const Argument& argument) {
    if (early::waits_for_last<kernel>()) attributes[config.numAttrs++] = early::attribute();
    return cudaLaunchKernelEx(&config, kernel, argument);
  }
};

inline const char* message(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // clears the error, which the next caller would see otherwise
  return cudaGetErrorString(error);
}

template <typename S>
constexpr bool kIsHalf = std::is_same_v<S, Half>;
// A word of infinities in the dtype, with the sign that makes them -inf when scaled.
template <typename S>
uint32_t lowest(float scale) {
  const uint32_t bits = sizeof(S) == 4 ? 0x7f800000u : kIsHalf<S> ? 0x7c007c00u : 0x7f807f80u;
  const uint32_t signs = sizeof(S) == 4 ? 0x80000000u : 0x80008000u;
  return scale > 0 ? bits | signs : bits;
}

// Whether elements are of 16 bits, but computed as float32; and whether they are scaled as part of their weights' computation, as
// other 16-bit ones are.
template <typename S>
constexpr bool kIsPrecise = sizeof(S) == 2 && std::is_same_v<typename Storage<S>::T, Single>;
template <typename S>
constexpr bool kScaledByWeights = sizeof(S) == 2 && !kIsPrecise<S>;
template <typename S, typename T>
JITACT_DEVICE Weights<T> weights_beside(T peak, T scale) {
  if constexpr (kScaledByWeights<S>) return Weights<T>(peak, scale);
  else return Weights<T>(peak);
}
// For unscaled elements: the element that the scale makes +-1, and the conversion between a peak and the peak with the
// sign that the scale gives it, in both directions.
template <typename S>
float unit_of(float scale) { return kScaledByWeights<S> ? std::min(1 / std::fabs(scale), 0x1p107f) : 1; }
template <typename S, typename T>
JITACT_DEVICE T signed_peak(T peak, T scale) { return kScaledByWeights<S> && scale < 0 ? -peak : peak; }
// In these units: an element at kLowest has weight 0 relative to any peak within kFar.
constexpr float kFar = 0x1p19f, kLowest = -0x1.8p19f;

// Sets aside the 16-bit elements at the peaks of two rows: words get the lowest element in their place, and they are counted.
template <typename S>
class PeaksApart {
 public:
  using T = typename Storage<S>::T;

  // The peaks, and a word of lowest elements.
  JITACT_DEVICE PeaksApart(T low, T high, uint32_t lowest) : peaks_(Storage<S>::narrow_pair(low, high)), lowest_(lowest) {}
  JITACT_DEVICE uint32_t without(uint32_t word) {
    const uint32_t equal = Storage<S>::equal_pair(word, peaks_);
    counted_ -= equal;
    return (word & ~equal) | (lowest_ & equal);
  }
  // How many there were in the lower halves, and in the higher ones: of each less than 2^16.
  JITACT_DEVICE T low() const { return float(counted_ & 0xffffu); }
  JITACT_DEVICE T high() const { return float(((counted_ >> 16) + counted_) & 0xffffu); }

 private:
  const uint32_t peaks_, lowest_;
  uint32_t counted_ = 0;  // low + 2^16 (high - low)
};

// Reductions: combine the values of two threads.
struct Highest {
  static constexpr float neutral(int) { return -INFINITY; }
  template <typename T>
  JITACT_DEVICE void operator()(T (&t)[1], const T (&other)[1]) const { t[0] = max(t[0], other[0]); }
};
struct Totals {
  static constexpr float neutral(int) { return 0; }
  template <typename T, int n>
  JITACT_DEVICE void operator()(T (&t)[n], const T (&other)[n]) const {
    JITACT_UNROLL for (int i = 0; i < n; i++) t[i] += other[i];
  }
};
// All parts of the sums that backward needs.
template <typename T>
constexpr int kParts = kTerms * Adding<T>::parts;
struct Joined {
  static constexpr float neutral(int) { return 0; }
  template <typename T, int n>
  JITACT_DEVICE void operator()(T (&t)[n], const T (&other)[n]) const {
    Adding<T>::join(t, other);  // not in the loop, which would change how nvcc schedules the code around it
    JITACT_UNROLL for (int k = Adding<T>::parts; k < n; k += Adding<T>::parts) Adding<T>::join(t + k, other + k);
  }
};
template <typename T>
JITACT_DEVICE void add_terms(T (&to)[kParts<T>], const Many<T, kTerms>& terms, bool is_of_row) {
  JITACT_UNROLL for (int k = 0; k < kTerms; k++)
    Adding<T>::add(to + k * Adding<T>::parts, kVanishing || is_of_row ? terms.of[k] : T(0));
}
template <typename T>
JITACT_DEVICE Sums<T> sums_of(const T (&parts)[kParts<T>]) {
  T totals[kTerms];
  JITACT_UNROLL for (int k = 0; k < kTerms; k++) totals[k] = Adding<T>::total(parts + k * Adding<T>::parts);
  return Sums<T>(totals);
}

}  // namespace jitact::rows
