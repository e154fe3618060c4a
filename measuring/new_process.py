"""Python programs in new processes, which find the same modules."""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["run_new"]


def run_new(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with this process's module path, and with environment variables; returns what it printed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))} | variables
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process would compile this package's Python again
    return subprocess.run([sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True)
