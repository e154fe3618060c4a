"""What :mod:`jitact.onefile` writes for activations that learn weights, in place of parts of :mod:`jitact.onefile_text`, and
the modules of those whose constructors are not simply their parameters.

Lines that start with ``@channels`` are for activations that may have a weight for each channel, ``@single`` for the others.
"""

RESULTS = """
template <typename T, int n>
struct Many {
  T of[n];
};

template <typename T, int n>
struct Gradients : Many<T, n> {
  JITACT_INLINE Gradients& operator+=(const Gradients& b) {
    for (int k = 0; k < n; k++) this->of[k] += b.of[k];
    return *this;
  }
};
"""

ELEMENTS = """\
constexpr int kWeights = $weights, kLearned = $learned;  // those that are learned come first

// The weights of an element, and what it goes through with them.
template <typename T>
struct Weights {
  T of[kWeights];
};

template <typename T>
INLINE T forward(T x, const Weights<T>& w) {
  return forward(x, $given);
}
template <typename T>
INLINE T backward(T dy, T x, const Weights<T>& w) {
  return backward(dy, x, $given).of[0];
}
template <typename T>
INLINE Gradients<T, kLearned> weight_gradients(T dy, T x, const Weights<T>& w) {
  const auto all = backward(dy, x, $given);
  Gradients<T, kLearned> sums;
  for (int k = 0; k < kLearned; k++) sums.of[k] = all.of[1 + k];
  return sums;
}
"""

