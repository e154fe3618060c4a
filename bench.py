"""Correctness, speed and memory of every activation beside PyTorch's: ``python bench.py``, or ``jitact bench``.

Each activation and dtype is first compared with float64; wrong ones are not timed. Then forward (without autograd), forward +
save (with autograd) and backward are timed, alternating with PyTorch's; the medians are reported. The floor of each is the time
to move the fewest bytes that it needs at the ceiling, the best bandwidth that torch or jitact reached in the same run with as
many reads and writes. Bytes kept for backward are those that autograd's saved-tensor hooks see, per element. Gated activations,
which take two tensors, have a table of their own after the others, in the form of ``--operands``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def not_this_one() -> str | None:
    """Why ``import jitact`` does not bring the package that this file is of, if so."""
    found, install = find_spec("jitact"), f"pip install -e {shlex.quote(str(HERE))}"
    if found is None or found.origin is None:
        return f"there is no package jitact: {install}"
    there = Path(found.origin).resolve().parent
    if there == HERE:
        return None
    return f"`import jitact` finds {there}, not {HERE}: {install}, or measure the other with python -m jitact.bench"


if __name__ == "__main__":
    # This folder is the inside of a package: on the path, where `python bench.py` puts it, it would hide others' `kernels`.
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != HERE]
    if trouble := not_this_one():
        print(f"bench.py: {trouble}", file=sys.stderr)
        sys.exit(2)

import torch
from torch import Tensor

from jitact import kernels, report
from jitact.accuracy import broken_rules, measure, sample
from jitact.exporting import onefile
from jitact.measuring import models, operand_cases, operand_rows, page, text, timing
from jitact.measuring.commandline import (
    Parser,
    dtype_name,
    exit_code,
    first_line,
    keeping,
    machine,
    progress,
    say,
    with_kept,
    write_json,
)
from jitact.measuring.oracle import exact_function
from jitact.measuring.others import Others
from jitact.measuring.timing import Subject, ceilings, lap, make_inputs, release, timings
from jitact.modules import ActivationModule
from jitact.records import Activation
from jitact.registry import REGISTRY
from jitact.report import DIRECTIONS, PEERS

GPU_SHAPE, CPU_SHAPE = (4096, 393216), (4096, 4096)
COPIES = 16  # tensors of the full size alive at once: x, dy, and what ours and the peers make of them
LEAST_COPIES = 6  # of them without peers, which do without a row if memory is short
BUSY = 1.5  # the usual time over the shortest, above which something else was at work
CPU_SECONDS = 60  # what a run on the CPU may take, roughly
DTYPES = {"cuda": [torch.float32, torch.bfloat16, torch.float16], "cpu": [torch.float32, torch.bfloat16]}


def default_shape(dtype: torch.dtype, device: torch.device, rows: int) -> tuple[tuple[int, ...], str]:
    """The size to measure at, and why it is not the usual one if it is not."""
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


def total_memory(device: torch.device) -> int:
    """Bytes of memory of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def traffic(save: str, dtype: torch.dtype) -> dict[str, tuple[float, str]]:
    """The fewest bytes per element that each direction moves, and the ceiling that holds for it."""
    size = dtype.itemsize
    if save == "bit":
        return {"forward": (2 * size, "copy")} | dict.fromkeys(("forward_save", "backward"), (2 * size + 1 / 8, "copy"))
    return {"forward": (2 * size, "copy"), "forward_save": (2 * size, "copy"), "backward": (3 * size, "add")}


def compare(cls: type[ActivationModule], dtype: torch.dtype, device: torch.device) -> tuple[dict[str, dict], list[str]]:
    """Compares an activation with float64 on a sample of all values. Returns its errors, and what is wrong in words."""
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
    """Whether results at the full size stand where they belong: evenly spread elements, and the last ones."""
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
    """What backward of a module keeps: a bit is not enough for the gradient of a weight such as prelu's."""
    laid, first = record.layout, record.saves[0]
    return "input" if first == "bit" and set(laid.places) - set(laid.from_bit) else first


def measure_row(
    cls: type[ActivationModule], xs: list[Tensor], dys: list[Tensor], rates: dict[str, dict[str, float]], peers: list[str]
) -> report.Entry:
    """One activation and dtype: a row of the results. What is wrong gets no time."""
    x, dtype, device, save = xs[0], xs[0].dtype, xs[0].device, kept_by(cls.activation)
    release(device)
    row: report.Entry = {"name": cls.activation.name, "dtype": dtype_name(dtype), "save": save, "wrong": [], "notes": []}
    row |= {"errors": None, "ours": None, **dict.fromkeys(PEERS)}
    try:
        row["errors"], row["wrong"] = compare(cls, dtype, device)
        ours = Subject(cls().to(device, dtype), xs, dys)
        row["wrong"] = row["wrong"] or check_places(cls, ours)
    except Exception as error:  # a kernel that does not compile or run is one of the things to report
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
    """What an activation is compared with, after it has done everything once, or None and why it cannot take part."""
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
    except Exception as error:  # what cannot be exported or moved is one of the things to report
        return None, first_line(error)
    subject = Subject(module, xs, dys)
    trouble = subject.trouble()
    return (None, trouble) if trouble else (subject, None)


