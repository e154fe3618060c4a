"""Gated activations of two tensors and of one that holds both: accuracy, layouts, row weights, roundings, autograd, gated()."""

from __future__ import annotations

import copy
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from common import DTYPES, SLOW
from torch import Tensor, nn
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vmap

import jitact
from jitact import swiglu
from jitact.accuracy import measure_pairs
from jitact.gating.around import with_options
from jitact.measuring.limits import OF_GATES, SMALL_SLOPE
from jitact.measuring.pairs import every_value, pairs, spread_values
from jitact.measuring.ulp import ulp_error
from jitact.records import Activation

GATED = {name: cls.activation for name, cls in jitact.REGISTRY.items() if cls.activation.gating}
PRESETS = {"mul_and_silu": "swiglu", "swigluoai_and_mul": "clamped_swiglu"}


def halves(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """One tensor that holds gate and up."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype) * 2


def gradients(function: Callable[..., Tensor], dy: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The result of a function, and its gradients by all arguments."""
    tensors = tuple(t.detach().requires_grad_() for t in tensors)
    y = function(*tensors)
    return y.detach(), *torch.autograd.grad(y, tensors, dy)


def exact(record: Activation, x: Tensor, gate: str | None = None, **numbers: float) -> Tensor:
    """The formula in float64, or the reference, of the halves of the last dimension."""
    first, second = x.chunk(2, -1)
    given = {"gate": first, "up": second} if (gate or record.gating.gate) == "first" else {"gate": second, "up": first}
    params = [numbers.get(name, default) for name, default in record.params]
    return (record.exact or record.reference)(*[given[name] for name in record.layout.tensors], *params)


def test_there_are_all() -> None:
    assert GATED.keys() == {
        "swiglu", "geglu", "geglu_tanh", "reglu", "glu", "bilinear", "sreglu", "quick_geglu", "fatrelu_glu", "clamped_swiglu",
        "swiglu_step", "situ_glu",
    }  # fmt: skip
    aliases = {"silu_and_mul": "swiglu", "gelu_and_mul": "geglu", "SwiGLU": "swiglu", "GEGLU": "geglu", nn.GLU: "glu"}
    assert all(jitact.get(alias) is jitact.get(name) for alias, name in aliases.items())
    assert jitact.get(F.glu) is jitact.get("glu") and not PRESETS.keys() & set(jitact.names())


@pytest.mark.parametrize("name", GATED)
def test_forward_and_gradients(name: str, device: str) -> None:
    """Accurate in every dtype, and bit-identical for one tensor and two."""
    record, function = GATED[name], getattr(jitact, name)
    for dtype in DTYPES:
        x = halves(40, 66, dtype=dtype).to(device)
        dy = halves(40, 33, dtype=dtype).to(device)
        y, dx = gradients(function, dy, x)
        expected = gradients(lambda t, record=record: exact(record, t), dy.double().cpu(), x.double().cpu())
        eps = 2.0**-40 if dtype is torch.float64 else max(torch.finfo(dtype).eps, 2.0**-21)
        for own, wanted in zip((y, dx), expected, strict=True):
            torch.testing.assert_close(own.double().cpu(), wanted, rtol=eps, atol=eps)
        y2, *parts = gradients(function, dy, *x.chunk(2, -1))
        assert torch.equal(y2, y) and torch.equal(torch.cat(parts, -1), dx)
        module = jitact.get(name)()
        assert torch.equal(module(x), y) and torch.equal(module(*x.chunk(2, -1)), y)


@pytest.mark.parametrize("name", [*GATED, *PRESETS])
def test_model_is_pytorchs_formula(name: str) -> None:
    cls = jitact.get(name)
    cls_inputs = cls.get_inputs(3, 8)
    (x,) = cls_inputs
    assert x.shape == (3, 16) and len(cls_inputs) == 1
    torch.testing.assert_close(cls()(x), cls.Model()(x))
    if name != "glu":
        first, second = (x[:, ::2], x[:, 1::2]) if name == "swigluoai_and_mul" else x.chunk(2, -1)
        torch.testing.assert_close(cls()(first, second), cls.Model()(x))
        torch.testing.assert_close(cls.Model()(first, second), cls.Model()(x))


def sampled_pairs(dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """A sample of the accuracy tool's inputs: gates and factors of every exponent and sign, zeros, infinities and NaN."""
    place = torch.device(device)
    if dtype is torch.float32:
        return tuple(t[:50_000] for t in next(pairs(dtype, place)))
    gates, ups = every_value(dtype, place)[::61], spread_values(dtype, place)[::4]
    incoming = ups[ups.isfinite()].roll(5)
    gate, up = (t.flatten() for t in torch.meshgrid(gates, ups, indexing="ij"))
    return gate, up, incoming[torch.arange(gate.numel(), device=place) % len(incoming)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", GATED)
def test_accuracy(name: str, dtype: torch.dtype, device: str) -> None:
    values = sampled_pairs(dtype, device)
    errors = measure_pairs(GATED[name], {"ours": jitact.get(name)()}, iter([values]))["ours"]
    assert errors["forward"].broken == errors["gradient"].broken == 0, errors


FACTORS_OF_UP = {"situ_glu", "clamped_swiglu", "swiglu_step"}  # whose factor is not up itself


@pytest.mark.parametrize("name", GATED)
def test_accuracy_where_float32_loses_most(name: str, device: str) -> None:
    """Moderate gates, where terms are of similar size, which random bits seldom hit; factors with any mantissa."""
    generator = torch.Generator().manual_seed(0)
    n = 1 << 18
    gate = torch.cat([torch.rand(n, generator=generator) * 32 - 16, torch.randn(n, generator=generator).pow(5)]).to(device)
    up, dy = (1 + torch.rand(2, 2 * n, generator=generator)).to(device)
    # Twice as far: situ_glu's factor bends at 25.
    up = 2 * gate[torch.randperm(2 * n, generator=generator).to(device)] if name in FACTORS_OF_UP else up
    errors = measure_pairs(GATED[name], {"ours": jitact.get(name)()}, iter([(gate, up, dy)]))["ours"]
    assert errors["forward"].broken == errors["gradient"].broken == 0, errors


@pytest.mark.parametrize(("name", "low", "high"), [("geglu_tanh", 0.6, 4.0), ("situ_glu", -6.0, -1.0)])
def test_float32_where_the_worst_errors_were(name: str, low: float, high: float, device: str) -> None:
    """Tested with half an ulp less than the bound, as a sample may miss the worst input."""
    generator = torch.Generator().manual_seed(0)
    gate = low + (high - low) * torch.rand(1 << 20, generator=generator)
    up, dy = (torch.randn(1 << 20, generator=generator) * 2 for _ in range(2))
    values = gate.to(device), up.to(device), dy.to(device)
    errors = measure_pairs(GATED[name], {"ours": jitact.get(name)()}, iter([values]))["ours"]
    assert max(errors["forward"].ulp, errors["gradient"].ulp) < OF_GATES[torch.float32] - 0.5, errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("beta2", [0.0, 300.0, 1e35])
@pytest.mark.parametrize("beta", [1e-20, 0.3, 1e30])
def test_caps_of_any_size(beta: float, beta2: float, dtype: torch.dtype, device: str) -> None:
    numbers = {"beta": beta, "beta2": beta2}
    gate, up, dy = sampled_pairs(dtype, device)
    own = gradients(lambda g, u: jitact.situ_glu(g, u, **numbers), dy, gate, up)
    rounded = torch.tensor([beta, beta2]).double().tolist()  # as kernels round them
    wanted = gradients(lambda g, u: GATED["situ_glu"].exact(g, u, *rounded), dy.double(), gate.double(), up.double())
    c = rounded[1] * torch.tanh(up.double() / rounded[1]) if beta2 else up.double()
    dc = 1 - torch.tanh(up.double() / rounded[1]) ** 2 if beta2 else torch.ones_like(c)
    act, slope = wanted[0] / c, wanted[1] / (dy.double() * c)
    normal = lambda *ts: torch.stack([(t.abs() >= 2.0**-126) & (t.abs() < 2.0**128) for t in ts]).all(0)  # noqa: E731
    dy = dy.double()
    where = normal(act, c), normal(c, dy, dy * c) & (slope.abs() > 2.0**-119), normal(act, dy, dc, dy * dc)
    slopes = torch.ones_like(c), slope.abs(), dc
    for a, b, judged, size in zip(own, wanted, where, slopes, strict=True):
        error = ulp_error(a, b, dtype) * (size / SMALL_SLOPE[dtype]).clamp(max=1)
        assert judged.any() and error[judged & ~b.isnan()].max() <= OF_GATES[dtype]
        assert not (a.isnan() & ~b.isnan() & gate.isfinite() & up.isfinite() & dy.isfinite()).any()


def test_wrong_gates_are_found() -> None:
    """The measurement detects a function with a rounding too many, and one that returns NaN."""
    record, values = GATED["swiglu"], sampled_pairs(torch.bfloat16, "cpu")

    class Eager(nn.Module):
        def forward(self, gate: Tensor, up: Tensor) -> Tensor:
            return F.silu(gate) * up

    errors = measure_pairs(record, {"eager": Eager()}, iter([values]))["eager"]
    assert errors["forward"].ulp > 0.9 and errors["gradient"].ulp == math.inf


# Layouts and orders.


@pytest.mark.parametrize("dim", [-1, 0, 1, -2])
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
@pytest.mark.parametrize("gate", ["first", "last"])
def test_layouts(layout: str, gate: str, dim: int, device: str) -> None:
    x = halves(6, 8, 10).to(device)
    index = [slice(None)] * 3
    parts = x.chunk(2, dim)
    if layout == "interleaved":
        parts = []
        for start in (0, 1):
            index[dim] = slice(start, None, 2)
            parts.append(x[tuple(index)])
    gates, ups = parts if gate == "first" else reversed(parts)
    expected = F.silu(gates) * ups
    options = {"layout": layout, "gate": gate, "dim": dim}
    y, dx = gradients(lambda t: swiglu(t, **options), torch.ones_like(expected), x)
    torch.testing.assert_close(y, expected)
    assert torch.equal(swiglu(*parts, **options), y) and torch.equal(swiglu(gate=gates, up=ups), y)
    model = jitact.get("swiglu").Model(**options)
    assert torch.equal(jitact.get("swiglu")(**options)(x), y) and torch.equal(model(x), expected)
    wanted = gradients(model, torch.ones_like(expected), x)[1]
    torch.testing.assert_close(dx, wanted)
    assert dx.shape == x.shape and dx.is_contiguous()


def test_orders_by_name() -> None:
    a, b = halves(4, 6).chunk(2, -1)
    assert torch.equal(jitact.glu(a, b), jitact.glu(up=a, gate=b)) and torch.equal(jitact.glu(a, b), jitact.glu(a, gate=b))
    torch.testing.assert_close(jitact.glu(a, b), a * torch.sigmoid(b))
    torch.testing.assert_close(jitact.glu(a, b, gate="first"), torch.sigmoid(a) * b)
    torch.testing.assert_close(jitact.mul_and_silu(a, b), a * F.silu(b))
    assert torch.equal(swiglu(a, up=b), swiglu(a, b)) and torch.equal(swiglu(b, gate=a), swiglu(a, b))
    x = torch.cat((a, b), -1)
    torch.testing.assert_close(jitact.glu(x, 1), F.glu(x, 1))
    torch.testing.assert_close(jitact.get("glu")(0)(x), nn.GLU(0)(x))
    for name, of in PRESETS.items():
        assert jitact.get(name).activation.source == jitact.get(of).activation.source
    g, u = x[:, ::2].clamp(max=7), x[:, 1::2].clamp(-7, 7)
    torch.testing.assert_close(jitact.swigluoai_and_mul(x), g * torch.sigmoid(1.702 * g) * (u + 1))


def test_numbers() -> None:
    x = halves(9, 20) * 4
    g, u = x.chunk(2, -1)
    plain = jitact.clamped_swiglu(x, alpha=1.0, limit=math.inf, beta=0.0)
    torch.testing.assert_close(plain, F.silu(g) * u)
    deepseek = jitact.get("clamped_swiglu")(alpha=1.0, limit=3.0, beta=0.0)(x)
    torch.testing.assert_close(deepseek, F.silu(g.clamp(max=3)) * u.clamp(-3, 3))
    torch.testing.assert_close(jitact.swiglu_step(x, limit=2.0), F.silu(g).clamp(max=2) * u.clamp(-2, 2))
    torch.testing.assert_close(jitact.fatrelu_glu(g, u, threshold=0.5), torch.where(g > 0.5, g, 0) * u)
    for beta2 in (0.0, 3.0):
        dy = torch.ones_like(g)
        own = gradients(lambda t: jitact.situ_glu(t, beta=2.0, beta2=beta2), dy, x)
        wanted = gradients(lambda t: exact(GATED["situ_glu"], t, beta=2.0, beta2=beta2), dy, x)
        for a, b in zip(own, wanted, strict=True):
            torch.testing.assert_close(a, b)
    for call, error, why in (
        (lambda: jitact.clamped_swiglu(x, alpha=-1.0), ValueError, r"clamped_swiglu: needs alpha > 0, got alpha=-1.0"),
        (lambda: jitact.swiglu_step(x, limit=-1.0), ValueError, r"swiglu_step: needs limit >= 0"),
        (lambda: jitact.swiglu_step(x, limit="7"), TypeError, r"swiglu_step: limit must be a number, got '7'"),
        (lambda: jitact.clamped_swiglu(g, u, 7.0), TypeError, r"too many positional arguments"),
        (lambda: jitact.get("situ_glu")(beta=0.0), ValueError, r"situ_glu: needs beta >= 1.2e-38"),
    ):
        with pytest.raises(error, match=why):
            call()


VIEWS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "slices of a wider projection": lambda: halves(5, 7, 96).split([31, 31, 34], -1)[:2],
    "rows": lambda: halves(2, 40, 6).unbind(0),
    "every second row": lambda: (halves(20, 12)[::2, :5], halves(20, 12)[1::2, 5:10]),
    "transposed": lambda: halves(14, 6).t().chunk(2, 0),
    "channels last": lambda: halves(2, 6, 5, 4).to(memory_format=torch.channels_last).chunk(2, 1),
    "one row for all": lambda: (halves(9, 5), halves(1, 5)),
    "one column for all": lambda: (halves(9, 1), halves(9, 5)),
    "both broadcast": lambda: (halves(3, 1, 5), halves(4, 1)),
    "empty": lambda: (halves(0, 5), halves(0, 5)),
    "empty rows": lambda: (halves(5, 0), halves(5, 0)),
    "numbers": lambda: (halves(), halves()),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_and_broadcasting(name: str, device: str) -> None:
    gate, up = (t.to(device) for t in VIEWS[name]())
    y = F.silu(gate) * up
    dy = torch.randn_like(y)
    for own, expected in zip(gradients(swiglu, dy, gate, up), gradients(lambda g, u: F.silu(g) * u, dy, gate, up), strict=True):
        assert own.shape == expected.shape
        torch.testing.assert_close(own, expected)


def test_dtypes_and_devices() -> None:
    gate, up = halves(6, 4).chunk(2, -1)
    assert swiglu(gate.bfloat16(), up.float()).dtype is torch.float32
    assert swiglu(gate.half(), up.bfloat16()).dtype is torch.float32
    y = swiglu(torch.empty(3, 8, device="meta", dtype=torch.bfloat16, requires_grad=True))
    assert y.is_meta and y.shape == (3, 4) and y.dtype is torch.bfloat16
    assert torch.autograd.grad(y.sum(), y.grad_fn.next_functions[0][0].variable)[0].shape == (3, 8)
    linear = nn.Linear(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = swiglu(linear(torch.randn(2, 4)))
    y.float().sum().backward()
    assert y.dtype is torch.bfloat16 and linear.weight.grad.dtype is torch.float32


WRONG = {
    "odd": (lambda x: swiglu(x[:, :5]), ValueError,
        r"swiglu: dimension 1 of x holds gate and up, and must be even; got \(4, 5\)"),
    "no dimension": (lambda x: swiglu(x, dim=2), ValueError, r"swiglu: x has 2 dimensions, and no dimension 2: \(4, 6\)"),
    "a number": (lambda x: swiglu(torch.ones(())), ValueError, r"swiglu: x has 0 dimensions, and no dimension -1: \(\)"),
    "shapes": (lambda x: swiglu(x, x[:, :4]), ValueError,
        r"swiglu: the tensors' shapes do not broadcast: gate \(4, 6\), up \(4, 4\)"),
    "nothing": (lambda x: swiglu(), TypeError,
        r"swiglu takes one tensor that holds gate and up, or two, or gate= and up=; got none"),
    "one by name": (lambda x: swiglu(gate=x), TypeError, r"got gate=a float64 tensor"),
    "three": (lambda x: swiglu(x, x, up=x), TypeError, r"got a float64 tensor, a float64 tensor, up=a float64 tensor"),
    "float8": (lambda x: swiglu(x, x.to(torch.float8_e5m2)), TypeError, r"swiglu: up must be a dense .* got a float8_e5m2"),
    "no tensor": (lambda x: swiglu([1.0]), TypeError, r"swiglu: expected a dense float32.* got a list"),
    "an int": (lambda x: swiglu(x, 1), TypeError, r"swiglu: up must be a dense .* got an int; give numbers by name, as dim="),
    "integers": (lambda x: swiglu(x.long()), TypeError, r"swiglu: expected .* got an int64 tensor"),
    "gate": (lambda x: swiglu(x, gate="second"), ValueError,
        r"swiglu: gate must be a tensor or 'first' or 'last', got 'second'"),
    "layout": (lambda x: swiglu(x, layout="odd"), ValueError, r"swiglu: layout must be 'halves' or 'interleaved', got 'odd'"),
    "rounding": (lambda x: swiglu(x, rounding="twice"), ValueError,
        r"swiglu: rounding must be 'once' or 'unfused', got 'twice'"),
    "dim": (lambda x: swiglu(x, dim=1.0), TypeError, r"swiglu: dim must be an int, got 1.0"),
    "dim, a bool": (lambda x: swiglu(x, dim=True), TypeError, r"swiglu: dim must be an int, got True"),
    "module": (lambda x: jitact.get("swiglu")(gate="up"), ValueError, r"swiglu: gate must be"),
    "save": (lambda x: swiglu(x, save="output"), ValueError, r"swiglu: save='output' is not possible; choose from 'input'"),
    "in place": (lambda x: swiglu(x, inplace=True), TypeError, r"unexpected keyword argument 'inplace'"),
    "weight": (lambda x: swiglu(x, row_weight=x), ValueError, r"swiglu.*: row_weight must be of shape \(4,\) or \(4, 1\)"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_refused(what: str) -> None:
    call, error, why = WRONG[what]
    with pytest.raises(error, match=why) as caught:
        call(halves(4, 6))
    assert "\n" not in str(caught.value)


# Row weights.


@pytest.mark.parametrize("strides", [(1, 2, 2), (2, 1, 2), (1, 1, 2), (0, 1, 2), (14, 2, 1)], ids=str)
def test_weights_of_rows_that_overlap(strides: tuple[int, ...], device: str) -> None:
    x, weight = torch.randn(200, device=device).as_strided((8, 7, 14), strides), torch.rand(8, 7, device=device)
    torch.testing.assert_close(swiglu(x, row_weight=weight), swiglu(x.contiguous()) * weight.unsqueeze(-1))


@pytest.mark.parametrize("packed", [True, False], ids=["one tensor", "two"])
def test_weights_of_rows(packed: bool, device: str) -> None:
    x, weight, dy = halves(3, 5, 14).to(device), halves(3, 5).to(device), halves(3, 5, 7).to(device)
    tensors = (x,) if packed else x.chunk(2, -1)
    expected = gradients(lambda w, *t: swiglu(*t) * w.unsqueeze(-1), dy, weight, *tensors)
    for w in (weight, weight.unsqueeze(-1)):
        found = gradients(lambda w, *t: swiglu(*t, row_weight=w), dy, w, *tensors)
        for own, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(own, wanted.view(own.shape))
    (dw,) = gradients(lambda w: jitact.get("swiglu")()(*tensors, row_weight=w), dy, weight)[1:]
    torch.testing.assert_close(dw, expected[1])
    fixed = gradients(lambda *t: swiglu(*t, row_weight=weight), dy, *tensors)
    assert all(map(torch.equal, fixed[1:], gradients(lambda w, *t: swiglu(*t, row_weight=w), dy, weight, *tensors)[2:]))
    low = gradients(lambda t, w: swiglu(t, row_weight=w), dy.bfloat16(), x.bfloat16(), weight.float())
    assert [t.dtype for t in low] == [torch.bfloat16, torch.bfloat16, torch.float32]
    torch.testing.assert_close(low[2].double(), expected[1], rtol=0.02, atol=0.05)
    wide = torch.func.vjp(lambda t, w: swiglu(t, row_weight=w), x.bfloat16(), weight.float())[0]
    assert wide.dtype is torch.bfloat16


@pytest.mark.parametrize("packed", [True, False], ids=["one tensor", "two"])
@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1), (0, 2, 1), (2, 1, 0)], ids=str)
def test_weights_of_rows_in_any_order_of_memory(order: tuple[int, ...], packed: bool, device: str) -> None:
    back = [order.index(i) for i in range(3)]
    x, weight, dy = halves(3, 5, 14).to(device), halves(3, 5).to(device), halves(3, 5, 7).to(device)
    tensors = [t.permute(order).contiguous().permute(back) for t in ((x,) if packed else x.chunk(2, -1))]
    for w in (weight, weight.t().contiguous().t()):
        expected = gradients(lambda w, *t: swiglu(*t) * w.unsqueeze(-1), dy, w, *tensors)
        for own, wanted in zip(gradients(lambda w, *t: swiglu(*t, row_weight=w), dy, w, *tensors), expected, strict=True):
            torch.testing.assert_close(own, wanted)


# The roundings of eager mode.


@pytest.mark.parametrize("name", ["swiglu", SLOW("clamped_swiglu"), SLOW("situ_glu")])
def test_unfused_rounds_as_eager_does(name: str, device: str) -> None:
    """Bit-identical to PyTorch's operations, forward and backward, except where its activation is not correctly rounded."""
    x, dy = halves(200, 128, dtype=torch.bfloat16).to(device), halves(200, 64, dtype=torch.bfloat16).to(device)
    function, model = getattr(jitact, name), jitact.get(name).Model()
    found = gradients(lambda t: function(t, rounding="unfused"), dy, x)
    for own, expected in zip(found, gradients(model, dy, x), strict=True):
        assert (own == expected).double().mean() > 0.999
    apart = gradients(lambda a, b: function(a, b, rounding="unfused"), dy, *x.chunk(2, -1))
    assert torch.equal(apart[0], found[0]) and torch.equal(torch.cat(apart[1:], -1), found[1])
    once = gradients(function, dy, x)
    assert (once[0] == found[0]).double().mean() < 0.9 and (once[1] == found[1]).double().mean() < 0.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["swiglu", SLOW("geglu")])
def test_unfused_is_eager_where_that_is_right(name: str, dtype: torch.dtype, device: str) -> None:
    """For every gate: where the two differ, jitact's result is the correctly rounded one."""
    gates = every_value(dtype, torch.device(device))
    gates, ones = gates[gates.isfinite()], torch.ones_like(gates[gates.isfinite()])
    y, eager = getattr(jitact, name)(gates, ones, rounding="unfused"), jitact.get(name).Model()(gates, ones)
    nearest = GATED[name].exact(gates.double(), ones.double()).to(dtype)
    assert ((y == eager) | (y == nearest)).all() and (y == eager).double().mean() > 0.98


@pytest.mark.slow
def test_unfused_weights_of_rows(device: str) -> None:
    x, weight = halves(40, 64, dtype=torch.bfloat16).to(device), halves(40, dtype=torch.bfloat16).to(device)
    y = swiglu(x, row_weight=weight, rounding="unfused")
    assert torch.equal(y, swiglu(x, rounding="unfused") * weight[:, None])


# What all activations support: saved tensors, transforms, compilation, modules.


def test_what_is_kept() -> None:
    """Backward saves the one tensor, or the two, without copies, and nothing else."""
    x = halves(64, 256).requires_grad_()
    a, b = (t.detach().clone().requires_grad_() for t in x.chunk(2, -1))
    for tensors in ((x,), (a, b)):
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            y = swiglu(*tensors)
        assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in tensors]
        before = [t.detach().clone() for t in tensors]
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        assert all(map(torch.equal, before, tensors))
    with torch.no_grad():
        assert swiglu(x).grad_fn is None
    y = swiglu(x)
    x.data.mul_(1)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_only_one_has_a_gradient() -> None:
    gate, up = halves(4, 6).chunk(2, -1)
    expected = gradients(lambda g, u: F.silu(g) * u, torch.ones_like(gate), gate, up)
    torch.testing.assert_close(gradients(lambda g: swiglu(g, up), torch.ones_like(gate), gate)[1], expected[1])
    torch.testing.assert_close(gradients(lambda u: swiglu(gate, u), torch.ones_like(gate), up)[1], expected[2])


@pytest.mark.parametrize("name", ["swiglu", "glu", "clamped_swiglu"])
def test_second_derivatives(name: str) -> None:
    function, x = getattr(jitact, name), halves(2, 6).requires_grad_()
    weight = halves(2).requires_grad_()
    a, b = (t.detach().requires_grad_() for t in x.chunk(2, -1))
    assert torch.autograd.gradcheck(function, (x,)) and torch.autograd.gradgradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(lambda t: function(t, layout="interleaved"), (x,))
    assert torch.autograd.gradgradcheck(function, (a, b))
    if name == "swiglu":
        assert torch.autograd.gradgradcheck(lambda t, w: function(t, row_weight=w), (x, weight))


@pytest.mark.parametrize("packed", [True, False], ids=["one tensor", "two"])
def test_transforms(packed: bool) -> None:
    x, weight = halves(3, 8), halves(3)

    def apart(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return function if packed else lambda t: function(*t.chunk(2, -1))

    theirs = apart(lambda *t: F.silu(t[0].chunk(2, -1)[0]) * t[0].chunk(2, -1)[1] if packed else F.silu(t[0]) * t[1])
    for transform in (
        lambda f: grad(lambda t: f(t).sum())(x),
        lambda f: jvp(f, (x,), (x + 1,))[1],
        lambda f: vmap(f)(x),
        lambda f: vmap(grad(lambda t: f(t).sum()))(x),
        lambda f: hessian(lambda t: f(t).sum())(x),
        lambda f: functionalize(f)(x),
        lambda f: torch.autograd.functional.jacobian(f, x, vectorize=True),
    ):
        torch.testing.assert_close(transform(apart(swiglu)), transform(theirs))
    if packed:
        taking_turns = [
            torch.autograd.functional.jacobian(f, x, vectorize=True)
            for f in (lambda t: swiglu(t, layout="interleaved"), lambda t: F.silu(t[:, 0::2]) * t[:, 1::2])
        ]
        torch.testing.assert_close(*taking_turns)
    own = vmap(lambda t, w: swiglu(t[None], row_weight=w[None]))(x, weight)
    torch.testing.assert_close(own[:, 0], swiglu(x, row_weight=weight))


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 4)], ids=str)
def test_transforms_of_empty_tensors(shape: tuple[int, ...]) -> None:
    """Compared with narrow, as chunk has no batched gradient for empty tensors."""
    x, size = halves(*shape), shape[-1] // 2
    for transform in (jacrev, jacfwd, lambda f: jacfwd(jacrev(f)), lambda f: lambda t: vmap(f)(t.unsqueeze(0)[:0])):
        own, theirs = [transform(f)(x) for f in (swiglu, lambda t: F.silu(t.narrow(-1, 0, size)) * t.narrow(-1, size, size))]
        torch.testing.assert_close(own, theirs)


