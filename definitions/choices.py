"""``?:``, ``min``, ``max`` and ``clamp`` in PyTorch, whose autograd multiplies slopes of what is not taken by 0.

That is NaN where they are infinite or NaN, as of ``x > 0 ? sqrt(x) : 0`` for negative ``x``, where kernels give 0.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Set
from types import CodeType

import torch
from torch import Tensor

from .helpers import clamp, maximum, minimum

__all__ = ["CHOICES", "compiled"]

Function = Callable[..., Tensor]


def choose(condition: Tensor, first: Function, second: Function, *tensors: Tensor) -> Tensor:
    """``torch.where`` of two functions of tensors; what is not taken has no derivative, of any order."""
    taken = [torch.where(condition, each, each.detach()) for each in tensors]
    others = [torch.where(condition, each.detach(), each) for each in tensors]
    return torch.where(condition, first(*taken), second(*others))


def choose_less(first: Function, second: Function, *tensors: Tensor) -> Tensor:
    """The same of ``minimum``."""
    a, b = _constants(tensors, first, second)
    return choose((a < b) | a.isnan(), first, second, *tensors)


def choose_greater(first: Function, second: Function, *tensors: Tensor) -> Tensor:
    """The same of ``maximum``."""
    a, b = _constants(tensors, first, second)
    return choose((a > b) | a.isnan(), first, second, *tensors)


def choose_between(function: Function, low: Function, high: Function, *tensors: Tensor) -> Tensor:
    """The same of ``clamp``."""
    value, least, most = _constants(tensors, function, low, high)
    above, raised = (value > least) | value.isnan(), maximum(value, least)
    return choose((raised < most) | raised.isnan(), lambda *given: choose(above, function, low, *given), high, *tensors)


def _constants(tensors: tuple[Tensor, ...], *functions: Function) -> list[Tensor]:
    """The values of functions, without derivatives."""
    values = [each.detach() for each in tensors]
    return [function(*values) for function in functions]


BY_VALUE = {each.__name__: by for each, by in ((minimum, choose_less), (maximum, choose_greater), (clamp, choose_between))}
CHOICES = {f"_{each.__name__}": each for each in (choose, *BY_VALUE.values())}
"""What :func:`compiled` has in place of functions that choose, by the names that it uses."""


def compiled(python: str, tensors: Set[str], *, draws: bool) -> CodeType:
    """A lambda expression in Python, with :data:`CHOICES` where functions of some tensors are computed and then chosen.

    What values decide is computed twice: so not where it chooses by values itself, nor if it ``draws`` random numbers.
    """
    tree, by_value = ast.parse(python, mode="eval"), set()
    for node in reversed(list(ast.walk(tree))):  # the innermost first; not recursive, as expressions may be deep
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name == "torch.where":
            _choose(node, choose, 1, tensors)
        elif name in BY_VALUE and not draws and by_value.isdisjoint(ast.walk(node)):
            _choose(node, BY_VALUE[name], 0, tensors)
            by_value.add(node)
    return compile(tree, "<expression>", "eval")


def _choose(call: ast.Call, by: Function, conditions: int, tensors: Set[str]) -> None:
    """Makes a call one of :data:`CHOICES`; its arguments after the conditions become functions."""
    branches, at = call.args[conditions:], {"lineno": 1, "col_offset": 0}
    if all(isinstance(each, (ast.Name, ast.Constant)) for each in branches):  # their slopes are 1 and 0
        return
    found = {each.id for branch in branches for each in ast.walk(branch) if isinstance(each, ast.Name)}
    names = sorted(found & tensors)
    given = ast.arguments([], [ast.arg(each, **at) for each in names], None, [], [], None, [])
    call.func = ast.Name(f"_{by.__name__}", ast.Load(), **at)
    call.args[conditions:] = [ast.Lambda(given, each, **at) for each in branches]
    call.args += [ast.Name(each, ast.Load(), **at) for each in names]
