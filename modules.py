"""Makes the module class and the function of an activation from its record."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from inspect import Parameter
from numbers import Integral
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, get_type_hints

import torch
from torch import Tensor, nn

from .fusing.around import check_channel_dim, check_fused, probability, run_around, run_with_added
from .measuring.docstrings import describe_class, describe_function
from .measuring.inputs import KernelBenchForm
from .records import Activation, given_in_calls, is_plain, library
from .records.arguments import (
    AROUND,
    DTYPES,
    OF_MODULES,
    OPTIONS,
    Arguments,
    as_number,
    by_name_hint,
    check_switch,
    is_stand_in,
    shown,
    signature_of,
)
from .records.operands import fitted
from .running import run, run_with_operands

__all__ = [
    "GENERATED",
    "ActivationModule",
    "Makers",
    "StandingIn",
    "bias_around",
    "drops",
    "generate",
    "make_attribute",
    "make_module",
    "make_weights",
    "named_as",
    "normalise",
    "remove_attributes",
    "remove_placeholders",
    "reset_weights",
    "title_of",
    "users_rows",
    "variant",
    "with_own_code",
    "with_types",
]


def with_types(function: FunctionType) -> FunctionType:
    """Evaluates a method's annotations, which torch.fx writes into the code of modules that it traces."""
    function.__annotations__ = get_type_hints(function)
    return function


class StandingIn(nn.Module):
    """Base of the modules that :func:`jitact.replace` puts into models."""

    def _get_name(self) -> str:
        """The name in a printed model: ``jitact GELU`` for a replacement, to distinguish it from ``torch.nn.GELU``."""
        return f"jitact {type(self).__name__}" if "_replaced" in vars(self) else type(self).__name__


