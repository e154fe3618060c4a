"""PyTorch's functions whose result is multiplied, in the forward of modules: replaced by one kernel."""

from __future__ import annotations

import copy
import importlib
import inspect
import linecache
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

import jitact
from jitact.measuring.timing import kept_bytes
from jitact.replacing.functions import GatedForward, _runs_its_source
from jitact.replacing.syntax import parsed


class Block(nn.Module):
    """As in Meta's Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 10)

    def forward(self, x: Tensor, scale: float = 0.5, *, more: float = 1.0) -> NotEvaluated:  # noqa: F821
        return self.w2(F.silu(self.w1(x)) * self.w3(x)) * scale + more


class ByVariables(Block):
    def forward(self, x):
        gate = self.w1(x)
        up = self.w3(x)
        x = torch.nn.functional.silu(gate) * up
        return self.w2(x)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(6, 20), nn.Linear(10, 6)

    def forward(self, x):
        up, gate = self.both(x).chunk(2, dim=-1)
        return self.down(up * gelu(gate, approximate="tanh"))


class Cast(Block):
    def forward(self, x):
        return self.w2((torch.sigmoid(self.w1(x).float()) * self.w3(x).float()).type_as(x))


class InComprehension(Block):
    def forward(self, x):
        return self.w2(sum([F.silu(self.w1(x + k)) * self.w3(x) for k in range(2)]))


class Two(Block):
    def forward(self, x):
        return self.w2(F.mish(self.w1(x)) * self.w3(x) + F.silu(self.w1(x)) * self.w3(x))


class OfTwo(Block):
    """As in WaveNet."""

    def forward(self, x):
        return self.w2(torch.tanh(self.w1(x)) * torch.sigmoid(self.w3(x)))


class OfTwoByVariables(Block):
    def forward(self, x):
        gate = self.w1(x)
        up = torch.sigmoid(self.w3(x))
        h = torch.tanh(gate)
        return self.w2(h * up)


KINDS = {
    Block: ["F.silu in Block -> jitact SwiGLU"],
    ByVariables: ["torch.nn.functional.silu in ByVariables -> jitact SwiGLU"],
    Packed: ["gelu in Packed -> jitact GEGLUTanh"],
    Cast: ["torch.sigmoid in Cast -> jitact GatedSigmoid"],
    InComprehension: ["F.silu in InComprehension -> jitact SwiGLU"],
    Two: ["F.mish in Two -> jitact GatedMish", "F.silu in Two -> jitact SwiGLU"],
}
PAIRS = OfTwo, OfTwoByVariables


def names_in_graph(y: Tensor) -> set[str]:
    found, pending = set(), [y.grad_fn]
    while pending:
        node = pending.pop()
        found.add(type(node).__name__)
        pending += [each for each, _ in node.next_functions if each is not None]
    return found


@pytest.mark.parametrize("kind", PAIRS)
def test_of_a_product_of_two_functions_the_second_is_fused(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(4, 6)
    expected = model(x)
    report = jitact.replace(model)
    assert [each.old for each in report.replaced] == [f"torch.sigmoid in {kind.__name__}"]
    assert [each.why for each in report.calls] == ["calls tanh"]
    functions = names_in_graph(model(x))
    assert "TanhBackward0" in functions and "SigmoidBackward0" not in functions
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_functions_become_one_kernel_with_the_product(kind: type[nn.Module], device: str) -> None:
    model = nn.Sequential(nn.Sequential(kind())).to(device)
    x = torch.randn(4, 3, 6, device=device, requires_grad=True)

    def results(of: Callable[[Tensor], Tensor]) -> list[Tensor]:
        y = of(x)
        return [y, *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))]

    expected, state, shown, kept = results(model), list(model.state_dict()), repr(model), kept_bytes(lambda: model(x))
    report = jitact.replace(model)
    assert [f"{each.old} -> {each.new}" for each in report.replaced] == [f"{each} with the product" for each in KINDS[kind]]
    assert not report.calls and {each.paths for each in report.replaced} == {("0.0",)}
    functions = names_in_graph(model(x))
    assert not functions & {"SiluBackward0", "GeluBackward0", "SigmoidBackward0", "MishBackward0"}
    assert any("Activate" in name for name in functions) and kept_bytes(lambda: model(x)) < kept
    torch.testing.assert_close(results(model), expected)
    torch._dynamo.reset()
    of_copies = pickle.loads(pickle.dumps(model)), copy.deepcopy(model)
    for of in (*of_copies, torch.compile(model, fullgraph=True), torch.fx.symbolic_trace(model)):
        torch.testing.assert_close(of(x), expected[0])
    torch.testing.assert_close(results(lambda t: checkpoint(model, t, use_reentrant=False)), expected)
    assert (list(model.state_dict()), repr(model)) == (state, shown) and not jitact.replace(model).replaced
    for each in (model, *of_copies):
        assert jitact.restore(each) == 1 and "forward" not in vars(each[0][0])
    assert all(torch.equal(a, b) for a, b in zip(results(model), expected, strict=True))


def test_the_forward_is_the_same_otherwise() -> None:
    block, x = Block(), torch.randn(3, 6)
    expected = [block(x), block(x, 2.0), block(x, scale=3.0, more=0.0)]
    jitact.replace(nn.Sequential(block))
    torch.testing.assert_close([block(x), block(x, 2.0), block.forward(x, scale=3.0, more=0.0)], expected)
    with pytest.raises(TypeError, match=r"^Block\.forward\(\) missing 1 required positional argument: 'x'"):
        block()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        block(torch.randn(3, 5))
    last = next(each for each in reversed(traceback.extract_tb(error.tb)) if each.filename == __file__)
    assert last.name == "forward" and last.line.startswith("return self.w2(F.silu(self.w1(x))")
    block.forward.source = "another version"
    del block.forward._made
    torch.testing.assert_close(block(x), expected[0])
    assert "SiluBackward0" in names_in_graph(block(x))


@pytest.mark.parametrize("hooked", [False, True])
def test_replicas_have_their_own_weights(hooked: bool) -> None:
    """As DataParallel makes them, which copies the module's dictionary."""
    block, other, x = Block(), Block(), torch.randn(3, 6)
    if hooked:
        block.register_forward_hook(lambda *_: None)
    expected = other(x)
    jitact.replace(nn.Sequential(block))
    replica = block._replicate_for_data_parallel()
    for name in ("w1", "w2", "w3"):
        setattr(replica, name, getattr(other, name))
    torch.testing.assert_close(replica(x), expected)


