"""The expressions that :func:`jitact.define` takes: C++ arithmetic, checked here, and translated to PyTorch.

An expression is read twice. The compiler makes the kernel of it; this module reads it first, so that a slip is pointed at
before anything is compiled, and writes the same as a function on tensors, to compare the kernel with.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from .references import exact_tanhshrink

__all__ = ["CONSTANTS", "FUNCTIONS", "Expression", "ExpressionError"]

CONSTANTS = {"pi": math.pi}


# What PyTorch has under no name. Where two arguments of min and max are equal, the gradient is the second one's, as in
# the kernel.


def minimum(a: Tensor, b: Tensor | float) -> Tensor:
    return torch.where((a < b) | a.isnan(), a, b)


def maximum(a: Tensor, b: Tensor | float) -> Tensor:
    return torch.where((a > b) | a.isnan(), a, b)


def clamp(x: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    x = torch.where((x > low) | x.isnan(), x, low)
    return torch.where((x < high) | x.isnan(), x, high)


def cbrt(x: Tensor) -> Tensor:
    return torch.sign(x) * x.abs() ** (1 / 3)


def round_half_up(x: Tensor) -> Tensor:
    return torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x))


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a * b + c


def softplus(x: Tensor) -> Tensor:
    return -F.logsigmoid(-x)


def normal_pdf(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-math.sqrt(0.5) * x)


HELPERS: dict[str, Callable[..., Tensor]] = {
    "min": minimum,
    "max": maximum,
    "clamp": clamp,
    "cbrt": cbrt,
    "round": round_half_up,
    "fma": fma,
    "softplus": softplus,
    "normal_pdf": normal_pdf,
    "normal_cdf": normal_cdf,
    "x_minus_tanh": exact_tanhshrink,
}


class Function(NamedTuple):
    """A function of kernels/math.cuh or number.cuh: how many arguments it takes, and what it is called in Python.

    ``numbers`` are the positions of arguments that may be plain numbers in Python.
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

# Functions that C++ does not have for plain numbers; sqrt(2) needs no T, sigmoid(2) would.
OWN = ("abs", "clamp", "max", "min", "normal_cdf", "normal_pdf", "rsqrt", "sigmoid", "softplus", "x_minus_tanh")

# How tightly the operators bind, tightest last, and what Python calls the two that it writes otherwise.
BINDING = {"||": 1, "&&": 2, "==": 3, "!=": 3, "<": 4, "<=": 4, ">": 4, ">=": 4, "+": 5, "-": 5, "*": 6, "/": 6}
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
LOGICAL = {"||": "|", "&&": "&"}

# What people write from habit, and what to write instead.
HABITS = {
    "**": "write pow(a, b) for a power",
    "^": "write pow(a, b) for a power",
    "//": "write floor(a / b)",
    "%": "write fmod(a, b)",
    "=": "write == to compare",
    "&": "write &&",
    "|": "write ||",
    ".": "write the function's name alone, as in sin(x)",
    "fabs": "write abs(x)",
    ";": "an expression has no semicolon; for statements give a whole kernel file as source=",
    "and": "write &&",
    "or": "write ||",
    "not": "write !",
    "if": "write condition ? a : b",
    "else": "write condition ? a : b",
    "lambda": "write the expression alone",
    "return": "write the expression alone",
}

TOKEN = re.compile(
    r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\w*)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<operator>\|\||&&|[=!<>]=|\*\*|//|[-+*/<>?:(),!])|(?P<other>\S)"
)
NUMBER = re.compile(r"[\d.]+(?:[eE][+-]?\d+)?")


