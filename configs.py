"""The operators behind a call, what backward keeps for them, and how they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import kernels
from .records import Activation, by_token, layout

__all__ = [
    "BEFORE_2_13",
    "Config",
    "alive",
    "call",
    "configure",
    "configured",
    "copied",
    "in_order",
    "is_batched",
    "is_exporting",
    "is_functionalized",
    "is_transformed",
    "load",
    "overwritten",
    "run_operator",
    "strides_of_bits",
]

BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Whether torch.compile is one that keeps inputs of autograd functions which nobody asked for; 2.11 was seen to."""


class Config(NamedTuple):
    """How a call runs, everything but the tensors and the numbers: the options, completed, and the operators they lead to.

    Attributes:
        record: of the activation.
        inplace: whether the first tensor is overwritten.
        save: what backward keeps.
        forward_op: the operator of forward.
        backward_op: the operator of backward.
        places: of the tensors, those that ``backward_op`` gives gradients of, in its order.
        by_bits: whether ``backward_op`` takes a number whose bits tell which gradients are wanted.
        passed: of the tensors, those whose gradient is ``dy``.
        reads: for each tensor, which of them its gradient reads, as bits; empty where each may read all.
        elements: how many of the tensors are elements.
        draws: whether there are random numbers.
        copy_op: the operator that copies a gradient into the memory order of the bits, where ``save`` is "bit".
        unread: of the tensors, those that backward reads nothing of, by what autograd asks for, as calls find out.
    """

    record: Activation
    inplace: bool
    save: str
    forward_op: Callable
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
    """Finds the operators of a call, and compiles them unless they are there. The options are checked."""
    library = load(record.token, fast_math)
    laid = layout(record.token)
    forward = ("forward_bit" if save == "bit" else "forward") + ("_" if inplace else "")
    backward = "backward" if save == "input" else f"backward_from_{save}"
    ops = [getattr(torch.ops.jitact, f"{library}_{kind}").default for kind in (forward, backward)]
    places = {"input": laid.places, "bit": laid.from_bit}.get(save, laid.places[:1])
    copy = getattr(torch.ops.jitact, f"{library}_copy_").default if save == "bit" else None
    of_places = (places, len(places) > 1, laid.passed, laid.reads)
    return Config(record, inplace, save, *ops, *of_places, laid.elements, laid.draws, copy, {})


def configured(record: Activation, inplace: bool, save: str, fast_math: bool) -> Config:
    """:func:`configure`, with what it returns kept by the record; not where torch.compile traces it."""
    if torch.compiler.is_compiling():
        return configure(record, inplace, save, fast_math)
    config = record.configs.get((inplace, save, fast_math))
    if config is None:
        config = record.configs[inplace, save, fast_math] = configure(record, inplace, save, fast_math)
    return config


def load(token: str, fast_math: bool) -> str:
    """The first part of the names of a record's operators, compiled unless they are there."""
    return kernels.load(by_token[token].source, fast_math=fast_math).name


# What torch.compiler.assume_constant_result sets, without its import of the whole compiler: tracing looks no further inside.
load._dynamo_marked_constant = True


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


def run_operator(record: Activation, *arguments: Any) -> Tensor:
    """The operator of forward, with nothing recorded: for what gives no gradient."""
    with torch.no_grad():
        return call(configured(record, False, "input", False).forward_op, *arguments)


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


_unwrap_if_dead = torch._C._functorch.unwrap_if_dead


def alive(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Tensors in place of those that outlived the torch.func transform in which they were made; the others themselves.

    One that outlived it has no history, and may not tell that its gradient is wanted: what it holds does both.
    """
    for each in tensors:
        if _unwrap_if_dead(each) is not each:
            return alive(tuple([_unwrap_if_dead(each) for each in tensors]))  # again, as transforms stand within transforms
    return tensors


def strides_of_bits(y: Tensor) -> tuple[int, ...]:
    """The strides in whose order a mask holds the bits of ``y``: those of a dense copy where ``y`` is a view with gaps."""
    return y.stride() if y.is_contiguous() else torch.empty_like(y, device="meta").stride()


def copied(x: Tensor, record: Activation) -> Tensor:
    """A copy of ``x``.

    Raises:
        RuntimeError: its storage was freed behind it, as FSDP does, where PyTorch's own copy would crash.
    """
    in_memory = type(x) is Tensor and not torch.compiler.is_compiling() and not is_transformed()
    if in_memory and x.numel() and not x.untyped_storage().nbytes():
        raise RuntimeError(f"{record.name}: a tensor has elements, but its data is not allocated (yet, or any more)")
    return x.clone()


def in_order(dy: Tensor, config: Config, strides: tuple[int, ...]) -> Tensor:
    """``dy`` in memory, with these strides; copied if it has others."""
    in_memory = torch.compiler.is_compiling() or not dy._is_zerotensor()
    if dy.stride() == strides and in_memory:
        return dy
    copy = torch.empty_strided(dy.shape, strides, dtype=dy.dtype, device=dy.device)
    plain = type(dy) is Tensor and in_memory and not torch.compiler.is_compiling() and not torch.is_grad_enabled()
    if config.copy_op is None or not plain:
        return copy.copy_(dy)
    call(config.copy_op, copy, dy)
    return copy


def is_batched(dy: Tensor) -> bool:
    """Whether what looks like one gradient is, or may be, a batch of them, whose memory is not that of one."""
    if torch.compiler.is_compiling():
        return False
    return is_transformed() or torch._C._functorch.is_legacy_batchedtensor(dy)  # torch.vmap's, and is_grads_batched's


def is_exporting() -> bool:
    """Whether torch.export is at work; torch.compiler's own says so inside every torch.compile of torch 2.11."""
    return torch.compiler.is_exporting()


is_exporting._dynamo_marked_constant = True  # asked while tracing, not traced


def is_transformed() -> bool:
    """Whether torch.func transforms or forward-mode AD are at work. Neither has a public query."""
    return _in_torch_func() or forward_ad._current_level >= 0


def _in_torch_func() -> bool:
    return torch._C._functorch.maybe_current_level() is not None


_in_torch_func._dynamo_marked_constant = True  # as above; while tracing, a transform is at work where the traced code is in one


def is_functionalized() -> bool:
    """Whether one of the transforms is torch.func.functionalize, for which an autograd function can have no rule."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(interpreter.key() == torch._C._functorch.TransformType.Functionalize for interpreter in stack)