class Alone(Block):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)))


class UsedTwice(Block):
    def forward(self, x):
        h = F.silu(self.w1(x))
        return self.w2(h * self.w3(x) + h)


class InPlace(Block):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x), inplace=True) * self.w3(x))


class Changed(Block):
    def forward(self, x):
        gate = self.w1(x)
        y = F.silu(gate) * self.w3(x)
        gate.zero_()
        return self.w2(y)


class ChangedByAMethod(Block):
    def forward(self, x):
        self.gate = self.w1(x).detach()
        y = F.silu(self.gate)
        self.change()
        return self.w2(y * self.w3(x))

    def change(self):
        self.gate.add_(1)


class OptionsOfItsOwn(Block):
    approximate = "tanh"

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x), approximate=self.approximate) * self.w3(x))


class Calling(Block):
    def forward(self, x):
        return super().forward(x) * F.silu(x)


class Private(Block):
    __factor = 2.0

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x)) * self.__factor


class Decorated(Block):
    @torch.no_grad()
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class OfAVariable(Block):
    def forward(self, x, F=F):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Other:
    @staticmethod
    def silu(x: Tensor) -> Tensor:
        return x


class OfAVariableWithin(Block):
    def forward(self, x):
        return self.w2((lambda F: F.silu(self.w1(x)) * self.w3(x))(Other) + sum([F.silu(x[:, :1]) * x[:, :1] for F in [Other]]))


class Looking(Block):
    def forward(self, x):
        y = F.silu(self.w1(x)) * self.w3(x)
        return self.w2(y) * len(locals())


class OfAnotherClass(Block):
    def forward(self, x):
        return self.w2(Other.silu(self.w1(x)) * self.w3(x))


def replaced_on_the_module() -> Block:
    block = Block()
    block.forward = lambda x: x
    return block


def with_hooks() -> Block:
    block = Block()
    block.w1.register_forward_hook(lambda *_: None)
    return block


class OfAnyTensor(Block):
    def forward(self, x):
        def gated(of: NotEvaluated) -> NotEvaluated:  # noqa: F821
            return torch.sigmoid(of) * self.w3(x)

        return self.w2(gated(self.w1(x) > 0) + gated(self.w1(x).long()) + gated(self.w1(x) + 1j).real)


def test_tensors_that_jitact_does_not_take() -> None:
    """As integers: PyTorch's function gets them. It is the one in a traced graph, too."""
    model, x = nn.Sequential(OfAnyTensor().double(), Block().double()), torch.randn(3, 6, dtype=torch.float64)
    expected = model(x)
    assert len(jitact.replace(model).replaced) == 2
    torch.testing.assert_close(model(x), expected)
    assert F.silu in [node.target for node in torch.fx.symbolic_trace(model[1:]).graph.nodes]
    torch.testing.assert_close(torch.jit.trace(model, x)(x), expected)


