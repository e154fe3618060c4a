"""Activations inside torch.compile and torch.export: accuracy, number of compilations, saved programs."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from common import PLAIN, PLAIN_IDS, assert_below, oracle
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from random_kernels import in_cpp, program, with_body
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import jitact
from jitact import running
from jitact.accuracy import ulp_error
from jitact.compiling.dual import Dual, derivative, of_duals
from jitact.compiling.formulas import Formula, Unreadable
from jitact.compiling.functions import functions
from jitact.compiling.operators import operators
from jitact.compiling.reader import read
from jitact.configs import configured
from jitact.definitions.functions import FUNCTIONS
from jitact.kernels.loader.source import DEVICE
from jitact.measuring.limits import BOUNDS, DISSOLVED, TESTED, TESTED_FROM_OUTPUT, UNUSUAL
from jitact.measuring.ulp import every_16bit_value
from jitact.records import Activation

LIMITS = TESTED | {torch.float32: BOUNDS[torch.float32]}  # gradients are measured in ulp at 1
GATED = [name for name in jitact.names() if jitact.get(name).activation.gating is not None]


def inputs(dtype: torch.dtype) -> Tensor:
    """Every fourth finite value of a 16-bit type; for wider types usual and small values, and tails."""
    if dtype.itemsize == 2:
        return every_16bit_value(dtype)[1::4]
    generator = torch.Generator().manual_seed(0)
    spread = [torch.randn(2000, generator=generator, dtype=dtype) * scale for scale in (1e-2, 1, 8)]
    return torch.cat([*spread, torch.linspace(-30, 30, 4001, dtype=dtype), torch.linspace(-110, -30, 1001, dtype=dtype)])


def in_the_tests_range(activation: Activation, x: Tensor) -> Tensor:
    """Without tails in float64, where the reference formula is no more exact."""
    return x[x.abs() < 4] if x.dtype is torch.float64 else x


@pytest.mark.parametrize("backend", ["inductor", "aot_eager_decomp_partition"])
@pytest.mark.parametrize("setting", [{"aggressive_recomputation": True}, {"activation_memory_budget": 0.5}], ids=str)
def test_dropout_draws_once_where_forward_is_computed_again(setting: dict, backend: str) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(12, 12).double() for _ in range(2)]

    def function(x: Tensor) -> Tensor:
        for layer in layers:
            x = x + jitact.gelu(layer(x), dropout=0.5)
        return x.sin()

    with torch._functorch.config.patch(setting):
        compiled = torch.compile(function, backend=backend)

        def loss(x: Tensor) -> Tensor:
            torch.manual_seed(9)
            return compiled(x).square().sum()

        x, direction = torch.randn(2, 20, 12, dtype=torch.float64)
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(loss(x), x)
        up, down = (loss((x + step * direction).detach().requires_grad_()) for step in (1e-6, -1e-6))
        torch.testing.assert_close((slope * direction).sum(), (up - down) / 2e-6, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_two_dropouts_in_a_graph_draw_different_numbers(backend: str) -> None:
    compiled = torch.compile(lambda x: (jitact.gelu(x, dropout=0.5), jitact.gelu(x, dropout=0.5)), backend=backend)
    first, second = compiled(torch.ones(64))
    assert ((first == 0) != (second == 0)).any()


@pytest.mark.parametrize("activation", PLAIN, ids=PLAIN_IDS)
def test_formulas_are_as_exact_as_kernels(activation: Activation) -> None:
    formula, params = Formula(activation.source, fast_math=False), tuple(default for _, default in activation.params)
    for dtype in LIMITS:
        x, limits = in_the_tests_range(activation, inputs(dtype)), LIMITS[dtype]
        exact_y, exact_dx = oracle(activation, x, params)
        y, dx = formula.forward(x, *params), formula.gradient(torch.ones_like(x), x, *params)
        assert y.dtype is dx.dtype is dtype
        errors, bound = ulp_error(y, exact_y, dtype), DISSOLVED if dtype is torch.float32 else limits.forward
        assert_below(errors, torch.full_like(errors, bound), x, f"{activation.name} forward")
        assert (errors > limits.usual).double().mean() <= UNUSUAL
        errors = ulp_error(dx, exact_dx, dtype, floor=limits.floor)
        assert_below(errors, torch.full_like(errors, limits.gradient), x, f"{activation.name} gradient")
        if "output" in formula.saves:
            finite = exact_y.abs() < torch.finfo(dtype).max
            dx = formula.gradient_from_output(torch.ones_like(x), y, *params)
            errors = ((dx.double() - exact_dx).abs() / exact_dx.abs().clamp(min=1))[finite]
            assert_below(
                errors, torch.full_like(errors, TESTED_FROM_OUTPUT[dtype]), x[finite], f"{activation.name} from the output"
            )


def test_gradients_that_kernel_files_leave_out() -> None:
    """Derived from the formula by the kernels' derivative rules, in float64 against PyTorch's autograd."""
    text = "x * sin(a * x) / (1 + softplus(x)) + max(x, 0) * normal_cdf(x) + pow(abs(tanh(x)), b)"
    jitact.define("swoosh", text, a=2.0, b=1.5)
    activation = jitact.get("swoosh").activation
    x = torch.linspace(-4, 4, 801, dtype=torch.float64, requires_grad=True)
    y = activation.reference(x, 1.3, 1.7)
    (dx,) = torch.autograd.grad(y.sum(), x)
    formula = Formula(activation.source, fast_math=False)
    torch.testing.assert_close(formula.forward(x.detach(), 1.3, 1.7), y.detach())
    torch.testing.assert_close(formula.gradient(torch.ones_like(x), x.detach(), 1.3, 1.7), dx)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_of_every_function_of_expressions(name: str) -> None:
    operands = "xyz"[: FUNCTIONS[name].arity]
    activation = jitact.define("swoosh", f"{name}({', '.join(operands)}) * x").activation
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.rand(1000, generator=generator, dtype=torch.float64) * 6 - 3 for _ in operands]
    leaves = [each.clone().requires_grad_() for each in tensors]
    y = activation.reference(*leaves)
    expected = torch.autograd.grad(y, leaves, torch.ones_like(y), materialize_grads=True)
    found = Formula(activation.source, fast_math=False).gradients(torch.ones_like(y), *tensors, wanted=2 ** len(operands) - 1)
    for own, other in zip(found, expected, strict=True):
        finite = y.isfinite() & other.isfinite()
        assert finite.any()
        torch.testing.assert_close(own[finite], other[finite])


# Functions that expressions do not have, each k-th the value of one file.
OF_FILES = """
ELEMENTWISE T forward(T x, T y, T z, Number<T> k) {
  const T sigma = z * z + 1, t = min(folded(x), 40);
  return k == 0 ? folded(x) * y : k == 1 ? right_part(x) * y : k == 2 ? normal_cdf(x, y, sigma)
       : k == 3 ? times_sigmoid(y, x < 0, folded(x), z * z) : x_times_sigmoid(x, t, sigma, y * 0.01);
}
"""


def of_files(x: Tensor, y: Tensor, z: Tensor, k: int) -> Tensor:
    size, sigma = torch.where(x < 0, -x, x), z * z + 1
    if k == 4:
        return x * torch.sigmoid(math.log(2) * x * (sigma + y * 0.01))
    right, t = torch.where(x < 0, 0.0, x), size + z * z
    cdf = torch.special.ndtr((x - y) / sigma)
    return [size * y, right * y, cdf, y * torch.sigmoid(torch.where(x < 0, -t, t))][k]


def test_derivatives_of_functions_that_only_files_call() -> None:
    """Of kernels and of graphs, at 0 too, where the two halves of smooth functions meet."""
    cls = jitact.define("swoosh", source=f'#include "elementwise.cuh"\n{OF_FILES}', k=0.0)
    formula = Formula(cls.activation.source, fast_math=False)
    x = torch.cat([torch.linspace(-5, 5, 101, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
    x, y, z = (each.flatten().requires_grad_() for each in torch.meshgrid(x, x[:100:33] + 0.3, x[:100:33] - 0.2, indexing="ij"))
    for k in range(5):
        exact = of_files(x, y, z, k)
        dy = torch.ones_like(exact)
        expected = torch.autograd.grad(exact, (x, y, z), dy, materialize_grads=True)
        torch.testing.assert_close(formula.forward(x.detach(), y.detach(), z.detach(), k), exact.detach())
        found = formula.gradients(dy, x.detach(), y.detach(), z.detach(), k, wanted=7)
        for each in (found, torch.autograd.grad(cls(k)(x, y, z), (x, y, z), dy)):
            torch.testing.assert_close(each, expected)
    far = torch.tensor([-torch.inf, -1e300], dtype=torch.float64)
    assert formula.gradients(dy[:2], far, y[:2].detach(), z[:2].detach(), 4, wanted=1)[0].tolist() == [0, 0]


@pytest.mark.parametrize("name", GATED)
def test_gated(name: str) -> None:
    activation, generator = jitact.get(name).activation, torch.Generator().manual_seed(0)
    params = [min(default, 2.0) for _, default in activation.params]  # a finite limit in place of an infinite one
    formula = Formula(activation.source, fast_math=False)
    for dtype, near in ((torch.float64, 2.0**-46), (torch.float32, 2.0**-18)):
        gate, up, dy = (torch.randn(1000, generator=generator, dtype=dtype) * 2 for _ in range(3))
        operands = [gate.requires_grad_(), up.requires_grad_()]
        y = activation.reference(*operands, *params)
        expected = [y.detach(), *torch.autograd.grad(y, operands, dy)]
        given = [operand.detach() for operand in operands]
        found = [formula.forward(*given, *params), *formula.gradients(dy, *given, *params, wanted=3)]
        for own, other in zip(found, expected, strict=True):
            assert ((own - other).abs() <= near * (1 + other.abs())).all()


DISSOLVING = [name for name in jitact.names() if not jitact.get(name).activation.layout.draws]
NARROW = (torch.float32, torch.bfloat16, torch.float16)


def special_values(dtype: torch.dtype) -> Tensor:
    """Zeros, the least and the greatest numbers, infinities, NaN, and some in between whose results are not subnormal."""
    info = torch.finfo(dtype)
    positive = [0.0, info.tiny / 2, info.tiny, 1e-3, 0.5, 1.0, 3.0, 6.0, 20.0, 40.0, 1e3, info.max**0.5, info.max / 2, info.max]
    values = torch.tensor([*positive, torch.inf], dtype=torch.float64)
    return torch.cat([values, -values, torch.tensor([torch.nan])]).to(dtype)


def assert_as_eager(found: Tensor, eager: Tensor, absolute: Tensor | float, bound: float, what: str) -> None:
    """Checks for NaN and infinities in the same places, and values as near as two that are each within ``bound`` ulp."""
    found, eps = found.double(), torch.finfo(eager.dtype).eps
    eager = eager.double()
    near = (found - eager).abs() <= 2 * bound * eps * eager.abs().maximum(torch.as_tensor(absolute).double())
    wrong = ~(near | (found == eager) | (found.isnan() & eager.isnan()))
    assert not wrong.any(), f"{what}: at {wrong.nonzero().flatten().tolist()[:9]} {found[wrong][:9]}, not {eager[wrong][:9]}"


@pytest.mark.parametrize("name", DISSOLVING)
def test_special_values_are_as_in_eager_mode(name: str) -> None:
    """Formulas against kernels, forward and backward."""
    record = jitact.get(name).activation
    formula, params = Formula(record.source, fast_math=False), [default for _, default in record.params]
    config, layout = configured(record, False, "input", False), record.layout
    for dtype in NARROW:
        values, limits, tiny = special_values(dtype), LIMITS[dtype], torch.finfo(dtype).tiny
        elements = [each.contiguous() for each in torch.cartesian_prod(*[values] * layout.elements).view(-1, layout.elements).T]
        weights = [torch.full((1,), record.channels[each].init, dtype=dtype) for each in layout.tensors[layout.elements :]]
        operands = [*elements, *weights]
        bound = DISSOLVED if dtype is torch.float32 else limits.forward
        y, eager_y = formula.forward(*operands, *params), config.forward_op(*operands, *params)
        assert_as_eager(y, eager_y, tiny, bound, f"{name} {dtype}")
        for each in (1.0, -2.0, torch.finfo(dtype).max / 4, torch.nan)[: 1 if config.by_bits else 4]:
            dy = torch.full_like(elements[0], each)
            if not config.by_bits:
                found, eager = [formula.gradient(dy, *operands, *params)], [config.backward_op(dy, *operands, *params)]
            else:
                wanted = 2 ** len(config.places) - 1
                found = formula.gradients(dy, *operands, *params, wanted=wanted)
                eager = config.backward_op(dy, *operands, *params, wanted)
            for own, other, place in zip(found, eager, config.places, strict=False):
                if place < layout.elements:  # a sum over special values says little
                    factor = torch.stack([abs(dy), *[t.abs() for k, t in enumerate(elements) if k != place]]).double().prod(0)
                    least = (limits.floor * factor.nan_to_num(0, 0)).clamp(min=tiny)
                    assert_as_eager(own, other, least, limits.gradient, f"{name} {dtype}, gradient {place} of {each}")


WITH_NUMBERS = [record for record in PLAIN if record.params]


@pytest.mark.parametrize("number", [0.0, -1.5, torch.inf, torch.nan])
def test_unusual_numbers_are_as_in_eager_mode(number: float) -> None:
    """For each parameter of an activation that may have that value, beside the defaults of the others."""
    x, tested = special_values(torch.float32), 0
    for record, place in ((each, place) for each in WITH_NUMBERS for place in range(len(each.params))):
        params = tuple([number if k == place else default for k, (_, default) in enumerate(record.params)])
        try:
            record.check(params, False, "input", False)
        except ValueError:
            continue
        config, formula, tested = configured(record, False, "input", False), Formula(record.source, fast_math=False), tested + 1
        what = f"{record.name} of {number}"
        tiny, dy = torch.finfo(torch.float32).tiny, torch.ones_like(x)
        assert_as_eager(formula.forward(x, *params), config.forward_op(x, *params), tiny, DISSOLVED, what)
        found, eager = formula.gradient(dy, x, *params), config.backward_op(dy, x, *params)
        assert_as_eager(found, eager, 1.0, LIMITS[torch.float32].gradient, f"{what}, gradient")
    assert tested > 3


FORWARD = "ELEMENTWISE T forward(T x)"
UNREADABLE = {
    "loop": f"{FORWARD} {{ for (int k = 0; k < 2; ++k) x = x * x; return x; }}",
    "branch": f"{FORWARD} {{ if (x > 0) {{ return x; }} return T(0); }}",
    "block": f"{FORWARD} {{ T y = x; {{ T y = 2 * x; }} return y; }}",
    "type": f"using Number_of = T; {FORWARD} {{ return x; }}",
    "whole numbers": f"{FORWARD} {{ return x * (1 / 2); }}",
    "whole numbers that vary": f"{FORWARD} {{ return x * (((x > 0) + (x > 1)) / 2); }}",
    "octal": f"{FORWARD} {{ return x * 010; }}",
    "an int's end": f"{FORWARD} {{ return x * (65536 * 65536); }}",
    "no int": f"{FORWARD} {{ return x * 2147483648; }}",
    "suffix": f"{FORWARD} {{ return x * 0.1f; }}",
    "cast": f"{FORWARD} {{ return x * int(2.5); }}",
    "comma": f"{FORWARD} {{ return (x, 2 * x); }}",
    "a template of int": f"ELEMENTWISE T half(T x) {{ return x / 2; }} {FORWARD} {{ return x * half(3); }}",
    "overloads": f"ELEMENTWISE T f(T x) {{ return x; }} ELEMENTWISE T f(T x, T y) {{ return y; }} {FORWARD} {{ return f(x); }}",
    "a function of the library's name": f"ELEMENTWISE T sigmoid(T x) {{ return x; }} {FORWARD} {{ return sigmoid(x); }}",
    "an argument that is changed": f"ELEMENTWISE T f(T& x) {{ x = 2; return x; }} {FORWARD} {{ T y = x; return f(y) + y; }}",
    "macro of arguments": f"#define TWICE(v) v * 2\n{FORWARD} {{ return TWICE(x + 1); }}",
    "where it runs": f"#ifdef __CUDA_ARCH__\n#define HERE 1\n#else\n#define HERE 2\n#endif\n{FORWARD} {{ return x * HERE; }}",
    "no result": f"{FORWARD} {{ const T y = x; }}",
    "not declared": f"{FORWARD} {{ y = x; return y; }}",
    "declared twice": f"{FORWARD} {{ T y = x; T y = 2 * x; return y; }}",
    "two of a name": "ELEMENTWISE T forward(T x, T x) { return x; }",
    "too many arguments": f"ELEMENTWISE T half(T x) {{ return x / 2; }} {FORWARD} {{ return half(x, x); }}",
    "too many results": f"{FORWARD} {{ return x; }} ELEMENTWISE Many<T, 2> backward(T dy, T x) {{ return {{x, x, x}}; }}",
    "truth of an element": f"{FORWARD} {{ return x ? 1 : x; }}",
    "nested too deep": f"{FORWARD} {{ return {'(' * 9999}x{')' * 9999}; }}",
    "branches": f"#ifdef JITACT_FAST_MATH\n#elif 1\n#define KEPT 1\n#endif\n{FORWARD} {{ return x; }}",
    "a line that goes on": f"// this one, too, \\\n#define KEPT 2\n{FORWARD} {{ return x; }}",
}


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read(text: str) -> None:
    with pytest.raises(Unreadable):
        read(text, functions(torch.float64, torch.device("cpu")))


# Where C++ differs from Python: types of numbers, bools in arithmetic, textual macros, division by 0, names.
OTHERWISE = {
    "truth": "return (x > 0) + (x > 1) - -(z > 0) + true * x * (x == x) + +(z > x);",
    "truth of a literal": "return (2 && 0.5 ? x : z) * (!3 || !0.0);",
    "comparisons of comparisons": "return (0 < x < 2) + (x > 0 == z > 0) * x + (x != z != true);",
    "associativity": "return x - z - a - 1 + x / z / a / 2;",
    "nested choices": "return x > 0 ? 1 : z > 0 ? 0.5 : a > 0 ? true : x;",
    "a choice of truth": "const auto c = x > 0 ? z > 0 : false; return c + (x > 0 ? 1 : 0) * (c ? 2 : 0.5);",
    "no zero among ints": "return x * -0 + copysign(1, T(-0)) + copysign(2, T(-0.0));",
    "quotients by zero": "return x * T(1. / 0) + z * T(-1 / 0.0) + (0. / 0 == 0) + x / a;",
    "of numbers": "return x * (a / a) + x / (a * a) + 2 / a + min(a, 1) + max(T(2), a) * select(a < 1, a, 2);",
    "words of Python": "const T lambda = x, divide = 2 * z, select_T = a; return lambda / divide / select_T;",
    "several": "T y = x, w = y * z; y = w > 1; bool b = 2; b = b && y > 0; return b ? y + w : w;",
    "what does not vary": "return sqrt(max(x, 0)) + x * max(x, 0) + max(x, 0) / a + 1 / (x * x) + max(x, 1) * a;",
    "a function's own": "return square<T>(3) * x + positive(x) + square<T>(x > 0);",
    "a value alone": "return x;",
    "declared types": "bool b = 2; T k = 1; b = b + b; k = x > 0; return b + b + k / 2 + x;",
    "no value of x": "return positive(z) ? a : 2;",
}
TEXTS = {
    "text": "#define KEPT_0 1 + z\nELEMENTWISE T forward(T x, T z, Number<T> a) { return x * KEPT_0 * a; }",
    "text in text": "#define KEPT_0 2 - KEPT_1\n#define KEPT_1 1 - z\n"
    "ELEMENTWISE T forward(T x, T z, Number<T> a) { return KEPT_0 - KEPT_0 * a > 0 ? x : -KEPT_1; }",
    "text that names itself": "ELEMENTWISE T KEPT_0(T x) { return x + x; }\n#define KEPT_0 1 + KEPT_0\n"
    "ELEMENTWISE T forward(T x, T z, Number<T> a) { return x * KEPT_0(z) * a; }",
    "types of arguments and results": "ELEMENTWISE T twice(bool b, T x) { return b + b + x; }\n"
    "ELEMENTWISE bool always(T x) { return 2; }\n"
    "ELEMENTWISE T forward(T x, T z, Number<T> a) { return twice(2, x * a) + always(z) + always(z); }",
    "text that comes later": "ELEMENTWISE T forward(T x, T z, Number<T> KEPT_0) { return x * KEPT_0 + z; }\n#define KEPT_0 3",
}


def test_branches_of_builds() -> None:
    text = f"#ifdef JITACT_FAST_MATH\n#define KEPT 2\n#else\n#define KEPT 3\n#endif\n{FORWARD} {{ return x * KEPT; }}"
    known = functions(torch.float64, torch.device("cpu"))
    x = torch.ones(2, dtype=torch.float64)
    assert read(text, known)["forward"](x).tolist() == [3, 3]
    assert read(text, known, ("JITACT_FAST_MATH",))["forward"](x).tolist() == [2, 2]


# Files whose gradients are derived, by way of `prepare`, of other files, and of a bit; or begin with products of dy alone.
KINDS = {
    "prepared": """
