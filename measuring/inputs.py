"""Inputs of the size that KernelBench measures at, or of another that the environment names."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ..kernels.loader import log

__all__ = ["BATCH_SIZE", "DIM", "KernelBenchForm", "kernelbench_input"]

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


class KernelBenchForm:
    """What KernelBench calls of a class, its ``ModelNew``, to make inputs."""

    @classmethod
    def get_inputs(
        cls,
        batch_size: int = BATCH_SIZE,
        dim: int = DIM,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> list[Tensor]:
        """Random normal tensors, one or as many as forward takes, as KernelBench wants it.

        Of 6.4 GB each, in float32, or of JITACT_BATCH_SIZE x JITACT_DIM if these are set; many on a CPU are told of. A gated
        activation gets one tensor that holds both, twice as wide.
        """
        return [kernelbench_input(batch_size, width, device, dtype) for width in cls._widths(dim)]

    @classmethod
    def _widths(cls, dim: int) -> list[int]:
        """Of the tensors that forward takes, where ``dim`` is asked for."""
        return [dim]
