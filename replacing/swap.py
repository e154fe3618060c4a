"""Replaces PyTorch's activations by jitact's in existing models: modules, and calls of functions."""

from __future__ import annotations

import inspect
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ContextDecorator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import registry
from ..modules import ActivationModule
from ..records.arguments import is_stand_in, what_it_is
from ..rows import modules as rows
from ..rows.autograd import OWN_CALL
from ..rows.modules import RowModule
from .calls import calls, is_hashable
from .counterparts import (
    counterpart,
    counterpart_class,
    is_activation,
    reason_to_leave,
    share_weights,
    torch_classes,
    torch_functions,
)
from .dropouts import dropping_of
from .experts import METHOD, GateMethod, gate_method_of
from .functions import GatedForward, forward_of
from .gates import Gate, gate_of
from .pending import Waiting

__all__ = ["Left", "Patched", "Replaced", "Report", "patched", "replace", "restore"]

# PyTorch's modules that return quantized tensors. Dynamically quantized ones return floats: they are in another package, except
# for their packed parameters.
QUANTIZED = re.compile(r"torch\.ao\.nn\.(intrinsic\.)?quantized\.modules\.(?!.*PackedParams)")


@dataclass(frozen=True)
class Replaced:
    """A module that :func:`replace` replaced, with all its paths in the model."""

    paths: tuple[str, ...]
    old: str
    new: str


@dataclass(frozen=True)
class Left:
    """A module that :func:`replace` did not replace, and why."""

    path: str
    what: str
    why: str


@dataclass(frozen=True)
class Report:
    """What :func:`replace` did to a model.

    Attributes:
        replaced: the modules that were replaced.
        left: modules that look like activations and were not replaced.
        calls: modules that call PyTorch's activation functions, or hold one; only :func:`patched` replaces these calls.
        unfused: replaced modules whose result is multiplied, but not in the same kernel; where the source shows the product as
            ``a * b`` of the result itself.
        undropped: replaced modules whose result goes into a dropout, but not in the same kernel, although that was asked for;
            likewise where the source shows it.
    """

    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]
    calls: tuple[Left, ...]
    unfused: tuple[Left, ...] = ()
    undropped: tuple[Left, ...] = ()

    def __repr__(self) -> str:
        """The report as text, with similar modules on one line."""
        lines = [f"replaced {_count(len(self.replaced), 'activation')}, left {len(self.left)}"]
        lines += _table((each.paths[0], f"{each.old} -> {each.new}", _aliases(each)) for each in self.replaced)
        for what, apart in (("product", self.unfused), ("dropout", self.undropped)):
            if apart:
                lines += [f"not fused with the {what}:", *_table((each.path, each.what, each.why) for each in apart)]
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
    """Lines of three columns. Paths that differ only in numbers share a line: ``layers.*.act (12)``."""
    alike: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for path, what, why in rows:
        alike.setdefault((re.sub(r"\d+", "*", path), what, re.sub(r"\d+", "*", why)), []).append((path, why))
    shown = []
    for (_, what, _), group in alike.items():
        path, why = (_common(each) for each in zip(*group, strict=True))
        number = f" ({len(group)})" if len(group) > 1 else ""
        shown.append(((path or "(the model)") + number, what, why))
    widths = [max((len(row[i]) for row in shown), default=0) for i in (0, 1)]
    return [f"  {path:{widths[0]}}  {what:{widths[1]}}  {why}".rstrip() for path, what, why in shown]


def _common(texts: Iterable[str]) -> str:
    """One text for several that differ only in numbers, with ``*`` for those that differ."""
    parts = zip(*(re.split(r"(\d+)", text) for text in texts), strict=True)
    return "".join(each[0] if len(set(each)) == 1 else "*" for each in parts)


