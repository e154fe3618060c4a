"""How an activation runs: the operators behind it, what backward keeps, and the autograd functions around both."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import kernels

if TYPE_CHECKING:
    from .activations import Activation

__all__ = [
    "ACCEPTED",
    "DTYPES",
    "by_token",
    "call",
    "check",
    "describe",
    "in_order",
    "is_transformed",
    "kept_for_a_generation",
    "run",
    "strides_of_bits",
]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ACCEPTED = "a dense float32, float64, float16 or bfloat16 tensor"

by_token: dict[str, Activation] = {}
"""Every record by its token, a constant string, which is all that torch.compile can carry to the loader."""


class Config(NamedTuple):
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


def kept_for_a_generation(configure: Callable) -> Callable:
    """``configure``, with what it returns kept until a header of a kernel changes; not where torch.compile traces it."""

    @lru_cache(maxsize=4096)
    def keep(generation: int, *options: Any) -> Any:
        return configure(*options)

    def configured(*options: Any) -> Any:
        return configure(*options) if torch.compiler.is_compiling() else keep(kernels.generation(), *options)

    return configured


_configured = kept_for_a_generation(configure)


def _load(token: str, fast_math: bool) -> str:
    return kernels.load(by_token[token].source, fast_math=fast_math).name


# What torch.compiler.assume_constant_result sets, without its import of the whole compiler: tracing looks no further inside.
_load._dynamo_marked_constant = True


def call(operator: Callable, *arguments: Any) -> Any:
    """Calls an operator, with PyTorch's own error where memory is short.

    Through the C interface of the operators every exception is a RuntimeError. Asking for the memory again raises the one
    that users know how to catch, torch.OutOfMemoryError.
    """
    try:
        return operator(*arguments)
    except RuntimeError as error:
        raise _torchs_own(error, arguments[0]) from None


def _torchs_own(error: RuntimeError, x: Tensor) -> RuntimeError:
    try:
        torch.empty_like(x)
    except RuntimeError as own:
        return own
    return error


def strides_of_bits(y: Tensor) -> tuple[int, ...]:
    """The strides in whose order a mask holds the bits of ``y``: those of a dense copy where ``y`` is a view with gaps."""
    return y.stride() if y.is_contiguous() else torch.empty_like(y, device="meta").stride()


def in_order(dy: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``dy`` with these strides, copied if it has others."""
    if dy.stride() == strides:
        return dy
    return torch.empty_strided(dy.shape, strides, dtype=dy.dtype, device=dy.device).copy_(dy)


class _Activate(torch.autograd.Function):
    """Forward, keeping for backward what ``config.save`` names.

    It has forward(ctx, ...), because where setup_context stands apart, PyTorch inspects the signature of forward in every call,
    which takes longer than all the rest; and no jvp, because torch.compile accepts no Function that defines one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, config: Config) -> Tensor:
        kept = x.clone() if config.inplace and config.save == "input" else x
        y = call(config.forward_op, x, *config.params)
        if config.save == "bit":
            y, kept = (x, y) if config.inplace else y
            ctx.strides = strides_of_bits(y)
        if config.inplace:
            y = x
            ctx.mark_dirty(x)
        ctx.save_for_backward(y if config.save == "output" else kept)
        ctx.set_materialize_grads(False)
        ctx.config = config
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple:
        return None if dy is None else _gradient(ctx, dy), None


class _ActivateTransformed(_Activate):
    """Forward within torch.func's transforms and forward mode: never in place, keeping the input."""

    @staticmethod
    def forward(x: Tensor, config: Config) -> Tensor:
        return call(config.forward_op, x, *config.params)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, ctx.config = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, _: Any) -> Tensor:
        return _gradient(ctx, dx)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, config: Config) -> tuple:
        return _ActivateTransformed.apply(x, config), in_dims[0]


class _Gradient(torch.autograd.Function):
    """Backward as a function of ``dy`` and what was kept, itself differentiable."""

    @staticmethod
    def forward(dy: Tensor, kept: Tensor, config: Config) -> Tensor:
        return call(config.backward_op, dy, kept, *config.params)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        dy, kept, ctx.config = inputs
        ctx.save_for_backward(dy, kept)
        if is_transformed():
            ctx.save_for_forward(dy, kept)
        ctx.set_materialize_grads(False)
        ctx.strides = output.stride()

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


class _GradientCompiled(_Gradient):
    """For torch.compile, which accepts no Function that defines jvp, and needs none."""

    jvp = torch.autograd.Function.jvp


def _gradient(ctx: Any, dy: Tensor) -> Tensor:
    """``dy`` times the slope: an activation being elementwise, the derivative in forward and in reverse mode alike."""
    kept, config = ctx.saved_tensors[-1], ctx.config
    if config.save == "bit":
        dy = in_order(dy, ctx.strides)
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
        raise TypeError(f"{activation.name}: expected {ACCEPTED}, got {describe(x)}")
    compiling = torch.compiler.is_compiling()
    transformed = is_transformed()
    records = transformed or (torch.is_grad_enabled() and x.requires_grad)
    # Forward mode would want the tangent written in place too, and a view in place cannot keep its output.
    copies = inplace and (transformed or (records and not compiling and x._is_view()))
    in_place = inplace and not copies
    if not records or transformed:
        save = "input"  # nothing to keep; or a mask, in the order of memory, which vmap hides
    config = _configured(activation, params, in_place, save, fast_math)
    if not records:
        y = call(config.forward_op, x, *config.params)
        return x if in_place else y
    if in_place and x.is_leaf:
        raise RuntimeError(f"{activation.name}: a leaf that requires a gradient cannot be changed in place")
    source = x.clone() if copies else x  # what is kept of x must outlive the change of x
    y = (_ActivateTransformed if transformed else _Activate).apply(source, config)
    return x.copy_(y) if copies else y


def is_transformed() -> bool:
    """Whether torch.func transforms or forward-mode AD are at work, outside of torch.compile. Neither has a public query."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def describe(x: object) -> str:
    """What was given in place of a tensor that an activation takes, for an error."""
    if not isinstance(x, Tensor):
        return "None" if x is None else f"a {type(x).__name__}"
    layout = "" if x.layout is torch.strided else f"{str(x.layout).removeprefix('torch.')} "
    return f"a {layout}{str(x.dtype).removeprefix('torch.')} tensor"
