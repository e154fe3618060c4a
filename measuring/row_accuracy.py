"""The errors of row activations: the part of accuracy.py for softmax and its relatives.

The kernels are called directly, on rows of all lengths that they support, even where calls would use PyTorch's operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import torch
from torch import Tensor

from ..rows.records import Beside, RowActivation, can
from .commandline import dtype_name, first_line
from .limits import OF_ROWS, UNUSUAL
from .row_checks import random_beside, random_rows
from .text import figure
from .ulp import Error, ulp_error

__all__ = ["rows_of"]

LENGTHS = (1, 2, 3, 8, 17, 64, 100, 255, 1000, 1001, 2048, 4100, 8192, 16400, 50257, 65536, 131072, 393_216, 400_000)
LONG = 2**15  # elements; only a few rows longer than this are measured
ELEMENTS = 2**17  # of all rows of one length


def rows_of(record: RowActivation, dtype: torch.dtype, device: torch.device) -> Iterator[dict]:
    """The results for a row activation and a dtype: a row for each choice of ``save``."""
    if dtype not in OF_ROWS:  # there are no kernels for it
        return
    try:
        errors = measure(record, dtype, device)
    except Exception as error:  # kernels that do not compile or run are reported
        yield {"name": record.name, "dtype": dtype_name(dtype), "broken": [first_line(error)]}
        return
    for save in record.saves:
        own = {kind: errors[kind, save] for kind in ("forward", "gradient")}
        yield {
            "name": record.name,
            "dtype": dtype_name(dtype),
            "save": save,
            "fast_math": False,
            "ours": {kind: asdict(error) for kind, error in own.items()},
            "torch": {kind: asdict(errors[kind, "torch"]) for kind in ("forward", "gradient")},
            "broken": _broken(dtype, own),
        }


def _broken(dtype: torch.dtype, own: dict[str, Error]) -> list[str]:
    """Descriptions of the bounds that are exceeded."""
    rules = []
    for kind, limit in (("forward", OF_ROWS[dtype].forward), ("gradient", OF_ROWS[dtype].gradient)):
        error = own[kind]
        if error.broken:
            inputs = f"{error.broken} of {error.count} elements are above {limit:g}"
            rules.append(f"{kind} off by {figure(error.ulp)} ulp at x = {error.at!r}; {inputs}")
    if own["forward"].unusual > UNUSUAL * own["forward"].count:
        rules.append(f"forward off by more than {OF_ROWS[dtype].usual} ulp for over {UNUSUAL:.1%} of the elements")
    return rules


def measure(record: RowActivation, dtype: torch.dtype, device: torch.device) -> dict[tuple[str, str], Error]:
    """The errors, keyed by "forward" or "gradient" and by ``save``, or "torch" for PyTorch's operator."""
    found = {(kind, who): Error() for kind in ("forward", "gradient") for who in (*record.saves, "torch")}
    for length in LENGTHS:
        x = random_rows(length, max(4, ELEMENTS // length), dtype, device)
        x = x[-7:].clone() if length > LONG else x
        for lying, dim in ((x, -1), (x.t().contiguous(), 0)):
            if can(lying, dim % 2, 2):
                _add(found, record, lying, dim % 2)
    return found


def _add(found: dict[tuple[str, str], Error], record: RowActivation, x: Tensor, dim: int) -> None:
    """Adds the errors of some rows."""
    dtype, bound, scale = x.dtype, OF_ROWS[x.dtype], record.factor
    beside = random_beside(record, x, dim)
    given = Beside(tuple(values.float() for values in beside.rows), beside.numbers)  # kernels take float32
    exact = record.exact(scale * x.double(), dim, beside)
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(x.device, dtype)
    y = record.forward_by_kernel(x, dim, scale, given)
    leaf = x.detach().requires_grad_()
    theirs = record.theirs(leaf, dim, *beside.rows, *beside.numbers)
    (their_dx,) = torch.autograd.grad(theirs, leaf, dy)
    tiny = torch.finfo(dtype).tiny if dtype is not torch.float16 else 0.0
    for who, result in (*((save, y) for save in record.saves), ("torch", theirs.detach())):
        error = ulp_error(result, exact, dtype).masked_fill((exact.abs() < tiny) & (result.abs() <= tiny), 0.0)
        found["forward", who].add(x.flatten(), error.flatten(), bound.usual, bound.forward)
    both = [record.backward_by_kernel(dy, kept, dim, scale, kept is y, given) for kept in (y, x)]
    output, input_ = (found if isinstance(found, Tensor) else found[0] for found in both)
    for who, dx, known in (("output", output, y), ("input", input_, exact), ("torch", their_dx, theirs.detach())):
        error, unit = _gradient_error(record, dx, dy, known, dim, beside)
        allowed = torch.full_like(error, bound.gradient)
        if who == "input" and dtype is torch.float32:  # the recomputed output is rounded too
            moved = known * (1 + bound.forward * torch.finfo(dtype).eps)
            there, here = (record.exact_gradient(dy, each, dim, beside)[0] for each in (moved, known))
            allowed += (there - here).abs() / unit
        found["gradient", who].add(x.flatten(), error.flatten(), torch.inf, allowed.flatten())


def _gradient_error(
    record: RowActivation, dx: Tensor, dy: Tensor, y: Tensor, dim: int, beside: Beside
) -> tuple[Tensor, Tensor]:
    """The error in epsilons of the sum of the magnitudes of the terms, with an allowance for subnormals; and that unit."""
    info = torch.finfo(dx.dtype)
    exact, sizes = record.exact_gradient(dy, y, dim, beside)
    beyond = ((dx.double() - record.factor * exact).abs() - 16 * info.tiny * info.eps).clamp(min=0)
    unit = (info.eps * sizes).clamp(min=info.tiny * info.eps)
    return beyond / unit, unit
