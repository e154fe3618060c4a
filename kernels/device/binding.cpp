// Registers the operators. For an activation named N these are the following, as far as its kernel file has the functions:
//
//   jitact::N_forward(Tensor x, others...) -> Tensor
//   jitact::N_forward_(Tensor(a!) x, others...) -> ()
//   jitact::N_backward(Tensor dy, Tensor x, others...) -> Tensor
//   jitact::N_backward_from_output(Tensor dy, Tensor y, others...) -> Tensor
//   jitact::N_forward_bit(Tensor x, others...) -> (Tensor y, Tensor mask)
//   jitact::N_forward_bit_(Tensor(a!) x, others...) -> Tensor mask
//   jitact::N_backward_from_bit(Tensor dy, Tensor mask, others...) -> Tensor
//
// Where forward takes several elements, `Tensor x` stands for one tensor per element, all of one shape. `others` are the other
// operands: a tensor for each channel and row, the seed if there are random operands, and the numbers. A channel or row holds
// one value, or has sizes that broadcast to those of x: 1 in all but adjacent dimensions. With several gradients,
//
//   jitact::N_backward(Tensor dy, Tensor x, others..., int wanted) -> (Tensor, ...)
//
// where bit g of `wanted` says whether result g is wanted; if not, it is an empty tensor and is not written. The same holds for
// N_backward_from_bit where the mask bit suffices for several gradients. With two elements that have gradients,
//
//   jitact::N_backward_packed(Tensor dy, Tensor x, others..., int wanted, int layout, int dim) -> (Tensor, ...)
//
// writes both gradients into one tensor, the first result, which is twice as long in dimension `dim`. The other results are the
// gradients of channels and rows; `wanted`, which is left out if there are none, has a bit for each of these. Bit 0 of `layout`
// says that the two are interleaved rather than concatenated, bit 1 that the second element's gradient comes first.
//
// A result has the strides of torch.empty_like(x). Elements are processed in memory order, so a mask has the bits in the order
// of y's memory, and backward_from_bit needs dy in that order, into which
//
//   jitact::N_copy_(Tensor(a!) to, Tensor from) -> ()
//
// copies it; random numbers follow that order too. Tensors with strided rows, such as halves of a wider tensor, are read and
// written in place, without a copy.
//
// This file is compiled at the first use of every activation, while the user waits. So one function serves all operations, what
// an activation does not use is left out (hence the anonymous namespaces), and <string>, <vector> and <algorithm>, which take
// longer to compile than this whole file, are not included.
#include <cfloat>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <utility>

#include "launch.cuh"
#include "torch_abi.h"
#include "transpose.h"

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

// The name that operators are registered under; error messages begin with it.
const char* registered_name = "";