ELEMENTWISE void prepare(Channel<T>& u, Channel<T>& v) { u = softplus(u); v = v * v; }
ELEMENTWISE T forward(T x, Channel<T> w, Channel<T> u, Channel<T> v) { return sin(x * u) * v + w; }
""",
    "used": """
ELEMENTWISE T forward(T x, Channel<T> w) {
  return relu6_::forward(x) * w + hardtanh_::forward(x, -1, 1) + mish_::forward(x * w);
}
""",
    "rounded_late": """
ELEMENTWISE T forward(T x, Channel<T> w) { return x * x * w * T(0.55); }
ELEMENTWISE Many<T, 2> backward(T dy, T x, Channel<T> w) { return {dy * 1.1 * x * w, dy * 0.55 * x * x}; }
""",
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_gradients_of_each_kind_of_file(name: str, dtype: torch.dtype) -> None:
    """Against kernels; unwanted ones are empty."""
    channels = {each: jitact.Channel() for each in re.findall(r"Channel<T> (\w)", KINDS[name].split("forward")[1])}
    record = jitact.define("kind", source=f'#include "elementwise.cuh"\n{KINDS[name]}', **channels).activation
    formula, config = Formula(record.source, fast_math=False), configured(record, False, "input", False)
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.randn(197, generator=generator), torch.tensor([0.0, 1.0, 6.0])])
    x, dy = values[:, None].expand(200, 3).to(dtype).contiguous(), torch.randn(200, 3, generator=generator).to(dtype)
    sizes = [1 if f"& {each}" in KINDS[name] else 3 for each in channels]
    operands = [x, *[torch.randn(size, generator=generator).to(dtype) for size in sizes]]
    near = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-12}
    torch.testing.assert_close(formula.forward(*operands), config.forward_op(*operands), **near)
    every = 2 ** len(operands) - 1
    found, expected = formula.gradients(dy, *operands, wanted=every), config.backward_op(dy, *operands, every)
    torch.testing.assert_close(found[0], expected[0], **near)
    assert dtype is torch.float64 or (found[0] != expected[0]).double().mean() < 0.02, "it is rounded once"
    for own, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(own, other, rtol=16 * torch.finfo(dtype).eps, atol=1e-12)
    assert [each.numel() for each in formula.gradients(dy, *operands, wanted=2)] == [0, *sizes[:1], *[0] * len(sizes[1:])]


def test_kernel_files_mean_what_they_mean_in_cpp(tmp_path: Path) -> None:
    """These and random files against a C++ compiler: values and derivatives at special values, with numbers also as tensors."""
    places = [-torch.inf, -2.5, -1.0, -0.0, 0.0, 0.75, 1.0, 3.0, torch.inf, torch.nan]
    columns = [places, [-0.75, 0.0, 2.0, torch.inf], [0.0, -0.0, 1.5, -2.0, torch.inf, torch.nan]]
    inputs = torch.cartesian_prod(*[torch.tensor(each, dtype=torch.float64) for each in columns])
    known = functions(torch.float64, torch.device("cpu"))
    duals = of_duals(known)
    texts = {name: with_body(body) for name, body in OTHERWISE.items()} | TEXTS
    texts |= {f"random {seed}": program(seed) for seed in range(70)}
    read_ones = {}
    for name, text in texts.items():
        try:
            read_ones[name] = read(text, known)["forward"], read(text, duals)["forward"]
        except Unreadable:
            assert name.startswith("random")
    assert len(read_ones) > 0.9 * len(texts)
    expected = in_cpp([texts[name] for name in read_ones], inputs, tmp_path)
    for (name, (forward, of_dual)), exact in zip(read_ones.items(), expected, strict=True):
        for k, number in enumerate(columns[2]):
            x, z, a = inputs[k :: len(columns[2])].T
            for alpha in (number, a):
                found = forward(x, z, alpha), derivative(of_dual(Dual(x, 1), Dual(z), Dual(alpha)))
                for what, own, other in zip(("value", "slope"), found, exact[:, k :: len(columns[2])], strict=True):
                    own = torch.as_tensor(own, dtype=torch.float64).expand_as(other)
                    message = f"{what} of {name}, a = {number}:\n{texts[name]}"
                    near = torch.isclose(own, other, rtol=1e-12, atol=1e-12, equal_nan=True)
                    assert near.all(), f"{message}{x[~near][0]}, {z[~near][0]}: {own[~near][0]}, not {other[~near][0]}"
                    zero = (other == 0) & (own == 0)
                    assert what == "slope" or torch.equal(own[zero].signbit(), other[zero].signbit()), message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slopes_that_are_said_to_be_finite_are(dtype: torch.dtype) -> None:
    """Where they are not, a derivative of 0 would have to be kept from an infinite slope."""
    known = functions(dtype, torch.device("cpu"))
    powers = torch.logspace(-45, 127 if dtype is torch.float32 else 1023, 2000, base=2, dtype=dtype)
    x = torch.cat([powers, -powers, torch.tensor([0.0, torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype)])
    finite = re.findall(r"^JITACT_CHAIN_FINITE\w*\((\w+),", (DEVICE / "math_dual.cuh").read_text(), re.MULTILINE)
    assert len(finite) > 9
    for name in finite:
        slope = derivative(of_duals(known)[name](Dual(x, torch.ones_like(x))))
        assert slope.isfinite().all(), (name, x[~slope.isfinite()][:3])


CHOSEN = {
    "sin(floor(x))": lambda x, y: x.floor().sin(),
    "sin(x > 0 ? x : y)": lambda x, y: torch.where(x > 0, x, y).sin(),
    "cos(max(x, y))": lambda x, y: torch.maximum(x, y).cos(),
    "erf(clamp(x, -1, 1) + y)": lambda x, y: (x.clamp(-1, 1) + y).erf(),
    "sigmoid(chosen(x, y))": lambda x, y: torch.where(x > 1, x, y).sigmoid(),
    "silu(x > 0 ? x : y)": lambda x, y: torch.nn.functional.silu(torch.where(x > 0, x, y)),
    "sin(reglu(x, y))": lambda x, y: (x.relu() * y).sin(),
    "cos(copysign(max(x, y), y))": lambda x, y: torch.maximum(x, y).copysign(y).cos(),
    # Through more than one operation, which all tell that a constant may have been chosen.
    "erf(sin(abs(1 - (2 * max(x, y) * 3 - 1) / 2)))": lambda x, y: (1 - (torch.maximum(x, y) * 6 - 1) / 2).abs().sin().erf(),
    "cos(1 / (y > 0 ? x + x : min(x, y)))": lambda x, y: (1 / torch.where(y > 0, x + x, torch.minimum(x, y))).cos(),
    "cos(y > 0 ? max(x, y) : x + x)": lambda x, y: torch.where(y > 0, torch.maximum(x, y), x + x).cos(),
}


@pytest.mark.parametrize("text", CHOSEN)
def test_slopes_where_a_constant_is_chosen_that_is_not_finite(text: str) -> None:
    """The slope may then be NaN, from which the derivative 0 is kept, as by PyTorch."""
    jitact.define("chosen", "x > 1 ? x : y")
    cls = jitact.define("told", text + " + 0 * y" * ("y" not in text))
    values = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -3.0, 0.7], dtype=torch.float64)
    x, y = (each.flatten().requires_grad_() for each in torch.meshgrid(values[1:], values, indexing="ij"))
    expected = torch.autograd.grad(CHOSEN[text](x, y).sum(), (x, y), allow_unused=True)
    compiled = Formula(cls.activation.source, False).gradients(torch.ones_like(x), x.detach(), y.detach(), wanted=3)
    for own in (torch.autograd.grad(cls()(x, y).sum(), (x, y)), compiled):
        for found, gradient in zip(own, expected, strict=True):
            assert gradient is None or not (found.isnan() & ~gradient.isnan()).any()


def test_numbers_are_rounded_as_kernels_round_them() -> None:
    """In float32: a sum, an overflow, and two numbers that round to the same."""
    text = "return (a + 16777216 == 16777216) + 2 * (a * 1e38 / a > 2e38) + 4 * (a == 1 + 1e-9) + 0 * x * z;"
    forward = read(with_body(text), functions(torch.float32, torch.device("cpu")))["forward"]
    x = torch.ones(3)
    assert forward(x, x, 1.0).tolist() == [5.0] * 3
    assert forward(x, x, 100.0).tolist() == [2.0] * 3 and forward(x, x, 2.0).tolist() == [0.0] * 3


def test_what_cannot_be_read_stays_whole() -> None:
    """A compiled graph calls the kernel."""
    backward = "ELEMENTWISE T backward(T dy, T x) { return dy * 4 * x * x * x; }"
    jitact.define("odd", source=f'#include "elementwise.cuh"\n{UNREADABLE["loop"]}\n{backward}\n')
    x = torch.linspace(-2, 2, 100, requires_grad=True)
    y = torch.compile(jitact.odd, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(y, x**4)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 4 * x**3)


OF_NOTHING = {
    "constant": f"{FORWARD} {{ return 2; }}",
    "parameter": "ELEMENTWISE T forward(T x, Number<T> a) { return softplus(a); }",
    "itself": f"{FORWARD} {{ return x; }}",
    "quotient": "ELEMENTWISE T forward(T x, Number<T> a) { return x / a; }",
    "constant_slope": f"{FORWARD} {{ return 2 * x; }} ELEMENTWISE T backward(T dy, T x) {{ return 2 * dy; }}",
    "channel": "ELEMENTWISE T forward(T x, Channel<T> w) { return w; }",
    "by_channel": "ELEMENTWISE T forward(T x, Channel<T> w) { return x + w; }",
}


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_does_not_depend_on_elements(dynamic: bool) -> None:
    """Values, slopes and parameters (0) that are constants in a compiled graph, against eager mode."""
    for name, text in OF_NOTHING.items():
        parameters = {"a": 0.0} if "Number" in text else {}
        jitact.define(name, source=f'#include "elementwise.cuh"\n{text}\n', **parameters)

    def every(x: Tensor, w: Tensor) -> list[Tensor]:
        given = {"channel": (x, w), "by_channel": (x, w), "quotient": (x.detach(),)}  # its gradient would be 0 * inf = NaN
        return [getattr(jitact, name)(*given.get(name, (x,))) for name in OF_NOTHING]

    operands = torch.linspace(-2, 2, 24).view(4, 6).requires_grad_(), torch.ones(6).requires_grad_()
    found = torch.compile(every, fullgraph=True, dynamic=dynamic)(*operands)
    for name, own, eager in zip(OF_NOTHING, found, every(*operands), strict=True):
        torch.testing.assert_close(own, eager, equal_nan=True, msg=lambda message, name=name: f"{name}: {message}")
        if name == "quotient":
            continue
        gradients = [
            torch.autograd.grad(y.sum(), operands, allow_unused=True, retain_graph=True, materialize_grads=True)
            for y in (own, eager)
        ]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, msg=lambda message, name=name: f"gradient of {name}: {message}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_near_zero_through_inductor(dtype: torch.dtype) -> None:
    """Relative accuracy near 0, and the sign of 0; Inductor's own expm1 returns 0 near 0 on a CPU."""
    functions = [jitact.elu, jitact.selu, jitact.celu, jitact.gelu, jitact.get("gelu_tanh")(), jitact.tanh, jitact.softsign]
    x = torch.cat([torch.logspace(-30, 0, 40, dtype=dtype), torch.zeros(8, dtype=dtype)])
    x = torch.cat([x, -x])
    for function, y in zip(functions, torch.compile(lambda x: [each(x) for each in functions])(x), strict=True):
        eager = function(x)
        assert torch.allclose(y, eager, rtol=64 * torch.finfo(dtype).eps, atol=0), function
        assert torch.equal(y.signbit(), eager.signbit()), function


ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "acosh": torch.acosh,
    "atanh": torch.atanh,
    "cbrt": lambda x: torch.sign(x) * x.abs() ** (1 / 3),
    "cosh": torch.cosh,
    "erf": torch.erf,
    "normal_pdf": lambda x: torch.exp(-0.5 * x * x) / (2 * torch.pi) ** 0.5,
    "sinh": torch.sinh,
}
"""Functions of which PyTorch's or Inductor's, on a CPU, lose digits near 0 or at the ends of their ranges."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ends_of_functions_through_inductor(dtype: torch.dtype) -> None:
    made = [jitact.define(f"the_{name}", f"{name}(x)")() for name in ENDS]
    powers = torch.logspace(-37, 38, 500, dtype=torch.float64)
    x = torch.cat([powers, torch.linspace(0.01, 100, 1004, dtype=torch.float64)]).to(dtype)
    x = torch.cat([x, -x])
    leaves = [x.clone().requires_grad_() for _ in made]  # one for each, as 0 times the slope of another may be NaN
    compiled = torch.compile(lambda *xs: [each(x) for each, x in zip(made, xs, strict=True)], fullgraph=True)(*leaves)
    for name, each, leaf, y in zip(ENDS, made, leaves, compiled, strict=True):
        wide = x.double().requires_grad_()
        exact = ENDS[name](wide)
        (exact_slope,) = torch.autograd.grad(exact.sum(), wide)
        for found in (y, each(leaf)):
            (slope,) = torch.autograd.grad(found.sum(), leaf, retain_graph=True)
            for what, value, wanted in ((name, found, exact), (f"the slope of {name}", slope, exact_slope)):
                # Values that the dtype holds, of points where the function is defined.
                size, info = wanted.detach().abs(), torch.finfo(dtype)
                inside = (size > 4 * info.tiny) & (size < info.max / 2) & exact.isfinite()
                errors = ulp_error(value.detach()[inside], wanted.detach()[inside], dtype)
                assert errors.max() <= (8 if dtype is torch.float32 else 0.51), (what, x[inside][errors.argmax()], errors.max())


# Through Inductor, in one graph, as each compilation takes seconds.

PROGRAM = """
import json, os

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import jitact

