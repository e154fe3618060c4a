"""File locks between processes, which end with their holder, and thread locks that are free in a forked child."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import folders, trust
from .errors import BuildError, CompileError
from .log import logger

__all__ = ["ThreadLock", "locked", "try_locked"]

WAIT_LIMIT = 600.0  # seconds after which a waiting process gives up; a build takes a few
_SAY_AFTER = 1.0
_POLL = 0.03
_NOTE_LIMIT = 1 << 20  # bytes

_held: set[int] = set()  # descriptors of the file locks that this process holds


def _leave_to_parent() -> None:
    """Closes inherited locks in a forked child, where they would outlive a parent that is killed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


class ThreadLock:
    """A reentrant lock for a module, free in a forked child, where the thread that held it does not run."""

    def __init__(self) -> None:
        """Makes a free lock, which lives as long as the process."""
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Acquires the lock."""
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        """Releases the lock."""
        self._lock.release()


@contextmanager
def locked(path: Path, name: str) -> Iterator[bool]:
    """Holds the file lock ``path`` while the block runs. Processes that wait meanwhile raise its CompileError if it fails so.

    Yields False on a file system without locks, where several processes may run the block at once.

    Args:
        path: the lock file, in a subfolder of the cache. It is not removed, as two processes could then hold it.
        name: what is being built, for messages of waiting processes.

    Raises:
        BuildError: another process held the lock for WAIT_LIMIT seconds.
        CompileError: the process that held the lock failed to compile the same kernel.
    """
    descriptor, awaited = _wait(path, name)
    if descriptor is None:
        yield False
        return
    try:
        note = _note(path)
        if "failed" in note and note.get("attempt") in awaited:
            raise CompileError(str(note["failed"]))
        attempt = {"attempt": os.urandom(8).hex(), "pid": os.getpid(), "host": socket.gethostname(), "name": name}
        _write(descriptor, attempt)
        try:
            yield True
        except CompileError as error:
            _write(descriptor, attempt | {"failed": str(error)})
            raise
    finally:
        _release(descriptor)


@contextmanager
def try_locked(path: Path) -> Iterator[bool]:
    """Holds the lock while the block runs if it is free; yields whether it is."""
    descriptor = _try(path)
    if descriptor is None:
        yield False
        return
    try:
        yield True
    finally:
        _release(descriptor)


def _wait(path: Path, name: str) -> tuple[int | None, list[object]]:
    """The lock's descriptor, None on a file system without locks, and the IDs of the attempts that were waited for.

    IDs identify a failed attempt reliably; times would not, as clocks of hosts differ.
    """
    started, said = time.monotonic(), False
    awaited: list[object] = []
    while True:
        try:
            descriptor = _try(path)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                logger.debug("%s: no locks here (%s); building without", path.parent, error.strerror)
                return None, awaited
            raise
        if descriptor is not None:
            return descriptor, awaited
        note = _note(path)
        if "attempt" in note and "failed" not in note and note["attempt"] not in awaited:
            awaited.append(note["attempt"])
        waited = time.monotonic() - started
        if waited >= WAIT_LIMIT:
            raise BuildError(
                f"waited {waited:.0f} s for {_holder(note)}, which compiles {name}\n"
                f"if it hangs, end it and try again; JITACT_CACHE_DIR names another cache\nlock: {path}"
            )
        if waited >= _SAY_AFTER and not said:
            said = True
            logger.info("waiting for %s, which compiles %s", _holder(note), name)
        time.sleep(_POLL)


def _try(path: Path) -> int | None:
    """The locked file's descriptor, None if another process holds the lock."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # `clear` has removed the empty folder of the locks
            folders.make(path.parent.parent, path.parent, hidden=True)
            continue
        try:
            folder = path.parent.stat()
            of_a_group = folder.st_mode & stat.S_IWGRP
            trust.set_mode(descriptor, 0o644 | of_a_group, folder.st_gid if of_a_group else -1)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == _inode(path):  # else `clear` has removed it
                _held.add(descriptor)
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:  # it has removed lock and folder
            pass
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _release(descriptor: int) -> None:
    if descriptor in _held:  # not in a child forked while it was held
        _held.remove(descriptor)
        os.close(descriptor)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _holder(note: dict) -> str:
    return f"process {note['pid']} on {note['host']}" if {"pid", "host"} <= note.keys() else "another process"


def _note(path: Path) -> dict:
    """The note of the last holder in the lock file; empty if untrusted users could have written it."""
    try:
        note = json.loads(trust.content(path, shared=folders.shared(path.parent.parent), limit=_NOTE_LIMIT))
    except (OSError, ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}


def _write(descriptor: int, content: dict) -> None:
    """Writes a note for waiting processes. Errors are only logged, as the disk may be full only until other builds end."""
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(content).encode(), 0)
    except OSError as error:
        logger.debug("cannot write to the lock: %s", error)
