"""What an activation is: its record, the autograd function that runs it, the module class made from it, and the table."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from inspect import Parameter
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from . import kernels
from .kernels import KernelSource

__all__ = ["DTYPES", "SAVES", "TABLE", "Activation", "ActivationModule", "make_function", "make_module", "run"]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SAVES = ("input", "output", "bit")
ACCEPTED = "a dense float32, float64, float16 or bfloat16 tensor"
OPTIONS = {"save": None, "fast_math": False}  # what every constructor takes beside torch.nn's arguments


_by_token: dict[str, Activation] = {}


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

    def __post_init__(self) -> None:
        """Gives the record a token, a constant that torch.compile can carry: the name, numbered when it is defined again."""
        versions = sum(record.name == self.name for record in _by_token.values())
        self.token = f"{self.name}.{versions + 1}" if versions else self.name
        _by_token[self.token] = self

    @cached_property
    def source(self) -> KernelSource:
        return KernelSource.from_file(self.name, tuple(name for name, _ in self.params), self.saves)

    @cached_property
    def signature(self) -> inspect.Signature:
        """Of the constructor: parameters, ``inplace`` where ``torch.nn`` has it, then ``save`` and ``fast_math``."""
        defaults = dict(self.params) | ({"inplace": False} if self.inplace else {})
        positional = [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD, default=d) for n, d in defaults.items()]
        keyword = [Parameter(n, Parameter.KEYWORD_ONLY, default=d) for n, d in OPTIONS.items()]
        return inspect.Signature([*positional, *keyword])

    def gradient_reference(self, dy: Tensor, kept: Tensor, params: tuple[float, ...], save: str) -> Tensor:
        """Backward in PyTorch, for ``save`` "input" or "output", differentiable as often as wanted."""
        if save == "output":
            return self.gradient_from_output(dy, kept, *params)
        return torch.func.vjp(lambda x: self.reference(x, *params), kept)[1](dy)[0]


@dataclass(eq=False)
class Config:
    """How a call runs, everything but the tensor: the options, completed, and the operators they lead to."""

    activation: Activation
    params: tuple[float, ...]
    inplace: bool
    save: str
    forward_op: Callable
    backward_op: Callable


def check(activation: Activation, params: tuple[float, ...], save: str | None) -> None:
    """Checks options as a constructor gets them.

    Raises:
        TypeError: a parameter is not a number.
        ValueError: ``save`` is not one of the activation's.
    """
    for (name, _), value in zip(activation.params, params, strict=True):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{activation.name}: {name} must be a number, got {value!r}")
    if save is not None and save not in activation.saves:
        choices = ", ".join(map(repr, activation.saves))
        raise ValueError(f"{activation.name}: save={save!r} is not possible; choose from {choices}")


def configure(activation: Activation, params: tuple[float, ...], inplace: bool, save: str | None, fast_math: bool) -> Config:
    """Completes and checks the options of a call, and compiles what it needs.

    Without ``save``, backward keeps the table's default; in place, the output where that is possible, as it costs nothing.

    Raises:
        TypeError, ValueError: as :func:`check`.
    """
    check(activation, params, save)
    if save is None:
        save = "output" if inplace and activation.saves[0] == "input" and "output" in activation.saves else activation.saves[0]
    library = _load(activation.token, fast_math)
    forward = ("forward_bit" if save == "bit" else "forward") + ("_" if inplace else "")
    backward = "backward" if save == "input" else f"backward_from_{save}"
    ops = [getattr(torch.ops.jitact, f"{library}_{kind}").default for kind in (forward, backward)]
    return Config(activation, tuple([float(p) for p in params]), inplace, save, *ops)


_configure_once = lru_cache(maxsize=4096)(configure)


def _load(token: str, fast_math: bool) -> str:
    return kernels.load(_by_token[token].source, fast_math=fast_math).name


# What torch.compiler.assume_constant_result sets, without its import of the whole compiler: tracing looks no further inside.
_load._dynamo_marked_constant = True


class _Activate(torch.autograd.Function):
    """Forward, keeping for backward what ``config.save`` names.

    Returns ``y``, or ``(y, kept)`` where what backward needs is neither ``x`` nor ``y`` as they are.
    """

    @staticmethod
    def forward(x: Tensor, config: Config) -> Any:
        if not config.inplace:
            return config.forward_op(x, *config.params)
        kept = x.clone() if config.save == "input" else None
        mask = config.forward_op(x, *config.params)
        return x if config.save == "output" else (x, mask if kept is None else kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        x, config = inputs
        if isinstance(output, tuple):
            y, kept = output
            ctx.mark_non_differentiable(kept)
        else:
            y, kept = output, x if config.save == "input" else output
        if config.inplace:
            ctx.mark_dirty(x)
        ctx.save_for_backward(kept)
        ctx.save_for_forward(kept)
        ctx.set_materialize_grads(False)
        ctx.config, ctx.strides = config, y.stride()

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple:
        return None if dy is None else _gradient(ctx, dy), None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, _: Any) -> Any:
        dy = _gradient(ctx, dx)
        return (dy, None) if ctx.config.save == "bit" else dy

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, config: Config) -> tuple:
        return _Activate.apply(x, config), in_dims[0]


class _Gradient(torch.autograd.Function):
    """Backward as a function of ``dy`` and what was kept, itself differentiable."""

    @staticmethod
    def forward(dy: Tensor, kept: Tensor, config: Config) -> Tensor:
        return config.backward_op(dy, kept, *config.params)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        dy, kept, config = inputs
        ctx.save_for_backward(dy, kept)
        ctx.save_for_forward(dy, kept)
        ctx.set_materialize_grads(False)
        ctx.config, ctx.strides = config, output.stride()

    @staticmethod
    def backward(ctx: Any, ddx: Tensor | None) -> tuple:
        if ddx is None:
            return None, None, None
        curvature = _curvature(ctx)
        return _gradient(ctx, ddx), None if curvature is None else ddx * curvature, None

    @staticmethod
    def jvp(ctx: Any, ddy: Tensor | None, dkept: Tensor | None, _: Any) -> Tensor:
        curvature = None if dkept is None else _curvature(ctx)
        if curvature is None:
            return torch.zeros_like(ctx.saved_tensors[0]) if ddy is None else _gradient(ctx, ddy)
        return dkept * curvature if ddy is None else torch.addcmul(_gradient(ctx, ddy), dkept, curvature)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, dy: Tensor, kept: Tensor, config: Config) -> tuple:
        dy, kept = (
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((dy, kept), in_dims, strict=False)
        )
        return _Gradient.apply(dy, kept, config), 0


# torch.compile accepts no Function that defines jvp; it needs neither forward mode nor batching from these.


class _ActivateCompiled(_Activate):
    jvp = torch.autograd.Function.jvp


class _GradientCompiled(_Gradient):
    jvp = torch.autograd.Function.jvp


def _gradient(ctx: Any, dy: Tensor) -> Tensor:
    """``dy`` times the slope: an activation being elementwise, the derivative in forward and in reverse mode alike."""
    kept, config = ctx.saved_tensors[-1], ctx.config
    if config.save == "bit" and dy.stride() != ctx.strides:
        dy = torch.empty_strided(dy.shape, ctx.strides, dtype=dy.dtype, device=dy.device).copy_(dy)
    if not torch.is_grad_enabled():
        return _Gradient.forward(dy, kept, config)
    return (_GradientCompiled if torch.compiler.is_compiling() else _Gradient).apply(dy, kept, config)


def _curvature(ctx: Any) -> Tensor | None:
    """``dy`` times the derivative of the slope by what was kept, from the reference; None where the slope is constant."""
    (dy, kept), config = ctx.saved_tensors, ctx.config
    if "bit" in config.activation.saves:
        return None
    reference = config.activation.gradient_reference
    _, vjp = torch.func.vjp(lambda k: reference(dy, k, config.params, config.save), kept)
    return vjp(torch.ones_like(dy))[0]


def run(
    x: Tensor, activation: Activation, params: tuple[float, ...], inplace: bool, save: str | None, fast_math: bool
) -> Tensor:
    """Applies an activation. What :func:`make_function` and :class:`ActivationModule` call.

    Raises:
        TypeError: ``x`` is not a dense tensor of one of :data:`DTYPES`.
        RuntimeError: in place on a leaf that requires a gradient.
    """
    if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.layout is not torch.strided:
        raise TypeError(f"{activation.name}: expected {ACCEPTED}, got {_describe(x)}")
    compiling = torch.compiler.is_compiling()
    transformed = not compiling and _transformed()
    records = transformed or (torch.is_grad_enabled() and x.requires_grad)
    in_place = inplace and not transformed  # forward mode would want the tangent written in place too
    if not records or (transformed and (save or activation.saves[0]) == "bit"):
        save = "input"  # nothing to keep, or a mask in the order of memory, which vmap hides
    config = (configure if compiling else _configure_once)(activation, params, in_place, save, fast_math)
    if not records:
        y = config.forward_op(x, *config.params)
        return x if in_place else y
    if in_place and x.is_leaf:
        raise RuntimeError(f"{activation.name}: a leaf that requires a gradient cannot be changed in place")
    y = (_ActivateCompiled if compiling else _Activate).apply(x, config)
    y = y[0] if isinstance(y, tuple) else y
    return x.copy_(y) if inplace and transformed else y


def _transformed() -> bool:
    """Whether torch.func transforms or forward-mode AD are at work. Neither has a public query."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def _describe(x: object) -> str:
    if not isinstance(x, Tensor):
        return "None" if x is None else f"a {type(x).__name__}"
    layout = "" if x.layout is torch.strided else f"{str(x.layout).removeprefix('torch.')} "
    return f"a {layout}{str(x.dtype).removeprefix('torch.')} tensor"


