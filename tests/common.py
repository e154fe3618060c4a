"""What the tests of every activation share: the cases, the float64 oracle and the one table of tolerances."""

from __future__ import annotations

from collections.abc import Callable

import jitact
import torch
from jitact.accuracy import ulp_error
from jitact.activations import TABLE, Activation
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
CASES = [(activation, save) for activation in TABLE for save in activation.saves]
CASE_IDS = [f"{activation.name}-{save}" for activation, save in CASES]
TABLE_IDS = [activation.name for activation in TABLE]

# Forward, in ulp of the dtype against float64: the worst input, and what at most 1 in 1000 inputs may exceed.
FORWARD_ULP = {torch.float16: (1.0, 0.55), torch.bfloat16: (1.0, 0.51), torch.float32: (4.0, 4.0), torch.float64: (16.0, 16.0)}
# Far tails, |x| > 5, of gelu and its kin in float32.
TAIL_ULP = {"gelu": 64.0, "gelu_tanh": 64.0, "gelu_10": 64.0, "laplace": 64.0, "quick_gelu": 64.0, "silu": 64.0, "mish": 64.0}
# Gradient with dy = 1, in ulp; where the exact gradient is below 2^-8, in units of the ulp at 2^-8.
GRADIENT_ULP = {torch.float16: 1.0, torch.bfloat16: 1.0, torch.float32: 8.0, torch.float64: 64.0}
GRADIENT_FLOOR = 2.0**-8
# The same with save="output": the rounding of y is in it. Measured over every 16-bit value, rounded up.
GRADIENT_FROM_OUTPUT = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6, torch.float32: 2.0**-21, torch.float64: 2.0**-50}


def oracle(activation: Activation, params: tuple[float, ...] | None = None) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The exact function and its gradient with ``dy = 1``, both in float64, of a tensor of any dtype."""
    exact = activation.exact or activation.reference
    values = tuple(default for _, default in activation.params) if params is None else params

    def evaluate(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().cpu().double().requires_grad_()
        y = exact(x, *values)
        (dx,) = torch.autograd.grad(y.sum(), x)
        return y.detach(), dx

    return evaluate


def evaluate(module: torch.nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Ours: the function and its gradient with ``dy = 1``, on the CPU."""
    x = x.detach().requires_grad_()
    y = module(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return y.detach().cpu(), dx.cpu()


def assert_accurate(activation: Activation, save: str, x: Tensor, **params: float) -> None:
    """Forward and gradient of every element of ``x`` within the tolerances above."""
    module = jitact.get(activation.name)(save=save, **params)
    values = tuple(params.get(name, default) for name, default in activation.params)
    y, dx = evaluate(module, x)
    exact_y, exact_dx = oracle(activation, values)(x)
    x = x.cpu()

    errors = ulp_error(y, exact_y, x.dtype)
    worst, usual = FORWARD_ULP[x.dtype]
    bound = torch.full_like(errors, worst)
    if x.dtype is torch.float32 and activation.name in TAIL_ULP:
        bound[x.abs() > 5] = TAIL_ULP[activation.name]
    assert_below(errors, bound, x, f"{activation.name} forward")
    often = (errors > usual).double().mean().item()
    assert often <= 1e-3 or x.numel() < 1000, (
        f"{activation.name} forward: {often:.2%} of inputs are off by more than {usual} ulp"
    )

    if save == "output":
        assert_below((dx.double() - exact_dx).abs(), GRADIENT_FROM_OUTPUT[x.dtype] * exact_dx.abs().clamp(min=1), x,
                     f"{activation.name} gradient from the output, absolute")  # fmt: skip
    else:
        errors = ulp_error(dx, exact_dx, x.dtype, floor=GRADIENT_FLOOR)
        assert_below(errors, torch.full_like(errors, GRADIENT_ULP[x.dtype]), x, f"{activation.name} gradient")


def assert_below(errors: Tensor, bound: Tensor, x: Tensor, what: str) -> None:
    """Names the worst input where ``errors`` exceed ``bound``."""
    excess = (errors / bound).nan_to_num(torch.inf)
    if x.numel() and excess.max() > 1:
        i = excess.argmax()
        raise AssertionError(f"{what}: error {errors[i]:.4g} at x = {x[i].item()!r}, {bound[i]:.4g} allowed ({x.dtype})")
