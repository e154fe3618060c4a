"""Compiles kernel files at first use, keeps what was compiled, and hands out operators.

This package alone knows compilers, caches and locks; everything above it works with the operators that :func:`load`
registers. From sources to operators:

    source      a kernel file and the headers that it reads
    plan        what its build depends on, and the key that follows
    toolchain   the compilers, gpu the GPUs, memory what is remembered of both
    build       the cached build that serves, or a new one: folders, cache, lock, compile
    load        the library in this process
    log         what is said meanwhile, errors what is raised

``python -m jitact.kernels`` builds in advance, lists, clears and diagnoses; docs/cache.md tells more.
"""

from .loader.errors import BuildError, CompileError, NoSpaceError, ToolchainError
from .loader.load import Library, load
from .loader.source import KernelSource, Work

__all__ = ["BuildError", "CompileError", "KernelSource", "Library", "NoSpaceError", "ToolchainError", "Work", "load"]
