"""The registry of activations: lookup by name, alias, class, module or function; suggestions; registration."""

from __future__ import annotations

if __name__ == "__main__":  # at the top, so that nothing is registered twice: the package has already imported this module
    from jitact.exporting.onefile import main

    raise SystemExit(main())

import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

from torch import Tensor, nn

from .activations import TABLE
from .fusing.around import named
from .gating.around import named as gated_named
from .gating.modules import make_gated_module
from .kernels.loader.lock import ThreadLock
from .modules import (
    GENERATED,
    ActivationModule,
    generate,
    make_attribute,
    make_module,
    normalise,
    remove_attributes,
    users_rows,
    variant,
)
from .records import Activation
from .records.arguments import what_it_is

if TYPE_CHECKING:
    from .rows.modules import RowModule

__all__ = [
    "REGISTRY",
    "Named",
    "attribute",
    "class_of",
    "function",
    "get",
    "given",
    "module_of",
    "names",
    "of_defaults",
    "of_rows",
    "put_back",
    "record_named",
    "record_of",
    "register",
    "resolve",
    "tables",
    "undone_on_error",
    "unregister",
]

Named = str | type[nn.Module] | nn.Module | Callable[..., Tensor]
"""Anything that identifies an activation: a name, class, module or function, of jitact or PyTorch."""
OfRows = Literal["softmax", "log_softmax", "softmin", "Softmax", "LogSoftmax", "Softmin", "Softmax2d"]
"""Names of the operations on rows, which are not elementwise: softmax and its relatives."""
ACCEPTED = "a name such as 'gelu', or a class, module or function, jitact's or PyTorch's"

_modules: dict[str, type[ActivationModule]] = {}
_functions: dict[str, Callable[..., Tensor]] = {}
_aliases: dict[str, str] = {}  # normalised spelling -> canonical name
lock = ThreadLock()
"""Held while the registry changes, and from a lookup to the registration that depends on it. Readers copy instead."""

NOTHING_TO_COMPILE = ("linear", "identity")


class _Registry(Mapping[str, type[ActivationModule]]):
    """A read-only view of ``_modules``, without presets."""

    def __getitem__(self, name: str) -> type[ActivationModule]:
        if name in self:
            return _modules[name]
        known = _known(name)
        if known:
            raise UnknownActivation(f"REGISTRY has canonical names, {known!r} for {name!r}; get() takes every name")
        raise _unknown(name)

    def __contains__(self, name: object) -> bool:
        return name in _modules

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, _ in self.items()])

    def __len__(self) -> int:
        return len(self.items())

    def items(self) -> list[tuple[str, type[ActivationModule]]]:
        """A snapshot, as other threads may register more; without presets such as mul_and_silu."""
        return [(name, cls) for name, cls in list(_modules.items()) if not _is_preset(cls.activation)]

    def values(self) -> list[type[ActivationModule]]:
        """A snapshot of the classes."""
        return [cls for _, cls in self.items()]

    def __repr__(self) -> str:
        return repr(dict(self.items()))


def _is_preset(record: Activation) -> bool:
    return record.gating is not None and record.gating.preset_of != ""


REGISTRY: Mapping[str, type[ActivationModule]] = _Registry()
"""The ``ModelNew`` class of each activation by canonical name. Read-only; :func:`register` adds to it."""

_LIBRARYS_ROWS = frozenset(map(normalise, get_args(OfRows)))


def names() -> list[str]:
    """Canonical names of all registered activations, sorted."""
    return sorted(REGISTRY)


class UnknownActivation(KeyError):
    """Unknown activation. Its text is the message; KeyError's is the repr of that."""

    def __str__(self) -> str:
        return self.args[0]


def resolve(name: str) -> str:
    """The canonical name for ``name``, which may be an alias or spelled differently.

    Raises:
        KeyError: unknown; the message suggests similar names and lists the known ones.
    """
    known = _known(name)
    if known is None:
        raise _unknown(name)
    return known


def resolve_any(name: str) -> str:
    """:func:`resolve`, including operations on rows.

    Raises:
        KeyError: unknown.
    """
    found = of_rows(name)
    return resolve(name) if found is None else found.activation.name


def _known(name: object) -> str | None:
    """The canonical name for any spelling of a known name, else None."""
    if not isinstance(name, str):
        return None
    return _aliases.get(normalise(name))


