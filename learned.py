"""prelu and xielu, which learn weights, and rrelu, which draws random slopes.

Each is a module, in place of PyTorch's or transformers', a function and a record; :data:`LEARNED` lists them. How their kernel
files get weights and random numbers is told in ``kernels/operands.cuh``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function

from .activations import TABLE, ActivationModule
from .autograd import as_number, check, check_tensor, describe, is_stand_in, run
from .learned_autograd import Learned, run_learned, run_random

__all__ = ["LEARNED", "XIELU", "Learned", "PReLU", "RReLU", "prelu", "rrelu", "xielu"]


def _check_weight(record: Learned, name: str, weight: Any, x: Tensor) -> None:
    check_tensor(record, weight, f"{name} must be")
    if weight.device != x.device:
        raise ValueError(f"{record.name}: {name} must be on the device of x, {x.device}, got one on {weight.device}")


class LearnedModule(ActivationModule):
    """What the modules here have in common: they are pickled as any class of a module is."""

    activation: Learned
    inplace = False
    __reduce__ = object.__reduce__

    def _take(self, save: str | None, fast_math: bool) -> None:
        check(self.activation, (), self.inplace, save, fast_math)
        self.save, self.fast_math = save, fast_math

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
    if is_stand_in(x):
        return handle_torch_function(prelu, (x,), x, weight, save=save, fast_math=fast_math)
    check_tensor(PRELU, x)
    check(PRELU, (), False, save, fast_math)
    _check_weight(PRELU, "weight", weight, x)
    if x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type):
        x, weight = _autocast(x), _autocast(weight)
    if weight.dtype != x.dtype:
        raise TypeError(f"prelu: weight must be of x's dtype, {_name(x.dtype)}, got {describe(weight)}")
    if weight.dim() > 1:
        raise ValueError(f"prelu: weight must have at most 1 dimension, got {weight.dim()}: {tuple(weight.shape)}")
    if weight.numel() != 1 and (x.dim() == 0 or weight.numel() != (x.shape[1] if x.dim() > 1 else 1)):
        size = f" or {x.shape[1]}, as dimension 1 of x has {x.shape[1]}" if x.dim() > 1 else f", as x has {x.dim()} dimensions"
        raise ValueError(f"prelu: the number of weights must be 1{size}; got {weight.numel()}")
    if weight.numel() > 1 and x.dim() > 2:
        weight = weight.view(-1, *[1] * (x.dim() - 2))  # as it broadcasts
    return run_learned(x, PRELU, (weight,), save, fast_math)


def _autocast(t: Tensor) -> Tensor:
    """What PyTorch's autocast makes of an argument of prelu."""
    return t if t.dtype is torch.float64 else t.to(torch.get_autocast_dtype(t.device.type))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


PRELU = Learned(
    name="prelu",
    title="PReLU",
    formula="x for x > 0, else weight x; one weight, or one for each channel, is learned",
    reference=lambda x: F.prelu(x, x.new_full((1,), 0.25)),
    module=nn.PReLU,
    notes="Backward keeps x, which the weight's gradient needs; one bit per element where the weight has none.",
    weights=1,
    learned=1,
    channels=True,
    bit=True,
    formula_of=lambda x, weight: F.prelu(x, weight.flatten()),
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
    p, n = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    y = torch.where(x > 0, p * x * x + beta * x, (torch.expm1(torch.min(x, eps)) - x) * n + beta * x)
    return y.reshape(x.shape)  # the parameters have a dimension where x may have none


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
    if is_stand_in(x):
        return handle_torch_function(xielu, (x,), x, alpha_p, alpha_n, beta, eps, save=save, fast_math=fast_math)
    check_tensor(XIELU_RECORD, x)
    check(XIELU_RECORD, (), False, save, fast_math)
    weights = {"alpha_p": alpha_p, "alpha_n": alpha_n, "beta": beta, "eps": eps}
    dtype = reduce(torch.promote_types, [x.dtype] + [w.dtype for w in (alpha_p, alpha_n) if isinstance(w, Tensor)])
    for name in ("beta", "eps"):
        if not isinstance(weights[name], Tensor):
            weights[name] = x.new_full((), as_number(XIELU_RECORD, name, weights[name]), dtype=dtype)
        elif weights[name].requires_grad:
            raise ValueError(f"xielu: {name} is not learned, got a tensor that requires a gradient")
    for name, weight in weights.items():
        _check_weight(XIELU_RECORD, name, weight, x)
        if weight.numel() != 1:
            raise ValueError(f"xielu: {name} must hold one value, got {weight.numel()}: {tuple(weight.shape)}")
    x, *given = (t if t.dtype is dtype else t.to(dtype) for t in (x, *weights.values()))
    return run_learned(x, XIELU_RECORD, tuple(given), save, fast_math)


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


def _xielu_exact(x: Tensor) -> Tensor:
    """The same with all of the slope at ``x == eps``, of which torch.min gives half."""
    model = XIELUModel()
    alpha_p, alpha_n, beta, eps = (t.detach().to(x) for t in (model.alpha_p, model.alpha_n, model.beta, model.eps))
    p, n = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    left = torch.where(x > eps, torch.expm1(eps), torch.expm1(x.clamp(max=0)))
    return torch.where(x > 0, p * x * x + beta * x, (left - x) * n + beta * x)


XIELU_RECORD = Learned(
    name="xielu",
    title="XIELU",
    formula="p x^2 + beta x for x > 0, else (n + beta) (exp(min(x, eps)) - 1 - x) + beta x; p = softplus(alpha_p) and "
    "n = softplus(alpha_n) are learned",
    reference=_xielu_default,
    exact=_xielu_exact,
    aliases=("xielu_activation",),
    zero_crossing=0.5,
    weights=4,
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
        ValueError: ``lower`` is above ``upper``, or a bound, or in training their difference, is not finite.
        RuntimeError: in place on a leaf that requires a gradient.
    """
    if is_stand_in(x):
        options = {"training": training, "inplace": inplace, "save": save, "fast_math": fast_math}
        return handle_torch_function(rrelu, (x,), x, lower, upper, **options)
    check_tensor(RRELU, x)
    check(RRELU, (), inplace, save, fast_math)
    bounds = _check_bounds(lower, upper)
    if not training:
        return run(x, _LEAKY_RELU, (bounds[0] / 2 + bounds[1] / 2,), inplace, None, fast_math)
    if bounds[1] - bounds[0] > torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32).max:
        raise ValueError(f"rrelu: upper - lower must be finite for {_name(x.dtype)}, got lower={lower}, upper={upper}")
    return run_random(x, RRELU, bounds, inplace, fast_math)


def _check_bounds(lower: float, upper: float) -> tuple[float, float]:
    bounds = as_number(RRELU, "lower", lower), as_number(RRELU, "upper", upper)
    if not (-math.inf < bounds[0] <= bounds[1] < math.inf):
        raise ValueError(f"rrelu: needs finite bounds, lower <= upper, got lower={lower}, upper={upper}")
    return bounds


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
    random=True,
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
