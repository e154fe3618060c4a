"""Activations that users define: expressions, kernel files, folders, checks."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import inspect
import math
import os
import pickle
import re
import sys
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from random import Random as random_of
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import DTYPES, SLOW
from exact import mp, sech2
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import jitact
from jitact import modules, registry
from jitact.activations import TABLE
from jitact.compiling.dual import Dual, derivative, of_duals
from jitact.compiling.functions import functions
from jitact.definitions.define import Definition
from jitact.definitions.expression import FUNCTIONS, Expression, ExpressionError
from jitact.kernels import BuildError
from jitact.kernels.loader import signature, source
from jitact.kernels.loader.errors import explain
from jitact.records import Activation
from jitact.rows.records import TABLE as ROWS

X = torch.linspace(-3, 3, 61, dtype=torch.float64)
WITH_HELPER = """#include "elementwise.cuh"

ELEMENTWISE T size(T x, T a) { return 1 + a * abs(x); }

ELEMENTWISE T forward(T x, T a) {
  return x / size(x, a);
}
"""


def gradient(f, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x).sum(), x)[0]


# Expressions.


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("x * sin(x)", "x * torch.sin(x)"),
        ("x > 0 ? x : a * expm1(x)", "torch.where(x > 0, x, a * torch.expm1(x))"),
        ("0.5 * x * (1 + erf(x / sqrt(2)))", "0.5 * x * (1 + torch.erf(x / math.sqrt(2)))"),
        ("sqrt(2 / pi) * x", "math.sqrt(2 / math.pi) * x"),
        ("x > 0 && !(x > 1) || x < -a ? 1 : 0", "torch.where(((x > 0) & (~(x > 1))) | (x < -a), torch.full_like(x, 1), 0)"),
        ("max(x, 0)", "maximum(x, 0)"),
        ("max(0, x)", "maximum(torch.full_like(x, 0), x)"),
        ("a > 0 ? x : 0.1", "x if a > 0 else torch.full_like(x, 0.1)"),
        ("-x - -2 / x", "-x - -2 / x"),
        ("a > 0 ? (a > 1 ? x : 2) : 3", "(x if a > 1 else torch.full_like(x, 2)) if a > 0 else torch.full_like(x, 3)"),
        ("x * (x > 0)", "x * (x > 0).to(x.dtype)"),
        ("1", "torch.full_like(x, 1)"),
    ],
)
def test_expression_in_python(text: str, python: str) -> None:
    expression = Expression(text, ["x"], ["a"])
    assert expression.python == python
    assert expression(X, 0.5).shape == X.shape and expression(X, 0.5).dtype == X.dtype


@pytest.mark.parametrize(
    ("text", "message", "marked"),
    [
        ("x * sine(x)", "unknown function 'sine'; did you mean sin", "sine"),
        ("x * sine", "'sine' is near to sin and sinh; did you mean sin or sinh?", "sine"),
        ("select(x > 0, x, 0)", "unknown function 'select'; write condition ? a : b", "select"),
        ("where(x > 0, x, 0)", "unknown function 'where'; write condition ? a : b", "where"),
        ("square(x)", "unknown function 'square'; write x * x", "square"),
        ("dropout(x, p=0.5)", "in calls give numbers without their names", "="),
        ("x ** 2", "write pow(a, b)", "**"),
        ("x ^ 2", "write pow(a, b)", "^"),
        ("x * 2.0f", "a number has no suffix", "2.0f"),
        ("x * 10ull", "a number has no suffix", "10ull"),
        ("0x10 * x", "no decimal number", "0x10"),
        ("x * .5.", "no decimal number", ".5."),
        ("1.2.3 + x", "no decimal number", "1.2.3"),
        ("x + 1e", "no decimal number, such as 2, 0.5 or 1e-3", "1e"),
        ("1.702x", "no decimal number, such as 2, 0.5 or 1e-3; write 1.702 * x", "1.702x"),
        ("x * 2alpha", "write 2 * alpha", "2alpha"),
        ("|x|", "write || between conditions, and abs(x) for a size", "|"),
        ("x * 1_000", "no decimal number", "1_000"),
        ("x.5", "expected an operator, found '.5'", ".5"),
        ("1e400 * x", "no finite number", "1e400"),
        ("x * (1e200 * 1e200)", "no finite number", "1e200 * 1e200"),
        ("x + 1e-400", "it would be 0", "1e-400"),
        ("x * (1 / 0)", "a division by zero", "1 / 0"),
        ("x / (2 - 2)", "a division by zero", "x / (2 - 2)"),
        ("x * log(0)", "is no number", "log(0)"),
        ("x * rsqrt(0)", "rsqrt of these numbers is no number: it is inf", "rsqrt(0)"),
        ("1 == x > 2 ? 1 : 0", "comparisons do not chain", "1 == x > 2"),
        ("x++", "expected a number, a name or a parenthesis, found the end", ""),
        ("math.sin(x)", "write the function's name alone", "."),
        ("x if x > 0 else 0", "write condition ? a : b", "if"),
        ("0 < x < 1", "comparisons do not chain", "0 < x < 1"),
        ("x ? 1 : 2", "expected a comparison", "x"),
        ("min(x)", "min takes 2 arguments, got 1", "min(x)"),
        ("x + exp", "exp is a function", "exp"),
        ("sqrt(-1) * x", "is no number", "sqrt(-1)"),
        ("x; system(0)", "an expression has no semicolon", ";"),
        ("x\n + @", "found '@'", "@"),
        ("x\n\t+ sine(x)", "unknown function", "sine"),
    ],
)
def test_expression_errors_point_at_the_place(text: str, message: str, marked: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        jitact.define("swoosh", text)
    told, line, caret = str(caught.value).split("\n")
    assert told.startswith("swoosh, forward: ") and message in told
    assert line[caret.index("^") : caret.rindex("^") + 1] == marked and "\t" not in line


# What C++ would read differently: ints, octal numbers, adjacent signs, booleans in arithmetic.
CORNERS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("50000*50000*x", lambda x: 2.5e9 * x),
    ("65536*65536*x", lambda x: 2.0**32 * x),
    ("999999999*3*x", lambda x: 2999999997 * x),
    ("x*(50000*50000)", lambda x: 2.5e9 * x),
    ("x + 65536*65536*65536*65536", lambda x: x + 2.0**64),
    ("4294967296*4294967296*x", lambda x: 2.0**64 * x),
    ("99999999999999999999*x", lambda x: 1e20 * x),
    ("x * (x > 9007199254740993 ? 1 : 2)", lambda x: 2 * x),
    ("010*x", lambda x: 10 * x),
    ("08*x", lambda x: 8 * x),
    ("007.5*x", lambda x: 7.5 * x),
    ("1.e5*x + .5", lambda x: 1e5 * x + 0.5),
    ("5.*x + 1.E-2", lambda x: 5 * x + 0.01),
    ("1/2*x", lambda x: 0.5 * x),
    ("7/2/2*x", lambda x: 1.75 * x),
    ("x*(2/3)", lambda x: x * (2 / 3)),
    ("x*((x > 1)/2)", lambda x: x * ((x > 1) / 2)),
    ("x*((x > 1 ? 1 : 0)/2)", lambda x: x * ((x > 1) / 2)),
    ("(x > 1 ? 1 : 3)/(x > 2 ? 2 : 4) + x", lambda x: torch.where(x > 1, 1.0, 3.0) / torch.where(x > 2, 2.0, 4.0) + x),
    ("-(x > 1 ? 1 : 3)/2 + x", lambda x: torch.where(x > 1, -0.5, -1.5) + x),
    ("(x > 1 ? 50000 : 1)*(x > 1 ? 50000 : 1)*x", lambda x: torch.where(x > 1, 2.5e9, 1.0) * x),
    ("x > 1 ? 1 : 0.5", lambda x: torch.where(x > 1, 1.0, 0.5)),
    ("x > 1 ? x > 2 : 0.5", lambda x: torch.where(x > 1, (x > 2) * 1.0, 0.5)),
    ("x > 1 ? x > 2 : x > -2", lambda x: torch.where(x > 1, x > 2, x > -2) * 1.0),
    ("((x > 1) + (x > 2))/2 - (x > 0)", lambda x: ((x > 1) * 1.0 + (x > 2)) / 2 - (x > 0) * 1.0),
    ("(x > 1) == (x > 2)", lambda x: ((x > 1) == (x > 2)) * 1.0),
    ("!(x > 1) - x", lambda x: (x <= 1) * 1.0 - x),
    ("-(x > 1)", lambda x: (x > 1) * -1.0),
    ("x*min(x > 1, 2)", lambda x: x * (x > 1)),
    ("x*exp(x > 1 ? 1 : 0)", lambda x: x * (1 + (math.e - 1) * (x > 1).to(x))),
    ("max(1, 2)*min(3, 4)*x", lambda x: 6 * x),
    ("abs(-3)*sigmoid(0)*floor(2.5)*x", lambda x: 3 * x),
    ("clamp(5, 0, 3)*x + round(2.5) + rint(2.5)", lambda x: 3 * x + 5),
    ("pow(2, 31)*x", lambda x: 2.0**31 * x),
    ("pow(2, 64)*x", lambda x: 2.0**64 * x),
    ("pow(x, 2) + pow(x, 3)", lambda x: x * x + x * x * x),
    ("softplus(x) + softplus(x, 2) + softplus(x, 2, 1)", lambda x: F.softplus(x) + F.softplus(x, 2) + F.softplus(x, 2, 1)),
    ("pow(x + 1, 3) - pow(-x, 4)", lambda x: (x + 1) ** 3 - x**4),
    ("pow(x > 0 ? x : -2, 3)", lambda x: torch.where(x > 0, x, -2) ** 3),
    ("pow(2, x)", lambda x: 2.0**x),
    ("pow(x*x + 1, 1/2)", lambda x: (x * x + 1).sqrt()),
    ("pow(x*x + 1, -1)", lambda x: 1 / (x * x + 1)),
    ("sqrt(2/pi)*x", lambda x: math.sqrt(2 / math.pi) * x),
    ("x--1", lambda x: x + 1),
    ("2/(x*x + 1) - x/(x*x + 1)", lambda x: (2 - x) / (x * x + 1)),
    ("--x", lambda x: x),
    ("++x", lambda x: x),
    ("x---x", lambda x: x - x),
    ("x - - - 2", lambda x: x - 2),
    ("-(-3)*-x", lambda x: -3 * x),
    ("+(+x)*+2", lambda x: 2 * x),
    ("copysign(x, -0)", lambda x: -x.abs()),
    ("1 > 2 ? x : 1 < 2 && 3 != 4 ? 2*x : 0", lambda x: 2 * x),
    ("x > 0 || 1 > 2 ? x : 0", lambda x: x.clamp(min=0)),
    ("!(1 > 2)*x", lambda x: x),
    ("x*(1 > 0)/2", lambda x: x / 2),
    ("round(0.49999999999999994)*x + round(x)", lambda x: torch.sign(x) * (x.abs() + 0.5).floor()),
]


def cases(texts: Iterable[str]) -> str:
    """An expression that selects one of ``texts`` by the parameter ``which``, counted from 0."""
    *texts, last = texts
    return "".join(f"which == {i} ? {text} : " for i, text in enumerate(texts)) + last


def test_numbers_are_numbers_of_the_tensors_type() -> None:
    cls = jitact.define("corners", cases(text for text, _ in CORNERS), which=0.0)
    for i, (text, function) in enumerate(CORNERS):
        exact = function(X).double()  # of booleans and numbers alone, PyTorch makes float32
        for result in (cls(i)(X), Expression(text, ["x"])(X)):
            assert torch.allclose(result, exact, rtol=1e-13), text
        single = cls(i)(X.float())
        assert torch.allclose(single.double(), function(X.float().double()).double(), rtol=1e-5, atol=1e-6), text


@pytest.mark.parametrize("returns", ["Many<T,2>", "Many<T,2 >", "Many< T , 2>"])
def test_gradients_however_their_type_is_written(returns: str) -> None:
    file = "ELEMENTWISE T forward(T x, T g) { return x * g; }\n"
    file += f"ELEMENTWISE {returns} backward(T dy, T x, T g) {{ return {{dy * x, 1 - dy}}; }}"
    cls = jitact.define("spaced", source=file)
    assert cls.activation.source.signature.functions == {"forward", "backward"}
    x, g = X.clone().requires_grad_(), X.flip(0)
    assert torch.equal(torch.autograd.grad(cls()(x, g).sum(), x)[0], X)
    with pytest.raises(ValueError, match=r"line 2: backward must be declared as ELEMENTWISE"):
        jitact.define("spaced", source=file.replace(returns, "auto"))


@pytest.mark.parametrize("own", ["constexpr double pi = 3;", "#define pi 3.0"])
def test_names_that_a_file_defines_are_its_own(own: str) -> None:
    """Its one statement is no expression of the library's pi then, by which transforms would compute."""
    record = jitact.define("own_pi", source=f"{own}\nELEMENTWISE T forward(T x) {{ return pi * x; }}").activation
    assert record.expression is None
    assert torch.equal(jitact.own_pi(X), 3 * X) and torch.equal(torch.vmap(jitact.own_pi)(X), 3 * X)