def time_all(xs: list[Tensor], subjects: dict[str, Subject]) -> dict[str, Any] | None:
    """The milliseconds of each direction, by subject, and their ``"spread"``; None if memory runs out.

    The spread is the median over the shortest time, where it is largest: on a machine that does nothing else it is near 1.
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
    """Measures everything, saying it row by row, and returns the results; those that there are, if it is interrupted."""
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
    """Adds to ``results`` what each task gives, and says it."""
    say(f"jitact {results['machine']['jitact']} of {HERE}")
    say(f"{report.describe_machine(results['machine'])} · {report.size(shape)}{remark}")
    xs: list[Tensor] = []
    for dtype, name in progress(tasks, len(tasks), lambda task: f"{task[1]} {dtype_name(task[0])}"):
        if not xs or xs[0].dtype != dtype:
            xs = dys = []
            release(device)
            xs, dys = make_inputs(shape, dtype, device)
            rates = ceilings(xs, dys)
            results["dtypes"][dtype_name(dtype)] = {"shape": shape, "bytes_per_second": rates}
            say(report.bench_heading(dtype_name(dtype), rates, peers))
        others = Others()
        row = measure_row(REGISTRY[name], xs, dys, rates, peers)
        crowded = device.type == "cpu" and others.disturb(torch.get_num_threads())
        row["busy"] = crowded or row.get("spread", 1.0) > BUSY
        results["rows"].append(row)
        say(report.bench_row(row, peers))
        release(device)


FIRST_USE = """
import sys
sys.path[:] = filter(None, sys.path)  # not what lies where this is started
import json, time, torch
x = torch.ones(8, device=sys.argv[1])
x.sum().item()
begin = time.perf_counter()
import jitact
seconds = {"import": time.perf_counter() - begin}
for name in sys.argv[2:]:
    begin = time.perf_counter()
    jitact.get(name)()(x).sum().item()
    seconds[name] = time.perf_counter() - begin
