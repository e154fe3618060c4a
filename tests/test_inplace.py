"""In-place calls: views, second derivatives, version counters, torch.compile, and PyTorch's errors."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from common import PLAIN, SLOW
from test_autograd import points
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import jitact

INPLACE = [activation for activation in PLAIN if activation.inplace]
CASES = [(activation.name, save) for activation in INPLACE for save in activation.saves]
NAMES = [activation.name for activation in INPLACE] + ["rrelu"]
BACKENDS = ["eager", "aot_eager", "inductor"]


def pairs(name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """jitact's and PyTorch's module, in place; rrelu with a fixed slope."""
    arguments = (0.25, 0.25) if name == "rrelu" else tuple(default for _, default in jitact.get(name).activation.params)
    return jitact.get(name)(*arguments, inplace=True), jitact.get(name).activation.module(*arguments, inplace=True)


@pytest.mark.parametrize(("name", "save"), CASES, ids=map("-".join, CASES))
def test_derivatives(name: str, save: str, device: str) -> None:
    module, x = jitact.get(name)(inplace=True, save=save), points(device)
    for view in (lambda t: t, lambda t: t.view(2, 7)):
        assert torch.autograd.gradcheck(lambda t, view=view: module(view(t * 1)), x, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(lambda t, view=view: module(view(t * 1)), x, check_fwd_over_rev=True)


def test_derivatives_where_the_output_does_not_give_the_slope(device: str) -> None:
    module = jitact.get("elu")(-0.5, inplace=True)
    assert torch.autograd.gradgradcheck(lambda t: module(t * 1), points(device))


CHANGES: dict[str, Callable[[], object]] = {
    "with a gradient": torch.enable_grad,
    "under no_grad": torch.no_grad,
    "under inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("name", NAMES)
def test_every_change_is_noticed(name: str, how: str, device: str) -> None:
    """Backward raises an error if a saved tensor was changed in place, whether or not the change was recorded."""
    module, _ = pairs(name)
    for training in (True, False) if name == "rrelu" else (True,):
        for view in (lambda t: t, lambda t: t[1:], lambda t: t.detach()):
            weight, h = torch.randn(2, 8, device=device)
            y = weight.requires_grad_() * h
            with CHANGES[how]():
                module.train(training)(view(h))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


@pytest.mark.parametrize("name", ["relu", "silu", "rrelu"])
def test_inference_tensors(name: str, device: str) -> None:
    module, plain = pairs(name)
    with torch.inference_mode():
        x = torch.randn(8, device=device)
        expected = plain(x.clone())
        torch.testing.assert_close(module(x), expected)
    with pytest.raises(RuntimeError, match="inference tensor cannot be changed in place"):
        module(x)
    torch.testing.assert_close(x, expected)


def gradient(body: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The gradient of ``x`` through a tensor that ``body`` changes; that tensor; by how much its version rose."""
    x = x.detach().requires_grad_()
    h = x * 1
    version = h._version
    body(h).sum().backward()
    return x.grad, h.detach(), h._version - version


# Inductor for one activation each that saves a bit, its output, its input, and random slopes; the others by -m slow.
@pytest.mark.parametrize(("name", "backend"), [
    (SLOW if backend == "inductor" and name not in ("relu", "elu", "silu", "rrelu") else pytest.param)(name, backend)
    for name in NAMES for backend in BACKENDS
])  # fmt: skip
def test_compiled_on_an_input_that_records(name: str, backend: str, device: str) -> None:
    """PyTorch's gradient; or its error, if backward needs the overwritten input."""
    torch._dynamo.reset()
    ours, theirs = pairs(name)
    x = torch.tensor([-3.5, -1.0, -0.2, 0.3, 2.0, 7.0], device=device)
    expected = gradient(lambda h: theirs(h) * 2, x)
    compiled = torch.compile(lambda h: ours(h) * 2, backend=backend, fullgraph=True)
    try:
        dx, h, risen = gradient(compiled, x)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error) and jitact.get(name).activation.saves == ("input",)
        return
    torch.testing.assert_close(dx, expected[0])
    torch.testing.assert_close(h, expected[1])
    assert risen == expected[2]


def test_compiled_after_a_graph_break(device: str) -> None:
    for name in ("ReLU", "LeakyReLU", "ELU"):
        torch._dynamo.reset()
        first, second = torch.nn.Linear(8, 8, device=device), torch.nn.Linear(8, 8, device=device)
        x, weights = torch.randn(4, 8, device=device), []
        for act in (jitact.get(name)(inplace=True), getattr(torch.nn, name)(inplace=True)):

            def body(x: torch.Tensor, act: torch.nn.Module = act) -> torch.Tensor:
                h = first(x)
                torch._dynamo.graph_break()
                return second(act(h))

            weights.append(torch.autograd.grad(torch.compile(body, backend="aot_eager")(x).sum(), first.weight)[0])
        torch.testing.assert_close(*weights)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["relu", "silu", "rrelu"])
