"""How the arguments of functions and constructors are bound and checked, and what errors about them say."""

from __future__ import annotations

import difflib
import inspect
from inspect import Parameter
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = [
    "ACCEPTED",
    "AROUND",
    "DTYPES",
    "GATED",
    "OF_MODULES",
    "OPTIONS",
    "Arguments",
    "as_number",
    "by_name_hint",
    "check_tensor",
    "is_stand_in",
    "shown",
    "signature_of",
    "stand_ins",
    "what_it_is",
]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PLAIN = (Tensor, float, int, type(None))  # what almost all arguments are: none of these stands for a tensor
ACCEPTED = "a dense float32, float64, float16 or bfloat16 tensor"
OPTIONS = {"save": None, "fast_math": False}  # what every constructor takes beside torch.nn's arguments
AROUND = {"bias": None, "dropout": 0.0, "residual": None, "channel_dim": -1, "seed": None}  # and what functions take beside
GATED = ("layout", "gate", "rounding")  # what gated activations take in place of those; the defaults are the activation's
OF_MODULES = {name: AROUND[name] for name in ("bias", "dropout", "channel_dim")} | {"device": None, "dtype": None}


class Described(Protocol):
    """The fields of an activation's record that error messages about arguments use."""

    name: str
    params: tuple[tuple[str, float], ...]
    gating: object

    @property
    def beside(self) -> dict[str, Any]:
        """Names and defaults of the fused operands that the function takes, such as ``bias``."""


class Arguments:
    """What a function or a constructor takes, and how what it is given binds to that."""

    def __init__(self, called: str, signature: inspect.Signature, before: str = "") -> None:
        """``called`` is what was called, which errors begin with, and ``before`` the arguments that were taken out already."""
        self.called, self.signature, self.before = called, signature, before
        self.defaults = {name: each.default for name, each in signature.parameters.items()}
        self.places = [n for n, each in signature.parameters.items() if each.kind is not Parameter.KEYWORD_ONLY]
        self.needed = [name for name, default in self.defaults.items() if default is Parameter.empty]

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, defaults filled in: what ``inspect.Signature.bind`` gives, in a tenth of the time.

        Raises:
            TypeError: they do not fit.
        """
        given = dict(zip(self.places, args, strict=False)) | kwargs
        known = len(given) == len(args) + len(kwargs) and all([name in self.defaults for name in given])
        if known and all([name in given for name in self.needed]):  # not <=, which torch.compile of torch 2.11 does not know
            return self.defaults | given
        try:
            return self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:  # which says what does not fit
            unknown = next((name for name in kwargs if name not in self.defaults), "")
            near = difflib.get_close_matches(unknown, self.defaults, n=1)
            hint = f"; did you mean {near[0]}=?" if near else ""
            taken = ", ".join(filter(None, [self.before, str(self.signature)[1:]]))
            raise TypeError(f"{self.called}({taken}: {error}{hint}") from None


def signature_of(positional: dict[str, Any], options: dict[str, Any]) -> inspect.Signature:
    """Of arguments with their defaults, and options, which are given by name alone."""
    first = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default) for name, default in positional.items()]
    return inspect.Signature([*first, *(Parameter(n, Parameter.KEYWORD_ONLY, default=d) for n, d in options.items())])


def as_number(activation: Described, name: str, value: Any) -> float:
    """A parameter as a float: Python's numbers and NumPy's, but no bools, which PyTorch would take for 0 and 1.

    Raises:
        TypeError: it is no number.
        ValueError: it is an integer that no float can hold.
    """
    if torch.compiler.is_compiling() and type(value).__name__ == "ndarray" and value.ndim == 0:
        value = value.item()  # torch.compile traces NumPy's scalars as arrays without dimensions
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{activation.name}: {name} must be a number, got {shown(value)}{by_name_hint(activation, value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{activation.name}: {name} must fit into a float, got {value!r}") from None


def is_stand_in(x: object) -> bool:
    """Whether ``x`` stands for a tensor that is not there yet, as torch.fx has it, and takes calls of PyTorch's functions."""
    return bool(stand_ins(x))


def stand_ins(*values: object) -> tuple[Any, ...]:
    """Those of values that stand for tensors so."""
    return tuple([each for each in values if not isinstance(each, PLAIN) and hasattr(type(each), "__torch_function__")])


def check_tensor(activation: Described, x: object, what: str = "expected") -> None:
    """Checks that ``x`` is a tensor that kernels take.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"{activation.name}: {what} {ACCEPTED}, got {what_it_is(x)}{_remedy(activation, x)}")


def _remedy(activation: Described, x: object) -> str:
    """What to write instead of what is no tensor that kernels take, where that is known; "" elsewhere."""
    if isinstance(x, Tensor):
        converts = x.layout is torch.strided and not (x.is_nested or x.is_complex() or x.is_quantized)
        return "; convert it, as with .float()" if converts else ""
    if isinstance(x, Real) and activation.gating:
        return f"; give numbers by name, as {activation.params[0][0] if activation.params else 'dim'}="
    return "; convert it with torch.as_tensor" if isinstance(x, Real | list | tuple) or hasattr(x, "__array__") else ""


def by_name_hint(activation: Described, value: object) -> str:
    """How to give a tensor that was given in place of a number or an option, where that is known; "" elsewhere."""
    names = [f"{name}=" for name in ("bias", "residual") if name in activation.beside]
    return f"; give a tensor by name, as {' or '.join(names)}" if isinstance(value, Tensor) and names else ""


def shown(value: object) -> str:
    """What was given in place of a number or a word, for an error: a tensor by its type, not by its values."""
    return what_it_is(value) if isinstance(value, Tensor) and value.numel() != 1 else repr(value)


def what_it_is(x: object) -> str:
    """What was given in place of a tensor that an activation takes, for an error."""
    if not isinstance(x, Tensor):
        return "None" if x is None else _with_article(type(x).__name__)
    if x.is_nested and x.layout is torch.strided:
        return f"a nested {str(x.dtype).removeprefix('torch.')} tensor"
    layout = "" if x.layout is torch.strided else f"{str(x.layout).removeprefix('torch.')} "
    return _with_article(f"{layout}{str(x.dtype).removeprefix('torch.')} tensor")


def _with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeio' else 'a'} {words}"
