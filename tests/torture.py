"""Kills builds at random moments, and has many processes request one build at the same time. Nothing is mocked.

Processes are forked from this one, which has imported torch and run nothing, so an attempt costs no start of Python.
"""

from __future__ import annotations

import ctypes
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from jitact.kernels.loader import build, cache, load, source
from jitact.kernels.loader.log import logger
from jitact.kernels.loader.plan import make_plan
from jitact.kernels.loader.source import KernelSource

__all__ = ["Torture"]

_STAND_IN = {"binding.cpp": "", "elementwise.cuh": "", "launch.cuh": ""}
_STAND_IN_KERNEL = """#ifndef __CUDACC__
extern "C" __attribute__((visibility("default"))) int answer() {{ return {attempt}; }}
#endif
"""
_TIME_LIMIT = 300.0  # seconds that one attempt may take


class Torture:
    """A new cache folder, which becomes this process's, and the attempts to break it."""

    def __init__(self, folder: Path, *, small: bool = False, seed: int = 0) -> None:
        """Sets up a new folder.

        Args:
            folder: where.
            small: build a stand-in for the kernels, which takes a fraction of the time.
            seed: what the moments of the kills follow from.
        """
        folder.mkdir(mode=0o700, parents=True)
        self.cache = folder / "cache"
        self.small = small
        self._random = random.Random(seed)
        self._text = (source.FOLDER / "softsign.cu").read_text()
        os.environ["JITACT_CACHE_DIR"] = str(self.cache)
        logger.setLevel(logging.ERROR)
        if small:
            source.DEVICE = folder / "device"
            source.DEVICE.mkdir()
            for name, text in _STAND_IN.items():
                (source.DEVICE / name).write_text(text)

    def crowd(self, processes: int, threads: int) -> tuple[int, int, float]:
        """Has all threads of all processes request one build at the same moment.

        Returns:
            how many builds were made, how many processes got none or a wrong one, and the seconds that it took.
        """
        start, starter = os.pipe()
        reports, report = os.pipe()

        def member() -> None:
            os.close(starter)
            os.read(start, 1)  # returns when the parent closes the other end
            logger.setLevel(logging.INFO)
            logger.handlers = [_Report(report)]
            outcomes: list[BaseException | None] = []
            asking = [threading.Thread(target=lambda: outcomes.append(_failure(lambda: self._use(0)))) for _ in range(threads)]
            for thread in asking:
                thread.start()
            for thread in asking:
                thread.join()
            failures = [outcome for outcome in outcomes if outcome is not None]
            if failures or len(outcomes) != threads:
                raise failures[0]

        children = [_fork(member) for _ in range(processes)]
        started = time.monotonic()
        for end in (start, starter, report):
            os.close(end)
        wrong = sum(not _wait(child) for child in children)
        seconds = time.monotonic() - started
        with open(reports, "rb") as pipe:
            return len(pipe.read()), wrong, seconds

    def kill(self, kills: int) -> tuple[int, Counter[str], list[str]]:
        """Kills ``kills`` builds, half of them after a random time, half at a random step of the builder's, and tries again.

        Returns:
            how many second attempts gave the right result with nothing left of the first; what the killed ones were doing;
            what went wrong.
        """
        recovered, moments, problems = 0, Counter(), []
        seconds, steps = self._measure(1)
        for attempt in range(2, kills + 2):
            if attempt % 2:
                builder = _fork(lambda attempt=attempt: self._use(attempt))
                time.sleep(self._random.uniform(0, 1.1 * seconds))
                os.kill(builder, signal.SIGKILL)
            else:
                step = self._random.randint(1, steps)
                builder = _fork(lambda attempt=attempt, step=step: self._use_until(attempt, step))
            _wait(builder)
            moments[self._state(attempt)] += 1
            if not _wait(_fork(lambda attempt=attempt: self._use(attempt))):
                problems.append(f"attempt {attempt} was not recovered")
            elif left := self._still_running():
                problems.append(f"attempt {attempt} left processes behind: {left}")
            else:
                recovered += 1
        _wait(_fork(lambda: self._use(kills + 2)))  # a last build, which cleans up after the last killed one
        problems += [f"{entry.folder.name}: {entry.problem}" for entry in cache.entries(self.cache) if entry.problem]
        problems += [f"left behind: {folder}" for folder in (self.cache / ".staging").iterdir()]
        return recovered, moments, problems

    def _source(self, attempt: int) -> KernelSource:
        """A kernel that is different for each attempt."""
        text = _STAND_IN_KERNEL.format(attempt=attempt) if self.small else f"{self._text}// attempt {attempt}\n"
        return KernelSource("softsign", text, "torture.cu")

    def _use(self, attempt: int) -> None:
        """Builds and uses the kernel of an attempt.

        Raises:
            AssertionError: its result is wrong.
        """
        if self.small:
            entry, _ = build.obtain(make_plan(self._source(attempt)))
            assert ctypes.CDLL(str(entry.library)).answer() == attempt
            return
        library = load.load(self._source(attempt))
        x = torch.linspace(-4, 4, 101)
        y = getattr(torch.ops.jitact, f"{library.name}_forward")(x)
        assert torch.allclose(y, x / (1 + x.abs())), y

    def _measure(self, attempt: int) -> tuple[float, int]:
        """The seconds and steps of a complete build."""
        counter, count = os.pipe()

        def build_and_count() -> None:
            sys.addaudithook(lambda event, arguments: os.write(count, b".") if self._is_step(event, arguments) else None)
            self._use(attempt)

        started = time.monotonic()
        fine = _wait(_fork(build_and_count))
        seconds = time.monotonic() - started
        os.close(count)
        with open(counter, "rb") as pipe:
            steps = len(pipe.read())
        assert fine and steps, "the kernel does not build even when nobody kills it"
        return seconds, steps

    def _use_until(self, attempt: int, last: int) -> None:
        """Builds, and kills itself at a given step, for example in the middle of publishing."""
        steps = 0

        def hook(event: str, arguments: tuple) -> None:
            nonlocal steps
            if self._is_step(event, arguments):
                steps += 1
                if steps == last:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        self._use(attempt)

    def _is_step(self, event: str, arguments: tuple) -> bool:
        """Whether an audit event starts a process or changes the cache."""
        return event == "subprocess.Popen" or any(str(self.cache) in str(a) for a in arguments if isinstance(a, (str, Path)))

    def _state(self, attempt: int) -> str:
        """How far the build of an attempt has come, by what is on disk."""
        title = make_plan(self._source(attempt)).title
        if (self.cache / title).exists():
            return "done"
        staging = self.cache / ".staging"
        folders = [folder for folder in staging.glob("*") if folder.name.startswith(title)]
        files = [file.name for folder in folders for file in folder.rglob("*")]
        if any(name.endswith(".so") and name != "libcudart.so" for name in files):
            return "publishing"
        objects = sum(name.endswith(".o") for name in files)
        sources = sum(name in ("main.cpp", "cuda.cu") for name in files)
        return "linking" if objects and objects == sources else "compiling" if sources else "preparing"

    def _still_running(self) -> list[str]:
        """The processes that work in the cache."""
        found = []
        for process in filter(str.isdigit, os.listdir("/proc")):
            try:
                if str(self.cache.resolve()) in os.readlink(f"/proc/{process}/cwd"):
                    found.append(Path(f"/proc/{process}/cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found


class _Report(logging.Handler):
    """Writes a byte for each build that this process makes."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        if "compiled in" in record.getMessage():
            os.write(self.descriptor, b".")


def _failure(function: Callable[[], None]) -> BaseException | None:
    try:
        function()
    except BaseException as error:
        return error
    return None


def _fork(function: Callable[[], None]) -> int:
    """Forks a child that runs ``function``; returns its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        function()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _wait(child: int) -> bool:
    """Whether the child ended well, and in time; kills it if it did not end."""
    deadline = time.monotonic() + _TIME_LIMIT
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