def test_compiled_with_nothing_recorded(name: str, backend: str, device: str) -> None:
    torch._dynamo.reset()
    ours, theirs = pairs(name)
    weight, h = torch.randn(2, 8, device=device)
    expected = theirs(h.clone())
    y = weight.requires_grad_() * h
    torch.testing.assert_close(torch.compile(lambda h: ours(h) * 2, backend=backend, fullgraph=True)(h), expected * 2)
    torch.testing.assert_close(h, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["relu", "silu", "rrelu"])
def test_compiled_on_views(name: str, device: str) -> None:
    """Views of an input and of an intermediate result, and an input that is a view."""
    ours, theirs = pairs(name)
    bodies = [
        lambda act, h: act(h[::2]).sum() + (h * 3).sum(),
        lambda act, h: (act((h + 1).view(2, -1)) * 3).sum(),
        lambda act, h: act(h.view(-1)).sum() + act(h * 2).square().sum(),
    ]
    for body in bodies:
        torch._dynamo.reset()
        results = []
        for act, compiled in ((theirs, False), (ours, True)):
            call = lambda h, act=act, body=body: body(act, h)  # noqa: E731
            x = torch.linspace(-3, 3, 8, device=device, requires_grad=True)
            y = (torch.compile(call, backend="aot_eager") if compiled else call)(x * 1)
            results.append(torch.autograd.grad(y, x)[0])
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", ["relu", "silu", "rrelu"])
def test_negated_views(name: str, device: str) -> None:
    """The imaginary part of a conjugate is a view with the negative bit."""
    ours, theirs = pairs(name)
    z = torch.randn(8, dtype=torch.complex64, device=device)
    mine, other = z.clone(), z.clone()
    y = ours(mine.conj().imag)
    torch.testing.assert_close(y, theirs(other.conj().imag))
    torch.testing.assert_close(mine, other)
    z.requires_grad_()
    gradients = [torch.autograd.grad(act((z.conj() * 1).imag).sum(), z)[0] for act in (ours, theirs)]
    torch.testing.assert_close(*gradients)


def test_what_cannot_be_written_to(device: str) -> None:
    for name in ("relu", "rrelu"):
        for record in (False, True):
            x = torch.ones(1, device=device, requires_grad=record)
            with pytest.raises(RuntimeError, match="more than one element of the written-to tensor") as error:
                jitact.get(name)(inplace=True)((x * 1).expand(4))
            assert "aoti_torch" not in str(error.value)
    leaf = torch.randn(4, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="view of a leaf"):
        jitact.relu(leaf.view(2, 2), inplace=True)
    with torch.no_grad():
        version = leaf._version
        jitact.relu(leaf, inplace=True)
    assert leaf._version > version and leaf.min() >= 0


def test_no_elements_at_strides_of_0(device: str) -> None:
    """Results of operations on empty tensors can have strides of 0."""
    for save in ("input", "bit"):
        x = (torch.ones(6, 0, 1, 12, device=device, requires_grad=True)[..., ::2]) * 1
        assert 0 in x.stride()
        y = jitact.relu(x, inplace=True, save=save)
        assert y is x and torch.autograd.grad(y.sum(), y)[0].shape == x.shape


@pytest.mark.parametrize("name", ["relu", "silu"])
def test_operands_that_are_views_of_the_same_memory(name: str, device: str) -> None:
    """What backward keeps of them is not x's, though autograd counts changes of all views together."""
    function, base = getattr(jitact, name), torch.randn(4, 4, device=device, dtype=torch.float64, requires_grad=True)
    for options in (lambda z: {"bias": z[3]}, lambda z: {"residual": z[1:]}, lambda z: {"bias": z[0], "residual": z[1:]}):
        found = []
        for inplace in (True, False):
            z = base * 1
            y = function(z[:3], **options(z), inplace=inplace)
            found.append((y.detach().clone(), *torch.autograd.grad(y.square().sum(), base)))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["relu", "silu"])
def test_compiled_with_a_bias_that_is_a_view(name: str, device: str) -> None:
    """In a graph the bias that backward keeps is not overwritten, whether it is a view with a history or without."""
    function, x = getattr(jitact, name), torch.randn(4, 4, device=device, dtype=torch.float64, requires_grad=True)
    for view in (lambda z: z[3], lambda z: z.diagonal(), lambda z: z.detach()[0]):
        torch._dynamo.reset()

        def body(x: torch.Tensor, inplace: bool, view: Callable = view) -> torch.Tensor:
            z = x * 1
            return function(z, bias=view(z), residual=z, inplace=inplace)

        compiled = torch.compile(body, backend="aot_eager", fullgraph=True)
        found = [(y.detach(), *torch.autograd.grad(y.square().sum(), x)) for y in (compiled(x, True), body(x, False))]
        torch.testing.assert_close(*found)


