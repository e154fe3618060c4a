"""Activations that take tensors beside ``x``: prelu and xielu, which learn weights, and rrelu, which draws random slopes.

Each is a module, in place of PyTorch's or transformers', a function and a record; :data:`LEARNED` lists them. How their kernel
files get weights and random numbers is told in ``kernels/weights.cuh`` and ``kernels/random.cuh``.

Inside torch.func's transforms, in forward mode and for second derivatives by weights they are PyTorch's formulas: rare paths,
which need rules for batches and tangents that elementwise kernels cannot give to sums and random numbers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from inspect import Parameter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import kernels
from .activations import OPTIONS, TABLE, Activation, ActivationModule
from .autograd import ACCEPTED, DTYPES, _describe, _transformed, by_token, run
from .kernels import KernelSource

__all__ = ["LEARNED", "XIELU", "PReLU", "RReLU", "prelu", "rrelu", "xielu"]


@dataclass(eq=False)
class Learned(Activation):
    """The record of an activation whose functions take tensors beside ``x``.

    Attributes:
        extras: what the build is told of those tensors; ``kernels/call.h`` lists it.
        learned: how many of them have gradients.
        formula_of: the activation in PyTorch, ``formula_of(x, *tensors, *params)``, differentiable as often as wanted.
        constructor: arguments of the module with their defaults, as PyTorch's has them.
    """

    extras: tuple[str, ...] = ()
    learned: int = 0
    formula_of: Callable[..., Tensor] | None = None
    constructor: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def source(self) -> KernelSource:
        """The kernel file, followed by the loops that its functions fit."""
        plain = KernelSource.from_file(self.name, tuple(name for name, _ in self.params), (*self.saves, *self.extras))
        text = f'{plain.text}\n#include "launch_extras.cuh"\n'
        return KernelSource(plain.name, plain.params, plain.saves, text, plain.path)

    @cached_property
    def signature(self) -> inspect.Signature:
        """Of the constructor: PyTorch's arguments, then ``save`` and ``fast_math``."""
        positional = [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD, default=d) for n, d in self.constructor]
        keyword = [Parameter(n, Parameter.KEYWORD_ONLY, default=d) for n, d in OPTIONS.items()]
        return inspect.Signature([*positional, *keyword])


@dataclass(eq=False)
class Config:
    """How a call runs, everything but the tensors."""

    record: Learned
    library: str
    params: tuple[float, ...]
    inplace: bool

    def operator(self, kind: str) -> Callable:
        """``jitact::<library>_<kind>``."""
        return getattr(torch.ops.jitact, f"{self.library}_{kind}").default


def _configure(token: str, fast_math: bool, params: tuple[float, ...] = (), inplace: bool = False) -> Config:
    return Config(by_token[token], _load(token, fast_math), params, inplace)


_configure_once = lru_cache(maxsize=4096)(_configure)


def _load(token: str, fast_math: bool) -> str:
    """Compiles what has not been, and returns the first part of the operators' names."""
    record = by_token[token]
    name = kernels.load(record.source, fast_math=fast_math).name
    if record.learned and name not in _faked:
        _faked.add(name)
        for kind, with_dx in (("backward_weights", False), ("backward_all", True)):
            torch.library.register_fake(f"jitact::{name}_{kind}", _fake_gradients(record.learned, with_dx))
    return name


_load._dynamo_marked_constant = True  # as in autograd.py
_faked: set[str] = set()


def _fake_gradients(learned: int, with_dx: bool) -> Callable:
    """What backward_weights and backward_all return, in shape, strides and dtype."""

    def fake(dy: Tensor, x: Tensor, *weights: Any) -> Any:
        gradients = tuple(torch.empty_like(t) for t in ((x,) if with_dx else ()) + weights[:learned])
        return gradients if len(gradients) > 1 else gradients[0]

    return fake


# None of these sees torch.func, so they have forward(ctx, ...): with setup_context apart, PyTorch looks at the signature of
# forward in every call, which takes longer than all the rest.


