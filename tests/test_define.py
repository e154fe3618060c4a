"""Activations that users define: expressions, kernel files, folders, checks."""

from __future__ import annotations

import copy
import math
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import jitact
from jitact.definitions import Definition
from jitact.expression import FUNCTIONS, Expression, ExpressionError
from jitact.extract import declared
from jitact.kernels import BuildError
from jitact.kernels.errors import explain

pytestmark = pytest.mark.usefixtures("only_here")
X = torch.linspace(-3, 3, 61, dtype=torch.float64)
WITH_HELPER = """#include "elementwise.cuh"

ELEMENTWISE T size(T x, T a) { return 1 + a * abs(x); }

ELEMENTWISE T forward(T x, T a) {
  return x / size(x, a);
}
"""


def gradient(f, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x).sum(), x)[0]


# Expressions.


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("x * sin(x)", "x * torch.sin(x)"),
        ("x > 0 ? x : a * expm1(x)", "torch.where(x > 0, x, a * torch.expm1(x))"),
        ("0.5 * x * (1 + erf(x / sqrt(2)))", "0.5 * x * (1 + torch.erf(x / math.sqrt(2)))"),
        ("sqrt(2 / pi) * x", "math.sqrt(2 / math.pi) * x"),
        ("x > 0 && !(x > 1) || x < -a ? 1 : 0", "torch.where(((x > 0) & (~(x > 1))) | (x < -a), torch.full_like(x, 1), 0)"),
        ("max(x, 0)", "maximum(x, 0)"),
        ("max(0, x)", "maximum(torch.full_like(x, 0), x)"),
        ("a > 0 ? x : 0.1", "x if a > 0 else torch.full_like(x, 0.1)"),
        ("-x - -2 / x", "-x - -2 / x"),
        ("x * (x > 0)", "x * (x > 0).to(x.dtype)"),
        ("1", "torch.full_like(x, 1)"),
    ],
)
def test_expression_in_python(text: str, python: str) -> None:
    expression = Expression(text, ["x"], ["a"])
    assert expression.python == python
    assert expression(X, 0.5).shape == X.shape and expression(X, 0.5).dtype == X.dtype


