"""Users' kernel files: their text, the activations they call, their parameters, and the header comments that jitact reads."""

from __future__ import annotations

import difflib
import inspect
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from .. import registry
from ..kernels import KernelSource
from ..kernels.loader.signature import Function, Signature, before_operands, code, possible_saves, takes_elements
from ..kernels.loader.uses import names_used, namespace
from ..records import Activation, Channel, library

__all__ = [
    "check_encodable",
    "check_reference",
    "checked",
    "definitions_used",
    "header",
    "in_order_of_use",
    "is_of_rows",
    "librarys_defaults",
    "listed",
    "parameter_names",
    "quoted",
    "read_file",
    "read_saves",
    "unmarked_numbers",
    "with_header",
    "write_file",
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


def write_file(path: Path, text: str) -> None:
    """Writes a text file, at once: nothing that reads it finds a part of it, also if the writing is killed.

    Links stay links, and permissions what they are. Pipes and terminals, and files in a folder that takes no new ones, are
    written directly.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not (path.is_file() and os.access(path.resolve().parent, os.W_OK)):
        path.write_text(text, encoding="utf-8")  # not resolved: a pipe that /dev/stdout leads to has no name
        return
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # not *.cu, which would be loaded
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def checked(text: str) -> str:
    """A kernel file's text with line ends normalised to ``\\n``, and without a byte order mark.

    Raises:
        ValueError: it has a NUL character, or characters that cannot be encoded in UTF-8.
    """
    if "\0" in text:
        raise ValueError(f"the kernel file has a NUL character in line {text.count(chr(10), 0, text.index(chr(0))) + 1}")
    check_encodable(text, "the kernel file")
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def check_encodable(text: str, where: str) -> None:
    """Checks that a text can be encoded in UTF-8.

    Raises:
        ValueError: it has an unpaired surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} has a character that is none in UTF-8: {text[error.start]!r}") from None


def is_of_rows(text: str) -> bool:
    """Whether a kernel file, which need not be :func:`checked`, includes ``rows.cuh``, and so works on rows."""
    return re.search(r'(?:^|[\r\n\ufeff])[ \t]*#[ \t]*include[ \t]*"rows\.cuh"', code(text)) is not None


HEADER_OF_A_USER = re.compile(r'^[ \t]*#[ \t]*include(?![ \t]*"elementwise\.cuh")', re.MULTILINE)


def definitions_used(text: str, beside: Mapping[str, Activation]) -> tuple[KernelSource, ...]:
    """The users' kernel files whose functions a kernel file calls; the library's are not among them.

    Args:
        text: the kernel file's.
        beside: the definitions in the same folder, which take precedence over registered ones of their names.

    Raises:
        ValueError: there is no such activation, or it cannot be called.
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
    KernelSource("", text, "", given=tuple(used)).used_text  # noqa: B018  # raises if one cannot be called
    return tuple(source for source in used if not source.is_librarys)


def in_order_of_use(texts: Mapping[str, str]) -> list[str]:
    """The names of kernel files in topological order: each after those that it uses.

    Raises:
        ValueError: one uses itself, directly or through others.
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


def librarys_defaults(text: str) -> dict[str, float | Channel]:
    """The defaults of the parameters and channel operands of a kernel file that is an unchanged copy of the library's."""
    lines = [record for record in library.values() if record.source.text == text]
    return dict(lines[0].params) | lines[0].channels if lines else {}


def unmarked_numbers(functions: dict[str, Function], declared: Collection[str]) -> tuple[str, ...]:
    """The trailing arguments of ``forward`` of type ``T`` that have a default, and so are parameters without ``Number<T>``.

    Args:
        functions: the functions of a kernel file.
        declared: the names that have a default.

    Raises:
        ValueError: the functions differ in their parameters, no function names one, or one must be a ``Number<T>``.
    """
    forward = functions["forward"]
    names = list(forward.arguments)
    for name, function in functions.items():
        given = list(zip(function.types, function.arguments, strict=True))[before_operands(name) :]
        backwards = range(-1, -min(len(given), len(names)) - 1, -1)
        for k in backwards:  # aligned at the end, as functions of the output take no elementwise tensors
            names[k] = names[k] or (given[k][1] if given[k][0] == forward.types[k] else None)
    if None in names[1:]:
        raise ValueError(f"line {forward.line}: no function has a name for parameter {names.index(None, 1)}")
    first = len(names)
    for k in range(len(names) - 1, 0, -1):
        first = k if forward.types[k] == "T" and _is_declared(names[k], declared) else first
    if set(forward.types[first:]) - {"T"}:
        name = names[first]
        raise ValueError(f"line {forward.line}: {name} is a parameter, and not among the last; make it a Number<T> {name}")
    _check_alike(functions, len(names) - first)
    return tuple(names[first:])