jitact.define("swoosh", "x * sin(a * x)", a=2.0)
normal = torch.distributions.Normal(0, 1)
bias = torch.arange(-32, 32) / 32
ACTIVATIONS = {
    "gelu": (jitact.gelu, lambda x: x * normal.cdf(x)),
    "silu": (jitact.silu, lambda x: x * torch.sigmoid(x)),
    "relu": (jitact.relu, torch.relu),
    "sigmoid": (lambda x: jitact.sigmoid(x, save="output"), torch.sigmoid),
    "a definition": (lambda x: jitact.swoosh(x, 1.5), lambda x: x * torch.sin(1.5 * x)),
    "gated": (lambda x: jitact.swiglu(x, x * 0.5), lambda x: nn.functional.silu(x) * x * 0.5),
    "bias and residual": (
        lambda x: jitact.silu(x, bias=bias.to(x.dtype), residual=x), lambda x: nn.functional.silu(x + bias.to(x.dtype)) + x
    ),
    "in place": (lambda x: jitact.mish(x * 1, inplace=True), nn.functional.mish),
    "gated, packed": (
        lambda x: jitact.swiglu(torch.cat([x, x * 0.5], -1)), lambda x: nn.functional.silu(x) * x * 0.5
    ),
    "residual that is changed": (
        lambda x: changed(x * 2, lambda r: jitact.silu(x, residual=r)), lambda x: nn.functional.silu(x) + 2 * x
    ),
    "output that is changed": (lambda x: jitact.relu6(x).mul_(0.5), lambda x: nn.functional.relu6(x) / 2),
}


