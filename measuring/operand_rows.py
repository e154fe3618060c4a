"""Measures fused operands, gated activations, definitions by formulas, and rows: ``python bench.py --operands``.

Each case is timed in alternation with the same computation in PyTorch, eager and compiled, and in other installed libraries. It
is compared with its floor: the minimum memory traffic over the ceiling, which is the best bandwidth of a copy or an addition in
the same run, corrected by the copy's speed while the case is timed. Where issuing the kernel's instructions takes a GPU longer
than that, this floor is printed at the end. Wrong results are not timed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jitact import kernels
from jitact.measuring.commandline import dtype_name, first_line, keeping, machine, progress, say
from jitact.measuring.instructions import instructions_of, rate_of_issue
from jitact.measuring.limits import FORMULA
from jitact.measuring.models import compile_ahead
from jitact.measuring.operand_cases import CASES, FORMULAS, GATED, Case, Function, Shape, by_rows
from jitact.measuring.others import Others
from jitact.measuring.row_errors import exact_gradient, exact_output
from jitact.measuring.text import PEERS, kept_text, size
from jitact.measuring.timing import ceilings, kept_bytes, make_inputs, medians, release
from jitact.registry import REGISTRY

__all__ = ["measure_operands"]

JUDGED = 2**18  # elements of the rows that are compared with float64
NEAR = 16  # the tolerance of a correct result in epsilons
_COPY = "torch.clone"  # timed in alternation with a case, to measure the memory bandwidth meanwhile


class Task(NamedTuple):
    """A case to measure; ``case`` is its index in :data:`CASES`, so that a task can be pickled."""

    case: int
    shape: Shape
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        """Name, dtype and shape, for progress lines."""
        return f"{CASES[self.case].name} {dtype_name(self.dtype)} {size(self.shape)}"


def measure_operands(
    chosen: list[Case], dtypes: list[torch.dtype], device: torch.device, compiled: bool, shape: Shape | None = None
) -> dict[str, Any]:
    """Measures cases, printing line by line, and returns the results.

    Args:
        chosen: of :data:`CASES`.
        dtypes: of the tensors.
        device: the device to measure on.
        compiled: whether torch.compile is measured too.
        shape: of the tensors, overriding each case's own.
    """
    results: dict[str, Any] = {"machine": machine(device), "operands": []}
    unsuited = [case for case in chosen if shape and torch.Size(shape).numel() % case.multiple]
    for case in unsuited:
        say(f"{case.name}: takes a multiple of {case.multiple} elements, not {size(shape)}")
    chosen = [case for case in chosen if case not in unsuited]
    tasks = list(_tasks(chosen, dtypes, device, shape))
    on_gpu = device.type == "cuda" and bool(tasks)
    with keeping(results):
        if on_gpu:
            _build_ahead(chosen)
            if compiled:
                begin = time.perf_counter()
                compile_ahead(_compile, tasks, min(12, (os.cpu_count() or 2) - 1, len(tasks)))
                say(f"compiled ahead in {time.perf_counter() - begin:.0f} s")
        _measure_all(tasks, compiled, results["operands"])
        if on_gpu:
            try:
                _count_instructions(tasks, results["operands"])
            except Exception as error:  # the profiler or the disassembler failed; the measurements are kept
                say(f"instructions could not be counted: {first_line(error)}")
    return results


def _tasks(chosen: list[Case], dtypes: list[torch.dtype], device: torch.device, shape: Shape | None) -> Iterator[Task]:
    """The tasks, grouped by dtype and shape."""
    for dtype in dtypes:
        shapes = {case: (shape,) if shape else case.shapes(device, dtype) for case in chosen}
        for each in dict.fromkeys(each for of_case in shapes.values() for each in of_case):
            for case in chosen:
                if each in shapes[case] and (dtype.itemsize == 2 or not case.converts):
                    yield Task(CASES.index(case), each, dtype, device)


def _build_ahead(chosen: list[Case]) -> None:
    """Compiles the kernel files of the cases, and relu's for the ceiling, in parallel, as these builds take long."""
    whole = [case for case in chosen if case.rows or case.activation in (*GATED, *FORMULAS)]
    sources = {REGISTRY["relu"].activation.source, *(case.source for case in whole)}
    with ThreadPoolExecutor(len(sources)) as pool:
        for building in [pool.submit(kernels.load, source) for source in sources]:
            with suppress(kernels.BuildError):  # reported when the case is measured
                building.result()


