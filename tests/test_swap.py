"""Activations in models: replace, restore, patched."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jitact
from jitact.activations import ActivationModule

SCRIPT = Path(__file__).parents[1] / "notebooks" / "swap_models.py"


class MyReLU(nn.ReLU):
    """Of a class that is not PyTorch's."""


class Net(nn.Module):
    """Something of everything."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.same = self.act
        self.body = nn.Sequential(
            nn.Linear(8, 8), nn.GELU("tanh"), self.act, nn.Softmax(-1), nn.Hardtanh(-2, 2), nn.LeakyReLU(0.3)
        )
        self.mine = MyReLU()
        self.held = F.gelu
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Calls functions too."""
        x = self.same(self.act(self.body(x) - 0.2) - 0.1)
        return F.silu(self.helper(x)) + self.held(self.mine(x)).sigmoid()

    def helper(self, x: Tensor) -> Tensor:
        """A method that forward calls."""
        return torch.tanh(x)


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = model(x)
    y.sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_close(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def ours(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, ActivationModule)]


def test_replace_and_restore() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 8)
    before, text = results(model, x), repr(model)
    originals, state = dict(model.named_modules(remove_duplicate=False)), list(model.state_dict())
    report = jitact.replace(model)
    assert ours(model) == ["act", "body.1", "body.4", "body.5"] and model.act is model.same is model.body[2]
    assert model.act.inplace and model.body[4].max_val == 2 and model.body[5].negative_slope == 0.3
    assert list(model.state_dict()) == state
    assert_close(results(model, x), before)
    assert jitact.restore(model) == 4 and repr(model) == text
    assert dict(model.named_modules(remove_duplicate=False)) == originals
    assert jitact.restore(model) == 0 and len(jitact.replace(model).replaced) == len(report.replaced)


def test_report() -> None:
    report = jitact.replace(Net())
    text = repr(report)
    assert text.startswith("replaced 4 activations, left 2\n")
    assert "ReLU(inplace=True) -> jitact ReLU(inplace=True)" in text and "also same, body.2\n" in text
    assert {left.path: left.why for left in report.left} == {
        "mine": "is a subclass of ReLU, whose forward may differ",
        "body.3": "works on rows, not on elements",
    }
    assert [(call.path, call.why) for call in report.calls] == [
        ("", "holds gelu as .held"),
        ("", "calls sigmoid"),
        ("", "calls silu"),
        ("", "calls tanh"),
        ("encoder", "holds relu as .activation"),
    ]


def test_paths_that_differ_in_a_number_share_a_line() -> None:
    report = jitact.replace(nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.SiLU()) for _ in range(5))))
    assert repr(report).splitlines() == ["replaced 5 activations, left 0", "  *.1 (5)  SiLU() -> jitact SiLU()"]


def test_hooks_and_training_mode_stay() -> None:
    model, calls = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []
    first = model[1].register_forward_hook(lambda module, args, y: calls.append(type(module).__module__))
    model.eval()
    jitact.replace(model)
    assert not model[1].training
    model(torch.ones(1, 2))
    second = model[1].register_full_backward_hook(lambda *_: calls.append("backward"))
    model.train()
    jitact.restore(model)
    assert model[1].training and type(model[1]) is nn.ReLU
    model(torch.ones(1, 2)).sum().backward()
    assert calls == ["jitact.activations", "torch.nn.modules.activation", "backward"]
    first.remove()
    second.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert len(calls) == 3


