"""Where check looks: inputs that stand for all of a dtype's, and incoming gradients."""

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
USUAL = 100.0  # within it, a sample is evenly spread
NUMBER = re.compile(r"(?<![\w.])(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|^[ \t]*#[^\n]*", re.DOTALL | re.MULTILINE)
MOST_KINKS = 48


def kinks(text: str, params: Iterable[float]) -> list[float]:
    """Where a formula may have a kink: at the numbers in its kernel file, at its parameters and their quotients."""
    params = [abs(p) for p in params if 0 < abs(p) < math.inf]
    written = [float(number) for number in NUMBER.findall(COMMENT.sub("", text))]
    found = [*params, *(a / b for a, b in itertools.permutations(params, 2)), *written]
    return list(dict.fromkeys(k for k in found if 0 < k < math.inf))[:MOST_KINKS]


def inputs(dtype: torch.dtype, low: float, high: float, near: Iterable[float], device: torch.device) -> Tensor:
    """Finite inputs from ``low`` to ``high``, ascending: all of a 16-bit type.

    Of a wider one, all that are 16-bit values too, random ones evenly spread between -100 and 100 (or what of that is asked
    for), random bit patterns, which are near 0 and far out to the ends of the range, and the neighbourhood of the numbers
    ``near`` and of their negatives, ever closer.
    """
    own = [dtype] if dtype.itemsize == 2 else [torch.float16, torch.bfloat16]
    values = [every_16bit_value(each).to(dtype) for each in own]
    if dtype.itemsize > 2:
        generator, info = torch.Generator().manual_seed(0), torch.finfo(dtype)
        ends = [max(low, -USUAL), min(high, USUAL)]
        if ends[0] >= ends[1]:  # all of it is further out
            ends = [max(low, info.min / 4), min(high, info.max / 4)]
        values.append(torch.empty(SAMPLE, dtype=dtype).uniform_(*ends, generator=generator))
        whole = torch.int64 if dtype is torch.float64 else torch.int32
        limits = torch.iinfo(whole)
        values.append(torch.randint(limits.min, limits.max, (SAMPLE,), generator=generator, dtype=whole).view(dtype))
        steps = torch.pow(2.0, -torch.arange(1, 1 - math.log2(info.eps), dtype=torch.float64))
        for kink in near:
            beside = kink * torch.cat([1 - steps, torch.ones(1, dtype=torch.float64), 1 + steps]).to(dtype)
            values += [beside, -beside]
    x = torch.cat(values)
    return x[(x >= low) & (x <= high) & x.isfinite()].sort().values.to(device)


def incoming(slope: Tensor, dtype: torch.dtype, floor: float) -> Tensor:
    """Random incoming gradients ``dy`` of both signs, from small to large, with which ``dy * slope`` stays in the range.

    Args:
        slope: what will be multiplied with them, in float64.
        dtype: of the gradients.
        floor: the magnitude below which a slope's error counts as one there.
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
