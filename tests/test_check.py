"""jitact.check: it finds wrong kernels in every dtype, and passes correct ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from common import PLAIN, SLOW, slow_but

import jitact
from jitact.measuring import commands
from jitact.measuring.sampling import incoming, inputs, kinks

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)



def slip(expression: str, backward: str | None = None, **options) -> type:
    return jitact.define("slip", expression, backward, **options)


def test_weights_of_several_values_are_refused() -> None:
    with pytest.raises(ValueError, match="check: prelu is checked with a weight of one value, got a module with 3"):
        jitact.check(torch.nn.PReLU(3))


@pytest.mark.parametrize(("reference", "got"), [
    (lambda x: None, "None"), (lambda x: x.sum(), r"one of shape \(\)"), (lambda x: (x, x), "a tuple"),
])  # fmt: skip
def test_a_reference_that_returns_something_else_is_refused(reference: Callable, got: str) -> None:
    wrong = slip(None, source='#include "elementwise.cuh"\nELEMENTWISE T forward(T x) { return 2 * x; }', reference=reference)
    with pytest.raises(ValueError, match=rf"check: the reference of slip returns .* of the shape of x, \(3,\); got {got}$"):
        jitact.check(wrong)


@pytest.mark.parametrize(("operands", "reference"), [
    ("T x", lambda x: x.mul_(2)),
    ("T x", lambda x: 2 * x.view(-1).relu_()),
    ("T x, T other", lambda x, other: other.copy_(2 * x)),
])  # fmt: skip
def test_a_reference_that_works_in_place_is_refused(operands: str, reference: Callable) -> None:
    wrong = slip(None, source=f"ELEMENTWISE T forward({operands}) {{ return 2 * x; }}", reference=reference)
    with pytest.raises(ValueError, match=r"check: the reference of slip changes its arguments in place; it must return a new"):
        jitact.check(wrong)
    right = slip(None, source="ELEMENTWISE T forward(T x) { return 2 * x; }", reference=lambda x: (2 * x).add_(0))
    assert jitact.check(right, dtypes=[torch.bfloat16])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_grad_mode_of_the_caller_does_not_matter(mode: Callable) -> None:
    with mode():
        for name in ("relu", "swiglu", "softmax"):
            assert jitact.check(name, dtypes=[torch.bfloat16], device="cpu")


def test_rows_are_checked_up_to_a_number_that_the_dtype_lacks() -> None:
    assert jitact.check("softmax", low=-1e300, high=1e300, dtypes=[torch.float16])


FROM_OUTPUT = {
    "the sign": ("sigmoid(x)", "-dy * y * (1 - y)"),
    "a forgotten factor": ("tanh(x)", "dy * (1 - y)"),
    "a percent too much": ("tanh(x)", "1.01 * dy * (1 - y) * (1 + y)"),
    "the slope of another": ("sigmoid(x)", "dy * (1 - y) * (1 + y)"),
    "of a function with two x to a y": ("x * x", "2 * dy * sqrt(y)"),
    "only where it saturates": ("tanh(x)", "abs(y) > 0.9999 ? dy : dy * (1 - y) * (1 + y)"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, SLOW(torch.float64), SLOW(torch.float16)], ids=str)
@pytest.mark.parametrize("fault", slow_but(FROM_OUTPUT, ["the sign", "a percent too much", "only where it saturates"]))
def test_a_wrong_gradient_from_the_output_shows_in_every_dtype(fault: str, dtype: torch.dtype) -> None:
    expression, backward = FROM_OUTPUT[fault]
    result = jitact.check(slip(expression, backward_from_output=backward), dtypes=[dtype])
    verdicts = {line.save: line.passed for line in result.lines}
    assert verdicts == {"input": True, "output": False}


IN_ONE_TYPE = """
#include "elementwise.cuh"
ELEMENTWISE T forward(T x) { return tanh(x); }
ELEMENTWISE T backward_from_output(T dy, T y) { return (sizeof(T) == 4 ? -dy : dy) * ((1 - y) * (1 + y)); }
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_that_is_wrong_in_one_type_only(dtype: torch.dtype) -> None:
    assert not jitact.check(jitact.define("slip", source=IN_ONE_TYPE), dtypes=[dtype])


