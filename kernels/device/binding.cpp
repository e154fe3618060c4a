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
// This file is compiled at the first use of every activation, while the user waits. So one function serves all operations.
#include "tensors.h"

#ifdef JITACT_ROWS
#include "rows_binding.h"
#else

#include "arrange.h"

namespace jitact::binding {
namespace {

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
  check(mask.numel() == (dy.numel() + 7) / 8 && mask.dtype() == aoti_torch_dtype_uint8() && same_device(mask, dy),
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
    arguments.mask = contiguous(std::move(arguments.mask));  // hooks of saved tensors may return another layout
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
// name. Their errors begin with `activation`. `elements` and `others` are the arguments in the schema, e.g. "Tensor x" and
// ", Tensor weight, float alpha". Registrations last as long as the process. Returns null or an error message.
extern "C" __attribute__((visibility("default"))) const char* jitact_register(const char* activation, const char* name,
                                                                              const char* elements, const char* others) {
  static jitact::binding::Text error;
  try {
    jitact::binding::activation_name = strdup(activation);
    jitact::binding::register_operators(name, elements, others);
    return nullptr;
  } catch (const std::exception& e) {
    error = jitact::binding::Text(e.what());
    return error.get();
  }
}
