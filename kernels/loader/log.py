"""Logs through the logger ``jitact``: one line for each build, nothing for a cache hit."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["configure", "logger", "working"]

logger = logging.getLogger("jitact")


class _Terminal(logging.Handler):
    """Prints to standard error unless the program has configured logging, which then receives the records."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            print(f"jitact: {record.getMessage()}", file=sys.stderr, flush=True)


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
    if not sys.stderr.isatty() or logging.getLogger().handlers or not logger.isEnabledFor(logging.INFO):
        yield
        return
    ended = threading.Event()
    clock = threading.Thread(target=_show_seconds, args=(what, ended), daemon=True)
    clock.start()
    try:
        yield
    finally:
        ended.set()
        clock.join()
        sys.stderr.write("\r\033[K")
        sys.stderr.flush()


def _show_seconds(what: str, ended: threading.Event) -> None:
    for seconds in itertools.count():
        sys.stderr.write(f"\r\033[Kjitact: {what} ... {seconds} s" if seconds else f"jitact: {what} ...")
        sys.stderr.flush()
        if ended.wait(1):
            return
