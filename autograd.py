"""How an activation runs: the operators behind it, what backward keeps, and the autograd functions around both."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function

from . import kernels

if TYPE_CHECKING:
    from .activations import Activation

__all__ = [
    "ACCEPTED",
    "DTYPES",
    "as_number",
    "by_slope",
    "by_token",
    "call",
    "check",
    "check_tensor",
    "configured",
    "describe",
    "in_order",
    "is_batched",
    "is_stand_in",
    "is_transformed",
    "kept_for_a_generation",
    "load",
    "overwritten",
    "recorded",
    "refuse_leaf",
    "run",
    "strides_of_bits",
    "write",
]

BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Whether torch.compile is one that keeps inputs of autograd functions which nobody asked for; 2.11 was seen to."""

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ACCEPTED = "a dense float32, float64, float16 or bfloat16 tensor"

by_token: dict[str, Activation] = {}
"""Every record by its token, a constant string, which is all that torch.compile can carry to the loader."""


class Config(NamedTuple):
    """How a call runs, everything but the tensor and the numbers: the options, completed, and the operators they lead to."""

    activation: Activation
    inplace: bool
    save: str
    forward_op: Callable
    backward_op: Callable


def check(activation: Activation, params: tuple, inplace: bool, save: str | None, fast_math: bool) -> tuple[float, ...]:
    """Checks options as a constructor gets them, and returns the parameters as floats.

    Raises:
        TypeError: a parameter is not a number, or an option that is on or off is not a bool.
        ValueError: ``save`` is not one of the activation's, or a parameter is out of its range.
    """
    if type(inplace) is not bool or type(fast_math) is not bool:
        option, value = ("inplace", inplace) if type(inplace) is not bool else ("fast_math", fast_math)
        raise TypeError(f"{activation.name}: {option} must be True or False, got {value!r}")
    if save is not None and save not in activation.saves:
        choices = ", ".join(map(repr, activation.saves))
        raise ValueError(f"{activation.name}: save={save!r} is not possible; choose from {choices}")
    if not params:
        return ()
    values = params
    for value in params:
        if type(value) is not float:  # seldom
            values = tuple([as_number(activation, name, p) for (name, _), p in zip(activation.params, params, strict=True)])
            break
    for requirement in activation.requires:
        if requirement.save in (None, save) and not requirement.holds(*values):
            given = ", ".join(f"{name}={value}" for (name, _), value in zip(activation.params, params, strict=True))
            where = f" with save={save!r}" if requirement.save else ""
            raise ValueError(f"{activation.name}: needs {requirement.text}{where}, got {given}")
    return values


def as_number(activation: Activation, name: str, value: Any) -> float:
    """A parameter as a float: Python's numbers and NumPy's, but no bools, which PyTorch would take for 0 and 1.

    Raises:
        TypeError: it is no number.
        ValueError: it is an integer that no float can hold.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{activation.name}: {name} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{activation.name}: {name} must fit into a float, got {value!r}") from None


def default_save(activation: Activation, params: tuple[float, ...]) -> str:
    """What backward keeps in place, when nobody says: the output where that is possible and the table's first is the input.

    Keeping the output of an in-place call costs no memory, where keeping the input would mean a copy of it.
    """
    if activation.saves[0] == "input" and "output" in activation.saves:
        return "output" if all([r.holds(*params) for r in activation.requires]) else "input"
    return activation.saves[0]


def configure(activation: Activation, inplace: bool, save: str, fast_math: bool) -> Config:
    """Finds the operators of a call, and compiles them unless they are there. The options are checked."""
    library = load(activation.token, fast_math)
    forward = ("forward_bit" if save == "bit" else "forward") + ("_" if inplace else "")
    backward = "backward" if save == "input" else f"backward_from_{save}"
    ops = [getattr(torch.ops.jitact, f"{library}_{kind}").default for kind in (forward, backward)]
    return Config(activation, inplace, save, *ops)


def kept_for_a_generation(configure: Callable) -> Callable:
    """``configure``, with what it returns kept until a header of a kernel changes; not where torch.compile traces it.

    Parameters, whose values may change with each call, are no options of it.
    """

    @lru_cache(maxsize=4096)
    def keep(generation: int, *options: Any) -> Any:
        return configure(*options)

    def configured(*options: Any) -> Any:
        return configure(*options) if torch.compiler.is_compiling() else keep(kernels.generation(), *options)

    return configured


configured = kept_for_a_generation(configure)


def load(token: str, fast_math: bool) -> str:
    """The first part of the names of a record's operators, compiled unless they are there."""
    record = by_token[token]
    library = kernels.load(record.source, fast_math=fast_math).name
    if library not in _differentiable:
        _make_differentiable(library, record, fast_math)
    return library


