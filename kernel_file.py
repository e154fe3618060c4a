"""What a kernel file says: which functions it defines, what they take, and the comments at its top that jitact reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "SIGNATURES",
    "Function",
    "check_encodable",
    "checked",
    "code",
    "functions",
    "header",
    "names_there",
    "parameter_names",
    "quoted",
    "read_file",
    "read_parameters",
    "read_saves",
    "with_header",
]


def read_file(path: Path) -> str:
    """A kernel file's text.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from None


def checked(text: str) -> str:
    """A kernel file's text with the ends of its lines as ``load_folder`` reads them.

    Raises:
        ValueError: it has characters that no compiler takes.
    """
    if "\0" in text:
        raise ValueError(f"the kernel file has a NUL character in line {text.count(chr(10), 0, text.index(chr(0))) + 1}")
    check_encodable(text, "the kernel file")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_encodable(text: str, where: str) -> None:
    """Checks that a file could hold a text.

    Raises:
        ValueError: it has half of a character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} has a character that is none in UTF-8: {text[error.start]!r}") from None


class Signature(NamedTuple):
    """What a kernel file's function takes first; the parameters follow."""

    returns: str
    first: tuple[str, ...]


SIGNATURES = {
    "forward": Signature("T", ("T",)),
    "backward": Signature("T", ("T", "T")),
    "backward_from_output": Signature("T", ("T", "T")),
    "keeps": Signature("bool", ("T",)),
    "backward_from_bit": Signature("T", ("T", "bool")),
}


class Function(NamedTuple):
    """A function as a kernel file defines it."""

    arguments: tuple[str | None, ...]  # names; None for what has none
    body: str | None  # what it returns, where that is all it does
    line: int
    span: tuple[int, int]  # where it stands in the text


FUNCTION = re.compile(r"\bELEMENTWISE\s+(T|bool)\s+(\w+)\s*\(([^()]*)\)\s*(?=\{)")
ARGUMENT = re.compile(r"\s*(?:\[\[\w+\]\]\s*)?(?:const\s+)?(T|bool)(?:\s+const\b)?(?:\s+(\w+))?\s*")
RETURN = re.compile(r"\{\s*return\s+([^;{}]*);\s*\}")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
DEFINE = re.compile(r"^[ \t]*#[ \t]*define.*(?:\\\n.*)*", re.MULTILINE)


def code(text: str) -> str:
    """A text with spaces in place of its comments."""
    return COMMENT.sub(lambda comment: re.sub(r"[^\n]", " ", comment[0]), text)


def functions(text: str) -> dict[str, Function]:
    """The functions of a kernel file that the loops call.

    Raises:
        ValueError: one is not declared as elementwise.cuh says, or makes nothing of the gradient that comes in.
    """
    found: dict[str, Function] = {}
    text = code(text)
    for match in FUNCTION.finditer(text):
        returns, name, declared = match.groups()
        if name not in SIGNATURES:
            continue
        line = text.count("\n", 0, match.start()) + 1
        arguments = [ARGUMENT.fullmatch(argument) for argument in declared.split(",")]
        expected = SIGNATURES[name]
        first = tuple(argument[1] for argument in arguments[: len(expected.first)] if argument)
        if None in arguments or returns != expected.returns or first != expected.first:
            declaration = f"{expected.returns} {name}({', '.join(f'{each} ...' for each in expected.first)}, T parameters...)"
            raise ValueError(f"line {line}: {name} must be declared as ELEMENTWISE {declaration}")
        end = _end_of_block(text, match.end())
        block = text[match.end() : end]
        names = tuple(argument[2] for argument in arguments)
        if name.startswith("backward") and not _occurs(names[0], block, *DEFINE.findall(text)):
            raise ValueError(f"line {line}: {name} does not use its first argument, the gradient that comes in")
        only = RETURN.fullmatch(block)
        body = only[1] if only and name not in found else None  # two, one for each branch of an #if: no telling which
        found[name] = Function(names, body, line, (match.start(), end))
    if "forward" not in found:
        raise ValueError("the kernel file defines no function ELEMENTWISE T forward(T x)")
    return found


def _end_of_block(text: str, start: int) -> int:
    """Where the block ends that begins with the brace at ``start``."""
    depth = 0
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return start + brace.end()
    return len(text)


def _occurs(name: str | None, *texts: str) -> bool:
    return name is not None and any(re.search(rf"\b{name}\b", text) for text in texts)


