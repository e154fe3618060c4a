"""Activations of models: replace, restore, patched."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.masked import masked_tensor
from torch.nn.utils import parametrize, prune

import jitact
from jitact import registry
from jitact.measuring.markdown import current_readme
from jitact.modules import ActivationModule
from jitact.rows.modules import RowModule

SCRIPT = Path(__file__).parents[1] / "notebooks" / "swap_models.py"


class MyReLU(nn.ReLU):
    """A subclass, whose forward could differ."""


class Gated(nn.Module):
    """A gated block."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.gate, self.act = nn.Linear(8, 8), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        return self.act(self.gate(x)) * x


class Net(nn.Module):
    """A model with every kind of activation and call."""

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
    kinds = (ActivationModule, RowModule)
    return [path for path, module in model.named_modules() if isinstance(module, kinds)]


def test_replace_and_restore() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 8)
    before, text = results(model, x), repr(model)
    originals, state = dict(model.named_modules(remove_duplicate=False)), list(model.state_dict())
    report = jitact.replace(model)
    assert ours(model) == ["act", "body.1", "body.3", "body.4", "body.5"] and model.act is model.same is model.body[2]
    assert model.act.inplace and model.body[4].max_val == 2 and model.body[5].negative_slope == 0.3
    assert "(1): jitact GELU(approximate='tanh')" in repr(model) and "(3): jitact Softmax(dim=-1)" in repr(model)
    assert list(model.state_dict()) == state
    assert_close(results(model, x), before)
    assert jitact.restore(model) == 5 and repr(model) == text
    assert dict(model.named_modules(remove_duplicate=False)) == originals
    assert jitact.restore(model) == 0 and len(jitact.replace(model).replaced) == len(report.replaced)


def test_attributes_that_are_set_later_are_restored() -> None:
    model = nn.Sequential(nn.PReLU(3), nn.GELU(), nn.Softmax(-1), nn.ReLU(), nn.Dropout())
    originals = list(model)
    model[1].tag = 1
    jitact.replace(model, dropout=True)
    for each in model:
        each.tag, each.kept, each.training = 2, torch.ones(2), False
    jitact.restore(model)
    assert list(model) == originals and not any([each.training for each in model])
    for each in model:
        assert each.tag == 2 and each.kept.sum() == 2
        own = {"weight", "approximate", "dim", "inplace", "num_parameters", "init", "p"}
        assert vars(each).keys() - vars(nn.Module()).keys() - own == {"tag", "kept"}


def test_report() -> None:
    report = jitact.replace(Net())
    text = repr(report)
    assert text.startswith("replaced 5 activations, left 1\n")
    assert "ReLU(inplace=True) -> jitact ReLU(inplace=True)" in text and "also same, body.2\n" in text
    assert [(left.path, left.what, left.why) for left in report.left] == [
        ("mine", "MyReLU", "is a subclass of ReLU, whose forward may differ"),
    ]
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
    assert calls == ["jitact.modules", "torch.nn.modules.activation", "backward"]
    first.remove()
    second.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert len(calls) == 3


def test_hooks_of_state_get_the_module_and_its_path() -> None:
    model, seen = nn.ModuleDict({"gated": Gated(), "act": nn.PReLU(), "rows": nn.Softmax(-1)}), []
    paths = "gated.act", "act", "rows"
    removed = model.gated.act.register_state_dict_pre_hook(lambda *_: seen.append("removed"))
    for each in [model.get_submodule(path) for path in paths]:
        each.register_state_dict_pre_hook(lambda module, prefix, _: seen.append((module, prefix)))
        each.register_load_state_dict_pre_hook(lambda module, _, prefix, *others: seen.append((module, prefix)))
    report = jitact.replace(model)
    assert len(report.replaced) == 3 and not report.unfused
    removed.remove()
    copied = copy.deepcopy(model)
    for change in (len, jitact.restore):
        for each in (model, copied):
            assert change(each) == 3
            seen.clear()
            each.load_state_dict(each.state_dict())
            assert seen == [(each.get_submodule(path), f"{path}.") for path in paths] * 2


