"""Parses the declarations of a kernel file: the functions that it defines, and the role of each argument by its type.

Only ``compiling.reader`` parses kernel files besides, for what functions compute. In C++, ``signature.cuh`` derives the same
from the types.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

__all__ = [
    "ROLES",
    "TYPES",
    "Function",
    "Operand",
    "Signature",
    "before_operands",
    "code",
    "functions",
    "possible_saves",
    "prepared",
    "read_signature",
    "sees_places",
    "split",
    "takes_elements",
    "terms_vanish",
    "without_underscores",
]

TYPES = {"element": "T", "number": "Number<T>", "channel": "Channel<T>", "row": "Row<T>", "random": "Random<T>"}
"""Types of arguments by role, documented in ``operands.cuh``."""

ROLES = {type_: role for role, type_ in TYPES.items()} | dict.fromkeys(("Sum<T>", "SumOfExp<T>", "LogSumExp<T>"), "fold")
"""Roles of arguments by type; folds are documented in ``rows.cuh``. Several sums have the type ``Sum<T, n>``."""

_WITH_GRADIENT = ("element", "channel", "row")


class Function(NamedTuple):
    """A function of a kernel file that the loops call.

    Attributes:
        arguments: the arguments' names; None for an unnamed one.
        types: the arguments' types.
        results: the number of results.
        body: the returned expression, if the function is a single return statement.
        line: the line where it begins.
        span: its start and end in the text.
    """

    arguments: tuple[str | None, ...]
    types: tuple[str, ...]
    results: int
    body: str | None
    line: int
    span: tuple[int, int]


class Operand(NamedTuple):
    """An argument of ``forward``.

    Attributes:
        name: its name in Python: that in the file without one trailing underscore.
        role: one of the values of :data:`ROLES`.
        type: its type in the file; a number may be a plain ``T``, if :attr:`KernelSource.numbers` names it.
        in_file: its name in the file.
    """

    name: str
    role: str
    type: str
    in_file: str


class Signature(NamedTuple):
    """The declarations of a kernel file.

    Attributes:
        operands: the arguments of ``forward``, in its order.
        functions: the names of the functions that the loops call.
        gradients: the number of gradients: those of the first so many operands whose roles can have one.
        bit_gradients: how many of those ``backward_from_bit`` returns; 0 if there is no such function.
    """

    operands: tuple[Operand, ...]
    functions: frozenset[str]
    gradients: int
    bit_gradients: int = 0

    def of(self, *roles: str) -> tuple[str, ...]:
        """The names of the operands with one of the roles."""
        return tuple(operand.name for operand in self.operands if operand.role in roles)

    @property
    def differentiable(self) -> tuple[Operand, ...]:
        """The operands that have gradients, in the order in which backward returns those."""
        return tuple(operand for operand in self.operands if operand.role in _WITH_GRADIENT)[: self.gradients]

    @property
    def packs(self) -> bool:
        """Whether backward can write the gradients of two elements into one tensor; not supported with random numbers."""
        with_gradient = [operand for operand in self.differentiable if operand.role == "element"]
        return len(self.of("element")) == len(with_gradient) == 2 and not self.of("random")

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the operands that are tensors, in the operators' order: elements first."""
        return self.of("element") + self.of("channel", "row")

    @property
    def saves(self) -> tuple[str, ...]:
        """What can be saved for backward: the least memory first, and last the output, from which gradients are inexact."""
        return possible_saves(self.functions)

    @property
    def folds(self) -> bool:
        """Whether results depend on whole rows, as those of softmax."""
        return "fold_from_output" in self.functions

    @property
    def unmarked_numbers(self) -> int:
        """The number of number operands whose type in the file is plain ``T``."""
        return sum(operand.role == "number" and operand.type == "T" for operand in self.operands)


def possible_saves(functions: Collection[str]) -> tuple[str, ...]:
    """:attr:`Signature.saves` of a file that defines these functions."""
    bit = ("bit",) if "keeps" in functions and "backward_from_bit" in functions else ()
    output = ("output",) if "backward_from_output" in functions else ()
    return (*bit, "input", *output)