SLIPS = {
    "linear in dy up to 1 only": ("x * x", "2 * clamp(dy, -1, 1) * x"),
    "linear in dy up to 1000 only": ("x * x", "2 * clamp(dy, -1000, 1000) * x"),
    "a part that does not depend on dy": ("sin(x)", "dy * cos(x) + 0.001"),
    "for negative dy": ("sin(x)", "abs(dy) * cos(x)"),
    "within 1e-4 of 0": ("sin(x)", "abs(x) < 1e-4 ? 0 : dy * cos(x)"),
    "within 1e-4 of 0, where the slope is small": ("x * x * x", "abs(x) < 1e-4 ? 0 : dy * 3 * x * x"),
    "within 1e-30 of 0": ("sin(x)", "abs(x) < 1e-30 ? 0 : dy * cos(x)"),
    "within 1e-4 of a kink": ("x > 1.2345 ? x : 1.2345", "x > 1.2344 ? dy : 0"),
    "at a kink's very side": ("x > 3 ? x : 0", "x >= 2.9999995 ? dy : 0"),
    "beyond 100": ("tanh(x)", "abs(x) > 100 ? dy : dy * (1 - tanh(x)) * (1 + tanh(x))"),
    "beyond 1e30": ("tanh(x)", "abs(x) > 1e30 ? dy : dy * (1 - tanh(x)) * (1 + tanh(x))"),
}


# One of each kind; the others by -m slow.
OFTEN = ("linear in dy up to 1000 only", "a part that does not depend on dy", "within 1e-30 of 0", "at a kink's very side",
         "beyond 1e30")  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("fault", slow_but(SLIPS, OFTEN))
def test_a_slip_anywhere_shows(fault: str, dtype: torch.dtype) -> None:
    assert not jitact.check(slip(*SLIPS[fault]), dtypes=[dtype])


def test_a_forward_that_fails_far_out_shows() -> None:
    wrong = slip("x * sigmoid(x) + (x > 1e30 ? 1e37 : 0)", reference=torch.nn.functional.silu)
    assert not jitact.check(wrong, dtypes=[torch.float32]) and jitact.check(wrong, high=1e29, dtypes=[torch.float32])


@pytest.mark.parametrize("name", slow_but([record.name for record in PLAIN]))
def test_the_library_passes(name: str, device: str) -> None:
    dtypes = DTYPES if name in ("softcap", "softplus") else [torch.float32, torch.bfloat16]
    assert jitact.check(name, dtypes=dtypes, device=device)


RIGHT = {
    "decreasing": ("-softplus(x)", "dy * -(1 - exp(y))", {}),
    "a plateau on both sides": ("clamp(x, -1, 1)", "y > -1 && y < 1 ? dy : 0", {"reference": torch.nn.functional.hardtanh}),
    "a plateau that no 16-bit number has": ("x > 0 ? x : 0.7 * expm1(x)", "y > 0 ? dy : dy * (y + 0.7)", {}),
    "an infinite slope": ("x > 0 ? sqrt(x) : 0", "y > 0 ? dy / (2 * y) : 0", {}),
    "a falling one": ("-3 * tanh(x)", "dy * -3 * (1 - y / 3) * (1 + y / 3)", {}),
    "without a bound": ("exp(x)", "dy * y", {}),
}


@pytest.mark.parametrize("case", slow_but(RIGHT, ["a plateau that no 16-bit number has", "an infinite slope"]))
def test_a_right_gradient_from_the_output_passes(case: str) -> None:
    expression, backward, options = RIGHT[case]
    assert jitact.check(slip(expression, backward_from_output=backward, **options))


@pytest.mark.parametrize("expression", ["x > 0", "x > 0 ? 1 : -1", "(x > t) * w"])
def test_what_conditions_do_not_vary_with_has_a_gradient_of_0(expression: str) -> None:
    assert jitact.check(slip(expression), dtypes=[torch.float32])
    assert not jitact.check(slip("x > 0", "dy"), dtypes=[torch.float32])


def test_an_overflow_on_the_way_is_told_from_a_slip() -> None:
    """For large inputs, where float64 shows that the formula is correct; an overflow at small inputs is wrong."""
    result = jitact.check(slip("x * x / (1 + x * x)"), dtypes=[torch.float32, torch.float16])
    wide, half = result.lines
    assert result and 1e19 < wide.forward.overflows < 2e19 and "but overflows from |x| = 1.8e+19" in wide.verdict
    assert half.forward.overflows == math.inf and half.verdict == "pass"
    assert not jitact.check(slip("log(1 + exp(x))"), dtypes=[torch.float32])


def test_few_values_of_x_are_checked_with_many_of_the_others() -> None:
    product = jitact.define("product_up_to_2", "x * z", reference=lambda x, z: x * z * (1 + (z > 2)))
    assert not jitact.check(product, low=0, high=0, dtypes=[torch.bfloat16])


