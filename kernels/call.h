// What binding.cpp hands to the loops.
#pragma once

#include <cstdint>

// What a kernel file's functions get beside x and the parameters, as the loader says:
//
//   JITACT_WEIGHTS=W   W tensors of weights, of which the first JITACT_LEARNED have gradients; with JITACT_CHANNELS, a weight
//                      may have one value for each channel
//   JITACT_RANDOM      a random number for each element, drawn from a seed
#if defined(JITACT_WEIGHTS) || defined(JITACT_RANDOM)
#define JITACT_EXTRAS
#endif

namespace jitact {

enum class Op { forward, forward_bit, backward, backward_from_output, backward_from_bit, backward_weights };
enum class Dtype { f64, f32, f16, bf16 };

struct Call {
  Op op;
  Dtype dtype;
  int64_t n;             // elements
  const void* a;         // x, or dy in backward
  const void* b;         // what backward reads beside dy: x, y or the mask; null in forward
  void* out;             // y, or dx in backward; may be null in backward_weights
  void* mask;            // written by forward_bit alone
  const double* params;  // JITACT_PARAMS values

#ifdef JITACT_WEIGHTS
  const void* weights[JITACT_WEIGHTS];  // element i of memory has the weights at place i / inner % channels
  int64_t channels, inner;
  void* gradients[JITACT_LEARNED];  // of the weights, written by backward_weights alone
  void* workspace;                  // for backward_weights on a GPU
#endif
#ifdef JITACT_RANDOM
  const int64_t* seed;  // where the other tensors are
#endif
};

#ifdef JITACT_EXTRAS
#define JITACT_RUN_CPU run_cpu_with_extras
#define JITACT_RUN_CUDA run_cuda_with_extras
#else
#define JITACT_RUN_CPU run_cpu
#define JITACT_RUN_CUDA run_cuda
#endif

void JITACT_RUN_CPU(const Call& call);
#ifdef JITACT_CUDA
// Queues the call on `stream` of the current device; returns null or CUDA's message.
const char* JITACT_RUN_CUDA(const Call& call, void* stream);
#ifdef JITACT_WEIGHTS
// What backward_weights needs of workspace on a GPU.
int64_t workspace_bytes(const Call& call);
#endif
#endif

}  // namespace jitact
