"""What ``jitact.replace`` does to whole models: results, tokens per second and memory of a training step, before and after.

``python notebooks/swap_models.py bert llama --dtype bfloat16 --compile``. Models are built from configurations, with random
weights; bert, gpt2 and llama need transformers. Sizes are those of base models on a GPU, and small on a CPU. Each takes
seconds, and a minute or two with ``--compile``. Steps are timed in laps that take turns, as a training loop makes them; on a
GPU also apart, what the host and what the GPU needs for one.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import jitact
from jitact.measuring.commandline import CLOSED, CommandParser, Parser, exit_code, keeping, machine, write_json
from jitact.measuring.markdown import training_markdown
from jitact.measuring.models import CYCLES
from jitact.measuring.others import Others
from jitact.measuring.text import distrust

MODELS = ("bert", "gpt2", "llama", "resnet")
# Layers, features, features of the MLP, heads, sequences, their length.
SIZES = {"small": (2, 64, 256, 4, 4, 64), "base": (12, 768, 3072, 12, 32, 512), "llama": (8, 2048, 5632, 16, 8, 1024)}
STEPS_OF_LAP = 4  # that are started one after the other on a GPU
WARM = 2.0  # seconds of steps before the first is timed there, in which its clocks settle
LONGEST_WAIT = 0.1  # seconds that a GPU is kept from beginning
TIMES = ("ms", "host_ms", "gpu_ms")
# What results may differ by: each of a model's layers rounds anew.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        """Takes the numbers of channels."""
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """The block, with the second activation after the sum."""
        return self.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18, as its paper has it but for the width."""

    def __init__(self, width: int) -> None:
        """Takes the number of channels of the first stage; the paper's is 64."""
        super().__init__()
        stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        blocks, inputs = [], width
        for stage in range(4):
            for i in range(2):
                outputs = width << stage
                blocks.append(Block(inputs, outputs, 2 if stage and i == 0 else 1))
                inputs = outputs
        self.body = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        return self.body(x)


def make(name: str, large: bool) -> tuple[nn.Module, Callable[[], Tensor], Callable[[nn.Module, Tensor], Tensor]]:
    """A model, a maker of inputs, and the loss of a model on inputs."""
    if name == "resnet":
        batch, size = (128, 224) if large else (8, 64)

        def images() -> Tensor:
            return torch.randn(batch, 3, size, size)

        return ResNet(64 if large else 16), images, lambda model, x: model(x).float().square().mean()

    import transformers

    layers, hidden, inner, heads, batch, length = SIZES["small" if not large else "llama" if name == "llama" else "base"]
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": 8192}
    sizes |= {"intermediate_size": inner, "bos_token_id": 0, "eos_token_id": 0}
    if name == "gpt2":
        config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    elif name == "bert":
        config = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    else:
        config = transformers.LlamaConfig(**sizes)
    model = transformers.AutoModel.from_config(config)

    def tokens() -> Tensor:
        return torch.randint(0, 8192, (batch, length))

    return model, tokens, lambda model, x: model(input_ids=x)[0].float().square().mean()


def gradients(model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The loss and the gradient of every parameter."""
    model.zero_grad()
    value = loss(model, x)
    value.backward()
    return [value.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def difference(a: list[Tensor], b: list[Tensor]) -> float:
    """The distance of all that is in ``b`` from ``a``, relative to ``a``."""
    a, b = (torch.cat([tensor.float().flatten() for tensor in each]) for each in (a, b))
    return float((a - b).norm() / a.norm())


def training_step(model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    """A training step of a model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss(model, x).backward()
        optimizer.step()

    return step


def lap(step: Callable[[], None], count: int, on_gpu: bool) -> float:
    """Milliseconds of each of some steps, of which none waits for the one before it: what a training loop takes."""
    if on_gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    if on_gpu:
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - begin) / count


def host_and_gpu(step: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds of one step: what the host takes to start it, and what the GPU takes that never waits for the host."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    host = time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int(min(host, LONGEST_WAIT) * CYCLES))  # the GPU begins when all is started
    start.record()
    step()
    end.record()
    end.synchronize()
    return 1000 * host, start.elapsed_time(end)


def step_times(steps: list[Callable[[], None]], laps: int, on_gpu: bool) -> list[dict[str, float]]:
    """Median milliseconds of training steps, ``"host_ms"`` and ``"gpu_ms"`` of :func:`host_and_gpu` among them on a GPU.

    The steps take turns, each as often before as after its neighbour, so that a drift hits all alike.
    """
    count = STEPS_OF_LAP if on_gpu else 1
    turn, begin = 0, time.perf_counter()
    while turn < 3 or time.perf_counter() < begin + WARM * on_gpu:
        turn += 1
        for step in steps:
            lap(step, count, on_gpu)
    found: list[list[tuple[float, ...]]] = [[] for _ in steps]
    for turn in range(laps):
        for i in range(len(steps)) if turn % 2 else reversed(range(len(steps))):
            found[i].append((lap(steps[i], count, on_gpu), *(host_and_gpu(steps[i]) if on_gpu else ())))
    return [dict(zip(TIMES, map(statistics.median, zip(*each, strict=True)), strict=False)) for each in found]


def memory(model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], x: Tensor) -> float:
    """Megabytes at the end of forward beyond those before it: what autograd keeps, each tensor counted once."""
    if x.is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        value = loss(model, x)
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        del value
        return kept / 1e6
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output itself would keep its graph, and the graph it

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = loss(model, x)
    del value
    return sum(sizes.values()) / 1e6


