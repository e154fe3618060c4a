"""Calls for jagged nested tensors: those for their values, which lie one after another in one dense tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from ..records import Activation, layout
from ..records.arguments import check_tensor, what_it_is

__all__ = ["by_values", "is_jagged", "of_values"]


def is_jagged(value: object) -> bool:
    """Whether it is a nested tensor of ``layout=torch.jagged``."""
    return isinstance(value, Tensor) and value.layout is torch.jagged


def by_values(record: Activation, given: dict[str, Any], call: Callable[[dict[str, Any]], Tensor]) -> Tensor:
    """A call for tensors of which some are jagged; the result is jagged as those are.

    Args:
        record: of the activation.
        given: the tensors by name.
        call: the same for dense tensors by name.

    Raises:
        TypeError: a tensor does not fit the jagged ones.
        ValueError: an operand belongs to a dimension that the values do not have.
    """
    like = next(each for each in given.values() if is_jagged(each))
    behind = like.dim() - 1 - like._ragged_idx  # the dimensions that both like and its values have, counted from the last
    dense = {name: _dense(record, name, each, like, behind) for name, each in given.items()}
    operands = [dense[name] for name, each in given.items() if isinstance(each, Tensor) and not is_jagged(each)]
    if like.lengths() is not None and torch.is_grad_enabled() and any([each.requires_grad for each in operands]):
        # What is between the rows would be in the operands' gradients, as 0 times inf.
        dense = {name: _without_holes(each, like) if is_jagged(given[name]) else each for name, each in dense.items()}
    for name, channel in record.channels.items():
        if isinstance(operand := given.get(name), Tensor) and operand.numel() != 1 and not -behind <= channel.dim < 0:
            what = f"dimension {channel.dim} of {what_it_is(like)} of {like.dim()} dimensions"
            must = f"it must be one of the last {behind}, as a negative number"
            raise ValueError(f"{record.name}: {name} has a value for each index of {what}; {must}")
    y = call(dense)
    return _Rows.of(like).with_values(y)


def of_values(record: Activation, dim: int, like: Tensor) -> int:
    """A dimension of a jagged tensor as one of its values, counted from the last.

    Raises:
        ValueError: the values do not have it.
    """
    from_last = dim - like.dim() if dim >= 0 else dim
    if not like._ragged_idx + 1 - like.dim() <= from_last < 0:
        raise ValueError(f"{record.name}: dim must be behind the jagged dimension of {tuple(like.shape)}, got {dim}")
    return from_last


class _Rows(NamedTuple):
    """The rows of a jagged tensor."""

    offsets: Tensor
    lengths: Tensor | None
    dim: int
    shortest: int | None
    longest: int | None

    @classmethod
    def of(cls, given: Tensor) -> _Rows:
        """Those of a tensor."""
        known = given._maybe_min_seqlen, given._maybe_max_seqlen  # or a later call finds them again
        return cls(given.offsets(), given.lengths(), given._ragged_idx, *known)

    def with_values(self, values: Tensor) -> Tensor:
        """The tensor with these rows and some values."""
        return self._jagged(values) if torch.compiler.is_compiling() else _Jagged.apply(values, self)

    def _jagged(self, values: Tensor) -> Tensor:
        known = {"min_seqlen": self.shortest, "max_seqlen": self.longest}
        return torch.nested.nested_tensor_from_jagged(values, self.offsets, self.lengths, jagged_dim=self.dim, **known)


def _values(given: Tensor) -> Tensor:
    """The values of a jagged tensor, as a view."""
    return given.values() if torch.compiler.is_compiling() else _Values.apply(given)


class _Values(Function):
    """The values of a jagged tensor. PyTorch's own gradient of them has no gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, given: Tensor) -> Tensor:
        ctx.rows = _Rows.of(given)
        ctx.set_materialize_grads(False)
        return given.values()

    @staticmethod
    def backward(ctx: FunctionCtx, dy: Tensor | None) -> Tensor | None:
        return None if dy is None else _Jagged.apply(dy, ctx.rows)


class _Jagged(Function):
    """The inverse."""

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, rows: _Rows) -> Tensor:
        ctx.set_materialize_grads(False)  # PyTorch cannot make jagged ones
        return rows._jagged(values)

    @staticmethod
    def backward(ctx: FunctionCtx, dy: Tensor | None) -> tuple[Tensor | None, None]:
        return None if dy is None else _Values.apply(dy), None


def _without_holes(values: Tensor, like: Tensor) -> Tensor:
    """The values with 0 where they are between the rows of a jagged tensor."""
    offsets, lengths, dim = like.offsets(), like.lengths(), like._ragged_idx - 1
    places = torch.arange(values.shape[dim], device=values.device)
    row = (torch.searchsorted(offsets, places, right=True) - 1).clamp(0, lengths.numel() - 1)
    inside = (places >= offsets[row]) & (places < offsets[row] + lengths[row])
    return values.where(inside.reshape(-1, *[1] * (values.dim() - dim - 1)), 0)


def _dense(record: Activation, name: str, given: Any, like: Tensor, behind: int) -> Any:
    """The values of a tensor that is jagged as ``like`` is; a dense one, so that it broadcasts to values as to ``like``."""
    if not isinstance(given, Tensor):
        return given
    ragged, operands = like._ragged_idx, layout(record.token)
    is_element = name in operands.tensors[: operands.elements]
    is_row = not is_element and name not in record.channels
    if is_jagged(given):
        dims = given.dim() == like.dim() or (is_row and given.dim() == like.dim() - 1)
        if dims and given._ragged_idx == ragged and given.shape[ragged] == like.shape[ragged]:
            return _values(given)
    elif given.is_nested:
        check_tensor(record, given, f"{name} must be")
    elif (given.numel() == 1 and not is_element) or (given.dim() <= behind and not is_row):
        return given
    elif is_element and given.dim() <= like.dim() and all([size == 1 for size in given.shape[: given.dim() - behind]]):
        return given.reshape(given.shape[given.dim() - behind :])
    shapes = f"{name} has the shape {tuple(given.shape)}, beside {tuple(like.shape)}"
    raise TypeError(f"{record.name}: {shapes}; it must be jagged alike, or broadcast to the dimensions behind the jagged one")