def test_in_place_inside_transforms(device: str) -> None:
    x = torch.linspace(-3, 3, 8, dtype=torch.float64, device=device)
    for name in ("relu", "elu", "silu"):
        ours, theirs = pairs(name)
        for transform in (lambda f: torch.func.grad(lambda t: f(t * 1).sum()), lambda f: torch.func.jacfwd(lambda t: f(t * 1)),
                          lambda f: torch.func.functionalize(lambda t: f(t * 1))):  # fmt: skip
            torch.testing.assert_close(transform(ours)(x), transform(theirs)(x))


@pytest.mark.parametrize("name", ["elu", "silu", "relu"])
def test_selective_checkpoints_that_keep_the_result(name: str, device: str) -> None:
    """The operator is not called again there, so what it changes must not be missed."""
    activation = functools.partial(getattr(jitact, name), inplace=True)

    def keeping(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if "jitact" in str(operator) else CheckpointPolicy.PREFER_RECOMPUTE

    def gradient(checkpointed: bool) -> torch.Tensor:
        x = torch.linspace(-3, 3, 40, device=device).requires_grad_()
        function = lambda x: activation(x * 2) * x.sin()  # noqa: E731
        contexts = functools.partial(create_selective_checkpoint_contexts, keeping)
        y = checkpoint(function, x, use_reentrant=False, context_fn=contexts) if checkpointed else function(x)
        return torch.autograd.grad(y.square().sum(), x)[0]

    torch.testing.assert_close(gradient(True), gradient(False), rtol=0, atol=0)


def test_hooks_and_checkpoints(device: str) -> None:
    """Gradients do not change with save_on_cpu and with checkpoints."""
    x = torch.randn(4, 8, device=device, requires_grad=True)
    for name in ("relu", "elu", "silu"):
        module = jitact.get(name)(inplace=True)
        (plain,) = torch.autograd.grad(module(x * 1).sum(), x)
        with torch.autograd.graph.save_on_cpu():
            y = module(x * 1)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], plain)
        y = torch.utils.checkpoint.checkpoint(lambda t, module=module: module(t * 1), x, use_reentrant=False)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], plain)


DRAWING = {
    "a function": lambda: lambda x: jitact.silu(x, dropout=0.5),
    "its input kept in place of bits": lambda: lambda x: jitact.relu(x, dropout=0.5, save="input"),
    "bits": lambda: lambda x: jitact.relu(x, dropout=0.5),
    "a module": lambda: jitact.get("gelu")(bias=8, dropout=0.5, channel_dim=1),
}


@pytest.mark.parametrize("what", DRAWING)
def test_numbers_are_drawn_in_the_order_of_forward(what: str, device: str) -> None:
    """Even if saved-tensor hooks return other strides, as save_on_cpu does with pinned memory."""
    x = (torch.rand(2, 8, 4, 4, device=device) + 3).to(memory_format=torch.channels_last).requires_grad_()
    module = DRAWING[what]()
    function = module.to(device) if isinstance(module, torch.nn.Module) else module
    hooks = (lambda t: t.contiguous(), lambda t: t)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        y = function(x)
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.equal(y == 0, dx == 0) and 0 < (y == 0).double().mean() < 1
    if dx.requires_grad:
        (ddx,) = torch.autograd.grad(dx.sum(), x)
        assert not ddx[y == 0].any()


@pytest.mark.parametrize("function", [jitact.relu, jitact.hardtanh, lambda x: jitact.prelu(x, x.new_full((8,), 0.3))])
def test_hooks_may_return_bits_with_other_strides(function: Callable, device: str) -> None:
    x = torch.randn(4, 8, device=device, requires_grad=True)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    apart = lambda t: t.new_empty(*t.shape, 2)[..., 0].copy_(t)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, apart):
        y = function(x)
    assert torch.equal(*torch.autograd.grad(y.sum(), x), expected)


def test_compiled_autograd(device: str) -> None:
    x = torch.randn(4, 8, device=device, requires_grad=True)
    for name in ("relu", "elu", "silu"):
        torch._dynamo.reset()
        module = jitact.get(name)(inplace=True)
        (expected,) = torch.autograd.grad(module(x * 1).square().sum(), x)
        x.grad = None
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            module(x * 1).square().sum().backward()
        torch.testing.assert_close(x.grad, expected)


def test_second_derivatives_through_saved_tensor_hooks(device: str) -> None:
    x = points(device)
    with torch.autograd.graph.save_on_cpu():
        (dx,) = torch.autograd.grad(jitact.silu(x * 1, inplace=True).square().sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(torch.nn.functional.silu(x).square().sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(dx.sum(), x), torch.autograd.grad(expected.sum(), x))