def test_what_the_preprocessor_leaves_out_is_not_there() -> None:
    """A gradient that is switched off is derived, as if it were not written."""
    file = """ELEMENTWISE T forward(T x) { return x * x * x; }
    #if 0  // slower
    #ifdef __CUDACC__
    ELEMENTWISE T backward(T dy, T x) { return 7 * dy; }
    #endif
    #else
    ELEMENTWISE bool unused(T x) { return x > 0; }
    #endif
    #if 1
    #else
    ELEMENTWISE T backward_from_output(T dy, T y) { return 7 * dy; }
    #endif"""
    cls, x = jitact.define("cubed", source=file), X.clone().requires_grad_()
    assert cls.activation.source.signature.functions == {"forward"} and "unused" in signature.code(file)
    torch.testing.assert_close(torch.autograd.grad(cls()(x).sum(), x)[0], 3 * X**2)
    assert torch.autograd.gradgradcheck(cls(), x)
    with pytest.raises(ValueError, match=r"line 2: backward must be declared"):  # in either branch of what depends
        signature.read_signature("#ifdef FAST\nELEMENTWISE float backward(T dy, T x) { return dy; }\n#endif\n" + file)


BACKWARD = "ELEMENTWISE T backward(T dy, T x) { return dy; }"


@pytest.mark.parametrize(
    ("around", "is_there"),
    [
        ("#if false\n{}\n#endif", False),
        ("#if (0)\n{}\n#else\n#endif", False),
        ("#if 0\n#elif 0\n{}\n#endif", False),
        ("#if true\n#elif FAST\n{}\n#endif", False),
        ("#ifdef FAST\n#elif 1\n#else\n{}\n#endif", False),
        ("#if 0\n#elif FAST\n{}\n#endif", True),
        ("#if 0\n#if 1\n#endif\n#else\n{}\n#endif", True),
        ("#if 0 \\\n || 1\n{}\n#endif", True),
        ("#endif\n#else\n{}", True),
        ("// not so: \\\n{}", False),
        ("// so: \\ \\n\n{}", True),
        ("/* \" */ {} /* \" */", True),
        ('static_assert(sizeof(int), "{{ /* \\" //");\n{}', True),
        ('static_assert(sizeof(int), "\\\\"); /* " {} */', False),
        ("constexpr char kOpen = '{{', kQuote = '\\'', kDouble = '\"';\n{} // \"", True),
        ("constexpr int kMany = 1'000, kMore = 0x1'f; /* {} */ // '", False),
        ("constexpr auto kRaw = R\"x(\n#if 0\n)\" // {{ )x\";\n{}", True),
        ('constexpr auto kText = "{}";', False),
    ],
)
def test_what_is_code(around: str, is_there: bool) -> None:
    """Comments, strings and branches that are left out hold functions, brackets and marks of each other that are none."""
    file = "ELEMENTWISE T forward(T x) { return x * x; }\n" + around.format(BACKWARD)
    code = signature.code(file)
    assert signature.read_signature(file).functions == ({"forward", "backward"} if is_there else {"forward"})
    assert len(code) == len(file) and code.count("\n") == file.count("\n")


def test_what_a_string_says_tells_definitions_apart() -> None:
    assert signature.code('f("a, (b)"); // "c"') == 'f("a   b ");       '


def test_macros_end_with_their_file() -> None:
    """The kernels of second derivatives, which are made around a file, have variables of such names."""
    file = "#define a0 3\n#define dy 2\n#define slope_0 1\nELEMENTWISE T forward(T x, T g) { return a0 * x * x * sin(g); }"
    cls = jitact.define("with_macros", source=file)
    assert torch.autograd.gradgradcheck(cls(), (X.clone().requires_grad_(), X.flip(0).clone().requires_grad_()))


def test_arguments_may_have_names_of_python() -> None:
    file = "ELEMENTWISE T forward(T x) { return x * x; }\nELEMENTWISE T backward(T from, T in) { return 2 * from * in; }"
    x = X.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(jitact.define("kept_names", source=file)()(x).sum(), x)[0], 2 * X)


@pytest.mark.parametrize(
    ("body", "is_accepted"),
    [
        ("w = exp(w); b *= 2;", True),
        ("w = exp(w) * b;", False),
        ("const T e = exp(w); b = e; w = e;", False),
        ("if (w > 0) { w = b; }", False),
        ("swap(w, b);", False),
        ("xielu_::prepare(w, b);", True),
    ],
)
def test_prepare_changes_each_operand_by_itself(body: str, is_accepted: bool) -> None:
    """Sums for an operand are multiplied by the slope of what prepare makes of that operand, and by nothing else."""
    file = f"ELEMENTWISE void prepare(Channel<T>& w, Channel<T>& b) {{ {body} }}\n"
    file += "ELEMENTWISE T forward(T x, Channel<T> w, Channel<T> b) { return x * w + b; }"
    if is_accepted:
        assert signature.prepared(file) == 2 and signature.prepared(file.replace("Channel<T>", "float")) == 0
        return
    with pytest.raises(ValueError, match=r"line 1: prepare may only have statements operand = f\(that operand\), got '"):
        signature.read_signature(file)


def test_rows_behind_prepared_channels_are_refused() -> None:
    file = "ELEMENTWISE void prepare(Channel<T>& w) { w = exp(w); }\n"
    file += "ELEMENTWISE T forward(T x, Channel<T> w, Row<T> r) { return x * w * r; }"
    with pytest.raises(ValueError, match="behind: prepare transforms the last 1 of forward's channels and rows"):
        jitact.define("behind", source=file, w=jitact.Channel(one=True))


