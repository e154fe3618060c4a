"""Builds many kernels in parallel, in worker processes that share the cores and the memory."""

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
from contextlib import contextmanager
from typing import Any, NoReturn

from . import build
from .cache import Entry
from .compile import jobs, variables
from .errors import BuildError, ToolchainError
from .log import logger
from .plan import Plan

__all__ = ["all_or_none", "prebuild"]

ENDS = signal.SIGINT, signal.SIGTERM  # the pool sends SIGTERM to its other workers when one has died


def prebuild(plans: Sequence[Plan], wanted_jobs: int | None = None) -> int:
    """Builds those ``plans`` that are not cached, prints one line for each, and returns the exit code.

    Args:
        plans: what to build.
        wanted_jobs: how many compilers may run at once; if None, JITACT_JOBS or what the machine allows.

    Raises:
        BuildError: nothing can be built here, or not for the requested archs.
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
    """Builds all, and returns how many failed. Workers are forked, so that torch is imported once; no threads run here yet."""
    workers = min(jobs_at_once, len(plans))
    of_each = variables({"JITACT_JOBS": str(max(1, jobs_at_once // workers))})  # compilers per worker
    context = multiprocessing.get_context("fork")
    failed = 0
    with of_each, ProcessPoolExecutor(workers, mp_context=context, initializer=_become_worker) as pool, all_or_none():
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
def all_or_none() -> Iterator[None]:
    """Ends the worker processes where an exception leaves the block, as by Ctrl-C: a pool would wait until all is done."""
    try:
        yield
    except BaseException:
        for worker in multiprocessing.active_children():
            worker.terminate()  # harmless for workers that a terminal has interrupted already
        raise


def _become_worker() -> None:
    logger.setLevel(logging.WARNING)
    for each in ENDS:
        signal.signal(each, _leave)


def _leave(*_: Any) -> NoReturn:
    os._exit(1)  # the pool notices, and starts no other worker


def _interrupt(*_: Any) -> NoReturn:
    for each in ENDS:
        signal.signal(each, signal.SIG_IGN)  # cleaning up takes a moment, and must not be interrupted
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
    """Shows the builds in progress, on a terminal."""
    if sys.stdout.isatty() and plans:
        sys.stdout.write(f"[{done}/{total}] compiling {', '.join(plan.name for plan in plans)} ...")
        sys.stdout.flush()


def _clear_line() -> None:
    if sys.stdout.isatty():
        sys.stdout.write("\r\033[K")