class ActivationModule(KernelBenchForm, StandingIn):
    """Base of the classes that :func:`make_module` makes: drop-in replacements for modules of ``torch.nn``."""

    activation: ClassVar[Activation]
    Model: ClassVar[type[nn.Module]]
    surrounded: tuple[str, ...] = ()  # with a fused bias or dropout: the arguments of AROUND that the constructor got

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of the ``torch.nn`` counterpart, ``save``, ``fast_math`` and more: see the class's signature."""
        record = self.activation
        if args and isinstance(args[0], Tensor):
            instead = f"write {record.title}()(x), or jitact.{record.name}(x), the function"
            raise TypeError(f"{record.title} is a class, whose constructor takes no tensor; {instead}")
        options = record.of_constructor.bind(args, kwargs)
        fused = {name: options.pop(name) for name in OF_MODULES if name in options and name not in record.own_arguments}
        factory_kwargs = {name: fused.get(name, options.get(name)) for name in ("device", "dtype")}
        _check_dtype(record, factory_kwargs["dtype"])
        if record.channels and record.module:
            _check_own(record, options)
            record.module.__init__(self, **{name: value for name, value in options.items() if name not in OPTIONS})
            options = {name: options[name] for name in OPTIONS}
        else:
            super().__init__()
            make_weights(self, record, options, factory_kwargs)
        self.inplace = False
        for name, value in options.items():
            setattr(self, name, value)
        variant(record, self.__dict__).check(self._params(), self.inplace, self.save, self.fast_math)
        if "channel_dim" in fused:
            fused["channel_dim"] = check_channel_dim(record, fused["channel_dim"], fused.get("bias"))
        unused = [f"{name}=" for name, value in factory_kwargs.items() if value is not None and name in fused]
        if unused and not record.channels and fused.get("bias") is None:
            raise ValueError(f"{record.name}: {' and '.join(unused)} is for the module's bias or weights, and there are none")
        if _wanted(fused):
            _surround(self, record, fused, factory_kwargs)

    def _params(self) -> tuple[float, ...]:
        params = self.activation.params
        return tuple([getattr(self, name) for name, _ in params]) if params else ()

    @with_types
    def forward(self, x: Tensor | None = None, *others: Tensor, **named: Tensor) -> Tensor:
        """Applies the activation to ``x``, of any shape; raises TypeError for anything but a dense floating-point tensor.

        An activation of several tensors takes them by position or by name. One more tensor after them, or ``residual=``, is
        added to the result.
        """
        record = self.activation
        if type(others) is not tuple:  # torch.fx traces this module as the root: `others` and `named` are proxies
            remove_placeholders(others, named)
            make, names = others.tracer.create_proxy, given_in_calls(record.token)
            others, named = tuple([make("placeholder", name, (None,), {}) for name in names[1:]]), {}
        if x is not None and not others and not named and is_plain(record.token):
            record = record if record.variant is None else variant(record, self.__dict__)
            if not self.surrounded:
                return run(x, record, self._params(), self.inplace, self.save, self.fast_math)
            if not torch.compiler.is_compiling() and isinstance(x, Tensor):
                bias = self._bias_alone()
                if isinstance(bias, Tensor):  # a proxy while torch.fx traces
                    operands = {record.given_in_calls[0]: x, "bias": bias}
                    return run_with_added(record, operands, self._params(), self.inplace, self.save, self.fast_math)
        return self._forward_with_operands(*([] if x is None and named else [x]), *others, **named)

    def _bias_alone(self) -> Tensor | None:
        """The bias of the last dimension, if this call fuses that with the activation and nothing else; else None."""
        own, fused = self.__dict__, self.surrounded
        drops = "dropout" in fused and self.training and own["dropout"] != 0
        return None if drops or own.get("channel_dim", -1) != -1 else bias_around(self)

    def _forward_with_operands(self, *tensors: Tensor, **named: Any) -> Tensor:
        record = self.activation
        names = given_in_calls(record.token)
        if "input" in named and "input" not in names and not tensors:
            tensors = (named.pop("input"),)  # the name in torch.nn's modules
        residual = None if "residual" in names else named.pop("residual", None)
        if residual is None and "residual" not in names and len(tensors) == len(names) + 1:
            *tensors, residual = tensors
        given = _by_name(record, tensors, named) | {name: getattr(self, name) for name in record.channels}
        if self.surrounded or residual is not None:
            fused: dict[str, Any] = {"residual": residual}
            unused = () if self.training else ("dropout",)
            unused += ("channel_dim",) if bias_around(self) is None else ()
            fused |= {name: getattr(self, name) for name in self.surrounded if name not in unused}
            record, fixed = variant(record, self.__dict__), (self.inplace, self.save, self.fast_math, self.training)
            return run_around(record, given, self._params(), fused, *fixed)
        return run_with_operands(record, given, self._params(), self.inplace, self.save, self.fast_math, self.training)

    def reset_parameters(self) -> None:
        """Resets weights and bias to their initial values."""
        if self.activation.channels and self.activation.module:
            reset = getattr(self.activation.module, "reset_parameters", None)
            if reset is not None:
                reset(self)
        else:
            reset_weights(self, self.activation)
        if bias_around(self) is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """Parameters, and options that differ from their defaults."""
        record = self.activation
        if record.channels and record.module:
            shown = [text] if (text := record.module.extra_repr(self)) else []
        else:
            sizes = [name for name, channel in record.channels.items() if not channel.one]
            shown = [f"{name}={getattr(self, name).numel()}" for name in sizes]
            shown += [f"{name}={getattr(self, name)}" for name, _ in record.params]
        if bias_around(self) is not None:
            shown.append(f"bias={self.bias.numel()}")
        shown += [f"dropout={self.dropout}"] if drops(self) else []
        if bias_around(self) is not None and "channel_dim" in self.surrounded and self.channel_dim != -1:
            shown.append(f"channel_dim={self.channel_dim}")
        shown += [f"{record.variant[0]}={getattr(self, record.variant[0])!r}"] if record.variant else []
        shown += [f"{name}=True" for name in ("inplace", "fast_math") if getattr(self, name)]
        shown += [f"save={self.save!r}"] if self.save else []
        return ", ".join(shown)

    def __reduce__(self) -> tuple:
        """Pickles the class by the activation's name, as no module has a class that was defined in a notebook. No code."""
        record = self.activation
        definition = (record.fingerprint, record.equation_with_numbers) if record.fingerprint else ()
        return _revive, (record.name, *definition), self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationModule:
        """Copies with the same class, even if its name has been defined again since, which pickling would look up."""
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    @classmethod
    def _widths(cls, dim: int) -> list[int]:
        return [dim] * cls.activation.layout.elements

    @classmethod
    def get_init_inputs(cls) -> list:
        """Arguments for the constructor: 1 for each number of channels that has no default."""
        return [1 for default in cls.activation.own_arguments.values() if default is Parameter.empty]