# What torch.compiler.assume_constant_result sets, without its import of the whole compiler: tracing looks no further inside.
load._dynamo_marked_constant = True


_differentiable: dict[str, torch.library.Library] = {}  # the builds whose operator "apply" has a gradient
_lock = threading.Lock()


def _make_differentiable(library: str, record: Activation, fast_math: bool) -> None:
    """Gives ``jitact::<library>_apply``, which torch.export writes into programs, the gradient that the record has.

    The other operators have none of their own: the functions below, which call them, record what there is to record.
    """
    operator = getattr(torch.ops.jitact, f"{library}_apply").default

    def apply(x: Tensor, *arguments: Any) -> Tensor:
        tensors = (x, *(each for each in arguments if isinstance(each, Tensor)))
        if is_transformed() or (torch.is_grad_enabled() and any([t.requires_grad for t in tensors])):
            return record.recorded(fast_math, x, *arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(x, *arguments)

    with _lock:
        if library not in _differentiable:
            registration = torch.library.Library("jitact", "FRAGMENT")
            registration.impl(f"{library}_apply", apply, "Autograd")
            _differentiable[library] = registration  # which lasts as long as this


def call(operator: Callable, *arguments: Any) -> Any:
    """Calls an operator, with PyTorch's own error where memory is short.

    Through the C interface of the operators every exception is a RuntimeError. Asking for the memory again raises the one
    that users know how to catch, torch.OutOfMemoryError.
    """
    try:
        return operator(*arguments)
    except RuntimeError as error:
        raise _torchs_own(error, arguments) from None


def _torchs_own(error: RuntimeError, arguments: tuple) -> RuntimeError:
    if "out of memory" not in str(error):  # as binding.cpp says it
        return error
    try:
        for each in arguments:
            if isinstance(each, Tensor):
                torch.empty_like(each)
    except RuntimeError as own:
        return own
    return error


def overwritten(x: Tensor, operator: Callable, *arguments: Any) -> Tensor:
    """Changes ``x`` in place by an operator, with nothing recorded; returns ``x``.

    Operators that are made outside of PyTorch do not tell autograd that ``x`` has changed: this does.

    Raises:
        RuntimeError: ``x`` is an inference tensor, outside of inference mode.
    """
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError("an inference tensor cannot be changed in place outside of inference mode; clone it first")
    call(operator, x, *arguments)
    torch.autograd.graph.increment_version(x)
    return x


def write(x: Tensor, y: Tensor) -> Tensor:
    """Puts ``y`` into ``x``, which records it, and returns ``x``."""
    if not torch.compiler.is_compiling() and is_transformed() and _functionalized():
        return x.fill_(-0.0).add_(y)  # the same, as -0 + y is y; and what functionalize makes of copy_ has no derivative
    return x.copy_(y)


def strides_of_bits(y: Tensor) -> tuple[int, ...]:
    """The strides in whose order a mask holds the bits of ``y``: those of a dense copy where ``y`` is a view with gaps."""
    return y.stride() if y.is_contiguous() else torch.empty_like(y, device="meta").stride()


def _copied(x: Tensor, activation: Activation) -> Tensor:
    """A copy of ``x``.

    Raises:
        RuntimeError: its storage was freed behind it, as FSDP does, where PyTorch's own copy would crash.
    """
    in_memory = type(x) is Tensor and not torch.compiler.is_compiling() and not is_transformed()
    if in_memory and x.numel() and not x.untyped_storage().nbytes():
        raise RuntimeError(f"{activation.name}: a tensor has elements, but its data is not allocated (yet, or any more)")
    return x.clone()


def in_order(dy: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``dy`` in memory, with these strides; copied if it has others."""
    if dy.stride() == strides and (torch.compiler.is_compiling() or not dy._is_zerotensor()):
        return dy
    return torch.empty_strided(dy.shape, strides, dtype=dy.dtype, device=dy.device).copy_(dy)


def is_batched(dy: Tensor) -> bool:
    """Whether what looks like one gradient is, or may be, a batch of them, whose memory is not that of one."""
    if torch.compiler.is_compiling():
        return False
    return is_transformed() or torch._C._functorch.is_legacy_batchedtensor(dy)  # torch.vmap's, and is_grads_batched's


def by_slope(dy: Tensor, slope: Tensor) -> Tensor:
    """``dy * slope`` by operations of PyTorch, which know batches and tangents, in ``dy``'s dtype; 0 where the slope is."""
    return torch.where(slope == 0, slope, dy * slope).to(dy.dtype)


class _Activate(torch.autograd.Function):
    """Forward, keeping for backward what ``config.save`` names.

    It has forward(ctx, ...), because where setup_context stands apart, PyTorch inspects the signature of forward in every call,
    which takes longer than all the rest; and no jvp, because torch.compile accepts no Function that defines one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, config: Config, params: tuple[float, ...], before: tuple[Tensor, ...] = ()) -> Tensor:
        """``before`` holds a copy of ``x`` where that is changed in place and kept.

        It was made outside, so that it has a history for second derivatives, and is no argument to autograd, as it gets no
        gradient, which compiled autograd would not take.
        """
        y = call(config.forward_op, x, *params)
        kept = before[0] if before else x
        if config.save == "bit":
            y, kept = (x, y) if config.inplace else y
            ctx.strides = strides_of_bits(y)
        if config.inplace:
            y = x
            ctx.mark_dirty(x)
        ctx.save_for_backward(y if config.save == "output" else kept)
        ctx.set_materialize_grads(False)
        ctx.config, ctx.params = config, params
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple:
        return None if dy is None else _gradient(ctx, dy), None, None, *[None] * (len(ctx.needs_input_grad) - 3)


class _ActivateTransformed(_Activate):
    """Forward within torch.func's transforms and forward mode: never in place, keeping the input."""

    @staticmethod
    def forward(x: Tensor, config: Config, params: tuple[float, ...]) -> Tensor:
        return call(config.forward_op, x, *params)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, ctx.config, ctx.params = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple:
        return None if dy is None else _gradient(ctx, dy), None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *_: Any) -> Tensor:
        return _gradient(ctx, dx)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, config: Config, params: tuple[float, ...]) -> tuple:
        return _ActivateTransformed.apply(x, config, params), in_dims[0]


