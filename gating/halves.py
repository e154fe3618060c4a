"""Where the two tensors of a gated activation lie in one that holds both."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..records import GATED, Activation, shown
from ..records import layout as layout_of

__all__ = ["LAYOUTS", "ORDERS", "ROUNDINGS", "Halves", "by_name", "check_options", "halves_of"]

LAYOUTS = ("halves", "interleaved")
ORDERS = ("first", "last")
ROUNDINGS = ("once", "unfused")
_CHOICES = {"layout": LAYOUTS, "gate": ORDERS, "rounding": ROUNDINGS}


class Halves(NamedTuple):
    """How to take one tensor apart, and put one together.

    Attributes:
        dim: the dimension that holds both, from 0 on.
        interleaved: whether they take turns there; else they are its halves.
        swapped: whether what is first there is what the kernel file takes second.
    """

    dim: int
    interleaved: bool
    swapped: bool

    @property
    def code(self) -> int:
        """What the operator ``backward_packed`` takes as ``layout``."""
        return self.interleaved | self.swapped << 1

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Views of ``x``, in the order of the kernel file's arguments."""
        if self.interleaved:
            pairs = x.unflatten(self.dim, (x.shape[self.dim] // 2, 2))
            first, second = pairs.select(self.dim + 1, 0), pairs.select(self.dim + 1, 1)
        elif torch.compiler.is_compiling() or not x.numel():  # as batches of none have no gradient of chunk
            size = x.shape[self.dim] // 2
            first, second = x.narrow(self.dim, 0, size), x.narrow(self.dim, size, size)
        else:
            first, second = x.chunk(2, self.dim)  # the same in half of the time
        return (second, first) if self.swapped else (first, second)

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        """What :meth:`split` takes apart into these."""
        first, second = (b, a) if self.swapped else (a, b)
        if self.interleaved:
            sizes = [size * 2 if i == self.dim else size for i, size in enumerate(first.shape)]
            return torch.stack((first, second), self.dim + 1).reshape(sizes)  # flatten knows no batches
        return torch.cat((first, second), self.dim)


def check_options(record: Activation, options: dict[str, object]) -> None:
    """Checks the options that say how tensors are laid out and results rounded.

    Raises:
        TypeError: ``dim`` is no int.
        ValueError: another has no such value.
    """
    for name in GATED:
        if options[name] not in _CHOICES[name]:
            also = "a tensor or " if name == "gate" else ""
            choices = " or ".join(map(repr, _CHOICES[name]))
            raise ValueError(f"{record.name}: {name} must be {also}{choices}, got {shown(options[name])}")
    if type(options["dim"]) is not int:
        raise TypeError(f"{record.name}: dim must be an int, got {shown(options['dim'])}")


def halves_of(record: Activation, x: Tensor, dim: int, layout: str, gate: str) -> Halves:
    """How ``x`` holds the two tensors of a gated activation.

    Raises:
        ValueError: it has no such dimension, or one of odd size.
    """
    dims = x.dim()
    if not -dims <= dim < dims:
        raise ValueError(f"{record.name}: x has {dims} dimensions, and no dimension {dim}: {tuple(x.shape)}")
    dim %= dims
    if x.shape[dim] % 2:
        raise ValueError(f"{record.name}: dimension {dim} of x holds gate and up, and must be even; got {tuple(x.shape)}")
    return Halves(dim, layout == "interleaved", is_swapped(record, gate))


def is_swapped(record: Activation, gate: str) -> bool:
    """Whether the first of the two tensors is what the kernel file takes second."""
    return (layout_of(record.token).tensors[0] == "gate") != (gate == "first")


def by_name(gate: str, first: object, second: object) -> dict[str, object]:
    """The two tensors, in the order of halves, by name."""
    return {"gate": first, "up": second} if gate == "first" else {"up": first, "gate": second}
