"""What was found out about this machine's compilers and GPUs, kept in the cache so that a hit need not ask again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import folders, trust

__all__ = ["FILE", "Memory"]

FILE = "machine.json"
_LIMIT = 1 << 20  # bytes; a compiler takes 200


class Memory:
    """A small dictionary in a file, written whole by rename. Losing it, or an entry to a race, costs one more look."""

    def __init__(self, places: Sequence[Path]) -> None:
        """Reads the file in each of ``places``; the first that can be written keeps what is new."""
        self._places = places
        self._entries: dict[str, Any] = {}
        for folder in reversed(places):
            self._entries |= _read(folder)

    def get(self, key: str) -> Any:
        """What was kept under ``key``, or None."""
        return self._entries.get(key)

    def put(self, key: str, value: Any) -> None:
        """Keeps ``value`` in this process, and for later ones if a folder can be written."""
        self._entries[key] = value
        for folder in self._places:
            with suppress(OSError):
                text = json.dumps(_read(folder) | {key: value}, indent=1, sort_keys=True)
                trust.write(folder / FILE, text.encode())
                return


def _read(folder: Path) -> dict[str, Any]:
    """What is kept in ``folder``; nothing if others can write there, since a compiler may be run by what it says."""
    try:
        with folders.open_cache(folder) as descriptor:
            text = trust.content(FILE, descriptor, shared=folders.shared(folder), limit=_LIMIT)
        content = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
