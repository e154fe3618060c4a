// What binding.cpp hands to the loops.
#pragma once

#include <cstdint>

namespace jitact {

enum class Op { forward, forward_bit, backward, backward_from_output, backward_from_bit };
enum class Dtype { f64, f32, f16, bf16 };

struct Call {
  Op op;
  Dtype dtype;
  int64_t n;             // elements
  const void* a;         // x, or dy in backward
  const void* b;         // what backward reads beside dy: x, y or the mask; null in forward
  void* out;             // y, or dx in backward
  void* mask;            // written by forward_bit alone
  const double* params;  // JITACT_PARAMS values
};

void run_cpu(const Call& call);
#ifdef JITACT_CUDA
// Queues the call on `stream` of the current device; returns null or CUDA's message.
const char* run_cuda(const Call& call, void* stream);
#endif

}  // namespace jitact