def test_copies_and_pickles_restore() -> None:
    model = Net()
    jitact.replace(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert ours(other) == ours(model) and jitact.restore(other) == 5 and not ours(other)


def test_left_alone() -> None:
    for whole in (nn.ReLU(), nn.CELU(-1.0), nn.Softmax(-1)):
        report = jitact.replace(whole)
        assert not report.replaced and "the whole model" in report.left[0].why
    model = nn.Sequential(nn.ReLU())
    model[0].forward = lambda x: x
    assert "forward was replaced" in jitact.replace(model).left[0].why and not jitact.replace(model[0]).left
    model = nn.Sequential(nn.ReLU())
    model[0].compile(backend="eager")
    assert jitact.replace(model).left[0].why == "it was compiled by itself: call compile() after replace()"
    model = nn.Sequential(nn.CELU(-1.0), nn.ReLU())
    report = jitact.replace(model)
    assert "needs alpha > 0" in report.left[0].why and len(report.replaced) == 1 and type(model[0]) is nn.CELU
    (left,) = jitact.replace(nn.Sequential(type("Own", (nn.Softmax,), {})(-1))).left
    assert left.why == "is a subclass of Softmax, whose forward may differ"
    scripted = nn.Sequential(torch.jit.script(nn.ReLU()))
    assert jitact.replace(scripted).left[0].why == "is TorchScript"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ([nn.ReLU()], "[ReLU()], of type list"),
        (None, "None"),
        (nn.Sequential, "the class Sequential"),
        (lambda x: x, "the function <lambda>"),
        ("model", "'model', of type str"),
        (torch.ones(3), "a float32 tensor"),
    ],
)
@pytest.mark.parametrize("call", [jitact.replace, jitact.restore])
def test_what_is_no_model(call, given, shown: str) -> None:
    with pytest.raises(TypeError) as error:
        call(given)
    assert str(error.value) == f"{call.__name__}() takes a model, an instance of torch.nn.Module; got {shown}"


def test_settings_and_tags_stay() -> None:
    """Attributes set on a module before replace, and on its replacement before restore, are kept."""
    model = nn.Sequential(nn.LeakyReLU(0.1), nn.ReLU(inplace=True), nn.Tanh())
    model[0].layer_name, model[2].extra_repr = "first", lambda: "last"
    jitact.replace(model)
    assert model[0].layer_name == "first" and repr(model[2]) == "jitact Tanh(last)"
    model[0].negative_slope, model[1].inplace = 0.5, False
    model[1].forward = model[1].forward  # as wrappers set it; it is jitact's
    assert jitact.restore(model) == 3 and "forward" not in vars(model[1])
    assert repr(model[:2]) == repr(nn.Sequential(nn.LeakyReLU(0.5), nn.ReLU()))


def test_weights_are_those_of_the_model() -> None:
    model = nn.Sequential(nn.PReLU(3)).requires_grad_(False)
    weight = model[0].weight
    jitact.replace(model)
    assert model[0].weight is weight and not any(p.requires_grad for p in model.parameters())
    model.double()
    other = copy.deepcopy(model)
    assert jitact.restore(model) == 1 and model[0].weight.dtype is torch.float64
    assert jitact.restore(other) == 1 and other[0].weight is not model[0].weight


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.PReLU(3), "weight", 1)


def parametrized() -> nn.Module:
    return parametrize.register_parametrization(nn.PReLU(3), "weight", nn.Dropout(0.0))


def with_buffer() -> nn.Module:
    module = nn.ReLU()
    module.register_buffer("seen", torch.zeros(1))
    return module


