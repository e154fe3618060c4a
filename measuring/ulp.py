"""The measure of errors, units in the last place (ulp), and representative inputs of a dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Error", "every_16bit_value", "fp32_values", "gradients", "sample", "ulp_error", "value_and_gradient"]


@dataclass
class Error:
    """The error of many results, accumulated in pieces.

    Attributes:
        ulp: the largest error.
        at: the input where it occurs.
        unusual: the number of results above the dtype's :attr:`Bound.usual`.
        broken: the number of results above the bound.
        count: the number of results.
    """

    ulp: float = 0.0
    at: float = 0.0
    unusual: int = 0
    broken: int = 0
    count: int = 0

    def add(self, x: Tensor, error: Tensor, usual: float, bound: Tensor | float) -> None:
        """Adds the ``error`` of the results for ``x``."""
        self.count += x.numel()
        self.unusual += int((error > usual).sum())
        self.broken += int((error > bound).sum())
        where = error.argmax()
        if error[where] > self.ulp:
            self.ulp, self.at = float(error[where]), float(x[where])


def every_16bit_value(dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
    """Every finite value of ``torch.float16`` or ``torch.bfloat16``, both zeros included, ascending: shape ``(n,)``."""
    positive = torch.arange(2**15, device=device).to(torch.int16).view(dtype)
    positive = positive[positive.isfinite()]
    return torch.cat([-positive.flip(0), positive])


def ulp_error(actual: Tensor, exact: Tensor, dtype: torch.dtype, floor: float | Tensor | None = None) -> Tensor:
    """The distance of ``actual`` from ``exact`` in ulp of ``dtype``, elementwise, as float64.

    The unit is the spacing of ``dtype`` at the exact result, so a correctly rounded result is off by at most 0.5. The unit of
    subnormal results is the smallest subnormal number; in bfloat16, float32 and float64, a zero instead of a subnormal result
    is no error, as arithmetic may flush subnormals.

    Equal infinities and two NaNs are 0 apart. If exactly one of the two is infinite, infinity counts as the first power of two
    beyond the range, provided the exact result is near it; any other mismatch is ``inf``.

    Args:
        actual: results, of any floating-point type.
        exact: the same in float64, not rounded to ``dtype``.
        dtype: the type that ``actual`` is stored in.
        floor: below this magnitude of ``exact`` the unit is the spacing at ``floor``; one value, or one for each element.
    """
    info = torch.finfo(dtype)
    exact, actual = exact.double(), actual.double()
    top = 2.0 ** (math.frexp(info.max)[1] - 1)
    bottom = _binade(torch.as_tensor(floor or 0.0 if not isinstance(floor, Tensor) else floor).double().clamp(min=info.tiny))
    unit = _binade(exact).clamp(max=top).maximum(bottom.to(exact.device)) * info.eps
    error = (actual.clamp(-2 * top, 2 * top) - exact).abs() / unit
    overflows = exact.abs() >= top * (2 - info.eps / 2)  # where IEEE rounding gives infinity
    same = (actual == exact) | (actual.isnan() & exact.isnan()) | (overflows & actual.isinf() & (actual.sign() == exact.sign()))
    if dtype is not torch.float16:
        same |= (actual == 0) & (exact.abs() < info.tiny)
    mismatch = error.isnan() | (actual.isinf() & (exact.abs() < top))
    return error.masked_fill(mismatch, torch.inf).masked_fill(same, 0.0)


def _binade(values: Tensor) -> Tensor:
    """The largest powers of two not above the magnitudes."""
    return (values.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)


def sample(dtype: torch.dtype, device: torch.device, step: int = 4099) -> Tensor:
    """Representative inputs of a dtype.

    Every finite value of a 16-bit type; for wider types all 16-bit values, random normal ones, and every ``step``-th fp32
    number.

    Args:
        dtype: of the inputs.
        device: where to create them.
        step: the distance between fp32 numbers, counted by bit pattern.
    """
    if dtype in (torch.float16, torch.bfloat16):
        return every_16bit_value(dtype, device)
    every_16bit = [every_16bit_value(each, device).to(dtype) for each in (torch.float16, torch.bfloat16)]
    normal = torch.randn(2**16, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    return torch.cat([*every_16bit, normal, 4 * normal, fp32_values(device, step).to(dtype)])


def fp32_values(device: torch.device, step: int = 1, start: int = -(2**31), stop: int = 2**31) -> Tensor:
    """The finite float32 numbers whose bit patterns are ``range(start, stop, step)``."""
    values = torch.arange(start, stop, step, device=device).to(torch.int32).view(torch.float32)
    return values[values.isfinite()]


def value_and_gradient(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """``f(x)`` and its gradient for dy = 1."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = f(x)
    return y.detach(), gradients(y, [x], torch.ones_like(y))[0]


def gradients(y: Tensor, leaves: Sequence[Tensor], dy: Tensor) -> Sequence[Tensor]:
    """The gradients of ``leaves`` for ``dy``: 0 of those that ``y`` does not vary with, as a condition does not."""
    if not y.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return torch.autograd.grad(y, leaves, dy, materialize_grads=True)
