"""Fuses functions of PyTorch with the product that follows, in modules that call them: ``down(F.silu(gate(x)) * up(x))``.

Such a module gets a forward of its own with the code of its class's, in which a :class:`.gates.Gate` is called instead.
"""

from __future__ import annotations

import ast
import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_modules

from ..gating.generated import gated
from ..modules import ActivationModule
from ..registry import get
from .calls import is_hashable
from .gates import Gate, products_of, waiting
from .syntax import assigns, is_name, is_own_call, parsed
from .uses import result_of

__all__ = ["GatedForward", "forward_of"]

_GATE = "jitact_gate_"
_LOOKING = {"dir", "eval", "exec", "locals", "vars"}  # functions that may see that there are other variables


class FunctionGate(Gate):
    """A gate in place of a function, which gets what jitact does not take, as tensors of integers, and what traces a graph."""

    _function: partial

    def _at_once(self, act: ActivationModule, x: Any) -> Any:
        return self._function(x)

    def _get_name(self) -> str:
        return f"jitact {gated(self.act).__name__}"


class GatedForward:
    """Takes the place of ``module.forward``. Where a graph is traced, the class's forward is called.

    Attributes:
        module: the module.
        gates: what is called in place of functions, by the number of the call in the source.
        names: the functions as the source names them, likewise.
        all_of: the activations of which no call is left.
        source: of the class's forward. Should another version of it have unpickled this, the class's is called.
    """

    # The class's forward, that with the gates, and what the functions' names meant.
    _made: tuple[Callable | None, Callable | None, list[tuple[Mapping[str, Any], str, Any]]] = (None, None, [])

    def __init__(self, module: nn.Module, gates: dict[int, Gate], names: dict[int, str], all_of: set[str], source: str) -> None:
        """See the attributes."""
        self.module, self.gates, self.names, self.all_of, self.source = module, gates, names, all_of, source

    def put(self) -> None:
        """Puts it in the place of the module's forward."""
        vars(self.module)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of forward."""
        if torch.compiler.is_compiling():
            return type(self.module).forward(self.module, *args, **kwargs)
        caller, module = sys._getframe(1), self.module
        other = caller.f_locals.get("self") if caller.f_globals is vars(of_modules) else None
        if type(other) is type(module) and vars(other).get("forward") is self:
            module = other  # a replica, as of DataParallel: these share this object
        return self._with_gates(type(module).forward)(module, *args, **kwargs)

    def _with_gates(self, function: Callable) -> Callable:
        """The class's forward with the gates; as it is, if it is another one by now, or its names mean other functions."""
        known, made, links = self._made
        if known is not function or any([of.get(name) is not found for of, name, found in links]):
            definition, made, links = _definition(function), function, []
            if definition is not None and ast.unparse(definition) == self.source and _runs_its_source(function):
                of_gates = {number: _links(call.func, function) for number, call in _calls(definition) if number in self.gates}
                links = [each for of_gate in of_gates.values() for each in of_gate]
                if all([of_gates[number][-1][2] is gate._function.func for number, gate in self.gates.items()]):
                    made = _with_gates(function, definition, self.gates)
            self._made = function, made, links
        return made

    def __getattr__(self, name: str) -> Any:
        """Attributes of the class's forward, as of any method; inspect looks for its signature and source there."""
        if "module" not in vars(self):  # not there yet, as where it is copied
            raise AttributeError(name)
        method = MethodType(type(self.module).forward, self.module)
        return method if name == "__wrapped__" else getattr(method, name)

    def __getstate__(self) -> dict[str, Any]:
        """Without the function, which is compiled again."""
        return {key: value for key, value in vars(self).items() if key != "_made"}


