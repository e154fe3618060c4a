"""Every activation at the ends of a dtype's range, and with extreme parameters, against 60 digits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from common import OF_EACH_KIND, PLAIN, SLOW
from exact import ACTIVATIONS, FAR, SLOPES_OF_Y, Number, mp, number, softplus
from torch import Tensor

import jitact
from jitact.configs import configure
from jitact.measuring.limits import EXTREMES as LIMITS

INF, NAN = math.inf, math.nan
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Parameters far from the defaults: from the smallest to the largest normal numbers of float32, and of float64.
ANY = (2e-38, 1e-30, 1e-8, 1e8, 1e30, 3e38, 3e-308, 1e-300, 1e300, 1.7e308)
EXTREMES = {
    "elu": [(a,) for a in ANY],
    "celu": [(a,) for a in ANY],
    "squareplus": [(b,) for b in ANY],
    "softcap": [(c,) for c in ANY],
    "snake": [(a,) for a in (*ANY[:5], 1e38, *ANY[6:9], -1e-3, -2.0, -1e30)],
    "softplus": [*((b, 20.0) for b in ANY), (1.0, 0.0), (1.0, 2.0), (3.0, -5.0), (1e-8, 2.0), (1e8, 1e-30), (1.0, INF),
                 (1e30, INF), (1e-30, 1e30), (1.0, -INF), (2.0, NAN)],
    "laplace": [*((0.0, s) for s in ANY), *((1.0, s) for s in (1e-300, 1e-30, 1e-9, 1e-8, 1e-6, 1e-4, 1e30)), (-1e-30, 2e-38),
                (1e30, 1e22), (-3e38, 1e30), (1e300, 1e280), (1e-8, 1e8), (-0.0, 1.0)],
    "xielu": [(0.3, 0.3, 0.5, -1e-6), (100.0, -100.0, 0.5, -1e-6), (-80.0, 1e30, 1e-30, -1e-30), (-INF, -INF, 2.0, -INF),
              (3.0, -80.0, -1e8, 0.0)],
}  # fmt: skip
CASES = [(each.name, tuple(default for _, default in each.params)) for each in PLAIN]
CASES += [(name, params) for name, sets in EXTREMES.items() for params in sets]

# Errors that are allowed in addition to limits.py: functions flush results below the smallest normal number of the type that is
# computed in; that error is scaled by a parameter.
CANCELS = {"xielu": lambda p, n, beta, eps: softplus(n) + abs(beta)}  # the terms of a gradient that passes through 0
SCALED_BY = {
    "elu": lambda a: a,
    "celu": lambda a: max(a, 1),
    "softcap": lambda c: max(c, 1),
    "softplus": lambda b, t: 1 / b,
    "laplace": lambda mu, s: 1 / s,
}


def bits(dtype: torch.dtype, count: int) -> Tensor:
    """Random bit patterns."""
    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    generator = torch.Generator().manual_seed(dtype.itemsize)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator).to(whole).view(dtype)


def inputs(dtype: torch.dtype, params: tuple[float, ...]) -> Tensor:
    """Zeros, subnormals, the ends of the range, infinities, NaN, random bits, and the neighbourhood of the parameters."""
    info = torch.finfo(dtype)
    least, top = info.tiny * info.eps, info.max
    ends = [0, least, 2 * least, info.tiny - least, info.tiny, 3 * info.tiny, math.sqrt(info.tiny), info.eps, INF]
    ends += [top, top * (1 - info.eps), top / 2, top / 4, math.sqrt(top), 0.6 * math.sqrt(top)]
    plain = [1e-3, 0.1, 0.5, 1, 2, 3, 5, 10, 17, 20, 37, 88, 100, 709, 746, 1000, 1e4]
    sizes = [abs(p) for p in params if 0 < abs(p) < INF]
    sizes += [a / b for a, b in itertools.permutations([1.0, *sizes], 2)]
    beside = (1e-3, 0.1, 1 - info.eps / 2, 1, 1 + info.eps, 2, 5, 10, 30, 100, 1e4)
    near = [size * factor for size in sizes for factor in beside]
    x = torch.tensor([*ends, *plain, *(v for v in near if v < top)], dtype=torch.float64)
    return torch.cat([x.to(dtype), -x.to(dtype), bits(dtype, 40), torch.tensor([NAN], dtype=dtype)])


def error(actual: float, exact: Number, dtype: torch.dtype, slack: Number) -> float:
    """The error in ulp beyond ``slack``; infinite if the result is NaN, or infinite by mistake."""
    info = torch.finfo(dtype)
    if math.isnan(actual):
        return INF
    if math.isinf(actual):  # the exact result overflows, or nearly does
        return 0.0 if exact * int(math.copysign(1, actual)) > info.max * (1 - 4 * info.eps) - slack else INF
    off = abs(actual - exact) - slack
    flushed = abs(exact) < info.tiny and abs(actual) <= info.tiny and dtype is not torch.float16
    unit = max(mp.mpf(2) ** (mp.frexp(exact)[1] - 1), info.tiny) * info.eps
    return 0.0 if off <= 0 or flushed else float(min(off / unit, mp.mpf(1e300)))


def kept_in(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of parameters: that of registers, or, as weights are tensors, x's."""
    return dtype if name == "xielu" or dtype is torch.float64 else torch.float32


