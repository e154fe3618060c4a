"""Every activation against float64: all 16-bit values, dense and special float32 and float64 values, other parameters."""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from common import CASE_IDS, CASES, PLAIN, PLAIN_IDS, SLOW, TAILED, assert_accurate, evaluate, oracle, slow_but
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import jitact
from jitact.accuracy import every_16bit_value
from jitact.kernels import KernelSource
from jitact.kernels.loader.plan import CPU_LEVELS, cpu_level, make_plan
from jitact.kernels.loader.source import DEVICE
from jitact.records import Activation

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("activation", "save"), CASES, ids=CASE_IDS)
def test_every_16_bit_value(activation: Activation, save: str, dtype: torch.dtype, device: str) -> None:
    assert_accurate(activation, save, every_16bit_value(dtype).to(device))


def dense_values(dtype: torch.dtype) -> torch.Tensor:
    """All magnitudes, the neighbourhood of every kink, and plain random numbers."""
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.logspace(-37, 37, 20_001, dtype=torch.float64)
    kinks = torch.tensor([0.0, 0.1, 0.5, 1.0, 3.0, 6.0, 10.0, 20.0], dtype=torch.float64)
    near = (kinks[:, None] + torch.linspace(-1e-3, 1e-3, 201, dtype=torch.float64)).flatten()
    normal = torch.randn(50_000, generator=generator, dtype=torch.float64) * 4
    positive = torch.cat([magnitudes, kinks, near.abs(), normal.abs()])
    return torch.cat([positive, -positive]).to(dtype)


def normal_pdf(x: np.ndarray) -> np.ndarray:
    return np.exp(-x * x / 2) / np.sqrt(8 * np.arctan(np.ones_like(x)))


def normal_cdf(x: np.ndarray) -> np.ndarray:
    """By the Taylor series around 0, and from |x| = 3 by the continued fraction of Mills' ratio."""
    t = abs(x)
    ratio, term, near = t, t, t
    for k in range(200, 0, -1):
        ratio = t + k / np.maximum(ratio, 1)
    for k in range(1, 60):
        term = term * np.minimum(t, 3) ** 2 / (2 * k + 1)
        near = near + term
    tail = np.where(t < 3, 0.5 - normal_pdf(t) * near, normal_pdf(t) / np.maximum(ratio, 1))
    return np.where(x < 0, tail, 1 - tail)


@pytest.mark.skipif(np.finfo(np.longdouble).nmant <= 52, reason="needs a wider type than float64")
def test_own_functions_of_float64(device: str) -> None:
    """The functions of math_double.cuh, against 80-bit arithmetic."""
    wide = {"exp": (np.exp, 1.0), "expm1": (np.expm1, 2.5), "tanh": (np.tanh, 3.5)}
    wide |= {"normal_pdf": (normal_pdf, 3.0), "normal_cdf": (normal_cdf, 8.0)}
    wide["softplus"] = (lambda x: np.log1p(np.exp(-abs(x))) + np.maximum(x, 0), 4.0)
    x = torch.cat([torch.linspace(-40, 40, 20_001), torch.logspace(-20, 1, 2001), -torch.logspace(-20, 1, 2001)]).double()
    *first, last = wide
    text = "".join(f"which == {i} ? {name}(x) : " for i, name in enumerate(first)) + f"{last}(x)"
    cls = jitact.define("own_functions", text, which=0.0)
    for i, (name, (function, ulp)) in enumerate(wide.items()):
        ours = cls(i)(x.to(device)).cpu()
        exact = function(x.numpy().astype(np.longdouble))
        error = abs(ours.numpy().astype(np.longdouble) - exact) / np.spacing(abs(exact).astype(np.float64))
        assert error.max() <= ulp, (name, float(error.max()), x[int(error.argmax())].item())


# The functions of C that glibc has vectors of: what they are in numpy, which has no erf.
PLATFORMS = {
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "cbrt": np.cbrt,
    "cos": np.cos,
    "cosh": np.cosh,
    "erf": np.frompyfunc(math.erf, 1, 1),
    "erfc": np.frompyfunc(math.erfc, 1, 1),
    "exp2": np.exp2,
    "hypot": np.hypot,
    "log": np.log,
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "pow": np.power,
    "sin": np.sin,
    "sinh": np.sinh,
    "tan": np.tan,
}
OWN_IN_FLOAT32 = {"cos", "erf", "erfc", "log", "log1p", "sin"}
COUNT = 1 << 16
LOOP = f"""
extern "C" __attribute__((visibility("default")))
void name_type(const type* x, [[maybe_unused]] const type* b, type* y) {{
  for (int i = 0; i < {COUNT}; i++) y[i] = name(arguments).v;
}}
"""


