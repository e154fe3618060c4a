"""Builds on disk: damaged ones, unusable folders, locks, and leftovers of killed builds."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from building import answer, forward, in_child, kernel, lock_and_build, obtain, root

from jitact import kernels
from jitact.kernels import BuildError, CompileError, NoSpaceError
from jitact.kernels.loader import build, cache, folders, load, lock, log
from jitact.kernels.loader.memory import Memory
from jitact.kernels.loader.plan import make_plan

pytest_plugins = ["building"]


DAMAGE = {
    "truncated": lambda entry: os.truncate(entry.library, 1000),
    "empty": lambda entry: os.truncate(entry.library, 0),
    "a byte changed": lambda entry: _write_at(entry.library, 5000, b"\xff\x00"),
    "foreign": lambda entry: shutil.copyfile(torch._C.__file__, entry.library),
    "no library": lambda entry: entry.library.unlink(),
    "a folder for a library": lambda entry: (entry.library.unlink(), entry.library.mkdir()),
    "no record": lambda entry: (entry.folder / cache.RECORD).unlink(),
    "half a record": lambda entry: os.truncate(entry.folder / cache.RECORD, 30),
    "another record": lambda entry: (entry.folder / cache.RECORD).write_text('{"name": 3}'),
    "an old record": lambda entry: _change_record(entry, key="0" * 16),
    "a path for a library": lambda entry: _change_record(entry, library="../../evil.so"),
    "a file for a folder": lambda entry: (shutil.rmtree(entry.folder), entry.folder.write_text("")),
}


def _write_at(path: Path, offset: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def _change_record(entry: cache.Entry, **changes: object) -> None:
    record = entry.folder / cache.RECORD
    record.write_text(json.dumps(json.loads(record.read_text()) | changes))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_build_is_made_again(stand_in: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    entry, made = obtain()
    assert made
    DAMAGE[damage](entry)
    assert obtain()[1], "made again"
    assert not obtain()[1], "and found from then on"
    assert [folder.name for folder in stand_in.iterdir() if not folder.name.startswith((".", "machine"))] == [entry.folder.name]
    if damage != "a file for a folder":
        assert "is damaged" in caplog.text


def test_what_will_not_load_is_made_again_once(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries with the right checksum that cannot be used: for another machine, or without the entry point."""
    for foreign in (b"\x7fELF\x02\x01\x01" + b"\0" * 9 + b"\x03\0\xb7\0" + b"\0" * 5000, None):
        source = kernel()
        plan = make_plan(source)
        entry, _ = build.obtain(plan)
        if foreign is None:  # a library that loads, but has no entry point
            shutil.copyfile(torch._C.__file__, entry.library)
        else:
            entry.library.write_bytes(foreign)
        digest = cache.checksum(entry.library.read_bytes())
        _change_record(entry, sha256=digest)
        assert cache.read(entry.folder).problem is None
        library = kernels.load(source)
        assert torch.equal(forward(library, torch.ones(3)), torch.full((3,), 0.5))
        assert cache.read(entry.folder).build.sha256 != digest

    def fail(*_: object) -> None:
        raise OSError("wrong ELF class")

    monkeypatch.setattr(load, "_open", fail)
    with pytest.raises(BuildError, match="cannot be loaded: wrong ELF class"):
        kernels.load(kernel())


def test_a_build_made_by_other_compilers_serves_where_there_are_none(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry, _ = obtain()
    _change_record(entry, compiler="another compiler; another libc")
    moved = entry.folder.rename(entry.folder.parent / f"answer-{'1' * 16}")
    _change_record(entry._replace(folder=moved), key="1" * 16)
    assert obtain()[1], "with a compiler of its own, a machine has builds of its own"
    shutil.rmtree(entry.folder)

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert make_plan(answer(1)).missing.startswith("no C++ compiler")
    assert build.obtain(make_plan(answer(1))) == (cache.read(moved), False)
    with pytest.raises(BuildError, match=r"not compiled yet .* and cannot be: no C\+\+ compiler"):
        build.obtain(make_plan(answer(2)))


@pytest.mark.parametrize(("level", "runs"), [("DEFAULT", True), ("AVX512", False)])
def test_a_build_for_an_older_processor_serves(stand_in: Path, monkeypatch: pytest.MonkeyPatch, level: str, runs: bool) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: level)
    obtain()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setenv("JITACT_NO_BUILD", "1")
    if runs:
        assert build.obtain(make_plan(answer(1)))[0].build.cpu == level
    else:
        with pytest.raises(BuildError, match="not compiled yet"):
            build.obtain(make_plan(answer(1)))


