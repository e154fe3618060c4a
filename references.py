"""Activations written in PyTorch, where it has no function for them or an inaccurate one; gradients from the output.

All are differentiable. The ``exact_*`` forms keep full relative accuracy in float64: tests and the accuracy tool compare with
them. The others are what a user of PyTorch would write: bench.py compares speed with them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SELU_SCALE = 1.0507009873554805
SELU_ALPHA = 1.6732632423543772
SQRT_2 = math.sqrt(2.0)


def at_most(x: Tensor, bound: float) -> Tensor:
    """``x.clamp(max=bound)`` with gradient 1 at the bound, as before PyTorch 2.14, which has 0 there."""
    return torch.where(x > bound, bound, x)


def at_least(x: Tensor, bound: float) -> Tensor:
    """The same for ``x.clamp(min=bound)``."""
    return torch.where(x < bound, bound, x)


def bounded(x: Tensor, low: float, high: float) -> Tensor:
    """The same for ``x.clamp(low, high)``."""
    return at_most(at_least(x, low), high)


def relu2(x: Tensor) -> Tensor:
    """Primer's squared ReLU."""
    return F.relu(x).square()


def squareplus(x: Tensor, b: float) -> Tensor:
    """``jax.nn.squareplus``."""
    return (x + torch.sqrt(x * x + b)) / 2


def softcap(x: Tensor, c: float) -> Tensor:
    """Gemma 2's bound on logits."""
    return c * torch.tanh(x / c)


def quick_gelu(x: Tensor) -> Tensor:
    """CLIP's approximation of gelu."""
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: Tensor) -> Tensor:
    """``F.gelu(x, approximate="tanh")``."""
    return F.gelu(x, approximate="tanh")


def gelu_10(x: Tensor) -> Tensor:
    """transformers' ``ClippedGELUActivation(-10, 10)``."""
    return torch.clip(F.gelu(x), -10, 10)


def laplace(x: Tensor, mu: float, sigma: float) -> Tensor:
    """MEGA's Laplace activation, as in transformers."""
    return 0.5 * (1 + torch.erf((x - mu) / (sigma * SQRT_2)))


def sqrtsoftplus(x: Tensor) -> Tensor:
    """transformers' ``sqrtsoftplus``."""
    return torch.sqrt(F.softplus(x))


def snake(x: Tensor, alpha: float) -> Tensor:
    """Snake, for periodic signals."""
    return x + torch.sin(alpha * x).square() / alpha


def sparse_plus(x: Tensor) -> Tensor:
    """``jax.nn.sparse_plus``."""
    return torch.where(x <= -1, 0.0, torch.where(x >= 1, x, (x + 1).square() / 4))


def sparse_sigmoid(x: Tensor) -> Tensor:
    """``jax.nn.sparse_sigmoid``."""
    return torch.clip((x + 1) / 2, 0, 1)


def exact_sparse_sigmoid(x: Tensor) -> Tensor:
    """:func:`sparse_sigmoid` with gradient 0 at both kinks, where torch.clip's is 1 before PyTorch 2.14."""
    return torch.where(x <= -1, 0.0, torch.where(x >= 1, 1.0, (x + 1) / 2))


def exact_hardsigmoid(x: Tensor) -> Tensor:
    """By relu6: the float64 gradient of F.hardsigmoid uses 1/6 rounded to float32."""
    return F.relu6(x + 3) / 6


def exact_hardswish(x: Tensor) -> Tensor:
    """As :func:`exact_hardsigmoid`."""
    return x * (F.relu6(x + 3) / 6)


def exact_gelu(x: Tensor) -> Tensor:
    """By erfc: in the left tail 1 + erf cancels."""
    return 0.5 * x * torch.special.erfc(-x / SQRT_2)


def exact_sigmoid(x: Tensor) -> Tensor:
    """Without the overflow of exp(-x) for x < -709, where torch.sigmoid is 0."""
    left = x < 0
    e = torch.exp(torch.where(left, x, -x))
    return torch.where(left, e, 1.0) / (1 + e)


def exact_silu(x: Tensor) -> Tensor:
    """As :func:`exact_sigmoid`."""
    return x * exact_sigmoid(x)


def exact_quick_gelu(x: Tensor) -> Tensor:
    """As :func:`exact_sigmoid`."""
    return x * exact_sigmoid(1.702 * x)


