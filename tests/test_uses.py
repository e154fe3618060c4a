"""Kernel files and expressions that use other activations: the compiled text, its key, its gradients; folders of them."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from building import forward
from common import PLAIN
from test_operands import operators
from torch import Tensor

import jitact
from jitact import kernels, registry
from jitact.compiling.formulas import Formula, Unreadable
from jitact.definitions.expression import ExpressionError
from jitact.kernels import KernelSource
from jitact.kernels.loader import slopes, uses
from jitact.kernels.loader.plan import make_plan
from jitact.records import Activation

pytest_plugins = ["building"]
INF, NAN = float("inf"), float("nan")
# One of several, by number, times the other element; all gradients are derived. The channel is a number to softcap.
MANY = """
#include "elementwise.cuh"
ELEMENTWISE T forward(T x, T up, Channel<T> c, Number<T> which) {
  if (which == 0) return silu_::forward(x) * up;
  if (which == 1) return gelu_::forward(x) * up;
  if (which == 2) return softcap_::forward(x, c) * up;
  if (which == 3) return leaky_relu_::forward(x, 0.25) * up;
  return gelu_::backward(up, x);
}
"""


@pytest.fixture(scope="module")
def many():
    return operators("many", MANY)


CALLS = {"silu": (0, ()), "gelu": (1, ()), "softcap": (2, (1.5,)), "leaky_relu": (3, (0.25,))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_used_functions_are_those_of_the_activation(many, name: str, dtype: torch.dtype, device: str) -> None:
    which, params = CALLS[name]
    x = torch.cat([torch.linspace(-150, 30, 2000), torch.tensor([INF, -INF, 0.0, -0.0, NAN])]).to(device, dtype)
    one, c = torch.ones_like(x), torch.full((1,), 1.5, device=device, dtype=dtype)
    info = torch.finfo(dtype)
    few = {"rtol": 8 * info.eps, "atol": info.tiny, "equal_nan": True}  # compilers may contract to FMA, or not
    torch.testing.assert_close(many("forward")(x, one, c, which), getattr(jitact, name)(x, *params), **few)
    slope = many("backward")(one, x, one, c, which, 0b001)[0]
    torch.testing.assert_close(slope, slope_of(getattr(jitact, name), x, *params), **few)


def slope_of(function, x: Tensor, *params: float) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(x, *params), x, torch.ones_like(x))[0]


def test_what_does_not_vary_has_no_part_in_a_slope(many, device: str) -> None:
    x, up = torch.tensor([2.0, INF, NAN, 1.0], device=device), torch.tensor([INF, 3.0, 2.0, NAN], device=device)
    c, dy = torch.tensor([1.5], device=device), torch.ones(4, device=device)
    dx, dup, _ = many("backward")(dy, x, up, c, 0, 0b011)
    silu = jitact.silu(x)
    torch.testing.assert_close(dup, silu, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(dx, slope_of(jitact.silu, x) * up, rtol=0, atol=0, equal_nan=True)


def test_a_number_of_a_used_file_may_vary(many, device: str) -> None:
    x, up = (
        torch.linspace(-4, 4, 50, dtype=torch.float64, device=device),
        torch.full((50,), 0.5, dtype=torch.float64, device=device),
    )
    c = torch.tensor([1.5], dtype=torch.float64, device=device)
    found = many("backward")(torch.ones_like(x), x, up, c, 2, 0b111)
    exact = [t.clone().requires_grad_() for t in (x, up, c)]
    expected = torch.autograd.grad((exact[2] * torch.tanh(exact[0] / exact[2]) * exact[1]).sum(), exact)
    for own, gradient in zip(found, expected, strict=True):
        torch.testing.assert_close(own, gradient, rtol=1e-12, atol=1e-12)


def test_a_used_backward(many) -> None:
    x, up = torch.linspace(-30, 5, 100), torch.full((100,), 2.0)
    assert torch.equal(many("forward")(x, up, torch.ones(1), 4), 2 * slope_of(jitact.gelu, x))


def test_formulas_of_files_that_use_others() -> None:
    """A derived gradient may be called; what has no derivative is refused at once; names do not tell the library's files."""
    text = "ELEMENTWISE T forward(T x) { return gelu_::backward(x, x); }"
    with pytest.raises(Unreadable, match="gelu_::backward is no function that is known"):
        Formula(KernelSource("slope", text, "<slope>"), False)
    with pytest.raises(Unreadable, match="it rounds on the way"):
        Formula(KernelSource.from_file("swiglu")._replace(unfused=True), False)
    x, dy = torch.linspace(-3, 3, 50), torch.ones(50)
    cube = KernelSource("cube", "ELEMENTWISE T forward(T x) { return x * x * x; }", "<cube>")
    text = "ELEMENTWISE T forward(T x) { return cube_::backward(x, x); } ELEMENTWISE T backward(T dy, T x) { return dy; }"
    formula = Formula(KernelSource("slope", text, "<slope>", given=(cube,)), False)
    torch.testing.assert_close(formula.forward(x), 3 * x**3)
    own = KernelSource("silu", "ELEMENTWISE T forward(T x) { return -x; }", "<own>")
    assert torch.equal(Formula(own, False).forward(x), -x) and torch.equal(Formula(own, False).gradient(dy, x), -dy)