@pytest.mark.parametrize("sizes", [(0, 4, 3), (2, 0, 3), (2, 4, 0)], ids=str)
def test_row_weights_of_empty_tensors(sizes: tuple[int, ...]) -> None:
    x, weight = torch.randn(sizes).requires_grad_(), torch.randn(sizes[0], sizes[1] // 2).requires_grad_()
    y = swiglu(x, dim=1, row_weight=weight)
    assert y.shape == (sizes[0], sizes[1] // 2, sizes[2])
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert dx.shape == sizes and torch.equal(dweight, torch.zeros_like(weight))
    across = torch.randn(sizes[1], sizes[0], sizes[2]).transpose(0, 1)
    assert swiglu(across, across, row_weight=torch.randn(sizes[:2])).shape == sizes


@pytest.mark.parametrize("packed", [True, False], ids=["one tensor", "two"])
def test_compiled(packed: bool) -> None:
    torch._dynamo.reset()
    x, weight, dy = halves(4, 12, dtype=torch.float32), halves(4, dtype=torch.float32), halves(4, 6, dtype=torch.float32)
    module = jitact.get("swiglu")()
    tensors = (x,) if packed else x.chunk(2, -1)

    def block(w: Tensor, *t: Tensor) -> Tensor:
        return module(*t) + jitact.glu(*t) + swiglu(*t, row_weight=w) + swiglu(*t, gate="last")

    expected = gradients(block, dy, weight, *tensors)
    found = gradients(torch.compile(block, fullgraph=True, backend="aot_eager"), dy, weight, *tensors)
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own, wanted)


def test_exported_programs() -> None:
    x = halves(4, 12, dtype=torch.float32)
    program = torch.export.export(jitact.get("swiglu")(), (x,))
    assert any(str(node.target) == "jitact.swiglu.default" for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x), swiglu(x))


