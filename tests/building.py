"""What the tests of the loader share: kernels that build fast, caches of their own, programs that run elsewhere.

PYTEST_DONT_REWRITE: nothing is asserted here.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jitact import kernels
from jitact.kernels import KernelSource, folders, plan, source

HALF = '#include "elementwise.cuh"\nELEMENTWISE T forward(T x) { return x * %s; }\n'
_numbers = itertools.count(1)


def kernel(factor: str = "0.5", *, name: str | None = None, text: str | None = None, path: str = "<cell>") -> KernelSource:
    """A kernel that multiplies by ``factor``, under a name of its own."""
    return KernelSource(name or f"built_{os.getpid()}_{next(_numbers)}", (), ("input",), text or HALF % factor, path)


def forward(library: kernels.Library, x: torch.Tensor) -> torch.Tensor:
    """What a library's operator makes of ``x``."""
    return getattr(torch.ops.jitact, f"{library.name}_forward")(x)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in use."""
    for name in ("JITACT_NO_BUILD", "JITACT_VERBOSE", "JITACT_ARCHS", "JITACT_JOBS", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JITACT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(folders, "_said", set())
    monkeypatch.setattr(folders, "_temporary", lambda: [tmp_path / "temporary"])
    (tmp_path / "temporary").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def quick(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, for builds of real kernels that need not be optimised."""
    monkeypatch.setattr(plan, "CFLAGS", ("-O0", *plan.CFLAGS[1:]))
    return folder


@pytest.fixture
def stand_in(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, for builds of next to nothing: what :func:`answer` makes, without operators."""
    here = tmp_path / "kernels"
    here.mkdir()
    for name in ("binding.cpp", "elementwise.cuh", "launch.cuh"):
        (here / name).write_text("")
    monkeypatch.setattr(source, "FOLDER", here)
    return folder


def answer(number: int, name: str = "answer") -> KernelSource:
    """A library with a function ``answer`` that returns ``number``; for :func:`stand_in`."""
    text = f"""#ifndef __CUDACC__  // of the library's two parts, one has it
extern "C" __attribute__((visibility("default"))) int answer() {{ return {number}; }}
#endif
"""
    return KernelSource(name, (), ("input",), text, "<answer>")


def run_python(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a new process, with this one's packages and cache."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
