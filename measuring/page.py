"""The results of bench.py as one self-contained HTML page: ``report_html(json.load(open("bench.json")))``."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from .text import DIRECTIONS, PEERS, Entry, describe_machine, figure, kept_text, size

__all__ = ["report_html"]

COLORS = {"ours": "var(--ours)", "eager": "var(--eager)", "compile": "var(--compile)", "exported": "var(--exported)"}
NAMES = {"ours": "jitact", **PEERS}
LINE, TOP, LEFT, WIDTH, GAP = 17, 26, 110, 250, 40  # pixels: height of a row and of the head; width of names, scale and gap


def report_html(results: dict[str, Any]) -> str:
    """The page: speed relative to the ceiling, memory, errors, builds; with inline style and SVG, without scripts or requests.

    Args:
        results: what ``bench.py --json`` writes.
    """
    sections = [_summary(results)]
    for dtype, facts in results["dtypes"].items():
        rows = [row for row in results["rows"] if row["dtype"] == dtype]
        sections.append(_speed(dtype, facts, rows))
    sections += [_memory(results["rows"]), _errors(results["rows"]), _builds(results.get("first_use") or {})]
    machine = escape(describe_machine(results["machine"]))
    body = "\n".join(filter(None, sections))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>jitact: {escape(results["machine"]["device"])}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>jitact, measured</h1>
<p>{machine}</p>
{body}
</body>
</html>
"""


STYLE = """
:root {
  --ours: #1f6fb2; --eager: #e08a2e; --compile: #5a9e4b; --exported: #8a5fb0;
  --ink: #1d2126; --faint: #68707a; --line: #d9dde2; --page: #fff; --wrong: #c62828;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ours: #62aee8; --eager: #f0a860; --compile: #86c777; --exported: #b79ad6;
    --ink: #e6e8ea; --faint: #9aa2ab; --line: #3a4048; --page: #16191d; --wrong: #ff8a80;
  }
}
body {
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
}
h1 { font-size: 1.6rem; margin: 0; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 0.4rem; }
p { color: var(--faint); margin: 0.2rem 0 0.8rem; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 2px 9px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.scroll { overflow-x: auto; }
.wrong { color: var(--wrong); }
.tiles { display: flex; flex-wrap: wrap; gap: 0.8rem; }
.tile { border: 1px solid var(--line); border-radius: 6px; padding: 0.5rem 0.9rem; }
.tile b { display: block; font-size: 1.35rem; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .axis { fill: var(--faint); font-size: 11px; }
details { margin-top: 0.6rem; }
summary { cursor: pointer; color: var(--faint); }
.key { display: inline-block; width: 0.7em; height: 0.7em; border-radius: 50%; margin: 0 0.35em 0 0.9em; }
"""


def _summary(results: dict[str, Any]) -> str:
    """The geometric means of the speed-ups, and the wrong results."""
    tiles = []
    for mean in results.get("geometric_means") or []:
        if mean["of"] == "all":
            title = f"{mean['dtype']}, times as fast as {PEERS[mean['peer']]}, {mean['count']} activations"
            tiles.append(f"<div class='tile'><b>{float(mean['step']):.2f}x</b>{escape(title)}</div>")
    wrong = [row for row in results["rows"] if row["wrong"]]
    listed = "".join(f"<li>{escape(row['name'])} {row['dtype']}: {escape('; '.join(row['wrong']))}</li>" for row in wrong)
    failures = f"<p class='wrong'>Wrong results, not timed:</p><ul class='wrong'>{listed}</ul>" if wrong else ""
    note = "<p>Geometric mean of forward, forward with autograd recording, and backward together.</p>" if tiles else ""
    return f"<h2>Summary</h2>{note}<div class='tiles'>{''.join(tiles)}</div>{failures}"


def _speed(dtype: str, facts: dict[str, Any], rows: list[Entry]) -> str:
    """The charts of all directions, and the table of their figures."""
    timed = [row for row in rows if row["ours"]]
    rates = facts["bytes_per_second"]
    ceiling = (
        f"{rates['copy']['best'] / 1e9:.0f} GB/s for 1 read + 1 write, {rates['add']['best'] / 1e9:.0f} for 2 reads + 1 write"
    )
    return (
        f"<h2>Speed in {escape(dtype)}, {escape(size(facts['shape']))}</h2>"
        f"<p>Percent of the memory bandwidth, which the same run measured: {ceiling}. {_legend(timed)}</p>"
        f"<div class='scroll'>{_charts(timed)}</div>"
        f"<details><summary>The figures</summary><div class='scroll'>{_speed_table(timed)}</div></details>"
    )


def _legend(rows: list[Entry], names: Iterable[str] = tuple(NAMES)) -> str:
    shown = [name for name in names if any(row.get(name) for row in rows)]
    return "".join(f"<span class='key' style='background:{COLORS[name]}'></span>{NAMES[name]}" for name in shown)


