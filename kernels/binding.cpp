// The one registration of operators. For an activation named N with parameters p it registers
//
//   jitact::N_forward(Tensor x, float p...) -> Tensor
//   jitact::N_apply(Tensor x, float p...) -> Tensor                                  the same, to which Python gives a gradient
//   jitact::N_forward_(Tensor(a!) x, float p...) -> ()
//   jitact::N_backward(Tensor dy, Tensor x, float p...) -> Tensor
//   jitact::N_backward_from_output(Tensor dy, Tensor y, float p...) -> Tensor        if it can keep the output
//   jitact::N_forward_bit(Tensor x, float p...) -> (Tensor y, Tensor mask)           if one bit is enough
//   jitact::N_forward_bit_(Tensor(a!) x, float p...) -> Tensor mask
//   jitact::N_backward_from_bit(Tensor dy, Tensor mask, float p...) -> Tensor
//
// With learned weights w, of which K have gradients, or with a seed for random numbers (call.h says how the loader asks for
// them), each takes `Tensor w...` or `Tensor seed` before p, and there are
//
//   jitact::N_backward_weights(Tensor dy, Tensor x, Tensor w..., float p...) -> (Tensor dw, ...)            K tensors
//   jitact::N_backward_all(Tensor dy, Tensor x, Tensor w..., float p...) -> (Tensor dx, Tensor dw, ...)     K + 1 tensors
//
// A result has the strides of torch.empty_like(x). Memory is walked in the order in which it lies, so a mask holds the
// bits of y in the order of y's memory, and backward_from_bit wants dy in that order; random numbers go by that order too.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "call.h"
#include "torch_abi.h"