[[noreturn]] void fail(const char* message, const char* reason = "") {
  throw Failure(Text(registered_name, ": ", message, reason));
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
  List<int64_t> order(t.dim());
  for (int64_t i = 0; i < t.dim(); i++) order[i] = t.dim() - 1 - i;
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

#ifdef JITACT_ROWS
#include "rows_binding.h"
#else

namespace jitact::binding {
namespace {

#ifdef JITACT_CUDA
// Whether t, of the shape of `like`, which is dense, is a (batched) transposition of it in memory. `found` then describes it,
// without data.
bool is_transposed(const Tensor& like, const Tensor& t, loops::Transposition& found) {
  struct Stretch { int64_t size, stride; } stretches[3];  // dimensions that can be merged in t
  int count = 0;
  for (const int64_t i : memory_order(like)) {
    const int64_t size = t.sizes()[i], stride = t.strides()[i];
    if (size == 1) continue;
    if (count > 0 && stride == stretches[count - 1].stride * stretches[count - 1].size) stretches[count - 1].size *= size;
    else if (count < 3) stretches[count++] = {size, stride};
    else return false;
  }
  if (count < 2) return false;
  const auto [columns, apart] = stretches[0];
  const auto [rows, step] = stretches[1];
  found = {.batch = 1, .rows = rows, .columns = columns, .bytes = int(bytes_of(dtype_of(t)))};
  if (count == 3) {
    found.batch = stretches[2].size;
    if (stretches[2].stride != rows * columns) return false;
  }
  return step == 1 && apart == rows;
}
#endif

// Copies to a dense tensor of the same shape, dtype and device.
void copy_elements(const Tensor& to, const Tensor& from) {
#ifdef JITACT_CUDA
  loops::Transposition transposition{};
  if (from.device_type() == aoti_torch_device_type_cuda() && is_transposed(to, from, transposition)) {
    transposition.from = from.const_data(), transposition.to = to.data();
    if (loops::takes_transposition(transposition)) {
      const CudaStream stream(from);
      const char* error = loops::transpose(transposition, stream.get());
      check(error == nullptr, error);
      return;
    }
  }
#endif
  SHIM(aoti_torch_copy_(to.get(), from.get(), false));
}

// t in the memory order of `like`, which is dense and of the same shape, dtype and device; copied only if it differs.
Tensor laid_out_like(const Tensor& like, Tensor t) {
  if (same_strides(like, t)) return t;
  Tensor copy = empty_like(like);
  copy_elements(copy, t);
  return copy;
}

// The arguments of an operator, owned from the start, so that nothing leaks if something is thrown.
struct Arguments {
  List<Tensor> elements;  // dy first, if there is one
  Tensor mask, seed;
  List<Tensor> broadcast;
  double numbers[kNumbers + 1];
  const StableIValue* rest;  // the arguments after these

  uint8_t* bits() const { return static_cast<uint8_t*>(const_cast<void*>(mask.const_data())); }
  Arguments(Op op, const StableIValue* stack) : elements(reads(op)), broadcast(kBroadcast) {
    for (Tensor& tensor : elements) tensor = Tensor(*stack++);
    if (op == Op::backward_from_bit) mask = Tensor(*stack++);
    for (Tensor& tensor : broadcast) tensor = Tensor(*stack++);
    if (kRandom > 0) seed = Tensor(*stack++);
    for (int k = 0; k < kNumbers; k++) std::memcpy(numbers + k, stack++, sizeof(double));
    rest = stack;
    for (const Tensor& tensor : elements) check_allocated(tensor);
    for (const Tensor& tensor : broadcast) check_allocated(tensor);
    if (op == Op::backward_from_bit) check_allocated(mask);
    if (kRandom > 0) check_allocated(seed);
  }
};

// One tensor for the gradients of two elements, and the position of each in it.
struct Packed {
  Tensor whole;
  List<int64_t> strides;   // of each of the two
  int64_t offset[2] = {};        // in elements

  // For elements of the shape and memory order of x.
  Packed(const Tensor& x, int64_t layout, int64_t dim) {
    if (dim < 0) dim += x.dim();
    check(dim >= 0 && dim < x.dim(), "dim is no dimension of the elements");
    check(layout >= 0 && layout < 4, "layout must be from 0 to 3");
    List<int64_t> sizes = copied(x.sizes(), x.dim());
    const int64_t one = sizes[dim];
    sizes[dim] = 2 * one;
    strides = dense_strides(memory_order(x), sizes.begin());
    whole = empty(x.dim(), sizes.begin(), strides.begin(), x.dtype(), x);
    const bool alternate = layout & 1, second_first = layout & 2;
    offset[!second_first] = strides[dim] * (alternate ? 1 : one);
    if (alternate) strides[dim] *= 2;
  }
};

// The common layout in rows of tensors that are not all dense with the same strides.
struct Rows {
  List<Elements> of;  // for each tensor, without data
  int64_t columns = 1;

  // Whether tensors of the shape of `like`, of more than one element, can all be described as rows, of columns with stride 1, 0
  // or, with several elements, 2, and one row stride per tensor, when dimensions are merged in this order, innermost first.
  bool found(const Tensor& like, const List<int64_t>& order, const List<const int64_t*>& strides) {
    constexpr int64_t longest = kElements > 1 ? 2 : 1;
    of = List<Elements>(strides.size());
    columns = 1;
    int64_t count = 0;  // of rows; 0 while dimensions are merged into columns
    for (const int64_t i : order) {
      const int64_t size = like.sizes()[i];
      if (size == 1) continue;
      const auto fits = [&](auto expected) {
        for (int64_t t = 0; t < strides.size(); t++)
          if (strides[t][i] != expected(of[t])) return false;
        return true;
      };
      if (columns == 1) {
        for (int64_t t = 0; t < strides.size(); t++) {
          of[t].step = strides[t][i];
          if (of[t].step > longest) return false;
        }
        columns = size;
      } else if (count == 0 && fits([&](const Elements& e) { return e.step * columns; })) {
        columns *= size;
      } else if (count == 0) {
        for (int64_t t = 0; t < strides.size(); t++) of[t].row_stride = strides[t][i];
        count = size;
      } else if (fits([&](const Elements& e) { return e.row_stride * count; })) {
        count *= size;
      } else {
        return false;
      }
    }
    return columns > 1;
  }
};

// Decides between dense memory and rows, copies tensors that fit neither, and sets what the call reads and the layout of its
// results. Returns the strides of the results, which are those of torch.empty_like of tensor `x`.
List<int64_t> lay_out(Call& call, List<Tensor>& tensors, int64_t x, const Packed* packed) {
  const Tensor& like = tensors[x];
  for (const Tensor& t : tensors) {
    check(same_shape(t, like), "the tensors of elements differ in shape");
    check(t.dtype() == like.dtype(), "the tensors of elements differ in dtype");
    check(same_device(t, like), "the tensors of elements are on different devices");
  }
  call.dtype = dtype_of(like);
  call.n = call.columns = like.numel();
  call.dense = packed ? call.n <= 1 : is_dense(like);
  for (const Tensor& t : tensors)
    if (!packed && !same_strides(t, like)) call.dense = false;
  Rows rows;
  const List<int64_t> order = call.dense ? List<int64_t>() : memory_order(like);
  const auto find_rows = [&] {
    List<const int64_t*> strides(tensors.size() + (packed ? 1 : 0));
    for (int64_t t = 0; t < tensors.size(); t++) strides[t] = tensors[t].strides();
    if (packed) strides[tensors.size()] = packed->strides.begin();
    return rows.found(like, order, strides);
  };
  const auto x_repeats = [&] {
    const Elements& e = rows.of[x];
    return e.step == 0 || (rows.columns < call.n && e.row_stride < rows.columns * e.step);
  };
  const bool may_be_rows = !call.dense && call.n > 1 && (summed(call.op) == 0 || kAlwaysRows);
  bool by_rows = may_be_rows && find_rows() && !x_repeats();
  if (!call.dense && !by_rows) {
    tensors[x] = dense(std::move(tensors[x]));
    for (int64_t t = 0; t < tensors.size(); t++)
      if (t != x) tensors[t] = laid_out_like(tensors[x], std::move(tensors[t]));
    by_rows = packed && find_rows();
    call.dense = !by_rows;
  }
  if (by_rows) call.columns = rows.columns;
  for (int64_t t = 0; t < tensors.size(); t++) {
    if (by_rows) call.read[t] = rows.of[t];
    call.read[t].data = const_cast<void*>(tensors[t].const_data());
  }
  const Tensor& laid_out = tensors[x];
  for (int w = 0; by_rows && w < writes(call.op); w++) {
    if (packed) call.written[w] = rows.of[tensors.size()];
    else call.written[w].row_stride = call.columns;
  }
  if (by_rows) return dense_strides(order, laid_out.sizes());
  return copied(laid_out.strides(), laid_out.dim());
}

// How a channel or row operand is broadcast over x's memory; `strides` are x's. The operand is copied into x's memory order if
// necessary.
Broadcasts place(Tensor& operand, const Tensor& x, const List<int64_t>& strides) {
  const bool narrow = x.dtype() == aoti_torch_dtype_float16() || x.dtype() == aoti_torch_dtype_bfloat16();
  const bool wide = narrow && operand.dtype() == aoti_torch_dtype_float32();
  check(wide || operand.dtype() == x.dtype(), "an operand's dtype is neither x's nor, beside 16 bits, float32");
  check(same_device(operand, x), "an operand is on another device than x");
  Broadcasts found{operand.const_data(), operand.numel(), 1, wide};
  if (found.count == 1) return found;
  const int64_t missing = x.dim() - operand.dim();
  check(missing >= 0, "an operand has more dimensions than x");
  const List<int64_t> order = broadcast_order(memory_order(x.dim(), x.sizes(), strides.begin()), operand.dim());
  operand = dense_in(order, std::move(operand));
  found.data = operand.const_data();
  int64_t next = 0;  // the stride that the next dimension must have; 0 before the first
  bool ended = false;
  for (const int64_t i : order) {
    const int64_t size = operand.sizes()[i], stride = strides[missing + i];
    if (x.sizes()[missing + i] == 1 && size == 1) continue;
    if (size == 1) {
      ended = next != 0;
      continue;
    }
    check(size == x.sizes()[missing + i], "an operand must hold one value, or broadcast to the sizes of x");
    const bool fits = (!ended && (next == 0 || stride == next)) || x.numel() == 0;  // whose strides mean nothing
    check(fits, "an operand's dimensions must lie side by side in x");
    if (next == 0) found.inner = stride;
    next = stride * size;
  }
  return found;
}

Tensor nothing(const Tensor& beside) {
  const int64_t size = 0, stride = 1;
  return empty(1, &size, &stride, beside.dtype(), beside);
}

void launch(Call& call, [[maybe_unused]] const Tensor& beside) {
#ifdef JITACT_CUDA
  if (beside.device_type() == aoti_torch_device_type_cuda()) {
    const CudaStream stream(beside);
    Tensor workspace;
    if (summed(call.op) > 0) workspace = empty_bytes(workspace_bytes(call), beside), call.workspace = workspace.data();
    const char* error = run_cuda(call, stream.get());
    check(error == nullptr, error);
    return;
  }
#endif
  on_cpu([&] { run_cpu(call); });
}

// A call whose inputs are set; the caller sets the outputs and runs it.
struct Prepared {
  Call call;
  List<Tensor> tensors, operands;  // as they are read: the arguments or copies
  List<int64_t> strides;  // of results
  int64_t x;              // index of the tensor whose layout results have

  Prepared(Op op, Arguments& arguments, int64_t x, const Packed* packed = nullptr)
      : call{op}, tensors(std::move(arguments.elements)), operands(kBroadcast), x(x) {
    strides = lay_out(call, tensors, x, packed);
    call.numbers = arguments.numbers;
    for (int k = 0; k < kNumbers; k++) {
      const double magnitude = std::fabs(arguments.numbers[k]);
      check(call.dtype == Dtype::f64 || !(magnitude > FLT_MAX && magnitude < INFINITY),
            "a parameter is beyond the range of float32, in which elements of this dtype are computed");
    }
    for (int b = 0; b < kBroadcast; b++) {
      operands[b] = std::move(arguments.broadcast[b]);
      call.broadcast[b] = place(operands[b], tensors[x], strides);
    }
    for (int b = kMany; b < kBroadcast; b++)
      check(call.broadcast[b].count == 1, "an operand that is declared to have a single value has more");
    if (kRandom > 0) {
      const Tensor& seed = arguments.seed;
      check(seed.numel() == 1 && seed.dtype() == aoti_torch_dtype_int64(), "the seed must be one int64");
      check(same_device(seed, tensors[x]), "the seed is on another device than x");
      call.seed = static_cast<const int64_t*>(seed.const_data());
    }
  }
  Tensor empty_result() const {
    const Tensor& like = tensors[x];
    return empty(like.dim(), like.sizes(), strides.begin(), like.dtype(), like);
  }
  void run() {
    if (call.n > 0) launch(call, tensors[x]);
  }
};

// The operators, in the calling convention of the stable ABI: owned arguments on the stack, replaced by results.

void check_mask(const Tensor& mask, const Tensor& dy) {
  check(mask.numel() == (dy.numel() + 7) / 8 && mask.dtype() == aoti_torch_dtype_uint8() && mask.is_contiguous() &&
            same_device(mask, dy),
        "the mask that backward_from_bit reads must hold one bit for each element of dy, on its device");
}

// The index of the tensor whose layout an operation's results have.
constexpr int64_t laid_out_as(Op op) { return op == Op::backward || op == Op::backward_from_output ? 1 : 0; }

// The arguments of an operation; if it reads a mask, that is checked to fit dy.
Arguments checked_arguments(Op op, const StableIValue* stack) {
  Arguments arguments(op, stack);
  if (reads_bits(op)) {
    check(is_dense(arguments.elements[0]), "backward_from_bit needs dy dense, in the memory order of y");
    check_mask(arguments.mask, arguments.elements[0]);
  }
  return arguments;
}

// forward, and backwards with one gradient.
void one_result(Op op, StableIValue* stack) {
  Arguments arguments = checked_arguments(op, stack);
  Prepared prepared(op, arguments, laid_out_as(op));
  Tensor result = prepared.empty_result();
  prepared.call.written[0].data = result.data();
  if (reads_bits(op)) prepared.call.mask = arguments.bits();
  prepared.run();
  stack[0] = result.release();
}

void forward_bit(Op, StableIValue* stack) {
  Arguments arguments(Op::forward_bit, stack);
  Prepared prepared(Op::forward_bit, arguments, 0);
  Tensor y = prepared.empty_result(), mask = empty_mask(y);
  prepared.call.written[0].data = y.data();
  prepared.call.mask = static_cast<uint8_t*>(mask.data());
  prepared.run();
  stack[0] = y.release();
  stack[1] = mask.release();
}

void forward_inplace(Op op, StableIValue* stack) {
  Arguments arguments(op, stack);
  AtenTensorHandle again;
  SHIM(aoti_torch_new_tensor_handle(arguments.elements[0].get(), &again));
  const Tensor x(again);
  for (int64_t i = 0; i < x.dim(); i++)
    check(x.strides()[i] != 0 || x.sizes()[i] <= 1 || x.numel() == 0,
          "x cannot be changed in place: more than one element of the written-to tensor refers to a single memory location; "
          "clone() it");
  Prepared prepared(op, arguments, 0);
  const Tensor& y = prepared.tensors[0];  // x itself, or a copy
  Tensor mask;
  if (op == Op::forward_bit) {
    mask = empty_mask(x);
    prepared.call.mask = static_cast<uint8_t*>(mask.data());
  }
  prepared.call.written[0] = prepared.call.read[0];
  prepared.call.written[0].data = prepared.call.read[0].data = y.data();
  prepared.run();
  if (y.const_data() != x.const_data() && aoti_torch_copy_(x.get(), y.get(), false) != 0)
    refused("x cannot be changed in place: ");
  if (op == Op::forward_bit) stack[0] = mask.release();
}

// Allocates the gradients of channels and rows, and sets them as the call's outputs. Bit k of `wanted`: whether gradient k is.
List<Tensor> make_sums(Prepared& prepared, int64_t wanted) {
  List<Tensor> sums(kSums);
  for (int k = 0; k < kSums; k++) {
    const bool is_wanted = wanted >> k & 1;
    sums[k] = is_wanted ? empty_like(prepared.operands[k]) : nothing(prepared.tensors[prepared.x]);
    prepared.call.sums[k] = is_wanted ? sums[k].data() : nullptr;
    if (is_wanted && prepared.call.n == 0) SHIM(aoti_torch_zero_(sums[k].get()));
  }
  return sums;
}

// Runs a call with sums, which have the memory order in which the operands were read, and makes them contiguous.
void run_with_sums(Prepared& prepared, List<Tensor>& sums) {
  prepared.run();
  for (Tensor& sum : sums) sum = contiguous(std::move(sum));
}

// The bits of `wanted` for the gradients that are summed or, with `summed` false, for the others, moved together.
int64_t bits_of(bool summed, int64_t wanted) {
  int64_t bits = 0;
  for (int g = 0, k = 0; g < kGradients; g++)
    if (is_broadcast(kRoles.of[gradient_argument(g)]) == summed) bits |= (wanted >> g & 1) << k++;
  return bits;
}

// Backwards with several gradients: of elements, and of channels and rows, which are summed.
void all_gradients(Op op, StableIValue* stack) {
  const Op with_sums = op == Op::backward ? Op::backward_sums : Op::backward_from_bit_sums;
  const int count = op == Op::backward ? kGradients : kBitGradients;
  Arguments arguments = checked_arguments(op, stack);
  const int64_t wanted = int64_t(*arguments.rest), of_elements = bits_of(false, wanted), of_sums = bits_of(true, wanted);
  Prepared prepared(of_sums ? with_sums : op, arguments, laid_out_as(op));
  List<Tensor> elements(writes(op)), sums = make_sums(prepared, of_sums);
  for (int w = 0; w < writes(op); w++) {
    const bool is_wanted = of_elements >> w & 1;
    elements[w] = is_wanted ? prepared.empty_result() : nothing(prepared.tensors[prepared.x]);
    prepared.call.written[w].data = is_wanted ? elements[w].data() : nullptr;
  }
  if (reads_bits(op)) prepared.call.mask = arguments.bits();
  if (wanted) run_with_sums(prepared, sums);
  for (int g = 0, w = 0, k = 0; g < count; g++)
    *stack++ = (is_broadcast(kRoles.of[gradient_argument(g)]) ? sums[k++] : elements[w++]).release();
}

// The same with the gradients of two elements in one tensor.
void packed_gradients(Op, StableIValue* stack) {
  Arguments arguments(Op::backward, stack);
  const StableIValue* rest = arguments.rest;
  const int64_t wanted = kSums > 0 ? int64_t(*rest++) : 0;
  Packed packed(arguments.elements[1], int64_t(rest[0]), int64_t(rest[1]));
  Prepared prepared(wanted ? Op::backward_sums : Op::backward, arguments, 1, &packed);
  List<Tensor> sums = make_sums(prepared, wanted);
  for (int w = 0; w < kElementGradients; w++)
    prepared.call.written[w].data = static_cast<char*>(packed.whole.data()) + packed.offset[w] * bytes_of(prepared.call.dtype);
  run_with_sums(prepared, sums);
  *stack++ = packed.whole.release();
  for (Tensor& sum : sums) *stack++ = sum.release();
}

// "Tensor" or "(Tensor, Tensor, ...)".
Text tensors(int count) {
  if (count == 1) return Text("Tensor");
  Text list("(Tensor");
  for (int i = 1; i < count; i++) list.add(", Tensor");
  list.add(")");
  return list;
}

void copy(Op, StableIValue* stack) {
  const Tensor to(stack[0]), from(stack[1]);
  check(same_shape(to, from) && same_device(to, from) && dtype_of(to) == dtype_of(from) && is_dense(to),
        "a copy is into dense memory, and of one shape, dtype and device");
  check_allocated(to);
  check_allocated(from);
  copy_elements(to, from);
}

// A function above for one operation, as an operator.
template <void (*function)(Op, StableIValue*), Op op>
void boxed(StableIValue* stack, uint64_t, uint64_t) { function(op, stack); }

void register_operators(const char* name, const char* elements, const char* others) {
  const Registration registration(name);
  const Text all(elements, others), inplace("Tensor(a!)", elements + std::strlen("Tensor"), others);
  registration.add("_forward", all, "Tensor", boxed<one_result, Op::forward>);
  registration.add("_forward_", inplace, "()", boxed<forward_inplace, Op::forward>);
  const Text backward("Tensor dy, ", all.get());
  if constexpr (kGradients == 1) registration.add("_backward", backward, "Tensor", boxed<one_result, Op::backward>);
  else
    registration.add("_backward", Text(backward.get(), ", int wanted"), tensors(kGradients).get(),
                     boxed<all_gradients, Op::backward>);
  if constexpr (kPacks)
    registration.add("_backward_packed", Text(backward.get(), kSums > 0 ? ", int wanted" : "", ", int layout, int dim"),
                     tensors(1 + kSums).get(), boxed<packed_gradients, Op::backward>);
  if constexpr (kSavesOutput)
    registration.add("_backward_from_output", Text("Tensor dy, Tensor y", others), "Tensor",
                     boxed<one_result, Op::backward_from_output>);
  if constexpr (kSavesBit) {
    registration.add("_copy_", Text("Tensor(a!) to, Tensor from"), "()", boxed<copy, Op::forward>);
    registration.add("_forward_bit", all, "(Tensor, Tensor)", boxed<forward_bit, Op::forward_bit>);
    registration.add("_forward_bit_", inplace, "Tensor", boxed<forward_inplace, Op::forward_bit>);
    const Text from_bit("Tensor dy, Tensor mask", others);
    if constexpr (kBitGradients > 1)
      registration.add("_backward_from_bit", Text(from_bit.get(), ", int wanted"), tensors(kBitGradients).get(),
                       boxed<all_gradients, Op::backward_from_bit>);
    else registration.add("_backward_from_bit", from_bit, "Tensor", boxed<one_result, Op::backward_from_bit>);
  }
}

}  // namespace
}  // namespace jitact::binding

#endif  // JITACT_ROWS

// Registers the operators under `name`, which the loader chooses: an activation that is redefined in one process needs a new
// name. `elements` and `others` are the arguments in the schema, e.g. "Tensor x" and ", Tensor weight, float alpha".
// Registrations last as long as the process. Returns null or an error message.
extern "C" __attribute__((visibility("default"))) const char* jitact_register(const char* name, const char* elements,
                                                                              const char* others) {
  static jitact::binding::Text error;
  try {
    jitact::binding::registered_name = strdup(name);
    jitact::binding::register_operators(name, elements, others);
    return nullptr;
  } catch (const std::exception& e) {
    error = jitact::binding::Text(e.what());
    return error.get();
  }
}