class Case:
    """An activation with parameters in a dtype, and the errors that are allowed."""

    def __init__(self, name: str, params: tuple[float, ...], dtype: torch.dtype) -> None:
        rounded = torch.tensor(params, dtype=kept_in(name, dtype)).tolist()
        self.name, self.dtype, self.params = name, dtype, [number(p) if p == p else mp.nan for p in rounded]
        self.limit, registers = LIMITS[dtype], torch.float64 if dtype is torch.float64 else torch.float32
        self.cancels = self.limit.gradient * CANCELS[name](*self.params) if name in CANCELS else 0.0
        self.flushed = torch.finfo(registers).tiny * SCALED_BY.get(name, lambda *_: 1)(*self.params)

    def slack(self, function, x: Number) -> Number:
        """The effect of a relative change of x or a parameter, and of flushing."""
        exact, step, arguments = function(x, *self.params), self.limit.relative, [x, *self.params]
        changed = [
            function(*arguments[:i], value * (1 + sign * step), *arguments[i + 1 :])
            for i, value in enumerate(arguments)
            for sign in (-1, 1)
            if 0 < abs(value) < FAR
        ]
        return max([abs(each - exact) for each in changed], default=0) + self.flushed

    def check(self, what: str, function, x: float, actual: float, dy: float = 1.0, absolute: float = 0.0) -> None:
        exact = mp.mpf(function(number(x), *self.params))
        if abs(exact) > torch.finfo(self.dtype).max and dy != 1:
            return  # the slope is not representable
        exact *= dy
        if error(actual, exact, self.dtype, 0) <= self.limit.ulp:
            return
        off = error(actual, exact, self.dtype, abs(dy) * (self.slack(function, number(x)) + absolute))
        where = f"{self.name}, {what} at {x!r}, {self.dtype}, parameters {[float(p) for p in self.params]}"
        assert off <= self.limit.ulp, f"{where}: {actual!r} for {mp.nstr(exact, 17)}, {off:.3g} ulp, dy = {dy!r}"


