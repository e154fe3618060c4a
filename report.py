"""How results look: the lines that bench.py prints, its picture, and the tables in Markdown."""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "CLASSIC",
    "DIRECTIONS",
    "PEERS",
    "accuracy_markdown",
    "activations_markdown",
    "bench_heading",
    "bench_row",
    "bench_summary",
    "can_plot",
    "current_activations_markdown",
    "describe",
    "figure",
    "geometric_means",
    "plot",
]

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parent

DIRECTIONS = {"forward": "forward", "forward_save": "forward + save", "backward": "backward"}
STEP = "forward + save + backward"
TOO_FAST = 1.1  # a share of the floor that no kernel reaches: other work got in the way when the ceiling was measured
NOT_OF_THE_FORMULA = ("inplace", "save", "fast_math", "device", "dtype")  # among the parameters of a constructor
PEERS = {"eager": "eager", "compile": "torch.compile", "exported": "exported file"}

# The activations that torch.nn has and whose speed-up is the headline: those without learned parameters or randomness.
PIECEWISE_LINEAR = ("relu", "leaky_relu", "relu6", "hardtanh", "hardsigmoid", "threshold", "hardshrink", "softshrink")
FROM_THE_OUTPUT = ("sigmoid", "tanh", "softsign", "softplus", "logsigmoid", "elu", "celu", "selu")
FROM_THE_INPUT = ("hardswish", "silu", "mish", "gelu", "gelu_tanh", "tanhshrink")
CLASSIC = frozenset((*PIECEWISE_LINEAR, *FROM_THE_OUTPUT, *FROM_THE_INPUT))


def describe(facts: dict[str, Any]) -> str:
    """The facts of a machine in a line."""
    parts = [facts["device"], f"{facts['threads']} threads" if "threads" in facts else f"driver {facts['driver']}"]
    parts += [f"{key} {facts[key]}" for key in ("torch", "python", "jitact")]
    return " · ".join([*parts, facts["date"][:10]])


def figure(ulp: float | str) -> str:
    """An error in ulp, for people."""
    ulp = float(ulp)
    return f"{ulp:.2f}" if ulp < 100 else f"{ulp:.3g}"


def size(shape: Iterable[int]) -> str:
    """A shape as people write it."""
    return " x ".join(map(str, shape))


def shape_of(results: Row) -> str:
    """The shape that bench.py measured at."""
    return size(next(iter(results["dtypes"].values()))["shape"])


# What bench.py prints


def bench_heading(dtype: str, rates: dict[str, dict[str, float]], peers: list[str]) -> str:
    """What stands above the rows of a dtype: the ceilings, and the titles of the columns."""
    lines = [""]
    for key, title in {"copy": "1 read + 1 write", "add": "2 reads + 1 write"}.items():
        found = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in rates[key].items() if name != "best")
        lines.append(f"{dtype}, ceiling of {title}: {rates[key]['best'] / 1e9:.0f} GB/s ({found})")
    columns = f"{'ms':>9}{'GB/s':>6}{'floor':>6}" + "".join(f"{f'/{peer}':>9}" for peer in peers)
    groups = "".join(f"  {title:-^{len(columns)}}" for title in DIRECTIONS.values())
    kept = "".join(f"{name:>8}" for name in ("ours", *peers))
    lines.append(f"{'':16}{'error, ulp':->18}{groups}  {'kept, B/element':-^{len(kept)}}")
    lines.append(f"{'activation':16}{'forward':>9}{'grad':>9}" + f"  {columns}" * len(DIRECTIONS) + f"  {kept}")
    return "\n".join(lines)


def bench_row(row: Row, peers: list[str]) -> str:
    """One activation and dtype in a line, then whatever there is to note."""
    line = f"{row['name']:16}"
    if row["errors"]:
        line += "".join(f"{figure(row['errors'][kind]['ulp']):>9}" for kind in ("forward", "gradient"))
    if row["ours"]:
        for direction in DIRECTIONS:
            ms = row["ours"][direction]
            line += f"  {ms:>9.3f}{row['bytes'][direction] / ms / 1e6:>6.0f}{share(row, direction):>6.0%}"
            line += "".join(f"{row[peer][direction] / ms:>8.2f}x" if row[peer] else f"{'':9}" for peer in peers)
        line += "  " + "".join(f"{row['kept'][name]:>8g}" if name in row["kept"] else f"{'':8}" for name in ("ours", *peers))
    return "\n".join([line, *(f"  WRONG: {each}" for each in row["wrong"]), *(f"  {each}" for each in row["notes"])])


def share(row: Row, direction: str, of: str = "ours") -> float:
    """The floor of a direction over the time that it took."""
    return row["floor"][direction] / row[of][direction]


