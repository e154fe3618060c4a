"""Gated activations with any elementwise activation at the gate: ``jitact.gated("mish")``."""

from __future__ import annotations

from functools import cache

from .. import registry
from ..activations import TABLE
from ..kernels import KernelSource, Work
from ..kernels.loader.uses import prepare_through
from ..modules import GENERATED, ActivationModule
from ..records import GATED, OPTIONS, Activation, Gating
from .modules import make_gated_module

__all__ = ["gated"]

_TAKEN = {"x", "other", "gate", "up", "row_weight", "dim", "device", "dtype", *GATED, *OPTIONS}


@cache
def _own() -> dict[str, str]:
    """What the library has of its own, by the activation of the gate."""
    return {each.gating.of: each.name for each in TABLE if each.gating and each.gating.of}


def gated(activation: registry.Named) -> type[ActivationModule]:
    """The class of ``act(gate) * up`` for an elementwise activation: ``gated("mish")()(x)``, ``gated("mish")()(gate, up)``.

    A class like the library's own gated ones, whose functions are compiled at first use: it takes the numbers of the
    activation by keyword, and what ``jitact.get("swiglu")`` takes. ``gated("silu")`` is that very class. Weights that the
    activation learns are the module's own: ``gated("prelu")(weight=64)`` has one for each of 64 channels; functions take them
    by keyword.

    Args:
        activation: anything that :func:`jitact.get` takes. Of a module, it is the class alone: settings are the constructor's.

    Raises:
        KeyError, TypeError: as :func:`jitact.get`.
        ValueError: it takes several tensors of elements, draws random numbers, or has an argument that gated ones have.
    """
    is_ours = isinstance(activation, ActivationModule)
    record = registry.record_of(activation) if is_ours else registry.class_of(activation).activation
    own = None if record.fingerprint else _own().get(record.name)
    if own is not None:
        return registry.REGISTRY[own]
    made = getattr(record.made, "gated", None)
    if made is not None:
        return made
    signature = record.source.signature
    more = [*signature.of("element")[1:], *signature.of("row"), *(f"random {name}" for name in signature.of("random"))]
    if more:
        raise ValueError(f"gated() takes an activation of one tensor of elements; {record.name} takes more: {', '.join(more)}")
    own_names = [name for name in (*record.channels, *(name for name, _ in record.params)) if name in _TAKEN]
    if own_names:
        raise ValueError(f"gated(): {record.name} has an argument {own_names[0]!r}, which gated activations have themselves")
    with registry.lock:
        made = getattr(record.made, "gated", None)
        if made is None:
            made = record.made.gated = make_gated_module(_make(record))
    return made


def _make(record: Activation) -> Activation:
    name, source = f"{GENERATED}{record.name}", record.source
    work = Work(*(min(each + 1, 4) for each in source.work))
    kernel = KernelSource(name, _text(record), f"<{name}>", work=work, given=() if source.is_librarys else (source,))
    reference, exact = record.reference, record.exact
    return Activation(
        name,
        f"Gated{record.title}",
        f"{record.name}(gate) up, where {record.name}(x) is {record.formula}",
        lambda gate, up, *rest: reference(gate, *rest) * up,
        params=record.params,
        exact=exact and (lambda gate, up, *rest: exact(gate, *rest) * up),
        requires=tuple(requirement for requirement in record.requires if requirement.save is None),
        kernel=kernel,
        has_reference=record.has_reference,
        fingerprint=record.fingerprint,
        channels=record.channels,
        dtypes=record.dtypes,
        gating=Gating(),
    )


def _text(record: Activation) -> str:
    """The kernel file."""
    signature, act = record.source.signature, f"{record.name}_"
    channels, numbers = signature.of("channel"), [f"{name}_" for name in signature.of("number")]
    operands = [*(f"Channel<T> {name}" for name in channels), *(f"Number<T> {name}" for name in numbers)]
    declared = ", ".join(["T gate", "T up", *operands])
    given = ", ".join(["gate", *channels, *numbers])
    prepare = prepare_through(record.name, record.source.text, [("Channel<T>", name) for name in channels])
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
