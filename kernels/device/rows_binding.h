// The operators of an activation of rows, which binding.cpp includes where the kernel file folds rows. For an activation named N
// they are
//
//   jitact::N_forward(Tensor x, int dim, float scale) -> Tensor
//   jitact::N_backward(Tensor dy, Tensor x, int dim, float scale) -> Tensor
//   jitact::N_backward_from_output(Tensor dy, Tensor y, int dim, float scale) -> Tensor
//
// for contiguous tensors of float32, float16 or bfloat16, and a scale that is finite and not 0; on a GPU for tensors that begin on
// 16 bytes, and rows along the last dimension that touch no more than rows::kMostVectors vectors of all tensors, or along others
// as rows::takes_columns says. All else Python gives to PyTorch's operators.
#pragma once

namespace jitact::binding {

template <rows::Op op>
void row_operator(StableIValue* stack, uint64_t, uint64_t) {
  std::vector<Tensor> read;
  for (int r = 0; r < rows::reads(op); r++) read.emplace_back(stack[r]);
  const Tensor& x = read.back();
  double scale;
  std::memcpy(&scale, stack + rows::reads(op) + 1, sizeof scale);
  int64_t dim = int64_t(stack[rows::reads(op)]);
  if (dim < 0) dim += x.dim();
  check(dim >= 0 && dim < x.dim(), "dim is no dimension of the tensor");
  check(std::isfinite(scale) && float(scale) != 0, "the scale must be finite and not 0");
  rows::Call call{};
  call.op = op;
  call.dtype = dtype_of(x);
  check(call.dtype != Dtype::f64, "expected a float32, float16 or bfloat16 tensor");
  call.length = x.sizes()[dim];
  call.outer = call.inner = 1;
  for (int64_t i = 0; i < x.dim(); i++)
    if (i != dim) (i < dim ? call.outer : call.inner) *= x.sizes()[i];
  call.scale = float(scale);
  for (int r = 0; r < rows::reads(op); r++) {
    const Tensor& t = read[r];
    check(same_shape(t, x) && same_device(t, x) && dtype_of(t) == call.dtype, "dy must be as the other tensor is");
    check(t.is_contiguous(), "expected contiguous tensors");
    check_allocated(t);
    call.read[r] = t.const_data();
  }
  Tensor result = empty_like(x);
  call.written = result.data();
  if (x.numel() > 0) {
#ifdef JITACT_CUDA
    if (x.device_type() == aoti_torch_device_type_cuda()) {
      const int64_t vectors = rows::reads(op) * rows::vectors_touched(call.length, 16 / bytes_of(call.dtype));
      if (call.inner == 1) check(vectors <= rows::kMostVectors, "expected rows of 3 MB at most, of all tensors");
      else check(rows::takes_columns(call.length, call.inner, bytes_of(call.dtype), rows::reads(op)),
                 "expected rows of 49,152 elements at most, of all tensors, side by side on 16 bytes");
      for (int r = 0; r < rows::reads(op); r++)
        check(uintptr_t(call.read[r]) % 16 == 0, "expected tensors that begin on 16 bytes");
      const CudaStream stream(x);
      const char* error = rows::run_cuda(call, stream.get());
      check(error == nullptr, error);
    } else
#endif
      rows::run_cpu(call);
  }
  stack[0] = result.release();
}

void register_operators(const std::string& name, const std::string&, const std::string&) {
  const Registration registration(name);
  const std::string others = ", int dim, float scale";
  registration.add("_forward", "Tensor x" + others, "Tensor", row_operator<rows::Op::forward>);
  registration.add("_backward", "Tensor dy, Tensor x" + others, "Tensor", row_operator<rows::Op::backward>);
  registration.add("_backward_from_output", "Tensor dy, Tensor y" + others, "Tensor",
                   row_operator<rows::Op::backward_from_output>);
}

}  // namespace jitact::binding