class ExpressionError(ValueError):
    """An expression that will not do. Its text shows where.

    Attributes:
        message: what is wrong, without the place.
        place: the expression, and the offsets in it where what is wrong starts and ends.
    """

    def __init__(self, message: str, text: str, start: int, end: int) -> None:
        """Takes a message and the place."""
        self.message, self.place = message, (text, start, end)
        line_start = text.rfind("\n", 0, start) + 1
        line = text[line_start:].partition("\n")[0]
        caret = " " * (start - line_start) + "^" * max(1, min(end, line_start + len(line)) - start)
        super().__init__(f"{message}\n    {line}\n    {caret}")

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: where the expression is wrong, not where that was noticed."""
        return [f"ExpressionError: {self}"]


@dataclass
class _Token:
    kind: str  # number, name, operator, other, end
    text: str
    start: int
    end: int


@dataclass
class _Node:
    """A part of an expression: where it stands, and what it is in Python.

    Attributes:
        kind: "number" for what C++ computes before the program runs, "scalar" for what depends on parameters alone,
            "tensor" for what depends on a tensor.
        truth: whether it is true or false.
        integer: whether C++ would take it for an int.
        builtin: whether it is a bool, an int or a double in C++ and no ``T``.
    """

    python: str
    start: int
    end: int
    kind: str = "tensor"
    truth: bool = False
    integer: bool = False
    builtin: bool = False


def _kind(*parts: _Node) -> str:
    """The kind of what is made of ``parts``."""
    kinds = {part.kind for part in parts}
    return next(kind for kind in ("tensor", "scalar", "number") if kind in kinds)


class Expression:
    """A checked expression in some variables. Called with their values, it is evaluated in PyTorch.

    Attributes:
        text: as the user wrote it, on one line.
        variables: the names that may occur in it, tensors first, in the order of a call's arguments.
        constants: those of :data:`CONSTANTS` that occur.
        helpers: those of :data:`HELPERS` that :attr:`python` calls.
        python: the same in Python, with the names ``torch``, ``math`` and those of the helpers.
    """

    def __init__(self, text: str, tensors: Iterable[str], parameters: Iterable[str] = ()) -> None:
        """Reads ``text``, in which the names ``tensors`` and ``parameters`` may occur.

        Raises:
            ExpressionError: ``text`` is not an expression in them.
        """
        if not isinstance(text, str):
            raise TypeError(f"an expression is text, such as 'x * sigmoid(x)', not {text!r}")
        tensors, parameters = tuple(tensors), tuple(parameters)
        parser = _Parser(text.strip(), tensors, parameters)
        root = parser.parse()
        self.text = " ".join(text.split())
        self.variables = tensors + parameters
        self.constants = {name for name in CONSTANTS if name in parser.names}
        self.helpers = {name: HELPERS[name] for name in HELPERS if name in parser.names}
        self.python = _bare(parser.as_tensor(root))

    @cached_property
    def _function(self) -> Callable[..., Tensor]:
        names = {"torch": torch, "math": math} | {helper.__name__: helper for helper in self.helpers.values()}
        return eval(f"lambda {', '.join(self.variables)}: {self.python}", names)

    def __call__(self, *values: Tensor | float) -> Tensor:
        """The expression's value for values of the variables, in their order."""
        return self._function(*values)


def _bare(python: str) -> str:
    """Without parentheses around all of it."""
    depth = 0
    for i, character in enumerate(python):
        depth += (character == "(") - (character == ")")
        if depth == 0 and i < len(python) - 1:
            return python
    return python[1:-1] if python.startswith("(") else python