class ActivationModule(nn.Module):
    """Base of the classes that :func:`make_module` makes: modules that drop in where ``torch.nn``'s stand."""

    activation: ClassVar[Activation]
    Model: ClassVar[type[nn.Module]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.inplace = False
        for name, value in _bind(self.activation, args, kwargs).items():
            setattr(self, name, value)
        check(self.activation, self._params(), self.save)

    def _params(self) -> tuple[float, ...]:
        return tuple([getattr(self, name) for name, _ in self.activation.params])

    def forward(self, x: Tensor) -> Tensor:
        return run(x, self.activation, self._params(), self.inplace, self.save, self.fast_math)

    def extra_repr(self) -> str:
        shown = [f"{name}={getattr(self, name)}" for name, _ in self.activation.params]
        shown += [f"{name}=True" for name in ("inplace", "fast_math") if getattr(self, name)]
        shown += [f"save={self.save!r}"] if self.save else []
        return ", ".join(shown)

    def __reduce__(self) -> tuple:
        return _revive, (self.activation.name,), self.__dict__

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


def _bind(activation: Activation, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, defaults filled in, with an error that names the activation."""
    try:
        bound = activation.signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{activation.title}{activation.signature}: {error}") from None
    bound.apply_defaults()
    return bound.arguments


_modules: dict[str, type[ActivationModule]] = {}  # by name, to unpickle


def _revive(name: str) -> ActivationModule:
    """An empty module for unpickling to fill. Modules are pickled by name, as a class defined in a notebook has no other."""
    if name not in _modules:
        raise LookupError(f"the activation {name!r} is not defined in this process; define it before loading a module of it")
    return _modules[name].__new__(_modules[name])


def make_module(activation: Activation) -> type[ActivationModule]:
    """The ``ModelNew`` class of an activation."""
    members = {
        "activation": activation,
        "Model": activation.module or _make_reference(activation),
        "__doc__": _describe_activation(activation),
        "__module__": __name__,
        "__signature__": activation.signature,
    }
    _modules[activation.name] = type(activation.title, (ActivationModule,), members)
    return _modules[activation.name]


def make_function(activation: Activation) -> Callable[..., Tensor]:
    """The function of an activation: ``f(x, *params, inplace=False, save=None, fast_math=False)``."""
    defaults = tuple(default for _, default in activation.params)

    def function(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not args and not kwargs:
            return run(x, activation, defaults, False, None, False)
        options = _bind(activation, args, kwargs)
        params = tuple([options[name] for name, _ in activation.params])
        return run(x, activation, params, options.get("inplace", False), options["save"], options["fast_math"])

    function.__name__ = function.__qualname__ = activation.name
    function.__doc__ = _describe_activation(activation)
    x = Parameter("x", Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor)
    function.__signature__ = activation.signature.replace(parameters=[x, *activation.signature.parameters.values()])
    return function


def _make_reference(activation: Activation) -> type[nn.Module]:
    """PyTorch's counterpart as a module, where ``torch.nn`` has none."""

    class Model(nn.Module):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            options = _bind(activation, args, kwargs)
            self.params = [options[name] for name, _ in activation.params]

        def forward(self, x: Tensor) -> Tensor:
            return activation.reference(x, *self.params)

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


SELU_SCALE = 1.0507009873554805
SELU_SCALE_ALPHA = 1.0507009873554805 * 1.6732632423543772

TABLE: tuple[Activation, ...] = (
    Activation("relu", "ReLU", "max(x, 0)", F.relu, ("bit", "input"), inplace=True, module=nn.ReLU),
    Activation("hardsigmoid", "Hardsigmoid", "clamp(x + 3, 0, 6) / 6", F.hardsigmoid, ("bit", "input"), inplace=True,
               module=nn.Hardsigmoid, exact=lambda x: F.relu6(x + 3) / 6),  # PyTorch's float64 gradient holds a float32 1/6
    Activation("selu", "SELU", "S x for x > 0, else S A (exp(x) - 1)", F.selu, ("input", "output"), inplace=True,
               gradient_from_output=lambda dy, y: dy * torch.where(y > 0, SELU_SCALE, y + SELU_SCALE_ALPHA), module=nn.SELU,
               notes="``fast_math=True`` computes exp(x) - 1 without expm1."),
    Activation("softsign", "Softsign", "x / (1 + |x|)", F.softsign, ("input", "output"),
               gradient_from_output=lambda dy, y: dy * (1 - y.abs()) ** 2, module=nn.Softsign),
)  # fmt: skip