def step_share(row: Row, of: str) -> float:
    """The same of forward + save + backward together."""
    return sum(row["floor"][d] for d in ("forward_save", "backward")) / sum(row[of][d] for d in ("forward_save", "backward"))


def geometric_means(rows: list[Row]) -> list[Row]:
    """How many times faster than each peer, by dtype: over all rows, and over :data:`CLASSIC` if they are all there."""
    means = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        for peer in PEERS:
            found = [row for row in rows if row["dtype"] == dtype and row["ours"] and row.get(peer)]
            classic = [row for row in found if row["name"] in CLASSIC]
            for of, some in {"all": found, "classic": classic if len(classic) == len(CLASSIC) else []}.items():
                if some:
                    ratios = {d: [row[peer][d] / row["ours"][d] for row in some] for d in DIRECTIONS}
                    ratios["step"] = [step_share(row, "ours") / step_share(row, peer) for row in some]
                    means.append({"dtype": dtype, "peer": peer, "of": of, "count": len(some)})
                    means[-1] |= {key: statistics.geometric_mean(each) for key, each in ratios.items()}
    return means


def bench_summary(results: Row) -> str:
    """What stands below the rows: geometric means, what falls short, first use, what is wrong."""
    titles = {**DIRECTIONS, "step": STEP}
    lines = [
        "",
        f"{'geometric mean, times faster than':44}" + "".join(f"{title:>{len(title) + 3}}" for title in titles.values()),
    ]
    for mean in results["geometric_means"]:
        of = f"{mean['count']} {'of torch.nn' if mean['of'] == 'classic' else 'activations'}"
        cells = "".join(f"{mean[key]:>{len(title) + 2}.2f}x" for key, title in titles.items())
        lines.append(f"  {mean['dtype']:6}{PEERS[mean['peer']]:16}{of:20}{cells}")
    timed = [row for row in results["rows"] if row["ours"]]
    lines.append(_short("below 97 % of the floor", 0.97, timed, share))
    above = sum(share(row, d) > TOO_FAST for row in timed for d in DIRECTIONS)
    if above:
        lines.append(f"NOT TO BE TRUSTED: {above} of {len(timed) * len(DIRECTIONS)} beat the ceiling; was the machine busy?")
    for peer in dict.fromkeys(mean["peer"] for mean in results["geometric_means"]):
        compared = [row for row in timed if row.get(peer)]
        lines.append(
            _short(f"over 1 % slower than {PEERS[peer]}", 0.99, compared, lambda row, d, p=peer: row[p][d] / row["ours"][d])
        )
    lines += _first_use("first use, built, seconds", "build_s", 2, results["first_use"])
    lines += _first_use("first use in a new process, cached, ms", "load_ms", 1, results["first_use"])
    if results["import_ms"] is not None:
        lines.append(f"import jitact after torch, ms: {results['import_ms']:.1f}")
    wrong = [f"{row['name']} {row['dtype']}" for row in results["rows"] if row["wrong"]]
    lines.append(f"WRONG, not timed: {', '.join(wrong)}" if wrong else "all compared with float64, and right")
    return "\n".join(lines)


def _first_use(title: str, key: str, digits: int, uses: dict[str, dict[str, float | None]]) -> list[str]:
    found = {name: use[key] for name, use in uses.items() if use[key] is not None}
    if not found:
        return []
    most = ", ".join(f"{name} {found[name]:.{digits}f}" for name in sorted(found, key=found.get, reverse=True)[:3])
    return [f"{title}: median of {len(found)} {statistics.median(found.values()):.{digits}f}, most {most}"]


def _short(title: str, limit: float, rows: list[Row], ratio: Callable[[Row, str], float]) -> str:
    found = sorted((ratio(row, d), f"{row['name']} {row['dtype']} {DIRECTIONS[d]}") for row in rows for d in DIRECTIONS)
    found = [(value, what) for value, what in found if value < limit]
    worst = ", ".join(f"{what} {value:.2f}" for value, what in found[:8])
    worst = f": {worst}{', ...' if len(found) > 8 else ''}" if worst else ""
    return f"{title}: {len(found)} of {len(rows) * len(DIRECTIONS)}{worst}"


# The picture

INK, MUTED, RULE = "#1b1f24", "#6a737d", "#e4e7eb"
MARKS = {  # colour, filled or not, size, which is on top
    "eager": ("#9aa4ae", True, 34, 2),
    "compile": ("#d9822b", False, 34, 3),
    "exported": ("#2f8f4e", False, 34, 3.5),
    "ours": ("#0b62c4", True, 46, 4),
}


