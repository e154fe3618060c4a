// The operators of activations of rows; binding.cpp includes this if the kernel file is of that kind. For an activation named N
// they are
//
//   jitact::N_forward(Tensor x, int dim, float scale) -> Tensor
//   jitact::N_backward(Tensor dy, Tensor x, int dim, float scale) -> Tensor
//   jitact::N_backward_from_output(Tensor dy, Tensor y, int dim, float scale) -> Tensor
//
// for contiguous tensors of float32, float16 or bfloat16, and a finite scale other than 0; on a GPU for tensors aligned to
// 16 bytes, and rows along the last dimension that span at most rows::kMostVectors vectors in all tensors, or along another one
// if rows::takes_columns. For all other calls, Python uses PyTorch's operators. A build for one type of x, one of the result
// and a mask (see rows_call.h) registers
//
//   jitact::N_forward(Tensor x, Tensor mask, int dim, float scale) -> Tensor                   or without the mask
//   jitact::N_backward_from_output(Tensor dy, Tensor y, int dim, float scale) -> Tensor        if the types differ
//   jitact::N_backward_from_output(Tensor dy, Tensor y, Tensor mask, bool gives_shares, int dim, float scale) -> Tensor
//                                                                                              if the mask is bool
//
// for rows along the last dimension, on a GPU for lengths as rows::is_held says. The mask has four dimensions: three whose
// product is the number of x's rows, and one for the elements of a row, with stride 1 or 0. Whether outputs are shares of their
// row: see rows::has_to_hide.
//
// A file's operands come before `dim`: for each Row a float32 tensor with one value for each row, in memory order, and then the
// numbers. Backward of a file with Rows returns (Tensor, Tensor), of which the second has the gradients of one such tensor
// after those of another.
#pragma once

#include "tensors.h"