class _Form(NamedTuple):
    """How a function must be declared: its result, its arguments before the operands, and whether operands include elements."""

    returns: str
    first: tuple[str, ...]
    elements: bool


_FORMS = {
    "forward": _Form("T", (), True),
    "backward": _Form("T", ("T",), True),
    "backward_from_output": _Form("T", ("T", "T"), False),
    "keeps": _Form("bool", (), True),
    "backward_from_bit": _Form("T", ("T", "bool"), False),
    "fold_from_output": _Form("T", ("T", "T"), False),
    "backward_of_row": _Form("T", ("Sum<T>",), False),
}
_OF_ROWS = ("fold_from_output", "backward_of_row")
_SEVERAL = ("backward", "backward_from_bit", *_OF_ROWS)  # functions that may return Many


def before_operands(function: str) -> int:
    """How many arguments a function takes before the operands of ``forward``."""
    return len(_FORMS[function].first)


def takes_elements(function: str) -> bool:
    """Whether a function takes the elements among the operands of ``forward``."""
    return _FORMS[function].elements


_FUNCTION = re.compile(r"\bELEMENTWISE\s+([^(){};]*?[\s>])(\w+)\s*\(([^()]*)\)\s*(?=\{)")
_BETWEEN = re.compile(r",(?![^<>]*>)")  # commas between arguments
_ARGUMENT = re.compile(r"\s*(?:\[\[\w+\]\]\s*)?(?:const\s+)?(\w+(?:<T(?:,\s*\d+)?>)?)(?:\s+const\b)?(?:\s+(\w+))?\s*")
_RETURN = re.compile(r"\{\s*return\s+([^;{}]*);\s*\}")
_TERM_OF_DY = re.compile(r"\bfold_from_output\s*\(\s*T\s+(\w+)[^()]*\)\s*\{\s*return\s+\1(\s*\*\s*\w+)?\s*;\s*\}")
_PREPARE = re.compile(r"\bvoid\s+prepare\s*\(([^()]*)\)\s*(?=\{)")
_CHANGE = re.compile(r"\s*(\w+)\s*[-+*/]?=(.*)", re.DOTALL)
_PREPARED_BY = re.compile(r"\s*\w+_::\s*prepare\s*\([\w\s,]*\)\s*")  # by that of another file
_CONDITION = re.compile(r"[ \t]*#[ \t]*(if|ifdef|ifndef|elif|else|endif)\b(.*)")
_CONSTANTS = {"0": False, "false": False, "1": True, "true": True}
# Comments, of which a backslash at the end of a line continues those of a line; numbers, of which 1'000 has a quote; strings.
_TOKEN = re.compile(
    r"//(?:\\\n|[^\n])*|/\*.*?\*/|\b\d(?:'?[\w.])*"
    r'|R"(?P<mark>[^()\\\s]*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\.|[^'\\\n])+'",
    re.DOTALL,
)
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define.*(?:\\\n.*)*", re.MULTILINE)


def code(text: str) -> str:
    """The text without comments and what constants in ``#if`` leave out, and without brackets and the like in strings.

    They are replaced by spaces, so that positions stay the same.
    """
    lines = _TOKEN.sub(_blank, text).split("\n")
    around: list[_Branch] = []  # of each #if around a line
    for at, line in enumerate(lines):
        found = _CONDITION.match(line)
        directive, condition = found.groups() if found else ("", "")
        if directive in ("if", "ifdef", "ifndef"):
            around.append(_Branch(False, False, True).next(directive, condition))
        elif directive not in ("", "endif") and around:
            around[-1] = around[-1].next(directive, condition)
        if (directive and around and around[-1].decided) or any(branch.left_out for branch in around):
            lines[at] = " " * len(line)
        if directive == "endif" and around:
            around.pop()
    return "\n".join(lines)


def _blank(token: re.Match[str]) -> str:
    if token[0].startswith("/"):
        return re.sub(r"[^\n]", " ", token[0])
    return token[0] if token[0][0].isdigit() else re.sub(r"[(){};,#]", " ", token[0])


