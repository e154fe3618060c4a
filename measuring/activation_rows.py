"""Measures elementwise activations: a row of results per activation and dtype. Wrong kernels are not timed."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jitact.accuracy import broken_rules, measure, sample
from jitact.exporting import onefile
from jitact.measuring import timing
from jitact.measuring.commandline import dtype_name, first_line, keeping, machine, progress, say
from jitact.measuring.oracle import exact_function
from jitact.measuring.others import Others
from jitact.measuring.text import DIRECTIONS, PEERS, Entry, bench_heading, bench_row, describe_machine, size
from jitact.measuring.timing import Subject, ceilings, lap, make_inputs, release, timings
from jitact.modules import ActivationModule
from jitact.records import Activation
from jitact.registry import REGISTRY

__all__ = ["check_places", "measure_all"]

GPU_SHAPE, CPU_SHAPE = (4096, 393216), (4096, 4096)
COPIES = 16  # tensors of the full size alive at once: x, dy, and the outputs and saved tensors of jitact and its peers
BUSY = 1.5  # median over shortest time, above which other work disturbed the measurement
CPU_SECONDS = 60  # the approximate limit of a whole run on the CPU


def default_shape(dtype: torch.dtype, device: torch.device, rows: int) -> tuple[tuple[int, ...], str]:
    """The shape to measure at, and a remark if it is not the usual one."""
    if device.type == "cuda":
        (batch, dim), room = GPU_SHAPE, torch.cuda.mem_get_info(device)[0] // COPIES
        fits = min(batch, room // (dim * dtype.itemsize))
        return (max(1, fits), dim), "" if fits == batch else f" (not {batch}: memory is short)"
    (batch, dim), calls = CPU_SHAPE, 2 * len(DIRECTIONS) * (2 + timing.RUNS["cpu"][0])
    x = torch.randn(batch, dim).to(dtype)
    once = min(lap(device, lambda _: x.clone(), 0, 1)() for _ in range(5)) / 1000
    fits = batch
    while fits > batch // 16 and rows * calls * 2 * once * fits / batch > CPU_SECONDS:
        fits //= 2
    return (fits, dim), "" if fits == batch else f" (not {batch}: to finish in about a minute)"


def traffic(save: str, dtype: torch.dtype) -> dict[str, tuple[float, str]]:
    """The minimum traffic of each direction in bytes per element, and the access pattern whose bandwidth bounds it."""
    size = dtype.itemsize
    if save == "bit":
        return {"forward": (2 * size, "copy")} | dict.fromkeys(("forward_save", "backward"), (2 * size + 1 / 8, "copy"))
    return {"forward": (2 * size, "copy"), "forward_save": (2 * size, "copy"), "backward": (3 * size, "add")}


def compare(cls: type[ActivationModule], dtype: torch.dtype, device: torch.device) -> tuple[dict[str, dict], list[str]]:
    """Compares an activation with float64 on a sample of all values. Returns its errors, and descriptions of what is wrong."""
    module = cls().to(device, dtype).eval()
    errors = measure(cls, {"ours": module}, dtype, iter([sample(dtype, device, 65521)]))["ours"]
    wrong = broken_rules(cls, cls.activation.saves[0], dtype, errors)
    if not module(torch.full((9,), math.nan, dtype=dtype, device=device)).isnan().all():
        wrong.append("forward of NaN is not NaN")
    parameters = list(module.parameters())
    if parameters:
        exact = cls.Model().to(device, dtype).double()
        x, near = torch.randn(4096, device=device).to(dtype), 16 * torch.finfo(dtype).eps
        own = torch.autograd.grad(module(x).sum(dtype=torch.float64), parameters)
        of_exact = torch.autograd.grad(exact(x.double()).sum(), list(exact.parameters()))
        if not all(torch.allclose(a.double(), b, near, near * 64) for a, b in zip(own, of_exact, strict=True)):
            wrong.append("the gradient of a parameter is wrong")
    return {kind: asdict(error) for kind, error in errors.items()}, wrong


def check_places(cls: type[ActivationModule], subject: Subject) -> list[str]:
    """Checks results at the full size, at evenly spread elements and at the last ones; returns what is wrong."""
    probe = subject.xs[0].flatten()[:4096]
    if not torch.equal(subject.module(probe), subject.module(probe)):
        return []  # random in training
    x, dy, y, dx = subject.xs[0], subject.dys[0], subject.forward_save(0), subject.backward(0)[0]
    n, shape, near = x.numel(), tuple(x.shape), 8 * torch.finfo(x.dtype).eps
    exact = exact_function(cls().to(x.device, x.dtype), x.dtype)
    at = torch.cat([torch.arange(0, n, (n // 2**16) | 1), torch.arange(max(0, n - 4096), n)]).to(x.device)
    x, dy, y, dx = (t.detach().flatten()[at].double() for t in (x, dy, y, dx))
    exact_y = exact(x.requires_grad_())
    (exact_dx,) = torch.autograd.grad(exact_y, x, dy)
    pairs = {"forward": (y, exact_y), "gradient": (dx, exact_dx)}
    return [f"{kind} is wrong at the size {shape}" for kind, pair in pairs.items() if not torch.allclose(*pair, near, near)]


def kept_by(record: Activation) -> str:
    """What a module keeps for backward by default: a bit is not enough for the gradient of a weight such as prelu's."""
    layout, first = record.layout, record.saves[0]
    return "input" if first == "bit" and set(layout.places) - set(layout.from_bit) else first


