"""Operators for programs that were saved: by torch.export, with activations in them."""

from __future__ import annotations

from .. import registry, running

__all__ = ["load_operators"]


def load_operators(*activations: registry.Named, fast_math: bool = False) -> None:
    """Makes the operators of activations known to PyTorch, for a program that was saved and holds them.

    ``torch.export.load`` and what else reads a program finds ``jitact::gelu`` then; without, it says that
    ``torch.ops.jitact`` has no ``gelu``. Nothing is compiled before an operator is called. A definition has to be
    defined first, as it was where the program was saved. Without activations, the operators of all that there are.

    Args:
        activations: names, such as "gelu" or "gelu+bias"; classes, modules or functions.
        fast_math: those of programs whose activations were called so.

    Raises:
        KeyError, TypeError, ValueError: as :func:`jitact.get`.
    """
    if not isinstance(fast_math, bool):
        raise TypeError(f"load_operators: fast_math has to be True or False, not {fast_math!r}")
    for activation in activations or registry.names():
        named = isinstance(activation, str)
        record = registry.record_named(activation) if named else registry.record_of(registry.module_of(activation))
        running.traced(record.token, fast_math)
