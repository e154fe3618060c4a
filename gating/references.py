"""Gated activations written in PyTorch. They take the two tensors in the order of the kernel's operands, then the parameters.

``rounding="unfused"`` rounds as these do in eager mode, after each operation. The ``exact_*`` forms keep full relative accuracy
in float64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import references as ref
from ..references import at_most, bounded

__all__ = [
    "bilinear",
    "clamped_swiglu",
    "exact_clamped_swiglu",
    "exact_geglu",
    "exact_geglu_tanh",
    "exact_glu",
    "exact_quick_geglu",
    "exact_situ_glu",
    "exact_swiglu",
    "exact_swiglu_step",
    "fatrelu_glu",
    "geglu",
    "geglu_tanh",
    "glu",
    "quick_geglu",
    "reglu",
    "situ_glu",
    "sreglu",
    "swiglu",
    "swiglu_step",
]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Llama's."""
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """With the exact gelu."""
    return F.gelu(gate) * up


def geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """Gemma's."""
    return F.gelu(gate, approximate="tanh") * up


def quick_geglu(gate: Tensor, up: Tensor) -> Tensor:
    """TransformerEngine's qgeglu."""
    return ref.quick_gelu(gate) * up


def reglu(gate: Tensor, up: Tensor) -> Tensor:
    """With relu."""
    return F.relu(gate) * up


def sreglu(gate: Tensor, up: Tensor) -> Tensor:
    """With the square of relu."""
    return ref.relu2(gate) * up


def bilinear(gate: Tensor, up: Tensor) -> Tensor:
    """With no activation."""
    return gate * up


def glu(up: Tensor, gate: Tensor) -> Tensor:
    """``torch.nn.GLU``'s halves."""
    return up * torch.sigmoid(gate)


def fatrelu_glu(gate: Tensor, up: Tensor, threshold: float) -> Tensor:
    """vLLM's fatrelu_and_mul."""
    return F.threshold(gate, threshold, 0.0) * up


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float, beta: float) -> Tensor:
    """gpt-oss'."""
    gate, up = at_most(gate, limit), bounded(up, -limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def swiglu_step(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """vLLM's swiglustep_and_mul."""
    return at_most(F.silu(gate), limit) * bounded(up, -limit, limit)


def situ_glu(gate: Tensor, up: Tensor, beta: float, beta2: float) -> Tensor:
    """SGLang's SituAndMul."""
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (beta2 * torch.tanh(up / beta2) if beta2 else up)


def exact_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """By the exact silu."""
    return ref.exact_silu(gate) * up


def exact_geglu(gate: Tensor, up: Tensor) -> Tensor:
    """By erfc."""
    return ref.exact_gelu(gate) * up


def exact_geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """By sigmoid."""
    return ref.exact_gelu_tanh(gate) * up


def exact_quick_geglu(gate: Tensor, up: Tensor) -> Tensor:
    """By the exact quick_gelu."""
    return ref.exact_quick_gelu(gate) * up


def exact_glu(up: Tensor, gate: Tensor) -> Tensor:
    """By the exact sigmoid."""
    return up * ref.exact_sigmoid(gate)


def exact_clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float, beta: float) -> Tensor:
    """By the exact sigmoid."""
    gate, up = at_most(gate, limit), bounded(up, -limit, limit)
    return gate * ref.exact_sigmoid(alpha * gate) * (up + beta)


def exact_swiglu_step(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """By the exact silu."""
    return at_most(ref.exact_silu(gate), limit) * bounded(up, -limit, limit)


def _exact_tanh(x: Tensor) -> Tensor:
    """With an accurate gradient where tanh rounds to 1."""
    left = x < 0
    u = torch.where(left, -x, x)
    e = torch.exp(-2 * u)
    y = torch.where(u < 0.5, -torch.expm1(-2 * at_most(u, 0.5)), 1 - e) / (1 + e)
    return torch.where(left, -y, y)


def exact_situ_glu(gate: Tensor, up: Tensor, beta: float, beta2: float) -> Tensor:
    """By the exact sigmoid and tanh."""
    capped = beta2 * _exact_tanh(up / beta2) if beta2 else up
    return beta * _exact_tanh(gate / beta) * ref.exact_sigmoid(gate) * capped
