"""Derivatives of all orders and modes, torch.func, torch.compile, and torch.library.opcheck."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from common import CASE_IDS, CASES, PLAIN, PLAIN_IDS, SLOW

import jitact
from jitact.configs import configure
from jitact.records import Activation


def points(device: str, requires_grad: bool = True) -> torch.Tensor:
    """Float64 values on both sides of every kink and away from all of them."""
    values = [-7.3, -3.4, -2.2, -1.3, -0.7, -0.3, 0.05, 0.3, 0.7, 1.4, 2.7, 3.6, 5.3, 7.1]
    return torch.tensor(values, dtype=torch.float64, device=device, requires_grad=requires_grad)


@pytest.mark.parametrize(("activation", "save"), CASES, ids=CASE_IDS)
def test_gradcheck(activation: Activation, save: str, device: str) -> None:
    module, x = jitact.get(activation.name)(save=save), points(device)
    assert torch.autograd.gradcheck(module, x, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert torch.autograd.gradgradcheck(module, x, check_fwd_over_rev=True)


@pytest.mark.parametrize("name", ["relu", "hardtanh", "leaky_relu"])
def test_second_derivatives_of_what_keeps_a_bit(name: str, device: str) -> None:
    """They are 0. Without x there is nothing to differentiate, but by dy."""
    function, x = getattr(jitact, name), points(device)
    dy = torch.ones_like(x, requires_grad=True)
    assert not torch.autograd.grad(function(x), x, dy.detach(), create_graph=True)[0].requires_grad
    slope = torch.autograd.grad(function(x, save="input"), x, dy.detach(), create_graph=True)[0]
    assert not torch.autograd.grad(slope.sum(), x)[0].any()
    dx = torch.autograd.grad(function(x), x, dy, create_graph=True)[0]
    assert torch.equal(torch.autograd.grad(dx.sum(), dy)[0], slope)


@pytest.mark.parametrize("activation", PLAIN, ids=PLAIN_IDS)
def test_func_transforms(activation: Activation, device: str) -> None:
    ours = jitact.get(activation.name)()
    exact = activation.exact or activation.reference
    params = [default for _, default in activation.params]
    x = points(device, requires_grad=False)

    def reference(t: torch.Tensor) -> torch.Tensor:
        return exact(t, *params)

    batch = torch.stack([x, x + 0.01, x - 0.01]).t()  # the batch dimension is not the first in memory
    torch.testing.assert_close(torch.vmap(ours, in_dims=1, out_dims=1)(batch), reference(batch))
    grad = torch.func.vmap(torch.func.grad(lambda t: ours(t).sum()), in_dims=1)(batch)
    torch.testing.assert_close(grad, torch.func.grad(lambda t: reference(t).sum())(batch).t())
    _, tangent = torch.func.jvp(ours, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, torch.func.grad(lambda t: reference(t).sum())(x))
    if "bit" not in activation.saves:
        hessian = torch.func.jacfwd(torch.func.jacrev(lambda t: ours(t).sum()))(x)
        torch.testing.assert_close(hessian, torch.func.hessian(lambda t: reference(t).sum())(x))


def test_forward_mode_outside_torch_func(device: str) -> None:
    x = points(device, requires_grad=False)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        for name in ("relu", "selu"):
            tangent = torch.autograd.forward_ad.unpack_dual(jitact.get(name)()(dual)).tangent
            expected = torch.func.grad(lambda t, name=name: jitact.get(name).Model()(t).sum())(x)
            torch.testing.assert_close(tangent, expected)


@pytest.mark.parametrize(("activation", "save"), CASES, ids=CASE_IDS)
def test_opcheck(activation: Activation, save: str, device: str) -> None:
    """torch.library.opcheck on every operator: schema, fake implementation, functionalisation, dynamic shapes."""
    params = tuple(default for _, default in activation.params)
    x = torch.randn(5, 7, device=device).t()
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")  # not autograd's: operators have no gradient
    for inplace in (False, *([True] if activation.inplace else [])):
        config = configure(activation, inplace, save, False)
        torch.library.opcheck(config.forward_op, (x.clone(), *params), test_utils=tests)
    kept = torch.ops.jitact.__getattr__(f"{activation.name}_forward_bit")(x, *params)[1] if save == "bit" else x.abs() + 0.1
    torch.library.opcheck(config.backward_op, (torch.randn_like(x), kept, *params), test_utils=tests)


COMPILED = ["relu", SLOW("selu"), "gelu", SLOW("leaky_relu"), "sigmoid"]


@pytest.mark.parametrize("name", COMPILED)
def test_compile_fullgraph(name: str, device: str) -> None:
    torch._dynamo.reset()
    for save in jitact.get(name).activation.saves:
        module = jitact.get(name)(save=save)
        compiled = torch.compile(lambda t, module=module: module(t * 2) + 1, fullgraph=True, dynamic=False)
        for x in (torch.randn(64, 33, device=device), torch.randn(33, 64, device=device).t()):
            x.requires_grad_()
            (ours,) = torch.autograd.grad(compiled(x).sum(), x)
            (eager,) = torch.autograd.grad((module(x * 2) + 1).sum(), x)
            torch.testing.assert_close(ours, eager)


def test_compile_functions_and_dynamic_shapes(device: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: jitact.leaky_relu(t, 0.2) + jitact.softsign(t), fullgraph=True, dynamic=True)
    for n in (5, 17, 64):
        x = torch.randn(n, 3, device=device)
        torch.testing.assert_close(compiled(x), jitact.leaky_relu(x, 0.2) + jitact.softsign(x))


def test_compile_in_place(device: str) -> None:
    torch._dynamo.reset()
    module = jitact.get("relu")(inplace=True)
    compiled = torch.compile(lambda t: module(t + 1) * 2, fullgraph=True)
    x = torch.randn(40, device=device, requires_grad=True)
    (ours,) = torch.autograd.grad(compiled(x).sum(), x)
    torch.testing.assert_close(ours, 2 * ((x.detach() + 1) > 0).float())


def test_checkpointing_and_hooks(device: str) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), jitact.get("relu")(), torch.nn.Linear(8, 8)).to(device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    (plain,) = torch.autograd.grad(module(x).sum(), x)
    (recomputed,) = torch.autograd.grad(torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False).sum(), x)
    torch.testing.assert_close(plain, recomputed)


@pytest.mark.parametrize(("activation", "save"), CASES, ids=CASE_IDS)
def test_graphs_do_not_keep_themselves_alive(activation: Activation, save: str) -> None:
    """A graph without references is freed at once, without the garbage collector."""
    gc.disable()
    try:
        y = jitact.get(activation.name)(save=save)(torch.randn(8, requires_grad=True))
        graph = weakref.ref(y.grad_fn)
        del y
        assert graph() is None
    finally:
        gc.enable()


def test_a_kept_tensor_changed_in_place_is_noticed(device: str) -> None:
    x = torch.randn(10, device=device, requires_grad=True)
    hidden = x * 1
    y = jitact.gelu(hidden)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