def _compile(task: Task) -> str | None:
    """Fills the compiler's cache for a task; returns what went wrong."""
    from torch._functorch import config

    config.donated_buffer = False  # as in the measurement, which runs backward many times on one graph
    case = CASES[task.case]
    made = {"device": task.device, "dtype": task.dtype}
    try:
        x = torch.randn(task.shape, **made)
        extra = _made_extra(case, x)
        x = case.inputs([x])[0].requires_grad_()
        function = torch.compile(case.theirs, dynamic=False)
        with torch.no_grad():
            function(x.detach(), *extra)
        y = function(x, *extra)
        torch.autograd.grad(y, [x, *_learned(extra)], torch.ones_like(y), retain_graph=True)
    except Exception as error:  # compilers raise errors of many types
        return f"{task}: {first_line(error)}"
    return None


def _made_extra(case: Case, x: Tensor) -> list[Tensor]:
    """The tensors other than x; all but masks require gradients."""
    made = case.extra(tuple(x.shape), {"device": x.device, "dtype": x.dtype})
    return made if case.masked else [t.requires_grad_() for t in made]


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]


def _learned(extra: list[Tensor]) -> list[Tensor]:
    return [t for t in extra if t.requires_grad]


def _measure_all(tasks: list[Task], compiled: bool, found: list[dict[str, Any]]) -> None:
    """Measures each task, adds its row to ``found`` and prints it."""
    now, numel = None, None
    xs: list[Tensor] = []
    dys: list[Tensor] = []
    for task in progress(tasks, len(tasks), str):
        case, shape, dtype, device = CASES[task.case], *task[1:]
        if numel != (dtype, torch.Size(shape).numel()):
            numel, xs, dys = (dtype, torch.Size(shape).numel()), [], []
            release(device)
            xs, dys = make_inputs(shape, dtype, device)
            rates = ceilings(xs, dys)
            say(f"\n{dtype_name(dtype)}, {rates['copy']['best'] / 1e9:.0f} GB/s with {size(shape)}")
        if now != (dtype, shape):
            now = dtype, shape
            xs, dys = ([t.view(shape) for t in tensors] for tensors in (xs, dys))
            peers = ["eager", *(["compile"] if compiled else []), *dict.fromkeys(p for c in CASES for p in c.others(device))]
            say(_heading(f"{dtype_name(dtype)} {size(shape)}", peers))
        others = Others()
        try:
            row = _measure(case, xs, dys, rates, compiled)
            row["busy"] = device.type == "cpu" and others.disturb(torch.get_num_threads())
        except Exception as error:  # reported as wrong
            row = {"name": case.name, "wrong": first_line(error)}
            release(device)
        found.append({"shape": shape, "dtype": dtype_name(dtype)} | row)
        say(_line(row, peers))


def _count_instructions(tasks: list[Task], found: list[dict[str, Any]]) -> None:
    """Adds the time to issue the kernels' instructions to rows, and prints where it exceeds the floor of memory traffic.

    Runs after all timings, as it uses a profiler to see which kernels run.
    """
    counted: dict[tuple[int, torch.dtype], dict[str, float]] = {}
    shares, higher = [], []
    for task, row in zip(tasks, found, strict=True):
        case, key = CASES[task.case], (task.case, task.dtype)
        if case.rows or row.get("wrong"):
            continue
        if key not in counted:
            counted[key] = _instructions(case, task)
        row["instructions"] = counted[key]
        rate = rate_of_issue(task.device) / torch.Size(task.shape).numel()
        row["issue"] = {direction: 1000 * count / rate for direction, count in counted[key].items()}
        for direction, ms in row["issue"].items():
            shares.append((ms / row["floor"][direction], f"{task}, {direction}"))
            if ms > row["floor"][direction]:
                share = ms / row["ms"][direction]["ours"]
                higher.append(f"  {task}, {direction}: {counted[key][direction]:.0f} for an element, {share:.0%} of that floor")
    if shares:
        most, where = max(shares)
        say(f"\nInstructions take up to {most:.0%} of the time that bytes take at least ({where}).")
        say("\n".join(["Where they take longer, that is the floor:", *higher]) if higher else "So bytes are the floor of all.")


