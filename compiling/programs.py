"""Registers the operators that exported and saved programs contain."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch import nn

from .. import registry, running
from ..fusing import around
from ..gating.around import UNFUSED, WEIGHT
from ..records import Activation

__all__ = ["load_operators"]


def load_operators(*activations: registry.Named, fast_math: bool = False) -> None:
    """Registers the operators of activations with PyTorch, for a saved program that contains them.

    ``torch.export.load`` and other readers of programs then find ``jitact::gelu``; otherwise they fail because
    ``torch.ops.jitact`` has no ``gelu``. Nothing is compiled before an operator is called. A custom activation has to be
    defined first, as it was where the program was saved. softmax and its kin have no operators: programs have PyTorch's.

    Args:
        activations: names, such as "gelu", "gelu+bias" or "gated_mish"; classes, modules or functions. Those without a "+"
            stand for all that can be fused with them too, a module for the settings it has. All activations if none is given.
        fast_math: whether the program's activations were called with ``fast_math=True``; a module may have it itself.

    Raises:
        KeyError, TypeError, ValueError: as :func:`jitact.get`.
    """
    if not isinstance(fast_math, bool):
        raise TypeError(f"load_operators: fast_math has to be True or False, not {fast_math!r}")
    for activation in activations or registry.names():
        if isinstance(activation, str) and "+" in activation:
            found = [registry.record_named(activation)]
        elif registry.of_rows(activation):
            continue
        else:
            found = _forms(registry.record_of(registry.module_of(activation)))
        own = isinstance(activation, nn.Module) and getattr(activation, "fast_math", False)
        for record in found:
            running.traced(record.token, fast_math or own)


def _forms(record: Activation) -> Iterator[Activation]:
    """An activation alone, and with all that can be fused with it; in training and in eval mode."""
    parts = (WEIGHT, UNFUSED) if record.gating else tuple(name for name in around.NAMES if name in record.beside)
    for count in range(len(parts) + 1):
        for chosen in itertools.combinations(parts, count):
            yield registry.fused(record, list(chosen))
    if record.in_eval is not None:
        yield from _forms(record.in_eval(*(default for _, default in record.params))[0])
