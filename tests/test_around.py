"""Bias, dropout and residual, fused with an activation in one kernel."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import DTYPES, SLOW, slow_but
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import jitact
from jitact.compiling.formulas import Formula
from jitact.fusing.around import around, run_around
from jitact.fusing.drop import kept
from jitact.measuring.limits import SURROUNDED
from jitact.records import Activation
from jitact.registry import record_named

CASES = {
    "gelu": F.gelu,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "prelu": F.prelu,
    "xielu": lambda x, p, n: jitact.get("xielu").activation.reference(x, p, n, p.new_tensor(0.5), p.new_tensor(-1e-6)),
}
LEARNED = {"prelu": 1, "xielu": 2}


def inputs(dtype: torch.dtype, device: str, shape: tuple[int, ...] = (33, 24)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, a bias in float32 at least, a residual that broadcasts, and dy."""
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    bias, residual = torch.randn(shape[-1], generator=generator), torch.randn(shape[0], 1, generator=generator)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    kinds = (dtype, wide, dtype, dtype)
    return tuple(t.to(device, kind).requires_grad_() for t, kind in zip((x, bias, residual, dy), kinds, strict=True))


def close(ours: Tensor, exact: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    assert ((ours.double() - exact).abs() <= SURROUNDED[dtype] * scale * (1 + exact.abs())).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", slow_but(CASES, CASES.keys() - {"leaky_relu", "sigmoid"}))
def test_bias_and_residual(name: str, dtype: torch.dtype, device: str) -> None:
    x, bias, residual, dy = inputs(dtype, device)
    weights = (torch.full((1,), 0.3 + k, device=device, dtype=dtype, requires_grad=True) for k in range(LEARNED.get(name, 0)))
    given, numbers = tuple(weights), (0.2,) if name == "leaky_relu" else ()
    y = getattr(jitact, name)(x, *given, *numbers, bias=bias, residual=residual)
    assert y.dtype is dtype
    exact = CASES[name](x.double() + bias.double(), *(weight.double() for weight in given)) + residual.double()
    close(y, exact, dtype)
    found = torch.autograd.grad(y, [x, bias, residual, *given], dy.detach())
    expected = torch.autograd.grad(exact, [x, bias, residual, *given], dy.detach().double())
    assert [g.dtype for g in found[:3]] == [dtype, bias.dtype, dtype]
    for own, other in zip(found, expected, strict=True):
        close(own, other.double(), dtype, 32)
    off = (found[1].double() - expected[1].double()).abs()
    assert (off <= 2.0**-18 * dy.double().abs().sum()).all(), "of unrounded products"


@pytest.mark.parametrize("shape", [(24,), (1,), (33, 1)], ids=str)
def test_a_bias_beside_prepared_operands(shape: tuple[int, ...], device: str) -> None:
    """A bias of the last dimension, of the first, and of one value: its gradient alone and with those of the weights."""
    x, _, _, dy = inputs(torch.float64, device)
    bias, p, n = (torch.randn(size, dtype=torch.float64, device=device) for size in (shape, (1,), (1,)))
    leaves = [each.clone().requires_grad_() for each in (x, bias, p, n)]
    dim = -2 if len(shape) > 1 else -1

    def function(x: Tensor, bias: Tensor, p: Tensor, n: Tensor) -> Tensor:
        return jitact.xielu(x, p, n, bias=bias.view(-1), channel_dim=dim)

    exact = CASES["xielu"](leaves[0] + leaves[1], *leaves[2:])
    close(function(*leaves), exact, torch.float64)
    expected = torch.autograd.grad(exact, leaves, dy.detach())
    for wanted in ([0, 1, 2, 3], [1], [2, 3], [0, 3]):
        own = [each.detach().requires_grad_(k in wanted) for k, each in enumerate(leaves)]
        found = torch.autograd.grad(function(*own), [own[k] for k in wanted], dy.detach())
        for k, gradient in zip(wanted, found, strict=True):
            close(gradient, expected[k], torch.float64, 2 * x.numel() ** 0.5)
    few = x[:3, :2], (bias[:3] if len(shape) > 1 else bias[:2]), p, n
    assert torch.autograd.gradgradcheck(function, [each.detach().clone().requires_grad_() for each in few])


@pytest.mark.parametrize("name", ["gelu", "xielu"])
def test_each_is_one_launch_of_a_build_of_its_own(name: str, device: str) -> None:
    record = jitact.get(name).activation
    assert around(record) is record
    made = around(record, bias=True, residual=True)
    assert made is around(record, bias=True, residual=True) and made.name == f"{name}+bias+residual"
    assert made.source.name == f"{name}_bias_residual" and made.layout.tensors[:3] == ("x", "residual", "bias")
    x, bias, residual, _ = inputs(torch.float32, device)
    weights = [torch.zeros(1, device=device) for _ in range(LEARNED.get(name, 0))]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        getattr(jitact, name)(x, *weights, bias=bias, residual=residual)
    called = [event.name for event in profile.events()]
    ours = [each for each in called if each.startswith("jitact::")]
    assert len(ours) == 1 and ours[0].startswith(f"jitact::{name}_bias_residual") and "aten::add" not in called


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout(dtype: torch.dtype, device: str) -> None:
    n, p = 1 << 18, 0.3
    x = torch.full((n,), 2.0, device=device, dtype=dtype, requires_grad=True)
    torch.manual_seed(1)
    y = jitact.relu(x, dropout=p)
    kept = (y != 0).double()
    assert abs(kept.mean().item() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5
    steps = 2.0**16 if dtype.itemsize == 2 else 2.0**23 if dtype is torch.float32 else 2.0**52
    scale = steps / (steps - round(p * steps))
    close(y, kept * 2 * scale, dtype)
    (dx,) = torch.autograd.grad(y.sum(), x)
    close(dx, kept * scale, dtype)
    torch.manual_seed(1)
    assert torch.equal(jitact.relu(x, dropout=p), y), "it follows PyTorch's generator"
    assert not torch.equal(jitact.relu(x, dropout=p), y)
    seed = torch.tensor([5], device=device)
    assert torch.equal(jitact.relu(x, dropout=p, seed=seed), jitact.relu(x.detach(), dropout=p, seed=seed))
    assert not jitact.relu(x, dropout=1.0).any() and torch.equal(jitact.relu(x, dropout=0.0), jitact.relu(x))


@pytest.mark.parametrize("p", [1e-4, 0.3, 0.999, 1 - 1e-9])
def test_second_derivatives_drop_by_the_same_share(p: float, device: str) -> None:
    seed = torch.tensor([5], device=device)
    for dtype in DTYPES:
        x = torch.ones(1 << 16, dtype=dtype, device=device)
        assert torch.equal(jitact.relu(x, dropout=p, seed=seed), kept(x, seed, 0, p).to(dtype)), dtype


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_dropout_is_the_same_on_cpu_and_gpu() -> None:
    for dtype in DTYPES:
        x, seed = torch.randn(10_001).to(dtype), torch.tensor([123456789012])
        on_cpu, on_gpu = jitact.relu(x, dropout=0.4, seed=seed), jitact.relu(x.cuda(), dropout=0.4, seed=seed.cuda())
        assert torch.equal(on_cpu == 0, on_gpu.cpu() == 0), dtype


def test_what_is_kept(device: str) -> None:
    x, bias, residual, _ = inputs(torch.float32, device)
    fixed = bias.detach()

    def kept(function: object) -> int:
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            function()
        return sum(sizes)

    assert kept(lambda: jitact.gelu(x, dropout=0.1)) == x.nbytes + 8
    assert kept(lambda: jitact.gelu(x, bias=bias, residual=residual)) == x.nbytes + bias.nbytes, "and nothing of the residual"
    assert kept(lambda: jitact.relu(x, bias=fixed, residual=residual)) == x.numel() // 8 + bias.nbytes, "a bit of x + bias"
    assert kept(lambda: jitact.relu(x, bias=bias, residual=residual)) == x.numel() // 8 + bias.nbytes, "which is enough for it"
    assert kept(lambda: jitact.relu(x, dropout=0.1)) == x.numel() // 8 + 8


BITS = [name for name in jitact.names() if "bit" in jitact.get(name).activation.saves]


@pytest.mark.parametrize("name", slow_but(BITS, ["relu"]))
def test_a_bit_is_enough_for_the_gradient_of_a_bias(name: str, device: str) -> None:
    record = jitact.get(name).activation
    x, bias, _, dy = inputs(torch.float32, device, (40, 41))
    weights = [torch.full((1,), channel.init, device=device) for channel in record.channels.values()]
    seed = {"seed": torch.tensor([3], device=device)} if record.layout.draws else {}
    found = []
    for save in record.saves:
        y = run_around(record, given(record, x, weights), params(record), {"bias": bias, **seed}, False, save, False, True)
        found.append(torch.autograd.grad(y, [x, bias], dy.detach()))
    assert record.saves[0] == "bit" and all(torch.equal(each[0], found[0][0]) for each in found)
    exact = found[0][0].double()
    for _, dbias in found:
        off = (dbias.double() - exact.sum(0)).abs()
        assert (off <= 2.0**-20 * exact.abs().sum(0) + 2.0**-24 * dbias.abs()).all()


def given(record: Activation, x: Tensor, weights: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(record.layout.tensors, [x, *weights], strict=True))


def params(record: Activation) -> tuple[float, ...]:
    return tuple(default for _, default in record.params)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_modules_train_by_bits(dtype: torch.dtype, device: str) -> None:
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    module = jitact.get("relu")(bias=3, channel_dim=1, device=device, dtype=wide)
    with torch.no_grad():
        module.bias.copy_(torch.tensor([1.0, -1.0, 0.2]))
    torch.manual_seed(0)
    images = torch.randn(2, 3, 24, 25, dtype=dtype, device=device).to(memory_format=torch.channels_last)
    for x in (images, images.contiguous(), images[..., ::2], images.transpose(2, 3)):
        x = x.detach().requires_grad_()
        dy = torch.randn(x.shape, dtype=dtype, device=device)
        module.zero_grad()
        module(x).backward(dy)
        slope = x.double() + module.bias.double().view(-1, 1, 1) > 0
        exact = dy.double() * slope
        assert torch.equal(x.grad.double(), exact) and module.bias.grad.dtype is wide
        off = (module.bias.grad.double() - exact.sum((0, 2, 3))).abs()
        eps = 2.0**-48 if dtype is torch.float64 else 2.0**-20
        assert (off <= eps * exact.abs().sum((0, 2, 3)) + torch.finfo(wide).eps * module.bias.grad.abs()).all()


def test_gradients_from_bits_of_some_operands(device: str) -> None:
    x, bias, _, dy = (t.detach() for t in inputs(torch.float32, device))
    dx, dbias = (dy * (x + bias > 0)), (dy * (x + bias > 0)).sum(0)
    for needs_x, needs_bias in ((True, False), (False, True)):
        a, b = x.clone().requires_grad_(needs_x), bias.clone().requires_grad_(needs_bias)
        jitact.relu(a, bias=b, save="bit").backward(dy)
        found, expected = (a.grad, dx) if needs_x else (b.grad, dbias)
        torch.testing.assert_close(found, expected)
        assert (b if needs_x else a).grad is None
    a, b = x.clone().requires_grad_(), bias.clone().requires_grad_()
    hidden = a * 1
    assert jitact.relu(hidden, bias=b, inplace=True) is hidden
    hidden.backward(dy.t().contiguous().t())  # with other strides than the bit mask
    torch.testing.assert_close((a.grad, b.grad), (dx, dbias))
    with pytest.raises(ValueError, match="save='bit' is not enough for the gradient of weight"):
        jitact.prelu(x, x.new_ones(1).requires_grad_(), bias=bias, save="bit")


def test_sums_from_bits_do_not_hang_on_threads() -> None:
    x, dy = torch.randn(2, 3000, 257, generator=torch.Generator().manual_seed(0))
    bias, found, before = torch.zeros(257, requires_grad=True), [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found += torch.autograd.grad(jitact.relu(x, bias=bias), bias, dy)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)


def test_derivatives_of_gradients_from_bits(device: str) -> None:
    x, bias, _, dy = inputs(torch.float64, device, (5, 4))
    function = lambda x, b: jitact.relu(x, bias=b, save="bit")  # noqa: E731
    torch.autograd.gradcheck(function, (x, bias))
    torch.autograd.gradgradcheck(function, (x, bias))
    grads = [
        torch.autograd.grad(f(x, bias), [x, bias], torch.stack([dy, 2 * dy]), is_grads_batched=True)
        for f in (function, lambda x, b: F.relu(x + b))
    ]
    torch.testing.assert_close(*grads)
    loss = lambda x, b: jitact.relu(x, bias=b).sum()  # noqa: E731
    ours = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(x, bias)
    slope = (x + bias > 0).to(x.dtype)
    torch.testing.assert_close(ours, (slope, slope))


def test_a_seed_that_nothing_draws_from(device: str) -> None:
    x, weight, seed = torch.randn(2, 3, 4), torch.full((3,), 0.25), torch.tensor([5])
    x, weight, seed = x.to(device), weight.to(device), seed.to(device)
    for options in ({}, {"dropout": 0.0}):
        function = partial(jitact.prelu, weight=weight, seed=seed, **options)
        assert torch.equal(torch.func.grad(lambda x: function(x).sum())(x), torch.where(x > 0, 1.0, 0.25))
        one = torch.vmap(partial(jitact.prelu, weight=weight[:1], seed=seed, **options))(x)
        assert torch.equal(one, jitact.prelu(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_gradients_from_bits_have_one_rounding_in_every_mode(p: float, dtype: torch.dtype, device: str) -> None:
    """Those that have derivatives, and batched ones, are the same bits: a float32 bias beside 16 bits has all its digits."""
    x, bias, _, dy = inputs(dtype, device, (400, 4))
    options = {"dropout": p, "seed": torch.tensor([5], device=device)} if p else {}
    for function, leaves in (
        (lambda: jitact.relu(x, bias=bias, save="bit", **options), [x, bias]),
        (lambda: jitact.relu(x, bias=bias, save="bit", **options), [bias]),
        (lambda: jitact.relu(x, save="bit", **options), [x]),
    ):
        y, again = function(), dy.detach().requires_grad_()
        plain = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        recorded = torch.autograd.grad(y, leaves, again, create_graph=True)
        batched = torch.autograd.grad(y, leaves, torch.stack([dy, -dy]), is_grads_batched=True, retain_graph=True)
        for first, second, third in zip(plain, recorded, batched, strict=True):
            assert torch.equal(first, second) and torch.equal(first, third[0]) and torch.equal(-first, third[1])
        slope = torch.autograd.grad(y, x, torch.ones_like(y))[0].double()
        directions = [torch.randn_like(each) for each in recorded]
        (of_dy,) = torch.autograd.grad(recorded, again, directions)
        sizes = sum(slope.abs() * each.double().abs() for each in directions)
        near = 3 * torch.finfo(dtype).eps * sizes + torch.finfo(dtype).tiny
        assert ((of_dy.double() - sum(slope * each.double() for each in directions)).abs() <= near).all()


def test_second_derivatives_and_transforms(device: str) -> None:
    x, bias, residual, _ = inputs(torch.float64, device, (5, 4))
    seed = torch.tensor([7], device=device)
    function = lambda x, b, r: jitact.gelu(x, bias=b, residual=r, dropout=0.4, seed=seed)  # noqa: E731
    torch.autograd.gradcheck(function, (x, bias, residual))
    torch.autograd.gradgradcheck(lambda *t: jitact.gelu(t[0], bias=t[1], dropout=0.4, seed=seed), (x, bias))
    ours = torch.func.vmap(torch.func.grad(lambda x: jitact.gelu(x, bias=bias, residual=x).sum()))(x)
    expected = torch.func.vmap(torch.func.grad(lambda x: (F.gelu(x + bias) + x).sum()))(x)
    torch.testing.assert_close(ours, expected)


def test_numbers_have_no_dimensions(device: str) -> None:
    """0-dimensional tensors stay so, although adding a bias of shape (1,) in PyTorch adds a dimension."""
    x, bias, residual = (torch.tensor(v, dtype=torch.float64, device=device, requires_grad=True) for v in (0.3, [0.2], 0.1))
    function = lambda x, b, r: jitact.gelu(x, bias=b, residual=r)  # noqa: E731
    torch.autograd.gradgradcheck(function, (x, bias, residual))
    y, dy = torch.func.jvp(function, (x, bias, residual), (x, bias, residual))
    assert y.shape == dy.shape == function(x, bias, residual).shape == ()
    assert jitact.xielu(x, *bias.new_zeros(2, 1), bias=bias, residual=residual).shape == ()


def test_a_wide_bias_leaves_the_dtype(device: str) -> None:
    x, bias, residual, dy = inputs(torch.bfloat16, device)
    assert bias.dtype is torch.float32
    function = lambda x, b, r: jitact.gelu(x, bias=b, residual=r)  # noqa: E731
    y, vjp = torch.func.vjp(function, x, bias, residual)
    assert y.dtype is torch.bfloat16 and [g.dtype for g in vjp(dy)] == [x.dtype, bias.dtype, residual.dtype]
    weight = torch.full((1,), 0.25, device=device, dtype=torch.bfloat16)
    dx, dbias = torch.func.grad(lambda x, b: jitact.prelu(x, weight, bias=b).sum(), argnums=(0, 1))(x, bias)
    slope = torch.where(x.double() + bias.double() > 0, 1.0, 0.25)
    assert torch.equal(dx.double(), slope) and torch.equal(dbias.double(), slope.sum(0))
    made = around(jitact.get("gelu").activation, bias=True)
    gradient = Formula(made.source, False).gradients(dy.detach(), x.detach(), bias.detach(), wanted=2)[1]
    exact = torch.autograd.grad(F.gelu(x.double() + bias.double()), bias, dy.detach().double())[0]
    assert gradient.dtype is torch.float32
    torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_residual_promotes_beside_weights_too(dtype: torch.dtype, device: str) -> None:
    x, bias, *_ = inputs(dtype, device)
    weight, residual = torch.full((1,), 0.3, device=device, dtype=dtype), torch.randn(33, 24, device=device).double()
    y = jitact.prelu(x, weight, bias=bias, residual=residual)
    exact = F.prelu(x.double() + bias.double(), weight.double()) + residual
    assert y.dtype is torch.float64
    torch.testing.assert_close(y, exact)
    with torch.autocast(device, torch.bfloat16):
        assert jitact.prelu(x, weight, bias=bias, residual=residual.float()).dtype is torch.float32


def test_channels_are_those_of_x(device: str) -> None:
    """channel_dim counts in x, not in the result, which the residual broadcasts to more dimensions of equal size."""
    x, bias, weight, residual = (
        torch.randn(*size, device=device, dtype=torch.float64, requires_grad=True) for size in ((4, 4), (4,), (4,), (4, 4, 4))
    )
    ours = lambda x, b, w, r: jitact.prelu(x, w, bias=b, channel_dim=0, residual=r)  # noqa: E731
    theirs = lambda x, b, w, r: F.prelu(x + b[:, None], w) + r  # noqa: E731
    given = x, bias, weight, residual
    torch.testing.assert_close(ours(*given), theirs(*given))
    pairs = [torch.autograd.grad(f(*given).square().sum(), given, create_graph=True) for f in (ours, theirs)]
    torch.testing.assert_close(*pairs)
    torch.testing.assert_close(*[torch.autograd.grad(sum(map(torch.sum, each)), given) for each in pairs])
    with pytest.raises(ValueError, match="values of bias must be 1 or 4, as dimension 0 of x has 4; got 3"):
        ours(x, bias[:3], weight, residual)


@pytest.mark.parametrize("backend", ["eager", SLOW("inductor")])
def test_a_seed_is_kept_by_compiled_transforms(backend: str, device: str) -> None:
    x, bias, residual, _ = (t.detach() for t in inputs(torch.float64, device, (5, 4)))
    seed = torch.tensor([7], device=device)
    function = lambda x: jitact.gelu(x, bias=bias, residual=residual[0], dropout=0.4, seed=seed)  # noqa: E731
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.func.jvp(function, (x,), (x,)), fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), torch.func.jvp(function, (x,), (x,)))


def test_a_seed_is_kept_by_transforms(device: str) -> None:
    x, bias, residual, _ = (t.detach() for t in inputs(torch.float64, device, (5, 4)))
    seed = {"seed": torch.tensor([7], device=device)}
    function = lambda x: jitact.gelu(x, bias=bias, residual=residual[0], dropout=0.4, **seed)  # noqa: E731
    torch.testing.assert_close(torch.func.jvp(function, (x,), (x,))[0], function(x))
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(torch.func.vjp(function, x)[1](x)[0], torch.autograd.grad(function(leaf), leaf, x)[0])
    torch.testing.assert_close(torch.func.vmap(function, 1)(x[:, None]), function(x)[None])
    with pytest.raises(RuntimeError, match="rrelu: seed= is not possible within transforms"):
        torch.func.vjp(lambda x: jitact.rrelu(x, training=True, **seed), x)


def test_compiled_where_the_output_does_not_tell_the_gradient_of_the_bias(device: str) -> None:
    x, bias, _, dy = inputs(torch.float32, device)
    compiled = torch.compile(lambda x, b: jitact.sigmoid(x, bias=b), fullgraph=True, backend="aot_eager")
    pairs = [torch.autograd.grad(y, [x, bias], dy.detach()) for y in (compiled(x, bias), torch.sigmoid(x + bias))]
    torch.testing.assert_close(*pairs)


def test_compiled_with_numbers_that_vary(device: str) -> None:
    torch._dynamo.reset()
    x, module = torch.ones(2000, 24, device=device), jitact.get("gelu")(bias=24, dropout=0.25, device=device)
    compiled = torch.compile(module, fullgraph=True, backend="eager", dynamic=True)
    for p in (0.25, 0.5, 0.75):
        module.dropout = p
        assert abs((compiled(x) == 0).float().mean().item() - p) < 0.02
    module.eval()
    torch.testing.assert_close(compiled(x), F.gelu(x))


def test_compile(device: str) -> None:
    x, bias, residual, dy = inputs(torch.float32, device)
    for function, reference in (
        (lambda x, b, r: jitact.gelu(x, bias=b, residual=r) * 2, lambda x, b, r: (F.gelu(x + b) + r) * 2),
        (lambda x, b, r: jitact.gelu(x, bias=b, residual=x), lambda x, b, r: F.gelu(x + b) + x),
    ):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        y, exact = compiled(x, bias, residual), reference(x, bias, residual)
        torch.testing.assert_close(y, exact)
        pairs = [torch.autograd.grad(each, [x, bias], dy.detach()) for each in (y, exact)]
        torch.testing.assert_close(*pairs)
    for save in (None, "bit"):
        compiled = torch.compile(lambda x, b, save=save: jitact.relu(x, bias=b, save=save), fullgraph=True, backend="aot_eager")
        pairs = [torch.autograd.grad(y, [x, bias], dy.detach()) for y in (compiled(x, bias), F.relu(x + bias))]
        torch.testing.assert_close(*pairs)
    torch.manual_seed(0)
    compiled = torch.compile(lambda x: jitact.relu(x, dropout=0.5), fullgraph=True, backend="aot_eager")
    a, b = compiled(x), compiled(x)
    assert not torch.equal(a, b) and set(((a == 0) | (a == 2 * x.relu())).flatten().tolist()) == {True}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_with_a_seed_and_learned_weights(backend: str, device: str) -> None:
    """One graph, and the same random numbers as in eager mode."""
    x, bias, residual, dy = inputs(torch.float32, device)
    weights = torch.full((2, 1), 0.3, device=device)
    a, b = (each.clone().requires_grad_() for each in weights)
    seed = torch.tensor([7], device=device)
    for function, leaves in (
        (lambda: jitact.xielu(x, a, b, dropout=0.4, seed=seed), [x, a, b]),
        (lambda: jitact.xielu(x, a, b, bias=bias, dropout=0.4, seed=seed, residual=residual), [x, a, b, bias, residual]),
        (lambda: jitact.prelu(x, a, dropout=0.4, seed=seed), [x, a]),
    ):
        torch._dynamo.reset()
        results = [f() for f in (function, torch.compile(function, fullgraph=True, backend=backend))]
        assert torch.equal(*results) and results[0].requires_grad
        torch.testing.assert_close(*[torch.autograd.grad(y, leaves, dy.detach()) for y in results])


def test_checkpoint(device: str) -> None:
    x, bias, *_ = inputs(torch.float32, device)
    torch.manual_seed(3)
    y = checkpoint(lambda x: jitact.gelu(x, bias=bias, dropout=0.5), x, use_reentrant=False)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.manual_seed(3)
    plain = jitact.gelu(x, bias=bias, dropout=0.5)
    assert torch.equal(plain, y) and torch.equal(torch.autograd.grad(plain.sum(), x)[0], dx)


def test_in_place(device: str) -> None:
    x, bias, residual, _ = (t.detach() for t in inputs(torch.float32, device))
    expected, before = jitact.relu(x, bias=bias, residual=residual), residual.clone()
    assert jitact.relu(x, inplace=True, bias=bias, residual=residual) is x
    assert torch.equal(x, expected) and torch.equal(residual, before)


def test_in_place_beside_what_lies_in_the_same_memory(device: str) -> None:
    """Operands that overlap x are read before they are overwritten, for backward too."""
    line = torch.arange(-50000.0, 60000.0, device=device)
    x, before, exact = line[1:], line[:-1], F.relu(line[1:]) + line[:-1]
    assert torch.equal(jitact.relu(x, inplace=True, residual=before), exact)
    leaf = torch.randn(8, 8, dtype=torch.float64, device=device, requires_grad=True)
    for ours, theirs in (
        (lambda h: jitact.silu(h, inplace=True, bias=h[0]), lambda h: F.silu(h + h[0])),
        (lambda h: jitact.silu(h, inplace=True, residual=h.t()), lambda h: F.silu(h) + h.t()),
        (lambda h: jitact.silu(h, inplace=True, residual=h), lambda h: F.silu(h) + h),
    ):
        results = [f(leaf * 1) for f in (ours, theirs)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*[torch.autograd.grad(y.square().sum(), leaf) for y in results])


def test_in_place_with_a_wider_residual(device: str) -> None:
    """The result is rounded to the dtype of x, as in PyTorch's in-place operations."""
    x, _, residual, dy = inputs(torch.float32, device)
    leaf = x.detach().half().requires_grad_()
    low = leaf * 1
    exact = F.silu(low.detach().float()) + residual
    assert jitact.silu(low, residual=residual, inplace=True) is low and torch.equal(low, exact.half())
    dx, dr = torch.autograd.grad(low, [leaf, residual], dy.detach().half())
    torch.testing.assert_close(dr, dy.half().float().sum(1, keepdim=True))
    close(dx, torch.autograd.grad(F.silu(leaf.double()), leaf, dy.detach().half().double())[0], torch.float16)
    with pytest.raises(RuntimeError, match=r"silu\+residual: a leaf that requires a gradient cannot be changed in place"):
        jitact.silu(leaf, residual=residual, inplace=True)


def test_modules(device: str) -> None:
    module = jitact.get("gelu")(bias=24, dropout=0.25, device=device)
    assert list(module.state_dict()) == ["bias"] and not module.bias.any() and "bias=24, dropout=0.25" in repr(module)
    x, bias, residual, _ = inputs(torch.float32, device)
    with torch.no_grad():
        module.bias.copy_(bias)
    assert (module(x) == 0).any()
    module.eval()
    torch.testing.assert_close(module(x), F.gelu(x + bias))
    torch.testing.assert_close(module(x, residual), F.gelu(x + bias) + residual)
    torch.testing.assert_close(module(x, residual=residual), F.gelu(x + bias) + residual)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x)) and other.bias is not module.bias
    module.reset_parameters()
    assert not module.bias.any()
    assert list(jitact.get("gelu")().state_dict()) == []
    planes = jitact.get("relu")(bias=3, channel_dim=1, device=device)
    images = torch.randn(2, 3, 4, 5, device=device)
    with torch.no_grad():
        planes.bias.copy_(torch.tensor([1.0, -1.0, 2.0]))
    torch.testing.assert_close(planes(images), F.relu(images + planes.bias.view(-1, 1, 1)))
    planes.bias = None  # a way to remove the bias; channel_dim, which is left, then has no meaning
    assert torch.equal(planes(images, images), F.relu(images) + images)


