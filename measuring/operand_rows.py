"""What stands around an activation, measured: ``python bench.py --operands``.

Each case is timed beside the same written in PyTorch, eager and compiled, and beside its floor: the fewest bytes that it can
move over the ceiling, the best rate that a copy and an addition reach in the same run. What is wrong gets no time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import jitact
from jitact.bench import ceilings, make_inputs, medians, release
from jitact.measuring.commandline import dtype_name, first_line, keeping, machine, progress, say

__all__ = ["CASES", "SHAPES", "Case", "run"]

SHAPES = {"cuda": ((16384, 14336), (65536, 2048)), "cpu": ((1024, 4096),)}


class Case(NamedTuple):
    """One line of the table.

    Attributes:
        name: what is shown.
        ours: the function, of the tensors.
        theirs: the same in PyTorch.
        extra: makes the tensors beside ``x``: of a shape, a dtype and a device.
        forward: tensors of x's size that forward reads and writes, the fewest.
        backward: the same of backward.
        is_random: whether results differ from PyTorch's by chance.
    """

    name: str
    ours: Callable[..., Tensor]
    theirs: Callable[..., Tensor]
    extra: Callable[[tuple[int, int], dict[str, Any]], list[Tensor]]
    forward: float
    backward: float
    is_random: bool = False


def _bias(shape: tuple[int, int], made: dict[str, Any]) -> list[Tensor]:
    return [torch.randn(shape[-1], **made)]


def _like(shape: tuple[int, int], made: dict[str, Any]) -> list[Tensor]:
    return [torch.randn(shape, **made)]


def _both(shape: tuple[int, int], made: dict[str, Any]) -> list[Tensor]:
    return [*_bias(shape, made), *_like(shape, made)]


def _nothing(shape: tuple[int, int], made: dict[str, Any]) -> list[Tensor]:
    return []


def _channels(count: int) -> Callable[[tuple[int, int], dict[str, Any]], list[Tensor]]:
    return lambda shape, made: [torch.full((count,), 0.25, **made)]


def _by_channel(x: Tensor, weight: Tensor) -> Tensor:
    return x.view(-1, weight.numel(), *([1024] if weight.numel() == 64 else []))


def _around(name: str) -> list[Case]:
    """An activation with what can stand around it; ``dropout`` reads and writes what the activation does."""
    ours, theirs = getattr(jitact, name), getattr(F, "gelu" if name == "gelu_tanh" else name)
    if name == "gelu_tanh":
        theirs = jitact.get("gelu_tanh").activation.reference
    bit = 1 / 16 if name == "relu" else 1  # what backward reads beside dy, in 16 bits
    return [
        Case(f"{name}+bias", lambda x, b: ours(x, bias=b), lambda x, b: theirs(x + b), _bias, 2, 3),
        Case(f"{name}+residual", lambda x, r: ours(x, residual=r), lambda x, r: r + theirs(x), _like, 3, 2 + bit),
        Case(
            f"{name}+dropout", lambda x: ours(x, dropout=0.1), lambda x: F.dropout(theirs(x), 0.1), _nothing, 2, 2 + bit, True
        ),
        Case(
            f"{name}+bias+dropout+residual",
            lambda x, b, r: ours(x, bias=b, dropout=0.1, residual=r),
            lambda x, b, r: r + F.dropout(theirs(x + b), 0.1),
            _both,
            3,
            3,
            True,
        ),
    ]


CASES: tuple[Case, ...] = (
    *_around("gelu"),
    *_around("gelu_tanh"),
    *_around("silu"),
    *_around("relu"),
    *_around("mish"),
    Case("prelu, 64 channels", lambda x, w: jitact.prelu(_by_channel(x, w), w),
         lambda x, w: F.prelu(_by_channel(x, w), w), _channels(64), 2, 3),
    Case("prelu, 2048 channels", lambda x, w: jitact.prelu(_by_channel(x, w), w),
         lambda x, w: F.prelu(_by_channel(x, w), w), _channels(2048), 2, 3),
    Case("softmax", lambda x: jitact.softmax(x, -1), lambda x: F.softmax(x, -1), _nothing, 2, 3),
    Case("log_softmax", lambda x: jitact.log_softmax(x, -1), lambda x: F.log_softmax(x, -1), _nothing, 2, 3),
)  # fmt: skip


def run(names: list[str], dtypes: list[torch.dtype], device: torch.device, compiled: bool) -> dict[str, Any]:
    """Measures the cases whose names begin with one of ``names``, all if there are none, and returns the results."""
    chosen = [case for case in CASES if not names or any(case.name.startswith(name) for name in names)]
    results: dict[str, Any] = {"machine": machine(device), "operands": []}
    tasks = [(shape, dtype, case) for shape in SHAPES[device.type] for dtype in dtypes for case in chosen]
    with keeping(results):
        _rows(tasks, device, compiled, results["operands"])
    return results


def _rows(
    tasks: list[tuple[tuple[int, ...], torch.dtype, Case]], device: torch.device, compiled: bool, found: list[dict[str, Any]]
) -> None:
    """Adds a row for each task, and says it."""
    now = None
    for shape, dtype, case in progress(tasks, len(tasks), lambda task: f"{task[2].name} {dtype_name(task[1])}"):
        if now != (shape, dtype):
            now = shape, dtype
            release(device)
            xs, dys = make_inputs(shape, dtype, device)
            rates = ceilings(xs, dys)
            say(f"\n{dtype_name(dtype)} {shape[0]}x{shape[1]}: {rates['copy']['best'] / 1e9:.0f} GB/s; share of the floor, and")
            say(f"{'':34}{'forward':>9}{'x eager':>9}{'x comp.':>9}{'backward':>10}{'x eager':>9}{'x comp.':>9}")
        try:
            row = _measure(case, xs, dys, rates, compiled)
        except Exception as error:  # one of the things to report
            row = {"name": case.name, "wrong": first_line(error)}
        found.append({"shape": shape, "dtype": dtype_name(dtype)} | row)
        say(_line(row))
        release(device)


def _measure(case: Case, xs: list[Tensor], dys: list[Tensor], rates: dict[str, Any], compiled: bool) -> dict[str, Any]:
    x = xs[0]
    made = {"device": x.device, "dtype": x.dtype}
    extra = [t.requires_grad_() for t in case.extra(tuple(x.shape), made)]
    wrong = _wrong(case, x, extra, dys[0])
    if wrong:
        return {"name": case.name, "wrong": wrong}
    subjects = {"ours": case.ours, "eager": case.theirs}
    if compiled:
        torch.compiler.reset()
        subjects["compile"] = torch.compile(case.theirs, dynamic=False)
    leaves, count = [x.detach().requires_grad_() for x in xs], len(xs)
    row: dict[str, Any] = {"name": case.name, "ms": {}, "floor": {}}
    forwards: dict[str, Callable[[int], object]] = {}
    for name, function in subjects.items():

        def forward(i: int, function: Callable[..., Tensor] = function) -> object:
            with torch.no_grad():
                return function(xs[i % count], *extra)

        forwards[name] = forward
    row["ms"]["forward"] = medians(xs, forwards)
    backwards: dict[str, Callable[[int], object]] = {}
    for name, function in subjects.items():
        graphs = [function(leaf, *extra) for leaf in leaves]

        def backward(i: int, graphs: list[Tensor] = graphs) -> object:
            i %= count
            dy = dys[i].view_as(graphs[i])
            return torch.autograd.grad(graphs[i], [leaves[i], *extra], dy, retain_graph=True)

        backwards[name] = backward
    row["ms"]["backward"] = medians(xs, backwards)
    for direction, tensors in (("forward", case.forward), ("backward", case.backward)):
        rate = rates["copy" if tensors <= 2.5 else "add"]["best"]
        row["floor"][direction] = 1000 * tensors * x.nbytes / rate
    return row


def _wrong(case: Case, x: Tensor, extra: list[Tensor], dy: Tensor) -> str | None:
    """What differs from PyTorch in float64 on the first rows, if anything."""
    if case.is_random:
        return None
    rows = 64 if x.shape[-1] >= 1024 else 4096
    x, dy = x[:rows].detach().requires_grad_(), dy[:rows]
    extra = [t[:rows].detach().requires_grad_() if t.dim() > 1 else t for t in extra]
    y = case.ours(x, *extra)
    exact = case.theirs(x.double(), *(t.double() for t in extra))
    found = [y, *torch.autograd.grad(y, [x, *extra], dy.view_as(y))]
    expected = [exact, *torch.autograd.grad(exact, [x, *extra], dy.view_as(y).double())]
    near = 16 * torch.finfo(x.dtype).eps
    for kind, a, b in zip(("forward", *["a gradient"] * len(extra), "a gradient"), found, expected, strict=True):
        if not torch.allclose(a.double(), b.double(), near, near * 16):
            return f"{kind} is wrong"
    return None


def _line(row: dict[str, Any]) -> str:
    if row.get("wrong"):
        return f"{row['name']:34} {row['wrong']}"
    cells = []
    for direction, width in (("forward", 9), ("backward", 10)):
        ms = row["ms"][direction]
        cells.append(f"{row['floor'][direction] / ms['ours']:>{width}.0%}{ms['eager'] / ms['ours']:>9.2f}")
        cells.append(f"{ms['compile'] / ms['ours']:>9.2f}" if "compile" in ms else f"{'':9}")
    return f"{row['name']:34}" + "".join(cells)
