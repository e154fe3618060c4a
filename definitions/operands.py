"""Declarations of a definition's operands: names, defaults of parameters, channel and row operands."""

from __future__ import annotations

import inspect
import keyword
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from numbers import Integral, Real
from typing import NamedTuple, TypeVar

from .. import registry
from ..records import Channel, Row
from ..records.arguments import OPTIONS, meant_hint, shown
from .functions import FUNCTIONS
from .helpers import HELPERS
from .syntax import CONSTANTS, DROPOUT

__all__ = [
    "Declared",
    "check_element",
    "check_operands",
    "declared",
    "in_header",
    "read_default",
    "read_header",
    "reserves_arguments",
]

# Names with a meaning in C++ or in kernel files, which no parameter can have.
CPP_WORDS = frozenset(
    """alignas alignof asm auto bool break case catch char class const constexpr continue default delete do double dynamic_cast
    else enum explicit extern false float for friend goto if inline int long mutable namespace new noexcept nullptr operator
    private protected public register requires return short signed sizeof static struct switch template this throw true try
    typedef typename union unsigned using virtual void volatile while activation forward backward backward_from_output
    backward_from_bit keeps jitact std T ELEMENTWISE x y dy""".split()  # noqa: SIM905
)
F = TypeVar("F", bound=Callable)
IN_PYTHON = ("torch", "math", "float", *(helper.__name__ for helper in HELPERS.values()))


class Declared(NamedTuple):
    """The declared operands: parameters with their defaults, and channel and row operands (``beside``)."""

    params: dict[str, float]
    beside: dict[str, Channel | Row]

    @property
    def channels(self) -> dict[str, Channel]:
        """The channel operands."""
        return {name: operand for name, operand in self.beside.items() if isinstance(operand, Channel)}


_arguments: set[str] = set()


def reserves_arguments(function: F) -> F:
    """Decorator of :func:`define`: reserves the names of its arguments, so that no parameter can have one of them."""
    _arguments.update(inspect.signature(function).parameters.keys() - {"params"})
    return function


@cache
def _reserved_parameters() -> dict[str, str]:
    """The names that no parameter can have, and why."""
    relu = registry.class_of("relu")
    return {
        **dict.fromkeys(dir(relu()), "modules have something else of that name"),
        **dict.fromkeys(["self", "inplace", *OPTIONS], "it is an argument of every activation"),
        **dict.fromkeys(["device", "dtype"], "it is an argument of modules with a bias or channel operands"),
        **dict.fromkeys(_arguments, "it is an argument of define"),
        **dict.fromkeys([*FUNCTIONS, DROPOUT, *CONSTANTS], "expressions have something else of that name"),
        **dict.fromkeys(IN_PYTHON, "PyTorch's form needs the name"),
        **dict.fromkeys(CPP_WORDS, "kernel files have something else of that name"),
    }


def declared(name: str, given: Mapping[str, object]) -> Declared:
    """Checks the declarations of an activation's parameters, channel and row operands; numbers become int or float.

    Raises:
        ValueError: a name is reserved or not an identifier, or a number is too large for a float.
        TypeError: a default is neither a number nor a Channel nor a Row, or a Channel's field has the wrong type.
    """
    beside = {key: value for key, value in given.items() if isinstance(value, (Channel, Row))}
    reserved = _reserved_parameters()
    for param in given:
        if isinstance(given[param], Row):  # an argument of calls, so the rules for tensors hold
            check_element(name, param)
            continue
        why = _no_identifier(param) or reserved.get(param)
        if why:
            kind = "channel operand" if param in beside else "parameter"
            raise ValueError(f"{name}: a {kind} cannot be called {param!r}: {why}")
    beside = {key: _channel(name, key, each) if isinstance(each, Channel) else each for key, each in beside.items()}
    numbers = {key: value for key, value in given.items() if key not in beside}
    return Declared({k: _number(name, f"the default of {k}", v, meant_hint(k, _arguments)) for k, v in numbers.items()}, beside)


def _no_identifier(name: object) -> str:
    usable = isinstance(name, str) and name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
    return "" if usable and "__" not in name else "it must be an identifier, such as alpha"


def _number(name: str, what: str, value: object, hint: str = "") -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        if value is Channel or value is Row:
            hint = f"; write jitact.{value.__name__}()"
        elif hasattr(value, "dtype"):
            hint = "; a tensor that is learned is declared by jitact.Channel()"
        raise TypeError(f"{name}: {what} must be a number, got {shown(value)}{hint}")
    try:
        return int(value) if isinstance(value, Integral) and float(value) == int(value) else float(value)
    except OverflowError:
        raise ValueError(f"{name}: {what} is too large for a number") from None


