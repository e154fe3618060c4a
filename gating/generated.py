"""Gated activations with any elementwise activation at the gate: ``jitact.gated("mish")``."""

from __future__ import annotations

from functools import cache

from .. import registry
from ..activations import TABLE
from ..kernels import KernelSource, Work
from ..modules import GENERATED, ActivationModule
from ..records import Activation, Gating, is_plain
from .modules import make_gated_module

__all__ = ["gated"]



@cache
def _own() -> dict[str, str]:
    """What the library has of its own, by the activation of the gate."""
    return {each.gating.of: each.name for each in TABLE if each.gating and each.gating.of}


def gated(activation: registry.Named) -> type[ActivationModule]:
    """The class of ``act(gate) * up`` for an elementwise activation: ``gated("mish")()(x)``, ``gated("mish")()(gate, up)``.

    A class like the library's own gated ones, whose functions are compiled at first use: it takes the numbers of the
    activation by keyword, and what ``jitact.get("swiglu")`` takes. ``gated("silu")`` is that very class.

    Args:
        activation: anything that :func:`jitact.get` takes. Of a module, it is the class alone: settings are the constructor's.

    Raises:
        KeyError, TypeError: as :func:`jitact.get`.
        ValueError: it takes more than one tensor and numbers.
    """
    cls = registry.class_of(activation)
    record = registry.record_of(activation) if isinstance(activation, ActivationModule) else cls.activation
    own = _own().get(record.name)
    if own is not None and not record.fingerprint:
        return registry.class_of(own)
    if not is_plain(record.token):
        more = [*record.layout.tensors[1:], *record.source.signature.of("random")]
        raise ValueError(f"gated() takes an activation of one tensor and numbers; {record.name} takes more: {', '.join(more)}")
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
        lambda gate, up, *params: reference(gate, *params) * up,
        params=record.params,
        exact=exact and (lambda gate, up, *params: exact(gate, *params) * up),
        requires=tuple(requirement for requirement in record.requires if requirement.save is None),
        kernel=kernel,
        has_reference=record.has_reference,
        fingerprint=record.fingerprint,
        gating=Gating(),
    )


def _text(record: Activation) -> str:
    """The kernel file."""
    numbers = [f"{name}_" for name in record.source.signature.of("number")]
    declared = ", ".join(["T gate", "T up", *(f"Number<T> {name}" for name in numbers)])
    given = ", ".join(["gate", *numbers])
    act = f"{record.name}_"
    return f"""#include "gated.cuh"

ELEMENTWISE T forward({declared}) {{ return rounded({act}::forward({given})) * up; }}

ELEMENTWISE Many<T, 2> backward(T dy, {declared}) {{
  return {{from_gate({act}::backward(into_gate(dy, up), {given}), dy, up), dy * rounded({act}::forward({given}))}};
}}
"""
