"""Modules, functions and the registry as a user meets them."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys

import pytest
import torch
from common import TABLE_IDS

import jitact
from jitact.activations import TABLE, Activation


@pytest.mark.parametrize("activation", TABLE, ids=TABLE_IDS)
def test_drops_in_where_torch_nn_stands(activation: Activation) -> None:
    cls = jitact.get(activation.name)
    assert issubclass(cls, torch.nn.Module) and cls.__doc__ and issubclass(cls.Model, torch.nn.Module)
    if activation.module is not None and activation.module.__init__ is not torch.nn.Module.__init__:
        hidden = ("self", "min_value", "max_value")  # deprecated
        theirs = [p for p in inspect.signature(activation.module.__init__).parameters.values() if p.name not in hidden]
        ours = list(inspect.signature(cls).parameters.values())
        assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs], "same arguments in the same order"
        for mine, other in zip(ours, theirs, strict=False):
            assert other.default is other.empty or mine.default == other.default
    x = torch.randn(3, 5)
    module = cls(*cls.get_init_inputs())
    torch.testing.assert_close(module(x), cls.Model(*cls.get_init_inputs())(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(getattr(jitact, activation.name)(x), module(x), rtol=0, atol=0)
    assert module.state_dict() == {}


@pytest.mark.parametrize("activation", TABLE, ids=TABLE_IDS)
def test_copies_and_pickles(activation: Activation) -> None:
    params = {name: default for name, default in activation.params}
    module = jitact.get(activation.name)(save="input", **params)
    x = torch.randn(9)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False)):
        assert type(other) is type(module) and repr(other) == repr(module) and torch.equal(other(x), module(x))


def test_repr() -> None:
    assert repr(jitact.get("relu")()) == "ReLU()"
    assert repr(jitact.get("relu")(inplace=True)) == "ReLU(inplace=True)"
    assert repr(jitact.get("elu")(0.5)) == "ELU(alpha=0.5)"
    assert repr(jitact.get("gelu")("tanh")) == "GELU(approximate='tanh')"
    assert repr(jitact.get("selu")(save="output", fast_math=True)) == "SELU(fast_math=True, save='output')"


def test_gelu_chooses_its_form() -> None:
    x = torch.randn(100)
    assert torch.equal(jitact.get("gelu")(approximate="tanh")(x), jitact.gelu_tanh(x))
    assert torch.equal(jitact.gelu(x, approximate="tanh"), jitact.gelu_tanh(x))
    with pytest.raises(ValueError, match="approximate='erf'"):
        jitact.get("gelu")(approximate="erf")


def test_attributes_are_live() -> None:
    module = jitact.get("leaky_relu")(0.5)
    module.negative_slope = 0.25
    assert module(torch.tensor([-1.0])).item() == -0.25


def test_get_inputs_is_kernelbench() -> None:
    cls = jitact.get("relu")
    assert list(inspect.signature(cls.get_inputs).parameters)[:2] == ["batch_size", "dim"]
    assert [p.default for p in inspect.signature(cls.get_inputs).parameters.values()][:2] == [4096, 393216]
    (x,) = cls.get_inputs(2, 3, device="cpu", dtype=torch.bfloat16)
    assert x.shape == (2, 3) and x.dtype is torch.bfloat16 and cls.get_init_inputs() == []


ALIASES = {
    "ReLU": "relu", "LeakyReLU": "leaky_relu", "SiLU": "silu", "swish": "silu", "hard_sigmoid": "hardsigmoid",
    "new_gelu": "gelu_tanh", "soft_sign": "softsign", "log_sigmoid": "logsigmoid", "Hard-Swish": "hardswish",
    "hard_tanh": "hardtanh", "hard_silu": "hardswish", "gelu_pytorch_tanh": "gelu_tanh", "gelu_python": "gelu",
    "gelu_fast": "gelu_tanh", "LOGSIGMOID": "logsigmoid", "relu2": "relu2",
}  # fmt: skip

LIBRARIES = {
    "torch.nn": "ELU Hardshrink Hardsigmoid Hardtanh Hardswish LeakyReLU LogSigmoid ReLU ReLU6 SELU CELU GELU Sigmoid SiLU "
    "Mish Softplus Softshrink Softsign Tanh Tanhshrink Threshold",
    "transformers": "gelu gelu_10 gelu_fast gelu_new gelu_python gelu_pytorch_tanh gelu_python_tanh gelu_accurate hardswish "
    "laplace leaky_relu mish quick_gelu relu relu2 relu6 sigmoid silu sqrtsoftplus swish tanh",
    "jax.nn": "relu relu6 sigmoid softplus sparse_plus sparse_sigmoid soft_sign silu swish log_sigmoid leaky_relu hard_sigmoid "
    "hard_silu hard_swish hard_tanh elu celu selu gelu squareplus mish",
}


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_gives_the_same_class(alias: str) -> None:
    assert jitact.get(alias) is jitact.get(ALIASES[alias])


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_name_of_the_libraries_is_known(library: str) -> None:
    for name in LIBRARIES[library].split():
        assert jitact.get(name)


def test_unknown_names() -> None:
    with pytest.raises(KeyError, match="did you mean 'relu'") as error:
        jitact.get("reul")
    assert "softsign" in str(error.value)
    with pytest.raises(KeyError, match="no activation to compile"):
        jitact.get("identity")
    with pytest.raises(AttributeError, match="nothing_like_it"):
        jitact.nothing_like_it  # noqa: B018


def test_the_registry_is_read_only() -> None:
    assert jitact.registry.REGISTRY["relu"] is jitact.get("relu") and sorted(jitact.registry.REGISTRY) == jitact.names()
    with pytest.raises(TypeError):
        jitact.registry.REGISTRY["relu"] = None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jitact.get("elu")(alpha="big"), "elu: alpha must be a number, got 'big'"),
        (lambda: jitact.get("elu")(alpha=-1.0, save="output"), "elu: needs alpha > 0 with save='output', got alpha=-1.0"),
        (lambda: jitact.get("hardtanh")(2.0, 1.0), "hardtanh: needs min_val < max_val"),
        (lambda: jitact.get("gelu")(save="bit"), "gelu: save='bit' is not possible; choose from 'input'"),
        (lambda: jitact.get("selu")(inplce=True), "unexpected keyword argument 'inplce'"),
        (lambda: jitact.softplus(torch.ones(3), beta=0.0), "softplus: needs beta > 0"),
    ],
)
def test_bad_options_are_named(call: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert message in str(error.value)


def test_importing_compiles_nothing_and_is_quick() -> None:
    """No more than 50 ms beyond torch, no CUDA, no compiler machinery."""
    code = """
import time, sys, torch
begin = time.perf_counter()
import jitact
seconds = time.perf_counter() - begin
assert not torch.cuda.is_initialized()
assert "torch.utils.cpp_extension" not in sys.modules and "torch._dynamo" not in sys.modules
print(seconds)
"""
    seconds = min(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) for _ in range(3)
    )
    assert seconds < 0.5, f"importing jitact took {seconds:.3f} s beyond torch"
