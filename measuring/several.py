"""Activations of several operands: as functions of one of them, and the check of all their gradients."""

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

__all__ = [
    "by_operand",
    "fixed_values",
    "formula",
    "in_eval",
    "kernel",
    "lines_of_several",
    "named",
    "of_several",
    "surrounded",
]

Function = Callable[..., Tensor]
SPREAD = 2.0  # the standard deviation of the samples of all operands but the first
SAMPLES = 2**15  # the approximate number of samples for types wider than 16 bits
LEAST = 2**12  # samples for 16-bit types: a range with few values of x says little unless the other operands have many
OFTEN = 8  # one in so many samples is drawn from all numbers within +-100


def of_several(record: Activation) -> bool:
    """Whether an activation is checked and plotted by operand.

    It is if it has several elements or rows, or is a definition with channel operands.
    """
    return len(record.layout.tensors) > 1 and (record.layout.elements > 1 or not record.module)


def in_eval(module: ActivationModule) -> tuple[Activation, tuple[float, ...]]:
    """The record and the parameters of the activation that a module computes outside of training."""
    record, params = record_of(module), module._params()
    return record.in_eval(*params) if record.in_eval is not None else (record, params)


def surrounded(module: ActivationModule, parts: Collection[str] = ()) -> tuple[Activation, tuple[float, ...]] | None:
    """As :func:`in_eval`, with the operands fused around the activation; None if there are none outside of training.

    Args:
        module: the module, whose bias is included.
        parts: further fused operands: "residual", or for a gated activation "row_weight".
    """
    record, params = in_eval(module)
    added = {"bias": bias_around(module) is not None, "residual": "residual" in parts}
    if WEIGHT in parts:
        return with_options(record, weighted=True), params
    return (around(record, **added), params) if any(added.values()) else None


def named(name: str) -> tuple[ActivationModule, list[str]]:
    """A module of an activation named with fused operands, such as ``gelu+bias+residual``, and the names of these operands.

    Raises:
        KeyError: there is no such activation.
        ValueError: the activation does not take an operand, or the name asks for intermediate rounding ("unfused").
    """
    record_named(name)
    first, *parts = name.split("+")
    if UNFUSED in parts:
        others = "+".join([first, *(part for part in parts if part != UNFUSED)])
        raise ValueError(f"check: {name} rounds on the way, as eager does, and is not near the exact result; check {others!r}")
    options = {"bias": 1} if "bias" in parts else {}
    return of_defaults(class_of(first), **options, **({"dropout": 0.5} if "dropout" in parts else {})), parts


def kernel(record: Activation, params: tuple[float, ...], save: str | None = None) -> Function:
    """An activation as a function of its tensors, for its operators: channel operands have a value for each element.

    Only operands that the kernel file prepares have one value for all. Others that are declared to have one are looked up here,
    by a build of the same functions for that.
    """
    one = len(record.layout.tensors) - prepared(record.source.text)
    if record.source.singles:
        record = replace(record, kernel=record.source._replace(singles=0))

    def function(*tensors: Tensor) -> Tensor:
        given = (*tensors[:one], *(tensor.flatten()[:1] for tensor in tensors[one:]))
        return run_fitted(record, given, params, False, save, False)

    return function


def formula(record: Activation, params: tuple[float, ...]) -> Function:
    """The same function in PyTorch."""
    reference = record.exact or record.reference
    return lambda *tensors: reference(*tensors, *params)


def by_operand(module: ActivationModule, function: Function) -> dict[str, Callable[[Tensor], Tensor]]:
    """A function of a module's tensors as a function of each of them; the others are 1, or the mean of the module's values."""
    record, _ = in_eval(module)
    names = record.layout.tensors
    fixed = {name: float(getattr(module, name).detach().double().mean()) if name in record.channels else 1.0 for name in names}

    def alone(name: str, t: Tensor) -> Tensor:
        return function(*[t if each == name else torch.full_like(t, value) for each, value in fixed.items()])

    return {name: partial(alone, name) for name in names}


