"""How an activation runs: the operators behind it, what backward keeps, and the autograd functions around both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import kernels

if TYPE_CHECKING:
    from .activations import Activation

__all__ = ["ACCEPTED", "DTYPES", "check", "run"]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ACCEPTED = "a dense float32, float64, float16 or bfloat16 tensor"

by_token: dict[str, Activation] = {}
"""Every record by its token, a constant string, which is all that torch.compile can carry to the loader."""


@dataclass(eq=False)
class Config:
    """How a call runs, everything but the tensor: the options, completed, and the operators they lead to."""

    activation: Activation
    params: tuple[float, ...]
    inplace: bool
    save: str
    forward_op: Callable
    backward_op: Callable


def check(activation: Activation, params: tuple[float, ...], save: str | None) -> None:
    """Checks options as a constructor gets them.

    Raises:
        TypeError: a parameter is not a number.
        ValueError: ``save`` is not one of the activation's, or a parameter is out of its range.
    """
    for (name, _), value in zip(activation.params, params, strict=True):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{activation.name}: {name} must be a number, got {value!r}")
    if save is not None and save not in activation.saves:
        choices = ", ".join(map(repr, activation.saves))
        raise ValueError(f"{activation.name}: save={save!r} is not possible; choose from {choices}")
    for requirement in activation.requires:
        if requirement.save in (None, save) and not requirement.holds(*params):
            given = ", ".join(f"{name}={value}" for (name, _), value in zip(activation.params, params, strict=True))
            where = f" with save={save!r}" if requirement.save else ""
            raise ValueError(f"{activation.name}: needs {requirement.text}{where}, got {given}")


def default_save(activation: Activation, params: tuple[float, ...], inplace: bool) -> str:
    """What backward keeps when nobody says: the table's first choice; in place, the output where that is possible.

    Keeping the output of an in-place call costs no memory, where keeping the input would mean a copy of it.
    """
    can_keep_output = "output" in activation.saves and all(r.holds(*params) for r in activation.requires)
    return "output" if inplace and activation.saves[0] == "input" and can_keep_output else activation.saves[0]


def configure(activation: Activation, params: tuple[float, ...], inplace: bool, save: str | None, fast_math: bool) -> Config:
    """Completes and checks the options of a call, and compiles what it needs.

    Raises:
        TypeError, ValueError: as :func:`check`.
    """
    check(activation, params, save)
    if save is None:
        save = default_save(activation, params, inplace)
    library = _load(activation.token, fast_math)
    forward = ("forward_bit" if save == "bit" else "forward") + ("_" if inplace else "")
    backward = "backward" if save == "input" else f"backward_from_{save}"
    ops = [getattr(torch.ops.jitact, f"{library}_{kind}").default for kind in (forward, backward)]
    return Config(activation, tuple([float(p) for p in params]), inplace, save, *ops)


_configure_once = lru_cache(maxsize=4096)(configure)


def _load(token: str, fast_math: bool) -> str:
    return kernels.load(by_token[token].source, fast_math=fast_math).name


# What torch.compiler.assume_constant_result sets, without its import of the whole compiler: tracing looks no further inside.
_load._dynamo_marked_constant = True


class _Activate(torch.autograd.Function):
    """Forward, keeping for backward what ``config.save`` names.

    Returns ``y``, or ``(y, kept)`` where what backward needs is neither ``x`` nor ``y`` as they are.
    """

    @staticmethod
    def forward(x: Tensor, config: Config) -> Any:
        if not config.inplace:
            return config.forward_op(x, *config.params)
        kept = x.clone() if config.save == "input" else None
        mask = config.forward_op(x, *config.params)
        return x if config.save == "output" else (x, mask if kept is None else kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        x, config = inputs
        if isinstance(output, tuple):
            y, kept = output
            ctx.mark_non_differentiable(kept)
        else:
            y, kept = output, x if config.save == "input" else output
        if config.inplace:
            ctx.mark_dirty(x)
        ctx.save_for_backward(kept)
        if _transformed():
            ctx.save_for_forward(kept)  # a plain reference: always made, a kept output would hold itself alive
        ctx.set_materialize_grads(False)
        ctx.config, ctx.strides = config, y.stride()

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple:
        return None if dy is None else _gradient(ctx, dy), None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, _: Any) -> Any:
        dy = _gradient(ctx, dx)
        return (dy, None) if ctx.config.save == "bit" else dy

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, config: Config) -> tuple:
        return _Activate.apply(x, config), in_dims[0]


class _Gradient(torch.autograd.Function):
    """Backward as a function of ``dy`` and what was kept, itself differentiable."""

    @staticmethod
    def forward(dy: Tensor, kept: Tensor, config: Config) -> Tensor:
        return config.backward_op(dy, kept, *config.params)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        dy, kept, config = inputs
        ctx.save_for_backward(dy, kept)
        if _transformed():
            ctx.save_for_forward(dy, kept)
        ctx.set_materialize_grads(False)
        ctx.config, ctx.strides = config, output.stride()

    @staticmethod
    def backward(ctx: Any, ddx: Tensor | None) -> tuple:
        if ddx is None:
            return None, None, None
        curvature = _curvature(ctx)
        return _gradient(ctx, ddx), None if curvature is None else ddx * curvature, None

    @staticmethod
    def jvp(ctx: Any, ddy: Tensor | None, dkept: Tensor | None, _: Any) -> Tensor:
        curvature = None if dkept is None else _curvature(ctx)
        if curvature is None:
            return torch.zeros_like(ctx.saved_tensors[0]) if ddy is None else _gradient(ctx, ddy)
        return dkept * curvature if ddy is None else torch.addcmul(_gradient(ctx, ddy), dkept, curvature)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, dy: Tensor, kept: Tensor, config: Config) -> tuple:
        dy, kept = (
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((dy, kept), in_dims, strict=False)
        )
        return _Gradient.apply(dy, kept, config), 0


# torch.compile accepts no Function that defines jvp; it needs neither forward mode nor batching from these.


class _ActivateCompiled(_Activate):
    jvp = torch.autograd.Function.jvp


class _GradientCompiled(_Gradient):
    jvp = torch.autograd.Function.jvp


def _gradient(ctx: Any, dy: Tensor) -> Tensor:
    """``dy`` times the slope: an activation being elementwise, the derivative in forward and in reverse mode alike."""
    kept, config = ctx.saved_tensors[-1], ctx.config
    if config.save == "bit" and dy.stride() != ctx.strides:
        dy = torch.empty_strided(dy.shape, ctx.strides, dtype=dy.dtype, device=dy.device).copy_(dy)
    if not torch.is_grad_enabled():
        return _Gradient.forward(dy, kept, config)
    return (_GradientCompiled if torch.compiler.is_compiling() else _Gradient).apply(dy, kept, config)


def _curvature(ctx: Any) -> Tensor | None:
    """``dy`` times the derivative of the slope by what was kept, from the reference; None where the slope is constant."""
    (dy, kept), config = ctx.saved_tensors, ctx.config
    if "bit" in config.activation.saves:
        return None
    reference = config.activation.gradient_reference
    _, vjp = torch.func.vjp(lambda k: reference(dy, k, config.params, config.save), kept)
    return vjp(torch.ones_like(dy))[0]


def run(
    x: Tensor, activation: Activation, params: tuple[float, ...], inplace: bool, save: str | None, fast_math: bool
) -> Tensor:
    """Applies an activation. What :func:`make_function` and :class:`ActivationModule` call.

    Raises:
        TypeError: ``x`` is not a dense tensor of one of :data:`DTYPES`.
        RuntimeError: in place on a leaf that requires a gradient.
    """
    if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.layout is not torch.strided:
        raise TypeError(f"{activation.name}: expected {ACCEPTED}, got {_describe(x)}")
    compiling = torch.compiler.is_compiling()
    transformed = _transformed()
    records = transformed or (torch.is_grad_enabled() and x.requires_grad)
    # Forward mode would want the tangent written in place too, and a Function of two outputs changes no view.
    copies = inplace and (transformed or (records and not compiling and x._is_view()))
    in_place = inplace and not copies
    if not records or (transformed and (save or activation.saves[0]) == "bit"):
        save = "input"  # nothing to keep, or a mask in the order of memory, which vmap hides
    config = (configure if compiling else _configure_once)(activation, params, in_place, save, fast_math)
    if not records:
        y = config.forward_op(x, *config.params)
        return x if in_place else y
    if in_place and x.is_leaf:
        raise RuntimeError(f"{activation.name}: a leaf that requires a gradient cannot be changed in place")
    source = x.clone() if copies else x  # what is kept of x must outlive the change of x
    y = (_ActivateCompiled if compiling else _Activate).apply(source, config)
    y = y[0] if isinstance(y, tuple) else y
    return x.copy_(y) if copies else y


def _transformed() -> bool:
    """Whether torch.func transforms or forward-mode AD are at work, outside of torch.compile. Neither has a public query."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def _describe(x: object) -> str:
    if not isinstance(x, Tensor):
        return "None" if x is None else f"a {type(x).__name__}"
    layout = "" if x.layout is torch.strided else f"{str(x.layout).removeprefix('torch.')} "
    return f"a {layout}{str(x.dtype).removeprefix('torch.')} tensor"