def _instructions(case: Case, task: Task) -> dict[str, float]:
    """The minimum number of instructions per element of x, by direction; a direction is missing if it cannot be determined."""
    x = torch.randn(min(task.shape[0], 1024), *task.shape[1:], device=task.device, dtype=task.dtype)
    subject = _Subject(case.ours, case.inputs([x]), [torch.randn_like(x)], _made_extra(case, x))
    library = kernels.load(case.source).path
    found = {}
    for direction, written in (("forward", 1), ("backward", case.written)):
        each = instructions_of(partial(getattr(subject, direction), 0), library)
        if each is not None:
            found[direction] = each * x.itemsize * written
    return found


def _measure(case: Case, xs: list[Tensor], dys: list[Tensor], rates: dict[str, Any], compiled: bool) -> dict[str, Any]:
    x, taken = xs[0], case.inputs(xs)
    extra = _made_extra(case, x)
    wrong = _wrong_rows(case, x, dys[0], *extra) if case.rows else _wrong(case, taken[0], extra, dys[0])
    if wrong:
        return {"name": case.name, "wrong": wrong}
    row: dict[str, Any] = {"name": case.name, "ms": {}, "floor": {}, "kept": {}, "notes": []}
    subjects: dict[str, _Subject] = {}
    for name, function in {"ours": case.ours, "eager": case.theirs, "compile": case.theirs, **case.others(x.device)}.items():
        if name == "compile":
            if not compiled:
                continue
            torch.compiler.reset()
            function = torch.compile(function, dynamic=False)
        # Functions of other libraries may write gradients over what they keep.
        given, further = (taken, extra) if name in ("ours", *PEERS) else (_copies(taken), _copies(extra))
        subject = _Subject(function, given, dys, further)
        try:
            row["kept"][name] = subject.kept()
            subject.forward(0)
            subject.backward(0)
        except Exception as error:  # a peer that fails is left out
            if name == "ours":
                raise
            row["notes"].append(f"{name}: {first_line(error)}")
        else:
            subjects[name] = subject
    for direction, tensors in (("forward", case.forward), ("backward", case.backward)):
        calls = {name: getattr(subject, direction) for name, subject in subjects.items()}
        ms = medians(xs, calls | {_COPY: lambda i: xs[i % len(xs)].clone()})
        now = ms.pop(_COPY) * rates["copy"][_COPY]  # relative to the copy's speed when the ceiling was measured: clocks vary
        rate = rates["copy" if tensors <= 2.5 else "add"]["best"]
        masks = sum(t.nbytes for t in extra) if case.masked and direction == "forward" else 0
        row["ms"][direction] = ms
        row["floor"][direction] = (tensors * x.nbytes + masks) / rate * now / (2 * x.nbytes)
    return row


class _Subject:
    """A function to time. The methods take the number of a run, which rotates the inputs; ``extra`` are further operands."""

    def __init__(self, function: Function, xs: list[Tensor], dys: list[Tensor], extra: list[Tensor]) -> None:
        self.function, self.xs, self.dys, self.extra = function, xs, dys, extra
        self.leaves = [x.detach().requires_grad_() for x in xs]
        self.graphs: list[Tensor] = []

    def forward(self, i: int) -> Tensor:
        with torch.no_grad():
            return self.function(self.xs[i % len(self.xs)], *self.extra)

    def backward(self, i: int) -> tuple[Tensor, ...]:
        self.graphs = self.graphs or [self.function(leaf, *self.extra) for leaf in self.leaves]
        i %= len(self.xs)
        y = self.graphs[i]
        if self.dys[i].dtype is not y.dtype:
            self.dys = [dy.to(y.dtype) for dy in self.dys]
        return torch.autograd.grad(y, [self.leaves[i], *_learned(self.extra)], self.dys[i].view_as(y), retain_graph=True)

    def kept(self) -> float:
        """Bytes per element of the result that autograd keeps for backward."""
        return kept_bytes(lambda: self.function(self.leaves[0], *self.extra)) / self.dys[0].numel()


