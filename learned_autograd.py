"""How activations run that take tensors beside ``x``: learned weights, or the seed of random numbers.

Inside torch.func's transforms, in forward mode and for second derivatives by weights they are PyTorch's formulas: rare paths,
which need rules for batches and tangents that elementwise kernels cannot give to sums and random numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels
from .activations import OPTIONS, Activation
from .autograd import by_token, call, in_order, is_transformed, kept_for_a_generation, strides_of_bits

__all__ = ["Config", "Learned", "configure", "run_learned", "run_random"]


@dataclass(eq=False)
class Learned(Activation):
    """The record of an activation whose functions take tensors beside ``x``.

    Attributes:
        weights: how many they are.
        learned: how many of them, the first, have gradients.
        channels: whether they may have one value for each channel.
        random: whether they are one, the seed of random numbers.
        bit: whether one bit per element is enough where no weight has a gradient.
        formula_of: the activation in PyTorch, ``formula_of(x, *tensors, *params)``, differentiable as often as wanted.
        constructor: arguments of the module with their defaults, as PyTorch's has them.
    """

    weights: int = 0
    learned: int = 0
    channels: bool = False
    random: bool = False
    bit: bool = False
    formula_of: Callable[..., Tensor] | None = None
    constructor: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def signature(self) -> inspect.Signature:
        """Of the constructor: PyTorch's arguments, then ``save`` and ``fast_math``."""
        positional = [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD, default=d) for n, d in self.constructor]
        keyword = [Parameter(n, Parameter.KEYWORD_ONLY, default=d) for n, d in OPTIONS.items()]
        return inspect.Signature([*positional, *keyword])


class Config(NamedTuple):
    """How a call runs, everything but the tensors."""

    record: Learned
    library: str
    params: tuple[float, ...]
    inplace: bool

    def operator(self, kind: str) -> Callable:
        """``jitact::<library>_<kind>``."""
        return getattr(torch.ops.jitact, f"{self.library}_{kind}").default


def configure(token: str, fast_math: bool, params: tuple[float, ...] = (), inplace: bool = False) -> Config:
    """Compiles what a call needs, unless it is there."""
    return Config(by_token[token], _load(token, fast_math), params, inplace)


_configured = kept_for_a_generation(configure)


def _load(token: str, fast_math: bool) -> str:
    return kernels.load(by_token[token].source, fast_math=fast_math).name


_load._dynamo_marked_constant = True  # as in autograd.py


class _KeepInput(torch.autograd.Function):
    """Forward, keeping ``x`` and the weights: the gradient of a weight needs ``x`` itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, config: Config, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        ctx.config = config
        return call(config.operator("forward"), x, *_shaped(x, weights), *config.params)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple:
        (x, *weights), config = ctx.saved_tensors, ctx.config
        if dy is None:
            return None, None, *[None] * len(weights)
        way = _way()
        if way == "formula":
            dx, *dw = _formula_gradients(config, dy, x, *weights)
        elif way == "differentiable":
            dx, *dw = _Gradients.apply(dy, x, config, *weights)
        else:
            dx, *dw = _gradients(config, dy, x, weights, ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:]))
        return dx, None, *dw, *[None] * (len(weights) - len(dw))


class _Gradients(torch.autograd.Function):
    """The gradients of ``x`` and of the weights as functions of ``dy``, ``x`` and the weights, themselves differentiable."""

    @staticmethod
    def forward(ctx: Any, dy: Tensor, x: Tensor, config: Config, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(dy, x, *weights)
        ctx.config = config
        return tuple(_gradients(config, dy, x, weights, True, True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        _, vjp = torch.func.vjp(lambda *tensors: _formula_gradients(ctx.config, *tensors), *ctx.saved_tensors)
        dy, x, *weights = vjp(gradients)
        return dy, x, None, *weights


class _KeepBit(torch.autograd.Function):
    """Forward, keeping one bit per element and the tensors beside ``x``, none of which has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, config: Config, *tensors: Tensor) -> Tensor:
        if config.inplace:
            y, mask = x, call(config.operator("forward_bit_"), x, *_shaped(x, tensors), *config.params)
            ctx.mark_dirty(x)
        else:
            y, mask = call(config.operator("forward_bit"), x, *_shaped(x, tensors), *config.params)
        ctx.strides = strides_of_bits(y)
        ctx.save_for_backward(mask, *tensors)
        ctx.set_materialize_grads(False)
        ctx.config = config
        return y  # and not the mask: in place on a view, a Function may return one tensor only

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple:
        (mask, *tensors), config = ctx.saved_tensors, ctx.config
        none = (None,) * (1 + len(tensors))
        if dy is None:
            return None, *none
        gradient = config.operator("backward_from_bit")
        if _way() != "operators":  # the slope is constant: dy times it has all derivatives
            ones = torch.empty_strided(dy.shape, ctx.strides, dtype=dy.dtype, device=dy.device).fill_(1)
            return dy * gradient(ones, mask, *_shaped(dy, tensors), *config.params), *none
        return call(gradient, in_order(dy, ctx.strides), mask, *_shaped(dy, tensors), *config.params), *none


