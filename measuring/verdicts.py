"""The results of ``check``: the worst error among many results, the lines of the report, the report."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .limits import FORMULA
from .oracle import Judge
from .text import figure

__all__ = ["FAR", "Check", "Line", "Worst", "name_of", "worst_of"]

FAR = 0.25  # beyond the compute type's maximum to this power, intermediate values of a correct formula may overflow


@dataclass(frozen=True)
class Worst:
    """The largest error among many results.

    Attributes:
        ulp: the error in ulp of the dtype; for gradients below 2^-8, in the ulp at 2^-8.
        x: the input where it occurs.
        actual: the result there.
        exact: the exact result there.
        wrong: the number of inputs with a wrong result.
        overflows: the magnitude of inputs from which intermediate values overflow, if they do; larger inputs are not judged.
        by: for gradients by one of several operands, the operand.
        at: the place as text, if ``x`` is not enough, such as the values of several operands.
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
    """A line of the report: the results for a dtype and a choice of ``save``.

    ``forward`` is None if there is nothing to compare with. ``untold`` is the number of inputs whose exact gradient is unknown:
    at kinks, or where float64 or the output overflows.
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
        """Whether forward has large relative errors: results of cancelling subtractions, or results that underflowed."""
        return self.forward is not None and self.forward.ulp > FORMULA[self.dtype].ulp

    @property
    def verdict(self) -> str:
        """The verdict as text."""
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
        """The report: the lines, what is wrong, and what was not checked."""
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
    """The name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def worst_of(
    x: Tensor, actual: Tensor, judge: Judge, slips: Tensor, far: Tensor, floor: float | Tensor | None
) -> tuple[Worst, int]:
    """The largest error among the wrong results if there are any, else among all, and its index.

    Args:
        x: the inputs.
        actual: the results.
        judge: of the results.
        slips: where the formula itself is wrong, so that the error is judged without a floor.
        far: where a wrong result is due to an overflow of intermediate values.
        floor: results smaller than this are measured in the ulp at this magnitude.
    """
    wrong = judge.wrong(actual) | (slips & (judge.error(actual, None) > judge.limit.ulp))
    overflows = x.double().abs()[wrong & far].min().item() if (wrong & far).any() else math.inf
    error = judge.error(actual, floor).masked_fill(far & (x.double().abs() >= overflows), 0.0)
    wrong &= ~far
    where = (error.where(wrong, -1.0) if wrong.any() else error).argmax()
    values = (float(each[where]) for each in (error, x, actual, judge.exact))
    return Worst(*values, wrong=int(wrong.sum()), overflows=overflows), int(where)
