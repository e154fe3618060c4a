"""Activations of rows that users define by kernel files, and the tools for rows: check, plot, accuracy, tables."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from common import SLOW
from torch import Tensor

import jitact
from jitact import accuracy
from jitact.kernels.__main__ import _registered
from jitact.measuring import commands, row_accuracy
from jitact.measuring.limits import DEFINED_ROWS
from jitact.measuring.markdown import activations_markdown
from jitact.rows import records
from jitact.rows.definition import RowDefinition
from jitact.rows.modules import forget

SINK = """
#include "rows.cuh"

// exp(x_i) / (exp(s) + sum_j exp(x_j)): the sink s takes a share, and has no result
#define SINK 0.5

ELEMENTWISE T forward(T kept, LogSumExp<T> row) {
  const T sink = SINK;
  return exp(row.log_share(kept)) * sigmoid(-row.log_share(sink));
}

ELEMENTWISE T fold_from_output(T dy, T y) { return dy * y; }

ELEMENTWISE T backward_from_output(T dy, T y, Sum<T> row) { return y * (dy - row.total); }
"""
PLAIN = """
#include "rows.cuh"
ELEMENTWISE T forward(T kept, SumOfExp<T> row) { return row.share(kept); }
ELEMENTWISE T fold_from_output(T dy, T y) { return dy * y; }
ELEMENTWISE T backward_from_output(T dy, T y, Sum<T> row) { return y * (dy - row.total); }
"""


def with_sink(x: Tensor, dim: int) -> Tensor:
    beside = torch.full_like(x.select(dim, 0), 0.5).unsqueeze(dim)
    return torch.softmax(torch.cat([x, beside], dim), dim).narrow(dim, 0, x.shape[dim])




@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_sink(dtype: torch.dtype, device: str) -> None:
    cls = jitact.define("sink_softmax", source=SINK, formula="exp(x_i) / (exp(s) + sum_j exp(x_j))")
    assert jitact.get("SinkSoftmax") is jitact.get(jitact.sink_softmax) is cls and "sink_softmax" not in jitact.names()
    near = {"rtol": 3e-5, "atol": 1e-6} if dtype is torch.float32 else {}
    for t, dim in (
        (torch.randn(5, 1, device=device), 1),
        (torch.randn(3, 700, device=device), -1),
        (torch.randn(3, 40, 9, device=device), 1),
        (torch.randn(3, 64, device=device).t(), 0),
        (torch.randn(3, 64, device=device)[:, ::2], 1),
    ):
        x = (3 * t).to(dtype).requires_grad_()
        dy, expected = torch.randn_like(x), with_sink(x.double(), dim)
        (dx,) = torch.autograd.grad(expected, x, dy.double())
        for save in ("output", "input"):
            y = jitact.sink_softmax(x, dim, save=save)
            torch.testing.assert_close(y, expected.to(dtype), **near)
            sizes = cls.activation.exact_gradient(dy, expected.detach(), dim)[1]
            assert ((torch.autograd.grad(y, x, dy)[0] - dx).abs() <= DEFINED_ROWS[dtype] * torch.finfo(dtype).eps * sizes).all()
            torch.testing.assert_close(cls(dim, save=save)(x), y)
    x = torch.randn(4, 6, device=device, dtype=dtype)
    keep = torch.rand(4, 6, device=device) > 0.3
    keep[:, 0] = True  # a row without elements is NaN
    expected = with_sink((0.5 * x.double()).masked_fill(~keep, -torch.inf), 1).to(dtype)
    torch.testing.assert_close(jitact.sink_softmax(x, 1, scale=0.5, mask=keep), expected, **near)
    assert jitact.sink_softmax(x.int(), 1, dtype).dtype is dtype and jitact.sink_softmax(x[:, :0]).shape == (4, 0)


def test_kernels_compute_what_they_can(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jitact.define("sink_softmax", source=SINK)
    x, asked = torch.randn(8, 1024, device=device).requires_grad_(), []
    forward, backward = RowDefinition.forward_by_kernel, RowDefinition.backward_by_kernel
    monkeypatch.setattr(RowDefinition, "forward_by_kernel", lambda *of: asked.append("forward") or forward(*of))
    monkeypatch.setattr(RowDefinition, "backward_by_kernel", lambda *of: asked.append("backward") or backward(*of))
    torch.autograd.grad(jitact.sink_softmax(x), x, torch.ones_like(x))
    assert asked == ["forward", "backward"]
    jitact.sink_softmax(x.double())
    torch.func.vmap(jitact.sink_softmax)(x)
    assert len(asked) == 2


def test_a_definition_under_transforms(device: str) -> None:
    jitact.define("sink_softmax", source=SINK)
    x, v = torch.randn(2, 3, 4, device=device, dtype=torch.float64)

    def ours(x: Tensor) -> Tensor:
        return jitact.sink_softmax(x, 1)

    assert torch.autograd.gradcheck(ours, x.clone().requires_grad_())
    assert torch.autograd.gradgradcheck(ours, x.clone().requires_grad_())
    torch.testing.assert_close(torch.func.vmap(lambda row: jitact.sink_softmax(row, 0))(x), with_sink(x, 1))
    for found, expected in zip(
        torch.func.jvp(ours, (x,), (v,)), torch.func.jvp(lambda x: with_sink(x, 1), (x,), (v,)), strict=True
    ):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.compile(ours, backend="eager", fullgraph=True)(x), with_sink(x, 1))
    tied = torch.full((1, 3), 0.5, device=device, dtype=torch.float64).requires_grad_()  # equal to the sink as well
    assert torch.autograd.gradcheck(ours, tied)


def test_modules_of_definitions() -> None:
    cls = jitact.define("sink_softmax", source=SINK, saves="input")
    module, x = cls(0), torch.randn(3, 4, dtype=torch.float64)  # float64, which PyTorch computes without a build
    assert repr(module) == "SinkSoftmax(dim=0)" and repr(cls(save="output")) == "SinkSoftmax(dim=-1, save='output')"
    for each in (cls, cls.Model, jitact.sink_softmax):
        assert pickle.loads(pickle.dumps(each)) is each
    pickled = pickle.dumps(module)
    for other in (pickle.loads(pickled), copy.deepcopy(module)):
        assert type(other) is cls and torch.equal(other(x), module(x))
    model_new, model = cls(*cls.get_init_inputs()), cls.Model(*cls.get_init_inputs())
    (given,) = cls.get_inputs(30, 200)
    torch.testing.assert_close(model_new(given), model(given), rtol=1e-4, atol=1e-4)
    jitact.define("sink_softmax", source=SINK.replace("SINK 0.5", "SINK 0.75"))
    assert type(copy.deepcopy(module)) is cls and not torch.equal(jitact.sink_softmax(x, 0), module(x))
    assert type(pickle.loads(pickled)) is cls  # while it is referenced
    del cls, module, model_new, model, each, other
    gc.collect()
    with pytest.raises(LookupError, match="'sink_softmax' is another here than where this was saved"):
        pickle.loads(pickled)
    forget("sink_softmax")
    with pytest.raises(LookupError, match="'sink_softmax' is not defined in this process"):
        pickle.loads(pickled)


def test_a_name_is_defined_again_as_something_else() -> None:
    jitact.define("my_share", source=SINK)
    jitact.define("my_share", "2 * x")
    assert jitact.my_share(torch.ones(1)).item() == 2 and "my_share" in jitact.names()
    jitact.define("my_share", source=SINK)
    assert "my_share" not in jitact.names() and jitact.get("my_share").activation.factor == 1
    with pytest.raises(ValueError, match="'myshare' is another spelling of 'my_share'"):
        jitact.define("myshare", source=SINK)
    with pytest.raises(ValueError, match="an activation cannot be called 'softmax'"):
        jitact.define("softmax", source=SINK)


def test_folders_hold_rows(tmp_path: Path) -> None:
    jitact.define("sink_softmax", source=SINK, saves="input", formula="a share beside a sink")
    (path,) = jitact.save_folder(tmp_path, "sink_softmax")
    of_rows = [path for path in jitact.save_folder(tmp_path / "all") if path.stem not in jitact.names()]
    assert of_rows == [tmp_path / "all" / "sink_softmax.cu"]
    forget("sink_softmax")
    ((name, cls),) = jitact.load_folder(tmp_path).items()
    assert name == "sink_softmax" and jitact.get(name) is cls and cls.activation.saves == ("input", "output")
    assert cls.activation.formula == "a share beside a sink" and path.read_text().count("//") == 4
    with pytest.raises(ValueError, match=r"softmin is one of jitact's own activations; its kernel file is kernels/softmax\.cu"):
        jitact.save_folder(tmp_path, "softmin")


@pytest.mark.parametrize(
    ("text", "options", "error", "message"),
    [
        (
            PLAIN.replace("dy * y;", "torch(dy);"),
            {},
            ValueError,
            "my_rows: a file of rows is arithmetic, .* torch is no function",
        ),
        (
            PLAIN.replace("fold_from_output", "folded"),
            {},
            ValueError,
            "my_rows: line 3: a file of rows defines forward, fold_from",
        ),
        (PLAIN, {"alpha": 1.0}, ValueError, "my_rows: forward's parameters are none, those with a default alpha; leave"),
        (PLAIN, {"saves": "bit"}, ValueError, "my_rows: backward cannot keep 'bit' of rows, only output, input"),
        (PLAIN, {"reference": lambda x: x}, TypeError, r"my_rows: the reference must take \(x, dim\)"),
        (PLAIN.replace("rows.cuh", "elementwise.cuh"), {}, ValueError, r'my_rows: line 3: .* does not include "rows\.cuh"'),
        (PLAIN.replace("row.total", "row.of[1]"), {}, ValueError, r"my_rows: line 5: there is no \.of\[1\]: fold_from_"),
    ],
)
def test_files_that_will_not_do(text: str, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        jitact.define("my_rows", source=text, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("mark", "end"), [("\ufeff", "\n"), ("", "\r\n"), ("", "\r")])
def test_files_as_editors_write_them(mark: str, end: str) -> None:
    cls = jitact.define("my_rows", source=mark + PLAIN.lstrip().replace("\n", end))
    assert cls.activation.source.text == PLAIN.lstrip()


def test_calls_that_will_not_do() -> None:
    cls = jitact.define("my_rows", source=PLAIN)
    with pytest.raises(TypeError, match="my_rows: the module takes x; got 2 tensors"):
        cls()(torch.ones(3), torch.ones(3))
    with pytest.raises(TypeError, match=r"my_rows: without dtype=, x is float32, .*; got an int64 tensor"):
        jitact.my_rows(torch.ones(3, dtype=torch.int64))
    with pytest.raises(TypeError, match="my_rows: expected a tensor, got"):
        jitact.my_rows([1.0])
    with pytest.raises(IndexError, match="Dimension out of range"):
        jitact.my_rows(torch.ones(3), 1)
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"my_rows: expected a dense tensor, got a jagged .*; only softmax, log_softmax and"):
        jitact.my_rows(nested, -1)


# The tools.


@pytest.fixture
def read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Definitions are not compiled: PyTorch computes them from their files."""
    monkeypatch.setattr(RowDefinition, "takes_forward", lambda *_: False)
    monkeypatch.setattr(RowDefinition, "takes_backward", lambda *_: False)


