"""Exported files: their form, that they have the library's own code and compute the same, and that nvcc compiles them."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import functools
import inspect
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from common import SLOW, slow_but
from emulated import FLAGS, HERE, without_launches
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import jitact
from jitact import registry
from jitact.exporting import build, extract, onefile
from jitact.exporting import rows as of_rows
from jitact.exporting.conditions import evaluate
from jitact.kernels.loader.source import DEVICE, KernelSource
from jitact.rows import kernels as row_kernels
from jitact.rows.records import ANY_LENGTH

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
LAYOUTS = {
    "scalar": lambda: torch.randn(()),
    "nothing": lambda: torch.randn(0, 3),
    "transposed": lambda: torch.randn(4, 6, 5).transpose(0, 2),
    "gaps": lambda: torch.randn(7, 9)[:, ::2],
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
}
ROWS = ["softmax", "log_softmax", "softmin"]
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ONE = {"device": "cpu", "dtype": "fp32"}  # for tests of what does not depend on these: all take several times as long
pytestmark = pytest.mark.usefixtures("extracted_once")


@pytest.fixture(autouse=True)
def builds(exported_builds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the builds of exported files next to the tests' kernel cache."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(exported_builds))


@pytest.fixture
def swoosh():
    jitact.define("swoosh", "x * sin(a * x)", a=2.0)
    return "swoosh"


@functools.cache
def exported(name: str) -> str:
    """The exported file of one of the library's activations."""
    return jitact.export(name)


def load(name: str, **options) -> dict:
    """Runs the text as KernelBench does: without a file."""
    space = {"__name__": "exported"}
    own = name not in ("swoosh", "opaque") and not options
    exec(exported(name) if own else jitact.export(name, **options), space)
    return space


def compare(name: str, device: str, x: torch.Tensor, *args, space: dict | None = None) -> None:
    """Compares the file's module with the library's: equal but for the compiler's choice of contractions."""
    space = space or load(name)
    ours, theirs = (make(*args).to(device) for make in (space["ModelNew"], jitact.get(name)))
    theirs.load_state_dict(ours.state_dict())
    a, b = (x.detach().to(device).requires_grad_() for _ in range(2))
    dy, results = torch.randn(x.shape, device=device).to(x.dtype), []
    for module, given in ((ours, a), (theirs, b)):
        torch.manual_seed(0)  # rrelu draws
        y = module(given)
        y.backward(dy)
        results.append({"y": y, "dx": given.grad, **{name: p.grad for name, p in module.named_parameters()}})
    assert results[0]["y"].stride() == results[1]["y"].stride()
    for key, value in results[0].items():
        eps = torch.finfo(value.dtype).eps
        # A weight's gradient is a sum, in another order, of terms that nearly cancel.
        rtol, atol = (4 * eps, 1e-7) if key in ("y", "dx") else (8 * eps, max(eps, 1e-6) * x.numel() ** 0.5)
        torch.testing.assert_close(value, results[1][key], rtol=rtol, atol=atol, msg=lambda text, key=key: f"{key}: {text}")
    near = 1e-5 if x.dtype in (torch.float32, torch.float64) else 2e-2
    reference = space["Model"](*args)
    reference.load_state_dict(ours.state_dict())
    torch.testing.assert_close(reference.eval()(x), ours.eval()(a).detach().cpu(), rtol=near, atol=near)


@pytest.mark.parametrize("name", [*slow_but(jitact.names()), *map(SLOW, ROWS[:2]), *ROWS[2:]])
def test_form(name: str) -> None:
    text = exported(name)
    assert not re.search("try|except|pass", text, re.IGNORECASE)
    assert "import jitact" not in text and "JITACT" not in text and "__file__" not in text
    assert max(map(len, text.splitlines())) <= 132
    assert not re.search(r"\bF\.|functional", text[text.index("class ModelNew") : text.index("class Model(")])
    space = load(name)  # compiles nothing
    calls = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Call) and ast.unparse(each.func) == "run"]
    for call in calls:  # the arguments of run() depend on the extracted C++ structs
        inspect.signature(space["run"]).bind(*call.args, **{given.arg: given.value for given in call.keywords})
    assert calls
    assert (space["batch_size"], space["dim"]) == (4096, 393216)
    space["batch_size"], space["dim"] = 2, 3
    inputs = space["get_inputs"]()
    given = space["get_init_inputs"]()
    assert inputs[0].shape == (2, 3) and space["Model"](*given)(*inputs).shape == (2, 3)
    ours = jitact.get(name)(*given) if name in ROWS else jitact.get(name)()
    assert space["ModelNew"](*given).state_dict().keys() == ours.state_dict().keys()


def test_lines() -> None:
    one = {"dtype": "fp32", "device": "cuda"}
    texts = [exported("relu"), exported("gelu"), jitact.export("relu", **one), jitact.export("relu", forward_only=True, **one)]
    relu, gelu, of_one, forward = (len(text.splitlines()) for text in texts)
    assert relu <= 550 and gelu <= 850 and of_one <= 250 and forward <= of_one - 30


@pytest.mark.parametrize("name", ["softsign", "sigmoid", "leaky_relu"])  # one for each kind of saved tensor
@pytest.mark.parametrize("dtype", DTYPES)
def test_computes_what_the_library_does(name: str, dtype: torch.dtype) -> None:
    compare(name, "cpu", (4 * torch.randn(33, 1001)).to(dtype), *([0.3] if name == "leaky_relu" else []))