def exact_gelu_tanh(x: Tensor) -> Tensor:
    """By sigmoid: in the left tail 1 + tanh cancels."""
    return x * exact_sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


def exact_gelu_10(x: Tensor) -> Tensor:
    """As :func:`exact_gelu`."""
    return bounded(exact_gelu(x), -10, 10)


def exact_laplace(x: Tensor, mu: float, sigma: float) -> Tensor:
    """By erfc: in the left tail 1 + erf cancels."""
    return 0.5 * torch.special.erfc((mu - x) / (sigma * SQRT_2))


def exact_squareplus(x: Tensor, b: float) -> Tensor:
    """Without the cancellation of ``x + sqrt(x^2 + b)`` for negative x."""
    root = torch.hypot(x, x.new_tensor(math.sqrt(b)))
    return torch.where(x > 0, x / 2 + root / 2, b / 4 / (root / 2 - at_most(x, 0) / 2))


def exact_tanhshrink(x: Tensor) -> Tensor:
    """The Taylor series where ``x - tanh(x)`` cancels."""
    small = bounded(x, -0.1, 0.1)
    s = small * small
    coefficients = (1 / 3, -2 / 15, 17 / 315, -62 / 2835, 1382 / 155925, -21844 / 6081075, 929569 / 638512875)
    series = torch.zeros_like(x)
    for c in reversed(coefficients):
        series = series * s + c
    return torch.where(x.abs() < 0.1, small * s * series, x - torch.tanh(x))


def exact_selu(x: Tensor) -> Tensor:
    """By expm1."""
    return torch.where(x > 0, SELU_SCALE * x, SELU_SCALE * SELU_ALPHA * torch.expm1(at_most(x, 0)))


def exact_elu(x: Tensor, alpha: float) -> Tensor:
    """By expm1."""
    return torch.where(x > 0, x, alpha * torch.expm1(at_most(x, 0)))


def exact_celu(x: Tensor, alpha: float) -> Tensor:
    """By expm1."""
    return torch.where(x > 0, x, alpha * torch.expm1(at_most(x, 0) / alpha))


def exact_softplus(x: Tensor, beta: float, threshold: float) -> Tensor:
    """Never overflows, however large the threshold."""
    u = beta * x
    return torch.where(u > threshold, x, torch.logaddexp(u, torch.zeros_like(u)) / beta)


def exact_mish(x: Tensor) -> Tensor:
    """tanh(softplus(x)) as n / (n + 2) with n = e^x (e^x + 2), the exponent bounded."""
    e = torch.exp(at_most(x, 40))
    n = e * (e + 2)
    return x * torch.where(x > 1, 1 - 2 / (n + 2), n / (n + 2))


def exact_sqrtsoftplus(x: Tensor) -> Tensor:
    """Without a threshold; below -40 softplus is exp, whose root has a gradient down to 0."""
    u = at_least(x, -40)
    return torch.where(x < -40, torch.exp(at_most(x, -40) / 2), torch.sqrt(torch.logaddexp(u, torch.zeros_like(u))))


# With further operands, or random numbers.


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """``F.prelu``, with the weight in any shape that broadcasts; right under nested vmap, where F.prelu's gradient is not."""
    return torch.where(x > 0, x, weight * at_most(x, 0)).reshape(x.shape)  # a weight has a dimension where x may have none


def rrelu(x: Tensor, lower: float, upper: float) -> Tensor:
    """``F.rrelu`` in training."""
    return torch.where(x <= 0, (torch.rand_like(x) * (upper - lower) + lower) * x, x)


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """The formula of transformers' ``XIELUActivation``."""
    p, n = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    y = torch.where(x > 0, p * x * x + beta * x, (torch.expm1(torch.min(x, eps)) - x) * n + beta * x)
    return y.reshape(x.shape)  # the parameters have a dimension where x may have none


def exact_xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """:func:`xielu` with the full gradient at ``x == eps``, where torch.min passes half of it on."""
    p, n = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    left = torch.where(x > eps, torch.expm1(eps), torch.expm1(at_most(x, 0)))
    return torch.where(x > 0, p * x * x + beta * x, (left - x) * n + beta * x)


