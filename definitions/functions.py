"""The functions that an expression may call, as PyTorch computes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..references import exact_tanhshrink

__all__ = ["FUNCTIONS", "HELPERS", "IN_MATH", "Function"]


# What PyTorch has under no name. Where two arguments of min and max are equal, the gradient is the second one's, as in
# the kernel.


def minimum(a: Tensor, b: Tensor | float) -> Tensor:
    return torch.where((a < b) | a.isnan(), a, b)


def maximum(a: Tensor, b: Tensor | float) -> Tensor:
    return torch.where((a > b) | a.isnan(), a, b)


def clamp(x: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    x = torch.where((x > low) | x.isnan(), x, low)
    return torch.where((x < high) | x.isnan(), x, high)


def cbrt(x: Tensor) -> Tensor:
    return torch.sign(x) * x.abs() ** (1 / 3)


def round_half_up(x: Tensor) -> Tensor:
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


class Function(NamedTuple):
    """A function of kernels/math.cuh or number.cuh: how many arguments it takes, and what it is called in Python.

    ``numbers`` are the positions of arguments that may be plain numbers in Python.
    """

    arity: int
    python: str
    numbers: tuple[int, ...] = ()


IN_TORCH_TOO = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "floor ceil trunc erf erfc sigmoid abs"
)
FUNCTIONS: dict[str, Function] = {
    **{name: Function(1, f"torch.{name}") for name in IN_TORCH_TOO.split()},
    **{name: Function(helper.__code__.co_argcount, helper.__name__) for name, helper in HELPERS.items()},
    "min": Function(2, "minimum", (1,)),
    "max": Function(2, "maximum", (1,)),
    "clamp": Function(3, "clamp", (1, 2)),
    "rint": Function(1, "torch.round"),
    "pow": Function(2, "torch.pow", (0, 1)),
    "fmod": Function(2, "torch.fmod", (1,)),
    "atan2": Function(2, "torch.atan2"),
    "hypot": Function(2, "torch.hypot"),
    "copysign": Function(2, "torch.copysign"),
}

IN_MATH_TOO = (
    "exp expm1 log log2 log10 log1p sqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc pow fmod atan2 "
    "hypot copysign"
)
IN_MATH = frozenset(IN_MATH_TOO.split())
"""Those that Python's ``math`` has under the same name, with floats as results."""