namespace jitact::binding {

// The name that operators are registered under, which errors begin with.
std::string& registered_name() {
  static std::string name;
  return name;
}

void check(bool condition, const char* message) {
  if (!condition) throw std::runtime_error(registered_name() + ": " + message);
}

[[noreturn]] void refused(const std::string& what) {
  const char* reason = torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace() : nullptr;
  throw std::runtime_error(registered_name() + ": " + what + (reason ? reason : "the reason is in torch's log"));
}

#define SHIM(call) \
  if ((call) != 0) refused("torch refused " #call ": ")
// What allocates, and little else can fail in it. Python looks for these words.
#define ALLOCATE(call) \
  if ((call) != 0) refused("out of memory, or torch refused " #call ": ")

// An owned reference to a torch tensor.
class Tensor {
 public:
  Tensor() : handle_(nullptr) {}
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  explicit Tensor(StableIValue value) noexcept : handle_(reinterpret_cast<AtenTensorHandle>(value)) {}
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
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
  const void* const_data() const { return ask(torch_get_const_data_ptr); }  // copies nothing that is copied on write
  int64_t storage_bytes() const { return ask(aoti_torch_get_storage_size); }

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
  ALLOCATE(aoti_torch_empty_strided(dim, sizes, strides, dtype, beside.device_type(), beside.device_index(), &handle));
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
  ALLOCATE(torch_call_dispatcher("aten::clone", "", stack, TORCH_ABI_VERSION));
  return Tensor(stack[0]);
}

// t with the memory order of `like`, copied only if it lies otherwise.
Tensor laid_out_like(const Tensor& like, Tensor t) {
  if (same_strides(like, t)) return t;
  Tensor copy = empty_like(like);
  SHIM(aoti_torch_copy_(copy.get(), t.get(), false));
  return copy;
}

// The storage of a tensor may have been freed behind it, as FSDP does, or never have been there.
void check_allocated(const Tensor& t) {
  check(t.numel() == 0 || t.storage_bytes() > 0, "a tensor has elements, but its data is not allocated (yet, or any more)");
}

bool same_device(const Tensor& a, const Tensor& b) {
  return a.device_type() == b.device_type() && a.device_index() == b.device_index();
}

#if defined(JITACT_WEIGHTS)
// Of weights, all of one size: 1, or that of dimension 1 of what they belong to.
struct Extras {
  static constexpr int count = JITACT_WEIGHTS;
  Tensor weights[count];

  explicit Extras(const StableIValue* stack) {
    for (int k = 0; k < count; k++) weights[k] = Tensor(stack[k]);
  }
  void make_ready() {
    for (Tensor& weight : weights) {
      check_allocated(weight);
      weight = dense(std::move(weight));
    }
  }
  void enter(Call& call, const Tensor& a) const {
    call.channels = weights[0].numel();
    call.inner = 1;
    for (int k = 0; k < count; k++) {
      check(weights[k].dtype() == a.dtype(), "a weight's dtype differs from that of x");
      check(same_device(weights[k], a), "a weight is on another device than x");
      check(weights[k].numel() == call.channels, "the weights differ in size");
      call.weights[k] = weights[k].const_data();
    }
    if (call.channels == 1) return;
#ifdef JITACT_CHANNELS
    check(a.dim() > 1 && a.sizes()[1] == call.channels, "a weight must hold one value, or one for each index of dimension 1 of x");
    call.inner = a.strides()[1];
#else
    check(false, "a weight must hold one value");
#endif
  }
};
#elif defined(JITACT_RANDOM)
struct Extras {
  static constexpr int count = 1;
  Tensor seed;

  explicit Extras(const StableIValue* stack) : seed(stack[0]) {}
  void make_ready() const { check_allocated(seed); }
  void enter(Call& call, const Tensor& a) const {
    check(seed.numel() == 1 && seed.dtype() == aoti_torch_dtype_int64(), "the seed must be one int64");
    check(same_device(seed, a), "the seed is on another device than x");
    call.seed = static_cast<const int64_t*>(seed.const_data());
  }
};
#else
struct Extras {
  static constexpr int count = 0;
  explicit Extras(const StableIValue*) {}
  void make_ready() const {}
  void enter(Call&, const Tensor&) const {}
};
#endif

// What an operator is called with: the `count` tensors that it works on, and what follows them. All are taken over before
// anything can fail, so that none is lost.
template <int count>
struct Arguments {
  Tensor tensors[count];
  Extras extras;
  double params[JITACT_PARAMS + 1];
  explicit Arguments(const StableIValue* stack) : extras(stack + count) {
    for (int k = 0; k < count; k++) tensors[k] = Tensor(stack[k]);
    std::memcpy(params, stack + count + Extras::count, JITACT_PARAMS * sizeof(double));
    for (const Tensor& tensor : tensors) check_allocated(tensor);
    extras.make_ready();
  }
};

void run(const Call& call, [[maybe_unused]] const Tensor& beside) {
#ifdef JITACT_CUDA
  if (beside.device_type() == aoti_torch_device_type_cuda()) {
    const int32_t device = beside.device_index();
    struct Guard {
      DeviceGuardHandle handle;
      explicit Guard(int32_t device) { SHIM(aoti_torch_create_device_guard(device, &handle)); }
      ~Guard() { aoti_torch_delete_device_guard(handle); }
    } guard(device);
    void* stream;
    SHIM(aoti_torch_get_current_cuda_stream(device, &stream));
    const char* error = JITACT_RUN_CUDA(call, stream);
    check(error == nullptr, error);
    return;
  }
#endif
  JITACT_RUN_CPU(call);
}

void run(Op op, const Tensor& a, const void* b, const Tensor& out, void* mask, const Extras& extras, const double* params) {
  void* to = out.data();  // before a, which may be the same
  Call call{op, dtype_of(a), a.numel(), a.const_data(), b, to, mask, params};
  extras.enter(call, a);
  if (call.n > 0) run(call, a);
}

// The operators, in the calling convention of the stable ABI: arguments on the stack, owned; results in their place.

void forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments<1> given(stack);
  const Tensor x = dense(std::move(given.tensors[0]));
  Tensor y = empty_like(x);
  run(Op::forward, x, nullptr, y, nullptr, given.extras, given.params);
  stack[0] = y.release();
}

#ifdef JITACT_SAVES_BIT
void forward_bit(StableIValue* stack, uint64_t, uint64_t) {
  Arguments<1> given(stack);
  const Tensor x = dense(std::move(given.tensors[0]));
  Tensor y = empty_like(x), mask = empty_mask(x);
  run(Op::forward_bit, x, nullptr, y, mask.data(), given.extras, given.params);
  stack[0] = y.release();
  stack[1] = mask.release();
}

void backward_from_bit(StableIValue* stack, uint64_t, uint64_t) {
  const Arguments<2> given(stack);
  const Tensor &dy = given.tensors[0], &mask = given.tensors[1];
  check(is_dense(dy), "backward_from_bit needs dy dense, in the memory order of y");
  check(mask.numel() == (dy.numel() + 7) / 8 && mask.dtype() == aoti_torch_dtype_uint8() && mask.is_contiguous() &&
            same_device(mask, dy),
        "the mask that backward_from_bit reads must hold one bit for each element of dy, on its device");
  Tensor dx = empty_like(dy);
  run(Op::backward_from_bit, dy, mask.const_data(), dx, nullptr, given.extras, given.params);
  stack[0] = dx.release();
}
#endif

template <Op op>
void forward_inplace(StableIValue* stack, uint64_t, uint64_t) {
  Arguments<1> given(stack);
  AtenTensorHandle again;
  SHIM(aoti_torch_new_tensor_handle(given.tensors[0].get(), &again));
  const Tensor x(again), y = dense(std::move(given.tensors[0]));
  if constexpr (op == Op::forward_bit) {
    Tensor mask = empty_mask(x);
    run(op, y, nullptr, y, mask.data(), given.extras, given.params);
    stack[0] = mask.release();
  } else {
    run(op, y, nullptr, y, nullptr, given.extras, given.params);
  }
  if (y.const_data() != x.const_data() && aoti_torch_copy_(x.get(), y.get(), false) != 0) refused("x cannot be changed in place: ");
}

// dy, in the memory order of the tensor that backward reads beside it.
Tensor gradient_like(const Tensor& saved, Tensor dy) {
  check(same_shape(dy, saved), "dy and the tensor that backward reads beside it differ in shape");
  check(dy.dtype() == saved.dtype(), "dy and the tensor that backward reads beside it differ in dtype");
  check(same_device(dy, saved), "dy and the tensor that backward reads beside it are on different devices");
  return laid_out_like(saved, std::move(dy));
}

template <Op op>
void backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments<2> given(stack);
  const Tensor saved = dense(std::move(given.tensors[1])), dy = gradient_like(saved, std::move(given.tensors[0]));
  Tensor dx = empty_like(saved);
  run(op, dy, saved.const_data(), dx, nullptr, given.extras, given.params);
  stack[0] = dx.release();
}

#ifdef JITACT_WEIGHTS
template <bool with_dx>
void backward_weights(StableIValue* stack, uint64_t, uint64_t) {
  Arguments<2> given(stack);
  const Tensor x = dense(std::move(given.tensors[1])), dy = gradient_like(x, std::move(given.tensors[0]));
  Call call{Op::backward_weights, dtype_of(x), x.numel(), dy.const_data(), x.const_data(), nullptr, nullptr, given.params};
  given.extras.enter(call, x);
  Tensor gradients[JITACT_LEARNED], dx, workspace;
  for (int k = 0; k < JITACT_LEARNED; k++) {
    gradients[k] = empty_like(given.extras.weights[k]);
    call.gradients[k] = gradients[k].data();
  }
  if (with_dx) {
    dx = empty_like(x);
    call.out = dx.data();
  }
  if (call.n > 0) {
#ifdef JITACT_CUDA
    if (x.device_type() == aoti_torch_device_type_cuda()) {
      const int64_t bytes = workspace_bytes(call), stride = 1;
      workspace = empty(1, &bytes, &stride, aoti_torch_dtype_uint8(), x);
      call.workspace = workspace.data();
    }
#endif
    run(call, x);
  } else {
    for (const Tensor& gradient : gradients) SHIM(aoti_torch_zero_(gradient.get()));
  }
  if (with_dx) *stack++ = dx.release();
  for (Tensor& gradient : gradients) *stack++ = gradient.release();
}

// "Tensor" or "(Tensor, Tensor, ...)".
std::string tensors(int count) {
  std::string list = "Tensor";
  for (int i = 1; i < count; i++) list += ", Tensor";
  return count == 1 ? list : "(" + list + ")";
}
const std::string learned = tensors(JITACT_LEARNED), one_and_learned = tensors(1 + JITACT_LEARNED);
#endif

struct Operator {
  const char* suffix;
  const char* arguments;
  const char* returns;
  void (*function)(StableIValue*, uint64_t, uint64_t);
};

const Operator operators[] = {
    {"_forward", "Tensor x", "Tensor", forward},
    {"_apply", "Tensor x", "Tensor", forward},
    {"_forward_", "Tensor(a!) x", "()", forward_inplace<Op::forward>},
    {"_backward", "Tensor dy, Tensor x", "Tensor", backward<Op::backward>},
#ifdef JITACT_WEIGHTS
    {"_backward_weights", "Tensor dy, Tensor x", learned.c_str(), backward_weights<false>},
    {"_backward_all", "Tensor dy, Tensor x", one_and_learned.c_str(), backward_weights<true>},
#endif
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
#ifdef JITACT_RANDOM
  const std::string extras = ", Tensor seed";
#else
  std::string extras;
  for (int k = 0; k < Extras::count; k++) extras += ", Tensor w" + std::to_string(k);
#endif
  for (const Operator& op : operators) {
    const std::string schema = name + op.suffix + "(" + op.arguments + extras + params + ") -> " + op.returns;
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
    jitact::binding::registered_name() = name;
    jitact::binding::register_operators(name, params);
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}
