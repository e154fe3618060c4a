"""Activations of this library in place of PyTorch's, in models as they are: as modules and as function calls."""

from __future__ import annotations

import dis
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ContextDecorator
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import registry
from .activations import ActivationModule
from .definitions import Definition

__all__ = ["Left", "Patched", "Replaced", "Report", "patched", "replace", "restore"]

# transformers' own modules, by class name, so that it need not be imported; None has a reason in NOT_REPLACED.
TRANSFORMERS = {
    "AccurateGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "LaplaceActivation": "laplace",
    "MishActivation": "mish",
    "NewGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "QuickGELUActivation": "quick_gelu",
    "ReLUSquaredActivation": "relu2",
    "SiLUActivation": "silu",
    "SqrtSoftplusActivation": "sqrtsoftplus",
    "XIELUActivation": "xielu",
}
NOT_REPLACED = {
    "GLU": "works on pairs of elements",
    "LogSoftmax": "works on rows, not on elements",
    "Softmax": "works on rows, not on elements",
    "Softmax2d": "works on rows, not on elements",
    "Softmin": "works on rows, not on elements",
    "LinearActivation": "the identity: nothing to compute",
}


@dataclass(frozen=True)
class Replaced:
    """A module that :func:`replace` replaced, under all the names that it has in the model."""

    paths: tuple[str, ...]
    old: str
    new: str


@dataclass(frozen=True)
class Left:
    """What :func:`replace` left as it was, and why."""

    path: str
    what: str
    why: str


@dataclass(frozen=True)
class Report:
    """What :func:`replace` did to a model.

    Attributes:
        replaced: the modules that are jitact's now.
        left: the modules that look like activations and are not replaced.
        calls: the modules whose forward calls PyTorch's activation functions, which only :func:`patched` reaches.
    """

    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]
    calls: tuple[Left, ...]

    def __repr__(self) -> str:
        """What was done, modules alike on one line."""
        lines = [f"replaced {_count(len(self.replaced), 'activation')}, left {len(self.left)}"]
        lines += _table((each.paths[0], f"{each.old} -> {each.new}", _aliases(each)) for each in self.replaced)
        if self.left:
            lines += ["left as they were:", *_table((each.path, each.what, each.why) for each in self.left)]
        if self.calls:
            lines += ["calls of functions, for `with jitact.patched():`"]
            lines += _table((each.path, each.what, each.why) for each in self.calls)
        return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _aliases(replaced: Replaced) -> str:
    return f"also {', '.join(replaced.paths[1:])}" if len(replaced.paths) > 1 else ""


def _table(rows: Iterator[tuple[str, str, str]]) -> list[str]:
    """Lines of three columns, where paths that differ in numbers alone share a line: ``layers.*.act (12)``."""
    alike: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for path, what, why in rows:
        alike.setdefault((re.sub(r"\d+", "*", path), what, re.sub(r"\d+", "*", why)), []).append((path, why))
    shown = []
    for (_, what, _), group in alike.items():
        path, why = (_common(each) for each in zip(*group, strict=True))
        shown.append(((path or "(the model)") + f" ({len(group)})" * (len(group) > 1), what, why))
    widths = [max((len(row[i]) for row in shown), default=0) for i in (0, 1)]
    return [f"  {path:{widths[0]}}  {what:{widths[1]}}  {why}".rstrip() for path, what, why in shown]


def _common(texts: Iterable[str]) -> str:
    """What texts have in common that differ in numbers alone, with ``*`` for those."""
    parts = zip(*(re.split(r"(\d+)", text) for text in texts), strict=True)
    return "".join(each[0] if len(set(each)) == 1 else "*" for each in parts)


def replace(model: nn.Module) -> Report:
    """Replaces, in place, every activation module of ``model`` that jitact has a counterpart of.

    A replacement takes over the parameters, ``inplace``, the training mode and the hooks, and stands under the same names; a
    module that stands in several places is replaced by one. Modules of ``torch.nn`` and of transformers are known; those of
    their subclasses, whose forward may differ, are left. Results agree with PyTorch's within rounding.

    Calls of functions such as ``F.gelu`` in a forward cannot be replaced from outside: the report names those it finds, and
    :func:`patched` reaches them.

    Returns:
        What was replaced, what was left and why, and where functions are called. :func:`restore` undoes it.
    """
    places: dict[nn.Module, list[tuple[nn.Module, str, str]]] = {}  # parent, attribute, path
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, name, f"{path}.{name}".lstrip(".")))

    replaced, left = [], []
    if _reason_to_leave(model) is None and _counterpart(model):
        left.append(Left("", type(model).__name__, "is the whole model: nothing holds it; construct jitact's instead"))
    for module, where in places.items():
        paths = tuple(path for _, _, path in where)
        reason = _reason_to_leave(module)
        if reason is not None:
            left += [Left(paths[0], type(module).__name__, reason)] if reason else []
            continue
        try:
            new = _counterpart(module)
        except (TypeError, ValueError) as why:
            left.append(Left(paths[0], _describe(module), str(why)))
            continue
        if new is None:
            left.append(Left(paths[0], _describe(module), "jitact has no counterpart with these parameters"))
            continue
        _take_over(new, module)
        new._replaced = (module,)  # in a tuple, so that it does not count as a submodule
        for parent, name, _ in where:
            parent._modules[name] = new
        replaced.append(Replaced(paths, _describe(module), f"jitact {_describe(new)}"))
    return Report(tuple(replaced), tuple(left), tuple(_find_calls(model)))


