// torch's tensors by its stable C ABI, with what the operators ask of them: strides, orders of memory, copies, streams; and how
// operators are registered. <string>, <vector> and <algorithm>, which take longer to compile than the whole binding, are not
// included; what an activation does not use is left out, hence the anonymous namespace.
#pragma once

#include <cfloat>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <utility>

#include "launch.cuh"
#include "torch_abi.h"

namespace jitact::binding {
namespace {

using namespace loops;

// A string made by concatenation, in place of std::string.
class Text {
 public:
  template <typename... Parts>
  explicit Text(Parts... parts) { (add(parts), ...); }
  Text(Text&& other) noexcept { *this = std::move(other); }
  Text& operator=(Text&& other) noexcept {
    std::swap(text_, other.text_);
    std::swap(length_, other.length_);
    return *this;
  }
  ~Text() { std::free(text_); }
  void add(const char* part) {
    const size_t more = std::strlen(part);
    void* const longer = std::realloc(text_, length_ + more + 1);
    if (longer == nullptr) std::abort();
    text_ = static_cast<char*>(longer);
    std::memcpy(text_ + length_, part, more + 1);
    length_ += more;
  }
  const char* get() const { return text_; }

 private:
  char* text_ = nullptr;
  size_t length_ = 0;
};

// An array whose size is set at construction, in place of std::vector.
template <typename V>
class List {
 public:
  List() = default;
  explicit List(int64_t size) : values_(new V[size]()), size_(size) {}
  List(List&& other) noexcept { *this = std::move(other); }
  List& operator=(List&& other) noexcept {
    std::swap(values_, other.values_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~List() { delete[] values_; }
  int64_t size() const { return size_; }
  V& operator[](int64_t i) const { return values_[i]; }
  V* begin() const { return values_; }
  V* end() const { return values_ + size_; }

 private:
  V* values_ = nullptr;
  int64_t size_ = 0;
};

class Failure : public std::exception {
 public:
  explicit Failure(Text text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.get(); }

 private:
  Text text_;
};

// The name of the activation, with which error messages begin.
const char* activation_name = "";

[[noreturn]] void fail(const char* message, const char* reason = "") {
  throw Failure(Text(activation_name, ": ", message, reason));
}

void check(bool condition, const char* message) {
  if (!condition) fail(message);
}

[[noreturn]] void refused(const char* what) {
  const char* reason = torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace() : nullptr;
  fail(what, reason ? reason : "the reason is in torch's log");
}

#define SHIM(call) \
  if ((call) != 0) refused("torch refused " #call ": ")
// For calls that allocate and hardly fail for any other reason. Python searches messages for "out of memory".
#define ALLOCATE(call) \
  if ((call) != 0) refused("out of memory, or torch refused " #call ": ")

// Runs computation on a CPU.
template <typename Run>
void on_cpu(const Run& run) {
  try {
    run();
  } catch (const std::bad_alloc&) {
    fail("out of memory");  // as above
  }
}

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
  const void* const_data() const { return ask(torch_get_const_data_ptr); }  // does not trigger a copy-on-write copy
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

// Whether the elements are contiguous in memory, in any order of dimensions.
bool is_dense(const Tensor& t) {
  if (t.is_contiguous()) return true;
  const int64_t *sizes = t.sizes(), *strides = t.strides(), dim = t.dim(), n = t.numel();
  for (int64_t filled = 1; filled < n;) {  // elements of the dimensions inside the next one
    int64_t i = 0;
    while (i < dim && (sizes[i] == 1 || strides[i] != filled)) i++;
    if (i == dim) return false;
    filled *= sizes[i];
  }
  return true;
}

bool same_shape(const Tensor& a, const Tensor& b) {
  return a.dim() == b.dim() && std::memcmp(a.sizes(), b.sizes(), size_t(a.dim()) * sizeof(int64_t)) == 0;
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

// For dense tensors only: for these, torch.empty_like keeps the strides.
Tensor empty_like(const Tensor& t) { return empty(t.dim(), t.sizes(), t.strides(), t.dtype(), t); }

Tensor empty_bytes(int64_t count, const Tensor& beside) {
  const int64_t stride = 1;
  return empty(1, &count, &stride, aoti_torch_dtype_uint8(), beside);
}
Tensor empty_mask(const Tensor& x) { return empty_bytes((x.numel() + 7) / 8, x); }

// x itself where it is dense, else a dense copy of it with the strides of torch.empty_like(x).
Tensor dense(Tensor x) {
  if (is_dense(x)) return x;
  StableIValue stack[] = {x.release(), 0};
  ALLOCATE(torch_call_dispatcher("aten::clone", "", stack, TORCH_ABI_VERSION));
  return Tensor(stack[0]);
}

// The dimensions in memory order, innermost first; by size where strides are equal, as in torch.empty_like.
List<int64_t> memory_order(int64_t dim, const int64_t* sizes, const int64_t* strides) {
  List<int64_t> order(dim);
  for (int64_t n = 0; n < order.size(); n++) {
    order[n] = order.size() - 1 - n;
    for (int64_t place = n, other = n; other-- > 0;) {
      const int64_t a = order[other], b = order[place];
      if (strides[a] == 0 || strides[b] == 0) continue;
      if (strides[a] < strides[b]) break;
      if (strides[a] == strides[b] && sizes[a] <= sizes[b]) continue;
      std::swap(order[other], order[place]);
      place = other;
    }
  }
  return order;
}

List<int64_t> memory_order(const Tensor& t) { return memory_order(t.dim(), t.sizes(), t.strides()); }

List<int64_t> copied(const int64_t* values, int64_t count) {
  List<int64_t> list(count);
  for (int64_t i = 0; i < count; i++) list[i] = values[i];
  return list;
}

// The strides of a dense tensor with its dimensions in this order.
List<int64_t> dense_strides(const List<int64_t>& order, const int64_t* sizes) {
  List<int64_t> strides(order.size());
  int64_t next = 1;
  for (const int64_t i : order) {
    strides[i] = next;
    if (sizes[i] > 1) next *= sizes[i];
  }
  return strides;
}

// The order of a contiguous tensor's dimensions: the last is the innermost.
List<int64_t> usual_order(int64_t dim) {
  List<int64_t> order(dim);
  for (int64_t i = 0; i < dim; i++) order[i] = dim - 1 - i;
  return order;
}

// t itself if it is dense with its dimensions in this order, else a copy that is.
Tensor dense_in(const List<int64_t>& order, Tensor t) {
  const List<int64_t> strides = dense_strides(order, t.sizes());
  bool lies_so = true;
  for (int64_t i = 0; i < t.dim(); i++) lies_so = lies_so && (t.sizes()[i] == 1 || t.strides()[i] == strides[i]);
  if (lies_so) return t;
  Tensor copy = empty(t.dim(), t.sizes(), strides.begin(), t.dtype(), t);
  SHIM(aoti_torch_copy_(copy.get(), t.get(), false));
  return copy;
}

// t itself if it is contiguous, else a contiguous copy.
Tensor contiguous(Tensor t) {
  if (t.is_contiguous()) return t;
  const List<int64_t> order = usual_order(t.dim());
  return dense_in(order, std::move(t));
}

// The order `of_x` restricted to the last `dim` dimensions: the order for an operand of `dim` dimensions.
List<int64_t> broadcast_order(const List<int64_t>& of_x, int64_t dim) {
  List<int64_t> order(dim);
  int64_t n = 0;
  for (const int64_t i : of_x)
    if (i >= of_x.size() - dim) order[n++] = i - (of_x.size() - dim);
  return order;
}

bool same_device(const Tensor& a, const Tensor& b) {
  return a.device_type() == b.device_type() && a.device_index() == b.device_index();
}

// A tensor's storage may have been freed, as FSDP does, or never allocated.
void check_allocated(const Tensor& t) {
  check(t.numel() == 0 || t.storage_bytes() > 0, "a tensor has elements, but its data is not allocated (yet, or any more)");
}

#ifdef JITACT_CUDA
// The current stream of a tensor's device, which is the current device during this object's lifetime.
class CudaStream {
 public:
  explicit CudaStream(const Tensor& t) : guard_(t) { SHIM(aoti_torch_get_current_cuda_stream(t.device_index(), &stream_)); }
  void* get() const { return stream_; }

 private:
  // A member, so that it is destroyed also if the constructor fails to get the stream.
  struct Guard {
    DeviceGuardHandle handle;
    explicit Guard(const Tensor& t) { SHIM(aoti_torch_create_device_guard(t.device_index(), &handle)); }
    Guard(const Guard&) = delete;
    ~Guard() { aoti_torch_delete_device_guard(handle); }
  };

  const Guard guard_;
  void* stream_;
};
#endif

// Registers operators under a name.
class Registration {
 public:
  explicit Registration(const char* name) : name_(name) {
    SHIM(aoti_torch_library_init_fragment("jitact", __FILE__, __LINE__, &schemas_));
    SHIM(aoti_torch_library_init_impl("jitact", "CPU", __FILE__, __LINE__, &implementations_[devices_++]));
#ifdef JITACT_CUDA
    SHIM(aoti_torch_library_init_impl("jitact", "CUDA", __FILE__, __LINE__, &implementations_[devices_++]));
#endif
  }
  void add(const char* suffix, const Text& arguments, const char* returns,
           void (*function)(StableIValue*, uint64_t, uint64_t)) const {
    SHIM(aoti_torch_library_def(schemas_, Text(name_, suffix, "(", arguments.get(), ") -> ", returns).get()));
    for (int d = 0; d < devices_; d++)
      SHIM(torch_library_impl(implementations_[d], Text(name_, suffix).get(), function, TORCH_ABI_VERSION));
  }

 private:
  const char* name_;
  TorchLibraryHandle schemas_, implementations_[2];
  int devices_ = 0;
};

}  // namespace
}  // namespace jitact::binding