class _KeepInput(torch.autograd.Function):
    """Forward, keeping ``x`` and the weights: the gradient of a weight needs ``x`` itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, config: Config, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        ctx.config = config
        return config.operator("forward")(x, *weights, *config.params)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple:
        (x, *weights), config = ctx.saved_tensors, ctx.config
        if dy is None:
            return None, None, *[None] * len(weights)
        way = _way()
        if way == "formula":
            dx, *dw = _formula_gradients(config, dy, x, *weights)
        elif way == "differentiable":
            dx, *dw = _Gradients.apply(dy, x, config, *weights)
        else:
            dx, *dw = _gradients(config, dy, x, weights, ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:]))
        return dx, None, *dw, *[None] * (len(weights) - len(dw))


class _Gradients(torch.autograd.Function):
    """The gradients of ``x`` and of the weights as functions of ``dy``, ``x`` and the weights, themselves differentiable."""

    @staticmethod
    def forward(ctx: Any, dy: Tensor, x: Tensor, config: Config, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(dy, x, *weights)
        ctx.config = config
        return tuple(_gradients(config, dy, x, weights, True, True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        _, vjp = torch.func.vjp(lambda *tensors: _formula_gradients(ctx.config, *tensors), *ctx.saved_tensors)
        dy, x, *weights = vjp(gradients)
        return dy, x, None, *weights


class _KeepBit(torch.autograd.Function):
    """Forward, keeping one bit per element and the tensors beside ``x``, none of which has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, config: Config, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        # The order of the bits is that of y's memory; where x is a view with gaps, that of a dense copy's.
        if config.inplace:
            mask = config.operator("forward_bit_")(x, *tensors, *config.params)
            ctx.mark_dirty(x)
            y, ctx.strides = x, torch.empty_like(x, device="meta").stride()
        else:
            y, mask = config.operator("forward_bit")(x, *tensors, *config.params)
            ctx.strides = y.stride()
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(mask, *tensors)
        ctx.set_materialize_grads(False)
        ctx.config = config
        return y, mask

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple:
        (mask, *tensors), config = ctx.saved_tensors, ctx.config
        none = (None,) * (1 + len(tensors))
        if dy is None:
            return None, *none
        gradient = config.operator("backward_from_bit")
        if _way() != "operators":  # the slope is constant: dy times it has all derivatives
            ones = torch.empty_strided(dy.shape, ctx.strides, dtype=dy.dtype, device=dy.device).fill_(1)
            return dy * gradient(ones, mask, *tensors, *config.params), *none
        if dy.stride() != ctx.strides:
            dy = torch.empty_strided(dy.shape, ctx.strides, dtype=dy.dtype, device=dy.device).copy_(dy)
        return gradient(dy, mask, *tensors, *config.params), *none


def _way() -> str:
    """How to compute gradients: by "operators", by operators that are "differentiable", or by "formula"."""
    if torch.compiler.is_compiling():  # which knows no second derivatives
        return "operators"
    if _transformed():
        return "formula"
    return "differentiable" if torch.is_grad_enabled() else "operators"


def _gradients(config: Config, dy: Tensor, x: Tensor, weights: Any, with_dx: bool, with_dw: bool) -> list[Tensor | None]:
    """Of ``x`` and, if wanted, of the learned weights."""
    tensors = (dy, x, *weights, *config.params)
    if not with_dw:
        return [config.operator("backward")(*tensors)]
    if with_dx:
        return list(config.operator("backward_all")(*tensors))
    dw = config.operator("backward_weights")(*tensors)
    return [None, dw] if isinstance(dw, Tensor) else [None, *dw]


