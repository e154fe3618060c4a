"""The grammar of expressions: a precedence-climbing parser that translates a formula to C++ and to PyTorch."""

from __future__ import annotations

import difflib
import itertools
import keyword
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, NoReturn

import torch

from .. import registry
from ..kernels.loader.uses import namespace
from ..records import Activation, library
from .functions import FUNCTIONS, IN_MATH, Called, called
from .helpers import HELPERS
from .signs import ARITHMETIC, BINDING, COMPARISONS
from .syntax import (
    CONSTANTS,
    DROPOUT,
    ELSEWHERE,
    HABITS,
    KEEP,
    NUMBER,
    SUFFIX,
    TOKEN,
    ExpressionError,
    Node,
    Token,
    bare,
    in_cpp,
    kind_of,
    literal_in_cpp,
)

__all__ = ["Parsed", "Share", "parse"]

# The operators that PyTorch expressions spell differently.
LOGICAL = {"||": "|", "&&": "&"}

WHOLE = range(3, 5)  # exponents that C++ gets as an int, for which math.cuh has products

NEAR = 0.75  # difflib's similarity from which a name may be a misspelling of another
SHORT_NAME = 2  # names up to this length are not taken for misspellings

# Limits that compilers and Python's parser can handle.
MAX_NESTING = 100  # of parentheses, calls, signs and branches
MAX_DEPTH = 500  # of the syntax tree, which also counts operators, such as the terms of a sum


class Share(NamedTuple):
    """A dropout probability that depends on parameters.

    Attributes:
        text: as written, for error messages.
        of: its value as a function of the parameters in their order.
    """

    text: str
    of: Callable[..., float]