GPU = """
// What weights and sums are in: float, or double for double.
template <typename S>
using Value = typename Storage<S>::T::Value;

// How memory is walked: in pieces, as long as a block's vectors.
@channels // Element i has the weights of channel i / inner % channels. After a row, a multiple of all channels, these begin
@channels // again: a block takes one piece of many rows, so its threads keep their weights and sums in registers. One channel
@channels // is one row, and each block takes a piece of it.
template <typename S, bool forward>
struct Walk {
  static constexpr int size = Vector<S>::size, stride = kThreads * size, piece = stride * kVectors<S, forward>;
@channels   int64_t n, channels, inner;
@channels   int64_t row, rows;        // the length of a row, and how many there are
@channels   unsigned pieces, groups;  // blocks side by side on a row, and blocks that share the rows of a piece
@channels   int64_t slots;            // pieces that a plane, `inner` elements of one channel, may have a part of
@single   int64_t n;
@single   unsigned blocks;  // one for each piece

@channels   Walk(int64_t n, int64_t channels, int64_t inner) : n(n), channels(channels), inner(inner) {
@channels     const int64_t all = channels * inner;
@channels     int64_t times = (4 * piece + all - 1) / all;
@channels     if (all % size) times = (times + size - 1) / size * size;  // a row begins on 16 bytes, as the first does
@channels     row = channels > 1 ? all * times : n;
@channels     rows = (n + row - 1) / row;
@channels     pieces = unsigned(((row < n ? row : n) + piece - 1) / piece);
@channels     groups = unsigned(between(1, between(512, n / (16 * piece), 8192) / pieces, rows));
@channels     slots = (inner + piece - 2) / piece + 1;
@channels   }
@channels   INLINE int64_t planes() const { return row / inner; }
@channels   // Of each weight: a sum for each group, slot and plane, laid out in this order.
@channels   int64_t sums() const { return groups * slots * planes(); }
@single   Walk(int64_t n) : n(n), blocks(unsigned((n + piece - 1) / piece)) {}
@single   int64_t sums() const { return blocks; }  // of each weight
@channels
@channels   static int64_t between(int64_t low, int64_t x, int64_t high) { return x < low ? low : x < high ? x : high; }
};

// The sum over `lanes` threads side by side, in the first of them.
template <typename V>
__device__ V warp_sum(V v, int lanes = 32) {
  for (int step = lanes / 2; step > 0; step /= 2) v += __shfl_down_sync(0xffffffffu, v, step, lanes);
  return v;
}

// Adds up over a block, and writes the sum of weight k to sums[k * stride + blockIdx.x].
template <typename T, typename V>
__device__ void add_up(const Gradients<T, kLearned>& sum, V* sums, int64_t stride) {
  __shared__ V shared[kLearned][kThreads / 32];
  const int t = threadIdx.x;
  for (int k = 0; k < kLearned; k++) {
    const V v = warp_sum(sum.of[k].v);
    if (t % 32 == 0) shared[k][t / 32] = v;
  }
  __syncthreads();
  if (t >= kLearned) return;
  V v = 0;
  for (int i = 0; i < kThreads / 32; i++) v += shared[t][i];
  sums[t * stride + blockIdx.x] = v;
}

// The first `count` elements of a vector, one by one.
template <typename S>
__device__ void load_some(const S* from, int64_t count, Vector<S>& v) {
#pragma unroll
  for (int i = 0; i < Vector<S>::size; i += 2) {
    if (i < count) v.pairs[i / 2].x = from[i];
    if (i + 1 < count) v.pairs[i / 2].y = from[i + 1];
  }
}
template <typename S>
__device__ void store_some(S* to, int64_t count, const Vector<S>& v) {
#pragma unroll
  for (int i = 0; i < Vector<S>::size; i += 2) {
    if (i < count) to[i] = v.pairs[i / 2].x;
    if (i + 1 < count) to[i + 1] = v.pairs[i / 2].y;
  }
}

enum class Task { forward, backward, backward_with_sums };

// a is x, or dy in backward, where b is x; out is y, or dx, which may be null.
@channels template <typename S, Task task, bool one_channel>
@single template <typename S, Task task>
__global__ void __launch_bounds__(kThreads)
    apply(const S* __restrict__ a, const S* __restrict__ b, S* __restrict__ out, const Value<S>* __restrict__ weights,
          Value<S>* __restrict__ sums, bool aligned, const Walk<S, task == Task::forward> walk) {
  using T = typename Storage<S>::T;
  constexpr int size = walk.size, stride = walk.stride, piece = walk.piece, vectors = kVectors<S, task == Task::forward>;
  const int t = threadIdx.x;
@channels   const int64_t begin = int64_t(blockIdx.x) * piece;  // in a row
@channels   constexpr int columns = one_channel ? 1 : vectors * size;  // of a thread, with own weights and sums
@channels   Weights<T> w[columns];
@channels #pragma unroll
@channels   for (int v = 0; v < columns; v += size) {
@channels     const int64_t column = begin + v * kThreads + t * size, plane = one_channel ? 0 : column / walk.inner;
@channels     int64_t c = one_channel ? 0 : plane % walk.channels, left = (plane + 1) * walk.inner - column;
@channels #pragma unroll
@channels     for (int i = v; i < columns && i < v + size; i++) {
@channels       for (int k = 0; k < kWeights; k++) w[i].of[k] = weights[k * walk.channels + c];
@channels       if (--left == 0) left = walk.inner, c = c + 1 == walk.channels ? 0 : c + 1;
@channels     }
@channels   }
@channels   Gradients<T, kLearned> sum[columns] = {};
@single   Weights<T> w;
@single   for (int k = 0; k < kWeights; k++) w.of[k] = weights[k];
@single   Gradients<T, kLearned> sum{};

@channels   for (int64_t row = blockIdx.y; row < walk.rows; row += gridDim.y) {
@single   for (int64_t first = int64_t(blockIdx.x) * piece; first < walk.n; first += int64_t(gridDim.x) * piece) {
    // All loads are under way before the first of them is waited for.
    Vector<S> va[vectors] = {}, vb[vectors] = {};
    int64_t count[vectors];  // elements from the vector's first to the end
#pragma unroll
    for (int v = 0; v < vectors; v++) {
@channels       const int64_t column = begin + v * stride + t * size, at = row * walk.row + column;
@channels       count[v] = column < walk.row ? walk.n - at : 0;
@single       const int64_t at = first + v * stride + t * size;
@single       count[v] = walk.n - at;
      if (aligned && count[v] >= size) {
        va[v] = Vector<S>::load(a + at);
        if constexpr (task != Task::forward) vb[v] = Vector<S>::load(b + at);
      }
    }
#pragma unroll
    for (int v = 0; v < vectors; v++) {
@channels       const int64_t at = row * walk.row + begin + v * stride + t * size;
@single       const int64_t at = first + v * stride + t * size;
      const bool whole = aligned && count[v] >= size;
      if (!whole) {
        load_some(a + at, count[v], va[v]);
        if constexpr (task != Task::forward) load_some(b + at, count[v], vb[v]);
      }
      const auto compute = [&](T a, [[maybe_unused]] T b, [[maybe_unused]] int i) {
@channels         const int own = one_channel ? 0 : v * size + i;
@channels         if constexpr (task == Task::backward_with_sums) sum[own] += weight_gradients(a, b, w[own]);
@channels         if constexpr (task == Task::forward) return forward(a, w[own]).v;
@channels         else return backward(a, b, w[own]).v;
@single         if constexpr (task == Task::backward_with_sums) sum += weight_gradients(a, b, w);
@single         if constexpr (task == Task::forward) return forward(a, w).v;
@single         else return backward(a, b, w).v;
      };
#pragma unroll
      for (int i = 0; i < size / 2; i++) {
        const auto x = widen(va[v].pairs[i]), y = widen(vb[v].pairs[i]);
        narrow({compute(T(x.x), T(y.x), 2 * i), compute(T(x.y), T(y.y), 2 * i + 1)}, va[v].pairs[i]);
      }
      if (out == nullptr) continue;
      if (whole) va[v].store(out + at);
      if (!whole) store_some(out + at, count[v], va[v]);
    }
  }

@single   if constexpr (task == Task::backward_with_sums) add_up(sum, sums, gridDim.x);
@channels   if constexpr (task == Task::backward_with_sums && one_channel) {
@channels     add_up(sum[0], sums, walk.slots);
@channels   } else if constexpr (task == Task::backward_with_sums) {
@channels     // The sums of the piece, put together for each plane that has a part of it, by `lanes` threads.
@channels     __shared__ Value<S> shared[piece];
@channels     const int64_t end = begin + piece < walk.row ? begin + piece : walk.row;
@channels     const int lanes = walk.inner < 32 ? 1 : walk.inner < 256 ? 8 : 32, side_by_side = kThreads / lanes;
@channels     for (int k = 0; k < kLearned; k++) {
@channels       __syncthreads();
@channels #pragma unroll
@channels       for (int i = 0; i < columns; i++) shared[i / size * stride + t * size + i % size] = sum[i].of[k].v;
@channels       __syncthreads();
@channels       for (int64_t base = begin / walk.inner; base * walk.inner < end; base += side_by_side) {
@channels         const int64_t plane = base + t / lanes, from = plane * walk.inner, slot = blockIdx.x - from / piece;
@channels         const int low = int((from < begin ? begin : from) - begin);
@channels         const int high = int((from + walk.inner < end ? from + walk.inner : end) - begin);
@channels         Value<S> v = 0;
@channels         for (int i = low + t % lanes; i < high; i += lanes) v += shared[i];
@channels         v = warp_sum(v, lanes);
@channels         if (t % lanes == 0 && from < end)
@channels           sums[((int64_t(k) * gridDim.y + blockIdx.y) * walk.slots + slot) * walk.planes() + plane] = v;
@channels       }
@channels     }
@channels   }
}

constexpr int kFoldThreads = 256;

@channels // Of weight z, adds up rows of a sum for each channel: block (x, y, z) those of `wide` channels, part y of gridDim.y.
@channels template <typename V>
@channels __global__ void fold(const V* sums, V* folded, int64_t rows, int64_t channels, int wide) {
@channels   const int t = threadIdx.x, height = kFoldThreads / wide;
@channels   const int64_t c = int64_t(blockIdx.x) * wide + t % wide;
@channels   V v = 0;
@channels   if (c < channels)
@channels     for (int64_t row = blockIdx.y * height + t / wide; row < rows; row += gridDim.y * height)
@channels       v += sums[(blockIdx.z * rows + row) * channels + c];
@channels   __shared__ V shared[kFoldThreads];
@channels   shared[t] = v;
@channels   for (int step = kFoldThreads / 2; step >= wide; step /= 2) {
@channels     __syncthreads();
@channels     if (t < step) shared[t] += shared[t + step];
@channels   }
@channels   if (t < wide && c < channels) folded[(int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * channels + c] = shared[t];
@channels }
@channels
@channels // How many parts a fold is done in: more than one are folded again.
@channels int64_t parts(int64_t rows) { return rows < 512 ? 1 : rows < 256 * 64 ? rows / 256 : 64; }
@channels
@channels template <typename V>
@channels void fold_all(const V* sums, V* workspace, V* gradients, int64_t rows, int64_t channels, cudaStream_t stream) {
@channels   int wide = 1;
@channels   while (wide < 32 && wide < channels) wide *= 2;
@channels   const unsigned x = unsigned((channels + wide - 1) / wide), y = unsigned(parts(rows));
@channels   V* folded = y > 1 ? workspace : gradients;
@channels   fold<<<dim3(x, y, kLearned), kFoldThreads, 0, stream>>>(sums, folded, rows, channels, wide);
@channels   if (y > 1) fold<<<dim3(x, 1, kLearned), kFoldThreads, 0, stream>>>(folded, gradients, y, channels, wide);
@channels }
@single constexpr int kParts = 64;  // of the sums of a weight, folded to one sum each before these are folded too
@single
@single // Block (x, k) adds up part x of gridDim.x of the sums of weight k.
@single template <typename V>
@single __global__ void fold(const V* sums, V* folded, int64_t count) {
@single   V v = 0;
@single   for (int64_t i = blockIdx.x * kFoldThreads + threadIdx.x; i < count; i += int64_t(gridDim.x) * kFoldThreads)
@single     v += sums[blockIdx.y * count + i];
@single   __shared__ V shared[kFoldThreads / 32];
@single   v = warp_sum(v);
@single   if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
@single   __syncthreads();
@single   v = warp_sum(threadIdx.x < kFoldThreads / 32 ? shared[threadIdx.x] : V(0));
@single   if (threadIdx.x == 0) folded[blockIdx.y * gridDim.x + blockIdx.x] = v;
@single }

template <typename S, Task task>
void launch(const void* a, const void* b, void* out, const void* weights, void* sums,
            const Walk<S, task == Task::forward>& walk, cudaStream_t stream) {
  const bool aligned = (uintptr_t(a) | uintptr_t(b) | uintptr_t(out)) % 16 == 0;
@channels   const auto kernel = walk.channels == 1 ? apply<S, task, true> : apply<S, task, false>;
@channels   kernel<<<dim3(walk.pieces, walk.groups), kThreads, 0, stream>>>(
@single   apply<S, task><<<walk.blocks, kThreads, 0, stream>>>(
      static_cast<const S*>(a), static_cast<const S*>(b), static_cast<S*>(out), static_cast<const Value<S>*>(weights),
      static_cast<Value<S>*>(sums), aligned, walk);
}

template <typename F>
auto dispatch(int dtype, const F& f) {
  switch (dtype) {
    case 0: return f.template operator()<double>();
    case 1: return f.template operator()<float>();
    case 2: return f.template operator()<__half>();
    default: return f.template operator()<__nv_bfloat16>();
  }
}

const char* last_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

// How many sums backward needs memory for. They must be 0 when it is called.
extern "C" int64_t sums_cuda(int dtype, int64_t n$sizes_taken) {
  if (n == 0) return 0;
  return dispatch(dtype, [&]<typename S>() {
    const Walk<S, false> walk(n$sizes);
@channels     const int64_t rows = walk.sums() / channels;
@channels     return kLearned * (walk.sums() + parts(rows) * channels);
@single     return kLearned * (walk.sums() + kParts);
  });
}

// These return null or CUDA's message.
extern "C" const char* forward_cuda(int dtype, void* x, void* weights, void* y, int64_t n$sizes_taken,
                                    void* stream) {
  if (n == 0) return nullptr;
  dispatch(dtype, [&]<typename S>() {
    launch<S, Task::forward>(x, nullptr, y, weights, nullptr, {n$sizes}, static_cast<cudaStream_t>(stream));
  });
  return last_error();
}

// The gradients of x and of the weights; that of x may be null, the other one and the sums too.
extern "C" const char* backward_cuda(int dtype, void* dy, void* x, void* weights, void* dx, void* gradients, void* sums,
                                     int64_t n$sizes_taken, void* stream) {
  if (n == 0) return nullptr;
  dispatch(dtype, [&]<typename S>() {
    const auto s = static_cast<cudaStream_t>(stream);
    const Walk<S, false> walk(n$sizes);
    if (gradients == nullptr) return launch<S, Task::backward>(dy, x, dx, weights, nullptr, walk, s);
    launch<S, Task::backward_with_sums>(dy, x, dx, weights, sums, walk, s);
    auto* of = static_cast<Value<S>*>(sums);
@channels     fold_all(of, of + kLearned * walk.sums(), static_cast<Value<S>*>(gradients), walk.sums() / channels, channels, s);
@single     Value<S>* folded = of + kLearned * walk.sums();
@single     fold<<<dim3(kParts, kLearned), kFoldThreads, 0, s>>>(of, folded, walk.sums());
@single     fold<<<dim3(1, kLearned), kFoldThreads, 0, s>>>(folded, static_cast<Value<S>*>(gradients), kParts);
  });
  return last_error();
}
"""

