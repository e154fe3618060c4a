"""Bias, dropout and residual around an activation: ``residual + dropout(gelu(x + bias))``, as one kernel.

Each combination in use is a record of its own, with a kernel file that is generated here and includes the activation's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..kernels.loader.signature import TYPES
from ..kernels.loader.source import Work
from ..kernels.loader.uses import prepare_through
from ..records import Activation, Channel, Requirement, by_token
from ..records.arguments import as_index, as_number, stand_ins, what_it_is
from ..records.dtypes import wider
from ..records.tracing import as_constant
from ..running import called_later, run_with_operands
from ..subclasses.jagged import is_jagged
from .drop import dropped

__all__ = ["NAMES", "around", "check_channel_dim", "check_fused", "named", "probability", "run_around", "run_with_added"]

NAMES = ("bias", "dropout", "residual")
DRAWING = 5  # Work.forward of drawing random numbers alone


def run_around(
    record: Activation,
    given: dict[str, Any],
    params: tuple,
    fused: dict[str, Any],
    inplace: bool,
    save: str | None,
    fast_math: bool,
    training: bool,
) -> Tensor:
    """Applies an activation with fused bias, dropout and residual.

    Args:
        record: of the activation.
        given: its tensors, by name.
        params: its parameters.
        fused: those of bias, residual, dropout, channel_dim and seed that the caller accepts; None, or 0 for dropout: without.
        inplace: as for the activation alone.
        save: as for the activation alone.
        fast_math: as for the activation alone.
        training: the activation's own training mode, if it has one. Dropout is applied in any case.

    Raises:
        TypeError, ValueError: one of ``fused`` has a wrong type or value, or as :func:`jitact.running.run`.
    """
    if stand_ins(*given.values(), *fused.values()):
        return called_later(record, given, params, inplace, save, fast_math, training, **fused)
    dropout = fused.get("dropout")
    p = 0.0 if dropout is None else probability(record, dropout)
    check_fused(record, fused, given)
    seed, dim = fused.get("seed"), fused.get("channel_dim", -1)
    if record.in_eval is not None and not training:
        record, params = record.in_eval(*record.check(params, inplace, save, fast_math))
        save = None
    added = {name: fused[name] for name in ("bias", "residual") if fused.get(name) is not None}
    drops = True if p > 0 else False  # noqa: SIM210 - torch.compile makes no bool of a symbolic number otherwise
    chosen = ("bias" in added, drops, "residual" in added)
    if any(chosen):
        if torch.compiler.is_compiling():
            dim = _constant(dim, next(iter(given.values())).dim())
            record = getattr(record.made, _made(record.token, *chosen, dim))
        else:
            record = around(record, *chosen, dim)
    return run_with_operands(record, given | added, (*params, p) if drops else params, inplace, save, fast_math, True, seed)


def run_with_added(
    record: Activation, tensors: dict[str, Tensor], params: tuple, inplace: bool, save: str | None, fast_math: bool
) -> Tensor:
    """:func:`run_around` in half of its time, for eager calls of an activation of ``x`` alone.

    ``tensors`` holds ``x`` and a bias of the last dimension, a residual, or both.
    """
    wrapped = around(record, "bias" in tensors, False, "residual" in tensors)
    return run_with_operands(wrapped, tensors, params, inplace, save, fast_math, True)


def _constant(dim: int, dims: int) -> int:
    """``dim`` as a constant, where torch.compile has made it symbolic; -1 is possible for ``dims`` of 0."""
    return next(each for each in range(min(-dims, -1), dims) if each == dim)


def probability(record: Activation, dropout: Any) -> float:
    """The probability of dropout.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not from 0 to 1.
    """
    p = as_number(record, "dropout", dropout)
    if not 0 <= p <= 1:
        raise ValueError(f"{record.name}: dropout is a probability, from 0 to 1, got {p}")
    return p


def check_fused(record: Activation, fused: dict[str, Any], given: dict[str, Any]) -> None:
    """Checks ``seed`` and ``channel_dim`` against the activation's tensors, ``given`` by name.

    Raises:
        TypeError: the seed is neither None nor a tensor of one int64, or the dimension is not an int.
        ValueError: the seed is on another device, or the dimension is out of range or given without a bias.
    """
    seed, dim = fused.get("seed"), fused.get("channel_dim", -1)
    if seed is None and type(dim) is int and dim == -1:  # almost every call
        return
    x = next(iter(given.values()))
    if seed is not None:
        if not isinstance(seed, Tensor) or seed.dtype is not torch.int64 or seed.numel() != 1:
            many = f" of {seed.numel()} values" if isinstance(seed, Tensor) and seed.numel() != 1 else ""
            write = f"; write torch.tensor({seed})" if type(seed) is int else ""
            raise TypeError(f"{record.name}: seed must be a tensor that holds one int64, got {what_it_is(seed)}{many}{write}")
        if isinstance(x, Tensor) and seed.device != x.device:
            raise ValueError(f"{record.name}: seed must be on the device of x, {x.device}, got one on {seed.device}")
    dim = fused["channel_dim"] = check_channel_dim(record, dim, fused.get("bias"))
    if isinstance(x, Tensor) and dim != -1 and not -x.dim() <= dim < x.dim():
        raise ValueError(f"{record.name}: x has {x.dim()} dimensions, and no channel_dim={dim}: {tuple(x.shape)}")
    if is_jagged(x) and dim >= 0:  # the values, for which it is computed, have one dimension less
        fused["channel_dim"] = dim - x.dim()


def check_channel_dim(record: Activation, dim: Any, bias: Any) -> int:
    """``channel_dim`` as an int, given the bias.

    Raises:
        TypeError: it is not an int.
        ValueError: it is not the default, and there is no bias.
    """
    dim = as_index(record, "channel_dim", dim)
    if dim != -1 and bias is None:
        own = f"; that of {' and of '.join(record.channels)} is its Channel's" if record.channels else ""
        why = f"channel_dim is the dimension of bias=, and no bias is given, got channel_dim={dim}"
        raise ValueError(f"{record.name}: {why}{own}")
    return dim


@as_constant
def _made(token: str, bias: bool, dropout: bool, residual: bool, dim: int) -> str:
    """Makes the record outside of tracing, and returns the name of the attribute in which :func:`around` keeps it."""
    around(by_token[token], bias, dropout, residual, dim)
    return _name(bias, dropout, residual, dim)


@cache
def _name(bias: bool, dropout: bool, residual: bool, dim: int) -> str:
    return f"around_{bias:d}{dropout:d}{residual:d}_{dim}"


def around(
    record: Activation, bias: bool = False, dropout: bool = False, residual: bool = False, dim: int = -1
) -> Activation:
    """The record of an activation fused with bias, dropout or residual; cached in the activation's record.

    Args:
        record: of the activation.
        bias: whether a bias is added to ``x``, with one value for each index of dimension ``dim``.
        dropout: whether dropout follows the activation; its probability is the last parameter.
        residual: whether a tensor is added to the result.
        dim: the dimension of the bias.
    """
    if not (bias or dropout or residual):
        return record
    name = _name(bias, dropout, residual, dim)
    made = getattr(record.made, name, None)
    if made is None:
        made = _make(record, bias, dropout, residual, dim)
        setattr(record.made, name, made)
    return made


def named(record: Activation, parts: list[str]) -> Activation:
    """The record that ``gelu+bias+dropout`` names, given gelu's and what follows a ``+``.

    Raises:
        ValueError: that cannot be fused, or the activation has an argument of its own of that name.
    """
    name = "+".join([record.name, *parts])
    unknown = [part for part in parts if part not in NAMES]
    if unknown:
        raise ValueError(f"{name!r}: {unknown[0]!r} cannot be fused with an activation; {', '.join(NAMES)} can")
    own = [part for part in parts if part not in record.beside]
    if own:
        raise ValueError(f"{name!r}: {record.name} has an argument {own[0]!r} of its own")
    return around(record, **{part: True for part in parts})


def _work(record: Activation, bias: bool, dropout: bool, residual: bool) -> Work:
    """The work of the fused kernel, as measured: see docs/decisions/operands.md."""
    work = record.source.work
    if bias and not residual and "bit" not in record.saves:  # activations that keep a bit compute almost nothing in forward
        return work._replace(forward=3 if work.forward <= 3 and not dropout else 5)
    return work._replace(forward=max(work.forward, DRAWING - residual)) if dropout else work


def _make(record: Activation, bias: bool, dropout: bool, residual: bool, dim: int) -> Activation:
    chosen = (bias, dropout, residual)
    label = "+".join([record.name, *(name for name, each in zip(NAMES, chosen, strict=True) if each)])
    source = record.source
    kernel = source._replace(
        name=label.replace("+", "_"),
        text=_text(record, bias, dropout, residual),
        path=f"<{label}>",
        numbers=(),
        work=_work(record, bias, dropout, residual),
        given=() if source.is_librarys else (source,),
        label=record.label_of(label),
    )
    own = len(record.params)
    spec = record.layout
    # Numbers, not the record: the formula would keep a record alive whose name has been defined again.
    own_operands = spec.elements, len(spec.tensors) - spec.elements, own, spec.draws
    described = *own_operands, bias, len(source.signature.of("random")) if dropout else None, residual
    requires = [requirement._replace(holds=partial(_holds, requirement.holds, own)) for requirement in record.requires]
    if dropout:
        requires.append(Requirement("0 <= dropout <= 1", lambda *params: 0 <= params[-1] <= 1))
    saves = tuple(save for save in record.saves if save != "output" or not (dropout or residual))
    return replace(
        record,
        name=label,
        reference=partial(_formula if record.by_formula else _drawing_formula, record.reference, *described),
        declared_saves=saves or ("input",),
        params=(*record.params, ("dropout", 0.5)) if dropout else record.params,
        gradient_from_output=None,
        module=None,
        exact=partial(_formula, record.exact, *described) if record.exact else None,
        requires=tuple(requires),
        aliases=(),
        kernel=kernel,
        channels=record.channels | ({"bias": Channel(0.0, dim)} if bias else {}),
        added=tuple(name for name, chosen in (("bias", bias), ("residual", residual)) if chosen),
        passed=(() if dropout else record.passed) + (("residual",) if residual else ()),
        reads=_reads(record, bias, residual),
        spans=None if record.spans is None else (record.spans[0], partial(_holds, record.spans[1], own)),
        in_eval=None,
        transformers=(),
    )


def _reads(record: Activation, bias: bool, residual: bool) -> dict[str, tuple[str, ...]]:
    """The tensors that each gradient reads. One that reads ``x`` reads the bias too: the activation gets ``x + bias``."""
    own = record.layout.tensors
    reads = {name: record.reads.get(name, own) for name in own}
    if bias:
        reads = {name: (*read, "bias") if own[0] in read else read for name, read in reads.items()}
        reads["bias"] = reads[own[0]]
    return reads | ({"residual": ()} if residual else {})


def _holds(function: Callable[..., Any], own: int, *params: float) -> Any:
    """Calls a function of the activation's own parameters, dropping that of dropout."""
    return function(*params[:own])