def test_traced_by_fx() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = jitact.get("swiglu")(gate="last")

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x) + swiglu(x, row_weight=x[..., 0]) + swiglu(gate=x[..., :3], up=x[..., 3:])

    traced, x = torch.fx.symbolic_trace(Block()), halves(2, 6)
    assert torch.equal(traced(x), Block()(x))
    alone, weight = jitact.get("swiglu")(gate="last"), torch.randn(2)
    traced, pair = torch.fx.symbolic_trace(alone), x.chunk(2, -1)
    for given in ((x,), pair):
        assert torch.equal(traced(*given, row_weight=weight), alone(*given, row_weight=weight))


def test_modules() -> None:
    module = jitact.get("clamped_swiglu")(1, limit=5.0, layout="interleaved", gate="last")
    shown = "ClampedSwiGLU(alpha=1.702, limit=5.0, beta=1.0, dim=1, layout='interleaved', gate='last')"
    assert repr(module) == shown and repr(jitact.get("swiglu")()) == "SwiGLU()"
    x = halves(2, 4, 3)
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert repr(other) == shown and torch.equal(other(x), module(x))
    assert list(module.state_dict()) == [] and jitact.get("swiglu").get_init_inputs() == []
    for name in (*GATED, *PRESETS):
        for each in (jitact.get(name), getattr(jitact, name), jitact.get(name).Model):
            assert pickle.loads(pickle.dumps(each)) is each
    assert jitact.get(nn.GLU(1)) is jitact.get("glu") and jitact.registry.module_of(nn.GLU(1)).dim == 1


