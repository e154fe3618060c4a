"""How far results are from exact, in units in the last place (ulp): the measure, and the exhaustive tool built on it.

``jitact accuracy`` compares the forward and gradient of every activation, with every choice of what backward keeps, with
float64, and PyTorch's too: on every finite fp16 and bf16 value and, on a GPU, on all 2^32 fp32 values (on a CPU on a dense
sample); softmax and its relatives on random and extreme rows of many lengths. It reports the largest error in ulp, the input
where it occurs, the share of inputs above the usual bound and the bounds that are exceeded, and writes ``results/accuracy-<cpu
or cuda>.json`` and a table next to it. Results in that file of the same machine, or of a GPU of the same compute capability,
that are not measured again are kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from jitact import registry, report
from jitact.definitions.kernel_file import write_file
from jitact.measuring import row_accuracy
from jitact.measuring.commandline import (
    Parser,
    dtype_name,
    exit_code,
    first_line,
    keeping,
    machine,
    progress,
    say,
    stopped_at_once,
    with_kept,
    write_json,
)
from jitact.measuring.limits import BOUNDS, OF_GATES, UNUSUAL
from jitact.measuring.oracle import exact_function
from jitact.measuring.pairs import Judge, pairs
from jitact.measuring.text import figure
from jitact.measuring.ulp import Error, every_16bit_value, fp32_values, sample, ulp_error, value_and_gradient
from jitact.modules import ActivationModule
from jitact.records import Activation
from jitact.registry import REGISTRY

__all__ = ["Error", "broken_rules", "every_16bit_value", "measure", "sample", "ulp_error"]


Errors = dict[str, Error]  # keys "forward", "gradient" and, for save="output", "gradient of y", relative to that at the saved y


def pieces(dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    """Every finite value of a type, in pieces; or :func:`sample` if that would take too long."""
    if dtype is torch.float32 and device.type == "cuda":
        for start in range(-(2**31), 2**31, 2**26):
            yield fp32_values(device, 1, start, start + 2**26)
    else:
        yield sample(dtype, device)


def measure(
    cls: type[ActivationModule], subjects: dict[str, nn.Module], dtype: torch.dtype, values: Iterator[Tensor]
) -> dict[str, Errors]:
    """The errors of several modules that should all compute an activation with its default parameters.

    Args:
        cls: the activation.
        subjects: modules by a name of the caller's choice, on the device and in the dtype of ``values``.
        dtype: of ``values``.
        values: inputs, 1-d tensors.
    """
    errors: dict[str, Errors] = {name: {"forward": Error(), "gradient": Error()} for name in subjects}
    bound, exact = BOUNDS[dtype], None
    for x in values:
        if x.numel() == 0:
            continue
        exact = exact or exact_function(cls().to(x.device, dtype), dtype)
        y, dx = value_and_gradient(exact, x.double())
        tiny = torch.finfo(dtype).tiny if dtype.itemsize > 2 else 0.0  # subnormal float32 and float64 results are not judged
        for name, module in subjects.items():
            own_y, own_dx = value_and_gradient(module, x)
            found = errors[name]
            floor = cls.activation.zero_crossing if dtype is torch.float32 else None
            error = ulp_error(own_y, y, dtype, floor).masked_fill((y.abs() < tiny) & (own_y.abs() <= tiny), 0.0)
            found["forward"].add(x, error, bound.usual, bound.forward)
            found["gradient"].add(x, ulp_error(own_dx, dx, dtype, bound.floor), bound.gradient, bound.gradient)
            if isinstance(module, ActivationModule) and (module.save or cls.activation.saves[0]) == "output":
                params = [p.detach().double() if isinstance(p, Tensor) else p for p in module._params()]
                of_y = cls.activation.gradient_from_output(torch.ones_like(y), own_y.double(), *params)
                error = ulp_error(own_dx, of_y, dtype, bound.floor)
                found.setdefault("gradient of y", Error()).add(x, error, bound.gradient, bound.gradient)
    return errors


def broken_rules(
    cls: type[ActivationModule], save: str, dtype: torch.dtype, errors: Errors, peer: Errors | None = None
) -> list[str]:
    """Descriptions of the bounds that are exceeded; empty if all hold.

    Args:
        cls: the activation.
        save: what was kept for backward.
        dtype: of the results.
        errors: the result of :func:`measure` for it.
        peer: the result for PyTorch's own on every input, a bound of fp32 forward and of gradients of kept outputs.
    """
    bound, rules = BOUNDS[dtype], []
    kinds = {"forward": bound.forward, "gradient of y" if save == "output" else "gradient": bound.gradient}
    for kind, limit in kinds.items():
        error = errors[kind]
        if error.broken:
            inputs = f"{error.broken} of {error.count} inputs are above {limit:g}"
            rules.append(f"{kind} off by {figure(error.ulp)} ulp at x = {error.at!r}; {inputs}")
    forward = errors["forward"]
    if forward.unusual > UNUSUAL * forward.count:
        rules.append(f"forward off by more than {bound.usual} ulp for {forward.unusual / forward.count:.2%} of the inputs")
    if peer and dtype is torch.float32 and forward.ulp > max(peer["forward"].ulp, 0.5):
        rules.append(
            f"forward off by {figure(forward.ulp)} ulp at x = {forward.at!r}, PyTorch by {figure(peer['forward'].ulp)}"
        )
    keeps_its_output = save == "output" and cls.activation.saves[0] == "output"  # PyTorch keeps the output of these too
    if peer and keeps_its_output and errors["gradient"].ulp > peer["gradient"].ulp + bound.gradient:
        own, other = figure(errors["gradient"].ulp), figure(peer["gradient"].ulp)
        rules.append(f"gradient off by {own} ulp at x = {errors['gradient'].at!r}, PyTorch by {other}")
    return rules


def supports(module: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a PyTorch module supports a dtype on a device."""
    try:
        value_and_gradient(module, torch.ones(2, dtype=dtype, device=device))
    except RuntimeError:
        return False
    return True


