"""Activations followed by dropout, which `replace(dropout=True)` fuses."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import jitact
from jitact.replacing.dropouts import Dropping, _BeforeDropout
from jitact.replacing.pending import Pending


class Block(nn.Module):
    """One dropout module, called after the activation and again at the end."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.a, self.act, self.drop, self.b = nn.Linear(6, 64), act or nn.GELU(), nn.Dropout(0.4), nn.Linear(64, 6)

    def hidden(self, x: Tensor) -> Tensor:
        return self.drop(self.act(self.a(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.b(self.hidden(x)))


class ByName(Block):
    """With local variables, and F.dropout."""

    def hidden(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.act(x)
        x = F.dropout(x, 0.4, training=self.training)
        return x


class Twice(Block):
    """Uses the activation's result for more than dropout."""

    def hidden(self, x: Tensor) -> Tensor:
        y = self.act(self.a(x))
        z = self.drop(y)
        return z + y


class Afterwards(Block):
    """Changes the activation's input, which fused with dropout it would save."""

    def hidden(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.drop(self.act(x))
        x.data.mul_(3)
        return y


class Lent(Block):
    """Passes the activation on, too."""

    def hidden(self, x: Tensor) -> Tensor:
        return self.drop(self.act(self.a(x)))

    def lent(self) -> list[nn.Module]:
        return [self.act]


class Bounded(Block):
    """Calls another function on the result."""

    def hidden(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.act(self.a(x))))


class Alpha(Block):
    """Calls another module that may drop."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.AlphaDropout()


class InOrder(nn.Sequential):
    """An nn.Sequential."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__(nn.Linear(6, 64), act or nn.GELU(), nn.Dropout(0.4))

    def hidden(self, x: Tensor) -> Tensor:
        return self(x)


BLOCKS = {"a method": Block, "by name": ByName, "in order": InOrder, "in place": lambda: InOrder(nn.ReLU(inplace=True))}


@pytest.mark.parametrize("what", BLOCKS)
def test_blocks(what: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(BLOCKS[what]()), torch.randn(50, 6)
    plain = copy.deepcopy(model)
    assert not any(isinstance(each, Dropping) for each in plain.modules())
    report = jitact.replace(model, dropout=True)
    (done,) = report.replaced
    assert done.new.endswith(" with the dropout") and not report.undropped and "with dropout" in str(model)
    act, before = (F.relu if what == "in place" else F.gelu), next(name for name, _ in plain[0].named_children())
    exact = act(plain[0].get_submodule(before)(x))
    for each in (model, pickle.loads(pickle.dumps(copy.deepcopy(model)))):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            y = each[0].hidden(x)
        names = [event.name for event in profile.events()]
        assert sum(name.startswith("jitact::") for name in names) == 1 and "aten::dropout" not in names
        share = (y == 0)[exact != 0].double().mean()
        assert 0.3 < share < 0.5
        torch.testing.assert_close(y, torch.where(y == 0, 0.0, exact / 0.6), rtol=1e-4, atol=1e-6)
        y.sum().backward()
        bias = plain[0].get_submodule(before).bias
        (expected,) = torch.autograd.grad((exact * (y != 0) / 0.6).sum(), bias, retain_graph=True)
        torch.testing.assert_close(each[0].get_submodule(before).bias.grad, expected, rtol=1e-4, atol=1e-4)
        each.eval()
        torch.testing.assert_close(each(x), plain.eval()(x))
        assert jitact.restore(each) == 1 and torch.equal(each(x), plain(x))


def test_a_part_of_a_sequence_gives_tensors() -> None:
    model, x = nn.Sequential(*InOrder()), torch.randn(50, 6)
    jitact.replace(model, dropout=True)
    for in_mode in (model.train, model.eval):
        y = in_mode()[:2](x)
        assert type(y) is Tensor
        torch.testing.assert_close(y, F.gelu(model[0](x)))


def test_what_waits_is_no_tensor() -> None:
    waiting = Pending(jitact.get("gelu")(), torch.randn(50, 6))
    assert not isinstance(waiting, Tensor) and repr(waiting) == repr(waiting.value())
    torch.testing.assert_close(waiting % 1, waiting.value() % 1)


def test_modes_are_those_of_the_call() -> None:
    """And what changes before the dropout is an error."""
    act, x = jitact.get("gelu")(), torch.randn(50, requires_grad=True)
    with torch.no_grad():
        pending = _BeforeDropout(act, x)
    assert not F.dropout(pending, 0.5).requires_grad and F.dropout(_BeforeDropout(act, x), 0.5).requires_grad
    pending = _BeforeDropout(act, x.detach())
    with torch.no_grad():
        x += 1
    with pytest.raises(RuntimeError, match="gelu together with what follows it, but its input was changed in place"):
        F.dropout(pending, 0.5)


def test_products_with_what_waits_for_dropout() -> None:
    """And with a keyword argument, which products of PyTorch take."""
    act, x, out = jitact.get("gelu")(), torch.randn(50), torch.empty(50)
    expected = F.gelu(x) * x
    for found in (_BeforeDropout(act, x) * x, torch.mul(x, _BeforeDropout(act, x), out=out), out):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(F.dropout(Pending(act, x), 0.5, False), F.gelu(x))
    torch.manual_seed(0)
    found = F.dropout(Pending(act, x), 0.5)  # of a gate: PyTorch's masks
    torch.manual_seed(0)
    torch.testing.assert_close(found, F.dropout(F.gelu(x), 0.5))


@pytest.mark.parametrize("segments", [0, 2, 3, 4])
def test_checkpoints_between_an_activation_and_its_dropout(segments: int) -> None:
    """These are given tensors: reentrant ones lose the gradients of anything else, without a word."""
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 6))
    assert jitact.replace(model, dropout=True).replaced[0].new.endswith("with the dropout")
    y = x = torch.randn(50, 6, requires_grad=True)
    for layer in model if segments == 0 else ():
        y = checkpoint(layer, y, use_reentrant=True)
    y = y if segments == 0 else checkpoint_sequential(model, segments, x, use_reentrant=True)
    (x + y).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_masks_are_pytorchs_unless_it_is_asked_for() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Block()), torch.randn(50, 6)
    torch.manual_seed(1)
    expected = model(x)
    assert not jitact.replace(model).undropped
    torch.manual_seed(1)
    torch.testing.assert_close(model(x), expected)
    model = InOrder()
    jitact.replace(model, dropout=True)
    model[1].eval()  # the activation alone
    torch.manual_seed(1)
    found = model(x)
    torch.manual_seed(1)
    torch.testing.assert_close(found, F.dropout(F.gelu(model[0](x)), 0.4))


def test_what_is_not_fused() -> None:
    hooked, undropped = Block(), nn.Sequential(nn.GELU(), nn.Linear(6, 6))
    own = nn.Sequential(nn.GELU(), type("Own", (nn.Dropout,), {})())
    others = undropped, hooked, Afterwards(nn.Sigmoid()), Alpha(), own, Lent(), Bounded(), InOrder(), InOrder(), InOrder()
    others[-3][2].register_forward_hook(lambda *args: None)
    others[-2][2].forward = others[-1].forward = lambda x: x
    model = nn.Sequential(Twice(), Block(nn.SiLU(inplace=True)), Block(), *others)
    hooked.drop.register_forward_hook(lambda *args: None)
    report = jitact.replace(model, dropout=True)
    why = {each.path: each.why for each in report.undropped}
    assert why == {
        "0.act": "hidden does more with it than drop",
        "1.act": "it overwrites its input",
        "4.act": "drop has hooks",
        "5.act": "hidden changes x in place",
        "8.act": "lent passes it on",
        "10.1": "2 has hooks",
        "12.1": "the forward of InOrder was replaced on the module",
    }
    assert "not fused with the dropout:" in repr(report)
    assert [name for name, each in model.named_modules() if isinstance(each, Dropping)] == ["2.act"]
    with pytest.raises(TypeError, match=r"replace\(\): dropout must be True or False, .* got 0.5"):
        jitact.replace(model, dropout=0.5)


def test_inputs_that_others_see_are_overwritten_by_the_activation_alone() -> None:
    layers, x = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.5)), torch.randn(64)
    (left,) = jitact.replace(layers, dropout=True).undropped
    assert left.why == "it overwrites its input"
    given = x.clone()
    layers(given)
    assert torch.equal(given, x.relu())