def test_small_powers_are_products(device: str) -> None:
    """The platform's pow is slow, most of all for negative numbers on a CPU, and rounds otherwise."""
    file = '#include "elementwise.cuh"\nELEMENTWISE T forward(T x) { return pow(x, 3) - pow(x, 1.5); }'
    cube, fourth = jitact.define("cube", "pow(x, 3)")(), jitact.define("fourth", "pow(x - 1, 4)")()
    x = torch.linspace(-9, 9, 4001, device=device)
    assert torch.equal(cube(x), x * x * x)
    square = (x - 1) * (x - 1)
    assert torch.equal(fourth(x), square * square)
    x = x.abs()
    torch.testing.assert_close(jitact.define("in_file", source=file)()(x), x**3 - x**1.5)  # 1.5 is not taken for an int


class Random:
    """Random expressions in ``x`` and ``a``, as texts, with NumPy functions of float64 that compute them.

    Only operations that are exact in float64 are used, so that results are bitwise equal whichever library computes them.
    """

    def __init__(self, choose: Callable) -> None:
        self.choose = choose

    def enclosed(self, node: tuple, least: int) -> str:
        """In parentheses if its precedence is below ``least``, and sometimes where they are not needed."""
        return f"({node[0]})" if node[2] < least or self.choose(range(8)) == 0 else node[0]

    def number(self, depth: int) -> tuple[str, Callable, int]:
        """Text, function, and the precedence of its operator, from 0 to 8."""
        kind = self.choose(
            ["name", "literal"] if depth == 0 else ["name", "literal", "sign", "truth", "call", "choice", *"+-*/" * 2]
        )
        if kind == "name":
            return self.choose([("x", lambda x, a: x, 8), ("a", lambda x, a: a, 8)])
        if kind == "literal":
            text = self.choose(["0", "1", "2", "3.", ".5", "1.5e1", "010", "65536", "999999999", "4294967296", "2e-3"])
            return text, lambda x, a: np.float64(text), 8
        if kind == "sign":
            sign, inner = self.choose("+-"), self.number(depth - 1)
            return f"{sign}{self.enclosed(inner, 7)}", lambda x, a: -inner[1](x, a) if sign == "-" else inner[1](x, a), 7
        if kind == "truth":
            text, function, level = self.truth(depth - 1)
            return (text, lambda x, a: np.float64(1) * function(x, a), level) if level == 7 else self.number(0)
        if kind == "call":
            return self.call(depth)
        if kind == "choice":
            condition, first, second = self.truth(depth - 1), self.number(depth - 1), self.number(depth - 1)
            text = f"{self.enclosed(condition, 1)} ? {first[0]} : {second[0]}"
            return text, lambda x, a: np.where(condition[1](x, a), first[1](x, a), second[1](x, a)), 0
        level, left = 5 if kind in "+-" else 6, self.number(depth - 1)
        right = self.number(depth - 1 if kind != "/" else 0)
        while kind == "/" and right[0] in ("x", "0"):  # PyTorch divides a number by a tensor in two rounded steps
            right = self.number(0)
        gap, operator = self.choose(["", " ", "\n "]), {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}[kind]
        text = f"{self.enclosed(left, level)}{gap}{kind}{gap}{self.enclosed(right, level + 1)}"
        return text, lambda x, a: operator(left[1](x, a), right[1](x, a)), level

    def call(self, depth: int) -> tuple[str, Callable, int]:
        name, arity, function = self.choose(
            [
                ("abs", 1, np.abs),
                ("floor", 1, np.floor),
                ("trunc", 1, np.trunc),
                ("copysign", 2, np.copysign),
                ("max", 2, lambda a, b: np.where((a > b) | np.isnan(a), a, b)),
                ("min", 2, lambda a, b: np.where((a < b) | np.isnan(a), a, b)),
            ]
        )
        given = [self.number(depth - 1) for _ in range(arity)]
        return f"{name}({', '.join(each[0] for each in given)})", lambda x, a: function(*(each[1](x, a) for each in given)), 8

    def truth(self, depth: int) -> tuple[str, Callable, int]:
        kind = self.choose(
            ["<", "<=", ">", ">=", "==", "!="] if depth <= 0 else ["<", "<=", ">", ">=", "==", "!=", "&&", "||", "!"]
        )
        if kind == "!":
            inner = self.truth(depth - 1)
            return f"!{self.enclosed(inner, 7)}", lambda x, a: np.logical_not(inner[1](x, a)), 7
        make, level = (
            (self.truth, 2 if kind == "&&" else 1) if kind in ("&&", "||") else (self.number, 4 if kind[0] in "<>" else 3)
        )
        left, right = make(max(depth - 1, 0)), make(max(depth - 1, 0))
        least = level if make == self.truth else 5
        operators = {
            "<": np.less,
            "<=": np.less_equal,
            ">": np.greater,
            ">=": np.greater_equal,
            "==": np.equal,
            "!=": np.not_equal,
        }
        operator = (operators | {"&&": np.logical_and, "||": np.logical_or})[kind]
        text = f"{self.enclosed(left, least)} {kind} {self.enclosed(right, least + 1)}"
        return text, lambda x, a: operator(left[1](x, a), right[1](x, a)), level


REFUSED = "no finite number|division by zero|of these numbers is no number"  # possible errors of constant subexpressions


def exact(function: Callable, x: Tensor, a: float) -> Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.broadcast_to(function(x.numpy(), np.float64(a)), x.shape).astype(np.float64))


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([0.0, -1.5, 3.0]))
def test_expressions_at_random(random: Any, a: float) -> None:
    text, function, _ = Random(random.choice).number(4)
    try:
        expression = Expression(text, ["x"], ["a"])
    except ExpressionError as error:
        assert re.search(REFUSED, error.message), text
        return
    wanted = exact(function, X, a)
    assert torch.equal(expression(X, a).nan_to_num(nan=7e77), wanted.nan_to_num(nan=7e77)), text
    again = Expression(expression.cpp, ["x"], ["a_"], of_kernel_file=True)  # the C++ translation, parsed again
    assert again.key == expression.key, text
    assert torch.equal(again(X, a).nan_to_num(nan=7e77), wanted.nan_to_num(nan=7e77)), text


def test_expressions_at_random_compiled() -> None:
    random, made = Random(random_of(10).choice), []
    while len(made) < 60:
        text, function, _ = random.number(4)
        with contextlib.suppress(ExpressionError):
            Expression(text, ["x"], ["a"])
            made.append((text, function))
    cls = jitact.define("at_random", cases(f"({text})" for text, _ in made), which=0.0, a=0.0)
    for i, (text, function) in enumerate(made):
        assert torch.allclose(cls(i, 3.0)(X), exact(function, X, 3.0), rtol=1e-12, equal_nan=True), text


@pytest.mark.parametrize("text", ["(x", "x +", "", "x x", "x > 0 ? x", "tanh(x"])
def test_unfinished_expressions(text: str) -> None:
    with pytest.raises(ExpressionError):
        Expression(text, ["x"])


def test_long_expressions_and_deep_ones() -> None:
    terms = [f"{i}.25 * sin({i} * x)" for i in range(440)]
    assert len(" + ".join(terms)) > 10_000
    long = Expression(" + ".join(terms), ["x"])
    assert torch.allclose(long(X), sum((i + 0.25) * (i * X).sin() for i in range(440)))
    deep = ["(" * 95 + "x" + ")" * 95, "-" * 98 + "x", "0 * x > 1 ? 1 : " * 95 + "x", "max(x, " * 95 + "x" + ")" * 95]
    for text in deep:
        assert torch.equal(Expression(text, ["x"])(X), X), text
    for text in ("(" * 5000 + "x" + ")" * 5000, "(" * 5000, "-" * 5000 + "x", "x > 0 ? 1 : " * 5000 + "x", "x" + " + x" * 5000):
        with pytest.raises(ExpressionError, match=r"nested more than 100 deep|more than 500 operations"):
            Expression(text, ["x"])


def _declared() -> set[str]:
    """The names of the functions that the headers define for kernel files, directly or by a macro."""
    names = re.compile(r"(?:JITACT_INLINE|friend) [\w<> ]*?\b(\w+)\(|^JITACT_\w+\((\w+)", re.MULTILINE)
    texts = [path.read_text() for path in source.DEVICE.glob("*.cuh")]
    return {name for text in texts for match in names.findall(text) for name in match if name}


def test_the_headers_have_every_function() -> None:
    assert set(FUNCTIONS) - _declared() == set()


