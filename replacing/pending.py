"""Lazy activations: computed when their result is used, fused with that operation where one kernel can do both."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as of_modules

from ..configs import is_transformed
from ..fusing.around import run_around
from ..gating.calls import run_gated
from ..gating.generated import gated
from ..modules import ActivationModule, variant
from ..records import layout
from ..records.arguments import DTYPES
from ..records.operands import is_cast
from ..running import run_with_operands

__all__ = ["Pending", "Waiting", "has_hooks"]


class Waiting(nn.Module):
    """Base of the modules that replace an activation to fuse it with the operation that follows.

    Attributes:
        act: jitact's activation.
    """

    _callers: frozenset[tuple[str, str, int]] = frozenset()  # of pickles that do not have it

    def __init__(self, act: ActivationModule, callers: frozenset[tuple[str, str, int]] = frozenset()) -> None:
        """``act`` takes one tensor and numbers; ``callers``: see :meth:`Result.callers`."""
        super().__init__()
        self._callers = callers
        self.act = act
        self.training = act.training

    def __repr__(self) -> str:
        """One line, which torch.compile can trace."""
        return f"{self._get_name()}({self.act!r})"

    def __getattr__(self, name: str) -> Any:
        """Settings are the activation's, as ``negative_slope``."""
        modules = self.__dict__.get("_modules", {})
        act = None if name in modules else modules.get("act")
        return vars(act)[name] if act is not None and name in vars(act) else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets them there."""
        act = self.__dict__.get("_modules", {}).get("act")
        is_own = act is None or name[0] == "_" or name in vars(self) or hasattr(type(self), name)
        is_own = is_own or any([name in vars(self)[kind] for kind in ("_parameters", "_buffers", "_modules")])
        if is_own or isinstance(value, (nn.Module, nn.Parameter)):
            super().__setattr__(name, value)
        else:
            setattr(act, name, value)

    def __delattr__(self, name: str) -> None:
        """Deletes them there."""
        act = self.__dict__.get("_modules", {}).get("act")
        is_setting = act is not None and name != "act" and name in vars(act) and name not in vars(self)
        delattr(act, name) if is_setting else super().__delattr__(name)

    def forward(self, input: Tensor) -> Any:
        """The activation of a tensor, lazily; computed at once if a graph is traced, hooks are registered or others call it."""
        x, act = input, self.act
        if not isinstance(act, ActivationModule):  # but what was put around it since
            return act(x)
        in_eager = type(x) in (Tensor, nn.Parameter) and x.dtype in DTYPES and (x.is_cuda or x.is_cpu)
        in_eager = in_eager and x.layout is torch.strided
        looked_at = has_hooks(act) or has_hooks(self) or of_modules._has_any_global_hook()
        if looked_at or not in_eager or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self._at_once(act, x)
        caller = sys._getframe(1)
        while caller.f_globals is vars(of_modules) and caller.f_back is not None:
            caller = caller.f_back
        return self._pending(act, x) if self._is_read(caller) else act.forward(x)

    def _is_read(self, caller: FrameType) -> bool:
        """Whether the code that calls is what was read: others, as checkpoints, need not know what a :class:`Pending` is."""
        name, code = caller.f_globals.get("__name__", ""), caller.f_code
        return (name, code.co_name, code.co_firstlineno) in self._callers and not self.act.inplace

    def _at_once(self, act: ActivationModule, x: Any) -> Any:
        """The activation where nothing can be fused."""
        return act(x) if has_hooks(act) else act.forward(x)  # forward: global hooks run once, for this module

    def _pending(self, act: ActivationModule, x: Tensor) -> Pending:
        return Pending(act, x)


def has_hooks(module: nn.Module | None) -> bool:
    """Whether a module has hooks that run when it is called."""
    if module is None:
        return False
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


class _Modes(NamedTuple):
    """The modes that decide whether autograd records operations and in which dtype they compute."""

    grad: bool
    inference: bool
    autocast: torch.dtype | None

    def contexts(self, device: str) -> tuple[AbstractContextManager, ...]:
        """Context managers that restore the modes."""
        cast = torch.autocast(device, self.autocast, enabled=self.autocast is not None)
        return torch.inference_mode(self.inference), torch.enable_grad() if self.grad else torch.no_grad(), cast


def _autocast_of(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts, where it is on."""
    return torch.get_autocast_dtype(x.device.type) if is_cast(x) else None


