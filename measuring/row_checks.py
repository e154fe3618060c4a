"""``check`` for row activations: softmax, its relatives and users' definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..rows.modules import class_of_rows, record_of_rows
from ..rows.records import Beside, RowActivation
from .limits import FORMULA, Limit
from .oracle import Judge, check_reference
from .verdicts import Check, Line, Worst

__all__ = ["check_rows", "random_beside", "random_rows"]

LENGTHS = (1, 2, 7, 33, 1000, 4096)
ELEMENTS = 2**17  # of all rows of one length
SPREADS = (1.0, 8.0)
ENOUGH = 2**25  # bytes of a tensor large enough for the kernels on any device
SHORT = 256  # shorter rows are left to PyTorch's operators


def random_rows(length: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Representative rows of finite values, the same in every call: random ones of several spreads, and extreme ones.

    The extreme rows are: constant; one value far above the others; linearly descending; alternating high and low; far from 0
    but near to each other.
    """
    generator = torch.Generator().manual_seed(length)
    each = max(1, count // len(SPREADS))
    rows = [spread * torch.randn(each, length, generator=generator, dtype=torch.float64) for spread in SPREADS]
    steps = torch.arange(length, dtype=torch.float64)
    peak = torch.full((length,), -20.0, dtype=torch.float64)
    peak[length // 2] = 0.0
    extreme = [0 * steps - 3, peak, -80 * steps / max(1, length - 1), 30 - 60 * (steps % 2), 2.0**15 + 16 * (steps % 4)]
    return torch.cat([*rows, torch.stack(extreme)]).to(device, dtype)


def random_beside(record: RowActivation, x: Tensor, dim: int) -> Beside:
    """Operands for a test of an activation: random values for each row of x, and the default parameters."""
    generator, shape = torch.Generator().manual_seed(2), x.select(dim, 0).unsqueeze(dim).shape
    rows = [torch.randn(shape, generator=generator, dtype=torch.float64).to(x.device, x.dtype) for _ in record.rows]
    return Beside(tuple(rows), tuple(default for _, default in record.params))


def check_rows(
    activation: object, low: float, high: float, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> Check | None:
    """Compares forward and gradients with float64, on rows of several lengths. The arguments are those of ``check``.

    None if the activation is not of rows.
    """
    cls, record = class_of_rows(activation), record_of_rows(activation)
    if cls is None:
        return None
    lines = tuple(_line(record, cls.function, dtype, save, low, high, device) for dtype in dtypes for save in record.saves)
    settings = ", ".join(f"{name}={value:g}" for name, value in record.params)
    title = f"{record.name}: {record.formula}" + (f", {settings}" if settings else "")
    span = "" if (low, high) == (-math.inf, math.inf) else f", {low:g} <= x <= {high:g}"
    method = f"against {record.yardstick} in float64, rows of {', '.join(map(str, LENGTHS))}{span}, on {device}"
    unseen = ["infinite and NaN x or dy", "second derivatives", "masks, scales and other dimensions", "most rows"]
    return Check(title, method, lines, "; ".join([*unseen, "the GPU" if device.type == "cpu" else "the CPU"]))


def _line(
    record: RowActivation,
    function: Callable[..., Tensor],
    dtype: torch.dtype,
    save: str,
    low: float,
    high: float,
    device: torch.device,
) -> Line:
    """The line of the report for a dtype and a choice of ``save``."""
    function = partial(function, **dict(record.params))
    span = max(low, torch.finfo(dtype).min), min(high, torch.finfo(dtype).max)
    samples = [random_rows(n, max(4, ELEMENTS // n), dtype, device).clamp(*span) for n in LENGTHS]
    besides = [random_beside(record, x, -1) for x in samples]
    exacts = [_exact(record, x.double(), beside) for x, beside in zip(samples, besides, strict=True)]
    # Logarithms are differences of numbers of magnitude 1; shares are products, with the same relative error everywhere.
    floor = 1.0 if any((exact.abs() > 1).any() for exact in exacts) else torch.finfo(dtype).tiny
    forward, gradient = [], []
    for x, beside, exact in zip(samples, besides, exacts, strict=True):
        dy = _incoming(x)
        y, dx, *of_rows = _value_and_gradients(function, x, beside, dy, save)
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        spread = (_exact(record, x.double() * (1 + eps), beside) - _exact(record, x.double() * (1 - eps), beside)).abs()
        judge = Judge(exact, spread, torch.zeros_like(exact), Limit(FORMULA[dtype].ulp, floor), dtype)
        forward.append(_worst(x, y, exact, judge.error(y, floor), judge.wrong(y)))
        given = zip((x, *beside.rows), (dx, *of_rows), _exact_gradients(record, x, beside, dy, y, exact, save), strict=True)
        for k, (values, found, (wanted, sizes)) in enumerate(given):
            info = torch.finfo(dtype)
            beyond = ((found - wanted).abs() - 16 * info.tiny * info.eps).clamp(min=0) / (info.eps * sizes).clamp(min=info.tiny)
            beyond = beyond.nan_to_num(nan=torch.inf)
            worst = _worst(values, found, wanted, beyond, beyond > FORMULA[dtype].ulp)
            operand = {"by": record.rows[k - 1], "at": f"{worst.x:.8g}, of a row of {x.shape[-1]},"} if k else {}
            gradient.append(replace(worst, **operand))
    return Line(dtype, save, sum(x.numel() for x in samples), _all(forward), _all(gradient))


def _exact(record: RowActivation, x: Tensor, beside: Beside) -> Tensor:
    y = record.exact(record.factor * x, -1, beside)
    check_reference(record.name, y, x)
    return y


def _incoming(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device, x.dtype)


def _value_and_gradients(
    function: Callable[..., Tensor], x: Tensor, beside: Beside, dy: Tensor, save: str
) -> tuple[Tensor, ...]:
    """The results for the rows, repeated to a tensor large enough for the kernels, if kernels take such rows."""
    count = len(x)
    times = math.ceil(ENOUGH / x.nbytes) if x.shape[-1] >= SHORT and x.dtype is not torch.float64 else 1
    leaves = [each.repeat(times, 1).requires_grad_() for each in (x, *beside.rows)]
    y = function(*leaves, -1, save=save)
    gradients = torch.autograd.grad(y, leaves, dy.repeat(times, 1))
    return y.detach()[:count], *[gradient[:count].double() for gradient in gradients]


def _exact_gradients(
    record: RowActivation, x: Tensor, beside: Beside, dy: Tensor, y: Tensor, exact: Tensor, save: str
) -> list[tuple[Tensor, Tensor]]:
    """The gradients computed from the saved output, or of the formula itself, and the sums of the magnitudes of their terms."""

    def from_output(y: Tensor) -> list[tuple[Tensor, Tensor]]:
        found, sizes = record.exact_gradient(dy, y, -1, beside)
        return [(record.factor * found, sizes), *record.exact_of_rows(dy, y, -1, beside)]

    if save == "output":
        return from_output(y)
    of_output = from_output(exact)
    # The output is computed again, and rounded to float32 at least; what that changes is another term.
    eps = torch.finfo(torch.promote_types(dy.dtype, torch.float32)).eps
    for signs in (1, 1 - 2 * (torch.arange(x.shape[-1], device=x.device) % 2)):
        of_rounded = zip(of_output, from_output(exact * (1 + eps * signs)), strict=True)
        of_output = [(a, sizes + (a - b).abs() / torch.finfo(dy.dtype).eps) for (a, sizes), (b, _) in of_rounded]
    leaves = [each.double().requires_grad_() for each in (x, *beside.rows)]
    with torch.enable_grad():
        y = _exact(record, leaves[0], Beside(tuple(leaves[1:]), beside.numbers))
        gradients = torch.autograd.grad(y, leaves, dy.double())
    return [(gradient, sizes) for gradient, (_, sizes) in zip(gradients, of_output, strict=True)]


def _worst(x: Tensor, actual: Tensor, exact: Tensor, error: Tensor, wrong: Tensor) -> Worst:
    """The largest error among the wrong results if there are any, else among all."""
    place = int(torch.where(wrong, torch.inf, error).flatten().argmax())
    value, result, wanted = (float(t.detach().flatten()[place]) for t in (x, actual, exact))
    at = f"x = {value:.8g}, element {place % x.shape[-1]} of a row of {x.shape[-1]},"
    return Worst(float(error.flatten()[place]), value, result, wanted, int(wrong.sum()), at=at)


def _all(found: list[Worst]) -> Worst:
    worst = max(found, key=lambda each: (each.wrong > 0, each.ulp))
    return replace(worst, wrong=sum(each.wrong for each in found))