def fixed_values(module: ActivationModule, record: Activation) -> dict[str, float]:
    """The operands that a kernel file prepares, which have one value for all elements, with the mean of the module's values."""
    names = record.layout.tensors
    changed = names[len(names) - prepared(record.source.text) :]
    return {name: float(getattr(module, name).detach().double().mean()) for name in changed}


def lines_of_several(record: Activation, params: tuple[float, ...], fixed: dict[str, float], x: Tensor) -> Iterable[Line]:
    """A line for each choice of ``save`` that gives all gradients, on samples of all operands, of which ``x`` is the first.

    The ``fixed`` operands have one value for all elements; their gradients, which are sums over all, are not checked.
    """
    dtype, names, layout = x.dtype, record.layout.tensors, record.layout
    x = x[:: 1 + x.numel() // SAMPLES] if dtype.itemsize > 2 else x.repeat(1 + LEAST // x.numel()) if x.numel() < LEAST else x
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
        if dtype is not torch.float64:  # the kernel in float64 tells a wrong formula from a lack of precision or range
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
    """The exact value and slopes of an activation at samples of its operands, in float64, and the allowed errors."""

    def __init__(
        self, record: Activation, params: tuple, operands: list[Tensor], learned: tuple[str, ...], registers: torch.dtype
    ) -> None:
        self.record, self.learned, self.registers = record, learned, registers
        self.value = formula(record, params)
        results, self.doubts = self._results(operands)
        if registers is torch.float64:  # the oracle's own formula may have overflowed
            finite = torch.stack([each.isfinite() for each in results]).all(0)
            results = [each.masked_fill(~finite, torch.nan) for each in results]
        self.results = results
        self.spreads = self._spreads(operands)
        # Errors of intermediate values are multiplied by the other operands, so the unit grows with their magnitudes.
        sizes = [operand.abs().clamp(min=1.0).nan_to_num(posinf=torch.finfo(torch.float64).max) for operand in operands]
        excluded = [0, *(record.layout.tensors.index(name) for name in learned)]
        self.scales = [_product([size for k, size in enumerate(sizes) if k != without]) for without in excluded]

    @property
    def largest_slope(self) -> Tensor:
        """The largest magnitude of the slopes at each sample."""
        return torch.stack([each.abs().nan_to_num(0.0, posinf=0.0) for each in self.results[1:]]).amax(0)

    @property
    def untold(self) -> int:
        """The number of samples at which a slope is unknown."""
        return int(torch.stack([each.isnan() for each in self.results[1:]]).any(0).sum())

    def judges(self, dtype: torch.dtype) -> list[Judge]:
        """The judges of the value and of each slope, for results in ``dtype``."""
        limit = FORMULA[dtype]
        return [
            Judge(result, spread, doubt, replace(limit, floor=limit.floor * scale), dtype)
            for result, spread, doubt, scale in zip(self.results, self.spreads, self.doubts, self.scales, strict=True)
        ]

    def _results(self, operands: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The value and the slopes by the learned operands, and bounds of their own errors."""
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
        """The changes of the value and the slopes when the last bits of the operands in registers change."""
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
    """Values for another operand, in x's shape and dtype: normal ones, and some of every magnitude up to 100."""
    generator = torch.Generator().manual_seed(seed)
    usual = SPREAD * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    anything = inputs(x.dtype, -100.0, 100.0, (), torch.device("cpu"))
    chosen = anything[torch.randint(anything.numel(), x.shape, generator=generator)].double()
    some = torch.randint(OFTEN, x.shape, generator=generator) == 0
    return torch.where(some, chosen, usual).to(x.device, x.dtype)


def _value_and_gradients(
    function: Function, operands: list[Tensor], learned: tuple[str, ...], names: tuple[str, ...], dy: Tensor
) -> list[Tensor]:
    """A function's value, and its gradients for ``dy`` divided by ``dy``, in float64."""
    tensors = [operand.detach().requires_grad_(name in learned) for name, operand in zip(names, operands, strict=True)]
    with torch.enable_grad():
        y = function(*tensors)
    found = gradients(y, [tensors[names.index(name)] for name in learned], dy)
    return [y.detach(), *(gradient.double() / dy.double() for gradient in found)]
