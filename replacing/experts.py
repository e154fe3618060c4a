"""Gated activations in mixtures of experts of transformers, whose method ``_apply_gate`` takes gate and up as one tensor.

All ways in which transformers computes experts call this method. What it does is recorded by torch.fx, without a tensor; if
that is arithmetic alone, its values and gradients in float64 tell which of jitact's activations it is.
"""

from __future__ import annotations

import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

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
    """Takes the place of ``module._apply_gate``.

    It calls that while a submodule has hooks, which the method may call, and when the module has got other settings or
    submodules.

    Attributes:
        module: the module.
        fused: jitact's module for what the method does.
        settings: the module's attributes that are numbers or text, and its submodules, as they were when this was put there.
    """

    module: nn.Module
    fused: ActivationModule
    settings: dict[str, Any] = field(default_factory=dict)

    def put(self) -> None:
        """Puts it in the place of the method: not as a submodule, so that the module's structure and state stay."""
        own = {key: value for key, value in vars(self.module).items() if isinstance(value, (int, float, str))}
        own.pop("training", None)
        self.settings = own | self.module._modules
        vars(self.module)[METHOD] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The result of the method."""
        changed = any([getattr(self.module, key, None) != value for key, value in self.settings.items()])
        if kwargs or changed or any([has_hooks(child) for child in self.module.children()]):
            return getattr(type(self.module), METHOD)(self.module, *args, **kwargs)
        return self.fused(*args)


def gate_method_of(module: nn.Module) -> GateMethod | None:
    """What computes ``module._apply_gate`` in one kernel; None if there is none.

    Also None where the method multiplies the result of an activation module and does nothing else: that is fused where it is,
    wherever the module's code does it.
    """
    method = getattr(type(module), METHOD, None)
    if not isinstance(method, FunctionType) or METHOD in vars(module) or any(map(has_hooks, module.children())):
        return None
    if len(inspect.signature(method).parameters) != 2:  # self and the tensor
        return None
    graph = _recorded(module, method)
    if graph is None:
        return None
    limits, factors, summands = (_numbers(graph, kind) for kind in (_CLAMPS, _PRODUCTS, _SUMS))
    if not limits and any(is_activation(type(child)) for child in module.children()):
        return None
    if not all(map(math.isfinite, limits)):
        return None
    x = _values([1.0, *map(abs, limits)])
    expected = _results(lambda tensor: method(module, tensor), x)
    if expected is None:
        return None
    for name, numbers in _candidates(limits, factors, summands):
        for layout, gate in itertools.product(("halves", "interleaved"), ("first", "last")):
            found = get(name)(**numbers, layout=layout, gate=gate)
            results = _results(found.Model(**numbers, layout=layout, gate=gate), x)
            if results is not None and all(map(_is_same, results, expected)):
                return GateMethod(module, found)
    return None


def _recorded(module: nn.Module, method: FunctionType) -> fx.Graph | None:
    """What a method does with its argument; None if that is more than arithmetic of known functions, or depends on the mode."""
    training, graphs = module.training, []
    try:
        for mode in (not training, training):
            module.training = mode
            graphs.append(_graph(module, method))
    finally:
        module.training = training
    before, graph = graphs
    return graph if before is not None and graph is not None and str(before) == str(graph) else None


def _graph(module: nn.Module, method: FunctionType) -> fx.Graph | None:
    graph, before = fx.Graph(), dict(vars(module))
    x = fx.Proxy(graph.placeholder("x"), fx.proxy.GraphAppendingTracer(graph))
    try:
        y = method(module, x)
    except Exception:  # whatever code does that is given no tensor: then it is left as it is
        return None
    finally:
        own = vars(module)
        changed = own.keys() != before.keys() or any([own[key] is not value for key, value in before.items()])
        if changed:
            own.clear()
            own.update(before)
    known = _SPLITTING | _CLAMPS | _PRODUCTS | _SUMS | _FUNCTIONS
    calls = [node for node in graph.nodes if node.op != "placeholder"]
    is_known = isinstance(y, fx.Proxy) and all(_is_call(node) and node.target in known for node in calls)
    return graph if is_known and not changed else None


def _is_call(node: fx.Node) -> bool:
    """Whether it is a call of a function or method with numbers, which does not work in place."""
    given = (*node.args, *node.kwargs.values())
    held = any([isinstance(each, Tensor) for each in given])  # as weights, whose values change
    return node.op in ("call_function", "call_method") and not node.kwargs.get("inplace") and not held


def _numbers(graph: fx.Graph, functions: set[object]) -> set[float]:
    """The numbers among the arguments of calls of these functions."""
    given = [each for node in graph.nodes if node.target in functions for each in (*node.args, *node.kwargs.values())]
    return {float(each) for each in given if isinstance(each, (int, float))}


def _values(scales: list[float]) -> Tensor:
    """Random values up to three times each of these."""
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(len(scales), (4, 16, 64), generator=generator, device="cpu")
    scale = torch.tensor(scales, dtype=torch.float64, device="cpu")[places]
    return scale * (6 * torch.rand(scale.shape, dtype=torch.float64, generator=generator, device="cpu") - 3)


def _results(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The result and its gradient; None if there are none, as for another width, or without autograd."""
    with torch.inference_mode(False), torch.enable_grad():
        x = x.clone().requires_grad_()
        try:
            y = function(x)
            (grad,) = torch.autograd.grad(y.square().sum(), x)
        except (RuntimeError, TypeError, ValueError):
            return None
    return (y.detach(), grad) if type(y) is Tensor else None


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