def _version_of(x: Tensor) -> int | None:
    """The version, which counts changes in place; None for inference tensors, which have none."""
    return None if x.is_inference() else x._version


_OWN = "_act", "_gate", "_value", "_modes", "_version"


class Pending:
    """``act(gate)``, not computed yet. Multiplied by a tensor it is a gated activation; other operations get ``act(gate)``."""

    _drops = False

    def __init__(self, act: ActivationModule, gate: Tensor) -> None:
        """``act`` is the activation, ``gate`` its argument."""
        self._act, self._gate, self._value = act, gate, None
        self._modes = _Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _autocast_of(gate))
        self._version = _version_of(gate)

    def value(self) -> Tensor:
        """``act(gate)``, computed in the modes that were active at the call.

        Raises:
            RuntimeError: ``gate`` has been changed in place since.
        """
        if self._value is None:
            self._check_unchanged()
            with ExitStack() as modes:
                if not self._is_where_it_was_called():
                    for mode in self._modes.contexts(self._gate.device.type):
                        modes.enter_context(mode)
                self._value = self._act(self._gate)
        return self._value

    def _is_where_it_was_called(self) -> bool:
        grad, inference, autocast = self._modes
        same = grad is torch.is_grad_enabled() and inference is torch.is_inference_mode_enabled()
        return same and autocast is _autocast_of(self._gate)

    def _check_unchanged(self) -> None:
        if _version_of(self._gate) != self._version:
            raise RuntimeError(
                f"jitact.replace computes {self._act.activation.name} together with what follows it, but its input was changed "
                "in place before that: clone() it, or jitact.restore(model)"
            )

    def __mul__(self, up: Any) -> Tensor:
        """``act(gate) * up`` by one kernel, if dtype, device and modes allow it."""
        act, gate = self._act, self._gate
        fits = type(up) in (Tensor, nn.Parameter) and up.dtype is gate.dtype and up.device == gate.device
        fits = fits and up.layout is gate.layout and (gate.shape == up.shape or _is_read_where_it_is(gate, up))
        if self._value is not None or not fits or torch.compiler.is_compiling() or not self._is_where_it_was_called():
            return self.value() * up
        self._check_unchanged()
        record, params = gated(act).activation, act._params()
        records = self._modes.grad and not is_transformed()
        whole = _whole(gate, up) if records else None
        if whole is None and records and (_keeps_more(act, gate, up) or (up.requires_grad and not gate.requires_grad)):
            return self.value() * up  # a gate without a gradient need not be kept: it may be overwritten, or of inference mode
        if whole is None:
            return run_with_operands(record, {"gate": gate, "up": up}, params, False, None, act.fast_math, True)
        x, found = whole
        numbers = dict(zip(dict(record.params), params, strict=True))
        return run_gated(record, (x,), {}, record.options_of_calls | found | numbers | {"fast_math": act.fast_math})

    def __rmul__(self, other: Any) -> Any:
        """The same; by PyTorch where ``other`` is no tensor, or the product lies in memory as that does and not as ``gate``."""
        gate = self._gate
        alike = isinstance(other, Tensor) and (other.shape != gate.shape or other.stride() == gate.stride())
        return self.__mul__(other) if alike else other * self.value()

    def dropped(self, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """``F.dropout(act(gate))`` by one kernel, with jitact's random numbers."""
        act = self._act
        if not training or p == 0 or self._value is not None or not self._is_where_it_was_called():
            return F.dropout(self.value(), p, training, inplace)
        self._check_unchanged()
        record, options = variant(act.activation, vars(act)), (act.inplace, act.save, act.fast_math, act.training)
        return run_around(record, {"x": self._gate}, act._params(), {"dropout": p}, *options)

    def __fx_create_arg__(self, tracer: Any) -> Any:
        """The activation's value: torch.fx calls this if a traced operation uses the activation of a constant tensor."""
        return tracer.create_arg(self.value())

    def __getattr__(self, name: str) -> Any:
        """Attributes of the activation's value."""
        if name in _OWN:  # not there yet, as where it is copied
            raise AttributeError(name)
        return getattr(self.value(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Passes the activation's value to PyTorch's functions, except products and dropout, which are fused."""
        if function in (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__) and len(args) == 2 and not kwargs:
            a, b = args
            return a.__mul__(b) if isinstance(a, Pending) else b.__rmul__(a)  # by name: torch.compile comes back here else
        if function is F.dropout and args and isinstance(args[0], Pending) and args[0]._drops:
            return args[0].dropped(*args[1:], **(kwargs or {}))
        return function(*_values(args), **_values(kwargs or {}))


def _values(tree: Any) -> Any:
    """Arguments with each :class:`Pending` replaced by its value."""
    if isinstance(tree, Pending):
        return tree.value()
    if isinstance(tree, dict):
        return {key: _values(value) for key, value in tree.items()}
    return type(tree)(map(_values, tree)) if type(tree) in (tuple, list) else tree


def _operator(name: str) -> Any:
    def operator(self: Pending, *others: Any) -> Any:
        return getattr(self.value(), name)(*_values(others))

    return operator


_OPERATORS = (
    "add radd sub rsub truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs getitem len iter bool "
    "float int lt le gt ge eq ne repr"
)
for _name in _OPERATORS.split():
    setattr(Pending, f"__{_name}__", _operator(f"__{_name}__"))
Pending.__hash__ = object.__hash__


_VIEWS = ("SplitBackward0", "SplitWithSizesBackward0", "SliceBackward0", "AsStridedBackward0")


def _hands_on(half: Tensor, x: Tensor) -> bool:
    """Whether autograd adds the gradient of ``half``, a view of ``x``, to that of ``x``, and nothing observes it on the way.

    A view that was made under no_grad or by a user's autograd function shares memory with ``x``, but not its history.
    """
    node = half.grad_fn
    if node is None or node.name() not in _VIEWS or half.retains_grad or half._backward_hooks:
        return False
    ((before, number),) = node.next_functions
    if x.grad_fn is None:
        return getattr(before, "variable", None) is x
    return before is x.grad_fn and number == x.output_nr


def _is_read_where_it_is(gate: Tensor, up: Tensor) -> bool:
    """Whether a kernel can multiply a gate of another shape without a copy of it.

    A smaller gate, as of squeeze and excitation, would be written out in the order of an ``up`` in channels_last. It is
    activated by itself then, which is little.
    """
    return up.is_contiguous() or gate.shape == torch.broadcast_shapes(gate.shape, up.shape)


def _keeps_more(act: ActivationModule, gate: Tensor, up: Tensor) -> bool:
    """Whether the fused gate would keep a wider tensor for backward, of which it is a part, where the activation does not.

    An activation whose gradient follows from its output or a bit keeps that, and lets go of the tensor.
    """
    if gate._base is None or layout(act.activation.token).saves[0] == "input" or not gate.requires_grad:
        return False
    storage = gate.untyped_storage()
    return storage.nbytes() > gate.nbytes and storage._cdata != up.untyped_storage()._cdata


def _whole(gate: Tensor, up: Tensor) -> tuple[Tensor, dict[str, Any]] | None:
    """The tensor whose two halves these are, and its layout; None if there is none or it does not get their gradients."""
    x = gate._base
    if x is None or x is not up._base or gate.shape != up.shape or x.dim() != gate.dim() or x.dtype is not gate.dtype:
        return None
    if not (_hands_on(gate, x) and _hands_on(up, x)):
        return None
    doubled = [dim for dim in range(x.dim()) if x.shape[dim] != gate.shape[dim]]
    if len(doubled) != 1 or x.shape[doubled[0]] != 2 * gate.shape[doubled[0]] or gate.stride() != up.stride():
        return None
    (dim,) = doubled
    offset, step = up.storage_offset() - gate.storage_offset(), x.stride(dim)
    first = min(gate.storage_offset(), up.storage_offset())
    others_alike = all(a == b for k, (a, b) in enumerate(zip(gate.stride(), x.stride(), strict=True)) if k != dim)
    if first != x.storage_offset() or not others_alike:
        return None
    if gate.stride(dim) == step and abs(offset) == gate.shape[dim] * step:
        layout = "halves"
    elif gate.stride(dim) == 2 * step and abs(offset) == step:
        layout = "interleaved"
    else:
        return None
    return x, {"dim": dim, "layout": layout, "gate": "first" if offset > 0 else "last"}
