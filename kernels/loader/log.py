"""Logs through the logger ``jitact``: one line for each build, nothing for a cache hit."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["configure", "logger", "working"]

logger = logging.getLogger("jitact")


class _Terminal(logging.Handler):
    """Prints to standard error unless the program has configured logging, which then receives the records."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            _print(f"jitact: {record.getMessage()}\n")


def _print(text: str) -> None:
    """Prints to standard error, if that can be: no call of an activation may fail for a message that nobody reads."""
    with suppress(AttributeError, OSError, ValueError):  # there is none, its reader has ended, or the program closed it
        sys.stderr.write(text)
        sys.stderr.flush()


def _is_watched() -> bool:
    """Whether standard error is a terminal. Objects that programs put in its place may have no more than ``write``."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # none, or it was closed
        return False


logger.addHandler(_Terminal())
_level = logging.NOTSET  # the level that configure() set last, to detect one set by the user


def configure() -> None:
    """Sets the logger's level from JITACT_VERBOSE, unless the program has set one."""
    global _level
    if logger.level == _level:
        _level = logging.DEBUG if os.environ.get("JITACT_VERBOSE", "0") not in ("", "0") else logging.INFO
        logger.setLevel(_level)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Shows ``what`` and the elapsed seconds on a terminal while the block runs."""
    if not _is_watched() or logging.getLogger().handlers or not logger.isEnabledFor(logging.INFO):
        yield
        return
    ended = threading.Event()
    clock = threading.Thread(target=_show_seconds, args=(what, ended), daemon=True)
    with suppress(RuntimeError):  # no thread can be started during interpreter shutdown
        clock.start()
    try:
        yield
    finally:
        ended.set()
        if clock.ident is not None:
            clock.join()
        _print("\r\033[K")


def _show_seconds(what: str, ended: threading.Event) -> None:
    for seconds in itertools.count():
        _print(f"\r\033[Kjitact: {what} ... {seconds} s" if seconds else f"jitact: {what} ...")
        if ended.wait(1):
            return
