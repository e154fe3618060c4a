"""The functions as modules, which are drop-in replacements of those of ``torch.nn``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import replace
from inspect import Parameter
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..measuring.inputs import KernelBenchForm
from ..modules import ActivationModule, StandingIn, normalise, remove_attributes, remove_placeholders, users_rows, with_types
from ..records.arguments import Arguments, as_number, signature_of
from . import functions
from .records import TABLE, Beside, RowActivation

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
    "record_of_rows",
]


class RowModule(StandingIn):
    """Base class of the modules.

    Attributes:
        activation: the record.
        function: the function that a module calls, as ``jitact.softmax``.
        Model: PyTorch's module class, or the same activation written with PyTorch's operators.
    """

    activation: RowActivation
    function: Callable[..., Tensor]
    Model: type[nn.Module]


class OfAnyDimension(KernelBenchForm, RowModule):
    """Base class of those with a dimension, in KernelBench's form: this class is ``ModelNew``, PyTorch's ``Model``."""

    @classmethod
    def get_init_inputs(cls) -> list:
        """Arguments for the constructor: the dimension, which is 1 in KernelBench."""
        return [1]


class Softmax(OfAnyDimension, nn.Softmax):
    """``torch.nn.Softmax`` by :func:`jitact.softmax`."""

    Model, activation, function = nn.Softmax, TABLE["softmax"], staticmethod(functions.softmax)

    @with_types
    def forward(self, input: Tensor) -> Tensor:
        """Softmax along ``dim``."""
        return functions.softmax(input, self.dim)


class LogSoftmax(OfAnyDimension, nn.LogSoftmax):
    """``torch.nn.LogSoftmax`` by :func:`jitact.log_softmax`."""

    Model, activation, function = nn.LogSoftmax, TABLE["log_softmax"], staticmethod(functions.log_softmax)

    @with_types
    def forward(self, input: Tensor) -> Tensor:
        """The logarithm of softmax along ``dim``."""
        return functions.log_softmax(input, self.dim)


class Softmin(OfAnyDimension, nn.Softmin):
    """``torch.nn.Softmin`` by :func:`jitact.softmin`."""

    Model, activation, function = nn.Softmin, TABLE["softmin"], staticmethod(functions.softmin)

    @with_types
    def forward(self, input: Tensor) -> Tensor:
        """Softmin along ``dim``."""
        return functions.softmin(input, self.dim)


class Softmax2d(RowModule, nn.Softmax2d):
    """``torch.nn.Softmax2d`` by :func:`jitact.softmax`."""

    Model, activation, function = nn.Softmax2d, TABLE["softmax"], staticmethod(functions.softmax)

    @with_types
    def forward(self, input: Tensor) -> Tensor:
        """Softmax along the channels of images.

        Raises:
            ValueError: input is neither one image nor a batch of them.
        """
        if isinstance(input, Tensor) and input.dim() not in (3, 4):
            raise ValueError(f"Softmax2d: expected 3 or 4 dimensions, got {input.dim()}")
        return functions.softmax(input, -3)


SETTINGS = ("dim",)  # the attributes of PyTorch's modules, if they have any
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
    """Base class of those that users define."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the dimension of the rows, numbers, and what is saved for backward."""
        super().__init__()
        given = Arguments(self.activation.title, type(self).__signature__).bind(args, kwargs)
        self.dim, self.save = given["dim"], given["save"] or self.activation.saves[0]
        if self.save not in self.activation.saves:
            known = " or ".join(map(repr, self.activation.saves))
            raise ValueError(f"{self.activation.name}: save must be {known}, got {self.save!r}")
        for name, _ in self.activation.params:
            setattr(self, name, as_number(self.activation, name, given[name]))

    @with_types
    def forward(self, input: Tensor, *rows: Tensor) -> Tensor:
        """The activation along ``dim``; ``rows`` are the operands with a value for each row."""
        if type(rows) is not tuple:  # torch.fx traces this module as the root: `rows` is a proxy
            remove_placeholders(rows)
            make = rows.tracer.create_proxy
            rows = tuple([make("placeholder", name, (), {}) for name in self.activation.rows])
        if len(rows) > len(self.activation.rows):  # else one would be taken for dim
            wanted = ", ".join(["x", *self.activation.rows])
            raise TypeError(f"{self.activation.name}: the module takes {wanted}; got {1 + len(rows)} tensors")
        numbers = {name: getattr(self, name) for name, _ in self.activation.params}
        return type(self).function(input, *rows, dim=self.dim, save=self.save, **numbers)

    def extra_repr(self) -> str:
        """The dimension, numbers, and what backward keeps if that was chosen."""
        told = {"dim": self.dim} | {name: getattr(self, name) for name, _ in self.activation.params}
        told |= {"save": self.save} if self.save != self.activation.saves[0] else {}
        return ", ".join(f"{name}={value!r}" for name, value in told.items())

    @classmethod
    def _widths(cls, dim: int) -> list[int]:
        return [dim, *(1 for _ in cls.activation.rows)]

    def __reduce__(self) -> tuple:
        """By name and fingerprint, as a name may be redefined."""
        return _revive, (self.activation.name, self.activation.fingerprint), self.__dict__

    __deepcopy__ = ActivationModule.__deepcopy__  # keeps the class, even if its name has been redefined


