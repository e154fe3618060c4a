"""The page of a benchmark's results: complete, well-formed, self-contained."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jitact import bench
from jitact.measuring import timing
from jitact.measuring.page import report_html

DIRECTIONS = ("forward", "forward_save", "backward")
VOID = {"meta"}


def row(name: str, dtype: str, **fields) -> dict:
    times = {"ours": 1.0, "eager": 2.0, "compile": 1.5}
    errors = {kind: {"ulp": 0.5, "at": 1.0} for kind in ("forward", "gradient")}
    found = {
        "name": name,
        "dtype": dtype,
        "save": "bit",
        "wrong": [],
        "notes": [],
        "errors": errors,
        "kept": {"ours": 0.125, "eager": 4.0},
    }
    found |= {peer: dict.fromkeys(DIRECTIONS, ms) for peer, ms in times.items()}
    return found | {"floor": dict.fromkeys(DIRECTIONS, 0.98), "bytes": dict.fromkeys(DIRECTIONS, 1e9)} | fields


def results() -> dict:
    rates = {"copy": {"best": 4.29e12, "torch.clone": 4.2e12}, "add": {"best": 4.39e12}}
    machine = {
        "device": "NVIDIA <H200>",
        "driver": "580",
        "torch": "2.11",
        "python": "3.12",
        "jitact": "0.1",
        "date": "2026-11-20T00:00",
    }
    wrong = {"wrong": ["forward off by 9 ulp"], "ours": None, "eager": None, "compile": None, "kept": None, "floor": None}
    return {
        "machine": machine,
        "dtypes": {dtype: {"shape": [4096, 393216], "bytes_per_second": rates} for dtype in ("fp32", "bf16")},
        "rows": [row("relu", "fp32"), row("relu", "bf16", compile=None), row("gelu", "fp32", **wrong)],
        "geometric_means": [{"dtype": "fp32", "peer": "eager", "of": "all", "count": 1, "step": 2.0}],
        "first_use": {"relu": {"build_s": 1.25, "load_ms": None}},
    }


class Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page() -> None:
    page = report_html(results())
    parser = Balanced()
    parser.feed(page)
    assert not parser.open
    assert not re.search(r"https?:|<script|<link|url\(|@import", page)
    for text in (
        "2.00x",
        "98%, 1 ms",
        "49%, 2 ms",
        "4290 GB/s",
        "0.125 instead of 4",
        "1.25",
        "gelu fp32: forward off by 9 ulp",
    ):
        assert text in page, text
    assert "NVIDIA &lt;H200&gt;" in page and "<H200>" not in page
    assert page.count("<circle") == 3 * (3 + 2)


def test_page_of_little() -> None:
    found = results() | {"rows": [], "geometric_means": [], "first_use": None}
    assert "Speed in fp32" in report_html(found)
    endless = row("relu", "fp32", errors={"forward": {"ulp": "inf", "at": 1.0}})  # as read from JSON
    mean = {"dtype": "fp32", "peer": "eager", "of": "all", "count": 1, "step": "nan"}
    assert "<td>inf</td>" in report_html(results() | {"rows": [endless], "geometric_means": [mean]})


def test_bench_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(timing, "RUNS", dict.fromkeys(("cpu", "cuda"), (3, 3, 0.0)))
    use = {"import_ms": 1.0, "first_use": {"softsign": {"build_s": 1.5, "load_ms": 2.5}}}
    monkeypatch.setattr(bench, "first_use", lambda *_: use)
    out = tmp_path / "report.html"
    assert bench.main(["softsign", "--dtype", "fp32", "--shape", "3x1001", "--device", "cpu", "--html", str(out)]) == 0
    page = out.read_text(encoding="utf-8")
    for text in ("Speed in fp32, 3 x 1001", "4 instead of 12", "Errors", "2.5"):
        assert text in page, text
    with pytest.raises(SystemExit):
        bench.main(["softsign", "--html", str(tmp_path / "nowhere" / "report.html")])
    assert "no directory" in capsys.readouterr().err
