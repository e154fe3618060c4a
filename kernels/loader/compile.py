"""Runs torch's load_inline, with the compilers that the loader found and errors that people can read."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from . import cache, source
from .errors import BuildError, explain
from .folders import shared
from .log import logger
from .plan import Plan
from .toolchain import find_cudart, find_ninja
from .trust import opened, replaceable

__all__ = ["compile_library", "jobs"]

_MEMORY_PER_COMPILER = 1 << 30  # bytes; nvcc takes the most, a quarter of this for a plain kernel


def compile_library(plan: Plan, folder: Path, staging: Path) -> bytes:
    """Compiles the plan's kernels and binding in ``staging`` and returns the library.

    Args:
        plan: what to compile, and how.
        folder: the cache, for the log of a build that fails.
        staging: a folder of our own.

    Raises:
        CompileError: the compiler refuses the kernel file.
        ToolchainError, NoSpaceError, BuildError: something else is wrong; the message says what.
    """
    kernel = _kernel_text(plan)
    with _environment(plan, staging) as cpp_extension, ExitStack() as paths:
        path_of = _fixed_path if replaceable(staging, shared=shared(folder)) else _plain_path
        staging = paths.enter_context(path_of(staging))
        include = [paths.enter_context(_plain_path(path)) for path in plan.source.include_folders()]
        try:
            library = cpp_extension.load_inline(
                f"jitact_{plan.name}",
                cpp_sources=[kernel, (source.DEVICE / "binding.cpp").read_text()],
                cuda_sources=[kernel] if plan.made_archs else None,
                extra_cflags=plan.cflags(),
                extra_cuda_cflags=[*plan.nvcc_flags(), *_host_compiler(plan), *_in_parallel()],
                extra_ldflags=_link_flags(plan, staging),
                extra_include_paths=[str(path) for path in include],
                build_directory=str(staging),
                is_python_module=False,
                no_implicit_headers=True,
            )
        except RuntimeError as error:
            output = str(error)
            log = cache.write_log(folder, plan.title, output)
            logger.debug("%s", output)
            raise explain(plan.name, output, plan.source.path, log, plan.source.text) from None
        except OSError as error:
            if error.errno is not None:
                raise
            raise BuildError(f"the library made for {plan.name} cannot be loaded: {error}") from None
        _log_commands(staging)
        return Path(library).read_bytes()


def jobs() -> int:
    """How many compilers may run at once: JITACT_JOBS, else as many as there are cores and memory for.

    Raises:
        BuildError: JITACT_JOBS is no positive number.
    """
    asked = os.environ.get("JITACT_JOBS")
    if asked:
        if not asked.isdigit() or int(asked) == 0:
            raise BuildError(f"JITACT_JOBS must be a positive number, got {asked!r}")
        return int(asked)
    return max(1, min(len(os.sched_getaffinity(0)), _free_memory() // _MEMORY_PER_COMPILER))


def _free_memory() -> int:
    """Bytes that the machine and the container have left."""
    found = [1 << 62]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            found.append(int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):  # another kind of system: what is known so far has to do
        pass
    return max(0, min(found))


def _kernel_text(plan: Plan) -> str:
    """The kernel file, after what it uses, between the library's headers."""
    first, last = f'#include "{source.DEVICE}/elementwise.cuh"', f'#include "{source.DEVICE}/launch.cuh"'
    return f"{first}\n{plan.source.full_text}\n{last}\n"


def _in_parallel() -> list[str]:
    """Has nvcc compile for several GPUs, and the functions for each, at the same time."""
    return [f"--threads={jobs()}", f"--split-compile={jobs()}"]


def _host_compiler(plan: Plan) -> list[str]:
    """Has nvcc take the C++ compiler that compiles the rest, unless CC names one, which torch then passes."""
    return [] if os.environ.get("CC") else ["-ccbin", shlex.quote(plan.cxx.path)]


def _link_flags(plan: Plan, staging: Path) -> list[str]:
    """The CUDA runtime by the name that torch asks for, which pip's lacks."""
    if not plan.made_archs:
        return []
    folder = staging / "lib"
    folder.mkdir()
    (folder / "libcudart.so").symlink_to(find_cudart(plan.nvcc))
    return [f"-L{shlex.quote(str(folder))}"]


@contextmanager
def _plain_path(folder: Path) -> Iterator[Path]:
    """A path of ``folder`` without what ninja takes for its own, which torch does not escape, and what nvcc loses."""
    if not set(str(folder)) & set("$:\n'\","):
        yield folder
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


@contextmanager
def _fixed_path(folder: Path) -> Iterator[Path]:
    """A path that leads to ``folder``, which is ours, whatever others do to the names that led there."""
    with opened(folder, shared=False) as descriptor:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")


@contextmanager
def _environment(plan: Plan, staging: Path) -> Iterator:
    """torch.utils.cpp_extension, set up to run the tools that the plan names; all as before afterwards."""
    ninja = find_ninja()
    wanted = {
        "LC_ALL": "C",  # error messages are parsed
        "MAX_JOBS": str(jobs()),
        cache.MARK: staging.name,  # by which they are found, should they outlive us
        "CXX": plan.cxx.path,
        "TORCH_DONT_CHECK_COMPILER_ABI": "1",  # two processes for a warning about compilers older than C++20
        "TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES": "1",  # for builds that are repeated in one folder, as ours never are
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # cpp_extension asks for GPUs, which would otherwise initialise CUDA
    }
    if shutil.which("ninja") != ninja:
        wanted["PATH"] = os.path.dirname(ninja) + os.pathsep + os.environ.get("PATH", os.defpath)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    torch_log = logging.getLogger("torch.utils.cpp_extension")
    level = torch_log.level
    torch_log.setLevel(logging.ERROR)  # "No CUDA runtime is found": known, and no reason to worry anybody
    try:
        from torch.utils import cpp_extension

        home = cpp_extension.CUDA_HOME
        cpp_extension.CUDA_HOME = plan.nvcc.root if plan.nvcc else home
        try:
            yield cpp_extension
        finally:
            cpp_extension.CUDA_HOME = home
    finally:
        torch_log.setLevel(level)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _log_commands(staging: Path) -> None:
    """Shows what was run, if that is wanted."""
    if logger.isEnabledFor(logging.DEBUG):
        done = subprocess.run([find_ninja(), "-t", "commands"], cwd=staging, capture_output=True, text=True, check=False)
        logger.debug("%s", done.stdout.strip())
