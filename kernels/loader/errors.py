"""The exceptions of building and loading, and their messages, which summarise a compiler's output in a few lines."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

from .signature import code

__all__ = ["BuildError", "CompileError", "NoSpaceError", "NotOursError", "ToolchainError", "explain"]


class BuildError(RuntimeError):
    """A kernel cannot be compiled or loaded. The message says what is missing or wrong, and how to fix it."""

    def __reduce__(self) -> tuple:
        """Pickles as type and message: worker processes send errors to the process that reports them."""
        return _revive, (type(self), str(self))


class ToolchainError(BuildError):
    """A compiler, or something that it needs, is missing or incompatible."""


class CompileError(BuildError):
    """A compiler refused a kernel file."""


class NoSpaceError(BuildError):
    """The disk that holds the cache is full."""


class NotOursError(BuildError):
    """Something in the cache folder belongs to another user or cannot be written."""


def _revive(kind: type[BuildError], message: str) -> BuildError:
    return kind(message)


SHOWN = 5  # errors in one message; the log has all

_GNU = r"^(?P<file>[^\s:][^:\n]*):(?P<line>\d+)(?::(?P<column>\d+))?: (?:fatal )?error: (?P<text>.*)$"
_EDG = r"^(?P<file>[^\s(][^(\n]*)\((?P<line>\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (?P<text>.*)$"
_EXCERPT = r"^\s*(\d+ )?\|"  # the source line and the caret that gcc and clang print below an error
_OTHER = r"(?i)undefined reference|cannot find|multiple definition|\berror\b|\bfatal\b"

# What a compiler prints if the machine is at fault and not the kernel, and the remedy.
_REMEDIES = (
    (
        r"Killed signal|\bKilled\b|signal 9|annot allocate memory|memory exhausted|out of memory",
        "the compiler ran out of memory: set JITACT_JOBS=1, or give this machine or container more",
    ),
    (
        r"unsupported (GNU|clang) version",
        "nvcc does not accept this C++ compiler: install an older one and name it, as in CC=gcc-13 CXX=g++-13",
    ),
    (
        r"Unsupported gpu architecture|is not defined for option 'gpu-architecture'",
        "nvcc is older than the GPU, or too new for it: python -m jitact doctor",
    ),
    (
        r"Unsupported \.version|nv/target: No such file|crt/\S+: No such file|libdevice not found",
        "the parts of the CUDA toolkit do not fit together: python -m jitact doctor prints what installs them",
    ),
    (
        r"fatal error: (c?std\w+|cmath|algorithm|string|bits/\S+): No such file",
        "the headers of the C++ library are missing: install g++ as a whole (apt-get install g++)",
    ),
    (r"fatal error: Python\.h", "the kernel includes Python.h: install Python's headers (apt-get install python3-dev)"),
)
_NO_ERRORS = ("Error building extension", "FAILED", "ninja:", "In file", "collect2", "c++ ", "/")
_FULL = r"No space left on device|Disk quota exceeded"


def explain(name: str, output: str, path: str, log: Path | None, text: str = "", *, is_full: bool = False) -> BuildError:
    """The error to raise for a failed compilation.

    Args:
        name: the activation's name.
        output: the output of the compilers and the linker.
        path: the kernel file's path in messages of compilers; errors in it are shown first.
        log: the file that has the whole output, None if it could not be written.
        text: the kernel file's text, to show lines of it where the compiler could not read ``path``.
        is_full: whether the disk has no room left, so that the output may be lost.
    """
    full = f"full log: {log}" if log else "the log could not be written"
    if re.search(_FULL, output):
        return NoSpaceError(f"no space left to compile {name}; {full}")
    for pattern, remedy in _REMEDIES:
        match = re.search(pattern, output)
        if match:
            line = output[output.rfind("\n", 0, match.start()) + 1 :].split("\n", 1)[0].strip()
            return ToolchainError(f"{name} could not be compiled: {remedy}\n{line}\n{full}")
    found = _not_closed(output, path, text) or _errors(output.splitlines(), path, text.splitlines())
    if is_full and not found:
        return NoSpaceError(f"no space left to compile {name}; {full}")
    shown = "\n".join(found[:SHOWN]) or "\n".join(output.strip().splitlines()[-SHOWN:])
    more = f"\n({len(found) - SHOWN} more)" if len(found) > SHOWN else ""
    return CompileError(f"{name} does not compile\n{shown}{more}\n{full}")


def _not_closed(output: str, path: str, text: str) -> list[str]:
    """The error of a brace that is never closed, which compilers report where the headers after the kernel file go on."""
    source, opened = text.splitlines(), []
    beyond = re.findall(rf"^{re.escape(path)}[:(](\d+)", output, re.MULTILINE)
    if not any(int(number) > len(source) for number in beyond):
        return []
    for number, line in enumerate(code(text).splitlines(), 1):
        for brace in re.findall("[{}]", line):
            if brace == "{":
                opened.append(number)
            elif opened:
                opened.pop()
    return ["\n".join([f"{path}:{n}: error: a brace is not closed", *_excerpt(source[n - 1], n, 0, [])]) for n in opened[:1]]


def _errors(lines: list[str], path: str, source: list[str]) -> list[str]:
    """Errors in the user's file, then those elsewhere, else the linker's; each once, though both compilers may report it."""
    mine, elsewhere, other = {}, {}, {}
    for i, line in enumerate(lines):
        match = re.match(_GNU, line) or re.match(_EDG, line)
        if match:
            number, column = int(match["line"]), int(match.groupdict().get("column") or 0)
            text = f"{match['file']}:{number}{f':{column}' if column else ''}: error: {match['text']}"
            excerpt = list(takewhile(re.compile(_EXCERPT).match, lines[i + 1 : i + 3]))
            if not excerpt and match["file"] == path and 0 < number <= len(source):
                excerpt = _excerpt(source[number - 1], number, column, re.findall(r"'(\w+)'", match["text"]))
            group = mine if match["file"] == path else elsewhere
            group.setdefault((match["file"], match["line"]), "\n".join([text, *excerpt]))
        elif re.search(_OTHER, line) and not line.startswith(_NO_ERRORS):
            other.setdefault(line, line)
    return [*mine.values(), *elsewhere.values()] or list(other.values())


def _excerpt(line: str, number: int, column: int, names: list[str]) -> list[str]:
    """A line of the source, and below it a caret at the error if its column is known, as gcc and clang print them."""
    line = line.expandtabs(8)  # compilers count columns so
    shown = [f"{number:5} | {line}"]
    if 0 < column <= len(line) + 1:
        # For a call, the column is that of its parenthesis.
        called = next((name for name in names if line[: column - 1].endswith(name)), "")
        shown.append(f"{'':5} | {'~' * len(called) + '^':>{column}}")
    return shown
