"""Activations of several operands as functions of one of them, and whether all their gradients are what they should be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..fusing.around import around
from ..gating.around import UNFUSED, WEIGHT, with_options
from ..kernels.loader.signature import prepared
from ..modules import ActivationModule, bias_around
from ..records import Activation
from ..registry import class_of, of_defaults, record_named, record_of
from ..running import run_fitted
from .limits import FORMULA, GRADIENT_FLOOR
from .oracle import Judge, finite_differences
from .sampling import incoming, inputs
from .ulp import gradients
from .verdicts import FAR, Line, worst_of

__all__ = ["by_operand", "fixed_values", "lines_of_several", "named", "of_several", "surrounded"]

Function = Callable[..., Tensor]
SPREAD = 2.0  # of the samples of operands but the first, which are normal
SAMPLES = 2**15  # about so many of the wider types
OFTEN = 8  # every so manyth sample is any number that is not far out


def of_several(record: Activation) -> bool:
    """Whether an activation is judged, and drawn, by several operands: of elements or rows, or what a definition learns."""
    return len(record.layout.tensors) > 1 and (record.layout.elements > 1 or not record.module)


def in_eval(module: ActivationModule) -> tuple[Activation, tuple[float, ...]]:
    """The record and the parameters of what a module computes outside of training."""
    record, params = record_of(module), module._params()
    return record.in_eval(*params) if record.in_eval is not None else (record, params)


def surrounded(module: ActivationModule, parts: Collection[str] = ()) -> tuple[Activation, tuple[float, ...]] | None:
    """The same, with the bias that a module adds in its kernel; None where nothing is added outside of training.

    Args:
        module: the module.
        parts: what else stands around it: "residual", or of a gated activation "row_weight".
    """
    record, params = in_eval(module)
    added = {"bias": bias_around(module) is not None, "residual": "residual" in parts}
    if WEIGHT in parts:
        return with_options(record, weighted=True), params
    return (around(record, **added), params) if any(added.values()) else None


def named(name: str) -> tuple[ActivationModule, list[str]]:
    """A module of the activation that is named with what stands around it, as ``gelu+bias+residual``; and these parts.

    Raises:
        KeyError: there is no such activation.
        ValueError: something cannot stand around it, or rounds on the way, which has no yardstick.
    """
    record_named(name)
    first, *parts = name.split("+")
    if UNFUSED in parts:
        others = "+".join([first, *(part for part in parts if part != UNFUSED)])
        raise ValueError(f"check: {name} rounds on the way, as eager does, and is not near the exact result; check {others!r}")
    options = {"bias": 1} if "bias" in parts else {}
    return of_defaults(class_of(first), **options, **({"dropout": 0.5} if "dropout" in parts else {})), parts


def kernel(record: Activation, params: tuple[float, ...], save: str | None = None) -> Function:
    """An activation of its tensors, as operators take them: a channel operand may have a value for each element.

    Those that the kernel file prepares have one for all.
    """
    one = len(record.layout.tensors) - prepared(record.source.text)

    def function(*tensors: Tensor) -> Tensor:
        given = (*tensors[:one], *(tensor.flatten()[:1] for tensor in tensors[one:]))
        return run_fitted(record, given, params, False, save, False)

    return function


def formula(record: Activation, params: tuple[float, ...]) -> Function:
    """The same in PyTorch."""
    reference = record.exact or record.reference
    return lambda *tensors: reference(*tensors, *params)


def by_operand(module: ActivationModule, function: Function) -> dict[str, Callable[[Tensor], Tensor]]:
    """A function of all tensors of a module's activation as functions of each, where others are 1, or the module's mean."""
    record, _ = in_eval(module)
    names = record.layout.tensors
    beside = {name: float(getattr(module, name).detach().double().mean()) if name in record.channels else 1.0 for name in names}

    def alone(name: str, t: Tensor) -> Tensor:
        return function(*[t if each == name else torch.full_like(t, value) for each, value in beside.items()])

    return {name: partial(alone, name) for name in names}


def fixed_values(module: ActivationModule, record: Activation) -> dict[str, float]:
    """The operands that a kernel file prepares, which have one value for all, with what a module has for them."""
    names = record.layout.tensors
    changed = names[len(names) - prepared(record.source.text) :]
    return {name: float(getattr(module, name).detach().double().mean()) for name in changed}


def lines_of_several(record: Activation, params: tuple[float, ...], fixed: dict[str, float], x: Tensor) -> Iterable[Line]:
    """A line for each thing that gives all gradients if it is kept, by samples of all operands, of which ``x`` is the first.

    Those that are ``fixed`` have one value for all, and their gradients, which are sums over all, are not looked at.
    """
    dtype, names, layout = x.dtype, record.layout.tensors, record.layout
    x = x[:: 1 + x.numel() // SAMPLES] if dtype.itemsize > 2 else x
    learned = tuple(names[place] for place in layout.places if names[place] not in fixed)
    others = [torch.full_like(x, fixed[name]) if name in fixed else _sample(x, k) for k, name in enumerate(names[1:], 1)]
    operands = [x, *others]
    wide = [operand.double() for operand in operands]
    exact = _Exact(record, params, wide, learned, torch.float64 if dtype is torch.float64 else torch.float32)
    dy = incoming(exact.largest_slope, dtype, FORMULA[dtype].floor)
    yardstick = dtype is torch.float64 and not record.has_reference
    for save in ("input", "bit") if layout.from_bit == layout.places else ("input",):
        found = _value_and_gradients(kernel(record, params, save), operands, learned, names, dy)
        far = wide[0].abs() > torch.finfo(exact.registers).max ** FAR
        slips = [torch.zeros_like(far)] * len(found)
        if dtype is not torch.float64:  # what the same formula gives in float64 tells a slip from digits or a range too few
            right = _value_and_gradients(kernel(record, params, save), wide, learned, names, torch.ones_like(wide[0]))
            slips = [judge.wrong(each) for judge, each in zip(exact.judges(torch.float64), right, strict=True)]
            far &= ~torch.stack(slips).any(0)
        worst = []
        for by, actual, judge, slip, scale in zip(["", *learned], found, exact.judges(dtype), slips, exact.scales, strict=True):
            one, where = worst_of(x, actual, judge, slip, far, GRADIENT_FLOOR * scale if by else None)
            at = ", ".join(f"{name} = {float(operand[where]):.8g}" for name, operand in zip(names, operands, strict=True))
            worst.append(replace(one, by=by, at=at))
        gradient = max(worst[1:], key=lambda each: (bool(each.wrong), each.ulp))
        yield Line(dtype, save, x.numel(), None if yardstick else worst[0], gradient, exact.untold)


class _Exact:
    """What an activation and its slopes should be at samples of its operands, in float64, and how far off results may be."""

    def __init__(
        self, record: Activation, params: tuple, operands: list[Tensor], learned: tuple[str, ...], registers: torch.dtype
    ) -> None:
        self.record, self.learned, self.registers = record, learned, registers
        self.value = formula(record, params)
        results, self.doubts = self._results(operands)
        if registers is torch.float64:  # what the oracle's own formula may have overflowed for
            finite = torch.stack([each.isfinite() for each in results]).all(0)
            results = [each.masked_fill(~finite, torch.nan) for each in results]
        self.results = results
        self.spreads = self._spreads(operands)
        # What is computed on the way is multiplied with the other operands, as much as they are.
        sizes = [operand.abs().clamp(min=1.0).nan_to_num(posinf=torch.finfo(torch.float64).max) for operand in operands]
        beside = [0, *(record.layout.tensors.index(name) for name in learned)]
        self.scales = [_product([size for k, size in enumerate(sizes) if k != without]) for without in beside]

    @property
    def largest_slope(self) -> Tensor:
        """At each sample."""
        return torch.stack([each.abs().nan_to_num(0.0, posinf=0.0) for each in self.results[1:]]).amax(0)

    @property
    def untold(self) -> int:
        """At how many samples a slope is not known."""
        return int(torch.stack([each.isnan() for each in self.results[1:]]).any(0).sum())

    def judges(self, dtype: torch.dtype) -> list[Judge]:
        """Of the value and of each slope, in ``dtype``."""
        limit = FORMULA[dtype]
        return [
            Judge(result, spread, doubt, replace(limit, floor=limit.floor * scale), dtype)
            for result, spread, doubt, scale in zip(self.results, self.spreads, self.doubts, self.scales, strict=True)
        ]

    def _results(self, operands: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The value and the slopes by the learned operands, and how far from them the true ones may be."""
        names, value = self.record.layout.tensors, self.value
        if self.record.has_reference:
            found = _value_and_gradients(value, operands, self.learned, names, torch.ones_like(operands[0]))
            return found, [torch.zeros_like(found[0])] * len(found)
        results = [(value(*operands), torch.zeros_like(operands[0]))]
        for k in map(names.index, self.learned):
            alone = partial(_at_operand, value, operands, k)
            results.append(finite_differences(alone, operands[k]))
        return [result for result, _ in results], [doubt for _, doubt in results]

    def _spreads(self, operands: list[Tensor]) -> list[Tensor]:
        """By how much the value and the slopes change with the last bits of the operands in registers."""
        eps, total = torch.finfo(self.registers).eps, [torch.zeros_like(operands[0])] * (1 + len(self.learned))
        for k, operand in enumerate(operands):
            moved = [[*operands[:k], operand * factor, *operands[k + 1 :]] for factor in (1 - eps, 1 + eps)]
            below, above = (self._results(each)[0] for each in moved)
            total = [spread + (a - b).abs() for spread, a, b in zip(total, below, above, strict=True)]
        return total


