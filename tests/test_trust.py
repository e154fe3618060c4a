"""Only what the user, root or trusted users have written is loaded, whatever other users do at the same time."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from building import NOBODY, answer, as_nobody, forward, in_child, kernel, lock_and_build, obtain, root

from jitact import kernels
from jitact.kernels import BuildError, CompileError
from jitact.kernels.loader import build, cache, folders, lock, trust
from jitact.kernels.loader.memory import Memory
from jitact.kernels.loader.plan import make_plan

pytest_plugins = ["building"]


@pytest.fixture
def shown(stand_in: Path, public: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for :func:`building.stand_in` that everybody can read."""
    monkeypatch.setenv("JITACT_CACHE_DIR", str(public / "cache"))
    return public / "cache"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_modes_do_not_depend_on_the_umask(shown: Path, umask: int) -> None:
    def build_two() -> None:
        os.umask(umask)
        obtain(1)
        with pytest.raises(CompileError):
            build.obtain(make_plan(answer(2, "broken")._replace(text="nonsense")))

    in_child(build_two)
    found = [shown, *shown.rglob("*")]
    names = {path.name for path in found}
    assert {"build.json", "jitact_answer.so", "machine.json", ".locks", ".logs", ".staging"} <= names
    assert {path: oct(mode(path)) for path in found if path.is_file() and mode(path) != 0o644} == {}
    expected = {folder: 0o700 if folder.name == ".locks" else 0o755 for folder in found if folder.is_dir()}
    assert {folder: mode(folder) for folder in expected} == expected


def test_what_an_earlier_version_left_open_is_closed(shown: Path) -> None:
    entry, _ = obtain(1)
    shutil.rmtree(entry.folder)
    left = [shown / ".locks", shown / ".staging", *(shown / ".locks").iterdir()]
    for path in left:
        path.chmod(0o777)
    obtain(1)
    assert not [path for path in left if mode(path) & 0o022]


def evil(entry: cache.Entry, where: Path, content: bytes) -> None:
    """Writes another library into ``where``, with matching metadata."""
    (where / entry.library.name).write_bytes(content)
    (where / cache.RECORD).write_text(entry.build._replace(sha256=cache.checksum(content)).to_json())


@root
@pytest.mark.parametrize("rights", [0o666, 0o664, 0o644])
def test_what_others_rewrote_is_not_loaded(shown: Path, rights: int, caplog: pytest.LogCaptureFixture) -> None:
    entry, other = obtain(1)[0], obtain(2)[0]
    files = [entry.library, entry.folder / cache.RECORD]
    for file in files:
        file.chmod(rights)
        os.chown(file, 0, NOBODY)  # owned by the group of the unprivileged user
    if rights & 0o020:
        as_nobody(lambda: evil(entry, entry.folder, other.content))
        assert obtain(1)[1], "made again"
        assert "is not trusted: build.json can be written to by " in caplog.text
        assert [mode(file) for file in files] == [0o644, 0o644]
    else:
        with pytest.raises(AssertionError):
            as_nobody(lambda: evil(entry, entry.folder, other.content))
    assert not obtain(1)[1], "found"


def whole(entry: cache.Entry) -> list[Path]:
    return [entry.folder, entry.library, entry.folder / cache.RECORD]


FOREIGN = {
    "library of another user": lambda entry: os.chown(entry.library, NOBODY, NOBODY),
    "record of another user": lambda entry: os.chown(entry.folder / cache.RECORD, NOBODY, NOBODY),
    "folder of another user": lambda entry: os.chown(entry.folder, NOBODY, NOBODY),
    "all of another user": lambda entry: [os.chown(path, NOBODY, NOBODY) for path in whole(entry)],
    "library of a group": lambda entry: entry.library.chmod(0o664),
    "record of a group": lambda entry: (entry.folder / cache.RECORD).chmod(0o664),
    "folder of a group": lambda entry: entry.folder.chmod(0o775),
    "folder of everybody": lambda entry: entry.folder.chmod(0o757),
    "library is a link": lambda entry: link(entry.library),
    "record is a link": lambda entry: link(entry.folder / cache.RECORD),
    "folder is a link": lambda entry: link(entry.folder),
}