def remove_placeholders(*proxies: Any) -> None:
    """Removes unused arguments of a module that torch.fx traces as the root, so that the traced module does not ignore them."""
    for proxy in proxies:
        proxy.node.graph.erase_node(proxy.node)


def _by_name(record: Activation, tensors: tuple[Tensor, ...], named: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a module's call, positional and by name, as a dict by operand, without the module's own weights.

    Raises:
        TypeError: too many or too few tensors, or an unknown name.
    """
    names = given_in_calls(record.token)
    if not named and len(tensors) == len(names):
        return dict(zip(names, tensors, strict=True))
    unknown = [name for name in named if name not in names]
    if unknown:
        raise TypeError(f"{record.name}: a module is called with tensors and residual=; got {', '.join(unknown)}=")
    given = dict(zip(names, tensors, strict=False)) | named
    if len(tensors) + len(named) != len(names) or len(given) != len(names):
        also = f" and {', '.join(named)}=" if named else ""
        takes = f"{len(names)} tensor{'s'[: len(names) - 1]}, {', '.join(names)}"
        raise TypeError(f"{record.name} is applied to {takes}; got {len(tensors)}{also}")
    return {name: given[name] for name in names}


def make_weights(module: nn.Module, record: Activation, options: dict[str, Any], factory_kwargs: dict[str, Any]) -> None:
    """Makes a module's channel operands: parameters if they are learned, else buffers. Pops their sizes from ``options``.

    Raises:
        TypeError, ValueError: a size is not a positive int.
    """
    for name, channel in record.channels.items():
        size = 1 if channel.one else options.pop(name)
        values = torch.full((_size(record, name, size),), as_number(record, name, channel.init), **factory_kwargs)
        if name in record.learned:
            module.register_parameter(name, nn.Parameter(values))
        else:
            module.register_buffer(name, values)


def _check_dtype(record: Activation, dtype: object) -> None:
    """Raises TypeError if the ``dtype`` of a module's bias or weights is none that they can have."""
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"{record.name}: dtype is {', '.join(map(str, DTYPES))} or None, got {shown(dtype)}")


def _check_own(record: Activation, options: dict[str, Any]) -> None:
    """Checks arguments that a module of PyTorch takes, whose errors would not name them.

    Raises:
        TypeError, ValueError: a number is none, or a size is not a positive int.
    """
    for name, default in record.own_arguments.items():
        if type(default) is float:
            as_number(record, name, options[name])
        elif type(default) is int:
            _size(record, name, options[name])


def reset_weights(module: nn.Module, record: Activation) -> None:
    """Resets channel operands to their initial values."""
    for name, channel in record.channels.items():
        nn.init.constant_(getattr(module, name), channel.init)


def _size(record: Activation, name: str, size: Any) -> int:
    is_whole = isinstance(size, Integral) and not isinstance(size, bool)
    if not is_whole or size < 1:
        error = ValueError if is_whole else TypeError
        raise error(f"{record.title}: {name} is how many channels there are, a positive number; got {shown(size)}")
    return int(size)


def _surround(module: ActivationModule, record: Activation, fused: dict[str, Any], factory_kwargs: dict[str, Any]) -> None:
    """Adds the fused bias, a parameter of zeros, and dropout to a module, as its constructor was asked.

    Raises:
        TypeError, ValueError: the number of channels or the probability is invalid, or dropout excludes ``save="output"``.
    """
    module.surrounded = tuple([name for name in AROUND if name in fused])
    if "dropout" in fused:
        module.dropout = probability(record, fused["dropout"])
    if drops(module) and module.save == "output":
        raise ValueError(f"{record.name}: save='output' is not possible with dropout: that output is not the activation's own")
    if "channel_dim" in fused:
        module.channel_dim = fused["channel_dim"]
    if "bias" in fused:
        size = fused["bias"]
        bias = None if size is None else nn.Parameter(torch.zeros(_size(record, "bias", size), **factory_kwargs))
        module.register_parameter("bias", bias)


