"""Fuses activation and product in gated blocks of models, ``down(act(gate(x)) * up(x))``.

The block's code does not change. A :class:`Gate` replaces its activation and returns a :class:`~.pending.Pending`, which
computes nothing until it is multiplied.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from torch import nn

from ..gating.generated import gated
from ..modules import ActivationModule
from ..records import is_plain
from ..registry import record_of
from .counterparts import is_activation
from .pending import Waiting, has_hooks
from .syntax import assigns, is_name, is_own_call, own_calls
from .uses import Result, Uses, assigned_from, uses_of

__all__ = ["Gate", "gate_of", "products_of", "waiting"]


class Gate(Waiting):
    """An activation in a gated block, fused with the product that follows it."""

    def _get_name(self) -> str:
        return f"jitact {gated(self.act).__name__}" if isinstance(self.act, ActivationModule) else type(self).__name__


def gated_products(module: nn.Module, name: str, before: frozenset[str] = frozenset()) -> Uses:
    """How the methods of a module use the result of its activation ``name``: in a product, or in other ways.

    Of a product of two activations the second one is fused, if it can be. ``before``: those for which this is asked.
    """
    return products_of(module, uses_of(type(module), name), name, before)


def products_of(module: nn.Module, results: Iterable[Result], name: str = "", before: frozenset[str] = frozenset()) -> Uses:
    """The same for some results: of the submodule ``name``, or of a function."""
    product = Uses(module)
    for result in results:
        multiplied = [(value, by) for value, by in result.values if _is_product(by, value, module, result)]
        product.found |= bool(multiplied)
        if result.call is None or len(multiplied) != 1 or len(result.values) != 1:
            product.otherwise = product.otherwise or result.otherwise("multiply")
            continue
        if changed := result.input_changed(module._modules):
            product.otherwise = product.otherwise or changed
            continue
        product.callers |= result.callers()
        ((value, by),) = multiplied
        other = by.left if by.right is value else by.right
        second = _activation(other, result, module) if by.left is value else ""
        if second and (second in before or not gated_products(module, second, before | {name}).otherwise):
            product.otherwise = product.otherwise or f"it is multiplied by {second}, which is fused with the product"
        product.involved |= own_calls(result.call, result.self_name) | own_calls(other, result.self_name)
        for local in [each.id for each in (*result.call.args, other) if isinstance(each, ast.Name)]:
            product.involved |= assigned_from(result.definition, local, result.self_name)
        product.involved.discard(name)
    return product


def _is_product(by: ast.AST | None, value: ast.expr, module: nn.Module, result: Result) -> bool:
    """Whether a node multiplies a value by what may be a tensor."""
    if not (isinstance(by, ast.BinOp) and isinstance(by.op, ast.Mult)):
        return False
    other = by.left if by.right is value else by.right
    if isinstance(other, ast.Attribute) and is_name(other.value, result.self_name):
        return not isinstance(vars(module).get(other.attr), (int, float))
    if isinstance(other, ast.Name) and other.id in result.function.__code__.co_names:  # a global variable
        return not isinstance(result.function.__globals__.get(other.id), (int, float))
    return not isinstance(other.operand if isinstance(other, ast.UnaryOp) else other, ast.Constant)


def _activation(factor: ast.expr, result: Result, module: nn.Module) -> str:
    """The name of the activation module whose result a factor is; "" if it is none."""
    calls = [factor]
    if isinstance(factor, ast.Name):
        found = [each for each in assigns(result.definition) if any(is_name(target, factor.id) for target in each.targets)]
        calls = [assign.value for assign in found]
    names = [call.func.attr for call in calls if is_own_call(call, result.self_name)]
    kinds = [type(module._modules.get(name)) for name in names]
    is_one = [is_activation(kind) or issubclass(kind, (ActivationModule, Waiting)) for kind in kinds]
    return names[0] if is_one and all(is_one) else ""


def waiting(
    kind: type[Waiting], act: ActivationModule, found: Sequence[tuple[nn.Module, Uses]], what: str, in_place: bool = False
) -> tuple[Waiting | None, str]:
    """A module that fuses an activation with the operation that follows, or why not; None and "" if no such operation follows.

    Args:
        kind: the class of the result.
        act: jitact's module, with the hooks of the one it replaces.
        found: the modules that hold it, and how they use its result.
        what: the operation, as a verb, for the reason.
        in_place: whether the activation may overwrite its input.
    """
    if not any(uses.found for _, uses in found):
        return None, ""
    why = _why_not(act, found, what, in_place)
    callers = frozenset().union(*[uses.callers for _, uses in found])
    return None if why else kind(act, callers), why


def _why_not(act: ActivationModule, found: Sequence[tuple[nn.Module, Uses]], what: str, in_place: bool) -> str:
    """Why an activation cannot be fused with what follows it; "" if it can."""
    if not is_plain(record_of(act).token) or act.surrounded:
        return "it takes more than one tensor, or draws random numbers"
    if act.inplace and not in_place:
        return "it overwrites its input"
    if has_hooks(act):
        return "it has hooks"
    for parent, uses in found:
        if uses.otherwise or not uses.found:
            return uses.otherwise or f"{type(parent).__name__} does not {what} it"
        hooked = [name for name in sorted(uses.involved) if has_hooks(parent._modules.get(name))]
        if hooked:
            return f"{hooked[0]} has hooks"
    return ""


def gate_of(act: ActivationModule, places: Iterable[tuple[nn.Module, str]]) -> tuple[Waiting | None, str]:
    """A gate for an activation, or why not; None and "" if its result is not multiplied.

    Args:
        act: jitact's module, with the hooks of the one it replaces.
        places: the modules that hold it, and its name in each.
    """
    return waiting(Gate, act, [(parent, gated_products(parent, name)) for parent, name in places], "multiply")