def forward_of(module: nn.Module, known: Mapping[Callable, tuple[str, bool]], fused: Set[str]) -> GatedForward | None:
    """A forward with gates in place of functions whose result is multiplied; None if there are none.

    Args:
        module: the module.
        known: PyTorch's activation functions, with the name of jitact's, and whether the function works in place.
        fused: the submodules that are fused with the product that follows them.
    """
    function = inspect.getattr_static(type(module), "forward", None)
    definition = None if "forward" in vars(module) else _definition(function)
    if definition is None:
        return None
    gates: dict[int, Gate] = {}
    names: dict[int, str] = {}
    all_of, others = set(), set()
    for number, call in _calls(definition):
        meant = _meant(call.func, function)
        name, in_place = known.get(meant, ("", False)) if is_hashable(meant) else ("", False)
        if name:
            gate = None if in_place else _gate(name, call, definition, function, module)
            (others if gate is None else all_of).add(name)
            if gate is not None:
                gates[number], names[number] = gate, ast.unparse(call.func)
    calls = dict(_calls(definition))
    of_gates = {calls[number] for number in gates}
    for number in [number for number in gates if _other_is_fused(calls[number], of_gates, fused, definition, function)]:
        others.add(known[_meant(calls[number].func, function)][0])
        del gates[number], names[number]
    if not gates or not _runs_its_source(function):
        return None
    return GatedForward(module, gates, names, all_of - others, ast.unparse(definition))


def _definition(function: object) -> ast.FunctionDef | None:
    """The syntax tree of a method that can be compiled outside of its class; None for others."""
    if not isinstance(function, FunctionType) or function.__closure__ or hasattr(function, "__wrapped__"):
        return None
    if (function.__module__ or "").partition(".")[0] == "torch":
        return None
    tree = parsed(function)
    definition = next((node for node in ast.walk(tree or ast.Module()) if isinstance(node, ast.FunctionDef)), None)
    if definition is None or definition.name != function.__name__ or definition.decorator_list:
        return None
    if not (definition.args.posonlyargs or definition.args.args):
        return None
    names = [getattr(node, "attr", getattr(node, "id", getattr(node, "arg", ""))) or "" for node in ast.walk(definition)]
    # Python puts the class's name before private names.
    is_private = any([name.startswith("__") and not name.endswith("__") for name in names])
    return None if is_private or not _LOOKING.isdisjoint(names) else definition


@lru_cache(maxsize=1024)
def _runs_its_source(function: FunctionType) -> bool:
    """Whether a function is what its file says: that may have been changed since it was loaded, or its code when it was.

    The whole file is compiled, as Python compiles calls of what it imports in another way.
    """
    own = function.__code__
    try:
        lines, _ = inspect.findsource(function)
        pending = [compile("".join(lines), own.co_filename, "exec", dont_inherit=True)]
    except (OSError, SyntaxError, ValueError):
        return False
    while pending:
        code = pending.pop()
        if (code.co_name, code.co_firstlineno) == (own.co_name, own.co_firstlineno):
            return _is_same(code, own)
        pending += [each for each in code.co_consts if isinstance(each, CodeType)]
    return False


def _is_same(code: CodeType, other: CodeType) -> bool:
    pairs = zip(code.co_consts, other.co_consts, strict=False)
    same = all(_is_same(a, b) if isinstance(a, CodeType) else type(a) is type(b) and a == b for a, b in pairs)
    facts = [(each.co_code, each.co_names, each.co_varnames, each.co_freevars, len(each.co_consts)) for each in (code, other)]
    return same and facts[0] == facts[1]


def _calls(definition: ast.FunctionDef) -> Iterator[tuple[int, ast.Call]]:
    return ((number, node) for number, node in enumerate(ast.walk(definition)) if isinstance(node, ast.Call))


def _meant(node: ast.expr, function: FunctionType) -> object:
    """What a name in a function, with its attributes, refers to; None if only running the code would show it."""
    links = _links(node, function)
    return links[-1][2] if links else None


