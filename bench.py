"""Correctness, speed and memory of every activation compared with PyTorch's: ``python bench.py``, or ``jitact bench``.

Each activation and dtype is first compared with float64; wrong ones are not timed. Then forward (without autograd), forward +
save (with autograd) and backward are timed in alternation with PyTorch's, and the medians are reported. The floor of each is
its minimum memory traffic over the ceiling, which is the best bandwidth that torch or jitact reached in the same run with as
many reads and writes. Bytes kept for backward are those that autograd's saved-tensor hooks see, per element. Gated activations,
given as two tensors and as one that holds both, have a table of their own after the others, in the form of ``--operands``.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def not_this_one() -> str | None:
    """Why ``import jitact`` does not find the package that contains this file; None if it does."""
    found, install = find_spec("jitact"), f"pip install -e {shlex.quote(str(HERE))}"
    if found is None or found.origin is None:
        return f"there is no package jitact: {install}"
    there = Path(found.origin).resolve().parent
    if there == HERE:
        return None
    return f"`import jitact` finds {there}, not {HERE}: {install}, or measure the other with python -m jitact.bench"


if __name__ == "__main__":
    # `python bench.py` puts this folder, the inside of a package, on the path, where it would hide other `kernels` packages.
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != HERE]
    if trouble := not_this_one():
        print(f"bench.py: {trouble}", file=sys.stderr)
        sys.exit(2)

import torch

from jitact import report
from jitact.definitions.kernel_file import write_file
from jitact.measuring import host_calls, models, operand_cases, operand_rows, page, text
from jitact.measuring.activation_rows import measure_all
from jitact.measuring.commandline import Parser, exit_code, keeping, machine, say, stopped_at_once, with_kept, write_json
from jitact.measuring.first_calls import first_use
from jitact.registry import REGISTRY

LEAST_COPIES = 6  # tensors of the full size alive at once without peers, which are left out of a row if memory is short
TINY = (8, 64)  # the shape of --calls
NOT_WITH = {
    "--models": ("shape", "compile", "operands", "calls", "exported", "cold", "html", "plot"),
    "--calls": ("compile", "operands", "exported", "cold", "html", "plot"),
    "--operands": ("exported", "cold", "html", "plot"),
}
"""Options that would change nothing beside one that measures something else instead of activations."""
DTYPES = {"cuda": [torch.float32, torch.bfloat16, torch.float16], "cpu": [torch.float32, torch.bfloat16]}


def operands(
    parser: Parser, args: argparse.Namespace, dtypes: list[torch.dtype], names: list[str] | None = None
) -> dict[str, Any]:
    """``--operands``, and gated activations: measures all cases of ``names``, or of the command line's, and returns results."""
    chosen = operand_cases.cases_of(names or args.names)
    if not chosen:
        parser.error(f"--operands has {', '.join(dict.fromkeys(case.activation for case in operand_cases.CASES))}")
    return operand_rows.measure_operands(chosen, dtypes, args.device, args.compile, args.shape)


def means(rows: list[report.Entry]) -> dict[str, Any]:
    """What results of activations say about all of their rows."""
    return {"geometric_means": report.geometric_means(rows)}


def written(
    results: dict[str, Any], path: Path | None, about: Callable[[list[report.Entry]], dict[str, Any]] = means
) -> dict[str, Any]:
    """Merges results with the rows in a file that were not measured again, writes the file if one is given, and returns all.

    A measurement that was stopped before its first row leaves the file as it is. ``about`` tells what depends on all rows.
    """
    both = with_kept(results, path)
    if "rows" in both:
        both |= about(both["rows"])
    if path and not stopped_at_once(results):
        write_json(path, both)
    return both


def wrong_in(rows: list[report.Entry]) -> set[str]:
    """The names in the rows that report something wrong."""
    return {row["name"] for row in rows if row.get("wrong")}


def operands_alone(parser: Parser, args: argparse.Namespace, dtypes: list[torch.dtype]) -> int:
    """``--operands``, or gated activations only. Returns the exit code: 1 if a line is wrong."""
    results = operands(parser, args, dtypes)
    written(results, args.json)
    for line in text.distrust(results["operands"]):
        say(line)
    return results["stopped"] or (1 if wrong_in(results["operands"]) else 0)