def test_of_builds_for_older_processors_the_best_serves(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it was made before the others."""
    for level in ("AVX512", "AVX2", "DEFAULT"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda level=level: level)
        obtain()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setenv("JITACT_NO_BUILD", "1")
    for level in ("AVX512", "AVX2", "DEFAULT"):
        entry, _ = build.obtain(make_plan(answer(1)))
        assert entry.build.cpu == level
        cache.remove(entry)


def test_where_builds_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("JITACT_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert folders.configured() == tmp_path / "home" / ".cache" / "jitact"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert folders.configured() == tmp_path / "xdg" / "jitact"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "torch"))
    assert folders.configured() == tmp_path / "torch" / "jitact"
    monkeypatch.setenv("JITACT_CACHE_DIR", "~/mine")
    assert folders.configured() == tmp_path / "home" / "mine"


@pytest.fixture
def private(folder: Path, tmp_path: Path) -> Path:
    """The folder that is used if the configured cache cannot be."""
    return tmp_path / "temporary" / f"jitact-{os.geteuid()}"


def test_folders_relative_to_one_that_was_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setenv("TMPDIR", "temporary")
    monkeypatch.setenv("JITACT_CACHE_DIR", "cache")
    assert folders.configured() == gone / "cache" and folders._temporary()[0] == gone / "temporary"
    gone.rmdir()
    assert folders._temporary() == [Path("/var/tmp"), Path("/dev/shm")]
    with pytest.raises(BuildError, match="JITACT_CACHE_DIR=cache is in the current directory, which was removed"):
        folders.configured()


def test_a_file_in_the_way_means_another_folder(stand_in: Path, private: Path, caplog: pytest.LogCaptureFixture) -> None:
    stand_in.write_text("")
    entry, _ = obtain()
    assert entry.folder.parent == private and stat.S_IMODE(private.stat().st_mode) == 0o700
    assert f"keeping compiled kernels in {private}" in caplog.text and str(stand_in) in caplog.text
    assert obtain() == (entry, False)


def test_a_folder_open_to_all_gets_a_private_one_inside(stand_in: Path) -> None:
    stand_in.mkdir()
    stand_in.chmod(0o777)
    entry, _ = obtain()
    inside = stand_in / f"jitact-{os.geteuid()}"
    assert entry.folder.parent == inside and stat.S_IMODE(inside.stat().st_mode) == 0o700


@root
@pytest.mark.parametrize("trap", ["another's", "open", "link"])
def test_a_folder_that_another_user_made_is_not_used(stand_in: Path, private: Path, tmp_path: Path, trap: str) -> None:
    stand_in.write_text("")
    if trap == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        private.symlink_to(tmp_path / "elsewhere")
    else:
        private.mkdir(mode=0o700)
        if trap == "another's":
            os.chown(private, 65534, 65534)
        else:
            private.chmod(0o777)
    assert private not in folders.readable()
    with pytest.raises(BuildError, match=r"no folder to keep compiled kernels in(.*\n)+.* is (not yours alone|no folder)"):
        next(folders.writable())


@root
def test_anothers_cache_is_used_only_if_named_and_trusted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "jitact").mkdir()
    os.chown(tmp_path / "jitact", 65534, 65534)
    for name in ("JITACT_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for trusts, name in itertools.product(("0", "1"), ("XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR", "JITACT_CACHE_DIR")):
        with monkeypatch.context() as patch:
            patch.setenv("JITACT_TRUST_GROUP", trusts)
            patch.setenv(name, str(tmp_path / "jitact" if name == "JITACT_CACHE_DIR" else tmp_path))
            assert folders.configured() == tmp_path / "jitact"
            assert (folders.configured() in folders.readable()) is (trusts == "1" and name == "JITACT_CACHE_DIR")


@root
def test_a_read_only_cache_serves_what_it_holds(
    stand_in: Path, mount: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, private: Path
) -> None:
    place = mount("size=8m")
    monkeypatch.setenv("JITACT_CACHE_DIR", str(place / "cache"))
    in_child(lambda: obtain(1))
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    assert not obtain(1)[1]
    assert obtain(2)[0].folder.parent == private
    assert folders.explain()[0][1].startswith("only read: it is on a read-only file system")


@root
def test_a_cache_that_runs_no_programs_is_not_used(
    stand_in: Path,
    mount: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    private: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("JITACT_CACHE_DIR", str(mount("size=8m,noexec")))
    assert obtain()[0].folder.parent == private
    assert "noexec" in caplog.text


@root
def test_a_full_disk(stand_in: Path, mount: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = mount("size=1m") / "cache"
    monkeypatch.setenv("JITACT_CACHE_DIR", str(place))
    monkeypatch.setattr(folders, "_candidates", lambda: [place])
    place.mkdir()
    filler = place.parent / "filler"
    for room in (0, 8, 16, 32, 40, 48):  # KB: the disk is full at the lock, the sources, the objects, the library, ...
        with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 4096)
        os.truncate(filler, filler.stat().st_size - room * 1024)
        with pytest.raises(NoSpaceError, match="no space left"):
            build.obtain(make_plan(answer(room)))
        assert not list(cache.entries(place))
        filler.unlink()
        assert obtain(room)[1]
        shutil.rmtree(place)
        place.mkdir()


@root
def test_a_full_disk_means_another_folder(
    stand_in: Path,
    mount: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    private: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("JITACT_CACHE_DIR", str(mount("size=16k")))
    assert obtain()[0].folder.parent == private
    assert "no space left" in caplog.text


@root
def test_another_user_without_a_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a user ID without a home folder."""
    for name in ("JITACT_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        os.chmod(temporary, 0o1777)
        monkeypatch.setattr(folders, "_temporary", lambda: [Path(temporary)])
        expected = Path(temporary) / "jitact-65534"

        def check() -> None:
            os.setgid(65534)
            os.setuid(65534)
            assert next(folders.writable()) == expected

        in_child(check)
        assert stat.S_IMODE(expected.stat().st_mode) == 0o700


def test_the_lock_of_a_dead_process_is_free(stand_in: Path) -> None:
    path = make_lock(stand_in)
    child = os.fork()
    if not child:
        with lock.locked(path, "answer"):
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    with lock.try_locked(path) as alone:
        assert alone


def make_lock(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return cache.lock_of(folder, make_plan(answer(1)).title)


def test_a_lock_does_not_outlive_its_holder_in_a_child(stand_in: Path) -> None:
    """A child that is forked during a build inherits the lock's descriptor."""
    path = make_lock(stand_in)
    ended, end = os.pipe()
    forked, report = os.pipe()
    holder = os.fork()
    if not holder:
        with lock.locked(path, "answer"):
            if not os.fork():
                os.close(end)
                os.write(report, b".")
                os.read(ended, 1)  # until this test ends
                os._exit(0)
            os.read(forked, 1)
            os.kill(os.getpid(), 9)
    os.waitpid(holder, 0)
    with lock.try_locked(path) as alone:
        assert alone
    os.close(end)


def test_waiting_has_a_bound(stand_in: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    path = make_lock(stand_in)
    monkeypatch.setattr(lock, "WAIT_LIMIT", 0.5)
    monkeypatch.setattr(lock, "_SAY_AFTER", 0.2)
    log.configure()
    expected = f"waited .* for process {os.getpid()} on .*, which compiles answer"
    with lock.locked(path, "answer"), pytest.raises(BuildError, match=expected) as raised:
        build.obtain(make_plan(answer(1)))
    assert "JITACT_CACHE_DIR" in str(raised.value)
    assert f"waiting for process {os.getpid()}" in caplog.text
    obtain()


def test_those_who_wait_get_the_compilers_error(stand_in: Path) -> None:
    path, outcome = make_lock(stand_in), []
    waiting = threading.Thread(target=lambda: outcome.append(lock_and_build(path)))
    with pytest.raises(CompileError), lock.locked(path, "answer"):
        waiting.start()
        time.sleep(0.2)
        raise CompileError("k.cu:3: error")
    waiting.join()
    assert outcome == ["k.cu:3: error"], "it does not compile the same again"
    assert lock_and_build(path) == "built", "whoever comes later does"


def test_a_failure_before_the_holder_is_not_the_holders(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has got the lock, and is killed before it says so, leaves the note of the one before."""
    path = make_lock(stand_in)
    with pytest.raises(CompileError), lock.locked(path, "answer"):
        raise CompileError("k.cu:3: error")
    holder = lock._try(path)
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: lock._release(holder))
    assert lock_and_build(path) == "built"


def test_without_locks_builds_go_on(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert obtain()[1] and not obtain()[1]


def test_clear_at_any_time_does_not_disturb_a_build(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It removes the folders of locks and of builds in progress if they are empty, between any two lines of the loader."""
    monkeypatch.setattr(cache, "_end_compilers", lambda folder: False)  # there are none, and looking takes time
    stand_in.mkdir()
    title, before, cleared, line = "answer-0123456789abcdef", sys.gettrace(), True, 0
    while cleared:
        passed, cleared, line = 0, False, line + 1

        def clear_once(frame: FrameType, event: str, _: object) -> Callable | None:
            nonlocal passed, cleared
            passed += event == "line"
            if passed == line and not cleared:
                cleared = True
                cache.tidy(stand_in)
            return clear_once if frame.f_code.co_filename.startswith(str(loader)) else None

        loader = Path(cache.__file__).parent
        sys.settrace(clear_once)
        try:
            locked = lock.locked(cache.lock_of(stand_in, title), "answer")
            with locked as alone, cache.staging(stand_in, title, alone=alone) as folder:
                sys.settrace(before)
                assert alone and folder.is_dir()
        finally:
            sys.settrace(before)
        cache.tidy(stand_in)
    assert line > 100 and not list(stand_in.iterdir())


def test_what_killed_builds_left_is_cleared_away(stand_in: Path) -> None:
    """Including compilers that still run there, which are killed."""
    stand_in.mkdir()
    mine, others = make_plan(answer(1)).title, make_plan(answer(2)).title
    base = stand_in / ".staging"
    base.mkdir()
    orphans = []
    for title in (mine, others):
        left = base / f"{title}.abandoned"
        left.mkdir()
        orphans.append(subprocess.Popen(["sleep", "60"], cwd=left, env={**os.environ, cache.MARK: left.name}))
    at_work = base / f"{make_plan(answer(3)).title}.at_work"
    at_work.mkdir()
    with lock.locked(cache.lock_of(stand_in, make_plan(answer(3)).title), "answer"):
        obtain(1)
        assert list(base.iterdir()) == [at_work], "what is locked is at work"
        assert cache.at_work(stand_in) == [make_plan(answer(3)).title]
    assert [orphan.wait(timeout=5) for orphan in orphans] == [-9, -9]
    obtain(2)
    assert not list(base.iterdir())


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"tool /usr/bin/c++": 3}', "\0" * 100])
def test_a_damaged_memory_is_forgotten(stand_in: Path, content: str) -> None:
    stand_in.mkdir()
    (stand_in / "machine.json").write_text(content)
    obtain()
    assert Memory([stand_in]).get("gpu 0x0000") is None
    assert "version" in json.dumps(json.loads((stand_in / "machine.json").read_text()))
