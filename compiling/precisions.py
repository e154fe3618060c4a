"""The functions of ``kernels/device/math_double.cuh``, ``math_single.cuh`` and ``math_narrow.cuh`` as torch operations.

Values are tensors, or Python numbers if they depend on no tensor.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable

import torch
from torch import Tensor

from ..definitions import helpers

__all__ = [
    "LN2",
    "LOG2E",
    "Narrow",
    "Single",
    "Value",
    "Wide",
    "inverse",
    "leading",
    "least",
    "most",
    "polynomial",
    "scaled_sigmoid",
]

Value = Tensor | float
LOG2E, LN2, SQRT_HALF = math.log2(math.e), math.log(2), math.sqrt(0.5)


def polynomial(x: Tensor, *coefficients: float) -> Tensor:
    """Horner's rule; coefficients from the highest power."""
    y = coefficients[0] * x + coefficients[1]
    for c in coefficients[2:]:
        y = y * x + c
    return y


def _extreme(beyond: Callable, or_equal: Callable, of_tensors: Callable, a: Value, b: Value) -> Value:
    """b if ``beyond(b, a)``, else a; NaN if either is. Between a tensor and a number, the sign of 0 is as for two numbers."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return of_tensors(a, b)
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        return b if beyond(b, a) or b != b else a
    x, number, beyond = (a, b, beyond) if isinstance(a, Tensor) else (b, a, or_equal)
    if number != number:
        return x * number
    return torch.where(beyond(number, x), number, x)  # one comparison less than PyTorch's minimum and maximum


least = functools.partial(_extreme, operator.lt, operator.le, torch.minimum)
"""The minimum of two tensors or numbers; NaN if either is."""
most = functools.partial(_extreme, operator.gt, operator.ge, torch.maximum)
"""The maximum of two tensors or numbers; NaN if either is."""


def not_below(x: Tensor, low: Tensor) -> Tensor:
    """The maximum, if both are NaN or neither is. Of 0 and -0 it is x: on a CPU, torch.maximum does not distinguish them."""
    return torch.where(low > x, low, x) if x.device.type == "cpu" else torch.maximum(x, low)


def leading(x: Tensor, step: float) -> Tensor:
    """x rounded to a multiple of ``step``, a power of two, so that products of it are exact.

    Compilers may contract this to fma, but must not reassociate it.
    """
    return x + 1.5 * 2**23 * step - 1.5 * 2**23 * step


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """a / b for b > 0, with a relative error near 2^-21 on GPUs, where rsqrt is one instruction and a division ten."""
    if b.device.type == "cpu":
        return a / b
    r = torch.rsqrt(b)
    return a * r * r


def inverse(b: Tensor) -> Tensor:
    """1 / b for b > 0, with the error of :func:`quotient`."""
    if b.device.type == "cpu":
        return torch.reciprocal(b)
    r = torch.rsqrt(b)
    return r * r


def scaled_sigmoid(x: Tensor, e: Tensor, scale: float) -> Tensor:
    """x / (1 + e / scale), where e is an exponential times ``scale``, so that it overflows only where x sigmoid(x) is 0."""
    y = x * scale / (e + scale)
    return y if x.device.type == "cpu" else torch.where(x.abs() < 2.0**-100, 0.5 * x, y)


class Wide:
    """Functions for float64, which are PyTorch's where it has them."""

    exp, exp2, log, log2, log10, log1p = torch.exp, torch.exp2, torch.log, torch.log2, torch.log10, torch.log1p
    sin, cos, tan, asin, acos, atan, atan2 = torch.sin, torch.cos, torch.tan, torch.asin, torch.acos, torch.atan, torch.atan2
    tanh, asinh = torch.tanh, torch.asinh
    sqrt, rsqrt, erf, erfc, pow, fmod, hypot = (
        torch.sqrt,
        torch.rsqrt,
        torch.erf,
        torch.erfc,
        torch.pow,
        torch.fmod,
        torch.hypot,
    )
    floor, ceil, trunc, rint, abs, copysign = torch.floor, torch.ceil, torch.trunc, torch.round, torch.abs, torch.copysign
    folded, isnan, reciprocal, one_over = torch.abs, torch.isnan, torch.reciprocal, torch.reciprocal
    square_root = root_of = torch.sqrt
    log1p_unit = torch.log1p

    # Inductor's own overflow on a CPU, or are 0 near 0.

    _SINH_END = 709.0

    @classmethod
    def _far(cls, x: Tensor, near: Tensor) -> Tensor:
        """exp(|x|) / 2 in two factors where |x| is large, else ``near``."""
        a = x.abs()
        h = torch.exp(0.5 * a)
        return torch.where(a > cls._SINH_END, 0.5 * h * h, near)

    @classmethod
    def sinh(cls, x: Tensor) -> Tensor:
        return torch.copysign(cls._far(x, torch.sinh(x).abs()), x)

    @classmethod
    def cosh(cls, x: Tensor) -> Tensor:
        return cls._far(x, torch.cosh(x))

    @staticmethod
    def acosh(x: Tensor) -> Tensor:
        return torch.where(x > 2.0**30, torch.log(x) + LN2, torch.acosh(x))

    @staticmethod
    def atanh(x: Tensor) -> Tensor:
        a = x.abs()
        return torch.copysign(0.5 * torch.log1p(2 * a / (1 - a)), x)

    @staticmethod
    def exp_minus_square(x: Tensor) -> Tensor:
        return torch.exp(-x * x)

    cbrt, round = staticmethod(helpers.cbrt), staticmethod(helpers.round_half_up)

    _EXPM1 = tuple(1 / math.factorial(k) for k in range(14, 0, -1))  # terms of expm1(x) / x near 0

    @classmethod
    def _own_expm1(cls, x: Tensor) -> Tensor:
        return torch.where(x.abs() < 0.35, x * polynomial(x, *cls._EXPM1), torch.exp(x) - 1)

    @classmethod
    def expm1(cls, x: Tensor) -> Tensor:
        return cls._own_expm1(x) if x.device.type == "cpu" else torch.expm1(x)  # Inductor's own returns 0 near 0 on a CPU

    @classmethod
    def tanh_beside_slope(cls, x: Tensor) -> Tensor:
        return cls.tanh(x)

    @staticmethod
    def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a * b + c

    @staticmethod
    def decay(a: Tensor) -> Tensor:
        return torch.exp(-a)

    @staticmethod
    def sigmoid(x: Tensor) -> Tensor:
        e = torch.exp(-x.abs())
        return torch.where(x < 0, e, 1.0) / (1 + e)

    @classmethod
    def softplus(cls, x: Tensor) -> Tensor:
        return cls.log1p_unit(cls.decay(x.abs())) + torch.where(x < 0, 0.0, x)

    @staticmethod
    def times_sigmoid(a: Tensor, *of: Tensor) -> Tensor:
        left, t = (of[0] < 0, of[0].abs()) if len(of) == 1 else (of[0], of[1] + of[2])
        h = torch.exp(t * -0.5)  # two factors, as exp(-t) may underflow where a exp(-t) does not
        return torch.where(left, a * h * h, a) / (1 + h * h)

    @classmethod
    def x_times_sigmoid(cls, x: Tensor, *of: Tensor) -> Tensor:
        if len(of) == 3:
            t, w, low = of
            return cls.times_sigmoid(not_below(x, -t), x < 0, LN2 * t * w, LN2 * t * low)
        alpha = of[0]
        bound = (1000 / alpha).clamp(max=2.0**100)  # constant beyond this; avoids 0 * inf = NaN
        return cls.times_sigmoid(torch.maximum(x, -bound), alpha * x)

    @classmethod
    def x_times_sigmoid_slope(cls, x: Tensor, alpha: Tensor) -> Tensor:
        t = least(alpha * x.abs(), 1000.0)
        e = cls.decay(t)
        r = cls.reciprocal(1 + e)
        return r * torch.where(x < 0, e * (1 - t * r), 1 + t * e * r)

    @staticmethod
    def times_tanh_softplus(a: Tensor, x: Tensor) -> Tensor:
        h = torch.exp(x.clamp(max=20) * 0.5)
        e, left = h * h, x < 0
        return torch.where(left, a * h, a) * (torch.where(left, h, e) * (e + 2) / (e * (e + 2) + 2))

    @staticmethod
    def normal_pdf(x: Tensor) -> Tensor:
        return torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))

    @staticmethod
    def normal_tail(t: Tensor) -> Tensor:
        return 0.5 * torch.erfc(SQRT_HALF * t)

    @staticmethod
    def times_normal_tail(t: Tensor) -> Tensor:
        held = t.clamp(max=40)  # avoids 0 * inf = NaN
        return held * (0.5 * torch.erfc(SQRT_HALF * held))

    @classmethod
    def times_normal_tail_slope(cls, t: Tensor) -> Tensor:
        held = least(t, 40.0)
        return cls.normal_tail(held) - held * cls.normal_pdf(held)

    @staticmethod
    def normal_cdf(x: Tensor, *of: Tensor) -> Tensor:
        return 0.5 * torch.erfc(-SQRT_HALF * (x if not of else (x - of[0]) / of[1]))

    @classmethod
    def tanh_slope(cls, x: Tensor) -> Tensor:
        e = cls.decay(2 * x.abs())
        r = cls.reciprocal(1 + e)
        return 4 * e * r * r

    @staticmethod
    def x_minus_tanh(x: Tensor) -> Tensor:
        u = x * x
        c = (1.724487449484433e-05, -7.959955735264808e-05, 0.00023077616269519857, -0.0005874372860094381)
        c += (0.001455309297534642, -0.0035920589774734554, 0.008863229830925709, -0.021869488260559115)
        c += (0.05396825396139557, -0.13333333333326658)
        return torch.where(x.abs() < 0.625, x * u * polynomial(u, *c, 0.3333333333333332), x - torch.tanh(x))

    @staticmethod
    def x_plus_sin_squared(x: Tensor, alpha: Tensor) -> Tensor:
        largest = torch.finfo(x.dtype).max  # the sine of infinity is NaN; beside an infinite x, s is negligible
        s = torch.sin((alpha * x).clamp(-largest, largest))
        return x + s * s / alpha

    @staticmethod
    def x_plus_sin_squared_slope(x: Tensor, alpha: Tensor) -> Tensor:
        v, largest = alpha * x, torch.finfo(x.dtype).max
        # Of an infinite product the kernels take the largest number's sine in float64, and that of 0 in float32; 0 * x keeps
        # the NaN at an infinite x.
        v = v.clamp(-largest, largest) + 0 * x if x.dtype is torch.float64 else torch.where(v.abs() > largest, 0 * x, v)
        s = torch.sin(v) + torch.cos(v)
        return s * s


