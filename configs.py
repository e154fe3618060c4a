"""The operators of a call, what backward keeps for them, and helpers that call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import kernels
from .records import Activation, by_token, layout
from .records.tracing import as_constant

__all__ = [
    "BEFORE_2_13",
    "Config",
    "alive",
    "call",
    "call_forward",
    "check_allocated",
    "configure",
    "configured",
    "copied",
    "drawn_seed",
    "in_dispatch_mode",
    "in_order",
    "is_batched",
    "is_exporting",
    "is_functionalized",
    "is_transformed",
    "load",
    "overwritten",
    "records_backward",
    "run_operator",
    "strides_of_bits",
]

BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Whether torch.compile may save inputs of autograd functions that these did not save; observed with 2.11."""


class Config(NamedTuple):
    """Everything about a call but its tensors and numbers: the resolved options, and their operators.

    Tensors are given by their index among the operator's tensors.

    Attributes:
        record: of the activation.
        inplace: whether the first tensor is overwritten.
        save: what backward keeps.
        forward_op: the operator of forward.
        direct: the same, for calls that torch.compile does not trace: without the function in Python around it.
        backward_op: the operator of backward.
        places: the tensors that ``backward_op`` computes gradients of, in the order of its results.
        by_bits: whether ``backward_op`` takes a bit mask of the gradients to compute.
        passed: the tensors whose gradient is ``dy`` itself.
        reads: for each tensor, a bit mask of the tensors that its gradient reads; empty where each may read all.
        elements: how many tensors are elementwise operands; they come first.
        draws: whether the kernel draws random numbers.
        copy_op: the operator that copies a gradient into the strides of the bit mask, where ``save`` is "bit".
        unread: cache: for each ``needs_input_grad``, the tensors that no computed gradient reads; None if none is computed.
    """

    record: Activation
    inplace: bool
    save: str
    forward_op: Callable
    direct: Callable
    backward_op: Callable
    places: tuple[int, ...]
    by_bits: bool
    passed: tuple[int, ...]
    reads: tuple[int, ...]
    elements: int
    draws: bool
    copy_op: Callable | None
    unread: dict[tuple[bool, ...], tuple[int, ...] | None]


def configure(record: Activation, inplace: bool, save: str, fast_math: bool) -> Config:
    """Finds the operators of a call, and compiles them if necessary. The options have been checked."""
    library = load(record.token, fast_math)
    spec = layout(record.token)
    forward = ("forward_bit" if save == "bit" else "forward") + ("_" if inplace else "")
    backward = "backward" if save == "input" else f"backward_from_{save}"
    forward_op, backward_op = [getattr(torch.ops.jitact, f"{library}_{kind}").default for kind in (forward, backward)]
    direct = forward_op if torch.compiler.is_compiling() else forward_op._op
    places = {"input": spec.places, "bit": spec.from_bit}.get(save, spec.places[:1])
    copy = getattr(torch.ops.jitact, f"{library}_copy_").default if save == "bit" else None
    of_places = (places, len(places) > 1, spec.passed, spec.reads)
    return Config(record, inplace, save, forward_op, direct, backward_op, *of_places, spec.elements, spec.draws, copy, {})


def configured(record: Activation, inplace: bool, save: str, fast_math: bool) -> Config:
    """:func:`configure`, cached in the record; not while torch.compile traces."""
    if torch.compiler.is_compiling():
        return configure(record, inplace, save, fast_math)
    config = record.configs.get((inplace, save, fast_math))
    if config is None:
        config = record.configs[inplace, save, fast_math] = configure(record, inplace, save, fast_math)
    return config


@as_constant
def load(token: str, fast_math: bool) -> str:
    """The prefix of the names of a record's operators, which are compiled if necessary."""
    return kernels.load(by_token[token].source, fast_math=fast_math).name


def call(operator: Callable, *arguments: Any) -> Any:
    """Calls an operator; out of memory raises torch.OutOfMemoryError, as PyTorch's operators do.

    The stable C interface turns every exception into a RuntimeError. Allocating the same memory again raises PyTorch's own.
    """
    try:
        return operator(*arguments)
    except RuntimeError as error:
        raise _explained(error, operator, arguments) from None


def call_forward(config: Config, *arguments: Any) -> Any:
    """:func:`call` of a configuration's operator of forward. Its numbers are the last arguments."""
    try:
        return config.direct(*arguments)
    except RuntimeError as error:
        if _BEYOND in str(error):
            error = _naming_the_parameter(error, config.record, arguments)
        raise _explained(error, config.forward_op, arguments) from None


_BEYOND = "beyond the range of float32"  # from the text of binding.cpp


def _naming_the_parameter(error: RuntimeError, record: Activation, arguments: tuple) -> RuntimeError:
    """The error for parameters that are finite, but would not be in float32, with their names and values."""
    numbers = arguments[len(arguments) - len(record.params) :]
    given = [f"{name}={value}" for (name, _), value in zip(record.params, numbers, strict=True) if _overflows(value)]
    why = f"{_BEYOND}, in which elements of {str(arguments[0].dtype).removeprefix('torch.')} are computed"
    return RuntimeError(f"{record.name}: {', '.join(given)} is {why}") if given else error


def _overflows(value: float) -> bool:
    return torch.finfo(torch.float32).max < abs(value) < float("inf")