def test_options_of_modules_where_their_class_has_them() -> None:
    class Across(jitact.get("swiglu")):
        dim = property(lambda self: self.axis, lambda self, dim: setattr(self, "axis", dim))

    x = torch.randn(8, 6)
    assert torch.equal(Across(dim=0)(x), swiglu(x, dim=0))
    step = jitact.get("swiglu_step")()
    step.limit = nn.Parameter(torch.tensor(7.0))
    with pytest.raises(TypeError, match="swiglu_step: limit must be a number, got"):
        step(x)


def test_builds_have_names() -> None:
    record = with_options(GATED["swiglu"], weighted=True)
    assert jitact.registry.record_named("swiglu+row_weight") is record and record.source.label == "swiglu+row_weight"
    with pytest.raises(ValueError, match="'bias' cannot be fused with a gated activation"):
        jitact.registry.record_named("swiglu+bias")


# jitact.gated.


@pytest.mark.parametrize("name", ["mish", "leaky_relu"])
def test_any_activation_at_the_gate(name: str, device: str) -> None:
    cls = jitact.gated(name)
    assert cls is jitact.gated(name) and cls.__name__ == f"Gated{jitact.get(name).__name__}"
    numbers = {"negative_slope": 0.3} if name == "leaky_relu" else {}
    module, act = cls(**numbers), jitact.get(name)(**numbers)
    for dtype in DTYPES:
        x, dy = halves(7, 10, dtype=dtype).to(device), halves(7, 5, dtype=dtype).to(device)
        expected = gradients(lambda t: act(t.chunk(2, -1)[0]) * t.chunk(2, -1)[1], dy.double(), x.double())
        for own, wanted in zip(gradients(module, dy, x), expected, strict=True):
            eps = max(torch.finfo(dtype).eps, 2.0**-40) * (4 if dtype is torch.float32 else 1)  # 4 ulp, as for all
            torch.testing.assert_close(own.double(), wanted, rtol=eps, atol=eps)
    assert torch.equal(module(*x.chunk(2, -1)), module(x))
    assert torch.autograd.gradgradcheck(module, (halves(2, 4).requires_grad_(),))
    assert pickle.loads(pickle.dumps(module))(x).equal(module(x)) and pickle.loads(pickle.dumps(cls)) is cls
    code = "import pickle, sys; print(type(pickle.loads(sys.stdin.buffer.read())).__name__)"
    found = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(module), capture_output=True, check=True)
    assert found.stdout.decode().strip() == cls.__name__


