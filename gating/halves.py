"""How one tensor holds the gate and the other operand of a gated activation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..records import Activation
from ..records import layout as layout_of
from ..records.arguments import GATED, as_index, shown

__all__ = ["LAYOUTS", "ORDERS", "ROUNDINGS", "Halves", "by_name", "check_options", "halves_of"]

LAYOUTS = ("halves", "interleaved")
ORDERS = ("first", "last")
ROUNDINGS = ("once", "unfused")
_CHOICES = {"layout": LAYOUTS, "gate": ORDERS, "rounding": ROUNDINGS}


class Halves(NamedTuple):
    """How to split one tensor into the two operands, and join them.

    Attributes:
        dim: the dimension that holds both; not negative.
        interleaved: whether their elements alternate there; else they are its two halves.
        swapped: whether the first of the two is the second operand of the kernel.
    """

    dim: int
    interleaved: bool
    swapped: bool

    @property
    def code(self) -> int:
        """The argument ``layout`` of the operator ``backward_packed``."""
        return self.interleaved | self.swapped << 1

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Views of ``x``, in the order of the kernel's operands."""
        if self.interleaved:
            pairs = x.unflatten(self.dim, (x.shape[self.dim] // 2, 2))
            first, second = pairs.select(self.dim + 1, 0), pairs.select(self.dim + 1, 1)
        elif torch.compiler.is_compiling() or not x.numel():  # chunk of an empty tensor has no batched gradient
            size = x.shape[self.dim] // 2
            first, second = x.narrow(self.dim, 0, size), x.narrow(self.dim, size, size)
        else:
            first, second = x.chunk(2, self.dim)  # the same in half of the time
        return (second, first) if self.swapped else (first, second)

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        """The inverse of :meth:`split`."""
        first, second = (b, a) if self.swapped else (a, b)
        if self.interleaved:
            sizes = [size * 2 if i == self.dim else size for i, size in enumerate(first.shape)]
            return torch.stack((first, second), self.dim + 1).reshape(sizes)  # flatten does not support vmap
        return torch.cat((first, second), self.dim)


def check_options(record: Activation, options: dict[str, object]) -> None:
    """Checks ``layout``, ``gate`` and ``rounding``, and makes ``dim`` an int.

    Raises:
        TypeError: ``dim`` is not an int.
        ValueError: another option has an invalid value.
    """
    for name in GATED:
        if options[name] not in _CHOICES[name]:
            also = "a tensor or " if name == "gate" else ""
            choices = " or ".join(map(repr, _CHOICES[name]))
            raise ValueError(f"{record.name}: {name} must be {also}{choices}, got {shown(options[name])}")
    if type(options["dim"]) is not int:
        options["dim"] = as_index(record, "dim", options["dim"])


def halves_of(record: Activation, x: Tensor, dim: int, layout: str, gate: str) -> Halves:
    """How ``x`` holds the two tensors of a gated activation.

    Raises:
        ValueError: ``x`` has no dimension ``dim``, or its size is odd.
    """
    dims = x.dim()
    if not -dims <= dim < dims:
        raise ValueError(f"{record.name}: x has {dims} dimensions, and no dimension {dim}: {tuple(x.shape)}")
    dim %= dims
    if x.shape[dim] % 2:
        raise ValueError(f"{record.name}: dimension {dim} of x holds gate and up, and must be even; got {tuple(x.shape)}")
    return Halves(dim, layout == "interleaved", is_swapped(record, gate))


def is_swapped(record: Activation, gate: str) -> bool:
    """Whether the first of the two tensors is the second operand of the kernel."""
    return (layout_of(record.token).tensors[0] == "gate") != (gate == "first")


def by_name(gate: str, first: object, second: object) -> dict[str, object]:
    """Two tensors by name, given in the order that ``gate`` says."""
    return {"gate": first, "up": second} if gate == "first" else {"up": first, "gate": second}