def test_every_function_and_its_derived_gradient() -> None:
    calls = [f"{name}({', '.join(['x', '0.4', '0.9'][: function.arity])})" for name, function in FUNCTIONS.items()]
    calls = [call.replace("(x)", "(x + 1.5)") if call.startswith("acosh") else call for call in calls]
    weighted = [f"{i + 1} * {call}" for i, call in enumerate(sorted(calls))]
    cls = jitact.define("everything", " + ".join(weighted))
    x = torch.linspace(0.05, 0.85, 50, dtype=torch.float64)
    reference = cls.activation.reference
    assert torch.allclose(cls()(x), reference(x), rtol=1e-12)
    assert torch.allclose(gradient(cls(), x), gradient(reference, x), rtol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_calls_give_the_same_wherever_an_element_lies(dtype: torch.dtype) -> None:
    """Vectors of the platform's functions, of which tensors may end in the middle, are not mixed with calls for one element."""
    names = ("atan", "cbrt", "cos", "cosh", "erf", "exp2", "log1p", "log2", "sin", "sinh", "tan")
    text = " + ".join([*(f"{name}(x)" for name in names), "pow(x, 1.7)", "hypot(x, 0.4)", "atan2(x, 0.4)"])
    module = jitact.define("called", text)()
    x = torch.linspace(0.05, 7, 1500).to(dtype)
    y, dx = module(x), gradient(module, x)
    for start, stop in ((0, 1), (3, 4), (5, 22), (64, 1089), (1499, 1500)):
        part = x[start:stop]
        assert torch.equal(module(part), y[start:stop]) and torch.equal(gradient(module, part), dx[start:stop])
    apart = torch.stack([x, x], 1)[:, 0]
    assert torch.equal(module(apart), y) and torch.equal(gradient(module, x.flip(0)), dx.flip(0))


def test_whole_powers_at_zero_and_below() -> None:
    cls, x = jitact.define("powers", "pow(x, p)", p=2), torch.tensor([-2.5, -1, 0, 1, 3], dtype=torch.float64)
    for p in range(5):
        assert torch.allclose(cls(p)(x), x**p), p
        assert torch.allclose(gradient(cls(p), x), p * x ** max(p - 1, 0)), p
        assert torch.allclose(gradient(lambda x: gradient_of(cls(p), x), x), p * (p - 1) * x ** max(p - 2, 0)), p


# At points where one factor of the chain rule is not finite or undefined, and another has no derivative.
FINITE = ["pow(x, 2)", "pow(x, 3)", "pow(x, -1)", "pow(x, 0)", "pow(x, 1)", "pow(sin(x), 2)", "x * pow(x - 1, 2)",
          "pow(abs(x), 1.5)", "sqrt(relu(x))", "sqrt(max(x, 0))", "atan2(0, x)", "atan2(x, 0)", "2 * x", "hypot(x, 0)",
          "log(1 + max(x, -1))"]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("function", "slope", "low", "high"),
    [
        ("tanh", sech2, -40, 40),
        ("asin", lambda x: 1 / mp.sqrt(1 - x * x), -1, 1),
        ("acos", lambda x: -1 / mp.sqrt(1 - x * x), -1, 1),
        ("atanh", lambda x: 1 / (1 - x * x), -1, 1),
        ("acosh", lambda x: 1 / mp.sqrt(x * x - 1), 1, 9),
        ("x_minus_tanh", lambda x: mp.tanh(x) ** 2, -9, 9),
    ],
)
def test_slopes_are_exact_where_terms_cancel(function, slope, low: int, high: int, dtype: torch.dtype) -> None:
    """At the ends of ranges, and far from 0, of kernels and of the torch operations that replace them in torch.compile."""
    jitact.define("cancels", f"{function}(x)")
    near = low + 2.0 ** -torch.linspace(1, 22, 40, dtype=torch.float64)
    x = torch.cat([torch.linspace(low, high, 99, dtype=torch.float64)[1:-1], near, -near if low == -high else near]).to(dtype)
    x.requires_grad_()
    (of_kernel,) = torch.autograd.grad(jitact.cancels(x).sum(), x)
    of_torch = derivative(of_duals(functions(dtype, x.device))[function](Dual(x.detach(), 1)))
    exact = torch.tensor([float(slope(mp.mpf(value))) for value in x.tolist()], dtype=torch.float64)
    for found in (of_kernel, of_torch):
        assert ((found.double() - exact).abs() <= 5 * torch.finfo(dtype).eps * exact.abs()).all()


def test_gradients_beside_literals_are_pytorchs() -> None:
    together = " + ".join(FINITE)  # a function of x alone
    cls, alone = jitact.define("beside_literals", cases(FINITE), which=0.0), jitact.define("together", together)
    x = torch.tensor([-2, -1, -0.5, 0, 0.5, 1, 2, math.inf, math.nan])
    for dtype in (torch.float64, torch.float32):
        for text, module in [(together, alone()), *((text, cls(i)) for i, text in enumerate(FINITE))]:
            expected = gradient(Expression(text, ["x"]), x.to(dtype))
            for function in (module, torch.compile(module, backend="aot_eager")):
                torch.testing.assert_close(gradient(function, x.to(dtype)), expected, equal_nan=True, msg=f"{text}, {dtype}")
            torch._dynamo.reset()  # it would stop recompiling after eight functions


# Where a derivative is 0, but not in the neighbourhood.
FLAT = ["x * x * (x + 2)", "x * x / (x + 2)", "2 / (x * x + x + 1)", "sin(x * x) * exp(x)",
        "(x + 1) * (cos(x) - x * x) / (2 - x)", "pow(x * x + 1, 2) * x * x", "abs(x) * (x + 2)"]  # fmt: skip


def test_second_derivatives_where_a_slope_is_zero() -> None:
    cls, x = jitact.define("flat", cases(FLAT), which=0.0), torch.tensor([-1, 0, 0.5], dtype=torch.float64)
    for i, text in enumerate(FLAT):
        expected = gradient(lambda x, text=text: gradient_of(Expression(text, ["x"]), x), x)
        torch.testing.assert_close(gradient(lambda x, i=i: gradient_of(cls(i), x), x), expected, msg=text)


def test_mixed_second_derivatives_of_a_power() -> None:
    product = "T y = pow(x, n); for (int i = 0; i < 1; i++) y = y * (x + 1);"  # a loop is not an expression
    cls = jitact.define("power", source=f"ELEMENTWISE T forward(T x, T n) {{ {product} return y; }}")
    assert not cls.activation.has_reference
    given = [torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in ([3.0, 2, 0.5], [0.0, 1, 2])]
    assert torch.autograd.gradgradcheck(jitact.power, given)


def test_powers_of_zero() -> None:
    jitact.define("power", "pow(x, n)")
    given = [torch.zeros(4), torch.tensor([2.0, 1, 0, -1])]
    found, expected = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    for function, tensors in ((jitact.power, found), (torch.pow, expected)):
        function(*tensors).sum().backward()
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own.grad, theirs.grad)


# Definitions.


def test_derived_backward_of_every_order() -> None:
    cls = jitact.define("swoosh", "x * sin(x)")
    assert jitact.get("Swoosh") is cls and cls.__name__ == "Swoosh"
    assert torch.allclose(gradient(jitact.swoosh, X), X.sin() + X * X.cos())
    x = X.detach().requires_grad_()
    assert torch.autograd.gradgradcheck(cls(), x)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.allclose(cls()(X.to(dtype)).double(), X * X.sin(), atol=0.03)


def test_parameters_and_gradient_from_the_output() -> None:
    cls = jitact.define(
        "my_elu",
        "x > 0 ? x : a * expm1(x)",
        "x > 0 ? dy : dy * a * exp(x)",
        backward_from_output="y > 0 ? dy : dy * (y + a)",
        a=1.0,
    )
    assert cls.activation.saves == ("input", "output") and repr(cls(a=0.5)) == "MyElu(a=0.5)"
    x = (X + 0.013).requires_grad_()
    for save in cls.activation.saves:
        assert torch.allclose(cls(0.5, save=save)(x), torch.nn.functional.elu(x, 0.5))
        assert torch.autograd.gradcheck(cls(0.5, save=save), x) and torch.autograd.gradgradcheck(cls(0.5, save=save), x)
    far = torch.tensor([800.0], dtype=torch.float64)  # the branch not taken overflows
    assert gradient(lambda x: gradient_of(cls(), x), far) == 0


def gradient_of(f, x: Tensor) -> Tensor:
    return torch.autograd.grad(f(x).sum(), x, create_graph=True)[0]


def test_kernel_file_and_its_header() -> None:
    cls = jitact.define("soft", source=WITH_HELPER, a=2.0, formula="x / (1 + a |x|)")
    assert cls.activation.params == (("a", 2.0),) and not cls.activation.has_reference
    assert torch.allclose(cls()(X), X / (1 + 2 * X.abs()))
    assert torch.autograd.gradgradcheck(cls(), (X + 0.013).requires_grad_())
    headed = "// parameters: a = 2\n// keeps: input\n// formula: x / (1 + a |x|)\n" + WITH_HELPER
    assert jitact.define("soft", source=headed).activation.formula == "x / (1 + a |x|)"
    below = f'#include "elementwise.cuh"\n\n{headed}'  # the library's files have their comments here
    cls = jitact.define("soft", source=below)
    assert cls.activation.params == (("a", 2.0),) and cls.activation.layout.elements == 1
    bits = Path(jitact.kernels.__file__).with_name("relu.cu").read_text()
    assert jitact.define("my_relu", source=bits).activation.saves == ("bit", "input")


@pytest.mark.parametrize("activation", TABLE, ids=lambda activation: activation.name)
def test_takes_the_librarys_own_kernel_files(activation: Activation) -> None:
    path = Path(activation.source.path)
    cls = jitact.define(f"own_{activation.name}", source=path, **dict(activation.params), **activation.channels)
    record = cls.activation
    assert record.params == activation.params and set(activation.saves) <= set(record.saves)
    assert record.channels == activation.channels and record.learned == activation.learned
    assert record.source.path == str(path) and record.source.text == path.read_text()
    assert record.layout._replace(saves=activation.saves) == activation.layout  # a line of the table may override the default


@pytest.mark.slow
@pytest.mark.parametrize("name", ["leaky_relu", "threshold"])
def test_the_librarys_own_kernel_files_compute_the_same(name: str) -> None:
    activation = jitact.get(name).activation
    cls = jitact.define("own_file", source=activation.source.text, **dict(activation.params))
    for save in cls.activation.saves:
        assert torch.equal(cls(save=save)(X), jitact.get(name)()(X))
        assert torch.equal(gradient(cls(save=save), X), gradient(jitact.get(name)(), X))


