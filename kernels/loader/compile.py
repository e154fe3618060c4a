"""Runs torch's load_inline with the compilers that the loader found, and makes its errors readable."""

from __future__ import annotations

import ctypes
import gc
import io
import locale
import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Thread
from types import ModuleType

from . import cache, source
from .errors import BuildError, explain
from .folders import shared
from .log import logger
from .parts import Parts, number_of_parts, write_compiler
from .plan import Plan
from .toolchain import find_cudart, find_ninja
from .trust import opened, replaceable
from .uses import with_own_macros

__all__ = ["compile_library", "jobs", "variables"]

_MEMORY_PER_COMPILER = 1 << 30  # bytes; nvcc takes the most, a quarter of this for a plain kernel
_NO_ROOM = 1 << 16  # bytes on a full disk: compilers that fail remove what they wrote
# Libraries of torch with so many symbols that linking takes 0.1 to 0.4 s, each with a function in it that every build calls.
_LARGE = {"torch_cpu": "torch_library_impl", "torch_cuda": "aoti_torch_get_current_cuda_stream"}


def compile_library(plan: Plan, folder: Path, staging: Path) -> bytes:
    """Compiles the plan's kernels and binding in ``staging`` and returns the library.

    Args:
        plan: what to compile, and how.
        folder: the cache, for the log of a build that fails.
        staging: a private folder to compile in.

    Raises:
        CompileError: the compiler refuses the kernel file.
        ToolchainError, NoSpaceError, BuildError: another failure; the message explains it.
    """
    kernel = _as_torch_can_write(_kernel_text(plan), staging)
    parts = number_of_parts(plan, jobs())
    with _environment(plan, staging) as cpp_extension, ExitStack() as paths:
        path_of = _fixed_path if replaceable(staging, shared=shared(folder)) else _plain_path
        staging = paths.enter_context(path_of(staging))
        include = [paths.enter_context(_plain_path(path)) for path in plan.source.include_folders()]
        link_flags = _link_flags(plan, staging)
        paths.enter_context(_stand_ins(plan, staging))
        paths.enter_context(variables(_compilers_of_parts(plan, parts, staging)))
        # Else torch takes a build that failed in a folder of the same path, as /proc/<pid>/fd/9 is, for one that is there.
        cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(f"jitact_{plan.name}", None)
        try:
            library = cpp_extension.load_inline(
                f"jitact_{plan.name}",
                cpp_sources=[kernel, "#if !JITACT_PART", (source.DEVICE / "binding.cpp").read_text(), "#endif"],
                cuda_sources=[kernel] if plan.made_archs else None,
                extra_cflags=plan.cflags(),
                extra_cuda_cflags=[*plan.nvcc_flags(), *_host_compiler(plan), *_in_parallel(parts.cuda)],
                extra_ldflags=link_flags,
                extra_include_paths=[str(path) for path in include],
                build_directory=str(staging),
                is_python_module=False,
                no_implicit_headers=True,
            )
        except RuntimeError as error:
            output = str(error)
            log = cache.write_log(folder, plan.title, output)
            logger.debug("%s", output)
            is_full = shutil.disk_usage(folder).free < _NO_ROOM
            raise explain(plan.name, output, plan.source.path, log, plan.source.text, is_full=is_full) from None
        except OSError as error:
            if error.errno is not None:
                raise
            raise BuildError(f"the library made for {plan.name} cannot be loaded: {error.__cause__ or error}") from None
        _log_commands(staging)
        return Path(library).read_bytes()


