"""How the methods of a module use the result of one of its submodules, from their source code. Nothing is run."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from types import FunctionType
from typing import NamedTuple

__all__ = ["Result", "Uses", "assigned_from", "own_calls", "uses_of"]


class Uses:
    """Whether a submodule's result is used by one kind of operation, and by nothing else.

    Attributes:
        found: whether the operation was found.
        involved: names of the other submodules that take part in it.
        otherwise: another use of the result, as text; "" if there is none.
    """

    def __init__(self) -> None:
        """Starts without any use."""
        self.involved: set[str] = set()
        self.found, self.otherwise = False, ""


class Result(NamedTuple):
    """The result of ``self.<name>(...)`` in a method, and where it is used.

    Attributes:
        definition: the method's syntax tree.
        function: the method.
        self_name: the name of its first argument.
        call: the call; None where the submodule is mentioned and not called.
        values: the expressions whose value is the result, each with its parent node.
    """

    definition: ast.FunctionDef
    function: FunctionType
    self_name: str
    call: ast.Call | None
    values: list[tuple[ast.expr, ast.AST | None]]

    def otherwise(self, what: str) -> str:
        """Text: the method does more with the result than ``what``, or passes the submodule on."""
        done = "passes it on" if self.call is None else f"does more with it than {what}"
        return f"{self.definition.name} {done}"

    def changed_in_place(self) -> str:
        """An argument of the call that is changed in place before the last use of the result; "" if there is none."""
        given = {node.id for each in self.call.args for node in ast.walk(each) if isinstance(node, ast.Name)}
        lines = range(self.call.lineno, max((value.lineno for value, _ in self.values), default=0) + 1)
        between = [node for node in ast.walk(self.definition) if getattr(node, "lineno", 0) in lines]
        return next((name for node in between for name in sorted(_changed(node) & given)), "")


def uses_of(cls: type, name: str) -> Iterator[Result]:
    """The results of ``self.<name>`` in the methods of a class."""
    for function in _methods(cls):
        tree = _parsed(function)
        for definition in ast.walk(tree) if tree is not None else ():
            if isinstance(definition, ast.FunctionDef) and definition.args.args:
                yield from _results(definition, function, name)


def _results(definition: ast.FunctionDef, function: FunctionType, name: str) -> Iterator[Result]:
    self_name = definition.args.args[0].arg
    parents = {child: parent for parent in ast.walk(definition) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(definition):
        if not (isinstance(node, ast.Attribute) and node.attr == name and _is_name(node.value, self_name)):
            continue
        if isinstance(node.ctx, ast.Store):
            continue
        call = parents[node]
        if not (isinstance(call, ast.Call) and call.func is node):
            yield Result(definition, function, self_name, None, [])
            continue
        values, parent = [call], parents[call]
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name):
            values = _uses(definition, parent)
        yield Result(definition, function, self_name, call, [(value, parents.get(value)) for value in values])


def _methods(cls: type) -> Iterator[FunctionType]:
    """The methods of a class and its parents, without decorators and without PyTorch's own."""
    seen = set()
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == "torch":
            continue
        for key, member in vars(base).items():
            function = inspect.unwrap(member) if isinstance(member, FunctionType) else None
            if function is not None and key not in seen:
                yield function
            seen.add(key)


@lru_cache(maxsize=1024)
def _parsed(function: FunctionType) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


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


def _uses(definition: ast.FunctionDef, assign: ast.Assign) -> list[ast.Name]:
    """Where the assigned variable is read, up to the next assignment to it."""
    name = assign.targets[0].id
    uses = [node for node in ast.walk(definition) if _is_name(node, name) and node.lineno > assign.end_lineno]
    uses.sort(key=lambda node: (node.lineno, node.col_offset))
    stores = [node for node in uses if isinstance(node.ctx, ast.Store)]
    # A statement that assigns to the variable may read it first: x = f(x).
    end = stores[0].lineno if stores else float("inf")
    return [node for node in uses if isinstance(node.ctx, ast.Load) and node.lineno <= end]


def own_calls(tree: ast.AST, self_name: str) -> set[str]:
    """The names of the submodules and methods that an expression calls on the module."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {func.attr for func in calls if isinstance(func, ast.Attribute) and _is_name(func.value, self_name)}


def assigned_from(definition: ast.FunctionDef, local: str, self_name: str) -> set[str]:
    """The same for all assignments from which a local variable gets its value, directly or through other variables."""
    found, seen, pending = set(), {local}, [local]
    assigns = [node for node in ast.walk(definition) if isinstance(node, ast.Assign)]
    while pending:
        name = pending.pop()
        for assign in assigns:
            if any(_is_name(node, name) for target in assign.targets for node in ast.walk(target)):
                found |= own_calls(assign.value, self_name)
                for node in ast.walk(assign.value):
                    if isinstance(node, ast.Name) and node.id not in seen and node.id != self_name:
                        seen.add(node.id)
                        pending.append(node.id)
    return found