def _formula_gradients(config: Config, dy: Tensor, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Of ``x`` and of the learned weights, in PyTorch."""
    learned, fixed = weights[: config.record.learned], weights[config.record.learned :]
    _, vjp = torch.func.vjp(lambda x, *learned: config.record.formula_of(x, *learned, *fixed, *config.params), x, *learned)
    return vjp(dy)


def _run_learned(x: Tensor, record: Learned, weights: tuple[Tensor, ...], fast_math: bool) -> Tensor:
    """Applies an activation that learns weights."""
    compiling = torch.compiler.is_compiling()
    if not compiling and _transformed():
        return record.formula_of(x, *weights)
    config = (_configure if compiling else _configure_once)(record.token, fast_math)
    if torch.is_grad_enabled():
        if any([weight.requires_grad for weight in weights[: record.learned]]):
            return _KeepInput.apply(x, config, *weights)
        if x.requires_grad:
            return _KeepBit.apply(x, config, *weights)[0] if record is PRELU else _KeepInput.apply(x, config, *weights)
    return config.operator("forward")(x, *weights)


def _check_input(record: Learned, x: Any, save: str | None = None) -> None:
    if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.layout is not torch.strided:
        raise TypeError(f"{record.name}: expected {ACCEPTED}, got {_describe(x)}")
    _check_save(record, save)


def _check_save(record: Learned, save: str | None) -> None:
    if save not in (None, *record.saves):
        raise ValueError(f"{record.name}: save={save!r} is not possible; choose from {', '.join(map(repr, record.saves))}")


def _check_weight(record: Learned, name: str, weight: Any, x: Tensor) -> None:
    if not isinstance(weight, Tensor) or weight.dtype not in DTYPES or weight.layout is not torch.strided:
        raise TypeError(f"{record.name}: {name} must be {ACCEPTED}, got {_describe(weight)}")
    if weight.device != x.device:
        raise ValueError(f"{record.name}: {name} must be on the device of x, {x.device}, got one on {weight.device}")


class LearnedModule(ActivationModule):
    """What the modules here have in common: they are pickled as any class of a module is."""

    activation: Learned
    __reduce__ = object.__reduce__

    def _take(self, save: str | None, fast_math: bool) -> None:
        _check_save(self.activation, save)
        self.save, self.fast_math, self.inplace = save, fast_math, False

    def _options(self) -> list[str]:
        shown = [f"{name}=True" for name in ("inplace", "fast_math") if getattr(self, name)]
        return shown + ([f"save={self.save!r}"] if self.save else [])


# prelu.


def prelu(x: Tensor, weight: Tensor, *, save: str | None = None, fast_math: bool = False) -> Tensor:
    """``x`` for ``x > 0``, else ``weight * x``: ``torch.nn.functional.prelu``.

    Backward keeps ``x``, which the gradient of the weight needs; where the weight has none, one bit per element. The gradients
    of ``x`` and of the weight are made in one pass; the sums are in float32 (float64 for float64), in an order that does not
    depend on the number of threads.

    Args:
        x: a dense float32, float64, float16 or bfloat16 tensor, of any shape and strides, on a CPU or a GPU.
        weight: one value, or one for each index of dimension 1 of ``x``; of ``x``'s dtype and device. Under autocast both are
            cast, as PyTorch casts them.
        save: "input", or None, which is the same.
        fast_math: use a build with -use_fast_math.

    Raises:
        TypeError: an argument is no such tensor, or the dtypes differ.
        ValueError: the weight has another size, or is on another device.
    """
    _check_input(PRELU, x, save)
    _check_weight(PRELU, "weight", weight, x)
    if torch.is_autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, weight.dtype):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if weight.dtype != x.dtype:
        raise TypeError(f"prelu: weight must be of x's dtype, {_name(x.dtype)}, got {_describe(weight)}")
    if weight.dim() > 1:
        raise ValueError(f"prelu: weight must have at most 1 dimension, got {weight.dim()}: {tuple(weight.shape)}")
    channels = x.shape[1] if x.dim() > 1 else 1
    if weight.numel() not in (1, channels) or (weight.numel() != 1 and x.dim() == 0):
        what = f"1 or {channels} values, as dimension 1 of x has {channels}" if x.dim() > 1 else f"1 value for a {x.dim()}-d x"
        raise ValueError(f"prelu: weight must hold {what}; got {weight.numel()}")
    return _run_learned(x, PRELU, (weight,), fast_math)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


PRELU = Learned(
    name="prelu",
    title="PReLU",
    formula="x for x > 0, else weight x; one weight, or one for each channel, is learned",
    reference=lambda x: F.prelu(x, x.new_full((1,), 0.25)),
    module=nn.PReLU,
    notes="Backward keeps x, which the weight's gradient needs; one bit per element where the weight has none.",
    extras=("bit", "weights=1", "learned=1", "channels"),
    learned=1,
    formula_of=F.prelu,
    constructor=(("num_parameters", 1), ("init", 0.25), ("device", None), ("dtype", None)),
)


class PReLU(LearnedModule, nn.PReLU):
    """``torch.nn.PReLU``, with its arguments, parameter and state; see :func:`prelu`.

    Args:
        num_parameters: 1, or the size of dimension 1 of the inputs.
        init: what the weight begins with.
        device: of the weight.
        dtype: of the weight; inputs must be of the same.
        save: "input", or None, which is the same.
        fast_math: use a build with -use_fast_math.
    """

    activation = PRELU
    Model = nn.PReLU
    __signature__ = PRELU.signature

    def __init__(
        self,
        num_parameters: int = 1,
        init: float = 0.25,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        save: str | None = None,
        fast_math: bool = False,
    ) -> None:
        """Makes the weight, ``num_parameters`` times ``init``."""
        nn.PReLU.__init__(self, num_parameters, init, device, dtype)
        self._take(save, fast_math)

    def forward(self, x: Tensor) -> Tensor:
        """Applies :func:`prelu`."""
        return prelu(x, self.weight, save=self.save, fast_math=self.fast_math)

    def extra_repr(self) -> str:
        """The size of the weight, and the options that were chosen."""
        return ", ".join([nn.PReLU.extra_repr(self), *self._options()])


# xielu.


def _xielu_formula(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """As transformers' ``XIELUActivation`` has it."""
    alpha_p, alpha_n, beta, eps = (t.reshape(()) for t in (alpha_p, alpha_n, beta, eps))
    p, n = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    return torch.where(x > 0, p * x * x + beta * x, (torch.expm1(torch.min(x, eps)) - x) * n + beta * x)


def xielu(
    x: Tensor,
    alpha_p: Tensor,
    alpha_n: Tensor,
    beta: float | Tensor = 0.5,
    eps: float | Tensor = -1e-6,
    *,
    save: str | None = None,
    fast_math: bool = False,
) -> Tensor:
    """``p x^2 + beta x`` for ``x > 0``, else ``(n + beta) (exp(min(x, eps)) - 1 - x) + beta x``: transformers' xIELU.

    ``p = softplus(alpha_p)`` and ``n = softplus(alpha_n)`` are computed in the kernel. Gradients are those of transformers'
    formula; between ``eps`` and 0, both included, that is ``-n``. At -inf this is the limit, inf, where the formula is NaN.
    Backward keeps ``x``. Source: Huang and Schlag, Deriving Activation Functions Using Integration (2024).

    Args:
        x: a dense float32, float64, float16 or bfloat16 tensor, of any shape and strides, on a CPU or a GPU.
        alpha_p: one value, learned, on ``x``'s device. Where its dtype differs from ``x``'s, the result is of the dtype that
            PyTorch promotes both to.
        alpha_n: as ``alpha_p``.
        beta: a number, or a tensor that holds one and has no gradient.
        eps: as ``beta``; not positive.
        save: "input", or None, which is the same.
        fast_math: use a build with -use_fast_math.

    Raises:
        TypeError: an argument is no such tensor.
        ValueError: a weight holds more than one value, is on another device, or, of beta and eps, has a gradient.
    """
    _check_input(XIELU_RECORD, x, save)
    given = {"alpha_p": alpha_p, "alpha_n": alpha_n, "beta": beta, "eps": eps}
    for name in ("beta", "eps"):
        if isinstance(given[name], (int, float)) and not isinstance(given[name], bool):
            given[name] = x.new_full((), given[name])
        elif isinstance(given[name], Tensor) and given[name].requires_grad:
            raise ValueError(f"xielu: {name} is not learned, got a tensor that requires a gradient")
    for name, weight in given.items():
        _check_weight(XIELU_RECORD, name, weight, x)
        if weight.numel() != 1:
            raise ValueError(f"xielu: {name} must hold one value, got {weight.numel()}: {tuple(weight.shape)}")
    dtype = reduce(torch.promote_types, (x.dtype, alpha_p.dtype, alpha_n.dtype))
    x, *weights = (t if t.dtype is dtype else t.to(dtype) for t in (x, *given.values()))
    return _run_learned(x, XIELU_RECORD, tuple(weights), fast_math)


def _xielu_alphas(alpha_p_init: float, alpha_n_init: float, beta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What alpha_p and alpha_n begin with: the inverse of softplus, of alpha_n less beta."""
    return tuple(torch.tensor([math.log(math.expm1(init))], dtype=dtype) for init in (alpha_p_init, alpha_n_init - beta))


class XIELUModel(nn.Module):
    """xIELU in PyTorch, as transformers' ``XIELUActivation`` has it where its CUDA extension is not installed."""

    def __init__(
        self,
        alpha_p_init: float = 0.8,
        alpha_n_init: float = 0.8,
        beta: float = 0.5,
        eps: float = -1e-6,
        dtype: torch.dtype | None = torch.bfloat16,
        with_vector_loads: bool = False,
    ) -> None:
        """Makes the parameters ``alpha_p`` and ``alpha_n`` and the buffers ``beta`` and ``eps``."""
        super().__init__()
        alpha_p, alpha_n = _xielu_alphas(alpha_p_init, alpha_n_init, beta, dtype)
        self.alpha_p, self.alpha_n = nn.Parameter(alpha_p), nn.Parameter(alpha_n)
        self.register_buffer("beta", torch.tensor(beta, dtype=dtype))
        self.register_buffer("eps", torch.tensor(eps, dtype=dtype))
        self.with_vector_loads = with_vector_loads

    def forward(self, x: Tensor) -> Tensor:
        """Applies the formula."""
        return _xielu_formula(x, self.alpha_p, self.alpha_n, self.beta, self.eps)


def _xielu_default(x: Tensor) -> Tensor:
    """With the parameters that a new module has, in bfloat16."""
    model = XIELUModel()
    return _xielu_formula(x, *(t.detach().to(x.device, x.dtype) for t in (model.alpha_p, model.alpha_n, model.beta, model.eps)))


XIELU_RECORD = Learned(
    name="xielu",
    title="XIELU",
    formula="p x^2 + beta x for x > 0, else (n + beta) (exp(min(x, eps)) - 1 - x) + beta x; p = softplus(alpha_p) and "
    "n = softplus(alpha_n) are learned",
    reference=_xielu_default,
    aliases=("xielu_activation",),
    extras=("weights=4", "learned=2"),
    learned=2,
    formula_of=_xielu_formula,
    constructor=(("alpha_p_init", 0.8), ("alpha_n_init", 0.8), ("beta", 0.5), ("eps", -1e-6), ("dtype", torch.bfloat16),
                 ("with_vector_loads", False)),
)  # fmt: skip


class XIELU(LearnedModule, XIELUModel):
    """transformers' ``XIELUActivation``, with its arguments, parameters, buffers and state; see :func:`xielu`.

    Args:
        alpha_p_init: ``softplus(alpha_p)`` of a new module.
        alpha_n_init: ``beta + softplus(alpha_n)`` of a new module; above ``beta``.
        beta: kept as a buffer.
        eps: kept as a buffer.
        dtype: of parameters and buffers.
        with_vector_loads: accepted, as transformers has it; it changes nothing.
        save: "input", or None, which is the same.
        fast_math: use a build with -use_fast_math.
    """

    activation = XIELU_RECORD
    Model = XIELUModel
    __signature__ = XIELU_RECORD.signature

    def __init__(
        self,
        alpha_p_init: float = 0.8,
        alpha_n_init: float = 0.8,
        beta: float = 0.5,
        eps: float = -1e-6,
        dtype: torch.dtype | None = torch.bfloat16,
        with_vector_loads: bool = False,
        *,
        save: str | None = None,
        fast_math: bool = False,
    ) -> None:
        """Makes the parameters ``alpha_p`` and ``alpha_n`` and the buffers ``beta`` and ``eps``."""
        XIELUModel.__init__(self, alpha_p_init, alpha_n_init, beta, eps, dtype, with_vector_loads)
        self._take(save, fast_math)

    def forward(self, x: Tensor) -> Tensor:
        """Applies :func:`xielu`."""
        return xielu(x, self.alpha_p, self.alpha_n, self.beta, self.eps, save=self.save, fast_math=self.fast_math)

    def extra_repr(self) -> str:
        """The options that were chosen."""
        return ", ".join(self._options())


# rrelu.


def _rrelu_formula(x: Tensor, lower: float, upper: float) -> Tensor:
    return torch.where(x <= 0, (torch.rand_like(x) * (upper - lower) + lower) * x, x)


def rrelu(
    x: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
    *,
    save: str | None = None,
    fast_math: bool = False,
) -> Tensor:
    """``x`` for ``x > 0``, else ``slope * x``: ``torch.nn.functional.rrelu``.

    In training each element has a slope of its own, uniform between ``lower`` and ``upper``; else the slope is their mean, as
    leaky_relu has it. Backward keeps one bit per element and 8 bytes, from which it makes the slopes again.

    Slopes follow from PyTorch's generator of ``x``'s device, so ``torch.manual_seed`` repeats them (they are not those that
    PyTorch's own rrelu would draw), and from the place of an element in memory: inputs that lie alike get the same, on a CPU
    and on a GPU, if their dtypes are of one size.

    Args:
        x: a dense float32, float64, float16 or bfloat16 tensor, of any shape and strides, on a CPU or a GPU.
        lower: the least slope.
        upper: the greatest slope.
        training: whether slopes are random.
        inplace: overwrite ``x``, and return it.
        save: "bit", or None, which is the same.
        fast_math: use a build with -use_fast_math.

    Raises:
        TypeError: ``x`` is no such tensor, or a bound is no number.
        ValueError: ``lower`` is above ``upper``, or a bound is not finite.
        RuntimeError: in place on a leaf that requires a gradient.
    """
    _check_input(RRELU, x, save)
    _check_bounds(lower, upper)
    if not training:
        return run(x, _LEAKY_RELU, ((lower + upper) / 2,), inplace, None, fast_math)
    compiling = torch.compiler.is_compiling()
    if not compiling and _transformed():
        y = _rrelu_formula(x, lower, upper)
        return x.copy_(y) if inplace else y
    config = (_configure if compiling else _configure_once)(RRELU.token, fast_math, (float(lower), float(upper)), inplace)
    if not (torch.is_grad_enabled() and x.requires_grad):
        y = config.operator("forward_" if inplace else "forward")(x, _seed(x), *config.params)
        return x if inplace else y
    if inplace and x.is_leaf:
        raise RuntimeError("rrelu: a leaf that requires a gradient cannot be changed in place")
    return _KeepBit.apply(x, config, _seed(x))[0]


def _seed(x: Tensor) -> Tensor:
    """From PyTorch's generator, on ``x``'s device: no synchronisation, and a CUDA graph draws anew with each replay."""
    return torch.randint(2**63 - 1, (1,), device=x.device)


def _check_bounds(lower: float, upper: float) -> None:
    for name, value in (("lower", lower), ("upper", upper)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"rrelu: {name} must be a number, got {value!r}")
    if not (-math.inf < lower <= upper < math.inf):
        raise ValueError(f"rrelu: needs finite bounds, lower <= upper, got lower={lower}, upper={upper}")


_LEAKY_RELU = next(record for record in TABLE if record.name == "leaky_relu")

RRELU = Learned(
    name="rrelu",
    title="RReLU",
    formula="x for x > 0, else slope x; in training a random slope for each element, else the mean of lower and upper",
    reference=lambda x, lower, upper: F.rrelu(x, lower, upper),
    saves=("bit",),
    params=(("lower", 1 / 8), ("upper", 1 / 3)),
    inplace=True,
    module=nn.RReLU,
    notes="Slopes are made again in backward, from 8 bytes that PyTorch's generator drew; no noise is kept.",
    extras=("random",),
    formula_of=_rrelu_formula,
    constructor=(("lower", 1 / 8), ("upper", 1 / 3), ("inplace", False)),
)


class RReLU(LearnedModule, nn.RReLU):
    """``torch.nn.RReLU``, with its arguments; see :func:`rrelu`.

    Args:
        lower: the least slope.
        upper: the greatest slope.
        inplace: overwrite the input.
        save: "bit", or None, which is the same.
        fast_math: use a build with -use_fast_math.
    """

    activation = RRELU
    Model = nn.RReLU
    __signature__ = RRELU.signature

    def __init__(
        self,
        lower: float = 1 / 8,
        upper: float = 1 / 3,
        inplace: bool = False,
        *,
        save: str | None = None,
        fast_math: bool = False,
    ) -> None:
        """Checks and keeps the options."""
        nn.RReLU.__init__(self, lower, upper, inplace)
        _check_bounds(lower, upper)
        self._take(save, fast_math)
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        """Applies :func:`rrelu`, random while the module is in training."""
        return rrelu(x, self.lower, self.upper, self.training, self.inplace, save=self.save, fast_math=self.fast_math)

    def extra_repr(self) -> str:
        """The bounds, and the options that were chosen."""
        return ", ".join([f"lower={self.lower}", f"upper={self.upper}", *self._options()])


LEARNED: tuple[tuple[Learned, type[LearnedModule], Callable[..., Tensor]], ...] = (
    (PRELU, PReLU, prelu),
    (RRELU, RReLU, rrelu),
    (XIELU_RECORD, XIELU, xielu),
)
"""Records, modules and functions, to be registered."""
