"""Builds on disk: reads, checks, publishes (by rename), lists and removes them.

A cache folder holds one folder ``<name>-<key>`` per build, with the library and its metadata in build.json, and the folders
.staging (builds in progress), .locks and .logs (of failed builds).
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
    "KEY_LENGTH",
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
MARK = "JITACT_BUILD"  # environment variable of the compilers: the name of their staging folder
_RECORD_LIMIT = 1 << 16  # bytes; a record takes about 600
_LIBRARY_LIMIT = 1 << 28
DAY = 86400  # seconds


class Build(NamedTuple):
    """The metadata of a build, as in its build.json.

    Attributes:
        name: the kernel's name, with suffixes for row types and ``_fast_math``.
        key: the hash of all inputs of the build.
        sources: the hash of the inputs that do not depend on the machine: sources, flags, torch, Python, schema.
        archs: the compute capabilities of the CUDA kernels; empty if there are none.
        cpu: the instruction set level of the CPU kernels.
        torch: torch's version.
        cuda: the CUDA version of torch, None if it is built without.
        compiler: the C++ compiler's version, flags and C library.
        nvcc: nvcc's version, None if it was not used.
        created: the time of the build, in seconds since 1970.
        seconds: how long it took.
        library: the library's file name.
        sha256: the library's checksum.
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
        """The name of its folder."""
        return f"{self.name}-{self.key}"

    @classmethod
    def from_json(cls, text: str) -> Build:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError, TypeError: ``text`` is not a valid record.
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
        """JSON, indented for human readers."""
        return json.dumps(self._asdict(), indent=1) + "\n"


class Entry(NamedTuple):
    """A build on disk.

    Attributes:
        folder: ``<cache>/<name>-<key>``.
        build: its metadata, None if there is a problem.
        problem: why it cannot be loaded, as in "damaged: build.json is missing"; None if it can be.
        content: the bytes of the library whose checksum was verified.
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
    """The build in ``folder``, with its checksum verified; None if there is none.

    To exclude races, each folder and file is opened once, relative to the descriptor of its parent, and all checks use the
    descriptors: the bytes that were checked are those that are returned.
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
    """A build cannot be loaded; the message becomes :attr:`Entry.problem`."""


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """The descriptor of a build's folder, after its owner and mode, and those of the cache folder, were checked."""
    with (
        folders.open_cache(folder.parent) as cache,
        trust.opened(folder.name, cache, shared=folders.shared(folder.parent)) as descriptor,
    ):
        yield descriptor


def _record(folder: Path, descriptor: int) -> Build:
    """The metadata in build.json, after checking that they match the name of ``folder``."""
    try:
        build = Build.from_json(_content(RECORD, folder, descriptor, _RECORD_LIMIT).decode())
    except (ValueError, TypeError):
        raise _UnusableError(f"damaged: {RECORD} is no record of a build") from None
    if (folder.name, build.library) != (build.title, library_of(build.name)):
        raise _UnusableError(f"damaged: {RECORD} is another build's")
    return build


def _content(name: str, folder: Path, descriptor: int, limit: int) -> bytes:
    """The content of one of a build's files."""
    try:
        return trust.content(name, descriptor, shared=folders.shared(folder.parent), limit=limit)
    except FileNotFoundError:
        raise _UnusableError(f"damaged: {name} is missing") from None
    except OSError as error:
        raise _UnusableError(_why(error, name)) from None


def _why(error: OSError, what: str) -> str:
    """The text of :attr:`Entry.problem` for an error."""
    if isinstance(error, trust.DistrustError):
        return f"not trusted: {what} {error.strerror}"
    return f"{'not readable' if isinstance(error, PermissionError) else 'damaged'}: {what} ({error.strerror})"


def library_of(name: str) -> str:
    """The file name of the library of a build with this name."""
    return f"jitact_{name}.so"


def checksum(content: bytes) -> str:
    """:attr:`Build.sha256` of a library."""
    return hashlib.sha256(content).hexdigest()


def entries(cache: Path) -> Iterator[Entry]:
    """The builds in ``cache``, including damaged ones."""
    for folder in sorted(_own(cache)):
        entry = read(folder)
        if entry is not None:
            yield entry


def builds(cache: Path, name: str) -> Iterator[Build]:
    """The metadata of the builds with a name; whether their libraries can be loaded is only checked by :func:`read`."""
    for folder in _own(cache):
        if folder.name.rpartition("-")[0] == name:
            with suppress(OSError, _UnusableError), _opened(folder) as descriptor:
                yield _record(folder, descriptor)


