"""The module class, the reference module in PyTorch, and the function of a gated activation."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

from ..modules import (
    ActivationModule,
    Makers,
    make_module,
    make_weights,
    named_as,
    remove_placeholders,
    reset_weights,
    with_types,
)
from ..records import Activation
from ..records.arguments import GATED, OPTIONS, Arguments, as_number, is_stand_in, signature_of
from ..records.operands import fitted
from ..running import run_with_operands
from .calls import run_gated, run_packed
from .halves import by_name, check_options, halves_of

__all__ = ["GatedModule", "make_gated_module"]


class GatedModule(ActivationModule):
    """Base of the classes of gated activations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes ``dim``; by keyword the parameters, ``layout``, ``gate``, ``rounding``, ``save`` and ``fast_math``."""
        super().__init__(*args, **kwargs)
        options = self._options()
        check_options(self.activation, options)
        self.dim = options["dim"]

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.activation.options_of_calls}

    @with_types
    def forward(
        self,
        x: Tensor | None = None,
        other: Tensor | None = None,
        *,
        gate: Tensor | None = None,
        up: Tensor | None = None,
        row_weight: Tensor | None = None,
    ) -> Tensor:
        """Applies the activation.

        Args:
            x: one tensor that holds both operands; or the first of two, in the order of the option ``gate``.
            other: the second of two.
            gate: the gate, by name.
            up: the other operand, by name.
            row_weight: a weight for each row of the result, of shape ``x.shape[:-1]``.
        """
        record = self.activation
        if other is gate is up is row_weight is None and isinstance(x, Tensor) and not torch.compiler.is_compiling():
            own = self.__dict__
            is_plain = not record.channels and record.in_eval is None
            # A subclass may have an option elsewhere.
            if is_plain and record.options_of_calls.keys() <= own.keys() and own["rounding"] == "once":  # as run_gated would
                check_options(record, own)
                return run_packed(record, x, tuple([own[name] for name, _ in record.params]), {}, own, True)
        if gate is not None and other is not None and is_stand_in(gate):  # torch.fx traces this module as the root
            remove_placeholders(gate, up)
            gate = up = None
        tensors = tuple([t for t in (x, other) if t is not None])
        named = {} if gate is up is row_weight is None else {"gate": gate, "up": up, "row_weight": row_weight}
        if record.channels:
            named |= {name: getattr(self, name) for name in record.channels}
        return run_gated(record, tensors, named, self._options())

    def extra_repr(self) -> str:
        """Parameters, and options that differ from their defaults."""
        record = self.activation
        sizes = [name for name, channel in record.channels.items() if not channel.one]
        shown = [f"{name}={getattr(self, name).numel()}" for name in sizes]
        shown += [f"{name}={getattr(self, name)}" for name, _ in record.params]
        defaults = record.signature.parameters
        chosen = [name for name in ("dim", *GATED, *OPTIONS) if getattr(self, name) != defaults[name].default]
        return ", ".join([*shown, *(f"{name}={getattr(self, name)!r}" for name in chosen)])

    @classmethod
    def _widths(cls, dim: int) -> list[int]:
        return [2 * dim]  # one tensor that holds both


def make_gated_module(record: Activation) -> type[ActivationModule]:
    """The ``ModelNew`` class of a gated activation."""
    _ = record.options_of_calls  # cached now: torch.compile cannot while it traces a constructor
    return make_module(record, Makers(GatedModule, _make_reference, _make_function))


def _make_reference(record: Activation) -> type[nn.Module]:
    """The reference module in PyTorch, which takes one tensor or two."""

    class Model(nn.Module):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            self.options = record.of_constructor.bind(args, kwargs)
            self.params = [as_number(record, name, self.options[name]) for name, _ in record.params]
            make_weights(self, record, self.options, {name: self.options.get(name) for name in ("device", "dtype")})

        def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
            names = record.layout.tensors
            layout = (self.options[name] for name in ("dim", "layout", "gate"))
            if other is None:
                pair = halves_of(record, x, *layout).split(x)
            else:
                given = by_name(self.options["gate"], x, other)
                pair = [given[name] for name in names[:2]]
            if record.channels:
                pair = fitted(record, dict(zip(names, pair, strict=False)) | {name: getattr(self, name) for name in names[2:]})
            chosen, params = record, self.params
            if record.in_eval and not self.training:
                chosen, params = record.in_eval(*params)
            return chosen.reference(*pair, *params)

    if record.channels:
        Model.reset_parameters = lambda self: reset_weights(self, record)

    Model.__module__, Model.__qualname__ = ActivationModule.__module__, f"{record.title}.Model"  # pickles look it up here
    return Model


def _make_function(record: Activation) -> Callable[..., Tensor]:
    """The function of a gated activation: ``f(x, dim=-1)``, ``f(first, second)``, ``f(gate=, up=)``."""
    usual = record.options_of_calls
    order, defaults = usual["gate"], {name: default for name, default in usual.items() if name != "gate"}
    learned = {name: Parameter.empty if name in record.learned else each.init for name, each in record.channels.items()}
    keywords = {"gate": order, "up": None, "row_weight": None} | learned | defaults
    arguments = Arguments(record.name, signature_of({"x": None, "other": None}, keywords))
    numbers, is_plain = tuple([default for _, default in record.params]), not learned and record.in_eval is None

    def function(*args: Any, **kwargs: Any) -> Tensor:
        if is_plain and not kwargs and len(args) in (1, 2) and all([isinstance(each, Tensor) for each in args]):
            if len(args) == 1:  # as run_gated would
                return run_packed(record, args[0], numbers, {}, usual, True)
            return run_with_operands(record, by_name(order, *args), numbers, False, None, False, True)
        options = arguments.bind(args, kwargs)
        tensors = [t for t in (options.pop("x"), options.pop("other")) if t is not None]
        if record.module is not None and len(tensors) == 2 and type(tensors[1]) is int:  # F.glu(x, dim)
            options["dim"] = tensors.pop()
        named = {name: options.pop(name) for name in ("up", "row_weight", *learned)} | {"gate": None}
        if isinstance(options["gate"], Tensor) or is_stand_in(options["gate"]):
            named["gate"], options["gate"] = options["gate"], order
        return run_gated(record, tuple(tensors), named, options)

    function.__signature__ = arguments.signature
    return named_as(function, record)
