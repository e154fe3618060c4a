"""Whether something else was at work on this machine while something was measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["Others"]


class Others:
    """Watches what others do from when it is made on: other processes, and the host of a virtual machine."""

    def __init__(self) -> None:
        """Begins."""
        self._begin = _reading()

    def cpus(self) -> float:
        """How many CPUs they took, on average; 0 where the system does not tell."""
        used, own, seconds = (now - then for now, then in zip(_reading(), self._begin, strict=True))
        return max(0.0, used - own) / seconds if seconds else 0.0

    def disturb(self, threads: int) -> bool:
        """Whether they left fewer CPUs than so many threads take, by more than a fifth."""
        return self.cpus() + 0.8 * threads > (os.cpu_count() or 1)


def _reading() -> tuple[float, float, float]:
    """Seconds of work of all CPUs, of this process and those that it started, and of time."""
    own = sum(os.times()[:4])
    try:
        columns = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return own, own, time.monotonic()
    user, nice, system, _, _, irq, softirq, steal = map(int, columns[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK"), own, time.monotonic()
