"""How long the first calls of activations take in new processes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from .. import kernels
from ..registry import REGISTRY
from .new_process import run_new

__all__ = ["first_use"]

FIRST_USE = """
import sys
sys.path[:] = filter(None, sys.path)  # not what lies where this is started
import json, time, torch
x = torch.ones(8, device=sys.argv[1])
x.sum().item()
begin = time.perf_counter()
import jitact
seconds = {"import": time.perf_counter() - begin}
for name in sys.argv[2:]:
    begin = time.perf_counter()
    jitact.get(name)()(x).sum().item()
    seconds[name] = time.perf_counter() - begin
print(json.dumps(seconds))
"""


def first_use(names: list[str], device: torch.device, cold: list[str]) -> dict[str, Any]:
    """The time of first calls in new processes: from the cache, in milliseconds, and with a build, in seconds.

    Args:
        names: activations.
        device: where they run.
        cold: those to build in an empty cache; for the others, the build time recorded in the cache is used.
    """
    with tempfile.TemporaryDirectory() as empty:
        seconds = _seconds_of_first_use(cold, device, JITACT_CACHE_DIR=empty)
        # Builds in the folders that stand in for an unusable cache are loaded in any case, and were not timed then.
        builds = {name: seconds[name] for name in cold if name in seconds and any(Path(empty).glob(f"{name}-*"))}
    loads = _seconds_of_first_use(names, device)
    loads_ms = {name: 1000 * seconds for name, seconds in loads.items()}
    uses = {name: {"build_s": builds.get(name) or _recorded_seconds(name), "load_ms": loads_ms.get(name)} for name in names}
    return {"import_ms": loads_ms.get("import"), "first_use": uses}


def _seconds_of_first_use(names: list[str], device: torch.device, **variables: str) -> dict[str, float]:
    done = run_new(FIRST_USE, str(device), *names, **variables)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}


def _recorded_seconds(name: str) -> float | None:
    """The seconds that the cached build of an activation took, from ``build.json`` in the cache."""
    library = kernels.load(REGISTRY[name].activation.source)
    try:
        return json.loads((library.path.parent / "build.json").read_text())["seconds"]
    except (OSError, ValueError, KeyError):
        return None
