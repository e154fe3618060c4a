"""The samples of ``check``: representative inputs of a dtype, and incoming gradients."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable

import torch
from torch import Tensor

from .ulp import every_16bit_value

__all__ = ["incoming", "inputs", "kinks"]

SAMPLE = 2**15
USUAL = 100.0  # the evenly spread part of a sample is within +-100
NUMBER = re.compile(r"(?<![\w.])(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|^[ \t]*#[^\n]*", re.DOTALL | re.MULTILINE)
MOST_KINKS = 48


def kinks(text: str, params: Iterable[float]) -> list[float]:
    """Places where a formula may have a kink: the numbers in its kernel file, its parameters and their quotients."""
    params = [abs(p) for p in params if 0 < abs(p) < math.inf]
    written = [float(number) for number in NUMBER.findall(COMMENT.sub("", text))]
    found = [*params, *(a / b for a, b in itertools.permutations(params, 2)), *written]
    return list(dict.fromkeys(k for k in found if 0 < k < math.inf))[:MOST_KINKS]


def inputs(dtype: torch.dtype, low: float, high: float, near: Iterable[float], device: torch.device) -> Tensor:
    """Finite inputs from ``low`` to ``high``, ascending. For a 16-bit type, these are all of its values.

    For a wider type: all values of both 16-bit types; random values evenly spread between -100 and 100, or the requested part
    of that; random bit patterns, which cover all magnitudes; and sequences that converge to the numbers ``near`` and their
    negatives.
    """
    own = [dtype] if dtype.itemsize == 2 else [torch.float16, torch.bfloat16]
    values = [every_16bit_value(each).to(dtype) for each in own]
    if dtype.itemsize > 2:
        generator, info = torch.Generator().manual_seed(0), torch.finfo(dtype)
        ends = [max(low, -USUAL), min(high, USUAL)]
        if ends[0] >= ends[1]:  # the requested range is outside of +-100
            ends = [max(low, info.min / 4), min(high, info.max / 4)]
        values.append(torch.empty(SAMPLE, dtype=dtype).uniform_(*ends, generator=generator))
        whole = torch.int64 if dtype is torch.float64 else torch.int32
        limits = torch.iinfo(whole)
        values.append(torch.randint(limits.min, limits.max, (SAMPLE,), generator=generator, dtype=whole).view(dtype))
        steps = torch.pow(2.0, -torch.arange(1, 1 - math.log2(info.eps), dtype=torch.float64))
        for kink in near:
            sequence = kink * torch.cat([1 - steps, torch.ones(1, dtype=torch.float64), 1 + steps]).to(dtype)
            values += [sequence, -sequence]
    x = torch.cat(values)
    return x[(x >= low) & (x <= high) & x.isfinite()].sort().values.to(device)


def incoming(slope: Tensor, dtype: torch.dtype, floor: float) -> Tensor:
    """Random incoming gradients ``dy`` of both signs and many magnitudes, such that ``dy * slope`` stays in the normal range.

    Args:
        slope: the slopes that they are multiplied by, in float64.
        dtype: of the gradients.
        floor: slopes smaller than this are treated as this, as in the measure of their errors.
    """
    info, generator = torch.finfo(dtype), torch.Generator().manual_seed(1)
    bits = math.log2(info.max)
    spread = torch.rand(slope.shape, generator=generator, dtype=torch.float64)
    far = torch.rand(slope.shape, generator=generator, dtype=torch.float64) < 0.25
    magnitude = torch.exp2(torch.where(far, spread * bits * 0.7, (spread - 0.5) * 8)).to(slope.device)
    size = slope.abs().nan_to_num(1.0)
    fits = (magnitude.clamp(min=1) * size < info.max / 4) & (magnitude * size.clamp(min=floor) > info.tiny / info.eps)
    sign = torch.randint(0, 2, slope.shape, generator=generator).to(slope.device) * 2 - 1
    return (torch.where(fits, magnitude, 1.0) * sign).to(dtype)