def _unknown(name: object) -> UnknownActivation:
    if isinstance(name, str) and normalise(name) in NOTHING_TO_COMPILE:
        return UnknownActivation(f"{name!r} is no activation to compile: it returns its input; use torch.nn.Identity")
    if of_rows(name):
        return UnknownActivation(f"{name!r} works on rows, not on elements: jitact.get({name!r}) is a module that does")
    plain, plus, _ = str(name).partition("+")
    if plus and _known(plain):
        what = f"{name!r}: names with + are for check, export and build"
        return UnknownActivation(f"{what}; use jitact.get({plain!r}), and give the rest as arguments of its class or function")
    last = str(name).rpartition(".")[2]  # of torch.nn.GELU
    rows = {normalise(row): row for row in reversed(get_args(OfRows))}  # reversed: softmax wins over Softmax
    known = rows | {key: cls.activation.name for key, cls in list(users_rows.items())} | _aliases
    near = difflib.get_close_matches(normalise(last), known, n=3)
    suggestion = f"did you mean {' or '.join(dict.fromkeys(repr(known[n]) for n in near))}? " if near else ""
    return UnknownActivation(f"no activation named {name!r}: {suggestion}known names are {', '.join(names())}")


@overload
def get(activation: OfRows) -> type[RowModule]: ...
@overload
def get(activation: Named) -> type[ActivationModule]: ...
def get(activation: Named) -> type[ActivationModule] | type[RowModule]:
    """The ``ModelNew`` class of an activation: a ``torch.nn.Module`` with the arguments of PyTorch's counterpart.

    Args:
        activation: any common name; or ``torch.nn.GELU``, ``torch.nn.functional.gelu``, ``jitact.gelu`` and the like; or a
            module, whose settings do not matter: pass them to the class. softmax, log_softmax and softmin give the classes of
            :mod:`jitact.rows`.

    Raises:
        KeyError: unknown; the message suggests similar names and lists the known ones.
        TypeError: neither a name nor a class, module or function.
    """
    return of_rows(activation) or class_of(activation)


def of_rows(activation: object) -> type[RowModule] | None:
    """:func:`get` for operations on rows; None for anything else."""
    if isinstance(activation, str):
        key = normalise(activation)
        if key in _aliases or key not in _LIBRARYS_ROWS:
            return users_rows.get(key)
    from .rows.modules import class_of_rows  # not at the top, to keep importing jitact fast

    return class_of_rows(activation)


def class_of(activation: Named) -> type[ActivationModule]:
    """:func:`get` without operations on rows."""
    if isinstance(activation, str):
        return _generated(activation) or REGISTRY[resolve(activation)]
    if isinstance(activation, nn.Module):
        return type(module_of(activation))
    if isinstance(activation, type):
        return _of_class(activation)
    own = vars(activation).get("ModelNew") if isinstance(activation, FunctionType) else None
    return own or _of_torch_function(activation)


def _generated(name: str) -> type[ActivationModule] | None:
    """The class that a name such as ``gated_mish`` asks for, unless an activation has that name."""
    asks = name.startswith(GENERATED) and _known(name) is None
    return generate(name.removeprefix(GENERATED)) if asks else None


def _of_class(cls: type) -> type[ActivationModule]:
    """jitact's class for a class of jitact or PyTorch."""
    from .replacing.counterparts import counterpart_class

    if issubclass(cls, ActivationModule) and hasattr(cls, "activation"):
        return cls
    if not issubclass(cls, nn.Module):
        raise TypeError(f"expected an activation, {ACCEPTED}; got {given(cls)}")
    ours = counterpart_class(cls)
    if ours is None:
        raise _no_counterpart(cls)
    return ours


def _of_torch_function(function: object) -> type[ActivationModule]:
    """jitact's class for a function of PyTorch."""
    from .replacing.counterparts import torch_functions

    if not callable(function):
        raise TypeError(f"expected an activation, {ACCEPTED}; got {given(function)}")
    try:
        name, _ = torch_functions()[function]
    except (KeyError, TypeError):  # TypeError: unhashable
        raise UnknownActivation(f"no activation for {given(function)}: expected {ACCEPTED}") from None
    return REGISTRY[name]


def _no_counterpart(cls: type[nn.Module]) -> UnknownActivation:
    from .replacing.counterparts import reason_to_leave

    reason = "it returns its input" if cls is nn.Identity else reason_to_leave(cls) or "it is none that jitact knows"
    return UnknownActivation(f"no activation for {cls.__module__}.{cls.__qualname__}: {reason}")


