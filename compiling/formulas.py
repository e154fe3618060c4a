"""An activation as torch operations, forward and backward, translated from its kernel file for the dtype of computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import SymFloat, Tensor

from ..kernels import KernelSource
from ..kernels.loader.signature import prepared
from ..records.dtypes import wider
from .dual import Dual, derivative, of_duals, times_derivative
from .functions import functions
from .precisions import Value
from .reader import Unreadable, read
from .shorter import shorter

__all__ = ["SELECTING", "Formula", "Unreadable"]

SELECTING: dict[str, tuple[Callable, Callable]] = {
    "relu": (torch.relu, lambda dy, y: torch.ops.aten.threshold_backward(dy, y, 0)),
    "relu6": (lambda x: torch.ops.aten.hardtanh(x, 0.0, 6.0), lambda dy, x: torch.ops.aten.hardtanh_backward(dy, x, 0.0, 6.0)),
    "hardtanh": (torch.ops.aten.hardtanh, torch.ops.aten.hardtanh_backward),
}
"""PyTorch's own operations, forward and backward, for activations where they are exact in every dtype and the cheapest. The
backward of relu starts from the output, which the next layer saves anyway."""

Short = Mapping[str, Mapping[str, Callable]]  # what shorter() returns


class Formula:
    """A kernel file as torch operations. Operands are in the order of the operators' schemas: tensors, then numbers.

    Attributes:
        saves: what backward can save: "input" for :meth:`gradient`, and "output" if there is :meth:`gradient_from_output`.
    """

    def __init__(self, source: KernelSource, fast_math: bool) -> None:
        """Translates the file.

        Raises:
            Unreadable: it contains more than arithmetic, rounds intermediate results, or draws random numbers.
        """
        self.source, self.fast_math, self.signature = source, fast_math, source.signature
        self._known: dict[tuple[torch.dtype, torch.device, bool], dict[str, Callable]] = {}
        if self.signature.of("random"):
            raise Unreadable("it draws random numbers")
        if source.unfused:
            raise Unreadable("it rounds on the way, which a compiler would leave out")
        cpu = torch.device("cpu")
        fns = self._functions(torch.float32, cpu)
        if not {"backward", "backward_from_bit"} & fns.keys() or "prepare" in fns:
            self._functions(torch.float32, cpu, dual=True)
        self.saves = ("input", "output") if "backward_from_output" in fns or source.name == "relu" else ("input",)

    def _functions(self, dtype: torch.dtype, device: torch.device, dual: bool = False) -> dict[str, Callable]:
        """The file's functions for a dtype and device, on values or on dual numbers."""
        key = dtype, device, dual
        if key not in self._known:
            known = functions(dtype, device, fast_math=self.fast_math)
            defined = ("JITACT_FAST_MATH",) if self.fast_math else ()
            short = shorter(dtype, self.fast_math)
            self._known[key] = (_of_duals if dual else _of_values)(self.source, known, defined, short)
        return self._known[key]

    def _values(self, x: Tensor, operands: tuple) -> dict[str, Value]:
        """Operands by name, in the dtype of computation."""
        computed = wider(x.dtype)
        names = (*self.signature.tensors, *self.signature.of("number"))
        values = {}
        for name, operand in zip(names, operands, strict=True):
            if isinstance(operand, SymFloat):  # as a tensor: arithmetic on it cannot specialise the graph
                operand = torch.ones((), dtype=computed, device=x.device) * operand
            values[name] = operand.to(computed) if isinstance(operand, Tensor) else float(operand)
        return values

    def _arguments(self, values: dict[str, Value], *, elements: bool = True) -> list[Value]:
        """Values in the order of the file's functions, with or without the elements."""
        return [values[operand.name] for operand in self.signature.operands if elements or operand.role != "element"]

    def _prepared(self, values: dict[str, Value], fns: dict[str, Callable]) -> dict[str, Value]:
        """``values`` after the file's ``prepare``, if it has one, has transformed channel operands."""
        if "prepare" not in fns:
            return values
        made = fns["prepare"](*[values[name] for name in self._changed])
        return values | dict(zip(self._changed, made, strict=True))

    @property
    def _changed(self) -> tuple[str, ...]:
        """The channel operands that ``prepare`` transforms."""
        channels = self.signature.of("channel")
        return channels[len(channels) - prepared(self.source.text) :]

    def forward(self, *operands: Tensor | float | SymFloat) -> Tensor:
        """The activation."""
        if self.source.name in SELECTING:
            return SELECTING[self.source.name][0](*operands)
        fns = self._functions(operands[0].dtype, operands[0].device)
        values = self._prepared(self._values(operands[0], operands), fns)
        return _rounded(fns["forward"](*self._arguments(values)), operands[0])

    def gradient_from_output(self, dy: Tensor, y: Tensor, *others: Tensor | float | SymFloat) -> Tensor:
        """The gradient of ``x`` from the output ``y``; ``others`` are the operands other than ``x``."""
        if self.source.name in SELECTING:
            return SELECTING[self.source.name][1](dy, y, *others)
        fns, values = self._functions(y.dtype, y.device), self._values(y, (y, *others))
        kept = values[self.signature.tensors[0]]
        return _rounded(fns["backward_from_output"](_wide(dy), kept, *self._arguments(values, elements=False)), y)

    def gradient(self, dy: Tensor, *operands: Tensor | float | SymFloat) -> Tensor:
        """The gradient of ``x``, for activations where no other operand has one."""
        if self.source.name in SELECTING:
            return SELECTING[self.source.name][1](dy, *operands)
        return self.gradients(dy, *operands, wanted=1)[0]

    def gradients(self, dy: Tensor, *operands: Tensor | float | SymFloat, wanted: int) -> tuple[Tensor, ...]:
        """The gradients of the differentiable operands. Gradient ``g`` is an empty tensor if bit ``g`` of ``wanted`` is 0."""
        x, fns = operands[0], self._functions(operands[0].dtype, operands[0].device)
        raw = self._values(x, operands)
        values = self._prepared(raw, fns)
        if "backward" in fns:
            found = fns["backward"](_wide(dy), *self._arguments(values))
        elif "backward_from_bit" in fns:
            bit = fns["keeps"](*self._arguments(values))
            found = fns["backward_from_bit"](_wide(dy), bit, *self._arguments(values, elements=False))
        else:
            found = tuple(self._derived(dy, values, operand.name, x) for operand in self.signature.differentiable)
        found = found if isinstance(found, tuple) else (found,)
        tensors = dict(zip(self.signature.tensors, operands, strict=False))
        gradients = {}
        for operand, gradient in zip(self.signature.differentiable, found, strict=True):
            gradient = _like(gradient, x)
            if operand.role != "element":
                gradient = gradient.sum_to_size(tensors[operand.name].shape)
            gradients[operand.name] = gradient
        if "prepare" in fns:
            gradients |= self._unprepared(gradients, raw, x)
        return tuple(
            gradient.to(tensors[name].dtype) if wanted >> g & 1 else tensors[name].new_empty(0)
            for g, (name, gradient) in enumerate(gradients.items())
        )

    def _derived(self, dy: Tensor, values: dict[str, Value], by: str, x: Tensor) -> Value:
        """The gradient of the operand ``by``, from dual numbers, for a file without ``backward``."""
        duals = {name: Dual(value, 1) if name == by else Dual(value) for name, value in values.items()}
        y = self._functions(x.dtype, x.device, dual=True)["forward"](*self._arguments(duals))
        return _wide(dy) * derivative(y)

    def _unprepared(self, gradients: dict[str, Tensor], raw: dict[str, Value], x: Tensor) -> dict[str, Tensor]:
        """The gradients of channel operands from the gradients of the values that ``prepare`` makes of them, each of one."""
        prepare, channels = self._functions(x.dtype, x.device, dual=True)["prepare"], self._changed
        made = prepare(*[Dual(raw[name], 1) for name in channels])
        slopes = {name: derivative(each) for name, each in zip(channels, made, strict=True)}
        return {name: gradients[name] * slope for name, slope in slopes.items() if name in gradients}


