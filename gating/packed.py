"""A gated activation of one tensor that holds both, and its gradient as one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..autograd import Config, call, gradients
from .halves import Halves

__all__ = ["ActivatePacked"]


class ActivatePacked(torch.autograd.Function):
    """Forward, keeping for backward the one tensor and what else the kernel takes: no copy of a half, nothing that follows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, config: Config, params: tuple[float, ...], halves: Halves, *others: Tensor) -> Tensor:
        """``others`` are the operands that are no elements."""
        ctx.save_for_backward(x, *others)
        ctx.set_materialize_grads(False)
        ctx.config, ctx.params, ctx.halves = config, params, halves
        return call(config.forward_op, *halves.split(x), *others, *params)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple:
        """The gradients of ``x``, as one tensor, and of what else has one."""
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if dy is None:
            return tuple(found)
        x, *others = ctx.saved_tensors
        needs = [ctx.needs_input_grad[0]] * 2 + [ctx.needs_input_grad[place + 2] for place in ctx.config.places[2:]]
        a, b, *rest = gradients(ctx.config, ctx.params, dy, (*ctx.halves.split(x), *others), needs)
        if needs[0]:
            found[0] = ctx.halves.join(a, b)
        for place, gradient in zip(ctx.config.places[2:], rest, strict=True):
            found[place + 2] = gradient
        return tuple(found)