def test_gelu_10_is_gelu_held() -> None:
    x = torch.linspace(-20, 20, 3000)
    assert torch.equal(jitact.gelu_10(x), jitact.gelu(x).clamp(max=10))
    assert torch.equal(slope_of(jitact.gelu_10, x), torch.where(x > 10, 0, slope_of(jitact.gelu, x)))


@pytest.mark.slow
def test_every_activation_in_an_expression() -> None:
    text = " + ".join(f"{i + 1} * {record.name}(x)" for i, record in enumerate(PLAIN))
    cls = jitact.define("all_of_them", text)
    x = torch.linspace(-7.03, 7.01, 301, dtype=torch.float64)
    calls = [record.reference for record in PLAIN]
    numbers = [tuple(value for _, value in record.params) for record in PLAIN]
    names = {record.name for record in PLAIN} & {"sigmoid", "tanh", "softplus"}  # functions of math.cuh

    def exact(x: Tensor) -> Tensor:
        return sum((i + 1) * call(x, *params) for i, (call, params) in enumerate(zip(calls, numbers, strict=True)))

    assert names == {"sigmoid", "tanh", "softplus"} and cls.activation.has_reference
    for function in (cls(), cls.activation.reference):
        assert torch.allclose(function(x), exact(x), rtol=1e-12) and torch.allclose(slope_of(function, x), slope_of(exact, x))


