"""bench.py, accuracy.py, and the reports of their results."""

import dataclasses
import io
import json
import math
import os
import shutil
import subprocess
import sys
import weakref
from contextlib import contextmanager, nullcontext
from pathlib import Path

import compare_sass
import pytest
import torch
from common import SLOW

import jitact
from jitact import accuracy, bench, registry, report
from jitact.accuracy import every_16bit_value, ulp_error
from jitact.measuring import (
    activation_rows,
    commandline,
    first_calls,
    host_calls,
    instructions,
    models,
    operand_cases,
    operand_rows,
    timing,
)
from jitact.measuring.commandline import Parser, machine, with_kept, write_json
from jitact.rows.modules import names as row_names

INF, NAN = math.inf, math.nan
CHECKOUT = Path(__file__).resolve().parents[1]
ALONE = [("exported",), ("cold",), ("html", "page.html")]  # options that would change nothing for gated activations alone
TINY = 2.0**-24  # fp16's smallest subnormal number


def row_of(name="relu", dtype="fp32", ours=1.0, eager=2.0):
    times = lambda ms: ms and dict.fromkeys(report.DIRECTIONS, ms)  # noqa: E731
    row = {
        "name": name,
        "dtype": dtype,
        "save": "bit",
        "wrong": [],
        "notes": [],
        "errors": None,
        "kept": {"ours": 0.125, "eager": 4},
    }
    floor = {"floor": times(0.9), "bytes": times(4e6), "ours": times(ours), "eager": times(eager), "compile": None}
    return row | (floor if ours else {"ours": None, "eager": None, "compile": None})


def results_of(*rows):
    machine = {"device": "GPU", "driver": "1", "torch": "2", "python": "3", "jitact": "0", "date": "2026-01-01", "kind": "cuda"}
    return {
        "machine": machine,
        "dtypes": {row["dtype"]: {"shape": [4, 8], "bytes_per_second": {}} for row in rows},
        "rows": list(rows),
        "first_use": {},
        "import_ms": None,
        "geometric_means": report.geometric_means(rows),
    }


class TestUlp:
    @pytest.mark.parametrize(
        ("dtype", "actual", "exact", "error"),
        [
            (torch.float16, 1 + 2**-10, 1, 1),
            (torch.float16, 1, 1 + 2**-11, 0.5),  # a tie, rounded to even
            (torch.float16, 1 - 2**-11, 1, 0.5),  # the spacing is that at the exact result
            (torch.bfloat16, 1 + 2**-7, 1, 1),
            (torch.float32, 1 + 2**-23, 1, 1),
            (torch.float64, 1 + 2**-52, 1, 1),
            (torch.float16, 0, TINY, 1),  # subnormal fp16 results are judged
            (torch.float16, 2 * TINY, 1.5 * TINY, 0.5),
            (torch.float16, 0, 2.0**-15, 512),
            (torch.bfloat16, 0, 2.0**-127, 0),  # those of other types may be flushed
            (torch.float32, 0, 2.0**-127, 0),
            (torch.bfloat16, 0, 2.0**-126, 128),
            (torch.float16, INF, 65520, 0),  # the first value that rounds to infinity
            (torch.float16, INF, 65519, 17 / 32),
            (torch.float16, 65504, 65521, 17 / 32),
            (torch.float16, INF, 1, INF),
            (torch.float16, 65504, INF, INF),
            (torch.float16, -INF, INF, INF),
            (torch.float16, INF, INF, 0),
            (torch.float32, NAN, NAN, 0),
            (torch.float32, NAN, 1, INF),
            (torch.float32, 1, NAN, INF),
            (torch.float32, -0.0, 0, 0),
        ],
    )
    def test_known_cases(self, dtype, actual, exact, error):
        found = ulp_error(torch.tensor([actual], dtype=dtype), torch.tensor([exact], dtype=torch.float64), dtype)
        assert found.dtype is torch.float64
        assert found.item() == error

    def test_floor(self):
        exact = torch.tensor([2.0**-20, 1.0], dtype=torch.float64)
        assert ulp_error(torch.tensor([0.0, 0.0]), exact, torch.bfloat16, 2**-8).tolist() == [2.0**-5, 128]
        assert ulp_error(torch.zeros(1), exact[:1], torch.bfloat16, 1.9 * 2**-8).item() == 2.0**-5  # the ulp of floor's binade

    @pytest.mark.parametrize(("dtype", "count"), [(torch.float16, 63488), (torch.bfloat16, 65280)])
    def test_every_value_is_there_once_and_rounding_is_within_half_an_ulp(self, dtype, count):
        values = every_16bit_value(dtype)
        assert values.shape == (count,) and values.isfinite().all() and (values[1:] >= values[:-1]).all()
        assert values.view(torch.int16).unique().numel() == count
        exact = values.double() * 1.01
        assert ulp_error(exact.to(dtype), exact, dtype).max() <= 0.5
        assert ulp_error(values, exact, dtype).max() > 0.5


class TestAccuracy:
    def test_writes_every_row(self, tmp_path, capsys):
        file = tmp_path / "accuracy.json"
        assert accuracy.main(["Softsign", "--dtype", "fp16,bf16", "--device", "cpu", "--json", str(file)]) == 0
        results = json.loads(file.read_text())
        saves = registry.get("softsign").activation.saves
        assert [(row["dtype"], row["save"]) for row in results["rows"]] == [(d, s) for d in ("fp16", "bf16") for s in saves]
        assert results["rows"][0]["ours"]["forward"]["count"] == 63488
        assert results["rows"][0]["ours"]["forward"]["ulp"] <= 0.55 < results["rows"][0]["torch"]["forward"]["ulp"]
        assert "| softsign | input |" in file.with_suffix(".md").read_text(encoding="utf-8")
        assert "every bound holds" in capsys.readouterr().out

    def test_finds_what_is_wrong_and_where(self):
        cls = registry.get("softsign")

        class Wrong(torch.nn.Module):
            def forward(self, x):
                return torch.nn.functional.softsign(x.double()).to(x.dtype) + torch.where(x == 3, 0.25, 0).to(x.dtype)

        values = every_16bit_value(torch.bfloat16)
        errors = accuracy.measure(cls, {"it": Wrong()}, torch.bfloat16, iter(values.split(1000)))["it"]
        assert (errors["forward"].at, errors["forward"].ulp, errors["forward"].broken) == (3.0, 64.0, 1)
        assert errors["forward"].count == values.numel()
        (rule,) = accuracy.broken_rules(cls, "input", torch.bfloat16, errors)
        assert rule.startswith("forward off by 64.00 ulp at x = 3.0")

    def test_names_a_kernel_that_does_not_compile(self, tmp_path, capsys, kernel):
        with kernel("this is no C++"):
            file = str(tmp_path / "accuracy.json")
            assert accuracy.main(["my_relu", "--dtype", "fp16", "--device", "cpu", "--json", file]) == 1
        printed = capsys.readouterr().out
        assert "bounds broken by: my_relu" in printed and len(printed.splitlines()) < 10