def test_copies_and_pickles_restore() -> None:
    model = Net()
    jitact.replace(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert ours(other) == ours(model) and jitact.restore(other) == 4 and not ours(other)


def test_left_alone() -> None:
    report = jitact.replace(nn.ReLU())
    assert not report.replaced and "the whole model" in report.left[0].why
    model = nn.Sequential(nn.ReLU())
    model[0].forward = lambda x: x
    assert "forward was replaced" in jitact.replace(model).left[0].why
    model = nn.Sequential(nn.CELU(-1.0), nn.ReLU())
    report = jitact.replace(model)
    assert "needs alpha > 0" in report.left[0].why and len(report.replaced) == 1 and type(model[0]) is nn.CELU
    scripted = nn.Sequential(torch.jit.script(nn.ReLU()))
    assert jitact.replace(scripted).left[0].why == "is TorchScript"


def test_every_torch_module() -> None:
    """Each with arguments that are not its defaults."""
    modules = [
        nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.2), nn.Hardtanh(-0.5, 0.7), nn.Hardsigmoid(), nn.Threshold(0.2, -1.0),
        nn.Hardshrink(0.3), nn.Softshrink(0.3), nn.Sigmoid(), nn.Tanh(), nn.Softsign(),
        nn.ELU(0.7), nn.CELU(0.7), nn.SELU(), nn.Softplus(2.0, 5.0),
        nn.LogSigmoid(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.Hardswish(), nn.Tanhshrink(), nn.PReLU(3, 0.4),
        nn.RReLU(0.2, 0.4),
    ]  # fmt: skip
    model = nn.ModuleList(modules).eval()
    x = 2 * torch.randn(2, 3, 5)
    before = [module(x) for module in model]
    assert len(jitact.replace(model).replaced) == len(modules)
    for module, y in zip(model, before, strict=True):
        torch.testing.assert_close(module(x), y, rtol=1e-5, atol=1e-6)


# patched.


def test_patched_calls() -> None:
    model, x = Net(), torch.randn(4, 8)
    before = results(model, x)
    with jitact.patched() as calls:
        assert_close(results(model, x), before)
    assert calls.replaced == {"relu": 4, "gelu": 2, "hardtanh": 1, "leaky_relu": 1, "tanh": 1, "silu": 1, "sigmoid": 1}
    assert repr(calls).startswith("replaced calls: gelu (2)")
    before = dict(calls.replaced)
    F.relu(x)
    assert calls.replaced == before


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("relu", lambda x: torch.relu_(x.clone())),
        ("relu", lambda x: x.clone().relu_()),
        ("gelu", lambda x: F.gelu(x, approximate="tanh")),
        ("leaky_relu", lambda x: F.leaky_relu(input=x, negative_slope=0.2, inplace=False)),
        ("leaky_relu", lambda x: F.leaky_relu_(x.clone(), 0.2)),
        ("threshold", lambda x: F.threshold(x, 0.1, 0.2)),
        ("softplus", lambda x: F.softplus(x, beta=2)),
        ("sigmoid", lambda x: torch.special.expit(x)),
        ("elu", lambda x: nn.ELU(0.5, inplace=True)(x.clone())),
    ],
)
def test_patched_reaches(name: str, call) -> None:
    x = torch.randn(20)
    expected = call(x)
    with jitact.patched() as calls:
        torch.testing.assert_close(call(x), expected)
    assert calls.replaced == {name: 1} and not calls.left


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.relu(torch.arange(-3, 3)),
        lambda x: torch.sigmoid(x.to(torch.complex64)),
        lambda x: torch.relu(x.to_sparse()).to_dense(),
        lambda x: torch.sigmoid(x, out=torch.empty(20)),
        lambda x: torch.tanh_(x.clone()),
        lambda x: F.gelu(x.to("meta")).shape,
    ],
)
def test_patched_leaves_to_pytorch(call) -> None:
    x = torch.randn(20)
    expected = call(x)
    with jitact.patched() as calls:
        assert call(x) == expected if not isinstance(expected, Tensor) else torch.equal(call(x), expected)
    assert not calls.replaced and sum(calls.left.values()) == 1


def test_patched_is_the_threads_own() -> None:
    seen = []

    def other() -> None:
        F.relu(torch.ones(2))
        seen.append(dict(calls.replaced))

    with jitact.patched() as calls:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [{}]


def test_patched_as_a_decorator() -> None:
    calls = jitact.patched()

    @calls
    def f(x: Tensor) -> Tensor:
        return F.relu(x)

    assert torch.equal(f(torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0])) and calls.replaced == {"relu": 1}


# Whole models.


@pytest.mark.parametrize("name", ["resnet", "bert", "gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models(name: str, dtype: torch.dtype, capsys: pytest.CaptureFixture) -> None:
    if name != "resnet":
        pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("swap_models", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.compare(name, torch.device("cpu"), dtype, steps=1)
    assert "left 0" in capsys.readouterr().out


def test_transformers_classes() -> None:
    activations = pytest.importorskip("transformers.activations")
    x = torch.randn(4, 6)
    for name, entry in activations.ACT2CLS.items():
        cls, kwargs = entry if isinstance(entry, tuple) else (entry, {})
        kwargs = kwargs | ({"dtype": torch.float32} if name == "xielu" else {})
        model = nn.Sequential(cls(**kwargs))
        before = model(x)
        report = jitact.replace(model)
        assert report.left if name == "linear" else report.replaced, name
        torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-6)
    report = jitact.replace(nn.Sequential(activations.ClippedGELUActivation(-1, 1)))
    assert report.left[0].what == "ClippedGELUActivation()"
