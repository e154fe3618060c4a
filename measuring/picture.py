"""What bench.py draws: each activation's share of the floor, ours beside the peers'."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path
from typing import Any

from .text import PEERS, Entry, dtypes_of, shape_of, step_share

__all__ = ["can_plot", "draw"]

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


def draw(results: Entry, path: Path) -> None:
    """Draws every activation's share of the floor in forward + save + backward, ours beside the peers', a panel for each dtype.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    panels = {
        dtype: {row["name"]: row for row in results["rows"] if row["dtype"] == dtype and row["ours"]}
        for dtype in dtypes_of(results)
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


def _from_most_to_least_gained(panels: dict[str, dict[str, Entry]]) -> list[str]:
    """Names in the order of eager's share, the mean over the dtypes, so that the picture reads as one curve."""
    shares: dict[str, list[float]] = {}
    for rows in panels.values():
        for name, row in rows.items():
            shares.setdefault(name, []).append(step_share(row, "eager" if row["eager"] else "ours"))
    return sorted(shares, key=lambda name: (statistics.mean(shares[name]), name))


def _panel(axis: Any, dtype: str, rows: dict[str, Entry], names: list[str], subjects: list[str], most: float) -> None:
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


def _legend(picture: Any, results: Entry, subjects: list[str], height: float) -> None:
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
