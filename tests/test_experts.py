"""Methods of experts that transformers' mixtures call: replaced by one kernel where they are an activation of jitact."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jitact
from jitact.measuring.timing import kept_bytes


class Experts(nn.Module):
    def __init__(self, limit: float | None = 1.5, alpha: float = 1.702) -> None:
        super().__init__()
        self.act_fn, self.limit, self.alpha = nn.SiLU(), limit, alpha

    def forward(self, x: Tensor) -> Tensor:
        return self._apply_gate(x)

    def clamped(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return gate.clamp(min=None, max=self.limit), up.clamp(min=-self.limit, max=self.limit)


class Interleaved(Experts):
    """As in gpt-oss."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = self.clamped(gate_up[..., ::2], gate_up[..., 1::2])
        glu = gate * torch.sigmoid(gate * self.alpha)
        return (up + 1) * glu


class Halves(Experts):
    """As in MiniMax-M3."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = self.clamped(gate, up)
        return (up + 1.0) * (gate * torch.sigmoid(gate * self.alpha))


class OfModule(Experts):
    """As in DeepSeek-V4."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = self.clamped(gate, up)
        return self.act_fn(gate) * up


class Step(Experts):
    """As in Step-3."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate).clamp(max=self.limit) * up.clamp(min=-self.limit, max=self.limit)


class GateLast(Experts):
    def __init__(self) -> None:
        super().__init__()
        del self.act_fn

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        up, gate = torch.chunk(gate_up, 2, -1)
        return up * F.gelu(gate, approximate="tanh")


KINDS = {
    Interleaved: "ClampedSwiGLU(alpha=1.702, limit=1.5, beta=1.0, layout='interleaved')",
    Halves: "ClampedSwiGLU(alpha=1.702, limit=1.5, beta=1.0)",
    OfModule: "ClampedSwiGLU(alpha=1.0, limit=1.5, beta=0.0)",
    Step: "SwiGLUStep(limit=1.5)",
    GateLast: "GEGLUTanh(gate='last')",
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_methods_become_one_kernel(kind: type[Experts], device: str) -> None:
    model = nn.Sequential(nn.Linear(6, 20, dtype=torch.float64), nn.Sequential(kind())).to(device)
    x = (4 * torch.randn(2, 3, 6, dtype=torch.float64)).to(device).requires_grad_()

    def results(of: Callable[[Tensor], Tensor]) -> list[Tensor]:
        y = of(x)
        return [y, *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))]

    expected, state, kept = results(model), list(model.state_dict()), kept_bytes(lambda: model(x))
    report = jitact.replace(model)
    (told,) = [each for each in report.replaced if each.old == f"the method of {kind.__name__}"]
    assert (told.paths, told.new) == (("1.0._apply_gate",), f"jitact {KINDS[kind]}")
    assert not report.calls, "what the method called is replaced"
    assert "ActivatePacked" in type(model(x).grad_fn).__name__ and kept_bytes(lambda: model(x)) < kept
    torch._dynamo.reset()
    for of in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model), torch.compile(model, fullgraph=True)):
        y = of(x)
        torch.testing.assert_close(y, expected[0])
    torch.testing.assert_close(results(model), expected)
    assert list(model.state_dict()) == state and not jitact.replace(model).replaced
    assert jitact.restore(model) == len(report.replaced)
    assert all(torch.equal(a, b) for a, b in zip(results(model), expected, strict=True))


def test_hooks_that_come_later() -> None:
    model, seen, x = nn.Sequential(OfModule()), [], torch.randn(3, 8)
    jitact.replace(model)
    y = model(x)
    handle = model[0].act_fn.register_forward_hook(lambda *_: seen.append(True))
    torch.testing.assert_close(copy.deepcopy(model)(x), y)
    torch.testing.assert_close(model(x), y)
    assert len(seen) == 2
    handle.remove()
    assert torch.equal(model(x), y) and len(seen) == 2


def test_settings_that_come_later() -> None:
    model, x = nn.Sequential(Halves()).eval(), torch.randn(3, 8)
    with torch.device("meta"), torch.no_grad():
        assert jitact.replace(model).replaced
    model.train()
    torch.testing.assert_close(model[0]._apply_gate(gate_up=x), Halves()(x))
    model[0].limit = 0.25
    torch.testing.assert_close(model(x), Halves(0.25)(x))
    model, other = nn.Sequential(OfModule()), OfModule()
    assert len(jitact.replace(model).replaced) == 2
    model[0].act_fn = other.act_fn = nn.GELU()
    torch.testing.assert_close(model(x), other(x))


class Casting(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        gate, up = self.clamped(gate, up)
        return (F.silu(gate) * up).to(gate_up.dtype)


class OtherSum(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = self.clamped(gate, up)
        return gate * torch.sigmoid(gate) * up + 0.5


class OtherDimension(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        gate, up = self.clamped(gate, up)
        return F.silu(gate) * up


class InPlace(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate.clamp_(max=self.limit)) * up


class Choosing(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return F.silu(gate_up) if gate_up.dim() == 1 else Halves._apply_gate(self, gate_up)


class TwoLimits(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return Halves._apply_gate(self, gate_up).clamp(max=3)


class OfTheMode(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        y = Halves._apply_gate(self, gate_up)
        return F.dropout(y) if self.training else y


class WithoutGradient(Experts):
    @torch.no_grad()
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return Halves._apply_gate(self, gate_up)


class PartOfGradient(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        with torch.no_grad():
            gate = gate.clamp(max=self.limit)
        return F.silu(gate) * up.clamp(min=-self.limit, max=self.limit)


class OfAWidth(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = self.clamped(gate_up[..., :5], gate_up[..., 5:])
        return F.silu(gate) * up


class MoreArguments(Experts):
    def _apply_gate(self, gate_up: Tensor, scale: float = 1.0) -> Tensor:
        return Step._apply_gate(self, gate_up) * scale


class Weighted(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return Halves._apply_gate(self, gate_up) * self.weight


class Noting(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        self.noted = gate_up
        return Halves._apply_gate(self, gate_up)


OF_MORE = OfTheMode, WithoutGradient, PartOfGradient, OfAWidth, MoreArguments, Weighted, Noting


def hooked() -> Experts:
    experts = OfModule()
    experts.act_fn.register_forward_hook(lambda *_: None)
    return experts


LEFT = {
    **{kind.__name__: kind for kind in (Casting, OtherSum, OtherDimension, InPlace, Choosing, TwoLimits, *OF_MORE)},
    "no limit": lambda: Halves(limit=None),
    "infinite limit": lambda: Halves(limit=float("inf")),
    "evaluated": lambda: OfTheMode().eval(),
    "hooks": hooked,
}


@pytest.mark.parametrize("name", LEFT)
def test_other_methods_are_left(name: str) -> None:
    model = nn.Sequential(LEFT[name]())
    report = jitact.replace(model)
    assert not {"_apply_gate", "noted"} & vars(model[0]).keys()
    assert not [each for each in report.replaced if "method" in each.old]


def test_gpt_oss() -> None:
    """However transformers computes its experts."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "GptOssConfig"):
        pytest.skip("this transformers has no gpt-oss")
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    config = transformers.GptOssConfig(**sizes, num_key_value_heads=2, num_local_experts=4, vocab_size=50, pad_token_id=0)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).double()
    ids = torch.randint(1, 50, (2, 7))

    def results() -> list[Tensor]:
        loss = model(input_ids=ids, labels=ids).loss
        return [loss, *torch.autograd.grad(loss, [each for each in model.parameters() if each.requires_grad])]

    expected = results()
    if not hasattr(type(model.model.layers[0].mlp.experts), "_apply_gate"):
        pytest.skip("this transformers has no such method")
    assert "jitact ClampedSwiGLU(alpha=1.702, limit=7.0, beta=1.0, layout='interleaved')" in repr(jitact.replace(model))
    torch.testing.assert_close(results(), expected)