def at_work(cache: Path) -> list[str]:
    """The titles of the builds in progress, in any process."""
    titles = {folder.name.partition(".")[0] for folder in _listed(cache / ".staging")}
    busy = []
    for title in sorted(titles):
        with suppress(OSError), try_locked(lock_of(cache, title)) as alone:
            busy += [] if alone else [title]
    return busy


def _own(cache: Path) -> list[Path]:
    """Folders whose names have the form of a build's."""
    try:
        with os.scandir(cache) as found:
            return [Path(f.path) for f in found if is_build_name(f.name) and f.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def is_build_name(name: str) -> bool:
    """Whether ``name`` has the form ``<identifier>-<key>``."""
    base, _, key = name.rpartition("-")
    return base.isidentifier() and len(key) == KEY_LENGTH and set(key) <= set("0123456789abcdef")


def lock_of(cache: Path, title: str) -> Path:
    """The path of the lock file of the build ``title``. Makes its folder if need be."""
    return folders.make(cache, cache / ".locks", hidden=True) / f"{title}.lock"  # whoever can open a lock can hold it


@contextmanager
def staging(cache: Path, title: str, *, alone: bool = True) -> Iterator[Path]:
    """A private folder to build ``title`` in; removed afterwards, and processes that still run in it are killed.

    Args:
        cache: the cache folder.
        title: the build's title.
        alone: whether the lock of ``title`` is held, so that staging folders of killed builds can be removed.
    """
    while True:
        base = folders.make(cache, cache / ".staging")
        if alone:
            _sweep(cache, title)
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"{title}.", dir=base))
            break
        except FileNotFoundError:  # `clear` has removed the folder, as it was empty
            continue
    try:
        yield folder
    finally:
        _discard(folder)


def _sweep(cache: Path, title: str) -> None:
    """Removes staging folders of killed builds: those of ``title``, whose lock we hold, and those whose lock is free."""
    for folder in _listed(cache / ".staging"):
        owner = folder.name.partition(".")[0]
        if owner == title:
            _discard(folder)
        else:
            try:
                with try_locked(lock_of(cache, owner)) as alone:
                    if alone:
                        _discard(folder)
            except OSError:  # without locks it is unknown whether that build still runs
                continue


def _listed(folder: Path) -> list[Path]:
    """What is in a folder; nothing if there is none, or it cannot be read."""
    try:
        return [folder / name for name in os.listdir(folder)]
    except OSError:
        return []


def _discard(folder: Path) -> None:
    """Kills compilers that a killed or interrupted build left running in ``folder``, and removes the folder."""
    for _ in range(100):  # a compiler may start another before it is killed
        if not _end_compilers(folder):
            break
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


def _end_compilers(folder: Path) -> bool:
    """Kills the processes that were started for the build in ``folder``; returns whether there were any.

    They have both the mark in their environment and the folder as working directory. A user's shell in the folder has no mark,
    and a process that another thread started during the build works elsewhere.
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
    """Moves a finished build into place by rename, replacing an existing one.

    Args:
        cache: the cache folder.
        staging: the folder in which it was built.
        build: its metadata.
        content: the library.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
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
    """Removes a build by rename, unless a process is building it; returns whether it was removed."""
    cache = entry.folder.parent
    lock = lock_of(cache, entry.folder.name)
    with try_locked(lock) as alone:
        if alone:
            with staging(cache, entry.folder.name) as folder:
                entry.folder.rename(folder / "removed")
            lock.unlink()
        return alone


def mark_used(entry: Entry) -> None:
    """Records the use of a build as its folder's modification time, at most once a day, so that most hits write nothing.

    Does nothing where this user may not write.
    """
    with suppress(OSError):
        if time.time() - used(entry) > DAY:
            os.utime(entry.folder)


def used(entry: Entry) -> float:
    """When a build was made or last used, to the day, in seconds since 1970.

    Raises:
        OSError: it was removed.
    """
    return entry.folder.stat().st_mtime


def tidy(cache: Path) -> None:
    """Removes the loader's own files in ``cache`` other than builds, unless a build in progress needs them.

    Raises:
        OSError: some belong to another user.
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
    for left in cache.glob(f".{FILE}.*"):  # temporary files of processes that were killed while writing
        left.unlink()
    if (cache / ".logs").is_dir():
        shutil.rmtree(cache / ".logs")


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def write_log(cache: Path, title: str, text: str) -> Path | None:
    """Writes the output of failed compilers to a log file; returns its path, or None if it cannot be written."""
    try:
        path = folders.make(cache, cache / ".logs") / f"{title}.log"
        trust.write(path, text.encode(errors="replace"))
    except OSError:
        return None
    return path
