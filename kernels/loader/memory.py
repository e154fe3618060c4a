"""A cache of facts about this machine's compilers and GPUs, so that a cache hit starts no process to find them."""

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
_unsaved: dict[str, Any] = {}  # what no folder took, for the rest of this process


class Memory:
    """A small dictionary in a file, replaced by rename. If it, or an entry in a race, is lost, facts are just found again."""

    def __init__(self, places: Sequence[Path]) -> None:
        """Reads the file in each of the folders ``places``; new entries go to the first that can be written."""
        self._places = places
        self._entries: dict[str, Any] = {**_unsaved}
        for folder in reversed(places):
            self._entries |= _read(folder)

    def get(self, key: str) -> Any:
        """The value of ``key``, or None."""
        return self._entries.get(key)

    def put(self, key: str, value: Any) -> None:
        """Stores ``value`` in this process, and for later ones if a folder can be written."""
        self._entries[key] = value
        for folder in self._places:
            with suppress(OSError):
                text = json.dumps(_read(folder) | {key: value}, indent=1, sort_keys=True)
                trust.write(folder / FILE, text.encode())
                return
        _unsaved[key] = value


def _read(folder: Path) -> dict[str, Any]:
    """The entries in ``folder``; none if untrusted users can write there, as they name compilers that are run."""
    try:
        with folders.open_cache(folder) as descriptor:
            text = trust.content(FILE, descriptor, shared=folders.shared(folder), limit=_LIMIT)
        content = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