def names_there(functions: dict[str, Function]) -> tuple[str, ...]:
    """What the functions call the parameters, which is the same in all of them; a function that does not use one need not.

    Raises:
        ValueError: they differ, or nothing tells what one is called.
    """
    taken = {name: function.arguments[len(SIGNATURES[name].first) :] for name, function in functions.items()}
    forward = taken["forward"]
    for name, params in taken.items():
        same = len(params) == len(forward) and all(a == b or None in (a, b) for a, b in zip(params, forward, strict=True))
        if not same:
            told = [", ".join(param or "T" for param in each) or "no parameters" for each in (params, forward)]
            raise ValueError(f"line {functions[name].line}: {name} takes {told[0]} where forward takes {told[1]}")
    names = tuple(next(filter(None, each), None) for each in zip(*taken.values(), strict=True))
    if None in names:
        raise ValueError(f"line {functions['forward'].line}: no function has a name for parameter {names.index(None) + 1}")
    return names


def parameter_names(there: tuple[str, ...], params: Mapping[str, float]) -> tuple[str, ...]:
    """The parameters' names by what they are called in a kernel file: the same, or with an underscore at the end."""
    bare = tuple(name.removesuffix("_") for name in there)
    some = tuple(b if a not in params and b in params else a for a, b in zip(there, bare, strict=True))
    return bare if set(params) == set(bare) else some


def read_parameters(given: dict[str, float] | str) -> dict[str, float]:
    """Parameters with their defaults, which a header gives as ``a = 1.0, b = 2``.

    Raises:
        ValueError: an item is none, or is there twice.
    """
    if not isinstance(given, str):
        return given
    params = {}
    for item in filter(None, map(str.strip, given.split(","))):
        param, _, value = map(str.strip, item.partition("="))
        if param in params:
            raise ValueError(f"the file's header has parameter {param} twice")
        try:
            params[param] = float(value)
        except ValueError:
            raise ValueError(f"{item!r} in the file's header is no parameter with a default, such as a = 1.0") from None
    return params


def read_saves(functions: dict[str, Function], wanted: Iterable[str]) -> tuple[str, ...]:
    """What backward can keep, the default first: what is wanted, else all that the functions allow.

    Raises:
        ValueError: they do not allow what is wanted.
    """
    possible = ["bit"] if {"keeps", "backward_from_bit"} <= functions.keys() else []
    possible += ["input", *(["output"] if "backward_from_output" in functions else [])]
    wanted = tuple(re.findall(r"\w+", wanted) if isinstance(wanted, str) else wanted)
    for save in wanted:
        if save not in possible:
            raise ValueError(f"backward cannot keep {save!r} with the functions that there are, only {', '.join(possible)}")
    return tuple(dict.fromkeys([*(wanted or possible), "input"]))


TOP = re.compile(r"(?:[ \t]*//[^\n]*\n|[ \t]*\n)*")  # comments and blank lines
HEADER = re.compile(r"^// *(activation|parameters|keeps|formula): *(.*?) *$\n?", re.MULTILINE)


def header(text: str) -> dict[str, str]:
    """The fields in the comments at the top of a kernel file, such as ``// parameters: a = 1.0, b = 2``.

    Raises:
        ValueError: one is there twice.
    """
    fields: dict[str, str] = {}
    for key, value in HEADER.findall(TOP.match(text)[0]):
        if key in fields:
            raise ValueError(f"the file's header has '// {key}:' twice")
        fields[key] = value
    if "formula" in fields:
        fields["formula"] = _unquoted(fields["formula"])
    return fields


def quoted(formula: str) -> str:
    """A formula as a comment can hold it: as it is, or as a JSON string where it is more than one line of plain text."""
    plain = formula.isprintable() and formula == formula.strip(" ") and formula[:1] != '"' and formula[-1:] != "\\"
    return formula if plain else json.dumps(formula)


def _unquoted(formula: str) -> str:
    """The formula in a comment."""
    if formula.startswith('"'):
        try:
            return str(json.loads(formula))
        except ValueError:  # a person's, who began with a quotation mark
            pass
    return formula


def with_header(text: str, fields: dict[str, str]) -> str:
    """A kernel file with these fields in the comments at its top, in place of those that are there; empty ones are left out."""
    header = "".join(f"// {key}: {value}\n" for key, value in fields.items() if value)
    top = len(TOP.match(text)[0])
    rest = HEADER.sub("", text[:top]) + text[top:]
    return f"{header}\n{rest.strip()}\n"