def changed(tensor, function):
    result = function(tensor)
    tensor.zero_()
    return result


def apply(inputs, which):
    return [pair[which](x) for x, pair in zip(inputs, ACTIVATIONS.values(), strict=True)]


x = torch.linspace(-6, 6, 4096, dtype=torch.bfloat16).view(64, 64)
inputs = [x.clone().requires_grad_() for _ in ACTIVATIONS]


def step():
    outputs = torch.compile(lambda *t: apply(t, 0), fullgraph=True)(*inputs)
    return outputs, torch.autograd.grad(outputs, inputs, [torch.ones_like(x)] * len(inputs))


(outputs, gradients), code = run_and_get_code(step)
exact_inputs = [x.double().requires_grad_() for _ in ACTIVATIONS]
exact = apply(exact_inputs, 1)
exact_gradients = torch.autograd.grad(exact, exact_inputs, [torch.ones_like(x).double()] * len(inputs))


def off(values, exact, floor):
    return [((a.double() - b).abs() / b.abs().clamp(min=floor)).max().item() for a, b in zip(values, exact, strict=True)]


report = {
    "names": list(ACTIVATIONS), "forward": off(outputs, exact, 2**-7), "gradient": off(gradients, exact_gradients, 1),
    "operators": sum("torch.ops.jitact" in each for each in code), "graphs": len(code),
    "fused": sum("fmadd(" in each or "std::fma(" in each for each in code),
    "misses": counters["inductor"]["fxgraph_cache_miss"], "hits": counters["inductor"]["fxgraph_cache_hit"],
    "built": sorted(os.listdir(os.environ["JITACT_CACHE_DIR"])),
}
print(json.dumps(report))
"""


Process = Callable[[int], dict]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Process:
    """``process(0)`` and ``process(1)``: reports of processes that run the same program one after the other.

    Kernel builds are disabled, and the cache is empty.
    """
    folder, found = tmp_path_factory.mktemp("compiled"), []
    for name in ("kernels", "inductor"):
        (folder / name).mkdir()
    environment = os.environ | {
        "JITACT_NO_BUILD": "1",
        "JITACT_CACHE_DIR": str(folder / "kernels"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    (folder / "program.py").write_text(PROGRAM)

    def run(number: int) -> dict:
        while len(found) <= number:
            command = [sys.executable, str(folder / "program.py")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=folder)
            assert done.returncode == 0, done.stderr[-3000:]
            found.append(json.loads(done.stdout.splitlines()[-1]))
        return found[number]

    return run


WHICH = pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["first", "second"])


@WHICH
def test_compiled_results(number: int, process: Process) -> None:
    """In bfloat16: results are rounded once, to a relative 2^-8; gradients to 2^-8 of 1, or 2^-7 with two terms."""
    report = process(number)
    forward, gradient = (dict(zip(report["names"], report[kind], strict=True)) for kind in ("forward", "gradient"))
    assert {name: off for name, off in forward.items() if off > 2.0**-8} == {}
    assert {name: off for name, off in gradient.items() if off > 2.0**-7} == {}


@WHICH
def test_what_dissolves_is_not_built(number: int, process: Process) -> None:
    assert process(0)["graphs"] == 2  # forward and backward
    assert process(number)["operators"] == 0 and process(number)["built"] == []


def test_a_cpu_fuses_products_with_sums(process: Process) -> None:
    """As compilers for GPUs do; Inductor disables contraction in the CPU's compiler."""
    assert process(0)["fused"] == process(0)["graphs"]


