"""A KernelBench submission, made, checked and timed: a file with ``ModelNew`` that needs PyTorch and nothing of jitact.

``python examples/kernelbench_submission.py softsign -o softsign.py``. KernelBench's problems of this kind, on its first level,
are ReLU, LeakyReLU, Sigmoid, Tanh, Softmax, LogSoftmax, Swish, GELU, SELU, HardSigmoid, Softplus, Softsign, ELU, HardTanh and
NewGELU.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

import jitact


def load(path: Path) -> ModuleType:
    """The submission as KernelBench has it: a module of its own."""
    spec = importlib.util.spec_from_file_location("submission", path)
    assert spec is not None and spec.loader is not None
    submission = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(submission)
    return submission


def seconds(module: nn.Module, x: Tensor, runs: int) -> float:
    """The time of a call, after one that does not count."""
    module(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(runs):
        module(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / runs


def main(arguments: list[str] | None = None) -> bool:
    """Writes the file, compares ``ModelNew`` with ``Model`` and times both; returns whether they agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("activation", nargs="?", default="softsign", help="any name that jitact.get takes")
    parser.add_argument("-o", "--output", type=Path, help="the file; the activation's name by default")
    args = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = args.output or Path(f"{args.activation}.py")

    path.write_text(jitact.export(args.activation), encoding="utf-8")
    submission = load(path)
    ours = submission.ModelNew(*submission.get_init_inputs()).to(device)
    theirs = submission.Model(*submission.get_init_inputs()).to(device)

    # get_inputs() gives 6 GB, KernelBench's size. That is for a GPU; here a CPU gets less.
    x = submission.get_inputs()[0].to(device) if device.type == "cuda" else torch.randn(256, 16384)
    with torch.no_grad():
        agree = torch.allclose(ours(x), theirs(x), rtol=1e-4, atol=1e-4)  # KernelBench's own tolerance
        times = [seconds(module, x, 10) for module in (theirs, ours)]
    print(f"{path}: {'agrees' if agree else 'DISAGREES'} with PyTorch")
    print(f"PyTorch {1000 * times[0]:.3f} ms, submission {1000 * times[1]:.3f} ms: {times[0] / times[1]:.2f} times as fast")
    return agree


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