class _Parser:
    """Precedence climbing over the tokens of one expression."""

    def __init__(self, text: str, tensors: tuple[str, ...], parameters: tuple[str, ...]) -> None:
        self.text, self.tensors, self.parameters = text, tensors, parameters
        self.names: set[str] = set()
        self.tokens = [_Token(str(match.lastgroup), match[0], *match.span()) for match in TOKEN.finditer(text)]
        self.tokens.append(_Token("end", "", len(text), len(text) + 1))
        self.at = 0
        self.like = tensors[-1]  # whose dtype a number becomes a tensor of

    def as_number(self, node: _Node) -> str:
        """In Python, as what arithmetic can take: truth as 1 or 0."""
        if not node.truth:
            return node.python
        return f"{node.python}.to({self.like}.dtype)" if node.kind == "tensor" else f"float({node.python})"

    def as_tensor(self, node: _Node) -> str:
        """In Python, as a tensor."""
        number = self.as_number(node)
        return number if node.kind == "tensor" else f"torch.full_like({self.like}, {_bare(number)})"

    @property
    def token(self) -> _Token:
        return self.tokens[self.at]

    def take(self) -> _Token:
        self.at += 1
        return self.tokens[self.at - 1]

    def fail(self, message: str, start: int, end: int) -> NoReturn:
        raise ExpressionError(message, self.text, start, end)

    def unexpected(self, message: str) -> NoReturn:
        token = self.token
        found = "the end" if token.kind == "end" else repr(token.text)
        self.fail(HABITS.get(token.text) or f"{message}, found {found}", token.start, token.end)

    def expect(self, text: str, why: str) -> _Token:
        if self.token.text != text:
            self.unexpected(f"expected {text!r} {why}")
        return self.take()

    def need_truth(self, node: _Node) -> None:
        if not node.truth:
            self.fail("expected a comparison here, such as x > 0", node.start, node.end)

    def parse(self) -> _Node:
        if self.token.kind == "end":
            self.fail("the expression is empty", 0, 1)
        node = self.choice()
        if self.token.kind != "end":
            self.unexpected("expected an operator")
        return node

    def choice(self) -> _Node:
        """``condition ? a : b``, or anything that binds tighter."""
        condition = self.operation(1)
        if self.token.text != "?":
            return condition
        self.take()
        self.need_truth(condition)
        a = self.choice()
        self.expect(":", "and what holds if the condition does not")
        b = self.choice()
        kind = _kind(condition, a, b)
        if condition.kind != "tensor":
            branches = [self.as_tensor(n) if kind == "tensor" else self.as_number(n) for n in (a, b)]
            python = f"({_bare(branches[0])} if {_bare(condition.python)} else {_bare(branches[1])})"
        else:  # torch.where takes a number beside a tensor, but makes float32 of two numbers
            first = self.as_tensor(a) if b.kind != "tensor" else self.as_number(a)
            python = f"torch.where({_bare(condition.python)}, {_bare(first)}, {_bare(self.as_number(b))})"
        integer, builtin = a.integer and b.integer, a.builtin and b.builtin
        return _Node(python, condition.start, b.end, kind, integer=integer, builtin=builtin)

    def operation(self, lowest: int) -> _Node:
        """Operators that bind at least as tight as ``lowest``."""
        left = self.unary()
        while BINDING.get(self.token.text, 0) >= lowest:
            sign = self.take().text
            left = self.binary(sign, left, self.operation(BINDING[sign] + 1))
        return left

    def binary(self, sign: str, left: _Node, right: _Node) -> _Node:
        start, end, kind = left.start, right.end, _kind(left, right)
        if sign in LOGICAL:
            self.need_truth(left)
            self.need_truth(right)
            return _Node(f"({left.python} {LOGICAL[sign]} {right.python})", start, end, kind, True, True, True)
        if sign in COMPARISONS:
            if left.truth:
                self.fail("comparisons do not chain; join two with &&", start, end)
            return _Node(f"({self.as_number(left)} {sign} {self.as_number(right)})", start, end, kind, True, True, True)
        integer, builtin = left.integer and right.integer, left.builtin and right.builtin
        if sign == "/" and integer:
            self.fail("a quotient of whole numbers is a whole number in C++; write one of them as 1.0", start, end)
        python = f"{self.as_number(left)} {sign} {self.as_number(right)}"
        return _Node(python, start, end, kind, integer=integer, builtin=builtin)

    def unary(self) -> _Node:
        if self.token.text not in ("-", "+", "!"):
            return self.primary()
        sign, operand = self.take(), self.unary()
        if sign.text == "!":
            self.need_truth(operand)
            python = f"(~{operand.python})" if operand.kind == "tensor" else f"(not {operand.python})"
            return _Node(python, sign.start, operand.end, operand.kind, True, True, True)
        python = f"{sign.text}{self.as_number(operand)}"
        return _Node(python, sign.start, operand.end, operand.kind, False, operand.integer, operand.builtin)

    def primary(self) -> _Node:
        token = self.token
        if token.kind == "number":
            return self.number(self.take())
        if token.kind == "name" and token.text not in HABITS:
            self.take()
            return self.call(token) if self.token.text == "(" else self.variable(token)
        if token.text != "(":
            self.unexpected("expected a number, a name or a parenthesis")
        self.take()
        inner = self.choice()
        closing = self.expect(")", "to close the parenthesis")
        python = inner.python if inner.truth else f"({_bare(inner.python)})"
        return _Node(python, token.start, closing.end, inner.kind, inner.truth, inner.integer, inner.builtin)

    def number(self, token: _Token) -> _Node:
        if not NUMBER.fullmatch(token.text):
            self.fail("a number has no suffix; it takes the type of the tensor", token.start, token.end)
        integer = token.text.isdigit()
        if integer and len(token.text) > 9:
            self.fail("too large for a whole number; write it with a point", token.start, token.end)
        python = token.text.lstrip("0") or "0" if integer else token.text
        return _Node(python, token.start, token.end, "number", False, integer, True)

    def variable(self, token: _Token) -> _Node:
        name = token.text
        if name in FUNCTIONS:
            self.fail(f"{name} is a function; call it, as in {name}(x)", token.start, token.end)
        if self.token.text == ".":
            self.unexpected("")
        known = [*self.tensors, *self.parameters, *CONSTANTS]
        if name not in known:
            parameter = f"for a parameter, give its default, as in define(..., {name}=1.0)"
            self.fail(f"unknown name {name!r}; there are {', '.join(known)}; {parameter}", token.start, token.end)
        self.names.add(name)
        if name in self.tensors or name in self.parameters:
            return _Node(name, token.start, token.end, "tensor" if name in self.tensors else "scalar")
        return _Node(f"math.{name}", token.start, token.end, "number", builtin=True)

    def call(self, token: _Token) -> _Node:
        name = token.text
        if name not in FUNCTIONS:
            near = difflib.get_close_matches(name, FUNCTIONS, n=2)
            suggestion = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(FUNCTIONS))}"
            self.fail(f"unknown function {name!r}; {suggestion}", token.start, token.end)
        self.take()
        arguments = [self.choice()]
        while self.token.text == ",":
            self.take()
            arguments.append(self.choice())
        closing = self.expect(")", f"to close {name}(")
        function, kind = FUNCTIONS[name], _kind(*arguments)
        if len(arguments) != function.arity:
            plural = "argument" if function.arity == 1 else "arguments"
            self.fail(f"{name} takes {function.arity} {plural}, got {len(arguments)}", token.start, closing.end)
        if kind == "number":
            return self.number_call(token, arguments, closing)
        if all(node.builtin for node in arguments):
            message = f"{name} of comparisons and numbers alone; write its values, as in x > 1 ? 0.5 : 2"
            self.fail(message, token.start, closing.end)
        self.names.add(name)
        # A function of parameters alone is computed on tensors too, which know infinities and NaN where Python raises.
        may_be_numbers = function.numbers if kind == "tensor" else ()
        python = [self.as_number(node) if i in may_be_numbers else self.as_tensor(node) for i, node in enumerate(arguments)]
        return _Node(f"{function.python}({', '.join(map(_bare, python))})", token.start, closing.end)

    def number_call(self, token: _Token, arguments: list[_Node], closing: _Token) -> _Node:
        """A function of numbers alone, which C++ and Python compute before any tensor is there."""
        name = token.text
        if name in OWN or not hasattr(math, name):
            self.fail(f"{name} of numbers alone; write its value", token.start, closing.end)
        python = f"math.{name}({', '.join(_bare(argument.python) for argument in arguments)})"
        try:
            eval(python, {"math": math})
        except (ArithmeticError, ValueError) as error:
            self.fail(f"{name} of these numbers is no number: {error}", token.start, closing.end)
        return _Node(python, token.start, closing.end, "number", builtin=True)
