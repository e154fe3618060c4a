"""Markdown tables of measurements: errors, all activations, the README's tables."""

from __future__ import annotations

import collections
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from ..registry import REGISTRY
from ..rows.records import TABLE
from .headline import HEADLINE_DTYPE, headlines
from .models import HOST_LIMIT
from .operand_cases import FORMULAS
from .picture import headline_svg
from .text import DIRECTIONS, PEERS, Entry, describe_machine, dtypes_of, figure, kept_text, shape_of, share, size, step_share

__all__ = [
    "accuracy_markdown",
    "activations_markdown",
    "current_activations_markdown",
    "current_comparison",
    "current_headline",
    "current_readme",
]

OTHER_PEERS = {"liger": "Liger-Kernel"}
NOT_OF_THE_FORMULA = ("inplace", "device", "dtype", "dim")  # arguments of constructors that the formula does not depend on


def accuracy_markdown(results: Entry) -> str:
    """The table of the worst errors of jitact and PyTorch, from accuracy.py's results."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in results["rows"]))
    found = {(row["name"], row.get("save"), row.get("fast_math"), row["dtype"]): row for row in results["rows"]}
    covered = "every finite value" if results["machine"]["kind"] == "cuda" else "every finite value; of fp32, a sample"
    lines = [
        "# Worst errors",
        "",
        f"Written by `jitact accuracy`: {_origin(results)}.",
        "",
        f"**jitact** / PyTorch, in ulp of the dtype, against float64, over {covered}. The unit is the spacing",
        "of the dtype at the exact result, so a correctly rounded one is off by at most 0.50. Of fp32, results that are normal",
        "numbers count. The gradient is that for dy = 1; where it is smaller than 2^-8 (of fp32, 1) its unit is the ulp there.",
        f"Of rows ({', '.join(TABLE)}), random and extreme ones of many lengths count, as the kernels compute them; of the",
        "gradient, with random dy, the unit is the dtype's epsilon times the sum of the sizes of its terms.",
        "",
        _cells("activation", "backward keeps", *(f"{dtype} {kind}" for dtype in dtypes for kind in ("forward", "gradient"))),
        _cells("---", "---", *["---:"] * (2 * len(dtypes))),
    ]
    for name, save, fast_math in dict.fromkeys(key[:3] for key in found):
        cells = []
        for dtype in dtypes:
            row = found.get((name, save, fast_math, dtype), {})
            for kind in ("forward", "gradient"):
                ours, peer = (row[of][kind] if row.get(of) else None for of in ("ours", "torch"))
                cells.append(f"**{figure(ours['ulp'])}** / {figure(peer['ulp']) if peer else '-'}" if ours else "-")
        lines.append(_cells(f"{name}{', fast_math' if fast_math else ''}", save or "-", *cells))
    return "\n".join(lines) + "\n"


def _origin(results: Entry) -> str:
    """The machine that results are of, and how many of their rows another version or device measured."""
    rows = results["rows"]
    others = collections.Counter(row["by"] for row in rows if "by" in row)
    return describe_machine(results["machine"]) + "".join(f"; {n} of {len(rows)} rows by {by}" for by, n in others.items())


def activations_markdown(accuracy: Entry | None, bench: Entry | None, *operands: Entry) -> str:
    """ACTIVATIONS.md: everything that is registered, with what was measured of it.

    Args:
        accuracy: what accuracy.py wrote, if it was run.
        bench: what bench.py wrote, if it was run.
        operands: what ``bench.py --operands`` wrote, in each of its runs; also the other, which measures gated ones so.
    """
    timed = [dtype for dtype in dtypes_of(bench) if dtype != "fp16"]  # as bf16, and the table is wide
    sources = [f"Errors: {_origin(accuracy)}."] if accuracy else []
    if bench:
        sources.append(f"Speed: {describe_machine(bench['machine'])}, {shape_of(bench)}.")
    lines = [
        "# Activations",
        "",
        "Written by `jitact report` from the table in activations.py and the measurements in results/.",
        *sources,
        "",
        "- Kept for backward: the default, then the other choices of `save=`.",
        "- Worst error: forward / gradient, in ulp of the dtype, over every finite value; results/accuracy-cuda.md has more.",
        "- Share of the floor: the time that memory needs to move the fewest bytes, as a share of the time that was taken;",
        "  forward without autograd / forward that keeps what backward needs / backward.",
        "- Faster: how many times as fast as PyTorch eager / torch.compile, forward and backward together.",
        "",
        _cells("activation", "formula", "parameters", "kept for backward", *(f"worst error {d}" for d in dtypes_of(accuracy)),
               *(f"{what} {d}" for d in timed for what in ("share of the floor", "faster"))),
        _cells(*["---"] * 4, *["---:"] * (len(dtypes_of(accuracy)) + 2 * len(timed))),
    ]  # fmt: skip
    for name, cls in REGISTRY.items():
        record = cls.activation
        formula = record.formula.replace("|", "\\|")
        cells = [f"{name} ({record.title})", f"`{formula}`"]
        own = record.own_arguments | dict(record.params)
        parameters = {key: value for key, value in own.items() if key not in NOT_OF_THE_FORMULA}
        cells.append(", ".join(f"{key}={value!r}" for key, value in parameters.items()) or "-")
        cells.append(", ".join({"bit": "1 bit"}.get(save, save) for save in record.saves))
        for dtype in dtypes_of(accuracy):
            row = _find(accuracy, name=name, dtype=dtype, save=record.saves[0])
            cells.append(" / ".join(figure(row["ours"][kind]["ulp"]) for kind in ("forward", "gradient")) if row else "-")
        for dtype in timed:
            row = _find(bench, name=name, dtype=dtype)
            cells.append(" / ".join(f"{share(row, direction):.0%}" for direction in DIRECTIONS) if row else "-")
            cells.append(" / ".join(_faster(row, peer) for peer in ("eager", "compile")) if row else "-")
        lines.append(_cells(*cells))
    gated = [name for name, cls in REGISTRY.items() if cls.activation.gating]
    speeds = _speeds_markdown(gated, operands)
    if speeds:
        note = "Two tensors, or one that holds both where the row says so, compared with the formula in PyTorch."
        lines += ["", "## Gated", "", note]
    lines += speeds
    speeds = _speeds_markdown(list(FORMULAS), [results for results in operands if results["machine"].get("kind") == "cuda"])
    if speeds:
        note = "What `jitact.define` makes of an expression, compared with the formula in PyTorch:"
        defined = (f"`{name}` is `{expression}`" for name, (expression, _) in FORMULAS.items())
        lines += ["", "## Formulas", "", f"{note} {', '.join(defined)}."]
    lines += speeds
    measured = {row["name"] for results in operands for row in results["operands"]}
    speeds = _speeds_markdown([name for name in measured if "+" in name and name.split("+")[0] in REGISTRY], operands)
    if speeds:
        note = "One kernel, as `jitact.gelu(x, bias=b, dropout=0.1, residual=r)`; backward includes the gradient of the bias."
        lines += ["", "## With bias, dropout and residual", "", note]
    return "\n".join([*lines, *speeds, *_rows_markdown(accuracy, operands)]) + "\n"


def _rows_markdown(accuracy: Entry | None, operands: Sequence[Entry]) -> list[str]:
    """The row activations: errors, and speed by shape."""
    dtypes = dtypes_of(accuracy)
    lines = [
        "",
        "## Rows",
        "",
        "Each element depends on its row. [The guide](docs/guide.md#rows) says which calls the kernels take.",
        "",
        "- Worst error of the kernels: forward in ulp / gradient in epsilons of the sum of the magnitudes of its terms.",
        "",
        _cells("activation", "formula", "kept for backward", *(f"worst error {dtype}" for dtype in dtypes)),
        _cells(*["---"] * 3, *["---:"] * len(dtypes)),
    ]
    for name, record in TABLE.items():
        cells = [f"{name} ({record.title})", f"`{record.formula}`", ", ".join(record.saves)]
        for dtype in dtypes:
            row = _find(accuracy, name=name, dtype=dtype, save=record.saves[0])
            cells.append(" / ".join(figure(row["ours"][kind]["ulp"]) for kind in ("forward", "gradient")) if row else "-")
        lines.append(_cells(*cells))
    return lines + _speeds_markdown(list(TABLE), operands)


def _speeds_markdown(names: list[str], operands: Sequence[Entry]) -> list[str]:
    """Tables of the results of ``bench.py --operands`` for some activations, one for each run that measured any of them."""
    lines = []
    for results in operands:
        found = [row for row in results["operands"] if row["name"].split(",")[0] in names and not row.get("wrong")]
        if not found:
            continue
        peers = [peer for peer in (*PEERS, "liger") if any(peer in row["ms"]["forward"] for row in found)]
        shown = ", ".join(OTHER_PEERS.get(peer) or PEERS[peer] for peer in peers)
        lines += [
            "",
            f"Speed: {describe_machine(results['machine'])}. Share of the floor, and how many times as fast as {shown}:",
            "",
            _cells("activation", "dtype", "shape", "forward", "times as fast", "backward", "times as fast", "bytes kept"),
            _cells(*["---"] * 3, *["---:"] * 5),
        ]
        for row in found:
            cells = [row["name"], row["dtype"], size(row["shape"])]
            for direction in ("forward", "backward"):
                ms = row["ms"][direction]
                cells.append(f"{row['floor'][direction] / ms['ours']:.0%}")
                cells.append(" / ".join(f"{ms[peer] / ms['ours']:.2f}x" if peer in ms else "-" for peer in peers))
            lines.append(_cells(*cells, kept_text(row["kept"]["ours"])))
    return lines


def _faster(row: Entry, peer: str) -> str:
    return f"{step_share(row, 'ours') / step_share(row, peer):.2f}x" if row[peer] else "-"


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _find(results: Entry, **wanted: str) -> Entry | None:
    """The first row with these values in which jitact was measured, without fast_math."""
    matching = (row for row in results["rows"] if row.get("ours") and not row.get("fast_math"))
    return next((row for row in matching if all(row[key] == value for key, value in wanted.items())), None)


def current_activations_markdown(checkout: Path) -> str:
    """The current text of ACTIVATIONS.md, from the measurements in a checkout: those on a GPU, if there are any."""
    accuracy, bench = (_results(checkout, tool) for tool in ("accuracy", "bench"))
    return activations_markdown(accuracy, bench, *_operands(checkout))


# The README's tables

LINE = 0.97  # the share of the memory bandwidth that every activation should reach on a GPU


def headline_markdown(bench: Entry | None, *operands: Entry) -> str:
    """A table of a few activations of different kinds compared with PyTorch's, and a summary of all of them.

    Args:
        bench: what bench.py wrote, if it was run.
        operands: what ``bench.py --operands`` wrote, in each of its runs: of gated ones, of rows.
    """
    if not bench:
        return ""
    facts = bench["machine"]
    lines = [
        f"Forward + backward in {HEADLINE_DTYPE} on one {facts['device']}, torch {facts['torch']}. *Of the memory bandwidth*:",
        "100% is the time to move the fewest bytes that the computation needs, at the speed of a copy in the same run.",
        "*Bytes kept*: per element, from forward to backward.",
        "",
        _cells("", "shape", "of the memory bandwidth", "times as fast as eager", "as torch.compile", "bytes kept / eager's"),
        _cells("---", "---", *["---:"] * 4),
    ]
    for each in headlines(bench, operands):
        faster = (f"{times:.2f}x" if (times := each.faster(peer)) else "-" for peer in ("eager", "compile"))
        kept = f"{kept_text(each.kept['ours'])} / {kept_text(each.kept['eager'])}" if "eager" in each.kept else "-"
        lines.append(_cells(f"`{each.name}`", each.shape, f"{each.shares['ours']:.0%}", *faster, kept))
    return "\n".join([*lines, "", *_all_of(bench)]) + "\n"


def _all_of(bench: Entry) -> list[str]:
    """The summary of all activations: geometric means, and those below :data:`LINE`."""
    means = [m for m in bench["geometric_means"] if m["dtype"] == HEADLINE_DTYPE and m["peer"] != "exported"]
    lines = []
    for of, which in (
        ("all", "Geometric mean of all {} elementwise activations"),
        ("classic", "Of the {} that torch.nn has"),
    ):
        found = [mean for mean in means if mean["of"] == of]
        times = ", ".join(f"{mean['step']:.2f} times as fast as {PEERS[mean['peer']]}" for mean in found)
        lines += [f"{which.format(found[0]['count'])}: {times}."] if found else []
    rows = [row for row in bench["rows"] if row["ours"]]
    below = [f"{row['name']} {row['dtype']}" for row in rows if any(share(row, d) < LINE for d in DIRECTIONS)]
    dtypes = ", ".join(dtypes_of(bench))
    verdict = f"Below {LINE:.0%} of the memory bandwidth, forward or backward (measured in {dtypes}): {', '.join(below)}."
    if not below:
        verdict = f"All are at {LINE:.0%} of the memory bandwidth or better, forward and backward, in {dtypes}."
    return [*lines, verdict]


def training_markdown(training: Entry | None) -> str:
    """The table of whole models' training steps before and after ``replace``, as measured by notebooks/swap_models.py."""
    if not training:
        return ""
    lines = [
        f"Training steps of whole models in {training['dtype']}, before → after `jitact.replace`:",
        f"{describe_machine(training['machine'])}.",
        "",
        _cells("model", "run by", "per second", "peak memory"),
        _cells("---", "---", "---:", "---:"),
    ]
    for row in training["rows"]:
        before, after = row["before"], row["after"]
        faster = after["per_second"] / before["per_second"]
        rates = f"{before['per_second']:,.0f} → {after['per_second']:,.0f} {row['unit']} ({faster:.3f}x)"
        peaks = f"{before['peak_bytes'] / 1e9:.2f} → {after['peak_bytes'] / 1e9:.2f} GB" if after["peak_bytes"] else "-"
        lines.append(_cells(row["model"], "torch.compile" if row["compiled"] else "eager", rates, peaks))
    return "\n".join(lines) + "\n"