class XIELU(nn.Module):
    """xIELU in PyTorch: transformers' ``XIELUActivation`` without its CUDA extension."""

    def __init__(
        self,
        alpha_p_init: float = 0.8,
        alpha_n_init: float = 0.8,
        beta: float = 0.5,
        eps: float = -1e-6,
        dtype: torch.dtype | None = torch.bfloat16,
        with_vector_loads: bool = False,
    ) -> None:
        """Makes the parameters ``alpha_p`` and ``alpha_n`` and the buffers ``beta`` and ``eps``.

        Args:
            alpha_p_init: ``softplus(alpha_p)`` of a new module; above 0.
            alpha_n_init: ``beta + softplus(alpha_n)`` of a new module; above ``beta``.
            beta: kept as a buffer.
            eps: kept as a buffer.
            dtype: of parameters and buffers.
            with_vector_loads: accepted for compatibility with transformers; it has no effect.

        Raises:
            ValueError: an initial value is too small.
        """
        super().__init__()
        self.alpha_p, self.alpha_n = (nn.Parameter(torch.empty(1, dtype=dtype)) for _ in range(2))
        self.register_buffer("beta", torch.empty((), dtype=dtype))
        self.register_buffer("eps", torch.empty((), dtype=dtype))
        self.with_vector_loads = with_vector_loads
        if not (0 < alpha_p_init < math.inf and beta < alpha_n_init < math.inf):
            given = f"alpha_p_init={alpha_p_init} and alpha_n_init={alpha_n_init}"
            raise ValueError(f"xielu: alpha_p_init must be above 0, and alpha_n_init above beta={beta}; got {given}")
        begin = [init + math.log(-math.expm1(-init)) for init in (alpha_p_init, alpha_n_init - beta)]  # softplus's inverse
        self.initial = {"alpha_p": begin[0], "alpha_n": begin[1], "beta": beta, "eps": eps}
        XIELU.reset_parameters(self)

    def reset_parameters(self) -> None:
        """Resets the parameters and buffers to their initial values."""
        with torch.no_grad():
            for name, value in self.initial.items():
                getattr(self, name).fill_(value)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the formula."""
        return xielu(x, self.alpha_p, self.alpha_n, self.beta, self.eps)


# Gradients for save="output": dx from dy, y and the parameters.


def sigmoid_from_output(dy: Tensor, y: Tensor) -> Tensor:  # noqa: D103
    return dy * y * (1 - y)


def tanh_from_output(dy: Tensor, y: Tensor) -> Tensor:  # noqa: D103
    return dy * (1 - y) * (1 + y)


def softsign_from_output(dy: Tensor, y: Tensor) -> Tensor:  # noqa: D103
    return dy * (1 - y.abs()).square()


def elu_from_output(dy: Tensor, y: Tensor, alpha: float) -> Tensor:  # noqa: D103
    return dy * torch.where(y > 0, 1.0, at_least(y + alpha, 0))


def celu_from_output(dy: Tensor, y: Tensor, alpha: float) -> Tensor:  # noqa: D103
    return dy * torch.where(y > 0, 1.0, at_least(y / alpha + 1, 0))


def selu_from_output(dy: Tensor, y: Tensor) -> Tensor:  # noqa: D103
    return dy * torch.where(y > 0, SELU_SCALE, y + SELU_SCALE * SELU_ALPHA)


def softplus_from_output(dy: Tensor, y: Tensor, beta: float, threshold: float) -> Tensor:  # noqa: D103
    return dy * torch.where(beta * y > threshold, 1.0, -torch.expm1(-beta * y))


def logsigmoid_from_output(dy: Tensor, y: Tensor) -> Tensor:  # noqa: D103
    return dy * -torch.expm1(y)


def relu2_from_output(dy: Tensor, y: Tensor) -> Tensor:  # noqa: D103
    return dy * torch.where(y > 0, 2 * torch.sqrt(torch.where(y > 0, y, 1.0)), 0.0)  # sqrt has no derivative at 0


def squareplus_from_output(dy: Tensor, y: Tensor, b: float) -> Tensor:  # noqa: D103
    return dy * (y / torch.hypot(y, y.new_tensor(math.sqrt(b) / 2))).square()


def softcap_from_output(dy: Tensor, y: Tensor, c: float) -> Tensor:  # noqa: D103
    return dy * at_least((1 - y / c) * (1 + y / c), 0)


def sqrtsoftplus_from_output(dy: Tensor, y: Tensor) -> Tensor:  # noqa: D103
    u = at_least(y, 1e-30)  # below that the gradient is y / 2 to all digits
    return dy * torch.where(y < 1e-30, y / 2, -torch.expm1(-u.square()) / (2 * u))