def activations(
    parser: Parser, args: argparse.Namespace, dtypes: list[torch.dtype], elementwise: list[str], gated: list[str]
) -> int:
    """Elementwise activations, followed by gated ones if there are any. Returns the exit code: 1 if one is wrong."""
    peers = ["eager", *(peer for peer in ("compile", "exported") if getattr(args, peer))]
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
    if args.html and not stopped_at_once(results):
        write_file(args.html, page.report_html(both))
    if args.plot and both["rows"]:
        report.draw(both, args.plot)
    print(report.bench_summary(results))
    return results["stopped"] or (1 if wrong else 0)


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
    written(results, args.json, models.summary)
    return results["stopped"] or (1 if flagged else 0)


def calls_of_the_host(parser: Parser, args: argparse.Namespace) -> int:
    """``--calls``. Returns the exit code."""
    names = dict.fromkeys(case.activation for case in host_calls.COMPARED)
    if not set(args.names) & set(names):
        parser.error(f"--calls has {', '.join(names)}")
    results = host_calls.measure_calls(args.names, args.dtype or [torch.float32], args.device, args.shape or TINY)
    written(results, args.json, lambda rows: {})
    for line in text.distrust(results["rows"]):
        say(line)
    return results["stopped"]


def refuse_too_large(parser: Parser, args: argparse.Namespace, dtypes: list[torch.dtype]) -> None:
    """An error for a ``--shape`` that the memory of the device has no room for."""
    needed = LEAST_COPIES * math.prod(args.shape) * max(dtype.itemsize for dtype in dtypes)
    memory = total_memory(args.device)
    if needed > memory:
        parser.error(f"--shape needs about {needed / 1e9:.3g} GB, and {args.device} has {memory / 1e9:.3g}")


def total_memory(device: torch.device) -> int:
    """The memory of a device in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
    """The command line.

    Returns the exit code: 1 if an activation is wrong, 130 after Ctrl-C, 143 after SIGTERM; bad arguments exit with 2.
    """
    return exit_code(lambda: _main(arguments, prog))


def _main(arguments: list[str] | None, prog: str) -> int:
    # Large tensors of many sizes are allocated and freed: expandable segments avoid fragmentation.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    parser = _parser(prog)
    args = parser.parse(arguments, others=[case.name for case in operand_cases.CASES])
    gated = [name for name in args.names if REGISTRY[name].activation.gating] if not args.operands else []
    elementwise = [name for name in args.names if name not in gated]
    mode = "--models" if args.models is not None else "--calls" if args.calls else "--operands" if args.operands else ""
    measured = mode or ("" if elementwise else "--operands")  # gated activations alone are measured as it measures them
    for option in NOT_WITH.get(measured, ()):
        if getattr(args, option):
            none = f"--{option} is for elementwise activations, and none is to be measured"
            parser.error(f"{mode} does not take --{option}" if mode else none)
    parser.refuse_results_of_others(args.json, {"--models": "block", "--calls": "us"}.get(mode, "wrong"), args.device)
    dtypes = args.dtype or DTYPES[args.device.type]
    if args.shape:
        refuse_too_large(parser, args, dtypes)
    if mode == "--models":
        return blocks_of_models(parser, args)
    if mode == "--calls":
        return calls_of_the_host(parser, args)
    if args.plot and not report.can_plot():
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if args.compile:
        from torch._functorch import config

        config.donated_buffer = False  # so that backward can run many times on one graph
    if args.operands or not elementwise:
        return operands_alone(parser, args, dtypes)
    return activations(parser, args, dtypes, elementwise, gated)


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description=__doc__)
    parser.add_argument(
        "--shape",
        type=parse_shape,
        metavar="NxM",
        help="by default 4096x393216 on a GPU, 4096x4096 on the CPU, or fewer rows where memory or time is short",
    )
    parser.add_argument("--compile", action="store_true", help="compare with torch.compile too")
    parser.add_argument(
        "--operands", action="store_true", help="instead, fused operands (of gelu, or gelu+bias alone), gates, formulas, rows"
    )
    parser.add_argument("--calls", action="store_true", help="instead, what calls on tensors of 8x64 elements take of the host")
    parser.add_argument(
        "--exported", action="store_true", help="compare elementwise ones with the files that `jitact.export` writes too"
    )
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
        type=parser.results_file,
        metavar="FILE",
        help="write all results and a description of the machine; results of this machine that are not measured again stay",
    )
    parser.add_argument(
        "--html", type=parser.output_file, metavar="FILE.html", help="write an HTML page: speed, memory, errors, first use"
    )
    parser.add_argument("--plot", type=parser.output_file, metavar="FILE.png", help="draw shares of the bandwidth (matplotlib)")
    return parser


if __name__ == "__main__":
    sys.exit(main(prog="bench.py" if __spec__ is None else "python -m jitact.bench"))
