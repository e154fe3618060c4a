"""How the tensors of a call are checked, cast and broadcast to what operators take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import Activation, Channel, layout
from .arguments import DTYPES, as_number, check_tensor, is_sharded, what_it_is
from .dtypes import wider

__all__ = [
    "broadcast_shape",
    "by_channel",
    "by_row",
    "fitted",
    "fitting",
    "is_cast",
    "order_in_memory",
    "promoted",
    "rows_together",
]


def fitted(record: Activation, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """The tensors of a call as operators take them: elements of one shape and dtype, channel operands that broadcast.

    Raises:
        TypeError: an operand is not a tensor that kernels take, or not of the dtype it must have.
        ValueError: an operand is on another device, or does not broadcast.
    """
    operands = layout(record.token)  # fields by name: torch.compile in torch 2.11 cannot unpack a NamedTuple here
    names, elements, places = operands.tensors, operands.elements, operands.places
    x = given[names[0]]
    check_tensor(record, x)
    numbers = [name for place, name in enumerate(names) if place >= elements and place not in places]
    learned = [given[name] for name in names[elements:] if name not in numbers and _is_weight(record, name)]
    promoting = [given[name] for name in names[:elements]] + (learned if record.dtypes == "promoted" else [])
    # Others are refused by name below; of float8, PyTorch's own error would not say which tensor it is.
    dtype = promoted([each for each in promoting if isinstance(each, Tensor) and each.dtype in DTYPES])
    for name in names[1:]:
        value = given[name]
        if name in numbers and not isinstance(value, Tensor):
            given[name] = value = x.new_full((), as_number(record, name, value), dtype=dtype)
        elif name in numbers and value.requires_grad:
            raise ValueError(f"{record.name}: {name} is not learned, got a tensor that requires a gradient")
        check_tensor(record, value, f"{name} must be")
        if value.device != x.device:
            raise ValueError(f"{record.name}: {name} must be on the device of x, {x.device}, got one on {value.device}")
    tensors = [given[name] for name in names]
    if record.dtypes == "same":
        tensors = _of_same_dtype(record, names, tensors)
        dtype = promoted(tensors[:elements])
    for place, each in enumerate(tensors):
        # Beside 16-bit elements, the other operands may be float32.
        own = place >= elements and dtype.itemsize == 2 and (record.dtypes == "own" or not _is_weight(record, names[place]))
        if each.dtype is not dtype and not (own and each.dtype is torch.float32):
            tensors[place] = each.to(torch.float32 if own else dtype)
    if elements > 1:
        tensors[:elements] = _broadcast(record, names[:elements], tensors[:elements])
    if any([name not in record.channels for name in names[elements:]]):
        tensors[0] = rows_together(tensors[0])
    for place in range(elements, len(tensors)):
        name = names[place]
        channel, operand = record.channels.get(name), tensors[place]
        if channel is None:
            operand = by_row(record, name, operand, tensors[0])
        else:
            operand = by_channel(record, name, channel, operand, tensors[0], x.dim())
        # With a 0-dimensional x, an operand of shape (1,) would give a formula's result a dimension.
        tensors[place] = operand.reshape(()) if x.dim() < operand.dim() and operand.numel() == 1 else operand
    return tuple(tensors)


def fitting(record: Activation, given: dict[str, Any]) -> tuple[Tensor, ...] | None:
    """A fast path of :func:`fitted` for the usual call, in which operators take the tensors as they are; else None.

    Always None under torch.compile, which traces :func:`fitted`.
    """
    if torch.compiler.is_compiling():
        return None
    names, elements, places = record.layout.tensors, record.layout.elements, record.layout.places
    x = given[names[0]]
    if not isinstance(x, Tensor) or x.is_nested or (record.dtypes == "same" and is_cast(x)):
        return None
    dtype, device, shape = x.dtype, x.device, x.shape
    if dtype not in DTYPES or x.layout is not torch.strided or (type(x) is not Tensor and is_sharded(x)):
        return None
    tensors = [x]
    for place in range(1, len(names)):
        each = given[names[place]]
        if not isinstance(each, Tensor) or each.dtype is not dtype or each.device != device:
            return None
        if each.layout is not torch.strided or each.is_nested or (type(each) is not Tensor and is_sharded(each)):
            return None
        tensors.append(each)
        if place < elements:
            if each.shape != shape:
                return None
            continue
        channel = record.channels.get(names[place])
        if channel is None or each.dim() != 1 or not shape or (each.requires_grad and place not in places):
            return None
        count = each.shape[0]
        if count != 1 and (channel.one or channel.dim not in (-1, len(shape) - 1) or count != shape[-1]):
            return None
    return tuple(tensors)


def _of_same_dtype(record: Activation, names: tuple[str, ...], tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, cast under autocast as for PyTorch's counterpart. Weights must be of x's dtype then.

    Added operands, and those by which the activation is multiplied, may have others.
    """
    added, first = record.added, names[0]
    if is_cast(tensors[0]):
        chosen = torch.get_autocast_dtype(tensors[0].device.type)
        kept = [t.dtype is torch.float64 or name in added for name, t in zip(names, tensors, strict=True)]
        tensors = [t if keep else t.to(chosen) for keep, t in zip(kept, tensors, strict=True)]
    x = tensors[0]
    for name, each in zip(names, tensors, strict=True):
        if each.dtype != x.dtype and _is_weight(record, name):
            wanted = str(x.dtype).removeprefix("torch.")
            got = f"got {what_it_is(each)}; convert it, as with .to({first}.dtype)"
            raise TypeError(f"{record.name}: {name} must be of {first}'s dtype, {wanted}, {got}")
    return tensors


