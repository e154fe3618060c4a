"""Evaluates C++ conditions in which each known name has a set of possible values."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Mapping

__all__ = ["Facts", "evaluate"]

Facts = Mapping[str, frozenset]
"""The possible values of expressions, by their text without spaces: ``{"op": {"Op::forward", "Op::backward"}}``."""

_TOKEN = re.compile(r"\s*(\d+|&&|\|\||[=!<>]=|::|\S)")
_OPERATORS: tuple[dict[str, Callable], ...] = (
    {"==": operator.eq, "!=": operator.ne},
    {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul},
)


def evaluate(expression: str, facts: Facts) -> frozenset | None:
    """The possible values of an expression; None if nothing is known.

    The value of an enumerator is its text. Unknown parts do not matter where the others decide: ``false && x`` is false.
    """
    several = [name for name, values in facts.items() if len(values) > 1 and name in re.sub(r"\s+", "", expression)]
    found: set = set()
    for values in itertools.product(*(facts[name] for name in several)):
        assumed = {**facts, **{name: frozenset([value]) for name, value in zip(several, values, strict=True)}}
        value = _Evaluation(expression, assumed).value()
        if value is None:
            return None
        found |= value
    return frozenset(found)


class _Evaluation:
    def __init__(self, expression: str, facts: Facts) -> None:
        self.names = sorted(facts, key=len, reverse=True)
        self.facts = facts
        values = [value for known in facts.values() for value in known if isinstance(value, str)]
        self.enums = {value.partition("::")[0] for value in values}
        self.rest = re.sub(r"\s+", "", expression)
        self.known = True

    def value(self) -> frozenset | None:
        try:
            value = self.choice()
        except _Unknown:
            return None
        return None if self.rest else value

    def take(self, *signs: str) -> str | None:
        for sign in signs:
            if self.rest.startswith(sign):
                self.rest = self.rest[len(sign) :]
                return sign
        return None

    def choice(self) -> frozenset | None:
        condition = self.either()
        if not self.take("?"):
            return condition
        yes = self.choice()
        if not self.take(":"):
            raise _Unknown
        no = self.choice()
        if condition is None or len(condition) > 1:
            return None if yes is None or no is None else yes | no
        return yes if True in condition else no

    def either(self) -> frozenset | None:
        value = self.both()
        while self.take("||"):
            value = _joined(value, self.both(), True)
        return value

    def both(self) -> frozenset | None:
        value = self.compared(0)
        while self.take("&&"):
            value = _joined(value, self.compared(0), False)
        return value

    def compared(self, level: int) -> frozenset | None:
        if level == len(_OPERATORS):
            value = self.single()
            while not re.match(r"&&|\|\|", self.rest) and self.take("<<", ">>", "%", "/", "&", "|", "^"):
                self.single()
                value = None
            return value
        value = self.compared(level + 1)
        while not re.match(r"<<|>>", self.rest) and (sign := self.take(*_OPERATORS[level])):
            other = self.compared(level + 1)
            function = _OPERATORS[level][sign]
            if value is None or other is None:
                value = None
            else:
                value = frozenset(function(a, b) for a, b in itertools.product(value, other))
        return value

    def single(self) -> frozenset | None:
        if self.take("!"):
            value = self.single()
            return None if value is None else frozenset(not each for each in value)
        for name in self.names:
            if self.rest.startswith(name) and not re.match(r"[\w<(.\[]|::", self.rest[len(name) :]):
                self.rest = self.rest[len(name) :]
                return self.facts[name]
        if self.take("("):
            value = self.choice()
            if not self.take(")"):
                raise _Unknown
            return value
        return self.other()

    def other(self) -> frozenset | None:
        """A number, an enumerator, or an unknown operand."""
        found = re.match(r"\d+(?![\w.])|(?:true|false)\b|([A-Z]\w*)::[a-z]\w*(?![\w<(])", self.rest)
        if found and (found[1] is None or found[1] in self.enums):
            self.rest = self.rest[found.end() :]
            text = found[0]
            return frozenset([int(text) if text.isdigit() else text == "true" if text in ("true", "false") else text])
        unknown = re.match(r"[-+*&~]*[\w:.]+(?:->[\w:.]+)*", self.rest)
        if not unknown:
            raise _Unknown
        self.rest = self.rest[unknown.end() :]
        while self.rest[:1] in ("(", "[", "<"):
            end = _end_of_bracket(self.rest)
            if end is None:
                break  # a comparison
            self.rest = self.rest[end:]
            more = re.match(r"[\w:.]+|->[\w:.]+", self.rest)
            self.rest = self.rest[more.end() :] if more else self.rest
        return None


class _Unknown(Exception):
    """The expression has syntax that is not supported here."""


def _joined(a: frozenset | None, b: frozenset | None, decides: bool) -> frozenset | None:
    """The values of ``a || b``, if ``decides`` is True, or of ``a && b``, if it is False."""
    if a == {decides} or b == {decides}:
        return frozenset([decides])
    if a is None or b is None:
        return None
    function = any if decides else all
    return frozenset(function(pair) for pair in itertools.product(a, b))


def _end_of_bracket(text: str) -> int | None:
    """The index after the bracket that closes the first one; None for a ``<`` that is a comparison."""
    closing = {"(": ")", "[": "]", "<": ">"}
    if text[0] == "<" and not re.match(r"<[\w:,<>]*>", text):
        return None
    depth = 0
    for at, sign in enumerate(text):
        depth += (sign == text[0]) - (sign == closing[text[0]])
        if depth == 0:
            return at + 1
    return None
