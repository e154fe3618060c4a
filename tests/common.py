"""What the tests of every activation share: the cases, the float64 oracle and the one table of tolerances."""

from __future__ import annotations

import torch
from torch import Tensor

import jitact
from jitact.accuracy import ulp_error
from jitact.activations import TABLE
from jitact.records import Activation, is_plain

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PLAIN = [record for record in TABLE if is_plain(record.token)]  # of one tensor and numbers
CASES = [(activation, save) for activation in PLAIN for save in activation.saves]
CASE_IDS = [f"{activation.name}-{save}" for activation, save in CASES]
PLAIN_IDS = [activation.name for activation in PLAIN]

# Forward, in ulp of the dtype against float64: the worst input, and in 16 bits what 1 in 1000 inputs may exceed. The oracle
# is itself float64, and loses as much in tails and differences as is allowed there.
FORWARD_ULP = {torch.float16: 1.0, torch.bfloat16: 1.0, torch.float32: 4.0, torch.float64: 4096.0}
USUAL_ULP = {torch.float16: 0.55, torch.bfloat16: 0.51}
# Far tails of gelu and its kin in float32: where |x| > 5, or further out than 5 standard deviations.
TAIL_ULP = 64.0
TAILED = {"gelu", "gelu_tanh", "gelu_10", "laplace", "quick_gelu", "silu", "mish"}
# Parameters other than the defaults: beta * x and alpha * x are rounded before they go into an exponent or a sine.
OTHER_PARAMETERS_ULP, OTHER_PARAMETERS_GRADIENT_ULP = 64.0, 256.0
# Gradient with dy = 1, in ulp; where the exact gradient is smaller than the floor, in units of the ulp at the floor, as
# gradients that cross zero are differences.
GRADIENT_ULP = {torch.float16: 1.0, torch.bfloat16: 1.0, torch.float32: 8.0, torch.float64: 64.0}
GRADIENT_FLOOR = {torch.float16: 2.0**-8, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-3, torch.float64: 2.0**-3}
# The same with save="output", relative to max(1, |gradient|): the rounding of y is in it.
FROM_OUTPUT = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6, torch.float32: 2.0**-21, torch.float64: 2.0**-28}


def oracle(activation: Activation, x: Tensor, params: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """The exact function and its gradient with ``dy = 1``, both in float64. Parameters are rounded as kernels round them."""
    if x.dtype is not torch.float64:
        params = tuple(torch.tensor(params).tolist())
    x = x.detach().cpu().double().requires_grad_()
    y = (activation.exact or activation.reference)(x, *params)
    (dx,) = torch.autograd.grad(y.sum(), x)
    return y.detach(), dx


def evaluate(module: torch.nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Ours: the function and its gradient with ``dy = 1``, on the CPU."""
    x = x.detach().requires_grad_()
    y = module(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return y.detach().cpu(), dx.cpu()


def assert_accurate(activation: Activation, save: str, x: Tensor, **params: float) -> None:
    """Forward and gradient of every element of ``x`` within the tolerances above."""
    module = jitact.get(activation.name)(save=save, **params)
    y, dx = evaluate(module, x)
    exact_y, exact_dx = oracle(activation, x, tuple(params.get(name, default) for name, default in activation.params))
    x, dtype, name = x.cpu(), x.dtype, activation.name

    errors = ulp_error(y, exact_y, dtype)
    bound = torch.full_like(errors, FORWARD_ULP[dtype])
    if dtype is torch.float32:
        bound[(x.abs() > 5) | (exact_y.abs() < 1e-6)] = TAIL_ULP if name in TAILED else FORWARD_ULP[dtype]
        bound = bound.clamp(min=OTHER_PARAMETERS_ULP) if params else bound
    assert_below(errors, bound, x, f"{name} forward")
    if dtype in USUAL_ULP and x.numel() > 10_000:
        often = (errors > USUAL_ULP[dtype]).double().mean().item()
        assert often <= 1e-3, f"{name} forward: {often:.2%} of inputs are off by more than {USUAL_ULP[dtype]} ulp"

    if save == "output":
        finite = exact_y.abs() < torch.finfo(dtype).max  # no slope comes from an output that overflowed
        errors = ((dx.double() - exact_dx).abs() / exact_dx.abs().clamp(min=1))[finite]
        assert_below(errors, torch.full_like(errors, FROM_OUTPUT[dtype]), x[finite], f"{name} gradient from the output")
    else:
        errors = ulp_error(dx, exact_dx, dtype, floor=GRADIENT_FLOOR[dtype])
        bound = OTHER_PARAMETERS_GRADIENT_ULP if params and dtype is torch.float32 else GRADIENT_ULP[dtype]
        assert_below(errors, torch.full_like(errors, bound), x, f"{name} gradient")


def assert_below(errors: Tensor, bound: Tensor, x: Tensor, what: str) -> None:
    """Names the worst input where ``errors`` exceed ``bound``."""
    excess = (errors / bound).nan_to_num(torch.inf)
    if x.numel() and excess.max() > 1:
        i = excess.argmax()
        raise AssertionError(f"{what}: error {errors[i]:.4g} at x = {x[i].item()!r}, {bound[i]:.4g} allowed ({x.dtype})")
