"""What type checkers, editors, help() and readers are told of the interface."""

from __future__ import annotations

import ast
import inspect
import json
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import jitact
from jitact import report

CHECKOUT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", report.WRITTEN)
def test_what_is_written_is_current(name: str) -> None:
    assert (CHECKOUT / name).read_text(encoding="utf-8") == report.WRITTEN[name](CHECKOUT), "stale: run `jitact report`"


@pytest.mark.parametrize("name", jitact.names())
def test_help_tells_of_every_argument_and_its_default(name: str) -> None:
    for described in (jitact.get(name), getattr(jitact, name)):
        told = " ".join(inspect.getdoc(described).split())
        for parameter in inspect.signature(described).parameters.values():
            default = parameter.default
            shown = "" if default in (parameter.empty, None) else re.escape(f"Default: {default!r}.")
            assert re.search(rf" {parameter.name}: .*?{shown}", told), (name, parameter)
        assert all(f"{error}: " in told for error in ("TypeError", "ValueError", "RuntimeError"))


def test_the_stub_has_every_public_name() -> None:
    tree = ast.parse((CHECKOUT / "__init__.pyi").read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    imported = {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names if alias.asname}
    assert imported == set(jitact.PUBLIC) and defined | imported == set(jitact.__all__)
    assignments = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)]
    aliases = {node.targets[0].id: node.value.id for node in assignments}
    assert aliases["swish"] == "silu"
    assert all(getattr(jitact, alias) is getattr(jitact, name) for alias, name in aliases.items())


def test_help_shows_functions_and_activations() -> None:
    text = pydoc.plain(pydoc.render_doc(jitact))
    functions = text.partition("\nFUNCTIONS\n")[2].partition("\nDATA\n")[0]
    shown = {
        line.strip().partition("(")[0] for line in functions.splitlines() if line.startswith("    ") and line[4:5].isalpha()
    }
    assert shown == set(jitact.__all__) - {"REGISTRY", "Channel", "Row"}  # which are no functions


def test_only_what_is_meant_to_be_used_is_shown() -> None:
    before = set(jitact.__all__)
    assert {"registry", "load_ipython_extension", "PUBLIC", "sys"}.isdisjoint(before | set(dir(jitact)))
    jitact.define("swoosh", "x * sin(x)")
    assert set(jitact.__all__) - before == {"swoosh"} and "swoosh" in dir(jitact)


def test_importing_it_filters_no_warnings() -> None:
    program = (
        "import warnings; before = list(warnings.filters); import torch, jitact; assert warnings.filters[-1] == before[-1]\n"
    )
    program += "assert not [f for f in warnings.filters if f[1] and 'jitact' in f[1].pattern]"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "jitact.registry", "export", "softsing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr


def test_table_of_blocks_is_made_of_results(tmp_path: Path) -> None:
    def row(block: str, dtype: str, compiled: float, eager: float, memory: float = 1.0, host: float = 0.1) -> dict:
        ratios, peaks = {"eager": eager, "compile": compiled}, {"eager": 1.0, "compile": memory}
        return {"block": block, "name": "gelu", "dtype": dtype, "ratios": ratios, "memory": peaks, "host": host, "flags": []}

    failed = {"block": "chain", "name": "silu", "dtype": "bf16", "flags": ["out of memory"]}
    rows = [row("chain", "bf16", 2.0, 1.5), row("chain", "bf16", 0.5, 0.7, 0.25, host=0.9), failed]
    rows.append(row("mlp", "fp32", 1.25, 1.0))
    machine = {"device": "H200", "driver": "1", "torch": "2", "python": "3", "jitact": "0", "date": "2026-01-01"}
    for folder in ("results", "docs"):
        (tmp_path / folder).mkdir()
    mark = "<!-- models: written by `jitact report` -->\n<!-- end of models -->\n"
    (tmp_path / "docs" / "comparison.md").write_text(f"before\n{mark}after\n", encoding="utf-8")
    written = report.WRITTEN["docs/comparison.md"]
    assert written(tmp_path) == f"before\n{mark}after\n", "nothing was measured"
    (tmp_path / "results" / "models-cuda.json").write_text(json.dumps({"machine": machine, "rows": rows}))
    text = written(tmp_path)
    assert "around each of gelu, silu." in text
    chain, mlp = (
        "| chain | bf16 | 0.500 / 1.000 | 1.000 / 0.500 | 1.500 / 1.500 |",
        "| mlp | fp32 | 1.250 / 1.250 | 1.000 / 1.000 | 1.000 / 1.000 |",
    )
    assert f"{chain}\n{mlp}\n" in text
    before = {"machine": machine, "rows": [row("mlp", "fp32", 0.9, 1.0)]}
    (tmp_path / "results" / "models-cuda-before.json").write_text(json.dumps(before))
    text = written(tmp_path)
    assert f"{chain} - |\n{mlp} 0.900 / 0.900 |\n" in text
    assert text.startswith("before\n") and text.endswith("after\n")


