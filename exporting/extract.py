"""What a kernel file needs of the library's headers, and no more: for :mod:`jitact.onefile`, which puts it into one file.

This reads C++ as far as the headers in kernels/ go: a declaration at the level of a namespace starts in the first column,
and a macro that declares functions is called in the first column too.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ..kernels.loader.source import DEVICE

__all__ = ["declared", "extract"]

WORD = re.compile(r"(?:\w*::)?\b[A-Za-z_]\w*")
INCLUDE = re.compile(r'^#include "(\w+\.cuh)"\n', re.MULTILINE)
LOCAL = re.compile(r"\b(?:u?int\d+_t|int|float|double|T) (\w+) = ")
NO_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"|^#[^\n]*', re.DOTALL | re.MULTILINE)
FAST_MATH = re.compile(r"^#ifdef JITACT_FAST_MATH\n(?:.*\n)*?(?:#else\n((?:.*\n)*?))?#endif.*\n?", re.MULTILINE)
MACRO = re.compile(r"^#define (\w+)\(([^)]*)\)((?:.*\\\n)*.*)$", re.MULTILINE)
TEMPLATE = re.compile(r"^template <[^\n]*?>(?=\s*(?:\n|JITACT|struct))\s*", re.MULTILINE)
NAMES = (  # of what a declaration declares, the first that fits
    r"#define (\w+)",
    r"(?:struct|class|enum class|namespace) (\w+)",
    r"using (?:\w+::)*(\w+)",
    r"constexpr \w+ (\w+)",
    r"(\w+)\(",
)
# A type's function, in one line or in several, with the comment above it.
FRIEND = re.compile(r"(?:^  //.*\n)*^  friend [^(\n]*?(\w+)\(.*(?:\}\n|\{\n(?:(?:    |#).*\n)*  \}\n)", re.MULTILINE)


@dataclass(eq=False)
class Declaration:
    """A declaration with the comment above it, its namespace, and the name that it declares; "" for a comment alone."""

    namespace: str
    name: str
    text: str

    @cached_property
    def code(self) -> str:
        """Its text without comments."""
        return NO_CODE.sub(lambda match: match[0] if match[0].startswith("#define") else "", self.text)

    @cached_property
    def type(self) -> str | None:
        """The one number type that a function of math.cuh is for; None for what serves all."""
        overload = re.match(r"\s*JITACT_INLINE (Double|Single|Narrow) \w+\(", self.code)
        return overload and overload[1]

    @cached_property
    def words(self) -> set[str]:
        """The names in it but for variables, with the namespace before those that have one: ``single::exp``."""
        return {word.removeprefix("for_") for word in WORD.findall(self.code)} - set(LOCAL.findall(self.code))

    def uses(self, other: Declaration, known: set[tuple[str, str]]) -> bool:
        """Whether it names another: by its namespace, or alone if it is in the same one or in jitact, and none is nearer."""
        if not other.name or (self.type and other.type and self.type != other.type):
            return False
        if other.name in self.words and other.namespace in (self.namespace, "jitact"):
            return other.namespace == self.namespace or (self.namespace, other.name) not in known
        return f"{other.namespace.removeprefix('jitact::')}::{other.name}" in self.words

    def pruned(self, words: set[str]) -> str:
        """Its text, without the functions of a type that are not among ``words``. Operators always are."""
        text = FRIEND.sub(lambda friend: friend[0] if friend[1] in words or "operator" in friend[0] else "", self.text)
        return text.replace("\n\n};", "\n};").replace("for_single::", "single::")


def extract(kernel: str, roots: Iterable[str]) -> tuple[str, str]:
    """The parts of the headers and of a kernel file that ``roots`` need.

    Args:
        kernel: a kernel file's text.
        roots: functions of the kernel file, and types of number.cuh. What is made for Dual is left out if Dual is not
            among them.

    Returns:
        The headers' part, and the kernel file's.
    """
    roots = set(roots)
    own = list(_declarations(kernel))
    header = INCLUDE.search(kernel)
    headers = _expanded(header[1] if header else "elementwise.cuh", set())
    library = [each for each in _declarations(headers) if each.name not in ("", "for_single")]
    if "Dual" not in roots:
        library = [each for each in library if "Dual" not in each.code]
    pending = [each for each in [*own, *library] if each.name in roots and each.namespace in ("", "jitact")]
    wanted, known = set(pending), {(each.namespace, each.name) for each in [*own, *library]}
    while pending:
        user = pending.pop()
        used = {each for each in [*own, *library] if each not in wanted and user.uses(each, known)}
        wanted |= used
        pending += used
    types = [each for each in wanted if "friend" in each.code]
    words, before = set().union(*(each.words for each in wanted - set(types))), set()
    while words != before:  # a type's function may call another
        before = words
        words = before.union(*(WORD.findall(NO_CODE.sub("", each.pruned(before))) for each in types))
    mine = [each for each in own if not each.name or each in wanted]
    return _join([each for each in library if each in wanted], words), _join(mine, words)


def declared() -> set[str]:
    """The names of the functions that kernel files may call."""
    library = list(_declarations(_expanded("elementwise.cuh", set())))
    friends = {match[1] for each in library for match in FRIEND.finditer(each.text) if "operator" not in match[0]}
    return friends | {each.name for each in library if each.namespace == "jitact" and each.type == "Single"}


def _join(declarations: list[Declaration], words: set[str]) -> str:
    """The text of declarations in their namespaces; what takes a line stands without a blank line between."""
    lines, namespace, before = [], "", ""
    for declaration in declarations:
        text = declaration.pruned(words)
        if declaration.namespace != namespace:
            lines += ["}\n\n"] * bool(namespace) + [f"namespace {declaration.namespace} {{\n\n"]
            namespace, before = declaration.namespace, ""
        if before and not before.count("\n") == text.count("\n") == 1:
            lines.append("\n")
        lines.append(text)
        before = text
    return "".join(lines + ["\n}\n"] * bool(namespace))


def _expanded(header: str, seen: set[str]) -> str:
    """A header with those that it includes in their places, each once."""
    seen.add(header)
    text = (DEVICE / header).read_text()
    return INCLUDE.sub(lambda line: "" if line[1] in seen else _expanded(line[1], seen), text)


def _declarations(text: str) -> Iterator[Declaration]:
    """The declarations of a file as it is compiled without JITACT_FAST_MATH, macros written out."""
    text = FAST_MATH.sub(lambda branches: branches[1] or "", text)
    macros = {match[1]: match for match in MACRO.finditer(text)}
    text = MACRO.sub("", text)
    calls = rf"^(?:(?:{'|'.join(macros) or '$^'})\(.*\)[ \t]*)+$"
    text = re.sub(calls, lambda line: "".join(_calls(line[0], macros)), text, flags=re.MULTILINE)

    namespace, comment, lines = "", "", iter(text.splitlines(keepends=True))
    for line in lines:
        if line.startswith("//"):
            comment += line
            continue
        if comment and not line.strip():
            yield Declaration(namespace, "", comment)
        opening = re.match(r"namespace ([\w:]+) \{", line)
        if opening:
            namespace = opening[1]
        elif line.strip() and not re.match(r"\}|#(?!define \w+ )|#define (JITACT_INLINE|ELEMENTWISE)|using jitact::", line):
            declaration = line
            while not _is_whole(declaration):
                declaration += next(lines)
            yield Declaration(namespace, _name(declaration), comment + declaration)
        comment = ""


def _calls(line: str, macros: dict[str, re.Match]) -> Iterator[str]:
    """What a line of macro calls stands for."""
    for name, given in re.findall(r"(\w+)\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)", line):
        _, parameters, body = macros[name].groups()
        body = textwrap.dedent(re.sub(r"[ \t]*\\$", "", body, flags=re.MULTILINE)).strip("\n") + "\n"
        values = dict(zip(re.split(r",\s*", parameters), re.split(r",\s*(?![^()]*\))", given), strict=True))
        body = re.sub(rf"\b({'|'.join(values)})\b", lambda word: values[word[1]], body)  # noqa: B023
        for each in body.replace("##", "").splitlines(keepends=True):
            yield from _calls(each, macros) if each.split("(")[0] in macros else [each]


def _is_whole(declaration: str) -> bool:
    code = NO_CODE.sub("", declaration).rstrip()
    if declaration.startswith("#define"):
        return True
    return code.endswith((";", "}")) and code.count("{") == code.count("}") and code.count("(") == code.count(")")


def _name(declaration: str) -> str:
    code = TEMPLATE.sub("", declaration if declaration.startswith("#") else NO_CODE.sub("", declaration)).lstrip()
    return next(match[1] for match in (re.match(rf"(?:.*?\b)??{name}", code) for name in NAMES) if match)
