"""Which products `replace` fuses with an activation, and that the rest of a block sees no difference.

That is about changes in place, layouts of memory, what is kept for backward, and the report.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jitact
from jitact.replacing.gates import Gate
from jitact.replacing.pending import Pending


class Block(nn.Module):
    """Two projections and an activation that saves its output in PyTorch."""

    def __init__(self, up: type[nn.Module] | None = None) -> None:
        super().__init__()
        self.gate, self.act, self.inplace = nn.Linear(6, 6), nn.Sigmoid(), True
        self.up = nn.Linear(6, 6) if up is None else up()


class Halved(Block):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        activated = self.act(gate)
        gate *= 0.5
        return activated * self.up(x)


class Later(Block):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        y = self.act(gate) * self.up(x)
        gate *= 0.5
        return y + gate


class Turning(Block):
    """Changes what the turn before has activated."""

    def forward(self, x: Tensor) -> Tensor:
        gate, total = self.gate(x), torch.zeros(())
        for _ in range(2):
            gate.add_(1.0)
            total = total + self.act(gate) * self.up(x)
        return total


class Flagged(Block):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        activated = self.act(gate)
        F.leaky_relu(gate, 0.2, self.inplace)
        return activated * self.up(x)


class Handed(Block):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return self.act(gate) * self.up(gate)


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.relu_(x))


class InAMethod(Overwriting):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.limited(x))

    def limited(self, x: Tensor) -> Tensor:
        part = x[..., :3]
        part += 1.0
        return x


class Adding(Overwriting):
    """Changes what it has computed itself, as adapters of low rank do."""

    def forward(self, x: Tensor) -> Tensor:
        result = self.linear(x)
        result += self.linear(x) * 0.5
        x = x * 2
        x += 1
        return result + x


class Counting(Block):
    def forward(self, x: Tensor) -> Tensor:
        count = 0
        gate = self.gate(x)
        activated = self.act(gate)
        count += 1
        return activated * self.up(gate) * count


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        found = [model(x)]
    with torch.no_grad():
        found.append(model(x))
    y = model(x)
    return [*found, y.detach(), *torch.autograd.grad(y.square().sum(), list(model.parameters()))]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Halved, "forward changes gate in place"),
        (Later, "forward changes gate in place"),
        (Turning, "forward changes gate in place"),
        (Flagged, "forward changes gate in place"),
        (lambda: Handed(Overwriting), "forward gives gate to self.up in between"),
        (lambda: Handed(InAMethod), "forward gives gate to self.up in between"),
        (lambda: Handed(Adding), ""),
        (lambda: Counting(Adding), ""),
    ],
)
def test_what_changes_in_place_between(make: Callable[[], Block], why: str) -> None:
    model, x = make(), torch.randn(4, 6)
    expected = results(model, x)
    report = jitact.replace(model)
    assert [each.why for each in report.unfused] == ([why] if why else []), report
    assert isinstance(model.act, Gate) is (not why)
    torch.testing.assert_close(results(model, x), expected)


class Squeeze(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores, self.act = nn.Conv2d(4, 4, 1), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.act(self.scores(x.mean((2, 3), keepdim=True)))


def test_smaller_gates_leave_the_order_of_memory(device: str) -> None:
    small = torch.randn(2, 4, 1, 1, device=device)
    whole = torch.randn(2, 4, 5, 6, device=device)
    last = whole.to(memory_format=torch.channels_last)
    model = Squeeze().to(device)
    expected = [model(each) for each in (whole, last)]
    jitact.replace(model)
    for x, wanted in zip((whole, last), expected, strict=True):
        found = model(x)
        torch.testing.assert_close(found, wanted)
        assert found.stride() == wanted.stride()
    spaced = torch.randn(2, 8, 5, 6, device=device).transpose(1, 3)[..., :4].transpose(1, 3)
    for x in (last, whole.transpose(2, 3), spaced):
        for ours, theirs in (
            (jitact.swiglu(small, x), F.silu(small) * x),
            (jitact.gelu(small, residual=x), F.gelu(small) + x),
            (jitact.glu(x, small), x * small.sigmoid()),
        ):
            torch.testing.assert_close(ours, theirs)
            assert ours.stride() == theirs.stride()
    a, b = small.clone().requires_grad_(), last.clone().requires_grad_()
    dy = torch.randn_like(b)
    ours = torch.autograd.grad(jitact.swiglu(a, b), (a, b), dy)
    for own, wanted in zip(ours, torch.autograd.grad(F.silu(a) * b, (a, b), dy), strict=True):
        torch.testing.assert_close(own, wanted)
        assert own.stride() == wanted.stride()


def test_smaller_gates_of_any_shape_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b: jitact.swiglu(a, b), backend="aot_eager", dynamic=True, fullgraph=True)
    for shape in ((2, 4, 5, 6), (3, 6, 7, 5)):
        x = torch.randn(shape).to(memory_format=torch.channels_last)
        small = torch.randn(*shape[:2], 1, 1)
        found = compiled(small, x)
        torch.testing.assert_close(found, F.silu(small) * x)
        assert found.stride() == x.stride()


class Parts(nn.Module):
    """Whose gate is a small part of a projection that nothing else keeps."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.both, self.act, self.other = nn.Linear(8, 64), act, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        both = self.both(x)
        return self.other(x) * self.act(both[..., :8]) + both[..., 8:].unflatten(-1, (7, 8)).sum(-2)


