"""Formulas that replace those of kernel files in graphs: shorter gradients, and float32 forwards that need no fma.

Inductor recomputes what it fuses in each kernel that needs it, so these are bound by instructions, not by memory. The gradients
are as exact as the kernels' in 16 bits, and in float32 in ulp at 1, the unit of a gradient's error. float64 keeps the kernels'.

exp turns absolute errors of an exponent into relative ones. Kernels recover an exponent's rounding error by fma, which torch
lacks. Here the exponent is split into a product of few digits, which is exact, and a small rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .precisions import LOG2E, Narrow, Single, Value, inverse, leading, least, most, polynomial, scaled_sigmoid

__all__ = ["shorter"]

QUICK = 1.702 * LOG2E  # for exp2
QUICK_FEW = round(QUICK * 2**9) / 2**9
K1 = 2 * math.sqrt(2 / math.pi)  # of gelu_tanh
K3 = 0.044715 * K1
P1, P3 = K1 * LOG2E, K3 * LOG2E
P1_FEW, P3_FEW = round(P1 * 2**13) / 2**13, round(P3 * 2**7) / 2**7
SILU_SHIFT = 3.25  # keeps exp(-x) finite until x exp(x) is 0; its few digits leave -x - 3.25 exact
SHIFT = 4  # the same for exp2

TAIL = (-2.277514925e-2, -1.088446125e-1, 5.132944705e-2, 2.919620809e-1, 1.696298017e-1, -1.243393667, 1.250000020)
"""Coefficients of Q(t) (t + 5/2) / exp(-t^2 / 2) as a polynomial in t / (t + 5/2). Their error in a gradient is 2^-27 of 1."""

EXPM1 = (7.204961622e-3, 4.132744598e-2, 1.666243288e-1, 4.999981307e-1, 9.999999866e-1)
"""Coefficients of (exp(x) - 1) / x from -0.35 to 0."""

SELU_RIGHT = 1.0507009873554804934
SELU_LEFT = SELU_RIGHT * 1.6732632423543772848


def shorter(dtype: torch.dtype, fast_math: bool) -> Mapping[str, Mapping[str, Callable]]:
    """Functions that replace those of the library's kernel files for elements of ``dtype``: by file, then by function."""
    if dtype is torch.float64:
        return {}
    found = {name: {"backward": backward} for name, backward in _gradients(dtype).items()}
    if dtype is torch.float32 and not fast_math:
        found["silu"]["forward"] = _silu
        found["mish"]["forward"] = lambda x: Single.times_tanh_softplus(most(x, -1000.0), x)
        found["gelu_tanh"]["forward"] = _gelu_tanh
        found["selu"]["forward"] = _selu
        found["quick_gelu"] = {"forward": _quick_gelu}
    return found


def _silu(x: Tensor) -> Tensor:
    return scaled_sigmoid(most(x, -1000.0), torch.exp(-x - SILU_SHIFT), math.exp(-SILU_SHIFT))  # avoids 0 * inf = NaN


def _selu(x: Tensor) -> Tensor:
    near = x * polynomial(x, *[SELU_LEFT * c for c in EXPM1])
    left = torch.where(x > -0.35, near, SELU_LEFT * torch.exp(x) - SELU_LEFT)
    return torch.where(x > 0, SELU_RIGHT * x, left)


def _quick_gelu(x: Tensor) -> Tensor:
    c = least(most(x, -64.0), 64.0)  # constant beyond these; avoids 0 * inf = NaN
    a = leading(c, 2.0**-5)
    e = torch.exp2(a * -QUICK_FEW - SHIFT) * torch.exp2((a - c) * QUICK - a * (QUICK - QUICK_FEW))
    return scaled_sigmoid(most(x, -64.0), e, 2.0**-SHIFT)


def _gelu_tanh(x: Tensor) -> Tensor:
    """x sigmoid(v), where v(x) = v(a) + (x - a) (K1 + K3 (x^2 + x a + a^2)) for an a of few digits."""
    c = least(most(x, -10.5), 10.5)
    a = leading(c, 2.0**-3)
    u = a * a
    low = (a - c) * (P3 * (c * c + a * (a + c)) + P1) - a * (u * (P3 - P3_FEW) + (P1 - P1_FEW))
    e = torch.exp2(a * (u * -P3_FEW - P1_FEW) - SHIFT) * torch.exp2(low)
    return scaled_sigmoid(most(x, -10.5), e, 2.0**-SHIFT)


def _gradients(dtype: torch.dtype) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """``backward(dy, x)`` by activation. Where a slope is constant, its varying term is left out: it may be 0 * inf = NaN."""
    narrow = dtype.itemsize == 2

    def sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
        """s = sigmoid(x) and its slope; s (1 - s), times x, would be too coarse in float32, and where s is not exactly 1."""
        e = torch.exp2(-LOG2E * x)
        s = inverse(1 + e)
        return s, e * s * s

    def silu(dy: Tensor, x: Tensor) -> Tensor:
        if narrow:
            s, slope = sigmoid(x)
            return dy * torch.where(slope > 0, s + x * slope, s)
        e = torch.exp2(-LOG2E * x)
        s = torch.reciprocal(1 + e)  # inverse() and a comparison of the slope serialise a GPU's loads: a fifth slower
        return dy * torch.where(x.abs() < 87.0, s + x * (e * s * s), s)

    def gelu(dy: Tensor, x: Tensor) -> Tensor:
        if narrow:
            t = x.abs()
            bell = Narrow.normal_pdf(t)
            left = torch.where(bell > 0, Narrow.normal_tail(t) - t * bell, bell)  # the slope at -t; at t it is 1 - left
            return dy * torch.where(x < 0, left, 1 - left)
        t = least(x.abs(), 40.0)  # avoids 0 * inf = NaN
        r = inverse(t + 2.5)
        left = torch.exp2(t * t * (-0.5 * LOG2E)) * (r * polynomial(t * r, *TAIL) - t * (1 / math.sqrt(2 * math.pi)))
        return dy * torch.where(x < 0, left, 1 - left)

    def gelu_tanh(dy: Tensor, x: Tensor) -> Tensor:
        u = x * x
        s, slope = sigmoid(x * (K3 * u + K1))
        return dy * torch.where(slope > 0, s + x * slope * (3 * K3 * u + K1), s)

    def mish(dy: Tensor, x: Tensor) -> Tensor:
        c = least(x, 20.0)  # the slope is 1 beyond this, and n would overflow
        e = torch.exp2(c * LOG2E)
        n = e * (e + 2)
        r = inverse(n + 2)
        return dy * torch.where(e > 0, r * (n + 4 * ((n - e) * r * c)), e)

    def selu(dy: Tensor, x: Tensor) -> Tensor:
        return dy * (torch.where(x > 0, SELU_RIGHT, SELU_LEFT) * torch.exp2(LOG2E * least(x, 0.0)))

    def softplus(dy: Tensor, x: Tensor, beta: Value, threshold: Value) -> Tensor:
        u = beta * x
        b = 1 + torch.exp2(-LOG2E * u)
        return torch.where(u > threshold, dy, dy * (inverse(b) if narrow else torch.reciprocal(b)))

    return {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "mish": mish, "selu": selu, "softplus": softplus}