def test_forward_is_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = Block(), torch.randn(3, 6)
    expected, signature = block(x), inspect.signature(block.forward)
    jitact.replace(nn.Sequential(block))
    assert inspect.signature(block.forward) == signature and block.forward.__self__ is block
    assert inspect.unwrap(block.forward).__func__ is Block.forward
    holder = nn.Module()
    holder.forward = block.forward
    torch.testing.assert_close([holder(x), block(x)], [expected, expected])
    jitact.restore(holder)
    torch.testing.assert_close(holder(x), expected)
    with monkeypatch.context() as patch:
        patch.setattr(F, "silu", torch.relu)
        torch.testing.assert_close(block(x), Block.forward(block, x))
    torch.testing.assert_close(block(x), expected)
    assert "SiluBackward0" not in names_in_graph(block(x))
    monkeypatch.setattr(Block, "forward", lambda self, x: x)
    assert block(x) is x
    block.__class__ = Alone
    torch.testing.assert_close(block(x), Alone.forward(block, x))


LEFT = {each.__name__: each for each in Block.__subclasses__() if each not in (*KINDS, *PAIRS, OfAnyTensor)}


@pytest.mark.parametrize("make", [*LEFT.values(), replaced_on_the_module, with_hooks], ids=lambda make: make.__name__)
def test_others_are_left(make: Callable[[], Block]) -> None:
    model, x = nn.Sequential(make()), torch.randn(3, 6)
    expected, before = model(x), vars(model[0]).get("forward")
    assert not jitact.replace(model).replaced and vars(model[0]).get("forward") is before
    assert torch.equal(model(x), expected)


def test_files_that_were_changed_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source is not what runs: another factor, or a statement that was added when the file was loaded."""
    text = (
        "import torch.nn.functional as F\nfrom torch import nn\nclass Changing(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.w1, self.w3 = nn.Linear(6, 9), nn.Linear(6, 9)\n"
        "    def forward(self, x):\n        return F.silu(self.w1(x)) * self.w3(x) * 2\n"
    )
    (tmp_path / "changing_block.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    block = importlib.import_module("changing_block").Changing()
    (tmp_path / "changing_block.py").write_text(text.replace("* 2", "* 3"))
    assert not jitact.replace(nn.Sequential(block)).replaced
    (tmp_path / "changing_block.py").write_text(text)
    linecache.clearcache()
    parsed.cache_clear()
    _runs_its_source.cache_clear()
    assert jitact.replace(nn.Sequential(block)).replaced


def test_wrapped_since() -> None:
    """As accelerate does it: restore leaves what it did not put there."""
    block, x = Block(), torch.randn(3, 6)
    expected = block(x)
    jitact.replace(nn.Sequential(block))
    block._old_forward = block.forward
    block.forward = lambda *args, **kwargs: block._old_forward(*args, **kwargs)
    assert jitact.restore(nn.Sequential(block)) == 0
    torch.testing.assert_close(block(x), expected)


class SomeOfThem(Block):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x)) + F.silu(x) + F.mish(x)


def test_what_is_left_in_a_forward_is_told() -> None:
    model, x = nn.Sequential(SomeOfThem()), torch.randn(3, 6)
    expected = model(x)
    report = jitact.replace(model)
    assert isinstance(model[0].forward, GatedForward) and len(report.replaced) == 1
    assert [each.why for each in report.calls] == ["calls mish", "calls silu"]
    torch.testing.assert_close(model(x), expected)


def test_a_second_replace_tells_the_same_calls() -> None:
    model = SomeOfThem()
    first = jitact.replace(model)
    second = jitact.replace(model)
    assert first.calls and second.calls == first.calls and not second.replaced
    assert jitact.restore(model) == 1


class OfAModule(Block):
    """The module, which is fused, comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, x):
        return self.w2(self.act(self.w1(x)) * torch.sigmoid(self.w3(x)))


class OfAModuleByVariables(OfAModule):
    def forward(self, x):
        gate = self.act(self.w1(x))
        up = torch.sigmoid(self.w3(x))
        return self.w2(gate * up)


@pytest.mark.parametrize("kind", [OfAModule, OfAModuleByVariables])
def test_one_of_a_module_and_a_function_is_fused(kind: type[OfAModule]) -> None:
    model, x = kind(), torch.randn(3, 6)
    expected = model(x)
    report = jitact.replace(model)
    assert [(each.old, each.new) for each in report.replaced] == [("SiLU()", "jitact SwiGLU with the product")]
    assert [call.why for call in report.calls] == ["calls sigmoid"] and "forward" not in vars(model)
    torch.testing.assert_close(model(x), expected)
    assert not jitact.replace(model).replaced
    assert jitact.restore(model) == 1
    model.act = nn.SiLU(inplace=True)  # which is not fused
    assert [each.old for each in jitact.replace(model).replaced] == ["SiLU(inplace=True)", f"torch.sigmoid in {kind.__name__}"]
    torch.testing.assert_close(model(x), expected)
