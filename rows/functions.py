"""The functions of rows, and how a call is dispatched to kernels or PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from ..configs import check_allocated
from ..records.arguments import ACCEPTED, DTYPES, as_number, as_tensor_hint, shown, stand_ins, what_it_is
from ..records.dtypes import wider
from ..records.operands import is_cast
from . import kernels
from .autograd import OWN_CALL, Rows, apply, rows_like
from .records import NOTHING, TABLE, Beside, RowActivation, can
from .typed import in_types

__all__ = ["by_kernel", "log_softmax", "run", "shaped", "softmax", "softmin"]

HALF = torch.finfo(torch.float16).max
SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def softmax(
    x: Tensor,
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    save: Literal["output", "input"] = "output",
) -> Tensor:
    """softmax(t) = exp(t) / sum of exp(t) along ``dim``, where t = scale x + mask.

    Kernels that read each row once compute float32, float16 and bfloat16 tensors of 1 MB and more, where they were measured to
    be no slower than PyTorch's: docs/guide.md has the lengths. There, forward is within 1 ulp in 16-bit types and 4 in
    float32, beside the rounding of ``scale x + mask``. All other calls use PyTorch's operators, as do calls under autocast,
    torch.compile, transforms and with DTensors. ``scale`` is part of the kernels, and so are masks and a ``dtype`` of float32
    for rows along the last dimension.

    Args:
        x: of any shape.
        dim: the dimension of the rows; without one, PyTorch chooses, and warns.
        dtype: x is converted to it first.
        scale: a number that x is multiplied by.
        mask: of bool, true for elements that take part, or floating, which is added. It broadcasts to the shape of x; its
            gradient is summed to the shape of the mask. A row in which no element takes part is NaN.
        save: what is saved for backward: the output, or the input, which costs another exponential but is not rounded.

    Raises:
        TypeError, ValueError: x or mask is not a tensor, scale is not a number, mask does not fit, or save is neither.
        IndexError, RuntimeError: as PyTorch's, for an invalid dimension or dtype.
    """
    return run(TABLE["softmax"], softmax, x, dim, dtype, scale, mask, save)


def log_softmax(
    x: Tensor,
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    save: Literal["output", "input"] = "output",
) -> Tensor:
    """log_softmax(t) = t - log(sum of exp(t)) along ``dim``, where t = scale x + mask. Otherwise as :func:`softmax`."""
    return run(TABLE["log_softmax"], log_softmax, x, dim, dtype, scale, mask, save)


def softmin(
    x: Tensor,
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    save: Literal["output", "input"] = "output",
) -> Tensor:
    """softmin(x) = softmax(t) along ``dim``, where t = mask - scale x. Otherwise as :func:`softmax`."""
    return run(TABLE["softmin"], softmin, x, dim, dtype, scale, mask, save)


def run(
    record: RowActivation,
    function: Callable[..., Tensor],
    x: Tensor,
    dim: int | None,
    dtype: torch.dtype | None,
    scale: float,
    mask: Tensor | None,
    save: str,
    beside: Beside = NOTHING,
) -> Tensor:
    """A call of the function of an activation of rows; for the arguments see :func:`softmax`."""
    name = record.name
    usual = type(dim) is int and type(scale) is float and scale == 1 and mask is None and dtype is None and save == "output"
    if usual and not record.own_gradient and not torch.compiler.is_compiling() and _is_small(x):
        # PyTorch computes this in any case; the general path would take several times as long to find out.
        return record.theirs(x, dim, _stacklevel=OWN_CALL)
    if not all([each is None or isinstance(each, Tensor) for each in (x, mask, *beside.rows)]):
        waiting = stand_ins(x, mask, *beside.rows)
        if waiting:
            numbers = dict(zip(dict(record.params), beside.numbers, strict=True))
            options = {"scale": scale, "mask": mask, "save": save, **numbers}
            return handle_torch_function(function, waiting, x, *beside.rows, dim, dtype, **options)
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {what_it_is(x)}{as_tensor_hint(x)}")
    is_symbolic = isinstance(scale, torch.SymFloat | torch.SymInt)
    scale = scale if is_symbolic else as_number(record, "scale", scale)
    plain = not is_symbolic and scale == 1
    _check_options(record, dim, dtype, save)
    if dtype is None and x.dtype not in DTYPES:
        raise TypeError(f"{name}: without dtype=, x is float32, float64, float16 or bfloat16; got {what_it_is(x)}")
    if x.layout in SPARSE:
        raise TypeError(f"{name}: expected a dense tensor, got {what_it_is(x)}")
    if x.is_nested and record is not TABLE.get(name):
        why = "only softmax, log_softmax and softmin are computed of nested tensors; their values() are dense"
        raise TypeError(f"{name}: expected a dense tensor, got {what_it_is(x)}; {why}")
    if mask is not None:
        _check_mask(name, x, mask)
    if mask is not None or not plain:
        _check_scaled(name, x)
    if is_symbolic:  # no condition may depend on it
        scaled = (x if dtype is None else x.to(dtype)) * scale
        return run(record, function, scaled, dim, None, 1.0, mask, save, beside)
    factor = record.factor * scale
    if beside.rows or beside.numbers:
        beside = _checked(record, x, dim, beside)
    if dim is not None and save == "output" and (mask is not None or dtype not in (None, x.dtype)):
        y = in_types(record, x, dim, dtype or x.dtype, factor, mask, beside)
        if y is not None:
            return y
    if dtype is not None and (mask is not None or not plain or not x.is_floating_point()):
        x, dtype = x.to(dtype), None
    added = mask is not None and mask.dtype is not torch.bool
    wide = wider(x.dtype, mask.dtype) if added else x.dtype  # the sum is not rounded to x's
    if x.dtype is torch.float16 and not -HALF <= factor <= HALF:  # which float16 cannot hold
        wide = wider(wide)
    if wide is not x.dtype:
        y = run(record, function, x.to(wide), dim, None, scale, mask.to(wide) if added else mask, save, beside)
        return y if record.is_cast and x.is_cuda and is_cast(x) else y.to(x.dtype)
    t, factor = (x, factor) if mask is None else _masked(x, factor, mask)
    takes = dtype in (None, t.dtype) and dim is not None and -t.dim() <= dim < t.dim()
    if takes and kernels.sees_all(t) and kernels.sees_rows(beside.rows, t):
        t, place = t.contiguous(), dim % t.dim()  # as PyTorch's results are
        by_kernel = record.takes_forward(t, place, factor)
        keeps = torch.is_grad_enabled() and any([each.requires_grad for each in (t, *beside.rows)])
        of_kept = record.takes_backward(t, place, factor != 1) or record.own_gradient
        if by_kernel or (keeps and kernels.is_scale(factor) and of_kept):
            rows = rows_like(beside, t.shape, place)
            return apply(Rows, t, record, place, factor, save, by_kernel, beside.numbers, *rows)
    level = 5 if dim is None else OWN_CALL
    if mask is None and plain:
        return record.theirs(t, dim, *beside.rows, *beside.numbers, _stacklevel=level, dtype=dtype)
    return record.eager(t if factor == 1 else t * factor, dim, *beside.rows, *beside.numbers, _stacklevel=level)


def _check_options(record: RowActivation, dim: int | None, dtype: torch.dtype | None, save: str) -> None:
    """Raises TypeError or ValueError if an option of a call is invalid."""
    if save not in ("output", "input"):
        raise ValueError(f"{record.name}: save must be 'output' or 'input', got {shown(save)}")
    if (dim is None and record.needs_dim) or not (dim is None or isinstance(dim, Integral)) or isinstance(dim, bool):
        raise TypeError(f"{record.name}: dim is an int, got {what_it_is(dim)}")
    if not (dtype is None or dtype in DTYPES):
        by_name = [*dict(record.params), *(["mask"] if isinstance(dtype, Tensor) else [])]
        hint = f"; give {' and '.join(by_name)} by name" if by_name else ""
        raise TypeError(f"{record.name}: dtype is float32, float64, float16, bfloat16 or None, got {shown(dtype)}{hint}")


def _check_scaled(name: str, x: Tensor) -> None:
    """Raises TypeError or RuntimeError if x cannot be scaled or masked."""
    if x.layout is not torch.strided:
        raise TypeError(f"{name}: beside a scale or mask, x is a dense tensor, got {what_it_is(x)}")
    _check_memory(name, x)


def _check_memory(name: str, t: Tensor) -> None:
    """Raises RuntimeError if a plain tensor's storage was freed, as FSDP does; PyTorch's operators would crash."""
    if kernels.is_plain(t):
        check_allocated(name, t)


def _is_small(x: object) -> bool:
    """Whether it is a plain tensor that is too small for a kernel to be faster."""
    return type(x) is Tensor and x.dtype in DTYPES and x.layout is torch.strided and x.nbytes < kernels.SMALL


def by_kernel(record: RowActivation, x: Tensor, beside: Beside = NOTHING) -> Tensor:
    """The activation along the last dimension by the kernel if it supports x, even if slower; else by PyTorch."""
    if kernels.sees_all(x) and x.is_contiguous() and can(x, x.dim() - 1, 1):
        rows = rows_like(beside, x.shape, -1)
        return apply(Rows, x, record, x.dim() - 1, record.factor, record.saves[0], True, beside.numbers, *rows)
    return record.theirs(x, -1, *beside.rows, *beside.numbers)


def _checked(record: RowActivation, x: Tensor, dim: int | None, beside: Beside) -> Beside:
    """The operands of a call, in the shapes and types that :class:`Beside` has.

    Raises:
        TypeError, ValueError: one of them is invalid.
    """
    numbers = tuple([as_number(record, name, value) for (name, _), value in zip(record.params, beside.numbers, strict=True)])
    rows = tuple([shaped(record, name, values, x, dim) for name, values in zip(record.rows, beside.rows, strict=True)])
    return Beside(rows, numbers)


def shaped(record: RowActivation, name: str, values: object, x: Tensor, dim: int | None) -> Tensor:
    """A row operand for ``x``, in a shape that broadcasts to x's.

    Raises:
        TypeError, ValueError: it is not a floating tensor, on another device, or of another shape.
    """
    if dim is None:
        raise TypeError(f"{record.name}: dim is an int, got None")
    if not isinstance(values, Tensor) or not values.is_floating_point():
        raise TypeError(f"{record.name}: {name} is a floating tensor, got {what_it_is(values)}")
    _check_memory(record.name, values)
    if values.device != x.device:
        raise ValueError(f"{record.name}: {name} must be on the device of x, {x.device}, got one on {values.device}")
    if x.dim() > 0 and not -x.dim() <= dim < x.dim():
        return values  # x itself raises an error later
    dim = dim % max(x.dim(), 1)
    without = (*x.shape[:dim], *x.shape[dim + 1 :])
    if values.shape == without:
        return values.unsqueeze(dim) if x.dim() > 0 else values
    whole = (*x.shape[:dim], 1, *x.shape[dim + 1 :]) if x.dim() > 0 else ()
    if values.dim() > x.dim() or not _broadcasts(values.shape, whole):
        what = f"{tuple(whole)}, a value for each row of x, or be of shape {tuple(without)}"
        raise ValueError(f"{record.name}: {name} must broadcast to {what}; got {tuple(values.shape)}")
    return values


def _broadcasts(sizes: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether a shape, of no more dimensions, broadcasts to another one."""
    both = zip(reversed(sizes), reversed(to), strict=False)
    return all([m == 1 or m == n for m, n in both])  # not `in`: either may be symbolic


def _check_mask(name: str, x: Tensor, mask: Tensor) -> None:
    """Raises TypeError or ValueError if a mask is invalid."""
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, *DTYPES):
        raise TypeError(f"{name}: mask is a bool tensor, or {ACCEPTED}, got {what_it_is(mask)}")
    if mask.layout is not torch.strided:
        raise TypeError(f"{name}: mask is a dense tensor, got {what_it_is(mask)}")
    _check_memory(name, mask)
    if mask.device != x.device:
        raise ValueError(f"{name}: mask must be on the device of x, {x.device}, got one on {mask.device}")
    if mask.dim() > x.dim() or not _broadcasts(mask.shape, x.shape):
        raise ValueError(f"{name}: mask must broadcast to {tuple(x.shape)}, the shape of x; got {tuple(mask.shape)}")


def _masked(x: Tensor, factor: float, mask: Tensor) -> tuple[Tensor, float]:
    """x and a factor, with the mask applied: their product is the argument of the exponentials."""
    if mask.dtype is torch.bool:
        if factor == 0:  # infinity times it is NaN
            x, factor = x * factor, 1.0
        return x.masked_fill(~mask, -math.inf if factor > 0 else math.inf), factor
    return torch.add(mask, x, alpha=factor), 1.0