@pytest.mark.parametrize(
    ("text", "message", "marked"),
    [
        ("x * sine(x)", "unknown function 'sine'; did you mean sin", "sine"),
        ("x * b", "unknown name 'b'", "b"),
        ("x ** 2", "write pow(a, b)", "**"),
        ("x ^ 2", "write pow(a, b)", "^"),
        ("1 / 2 * x", "a quotient of whole numbers is a whole number in C++", "1 / 2"),
        ("x * ((x > 1) / 2)", "a quotient of whole numbers is a whole number in C++", "(x > 1) / 2"),
        ("x * ((x > 1 ? 1 : 0) / 2)", "a quotient of whole numbers", "(x > 1 ? 1 : 0) / 2"),
        ("x * min(x > 1, 2)", "min of comparisons and numbers alone", "min(x > 1, 2)"),
        ("x * exp(x > 1 ? 1 : 0)", "exp of comparisons and numbers alone", "exp(x > 1 ? 1 : 0)"),
        ("x * 2.0f", "a number has no suffix", "2.0f"),
        ("math.sin(x)", "write the function's name alone", "."),
        ("x if x > 0 else 0", "write condition ? a : b", "if"),
        ("0 < x < 1", "comparisons do not chain", "0 < x < 1"),
        ("x ? 1 : 2", "expected a comparison", "x"),
        ("min(x)", "min takes 2 arguments, got 1", "min(x)"),
        ("x + exp", "exp is a function", "exp"),
        ("sqrt(-1) * x", "is no number", "sqrt(-1)"),
        ("sigmoid(2) * x", "sigmoid of numbers alone", "sigmoid(2)"),
        ("x; system(0)", "an expression has no semicolon", ";"),
        ("x\n + @", "found '@'", "@"),
    ],
)
def test_expression_errors_point_at_the_place(text: str, message: str, marked: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        jitact.define("swoosh", text)
    told, line, caret = str(caught.value).split("\n")
    assert told.startswith("swoosh, forward: ") and message in told
    assert line[caret.index("^") : caret.rindex("^") + 1] == marked


@pytest.mark.parametrize("text", ["(x", "x +", "", "x x", "x > 0 ? x", "tanh(x"])
def test_unfinished_expressions(text: str) -> None:
    with pytest.raises(ExpressionError):
        Expression(text, ["x"])


def test_the_headers_have_every_function() -> None:
    assert set(FUNCTIONS) - declared() == set()


def test_every_function_and_its_derived_gradient() -> None:
    calls = [f"{name}({', '.join(['x', '0.4', '0.9'][: function.arity])})" for name, function in FUNCTIONS.items()]
    calls = [call.replace("(x)", "(x + 1.5)") if call.startswith("acosh") else call for call in calls]
    weighted = [f"{i + 1} * {call}" for i, call in enumerate(sorted(calls))]
    cls = jitact.define("everything", " + ".join(weighted))
    x = torch.linspace(0.05, 0.85, 50, dtype=torch.float64)
    reference = cls.activation.reference
    assert torch.allclose(cls()(x), reference(x), rtol=1e-12)
    assert torch.allclose(gradient(cls(), x), gradient(reference, x), rtol=1e-9)


# Definitions.


def test_derived_backward_of_every_order() -> None:
    cls = jitact.define("swoosh", "x * sin(x)")
    assert jitact.get("Swoosh") is cls and cls.__name__ == "Swoosh"
    assert torch.allclose(gradient(jitact.swoosh, X), X.sin() + X * X.cos())
    x = X.detach().requires_grad_()
    assert torch.autograd.gradgradcheck(cls(), x)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.allclose(cls()(X.to(dtype)).double(), X * X.sin(), atol=0.03)


def test_parameters_and_gradient_from_the_output() -> None:
    cls = jitact.define(
        "my_elu",
        "x > 0 ? x : a * expm1(x)",
        "x > 0 ? dy : dy * a * exp(x)",
        backward_from_output="y > 0 ? dy : dy * (y + a)",
        a=1.0,
    )
    assert cls.activation.saves == ("input", "output") and repr(cls(a=0.5)) == "MyElu(a=0.5)"
    x = (X + 0.013).requires_grad_()
    for save in cls.activation.saves:
        assert torch.allclose(cls(0.5, save=save)(x), torch.nn.functional.elu(x, 0.5))
        assert torch.autograd.gradcheck(cls(0.5, save=save), x) and torch.autograd.gradgradcheck(cls(0.5, save=save), x)
    far = torch.tensor([800.0], dtype=torch.float64)  # the branch not taken overflows
    assert gradient(lambda x: gradient_of(cls(), x), far) == 0


def gradient_of(f, x: Tensor) -> Tensor:
    return torch.autograd.grad(f(x).sum(), x, create_graph=True)[0]


def test_kernel_file_and_its_header() -> None:
    cls = jitact.define("soft", source=WITH_HELPER, a=2.0, formula="x / (1 + a |x|)")
    assert cls.activation.params == (("a", 2.0),) and not cls.activation.has_reference
    assert torch.allclose(cls()(X), X / (1 + 2 * X.abs()))
    assert torch.autograd.gradgradcheck(cls(), (X + 0.013).requires_grad_())
    headed = "// parameters: a = 2\n// keeps: input\n// formula: x / (1 + a |x|)\n" + WITH_HELPER
    assert jitact.define("soft", source=headed).activation.formula == "x / (1 + a |x|)"
    bits = Path(jitact.kernels.__file__).with_name("relu.cu").read_text()
    assert jitact.define("my_relu", source=bits).activation.saves == ("bit", "input")


@pytest.mark.parametrize(
    ("source", "params", "message"),
    [
        ("int x;", {}, "defines no function ELEMENTWISE T forward"),
        (WITH_HELPER, {}, "forward's parameters are a, those with a default none"),
        (WITH_HELPER, {"a": 1.0, "b": 2.0}, "forward's parameters are a, those with a default a, b"),
        ("ELEMENTWISE T forward(float x) { return x; }", {}, "line 1: forward must be declared as ELEMENTWISE T forward"),
        ("// parameters: a = much\n" + WITH_HELPER, {}, "'a = much' in the file's header"),
        ("// keeps: output\n" + WITH_HELPER, {"a": 1.0}, "backward cannot keep 'output'"),
        (WITH_HELPER + "ELEMENTWISE T backward(T dy, T x) { return dy; }", {"a": 1.0}, "line 8: backward takes no parameters"),
    ],
)
def test_kernel_files_that_will_not_do(source: str, params: dict, message: str) -> None:
    with pytest.raises(ValueError, match=r"^soft: ") as caught:
        jitact.define("soft", source=source, **params)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["relu", "ReLU", "swish", "define", "names", "a b", "class", "_x", "é"])
