// The one registration of operators, on torch's stable ABI. For an activation named N with parameters p it registers
//
//   jitact::N_forward(Tensor x, float p...) -> Tensor
//   jitact::N_forward_(Tensor(a!) x, float p...) -> ()
//   jitact::N_backward(Tensor dy, Tensor x, float p...) -> Tensor
//   jitact::N_backward_from_output(Tensor dy, Tensor y, float p...) -> Tensor        if it can keep the output
//   jitact::N_forward_bit(Tensor x, float p...) -> (Tensor y, Tensor mask)           if one bit is enough
//   jitact::N_forward_bit_(Tensor(a!) x, float p...) -> Tensor mask
//   jitact::N_backward_from_bit(Tensor dy, Tensor mask, float p...) -> Tensor
//
// A result has the strides of torch.empty_like(x). Memory is walked in the order in which it lies, so a mask holds the
// bits of y in the order of y's memory, and backward_from_bit wants dy in that order.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <string>
#include <vector>

#include "call.h"

namespace jitact::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::StableLibrary;
using torch::stable::detail::to;

Dtype dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Double: return Dtype::f64;
    case ScalarType::Float: return Dtype::f32;
    case ScalarType::Half: return Dtype::f16;
    case ScalarType::BFloat16: return Dtype::bf16;
    default: STD_TORCH_CHECK(false, "jitact: expected a float64, float32, float16 or bfloat16 tensor");
  }
}

// Whether the elements fill one stretch of memory, in whatever order of dimensions.
bool is_dense(const Tensor& t) {
  if (t.is_contiguous()) return true;
  const auto sizes = t.sizes(), strides = t.strides();
  std::vector<size_t> order;
  for (size_t i = 0; i < sizes.size(); i++)
    if (sizes[i] != 1) order.push_back(i);
  std::sort(order.begin(), order.end(), [&](size_t i, size_t j) { return strides[i] < strides[j]; });
  int64_t expected = 1;
  for (size_t i : order) {
    if (strides[i] != expected) return false;
    expected *= sizes[i];
  }
  return true;
}

bool same_layout(const Tensor& a, const Tensor& b) {
  const auto a_sizes = a.sizes(), a_strides = a.strides(), b_strides = b.strides();
  for (size_t i = 0; i < a_sizes.size(); i++)
    if (a_sizes[i] != 1 && a_strides[i] != b_strides[i]) return false;
  return true;
}

void check_pair(const char* what, const Tensor& a, const Tensor& b) {
  const auto a_sizes = a.sizes(), b_sizes = b.sizes();
  STD_TORCH_CHECK(a_sizes.size() == b_sizes.size() && std::equal(a_sizes.begin(), a_sizes.end(), b_sizes.begin()),
                  "jitact: dy and the ", what, " that backward reads differ in shape");
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type(), "jitact: dy and the ", what, " that backward reads differ in dtype");
  STD_TORCH_CHECK(a.device() == b.device(), "jitact: dy and the ", what, " that backward reads are on different devices");
}

void run(Op op, const Tensor& a, const void* b, const Tensor& out, void* mask, const double* params) {
  const Call call{op, dtype_of(a), a.numel(), a.const_data_ptr(), b, out.mutable_data_ptr(), mask, params};
  if (call.n == 0) return;
#ifdef JITACT_CUDA
  if (a.is_cuda()) {
    const int32_t device = a.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    void* stream;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    const char* error = run_cuda(call, stream);
    STD_TORCH_CHECK(error == nullptr, "jitact: ", error);
    return;
  }
#endif
  run_cpu(call);
}

Tensor new_mask(const Tensor& x) {
  const int64_t bytes = (x.numel() + 7) / 8;
  return torch::stable::new_empty(x, {&bytes, 1}, ScalarType::Byte);
}

// x itself where it is dense, else a dense copy of it with the strides of empty_like(x).
Tensor dense(const Tensor& x) { return is_dense(x) ? x : torch::stable::clone(x); }

// t with the layout of `like`, copied only if it lies otherwise.
Tensor laid_out_like(const Tensor& like, const Tensor& t) {
  if (is_dense(t) && same_layout(like, t)) return t;
  Tensor copy = torch::stable::empty_like(like);
  torch::stable::copy_(copy, t);
  return copy;
}

std::vector<double> params_from(const StableIValue* stack) {
  std::vector<double> params;
  for (int i = 0; i < JITACT_PARAMS; i++) params.push_back(to<double>(stack[i]));
  return params;
}

// The operators, in the calling convention of torch's stable ABI: arguments on the stack, results in their place.

void forward(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor x = dense(to<Tensor>(stack[0]));
  const auto params = params_from(stack + 1);
  Tensor y = torch::stable::empty_like(x);
  run(Op::forward, x, nullptr, y, nullptr, params.data());
  stack[0] = from(y);
}