def can_plot() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(results: Row, path: Path) -> None:
    """Draws every activation's share of the floor in forward + save + backward, ours beside the peers', a panel for each dtype.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    panels = {
        dtype: {row["name"]: row for row in results["rows"] if row["dtype"] == dtype and row["ours"]}
        for dtype in _dtypes(results)
    }
    panels = {dtype: rows for dtype, rows in panels.items() if rows}
    names = _from_most_to_least_gained(panels)
    rows = [row for panel in panels.values() for row in panel.values()]
    subjects = [name for name in ("ours", *PEERS) if any(row.get(name) for row in rows)]
    height = 0.235 * max(len(names), 4) + 1.85
    picture = Figure(figsize=(9, height), dpi=200, facecolor="white")
    axes = picture.subplots(1, max(len(panels), 1), sharey=True, squeeze=False)[0]
    picture.subplots_adjust(left=0.145, right=0.985, top=1 - 1.4 / height, bottom=0.42 / height, wspace=0.12)
    most = max([1.0, *(step_share(row, name) for row in rows for name in subjects if row.get(name))])
    for axis, (dtype, rows) in zip(axes, panels.items(), strict=False):
        _panel(axis, dtype, rows, names, subjects, most)
    _legend(picture, results, subjects, height)
    picture.savefig(path)


def _from_most_to_least_gained(panels: dict[str, dict[str, Row]]) -> list[str]:
    """Names in the order of eager's share, the mean over the dtypes, so that the picture reads as one curve."""
    shares: dict[str, list[float]] = {}
    for rows in panels.values():
        for name, row in rows.items():
            shares.setdefault(name, []).append(step_share(row, "eager" if row["eager"] else "ours"))
    return sorted(shares, key=lambda name: (statistics.mean(shares[name]), name))


def _panel(axis: Any, dtype: str, rows: dict[str, Row], names: list[str], subjects: list[str], most: float) -> None:
    for y, name in enumerate(names):
        if name not in rows:
            continue
        shares = {subject: step_share(rows[name], subject) for subject in subjects if rows[name].get(subject)}
        axis.plot(
            [min(shares.values()), max(shares.values())], [y, y], color=RULE, linewidth=2.2, solid_capstyle="round", zorder=1
        )
        for subject, value in shares.items():
            colour, filled, area, order = MARKS[subject]
            axis.scatter(
                value, y, s=area, facecolor=colour if filled else "white", edgecolor=colour, linewidth=1.4, zorder=order
            )
    axis.axvline(1, color=INK, linewidth=0.9, zorder=1.5)
    axis.set_title(dtype, loc="left", fontsize=11, fontweight="bold", color=INK, pad=7)
    axis.set_xlim(0, 1.04 * most)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_yticks(range(len(names)), names)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "50", "", "100 %"])
    axis.tick_params(length=0, labelsize=9.5, labelcolor=INK, pad=4)
    axis.tick_params(axis="x", labelcolor=MUTED)
    axis.grid(axis="x", color=RULE, linewidth=0.8, zorder=0)
    axis.set_axisbelow(True)
    axis.spines[:].set_visible(False)


def _legend(picture: Any, results: Row, subjects: list[str], height: float) -> None:
    from matplotlib.lines import Line2D

    facts, left, top = results["machine"], 0.02, 1 - 0.16 / height
    parts = [
        facts["device"],
        shape_of(results).replace("x", "\u00d7"),
        f"torch {facts['torch']}",
        "100 % is as fast as this memory allows",
    ]
    title = "Share of the memory-bandwidth limit in forward + backward"
    picture.text(left, top, title, fontsize=14, fontweight="bold", color=INK, va="top")
    picture.text(left, top - 0.31 / height, "  \u00b7  ".join(parts), fontsize=9.5, color=MUTED, va="top")
    handles = []
    for name in subjects:
        colour, filled, area, _ = MARKS[name]
        handles.append(Line2D([], [], label={"ours": "jitact", "eager": "PyTorch eager"}.get(name, PEERS.get(name))))
        handles[-1].set(linestyle="", marker="o", markersize=area**0.5, markeredgecolor=colour, markeredgewidth=1.4)
        handles[-1].set(markerfacecolor=colour if filled else "white")
    spacing = {"handletextpad": 0.1, "columnspacing": 1.6, "borderaxespad": 0, "borderpad": 0}
    corner = (left - 0.006, top - 0.58 / height)
    picture.legend(
        handles=handles, loc="upper left", bbox_to_anchor=corner, ncols=3, frameon=False, fontsize=10, labelcolor=INK, **spacing
    )


# The tables in Markdown