def bias_around(module: ActivationModule) -> nn.Parameter | None:
    """The bias that a module adds before its activation; None if it has none."""
    return module.bias if "bias" in module.surrounded else None


def drops(module: ActivationModule) -> bool:
    """Whether a module has dropout after its activation."""
    return "dropout" in module.surrounded and module.dropout > 0


def variant(record: Activation, options: dict[str, Any]) -> Activation:
    """The record that the options select: gelu_tanh's for ``GELU(approximate="tanh")``; ``record`` if it has no variants.

    Raises:
        ValueError: the selecting argument has an unknown value.
    """
    if record.variant is None:
        return record
    argument, names = record.variant
    value = options[argument]
    if not isinstance(value, str) or value not in names:
        choices = ", ".join(map(repr, names))
        also = by_name_hint(record, value)
        raise ValueError(f"{record.name}: {argument}={shown(value)} is not possible; choose from {choices}{also}")
    return library[names[value]]


# Classes for unpickling, by name and fingerprint, as a name may be defined again. In order of definition. Weak: a class that
# nobody uses any more is dropped.
_made: weakref.WeakValueDictionary[tuple[str, str], type[ActivationModule]] = weakref.WeakValueDictionary()


def normalise(name: str) -> str:
    """The lookup key of a name, equal for spellings that differ in case, ``_`` or ``-`` alone."""
    return name.lower().replace("_", "").replace("-", "")


users_rows: dict[str, Any] = {}
"""Users' own classes that work on rows, by :func:`normalise` of the name. Readers copy it, as other threads may define more."""

_package = vars(sys.modules[__package__])
_attributes: weakref.WeakSet[Callable[..., Tensor]] = weakref.WeakSet()


def make_attribute(name: str, function: Callable[..., Tensor]) -> None:
    """Makes a function an attribute of the package, ``jitact.<name>``, until any name gets another meaning.

    Without it Python calls the package's ``__getattr__`` each time, which takes half as long as a kernel on a small tensor.
    """
    _attributes.add(function)
    _package[name] = function


def remove_attributes() -> None:
    """Removes what :func:`make_attribute` made, also where it was put back since; what a program has put in its place stays."""
    for name, value in list(_package.items()):
        if isinstance(value, FunctionType) and value in _attributes:
            del _package[name]


def _revive(name: str, fingerprint: str = "", equation: str = "") -> ActivationModule:
    """An uninitialised module for unpickling to fill; ``fingerprint`` and ``equation`` are of a user's definition.

    Raises:
        LookupError: no such activation is defined in this process, or one with another definition.
    """
    if name.startswith(GENERATED):
        generate(name.removeprefix(GENERATED))
    of_name = [cls for cls in _classes() if cls.activation.name == name]
    cls = _made.get((name, fingerprint)) if fingerprint else (of_name or [None])[-1]
    if not of_name:
        raise LookupError(
            f"the activation {name!r} is not defined in this process; define it before loading a module of it, in a file that "
            "worker processes import too (not under if __name__ == '__main__'), or with jitact.load_folder"
        )
    if cls is None:
        raise LookupError(
            f"the activation {name!r} is another here than where this was saved: there {equation}, here "
            f"{of_name[-1].activation.equation_with_numbers}; define it as it was before loading (and as it is again "
            "afterwards), or load a state_dict into a new model"
        )
    return cls.__new__(cls)


def _classes() -> list[type[ActivationModule]]:
    """The classes that :func:`make_module` made and that are still in use."""
    return [cls for reference in _made.valuerefs() if (cls := reference()) is not None]


GENERATED = "gated_"
"""The prefix of activations that :func:`jitact.gated` makes on demand."""


