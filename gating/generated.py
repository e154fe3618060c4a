"""Gated activations of any elementwise activation: ``jitact.gated("mish")``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from .. import registry
from ..activations import TABLE
from ..kernels import KernelSource, Work
from ..kernels.loader.uses import prepare_through
from ..modules import GENERATED, ActivationModule
from ..records import Activation, Gating, by_token
from ..records.arguments import GATED, OPTIONS
from ..records.tracing import as_constant
from .around import CHANNEL, leading_to, typed_operands
from .modules import make_gated_module

__all__ = ["gated"]

_TAKEN = {"x", "other", "gate", "up", "row_weight", "dim", "device", "dtype", *GATED, *OPTIONS}


@cache
def _own() -> dict[str, str]:
    """The library's own gated activations, by the activation of the gate."""
    return {each.gating.of: each.name for each in TABLE if each.gating and each.gating.of}


def gated(activation: registry.Named) -> type[ActivationModule]:
    """The class of ``act(gate) * up`` for an elementwise activation: ``gated("mish")()(x)``, ``gated("mish")()(gate, up)``.

    The class takes the parameters of the activation by keyword, and the arguments of ``jitact.get("swiglu")``; kernels are
    compiled at first use. ``gated("silu")`` is ``jitact.get("swiglu")``. Weights that the activation learns belong to the
    module: ``gated("prelu")(weight=64)`` has one for each of 64 channels; functions take them by keyword. ``gated("rrelu")``
    draws random numbers in training mode only; for functions that is ``training=True``.

    Args:
        activation: anything that :func:`jitact.get` takes. The settings of a module do not matter: pass them to the class.

    Raises:
        KeyError, TypeError: as :func:`jitact.get`.
        ValueError: the activation takes several elementwise tensors, draws random numbers outside of training too, or has an
            argument of the same name as one of gated activations.
    """
    is_ours = isinstance(activation, ActivationModule)
    record = registry.record_of(activation) if is_ours else registry.class_of(activation).activation
    made = _made(record.token) if torch.compiler.is_compiling() else ""
    return getattr(record.made, made) if made else _class_of(record)


@as_constant
def _made(token: str) -> str:
    """Makes the class outside of tracing, and returns the name of the attribute of the record's ``made`` that has it.

    Returns "" if there can be none: :func:`_class_of` raises the error, while it is traced.
    """
    record = by_token[token]
    try:
        record.made.gated = _class_of(record)
    except ValueError:
        return ""
    return "gated"


def _class_of(record: Activation) -> type[ActivationModule]:
    own = None if record.fingerprint else _own().get(record.name)
    if own is not None:
        return registry.REGISTRY[own]
    made = getattr(record.made, "gated", None)
    if made is not None:
        return made
    signature = record.source.signature
    more = [*signature.of("element")[1:], *signature.of("row")]
    more += [] if record.in_eval else [f"random {name}" for name in signature.of("random")]
    if more:
        raise ValueError(f"gated() takes an activation of one tensor of elements; {record.name} takes more: {', '.join(more)}")
    own_names = [name for name in (*record.channels, *(name for name, _ in record.params)) if name in _TAKEN]
    if own_names:
        raise ValueError(f"gated(): {record.name} has an argument {own_names[0]!r}, which gated activations have themselves")
    outside = _class_of(record.in_eval(*(default for _, default in record.params))[0]) if record.in_eval else None
    with registry.lock:
        made = getattr(record.made, "gated", None)
        if made is None:
            made = record.made.gated = make_gated_module(_make(record, outside and outside.activation))
    return made


def _make(record: Activation, outside: Activation | None) -> Activation:
    """The record of the gated form. ``outside`` is the gated form of ``record`` in eval mode; None if that is the same."""
    name, source = f"{GENERATED}{record.name}", record.source
    work = Work(*(min(each + 1, 4) for each in source.work))
    given = () if source.is_librarys else (source,)
    kernel = KernelSource(name, _text(record), f"<{name}>", work=work, given=given, singles=source.singles)
    exact = record.exact
    return Activation(
        name,
        f"Gated{record.title}",
        f"{record.name}(gate) up, where {record.name}(x) is {record.formula}",
        _times_up(record),
        params=record.params,
        exact=exact and (lambda gate, up, *rest: exact(gate, *rest) * up),
        requires=tuple(requirement for requirement in record.requires if requirement.save is None),
        kernel=kernel,
        has_reference=record.has_reference,
        fingerprint=record.fingerprint,
        channels=record.channels,
        dtypes=record.dtypes,
        spans=record.spans,
        in_python={name: record.in_python[name] for name, _ in record.params if name in record.in_python},
        in_eval=outside and leading_to(outside, record),
        gating=Gating(),
    )


def _times_up(record: Activation) -> Callable[..., Tensor]:
    """The formula times ``up``; it takes ``keep``, for given random numbers, if the record's formula does."""
    reference = record.reference
    if record.layout.draws and record.by_formula:
        return lambda gate, up, *rest, keep=None: reference(gate, *rest, keep=keep) * up
    return lambda gate, up, *rest: reference(gate, *rest) * up


def _text(record: Activation) -> str:
    """The text of the kernel file."""
    signature, act = record.source.signature, f"{record.name}_"
    operands = typed_operands(signature)
    declared = ", ".join(["T gate", "T up", *(f"{kind} {name}" for kind, name in operands)])
    given = ", ".join(["gate", *(name for _, name in operands)])
    prepare = prepare_through(record.name, record.source.text, [each for each in operands if each[0] == CHANNEL])
    slopes = len(signature.differentiable)  # the first is that of x
    by_gate, *by_others = [f"slopes.of[{k}]" for k in range(slopes)] if slopes > 1 else ["slopes"]
    gradients = [f"from_gate({by_gate}, dy, up)", f"dy * rounded({act}::forward({given}))"]
    gradients += [f"from_gate({slope}, dy, up)" for slope in by_others]
    return f"""#include "gated.cuh"
{prepare}
ELEMENTWISE T forward({declared}) {{ return rounded({act}::forward({given})) * up; }}

ELEMENTWISE Many<T, {len(gradients)}> backward(T dy, {declared}) {{
  const auto slopes = {act}::backward(into_gate(dy, up), {given});
  return {{{", ".join(gradients)}}};
}}
"""
