"""An activation of one's own, fused with the arithmetic around it: one pass over memory where PyTorch takes seven.

``python examples/fused_activation.py``. The activation is a GELU with a gain and an offset before it and a smooth cap after it,
``cap * tanh(gelu(gain * x + offset) / cap)``: three numbers that the user chooses, the gradient derived when it is compiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jitact


def as_operations(x: Tensor, gain: float, offset: float, cap: float) -> Tensor:
    """The same as separate operations of PyTorch."""
    return cap * torch.tanh(F.gelu(gain * x + offset) / cap)


CappedGELU = jitact.define(
    "capped_gelu",
    "cap * tanh((gain * x + offset) * normal_cdf(gain * x + offset) / cap)",
    gain=1.0,
    offset=0.0,
    cap=30.0,
)


class MLP(nn.Module):
    """A block that uses it as any module."""

    def __init__(self, size: int) -> None:
        """Takes the number of features."""
        super().__init__()
        self.up, self.act, self.down = nn.Linear(size, 4 * size), CappedGELU(gain=1.5, cap=10.0), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        return self.down(self.act(self.up(x)))


def milliseconds(function: Callable[[Tensor], Tensor], x: Tensor, runs: int = 10) -> float:
    """The time of forward and backward together, the shortest of some."""
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        torch.autograd.grad(function(x).sum(), x)
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return min(times)


def main(size: tuple[int, int] = (2048, 4096)) -> bool:
    """Checks the activation, trains a block for a step, and times it beside PyTorch's operations; returns whether it passed."""
    passed = bool(jitact.check(CappedGELU, dtypes=[torch.bfloat16]))

    block = MLP(64)
    block(torch.randn(8, 64)).square().mean().backward()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(size, device=device, requires_grad=True)
    fused, separate = CappedGELU(), lambda x: as_operations(x, 1.0, 0.0, 30.0)
    print(
        f"forward + backward: {milliseconds(separate, x):.2f} ms as PyTorch's operations, {milliseconds(fused, x):.2f} ms fused"
    )
    return passed


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
