"""What a call takes of the host, which models of small tensors wait for: ``python bench.py --calls``.

Functions are called many times in a row, without waiting for a GPU, in alternation with the same computation in PyTorch, and
medians are reported. Kernels on tensors so small take less time than their calls, so the host is what is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import jitact
from jitact.measuring.commandline import dtype_name, keeping, machine, progress, say
from jitact.measuring.operand_cases import CASES, Case, Shape
from jitact.measuring.others import Others
from jitact.measuring.text import DIRECTIONS, size
from jitact.measuring.timing import medians

__all__ = ["COMPARED", "measure_calls"]

CALLS = 100  # in a row, which a GPU's queue takes without making the host wait


def _of_x(name: str, theirs: Callable[..., Tensor], *numbers: float) -> Case:
    """A case of one tensor, which may be called with numbers."""
    return Case(name, lambda x: getattr(jitact, name)(x, *numbers), lambda x: theirs(x, *numbers), lambda *_: [], 2, 3)


def _weight(shape: Shape, made: dict[str, Any]) -> list[Tensor]:
    return [torch.full((1,), 0.25, **made)]


_FUSED = ("relu+bias", "gelu+bias", "gelu+residual", "gelu+bias+dropout+residual", "swiglu", "swiglu, halves")
COMPARED = (
    _of_x("relu", F.relu),
    _of_x("silu", F.silu),
    _of_x("leaky_relu", F.leaky_relu, 0.2),
    Case("prelu", lambda x, weight: jitact.prelu(x, weight), F.prelu, _weight, 2, 3),
    *(case for name in _FUSED for case in CASES if case.name == name),
)
"""The calls that are compared."""


def measure_calls(names: list[str], dtypes: list[torch.dtype], device: torch.device, shape: Shape) -> dict[str, Any]:
    """Measures those of :data:`COMPARED` whose activation is named, printing line by line, and returns the results.

    A row has ``us``: microseconds of a call by direction, and there jitact's and eager's. "forward" records nothing.
    """
    chosen = [case for case in COMPARED if case.activation in names]
    results: dict[str, Any] = {"machine": machine(device), "rows": []}
    directions = "".join(f"{direction:>25}" for direction in DIRECTIONS.values())
    with keeping(results):
        for dtype in dtypes:
            say(f"\n{f'us of the host, {dtype_name(dtype)} {size(shape)}':34}{directions}")
            say(" " * 34 + f"{'ours':>9}{'eager':>8}{'ratio':>8}" * len(DIRECTIONS))
            for case in progress(chosen, len(chosen), lambda case: case.name):
                others = Others()
                us = _microseconds(case, shape, dtype, device)
                busy = device.type == "cpu" and others.disturb(torch.get_num_threads())
                results["rows"].append({"name": case.name, "dtype": dtype_name(dtype), "shape": shape, "us": us, "busy": busy})
                say(_line(results["rows"][-1]))
    return results


def _line(row: dict[str, Any]) -> str:
    each = [(us["ours"], us["eager"]) for us in row["us"].values()]
    return f"{row['name']:34}" + "".join(f"{ours:>9.1f}{eager:>8.1f}{ours / eager:>8.2f}" for ours, eager in each)


def _microseconds(case: Case, shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, dict[str, float]]:
    made = {"device": device, "dtype": dtype}
    x, extra = case.inputs([torch.randn(shape, **made), torch.randn(shape, **made)])[0], case.extra(shape, made)
    tensors = [x, *extra]
    learned = [t.detach().clone().requires_grad_() for t in tensors]
    functions = {"ours": case.ours, "eager": case.theirs}
    ys = {who: function(*learned) for who, function in functions.items()}
    dy = torch.randn_like(ys["eager"])
    calls = {
        "forward": {who: lambda _, f=f: f(*tensors) for who, f in functions.items()},
        "forward_save": {who: lambda _, f=f: f(*learned) for who, f in functions.items()},
        "backward": {who: lambda _, y=y: torch.autograd.grad(y, learned, dy, retain_graph=True) for who, y in ys.items()},
    }
    ms = {direction: medians([x] * CALLS, subjects) for direction, subjects in calls.items()}
    return {direction: {who: 1000 * each for who, each in found.items()} for direction, found in ms.items()}
