"""Replaces operators by torch operations in Inductor, either before a training graph is partitioned or at lowering.

The partitioner decides what is saved for backward and what is recomputed, by the number of operations among other things. Later
Inductor decides likewise: it stores what takes more than 30 operations, or has several users, and recomputes the rest. So most
activations stay one operation until lowering, as PyTorch's relu does, whatever their formulas need. Those that save the outcome
of a comparison, which is one byte, such as relu itself, are replaced before partitioning, as are sums over channels.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import SymFloat, fx

__all__ = ["dissolve"]

SLOW = {"exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "erf", "erfc", "tanh", "sigmoid", "sin", "cos", "tan", "pow"}
"""Functions whose results are stored on a CPU if they have several users; Inductor itself knows exp and a few more as slow."""


def dissolve(operator: torch._ops.OpOverload, formula: Callable, *, late: bool) -> None:
    """Has Inductor compile ``formula`` in place of ``operator``.

    Args:
        operator: takes tensors and numbers.
        formula: takes the same arguments, without ``save`` and ``version``.
        late: whether to replace it at lowering, which needs an elementwise formula. Calls with a symbolic number are replaced
            before the graph is partitioned in any case.
    """
    from torch._functorch.partitioners import pointwise_ops
    from torch._inductor.decomposition import decompositions, fast_random_decomps
    from torch._inductor.lowering import register_lowering

    def early(*operands: Any, save: str = "", version: str = "", **options: int) -> Any:
        if late and not any(isinstance(operand, SymFloat) for operand in operands):
            return NotImplemented
        return formula(*operands, **options)

    # The second table is a copy of the first, made when Inductor is first used.
    decompositions[operator] = fast_random_decomps()[operator] = early
    if late:
        pointwise_ops().append(operator.overloadpacket)

        @register_lowering(operator, broadcast=True, type_promotion_kind=None)
        def lower(*operands: Any, save: str = "", version: str = "", **options: int) -> Any:
            return _lowered(functools.partial(formula, **options), operands)


def _lowered(formula: Callable, operands: tuple) -> Any:
    """The results of an elementwise formula of Inductor's TensorBoxes and of numbers, as TensorBoxes."""
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import lowerings, make_pointwise
    from torch._inductor.ops_handler import OpCounterCSE
    from torch._inductor.virtualized import V, ops

    tensors = [operand for operand in operands if isinstance(operand, TensorBox)]
    device, graph = tensors[0].get_device(), _traced(formula, operands, tensors)
    compute = _per_element(graph, device)
    called = {node.target.overloadpacket.__name__ for node in graph.nodes if node.op == "call_function"}
    counted = ops.exp if device.type == "cpu" and called & SLOW else ops.relu

    def elementwise(result: fx.Node, *values: Any) -> Any:
        if isinstance(V.get_ops_handler(), OpCounterCSE):
            return counted(functools.reduce(ops.add, values))  # counts as one operation, a slow one for a CPU if ``counted`` is
        return compute(values)[result]

    def one(result: fx.Node) -> Any:
        like = result.meta["val"]
        if like.numel():
            return make_pointwise(functools.partial(elementwise, result), override_return_dtype=like.dtype)(*tensors)
        return lowerings[torch.ops.aten.full.default]([0], 0, dtype=like.dtype, device=device)  # an unwanted gradient

    return fx.map_arg(graph.output_node().args[0], one)


def _traced(formula: Callable, operands: tuple, tensors: list) -> fx.Graph:
    """The formula's torch operations, traced with 0-dimensional tensors for the operands that are tensors."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.ir import TensorBox
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def of_tensors(*elements: torch.Tensor) -> Any:
        given = iter(elements)
        return formula(*[next(given) if isinstance(operand, TensorBox) else operand for operand in operands])

    with FakeTensorMode():
        elements = [torch.empty((), dtype=each.get_dtype(), device=each.get_device()) for each in tensors]
        graph = make_fx(of_tensors, select_decomp_table())(*elements).graph
    graph.eliminate_dead_code()
    return graph


def _per_element(graph: fx.Graph, device: torch.device) -> Callable[[tuple], dict[fx.Node, Any]]:
    """The graph as a function of Inductor's scalar values, which emits each operation once; it returns values by node."""
    from torch._inductor.ir import Pointwise
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import OpsValue, ops

    # The default is for Inductor's questions whether a node is a constant, before there are values.
    values: dict[fx.Node, Any] = defaultdict(lambda: OpsValue(None))
    boxes: dict[fx.Node, Any] = {}
    steps = []

    def fused(terms: tuple, dtype: torch.dtype, _: Any) -> Any:
        return ops.fma(*[values[each] if isinstance(each, fx.Node) else ops.constant(each, dtype) for each in terms])

    for node in graph.nodes:
        if node.op == "output" or not node.meta["val"].numel():
            continue
        inner = functools.partial(lambda node, _: values[node], node)
        boxes[node] = Pointwise.create(device=device, dtype=node.meta["val"].dtype, inner_fn=inner, ranges=[])
        if node.op == "call_function":
            made = lowerings[node.target](*fx.map_arg(node.args, boxes.get), **fx.map_arg(node.kwargs, boxes.get))
            terms = _multiplied_and_added(node) if device.type == "cpu" else None
            step = terms and functools.partial(fused, terms, node.meta["val"].dtype)
            steps.append((node, step or made.make_loader()))
            boxes[node] = boxes[node] if node.all_input_nodes else made  # a constant
    given = [node for node in graph.nodes if node.op == "placeholder"]

    def compute(of: tuple) -> dict[fx.Node, Any]:
        values.update(zip(given, of, strict=True))
        for node, step in steps:
            values[node] = step(())
        return values

    return compute


def _multiplied_and_added(node: fx.Node) -> tuple | None:
    """a, b and c if the node is a * b + c in one dtype. Only for CPUs: compilers for GPUs contract to fma themselves."""
    aten, dtype = torch.ops.aten, node.meta["val"].dtype
    if node.target is not aten.add.Tensor or node.kwargs or not dtype.is_floating_point:
        return None
    for product, other in (node.args, node.args[::-1]):
        if isinstance(product, fx.Node) and product.target is aten.mul.Tensor:
            terms = *product.args, other
            if all(term.meta["val"].dtype is dtype for term in terms if isinstance(term, fx.Node)):
                return terms
    return None