def test_only_what_the_parameters_allow_is_checked(capsys: pytest.CaptureFixture) -> None:
    result = jitact.check(jitact.get("softplus")(threshold=2.0), dtypes=[torch.float32])
    assert result and [line.save for line in result.lines] == ["input"]
    assert 'not looked at:' in capsys.readouterr().out and 'save="output", which these parameters do not allow' in result.unseen
    assert jitact.check(jitact.get("elu")(alpha=-1.0), dtypes=[torch.float32])


def test_what_was_not_looked_at_is_said() -> None:
    few = jitact.check("hardtanh", dtypes=[torch.float16], device="cpu").unseen
    assert few == "infinite and NaN x or dy; second derivatives; in place; fast_math; other parameters; the GPU"
    assert "a sample" in jitact.check("relu", dtypes=[torch.float32]).unseen
    assert "gradients of the weights" in jitact.check("prelu", dtypes=[torch.float16]).unseen
    assert "random slopes" in jitact.check("rrelu", dtypes=[torch.float16]).unseen
    assert "at kinks or beyond the range" in jitact.check("relu2", dtypes=[torch.float16]).unseen  # y overflows


@pytest.mark.parametrize("name", ["gelu", "relu", SLOW("sigmoid"), SLOW("prelu"), SLOW("rrelu")])
def test_a_bias_is_part_of_what_is_checked(name: str) -> None:
    result = jitact.check(jitact.get(name)(bias=64, dropout=0.1), dtypes=[torch.float32, torch.bfloat16], device="cpu")
    assert result and result.title.startswith(f"{'leaky_relu' if name == 'rrelu' else name}+bias")
    assert "dropout, which is for training" in result.unseen and "sums over channels" in result.unseen
    assert "bias = " in result.lines[0].gradient.at and "do not allow" not in result.unseen


def test_a_wrong_gradient_beside_a_bias_shows() -> None:
    module = slip("tanh(x)", "2 * dy * (1 - tanh(x)) * (1 + tanh(x))")(bias=3)
    result = jitact.check(module, dtypes=[torch.float32], device="cpu")
    assert not result and "slip+bias" in result.title and result.lines[0].gradient.by in ("x", "bias")
    xielu = jitact.check(jitact.get("xielu")(bias=3, dtype=torch.float32), dtypes=[torch.float32], device="cpu")
    assert xielu and xielu.title.startswith("xielu+bias: ") and xielu.lines[0].gradient.at.count("bias = ") == 1


@pytest.mark.parametrize(("name", "title", "unseen"), [
    ("gelu+residual", "gelu+residual: ", "most inputs"),
    SLOW("gelu+dropout", "gelu: ", "dropout, which is for training"),
    ("prelu+bias", "prelu+bias: ", "sums over channels"),
    SLOW("GELU+dropout+bias", "gelu+bias: ", "dropout, which is for training"),
    SLOW("rrelu+bias+residual", "leaky_relu+bias+residual(", "sums over channels"),
    SLOW("xielu+bias+residual", "xielu+bias+residual: ", "gradients of the weights"),
    SLOW("swiglu+row_weight", "swiglu+row_weight: ", "sums over rows"),
])  # fmt: skip
def test_names_with_what_stands_around(name: str, title: str, unseen: str) -> None:
    """In the notation of ``jitact build``."""
    result = jitact.check(name, dtypes=[torch.float32, torch.bfloat16], device="cpu")
    assert result and result.title.startswith(title) and unseen in result.unseen


def test_a_wrong_gradient_beside_a_residual_shows() -> None:
    slip("tanh(x)", "2 * dy * (1 - tanh(x)) * (1 + tanh(x))")
    result = jitact.check("slip+residual", dtypes=[torch.float32], device="cpu")
    assert not result and result.title.startswith("slip+residual") and "residual = " in result.lines[0].gradient.at


