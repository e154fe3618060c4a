"""What an activation is: its record, the module class and the function made from it, and the table of them all."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import references as ref
from .autograd import ACCEPTED, DTYPES, by_token, check, recorded, run
from .kernels import KernelSource

__all__ = ["DTYPES", "SAVES", "TABLE", "Activation", "ActivationModule", "Requirement", "make_function", "make_module", "run"]

SAVES = ("input", "output", "bit")
OPTIONS = {"save": None, "fast_math": False}  # what every constructor takes beside torch.nn's arguments


class Requirement(NamedTuple):
    """A condition on parameters, as text for people and as a test; only for one ``save`` if that is given."""

    text: str
    holds: Callable[..., bool]
    save: str | None = None


@dataclass(eq=False)  # not frozen: torch.compile reads no attributes of a frozen one
class Activation:
    """One activation: everything that Python knows of it. The maths is in ``kernels/<name>.cu``.

    Attributes:
        name: canonical name, also the kernel file's.
        title: class name, the ``torch.nn`` counterpart's where there is one.
        formula: forward, for people.
        reference: the same function in PyTorch, ``reference(x, *params)``; tests, bench and second derivatives use it.
        saves: what backward can keep, the default first. ``"input"`` is always possible.
        params: parameters after ``x``, with their defaults, in the order of ``torch.nn``'s constructor.
        inplace: whether the constructor takes ``inplace``, as ``torch.nn``'s does.
        gradient_from_output: ``dx`` from ``(dy, y, *params)`` in PyTorch, for second derivatives with ``save="output"``.
        module: the ``torch.nn`` class; None makes :attr:`Model` from ``reference``.
        notes: for the docstring: what else a user should know.
        exact: the function in PyTorch as tests want it in float64, where ``reference`` loses digits even there.
        requires: what parameters must satisfy.
        aliases: further names; the title, and spellings that differ in case, ``_`` or ``-``, need none.
        variant: a constructor argument that chooses among activations, and the names that its values lead to.
        kernel: what to compile, where that is not ``kernels/<name>.cu``.
        has_reference: whether ``reference`` is PyTorch's arithmetic. Else it is the compiled forward in float64.
        zero_crossing: where a difference of larger terms passes through 0, float32 errors count in ulp of this magnitude.
        fingerprint: what pickles tell definitions of one name by; the library's own have none, as their names say it all.
    """

    name: str
    title: str
    formula: str
    reference: Callable[..., Tensor]
    saves: tuple[str, ...] = ("input",)
    params: tuple[tuple[str, float], ...] = ()
    inplace: bool = False
    gradient_from_output: Callable[..., Tensor] | None = None
    module: type[nn.Module] | None = None
    notes: str = ""
    exact: Callable[..., Tensor] | None = None
    requires: tuple[Requirement, ...] = ()
    aliases: tuple[str, ...] = ()
    variant: tuple[str, dict[str, str]] | None = None
    kernel: KernelSource | None = None
    zero_crossing: float = 0.0
    fingerprint: str = ""
    has_reference: bool = True

    def __post_init__(self) -> None:
        """Gives the record a token, a constant that torch.compile can carry: the name, numbered when it is defined again."""
        self.token, version = self.name, 1
        while by_token.setdefault(self.token, self) is not self:  # in one step, as several threads may define
            version += 1
            self.token = f"{self.name}.{version}"

    @cached_property
    def source(self) -> KernelSource:
        """What the loader compiles."""
        return self.kernel or KernelSource.from_file(self.name)

    @cached_property
    def signature(self) -> inspect.Signature:
        """Of the constructor: parameters, ``inplace`` where ``torch.nn`` has it, then ``save`` and ``fast_math``."""
        defaults = dict(self.params) | ({"inplace": False} if self.inplace else {})
        if self.variant:
            defaults[self.variant[0]] = next(iter(self.variant[1]))
        positional = [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD, default=d) for n, d in defaults.items()]
        keyword = [Parameter(n, Parameter.KEYWORD_ONLY, default=d) for n, d in OPTIONS.items()]
        return inspect.Signature([*positional, *keyword])

    @cached_property
    def function(self) -> Callable[..., Tensor]:
        """``jitact.<name>``, as long as the name stands for this record."""
        return _make_function(self)

    def recorded(self, fast_math: bool, x: Tensor, *params: float) -> Tensor:
        """Forward where something is recorded, out of place, with what its operators take."""
        return recorded(x, self, params, fast_math)

    def gradient_reference(self, dy: Tensor, kept: Tensor, params: tuple[float, ...], save: str) -> Tensor:
        """Backward in PyTorch, for ``save`` "input" or "output", differentiable as often as wanted."""
        if save == "output":
            return self.gradient_from_output(dy, kept, *params)
        return torch.func.vjp(lambda x: self.reference(x, *params), kept)[1](dy)[0]


class ActivationModule(nn.Module):
    """Base of the classes that :func:`make_module` makes: modules that drop in where ``torch.nn``'s stand."""

    activation: ClassVar[Activation]
    Model: ClassVar[type[nn.Module]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what the ``torch.nn`` counterpart takes, and ``save`` and ``fast_math``; see the class's signature."""
        super().__init__()
        self.inplace = False
        for name, value in _bind(self.activation, args, kwargs).items():
            setattr(self, name, value)
        check(_variant(self.activation, self.__dict__), self._params(), self.inplace, self.save, self.fast_math)

    def _params(self) -> tuple[float, ...]:
        return tuple([getattr(self, name) for name, _ in self.activation.params])

    def forward(self, x: Tensor) -> Tensor:
        """Applies the activation to ``x``, of any shape; raises TypeError for what is not a dense tensor of floats."""
        activation = _variant(self.activation, self.__dict__)
        return run(x, activation, self._params(), self.inplace, self.save, self.fast_math)

    def extra_repr(self) -> str:
        """Parameters, and the options that were chosen."""
        shown = [f"{name}={getattr(self, name)}" for name, _ in self.activation.params]
        shown += (
            [f"{self.activation.variant[0]}={getattr(self, self.activation.variant[0])!r}"] if self.activation.variant else []
        )
        shown += [f"{name}=True" for name in ("inplace", "fast_math") if getattr(self, name)]
        shown += [f"save={self.save!r}"] if self.save else []
        return ", ".join(shown)

    def _get_name(self) -> str:
        """The class in a printed model, where one that stands in place of PyTorch's is told from it."""
        return f"jitact {type(self).__name__}" if "_replaced" in vars(self) else type(self).__name__

    def __reduce__(self) -> tuple:
        """By the activation's name: a class that was defined in a notebook has no other address. No code is in a pickle."""
        record = self.activation
        told = (record.fingerprint, _equation(record)) if record.fingerprint else ()
        return _revive, (record.name, *told), self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationModule:
        """Of this very class, also where another has its name by now."""
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    @staticmethod
    def get_inputs(
        batch_size: int = 4096, dim: int = 393216, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
    ) -> list[Tensor]:
        """One random normal tensor ``(batch_size, dim)``, as KernelBench wants it."""
        return [torch.randn(batch_size, dim, device=device, dtype=dtype)]

    @staticmethod
    def get_init_inputs() -> list:
        """Arguments for the constructor: none, the defaults hold."""
        return []


def _variant(activation: Activation, options: dict[str, Any]) -> Activation:
    """The record that the options lead to: another than ``activation`` for ``GELU(approximate="tanh")``.

    Raises:
        ValueError: the argument that chooses has an unknown value.
    """
    if activation.variant is None:
        return activation
    argument, names = activation.variant
    if options[argument] not in names:
        choices = ", ".join(map(repr, names))
        raise ValueError(f"{activation.name}: {argument}={options[argument]!r} is not possible; choose from {choices}")
    return by_token[names[options[argument]]]


def _bind(activation: Activation, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, defaults filled in, with an error that names the activation."""
    try:
        bound = activation.signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{activation.title}{activation.signature}: {error}") from None
    bound.apply_defaults()
    return bound.arguments


# To unpickle: by name, and what was defined by its fingerprint too, so that a name may have been defined again.
_modules: dict[str, type[ActivationModule]] = {}
_defined: dict[tuple[str, str], type[ActivationModule]] = {}


def _equation(activation: Activation) -> str:
    """Formula and parameters, for people."""
    return f"{activation.name}({', '.join(['x', *(name for name, _ in activation.params)])}) = {activation.formula}"


def _revive(name: str, fingerprint: str = "", equation: str = "") -> ActivationModule:
    """An empty module for unpickling to fill, by its activation's name and, if it was defined, what it was.

    Raises:
        LookupError: that is not known here.
    """
    cls = _defined.get((name, fingerprint)) if fingerprint else _modules.get(name)
    if cls is None and name not in _modules:
        raise LookupError(
            f"the activation {name!r} is not defined in this process; define it before loading a module of it, in a file that "
            "worker processes import too (not under if __name__ == '__main__'), or with jitact.load_folder"
        )
    if cls is None:
        raise LookupError(
            f"the activation {name!r} is another here than where this was saved: there {equation}, here "
            f"{_equation(_modules[name].activation)}; define it as it was before loading (and as it is again afterwards), or "
            "load a state_dict into a new model"
        )
    return cls.__new__(cls)


def make_module(activation: Activation) -> type[ActivationModule]:
    """The ``ModelNew`` class of an activation."""
    members = {
        "activation": activation,
        "Model": activation.module if _takes_no_arguments(activation.module) else _make_reference(activation),
        "__doc__": _describe_activation(activation),
        "__module__": __name__,
        "__signature__": activation.signature,
    }
    cls = type(activation.title, (ActivationModule,), members)
    _modules[activation.name] = cls
    if activation.fingerprint:
        _defined[activation.name, activation.fingerprint] = cls
    return cls


def __getattr__(title: str) -> type[ActivationModule]:
    """A class that :func:`make_module` made, by its title: where pickles of the class itself, or of its ``Model``, look."""
    for cls in tuple(_modules.values()):
        if cls.__name__ == title:
            return cls
    raise AttributeError(f"module {__name__!r} has no attribute {title!r}")


def make_function(activation: Activation) -> Callable[..., Tensor]:
    """The function of an activation: ``f(x, *params, inplace=False, save=None, fast_math=False)``. Always the same one."""
    return activation.function


def _make_function(activation: Activation) -> Callable[..., Tensor]:
    defaults = tuple(default for _, default in activation.params)

    def function(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not args and not kwargs:
            return run(x, activation, defaults, False, None, False)
        options = _bind(activation, args, kwargs)
        params = tuple([options[name] for name, _ in activation.params])
        return run(
            x, _variant(activation, options), params, options.get("inplace", False), options["save"], options["fast_math"]
        )

    function.__name__ = function.__qualname__ = activation.name
    function.__module__ = __package__  # where pickles and torch.fx look for it
    function.__doc__ = _describe_activation(activation)
    x = Parameter("x", Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor)
    function.__signature__ = activation.signature.replace(parameters=[x, *activation.signature.parameters.values()])
    return function


def _takes_no_arguments(module: type[nn.Module] | None) -> bool:
    if module is None:
        return False
    init = module.__init__
    return init.__code__.co_argcount == 1 + len(init.__defaults__ or ())  # inspect.signature tells the same, more slowly


def _make_reference(activation: Activation) -> type[nn.Module]:
    """PyTorch's counterpart as a module, where ``torch.nn`` has none, or none that has the defaults of the table."""

    class Model(nn.Module):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            options = _bind(activation, args, kwargs)
            self.params = [options[name] for name, _ in activation.params]

        def forward(self, x: Tensor) -> Tensor:
            return activation.reference(x, *self.params)

    Model.__qualname__ = f"{activation.title}.Model"
    return Model


def _describe_activation(activation: Activation) -> str:
    saves = " | ".join(f'"{save}"' for save in activation.saves)
    lines = [
        f"{activation.name}(x) = {activation.formula}",
        "",
        f"For {ACCEPTED}, of any shape and strides, on CPU and CUDA; compiled at first use.",
        f"save={saves}: what backward keeps; {activation.saves[0]} is the default.",
        "fast_math: use a build with -use_fast_math.",
        activation.notes,
    ]
    return "\n".join(lines).rstrip() + "\n"


BIT, INPUT, INPUT_OUTPUT, OUTPUT_INPUT = ("bit", "input"), ("input",), ("input", "output"), ("output", "input")


def _positive(name: str, index: int = 0, save: str | None = None) -> tuple[Requirement, ...]:
    return (Requirement(f"{name} > 0", lambda *params: params[index] > 0, save),)


# fmt: off
TABLE: tuple[Activation, ...] = (
    # Piecewise linear: one bit per element is all that backward needs.
    Activation("relu", "ReLU", "max(x, 0)", F.relu, BIT, inplace=True, module=nn.ReLU),
    Activation("leaky_relu", "LeakyReLU", "x for x > 0, else negative_slope x", F.leaky_relu, BIT, (("negative_slope", 0.01),),
               inplace=True, module=nn.LeakyReLU),
    Activation("relu6", "ReLU6", "clamp(x, 0, 6)", F.relu6, BIT, inplace=True, module=nn.ReLU6),
    Activation("hardtanh", "Hardtanh", "clamp(x, min_val, max_val)", F.hardtanh, BIT, (("min_val", -1.0), ("max_val", 1.0)),
               inplace=True, module=nn.Hardtanh, requires=(Requirement("min_val <= max_val", lambda low, high: low <= high),)),
    Activation("hardsigmoid", "Hardsigmoid", "clamp(x + 3, 0, 6) / 6", F.hardsigmoid, BIT, inplace=True, module=nn.Hardsigmoid,
               exact=ref.exact_hardsigmoid),
    Activation("threshold", "Threshold", "x for x > threshold, else value", F.threshold, BIT,
               (("threshold", 0.1), ("value", 20.0)), inplace=True, module=nn.Threshold,
               notes="PyTorch has no defaults for threshold and value; these are its documentation's."),
    Activation("hardshrink", "Hardshrink", "0 for |x| <= lambd, else x", F.hardshrink, BIT, (("lambd", 0.5),),
               module=nn.Hardshrink),
    Activation("softshrink", "Softshrink", "x - clamp(x, -lambd, lambd)", F.softshrink, BIT, (("lambd", 0.5),),
               module=nn.Softshrink, requires=(Requirement("0 <= lambd < inf", lambda lambd: 0 <= lambd < math.inf),)),
    Activation("sparse_sigmoid", "SparseSigmoid", "clamp((x + 1) / 2, 0, 1)", ref.sparse_sigmoid, BIT,
               exact=ref.exact_sparse_sigmoid),

    # Smooth, with a slope that the output gives too.
    Activation("sigmoid", "Sigmoid", "1 / (1 + exp(-x))", torch.sigmoid, OUTPUT_INPUT, module=nn.Sigmoid,
               exact=ref.exact_sigmoid, gradient_from_output=ref.sigmoid_from_output),
    Activation("tanh", "Tanh", "tanh(x)", torch.tanh, OUTPUT_INPUT, module=nn.Tanh, gradient_from_output=ref.tanh_from_output),
    Activation("softsign", "Softsign", "x / (1 + |x|)", F.softsign, INPUT_OUTPUT, module=nn.Softsign,
               gradient_from_output=ref.softsign_from_output),
    Activation("elu", "ELU", "x for x > 0, else alpha (exp(x) - 1)", F.elu, INPUT_OUTPUT, (("alpha", 1.0),), inplace=True,
               module=nn.ELU, exact=ref.exact_elu, gradient_from_output=ref.elu_from_output,
               requires=_positive("alpha", save="output")),
    Activation("celu", "CELU", "max(x, 0) + min(alpha (exp(x / alpha) - 1), 0)", F.celu, INPUT_OUTPUT, (("alpha", 1.0),),
               inplace=True, module=nn.CELU, exact=ref.exact_celu, gradient_from_output=ref.celu_from_output,
               requires=_positive("alpha")),
    Activation("selu", "SELU", "S x for x > 0, else S A (exp(x) - 1); S = 1.0507..., A = 1.6732...", F.selu, INPUT_OUTPUT,
               inplace=True, module=nn.SELU, exact=ref.exact_selu, gradient_from_output=ref.selu_from_output,
               notes="fast_math=True computes exp(x) - 1 without expm1, without a branch: absolute error up to 5e-7."),
    Activation("softplus", "Softplus", "log(1 + exp(beta x)) / beta, x where beta x > threshold", F.softplus, INPUT_OUTPUT,
               (("beta", 1.0), ("threshold", 20.0)), module=nn.Softplus, exact=ref.exact_softplus,
               gradient_from_output=ref.softplus_from_output,
               requires=(*_positive("beta"), Requirement("threshold >= 20", lambda beta, limit: limit >= 20, "output"))),
    Activation("logsigmoid", "LogSigmoid", "-log(1 + exp(-x))", F.logsigmoid, INPUT_OUTPUT, module=nn.LogSigmoid,
               gradient_from_output=ref.logsigmoid_from_output),
    Activation("relu2", "ReLUSquared", "max(x, 0)^2", ref.relu2, INPUT_OUTPUT, gradient_from_output=ref.relu2_from_output,
               aliases=("squared_relu",)),
    Activation("squareplus", "Squareplus", "(x + sqrt(x^2 + b)) / 2", ref.squareplus, INPUT_OUTPUT, (("b", 4.0),),
               exact=ref.exact_squareplus, gradient_from_output=ref.squareplus_from_output, requires=_positive("b")),
    Activation("softcap", "Softcap", "c tanh(x / c)", ref.softcap, INPUT_OUTPUT, (("c", 30.0),),
               gradient_from_output=ref.softcap_from_output, requires=_positive("c")),
    Activation("sqrtsoftplus", "SqrtSoftplus", "sqrt(log(1 + exp(x)))", ref.sqrtsoftplus, INPUT_OUTPUT,
               exact=ref.exact_sqrtsoftplus, gradient_from_output=ref.sqrtsoftplus_from_output),

    # Backward needs x.
    Activation("gelu", "GELU", "x cdf(x), cdf of the standard normal distribution", F.gelu, INPUT, module=nn.GELU,
               exact=ref.exact_gelu, variant=("approximate", {"none": "gelu", "tanh": "gelu_tanh"}), aliases=("gelu_python",)),
    Activation("gelu_tanh", "GELUTanh", "x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2", ref.gelu_tanh, INPUT,
               exact=ref.exact_gelu_tanh,
               aliases=("gelu_new", "new_gelu", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh")),
    Activation("silu", "SiLU", "x sigmoid(x)", F.silu, INPUT, inplace=True, module=nn.SiLU, exact=ref.exact_silu,
               aliases=("swish",)),
    Activation("mish", "Mish", "x tanh(softplus(x))", F.mish, INPUT, inplace=True, module=nn.Mish, exact=ref.exact_mish),
    Activation("hardswish", "Hardswish", "x clamp(x + 3, 0, 6) / 6", F.hardswish, INPUT, inplace=True, module=nn.Hardswish,
               exact=ref.exact_hardswish, aliases=("hard_silu",)),
    Activation("tanhshrink", "Tanhshrink", "x - tanh(x)", F.tanhshrink, INPUT, module=nn.Tanhshrink,
               exact=ref.exact_tanhshrink),
    Activation("quick_gelu", "QuickGELU", "x sigmoid(1.702 x)", ref.quick_gelu, INPUT, exact=ref.exact_quick_gelu),
    Activation("gelu_10", "ClippedGELU", "clamp(gelu(x), -10, 10)", ref.gelu_10, INPUT, exact=ref.exact_gelu_10),
    Activation("laplace", "Laplace", "(1 + erf((x - mu) / (sigma sqrt(2)))) / 2", ref.laplace, INPUT,
               (("mu", 0.707107), ("sigma", 0.282095)), exact=ref.exact_laplace, requires=_positive("sigma", 1)),
    Activation("snake", "Snake", "x + sin(alpha x)^2 / alpha", ref.snake, INPUT, (("alpha", 1.0),),
               requires=(Requirement("alpha != 0", lambda alpha: alpha != 0),)),
    Activation("sparse_plus", "SparsePlus", "0 for x <= -1, x for x >= 1, else (x + 1)^2 / 4", ref.sparse_plus, INPUT),
)
# fmt: on
