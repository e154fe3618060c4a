"""Gated forms of activations with learned weights: the module owns them, and all gradients are computed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from common import SLOW
from torch import Tensor, nn
from torch.func import functional_call, vmap

import jitact

SIZES: dict[str, dict[str, Any]] = {"prelu": {"weight": 6}, "xielu": {}}
pytestmark = pytest.mark.parametrize("name", SIZES)


def both_of(name: str, device: str, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A module and its reference in PyTorch, with the same weights."""
    cls = jitact.gated(name)
    ours, theirs = (each(**SIZES[name], **options, device=device, dtype=dtype) for each in (cls, cls.Model))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in ours.parameters():
            weight.copy_(torch.rand(weight.shape, generator=generator) + 0.1)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def drawn(*shape: int, device: str, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x.to(device, dtype).requires_grad_()


def assert_alike(ours: nn.Module, theirs: nn.Module, *tensors: Tensor, row_weight: Tensor | None = None) -> None:
    """Compares results, gradients of tensors and weights, and, in float64, second derivatives."""
    twice = tensors[0].dtype is torch.float64
    given = {} if row_weight is None else {"row_weight": row_weight}
    y = ours(*tensors, **given)
    expected = theirs(*tensors) if row_weight is None else theirs(*tensors) * row_weight[..., None]
    torch.testing.assert_close(y, expected)
    dy = torch.cos(torch.arange(y.numel(), device=y.device, dtype=y.dtype)).view(y.shape)
    found, wanted = (
        torch.autograd.grad(result, [*tensors, *given.values(), *module.parameters()], dy, create_graph=twice)
        for result, module in ((y, ours), (expected, theirs))
    )
    torch.testing.assert_close(found, wanted)
    if twice:
        torch.testing.assert_close(*(torch.autograd.grad(sum(g.sum() for g in each), tensors) for each in (found, wanted)))


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
@pytest.mark.parametrize("rounding", ["once", SLOW("unfused")])
def test_of_one_tensor_and_of_two(name: str, layout: str, rounding: str, device: str) -> None:
    ours, theirs = both_of(name, device, layout=layout, rounding=rounding)
    assert_alike(ours, theirs, drawn(5, 12, device=device))
    assert_alike(ours, theirs, drawn(5, 12, device=device), row_weight=drawn(5, device=device))
    assert_alike(ours, theirs, drawn(4, 6, 3, device=device), drawn(4, 6, 3, device=device))
    plain = both_of(name, device, torch.float32, layout=layout, rounding=rounding)
    assert_alike(*plain, drawn(5, 12, device=device, dtype=torch.float32))


def test_modules_travel(name: str, device: str) -> None:
    ours, _ = both_of(name, device)
    x, cls = drawn(5, 12, device=device), type(ours)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(other) is cls and torch.equal(other(x), ours(x))
    assert pickle.loads(pickle.dumps(cls)) is cls
    weights = dict(ours.state_dict())
    assert torch.equal(cls.activation.function(x, **weights), ours(x))
    assert torch.equal(functional_call(cls(**SIZES[name]), weights, (x,)), ours(x))
    torch.testing.assert_close(vmap(ours)(x[:, None]), ours(x)[:, None])
    ours.reset_parameters()
    fresh = cls(**SIZES[name]).state_dict()
    assert all(torch.equal(value.cpu().float(), fresh[key]) for key, value in ours.state_dict().items())
    assert ("weight=6" in repr(ours)) == (name == "prelu")


def test_compiled(name: str, device: str) -> None:
    ours, theirs = both_of(name, device)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = drawn(5, 12, device=device)
    torch.testing.assert_close(compiled(x), theirs(x))
    dy = torch.ones(5, 6, dtype=torch.float64, device=device)
    found = torch.autograd.grad(compiled(x), [x, *ours.parameters()], dy)
    torch.testing.assert_close(found, torch.autograd.grad(theirs(x), [x, *theirs.parameters()], dy))


def test_what_is_learned_is_asked_for(name: str) -> None:
    with pytest.raises(TypeError, match=r"missing a required argument: '(weight|alpha_p)'"):
        jitact.gated(name).activation.function(torch.randn(5, 12))


def test_exports(name: str) -> None:
    space: dict[str, Any] = {}
    exec(jitact.export(jitact.gated(name), device="cpu"), space)
    given = space["get_init_inputs"]()
    ours, theirs = space["ModelNew"](*given), space["Model"](*given)
    gate, up = drawn(5, 6, device="cpu"), drawn(5, 6, device="cpu")
    found, wanted = (
        torch.autograd.grad(each.double()(gate, up).sum(), [gate, *each.parameters()]) for each in (ours, theirs)
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("cast", [False, True], ids=["wider weights", "autocast"])
def test_of_one_tensor_of_another_dtype_than_is_computed_in(name: str, cast: bool, device: str) -> None:
    """One tensor is converted to the common dtype as two are."""
    if name == "prelu" and not cast:
        pytest.skip("its weight is of x's dtype, as PyTorch's")
    ours, _ = both_of(name, device, dtype=torch.float32 if cast else torch.float64)
    x = drawn(5, 12, device=device, dtype=torch.float32)
    found = []
    for tensors in ((x,), x.chunk(2, -1)):
        with torch.autocast(device, torch.bfloat16, enabled=cast):
            y = ours(*tensors)
        found.append((y, *torch.autograd.grad(torch.cos(y).sum(), [x, *ours.parameters()])))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("others", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_multiplies_the_activation_may_be_of_another_dtype(name: str, others: torch.dtype, device: str) -> None:
    """The result is promoted by up; a row weight keeps its own dtype, as beside other gated activations."""
    ours, theirs = both_of(name, device, dtype=torch.bfloat16)
    gate, up = drawn(5, 6, device=device, dtype=torch.bfloat16), drawn(5, 6, device=device, dtype=others)
    weight = drawn(5, device=device, dtype=torch.float32)
    y = ours(gate, up, row_weight=weight)
    assert y.dtype is others
    wide = copy.deepcopy(theirs).double()
    exact = wide(gate.double(), up.double()) * weight.double()[:, None]
    gradients = torch.autograd.grad(y.sum(), [gate, up, weight, *ours.parameters()])
    wanted = torch.autograd.grad(exact.sum(), [gate, up, weight, *wide.parameters()])
    coarse = {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(y.double(), exact, **({"rtol": 1e-5, "atol": 1e-5} if others != torch.bfloat16 else coarse))
    for found, expected in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found.double(), expected.double(), **coarse)