def _explained(error: RuntimeError, operator: Callable, arguments: tuple) -> RuntimeError:
    """The error to raise for one of an operator: PyTorch's own where memory is out, one that says why for dead tensors."""
    if not is_transformed() and any([isinstance(t, Tensor) and torch._C._functorch.is_batchedtensor(t) for t in arguments]):
        name = operator.name().removeprefix("jitact::").partition("_forward")[0]
        return RuntimeError(f"{name}: a tensor outlived the torch.vmap in which it was made; return it from there instead")
    if "out of memory" not in str(error):  # the text of binding.cpp
        return error
    try:
        for each in arguments:
            if isinstance(each, Tensor):
                torch.empty_like(each)
    except RuntimeError as own:
        return own
    return error


def run_operator(record: Activation, *arguments: Any) -> Tensor:
    """Runs the operator of forward without recording it, for results that need no gradient."""
    with torch.no_grad():
        return call_forward(configured(record, False, "input", False), *arguments)


def overwritten(x: Tensor, config: Config, *arguments: Any) -> Tensor:
    """Changes ``x`` in place by the operator of forward, without recording it, and returns ``x``.

    Increments the version of ``x``, by which autograd detects changes, as operators from outside PyTorch do not.

    Raises:
        RuntimeError: ``x`` is an inference tensor, outside of inference mode.
    """
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError("an inference tensor cannot be changed in place outside of inference mode; clone it first")
    call_forward(config, x, *arguments)
    torch.autograd.graph.increment_version(x)
    return x


_unwrap_if_dead = torch._C._functorch.unwrap_if_dead


def alive(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Unwraps tensors that outlived the torch.func transform in which they were made; returns others as they are.

    A dead wrapper has no history and may not report ``requires_grad``; the tensor inside has both.
    """
    for each in tensors:
        if _unwrap_if_dead(each) is not each:
            return alive(tuple([_unwrap_if_dead(each) for each in tensors]))  # again: transforms nest
    return tensors


def strides_of_bits(y: Tensor) -> tuple[int, ...]:
    """The strides of the order in which a mask holds the bits of ``y``: those of ``empty_like``, if ``y`` is not contiguous."""
    return y.stride() if y.is_contiguous() else torch.empty_like(y, device="meta").stride()


def copied(x: Tensor, record: Activation) -> Tensor:
    """A copy of ``x``.

    Raises:
        RuntimeError: its storage was freed, as FSDP does; PyTorch's own copy would crash.
    """
    if type(x) is Tensor and not torch.compiler.is_compiling() and not is_transformed():
        check_allocated(record.name, x)
    return x.clone()


def check_allocated(name: str, x: Tensor) -> None:
    """Raises RuntimeError if a tensor with a storage has elements that are beyond it."""
    if x.numel() and not x.untyped_storage().nbytes():
        raise RuntimeError(f"{name}: a tensor has elements, but its data is not allocated (yet, or any more)")


def in_order(dy: Tensor, config: Config, strides: tuple[int, ...]) -> Tensor:
    """``dy`` with these strides, which are those of dense memory, and with storage; copied if it has not."""
    in_memory = torch.compiler.is_compiling() or not dy._is_zerotensor()
    if dy.stride() == strides and in_memory:
        return dy
    if is_batched(dy):  # operators that write to an argument do not support it
        order = sorted(range(dy.dim()), key=strides.__getitem__, reverse=True)
        return dy.permute(order).contiguous().permute([order.index(dim) for dim in range(dy.dim())])
    copy = torch.empty_strided(dy.shape, strides, dtype=dy.dtype, device=dy.device)
    plain = type(dy) is Tensor and in_memory and not torch.compiler.is_compiling() and not torch.is_grad_enabled()
    if config.copy_op is None or not plain:
        return copy.copy_(dy)
    call(config.copy_op, copy, dy)
    return copy


def is_batched(dy: Tensor) -> bool:
    """Whether ``dy`` is, or may be, a batched tensor, whose memory holds many gradients of the shape that it reports."""
    if torch.compiler.is_compiling():
        return False
    return is_transformed() or torch._C._functorch.is_legacy_batchedtensor(dy)  # the latter by is_grads_batched=True


def _never_traced(function: Callable[[], bool]) -> Callable[[], bool]:
    """Makes torch.compile call a function while it traces others, not trace it.

    Nor where it runs others uncompiled, as within forward-mode AD, and traces what they call: from torch 2.14 on, what it finds
    then would be the answer of all later calls.
    """
    as_constant(function)
    dynamo = torch._C._dynamo.eval_frame
    skip, default = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, default))
    return function


@_never_traced
def is_exporting() -> bool:
    """Whether torch.export is tracing. torch 2.11 traces ``torch.compiler.is_exporting`` as True in every torch.compile."""
    return torch.compiler.is_exporting()


def drawn_seed(x: Tensor) -> Tensor:
    """A seed from PyTorch's generator on ``x``'s device: no synchronisation, and replays of a CUDA graph draw new ones."""
    return torch.randint(2**63 - 1, (1,), device=x.device)


def in_dispatch_mode() -> bool:
    """Whether a ``TorchDispatchMode`` sees operators, as selective checkpoints do. PyTorch has no public function for that."""
    return torch._C._len_torch_dispatch_stack() > 0


def is_transformed() -> bool:
    """Whether a torch.func transform or forward-mode AD is active. PyTorch has no public function for either."""
    return _in_torch_func() or forward_ad._current_level >= 0


@_never_traced  # torch.compile enters a transform's level while it traces its body
def _in_torch_func() -> bool:
    return torch._C._functorch.maybe_current_level() is not None


def records_backward() -> bool:
    """Whether a backward that runs now is recorded, for second derivatives; torch.compile's, which has none, is not."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def is_functionalized() -> bool:
    """Whether torch.func.functionalize is among the active transforms; autograd functions cannot support it."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(interpreter.key() == torch._C._functorch.TransformType.Functionalize for interpreter in stack)