def _charts(rows: list[Entry]) -> str:
    """A chart per direction, side by side: a row for each activation, with a dot for each subject's share of the floor."""
    height = TOP + LINE * len(rows) + 6
    parts = [_name(row, TOP + LINE * i) for i, row in enumerate(rows)]
    for panel, (direction, title) in enumerate(DIRECTIONS.items()):
        left = LEFT + panel * (WIDTH + GAP)
        parts.append(f"<text x='{left}' y='11' font-weight='600'>{escape(title)}</text>")
        for percent in (0, 25, 50, 75, 100):
            x = left + WIDTH * percent / 100
            parts.append(f"<line x1='{x}' x2='{x}' y1='{TOP}' y2='{height - 6}' stroke='var(--line)'/>")
            parts.append(f"<text class='axis' x='{x}' y='{TOP - 3}' text-anchor='middle'>{percent}</text>")
        for i, row in enumerate(rows):
            for peer in reversed(NAMES):
                if row.get(peer):
                    share = row["floor"][direction] / row[peer][direction]
                    tip = escape(f"{row['name']}, {NAMES[peer]}: {share:.0%}, {row[peer][direction]:.3g} ms")
                    x, y = left + WIDTH * min(share, 1.04), TOP + LINE * (i + 0.5)
                    parts.append(f"<circle cx='{x:.1f}' cy='{y}' r='4.2' fill='{COLORS[peer]}'><title>{tip}</title></circle>")
    width = LEFT + len(DIRECTIONS) * (WIDTH + GAP)
    return f"<svg width='{width}' height='{height}' role='img' aria-label='share of memory bandwidth'>{''.join(parts)}</svg>"


def _name(row: Entry, y: float) -> str:
    return f"<text x='{LEFT - 8}' y='{y + 12}' text-anchor='end'>{escape(row['name'])}</text>"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(each)}</td>' for each in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _speed_table(rows: list[Entry]) -> str:
    peers = [peer for peer in PEERS if any(row.get(peer) for row in rows)]
    heads = ["activation"]
    for title in DIRECTIONS.values():
        heads += [f"{title}, ms", "GB/s", "of bandwidth", *(f"x {PEERS[peer]}" for peer in peers)]
    lines = []
    for row in rows:
        cells = [row["name"]]
        for direction in DIRECTIONS:
            ms = row["ours"][direction]
            cells += [f"{ms:.3f}", f"{row['bytes'][direction] / ms / 1e6:.0f}", f"{row['floor'][direction] / ms:.0%}"]
            cells += [f"{row[peer][direction] / ms:.2f}" if row.get(peer) else "" for peer in peers]
        lines.append(cells)
    return _table(heads, lines)


def _memory(rows: list[Entry]) -> str:
    """A bar chart of the bytes per element kept for backward."""
    rows = [row for row in rows if row.get("kept")]
    if not rows:
        return ""
    first = rows[0]["dtype"]
    shown = [row for row in rows if row["dtype"] == first]
    widest = max(max(row["kept"].values()) for row in shown)
    height = TOP + LINE * len(shown)
    parts = []
    for i, row in enumerate(shown):
        y = TOP + LINE * i
        parts.append(_name(row, y))
        for peer, dy, thick in (("eager", 2, 12), ("ours", 5, 6)):
            if peer in row["kept"]:
                width = max(1.0, 2 * WIDTH * row["kept"][peer] / widest)
                tip = f"{row['name']}, {NAMES[peer]}: {kept_text(row['kept'][peer])} bytes per element"
                parts.append(
                    f"<rect x='{LEFT}' y='{y + dy}' width='{width:.1f}' height='{thick}' fill='{COLORS[peer]}'"
                    f" opacity='{1 if peer == 'ours' else 0.45}'><title>{escape(tip)}</title></rect>"
                )
        ours, eager = row["kept"]["ours"], row["kept"].get("eager")
        kept = kept_text(ours) if eager in (None, ours) else f"{kept_text(ours)} instead of {kept_text(eager)}"
        longest = max(1.0, 2 * WIDTH * max(row["kept"].get(peer, 0) for peer in ("ours", "eager")) / widest)
        parts.append(f"<text class='axis' x='{LEFT + longest + 6:.1f}' y='{y + 12}'>{kept}</text>")
    chart = f"<svg width='{LEFT + 2 * WIDTH + 130}' height='{height}' role='img' aria-label='memory'>{''.join(parts)}</svg>"
    return (
        f"<h2>Memory kept for backward, {escape(first)}</h2><p>Bytes per element, as autograd's saved-tensor hooks count them."
        f" {_legend(shown, ('ours', 'eager'))}</p><div class='scroll'>{chart}</div>"
    )


def _errors(rows: list[Entry]) -> str:
    """The table of the largest errors of forward and gradient."""
    rows = [row for row in rows if row.get("errors")]
    if not rows:
        return ""
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    by_name: dict[str, dict[str, Entry]] = {}
    for row in rows:
        by_name.setdefault(row["name"], {})[row["dtype"]] = row
    lines = []
    for name, found in by_name.items():
        cells = [name]
        for dtype in dtypes:
            errors = found[dtype]["errors"] if dtype in found else {}
            cells += [figure(errors[kind]["ulp"]) if kind in errors else "" for kind in ("forward", "gradient")]
        lines.append(cells)
    heads = ["activation", *(f"{dtype} {kind}" for dtype in dtypes for kind in ("forward", "gradient"))]
    note = "The largest errors against float64 on bench.py's sample, in units in the last place; 0.5 is correct rounding."
    return f"<h2>Errors</h2><p>{note}</p><div class='scroll'>{_table(heads, lines)}</div>"


def _builds(first_use: dict[str, dict[str, float | None]]) -> str:
    """The table of first use: seconds of a build, milliseconds of a load from the cache."""
    if not first_use:
        return ""

    def cell(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    lines = [[name, cell(use["build_s"], 2), cell(use["load_ms"], 1)] for name, use in first_use.items()]
    note = "Time of the first use, which compiles, and of a load from the cache in a new process."
    heads = ["activation", "compiled, s", "cached, ms"]
    return f"<h2>First use</h2><p>{note}</p><div class='scroll'>{_table(heads, lines)}</div>"
