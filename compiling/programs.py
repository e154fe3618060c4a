"""Registers the operators that exported and saved programs contain."""

from __future__ import annotations

from .. import registry, running

__all__ = ["load_operators"]


def load_operators(*activations: registry.Named, fast_math: bool = False) -> None:
    """Registers the operators of activations with PyTorch, for a saved program that contains them.

    ``torch.export.load`` and other readers of programs then find ``jitact::gelu``; otherwise they fail because
    ``torch.ops.jitact`` has no ``gelu``. Nothing is compiled before an operator is called. A custom activation has to be
    defined first, as it was where the program was saved.

    Args:
        activations: names, such as "gelu" or "gelu+bias"; classes, modules or functions. All activations if none is given.
        fast_math: whether the program's activations were called with ``fast_math=True``.

    Raises:
        KeyError, TypeError, ValueError: as :func:`jitact.get`.
    """
    if not isinstance(fast_math, bool):
        raise TypeError(f"load_operators: fast_math has to be True or False, not {fast_math!r}")
    for activation in activations or registry.names():
        named = isinstance(activation, str)
        record = registry.record_named(activation) if named else registry.record_of(registry.module_of(activation))
        running.traced(record.token, fast_math)