def beside_library(ours: nn.Module, library, inputs: list[torch.Tensor]) -> None:
    """Compares results and gradients of a file's module with a function of the library: dtypes, shapes, values."""
    results = []
    for function in (ours, library):
        given = [each.detach().clone().requires_grad_() for each in inputs]
        torch.manual_seed(0)
        y = function(*given)
        results.append([y, *torch.autograd.grad(y.double().square().sum(), given)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-4)


def test_several_tensors_promote_and_broadcast() -> None:
    """As in the library: the result has the promoted dtype, rounded once, and the broadcast shape."""
    space: dict = {"__name__": "exported"}
    exec(jitact.export("prelu+residual", device="cpu", dtype=["fp32", "bf16"]), space)
    module, weights = space["ModelNew"](4), torch.tensor([0.25, 0.5, -1.0, 2.0])
    with torch.no_grad():
        module.weight.copy_(weights)
    torch.manual_seed(0)
    for sizes, others, dtypes in (
        ((4, 4), (4, 4), (torch.bfloat16, torch.float32)),
        ((4, 4), (1, 4), (torch.float32, torch.bfloat16)),
        ((3, 4, 5), (5,), (torch.bfloat16, torch.bfloat16)),
        ((4, 4), (4, 4, 4), (torch.float32, torch.float32)),  # channels are those of x
    ):
        x, residual = (torch.randn(size).to(dtype) for size, dtype in zip((sizes, others), dtypes, strict=True))
        module.to(x.dtype)
        library = lambda x, r: jitact.prelu(x, weights.to(x.dtype), residual=r)  # noqa: E731
        beside_library(module, library, [x, residual])
    with pytest.raises(TypeError, match="expected floating-point tensors"):
        module(x, residual.long())
    with pytest.raises(TypeError, match=r"prelu\+residual: weight must be of x's dtype, torch\.bfloat16, got torch\.float32"):
        module(torch.randn(4, 4).bfloat16(), torch.randn(4, 4))
    with pytest.raises(ValueError, match=r"prelu\+residual: 4 values of weight do not fit dimension 1 of .* shape \(4, 4\)"):
        module(torch.randn(4), torch.randn(4, 4))
    swiglu = load("swiglu")["ModelNew"]()
    for up in (torch.randn(9, 44).half(), torch.randn(44), torch.randn(5, 1, 44)):
        beside_library(swiglu, jitact.swiglu, [torch.randn(9, 44), up])
    with pytest.raises(ValueError, match=r"prelu\+residual: expected one device, got \['cpu', 'meta'\]"):
        module(torch.randn(4, 4), torch.randn(4, 4, device="meta"))
    with pytest.raises(ValueError, match=r"prelu\+residual: weight is on meta, not cpu"):
        space["ModelNew"](4, device="meta")(torch.randn(4, 4), torch.randn(4, 4))
    expected = r"expected a float32 or bfloat16 tensor on a CPU, outside of make_fx, got torch\.float64"
    with pytest.raises(TypeError, match=expected):
        module(torch.randn(4, 4), torch.randn(4, 4).double())


def beside_librarys_bias(module: nn.Module, dtypes: tuple[torch.dtype, ...]) -> None:
    """Compares results and gradients of a file's gelu+bias with the library's, for each dtype of x and of bias."""
    for dtype, of_bias in itertools.product(dtypes, DTYPES):
        own, other = ((torch.randn(30) / 3 + 1).to(of_bias) for _ in range(2))
        module.bias, other = nn.Parameter(own), nn.Parameter(own.clone())
        x, dy = torch.randn(2, 700, 30).to(dtype)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = module(a), jitact.gelu(b, bias=other)
        found, wanted = (torch.autograd.grad(out, given, dy) for out, given in ((y, (a, module.bias)), (expected, (b, other))))
        assert [each.dtype for each in (y, *found)] == [dtype, dtype, of_bias]
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        torch.testing.assert_close(found[1].double(), wanted[1].double(), rtol=torch.finfo(of_bias).eps, atol=4000 * eps)
        for ours, theirs in ((y, expected), (found[0], wanted[0])):
            torch.testing.assert_close(ours, theirs, rtol=4 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("dtypes", [DTYPES[3:], SLOW((torch.float32, torch.float16)), SLOW(DTYPES)], ids=str)
def test_a_bias_keeps_its_dtype(dtypes: tuple[torch.dtype, ...]) -> None:
    """As in the library: with 16-bit elements, float32 values and their gradients are not rounded."""
    space: dict = {"__name__": "exported"}
    names = [name for name, (text, *_) in build.DTYPES.items() if text in map(str, dtypes)]
    exec(jitact.export("gelu+bias", device="cpu", dtype=names), space)
    beside_librarys_bias(space["ModelNew"](30), dtypes)


@pytest.mark.slow
def test_values_by_row_keep_their_dtype(swoosh: str) -> None:
    made = jitact.define("swoosh", "silu(x) * w", w=jitact.Row())
    space: dict = {"__name__": "exported"}
    exec(jitact.export(swoosh, device="cpu", dtype="bf16"), space)
    inputs = [torch.randn(40, 3000).bfloat16(), 1 + torch.rand(40)]
    beside_library(space["ModelNew"](), made(), inputs)
    inputs[1] = inputs[1].bfloat16()
    beside_library(space["ModelNew"](), made(), inputs)


def test_values_by_row_have_gradients_where_x_keeps_a_bit(swoosh: str) -> None:
    source = """
ELEMENTWISE T forward(T x, Row<T> w) { return x > 0 ? x * w : 0; }
ELEMENTWISE Many<T, 2> backward(T dy, T x, Row<T> w) { return {x > 0 ? dy * w : 0, x > 0 ? dy * x : 0}; }
ELEMENTWISE bool keeps(T x, Row<T>) { return x > 0; }
ELEMENTWISE T backward_from_bit(T dy, bool positive, Row<T> w) { return positive ? dy * w : 0; }
"""
    jitact.define("swoosh", source=source, reference=lambda x, w: torch.relu(x) * w)
    beside_model(jitact.export(swoosh, device="cpu", dtype="fp32"), inputs=[torch.randn(40, 30), torch.randn(40)])


@pytest.mark.parametrize("name", ["prelu", SLOW("xielu"), "gelu+bias", SLOW("prelu+bias")])
def test_inputs_of_16_bits(name: str) -> None:
    """Modules made of get_init_inputs take get_inputs, and their results have the same dtype."""
    space: dict = {"__name__": "exported"}
    exec(jitact.export(name, dtype="bf16", device="cpu", shape=(6, 5)), space)
    inputs = space["get_inputs"]()
    results = [space[each](*space["get_init_inputs"]())(*inputs) for each in ("ModelNew", "Model")]
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


def test_what_is_known_of_activations_stands_in_the_table() -> None:
    sources = {path.name: path.read_text() for path in Path(onefile.__file__).parent.glob("*.py")}
    named = [(name, file) for name in jitact.names() for file, text in sources.items() if f'"{name}"' in text]
    assert len(sources) > 10 and not named
    assert "return [0.8, 0.8, 0.5, -1e-06, torch.bfloat16]" in jitact.export("xielu", dtype="bf16")
    arguments = {name: inspect.signature(load(name)["ModelNew"]).parameters for name in ("prelu", "rrelu", "xielu")}
    for name, taken in arguments.items():
        own = jitact.get(name).activation.own_arguments
        assert {each.name: each.default for each in taken.values()} == {k: own[k] for k in own if k != "inplace"}


def test_gated_activations_take_two_tensors() -> None:
    given = [[torch.randn(9, 44).requires_grad_() for _ in range(2)] for _ in range(2)]
    for own, other in zip(*given, strict=True):
        other.data.copy_(own.data)
    dy, modules = torch.randn(9, 44), (load("swiglu")["ModelNew"](), jitact.get("swiglu")())
    results = [
        [y := module(*inputs), *torch.autograd.grad(y, inputs, dy)] for module, inputs in zip(modules, given, strict=True)
    ]
    assert all(map(torch.equal, *results))


def test_defined_activation(swoosh: str) -> None:
    compare(swoosh, "cpu", torch.randn(1001), 3.0, space=load(swoosh, **ONE))
    assert "return x * torch.sin(self.a * x)" in jitact.export(swoosh, **ONE)


def beside_model(text: str, *arguments: object, inputs: list[torch.Tensor], near: float = 1e-5) -> nn.Module:
    """Compares results and all gradients of ModelNew and Model, in evaluation, so without dropout."""
    space: dict = {"__name__": "exported"}
    exec(text, space)
    modules = [space[each](*arguments).eval() for each in ("ModelNew", "Model")]
    modules[1].load_state_dict(modules[0].state_dict())
    dy, results = None, []
    for module in modules:
        given = [each.clone().requires_grad_() for each in inputs]
        y = module(*given)
        dy = torch.randn_like(y) if dy is None else dy
        results.append([y, *torch.autograd.grad(y, [*given, *module.parameters()], dy)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=near, atol=10 * near)
    return modules[0].train()


def test_expressions_that_call_activations_and_drop(swoosh: str) -> None:
    jitact.define("swoosh", "r + dropout(gelu(x + b), 0.25) * a", b=jitact.Channel(0.5), a=2.0)
    x, r = torch.randn(40, 30), torch.randn(40, 30)
    text = jitact.export(swoosh, device="cpu", dtype="fp32")
    assert "def gelu_(x):" in text and "share1 = 0.25 if self.training else 0.0" in text
    module = beside_model(text, 30, inputs=[x, r])
    assert 0.15 < (module(x, r) == r).float().mean() < 0.35


@pytest.mark.parametrize("expression, count", [("dropout(x, p)", 1), ("dropout(x, p) + g", 2)])
def test_expressions_that_drop_alone(expression: str, count: int, swoosh: str) -> None:
    jitact.define("swoosh", expression, p=0.25)
    tensors = [torch.randn(40, 30) for _ in range(count)]
    module = beside_model(jitact.export(swoosh, device="cpu", dtype="fp32"), inputs=tensors)
    x = tensors[0].requires_grad_()
    y = module(*tensors)
    (dx,) = torch.autograd.grad(y.sum(), x)
    dropped = y == sum(tensors[1:])
    assert 0.15 < dropped.float().mean() < 0.35 and torch.equal(dx == 0, dropped)


def test_calls_of_what_has_an_infinite_default(swoosh: str) -> None:
    jitact.define("below", "x < a ? x : 2 * x", a=math.inf)
    jitact.define("swoosh", "below(x, 1) * 3")
    assert load(swoosh, **ONE)["Model"]()(torch.tensor([0.5, 2.0])).tolist() == [1.5, 12.0]


def test_operands_that_are_called_as_the_file_calls_its_own(swoosh: str) -> None:
    options = {"sums": jitact.Channel(2.0), "bits": jitact.Channel(0.5)}
    jitact.define("swoosh", "x * y - dx * 2 + sums * y + bits + places", operands=("x", "y", "dx", "places"), **options)
    text = jitact.export(swoosh, device="cpu", dtype="fp32")
    assert "# keeps x, y for backward" in text
    module = beside_model(text, 30, 30, inputs=[torch.randn(40, 30) for _ in range(4)])
    turned = [torch.randn(30, 40).t().requires_grad_(k == 2) for k in range(4)]
    dy = torch.randn(40, 30)
    (found,) = torch.autograd.grad(module(*turned), turned[2], dy)
    assert torch.equal(found, -2 * dy)


@pytest.mark.parametrize("name", ["call", "model", SLOW("model_new")])
def test_names_of_the_files_own_classes(name: str) -> None:
    jitact.define(name, "x * x + gate")
    try:
        beside_model(jitact.export(name, device="cpu", dtype="fp32"), inputs=[torch.randn(4, 5) for _ in range(2)])
    finally:
        registry.unregister(name)


def test_numbers_are_checked() -> None:
    for name, numbers in {
        "gelu+dropout": {"dropout": -1},
        "hardtanh": {"min_val": 1.0, "max_val": -1.0},
        "softplus": {"beta": math.nan},
        "rrelu": {"upper": math.inf},
        "softshrink": {"lambd": math.inf},
    }.items():
        with pytest.raises(ValueError, match=rf"{re.escape(name)}: needs .*, got .*{[*numbers][-1]}={[*numbers.values()][-1]}"):
            load(name, **ONE)["ModelNew"](**numbers)


def test_what_no_gradient_reads_is_not_kept(swoosh: str) -> None:
    jitact.define("swoosh", "r + dropout(x + b, p) * 2", b=jitact.Channel(0.5), p=0.25)
    text = jitact.export(swoosh, device="cpu", dtype="fp32")
    assert "# keeps no tensor for backward" in text and "ctx.save_for_backward(b, seed)" in text
    space: dict = {"__name__": "exported"}
    exec(text, space)
    module = space["ModelNew"](30)
    for turn in (lambda t: t, lambda t: t.t().contiguous().t()):
        x, r = (turn(torch.randn(40, 30)).requires_grad_() for _ in range(2))
        y, dy = module(x, r), torch._neg_view(torch.randn(40, 30))
        kept = 2 / 0.75 * ((y - r).abs() > 1e-6)
        found = torch.autograd.grad(y, [x, r, module.b], dy)
        for gradient, exact in zip(found, (kept * dy, dy, (kept * dy).sum(0)), strict=True):
            torch.testing.assert_close(gradient, exact)


BUILT = {
    "calls": ("gelu(x) * sigmoid(a * x)", {"a": 2.0}, (), 1),
    "calls a gated one": ("swiglu(x, z) + x", {}, (), 2),
    "calls with a number": ("leaky_relu(x, 0.3) * w", {"w": jitact.Channel(2.0, dim=1)}, (30,), 1),
    "drops twice": ("dropout(dropout(x, 0.1) * z, p) * dropout(2 * x, p / 2) * p", {"p": 0.5}, (), 2),
}


@pytest.mark.parametrize("kind", BUILT)
@pytest.mark.slow
def test_expressions_of_further_kinds(kind: str, swoosh: str) -> None:
    expression, options, arguments, count = BUILT[kind]
    jitact.define("swoosh", expression, **options)
    text = jitact.export(swoosh, device="cpu", dtype="fp32")
    beside_model(text, *arguments, inputs=[torch.randn(40, 30) for _ in range(count)])


@pytest.mark.slow
def test_values_by_row(swoosh: str) -> None:
    jitact.define("swoosh", "silu(x) * w + z", w=jitact.Row())
    text = jitact.export(swoosh, device="cpu", dtype="fp32")
    for rows in ((40,), (40, 1)):
        beside_model(text, inputs=[torch.randn(40, 30), torch.randn(40, 30), torch.randn(rows)])
    space: dict = {"__name__": "exported"}
    exec(text, space)
    with pytest.raises(ValueError, match=r"w of shape \(8, 5\) does not fit the rows of shape \(5, 8, 3\)"):
        space["ModelNew"]()(torch.randn(5, 8, 3), torch.randn(5, 8, 3), torch.randn(8, 5))


def test_pytorchs_form_has_the_rows_of_the_result(swoosh: str) -> None:
    """Also where the first tensor is broadcast."""
    made = jitact.define(swoosh, "silu(x) * w + z", w=jitact.Row())
    space: dict = {"__name__": "exported"}
    exec(jitact.export(swoosh, **ONE), space)
    for x, z, w in (((1, 30), (40, 30), (40,)), ((30,), (40, 30), (40, 1)), ((40, 30), (30,), (40,)), ((), (), ())):
        inputs = [torch.randn(shape) for shape in (x, z, w)]
        torch.testing.assert_close(space["Model"]()(*inputs), made()(*inputs))


@pytest.mark.parametrize(("name", "arguments", "count"), [
    ("gelu+bias+dropout+residual", (30, 0.25), 2),
    ("xielu+dropout+residual", (0.25,), 2),
    ("relu+dropout+residual", (0.25,), 2),
    ("rrelu+bias", (30,), 1),
    ("prelu+bias", (1, 30), 1),
    ("xielu+bias", (30,), 1),
    ("gated_mish", (), 2),
    ("gated_rrelu", (0.1, 0.4), 2),
    ("swiglu+unfused", (), 2),
])  # fmt: skip
@pytest.mark.slow
def test_what_stands_around_an_activation(name: str, arguments: tuple, count: int) -> None:
    given = jitact.gated(name.removeprefix("gated_")) if name.startswith("gated_") else name
    text = jitact.export(given, device="cpu", dtype="fp32")
    beside_model(text, *arguments, inputs=[torch.randn(40, 30) for _ in range(count)])


@pytest.mark.parametrize("name", ["gelu+bias", SLOW("silu+dropout"), SLOW("relu+residual"), "swiglu+row_weight"])
def test_names_with_what_stands_around(name: str) -> None:
    space: dict = {"__name__": "exported"}
    text = jitact.export(name, device="cpu")
    exec(text, space)
    parts = name.split("+")[1:]
    assert ("beside(row_weight, gate)" in text) is ("row_weight" in parts)
    assert ("beside(self.bias, x)" in text) is ("bias" in parts)
    assert "beside(" not in jitact.export(name, device="cpu", dtype=["fp32", "fp64"])
    taken = list(inspect.signature(space["ModelNew"].forward).parameters)[1:]
    space["batch_size"], space["dim"] = 2, 3
    assert space["Model"](*space["get_init_inputs"]())(*space["get_inputs"]()).shape == (2, 3)
    beside = [part for part in parts if part in ("residual", "row_weight")]
    assert taken == [*(["gate", "up"] if "swiglu" in name else ["x"]), *beside]
    assert list(inspect.signature(space["ModelNew"]).parameters)[: len(parts) - len(beside)] == [
        part for part in parts if part not in beside
    ]


def test_references_get_channels_as_the_library_gives_them(swoosh: str) -> None:
    source = "ELEMENTWISE T forward(T x, Channel<T> w) { return x * w; }"
    made = jitact.define("swoosh", source=source, reference=lambda x, w: torch.mul(x, w), w=jitact.Channel(2.0, dim=1))
    space: dict = {"__name__": "exported"}
    exec(jitact.export(swoosh, **ONE), space)
    x = torch.randn(2, 3, 4)
    assert torch.equal(space["Model"](3)(x), made.Model(3)(x))


def test_helpers_and_constants_come_along(swoosh: str) -> None:
    jitact.define("swoosh", "max(x_minus_tanh(x), 0) * sqrt(2 / pi)")
    space = load(swoosh, device="cpu", dtype="fp64")
    x = torch.randn(100, dtype=torch.float64)
    torch.testing.assert_close(space["ModelNew"]()(x), space["Model"]()(x))


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("name", ["leaky_relu", "softsign", "prelu", "rrelu"])
@pytest.mark.slow
def test_layouts(name: str, make) -> None:
    compare(name, "cpu", make())


@pytest.mark.parametrize("name", ["leaky_relu", "softsign", "sigmoid", "prelu", "softmin"])
def test_views_that_are_negated_when_they_are_read(name: str) -> None:
    """As ``x.conj().imag`` is, whose memory holds ``x.imag``."""
    space = load(name)
    module = space["ModelNew"](1) if name == "softmin" else space["ModelNew"]()
    x, dy = (torch._neg_view(torch.randn(4, 6)) for _ in range(2))
    assert x.is_neg() and dy.is_neg() and x.is_contiguous()
    plain_x, plain_dy = x.clone(), dy.clone()
    results = [
        (y := module(leaf.requires_grad_()), torch.autograd.grad(y, leaf, incoming)[0])
        for leaf, incoming in ((plain_x, plain_dy), (x, plain_dy), (plain_x, dy))
    ]
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])
    weights = {key: torch._neg_view(weight.detach()) for key, weight in module.named_parameters()}
    read = {key: weight.clone() for key, weight in weights.items()}
    assert torch.equal(*(torch.func.functional_call(module, given, x.detach()) for given in (weights, read)))


@pytest.mark.parametrize("name", ["relu", "prelu", "swiglu"])
def test_graphs_of_make_fx_are_refused(name: str) -> None:
    """They would have empty tensors in the place of results."""
    module, tensors = load(name)["ModelNew"](), [torch.randn(8, 9)] * (2 if name == "swiglu" else 1)
    with pytest.raises(TypeError, match=f"{name}: expected a .*, outside of make_fx, got torch.float32"):
        make_fx(module)(*tensors)


@pytest.mark.parametrize("name", ["leaky_relu", "softsign", "softmin"])
def test_gradients_that_are_zeros_without_memory(name: str) -> None:
    space, x = load(name), torch.randn(4, 6, requires_grad=True)
    module = space["ModelNew"](1) if name == "softmin" else space["ModelNew"]()
    (dx,) = torch.autograd.grad(module(x), x, torch._efficientzerotensor((4, 6)))
    assert not dx.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.slow
def test_learned_weights(dtype: torch.dtype) -> None:
    for channels, shape in ((1, (33, 1001)), (5, (9, 5)), (3, (2, 3, 11, 13)), (4, (0, 4))):
        compare("prelu", "cpu", torch.randn(shape).to(dtype), channels, 0.3, None, dtype)
    compare("xielu", "cpu", (3 * torch.randn(33, 1001)).to(dtype), 0.7, 0.9, 0.25, -1e-6, dtype)
    by_channel = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    compare("prelu", "cpu", by_channel.to(dtype), 3, 0.3, None, dtype)


def test_weights_without_gradients_and_those_that_do_not_fit() -> None:
    module, x = load("prelu")["ModelNew"](3), torch.randn(2, 3, 4)
    module(x).sum().backward()
    torch.testing.assert_close(module.weight.grad, x.clamp(max=0).sum((0, 2)))
    module.weight.requires_grad_(False)
    module(x.requires_grad_()).sum().backward()
    torch.testing.assert_close(x.grad, torch.where(x > 0, 1.0, 0.25))
    with pytest.raises(ValueError, match=r"prelu: 3 values of weight do not fit dimension 1 .* \(2, 4\)"):
        module(torch.randn(2, 4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.slow
def test_random_slopes(dtype: torch.dtype) -> None:
    compare("rrelu", "cpu", torch.randn(33, 1001).to(dtype), 0.1, 0.4)
    module, x = load("rrelu")["ModelNew"](), -torch.ones(1000, dtype=dtype)
    assert not torch.equal(module(x), module(x))
    state = torch.get_rng_state()
    assert len(module.eval()(x).unique()) == 1 and torch.equal(state, torch.get_rng_state())


def preprocessed(text: str, folder: Path, *flags: str) -> list[str]:
    """The preprocessed lines, without whitespace and without the standard library."""
    text = re.sub(r"^#include <.*|^#line.*", "", text, flags=re.MULTILINE)
    command = ["g++", "-std=c++20", "-E", "-P", "-x", "c++", f"-I{folder}", *flags, "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return [re.sub(r'\s+|(?<=\w)" "(?=\w)', "", line) for line in done.stdout.splitlines()]  # joins adjacent strings


@pytest.mark.parametrize("name", [
    "prelu",
    "swiglu",
    "log_softmax",
    *map(SLOW, ["relu", "gelu", "sigmoid", "gelu_10", "laplace", "xielu", "softmax"]),
])  # fmt: skip
def test_every_line_is_the_librarys(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for header in DEVICE.iterdir():
        (tmp_path / header.name).write_text(re.sub(r"^#include <.*", "", header.read_text(), flags=re.MULTILINE))
    source = KernelSource.from_file(name) if name in ROWS else registry.REGISTRY[name].activation.source
    space = load(name)
    monkeypatch.setattr(extract, "joined", lambda text: text)
    for module in (build, of_rows):
        monkeypatch.setattr(module, "extract", extract.extract)  # anew
    apart = load(name, shape=(2, 3))["SOURCE"]  # before short lines are joined

    def tokens(text: str) -> str:
        return re.sub(r"\s|#line.*", "", text).replace(",};", "};")

    assert tokens(space["SOURCE"]) == tokens(apart)
    kernel = source.full_text.replace(f"{DEVICE}/", "")
    library = f'#include "elementwise.cuh"\n{kernel}\n#include "launch.cuh"\n'
    for passes in ([["-D__CUDACC__", "-D__CUDA_ARCH__=900"], ["-D__CUDACC__"]], [[]]):
        passes = [[*flags, *source.defines(), "-DJITACT_CUDA", "-DJITACT_EXPORTED"] for flags in passes]
        whole = "".join(line for flags in passes for line in preprocessed(library, tmp_path, *flags))
        for flags in passes:
            lines = [line for line in preprocessed(apart, tmp_path, *flags) if not line.startswith("namespace")]
            # Branches of known conditions are extracted without the condition and without else; blocks may have become
            # empty.
            foreign = [line for line in lines if re.sub(r"^\}?else|\};?$", "", line) not in whole]
            assert len(lines) > 100 and not foreign


@functools.cache
def emulated(name: str, folder: Path) -> dict:
    """The file with its GPU path, Python and CUDA, emulated."""
    text = exported(name).replace("not x.is_cuda", "False").replace("torch.cuda.device(x.device)", "nullcontext()")
    text = text.replace("if x.is_cuda", "if x.is_cpu").replace("torch.cuda.get_device_capability(x.device)[0]", "9")
    space = {"__name__": "exported", "nullcontext": contextlib.nullcontext}
    exec(text.replace("torch.cuda.current_stream().cuda_stream", "None"), space)
    source = without_launches(space["SOURCE"])
    source, count = re.subn(r"namespace jitact::ptx \{\n.*?\}\n\}\n", "", source, flags=re.DOTALL)
    assert count == 1
    (folder / f"{name}.cpp").write_text(f'#define __CUDACC__\n#include "{HERE / "emulated_cuda.h"}"\n{source}')
    command = ["g++", *FLAGS, f"{name}.cpp", "-o", f"{name}.so"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / f"{name}.so"))
    space["library"] = lambda: library
    return space


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which emulated kernels are built."""
    return tmp_path_factory.mktemp("emulated")


@pytest.mark.parametrize(("name", "arguments", "shapes"), [
    ("softsign", (), [(3000,)]),
    SLOW("laplace", (), [(3000,)]),
    SLOW("leaky_relu", (0.2,), [(3000,)]),
    ("rrelu", (0.1, 0.4), [(1,), (9001,)]),
    SLOW("xielu", (0.7, 0.9, 0.25, -1e-6), [(1,), (9001,)]),
    ("prelu", (), [(), (9001,)]),
    # Planes that are shorter than a vector, than a warp, and longer than a block's elements; many channels, and sums over so
    # many rows that they are folded twice.
    ("prelu", (3,), [(5, 3), (2, 3, 5, 5), (2, 3, 50, 51), (0, 3)]),
    SLOW("prelu", (1000,), [(9, 1000)]),
    SLOW("prelu", (64,), [(100, 64, 2, 2)]),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
@pytest.mark.slow
def test_gpu_code_in_threads(name: str, arguments: tuple, shapes: list[tuple[int, ...]], folder: Path) -> None:
    space = emulated(name, folder)
    for dtype in DTYPES if len(shapes) < 4 else (torch.float32, torch.bfloat16):
        given = {"prelu": (*(arguments or (1,)), 0.3, None, dtype), "xielu": (*arguments, dtype)}.get(name, arguments)
        for shape in shapes:
            compare(name, "cpu", torch.randn(shape).to(dtype), *given, space=space)
        if shapes[-1] == (9001,):
            compare(name, "cpu", torch.randn(9002).to(dtype)[1:], *given, space=space)  # unaligned


@pytest.mark.slow
def test_gpu_code_of_a_bias_in_threads(folder: Path) -> None:
    beside_librarys_bias(emulated("gelu+bias", folder)["ModelNew"](30), DTYPES)


def along(space: dict, x: torch.Tensor, dim: int, taken: bool) -> None:
    """Compares a file's rows with PyTorch's: values and gradients."""
    assert space["takes"](x, dim) is taken
    modules = space["ModelNew"](dim), space["Model"](dim)
    given = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for _ in modules]
    dy, eps = torch.randn(x.shape).to(x), torch.finfo(x.dtype).eps
    (own, own_dx), (other, other_dx) = (
        (y := module(leaf), torch.autograd.grad(y, leaf, dy)[0]) for module, leaf in zip(modules, given, strict=True)
    )
    torch.testing.assert_close(own, other, rtol=8 * eps, atol=8 * eps)
    atol = 2 * eps * x.numel() ** 0.5  # a sum, in another order, of terms of either sign
    torch.testing.assert_close(own_dx, other_dx, rtol=8 * eps, atol=max(atol, 8 * eps))


@pytest.mark.parametrize("name", [*map(SLOW, ROWS[:2]), *ROWS[2:]])
def test_rows_beside_pytorchs(name: str) -> None:
    space = load(name)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for shape, dim in (((40, 1000), 1), ((40, 1000), -2), ((3, 5, 77), 2), ((5, 64, 40), 1), ((9,), 0)):
            along(space, 3 * torch.randn(shape).to(dtype), dim, True)
    x = torch.randn(40, 30)
    for other, dim in ((x.double(), 1), (x.t(), 1), (x[:0], 1), (torch.randn(4, 5, 3), 1), (torch.tensor(2.0), 0)):
        along(space, other, dim, False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not space["takes"](x, 1)
    with pytest.raises(IndexError, match="out of range"):
        space["ModelNew"](2)(x)
    with pytest.raises(RuntimeError, match=f"{name}: no second derivative"):
        torch.autograd.grad(space["ModelNew"](1)(x.requires_grad_()).sum(), x, create_graph=True)


# a exp(x_i) / (exp(s) + sum_j exp(x_j)), with a value s for each row.
BESIDE_SINK = """
#include "rows.cuh"
ELEMENTWISE T forward(T kept, LogSumExp<T> row, Row<T> s, Number<T> a) {
  return a * (exp(row.log_share(kept)) * sigmoid(-row.log_share(s)));
}
ELEMENTWISE Many<T, 2> fold_from_output(T dy, T y, Row<T>, Number<T> a) { return {dy * y, y / a}; }
ELEMENTWISE T backward_from_output(T dy, T y, Sum<T, 2> row, Row<T>, Number<T> a) { return y * (dy - row.total / a); }
ELEMENTWISE T backward_of_row(Sum<T, 2> row, Row<T>, Number<T>) { return (row.of[1] - 1) * row.total; }
"""


def beside_sink(x, s, dim, a):
    sinks = torch.zeros_like(x.narrow(dim, 0, 1)) + s
    return a * torch.softmax(torch.cat([x, sinks], dim), dim).narrow(dim, 0, x.shape[dim])


def beside_sinks(space: dict, x: torch.Tensor, s: torch.Tensor, dim: int, taken: bool) -> None:
    """Compares a file of ``BESIDE_SINK`` with the reference in float64: values, and the gradients of x and s."""
    assert space["takes"](x, dim, s) is taken
    eps, dy = torch.finfo(x.dtype).eps, torch.randn(x.shape).to(x)
    leaves, wide = ([t.detach().to(kind).requires_grad_() for t in (x, s)] for kind in (None, torch.float64))
    y, exact = space["ModelNew"](dim, a=3.0)(*leaves), space["Model"](dim, a=3.0)(*wide)
    torch.testing.assert_close(y.double(), exact, rtol=4 * eps, atol=4 * eps)
    found, wanted = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(exact, wide, dy.double())
    for own, other, like in zip(found, wanted, (x, s), strict=True):
        assert own.shape == like.shape and own.dtype is like.dtype
        atol = 16 * max(eps, torch.finfo(like.dtype).eps) * x.shape[dim] ** 0.5
        torch.testing.assert_close(own.double(), other, rtol=16 * eps, atol=atol)


@pytest.mark.parametrize("save", ["output", "input"])
def test_definitions_of_rows(save: str) -> None:
    jitact.define("beside_sink", source=BESIDE_SINK, reference=beside_sink, a=2.0)
    module, dtypes = jitact.get("beside_sink")(dim=0, a=0.5, save=save), ["fp32", "bf16"]
    text = jitact.export(module, device="cpu", dtype=dtypes, shape=(4, 6))
    space: dict = {"__name__": "exported"}
    exec(text, space)
    assert space["get_init_inputs"]() == [0] and [tuple(t.shape) for t in space["get_inputs"]()] == [(4, 6), (4, 1)]
    assert space["ModelNew"](0).a == 0.5 and f"keeps the {save} for backward" in text
    for dtype in (torch.float32, torch.bfloat16):
        for shape, of_s, dim in (((40, 1000), (40,), 1), ((3, 5, 77), (5, 1), -1), ((5, 64, 40), (5, 40), 1), ((9,), (), 0)):
            beside_sinks(space, 3 * torch.randn(shape).to(dtype), torch.randn(of_s), dim, True)
    for x, s, dim in ((torch.randn(4, 6).double(), torch.randn(4), 1), (torch.randn(6, 4).t(), torch.randn(4, 1).half(), 1)):
        beside_sinks(space, x, s, dim, False)
    module, x = space["ModelNew"](1), torch.randn(4, 6)
    for narrow in (torch.randn(40, 6).bfloat16().t(), torch.randn(6, 40).bfloat16()[:0], torch.randn(6, 40).bfloat16()[:, :0]):
        y, s = module(narrow, torch.randn(narrow.shape[0])), torch.randn(narrow.shape[0])
        assert y.dtype is torch.bfloat16 and y.shape == narrow.shape
        assert torch.equal(module(narrow, s), jitact.beside_sink(narrow.contiguous(), s, 1, a=0.5)) or narrow.numel()
    with pytest.raises(ValueError, match=r"beside_sink: s of shape \(6,\) does not fit the rows of shape \(4, 6\) along 1"):
        module(x, torch.randn(6))
    with pytest.raises(TypeError, match=r"beside_sink: s must be a floating tensor, got torch\.int64"):
        module(x, torch.arange(4))
    with pytest.raises(RuntimeError, match="beside_sink: no second derivative"):
        torch.autograd.grad(module(x.requires_grad_(), torch.randn(4)).sum(), x, create_graph=True)


def library(x, dim):
    shares = torch.softmax(x, dim)
    return 1 * shares


def test_definitions_of_rows_without_operands() -> None:
    text = (DEVICE.parent / "softmax.cu").read_text()
    jitact.define("call", source=text, reference=torch.softmax)
    space: dict = {"__name__": "exported"}
    exec(jitact.export("call", **ONE), space)
    along(space, torch.randn(40, 1000), 1, True)
    along(space, torch.randn(40, 1000).half(), 1, False)
    jitact.define("call", source=text)
    with pytest.raises(ValueError, match="call cannot be exported without a PyTorch counterpart: define it with reference="):
        jitact.export("call", **ONE)
    jitact.define("call", source=text, reference=library)
    with pytest.raises(ValueError, match="call cannot be exported: the file has a 'library' of its own; give"):
        jitact.export("call", **ONE)
    text = BESIDE_SINK.replace("T> s,", "T> takes,").replace("(s)", "(takes)")
    jitact.define("call", source=text, reference=beside_sink, a=1.0)
    with pytest.raises(ValueError, match="call cannot be exported: the file has a 'takes' of its own; give"):
        jitact.export("call", **ONE)


def test_references_whose_source_is_not_all_that_runs_are_refused() -> None:
    def doubled(function):
        @functools.wraps(function)
        def run_twice(*given):
            return 2 * function(*given)

        return run_twice

    @doubled
    def decorated(x):
        return x * x

    factor = 3.0
    for reference in (decorated, doubled(torch.relu), lambda x: factor * x, lambda x, *, factor=2.0: factor * x):
        jitact.define("swoosh", source="ELEMENTWISE T forward(T x) { T y = x; return y; }", reference=reference)
        with pytest.raises(ValueError, match="swoosh cannot be exported without a PyTorch counterpart"):
            jitact.export("swoosh", **ONE)


def test_names_that_a_file_has_of_its_own_are_refused() -> None:
    text = BESIDE_SINK.replace("T> s,", "T> beside_sink,").replace("(s)", "(beside_sink)")
    jitact.define("swoosh", source=text, reference=beside_sink, a=2.0)
    with pytest.raises(ValueError, match="swoosh cannot be exported: the file has a 'beside_sink' of its own"):
        jitact.export("swoosh", **ONE)
    jitact.define("CDLL", "2 * x")
    with pytest.raises(ValueError, match="CDLL cannot be exported: the file has a 'CDLL' of its own"):
        jitact.export("CDLL", **ONE)
    for name in ("nn", "ctx", "super"):  # what the constructor creates is an nn.Parameter
        jitact.define("swoosh", f"x * {name}", **{name: jitact.Channel()})
        with pytest.raises(ValueError, match=f"swoosh cannot be exported: the file has a '{name}' of its own"):
            jitact.export("swoosh", **ONE)


@pytest.mark.slow
def test_gpu_rows_of_a_definition_in_threads(folder: Path) -> None:
    jitact.define("beside_sink", source=BESIDE_SINK, reference=beside_sink, a=2.0)
    space = emulated("beside_sink", folder)
    for shape in ((5, 8), (3, 1024), (2, 4103), (1, 20000)):
        for dtype in (torch.float32, torch.bfloat16):
            beside_sinks(space, 3 * torch.randn(shape).to(dtype), torch.randn(shape[:-1]), -1, True)
    beside_sinks(space, torch.randn(40, 31), torch.randn(31), 0, True)


@pytest.mark.parametrize("name", [*map(SLOW, ROWS)])
def test_gpu_rows_in_threads(name: str, folder: Path) -> None:
    space = emulated(name, folder)
    for dtype in (torch.float32, torch.bfloat16) if name == "softmax" else (torch.float32, torch.float16, torch.bfloat16):
        for shape in ((5, 8), (3, 1024), (2, 4103), (1, 20000)):  # parts of a warp, a block, ragged rows, a cluster
            along(space, 3 * torch.randn(shape).to(dtype), -1, True)
    along(space, torch.randn(40, 31).bfloat16(), 0, True)
    along(space, torch.randn(40, 31), 0, True)
    along(space, torch.randn(1, 800_000), 1, False)
    shifted, module = torch.randn(9, 1000)[:, 8:].reshape(-1)[1:8001].view(1, -1), space["ModelNew"](1)
    torch.testing.assert_close(module(shifted), torch.softmax(-shifted, 1) if name == "softmin" else space["Model"](1)(shifted))


@pytest.mark.parametrize("clusters", [True, False])
def test_gpu_rows_are_those_that_the_kernels_can_count(clusters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With indices beyond 32 bits a kernel would leave elements unwritten."""
    text = jitact.export("softmax", device="cuda").replace('x.device.type != "cuda"', "False")
    space: dict = {"__name__": "exported"}
    exec(text, space)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 if clusters else 8, 0))
    monkeypatch.setattr(row_kernels, "_has_clusters", lambda device: clusters)
    found = []
    for dtype, shape, dim in (
        *((torch.float32, (64, columns), 0) for columns in (2**31, 2**32 - 1, 2**32, 2**33)),
        *((torch.bfloat16, (64, columns), 0) for columns in (2**33 - 2, 2**33 - 1, 2**33, 15, 17)),
        *((torch.float32, (planes, 64, 2**16), 1) for planes in (2**16 - 1, 2**16)),
        *((torch.bfloat16, (length, 32), 0) for length in (2**30 - 1, 2**30, 2**31)),
        (torch.float32, (2**33, 256), 1),
    ):
        x = torch.empty(shape, dtype=dtype, device="meta")
        found.append(space["takes"](x, dim))
        assert found[-1] is row_kernels.fits_a_gpu(x, dim, 1, ANY_LENGTH), (dtype, shape)
    assert True in found and False in found


def test_options_of_rows() -> None:
    text = jitact.export(nn.Softmax(dim=0), dtype="fp32", device="cuda", shape=(8, 4), forward_only=True)
    space: dict = {"__name__": "exported"}
    exec(text, space)
    assert (space["batch_size"], space["dim"], space["get_init_inputs"]()) == (8, 4, [0])
    assert not re.search(r"\bbackward\w*\(|Function|Bfloat16|Narrow|run_cpu", text)
    assert len(text) < 0.85 * len(exported("softmax"))
    x = torch.randn(3, 4, requires_grad=True)
    assert not space["ModelNew"](1)(x).requires_grad  # PyTorch's, as x is on a CPU
    assert jitact.export("LogSoftmax") == jitact.export(nn.functional.log_softmax) == exported("log_softmax")
    for given, options, why in (
        ("softmax", {"dtype": "fp64"}, "softmax: dtype must be of fp32, fp16, bf16; got 'fp64'"),
        ("softmin", {"device": "tpu"}, "softmin: device must be 'cuda' or 'cpu'; got 'tpu'"),
        ("log_softmax", {"shape": (0, 3)}, "log_softmax: shape must be two positive numbers"),
        (nn.Softmax(), {}, r"softmax cannot be exported without a dimension; got Softmax\(dim=None\)"),
        (nn.Softmax2d(), {}, "Softmax2d cannot be exported: of rows, softmax, log_softmax, softmin and definitions can"),
    ):
        with pytest.raises(ValueError, match=why):
            jitact.export(given, **options)


def test_options() -> None:
    text = jitact.export("softsign", dtype="fp32", device="cuda", shape=(8192, 4096))
    space: dict = {"__name__": "exported"}
    exec(text, space)
    assert (space["batch_size"], space["dim"]) == (8192, 4096) and len(text) < 0.6 * len(exported("softsign"))
    for word in ("double", "Bfloat16", "Narrow", "run_cpu", "float16", "torch_parallel_for"):
        assert not re.search(rf"\b{word}\b", text.partition("MIT licence")[2]), word
    expected = r"softsign\.py: softsign: expected a float32 tensor on a GPU, outside of make_fx, got torch\.float32 on cpu"
    with pytest.raises(TypeError, match=expected):
        space["ModelNew"]()(torch.randn(3))
    narrow = jitact.export("softsign", dtype=["bf16", "fp16"])
    assert narrow == jitact.export("softsign", dtype=(torch.bfloat16, torch.float16))
    assert "dtype=torch.float16" in narrow and "float32" not in narrow.partition("MIT licence")[2]
    for options, why in (
        ({"dtype": "fp8"}, "softsign: dtype must be of fp32, fp64, fp16, bf16; got 'fp8'"),
        ({"device": "tpu"}, "softsign: device must be 'cuda' or 'cpu'; got 'tpu'"),
        ({"shape": (0, 3)}, "softsign: shape must be two positive numbers"),
        ({"shape": 4}, "softsign: shape must be two positive numbers, batch_size and dim; got 4"),
    ):
        with pytest.raises(ValueError, match=why):
            jitact.export("softsign", **options)


@pytest.mark.parametrize(("name", "chosen"), [
    ("gelu", ["fp32", "fp16"]),
    SLOW("gelu", ["fp32", "fp64"]),
    SLOW("prelu", ["fp64", "fp16"]),
    SLOW("prelu", ["fp32", "fp64", "fp16"]),
    SLOW("softmax", ["fp32", "fp16"]),
], ids=str)  # fmt: skip
def test_some_dtypes_of_several(name: str, chosen: list[str]) -> None:
    space: dict = {"__name__": "exported"}
    exec(jitact.export(name, dtype=chosen, device="cpu"), space)
    assert "Bfloat16" not in space["SOURCE"]
    command = ["g++", "-std=c++20", "-fsyntax-only", "-w", "-x", "c++", "-"]
    done = subprocess.run(command, input=space["SOURCE"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_of_dtypes() -> None:
    text = jitact.export("relu", dtype=["fp32", "bf16"], forward_only=True, device="cpu")
    for dtypes in ([torch.float32, torch.bfloat16], ["bfloat16", "float32"], ["torch.float32", "bf16"]):
        assert jitact.export("relu", dtype=dtypes, forward_only=True, device="cpu") == text


def test_forward_only() -> None:
    with pytest.raises(TypeError, match="export: forward_only must be True or False, got 'no'"):
        jitact.export("relu", forward_only="no")
    text = jitact.export("leaky_relu", forward_only=True, device="cpu", dtype="fp32")
    assert not re.search(r"\b(backward\w*|keeps|plain_result<Op::backward\w*)\(|ctx.save", text)
    space: dict = {"__name__": "exported"}
    exec(text, space)
    x = torch.randn(1001, requires_grad=True)
    y = space["ModelNew"](0.2)(x)
    torch.testing.assert_close(y, torch.nn.functional.leaky_relu(x.detach(), 0.2))
    assert not y.requires_grad


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(9, requires_grad=True)
    with pytest.raises(RuntimeError, match="softsign: no second derivative"):
        torch.autograd.grad(load("softsign")["ModelNew"]()(x).sum(), x, create_graph=True)


def test_first_use_says_so_and_errors_name_the_file(swoosh: str, capfd: pytest.CaptureFixture, tmp_path: Path) -> None:
    text = jitact.export("softsign", device="cpu", dtype="fp32", forward_only=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(tmp_path)  # for this test only: the fixture restores it
    for expected in ("softsign.py: compiling, at first use\n", ""):
        space: dict = {"__name__": "exported"}
        exec(text, space)
        space["ModelNew"]()(torch.randn(3))
        assert capfd.readouterr().err == expected
    broken = text.replace("T forward(T x) {", "T forward(T x) { nonsense;")
    exec(broken.replace('"softsign_', '"broken_'), space)
    line = next(number for number, each in enumerate(broken.splitlines(), 1) if "nonsense" in each)
    with pytest.raises(RuntimeError, match=rf"softsign.py:{line}:"):
        space["ModelNew"]()(torch.randn(3))


def test_refuses_what_it_cannot_run() -> None:
    module = load("softsign")["ModelNew"]()
    with pytest.raises(TypeError, match="softsign: expected a float32"):
        module(torch.arange(3))


def test_words_that_the_form_forbids(swoosh: str) -> None:
    text = "ELEMENTWISE T forward(T x) { static_assert(sizeof(x) > 1, \"try it\"); return x; }"
    jitact.define("swoosh", source=text, reference=lambda x: x * 1)
    assert 'static_assert(sizeof(x) > 1, "tr" "y it")' in jitact.export("swoosh", **ONE)
    jitact.define("retry", "x")
    with pytest.raises(ValueError, match="'try' may not occur"):
        jitact.export("retry", **ONE)
    jitact.define("opaque", source="ELEMENTWISE T forward(T x) { T y = x; return y; }")
    with pytest.raises(ValueError, match="define it with reference="):
        jitact.export("opaque", **ONE)
    jitact.define("opaque", source="ELEMENTWISE T forward(T x) { T y = x; return y; }", reference=lambda x: x * 1)
    assert "return x * 1" in jitact.export("opaque", **ONE)


FORMULAS = (
    'x """+ 1',
    "try: x\nexcept: PASS",
    "x\0",
    "\\frac{x}{2} \\",
    '"',
    "x\r+ é 🙂\u2028",
    "tr\\x79 pas\\",
    "$x @bit // #",
)


@pytest.mark.parametrize("formula", FORMULAS, ids=ascii)
@pytest.mark.slow
def test_formulas_of_any_text(formula: str, swoosh: str, tmp_path: Path) -> None:
    jitact.define("swoosh", "x * sin(a * x)", a=2.0, formula=formula)
    text = jitact.export("swoosh")
    assert not re.search("try|except|pass", text, re.IGNORECASE)
    told = ast.get_docstring(ast.parse(text), clean=False)
    shown = textwrap.fill(f"swoosh(x) = {formula}", 127)
    assert told.startswith(f"{shown}\n\nForward and backward as CUDA kernels")
    space: dict = {"__name__": "exported"}
    exec(text, space)
    x = torch.randn(9)
    torch.testing.assert_close(space["Model"](3.0)(x), x * torch.sin(3 * x))
    jitact.save_folder(tmp_path, "swoosh")
    out = tmp_path / "swoosh.py"
    assert onefile.main(["export", "swoosh", "-o", str(out), "--from", str(tmp_path)]) == 0
    again = out.read_bytes().decode()  # with the comments of the folder's file
    assert not re.search("try|except|pass", again, re.IGNORECASE)
    assert ast.get_docstring(ast.parse(again), clean=False) == told


@pytest.mark.slow
def test_kernel_files_with_quotation_marks(swoosh: str) -> None:
    source = '''#include "elementwise.cuh"

// x """ quoted """
ELEMENTWISE T forward(T x) {
  static_assert(sizeof(x) > 0, """quoted""");
  return x * sin(x);
}
'''
    jitact.define("swoosh", source=source, reference=lambda x: x * torch.sin(x))
    compare(swoosh, "cpu", torch.randn(100))


@pytest.mark.slow
def test_parameters_that_mean_something_in_cpp(swoosh: str) -> None:
    text = """#include "elementwise.cuh"
ELEMENTWISE T forward(T x, T errno_, T bit, T infinite) { return x > 0 ? (x < infinite ? errno_ * x : x) : bit * x; }
ELEMENTWISE bool keeps(T x, T, T, T) { return x > 0; }
ELEMENTWISE T backward_from_bit(T dy, bool positive, T errno_, T bit, T) { return positive ? errno_ * dy : bit * dy; }
"""
    jitact.define("swoosh", source=text, errno=2.0, bit=0.5, infinite=math.inf)
    compare(swoosh, "cpu", torch.randn(1001))
    compare(swoosh, "cpu", torch.randn(1001), 3.0, -1.0)
    jitact.define("swoosh", "NULL > 0 ? x * sin(x) : M_PI * x", NULL=1.0, M_PI=3)
    compare(swoosh, "cpu", torch.randn(1001))
    compare(swoosh, "cpu", torch.randn(1001), 0.0, 2)


@pytest.mark.parametrize("name", [*map(SLOW, jitact.names()), "softmax"])
def test_every_activation_compiles(name: str) -> None:
    command = ["g++", "-std=c++20", "-fsyntax-only", "-w", "-x", "c++", "-"]
    whole, one = (load(name, **options)["SOURCE"] for options in ({}, {"dtype": "fp32"}))
    gpu = re.sub(r"namespace jitact::ptx \{\n.*?\}\n\}\n", "", without_launches(whole), flags=re.DOTALL)
    for text in (whole, one, f'#define __CUDACC__\n#include "{HERE / "emulated_cuda.h"}"\n{gpu}'):
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("name", ["gelu", "gelu+bias", "xielu+bias", "hardtanh", "tanh", "prelu", "rrelu", "xielu"])
@pytest.mark.slow
def test_nvcc_takes_it(name: str, tmp_path: Path) -> None:
    space = load(name)
    (tmp_path / "kernel.cu").write_text(space["SOURCE"])
    archs = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in (80, 90, 100)]
    command = [
        "nvcc",
        "-O3",
        "-std=c++20",
        "--expt-relaxed-constexpr",
        "-Werror=all-warnings",
        *archs,
        "-c",
        "kernel.cu",
        "-o",
        "kernel.o",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "softsign.py"
    assert onefile.main(["export", "softsign", "-o", str(out)]) == 0
    assert out.read_text() == jitact.export("soft_sign")
    assert onefile.main(["export", "softmax", "--shape", "8x4", "--dtype", "bf16", "--forward-only", "-o", str(out)]) == 0
    assert out.read_text() == jitact.export("softmax", shape=(8, 4), dtype="bf16", forward_only=True)
    assert onefile.main(["export", "ReLU"]) == 0 and "class ModelNew" in capsys.readouterr().out
    for dtypes in (["fp16", "bf16"], ["fp16,bf16"]):
        command = ["export", "softsign", "--shape", "8x4", "--dtype", *dtypes, "--device", "cuda", "-o", str(out)]
        assert onefile.main(command) == 0
        assert out.read_text() == jitact.export("softsign", shape=(8, 4), dtype=["fp16", "bf16"], device="cuda")
    with pytest.raises(SystemExit, match="2"):
        onefile.main(["export", "softsign", "--dtype", "fp16,fp8"])
    assert "no dtype 'fp8'; choose from fp" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        onefile.main(["export", "softsign", "--shape", "8"])
    assert "no shape '8'; write it like 8192x8192" in capsys.readouterr().err
    assert onefile.main(["export", "sofsign"]) == 2 and "did you mean 'softsign'" in capsys.readouterr().err
    (tmp_path / "own.cu").write_text("ELEMENTWISE T forward(T x) { return x * x; }\n")
    command = ["export", "own", "--from", str(tmp_path), "--device", "cpu"]
    assert onefile.main(command) == 0 and "x * x" in capsys.readouterr().out


def test_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jitact.registry", "export", "softsign", "-o", "softsign.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "softsign.py").read_text() == jitact.export("softsign")


def test_a_module_that_is_run_makes_nothing_twice() -> None:
    """``-m`` runs the file again as ``__main__``, whose classes would differ from those that pickles find."""
    program = """
import contextlib, pickle, runpy, sys
import jitact
before = jitact.get("relu"), jitact.get("swiglu").activation.token
with contextlib.suppress(SystemExit):
    sys.argv = ["registry", "export", "relu", "-o", "/dev/null", "--device", "cpu", "--dtype", "fp32"]
    runpy.run_module("jitact.registry", run_name="__main__")
from jitact.records import by_token
assert not [token for token in by_token if "." in token], list(by_token)
assert pickle.loads(pickle.dumps(before[0])) is before[0] is jitact.get("relu")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_what_files_know_is_asked_in_the_headers() -> None:
    known = build.Build(jitact.get("relu").activation.source, "bit", ("fp32",), ("cuda",)).facts
    text = re.sub(r"\s", "", "".join(path.read_text() for path in DEVICE.iterdir()))
    assert not [each for each in known if re.sub(r"\s", "", each) not in text]


def test_what_is_known_of_conditions() -> None:
    facts = {"op": frozenset(["Op::forward", "Op::backward"]), "kSums": frozenset([0])}
    for condition, values in (
        ("op == Op::forward_bit || kSums > 0", {False}),
        ("op == Op::backward", {True, False}),
        ("kSums == 0 && n > 3", None),
        ("kSums > 0 && n > 3", {False}),
        ("!F::as_it_is", None),  # a member, not an enumerator
        ("F::parts == F::start", None),
    ):
        assert evaluate(condition, facts) == values, condition


@GPU
@pytest.mark.parametrize("name", ["softsign", "sigmoid", "leaky_relu", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    for n in (1, 1023, 2**20 + 3):
        compare(name, "cuda", (4 * torch.randn(n)).to(dtype))
    shifted = (4 * torch.randn(2**20)).to(dtype).cuda()[1:]
    space = load(name)
    torch.testing.assert_close(space["ModelNew"]()(shifted), jitact.get(name)()(shifted))


@GPU
@pytest.mark.parametrize("name", [*map(SLOW, ROWS), "beside_sink"])
def test_rows_on_a_gpu(name: str) -> None:
    jitact.define("beside_sink", source=BESIDE_SINK, reference=beside_sink, a=2.0)
    space: dict = {"__name__": "exported"}
    exec(jitact.export(name), space)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for shape, dim in (((40, 1000), 1), ((999, 1001), 1), ((7, 50_257), -1), ((5, 64, 40), 1), ((3, 65, 33), 1)):
            x = (3 * torch.randn(shape)).to("cuda", dtype)
            if name == "beside_sink":
                beside_sinks(space, x, torch.randn(x.select(dim, 0).shape, device="cuda"), dim, True)
            else:
                along(space, x, dim, True)


@GPU
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_slopes_on_a_gpu(dtype: torch.dtype) -> None:
    for channels, shape in ((1, (2**20 + 3,)), (1000, (999, 1000)), (3, (2, 3, 101, 103)), (64, (32, 64, 28, 28)), (7, (0, 7))):
        compare("prelu", "cuda", torch.randn(shape).to(dtype), channels, 0.3, None, dtype)
    compare("xielu", "cuda", (3 * torch.randn(2**20 + 3)).to(dtype), 0.7, 0.9, 0.25, -1e-6, dtype)
    compare("rrelu", "cuda", torch.randn(2**20 + 3).to(dtype))
