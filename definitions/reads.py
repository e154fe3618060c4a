"""Which tensors each gradient of an expression reads: tensors that no wanted gradient reads are not saved for backward.

Derived from the expression's key, which is its structure: ``x + y * z`` is ``(+ t0 (* t1 t2))``. The rules follow the dual
numbers that kernels differentiate with, in which constant subexpressions contribute nothing (``times_derivative``): the
derivative of a sum reads neither operand, that of a product the other operand. Operators without a rule here read all operands.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Part", "read_by_gradients"]

_TRUTHS = frozenset(("||", "&&", "!", "==", "!=", "<", "<=", ">", ">="))  # boolean results have no derivative
_NOTHING: frozenset[int] = frozenset()
_TOKEN = re.compile(r"[()]|[^\s()]+")


class Part(NamedTuple):
    """What is known of a subexpression. Tensors are given by their indices among the variables.

    Attributes:
        tensors: those that occur in it.
        reads: per tensor that its derivative depends on, the tensors whose values the gradient with respect to it reads.
        passed: those whose derivative is exactly 1, so that their gradient is the incoming one.
    """

    tensors: frozenset[int]
    reads: dict[int, frozenset[int]]
    passed: frozenset[int] = _NOTHING


def read_by_gradients(key: str) -> Part:
    """Analyses the expression with this key."""
    outer: list[tuple[str, list[Part]]] = []
    head, parts = "", []
    tokens = iter(_TOKEN.findall(key))
    for token in tokens:
        if token == "(":
            outer.append((head, parts))
            head, parts = next(tokens), []
        elif token == ")":
            made = _RULES.get(head, _of_function)(parts)
            head, parts = outer.pop()
            parts.append(made)
        else:
            parts.append(_leaf(token))
    (whole,) = parts
    return whole


def _leaf(token: str) -> Part:
    """A tensor, or a number, which reads nothing."""
    if not re.fullmatch(r"t\d+", token):
        return Part(_NOTHING, {})
    place = int(token[1:])
    return Part(frozenset([place]), {place: _NOTHING}, frozenset([place]))


def _tensors(parts: list[Part]) -> frozenset[int]:
    return _NOTHING.union(*(part.tensors for part in parts))


def _truth(parts: list[Part]) -> Part:
    return Part(_tensors(parts), {})


def _linear(*parts: Part, factors: tuple[frozenset[int], ...] = ()) -> Part:
    """A sum of the parts' derivatives, each times a factor that reads the tensors in its entry of ``factors``, if given."""
    reads: dict[int, frozenset[int]] = {}
    for part, more in zip(parts, factors or [_NOTHING] * len(parts), strict=True):
        for place, read in part.reads.items():
            reads[place] = reads.get(place, _NOTHING) | read | more
    return Part(_tensors([*parts]), reads)


def _sum(parts: list[Part]) -> Part:
    a, b = parts
    passed = (a.passed - b.reads.keys()) | (b.passed - a.reads.keys())
    return _linear(a, b)._replace(passed=passed)


def _difference(parts: list[Part]) -> Part:
    """Binary or unary minus."""
    passed = parts[0].passed - parts[1].reads.keys() if len(parts) > 1 else _NOTHING
    return _linear(*parts)._replace(passed=passed)


def _product(parts: list[Part]) -> Part:
    a, b = parts
    return _linear(a, b, factors=(b.tensors, a.tensors))


def _quotient(parts: list[Part]) -> Part:
    a, b = parts
    return _linear(a, b, factors=(b.tensors, a.tensors | b.tensors))


def _choice(parts: list[Part]) -> Part:
    condition, a, b = parts
    chosen = _linear(a, b, factors=(condition.tensors, condition.tensors))
    return Part(_tensors(parts), chosen.reads, a.passed & b.passed)


def _of_function(parts: list[Part]) -> Part:
    tensors = _tensors(parts)
    return _linear(*parts, factors=(tensors,) * len(parts))


_RULES: dict[str, Callable[[list[Part]], Part]] = {
    **dict.fromkeys(_TRUTHS, _truth),
    "+": _sum,
    "-": _difference,
    "*": _product,
    "/": _quotient,
    "?": _choice,
    "fma": lambda parts: _sum([_product(parts[:2]), parts[2]]),
    "dropout": lambda parts: _linear(*parts),  # backward draws the mask again
}