def _way() -> str:
    """How to compute gradients: by "operators", by operators that are "differentiable", or by "formula"."""
    if torch.compiler.is_compiling():  # which knows no second derivatives
        return "operators"
    if is_transformed():
        return "formula"
    return "differentiable" if torch.is_grad_enabled() else "operators"


def _gradients(config: Config, dy: Tensor, x: Tensor, weights: Any, with_dx: bool, with_dw: bool) -> list[Tensor | None]:
    """Of ``x`` and, if wanted, of the learned weights."""
    learned = config.record.learned
    wanted = int(with_dx) | (((1 << learned) - 1) << 1 if with_dw else 0)
    dx, *dw = call(config.operator("backward"), dy, x, *_shaped(x, weights), *config.params, wanted)
    dw = [g.view(w.shape) for g, w in zip(dw, weights, strict=False)] if with_dw else []
    return [dx if with_dx else None, *dw]


def _shaped(x: Tensor, weights: Any) -> list[Tensor]:
    return [w.view(-1, *[1] * (x.dim() - 2)) if w.numel() > 1 and x.dim() > 2 else w for w in weights]


def _formula_gradients(config: Config, dy: Tensor, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Of ``x`` and of the learned weights, in PyTorch."""
    learned, fixed = weights[: config.record.learned], weights[config.record.learned :]
    _, vjp = torch.func.vjp(lambda x, *learned: config.record.formula_of(x, *learned, *fixed, *config.params), x, *learned)
    return vjp(dy)


def run_learned(x: Tensor, record: Learned, weights: tuple[Tensor, ...], fast_math: bool) -> Tensor:
    """Applies an activation that learns weights. The arguments are checked."""
    if is_transformed():
        return record.formula_of(x, *weights)
    config = _configured(record.token, fast_math)
    if torch.is_grad_enabled():
        if any([weight.requires_grad for weight in weights[: record.learned]]):
            return _KeepInput.apply(x, config, *weights)
        if x.requires_grad:
            return (_KeepBit if record.bit else _KeepInput).apply(x, config, *weights)
    return call(config.operator("forward"), x, *_shaped(x, weights))


def run_random(x: Tensor, record: Learned, params: tuple[float, ...], inplace: bool, fast_math: bool) -> Tensor:
    """Applies an activation that draws random numbers. The arguments are checked.

    Raises:
        RuntimeError: in place on a leaf that requires a gradient.
    """
    if is_transformed():
        y = record.formula_of(x, *params)
        return x.copy_(y) if inplace else y
    config = _configured(record.token, fast_math, params, inplace)
    if not (torch.is_grad_enabled() and x.requires_grad):
        y = call(config.operator("forward_" if inplace else "forward"), x, _seed(x), *params)
        return x if inplace else y
    if inplace and x.is_leaf:
        raise RuntimeError(f"{record.name}: a leaf that requires a gradient cannot be changed in place")
    return _KeepBit.apply(x, config, _seed(x))


def _seed(x: Tensor) -> Tensor:
    """From PyTorch's generator, on ``x``'s device: no synchronisation, and a CUDA graph draws anew with each replay."""
    return torch.randint(2**63 - 1, (1,), device=x.device)