def models_markdown(after: Entry | None, before: Entry | None) -> str:
    """The table of model blocks before and after ``replace``, as measured by ``bench.py --models``.

    Args:
        after: its results.
        before: results of a version whose activations are opaque operators in compiled graphs.
    """
    if not after:
        return ""
    names = list(dict.fromkeys(row["name"] for row in after["rows"]))
    measured = ["torch.compile", "memory", "eager"]
    if before:
        measured.append("torch.compile, whole operators")
    lines = [
        f"A training step around each of {', '.join(names)}.",
        "",
        "- torch.compile, eager: how many times as fast the step is after `jitact.replace`, worst / geometric mean. Eager only",
        "  where the GPU, not the host, is the limit.",
        "- memory: under torch.compile, the peak after `replace` over the peak before, worst / geometric mean.",
        *(["- whole operators: with jitact's activations as operators that Inductor does not fuse."] if before else []),
        "",
        f"{describe_machine(after['machine'])}.",
        "",
        _cells("block", "dtype", *measured),
        _cells("---", "---", *["---:"] * len(measured)),
    ]
    for block, dtype in dict.fromkeys((row["block"], row["dtype"]) for row in after["rows"]):
        rows, whole = (
            [row for row in results["rows"] if (row["block"], row["dtype"]) == (block, dtype) and "ratios" in row]
            for results in (after, before or {"rows": []})
        )
        compiled, of_whole = ([row["ratios"]["compile"] for row in each] for each in (rows, whole))
        memory = [ratio for row in rows if (ratio := row["memory"]["compile"])]
        eager = [row["ratios"]["eager"] for row in rows if row["host"] < HOST_LIMIT]
        cells = [_and_mean(min, compiled), _and_mean(max, memory), _and_mean(min, eager)]
        if before:
            cells.append(_and_mean(min, of_whole))
        lines.append(_cells(block, dtype, *cells))
    return "\n".join(lines) + "\n"


