"""How the arguments of functions and constructors are bound and checked, and what errors about them say."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection
from inspect import Parameter
from numbers import Integral, Real
from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = [
    "ACCEPTED",
    "AROUND",
    "DTYPES",
    "GATED",
    "OF_MODULES",
    "OPTIONS",
    "Arguments",
    "as_index",
    "as_number",
    "as_tensor_hint",
    "by_name_hint",
    "check_switch",
    "check_tensor",
    "is_sharded",
    "is_stand_in",
    "meant_hint",
    "shown",
    "signature_of",
    "stand_ins",
    "what_it_is",
]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PLAIN = (Tensor, float, int, type(None))  # the types of almost all arguments; none of them is a proxy of a tensor
ACCEPTED = "a dense float32, float64, float16 or bfloat16 tensor"
OPTIONS = {"save": None, "fast_math": False}  # every constructor takes these in addition to torch.nn's arguments
AROUND = {"bias": None, "dropout": 0.0, "residual": None, "channel_dim": -1, "seed": None}  # functions take these too
GATED = ("layout", "gate", "rounding")  # gated activations take these in place of AROUND; defaults differ by activation
OF_MODULES = {name: AROUND[name] for name in ("bias", "dropout", "channel_dim")} | {"device": None, "dtype": None}
ELSEWHERE = {"axis": "dim", "p": "dropout"}  # names of arguments in NumPy and in torch.nn


class Described(Protocol):
    """The fields of an activation's record that error messages about arguments use."""

    name: str
    params: tuple[tuple[str, float], ...]
    gating: object

    @property
    def beside(self) -> dict[str, Any]:
        """Names and defaults of the fused operands that the function takes, such as ``bias``."""


class Arguments:
    """The signature of a function or a constructor, and the binding of arguments to it."""

    def __init__(self, called: str, signature: inspect.Signature, before: str = "") -> None:
        """``called`` is the callable's name for error messages; ``before`` names the arguments that precede ``signature``."""
        self.called, self.signature, self.before = called, signature, before
        self.defaults = {name: each.default for name, each in signature.parameters.items()}
        self.places = [n for n, each in signature.parameters.items() if each.kind is not Parameter.KEYWORD_ONLY]
        self.needed = [name for name, default in self.defaults.items() if default is Parameter.empty]

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, with defaults filled in; takes a tenth of the time of ``inspect.Signature.bind``.

        Raises:
            TypeError: the arguments do not match the signature.
        """
        given = dict(zip(self.places, args, strict=False)) | kwargs
        known = len(given) == len(args) + len(kwargs) and all([name in self.defaults for name in given])
        if known and all([name in given for name in self.needed]):  # not <=, which torch.compile in torch 2.11 cannot trace
            return self.defaults | given
        try:
            return self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:  # its message says which argument is wrong
            why, unknown = str(error), next((name for name in kwargs if name not in self.defaults), "")
            if unknown:  # Python's names what is missing first, also where that is misspelled
                hint = "" if torch.compiler.is_compiling() else meant_hint(unknown, self.defaults)  # compiling fails in difflib
                why = f"got an unexpected keyword argument {unknown!r}{hint}"
            taken = ", ".join(filter(None, [self.before, str(self.signature)[1:]]))
            raise TypeError(f"{self.called}({taken}: {why}") from None


def meant_hint(unknown: str, known: Collection[str]) -> str:
    """A hint for an error message: the argument that an unknown name stands for or is near to; "" if there is none."""
    near = [ELSEWHERE[unknown]] if ELSEWHERE.get(unknown) in known else difflib.get_close_matches(unknown, known, n=1)
    return f"; did you mean {near[0]}=?" if near else ""


def signature_of(positional: dict[str, Any], options: dict[str, Any]) -> inspect.Signature:
    """A signature of positional arguments and keyword-only options, both given by name with their defaults."""
    first = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default) for name, default in positional.items()]
    return inspect.Signature([*first, *(Parameter(n, Parameter.KEYWORD_ONLY, default=d) for n, d in options.items())])


def as_number(activation: Described, name: str, value: Any) -> float:
    """A parameter as a float, from Python's or NumPy's numbers. Bools are refused; PyTorch would take them for 0 and 1.

    Raises:
        TypeError: it is not a number.
        ValueError: it is an integer too large for a float.
    """
    if torch.compiler.is_compiling() and type(value).__name__ == "ndarray" and value.ndim == 0:
        value = value.item()  # torch.compile traces NumPy's scalars as 0-dimensional arrays
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{activation.name}: {name} must be a number, got {shown(value)}{by_name_hint(activation, value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{activation.name}: {name} must fit into a float, got {value!r}") from None


def as_index(activation: Described, name: str, value: Any) -> int:
    """An option that is an integer, of Python or NumPy.

    Raises:
        TypeError: it is not an integer.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{activation.name}: {name} must be an int, got {shown(value)}")
    return int(value)


