"""The IPython extension, ``%load_ext jitact``: a cell magic, completion of activation names, and the display of classes."""

from __future__ import annotations

import difflib
import json
import re
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

import torch

from .definitions.define import define
from .definitions.operands import declared, read_default
from .kernels import BuildError, load
from .kernels.loader.load import load_part
from .kernels.loader.source import RowPart
from .measuring.checks import check
from .measuring.oracle import curve
from .measuring.text import figure
from .measuring.ulp import value_and_gradient
from .modules import ActivationModule
from .records import Activation, Channel, Row
from .registry import names, undone_on_error
from .rows.modules import RowModule
from .rows.records import RowActivation

__all__ = ["describe", "describe_html", "load_ipython_extension"]

RESULTS = Path(__file__).parent / "results"
KINDS = ("forward", "gradient")
CURVE = (-4.0, 4.0, 161)  # the x axis of a class's plot: its ends, and the number of points


def load_ipython_extension(ipython: Any) -> None:
    """Registers the extension; called by ``%load_ext jitact``."""

    def activation(line: str, cell: str) -> type[ActivationModule]:
        return _activation(ipython, line, cell)

    activation.__doc__ = _activation.__doc__  # shown by %%activation?
    ipython.register_magic_function(activation, "cell", "activation")
    ipython.display_formatter.formatters["text/html"].for_type(type, _html)
    plain = ipython.display_formatter.formatters["text/plain"]
    others = plain.for_type(type)
    plain.for_type(type, lambda cls, printer, cycle: _plain(others, cls, printer, cycle))
    if ipython.Completer is not None:
        ipython.Completer.custom_matchers.append(lambda text: _complete(ipython.Completer.line_buffer, text))


ARGUMENT = re.compile(r"(\w+)\s*=\s*([\w.]+\([^)]*\)|\S+)")
GRADIENTS = ("backward", "backward_from_output")
FIELD = re.compile(r"^[ \t]*([A-Za-z_]\w*)[ \t]*:[ \t]*", re.MULTILINE)


def _activation(ipython: Any, line: str, cell: str) -> type[ActivationModule]:
    """Defines an activation: ``%%activation NAME [PARAMETER=DEFAULT ...] [--check]``, below it an expression or a kernel file.

    The activation is compiled, and its class is bound to a variable (``swoosh`` to ``Swoosh``) and shown; with ``--check``
    it is also compared with PyTorch in float64. A default may be a number, ``Channel(...)`` for an operand with a learned
    value for each channel, or ``Row()`` for one with a value for each row. ``operands=gate,up`` sets the order of the
    tensors, which otherwise is that of occurrence. Lines below the expression that begin with ``backward:`` or
    ``backward_from_output:`` give the gradient::

        %%activation snake2 a=1.0 --check
        x + pow(sin(a * x), 2) / a
        backward: dy * (1 + sin(2 * a * x))
    """
    from IPython.core.error import UsageError  # shown without a traceback

    words = ARGUMENT.sub("", line).split()
    unknown = [word for word in words[1:] if word != "--check"]
    if not words or unknown:
        found = f"not {' '.join(unknown)!r}" if unknown else "and there is no name"
        raise UsageError(f"usage: %%activation NAME [PARAMETER=DEFAULT ...] [--check], {found}")
    try:
        with undone_on_error():  # what the cell defined before stays
            cls = _define(words[0], *_arguments(words[0], line), cell)
            _compile(cls.activation)  # now, so that errors appear below the cell with the source
    except (ValueError, TypeError, BuildError) as error:
        raise UsageError(str(error)) from None
    ipython.push({cls.activation.title: cls})
    if "--check" in words:
        check(cls)
    return cls


def _compile(activation: Activation | RowActivation) -> None:
    """Compiles an activation, or of one of rows what float32 tensors take first."""
    if isinstance(activation, RowActivation):
        load_part(activation.source, RowPart("float32", "along", "output"))
    else:
        load(activation.source)