def test_names_that_will_not_do(name: str) -> None:
    with pytest.raises(ValueError, match=r"name|cannot be called"):
        jitact.define(name, "x")


@pytest.mark.parametrize("param", ["int", "exp", "x", "save", "dy", "pi", "lambda"])
def test_parameters_that_will_not_do(param: str) -> None:
    with pytest.raises(ValueError, match="a parameter cannot be called"):
        jitact.define("swoosh", "x", **{param: 1.0})
    with pytest.raises(TypeError, match="the default of a must be a number"):
        jitact.define("swoosh", "a * x", a="1")


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(TypeError, match="one of the two"):
        jitact.define("swoosh")
    with pytest.raises(TypeError, match="leave out backward"):
        jitact.define("swoosh", source=WITH_HELPER, backward="dy")
    jitact.define("my_act", "x")
    with pytest.raises(ValueError, match="another spelling of 'my_act'"):
        jitact.define("myact", "x")


def test_compiler_errors_name_the_line() -> None:
    cls = jitact.define("wrong", source=WITH_HELPER.replace("abs(x)", "absolute(x)"), a=1.0)
    with pytest.raises(BuildError) as raised:
        cls()(X)
    first, error, line, mark, log = str(raised.value).splitlines()
    assert first == "wrong does not compile" and log.startswith("full log: ")
    assert re.match(r"<wrong>:3:55: error: .*absolute", error)
    assert line == "    3 | ELEMENTWISE T size(T x, T a) { return 1 + a * absolute(x); }"
    assert mark.index("^") == line.index("(x);") and "~" * len("absolute") + "^" in mark


def test_compiler_errors_of_files_and_gradients(tmp_path: Path) -> None:
    (tmp_path / "wrong.cu").write_text("ELEMENTWISE T forward(T x) {\n\treturn x +* 2;\n}\n")
    jitact.load_folder(tmp_path)
    with pytest.raises(BuildError, match=re.escape(f"{tmp_path}/wrong.cu:2:")) as raised:
        jitact.get("wrong")()(X)
    assert re.search(r"\n    2 | +return x \+\* 2;\n      \| +.*\^", str(raised.value))


def test_errors_without_an_excerpt_show_the_line() -> None:
    source = "a\n\tb c\n"
    shown = [
        ("k.cu:2:9: error: what", "    2 |         b c\n      |         ^"),
        ("k.cu(2): error: what", "    2 |         b c\nthe log"),  # nvcc tells no column
        ("k.cu:3:1: error: past the end", "error: past the end\nthe log"),
        ("other.cuh:1:1: error: elsewhere", "error: elsewhere\nthe log"),
    ]
    for output, expected in shown:
        assert expected in str(explain("k", output, "k.cu", None, source)), output


def test_defining_again_replaces() -> None:
    old = jitact.define("swoosh", "x * sin(x)")
    module = old()
    new = jitact.define("swoosh", "x * cos(x)")
    assert jitact.get("swoosh") is new and new is not old
    assert torch.allclose(module(X), X * X.sin()) and torch.allclose(jitact.swoosh(X), X * X.cos())
    assert type(pickle.loads(pickle.dumps(new()))) is new
    assert type(copy.deepcopy(new())) is new
    model = copy.deepcopy(torch.nn.Sequential(module, module))
    assert type(model[0]) is old and model[1] is model[0] and torch.equal(model[0](X), module(X))


def test_compiled_by_torch() -> None:
    cls = jitact.define("swoosh", "x * sin(x)")
    compiled = torch.compile(cls(), fullgraph=True, backend="aot_eager")
    assert torch.allclose(gradient(compiled, X), X.sin() + X * X.cos())


# Folders.