def replace(model: nn.Module, *, dropout: bool = False) -> Report:
    """Replaces, in place, every activation module of ``model`` that jitact has a counterpart for.

    A replacement has the same paths, parameters, ``inplace``, training mode, hooks and other attributes; a module that is used
    in several places has one replacement. Modules of ``torch.nn`` and transformers are replaced; their subclasses are not, as
    their forward may differ. Results agree with PyTorch's within rounding. Printing the model shows what was replaced:
    ``jitact GELU(approximate='none')``.

    In gated blocks such as ``down(act(gate(x)) * up(x))``, also with the halves of one projection, one kernel computes the
    activation and the product, if the source of the block uses the activation's result for nothing else and neither the
    activation nor the projections have hooks. The block's code does not change, and still calls its projections. Blocks that
    call a function, ``down(F.silu(gate(x)) * up(x))``, get a forward of their own with the same code but for that call. The
    method ``_apply_gate`` of transformers' mixtures of experts, as gpt-oss has it, becomes one kernel too.

    Other calls of functions such as ``F.gelu`` are not replaced in a model: the report lists those that it finds in the source
    of forward methods, and of the methods and functions that they call; :func:`patched` replaces them.

    Args:
        model: a ``torch.nn.Module``. If it is itself an activation it has no parent, so nothing is replaced.
        dropout: also fuse each activation with the ``torch.nn.Dropout`` or ``F.dropout`` after it, in training mode, if its
            result is used by nothing else and neither has hooks. For the same ``torch.manual_seed`` the masks differ from
            PyTorch's, and they are not stored. Default: False.

    Returns:
        A report: what was replaced, what was left and why, and where functions are called. :func:`restore` undoes it.

    Raises:
        TypeError: ``model`` is not a module, or ``dropout`` not a bool.
    """
    _check_model("replace", model)
    if type(dropout) is not bool:
        raise TypeError(f"replace(): dropout must be True or False, whether to fuse dropout too; got {dropout!r}")
    places: dict[nn.Module, list[tuple[nn.Module, str, str]]] = {}  # parent, attribute, path
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, name, f"{path}.{name}".lstrip(".")))

    planned, left, unfused, undropped = [], [], [], []
    if _reason_to_leave(model) is None and (type(model) in rows.COUNTERPARTS or counterpart_class(type(model))):
        left.append(Left("", type(model).__name__, "is the whole model: nothing holds it; construct jitact's instead"))
    sharded, quantized = _is_sharded(model), _is_quantized(model)
    for module, where in places.items():
        paths = tuple(path for _, _, path in where)
        new, reason = _replacement(module, sharded, quantized)
        if new:
            held_by = [(parent, name) for parent, name, _ in where]
            is_ours = isinstance(new, ActivationModule)
            gate, why = gate_of(new, held_by) if is_ours else (None, "")
            if why:
                unfused.append(Left(paths[0], _describe(new), why))
            described = f"{gate._get_name()} with the product" if gate else _describe(new)
            if dropout and is_ours and not gate:
                gate, why = dropping_of(new, held_by)
                if why:
                    undropped.append(Left(paths[0], _describe(new), why))
                described += " with the dropout" if gate else ""
            if gate:
                new = _in_place_of(gate)
            planned.append((new, where, Replaced(paths, _describe(module), described)))
        elif reason:
            known = _reason_to_leave(module) is None
            left.append(Left(paths[0], _describe(module) if known else type(module).__name__, reason))
    known, replaced = torch_functions(), [each for *_, each in planned]
    methods: list[GateMethod | GatedForward] = []
    fused: dict[nn.Module, set[str]] = {}  # names of submodules that multiply, also since an earlier replace
    for module, where in (*places.items(), *((new, where) for new, where, _ in planned)):
        for parent, name, _ in where if isinstance(module, Gate) else ():
            fused.setdefault(parent, set()).add(name)
    for path, module in [] if quantized else model.named_modules():
        method, forward = gate_method_of(module), forward_of(module, known, fused.get(module, frozenset()))
        if method is not None:
            what = f"the method of {type(module).__name__}", f"jitact {_describe(method.fused)}"
            replaced.append(Replaced((f"{path}.{METHOD}".lstrip("."),), *what))
        for number, gate in forward.gates.items() if forward is not None else ():
            what = f"{forward.names[number]} in {type(module).__name__}", f"{gate._get_name()} with the product"
            replaced.append(Replaced((path,), *what))
        methods += [each for each in (method, forward) if each is not None]
    forwards = [own for module in model.modules() if _is_of(module, own := vars(module).get("forward"))]
    functions = tuple(_find_calls(model, known, [*methods, *forwards]))
    for new, where, _ in planned:  # last, so that an exception above leaves the model unchanged
        for parent, name, _ in where:
            parent._modules[name] = new
    for method in methods:
        method.put()
    return Report(tuple(replaced), tuple(left), functions, tuple(unfused), tuple(undropped))


