"""What a kernel file says: what the arguments of its functions are, by their types, and which functions it has.

The one reader of kernel files in Python. In C++, ``signature.cuh`` reads the same from the compiled types.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

__all__ = ["ROLES", "Function", "Operand", "Signature", "read_signature"]

ROLES = {
    "T": "element",
    "Number<T>": "number",
    "Channel<T>": "channel",
    "Row<T>": "row",
    "Random<T>": "random",
}
"""What an argument is, by its type; ``operands.cuh`` tells what each means."""


class Operand(NamedTuple):
    """An argument of ``forward``.

    Attributes:
        name: as the file has it.
        role: one of the values of :data:`ROLES`.
        type: as the file has it; a number may be a plain ``T``, if it is declared elsewhere to be one.
    """

    name: str
    role: str
    type: str


class Function(NamedTuple):
    """A function of a kernel file, as it is written.

    Attributes:
        arguments: names, "" for those that have none.
        body: what it returns, where that is all it does.
        line: where it stands.
    """

    arguments: tuple[str, ...]
    body: str | None
    line: int


class Signature(NamedTuple):
    """A kernel file's declaration.

    Attributes:
        operands: the arguments of ``forward``, in its order.
        functions: the functions that the loops call, by name.
        gradients: how many gradients ``backward`` gives: of the first so many operands that have one.
    """

    operands: tuple[Operand, ...]
    functions: dict[str, Function]
    gradients: int

    def of(self, *roles: str) -> tuple[str, ...]:
        """The names of the operands of some roles."""
        return tuple(operand.name for operand in self.operands if operand.role in roles)

    @property
    def differentiable(self) -> tuple[Operand, ...]:
        """The operands that have gradients, in the order in which backward gives them."""
        return tuple(o for o in self.operands if o.role in ("element", "channel", "row"))[: self.gradients]

    @property
    def tensors(self) -> tuple[str, ...]:
        """The operands that are tensors, as the operators take them: elements first."""
        return self.of("element") + self.of("channel", "row")

    @property
    def saves(self) -> tuple[str, ...]:
        """What backward can keep, in the order in which it is preferred: the fewest bytes of those that are exact first."""
        bit = ("bit",) if {"keeps", "backward_from_bit"} <= self.functions.keys() else ()
        output = ("output",) if "backward_from_output" in self.functions else ()
        return (*bit, "input", *output)

    @property
    def unmarked_numbers(self) -> int:
        """How many numbers are plain ``T`` in the file."""
        return sum(operand.role == "number" and operand.type == "T" for operand in self.operands)


FUNCTION = re.compile(r"\bELEMENTWISE\s+(T|bool|void|Many<T, *(\d+)>)\s+(\w+)\s*\(([^()]*)\)\s*(?:\{\s*return\s+([^;{}]*);\s*\})?")
ARGUMENT = re.compile(r"\s*(?:const\s+)?(\w+(?:<T>)?)\s*&?\s*(\w*)\s*")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)

# What the loops' functions return and take before the operands, and which operands follow.
_FORMS = {
    "forward": ("T", (), "all"),
    "backward": ("T", ("T",), "all"),
    "backward_from_output": ("T", ("T", "T"), "others"),
    "keeps": ("bool", (), "all"),
    "backward_from_bit": ("T", ("T", "bool"), "others"),
}


@lru_cache(maxsize=256)
def read_signature(text: str, numbers: Collection[str] = ()) -> Signature:
    """Reads a kernel file.

    Args:
        text: of the file.
        numbers: names of last arguments that are numbers without being marked ``Number<T>``.

    Raises:
        ValueError: a function is not declared as ``elementwise.cuh`` says; the message names the line.
    """
    text = COMMENT.sub(lambda comment: re.sub(r"[^\n]", " ", comment[0]), text)
    functions: dict[str, Function] = {}
    types: dict[str, tuple[str, tuple[str, ...]]] = {}
    gradients = 0
    for match in FUNCTION.finditer(text):
        returns, many, name, declared, body = match.groups()
        if name not in _FORMS:
            continue
        line = text.count("\n", 0, match.start()) + 1
        arguments = [ARGUMENT.fullmatch(argument) for argument in declared.split(",")]
        if None in arguments:
            raise ValueError(f"line {line}: {name}'s arguments must be {_known_types()}, each with a name or none; got ({declared})")
        if name == "backward":
            gradients = int(many or 1)
        expected = _FORMS[name][0]
        if returns != expected and not (many and name == "backward"):
            raise ValueError(f"line {line}: {name} must return {expected}, got {returns}")
        body = None if name in functions else body  # two, one for each branch of an #if: no telling which
        functions[name] = Function(tuple(a[2] for a in arguments), body, line)
        types[name] = line, tuple(a[1] for a in arguments)
    if "forward" not in functions:
        raise ValueError("the kernel file defines no function ELEMENTWISE T forward(T x)")
    operands = _operands(functions["forward"], types["forward"][1], tuple(numbers))
    for name, (line, given) in types.items():
        _check_form(name, line, given, functions[name], operands)
    has_gradient = sum(operand.role in ("element", "channel", "row") for operand in operands)
    if gradients > has_gradient:
        raise ValueError(f"line {functions['backward'].line}: backward gives {gradients} gradients, forward has {has_gradient} operands")
    if not gradients:
        gradients = 1 if "backward_from_bit" in functions else has_gradient
    return Signature(operands, functions, gradients)


def _known_types() -> str:
    return ", ".join(ROLES)


def _operands(forward: Function, types: tuple[str, ...], numbers: tuple[str, ...]) -> tuple[Operand, ...]:
    operands = []
    for name, type_ in zip(forward.arguments, types, strict=True):
        if type_ not in ROLES or not name:
            raise ValueError(f"line {forward.line}: an argument of forward must be {_known_types()}, and have a name; got {type_} {name}")
        operands.append(Operand(name, "number" if type_ == "T" and name in numbers else ROLES[type_], type_))
    if operands[0].role != "element":
        raise ValueError(f"line {forward.line}: the first argument of forward must be a T, an element of the input")
    return tuple(operands)


def _check_form(name: str, line: int, given: tuple[str, ...], function: Function, operands: tuple[Operand, ...]) -> None:
    """Checks that a function takes what belongs before the operands, and then those, under their names or none.

    Raises:
        ValueError: it does not.
    """
    _, first, follow = _FORMS[name]
    rest = [o for o in operands if follow == "all" or o.role != "element"]
    expected = (*first, *(operand.type for operand in rest))
    names = function.arguments[len(first) :]
    named = all(name in ("", operand.name) for name, operand in zip(names, rest, strict=False) if operand.role != "element")
    if given != expected or not named:
        declared = ", ".join([*(f"{type_} ..." for type_ in first), *(f"{o.type} {o.name}" for o in rest)])
        raise ValueError(f"line {line}: {name} must be declared as {name}({declared}), as forward's arguments are")