CPU_HEADERS = """
#include <algorithm>
#include <vector>
"""

CPU = """
template <typename T>
@channels Weights<T> weights_of(const void* weights, int64_t channels, int64_t c) {
@single Weights<T> weights_of(const void* weights) {
  Weights<T> w;
@channels   for (int k = 0; k < kWeights; k++) w.of[k] = static_cast<const typename T::Value*>(weights)[k * channels + c];
@single   for (int k = 0; k < kWeights; k++) w.of[k] = static_cast<const typename T::Value*>(weights)[k];
  return w;
}

template <typename S, typename T>
void run_forward(const void* x, const void* weights, void* y, int64_t n$sizes_taken) {
@channels   for (int64_t first = 0, c = 0; first < n; first += inner, c = c + 1 == channels ? 0 : c + 1) {
@channels     const Weights<T> w = weights_of<T>(weights, channels, c);
@channels     for (int64_t i = first; i < first + inner; i++)
@channels       narrow(forward(T(widen(static_cast<const S*>(x)[i])), w).v, static_cast<S*>(y)[i]);
@channels   }
@single   const Weights<T> w = weights_of<T>(weights);
@single   for (int64_t i = 0; i < n; i++) narrow(forward(T(widen(static_cast<const S*>(x)[i])), w).v, static_cast<S*>(y)[i]);
}

template <typename S, typename T>
void run_backward(const void* dy, const void* x, const void* weights, void* dx, void* gradients,
                  int64_t n$sizes_taken) {
@channels   std::vector<double> sums(kLearned * channels);
@channels   for (int64_t first = 0, c = 0; first < n; first += inner, c = c + 1 == channels ? 0 : c + 1) {
@channels     const Weights<T> w = weights_of<T>(weights, channels, c);
@channels     for (int64_t i = first; i < first + inner; i++) {
@channels       const T a = widen(static_cast<const S*>(dy)[i]), b = widen(static_cast<const S*>(x)[i]);
@channels       const auto gain = weight_gradients(a, b, w);
@channels       for (int k = 0; k < kLearned; k++) sums[k * channels + c] += double(gain.of[k].v);
@channels       if (dx) narrow(backward(a, b, w).v, static_cast<S*>(dx)[i]);
@channels     }
@channels   }
@single   std::vector<double> sums(kLearned);
@single   const Weights<T> w = weights_of<T>(weights);
@single   for (int64_t i = 0; i < n; i++) {
@single     const T a = widen(static_cast<const S*>(dy)[i]), b = widen(static_cast<const S*>(x)[i]);
@single     const auto gain = weight_gradients(a, b, w);
@single     for (int k = 0; k < kLearned; k++) sums[k] += double(gain.of[k].v);
@single     if (dx) narrow(backward(a, b, w).v, static_cast<S*>(dx)[i]);
@single   }
  if (gradients) std::copy(sums.begin(), sums.end(), static_cast<typename T::Value*>(gradients));
}

}  // namespace

extern "C" void forward_cpu(int dtype, void* x, void* weights, void* y, int64_t n$sizes_taken) {
  if (dtype == 0) run_forward<double, numbers::Double>(x, weights, y, n$sizes);
  if (dtype == 1) run_forward<float, numbers::Single>(x, weights, y, n$sizes);
  if (dtype == 2) run_forward<Half, numbers::Narrow>(x, weights, y, n$sizes);
  if (dtype == 3) run_forward<Bfloat16, numbers::Narrow>(x, weights, y, n$sizes);
}
extern "C" void backward_cpu(int dtype, void* dy, void* x, void* weights, void* dx, void* gradients, void*,
                             int64_t n$sizes_taken) {
  if (dtype == 0) run_backward<double, numbers::Double>(dy, x, weights, dx, gradients, n$sizes);
  if (dtype == 1) run_backward<float, numbers::Single>(dy, x, weights, dx, gradients, n$sizes);
  if (dtype == 2) run_backward<Half, numbers::Narrow>(dy, x, weights, dx, gradients, n$sizes);
  if (dtype == 3) run_backward<Bfloat16, numbers::Narrow>(dy, x, weights, dx, gradients, n$sizes);
}
"""

