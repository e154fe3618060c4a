"""Kernel files read as torch operations: the same maths that is compiled, for a compiler that fuses it with its neighbours.

A kernel file is arithmetic, and so nearly Python already. What is read here: functions marked ``ELEMENTWISE``, which declare,
assign and end by returning; ``#define`` of a number; the branches of ``#ifdef``. The functions of math.cuh that they call are
given, as torch operations. Any other text is no formula, and stays a kernel.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable, Collection, Mapping
from typing import NoReturn

from ..kernels.loader.signature import code

__all__ = ["Unreadable", "read", "split"]


class Unreadable(ValueError):
    """A kernel file, or something in it, that is more than arithmetic."""


_FUNCTION = re.compile(r"\bELEMENTWISE\s+(?:void|bool|T|Many<T,\s*\d+>)\s+(\w+)\s*\(([^()]*)\)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+(.*)$", re.MULTILINE)
_IFDEF = re.compile(
    r"^[ \t]*#[ \t]*ifdef[ \t]+(\w+)[ \t]*\n(.*?)(?:^[ \t]*#[ \t]*else[ \t]*\n(.*?))?^[ \t]*#[ \t]*endif[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"(?:elementwise|gated|capped)\.cuh"[ \t]*$', re.MULTILINE)
_OF_T = re.compile(r"\b(\w+)<T>(?=\()")
_ARGUMENT = re.compile(r"(?:\[\[\w+\]\]\s*)?(?:const\s+)?(?:bool|T|(?:Number|Channel|Row)<T>)\s*&?\s*(\w*)")
_DECLARATION = re.compile(r"(?:const\s+)?(?:T|bool|auto)\s+(.*)", re.DOTALL)
_TOKEN = re.compile(
    r"\s*(?:(?P<hex>0[xX][\da-fA-F]*\.?[\da-fA-F]*[pP][-+]?\d+)|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?![\w.])"
    r"|(?P<name>[A-Za-z_]\w*(?:::\w+)?)|(?P<sign>&&|\|\||[<>=!]=|\.of\[\d+\]|[-+*/<>!?:(),]))"
)
_BINDING = {"||": 1, "&&": 2, "==": 3, "!=": 3, "<": 4, "<=": 4, ">": 4, ">=": 4, "+": 5, "-": 5, "*": 6, "/": 6}
_OPERATORS = {"||": ast.BitOr, "&&": ast.BitAnd, "+": ast.Add, "-": ast.Sub, "*": ast.Mult}
_COMPARISONS = {"==": ast.Eq, "!=": ast.NotEq, "<": ast.Lt, "<=": ast.LtE, ">": ast.Gt, ">=": ast.GtE}


def read(
    text: str, functions: Mapping[str, Callable], defined: Collection[str] = (), *, gradients: bool = True
) -> dict[str, Callable]:
    """The functions of a kernel file by name, of tensors, and of numbers where those stand for operands.

    A function of several results returns a tuple, and ``prepare`` one of its arguments as it leaves them.

    Args:
        text: the kernel file's.
        functions: what it may call, also ``silu_::forward``; ``select``, ``divide`` and ``negate`` are ``?:``, ``/``, ``!``.
        defined: names for which ``#ifdef`` holds.
        gradients: whether those functions are wanted that give gradients.

    Raises:
        Unreadable: there is more in it than arithmetic.
    """
    text = _IFDEF.sub(lambda branch: (branch[2] if branch[1] in defined else branch[3]) or "", code(text))
    text = _OF_T.sub(r"\1", text)  # swish<T>(x, alpha)
    macros = dict(_DEFINE.findall(text))
    rest = _INCLUDE.sub("", _DEFINE.sub("", _FUNCTION.sub("", text))).strip()
    if rest:
        _refuse(f"{rest.splitlines()[0]!r} is none of a kernel file's functions")
    found = [match.groups() for match in _FUNCTION.finditer(text) if gradients or not match[1].startswith("backward")]
    known = {*functions, *(name for name, _, _ in found)}
    made = {_in_python(name): function for name, function in functions.items()}
    tree = ast.Module([_function(*each, macros, known) for each in found], [])
    exec(compile(ast.fix_missing_locations(tree), "<kernel file>", "exec"), made)
    return {name: made[name] for name, _, _ in found}


def _refuse(why: str) -> NoReturn:
    raise Unreadable(why)


def _function(name: str, declared: str, body: str, macros: Mapping[str, str], known: set[str]) -> ast.FunctionDef:
    """A function as Python has it."""
    names = []
    for k, argument in enumerate(declared.split(",")):
        match = _ARGUMENT.fullmatch(argument.strip()) or _refuse(f"{name}: {argument.strip()!r} is no argument that is known")
        names.append(_free(match[1]) or f"unnamed{k}")
    scope = {each: None for each in names}  # and what is declared on the way
    made: list[ast.stmt] = []
    for text in filter(None, map(str.strip, split(body, ";"))):
        if made and isinstance(made[-1], ast.Return):
            _refuse(f"{name} goes on after returning")
        made += _statements(text, lambda expression: _Expression(expression, macros, known, scope).whole(), scope)
    if name == "prepare":
        made.append(ast.Return(_tuple([ast.Name(each, ast.Load()) for each in names])))
    if not made or not isinstance(made[-1], ast.Return):
        _refuse(f"{name} returns nothing")
    function = ast.parse(f"def {name}({', '.join(names)}): pass").body[0]
    function.body = made
    return function


def _statements(text: str, expression: Callable[[str], ast.expr], scope: dict[str, None]) -> list[ast.stmt]:
    """``return ...``, a declaration of one or several names, an assignment, or a call of another file's ``prepare``."""
    returned = re.fullmatch(r"return\b\s*(.*)", text, re.DOTALL)
    if returned:
        several = re.fullmatch(r"\{(.*)\}", returned[1], re.DOTALL)
        return [ast.Return(_tuple(list(map(expression, split(several[1], ",")))) if several else expression(returned[1]))]
    prepared = re.fullmatch(r"\w+_::prepare\(([\w\s,]+)\)", text)
    if prepared:  # which changes its arguments
        names = [ast.Name(each.strip(), ast.Store()) for each in split(prepared[1], ",")]
        return [ast.Assign([ast.Tuple(names, ast.Store())], expression(text))]
    declared = _DECLARATION.fullmatch(text)
    made = []
    for each in split(declared[1], ",") if declared else [text]:
        match = re.fullmatch(r"\s*(\w+)\s*=(?!=)(.*)", each, re.DOTALL)
        if not match or (not declared and match[1] not in scope):
            _refuse(f"{text!r} is neither a declaration with a value nor an assignment")
        value = expression(match[2])
        scope[_free(match[1])] = None
        made.append(ast.Assign([ast.Name(match[1], ast.Store())], value))
    return made