def _of_values(source: KernelSource, known: dict[str, Callable], defined: tuple[str, ...], short: Short) -> dict[str, Callable]:
    """A kernel file's functions, which may call those of the files that it uses; ``short`` replaces some of the library's."""
    used = {}
    for each in source.uses:
        fns = _of_values(each, known, defined, short)
        if "backward" not in fns:
            fns["backward"] = _gradient_of_used(each, fns, known, defined, short)
        used |= {f"{each.name}_::{name}": function for name, function in fns.items()}
    made = read(source.text, known | used, defined)
    return {**made, **(short.get(source.name, {}) if source.is_librarys else {})}


def _gradient_of_used(
    source: KernelSource,
    fns: dict[str, Callable],
    known: dict[str, Callable],
    defined: tuple[str, ...],
    short: Short,
) -> Callable:
    """``backward`` for a file that defines none, derived as ``uses.cuh`` derives it."""
    operands = source.signature.operands
    if "backward_from_bit" in fns:
        others = [place for place, operand in enumerate(operands) if operand.role != "element"]
        return lambda dy, *of: fns["backward_from_bit"](dy, fns["keeps"](*of), *[of[place] for place in others])
    forward = _of_duals(source, known, defined, short)["forward"]
    places = [operands.index(operand) for operand in source.signature.differentiable]

    def backward(dy: Value, *of: Value) -> Value | tuple[Value, ...]:
        found = [dy * derivative(forward(*[Dual(v, int(k == place)) for k, v in enumerate(of)])) for place in places]
        return tuple(found) if len(found) > 1 else found[0]

    return backward