def check_switch(activation: Described, option: str, value: object) -> None:
    """Checks an option that is on or off.

    Raises:
        TypeError: it is not a bool.
    """
    if type(value) is not bool:
        hint = by_name_hint(activation, value)
        raise TypeError(f"{activation.name}: {option} must be True or False, got {shown(value)}{hint}")


def is_stand_in(x: object) -> bool:
    """Whether ``x`` is a proxy of a tensor with ``__torch_function__``, such as a ``torch.fx.Proxy`` while tracing."""
    return bool(stand_ins(x))


def is_sharded(value: object) -> bool:
    """Whether it is a DTensor. Does not import torch.distributed.tensor, which takes longer than importing jitact."""
    if type(value) in (Tensor, nn.Parameter) or not isinstance(value, Tensor):
        return False
    return getattr(value, "device_mesh", None) is not None


def stand_ins(*values: object) -> tuple[Any, ...]:
    """The values that are proxies of tensors."""
    return tuple([each for each in values if not isinstance(each, PLAIN) and hasattr(type(each), "__torch_function__")])


def check_tensor(activation: Described, x: object, what: str = "expected") -> None:
    """Checks that ``x`` is a dense tensor of one of :data:`DTYPES`.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"{activation.name}: {what} {ACCEPTED}, got {what_it_is(x)}{_remedy(activation, x)}")


def _remedy(activation: Described, x: object) -> str:
    """A hint for an error message: what to write instead of ``x``; "" if that is not known."""
    if isinstance(x, Tensor):
        if x.is_nested:
            return "; make it with layout=torch.jagged"
        converts = x.layout is torch.strided and not (x.is_complex() or x.is_quantized)
        return "; convert it, as with .float()" if converts else ""
    if isinstance(x, Real) and activation.gating:
        return f"; give numbers by name, as {activation.params[0][0] if activation.params else 'dim'}="
    return as_tensor_hint(x)


def as_tensor_hint(x: object) -> str:
    """A hint for an error message about something that is no tensor: how to make one of it; "" if that is not known."""
    return "; convert it with torch.as_tensor" if isinstance(x, Real | list | tuple) or hasattr(x, "__array__") else ""


def by_name_hint(activation: Described, value: object) -> str:
    """A hint for an error message: the names by which to give a tensor that was given as a number or an option; else ""."""
    names = [f"{name}=" for name in ("bias", "residual") if name in activation.beside]
    return f"; give a tensor by name, as {' or '.join(names)}" if isinstance(value, Tensor) and names else ""


def shown(value: object) -> str:
    """A value for an error message: its repr, or the type if it is a tensor of several values."""
    return what_it_is(value) if isinstance(value, Tensor) and value.numel() != 1 else repr(value)


def what_it_is(x: object) -> str:
    """The type of ``x`` for an error message; of a tensor, also its layout and dtype."""
    if not isinstance(x, Tensor):
        return "None" if x is None else _with_article(type(x).__name__)
    if x.is_nested and x.layout is torch.strided:
        return f"a nested {str(x.dtype).removeprefix('torch.')} tensor"
    layout = "" if x.layout is torch.strided else f"{str(x.layout).removeprefix('torch.')} "
    return _with_article(f"{layout}{str(x.dtype).removeprefix('torch.')} tensor")


def _with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeio' else 'a'} {words}"