def test_kernel_files_in_other_words() -> None:
    text = """#include "elementwise.cuh"
// ELEMENTWISE T backward(T dy, T x) { return 0; }
ELEMENTWISE T forward(const T v, [[maybe_unused]] T lambda_, T) { if (v > 0) { return v; } return lambda_ * v; }
ELEMENTWISE T backward(T g, T v, T const lambda_, T unused) { return v > 0 ? g : lambda_ * g; }
ELEMENTWISE bool keeps(T v, T, T) { return v > 0; }
ELEMENTWISE T backward_from_bit(T g, bool bit, T lambda_, T) { return bit ? g : lambda_ * g; }
"""
    cls = jitact.define("worded", source="\ufeff" + text.replace("\n", "\r\n"), lambda_=0.25, unused=1)
    assert torch.equal(cls()(X), torch.where(X > 0, X, 0.25 * X))
    assert cls.activation.params == (("lambda_", 0.25), ("unused", 1)) and cls.activation.saves == ("bit", "input")
    with pytest.raises(ValueError, match="line 3: no function has a name for parameter 2"):
        jitact.define("worded", source=text.replace("T unused", "T"), lambda_=0.25)
    with pytest.raises(ValueError, match=r"line 6: backward_from_bit takes mu, T where forward takes lambda_, T"):
        jitact.define("worded", source=text.replace("bool bit, T lambda_", "bool bit, T mu"), lambda_=0.25)
    # Parameters may be called differently in C++: a trailing underscore is not part of the parameter's name.
    cls = jitact.define("worded", source="ELEMENTWISE T forward(T x, T errno_) { return errno_ * x; }", errno=2.0)
    assert torch.equal(cls(errno=3)(X), 3 * X)


@pytest.mark.parametrize(
    ("body", "expression"),
    [
        ("x * sin(x)", True),
        ("x > 0 ? 1 : 0", True),
        ("T(0.5) * x * T(x > 0)", True),
        ("2 * 3 * x", True),
        ("0.5f * x", False),
        ("1 / 2 * x", False),
        ("50000 * 50000 * x", False),
        ("010 * x", False),
        ("x * ((x > 1 ? 1 : 0) / 2)", False),
    ],
)
def test_what_a_kernel_file_returns_is_an_expression_if_it_means_the_same(body: str, expression: bool) -> None:
    record = jitact.define("body", source=f"ELEMENTWISE T forward(T x) {{ return {body}; }}").activation
    assert record.has_reference == (record.expression is not None) == expression


@pytest.mark.parametrize("given", ["bytes", "words"])
def test_source_as_a_path(given: str, tmp_path: Path) -> None:
    path = tmp_path / "twice.cu"
    path.write_text("ELEMENTWISE T forward(T x) { return 2 * x; }\n")
    if given == "bytes":
        path.write_bytes(b"// caf\xe9\n" + path.read_bytes())
        with pytest.raises(ValueError, match=rf"{path} is not UTF-8 text: byte 6 is 0xe9"):
            jitact.define("twice", source=path)
        with pytest.raises(ValueError, match=rf"{path} is not UTF-8 text"):
            jitact.load_folder(tmp_path)
    else:
        assert torch.equal(jitact.define("twice", source=path)()(X), 2 * X)
        with pytest.raises(ValueError, match=r"twice: source= is a kernel file's text, and '.*twice\.cu' a path; give Path\('"):
            jitact.define("twice", source=str(path))


@pytest.mark.parametrize(
    ("source", "params", "message"),
    [
        ("int x;", {}, "defines no function ELEMENTWISE T forward"),
        (WITH_HELPER.replace("T a)", "Number<T> a)"), {}, "forward's parameters are a, those with a default none"),
        (WITH_HELPER, {"a": 1.0, "b": 2.0}, "forward's parameters are a, those with a default a, b"),
        ("ELEMENTWISE T forward(float x) { return x; }", {}, "line 1: forward must be declared as ELEMENTWISE T forward"),
        ("// parameters: a = much\n" + WITH_HELPER, {}, "'a = much' in the file's header"),
        ("// keeps: output\n" + WITH_HELPER, {"a": 1.0}, "backward cannot keep 'output'"),
        (WITH_HELPER + "ELEMENTWISE T backward(T dy, T x) { return dy; }", {"a": 1.0}, "line 8: backward takes no parameters"),
        (WITH_HELPER + "ELEMENTWISE T backward(T dy, T x, T a) { return 2; }", {"a": 1.0}, "line 8: backward does not use"),
        (
            WITH_HELPER + "ELEMENTWISE T backward(T, T x, T a) { T z = a; return z; }",
            {"a": 1.0},
            "line 8: backward does not use",
        ),
        (WITH_HELPER + "// a NUL: \0", {"a": 1.0}, "NUL character in line 8"),
        (WITH_HELPER + "// half a character: \ud800", {"a": 1.0}, "a character that is none in UTF-8"),
        ("// parameters: a = 1, a = 2\n" + WITH_HELPER, {}, "the file's header has parameter a twice"),
        ("// formula: x\n// formula: y\n" + WITH_HELPER, {"a": 1.0}, "the file's header has '// formula:' twice"),
    ],
)
def test_kernel_files_that_will_not_do(source: str, params: dict, message: str) -> None:
    with pytest.raises(ValueError, match=r"^soft: ") as caught:
        jitact.define("soft", source=source, **params)
    assert message in str(caught.value)


WORDS = ("define", "names", "identity", "exp", "dropout", "my_fast_math")  # the last is the name of a build
MODULES = ("plots", "bench", "report", "kernels", "magics", "measuring", "warnings")  # some not imported yet


@pytest.mark.parametrize(
    "name",
    ["relu", "ReLU", "swish", "a b", "class", "_x", "é", "n" * 101, *WORDS, *MODULES],
)
def test_names_that_will_not_do(name: str) -> None:
    with pytest.raises(ValueError, match=r"name|cannot be called"):
        jitact.define(name, "x")


def test_long_names() -> None:
    cls = jitact.define("n" * 100, "x * x + 1", "dy * 2 * x")
    assert torch.equal(gradient(lambda x: gradient_of(cls(), x), X), torch.full_like(X, 2))


OF_MODULES = ("to", "eval", "train", "half", "_modules", "state_dict", "extra_repr", "training", "activation", "Model", "self")


@pytest.mark.parametrize(
    "param",
    ["int", "exp", "x", "save", "dy", "pi", "lambda", "a__b", "minimum", "math", "é", "a b", *OF_MODULES],
)
def test_parameters_that_will_not_do(param: str) -> None:
    with pytest.raises(ValueError, match="a parameter cannot be called"):
        jitact.define("swoosh", "x", **{param: 1.0})
    with pytest.raises(TypeError, match="the default of a must be a number"):
        jitact.define("swoosh", "a * x", a="1")


def test_a_seed_beside_dropout_is_the_argument() -> None:
    for text, params in (("dropout(seed * x, 0.5)", {"seed": 1.0}), ("dropout(x, 0.5) + seed", {})):
        with pytest.raises(ValueError, match="swoosh: nothing can be called 'seed' where dropout is"):
            jitact.define("swoosh", text, **params)


@pytest.mark.parametrize("param", ["saves", "formula", "reference", "source"])
def test_parameters_that_are_arguments_of_define(param: str) -> None:
    with pytest.raises(TypeError, match=f"swoosh: {param}= is .*, not 1.0; a parameter cannot be called '{param}'"):
        jitact.define("swoosh", f"{param} * x", **{param: 1.0})
    text = f"// parameters: {param} = 1\nELEMENTWISE T forward(T x, T {param}) {{ return x * {param}; }}"
    with pytest.raises(ValueError, match=f"swoosh: a parameter cannot be called '{param}': it is an argument of define"):
        jitact.define("swoosh", source=text)


@pytest.mark.parametrize("param", ["backward", "backward_from_output"])
def test_parameters_that_are_called_like_a_gradient(param: str) -> None:
    says = f"swoosh: {param}= is an expression .*, not 1.0; a parameter cannot be called '{param}'"
    with pytest.raises(TypeError, match=says):
        jitact.define("swoosh", f"{param} * x", **{param: 1.0})


MACROS = ("errno", "NULL", "EOF", "NAN", "INFINITY", "M_PI", "INT_MAX", "stdin", "unix", "linux", "DBL_MAX", "JITACT_PARAMS")
VISIBLE = (
    "isnan",
    "decay",
    "select",
    "rest",
    "sincos",
    "size_t",
    "blockIdx",
    "Dual",
    "element",
    "mask",
    "bit",
    "w0",
    "seed",
    "op",
)
SIMILAR = ("x_", "a", "a_", "dy_", "T_", "forward_", "p", "None_", "args", "kwargs", "module", "params", "_a", "n" * 300)


def test_names_that_mean_something_in_cpp_are_parameters_all_the_same() -> None:
    names = MACROS + VISIBLE + SIMILAR
    values = dict(zip(names, range(1, 100), strict=False))
    text = " + ".join(f"{i + 1} * {name}" for i, name in enumerate(names))
    cls = jitact.define("named", f"x * x * ({text}) + x", backward_from_output="dy * (a + y)", **values)
    total = sum(value**2 for value in values.values())
    assert torch.allclose(cls()(X), X * X * total + X) and torch.allclose(cls(errno=2.0)(X), X * X * (total + 1) + X)
    assert cls(NULL=0.5).NULL == 0.5 and "M_PI=7.0" in repr(cls(M_PI=7.0))
    x = X.clone().requires_grad_()
    assert torch.autograd.gradgradcheck(cls(), x)  # the slope is a kernel of its own, with the same parameters
    assert torch.allclose(gradient(cls(save="output"), X), values["a"] + cls()(X))
    assert torch.allclose(cls.Model()(X), cls()(X))


