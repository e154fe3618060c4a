"""Calls with a mask or a conversion, which kernels apply while they read x."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.loader.source import ELEMENTS, RowTypes
from . import kernels
from .autograd import Typed, apply, rows_like
from .records import Beside, RowActivation

__all__ = ["in_types", "types_of"]

NAMES = {getattr(torch, name): name for name in ELEMENTS if name != "none"}


def in_types(
    record: RowActivation, x: Tensor, dim: int, dtype: torch.dtype, scale: float, mask: Tensor | None, beside: Beside
) -> Tensor | None:
    """The activation of ``scale x + mask`` in ``dtype``, in one pass; None if no kernel should compute it.

    Args:
        record: the activation.
        x: a tensor of any kind.
        dim: the dimension of the rows.
        dtype: of the result.
        scale: the factor of x.
        mask: bool or floating, broadcasts to x; or None.
        beside: the operands of the activation's kernel file.
    """
    if not kernels.is_plain(x) or not -x.dim() <= dim < x.dim() or not kernels.sees_rows(beside.rows, x):
        return None
    types = types_of(x.dtype, dtype, mask.dtype if mask is not None else None)
    if types is None:
        return None
    x, place = x.contiguous(), dim % x.dim()
    if not record.takes_types(x, place, scale, types):
        return None
    lying = None
    if mask is not None:
        if not kernels.is_plain(mask):
            return None
        if mask.dim() < x.dim():
            mask = mask[(None,) * (x.dim() - mask.dim())]
        lying = kernels.collapsed(mask.detach().expand(x.shape), place)
        if lying is None:
            return None
    build = record.built_for(types)
    if build is None:
        return None
    if mask is not None and mask.is_inference() and torch.is_grad_enabled():  # which could not be kept for backward
        mask = mask.clone()
    return apply(Typed, x, mask, record, build, place, scale, lying, beside.numbers, *rows_like(beside, x.shape, place))


def types_of(x: torch.dtype, result: torch.dtype, mask: torch.dtype | None) -> RowTypes | None:
    """The types of the build for tensors of these dtypes; None if there is no such build.

    Builds convert x to a wider type only. A conversion that rounds is done by PyTorch before.
    """
    known = result in kernels.DTYPES and x in NAMES and x is not torch.bool and mask in (None, torch.bool, x, torch.float32)
    if not known or (x is not result and result is not torch.float32):
        return None
    return RowTypes(NAMES[x], NAMES[result], "none" if mask is None else NAMES[mask])
