"""Translates kernel files to Python functions of torch tensors, so that Inductor can fuse the same maths with its neighbours.

The subset of C++ that is understood is arithmetic: functions marked ``ELEMENTWISE`` that consist of declarations, assignments
and a final return; ``#define`` without parameters; ``#ifdef``. Functions of math.cuh are given as torch operations. Each
subexpression has its C++ type, as that decides what is computed: ``(x > 0) + (x > 1)`` is an int, and ``T`` with a literal is
``T``. Files with any other text are refused and keep their compiled kernel.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Collection, Mapping
from ctypes import c_float
from dataclasses import dataclass
from typing import NoReturn

from ..definitions.signs import ARITHMETIC, BINDING, COMPARISONS
from ..kernels.loader.signature import code, split

__all__ = ["Unreadable", "read"]


class Unreadable(ValueError):
    """A kernel file, or a part of one, cannot be translated to torch operations."""


Types = Mapping[str, str]
"""The types of a function's arguments by their Python names, in order, and of its result, under "return"."""

_RETURNS = r"void|bool|T|Many<T,\s*\d+>"
_DECLARED = re.compile(_RETURNS)
_FUNCTION = re.compile(rf"\bELEMENTWISE\s+({_RETURNS})\s+(\w+)\s*\(([^()]*)\)\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}")
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+(.*)$", re.MULTILINE)
_IFDEF = re.compile(
    r"^[ \t]*#[ \t]*ifdef[ \t]+(\w+)[ \t]*\n(.*?)(?:^[ \t]*#[ \t]*else[ \t]*\n(.*?))?^[ \t]*#[ \t]*endif[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
_OF_BUILDS = ("JITACT_FAST_MATH", "JITACT_UNFUSED")  # defined for whole builds, not only in device code
_DIRECTIVE = re.compile(r"^[ \t]*#(?![ \t]*define\b)", re.MULTILINE)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"(?:elementwise|gated|capped)\.cuh"[ \t]*$', re.MULTILINE)
_WORD = re.compile(r"\.?\d(?:[eEpP][-+]|[\w.'])*|[A-Za-z_]\w*")  # a whole number with its suffix, or a name
_ARGUMENT = re.compile(r"(?:\[\[\w+\]\]\s*)?(?:const\s+)?(bool|T|(?:Number|Channel|Row)<T>)\s*(&?)\s*(\w*)")
_DECLARATION = re.compile(r"(?:const\s+)?(T|bool|auto)\s+(.*)", re.DOTALL)
_TOKEN = re.compile(
    r"\s*(?:(?P<hex>0[xX][\da-fA-F]*\.?[\da-fA-F]*[pP][-+]?\d+)(?![\w.])"
    r"|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?![\w.])"
    r"|(?P<name>[A-Za-z_]\w*(?:::\w+)?)(?P<of_T><T>(?=\s*\())?|(?P<sign>&&|\|\||[<>=!]=|\.of\[\d+\]|[-+*/<>!?:(),]))"
)
_IN_PYTHON = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
_TRUTHS = {"true": True, "false": False}
_RANK = ("bool", "int", "double", "T")  # the result of two types has the one that is later here
_LARGEST = 2**31  # ints are less

_BOOL_ARGUMENTS = {("select", 3): 0, ("times_sigmoid", 4): 1}  # positions, by name and number of arguments
_BOOL_RESULTS = ("isnan",)


@dataclass(frozen=True)
class _Value:
    """A translated subexpression.

    Attributes:
        tree: the Python expression.
        type: its C++ type: bool, int, double or T; several results count as T.
        known: its value, if it is a constant.
        arms: for ``?:``, the condition and the two values, which are converted one by one, as each may be a constant.
    """

    tree: ast.expr
    type: str
    known: float | None = None
    arms: tuple[ast.expr, _Value, _Value] | None = None


def read(
    text: str,
    functions: Mapping[str, Callable],
    defined: Collection[str] = (),
    *,
    gradients: bool = True,
    only: Callable | None = None,
) -> dict[str, Callable]:
    """The functions of a kernel file by name, as Python functions of tensors and numbers.

    Functions with several results return a tuple; ``prepare`` returns a tuple of its changed arguments.

    Args:
        text: the kernel file.
        functions: the functions that it may call, including those like ``silu_::forward``, and the implementations of C++'s
            operators under the names of ``functions.py``.
        defined: macros that are defined, for ``#ifdef``.
        gradients: whether to translate the functions whose names begin with ``backward``.
        only: replaces variables in the arms of ``condition ? a : b`` by ``only(condition, variable)``, and the negated
            condition for ``b``: for autograd, which would take NaN from the slope of the arm that is not chosen.

    Raises:
        Unreadable: the text is not in the subset that is understood.
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
            _refuse(f"there are several functions {name}")  # C++ would choose by argument types
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
        if only is not None:
            tree, made["only"] = _Arms().visit(tree), only
        exec(compile(ast.fix_missing_locations(tree), "<kernel file>", "exec", dont_inherit=True), made)
    except RecursionError:
        _refuse("an expression is nested too deep")
    return {name: made[name] for name in own}


def _refuse(why: str) -> NoReturn:
    raise Unreadable(why)


def _types(function: Callable) -> Types | None:
    """The declared types of a translated function; None for any other function."""
    types = getattr(function, "__annotations__", {})
    return types if _DECLARED.fullmatch(types.get("return", "")) else None


def _branch(branch: re.Match[str], defined: Collection[str]) -> str:
    """The text of the branch of an ``#ifdef`` that is taken."""
    if branch[1] not in _OF_BUILDS:
        _refuse(f"whether {branch[1]} is defined is not known here")
    for each in (branch[2], branch[3] or ""):
        if _DIRECTIVE.search(each):
            _refuse(f"#ifdef {branch[1]} has other branches in it")
    return (branch[2] if branch[1] in defined else branch[3]) or ""


def _expanded(text: str, macros: Mapping[str, str], within: tuple[str, ...] = ()) -> str:
    """The text with macros expanded, textually as by the preprocessor: no parentheses are added."""

    def word(match: re.Match[str]) -> str:
        name = match[0]
        if name not in macros or name in within:
            return name
        return f" {_expanded(macros[name], macros, (*within, name))} "

    return _WORD.sub(word, text)


def _arguments(name: str, declared: str) -> list[tuple[str, str, str]]:
    """A function's arguments as (Python name, type, name in the file)."""
    found = []
    for k, argument in enumerate(declared.split(",")):
        match = _ARGUMENT.fullmatch(argument.strip()) or _refuse(f"{name}: {argument.strip()!r} is no argument that is known")
        if bool(match[2]) != (name == "prepare"):
            _refuse(f"{name} changes what it is called with" if match[2] else "prepare takes what it changes")
        if match[3] and match[3] in [in_file for *_, in_file in found]:
            _refuse(f"{name} has two arguments called {match[3]}")
        found.append((_variable(match[3] or f"{k}"), "bool" if match[1] == "bool" else "T", match[3]))
    return found


def _function(
    returns: str, name: str, arguments: list[tuple[str, str, str]], body: str, known: Mapping[str, Types | None]
) -> ast.FunctionDef:
    """A function translated to Python."""
    scope = {in_file: type_ for _, type_, in_file in arguments if in_file}  # locals are added as they are declared
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
    """A function's returned expression, or tuple of expressions."""
    braced = re.fullmatch(r"\{(.*)\}", text, re.DOTALL)
    count = int(re.search(r"\d+", returns)[0]) if returns.startswith("Many") else 0
    if not braced:
        return _as("T" if count else returns, expression(text)).tree
    values = [_as("T", expression(each)).tree for each in split(braced[1], ",")]
    return _tuple(values) if len(values) == count else _refuse(f"{text} has not {count} results")


def _variable(name: str) -> str:
    """The Python name of a variable of the file; the prefix avoids clashes with functions."""
    return f"v__{name}"


class _Arms(ast.NodeTransformer):
    """Replaces variables in the arms of choices, see ``only`` of :func:`read`."""

    def __init__(self, condition: ast.expr | None = None) -> None:
        self.condition = condition

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id.startswith("select_"):
            condition, first, second = node.args
            other = _call("negate", condition)
            node.args[1:] = [_Arms(when).visit(copy.deepcopy(arm)) for when, arm in ((condition, first), (other, second))]
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if self.condition is None or not node.id.startswith(_variable("")):
            return node
        return _call("only", copy.deepcopy(self.condition), node)


def _tuple(values: list[ast.expr]) -> ast.Tuple:
    return ast.Tuple(values, ast.Load())


# Typed values.


def _known(value: float, type_: str) -> _Value:
    """A constant; refused if it is an int out of range."""
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
    """A value after C++'s implicit conversion to a type."""
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
    """``condition ? a : b``, for values of the same type."""
    return _Value(_call(f"select_{a.type}", condition, a.tree, b.tree), a.type, arms=(condition, a, b))


def _common(a: _Value, b: _Value, *, least: str = "int") -> tuple[_Value, _Value, str]:
    """Two operands converted to their common C++ type, and that type."""
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
    """A precedence-climbing parser of one expression."""

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
        """Parses the whole text."""
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
        """A call of a function, whose ``T`` must follow from an argument or from ``<T>``."""
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
        """A call of a function of math.cuh. Constants are passed unrounded, as some of those functions take a double."""
        place = _BOOL_ARGUMENTS.get((name, len(arguments)))
        trees = []
        for k, each in enumerate(arguments):
            literal = each.known is not None and k != place
            trees.append(ast.Constant(float(each.known)) if literal else _as("bool" if k == place else "T", each).tree)
        return _Value(_call(name, *trees), "bool" if name in _BOOL_RESULTS else "T")


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(_in_python(name), ast.Load()), list(arguments), [])


def _in_python(name: str) -> str:
    """The Python name of a function, which may be one of another kernel file, such as ``silu_::forward``."""
    return name.replace("::", "__of__")