class _Parser:
    """Precedence climbing over the tokens of one expression."""

    def __init__(
        self,
        text: str,
        elements: tuple[str, ...] | None,
        channels: tuple[str, ...],
        parameters: tuple[str, ...],
        random: tuple[str, ...],
        of_kernel_file: bool,
        draws: bool,
        beside: Mapping[str, Activation],
    ) -> None:
        self.text, self.parameters, self.of_kernel_file, self.draws = text, parameters, of_kernel_file, draws
        self.beside = beside
        self.names: set[str] = set()
        self.activations: dict[str, Called] = {}
        self.random, self.drawn, self.shares = random, [], []
        self.tokens = [Token(str(match.lastgroup), match[0], *match.span()) for match in TOKEN.finditer(text)]
        self.tokens.append(Token("end", "", len(text), len(text) + 1))
        self.at = self.nesting = 0
        self.free = elements is None
        self.elements = self.free_names({*channels, *parameters, *CONSTANTS}) if elements is None else elements
        self.tensors = self.elements + channels
        self.like = self.elements[-1]  # numbers become tensors of its shape and dtype

    def free_names(self, declared: set[str]) -> tuple[str, ...]:
        """The undeclared names, which are tensors: ``x`` first, then in the order of occurrence."""
        triples = zip(["", *(token.text for token in self.tokens)], self.tokens, self.tokens[1:], strict=False)
        found = [
            token.text
            for before, token, after in triples
            if token.kind == "name" and before != "." and after.text not in ("(", ".") and token.text not in HABITS
        ]
        found = [name for name in dict.fromkeys(found) if name not in declared]
        return tuple(sorted(found, key=lambda name: name != "x")) or ("x",)

    # Nodes.

    def node(self, start: int, end: int, python: str, cpp: str, key: str, *parts: Node, **fields: object) -> Node:
        """A node with ``parts`` as operands."""
        made = Node(start, end, python, cpp, key, depth=1 + max(part.depth for part in parts), **fields)
        if made.depth > MAX_DEPTH:
            self.too_deep(f"more than {MAX_DEPTH} operations, each of which needs the one before", start, end)
        return made

    def known(self, start: int, end: int, python: str, value: float, *, whole: bool = False) -> Node:
        """A constant."""
        if not math.isfinite(value):
            self.fail("no finite number; the largest is 1.79e308", start, end)
        return Node(start, end, python, literal_in_cpp(value), repr(float(value)), "number", value, whole=whole)

    def known_truth(self, start: int, end: int, value: bool) -> Node:
        """A boolean constant."""
        return replace(self.known(start, end, str(float(value)), float(value)), truth=True)

    def number(self, node: Node) -> Node:
        """A node as an operand of arithmetic: booleans are converted to 1 or 0."""
        if not node.truth:
            return node
        if node.kind == "number":
            return replace(node, truth=False)
        python = f"{node.python}.to({self.like}.dtype)" if node.kind == "tensor" else f"float({node.python})"
        return replace(node, python=python, cpp=f"T({bare(node.cpp)})", truth=False)

    def as_tensor(self, number: Node) -> str:
        """The Python translation, as a tensor."""
        return number.python if number.kind == "tensor" else f"torch.full_like({self.like}, {bare(number.python)})"

    def as_float(self, number: Node) -> str:
        """The Python translation, as a tensor or a float: Python's ints are unbounded, and PyTorch refuses large ones."""
        return repr(number.value) if number.kind == "number" and number.whole else number.python

    # Errors.

    def fail(self, message: str, start: int, end: int) -> NoReturn:
        raise ExpressionError(message, self.text, start, end)

    def unexpected(self, message: str) -> NoReturn:
        token = self.token
        found = "the end" if token.kind == "end" else repr(token.text)
        self.fail(HABITS.get(token.text) or f"{message}, found {found}", token.start, token.end)

    def too_deep(self, what: str, start: int, end: int) -> NoReturn:
        self.fail(f"{what}; give a whole kernel file as source=, in which values can have names", start, end)

    # Grammar.

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def take(self) -> Token:
        self.at += 1
        return self.tokens[self.at - 1]

    def expect(self, text: str, why: str) -> Token:
        if self.token.text != text:
            self.unexpected(f"expected {text!r} {why}")
        return self.take()

    def need_truth(self, node: Node) -> None:
        if not node.truth:
            self.fail("expected a comparison here, such as x > 0", node.start, node.end)

    def parse(self) -> Node:
        if self.token.kind == "end":
            self.fail("the expression is empty", 0, 1)
        node = self.choice()
        if self.token.kind != "end":
            self.unexpected("expected an operator")
        return node

    def within(self, read: Callable[[], Node]) -> Node:
        """Calls ``read`` one nesting level deeper."""
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            self.too_deep(f"nested more than {MAX_NESTING} deep", self.token.start, self.token.end)
        node = read()
        self.nesting -= 1
        return node

    def choice(self) -> Node:
        """``condition ? a : b``, or an expression of higher precedence."""
        condition = self.operation(1)
        if self.token.text != "?":
            return condition
        self.take()
        self.need_truth(condition)
        first = self.within(self.choice)
        self.expect(":", "and what holds if the condition does not")
        second = self.within(self.choice)
        a, b, start, end = self.number(first), self.number(second), condition.start, second.end
        if condition.kind == "number":
            return replace(a if condition.value else b, start=start, end=end)
        kind = kind_of(condition, a, b)
        if condition.kind != "tensor":
            branches = [self.as_tensor(each) if kind == "tensor" else self.as_float(each) for each in (a, b)]
            python = f"({branches[0]} if {bare(condition.python)} else {bare(branches[1])})"
        else:  # torch.where takes a number and a tensor, but of two numbers it makes a tensor of the default dtype
            branch = self.as_tensor(a) if b.kind != "tensor" else a.python
            python = f"torch.where({bare(condition.python)}, {bare(branch)}, {bare(b.python)})"
        unlike = all(each.kind == "number" or self.is_typed(each) for each in (a, b))  # ?: needs a common type, T, in C++
        branches = [f"T({bare(each.cpp)})" if unlike else bare(each.cpp) for each in (a, b)]
        cpp, key = f"{condition.cpp} ? {branches[0]} : {branches[1]}", f"(? {condition.key} {a.key} {b.key})"
        return self.node(start, end, python, cpp, key, condition, a, b, kind=kind, whole=self.int_in_cpp(first, second))

    def is_typed(self, node: Node) -> bool:
        """Whether it is just an operand that is not elementwise: such operands have types other than ``T`` in C++."""
        names = (*self.tensors[len(self.elements) :], *self.parameters)
        return bare(node.cpp) in (names if self.of_kernel_file else map(in_cpp, names))

    def operation(self, lowest: int) -> Node:
        """Binary operators of at least the precedence ``lowest``."""
        left = self.unary()
        while BINDING.get(self.token.text, 0) >= lowest:
            sign = self.take().text
            right = self.operation(BINDING[sign] + 1)
            binary = self.logical if sign in LOGICAL else self.comparison if sign in COMPARISONS else self.arithmetic
            left = binary(sign, left, right)
        return left

    def logical(self, sign: str, left: Node, right: Node) -> Node:
        self.need_truth(left)
        self.need_truth(right)
        start, end, kind = left.start, right.end, kind_of(left, right)
        for side, other in ((left, right), (right, left)):
            if side.kind == "number":
                decides = bool(side.value) == (sign == "||")
                return replace(side if decides else other, start=start, end=end, closed=False)
        python, cpp = f"({left.python} {LOGICAL[sign]} {right.python})", f"{left.cpp} {sign} {right.cpp}"
        return self.node(start, end, python, cpp, f"({sign} {left.key} {right.key})", left, right, kind=kind, truth=True)

    def comparison(self, sign: str, left: Node, right: Node) -> Node:
        start, end, kind = left.start, right.end, kind_of(left, right)
        if any(side.truth and not side.closed for side in (left, right)):
            self.fail("comparisons do not chain; join two with &&", start, end)
        left, right = self.number(left), self.number(right)
        if kind == "number":
            return self.known_truth(start, end, COMPARISONS[sign](left.value, right.value))
        python, cpp = f"({left.python} {sign} {right.python})", f"{left.cpp} {sign} {right.cpp}"
        return self.node(start, end, python, cpp, f"({sign} {left.key} {right.key})", left, right, kind=kind, truth=True)

    def int_in_cpp(self, *parts: Node) -> bool:
        """Whether all parts are ints in the kernel file that is parsed."""
        return self.of_kernel_file and all(part.whole or part.truth for part in parts)

    def arithmetic(self, sign: str, left: Node, right: Node) -> Node:
        start, end, kind = left.start, right.end, kind_of(left, right)
        whole = self.int_in_cpp(left, right)
        if whole and sign == "/":
            self.fail("a quotient of whole numbers is a whole number in C++", start, end)
        left, right = self.number(left), self.number(right)
        if sign == "/" and right.value == 0:
            self.fail("a division by zero", start, end)
        if kind == "number":
            return self.known_arithmetic(sign, left, right, whole)
        a, b = left.python, right.python
        if kind == "scalar":
            a, b = self.as_float(left), self.as_float(right)
            if sign == "/" and right.kind == "scalar":  # Python raises on division by zero; tensors give infinities and NaN
                a, kind = self.as_tensor(left), "tensor"
        cpp, key = f"{left.cpp} {sign} {right.cpp}", f"({sign} {left.key} {right.key})"
        return self.node(start, end, f"{a} {sign} {b}", cpp, key, left, right, kind=kind, whole=whole)

    def known_arithmetic(self, sign: str, left: Node, right: Node, whole: bool) -> Node:
        start, end = left.start, right.end
        value = ARITHMETIC[sign](left.value, right.value)
        if whole and abs(value) >= 2**31:
            self.fail("too large for a whole number in C++", start, end)
        a, b = (self.as_float(side) if left.whole and right.whole else side.python for side in (left, right))
        return self.known(start, end, f"{a} {sign} {b}", value, whole=whole)

    def unary(self) -> Node:
        if self.token.text not in ("-", "+", "!"):
            return self.primary()
        sign = self.take()
        written = self.within(self.unary)
        if sign.text == "!":
            return self.negation(sign, written)
        operand, start, end = self.number(written), sign.start, written.end
        python = f"{sign.text}{operand.python}"
        if operand.kind == "number":
            value = -operand.value if sign.text == "-" else operand.value
            whole = written.whole and value != 0  # T has a negative zero, ints do not
            return self.known(start, end, python if whole else f"{sign.text}{self.as_float(operand)}", value, whole=whole)
        whole = self.int_in_cpp(written)
        # Two adjacent signs would be C++'s operator -- or ++.
        cpp = f"{sign.text}({operand.cpp})" if operand.cpp[0] in "+-" else f"{sign.text}{operand.cpp}"
        key = f"(- {operand.key})" if sign.text == "-" else operand.key
        return self.node(start, end, python, cpp, key, operand, kind=operand.kind, whole=whole)

    def negation(self, sign: Token, operand: Node) -> Node:
        self.need_truth(operand)
        start, end, kind = sign.start, operand.end, operand.kind
        if kind == "number":
            return replace(self.known_truth(start, end, not operand.value), closed=True)
        python = f"(~{operand.python})" if kind == "tensor" else f"(not {operand.python})"
        cpp, key = f"!{operand.cpp}", f"(! {operand.key})"
        return self.node(start, end, python, cpp, key, operand, kind=kind, truth=True, closed=True)

    def primary(self) -> Node:
        token = self.token
        if token.kind == "number":
            return self.literal(self.take())
        if token.kind == "name" and token.text not in HABITS:
            self.take()
            if self.token.text == "::" and self.of_kernel_file:
                return self.used(token)
            return self.call(token) if self.token.text == "(" else self.variable(token)
        if token.text != "(":
            self.unexpected("expected a number, a name or a parenthesis")
        self.take()
        inner = self.within(self.choice)
        closing = self.expect(")", "to close the parenthesis")
        return self.enclosed(inner, token.start, closing.end)

    def enclosed(self, inner: Node, start: int, end: int) -> Node:
        """``inner`` in parentheses."""
        python = inner.python if inner.truth else f"({bare(inner.python)})"
        cpp = inner.cpp if inner.kind == "number" else f"({bare(inner.cpp)})"
        return replace(inner, start=start, end=end, python=python, cpp=cpp, closed=True)

    def literal(self, token: Token) -> Node:
        if SUFFIX.fullmatch(token.text):
            self.fail("a number has no suffix; it takes the type of the tensor", token.start, token.end)
        if not NUMBER.fullmatch(token.text):
            factor = NUMBER.match(token.text)
            rest = token.text[factor.end() :] if factor else ""
            is_product = rest == "x" or (rest.isidentifier() and not re.fullmatch(r"[exEX_][0-9]*", rest))
            meant = f"; write {factor[0]} * {rest}" if is_product else ""
            self.fail(f"no decimal number, such as 2, 0.5 or 1e-3{meant}", token.start, token.end)
        value, whole = float(token.text), token.text.isdigit()
        if value == 0 and re.search("[1-9]", re.split("[eE]", token.text)[0]):
            self.fail("too small for a number: it would be 0; the smallest is 4.94e-324", token.start, token.end)
        if self.of_kernel_file and whole and (value >= 2**31 or token.text != str(int(value))):
            self.fail("another number in C++", token.start, token.end)
        if whole and value >= 2**53:
            return self.known(token.start, token.end, repr(value), value)
        return self.known(token.start, token.end, str(int(token.text)) if whole else token.text, value, whole=whole)

    def variable(self, token: Token) -> Node:
        name, start, end = token.text, token.start, token.end
        if self.token.text in (".", "::"):
            self.unexpected("")
        if (self.free or name not in self.tensors) and name in (*FUNCTIONS, DROPOUT):
            arguments = "x, p" if name == DROPOUT else "x"
            self.fail(f"{name} is a function; call it, as in {name}({arguments})", start, end)
        self.names.add(name)
        if name in self.tensors:
            if self.free and name in self.elements and name != "x":
                self.refuse_near(name, start, end)
            literal = self.of_kernel_file or name == "x" or (self.elements[0] == "dy" and name in ("dy", "y"))
            return Node(start, end, name, name if literal else in_cpp(name), f"t{self.tensors.index(name)}", "tensor")
        if name in self.parameters:
            cpp = name if self.of_kernel_file else in_cpp(name)
            return Node(start, end, name, cpp, f"p{self.parameters.index(name)}", "scalar")
        if name in CONSTANTS:
            return self.known(start, end, f"math.{name}", CONSTANTS[name])
        known = ", ".join([*self.tensors, *self.parameters, *CONSTANTS])
        parameter = f"for a parameter, give its default, as in define(..., {name}=1.0)"
        self.fail(f"unknown name {name!r}; there are {known}; {parameter}", start, end)

    def refuse_near(self, name: str, start: int, end: int) -> None:
        """Raises if an undeclared name, taken as a tensor, is likely a misspelling of another name."""
        activations = registry.names()
        if keyword.iskeyword(name):
            self.fail(f"a tensor cannot be called {name!r}", start, end)
        if name in ("inf", "nan"):
            meant = "is no constant here; a parameter can have it as its default."
        elif name == "e":
            meant = "is no constant here; write exp(1)."
        elif name in activations:
            meant = f"is an activation; call it, as in {name}(x)."
        else:
            functions = [*FUNCTIONS, DROPOUT, *(each for each in activations if each in library)]
            known = {each.lower(): each for each in (*functions, *CONSTANTS, *self.tensors, *self.parameters) if each != name}
            for other in self.elements:
                known.pop(other, None)
            near = [known[name.lower()]] if name.lower() in known else []
            if not near and len(name) > SHORT_NAME:
                long = [each for each in known if len(each) > SHORT_NAME and abs(len(each) - len(name)) < 2]
                near = [known[each] for each in difflib.get_close_matches(name.lower(), long, n=2, cutoff=NEAR)]
            if not near:  # repeated letters, such as pii
                near = [each for each in CONSTANTS if each == re.sub(r"(.)\1+", r"\1", name)]
            if not near:
                return
            meant = f"is near to {' and '.join(near)}; did you mean {' or '.join(near)}?"
        self.fail(f"{name!r} {meant} If it is a tensor, name all of them: operands={self.elements!r}", start, end)

    def call(self, token: Token) -> Node:
        name = token.text
        if name == "T" and self.of_kernel_file:
            return self.conversion(token)
        if name == DROPOUT:
            return self.drawing(token)
        if name not in FUNCTIONS or self.arguments_ahead() > FUNCTIONS[name].arity:  # softplus(x, 2) is the activation
            activation = None if self.of_kernel_file else self.activation(token)
            if activation:
                return self.activated(token, activation)
        if name not in FUNCTIONS:
            near = difflib.get_close_matches(name, [*FUNCTIONS, DROPOUT, *registry.names()], n=2)
            known = f"there are {', '.join(sorted((*FUNCTIONS, DROPOUT)))}, and activations by their names"
            suggestion = ELSEWHERE.get(name) or (f"did you mean {' or '.join(near)}?" if near else known)
            self.fail(f"unknown function {name!r}; {suggestion}", token.start, token.end)
        arguments, closing = self.arguments(name)
        function, kind = FUNCTIONS[name], kind_of(*arguments)
        if len(arguments) != function.arity:
            plural = "argument" if function.arity == 1 else "arguments"
            self.fail(f"{name} takes {function.arity} {plural}, got {len(arguments)}", token.start, closing.end)
        if kind == "number":
            return self.number_call(token, arguments, closing)
        self.names.add(name)
        # A function of parameters alone is computed on tensors too: they give infinities and NaN where Python raises.
        may_be_numbers = function.numbers if kind == "tensor" else ()
        given = [node.python if i in may_be_numbers else self.as_tensor(node) for i, node in enumerate(arguments)]
        python = f"{function.python}({', '.join(map(bare, given))})"
        given = [f"T({node.cpp})" if node.kind == "number" else bare(node.cpp) for node in arguments]
        if name == "pow" and arguments[1].kind == "number" and arguments[1].value in WHOLE:
            given[1] = str(int(arguments[1].value))
        key = f"({name} {' '.join(node.key for node in arguments)})"
        cpp = f"{name}({', '.join(given)})"
        return self.node(token.start, closing.end, python, cpp, key, *arguments)

    def arguments(self, name: str) -> tuple[list[Node], Token]:
        """The arguments of a call, and its closing parenthesis."""
        self.take()
        arguments = [self.within(self.choice)]
        while self.token.text == ",":
            self.take()
            arguments.append(self.within(self.choice))
        closing = self.expect(")", f"to close {name}(")
        return [self.number(argument) for argument in arguments], closing

    def arguments_ahead(self) -> int:
        """How many arguments the call that begins here seems to have, as far as parentheses and commas tell."""
        depth, count = 0, 1
        for token in self.tokens[self.at :]:
            depth += (token.text == "(") - (token.text == ")")
            count += token.text == "," and depth == 1
            if depth == 0:
                break
        return count

    def drawing(self, token: Token) -> Node:
        """``dropout(value, p)``, which draws its own random number; in a kernel file ``dropout(value, number, p)``."""
        opening = self.at
        self.take()
        value = self.number(self.within(self.choice))
        if self.token.text != ",":
            self.unexpected(f"expected ',' and {'a random number' if self.of_kernel_file else 'the share to drop'}")
        self.take()
        if not self.of_kernel_file:
            taken = {*re.findall(r"\w+", self.text), *self.drawn}
            random = next(name for n in itertools.count(1) if (name := f"u{n}") not in taken)
        else:
            drawn = self.take()
            random = drawn.text
            if random not in self.random or random in self.drawn:
                self.fail("no random number of its own", drawn.start, drawn.end)
            self.expect(",", "and the share to drop")
        p = self.number(self.within(self.choice))
        if self.token.text == ",":
            self.at = opening
            arguments, closing = self.arguments(DROPOUT)
            message = f"dropout takes 2 arguments, a value and the share to drop, got {len(arguments)}"
            self.fail(message, token.start, closing.end)
        end = self.expect(")", "to close dropout(").end
        if p.kind == "tensor":
            self.fail("the share that dropout drops is a number; it cannot be different for each element", p.start, p.end)
        if p.kind == "number" and not 0 <= p.value <= 1:
            self.fail(f"the share that dropout drops is from 0 to 1, got {p.value:g}", p.start, p.end)
        if not self.draws:
            return self.enclosed(value, token.start, end)
        if p.kind == "scalar":
            self.shares.append(Share(" ".join(self.text[p.start : p.end].split()), self.of_parameters(p)))
        self.drawn.append(random)
        stream = self.random.index(random) if self.of_kernel_file else len(self.drawn) - 1
        python = f"{DROPOUT}({bare(self.as_tensor(value))}, {bare(self.as_float(p))}, {KEEP}, {stream})"
        cpp = f"{DROPOUT}({bare(value.cpp)}, {random}, {bare(p.cpp)})"
        return self.node(token.start, end, python, cpp, f"(dropout {value.key} {p.key})", value, p)

    def of_parameters(self, node: Node) -> Callable[..., float]:
        """A node that depends on parameters alone, as a function of them."""
        return eval(f"lambda {', '.join(self.parameters)}: {bare(node.python)}", {"math": math})

    def activation(self, token: Token) -> Called | None:
        """The activation that a name stands for, if any."""
        try:
            return called(token.text, self.beside)
        except ValueError as error:
            self.fail(str(error), token.start, token.end)

    def used(self, token: Token) -> Node:
        """A call in a kernel file's notation, ``silu_::forward(x)``."""
        activation = self.activation(replace(token, text=token.text.removesuffix("_")))
        if not activation or token.text != namespace(activation.name):
            self.unexpected("expected an operator")
        self.take()
        if self.take().text != "forward" or self.token.text != "(":
            self.fail(f"the slope of {activation.name}, which is no expression", token.start, self.token.end)
        return self.activated(token, activation)

    def activated(self, token: Token, activation: Called) -> Node:
        """A call of an activation: its tensors, then its parameters, of which trailing ones may be omitted."""
        name, count, params = activation.name, len(activation.tensors), activation.record.params
        arguments, closing = self.arguments(token.text)
        start, end = token.start, closing.end
        if not count <= len(arguments) <= count + len(params):
            plural = "argument" if len(arguments) == 1 else "arguments"
            self.fail(f"{name} takes ({activation.arguments}), got {len(arguments)} {plural}", start, end)
        for parameter, value in params[len(arguments) - count :]:
            if not math.isfinite(value):
                how = f"give it a number, or a parameter of yours that has {value} as its default"
                self.fail(f"{parameter} of {name} is {value} by default, which no expression can contain; {how}", start, end)
            arguments.append(self.known(start, end, repr(value), float(value)))
        tensors, numbers = arguments[:count], arguments[count:]
        for (parameter, _), number in zip(params, numbers, strict=True):
            if number.kind == "tensor":
                message = f"{parameter} of {name} is a number; it cannot be different for each element"
                self.fail(message, number.start, number.end)
        if all(number.kind == "number" for number in numbers):
            try:
                activation.record.check(tuple(number.value for number in numbers), False, None, False)
            except ValueError as error:
                self.fail(str(error), start, end)
        self.activations[name] = activation
        given = [self.as_tensor(node) for node in tensors] + [self.as_float(node) for node in numbers]
        python = f"{activation.python}({', '.join(map(bare, given))})"
        given = [f"T({node.cpp})" if node.kind == "number" else bare(node.cpp) for node in tensors]
        given += [bare(node.cpp) for node in numbers]
        cpp = f"{namespace(name)}::forward({', '.join(given)})"
        key = f"({name}:{activation.record.fingerprint} {' '.join(node.key for node in arguments)})"
        return self.node(start, end, python, cpp, key, *arguments)

    def number_call(self, token: Token, arguments: list[Node], closing: Token) -> Node:
        """A function of constants, computed in float64."""
        name, function = token.text, FUNCTIONS[token.text]
        try:
            if name in IN_MATH:
                python = f"math.{name}({', '.join(bare(argument.python) for argument in arguments)})"
                value = eval(python, {"math": math})
            else:
                names = {"torch": torch, "math": math} | {helper.__name__: helper for helper in HELPERS.values()}
                values = [torch.tensor(argument.value, dtype=torch.float64) for argument in arguments]
                value = eval(function.python, names)(*values).item()
                python = repr(value)
            if not math.isfinite(value):
                raise ValueError(f"it is {value}")
        except (ArithmeticError, ValueError) as error:
            self.fail(f"{name} of these numbers is no number: {error}", token.start, closing.end)
        return self.known(token.start, closing.end, python, value)

    def conversion(self, token: Token) -> Node:
        """``T(...)``, which converts a number to ``T`` in a kernel file."""
        self.take()
        inner = self.number(self.within(self.choice))
        closing = self.expect(")", "to close T(")
        return replace(inner, start=token.start, end=closing.end, python=f"({bare(inner.python)})", whole=False)