@pytest.mark.parametrize(("name", "error", "message"), [
    ("gelu+norm", ValueError, "'norm' cannot be fused with an activation; bias, dropout, residual can"),
    ("gelu+bias+bias", ValueError, r"'gelu\+bias\+bias': 'bias' can be fused once"),
    ("swiglu+bias", ValueError, "'bias' cannot be fused with a gated activation; row_weight, unfused can"),
    ("gleu+bias", KeyError, "no activation named 'gleu': did you mean"),
    ("softmax+bias", KeyError, "'softmax' works on rows"),
    ("swiglu+row_weight+unfused", ValueError, r"rounds on the way, .* check 'swiglu\+row_weight'"),
])  # fmt: skip
def test_names_that_cannot_be_checked(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        jitact.check(name)


def test_the_command_takes_them_too(capsys: pytest.CaptureFixture) -> None:
    assert commands.main(["check", "ReLU+residual+bias", "--dtype", "fp16", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("relu+bias+residual: ")
    with pytest.raises(SystemExit, match="2"):
        commands.main(["check", "relu+norm"])
    assert "'norm' cannot be fused with an activation" in capsys.readouterr().err


def test_the_table_is_printed_once(capsys: pytest.CaptureFixture) -> None:
    result = jitact.check("relu", dtypes=[torch.float16])
    print(result)
    table, line = capsys.readouterr().out.rstrip("\n").rsplit("\n", 1)
    assert table == result.table and line == "<check of relu: max(x, 0): passed>" == repr(result)


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"dtypes": [torch.int32]}, TypeError, r"check: dtypes may be torch.float32, .*bfloat16, got torch\.int32"),
    ({"dtypes": ["float32"]}, TypeError, r"check: dtypes may be .*, got 'float32'"),
    ({"dtypes": torch.float32}, TypeError, r"check: dtypes must be a list, such as \[torch.float32\], got torch\.float32"),
    ({"dtypes": []}, ValueError, r"check: there are no dtypes to check; choose from torch.float32, "),
    ({"low": 2, "high": 1}, ValueError, r"check: needs low <= high, got low=2, high=1"),
    ({"low": math.nan}, ValueError, r"check: needs low <= high, got low=nan"),
    ({"low": "0"}, TypeError, r"check: low must be a number, got '0'"),
    ({"high": torch.ones(2)}, TypeError, r"check: high must be a number, got "),
    ({"device": "mps"}, ValueError, r"device must be 'cpu' or a GPU, as 'cuda:0', of which PyTorch sees \d+; got 'mps'"),
    ({"device": "xyz"}, ValueError, r"device must be 'cpu' or a GPU, .*; got 'xyz'"),
    ({"device": "cuda:99"}, ValueError, r"device must be .*; got 'cuda:99'"),
    ({"low": 1e6, "dtypes": [torch.float16]}, ValueError, r"check: there is no float16 from low=1e\+06 to high=inf"),
])  # fmt: skip
def test_bad_options(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        jitact.check("relu", **options)


@pytest.mark.parametrize(("low", "high"), [(-3.0, 5.0), (1e-9, 2e-9), (1e30, 2e30), (-math.inf, -1e20), (2.0, 2.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_inputs_keep_to_the_range(dtype: torch.dtype, low: float, high: float) -> None:
    x = inputs(dtype, low, high, [1.0], torch.device("cpu"))
    assert x.numel() and x.dtype is dtype and low <= x.min() and x.max() <= high and (x.diff() >= 0).all()
    assert low == high or x.unique().numel() > 30_000


def test_inputs_are_near_0_near_kinks_and_far_out() -> None:
    for dtype, small, large in ((torch.float32, 1e-30, 1e30), (torch.float64, 1e-250, 1e250)):
        x = inputs(dtype, -math.inf, math.inf, [1.2345], torch.device("cpu"))
        assert x.isfinite().all() and (x.abs() > large).sum() > 1000 and (x.abs() < small).sum() > 1000
        kink = torch.tensor(1.2345, dtype=dtype)
        for beside in (kink, kink.nextafter(kink + 1), kink.nextafter(kink - 1), -kink):
            assert (x == beside).any()


def test_kinks_are_numbers_in_the_text_and_parameters() -> None:
    text = '#include "x17.cuh"\n// 99\n/* 98\n97 */ T f2(T x) { return x > 1.5 ? 2e-3 * x : x1 + 4; }'
    assert kinks(text, (3.0, -6.0, math.inf)) == [3.0, 6.0, 0.5, 2.0, 1.5, 2e-3, 4.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_incoming_gradients_are_of_both_signs_and_all_sizes(dtype: torch.dtype) -> None:
    slope = torch.linspace(-2, 2, 10_000, dtype=torch.float64)
    dy = incoming(slope, dtype, 1.0).double()
    top = torch.finfo(dtype).max
    assert (dy > 0).any() and (dy < 0).any() and dy.abs().min() < 0.1 and dy.abs().max() > 100
    assert dy.abs().unique().numel() > 500
    assert (dy * slope).abs().max() < top / 3 and (incoming(torch.full_like(slope, top), dtype, 1.0).abs() == 1).all()
