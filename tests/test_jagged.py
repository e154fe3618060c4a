"""Nested tensors of ``layout=torch.jagged``, beside PyTorch's operations for them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jitact

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
LENGTHS = (3, 0, 5, 1)


def jagged(device: str, *behind: int, lengths: tuple[int, ...] = LENGTHS, dtype: torch.dtype = torch.float64) -> Tensor:
    parts = [torch.randn(length, *behind, dtype=dtype, device=device) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def of_values(values: Tensor, like: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, like.offsets())


def alike(x: Tensor, *behind: int) -> Tensor:
    values = torch.randn(x.values().shape[0], *behind, dtype=x.dtype, device=x.device)
    return of_values(values, x).detach().requires_grad_()


def gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def weighted(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    return of_values(F.silu(gate.values()) * up.values() * weight.values()[:, None], gate)


# A call of jitact, and the same in PyTorch. They take x, a vector for its last dimension, a tensor as x, and weights of rows.
CASES: dict[str, tuple[Callable, Callable]] = {
    "gelu": (lambda x, *_: jitact.gelu(x), lambda x, *_: F.gelu(x)),
    "relu, which keeps a bit": (lambda x, *_: jitact.relu(x), lambda x, *_: F.relu(x)),
    "a parameter": (lambda x, *_: jitact.leaky_relu(x, 0.3), lambda x, *_: of_values(F.leaky_relu(x.values(), 0.3), x)),
    "transposed": (lambda x, *_: jitact.silu(x.transpose(1, 2)), lambda x, *_: F.silu(x.transpose(1, 2))),
    "in place": (lambda x, *_: jitact.relu(x * 1, inplace=True), lambda x, *_: F.relu(x * 1, inplace=True)),
    "a module": (lambda x, *_: jitact.get("mish")()(x), lambda x, *_: F.mish(x)),
    "a bias": (lambda x, b, *_: jitact.gelu(x, bias=b), lambda x, b, *_: F.gelu(x + b)),
    "a bias, by dimension": (lambda x, b, *_: jitact.gelu(x, bias=b, channel_dim=2), lambda x, b, *_: F.gelu(x + b)),
    "a bias of more dimensions": (
        lambda x, b, *_: jitact.gelu(x.unsqueeze(-1), bias=b, channel_dim=2),
        lambda x, b, *_: F.gelu(x.unsqueeze(-1) + b.unsqueeze(-1)),
    ),
    "a residual": (lambda x, b, r, _: jitact.gelu(x, bias=b, residual=r), lambda x, b, r, _: r + F.gelu(x + b)),
    "a dense residual": (lambda x, b, *_: jitact.gelu(x, residual=b), lambda x, b, *_: F.gelu(x) + b),
    "one value": (lambda x, *_: jitact.gelu(x, residual=x.values().new_ones(1, 1)), lambda x, *_: F.gelu(x) + 1),
    "all dimensions": (lambda x, b, *_: jitact.gelu(x, residual=b.view(1, 1, 6)), lambda x, b, *_: F.gelu(x) + b),
    "a gate": (lambda x, _, r, __: jitact.swiglu(x, r), lambda x, _, r, __: F.silu(x) * r),
    "packed": (lambda x, *_: jitact.swiglu(x), lambda x, *_: gated(x)),
    "packed, by dimension": (lambda x, *_: jitact.swiglu(x, dim=2), lambda x, *_: gated(x)),
    "row weight": (lambda x, _, r, w: jitact.swiglu(x, r, row_weight=w), lambda x, _, r, w: weighted(x, r, w)),
    "one weight": (
        lambda _, __, ___, w: jitact.prelu(w, w.values().new_full((1,), 0.3)),
        lambda _, __, ___, w: of_values(F.leaky_relu(w.values(), 0.3), w),
    ),
    "packed, row weight": (
        lambda x, _, __, w: jitact.swiglu(x, row_weight=w),
        lambda x, _, __, w: weighted(*x.chunk(2, -1), w),
    ),
    "softmax": (lambda x, *_: jitact.softmax(x, -1), lambda x, *_: F.softmax(x, -1)),
}


def given(device: str) -> tuple[Tensor, ...]:
    x = jagged(device, 6)
    return x, torch.randn(6, dtype=torch.float64, device=device, requires_grad=True), alike(x, 6), alike(x)


def check(ours: Callable, theirs: Callable, tensors: tuple[Tensor, ...]) -> None:
    """Compares results, which must be jagged alike, and gradients."""
    results = []
    for call in (ours, theirs):
        y = call(*tensors)
        assert y.layout is torch.jagged
        dy = torch.linspace(-1, 2, y.values().numel(), dtype=y.dtype, device=y.device).view_as(y.values())
        found = torch.autograd.grad(y.values(), tensors, dy, allow_unused=True)
        results.append([y, *found])
    for y, expected in zip(*results, strict=True):
        assert (y is None) == (expected is None)
        if y is not None:
            assert y.shape == expected.shape
            torch.testing.assert_close(*[each.values() if each.is_nested else each for each in (y, expected)])


@pytest.mark.parametrize("case", CASES)
def test_jagged_tensors(case: str, device: str) -> None:
    check(*CASES[case], given(device))


@pytest.mark.parametrize("case", ["a bias, by dimension", "a residual", "packed"])
def test_jagged_tensors_inside_torch_compile(case: str, device: str) -> None:
    ours, theirs = CASES[case]
    check(
        torch.compile(lambda *tensors: 2 * ours(*tensors), fullgraph=True), lambda *tensors: 2 * theirs(*tensors), given(device)
    )


def test_models_of_jagged_tensors(device: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down, self.act = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6), nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.gate(x)) * self.up(x))

    plain = nn.Sequential(Block(), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.GELU()).to(device, torch.float64)
    model = copy.deepcopy(plain)
    assert len(jitact.replace(model).replaced) == 3
    check(model, plain, (jagged(device, 6),))
    with jitact.patched() as calls:
        F.gelu(jagged(device, 6))
    assert repr(calls) == "replaced calls: gelu (1)"


def test_what_is_overwritten_and_what_is_kept(device: str) -> None:
    x = jagged(device, 6).detach()
    before = x.clone()
    assert jitact.relu(x, inplace=True) is x and torch.equal(x.values(), before.values().relu())
    holes = torch.nested.nested_tensor_from_jagged(before.values(), before.offsets(), before.offsets().diff())
    assert torch.equal(jitact.silu(holes).lengths(), holes.lengths())
    assert jitact.gelu(before, dropout=0.5).shape == before.shape
    known = torch.nested.nested_tensor_from_jagged(before.values(), before.offsets(), min_seqlen=0, max_seqlen=5)
    assert (jitact.silu(known)._maybe_min_seqlen, jitact.silu(known)._maybe_max_seqlen) == (0, 5)


def test_second_derivatives_of_jagged_tensors(device: str) -> None:
    plain = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).to(device, torch.float64)
    model, x, found = copy.deepcopy(plain), jagged(device, 6), []
    assert jitact.replace(model).replaced
    for each in (model, plain):
        y = each(x)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
        found.append(torch.autograd.grad((dx * dx).values().sum(), [each[0].weight, x]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(*[each.values() if each.is_nested else each for each in (ours, theirs)])


def test_jagged_tensors_inside_vmap(device: str) -> None:
    x = jagged(device, 6).detach()
    for y, expected in zip(torch.vmap(jitact.gelu)(x).unbind(), torch.vmap(F.gelu)(x).unbind(), strict=True):
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_what_is_between_the_rows_has_no_gradient(layout: str, device: str) -> None:
    values = torch.randn(2, 6, 4, dtype=torch.float64, device=device)
    values[:, :1] = values[:, 3:] = torch.nan
    starts, lengths = torch.tensor([[1, 2], [2, 1]], device=device)
    x = torch.nested.narrow(values, 1, starts, lengths, layout=torch.jagged).requires_grad_()
    bias = torch.zeros((), dtype=torch.float64, device=device, requires_grad=True)
    y = jitact.gelu(x.transpose(1, 2) if layout == "columns" else x, bias=bias)
    sum(part.sum() for part in y.unbind()).backward()
    exact = bias.detach().clone().requires_grad_()
    sum(F.gelu(part + exact).sum() for part in (values[0, 1:3], values[1, 2:3])).backward()
    torch.testing.assert_close(bias.grad, exact.grad)
    assert not x.grad.values().isnan().any()


def test_operands_that_are_overwritten(device: str) -> None:
    x = jagged(device, 6)
    doubled = x * 2
    y = jitact.elu(doubled, residual=doubled, inplace=True)
    (dx,) = torch.autograd.grad(y.values().sum(), x)
    exact = x.values().detach().requires_grad_()
    expected = F.elu(2 * exact) + 2 * exact
    torch.testing.assert_close(y.values(), expected)
    torch.testing.assert_close(dx.values(), torch.autograd.grad(expected.sum(), exact)[0])


OTHERS = (5, 0, 3, 1)
STRIDED = torch.nested.nested_tensor([torch.ones(3, 6, dtype=torch.float64)])
ERRORS = [
    (lambda x: jitact.swiglu(x, jagged("cpu", 6, lengths=OTHERS)), "swiglu: up has the shape .* it must be jagged alike"),
    (lambda x: jitact.swiglu(x, alike(x)), r"swiglu: up has the shape \(4, j\d+\), beside"),
    (
        lambda x: jitact.swiglu(*[x.transpose(1, 2)] * 2, row_weight=alike(x)),
        r"swiglu\+row_weight: row_weight has the shape \(4, j\d+\), beside \(4, 6, j\d+\)",
    ),
    (lambda x: jitact.gelu(x, residual=x.values().detach()), r"gelu\+residual: residual has the shape \(9, 6\), beside"),
    (lambda x: jitact.gelu(x, residual=torch.ones(4, 1, 6)), r"gelu\+residual: residual has the shape \(4, 1, 6\)"),
    (lambda x: jitact.gelu(x, residual=torch.ones(1, 1, 1, 1)), r"gelu\+residual: residual has the shape \(1, 1, 1, 1\)"),
    (lambda x: jitact.swiglu(x, x, row_weight=torch.ones(6)), r"swiglu\+row_weight: row_weight has the shape"),
    (lambda x: jitact.swiglu(x, dim=1), r"swiglu: dim must be behind the jagged dimension of \(4, j\d+, 6\), got 1"),
    (lambda x: jitact.swiglu(x, dim=3), r"swiglu: dim must be behind the jagged dimension of \(4, j\d+, 6\), got 3"),
    (lambda x: jitact.gelu(x, bias=torch.ones(9), channel_dim=-2), r"gelu\+bias: bias has a value for each .* dimension -2"),
    (lambda x: jitact.prelu(x, torch.ones(6)), "prelu: weight has a value for each index of dimension 1"),
    (lambda x: jitact.gelu(x, bias=torch.ones(7)), r"gelu\+bias: the number of values of bias must be 1 or 6"),
    (lambda x: jitact.relu(x, inplace=True), "relu: a leaf that requires a gradient cannot be changed in place"),
    (lambda x: jitact.swiglu(x, STRIDED), "swiglu: up must be a dense .* got a nested float64 tensor; make it with layout="),
    (lambda x: jitact.gelu(x, bias=STRIDED), r"gelu\+bias: bias must be a dense .* got a nested float64 tensor"),
    (lambda x: jitact.relu(x.detach().long()), "relu: expected .* got an int64 tensor"),
]


@pytest.mark.parametrize(("call", "what"), ERRORS)
def test_errors_about_jagged_tensors(call: Callable, what: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=f"^{what}"):
        call(jagged("cpu", 6))