def restore(model: nn.Module) -> int:
    """Puts back, in place, the modules that :func:`replace` replaced, and returns how many.

    They keep the training mode and the hooks that their replacements have by now.
    """
    restored = set()
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, ActivationModule) and hasattr(child, "_replaced"):
                (old,) = child._replaced
                _take_over(old, child)
                parent._modules[name] = old
                restored.add(child)
    return len(restored)


def _take_over(new: nn.Module, old: nn.Module) -> None:
    """Gives ``new`` the training mode, the parameters and the hooks of ``old``, which the handles to them can still remove."""
    vars(new).update({key: value for key, value in vars(old).items() if "_hooks" in key})
    vars(new)["_is_full_backward_hook"] = vars(old)["_is_full_backward_hook"]
    new.training = old.training
    for name in new._parameters.keys() & old._parameters:
        new._parameters[name] = old._parameters[name]
    for name in new._buffers.keys() & old._buffers:
        new._buffers[name] = old._buffers[name]


def _describe(module: nn.Module) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"


def _is_torch(cls: type) -> bool:
    return cls.__module__.startswith("torch.nn.modules.")


def _is_transformers(cls: type) -> bool:
    return cls.__module__ == "transformers.activations"


def _nn_modules() -> dict[type[nn.Module], str]:
    """The torch.nn classes that are an activation's counterpart, by class."""
    records = [cls.activation for cls in registry.REGISTRY.values() if not isinstance(cls.activation, Definition)]
    return {record.module: record.name for record in records if record.module is not None}


def _reason_to_leave(module: nn.Module) -> str | None:
    """None for an activation to replace, "" for what is none, else why it is left."""
    cls = type(module)
    if isinstance(module, ActivationModule):
        return ""
    if cls in _nn_modules() or (_is_transformers(cls) and cls.__name__ not in NOT_REPLACED):
        return "its forward was replaced on the module" if "forward" in vars(module) else None
    if (_is_torch(cls) or _is_transformers(cls)) and cls.__name__ in NOT_REPLACED:
        return NOT_REPLACED[cls.__name__]
    if isinstance(module, torch.jit.ScriptModule):
        known = {each.__name__ for each in _nn_modules()}
        return "is TorchScript" if getattr(module, "original_name", "") in known else ""
    for base in cls.__mro__[1:]:
        if base in _nn_modules() or (_is_transformers(base) and base.__name__ in TRANSFORMERS):
            return f"is a subclass of {base.__name__}, whose forward may differ"
    is_activation = cls.__module__ == "torch.nn.modules.activation" and cls is not nn.MultiheadAttention
    return "jitact has no counterpart" if is_activation else ""


def _counterpart(module: nn.Module) -> ActivationModule | None:
    """Ours for an activation module, with its parameters; None if there is none."""
    cls, kwargs = type(module), {}
    if cls.__name__ == "ClippedGELUActivation":
        name = "gelu_10" if (module.min, module.max) == (-10, 10) else ""
    elif _is_transformers(cls):
        name = TRANSFORMERS.get(cls.__name__, "")
    else:
        name = _nn_modules().get(cls, "")
        if name:
            signature = registry.get(name).activation.signature.parameters
            kwargs = {key: value for key, value in vars(module).items() if key in signature}
    return registry.get(name)(**kwargs) if name in registry.REGISTRY else None


# Function calls.

# Activations with functions of the same name in PyTorch, whose arguments are those of ours.
CALLED = (
    "relu", "leaky_relu", "relu6", "hardtanh", "hardsigmoid", "threshold", "hardshrink", "softshrink", "sigmoid", "tanh",
    "softsign", "elu", "celu", "selu", "softplus", "logsigmoid", "gelu", "silu", "mish", "hardswish", "tanhshrink", "prelu",
    "rrelu",
)  # fmt: skip


def _functions() -> dict[Callable, tuple[str, bool]]:
    """PyTorch's activation functions: the name of ours, and whether the function works in place."""
    found: dict[Callable, tuple[str, bool]] = {torch.special.expit: ("sigmoid", False), F.threshold: ("threshold", False)}
    for name in CALLED:
        for owner in (F, torch, Tensor, torch._C._nn):
            for suffix in ("", "_"):
                function = getattr(owner, name + suffix, None)
                if function is not None:
                    found[function] = (name, bool(suffix))
    return {function: ours for function, ours in found.items() if ours[0] in registry.REGISTRY}


