"""Where builds are kept: folders into which no other user can put a library, unless the user named one of theirs."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from .errors import BuildError
from .log import logger

__all__ = ["configured", "explain", "problem", "readable", "say_once", "writable"]


def configured() -> Path:
    """The folder that JITACT_CACHE_DIR names, else one in TORCH_EXTENSIONS_DIR, else one in the user's cache folder."""
    return _configured()[0]


def readable() -> list[Path]:
    """The folders to look in, the configured one first: those that exist, can be trusted and may hold programs."""
    _create(_candidates()[0])  # what is found out about this machine can be kept from the first use on
    return [folder for folder in _candidates() if problem(folder, writing=False) is None]


def writable() -> Iterator[Path]:
    """The folders to build in, the first choice first; says so if that is not the configured one.

    Raises:
        BuildError: there is none.
    """
    problems: dict[Path, str] = {}
    found = False
    for folder in _candidates():
        why = _create(folder) or problem(folder, writing=True)
        if why:
            problems[folder] = why
            continue
        if problems and not found:
            first = next(iter(problems))
            say_once(f"{first} {problems[first]}: keeping compiled kernels in {folder}")
        found = True
        yield folder
    if not found:
        listed = "\n".join(f"{folder} {why}" for folder, why in problems.items())
        raise BuildError(f"no folder to keep compiled kernels in\n{listed}\nset JITACT_CACHE_DIR to a folder of yours")


def problem(folder: Path, *, writing: bool) -> str | None:
    """What keeps ``folder`` from being used, as the rest of a sentence; None if nothing does."""
    try:
        status = folder.lstat() if _is_private(folder) else folder.stat()
        flags = os.statvfs(folder).f_flag
    except OSError as error:
        return f"cannot be used ({error.strerror})"
    if not stat.S_ISDIR(status.st_mode):
        return "is no folder"
    if not _trusted(folder, status):
        return "is not yours alone"
    if flags & os.ST_NOEXEC:
        return "is on a file system that runs no programs (noexec)"
    if writing and flags & os.ST_RDONLY:
        return "is on a read-only file system"
    if writing and not os.access(folder, os.W_OK | os.X_OK):
        return "is not writable"
    return None


def explain() -> list[tuple[Path, str]]:
    """The folders in the order in which they are used, with what they are used for or what keeps them from it."""
    found = []
    for folder in _candidates():
        if not folder.exists() and folder != _candidates()[0]:
            continue
        unreadable = _create(folder) or problem(folder, writing=False)
        if unreadable:
            found.append((folder, f"not used: it {unreadable}"))
        else:
            unwritable = problem(folder, writing=True)
            second = any(use == _USED for _, use in found)
            found.append((folder, f"only read: it {unwritable}" if unwritable else "read" if second else _USED))
    return found


_USED = "read, and built in"
_said: set[str] = set()


def say_once(message: str) -> None:
    """Logs a warning that one process need not repeat."""
    if message not in _said:
        _said.add(message)
        logger.warning(message)


def _configured() -> tuple[Path, bool]:
    """The folder, and whether the user named it."""
    named = os.environ.get("JITACT_CACHE_DIR")
    if named:
        return Path(named).expanduser().absolute(), True
    shared = os.environ.get("TORCH_EXTENSIONS_DIR")
    if shared:
        return Path(shared).expanduser().absolute() / "jitact", True
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home).absolute() / "jitact", False


def _candidates() -> list[Path]:
    """The configured folder, or one inside it if anybody may write there, then private ones in the temporary folders."""
    first = configured()
    try:
        anybody = first.stat().st_mode & stat.S_IWOTH
    except OSError:
        anybody = False
    return list(dict.fromkeys([_private(first) if anybody else first, *map(_private, _temporary())]))


def _temporary() -> list[Path]:
    return [Path(os.environ.get("TMPDIR") or "/tmp"), Path("/var/tmp"), Path("/dev/shm")]


def _private(folder: Path) -> Path:
    return folder / f"jitact-{os.geteuid()}"


def _is_private(folder: Path) -> bool:
    return folder == _private(folder.parent)


def _trusted(folder: Path, status: os.stat_result) -> bool:
    """Whether no other user can put a library there, but for the owner of a folder that was named on purpose."""
    if _is_private(folder):
        return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    named = folder == configured() and _configured()[1]
    return not status.st_mode & stat.S_IWOTH and (named or status.st_uid in (0, os.geteuid()))


def _create(folder: Path) -> str | None:
    """Makes the folder if it is missing; what prevented that, as the rest of a sentence."""
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=not _is_private(folder), exist_ok=True)
            folder.mkdir(mode=0o700 if _is_private(folder) else 0o755, exist_ok=True)
    except OSError as error:
        return f"cannot be made ({error.strerror})"
    return None
