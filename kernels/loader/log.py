"""Says what the loader does, through the logger ``jitact``: one line for each build, nothing for a hit."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["configure", "logger", "working"]

logger = logging.getLogger("jitact")


class _Terminal(logging.Handler):
    """Prints to standard error unless the program has set up logging of its own, which then gets the records."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            print(f"jitact: {record.getMessage()}", file=sys.stderr, flush=True)


logger.addHandler(_Terminal())
_level = logging.NOTSET  # the level that configure() gave, to tell it from one that the user gave


def configure() -> None:
    """Sets the logger's level from JITACT_VERBOSE, unless the program has set one."""
    global _level
    if logger.level == _level:
        _level = logging.DEBUG if os.environ.get("JITACT_VERBOSE", "0") not in ("", "0") else logging.INFO
        logger.setLevel(_level)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Shows ``what`` on a terminal for as long as the block runs."""
    shown = sys.stderr.isatty() and not logging.getLogger().handlers and logger.isEnabledFor(logging.INFO)
    if shown:
        sys.stderr.write(f"jitact: {what} ...")
        sys.stderr.flush()
    try:
        yield
    finally:
        if shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
