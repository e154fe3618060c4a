"""Checks everything that is needed to compile and load kernels, and explains what is missing. Compiles nothing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from . import build, cache, folders
from .compile import jobs
from .errors import BuildError
from .gpu import requested_archs, visible_archs
from .memory import Memory
from .plan import Plan, cpu_level
from .toolchain import find_cudart, find_cxx, find_ninja, find_nvcc

__all__ = ["diagnose"]

OLDEST_TORCH = (2, 10)
_VARIABLES = (
    "JITACT_NO_BUILD",
    "JITACT_TRUST_GROUP",
    "JITACT_ARCHS",
    "TORCH_CUDA_ARCH_LIST",
    "JITACT_JOBS",
    "JITACT_VERBOSE",
    "CXX",
    "CC",
)
ROOM = 64 << 20  # bytes; a build needs about one megabyte while it runs, and 0.1 to 0.5 in the cache


class Finding(NamedTuple):
    """What was checked, whether it is all right (None: it is not needed), and the details."""

    subject: str
    fine: bool | None
    text: str


def diagnose(plans: Sequence[Plan]) -> int:
    """Prints the findings, and returns 0 if every activation can be used, on every visible GPU, else 1.

    Args:
        plans: one for each registered activation.
    """
    findings = list(_findings(plans))
    for subject, fine, text in findings:
        mark = {True: "ok", False: "PROBLEM", None: "-"}[fine]
        first, *others = text.splitlines()
        print(f"{mark:8}{subject:16}{first}")
        for line in others:
            print(f"{'':24}{line}")
    problems = sum(finding.fine is False for finding in findings)
    print({0: "\nall is well", 1: "\n1 problem"}.get(problems, f"\n{problems} problems"))
    return 1 if problems else 0


def _findings(plans: Sequence[Plan]) -> Iterator[Finding]:
    cached = [plan for plan in plans if build.find(plan)]
    complete = len(cached) == len(plans)
    cuda_complete = complete and all(plan.runs_cuda(build.find(plan).build) for plan in plans)
    memory = Memory(folders.readable())
    gpus = visible_archs(memory)

    yield _torch()
    yield Finding("python", True, f"{sys.version.split()[0]} at {sys.executable}; its headers are not needed")
    yield from _folders(complete)
    yield Finding(
        "cached", True if complete else None, f"{len(cached)} of {len(plans)} activations, of this torch and compilers"
    )
    unusable = [entry for folder in folders.readable() for entry in cache.entries(folder) if entry.problem]
    if unusable:
        listed = "\n".join(f"{entry.folder.name} in {entry.folder.parent}: {entry.problem}" for entry in unusable)
        yield Finding("not usable", None, f"{listed}\nmade anew at next use; python -m jitact clear removes them")
    for name in _VARIABLES:
        if os.environ.get(name):
            fine = complete if name == "JITACT_NO_BUILD" else None
            yield Finding("environment", fine, f"{name}={os.environ[name]}")

    needed = None if complete else False  # missing tools are a problem only if something is not cached
    yield _tool("C++ compiler", lambda: "{0.version} at {0.path}".format(find_cxx(memory)), needed)
    yield _tool("ninja", find_ninja, needed)
    yield _tool("processor", lambda: f"{cpu_level()}; {jobs()} compilers at once", False)
    yield _gpus(gpus)
    needed = False if (gpus and not cuda_complete) or requested_archs() else None
    nvcc = _tool("nvcc", lambda: "{0.release} at {0.path} (from {0.origin})".format(find_nvcc(memory)), needed)
    yield nvcc
    if nvcc.fine:
        yield _tool("CUDA runtime", lambda: str(find_cudart(find_nvcc(memory))), needed)
    unfit = next((plan.missing_cuda for plan in plans if plan.nvcc and plan.missing_cuda), None)
    if unfit:
        yield Finding("archs", needed, unfit)


def _torch() -> Finding:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    if version < OLDEST_TORCH:
        return Finding("torch", False, f"{torch.__version__} is too old: {sys.executable} -m pip install -U torch")
    return Finding("torch", True, f"{torch.__version__}, {cuda}")


def _folders(complete: bool) -> Iterator[Finding]:
    """The cache folders. Their problems count only if something is not cached."""
    needed = None if complete else False
    for folder, use in folders.explain():
        yield Finding("cache", True if use.startswith("read") else None, f"{folder} {use}")
    try:
        folder = folders.destination()
        room = shutil.disk_usage(folders.existing(folder)).free
        text = f"{folder}, {room / (1 << 30):.1f} GB free"
        yield Finding("builds go to", True, text) if room >= ROOM else Finding("builds go to", needed, f"{text}: too little")
    except BuildError as error:
        yield Finding("builds go to", needed, str(error))


def _gpus(gpus: Sequence) -> Finding:
    if torch.version.cuda is None:
        return Finding("GPU", None, "not looked for: this torch is built without CUDA")
    if not gpus:
        return Finding("GPU", None, "none in sight; CPU tensors need none")
    return Finding("GPU", True, f"compute capability {', '.join(map(str, gpus))}")


def _tool(subject: str, find: Callable[[], str], missing: bool | None) -> Finding:
    """The result of ``find``, or its error, which counts as a problem unless ``missing`` is None."""
    try:
        return Finding(subject, True, find())
    except BuildError as error:
        text = str(error)
        return Finding(subject, missing, f"not needed: {text.splitlines()[0]}" if missing is None else text)
