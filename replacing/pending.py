"""Activations that are not computed yet: their results wait for what the model does with them, which one kernel may do too."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
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
from ..records import DTYPES
from ..running import run_with_operands

__all__ = ["Pending", "Waiting", "has_hooks"]


class Waiting(nn.Module):
    """Base of what stands in place of an activation that is computed with what follows it.

    Attributes:
        act: the activation, jitact's.
    """

    def __init__(self, act: ActivationModule) -> None:
        """Of an activation of one tensor and numbers."""
        super().__init__()
        self.act = act
        self.training = act.training

    def forward(self, input: Tensor) -> Any:
        """The activation of a tensor, to be computed with what follows; right away where a graph is made or hooks look on."""
        x = input
        in_eager = type(x) in (Tensor, nn.Parameter) and x.dtype in DTYPES and x.device.type in ("cpu", "cuda")
        act_has_hooks = has_hooks(self.act)
        looked_at = has_hooks(self) or act_has_hooks or of_modules._has_any_global_hook()
        if looked_at or not in_eager or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self.act(x) if act_has_hooks else self.act.forward(x)  # so that hooks of all modules look on once
        return self._pending(x)

    def _pending(self, x: Tensor) -> Pending:
        return Pending(self.act, x)


def has_hooks(module: nn.Module | None) -> bool:
    """Whether hooks look on when a module is called."""
    if module is None:
        return False
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


class _Modes(NamedTuple):
    """What decides how operations are recorded and in which dtype they compute."""

    grad: bool
    inference: bool
    autocast: torch.dtype | None

    def contexts(self, device: str) -> tuple[AbstractContextManager, ...]:
        """What brings them back."""
        cast = torch.autocast(device, self.autocast, enabled=self.autocast is not None)
        return torch.inference_mode(self.inference), torch.enable_grad() if self.grad else torch.no_grad(), cast


def _modes_of(x: Tensor) -> _Modes:
    device = x.device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return _Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast)


def _version_of(x: Tensor) -> int | None:
    """Counts changes in place, but for tensors of inference mode."""
    return None if x.is_inference() else x._version


class Pending:
    """``act(gate)``, not yet computed. Times a tensor it is the gated activation; anything else gets the activation's value."""

    _drops = False

    def __init__(self, act: ActivationModule, gate: Tensor) -> None:
        """Of an activation and what it is applied to."""
        self._act, self._gate, self._value = act, gate, None
        self._modes, self._version = _modes_of(gate), _version_of(gate)

    def value(self) -> Tensor:
        """The activation by itself, as it would have been computed where it was called.

        Raises:
            RuntimeError: what it was applied to has been changed since.
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
        return _modes_of(self._gate) == self._modes

    def _check_unchanged(self) -> None:
        if _version_of(self._gate) != self._version:
            raise RuntimeError(
                f"jitact.replace computes {self._act.activation.name} together with what follows it, but its input was changed "
                "in place before that: clone() it, or jitact.restore(model)"
            )

    def __mul__(self, up: Any) -> Tensor:
        """The product, in one kernel."""
        act, gate = self._act, self._gate
        fits = type(up) in (Tensor, nn.Parameter) and up.dtype is gate.dtype and up.device == gate.device
        if self._value is not None or not fits or not self._is_where_it_was_called():
            return self.value() * up
        self._check_unchanged()
        record, params = gated(act).activation, act._params()
        whole = _whole(gate, up) if self._modes.grad and not is_transformed() else None  # else nothing is recorded on it
        if whole is None:
            return run_with_operands(record, {"gate": gate, "up": up}, params, False, None, act.fast_math, True)
        x, found = whole
        numbers = dict(zip(dict(record.params), params, strict=True))
        return run_gated(record, (x,), {}, record.options_of_calls | found | numbers | {"fast_math": act.fast_math})

    __rmul__ = __mul__

    def dropped(self, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """What ``F.dropout`` makes of it, with the mask of jitact's generator, in one kernel."""
        act = self._act
        if not training or p == 0 or self._value is not None or not self._is_where_it_was_called():
            return F.dropout(self.value(), p, training, inplace)
        self._check_unchanged()
        record, options = variant(act.activation, vars(act)), (act.inplace, act.save, act.fast_math, act.training)
        return run_around(record, {"x": self._gate}, act._params(), {"dropout": p}, *options)

    def __fx_create_arg__(self, tracer: Any) -> Any:
        """The activation's value, where torch.fx traces what is done with one of a tensor that is there already."""
        return tracer.create_arg(self.value())

    def __getattr__(self, name: str) -> Any:
        """Of the activation's value."""
        return getattr(self.value(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """PyTorch's functions get the activation's value, but for the product."""
        if function in (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__) and len(args) == 2 and not kwargs:
            a, b = args
            return a * b if isinstance(a, Pending) else b * a
        if function is F.dropout and args and isinstance(args[0], Pending) and args[0]._drops:
            return args[0].dropped(*args[1:], **(kwargs or {}))
        return function(*_values(args), **_values(kwargs or {}))


def _values(tree: Any) -> Any:
    """Arguments with values in place of what is pending."""
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
    """Whether autograd hands the gradient of ``half``, a view of ``x``, on to it, and nobody looks at it on the way.

    One that was made under no_grad or by an autograd function of a user's has another history than its memory.
    """
    node = half.grad_fn
    if node is None or node.name() not in _VIEWS or half.retains_grad or half._backward_hooks:
        return False
    ((before, number),) = node.next_functions
    if x.grad_fn is None:
        return getattr(before, "variable", None) is x
    return before is x.grad_fn and number == x.output_nr


def _whole(gate: Tensor, up: Tensor) -> tuple[Tensor, dict[str, Any]] | None:
    """The tensor that holds just these two, and how, if both are views of one, which gets the gradients of both as they are."""
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