def measure_row(
    cls: type[ActivationModule], xs: list[Tensor], dys: list[Tensor], rates: dict[str, dict[str, float]], peers: list[str]
) -> Entry:
    """A row of the results: one activation and dtype. It is not timed if it is wrong."""
    x, dtype, device, save = xs[0], xs[0].dtype, xs[0].device, kept_by(cls.activation)
    release(device)
    row: Entry = {"name": cls.activation.name, "dtype": dtype_name(dtype), "save": save, "wrong": [], "notes": []}
    row |= {"errors": None, "ours": None, **dict.fromkeys(PEERS)}
    try:
        row["errors"], row["wrong"] = compare(cls, dtype, device)
        ours = Subject(cls().to(device, dtype), xs, dys)
        row["wrong"] = row["wrong"] or check_places(cls, ours)
    except Exception as error:  # kernels that do not compile or run are reported as wrong
        row["wrong"].append(first_line(error))
    if row["wrong"]:
        return row
    subjects = {"ours": ours}
    for peer in peers:
        subject, trouble = make_peer(peer, cls, xs, dys)
        if trouble:
            row["notes"].append(f"{peer}: {trouble}")
            release(device)
        else:
            subjects[peer] = subject
    least = traffic(save, dtype)
    row["bytes"] = {direction: per_element * x.numel() for direction, (per_element, _) in least.items()}
    row["floor"] = {d: 1000 * row["bytes"][d] / rates[pattern]["best"] for d, (_, pattern) in least.items()}
    row["kept"] = {name: subject.kept() for name, subject in subjects.items()}
    times = time_all(xs, subjects)
    if times is None:
        row["notes"].append("not timed beside its peers, as memory is short")
        subjects = {"ours": ours}
        release(device)
        times = time_all(xs, subjects)
    for subject in subjects.values():
        subject.free()
    return row | (times or {})


def make_peer(peer: str, cls: type[ActivationModule], xs: list[Tensor], dys: list[Tensor]) -> tuple[Subject | None, str | None]:
    """A peer to compare with, after a first run of every direction; or None and the reason why it cannot take part."""
    try:
        if peer == "exported":
            file: dict[str, Any] = {"__name__": "exported"}
            exec(onefile.export(cls.activation.name), file)
            module = file["ModelNew"]()
        else:
            module = cls.Model()
        module = module.to(xs[0].device, xs[0].dtype)
        if peer == "compile":
            torch.compiler.reset()
            module = torch.compile(module, dynamic=False)
    except Exception as error:  # failures to export or to move the module are reported
        return None, first_line(error)
    subject = Subject(module, xs, dys)
    trouble = subject.trouble()
    return (None, trouble) if trouble else (subject, None)


def time_all(xs: list[Tensor], subjects: dict[str, Subject]) -> dict[str, Any] | None:
    """The milliseconds of each direction, by subject, and their ``"spread"``; None if memory runs out.

    The spread is the largest ratio of a median to the shortest time; it is near 1 on an idle machine.
    """
    times: dict[str, Any] = {name: {} for name in subjects} | {"spread": 1.0}
    try:
        for direction in DIRECTIONS:
            found = timings(xs, {name: getattr(subject, direction) for name, subject in subjects.items()})
            for name, each in found.items():
                times[name][direction] = statistics.median(each)
                times["spread"] = max(times["spread"], statistics.median(each) / min(each))
    except torch.OutOfMemoryError:
        return None
    return times


def measure_all(
    names: list[str], dtypes: list[torch.dtype], device: torch.device, shape: tuple[int, ...] | None, peers: list[str]
) -> dict[str, Any]:
    """Measures everything, printing row by row, and returns the results; the partial results, if interrupted."""
    tasks = [(dtype, name) for dtype in dtypes for name in names]
    shape, remark = (shape, "") if shape else default_shape(max(dtypes, key=lambda dtype: dtype.itemsize), device, len(tasks))
    results: dict[str, Any] = {"machine": machine(device), "dtypes": {}, "rows": []}
    with keeping(results):
        _measure(tasks, device, shape, remark, peers, results)
    return results


def _measure(
    tasks: list[tuple[torch.dtype, str]],
    device: torch.device,
    shape: tuple[int, ...],
    remark: str,
    peers: list[str],
    results: dict[str, Any],
) -> None:
    """Measures each task, adds its row to ``results`` and prints it."""
    say(f"jitact {results['machine']['jitact']} of {Path(__file__).resolve().parents[1]}")
    say(f"{describe_machine(results['machine'])} · {size(shape)}{remark}")
    xs: list[Tensor] = []
    for dtype, name in progress(tasks, len(tasks), lambda task: f"{task[1]} {dtype_name(task[0])}"):
        if not xs or xs[0].dtype != dtype:
            xs = dys = []
            release(device)
            xs, dys = make_inputs(shape, dtype, device)
            rates = ceilings(xs, dys)
            results["dtypes"][dtype_name(dtype)] = {"shape": shape, "bytes_per_second": rates}
            say(bench_heading(dtype_name(dtype), rates, peers))
        others = Others()
        row = measure_row(REGISTRY[name], xs, dys, rates, peers)
        crowded = device.type == "cpu" and others.disturb(torch.get_num_threads())
        row["busy"] = crowded or row.get("spread", 1.0) > BUSY
        results["rows"].append(row)
        say(bench_row(row, peers))
        release(device)