@pytest.fixture
def kernel():
    """A context in which an activation ``my_relu``, which claims to be relu, is registered with the given formulas."""

    @contextmanager
    def defined(forward="x < 0 ? 0 : x", backward="x > 0 ? dy : 0"):
        text = (
            f"ELEMENTWISE T forward(T x) {{ return {forward}; }}\nELEMENTWISE T backward(T dy, T x) {{ return {backward}; }}\n"
        )
        relu = registry.get("relu").activation
        record = dataclasses.replace(relu, name="my_relu", title="MyReLU", declared_saves=("input",), aliases=())
        text = f'#include "elementwise.cuh"\n{text}'
        record.source = relu.source._replace(name="my_relu", text=text, path="my_relu.cu")
        registry.register(record)
        yield

    return defined


@pytest.fixture
def quick(monkeypatch):
    """Few runs, and no builds in new processes."""
    use = {"build_s": None, "load_ms": 1.0}
    monkeypatch.setattr(bench, "first_use", lambda names, *_: {"import_ms": 1.0, "first_use": dict.fromkeys(names, use)})
    monkeypatch.setattr(timing, "RUNS", dict.fromkeys(("cpu", "cuda"), (3, 3, 0.0)))


class TestBench:
    def test_measures_what_it_is_asked_to(self, tmp_path, capsys, quick):
        file = tmp_path / "bench.json"
        arguments = [
            "ReLU",
            "softsign",
            "relu",
            "--dtype",
            "bf16,float32",
            "--shape",
            "3x1001",
            "--device",
            "cpu",
            "--exported",
            "--json",
            str(file),
        ]
        assert bench.main(arguments) == 0
        results = json.loads(file.read_text())
        rows = {(row["name"], row["dtype"]): row for row in results["rows"]}
        assert list(rows) == [("relu", "bf16"), ("softsign", "bf16"), ("relu", "fp32"), ("softsign", "fp32")]
        assert {"device", "torch", "python", "cuda", "jitact", "date"} <= set(results["machine"])
        assert results["dtypes"]["bf16"]["shape"] == [3, 1001]
        for row in rows.values():
            assert row["wrong"] == [] and row["compile"] is None
            assert all(
                row[of][direction] > 0
                for of in ("ours", "eager", "exported", "floor", "bytes")
                for direction in report.DIRECTIONS
            )
        relu, softsign = rows["relu", "fp32"], rows["softsign", "fp32"]
        assert softsign["kept"] == {"ours": 4, "eager": 12, "exported": 4}
        assert relu["kept"] == {"ours": 376 / 3003, "eager": 4, "exported": 376 / 3003}
        assert softsign["bytes"] == {"forward": 8 * 3003, "forward_save": 8 * 3003, "backward": 12 * 3003}
        assert relu["bytes"] == {"forward": 8 * 3003, "forward_save": 8.125 * 3003, "backward": 8.125 * 3003}
        best = results["dtypes"]["fp32"]["bytes_per_second"]
        assert softsign["floor"]["backward"] == pytest.approx(1000 * 12 * 3003 / best["add"]["best"])
        assert best["copy"]["best"] == max(value for name, value in best["copy"].items() if name != "best")
        printed = capsys.readouterr().out
        assert printed.count("relu ") >= 2 and "geometric mean" in printed and "all compared with float64, and right" in printed

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"backward": "x > 0 ? dy : 0.25 * dy"}, "gradient off by"),
            SLOW({"forward": "x < 0.125 ? 0 * x : x"}, "forward off by"),
            ({"forward": "x > 0 ? x : T(0)"}, "forward of NaN is not NaN"),
        ],
    )
    def test_what_is_wrong_gets_no_time(self, tmp_path, capsys, quick, kernel, change, says):
        file = tmp_path / "bench.json"
        with kernel(**change):
            arguments = [
                "my_relu",
                "softsign",
                "--dtype",
                "fp32",
                "--shape",
                "64x64",
                "--device",
                "cpu",
                "--json",
                str(file),
            ]
            assert bench.main(arguments) == 1
        wrong, right = json.loads(file.read_text())["rows"]
        assert wrong["ours"] is None and wrong["eager"] is None and says in wrong["wrong"][0]
        assert right["ours"]
        printed = capsys.readouterr().out
        assert f"WRONG: {says}" in printed and "WRONG, not timed: my_relu fp32" in printed

    @pytest.mark.parametrize("text", ['{"mine": [1, 2]}', "notes", "[]"])
    def test_a_file_of_something_else_is_not_overwritten(self, text, tmp_path, capsys):
        file = tmp_path / "other.json"
        file.write_text(text)
        with pytest.raises(SystemExit):
            bench.main(["relu", "--shape", "8x8", "--json", str(file)])
        assert file.read_text() == text and "holds something else than results" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "changed",
        [
            {"rows": [{"name": "relu"}]},
            {"rows": [{"name": "relu", "dtype": "fp32"}]},
            {"rows": [1]},
            {"rows": None},
            {"operands": [{"dtype": "fp32"}]},
            {"dtypes": []},
            {"machine": {}},
        ],
    )
    def test_a_file_whose_rows_cannot_be_kept_is_refused_before_anything_is_measured(self, changed, tmp_path, capsys):
        file = tmp_path / "other.json"
        text = json.dumps({"machine": {"device": "H200"}, "rows": []} | changed)
        file.write_text(text)
        with pytest.raises(SystemExit):
            bench.main(["relu", "--shape", "8x8", "--json", str(file)])
        printed = capsys.readouterr()
        assert file.read_text() == text and "holds something else than results" in printed.err and not printed.out

    @pytest.mark.parametrize(
        ("of", "by", "main", "arguments"),
        [
            ({"broken": []}, "jitact accuracy", bench.main, ["relu"]),
            ({"us": {}}, "jitact bench --calls", bench.main, ["relu"]),
            ({"wrong": []}, "jitact bench", bench.main, ["relu", "--calls"]),
            ({"wrong": []}, "jitact bench", bench.main, ["relu", "--models"]),
            ({"block": "mlp"}, "jitact bench --models", bench.main, ["relu", "--operands"]),
            ({"wrong": []}, "jitact bench", accuracy.main, ["relu"]),
        ],
    )
    def test_results_of_another_command_are_not_mixed_with_these(self, of, by, main, arguments, tmp_path, capsys):
        file = tmp_path / "results.json"
        text = json.dumps({"machine": {"device": "H200"}, "rows": [{"name": "relu", "dtype": "bf16"} | of]})
        file.write_text(text)
        with pytest.raises(SystemExit) as raised:
            main([*arguments, "--device", "cpu", "--json", str(file)])
        printed = capsys.readouterr()
        assert raised.value.code == 2 and file.read_text() == text and not printed.out
        assert f"results.json' holds results of `{by}`; write those of `" in printed.err

    @pytest.mark.parametrize(
        ("main", "mode", "row"),
        [
            (bench.main, [], {"rows": [{"wrong": []}]}),
            (bench.main, ["--operands"], {"operands": [{}]}),
            (bench.main, ["--calls"], {"rows": [{"us": {}}]}),
            (bench.main, ["--models"], {"rows": [{"block": "mlp"}]}),
            (accuracy.main, [], {"rows": [{"broken": []}]}),
        ],
    )
    def test_results_of_another_machine_are_refused_before_anything_is_measured(self, main, mode, row, tmp_path, capsys):
        ((kind, (of,)),) = row.items()
        text = json.dumps({"machine": {"device": "H200"}, kind: [{"name": "gelu", "dtype": "bf16"} | of]})
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(SystemExit) as raised:
            main(["gelu", *mode, "--device", "cpu", "--json", str(tmp_path / "results.json")])
        printed = capsys.readouterr()
        assert raised.value.code == 2 and (tmp_path / "results.json").read_text() == text and not printed.out
        assert "results.json' holds results of H200; write those of " in printed.err

    @pytest.mark.parametrize("mode", [[], ["--operands"], ["--calls"], ["--models"]])
    def test_stopped_before_the_first_row_it_leaves_files_as_they_are(self, mode, tmp_path, capsys, monkeypatch):
        def measured(*_):
            found = {"operands": []} if mode == ["--operands"] else {"rows": []}
            return found | {"machine": {"device": "here", "kind": "cpu"}, "dtypes": {}, "stopped": 130, "flagged": 0}

        monkeypatch.setattr(bench, "measure_all", measured)
        monkeypatch.setattr(operand_rows, "measure_operands", measured)
        monkeypatch.setattr(host_calls, "measure_calls", measured)
        monkeypatch.setattr(models, "measure_models", measured)
        mark = {"--calls": "us", "--models": "block"}.get("".join(mode), "wrong")
        rows = [{"name": "relu", "dtype": "bf16", mark: []}]
        files = {"results.json": json.dumps({"machine": machine(torch.device("cpu")), "rows": rows})}
        if not mode:
            files["page.html"] = "<p>an earlier page</p>"
        options = []
        for name, text in files.items():
            (tmp_path / name).write_text(text)
            options += [f"--{name.partition('.')[2]}", str(tmp_path / name)]
        assert bench.main(["relu", *mode, "--device", "cpu", *options]) == 130
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files

    def test_counting_what_is_kept_keeps_nothing(self):
        outputs = []

        class Watched(torch.nn.Sigmoid):
            def forward(self, x):
                y = super().forward(x)
                outputs.append(weakref.ref(y))
                return y

        subject = timing.Subject(Watched(), [torch.ones(8)], [torch.ones(8)])
        assert subject.kept() == 4 and outputs[0]() is None

    def test_results_out_of_place_are_wrong(self):
        class Shifted(torch.nn.Module):
            def forward(self, x):
                y = torch.nn.functional.softsign(x)
                return y if y.numel() <= 4096 else y.flatten().roll(1).view(y.shape)

        x, dy = torch.randn(2, 100, 100).unbind()
        (forward, gradient) = activation_rows.check_places(registry.get("softsign"), timing.Subject(Shifted(), [x], [dy]))
        assert forward == "forward is wrong at the size (100, 100)" and gradient.startswith("gradient")

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["relux"], "no activation named 'relux': did you mean 'relu'"),
            (["--dtype", "fp8"], "no dtype 'fp8'; choose from fp32, bf16, fp16, fp64"),
            (["--dtype", "int32"], "no dtype 'int32'"),
            (["--shape", "4096xmany"], "no shape '4096xmany'; write it like 4096x393216"),
            (["--shape", "0x4"], "no shape '0x4'"),
            *[([*of, "--shape", "1000000x1000000x1000"], "GB") for of in ([], ["--operands"], ["--calls"], ["swiglu"])],
            (["--device", "abacus"], "no device 'abacus'"),
            (["--device", "cuda:99"], "no device 'cuda:99': this machine has"),
            (["--json", "/no/such/place.json"], "there is no directory '/no/such'"),
            (["--json", "/"], "is a directory"),
            (["--operands", "softmin"], "--operands has gelu, "),
            (["--calls", "mish"], "--calls has relu, silu, "),
            (["--fast"], "unrecognized arguments: --fast"),
            (["gelu", "--calls", "--html", "page.html"], "--calls does not take --html"),
            (["gelu", "--models", "mlp", "--shape", "8x8"], "--models does not take --shape"),
            (["gelu", "--models", "--calls"], "--models does not take --calls"),
            (["gelu", "--operands", "--cold"], "--operands does not take --cold"),
            *[(["swiglu", f"--{each}", *more], f"--{each} is for elementwise activations, and none") for each, *more in ALONE],
        ],
    )
    def test_bad_arguments(self, capsys, arguments, says):
        with pytest.raises(SystemExit) as raised:
            bench.main(arguments)
        printed = capsys.readouterr()
        assert raised.value.code == 2 and printed.out == ""
        assert says in printed.err and printed.err.startswith("bench.py: ") and printed.err.count("\n") == 1

    def test_operands_and_rows(self, tmp_path, capsys, quick):
        file = tmp_path / "operands.json"
        arguments = ["softmax", "--dtype", "fp32", "--device", "cpu", "--shape", "1024x1032", "--json", str(file)]
        assert bench.main(["--operands", *arguments]) == 0
        rows, masked = json.loads(file.read_text())["operands"], ["softmax+mask", "softmax+bool mask"]
        assert [row["name"] for row in rows] == ["softmax", "softmax, dim=0", "softmax, dim=1", *masked]
        for row in rows:
            of_mask = 1 / 16 if row["name"] == "softmax+bool mask" else 0  # masked_fill saves it
            assert row["shape"] == [1024, 1032] and row["dtype"] == "fp32"
            assert row["kept"] == {"ours": 4 + of_mask, "eager": 4 + of_mask}  # to mask the gradient too
            assert all(row["ms"][d][of] > 0 for d in ("forward", "backward") for of in ("ours", "eager"))
            assert row["floor"]["forward"] > 0 and row["floor"]["backward"] > 0  # computed from measured bandwidths
        printed = capsys.readouterr().out
        assert "fp32 1024 x 1032" in printed and printed.count("4 / 4") == 4 and printed.count("4.06 / 4.06") == 1

    def test_calls_of_the_host(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(host_calls, "CALLS", 5)
        monkeypatch.setattr(host_calls.Others, "disturb", lambda *_: True)
        file = tmp_path / "calls.json"
        assert bench.main(["--calls", "relu", "swiglu", "prelu", "--device", "cpu", "--json", str(file)]) == 0
        rows = json.loads(file.read_text())["rows"]
        assert [row["name"] for row in rows] == ["relu", "prelu", "relu+bias", "swiglu", "swiglu, halves"]
        for row in rows:
            assert row["shape"] == [8, 64] and list(row["us"]) == ["forward", "forward_save", "backward"]
            assert all(times["ours"] > 0 and times["eager"] > 0 for times in row["us"].values())
        printed = capsys.readouterr().out
        assert "us of the host, fp32 8 x 64" in printed and "other work during 5 of 5 rows" in printed

    def test_calls_that_are_compared_compute_the_same(self):
        for case in host_calls.COMPARED:
            made = {"device": "cpu", "dtype": torch.float64}
            tensors = [case.inputs(list(torch.randn(2, 8, 64, **made)))[0], *case.extra((8, 64), made)]
            if not case.is_random:
                torch.testing.assert_close(case.ours(*tensors), case.theirs(*tensors))

    def test_gated_activations_have_a_table_of_their_own(self, tmp_path, capsys, quick, monkeypatch):
        file, used = tmp_path / "bench.json", []
        monkeypatch.setattr(bench, "first_use", lambda names, *_: used.extend(names) or {"first_use": {}})
        arguments = ["--dtype", "bf16", "--device", "cpu", "--shape", "16x64", "--json", str(file)]
        assert bench.main(["swiglu", "relu", "glu", *arguments]) == 0
        results = json.loads(file.read_text())
        assert [row["name"] for row in results["rows"]] == ["relu"]
        layouts = [f"{name}{layout}" for name in ("glu", "swiglu") for layout in ("", ", halves", ", interleaved")]
        assert [row["name"] for row in results["operands"]] == layouts
        for row in results["operands"]:
            assert row["shape"] == [16, 64] and row["kept"] == {"ours": 4, "eager": 6}
            assert all(row["ms"][d][of] > 0 for d in ("forward", "backward") for of in ("ours", "eager"))
            assert row["floor"]["forward"] > 0 and row["floor"]["backward"] > 0
        assert "all compared with float64, and right" in capsys.readouterr().out
        assert used == ["swiglu", "relu", "glu"]
        monkeypatch.setattr(operand_rows.Others, "disturb", lambda *_: True)
        file.unlink()
        assert bench.main(["swiglu", *arguments]) == 0
        assert "NOT TO BE TRUSTED: this machine did other work during 3 of 3 rows" in capsys.readouterr().out
        assert set(json.loads(file.read_text())) == {"machine", "stopped", "operands"}
        with pytest.raises(SystemExit):
            bench.main(["swiglu", "--device", "cpu", "--html", str(tmp_path / "page.html")])

    def test_all_gated_activations_are_measured(self):
        assert set(operand_cases.GATED) == {n for n in registry.names() if registry.REGISTRY[n].activation.gating}
        measured = [case.name for case in operand_cases.cases_of(list(operand_cases.GATED))]
        assert measured == [f"{name}{each}" for name in operand_cases.GATED for each in ("", ", halves", ", interleaved")]

    def test_formulas(self, tmp_path, quick):
        file, x = tmp_path / "formulas.json", 16 * 64
        mine = jitact.define("block", "2 * x")
        arguments = ["--dtype", "bf16", "--device", "cpu", "--shape", "16x64", "--json", str(file)]
        assert bench.main(["--operands", "block", "my_swiglu", "dyt", *arguments]) == 0
        assert jitact.get("block") is mine and not {"my_swiglu", "dyt"} & set(jitact.names())
        rows = {row["name"]: row for row in json.loads(file.read_text())["operands"]}
        assert list(rows) == ["my_swiglu", "dyt", "block"]
        kept = {name: row["kept"]["ours"] for name, row in rows.items()}  # dyt keeps x, w and alpha; block keeps its seed
        assert kept == {"my_swiglu": 4, "dyt": 2 + (64 + 1) * 2 / x, "block": 8 / x}
        for row in rows.values():
            assert not row["notes"] and row["kept"]["eager"] > row["kept"]["ours"]
            assert all(row["ms"][d][of] > 0 for d in ("forward", "backward") for of in ("ours", "eager"))
            assert all(row["floor"][direction] > 0 for direction in ("forward", "backward"))

    @pytest.mark.parametrize("kind", ["cuda", "cpu"])
    def test_formulas_that_a_gpu_measured_are_reported(self, kind):
        times = {direction: {"ours": 2.0, "eager": 3.0} for direction in ("forward", "backward")}
        row = {"name": "block", "shape": [16, 64], "dtype": "bf16", "ms": times, "floor": {"forward": 1.8, "backward": 1.9}}
        row["kept"] = {"ours": 0.01, "eager": 1}
        results = {"machine": results_of()["machine"] | {"kind": kind}, "operands": [row]}
        before, title, section = report.activations_markdown(None, None, results).partition("## Formulas\n")
        assert bool(title) == (kind == "cuda") and "block" not in before
        line = "| block | bf16 | 16 x 64 | 90% | 1.50x | 95% | 1.50x | 0.01 |"
        assert not title or (line in section and "`block` is `residual + dropout(x + bias, p)`" in section)

    @pytest.mark.parametrize("name", ["swiglu, halves", "swiglu, interleaved", "situ_glu, halves", "my_swiglu", "dyt"])
    def test_layouts_and_formulas_that_are_wrong_get_no_time(self, name):
        case = next(case for case in operand_cases.CASES if case.name == name)
        x, dy = torch.randn(2, 40, 64).unbind()
        (given,), beside = case.inputs([x]), operand_rows._made_extra(case, x)
        assert case.ours(given, *beside).shape == x.shape and operand_rows._wrong(case, given, beside, dy) is None
        wrong = case._replace(ours=lambda *t: case.theirs(*t) + 1)
        assert operand_rows._wrong(wrong, given, beside, dy) == "forward is wrong"
        wrong = case._replace(ours=lambda t, *more: case.theirs(t + (t.detach() - t) / 2, *more))
        assert operand_rows._wrong(wrong, given, beside, dy) == "a gradient is wrong"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", ["swiglu", "glu"])
    def test_gated_activations_that_are_wrong_get_no_time(self, name, dtype):
        case = next(case for case in operand_cases.CASES if case.name == name)
        x, up, dy = torch.randn(3, 40, 64).to(dtype).unbind()
        others = [up.requires_grad_()]
        assert operand_rows._wrong(case, x, others, dy) is None
        wrong = case._replace(ours=lambda gate, up: case.theirs(gate, up) * 1.5)
        assert operand_rows._wrong(wrong, x, others, dy) == "forward is wrong"
        wrong = case._replace(ours=lambda gate, up: case.theirs(gate, 1.5 * up - 0.5 * up.detach()))
        assert operand_rows._wrong(wrong, x, others, dy) == "a gradient is wrong"
        wrong = case._replace(ours=lambda gate, up: case.theirs(up, gate))
        assert operand_rows._wrong(wrong, x, others, dy) == "forward is wrong"

    def test_a_shape_that_a_case_does_not_take(self, tmp_path, capsys, quick):
        file = tmp_path / "prelu.json"
        arguments = ["prelu", "--shape", "4x4096", "--dtype", "fp32", "--device", "cpu", "--json", str(file)]
        assert bench.main(["--operands", *arguments]) == 0
        assert [row["name"] for row in json.loads(file.read_text())["operands"]] == ["prelu, 4096 channels"]
        assert "prelu, 64 channels: takes a multiple of 65536 elements, not 4 x 4096" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "plain"),
        [
            (["softmax"], "softmax"),
            (["softmax+mask"], "softmax"),
            (["gelu+bias"], "gelu"),
            (["gelu+dropout+bias", "--operands"], "gelu"),
        ],
    )
    def test_what_operands_measure_is_said(self, arguments, plain, capsys):
        with pytest.raises(SystemExit) as ended:
            bench.main(["relu", *arguments, "--shape", "4x4"])
        assert ended.value.code == 2
        assert capsys.readouterr().err.endswith(f"{arguments[0]!r} is measured by --operands {plain}\n")

    def test_operands_are_chosen_by_activation_or_name(self, monkeypatch):
        asked = []

        def run(chosen, *others):
            asked.append(([case.name for case in chosen], *others))
            return {"machine": {}, "operands": [], "stopped": 0}

        monkeypatch.setattr(operand_rows, "measure_operands", run)
        every = [case.name for case in operand_cases.CASES]
        silu = [name for name in every if name.split("+")[0] == "silu"]
        named = {(): every, ("silu",): silu, ("relu+bias", "softmax, dim=0"): ["relu+bias", "softmax, dim=0"]}
        for names, expected in named.items():
            assert bench.main(["--operands", *names, "--device", "cpu"]) == 0
            assert asked.pop() == (expected, [torch.float32, torch.bfloat16], torch.device("cpu"), False, None)

    @pytest.mark.parametrize("name", ["softmax", "log_softmax"])
    def test_rows_that_are_wrong_get_no_time(self, name, monkeypatch):
        case = next(case for case in operand_cases.CASES if case.rows == (name, 0))
        x, dy = torch.randn(2, 300, 40).unbind()
        assert operand_rows._wrong_rows(case, x, dy) is None
        wrong = case._replace(ours=lambda x: case.theirs(x * 1.001))
        assert operand_rows._wrong_rows(wrong, x, dy) == "forward is wrong"
        wrong = case._replace(ours=lambda x: case.theirs(1.001 * x - 0.001 * x.detach()))
        assert operand_rows._wrong_rows(wrong, x, dy) == "the gradient is wrong"

    @pytest.mark.parametrize("name", ["softmax+mask", "softmax+bool mask", "softmax, dtype=float32"])
    def test_masked_rows_that_are_wrong_get_no_time(self, name):
        case = next(case for case in operand_cases.CASES if case.name == name)
        x, dy = torch.randn(2, 64, 100).unbind()
        masks = operand_rows._made_extra(case, x)
        assert operand_rows._wrong_rows(case, x, dy, *masks) is None
        if not case.converts:
            exact = [t.double() if t.is_floating_point() else t for t in (x, dy, *masks)]
            assert operand_rows._wrong_rows(case, *exact) is None
        wrong = case._replace(ours=lambda x, *masks: case.theirs(x * 1.1, *masks))
        assert operand_rows._wrong_rows(wrong, x, dy, *masks) == "forward is wrong"
        wrong = case._replace(ours=lambda x, *masks: case.theirs(1.5 * x - 0.5 * x.detach(), *masks))
        assert operand_rows._wrong_rows(wrong, x, dy, *masks) == "the gradient is wrong"
        for mask in masks:
            wrong = case._replace(ours=lambda x, mask: case.theirs(x, mask.roll(1, -2)))
            assert operand_rows._wrong_rows(wrong, x, dy, mask) == "forward is wrong"

    def test_plot_needs_matplotlib(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setattr(report, "can_plot", lambda: False)
        with pytest.raises(SystemExit) as raised:
            bench.main(["--plot", str(tmp_path / "a.png")])
        assert raised.value.code == 2 and "pip install matplotlib" in capsys.readouterr().err

    def test_output_without_unicode(self, quick, monkeypatch, tmp_path):
        out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", out)
        assert bench.main(["softsign", "--dtype", "fp32", "--shape", "3x7", "--device", "cpu"]) == 0
        file = tmp_path / "accuracy.json"
        assert accuracy.main(["softsign", "--dtype", "bf16", "--device", "cpu", "--json", str(file)]) == 0
        out.flush()
        assert b" threads ? torch " in out.buffer.getvalue() and f"wrote {file} and ".encode() in out.buffer.getvalue()

    def test_first_use_imports_nothing_of_the_folder_it_is_started_in(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "jitact.py").write_text("raise SystemExit('not this one')")
        assert first_calls._seconds_of_first_use([], torch.device("cpu"))["import"] > 0

    @pytest.mark.slow  # CI runs it too
    def test_as_a_script(self, tmp_path):
        files = ["--json", str(tmp_path / "bench.json")]
        picture = tmp_path / "bench.png"
        if report.can_plot():
            files += ["--plot", str(picture)]
        command = [sys.executable, "bench.py", "relu", "--dtype", "fp32", "--shape", "8x64", "--device", "cpu", *files]
        done = subprocess.run(command, cwd=report.ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"jitact {jitact.__version__} of {report.ROOT}\n")
        assert "\r" not in done.stdout and "first use in a new process" in done.stdout
        use = json.loads((tmp_path / "bench.json").read_text())["first_use"]["relu"]
        assert use["build_s"] > 0.1 and 0 < use["load_ms"] < 1000 * use["build_s"]
        assert not report.can_plot() or picture.read_bytes().startswith(b"\x89PNG")


class TestReport:
    def test_geometric_means(self):
        rows = [row_of("relu", eager=2.0), row_of("selu", eager=8.0), row_of("gelu", ours=None)]
        (mean,) = report.geometric_means(rows)
        assert (mean["dtype"], mean["peer"], mean["of"], mean["count"]) == ("fp32", "eager", "all", 2)
        assert mean["forward"] == pytest.approx(4) and mean["step"] == pytest.approx(4)
        every = [row_of(name) for name in sorted(report.classic())]
        assert len(every) == 22 and [mean["of"] for mean in report.geometric_means(every)] == ["all", "classic"]

    def test_summary_names_what_falls_short(self):
        assert "compared with float64" not in report.bench_summary(results_of())
        text = report.bench_summary(results_of(row_of("relu"), row_of("selu", ours=4.0)))
        assert "below 97 % of the floor: 6 of 6: selu fp32 backward 0.23" in text
        assert "over 1 % slower than eager: 3 of 6: selu fp32 backward 0.50" in text
        assert "NOT TO BE TRUSTED" not in text

    def test_summary_says_that_a_ceiling_cannot_be_beaten(self):
        text = report.bench_summary(results_of(row_of("relu"), row_of("selu", ours=0.5)))
        assert "NOT TO BE TRUSTED: 3 of 6 beat the ceiling; was the machine busy?" in text

    @pytest.mark.skipif(not report.can_plot(), reason="matplotlib is not installed")
    def test_plot_of_rows_with_gaps(self, tmp_path):
        rows = [
            row_of("relu"),
            row_of("selu", "bf16", eager=None),
            row_of("gelu", "bf16", ours=None),
            row_of("mish", "fp16", ours=None),
        ]
        report.draw(results_of(*rows), tmp_path / "a.png")
        assert (tmp_path / "a.png").stat().st_size > 10_000

    def test_table_of_activations(self):
        error = {"ulp": 0.5}
        accurate = {
            "name": "relu",
            "dtype": "bf16",
            "save": "bit",
            "ours": {"forward": error, "gradient": error},
            "torch": None,
        }
        text = report.activations_markdown({"machine": results_of()["machine"], "rows": [accurate]}, results_of(row_of("relu")))
        (line,) = (line for line in text.splitlines() if line.startswith("| relu "))
        assert line.endswith("| 1 bit, input | 0.50 / 0.50 | 90% / 90% / 90% | 2.00x / - |")
        assert text.count("\n| ") == len(registry.names()) + 2 + len(row_names()) + 2

    def test_activations_md_is_current(self):
        text = (CHECKOUT / "ACTIVATIONS.md").read_text(encoding="utf-8")
        assert text == report.current_activations_markdown(CHECKOUT), "stale: run `python -m jitact.report`"

    def test_command_says_what_it_wrote(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(report, "ROOT", tmp_path)
        (tmp_path / "pyproject.toml").touch()
        (tmp_path / "docs").mkdir()
        said = [f"wrote {tmp_path / name}" for name in report.WRITTEN]
        for name in ("README.md", "docs/comparison.md"):  # only tables are written in these
            (tmp_path / name).write_text("# jitact\n", encoding="utf-8")
            said[list(report.WRITTEN).index(name)] = f"{tmp_path / name} is up to date"
        picture = "results/headline.svg"
        said[list(report.WRITTEN).index(picture)] = f"{tmp_path / picture} is not written: nothing was measured"
        assert report.main([]) == 0
        assert capsys.readouterr().out.splitlines() == said
        assert report.main([]) == 0 and "wrote" not in capsys.readouterr().out
        assert (tmp_path / "ACTIVATIONS.md").read_text(encoding="utf-8").startswith("# Activations")

    def test_command_leaves_an_installed_package_alone(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(report, "ROOT", tmp_path)
        assert report.main([]) == 2 and not list(tmp_path.iterdir())
        assert f"{tmp_path} is no checkout" in capsys.readouterr().err


class TestModels:
    def test_forms_are_compared_without_tf32(self):
        """The flags are restored afterwards, also after an error."""
        backends = torch.backends.cudnn, torch.backends.cuda.matmul
        before, seen, precision = [backend.allow_tf32 for backend in backends], [], torch.backends.cuda.matmul.fp32_precision

        def step(value):
            def run():
                seen.append([backend.allow_tf32 for backend in backends])
                return [torch.ones(3), torch.full((2,), value)]

            run.in_float64 = lambda: lambda: [torch.ones(3).double(), torch.ones(2).double()]
            return run

        steps = {form: step(value) for form, value in zip(models.FORMS, (1.0, 1.001, 1.0, 1.0 + 2**-20), strict=True)}
        assert models.differing(steps, 2.0**-16) == ["eager + jitact"]
        assert seen == [[False, False]] * 4
        assert not models.differing(steps | {"eager": step(1.0006)}, 2.0**-16)  # up to twice the plain form's error is accepted
        assert models.differing(steps | {"compile + jitact": step(math.nan)}, 1.0) == ["compile + jitact"]

        def fail():
            raise RuntimeError

        fail.in_float64 = lambda: lambda: []
        with pytest.raises(RuntimeError):
            models.differing(dict.fromkeys(models.FORMS, fail), 0.0)
        assert [backend.allow_tf32 for backend in backends] == before and before[0]
        assert torch.backends.cuda.matmul.fp32_precision == precision  # part of the keys of Inductor's cache


class TestWithKept:
    MACHINE = {"device": "H200", "torch": "2", "jitact": "1"}
    ORIGINS = (
        ("gelu", {}),
        ("relu", {}),
        ("silu", {"by": "jitact 7, 2025-12-31"}),
        ("mish", {"by": "A100, jitact 0, 2026-01-01"}),
    )

    def kept(self, new, old, tmp_path):
        write_json(tmp_path / "old.json", {"machine": self.MACHINE} | old)
        return with_kept({"machine": self.MACHINE} | new, tmp_path / "old.json")

    def test_lines_that_are_not_measured_now(self, tmp_path):
        def row(name, dtype, ratio, *flags):
            ratios = {"eager": 1.0, "compile": ratio}
            return {"block": "chain", "name": name, "dtype": dtype, "ratios": ratios, "flags": list(flags)}

        old = [row("gelu", "bf16", 0.5), row("gelu", "fp32", 4.0, "slow")]
        new = [row("gelu", "bf16", 1.0)]
        both = self.kept(models.summary(new), models.summary(old), tmp_path)
        assert both["rows"] == [new[0], old[1]]
        summary = models.summary(both["rows"])
        assert summary["flagged"] == 1 and summary["geometric_means"] == {"eager": 1.0, "compile": pytest.approx(2.0)}

    @pytest.mark.parametrize(("shape", "names"), [([4, 4], ["gelu", "relu"]), ([2, 2], ["gelu"])])
    def test_lines_of_a_dtype_with_another_shape_are_not(self, tmp_path, shape, names):
        old = {"dtypes": {"bf16": {"shape": shape}, "fp32": {"shape": [4, 4]}}, "first_use": {"relu": {}}}
        old["rows"] = [{"name": name, "dtype": "bf16"} for name in ("gelu", "relu")] + [{"name": "relu", "dtype": "fp32"}]
        new = {"dtypes": {"bf16": {"shape": [4, 4]}}, "rows": [{"name": "gelu", "dtype": "bf16", "new": True}], "first_use": {}}
        both = self.kept(new, old, tmp_path)
        assert [row["name"] for row in both["rows"] if row["dtype"] == "bf16"] == names
        assert new["rows"][0] in both["rows"] and {"name": "relu", "dtype": "fp32"} in both["rows"]
        assert set(both["dtypes"]) == {"bf16", "fp32"} and set(both["first_use"]) == {"relu"}

    def test_operands_have_shapes(self, tmp_path):
        old = {"operands": [{"name": "softmax", "dtype": "bf16", "shape": shape} for shape in ([2, 3], [4, 5])]}
        new = {"operands": [{"name": "softmax", "dtype": "bf16", "shape": [4, 5], "new": True}]}
        assert self.kept(new, old, tmp_path)["operands"] == [old["operands"][0], new["operands"][0]]

    def test_lines_of_another_version_say_so(self, tmp_path):
        row = {"name": "gelu", "dtype": "bf16", "ours": None}
        old = {"machine": self.MACHINE | {"jitact": "0", "date": "2026-01-02T03:04"}, "rows": [row, row | {"name": "relu"}]}
        write_json(tmp_path / "old.json", old)
        new = {"machine": self.MACHINE | {"kind": "cuda", "jitact": "1"}, "rows": [row]}
        both = with_kept(new, tmp_path / "old.json", ("device", "torch"))
        assert both["rows"] == [row, {"by": "jitact 0, 2026-01-02"} | row | {"name": "relu"}]
        assert with_kept(new, tmp_path / "old.json") == new
        new["machine"] |= {"device": "H100", "jitact": "0"}
        write_json(tmp_path / "old.json", old | {"rows": [row | {"name": name} | by for name, by in self.ORIGINS]})
        found = [row["by"] for row in with_kept(new, tmp_path / "old.json", ("torch",))["rows"][1:]]
        assert found == ["H200, jitact 0, 2026-01-02", "H200, jitact 7, 2025-12-31", "A100, jitact 0, 2026-01-01"]
        # A file that does not say the capability: the device counts.
        assert with_kept(new, tmp_path / "old.json", ("capability", "torch")) == new
        new["machine"] |= {"device": "H200", "capability": "9.0"}
        assert len(with_kept(new, tmp_path / "old.json", ("capability", "torch"))["rows"]) == 4

    def test_what_else_a_file_holds_is_written_over(self, tmp_path):
        new = {"machine": self.MACHINE, "rows": [{"name": "gelu", "dtype": "bf16"}]}
        path = tmp_path / "results.json"
        assert with_kept(new, path) == with_kept(new, None) == new
        for text in ("no JSON", "[1]", "{}", json.dumps({"machine": self.MACHINE | {"jitact": "0"}, "rows": []})):
            path.write_text(text, encoding="utf-8")
            assert with_kept(new, path) == new

    @pytest.mark.parametrize(("fact", "refused"), [("device", True), ("capability", False), ("driver", True)])
    def test_gpus_may_differ_in_what_does_not_count(self, fact, refused, tmp_path, monkeypatch, capsys):
        """A file that lacks the fact, here the driver, is judged by the device."""
        now = self.MACHINE | {"capability": "9.0", "driver": "1"}
        monkeypatch.setattr(commandline, "machine", lambda device: now)
        then = self.MACHINE | {"device": "H100", "capability": "9.0"}
        write_json(tmp_path / "r.json", {"machine": then, "rows": [{"name": "gelu", "dtype": "bf16", "broken": []}]})
        with pytest.raises(SystemExit) if refused else nullcontext():
            Parser().refuse_results_of_others(tmp_path / "r.json", "broken", torch.device("cpu"), fact)
        assert ("r.json' holds results of H100; write those of H200 to another file" in capsys.readouterr().err) == refused

    def test_a_pipe_or_a_terminal_is_not_read(self, tmp_path, monkeypatch):
        os.mkfifo(tmp_path / "pipe")
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("it would wait for input"))
        new = {"machine": self.MACHINE, "rows": []}
        assert with_kept(new, tmp_path / "pipe") == new and Parser.results_file(str(tmp_path / "pipe"))


def test_a_build_that_was_found_elsewhere_is_not_timed_as_one(monkeypatch):
    def seconds(names, device, **variables):
        for name in names[1:] if variables else ():  # the first is loaded from another folder
            (Path(variables["JITACT_CACHE_DIR"]) / f"{name}-0123").mkdir()
        return dict.fromkeys(names, 0.25) | {"import": 1.0}

    monkeypatch.setattr(first_calls, "_seconds_of_first_use", seconds)
    monkeypatch.setattr(first_calls, "_recorded_seconds", lambda name: 7.0)
    uses = first_calls.first_use(["relu", "gelu"], torch.device("cpu"), ["relu", "gelu"])["first_use"]
    assert [use["build_s"] for use in uses.values()] == [7.0, 0.25]


def test_fewest_instructions_for_a_byte():
    """The cheapest path through the machine code counts: here one vector, or elements in a loop."""
    code = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P2 EXIT ;
        /*0020*/               @P0 BRA 0x80 ;
        /*0030*/                   BSSY B0, 0x60 ;
        /*0040*/               @P1 BRA 0x50 ;
        /*0050*/                   BSYNC B0 ;
        /*0060*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*0070*/                   EXIT ;
        /*0080*/                   FADD R4, R4, R4 ;
        /*0090*/                   STG.E.U16 desc[UR4][R2.64], R4 ;
        /*00a0*/              @!P1 BRA 0x80 ;
        /*00b0*/                   EXIT ;
    """
    blocks = instructions.blocks_of(code)
    assert sum(block.count for block in blocks) == 12 and [block.stored for block in blocks if block.stored] == [16, 2]
    assert instructions.fewest_per_byte(blocks) == pytest.approx(8 / 16, rel=2e-3)
    assert instructions.fewest_per_byte(blocks, loops=True) == pytest.approx(3 / 2, rel=2e-3)


def test_instructions_of_a_compiled_kernel(tmp_path):
    """relu of a float32 vector takes several instructions for each of four elements, at least a comparison and a select."""
    if not all(shutil.which(tool) for tool in ("nvcc", "cuobjdump", "nvdisasm", "c++filt")):
        pytest.skip("nvcc, cuobjdump, nvdisasm or c++filt is not on PATH")
    found = instructions.kernels_in(compare_sass.compiled(CHECKOUT, "relu", "90", tmp_path))
    (code,) = (code for name, code in found.items() if "elementwise<(jitact::loops::Op)0, float, true>" in name)
    assert 2 < 4 * instructions.fewest_per_byte(instructions.blocks_of(code)) < 20


def test_instructions_are_told_where_they_take_longer_than_bytes(monkeypatch, capsys):
    case = next(i for i, case in enumerate(operand_cases.CASES) if case.name == "relu+bias")
    task = operand_rows.Task(case, (8, 4), torch.float32, torch.device("cpu"))
    row = {"floor": {"forward": 2.0, "backward": 4.0}, "ms": {"forward": {"ours": 4.0}, "backward": {"ours": 5.0}}}
    monkeypatch.setattr(operand_rows, "_instructions", lambda case, task: {"forward": 3.0, "backward": 3.0})
    monkeypatch.setattr(operand_rows, "rate_of_issue", lambda device: 32_000)  # one instruction per element takes a millisecond
    operand_rows._count_instructions([task, task], [row, {"name": "relu+bias", "wrong": "forward is wrong"}])
    assert row["issue"] == {"forward": 3.0, "backward": 3.0}
    told = capsys.readouterr().out
    assert "up to 150%" in told and "relu+bias fp32 8 x 4, forward: 3 for an element, 75%" in told and "backward" not in told