class _Branch(NamedTuple):
    """A branch of an ``#if``: whether it is left out; whether it, or one before it, is taken; whether constants decide all."""

    left_out: bool
    taken: bool
    decided: bool

    def next(self, directive: str, condition: str) -> _Branch:
        """The branch that begins with a directive."""
        value = directive == "else" or None
        if directive in ("if", "elif"):
            value = _CONSTANTS.get(re.sub(r"[\s()]", "", condition))
        return _Branch(self.taken or value is False, self.taken or value is True, self.decided and value is not None)


def split(text: str, separator: str, opening: str = "({", closing: str = ")}") -> list[str]:
    """``text`` split at separators outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in opening) - (character in closing)
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def prepared(text: str) -> int:
    """How many channel operands, the last ones, the file's ``prepare`` transforms before other functions take them.

    Raises:
        ValueError: it does more than change each operand by itself, which is all that gradients of operands account for.
    """
    text = code(text)
    found = _PREPARE.search(text)
    if found is None or "<T>" not in found[1]:
        return 0
    arguments = [re.findall(r"\w+", argument) for argument in _BETWEEN.split(found[1])]
    names = {words[-1] for words in arguments if len(words) > 2}  # Channel, T and the name
    for statement in text[found.end() + 1 : _end_of_block(text, found.end()) - 1].split(";"):
        change = _CHANGE.fullmatch(statement)
        alone = change and change[1] in names and not any(_occurs(name, change[2]) for name in names - {change[1]})
        if statement.strip() and not alone and not _PREPARED_BY.fullmatch(statement):
            line, given = text.count("\n", 0, found.start()) + 1, " ".join(statement.split())
            raise ValueError(f"line {line}: prepare may only have statements operand = f(that operand), got {given!r}")
    return found[1].count("<T>")


def terms_vanish(text: str) -> bool:
    """Whether the term that a file of rows sums in backward is evidently 0 where the incoming gradient is."""
    return _TERM_OF_DY.search(code(text)) is not None


def sees_places(text: str) -> bool:
    """Whether ``forward`` uses a LogSumExp not only by ``log_share``, and so depends on more than differences in a row."""
    forward = functions(text)["forward"]
    if forward.types[1:2] != ("LogSumExp<T>",):
        return False
    if forward.body is None:
        return True
    kept, row = forward.arguments[:2]
    rest = re.sub(rf"\b{row}\s*\.\s*log_share\s*\(\s*{kept}\s*\)", "", forward.body)
    return _occurs(kept, rest) or _occurs(row, rest)


def functions(text: str) -> dict[str, Function]:
    """The functions of a kernel file that the loops call, by name.

    Raises:
        ValueError: one is not declared as elementwise.cuh requires, or does not use the incoming gradient.
    """
    found: dict[str, Function] = {}
    text = code(text)
    for match in _FUNCTION.finditer(text):
        returns, name, declared = re.sub(r"\s", "", match[1]), match[2], match[3]
        many = re.fullmatch(r"Many<T,(\d+)>", returns)
        in_namespace = text.count("{", 0, match.start()) != text.count("}", 0, match.start())
        others = name in _OF_ROWS and "rows.cuh" not in text
        if name not in _FORMS or in_namespace or others:  # a helper, which the loops do not call
            continue
        line, form = text.count("\n", 0, match.start()) + 1, _FORMS[name]
        arguments = [_ARGUMENT.fullmatch(argument) for argument in _BETWEEN.split(declared)]
        types = tuple(re.sub(r",\s*", ", ", argument[1]) if argument else "" for argument in arguments)
        sorts = tuple(re.sub(r"^Sum<T, \d+>$", "Sum<T>", type_) for type_ in types)
        known = all(sort in (*ROLES, "bool") for sort in sorts) and sorts[: len(form.first)] == form.first
        if not known or (returns != form.returns and not (many and name in _SEVERAL)):
            declaration = f"{form.returns} {name}({''.join(f'{each} ..., ' for each in form.first)}operands...)"
            raise ValueError(f"line {line}: {name} must be declared as ELEMENTWISE {declaration}, each a {', '.join(ROLES)}")
        end = _end_of_block(text, match.end())
        block = text[match.end() : end]
        names = tuple(argument[2] for argument in arguments)
        if form.first[:1] == ("T",) and name not in _OF_ROWS and not _occurs(names[0], block, *_DEFINE.findall(text)):
            raise ValueError(f"line {line}: {name} does not use its first argument, the gradient that comes in")
        only = _RETURN.fullmatch(block)
        body = only[1] if only and name not in found else None  # defined in two branches of an #if: either may be compiled
        found[name] = Function(names, types, int(many[1]) if many else 1, body, line, (match.start(), end))
    prepared(text)
    if "forward" not in found:
        raise ValueError("the kernel file defines no function ELEMENTWISE T forward(T x)")
    forward = found["forward"]
    if "rows.cuh" not in text and any(ROLES.get(type_) == "fold" for type_ in forward.types):
        raise ValueError(f"line {forward.line}: forward takes a row's fold, but the file does not include \"rows.cuh\"")
    return found


def _end_of_block(text: str, start: int) -> int:
    """The end of the block that begins with the brace at ``start``."""
    depth = 0
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return start + brace.end()
    return len(text)


def _occurs(name: str | None, *texts: str) -> bool:
    return name is not None and any(re.search(rf"\b{name}\b", text) for text in texts)


@lru_cache(maxsize=256)
def read_signature(text: str, numbers: tuple[str, ...] = ()) -> Signature:
    """Parses a kernel file.

    Args:
        text: the file's text.
        numbers: names of arguments of type ``T`` that are numbers.

    Raises:
        ValueError: a function is not declared as ``elementwise.cuh`` requires; the message names the line.
    """
    found = functions(text)
    forward = found["forward"]
    if any("Sum" in type_ for type_ in forward.types):
        return _of_rows(found)
    names, operands = _names(found), []
    for name, bare, type_ in zip(names, without_underscores(names), forward.types, strict=True):
        role = "number" if type_ == "T" and name in numbers else ROLES[type_]
        operands.append(Operand(bare, role, type_, name))
    if operands[0].role != "element":
        raise ValueError(f"line {forward.line}: the first argument of forward must be a T, an element of the input")
    for name, function in found.items():
        expected = [operand for operand in operands if _FORMS[name].elements or operand.role != "element"]
        if function.types[len(_FORMS[name].first) :] != tuple(operand.type for operand in expected):
            operands_there = [f"{operand.type} {operand.in_file}" for operand in expected]
            declared = ", ".join([*(f"{each} ..." for each in _FORMS[name].first), *operands_there])
            raise ValueError(f"line {function.line}: {name} must take ({declared}), as forward's arguments are")
    most = sum(operand.role in _WITH_GRADIENT for operand in operands)
    from_bit = found["backward_from_bit"].results if "backward_from_bit" in found else 0
    gradients = found["backward"].results if "backward" in found else from_bit or most
    if gradients > most:
        line = found["backward" if "backward" in found else "backward_from_bit"].line
        raise ValueError(f"line {line}: backward returns {gradients} gradients, of {most} operands that have one")
    with_gradient = [operand.role for operand in operands if operand.role in _WITH_GRADIENT][:from_bit]
    if from_bit > gradients or "element" in with_gradient[1:]:
        line = found["backward_from_bit"].line
        what = f"{gradients}, as backward does" if from_bit > gradients else "one, as the next operand is an element"
        raise ValueError(f"line {line}: backward_from_bit returns {from_bit} gradients; it can return {what}")
    return Signature(tuple(operands), frozenset(found), gradients, from_bit)


def without_underscores(names: Sequence[str]) -> list[str]:
    """The Python names of arguments: in C++ a name may need a trailing underscore, to avoid a clash."""
    bare = [name.removesuffix("_") for name in names]
    usable = [each.isidentifier() and not keyword.iskeyword(each) and bare.count(each) == 1 for each in bare]
    return [each if can else name for name, each, can in zip(names, bare, usable, strict=True)]


_MOST_SUMS = 2  # sums per row that fit the shared memory of the GPU's blocks


def _of_rows(found: dict[str, Function]) -> Signature:
    """The signature of a file of rows, which has a fold.

    Raises:
        ValueError: a function is missing, or not declared as ``rows.cuh`` requires.
    """
    forward = found["forward"]
    fold, given = forward.types[1:2], forward.types[2:]
    if forward.types[0] != "T" or fold not in (("SumOfExp<T>",), ("LogSumExp<T>",)):
        wanted = "(T, SumOfExp<T> or LogSumExp<T>, operands...)"
        raise ValueError(f"line {forward.line}: forward of a file of rows must take {wanted}")
    for type_ in given:
        if type_ not in ("Row<T>", "Number<T>"):
            raise ValueError(f"line {forward.line}: beside a fold, operands are Row<T> and Number<T>; forward takes a {type_}")
    sums = found["fold_from_output"].results if "fold_from_output" in found else 1
    of_sums = "Sum<T>" if sums == 1 else f"Sum<T, {sums}>"
    expected = {
        "forward": ("T", *fold),
        "fold_from_output": ("T", "T"),
        "backward_from_output": ("T", "T", of_sums),
        **({"backward_of_row": (of_sums,)} if "Row<T>" in given else {}),
    }
    if found.keys() != expected.keys():
        raise ValueError(f"line {forward.line}: a file of rows defines {', '.join(expected)}, and no others")
    if sums > _MOST_SUMS:
        line = found["fold_from_output"].line
        raise ValueError(f"line {line}: fold_from_output returns {sums} terms, of {_MOST_SUMS} at most")
    rows = given.count("Row<T>")
    if rows and found["backward_of_row"].results != rows:
        line, results = found["backward_of_row"].line, found["backward_of_row"].results
        raise ValueError(f"line {line}: backward_of_row returns {results} gradients, of {rows} operands Row<T>")
    for name, function in found.items():
        if function.types != (*expected[name], *given):
            raise ValueError(f"line {function.line}: {name} must take ({', '.join([*expected[name], *given])})")
    names = _alike({name: function.arguments[len(expected[name]) :] for name, function in found.items()}, forward.line)
    described = zip(("kept", "row", *names), ("kept", "row", *without_underscores(names)), forward.types, strict=True)
    operands = tuple(Operand(bare, ROLES[type_], type_, name) for name, bare, type_ in described)
    return Signature(operands, frozenset(found), 1 + rows)


def _alike(arguments: dict[str, tuple[str | None, ...]], line: int) -> list[str]:
    """The names of the arguments that all functions share, which must agree where they are given.

    Raises:
        ValueError: names differ, or an argument is unnamed in all functions.
    """
    names = [[name for name in given if name is not None] for given in zip(*arguments.values(), strict=True)]
    for k, given in enumerate(names):
        if len(set(given)) != 1:
            what = f"is called {' and '.join(dict.fromkeys(given))}" if given else "has no name in any function"
            raise ValueError(f"line {line}: operand {k + 1} of forward, after the fold, {what}")
    return [given[0] for given in names]


def _names(found: dict[str, Function]) -> list[str]:
    """The names of forward's arguments, taken from another function where ``forward`` leaves one unnamed.

    Raises:
        ValueError: an argument is unnamed in all functions.
    """
    forward = found["forward"]
    names = list(forward.arguments)
    for name, function in found.items():
        given = function.arguments[len(_FORMS[name].first) :]
        places = [k for k, type_ in enumerate(forward.types) if _FORMS[name].elements or type_ != "T"]
        for k, argument in zip(places, given, strict=False):
            names[k] = names[k] or argument
    for k, name in enumerate(names):
        if name is None:
            raise ValueError(f"line {forward.line}: no function has a name for argument {k + 1} of forward")
    return names
