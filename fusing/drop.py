"""Dropout by PyTorch with the random numbers that kernels draw, for second derivatives and transforms."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..configs import run_operator
from ..kernels import KernelSource
from ..records import Activation
from ..records.dtypes import wider

__all__ = ["dropped", "kept"]

STEPS = {torch.float64: 2.0**52, torch.float32: 2.0**23, torch.float16: 2.0**16, torch.bfloat16: 2.0**16}
"""The probability is rounded to a multiple of 1 / steps: ``Random<T>::steps`` in random.cuh."""


def dropped(value: Tensor, p: float, keep: Callable[[int, float], Tensor] | None, stream: int) -> Tensor:
    """Dropout of ``value`` with probability ``p``.

    Args:
        value: the tensor.
        p: the probability.
        keep: a function of the random stream and ``p`` that returns the factors; if None, PyTorch draws a mask.
        stream: the index of dropout's operand among the random ones.
    """
    return F.dropout(value, p) if keep is None else value * keep(stream, p).to(value.dtype)


def kept(like: Tensor, seed: Tensor, stream: int, p: float) -> Tensor:
    """The factors of dropout, 0 or 1 / (1 - p), of a kernel that draws from ``seed`` for a tensor like ``like``."""
    return torch.ops.jitact.dropout_kept(like, seed, stream, p)


def _kept(like: Tensor, seed: Tensor, stream: int, p: float) -> Tensor:
    """The implementation of :func:`kept`."""
    ones = torch.ones_like(like)
    mask = run_operator(_mask(stream), ones, seed, p) != 0
    steps = STEPS[like.dtype]
    share = p if like.dtype is torch.float64 else torch.tensor(p, dtype=torch.float32).item()  # as kernels round it
    parts = round(share * steps)
    return mask.to(_wide(like)) * (steps / (steps - parts) if parts < steps else 0.0)


def _wide(like: Tensor) -> torch.dtype:
    return wider(like.dtype)


# An operator, so that graphs and transforms call it whole. It has no gradient.
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
    """A record that applies dropout with the numbers of a random stream, skipping those before it."""
    numbers = ", ".join(f"Random<T> random{k}" for k in range(stream + 1))
    text = f"""#include "elementwise.cuh"
ELEMENTWISE T forward(T x, {numbers}, Number<T> p) {{ return dropout(x, random{stream}, p); }}
"""
    name = f"dropout_mask_{stream}"
    return Activation(name, name, "", F.dropout, params=(("p", 0.5),), kernel=KernelSource(name, text, f"<{name}>"))