def _and_mean(worst: Callable[[list[float]], float], ratios: list[float]) -> str:
    return f"{worst(ratios):.3f} / {statistics.geometric_mean(ratios):.3f}" if ratios else "-"


def current_comparison(checkout: Path) -> str:
    """The current text of docs/comparison.md."""
    table = models_markdown(_results(checkout, "models"), _results(checkout, "models", "-before"))
    return _with_tables(checkout / "docs" / "comparison.md", {"models": table})


def current_readme(checkout: Path) -> str:
    """The current text of README.md."""
    tables = {
        "speed": headline_markdown(_results(checkout, "bench"), *_operands(checkout)),
        "training": training_markdown(_results(checkout, "training")),
    }
    return _with_tables(checkout / "README.md", tables)


def current_headline(checkout: Path) -> str:
    """The current text of the README's picture; "" if nothing was measured."""
    return headline_svg(_results(checkout, "bench"), *_operands(checkout))


def _with_tables(path: Path, tables: dict[str, str]) -> str:
    """A file's text with its tables, which are marked by comments, replaced."""
    text = path.read_text(encoding="utf-8")
    for name, table in tables.items():
        begin, end = f"<!-- {name}: written by `jitact report` -->\n", f"<!-- end of {name} -->"
        before, mark, rest = text.partition(begin)
        _, closing, after = rest.partition(end)
        if mark and closing:
            text = f"{before}{begin}\n{table}\n{end}{after}" if table else f"{before}{begin}{end}{after}"
    return text


def _operands(checkout: Path) -> list[Entry]:
    """All results of ``bench.py --operands``: of gated activations, of rows, of formulas, and those that bench.py includes."""
    found = (_results(checkout, tool) for tool in ("gated", "operands", "formulas", "bench"))
    return [results for results in found if results and "operands" in results]


def _results(checkout: Path, tool: str, of: str = "") -> Entry | None:
    """The results of a tool in a checkout: those on a GPU, if there are any."""
    for kind in ("cuda", "cpu"):
        path = checkout / "results" / f"{tool}-{kind}{of}.json"
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
    return None
