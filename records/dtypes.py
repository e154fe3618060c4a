"""Dtypes of computation."""

from __future__ import annotations

import torch

__all__ = ["wider"]


def wider(dtype: torch.dtype, other: torch.dtype = torch.float32) -> torch.dtype:
    """What PyTorch promotes two floating dtypes to, or what one is computed in.

    Not by torch.promote_types, of which torch.export's programs keep each call.
    """
    if dtype is other:
        return dtype
    return torch.float64 if torch.float64 in (dtype, other) else torch.float32