def _channel(name: str, operand: str, channel: Channel) -> Channel:
    if isinstance(channel.dim, bool) or not isinstance(channel.dim, Integral):
        raise TypeError(f"{name}: the dim of {operand} must be a whole number, such as -1, got {channel.dim!r}")
    if not isinstance(channel.one, bool):
        raise TypeError(f"{name}: one of {operand} must be True or False, got {channel.one!r}")
    return Channel(float(_number(name, f"the init of {operand}", channel.init)), int(channel.dim), channel.one)


def check_operands(name: str, operands: object, given: Declared) -> tuple[str, ...]:
    """Checks the tensors listed in ``operands=``, and returns them in order.

    Raises:
        TypeError: ``operands`` is not a list of names.
        ValueError: the list is empty, or a name is invalid, a parameter's, or listed twice.
    """
    if isinstance(operands, str) or not isinstance(operands, Iterable):
        raise TypeError(f"{name}: operands= lists the tensors, such as operands=('gate', 'up'), got {operands!r}")
    operands = tuple(operands)
    for operand in operands:
        if operand in given.params:
            raise ValueError(f"{name}: operands= lists tensors, and {operand} is given as a parameter")
        check_element(name, operand)
    twice = [operand for operand in dict.fromkeys(operands) if operands.count(operand) > 1]
    if twice or not operands:
        raise ValueError(f"{name}: operands= lists {'nothing' if not operands else f'{twice[0]} twice'}")
    return operands


def check_element(name: str, element: object) -> None:
    """Checks the name of a tensor.

    Raises:
        ValueError: no tensor can have that name; the message says why.
    """
    why = _no_identifier(element)
    if element in ("self", "inplace", "training", *OPTIONS):
        why = "it is an argument of every activation"
    elif element in IN_PYTHON or element in CONSTANTS:
        why = "PyTorch's form needs the name"
    elif element == "dy":
        why = "it is the gradient that comes in"
    if why:
        raise ValueError(f"{name}: a tensor cannot be called {element!r}: {why}")


# Headers of kernel files.

_OUTSIDE = re.compile(r",(?![^()]*\))")  # commas outside of parentheses
_CHANNEL = re.compile(r"(?:jitact\.)?Channel\((.*)\)")
_FIELDS: dict[str, Callable[[str], object]] = {
    "init": float,
    "dim": int,
    "one": lambda text: {"True": True, "False": False}[text],
}


def in_header(given: Declared) -> str:
    """Parameters and channel operands as written in a header: ``a = 1.0, w = Channel(init=1.0, dim=-1, one=False)``.

    Row operands are left out: their type in the file is enough.
    """
    return ", ".join(f"{name} = {value!r}" for name, value in (given.params | given.channels).items())


def read_header(text: str) -> dict[str, float | Channel | Row]:
    """Parses what :func:`in_header` or a user wrote.

    Raises:
        ValueError: an item is malformed, or a name occurs twice.
    """
    found: dict[str, float | Channel | Row] = {}
    for item in filter(None, map(str.strip, _OUTSIDE.split(text))):
        name, _, value = map(str.strip, item.partition("="))
        if name in found:
            raise ValueError(f"the file's header has parameter {name} twice")
        try:
            found[name] = read_default(value)
        except ValueError:
            raise ValueError(
                f"{item!r} in the file's header is no parameter with a default, such as a = 1.0, "
                "and no operand such as w = Channel(init=1.0, dim=-1, one=False) or w = Row()"
            ) from None
    return found


def read_default(text: str) -> float | Channel | Row:
    """Parses a parameter's default, a number, or the declaration of an operand, such as ``Channel(init=0.0)`` or ``Row()``.

    Raises:
        ValueError: it is none of these.
    """
    if text in ("Row()", "jitact.Row()"):
        return Row()
    channel = _CHANNEL.fullmatch(text)
    if not channel:
        value = float(text)
        if math.isinf(value) and "inf" not in text.lower():
            raise ValueError(f"{text} is no finite number; the largest is 1.79e308")
        return value
    fields: dict[str, object] = {}
    try:
        for place, item in enumerate(filter(None, map(str.strip, channel[1].split(",")))):
            name, equals, value = map(str.strip, item.rpartition("="))
            name = name if equals else Channel._fields[place]
            fields[name] = _FIELDS[name](value)
    except (KeyError, IndexError):
        raise ValueError(f"{text!r} is no Channel(init=1.0, dim=-1, one=False)") from None
    return Channel(**fields)
