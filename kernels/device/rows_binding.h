// The operators of an activation of rows, which binding.cpp includes where the kernel file has a fold. For an activation
// named N they are
//
//   jitact::N_forward(Tensor x) -> Tensor
//   jitact::N_backward_from_output(Tensor dy, Tensor y) -> Tensor
//
// for contiguous CUDA tensors of float32, float16 or bfloat16 whose rows, along the last dimension, are whole 16-byte vectors.
// What else there is, Python gives to PyTorch's operators.
#pragma once

namespace jitact::binding {

template <rows::Op op>
void row_operator(StableIValue* stack, uint64_t, uint64_t) {
  std::vector<Tensor> read;
  for (int r = 0; r < rows::reads(op); r++) read.emplace_back(stack[r]);
  const Tensor& x = read.back();
  check(x.device_type() == aoti_torch_device_type_cuda(), "expected CUDA tensors");
  check(x.dim() > 0, "expected a tensor with a dimension");
  rows::Call call{op, dtype_of(x)};
  check(call.dtype != Dtype::f64, "expected a float32, float16 or bfloat16 tensor");
  const int64_t length = x.sizes()[x.dim() - 1], bytes = length * (call.dtype == Dtype::f32 ? 4 : 2);
  call.vectors = bytes / rows::kVectorBytes;
  check(bytes % rows::kVectorBytes == 0 && call.vectors <= rows::kMostVectors, "rows must be of 1 to 16384 16-byte vectors");
  call.rows = length ? x.numel() / length : 0;
  for (int r = 0; r < rows::reads(op); r++) {
    const Tensor& t = read[r];
    check(same_shape(t, x) && same_device(t, x) && dtype_of(t) == call.dtype, "dy must be as y is");
    check_allocated(t);
    call.read[r] = t.const_data();
    check(t.is_contiguous() && uintptr_t(call.read[r]) % rows::kVectorBytes == 0, "expected contiguous, aligned tensors");
  }
  Tensor result = empty_like(x);
  call.written = result.data();
#ifdef JITACT_CUDA
  if (call.rows > 0 && length > 0) {
    const CudaStream stream(x);
    const char* error = rows::run_cuda(call, stream.get());
    check(error == nullptr, error);
  }
#endif
  stack[0] = result.release();
}

void register_operators(const std::string& name, const std::string&, const std::string&) {
  const Registration registration(name);
  registration.add("_forward", "Tensor x", "Tensor", row_operator<rows::Op::forward>);
  registration.add("_backward_from_output", "Tensor dy, Tensor y", "Tensor", row_operator<rows::Op::backward_from_output>);
}

}  // namespace jitact::binding