print(json.dumps(seconds))
"""


def first_use(names: list[str], device: torch.device, cold: list[str]) -> dict[str, Any]:
    """The time of first calls in new processes: with the cache, in milliseconds, and without, in seconds.

    Args:
        names: activations.
        device: where they run.
        cold: those to build anew; of the others, the cache tells how long their build took.
    """
    with tempfile.TemporaryDirectory() as empty:
        builds = _seconds_of_first_use(cold, device, JITACT_CACHE_DIR=empty)
    loads = _seconds_of_first_use(names, device)
    loads_ms = {name: 1000 * seconds for name, seconds in loads.items()}
    uses = {name: {"build_s": builds.get(name) or _recorded_seconds(name), "load_ms": loads_ms.get(name)} for name in names}
    return {"import_ms": loads_ms.get("import"), "first_use": uses}


def _seconds_of_first_use(names: list[str], device: torch.device, **variables: str) -> dict[str, float]:
    command = [sys.executable, "-c", FIRST_USE, str(device), *names]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))} | variables
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process would compile the Python of this package too
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}


def _recorded_seconds(name: str) -> float | None:
    """How long the cached build of an activation took, as its record in the cache says."""
    library = kernels.load(REGISTRY[name].activation.source)
    try:
        return json.loads((library.path.parent / "build.json").read_text())["seconds"]
    except (OSError, ValueError, KeyError):
        return None


def operands(
    parser: Parser, args: argparse.Namespace, dtypes: list[torch.dtype], names: list[str] | None = None
) -> dict[str, Any]:
    """``--operands``, and gated activations: measures all cases of the names that are given, or chosen, and returns results."""
    chosen = operand_cases.of_activations(names or args.names)
    if not chosen:
        parser.error(f"--operands has {', '.join(dict.fromkeys(case.activation for case in operand_cases.CASES))}")
    return operand_rows.measure_operands(chosen, dtypes, args.device, args.compile, args.shape)


def written(results: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """Writes results to a file, if there is to be one. Returns them with the lines that were in it and are not measured now."""
    both = with_kept(results, path)
    if "rows" in both:
        both["geometric_means"] = report.geometric_means(both["rows"])
    if path:
        write_json(path, both)
    return both


def wrong_in(rows: list[report.Entry]) -> set[str]:
    """The names of those rows of results that say that something is wrong."""
    return {row["name"] for row in rows if row.get("wrong")}


def blocks_of_models(parser: Parser, args: argparse.Namespace) -> int:
    """``--models``. Returns the exit code: 1 if a line is flagged."""
    on_gpu = args.device.type == "cuda"
    blocks = [block.strip() for block in args.models.split(",")] if args.models else list(models.BLOCKS)
    for block in blocks:
        if block not in models.BLOCKS:
            parser.error(f"no block {block!r}; choose from {', '.join(models.BLOCKS)}")
    names = [name for name in models.ACTIVATIONS if name in args.names]
    if not names:
        parser.error(f"--models has {', '.join(models.ACTIVATIONS)}")
    if not on_gpu and not args.models:
        blocks, names = models.ON_CPU[0], [name for name in names if name in models.ON_CPU[1]]
    dtypes = args.dtype or [torch.bfloat16, torch.float32][not on_gpu :]
    results = {"machine": machine(args.device)}
    say(report.describe_machine(results["machine"]))
    results |= models.measure_models(names, dtypes, args.device, blocks, min(8, (os.cpu_count() or 1) // 2) if on_gpu else 0)
    flagged = results["flagged"]
    if args.json:
        results = with_kept(results, args.json)
        results |= models.summary(results["rows"])
        write_json(args.json, results)
    return results["stopped"] or (1 if flagged else 0)


def parse_shape(text: str) -> tuple[int, ...]:
    """``"4096x393216"`` as ``(4096, 393216)``."""
    try:
        shape = tuple(int(part) for part in text.lower().replace(",", "x").split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"no shape {text!r}; write it like 4096x393216")
    return shape


def main(arguments: list[str] | None = None, prog: str = "bench.py") -> int:
    """The command line. Returns the exit code: 1 if an activation is wrong, 130 after Ctrl-C; bad arguments exit with 2."""
    return exit_code(lambda: _main(arguments, prog))


def _main(arguments: list[str] | None, prog: str) -> int:
    # Tensors of many sizes come and go here, each a good part of the memory: none of it may be lost between them.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    parser = Parser(prog=prog, description=__doc__)
    parser.add_argument(
        "--shape",
        type=parse_shape,
        metavar="NxM",
        help="by default 4096x393216 on a GPU, 4096x4096 on the CPU, or fewer rows where memory or time is short",
    )
    parser.add_argument("--compile", action="store_true", help="compare with torch.compile too")
    parser.add_argument(
        "--operands", action="store_true", help="instead, fused bias, dropout and residual, gates, formulas, rows (softmax)"
    )
    parser.add_argument("--exported", action="store_true", help="compare with the files that `jitact.export` writes too")
    parser.add_argument(
        "--cold", action="store_true", help="time the build of every named activation anew, not of the first only"
    )
    parser.add_argument(
        "--models",
        nargs="?",
        const="",
        metavar="BLOCK,...",
        help="instead, blocks of models before and after jitact.replace, eager and compiled; on a CPU only some",
    )
    parser.add_argument(
        "--json",
        type=parser.output_file,
        metavar="FILE",
        help="write all results and a description of the machine; results of this machine that are not measured again stay",
    )
    parser.add_argument(
        "--html", type=parser.output_file, metavar="FILE.html", help="write an HTML page: speed, memory, errors, first use"
    )
    parser.add_argument("--plot", type=parser.output_file, metavar="FILE.png", help="draw shares of the bandwidth (matplotlib)")
    args = parser.parse(arguments, formulas=operand_cases.FORMULAS)
    if args.models is not None:
        return blocks_of_models(parser, args)
    if args.plot and not report.can_plot():
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if args.compile:
        from torch._functorch import config

        config.donated_buffer = False  # so that backward can run many times on one graph
    dtypes = args.dtype or DTYPES[args.device.type]
    peers = ["eager", *(peer for peer in ("compile", "exported") if getattr(args, peer))]
    gated = [name for name in args.names if REGISTRY[name].activation.gating] if not args.operands else []
    elementwise = [name for name in args.names if name not in gated]
    if args.operands or not elementwise:
        if args.html or args.plot:
            parser.error("--html and --plot show elementwise activations, and none is to be measured")
        results = operands(parser, args, dtypes)
        written(results, args.json)
        for line in text.distrust(results["operands"]):
            say(line)
        return results["stopped"] or (1 if wrong_in(results["operands"]) else 0)
    if args.shape:
        needed, memory = (
            LEAST_COPIES * math.prod(args.shape) * max(dtype.itemsize for dtype in dtypes),
            total_memory(args.device),
        )
        if needed > memory:
            parser.error(f"--shape needs about {needed / 1e9:.3g} GB, and {args.device} has {memory / 1e9:.3g}")
    try:
        results = measure_all(elementwise, dtypes, args.device, args.shape, peers)
    except torch.OutOfMemoryError:
        parser.error(f"{args.device} has too little memory for this size; choose another with --shape")
    results |= {"geometric_means": report.geometric_means(results["rows"]), "import_ms": None, "first_use": {}}
    if gated and not results["stopped"]:
        results |= operands(parser, args, dtypes, gated)
    wrong = wrong_in(results["rows"] + results.get("operands", []))
    right = [name for name in args.names if name not in wrong]
    if not results["stopped"]:
        with keeping(results):
            results |= first_use(right, args.device, right if args.cold else right[:1])
    both = written(results, args.json)
    if args.html:
        args.html.write_text(page.report_html(both), encoding="utf-8")
    if args.plot and both["rows"]:
        report.draw(both, args.plot)
    print(report.bench_summary(results))
    return results["stopped"] or (1 if wrong else 0)


if __name__ == "__main__":
    sys.exit(main(prog="bench.py" if __spec__ is None else "python -m jitact.bench"))
