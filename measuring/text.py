"""The text output of bench.py: headings, rows, and the summary."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from ..records import is_plain
from ..registry import REGISTRY

__all__ = [
    "DIRECTIONS",
    "PEERS",
    "Entry",
    "bench_heading",
    "bench_row",
    "bench_summary",
    "classic",
    "describe_machine",
    "distrust",
    "dtypes_of",
    "figure",
    "geometric_means",
    "kept_text",
    "shape_of",
    "share",
    "size",
    "step_share",
]

Entry = dict[str, Any]
"""A row of a file in ``results/``, or a whole file."""

DIRECTIONS = {"forward": "forward", "forward_save": "forward + save", "backward": "backward"}
STEP = "forward + save + backward"
TOO_FAST = 1.1  # no kernel exceeds this share of the floor, unless other work disturbed the measurement of the ceiling
PEERS = {"eager": "eager", "compile": "torch.compile", "exported": "exported file"}


@cache
def classic() -> frozenset[str]:
    """The activations of the headline's mean: torch.nn's elementwise ones without weights or randomness."""
    plain = [cls.activation for cls in REGISTRY.values() if cls.activation.module and is_plain(cls.activation.token)]
    variants = [name for record in plain if record.variant for name in record.variant[1].values()]
    return frozenset([*(record.name for record in plain), *variants])


def describe_machine(facts: dict[str, Any]) -> str:
    """A description of a machine in one line."""
    parts = [facts["device"], f"{facts['threads']} threads" if "threads" in facts else f"driver {facts['driver']}"]
    parts += [f"{key} {facts[key]}" for key in ("torch", "python", "jitact")]
    return " · ".join([*parts, facts["date"][:10]])


def kept_text(bytes_kept: float) -> str:
    """Bytes kept for backward per element as text: those of a seed, eight for a whole tensor, are 0."""
    return f"{bytes_kept if bytes_kept > 1e-3 else 0:.3g}"


def figure(ulp: float | str) -> str:
    """An error in ulp as text."""
    ulp = float(ulp)
    return f"{ulp:.2f}" if ulp < 100 else f"{ulp:.3g}"


def size(shape: Iterable[int]) -> str:
    """A shape as text, such as ``4096 x 393216``."""
    return " x ".join(map(str, shape))


def shape_of(results: Entry) -> str:
    """The shape that bench.py measured at."""
    return size(next(iter(results["dtypes"].values()))["shape"])


def bench_heading(dtype: str, rates: dict[str, dict[str, float]], peers: list[str]) -> str:
    """The heading of a dtype's rows: the ceilings, and the titles of the columns."""
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


def bench_row(row: Entry, peers: list[str]) -> str:
    """One activation and dtype in a line, followed by errors and notes."""
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


def share(row: Entry, direction: str, of: str = "ours") -> float:
    """The floor of a direction over the measured time."""
    return row["floor"][direction] / row[of][direction]


def step_share(row: Entry, of: str) -> float:
    """The floor over the measured time of forward + save and backward together."""
    return sum(row["floor"][d] for d in ("forward_save", "backward")) / sum(row[of][d] for d in ("forward_save", "backward"))


def dtypes_of(results: Entry | None) -> list[str]:
    """The dtypes that were measured."""
    return list(dict.fromkeys(row["dtype"] for row in results["rows"])) if results else []


def geometric_means(rows: list[Entry]) -> list[Entry]:
    """The mean speed-ups over each peer by dtype: of all rows, and of the :func:`classic` ones if all were measured."""
    means = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        for peer in PEERS:
            found = [row for row in rows if row["dtype"] == dtype and row["ours"] and row.get(peer)]
            headline = [row for row in found if row["name"] in classic()]
            for of, some in {"all": found, "classic": headline if len(headline) == len(classic()) else []}.items():
                if some:
                    ratios = {d: [row[peer][d] / row["ours"][d] for row in some] for d in DIRECTIONS}
                    ratios["step"] = [step_share(row, "ours") / step_share(row, peer) for row in some]
                    means.append({"dtype": dtype, "peer": peer, "of": of, "count": len(some)})
                    means[-1] |= {key: statistics.geometric_mean(each) for key, each in ratios.items()}
    return means


def bench_summary(results: Entry) -> str:
    """The summary below the rows: geometric means, what falls short, first use, what is wrong."""
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
    if results["machine"]["kind"] == "cuda":  # on a CPU, many activations are not limited by memory bandwidth
        lines.append(_short("below 97 % of the floor", 0.97, timed, share))
    operands = results.get("operands", [])
    lines += distrust([*timed, *operands])
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
    if results.get("stopped"):
        lines.append(f"STOPPED after {len(results['rows'] + operands)} rows; the others were not looked at")
    wrong = [f"{row['name']} {row['dtype']}" for row in results["rows"] + operands if row.get("wrong")]
    if wrong:
        lines.append(f"WRONG, not timed: {', '.join(wrong)}")
    elif results["rows"] or operands:
        lines.append("all compared with float64, and right")
    return "\n".join(lines)


def distrust(timed: list[Entry]) -> list[str]:
    """A warning if other work disturbed more than a tenth of the rows; else empty."""
    busy = sum(row.get("busy", False) for row in timed)
    if busy <= len(timed) // 10:
        return []
    return [f"NOT TO BE TRUSTED: this machine did other work during {busy} of {len(timed)} rows"]


def _first_use(title: str, key: str, digits: int, uses: dict[str, dict[str, float | None]]) -> list[str]:
    found = {name: use[key] for name, use in uses.items() if use[key] is not None}
    if not found:
        return []
    most = ", ".join(f"{name} {found[name]:.{digits}f}" for name in sorted(found, key=found.get, reverse=True)[:3])
    return [f"{title}: median of {len(found)} {statistics.median(found.values()):.{digits}f}, most {most}"]


def _short(title: str, limit: float, rows: list[Entry], ratio: Callable[[Entry, str], float]) -> str:
    found = sorted((ratio(row, d), f"{row['name']} {row['dtype']} {DIRECTIONS[d]}") for row in rows for d in DIRECTIONS)
    found = [(value, what) for value, what in found if value < limit]
    worst = ", ".join(f"{what} {value:.2f}" for value, what in found[:8])
    worst = f": {worst}{', ...' if len(found) > 8 else ''}" if worst else ""
    return f"{title}: {len(found)} of {len(rows) * len(DIRECTIONS)}{worst}"
