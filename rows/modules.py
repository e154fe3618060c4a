"""The functions as modules, which take what those of ``torch.nn`` take and stand where they stand."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..measuring.inputs import KernelBenchForm
from ..modules import StandingIn
from ..registry import normalise
from . import functions

__all__ = ["COUNTERPARTS", "SETTINGS", "LogSoftmax", "RowModule", "Softmax", "Softmax2d", "Softmin", "class_of_rows"]


class RowModule(StandingIn):
    """What the modules have in common."""


class OfAnyDimension(KernelBenchForm, RowModule):
    """What those have that take a dimension: KernelBench's form, as ``ModelNew`` beside PyTorch's as ``Model``."""

    @classmethod
    def get_init_inputs(cls) -> list:
        """Arguments for the constructor: the dimension, which is 1 in KernelBench."""
        return [1]


class Softmax(OfAnyDimension, nn.Softmax):
    """``torch.nn.Softmax`` by :func:`jitact.softmax`."""

    Model = nn.Softmax

    def forward(self, input: Tensor) -> Tensor:
        """Softmax along ``dim``."""
        return functions.softmax(input, self.dim)


class LogSoftmax(OfAnyDimension, nn.LogSoftmax):
    """``torch.nn.LogSoftmax`` by :func:`jitact.log_softmax`."""

    Model = nn.LogSoftmax

    def forward(self, input: Tensor) -> Tensor:
        """The logarithm of softmax along ``dim``."""
        return functions.log_softmax(input, self.dim)


class Softmin(OfAnyDimension, nn.Softmin):
    """``torch.nn.Softmin`` by :func:`jitact.softmin`."""

    Model = nn.Softmin

    def forward(self, input: Tensor) -> Tensor:
        """Softmin along ``dim``."""
        return functions.softmin(input, self.dim)


class Softmax2d(RowModule, nn.Softmax2d):
    """``torch.nn.Softmax2d`` by :func:`jitact.softmax`."""

    Model = nn.Softmax2d

    def forward(self, input: Tensor) -> Tensor:
        """Softmax along the channels of images.

        Raises:
            ValueError: input is neither one image nor a batch of them.
        """
        if input.dim() not in (3, 4):
            raise ValueError(f"Softmax2d: expected 3 or 4 dimensions, got {input.dim()}")
        return functions.softmax(input, -3)


SETTINGS = ("dim",)  # what PyTorch's modules hold, where they hold anything
COUNTERPARTS: dict[type[nn.Module], type[RowModule]] = {
    nn.Softmax: Softmax,
    nn.LogSoftmax: LogSoftmax,
    nn.Softmin: Softmin,
    nn.Softmax2d: Softmax2d,
}
FUNCTIONS: dict[Callable[..., Tensor], type[RowModule]] = {
    **dict.fromkeys([F.softmax, torch.softmax, functions.softmax], Softmax),
    **dict.fromkeys([F.log_softmax, torch.log_softmax, functions.log_softmax], LogSoftmax),
    **dict.fromkeys([F.softmin, functions.softmin], Softmin),
}
NAMED = {normalise(ours.__name__): ours for ours in COUNTERPARTS.values()}


def class_of_rows(activation: object) -> type[RowModule] | None:
    """Our class for a name in any spelling, a class, a module or a function; None if that is nothing of rows."""
    if isinstance(activation, str):
        return NAMED.get(normalise(activation))
    cls = type(activation) if isinstance(activation, nn.Module) else activation
    if isinstance(cls, type):
        return cls if issubclass(cls, RowModule) else COUNTERPARTS.get(cls)
    return FUNCTIONS.get(cls) if callable(cls) and isinstance(cls, Hashable) else None


def counterpart(module: nn.Module) -> RowModule | None:
    """Ours for a module of PyTorch's, with its settings; None if there is none."""
    ours = COUNTERPARTS.get(type(module))
    return ours and ours(**{key: value for key, value in vars(module).items() if key in SETTINGS})
