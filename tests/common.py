"""Shared by tests of all activations: the cases, the float64 oracle, and checks against the limits of measuring/limits.py."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

import jitact
from jitact import registry
from jitact.accuracy import ulp_error
from jitact.activations import TABLE
from jitact.measuring.limits import OTHER_PARAMETERS, TESTED, TESTED_FROM_OUTPUT, UNUSUAL
from jitact.records import Activation, is_plain

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PLAIN = [record for record in TABLE if is_plain(record.token)]  # of one tensor and numbers
SLOW = partial(pytest.param, marks=pytest.mark.slow)
OF_EACH_KIND = ("relu", "gelu", "sigmoid", "softcap", "prelu", "rrelu", "xielu", "swiglu")  # the others by -m slow
CASES = [(activation, save) for activation in PLAIN for save in activation.saves]
CASE_IDS = [f"{activation.name}-{save}" for activation, save in CASES]
PLAIN_IDS = [activation.name for activation in PLAIN]

# Activations whose float64 formulas lose digits in the tails, where the oracle is no more accurate than the kernels.
TAILED = {"gelu", "gelu_tanh", "gelu_10", "laplace", "quick_gelu", "silu", "mish"}


def slow_but(names: Iterable[str], always: Container[str] = OF_EACH_KIND) -> list[object]:
    """Names as parameters, marked slow except for some: by default one of each kind."""
    return [name if name in always else SLOW(name) for name in names]


@contextmanager
def registered_as_before() -> Iterator[None]:
    """Restores the registry at the end of the context."""
    before = registry.tables()
    try:
        yield
    finally:
        registry.put_back(before)


def oracle(activation: Activation, x: Tensor, params: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """The exact function and its gradient for ``dy = 1``, in float64. Parameters are rounded as kernels round them."""
    if x.dtype is not torch.float64:
        params = tuple(torch.tensor(params).tolist())
    x = x.detach().cpu().double().requires_grad_()
    y = (activation.exact or activation.reference)(x, *params)
    (dx,) = torch.autograd.grad(y.sum(), x)
    return y.detach(), dx


def evaluate(module: torch.nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The module's result and its gradient for ``dy = 1``, moved to the CPU."""
    x = x.detach().requires_grad_()
    y = module(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return y.detach().cpu(), dx.cpu()


def assert_accurate(activation: Activation, save: str, x: Tensor, **params: float) -> None:
    """Checks forward and gradient of each element of ``x`` against the tested limits."""
    module = jitact.get(activation.name)(save=save, **params)
    y, dx = evaluate(module, x)
    exact_y, exact_dx = oracle(activation, x, tuple(params.get(name, default) for name, default in activation.params))
    x, dtype, name = x.cpu(), x.dtype, activation.name
    limits = OTHER_PARAMETERS if params and dtype is torch.float32 else TESTED[dtype]

    errors = ulp_error(y, exact_y, dtype)
    bound = torch.full_like(errors, limits.forward)
    assert_below(errors, bound, x, f"{name} forward")
    if x.numel() > 10_000:
        often = (errors > limits.usual).double().mean().item()
        assert often <= UNUSUAL, f"{name} forward: {often:.2%} of inputs are off by more than {limits.usual} ulp"

    if save == "output":
        finite = exact_y.abs() < torch.finfo(dtype).max  # an overflowed output does not determine the slope
        errors = ((dx.double() - exact_dx).abs() / exact_dx.abs().clamp(min=1))[finite]
        assert_below(errors, torch.full_like(errors, TESTED_FROM_OUTPUT[dtype]), x[finite], f"{name} gradient from the output")
    else:
        errors = ulp_error(dx, exact_dx, dtype, floor=limits.floor)
        assert_below(errors, torch.full_like(errors, limits.gradient), x, f"{name} gradient")


def assert_below(errors: Tensor, bound: Tensor, x: Tensor, what: str) -> None:
    """Fails if ``errors`` exceed ``bound``, naming the worst input."""
    excess = (errors / bound).nan_to_num(torch.inf)
    if x.numel() and excess.max() > 1:
        i = excess.argmax()
        raise AssertionError(f"{what}: error {errors[i]:.4g} at x = {x[i].item()!r}, {bound[i]:.4g} allowed ({x.dtype})")
