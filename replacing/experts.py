"""Gated activations in mixtures of experts of transformers, whose method ``_apply_gate`` takes gate and up as one tensor.

All ways in which transformers computes experts call this method. What it does is recorded by torch.fx, without a tensor; if
that is arithmetic alone, its values in float64 tell which of jitact's activations it is.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..modules import ActivationModule
from ..registry import get
from .counterparts import is_activation
from .pending import has_hooks

__all__ = ["METHOD", "GateMethod", "gate_method_of"]

METHOD = "_apply_gate"
_SPLITTING = {operator.getitem, torch.chunk, "chunk"}
_CLAMPS = {torch.clamp, "clamp"}
_PRODUCTS, _SUMS = {operator.mul, torch.mul, "mul"}, {operator.add, torch.add, "add"}
_FUNCTIONS = {F.gelu, F.relu, F.sigmoid, F.silu, torch.relu, torch.sigmoid, "relu", "sigmoid"}
_PLAIN = "swiglu", "geglu", "geglu_tanh", "quick_geglu", "reglu"


@dataclass(eq=False)
class GateMethod:
    """Takes the place of ``module._apply_gate``; while a submodule has hooks, which that may call, it calls it.

    Attributes:
        module: the module.
        fused: jitact's module for what the method does.
    """

    module: nn.Module
    fused: ActivationModule

    def __call__(self, gate_up: Tensor) -> Tensor:
        """The result of the method."""
        if any([has_hooks(child) for child in self.module.children()]):
            return getattr(type(self.module), METHOD)(self.module, gate_up)
        return self.fused(gate_up)


def gate_method_of(module: nn.Module) -> GateMethod | None:
    """What computes ``module._apply_gate`` in one kernel; None if there is none.

    Also None where the method multiplies the result of an activation module and does nothing else: that is fused where it is,
    wherever the module's code does it.
    """
    method = getattr(type(module), METHOD, None)
    if not isinstance(method, FunctionType) or METHOD in vars(module) or any(map(has_hooks, module.children())):
        return None
    graph = _recorded(module, method)
    if graph is None:
        return None
    limits, factors, summands = (_numbers(graph, kind) for kind in (_CLAMPS, _PRODUCTS, _SUMS))
    if not limits and any(is_activation(type(child)) for child in module.children()):
        return None
    x = _values([1.0, *map(abs, limits)])
    expected = method(module, x)
    for name, numbers in _candidates(limits, factors, summands):
        for layout, gate in itertools.product(("halves", "interleaved"), ("first", "last")):
            found = get(name)(**numbers, layout=layout, gate=gate)
            if _is_same(found.Model(**numbers, layout=layout, gate=gate)(x), expected):
                return GateMethod(module, found)
    return None


def _recorded(module: nn.Module, method: FunctionType) -> fx.Graph | None:
    """What a method does with its argument; None if that is more than arithmetic of known functions."""
    graph = fx.Graph()
    x = fx.Proxy(graph.placeholder("x"), fx.proxy.GraphAppendingTracer(graph))
    try:
        y = method(module, x)
    except Exception:  # whatever code does that is given no tensor: then it is left as it is
        return None
    known = _SPLITTING | _CLAMPS | _PRODUCTS | _SUMS | _FUNCTIONS
    calls = [node for node in graph.nodes if node.op != "placeholder"]
    return graph if isinstance(y, fx.Proxy) and all(_is_call(node) and node.target in known for node in calls) else None


def _is_call(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and not node.kwargs.get("inplace")


def _numbers(graph: fx.Graph, functions: set[object]) -> set[float]:
    """The numbers among the arguments of calls of these functions."""
    given = [each for node in graph.nodes if node.target in functions for each in (*node.args, *node.kwargs.values())]
    return {float(each) for each in given if isinstance(each, (int, float))}


def _values(scales: list[float]) -> Tensor:
    """Random values up to three times each of these."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor(scales, dtype=torch.float64)[torch.randint(len(scales), (4, 16, 64), generator=generator)]
    return scale * (6 * torch.rand(scale.shape, dtype=torch.float64, generator=generator) - 3)


def _candidates(limits: set[float], factors: set[float], summands: set[float]) -> Iterator[tuple[str, dict[str, float]]]:
    """Gated activations, with parameters that the method's numbers may be."""
    if not limits:
        yield from ((name, {}) for name in _PLAIN)
    for limit in [each for each in limits if each >= 0]:
        yield "swiglu_step", {"limit": limit}
        for alpha, beta in itertools.product({1.0, *factors}, {0.0, *summands}):
            if alpha > 0:
                yield "clamped_swiglu", {"alpha": alpha, "limit": limit, "beta": beta}


def _is_same(y: Tensor, expected: Tensor) -> bool:
    return y.shape == expected.shape and torch.allclose(y, expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))
