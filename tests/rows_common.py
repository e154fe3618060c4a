"""Shared by the tests of rows: the accuracy of kernels, and the GPU's code as a library for the CPU."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from jitact import kernels
from jitact.measuring.limits import OF_ROWS
from jitact.rows import kernels as row_kernels

CODE = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
ULP = {dtype: bound.forward for dtype, bound in OF_ROWS.items()}
GRADIENT = {dtype: bound.gradient * torch.finfo(dtype).eps for dtype, bound in OF_ROWS.items()}
OPERATIONS = ("forward", "backward", "backward_from_output")
needs_vectors = pytest.mark.skipif(not row_kernels._has_vectors(), reason="a CPU without AVX2, whose rows are PyTorch's")
HERE, DEVICE = Path(__file__).parent, Path(kernels.__file__).parent / "device"


def smallest(dtype: torch.dtype) -> float:
    """The absolute error that is allowed for subnormal results."""
    return 16 * torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def folder_of_all(factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this test run share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def emulated_library(folder: Path, kernel: str, defines: Sequence[str] = (), parts: int = 0) -> ctypes.CDLL:
    """The GPU's loops over the rows of a kernel file, in a folder of its own; they run each thread of a cluster in turns.

    ``kernel`` is the name of one of the library's, or the text of another. Processes that ask for one folder build one library.
    With ``parts``, it is compiled in so many, in which no function is inline, and joined as the loader does.
    """
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "emulated.so").exists():
            _compile(folder, kernel, defines, parts)
    library = ctypes.CDLL(str(folder / "emulated.so"))
    for function in ("run", "run_in_chunks"):
        if hasattr(library, function):
            getattr(library, function).restype = ctypes.c_char_p
    return library


def _compile(folder: Path, kernel: str, defines: Sequence[str], parts: int) -> None:
    text = (DEVICE.parent / f"{kernel}.cu").read_text() if kernel.isidentifier() else kernel
    (folder / "kernel.cu").write_text(text)
    for header in DEVICE.glob("*.*h"):
        shutil.copy(header, folder)
    (folder / "ptx.cuh").write_text("#pragma once\n")  # emulated_cuda.h replaces it
    flags = ["-std=c++20", "-O0" if parts else "-O1", "-mfma", "-ffp-contract=off", "-w", "-fPIC", "-DJITACT_CUDA", *defines]
    files = [f"-I{folder}", f"-I{HERE}", f'-DKERNEL="{folder}/kernel.cu"', str(HERE / "emulated_rows.cpp")]
    objects = [f"{part}.o" for part in range(parts)]
    compilers = [
        subprocess.Popen(["g++", *flags, *files, f"-DJITACT_PARTS={parts}", f"-DJITACT_PART={k}", "-c", "-o", to], cwd=folder)
        for k, to in enumerate(objects)
    ]
    assert not any([compiler.wait() for compiler in compilers])
    if parts:
        subprocess.run(["g++", "-r", "-nostdlib", "-Wl,-z,muldefs", *objects, "-o", "all.o"], cwd=folder, check=True)
    given = ["all.o"] if parts else [*flags, *files]
    subprocess.run(["g++", "-shared", *given, "-o", "made.so"], cwd=folder, check=True)
    (folder / "made.so").rename(folder / "emulated.so")
