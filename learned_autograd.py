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

from .activations import OPTIONS, Activation
from .autograd import (
    by_slope,
    by_token,
    call,
    in_order,
    is_batched,
    is_transformed,
    kept_for_a_generation,
    load,
    overwritten,
    refuse_leaf,
    strides_of_bits,
    write,
)

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

    def recorded(self, fast_math: bool, x: Tensor, *others: Tensor | float) -> Tensor:
        """Forward where something is recorded, out of place, with what its operators take."""
        tensors, params = others[: self.weights or 1], others[self.weights or 1 :]  # the seed, where there are no weights
        if is_transformed():
            return self.formula_of(x, *(() if self.random else tensors), *params)
        return _recorded(x, _configured(self.token, fast_math), params, tensors, None)


class Config(NamedTuple):
    """How a call runs, everything but the tensors and the numbers."""

    record: Learned
    library: str
    inplace: bool

    def operator(self, kind: str) -> Callable:
        """``jitact::<library>_<kind>``."""
        return getattr(torch.ops.jitact, f"{self.library}_{kind}").default


def configure(token: str, fast_math: bool, inplace: bool = False) -> Config:
    """Compiles what a call needs, unless it is there."""
    return Config(by_token[token], load(token, fast_math), inplace)


_configured = kept_for_a_generation(configure)


class _KeepInput(torch.autograd.Function):
    """Forward, keeping ``x`` and the weights: the gradient of a weight needs ``x`` itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, config: Config, params: tuple[float, ...], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        ctx.config, ctx.params = config, params
        return call(config.operator("forward"), x, *weights, *params)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple:
        (x, *weights), config, params = ctx.saved_tensors, ctx.config, ctx.params
        if dy is None:
            return None, None, None, *[None] * len(weights)
        if is_batched(dy):
            dx, *dw = _formula_gradients(config, params, dy, x, *weights)
        elif torch.is_grad_enabled() and not torch.compiler.is_compiling():  # which knows no second derivatives
            dx, *dw = _Gradients.apply(dy, x, config, params, *weights)
        else:
            needs = ctx.needs_input_grad
            dx, *dw = _gradients(config, params, dy, x, weights, needs[0], any(needs[3:]))
        return dx, None, None, *dw, *[None] * (len(weights) - len(dw))


class _Gradients(torch.autograd.Function):
    """The gradients of ``x`` and of the weights as functions of ``dy``, ``x`` and the weights, themselves differentiable."""

    @staticmethod
    def forward(ctx: Any, dy: Tensor, x: Tensor, config: Config, params: tuple, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(dy, x, *weights)
        ctx.config, ctx.params = config, params
        return tuple(_gradients(config, params, dy, x, weights, True, True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        _, vjp = torch.func.vjp(lambda *tensors: _formula_gradients(ctx.config, ctx.params, *tensors), *ctx.saved_tensors)
        dy, x, *weights = vjp(gradients)
        return dy, x, None, None, *weights


class _KeepBit(torch.autograd.Function):
    """Forward, keeping one bit per element and the tensors beside ``x``, none of which has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, config: Config, params: tuple[float, ...], *tensors: Tensor) -> Tensor:
        if config.inplace:
            y, mask = x, call(config.operator("forward_bit_"), x, *tensors, *params)
            ctx.mark_dirty(x)
        else:
            y, mask = call(config.operator("forward_bit"), x, *tensors, *params)
        ctx.strides = strides_of_bits(y)
        ctx.save_for_backward(mask, *tensors)
        ctx.set_materialize_grads(False)
        ctx.config, ctx.params = config, params
        return y  # and not the mask: in place on a view, a Function may return one tensor only

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple:
        (mask, *tensors), config = ctx.saved_tensors, ctx.config
        none = (None,) * (2 + len(tensors))
        if dy is None:
            return None, *none
        gradient = config.operator("backward_from_bit")
        if is_batched(dy) or (torch.is_grad_enabled() and not torch.compiler.is_compiling()):
            return by_slope(dy, _slope(gradient, config.record, dy, ctx.strides, mask, *tensors, *ctx.params)), *none
        return call(gradient, in_order(dy, ctx.strides), mask, *tensors, *ctx.params), *none


