"""Checks by compilers: every CUDA kernel for three architectures, the declarations of torch's ABI, no promotion to double."""

from __future__ import annotations

import platform
import re
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from common import SLOW, slow_but

import jitact
from jitact import kernels
from jitact.kernels.loader.parts import write_compiler
from jitact.kernels.loader.plan import CFLAGS, CPU_LEVELS, LIBMVEC, NVCC_FLAGS, make_plan
from jitact.kernels.loader.source import RowPart
from jitact.registry import record_named

FOLDER = Path(kernels.__file__).parent
DEVICE = FOLDER / "device"
INCLUDE = Path(torch.__file__).parent / "include"

ALWAYS = ("relu", "xielu", "swiglu")  # these use most of the loops; the others run with -m slow
KERNELS = slow_but(jitact.names(), ALWAYS)
# Builds of rows are of parts. By default one of each dtype's size, along and across, from the output and from the input.
PARTS = [
    RowPart("bfloat16", "along", "output"),
    SLOW(RowPart("float32", "across", "output")),
    SLOW(RowPart("float32", "along", "input")),
    RowPart("float32", "across", "input"),
]


def compile_text(text: str, folder: Path, command: list[str]) -> None:
    source = folder / "kernel.cu"
    source.write_text(text)
    result = subprocess.run([*command, str(source)], capture_output=True, text=True, cwd=folder)
    assert result.returncode == 0, result.stderr[-4000:]


def kernel_text(name: str) -> str:
    return text_of(source_of(name))


def text_of(source: kernels.KernelSource) -> str:
    return f'#include "elementwise.cuh"\n{source.full_text}\n#include "launch.cuh"\n'


def defines(name: str) -> list[str]:
    return source_of(name).defines()


