"""Exact results of row activations, in float64."""

from __future__ import annotations

from torch import Tensor

__all__ = ["exact_gradient", "exact_output"]


def exact_output(name: str, t: Tensor, dim: int = -1) -> Tensor:
    """``softmax`` or ``log_softmax`` of ``t``. The largest term is added last, by log1p, as even float64 loses small sums."""
    t = t.double()
    highest, place = t.max(dim, keepdim=True)
    terms = (t - highest).exp()
    rest = terms.scatter(dim, place, 0.0).sum(dim, keepdim=True)
    return t - highest - rest.log1p() if name == "log_softmax" else terms / (1 + rest)


def exact_gradient(name: str, dy: Tensor, y: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    """The gradient computed from an output, and the sum of the magnitudes of its terms, the unit of its rounding errors."""
    dy, y = dy.double(), y.double()
    if name == "log_softmax":
        p = y.exp()
        return dy - p * dy.sum(dim, keepdim=True), dy.abs() + p * dy.abs().sum(dim, keepdim=True)
    return y * (dy - (dy * y).sum(dim, keepdim=True)), y * (dy.abs() + (dy.abs() * y).sum(dim, keepdim=True))