def test_a_definition_that_uses_one_that_uses_a_gate() -> None:
    """The headers that the innermost file includes are in front of all."""
    jitact.define("inner", "swiglu(gate, x)")
    jitact.define("outer", "inner(x, z) * 2 + inner(z, x)")
    x, z = (torch.randn(4, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    silu = torch.nn.functional.silu
    torch.testing.assert_close(jitact.outer(x, z), 2 * silu(z) * x + silu(x) * z)
    torch.autograd.gradgradcheck(jitact.outer, (x, z))


def test_calls_with_numbers() -> None:
    cls = jitact.define("calls", "softcap(x, c) + Swish(0.5) + leaky_relu(x, 0.2) * leaky_relu(x)", c=2.0)
    text = cls.activation.source.text
    for call in ("softcap_::forward(x, c_)", "silu_::forward(T(0.5))", "leaky_relu_::forward(x, 0.2)", "(x, 0.01)"):
        assert call in text
    assert cls.activation.formula.startswith("softcap(x, c) + Swish") and cls.activation.has_reference
    for expression, why in (
        ("prelu(x)", "prelu takes a value for each channel, which an expression cannot give it"),
        ("silu(x, 1)", r"silu takes \(x\), got 2 arguments"),
        ("silo(x)", "unknown function 'silo'; did you mean silu"),
        ("softcap(x, x)", "c of softcap is a number; it cannot be different for each element"),
        ("softcap(x, -1)", "softcap: needs c > 0, got c=-1"),
        ("softcap(x, 1, 2)", r"softcap takes \(x, c=30\), got 3 arguments"),
        ("silu_::forward(x)", "write the activation's name alone, as in silu"),
    ):
        with pytest.raises(ExpressionError, match=why):
            jitact.define("calls", expression)
    for body, why in (
        ("silo_::forward(x)", r"line 1: it uses silo_::, and there is no activation 'silo'; did you mean silu_\?"),
        ("xielu_::forward(x, x, x, x, x)", "xielu cannot be used by another kernel file"),
    ):
        with pytest.raises(ValueError, match=why):
            jitact.define("calls", source=f"ELEMENTWISE T forward(T x) {{ return {body}; }}")


def test_defaults_that_no_expression_can_contain() -> None:
    jitact.define("below", "x < a ? x : 2 * x", a=INF)
    message = "calls, forward: a of below is inf by default, which no expression can contain; give it a number, or a parameter"
    with pytest.raises(ValueError, match=message):
        jitact.define("calls", "below(x) * 3")
    calls = jitact.define("calls", "below(x, b) * 3", b=INF)
    x = torch.tensor([0.5, 2.0])
    assert torch.equal(calls()(x), 3 * x) and torch.equal(torch.func.vmap(calls())(x), 3 * x)


def test_what_is_used_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half, text = (f"ELEMENTWISE T forward(T x) {{ return {body}; }}\n" for body in ("x / 2", "half_::forward(x)"))
    used, other = (KernelSource("half", half.replace("2", by), "<half>") for by in "23")
    user = KernelSource("user", text, "<user>", given=(used,))
    again = KernelSource("again", text.replace("half_", "user_"), "<again>", given=(user,))
    changed = user._replace(given=(other,))
    for source, than in ((user, changed), (again, again._replace(given=(changed,)))):
        assert make_plan(source).sources != make_plan(than).sources
    assert again.full_text.index("namespace user_") < again.full_text.index("namespace half_") < again.full_text.index("<user>")
    library = KernelSource.from_file("gelu_10")
    assert library.headers()["gelu.cu"].resolve() == Path(kernels.__file__).resolve().with_name("gelu.cu")
    assert "gelu.cu" not in user.headers()
    own = (
        "namespace silu_ { ELEMENTWISE T forward(T x) { return x; } }\nELEMENTWISE T forward(T x) { return silu_::forward(x); }"
    )
    assert uses.names_used(own) == () and uses.names_used("// silu_::forward\nmish_ :: forward(x)") == ("mish",)


def test_folders_of_files_that_use_each_other(tmp_path: Path) -> None:
    jitact.define("second", "silu(x) + a", a=0.5)
    first = jitact.define("first", "second(x, 2) * 2")
    x = torch.linspace(-3, 3, 20)
    expected = first()(x)
    assert torch.allclose(expected, 2 * (torch.nn.functional.silu(x) + 2))
    written = [path.name for path in jitact.save_folder(tmp_path, "first")]
    assert sorted(written) == ["first.cu", "second.cu"]
    registry.unregister("first"), registry.unregister("second")
    loaded = jitact.load_folder(tmp_path)
    assert loaded["first"].activation.fingerprint == first.activation.fingerprint
    jitact.define("second", "x * 1000 + a", a=0.0)
    assert torch.equal(loaded["first"]()(x), expected), "what a folder uses is the folder's"
    (tmp_path / "second.cu").write_text("ELEMENTWISE T forward(T x) { return first_::forward(x); }\n")
    with pytest.raises(ValueError, match="first uses second uses first: an activation cannot use itself"):
        jitact.load_folder(tmp_path)


def test_a_name_that_the_library_gained_is_the_folders(tmp_path: Path) -> None:
    kernel = KernelSource("gained", "ELEMENTWISE T forward(T x) { return -x; }", "<gained>")
    gained = Activation("gained", "Gained", "-x", torch.neg, kernel=kernel, since="9.9")
    registry.register(gained)
    (tmp_path / "gained.cu").write_text("ELEMENTWISE T forward(T x) { return x / 4; }\n")
    (tmp_path / "user.cu").write_text("ELEMENTWISE T forward(T x) { return gained_::forward(x) * 2; }\n")
    with pytest.raises(ValueError, match="one of jitact's own"):
        jitact.define("gained", "x")
    with pytest.warns(UserWarning, match="'gained' names gained since jitact 9.9; here it stands for what the folder defines"):
        loaded = jitact.load_folder(tmp_path)
    assert jitact.get("gained") is loaded["gained"] and loaded["user"].activation.source.given[0].text.count("x / 4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jitact.load_folder(tmp_path)  # the name is a definition's now


def test_conditions_around_includes_are_kept() -> None:
    """Includes of a file that another one uses are moved to the front of both, if the preprocessor sees them at all."""
    text = '''#include "a.cuh"  // first
#ifdef __CUDACC__
#  include <b>
#if Y && \\
    Z
#else
#include "c (2).cuh"
#endif
int between;
#endif
/*
#include "in_a_comment.cuh"
*/
#if 0
#include "left_out.cuh"
#elif 1
#include "d.cuh"
#endif
#define OWN
#if defined(OWN)  // is not known in front
#ifdef __CUDACC__
#include "e.cuh"
#endif
#else
#include "f.cuh"
#endif
#ifdef __CUDACC__
int none;
#endif
#endif
#ifdef NOT_CLOSED
#include "g.cuh"'''
    before = ["#ifdef __CUDACC__", "#  include <b>", "#if Y && \\\n    Z", "#else", '#include "c (2).cuh"', "#endif", "#endif"]
    after = ["#ifdef __CUDACC__", '#include "e.cuh"', "#endif", '#include "f.cuh"', '#include "g.cuh"']
    assert uses.includes_of(text) == "\n".join(['#include "a.cuh"', *before, '#include "d.cuh"', *after])


HALF_PI = """#include "elementwise.cuh"
#ifdef NEVER
#include "not_there.cuh"
#endif
/*
#include "nor_there.cuh"
#define ELEMENTWISE nothing
*/
#ifndef M_PI
#define M_PI 3.0
#endif
#ifndef PARTS
#define PARTS 2
#endif
#define x0 5
ELEMENTWISE T forward(T x) { return x * T(M_PI) / PARTS; }
"""


def test_macros_of_others_outlive_a_file_that_would_define_them(quick: Path) -> None:
    """As M_PI, which is that of <cmath>; one that only the file has ends with it."""
    inner = KernelSource("half_pi", HALF_PI, "<half_pi>")
    text = """#include "elementwise.cuh"
#ifndef PARTS
#define PARTS 4
#endif
ELEMENTWISE T forward(T x) { const T x0 = T(M_PI) / PARTS; return half_pi_::forward(x) + x * x0; }
"""
    outer = KernelSource("with_pi", text, "<with_pi>", given=(inner,))
    torch.testing.assert_close(forward(kernels.load(outer), torch.ones(3)), torch.full([3], 0.75 * torch.pi))


def test_what_a_comment_says_has_no_effect_on_slopes(quick: Path) -> None:
    slope = slopes.slope_source(KernelSource("half_pi", HALF_PI, "<half_pi>"), from_output=False)
    torch.testing.assert_close(forward(kernels.load(slope), torch.ones(3)), torch.full([3], torch.pi / 2))
