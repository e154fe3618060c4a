"""Autograd functions of the calls that kernels compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..configs import is_batched
from ..records.dtypes import wider
from . import kernels
from .records import Beside, RowActivation

__all__ = ["OWN_CALL", "Rows", "Typed", "apply", "rows_like"]


OWN_CALL = -1  # as ``_stacklevel``, which only a warning of PyTorch uses: marks own calls, which patched() leaves alone


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Applies an autograd function of this module, but for what records a gradient where none is recorded.

    A trace by torch.jit then has the operators, as it has of other activations, and can be saved.
    """
    recorded = torch.is_grad_enabled() and any([isinstance(each, Tensor) and each.requires_grad for each in arguments])
    return function.apply(*arguments) if recorded else function.forward(_Unrecorded(), *arguments)


class _Unrecorded:
    """Stands in for the context of an autograd function: what is kept for backward is dropped."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keeps nothing."""


class Rows(torch.autograd.Function):
    """An activation of the rows of ``scale x``, for a contiguous x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        record: RowActivation,
        dim: int,
        scale: float,
        save: str,
        by_kernel: bool,
        numbers: tuple[float, ...],
        *rows: Tensor,
    ) -> Tensor:
        """By the kernel or, if only backward is by kernel, by PyTorch's operator; rows are those of :func:`rows_like`."""
        beside = Beside(rows, numbers)
        if by_kernel:
            y = record.forward_by_kernel(x, dim, scale, _in_one_piece(beside))
        else:
            y = _eager(record, x, dim, scale, beside)
        ctx.record, ctx.dim, ctx.scale, ctx.save, ctx.numbers = record, dim, scale, save, numbers
        ctx.save_for_backward(y if save == "output" else x, *rows)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x and of row operands."""
        kept, *rows = ctx.saved_tensors
        beside = Beside(tuple(rows), ctx.numbers)
        dx, *of_rows = _gradients(ctx.record, dy, kept, ctx.dim, ctx.scale, ctx.save == "output", beside)
        return dx, None, None, None, None, None, None, *of_rows


class Typed(torch.autograd.Function):
    """The same in a build for particular types of x, result and mask. Elements that a bool mask leaves out have no gradient."""

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
        numbers: tuple[float, ...],
        *rows: Tensor,
    ) -> Tensor:
        """By a build's operator; ``mask`` has as many dimensions as ``x``, ``lying`` is its view for the operator."""
        tensors = [x] if lying is None else [x, lying]
        beside = _in_one_piece(Beside(rows, numbers))
        y = kernels.operate(build, "forward", *tensors, *beside.rows, *numbers, dim, scale)
        ctx.record, ctx.build, ctx.dim, ctx.scale, ctx.numbers = record, build, dim, scale, numbers
        ctx.x_dtype, ctx.of_mask = x.dtype, mask if mask is None else (mask.shape, mask.dtype)
        ctx.save_for_backward(y, *rows, *([mask] if mask is not None and mask.dtype is torch.bool else []))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, of an additive mask, summed to its shape, and of row operands."""
        (y, *others), record, dim, scale = ctx.saved_tensors, ctx.record, ctx.dim, ctx.scale
        beside = Beside(tuple(others[: len(record.rows)]), ctx.numbers)
        mask = others[-1] if len(others) > len(record.rows) else None  # a bool one
        of_x, of_mask = ctx.needs_input_grad[:2]
        dx = dmask = None
        if of_mask:  # dz: x's gradient is scale times it
            dz, *of_rows = _gradients(record, dy, y, dim, 1.0, True, beside)
            shape, dtype = ctx.of_mask
            apart = [i for i, size in enumerate(shape) if size != dz.shape[i]]
            wide = wider(dz.dtype, dtype)
            dmask = (dz.sum(apart, keepdim=True, dtype=wide) if apart else dz).to(dtype)
            if of_x and scale != 1 and dz.dtype.itemsize == 2:  # scaled before it is rounded
                dx = _gradients(record, dy, y, dim, scale, True, beside)[0]
            elif of_x:
                dx = (dz if scale == 1 else dz * scale).to(ctx.x_dtype)
        elif of_x and (found := _by_build(ctx, dy, y, mask, beside)) is not None:
            dx, *of_rows = found
        else:
            dx, *of_rows = _gradients(record, dy, y, dim, scale, True, beside)
            dx = dx.to(ctx.x_dtype) if of_x else None
            if of_x and mask is not None:
                dx = torch.where(mask, dx, 0.0)
        return dx, dmask, None, None, None, None, None, None, *of_rows


def _by_build(ctx: Any, dy: Tensor, y: Tensor, mask: Tensor | None, beside: Beside) -> tuple[Tensor, ...] | None:
    """The gradients by the build of a call of :class:`Typed` whose types differ or that has a bool ``mask``.

    None if there is none, or if it should not compute them.
    """
    record, dim = ctx.record, ctx.dim
    if (ctx.x_dtype is y.dtype and mask is None) or not _is_plain(dy, y) or not record.takes_backward(y, dim, True):
        return None
    tensors, shares = [kernels.readable(dy), y], []
    if mask is not None:
        lying = kernels.collapsed(mask.expand(y.shape), dim) if kernels.is_plain(mask) else None
        if lying is None:  # hooks for saved tensors have changed it
            return None
        tensors, shares = [*tensors, lying], [record.gives_shares]
    given = *tensors, *_in_one_piece(beside).rows, *ctx.numbers, *shares, dim, ctx.scale
    return _of_operands(kernels.operate(ctx.build, "backward_from_output", *given), beside)


def rows_like(beside: Beside, shape: torch.Size, dim: int) -> list[Tensor]:
    """The row operands for kernels: in float32, expanded to x's shape, of which ``dim`` is 1."""
    shape = torch.Size([1 if i == dim % len(shape) else size for i, size in enumerate(shape)])
    return [values.to(torch.float32).expand(shape) for values in beside.rows]


