"""What the tests of rows share: how exact kernels are, and the GPU's code as a library for the CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from jitact import kernels
from jitact.measuring.limits import OF_ROWS

CODE = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
ULP = {dtype: bound.forward for dtype, bound in OF_ROWS.items()}
GRADIENT = {torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
OPERATIONS = ("forward", "backward", "backward_from_output")
HERE, DEVICE = Path(__file__).parent, Path(kernels.__file__).parent / "device"


def smallest(dtype: torch.dtype) -> float:
    """What is left of an error where results are subnormal."""
    return 16 * torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def emulated_library(folder: Path, name: str, defines: Sequence[str] = ()) -> ctypes.CDLL:
    """The GPU's loops over the rows of a kernel file, in a folder of its own; they run each thread of a cluster in turns."""
    folder.mkdir()
    for header in DEVICE.glob("*.*h"):
        shutil.copy(header, folder)
    (folder / "ptx.cuh").write_text("#pragma once\n")  # emulated_cuda.h has what it has
    flags = ["-std=c++20", "-O1", "-mfma", "-ffp-contract=off", "-w", "-shared", "-fPIC", "-DJITACT_CUDA", *defines]
    files = [f"-I{folder}", f"-I{HERE}", f'-DKERNEL="{DEVICE.parent / name}.cu"', str(HERE / "emulated_rows.cpp")]
    subprocess.run(["g++", *flags, *files, "-o", "emulated.so"], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "emulated.so"))
    for function in ("run", "run_in_chunks", "hide"):
        if hasattr(library, function):
            getattr(library, function).restype = ctypes.c_char_p
    return library