def _arguments(name: str, line: str) -> tuple[tuple[str, ...] | None, dict[str, float | Channel | Row]]:
    """The arguments of a magic line: the ``operands=`` list, if given, and the parameters, channel and row operands.

    Raises:
        ValueError: a name is invalid or occurs twice, or a default is invalid.
    """
    given: dict[str, str] = {}
    for param, value in ARGUMENT.findall(line):
        if param in given:
            raise ValueError(f"{name}: the parameter {param} is there twice")
        given[param] = value
    listed, params = given.pop("operands", None), {}
    for param, value in given.items():
        try:
            params[param] = read_default(value)
        except ValueError:
            message = f"{name}: the default of {param} must be a number, got {value!r}; what is learned is a Channel()"
            raise ValueError(message) from None
    declared(name, params)
    return None if listed is None else tuple(listed.split(",")), params


def _define(
    name: str, operands: tuple[str, ...] | None, params: dict[str, float | Channel | Row], cell: str
) -> type[ActivationModule]:
    if "ELEMENTWISE" in cell:
        return define(name, source=cell, operands=operands, **params)
    starts = [match for match in FIELD.finditer(cell) if difflib.get_close_matches(match[1], GRADIENTS)]
    ends = [match.start() for match in starts] + [len(cell)]
    gradients: dict[str, str] = {}
    for match, end in zip(starts, ends[1:], strict=True):
        if match[1] not in GRADIENTS:
            raise ValueError(f"{name}: there is no {match[1]!r}, only 'backward:' and 'backward_from_output:'")
        if match[1] in gradients:
            raise ValueError(f"{name}: '{match[1]}:' is there twice")
        gradients[match[1]] = cell[match.end() : end].strip()
    return define(name, cell[: ends[0]].strip(), operands=operands, **gradients, **params)


NAME_EXPECTED = re.compile(
    r"""(?:\b(?:get|function|plot|check|export)\((?:\s*["']\w*["']\s*,)*\s*["']|^%%activation\s+)(\w*)$"""
)


def _complete(line: str, text: str) -> list[str]:
    """Completions where the name of an activation is expected: ``jitact.get("so``."""
    expected = NAME_EXPECTED.search(line)
    if not expected:
        return []
    start = text[: len(text) - len(expected[1])]
    return [start + name for name in names() if name.startswith(expected[1])]


def _is_activation(cls: type) -> bool:
    return issubclass(cls, (ActivationModule, RowModule)) and hasattr(cls, "activation")


def _html(cls: type) -> str | None:
    return describe_html(cls) if _is_activation(cls) else None


def _plain(others: Any, cls: type, printer: Any, cycle: bool) -> None:
    if _is_activation(cls):
        printer.text(describe(cls))
    elif others:
        others(cls, printer, cycle)
    else:
        printer.text(repr(cls))


def _facts(cls: type[ActivationModule | RowModule]) -> dict[str, str]:
    """The facts about a class, in the order of display."""
    record = cls.activation
    keeps = {"input": "the input", "output": "the output", "bit": "one bit per element"}
    kept = [keeps[save] for save in record.saves]
    if len(kept) > 1:
        kept[0] += " (default)"
    facts = {
        "parameters": ", ".join(f"{name}={value:g}" for name, value in record.params),
        "learned": ", ".join(_learned(record)),
        "backward keeps": " or ".join(kept),
        "worst error, forward / gradient": ", ".join(_measured_errors(record)),
        "notes": "" if isinstance(record, RowActivation) else record.notes,
    }
    return {key: fact for key, fact in facts.items() if fact}


def _learned(record: Activation | RowActivation) -> list[str]:
    """The operands that a module learns, with where they begin."""
    if isinstance(record, RowActivation) or record.module or not record.channels:
        return []
    return [f"{name}, from {record.channels[name].init:g}" for name in record.learned]


def _heading(record: Activation | RowActivation) -> tuple[str, str]:
    return record.title, record.formula if isinstance(record, RowActivation) else record.equation