def with_observer() -> nn.Module:
    """A module as prepared for quantization."""
    module = nn.ReLU()
    module.add_module("observer", nn.Identity())
    module.register_forward_hook(lambda self, args, y: self.observer(y))
    return module


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (pruned, "it has other weights than its class: weight, weight_orig"),
        (parametrized, "is a subclass of PReLU, whose forward may differ"),
        (with_buffer, "it has other buffers than its class: seen"),
        (with_observer, "it has other modules than its class: observer"),
    ],
)
def test_modules_with_more_than_their_class_has_are_left(make, why: str) -> None:
    model, x = nn.Sequential(make(), nn.Tanh()), torch.randn(2, 3)
    keys = list(model.state_dict())
    report = jitact.replace(model)
    assert ("0", why) in [(left.path, left.why) for left in report.left]
    assert list(model.state_dict()) == keys and type(model[0]).__module__ != "jitact.modules"
    model(x)
    assert len(report.replaced) == 1


def test_quantized_models_are_left() -> None:
    """Their nn.ReLU gets quantized tensors, which only PyTorch's accepts."""
    quantized = pytest.importorskip("torch.ao.nn.quantized")
    model = nn.Sequential(quantized.Quantize(0.1, 0, torch.quint8), nn.ReLU(), quantized.DeQuantize())
    x = torch.randn(4)
    before = model(x)
    report = jitact.replace(model)
    assert [left.why for left in report.left] == ["the model is quantized: it may get tensors that are"]
    assert torch.equal(model(x), before)
    dynamic = nn.Sequential(quantized.dynamic.Linear(4, 4), nn.ReLU())
    assert len(jitact.replace(dynamic).replaced) == 1 and dynamic(x[None]).shape == (1, 4)


class Sharded(nn.Parameter):
    """A parameter of another class, as DTensor parameters are."""


def test_sharded_weights_are_left_and_not_restored() -> None:
    model = nn.Sequential(nn.PReLU(3), nn.ReLU())
    model[0].weight = Sharded(model[0].weight.detach())
    report = jitact.replace(model)
    assert report.left[0].why == "its weight is a Sharded: do this before the model is sharded or wrapped"
    model = nn.Sequential(nn.Sequential(nn.PReLU(3)), nn.ReLU())
    jitact.replace(model)
    model[0][0].weight = Sharded(model[0][0].weight.detach())
    with pytest.raises(RuntimeError, match=r"restore\(\): cannot put back 0.0: its weight is a Sharded"):
        jitact.restore(model)
    assert ours(model) == ["0.0", "1"]


def test_flattened_weights_are_not_restored() -> None:
    """As FSDP1 does: an attribute, a view of the flattened weights, takes the place of the parameter."""
    model = nn.Sequential(nn.PReLU(3))
    jitact.replace(model)
    del model[0].weight
    model[0].weight = torch.zeros(3)
    with pytest.raises(RuntimeError, match="cannot put back 0: it has other weights than its class: weight"):
        jitact.restore(model)


@pytest.fixture
def group():
    """A process group with this process only."""
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.PReLU(3), nn.GELU())


def test_data_parallel_models(group) -> None:
    """Models can be replaced before or after they are wrapped, and restored inside."""
    x, expected = torch.randn(2, 3), layers()
    for first in (True, False):
        model = layers()
        jitact.replace(model) if first else None
        wrapped = nn.parallel.DistributedDataParallel(model)
        jitact.replace(wrapped)
        assert ours(wrapped) == ["module.1", "module.2"]
        assert_close(results(wrapped, x), results(expected, x))
        assert jitact.restore(wrapped) == 2
        assert_close(results(wrapped, x), results(expected, x))