# The autograd function.
FUNCTION = """\
@channels def sizes(x, weights):
@channels     \"\"\"How many channels there are, and how many elements of one of them lie side by side.\"\"\"
@channels     channels = weights.shape[1]
@channels     if channels == 1:
@channels         return 1, x.numel()
@channels     if x.dim() < 2 or x.shape[1] != channels:
@channels         raise ValueError(f"$name: {channels} weights do not fit dimension 1 of an input of shape {tuple(x.shape)}")
@channels     return channels, x.stride(1)
@channels
@channels
class $title(torch.autograd.Function):
    \"\"\"Forward, keeping the input for backward; weights are float32, or float64 for float64, a row for each.\"\"\"

    @staticmethod
    def forward(ctx, x, weights):
        y = torch.empty_like(x)
        x = laid_out_like(y, x)
@channels         launch("forward", sizes(x, weights), x, weights, y)
@single         launch("forward", (), x, weights, y)
        ctx.save_for_backward(x, weights)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weights = ctx.saved_tensors
        wants_dx, wants_gradients = ctx.needs_input_grad
        dx = torch.empty_like(x) if wants_dx else None
        gradients = torch.zeros_like(weights) if wants_gradients else None
        sums = None
@channels         shape = sizes(x, weights)
@single         shape = ()
        if x.is_cuda and wants_gradients:
            count = library().sums_cuda
            count.restype = ctypes.c_int64
            needed = count(DTYPES.index(x.dtype), *map(ctypes.c_int64, (x.numel(), *shape)))
            sums = weights.new_zeros(needed)
        launch("backward", shape, laid_out_like(x, dy), x, weights, dx, gradients, sums)
        return dx, gradients
"""