def _is_weight(record: Activation, name: str) -> bool:
    """Whether a tensor is one that the activation itself learns, whose dtype ``record.dtypes`` says."""
    return name in record.channels and name not in record.added


def _broadcast(record: Activation, names: tuple[str, ...], tensors: list[Tensor]) -> list[Tensor]:
    """Broadcasts the elementwise tensors to one shape, as views."""
    if all([t.shape == tensors[0].shape for t in tensors]):
        return tensors
    shape = broadcast_shape(record, names, tensors)
    return [t if t.shape == shape else t.expand(shape) for t in tensors]


def broadcast_shape(record: Activation, names: Sequence[str], tensors: Sequence[Tensor]) -> torch.Size:
    """The shape that the elementwise tensors broadcast to.

    Raises:
        ValueError: they do not.
    """
    try:
        return torch.broadcast_shapes(*[t.shape for t in tensors])
    except RuntimeError:
        given = ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip(names, tensors, strict=True))
        raise ValueError(f"{record.name}: the tensors' shapes do not broadcast: {given}") from None


def by_row(record: Activation, name: str, operand: Tensor, x: Tensor) -> Tensor:
    """A row operand as a view that broadcasts to x.

    Raises:
        ValueError: it has not one value for each row of ``x``.
    """
    if operand.shape == x.shape[:-1]:
        return operand.unsqueeze(-1)
    if operand.shape == (*x.shape[:-1], 1):
        return operand
    expected = f"{tuple(x.shape[:-1])} or {(*x.shape[:-1], 1)}, the rows of x"
    raise ValueError(f"{record.name}: {name} must be of shape {expected}; got {tuple(operand.shape)}")


def by_channel(record: Activation, name: str, channel: Channel, operand: Tensor, x: Tensor, dims: int) -> Tensor:
    """A channel operand as a view that broadcasts to x, which had ``dims`` dimensions before it was broadcast.

    Raises:
        ValueError: it has neither one value nor one for each index of its dimension of ``x``.
    """
    count = operand.numel()
    if channel.one:
        if count != 1:
            raise ValueError(f"{record.name}: {name} must hold one value, got {count}: {tuple(operand.shape)}")
        return operand
    if operand.dim() > 1:
        shape = tuple(operand.shape)
        raise ValueError(f"{record.name}: {name} must have at most 1 dimension, got {operand.dim()}: {shape}")
    dim = channel.dim if channel.dim < 0 else channel.dim - dims  # from the end, as shapes broadcast
    there = -x.dim() <= dim < 0
    if count != 1 and not (there and count == x.shape[dim]):
        size = f", as x has {dims} dimensions"
        if there:
            size = f" or {x.shape[dim]}, as dimension {channel.dim} of x has {x.shape[dim]}"
        raise ValueError(f"{record.name}: the number of values of {name} must be 1{size}; got {count}")
    return operand if count == 1 or dim == -1 else operand.view(-1, *[1] * (-1 - dim))


def is_cast(x: Tensor) -> bool:
    """Whether autocast is on for ``x``."""
    device = "cuda" if x.is_cuda else "cpu" if x.is_cpu else ""
    return device != "" and torch.is_autocast_enabled(device)


def promoted(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype that PyTorch promotes floating-point tensors to: 0-dimensional tensors count only if all are."""
    dtypes = [t.dtype for t in tensors if t.dim() > 0] or [t.dtype for t in tensors]
    dtype = dtypes[0]
    for each in dtypes[1:]:
        dtype = wider(dtype, each)
    return dtype


def order_in_memory(x: Tensor) -> list[int]:
    """The dimensions of ``x``, outermost in memory first; of equal strides in their order."""
    strides, order = x.stride(), []
    for dim, stride in enumerate(strides):  # torch.compile does not sort by sizes that it does not know
        place = 0
        while place < len(order) and strides[order[place]] >= stride:
            place += 1
        order.insert(place, dim)
    return order


def rows_together(x: Tensor) -> Tensor:
    """``x``, or a contiguous copy if its last dimension lies between the others in memory, or if elements overlap.

    Kernels read a row operand once per stretch of memory, so the last dimension must be the innermost or the outermost one.
    """
    if x.is_contiguous():
        return x
    if not torch.compiler.is_compiling() and _overlaps_itself(x):
        return x.contiguous()
    *strides, within = torch.empty_like(x, device="meta").stride()
    others = [stride for stride, size in zip(strides, x.shape[:-1], strict=True) if size > 1]
    apart = x.shape[-1] > 1 and others and min(others) < within < max(others)
    return x.contiguous() if apart else x


def _overlaps_itself(x: Tensor) -> bool:
    """Whether dimensions of ``x`` share elements, other than by being expanded."""
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size < 2 or stride == 0:
            continue
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
