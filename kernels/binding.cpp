// The one registration of operators. For an activation named N with parameters p it registers
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
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "call.h"
#include "torch_abi.h"

namespace jitact::binding {

void check(bool condition, const char* message) {
  if (!condition) throw std::runtime_error(std::string("jitact: ") + message);
}

#define SHIM(call) check((call) == 0, "torch refused " #call "; its reason is in the log")

// An owned reference to a torch tensor.
class Tensor {
 public:
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  explicit Tensor(StableIValue value) : handle_(reinterpret_cast<AtenTensorHandle>(value)) {}
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }
  AtenTensorHandle get() const { return handle_; }
  StableIValue release() { return reinterpret_cast<StableIValue>(std::exchange(handle_, nullptr)); }

  int64_t numel() const { return ask(aoti_torch_get_numel); }
  int64_t dim() const { return ask(aoti_torch_get_dim); }
  const int64_t* sizes() const { return ask(aoti_torch_get_sizes); }
  const int64_t* strides() const { return ask(aoti_torch_get_strides); }
  int32_t dtype() const { return ask(aoti_torch_get_dtype); }
  int32_t device_type() const { return ask(aoti_torch_get_device_type); }
  int32_t device_index() const { return ask(aoti_torch_get_device_index); }
  bool is_contiguous() const { return ask(aoti_torch_is_contiguous); }
  void* data() const { return ask(aoti_torch_get_data_ptr); }

 private:
  template <typename V>
  V ask(AOTITorchError (*query)(AtenTensorHandle, V*)) const {
    V value;
    SHIM(query(handle_, &value));
    return value;
  }
  AtenTensorHandle handle_;
};

Dtype dtype_of(const Tensor& t) {
  const int32_t dtype = t.dtype();
  if (dtype == aoti_torch_dtype_float32()) return Dtype::f32;
  if (dtype == aoti_torch_dtype_bfloat16()) return Dtype::bf16;
  if (dtype == aoti_torch_dtype_float16()) return Dtype::f16;
  check(dtype == aoti_torch_dtype_float64(), "expected a float64, float32, float16 or bfloat16 tensor");
  return Dtype::f64;
}

// Whether the elements fill one stretch of memory, in whatever order of dimensions.
bool is_dense(const Tensor& t) {
  if (t.is_contiguous()) return true;
  const int64_t *sizes = t.sizes(), *strides = t.strides();
  std::vector<int64_t> order;
  for (int64_t i = 0; i < t.dim(); i++)
    if (sizes[i] != 1) order.push_back(i);
  std::sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return strides[i] < strides[j]; });
  int64_t expected = 1;
  for (const int64_t i : order) {
    if (strides[i] != expected) return false;
    expected *= sizes[i];
  }
  return true;
}

bool same_shape(const Tensor& a, const Tensor& b) {
  return a.dim() == b.dim() && std::equal(a.sizes(), a.sizes() + a.dim(), b.sizes());
}

// For two tensors of one shape.
bool same_strides(const Tensor& a, const Tensor& b) {
  for (int64_t i = 0; i < a.dim(); i++)
    if (a.sizes()[i] != 1 && a.strides()[i] != b.strides()[i]) return false;
  return true;
}

Tensor empty(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype, const Tensor& beside) {
  AtenTensorHandle handle;
  SHIM(aoti_torch_empty_strided(dim, sizes, strides, dtype, beside.device_type(), beside.device_index(), &handle));
  return Tensor(handle);
}

// For a dense tensor, which is when torch.empty_like keeps strides as they are.
Tensor empty_like(const Tensor& t) { return empty(t.dim(), t.sizes(), t.strides(), t.dtype(), t); }

Tensor empty_mask(const Tensor& x) {
  const int64_t bytes = (x.numel() + 7) / 8, stride = 1;
  return empty(1, &bytes, &stride, aoti_torch_dtype_uint8(), x);
}

// x itself where it is dense, else a dense copy of it with the strides of torch.empty_like(x).
Tensor dense(Tensor x) {
  if (is_dense(x)) return x;
  StableIValue stack[] = {x.release(), 0};
  SHIM(torch_call_dispatcher("aten::clone", "", stack, TORCH_ABI_VERSION));
  return Tensor(stack[0]);
}

// t with the memory order of `like`, copied only if it lies otherwise.
Tensor laid_out_like(const Tensor& like, Tensor t) {
  if (same_strides(like, t)) return t;
  Tensor copy = empty_like(like);
  SHIM(aoti_torch_copy_(copy.get(), t.get(), false));
  return copy;
}

struct Params {
  double values[JITACT_PARAMS + 1];
  explicit Params(const StableIValue* stack) { std::memcpy(values, stack, JITACT_PARAMS * sizeof(double)); }
};

void run(Op op, const Tensor& a, const void* b, const Tensor& out, void* mask, const Params& params) {
  const Call call{op, dtype_of(a), a.numel(), a.data(), b, out.data(), mask, params.values};
  if (call.n == 0) return;
#ifdef JITACT_CUDA
  if (a.device_type() == aoti_torch_device_type_cuda()) {
    const int32_t device = a.device_index();
    struct Guard {
      DeviceGuardHandle handle;
      explicit Guard(int32_t device) { SHIM(aoti_torch_create_device_guard(device, &handle)); }
      ~Guard() { aoti_torch_delete_device_guard(handle); }
    } guard(device);
    void* stream;
    SHIM(aoti_torch_get_current_cuda_stream(device, &stream));
    const char* error = run_cuda(call, stream);
    check(error == nullptr, error);
    return;
  }
#endif
  run_cpu(call);
}