@dataclass
class Patched(TorchFunctionMode, ContextDecorator):
    """What :func:`patched` returns: a context manager and decorator that counts what it does.

    Attributes:
        replaced: how many calls of each PyTorch function went to ours.
        left: how many did not, by function and reason.
    """

    replaced: Counter[str] = field(default_factory=Counter)
    left: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        """Looks up what there is to replace."""
        TorchFunctionMode.__init__(self)
        self._ours = _functions()

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs any PyTorch function: ours, if it is an activation that ours can stand for."""
        kwargs, ours = kwargs or {}, self._ours.get(function)
        if ours is None:
            return function(*args, **kwargs)
        name, inplace = ours
        x, *rest = args or (kwargs.get("input"),)
        options = {key: value for key, value in kwargs.items() if key != "input"} | ({"inplace": True} if inplace else {})
        try:
            if isinstance(x, Tensor) and x.device.type not in ("cpu", "cuda"):
                raise TypeError(f"{name}: expected a tensor on a CPU or a GPU, got one on {x.device.type}")
            y = registry.function(name)(x, *rest, **options)
        except (TypeError, ValueError) as why:  # raised before anything is computed
            self.left[name, str(why)] += 1
            return function(*args, **kwargs)
        self.replaced[name] += 1
        return y

    def __hash__(self) -> int:
        """By identity: PyTorch keeps modes in sets."""
        return id(self)

    def __repr__(self) -> str:
        """The counts."""
        done = ", ".join(f"{name} ({count})" for name, count in self.replaced.items()) or "nothing"
        left = [f"left {name} ({count}): {why}" for (name, why), count in self.left.items()]
        return "; ".join([f"replaced calls: {done}", *left])


def patched() -> Patched:
    """A context in which PyTorch's activation functions are jitact's: ``with jitact.patched(): model(x)``.

    Calls of ``F.gelu``, ``torch.relu``, ``x.sigmoid()`` and the like go to ours, also those inside ``torch.nn``'s modules,
    where the input is a dense float tensor on a CPU or a GPU and ours takes the arguments; all other calls go to PyTorch as
    before. Works as a decorator too. Modules stay what they are: nothing is to be undone.

    Only the thread that entered the context sees it, so threads do not disturb each other; work that PyTorch hands to
    others, such as the recomputation that ``torch.utils.checkpoint`` does in backward on a GPU, sees PyTorch's functions.
    Every call of PyTorch in the context costs a few microseconds more; what :func:`replace` does costs nothing.

    Returns:
        The context; as text, it tells what it replaced.
    """
    return Patched()


def _find_calls(model: nn.Module) -> Iterator[Left]:
    """Where modules call PyTorch's activation functions themselves, as far as their code shows it."""
    functions = _functions()
    for path, module in model.named_modules():
        if _reason_to_leave(module) != "" or type(module).__module__ == "torch.nn.modules.activation":
            continue
        for name, value in vars(module).items():
            function = getattr(value, "func", value)  # a functools.partial's
            if isinstance(function, Callable) and function in functions:
                yield Left(path, type(module).__name__, f"holds {functions[function][0]} as .{name}")
        for name in sorted(set(_called(type(module), functions))):
            yield Left(path, type(module).__name__, f"calls {name}")


def _called(cls: type, functions: dict[Callable, tuple[str, bool]]) -> Iterator[str]:
    """The activation functions in the code of a module's forward and of the methods that it calls."""
    seen, pending = set(), ["forward"]
    while pending:
        method = inspect.unwrap(getattr(cls, pending.pop(), None) or len)
        if not isinstance(method, FunctionType) or method in seen or method.__module__ == nn.Module.__module__:
            continue
        seen.add(method)
        own = method.__code__.co_varnames[:1]  # self
        at: Any = None  # what the instructions have loaded so far: an object, _SELF, _VALUE or None
        for instruction in dis.get_instructions(method):
            name = instruction.argval
            if instruction.opname.startswith("LOAD_GLOBAL"):
                at = method.__globals__.get(name)
            elif instruction.opname.startswith("LOAD_FAST"):
                at = _SELF if (name,) == own else _VALUE
            elif instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                at = _VALUE
            elif at is _SELF:
                pending.append(name)
            elif at is _VALUE:
                at = getattr(Tensor, name, None)
            else:
                at = getattr(at, name, None) if isinstance(at, ModuleType) else None
            if isinstance(at, Callable) and at in functions:
                yield functions[at][0]


_SELF, _VALUE = "self", "a value, perhaps a tensor"