def _slope(gradient: Callable, record: Learned, dy: Tensor, strides: tuple[int, ...], mask: Tensor, *others: Any) -> Tensor:
    """The slope at each element: in float32 at least, where it does not hang on random numbers, which differ by dtype."""
    dtype = dy.dtype if record.random else torch.promote_types(dy.dtype, torch.float32)
    others = [t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in others]
    ones = torch.empty_strided(dy.shape, strides, dtype=dtype, device=dy.device).fill_(1)
    return call(gradient, ones, mask, *others)


def _gradients(
    config: Config, params: tuple, dy: Tensor, x: Tensor, weights: Any, with_dx: bool, with_dw: bool
) -> list[Tensor | None]:
    """Of ``x`` and, if wanted, of the learned weights."""
    wanted = int(with_dx) | ((2 << config.record.learned) - 2 if with_dw else 0)
    gradients = call(config.operator("backward"), dy, x, *weights, *params, wanted)
    dx, dw = gradients[0] if with_dx else None, gradients[1:] if with_dw else ()
    return [dx, *dw]


def _formula_gradients(config: Config, params: tuple, dy: Tensor, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Of ``x`` and of the learned weights, in PyTorch."""
    learned, fixed = weights[: config.record.learned], weights[config.record.learned :]
    _, vjp = torch.func.vjp(lambda x, *learned: config.record.formula_of(x, *learned, *fixed, *params), x, *learned)
    return vjp(dy)


def run_learned(x: Tensor, record: Learned, weights: tuple[Tensor, ...], save: str | None, fast_math: bool) -> Tensor:
    """Applies an activation that learns weights. The arguments are checked."""
    if is_transformed():
        return record.formula_of(x, *weights)
    if torch.compiler.is_compiling() and torch.compiler.is_exporting():
        return getattr(torch.ops.jitact, f"{load(record.token, fast_math)}_apply")(x, *weights)
    config = _configured(record.token, fast_math)
    if torch.is_grad_enabled() and any([t.requires_grad for t in (x, *weights[: record.learned])]):
        return _recorded(x, config, (), weights, save)
    return call(config.operator("forward"), x, *weights)


def run_random(x: Tensor, record: Learned, params: tuple[float, ...], inplace: bool, fast_math: bool) -> Tensor:
    """Applies an activation that draws random numbers. The arguments are checked.

    Raises:
        RuntimeError: in place on a leaf that requires a gradient, or on an inference tensor outside of inference mode.
    """
    transformed, compiling = is_transformed(), torch.compiler.is_compiling()
    records = torch.is_grad_enabled() and x.requires_grad
    if inplace:
        if records and x.is_leaf and not transformed:
            refuse_leaf(record)
        if transformed or compiling or x.is_neg():
            return write(x, run_random(x, record, params, False, fast_math))
    if transformed:
        return record.formula_of(x, *params)
    if compiling and torch.compiler.is_exporting():
        return getattr(torch.ops.jitact, f"{load(record.token, fast_math)}_apply")(x, _seed(x), *params)
    config = _configured(record.token, fast_math, inplace)
    if records:
        return _recorded(x, config, params, (_seed(x),), None)
    if inplace:
        return overwritten(x, config.operator("forward_"), _seed(x), *params)
    return call(config.operator("forward"), x, _seed(x), *params)


def _recorded(x: Tensor, config: Config, params: tuple[float, ...], tensors: tuple[Tensor, ...], save: str | None) -> Tensor:
    """Keeps the input where a weight has a gradient or that is wanted, else one bit per element where it is enough."""
    record = config.record
    one_bit = record.bit and save is None and not any([weight.requires_grad for weight in tensors[: record.learned]])
    return (_KeepBit if record.random or one_bit else _KeepInput).apply(x, config, params, *tensors)


def _seed(x: Tensor) -> Tensor:
    """From PyTorch's generator, on ``x``'s device: no synchronisation, and a CUDA graph draws anew with each replay."""
    return torch.randint(2**63 - 1, (1,), device=x.device)
