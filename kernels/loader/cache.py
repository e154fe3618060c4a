"""Builds on disk: found, checked, published by rename, listed and removed.

A folder holds one folder for each build, ``<name>-<key>``, with the library and what is known of it in build.json, and
beside them .staging (builds at work), .locks and .logs (of builds that failed).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from . import folders, trust
from .gpu import Arch
from .lock import try_locked
from .memory import FILE

__all__ = [
    "MARK",
    "Build",
    "Entry",
    "builds",
    "entries",
    "library_of",
    "lock_of",
    "mark_used",
    "publish",
    "read",
    "remove",
    "staging",
    "tidy",
    "used",
    "write_log",
]

RECORD = "build.json"
KEY_LENGTH = 16
MARK = "JITACT_BUILD"  # in the environment of the compilers: what the folder is called that they work in
_RECORD_LIMIT = 1 << 16  # bytes; one takes 600
_LIBRARY_LIMIT = 1 << 28
DAY = 86400  # seconds


class Build(NamedTuple):
    """What is known of a build: the content of its build.json.

    Attributes:
        name: the activation's, with ``_fast_math`` for such a build.
        key: the hash of all that went in.
        sources: the hash of what does not depend on the machine: sources, flags, torch, Python, schema.
        archs: what the CUDA kernels are compiled for; empty if there are none.
        cpu: the instruction set level of the CPU kernels.
        torch: torch's version.
        cuda: the CUDA version of torch, None if it is built without.
        compiler: what the C++ compiler says of itself.
        nvcc: what nvcc says of itself, None if it took no part.
        created: when, in seconds since 1970.
        seconds: how long it took.
        library: the library's file name.
        sha256: of the library.
    """

    name: str
    key: str
    sources: str
    archs: tuple[str, ...]
    cpu: str
    torch: str
    cuda: str | None
    compiler: str
    nvcc: str | None
    created: float
    seconds: float
    library: str
    sha256: str

    @property
    def title(self) -> str:
        """What its folder is called."""
        return f"{self.name}-{self.key}"

    @classmethod
    def from_json(cls, text: str) -> Build:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError, TypeError: ``text`` is no such record.
        """
        try:
            record = json.loads(text)
        except RecursionError:
            raise ValueError("no record of a build") from None
        build = cls(**record)
        texts = (build.name, build.key, build.sources, build.cpu, build.torch, build.compiler, build.library, build.sha256)
        fine = all(isinstance(text, str) for text in (*texts, build.cuda or "", build.nvcc or ""))
        if not fine or not all(isinstance(number, (int, float)) for number in (build.created, build.seconds)):
            raise TypeError(f"no record of a build: {record}")
        return build._replace(archs=tuple(str(Arch.parse(str(arch))) for arch in build.archs))

    def to_json(self) -> str:
        """For people too."""
        return json.dumps(self._asdict(), indent=1) + "\n"


class Entry(NamedTuple):
    """A build in its folder.

    Attributes:
        folder: ``<cache>/<name>-<key>``.
        build: what build.json says, None if there is a problem.
        problem: why it cannot be loaded, as in "damaged: build.json is missing"; None if it can be.
        content: the library, as it was when it was checked.
    """

    folder: Path
    build: Build | None
    problem: str | None
    content: bytes = b""

    @property
    def library(self) -> Path:
        """The library's path."""
        return self.folder / self.build.library


def read(folder: Path) -> Entry | None:
    """The build in ``folder``, checked against its checksum; None if there is none.

    What was checked is what is returned: folders and files are opened once, each by its name in the one before, and all
    questions are asked of what is open.
    """
    try:
        with _opened(folder) as descriptor:
            build = _record(folder, descriptor)
            content = _content(build.library, folder, descriptor, _LIBRARY_LIMIT)
    except _UnusableError as error:
        return Entry(folder, None, str(error))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return Entry(folder, None, _why(error, "its folder"))
    if checksum(content) != build.sha256:
        return Entry(folder, None, f"damaged: {build.library} has a wrong checksum")
    return Entry(folder, build, None, content)