def test_folders(tmp_path: Path) -> None:
    first = jitact.define("snake2", "x + pow(sin(a * x), 2) / a", saves=["input"], formula="x + sin(a x)^2 / a", a=2.5)
    second = jitact.define("soft", source=WITH_HELPER, a=2.0)
    third = jitact.define("my_elu", "x > 0 ? x : expm1(x)", backward_from_output="y > 0 ? dy : dy * (y + 1)", saves=["output"])
    paths = jitact.save_folder(tmp_path)
    assert sorted(path.name for path in paths) == ["my_elu.cu", "snake2.cu", "soft.cu"]
    assert (
        paths[0].read_text().startswith("// activation: snake2\n// parameters: a = 2.5\n// keeps: input\n// formula: x + sin")
    )
    loaded = jitact.load_folder(tmp_path)
    for old in (first, second, third):
        new = loaded[old.activation.name]
        assert jitact.get(old.activation.name) is new is not old
        for field in ("params", "saves", "formula", "functions", "has_reference"):
            assert getattr(new.activation, field) == getattr(old.activation, field)
    assert torch.allclose(loaded["snake2"](a=1.5)(X), X + (1.5 * X).sin() ** 2 / 1.5)
    jitact.save_folder(tmp_path / "one", ["soft"])
    text = (tmp_path / "one" / "soft.cu").read_text()
    assert text == (tmp_path / "soft.cu").read_text() and text.count("// parameters") == 1


def test_folders_that_will_not_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        jitact.load_folder(tmp_path / "none")
    (tmp_path / "a.cu").write_text("ELEMENTWISE T forward(T x) { return x; }\n")
    (tmp_path / "b.cu").write_text("// activation: relu\nELEMENTWISE T forward(T x) { return x; }\n")
    with pytest.raises(ValueError, match=r"b\.cu: 'relu' names relu"):
        jitact.load_folder(tmp_path)
    assert "a" not in jitact.names()
    with pytest.raises(ValueError, match="one of jitact's own"):
        jitact.save_folder(tmp_path, ["relu"])


# Checks.


def test_check_passes(capsys: pytest.CaptureFixture) -> None:
    result = jitact.check(jitact.define("swoosh", "x * sin(x)"))
    out = capsys.readouterr().out
    assert result and len(result.rows) == 4 and out.count(" pass") == 4 and "against PyTorch" in out
    assert jitact.check("softsign", dtypes=[torch.bfloat16])
    assert "gelu_tanh" in jitact.check(jitact.get("gelu")("tanh"), dtypes=[torch.float64]).title
    assert jitact.check(jitact.get("prelu")(init=0.7), dtypes=[torch.float32])
    assert len(jitact.check(jitact.get("relu")(), low=-math.inf, high=math.inf, dtypes=[torch.float16]).rows) == 2


@pytest.mark.parametrize(
    ("backward", "why"),
    [
        ("dy * (sin(x) - x * cos(x))", "a sign"),
        ("dy * sin(x) + x * cos(x)", "not linear in dy"),
        ("dy * (sin(x) + 1.001 * x * cos(x))", "a tenth of a percent"),
    ],
)
def test_check_rejects(backward: str, why: str, capsys: pytest.CaptureFixture) -> None:
    result = jitact.check(jitact.define("swoosh", "x * sin(x)", backward), dtypes=[torch.float32])
    assert not result, why
    out = capsys.readouterr().out
    assert "FAIL" in out and "gradient at x = " in out and "inputs are wrong" in out


def test_check_rejects_a_wrong_forward() -> None:
    assert not jitact.check(jitact.define("swoosh", "x * sin(x)", reference=lambda x: x * torch.cos(x)), dtypes=[torch.float64])


def test_check_without_a_reference(capsys: pytest.CaptureFixture) -> None:
    assert jitact.check(jitact.define("soft", source=WITH_HELPER, a=2.0))
    assert "finite differences" in capsys.readouterr().out
    wrong = WITH_HELPER + "\nELEMENTWISE T backward(T dy, T x, T a) { return dy / size(x, a); }\n"
    assert not jitact.check(jitact.define("soft", source=wrong, a=2.0), dtypes=[torch.float64])


def test_check_tells_lost_digits(capsys: pytest.CaptureFixture) -> None:
    assert jitact.check(jitact.define("cancelling", "x - tanh(x)"), dtypes=[torch.float32])
    assert "pass, but loses digits" in capsys.readouterr().out


def test_definitions_are_records() -> None:
    record = jitact.define("swoosh", "x * sin(x)").activation
    assert isinstance(record, Definition) and record.formula == "x * sin(x)"
    model = jitact.get("swoosh").Model()
    assert torch.equal(model(X), X * X.sin())
