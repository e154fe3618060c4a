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
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from .lock import try_locked

__all__ = ["Build", "Entry", "builds", "entries", "lock_of", "publish", "read", "remove", "staging", "tidy", "write_log"]

RECORD = "build.json"
KEY_LENGTH = 16


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
        record = json.loads(text)
        build = cls(**record)
        build = build._replace(archs=tuple(map(str, build.archs)))
        if not all(isinstance(text, str) for text in (build.name, build.key, build.sources, build.library, build.cpu)):
            raise TypeError(f"no record of a build: {record}")
        return build

    def to_json(self) -> str:
        """For people too."""
        return json.dumps(self._asdict(), indent=1) + "\n"


class Entry(NamedTuple):
    """A build in its folder.

    Attributes:
        folder: ``<cache>/<name>-<key>``.
        build: what build.json says, None if it cannot be read.
        damage: what is wrong with it, None if it can be loaded.
        content: the library, as it was when it was checked.
    """

    folder: Path
    build: Build | None
    damage: str | None
    content: bytes = b""

    @property
    def library(self) -> Path:
        """The library's path."""
        return self.folder / self.build.library


def read(folder: Path) -> Entry | None:
    """The build in ``folder``, checked against its checksum; None if there is none."""
    try:
        build = Build.from_json((folder / RECORD).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return Entry(folder, None, f"{RECORD} is missing") if folder.is_dir() else None
    except (OSError, ValueError, TypeError):
        return Entry(folder, None, f"{RECORD} cannot be read")
    if folder.name != build.title or os.path.basename(build.library) != build.library:
        return Entry(folder, build, f"{RECORD} is another build's")
    try:
        content = (folder / build.library).read_bytes()
    except OSError as error:
        return Entry(folder, build, f"{build.library} cannot be read ({error.strerror})")
    if checksum(content) != build.sha256:
        return Entry(folder, build, f"{build.library} has a wrong checksum")
    return Entry(folder, build, None, content)


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
    """What is known of the builds of one name; whether they are damaged, :func:`read` tells."""
    for folder in _own(cache):
        if folder.name.rpartition("-")[0] == name:
            with suppress(OSError, ValueError, TypeError):
                yield Build.from_json((folder / RECORD).read_text())


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
    folder = cache / ".locks"
    folder.mkdir(mode=0o755, exist_ok=True)
    return folder / f"{title}.lock"


@contextmanager
def staging(cache: Path, title: str, *, alone: bool = True) -> Iterator[Path]:
    """A private folder to build ``title`` in, gone afterwards with all that runs in it.

    Args:
        cache: the folder of builds.
        title: of the build.
        alone: whether the lock of ``title`` is held, so that what others left of it can go.
    """
    base = cache / ".staging"
    base.mkdir(mode=0o755, exist_ok=True)
    if alone:
        _sweep(cache, title)
    folder = base / f"{title}.{os.getpid()}.{time.time_ns()}"
    folder.mkdir(mode=0o700)
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
        if not _kill_inside(folder):
            break
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


def _kill_inside(folder: Path) -> bool:
    """Kills the processes whose working directory is in ``folder``; tells whether there were any."""
    inside, found = folder.resolve(), False
    for process in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
        try:
            if int(process) != os.getpid() and Path(os.readlink(f"/proc/{process}/cwd")).is_relative_to(inside):
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
    made = staging / "made"
    made.mkdir(mode=0o755)
    (made / build.library).write_bytes(content)
    (made / RECORD).write_text(build.to_json())
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


def tidy(cache: Path) -> None:
    """Removes what is in ``cache`` beside builds and is the loader's own, as far as no build needs it now."""
    staging_folder, locks = cache / ".staging", cache / ".locks"
    if staging_folder.is_dir():
        _sweep(cache, "")
        _remove_if_empty(staging_folder)
    for lock in locks.glob("*.lock"):
        with try_locked(lock) as alone:
            if alone:
                lock.unlink()
    _remove_if_empty(locks)
    shutil.rmtree(cache / ".logs", ignore_errors=True)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def write_log(cache: Path, title: str, text: str) -> Path | None:
    """Keeps what compilers printed when they failed; None if that is not possible."""
    path = cache / ".logs" / f"{title}.log"
    try:
        path.parent.mkdir(mode=0o755, exist_ok=True)
        path.write_text(text)
    except OSError:
        return None
    return path