class _Gradient(torch.autograd.Function):
    """Backward as a function of ``dy`` and what was kept, itself differentiable."""

    @staticmethod
    def forward(dy: Tensor, kept: Tensor, config: Config, params: tuple[float, ...]) -> Tensor:
        return call(config.backward_op, dy, kept, *params)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        dy, kept, ctx.config, ctx.params = inputs
        ctx.save_for_backward(dy, kept)
        if is_transformed():
            ctx.save_for_forward(dy, kept)
        ctx.set_materialize_grads(False)
        ctx.strides = output.stride()

    @staticmethod
    def backward(ctx: Any, ddx: Tensor | None) -> tuple:
        if ddx is None:
            return None, None, None, None
        curvature = _curvature(ctx)
        return _gradient(ctx, ddx), None if curvature is None else ddx * curvature, None, None

    @staticmethod
    def jvp(ctx: Any, ddy: Tensor | None, dkept: Tensor | None, *_: Any) -> Tensor:
        curvature = None if dkept is None else _curvature(ctx)
        if curvature is None:
            return torch.zeros_like(ctx.saved_tensors[0]) if ddy is None else _gradient(ctx, ddy)
        return dkept * curvature if ddy is None else torch.addcmul(_gradient(ctx, ddy), dkept, curvature)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, dy: Tensor, kept: Tensor, config: Config, params: tuple[float, ...]) -> tuple:
        dy, kept = (
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((dy, kept), in_dims, strict=False)
        )
        return _Gradient.apply(dy, kept, config, params), 0


