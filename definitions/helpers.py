"""PyTorch implementations of kernel functions that PyTorch lacks, or whose gradients differ there."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..records.dtypes import wider
from ..references import exact_tanhshrink

__all__ = ["HELPERS", "cbrt", "clamp", "maximum", "minimum", "round_half_up"]

# Where the arguments of min or max are equal, the gradient goes to the second one, as in the kernel.


def minimum(a: Tensor, b: Tensor | float) -> Tensor:
    """The lesser of two elements; NaN if either is."""
    return torch.where((a < b) | a.isnan(), a, b)


def maximum(a: Tensor, b: Tensor | float) -> Tensor:
    """The greater of two elements; NaN if either is."""
    return torch.where((a > b) | a.isnan(), a, b)


def clamp(x: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """Each element between two bounds; at a bound it has the bound's gradient."""
    x = torch.where((x > low) | x.isnan(), x, low)
    return torch.where((x < high) | x.isnan(), x, high)


def cbrt(x: Tensor) -> Tensor:
    """The cube root of each element."""
    a = x.abs().to(wider(x.dtype))  # 1 / 3 would be rounded to 16 bits
    inside = (a > 0) & (a < torch.inf)
    b = torch.where(inside, a, 1.0)
    r = b ** (1 / 3)
    closer = r - (r - b / (r * r)) / 3  # Newton's step: 1 / 3 is rounded
    return torch.copysign(torch.where(inside, closer, a ** (1 / 3)).to(x.dtype), x)


def round_half_up(x: Tensor) -> Tensor:
    """Each element rounded to an integer, halves away from 0, as C's ``round`` does."""
    whole = torch.trunc(x)
    return whole + torch.copysign(((x - whole).abs() >= 0.5).to(x.dtype), x)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a * b + c


def softplus(x: Tensor) -> Tensor:
    return -F.logsigmoid(-x)


def normal_pdf(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-math.sqrt(0.5) * x)


HELPERS: dict[str, Callable[..., Tensor]] = {
    "min": minimum,
    "max": maximum,
    "clamp": clamp,
    "cbrt": cbrt,
    "round": round_half_up,
    "fma": fma,
    "softplus": softplus,
    "normal_pdf": normal_pdf,
    "normal_cdf": normal_cdf,
    "x_minus_tanh": exact_tanhshrink,
}