def _wrong(case: Case, x: Tensor, extra: list[Tensor], dy: Tensor) -> str | None:
    """What differs from PyTorch in float64 on the first rows; None if all is right."""
    if case.is_random:
        return None
    rows = 64 if x.shape[-1] >= 1024 else 4096
    x, dy = x[:rows].detach().requires_grad_(), dy[:rows]
    extra = [t[:rows].detach().requires_grad_() if t.dim() > 1 else t for t in extra]
    y = case.ours(x, *extra)
    exact = case.theirs(x.double(), *(t.double() for t in extra))
    found = [y, *torch.autograd.grad(y, [x, *extra], dy.view_as(y))]
    expected = [exact, *torch.autograd.grad(exact, [x, *extra], dy.view_as(y).double())]
    near = NEAR * torch.finfo(x.dtype).eps
    for kind, a, b in zip(("forward", *["a gradient"] * len(extra), "a gradient"), found, expected, strict=True):
        if not torch.allclose(a.double(), b.double(), near, near * 16 if a.dim() < x.dim() else near):  # more for sums
            return f"{kind} is wrong"
    return None


def _wrong_rows(case: Case, x: Tensor, dy: Tensor, *masks: Tensor) -> str | None:
    """What differs from float64 in some rows of the full-size tensor, as kernels differ by size; None if all is right."""
    name, dim = case.rows
    leaf = x.detach().requires_grad_()
    y = case.ours(leaf, *masks)
    dy = dy.to(y.dtype)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    across = int(dim == 0)  # another dimension
    count = x.shape[across]
    some = max(1, min(count, JUDGED * count // x.numel()))
    at = torch.linspace(0, count - 1, some, dtype=torch.float64).long().to(x.device)
    masks = [by_rows(mask, x) for mask in masks]
    x, dy, y, dx, *masks = (t.detach().index_select(across, at) for t in (x, dy, y, dx, *masks))
    near, near_x = (FORMULA[t.dtype].ulp * torch.finfo(t.dtype).eps for t in (y, dx))
    x, dy, y, dx = x.double(), dy.double(), y.double(), dx.double()
    for mask in masks:
        if mask.dtype is torch.bool:
            x = x.masked_fill(~mask, -torch.inf)
        else:  # kernels round the sum to float32 at least; PyTorch's operators, used for small tensors, round it to the dtype
            x = (x + mask.double()).to(torch.promote_types(leaf.dtype, torch.float32)).double()
            near = near + torch.finfo(mask.dtype).eps * x.abs().nan_to_num(posinf=0)
    exact, tiny = exact_output(name, x, dim), torch.finfo(leaf.dtype).tiny
    if not ((y - exact).abs() <= near * (exact.abs() + (name == "log_softmax")) + tiny).all():
        return "forward is wrong"
    exact, sizes = exact_gradient(name, dy, y, dim)
    return None if ((dx - exact).abs() <= near_x * sizes + tiny).all() else "the gradient is wrong"


def _heading(title: str, peers: list[str]) -> str:
    columns = "".join(f"{'x ' + PEERS.get(peer, peer).removeprefix('torch.'):>10}" for peer in peers)
    return f"{title:32}{'forward':>8}{columns}{'backward':>10}{columns}   bytes kept"


def _line(row: dict[str, Any], peers: list[str]) -> str:
    """A row as text: shares of the floor, speed-ups over the peers, and bytes per element kept by jitact and by eager."""
    if row.get("wrong"):
        return f"{row['name']:32}WRONG: {row['wrong']}"
    line = f"{row['name']:32}"
    for direction, width in (("forward", 8), ("backward", 10)):
        ms = row["ms"][direction]
        line += f"{row['floor'][direction] / ms['ours']:>{width}.0%}"
        line += "".join(f"{ms[peer] / ms['ours']:>10.2f}" if peer in ms else f"{'':10}" for peer in peers)
    kept = f"   {kept_text(row['kept']['ours'])} / {kept_text(row['kept']['eager'])}" if "eager" in row["kept"] else ""
    return "\n".join([line + kept, *(f"  {note}" for note in row["notes"])])