class _UnusableError(Exception):
    """Why a build cannot be loaded, as :attr:`Entry.problem` has it."""


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """The descriptor of a build's folder, in a folder of builds that can be believed."""
    with (
        folders.open_cache(folder.parent) as cache,
        trust.opened(folder.name, cache, shared=folders.shared(folder.parent)) as descriptor,
    ):
        yield descriptor


def _record(folder: Path, descriptor: int) -> Build:
    """What build.json says, if it is of the build that ``folder`` is named after."""
    try:
        build = Build.from_json(_content(RECORD, folder, descriptor, _RECORD_LIMIT).decode())
    except (ValueError, TypeError):
        raise _UnusableError(f"damaged: {RECORD} is no record of a build") from None
    if (folder.name, build.library) != (build.title, library_of(build.name)):
        raise _UnusableError(f"damaged: {RECORD} is another build's")
    return build


def _content(name: str, folder: Path, descriptor: int, limit: int) -> bytes:
    """What one of a build's files holds."""
    try:
        return trust.content(name, descriptor, shared=folders.shared(folder.parent), limit=limit)
    except FileNotFoundError:
        raise _UnusableError(f"damaged: {name} is missing") from None
    except OSError as error:
        raise _UnusableError(_why(error, name)) from None


def _why(error: OSError, what: str) -> str:
    """What an error means for a build, as :attr:`Entry.problem` has it."""
    if isinstance(error, trust.DistrustError):
        return f"not trusted: {what} {error.strerror}"
    return f"{'not readable' if isinstance(error, PermissionError) else 'damaged'}: {what} ({error.strerror})"


def library_of(name: str) -> str:
    """What the library of a build of this name is called."""
    return f"jitact_{name}.so"


def checksum(content: bytes) -> str:
    """What :attr:`Build.sha256` is of a library."""
    return hashlib.sha256(content).hexdigest()


def entries(cache: Path) -> Iterator[Entry]:
    """The builds in ``cache``, damaged ones too."""
    for folder in sorted(_own(cache)):
        entry = read(folder)
        if entry is not None:
            yield entry


def builds(cache: Path, name: str) -> Iterator[Build]:
    """What is known of the builds of one name; whether they can be loaded, :func:`read` tells."""
    for folder in _own(cache):
        if folder.name.rpartition("-")[0] == name:
            with suppress(OSError, _UnusableError), _opened(folder) as descriptor:
                yield _record(folder, descriptor)


def at_work(cache: Path) -> list[str]:
    """Titles of the builds that processes are making now."""
    titles = {folder.name.partition(".")[0] for folder in (cache / ".staging").glob("*")}
    busy = []
    for title in sorted(titles):
        with suppress(OSError), try_locked(lock_of(cache, title)) as alone:
            busy += [] if alone else [title]
    return busy


