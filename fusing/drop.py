"""Dropout in PyTorch with the numbers that kernels draw, for second derivatives and transforms."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..configs import run_operator
from ..kernels import KernelSource
from ..records import Activation

__all__ = ["dropped", "kept"]

STEPS = {torch.float64: 2.0**52, torch.float32: 2.0**23, torch.float16: 2.0**16, torch.bfloat16: 2.0**16}
"""How finely the probability is told: ``Random<T>::steps`` in random.cuh."""


def dropped(value: Tensor, p: float, keep: Callable[[int, float], Tensor] | None, stream: int) -> Tensor:
    """``value``, dropped with probability ``p``.

    Args:
        value: what is dropped.
        p: the probability.
        keep: gives, of a stream of random numbers and a probability, what values are multiplied by; if None, numbers are drawn.
        stream: which of the random operands.
    """
    return F.dropout(value, p) if keep is None else value * keep(stream, p).to(value.dtype)


def kept(like: Tensor, seed: Tensor, stream: int, p: float) -> Tensor:
    """What dropout multiplies by, the values of a kernel that draws for ``like`` from ``seed``: 0, or 1 / (1 - p)."""
    return torch.ops.jitact.dropout_kept(like, seed, stream, p)


def _kept(like: Tensor, seed: Tensor, stream: int, p: float) -> Tensor:
    """:func:`kept` of tensors in memory."""
    ones = torch.ones_like(like)
    mask = run_operator(_mask(stream), ones, seed, p) != 0
    steps = STEPS[like.dtype]
    share = p if like.dtype is torch.float64 else torch.tensor(p, dtype=torch.float32).item()  # as kernels have it
    parts = round(share * steps)
    return mask.to(_wide(like)) * (steps / (steps - parts) if parts < steps else 0.0)


def _wide(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


# One operator, which graphs and transforms hold as it is: it has no gradient.
_library = torch.library.Library("jitact", "FRAGMENT")
_library.define(
    "dropout_kept(Tensor like, Tensor seed, int stream, float p) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
_library.impl("dropout_kept", _kept, "CompositeExplicitAutograd")
_library.impl("dropout_kept", torch.library.fallthrough_kernel, "Autograd")
_library.impl("dropout_kept", lambda like, *_: torch.empty_like(like, dtype=_wide(like)), "Meta")


@cache
def _mask(stream: int) -> Activation:
    """Ones, dropped by the numbers of a stream."""
    numbers = ", ".join(f"Random<T> random{k}" for k in range(stream + 1))
    text = f"""#include "elementwise.cuh"
ELEMENTWISE T forward(T x, {numbers}, Number<T> p) {{ return dropout(x, random{stream}, p); }}
"""
    name = f"dropout_mask_{stream}"
    return Activation(name, name, "", F.dropout, params=(("p", 0.5),), kernel=KernelSource(name, text, f"<{name}>"))
