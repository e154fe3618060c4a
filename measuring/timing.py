"""Timing of calls, in alternation and on inputs larger than any cache; and the ceiling of the memory bandwidth."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..registry import REGISTRY
from .commandline import first_line, say
from .text import DIRECTIONS

__all__ = ["Subject", "ceilings", "kept_bytes", "lap", "make_inputs", "medians", "release", "timings"]

CACHE = {"cuda": 2**28, "cpu": 2**27}  # bytes, more than any cache holds; inputs are rotated among so many
SMALL = 2**22  # bytes; below this a single call is too short to time
RUNS = {"cuda": (9, 51, 0.08), "cpu": (5, 21, 0.15)}  # fewest and most runs of each timing, and the seconds to spend on it
AHEAD = 2**19  # clocks, a quarter of a millisecond: the GPU sleeps before a timed call, to hide the host's launch overhead

Key = TypeVar("Key")


class Subject:
    """A module to time. The methods take the number of a call, which rotates the inputs."""

    def __init__(self, module: nn.Module, xs: list[Tensor], dys: list[Tensor]) -> None:
        """Takes the inputs, and as many incoming gradients."""
        self.module, self.xs, self.dys = module, xs, dys
        self.leaves = [x.detach().requires_grad_() for x in xs]
        self.parameters = list(module.parameters())
        self.graphs: list[Tensor] = []

    def forward(self, i: int) -> Tensor:
        """Forward without autograd."""
        with torch.no_grad():
            return self.module(self.xs[i % len(self.xs)])

    def forward_save(self, i: int) -> Tensor:
        """Forward with autograd recording."""
        return self.module(self.leaves[i % len(self.xs)])

    def backward(self, i: int) -> tuple[Tensor, ...]:
        """The gradient of the input, and of the parameters if there are any."""
        i %= len(self.xs)
        self.graphs = self.graphs or [self.module(leaf) for leaf in self.leaves]
        return torch.autograd.grad(self.graphs[i], [self.leaves[i], *self.parameters], self.dys[i], retain_graph=True)

    def free(self) -> None:
        """Frees the graphs by a last backward: a compiled graph whose backward never frees its tensors would leak them."""
        for graph, leaf, dy in zip(self.graphs, self.leaves, self.dys, strict=True):
            torch.autograd.grad(graph, [leaf, *self.parameters], dy)
        self.graphs = []

    def kept(self) -> float:
        """Bytes per element that autograd keeps for backward."""
        return kept_bytes(lambda: self.module(self.leaves[0])) / self.leaves[0].numel()

    def trouble(self) -> str | None:
        """Runs every direction once. Returns why the module cannot take part, such as a missing dtype or lack of memory."""
        try:
            for direction in DIRECTIONS:
                getattr(self, direction)(0)
            self.kept()
        except torch.OutOfMemoryError:
            return "out of memory"
        except Exception as error:  # compilers raise errors of many types
            return first_line(error)
        return None


def kept_bytes(call: Callable[[], object]) -> int:
    """Bytes that autograd keeps for the backward of a call."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> None:  # returns None: a returned output would be held by its own graph, a reference cycle
        sizes.append(tensor.numel() * tensor.itemsize)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda _: None):
        call()
    return sum(sizes)


def lap(device: torch.device, call: Callable[[int], object], first: int, count: int) -> Callable[[], float]:
    """Runs ``count`` calls from number ``first`` on.

    Returns a function that waits for them and returns the milliseconds of one.
    """
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if count == 1:  # measures the GPU's time alone; for several short calls, the host's overhead is part of the time
            torch.cuda._sleep(AHEAD)
        start.record()
        for i in range(first, first + count):
            call(i)
        end.record()

        def milliseconds() -> float:
            end.synchronize()
            return start.elapsed_time(end) / count

        return milliseconds
    begin = time.perf_counter()
    for i in range(first, first + count):
        call(i)
    elapsed = 1000 * (time.perf_counter() - begin) / count
    return lambda: elapsed


def medians(xs: list[Tensor], work: dict[Key, Callable[[int], object]]) -> dict[Key, float]:
    """Median milliseconds of one call of each, timed in alternation, so that drift affects all alike."""
    return {name: statistics.median(each) for name, each in timings(xs, work).items()}


def timings(xs: list[Tensor], work: dict[Key, Callable[[int], object]]) -> dict[Key, list[float]]:
    """The milliseconds of one call of each, for every run."""
    device, count = xs[0].device, 1 if xs[0].nbytes > SMALL else len(xs)
    least, most, seconds = RUNS[device.type]
    for call in work.values():
        lap(device, call, 0, count)()
    once = sum(lap(device, call, 0, count)() for call in work.values()) * count / 1000
    runs = min(most, max(least, int(seconds * len(work) / once)))
    laps: dict[Key, list[Callable[[], float]]] = {name: [] for name in work}
    for run in range(runs):
        for name, call in work.items():
            laps[name].append(lap(device, call, run * count, count))
    return {name: [elapsed() for elapsed in each] for name, each in laps.items()}


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Random normal x and dy, as many of each as exceed any cache."""
    count = min(32, 1 + CACHE[device.type] // (math.prod(shape) * dtype.itemsize))
    tensors = [torch.randn(shape, dtype=dtype, device=device) for _ in range(2 * count)]
    return tensors[:count], tensors[count:]


def ceilings(xs: list[Tensor], dys: list[Tensor]) -> dict[str, dict[str, float]]:
    """Bytes per second with 1 read + 1 write ("copy") and 2 reads + 1 write ("add"): of torch, of jitact's relu, the best."""
    count = len(xs)
    work: dict[str, Callable[[int], object]] = {
        "torch.clone": lambda i: xs[i % count].clone(),
        "torch.add": lambda i: torch.add(xs[i % count], dys[i % count]),
    }
    try:
        relu = Subject(REGISTRY["relu"](save="input"), xs, dys)
        relu.backward(0)
        work |= {"jitact.relu": relu.forward, "jitact.relu backward": relu.backward}
    except Exception as error:  # relu's own row reports it too
        say(f"ceilings without jitact.relu: {first_line(error)}")
    warm = time.perf_counter()
    while time.perf_counter() < warm + 0.5:  # clocks rise under load
        lap(xs[0].device, work["torch.clone"], 0, count)()
    ms = medians(xs, work)
    rates = {}
    for pattern, names, tensors in (
        ("copy", ["torch.clone", "jitact.relu"], 2),
        ("add", ["torch.add", "jitact.relu backward"], 3),
    ):
        found = {name: 1000 * tensors * xs[0].nbytes / ms[name] for name in names if name in ms}
        rates[pattern] = {"best": max(found.values()), **found}
    return rates


def release(device: torch.device) -> None:
    """Frees unused memory, including reference cycles and the GPU allocator's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
