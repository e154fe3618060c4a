"""How far gated activations are from exact: on pairs of a gate and what it is multiplied by, with gradients that come in."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..records import Activation
from .limits import SMALL_SLOPE
from .ulp import ulp_error

__all__ = ["Judge", "Judged", "every_value", "pairs", "spread_values"]

LEAST = 2.0**-126  # of the normal float32 numbers, in which 16-bit types are computed too
LEAST_SLOPE = 2.0**-119  # exp(gate), a hundredth of it and less, is a normal number
STEP_OF_PAIRS = 2**24
MANTISSAS = {torch.bfloat16: 7, torch.float16: 10}

Judged = dict[str, tuple[Tensor, Tensor]]
"""By "forward", "by gate" and "by up": the gates, and the errors in ulp, of what the bounds are for."""


def every_value(dtype: torch.dtype, device: torch.device) -> Tensor:
    """All values of a 16-bit type, infinities and NaN among them."""
    return torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype)


def spread_values(dtype: torch.dtype, device: torch.device, count: int = 512) -> Tensor:
    """Values of a 16-bit type with every exponent and sign, whose other bits are random: zeros and infinities among them."""
    mantissa = MANTISSAS[dtype]
    kinds = 2 ** (16 - mantissa)  # of sign and exponent
    generator = torch.Generator().manual_seed(0)
    kind = torch.arange(count) % kinds
    bits = torch.randint(2**mantissa, (count,), generator=generator)
    bits[: kinds // 2 : kinds // 2 - 1] = 0  # of zero and infinity
    bits[kinds // 2 : kinds : kinds // 2 - 1] = 0  # and of both with a minus
    values = (kind << mantissa) + bits
    return torch.where(values >= 2**15, values - 2**16, values).to(torch.int16).view(dtype).to(device)


def pairs(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Gates, ups and gradients that come in.

    Of a 16-bit type every gate beside :func:`spread_values`; of others random bits, on a GPU of float32 2^32 pairs.
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
    """What a gated activation and its gradients should be on pairs, and where results have bounds.

    Those are where the factors are normal float32 numbers: the activation of the gate, its slope, and what it is multiplied
    by, ``dy`` and, for gradients, the product of the two. A NaN that no factor explains is an infinite error anywhere.

    Args:
        record: of the activation, whose defaults are the numbers.
        gate: gates.
        up: what they multiply.
        dy: gradients that come in.
    """

    def __init__(self, record: Activation, gate: Tensor, up: Tensor, dy: Tensor) -> None:
        """Computes it in float64."""
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
        # act(gate) times a factor of up, whose slope at 0 is 1: so what either of them is follows from their product.
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
        """Those of a function of the tensors that the kernel file calls gate and up."""
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