def test_sharded_models(group) -> None:
    """Activations without weights are replaced; sharded weights can be neither taken over nor restored."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    x, expected = torch.randn(2, 3), layers()
    with torch.no_grad():
        before = expected(x)
    for first in (True, False):
        model = layers()
        jitact.replace(model) if first else None
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        report = jitact.replace(model)
        assert ours(model) == (["1", "2"] if first else ["2"])
        torch.testing.assert_close(model(x).detach(), before, rtol=1e-5, atol=1e-6)
        if first:
            with pytest.raises(RuntimeError, match="cannot put back 1: its weight is sharded"):
                jitact.restore(model)
        else:
            assert "its weight is sharded" in report.left[0].why and jitact.restore(model) == 1


def test_distributed_tensors_are_left_to_pytorch(group) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    x = distribute_tensor(torch.randn(4, requires_grad=True), init_device_mesh("cpu", (1,)), [Shard(0)])
    with jitact.patched() as calls:
        y = F.relu(x)
    assert type(y) is type(x) and torch.equal(y.to_local(), F.relu(x.to_local()))
    assert sum(calls.replaced.values()) + sum(calls.left.values()) == 1


def test_a_restored_model_is_pytorchs_alone() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.GELU()), torch.randn(2, 3)
    jitact.replace(model)
    jitact.restore(model)
    scripted = torch.jit.script(model)
    assert "gelu" in str(scripted.inlined_graph) and torch.equal(scripted(x), model(x))
    assert torch.equal(torch.jit.trace(model, x)(x), model(x))


def test_a_model_that_cannot_be_replaced_stays_as_it_was() -> None:
    model = nn.Sequential(nn.ReLU(), nn.LeakyReLU())
    del model[1].negative_slope  # it cannot even be printed
    with pytest.raises(AttributeError, match="negative_slope"):
        jitact.replace(model)
    assert not ours(model)


def test_a_module_of_two_models() -> None:
    act = nn.ReLU()
    one, other = nn.Sequential(act), nn.Sequential(act)
    jitact.replace(one)
    jitact.replace(other)
    assert jitact.restore(one) == 1 and one[0] is act and ours(other) == ["0"]
    assert jitact.restore(other) == 1 and other[0] is act


def test_containers_and_lazy_modules() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LazyLinear(3)
            self.acts = nn.ModuleDict({"ä": nn.ReLU(), "b c": nn.GELU()})
            self.more = nn.ModuleList([nn.SiLU()])

        def forward(self, x: Tensor) -> Tensor:
            return self.more[0](self.acts["b c"](self.acts["ä"](self.first(x))))

    model = Model()
    report = jitact.replace(model)
    assert [replaced.paths for replaced in report.replaced] == [("acts.ä",), ("acts.b c",), ("more.0",)]
    assert model(torch.randn(2, 5)).shape == (2, 3)


def test_a_replaced_model_in_a_fresh_process(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.PReLU(3), nn.LeakyReLU(0.3, inplace=True)), torch.randn(2, 3)
    jitact.replace(model)
    torch.save((model, x, model(x)), tmp_path / "model.pt")
    code = f"""
import torch
model, x, y = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
same = torch.equal(model(x), y)
import jitact
print(same, jitact.restore(model), torch.allclose(model(x), y))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "True 2 True\n", done.stderr


def test_a_model_is_restored_from_a_wrapper() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    wrapped = torch.optim.swa_utils.AveragedModel(model)
    for each in (wrapped, nn.DataParallel(model)):
        (replaced,) = jitact.replace(each).replaced
        assert replaced.paths == ("module.1",) and jitact.restore(each) == 1


def test_calls_in_functions_of_a_forward() -> None:
    def gate(x: Tensor) -> Tensor:
        return torch.tanh(x) * F.silu(x)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return gate(x)

    report = jitact.replace(Model())
    assert [call.why for call in report.calls] == ["calls silu in gate", "calls tanh in gate"]


def test_what_a_module_holds() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_a_list = [nn.Tanh(), nn.Linear(2, 2)]
            self.by_name = {"elu": F.elu, "none": None, "mish": nn.Mish()}
            self.partial = functools.partial(F.leaky_relu, negative_slope=0.2)

    calls = [call.why for call in jitact.replace(Model()).calls]
    held = ["holds Tanh as .in_a_list", "holds elu as .by_name", "holds Mish as .by_name", "holds leaky_relu as .partial"]
    assert calls[:4] == held