def test_defaults_of_other_kinds_are_numbers_of_python(tmp_path: Path) -> None:
    given = {"a": np.float64(2), "b": np.float32(0.5), "c": np.int64(3), "d": 4, "e": math.inf, "f": -0.0, "g": Fraction(1, 4)}
    cls = jitact.define("numbers", "max(min(a * x + b, e), c - d) + f + g", **given)
    own = (("a", 2.0), ("b", 0.5), ("c", 3), ("d", 4), ("e", math.inf), ("f", -0.0), ("g", 0.25))
    assert repr(cls.activation.params) == repr(own)
    jitact.save_folder(tmp_path, "numbers")
    loaded = jitact.load_folder(tmp_path)["numbers"]
    assert repr(loaded.activation.params) == repr(tuple((name, float(value)) for name, value in own))
    with pytest.raises(TypeError, match="numbers: the default of a must be a number, got True"):
        jitact.define("numbers", "a * x", a=True)
    with pytest.raises(ValueError, match="numbers: the default of a is too large"):
        jitact.define("numbers", "a * x", a=10**400)


def test_folders_and_names_are_checked(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="save_folder: names are strings, by default all definitions; got 3"):
        jitact.save_folder(tmp_path, 3)
    with pytest.raises(TypeError, match="save_folder: folder is a path, got None"):
        jitact.save_folder(None)
    with pytest.raises(TypeError, match="load_folder: folder is a path, got None"):
        jitact.load_folder(None)


def test_what_backward_can_keep_as_one_word() -> None:
    assert jitact.define("swoosh", "x * sin(x)", saves="input").activation.saves == ("input",)
    cls = jitact.define("my_tanh", "tanh(x)", backward_from_output="dy * (1 - y * y)", saves="output")
    assert cls.activation.saves == ("output", "input")
    with pytest.raises(ValueError, match="backward cannot keep 'outputs' with the functions that there are, only input"):
        jitact.define("swoosh", "x * sin(x)", saves="outputs")


@pytest.mark.parametrize("saves", [[], "", ", ", iter(())])
def test_saves_that_list_nothing_are_told(saves) -> None:
    with pytest.raises(ValueError, match="swoosh: saves= lists nothing; leave it out"):
        jitact.define("swoosh", "x * sin(x)", saves=saves)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"backwards": "dy * cos(x)"}, "backward"),
        ({"refrence": torch.sin}, "reference"),
        ({"operand": ["x"]}, "operands"),
        ({"formular": "sin"}, "formula"),
    ],
)
def test_a_misspelled_argument_is_suggested(given: dict, meant: str) -> None:
    (misspelled,) = given
    with pytest.raises(TypeError, match=rf"swoosh: the default of {misspelled} must be .*; did you mean {meant}=\?"):
        jitact.define("swoosh", "sin(x)", **given)


def test_a_misspelled_source_and_a_default_that_is_no_number() -> None:
    with pytest.raises(TypeError, match=r"swoosh: the default of sorce .*; did you mean source=\?"):
        jitact.define("swoosh", sorce="ELEMENTWISE T forward(T x) { return x; }")
    with pytest.raises(TypeError, match=r"swoosh: the default of a must be a number, got '1'$"):
        jitact.define("swoosh", "a * x", a="1")


def test_arrays_are_no_defaults() -> None:
    with pytest.raises(TypeError, match=r"a must be a number, got array.*declared by jitact\.Channel"):
        jitact.define("swoosh", "a * x", a=np.ones(3))


def test_an_expression_is_text() -> None:
    with pytest.raises(TypeError, match=r"swoosh: expression= is text, such as 'x \* sigmoid\(x\)', not 3"):
        jitact.define("swoosh", 3)


def test_unused_parameters() -> None:
    with pytest.raises(ValueError, match="swoosh: b, c given as a parameter, but not used in forward"):
        jitact.define("swoosh", "a * x", a=1.0, b=2.0, c=3.0)
    cls = jitact.define("step", "x > 0 ? 1 : 0", "dy * k * sigmoid(k * x) * sigmoid(-k * x)", k=4.0)  # k only in backward
    s = torch.sigmoid(4 * X)
    assert torch.allclose(gradient(cls(), X), 4 * s * (1 - s))


