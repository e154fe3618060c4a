"""Gradients of fewer operations than kernel files have, for graphs.

What Inductor fuses is computed in each kernel that needs it, up to a number of operations; beyond, it is stored. These are
about as long as PyTorch's own, so that no more is stored than without them. They are as near in 16 bits, and in float32 in
units of the last place at 1, where a gradient's error counts; float64 has the kernel's. A gradient at infinity may be NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["gradients"]

LOG2E = math.log2(math.e)
K1 = 2 * math.sqrt(2 / math.pi)  # of gelu_tanh
K3 = 0.044715 * K1


def gradients(dtype: torch.dtype) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """``backward(dy, x)`` by name of the library's kernel files, for what elements of ``dtype`` are computed in."""
    if dtype is torch.float64:
        return {}

    def left(s: Tensor, x: Tensor) -> Tensor:
        """1 - s, for s = sigmoid(x); multiplied with x, the difference would be too coarse for float32."""
        return 1 - s if dtype.itemsize == 2 else torch.sigmoid(-x)

    def silu(dy: Tensor, x: Tensor) -> Tensor:
        s = torch.sigmoid(x)
        return dy * (s + s * x * left(s, x))

    def gelu(dy: Tensor, x: Tensor) -> Tensor:
        bell = torch.exp2(x * x * (-0.5 * LOG2E))
        return dy * (0.5 + 0.5 * torch.erf(x * math.sqrt(0.5)) + x * (bell * (1 / math.sqrt(2 * math.pi))))

    def gelu_tanh(dy: Tensor, x: Tensor) -> Tensor:
        u = (x * x).clamp(max=1600)  # inf * 0 would be NaN
        v = x * (K3 * u + K1)
        s = torch.sigmoid(v)
        return dy * (s + s * x * left(s, v) * (3 * K3 * u + K1))

    def mish(dy: Tensor, x: Tensor) -> Tensor:
        c = x.clamp(max=20)  # from there up the slope is 1, and n would overflow
        e = torch.exp2(c * LOG2E)
        n = e * (e + 2)
        r = torch.reciprocal(n + 2)
        return dy * (r * (n + 4 * ((n - e) * r * c)))

    return {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "mish": mish}