def accuracy_markdown(results: Row) -> str:
    """The worst errors, ours beside PyTorch's, that accuracy.py found."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in results["rows"]))
    found = {(row["name"], row.get("save"), row.get("fast_math"), row["dtype"]): row for row in results["rows"]}
    covered = "every finite value" if results["machine"]["kind"] == "cuda" else "every finite value; of fp32, a sample"
    lines = [
        "# Worst errors",
        "",
        f"Written by `python -m jitact.accuracy`: {describe(results['machine'])}.",
        "",
        f"**jitact** / PyTorch, in ulp of the dtype, against float64, over {covered}. The unit is the spacing",
        "of the dtype at the exact result, so a correctly rounded one is off by at most 0.50. Of fp32, results that are normal",
        "numbers count. The gradient is that for dy = 1; where it is smaller than 2^-8 (of fp32, 1) its unit is the ulp there.",
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


def activations_markdown(accuracy: Row | None, bench: Row | None) -> str:
    """ACTIVATIONS.md: everything that is registered, with what was measured of it.

    Args:
        accuracy: what accuracy.py wrote, if it was run.
        bench: what bench.py wrote, if it was run.
    """
    from .registry import REGISTRY

    timed = [dtype for dtype in _dtypes(bench) if dtype != "fp16"]  # as bf16, and the table is wide
    sources = [f"Errors: {describe(accuracy['machine'])}."] if accuracy else []
    if bench:
        sources.append(f"Speed: {describe(bench['machine'])}, {shape_of(bench)}.")
    lines = [
        "# Activations",
        "",
        "Written by `python -m jitact.report` from the table in activations.py and the measurements in results/.",
        *sources,
        "",
        "- Kept for backward: the default first, then what `save=` can choose.",
        "- Worst error: forward / gradient in ulp of the dtype over every finite value, as results/ has it in full.",
        "- Share of the floor: of the time taken, what memory needs for the fewest bytes; forward / forward + save / backward.",
        "- Faster: than PyTorch eager / torch.compile in forward + save + backward.",
        "",
        _cells("activation", "formula", "parameters", "kept for backward", *(f"worst error {d}" for d in _dtypes(accuracy)),
               *(f"{what} {d}" for d in timed for what in ("share of the floor", "faster"))),
        _cells(*["---"] * 4, *["---:"] * (len(_dtypes(accuracy)) + 2 * len(timed))),
    ]  # fmt: skip
    for name, cls in REGISTRY.items():
        record = cls.activation
        formula = record.formula.replace("|", "\\|")
        cells = [f"{name} ({record.title})", f"`{formula}`"]
        parameters = [
            parameter for parameter in record.signature.parameters.values() if parameter.name not in NOT_OF_THE_FORMULA
        ]
        cells.append(", ".join(f"{parameter.name}={parameter.default!r}" for parameter in parameters) or "-")
        cells.append(", ".join({"bit": "1 bit"}.get(save, save) for save in record.saves))
        for dtype in _dtypes(accuracy):
            row = _find(accuracy, name=name, dtype=dtype, save=record.saves[0])
            cells.append(" / ".join(figure(row["ours"][kind]["ulp"]) for kind in ("forward", "gradient")) if row else "-")
        for dtype in timed:
            row = _find(bench, name=name, dtype=dtype)
            cells.append(" / ".join(f"{share(row, direction):.0%}" for direction in DIRECTIONS) if row else "-")
            cells.append(" / ".join(_faster(row, peer) for peer in ("eager", "compile")) if row else "-")
        lines.append(_cells(*cells))
    return "\n".join(lines) + "\n"


def _faster(row: Row, peer: str) -> str:
    return f"{step_share(row, 'ours') / step_share(row, peer):.2f}x" if row[peer] else "-"


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _dtypes(results: Row | None) -> list[str]:
    return list(dict.fromkeys(row["dtype"] for row in results["rows"])) if results else []


def _find(results: Row, **wanted: str) -> Row | None:
    """The row with these values and a result of ours."""
    matching = (row for row in results["rows"] if row.get("ours") and not row.get("fast_math"))
    return next((row for row in matching if all(row[key] == value for key, value in wanted.items())), None)


def current_activations_markdown(checkout: Path) -> str:
    """What ACTIVATIONS.md should contain now, from the measurements in a checkout: those on a GPU, if they are there."""
    found = []
    for tool in ("accuracy", "bench"):
        paths = [path for kind in ("cuda", "cpu") if (path := checkout / "results" / f"{tool}-{kind}.json").exists()]
        found.append(json.loads(paths[0].read_text(encoding="utf-8")) if paths else None)
    return activations_markdown(*found)


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit code: 2 for bad arguments, and outside a checkout."""
    parser = argparse.ArgumentParser(
        prog="python -m jitact.report", description="Writes ACTIVATIONS.md from the table of activations and results/."
    )
    parser.parse_args(arguments)
    if not (ROOT / "pyproject.toml").exists():
        print(f"{parser.prog}: {ROOT} is no checkout, and has no measurements: run it in one", file=sys.stderr)
        return 2
    path = ROOT / "ACTIVATIONS.md"
    path.write_text(current_activations_markdown(ROOT), encoding="utf-8")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
