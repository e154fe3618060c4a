"""From a plan to a build: a suitable cached one, or a new one."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from . import cache, folders
from .cache import Build, Entry
from .errors import BuildError, NoSpaceError, NotOursError, ToolchainError
from .gpu import Arch, covered
from .lock import locked
from .log import logger, working
from .plan import CPU_LEVELS, Plan
from .toolchain import find_ninja

__all__ = ["cannot_compile", "find", "first_choice", "obtain"]


def obtain(plan: Plan, rejected: str | None = None) -> tuple[Entry, bool]:
    """A build for ``plan``, from the cache or compiled now, and whether it was compiled now.

    Args:
        plan: what to build.
        rejected: the checksum of a cached library that could not be loaded, which is not to be used again.

    Raises:
        BuildError: it is not cached and cannot be compiled.
    """
    entry = find(plan, rejected)
    if entry is not None:
        return entry, False
    why = cannot_compile(plan)
    if why is None:
        return _make(plan, rejected)
    entry = _find_made_elsewhere(plan, rejected)
    if entry is None:
        raise ToolchainError(f"{plan.name} is not compiled yet ({_looked()}) and cannot be: {why}")
    return entry, False


def find(plan: Plan, rejected: str | None = None) -> Entry | None:
    """A cached build for ``plan`` that is as good as one compiled here would be."""
    if plan.missing_cuda and plan.archs:  # a build made elsewhere with nvcc is better than one without CUDA
        entry = _find_made_elsewhere(plan, rejected, with_cuda=True)
        if entry is not None:
            return entry
    for folder in folders.readable():
        entry = _usable(cache.read(folder / plan.title), rejected)
        if entry is not None:
            return entry
    cxx, nvcc = plan.compilers
    archs = {str(arch) for arch in plan.made_archs}

    def serves(build: Build) -> bool:
        same = build.compiler == cxx and build.cpu == plan.cpu
        return same and archs <= set(build.archs) and (not archs or build.nvcc == nvcc)

    return _search(plan, rejected, serves)


def first_choice(whole: Plan, part: Plan) -> Plan:
    """The plan whose build to use, where either has what is needed, and ``part`` is compiled faster.

    It is that of a cached build, with CUDA kernels for this process's GPUs if there is one; else the part.
    """

    cached = [(plan, entry) for plan in (whole, part) if (entry := find(plan))]
    for plan, entry in cached:
        if plan.runs_cuda(entry.build):
            return plan
    if cached:
        return cached[0][0]
    if not cannot_compile(whole):
        return part
    for with_cuda in (True, False):
        for plan in (whole, part):
            if _find_made_elsewhere(plan, None, with_cuda=with_cuda):
                return plan
    return whole  # whose error names the command that builds it


def cannot_compile(plan: Plan) -> str | None:
    """Why nothing can be compiled here now, None if it can."""
    if os.environ.get("JITACT_NO_BUILD", "0") not in ("", "0"):
        name = plan.source.label or plan.source.name
        command = f"python -m jitact build {name}" + (" --fast-math" if plan.fast_math else "")
        how = command if plan.source.is_librarys or plan.source.label else "use it once without JITACT_NO_BUILD"
        return f"JITACT_NO_BUILD is set; unset it\nto build it: {how}"
    if plan.missing:
        return plan.missing
    try:
        find_ninja()
    except ToolchainError as error:
        return str(error)
    return None


def _looked() -> str:
    """Which folders were searched, and why the configured one was not, if it exists and was not."""
    first, looked = folders.configured(), folders.readable()
    listed = f"looked in {', '.join(map(str, looked)) or first}"
    unused = os.path.lexists(first) and first not in looked
    return f"{listed}; {first} {folders.problem(first, writing=False)}" if unused else listed


def _find_made_elsewhere(plan: Plan, rejected: str | None, *, with_cuda: bool = False) -> Entry | None:
    """A build of the same sources by other compilers or for an older processor that runs here, on GPUs too if ``with_cuda``."""
    levels = list(CPU_LEVELS)[: list(CPU_LEVELS).index(plan.cpu) + 1]

    def serves(build: Build) -> bool:
        archs = [Arch.parse(arch) for arch in build.archs]
        return build.cpu in levels and (not with_cuda or (plan.runs_cuda(build) and covered(plan.archs, archs)))

    def merit(build: Build) -> tuple:
        return plan.runs_cuda(build), levels.index(build.cpu), build.created

    return _search(plan, rejected, serves, merit)


def _search(
    plan: Plan, rejected: str | None, serves: Callable[[Build], bool], merit: Callable[[Build], tuple] = lambda b: (b.created,)
) -> Entry | None:
    """The usable build of the plan's sources that ``serves`` accepts, of the highest ``merit`` in the first folder with one."""
    for folder in folders.readable():
        found = [b for b in cache.builds(folder, plan.name) if b.sources == plan.sources and serves(b)]
        for build in sorted(found, key=merit, reverse=True):
            entry = _usable(cache.read(folder / build.title), rejected)
            if entry is not None:
                return entry
    return None


def _usable(entry: Entry | None, rejected: str | None) -> Entry | None:
    """``entry`` if it can be loaded and is not rejected; logs its problem if it has one."""
    if entry is None:
        return None
    if entry.problem:
        folders.say_once(f"{entry.folder.name} in {entry.folder.parent} is {entry.problem}")
        return None
    return None if entry.build.sha256 == rejected else entry


def _make(plan: Plan, rejected: str | None) -> tuple[Entry, bool]:
    """Compiles in the first folder with enough space and without another user's files in the way."""
    last: BuildError | None = None
    for folder in folders.writable():
        try:
            return _make_in(folder, plan, rejected)
        except (NoSpaceError, NotOursError) as error:
            logger.warning("%s", error)
            last = error
    raise last


def _make_in(folder: Path, plan: Plan, rejected: str | None) -> tuple[Entry, bool]:
    """Compiles once for all processes that want the build: the others wait for the lock and find it."""
    from .compile import compile_library  # imported here, as a cache hit does not need it

    with _disk_errors(folder), locked(cache.lock_of(folder, plan.title), plan.name) as alone:
        entry = _usable(cache.read(folder / plan.title), rejected)
        if entry is not None:
            return entry, False
        started = time.monotonic()
        with cache.staging(folder, plan.title, alone=alone) as staging, working(f"compiling {plan.name}"):
            content = compile_library(plan, folder, staging)
            seconds = time.monotonic() - started
            now = plan.renewed()
            if now.sources == plan.sources:  # else nobody knows which text of the headers the compilers read
                entry = cache.publish(folder, staging, _describe(plan, content, seconds), content)
    if entry is None:
        logger.warning("a header of %s changed while it was compiled: compiling it again", plan.name)
        return obtain(now, rejected)
    logger.info("%s compiled in %.1f s", plan.name, seconds)
    return entry, True


def _describe(plan: Plan, content: bytes, seconds: float) -> Build:
    cxx, nvcc = plan.compilers
    return Build(
        name=plan.name,
        key=plan.title.rpartition("-")[2],
        sources=plan.sources,
        archs=tuple(str(arch) for arch in plan.made_archs),
        cpu=plan.cpu,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        compiler=cxx,
        nvcc=nvcc,
        created=time.time(),
        seconds=round(seconds, 3),
        library=cache.library_of(plan.name),
        sha256=cache.checksum(content),
    )


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Turns OSErrors into BuildErrors that name the folder."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(f"no space left in {folder}; free some, or set JITACT_CACHE_DIR to a folder elsewhere") from None
        kind = NotOursError if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else BuildError
        raise kind(f"cannot build in {folder}: {error}") from None
