"""The texts that :mod:`jitact.onefile` fills in: the file, and what it says in C++ and CUDA.

``$name`` stands for a field. A line that starts with ``@`` and a word is for activations of that kind alone: what backward
keeps, ``@input``, ``@output`` (``@tensor`` is either) or ``@bits``; of the last, ``@bit`` are those that need the bit alone and
``@random`` those that draw numbers too. :mod:`jitact.onefile_weights` has the texts of those that learn ``@weights``. The
forward of ``@staged`` ones loads through shared memory, that of ``@direct`` ones does not.
"""

FILE = """\
\"\"\"$formula

Forward and backward as CUDA kernels, compiled at first use; where there is no GPU, for the CPU. For float32, float64, float16
and bfloat16 tensors of any shape. Written by jitact $version (MIT licence).
\"\"\"

import ctypes
import functools
$imports
import torch
${functional}from torch import nn
from torch.utils.cpp_extension import load_inline

# The numbers that are computed with, the functions that are needed, and the activation, in C++ and CUDA.
MATHS = r\"\"\"
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __CUDACC__
#define INLINE __host__ __device__ __forceinline__
#else
#define INLINE inline __attribute__((always_inline))
#endif
#define ELEMENTWISE template <typename T> INLINE

$maths
$kernel
$elements\"\"\"

# How a GPU walks over memory.
GPU = r\"\"\"$gpu\"\"\"

# How a CPU does.
CPU = r\"\"\"$cpu\"\"\"


@functools.cache
def library():
    \"\"\"The compiled functions.\"\"\"
    path = load_inline(
        "${name}_$key",
        cpp_sources=MATHS + CPU,
        cuda_sources=MATHS + GPU if torch.cuda.is_available() else None,
        extra_cflags=["-O3", "-std=c++20", "-march=native"],
        extra_cuda_cflags=["-O3", "-std=c++20"],
        is_python_module=False,
        no_implicit_headers=True,
    )
    return ctypes.CDLL(path)


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@params def launch(function, params, *tensors):
@weights def launch(function, sizes, *tensors):
    \"\"\"Runs a compiled function on the memory of tensors, on their device and its current stream.\"\"\"
    first = tensors[0]
    if first.dtype not in DTYPES:
        raise TypeError(f"$name: expected a float32, float64, float16 or bfloat16 tensor, got {first.dtype}")
    pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]
@params     values = (ctypes.c_double * max(1, len(params)))(*params)
@params     arguments = [DTYPES.index(first.dtype), *pointers, ctypes.c_int64(first.numel()), values]
@weights     arguments = [DTYPES.index(first.dtype), *pointers, *map(ctypes.c_int64, (first.numel(), *sizes))]
    if not first.is_cuda:
        getattr(library(), f"{function}_cpu")(*arguments)
        return
    run = getattr(library(), f"{function}_cuda")
    run.restype = ctypes.c_char_p
    with torch.cuda.device(first.device):
        error = run(*arguments, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
    if error:
        raise RuntimeError(error.decode())


def laid_out_like(like, tensor):
    \"\"\"The tensor, copied only if it does not lie in memory as `like` does.\"\"\"
    return tensor if tensor.stride() == like.stride() else torch.empty_like(like).copy_(tensor)


$function

$classes

batch_size = 4096
dim = 393216


def get_inputs():
    return [torch.randn(batch_size, dim)]


def get_init_inputs():
    return [$init_inputs]
"""

# The modules.
CLASSES = """\
class ModelNew(nn.Module):
    \"\"\"$title, as compiled above.\"\"\"

    def __init__(self$signature):
        super().__init__()
$assigned
    def forward(self, x):
        return $title.apply(x$given)


${helpers}class Model(nn.Module):
    \"\"\"$title, as PyTorch has it.\"\"\"

    def __init__(self$signature):
        super().__init__()
$assigned
    def forward(self, x):
        return $reference
"""

