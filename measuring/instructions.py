"""A lower bound on a kernel's time from instruction issue, in addition to the one from memory traffic.

Instructions are counted in the machine code: the minimum per stored byte over all paths through the kernel's control flow
graph. A call issues at least as many.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils import cpp_extension

__all__ = ["blocks_of", "disassembled", "fewest_per_byte", "instructions_of", "kernels_in", "rate_of_issue"]

SCHEDULERS, LANES = 4, 32  # warp schedulers per multiprocessor, each issuing one instruction per clock for a warp's threads
VECTOR = 16  # bytes
SLEEP = 2**24  # clocks: some 8 ms
_FUNCTION = re.compile(r"^\s*Function : (\S+)$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@\S+)\s+)?(\S+)(.*?);", re.MULTILINE)
_STORED = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}  # bytes by the suffix of a store's opcode; else 4


class Block(NamedTuple):
    """A basic block.

    Attributes:
        count: the number of instructions.
        stored: the bytes that they store in global memory, per thread.
        to: the successors.
        ends: whether the kernel may exit here.
    """

    count: int
    stored: int
    to: tuple[int, ...]
    ends: bool


def blocks_of(code: str, least: int = 1) -> list[Block]:
    """The basic blocks of a kernel, from cuobjdump's output. Stores of fewer than ``least`` bytes are not counted as stored."""
    lines = [(int(at, 16), bool(when), name, rest) for at, when, name, rest in _INSTRUCTION.findall(code)]
    place = {at: i for i, (at, *_) in enumerate(lines)}
    joins = defaultdict(set)  # reconvergence points by barrier register
    for _, _, name, rest in lines:
        if name == "BSSY":
            joins[rest.split(",")[0].strip()].add(_target(rest))
    following: list[list[int]] = []
    for i, (_, conditional, name, rest) in enumerate(lines):
        opcode, to = name.split(".")[0], [i + 1]
        if opcode == "BRA":
            always = not conditional and "," not in rest
            to = [place[_target(rest)]] + ([] if always else to)
        elif opcode == "BSYNC":
            to = [place[at] for at in joins[rest.strip()]]
        elif opcode in ("EXIT", "RET") and not conditional:
            to = []
        following.append([each for each in to if each < len(lines)])
    starts = {0} | {each for i, to in enumerate(following) if to != [i + 1] for each in (*to, i + 1)}
    heads = sorted(start for start in starts if start < len(lines))
    number = {head: b for b, head in enumerate(heads)}
    blocks = []
    for head, end in zip(heads, [*heads[1:], len(lines)], strict=True):
        names = [name for _, _, name, _ in lines[head:end]]
        ends = any(name == "EXIT" for name in names)
        to = tuple(number[each] for each in following[end - 1])
        stored = sum(each for each in map(_bytes_stored, names) if each >= least)
        blocks.append(Block(end - head, stored, to, ends))
    return blocks


def _target(operands: str) -> int:
    return int(operands.split(",")[-1].strip().strip("`()"), 16)


def _bytes_stored(name: str) -> int:
    opcode, *more = name.split(".")
    return next((_STORED[each] for each in more if each in _STORED), 4) if opcode == "STG" else 0


def fewest_per_byte(blocks: list[Block], loops: bool = False) -> float:
    """The minimum number of instructions per stored byte over all paths through a kernel, found by bisection.

    Args:
        blocks: the kernel's.
        loops: whether to count loops only, for a kernel that goes through memory in a loop and stores sums after it.
    """
    low, high = 0.0, float(sum(block.count for block in blocks))
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _is_beaten(blocks, middle, loops) else (middle, high)
    return high


def _is_beaten(blocks: list[Block], price: float, loops: bool) -> bool:
    """Whether some path takes fewer than ``price`` instructions per stored byte, by the Bellman-Ford algorithm."""
    costs = [block.count - price * block.stored for block in blocks]
    least = [0.0, *[float("inf")] * (len(blocks) - 1)]  # until a block is reached
    for _ in blocks:
        changed = False
        for b, block in enumerate(blocks):
            after = least[b] + costs[b]
            if block.ends and after < 0 and not loops:
                return True
            for other in block.to:
                if after < least[other] - 1e-9:
                    least[other], changed = after, True
        if not changed:
            return False
    return True  # a negative cycle: a loop below the price


def disassembled(binary: Path) -> dict[str, str]:
    """The disassembly of the kernels in a library or an object file, by mangled name.

    Raises:
        FileNotFoundError: cuobjdump is neither on the PATH nor in the CUDA toolkit.
        subprocess.CalledProcessError: it failed, as it does without nvdisasm next to it or on the PATH.
    """
    toolkit = cpp_extension.CUDA_HOME
    tool = shutil.which("cuobjdump") or (shutil.which("cuobjdump", path=str(Path(toolkit) / "bin")) if toolkit else None)
    if tool is None:
        raise FileNotFoundError("cuobjdump is not on the PATH; pip install nvidia-cuda-cuobjdump has it, in nvidia/*/bin")
    path = os.pathsep.join([str(Path(tool).parent), os.environ.get("PATH", "")])  # where it finds nvdisasm
    command = [tool, "-sass", str(binary)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PATH": path}).stdout
    starts = [*_FUNCTION.finditer(text)]
    ends = [*(each.start() for each in starts[1:]), len(text)]
    return {start[1]: text[start.end() : end] for start, end in zip(starts, ends, strict=True)}


@cache
def kernels_in(library: Path) -> dict[str, str]:
    """The disassembly by demangled name; empty if a tool is missing or fails."""
    try:
        shown = disassembled(library)
        command, mangled = ["c++filt"], "\n".join(shown)
        readable = subprocess.run(command, input=mangled, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return {}
    return dict(zip(readable, shown.values(), strict=True))


def instructions_of(call: Callable[[], object], library: Path) -> float | None:
    """The minimum number of instructions per stored byte of the kernel that takes most of a call's time on the GPU.

    Args:
        call: runs kernels of a library.
        library: its path.

    Returns:
        None if it cannot be determined, as without cuobjdump or the profiler.
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    events = sorted(profile.events(), key=lambda event: -event.device_time)
    name = next((event.name for event in events if "jitact::loops::" in event.name), "")
    code = kernels_in(library).get(name)
    if code is None:
        return None
    sums = "column_sums<" in name  # it stores vectors in one loop and sums in another
    return fewest_per_byte(blocks_of(code, VECTOR if sums else 1), loops=sums)


@cache
def rate_of_issue(device: torch.device) -> float:
    """The thread instructions per second that a GPU can issue at its current clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP)
    begin.record()
    torch.cuda._sleep(SLEEP)
    end.record()
    end.synchronize()
    clock = SLEEP / (begin.elapsed_time(end) / 1000)
    return torch.cuda.get_device_properties(device).multi_processor_count * SCHEDULERS * LANES * clock
