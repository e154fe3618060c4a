"""The errors of gated activations, on pairs of gate and up with incoming gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..records import Activation
from .limits import SMALL_SLOPE
from .ulp import ulp_error

__all__ = ["Judge", "Judged", "every_value", "pairs", "spread_values"]

LEAST = 2.0**-126  # the smallest normal float32 number; 16-bit types are computed in float32 too
LEAST_SLOPE = 2.0**-119  # at slopes above this, exp(gate), down to a hundredth of the slope, is a normal number
STEP_OF_PAIRS = 2**24
MANTISSAS = {torch.bfloat16: 7, torch.float16: 10}

Judged = dict[str, tuple[Tensor, Tensor]]
"""For "forward", "by gate" and "by up": the gates, and the errors in ulp; 0 where the bounds do not apply."""


def every_value(dtype: torch.dtype, device: torch.device) -> Tensor:
    """All values of a 16-bit type, including infinities and NaN."""
    return torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype)


def spread_values(dtype: torch.dtype, device: torch.device, count: int = 512) -> Tensor:
    """Values of a 16-bit type with every exponent and sign and random mantissas, including zeros and infinities."""
    mantissa = MANTISSAS[dtype]
    kinds = 2 ** (16 - mantissa)  # combinations of sign and exponent
    generator = torch.Generator().manual_seed(0)
    kind = torch.arange(count) % kinds
    bits = torch.randint(2**mantissa, (count,), generator=generator)
    bits[: kinds // 2 : kinds // 2 - 1] = 0  # zero and infinity
    bits[kinds // 2 : kinds : kinds // 2 - 1] = 0  # negative zero and infinity
    values = (kind << mantissa) + bits
    return torch.where(values >= 2**15, values - 2**16, values).to(torch.int16).view(dtype).to(device)


def pairs(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Gates, ups and incoming gradients, in chunks.

    For a 16-bit type, every gate is paired with each of :func:`spread_values`; for float32 they are random bits, 2^32 pairs on
    a GPU; for float64 random normal numbers.
    """
    generator = torch.Generator(device).manual_seed(0)
    if dtype.itemsize == 2:
        gates, ups = every_value(dtype, device), spread_values(dtype, device)
        incoming = ups[ups.isfinite()]
        for up in ups.split(16):
            gate, one = gates.expand(len(up), -1).contiguous(), up[:, None].expand(-1, len(gates)).contiguous()
            chosen = torch.randint(len(incoming), gate.shape, generator=generator, device=device)
            yield gate.flatten(), one.flatten(), incoming[chosen].flatten()
        return
    size = STEP_OF_PAIRS if device.type == "cuda" else 2**18
    for _ in range(2**32 // size if device.type == "cuda" and dtype is torch.float32 else 8):
        if dtype is torch.float32:
            bits = torch.randint(-(2**31), 2**31, (3, size), generator=generator, device=device, dtype=torch.int64)
            yield tuple(bits.to(torch.int32).view(dtype).unbind(0))
        else:
            yield tuple(torch.randn(3, size, generator=generator, device=device, dtype=dtype).mul_(4).unbind(0))


class Judge:
    """The exact results and gradients of a gated activation on pairs, and where the error bounds apply.

    They apply where the factors are normal float32 numbers: the activation of the gate, its slope, the factor of up, ``dy``
    and, for gradients, the product of the two. A NaN that no factor explains is an infinite error everywhere.

    Args:
        record: of the activation; parameters have their defaults.
        gate: the gates.
        up: the tensors that the activated gates are multiplied by.
        dy: the incoming gradients.
    """

    def __init__(self, record: Activation, gate: Tensor, up: Tensor, dy: Tensor) -> None:
        """Computes the exact results in float64."""
        self.given = gate, up, dy
        form, names = record.exact or record.reference, record.layout.tensors[:2]
        params = torch.tensor([default for _, default in record.params])
        # Rounded, as kernels and PyTorch round them.
        params = (params.double() if gate.dtype is torch.float64 else params).tolist()

        def exact(gate: Tensor, up: Tensor) -> Tensor:
            given = {"gate": gate, "up": up}
            return form(*[given[name] for name in names], *params)

        self.wanted = _with_gradients(exact, gate.double(), up.double(), dy.double())
        ones = torch.ones_like(self.wanted[0])
        # The formula is act(gate) times a factor of up whose slope at 0 is 1, so both follow from values of the product.
        act_of_one = _with_gradients(exact, ones[:1], 0 * ones[:1], ones[:1])[2]
        factor_of_one = exact(ones[:1], ones[:1]) / act_of_one
        act, slope, _ = ((t / factor_of_one).abs() for t in _with_gradients(exact, gate.double(), ones, ones))
        _, _, factor_slope = (t.abs() for t in _with_gradients(exact, ones, up.double(), ones))
        factor, incoming = (exact(ones, up.double()) / act_of_one).abs(), dy.double().abs()
        factor_slope = factor_slope / act_of_one
        self.slopes = {"forward": None, "by gate": slope, "by up": factor_slope}
        self.bounded = {
            "forward": _normal(act) & _normal(factor),
            "by gate": (slope >= LEAST_SLOPE) & _normal(factor) & _normal(incoming) & _normal(incoming * factor),
            "by up": _normal(act) & _normal(incoming) & _normal(factor_slope) & _normal(incoming * factor_slope),
        }

    def errors(self, function: Callable[[Tensor, Tensor], Tensor]) -> Judged:
        """The errors of a function of gate and up."""
        gate, up, dy = self.given
        explained = gate.isnan() | up.isnan() | gate.isinf() | up.isinf() | dy.isinf()
        results, found = _with_gradients(function, *self.given), {}
        for (kind, slope), ours, theirs in zip(self.slopes.items(), results, self.wanted, strict=True):
            error = ulp_error(ours, theirs, gate.dtype)
            if slope is not None:
                error = error * (slope / SMALL_SLOPE[gate.dtype]).clamp(max=1)
                explained = explained | dy.isnan()
            error = error.masked_fill(~self.bounded[kind] | theirs.isnan(), 0.0)
            found[kind] = gate, error.masked_fill(ours.isnan() & ~explained, torch.inf)
        return found


def _normal(t: Tensor) -> Tensor:
    return (t >= LEAST) & (t < 2.0**128)


def _with_gradients(f: Callable[[Tensor, Tensor], Tensor], gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    gate, up = (t.detach().requires_grad_() for t in (gate, up))
    with torch.enable_grad():
        y = f(gate, up)
    return y.detach(), *torch.autograd.grad(y, (gate, up), dy)
