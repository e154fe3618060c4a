"""Blocks of models before and after :func:`jitact.replace`, eager and compiled: ``python bench.py --models``.

A training step, forward and backward, is measured for each block with each activation. Four forms are timed in alternation:
plain and replaced, each eager and compiled. Times are medians, on a GPU without its waiting for the host; memory is the peak
of a step beyond weights, inputs and gradients. Compiled, the replaced form must be at least 0.99 times as fast as the plain one
and may take 1.01 times its memory; eager, the same holds for speed if the GPU is the limit. A form that looks too slow is
measured again, longer, before it is flagged.
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from jitact.kernels.loader.compile import variables
from jitact.kernels.loader.prebuild import all_or_none
from jitact.replacing.swap import replace

from .commandline import CLOSED, dtype_name, first_line, keeping, progress, say

__all__ = ["ACTIVATIONS", "BLOCKS", "FORMS", "HOST_LIMIT", "Block", "Step", "compile_ahead", "measure_models"]

Task = TypeVar("Task")
FORMS = ("eager", "eager + jitact", "compile", "compile + jitact")
SLOWEST, MOST_MEMORY = 0.99, 1.01  # limits: the speed-up of replaced over plain at least, the ratio of memory at most
RUNS = {"cuda": (11, 0.25), "cpu": (5, 0.3)}  # fewest runs of each form, and the seconds to spend on all of them
AGAIN = 4  # times as many runs if a line looks too slow
CYCLES, LONGEST_WAIT = 3e9, 0.02  # clocks per second, 1.5 times a GPU's real rate; seconds
HOST_LIMIT = 0.8  # if the host takes a greater share of a step's time to launch it, the GPU is not the limit

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "relu": nn.ReLU,
    "softplus": nn.Softplus,
    "selu": nn.SELU,
}


class MLP(nn.Module):
    """Two linear layers with an activation between them, and dropout after it if wanted."""

    def __init__(self, act: nn.Module, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, hidden), act, nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.act(self.up(x))))


class Gated(nn.Module):
    """The MLP of Llama and similar models."""

    def __init__(self, act: nn.Module, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.act, self.down = act, nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, act: nn.Module, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.act1, self.act2 = act, copy.deepcopy(act)

    def forward(self, x: Tensor) -> Tensor:
        return self.act2(self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x))))) + x)


class Chain(nn.Module):
    """An activation between other elementwise operations."""

    def __init__(self, act: nn.Module, width: int) -> None:
        super().__init__()
        self.act, self.weight = act, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x * self.weight + 1) * 0.5 + x


class NormConv(nn.Module):
    """Normalisation, activation and convolution, as in diffusion models."""

    def __init__(self, act: nn.Module, channels: int) -> None:
        super().__init__()
        self.norm, self.act, self.conv = nn.GroupNorm(32, channels), act, nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.act(self.norm(x)))


class LayerScale(nn.Module):
    """ConvNeXt's block: a depthwise convolution, an MLP, a scale for each channel."""

    def __init__(self, act: nn.Module, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm, self.mlp = nn.LayerNorm(channels), MLP(act, channels, 4 * channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).permute(0, 2, 3, 1)
        return x + (self.scale * self.mlp(self.norm(y))).permute(0, 3, 1, 2)


class SqueezeExcite(nn.Module):
    """A convolution's output, an activation, and a gate for each channel."""

    def __init__(self, act: nn.Module, channels: int) -> None:
        super().__init__()
        self.conv, self.norm, self.act1 = nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels), act
        self.squeeze, self.act2 = nn.Linear(channels, channels // 4), copy.deepcopy(act)
        self.excite, self.gate = nn.Linear(channels // 4, channels), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.norm(self.conv(x)))
        scale = self.gate(self.excite(self.act2(self.squeeze(y.mean((2, 3))))))
        return y * scale[:, :, None, None]


class Recurrent(nn.Module):
    """Steps of a gated recurrent unit whose candidate has the activation."""

    def __init__(self, act: nn.Module, width: int, steps: int) -> None:
        super().__init__()
        self.of_input, self.of_state = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.act, self.reset_gate, self.update_gate, self.steps = act, nn.Sigmoid(), nn.Sigmoid(), steps

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for _ in range(self.steps):
            (r, z, n), (rs, zs, ns) = self.of_input(x).chunk(3, -1), self.of_state(state).chunk(3, -1)
            update = self.update_gate(z + zs)
            state = (1 - update) * self.act(n + self.reset_gate(r + rs) * ns) + update * state
        return state


@dataclass(frozen=True)
class Block:
    """A block and its sizes.

    Attributes:
        make: builds the block around an activation; ``True`` asks for the small size for CPUs.
        shape: of the input, on a GPU and on a CPU.
        channels_last: whether weights and inputs have that memory format.
        random: whether each step draws random numbers.
    """

    make: Callable[[nn.Module, bool], nn.Module]
    shape: tuple[tuple[int, ...], tuple[int, ...]]
    channels_last: bool = False
    random: bool = False


BLOCKS = {
    "mlp": Block(lambda act, small: MLP(act, *((128, 512) if small else (1024, 4096))), ((16384, 1024), (256, 128))),
    "wide mlp": Block(lambda act, small: MLP(act, *((256, 1024) if small else (4096, 16384))), ((2048, 4096), (128, 256))),
    "gated": Block(lambda act, small: Gated(act, *((128, 512) if small else (2048, 8192))), ((4096, 2048), (256, 128))),
    "llama": Block(lambda act, small: Gated(act, *((256, 896) if small else (4096, 14336))), ((2048, 4096), (128, 256))),
    "conv-bn-act": Block(lambda act, small: Residual(act, 16 if small else 64), ((64, 64, 112, 112), (2, 16, 28, 28)), True),
    "chain": Block(lambda act, small: Chain(act, 256 if small else 4096), ((32768, 4096), (1024, 256))),
    "norm-act-conv": Block(lambda act, small: NormConv(act, 32 if small else 128), ((128, 128, 64, 64), (2, 32, 16, 16)), True),
    "layer scale": Block(lambda act, small: LayerScale(act, 16 if small else 96), ((64, 96, 56, 56), (2, 16, 14, 14)), True),
    "dropout": Block(
        lambda act, small: MLP(act, *((128, 512) if small else (1024, 4096)), 0.1), ((16384, 1024), (256, 128)), random=True
    ),
    "squeeze": Block(lambda act, small: SqueezeExcite(act, 16 if small else 128), ((256, 128, 56, 56), (2, 16, 14, 14)), True),
    "recurrent": Block(lambda act, small: Recurrent(act, 64 if small else 1024, 4), ((8192, 1024), (128, 64))),
}

ON_CPU = ("mlp", "chain"), ("gelu", "relu")
"""The subset of blocks and activations that is measured on a CPU by default."""


class Step:
    """A training step of a form of a block."""

    def __init__(self, block: Block, activation: str, form: str, dtype: torch.dtype, device: torch.device) -> None:
        """Makes model and input; the same for every form."""
        small = device.type == "cpu"
        torch.manual_seed(0)
        with torch.device(device):
            model = block.make(ACTIVATIONS[activation](), small).to(dtype)
            x = torch.randn(block.shape[small], dtype=dtype)
        if block.channels_last:
            model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        if "jitact" in form:
            replace(model)
        self.model = torch.compile(model, dynamic=False) if "compile" in form else model
        self.leaves = [x.requires_grad_(), *model.parameters()]
        self.device, self.dy = device, torch.randn_like(x)
        self.host_seconds = 0.0  # the time that the host took to launch the last step

    def __call__(self) -> list[Tensor]:
        """Output and gradients."""
        y = self.model(self.leaves[0])
        return [y.detach(), *torch.autograd.grad(y, self.leaves, self.dy)]

    def in_float64(self) -> Step:
        """The same step in float64, not compiled, with the same weights and inputs."""
        exact = copy.copy(self)
        exact.model = copy.deepcopy(self.model).double()
        exact.leaves = [self.leaves[0].detach().double().requires_grad_(), *exact.model.parameters()]
        exact.dy = self.dy.double()
        return exact

    def peak(self) -> int:
        """The peak of the memory that a step allocates, in bytes; 0 on a CPU."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def milliseconds(self) -> Callable[[], float]:
        """Runs a step, and returns a function that waits for it and returns its time in milliseconds."""
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(self.device)
            # The GPU sleeps until the host has launched the step, so that waiting for the host is not measured.
            torch.cuda._sleep(int(min(self.host_seconds, LONGEST_WAIT) * CYCLES))
            begin = time.perf_counter()
            start.record()
            self()
            end.record()
            self.host_seconds = time.perf_counter() - begin

            def elapsed_on_gpu() -> float:
                end.synchronize()
                return start.elapsed_time(end)

            return elapsed_on_gpu
        begin = time.perf_counter()
        self()
        elapsed = 1000 * (time.perf_counter() - begin)
        return lambda: elapsed


def compile_ahead(compile_one: Callable[[Task], str | None], tasks: list[Task], jobs: int) -> None:
    """Fills the compiler's cache in several processes, as compiling one task after the other takes minutes.

    Args:
        compile_one: compiles for a task, in another process. Returns what went wrong, which the measurement will report too.
        tasks: must be picklable.
        jobs: the number of processes. If one of them is killed, the measuring process compiles what is left.
    """
    spawned, few = multiprocessing.get_context("spawn"), {"TORCHINDUCTOR_COMPILE_THREADS": "2"}  # of each process
    pool = ProcessPoolExecutor(jobs, spawned, signal.signal, (signal.SIGINT, _leave_to_the_pool))
    try:
        with variables(few), pool, all_or_none():
            made = as_completed([pool.submit(_alone, compile_one, task) for task in tasks])
            for trouble in filter(None, (future.result() for future in progress(made, len(tasks)))):
                say(trouble)
    except BrokenProcessPool:
        say("a process that compiles was killed, perhaps for want of memory; the rest is compiled one by one")


def _leave_to_the_pool(*_: object) -> None:
    """Ctrl-C in a terminal reaches these processes, too, which would print where they were. The measuring one ends them."""


def _alone(compile_one: Callable[[Task], str | None], task: Task) -> str | None:
    """Compiles for a task as the measuring process does, without caching autotuning results, as other processes run too."""
    from torch._inductor import config

    config.autotune_local_cache = False
    torch.compiler.reset()
    try:
        return compile_one(task)
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _compile(task: tuple[str, str, torch.dtype, torch.device]) -> str | None:
    """Compiles the two compiled forms of a block; returns what went wrong."""
    block, activation, dtype, device = task
    try:
        for form in FORMS[2:]:
            Step(BLOCKS[block], activation, form, dtype, device)()
    except Exception as error:  # compilers raise errors of many types
        return f"{block}, {activation}: {first_line(error)}"
    return None


def in_turns(steps: dict[str, Step], device: torch.device, longer: int) -> dict[str, float]:
    """Median milliseconds of each form's step."""
    least, seconds = RUNS[device.type]
    laps: dict[str, list[Callable[[], float]]] = {form: [] for form in steps}
    for step in steps.values():  # warm-up: compilation and autotuning
        step()
    once = sum(step.milliseconds()() for step in steps.values()) / 1000
    for _ in range(longer * max(least, int(seconds / once))):
        for form, step in steps.items():
            laps[form].append(step.milliseconds())
    return {form: statistics.median(elapsed() for elapsed in each) for form, each in laps.items()}


def waiting(step: Step) -> float:
    """The time that the host takes to launch a step over the step's time; 1 or more if the GPU waits for the host."""
    if step.device.type != "cuda":
        return 0.0
    elapsed = step.milliseconds()()
    return 1000 * step.host_seconds / elapsed


@contextmanager
def without_tf32() -> Iterator[None]:
    """A context in which float32 convolutions and matrix products do not use TF32."""
    # Only settings that allow TF32 are changed: assigning the matrix product's changes the keys of the compiler's cache.
    allowed = [backend for backend in (torch.backends.cudnn, torch.backends.cuda.matmul) if backend.allow_tf32]
    try:
        for backend in allowed:
            backend.allow_tf32 = False
        yield
    finally:
        for backend in allowed:
            backend.allow_tf32 = True


def differing(steps: dict[str, Step], near: float) -> list[str]:
    """The replaced forms whose error exceeds ``near`` and twice the error of the corresponding plain form.

    The error of an output or a gradient is the norm of its difference from float64, relative to its own norm. Sums of many
    products that nearly cancel have large errors in every form, by rounding alone.
    """
    exact = steps["eager"].in_float64()()

    def errors(form: str) -> list[float]:
        found = zip(steps[form](), exact, strict=True)
        return [float((each.double() - b).norm() / b.norm().clamp(min=torch.finfo(b.dtype).tiny)) for each, b in found]

    with without_tf32():
        return [
            form
            for form in FORMS
            if "jitact" in form
            and any(
                not own <= max(near, 2 * plain)
                for own, plain in zip(errors(form), errors(form.removesuffix(" + jitact")), strict=True)
            )
        ]


def measure(block: str, activation: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """A row of the results: times and peaks of the four forms, and flags for what exceeds the limits."""
    row: dict[str, Any] = {"block": block, "name": activation, "dtype": dtype_name(dtype), "ms": {}, "peak": {}, "flags": []}
    torch.compiler.reset()
    try:
        steps = {form: Step(BLOCKS[block], activation, form, dtype, device) for form in FORMS}
        for step in steps.values():  # compiled in the mode in which it is timed
            step()
        # Steps that draw random numbers differ even with equal seeds, as each form draws in its own order. Their other parts
        # are checked in other blocks; without randomness, they would have to be compiled a second time.
        if not BLOCKS[block].random:
            row["flags"] += [f"{form} computes something else" for form in differing(steps, 64 * torch.finfo(dtype).eps)]
        row["ms"] = in_turns(steps, device, 1)
        if any(ratio < 1 for ratio in _ratios(row["ms"])):
            row["ms"] = in_turns(steps, device, AGAIN)
        row["peak"] = {form: step.peak() for form, step in steps.items()}
        row["host"] = waiting(steps["eager + jitact"])
    except Exception as error:
        return row | {"flags": [first_line(error)]}
    eager, compiled = _ratios(row["ms"])
    memory = [row["peak"][f"{form} + jitact"] / max(1, row["peak"][form]) for form in ("eager", "compile")]
    row |= {"ratios": {"eager": eager, "compile": compiled}, "memory": dict(zip(("eager", "compile"), memory, strict=True))}
    if compiled < SLOWEST:
        row["flags"].append(f"compiled {compiled:.3f}")
    if memory[1] > MOST_MEMORY:
        row["flags"].append(f"memory, compiled {memory[1]:.3f}")
    if eager < SLOWEST and row["host"] < HOST_LIMIT:
        row["flags"].append(f"eager {eager:.3f}")
    return row


def _ratios(ms: dict[str, float]) -> tuple[float, float]:
    """The speed-up of replaced over plain, eager and compiled."""
    return ms["eager"] / ms["eager + jitact"], ms["compile"] / ms["compile + jitact"]


HEADING = f"{'block':14} {'':10} {'':5} {'eager':>8} {'+ jitact':>8} {'compile':>8} {'+ jitact':>8}"
HEADING += f" {'eager':>6} {'compile':>8} {'memory':>7}"


def line(row: dict[str, Any]) -> str:
    """A row as text: milliseconds, speed-ups of replaced over plain, and the ratio of their memory when compiled."""
    head = f"{row['block']:14} {row['name']:10} {row['dtype']:5}"
    flags = "".join(f"  ! {flag}" for flag in row["flags"])
    if "ratios" not in row:
        return head + flags
    times = " ".join(f"{row['ms'][form]:8.3f}" for form in FORMS)
    memory = f"{row['memory']['compile']:7.3f}" if row["peak"]["compile"] else f"{'':7}"
    return f"{head} {times} {row['ratios']['eager']:6.3f} {row['ratios']['compile']:8.3f} {memory}{flags}"


def measure_models(
    names: Iterable[str], dtypes: list[torch.dtype], device: torch.device, blocks: Iterable[str], jobs: int
) -> dict[str, Any]:
    """Measures blocks with activations, printing line by line, and returns the results.

    Args:
        names: keys of :data:`ACTIVATIONS`.
        dtypes: of weights and inputs.
        device: the device to measure on.
        blocks: keys of :data:`BLOCKS`.
        jobs: how many processes compile ahead; with 0, nothing is compiled ahead.
    """
    tasks = [(block, name, dtype) for dtype in dtypes for block in blocks for name in names]
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {}
    with keeping(results):
        if jobs:
            begin = time.perf_counter()
            compile_ahead(_compile, [(*task, device) for task in tasks], jobs)
            say(f"compiled ahead in {time.perf_counter() - begin:.0f} s")
        say(HEADING)
        for block, name, dtype in progress(tasks, len(tasks), lambda task: f"{task[0]} {task[1]} {dtype_name(task[2])}"):
            rows.append(measure(block, name, dtype, device))
            say(line(rows[-1]))
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    results |= summary(rows)
    means = ", ".join(f"{form} {mean:.3f}" for form, mean in results["geometric_means"].items())
    if results["stopped"] != CLOSED:
        say(f"{len(rows)} lines, {results['flagged']} flagged; plain over replaced in the geometric mean: {means}")
    return results


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows, how many are flagged, and the geometric means of the speed-ups."""
    compared = [row["ratios"] for row in rows if "ratios" in row]
    means = {form: statistics.geometric_mean(each[form] for each in compared) for form in ("eager", "compile") if compared}
    return {"geometric_means": means, "flagged": sum(bool(row["flags"]) for row in rows), "rows": rows}
