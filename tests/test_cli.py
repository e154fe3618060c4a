"""``python -m jitact.kernels``."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from building import NOBODY, answer, as_nobody, in_child, root

from jitact import load_folder, names, registry
from jitact.kernels import BuildError
from jitact.kernels.__main__ import main
from jitact.kernels.loader import build, cache, folders, lock, prebuild
from jitact.kernels.loader.cache import Build
from jitact.kernels.loader.plan import make_plan
from jitact.kernels.loader.source import RowPart, RowTypes

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
    assert re.fullmatch(r"NAME +KEY +ARCHS +CPU +SIZE +AGE +USED +STATE", rows[0])
    states = {row.split()[0]: row for row in rows[1:]}
    archs = r"none|[\d. +PTXa]+"
    assert re.fullmatch(rf"softsign +[0-9a-f]{{16}} +({archs}) +\w+ +\d+ KB +\d+ s +\d+ s +current", states["softsign"])
    assert states["relu"].endswith("superseded")
    assert "damaged: jitact_softsign_fast_math.so has a wrong checksum" in states["softsign_fast_math"]
    assert states["selu"].endswith("being built")

    (quick / "precious").mkdir()
    (quick / "precious-0123456789abcdef.txt").write_text("mine")
    assert main(["clear", "softsign"]) == 0
    assert {entry.folder.name.rpartition("-")[0] for entry in cache.entries(quick)} == {"relu"}
    assert main(["clear"]) == 0
    assert sorted(path.name for path in quick.iterdir()) == ["machine.json", "precious", "precious-0123456789abcdef.txt"]


def test_build_from_a_folder(quick: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, other = tmp_path / "kernels", tmp_path / "other"
    folder.mkdir(), other.mkdir()
    text = "ELEMENTWISE T forward(T x) { return 2 * x; }\nELEMENTWISE T backward(T dy, T x) { return 2 * dy; }\n"
    (folder / "any.cu").write_text("// activation: of_folder\n" + text)
    (other / "any.cu").write_text("int x = 1;\n")
    for count in ("1 compiled, 0", "0 compiled, 1"):
        assert main(["build", "--from", str(folder), "of_folder"]) == 0
        assert count in capfd.readouterr().out
    (loaded,) = load_folder(folder).values()
    assert loaded()(torch.ones(2)).tolist() == [2, 2] and len(list(cache.entries(quick))) == 1
    for wrong, said in ((tmp_path / "nowhere", "there is no folder"), (other, "any.cu")):
        assert main(["build", "--from", str(wrong), "relu"]) == 2
        assert said in capfd.readouterr().err


def test_parts_and_types_of_rows_are_current_and_cleared(quick: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = registry.of_rows("softmax").activation.source
    kinds = RowPart("float32", "along", "output"), RowTypes("int8", "float32", "none")
    for rows in kinds:
        build.obtain(make_plan(source._replace(rows=rows)))
    assert main(["list"]) == 0
    states = {row.split()[0]: row.split()[-1] for row in capfd.readouterr().out.splitlines()[1:]}
    assert states == {f"softmax_{'_'.join(rows)}": "current" for rows in kinds}
    assert main(["clear", "softmax"]) == 0 and not list(cache.entries(quick))

    own = source._replace(name="shares_of_mine", path="shares_of_mine.cu")  # which is not registered in another process
    build.obtain(make_plan(own._replace(rows=kinds[0])))
    assert main(["clear", "shares_of_mine"]) == 0 and not list(cache.entries(quick))


def test_clear_leaves_alone_what_is_being_built(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry, _ = build.obtain(make_plan(answer(1)))
    with lock.locked(cache.lock_of(stand_in, entry.folder.name), "answer"):
        assert main(["clear"]) == 1
    assert "is being built: left alone" in capsys.readouterr().out and entry.folder.is_dir()


def test_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["where"]) == 0
    assert capsys.readouterr().out == f"{folder}  read, and built in\n"

    assert not folder.exists(), "it only looks"


@pytest.fixture
def private(folder: Path, tmp_path: Path) -> Path:
    """The folder that builds go to when the cache cannot be used."""
    return tmp_path / "temporary" / f"jitact-{os.geteuid()}"


def goes_to(capsys: pytest.CaptureFixture[str]) -> Path | None:
    """The folder that ``doctor`` reports for builds."""
    main(["doctor"])
    found = re.search(r"^ok +builds go to +(.*), \S+ GB free$", capsys.readouterr().out, re.MULTILINE)
    return Path(found[1]) if found else None


def test_where_names_the_folder_that_is_built_in_instead(
    folder: Path, private: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for named, why in (("/etc/passwd", "is no folder"), ("/etc/passwd/cache", "cannot be made (Not a directory)")):
        monkeypatch.setenv("JITACT_CACHE_DIR", named)
        assert main(["where"]) == 0
        first, second = capsys.readouterr().out.splitlines()
        assert first.startswith(f"{named}  not used: it {why}") and second == f"{private}  read, and built in"
        assert not private.exists() and goes_to(capsys) == private
    monkeypatch.setattr(folders, "_temporary", list)
    assert main(["where"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 and goes_to(capsys) is None


@root
def test_where_names_the_folder_that_is_built_in_instead_of_a_read_only_home(
    folder: Path, private: Path, mount: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JITACT_CACHE_DIR", str(mount("size=1m,ro,mode=755") / ".cache" / "jitact"))
    assert main(["where"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("not used: it cannot be made (Read-only file system)") and second == f"{private}  read, and built in"
    assert goes_to(capsys) == private


def test_clear_where_there_is_no_cache(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clear"]) == 0
    assert capsys.readouterr() == (f"{folder}: nothing to remove\n", "") and not folder.exists()


def test_builds_that_another_process_removes_meanwhile(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After they were read, and before the commands look at their size and age, or remove them."""
    entries = cache.entries

    def first_removed(folder: Path) -> list[cache.Entry]:
        found = list(entries(folder))
        for entry in found:
            if entry.build.name == "gone":
                shutil.rmtree(entry.folder)
        return found

    monkeypatch.setattr(cache, "entries", first_removed)
    monkeypatch.setattr("jitact.kernels.__main__._cached_names", lambda names: set())
    commands = {("list",): "\nkept ", ("clear", "--unused", "1"): "removed 0 builds,", ("clear",): "removed 1 build,"}
    for command, expected in commands.items():
        for name in ("gone", "kept"):
            build.obtain(make_plan(answer(1, name)))
        capsys.readouterr()
        assert main(command) == 0
        said = capsys.readouterr()
        assert expected in said.out and "gone" not in said.out and said.err == ""


