"""All inputs of a build: sources, flags, processor, GPUs, compilers. Their hash is the key of the cached build."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import torch

from . import folders
from .cache import KEY_LENGTH, Build
from .errors import ToolchainError
from .gpu import Arch, covered, merge, requested_archs, sees_all, visible_archs
from .memory import Memory
from .source import KernelSource, digest
from .toolchain import Compiler, Nvcc, find_cxx, find_nvcc, nvcc_command

__all__ = ["CPU_LEVELS", "Plan", "cpu_level", "make_plan"]

SCHEMA = 2  # part of every key: raise it when the meaning of a cached build changes

CPU_LEVELS = {
    "DEFAULT": (),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
}
"""Compiler flags by torch's CPU capability level, in ascending order; code for one level also runs on the later ones."""

CFLAGS = (
    "-O2",  # with -O3's vectoriser: the same loops in two thirds of the compile time
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    "-fno-thread-jumps",  # of a choice of a constant it makes a choice of each result of that constant
    "-std=c++20",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    "-Werror=return-type",  # what such a function returns is undefined
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
)
LIBMVEC = ("-DJITACT_LIBMVEC",)  # where the compiler vectorises calls of mathematical functions
# -O1 applies to host code; device code is fully optimised by default.
NVCC_FLAGS = ("-O1", "-std=c++20", "-Xcompiler=-fvisibility=hidden")


class Plan(NamedTuple):
    """All inputs of a build, and the tools for it on this machine.

    Attributes:
        source: the kernel file.
        fast_math: whether to build with -use_fast_math.
        sources: the hash of the inputs that do not depend on the machine.
        cpu: the instruction set level of the CPU kernels, one of CPU_LEVELS.
        gpus: the compute capabilities of the GPUs that this process sees; before CUDA is initialised, of the machine's.
        archs: the compute capabilities that CUDA kernels are wanted for: those of the GPUs and requested ones.
        cxx: the C++ compiler, None if there is none.
        nvcc: the CUDA compiler, None if there is none or none is needed.
        missing: why this machine cannot compile, None if it can.
        missing_cuda: why it cannot compile for ``archs``, None if it can.
    """

    source: KernelSource
    fast_math: bool
    sources: str
    cpu: str
    gpus: tuple[Arch, ...]
    archs: tuple[Arch, ...]
    cxx: Compiler | None
    nvcc: Nvcc | None
    missing: str | None
    missing_cuda: str | None

    @property
    def name(self) -> str:
        """The build's name, from which operators and folders are named."""
        return "_".join([self.source.name, *(self.source.rows or ()), *(["fast_math"] if self.fast_math else [])])

    @property
    def made_archs(self) -> tuple[Arch, ...]:
        """The archs for which a build made here has CUDA kernels."""
        return () if self.missing_cuda else self.archs

    @property
    def compilers(self) -> tuple[str | None, str | None]:
        """The versions of the compilers of a build made here: C++ with its flags and C library, and nvcc if it is used."""
        cxx = None
        if self.cxx:
            library = [os.confstr("CS_GNU_LIBC_VERSION"), *(["libmvec"] if self.cxx.libmvec else [])]
            cxx = "; ".join([self.cxx.version, *self.cxx.flags, *library])
        return cxx, self.nvcc.version if self.nvcc and self.made_archs else None

    @property
    def title(self) -> str:
        """The folder name of a build made here: name and key."""
        parts = [self.sources, self.cpu, [str(arch) for arch in self.made_archs], self.compilers]
        return f"{self.name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:KEY_LENGTH]}"

    def renewed(self) -> Plan:
        """The plan with the headers as they are now."""
        return self._replace(sources=_hash(self.source, self.fast_math))

    def runs_cuda(self, build: Build) -> bool:
        """Whether a build's CUDA kernels run on the GPUs that this process sees; if it sees none, whether it has any."""
        return bool(build.archs) and covered(self.gpus, [Arch.parse(arch) for arch in build.archs])

    def defines(self) -> list[str]:
        """Preprocessor definitions, as compiler flags."""
        flags = [*self.source.defines(), *(["-DJITACT_FAST_MATH"] if self.fast_math else [])]
        return flags + (["-DJITACT_CUDA", "-DUSE_CUDA"] if self.made_archs else [])

    def cflags(self) -> list[str]:
        """Flags for the C++ compiler. No -ffast-math, which would break NaN and affect the whole process."""
        apart = ["-ffp-contract=off"] if self.source.unfused else []
        vectors = LIBMVEC if self.cxx and self.cxx.libmvec else ()
        return [*CFLAGS, *apart, *vectors, *CPU_LEVELS[self.cpu], *self.defines(), *self.own_flags()]

    def own_flags(self) -> list[str]:
        """The flags in CXX after the compiler, quoted for a shell, for compiling and linking."""
        return [shlex.quote(flag) for flag in self.cxx.flags] if self.cxx else []

    def nvcc_flags(self) -> list[str]:
        """Flags for nvcc."""
        archs = [flag for arch in self.made_archs for flag in arch.flags]
        apart = ["-fmad=false"] if self.source.unfused else []
        # nvcc takes a list with commas, and passes it through a shell of its own.
        own = [shlex.quote("-Xcompiler=" + flag.replace(",", "\\,")) for flag in self.own_flags()]
        return [*NVCC_FLAGS, *(["-use_fast_math"] if self.fast_math else []), *apart, *archs, *self.defines(), *own]