def values_of_every_kind(dtype: type) -> np.ndarray:
    """Two rows: all pairs of special values, and random ones of many magnitudes."""
    limits, random = np.finfo(dtype), np.random.default_rng(0)
    positive = [0, limits.smallest_subnormal, limits.tiny / 3, limits.tiny, 1e-5, 0.5, 1, 1.5, 2, 3, 1e5, limits.max, INF, NAN]
    special = np.stack(np.meshgrid(*[[*positive, *(-each for each in positive)]] * 2)).reshape(2, -1)
    scale = random.choice([1, 1, 8, 1e-3, 1e3, 1e8, 1e30], (2, COUNT - special.shape[1]))
    return np.concatenate([special, random.standard_normal(scale.shape) * scale], 1).astype(dtype)


@pytest.mark.skipif(np.finfo(np.longdouble).nmant <= 52, reason="needs a wider type than float64")
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("level", [*CPU_LEVELS][: [*CPU_LEVELS].index(cpu_level()) + 1])
def test_functions_of_the_platform(level: str, tmp_path: Path) -> None:
    """Within 4 ulp; infinities, NaN and signs of zeros as C has them; and whatever the other elements of a vector are."""
    plan = make_plan(KernelSource("loops", "ELEMENTWISE T forward(T x) { return x; }\n", "<loops>"))._replace(cpu=level)
    loops = {(name, type) for name in PLATFORMS for type in ("float", "double")} - {(name, "float") for name in OWN_IN_FLOAT32}
    two = {name for name, function in PLATFORMS.items() if function.nin == 2}
    text = '#include "elementwise.cuh"\nusing namespace jitact;\n'
    for name, type in loops:
        T = {"float": "Single", "double": "Double"}[type]
        arguments = f"{T}(x[i]), {T}(b[i])" if name in two else f"{T}(x[i])"
        text += LOOP.replace("arguments", arguments).replace("name", name).replace("type", type)
    (tmp_path / "loops.cpp").write_text(text)
    flags = [*plan.cflags(), "-w", "-shared", "-fPIC", f"-I{DEVICE}"]
    subprocess.run([plan.cxx.path, *flags, "loops.cpp", "-o", "loops.so"], cwd=tmp_path, check=True)
    called = re.findall(rb"_ZGV\w+?_(\w+)\0", (tmp_path / "loops.so").read_bytes())
    if plan.cxx.libmvec:
        assert {name.decode() for name in called} >= {name + "f" * (type == "float") for name, type in loops}

    library = ctypes.CDLL(str(tmp_path / "loops.so"))

    def ours(name: str, type: str, *given: np.ndarray) -> np.ndarray:
        y = np.empty_like(given[0])
        library[f"{name}_{type}"](*(ctypes.c_void_p(each.ctypes.data) for each in (*given, y)))
        return y

    values = {"float": values_of_every_kind(np.float32), "double": values_of_every_kind(np.float64)}
    places = np.random.default_rng(1).permutation(COUNT)
    for name, type in loops:
        x, b = values[type]
        with np.errstate(all="ignore"):
            exact = PLATFORMS[name](*(each.astype(np.longdouble) for each in ((x, b) if name in two else (x,))))
            exact = exact.astype(np.longdouble)
            expected, y = exact.astype(x.dtype), ours(name, type, x, b)
            error = np.where(np.isfinite(expected), abs(y - exact) / np.spacing(abs(expected)), 0)
        worst = int(np.nan_to_num(error, nan=INF).argmax())
        assert error[worst] <= 4, (name, type, x[worst], b[worst], y[worst], expected[worst])
        special = ~np.isfinite(expected) | (expected == 0)
        assert np.array_equal(y[special], expected[special], equal_nan=True), (name, type)
        assert np.array_equal(np.signbit(y[expected == 0]), np.signbit(expected[expected == 0])), (name, type)
        assert np.array_equal(ours(name, type, x[places], b[places]), y[places], equal_nan=True), (name, type)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("activation", "save"), CASES, ids=CASE_IDS)
def test_dense_values(activation: Activation, save: str, dtype: torch.dtype, device: str) -> None:
    x = dense_values(dtype)
    if dtype is torch.float64:
        # Beyond that, the reference formulas in float64 are no more accurate than the kernels.
        x = x[(x.abs() < (12 if activation.name in TAILED else 300)) & (x.abs() > 1e-30)]
    assert_accurate(activation, save, x.to(device))


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False, allow_subnormal=False).map(lambda v: float(torch.tensor(v)))