class Single(Wide):
    """Functions for float32. Tails of the normal distribution are computed as in ``math_single.cuh``."""

    _EXPM1 = Wide._EXPM1[-7:]
    _SINH_END = 88.0

    @classmethod
    def expm1(cls, x: Tensor) -> Tensor:
        return cls._own_expm1(x)

    @staticmethod
    def log1p_unit(e: Tensor) -> Tensor:
        c = (5.232695136e-3, -2.950524476e-2, 7.822596640e-2, -1.366324753e-1, 1.910600788e-1, -2.484298261e-1)
        return e * polynomial(e, *c, 3.331909688e-1, -4.999949315e-1, 9.999999699e-1)

    @staticmethod
    def sigmoid(x: Tensor) -> Tensor:
        return torch.reciprocal(1 + torch.exp(-x))

    @staticmethod
    def _tail(s: Tensor) -> Tensor:
        """Q(t) (t + 5/2) / exp(-t^2 / 2) with s = t / (t + 5/2), for t >= 0."""
        c = (
            -7.888111471e-02,
            2.764140665e-01,
            -3.084100186e-01,
            1.340550184e-01,
            -1.479396820e-01,
            5.555829406e-02,
            2.919359505e-01,
            1.696024388e-01,
            -1.243392110e00,
            1.250000000e00,
        )
        return polynomial(s, *c)

    @staticmethod
    def _bell(t: Tensor) -> Tensor:
        """exp(-t^2 / 2) for 0 <= t < 16, without the rounding error of t^2: the square of a is exact, and the rest small."""
        a = leading(t, 2.0**-8)
        e = torch.exp(-0.5 * a * a)
        r = (a - t) * (a + t)  # a^2 - t^2, twice the remaining exponent
        return e + e * (r * polynomial(r, 1 / 48, 1 / 8, 1 / 2))

    @staticmethod
    def normal_pdf(x: Tensor) -> Tensor:
        return Single._bell(least(x.abs(), 15.0)) * (1 / math.sqrt(2 * math.pi))

    @staticmethod
    def exp_minus_square(x: Tensor) -> Tensor:
        t = least(x.abs(), 11.0)  # beyond this it underflows to 0
        a = leading(t, 2.0**-8)
        e, r = torch.exp(-a * a), (a - t) * (a + t)  # as in _bell
        return e + e * (r * polynomial(r, 1 / 24, 1 / 6, 1 / 2, 1))

    @staticmethod
    def erf(x: Tensor) -> Tensor:
        c = (-6.429718342e-4, 5.095020402e-3, -2.683216333e-2, 1.128340140e-1, -3.761262298e-1, 1.283791661e-1)
        return torch.where(x.abs() > 0.6, torch.erf(x), x + x * polynomial(x * x, *c))

    @staticmethod
    def normal_tail(t: Tensor) -> Tensor:
        t = least(t, 15.0)  # beyond this it underflows to 0
        r = torch.reciprocal(t + 2.5)
        return Single._bell(t) * (r * Single._tail(t * r))

    @staticmethod
    def times_normal_tail(t: Tensor) -> Tensor:
        t = least(t, 15.0)
        s = t / (t + 2.5)
        return s * Single._tail(s) * Single._bell(t)

    @staticmethod
    def normal_cdf(x: Tensor, *of: Tensor) -> Tensor:
        y = Single.normal_tail(x.abs()) if not of else Single._tail_of(x, *of)
        return torch.where(x < (of[0] if of else 0), y, 1 - y)

    @staticmethod
    def _tail_of(x: Tensor, mu: Tensor, sigma: Tensor) -> Tensor:
        """Q(t) with t = |x - mu| / sigma, which is split into ``a``, whose square is exact, and ``rest``: the tail is steep."""
        numbers = torch.finfo(torch.float32)
        sigma = sigma.clamp(numbers.tiny, numbers.max)  # as in the kernel, for a sigma of inf
        d = (x - mu).clamp(numbers.min, numbers.max)
        lost = (torch.minimum(x, -mu) - d + torch.maximum(x, -mu)).clamp(numbers.min, numbers.max)
        few = (sigma.view(torch.int32) & -4096).view(torch.float32)
        a = leading(((x - mu).abs() / sigma).clamp(max=15), 2.0**-8)
        rest = (((d.abs() - a * few) - (a * (sigma - few) + lost)) / sigma).clamp(-0.01, 0.01)
        t = a + rest
        r = torch.reciprocal(t + 2.5)
        return torch.exp(-0.5 * a * a) * torch.exp(-rest * (a + 0.5 * rest)) * (r * Single._tail(t * r))

    @staticmethod
    def x_minus_tanh(x: Tensor) -> Tensor:
        a, u = x.abs(), x * x
        c = (2.866978139e-5, -2.551895450e-4, 1.109842444e-3, -3.380868584e-3)
        c += (8.799713105e-3, -2.186708339e-2, 5.397121981e-2, -1.333338022e-1, 3.333333433e-1)
        far = a - 1 + 2 / (1 + torch.exp(2 * a))
        return torch.copysign(torch.where(a < 1.25, a * u * polynomial(u, *c), far), x)


