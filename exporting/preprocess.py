"""A partial C preprocessor: resolves includes and known conditions, and expands macros that make declarations."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["OLDEST_GPU", "Line", "Macro", "expanded", "included"]

OLDEST_GPU = 800
"""The lowest ``__CUDA_ARCH__`` that files support: older GPUs lack instructions that are used."""

_LINE = re.compile(r"[ \t]*#(?:[^\n]*\\\n)*[^\n]*\n?|[^\n]*\n?")  # with the continuation lines of a directive
_DIRECTIVE = re.compile(r"[ \t]*#[ \t]*(\w+)[ \t]*((?:[^/]|/(?!/))*)")
_MACRO = re.compile(r"^#define (\w+)\(([^)]*)\)((?:.*\\\n)*.*)\n", re.MULTILINE)
_GIVEN = r"\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)"  # nested two levels deep
_CALL = re.compile(rf"(\w+){_GIVEN}")


class Line(NamedTuple):
    """A line of a source file, or several joined by backslashes."""

    file: Path
    number: int
    text: str


class Macro(NamedTuple):
    """A function-like macro."""

    parameters: tuple[str, ...]
    body: str


def included(text: str, file: Path, folders: list[Path], macros: Mapping[str, str | None], seen: set[Path]) -> Iterator[Line]:
    """The lines of a text with those of the local files that it includes in place, each file once.

    A condition is resolved if all names in it are in ``macros``; else its directives and all branches are kept.

    Args:
        text: the text to read.
        file: the file that it is from.
        folders: where included files are searched for, after the folder of the including file.
        macros: the values of macros; None for one that is not defined.
        seen: the files that were read before; those that are read now are added.
    """
    seen.add(file.resolve())
    text = text if text.endswith("\n") else text + "\n"
    branches: list[tuple[bool | None, bool]] = []  # per open condition: is this branch compiled; was an earlier one
    for number, line in enumerate(filter(None, _LINE.findall(text))):
        directive = _DIRECTIVE.match(line)
        word, rest = (directive[1], directive[2].strip()) if directive else ("", "")
        outer = all(compiled is not False for compiled, _ in branches[: -1 if word in ("else", "elif", "endif") else None])
        if word in ("if", "ifdef", "ifndef"):
            known = _truth(word, rest, macros) if outer else False
            branches.append((known, known is True))
        elif word in ("else", "elif") and branches[-1][0] is not None:
            before = branches.pop()[1]
            known = not before and (word == "else" or _truth("if", rest, macros))
            branches.append((known, before or known is True))
            continue
        elif word == "endif" and branches.pop()[0] is not None:
            continue
        if not all(compiled is not False for compiled, _ in branches) or (
            word.startswith("if") and branches[-1][0] is not None
        ):
            continue
        if word == "include" and rest.startswith('"'):
            other = next(path for folder in (file.parent, *folders) if (path := folder / rest.strip('"')).is_file())
            if other.resolve() not in seen:
                yield from included(other.read_text(), other, folders, macros, seen)
        elif not (word == "pragma" and rest == "once") and not (word in ("define", "undef") and rest.split()[0] in macros):
            yield Line(file, number, line)


def _truth(word: str, condition: str, macros: Mapping[str, str | None]) -> bool | None:
    """Whether a condition holds; None if it has unknown names."""
    if not set(re.findall(r"\bJITACT_\w+", condition)) <= set(macros):
        macros = {**dict.fromkeys(re.findall(r"\bJITACT_\w+", condition)), **macros}
    if word in ("ifdef", "ifndef"):
        return None if condition not in macros else (macros[condition] is not None) == (word == "ifdef")
    if re.fullmatch(r"[01]", condition):
        return condition == "1"
    if condition == f"__CUDA_ARCH__ >= {OLDEST_GPU}":
        return True
    defined = re.fullmatch(r"(!?)\s*defined\s*\(?\s*(\w+)\s*\)?", condition)
    if defined and defined[2] in macros:
        return (macros[defined[2]] is not None) != bool(defined[1])
    if condition.startswith("!") and macros.get(condition[1:], "") is None:
        return True
    first = re.match(r"defined\((\w+)\) && ", condition)
    return False if first and macros.get(first[1], "") is None else None


def expanded(text: str, macros: Mapping[str, str | None], functions: dict[str, Macro]) -> str:
    """The text with object-like macros replaced by their values, and calls of macros in the first column expanded.

    Args:
        text: the text to expand.
        macros: values by name.
        functions: function-like macros defined before; those that are defined and called so here are added.
    """
    for name, value in macros.items():
        if value:
            text = re.sub(rf"\b{name}\b", value, text)
    for match in _MACRO.finditer(text):
        name, parameters, body = match.groups()
        if name.startswith("JITACT_") or re.search(rf"^(?:\w+\(.*\)[ \t]+)?{name}\(", text, re.MULTILINE):
            functions[name] = Macro(tuple(re.split(r",\s*", parameters)), body)
            text = text.replace(match[0], "")
            text = re.sub(rf"^#undef {name}\n+", "", text, flags=re.MULTILINE)
    names = "|".join(functions) or "$^"
    lines = rf"^(?:(?:{names})\(.*\)[ \t]*)+;?$|^(?:{names}){_GIVEN};?$"
    text = re.sub(lines, lambda line: "".join(_calls(line[0], functions)).rstrip("\n"), text, flags=re.MULTILINE)
    if left := re.search(rf"^(?:{names})\(.*", text, re.MULTILINE):  # it would be lost together with what follows
        raise ValueError(f"brackets of a macro call stand too deep in each other: {left[0]}")
    return text


def _calls(line: str, macros: dict[str, Macro]) -> Iterator[str]:
    """The expansion of a line of macro calls."""
    for name, given in _CALL.findall(line):
        parameters, body = macros[name]
        body = textwrap.dedent(re.sub(r"[ \t]*\\$", "", body, flags=re.MULTILINE)).strip("\n") + "\n"
        values = re.split(r",\s*(?![^()]*\))", given)
        if parameters[-1] == "...":
            parameters = (*parameters[:-1], "__VA_ARGS__")
            values = [*values[: len(parameters) - 1], ", ".join(values[len(parameters) - 1 :])]
        named = dict(zip(parameters, values, strict=True))
        body = re.sub(rf"\b({'|'.join(named)})\b", lambda word: named[word[1]], re.sub(r"##\s*", "\0", body))  # noqa: B023
        for each in body.replace("\0", "").splitlines(keepends=True):
            indent, inner = re.match(r"([ \t]*)(.*)", each).groups()
            if inner.split("(")[0] in macros:
                yield textwrap.indent("".join(_calls(inner, macros)), indent)
            else:
                yield each