def run(name: str, params: tuple[float, ...], save: str, x: Tensor, dy: Tensor) -> tuple[list[float], list[float]]:
    """Forward and gradient, as Python floats."""
    if name == "xielu":
        weights = [torch.tensor(p, dtype=x.dtype, device=x.device) for p in params]
        function = lambda x: jitact.xielu(x, *weights)  # noqa: E731
    else:
        function = jitact.get(name)(*params, save=save)
    x = x.detach().requires_grad_()
    y = function(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    return y.double().tolist(), dx.double().tolist()


def fits(name: str, params: tuple[float, ...], dtype: torch.dtype) -> bool:
    """Whether the parameters are normal numbers in their dtype, or 0, infinite or NaN."""
    info = torch.finfo(kept_in(name, dtype))
    top, tiny = info.max, info.tiny
    return all(p in (0, INF, -INF) or p != p or tiny < abs(p) < top for p in params)


@pytest.mark.parametrize(("name", "dtype"), [
    (pytest.param if name in OF_EACH_KIND or dtype in (torch.float32, torch.bfloat16) else SLOW)(name, dtype)
    for name in dict(CASES) for dtype in DTYPES
], ids=str)  # fmt: skip
def test_against_sixty_digits(name: str, dtype: torch.dtype, device: str) -> None:
    record = jitact.get(name).activation
    function, slope = ACTIVATIONS[name]
    for params in [params for each, params in CASES if each == name and fits(name, params, dtype)]:
        case, x = Case(name, params, dtype), inputs(dtype, params)
        large = math.sqrt(torch.finfo(dtype).max) / 4
        dy = torch.tensor([1.0, -0.7, large, -3.0, 1 / large], dtype=dtype).repeat(x.numel())[: x.numel()]
        for save in [s for s in record.saves if all(r.holds(*params) for r in record.requires if r.save in (None, s))]:
            y, dx = run(name, params, save, x.to(device), dy.to(device))
            for at, value, g, gradient in zip(x.tolist(), y, dy.tolist(), dx, strict=True):
                if math.isnan(at):
                    assert math.isnan(value), (name, params)
                    continue
                if ambiguous(name, params, at, dtype):
                    continue
                case.check("forward", function, at, value, absolute=case.cancels)
                if save == "output":
                    if not math.isinf(value):  # no slope if the output overflowed
                        case.check("gradient from the output", SLOPES_OF_Y[name], value, gradient, g, case.limit.gradient)
                elif name == "snake" and abs(at * params[0]) > (2**15 if dtype is not torch.float64 else 1e3):
                    # The phase is that of the rounded product, so any value is possible.
                    assert math.isinf(at) or abs(gradient / g - 1) <= 1 + 2 * torch.finfo(dtype).eps, (params, at, gradient, g)
                else:
                    case.check("gradient", slope, at, gradient, g, max(case.limit.gradient, case.cancels))


def ambiguous(name: str, params: tuple[float, ...], x: float, dtype: torch.dtype) -> bool:
    """Cases in which rounding, or infinity minus infinity, decides the result: see the tests below."""
    if name == "softplus":  # the side of the threshold of a product that rounds to 0, or to infinity
        product = float(torch.tensor(x, dtype=torch.float64 if dtype is torch.float64 else torch.float32) * params[0])
        return product == 0 != x or (math.isinf(product) and math.isinf(params[1]))
    return name == "xielu" and math.isinf(x) and math.isinf(max(map(abs, params)))


PIECEWISE = {
    "relu": [()],
    "relu6": [()],
    "leaky_relu": [(a,) for a in (0.0, -0.0, 1.0, -2.0, 1e-45, 3e38, INF, -INF, NAN)],
    "hardtanh": [(-INF, INF), (0.0, INF), (-INF, -0.0), (-1e-45, 1e-45), (-3e38, 3e38), (1.0, 1.0000001), (-0.0, 1.0),
                 (-1.0, -0.0)],
    "threshold": list(itertools.product((0.0, -0.0, 3e38, 1e-45, INF, -INF, NAN), (0.0, -0.0, INF, -3e38, NAN))),
    "hardshrink": [(a,) for a in (0.0, -0.0, -1.0, 2.0**-149, 2.0**127, INF, NAN)],  # PyTorch rounds lambd to x's dtype
    "softshrink": [(a,) for a in (0.0, -0.0, 2.0**-24, 2.0**15, 2.0**127)],
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*PIECEWISE, "prelu"])
def test_piecewise_linear_bit_by_bit(name: str, dtype: torch.dtype, device: str) -> None:
    """As PyTorch on a CPU, including signs of zeros, also of parameters, whatever was called before."""
    if name == "prelu":
        cases = [((a,), lambda x, a: jitact.prelu(x, x.new_tensor([a])), lambda x, a: F.prelu(x, x.new_tensor([a])))
                 for (a,) in PIECEWISE["leaky_relu"]]  # fmt: skip
    else:
        record = jitact.get(name).activation
        sets = itertools.product(PIECEWISE[name], record.saves)
        cases = [(params, operator(record, save), record.reference) for params, save in sets]
    for params, ours, theirs in cases:
        x = inputs(dtype, params).to(device)
        try:
            expected = theirs(x.cpu(), *params).to(device)
        except RuntimeError:  # a parameter beyond float16's range, which PyTorch rejects for some activations
            assert dtype is torch.float16
            continue
        y = ours(x, *params)
        assert torch.equal(y.isnan(), expected.isnan()), (params, x[y.isnan() != expected.isnan()])
        same = ((y == expected) & (y.signbit() == expected.signbit())) | y.isnan()
        if name == "softshrink":  # PyTorch's zeros have different signs in 16 and in 32 bits
            same |= y == expected
        assert same.all(), (params, x[~same], y[~same], expected[~same])