def generate(name: str) -> type[ActivationModule] | None:
    """The class of the gated form of a named activation, in any spelling; None if there is none."""
    from .gating.generated import gated

    with contextlib.suppress(KeyError, ValueError):
        return gated(name)
    return None


class Makers(NamedTuple):
    """How public classes and functions are made from one kind of record.

    Attributes:
        base: base class of the modules.
        reference: makes ``Model``, the reference in PyTorch, where ``torch.nn`` has none.
        function: makes ``jitact.<name>``.
    """

    base: type[ActivationModule]
    reference: Callable[[Activation], type[nn.Module]]
    function: Callable[[Activation], Callable[..., Tensor]]


def make_module(record: Activation, makers: Makers | None = None) -> type[ActivationModule]:
    """The ``ModelNew`` class of an activation. Its function is made on first access."""
    makers = makers or Makers(ActivationModule, _make_reference, _make_function)
    record.make_function = makers.function
    members = {
        "activation": record,
        "Model": record.module if _needs_no_arguments(record.module) else makers.reference(record),
        "__doc__": _Description(),
        "__module__": __name__,
        "__signature__": record.of_constructor.signature,  # computed and cached now: torch.compile cannot trace that
        "forward": with_own_code(makers.base.forward, f"{record.title}.forward"),
    }
    bases = (makers.base, record.module) if record.channels and record.module else (makers.base,)
    cls = type(record.title, bases, members)
    _made.pop((record.name, record.fingerprint), None)
    _made[record.name, record.fingerprint] = cls
    return cls


def title_of(name: str) -> str:
    """The class name of a definition: unlike any name in this module, whose :func:`__getattr__` finds the class for pickle."""
    title = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    return f"{title}_" if title in globals() else title


def __getattr__(title: str) -> type[ActivationModule]:
    """A class that :func:`make_module` made, by its title. Pickles of the class or of its ``Model`` look it up here."""
    if title.startswith("Gated"):
        generate(title.removeprefix("Gated"))
    for cls in reversed(_classes()):
        if cls.__name__ == title:
            return cls
    raise AttributeError(f"module {__name__!r} has no attribute {title!r}")


def _make_function(record: Activation) -> Callable[..., Tensor]:
    """The function of an activation: ``f(x, *params, inplace=False, save=None, fast_math=False)``."""
    return named_as((_function_of_x if is_plain(record.token) else _function_of_several)(record), record)


def with_own_code(function: FunctionType, name: str) -> FunctionType:
    """A copy of a function with a code object of its own, called ``name`` in tracebacks.

    torch.compile limits recompilations per code object to 8: activations that shared one would reach that together.
    """
    code = function.__code__.replace(co_name=name)
    copied = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copied, function)
    del copied.__wrapped__  # update_wrapper sets it, but a copy wraps nothing
    return copied


def named_as(function: FunctionType, record: Activation) -> Callable[..., Tensor]:
    """Gives a function the activation's name and docstring, and its own code object, as :func:`with_own_code` does."""
    function.__code__ = function.__code__.replace(co_name=record.name)
    function.__name__ = function.__qualname__ = record.name
    function.__module__ = __package__  # where pickles and torch.fx look for it
    function.__doc__ = describe_function(record, function.__signature__)
    return function


