"""Activations and their slopes to 60 digits and without overflow: formulas for mpmath, which PyTorch depends on.

``ACTIVATIONS`` has a pair for each: the function and its slope, of ``x`` and the parameters; ``SLOPES_OF_Y`` the slope as a
function of the output. Infinities are numbers here, far larger than any of float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from mpmath import MPContext
from mpmath.ctx_mp_python import _mpf as Number

mp = MPContext()
mp.prec = 200
FAR = mp.mpf(2) ** 5000  # stands for infinity
SELU_SCALE = mp.mpf("1.0507009873554804934193349852946")
SELU_ALPHA = mp.mpf("1.6732632423543772848170429916717")
GELU_TANH_K = 2 * mp.sqrt(2 / mp.pi)


def number(value: float) -> Number:
    """A float as an mpmath number."""
    return mp.sign(value) * FAR if math.isinf(value) else mp.mpf(value)


def clamp(x: Number, low: Number, high: Number) -> Number:
    return min(max(x, low), high)


def softplus(x: Number) -> Number:
    return max(x, 0) + mp.log1p(mp.exp(-abs(x)))


def sigmoid(x: Number) -> Number:
    return 1 / (1 + mp.exp(-x))


def sech2(x: Number) -> Number:
    e = mp.exp(-2 * abs(x))
    return 4 * e / (1 + e) ** 2


def cdf(x: Number) -> Number:
    return mp.erfc(-clamp(x, -1000, 1000) / mp.sqrt(2)) / 2


def pdf(x: Number) -> Number:
    return mp.exp(-min(abs(x), 1000) ** 2 / 2) / mp.sqrt(2 * mp.pi)


def swish_slope(u: Number) -> Number:
    """The slope of x sigmoid(x)."""
    return sigmoid(u) * (1 + u * sigmoid(-u))


def mish_ratio(x: Number) -> Number:
    n = mp.exp(x) * (mp.exp(x) + 2)
    return n / (n + 2)


def mish_slope(x: Number) -> Number:
    e = mp.exp(x)
    return mish_ratio(x) + x * sigmoid(x) * (4 * (e + 1) ** 2 / (e * (e + 2) + 2) ** 2)


def x_minus_tanh(x: Number) -> Number:
    return x - mp.tanh(x) if abs(x) > 1e-15 else x**3 / 3 - 2 * x**5 / 15


def gelu_tanh_exponent(x: Number) -> Number:
    return GELU_TANH_K * (x + mp.mpf("0.044715") * x**3)


def gelu_tanh_slope(x: Number) -> Number:
    u = gelu_tanh_exponent(x)
    return sigmoid(u) * (1 + x * sigmoid(-u) * GELU_TANH_K * (1 + 3 * mp.mpf("0.044715") * x * x))


def squareplus(x: Number, b: Number) -> Number:
    root = mp.sqrt(x * x + b)
    return (x + root) / 2 if x >= 0 else b / 2 / (root - x)


def squareplus_slope(x: Number, b: Number) -> Number:
    y = squareplus(x, b)
    return y / mp.sqrt(x * x + b)


def xielu(x: Number, alpha_p: Number, alpha_n: Number, beta: Number, eps: Number) -> Number:
    if x > 0:
        return softplus(alpha_p) * x * x + beta * x
    return (softplus(alpha_n) + beta) * mp.expm1(min(x, eps)) - softplus(alpha_n) * x


def xielu_slope(x: Number, alpha_p: Number, alpha_n: Number, beta: Number, eps: Number) -> Number:
    if x > 0:
        return 2 * softplus(alpha_p) * x + beta
    return (softplus(alpha_n) + beta) * mp.expm1(x) + beta if x <= eps else -softplus(alpha_n)


ACTIVATIONS: dict[str, tuple[Callable, Callable]] = {
    "relu": (lambda x: max(x, 0), lambda x: x > 0),
    "leaky_relu": (lambda x, a: x if x > 0 else a * x, lambda x, a: 1 if x > 0 else a),
    "relu6": (lambda x: clamp(x, 0, 6), lambda x: 0 < x < 6),
    "hardtanh": (clamp, lambda x, low, high: low < x < high),
    "hardsigmoid": (lambda x: clamp(x + 3, 0, 6) / 6, lambda x: mp.mpf(-3 < x < 3) / 6),
    "threshold": (lambda x, t, v: x if x > t else v, lambda x, t, v: x > t),
    "hardshrink": (lambda x, a: x if abs(x) > a else 0, lambda x, a: abs(x) > a),
    "softshrink": (lambda x, a: x - clamp(x, -a, a), lambda x, a: abs(x) > a),
    "sparse_sigmoid": (lambda x: clamp((x + 1) / 2, 0, 1), lambda x: mp.mpf(-1 < x < 1) / 2),
    "sigmoid": (sigmoid, lambda x: sigmoid(x) * sigmoid(-x)),
    "tanh": (mp.tanh, sech2),
    "softsign": (lambda x: x / (1 + abs(x)), lambda x: 1 / (1 + abs(x)) ** 2),
    "elu": (lambda x, a: x if x > 0 else a * mp.expm1(x), lambda x, a: 1 if x > 0 else a * mp.exp(x)),
    "celu": (lambda x, a: x if x > 0 else a * mp.expm1(x / a), lambda x, a: 1 if x > 0 else mp.exp(x / a)),
    "selu": (
        lambda x: SELU_SCALE * (x if x > 0 else SELU_ALPHA * mp.expm1(x)),
        lambda x: SELU_SCALE * (1 if x > 0 else SELU_ALPHA * mp.exp(x)),
    ),
    "softplus": (
        lambda x, b, t: x if b * x > t else softplus(b * x) / b,
        lambda x, b, t: 1 if b * x > t else sigmoid(b * x),
    ),
    "logsigmoid": (lambda x: -softplus(-x), lambda x: sigmoid(-x)),
    "relu2": (lambda x: max(x, 0) ** 2, lambda x: 2 * max(x, 0)),
    "squareplus": (squareplus, squareplus_slope),
    "softcap": (lambda x, c: c * mp.tanh(x / c), lambda x, c: sech2(x / c)),
    "sqrtsoftplus": (lambda x: mp.sqrt(softplus(x)), lambda x: sigmoid(x) / (2 * mp.sqrt(softplus(x)))),
    "gelu": (lambda x: x * cdf(x), lambda x: cdf(x) + x * pdf(x)),
    "gelu_tanh": (lambda x: x * sigmoid(gelu_tanh_exponent(x)), gelu_tanh_slope),
    "silu": (lambda x: x * sigmoid(x), swish_slope),
    "mish": (lambda x: x * mish_ratio(x), mish_slope),
    "hardswish": (
        lambda x: x * clamp(x + 3, 0, 6) / 6,
        lambda x: 0 if x <= -3 else x / 3 + mp.mpf(1) / 2 if x < 3 else 1,
    ),
    "tanhshrink": (x_minus_tanh, lambda x: mp.tanh(x) ** 2),
    "quick_gelu": (lambda x: x * sigmoid(mp.mpf("1.702") * x), lambda x: swish_slope(mp.mpf("1.702") * x)),
    "gelu_10": (lambda x: min(x * cdf(x), 10), lambda x: cdf(x) + x * pdf(x) if x <= 10 else 0),
    "laplace": (lambda x, mu, s: cdf((x - mu) / s), lambda x, mu, s: pdf((x - mu) / s) / s),
    "snake": (lambda x, a: x + mp.sin(a * x) ** 2 / a, lambda x, a: 1 + mp.sin(2 * a * x)),
    "sparse_plus": (
        lambda x: 0 if x <= -1 else (x + 1) ** 2 / 4 if x < 1 else x,
        lambda x: clamp((x + 1) / 2, 0, 1),
    ),
    "xielu": (xielu, xielu_slope),
}

SLOPES_OF_Y: dict[str, Callable] = {
    "sigmoid": lambda y: y * (1 - y),
    "tanh": lambda y: (1 - y) * (1 + y),
    "softsign": lambda y: (1 - abs(y)) ** 2,
    "elu": lambda y, a: 1 if y > 0 else max(y + a, 0),
    "celu": lambda y, a: 1 if y > 0 else max(y / a + 1, 0),
    "selu": lambda y: SELU_SCALE if y > 0 else y + SELU_SCALE * SELU_ALPHA,
    "softplus": lambda y, b, t: 1 if b * y > t else -mp.expm1(-b * y),
    "logsigmoid": lambda y: -mp.expm1(y),
    "relu2": lambda y: 2 * mp.sqrt(y),
    "squareplus": lambda y, b: y * y / (y * y + b / 4),
    "softcap": lambda y, c: max((1 - y / c) * (1 + y / c), 0),
    "sqrtsoftplus": lambda y: -mp.expm1(-y * y) / (2 * y) if y > 1e-30 else y / 2,
}
