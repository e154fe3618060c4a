"""What the loops make of operands: several elements, channels, rows, numbers and random numbers, by operator."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from common import DTYPES
from torch import Tensor

from jitact import kernels
from jitact.kernels import KernelSource
from jitact.kernels.loader.signature import read_signature

# The gate is scaled, the other element is not; gradients of all are derived.
TWO = """
#include "elementwise.cuh"
ELEMENTWISE T forward(T gate, T up, Channel<T> scale, Row<T> weight, Channel<T> shift, Number<T> a) {
  return gate * scale * (up + a * shift) * weight;
}
"""
# A sum for gate alone: operands after the last gradient have none.
GATED = """
#include "elementwise.cuh"
ELEMENTWISE T forward(T gate, T up) { return gate * sigmoid(gate) * up; }
ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up) {
  const T s = sigmoid(gate);
  return {dy * up * s * (1 + gate * (1 - s)), dy * gate * s};
}
"""
DRAWS = """
#include "elementwise.cuh"
ELEMENTWISE T forward(T x, Random<T> u, Random<T> v, Number<T> which) {
  return x * (which == 0 ? u.between(0, 1) : v.between(0, 1));
}
"""


def operators(name: str, text: str):
    """The operators of a kernel file, by kind."""
    library = kernels.load(KernelSource(f"{name}_{os.getpid()}", text, f"<{name}>")).name
    return lambda kind: getattr(torch.ops.jitact, f"{library}_{kind}").default


@pytest.fixture(scope="module")
def two():
    return operators("two", TWO)


@pytest.fixture(scope="module")
def gated():
    return operators("gated", GATED)


def two_in_torch(gate: Tensor, up: Tensor, scale: Tensor, weight: Tensor, shift: Tensor, a: float) -> Tensor:
    return gate * scale * (up + a * shift) * weight


def tolerances(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 4 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}


# Sizes of x, of scale and of shift: a value for each index of a dimension, or one for all.
CUTS = {
    "last dimension": ((6, 70, 40), (40,), (40,)),
    "two dimensions": ((6, 70, 40), (70, 1), (40,)),
    "one for all beside channels": ((6, 70, 40), (1,), (70, 1)),
    "one for all": ((6, 70, 40), (1,), (1,)),
    "long planes": ((2, 5, 3000), (5, 1), (1,)),
    "long planes and columns": ((3, 4, 1100), (4, 1), (1100,)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", CUTS)
def test_gradients_of_all_operands(two, cut: str, dtype: torch.dtype, device: str) -> None:
    shape, scale_shape, shift_shape = CUTS[cut]
    shapes = {"gate": shape, "up": shape, "scale": scale_shape, "weight": (*shape[:-1], 1), "shift": shift_shape}
    given = [(torch.rand(sizes) + 0.5).to(device, dtype) for sizes in shapes.values()]
    y = two("forward")(*given, 0.5)
    exact = [t.double().requires_grad_() for t in given]
    expected = two_in_torch(*exact, 0.5)
    torch.testing.assert_close(y.double(), expected.detach(), **tolerances(dtype))
    dy = torch.randn(shape).to(device, dtype)
    gradients = torch.autograd.grad(expected, exact, dy.double())
    magnitudes = torch.autograd.grad(two_in_torch(*exact, 0.5), exact, dy.double().abs())
    for wanted in (0b11111, 0b00011, 0b00100, 0b10001, 0b01000):
        found = two("backward")(dy, *given, 0.5, wanted)
        for g, (own, gradient, magnitude) in enumerate(zip(found, gradients, magnitudes, strict=True)):
            if not wanted >> g & 1:
                assert own.numel() == 0
                continue
            share, info = 2.0**-48 if dtype is torch.float64 else max(2.0**-20, torch.finfo(dtype).eps), torch.finfo(dtype)
            bound = share * magnitude + info.tiny * info.eps  # the spacing of subnormal numbers
            assert own.shape == gradient.shape and ((own.double() - gradient).abs() <= bound).all(), (g, wanted)
    first, again = (two("backward")(dy, *given, 0.5, 0b11111) for _ in range(2))
    assert all(map(torch.equal, first, again)), "the same bits"


HALVES = {
    "halves": lambda t: t.chunk(2, -1),
    "odd halves": lambda t: (t[..., :33], t[..., 33:66]),
    "every second row": lambda t: (t[::2, ..., :32], t[1::2, ..., :32]),
    "halves of channels": lambda t: t.chunk(2, 1),
    "one half, one dense": lambda t: (t[..., :34], t[..., 34:].contiguous()),
    "one repeated along rows": lambda t: (t[..., :34], t[..., :1].expand(*t.shape[:-1], 34)),
    "one row for all": lambda t: (t[..., :34], t[0, 0, 34:].expand(*t.shape[:-1], 34)),
    "permuted": lambda t: t.permute(2, 0, 1).chunk(2, 0),
    "interleaved": lambda t: (t[..., ::2], t[..., 1::2]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("halves", HALVES)
def test_elements_are_read_where_they_are(gated, halves: str, dtype: torch.dtype, device: str) -> None:
    gate, up = HALVES[halves](torch.randn(64, 6, 68).to(device, dtype))
    dense = gate.contiguous(), up.contiguous()
    y = gated("forward")(gate, up)
    assert y.stride() == torch.empty_like(gate).stride() and torch.equal(y, gated("forward")(*dense))
    for dy in (torch.randn(y.shape).to(device, dtype), torch.ones((), device=device, dtype=dtype).expand(y.shape)):
        expected = gated("backward")(dy.contiguous(), *dense, 0b11)
        for wanted in (0b11, 0b01, 0b10):
            found = gated("backward")(dy, gate, up, wanted)
            for g, own in enumerate(found):
                assert torch.equal(own, expected[g]) if wanted >> g & 1 else own.numel() == 0


def test_halves_are_not_copied(gated, device: str) -> None:
    gate, up = torch.randn(400, 600, device=device).chunk(2, -1)
    gated("forward")(gate, up)
    with torch.profiler.profile(profile_memory=True) as profile:
        gated("forward")(gate, up)
    usage = [max(e.cpu_memory_usage, getattr(e, "device_memory_usage", 0)) for e in profile.events()]
    assert max(usage) <= gate.numel() * 4 + 512 and not any("copy" in e.name or "clone" in e.name for e in profile.events())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_operands_are_streams_of_their_own(dtype: torch.dtype, device: str) -> None:
    forward, n = operators("draws", DRAWS)("forward"), 1 << 16
    x, seed = torch.ones(n, device=device, dtype=dtype), torch.tensor([7], device=device)
    u, v = (forward(x, seed, float(which)).double().cpu() for which in (0, 1))
    assert torch.equal(u, forward(x, seed, 0.0).double().cpu())
    for numbers, other in itertools.permutations((u, v)):
        correlation = torch.corrcoef(torch.stack([numbers, other]))[0, 1]
        assert abs(numbers.mean() - 0.5) < 0.01 and abs(correlation) < 0.02


def test_what_operators_refuse(two, gated) -> None:
    x, one = torch.ones(4, 6), torch.ones(1)
    for operands, why in (
        ((x, x, torch.ones(5), one, one), "broadcast to the sizes of x"),
        ((x, x, torch.ones(1, 4, 6), one, one), "more dimensions than x"),
        ((x, x, one.double(), one, one), "neither x.s nor, beside 16 bits, float32"),
        ((torch.ones(2, 3, 4), torch.ones(2, 3, 4), torch.ones(2, 1, 4), one, one), "side by side"),
    ):
        with pytest.raises(RuntimeError, match=why):
            two("forward")(*operands, 1.0)
    for up, why in ((torch.ones(4, 5), "shape"), (x.double(), "dtype")):
        with pytest.raises(RuntimeError, match=f"differ in {why}"):
            gated("forward")(x, up)


def test_the_signature() -> None:
    two = read_signature(TWO)
    assert two.of("element") == ("gate", "up") and two.of("channel", "row") == ("scale", "weight", "shift")
    assert two.of("number") == ("a",) and two.gradients == 5 and two.saves == ("input",)
    assert read_signature(GATED).gradients == 2
    unmarked = "ELEMENTWISE T forward(T x, T a) { return x * a; }\n"
    assert read_signature(unmarked, ("a",)).of("number") == ("a",) and read_signature(unmarked).of("element") == ("x", "a")
    for text, why in (
        ("ELEMENTWISE T backward(T dy, T x) { return dy; }", "defines no function"),
        ("ELEMENTWISE T forward(Number<T> a) { return a; }", "line 1: the first argument of forward must be a T"),
        ("ELEMENTWISE T forward(T x, Number<T> a) { return x; }\nELEMENTWISE T backward(T dy, T x, T a) { return dy; }",
         r"line 2: backward must take \(T ..., T x, Number<T> a\)"),
        ("ELEMENTWISE T forward(T x) { return x; }\nELEMENTWISE Many<T, 2> backward(T dy, T x) { return {dy, dy}; }",
         "line 2: backward returns 2 gradients, of 1"),
        ("ELEMENTWISE T forward(T x, Chanel<T> w) { return x; }", "line 1: forward must be declared as"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            read_signature(text)
