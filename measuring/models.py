"""Blocks of models before and after :func:`jitact.replace`, eager and compiled: ``python bench.py --models``.

Each block is a training step, forward and backward, with each activation in its place. Four forms of it take turns: plain and
replaced, each as it is and with torch.compile; time is a median, memory the peak of one step beyond weights and inputs. Replaced
may take 1/0.99 of the time of plain and 1.01 of its memory; what is beyond that is measured again, longer, and marked if it stays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["ACTIVATIONS", "BLOCKS", "Block"]

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
    """The MLP of Llama and its kin."""

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
    """An activation among elementwise neighbours."""

    def __init__(self, act: nn.Module, width: int) -> None:
        super().__init__()
        self.act, self.weight = act, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x * self.weight + 1) * 0.5 + x


class NormConv(nn.Module):
    """Normalisation, activation, convolution, as diffusion models have them."""

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
        make: the block around an activation; of the small size on a CPU.
        shape: of the input, on a GPU and on a CPU.
        channels_last: whether weights and inputs are.
    """

    make: Callable[[nn.Module, bool], nn.Module]
    shape: tuple[tuple[int, ...], tuple[int, ...]]
    channels_last: bool = False


BLOCKS = {
    "mlp": Block(lambda act, small: MLP(act, *((128, 512) if small else (1024, 4096))), ((16384, 1024), (256, 128))),
    "wide mlp": Block(lambda act, small: MLP(act, *((256, 1024) if small else (4096, 16384))), ((2048, 4096), (128, 256))),
    "gated": Block(lambda act, small: Gated(act, *((128, 512) if small else (2048, 8192))), ((4096, 2048), (256, 128))),
    "llama": Block(lambda act, small: Gated(act, *((256, 896) if small else (4096, 14336))), ((2048, 4096), (128, 256))),
    "conv-bn-act": Block(lambda act, small: Residual(act, 16 if small else 64), ((64, 64, 112, 112), (2, 16, 28, 28)), True),
    "chain": Block(lambda act, small: Chain(act, 256 if small else 4096), ((32768, 4096), (1024, 256))),
    "norm-act-conv": Block(lambda act, small: NormConv(act, 32 if small else 128), ((32, 128, 64, 64), (2, 32, 16, 16)), True),
    "layer scale": Block(lambda act, small: LayerScale(act, 16 if small else 96), ((64, 96, 56, 56), (2, 16, 14, 14)), True),
    "dropout": Block(lambda act, small: MLP(act, *((128, 512) if small else (1024, 4096)), 0.1), ((16384, 1024), (256, 128))),
    "squeeze": Block(lambda act, small: SqueezeExcite(act, 16 if small else 128), ((64, 128, 56, 56), (2, 16, 14, 14)), True),
    "recurrent": Block(lambda act, small: Recurrent(act, 64 if small else 1024, 4), ((8192, 1024), (128, 64))),
}