@root
def test_clear_says_whose_the_cache_is(
    stand_in: Path, public: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JITACT_CACHE_DIR", str(public / "cache"))
    entry, _ = build.obtain(make_plan(answer(1)))
    capfd.readouterr()

    def by_another() -> None:
        assert main(["clear"]) == 1 and entry.folder.is_dir()

    as_nobody(by_another)
    assert capfd.readouterr() == ("", f"jitact: not cleared: {public / 'cache'} is not writable\n")
    os.chown(public / "cache", NOBODY, NOBODY)
    assert main(["clear"]) == 1 and main(["list"]) == 0
    why = f"{public / 'cache'} is not yours alone (belongs to user {NOBODY}); JITACT_TRUST_GROUP=1 trusts owner and group"
    said = capfd.readouterr()
    assert said.err == f"jitact: not cleared: {why}\njitact: not looked into: {why}\n"
    as_nobody(by_another)  # the folder belongs to that user now, the build in it to root
    assert f"jitact: not cleared: {entry.folder} (Permission denied)\n" in capfd.readouterr().err


@root
def test_clear_on_a_read_only_file_system(
    stand_in: Path, mount: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = mount("size=8m,mode=755")
    monkeypatch.setenv("JITACT_CACHE_DIR", str(place))
    in_child(lambda: build.obtain(make_plan(answer(1))))
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    assert main(["clear"]) == 1
    assert capsys.readouterr() == ("", f"jitact: not cleared: {place} is on a read-only file system\n")


def test_a_cache_that_is_not_used_is_named_where_nothing_can_be_built(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.write_text("")
    monkeypatch.setenv("JITACT_NO_BUILD", "1")
    with pytest.raises(BuildError, match=rf"not compiled yet \(looked in .*; {stand_in} is no folder\) and cannot be"):
        build.obtain(make_plan(answer(1)))


@pytest.mark.parametrize("command", ["build", "clear"])
def test_an_unknown_name_is_an_error_with_a_suggestion(folder: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "softsing"]) == 2
    said = capsys.readouterr()
    assert "did you mean 'softsign'" in said.err and said.err.count("\n") == 1 and said.out == ""


def test_clear_takes_the_names_that_list_shows_and_aliases(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("answer", "other", "relu", "gelu_bias"):
        build.obtain(make_plan(answer(1, name)))
    build.obtain(make_plan(answer(1, "other"), fast_math=True))
    for name in ("softmax", "softmax_bfloat16_float32_bool", "softmax_int8_float16_none", "softmax_of_mine"):
        build.obtain(make_plan(answer(1, name)))
    named = (("answer", 1), ("other_fast_math", 1), ("ReLU", 1), ("relu", 0), ("gelu+bias", 1), ("other", 1), ("softmax", 3))
    for name, removed in named:
        assert main(["clear", name]) == 0
        assert f"removed {removed} build" in capsys.readouterr().out, name
    assert [path.name.partition("-")[0] for path in (stand_in / ".locks").iterdir()] == ["softmax_of_mine"]
    assert main(["clear", "answer"]) == 2, "there is none any more, and no activation of that name"


@pytest.mark.parametrize("jobs", ["0", "-1", "many", "1.5", "\N{SUPERSCRIPT TWO}"])
def test_jobs_must_be_a_number(folder: Path, capsys: pytest.CaptureFixture[str], jobs: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["build", f"--jobs={jobs}", "softsign"])
    assert stopped.value.code == 2
    assert f"argument --jobs: must be a positive number, got {jobs!r}" in capsys.readouterr().err
    if jobs in ("0", "-1"):
        with pytest.raises(BuildError, match=f"jobs must be a positive number, got {jobs}"):
            prebuild.prebuild([make_plan(answer(1))], int(jobs))


@pytest.mark.parametrize(("arch", "expected"), [("nine", "no compute capability"), ("9.0", "built without CUDA")])
def test_archs_that_will_not_do(folder: Path, capsys: pytest.CaptureFixture[str], arch: str, expected: str) -> None:
    if torch.version.cuda and arch == "9.0":
        pytest.skip("this torch is built with CUDA")
    try:
        code = main(["build", "softsign", "--arch", arch])
    except SystemExit as stopped:
        code = stopped.code
    assert code == (2 if arch == "nine" else 1)
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
    of_rows = 2  # kernels, as softmin uses softmax's
    assert f"0 of {len(names()) + of_rows} activations" in said and said.endswith("all is well\n")
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
