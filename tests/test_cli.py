"""``python -m jitact.kernels``."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
import torch
from building import answer

from jitact import names, registry
from jitact.kernels import build, cache, folders, lock, prebuild
from jitact.kernels.__main__ import main
from jitact.kernels.cache import Build
from jitact.kernels.plan import make_plan

pytest_plugins = ["building"]


def test_build_then_list_then_clear(quick: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "softsign", "ReLU"]) == 0
    said = capfd.readouterr().out.splitlines()
    assert re.fullmatch(r"\[1/2\] (softsign|relu) compiled in \d+\.\d s.*", said[0])
    assert re.fullmatch(r"jitact: 2 compiled, 0 cached, \d+\.\d s", said[-1])

    assert main(["build", "softsign", "--fast-math"]) == 0
    assert main(["build", "softsign", "relu"]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("jitact: 0 compiled, 2 cached")

    superseded = next(e for e in cache.entries(quick) if e.build.name == "relu")
    damaged = next(e for e in cache.entries(quick) if e.build.name == "softsign_fast_math")
    old = superseded.folder.rename(quick / f"relu-{'0' * 16}") / cache.RECORD
    old.write_text(json.dumps(json.loads(old.read_text()) | {"sources": "0", "key": "0" * 16}))
    os.truncate(damaged.library, 10)
    at_work = make_plan(registry.get("selu").activation.source).title
    (quick / ".staging" / f"{at_work}.0").mkdir()
    capfd.readouterr()
    with lock.locked(cache.lock_of(quick, at_work), "selu"):
        assert main(["list"]) == 0
    rows = capfd.readouterr().out.splitlines()
    assert re.fullmatch(r"NAME +KEY +ARCHS +CPU +SIZE +AGE +STATE", rows[0])
    states = {row.split()[0]: row for row in rows[1:]}
    archs = r"none|[\d. +PTXa]+"
    assert re.fullmatch(rf"softsign +[0-9a-f]{{16}} +({archs}) +\w+ +\d+ KB +\d+ s +current", states["softsign"])
    assert states["relu"].endswith("superseded")
    assert "damaged: jitact_softsign_fast_math.so has a wrong checksum" in states["softsign_fast_math"]
    assert states["selu"].endswith("being built")

    (quick / "precious").mkdir()
    (quick / "precious-0123456789abcdef.txt").write_text("mine")
    assert main(["clear", "softsign"]) == 0
    assert {entry.folder.name.rpartition("-")[0] for entry in cache.entries(quick)} == {"relu"}
    assert main(["clear"]) == 0
    assert sorted(path.name for path in quick.iterdir()) == ["machine.json", "precious", "precious-0123456789abcdef.txt"]


def test_clear_leaves_alone_what_is_being_built(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry, _ = build.obtain(make_plan(answer(1)))
    with lock.locked(cache.lock_of(stand_in, entry.folder.name), "answer"):
        assert main(["clear"]) == 1
    assert "is being built: left alone" in capsys.readouterr().out and entry.folder.is_dir()


def test_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["where"]) == 0
    assert capsys.readouterr().out == f"{folder}  read, and built in\n"


def test_an_unknown_name_is_an_error_with_a_suggestion(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "softsing"]) == 1
    assert "did you mean 'softsign'" in capsys.readouterr().err


@pytest.mark.parametrize(("arch", "expected"), [("nine", "no compute capability"), ("9.0", "built without CUDA")])
def test_archs_that_will_not_do(folder: Path, capsys: pytest.CaptureFixture[str], arch: str, expected: str) -> None:
    if torch.version.cuda and arch == "9.0":
        pytest.skip("this torch is built with CUDA")
    assert main(["build", "softsign", "--arch", arch]) == 1
    assert expected in capsys.readouterr().err


def test_a_kernel_that_does_not_compile_fails_the_command(stand_in: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plans = [make_plan(answer(1)), make_plan(answer(2, "broken")._replace(text="nonsense"))]
    assert prebuild.prebuild(plans) == 1
    said = capfd.readouterr().out
    assert "broken failed" in said and "error:" in said and "1 compiled, 0 cached, 1 failed" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_tune_wants_a_gpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "softsign"]) == 1
    assert "tune measures on a GPU" in capsys.readouterr().err and not any(folder.glob("softsign-*"))


def test_all_cores_build(stand_in: Path, capfd: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    assert prebuild.prebuild([make_plan(answer(i, f"answer{i}")) for i in range(6)], 2) == 0
    assert "6 compiled" in capfd.readouterr().out
    assert time.monotonic() - started < 60


def test_doctor(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert main(["doctor"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert f"0 of {len(names())} activations" in said and said.endswith("all is well\n")
    for subject in ("torch", "cache", "C++ compiler", "ninja", "GPU", "nvcc"):
        assert re.search(rf"^(ok|-) +{re.escape(subject)} ", said, re.MULTILINE), said

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"^PROBLEM +C\+\+ compiler +no C\+\+ compiler$", said, re.MULTILINE), said
    assert "install one:" in said

    entry = cache.Entry(folder, Build("n", "k", "s", (), "AVX2", "2", None, "c++", None, 0.0, 1.0, "n.so", ""), None)
    monkeypatch.setattr(build, "find", lambda *_: entry)
    assert main(["doctor"]) == 0, "with everything cached, nothing is to be compiled"


def test_doctor_tells_of_a_cache_that_cannot_be_used(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("")
    monkeypatch.setattr(folders, "_temporary", list)
    assert main(["doctor"]) == 1
    assert "no folder to keep compiled kernels in" in capsys.readouterr().out
