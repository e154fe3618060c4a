"""Inputs of the size that KernelBench measures at, or of another that the environment names."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ..kernels.loader import log

__all__ = ["BATCH_SIZE", "DIM", "kernelbench_input"]

MUCH = 10**9  # bytes that a CPU's memory may not have to spare


def _size(variable: str, usual: int) -> int:
    text = os.environ.get(variable) or str(usual)
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{variable} must be a positive number, got {text!r}")
    return int(text)


BATCH_SIZE = _size("JITACT_BATCH_SIZE", 4096)
DIM = _size("JITACT_DIM", 393216)


def kernelbench_input(batch_size: int, dim: int, device: str | torch.device, dtype: torch.dtype) -> Tensor:
    """A random normal tensor ``(batch_size, dim)``; says so where it takes over a gigabyte of a CPU's memory."""
    amount = batch_size * dim * dtype.itemsize
    if torch.device(device).type == "cpu" and amount > MUCH:
        log.configure()
        log.logger.warning(
            "get_inputs() makes %d x %d numbers, %.1f GB, on the CPU; batch_size= and dim=, or JITACT_BATCH_SIZE and "
            "JITACT_DIM, make it fewer",
            batch_size,
            dim,
            amount / 1e9,
        )
    return torch.randn(batch_size, dim, device=device, dtype=dtype)