def test_the_class_of_any_gate_is_found_in_another_process() -> None:
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).__name__)"
    given = pickle.dumps(jitact.gated("mish"))
    assert subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, check=True).stdout == b"GatedMish\n"


ALONE = [cls for cls in jitact.REGISTRY.values() if len(cls.activation.layout.tensors) == 1]


@pytest.mark.parametrize("kernel", [False, SLOW(True)])
def test_every_activation_at_the_gate(kernel: bool, device: str) -> None:
    assert len(ALONE) > 30
    x = halves(4, 6).to(device)
    for act in ALONE:
        made = jitact.gated(act.activation.name)
        module, own = (made() if kernel else made.Model()).eval(), act.Model().eval()
        torch.testing.assert_close(module(x), own(x[:, :3]) * x[:, 3:])


def test_gated_of_what_is_there_or_cannot_be() -> None:
    assert jitact.gated("silu") is jitact.get("swiglu") and jitact.gated(nn.GELU("tanh")) is not jitact.get("geglu_tanh")
    assert jitact.gated(F.gelu) is jitact.get("geglu") and jitact.gated("swish") is jitact.get("swiglu")
    with pytest.raises(ValueError, match=r"swiglu takes more: up"):
        jitact.gated("swiglu")
    with pytest.raises(KeyError, match="did you mean"):
        jitact.gated("mishh")


