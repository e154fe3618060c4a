"""The functions as modules, which take what those of ``torch.nn`` take and stand where they stand."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..measuring.inputs import KernelBenchForm
from ..modules import ActivationModule, StandingIn
from ..records import is_stand_in
from ..registry import normalise, users_rows
from . import functions
from .records import TABLE, RowActivation

__all__ = [
    "COUNTERPARTS",
    "FUNCTIONS",
    "SETTINGS",
    "LogSoftmax",
    "RowModule",
    "Softmax",
    "Softmax2d",
    "Softmin",
    "class_of_rows",
    "forget",
    "make_module",
    "names",
]


class RowModule(StandingIn):
    """What the modules have in common.

    Attributes:
        activation: the record.
        function: what a module calls, as ``jitact.softmax``.
        Model: the same in PyTorch, a module class.
    """

    activation: RowActivation
    function: Callable[..., Tensor]
    Model: type[nn.Module]


class OfAnyDimension(KernelBenchForm, RowModule):
    """What those have that take a dimension: KernelBench's form, as ``ModelNew`` beside PyTorch's as ``Model``."""

    @classmethod
    def get_init_inputs(cls) -> list:
        """Arguments for the constructor: the dimension, which is 1 in KernelBench."""
        return [1]


class Softmax(OfAnyDimension, nn.Softmax):
    """``torch.nn.Softmax`` by :func:`jitact.softmax`."""

    Model, activation, function = nn.Softmax, TABLE["softmax"], staticmethod(functions.softmax)

    def forward(self, input: Tensor) -> Tensor:
        """Softmax along ``dim``."""
        return functions.softmax(input, self.dim)


class LogSoftmax(OfAnyDimension, nn.LogSoftmax):
    """``torch.nn.LogSoftmax`` by :func:`jitact.log_softmax`."""

    Model, activation, function = nn.LogSoftmax, TABLE["log_softmax"], staticmethod(functions.log_softmax)

    def forward(self, input: Tensor) -> Tensor:
        """The logarithm of softmax along ``dim``."""
        return functions.log_softmax(input, self.dim)


class Softmin(OfAnyDimension, nn.Softmin):
    """``torch.nn.Softmin`` by :func:`jitact.softmin`."""

    Model, activation, function = nn.Softmin, TABLE["softmin"], staticmethod(functions.softmin)

    def forward(self, input: Tensor) -> Tensor:
        """Softmin along ``dim``."""
        return functions.softmin(input, self.dim)


class Softmax2d(RowModule, nn.Softmax2d):
    """``torch.nn.Softmax2d`` by :func:`jitact.softmax`."""

    Model, activation, function = nn.Softmax2d, TABLE["softmax"], staticmethod(functions.softmax)

    def forward(self, input: Tensor) -> Tensor:
        """Softmax along the channels of images.

        Raises:
            ValueError: input is neither one image nor a batch of them.
        """
        if not is_stand_in(input) and input.dim() not in (3, 4):
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
    **dict.fromkeys([F.softmax, torch.softmax, torch.special.softmax, Tensor.softmax, functions.softmax], Softmax),
    **dict.fromkeys(
        [F.log_softmax, torch.log_softmax, torch.special.log_softmax, Tensor.log_softmax, functions.log_softmax], LogSoftmax
    ),
    **dict.fromkeys([F.softmin, functions.softmin], Softmin),
}
NAMED: dict[str, type[RowModule]] = {normalise(ours.__name__): ours for ours in COUNTERPARTS.values()}


class OfDefinition(OfAnyDimension):
    """What those have that users define."""

    def __init__(self, dim: int = -1, *, save: str | None = None) -> None:
        """Takes the dimension that rows lie along, and what backward keeps."""
        super().__init__()
        self.dim, self.save = dim, save or self.activation.saves[0]

    def forward(self, input: Tensor) -> Tensor:
        """The activation along ``dim``."""
        return type(self).function(input, self.dim, save=self.save)

    def extra_repr(self) -> str:
        """The dimension, and what backward keeps if that was chosen."""
        return f"dim={self.dim}" + (f", save={self.save!r}" if self.save != self.activation.saves[0] else "")

    def __reduce__(self) -> tuple:
        """By name, and by what it was, as a name may be defined again."""
        return _revive, (self.activation.name, self.activation.fingerprint), self.__dict__

    __deepcopy__ = ActivationModule.__deepcopy__  # of this very class, also where another has its name by now


def _revive(name: str, fingerprint: str) -> RowModule:
    """An empty module for unpickling to fill.

    Raises:
        LookupError: it is not defined here, or as something else.
    """
    cls = users_rows.get(normalise(name))
    if cls is None or cls.activation.fingerprint != fingerprint:
        what = "is not defined in this process" if cls is None else "is another here than where this was saved"
        raise LookupError(f"the activation {name!r} {what}; define it as it was before loading a module of it")
    return cls.__new__(cls)


def make_module(record: RowActivation) -> type[RowModule]:
    """The module class, and with it the function, of a user's definition, which are known from now on by its name."""

    def function(
        x: Tensor,
        dim: int = -1,
        dtype: torch.dtype | None = None,
        *,
        scale: float = 1.0,
        mask: Tensor | None = None,
        save: str = record.saves[0],
    ) -> Tensor:
        return functions.run(record, function, x, dim, dtype, scale, mask, save)

    def init(self: nn.Module, dim: int = -1) -> None:
        nn.Module.__init__(self)
        self.dim = dim

    theirs = record.reference or record.eager
    function.__name__ = function.__qualname__ = record.name
    function.__module__ = "jitact"  # where pickles and torch.fx look for it
    function.__doc__ = f"{record.name}(t) = {record.formula} along ``dim``. All else is as in :func:`jitact.softmax`."
    named = {"__module__": __name__, "__doc__": f"{record.formula}, in PyTorch."}
    model = type(record.title, (nn.Module,), {"__init__": init, "forward": lambda self, x: theirs(x, self.dim), **named})
    members = {"activation": record, "function": staticmethod(function), "Model": model, **named}
    cls = type(record.title, (OfDefinition,), members | {"__doc__": f"{record.name}(t) = {record.formula} along ``dim``."})
    function.ModelNew = cls  # for get(), which may be given the function
    users_rows[normalise(record.name)] = cls
    return cls


def forget(name: str) -> None:
    """Takes a user's definition out again, if there is one of that name. Modules made of it keep working."""
    users_rows.pop(normalise(name), None)


def names() -> list[str]:
    """The names of the functions: the library's first, then those that users defined."""
    return [*TABLE, *(cls.activation.name for cls in users_rows.values())]


def class_of_rows(activation: object) -> type[RowModule] | None:
    """Our class for a name in any spelling, a class, a module or a function; None if that is nothing of rows."""
    if isinstance(activation, str):
        return NAMED.get(normalise(activation)) or users_rows.get(normalise(activation))
    cls = type(activation) if isinstance(activation, nn.Module) else activation
    if isinstance(cls, type):
        return cls if issubclass(cls, RowModule) else COUNTERPARTS.get(cls)
    if not callable(cls) or not isinstance(cls, Hashable):
        return None
    own = vars(cls).get("ModelNew") if isinstance(cls, FunctionType) else None
    return own if isinstance(own, type) and issubclass(own, RowModule) else FUNCTIONS.get(cls)


def counterpart(module: nn.Module) -> RowModule | None:
    """Ours for a module of PyTorch's, with its settings; None if there is none."""
    ours = COUNTERPARTS.get(type(module))
    return ours and ours(**{key: value for key, value in vars(module).items() if key in SETTINGS})
