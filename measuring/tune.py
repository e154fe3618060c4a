"""Measures the work per element of each activation on a GPU, for ``work=`` in the table of activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels.loader import load as loader
from ..kernels.loader.errors import BuildError
from ..kernels.loader.plan import make_plan
from ..kernels.loader.prebuild import prebuild
from ..kernels.loader.source import KernelSource, Work
from .timing import medians

__all__ = ["tune"]

LEVELS = (1, 2, 3, 4, 5)
ELEMENTS = 4096 * 393216
DTYPES = (torch.float32, torch.bfloat16)  # the level found for them is used for all dtypes


def tune(sources: Sequence[tuple[KernelSource, tuple[float, ...]]]) -> int:
    """Times the kernels of activations at each level of work, and prints their share of torch.clone's bandwidth in percent.

    Measured are forward, keeping a bit or the input, and backward with the default ``save``; backward that reads two tensors is
    compared with torch.add. The level in the table is marked with ``*``. Returns the exit code.

    Args:
        sources: the kernel files, with the values of their parameters.

    Raises:
        BuildError: there is no GPU, or nothing can be built.
    """
    variants = {(source.name, level): source._replace(work=Work(level, level)) for source, _ in sources for level in LEVELS}
    plans = [make_plan(variant) for variant in variants.values()]
    if not plans[0].gpus:
        raise BuildError("tune measures on a GPU, and there is none in sight")
    if prebuild(plans):
        return 1
    for dtype in DTYPES:
        n = min(ELEMENTS, torch.cuda.mem_get_info()[0] // (6 * dtype.itemsize))
        x, dy = (torch.randn(n, device="cuda", dtype=dtype) for _ in range(2))
        print(f"\n{str(dtype).removeprefix('torch.')}, {n} elements", flush=True)
        for source, params in sources:
            levels = {level: variants[source.name, level] for level in LEVELS}
            print(_line(source, params, levels, x, dy), flush=True)
    return 0


def _line(source: KernelSource, params: tuple[float, ...], variants: dict[int, KernelSource], x: Tensor, dy: Tensor) -> str:
    signature, others = source.signature, _others(source, x)
    bit = "bit" in signature.saves and signature.gradients == 1
    names = {level: loader.load(variant).name for level, variant in variants.items()}
    forward = "forward_bit" if bit else "forward"
    backward = "backward_from_bit" if bit else "backward"
    wanted = [(1 << signature.gradients) - 1] if signature.gradients > 1 else []
    kept = torch.zeros((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device) if bit else x

    def call(level: int, kind: str, *tensors: Tensor) -> Callable[[int], object]:
        operator, last = getattr(torch.ops.jitact, f"{names[level]}_{kind}").default, wanted if kind == "backward" else []
        return lambda _: operator(*tensors, *others, *params, *last)

    found = {"forward": {level: call(level, forward, x) for level in names}}
    found["backward"] = {level: call(level, backward, dy, kept) for level in names}
    line = f"{source.name:16}"
    for direction, calls in found.items():
        ceiling = (lambda _: x.clone()) if bit or direction == "forward" else (lambda _: torch.add(x, dy))
        ms = medians([x], {0: ceiling} | calls)
        line += f"  {direction}"
        for level in calls:
            line += f"  {level}{'*' if level == getattr(source.work, direction) else ':'} {100 * ms[0] / ms[level]:5.1f}"
    return line


def _others(source: KernelSource, x: Tensor) -> list[Tensor]:
    """The tensors of the operands that are not elementwise: one value each, and the seed of random numbers."""
    tensors = [torch.full((1,), 0.25, dtype=x.dtype, device=x.device) for _ in source.signature.of("channel", "row")]
    return tensors + ([torch.ones(1, dtype=torch.int64, device=x.device)] if source.signature.of("random") else [])
