"""A progress bar on the last line of a terminal; nothing is printed if the output is not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["progress", "say"]

Item = TypeVar("Item")
PATIENCE = 2.0  # seconds of work before the line is shown
WIDTH = 24  # of the bar
CLEAR = "\r\033[K"

_shown = ""  # the current text of the last line


def progress(items: Iterable[Item], total: int, name: Callable[[Item], str] = lambda item: "") -> Iterator[Item]:
    """Iterates over ``items``; on a terminal, shows a bar once :data:`PATIENCE` seconds have passed.

    Args:
        items: the pieces of work.
        total: how many there are.
        name: returns the label of the current piece.
    """
    begin = time.monotonic()
    try:
        for done, item in enumerate(items):
            if _watched():
                _draw(done, total, time.monotonic() - begin, name(item))
            yield item
    finally:
        _show("")


def say(line: str = "") -> None:
    """Prints a line, above the bar if there is one."""
    bar = _shown
    _show("")
    print(line, flush=True)
    _show(bar)


def _draw(done: int, total: int, seconds: float, name: str) -> None:
    if seconds < PATIENCE:
        return
    filled = WIDTH * done // max(total, 1)
    left = f", {_clock(seconds / done * (total - done))} left" if done else ""
    _show(f"[{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{total} {name}{left}")


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _show(line: str) -> None:
    global _shown
    if line != _shown:
        sys.stderr.write(CLEAR + line)
        sys.stderr.flush()
        _shown = line


def _watched() -> bool:
    return sys.stderr.isatty() and sys.stdout.isatty()
