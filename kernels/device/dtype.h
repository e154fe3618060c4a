// The types of elements in memory that kernels compute.
#pragma once

#include "number.cuh"

namespace jitact::loops {

enum class Dtype { f64, f32, f16, bf16 };

// 16-bit elements as they lie in memory.
struct Half { uint16_t bits; };
struct Bfloat16 { uint16_t bits; };

// Calls f.template operator()<S>() for the dtype of the call.
template <typename F>
auto dispatch_dtype(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::f64: return f.template operator()<double>();
    case Dtype::f32: return f.template operator()<float>();
    case Dtype::f16: return f.template operator()<Half>();
    default: return f.template operator()<Bfloat16>();
  }
}

}  // namespace jitact::loops