def peak(model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], x: Tensor) -> int:
    """Bytes of GPU memory at the height of a training step, weights and all; 0 on a CPU, whose memory nobody counts."""
    if not x.is_cuda:
        return 0
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    loss(model, x).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def compare(name: str, device: torch.device, dtype: torch.dtype, laps: int, compiled: bool = False) -> dict[str, Any]:
    """Measures a model before and after, prints it, and returns the figures, and whether results agree."""
    torch.manual_seed(0)
    model, inputs, loss = make(name, large=device.type == "cuda")
    model = model.to(device, dtype).train()
    x = inputs().to(device)
    x = x.to(dtype) if x.is_floating_point() else x
    swapped = copy.deepcopy(model)
    report = jitact.replace(swapped)
    how = "under torch.compile" if compiled else "eager"
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"\n{name}, {how}, {parameters:.1f} M parameters, input {tuple(x.shape)}\n{report}", flush=True)
    if not compiled:
        with torch.no_grad(), jitact.patched() as calls:
            close = torch.allclose(loss(model, x), loss(swapped, x), rtol=TOLERANCE[dtype])
        print(f"with patched() instead: {'the same loss' if close else 'ANOTHER LOSS'}; {calls}")
    measured = [torch.compile(each) for each in (model, swapped)] if compiled else [model, swapped]
    far = difference(*(gradients(each, loss, x) for each in measured))
    agree = far <= TOLERANCE[dtype] and (compiled or close)
    print(f"loss and gradients: relative difference {far:.1e}, {'within' if agree else 'BEYOND'} {TOLERANCE[dtype]:g}")
    kept = [memory(each, loss, x) for each in measured]
    print(f"kept for backward: {kept[0]:.1f} MB before, {kept[1]:.1f} MB after ({kept[1] / kept[0]:.0%})")
    others = Others()
    times = step_times([training_step(each, loss, x) for each in measured], laps, x.is_cuda)
    busy = not x.is_cuda and others.disturb(torch.get_num_threads())
    peaks = [peak(each, loss, x) for each in measured]
    count, unit = (x.numel(), "tokens") if not x.is_floating_point() else (len(x), "images")
    rates = [1000 * count / each["ms"] for each in times]
    ms = [each["ms"] for each in times]
    print(f"training step: {ms[0]:.2f} ms before, {ms[1]:.2f} ms after ({ms[0] / ms[1]:.3f}x)")
    print(f"{unit} per second: {rates[0]:,.0f} before, {rates[1]:,.0f} after")
    if x.is_cuda:
        for what, key in (("of the GPU alone", "gpu_ms"), ("of the host, to start it", "host_ms")):
            print(f"  {what}: {times[0][key]:.2f} ms before, {times[1][key]:.2f} ms after")
        print(f"peak memory: {peaks[0] / 1e9:.2f} GB before, {peaks[1] / 1e9:.2f} GB after", flush=True)
    before, after = (
        {**own, "per_second": rate, "kept_mb": mb, "peak_bytes": most}
        for own, rate, mb, most in zip(times, rates, kept, peaks, strict=True)
    )
    row = {"model": name, "compiled": compiled, "input": list(x.shape), "unit": unit, "apart": far, "agree": bool(agree)}
    return row | {"busy": busy, "before": before, "after": after}


def main() -> int:
    """The command line. Returns the exit code: 1 if results differ, 130 after Ctrl-C, which keeps the models that are done."""
    return exit_code(_main)


def _main() -> int:
    parser = CommandParser(prog="swap_models.py", description=__doc__.replace("``", ""))
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(MODELS)}; all by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--laps", type=positive, default=20, help=f"to time of each; on a GPU, of {STEPS_OF_LAP} steps each")
    parser.add_argument("--compile", action="store_true", help="measure each under torch.compile too")
    parser.add_argument("--json", type=Parser.output_file, metavar="FILE", help="write the figures, after each model")
    args = parser.parse_args()
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    models = [name for name in args.models or MODELS if name == "resnet" or find_spec("transformers")]
    left = [name for name in args.models or MODELS if name not in models]
    if left:
        print(f"{', '.join(left)} left out: pip install transformers")
    results: dict[str, Any] = {"machine": machine(args.device), "dtype": args.dtype, "rows": []}
    eager, compiled = [(name, False) for name in models], [(name, True) for name in models]
    with keeping(results):
        for name, under_compile in eager + (compiled if args.compile else []):
            results["rows"].append(compare(name, args.device, getattr(torch, args.dtype), args.laps, under_compile))
            if args.json:
                write_json(args.json, results)  # after each, as the next may not end
    if results["rows"] and results["stopped"] != CLOSED:
        print("\n".join(["", training_markdown(results), *distrust(results["rows"])]))
    return results["stopped"] or (0 if all(row["agree"] for row in results["rows"]) else 1)


def positive(text: str) -> int:
    """A positive number."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
