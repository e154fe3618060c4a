"""What a check finds, and how it says so: the worst error among many results, lines of a report, the report."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .limits import FORMULA
from .oracle import Judge
from .text import figure

__all__ = ["FAR", "Check", "Line", "Worst", "name_of", "worst_of"]

FAR = 0.25  # from the maximum of what is computed in, to this power, a right formula may overflow on the way


@dataclass(frozen=True)
class Worst:
    """The largest error among many results.

    Attributes:
        ulp: the error, in units in the last place of the dtype; of a gradient below 2^-8, in those at 2^-8.
        x: the input where it occurs.
        actual: the result there.
        exact: what it should have been.
        wrong: for how many inputs the result is wrong.
        overflows: the magnitude of inputs from which what is computed on the way overflows, if it does; what is further out
            is not judged.
        by: of a gradient by one of several operands, which.
        at: the values of several operands, where it occurs.
    """

    ulp: float
    x: float
    actual: float
    exact: float
    wrong: int
    overflows: float = math.inf
    by: str = ""
    at: str = ""


@dataclass(frozen=True)
class Line:
    """What was found for a dtype and what backward keeps, a line of the report.

    ``forward`` is None where there is nothing to compare with. ``untold`` is for how many of the inputs no
    gradient is known: at kinks, or where float64 overflows, or the output does.
    """

    dtype: torch.dtype
    save: str
    inputs: int
    forward: Worst | None
    gradient: Worst
    untold: int = 0

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.gradient.wrong and not (self.forward and self.forward.wrong)

    @property
    def lossy(self) -> bool:
        """Whether forward is off by far more than its formula need be: small results of subtractions, or vanished ones."""
        return self.forward is not None and self.forward.ulp > FORMULA[self.dtype].ulp

    @property
    def verdict(self) -> str:
        """In words."""
        if not self.passed:
            return "FAIL"
        overflows = min(worst.overflows for worst in (self.forward, self.gradient) if worst)
        verdict = "pass"
        if self.lossy:
            verdict += ", but loses digits"
        if overflows < math.inf:
            verdict += f", but overflows from |x| = {overflows:.2g}"
        return verdict


@dataclass(frozen=True)
class Check:
    """The result of :func:`check`; true if all is well. ``table`` is what was printed."""

    title: str
    method: str
    lines: tuple[Line, ...]
    unseen: str = ""

    def __bool__(self) -> bool:
        """Whether all lines passed."""
        return all(line.passed for line in self.lines)

    def __str__(self) -> str:
        """One line, as the table has been printed."""
        return f"<check of {self.title}: {'passed' if self else 'FAILED'}>"

    __repr__ = __str__

    @property
    def table(self) -> str:
        """The lines, what is wrong, and what was not looked at."""
        text = [self.title, self.method, f"  {'dtype':9} {'keeps':7} {'forward, worst':24} {'gradient, worst':24}"]
        for line in self.lines:
            cells = [_cell(line.forward), _cell(line.gradient)]
            name = name_of(line.dtype)
            text.append(f"  {name:9} {line.save:7} {cells[0]:24} {cells[1]:24} {line.verdict}")
            for kind, worst in (("forward", line.forward), ("gradient", line.gradient)):
                if worst and worst.wrong:
                    was = f"{worst.actual:.8g} where it should be {worst.exact:.8g}"
                    subject, at = f"{kind} by {worst.by}" if worst.by else kind, worst.at or f"x = {worst.x:.8g}"
                    text.append(f"    {subject} at {at} is {was}; {worst.wrong} of {line.inputs} inputs are wrong")
        return "\n".join([*text, f"  not looked at: {self.unseen}"])


def _cell(worst: Worst | None) -> str:
    if worst is None:
        return "(the yardstick)"
    by = f" by {worst.by}" if worst.by else ""
    return f"{figure(worst.ulp)} ulp{by} at {worst.x:.6g}" if worst.ulp else "exact"


def name_of(dtype: torch.dtype) -> str:
    """What a dtype is called in texts."""
    return str(dtype).removeprefix("torch.")


def worst_of(
    x: Tensor, actual: Tensor, judge: Judge, slips: Tensor, far: Tensor, floor: float | Tensor | None
) -> tuple[Worst, int]:
    """The largest error, of the wrong results if there are any, and where among the inputs it is.

    Args:
        x: the inputs.
        actual: the results.
        judge: of the results.
        slips: where the formula is wrong, so that a result is wrong too, if it is off at all.
        far: where a wrong result is but an overflow on the way.
        floor: the magnitude below which an ulp counts as the one there.
    """
    wrong = judge.wrong(actual) | (slips & (judge.error(actual, None) > judge.limit.ulp))
    overflows = x.double().abs()[wrong & far].min().item() if (wrong & far).any() else math.inf
    error = judge.error(actual, floor).masked_fill(far & (x.double().abs() >= overflows), 0.0)
    wrong &= ~far
    where = (error.where(wrong, -1.0) if wrong.any() else error).argmax()
    values = (float(each[where]) for each in (error, x, actual, judge.exact))
    return Worst(*values, wrong=int(wrong.sum()), overflows=overflows), int(where)