void forward_inplace(StableIValue* stack, uint64_t, uint64_t) {
  Tensor x = to<Tensor>(stack[0]);
  const auto params = params_from(stack + 1);
  const Tensor y = dense(x);
  run(Op::forward, y, nullptr, y, nullptr, params.data());
  if (y.get() != x.get()) torch::stable::copy_(x, y);
}

#ifdef JITACT_SAVES_BIT
void forward_bit(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor x = dense(to<Tensor>(stack[0]));
  const auto params = params_from(stack + 1);
  Tensor y = torch::stable::empty_like(x), mask = new_mask(x);
  run(Op::forward_bit, x, nullptr, y, mask.mutable_data_ptr(), params.data());
  stack[0] = from(y);
  stack[1] = from(mask);
}

void forward_bit_inplace(StableIValue* stack, uint64_t, uint64_t) {
  Tensor x = to<Tensor>(stack[0]);
  const auto params = params_from(stack + 1);
  const Tensor y = dense(x);
  Tensor mask = new_mask(x);
  run(Op::forward_bit, y, nullptr, y, mask.mutable_data_ptr(), params.data());
  if (y.get() != x.get()) torch::stable::copy_(x, y);
  stack[0] = from(mask);
}

void backward_from_bit(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor dy = to<Tensor>(stack[0]), mask = to<Tensor>(stack[1]);
  const auto params = params_from(stack + 2);
  STD_TORCH_CHECK(is_dense(dy), "jitact: backward_from_bit needs dy dense, in the memory order of y");
  STD_TORCH_CHECK(mask.numel() == (dy.numel() + 7) / 8 && mask.scalar_type() == ScalarType::Byte && mask.is_contiguous(),
                  "jitact: the mask that backward_from_bit reads must be one bit for each of the ", dy.numel(),
                  " elements of dy");
  STD_TORCH_CHECK(mask.device() == dy.device(), "jitact: dy and the mask are on different devices");
  Tensor dx = torch::stable::empty_like(dy);
  run(Op::backward_from_bit, dy, mask.const_data_ptr(), dx, nullptr, params.data());
  stack[0] = from(dx);
}
#endif

template <Op op>
void backward(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor dy = to<Tensor>(stack[0]), saved = dense(to<Tensor>(stack[1]));
  const auto params = params_from(stack + 2);
  check_pair(op == Op::backward ? "input" : "output", dy, saved);
  Tensor dx = torch::stable::empty_like(saved);
  run(op, laid_out_like(dx, dy), saved.const_data_ptr(), dx, nullptr, params.data());
  stack[0] = from(dx);
}

struct Operator {
  const char* suffix;
  const char* arguments;
  const char* returns;
  void (*function)(StableIValue*, uint64_t, uint64_t);
};

const Operator operators[] = {
    {"_forward", "Tensor x", "Tensor", forward},
    {"_forward_", "Tensor(a!) x", "()", forward_inplace},
    {"_backward", "Tensor dy, Tensor x", "Tensor", backward<Op::backward>},
#ifdef JITACT_SAVES_OUTPUT
    {"_backward_from_output", "Tensor dy, Tensor y", "Tensor", backward<Op::backward_from_output>},
#endif
#ifdef JITACT_SAVES_BIT
    {"_forward_bit", "Tensor x", "(Tensor, Tensor)", forward_bit},
    {"_forward_bit_", "Tensor(a!) x", "Tensor", forward_bit_inplace},
    {"_backward_from_bit", "Tensor dy, Tensor mask", "Tensor", backward_from_bit},
#endif
};

}  // namespace jitact::binding

// Registers the operators under `name`, which the loader chooses: an activation that is defined again in one process
// needs a new name. `params` is the parameters' part of the schema, "" or ", float alpha, ...". The registrations last
// as long as the process.
extern "C" __attribute__((visibility("default"))) void jitact_register(const char* name, const char* params) {
  using namespace jitact::binding;
  const auto library = [](StableLibrary::Kind kind, const char* key) {
    return new StableLibrary(kind, "jitact", key, __FILE__, __LINE__);
  };
  auto* schemas = library(StableLibrary::Kind::FRAGMENT, nullptr);
  auto* cpu = library(StableLibrary::Kind::IMPL, "CPU");
#ifdef JITACT_CUDA
  auto* cuda = library(StableLibrary::Kind::IMPL, "CUDA");
#endif
  for (const Operator& op : operators) {
    const std::string full = std::string(name) + op.suffix;
    schemas->def((full + "(" + op.arguments + params + ") -> " + op.returns).c_str());
    cpu->impl(full.c_str(), op.function);
#ifdef JITACT_CUDA
    cuda->impl(full.c_str(), op.function);
#endif
  }
}
