"""The representative activations of the README's first table and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .text import PEERS, Entry, shape_of, size, step_share

__all__ = ["HEADLINE_DTYPE", "Headline", "headlines"]

KINDS = ("relu", "silu", "gelu", "mish")  # measured by bench.py, all at one shape
KINDS_BY_SHAPE = (  # measured by bench.py --operands
    ("gelu+bias", [16384, 14336]),
    ("gelu+bias+dropout+residual", [16384, 14336]),
    ("swiglu", [16384, 14336]),
    ("softmax", [65536, 4096]),
)
HEADLINE_DTYPE = "bf16"


class Headline(NamedTuple):
    """One activation, forward + backward.

    Attributes:
        name: what was measured, such as ``gelu+bias``.
        shape: of ``x``.
        shares: the shares of the memory bandwidth reached by jitact ("ours") and by the measured peers.
        kept: bytes per element saved for backward, by the same names.
    """

    name: str
    shape: str
    shares: dict[str, float]
    kept: dict[str, float]

    def faster(self, peer: str) -> float | None:
        """The speed-up over a peer; None if that was not measured."""
        return self.shares["ours"] / self.shares[peer] if peer in self.shares else None


def headlines(bench: Entry, operands: Sequence[Entry]) -> list[Headline]:
    """The headline activations that were measured, in the order of the table.

    Args:
        bench: what ``bench.py`` wrote.
        operands: what ``bench.py --operands`` wrote, in each of its runs.
    """
    found = []
    plain = {row["name"]: row for row in bench["rows"] if row["dtype"] == HEADLINE_DTYPE and row.get("ours")}
    for row in [plain[name] for name in KINDS if name in plain]:
        shares = {who: step_share(row, who) for who in ("ours", *PEERS) if row.get(who)}
        found.append(Headline(row["name"], shape_of(bench), shares, row["kept"]))
    measured = [row for results in operands for row in results["operands"] if row["dtype"] == HEADLINE_DTYPE]
    for name, shape in KINDS_BY_SHAPE:
        rows = [row for row in measured if row["name"] == name and row["shape"] == shape and not row.get("wrong")]
        found += [_by_shape(row) for row in rows[:1]]
    return found


def _by_shape(row: Entry) -> Headline:
    """A row of ``bench.py --operands``, whose times are keyed by direction, then by subject."""
    floor, times = sum(row["floor"].values()), row["ms"].values()
    took = {who: sum(each[who] for each in times) for who in ("ours", *PEERS) if all(who in each for each in times)}
    return Headline(row["name"], size(row["shape"]), {who: floor / ms for who, ms in took.items()}, row["kept"])
