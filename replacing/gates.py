"""Gated blocks of models, ``down(act(gate(x)) * up(x))``: the activation and the product after it as one kernel.

The block's own code is left as it is. In place of its activation stands a :class:`Gate`, which computes nothing yet: what it
returns waits for the product.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..gating.calls import run_gated
from ..gating.generated import gated
from ..modules import ActivationModule
from ..records import DTYPES, is_plain
from ..registry import record_of

__all__ = ["Gate", "Pending", "gate_of"]


class Gate(nn.Module):
    """An activation in a gated block, computed with the product that follows it.

    Attributes:
        act: the activation, jitact's.
    """

    def __init__(self, act: ActivationModule) -> None:
        """Of an activation of one tensor and numbers."""
        super().__init__()
        self.act = act
        self.training = act.training

    def forward(self, x: Tensor) -> Any:
        """The activation of ``x``, to be computed with the product; right away where a graph is made or hooks look on."""
        in_eager = type(x) in (Tensor, nn.Parameter) and x.dtype in DTYPES and x.device.type in ("cpu", "cuda")
        if _has_hooks(self) or not in_eager or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self.act(x)
        return Pending(self.act, x)

    def _get_name(self) -> str:
        return f"jitact {gated(self.act).__name__}"


class Pending:
    """``act(gate)``, not yet computed. Times a tensor it is the gated activation; anything else gets the activation's value."""

    def __init__(self, act: ActivationModule, gate: Tensor) -> None:
        """Of an activation and what it is applied to."""
        self._act, self._gate, self._value = act, gate, None

    def value(self) -> Tensor:
        """The activation by itself."""
        if self._value is None:
            self._value = self._act(self._gate)
        return self._value

    def __mul__(self, up: Any) -> Tensor:
        """The product, in one kernel."""
        act, gate = self._act, self._gate
        fits = type(up) in (Tensor, nn.Parameter) and up.dtype is gate.dtype and up.device == gate.device
        if self._value is not None or not fits:
            return self.value() * up
        record = gated(act).activation
        numbers = {name: getattr(act, name) for name, _ in record.params}
        options = {"dim": -1, "layout": "halves", "gate": "first", "rounding": "once", "save": None, "fast_math": act.fast_math}
        whole = _whole(gate, up)
        if whole is None:
            return run_gated(record, (), {"gate": gate, "up": up}, options | numbers)
        x, found = whole
        return run_gated(record, (x,), {}, options | found | numbers)

    __rmul__ = __mul__

    def __getattr__(self, name: str) -> Any:
        """Of the activation's value."""
        return getattr(self.value(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """PyTorch's functions get the activation's value, but for the product."""
        if function in (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__) and len(args) == 2 and not kwargs:
            a, b = args
            return a * b if isinstance(a, Pending) else b * a
        return function(*_values(args), **_values(kwargs or {}))


def _values(tree: Any) -> Any:
    """Arguments with values in place of what is pending."""
    if isinstance(tree, Pending):
        return tree.value()
    if isinstance(tree, dict):
        return {key: _values(value) for key, value in tree.items()}
    return type(tree)(map(_values, tree)) if type(tree) in (tuple, list) else tree


def _operator(name: str) -> Any:
    def operator(self: Pending, *others: Any) -> Any:
        return getattr(self.value(), name)(*_values(others))

    return operator


_OPERATORS = (
    "add radd sub rsub truediv rtruediv floordiv pow rpow matmul rmatmul neg pos abs getitem len iter bool float int "
    "lt le gt ge eq ne"
)
for _name in _OPERATORS.split():
    setattr(Pending, f"__{_name}__", _operator(f"__{_name}__"))
Pending.__hash__ = object.__hash__


def _whole(gate: Tensor, up: Tensor) -> tuple[Tensor, dict[str, Any]] | None:
    """The tensor that holds just these two, and how, if both are views of one."""
    x = gate._base
    if x is None or x is not up._base or gate.shape != up.shape or x.dim() != gate.dim() or x.dtype is not gate.dtype:
        return None
    doubled = [dim for dim in range(x.dim()) if x.shape[dim] != gate.shape[dim]]
    if len(doubled) != 1 or x.shape[doubled[0]] != 2 * gate.shape[doubled[0]] or gate.stride() != up.stride():
        return None
    (dim,) = doubled
    offset, step = up.storage_offset() - gate.storage_offset(), x.stride(dim)
    first = min(gate.storage_offset(), up.storage_offset())
    others_alike = all(a == b for k, (a, b) in enumerate(zip(gate.stride(), x.stride(), strict=True)) if k != dim)
    if first != x.storage_offset() or not others_alike:
        return None
    if gate.stride(dim) == step and abs(offset) == gate.shape[dim] * step:
        layout = "halves"
    elif gate.stride(dim) == 2 * step and abs(offset) == step:
        layout = "interleaved"
    else:
        return None
    return x, {"dim": dim, "layout": layout, "gate": "first" if offset > 0 else "last"}


# Which activations of a module are multiplied by something, as its source shows it.


class Product:
    """Where a module multiplies what an activation of it returns.

    Attributes:
        beside: the module's own modules that the factors call, by name.
        otherwise: what else is done with it, "" if nothing.
    """

    def __init__(self) -> None:
        """Of an activation that nothing is known of."""
        self.beside: set[str] = set()
        self.found, self.otherwise = False, ""


def gated_products(module: nn.Module, name: str) -> Product:
    """What the methods of a module do with what its activation ``name`` returns."""
    product = Product()
    for function in _methods(type(module)):
        tree = _parsed(function)
        if tree is None:
            continue
        for definition in ast.walk(tree):
            if isinstance(definition, ast.FunctionDef) and definition.args.args:
                _read(definition, name, product)
    return product


def gate_of(act: ActivationModule, places: Iterable[tuple[nn.Module, str]]) -> tuple[Gate | None, str]:
    """A gate for an activation, or why there is none; neither where nothing is multiplied by what it returns.

    Args:
        act: ours, with the hooks of what it replaces.
        places: the modules that hold it, and under which names.
    """
    found = [(parent, gated_products(parent, name)) for parent, name in places]
    if not any(product.found for _, product in found):
        return None, ""
    if not is_plain(record_of(act).token) or act.surrounded:
        return None, "it takes more than one tensor"
    if act.inplace:
        return None, "it overwrites its input"
    if _has_hooks(act):
        return None, "it has hooks"
    for parent, product in found:
        if product.otherwise or not product.found:
            return None, product.otherwise or f"{type(parent).__name__} does not multiply it"
        hooked = [name for name in sorted(product.beside) if _has_hooks(parent._modules.get(name))]
        if hooked:
            return None, f"{hooked[0]} has hooks"
    return Gate(act), ""


def _has_hooks(module: nn.Module | None) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return module is not None and any(getattr(module, kind) for kind in kinds)


def _methods(cls: type) -> Iterator[FunctionType]:
    """The functions of a class and its parents, but for PyTorch's own, below their decorators."""
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


def _read(definition: ast.FunctionDef, name: str, product: Product) -> None:
    """Adds what a method does with ``self.<name>(...)``."""
    me = definition.args.args[0].arg
    parents = {child: parent for parent in ast.walk(definition) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(definition):
        if not (isinstance(node, ast.Attribute) and node.attr == name and _is_name(node.value, me)):
            continue
        if isinstance(node.ctx, ast.Store):
            continue
        call = parents[node]
        if not (isinstance(call, ast.Call) and call.func is node):
            product.otherwise = product.otherwise or f"{definition.name} passes it on"
            continue
        factor = call
        parent = parents[call]
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name):
            uses = _uses(definition, parent)
            multiplied = [use for use in uses if isinstance(parents[use], ast.BinOp) and isinstance(parents[use].op, ast.Mult)]
            product.found |= bool(multiplied)
            factor = uses[0] if len(uses) == 1 else None
            parent = parents.get(factor)
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Mult):
            other = parent.left if parent.right is factor else parent.right
            product.found = True
            product.beside |= _own_calls(call, me) | _own_calls(other, me)
            for local in [each.id for each in (*call.args, other) if isinstance(each, ast.Name)]:
                product.beside |= _assigned_from(definition, local, me)
        else:
            product.otherwise = product.otherwise or f"{definition.name} does more with it than multiply"
    product.beside.discard(name)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _uses(definition: ast.FunctionDef, assign: ast.Assign) -> list[ast.Name]:
    """Where what is assigned is read, before something else is assigned to the name."""
    name = assign.targets[0].id
    uses = [node for node in ast.walk(definition) if _is_name(node, name) and node.lineno > assign.end_lineno]
    uses.sort(key=lambda node: (node.lineno, node.col_offset))
    stores = [node for node in uses if isinstance(node.ctx, ast.Store)]
    # A value is read before the name that it is assigned to in the same statement is bound again.
    end = stores[0].lineno if stores else float("inf")
    return [node for node in uses if isinstance(node.ctx, ast.Load) and node.lineno <= end]


def _own_calls(tree: ast.AST, me: str) -> set[str]:
    """The attributes of the module that an expression calls."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {func.attr for func in calls if isinstance(func, ast.Attribute) and _is_name(func.value, me)}


def _assigned_from(definition: ast.FunctionDef, local: str, me: str) -> set[str]:
    """The attributes of the module that are called where a local name gets its value, and those that this is made of."""
    found, seen, pending = set(), {local}, [local]
    assigns = [node for node in ast.walk(definition) if isinstance(node, ast.Assign)]
    while pending:
        name = pending.pop()
        for assign in assigns:
            if any(_is_name(node, name) for target in assign.targets for node in ast.walk(target)):
                found |= _own_calls(assign.value, me)
                for node in ast.walk(assign.value):
                    if isinstance(node, ast.Name) and node.id not in seen and node.id != me:
                        seen.add(node.id)
                        pending.append(node.id)
    return found