def _links(node: ast.expr, function: FunctionType) -> list[tuple[Mapping[str, Any], str, Any]]:
    """How it is found: for ``F.silu`` in the global variables, by "F", the module; in that, by "silu", the function."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id in _own_names(function.__code__):
        return []
    links, of = [], function.__globals__
    for name in (node.id, *attributes):
        links.append((of, name, of.get(name)))
        of = vars(links[-1][2]) if isinstance(links[-1][2], ModuleType) else {}
    return links


def _own_names(code: CodeType) -> set[str]:
    """The variables of a function, and of the functions and classes within it."""
    names = {*code.co_varnames, *code.co_cellvars, *(() if code.co_flags & inspect.CO_OPTIMIZED else code.co_names)}
    return names.union(*[_own_names(each) for each in code.co_consts if isinstance(each, CodeType)])


def _gate(
    name: str, call: ast.Call, definition: ast.FunctionDef, function: FunctionType, module: nn.Module
) -> FunctionGate | None:
    """A gate in place of a call; None if its result is not multiplied, or used otherwise too."""
    act = _activation(name, call)
    if act is None:
        return None
    uses = products_of(module, [result_of(call, definition, function)])
    gate, _ = waiting(FunctionGate, act, [(module, uses)], "multiply")
    if gate is not None:
        options = {each.arg: each.value.value for each in call.keywords}
        gate._function = partial(_meant(call.func, function), **options)
    return gate


def _other_is_fused(
    call: ast.Call, calls: Set[ast.Call], modules: Set[str], definition: ast.FunctionDef, function: FunctionType
) -> bool:
    """Whether the result of a call is multiplied by that of one of ``modules``, or, as the first, by one of ``calls``."""
    result = result_of(call, definition, function)
    ((value, by),) = result.values
    other = by.left if by.right is value else by.right
    factors = [other]
    if isinstance(other, ast.Name):
        factors = [each.value for each in assigns(definition) if any(is_name(target, other.id) for target in each.targets)]
    if any([is_own_call(each, result.self_name) and each.func.attr in modules for each in factors]):
        return True
    return by.left is value and bool(factors) and calls.issuperset(factors)


def _activation(name: str, call: ast.Call) -> ActivationModule | None:
    """jitact's module for a call of one tensor, and of options that are written there; None for other calls."""
    options = {each.arg: each.value.value for each in call.keywords if each.arg and isinstance(each.value, ast.Constant)}
    if len(call.args) != 1 or isinstance(call.args[0], ast.Starred) or len(options) != len(call.keywords):
        return None
    try:
        return get(name)(**options)
    except (TypeError, ValueError):
        return None


def _with_gates(function: FunctionType, definition: ast.FunctionDef, gates: Mapping[int, Gate]) -> FunctionType:
    """A function with the same code but for some calls, and the same globals, defaults and line numbers."""
    definition = copy.deepcopy(definition)
    for number, call in list(_calls(definition)):
        if number in gates:
            call.func, call.keywords = ast.copy_location(ast.Name(f"{_GATE}{number}", ast.Load()), call.func), []
    given, definition.returns = definition.args, None
    for each in [node for node in ast.walk(given) if isinstance(node, ast.arg)]:
        each.annotation = None
    given.defaults = [ast.copy_location(ast.Constant(None), each) for each in given.defaults]
    given.kw_defaults = [each and ast.copy_location(ast.Constant(None), each) for each in given.kw_defaults]
    tree = ast.parse(f"def make({', '.join(f'{_GATE}{number}' for number in gates)}): return {definition.name}")
    tree.body[0].body.insert(0, definition)
    ast.increment_lineno(tree, function.__code__.co_firstlineno - definition.lineno)
    made: dict[str, Any] = {}
    flags = function.__code__.co_flags & annotations.compiler_flag  # they are not evaluated
    exec(compile(tree, function.__code__.co_filename, "exec", flags, dont_inherit=True), function.__globals__, made)
    new = made["make"](*[gate.forward for gate in gates.values()])
    new.__defaults__, new.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    new.__qualname__ = function.__qualname__  # in messages about arguments
    return new