PARAMETERS = {
    "leaky_relu": {"negative_slope": numbers(-2, 2)},
    "hardtanh": {"min_val": numbers(-4, -0.01), "max_val": numbers(0.01, 4)},
    "threshold": {"threshold": numbers(-3, 3), "value": numbers(-10, 10)},
    "hardshrink": {"lambd": numbers(0, 3)},
    "softshrink": {"lambd": numbers(0, 3)},
    "elu": {"alpha": numbers(0.01, 10)},
    "celu": {"alpha": numbers(0.01, 10)},
    "softplus": {"beta": numbers(0.05, 10), "threshold": numbers(1, 60)},
    "squareplus": {"b": numbers(0.01, 100)},
    "softcap": {"c": numbers(0.1, 100)},
    "laplace": {"mu": numbers(-2, 2), "sigma": numbers(0.05, 3)},
    "snake": {"alpha": numbers(0.05, 5)},
}


@pytest.mark.parametrize("name", [a.name for a in PLAIN if a.params])
def test_other_parameters(name: str) -> None:
    activation = jitact.get(name).activation

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(params=st.fixed_dictionaries(PARAMETERS[name]), seed=st.integers(0, 2**16))
    def check(params: dict[str, float], seed: int) -> None:
        x = torch.randn(2000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            assert_accurate(activation, "input", x.to(dtype), **params)

    check()


# PyTorch's gradients at the kinks: name, {x: gradient}.
KINKS = {
    "relu": {0: 0}, "leaky_relu": {0: 0.01}, "relu6": {0: 0, 6: 0}, "hardtanh": {-1: 0, 1: 0}, "hardsigmoid": {-3: 0, 3: 0},
    "threshold": {0.1: 0}, "hardshrink": {-0.5: 0, 0.5: 0}, "softshrink": {-0.5: 0, 0.5: 0}, "elu": {0: 1}, "celu": {0: 1},
    "selu": {0: 1.7580993408473766}, "hardswish": {-3: 0, 3: 1}, "softsign": {0: 1}, "sparse_sigmoid": {-1: 0, 1: 0},
}  # fmt: skip


@pytest.mark.parametrize("name", KINKS)
def test_gradient_at_kinks(name: str, device: str) -> None:
    for save in jitact.get(name).activation.saves:
        x = torch.tensor(list(KINKS[name]), dtype=torch.float64, device=device)
        expected = torch.tensor(list(KINKS[name].values()), dtype=torch.float64)
        torch.testing.assert_close(evaluate(jitact.get(name)(save=save), x)[1], expected)


# Activations of one tensor that are smooth at 0, though their kernels treat x < 0 and x >= 0 separately.
SMOOTH = [
    "gelu", "gelu_tanh", "gelu_10", "silu", "quick_gelu", "mish", "sigmoid", "tanh", "softplus", "logsigmoid", "squareplus",
    "sqrtsoftplus", "softcap", "tanhshrink", "laplace", "snake",
]  # fmt: skip


def second_derivatives(function: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, ...]:
    """The gradients of a differently weighted sum of the gradients."""
    leaves = [t.clone().requires_grad_() for t in given]
    slopes = torch.autograd.grad(function(*leaves).sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum([(k + 1.3) * slope.sum() for k, slope in enumerate(slopes)]), leaves)


@pytest.mark.parametrize("name", slow_but(SMOOTH, ["gelu_tanh"]))
def test_second_derivatives_of_what_a_definition_calls(name: str, device: str) -> None:
    """They are differentiated from the kernel file's gradient at compile time, also at 0."""
    activation = jitact.get(name).activation
    cls = jitact.define("calls", f"{name}(x) * (x + 1)")
    x, params = torch.linspace(-4, 4, 33, dtype=torch.float64, device=device), [value for _, value in activation.params]
    expected = second_derivatives(lambda t: (activation.exact or activation.reference)(t, *params) * (t + 1), x)
    for dtype in (torch.float64, torch.float32):
        found = second_derivatives(cls(), x.to(dtype))
        tolerance = 1e-8 if dtype is torch.float64 else 1e-5
        torch.testing.assert_close(found[0].double(), expected[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "act"), [
    SLOW("geglu", torch.nn.functional.gelu),
    SLOW("geglu_tanh", partial(torch.nn.functional.gelu, approximate="tanh")),
    SLOW("swiglu", torch.nn.functional.silu),
])  # fmt: skip
def test_second_derivatives_of_gates_that_a_kernel_file_calls(name: str, act: Callable[..., Tensor], device: str) -> None:
    product = f"T y = {name}_::forward(gate, up); for (int i = 0; i < 1; i++) y = y * up;"  # a loop cannot be translated
    cls = jitact.define("calls", source=f"ELEMENTWISE T forward(T gate, T up) {{ {product} return y; }}")
    assert not cls.activation.has_reference
    gate = torch.linspace(-4, 4, 33, dtype=torch.float64, device=device)
    given = gate, torch.linspace(2, -1, 33, dtype=torch.float64, device=device)
    found = second_derivatives(jitact.calls, *given)
    for own, exact in zip(found, second_derivatives(lambda gate, up: act(gate) * up * up, *given), strict=True):
        torch.testing.assert_close(own, exact, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", PLAIN, ids=PLAIN_IDS)
def test_nan_and_infinities(activation: Activation, dtype: torch.dtype, device: str) -> None:
    y, _ = evaluate(jitact.get(activation.name)(), torch.full((33,), NAN, dtype=dtype, device=device))
    assert y.isnan().all(), "NaN must pass through"

    if activation.name == "snake":
        return  # no limit at infinity
    y, dx = evaluate(jitact.get(activation.name)(save="input"), torch.tensor([-INF, INF], dtype=dtype, device=device))
    far, _ = oracle(activation, torch.tensor([-1e30, 1e30], dtype=torch.float64), tuple(d for _, d in activation.params))
    limit = torch.where(far.abs() > 1e6, far.sign() * INF, far)
    torch.testing.assert_close(y.double(), limit, rtol=torch.finfo(dtype).eps, atol=1e-30)
    assert not dx.isnan().any(), "the gradient has a limit at both infinities"


NAN_GRADIENT = {"relu": 1, "threshold": 1, "leaky_relu": 0.01, "hardsigmoid": 0}


@pytest.mark.parametrize("name", NAN_GRADIENT)
def test_gradient_at_nan(name: str, device: str) -> None:
    _, dx = evaluate(jitact.get(name)(), torch.full((9,), NAN, device=device))
    torch.testing.assert_close(dx, torch.full((9,), float(NAN_GRADIENT[name])))


@pytest.mark.parametrize(
    "name", ["relu", "relu6", "leaky_relu", "silu", "gelu", "gelu_tanh", "quick_gelu", "hardswish", "mish", "tanh", "softsign"]
)
def test_signed_zero_is_kept(name: str, device: str) -> None:
    y, _ = evaluate(jitact.get(name)(), torch.tensor([-0.0, 0.0], device=device))
    assert y.signbit().tolist() == [True, False]


def test_an_unselected_branch_never_leaks(device: str) -> None:
    """x > 0 ? dy : 0 stays 0 where 0 * inf would be NaN."""
    x = torch.tensor([-1.0, 1.0], device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(jitact.relu(x), x, torch.tensor([INF, INF], device=device))
    assert dx.tolist() == [0.0, INF]


# fast_math changes GPU kernels only: without a GPU the other activations are left to -m slow.
@pytest.mark.parametrize("name", PLAIN_IDS if torch.cuda.is_available() else slow_but(PLAIN_IDS, ["gelu", "softcap"]))
def test_fast_math_has_its_bound(name: str, device: str) -> None:
    """With fast_math every activation stays within 2^-15 of the exact result, relative to max(1, |y|)."""
    x = torch.linspace(-8, 8, 100_001, device=device)
    y = jitact.get(name)(fast_math=True)(x).cpu().double()
    activation = jitact.get(name).activation
    exact = (activation.exact or activation.reference)(x.cpu().double(), *(default for _, default in activation.params))
    assert ((y - exact).abs() / exact.abs().clamp(min=1)).max() < 2**-15


WRONG = {
    "a wrong constant": "ELEMENTWISE T forward(T x) { return x * sigmoid(T(1.7) * x); }",
    "swallows NaN": "ELEMENTWISE T forward(T x) { return x > -1e30 ? x * sigmoid(T(1.702) * x) : T(0); }",
    "a wrong slope": """ELEMENTWISE T forward(T x) { return x * sigmoid(T(1.702) * x); }
        ELEMENTWISE T backward(T dy, T x) { return dy * sigmoid(T(1.702) * x); }""",
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_kernel_is_rejected(fault: str) -> None:
    """The checks of this file must fail for kernels that are wrong on purpose."""
    right = jitact.get("quick_gelu").activation
    text = '#include "elementwise.cuh"\n' + WRONG[fault]
    wrong = Activation("wrong", "Wrong", "", right.reference, kernel=KernelSource("wrong", text, "wrong.cu"))
    jitact.registry.register(wrong)
    with pytest.raises(AssertionError):
        assert_accurate(wrong, "input", every_16bit_value(torch.float16))
        test_nan_and_infinities(wrong, torch.float32, "cpu")
