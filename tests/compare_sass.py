"""Compares the machine code of kernels in two checkouts, or of two builds: opcodes and registers.

    python tests/compare_sass.py BEFORE [AFTER] [--names relu gelu] [--arch 90]

BEFORE and AFTER are checkouts (AFTER is this one if left out), whose kernels are compiled for the arch with this checkout's
options, or two libraries or object files. Names, labels, addresses and offsets into constant memory are no differences.
Needs nvcc, cuobjdump and nvdisasm; `pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm` has the last two, under nvidia/.
The exit code is 1 where something differs.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", re.MULTILINE)
NOT_COMPARED = (
    (r"`?\(?\.L_x?_?\w+\)?", "LABEL"),
    (r"\b(BRA|BSSY|BRX|CALL|JMP|WARPSYNC)(\S*)(.*?)0x[0-9a-f]+", r"\1\2\3ADDRESS"),
    (r"\b(c\[\w+\])\[(\w*?)\+?(0x[0-9a-f]+)?\]", r"\1[\2 OFFSET]"),
    (r"\b\w+@(lo|hi)\(\S+\)|fun@\S+", "NAME"),
)


def machine_code(binary: Path) -> dict[str, list[str]]:
    """The opcodes and registers of each kernel of a library or an object file."""
    from jitact.measuring.instructions import disassembled

    try:
        shown = disassembled(binary)
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from None
    return {name: [_normalised(line) for line in INSTRUCTION.findall(text)] for name, text in shown.items()}


def compiled(checkout: Path, name: str, arch: str, folder: Path) -> Path:
    """An object file of a checkout's kernel, compiled as the loader would for one arch."""
    from jitact import registry
    from jitact.kernels import KernelSource
    from jitact.kernels.loader.plan import NVCC_FLAGS
    from jitact.kernels.loader.source import DEVICE

    device = checkout / "kernels" / "device"
    path = checkout / "kernels" / f"{name}.cu"
    found = registry.REGISTRY.get(name)
    source = found.activation.source if found else KernelSource.from_file(name)  # the latter for kernels of rows
    kernel = source._replace(text=path.read_text()).full_text
    kernel = kernel.replace(str(DEVICE), str(device))  # the headers of the checkout
    (folder / "kernel.cu").write_text(f'#include "elementwise.cuh"\n{kernel}\n#include "launch.cuh"\n')
    command = ["nvcc", "-c", *NVCC_FLAGS, "--expt-relaxed-constexpr", f"-gencode=arch=compute_{arch},code=sm_{arch}"]
    command += ["-DJITACT_CUDA", *source.defines(), f"-I{device}", "kernel.cu", "-o", "kernel.o"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "kernel.o"


def differences(before: dict[str, list[str]], after: dict[str, list[str]]) -> Iterator[str]:
    """A readable list of differences. Kernels whose names differ are matched if their code is the same."""
    new = {name: code for name, code in after.items() if name not in before}
    for name, code in before.items():
        if name in after:
            if code != after[name]:
                lines = difflib.unified_diff(code, after[name], "before", "after", n=1, lineterm="")
                yield "\n".join([f"{_readable(name)}: {len(code)} instructions, now {len(after[name])}", *lines])
            continue
        twin = next((other for other, its in new.items() if its == code), None)
        if twin is None:
            yield f"{_readable(name)}: gone, {len(code)} instructions, and no new kernel has this code"
        else:
            del new[twin]
    for name, code in new.items():
        yield f"{_readable(name)}: new, {len(code)} instructions"


def main(arguments: list[str] | None = None) -> int:
    """Prints the differences; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path, help="a checkout, a library or an object file")
    parser.add_argument("after", type=Path, nargs="?", default=HERE, help="the same; this checkout if left out")
    parser.add_argument("--names", nargs="+", help="of kernels, where checkouts are compared; all if left out")
    parser.add_argument("--arch", default="90", help="a compute capability without its point; 90 if left out")
    args = parser.parse_args(arguments)
    if args.before.is_file():
        return _report(args.before.name, machine_code(args.before), machine_code(args.after))
    names = args.names or sorted(path.stem for path in (args.before / "kernels").glob("*.cu"))
    different = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            # One after the other, as both are compiled to the same file.
            both = (args.before, args.after)
            codes = [machine_code(compiled(each.resolve(), name, args.arch, Path(folder))) for each in both]
        different |= _report(name, *codes)
    return different


def _report(name: str, before: dict[str, list[str]], after: dict[str, list[str]]) -> int:
    found = [*differences(before, after)]
    print(f"{name}: {len(before)} kernels, {'the same' if not found else f'{len(found)} differ'}", flush=True)
    print("".join(f"  {line}\n" for each in found for line in each.splitlines()), end="", flush=True)
    return int(bool(found))


def _normalised(instruction: str) -> str:
    for pattern, instead in NOT_COMPARED:
        instruction = re.sub(pattern, instead, instruction)
    return re.sub(r"\s+", " ", instruction).strip()


def _readable(name: str) -> str:
    """A kernel's demangled name, if there is a tool for that."""
    if not shutil.which("c++filt"):
        return name
    return subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
