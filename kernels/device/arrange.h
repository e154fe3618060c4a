// How the tensors of a call lie in memory: all dense in one order, or in rows that lie apart. Tensors that fit neither are
// copied, by tiles where that is a transposition.
#pragma once

#include "tensors.h"
#include "transpose.h"

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
// results. Returns the strides of the results, which are those of torch.empty_like of tensor `x`, but that
// where x is contiguous, dimensions of size 1 have the usual ones too, as results of torch.relu do.
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
  if (laid_out.is_contiguous()) return dense_strides(usual_order(laid_out.dim()), laid_out.sizes());
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

}  // namespace
}  // namespace jitact::binding