def test_tables_in_the_readme_are_made_of_results(tmp_path: Path) -> None:
    times = {peer: dict.fromkeys(report.DIRECTIONS, ms) for peer, ms in {"ours": 1.0, "eager": 1.5, "compile": 1.25}.items()}
    row = {"name": "relu", "dtype": "bf16", "wrong": [], "exported": None, "kept": {"ours": 0.125, "eager": 2}, **times}
    row |= {"floor": dict.fromkeys(report.DIRECTIONS, 0.96), "bytes": dict.fromkeys(report.DIRECTIONS, 1e6)}
    machine = {"device": "H200", "driver": "1", "torch": "2", "python": "3", "jitact": "0", "date": "2026-01-01"}
    bench = {"machine": machine, "dtypes": {"bf16": {"shape": [4, 8]}}, "rows": [row]}
    means = report.geometric_means(bench["rows"])
    bench["geometric_means"] = means + [mean | {"of": "classic", "count": 22, "step": 1.1} for mean in means]
    step = {"per_second": 1000.0, "peak_bytes": 2e9}
    models = [{"model": "llama", "compiled": False, "unit": "tokens", "before": step, "after": step | {"per_second": 1500.0}}]
    (tmp_path / "results").mkdir()
    marks = "".join(f"<!-- {name}: written by `jitact report` -->\n<!-- end of {name} -->\n" for name in ("speed", "training"))
    (tmp_path / "README.md").write_text(f"before\n{marks}after\n", encoding="utf-8")
    assert report.WRITTEN["README.md"](tmp_path) == f"before\n{marks}after\n", "nothing was measured"
    assert report.WRITTEN["results/headline.svg"](tmp_path) == ""
    (tmp_path / "results" / "bench-cuda.json").write_text(json.dumps(bench))
    ms = {d: {"ours": 1.0, "eager": 1.5, "compile": 1.25} for d in ("forward", "backward")}
    gated = {"name": "swiglu", "dtype": "bf16", "shape": [16384, 14336], "ms": ms, "kept": {"ours": 4.0, "eager": 6.0}}
    gated |= {"floor": dict.fromkeys(ms, 0.96), "notes": []}
    rows = {**gated, "name": "softmax", "shape": [65536, 4096], "kept": {"ours": 2.0, "eager": 2.0}}
    rows |= {"ms": {d: {"ours": 2.0, "eager": 3.0} for d in ms}}
    others = [{**gated, "dtype": "fp32"}, {**gated, "shape": [65536, 2048]}, {**gated, "wrong": "forward is wrong"}]
    for tool, measured in {"gated": [*others, gated], "operands": [rows]}.items():
        (tmp_path / "results" / f"{tool}-cuda.json").write_text(json.dumps({"machine": machine, "operands": measured}))
    training = {"machine": machine, "dtype": "bfloat16", "rows": models}
    (tmp_path / "results" / "training-cuda.json").write_text(json.dumps(training))
    text = report.WRITTEN["README.md"](tmp_path)
    assert "| `relu` | 4 x 8 | 96% | 1.50x | 1.25x | 0.125 / 2 |" in text
    assert text.count("| `swiglu` | 16384 x 14336 | 96% | 1.50x | 1.25x | 4 / 6 |") == text.count("`swiglu`") == 1
    assert "| `softmax` | 65536 x 4096 | 48% | 1.50x | - | 2 / 2 |" in text
    assert "Geometric mean of all 1 elementwise activations: 1.50 times as fast as eager, 1.25 times as fast as" in text
    assert "Of the 22 that torch.nn has: 1.10 times as fast as eager, 1.10 times as fast as torch.compile.\n" in text
    listed = report.WRITTEN["ACTIVATIONS.md"](tmp_path).partition("## Gated")[2].partition("## Rows")
    assert "| swiglu | bf16 | 16384 x 14336 | 96% | 1.50x / 1.25x | 96% | 1.50x / 1.25x | 4 |" in listed[0]
    assert listed[0].count("| swiglu |") == 3 and "softmax" not in listed[0] and "| softmax | bf16 |" in listed[2]
    assert "Below 97% of the memory bandwidth, forward or backward (measured in bf16): relu bf16." in text
    assert "| llama | eager | 1,000 → 1,500 tokens (1.500x) | 2.00 → 2.00 GB |" in text
    assert text.startswith("before\n") and text.endswith("after\n")
    picture = ElementTree.fromstring(report.WRITTEN["results/headline.svg"](tmp_path))
    shown = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    bars = [each.get("class") for each in picture.iter("{http://www.w3.org/2000/svg}rect") if each.get("height") == "10"]
    assert shown[-14:] == [
        *("relu", "4 \u00d7 8", "96%", "77%", "64%"),
        *("swiglu", "16384 \u00d7 14336", "96%", "77%", "64%"),
        *("softmax", "65536 \u00d7 4096", "48%", "32%"),
    ]
    assert bars == ["ours", "compile", "eager"] * 2 + ["ours", "eager"]
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    assert report.WRITTEN["README.md"](tmp_path) == text