def test_arguments_of_the_activations_own_win(device: str) -> None:
    x = torch.randn(3, 4, device=device)
    own = jitact.define("own_bias", "x * bias", bias=jitact.Channel(2.0))(4, dropout=0.5, device=device)
    assert set((own(x) / x).flatten().tolist()) == {0.0, 4.0} and torch.equal(own.eval()(x), 2 * x)
    own.reset_parameters()
    assert own.bias.eq(2).all() and "bias=4, dropout=0.5" in repr(own)
    with pytest.raises(ValueError, match=r"'own_bias\+bias': own_bias has an argument 'bias' of its own"):
        jitact.export("own_bias+bias")
    other = jitact.define("own_dim", "x * channel_dim", channel_dim=3.0)(bias=4, device=device)
    with torch.no_grad():
        other.bias.fill_(1.0)
    torch.testing.assert_close(other(x), 3 * (x + 1))
    assert other.channel_dim == 3 and repr(other) == "OwnDim(channel_dim=3.0, bias=4)"


def test_random_and_prepared_activations(device: str) -> None:
    x, bias, residual, _ = inputs(torch.float32, device)
    y = jitact.rrelu(x, 0.2, 0.2, bias=bias, residual=residual)
    torch.testing.assert_close(y, F.leaky_relu(x + bias, 0.2) + residual)
    alpha = torch.zeros(1, device=device)
    y = jitact.xielu(x, alpha, alpha, bias=bias, residual=residual)
    torch.testing.assert_close(y, jitact.xielu(x + bias, alpha, alpha) + residual)
    square, seed = x[:24], torch.tensor([3], device=device)
    y = jitact.xielu(square, alpha, alpha, bias=bias, channel_dim=0)
    torch.testing.assert_close(y, jitact.xielu(square + bias[:, None], alpha, alpha))
    made = around(jitact.get("xielu").activation, dropout=True, residual=True)
    assert made.name == "xielu+dropout+residual" and "xielu_::prepare(alpha_p, alpha_n, beta, eps);" in made.source.text
    read = Formula(around(jitact.get("xielu").activation, residual=True).source, False)
    x, residual = x.detach(), residual.detach()
    given = [x, residual, alpha, alpha, torch.full_like(alpha, 0.5), torch.full_like(alpha, -1e-6)]
    torch.testing.assert_close(read.forward(*given), jitact.xielu(x, alpha, alpha, residual=residual))
    leaves = [each.clone().requires_grad_() for each in (x, alpha, alpha)]
    expected = torch.autograd.grad(jitact.xielu(*leaves, residual=residual), leaves, x)
    torch.testing.assert_close(read.gradients(x, *given, wanted=7), expected)
    dropped = [jitact.xielu(x, alpha, alpha, dropout=0.5, seed=seed) for _ in range(2)]
    assert torch.equal(*dropped) and 0.3 < (dropped[0] == 0).float().mean() < 0.7
    with pytest.raises(ValueError, match=r"xielu\+bias: the number of values of bias must be 1 or 24, as dimension -1"):
        jitact.xielu(x, alpha, alpha, bias=bias[:5])


