"""What expressions are made of: notations, tokens, the nodes of the syntax tree, and the error that marks a place."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

__all__ = [
    "CONSTANTS",
    "DROPOUT",
    "ELSEWHERE",
    "HABITS",
    "KEEP",
    "NUMBER",
    "SUFFIX",
    "TOKEN",
    "ExpressionError",
    "Node",
    "Token",
    "bare",
    "in_cpp",
    "kind_of",
    "literal_in_cpp",
]

CONSTANTS = {"pi": math.pi}
DROPOUT = "dropout"  # not in FUNCTIONS, as it draws random numbers

NO_COMMENTS = "an expression takes no comments"

# Notations of other languages, and what to write instead.
HABITS = {
    "**": "write pow(a, b) for a power",
    "^": "write pow(a, b) for a power",
    "//": f"write floor(a / b); {NO_COMMENTS}",
    "/*": NO_COMMENTS,
    "#": NO_COMMENTS,
    "%": "write fmod(a, b)",
    "=": "write == to compare; in calls give numbers without their names, as in elu(x, 2)",
    "&": "write &&",
    "|": "write || between conditions, and abs(x) for a size",
    ".": "write the function's name alone, as in sin(x)",
    "::": "write the activation's name alone, as in silu(x)",
    "fabs": "write abs(x)",
    ";": "an expression has no semicolon; for statements give a whole kernel file as source=",
    "and": "write &&",
    "or": "write ||",
    "not": "write !",
    "if": "write condition ? a : b",
    "else": "write condition ? a : b",
    "lambda": "write the expression alone",
    "return": "write the expression alone",
    "true": "write a comparison",
    "false": "write a comparison",
}

# Functions that others have, and what to write instead.
ELSEWHERE = {
    "where": "write condition ? a : b",
    "select": "write condition ? a : b",
    "sign": "write (x > 0) - (x < 0), or copysign(1, x)",
    "sgn": "write (x > 0) - (x < 0), or copysign(1, x)",
    "square": "write x * x",
    "reciprocal": "write 1 / x",
    "neg": "write -x",
    "ln": "write log(x)",
}

TOKEN = re.compile(
    r"(?P<number>\.?[0-9](?:[eE][+-]|[.A-Za-z0-9_])*)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<operator>\|\||&&|::|[=!<>]=|\*\*|//|/\*|[-+*/<>?:(),!])|(?P<other>\S)"
)
NUMBER = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
SUFFIX = re.compile(NUMBER.pattern + r"[fFlLuU]+")

KEEP = "keep__"  # the argument of the PyTorch form that gives dropout's mask; no operand's name contains "__"


class ExpressionError(ValueError):
    """An invalid expression. The error's text marks the place.

    Attributes:
        message: what is wrong, without the place.
        place: the expression, and the start and end offsets of the wrong part.
    """

    def __init__(self, message: str, text: str, start: int, end: int) -> None:
        """Takes a message and the place."""
        self.message, self.place = message, (text, start, end)
        line_start = text.rfind("\n", 0, start) + 1
        line = text[line_start:].partition("\n")[0].replace("\t", " ")
        caret = " " * (start - line_start) + "^" * max(1, min(end, line_start + len(line)) - start)
        super().__init__(f"{message}\n    {line}\n    {caret}")

    def _render_traceback_(self) -> list[str]:
        """The traceback in IPython: the marked expression only, as frames of the parser would not help."""
        return [f"ExpressionError: {self}"]


def in_cpp(name: str) -> str:
    """An operand's name in C++; the underscore avoids collisions with macros (``NULL``, ``errno``) and functions."""
    return f"{name}_"


@dataclass
class Token:
    """A token, and the offsets at which it begins and ends."""

    kind: str  # number, name, operator, other, end
    text: str
    start: int
    end: int


@dataclass
class Node:
    """A node of the syntax tree: its place in the text, and its translations.

    Attributes:
        start: offset of its first character.
        end: offset after its last character.
        python: the translation to PyTorch.
        cpp: the translation to C++, of type ``T``; a literal if it is a number.
        key: a normal form without spaces and names of variables.
        kind: "number" for a constant, "scalar" if it depends on parameters alone, "tensor" otherwise.
        value: the value of a number.
        truth: whether it is boolean, and so a bool in C++.
        whole: whether it is written with integers alone, so that C++ and Python compute it as an int.
        closed: whether it is a comparison in parentheses.
        depth: of the tree below it.
    """

    start: int
    end: int
    python: str
    cpp: str
    key: str
    kind: str = "tensor"
    value: float | None = None
    truth: bool = False
    whole: bool = False
    closed: bool = False
    depth: int = 0


def kind_of(*parts: Node) -> str:
    """The kind of an operation on ``parts``."""
    kinds = {part.kind for part in parts}
    return next(kind for kind in ("tensor", "scalar", "number") if kind in kinds)


def literal_in_cpp(value: float) -> str:
    """A C++ literal of a number, as an operand next to a ``T``."""
    short = value.is_integer() and abs(value) < 2**31 and (value or math.copysign(1, value) > 0)
    return str(int(value)) if short else repr(value)


def bare(text: str) -> str:
    """``text`` without enclosing parentheses."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0 and i < len(text) - 1:
            return text
    return text[1:-1] if text.startswith("(") else text