def _text(record: Activation, bias: bool, dropout: bool, residual: bool) -> str:
    """The kernel file: calls the activation's functions, which are in a namespace of their own."""
    signature, name = record.source.signature, record.name
    first = signature.operands[0].in_file
    others = [(TYPES[o.role], f"{o.in_file}_" if o.role == "number" else o.in_file) for o in signature.operands[1:]]
    tensors = [each for each in others if each[0] not in ("Number<T>", "Random<T>")]
    after = [each for each in others if each[0] in ("Number<T>", "Random<T>")]
    # The bias comes right after x: a bit that is enough for the gradient of x is then taken to be enough for that of the bias.
    arguments = [("T", first), *([("Channel<T>", "bias")] if bias else []), *tensors]
    arguments += [("T", "residual")] if residual else []
    arguments += [*after, *([("Random<T>", "drop"), ("Number<T>", "share")] if dropout else [])]
    declared = ", ".join(" ".join(each) for each in arguments)
    without = ", ".join(" ".join(each) for each in arguments if each[0] != "T")
    x = f"{first} + bias" if bias else first
    given = ", ".join([x, *(name for _, name in others)])
    rest = "".join(f", {name}" for type_, name in others if type_ != "T")
    dy = "dropout(dy, drop, share)" if dropout else "dy"
    y = f"{name}_::forward({given})"
    y = f"dropout({y}, drop, share)" if dropout else y
    lines = [f"ELEMENTWISE T forward({declared}) {{ return {'residual + ' if residual else ''}{y}; }}"]
    prepare = prepare_through(name, record.source.text, tensors)
    lines[:0] = [prepare] if prepare else []
    gradients = f"{name}_::backward({dy}, {given})"
    lines.append(_gradients(f"backward(T dy, {declared})", gradients, len(signature.differentiable), bias))
    last = f", {without}" if without else ""
    if "bit" in record.saves:
        lines.append(f"ELEMENTWISE bool keeps({declared}) {{ return {name}_::keeps({given}); }}")
        gradients = f"{name}_::backward_from_bit({dy}, bit{rest})"
        lines.append(_gradients(f"backward_from_bit(T dy, bool bit{last})", gradients, signature.bit_gradients, bias))
    if "output" in record.saves and not dropout and not residual:
        lines.append(
            f"ELEMENTWISE T backward_from_output(T dy, T y{last}) {{ return {name}_::backward_from_output(dy, y{rest}); }}"
        )
    return "\n\n".join(['#include "elementwise.cuh"', *lines]) + "\n"