def link(path: Path) -> None:
    """Moves a file or folder, and puts a symbolic link in its place."""
    elsewhere = path.rename(path.parent / f"{path.name}.elsewhere")
    path.symlink_to(elsewhere)


@root
@pytest.mark.parametrize("how", FOREIGN)
def test_what_others_could_have_written_is_made_again(shown: Path, how: str) -> None:
    entry, _ = obtain(1)
    FOREIGN[how](entry)
    found = cache.read(entry.folder)
    assert found is None or found.problem
    assert obtain(1)[1] and not obtain(1)[1]
    assert all(path.lstat().st_uid == 0 and not path.is_symlink() and not mode(path) & 0o022 for path in whole(entry))


@root
def test_a_user_believes_root(shown: Path) -> None:
    entry, _ = obtain(1)
    as_nobody(lambda: _assert(cache.read(entry.folder) == entry and folders.readable() == [shown]))
    for path in whole(entry):
        os.chown(path, 12345, 12345)
    as_nobody(lambda: _assert(cache.read(entry.folder).problem == "not trusted: its folder belongs to user 12345"))


def _assert(fact: bool) -> None:
    assert fact


@root
def test_a_build_that_may_not_be_read_is_not_called_damaged(shown: Path) -> None:
    entry, _ = obtain(1)
    (entry.folder / cache.RECORD).chmod(0o600)
    as_nobody(lambda: _assert(cache.read(entry.folder).problem == "not readable: build.json (Permission denied)"))
    entry.folder.chmod(0o700)
    as_nobody(lambda: _assert(cache.read(entry.folder).problem == "not readable: its folder (Permission denied)"))
    shown.chmod(0o700)
    as_nobody(lambda: _assert(folders.explain()[0] == (shown, "not used: it cannot be read (Permission denied)")))


def _records(entry: cache.Entry) -> dict[str, Callable[[Path], object]]:
    """What could be in place of a record."""
    described = json.loads(entry.build.to_json())
    return {
        "a pipe": os.mkfifo,
        "a folder": Path.mkdir,
        "a large file": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
        "deeply nested": lambda path: path.write_text("[" * 60000),
        "a long number": lambda path: path.write_text("9" * 60000),
        "no text": lambda path: path.write_bytes(b"\xff" * 100),
        "a half character": lambda path: path.write_text(json.dumps(described | {"library": "\ud800"})),
        **{
            f"{name}: {value!r}": lambda path, name=name, value=value: path.write_text(json.dumps(described | {name: value}))
            for name, value in [
                ("library", "../answer.so"),
                ("library", "/etc/passwd"),
                ("library", ".."),
                ("library", ""),
                ("library", "a\0b"),
                ("library", 3),
                ("archs", ["hopper"]),
                ("archs", [3, None]),
                ("archs", 90),
                ("created", "yesterday"),
                ("seconds", None),
                ("compiler", ["c++"]),
                ("nvcc", 13.0),
                ("sha256", None),
                ("more", 1),
            ]
        },
    }


def test_any_record_is_survived(shown: Path) -> None:
    entry, _ = obtain(1)
    good = (entry.folder / cache.RECORD).read_text()
    for what, put in _records(entry).items():
        record = entry.folder / cache.RECORD
        record.unlink()
        put(record)
        started = time.monotonic()
        assert cache.read(entry.folder).problem.startswith("damaged: build.json"), what
        assert list(cache.builds(shown, "answer")) == [] and build.find(make_plan(answer(1))) is None, what
        assert time.monotonic() - started < 5, what
        record.rmdir() if record.is_dir() else record.unlink()
        record.write_text(good)
        record.chmod(0o644)
    assert cache.read(entry.folder) == entry


