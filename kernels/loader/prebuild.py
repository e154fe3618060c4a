"""Builds many kernels at once, in processes that share the cores and the memory."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from . import build
from .cache import Entry
from .compile import jobs, variables
from .errors import BuildError, ToolchainError
from .log import logger
from .plan import Plan

__all__ = ["prebuild"]

ENDS = signal.SIGINT, signal.SIGTERM  # the latter is what the pool sends to the others when it misses a worker


def prebuild(plans: Sequence[Plan], wanted_jobs: int | None = None) -> int:
    """Builds what of ``plans`` is not cached, and prints one line for each; the exit code.

    Args:
        plans: what to build.
        wanted_jobs: compilers that may run at once; what JITACT_JOBS or the machine says if None.

    Raises:
        BuildError: nothing can be built here, or not for the archs that were asked for.
    """
    if wanted_jobs is not None and wanted_jobs < 1:
        raise BuildError(f"jobs must be a positive number, got {wanted_jobs}")
    started = time.monotonic()
    cached, missing = [], []
    for plan in plans:
        if plan.archs and plan.missing_cuda:
            raise ToolchainError(f"cannot build for {', '.join(map(str, plan.archs))}: {plan.missing_cuda}")
        if build.find(plan):
            cached.append(plan)
        else:
            missing.append(plan)
    why = build.cannot_compile(missing[0]) if missing else None
    if why:
        raise ToolchainError(f"{missing[0].name} cannot be built: {why}")
    failed = _build_all(missing, wanted_jobs or jobs(), len(cached), len(plans)) if missing else 0
    compiled = len(missing) - failed
    summary = f"{compiled} compiled, {len(cached)} cached" + (f", {failed} failed" if failed else "")
    print(f"jitact: {summary}, {time.monotonic() - started:.1f} s")
    return 1 if failed else 0


def _build_all(plans: list[Plan], jobs_at_once: int, done: int, total: int) -> int:
    """How many failed. Workers are forked: this process runs nothing yet, and torch is imported once for all."""
    workers = min(jobs_at_once, len(plans))
    of_each = variables({"JITACT_JOBS": str(max(1, jobs_at_once // workers))})  # what it may start
    context = multiprocessing.get_context("fork")
    failed = 0
    with of_each, ProcessPoolExecutor(workers, mp_context=context, initializer=_become_worker) as pool, _all_or_none():
        running = {pool.submit(_build_one, plan): plan for plan in plans}
        _show(done, total, plans[:workers])
        for future in as_completed(running):
            name = running.pop(future).name
            done += 1
            try:
                entry, seconds = future.result()
                said = f"compiled in {seconds:.1f} s" + (f" for {', '.join(entry.build.archs)}" if entry.build.archs else "")
            except BuildError as error:
                failed += 1
                said = f"failed\n{error}"
            except BrokenProcessPool:
                raise BuildError("a building process was killed, perhaps for want of memory: try --jobs 1") from None
            _clear_line()
            print(f"[{done}/{total}] {name} {said}", flush=True)
            _show(done, total, list(running.values())[:workers])
    _clear_line()
    return failed


@contextmanager
def _all_or_none() -> Iterator[None]:
    """Has Ctrl-C end the workers too: the pool would wait until they have built all that is left."""
    try:
        yield
    except KeyboardInterrupt:
        for worker in multiprocessing.active_children():
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGINT)  # to those that a terminal has told already, this is nothing new
        raise


def _become_worker() -> None:
    logger.setLevel(logging.WARNING)
    for each in ENDS:
        signal.signal(each, _leave)


def _leave(*_: Any) -> NoReturn:
    os._exit(1)  # the pool notices, and starts no other


def _interrupt(*_: Any) -> NoReturn:
    for each in ENDS:
        signal.signal(each, signal.SIG_IGN)  # what is to be cleared away takes a moment
    raise KeyboardInterrupt


def _build_one(plan: Plan) -> tuple[Entry, float]:
    started = time.monotonic()
    for each in ENDS:
        signal.signal(each, _interrupt)
    try:
        entry, _ = build.obtain(plan)
    except KeyboardInterrupt:
        _leave()
    finally:
        for each in ENDS:
            signal.signal(each, _leave)
    return entry, time.monotonic() - started


def _show(done: int, total: int, plans: Sequence[Plan]) -> None:
    """What is under way, on a terminal."""
    if sys.stdout.isatty() and plans:
        sys.stdout.write(f"[{done}/{total}] compiling {', '.join(plan.name for plan in plans)} ...")
        sys.stdout.flush()


def _clear_line() -> None:
    if sys.stdout.isatty():
        sys.stdout.write("\r\033[K")