def _is_declared(name: str | None, declared: Collection[str]) -> bool:
    return name is not None and (name in declared or name.removesuffix("_") in declared)


def _check_alike(functions: dict[str, Function], numbers: int) -> None:
    """Checks that functions take the same operands under the same names; names of elementwise tensors may differ.

    Raises:
        ValueError: they do not.
    """
    forward = functions["forward"]
    marks = [*forward.types[: len(forward.types) - numbers], *["number"] * numbers]  # "T" marks an elementwise tensor
    for name, function in functions.items():
        taken = list(zip(function.types, function.arguments, strict=True))[before_operands(name) :]
        expected = [
            (type_, argument, mark == "T")
            for type_, argument, mark in zip(forward.types, forward.arguments, marks, strict=True)
            if mark != "T" or takes_elements(name)
        ]
        same = len(taken) == len(expected) and all(
            a == b and (element or c == d or None in (c, d)) for (a, c), (b, d, element) in zip(taken, expected, strict=True)
        )
        if not same:
            elements = sum(element for *_, element in expected)
            ours, forwards = (
                ", ".join(argument or type_ for type_, argument, *_ in each[elements:]) or "no parameters"
                for each in (taken, expected)
            )
            raise ValueError(f"line {function.line}: {name} takes {ours} where forward takes {forwards}")


def parameter_names(there: Signature, declared: Collection[str]) -> tuple[str, ...]:
    """The parameters' names: as in the kernel file, or without a trailing underscore if that is what is declared."""
    numbers = [operand.in_file for operand in there.operands if operand.role == "number"]
    bare = tuple(name.removesuffix("_") for name in numbers)
    some = tuple(b if a not in declared and b in declared else a for a, b in zip(numbers, bare, strict=True))
    return bare if set(bare) <= set(declared) else some


def listed(saves: str | Iterable[str]) -> tuple[str, ...]:
    """What a list of what backward can keep has, given as text or one by one."""
    return tuple(re.findall(r"\w+", saves) if isinstance(saves, str) else saves)


def read_saves(functions: dict[str, Function], wanted: str | Iterable[str]) -> tuple[str, ...]:
    """What can be kept for backward, the default first: ``wanted`` and "input", or by default all that the functions allow.

    Raises:
        ValueError: the functions do not allow what is wanted.
    """
    possible = possible_saves(functions)
    wanted = listed(wanted)
    for save in wanted:
        if save not in possible:
            raise ValueError(f"backward cannot keep {save!r} with the functions that there are, only {', '.join(possible)}")
    return tuple(dict.fromkeys([*(wanted or possible), "input"]))


def check_reference(name: str, reference: Callable[..., Tensor], arguments: list[str]) -> None:
    """Checks that a reference can be called with these positional arguments.

    Raises:
        TypeError: it cannot.
    """
    try:
        inspect.signature(reference).bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{name}: the reference must take ({', '.join(arguments)}): {error}") from None
    except ValueError:  # a built-in function, whose signature cannot be inspected
        return


TOP = re.compile(r"(?:[ \t]*(?://|#[ \t]*include\b)[^\n]*\n|[ \t]*\n)*")  # comments, blank lines and #include lines
HEADER = re.compile(r"^// *(activation|parameters|keeps|formula): *(.*?) *$\n?", re.MULTILINE)


def header(text: str) -> dict[str, str]:
    """The fields in the comments at the top of a kernel file, such as ``// parameters: a = 1.0, b = 2``.

    Raises:
        ValueError: a field occurs twice.
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
    """A formula for a comment: unchanged, or as a JSON string if it is not a single line of printable text."""
    plain = formula.isprintable() and formula == formula.strip(" ") and formula[:1] != '"' and formula[-1:] != "\\"
    return formula if plain else json.dumps(formula)


def _unquoted(formula: str) -> str:
    """The formula that :func:`quoted` wrote, or a user."""
    if formula.startswith('"'):
        try:
            return str(json.loads(formula))
        except ValueError:  # a user's text that begins with a quotation mark
            pass
    return formula


def with_header(text: str, fields: dict[str, str]) -> str:
    """A kernel file with these fields in the comments at its top, replacing any that it has; empty ones are left out."""
    header = "".join(f"// {key}: {value}\n" for key, value in fields.items() if value)
    top = len(TOP.match(text)[0])
    rest = HEADER.sub("", text[:top]) + text[top:]
    return f"{header}\n{rest.strip()}\n"
