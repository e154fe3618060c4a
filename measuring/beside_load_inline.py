"""Measures the time of the first use and of cache hits, compared with ``load_inline`` as it is usually written."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..kernels.loader import folders
from ..kernels.loader.errors import BuildError
from ..kernels.loader.gpu import visible_archs
from ..kernels.loader.memory import Memory
from .new_process import run_new
from .usual import usual_program

__all__ = ["bench"]

_TASK = """
import json, sys, time
import torch
x = torch.linspace(-4, 4, 1001).to("{device}").add(0)  # starts CUDA, which takes longer than all of a hit
started = time.perf_counter()
processes = []
starts = ("subprocess.Popen", "os.posix_spawn", "os.fork")
sys.addaudithook(lambda event, _: processes.append(event) if event in starts else None)
{imports}
imported = time.perf_counter()
{use}
y = forward(x)
used = time.perf_counter()
assert torch.allclose(y, x / (1 + x.abs())), y
print(json.dumps({{"import": imported - started, "use": used - imported, "processes": len(processes)}}))
"""


def bench(*, as_json: bool = False) -> int:
    """Measures first use and cache hits, and prints the figures; returns 0.

    Args:
        as_json: print the figures as JSON.
    """
    with tempfile.TemporaryDirectory(prefix="jitact-bench-") as name:
        figures = _waits(Path(name), (lambda *_: None) if as_json else _print)
    if as_json:
        print(json.dumps(figures))
    return 0


def _print(subject: str, figure: str, note: str = "") -> None:
    print(f"{subject:34}{figure:>12}  {note}".rstrip(), flush=True)


def _waits(folder: Path, say: Callable[[str, str, str], None]) -> dict[str, object]:
    """The times of a first use and of a cache hit, of jitact and of ``load_inline`` as usually written."""
    device = "cuda" if visible_archs(Memory(folders.readable())) else "cpu"
    ours = ("import jitact", "forward = jitact.softsign", device)
    firsts = [_run(*ours, folder / f"first{i}") for i in range(3)]
    hits = [_run(*ours, folder / "first0") for _ in range(7)]
    started = max(hit["processes"] for hit in hits)
    first, hit, imported = _median(firsts, "use"), _median(hits, "use"), _median(hits, "import")
    say("first use", f"{first:.2f} s", f"{device}; in a new process, to the first result")
    say("hit", f"{1e3 * hit:.1f} ms", f"{started} processes started; before it, import jitact takes {1e3 * imported:.1f} ms")

    (folder / "usual").mkdir()
    usual = ("from torch.utils.cpp_extension import load_inline", usual_program(device, str(folder / "usual")), device, folder)
    usual_first = _run(*usual)["use"]
    usual_hits = [_run(*usual) for _ in range(3)]
    usual_hit, usual_imported = _median(usual_hits, "use"), _median(usual_hits, "import")
    say("load_inline as usually written", f"{usual_first:.2f} s", f"{usual_first / first:.0f} times as long")
    say("the same, already built", f"{1e3 * usual_hit:.1f} ms", f"before it, its import takes {1e3 * usual_imported:.1f} ms")
    return {
        "device": device,
        "first_use_s": round(first, 2),
        "hit_ms": round(1e3 * hit, 1),
        "hit_processes": started,
        "import_ms": round(1e3 * imported, 1),
        "usual_first_use_s": round(usual_first, 2),
        "usual_hit_ms": round(1e3 * usual_hit, 1),
        "usual_import_ms": round(1e3 * usual_imported, 1),
    }


def _median(runs: list[dict[str, float]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def _run(imports: str, use: str, device: str, cache: Path) -> dict[str, float]:
    """Runs a program that defines ``forward`` in a new process.

    Returns the seconds of the import and of the use up to the first result, and the number of processes that it started.
    """
    task = _TASK.format(imports=imports, use=use, device=device)
    done = run_new(task, JITACT_CACHE_DIR=str(cache), TORCH_CUDA_ARCH_LIST="")
    if done.returncode != 0:
        raise BuildError(f"a measured program failed:\n{done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])
