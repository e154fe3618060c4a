"""Writes an activation in PyTorch for an exported file: an expression, and the functions that it calls."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType

import torch
import torch.nn.functional as F

from .. import registry
from ..definitions.define import Definition
from ..definitions.expression import DROPOUT, Expression
from ..modules import GENERATED
from ..records import Activation
from .text import default

__all__ = ["reference", "written"]

_MODULES = ("torch", "math", "F")  # imported in files under these names


def reference(record: Activation, arguments: Sequence[str], helpers: dict[str, str]) -> str:
    """The PyTorch expression that computes an activation.

    Args:
        record: the activation.
        arguments: the Python for its tensors and parameters: names, attributes, or expressions in parentheses.
        helpers: the source of functions that are called, by name; those of this activation are added.

    Raises:
        ValueError: the activation has no PyTorch counterpart that could be written out.
    """
    if "+" in record.name:
        return _around(record, arguments, helpers)
    if record.gating and record.name.startswith(GENERATED):
        gate, up, *numbers = arguments
        act = registry.class_of(record.name.removeprefix(GENERATED)).activation
        return f"{reference(act, [gate, *numbers], helpers)} * {up}"
    if isinstance(record, Definition) and record.expression:
        return _of_expression(record.expression, arguments, helpers)
    if line := _of_torch(record.reference, arguments):
        return line
    if hasattr(F, record.name) and record.module and not record.gating:
        return f"F.{record.name}({', '.join([*arguments, *(['self.training'] if record.in_eval else [])])})"
    return written(record.name, record.reference, arguments, helpers)


def written(name: str, function: Callable[..., torch.Tensor] | None, arguments: Sequence[str], helpers: dict[str, str]) -> str:
    """The expression that calls an activation's reference, or that it consists of; see :func:`reference`."""
    if line := _of_torch(function, arguments) or _one_line(function, arguments):
        return line
    if not _add_function(function, helpers):
        what = f"{name} cannot be exported without a PyTorch counterpart"
        raise ValueError(f"{what}: define it with reference=, one line, or a function of torch's alone")
    return f"{function.__name__}({', '.join(arguments)})"


def _of_torch(function: Callable | None, arguments: Sequence[str]) -> str | None:
    """The call of a function of PyTorch's; None if it is not one."""
    name = getattr(function, "__name__", "")
    for written_as, module in (("F", F), ("torch", torch)):
        if not name.startswith("_") and getattr(module, name, None) is function is not None:
            return f"{written_as}.{name}({', '.join(arguments)})"
    return None


def _around(record: Activation, arguments: Sequence[str], helpers: dict[str, str]) -> str:
    """The expression for an activation with fused operations, as ``gelu+bias+dropout+residual`` or ``swiglu+row_weight``."""
    name, *parts = record.name.split("+")
    within = registry.record_named(name)
    names = [*record.layout.tensors, *(name for name, _ in record.params)]
    given = dict(zip(names, arguments, strict=True))
    first, *others = [*within.layout.tensors, *(name for name, _ in within.params)]
    x = f"({given[first]} + {given['bias']})" if "bias" in parts else given[first]
    value = reference(within, [x, *(given[name] for name in others)], helpers)
    if "row_weight" in parts:
        value = f"({value}) * {given['row_weight']}"
    if "dropout" in parts:
        value = f"F.dropout({value}, {given['dropout']}, self.training)"
    return f"{given['residual']} + {value}" if "residual" in parts else value