@lru_cache(maxsize=1)
def _rows() -> list[dict]:
    """The rows of the accuracy tool's results, on a GPU if there are any."""
    for device in ("cuda", "cpu"):
        path = RESULTS / f"accuracy-{device}.json"
        if path.is_file():
            return json.loads(path.read_text())["rows"]
    return []


def _measured_errors(record: Activation | RowActivation) -> list[str]:
    """The worst measured errors of forward and gradient with the default ``save``, by dtype."""
    rows = [row for row in _rows() if row["name"] == record.name and row.get("save") == record.saves[0]]
    rows = [row for row in rows if "ours" in row and not row["fast_math"]]
    return [f"{row['dtype']} {' / '.join(figure(row['ours'][kind]['ulp']) for kind in KINDS)} ulp" for row in rows]


def describe(cls: type[ActivationModule | RowModule]) -> str:
    """A class in a few lines of text: formula, parameters, choices of ``save``, worst errors."""
    lines = [": ".join(_heading(cls.activation))]
    return "\n".join(lines + [f"  {key}: {fact}" for key, fact in _facts(cls).items()])


def describe_html(cls: type[ActivationModule | RowModule]) -> str:
    """:func:`describe` as HTML; for functions of elements with a plot of them and, in a lighter colour, of their gradient."""
    record, (title, formula) = cls.activation, _heading(cls.activation)
    left = "style='text-align:left'"
    rows = "".join(f"<tr><th {left}>{escape(key)}</th><td {left}>{escape(fact)}</td></tr>" for key, fact in _facts(cls).items())
    heading = f"<b>{escape(title)}</b>&emsp;<code>{escape(formula)}</code>"
    picture = "" if isinstance(record, RowActivation) else _picture(record)
    return (
        f"<div style='display:flex;gap:1.5em;align-items:center'>{picture}"
        f"<div>{heading}<table style='margin:0.5em 0'>{rows}</table></div></div>"
    )


def _picture(record: Activation) -> str:
    """An SVG of the function and its gradient, computed by the reference, so that nothing needs to be compiled.

    Several operands: as a function of the first, with 1 for other elements and channel operands as in a new module.
    """
    low, high, points = CURVE
    x = torch.linspace(low, high, points, dtype=torch.float64)
    params = tuple(value for _, value in record.params)
    operands = record.layout.tensors[1:] if record.fingerprint or record.channels else ()
    if record.fingerprint and record.in_eval:
        record, params = record.in_eval(*params)
    channels = {name: torch.full((1,), channel.init, dtype=x.dtype) for name, channel in record.channels.items()}
    others = [channels[name] if name in channels else torch.ones_like(x) for name in operands]
    try:
        curves = value_and_gradient(lambda x: curve(record, record.reference, x, [*others, *params]), x)
    except Exception:  # a user's reference may raise anything; the display then has no picture
        return ""
    shown = torch.cat([curve[curve.isfinite()] for curve in curves]).clamp(-4, 4)
    if shown.numel() == 0:
        return ""
    bottom, top = min(float(shown.min()), -0.1), max(float(shown.max()), 0.1)

    def at(x: float, y: float) -> str:
        return f"{(x - low) / (high - low) * 140:.1f},{(top - max(min(y, 9), -9)) / (top - bottom) * 90:.1f}"

    lines = "".join(
        f"<polyline fill='none' stroke='{color}' stroke-width='1.6' points='"
        f"{' '.join(at(a, b) for a, b in zip(x.tolist(), curve.tolist(), strict=True) if b == b)}'/>"
        for color, curve in (("#f0a868", curves[1]), ("#1f77b4", curves[0]))
    )
    axes = "".join(
        f"<polyline fill='none' stroke='#bbb' stroke-width='0.7' points='{at(*a)} {at(*b)}'/>"
        for a, b in (((low, 0), (high, 0)), ((0, bottom), (0, top)))
    )
    return f"<svg width='140' height='90' style='flex:none;overflow:hidden'>{axes}{lines}</svg>"