def _in_place_of(gate: Waiting) -> Waiting:
    """The fusing module, as the one that :func:`restore` replaces; the activation inside is not."""
    gate._replaced = gate.act._replaced
    del gate.act._replaced
    for name in [each for each in _hooks(gate) if "state_dict" in each]:  # these get the path, and that of act is another
        vars(gate)[name], vars(gate.act)[name] = vars(gate.act)[name], vars(gate)[name]
    _give_itself(gate)
    return gate


def _replacement(module: nn.Module, sharded: bool, quantized: bool) -> tuple[ActivationModule | RowModule | None, str]:
    """The replacement of a module, or why there is none; None and "" for a module that is not an activation."""
    reason = _reason_to_leave(module)
    if reason is not None:
        return None, reason
    if quantized:
        return None, "the model is quantized: it may get tensors that are"
    try:
        new = rows.counterpart(module) or counterpart(module)
    except (TypeError, ValueError) as why:
        return None, str(why)
    reason = "jitact has no counterpart with these parameters" if new is None else _reason_in_state(new, module, sharded)
    reason = reason or _reason_in_attributes(new, module)
    if reason:
        return None, reason
    own = frozenset(vars(new))
    vars(new).update({key: value for key, value in vars(module).items() if key not in own})
    _take_over(new, module)
    new._replaced = (module, own)  # in a tuple, so that it does not count as a submodule
    return new, ""


def restore(model: nn.Module) -> int:
    """Restores, in place, the modules that :func:`replace` replaced, and returns how many.

    They get the training mode, settings, weights, hooks and other attributes that their replacements have at this time, but for
    attributes that begin with an underscore.

    Raises:
        TypeError: ``model`` is not a module.
        RuntimeError: the old module cannot take over the state of a replacement, as in a model that has been sharded since;
            nothing is restored then.
    """
    _check_model("restore", model)
    planned, sharded = [], _is_sharded(model)
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():
            if isinstance(child, (ActivationModule, Waiting, RowModule)) and "_replaced" in vars(child):
                old, _ = child._replaced
                is_waiting = isinstance(child, Waiting)
                reason = _reason_in_state(old, child.act if is_waiting else child, sharded)
                if reason := reason or (_other_state(nn.Module(), child, {"act"}) if is_waiting else ""):
                    raise RuntimeError(f"restore(): cannot put back {f'{path}.{name}'.lstrip('.')}: {reason}")
                planned.append((parent, name, old, child))
    restored: set[nn.Module] = set()
    for parent, name, old, child in planned:
        before = _hooks(old) if old in restored else {}
        restored.add(old)
        if isinstance(child, Waiting):
            child.act.training = child.training
            vars(child.act).update({key: value for key, value in _hooks(child).items() if value or value is False})
            vars(child.act).update({key: value for key, value in vars(child).items() if key not in vars(child.act)})
            child = child.act
        vars(old).update(_set_since(child))
        _take_over(old, child)
        for key, value in before.items():  # those of another replacement of the same module
            if isinstance(value, dict) and value:
                value.update(vars(old)[key])
            if value or value is False:
                vars(old)[key] = value
        parent._modules[name] = old
    own = [(module, name) for module in model.modules() for name in (METHOD, "forward")]
    own = [(module, name) for module, name in own if _is_of(module, vars(module).get(name))]
    for module, name in own:
        del vars(module)[name]
    return len(restored) + len(own)


def _is_of(module: nn.Module, method: object) -> bool:
    """Whether it is a method that :func:`replace` gave the module, and not one that another module was given since."""
    return isinstance(method, (GateMethod, GatedForward)) and type(method.module) is type(module)


def _set_since(module: nn.Module) -> dict[str, Any]:
    """The attributes of a replacement that are not its own. Private ones, as of wrappers, may belong to its forward."""
    _, own = module._replaced
    return {key: value for key, value in vars(module).items() if not (key in own or key[0] == "_" or hasattr(nn.Module, key))}


def _check_model(caller: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller}() takes a model, an instance of torch.nn.Module; got {registry.given(model)}")


def _take_over(new: nn.Module, old: nn.Module) -> None:
    """Gives ``new`` the training mode, settings, weights and hooks of ``old``. Handles of hooks can still remove them."""
    ours = new if isinstance(new, (ActivationModule, RowModule)) else old
    settings = rows.SETTINGS if isinstance(ours, RowModule) else ours.activation.signature.parameters
    shared = set(settings) & vars(new).keys() & vars(old).keys()
    vars(new).update({name: vars(old)[name] for name in shared} | _hooks(old))
    new.training = old.training
    share_weights(new, old)
    _give_itself(new)