# What one element goes through.
RANDOM = """
// What a random operand is here: the number that Uniform made of it.
template <typename T>
struct Random {
  T number;
  JITACT_INLINE T between(T, T) const { return number; }
};

namespace jitact {

// Makes random bits numbers between lower and upper, the middles of as many parts as there are values of the bits.
template <typename T, int bytes>
class Uniform {
 public:
  Uniform(double lower, double upper)
      : scale_((upper - lower) / (M::step * M::steps)),
        offset_(lower - (upper - lower) * (M::base / (M::step * M::steps) - 0.5 / M::steps)) {}
  JITACT_INLINE T operator()(uint64_t random) const { return fma(T(M::of(typename M::Bits(random))), scale_, offset_); }

 private:
  using M = Mantissa<T>;
  T scale_, offset_;
};

}  // namespace jitact
"""

ELEMENTS = """\
@tensor template <typename T>
@tensor struct Forward {
@tensor   static constexpr bool reads_two = false;
@tensor $fields  INLINE T operator()(T x, T) const { return forward(x$listed); }
@tensor };
@tensor
@tensor template <typename T>
@tensor struct Backward {
@tensor   static constexpr bool reads_two = true;
@tensor $fields  INLINE T operator()(T dy, T $kept) const { return $gradient; }
@tensor };
@random // The random slopes of the elements of a vector of 16 bytes, by its place in memory and the seed.
@random template <typename T, int bytes>
@random struct Slopes {
@random   T of[16 / bytes];
@random   INLINE Slopes(const numbers::Uniform<T, bytes>& uniform, uint64_t place, uint64_t seed) {
@random     const numbers::Random16 random = numbers::philox(place, seed, 0);
@random     for (int i = 0; i < 16 / bytes; i++) {
@random       if constexpr (bytes == 8) of[i] = uniform(uint64_t(random.w[2 * i + 1]) << 32 | random.w[2 * i]);
@random       if constexpr (bytes == 4) of[i] = uniform(random.w[i]);
@random       if constexpr (bytes == 2) of[i] = uniform(random.w[i / 2] >> i % 2 * 16 & 0xffff);
@random     }
@random   }
@random };
@random
@bits // Beside the number, each takes and gives one bit of the element.
@bits template <typename T>
@bits struct Forward {
@bits   static constexpr bool reads_bits = false, writes_bits = false;
@bits $fields  INLINE T operator()(T x, bool&$taken) const { return forward(x$listed); }
@bits };
@bits
@bits template <typename T>
@bits struct ForwardBits {
@bits   static constexpr bool reads_bits = false, writes_bits = true;
@bits $fields  INLINE T operator()(T x, bool& bit$taken) const {
@bits     bit = keeps(x$listed);
@bits     return forward(x$listed);
@bits   }
@bits };
@bits
@bits template <typename T>
@bits struct Backward {
@bits   static constexpr bool reads_bits = true, writes_bits = false;
@bits $fields  INLINE T operator()(T dy, bool& bit$taken) const { return $gradient; }
@bits };
"""

GPU_STORAGE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
@staged #include <cuda_pipeline.h>

namespace {

// How many threads a block has, and how many vectors of 16 bytes each of them takes.
$vectors
// What a storage type is computed in, and its pairs: the hardware rounds two numbers to 16 bits in one instruction.
template <typename S> struct Storage;
template <> struct Storage<double> { using T = numbers::Double; using Pair = double2; };
template <> struct Storage<float> { using T = numbers::Single; using Pair = float2; };
template <> struct Storage<__half> { using T = numbers::Narrow; using Pair = __half2; };
template <> struct Storage<__nv_bfloat16> { using T = numbers::Narrow; using Pair = __nv_bfloat162; };

__device__ double2 widen(double2 p) { return p; }
__device__ float2 widen(float2 p) { return p; }
__device__ float2 widen(__half2 p) { return __half22float2(p); }
__device__ float2 widen(__nv_bfloat162 p) { return __bfloat1622float2(p); }
__device__ void narrow(double2 v, double2& p) { p = v; }
__device__ void narrow(float2 v, float2& p) { p = v; }
__device__ void narrow(float2 v, __half2& p) { p = __float22half2_rn(v); }
__device__ void narrow(float2 v, __nv_bfloat162& p) { p = __float22bfloat162_rn(v); }

template <typename S>
struct alignas(16) Vector {
  static constexpr int size = 16 / sizeof(S);
  typename Storage<S>::Pair pairs[size / 2];