def test_a_forward_without_source_is_said() -> None:
    space: dict = {"nn": nn, "torch": torch}
    exec("class Made(nn.Module):\n    def forward(self, x):\n        return torch.tanh(x)", space)
    assert "Made  Made.forward has no source to look for calls in" in repr(jitact.replace(space["Made"]()))


@pytest.mark.parametrize(
    ("model", "found", "seen"),
    [
        (
            "Gemma2",
            {"calls tanh", *(f"calls {name} in eager_attention_forward" for name in ("tanh", "softmax"))},
            {"tanh", "softmax"},
        ),
        ("Mamba", {f"calls {name} in mamba_selective_scan" for name in ("silu", "softplus")}, {"silu", "softplus"}),
    ],
)
def test_calls_in_functions_of_transformers(model: str, found: set[str], seen: set[str]) -> None:
    """The report lists the functions that patched() replaces when the model runs."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 20, "pad_token_id": 0}
    attention = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "attn_implementation": "eager"}
    config = getattr(transformers, f"{model}Config")(**sizes, **(attention if model == "Gemma2" else {}))
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    report = jitact.replace(made)
    assert found <= {call.why for call in report.calls}
    with torch.no_grad(), jitact.patched() as calls:
        made(torch.ones(1, 4, dtype=torch.long))
    assert set(calls.replaced) == seen and not calls.left


def test_every_torch_module() -> None:
    """Every class, with arguments other than its defaults."""
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


def nested(x: Tensor, **options) -> Tensor:
    return torch.nested.as_nested_tensor([x[:8].view(2, 4), x[8:].view(3, 4)], **options)


class Wrapper(Tensor):
    """A tensor subclass that supports PyTorch's operators only."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Tensor:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        if operator.namespace != "aten":
            raise NotImplementedError(f"{operator} has no rule. " + "What there is: " + "x " * 1000)
        y = operator(*(arg.inner if isinstance(arg, Wrapper) else arg for arg in args), **kwargs or {})
        return args[0] if args and y is args[0].inner else Wrapper(y)


def test_patched_calls() -> None:
    model, x = Net(), torch.randn(4, 8)
    before = results(model, x)
    with jitact.patched() as calls:
        assert_close(results(model, x), before)
    elementwise = {"relu": 4, "gelu": 2, "hardtanh": 1, "leaky_relu": 1, "tanh": 1, "silu": 1, "sigmoid": 1}
    assert calls.replaced == elementwise | {"softmax": 1}
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
        ("hardtanh", lambda x: torch._C._nn.hardtanh(x, -0.5, 0.5)),
        ("elu", lambda x: nn.ELU(0.5, inplace=True)(x.clone())),
        ("softmax", lambda x: F.softmax(x, 0)),
        ("softmax", lambda x: F.softmax(input=x, dim=-1, dtype=torch.float64)),
        ("softmax", lambda x: torch.softmax(x, 0, torch.float64)),
        ("softmax", lambda x: x.softmax(-1)),
        ("softmax", lambda x: torch.special.softmax(x, 0)),
        ("softmax", lambda x: nn.Softmax(0)(x)),
        ("log_softmax", lambda x: F.log_softmax(x, dim=0)),
        ("log_softmax", lambda x: x.log_softmax(0)),
        ("softmin", lambda x: F.softmin(x, 0)),
    ],
)
def test_patched_reaches(name: str, call) -> None:
    x = torch.randn(20)
    expected = call(x)
    with jitact.patched() as calls:
        torch.testing.assert_close(call(x), expected)
    assert calls.replaced == {name: 1} and not calls.left