@pytest.mark.slow
def test_the_next_process_compiles_nothing(process: Process) -> None:
    first, second = process(0), process(1)
    assert first["misses"] > 0 and first["hits"] == 0
    assert second["misses"] == 0 and second["hits"] > 0


FIRST_USE = """
import pickle, sys
import jitact, torch
from torch.nn import functional as F

calls = [
    (lambda x: jitact.relu(x), F.relu),
    (lambda x: jitact.gelu(x, save="input"), F.gelu),
    (lambda x: jitact.elu(x + 0, inplace=True), F.elu),
    (lambda x: jitact.swiglu(x), lambda x: F.silu(x[:, :4]) * x[:, 4:]),
    (lambda x: jitact.mul_and_silu(x, save="input"), lambda x: x[:, :4] * F.silu(x[:, 4:])),
    (lambda x: jitact.softmax(x, dim=-1), lambda x: F.softmax(x, -1)),
    (jitact.get("leaky_relu")(), F.leaky_relu),
    (jitact.get("geglu")(), lambda x: F.gelu(x[:, :4]) * x[:, 4:]),
    (jitact.get("log_softmax")(dim=-1), lambda x: F.log_softmax(x, -1)),
    (pickle.loads(bytes.fromhex(sys.argv[2])), F.mish),
]
unread = ("relu", "gelu", "elu", "swiglu", "mul_and_silu", "leaky_relu", "geglu", "mish")
assert not any({"source", "layout"} & vars(jitact.get(name).activation).keys() for name in unread)
x = torch.linspace(-3, 3, 32, dtype=torch.float64).view(4, 8)
for ours, theirs in calls:
    found = []
    for function in (torch.compile(ours, fullgraph=True, backend=sys.argv[1]), theirs):
        t = x.clone().requires_grad_()
        y = function(t)
        found.append((y, *torch.autograd.grad(y, t, x[:, : y.shape[1]])))
    torch.testing.assert_close(*found)
"""


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_first_use_may_be_compiled(backend: str) -> None:
    """torch.compile cannot trace reading a kernel file, which has to work at the first use; unpickling calls no constructor."""
    pickled = pickle.dumps(jitact.get("mish")(save="input")).hex()
    subprocess.run([sys.executable, "-c", FIRST_USE, backend, pickled], check=True, timeout=300)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "mish", "relu", "softplus", "selu", "relu6", "sigmoid"])
