"""What was found out about this machine's compilers and GPUs, kept in the cache so that a hit need not ask again."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["Memory"]

FILE = "machine.json"


class Memory:
    """A small dictionary in a file, written whole by rename. Losing it, or an entry to a race, costs one more look."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Reads the file in each of ``folders``; the first that can be written keeps what is new."""
        self._folders = folders
        self._entries: dict[str, Any] = {}
        for folder in reversed(folders):
            self._entries |= _read(folder / FILE)

    def get(self, key: str) -> Any:
        """What was kept under ``key``, or None."""
        return self._entries.get(key)

    def put(self, key: str, value: Any) -> None:
        """Keeps ``value`` in this process, and for later ones if a folder can be written."""
        self._entries[key] = value
        for folder in self._folders:
            temporary = folder / f".{FILE}.{os.getpid()}"
            try:
                temporary.write_text(json.dumps(_read(folder / FILE) | {key: value}, indent=1, sort_keys=True))
                temporary.replace(folder / FILE)
                return
            except OSError:
                continue


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
