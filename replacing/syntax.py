"""The syntax trees of methods' source code, and what their readers ask of them."""

from __future__ import annotations

import ast
import inspect
import warnings
from functools import cached_property, lru_cache
from types import FunctionType

__all__ = ["assigns", "function_of", "is_name", "is_own_call", "names", "own_calls", "parsed", "targets", "tree_of"]


def function_of(member: object) -> FunctionType | None:
    """The function of a method or property; None for other members of a class."""
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, cached_property):
        member = member.func
    elif isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    if not isinstance(member, FunctionType):
        return None
    try:
        return inspect.unwrap(member)
    except ValueError:  # it wraps itself, and has no source by that
        return member


@lru_cache(maxsize=1024)
def parsed(function: FunctionType) -> ast.AST | None:
    """The syntax tree of a function's source; None if there is no source."""
    try:
        return tree_of(inspect.getsource(function))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None


def tree_of(source: str) -> ast.Module:
    """The syntax tree of source code, which may be indented.

    Raises:
        SyntaxError, ValueError: it cannot be parsed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the user's code, which Python gave when it compiled that
        return ast.parse(f"if True:\n{source}" if source[:1].isspace() else source)


def is_name(node: ast.AST, *known: str) -> bool:
    """Whether a node is a variable with one of these names."""
    return isinstance(node, ast.Name) and node.id in known


def is_own_call(node: ast.AST, self_name: str) -> bool:
    """Whether it is a call of a submodule or method, ``self.<name>(...)``."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_name(node.func.value, self_name)


def own_calls(tree: ast.AST, self_name: str) -> set[str]:
    """The names of the submodules and methods that an expression calls on the module."""
    return {node.func.attr for node in ast.walk(tree) if is_own_call(node, self_name)}


def names(*nodes: ast.AST) -> set[str]:
    """The variables that occur in them."""
    return {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}


def assigns(definition: ast.FunctionDef) -> list[ast.Assign]:
    """The assignments in a method."""
    return [node for node in ast.walk(definition) if isinstance(node, ast.Assign)]


def targets(assign: ast.Assign) -> set[str]:
    """The variables on the left of an assignment, also those that are indexed there."""
    return names(*assign.targets)