def _function_of_x(record: Activation) -> Callable[..., Tensor]:
    defaults = tuple(default for _, default in record.params)
    arguments = Arguments(record.name, signature_of(record.own_arguments, OPTIONS | record.beside), before="x")
    added, usual = {"bias", "dropout", "residual"} & record.beside.keys(), variant(record, record.own_arguments)
    (operand,) = given_in_calls(record.token)  # "x", but for definitions such as "sin(t)"

    def function(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not kwargs and len(args) <= len(defaults):
            return run(x, record, (*args, *defaults[len(args) :]) if args else defaults, False, None, False)
        if not args and not torch.compiler.is_compiling() and kwargs.keys() <= added:
            if "dropout" in kwargs:
                return run_around(usual, {operand: x}, defaults, kwargs, False, None, False, False)
            tensors = {operand: x, **kwargs}
            if all([isinstance(each, Tensor) for each in tensors.values()]):
                return run_with_added(usual, tensors, defaults, False, None, False)
        options = arguments.bind(args, kwargs)
        params = tuple([options[name] for name, _ in record.params])
        chosen, inplace = variant(record, options), options.get("inplace", False)
        fused = _fused_arguments(record, options)
        if _wanted(fused):
            return run_around(chosen, {operand: x}, params, fused, inplace, options["save"], options["fast_math"], False)
        if fused:
            check_fused(record, fused, {operand: x})
        return run(x, chosen, params, inplace, options["save"], options["fast_math"])

    x = Parameter("x", Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor)
    function.__signature__ = inspect.Signature([x, *arguments.signature.parameters.values()])
    return function


def _fused_arguments(record: Activation, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments for fused bias, dropout and residual."""
    return {name: options[name] for name in record.beside}


def _wanted(fused: dict[str, Any]) -> bool:
    """Whether a call fuses a bias, dropout or a residual."""
    dropout = fused.get("dropout", 0.0)
    without = isinstance(dropout, int | float) and dropout == 0  # what is no number is refused later
    return fused.get("bias") is not None or fused.get("residual") is not None or not without


def _function_of_several(record: Activation) -> Callable[..., Tensor]:
    names, params = record.source.signature.of("element", "channel", "row"), [name for name, _ in record.params]
    fixed = {name: channel.init for name, channel in record.channels.items() if name not in record.learned}
    taken = {name: fixed.get(name, Parameter.empty) for name in names} | dict(record.params)
    taken |= ({"training": False} if record.in_eval else {}) | ({"inplace": False} if record.inplace else {})
    arguments = Arguments(record.name, signature_of(taken, OPTIONS | record.beside))
    defaults = tuple(default for _, default in record.params)

    def function(*args: Any, **kwargs: Any) -> Tensor:
        if not kwargs and len(args) == len(names):
            return run_with_operands(record, dict(zip(names, args, strict=True)), defaults, False, None, False, False)
        options = arguments.bind(args, kwargs)
        given = {name: options[name] for name in names}
        numbers, training = tuple([options[name] for name in params]), options.get("training", False)
        if not is_stand_in(training):
            check_switch(record, "training", training)
        fixed = options.get("inplace", False), options["save"], options["fast_math"], training
        fused = _fused_arguments(record, options)
        if _wanted(fused):
            return run_around(record, given, numbers, fused, *fixed)
        check_fused(record, fused, given)
        return run_with_operands(record, given, numbers, *fixed, fused.get("seed"))

    function.__signature__ = arguments.signature
    return function


def _needs_no_arguments(module: type[nn.Module] | None) -> bool:
    if module is None:
        return False
    needed = [each for each in inspect.signature(module).parameters.values() if each.default is Parameter.empty]
    return all(each.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for each in needed)


def _make_reference(record: Activation) -> type[nn.Module]:
    """The reference in PyTorch as a module, where ``torch.nn`` has none or its arguments have no defaults."""

    class Model(nn.Module):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            options = record.of_constructor.bind(args, kwargs)
            make_weights(self, record, options, {name: options.get(name) for name in ("device", "dtype")})
            self.params = [options[name] for name, _ in record.params]

        def forward(self, *tensors: Tensor, **named: Tensor) -> Tensor:
            if is_plain(record.token):
                return record.reference(*tensors, *named.values(), *self.params)
            given = _by_name(record, tensors, named) | {name: getattr(self, name) for name in record.channels}
            chosen, params = record, self.params
            if record.in_eval and not self.training:
                chosen, params = record.in_eval(*params)
            return chosen.reference(*fitted(record, given), *params)

    if record.channels:

        def reset_parameters(self: nn.Module) -> None:
            """Resets the module's weights to their initial values."""
            reset_weights(self, record)

        Model.reset_parameters = reset_parameters
    Model.__qualname__ = f"{record.title}.Model"
    return Model


class _Description:
    """The docstring of a module class, made on access: it needs the kernel file, which importing jitact does not read."""

    def __get__(self, module: ActivationModule | None, cls: type[ActivationModule]) -> str:
        return describe_class(cls.activation)