@pytest.mark.parametrize("which", ["backward", "backward_from_output"])
def test_gradients_use_the_gradient_that_comes_in(which: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        jitact.define("bd", "x * 2", **{which: "  2 * 1"})
    told, line, caret = str(caught.value).split("\n")
    assert told == f"bd, {which}: does not use dy, the gradient that comes in; write dy * (2 * 1)"
    assert line == "    2 * 1" and caret == "    ^^^^^"


def test_references_that_do_not_fit() -> None:
    with pytest.raises(TypeError, match=r"swoosh: the reference must take \(x, a\): too many positional arguments"):
        jitact.define("swoosh", "a * x", reference=lambda x: x, a=1.0)
    with pytest.raises(TypeError, match=r"swoosh: the reference must take \(x\): missing a required argument: 'b'"):
        jitact.define("swoosh", "sin(x)", reference=lambda x, b: x)
    with pytest.raises(TypeError, match=r"swoosh: reference= is a function in PyTorch, not 'torch\.sin'"):
        jitact.define("swoosh", "sin(x)", reference="torch.sin")
    for reference in (torch.sin, torch.nn.functional.elu, lambda x, *params: x):
        assert jitact.define("swoosh", "sin(x)", reference=reference).activation.reference is reference


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(TypeError, match="one of the two"):
        jitact.define("swoosh")
    with pytest.raises(TypeError, match="leave out backward"):
        jitact.define("swoosh", source=WITH_HELPER, backward="dy")
    jitact.define("my_act", "x")
    with pytest.raises(ValueError, match="another spelling of 'my_act'"):
        jitact.define("myact", "x")


def test_compiler_errors_name_the_line() -> None:
    cls = jitact.define("wrong", source=WITH_HELPER.replace("abs(x)", "absolute(x)"), a=1.0)
    with pytest.raises(BuildError) as raised:
        cls()(X)
    first, error, line, mark, log = str(raised.value).splitlines()
    assert first == "wrong does not compile" and log.startswith("full log: ")
    assert re.match(r"<wrong>:3:55: error: .*absolute", error)
    assert line == "    3 | ELEMENTWISE T size(T x, T a) { return 1 + a * absolute(x); }"
    assert mark.index("^") == line.index("(x);") and "~" * len("absolute") + "^" in mark
    unclosed = jitact.define("wrong", source="// {\nELEMENTWISE T forward(T x) {\n  if (x > 0) { return x; }\n  return 0;\n")
    with pytest.raises(BuildError, match=r"^wrong does not compile\n<wrong>:2: error: a brace is not closed\n +2 \| ELEM"):
        unclosed()(X)
    nothing = jitact.define("wrong", source="ELEMENTWISE T forward(T x) {\n  if (x > 0) return x;\n}\n")
    with pytest.raises(BuildError, match=r"<wrong>:3:1: error: .*return-type"):
        nothing()(X)


def test_compiler_errors_of_files_and_gradients(tmp_path: Path) -> None:
    (tmp_path / "wrong.cu").write_text("ELEMENTWISE T forward(T x) {\n\treturn x +* 2;\n}\n")
    jitact.load_folder(tmp_path)
    with pytest.raises(BuildError, match=re.escape(f"{tmp_path}/wrong.cu:2:")) as raised:
        jitact.get("wrong")()(X)
    assert re.search(r"\n    2 | +return x \+\* 2;\n      \| +.*\^", str(raised.value))


def test_errors_without_an_excerpt_show_the_line() -> None:
    source = "a\n\tb c\n"
    shown = [
        ("k.cu:2:9: error: what", "    2 |         b c\n      |         ^"),
        ("k.cu(2): error: what", "    2 |         b c\nthe log"),  # nvcc gives no column
        ("k.cu:3:1: error: past the end", "error: past the end\nthe log"),
        ("other.cuh:1:1: error: elsewhere", "error: elsewhere\nthe log"),
    ]
    for output, expected in shown:
        assert expected in str(explain("k", output, "k.cu", None, source)), output


def test_defining_again_replaces() -> None:
    old = jitact.define("swoosh", "x * sin(x)")
    module = old()
    new = jitact.define("swoosh", "x * cos(x)")
    assert jitact.get("swoosh") is new and new is not old
    assert torch.allclose(module(X), X * X.sin()) and torch.allclose(jitact.swoosh(X), X * X.cos())
    assert type(pickle.loads(pickle.dumps(new()))) is new
    assert type(copy.deepcopy(new())) is new
    model = copy.deepcopy(torch.nn.Sequential(module, module))
    assert type(model[0]) is old and model[1] is model[0] and torch.equal(model[0](X), module(X))


def second_derivative(cls: type) -> None:
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(cls(save="output")(x).sum(), x, create_graph=True)
    slope.sum().backward()


def compiled(cls: type) -> None:
    torch.compile(cls(), fullgraph=True, backend="aot_eager")(X.clone().requires_grad_()).sum().backward()


def compiled_with_more(cls: type) -> None:
    module = torch.compile(cls(bias=61, dropout=0.5), fullgraph=True, backend="aot_eager")
    module(X.float().requires_grad_(), X.float()).sum().backward()


def test_files_of_the_library_are_taken_as_they_are() -> None:
    """With the defaults of their lines in the table; for a changed file, parameters must be declared."""
    for record in (*TABLE, *ROWS.values()):
        by_path = jitact.define("taken", source=Path(record.source.path)).activation
        by_text = jitact.define("taken", source=record.source.text).activation
        for taken in (by_path, by_text):
            assert taken.params == record.params and getattr(taken, "channels", None) == getattr(record, "channels", None)
    text = next(record.source.text for record in TABLE if record.name == "clamped_swiglu")
    assert dict(jitact.define("taken", source=text, limit=1.0).activation.params) == {"alpha": 1.702, "limit": 1.0, "beta": 1.0}
    with pytest.raises(ValueError, match="taken: forward's parameters are alpha, limit, beta, those") as raised:
        jitact.define("taken", source=f"{text}\n// more\n")
    what_to_pass = "define(..., alpha=1.0, limit=1.0, beta=1.0) or // parameters: alpha = 1.0, limit = 1.0, beta = 1.0"
    assert str(raised.value).endswith(what_to_pass)


FILE = """ELEMENTWISE T forward(T x) {
  T sum = 0;
  for (int k = 0; k < 3; k++) sum += x;
  return sum;
}
"""


@pytest.mark.parametrize("use", [SLOW(second_derivative), compiled, SLOW(compiled_with_more)], ids=lambda use: use.__name__)
def test_what_was_defined_again_is_collected(use: Callable[[type], None]) -> None:
    """The record too, with all that is derived from it."""

    def used() -> list[weakref.ref]:
        cls = jitact.define("swoosh", "3 * x + 0.5 * (x > 0 ? x : 0)", backward_from_output="y > 0 ? 3.5 * dy : 3 * dy")
        whole = jitact.define("whole", source=FILE)
        for each in (cls, whole) if use is not second_derivative else (cls,):
            use(each)
        return [weakref.ref(each) for of in (cls, whole) for each in (of, of.activation)]

    left = used()
    jitact.define("swoosh", "x * x")
    jitact.define("whole", "x * x")
    torch._dynamo.reset()
    if hasattr(inspect, "_shadowed_dict_from_mro_tuple"):  # Python 3.12.0 to 3.12.3 keep classes there
        inspect._shadowed_dict_from_mro_tuple.cache_clear()
    gc.collect()
    assert [each() for each in left] == [None] * 4


@pytest.mark.parametrize(
    ("how", "function"), [({"expression": "x * sin(x)"}, lambda x: x * x.sin()), SLOW({"source": FILE}, lambda x: 3 * x)]
)
def test_graphs_outlive_what_they_are_of(how: dict[str, str], function: Callable[[Tensor], Tensor]) -> None:
    """A graph that calls an activation's operator keeps working after its name is redefined and its record collected."""

    def exported() -> tuple[torch.nn.Module, weakref.ref]:
        cls = jitact.define("swoosh", **how)
        return torch.export.export(torch.nn.Sequential(cls()), (torch.ones(61),)).module(), weakref.ref(cls.activation)

    for _ in range(2):  # the second time, the existing operator is found by its kernel
        program, record = exported()
        jitact.define("swoosh", "x * x")
        gc.collect()
        assert record() is None
        x, wide = X.float().requires_grad_(), X.clone().requires_grad_()
        y, exact = program(x), function(wide)
        torch.testing.assert_close(y.double(), exact, atol=1e-6, rtol=1e-6)
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (slope,) = torch.autograd.grad(exact.sum(), wide, create_graph=True)
        torch.testing.assert_close(dx.double(), slope, atol=1e-5, rtol=1e-5)
        assert dx.requires_grad


def test_pickles_of_what_was_defined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    old = jitact.define("swoosh", "x * sin(a * x)", a=2.0)
    saved = pickle.dumps(torch.nn.Sequential(old(3.0)))
    before = b"\x80\x04" + b"cjitact.activations\n_revive\nX\x06\x00\x00\x00swoosh\x85R."  # the old format: the name alone
    assert type(pickle.loads(before)) is old
    new = jitact.define("swoosh", "x * cos(b * x)", b=1.0)
    assert type(pickle.loads(before)) is new
    for model in (pickle.loads(saved), copy.copy(pickle.loads(saved))):  # the old definition is known in this process
        assert type(model[0]) is old
        torch.testing.assert_close(model[0](X), X * (3 * X).sin(), rtol=1e-14, atol=1e-15)
    assert type(copy.copy(old())) is old
    monkeypatch.setattr(modules, "_made", WeakValueDictionary({("swoosh", new.activation.fingerprint): new}))  # another process
    with pytest.raises(LookupError) as caught:
        pickle.loads(saved)
    told = "swoosh(x, a) = x * sin(a * x), here swoosh(x, b) = x * cos(b * x); define it as it was before loading"
    assert told in str(caught.value)
    again = jitact.define("swoosh", "x*sin((a*x))", a=1.0)  # the same formula with another spelling and another default
    model = pickle.loads(saved)
    assert type(model[0]) is again
    torch.testing.assert_close(model[0](X), X * (3 * X).sin(), rtol=1e-14, atol=1e-15)
    model.load_state_dict(torch.nn.Sequential(new()).state_dict())
    monkeypatch.setattr(modules, "_made", WeakValueDictionary())
    with pytest.raises(
        LookupError, match=r"'swoosh' is not defined in this process; .*\(not under if __name__ == '__main__'\), or with"
    ):
        pickle.loads(saved.replace(again.activation.fingerprint.encode(), b"0" * 16))


def test_pickles_of_the_librarys_own_name_them_alone() -> None:
    assert jitact.get("elu")(2.0).__reduce__()[1] == ("elu",)
    assert torch.equal(pickle.loads(pickle.dumps(jitact.get("elu")(2.0)))(X), jitact.get("elu")(2.0)(X))


@pytest.mark.parametrize("name", ["tensor", "any", "activation_module"])
def test_classes_pickle_whatever_they_are_called(name: str) -> None:
    """Also if the name is that of something that their module imports."""
    cls = jitact.define(name, "2 * x")
    for each in (cls, cls.Model):
        assert pickle.loads(pickle.dumps(each)) is each


def test_names_with_capitals_are_functions_too() -> None:
    cls = jitact.define("Swoosh", "x * sin(x)")
    assert torch.equal(jitact.Swoosh(X), cls()(X)) and jitact.get("Swoosh") is cls
    names: dict = {}
    exec("from jitact import *", names)
    assert names["Swoosh"] is jitact.Swoosh
    with pytest.raises(AttributeError, match=r"did you mean jitact\.relu, the function"):
        _ = jitact.ReLU


@pytest.mark.parametrize("name", ["device", "dtype"])
def test_parameters_are_not_called_as_what_modules_take(name: str) -> None:
    with pytest.raises(ValueError, match=f"odd: a parameter cannot be called {name!r}: it is an argument of modules"):
        jitact.define("odd", f"silu(x) * {name}", **{name: 1.5})


def test_fingerprints_tell_formulas_and_parameters(tmp_path: Path) -> None:
    def fingerprint(*args: str, **kwargs: Any) -> str:
        return jitact.define("swoosh", *args, **kwargs).activation.fingerprint

    one = fingerprint("x * sin(a * x) + 1/2", a=1.0)
    assert one == fingerprint("x*sin(a*x)\n  + (0.50)", a=7.0, formula="x sin(a x) + 1/2", reference=lambda x, a: x)
    others = [
        fingerprint("x * sin(a * x) + 2", a=1.0),
        fingerprint("x * sin(b * x) + 1/2", b=1.0),
        fingerprint("x * sin(a * x) + 1/2", "dy * a", a=1.0),
        fingerprint("a * sin(a * x) + 1/2", a=1.0),
        fingerprint("x * sin(a * x + 1/2)", a=1.0),
        fingerprint(source=WITH_HELPER, a=1.0),
        fingerprint(source=WITH_HELPER.replace("1 + a", "2 + a"), a=1.0),
    ]
    assert len({one, *others}) == 8
    assert fingerprint(source=f"// a comment\n{WITH_HELPER}", a=1.0) == fingerprint(source=WITH_HELPER, a=1.0)
    written = [
        jitact.define("first", "x > 0 && 1/3 < a ? -0 * x : --x * (x > 1) - (x > 2 ? 1 : 2)", "dy * 65536 * 65536 * a", a=-1.5),
        jitact.define("second", source=WITH_HELPER, a=2.0),
    ]
    jitact.save_folder(tmp_path, ["first", "second"])
    loaded = jitact.load_folder(tmp_path)
    for cls in written:
        assert loaded[cls.activation.name].activation.fingerprint == cls.activation.fingerprint


@pytest.fixture
def eager_switching():
    """Switches between threads every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads(eager_switching: None) -> None:
    formulas = [f"x * {i}" for i in range(8)]

    def define(i: int) -> None:
        for _ in range(60):
            cls = jitact.define("same", formulas[i])
            assert cls.activation.formula == formulas[i]
            assert "same" in jitact.names() and jitact.same.__name__ == "same" and len(jitact.REGISTRY.items()) > 30
            jitact.define(f"own_{i}", formulas[i])
            registry.unregister(f"own_{i}")
            with pytest.raises(KeyError, match="known names are"):
                jitact.get("smae_")

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(define, i) for i in range(8)]:
            done.result()
    assert jitact.same(X).equal(jitact.get("same")()(X))  # the function belongs to the class


def test_compiled_by_torch() -> None:
    cls = jitact.define("swoosh", "x * sin(x)")
    compiled = torch.compile(cls(), fullgraph=True, backend="aot_eager")
    assert torch.allclose(gradient(compiled, X), X.sin() + X * X.cos())


# Folders.


def test_folders(tmp_path: Path) -> None:
    first = jitact.define("snake2", "x + pow(sin(a * x), 2) / a", saves=["input"], formula="x + sin(a x)^2 / a", a=2.5)
    second = jitact.define("soft", source=WITH_HELPER, a=2.0)
    third = jitact.define("my_elu", "x > 0 ? x : expm1(x)", backward_from_output="y > 0 ? dy : dy * (y + 1)", saves=["output"])
    paths = jitact.save_folder(tmp_path)
    assert sorted(path.name for path in paths) == ["my_elu.cu", "snake2.cu", "soft.cu"]
    assert (
        paths[0].read_text().startswith("// activation: snake2\n// parameters: a = 2.5\n// keeps: input\n// formula: x + sin")
    )
    loaded = jitact.load_folder(tmp_path)
    for old in (first, second, third):
        new = loaded[old.activation.name]
        assert jitact.get(old.activation.name) is new is not old
        for field in ("params", "saves", "formula", "functions", "has_reference"):
            assert getattr(new.activation, field) == getattr(old.activation, field)
    assert torch.allclose(loaded["snake2"](a=1.5)(X), X + (1.5 * X).sin() ** 2 / 1.5)
    jitact.save_folder(tmp_path / "one", ["soft"])
    text = (tmp_path / "one" / "soft.cu").read_text()
    assert text == (tmp_path / "soft.cu").read_text() and text.count("// parameters") == 1


def test_folders_hold_what_a_definition_was_made_with(tmp_path: Path) -> None:
    """Or none is written, where that is defined otherwise by now."""
    jitact.define("thrice", "x * 3")
    jitact.define("thrice_more", "thrice(x) + 1")
    assert len(jitact.save_folder(tmp_path, "thrice_more")) == 2
    jitact.define("thrice", "x * 5")
    torch.testing.assert_close(jitact.thrice_more(X), X * 3 + 1)
    with pytest.raises(ValueError, match="thrice_more uses thrice, which has been defined again since"):
        jitact.save_folder(tmp_path)
    assert jitact.load_folder(tmp_path).keys() == {"thrice", "thrice_more"} and torch.equal(jitact.thrice(X), X * 3)
    jitact.define("thrice", "thrice(x) + 1")
    with pytest.raises(ValueError, match="thrice uses an earlier definition of that name; give one of the two another name"):
        jitact.save_folder(tmp_path, "thrice")


def test_names_of_random_numbers_leave_out_those_of_operands() -> None:
    cls = jitact.define("drawn_beside", "u1 * x + dropout(x, 0.5) + dropout(u2, 0.25)")
    assert cls.activation.layout.tensors == ("x", "u1", "u2")
    torch.testing.assert_close(jitact.get("drawn_beside")().eval()(X, u1=X, u2=X), X * X + 2 * X)
    jitact.define("drawn_beside", "u1 * x + dropout(x, 0.5)", u1=jitact.Channel(init=2.0, one=True))
    torch.testing.assert_close(jitact.get("drawn_beside")().eval()(X).detach(), 3 * X)


def test_folders_that_will_not_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        jitact.load_folder(tmp_path / "none")
    (tmp_path / "a.cu").write_text("ELEMENTWISE T forward(T x) { return x; }\n")
    (tmp_path / "b.cu").write_text("// activation: relu\nELEMENTWISE T forward(T x) { return x; }\n")
    with pytest.raises(ValueError, match=r"b\.cu: 'relu' names relu"):
        jitact.load_folder(tmp_path)
    assert "a" not in jitact.names()
    with pytest.raises(ValueError, match="one of jitact's own"):
        jitact.save_folder(tmp_path, ["relu"])


@pytest.mark.parametrize(
    "formula",
    [
        "x\n+ 1",
        SLOW("x\r+ 1\u2028\x85\x0b"),
        SLOW("x\0"),
        SLOW('x """+ 1'),
        SLOW('"x"'),
        SLOW('"x'),
        SLOW(" x "),
        "x \\",
        SLOW("\\frac{x}{2}"),
        SLOW("é ≥ 0 🙂"),
        "*/ x /*",
        SLOW("??/"),
    ],
    ids=ascii,
)
def test_formulas_survive_a_folder(formula: str, tmp_path: Path) -> None:
    cls = jitact.define("told", "x * 0.5", formula=formula)
    (path,) = jitact.save_folder(tmp_path, ["told"])
    assert path.read_bytes().count(b"\n") == 7  # three fields, an include, a function, and blank lines between
    loaded = jitact.load_folder(tmp_path)["told"]
    assert loaded.activation.formula == formula and loaded.activation.fingerprint == cls.activation.fingerprint
    assert torch.equal(loaded()(X), X * 0.5)