def _own(cache: Path) -> list[Path]:
    """Folders that are named as builds are."""
    try:
        with os.scandir(cache) as found:
            return [Path(f.path) for f in found if is_build_name(f.name) and f.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def is_build_name(name: str) -> bool:
    """Whether ``name`` is one that a build's folder can have."""
    base, _, key = name.rpartition("-")
    return base.isidentifier() and len(key) == KEY_LENGTH and set(key) <= set("0123456789abcdef")


def lock_of(cache: Path, title: str) -> Path:
    """The lock file of the build ``title``, in a folder that is made if need be."""
    return folders.make(cache, cache / ".locks", hidden=True) / f"{title}.lock"  # whoever can open a lock can hold it


@contextmanager
def staging(cache: Path, title: str, *, alone: bool = True) -> Iterator[Path]:
    """A private folder to build ``title`` in, gone afterwards with all that runs in it.

    Args:
        cache: the folder of builds.
        title: of the build.
        alone: whether the lock of ``title`` is held, so that what others left of it can go.
    """
    base = folders.make(cache, cache / ".staging")
    if alone:
        _sweep(cache, title)
    folder = Path(tempfile.mkdtemp(prefix=f"{title}.", dir=base))
    try:
        yield folder
    finally:
        _discard(folder)


def _sweep(cache: Path, title: str) -> None:
    """Removes what killed builds left behind: those of ``title``, whose lock we hold, and those whose lock nobody holds."""
    for folder in (cache / ".staging").iterdir():
        owner = folder.name.partition(".")[0]
        if owner == title:
            _discard(folder)
        else:
            try:
                with try_locked(lock_of(cache, owner)) as alone:
                    if alone:
                        _discard(folder)
            except OSError:  # a file system without locks, where nobody can tell whether that build goes on
                continue


def _discard(folder: Path) -> None:
    """Ends the compilers that work in ``folder``, left by a killed or interrupted build, and removes it."""
    for _ in range(100):  # a compiler may start another before it is ended
        if not _end_compilers(folder):
            break
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


def _end_compilers(folder: Path) -> bool:
    """Kills what was started for the build in ``folder`` and works there; tells whether there was anything.

    A shell that looked into the folder has no mark, and what another thread started during the build works elsewhere.
    """
    inside, mark, found = folder.resolve(), f"{MARK}={folder.name}".encode(), False
    for process in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
        facts = Path("/proc", process)
        try:
            if int(process) == os.getpid() or not Path(os.readlink(facts / "cwd")).is_relative_to(inside):
                continue
            if facts.stat().st_uid == os.geteuid() and mark in (facts / "environ").read_bytes().split(b"\0"):
                os.kill(int(process), signal.SIGKILL)
                found = True
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def publish(cache: Path, staging: Path, build: Build, content: bytes) -> Entry:
    """Puts a finished build into its place in one step; what was there goes.

    Args:
        cache: the folder of builds.
        staging: the folder that it was made in.
        build: what is known of it.
        content: the library.

    Raises:
        NoSpaceError: the disk is full.
        OSError: the folder cannot be written for another reason.
    """
    made = folders.make(cache, staging / "made")
    trust.write(made / build.library, content)
    trust.write(made / RECORD, build.to_json().encode())
    target = cache / build.title
    for attempt in range(10):
        try:
            made.rename(target)
            return Entry(target, build, None, content)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) or attempt == 9:
                raise
        with suppress(FileNotFoundError):
            target.rename(staging / f"replaced{attempt}")
    raise AssertionError


def remove(entry: Entry) -> bool:
    """Removes a build in one step, unless another process is making it anew; tells whether."""
    cache = entry.folder.parent
    lock = lock_of(cache, entry.folder.name)
    with try_locked(lock) as alone:
        if alone:
            with staging(cache, entry.folder.name) as folder:
                entry.folder.rename(folder / "removed")
            lock.unlink()
        return alone


def mark_used(entry: Entry) -> None:
    """Keeps in mind that a build is in use, as the time of its folder: to the day, so that hits write nothing.

    In a folder that this user may not write to, it is not kept.
    """
    with suppress(OSError):
        if time.time() - used(entry) > DAY:
            os.utime(entry.folder)


def used(entry: Entry) -> float:
    """When a build was made or, to the day, last used, in seconds since 1970.

    Raises:
        OSError: it is gone.
    """
    return entry.folder.stat().st_mtime


def tidy(cache: Path) -> None:
    """Removes what is in ``cache`` beside builds and is the loader's own, as far as no build needs it now.

    Raises:
        OSError: some of it is another user's.
    """
    staging_folder, locks = cache / ".staging", cache / ".locks"
    if staging_folder.is_dir():
        _sweep(cache, "")
        _remove_if_empty(staging_folder)
    for lock in locks.glob("*.lock"):
        with try_locked(lock) as alone:
            if alone:
                lock.unlink()
    _remove_if_empty(locks)
    for left in cache.glob(f".{FILE}.*"):  # of a process that was killed while it wrote
        left.unlink()
    if (cache / ".logs").is_dir():
        shutil.rmtree(cache / ".logs")


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def write_log(cache: Path, title: str, text: str) -> Path | None:
    """Keeps what compilers printed when they failed; None if that is not possible."""
    try:
        path = folders.make(cache, cache / ".logs") / f"{title}.log"
        trust.write(path, text.encode(errors="replace"))
    except OSError:
        return None
    return path