def operator(record, save: str):
    """Calls the operator itself, without the cache of calls; returns the result without a mask."""
    config = configure(record, False, save, False)
    forward = lambda x, *params: config.forward_op(x, *params)  # noqa: E731
    return (lambda x, *params: forward(x, *params)[0]) if save == "bit" else forward


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softplus_takes_the_branch_that_pytorch_takes(dtype: torch.dtype, device: str) -> None:
    """Above the threshold the result is exactly x and the slope exactly 1, with each ``save``."""
    thresholds = (0.0, -0.0, 2.0, -5.0, 1e-30, 20.0, 50.0, INF, -INF, NAN)
    for beta, threshold in itertools.product((1.0, 3.0, 0.1, 1e-30, 1e30), thresholds):
        x = inputs(dtype, (beta, threshold)).to(device)
        x = x[~x.isnan()].requires_grad_()
        over = x.to(torch.float64 if dtype is torch.float64 else torch.float32) * beta > threshold
        for save in ("input", "output") if threshold >= 20 else ("input",):
            y = jitact.softplus(x, beta, threshold, save=save)
            (dx,) = torch.autograd.grad(y, x, torch.full_like(x, 0.7))
            assert torch.equal(y[over], x[over]), (beta, threshold, save)
            assert (dx[over] == x.new_tensor(0.7)).all(), (beta, threshold, save)
            theirs = F.softplus(x, beta, threshold)
            finite = theirs.isfinite() & (beta >= 0.1)
            torch.testing.assert_close(y[finite], theirs[finite], rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("threshold", [19.9, 2.0, 0.0, -1.0, -INF, NAN])
def test_softplus_refuses_the_output_where_it_does_not_tell_the_slope(threshold: float) -> None:
    """Around a small threshold, two inputs with different slopes have the same output."""
    with pytest.raises(ValueError, match=r"softplus: needs threshold >= 20 with save='output', got beta=1.0, threshold="):
        jitact.get("softplus")(threshold=threshold, save="output")


def test_softshrink_refuses_an_infinite_lambda() -> None:
    with pytest.raises(ValueError, match="softshrink: needs 0 <= lambd < inf, got lambd=inf"):
        jitact.get("softshrink")(INF)


def test_rrelu_with_extreme_bounds(device: str) -> None:
    x = torch.tensor([-INF, -3.0, -1e-40, -0.0, 0.0, 2.0, INF], device=device)
    for slope in (0.5, -2.0, 1e30, 1e-38):
        torch.testing.assert_close(jitact.rrelu(x, slope, slope, training=True), F.leaky_relu(x, slope), rtol=1e-6, atol=1e-45)
    for dtype, most in ((torch.float32, 3e38), (torch.bfloat16, 3e38), (torch.float64, 1.7e308)):
        with pytest.raises(ValueError, match=r"rrelu: upper - lower must be finite for .*, got lower=-"):
            jitact.rrelu(x.to(dtype), -most, most, training=True)
    mean = jitact.rrelu(torch.tensor([-1.0], dtype=torch.float64, device=device), 1e308, 1.2e308)
    torch.testing.assert_close(mean.cpu(), torch.tensor([-1.1e308], dtype=torch.float64))  # the sum overflows


SUBNORMAL = {
    "celu": lambda small: (small,),
    "elu": lambda small: (small,),
    "laplace": lambda small: (1.0, small),
    "snake": lambda small: (-small,),
    "softcap": lambda small: (small,),
    "softplus": lambda small: (small, 20.0),
    "squareplus": lambda small: (small,),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SUBNORMAL)
def test_subnormal_parameters_give_numbers(name: str, dtype: torch.dtype, device: str) -> None:
    """If 1 / parameter overflows, results are inaccurate, but finite."""
    params = SUBNORMAL[name](1e-310 if dtype is torch.float64 else 1e-40)
    x = torch.tensor([0.0, -0.0, 1e-3, -1e-3, 1.0, -1.0, 100.0, -1e4], dtype=dtype, device=device)
    for save in [save for save in ("input", "output") if save in jitact.get(name).activation.saves]:
        y, dx = run(name, params, save, x, torch.ones_like(x))
        assert not any(map(math.isnan, [*y, *dx])), (save, y, dx)


SATURATING = {"elu": (0.3,), "celu": (0.999,), "softcap": (30.1,), "sigmoid": (), "tanh": (), "softsign": (), "selu": (),
              "softplus": (1.0, 20.0), "logsigmoid": (), "squareplus": (4.0,), "sqrtsoftplus": (), "relu2": ()}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SATURATING)
def test_no_slope_from_the_output_is_negative(name: str, dtype: torch.dtype, device: str) -> None:
    """Where the output saturates, it may have been rounded to beyond the function's range."""
    x = inputs(dtype, SATURATING[name]).to(device)
    _, dx = run(name, SATURATING[name], "output", x, torch.ones_like(x))
    assert not any(slope < 0 for slope in dx)