class _GradientCompiled(_Gradient):
    """For torch.compile, which accepts no Function that defines jvp, and needs none."""

    jvp = torch.autograd.Function.jvp


def _gradient(ctx: Any, dy: Tensor) -> Tensor:
    """``dy`` times the slope: an activation being elementwise, the derivative in forward and in reverse mode alike."""
    kept, config, params = ctx.saved_tensors[-1], ctx.config, ctx.params
    if config.save == "bit":
        if is_batched(dy):
            wide = torch.promote_types(dy.dtype, torch.float32)
            ones = torch.empty_strided(dy.shape, ctx.strides, dtype=wide, device=dy.device).fill_(1)
            return by_slope(dy, call(config.backward_op, ones, kept, *params))
        dy = in_order(dy, ctx.strides)
    if not torch.is_grad_enabled() and not is_transformed():
        return _Gradient.forward(dy, kept, config, params)
    return (_GradientCompiled if torch.compiler.is_compiling() else _Gradient).apply(dy, kept, config, params)


def _curvature(ctx: Any) -> Tensor | None:
    """``dy`` times the derivative of the slope by what was kept, from the reference; None where the slope is constant."""
    (dy, kept), config = ctx.saved_tensors, ctx.config
    if "bit" in config.activation.saves:
        return None
    reference = config.activation.gradient_reference
    _, vjp = torch.func.vjp(lambda k: reference(dy, k, ctx.params, config.save), kept)
    return vjp(torch.ones_like(dy))[0]


def run(x: Tensor, activation: Activation, params: tuple, inplace: bool, save: str | None, fast_math: bool) -> Tensor:
    """Applies an activation. What :func:`make_function` and :class:`ActivationModule` call.

    Raises:
        TypeError: ``x`` is not a dense tensor of one of :data:`DTYPES`, or an option is of another type than it has to be.
        ValueError: an option has no such value.
        RuntimeError: in place on a leaf that requires a gradient, or on an inference tensor outside of inference mode.
    """
    if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.layout is not torch.strided or x.is_nested:
        return _stood_in_for(x, activation, params, inplace, save, fast_math)
    params = check(activation, params, inplace, save, fast_math)
    compiling, transformed = torch.compiler.is_compiling(), is_transformed()
    records = transformed or (torch.is_grad_enabled() and x.requires_grad)
    if save is None:
        save = default_save(activation, params) if inplace else activation.saves[0]
    if inplace:
        if records and x.is_leaf and not transformed:
            refuse_leaf(activation)
        if transformed or compiling or x.is_neg() or (records and x._is_view()):
            # What is kept must outlive the change.
            before = _copied(x, activation) if transformed or (records and save == "input") else x
            if compiling and records and BEFORE_2_13 and before is x:
                before = x.neg().neg()  # which is never taken for x itself, as clone is; that torch keeps the input in any case
            return write(x, run(before, activation, params, False, save, fast_math))
    if transformed and (compiling or _functionalized()):
        return _formula(activation, x, params)
    if compiling and torch.compiler.is_exporting():
        return getattr(torch.ops.jitact, f"{load(activation.token, fast_math)}_apply")(x, *params)
    if transformed or not records:
        save = "input"  # all that a transform keeps, as it hides the order of memory; with nothing recorded, nothing is kept
    config = configured(activation, inplace, save, fast_math)
    if transformed:
        return _ActivateTransformed.apply(x, config, params)
    if records:
        if inplace and save == "input":
            return _Activate.apply(x, config, params, (_copied(x, activation),))
        return _Activate.apply(x, config, params)
    return overwritten(x, config.forward_op, *params) if inplace else call(config.forward_op, x, *params)