def source_of(name: str) -> kernels.KernelSource:
    return jitact.get(name).activation.source if name in jitact.names() else kernels.KernelSource.from_file(name)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize("archs", [(90,), SLOW((80, 100))], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_nvcc_compiles_every_kernel(name: str, archs: tuple[int, ...], tmp_path: Path) -> None:
    nvcc_compiles(source_of(name), archs, tmp_path)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize("arch", [80, 90, 100])  # from 90 on, blocks wait for asynchronous copies by others
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.slow
def test_nvcc_compiles_rows(name: str, arch: int, tmp_path: Path) -> None:
    nvcc_compiles(source_of(name), [arch], tmp_path)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_nvcc_compiles_parts_of_rows(part: RowPart, tmp_path: Path) -> None:
    nvcc_compiles(source_of("softmax")._replace(rows=part), [90], tmp_path)


def nvcc_compiles(source: kernels.KernelSource, architectures: Sequence[int], folder: Path) -> None:
    archs = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures]
    command = [
        "nvcc",
        "-c",
        "-O1",
        "-std=c++20",
        "--threads=0",
        "--expt-relaxed-constexpr",
        "-DJITACT_CUDA",
        *archs,
        f"-I{DEVICE}",
    ]
    compile_text(text_of(source), folder, [*command, *source.defines(), "-o", str(folder / "kernel.o")])


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize("name", ["relu", SLOW("prelu"), SLOW("softmax")])
def test_parts_have_what_the_whole_has(name: str, tmp_path: Path) -> None:
    """Parts that are compiled in parallel and linked have each kernel once, and one function that launches them."""
    parts = 2 if name == "relu" else 12
    (tmp_path / "kernel.cu").write_text(kernel_text(name))
    flags = [*NVCC_FLAGS, "--expt-relaxed-constexpr", "-arch=sm_90", "-DJITACT_CUDA", *defines(name), f"-I{DEVICE}"]
    templates = "elementwise|(fold|column|plane)_sums|walk_rows|walk_columns|walk_planes|walk_short_rows|transpose_tiles"
    kernel_or_caller = re.compile(rf"^(?!_ZZ).*\d({templates})I|^(_ZN6jitact4rows8)?run_cuda")  # _ZZ: within a function
    found = []
    for compiler in ("nvcc", write_compiler(tmp_path / "nvcc.sh", "nvcc", parts, "c++")):
        command = [*shlex.split(compiler), *flags, "-c", "kernel.cu", "-o", "kernel.o"]
        subprocess.run(command, cwd=tmp_path, check=True)
        table = subprocess.run(["nm", "kernel.o"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        symbols = [line.split()[-2:] for line in table.splitlines()]
        assert not [name for kind, name in symbols if kind == "U" and "jitact" in name]
        found.append(sorted(name for kind, name in symbols if kind in "tTW" and kernel_or_caller.match(name)))
    assert found[0] == found[1] and len(found[0]) > 12

    (tmp_path / "kernel.cu").write_text("#error not this\n")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and (done.stdout + done.stderr).count("error: #error") == 1


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_folds_wait_before_they_read(tmp_path: Path) -> None:
    """With programmatic dependent launch they start before the previous kernel has ended, and wait for it before they read.

    What those that do not wait at first have read, they read again, past the first-level cache.
    """
    ptx = tmp_path / "kernel.ptx"
    command = ["nvcc", "-ptx", "-O3", "-std=c++20", "--expt-relaxed-constexpr", "-DJITACT_CUDA", "-arch=sm_90", f"-I{DEVICE}"]
    compile_text(kernel_text("prelu"), tmp_path, [*command, *defines("prelu"), "-o", str(ptx)])
    folds = re.findall(r"\.entry \w*fold_sums\w+\((.*?)(?=\.entry|\Z)", ptx.read_text(), re.DOTALL)
    assert len(folds) == 4
    for text in folds:
        assert text.count("griddepcontrol.wait") == 1 and "griddepcontrol.launch_dependents" not in text
        assert text.index("griddepcontrol.wait") < min(text.index("ld.global"), text.index("st.global"))
        assert {load.split(".")[2] for load in re.findall(r"ld\.global\S*", text)} == {"cg"}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize("name", ["relu", SLOW("gelu"), "swiglu"])
def test_vectors_are_stored_whole(name: str, tmp_path: Path) -> None:
    """Each 16-byte vector by one instruction: with four, the stores of a warp touch four times as many sectors of the cache."""
    ptx = tmp_path / "kernel.ptx"
    command = ["nvcc", "-ptx", "-O3", "-std=c++20", "--expt-relaxed-constexpr", "-DJITACT_CUDA", "-arch=sm_90", f"-I{DEVICE}"]
    compile_text(kernel_text(name), tmp_path, [*command, *defines(name), "-o", str(ptx)])
    dense = re.findall(r"\.entry \w*\d+elementwiseI(\w+)\((.*?)(?=\.entry|\Z)", ptx.read_text(), re.DOTALL)
    assert dense
    for kernel, text in dense:
        if re.search(r"Ed(Lb[01])?E", kernel):
            continue  # float64, whose gradients the compiler may store as half vectors
        stores = Counter(re.findall(r"st\.global\.(\S+)", text))
        whole = sum(count for kind, count in stores.items() if kind.startswith("v4"))
        single = sum(count for kind, count in stores.items() if not kind.startswith("v4") and kind != "u8")  # u8: bits
        assert whole >= 1 and single <= 2, (kernel, stores)  # scalar stores: one per written tensor, for the last block


# Numbers, long polynomials, three gradients; the others run with -m slow.
WIDE = ("softplus", "squareplus", "tanhshrink", "clamped_swiglu", "xielu")
ONE_BY_ONE = {("snake", "d"), ("xielu", "f"), ("xielu", "d")}  # not vectorised: sin of the C library; sums of three gradients


@pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("c++") is None, reason="no C++ compiler for AVX2")
@pytest.mark.parametrize("name", slow_but(jitact.names(), WIDE))
def test_a_cpu_computes_vectors(name: str, tmp_path: Path) -> None:
    """A branch in the loop, to which a ?: may be compiled, prevents vectorisation, which makes it 5 to 20 times slower."""
    assembly = tmp_path / "kernel.s"
    command = ["c++", "-x", "c++", "-S", *CFLAGS, "-w", "-mavx2", "-mfma", "-mf16c", "-isystem", str(INCLUDE), f"-I{DEVICE}"]
    compile_text(kernel_text(name), tmp_path, [*command, *defines(name), "-o", str(assembly)])
    loops = re.findall(r"^(_ZN6jitact5loops10run_blocks\S*):$(.*?)^\t\.size", assembly.read_text(), re.MULTILINE | re.DOTALL)
    assert loops
    for loop, text in loops:
        dtype = re.search(r"OpE\d+E(f|d|NS\w+?)E", loop)[1]
        packed = len(re.findall(r"\tv\w+p[sd]\t.*[yz]mm", text))
        single = len(re.findall(r"\tv(?:mul|add|sub|div|sqrt|fn?m\w+)s[sd]\t", text))
        if "Dual" not in loop and (name, dtype) not in ONE_BY_ONE:
            assert single <= 6 or single <= packed / 2, (loop, packed, single)


def is_gcc() -> bool:
    """Whether c++ is GCC, which says what it vectorised."""
    if shutil.which("c++") is None:
        return False
    return "Free Software Foundation" in subprocess.run(["c++", "--version"], capture_output=True, text=True).stdout


# Where gcc gave up vectorising: stores of bits, which are bytes and so may be those of any object; copies of three results;
# choices that depend on others, or on their constants; terms of derivatives. With the loops that remain where calls of the
# platform's functions are not vectorised: none remain where they are.
LOOPS = {
    "leaky_relu+bias+dropout+residual": 0,
    "prelu+bias": 0,
    "hardtanh+dropout": 0,
    "relu+bias+dropout+residual": 0,
    "clamp(x / 6 + 0.5, 0, 1) * x": 0,
    "x * tanh(log1p(exp(x)))": 2,
    "x > 0 ? x * sqrt(x * x + 1) : 0": 0,
    "(x > 0 ? x : 1) * x + (x > 1 ? 0 : x * x)": 0,
    "x > 0 ? sin(x) * cos(x) : atan(x)": 5,
}
CALLING = [name for name, loops in LOOPS.items() if loops]
USUALLY = [name for name in LOOPS if name.startswith(("leaky_relu", "prelu", "x ", "(x"))]


@pytest.mark.skipif(platform.machine() != "x86_64" or not is_gcc(), reason="GCC for x86 says what it vectorised")
@pytest.mark.parametrize("libmvec", [False, True], ids=["calls", "libmvec"])
@pytest.mark.parametrize("name", slow_but(LOOPS, USUALLY))
def test_a_cpu_computes_vectors_of_compositions(name: str, libmvec: bool, tmp_path: Path) -> None:
    if libmvec and (name not in CALLING or not make_plan(source_of("relu")).cxx.libmvec):
        pytest.skip("the compiler finds no libmvec" if name in CALLING else "without calls there is no difference")
    source = jitact.define("loops", name).activation.source if "*" in name else record_named(name).source
    missed = tmp_path / "missed"
    text = f'#include "elementwise.cuh"\n{source.full_text}\n#include "launch.cuh"\n'
    flags = [*CFLAGS, *(LIBMVEC if libmvec else ()), "-w", *CPU_LEVELS["AVX512"], "-isystem", str(INCLUDE), f"-I{DEVICE}"]
    compile_text(text, tmp_path, ["c++", "-x", "c++", "-S", *flags, f"-fopt-info-vec-missed={missed}", *source.defines()])
    lines = (DEVICE / "launch_cpu.h").read_text().splitlines()
    (loop,) = (number for number, line in enumerate(lines, 1) if "u < units; u++" in line)
    found = re.findall(rf"launch_cpu\.h:{loop}:\d+: missed: couldn't vectorize loop", missed.read_text())
    assert missed.read_text() and len(found) == (0 if libmvec else LOOPS[name])


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_the_abi_is_declared_as_torch_declares_it(tmp_path: Path) -> None:
    text = """
        #define USE_CUDA
        #include <torch/csrc/inductor/aoti_torch/c/shim.h>
        #include <torch/csrc/stable/c/shim.h>
        #include "torch_abi.h"
    """
    flags = ["-std=c++20", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-isystem", str(INCLUDE), f"-I{DEVICE}"]
    compile_text(text, tmp_path, ["c++", "-x", "c++", "-fsyntax-only", *flags])


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_a_first_build_reads_and_compiles_little(tmp_path: Path) -> None:
    """As each first use waits for it: no containers, strings and algorithms of the standard library, no unneeded operators."""
    text = f'{kernel_text("relu")}#include "binding.cpp"\n'
    command = ["c++", "-x", "c++", "-O1", *CFLAGS[1:], "-w", "-isystem", str(INCLUDE), f"-I{DEVICE}", *defines("relu")]
    compile_text(text, tmp_path, [*command, "-MD", "-MF", "read", "-S", "-o", "kernel.s"])
    read = {Path(path).name for path in (tmp_path / "read").read_text().split()}
    assert "binding.cpp" in read
    assert not read & {"stl_algo.h", "stl_vector.h", "basic_string.h", "sstream", "shared_ptr.h", "unordered_map.h"}
    assembly = (tmp_path / "kernel.s").read_text()
    found = {each for each in ("one_result", "all_gradients", "packed_gradients", "make_sums") if each in assembly}
    assert found == {"one_result"}


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("name", slow_but(jitact.names()))
def test_nothing_is_promoted_to_double(name: str, tmp_path: Path) -> None:
    """A float64 literal in a float kernel could double its time; the compiler reports any."""
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror=double-promotion", "-isystem", str(INCLUDE), f"-I{DEVICE}"]
    compile_text(kernel_text(name), tmp_path, ["c++", "-x", "c++", "-fsyntax-only", *flags, *defines(name)])
