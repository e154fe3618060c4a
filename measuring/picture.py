"""Pictures of bench.py's results: each activation's share of the floor, for jitact and its peers.

:func:`draw` shows all activations and needs matplotlib. :func:`headline_svg` writes the SVG of the README's few without it.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from .headline import HEADLINE_DTYPE, Headline, headlines
from .text import PEERS, Entry, dtypes_of, shape_of, step_share

__all__ = ["can_plot", "draw", "headline_svg"]

INK, MUTED, RULE = "#1b1f24", "#6a737d", "#e4e7eb"
MARKS = {  # colour, filled or not, size, which is on top
    "eager": ("#9aa4ae", True, 34, 2),
    "compile": ("#d9822b", False, 34, 3),
    "exported": ("#2f8f4e", False, 34, 3.5),
    "ours": ("#0b62c4", True, 46, 4),
}

WHO = {"ours": "jitact", "compile": "torch.compile", "eager": "PyTorch eager"}  # the bars of headline_svg, top to bottom
WIDTH, LEFT, RIGHT, TOP, FOOT = 860, 236, 64, 112, 42  # of headline_svg, in pixels: width and margins around the scale
BAR, STEP, GROUP = 10, 12, 54  # pixels: height of a bar, distance between bars, distance between activations
FIGURE = 36  # the width of the percentage to the right of a bar
STYLE = """
svg {
  --page: #ffffff; --ink: #1b1f24; --muted: #5b6570; --rule: #e1e5ea;
  --ours: #0b62c4; --compile: #d9822b; --eager: #a3adb8;
}
@media (prefers-color-scheme: dark) {
  svg {
    --page: #12161c; --ink: #e8ebef; --muted: #9ba6b2; --rule: #2c343e;
    --ours: #58a6ff; --compile: #e3a04f; --eager: #66717d;
  }
}
text { font-family: -apple-system, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif; font-size: 12px; fill: var(--ink); }
.title { font-size: 18px; font-weight: 600; }
.name { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px; font-weight: 600; }
.muted { fill: var(--muted); }
.small { font-size: 11px; }
.ours { fill: var(--ours); }
.compile { fill: var(--compile); }
.eager { fill: var(--eager); }
.figure { font-size: 10.5px; fill: var(--muted); }
.best { font-weight: 700; fill: var(--ink); }
"""


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(results: Entry, path: Path) -> None:
    """Draws the share of the floor in forward + save + backward of every activation and subject, a panel for each dtype.

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
    """Names sorted by eager's share, averaged over the dtypes, so that the dots form a curve."""
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


def headline_svg(bench: Entry | None, *operands: Entry) -> str:
    """The README's picture: bars of the shares of the memory bandwidth, with colours for light and dark pages.

    Args:
        bench: what ``bench.py`` wrote, if it was run.
        operands: what ``bench.py --operands`` wrote, in each of its runs.

    Returns:
        The text of an SVG file; "" if nothing was measured.
    """
    if not bench:
        return ""
    found = headlines(bench, operands)
    facts, height = bench["machine"], TOP + GROUP * len(found) + FOOT
    bottom = height - FOOT
    title = "Share of the memory bandwidth, forward + backward"
    subtitle = f"{facts['device']} · {HEADLINE_DTYPE} · torch {facts['torch']} · 100% is the speed of a copy of as many bytes"
    parts = [_text(24, 36, title, "title"), _text(24, 58, subtitle, "muted")]
    shown = [who for who in WHO if any(who in each.shares for each in found)]
    x = 24
    for who in shown:
        parts.append(f'<rect class="{who}" x="{x}" y="73" width="11" height="11" rx="2"/>')
        parts.append(_text(x + 17, 83, WHO[who]))
        x += 40 + 7 * len(WHO[who])
    for percent in (0, 25, 50, 75, 100):
        x = _place(percent / 100)
        parts.append(f'<path d="M{x:.1f} {TOP - 6}V{bottom}" stroke="var(--{"muted" if percent == 100 else "rule"})"/>')
        parts.append(_text(x, bottom + 18, f"{percent}%", "muted small", "middle"))
    for i, each in enumerate(found):
        parts += _bars(each, TOP + GROUP * i, shown)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="var(--page)"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _bars(row: Headline, y: int, shown: Sequence[str]) -> list[str]:
    """One activation: its name and shape, and a bar for each measured subject."""
    name, shape = (row.name, row.shape.replace("x", "\u00d7"))
    parts = [_text(LEFT - 14, y + 15, name, "name", "end"), _text(LEFT - 14, y + 31, shape, "muted small", "end")]
    for i, who in enumerate(who for who in shown if who in row.shares):
        value, top = row.shares[who], y + STEP * i
        end, style = _place(value), "figure best" if who == "ours" else "figure"
        figure_x = max(end, _place(1)) if end + FIGURE > _place(1) else end  # does not cross the line of 100%
        parts.append(f'<rect class="{who}" x="{LEFT}" y="{top}" width="{end - LEFT:.1f}" height="{BAR}" rx="2"/>')
        parts.append(_text(figure_x + 6, top + 9, f"{value:.0%}", style))
    return parts


def _place(value: float) -> float:
    """The x coordinate of a share."""
    return LEFT + (WIDTH - LEFT - RIGHT) * value


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'
