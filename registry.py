"""From names to activations: the mapping, lookup with aliases and suggestions, registration."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from functools import cache

from torch import Tensor, nn

from .activations import TABLE, Activation, make_function, make_module

__all__ = ["REGISTRY", "function", "get", "names", "register", "resolve", "unregister"]

_modules: dict[str, type[nn.Module]] = {}
_functions: dict[str, Callable[..., Tensor]] = {}
_aliases: dict[str, str] = {}  # normalised spelling -> canonical name


class _Registry(Mapping[str, type[nn.Module]]):
    """Reads ``_modules``, completed where a name is not found or all are wanted."""

    def __getitem__(self, name: str) -> type[nn.Module]:
        if name not in _modules:
            _complete()
        return _modules[name]

    def __iter__(self) -> Iterator[str]:
        _complete()
        return iter(_modules)

    def __len__(self) -> int:
        _complete()
        return len(_modules)

    def __repr__(self) -> str:
        return repr(dict(self))


REGISTRY: Mapping[str, type[nn.Module]] = _Registry()
"""Every activation's ``ModelNew`` class by its canonical name. Read-only; :func:`register` adds to it."""


@cache
def _complete() -> None:
    """Registers the activations that take more than a line of the table, which few programs ask for."""
    from .learned import LEARNED

    for activation, module, function in LEARNED:
        if activation.name not in _modules:  # replaced before it was asked for
            register(activation, module, function)


def _normalise(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def names() -> list[str]:
    """Canonical names of all registered activations, sorted."""
    return sorted(REGISTRY)


def resolve(name: str) -> str:
    """The canonical name for ``name``, an alias or another spelling of it.

    Raises:
        KeyError: unknown; the message suggests near names and lists the known ones.
    """
    spelling = _normalise(name) if isinstance(name, str) else ""
    if spelling in ("linear", "identity"):
        raise UnknownActivation(f"{name!r} is no activation to compile: it returns its input; use torch.nn.Identity")
    if spelling not in _aliases:
        _complete()
    canonical = _aliases.get(spelling)
    if canonical is None:
        near = difflib.get_close_matches(_normalise(str(name)), _aliases, n=3)
        suggestion = f"did you mean {' or '.join(dict.fromkeys(repr(_aliases[n]) for n in near))}? " if near else ""
        raise UnknownActivation(f"no activation named {name!r}: {suggestion}known names are {', '.join(names())}")
    return canonical


class UnknownActivation(KeyError):
    """A name that the registry does not hold. Prints its message as it is, where KeyError would print its repr."""

    def __str__(self) -> str:
        return self.args[0]


def get(name: str) -> type[nn.Module]:
    """The ``ModelNew`` class of an activation: a ``torch.nn.Module`` that takes what PyTorch's counterpart takes.

    Raises:
        KeyError: unknown name; the message suggests near names and lists the known ones.
    """
    return REGISTRY[resolve(name)]


def function(name: str) -> Callable[..., Tensor]:
    """The function of an activation, as ``jitact.<name>`` gives it.

    Raises:
        KeyError: unknown name.
    """
    canonical = resolve(name)
    if canonical not in _functions:
        _functions[canonical] = make_function(REGISTRY[canonical].activation)
    return _functions[canonical]


def register(
    activation: Activation, module: type[nn.Module] | None = None, function: Callable[..., Tensor] | None = None
) -> type[nn.Module]:
    """Adds an activation, or replaces the one of that name, and returns its ``ModelNew`` class.

    Args:
        activation: the record.
        module: its class, where that is not simply made from the record.
        function: its function, likewise.
    """
    _modules[activation.name] = module or make_module(activation)
    _functions.pop(activation.name, None)  # made when it is asked for
    if function:
        _functions[activation.name] = function
    for name in (activation.name, activation.title, *activation.aliases):
        _aliases[_normalise(name)] = activation.name
    return _modules[activation.name]


def unregister(name: str) -> None:
    """Takes an activation out of the registry again. Modules made of it keep working.

    Raises:
        KeyError: unknown name.
    """
    canonical = resolve(name)
    del _modules[canonical]
    _functions.pop(canonical, None)
    for alias in [alias for alias, target in _aliases.items() if target == canonical]:
        del _aliases[alias]


for _activation in TABLE:
    register(_activation)


if __name__ == "__main__":
    from jitact.onefile import main

    raise SystemExit(main())