@pytest.mark.parametrize("name", ["silu", "glu"])
def test_patched_compiles_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions are there before torch.compile meets them: it could not trace the lock under which they are made."""
    monkeypatch.setattr(registry, "_functions", {})
    function = getattr(F, name)
    with jitact.patched() as calls:
        y = torch.compile(lambda x: function(x) * 2, backend="aot_eager", fullgraph=True)(torch.ones(4))
    assert calls.replaced[name] == 1 and torch.equal(y, function(torch.ones(4)) * 2)


def test_patched_leaves_rows_of_ours() -> None:
    x = torch.randn(3, 4)
    with jitact.patched() as calls:
        y = jitact.get("softmax")(1)(x)
    assert not calls.replaced and not calls.left
    torch.testing.assert_close(y, torch.softmax(x, 1))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.relu(torch.arange(-3, 3)),
        lambda x: torch.sigmoid(x.to(torch.complex64)),
        lambda x: torch.relu(x.to_sparse()).to_dense(),
        lambda x: torch.sigmoid(x, out=torch.empty(20)),
        lambda x: torch.tanh_(x.clone()),
        lambda x: F.gelu(x.to("meta")).shape,
        lambda x: torch.softmax(x.to("meta"), 0).shape,
        lambda x: torch.softmax(x, 0, out=torch.empty(20)),
        lambda x: F.relu(nested(x)).values(),
        lambda x: F.relu_(nested(x)).values(),
        lambda x: F.gelu(nested(x.requires_grad_())).values(),
        lambda x: torch.tanh(Wrapper(x)).inner,
        lambda x: F.silu(Wrapper(x), inplace=True).inner,
        lambda x: F.relu(x.view(4, 5).to_sparse_csr()).to_dense(),
        lambda x: F.relu(x.to_mkldnn()).to_dense(),
        lambda x: torch.relu(torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)).dequantize(),
        lambda x: torch.sigmoid(masked_tensor(x, x > 0)).to_tensor(0.0),
        lambda x: F.leaky_relu(x, torch.tensor(0.1)),
        lambda x: torch.fx.symbolic_trace(lambda x: F.relu(x))(x.int()),
    ],
)
def test_patched_leaves_to_pytorch(call) -> None:
    x = torch.randn(20)
    expected = call(x.clone())
    with jitact.patched() as calls:
        result = call(x.clone())
    assert result == expected if not isinstance(expected, Tensor) else torch.equal(result, expected)
    assert not calls.replaced and set(calls.left.values()) == {1}
    assert all(len(why) < 200 for _, why in calls.left)


# Arguments that jitact may refuse and PyTorch accepts: within patched(), PyTorch still computes them.
REFUSED = [
    *((F.softplus, (beta, 20.0), nn.Softplus) for beta in (-1.0, -0.5, -3)),
    *((F.celu, (alpha,), nn.CELU) for alpha in (-1.0, -0.25, -2)),
    *((F.hardtanh, bounds, nn.Hardtanh) for bounds in ((0.0, 0.0), (1.0, 1.0), (-1, -1))),
    *((F.leaky_relu, (slope,), nn.LeakyReLU) for slope in (True, False, torch.tensor(0.1))),
    *((F.elu, (alpha,), nn.ELU) for alpha in (True, torch.tensor(0.5), -1.0)),
    *((F.threshold, values, nn.Threshold) for values in ((True, 0.0), (0.0, True), (torch.tensor(0.1), 1.0))),
    *((F.hardshrink, (lambd,), nn.Hardshrink) for lambd in (True, torch.tensor(0.3), -0.5)),
]


@pytest.mark.parametrize(("function", "arguments", "cls"), REFUSED)
def test_what_ours_refuse_is_as_in_pytorch(function, arguments: tuple, cls: type[nn.Module]) -> None:
    x = torch.linspace(-3, 3, 31)
    expected = function(x, *arguments)
    with jitact.patched() as calls:
        torch.testing.assert_close(function(x, *arguments), expected)
    assert sum(calls.replaced.values()) + sum(calls.left.values()) == 1
    try:
        model = nn.Sequential(cls(*arguments))
    except AssertionError:  # torch.nn.Hardtanh's own check
        return
    report = jitact.replace(model)
    assert len(report.replaced) + len(report.left) == 1
    torch.testing.assert_close(model(x), expected)


def test_errors_of_pytorch_stay_its_own() -> None:
    for call in (lambda: F.relu(None), lambda: F.relu(), lambda: F.relu([1.0]), lambda: F.gelu(torch.ones(2), foo=1)):
        with pytest.raises(TypeError) as own:
            call()
        with jitact.patched(), pytest.raises(TypeError) as error:
            call()
        assert str(error.value) == str(own.value)


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


async def coroutine() -> None:
    """Its code runs when it is awaited."""


@pytest.mark.parametrize("late", [coroutine, lambda: (yield), nn.ReLU])
def test_patched_refuses_to_decorate_what_runs_later(late) -> None:
    with pytest.raises(TypeError, match=r"patched\(\) cannot decorate a .*: use `with jitact.patched\(\):`"):
        jitact.patched()(late)


def test_patched_ends_with_an_error_and_nests() -> None:
    x = torch.ones(2)
    with pytest.raises(KeyError), jitact.patched() as calls:
        raise KeyError
    F.relu(x)
    with jitact.patched() as outer, jitact.patched() as inner:
        F.relu(x)
    assert not calls.replaced and not outer.replaced and inner.replaced == {"relu": 1}


# Whole models.


def swap_models() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("swap_models", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize("name", ["resnet", "bert", "gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models(name: str, dtype: torch.dtype, capsys: pytest.CaptureFixture) -> None:
    if name != "resnet":
        pytest.importorskip("transformers")
    script = swap_models()
    assert script.compare(name, torch.device("cpu"), dtype, laps=1)["agree"]
    assert "left 0" in capsys.readouterr().out


def test_models_that_were_measured_before_an_interruption_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    script, file = swap_models(), tmp_path / "results" / "training-cuda.json"
    (tmp_path / "results").mkdir()
    marks = "<!-- training: written by `jitact report` -->\n<!-- end of training -->\n"
    (tmp_path / "README.md").write_text(marks, encoding="utf-8")
    step, asked = {"ms": 2.0, "per_second": 500.0, "kept_mb": 1.0, "peak_bytes": 0}, []

    def compare(name: str, *_: object) -> dict:
        asked.append(name)
        if len(asked) == 2:
            raise KeyboardInterrupt
        row = {"model": name, "compiled": False, "unit": "images", "agree": True, "busy": True}
        return row | {"before": step, "after": step}

    monkeypatch.setattr(script, "compare", compare)
    monkeypatch.setattr(sys, "argv", ["swap_models.py", "resnet", "--compile", "--device", "cpu", "--json", str(file)])
    assert script.main() == 130 and asked == ["resnet", "resnet"]
    assert [row["model"] for row in json.loads(file.read_text())["rows"]] == ["resnet"]
    line = "| resnet | eager | 500 → 500 images (1.000x) | - |"
    said = capsys.readouterr().out
    assert line in said and line in current_readme(tmp_path)
    assert said.endswith("NOT TO BE TRUSTED: this machine did other work during 1 of 1 rows\n")


def test_training_steps_take_turns() -> None:
    script, order = swap_models(), []
    found = script.step_times([lambda: order.append("a"), lambda: order.append("b")], 4, on_gpu=False)
    assert [set(each) for each in found] == [{"ms"}, {"ms"}] and all(each["ms"] > 0 for each in found)
    assert "".join(order[-8:]) in ("baabbaab", "abbaabba")


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


def test_calls_in_functions_of_transformers_are_found() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1}
    heads = {"intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    gemma = transformers.AutoModelForCausalLM.from_config(transformers.Gemma2Config(**sizes, **heads))
    found = {(type(gemma.get_submodule(call.path)).__name__, call.why) for call in jitact.replace(gemma).calls}
    assert ("Gemma2Attention", "calls tanh in eager_attention_forward") in found
    mamba = transformers.AutoModelForCausalLM.from_config(transformers.MambaConfig(**sizes, state_size=4))
    named = {call.why.split(" in ")[0] for call in jitact.replace(mamba).calls}
    assert {"calls silu", "calls softplus"} <= named
