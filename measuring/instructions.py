"""The time that a GPU takes to issue a kernel's instructions: a floor, as that of the bytes that it moves is one.

They are counted in the machine code: the least number for a byte that is stored, of all ways from a kernel's beginning to its
end. What a call really issues is that or more.
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

SCHEDULERS, LANES = 4, 32  # of a multiprocessor, each of which issues one instruction for so many threads in a clock
VECTOR = 16  # bytes
SLEEP = 2**24  # clocks: some 8 ms
_FUNCTION = re.compile(r"^\s*Function : (\S+)$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@\S+)\s+)?(\S+)(.*?);", re.MULTILINE)
_STORED = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}  # bytes, by what the name of a store ends with; else 4


class Block(NamedTuple):
    """Instructions that follow each other, of which the last alone goes elsewhere.

    Attributes:
        count: how many there are.
        stored: the bytes that they store in global memory.
        to: the blocks that may follow.
        ends: whether the kernel may end here.
    """

    count: int
    stored: int
    to: tuple[int, ...]
    ends: bool


def blocks_of(code: str, least: int = 1) -> list[Block]:
    """The blocks of a kernel, from what cuobjdump shows of it; stores of fewer than ``least`` bytes do not count as such."""
    lines = [(int(at, 16), bool(when), name, rest) for at, when, name, rest in _INSTRUCTION.findall(code)]
    place = {at: i for i, (at, *_) in enumerate(lines)}
    joins = defaultdict(set)  # where threads go on together that had parted
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
    """The least number of instructions for a byte that is stored, of any way through a kernel.

    Args:
        blocks: the kernel's.
        loops: whether its loops alone count, as of one that goes through memory in a loop, and stores sums after it.
    """
    low, high = 0.0, float(sum(block.count for block in blocks))
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _is_beaten(blocks, middle, loops) else (middle, high)
    return high


def _is_beaten(blocks: list[Block], price: float, loops: bool) -> bool:
    """Whether some way takes fewer instructions than ``price`` for each byte: the method of Bellman and Ford."""
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
    return True  # round and round, for less each time


def disassembled(binary: Path) -> dict[str, str]:
    """What cuobjdump shows of the kernels of a library or an object file, by their mangled names.

    Raises:
        FileNotFoundError: cuobjdump is neither on the PATH nor in the CUDA toolkit.
        subprocess.CalledProcessError: it failed, as it does without nvdisasm beside it or on the PATH.
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
    """The same by their names in C++; nothing where it cannot be told."""
    try:
        shown = disassembled(library)
        command, mangled = ["c++filt"], "\n".join(shown)
        readable = subprocess.run(command, input=mangled, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return {}
    return dict(zip(readable, shown.values(), strict=True))


def instructions_of(call: Callable[[], object], library: Path) -> float | None:
    """The fewest instructions for a byte that a call on a GPU stores, of the kernel that takes the longest part of it.

    Args:
        call: runs kernels of a library.
        library: where it is.

    Returns:
        None where that cannot be told: there is no cuobjdump, or no profiler.
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = sorted(profile.events(), key=lambda event: -event.device_time)
    name = next((event.name for event in events if "jitact::loops::" in event.name), "")
    code = kernels_in(library).get(name)
    if code is None:
        return None
    sums = "column_sums<" in name  # whose vectors are written in a loop, and sums in another
    return fewest_per_byte(blocks_of(code, VECTOR if sums else 1), loops=sums)


@cache
def rate_of_issue(device: torch.device) -> float:
    """How many instructions of threads a GPU issues in a second, at the clock that it has now."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP)
    begin.record()
    torch.cuda._sleep(SLEEP)
    end.record()
    end.synchronize()
    clock = SLEEP / (begin.elapsed_time(end) / 1000)
    return torch.cuda.get_device_properties(device).multi_processor_count * SCHEDULERS * LANES * clock
