"""Shared by the tests of the loader: kernels that build fast, private caches, programs in other processes.

PYTEST_DONT_REWRITE: the assertions here need no explanation.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from jitact import kernels
from jitact.kernels import CompileError, KernelSource
from jitact.kernels.loader import build, cache, folders, lock, plan, source
from jitact.kernels.loader.plan import make_plan

HALF = '#include "elementwise.cuh"\nELEMENTWISE T forward(T x) { return x * %s; }\n'
_numbers = itertools.count(1)
NOBODY = 65534
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount file systems and to be another user")


def kernel(factor: str = "0.5", *, name: str | None = None, text: str | None = None, path: str = "<cell>") -> KernelSource:
    """A kernel that multiplies by ``factor``, under a unique name."""
    return KernelSource(name or f"built_{os.getpid()}_{next(_numbers)}", text or HALF % factor, path)


def forward(library: kernels.Library, x: torch.Tensor) -> torch.Tensor:
    """The result of a library's forward operator."""
    return getattr(torch.ops.jitact, f"{library.name}_forward")(x)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, configured for use, and a umask such that only the user can write to folders that a test makes."""
    for name in ("JITACT_NO_BUILD", "JITACT_VERBOSE", "JITACT_ARCHS", "JITACT_JOBS", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JITACT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(folders, "_said", set())
    monkeypatch.setattr(folders, "_temporary", lambda: [tmp_path / "temporary"])
    umask = os.umask(0o022)
    (tmp_path / "temporary").mkdir()
    yield tmp_path / "cache"
    os.umask(umask)


@pytest.fixture
def quick(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, for builds of real kernels without optimisation."""
    monkeypatch.setattr(plan, "CFLAGS", ("-O0", *plan.CFLAGS[1:]))
    return folder


@pytest.fixture
def stand_in(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, for builds of the tiny libraries of :func:`answer`, which have no operators."""
    here = tmp_path / "kernels"
    here.mkdir()
    for name in ("binding.cpp", "elementwise.cuh", "launch.cuh"):
        (here / name).write_text("")
    monkeypatch.setattr(source, "DEVICE", here)
    return folder


def answer(number: int, name: str = "answer") -> KernelSource:
    """A source for :func:`stand_in`, of a library with a function ``answer`` that returns ``number``."""
    text = f"""#ifndef __CUDACC__  // of the library's two parts, one has it
extern "C" __attribute__((visibility("default"))) int answer() {{ return {number}; }}
#endif
#ifdef NEVER  // no operators are made of it
ELEMENTWISE T forward(T x) {{ return x; }}
#endif
"""
    return KernelSource(name, text, "<answer>")


def run_python(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a new process with the same packages and cache."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def obtain(number: int = 1, name: str = "answer") -> tuple[cache.Entry, bool]:
    """Builds or finds the library of :func:`answer`, and checks that it is the right one."""
    entry, made = build.obtain(make_plan(answer(number, name)))
    found = subprocess.run(
        [sys.executable, "-c", f"import ctypes; print(ctypes.CDLL({str(entry.library)!r}).answer())"],
        capture_output=True,
        text=True,
        check=True,
    )  # in another process, as this one would keep a library that was replaced under the same path
    assert int(found.stdout) == number
    return entry, made


def lock_and_build(path: Path) -> str:
    """The outcome of a build under a lock: ``"built"``, or the error of the process that held it."""
    try:
        with lock.locked(path, "answer"):
            return "built"
    except CompileError as error:
        return str(error)


def in_child(function: Callable[[], object]) -> None:
    """Runs ``function`` in a forked process, and checks that it succeeds."""
    child = os.fork()
    if not child:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def as_nobody(function: Callable[[], object]) -> None:
    """The same, as a user without special rights."""

    def become_nobody() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        function()

    in_child(become_nobody)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder of ours that everybody can read; those of pytest are private."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts small separate file systems."""
    mounted: list[Path] = []

    def mount(options: str, name: str = "mounted") -> Path:
        place = tmp_path / name
        place.mkdir(exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", place], check=False)