class Narrow(Wide):
    """Functions for results rounded to 16 bits, as in ``math_narrow.cuh``: one exp2, one division, a short polynomial."""

    _SINH_END = Single._SINH_END

    @staticmethod
    def exp(x: Tensor) -> Tensor:
        return torch.exp2(LOG2E * x)

    @staticmethod
    def decay(a: Tensor) -> Tensor:
        return torch.exp2(-LOG2E * a)

    @staticmethod
    def expm1(x: Tensor) -> Tensor:
        near = x * polynomial(x, 4.161014035e-2, 1.674979478e-1, 5.000165701e-1, 1.0)
        return torch.where(x.abs() < 0.25, near, torch.exp2(LOG2E * x) - 1)

    @staticmethod
    def log1p_unit(e: Tensor) -> Tensor:
        c = (-2.386785299e-2, 1.012190878e-1, -2.100459337e-1, 3.252057135e-1, -4.993612468e-1, 9.999915957e-1)
        return e * polynomial(e, *c)

    @staticmethod
    def sigmoid(x: Tensor) -> Tensor:
        return inverse(1 + torch.exp2(-LOG2E * x))

    @staticmethod
    def times_sigmoid(a: Tensor, *of: Tensor) -> Tensor:
        x = of[0] if len(of) == 1 else torch.where(of[0], -of[1], of[1])
        # Numerator and denominator are scaled, so that exp(-x) overflows only where a sigmoid(x) is 0.
        return quotient(a * 2.0**-8, torch.exp2(-LOG2E * x - 8) + 2.0**-8)

    @staticmethod
    def x_times_sigmoid(x: Tensor, *of: Tensor) -> Tensor:
        if len(of) == 3:
            a = not_below(x, -of[0])
            return quotient(a * 2.0**-8, torch.exp2(-a * of[1] - 8) + 2.0**-8)
        alpha = of[0]
        a = most(x, -(2.0**100))  # avoids 0 * inf = NaN
        return quotient(a * 2.0**-8, torch.exp2(-LOG2E * alpha * a - 8) + 2.0**-8)

    @staticmethod
    def times_tanh_softplus(a: Tensor, x: Tensor) -> Tensor:
        e = torch.exp2(LOG2E * least(x, 20.0) + 8)  # scaled as in times_sigmoid
        n = e * (e * 2.0**-8 + 2)
        return a * 2.0**-8 * quotient(n, n * 2.0**-8 + 2)

    @staticmethod
    def tanh(x: Tensor) -> Tensor:
        a, u = x.abs(), x * x
        near = a + a * u * (u * 1.246056706e-1 - 3.330079019e-1)
        far = 1 - 2 * inverse(1 + torch.exp2(2 * LOG2E * a))
        return torch.copysign(torch.where(a < 0.35, near, far), x)

    @staticmethod
    def x_minus_tanh(x: Tensor) -> Tensor:
        a, u = x.abs(), x * x
        c = (5.236560479e-3, -2.028026432e-2, 5.366570130e-2, -1.333126277e-1, 3.333331048e-1)
        far = a - 1 + 2 * inverse(1 + torch.exp2(2 * LOG2E * a))
        return torch.copysign(torch.where(a < 0.75, a * u * polynomial(u, *c), far), x)

    @staticmethod
    def _bell(t: Tensor) -> Tensor:
        return torch.exp2(-0.5 * LOG2E * t * t)

    @staticmethod
    def _tail(t: Tensor) -> Tensor:
        """Q(t) / exp(-t^2 / 2) for t >= 0."""
        c = (-8.096532524e-2, 2.276526988e-1, -3.018449061e-2, 1.512842327e-1, 1.119793579e-1, 1.202344596e-1)
        r = inverse(0.3 * t + 1)
        return r * polynomial(r, *c)

    @staticmethod
    def normal_pdf(x: Tensor) -> Tensor:
        return (1 / math.sqrt(2 * math.pi)) * Narrow._bell(x)

    @staticmethod
    def normal_tail(t: Tensor) -> Tensor:
        return Narrow._bell(t) * Narrow._tail(t)

    @staticmethod
    def times_normal_tail(t: Tensor) -> Tensor:
        h = least(t, 40.0)
        return h * Narrow._bell(h) * Narrow._tail(h)

    @staticmethod
    def normal_cdf(x: Tensor, *of: Tensor) -> Tensor:
        z = x if not of else (x - of[0]) / of[1]
        y = Narrow._bell(z) * Narrow._tail(z.abs())
        return torch.where(z < 0, y, 1 - y)

    @staticmethod
    def erfc(x: Tensor) -> Tensor:
        t = math.sqrt(2) * x.abs()
        y = 2 * Narrow._bell(t) * Narrow._tail(t)
        return torch.where(x < 0, 2 - y, y)

    @staticmethod
    def erf(x: Tensor) -> Tensor:
        a, u, t = x.abs(), x * x, math.sqrt(2) * x.abs()
        near = a * polynomial(u, -2.428339608e-2, 1.124217287e-1, -3.761046231e-1, 1.128378987)
        return torch.copysign(torch.where(a < 0.5, near, 1 - 2 * Narrow._bell(t) * Narrow._tail(t)), x)