def jobs() -> int:
    """How many compilers may run at once: JITACT_JOBS, else as many as cores and memory allow.

    Raises:
        BuildError: JITACT_JOBS is no positive number.
    """
    asked = os.environ.get("JITACT_JOBS")
    if asked:
        if not asked.isdecimal() or int(asked) == 0:
            raise BuildError(f"JITACT_JOBS must be a positive number, got {asked!r}")
        return int(asked)
    return max(1, min(len(os.sched_getaffinity(0)), _free_memory() // _MEMORY_PER_COMPILER))


def _free_memory() -> int:
    """Bytes of memory available in the machine and in the container's cgroups."""
    found = [1 << 62]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
        for folder, limit, used in _memory_groups(Path("/proc/self/cgroup").read_text()):
            with suppress(OSError, ValueError):  # no such limit, or it is "max"
                found.append(int((folder / limit).read_text()) - int((folder / used).read_text()))
    except (OSError, ValueError):  # not Linux as expected: keep what was found
        pass
    return max(0, min(found))


def _memory_groups(groups: str, root: Path = Path("/sys/fs/cgroup")) -> Iterator[tuple[Path, str, str]]:
    """The folders of the cgroups in /proc/self/cgroup and their parents, with the names of the files of memory limit and usage.

    A container may see its own group at the root, under whatever name it has on the host.
    """
    for line in groups.splitlines():
        _, kinds, path = line.split(":", 2)
        base, *files = {
            "": (root, "memory.max", "memory.current"),
            "memory": (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        }.get(kinds, (None,))
        if base is not None:
            own = base / path.lstrip("/")
            yield from ((folder, *files) for folder in (own, *own.parents) if folder.is_relative_to(base))


def _kernel_text(plan: Plan) -> str:
    """The text to compile: the kernel file, preceded by the files that it uses, between the library's headers."""
    first, last = f'#include "{source.DEVICE}/elementwise.cuh"', f'#include "{source.DEVICE}/launch.cuh"'
    return f"{first}\n{with_own_macros(plan.source.text, plan.source.full_text)}{last}\n"


def _as_torch_can_write(text: str, staging: Path) -> str:
    """``text``, or the inclusion of a file with it in UTF-8, which compilers read: torch writes in the locale's encoding."""
    if text.encode(locale.getpreferredencoding(do_setlocale=False), "replace") == text.encode():
        return text
    (staging / "kernel.cuh").write_text(text, encoding="utf-8")
    return '#include "kernel.cuh"'


def _compilers_of_parts(plan: Plan, parts: Parts, staging: Path) -> dict[str, str]:
    """Environment variables that have torch run a script that compiles several parts at once."""
    found = {}
    if parts.cpu > 1:
        found["CXX"] = write_compiler(staging / "cxx.sh", shlex.quote(plan.cxx.path), parts.cpu, plan.cxx.path)
        found["TORCH_NO_COMPILER_WRAPPER"] = "1"  # ccache would take the script for a compiler
    if plan.made_archs and parts.cuda > 1:
        nvcc = os.environ.get("PYTORCH_NVCC") or shlex.quote(plan.nvcc.path)
        found["PYTORCH_NVCC"] = write_compiler(staging / "nvcc.sh", nvcc, parts.cuda, plan.cxx.path)
    return found


def _in_parallel(parts: int) -> list[str]:
    """Flags for nvcc to compile for several GPUs, and the functions of each, in parallel."""
    each = -(-jobs() // parts)  # rounded up, as parts differ in time
    return [f"--threads={each}", f"--split-compile={each}"]


def _host_compiler(plan: Plan) -> list[str]:
    """Flags for nvcc to use the same C++ compiler as host compiler, unless CC names one, which torch passes."""
    return [] if os.environ.get("CC") else ["-ccbin", shlex.quote(plan.cxx.path)]


def _link_flags(plan: Plan, staging: Path) -> list[str]:
    """Flags for a library folder searched before torch's, with libcudart.so, a name that the runtime of pip packages lacks."""
    folder = staging / "lib"
    folder.mkdir()
    if plan.made_archs:
        (folder / "libcudart.so").symlink_to(find_cudart(plan.nvcc))
    twice = ["-Wl,-z,muldefs"] if plan.made_archs else []  # a file's own functions that are not inline are in both objects
    return [f"-L{shlex.quote(str(folder))}", *twice, *plan.own_flags()]


@contextmanager
def _stand_ins(plan: Plan, staging: Path) -> Iterator[None]:
    """Makes stub libraries in place of torch's large ones, in a thread while the compilers run.

    For a shared library the linker only records its name, if the build calls a function in it; functions are resolved when it
    is loaded. So a stub with the same soname and one function gives the same result. Without a stub, torch's library is read.
    """
    maker = Thread(target=_make_stand_ins, args=(plan, staging / "lib"), name="jitact stand-ins")
    with suppress(RuntimeError):  # no thread can be started during interpreter shutdown
        maker.start()
    try:
        yield
    finally:
        if maker.ident is not None:
            maker.join()


def _make_stand_ins(plan: Plan, folder: Path) -> None:
    """Makes those stubs that can be made, and moves each into ``folder`` by rename."""
    for library, function in _LARGE.items():
        name = f"lib{library}.so"
        source, made = f"{library}.c", f"{library}.made"
        shared = ["-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{name}"]
        command = [plan.cxx.path, *plan.cxx.flags, *shared, "-x", "c", source, "-o", made]
        with suppress(OSError, subprocess.SubprocessError):
            if _is_loaded(name, function):
                (folder / source).write_text(f"void {function}(void) {{}}\n")
                subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=True)
                (folder / made).rename(folder / name)


def _is_loaded(name: str, function: str) -> bool:
    """Whether a library ``name`` with ``function`` is loaded in this process."""
    try:
        return hasattr(ctypes.CDLL(name, mode=os.RTLD_NOLOAD), function)
    except OSError:
        return False


@contextmanager
def _plain_path(folder: Path) -> Iterator[Path]:
    """A path to ``folder`` that torch can write to a file, without characters special to ninja, or that nvcc loses."""
    encoding, name = locale.getpreferredencoding(do_setlocale=False), str(folder)
    if name.encode(encoding, "ignore").decode(encoding) == name and not set(name) & set(" $:|\r\n'\","):
        yield folder
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


@contextmanager
def _fixed_path(folder: Path) -> Iterator[Path]:
    """A path to ``folder``, which is ours, by its descriptor: it stays valid if others rename a parent folder."""
    with opened(folder, shared=False) as descriptor:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")


@contextmanager
def _environment(plan: Plan, staging: Path) -> Iterator[ModuleType]:
    """torch.utils.cpp_extension, set up to run the plan's tools. Environment and settings are restored afterwards."""
    ninja = find_ninja()
    wanted = {
        "LC_ALL": "C",  # for error messages that can be parsed
        "MAX_JOBS": str(jobs()),
        cache.MARK: staging.name,  # to find compilers that outlive this process
        "CXX": plan.cxx.path,
        "TORCH_DONT_CHECK_COMPILER_ABI": "1",  # saves two processes, for a warning about compilers older than C++20
        "TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES": "1",  # only needed for rebuilds in the same folder
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # cpp_extension looks for GPUs, which must not initialise CUDA
    }
    if shutil.which("ninja") != ninja:
        wanted["PATH"] = os.path.dirname(ninja) + os.pathsep + os.environ.get("PATH", os.defpath)
    torch_log = logging.getLogger("torch.utils.cpp_extension")
    level = torch_log.level
    torch_log.setLevel(logging.ERROR)  # hides "No CUDA runtime is found", which is known here
    try:
        with variables(wanted):
            cpp_extension = _import_extension()
            changed = {"CUDA_HOME": plan.nvcc.root if plan.nvcc else cpp_extension.CUDA_HOME, "sys": _sys_with_streams()}
            if hasattr(cpp_extension, "FileLock"):  # since torch 2.14
                changed["FileLock"] = _lock_of_others(cpp_extension.FileLock, staging)
            before = {name: getattr(cpp_extension, name) for name in changed}
            vars(cpp_extension).update(changed)
            try:
                yield cpp_extension
            finally:
                vars(cpp_extension).update(before)
    finally:
        torch_log.setLevel(level)


def _sys_with_streams() -> ModuleType:
    """A copy of sys for torch, which flushes standard output and error: a program may have none, or others without flush."""
    copy = ModuleType("sys")
    vars(copy).update(vars(sys), stdout=io.StringIO(), stderr=io.StringIO())
    return copy


def _lock_of_others(
    lock: Callable[[str], AbstractContextManager], staging: Path
) -> Callable[[str], AbstractContextManager]:
    """torch's lock of a build folder, but none for ``staging``: it is ours alone, and not all file systems have locks."""
    return lambda path: nullcontext() if os.path.samefile(os.path.dirname(path), staging) else lock(path)


@contextmanager
def variables(wanted: dict[str, str]) -> Iterator[None]:
    """Sets environment variables while the block runs."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _import_extension() -> ModuleType:
    """Imports torch.utils.cpp_extension without garbage collection.

    It imports setuptools, whose many allocations trigger collections over all of torch's objects: half of the import's time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        from torch.utils import cpp_extension
    finally:
        if collects:
            gc.enable()
    return cpp_extension


def _log_commands(staging: Path) -> None:
    """Logs the commands that ninja ran, if debug messages are enabled."""
    if logger.isEnabledFor(logging.DEBUG):
        done = subprocess.run([find_ninja(), "-t", "commands"], cwd=staging, capture_output=True, text=True, check=False)
        logger.debug("%s", done.stdout.strip())