PRELU = """\
class ModelNew(nn.Module):
    \"\"\"PReLU, as compiled above.\"\"\"

    def __init__(self, num_parameters=1, init=0.25, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.full((num_parameters,), init, device=device, dtype=dtype))

    def forward(self, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        return PReLU.apply(x, self.weight.to(wide).view(1, -1))


class Model(nn.Module):
    \"\"\"PReLU, as PyTorch has it.\"\"\"

    def __init__(self, num_parameters=1, init=0.25, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.full((num_parameters,), init, device=device, dtype=dtype))

    def forward(self, x):
        return F.prelu(x, self.weight)
"""

RRELU = """\
class ModelNew(nn.Module):
    \"\"\"RReLU, as compiled above.\"\"\"

    def __init__(self, lower=1 / 8, upper=1 / 3):
        super().__init__()
        self.lower = lower
        self.upper = upper

    def forward(self, x):
        mean = (self.lower + self.upper) / 2
        return RReLU.apply(x, self.lower, self.upper) if self.training else RReLU.apply(x, mean, mean)


class Model(nn.Module):
    \"\"\"RReLU, as PyTorch has it, which in training draws other slopes.\"\"\"

    def __init__(self, lower=1 / 8, upper=1 / 3):
        super().__init__()
        self.lower = lower
        self.upper = upper

    def forward(self, x):
        return F.rrelu(x, self.lower, self.upper, self.training)
"""