// The operators, in the calling convention of the stable ABI: arguments on the stack, owned; results in their place.

void forward(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor x = dense(Tensor(stack[0]));
  Tensor y = empty_like(x);
  run(Op::forward, x, nullptr, y, nullptr, Params(stack + 1));
  stack[0] = y.release();
}

#ifdef JITACT_SAVES_BIT
void forward_bit(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor x = dense(Tensor(stack[0]));
  Tensor y = empty_like(x), mask = empty_mask(x);
  run(Op::forward_bit, x, nullptr, y, mask.data(), Params(stack + 1));
  stack[0] = y.release();
  stack[1] = mask.release();
}

void backward_from_bit(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor dy(stack[0]), mask(stack[1]);
  check(is_dense(dy), "backward_from_bit needs dy dense, in the memory order of y");
  check(mask.numel() == (dy.numel() + 7) / 8 && mask.dtype() == aoti_torch_dtype_uint8() && mask.is_contiguous() &&
            mask.device_type() == dy.device_type() && mask.device_index() == dy.device_index(),
        "the mask that backward_from_bit reads must hold one bit for each element of dy, on its device");
  Tensor dx = empty_like(dy);
  run(Op::backward_from_bit, dy, mask.data(), dx, nullptr, Params(stack + 2));
  stack[0] = dx.release();
}
#endif

template <Op op>
void forward_inplace(StableIValue* stack, uint64_t, uint64_t) {
  AtenTensorHandle again;
  SHIM(aoti_torch_new_tensor_handle(reinterpret_cast<AtenTensorHandle>(stack[0]), &again));
  const Tensor x(again), y = dense(Tensor(stack[0]));
  const Params params(stack + 1);
  if constexpr (op == Op::forward_bit) {
    Tensor mask = empty_mask(x);
    run(op, y, nullptr, y, mask.data(), params);
    stack[0] = mask.release();
  } else {
    run(op, y, nullptr, y, nullptr, params);
  }
  if (y.data() != x.data()) SHIM(aoti_torch_copy_(x.get(), y.get(), false));
}

template <Op op>
void backward(StableIValue* stack, uint64_t, uint64_t) {
  Tensor dy(stack[0]);
  const Tensor saved = dense(Tensor(stack[1]));
  check(same_shape(dy, saved), "dy and the tensor that backward reads beside it differ in shape");
  check(dy.dtype() == saved.dtype(), "dy and the tensor that backward reads beside it differ in dtype");
  check(dy.device_type() == saved.device_type() && dy.device_index() == saved.device_index(),
        "dy and the tensor that backward reads beside it are on different devices");
  Tensor dx = empty_like(saved);
  run(op, laid_out_like(saved, std::move(dy)), saved.data(), dx, nullptr, Params(stack + 2));
  stack[0] = dx.release();
}

struct Operator {
  const char* suffix;
  const char* arguments;
  const char* returns;
  void (*function)(StableIValue*, uint64_t, uint64_t);
};

const Operator operators[] = {
    {"_forward", "Tensor x", "Tensor", forward},
    {"_forward_", "Tensor(a!) x", "()", forward_inplace<Op::forward>},
    {"_backward", "Tensor dy, Tensor x", "Tensor", backward<Op::backward>},
#ifdef JITACT_SAVES_OUTPUT
    {"_backward_from_output", "Tensor dy, Tensor y", "Tensor", backward<Op::backward_from_output>},
#endif
#ifdef JITACT_SAVES_BIT
    {"_forward_bit", "Tensor x", "(Tensor, Tensor)", forward_bit},
    {"_forward_bit_", "Tensor(a!) x", "Tensor", forward_inplace<Op::forward_bit>},
    {"_backward_from_bit", "Tensor dy, Tensor mask", "Tensor", backward_from_bit},
#endif
};

void register_operators(const std::string& name, const std::string& params) {
  TorchLibraryHandle schemas, implementations;
  SHIM(aoti_torch_library_init_fragment("jitact", __FILE__, __LINE__, &schemas));
  for (const Operator& op : operators) {
    const std::string schema = name + op.suffix + "(" + op.arguments + params + ") -> " + op.returns;
    SHIM(aoti_torch_library_def(schemas, schema.c_str()));
  }
  for (const char* key : {"CPU", "CUDA"}) {
#ifndef JITACT_CUDA
    if (std::strcmp(key, "CUDA") == 0) continue;
#endif
    SHIM(aoti_torch_library_init_impl("jitact", key, __FILE__, __LINE__, &implementations));
    for (const Operator& op : operators)
      SHIM(torch_library_impl(implementations, (name + op.suffix).c_str(), op.function, TORCH_ABI_VERSION));
  }
}

}  // namespace jitact::binding

// Registers the operators under `name`, which the loader chooses: an activation that is defined again in one process
// needs a new name. `params` is the parameters' part of the schema, "" or ", float alpha, ...". The registrations last
// as long as the process. Returns null or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* jitact_register(const char* name, const char* params) {
  static std::string error;
  try {
    jitact::binding::register_operators(name, params);
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}
