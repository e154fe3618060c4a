"""Inputs of KernelBench's size, or of the size set in environment variables."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ..kernels.loader import log

__all__ = ["BATCH_SIZE", "DIM", "KernelBenchForm", "kernelbench_input"]

MUCH = 10**9  # bytes above which inputs on a CPU are worth a warning


_wrong: list[str] = []  # what is wrong with the variables; an error only where inputs are made


def _size(variable: str, usual: int) -> int:
    text = os.environ.get(variable) or str(usual)
    if not text.isdecimal() or int(text) == 0:
        _wrong.append(f"{variable} must be a positive number, got {text!r}")
        return usual
    return int(text)


BATCH_SIZE = _size("JITACT_BATCH_SIZE", 4096)
DIM = _size("JITACT_DIM", 393216)


def kernelbench_input(batch_size: int, dim: int, device: str | torch.device, dtype: torch.dtype) -> Tensor:
    """A random normal tensor ``(batch_size, dim)``; logs a warning if it takes over a gigabyte of a CPU's memory.

    Raises:
        TypeError: the sizes are no integers, or ``dtype`` is no floating dtype.
        ValueError: a size is negative; or JITACT_BATCH_SIZE or JITACT_DIM is set, and is no positive number.
    """
    if _wrong:
        raise ValueError(_wrong[0])
    if any([not isinstance(size, int) or isinstance(size, bool) for size in (batch_size, dim)]):
        raise TypeError(f"get_inputs: batch_size and dim are integers, got {batch_size!r} and {dim!r}")
    if batch_size < 0 or dim < 0:
        raise ValueError(f"get_inputs: batch_size and dim cannot be negative, got {batch_size} and {dim}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"get_inputs: dtype is a floating torch.dtype, got {dtype!r}")
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
    """The methods that KernelBench calls on a ``ModelNew`` class to make inputs."""

    @classmethod
    def get_inputs(
        cls,
        batch_size: int = BATCH_SIZE,
        dim: int = DIM,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> list[Tensor]:
        """Random normal tensors in KernelBench's form, one for each argument of forward.

        They have 6.4 GB each, in float32, or JITACT_BATCH_SIZE x JITACT_DIM elements if these are set; a warning is logged for
        more than 1 GB on a CPU. A gated activation gets one tensor that holds both, twice as wide.
        """
        return [kernelbench_input(batch_size, width, device, dtype) for width in cls._widths(dim)]

    @classmethod
    def _widths(cls, dim: int) -> list[int]:
        """The widths of the tensors that forward takes, for a requested width of ``dim``."""
        return [dim]
