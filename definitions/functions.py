"""The functions and activations that an expression may call, and their PyTorch counterparts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import registry
from ..kernels import KernelSource
from ..records import Activation, layout
from .helpers import HELPERS

__all__ = ["ARITHMETIC", "FUNCTIONS", "IN_MATH", "Called", "Function", "called"]


class Function(NamedTuple):
    """A function of kernels/device/math.cuh or number.cuh: its number of arguments, and its name in Python.

    ``numbers`` are the positions of arguments for which the Python function accepts plain numbers.
    """

    arity: int
    python: str
    numbers: tuple[int, ...] = ()


IN_TORCH_TOO = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "floor ceil trunc erf erfc sigmoid abs"
)
FUNCTIONS: dict[str, Function] = {
    **{name: Function(1, f"torch.{name}") for name in IN_TORCH_TOO.split()},
    **{name: Function(helper.__code__.co_argcount, helper.__name__) for name, helper in HELPERS.items()},
    "min": Function(2, "minimum", (1,)),
    "max": Function(2, "maximum", (1,)),
    "clamp": Function(3, "clamp", (1, 2)),
    "rint": Function(1, "torch.round"),
    "pow": Function(2, "torch.pow", (0, 1)),
    "fmod": Function(2, "torch.fmod", (1,)),
    "atan2": Function(2, "torch.atan2"),
    "hypot": Function(2, "torch.hypot"),
    "copysign": Function(2, "torch.copysign"),
}

ARITHMETIC = frozenset(("abs", "min", "max", "clamp", "fma", "copysign"))
"""Functions that cost no more than an addition or a multiplication."""

IN_MATH_TOO = (
    "exp expm1 log log2 log10 log1p sqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc pow fmod atan2 "
    "hypot copysign"
)
IN_MATH = frozenset(IN_MATH_TOO.split())
"""Functions that Python's ``math`` has under the same name, with float results."""


@dataclass(frozen=True)  # torch.compile in torch 2.10 cannot call a NamedTuple
class Called:
    """An activation that an expression calls, with its tensors and, optionally, its parameters."""

    record: Activation
    tensors: tuple[str, ...]

    @property
    def name(self) -> str:
        """The activation's name."""
        return self.record.name

    @property
    def python(self) -> str:
        """Its name in an expression's Python form; no variable can have it, as it contains ``__``."""
        return f"called__{self.name}"

    @property
    def source(self) -> KernelSource:
        """Its kernel file."""
        return self.record.source

    @property
    def arguments(self) -> str:
        """Its arguments, with the defaults of parameters, for error messages."""
        return ", ".join([*self.tensors, *(f"{name}={value:g}" for name, value in self.record.params)])

    def __call__(self, *values: Tensor | float) -> Tensor:
        """Evaluates it in PyTorch: with the record's ``exact`` in float64, as ``reference`` may lose digits there."""
        operands = layout(self.record.token)
        if len(self.tensors) > operands.elements:  # then it is an expression, whose elementwise tensors come first
            given = dict(zip(self.tensors, values, strict=False))
            return self.record.expression.value(*[given[name] for name in operands.tensors], *values[len(given) :])
        in_float64 = any(isinstance(value, Tensor) and value.dtype is torch.float64 for value in values)
        return (self.record.exact if self.record.exact and in_float64 else self.record.reference)(*values)


def called(name: str, beside: Mapping[str, Activation]) -> Called | None:
    """The activation that an expression calls by a name or an alias; None if there is none.

    Args:
        name: as written in the expression.
        beside: further activations, which take precedence over the registry's.

    Raises:
        ValueError: expressions cannot call it; the message says why.
    """
    try:
        record = beside.get(name) or registry.class_of(name).activation
    except KeyError:
        return None
    signature = record.source.signature
    kinds = [("a value for each channel", "channel"), ("a value for each row", "row"), ("random numbers", "random")]
    # A definition by an expression can be called with channel and row operands: its reference broadcasts them as tensors.
    for what, role in kinds[2 if getattr(record, "expression", None) is not None else 0 :]:
        if signature.of(role):
            raise ValueError(f"{record.name} takes {what}, which an expression cannot give it")
    tensors = signature.of("element", "channel", "row")
    if [operand.name for operand in signature.operands[: len(tensors)]] != list(tensors):
        raise ValueError(f"{record.name} takes numbers before tensors, which an expression cannot give it")
    return Called(record, tensors)
