"""What the readers of methods' source code ask of its syntax trees."""

from __future__ import annotations

import ast

__all__ = ["is_name", "is_own_call", "names", "targets"]


def is_name(node: ast.AST, *known: str) -> bool:
    """Whether a node is a variable with one of these names."""
    return isinstance(node, ast.Name) and node.id in known


def is_own_call(node: ast.AST, self_name: str) -> bool:
    """Whether it is a call of a submodule or method, ``self.<name>(...)``."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_name(node.func.value, self_name)


def names(*nodes: ast.AST) -> set[str]:
    """The variables that occur in them."""
    return {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}


def targets(assign: ast.Assign) -> set[str]:
    """The variables on the left of an assignment, also those that are indexed there."""
    return names(*assign.targets)
