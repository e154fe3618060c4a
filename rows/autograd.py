"""Calls that kernels compute, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import kernels
from .records import RowActivation

__all__ = ["OWN_CALL", "Operated", "Rows"]


OWN_CALL = -1  # in place of where PyTorch's warning of a missing dimension points: such calls are not patched() again


class Rows(torch.autograd.Function):
    """An activation of the rows of a contiguous tensor, times a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, record: RowActivation, dim: int, scale: float, save: str, by_kernel: bool) -> Tensor:
        """By the kernel, or PyTorch's operator where the kernel is for backward alone."""
        y = record.forward_by_kernel(x, dim, scale) if by_kernel else _eager(record, x, dim, scale)
        ctx.record, ctx.dim, ctx.scale, ctx.save = record, dim, scale, save
        ctx.save_for_backward(y if save == "output" else x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Of x."""
        (kept,) = ctx.saved_tensors
        return _gradient(ctx.record, dy, kept, ctx.dim, ctx.scale, ctx.save == "output"), None, None, None, None, None


class Operated(torch.autograd.Function):
    """An activation of contiguous rows, times a number, in a build for one type of x, one of the result, and a mask."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mask: Tensor | None,
        record: RowActivation,
        build: str,
        dim: int,
        scale: float,
        lying: Tensor | None,
    ) -> Tensor:
        """By the operator of a build; ``mask`` has as many dimensions as ``x``, ``lying`` is what the operator reads of it."""
        tensors = [x] if lying is None else [x, lying]
        y = kernels.operate(build, "forward", *tensors, dim, scale)
        ctx.record, ctx.build, ctx.dim, ctx.scale = record, build, dim, scale
        ctx.x_dtype, ctx.of_mask = x.dtype, mask if mask is None else (mask.shape, mask.dtype)
        ctx.save_for_backward(y, *([mask] if _hides(record, mask, y, dim) else []))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Of x, and of a mask that is added, summed to its shape."""
        (y, *masks), record, dim, scale = ctx.saved_tensors, ctx.record, ctx.dim, ctx.scale
        of_x, of_mask = ctx.needs_input_grad[:2]
        dx = dmask = None
        if of_mask:  # what x's gradient is a multiple of
            dz = _gradient(record, dy, y, dim, 1.0, True)
            shape, dtype = ctx.of_mask
            apart = [i for i, size in enumerate(shape) if size != dz.shape[i]]
            wide = torch.promote_types(dz.dtype, dtype)
            dmask = (dz.sum(apart, keepdim=True, dtype=wide) if apart else dz).to(dtype)
            dx = (dz if scale == 1 else dz * scale).to(ctx.x_dtype) if of_x else None
        elif ctx.x_dtype is not y.dtype and _is_plain(dy, y) and record.takes_backward(y, dim):
            dx = kernels.operate(ctx.build, "backward_from_output", kernels.readable(dy), y, dim, scale)
        else:
            dx = _gradient(record, dy, y, dim, scale, True).to(ctx.x_dtype)
        for mask in masks if of_x else ():
            dx = torch.where(mask, dx, 0.0)
        return dx, dmask, None, None, None, None, None


def _hides(record: RowActivation, mask: Tensor | None, y: Tensor, dim: int) -> bool:
    """Whether a mask leaves elements out whose outputs do not tell that they have no gradient.

    A share of 0 tells it; a row of NaN, which no element took part in, does not, nor does a logarithm of -inf. On a GPU nobody
    waits for an answer.
    """
    if mask is None or mask.dtype is not torch.bool:
        return False
    return not record.gives_shares or y.is_cuda or bool(y.select(dim, 0).isnan().any())


def _eager(record: RowActivation, x: Tensor, dim: int, scale: float) -> Tensor:
    return record.eager(x if scale == 1 else x * scale, dim, _stacklevel=OWN_CALL)


def _gradient(record: RowActivation, dy: Tensor, kept: Tensor, dim: int, scale: float, from_output: bool) -> Tensor:
    """By our kernel; by PyTorch's operators, which can be differentiated, where that is asked for."""
    if _is_plain(dy, kept) and record.takes_backward(kept, dim):
        return record.backward_by_kernel(dy, kept, dim, scale, from_output)
    y = kept if from_output else _eager(record, kept, dim, scale)
    dx = record.gradient(dy, y, dim)
    return dx if scale == 1 else dx * scale


def _is_plain(dy: Tensor, kept: Tensor) -> bool:
    """Whether memory is all that there is to a gradient, and nothing differentiates it."""
    plain = not torch.is_grad_enabled() and type(dy) is Tensor and not dy._is_zerotensor()
    return plain and kernels.sees_all(kept) and kept.is_contiguous()