def test_no_more_is_kept_than_of_pytorch(name: str) -> None:
    """The bytes that forward saves for backward, as chosen by the min-cut partitioner."""
    plain, module = jitact.get(name).Model(), jitact.get(name)()
    weight = torch.ones(16, dtype=torch.bfloat16, requires_grad=True)
    x = torch.randn(64, 16).bfloat16().requires_grad_()

    def kept(act: nn.Module) -> int:
        sizes: list[int] = []

        def sized(graph: torch.fx.GraphModule, _: list) -> Callable:
            outputs = [node.meta["val"] for node in graph.graph.output_node().args[0]]
            sizes.append(sum(value.nbytes for value in outputs if isinstance(value, Tensor)))
            return make_boxed_func(graph.forward)

        table = select_decomp_table()
        cut = min_cut_rematerialization_partition
        backend = aot_autograd(fw_compiler=sized, bw_compiler=sized, partition_fn=cut, decompositions=table)
        torch._dynamo.reset()
        torch.compile(lambda x, w: (act(x * w + 1) * 0.5 + x) @ w, backend=backend)(x, weight)
        return sizes[0]

    assert kept(module) <= kept(plain)


@pytest.mark.parametrize("name", ["gelu", "silu", "laplace", "swiglu"])
def test_a_gpu_is_given_one_operation(name: str) -> None:
    """By Inductor's count, however long the formula is: above 30 operations it would store a value with several users."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import Pointwise, TensorBox
    from torch._inductor.lowering import lowerings
    from torch._inductor.ops_handler import KernelFormatterHandler
    from torch._inductor.virtualized import V, ops

    record = jitact.get(name).activation
    of = operators(record, False, running._recorded)
    size = record.layout.elements
    numbers = [default for _, default in record.params]
    given = [
        Pointwise.create(
            device=torch.device("cuda"), dtype=torch.bfloat16, inner_fn=lambda i, k=k: ops.load(f"buf{k}", i[0]), ranges=[8]
        )
        for k in range(size + 1)
    ]
    wanted = {"wanted": 2**size - 1} if size > 1 else {}
    with V.set_graph_handler(GraphLowering(torch.fx.symbolic_trace(nn.Identity()))):
        y = lowerings[of.operator()](*given[:size], *numbers)
        dx = lowerings[of.operator("_gradient")](*given, *numbers, **wanted)
        for result in (y, *([dx] if isinstance(dx, TensorBox) else dx)):
            pointwise = result.data.data
            assert pointwise.inner_fn_opcount().num_ops <= 2 * (size + 1) and pointwise.get_dtype() is torch.bfloat16
            assert "exp" in KernelFormatterHandler.ir_to_string(pointwise.inner_fn, *pointwise.inner_fn_args())


@pytest.mark.parametrize(("name", "slow"), [("gelu", True), ("softplus", True), ("hardswish", False)])
def test_a_cpu_stores_what_is_slow(name: str, slow: bool) -> None:
    """If it has several users; Inductor decides by functions that it knows to be slow, which formulas need not contain."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import Pointwise
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import V, ops

    record = jitact.get(name).activation
    of, cpu = operators(record, False, running._recorded), torch.device("cpu")
    given = [
        Pointwise.create(device=cpu, dtype=torch.float32, inner_fn=lambda i, k=k: ops.load(f"buf{k}", i[0]), ranges=[8])
        for k in range(2)
    ]
    with V.set_graph_handler(GraphLowering(torch.fx.symbolic_trace(nn.Identity()))):
        dx = lowerings[of.operator("_gradient")](*given, *[default for _, default in record.params])
        assert dx.data.should_realize_on_reuse(2) is slow


