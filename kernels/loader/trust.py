"""Checks of who can write to files and folders, as their content is loaded into the process as code.

Files are created so that no other user can write to them, whatever the umask. Checks use the opened file or folder, never its
name, which may lead to another file by the time of use.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["DistrustError", "content", "distrust", "make_folder", "opened", "replaceable", "set_mode", "write"]

_LINKS = 40  # how many symbolic links a path may lead through, as on Linux


class DistrustError(PermissionError):
    """Untrusted users can write to a file or folder; ``strerror`` says who, as the predicate of a sentence."""

    def __init__(self, why: str) -> None:
        """Makes an error with the message ``why``."""
        super().__init__(errno.EPERM, why)


def distrust(status: os.stat_result, *, shared: bool) -> str | None:
    """Why a file or folder is not trusted, as the predicate of a sentence; None if it is.

    Args:
        status: the status of the opened file or folder.
        shared: whether its owner and its group are trusted, whoever they are.
    """
    if not shared and status.st_uid not in (0, os.geteuid()):
        return f"belongs to user {status.st_uid}"
    if status.st_mode & stat.S_IWOTH:
        return "can be written to by everybody"
    if not shared and status.st_mode & stat.S_IWGRP:
        return f"can be written to by group {status.st_gid}"
    return None


def replaceable(path: Path, *, shared: bool = False) -> str | None:
    """Why untrusted users could replace ``path`` by something else, as the predicate of a sentence; None if they cannot.

    They can if they can write to a folder on the path, including those behind symbolic links. In a sticky folder, like /tmp,
    only the owner of an entry or of the folder can move it. Parts of the path that do not exist count as the user's own.

    Raises:
        OSError: the path cannot be resolved.
    """
    here, holder = "/", os.stat("/")
    ahead, links = list(reversed(path.absolute().parts[1:])), 0
    while ahead:
        name = ahead.pop()
        if name == "..":
            here = os.path.dirname(here)
            holder = os.stat(here)
            continue
        step = os.path.join(here, name)
        try:
            status = os.lstat(step)
        except FileNotFoundError:
            status = None
        why = _movable((here, holder), (step, status), shared=shared)
        if why:
            return f"can be replaced by others: {why}"
        if status is None:
            return None
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            target = os.readlink(step)
            if os.path.isabs(target):
                here, holder = "/", os.stat("/")
            ahead += [part for part in reversed(target.split("/")) if part not in ("", ".")]
        else:
            here, holder = step, status
    return None


def _movable(holder: tuple[str, os.stat_result], held: tuple[str, os.stat_result | None], *, shared: bool) -> str | None:
    """Why untrusted users can move the entry ``held`` of the folder ``holder``; None if they cannot."""
    why = distrust(holder[1], shared=shared)
    if why is None or not holder[1].st_mode & stat.S_ISVTX:
        return why and f"{holder[0]} {why}"
    foreign = [] if shared else [(path, of) for path, of in (holder, held) if of and of.st_uid not in (0, os.geteuid())]
    return f"{foreign[0][0]} belongs to user {foreign[0][1].st_uid}" if foreign else None


@contextmanager
def opened(path: str | Path, folder: int | None = None, *, shared: bool, follow: bool = False) -> Iterator[int]:
    """The descriptor of a trusted folder.

    Args:
        path: the folder, relative to ``folder`` if that is given.
        folder: the descriptor of a folder.
        shared: as for :func:`distrust`.
        follow: whether ``path`` may be a symbolic link.

    Raises:
        DistrustError: untrusted users can write to it.
        OSError: it is not a folder, or cannot be opened.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        why = distrust(os.fstat(descriptor), shared=shared)
        if why:
            raise DistrustError(why)
        yield descriptor
    finally:
        os.close(descriptor)


def content(path: str | Path, folder: int | None = None, *, shared: bool, limit: int) -> bytes:
    """The content of a trusted file.

    Args:
        path: the file, relative to ``folder`` if that is given; not a symbolic link.
        folder: the descriptor of a folder.
        shared: as for :func:`distrust`.
        limit: the greatest allowed size, in bytes.

    Raises:
        DistrustError: untrusted users can write to it.
        OSError: it is not a regular file, too large, or cannot be read.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # non-blocking, in case a pipe is in its place
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        why = distrust(status, shared=shared)
        if why:
            raise DistrustError(why)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Not a file")
        if status.st_size > limit:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(descriptor)


def write(path: Path, content: bytes) -> None:
    """Writes a file that others can read but not write, replacing an existing one atomically.

    Raises:
        OSError: it cannot be written.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            set_mode(descriptor, 0o644)
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def make_folder(path: Path, mode: int, group: int = -1) -> None:
    """Makes a folder if it does not exist, and sets its mode and group if the user owns it.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        with suppress(FileExistsError):
            path.mkdir(mode)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            break
        except FileNotFoundError:  # `clear` has removed it meanwhile
            continue
    try:
        set_mode(descriptor, mode, group)
    finally:
        os.close(descriptor)


def set_mode(descriptor: int, mode: int, group: int = -1) -> None:
    """Sets the mode of an opened file or folder, and its group unless that is -1, if the user owns it and they differ."""
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        return
    with suppress(PermissionError):  # a file system without modes, or a group that the user is not in
        if group not in (-1, status.st_gid):
            os.fchown(descriptor, -1, group)
        if stat.S_IMODE(status.st_mode) != mode:
            os.fchmod(descriptor, mode)
