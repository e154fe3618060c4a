"""Whether a tensor may be changed in place between two points of a method, from its source code. Nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from torch import nn

__all__ = ["change"]

_HARMLESS = {"bool", "float", "getattr", "hasattr", "int", "isinstance", "len", "type"}  # functions
_PYTORCH = {"F", "functional", "nn", "torch"}  # what modules of such functions are called


def change(
    definition: ast.FunctionDef,
    self_name: str,
    given: Iterable[ast.expr],
    between: Iterable[ast.AST],
    children: Mapping[str, nn.Module | None],
) -> str:
    """What may change a tensor in place, as text; "" if nothing does.

    Changes of any variable count, as it may be a view of the tensor, or share its version counter; and calls that are given the
    tensor, or a view, and are neither PyTorch's nor of modules without in-place activations.

    Args:
        definition: the method.
        self_name: the name of its first argument.
        given: expressions whose values are the tensor.
        between: the nodes of what runs between the two points.
        children: the module's submodules.
    """
    shared = _sharing(definition, {root for each in given if (root := _root(each, self_name))}, self_name)
    for node in between:
        if changed := _changed(node):
            return f"changes {min(changed)} in place"
        passed = _names(node) & shared if isinstance(node, ast.Call) else set()
        if passed and not _is_harmless(node, self_name, shared, children):
            return f"gives {min(passed)} to {ast.unparse(node.func)} in between"
    return ""


def _changed(node: ast.AST) -> set[str]:
    """The variables that a node may change in place: ``x += y``, ``x[0] = y``, ``x.zero_()``, ``torch.relu_(x)``."""
    changed: list[ast.expr] = []
    if isinstance(node, ast.AugAssign):
        changed = [node.target]
    elif isinstance(node, ast.Assign):
        changed = [target for target in node.targets if isinstance(target, ast.Subscript)]
    elif isinstance(node, ast.Call):
        changed = [each.value for each in node.keywords if each.arg == "out"]
        if isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
            changed += [node.func.value, *node.args[:1]]
        elif any(each.arg == "inplace" for each in node.keywords):
            changed += node.args[:1]
    roots = [each.value if isinstance(each, ast.Subscript) else each for each in changed]
    return {root.id for root in roots if isinstance(root, ast.Name)}


def _root(node: ast.expr, self_name: str) -> str:
    """The variable of which an expression may be a view: of ``x[0].chunk(2)``, x; "" if it is computed."""
    while True:
        if isinstance(node, ast.Name):
            return "" if node.id == self_name else node.id
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_function = _is_name(node.func.value, _PYTORCH) and node.args
            node = node.args[0] if is_function else node.func.value
        elif isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
            if isinstance(node, ast.Attribute) and _is_name(node.value, {self_name}):
                return ""
            node = node.value
        else:
            return ""


def _sharing(definition: ast.FunctionDef, shared: set[str], self_name: str) -> set[str]:
    """The variables that may share memory with some of the method's: views, and what they are views of."""
    assigns = [node for node in ast.walk(definition) if isinstance(node, ast.Assign)]
    groups = []
    for assign in assigns:
        targets = {node.id for each in assign.targets for node in ast.walk(each) if isinstance(node, ast.Name)}
        groups.append(targets | ({root} if (root := _root(assign.value, self_name)) else set()))
    found = set(shared)
    while more := set().union(*[group for group in groups if group & found]) - found:
        found |= more
    return found


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _is_name(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _is_harmless(node: ast.Call, self_name: str, shared: set[str], children: Mapping[str, nn.Module | None]) -> bool:
    """Whether a call does not change its arguments."""
    func = node.func
    if not isinstance(func, ast.Attribute):
        return _is_name(func, _HARMLESS)
    if _is_name(func.value, {self_name}):
        child = children.get(func.attr)
        return child is not None and not any(getattr(each, "inplace", False) for each in child.modules())
    return _is_name(func.value, _PYTORCH) or _root(func.value, self_name) in shared
