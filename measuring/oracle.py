"""The float64 oracle: the exact results of an activation, and the errors that are allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..definitions.define import Definition
from ..modules import ActivationModule
from ..records import Activation
from ..records.arguments import what_it_is
from ..registry import record_of
from .limits import Limit
from .ulp import ulp_error, value_and_gradient

__all__ = ["Judge", "Oracle", "check_reference", "curve", "exact_function", "finite_differences", "function_of"]

NEWTON_STEPS = 40  # each takes a saturated output an e-fold further out


def exact_function(module: ActivationModule, dtype: torch.dtype = torch.float64) -> Callable[[Tensor], Tensor]:
    """The function that a module computes, with its parameters, in PyTorch operations that are accurate in float64.

    Unless ``dtype`` is float64, parameters are rounded to float32, as kernels and PyTorch do.
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
    """A formula as a function of ``x``; for a gated activation, as a function of the gate with up = 1."""
    if not record.gating:
        return formula(x, *others)
    elements = [x if name == "gate" else torch.ones_like(x) for name in record.layout.tensors]
    return formula(*elements, *others)


class Oracle:
    """The exact results of an activation with given parameters, in float64."""

    def __init__(self, module: ActivationModule) -> None:
        """Takes a module with its parameters."""
        record, self.params = record_of(module), module._params()
        self.has_reference = not isinstance(record, Definition) or record.has_reference
        self.name = "PyTorch in float64" if self.has_reference else "its own float64, gradient by finite differences"
        self.value = exact_function(module)

    def gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The slope at ``x``, NaN where it is unknown, and a bound of its own error."""
        if not self.has_reference:
            return finite_differences(self.value, x)
        slope = value_and_gradient(self.value, x)[1]
        if slope.isnan().any():
            # In reverse mode, but not in forward mode, torch.where gives NaN if the branch not taken overflows
            slope = torch.where(slope.isnan(), torch.func.jvp(self.value, (x,), (torch.ones_like(x),))[1], slope)
        return slope.detach(), torch.zeros_like(slope)

    def gradient_of_output(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The slope at the inputs whose value is exactly ``y``, found by Newton's method starting from ``x``.

        ``x`` is ascending, and ``y`` are its rounded values. Where the function only tends to ``y``, the iteration moves
        outwards, and the slope to its limit. Returns the slope and a bound of its error, as :meth:`gradient` does.
        """
        value = self.value(x).detach()
        reached = y.clamp(value.nan_to_num(torch.inf).min(), value.nan_to_num(-torch.inf).max())
        beyond = (y - reached).abs() > 2.0**-40 * reached.abs()  # rounded past the range of the function: no input gives it
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


def check_reference(name: str, y: object, x: Tensor) -> None:
    """Checks the result of an activation's reference for ``x``.

    Raises:
        ValueError: it is no tensor of the same shape.
    """
    if not isinstance(y, Tensor) or y.shape != x.shape:
        got = f"one of shape {tuple(y.shape)}" if isinstance(y, Tensor) else what_it_is(y)
        raise ValueError(f"check: the reference of {name} returns a tensor of the shape of x, {tuple(x.shape)}; got {got}")


def finite_differences(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """The derivative of ``f`` by central differences of fourth order, NaN at kinks, and an estimate of its error."""
    h = (x.abs() * 2.0**-20).clamp(min=2.0**-13)
    left2, left, middle, right, right2 = (f(x + k * h) for k in (-2, -1, 0, 1, 2))
    near, far = (right - left) / (2 * h), (right2 - left2) / (4 * h)
    truncation, rounding = (near - far).abs(), 8 * torch.finfo(x.dtype).eps * middle.abs() / h
    scale = 1 + near.abs()
    smooth = (truncation < 1e-3 * scale) & (((right - 2 * middle + left) / h).abs() < 1e-2 * scale)
    return ((4 * near - far) / 3).masked_fill(~smooth, torch.nan), truncation + rounding + 1e-7 * scale


@dataclass(frozen=True)
class Judge:
    """The exact results and the tolerance for results in ``dtype``.

    Attributes:
        exact: the exact results in float64, NaN where unknown.
        spread: the change of the results when the last bits of ``x`` in a register change.
        doubt: a bound of the error of ``exact`` itself.
        limit: the error allowed beyond ``doubt``.
        dtype: of the results.
    """

    exact: Tensor
    spread: Tensor
    doubt: Tensor
    limit: Limit
    dtype: torch.dtype

    def error(self, actual: Tensor, floor: float | Tensor | None) -> Tensor:
        """The errors in ulp, beyond the doubt."""
        off = actual.double() - self.exact
        beyond = torch.where(off.abs() <= self.doubt, self.exact, actual.double() - off.sign() * self.doubt)
        return ulp_error(beyond, self.exact, self.dtype, floor).masked_fill(self.exact.isnan(), 0.0)

    def wrong(self, actual: Tensor) -> Tensor:
        """A mask of the results whose error exceeds both the limit and the effect of the spread."""
        excused = (actual.double() - self.exact).abs() <= 4 * self.spread.nan_to_num(nan=0.0, posinf=0.0)
        return (self.error(actual, self.limit.floor) > self.limit.ulp) & ~excused
