"""What an activation should compute, in float64, and how far off its results may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..definitions.define import Definition
from ..modules import ActivationModule
from ..records import Activation
from ..registry import record_of
from .limits import Limit
from .ulp import ulp_error, value_and_gradient

__all__ = ["Judge", "Oracle", "curve", "exact_function", "finite_differences"]

NEWTON_STEPS = 40  # each takes a saturated output an e-fold further out


def exact_function(module: ActivationModule, dtype: torch.dtype = torch.float64) -> Callable[[Tensor], Tensor]:
    """What a module computes, with its parameters, as a function in PyTorch that is exact in float64.

    Parameters are rounded to float32 where ``dtype`` is no wider, as kernels and PyTorch round them.
    """
    record = record_of(module)
    return function_of(module, record.exact or record.reference, dtype)


def function_of(
    module: ActivationModule, formula: Callable[..., Tensor], dtype: torch.dtype = torch.float64
) -> Callable[[Tensor], Tensor]:
    """A formula of a module's activation as a function of ``x``, with the module's weights and parameters, in eval mode."""
    record, params = record_of(module), module._params()
    if dtype is not torch.float64:
        params = torch.tensor([float(value) for value in params]).tolist()
    if record.in_eval is not None:
        record, params = record.in_eval(*params)
        formula = record.exact or record.reference
    weights = [getattr(module, name).detach() for name in record.channels]
    return lambda x: curve(record, formula, x, [*(weight.to(x.device, x.dtype) for weight in weights), *params])


def curve(record: Activation, formula: Callable[..., Tensor], x: Tensor, others: list) -> Tensor:
    """A formula as a function of ``x``; of a gated activation, that of the gate where the other tensor is 1."""
    if not record.gating:
        return formula(x, *others)
    elements = [x if name == "gate" else torch.ones_like(x) for name in record.layout.tensors]
    return formula(*elements, *others)


class Oracle:
    """What an activation with given parameters should compute, in float64."""

    def __init__(self, module: ActivationModule) -> None:
        """Of a module, with its parameters."""
        record, self.params = record_of(module), module._params()
        self.has_reference = not isinstance(record, Definition) or record.has_reference
        self.name = "PyTorch in float64" if self.has_reference else "its own float64, gradient by finite differences"
        self.value = exact_function(module)

    def gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The slope at ``x``, NaN where it cannot tell, and how far from it the true one may be."""
        if not self.has_reference:
            return finite_differences(self.value, x)
        slope = value_and_gradient(self.value, x)[1]
        if slope.isnan().any():
            # torch.where gives NaN in reverse mode, but not in forward mode, if a branch not taken overflows
            slope = torch.where(slope.isnan(), torch.func.jvp(self.value, (x,), (torch.ones_like(x),))[1], slope)
        return slope.detach(), torch.zeros_like(slope)

    def gradient_of_output(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The slope where the value is ``y``, which is that at the ascending ``x`` but for rounding, by Newton's method.

        Where the function only tends to ``y``, the steps go on outwards, and the slope goes to its limit.
        """
        value = self.value(x).detach()
        reached = y.clamp(value.nan_to_num(torch.inf).min(), value.nan_to_num(-torch.inf).max())
        beyond = (y - reached).abs() > 2.0**-40 * reached.abs()  # by rounding: there is no slope to tell
        rising = value if value[0] <= value[-1] else -value
        highest, at = rising.cummax(0).values, x.clone()
        if (rising >= highest - 1e-6 * (1 + highest.abs())).all():  # monotone: from the nearest input, where it is steeper
            nearest = torch.searchsorted(highest, reached if rising is value else -reached).clamp(max=x.numel() - 1)
            at = torch.where(value == y, x, x[nearest])
        moving = torch.arange(x.numel(), device=x.device)
        for _ in range(NEWTON_STEPS):
            here = at[moving]
            slope, bound = self.gradient(here)[0], 1 + here.abs()
            step = ((self.value(here).detach() - reached[moving]) / slope).clamp(-bound, bound).masked_fill(slope == 0, 0.0)
            at[moving] = here - step.nan_to_num(0.0)
            moving = moving[step.abs() > 1e-8 * here.abs()]
        slope, doubt = self.gradient(at)
        return slope.masked_fill(beyond | ~y.isfinite(), torch.nan), doubt


def finite_differences(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """The derivative of ``f`` by central differences of fourth order, NaN at kinks, and its error."""
    h = (x.abs() * 2.0**-20).clamp(min=2.0**-13)
    left2, left, middle, right, right2 = (f(x + k * h) for k in (-2, -1, 0, 1, 2))
    near, far = (right - left) / (2 * h), (right2 - left2) / (4 * h)
    truncation, rounding = (near - far).abs(), 8 * torch.finfo(x.dtype).eps * middle.abs() / h
    scale = 1 + near.abs()
    smooth = (truncation < 1e-3 * scale) & (((right - 2 * middle + left) / h).abs() < 1e-2 * scale)
    return ((4 * near - far) / 3).masked_fill(~smooth, torch.nan), truncation + rounding + 1e-7 * scale


@dataclass(frozen=True)
class Judge:
    """What results in ``dtype`` should be, NaN where that is not known, and how far off they may be.

    Attributes:
        exact: the results wanted, in float64.
        spread: by how much they change with ``x``'s last bits in a register.
        doubt: how far from the true ones they may be.
        limit: what is allowed beyond that.
        dtype: of the results.
    """

    exact: Tensor
    spread: Tensor
    doubt: Tensor
    limit: Limit
    dtype: torch.dtype

    def error(self, actual: Tensor, floor: float | Tensor | None) -> Tensor:
        """In ulp, beyond the doubt."""
        off = actual.double() - self.exact
        beyond = torch.where(off.abs() <= self.doubt, self.exact, actual.double() - off.sign() * self.doubt)
        return ulp_error(beyond, self.exact, self.dtype, floor).masked_fill(self.exact.isnan(), 0.0)

    def wrong(self, actual: Tensor) -> Tensor:
        """Which are off by more than is allowed."""
        excused = (actual.double() - self.exact).abs() <= 4 * self.spread.nan_to_num(nan=0.0, posinf=0.0)
        return (self.error(actual, self.limit.floor) > self.limit.ulp) & ~excused