def _give_itself(module: nn.Module) -> None:
    """Makes the hooks of ``load_state_dict`` that refer to the module that they are given refer to this one."""
    for hook in module._load_state_dict_pre_hooks.values():
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(module)


def _hooks(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that hold its hooks."""
    return {key: value for key, value in vars(module).items() if "_hooks" in key or key == "_is_full_backward_hook"}


def _reason_in_state(new: nn.Module, old: nn.Module, sharded: bool) -> str:
    """Why ``new`` cannot take over the weights of ``old``; "" if it can."""
    if other := _other_state(new, old):
        return other
    for name, weight in old.named_parameters(recurse=False):
        if sharded or type(weight) is not nn.Parameter:
            kind = "sharded" if sharded else f"a {type(weight).__name__}"
            return f"its {name} is {kind}: do this before the model is sharded or wrapped"
    return ""


def _other_state(new: nn.Module, old: nn.Module, apart: Set[str] = frozenset()) -> str:
    """Which names of weights, buffers or modules only one of the two has, but for those ``apart``, as text; "" if none."""
    for kind, what in (("_parameters", "weights"), ("_buffers", "buffers"), ("_modules", "modules")):
        if other := (vars(new)[kind].keys() ^ vars(old)[kind].keys()) - apart:
            return f"it has other {what} than its class: {', '.join(sorted(other))}"
    return ""


def _reason_in_attributes(new: nn.Module, old: nn.Module) -> str:
    """Why ``new`` cannot have the attributes of ``old`` beside its own; "" if it can."""
    if vars(old).get("_compiled_call_impl") is not None:
        return "it was compiled by itself: call compile() after replace()"
    others = [name for name in vars(old) if name not in vars(new) and not hasattr(nn.Module, name)]
    return next((f"its attribute {name} has the name of one of jitact's" for name in others if hasattr(type(new), name)), "")


def _is_quantized(model: nn.Module) -> bool:
    """Whether a model has modules that return quantized tensors, which its activations may get."""
    return any(QUANTIZED.match(f"{type(module).__module__}.{type(module).__name__}") for module in model.modules())


def _is_sharded(model: nn.Module) -> bool:
    """Whether FSDP1 or FSDP2, which swap the weights of modules, wraps a part of a model."""
    names = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    return not names.isdisjoint({"FSDPModule", "FullyShardedDataParallel"})


def _describe(module: nn.Module) -> str:
    return f"{module._get_name()}({module.extra_repr()})"


def _reason_to_leave(module: nn.Module) -> str | None:
    """None for an activation to replace, "" for a module that is not an activation, else why it is left."""
    if isinstance(module, (ActivationModule, RowModule)):
        return ""
    if isinstance(module, torch.jit.ScriptModule):
        known = {each.__name__ for each in torch_classes()}
        return "is TorchScript" if getattr(module, "original_name", "") in known else ""
    if not is_activation(type(module)) and type(module) not in rows.COUNTERPARTS:
        return reason_to_leave(type(module))
    return "its forward was replaced on the module" if "forward" in vars(module) else None


# Function calls.

NOT_PASSED_ON = ("input", "_stacklevel")  # the tensor, passed by position, and F.softmax's argument for warnings
RUN_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


@dataclass
class Patched(TorchFunctionMode, ContextDecorator):
    """The result of :func:`patched`: a context manager and decorator that counts the calls that it replaces.

    Attributes:
        replaced: the number of calls replaced, by activation.
        left: the number of calls passed to PyTorch, by activation and reason.
    """

    replaced: Counter[str] = field(default_factory=Counter)
    left: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        """Collects the functions to replace."""
        TorchFunctionMode.__init__(self)
        self._ours = torch_functions() | {function: (cls.activation.name, False) for function, cls in rows.FUNCTIONS.items()}
        for name, _ in self._ours.values():
            registry.function(name)  # made now: torch.compile cannot trace that, as it takes a lock

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Intercepts a PyTorch function: calls jitact's instead, if there is one that takes the arguments."""
        kwargs, ours = kwargs or {}, self._ours.get(function)
        if ours is None or kwargs.get("_stacklevel") == OWN_CALL:
            return function(*args, **kwargs)
        name, inplace = ours
        x, *rest = args or (kwargs.get("input"),)
        options = {key: value for key, value in kwargs.items() if key not in NOT_PASSED_ON}
        options |= {"inplace": True} if inplace else {}
        try:
            if is_stand_in(x):
                raise TypeError(f"{name}: expected a tensor, got {what_it_is(x)}, which stands for one that is not there yet")
            if isinstance(x, Tensor) and x.device.type not in ("cpu", "cuda"):
                raise TypeError(f"{name}: expected a tensor on a CPU or a GPU, got one on {x.device.type}")
            y = registry.function(name)(x, *rest, **options)
        except (TypeError, ValueError, NotImplementedError) as why:  # raised before anything is computed
            reason = str(why).partition("\n")[0].partition(". ")[0]  # some of PyTorch's messages are pages long
            self.left[name, reason] += 1
            return function(*args, **kwargs)
        self.replaced[name] += 1
        return y

    def __call__(self, function: Callable) -> Callable:
        """Decorates a function, to run in the context.

        Raises:
            TypeError: it is a class, or a generator or coroutine, whose code runs after the call has left the context.
        """
        if isinstance(function, type) or any(is_late(function) for is_late in RUN_LATER):
            what = "a class" if isinstance(function, type) else "a generator or coroutine"
            raise TypeError(f"patched() cannot decorate {what}: use `with jitact.patched():` where the model is called")
        return super().__call__(function)

    def __hash__(self) -> int:
        """By identity: PyTorch keeps modes in sets."""
        return id(self)

    def __repr__(self) -> str:
        """The counts."""
        done = ", ".join(f"{name} ({count})" for name, count in self.replaced.items()) or "nothing"
        left = [f"left {name} ({count}): {why}" for (name, why), count in self.left.items()]
        return "; ".join([f"replaced calls: {done}", *left])


def patched() -> Patched:
    """A context in which jitact's functions replace PyTorch's activation functions: ``with jitact.patched(): model(x)``.

    Calls of ``F.gelu``, ``torch.relu``, ``x.sigmoid()``, ``F.softmax`` and the like, also inside modules of ``torch.nn``, go to
    jitact if the input is a dense float tensor on a CPU or a GPU and jitact's function accepts the arguments. All other calls
    go to PyTorch as before. Works as a decorator too. Modules are not changed, so there is nothing to undo.

    It applies to the thread that entered it, and to no other; nor to backward: what ``torch.utils.checkpoint`` recomputes
    there calls PyTorch's functions, so enter it inside the function that is checkpointed. Every PyTorch call in the context
    takes a few microseconds longer; :func:`replace` has no such cost.

    Returns:
        The context; printing it shows what it replaced.
    """
    return Patched()


def _find_calls(
    model: nn.Module, functions: Mapping[Callable, tuple[str, bool]], methods: Sequence[GateMethod | GatedForward]
) -> Iterator[Left]:
    """The modules whose code calls PyTorch's activation functions, or that hold one, once these methods are replaced."""
    of_experts = {each.module for each in methods if isinstance(each, GateMethod)}
    fused = {each.module: each.all_of for each in methods if isinstance(each, GatedForward)}
    known = {function: name for function, (name, _) in functions.items()}
    known |= {function: cls.activation.name for function, cls in rows.FUNCTIONS.items()}
    for path, module in model.named_modules():
        if isinstance(module, (ActivationModule, Waiting, RowModule)) or _reason_to_leave(module) != "":
            continue
        cls = type(module)
        if cls.__module__ == "torch.nn.modules.activation":
            continue
        for attribute, held in vars(module).items():
            for name in [] if attribute.startswith("_") else _held(held, known):
                yield Left(path, cls.__name__, f"holds {name} as .{attribute}")
        apart = {METHOD} if module in of_experts else frozenset()
        for call in sorted(calls(module, known, Tensor, "torch", apart, (GatedForward,))):
            if not call.where and call.name in fused.get(module, ()):
                continue
            where = f" in {call.where}" if call.where else ""
            why = f"calls {call.name}{where}" if not call.hidden else f"{call.name} has no source to look for calls in"
            yield Left(path, cls.__name__, why)


def _held(value: object, known: dict[Callable, str]) -> Iterator[str]:
    """The names of activation functions, and of modules that are not submodules, in an attribute of a module."""
    if isinstance(value, dict):
        value = list(value.values())
    for each in value if isinstance(value, (list, tuple)) else [value]:
        function = each.func if isinstance(each, partial) else each
        if isinstance(each, nn.Module):
            if _reason_to_leave(each) is None:
                yield type(each).__name__
        elif isinstance(function, Callable) and is_hashable(function) and function in known:
            yield known[function]