SLOW_IN_TRITON = {"div", "reciprocal", "log1p", "expm1", "erf", "erfc", "tanh", "sigmoid"}


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "mish", "softplus", "selu"])
def test_gradients_call_nothing_slow_on_a_gpu(name: str) -> None:
    """Only exp2 and rsqrt, which are one instruction each; in float32 also a reciprocal."""
    record = jitact.get(name).activation
    formula, params = Formula(record.source, fast_math=False), [default for _, default in record.params]
    for dtype in NARROW:
        with FakeTensorMode():
            x = torch.empty(4, dtype=dtype, device="cuda")
            graph = make_fx(lambda dy, x: formula.gradient(dy, x, *params), select_decomp_table())(x, x).graph
        called = {node.target.overloadpacket.__name__ for node in graph.nodes if node.op == "call_function"}
        slow = SLOW_IN_TRITON - {"reciprocal"} if dtype is torch.float32 else SLOW_IN_TRITON
        assert "exp2" in called and not called & (slow | {"exp"})


def test_special_values_and_tails_through_inductor() -> None:
    """Inductor does not reassociate operations that avoid rounding errors. One graph, in float32."""
    names = ("gelu", "gelu_tanh", "laplace", "silu", "softplus", "selu")
    x = torch.cat([special_values(torch.float32), torch.linspace(-100, 100, 1001)])
    inputs = [x.clone().requires_grad_() for _ in names]
    compiled = torch.compile(lambda *t: [getattr(jitact, name)(x) for name, x in zip(names, t, strict=True)], fullgraph=True)
    outputs = compiled(*inputs)
    gradients = torch.autograd.grad(outputs, inputs, [torch.ones_like(x)] * len(inputs))
    for name, y, dx in zip(names, outputs, gradients, strict=True):
        record = jitact.get(name).activation
        formula, params = Formula(record.source, fast_math=False), [default for _, default in record.params]
        assert_as_eager(y, formula.forward(x, *params), torch.finfo(torch.float32).tiny, 2, name)
        assert_as_eager(dx, formula.gradient(torch.ones_like(x), x, *params), 1.0, 2, f"{name}, gradient")


@pytest.mark.parametrize("of", ["functions", "modules"])
@pytest.mark.parametrize("kind", ["elementwise", "gated"])
def test_each_activation_has_recompilations_of_its_own(kind: str, of: str) -> None:
    """With one code object for all, the ninth would exceed the recompile limit, an error with fullgraph=True."""
    names = [*GATED, *PLAIN_IDS][: torch._dynamo.config.recompile_limit + 1]
    names = names if kind == "gated" else PLAIN_IDS[: len(names)]
    x = torch.randn(4, 8)
    torch._dynamo.reset()
    try:
        for name in names:
            made = getattr(jitact, name) if of == "functions" else jitact.get(name)()
            torch.testing.assert_close(torch.compile(made, fullgraph=True, backend="eager")(x), made(x))
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("name", ["relu", "silu", "sigmoid", "gelu+residual", "reglu"])
def test_gradients_have_the_strides_that_graphs_expect(name: str) -> None:
    """Those of the saved tensor, also where dy's elements lie in another order."""

    def step(x: Tensor, r: Tensor) -> Tensor:
        h, alone = x.view(6, 4).t() + r.view(4, 6), name.partition("+")[0]  # whose elements lie as those of its first term
        others = {"residual": torch.ones(6)} if alone != name else {}
        y = getattr(jitact, alone)(*[h] * (1 + (name in GATED)), **others)
        return y.reshape(-1)  # its gradient lies the other way; that of r is viewed

    leaves, dy = [torch.randn(24, requires_grad=True) for _ in range(2)], torch.randn(24)
    expected = torch.autograd.grad(step(*leaves), leaves, dy)
    torch._dynamo.reset()
    found = torch.autograd.grad(torch.compile(step, backend="aot_eager")(*leaves), leaves, dy)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("number", [np.float32, np.float64, np.int64], ids=lambda t: t.__name__)