@pytest.mark.parametrize("name", ["softmax", SLOW("LogSoftmax"), SLOW(F.softmin)])
def test_check_of_rows(name: object, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = jitact.check(name, dtypes=[torch.float32, torch.bfloat16], device=device)
    assert result and [(line.dtype, line.save) for line in result.lines][1:3] == [
        (torch.float32, "input"),
        (torch.bfloat16, "output"),
    ]
    assert 0.4 < result.lines[2].forward.ulp < 2 and 0.4 < result.lines[2].gradient.ulp < 2
    printed = capsys.readouterr().out
    assert "against PyTorch in float64, rows of 1, 2, 7, 33, 1000, 4096" in printed and "FAIL" not in printed


@pytest.mark.parametrize(
    ("change", "reference", "says"),
    [
        (("return row.share(kept)", "return 1.0001 * row.share(kept)"), torch.softmax, r"forward at x = .* row of \d+, is"),
        SLOW(("dy - row.total", "dy - 1.01 * row.total"), None, "gradient at x = "),
        SLOW(("return dy * y;", "return dy;"), torch.softmax, "gradient at x = "),
    ],
)
@pytest.mark.usefixtures("read_alone")
def test_check_finds_what_is_wrong(change: tuple[str, str], reference, says: str) -> None:
    assert change[0] in PLAIN
    jitact.define("my_rows", source=PLAIN.replace(*change), reference=reference)
    result = jitact.check("my_rows", dtypes=[torch.float32], device="cpu")
    assert not result and re.search(says, result.table)
    assert ("the reference" if reference else "its own formula in PyTorch") in result.table
    jitact.define("my_rows", source=PLAIN, reference=reference)
    assert jitact.check("my_rows", dtypes=[torch.float32], device="cpu")


def test_check_where_the_slope_is_steep_in_the_output() -> None:
    """A gradient from the input is computed with an output that is rounded, and then divided by a small operand."""
    text = """#include "rows.cuh"
ELEMENTWISE T forward(T kept, LogSumExp<T> row, Row<T> w) { return w * row.log_share(kept) + 3; }
ELEMENTWISE Many<T, 2> fold_from_output(T dy, T y, Row<T> w) { return {dy, dy * (y - 3)}; }
ELEMENTWISE T backward_from_output(T dy, T y, Sum<T, 2> row, Row<T> w) { return w * (dy - exp((y - 3) / w) * row.total); }
ELEMENTWISE T backward_of_row(Sum<T, 2> row, Row<T> w) { return row.of[1] / w; }
"""
    jitact.define("my_rows", source=text)
    assert jitact.check("my_rows", dtypes=[torch.float32], device="cpu")
    jitact.define("my_rows", source=text.replace("row.of[1] / w", "1.001 * row.of[1] / w"))
    assert not jitact.check("my_rows", dtypes=[torch.float32], device="cpu")


def test_check_within_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    result = jitact.check("softmax", low=-1, high=0.5, dtypes=[torch.float32], device="cpu")
    assert result and ", -1 <= x <= 0.5, on cpu" in result.method and -1 <= result.lines[0].forward.x <= 0.5
    assert commands.main(["check", "Softmax", "--dtype", "fp32", "--device", "cpu", "--low", "-1"]) == 0
    assert "softmax: exp(x_i)" in capsys.readouterr().out


def test_commands_know_rows() -> None:
    assert _registered(["softmin", "Softmax", "relu"]) == ["softmax", "relu"]
    assert {"relu", "softmax", "log_softmax"} <= set(_registered([])) and "softmin" not in _registered([])
    with pytest.raises(KeyError, match="'softmax' works on rows, not on elements"):
        _registered(["softmax"], of_rows=False)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_accuracy_of_rows(dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(row_accuracy, "LENGTHS", (3, 64, 1001))
    monkeypatch.setattr(row_accuracy, "ELEMENTS", 2**14)
    file = tmp_path / "accuracy.json"
    assert accuracy.main(["softmax", "Softmin", "--dtype", dtype, "--device", "cpu", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["name"], row["save"]) for row in rows] == [(n, s) for n in ("softmax", "softmin") for s in ("output", "input")]
    for row in rows:
        assert 0.3 < row["ours"]["forward"]["ulp"] <= (4 if dtype == "fp32" else 0.55) and row["torch"]["forward"]["ulp"] > 0.3
        assert 0.3 < row["ours"]["gradient"]["ulp"] <= (4 if dtype == "fp32" else 0.5)
    assert "every bound holds" in capsys.readouterr().out
    markdown = file.with_suffix(".md").read_text()
    assert "| softmin | input |" in markdown and "Of rows (softmax, log_softmax, softmin)" in markdown


def test_accuracy_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_accuracy, "LENGTHS", (64,))
    forward = records.RowActivation.forward_by_kernel
    monkeypatch.setattr(records.RowActivation, "forward_by_kernel", lambda *of: forward(*of) * 1.00001)
    found = list(row_accuracy.rows_of(records.TABLE["softmax"], torch.float32, torch.device("cpu")))
    assert all(re.match(r"forward off by [\d.]+ ulp at x = .* elements are above 4", row["broken"][0]) for row in found)


def test_the_table_of_rows() -> None:
    error = {"ulp": 0.5}
    measured = {"forward": error, "gradient": {"ulp": 0.25}}
    row = {"name": "softmax", "dtype": "bf16", "save": "output", "ours": measured, "torch": None}
    machine = {"device": "GPU", "driver": "1", "torch": "2", "python": "3", "jitact": "0", "date": "2026-01-01", "kind": "cuda"}
    timed = {
        "shape": [8192, 1024], "dtype": "bf16", "name": "softmax, dim=0", "floor": {"forward": 1.8, "backward": 2.7},
        "ms": {"forward": {"ours": 2.0, "eager": 4.0, "liger": 3.0}, "backward": {"ours": 3.0, "eager": 3.0}},
        "kept": {"ours": 2, "eager": 2},
    }  # fmt: skip
    results = {"machine": machine, "operands": [timed, {**timed, "name": "gelu+bias"}, {**timed, "wrong": "forward is wrong"}]}
    text = activations_markdown({"machine": machine, "rows": [row]}, None, results).partition("## Rows")[2]
    assert "| softmax (Softmax) | `exp(x_i) / sum_j exp(x_j)` | output, input | 0.50 / 0.25 |" in text
    assert "how many times as fast as eager, Liger-Kernel:" in text and "gelu" not in text
    cells = "| softmax, dim=0 | bf16 | 8192 x 1024 | 90% | 2.00x / 1.50x | 90% | 1.00x / - | 2 |"
    assert text.count(cells) == 1
    assert "Speed" not in activations_markdown(None, None).partition("## Rows")[2]


def test_pictures_of_rows() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    figure = jitact.plot("softmax", torch.nn.LogSoftmax(1), low=-2, high=2, error=True, device="cpu")
    drawn = {line.get_label(): torch.as_tensor(line.get_ydata()) for line in figure.axes[0].lines}
    x = torch.linspace(-2, 2, 801, dtype=torch.float64)
    others = torch.tensor([-1.0, 0, 1]).double().exp().sum()
    torch.testing.assert_close(drawn["softmax beside -1, 0, 1"], x.exp() / (x.exp() + others))
    torch.testing.assert_close(drawn["log_softmax beside -1, 0, 1"], x - (x.exp() + others).log())
    slope = torch.as_tensor(figure.axes[1].lines[0].get_ydata())
    torch.testing.assert_close(slope, x.exp() * others / (x.exp() + others) ** 2)
    errors = [torch.as_tensor(line.get_ydata()).nan_to_num().max() for line in figure.axes[2].lines[1:4:2]]
    assert all(0.3 < error <= 0.55 for error in errors)
