"""The functions: which calls our kernels take, PyTorch's operators for all others, and the gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from ..autograd import call, is_transformed
from ..records import describe

__all__ = ["log_softmax", "softmax", "softmin"]

SMALL = 2**20  # bytes; a smaller tensor takes no longer than it takes to start a kernel
ALIGNED = 16  # bytes; what threads read at once
LONGEST_OF_A_BLOCK = 2**15  # bytes of a row; longer ones take several blocks, which GPUs before 9.0 cannot join

_SHARES = {2: (128, 16384), 4: (2048, 4096)}
FORWARD = {"softmax": _SHARES, "softmin": _SHARES, "log_softmax": {2: (128, 1024)}}
BACKWARD = {2: (128, 131072), 4: (128, 65536)}
"""The lengths of rows, in elements of so many bytes, where the kernels were measured to be no slower than PyTorch's."""


def softmax(
    x: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, *, scale: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """softmax(t) = exp(t) / sum of exp(t) along ``dim``, where t = scale x + mask.

    On CUDA, rows along the last dimension of a contiguous float32, float16 or bfloat16 tensor, of a multiple of 16 bytes, go
    through kernels that read them once, where that is no slower than PyTorch: in backward rows of 128 elements to 256 KB, in
    forward of 128 to 16384 16-bit elements (``log_softmax``: to 1024) or 2048 to 4096 of float32. PyTorch's own operators
    compute all else: other dimensions and lengths, conversions by ``dtype``, float64, tensors of less than 1 MB, those on a
    CPU, and what is under autocast, torch.compile and transforms. ``scale`` and ``mask`` are PyTorch's steps before that.

    Args:
        x: of any shape.
        dim: of the rows; without one, PyTorch chooses, and warns.
        dtype: x is converted to it first.
        scale: a number that x is multiplied by.
        mask: of bool, true for elements that take part, or floating, which is added. It broadcasts to the shape of x.

    Raises:
        TypeError, ValueError: x or mask is no tensor, scale no number, or mask does not fit.
        IndexError, RuntimeError: as PyTorch's, for a dimension or a dtype that will not do.
    """
    return _run("softmax", x, dim, dtype, scale, mask)


def log_softmax(
    x: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, *, scale: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """log_softmax(t) = t - log(sum of exp(t)) along ``dim``, where t = scale x + mask. All else is as in :func:`softmax`."""
    return _run("log_softmax", x, dim, dtype, scale, mask)


def softmin(
    x: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, *, scale: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """softmin(x) = softmax(t) along ``dim``, where t = mask - scale x. All else is as in :func:`softmax`."""
    return _run("softmin", x, dim, dtype, scale, mask)


def _run(name: str, x: Tensor, dim: int | None, dtype: torch.dtype | None, scale: float, mask: Tensor | None) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {describe(x)}")
    if not isinstance(scale, (int, float)):
        raise TypeError(f"{name}: scale is a number, got {describe(scale)}")
    if mask is not None or scale != 1:
        x = _with_mask(name, x if dtype is None else x.to(dtype), scale, mask)
    forward = backward = False
    if dim in (-1, x.dim() - 1) and dtype in (None, x.dtype) and _fits(x):
        forward, backward = _takes(FORWARD[name], x), _takes(BACKWARD, x)
    if backward and x.requires_grad and torch.is_grad_enabled():
        return _Rows.apply(x, name, forward)
    if forward and not (x.requires_grad and torch.is_grad_enabled()):
        return call(_operator(name, "forward"), x)
    return getattr(F, name)(x, dim, _stacklevel=5, dtype=dtype)


def _with_mask(name: str, x: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """What exponentials are taken of, but for softmin's sign.

    Raises:
        TypeError, ValueError: the mask will not do.
    """
    x = x if scale == 1 else x * scale
    if mask is None:
        return x
    if not isinstance(mask, Tensor) or not (mask.dtype is torch.bool or mask.is_floating_point()):
        raise TypeError(f"{name}: mask is a tensor of bool or floating, got {describe(mask)}")
    sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if mask.dim() > x.dim() or not all(m in (1, n) for m, n in sizes):
        raise ValueError(f"{name}: mask must broadcast to {tuple(x.shape)}, the shape of x; got {tuple(mask.shape)}")
    if mask.dtype is torch.bool:
        return x.masked_fill(~mask, math.inf if name == "softmin" else -math.inf)
    return x.sub(mask.to(x.dtype)) if name == "softmin" else x.add(mask.to(x.dtype))


def _fits(x: Tensor) -> bool:
    """Whether the kernels can compute a tensor's rows, and nothing is at work that has to see PyTorch's operators."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, nn.Parameter)
        and x.is_cuda
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and x.layout is torch.strided
        and not x.is_nested
        and not is_transformed()
        and not torch.is_autocast_enabled("cuda")
        and not torch._C._len_torch_dispatch_stack()
        and x.nbytes >= SMALL
        and x.is_contiguous()
        and x.shape[-1] * x.itemsize % ALIGNED == 0
        and x.data_ptr() % ALIGNED == 0
        and (x.shape[-1] * x.itemsize <= LONGEST_OF_A_BLOCK or _has_clusters(x.device))
    )


def _takes(lengths: dict[int, tuple[int, int]], x: Tensor) -> bool:
    shortest, longest = lengths.get(x.itemsize, (1, 0))
    return shortest <= x.shape[-1] <= longest


@cache
def _has_clusters(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


@cache
def _operator(name: str, kind: str) -> Callable[..., Tensor]:
    """An operator of ``rows_binding.h``, compiled unless it is there."""
    library = kernels.load(kernels.KernelSource.from_file(name))
    return getattr(torch.ops.jitact, f"{library.name}_{kind}").default


class _Rows(torch.autograd.Function):
    """An activation along the last dimension; backward keeps the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, by_kernel: bool) -> Tensor:
        y = call(_operator(name, "forward"), x) if by_kernel else getattr(F, name)(x, -1)
        ctx.name = name
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        return _gradient(ctx.name, dy, y), None, None


def _gradient(name: str, dy: Tensor, y: Tensor) -> Tensor:
    """By our kernel; by PyTorch's, which can be differentiated, where that is asked for."""
    if not torch.is_grad_enabled() and type(dy) is Tensor and not dy._is_zerotensor() and _fits(y):
        dy = dy.contiguous()
        if dy.data_ptr() % ALIGNED == 0:
            return call(_operator(name, "backward_from_output"), dy, y)
    if name == "log_softmax":
        return torch._log_softmax_backward_data(dy, y, -1, y.dtype)
    dx = torch._softmax_backward_data(dy, y, -1, y.dtype)
    return -dx if name == "softmin" else dx