def test_a_folder_that_is_replaced_while_it_is_read(shown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is read from the same folder as its record."""
    entry, other = obtain(1)[0], obtain(2)[0]
    (shown / "evil").mkdir()
    evil(entry, shown / "evil", other.content)
    from_json = cache.Build.from_json

    def replace_then_parse(text: str) -> cache.Build:
        entry.folder.rename(shown / "good")
        (shown / "evil").rename(entry.folder)
        return from_json(text)

    monkeypatch.setattr(cache.Build, "from_json", replace_then_parse)
    assert cache.read(entry.folder) == entry


@root
def test_a_cache_that_is_replaced_before_it_is_read(shown: Path, public: Path) -> None:
    """The folder was checked, but is replaced by another one before a build is read."""
    entry, other = obtain(1)[0], obtain(2)[0]
    assert shown in folders.readable()
    shutil.copytree(shown, public / "evil")
    evil(entry, public / "evil" / entry.folder.name, other.content)
    os.chown(public / "evil", NOBODY, NOBODY)
    shown.rename(public / "good")
    (public / "evil").rename(shown)
    assert cache.read(entry.folder).problem == f"not trusted: its folder belongs to user {NOBODY}"
    assert list(cache.builds(shown, "answer")) == [] and Memory([shown]).get(next(iter(_kept(shown)))) is None


def _kept(folder: Path) -> dict:
    return json.loads((folder / "machine.json").read_text())


@root
@pytest.mark.parametrize("how", ["of everybody", "of a group", "of another user", "a link"])
def test_what_others_say_of_compilers_is_not_believed(shown: Path, how: str) -> None:
    """A program is run from the cached toolkit folder of nvcc."""
    version = make_plan(answer(1)).cxx.version
    file, kept = shown / "machine.json", _kept(shown)  # also those of nvcc, if there is a GPU
    key = next(key for key, facts in kept.items() if isinstance(facts, dict) and facts["version"] in version)
    if how == "a link":
        link(file)
    elif how == "of another user":
        os.chown(file, NOBODY, NOBODY)
        as_nobody(lambda: file.write_text(json.dumps({key: {"version": "evil"}})))
    else:
        os.chown(file, 0, NOBODY)
        file.chmod(0o666 if how == "of everybody" else 0o664)
        as_nobody(lambda: file.write_text(json.dumps({key: {"version": "evil"}})))
    assert Memory([shown]).get(key) is None
    assert make_plan(answer(1)).cxx.version == version
    assert _kept(shown) == kept and mode(file) == 0o644 and not file.is_symlink(), "and is written anew"


@pytest.mark.parametrize("facts", ["[]", '"text"', "3", "{}", '{"version": "1"}'])
def test_odd_facts_of_tools_are_asked_for_again(shown: Path, facts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = make_plan(answer(1)).cxx
    (shown / "machine.json").write_text(json.dumps({key: json.loads(facts) for key in _kept(shown)}))
    found = make_plan(answer(1)).cxx
    assert found.path == known.path and found.version == ("1" if "version" in facts else known.version)


def way(public: Path, rights: int, owner: int = 0) -> Path:
    """A cache below a folder with these rights."""
    public.chmod(rights)
    os.chown(public, owner, owner)
    (public / "mine").mkdir()
    return public / "mine" / "cache"


@root
@pytest.mark.parametrize(
    ("rights", "owner", "why"),
    [
        (0o755, 0, None),
        (0o1777, 0, None),
        (0o777, 0, "can be written to by everybody"),
        (0o775, 0, "can be written to by group 0"),
        (0o755, NOBODY, f"belongs to user {NOBODY}"),
        (0o1777, NOBODY, f"belongs to user {NOBODY}"),
    ],
)
def test_who_can_move_the_cache_can_replace_it(
    stand_in: Path, public: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rights: int, owner: int, why: str | None
) -> None:
    place = way(public, rights, owner)
    expected = None if why is None else f"can be replaced by others: {public} {why}"
    links = tmp_path / "link"
    links.symlink_to(place.parent)
    for named in (place, links / "cache", links / ".." / "mine" / "cache"):
        monkeypatch.setenv("JITACT_CACHE_DIR", str(named))
        found = folders.problem(named.absolute(), writing=True)
        assert (found and found.partition(";")[0]) == expected
    monkeypatch.setenv("JITACT_CACHE_DIR", str(place))
    assert not place.exists(), "nothing is made to find that out"
    entry, _ = obtain(1)
    assert entry.folder.parent == (tmp_path / "temporary" / f"jitact-{os.geteuid()}" if why else place)


@root
def test_a_link_of_another_user_in_a_sticky_folder(public: Path) -> None:
    (public / "sticky").mkdir()
    (public / "sticky").chmod(0o1777)
    (public / "mine").mkdir()
    as_nobody(lambda: (public / "sticky" / "cache").symlink_to(public / "mine"))
    path = public / "sticky" / "cache"
    assert trust.replaceable(path) == f"can be replaced by others: {path} belongs to user {NOBODY}"
    (public / "sticky" / "own").symlink_to(public / "mine")
    assert trust.replaceable(public / "sticky" / "own") is None


def test_links_in_a_circle_are_an_error(public: Path) -> None:
    (public / "a").symlink_to("b")
    (public / "b").symlink_to("a")
    for path in (public / "a", public / "a" / "cache"):
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            trust.replaceable(path)
        assert folders.problem(path, writing=True).startswith("cannot be ")


@pytest.mark.parametrize("rights", [0o777, 0o1777, 0o775])
@pytest.mark.parametrize("variable", ["JITACT_CACHE_DIR", "TORCH_EXTENSIONS_DIR"])
def test_an_open_folder_gets_a_private_one(
    stand_in: Path, public: Path, monkeypatch: pytest.MonkeyPatch, rights: int, variable: str
) -> None:
    """Such as a volume that everybody in a container can write to, or a group's scratch folder."""
    monkeypatch.delenv("JITACT_CACHE_DIR")
    monkeypatch.setenv(variable, str(public))
    public.chmod(rights)
    entry, _ = obtain(1)
    own = folders.configured().exists() and variable == "TORCH_EXTENSIONS_DIR"  # it can be used in a sticky folder
    assert own is (rights == 0o1777 and variable == "TORCH_EXTENSIONS_DIR")
    assert entry.folder.parent == (public / "jitact" if own else public / f"jitact-{os.geteuid()}")
    assert mode(entry.folder.parent) == (0o755 if own else 0o700)
    assert obtain(1) == (entry, False)


MOVING = """#!/bin/sh
# Gives the cache's name to another folder while this compiler runs, as one who can write above it could.
case "$*" in *" -c "*)
  here=$(pwd -P)
  case "$here" in {private}/*)
    mv {private} {private}.moved
    mkdir -p "$here"
    printf 'extern "C" int answer() {{ return 666; }}' > "$here/main.cpp"
    exec {cxx} "$@"
  esac
esac
exec {cxx} "$@"
"""


def test_a_folder_that_is_replaced_while_compilers_run(
    stand_in: Path, public: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The compilers continue in the folder in which they were started."""
    private = public / f"jitact-{os.geteuid()}"
    moving = tmp_path / "c++"
    moving.write_text(MOVING.format(private=private, cxx=shutil.which("c++")))
    moving.chmod(0o755)
    public.chmod(0o777)
    monkeypatch.setenv("JITACT_CACHE_DIR", str(public))
    monkeypatch.setenv("CXX", str(moving))
    entry, made = build.obtain(make_plan(answer(1)))
    assert made and (public / f"{private.name}.moved").is_dir(), "it was moved"
    (tmp_path / "loaded.so").write_bytes(entry.content)
    program = f"import ctypes; print(ctypes.CDLL({str(tmp_path / 'loaded.so')!r}).answer())"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "1\n"


def publish(shared: Path, entry: cache.Entry) -> None:
    """The steps after a build is compiled."""
    with lock.locked(cache.lock_of(shared, entry.folder.name), "answer"), cache.staging(shared, entry.folder.name) as staging:
        cache.publish(shared, staging, entry.build, entry.content)


@root
def test_a_group_that_is_trusted_shares_a_cache(stand_in: Path, public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry, other = obtain(1)[0], obtain(2)[0]
    place = public / "shared"
    place.mkdir()
    os.chown(place, 0, NOBODY)
    place.chmod(0o2775)
    monkeypatch.setenv("JITACT_CACHE_DIR", str(place))
    assert place not in folders.readable() and folders.destination() == place / "jitact-0"
    assert "JITACT_TRUST_GROUP=1 trusts owner and group" in folders.problem(place, writing=True)

    monkeypatch.setenv("JITACT_TRUST_GROUP", "1")
    in_child(lambda: (os.umask(0o077), publish(place, entry)))
    as_nobody(lambda: (os.umask(0o077), publish(place, other), _assert(folders.destination() == place)))
    assert (place / other.folder.name).stat().st_uid == NOBODY
    for build_ in (entry, other):
        assert cache.read(place / build_.folder.name).content == build_.content
        as_nobody(lambda build_=build_: _assert(cache.read(place / build_.folder.name).content == build_.content))
    as_nobody(lambda: publish(place, entry))
    assert (place / entry.folder.name).stat().st_uid == NOBODY, "they replace each other's builds"
    as_nobody(lambda: _assert(cache.remove(cache.read(place / entry.folder.name))))

    monkeypatch.setenv("JITACT_TRUST_GROUP", "0")
    assert cache.read(place / other.folder.name).problem == "not trusted: its folder can be written to by group 65534"
    monkeypatch.setenv("JITACT_TRUST_GROUP", "1")
    place.chmod(0o2777)
    assert "can be written to by everybody" in folders.problem(place, writing=False), "everybody is trusted never"
    assert "JITACT_TRUST_GROUP" not in folders.problem(place, writing=False)


@root
def test_locks_are_nothing_to_others(shown: Path) -> None:
    """Whoever can open a lock can hold it, and whoever can write to it could have waiting processes raise an error."""
    shown.mkdir()
    path = cache.lock_of(shown, make_plan(answer(1)).title)
    with lock.locked(path, "answer"):

        def open_it() -> None:
            with pytest.raises(PermissionError):
                os.open(path, os.O_RDONLY)

        as_nobody(open_it)


@root
@pytest.mark.parametrize("owner", [0, NOBODY])
def test_a_note_in_a_lock_is_believed_only_from_its_holder(shown: Path, owner: int) -> None:
    shown.mkdir()
    path = cache.lock_of(shown, make_plan(answer(1)).title)
    held = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.fchown(held, owner, owner)
    fcntl.flock(held, fcntl.LOCK_EX)
    os.pwrite(held, b'{"attempt": "a", "pid": 1, "host": "h"}', 0)
    outcome: list[str] = []
    waiting = threading.Thread(target=lambda: outcome.append(lock_and_build(path)))
    waiting.start()
    time.sleep(0.2)
    os.ftruncate(held, 0)
    os.pwrite(held, b'{"attempt": "a", "failed": "error: no"}', 0)
    os.close(held)
    waiting.join()
    assert outcome == ["error: no" if owner == 0 else "built"]


@pytest.mark.parametrize(
    "note",
    ['{"failed": "evil"}', '{"failed": "evil", "attempt": "a"}', '{"failed": {"at": 9e9, "message": "evil"}}', "[" * 9999],
)
def test_what_failed_before_is_tried_again(shown: Path, note: str) -> None:
    """Independently of clocks, which may be another host's."""
    shown.mkdir()
    cache.lock_of(shown, make_plan(answer(1)).title).write_text(note)
    assert obtain(1)[1]


def test_a_lock_that_is_a_link_is_not_followed(shown: Path, tmp_path: Path) -> None:
    shown.mkdir()
    precious = tmp_path / "precious"
    precious.write_text("mine")
    cache.lock_of(shown, make_plan(answer(1)).title).symlink_to(precious)
    with pytest.raises(BuildError, match="Too many levels of symbolic links"):
        build.obtain(make_plan(answer(1)))
    log = folders.make(shown, shown / ".logs") / "answer-0.log"
    log.symlink_to(precious)
    assert cache.write_log(shown, "answer-0", "said") == log and log.read_text() == "said"
    assert precious.read_text() == "mine"


def test_only_compilers_are_ended(shown: Path) -> None:
    """A shell in a build's folder keeps running, as does a process that was started elsewhere during the build."""
    shown.mkdir()
    left = folders.make(shown, shown / ".staging") / f"{make_plan(answer(1)).title}.left"
    left.mkdir()
    marked = {**os.environ, cache.MARK: left.name}
    compiler = subprocess.Popen(["sleep", "60"], cwd=left, env=marked)
    others = [
        subprocess.Popen(["sleep", "60"], cwd=left),
        subprocess.Popen(["sleep", "60"], cwd=left, env={**os.environ, cache.MARK: f"{left.name}2"}),
        subprocess.Popen(["sleep", "60"], cwd=shown, env=marked),
    ]
    try:
        obtain(1)
        assert compiler.wait(timeout=5) == -9 and not left.exists()
        assert [other.poll() for other in others] == [None] * 3
    finally:
        for process in (compiler, *others):
            process.kill()
            process.wait()


@root
def test_processes_of_other_users_go_on(shown: Path) -> None:
    shown.mkdir()
    left = folders.make(shown, shown / ".staging") / f"{make_plan(answer(1)).title}.left"
    left.mkdir()
    other = subprocess.Popen(["sleep", "60"], cwd=left, env={**os.environ, cache.MARK: left.name}, user=NOBODY)
    try:
        obtain(1)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@root
def test_what_another_user_left_in_the_way_means_another_folder(shown: Path) -> None:
    """As after a command that root has run on a user's cache."""
    entry, _ = obtain(1)
    plan = make_plan(answer(2))
    os.chown(shown, NOBODY, NOBODY)
    temporary = shown.parent / "temporary"
    temporary.mkdir()
    temporary.chmod(0o1777)

    def in_the_way() -> None:
        folders._temporary = lambda: [temporary]
        made = build._make_in
        tried = []

        def make_in(folder: Path, *arguments: object) -> object:
            tried.append(folder)
            return made(folder, *arguments) if folder == shown else "made"

        build._make_in = make_in
        assert build._make(plan, None) == "made"
        assert tried == [shown, temporary / f"jitact-{NOBODY}"]

    as_nobody(in_the_way)
    assert cache.read(entry.folder).problem, "what is another user's is not root's either"


def test_the_copy_in_memory_can_be_changed_by_nobody(quick: Path) -> None:
    """A child inherits its descriptor, even one that drops root's privileges."""
    library = kernels.load(kernel())
    opened = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    copies = [fd for fd in opened if os.path.lexists(fd) and f"memfd:{library.path.name}" in os.readlink(fd)]
    assert len(copies) == 1
    descriptor = int(copies[0].name)
    assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
    for change in (lambda: os.pwrite(descriptor, b"\xcc", 4096), lambda: os.truncate(descriptor, 0)):
        with pytest.raises(PermissionError):
            change()
    assert forward(library, torch.ones(1)).tolist() == [0.5]


@root
def test_a_user_without_a_home_has_no_cache_in_the_current_folder(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JITACT_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(folders, "_temporary", lambda: [public])

    def check() -> None:
        os.setuid(123456)
        assert folders.configured() == public / "jitact-123456"

    in_child(check)
    monkeypatch.setenv("JITACT_CACHE_DIR", "~nosuchuser/cache")
    with pytest.raises(BuildError, match="JITACT_CACHE_DIR=~nosuchuser/cache names a home folder that is not known"):
        folders.configured()