def measure_pairs(
    record: Activation, subjects: dict[str, nn.Module], values: Iterator[tuple[Tensor, Tensor, Tensor]]
) -> dict[str, Errors]:
    """The errors of several modules that should all compute a gated activation with its default parameters.

    Args:
        record: of the activation.
        subjects: modules of two tensors, in the order of the halves, by a name of the caller's choice.
        values: gates, ups and incoming gradients.
    """
    errors: dict[str, Errors] = {name: {"forward": Error(), "gradient": Error()} for name in subjects}
    for gate, up, dy in values:
        bound = OF_GATES[gate.dtype]
        judge, first = Judge(record, gate, up, dy), record.gating.gate == "first"
        for name, module in subjects.items():
            found = judge.errors(lambda g, u, m=module, f=first: m(g, u) if f else m(u, g))
            for kind, (at, error) in found.items():
                errors[name]["forward" if kind == "forward" else "gradient"].add(at, error, bound, bound)
    return errors


def gated_rows_of(name: str, dtype: torch.dtype, device: torch.device, fast_math: bool) -> Iterator[dict]:
    """:func:`rows_of` for a gated activation."""
    cls = REGISTRY[name]
    halves = _Halves(cls.Model()) if cls.activation.module else cls.Model()
    subjects = {"torch": halves, "ours": cls()} | ({"fast": cls(fast_math=True)} if fast_math else {})
    errors = measure_pairs(cls.activation, subjects, pairs(dtype, device))
    for subject in list(subjects)[1:]:
        own, broken = errors[subject], []
        for kind, error in own.items():
            if error.broken and subject == "ours":
                inputs = f"{error.broken} of {error.count} inputs are above {OF_GATES[dtype]:g}"
                broken.append(f"{kind} off by {figure(error.ulp)} ulp at gate = {error.at!r}; {inputs}")
        yield {
            "name": name,
            "dtype": dtype_name(dtype),
            "save": "input",
            "fast_math": subject == "fast",
            "ours": {kind: asdict(error) for kind, error in own.items()},
            "torch": {kind: asdict(error) for kind, error in errors["torch"].items()},
            "broken": broken,
        }