def _of_duals(source: KernelSource, known: dict[str, Callable], defined: tuple[str, ...], short: Short) -> dict[str, Callable]:
    """The same for dual numbers. A used file that defines its gradient counts as one function with that derivative."""
    used = {}
    for each in source.uses:
        fns = _of_values(each, known, defined, short)
        if {"backward", "backward_from_bit"} & fns.keys():
            slope = fns.get("backward") or _gradient_of_used(each, fns, known, defined, short)
            used[f"{each.name}_::forward"] = _one_function(each, fns["forward"], slope)
        else:
            used[f"{each.name}_::forward"] = _of_duals(each, known, defined, short)["forward"]
        if "prepare" in fns:
            used[f"{each.name}_::prepare"] = _of_duals(each, known, defined, short)["prepare"]
    return read(source.text, of_duals(known) | used, defined, gradients=False)


def _one_function(source: KernelSource, forward: Callable, slope: Callable) -> Callable[..., Dual]:
    operands = source.signature.operands
    places = [operands.index(operand) for operand in source.signature.differentiable]

    def function(*arguments: Dual | Value) -> Dual:
        duals = [each if isinstance(each, Dual) else Dual(each) for each in arguments]
        values = [dual.value for dual in duals]
        slopes = slope(1.0, *values)
        slopes = slopes if isinstance(slopes, tuple) else (slopes,)
        parts = [times_derivative(by, duals[place].derivative) for place, by in zip(places, slopes, strict=True)]
        return Dual(forward(*values), sum(parts[1:], start=parts[0]), by_choice=True)

    return function


def _wide(t: Tensor) -> Tensor:
    return t.to(wider(t.dtype))


def _like(value: Value, x: Tensor) -> Tensor:
    """``value`` in the shape of ``x``, also where it does not depend on the elements."""
    return torch.broadcast_to(value, x.shape) if isinstance(value, Tensor) else torch.full_like(_wide(x), value)


def _rounded(value: Value, like: Tensor) -> Tensor:
    return _like(value, like).to(like.dtype)