def make_plan(source: KernelSource, *, fast_math: bool = False, archs: Iterable[Arch] = ()) -> Plan:
    """A plan from the sources, the machine and the environment. Starts no process if facts about the machine are cached.

    Args:
        source: the kernel file.
        fast_math: whether to build with -use_fast_math.
        archs: compute capabilities to compile for, in addition to those of the GPUs and those in the environment.

    Raises:
        ValueError: the source's name is not an identifier, or an arch in the environment is invalid.
    """
    if not (source.name.isidentifier() and source.name.isascii()):
        raise ValueError(f"an activation's name must be an identifier, got {source.name!r}")
    memory = Memory(folders.readable(make=True))
    gpus, asked = visible_archs(memory), tuple(archs)
    wanted = merge([*gpus, *requested_archs(), *asked])
    cxx, missing = _try(lambda: find_cxx(memory))
    nvcc, missing_cuda = _try(lambda: find_nvcc(memory)) if wanted else (None, None)
    if nvcc is not None:
        unknown = [arch for arch in wanted if not nvcc.knows(arch)]
        known = tuple(gpu for gpu in gpus if nvcc.knows(gpu))
        if known and not sees_all():  # the others may be hidden
            gpus = known
        required = [arch for arch in unknown if arch in gpus or arch in asked]
        if required:
            missing_cuda = _unknown(nvcc, required)
        elif unknown:
            folders.say_once(f"nvcc {nvcc.release} does not know {', '.join(map(str, unknown))}: left out")
            wanted = tuple(arch for arch in wanted if arch not in unknown)
    return Plan(source, fast_math, _hash(source, fast_math), cpu_level(), gpus, wanted, cxx, nvcc, missing, missing_cuda)


def cpu_level() -> str:
    """The level in CPU_LEVELS that torch uses on this processor."""
    level = torch.backends.cpu.get_cpu_capability()
    return level if level in CPU_LEVELS else "DEFAULT"


def _hash(source: KernelSource, fast_math: bool) -> str:
    """The hash of the inputs that do not depend on the machine: sources, flags, torch, Python."""
    python = [sys.implementation.cache_tag, getattr(sys, "abiflags", "")]
    flags = [CFLAGS, LIBMVEC, NVCC_FLAGS, sorted(CPU_LEVELS.items()), fast_math]
    flags += [os.environ.get(name) for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")]
    parts = [SCHEMA, digest(source), flags, torch.__version__, torch.version.cuda, python, os.uname().machine]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _unknown(nvcc: Nvcc, archs: list[Arch]) -> str:
    """An error message with a remedy, for archs that an nvcc does not support."""
    known = sorted(Arch.parse(arch) for arch in nvcc.archs)
    what = f"nvcc {nvcc.release} ({nvcc.path}) cannot compile for compute capability {', '.join(map(str, archs))}"
    what += f": it knows {known[0]} to {known[-1]}"
    if archs[-1] < known[0]:
        return f"{what}\na torch of an older CUDA may: https://pytorch.org/get-started/locally prints the commands"
    if nvcc.release != torch.version.cuda:
        return f"{what}\none of torch's CUDA may: {nvcc_command()}"
    return f"{what}\na torch of a newer CUDA may: https://pytorch.org/get-started/locally prints the commands"


_T = TypeVar("_T")


def _try(find: Callable[[], _T]) -> tuple[_T | None, str | None]:
    """What ``find`` returns, or the message of its ToolchainError."""
    try:
        return find(), None
    except ToolchainError as error:
        return None, str(error)