class _Halves(nn.Module):
    """Calls a PyTorch module that takes one tensor with its two halves."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.module(torch.cat((first, second)))


def rows_of(name: str, dtype: torch.dtype, device: torch.device, fast_math: bool) -> Iterator[dict]:
    """The results for an activation and a dtype: a row for each choice of ``save``, and for fast_math if asked for."""
    of_rows = registry.of_rows(name)
    if of_rows:
        yield from row_accuracy.rows_of(of_rows.activation, dtype, device)
        return
    cls = REGISTRY[name]
    if cls.activation.gating:
        yield from gated_rows_of(name, dtype, device, fast_math)
        return
    options = [{"save": save} for save in cls.activation.saves]
    if fast_math:
        options.append({"fast_math": True})
    peer = cls.Model().to(device, dtype).eval()
    subjects = {"torch": peer} if supports(peer, dtype, device) else {}
    try:
        subjects |= {str(each): cls(**each).to(device, dtype).eval() for each in options}
        errors = measure(cls, subjects, dtype, pieces(dtype, device))
    except Exception as error:  # kernels that do not compile or run are reported
        yield {"name": name, "dtype": dtype_name(dtype), "broken": [first_line(error)]}
        return
    theirs = errors.get("torch")
    exhaustive = dtype.itemsize == 2 or device.type == "cuda"
    for each in options:
        own = errors[str(each)]
        save = each.get("save", cls.activation.saves[0])
        yield {
            "name": name,
            "dtype": dtype_name(dtype),
            "save": save,
            "fast_math": "fast_math" in each,
            "ours": {kind: asdict(error) for kind, error in own.items()},
            "torch": theirs and {kind: asdict(error) for kind, error in theirs.items()},
            "broken": [] if "fast_math" in each else broken_rules(cls, save, dtype, own, theirs if exhaustive else None),
        }


COLUMNS = ("forward, worst", "above", "PyTorch's", "gradient, worst", "PyTorch's")


def describe_row(row: dict) -> str:
    """A row as a line, followed by a line for each exceeded bound."""
    line = f"{row['name']:16}{row['dtype']:6}{'fast_math' if row.get('fast_math') else row.get('save', ''):8}"
    for kind in ("forward", "gradient") if "ours" in row else ():
        own, other = row["ours"][kind], row["torch"] and row["torch"][kind]
        line += _columns_of(own) + (f"{own['unusual'] / own['count']:8.2%}" if kind == "forward" else "") + _columns_of(other)
    return "\n".join([line, *(f"  BROKEN: {rule}" for rule in row["broken"])])


def _columns_of(error: dict | None) -> str:
    return f"{figure(error['ulp']):>9} at {error['at']:<12.6g}" if error else f"{'-':>9}{'':16}"


def main(arguments: list[str] | None = None, prog: str = "python -m jitact.accuracy") -> int:
    """The command line.

    Returns the exit code: 1 if a bound is broken, 2 for bad arguments, 130 after Ctrl-C, 143 after SIGTERM.
    """
    return exit_code(lambda: _main(arguments, prog))


def _results_and_table(text: str) -> Path:
    """The file of results for ``type=``, beside which a table is written, or is one that was."""
    path = Parser.results_file(text)
    table = path.with_suffix(".md")
    if path == table or (table.exists() and not path.exists()):
        raise argparse.ArgumentTypeError(f"the table would go to {str(table)!r}, which holds something else")
    Parser.output_file(str(table))
    return path


def _main(arguments: list[str] | None, prog: str) -> int:
    parser = Parser(prog=prog, description=__doc__.partition("\n\n")[2])
    parser.add_argument("--fast-math", action="store_true", help="also measure the -use_fast_math builds, which have no bound")
    parser.add_argument("--json", type=_results_and_table, metavar="FILE", help="where results go; the table goes beside it")
    args = parser.parse(arguments, of_rows=True)
    usual_place = not args.json
    if usual_place:
        try:
            Path("results").mkdir(exist_ok=True)
            args.json = _results_and_table(f"results/accuracy-{args.device.type}.json")
        except (OSError, argparse.ArgumentTypeError) as error:
            parser.error(f"{error}; choose another file with --json")
    fact = "capability" if args.device.type == "cuda" else "device"  # GPUs of one capability run the same machine code
    parser.refuse_results_of_others(args.json, "broken", args.device, fact)
    results = {"machine": machine(args.device), "rows": []}
    print(report.describe_machine(results["machine"]))
    print(f"{'':30}" + "".join(f"{title:>8}" if title == "above" else f"{title:>16}{'':9}" for title in COLUMNS))
    dtypes = args.dtype or [torch.float16, torch.bfloat16, torch.float32]
    tasks = [(name, dtype) for name in args.names for dtype in dtypes]
    with keeping(results):
        for name, dtype in progress(tasks, len(tasks), lambda task: f"{task[0]} {dtype_name(task[1])}"):
            for row in rows_of(name, dtype, args.device, args.fast_math):
                results["rows"].append(row)
                say(describe_row(row))
    if stopped_at_once(results):
        print("STOPPED before the first row")
        return results["stopped"]
    if results["stopped"] and usual_place:  # the default file is for complete runs
        args.json = args.json.with_suffix(".part.json")
    own = len(results["rows"])
    broken = {row["name"] for row in results["rows"] if row["broken"]}
    # Errors of other jitact versions are kept until remeasured, and of other GPUs that run the same machine code.
    results = with_kept(results, args.json, (fact, "torch"))
    write_json(args.json, results)
    table = args.json.with_suffix(".md")
    write_file(table, report.accuracy_markdown(results))
    print(f"\nwrote {args.json} and {table}")
    if results["stopped"]:
        print(f"STOPPED after {own} rows; the others were not looked at")
    holds = "every bound of these holds" if results["stopped"] else "every bound holds"
    print(f"bounds broken by: {', '.join(sorted(broken))}" if broken else holds)
    return results["stopped"] or (1 if broken else 0)


if __name__ == "__main__":
    sys.exit(main())
