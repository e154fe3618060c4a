"""The library's GPU loops, emulated on the CPU: operators compiled so that CPU tensors run through the CUDA code."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import torch

from jitact.kernels.loader import load
from jitact.kernels.loader.source import DEVICE, KernelSource

__all__ = ["FLAGS", "HERE", "device_headers", "emulate", "without_launches"]

HERE = Path(__file__).resolve().parent
_LAUNCH = re.compile(r"(\w+(?:<[^<>]*>)?)<<<(.*), (\w+), \w+, [\w()]+>>>\(")

# Without unique symbols: shared memory is static here, and another library in the process may have a kernel of the same name.
FLAGS = ("-std=c++20", "-O1", "-w", "-fno-gnu-unique", "-shared", "-fPIC", "-pthread")


def without_launches(text: str) -> str:
    """CUDA source with kernel launches replaced by calls of ``launch_emulated``."""
    return _LAUNCH.sub(r"launch_emulated(\2, \3, [=](auto... a) { \1(a...); }, ", text)


_RUN = """
namespace jitact::loops {

void run_cpu(const Call& call) {
  Call own = call;
  std::vector<char> workspace(summed(call.op) > 0 ? workspace_bytes(call) : 0, char(0xff));  // NaN
  own.workspace = workspace.data();
  run_cuda(own, nullptr);
}

}  // namespace jitact::loops
"""


def device_headers(folder: Path, old: str = "", new: str = "") -> None:
    """Writes the headers of the GPU loops, adapted for emulation, to a folder, with ``new`` in place of ``old``."""
    texts = {header.name: without_launches(header.read_text()) for header in DEVICE.iterdir()}
    assert old in "".join(texts.values())
    for name, text in texts.items():
        (folder / name).write_text(text.replace(old, new) if old else text)
    (folder / "ptx.cuh").write_text("#pragma once\n")  # emulated_cuda.h replaces it


def emulate(source: KernelSource, name: str, folder: Path, old: str = "", new: str = "") -> None:
    """Registers the operators of a kernel file, as ``torch.ops.jitact.<name>_forward`` and so on, for tensors on the CPU.

    The GPU loops have ``new`` in place of ``old``.
    """
    device_headers(folder, old, new)
    kernel = source.full_text.replace(str(DEVICE), str(folder))
    text = [f'#define __CUDACC__\n#define JITACT_CUDA\n#include "{HERE}/emulated_cuda.h"\n#include "elementwise.cuh"', kernel]
    text += [f'#include "launch.cuh"{_RUN}#undef JITACT_CUDA\n#include "binding.cpp"\n']
    (folder / f"{name}.cpp").write_text("\n".join(text))
    home = Path(torch.__file__).parent
    command = ["g++", *FLAGS, *source.defines(), f"-I{folder}"]
    command += [f"-I{home / 'include'}", f"{name}.cpp", "-o", f"{name}.so", f"-L{home / 'lib'}", "-ltorch_cpu"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / f"{name}.so"))
    library.jitact_register.restype = ctypes.c_char_p
    problem = library.jitact_register(*(each.encode() for each in (source.name, name, *load.schema(source.signature))))
    assert problem is None, problem
