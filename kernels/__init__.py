"""Compiles kernel files at first use, caches the builds, and registers their operators.

Only this package deals with compilers, caches and locks; the rest uses the operators that :func:`load` registers, and what
kernel files say about themselves. The modules of ``loader``, from sources to operators:

    signature   what a kernel file declares; slopes makes files of its derivatives
    source      a kernel file and the headers that it includes; uses adds the files that it calls
    plan        what a build depends on, and its cache key
    toolchain   finds compilers; gpu finds GPUs; memory caches the facts about both
    build       a suitable cached build, or a new one: folders, cache, lock, compile
    load        loads the library into this process
    log         messages; errors has the exceptions

``python -m jitact.kernels`` builds in advance, lists, clears and diagnoses; see docs/cache.md.
"""

from .loader.errors import BuildError, CompileError, NoSpaceError, ToolchainError
from .loader.load import Library, load
from .loader.source import KernelSource, Work

__all__ = ["BuildError", "CompileError", "KernelSource", "Library", "NoSpaceError", "ToolchainError", "Work", "load"]
