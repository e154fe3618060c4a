"""Kernel files read as torch operations: the same maths that is compiled, for a compiler that fuses it with its neighbours.

What is read here is arithmetic: functions marked ``ELEMENTWISE``, which declare, assign and end by returning; ``#define`` of a
name alone; the branches of ``#ifdef``. The functions of math.cuh that they call are given, as torch operations. Each part of an
expression has the type that C++ gives it, on which depends what is computed: ``(x > 0) + (x > 1)`` is an int, ``T`` beside a
literal is ``T``. Any other text, and what would be no simple operation of torch, is no formula, and stays a kernel.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Mapping
from ctypes import c_float
from dataclasses import dataclass
from typing import NoReturn

from ..definitions.signs import ARITHMETIC, BINDING, COMPARISONS
from ..kernels.loader.signature import code

__all__ = ["Unreadable", "read", "split"]


class Unreadable(ValueError):
    """A kernel file, or something in it, that is more than arithmetic."""


Types = Mapping[str, str]
"""Of a function's arguments, by their names in Python and in order, then of what it returns."""

_RETURNS = r"void|bool|T|Many<T,\s*\d+>"
_DECLARED = re.compile(_RETURNS)
_FUNCTION = re.compile(rf"\bELEMENTWISE\s+({_RETURNS})\s+(\w+)\s*\(([^()]*)\)\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}")
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+(.*)$", re.MULTILINE)
_IFDEF = re.compile(
    r"^[ \t]*#[ \t]*ifdef[ \t]+(\w+)[ \t]*\n(.*?)(?:^[ \t]*#[ \t]*else[ \t]*\n(.*?))?^[ \t]*#[ \t]*endif[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
_OF_BUILDS = ("JITACT_FAST_MATH", "JITACT_UNFUSED")  # what a build defines or not, wherever it runs
_DIRECTIVE = re.compile(r"^[ \t]*#(?![ \t]*define\b)", re.MULTILINE)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"(?:elementwise|gated|capped)\.cuh"[ \t]*$', re.MULTILINE)
_WORD = re.compile(r"\.?\d(?:[eEpP][-+]|[\w.'])*|[A-Za-z_]\w*")  # a number, of which no part is a name; or a name
_ARGUMENT = re.compile(r"(?:\[\[\w+\]\]\s*)?(?:const\s+)?(bool|T|(?:Number|Channel|Row)<T>)\s*(&?)\s*(\w*)")
_DECLARATION = re.compile(r"(?:const\s+)?(T|bool|auto)\s+(.*)", re.DOTALL)
_TOKEN = re.compile(
    r"\s*(?:(?P<hex>0[xX][\da-fA-F]*\.?[\da-fA-F]*[pP][-+]?\d+)(?![\w.])"
    r"|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?![\w.])"
    r"|(?P<name>[A-Za-z_]\w*(?:::\w+)?)(?P<of_T><T>(?=\s*\())?|(?P<sign>&&|\|\||[<>=!]=|\.of\[\d+\]|[-+*/<>!?:(),]))"
)
_IN_PYTHON = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
_TRUTHS = {"true": True, "false": False}
_RANK = ("bool", "int", "double", "T")  # of two types, the later one is that of what both make
_LARGEST = 2**31  # of an int, less one

_BOOL_ARGUMENTS = {("select", 3): 0, ("times_sigmoid", 4): 1}  # places, by name and number of arguments; others are numbers
_BOOL_RESULTS = ("isnan",)


@dataclass(frozen=True)
class _Value:
    """A part of an expression, as Python has it.

    Attributes:
        tree: how it is computed.
        type: that in C++: bool, int, double, or T, which several results are, too.
        known: its value, if it is made of literals alone.
        arms: of ``?:``, by which it is converted, as each of them is exact: the condition and two values.
    """

    tree: ast.expr
    type: str
    known: float | None = None
    arms: tuple[ast.expr, _Value, _Value] | None = None


def read(
    text: str, functions: Mapping[str, Callable], defined: Collection[str] = (), *, gradients: bool = True
) -> dict[str, Callable]:
    """The functions of a kernel file by name, of tensors, and of numbers where those stand for operands.

    A function of several results returns a tuple, and ``prepare`` one of its arguments as it leaves them.

    Args:
        text: the kernel file's.
        functions: what it may call, also ``silu_::forward``; and what operators become, as ``functions.py`` names it.
        defined: names for which ``#ifdef`` holds.
        gradients: whether those functions are wanted that give gradients.

    Raises:
        Unreadable: there is more in it than arithmetic.
    """
    if "\\\n" in text:
        _refuse("a line that goes on in the next")
    text = _IFDEF.sub(lambda branch: _branch(branch, defined), code(text))
    macros = [(match.start(), *match.groups()) for match in _DEFINE.finditer(text)]
    rest = _INCLUDE.sub("", _DEFINE.sub("", _FUNCTION.sub("", text))).strip()
    if rest:
        _refuse(f"{rest.splitlines()[0]!r} is none of a kernel file's functions")
    matches = [match for match in _FUNCTION.finditer(text) if gradients or not match[2].startswith("backward")]
    own = [match[2] for match in matches]
    for name in own:
        if name in functions or own.count(name) > 1:
            _refuse(f"there are several functions {name}")  # which is called, C++ finds by their arguments
    known = {name: _types(function) for name, function in functions.items()}
    made = {_in_python(name): function for name, function in functions.items()}
    try:
        trees = []
        for match in matches:
            here = {name: body for start, name, body in macros if start < match.start()}
            returns, name, declared, body = match.groups()
            arguments = _arguments(name, _expanded(declared, here))
            known[name] = {**{each: type_ for each, type_, _ in arguments}, "return": returns}
            trees.append((returns, name, arguments, _expanded(body, here)))
        tree = ast.Module([_function(*each, known) for each in trees], [])
        exec(compile(ast.fix_missing_locations(tree), "<kernel file>", "exec", dont_inherit=True), made)
    except RecursionError:
        _refuse("an expression is nested too deep")
    return {name: made[name] for name in own}


def _refuse(why: str) -> NoReturn:
    raise Unreadable(why)


def _types(function: Callable) -> Types | None:
    """What a function of a kernel file was declared to take and to return; None of any other function."""
    types = getattr(function, "__annotations__", {})
    return types if _DECLARED.fullmatch(types.get("return", "")) else None


def _branch(branch: re.Match[str], defined: Collection[str]) -> str:
    """What is left of an ``#ifdef``."""
    if branch[1] not in _OF_BUILDS:
        _refuse(f"whether {branch[1]} is defined is not known here")
    for each in (branch[2], branch[3] or ""):
        if _DIRECTIVE.search(each):
            _refuse(f"#ifdef {branch[1]} has other branches in it")
    return (branch[2] if branch[1] in defined else branch[3]) or ""


def _expanded(text: str, macros: Mapping[str, str], within: tuple[str, ...] = ()) -> str:
    """A text as the preprocessor leaves it, which knows no parentheses but those that are written."""

    def word(match: re.Match[str]) -> str:
        name = match[0]
        if name not in macros or name in within:
            return name
        return f" {_expanded(macros[name], macros, (*within, name))} "

    return _WORD.sub(word, text)


def _arguments(name: str, declared: str) -> list[tuple[str, str, str]]:
    """What a function takes: names in Python, types, and names in the file."""
    found = []
    for k, argument in enumerate(declared.split(",")):
        match = _ARGUMENT.fullmatch(argument.strip()) or _refuse(f"{name}: {argument.strip()!r} is no argument that is known")
        if bool(match[2]) != (name == "prepare"):
            _refuse(f"{name} changes what it is called with" if match[2] else "prepare takes what it changes")
        found.append((_variable(match[3] or f"{k}"), "bool" if match[1] == "bool" else "T", match[3]))
    return found


def _function(
    returns: str, name: str, arguments: list[tuple[str, str, str]], body: str, known: Mapping[str, Types | None]
) -> ast.FunctionDef:
    """A function as Python has it."""
    scope = {in_file: type_ for _, type_, in_file in arguments if in_file}  # and what is declared on the way
    made: list[ast.stmt] = []
    for text in filter(None, map(str.strip, split(body, ";"))):
        if made and isinstance(made[-1], ast.Return):
            _refuse(f"{name} goes on after returning")
        made += _statements(text, lambda expression: _Expression(expression, known, scope).whole(), scope, returns)
    if name == "prepare":
        made.append(ast.Return(_tuple([ast.Name(each, ast.Load()) for each, _, _ in arguments])))
    if not made or not isinstance(made[-1], ast.Return):
        _refuse(f"{name} returns nothing")
    taken = [ast.arg(each, ast.Constant(type_)) for each, type_, _ in arguments]
    function = ast.parse(f"def {name}(): pass").body[0]
    function.args.args, function.returns, function.body = taken, ast.Constant(returns), made
    return function


def _statements(text: str, expression: Callable[[str], _Value], scope: dict[str, str], returns: str) -> list[ast.stmt]:
    """``return ...``, a declaration of one or several names, an assignment, or a call of another file's ``prepare``."""
    returned = re.fullmatch(r"return\b\s*(.*)", text, re.DOTALL)
    if returned:
        return [ast.Return(_returned(returned[1], expression, returns))]
    prepared = re.fullmatch(r"\w+_::prepare\(([\w\s,]+)\)", text)
    if prepared:  # which changes its arguments
        names = [ast.Name(_variable(each.strip()), ast.Store()) for each in split(prepared[1], ",")]
        return [ast.Assign([ast.Tuple(names, ast.Store())], expression(text).tree)]
    declared = _DECLARATION.fullmatch(text)
    made = []
    for each in split(declared[2], ",") if declared else [text]:
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=(?!=)(.*)", each, re.DOTALL)
        if not match or bool(declared) == (match[1] in scope):
            _refuse(f"{text!r} is neither a declaration with a value nor an assignment")
        value = expression(match[2])
        type_ = declared[1] if declared else scope[match[1]]
        value = value if type_ == "auto" else _as(type_, value)
        scope[match[1]] = value.type
        made.append(ast.Assign([ast.Name(_variable(match[1]), ast.Store())], value.tree))
    return made


def _returned(text: str, expression: Callable[[str], _Value], returns: str) -> ast.expr:
    """What a function gives."""
    braced = re.fullmatch(r"\{(.*)\}", text, re.DOTALL)
    count = int(re.search(r"\d+", returns)[0]) if returns.startswith("Many") else 0
    if not braced:
        return _as("T" if count else returns, expression(text)).tree
    values = [_as("T", expression(each)).tree for each in split(braced[1], ",")]
    return _tuple(values) if len(values) == count else _refuse(f"{text} has not {count} results")


def _variable(name: str) -> str:
    """What a variable of the file is called in Python, where no function has its name."""
    return f"v__{name}"


def _tuple(values: list[ast.expr]) -> ast.Tuple:
    return ast.Tuple(values, ast.Load())


def split(text: str, separator: str) -> list[str]:
    """The parts of a text between separators that are in no brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "({") - (character in ")}")
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


# Values of C++'s types.


def _known(value: float, type_: str) -> _Value:
    """A value that is known: of an int, if there is one."""
    if type_ == "int" and not -_LARGEST <= value < _LARGEST:
        _refuse("a whole number is too large for an int")
    return _Value(ast.Constant(value), type_, value)


def _literal(text: str) -> _Value:
    if not text.isdigit():
        return _known(float(text), "double")
    return _known(int(text), "int") if text == "0" or text[0] != "0" else _refuse(f"{text} is octal")


def _hexadecimal(text: str) -> _Value:
    try:
        return _known(float.fromhex(text), "double")
    except (OverflowError, ValueError):
        _refuse(f"{text} is no number")


def _as(type_: str, value: _Value) -> _Value:
    """A value converted, as C++ does without being asked."""
    if value.type == type_:
        return value
    if value.arms:
        condition, *arms = value.arms
        return _chosen(condition, *[_as(type_, each) for each in arms])
    if value.type == "T" or (type_ == "int" and value.type == "double"):
        _refuse(f"a {value.type} becomes no {type_} by itself")
    if value.known is None:
        return _Value(_call(type_, value.tree), type_)
    if type_ != "T":
        return _known({"bool": bool, "int": int, "double": float}[type_](value.known), type_)
    number = ast.Constant(float(value.known))
    return _Value(number if c_float(value.known).value == value.known else _call("T", number), "T")


def _chosen(condition: ast.expr, a: _Value, b: _Value) -> _Value:
    """One of two values of a type."""
    return _Value(_call(f"select_{a.type}", condition, a.tree, b.tree), a.type, arms=(condition, a, b))


def _common(a: _Value, b: _Value, *, least: str = "int") -> tuple[_Value, _Value, str]:
    """Two values in the type that C++ computes in, and that type."""
    type_ = max(a.type, b.type, least, key=_RANK.index)
    return _as(type_, a), _as(type_, b), type_


def _arithmetic(sign: str, a: _Value, b: _Value) -> _Value:
    a, b, type_ = _common(a, b)
    if type_ == "int" and sign == "/":
        _refuse("a quotient of whole numbers, which C++ rounds")
    if a.known is None or b.known is None or (sign == "/" and b.known == 0):
        return _Value(_call(f"{_IN_PYTHON[sign]}_{type_}", a.tree, b.tree), type_)
    return _known(ARITHMETIC[sign](a.known, b.known), type_)


def _comparison(sign: str, a: _Value, b: _Value) -> _Value:
    a, b, _ = _common(a, b)
    if a.known is None or b.known is None:
        made = ast.parse(f"a {sign} b", mode="eval").body
        made.left, made.comparators = a.tree, [b.tree]
        return _Value(made, "bool")
    return _known(COMPARISONS[sign](a.known, b.known), "bool")


def _logical(sign: str, a: _Value, b: _Value) -> _Value:
    a, b = _as("bool", a), _as("bool", b)
    return _Value(ast.BinOp(a.tree, ast.BitOr() if sign == "||" else ast.BitAnd(), b.tree), "bool")


def _negative(value: _Value) -> _Value:
    value = value if value.type != "bool" else _as("int", value)
    if value.known is None:
        return _Value(ast.UnaryOp(ast.USub(), value.tree), value.type)
    return _known(-value.known, value.type)


class _Expression:
    """Precedence climbing over an expression."""

    def __init__(self, text: str, known: Mapping[str, Types | None], scope: Mapping[str, str]) -> None:
        self.text, self.known, self.scope = text.strip(), known, scope
        self.tokens, at = [], 0
        while at < len(self.text):
            match = _TOKEN.match(self.text, at) or _refuse(f"{self.text[at:].split()[0]!r} is no arithmetic")
            kind = next(kind for kind in ("hex", "number", "name", "sign") if match[kind])
            self.tokens.append((kind, match[kind], bool(match["of_T"])))
            at = match.end()
        self.tokens.append(("end", "", False))

    def whole(self) -> _Value:
        """All of it."""
        made = self.choice()
        self.expect("")
        return made

    def expect(self, sign: str) -> None:
        if self.tokens[0][1] != sign:
            _refuse(f"{self.text!r} is no arithmetic")
        self.tokens.pop(0)

    def take(self, sign: str) -> bool:
        if self.tokens[0][:2] != ("sign", sign):
            return False
        self.tokens.pop(0)
        return True

    def choice(self) -> _Value:
        condition = self.operation(1)
        if not self.take("?"):
            return condition
        first = self.choice()
        self.expect(":")
        first, second, _ = _common(first, self.choice(), least="bool")
        return _chosen(_as("bool", condition).tree, first, second)

    def operation(self, lowest: int) -> _Value:
        left = self.unary()
        while BINDING.get(self.tokens[0][1], 0) >= lowest:
            sign = self.tokens.pop(0)[1]
            right = self.operation(BINDING[sign] + 1)
            binary = _comparison if sign in COMPARISONS else _arithmetic if sign in ARITHMETIC else _logical
            left = binary(sign, left, right)
        return left

    def unary(self) -> _Value:
        if self.take("!"):
            return _Value(_call("negate", _as("bool", self.unary()).tree), "bool")
        if self.take("+"):
            operand = self.unary()
            return operand if operand.type != "bool" else _as("int", operand)
        return _negative(self.unary()) if self.take("-") else self.primary()

    def primary(self) -> _Value:
        kind, text, of_t = self.tokens.pop(0)
        if kind == "hex":
            return _hexadecimal(text)
        if kind == "number":
            return _literal(text)
        if text == "(":
            inner = self.choice()
            self.expect(")")
            return inner
        if kind != "name":
            _refuse(f"{self.text!r} is no arithmetic")
        if text in _TRUTHS:
            return _known(_TRUTHS[text], "bool")
        if self.take("("):
            return self.called(text, of_t)
        name = ast.Name(_variable(text), ast.Load())
        type_ = self.scope.get(text) or _refuse(f"{text} is no name that is known")
        result = re.fullmatch(r"\.of\[(\d+)\]", self.tokens[0][1])
        if not result:
            return _Value(name, type_)
        self.tokens.pop(0)
        return _Value(ast.Subscript(name, ast.Constant(int(result[1])), ast.Load()), "T")

    def called(self, name: str, of_t: bool) -> _Value:
        """A function's value. What ``T`` is there, an argument has to tell, or ``<T>``."""
        arguments = [self.choice()]
        while self.take(","):
            arguments.append(self.choice())
        self.expect(")")
        if name == "T":
            return _as("T", arguments[0]) if len(arguments) == 1 else _refuse("T( takes one value")
        if name not in self.known:
            _refuse(f"{name} is no function that is known")
        if not of_t and all(each.type != "T" for each in arguments):
            _refuse(f"{name} of numbers that are no T is another function in C++")
        types = self.known[name]
        if types is None:
            return self.given(name, arguments)
        *wanted, returned = types.values()
        if len(wanted) != len(arguments):
            _refuse(f"{name} takes {len(wanted)} arguments")
        trees = [_as(type_, each).tree for type_, each in zip(wanted, arguments, strict=True)]
        return _Value(_call(name, *trees), "bool" if returned == "bool" else "T")

    def given(self, name: str, arguments: list[_Value]) -> _Value:
        """The value of a function that is given. A literal comes to it unrounded, as some take a double."""
        place = _BOOL_ARGUMENTS.get((name, len(arguments)))
        trees = []
        for k, each in enumerate(arguments):
            literal = each.known is not None and k != place
            trees.append(ast.Constant(float(each.known)) if literal else _as("bool" if k == place else "T", each).tree)
        return _Value(_call(name, *trees), "bool" if name in _BOOL_RESULTS else "T")


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(_in_python(name), ast.Load()), list(arguments), [])


def _in_python(name: str) -> str:
    """What a function is called in Python: one of another kernel file is ``silu_::forward``."""
    return name.replace("::", "__of__")