namespace jitact::binding {
namespace {

#ifdef JITACT_ROW_INPUT
// torch's code for the dtype with elements E.
template <typename E>
int32_t dtype_of_elements() {
  if constexpr (std::is_same_v<E, float>) return aoti_torch_dtype_float32();
  else if constexpr (std::is_same_v<E, Half>) return aoti_torch_dtype_float16();
  else if constexpr (std::is_same_v<E, Bfloat16>) return aoti_torch_dtype_bfloat16();
  else if constexpr (std::is_same_v<E, bool>) return aoti_torch_dtype_bool();
  else if constexpr (std::is_same_v<E, uint8_t>) return aoti_torch_dtype_uint8();
  else if constexpr (std::is_same_v<E, int8_t>) return aoti_torch_dtype_int8();
  else if constexpr (std::is_same_v<E, int16_t>) return aoti_torch_dtype_int16();
  else if constexpr (std::is_same_v<E, int32_t>) return aoti_torch_dtype_int32();
  else return aoti_torch_dtype_int64();
}

template <rows::Op op>
void check_dtype(const Tensor& x) {
  check(x.dtype() == dtype_of_elements<rows::Read<op>>(), "expected a tensor of the dtype that this is built for");
}
template <rows::Op op>
Tensor result_like(const Tensor& x) {
  return empty(x.dim(), x.sizes(), x.strides(), dtype_of_elements<rows::Written<op>>(), x);
}
template <rows::Op op>
const char* refused_by_a_gpu(const rows::Call& call) {
  return rows::is_held<op>(call.length) ? nullptr : "expected rows that a cluster holds";
}

void take_mask(const Tensor& mask, rows::Call& call) {
  if constexpr (rows::kMasks) {
    check(mask.dim() == 4 && mask.dtype() == dtype_of_elements<rows::MaskElement>(), "expected a mask of four dimensions");
    const int64_t *sizes = mask.sizes(), *strides = mask.strides();
    check(sizes[0] * sizes[1] * sizes[2] == call.outer && sizes[3] == call.length, "the mask must have the rows of x");
    check(call.outer < int64_t(1) << 31, "expected fewer than 2^31 rows");
    check(strides[3] == 0 || strides[3] == 1, "expected a mask whose rows lie in one piece");
    call.mask = {mask.const_data(), {sizes[1], sizes[2]}, {strides[0], strides[1], strides[2]}, strides[3], call.scale};
    if (rows::kAdds) call.scale = 1;
  }
}
#else
template <rows::Op>
void check_dtype(const Tensor& x) {
  check(dtype_of(x) != Dtype::f64, "expected a float32, float16 or bfloat16 tensor");
  const bool is_built = loops::dispatch_dtype(dtype_of(x), [&]<typename S>() { return rows::kIsBuilt<S>; });
  check(is_built, "expected a tensor of the dtype that this is built for");
}
template <rows::Op>
Tensor result_like(const Tensor& x) { return empty_like(x); }
// Why the GPU kernels do not support such rows, or null.
template <rows::Op op>
const char* refused_by_a_gpu(const rows::Call& call) {
  const int64_t size = bytes_of(call.dtype), vectors = rows::reads(op) * rows::vectors_touched(call.length, 16 / size);
  if (call.inner == 1) return vectors <= rows::kMostVectors ? nullptr : "expected rows of 3 MB at most, of all tensors";
  return rows::takes_columns(call, size)
             ? nullptr
             : "expected rows across memory of fewer than 2^30 elements, whose first elements have less than 16 GB";
}
void take_mask(const Tensor&, rows::Call&) {}
#endif

template <rows::Op op>
void row_operator(StableIValue* stack, uint64_t, uint64_t) {
  constexpr int masked = rows::reads(op) + rows::masks(op), tensors = masked + rows::kRowValues;
  Tensor read[tensors];
  for (Tensor& tensor : read) tensor = Tensor(*stack++);
  const StableIValue* number = stack;
  stack -= tensors;
  const Tensor& x = read[rows::reads(op) - 1];
  rows::OperatedCall call{};
  for (int i = 0; i < rows::kNumbers; i++) {
    double value;
    std::memcpy(&value, number++, sizeof value);
    call.operands.numbers[i] = float(value);
  }
#ifdef JITACT_ROW_INPUT
  if (rows::kHides && op != rows::Op::forward) call.gives_shares = bool(*number++);
#endif
  int64_t dim = int64_t(number[0]);
  double scale;
  std::memcpy(&scale, number + 1, sizeof scale);
  if (dim < 0) dim += x.dim();
  check(dim >= 0 && dim < x.dim(), "dim is no dimension of the tensor");
  check(std::isfinite(scale) && float(scale) != 0, "the scale must be finite and not 0");
  check_dtype<op>(x);
  call.op = op;
  call.length = x.sizes()[dim];
  call.outer = call.inner = 1;
  for (int64_t i = 0; i < x.dim(); i++)
    if (i != dim) (i < dim ? call.outer : call.inner) *= x.sizes()[i];
  call.scale = float(scale);
  check(call.inner > 1 ? rows::kHasAcross : rows::kHasAlong, "expected rows along a dimension that this is built for");
  for (int r = 0; r < tensors; r++) {
    const Tensor& t = read[r];
    check_allocated(t);
    if (r < rows::reads(op)) {
      check(same_shape(t, x) && same_device(t, x) && t.dtype() == x.dtype(), "dy must be as the other tensor is");
      check(t.is_contiguous(), "expected contiguous tensors");
      call.read[r] = t.const_data();
    } else if (r < masked) {
      check(same_device(t, x), "the mask must be where x is");
      take_mask(t, call);
    } else {
      check(same_device(t, x) && t.dtype() == aoti_torch_dtype_float32(), "values of rows must be float32, and where x is");
      check(t.is_contiguous() && t.numel() == call.outer * call.inner, "expected one value for each row of x");
      call.operands.of_rows[r - masked] = static_cast<const float*>(t.const_data());
    }
  }
  Tensor result = result_like<op>(x);
  call.dtype = dtype_of(result);
  call.written = result.data();
  constexpr bool has_gradients = rows::kRowValues > 0 && op != rows::Op::forward;
  Tensor gradients;
  if constexpr (has_gradients) {
    const int64_t sizes[] = {rows::kRowValues, call.outer * call.inner}, strides[] = {sizes[1], 1};
    gradients = empty(2, sizes, strides, aoti_torch_dtype_float32(), x);
    call.operands.gradients = static_cast<float*>(gradients.data());
  }
  if (x.numel() > 0) {
#ifdef JITACT_CUDA
    if (x.device_type() == aoti_torch_device_type_cuda()) {
      const char* refused = refused_by_a_gpu<op>(call);
      check(refused == nullptr, refused);
      for (int r = 0; r < rows::reads(op); r++)
        check(uintptr_t(call.read[r]) % 16 == 0, "expected tensors that begin on 16 bytes");
      const CudaStream stream(x);
      Tensor workspace;
      if (const int64_t bytes = rows::workspace_bytes(call))
        workspace = empty_bytes(bytes, x), call.workspace = workspace.data();
      const char* error = rows::run_cuda(call, stream.get());
      check(error == nullptr, error);
    } else
#endif
      on_cpu([&] { rows::run_cpu(call); });
  }
  stack[0] = result.release();
  if (has_gradients) stack[1] = gradients.release();
}

void register_operators(const char* name, const char*, const char* operands) {
  const Registration registration(name);
  const char *others = ", int dim, float scale", *x = rows::masks(rows::Op::forward) ? "Tensor x, Tensor mask" : "Tensor x";
  const char *dy = "Tensor dy, Tensor y", *of_backward = others;
  const char* gradients = rows::kRowValues > 0 ? "(Tensor, Tensor)" : "Tensor";
  if constexpr (rows::exists(rows::Op::forward))
    registration.add("_forward", Text(x, operands, others), "Tensor", row_operator<rows::Op::forward>);
#ifndef JITACT_ROW_INPUT
  if constexpr (rows::exists(rows::Op::backward))
    registration.add("_backward", Text("Tensor dy, Tensor x", operands, others), gradients, row_operator<rows::Op::backward>);
#else
  if (rows::kHides) dy = "Tensor dy, Tensor y, Tensor mask", of_backward = ", bool gives_shares, int dim, float scale";
#endif
  if constexpr (rows::exists(rows::Op::backward_from_output))
    registration.add("_backward_from_output", Text(dy, operands, of_backward), gradients,
                     row_operator<rows::Op::backward_from_output>);
}

}  // namespace
}  // namespace jitact::binding
