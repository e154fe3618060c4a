"""Plots of activations: functions, gradients and measured errors. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .measuring.checks import check_determined, check_ends, converted, default_device
from .measuring.limits import GRADIENT_FLOOR
from .measuring.oracle import exact_function, function_of
from .measuring.several import by_operand, formula, in_eval, kernel, of_several
from .measuring.ulp import every_16bit_value, ulp_error, value_and_gradient
from .modules import ActivationModule
from .records.arguments import DTYPES
from .registry import Named, module_of, record_of
from .rows.functions import by_kernel
from .rows.modules import record_of_rows
from .rows.records import Beside, RowActivation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot"]

Subject = Callable[[Tensor], Callable[[Tensor], Tensor]]

POINTS = 801
BESIDE = (-1.0, 0.0, 1.0)  # the other elements of the row whose first element is plotted
BINS = 120
SAMPLE = 2**18


def plot(
    *activations: Named,
    error: bool = False,
    low: float = -6.0,
    high: float = 6.0,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | None = None,
) -> Figure:
    """Draws functions and their gradients, and with ``error=True`` the measured errors of both in ulp.

    Args:
        activations: anything that :func:`jitact.get` takes; modules are drawn with their parameters. An activation of several
            operands has a curve for each, with 1 for the other elements and the module's mean for channel operands. For softmax
            and its relatives, the curve is the first element of a row of four, whose others are -1, 0 and 1.
        error: also draw how far results in ``dtype`` are from exact, in units in the last place: the largest error within
            each of 120 intervals, PyTorch's dashed. Every value of a 16-bit type is tried, and a sample of wider types.
        low: the left end of the x axis.
        high: the right end.
        dtype: the dtype in which errors are measured.
        device: the device on which errors are measured; by default the GPU, if there is one.

    Returns:
        The figure: a notebook shows it, ``figure.savefig("gelu.png")`` writes it.

    Raises:
        ImportError: matplotlib is not installed.
        KeyError, TypeError: as :func:`jitact.get`.
        TypeError: ``low`` or ``high`` is no number, or ``error`` no bool.
        ValueError: no activation is given, ``low`` is not less than ``high``, or ``dtype`` is not one of jitact's.
    """
    pyplot = _pyplot()
    if not activations:
        raise ValueError("plot() takes at least one activation, as in plot('gelu', 'silu'); got none")
    check_ends("plot", low, high)
    if not isinstance(error, bool):
        raise TypeError(f"plot: error must be True or False, got {error!r}")
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"plot() takes low < high, both finite; got low={low}, high={high}")
    if dtype not in DTYPES:
        raise ValueError(f"plot() measures errors in {', '.join(map(str, DTYPES))}; got dtype={dtype!r}")
    drawn = [_labelled(activation) for activation in activations]  # before the figure is opened, as this may raise
    rows = 2 if error else 1
    figure, axes = pyplot.subplots(rows, 2, figsize=(10, 3.6 * rows), sharex=True, squeeze=False, layout="constrained")
    x = torch.linspace(low, high, POINTS, dtype=torch.float64)
    curves = [(f"{label}{of}", *functions) for module, label in drawn for of, functions in _functions(module).items()]
    for number, (label, function, *_) in enumerate(curves):
        for ax, values in zip(axes[0], value_and_gradient(function(x), x), strict=True):
            ax.plot(x, values, color=f"C{number}", label=label)
    if error:
        x = _inputs(low, high, dtype).to(default_device(device))
        for number, (_, *functions) in enumerate(curves):
            _draw_errors(axes[1], [function(x) for function in functions], x, (low, high), f"C{number}")
    where = f"{str(dtype).removeprefix('torch.')}, {default_device(device).type}"
    titles = ["forward", "gradient", f"error of forward, {where}", f"error of gradient, {where}"]
    for ax, title in zip(axes.flat, titles, strict=False):
        ax.set_title(title, fontsize=10)
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(frameon=False)
    for ax in axes[-1]:
        ax.set_xlabel("x")
        ax.set_xlim(low, high)
    if error:
        _finish_errors(axes[1])
    if "inline" in pyplot.matplotlib.get_backend():
        pyplot.close(figure)  # a notebook shows the returned figure; an open one would be shown twice
    return figure


def _pyplot():
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ImportError("jitact.plot needs matplotlib: pip install 'jitact[plot]'") from None
    return pyplot


def _labelled(activation: Named) -> tuple[ActivationModule | RowActivation, str]:
    """The module, or the record of a row activation, and its label in the legend."""
    record = record_of_rows(activation)
    if record is not None:
        settings = "".join(f", {name} = {value:g}" for name, value in [*((name, 1) for name in record.rows), *record.params])
        return record, f"{record.name} beside {', '.join(f'{value:g}' for value in BESIDE)}{settings}"
    module = module_of(activation)
    check_determined(module.activation)
    settings = f"({module.extra_repr()})" if isinstance(activation, torch.nn.Module) else ""
    return module, module.activation.name + settings


def _functions(module: ActivationModule | RowActivation) -> dict[str, tuple[Subject, Subject, Subject]]:
    """jitact's, the exact and PyTorch's function, each as made for given inputs.

    Keyed by a suffix for the label, which names the operand if there are several.
    """
    if isinstance(module, RowActivation):
        forms = (
            partial(by_kernel, module),
            lambda row, beside: module.exact(module.factor * row, -1, beside),
            lambda row, beside: module.theirs(row, -1, *beside.rows, *beside.numbers),
        )
        return {"": tuple([lambda x, f=form: lambda x: f(_row(x), _ones(module, x))[..., 0] for form in forms])}
    if not of_several(record_of(module)):
        return {
            "": (
                lambda x: converted(module, x),
                lambda x: exact_function(converted(module, x)),
                lambda x: function_of(converted(module, x), record_of(module).reference),
            )
        }
    record, params = in_eval(module)
    forms = kernel(record, params), formula(record, params), lambda *tensors: record.reference(*tensors, *params)
    found = [by_operand(module, form) for form in forms]
    return {f", by {name}": tuple([lambda x, f=each[name]: f for each in found]) for name in record.layout.tensors}


def _ones(record: RowActivation, x: Tensor) -> Beside:
    """The operands of the plotted rows: 1 for each row, and the default parameters."""
    rows = [x.detach().new_ones((*x.shape, 1)) for _ in record.rows]
    return Beside(tuple(rows), tuple(default for _, default in record.params))


def _row(x: Tensor) -> Tensor:
    """A row for each element of ``x``, beginning with it."""
    return torch.stack([x, *(torch.full_like(x, value) for value in BESIDE)], -1)


def _draw_errors(
    axes: list[Axes], functions: list[Callable[[Tensor], Tensor]], x: Tensor, span: tuple[float, float], color: str
) -> None:
    """Draws the largest errors of forward and gradient along x, jitact's and PyTorch's."""
    own, f, theirs = functions
    exact = value_and_gradient(f, x.double())
    for subject, style, width in ((theirs, "--", 0.8), (own, "-", 1.4)):
        for ax, actual, wanted, floor in zip(axes, value_and_gradient(subject, x), exact, (None, GRADIENT_FLOOR), strict=True):
            ulp = ulp_error(actual, wanted, x.dtype, floor)
            ax.plot(*_largest(x.cpu(), ulp.cpu(), *span), style, color=color, linewidth=width)


def _finish_errors(axes: list[Axes]) -> None:
    """Sets a logarithmic scale, and marks 1/2 ulp, the largest error of correct rounding."""
    for ax in axes:
        highest = max(float(torch.as_tensor(line.get_ydata()).nan_to_num().max()) for line in ax.lines)
        ax.axhline(0.5, color="black", linewidth=0.6, zorder=0)
        ax.set_yscale("log")
        ax.set_ylim(0.05, min(max(4.0, 1.5 * highest), 1e8))
        ax.yaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("ulp (line: 1/2, correct rounding)")
    axes[0].plot([], [], color="gray", linestyle="--", linewidth=0.8, label="PyTorch")
    axes[0].legend(frameon=False)


def _inputs(low: float, high: float, dtype: torch.dtype) -> Tensor:
    if dtype.itemsize == 2:
        x = every_16bit_value(dtype)
        return x[(x >= low) & (x <= high)]
    return torch.linspace(low, high, SAMPLE, dtype=dtype)


def _largest(x: Tensor, ulp: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """The midpoints of the intervals, and the largest error within each; NaN if an interval has no input."""
    index = ((x.double() - low) / (high - low) * BINS).long().clamp(0, BINS - 1)
    largest = torch.full((BINS,), -1.0, dtype=torch.float64).scatter_reduce(0, index, ulp.double(), "amax")
    middles = low + (torch.arange(BINS) + 0.5) * (high - low) / BINS
    return middles, largest.masked_fill(largest < 0, torch.nan).masked_fill(largest.isinf(), torch.finfo(torch.float32).max)
