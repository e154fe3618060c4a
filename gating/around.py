"""Variants of gated activations, made on demand: multiplied by row weights, or with the roundings of eager mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from ..kernels.loader.signature import TYPES, Signature
from ..kernels.loader.uses import prepare_through
from ..records import Activation

__all__ = ["CHANNEL", "UNFUSED", "WEIGHT", "leading_to", "name_of", "named", "typed_operands", "with_options"]

WEIGHT, UNFUSED = "row_weight", "unfused"
CHANNEL = "Channel<T>"


def typed_operands(signature: Signature) -> list[tuple[str, str]]:
    """Type and name of the operands that are not elementwise. The names end in ``_``, so that they hide no function."""
    return [(TYPES[each.role], f"{each.name}_") for each in signature.operands if each.role != "element"]


def with_options(record: Activation, *, weighted: bool = False, unfused: bool = False) -> Activation:
    """The record with row weights or eager mode's roundings; cached in the activation's record."""
    if not weighted and not unfused:
        return record
    name = name_of(weighted, unfused)
    made = getattr(record.made, name, None)
    if made is None:
        made = record
        for chosen, make in ((unfused, _unfused), (weighted, _weighted)):
            made = make(made) if chosen else made
        if record.in_eval is not None:
            outside, _ = record.in_eval(*(default for _, default in record.params))
            made = replace(made, in_eval=leading_to(with_options(outside, weighted=weighted, unfused=unfused), record))
        setattr(record.made, name, made)
    return made


def leading_to(outside: Activation, record: Activation) -> Callable[..., tuple[Activation, tuple]]:
    """The ``in_eval`` of a variant of ``record``; ``outside`` is the same variant of what ``record`` is in eval mode."""
    return lambda *params: (outside, record.in_eval(*params)[1])


def name_of(weighted: bool, unfused: bool) -> str:
    """The attribute in which :func:`with_options` caches a record."""
    return f"gated_{weighted:d}{unfused:d}"


def named(record: Activation, parts: list[str]) -> Activation:
    """The record that ``swiglu+row_weight`` names, given swiglu's and what follows a ``+``.

    Raises:
        ValueError: there is no such variant.
    """
    unknown = [part for part in parts if part not in (WEIGHT, UNFUSED)]
    if unknown:
        raise ValueError(f"{record.name}: {unknown[0]!r} cannot be fused with a gated activation; {WEIGHT}, {UNFUSED} can")
    return with_options(record, weighted=WEIGHT in parts, unfused=UNFUSED in parts)


def _unfused(record: Activation) -> Activation:
    name = f"{record.name}+{UNFUSED}"
    kernel = record.source._replace(name=f"{record.source.name}_{UNFUSED}", label=record.label_of(name), unfused=True)
    return replace(record, name=name, exact=None, aliases=(), module=None, kernel=kernel)


def _weighted(record: Activation) -> Activation:
    source = record.source
    kernel = source._replace(
        name=f"{source.name}_{WEIGHT}",
        text=_weighted_text(record),
        path=f"<{record.name}+{WEIGHT}>",
        given=() if source.is_librarys else (source,),
        label=record.label_of(f"{record.name}+{WEIGHT}"),
    )

    def weighted(form: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if record.layout.draws and record.by_formula:
            return lambda a, b, weight, *rest, keep=None: (form(a, b, *rest, keep=keep) * weight).to(a.dtype)
        return lambda a, b, weight, *rest: (form(a, b, *rest) * weight).to(a.dtype)

    return replace(
        record,
        name=f"{record.name}+{WEIGHT}",
        reference=weighted(record.reference),
        exact=weighted(record.exact) if record.exact else None,
        aliases=(),
        module=None,
        kernel=kernel,
    )


def _weighted_text(record: Activation) -> str:
    """The kernel file of an activation multiplied by the weight of its row."""
    signature, name = record.source.signature, record.source.name
    elements, operands = signature.of("element"), typed_operands(signature)
    declared = ", ".join([*(f"T {e}" for e in elements), f"Row<T> {WEIGHT}", *(f"{kind} {each}" for kind, each in operands)])
    given = ", ".join([*elements, *(each for _, each in operands)])
    prepare = prepare_through(name, record.source.text, [each for each in operands if each[0] == CHANNEL])
    others = range(2, len(signature.differentiable))
    count, unfused = 3 + len(others), "".join(f", by.of[{k}]" for k in others)
    once = "".join(f", by.of[{k}] * {WEIGHT}" for k in others)
    return f"""#include "gated.cuh"
{prepare}
ELEMENTWISE T forward({declared}) {{ return rounded({name}_::forward({given})) * {WEIGHT}; }}

#ifdef JITACT_UNFUSED
ELEMENTWISE Many<T, {count}> backward(T dy, {declared}) {{
  const auto by = {name}_::backward(rounded(dy * {WEIGHT}), {given});
  return {{by.of[0], by.of[1], dy * rounded({name}_::forward({given})){unfused}}};
}}
#else
ELEMENTWISE Many<T, {count}> backward(T dy, {declared}) {{
  const auto by = {name}_::backward(dy, {given});
  return {{by.of[0] * {WEIGHT}, by.of[1] * {WEIGHT}, dy * {name}_::forward({given}){once}}};
}}
#endif
"""
