"""Joins short lines of cut C++: what is left of a declaration or a block goes on one line if it fits."""

from __future__ import annotations

import re

__all__ = ["LONGEST", "joined"]

LONGEST = 127
"""The longest line, in characters."""

_TEMPLATE = re.compile(r" *template <.*>$")
_CONTROL = re.compile(r" *(?:(?:\} )?else |JITACT_UNROLL )?(?:if|for)\b.*\)$")
_OPENS = re.compile(r" *(?!namespace|extern|#|asm|\}|enum).*\{$")
_CLOSES = re.compile(r" *\};?")
_SIMPLE = re.compile(r" *(?!if|for|while|switch|case|template|static_assert)[^{}]*;$")
_ONE = re.compile(r".*;$|^ *(?:JITACT_UNROLL )?(?:for|if)\b.*\}$")
_INITIALIZER = re.compile(r" *\.\w+ = [^,]*,")
_TERM = re.compile(r" *(?:(?:const )?(?:float|double) )?(\w+) = (?:(?:::)?fmaf?\(\1, .*\)|-?[\d.]+(?:e[-+]\d+)?f?);$")
_MOST_STATEMENTS = 3  # of a function on one line


def joined(text: str) -> str:
    """The text without empty lines, and with short lines joined.

    Joined are ``template <...>`` and its declaration, a condition and its branch, functions of a few statements, and the steps
    of a polynomial.
    """
    lines = [line for line in text.split("\n") if line.strip()]
    before = None
    while lines != before:
        before, lines = lines, _pass(lines)
    return "\n".join(lines)


def _pass(lines: list[str]) -> list[str]:
    made: list[str] = []
    at = 0
    while at < len(lines):
        taken = 0 if "//" in lines[at] else _taken(lines[at], lines[at + 1 :])
        made.append(_one(lines[at : at + taken + 1]))
        at += 1 + taken
    return made


def _taken(line: str, following: list[str]) -> int:
    """How many of the following lines are joined to a line."""
    if not following:
        return 0
    first = following[0]
    if _TEMPLATE.match(line) or line.endswith(" ="):
        return int(not first.lstrip().startswith("#") and _fit([line, first]))
    if _CONTROL.match(line):
        return int(first.endswith(";") and _indentation(first) > _indentation(line) and _fit([line, first]))
    if _OPENS.match(line):
        return _block(line, following)
    return _terms(line, following)


def _block(line: str, following: list[str]) -> int:
    """How many lines are left of a block that fits on one line; 0 if it does not."""
    end = next((at for at, each in enumerate(following) if _indentation(each) <= _indentation(line)), None)
    if end is None or not _CLOSES.fullmatch(following[end]) or not _fit([line, *following[: end + 1]]):
        return 0
    inner = following[:end]
    is_function = re.search(r"\)(?: const)? \{$", line) and not re.match(r" *(?:JITACT_UNROLL )?(?:for|if|while)\b", line)
    alone = len(inner) == 1 and _ONE.match(inner[0])
    several = is_function and len(inner) <= _MOST_STATEMENTS and all(map(_SIMPLE.match, inner))
    return end + 1 if not inner or alone or several or all(map(_INITIALIZER.match, inner)) else 0


def _terms(line: str, following: list[str]) -> int:
    """1 if the next line is another step of the same polynomial and fits on this one, else 0."""
    name = re.match(r".*\b(\w+) = [^=]*$", line.split("; ")[0])
    whole = re.fullmatch(rf"{_TERM.pattern[:-2]};(?: \w+ = .*;)?", line)
    next_one = _TERM.match(following[0])
    same = name and whole and next_one and next_one[1] == name[1] and " = " in following[0] and "fma" in following[0]
    return int(bool(same) and _fit([line, following[0]]))


def _one(lines: list[str]) -> str:
    """The lines joined to one."""
    text = " ".join([lines[0], *(each.strip() for each in lines[1:])])
    return re.sub(r"\{ (\.\w+ = .*), \};$", r"{\1};", text.replace("{ }", "{}")) if len(lines) > 1 else text


def _fit(lines: list[str]) -> bool:
    if any("//" in line for line in lines):
        return False
    text = " ".join([lines[0], *(line.strip() for line in lines[1:])])
    return len(text.replace("JITACT_", "")) <= LONGEST


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())