def _gradients(declared: str, found: str, count: int, bias: bool) -> str:
    """A function that returns ``count`` gradients; with a bias the first one twice, as it is that of the bias too."""
    if count + bias == 1:
        return f"ELEMENTWISE T {declared} {{ return {found}; }}"
    each = [f"found.of[{g}]" for g in range(count)] if count > 1 else ["found"]
    results = ", ".join([*each[:1] * bias, *each])
    return f"ELEMENTWISE Many<T, {count + bias}> {declared} {{\n  const auto found = {found};\n  return {{{results}}};\n}}"


def _formula(
    form: Callable[..., Tensor],
    elements: int,
    by_channel: int,
    numbers: int,
    draws: bool,
    bias: bool,
    stream: int | None,
    residual: bool,
    x: Tensor,
    *others: Any,
    keep: Callable | None = None,
) -> Tensor:
    """The fused computation by PyTorch. Tensors come in the order in which the operators take them.

    Args:
        form: the activation by PyTorch.
        elements: how many elementwise operands ``form`` takes.
        by_channel: how many operands with a value for each channel or row it takes.
        numbers: how many parameters it takes.
        draws: whether it draws random numbers, and takes ``keep``.
        bias: whether there is a bias.
        stream: the random stream of dropout; None without dropout.
        residual: whether there is a residual.
        x: the first operand.
        others: the other operands, the parameters and the probability of dropout.
        keep: the factors of dropout, as :func:`jitact.fusing.drop.dropped` takes them.
    """
    dtype = x.dtype  # of the result, whatever the bias's dtype
    more, left = list(others[: elements - 1]), list(others[elements - 1 :])
    added = left.pop(0) if residual else None
    if bias:
        x = x + left.pop(0)
    channels, left = left[:by_channel], left[by_channel:]
    own, left = left[:numbers], left[numbers:]
    drawn = {"keep": keep} if draws and keep is not None else {}
    operands = [each.to(wider(each.dtype, x.dtype)) for each in (*more, *channels)]  # a wider bias has promoted x
    y = form(x, *operands, *own, **drawn)
    if stream is not None:
        y = dropped(y, left[0], keep, stream)
    return (y if added is None else added + y).to(dtype)


def _drawing_formula(*arguments: Any) -> Tensor:
    """:func:`_formula` for an activation that draws its own random numbers: without ``keep`` in its signature."""
    return _formula(*arguments)
