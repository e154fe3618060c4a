"""A gated activation of one tensor that holds both operands; its gradient is one tensor too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd import gradients
from ..configs import Config, call, call_forward, configured, is_batched, load, records_backward
from ..records import Activation
from .halves import Halves

__all__ = ["ActivatePacked", "Packing", "activate_packed_at_once", "packing"]


class Packing(NamedTuple):
    """The operators of a call on one tensor.

    Attributes:
        config: as for a call on two tensors.
        halves: how one tensor holds the two.
        backward_op: the operator that writes both gradients into one tensor.
    """

    config: Config
    halves: Halves
    backward_op: Callable


def packing(record: Activation, halves: Halves, fast_math: bool) -> Packing:
    """Finds the operators of a call on one tensor, and compiles them if necessary."""
    compiling = torch.compiler.is_compiling()
    found = None if compiling else record.configs.get((halves, fast_math))
    if found is None:
        operator = getattr(torch.ops.jitact, f"{load(record.token, fast_math)}_backward_packed").default
        found = Packing(configured(record, False, "input", fast_math), halves, operator)
        if not compiling:
            record.configs[halves, fast_math] = found
    return found


class ActivatePacked(torch.autograd.Function):
    """Forward, saving the one tensor and the other operands for backward: no copies of the halves, no intermediate results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packing: Packing, params: tuple[float, ...], *others: Tensor) -> Tensor:
        """``others`` are the operands that are not elementwise."""
        ctx.save_for_backward(x, *others)
        ctx.set_materialize_grads(False)
        ctx.packing, ctx.params = packing, params
        return call_forward(packing.config, *packing.halves.split(x), *others, *params)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple:
        """The gradient of ``x``, as one tensor, and those of the learned operands."""
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if dy is None:
            return tuple(found)
        (x, *others), (config, halves, operator), params = ctx.saved_tensors, ctx.packing, ctx.params
        places, operands = [place + 1 for place in config.places[2:]], (*halves.split(x), *others)
        needs = [ctx.needs_input_grad[place] for place in places]
        in_torch = is_batched(dy) or records_backward()
        if in_torch or not ctx.needs_input_grad[0]:  # batched or differentiable gradients, or none of ``x``
            a, b, *sums = gradients(config, params, dy, operands, [ctx.needs_input_grad[0]] * 2 + needs)
            found[0] = halves.join(a, b) if ctx.needs_input_grad[0] else None
        else:
            wanted = (sum([1 << k for k, need in enumerate(needs) if need]),) if needs else ()
            results = call(operator, dy, *operands, *params, *wanted, halves.code, halves.dim)
            found[0], *sums = results if needs else (results,)
        for place, need, gradient in zip(places, needs, sums, strict=True):
            found[place] = gradient if need else None
        return tuple(found)


# The C++ method that ``apply`` ends up calling outside of torch.compile and transforms: faster.
activate_packed_at_once = super(torch.autograd.Function, ActivatePacked).apply