@pytest.mark.parametrize("act", [nn.Sigmoid, nn.Tanh, nn.ReLU, nn.SiLU])
def test_no_wider_tensor_is_kept_than_before(act: type[nn.Module]) -> None:
    def kept(model: nn.Module) -> int:
        seen = {}
        pack = lambda t: seen.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = model(x)  # keeps the graph while it is counted
        return sum(seen.values()) + 0 * y.numel()

    x = torch.randn(32, 8, requires_grad=True)
    model = Parts(act())
    y, before = model(x), kept(model)
    jitact.replace(model)
    bits = x.numel() // 8  # of relu, beside the output that the product keeps
    assert isinstance(model.act, Gate) and kept(model) <= before + bits
    torch.testing.assert_close(model(x), y)


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act, self.second, self.scale = nn.Linear(6, 6), nn.GELU(), nn.Sigmoid(), 1.5


FACTOR = 3


class Scaled(Products):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x)) * -2.0 + self.second(x) * self.scale


class ScaledByAGlobal(Products):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x)) * FACTOR + FACTOR * self.second(x)


class TwoActivations(Products):
    def forward(self, x: Tensor) -> Tensor:
        first = self.second(self.linear(x))
        other = self.act(x)
        return first * other


@pytest.mark.parametrize("kind", [Scaled, ScaledByAGlobal])
def test_products_with_numbers_are_not_gates(kind: type[nn.Module]) -> None:
    x, model = torch.randn(4, 6), kind()
    expected, report = model(x), jitact.replace(model)
    assert [each.new for each in report.replaced] == ["jitact GELU(approximate='none')", "jitact Sigmoid()"]
    assert not report.unfused
    torch.testing.assert_close(model(x), expected)


def test_the_report_names_what_is_fused() -> None:
    x, model = torch.randn(4, 6), TwoActivations()
    expected, report = model(x), jitact.replace(model)
    assert [each.new for each in report.replaced] == ["jitact GEGLU with the product", "jitact Sigmoid()"]
    assert [each.why for each in report.unfused] == ["it is multiplied by act, which is fused with the product"]
    torch.testing.assert_close(model(x), expected)


def test_activations_with_a_life_of_their_own_are_left() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU())
    model[1].compile(backend="eager")
    report = jitact.replace(model)
    assert not report.replaced and report.left[0].why == "it was compiled by itself: call compile() after replace()"
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    model[1].activation = "gelu"
    report = jitact.replace(model)
    assert not report.replaced and report.left[0].why == "its attribute activation has the name of one of jitact's"


class Gated(Products):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x)) * x


def test_results_that_wait_have_no_attributes_before_they_are_made() -> None:
    with pytest.raises(AttributeError, match="_value"):
        Pending.__new__(Pending).shape  # noqa: B018
    x, model = torch.randn(4, 6), Gated()
    expected = model(x)
    jitact.replace(model)
    model.act.forward = torch.compiler.disable(model.act.forward)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), expected)