def slopes_of(y: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return (y / up / gate).detach()


@pytest.mark.parametrize("options", [{}, {"layout": "interleaved", "gate": "last"}, {"rounding": "unfused"}], ids=str)
def test_gated_of_what_draws_in_training(options: dict[str, str], device: str) -> None:
    x = halves(50, 64, dtype=torch.float64).to(device).requires_grad_()
    module = jitact.gated("rrelu")(lower=0.2, upper=0.4, **options)
    pair = x.unflatten(-1, (-1, 2)).unbind(-1) if "layout" in options else x.chunk(2, -1)
    gate, up = pair[::-1] if "gate" in options else pair
    weight = torch.rand(50, dtype=torch.float64, device=device).requires_grad_()
    for run in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        y = run(x)
        slopes = slopes_of(y, gate, up)
        assert (slopes[gate > 0] - 1).abs().max() < 1e-12 and slopes[gate < 0].min() >= 0.2 and slopes[gate < 0].max() <= 0.4
        assert slopes[gate < 0].std() > 0.05
        dy = torch.randn_like(y)
        expected = torch.autograd.grad(slopes * gate * up, x, dy)
        torch.testing.assert_close(torch.autograd.grad(y, x, dy), expected)
    torch.manual_seed(0)
    weighted = module(x, row_weight=weight)
    torch.manual_seed(0)
    torch.testing.assert_close(weighted, module(x) * weight[:, None])
    weighted.sum().backward()
    assert weight.grad is not None and x.grad is not None
    module.eval()
    mean = F.leaky_relu(gate, 0.3) * up
    for run in (module, jitact.gated("rrelu").Model(lower=0.2, upper=0.4, **options).eval()):
        torch.testing.assert_close(run(x), mean)
    torch.testing.assert_close(jitact.gated("rrelu").activation.function(gate=gate, up=up, lower=0.2, upper=0.4), mean)


def test_gated_of_what_draws_of_two_tensors_and_twice_differentiated(device: str) -> None:
    function, cls = jitact.gated("rrelu").activation.function, jitact.gated("rrelu")
    gate, up = halves(2, 5, 6, dtype=torch.float64).to(device).requires_grad_()

    def drawn(gate: Tensor, up: Tensor) -> Tensor:
        torch.manual_seed(1)
        return function(gate, up, training=True)

    assert torch.autograd.gradcheck(drawn, (gate, up)) and torch.autograd.gradgradcheck(drawn, (gate, up))
    torch.testing.assert_close(function(gate, up), F.rrelu(gate) * up)
    assert pickle.loads(pickle.dumps(cls())).training and not pickle.loads(pickle.dumps(cls().eval())).training
    for training in (True, False):
        with pytest.raises(ValueError, match=r"gated_rrelu: needs -inf < lower <= upper < inf, got lower=0\.4, upper=0\.3"):
            function(gate, up, lower=0.4, upper=0.3, training=training)
    jitact.define("noisy", "dropout(x, p) * 2", p=0.5)
    module = jitact.gated("noisy")()
    assert 0.1 < (module(gate, up) == 0).double().mean() < 0.9
    torch.testing.assert_close(module.eval()(gate, up), gate * 2 * up)
    with pytest.raises(ValueError, match="gated_noisy cannot be exported: noisy drops by itself"):
        jitact.export(jitact.gated("noisy"))


def test_errors_name_what_was_called_in_eval_too() -> None:
    function, x = jitact.gated("rrelu").activation.function, halves(4, 6)
    for training in (True, False):
        for given in ((x[:, :3],), (x.int(),), (x, x[:3, :5]), (x.int(), x), (x, 3)):
            with pytest.raises((TypeError, ValueError), match="gated_rrelu: "):
                function(*given, training=training)
        with pytest.raises(ValueError, match=r"gated_rrelu\+row_weight: "):
            function(x, row_weight=x[0, :3], training=training)


@pytest.mark.parametrize("training", [True, False])
def test_gated_of_a_definition_that_draws_and_learns(training: bool, device: str) -> None:
    jitact.define("wc", "dropout(x * w, p)", w=jitact.Channel(2.0), p=0.5)
    function = jitact.gated("wc").activation.function
    x, w = halves(6, 8).to(device).requires_grad_(), torch.rand(4, dtype=torch.float64, device=device).requires_grad_()
    weight = torch.rand(6, dtype=torch.float64, device=device)

    def drawn(x: Tensor, w: Tensor) -> Tensor:
        torch.manual_seed(0)
        return function(x, w=w, training=training, row_weight=weight)

    assert torch.autograd.gradgradcheck(drawn, (x, w), fast_mode=True)


def test_gated_of_references_of_any_signature() -> None:
    """A built-in function has no signature; a parameter may be called keep, as the argument for random numbers is."""
    jitact.define("k2", "x * keep", keep=0.5, reference=lambda x, keep: x * keep)
    jitact.define("built_in", "tanh(x)", reference=torch.tanh)
    x = halves(5, 6)
    for name, expected in (("k2", x[:, :3] * 0.5), ("built_in", x[:, :3].tanh())):
        cls = jitact.gated(name)
        for run in (cls(), cls.Model(), vmap(cls())):
            torch.testing.assert_close(run(x), expected * x[:, 3:])


def test_gated_of_a_definition_that_has_such_an_argument() -> None:
    jitact.define("clash", "x * up", up=2.0)
    with pytest.raises(ValueError, match=r"gated\(\): clash has an argument 'up', which gated activations have themselves"):
        jitact.gated("clash")


def test_functions_of_generated_gates_are_attributes() -> None:
    """Pickles of graphs look for them there."""
    for name in ("mish", "prelu"):
        function = jitact.gated(name).activation.function
        assert getattr(jitact, f"gated_{name}") is function is pickle.loads(pickle.dumps(function))
    graph, x = torch.fx.symbolic_trace(nn.Sequential(jitact.gated("mish")())), halves(2, 6)
    assert torch.equal(pickle.loads(pickle.dumps(graph))(x), graph(x))
    for name in ("gated_glu", "gated_mush", "gated_softmax"):  # takes two tensors, unknown, of rows
        assert not hasattr(jitact, name)


def test_gated_of_a_definition_that_learns() -> None:
    jitact.define("swish_b", "x * sigmoid(beta * x)", beta=jitact.Channel(init=1.5, one=True))
    module, x = jitact.gated("swish_b")(), halves(5, 6).requires_grad_()
    gate, up = x.chunk(2, -1)
    module.double()
    expected = gate * torch.sigmoid(module.beta * gate) * up
    torch.testing.assert_close(module(x), expected)
    found, wanted = (torch.autograd.grad(y.sum(), [x, module.beta], retain_graph=True) for y in (module(x), expected))
    torch.testing.assert_close(found, wanted)


def test_gated_is_first_called_inside_torch_compile() -> None:
    jitact.define("own_gate", "x * sin(x)")
    gate, up = torch.randn(2, 8).unbind()
    compiled = torch.compile(lambda a, b: jitact.gated("own_gate")()(a, b), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(gate, up), gate * gate.sin() * up)
    compiled = torch.compile(lambda a, b: jitact.gated("silu")()(a, b), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(gate, up), F.silu(gate) * up)
    with pytest.raises(ValueError, match="swiglu takes more: up"):
        torch.compile(lambda a, b: jitact.gated("swiglu")()(a, b), backend="eager")(gate, up)


def test_gated_of_a_definition() -> None:
    jitact.define("swoosh", "x * sin(a * x)", a=1.0)
    module, x = jitact.gated("swoosh")(a=2.0), halves(5, 6)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(module(x), gate * torch.sin(2 * gate) * up)
    torch.testing.assert_close(pickle.loads(pickle.dumps(module))(x), module(x))
    assert re.match(r"GatedSwoosh", type(module).__name__)


def test_a_module_can_be_made_while_torch_compile_traces() -> None:
    made, x = jitact.gated("softsign"), torch.randn(3, 8)
    found = torch.compile(lambda x: made(layout="interleaved")(x), fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(found, made(layout="interleaved")(x))