class Parsed(NamedTuple):
    """What parsing an expression gives.

    Attributes:
        elements: the elementwise tensors that may occur in it.
        names: the names that do occur.
        random: the C++ names of the random numbers that it draws.
        shares: the dropout probabilities that depend on parameters.
        activations: the activations that it calls.
        python: the expression in Python.
        cpp: the expression in C++.
        key: a normal form.
    """

    elements: tuple[str, ...]
    names: frozenset[str]
    random: tuple[str, ...]
    shares: tuple[Share, ...]
    activations: tuple[Called, ...]
    python: str
    cpp: str
    key: str


def parse(
    text: str,
    elements: tuple[str, ...] | None,
    channels: tuple[str, ...],
    parameters: tuple[str, ...],
    random: tuple[str, ...],
    of_kernel_file: bool,
    draws: bool,
    beside: Mapping[str, Activation],
) -> Parsed:
    """Parses an expression. The arguments are those of :class:`~.expression.Expression`.

    Raises:
        ExpressionError: ``text`` is not an expression in these names.
    """
    parser = _Parser(text, elements, channels, parameters, random, of_kernel_file, draws, beside)
    root = parser.number(parser.parse())
    return Parsed(
        parser.elements,
        frozenset(parser.names),
        tuple(parser.drawn),
        tuple(parser.shares),
        tuple(parser.activations.values()),
        bare(parser.as_tensor(root)),
        bare(root.cpp),
        root.key,
    )
