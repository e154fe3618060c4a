"""Kernel files of users: their text, what they use, their parameters, and the comments at their top that jitact reads."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from .. import registry
from ..kernels import KernelSource
from ..kernels.loader.signature import Function, before_parameters, possible_saves
from ..kernels.loader.uses import names_used, namespace
from ..records import Activation

__all__ = [
    "check_encodable",
    "checked",
    "definitions_used",
    "header",
    "in_order_of_use",
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


HEADER_OF_A_USER = re.compile(r'^[ \t]*#[ \t]*include(?![ \t]*"elementwise\.cuh")', re.MULTILINE)


def definitions_used(text: str, beside: Mapping[str, Activation]) -> tuple[KernelSource, ...]:
    """The kernel files whose functions a kernel file calls, but for those of the library.

    Args:
        text: the kernel file's.
        beside: those in the same folder, which come before all others of their names.

    Raises:
        ValueError: there is no such activation, or none that can be called.
    """
    used, known = [], {name: cls.activation for name, cls in registry.REGISTRY.items()} | dict(beside)
    for name in names_used(text):
        if name in known:
            used.append(known[name].source)
        elif not HEADER_OF_A_USER.search(text):  # it may be declared in a header
            line = text.count("\n", 0, re.search(rf"\b{namespace(name)}\s*::", text).start()) + 1
            near = difflib.get_close_matches(name, known, n=1)
            suggestion = f"; did you mean {namespace(near[0])}?" if near else ""
            raise ValueError(f"line {line}: it uses {namespace(name)}::, and there is no activation {name!r}{suggestion}")
    KernelSource("", text, "", given=tuple(used)).used_text  # noqa: B018  # which raises for what cannot be used
    return tuple(source for source in used if not source.is_librarys)


def in_order_of_use(texts: Mapping[str, str]) -> list[str]:
    """The names of kernel files, each after those of them that it uses.

    Raises:
        ValueError: one uses itself, perhaps through others.
    """
    ordered: list[str] = []

    def add(name: str, users: tuple[str, ...]) -> None:
        if name in users:
            raise ValueError(f"{' uses '.join([*users[users.index(name) :], name])}: an activation cannot use itself")
        for used in names_used(texts[name]):
            if used in texts and used not in ordered:
                add(used, (*users, name))
        if name not in ordered:
            ordered.append(name)

    for name in texts:
        add(name, ())
    return ordered


def names_there(functions: dict[str, Function]) -> tuple[str, ...]:
    """What the functions call the parameters, which is the same in all of them; a function that does not use one need not.

    Raises:
        ValueError: they differ, nothing tells what one is called, or one is no number.
    """
    taken = {name: function.arguments[before_parameters(name) :] for name, function in functions.items()}
    forward = taken["forward"]
    for name, params in taken.items():
        same = len(params) == len(forward) and all(a == b or None in (a, b) for a, b in zip(params, forward, strict=True))
        if not same:
            told = [", ".join(param or "T" for param in each) or "no parameters" for each in (params, forward)]
            raise ValueError(f"line {functions[name].line}: {name} takes {told[0]} where forward takes {told[1]}")
    for name, type_ in zip(forward, functions["forward"].types[1:], strict=True):
        if type_ not in ("T", "Number<T>"):
            line = functions["forward"].line
            raise ValueError(f"line {line}: a parameter must be a T or a Number<T>, got {type_} {name or ''}")
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
    possible = possible_saves(functions)
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