def test_formulas_that_no_file_could_hold() -> None:
    with pytest.raises(ValueError, match="told: formula= has a character that is none in UTF-8"):
        jitact.define("told", "x * 0.5", formula="\ud800")


def test_two_files_of_one_name(tmp_path: Path) -> None:
    text = "// activation: {}\nELEMENTWISE T forward(T x) {{ return x; }}\n"
    for first, second in (("twice", "twice"), ("my_act", "myAct")):
        (tmp_path / "a.cu").write_text(text.format(first))
        (tmp_path / "b.cu").write_text(text.format(second))
        with pytest.raises(ValueError, match=rf"{tmp_path}/a\.cu and {tmp_path}/b\.cu both define '{second}'"):
            jitact.load_folder(tmp_path)
        assert first not in jitact.names()


def test_one_name_is_no_list_of_letters(tmp_path: Path) -> None:
    jitact.define("swoosh", "x * sin(x)")
    assert jitact.save_folder(tmp_path, "swoosh") == [tmp_path / "swoosh.cu"]


def test_a_file_of_a_folder_is_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may load the folder, or save to it, at any moment, and the disk may be full."""
    jitact.define("swoosh", "x * sin(x)")
    (path,) = jitact.save_folder(tmp_path / "definitions", "swoosh")
    path.rename(tmp_path / "elsewhere.cu")
    path.symlink_to(tmp_path / "elsewhere.cu")
    before, replace = path.read_text(), os.replace

    def fill(*paths: Path) -> None:
        assert path.read_text() == before and set(jitact.load_folder(path.parent)) == {"swoosh"}
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    jitact.define("swoosh", "x * cos(x)")
    monkeypatch.setattr(os, "replace", fill)
    with pytest.raises(OSError, match="No space left"):
        jitact.save_folder(path.parent, "swoosh")
    assert path.read_text() == before and list(path.parent.iterdir()) == [path] and len(list(tmp_path.iterdir())) == 2
    jitact.define("swoosh", "x * cos(x)")
    monkeypatch.setattr(os, "replace", replace)
    jitact.save_folder(path.parent, "swoosh")
    assert path.is_symlink() and "cos(x)" in path.read_text()


# Checks.


def test_check_passes(capsys: pytest.CaptureFixture) -> None:
    result = jitact.check(jitact.define("swoosh", "x * sin(x)"))
    out = capsys.readouterr().out
    assert result and len(result.lines) == 4 and out.count(" pass") == 4 and "against PyTorch" in out
    assert jitact.check("softsign", dtypes=[torch.bfloat16])
    assert "gelu_tanh" in jitact.check(jitact.get("gelu")("tanh"), dtypes=[torch.float64]).title
    assert jitact.check(jitact.get("prelu")(init=0.7), dtypes=[torch.float32])
    assert len(jitact.check(jitact.get("relu")(), low=-math.inf, high=math.inf, dtypes=[torch.float16]).lines) == 2


@pytest.mark.parametrize(
    ("backward", "why"),
    [
        SLOW("dy * (sin(x) - x * cos(x))", "a sign"),
        SLOW("dy * sin(x) + x * cos(x)", "not linear in dy"),
        ("dy * (sin(x) + 1.001 * x * cos(x))", "a tenth of a percent"),
    ],
)
def test_check_rejects(backward: str, why: str, capsys: pytest.CaptureFixture) -> None:
    result = jitact.check(jitact.define("swoosh", "x * sin(x)", backward), dtypes=[torch.float32])
    assert not result, why
    out = capsys.readouterr().out
    assert "FAIL" in out and "gradient at x = " in out and "inputs are wrong" in out


def test_check_rejects_a_wrong_forward() -> None:
    assert not jitact.check(jitact.define("swoosh", "x * sin(x)", reference=lambda x: x * torch.cos(x)), dtypes=[torch.float64])


def test_check_without_a_reference(capsys: pytest.CaptureFixture) -> None:
    assert jitact.check(jitact.define("soft", source=WITH_HELPER, a=2.0))
    assert "finite differences" in capsys.readouterr().out
    wrong = WITH_HELPER + "\nELEMENTWISE T backward(T dy, T x, T a) { return dy / size(x, a); }\n"
    assert not jitact.check(jitact.define("soft", source=wrong, a=2.0), dtypes=[torch.float64])


def test_check_tells_lost_digits(capsys: pytest.CaptureFixture) -> None:
    assert jitact.check(jitact.define("cancelling", "x - tanh(x)"), dtypes=[torch.float32])
    assert "pass, but loses digits" in capsys.readouterr().out


def test_definitions_are_records() -> None:
    record = jitact.define("swoosh", "x * sin(x)").activation
    assert isinstance(record, Definition) and record.formula == "x * sin(x)"
    model = jitact.get("swoosh").Model()
    assert torch.equal(model(X), X * X.sin())