XIELU = """\
class ModelNew(nn.Module):
    \"\"\"xIELU, as compiled above.\"\"\"

    def __init__(self, alpha_p_init=0.8, alpha_n_init=0.8, beta=0.5, eps=-1e-6, dtype=torch.bfloat16):
        super().__init__()
        # The inverse of softplus.
        self.alpha_p = nn.Parameter(torch.tensor([math.log(math.expm1(alpha_p_init))], dtype=dtype))
        self.alpha_n = nn.Parameter(torch.tensor([math.log(math.expm1(alpha_n_init - beta))], dtype=dtype))
        self.register_buffer("beta", torch.tensor(beta, dtype=dtype))
        self.register_buffer("eps", torch.tensor(eps, dtype=dtype))

    def forward(self, x):
        x = x.to(torch.promote_types(x.dtype, self.alpha_p.dtype))
        wide = torch.promote_types(x.dtype, torch.float32)
        learned = F.softplus(torch.cat([self.alpha_p, self.alpha_n]).to(wide))
        fixed = torch.stack([self.beta, self.eps]).to(wide)
        return XIELU.apply(x, torch.cat([learned, fixed]))


class Model(nn.Module):
    \"\"\"xIELU, as transformers' XIELUActivation has it in PyTorch.\"\"\"

    def __init__(self, alpha_p_init=0.8, alpha_n_init=0.8, beta=0.5, eps=-1e-6, dtype=torch.bfloat16):
        super().__init__()
        self.alpha_p = nn.Parameter(torch.tensor([math.log(math.expm1(alpha_p_init))], dtype=dtype))
        self.alpha_n = nn.Parameter(torch.tensor([math.log(math.expm1(alpha_n_init - beta))], dtype=dtype))
        self.register_buffer("beta", torch.tensor(beta, dtype=dtype))
        self.register_buffer("eps", torch.tensor(eps, dtype=dtype))

    def forward(self, x):
        p, n = F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n)
        left = (torch.expm1(torch.min(x, self.eps)) - x) * n + self.beta * x
        return torch.where(x > 0, p * x * x + self.beta * x, left)
"""

# By name: the modules' text and, where the constructor's defaults are not what get_inputs fits, get_init_inputs' list.
MODULES = {
    "prelu": (PRELU, ""),
    "rrelu": (RRELU, ""),
    "xielu": (XIELU, "0.8, 0.8, 0.5, -1e-6, torch.float32"),
}