def test_integers_of_numpy() -> None:
    x, bias = torch.randn(4, 6), torch.randn(4)
    first, last = np.int64(0), np.int64(1)
    assert torch.equal(jitact.gelu(x, bias=bias, channel_dim=first), jitact.gelu(x, bias=bias, channel_dim=0))
    assert torch.equal(jitact.swiglu(x, dim=last), jitact.swiglu(x))
    assert jitact.get("swiglu")(dim=last).dim == 1
    assert jitact.get("gelu")(bias=np.int64(4), channel_dim=first)(x).shape == x.shape


X = torch.randn(4, 3)
ERRORS = [
    (lambda: jitact.gelu(X, bias=torch.ones(4)), ValueError, "the number of values of bias must be 1 or 3"),
    (lambda: jitact.gelu(X, X), ValueError,
     "gelu: approximate=a float32 tensor is not possible; choose from 'none', 'tanh'; give a tensor by name, as bias= or res"),
    (lambda: jitact.relu(X, X), TypeError, "relu: inplace must be True or False, got a float32 tensor"),
    (lambda: jitact.elu(X, X), TypeError, "elu: alpha must be a number, got a float32 tensor; give a tensor by name"),
    (lambda: jitact.gelu(X, bias=0.5), TypeError, "bias must be a dense .*, got a float"),
    (lambda: jitact.gelu(X, dropout=1.5), ValueError, "gelu: dropout is a probability, from 0 to 1, got 1.5"),
    (lambda: jitact.gelu(X, dropout="a"), TypeError, "gelu: dropout must be a number, got 'a'"),
    (lambda: jitact.gelu(X, dropout=torch.ones(2)), TypeError, "gelu: dropout must be a number, got a float32 tensor"),
    (lambda: jitact.get("elu")(X), TypeError, r"ELU is a class, .* no tensor; write ELU\(\)\(x\), or jitact.elu\(x\)"),
    (lambda: jitact.get("prelu")(X), TypeError, "PReLU is a class, whose constructor takes no tensor"),
    (lambda: jitact.get("swiglu")(X), TypeError, "SwiGLU is a class, whose constructor takes no tensor"),
    (lambda: jitact.get("gelu")(dropout=torch.ones(2)), TypeError, "gelu: dropout must be a number, got a float32 tensor"),
    (lambda: jitact.gelu(X, approximate=[]), ValueError, r"gelu: approximate=\[\] is not possible; choose from 'none', 'tanh'"),
    (lambda: jitact.gelu(X, bias=torch.ones(3), channel_dim=True), TypeError, "gelu: channel_dim must be an int, got True"),
    (lambda: jitact.gelu(X, residual=torch.ones(2, 2)), ValueError, "shapes do not broadcast: x .4, 3., residual .2, 2."),
    (lambda: jitact.gelu(X, dropout=0.5, seed=7), TypeError,
     r"gelu: seed must be a tensor that holds one int64, got an int; write torch.tensor\(7\)"),
    (lambda: jitact.gelu(X, seed=7), TypeError, "gelu: seed must be a tensor that holds one int64"),
    (lambda: jitact.gelu(X, dropout=0.5, seed=torch.tensor([1, 2])), TypeError, "got an int64 tensor of 2 values"),
    (lambda: jitact.gelu(X, bias=torch.ones(3), channel_dim=1.0), TypeError, "gelu: channel_dim must be an int, got 1.0"),
    (lambda: jitact.gelu(X, bias=torch.ones(3), channel_dim=2), ValueError, "x has 2 dimensions, and no channel_dim=2: .4, 3."),
    (lambda: jitact.get("gelu")(bias=3, channel_dim="c"), TypeError, "gelu: channel_dim must be an int, got 'c'"),
    (lambda: jitact.gelu(X, channel_dim=0), ValueError, "gelu: channel_dim is the dimension of bias=, and no bias is given"),
    (lambda: jitact.gelu(X, dropout=0.5, residual=X, channel_dim=0), ValueError, "no bias is given, got channel_dim=0"),
    (lambda: jitact.rrelu(X, channel_dim=0), ValueError, "rrelu: channel_dim is the dimension of bias=, and no bias is given"),
    (lambda: jitact.prelu(X, torch.ones(1), channel_dim=0), ValueError, "got channel_dim=0; that of weight is its Channel's"),
    (lambda: jitact.get("gelu")(channel_dim=1), ValueError, "gelu: channel_dim is .*, and no bias is given, got channel_dim=1"),
    (lambda: jitact.get("gelu")(dropout=0.5, channel_dim=1), ValueError, "no bias is given, got channel_dim=1"),
    (lambda: jitact.relu(X.clone(), residual=torch.ones(2, 4, 3), inplace=True), ValueError,
     "relu.residual: in place the result has the shape of x; that is .4, 3., and the result .2, 4, 3."),
    (lambda: jitact.get("tanh")(dropout=0.5, save="output"), ValueError, "tanh: save='output' is not possible with dropout"),
    (lambda: jitact.get("gelu")()(X, bias=X), TypeError, "gelu: a module is called with tensors and residual=; got bias="),
    (lambda: jitact.get("gelu")()(X, X, X), TypeError, "gelu is applied to 1 tensor, x; got 3"),
    (lambda: jitact.get("gelu")(dtype=torch.half), ValueError, "gelu: dtype= is for the module.s bias or weights"),
    (lambda: jitact.gelu(X, residul=X), TypeError, r"gelu\(x, approximate='none', .*'residul'; did you mean residual=\?"),
    (lambda: jitact.get("gelu")(bias=0), ValueError, "bias is how many channels there are, a positive number; got 0"),
    (lambda: jitact.get("gelu")(dropout=-0.1), ValueError, "gelu: dropout is a probability"),
    (lambda: record_named("gelu+norm"), ValueError, "'norm' cannot be fused with an activation"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), ERRORS, ids=[message for *_, message in ERRORS])
def test_errors(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