class Scaled(nn.Linear):
    """A module whose result its user's code may keep."""


def wrapped() -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.forward = lambda x: x
    return layer


@pytest.mark.parametrize(
    "before", [nn.Identity, nn.Flatten, lambda: nn.Sequential(nn.Identity()), lambda: Scaled(6, 6), wrapped]
)
def test_inputs_that_others_may_see(before) -> None:
    (left,) = jitact.replace(nn.Sequential(before(), nn.ReLU(inplace=True), nn.Dropout(0.5)), dropout=True).undropped
    assert left.why == "it overwrites its input"
    x, model = torch.randn(9, 6), nn.Sequential(before(), nn.ReLU(), nn.Dropout(0.5))
    jitact.replace(model, dropout=True)
    torch.manual_seed(0)
    found = model(x)
    torch.manual_seed(0)
    assert not torch.equal(found, F.dropout(F.relu(model[0](x))))  # which has PyTorch's masks


def test_inputs_that_others_see_later() -> None:
    model, x, seen = InOrder(nn.ReLU(inplace=True)), torch.randn(50, 64), []
    jitact.replace(model, dropout=True)
    given = x.clone()
    nn.Sequential(*list(model)[1:])(given)
    assert torch.equal(given, x.relu())
    model[0].register_forward_hook(lambda module, args, y: seen.append((y, y.relu())))
    model(torch.randn(50, 6))
    assert torch.equal(*seen[0])
    model = Block(nn.ReLU())
    jitact.replace(model, dropout=True)
    model.act.inplace, model.a = True, nn.Identity()
    given = x.clone()
    model(given)
    assert torch.equal(given, x.relu())


def test_compiled_and_hooks_that_come_later() -> None:
    torch.manual_seed(0)
    model, x, seen = nn.Sequential(Block()), torch.randn(50, 6), []
    jitact.replace(model, dropout=True)
    torch._dynamo.reset()
    compiled = torch.compile(model[0].hidden, backend="aot_eager", fullgraph=True)
    y = compiled(x)
    assert 0.2 < (y == 0).double().mean() < 0.6 and not torch.equal(compiled(x), y)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, y: seen.append(type(y)))
    try:
        model(x)
    finally:
        handle.remove()
    assert set(seen) == {Tensor}
    seen.clear()
    layers = InOrder()
    jitact.replace(layers, dropout=True)
    layers[2].forward = lambda y: seen.append(type(y))
    layers(x)
    del layers[2].forward
    layers[2].register_forward_pre_hook(lambda module, args: seen.append(type(args[0])))
    layers(x)
    assert seen == [Tensor, Tensor]
