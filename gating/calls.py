"""Calls of gated activations, on two tensors or on one that holds both."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from ..configs import alive, call_forward, configured, is_exporting, is_transformed
from ..records import Activation, by_token, layout
from ..records.arguments import check_tensor, is_sharded, stand_ins, what_it_is
from ..records.operands import fitted, rows_together
from ..records.tracing import as_constant
from ..running import run_fitted, run_with_operands, traced
from ..subclasses.jagged import by_values, is_jagged, of_values
from ..subclasses.sharded import by_shards
from .around import name_of, with_options
from .halves import by_name, check_options, halves_of
from .packed import ActivatePacked, activate_packed_at_once, packing

__all__ = ["run_gated", "run_packed"]


def run_gated(record: Activation, tensors: tuple, named: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Applies a gated activation.

    Args:
        record: of the activation.
        tensors: one tensor that holds both; or both, in the order that ``gate`` says; or one of them if the other is named.
        named: ``gate``, ``up`` and ``row_weight`` as given by name, or None; and the learned operands.
        options: ``dim``, ``layout``, ``gate``, ``rounding``, the numbers, ``save`` and ``fast_math``; and ``training``, if the
            activation has a training mode.

    Raises:
        TypeError: wrong tensors, or an option of a wrong type.
        ValueError: an option has an invalid value, or shapes do not match.
    """
    waiting = stand_ins(*tensors, *named.values())
    if waiting:
        given = {name: t for name, t in named.items() if t is not None}
        return handle_torch_function(record.function, waiting, *tensors, **(options | given))
    check_options(record, options)
    params = tuple([options[name] for name, _ in record.params])
    row_weight, save, fast_math = named.get("row_weight"), options["save"], options["fast_math"]
    weighted = row_weight is not None
    weights = {name: named[name] for name in record.channels} | ({"row_weight": row_weight} if weighted else {})
    given = _pair(record, tensors, named, options["gate"])
    unfused = options["rounding"] == "unfused"
    if weighted or unfused:
        record = getattr(record.made, _made(record.token, weighted, unfused))
    training = record.in_eval is None or options["training"]
    if given:
        return run_with_operands(record, given | weights, params, False, save, fast_math, training)
    return run_packed(record, tensors[0], params, weights, options, training)


def run_packed(
    record: Activation,
    x: Tensor,
    params: tuple,
    weights: dict[str, Any],
    options: dict[str, Any],
    training: bool,
    seed: Tensor | None = None,
) -> Tensor:
    """Applies a gated activation to one tensor that holds both.

    Args:
        record: of the activation, with the row weights and the rounding that the call has.
        x: the tensor.
        params: the numbers.
        weights: the operands that are not elementwise, by name.
        options: ``dim``, ``layout`` and ``gate``, which have been checked, ``save`` and ``fast_math``; others are not read.
        training: False if the activation is to compute as in evaluation.
        seed: of the random numbers, if any are drawn; None: a new one.

    Raises:
        TypeError: ``x`` is no tensor of a dtype that the activation takes.
        ValueError: ``x`` has no such dimension, or an odd number of elements there.
    """
    if is_jagged(x):
        options = options | {"dim": of_values(record, options["dim"], x)}
        call = partial(run_packed, record, params=params, options=options, training=training)
        return by_values(record, {"x": x, **weights}, lambda dense: call(dense.pop("x"), weights=dense))
    check_tensor(record, x)
    halves = halves_of(record, x, options["dim"], options["layout"], options["gate"])
    if (is_sharded(x) or (weights and any([is_sharded(each) for each in weights.values()]))) and not is_exporting():

        def of_shards(dense: dict[str, Any], seed: Tensor | None) -> Tensor:
            return run_packed(record, dense.pop("x"), params, dense, options, training, seed)

        draws = training and layout(record.token).draws
        given = {"x": x, **weights}
        kept = tuple([name for name, each in given.items() if is_sharded(each) and name not in record.unread])
        return by_shards(record, given, of_shards, draws=draws, packed=halves.dim, kept=kept)
    save, fast_math = options["save"], options["fast_math"]
    recording, compiling = torch.is_grad_enabled(), torch.compiler.is_compiling()
    if recording and not compiling:
        (x,) = alive((x,))
        weights = {name: alive((t,))[0] if isinstance(t, Tensor) else t for name, t in weights.items()} if weights else weights
    recorded = x.requires_grad or (weights and any([isinstance(t, Tensor) and t.requires_grad for t in weights.values()]))
    x = rows_together(x) if "row_weight" in weights else x
    params = record.check(params, False, save, fast_math)
    if record.spans is not None:
        record.check_span(params, x.dtype)
    others: list[Tensor] = []
    if weights:
        pair = dict(zip(layout(record.token).tensors[:2], halves.split(x), strict=True))
        first, _, *others = fitted(record, pair | weights)
        x = x.to(first.dtype)  # autocast or a wider weight may have changed it
    if not training:
        record, params = record.in_eval(*params)
    # If Inductor decomposes the operator, it fuses the two gradients itself.
    _, _, *dissolves = traced(record.token, fast_math).split(",") if compiling else ("", "")
    if dissolves or layout(record.token).draws or is_transformed() or is_exporting():
        return run_fitted(record, (*halves.split(x), *others), params, False, save, fast_math, seed)
    if recorded and recording:
        apply = ActivatePacked.apply if compiling else activate_packed_at_once
        return apply(x, packing(record, halves, fast_math), params, *others)
    return call_forward(configured(record, False, "input", fast_math), *halves.split(x), *others, *params)


@as_constant
def _made(token: str, weighted: bool, unfused: bool) -> str:
    """Makes the record outside of tracing, and returns the name of the attribute in which :func:`with_options` caches it."""
    with_options(by_token[token], weighted=weighted, unfused=unfused)
    return name_of(weighted, unfused)


def _pair(record: Activation, tensors: tuple, named: dict[str, Any], gate: str) -> dict[str, Tensor]:
    """The two tensors by name; empty if one tensor holds both.

    Raises:
        TypeError: no tensor, too many, or the same one twice.
    """
    given = {name: named[name] for name in ("gate", "up") if named.get(name) is not None} if named else {}
    if len(tensors) == 2 and not given:
        return by_name(gate, *tensors)
    if len(tensors) + len(given) == 2:
        missing = [name for name in ("gate", "up") if name not in given]
        return given | dict(zip(missing, tensors, strict=True))
    if len(tensors) == 1 and not given:
        return {}
    takes = f"{record.name} takes one tensor that holds gate and up, or two, or gate= and up=; got"
    what = [*(f"{what_it_is(t)}" for t in tensors), *(f"{name}={what_it_is(t)}" for name, t in given.items())]
    raise TypeError(f"{takes} {', '.join(what) or 'none'}")