def test_numbers_of_numpy(number: type) -> None:
    """A requirement of a float32 parameter breaks the graph, as the number is known only when the graph runs."""
    x, options = torch.randn(100), {"backend": "aot_eager"}
    whole = torch.compile(lambda x, number: jitact.leaky_relu(x, number), fullgraph=True, **options)
    torch.testing.assert_close(whole(x, number(2)), jitact.leaky_relu(x, 2.0))
    broken = torch.compile(lambda x, number: jitact.softplus(x, number), **options)
    torch.testing.assert_close(broken(x, number(2)), jitact.softplus(x, 2.0))
    with pytest.raises(TypeError, match="negative_slope must be a number"):
        torch.compile(lambda x, number: jitact.leaky_relu(x, number), **options)(x, np.bool_(True))


def test_few_compilations() -> None:
    """At most two for 20 shapes and 20 values of a parameter."""
    counter = CompileCounterWithBackend("inductor")

    @torch.compile(backend=counter, fullgraph=True)
    def function(x: Tensor, alpha: float) -> Tensor:
        return jitact.elu(x, alpha) * 2

    for k in range(20):
        x, alpha = torch.linspace(-3, 3, 8 * (k + 3)), 0.1 * (k + 1)
        torch.testing.assert_close(function(x, alpha), 2 * torch.where(x > 0, x, alpha * torch.expm1(x)))
    assert counter.frame_count <= 2


# Saved programs.


class Saved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gelu = nn.Linear(4, 4), jitact.get("gelu")("tanh")

    def forward(self, x: Tensor) -> Tensor:
        return jitact.elu(self.gelu(self.linear(x)), 0.5)


LOADED = """
import sys, torch, jitact
if sys.argv[2:]:
    jitact.load_operators(*sys.argv[2:])
x, expected = torch.load("tensors.pt")
program = torch.export.load(sys.argv[1]).module()
torch.testing.assert_close(program(x), expected)
program(x).sum().backward()
assert all(p.grad is not None for p in program.parameters())
"""


SLOW = pytest.mark.slow  # each starts processes that compile


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A saved program with trainable parameters, for any number of rows, and its expected result."""
    folder = tmp_path_factory.mktemp("saved")
    model, x = Saved(), torch.randn(5, 4)
    program = torch.export.export(model, (torch.randn(3, 4),), dynamic_shapes={"x": {0: torch.export.Dim("n")}})
    torch.export.save(program, folder / "program.pt2")
    torch.save((x, model(x).detach()), folder / "tensors.pt")
    return folder, x


def load_in_a_new_process(folder: Path, *names: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", LOADED, "program.pt2", *names]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)


@SLOW
def test_saved_program(saved: tuple[Path, Tensor]) -> None:
    done = load_in_a_new_process(saved[0], "gelu_tanh", "elu")
    assert done.returncode == 0, done.stderr[-3000:]


@SLOW
def test_saved_program_without_its_operators(saved: tuple[Path, Tensor]) -> None:
    """PyTorch's error names the missing operator."""
    done = load_in_a_new_process(saved[0], "gelu_tanh")
    assert done.returncode != 0 and re.search("jitact.*elu", done.stderr), done.stderr


PACKAGED = """
import sys, torch
if sys.argv[1:]:
    import jitact
    jitact.load_operators(*sys.argv[1:])
x, expected = torch.load("tensors.pt")
torch.testing.assert_close(torch._inductor.aoti_load_package("packaged.pt2")(x), expected)
"""


@SLOW
def test_package_of_aotinductor(tmp_path: Path) -> None:
    """For any number of rows. Operators that Inductor replaced need nothing to run; PyTorch reports others as missing."""
    model, x = nn.Sequential(Saved(), jitact.get("swiglu")(rounding="unfused")), torch.randn(5, 4)
    program = torch.export.export(model, (torch.randn(3, 4),), dynamic_shapes=({0: torch.export.Dim("n")},))
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "packaged.pt2"))
    torch.save((x, model(x).detach()), tmp_path / "tensors.pt")
    done, without = (
        subprocess.run([sys.executable, "-c", PACKAGED, *names], capture_output=True, text=True, timeout=300, cwd=tmp_path)
        for names in (["swiglu+unfused"], [])
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert without.returncode != 0 and "jitact::swiglu_unfused" in without.stderr, without.stderr


@SLOW
def test_onnx_has_standard_operators() -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    cube = "ELEMENTWISE T forward(T x) { return x * x * x; }"
    jitact.define("cube", source=f'#include "elementwise.cuh"\n{cube}\n')

    class Several(Saved):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return jitact.swiglu(y) + jitact.softplus(y, 2.0).sum() + jitact.cube(y).sum()

    model, x = Several(), torch.randn(5, 4)
    program = torch.onnx.export(model, (torch.randn(3, 4),), dynamo=True, dynamic_shapes=({0: torch.export.Dim("n")},))
    proto = program.model_proto
    assert {node.domain for node in proto.graph.node} <= {"", "ai.onnx"} and not proto.functions
    (y,) = onnx.reference.ReferenceEvaluator(proto).run(None, {proto.graph.input[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(x).detach())


@SLOW
def test_load_operators() -> None:
    jitact.load_operators("gelu+bias", jitact.get("softsign"), jitact.get("gelu")("tanh"), "gated_hardswish", "rrelu")
    jitact.load_operators(jitact.get("hardswish")(fast_math=True), "softmax")
    names = ["softsign", "softsign_residual", "gelu_tanh", "gelu_tanh_bias_dropout", "leaky_relu_bias"]
    names += ["hardswish_dropout_fast_math"]
    names += [f"gated_hardswish{rest}" for rest in ("", "_unfused", "_row_weight", "_unfused_row_weight")]
    assert [name for name in names if not hasattr(torch.ops.jitact, name)] == []
    with pytest.raises(KeyError, match="softsing"):
        jitact.load_operators("softsing")
    with pytest.raises(TypeError, match="fast_math"):
        jitact.load_operators("gelu", fast_math=1)


def test_operators_have_the_gradients_of_all_tensors() -> None:
    jitact.load_operators("prelu")
    x, weight = torch.randn(9, 3), torch.full((3,), 0.3, requires_grad=True)
    found = [f(x, weight) for f in (torch.ops.jitact.prelu, torch.nn.functional.prelu)]
    torch.testing.assert_close(*[torch.autograd.grad(y.square().sum(), weight)[0] for y in found])


def test_programs_hold_nothing_of_how_a_formula_is_found() -> None:
    """Which is done once for each activation, while it is traced."""
    bent = jitact.define("bent_exported", "(sqrt(x * x + 1) - 1) / 2 + x")
    program = torch.export.export(bent(), (torch.randn(4, 8),))
    found = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert len(found) == 1 and found[0].startswith("jitact.bent_exported_")  # and the definition's fingerprint
    torch.compile(program.module(), fullgraph=True, backend="eager")(torch.randn(4, 8))


def test_errors_of_compiled_calls_name_the_argument() -> None:
    with pytest.raises(Exception, match="aproximate"):
        torch.compile(lambda x: jitact.gelu(x, aproximate="tanh"), fullgraph=True)(torch.randn(4))
