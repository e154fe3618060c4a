"""The cache folders: only those into which no other user can put a library, unless the user trusts them explicitly."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import BuildError
from .log import logger
from .trust import DistrustError, make_folder, opened, replaceable

__all__ = [
    "configured",
    "destination",
    "existing",
    "explain",
    "make",
    "open_cache",
    "problem",
    "readable",
    "say_once",
    "shared",
    "writable",
]


def configured() -> Path:
    """The folder that JITACT_CACHE_DIR names, else one in TORCH_EXTENSIONS_DIR, else one in the user's cache folder.

    Raises:
        BuildError: a variable names the home folder of an unknown user, or is relative to a folder that was removed.
    """
    named = _named("JITACT_CACHE_DIR")
    if named:
        return named
    extensions = _named("TORCH_EXTENSIONS_DIR")
    if extensions:
        return extensions / "jitact"
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # the XDG specification ignores relative paths
        home = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "jitact" if os.path.isabs(home) else _private(_temporary()[0])


def shared(folder: Path) -> bool:
    """Whether the user trusts the owner and group of ``folder``: JITACT_CACHE_DIR names it and JITACT_TRUST_GROUP is set."""
    trusts = os.environ.get("JITACT_TRUST_GROUP", "0") not in ("", "0")
    return trusts and folder == _named("JITACT_CACHE_DIR")


def readable(*, make: bool = False) -> list[Path]:
    """The folders to search, the configured one first: those that exist, are trusted and are not mounted noexec.

    Args:
        make: whether to make the configured one if it is missing, so that facts about this machine can be cached.
    """
    if make:
        _make(configured())
    return [folder for folder in _candidates() if problem(folder, writing=False) is None]


def writable() -> Iterator[Path]:
    """The folders to build in, in order of preference. Logs a warning if the first is not the configured one.

    Raises:
        BuildError: there is none.
    """
    problems: dict[Path, str] = {}
    found = False
    for folder in _candidates():
        why = _make(folder) or problem(folder, writing=True)
        if why:
            problems[folder] = why
            continue
        if problems and not found:
            first = next(iter(problems))
            say_once(f"{first} {problems[first]}: keeping compiled kernels in {folder}")
        found = True
        yield folder
    if not found:
        raise BuildError(_nowhere(problems))


def problem(folder: Path, *, writing: bool) -> str | None:
    """Why ``folder`` cannot be used, as the predicate of a sentence; None if it can.

    A missing folder counts as writable if it can be made.
    """
    missing = writing and not os.path.lexists(folder)
    place = existing(folder) if missing else folder
    try:
        if missing and not place.is_dir():
            return "cannot be made (Not a directory)"
        flags = os.statvfs(place).f_flag
        if flags & os.ST_NOEXEC:
            return "is on a file system that runs no programs (noexec)"
        why = _not_trusted(folder, missing=missing, others=shared(folder))
        if why and folder == _named("JITACT_CACHE_DIR") and _not_trusted(folder, missing=missing, others=True) is None:
            why += "; JITACT_TRUST_GROUP=1 trusts owner and group"
    except NotADirectoryError:
        return "is no folder"
    except OSError as error:
        return f"cannot be {'made' if missing else 'read'} ({error.strerror})"
    if why:
        return why
    if writing and flags & os.ST_RDONLY:
        return "cannot be made (Read-only file system)" if missing else "is on a read-only file system"
    if writing and not os.access(place, os.W_OK | os.X_OK):
        return "cannot be made (Permission denied)" if missing else "is not writable"
    return None


def _not_trusted(folder: Path, *, missing: bool, others: bool) -> str | None:
    """Why others could put a library into ``folder``, or replace the folder; None if they cannot.

    Raises:
        OSError: it is not a folder, or cannot be read.
    """
    # A private folder has to be the user's own with mode 0700; others cannot replace it by such a one.
    why = replaceable(folder.parent if _is_private(folder) else folder, shared=others)
    if why or missing:
        return why
    try:
        with open_cache(folder, others=others):
            return None
    except DistrustError as error:
        return f"is not yours alone ({error.strerror})"


@contextmanager
def open_cache(folder: Path, *, others: bool | None = None) -> Iterator[int]:
    """The descriptor of a cache folder, after checking that only trusted users can write to it.

    Args:
        folder: the cache folder.
        others: whether its owner and group are trusted; if None, what :func:`shared` says.

    Raises:
        DistrustError: others can write to it, or it is a private folder that others can read.
        OSError: it is not a folder, or cannot be read.
    """
    private = _is_private(folder)
    with opened(folder, shared=shared(folder) if others is None else others, follow=not private) as descriptor:
        status = os.fstat(descriptor)
        if private and (status.st_uid != os.geteuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)):
            raise DistrustError("it has to belong to you, with mode 0700")
        yield descriptor


def make(cache: Path, path: Path, *, hidden: bool = False) -> Path:
    """Makes a folder in the cache folder, if need be, with the same permissions.

    Args:
        cache: the cache folder.
        path: the folder to make.
        hidden: whether only users who can write to the cache folder may access it.

    Raises:
        OSError: it cannot be made.
    """
    status = cache.stat()
    mode = stat.S_IMODE(status.st_mode) & 0o2775
    if hidden:
        mode &= 0o2770 if mode & stat.S_IWGRP else 0o2700
    make_folder(path, mode, status.st_gid if shared(cache) else -1)
    return path


def destination() -> Path:
    """The folder in which the next build will be made; it need not exist yet.

    Raises:
        BuildError: no folder can be used.
    """
    problems: dict[Path, str] = {}
    for folder in _candidates():
        why = problem(folder, writing=True)
        if why is None:
            return folder
        problems[folder] = why
    raise BuildError(_nowhere(problems))


def explain() -> list[tuple[Path, str]]:
    """The folders in order of preference, each with what it is used for, or why it is not used."""
    found: list[tuple[Path, str]] = []
    for folder in _candidates():
        built_in = any(use == _USED for _, use in found)
        exists = os.path.lexists(folder)
        if built_in and not exists:
            continue
        unwritable = problem(folder, writing=True)
        unreadable = problem(folder, writing=False) if exists else unwritable
        if unreadable:
            found.append((folder, f"not used: it {unreadable}"))
        elif unwritable:
            found.append((folder, f"only read: it {unwritable}"))
        else:
            found.append((folder, "read" if built_in else _USED))
    return found


_USED = "read, and built in"
_said: set[str] = set()


def say_once(message: str) -> None:
    """Logs a warning once per process."""
    if message not in _said:
        _said.add(message)
        logger.warning(message)


def existing(folder: Path) -> Path:
    """``folder``, or its nearest ancestor that exists."""
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


def _nowhere(problems: dict[Path, str]) -> str:
    listed = "\n".join(f"{folder} {why}" for folder, why in problems.items())
    return f"no folder to keep compiled kernels in\n{listed}\nset JITACT_CACHE_DIR to a folder of yours"


def _named(variable: str) -> Path | None:
    """The folder that an environment variable names, None if it is not set.

    Raises:
        BuildError: it names the home folder of an unknown user, or is relative to a folder that was removed.
    """
    text = os.environ.get(variable)
    if not text:
        return None
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise BuildError(f"{variable}={text} names a home folder that is not known: name the whole path")
    try:
        return Path(path).absolute()
    except FileNotFoundError:
        raise BuildError(f"{variable}={text} is in the current directory, which was removed: name the whole path") from None


def _candidates() -> list[Path]:
    """The configured folder; private ones in it and in its parent if others can write there; those in temporary folders."""
    first = configured()
    private = [_private(folder) for folder in (first, first.parent) if _open_to_others(folder)]
    return list(dict.fromkeys([first, *private, *map(_private, _temporary())]))


def _open_to_others(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)) and folder.is_dir()
    except OSError:
        return False


def _temporary() -> list[Path]:
    first = Path(os.environ.get("TMPDIR") or "/tmp")
    with suppress(FileNotFoundError):  # relative to a current directory that was removed, where nothing can be made
        first = first.absolute()
    return [*([first] if first.is_absolute() else []), Path("/var/tmp"), Path("/dev/shm")]


def _private(folder: Path) -> Path:
    return folder / f"jitact-{os.geteuid()}"


def _is_private(folder: Path) -> bool:
    return folder == _private(folder.parent)


def _make(folder: Path) -> str | None:
    """Makes the folder if it is missing. Returns why it could not, as the predicate of a sentence, or None."""
    if os.path.lexists(folder):
        return None
    why = problem(folder, writing=True)
    if why:
        return why
    try:
        if not _is_private(folder):
            for parent in reversed(folder.parents):
                if not parent.is_dir():
                    parent.mkdir(mode=0o755, exist_ok=True)
        make_folder(folder, 0o700 if _is_private(folder) else 0o755)
    except OSError as error:
        return f"cannot be made ({error.strerror})"
    return None
