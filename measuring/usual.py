"""An activation in the usual style of load_inline, with torch/extension.h, as a baseline for the loader."""

from __future__ import annotations

__all__ = ["usual_program"]

CPP = r"""
torch::Tensor softsign_forward(torch::Tensor x) {
  auto y = torch::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "softsign_forward", [&] {
    auto* in = x.data_ptr<scalar_t>();
    auto* out = y.data_ptr<scalar_t>();
    at::parallel_for(0, x.numel(), 1 << 15, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) out[i] = in[i] / (scalar_t(1) + std::abs(float(in[i])));
    });
  });
  return y;
}
torch::Tensor softsign_backward(torch::Tensor dy, torch::Tensor x) {
  auto dx = torch::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "softsign_backward", [&] {
    auto* grad = dy.data_ptr<scalar_t>();
    auto* in = x.data_ptr<scalar_t>();
    auto* out = dx.data_ptr<scalar_t>();
    at::parallel_for(0, x.numel(), 1 << 15, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const float d = 1 + std::abs(float(in[i]));
        out[i] = float(grad[i]) / (d * d);
      }
    });
  });
  return dx;
}
"""

CUDA = r"""
template <typename T>
__global__ void forward_kernel(const T* x, T* y, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) y[i] = float(x[i]) / (1 + fabsf(float(x[i])));
}
template <typename T>
__global__ void backward_kernel(const T* dy, const T* x, T* dx, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float d = 1 + fabsf(float(x[i]));
  dx[i] = float(dy[i]) / (d * d);
}
torch::Tensor softsign_forward(torch::Tensor x) {
  auto y = torch::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "softsign_forward", [&] {
    forward_kernel<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), x.numel());
  });
  return y;
}
torch::Tensor softsign_backward(torch::Tensor dy, torch::Tensor x) {
  auto dx = torch::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "softsign_backward", [&] {
    backward_kernel<<<(x.numel() + 255) / 256, 256>>>(dy.data_ptr<scalar_t>(), x.data_ptr<scalar_t>(), dx.data_ptr<scalar_t>(),
                                                      x.numel());
  });
  return dx;
}
"""
DECLARATIONS = """
torch::Tensor softsign_forward(torch::Tensor x);
torch::Tensor softsign_backward(torch::Tensor dy, torch::Tensor x);
"""


def usual_program(device: str, folder: str) -> str:
    """A program that compiles softsign in ``folder``, or loads it from there, and assigns it to the variable ``forward``."""
    cpp, cuda = (DECLARATIONS, CUDA) if device == "cuda" else (CPP, None)
    return f"""
forward = load_inline(
    "softsign_usual", cpp_sources={cpp!r}, cuda_sources={cuda!r}, functions=["softsign_forward", "softsign_backward"],
    extra_cflags=["-O3"], build_directory={folder!r},
).softsign_forward
"""