def given(value: object) -> str:
    """Describes a value that is not an activation, for error messages."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    if value is None or isinstance(value, Tensor):
        return what_it_is(value)
    return f"{value!r:.60}, of type {type(value).__name__}"


def module_of(activation: Named) -> ActivationModule:
    """A jitact module: the given one, one with the settings of a module of PyTorch, else one with defaults.

    Raises:
        KeyError, TypeError: as :func:`get`.
        ValueError: jitact's class does not accept the settings of a module of PyTorch.
    """
    if isinstance(activation, ActivationModule):
        return activation
    if not isinstance(activation, nn.Module):
        return of_defaults(class_of(activation))
    from .replacing.counterparts import counterpart, share_weights

    module = counterpart(activation)
    if module is None:
        raise _no_counterpart(type(activation))
    share_weights(module, activation)
    return module


def of_defaults(cls: type[ActivationModule], **options: Any) -> ActivationModule:
    """A module with defaults except for ``options``, and with one value for all channels."""
    own = cls.activation.own_arguments
    return cls(**{name: 1 for name in cls.activation.channels if own.get(name) is Parameter.empty}, **options)


def record_of(module: ActivationModule) -> Activation:
    """The record of the function that a module computes: gelu_tanh's for ``GELU(approximate="tanh")``."""
    return variant(module.activation, vars(module))


def record_named(name: str) -> Activation:
    """The record of an activation, alone or fused: ``gelu+bias+dropout``, ``swiglu+row_weight``.

    Raises:
        KeyError: unknown name.
        ValueError: what follows a ``+`` cannot be fused with the activation, or is there twice.
    """
    first, *parts = name.split("+")
    if twice := [part for part in parts if parts.count(part) > 1]:
        raise ValueError(f"{name!r}: {twice[0]!r} can be fused once")
    return fused(class_of(first).activation, parts)


def fused(record: Activation, parts: list[str]) -> Activation:
    """The record of an activation with what follows a ``+`` in :func:`record_named`.

    Raises:
        ValueError: that cannot be fused with it.
    """
    return (gated_named if record.gating else named)(record, parts)


def function(name: str) -> Callable[..., Tensor]:
    """The function of an activation: ``jitact.<name>``. What torch.compile traces must call it before, or use :func:`get`.

    Raises:
        KeyError: unknown name.
    """
    made = None if users_rows else _functions.get(name)  # almost every call
    if made is not None:
        return made
    found = of_rows(name)
    if found is not None:
        return found.function
    if gated := _generated(name):
        return gated.activation.function
    canonical = resolve(name)
    made = _functions.get(canonical)
    if made is None:
        with lock:  # another thread could define the name again in between
            made = _functions[canonical] = REGISTRY[canonical].activation.function
            made.ModelNew = REGISTRY[canonical]  # for get(), which accepts the function
    return made


def attribute(name: str) -> Callable[..., Tensor]:
    """:func:`function`, which becomes an attribute of the package if it is the library's own.

    Users' names are given again: what mock.patch, for one, puts back could then be an older one's function.
    """
    with lock:
        found = function(name)
        module = vars(found).get("ModelNew")
        if module is not None and not module.activation.fingerprint:
            make_attribute(name, found)
    return found


def register(record: Activation) -> type[ActivationModule]:
    """Adds an activation, or replaces the one of that name, and returns its ``ModelNew`` class."""
    module = make_gated_module(record) if record.gating else make_module(record)
    with lock:
        _modules[record.name] = module
        _functions.pop(record.name, None)  # made again on first access
        remove_attributes()
        for name in (record.name, record.title, *record.aliases):
            _aliases[normalise(name)] = record.name
    return module


@contextmanager
def undone_on_error() -> Iterator[None]:
    """A context whose definitions and removals are undone, and those of other threads meanwhile, if it raises an error."""
    with lock:
        before = tables()
    try:
        yield
    except BaseException:
        put_back(before)
        raise


def tables() -> tuple[dict[str, Any], ...]:
    """Copies of the tables of what is registered."""
    return dict(_modules), dict(_aliases), dict(users_rows)


def put_back(before: tuple[dict[str, Any], ...]) -> None:
    """Makes the tables those of an earlier :func:`tables`."""
    with lock:
        for name in [name for name in _functions if _modules.get(name) is not before[0].get(name)]:
            del _functions[name]
        remove_attributes()
        for table, items in zip((_modules, _aliases, users_rows), before, strict=True):
            if list(table.items()) != list(items.items()):
                table.clear()
                table.update(items)


def unregister(name: str) -> None:
    """Removes an activation from the registry. Existing modules of it keep working.

    Raises:
        KeyError: unknown name.
    """
    with lock:
        canonical = resolve(name)
        del _modules[canonical]
        _functions.pop(canonical, None)
        remove_attributes()
        for alias in [alias for alias, target in _aliases.items() if target == canonical]:
            del _aliases[alias]


for _activation in TABLE:
    register(_activation)
