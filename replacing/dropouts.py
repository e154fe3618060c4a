"""Fuses an activation with the dropout that alone uses its result, for users who do not need PyTorch's masks.

The dropout module stays: its probability and training mode apply. The activation before it becomes a :class:`Dropping`, whose
result is computed by the dropout.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from types import FrameType, FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..modules import ActivationModule
from .gates import waiting
from .pending import Pending, Waiting, has_hooks
from .uses import Uses, uses_of

__all__ = ["Dropping", "dropping_of"]

# Where PyTorch has the modules whose results are no views of their arguments.
_COMPUTING = {f"torch.nn.modules.{name}" for name in ("batchnorm", "conv", "instancenorm", "linear", "normalization")}


class Dropping(Waiting):
    """An activation that is computed with the dropout that follows it."""

    def _pending(self, act: ActivationModule, x: Tensor) -> Pending | Tensor:
        return _BeforeDropout(act, x) if self.training else act(x)

    def _is_read(self, caller: FrameType) -> bool:
        if caller.f_code is not nn.Sequential.forward.__code__:
            return super()._is_read(caller)
        sequence = caller.f_locals["self"]  # which may be a part of the one that was replaced in
        beside = [_beside(sequence, name) for name, module in sequence._modules.items() if module is self]
        drops = all(_drops(after) and not has_hooks(after) for _, after in beside)
        return drops and (not self.act.inplace or all(_gives_its_own(before) for before, _ in beside))

    def _get_name(self) -> str:
        return f"jitact {type(self.act).__name__} with dropout"


class _BeforeDropout(Pending):
    _drops = True


def dropping_of(act: ActivationModule, places: Iterable[tuple[nn.Module, str]]) -> tuple[Waiting | None, str]:
    """A module that fuses an activation with its dropout, or why not; None and "" if no dropout follows.

    Args:
        act: jitact's module, with the hooks of the one it replaces.
        places: the modules that hold it, and its name in each.
    """
    held = list(places)
    # In order, what it overwrites is the result of the module before.
    in_place = all(_runs_in_order(parent) and _gives_its_own(_beside(parent, name)[0]) for parent, name in held)
    return waiting(Dropping, act, [(parent, _dropouts(parent, name)) for parent, name in held], "drop", in_place)


def _runs_in_order(module: nn.Module) -> bool:
    """Whether the module's class calls its children in order, each on the result of the one before."""
    return type(module).forward is nn.Sequential.forward


def _drops(module: nn.Module | None) -> bool:
    return type(module) is nn.Dropout and "forward" not in vars(module)


def _beside(sequence: nn.Module, name: str) -> tuple[nn.Module | None, nn.Module | None]:
    """The modules before and after one; None at the ends."""
    modules = [None, *sequence._modules.values(), None]
    place = list(sequence._modules).index(name) + 1
    return modules[place - 1], modules[place + 1]


def _gives_its_own(module: nn.Module | None) -> bool:
    """Whether a module's result is a new tensor that nothing else sees."""
    if module is None or has_hooks(module) or "forward" in vars(module):
        return False
    return type(module).__module__ in _COMPUTING and type(module) is not nn.Identity


def _dropouts(parent: nn.Module, name: str) -> Uses:
    """How a module uses the result of its activation ``name``: in a dropout, or in other ways."""
    dropped = Uses(parent)
    if _runs_in_order(parent):
        _, after = _beside(parent, name)
        dropped.found = _drops(after)
        dropped.involved = {key for key, module in parent._modules.items() if module is after}
        return dropped
    for result in uses_of(type(parent), name):
        into = [_dropout(by, value, parent, result.self_name, result.function) for value, by in result.values]
        dropped.found |= any(each is not None for each in into)
        if result.call is not None and (changed := result.input_changed(parent._modules)):
            dropped.otherwise = dropped.otherwise or changed
        elif len(into) == 1 and into[0] is not None:
            dropped.involved |= into[0]
            dropped.callers |= result.callers()
        else:
            dropped.otherwise = dropped.otherwise or result.otherwise("drop")
    return dropped


def _dropout(by: ast.AST | None, value: ast.expr, parent: nn.Module, self_name: str, function: FunctionType) -> set[str] | None:
    """The name of the dropout module that is called on ``value``; an empty set for ``F.dropout``; None without dropout."""
    if not (isinstance(by, ast.Call) and by.args[:1] == [value]):
        return None
    root, *attributes = _dotted(by.func)
    if root == self_name:
        held = parent._modules.get(attributes[0]) if len(attributes) == 1 else None
        return {attributes[0]} if _drops(held) else None
    meant: Any = function.__globals__.get(root)
    for attribute in attributes:
        meant = getattr(meant, attribute, None)
    return set() if meant is F.dropout else None


def _dotted(node: ast.expr) -> list[str]:
    """``["F", "dropout"]`` for ``F.dropout``; ``[""]`` for other expressions."""
    if isinstance(node, ast.Name):
        return [node.id]
    return [*_dotted(node.value), node.attr] if isinstance(node, ast.Attribute) else [""]