def recorded(x: Tensor, activation: Activation, params: tuple[float, ...], fast_math: bool) -> Tensor:
    """What :func:`run` gives where something is recorded, by the operators that have no gradient of their own."""
    if is_transformed():
        return _formula(activation, x, params)
    return _Activate.apply(x, configured(activation, False, activation.saves[0], fast_math), params)


def is_transformed() -> bool:
    """Whether torch.func transforms or forward-mode AD are at work. Neither has a public query."""
    return _in_torch_func() or forward_ad._current_level >= 0


def _in_torch_func() -> bool:
    return torch._C._functorch.maybe_current_level() is not None


_in_torch_func._dynamo_marked_constant = True  # as above; while tracing, a transform is at work where the traced code is in one


def _functionalized() -> bool:
    """Whether one of the transforms is torch.func.functionalize, for which an autograd function can have no rule."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(interpreter.key() == torch._C._functorch.TransformType.Functionalize for interpreter in stack)


def _formula(activation: Activation, x: Tensor, params: tuple[float, ...]) -> Tensor:
    """The activation in PyTorch, for transforms that can do nothing with our operators.

    Raises:
        RuntimeError: there is none; torch.compile answers that by running the call uncompiled, unless fullgraph=True.
    """
    if not activation.has_reference:
        _refuse_formula(activation.name)
    _evaluated(activation.token)
    return activation.reference(x, *params)


def _refuse_formula(name: str) -> None:
    """Says that a transform needs a formula that there is not."""
    raise RuntimeError(
        f"{name}: transforms inside torch.compile, of exported programs, and torch.func.functionalize need its formula in "
        "PyTorch, which a kernel file does not give; define it with reference="
    )


if BEFORE_2_13:  # where a transform that is run uncompiled, which is how torch.compile answers, may lose derivatives
    _refuse_formula._dynamo_marked_constant = True


def _evaluated(token: str) -> bool:
    """Evaluates a formula once, which may make what it keeps for later calls in ways that torch.compile does not trace."""
    activation = by_token[token]
    activation.reference(torch.empty(0), *[default for _, default in activation.params])
    return True


_evaluated._dynamo_marked_constant = True


def refuse_leaf(activation: Activation) -> None:
    """Says that a leaf cannot be changed in place where its gradient is wanted."""
    raise RuntimeError(f"{activation.name}: a leaf that requires a gradient cannot be changed in place")


def is_stand_in(x: object) -> bool:
    """Whether ``x`` stands for a tensor that is not there yet, as torch.fx has it, and takes calls of PyTorch's functions."""
    return not isinstance(x, Tensor) and hasattr(type(x), "__torch_function__")


def check_tensor(activation: Activation, x: object, what: str = "expected") -> None:
    """Checks that ``x`` is a tensor that kernels take.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"{activation.name}: {what} {ACCEPTED}, got {describe(x)}")


def _stood_in_for(x: Any, activation: Activation, params: tuple, inplace: bool, save: str | None, fast_math: bool) -> Any:
    """What a call gives for something that is no tensor that kernels take: a call to be made later, or TypeError."""
    if not is_stand_in(x):
        check_tensor(activation, x)
    options = {name: value for (name, _), value in zip(activation.params, params, strict=True)}
    options |= {"inplace": True} if inplace else {}
    return handle_torch_function(activation.function, (x,), x, **options, save=save, fast_math=fast_math)


def describe(x: object) -> str:
    """What was given in place of a tensor that an activation takes, for an error."""
    if not isinstance(x, Tensor):
        return "None" if x is None else f"a {type(x).__name__}"
    if x.is_nested and x.layout is torch.strided:
        return f"a nested {str(x.dtype).removeprefix('torch.')} tensor"
    layout = "" if x.layout is torch.strided else f"{str(x.layout).removeprefix('torch.')} "
    return f"a {layout}{str(x.dtype).removeprefix('torch.')} tensor"
