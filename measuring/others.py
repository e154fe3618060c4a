"""Detects other work on the machine during a measurement."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["Others"]


class Others:
    """Measures the CPU time of other processes, and that stolen by a virtual machine's host, since its construction."""

    def __init__(self) -> None:
        """Starts measuring."""
        self._begin = _reading()

    def cpus(self) -> float:
        """The average number of CPUs that others used; 0 if the system has no /proc/stat."""
        used, own, seconds = (now - then for now, then in zip(_reading(), self._begin, strict=True))
        return max(0.0, used - own) / seconds if seconds else 0.0

    def disturb(self, threads: int) -> bool:
        """Whether others left less than 80% of the CPUs that so many threads need."""
        return self.cpus() + 0.8 * threads > (os.cpu_count() or 1)


def _reading() -> tuple[float, float, float]:
    """Seconds: CPU time of all CPUs, CPU time of this process and its finished children, and wall-clock time."""
    own = sum(os.times()[:4])
    try:
        columns = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return own, own, time.monotonic()
    user, nice, system, _, _, irq, softirq, steal = map(int, columns[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK"), own, time.monotonic()