def _at_operand(function: Function, operands: list[Tensor], k: int, t: Tensor) -> Tensor:
    return function(*operands[:k], t, *operands[k + 1 :])


def _product(factors: list[Tensor]) -> Tensor:
    return torch.stack(factors).prod(0).clamp(max=torch.finfo(torch.float64).max)


def _sample(x: Tensor, seed: int) -> Tensor:
    """Values for another operand beside those of the first, of its dtype: usual ones, some of them near 0."""
    generator = torch.Generator().manual_seed(seed)
    usual = SPREAD * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    anything = inputs(x.dtype, -100.0, 100.0, (), torch.device("cpu"))
    chosen = anything[torch.randint(anything.numel(), x.shape, generator=generator)].double()
    some = torch.randint(OFTEN, x.shape, generator=generator) == 0
    return torch.where(some, chosen, usual).to(x.device, x.dtype)


def _value_and_gradients(
    function: Function, operands: list[Tensor], learned: tuple[str, ...], names: tuple[str, ...], dy: Tensor
) -> list[Tensor]:
    """A function's value, and in float64 its gradients for ``dy``, divided by that."""
    tensors = [operand.detach().requires_grad_(name in learned) for name, operand in zip(names, operands, strict=True)]
    with torch.enable_grad():
        y = function(*tensors)
    found = gradients(y, [tensors[names.index(name)] for name in learned], dy)
    return [y.detach(), *(gradient.double() / dy.double() for gradient in found)]