def _free(name: str) -> str:
    """A name that is one in Python too."""
    return _refuse(f"{name} is a word of Python's") if keyword.iskeyword(name) else name


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


class _Expression:
    """Precedence climbing over an expression."""

    def __init__(self, text: str, macros: Mapping[str, str], known: Collection[str], scope: Collection[str]) -> None:
        self.text, self.macros, self.known, self.scope = text.strip(), macros, known, scope
        self.tokens, at = [], 0
        while at < len(self.text):
            match = _TOKEN.match(self.text, at) or _refuse(f"{self.text[at:].split()[0]!r} is no arithmetic")
            self.tokens.append((match.lastgroup, match[match.lastgroup]))
            at = match.end()
        self.tokens.append(("end", ""))

    def whole(self) -> ast.expr:
        """All of it."""
        made = self.choice()
        self.expect("")
        return made

    def expect(self, sign: str) -> None:
        if self.tokens[0][1] != sign:
            _refuse(f"{self.text!r} is no arithmetic")
        self.tokens.pop(0)

    def take(self, sign: str) -> bool:
        if self.tokens[0] != ("sign", sign):
            return False
        self.tokens.pop(0)
        return True

    def choice(self) -> ast.expr:
        condition = self.operation(1)
        if not self.take("?"):
            return condition
        first = self.choice()
        self.expect(":")
        return _call("select", condition, first, self.choice())

    def operation(self, lowest: int) -> ast.expr:
        left = self.unary()
        while _BINDING.get(self.tokens[0][1], 0) >= lowest:
            sign = self.tokens.pop(0)[1]
            right = self.operation(_BINDING[sign] + 1)
            if sign in _COMPARISONS:
                left = ast.Compare(left, [_COMPARISONS[sign]()], [right])
            elif sign in _OPERATORS:
                left = ast.BinOp(left, _OPERATORS[sign](), right)
            elif all(isinstance(side, ast.Constant) and type(side.value) is int for side in (left, right)):
                _refuse(f"{self.text!r} has a quotient of whole numbers, which C++ rounds")
            else:
                left = _call("divide", left, right)
        return left

    def unary(self) -> ast.expr:
        if self.take("!"):
            return _call("negate", self.unary())
        if self.take("+"):
            return self.unary()
        return ast.UnaryOp(ast.USub(), self.unary()) if self.take("-") else self.primary()

    def primary(self) -> ast.expr:
        kind, text = self.tokens.pop(0)
        if kind == "hex":
            return ast.Constant(float.fromhex(text))
        if kind == "number":
            return ast.Constant(int(text) if text.isdigit() else float(text))
        if text == "(":
            inner = self.choice()
            self.expect(")")
            return inner
        if kind != "name":
            _refuse(f"{self.text!r} is no arithmetic")
        if text in self.macros:
            return _Expression(self.macros[text], self.macros, self.known, ()).whole()
        if not self.take("("):
            name = ast.Name(text, ast.Load()) if text in self.scope else _refuse(f"{text} is no name that is known")
            result = re.fullmatch(r"\.of\[(\d+)\]", self.tokens[0][1])
            if not result:
                return name
            self.tokens.pop(0)
            return ast.Subscript(name, ast.Constant(int(result[1])), ast.Load())
        arguments = [self.choice()]
        while self.take(","):
            arguments.append(self.choice())
        self.expect(")")
        return _call(text, *arguments) if text in self.known else _refuse(f"{text} is no function that is known")


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(_in_python(name), ast.Load()), list(arguments), [])


def _in_python(name: str) -> str:
    """What a function is called in Python: one of another kernel file is ``silu_::forward``."""
    return name.replace("::", "__of__")