# The classes of definitions that are still referenced, by name and fingerprint, as a name may be redefined.
_made: weakref.WeakValueDictionary[tuple[str, str], type[RowModule]] = weakref.WeakValueDictionary()


def _revive(name: str, fingerprint: str) -> RowModule:
    """An empty module for unpickling to fill.

    Raises:
        LookupError: it is not defined in this process, or differently.
    """
    cls = _made.get((name, fingerprint))
    if cls is None:
        is_other = normalise(name) in users_rows
        what = "is another here than where this was saved" if is_other else "is not defined in this process"
        raise LookupError(f"the activation {name!r} {what}; define it as it was before loading a module of it")
    return cls.__new__(cls)


def make_module(record: RowActivation) -> type[RowModule]:
    """Makes and registers the module class, and with it the function, of a user's definition."""
    if record.title in globals():  # taken: pickles look classes up here
        record = replace(record, title=f"{record.title}_")
    numbers = dict(record.params)
    tensors = dict.fromkeys(["x", *record.rows], Parameter.empty)
    options = numbers | {"scale": 1.0, "mask": None, "save": record.saves[0]}
    arguments = Arguments(record.name, signature_of(tensors | {"dim": -1, "dtype": None}, options))

    def function(*args: Any, **kwargs: Any) -> Tensor:
        given = arguments.bind(args, kwargs)
        beside = Beside(tuple([given[name] for name in record.rows]), tuple([given[name] for name in numbers]))
        usual = (given[name] for name in ("x", "dim", "dtype", "scale", "mask", "save"))
        return functions.run(record, function, *usual, beside)

    def init(self: nn.Module, dim: int = -1, **given: float) -> None:
        nn.Module.__init__(self)
        if unknown := ", ".join(given.keys() - numbers.keys()):
            raise TypeError(f"{record.title}.Model takes dim{''.join(f', {name}' for name in numbers)}, not {unknown}")
        self.dim, self.numbers = dim, tuple((numbers | given).values())

    def forward(self: nn.Module, x: Tensor, *rows: Tensor) -> Tensor:
        shaped = [functions.shaped(record, *each, x, self.dim) for each in zip(record.rows, rows, strict=True)]
        return record.in_pytorch(x, self.dim, Beside(tuple(shaped), self.numbers))

    function.__signature__ = arguments.signature
    function.__name__ = function.__qualname__ = record.name
    function.__module__ = "jitact"  # where pickles and torch.fx look for it
    beside = f" {', '.join(record.rows)}: a value for each row." if record.rows else ""
    function.__doc__ = f"{record.name}(t) = {record.formula} along ``dim``.{beside} All else is as in :func:`jitact.softmax`."
    named = {"__module__": __name__, "__doc__": f"{record.formula}, in PyTorch."}
    members = {"__init__": init, "forward": forward, "__qualname__": f"{record.title}.Model", **named}
    model = type(record.title, (nn.Module,), members)
    members = {"activation": record, "function": staticmethod(function), "Model": model, **named}
    members["__signature__"] = signature_of({"dim": -1}, numbers | {"save": None})
    cls = type(record.title, (OfDefinition,), members | {"__doc__": f"{record.name}(t) = {record.formula} along ``dim``."})
    function.ModelNew = cls  # for get(), which may be given the function
    users_rows[normalise(record.name)] = _made[record.name, record.fingerprint] = cls
    remove_attributes()
    return cls


def __getattr__(title: str) -> type[RowModule]:
    """The class of a user's definition by its title, for pickles of the class itself or of its ``Model``."""
    for cls in list(users_rows.values()):
        if cls.__name__ == title:
            return cls
    raise AttributeError(f"module {__name__!r} has no attribute {title!r}")


def forget(name: str) -> None:
    """Unregisters a user's definition, if there is one of that name. Existing modules keep working."""
    users_rows.pop(normalise(name), None)
    remove_attributes()


def names() -> list[str]:
    """The names of the functions: the library's first, then users'."""
    return [*TABLE, *(cls.activation.name for cls in list(users_rows.values()))]


def class_of_rows(activation: object) -> type[RowModule] | None:
    """The library's class for a name in any spelling, a class, a module or a function; None if it is not of rows."""
    if isinstance(activation, str):
        return NAMED.get(normalise(activation)) or users_rows.get(normalise(activation))
    cls = type(activation) if isinstance(activation, nn.Module) else activation
    if isinstance(cls, type):
        return cls if issubclass(cls, RowModule) else COUNTERPARTS.get(cls)
    if not callable(cls) or not isinstance(cls, Hashable):
        return None
    own = vars(cls).get("ModelNew") if isinstance(cls, FunctionType) else None
    return own if isinstance(own, type) and issubclass(own, RowModule) else FUNCTIONS.get(cls)


def record_of_rows(activation: object) -> RowActivation | None:
    """The record of :func:`class_of_rows`, with the numbers of a module as defaults; None if it is not of rows."""
    cls = class_of_rows(activation)
    if cls is None or not isinstance(activation, OfDefinition):
        return cls and cls.activation
    return replace(cls.activation, params=tuple((name, getattr(activation, name)) for name, _ in cls.activation.params))


def counterpart(module: nn.Module) -> RowModule | None:
    """The library's module for one of PyTorch's, with its settings; None if there is none."""
    ours = COUNTERPARTS.get(type(module))
    return ours and ours(**{key: value for key, value in vars(module).items() if key in SETTINGS})
