// The element types of tensors that kernels support.
#pragma once

#include "number.cuh"

namespace jitact::loops {

enum class Dtype { f64, f32, f16, bf16 };

struct Half { uint16_t bits; };  // storage only
struct Bfloat16 { uint16_t bits; };

constexpr int64_t bytes_of(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

// Calls f.template operator()<S>() for the dtype of the call.
template <typename Call, typename F>
auto for_dtype_of(const Call& call, const F& f) {
  if (call.dtype == Dtype::f64) return f.template operator()<double>();
  if (call.dtype == Dtype::f32) return f.template operator()<float>();
  if (call.dtype == Dtype::f16) return f.template operator()<Half>();
  return f.template operator()<Bfloat16>();
}
// The same, given only a dtype.
template <typename F>
auto dispatch_dtype(Dtype dtype, const F& f) {
  struct { Dtype dtype; } call{dtype};
  return for_dtype_of(call, f);
}

}  // namespace jitact::loops