  // Each is one instruction; as a copy of the struct, the compiler would split it.
  static __device__ Vector load(const S* from) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    return reinterpret_cast<const Vector&>(words);
  }
  __device__ void store(S* to) const { __stcg(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4&>(*this)); }
};
"""

GPU = """
template <typename S, template <typename> class F>
__global__ void __launch_bounds__(kThreads)
@tensor     apply(const S* a, const S* b, S* out, int64_t n, bool aligned, const F<typename Storage<S>::T> f) {
@bit     apply(const S* a, S* out, uint8_t* mask, int64_t n, bool aligned, const F<typename Storage<S>::T> f) {
@random     apply(const S* a, S* out, uint8_t* mask, int64_t n, bool aligned, const F<typename Storage<S>::T> f,
@random           const numbers::Uniform<typename Storage<S>::T, sizeof(S)> uniform, const int64_t* seeds) {
  using T = typename Storage<S>::T;
  using Pair = typename Storage<S>::Pair;
@tensor   constexpr int vectors = kVectors<S, !F<T>::reads_two>;
@bits   constexpr int vectors = kVectors<S, !F<T>::reads_bits>;
  constexpr int size = Vector<S>::size, stride = kThreads * size;
  const int64_t block = int64_t(blockIdx.x) * (stride * vectors);
  const int64_t first = block + int(threadIdx.x) * size;  // of this thread's first vector; the next is `stride` further on
@tensor   const auto compute = [&](Pair p, Pair q) {
@tensor     const auto x = widen(p), y = widen(q);
@tensor     narrow({f(T(x.x), T(y.x)).v, f(T(x.y), T(y.y)).v}, p);
@tensor     return p;
@tensor   };
@bits   unsigned bits[vectors] = {};  // of each vector's elements, that of the first one lowest
@random   using Random = Slopes<T, sizeof(S)>;
@random   const uint64_t seed = seeds ? *seeds : 0;
@bit   const auto compute = [&](Pair p, unsigned& bits, int i) {
@random   const auto compute = [&](Pair p, unsigned& bits, int i, T slope, T next) {
@bits     const auto x = widen(p);
@bits     bool low = bits >> i & 1, high = bits >> (i + 1) & 1;
@bit     narrow({f(T(x.x), low).v, f(T(x.y), high).v}, p);
@random     narrow({f(T(x.x), low, slope).v, f(T(x.y), high, next).v}, p);
@bits     if constexpr (F<T>::writes_bits) bits |= unsigned(low) << i | unsigned(high) << (i + 1);
@bits     return p;
@bits   };

  if (aligned && block + stride * vectors <= n) {
    // All loads are under way before the first of them is waited for.
@staged     // Those of forward go through shared memory: the compiler would put off some that go to registers.
@tensor     Vector<S> va[vectors], vb[vectors] = {};
@staged     constexpr bool staged = !F<T>::reads_two;
@staged     __shared__ uint4 shared[staged ? vectors : 1][kThreads];
@bits     Vector<S> va[vectors];
#pragma unroll
    for (int v = 0; v < vectors; v++) {
      const int64_t at = first + v * stride;
@direct       va[v] = Vector<S>::load(a + at);
@staged       if constexpr (staged) {
@staged         __pipeline_memcpy_async(&shared[v][threadIdx.x], a + at, 16);
@staged         __pipeline_commit();
@staged       } else {
@staged         va[v] = Vector<S>::load(a + at);
@staged       }
@tensor       if constexpr (F<T>::reads_two) vb[v] = Vector<S>::load(b + at);
@bits       if constexpr (F<T>::reads_bits) bits[v] = mask[at >> 3] >> (at & 7);
    }
#pragma unroll
    for (int v = 0; v < vectors; v++) {
@staged       if constexpr (staged) {
@staged         __pipeline_wait_prior(vectors - 1 - v);
@staged         va[v] = Vector<S>::load(reinterpret_cast<const S*>(&shared[v][threadIdx.x]));
@staged       }
@random       const Random slopes(uniform, uint64_t(first + v * stride) / size, seed);
#pragma unroll
@tensor       for (int i = 0; i < size / 2; i++) va[v].pairs[i] = compute(va[v].pairs[i], vb[v].pairs[i]);
@bit       for (int i = 0; i < size / 2; i++) va[v].pairs[i] = compute(va[v].pairs[i], bits[v], 2 * i);
@random       for (int i = 0; i < size / 2; i++)
@random         va[v].pairs[i] = compute(va[v].pairs[i], bits[v], 2 * i, slopes.of[2 * i], slopes.of[2 * i + 1]);
      va[v].store(out + first + v * stride);
    }
  } else {
    // The last block, or memory that does not lie on 16 bytes.
    for (int v = 0; v < vectors; v++) {
      const int64_t at = first + v * stride;
@bits       const unsigned read = F<T>::reads_bits && at < n ? mask[at >> 3] >> (at & 7) : 0;
@random       const Random slopes(uniform, uint64_t(at) / size, seed);
@random #pragma unroll
@random       for (int i = 0; i < size; i++) {
@random         if (at + i >= n) break;
@tensor       for (int i = 0; i < size && at + i < n; i++) {
@bit       for (int i = 0; i < size && at + i < n; i++) {
@tensor         Pair p{}, q{};
@bits         Pair p{};
        p.x = a[at + i];
@tensor         if constexpr (F<T>::reads_two) q.x = b[at + i];
@tensor         out[at + i] = compute(p, q).x;
@bits         unsigned bit = read >> i & 1;
@bit         out[at + i] = compute(p, bit, 0).x;
@random         out[at + i] = compute(p, bit, 0, slopes.of[i], slopes.of[i]).x;
@bits         if constexpr (F<T>::writes_bits) bits[v] |= (bit & 1) << i;
      }
    }
  }
@bits
@bits   if constexpr (F<T>::writes_bits) {
@bits     // Threads side by side put their bits together until one of them has a byte.
@bits #pragma unroll
@bits     for (int v = 0; v < vectors; v++) {
@bits       const int64_t at = first + v * stride;
@bits #pragma unroll
@bits       for (int lanes = 1; lanes * size < 8; lanes *= 2)
@bits         bits[v] |= __shfl_down_sync(0xffffffffu, bits[v], lanes) << (lanes * size);
@bits       if ((at & 7) == 0 && at < n) mask[at >> 3] = uint8_t(bits[v]);
@bits     }
@bits   }
}

template <typename S, template <typename> class F>
@tensor void launch(const void* a, const void* b, void* out, int64_t n, const double* params, void* stream) {
@bit void launch(const void* a, void* out, void* mask, int64_t n, const double* params, void* stream) {
@random void launch(const void* a, void* out, void* mask, const void* seed, int64_t n, const double* params, void* stream) {
  using T = typename Storage<S>::T;
@tensor   const bool aligned = (uintptr_t(a) | uintptr_t(b) | uintptr_t(out)) % 16 == 0;
@bits   const bool aligned = (uintptr_t(a) | uintptr_t(out)) % 16 == 0;
@tensor   constexpr int64_t per_block = int64_t(kThreads) * Vector<S>::size * kVectors<S, !F<T>::reads_two>;
@bits   constexpr int64_t per_block = int64_t(kThreads) * Vector<S>::size * kVectors<S, !F<T>::reads_bits>;
  apply<S, F><<<unsigned((n + per_block - 1) / per_block), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
@tensor       static_cast<const S*>(a), static_cast<const S*>(b), static_cast<S*>(out), n, aligned, F<T>{$values});
@bit       static_cast<const S*>(a), static_cast<S*>(out), static_cast<uint8_t*>(mask), n, aligned, F<T>{$values});
@random       static_cast<const S*>(a), static_cast<S*>(out), static_cast<uint8_t*>(mask), n, aligned, F<T>{},
@random       numbers::Uniform<T, sizeof(S)>(params[0], params[1]), static_cast<const int64_t*>(seed));
}

template <template <typename> class F, typename... Arguments>
const char* run(int dtype, int64_t n, Arguments... arguments) {
  if (n == 0) return nullptr;
  if (dtype == 0) launch<double, F>(arguments...);
  if (dtype == 1) launch<float, F>(arguments...);
  if (dtype == 2) launch<__half, F>(arguments...);
  if (dtype == 3) launch<__nv_bfloat16, F>(arguments...);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

// Each returns null or CUDA's message.
@tensor extern "C" const char* forward_cuda(int dtype, void* x, void* y, int64_t n, double* params, void* stream) {
@tensor   return run<Forward>(dtype, n, x, nullptr, y, n, params, stream);
@tensor }
@tensor extern "C" const char* backward_cuda(int dtype, void* dy, void* $kept, void* dx, int64_t n, double* params,
@tensor                                      void* stream) {
@tensor   return run<Backward>(dtype, n, dy, $kept, dx, n, params, stream);
@tensor }
@bits extern "C" const char* forward_cuda(int dtype, void* x, void* y, void* mask$seed_taken, int64_t n, double* params,
@bits                                     void* stream) {
@bits   if (mask == nullptr) return run<Forward>(dtype, n, x, y, mask$seed, n, params, stream);
@bits   return run<ForwardBits>(dtype, n, x, y, mask$seed, n, params, stream);
@bits }
@bits extern "C" const char* backward_cuda(int dtype, void* dy, void* dx, void* mask$seed_taken, int64_t n, double* params,
@bits                                      void* stream) {
@bits   return run<Backward>(dtype, n, dy, dx, mask$seed, n, params, stream);
@bits }
"""

CPU_STORAGE = """
namespace {

struct Half { uint16_t bits; };
struct Bfloat16 { uint16_t bits; };

float as_float(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
uint32_t as_bits(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }

double widen(double s) { return s; }
float widen(float s) { return s; }
float widen(Bfloat16 s) { return as_float(uint32_t(s.bits) << 16); }
float widen(Half s) {
  const uint32_t magnitude = uint32_t(s.bits & 0x7fff) << 13, sign = uint32_t(s.bits & 0x8000) << 16;
  // The biases of the two exponents differ by 112.
  const float f = magnitude >= 0x0f800000 ? as_float(magnitude | 0x7f800000) : as_float(magnitude) * 0x1p112f;
  return as_float(as_bits(f) | sign);
}

void narrow(double v, double& s) { s = v; }
void narrow(float v, float& s) { s = v; }
void narrow(float v, Bfloat16& s) {
  const uint32_t u = as_bits(v);
  s.bits = v != v ? 0x7fc0 : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
void narrow(float v, Half& s) {
  const uint32_t sign = as_bits(v) >> 16 & 0x8000, u = as_bits(std::fabs(v)), rebased = u - (112u << 23);
  // Below 2^-14 the result is a multiple of 2^-24: in a sum with 1/2, rounding happens there.
  const uint32_t small = as_bits(std::fabs(v) + 0.5f) - as_bits(0.5f);
  const uint32_t normal = (rebased + 0xfff + (rebased >> 13 & 1)) >> 13;
  const uint32_t half = u < 0x38800000 ? small : u < 0x477ff000 ? normal : 0x7c00u;
  s.bits = uint16_t(sign | (v != v ? 0x7e00 : half));
}
"""

CPU = """
@tensor template <typename S, typename T, template <typename> class F>
@tensor void apply(const void* a, const void* b, void* out, int64_t n, const double* params) {
@tensor   const F<T> f{$values};
@tensor   for (int64_t i = 0; i < n; i++) {
@tensor     const T second = F<T>::reads_two ? T(widen(static_cast<const S*>(b)[i])) : T();
@tensor     narrow(f(T(widen(static_cast<const S*>(a)[i])), second).v, static_cast<S*>(out)[i]);
@tensor   }
@tensor }
@bits template <typename S, typename T, template <typename> class F>
@bit void apply(const void* a, void* out, uint8_t* mask, int64_t n, const double* params) {
@bit   const F<T> f{$values};
@random void apply(const void* a, void* out, uint8_t* mask, const int64_t* seed, int64_t n, const double* params) {
@random   constexpr int size = 16 / sizeof(S);
@random   const F<T> f{};
@random   const numbers::Uniform<T, sizeof(S)> uniform(params[0], params[1]);
@random   Slopes<T, sizeof(S)> slopes(uniform, 0, 0);
@bits   for (int64_t first = 0; first < n; first += 8) {
@bits     unsigned bits = F<T>::reads_bits ? mask[first / 8] : 0;
@bits     for (int64_t i = first; i < n && i < first + 8; i++) {
@bits       bool bit = bits >> (i - first) & 1;
@random       if (i % size == 0) slopes = Slopes<T, sizeof(S)>(uniform, uint64_t(i) / size, seed ? *seed : 0);
@bit       narrow(f(T(widen(static_cast<const S*>(a)[i])), bit).v, static_cast<S*>(out)[i]);
@random       narrow(f(T(widen(static_cast<const S*>(a)[i])), bit, slopes.of[i % size]).v, static_cast<S*>(out)[i]);
@bits       if (F<T>::writes_bits) bits |= unsigned(bit) << (i - first);
@bits     }
@bits     if (F<T>::writes_bits) mask[first / 8] = uint8_t(bits);
@bits   }
@bits }

template <template <typename> class F, typename... Arguments>
void run(int dtype, Arguments... arguments) {
  if (dtype == 0) apply<double, numbers::Double, F>(arguments...);
  if (dtype == 1) apply<float, numbers::Single, F>(arguments...);
  if (dtype == 2) apply<Half, numbers::Narrow, F>(arguments...);
  if (dtype == 3) apply<Bfloat16, numbers::Narrow, F>(arguments...);
}

}  // namespace

@tensor extern "C" void forward_cpu(int dtype, void* x, void* y, int64_t n, double* params) {
@tensor   run<Forward>(dtype, x, nullptr, y, n, params);
@tensor }
@tensor extern "C" void backward_cpu(int dtype, void* dy, void* $kept, void* dx, int64_t n, double* params) {
@tensor   run<Backward>(dtype, dy, $kept, dx, n, params);
@tensor }
@bits extern "C" void forward_cpu(int dtype, void* x, void* y, uint8_t* mask$seed_typed, int64_t n, double* params) {
@bits   mask ? run<ForwardBits>(dtype, x, y, mask$seed, n, params) : run<Forward>(dtype, x, y, mask$seed, n, params);
@bits }
@bits extern "C" void backward_cpu(int dtype, void* dy, void* dx, uint8_t* mask$seed_typed, int64_t n, double* params) {
@bits   run<Backward>(dtype, dy, dx, mask$seed, n, params);
@bits }
"""

# The autograd function.
FUNCTION = """\
class $title(torch.autograd.Function):
@input     \"\"\"Forward, keeping the input for backward.\"\"\"
@output     \"\"\"Forward, keeping the output for backward.\"\"\"
@bit     \"\"\"Forward, keeping one bit of each element for backward.\"\"\"
@random     \"\"\"Forward, keeping one bit of each element and the seed of the slopes for backward.\"\"\"

    @staticmethod
    def forward(ctx, x, *params):
        y = torch.empty_like(x)
        x = laid_out_like(y, x)
@tensor         launch("forward", params, x, y)
@bits         bits = x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8) if ctx.needs_input_grad[0] else None
@random         lower, upper = params
@random         seed = torch.randint(2**63 - 1, (1,), device=x.device) if lower < upper else None
@bit         launch("forward", params, x, y, bits)
@random         launch("forward", params, x, y, bits, seed)
@input         ctx.save_for_backward(x)
@output         ctx.save_for_backward(y)
@bit         ctx.save_for_backward(bits)
@random         ctx.save_for_backward(bits, seed)
@bits         ctx.strides = y.stride()
        ctx.params = params
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
@tensor         (kept,) = ctx.saved_tensors
@bit         (bits,) = ctx.saved_tensors
@random         bits, seed = ctx.saved_tensors
@tensor         dx = torch.empty_like(kept)
@tensor         launch("backward", ctx.params, laid_out_like(dx, dy), kept, dx)
@bits         dx = torch.empty_strided(dy.shape, ctx.strides, dtype=dy.dtype, device=dy.device)
@bit         launch("backward", ctx.params, laid_out_like(dx, dy), dx, bits)
@random         launch("backward", ctx.params, laid_out_like(dx, dy), dx, bits, seed)
        return dx, *[None] * len(ctx.params)

"""