def _of_expression(expression: Expression, arguments: Sequence[str], helpers: dict[str, str]) -> str:
    """A defined expression in Python; adds the functions that it calls to ``helpers``."""
    for helper in expression.helpers.values():
        if helper.__name__ not in helpers:
            _add_function(helper, helpers)
    names = {}
    for called in expression.activations:
        names[called.python] = f"{called.name}_"
        numbers = [name for name, _ in called.record.params]
        taken = [*called.tensors, *(f"{name}={default(value)}" for name, value in called.record.params)]
        tensors = called.record.layout.tensors
        body = reference(called.record, [*tensors, *numbers], helpers)
        helpers.setdefault(f"{called.name}_", f"def {called.name}_({', '.join(taken)}):\n    return {body}")

    class Written(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            if isinstance(node.func, ast.Name) and node.func.id in names:
                node.func = ast.Name(names[node.func.id])
            elif isinstance(node.func, ast.Name) and node.func.id == DROPOUT:
                return ast.Call(ast.Name("F.dropout"), [*node.args[:2], ast.Name("self.training")], [])
            return node

    written = ast.unparse(Written().visit(ast.parse(expression.renamed(*arguments), mode="eval")))
    return written if names or expression.random else expression.renamed(*arguments)


def _definition(function: Callable) -> ast.Lambda | ast.FunctionDef | None:
    """The syntax tree of a function; None if its source is unavailable, or not all that runs: decorated, a closure."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    found = [node for node in ast.walk(tree) if isinstance(node, (ast.Lambda, ast.FunctionDef))]
    if len(found) != 1 or getattr(function, "__closure__", None) or hasattr(function, "__wrapped__"):
        return None  # what runs depends on more than this source
    given = found[0].args
    others = given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg
    return None if others or getattr(found[0], "decorator_list", None) else found[0]


def _one_line(function: Callable | None, arguments: Sequence[str]) -> str | None:
    """The expression that a reference of a single ``return`` returns, with its module's constants inserted; else None."""
    found = _definition(function)
    if found is None:
        return None
    body = found.body if isinstance(found.body, list) else [ast.Return(found.body)]
    body = [node for node in body if not isinstance(node, ast.Expr)]  # a docstring
    if len(body) != 1 or not isinstance(body[0], ast.Return):
        return None
    names = dict(zip([argument.arg for argument in found.args.args], arguments, strict=False))
    numbers = {name: value for name, value in function.__globals__.items() if isinstance(value, (int, float))}
    python = _renamed(ast.unparse(body[0].value), names, numbers)
    known = {"self", *_MODULES, *arguments}
    return None if {node.id for node in ast.walk(ast.parse(python)) if isinstance(node, ast.Name)} - known else python


def _add_function(function: object, helpers: dict[str, str]) -> bool:
    """Adds a function and the Python functions that it calls to ``helpers``; False if it cannot be written into a file."""
    found = _definition(function) if isinstance(function, FunctionType) else None
    if not isinstance(found, ast.FunctionDef):
        return False
    helpers.setdefault(found.name, "")
    found.returns = None
    found.body = [node for node in found.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    local = {argument.arg for argument in found.args.args}
    local |= {node.id for node in ast.walk(found) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for argument in found.args.args:
        argument.annotation = None
    space, called = function.__globals__, {}

    class Written(ast.NodeTransformer):
        def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
            module = space.get(node.value.id) if isinstance(node.value, ast.Name) else None
            if isinstance(module, ModuleType) and node.value.id not in _MODULES:  # another module of the package
                called[node.attr] = getattr(module, node.attr)
                return ast.Name(node.attr)
            return self.generic_visit(node)

        def visit_Name(self, node: ast.Name) -> ast.AST:
            value = space.get(node.id)
            if node.id in local or node.id in _MODULES or value is None:
                return node
            if isinstance(value, (int, float)):
                return ast.Constant(value)
            called[node.id] = value
            return node

    helpers[found.name] = ast.unparse(ast.fix_missing_locations(Written().visit(found)))
    return all(name in helpers or _add_function(each, helpers) for name, each in called.items())


def _renamed(python: str, names: dict[str, str], numbers: dict[str, float]) -> str:
    """The expression with variables renamed, and constants replaced by their values."""

    class Rename(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            if node.id in names:
                return ast.Name(names[node.id])
            return ast.Constant(numbers[node.id]) if node.id in numbers else node

    return ast.unparse(Rename().visit(ast.parse(python, mode="eval")))