def _in_one_piece(beside: Beside) -> Beside:
    return Beside(tuple([values.contiguous() for values in beside.rows]), beside.numbers)


def _eager(record: RowActivation, x: Tensor, dim: int, scale: float, beside: Beside) -> Tensor:
    return record.eager(x if scale == 1 else x * scale, dim, *beside.rows, *beside.numbers, _stacklevel=OWN_CALL)


def _gradients(
    record: RowActivation, dy: Tensor, kept: Tensor, dim: int, scale: float, from_output: bool, beside: Beside
) -> tuple[Tensor, ...]:
    """The gradients, by kernel; by PyTorch's operators, which are differentiable, where that is needed."""
    if _is_plain(dy, kept) and record.takes_backward(kept, dim, scale != 1):
        given = record.backward_by_kernel(dy, kept, dim, scale, from_output, _in_one_piece(beside))
        return _of_operands(given, beside)
    y, wide = kept, wider(kept.dtype)
    if not from_output:  # unrounded, as in the kernel
        y, dy = _eager(record, kept.to(wide), dim, scale, beside), dy.to(wide)
    elif scale != 1:  # scaled before it is rounded, as there
        y, dy = y.to(wide), dy.to(wide)
    dx, *of_rows = record.gradients(dy, y, dim, beside)
    return (dx if scale == 1 else dx * scale).to(kept.dtype), *of_rows


def _of_operands(found: Tensor | tuple[Tensor, Tensor], beside: Beside) -> tuple[Tensor, ...]:
    """The gradients of x and of each row operand, from the result of an operator."""
    if isinstance(found, Tensor):
        return (found,)
    dx, of_rows = found
    return dx, *[each.view(values.shape) for each, values in zip(of_rows, beside.rows, strict=True)]


def _is_plain(dy: Tensor, kept: Tensor) -> bool:
    """Whether dy is a plain tensor, and no second derivatives are needed."""
    plain = not torch.is_grad_enabled() and type(dy) is Tensor and not is_batched(dy) and not dy._is_zerotensor()
    return plain and kernels.sees_all(kept) and kept.is_contiguous()
