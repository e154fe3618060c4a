"""Definitions of several tensors, of channel operands and of dropout, by expressions, by kernel files, from folders."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from weakref import WeakValueDictionary

import pytest
import torch
import torch.nn.functional as F
from common import DTYPES, SLOW
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap

import jitact
from jitact import Channel, Row, modules, registry
from jitact.definitions.expression import Expression, ExpressionError
from jitact.kernels import Work
from jitact.magics import describe, describe_html
from jitact.modules import ActivationModule


def my_swiglu() -> type[ActivationModule]:
    return jitact.define("my_swiglu", "silu(gate) * up")


def dyt() -> type[ActivationModule]:
    alpha = Channel(init=0.5, one=True)
    return jitact.define("dyt", "tanh(alpha * x) * w + b", w=Channel(), b=Channel(init=0.0), alpha=alpha)


def block() -> type[ActivationModule]:
    return jitact.define("block", "residual + dropout(x + bias, p)", bias=Channel(init=0.0), p=0.1)


# A function body beyond the grammar of expressions, with all kinds of operands but random ones; its gradients are derived.
STATEMENTS = """
#include "elementwise.cuh"

ELEMENTWISE T forward(T x, Channel<T> scale, T lambda_, Row<T> weight, Number<T> a) {
  const T s = scale * x + a;
  return s * s * lambda_ * weight;
}
"""


def statements() -> type[ActivationModule]:
    return jitact.define("statements", source=STATEMENTS, a=2.0, scale=Channel(init=3.0, dim=1))


def in_torch(x: Tensor, lambda_: Tensor, scale: Tensor, weight: Tensor, a: float = 2.0) -> Tensor:
    return (scale[:, None] * x + a).square() * lambda_ * weight[..., None]


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [t.to(device, dtype).requires_grad_() for t in made]


# Which names are tensors.


@pytest.mark.parametrize(
    ("text", "options", "signature"),
    [
        ("silu(gate) * up", {}, "(gate, up)"),
        ("gate * residual + x", {}, "(x, gate, residual)"),
        ("silu(gate) * up", {"operands": ("up", "gate")}, "(up, gate)"),
        ("w * y + a * x", {"w": Channel(), "a": 2.0}, "(x, y, w, a=2.0)"),
        ("w * y + v * x", {"w": Channel(), "v": Channel(), "operands": ("y", "v", "x")}, "(y, v, x, w)"),
        ("a + 1", {"a": 1.0}, "(x, a=1.0)"),
        ("x * cos + z * sin", {"operands": ["x", "cos", "z", "sin"]}, "(x, cos, z, sin)"),
        ("x + dropout(T, 0.5)", {}, "(x, T, training=False)"),
    ],
)
def test_names_that_are_nothing_else_are_tensors(text: str, options: dict, signature: str) -> None:
    cls = jitact.define("told", text, **options)
    taken = inspect.signature(jitact.told).parameters.values()
    own = [str(each.replace(annotation=each.empty)) for each in taken if each.kind is not each.KEYWORD_ONLY]
    assert f"({', '.join(own)})" == signature and cls.activation.formula == text


@pytest.mark.parametrize(
    ("text", "params", "message", "marked"),
    [
        ("x * aplha + alpha", {"alpha": 1.0}, "'aplha' is near to alpha; did you mean alpha?", "aplha"),
        ("x * weigth", {"weight": Channel()}, "'weigth' is near to weight; did you mean weight?", "weigth"),
        ("x * pii", {}, "'pii' is near to pi; did you mean pi?", "pii"),
        ("x * sine", {}, "'sine' is near to sin and sinh; did you mean sin or sinh?", "sine"),
        ("x * rellu", {}, "'rellu' is near to relu and rrelu", "rellu"),
        ("x * class", {}, "a tensor cannot be called 'class'", "class"),
        ("x * PI", {}, "'PI' is near to pi; did you mean pi?", "PI"),
        ("x * silu", {}, "'silu' is an activation; call it, as in silu(x)", "silu"),
        ("x + cos", {}, "cos is a function; call it, as in cos(x)", "cos"),
        ("min(x, inf)", {}, "'inf' is no constant here; a parameter can have it as its default", "inf"),
        ("x * e", {}, "'e' is no constant here; write exp(1)", "e"),
        ("x # note", {}, "an expression takes no comments", "#"),
        ("x // note", {}, "write floor(a / b); an expression takes no comments", "//"),
        ("x /* note */", {}, "an expression takes no comments", "/*"),
        ("x * b", {"operands": ["x", "c"]}, "unknown name 'b'; there are x, c, pi", "b"),
        ("dropout(x)", {}, "expected ',' and the share to drop, found ')'", ")"),
        ("dropout(x, 0.1, 2)", {}, "dropout takes 2 arguments, a value and the share to drop, got 3", "dropout(x, 0.1, 2)"),
        ("dropout(x, 1.5)", {}, "the share that dropout drops is from 0 to 1, got 1.5", "1.5"),
        ("dropout(x, abs(z))", {}, "the share that dropout drops is a number; it cannot be different for each", "abs(z)"),
        ("x * dropout", {}, "dropout is a function; call it, as in dropout(x, p)", "dropout"),
        ("prelu(x, w)", {"w": Channel()}, "prelu takes a value for each channel, which an expression cannot give it", "prelu"),
    ],
)
def test_slips_of_the_pen_are_no_tensors(text: str, params: dict, message: str, marked: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        jitact.define("told", text, **params)
    told, line, caret = str(caught.value).split("\n")
    assert told.startswith("told, forward: ") and message in told
    assert line[caret.index("^") : caret.rindex("^") + 1] == marked


USUAL = "gate up residual bias weight scale shift mask y value hidden other mean std query key pos tau phi beta w1"


def test_names_of_tensors_that_people_use() -> None:
    for name in USUAL.split():
        assert Expression(f"x * {name}", None).elements == ("x", name)


@pytest.mark.parametrize(
    ("text", "options", "error", "message"),
    [
        ("x * y", {"operands": ("x", "y", "z")}, ValueError, "z given as an operand, but not used in forward"),
        ("x * y", {"operands": "xy"}, TypeError, r"operands= lists the tensors, such as operands=\('gate', 'up'\), got 'xy'"),
        ("x * y", {"operands": ("x", "y", "x")}, ValueError, "operands= lists x twice"),
        ("x * y", {"operands": ("w", "x"), "w": Channel()}, ValueError, "must begin with a tensor of elements, got .* w"),
        ("a * x", {"operands": ("x", "a"), "a": 1.0}, ValueError, "operands= lists tensors, and a is given as a parameter"),
        ("x * w", {"w": Channel(), "v": Channel()}, ValueError, "v given as a channel operand, but not used in forward"),
        ("x * save", {}, ValueError, "a tensor cannot be called 'save': it is an argument of every activation"),
        ("x * dy", {}, ValueError, "a tensor cannot be called 'dy': it is the gradient that comes in"),
        ("x * w", {"w": Channel}, TypeError, "the default of w must be a number, got .*; write jitact.Channel()"),
        ("x * w", {"w": torch.ones(3)}, TypeError, "the default of w must be a number, .* is declared by jitact.Channel()"),
        ("x * w", {"w": Channel(init="1")}, TypeError, "the init of w must be a number, got '1'"),
        ("x * w", {"w": Channel(dim=1.5)}, TypeError, "the dim of w must be a whole number, such as -1, got 1.5"),
        ("x * w", {"w": Channel(one=1)}, TypeError, "one of w must be True or False, got 1"),
        ("dropout(x, p)", {"p": 3.0}, ValueError, "needs 0 <= p <= 1, got p=3.0"),
        ("x * dtype", {"dtype": Channel()}, ValueError, "a channel operand cannot be called 'dtype'"),
        ("x * y", {"backward": "dy * y"}, ValueError, r"backward= is for one tensor, and x, y have gradients; leave it out"),
        (
            "x * w",
            {"w": Channel(), "backward_from_output": "dy"},
            ValueError,
            "backward_from_output= is for one tensor, and x, w",
        ),
        ("dropout(x, 0.5)", {"backward": "dy"}, ValueError, "backward= is for one tensor, and forward draws random numbers"),
        ("x * x", {"backward": "dropout(dy, 0.5)"}, ValueError, "backward= draws random numbers; a gradient cannot"),
    ],
)
def test_operands_that_will_not_do(text: str, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=f"^told: .*{message}"):
        jitact.define("told", text, **options)


def test_one_tensor_of_another_name_takes_a_gradient() -> None:
    (gate,) = leaves((7,))
    cls = jitact.define("told", "gate * gate", "2 * gate * dy")
    assert torch.equal(torch.autograd.grad(cls()(gate).sum(), gate)[0], 2 * gate)


def test_one_tensor_of_another_name_is_fused() -> None:
    t, bias = torch.randn(3, 8), torch.randn(8)
    cls = jitact.define("told", "a * gate * gate", a=2.0)
    expected = 2 * (t + bias) ** 2
    torch.testing.assert_close(jitact.told(t, bias=bias), expected)
    torch.testing.assert_close(jitact.told(t, 2.0, bias=bias, residual=t), expected + t)
    assert jitact.told(t, dropout=1.0).eq(0).all() and jitact.told(t, bias=torch.zeros(3), channel_dim=0).shape == t.shape
    torch.testing.assert_close(cls(bias=8)(t), 2 * t**2)


# Values and gradients.


def close(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), exact.double(), rtol=8 * eps, atol=32 * eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_tensors(dtype: torch.dtype, device: str) -> None:
    cls = my_swiglu()
    gate, up = leaves((6, 40), (1, 40), dtype=dtype, device=device)  # the second one is broadcast
    y, dy = cls()(gate, up), torch.randn(6, 40).to(device, dtype)
    exact = F.silu(gate.double()) * up.double()
    close(y, exact, dtype)
    found, expected = (torch.autograd.grad(each, (gate, up), dy.to(each.dtype)) for each in (y, exact))
    assert [g.dtype for g in found] == [dtype, dtype] and found[1].shape == (1, 40)
    close(found[0], expected[0], dtype)
    bound = 8 * torch.finfo(dtype).eps * (dy.double() * F.silu(gate.double())).abs().sum(0)
    assert ((found[1].double() - expected[1]).abs() <= bound).all()
    assert torch.equal(jitact.my_swiglu(up=up, gate=gate), y) and torch.equal(cls.Model()(gate, up).shape and y, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_over_channels(dtype: torch.dtype, device: str) -> None:
    """Channel operands of their own dtype; their gradients are sums of unrounded products."""
    dyt()
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    (x,) = leaves((300, 40), dtype=dtype, device=device)
    w, b, alpha = leaves((40,), (40,), (1,), dtype=wide, device=device)
    y, dy = jitact.dyt(x, w, b, alpha), torch.randn(300, 40).to(device, dtype)
    tensors = (x, w, b, alpha)
    exact = torch.tanh(alpha.double() * x.double()) * w.double() + b.double()
    assert y.dtype is dtype
    close(y, exact, dtype)
    found = torch.autograd.grad(y, tensors, dy)
    expected = torch.autograd.grad(exact, tensors, dy.double(), retain_graph=True)
    close(found[0], expected[0], dtype)
    positive = torch.tanh(alpha.double() * x.double().abs()) * w.double().abs() + b.double()
    terms = torch.autograd.grad(positive, tensors, dy.double().abs())
    for own, gradient, magnitude in list(zip(found, expected, terms, strict=True))[1:]:
        bound = (2.0**-48 if dtype is torch.float64 else 2.0**-17) * magnitude.double().abs() + 1e-30
        assert own.dtype is wide and ((own.double() - gradient.double()).abs() <= bound).all()


@pytest.mark.parametrize(
    ("text", "gradient", "work"),
    [
        ("x * x / (1 + abs(x))", None, Work(1, 1)),
        ("x > 0 ? clamp(x, 0, a) * y : fma(x, y, 2)", None, Work(1, 1)),
        ("x * 2", "dy * exp(x)", Work(forward=1)),
        ("x * sin(x)", None, Work()),
        ("silu(x) + y", None, Work()),
        ("y + dropout(x, 0.5)", None, Work()),
    ],
)
def test_arithmetic_alone_is_next_to_no_work(text: str, gradient: str | None, work: Work, tmp_path: Path) -> None:
    """As for the library's activations that are arithmetic alone."""
    cls = jitact.define("told", text, gradient, **({"a": 1.0} if "clamp" in text else {}))
    assert cls.activation.source.work == work
    jitact.save_folder(tmp_path, "told")
    assert jitact.load_folder(tmp_path)["told"].activation.source.work == work
    assert {registry.class_of(name).activation.source.work for name in ("bilinear", "reglu", "softsign")} == {Work(1, 1)}


def test_operands_of_a_single_value_are_known_to_be_when_compiled(tmp_path: Path) -> None:
    """Only the last ones: kernels look up those before them."""
    one, many = Channel(init=0.5, one=True), Channel()
    assert dyt().activation.source.singles == 1
    assert registry.record_named("dyt+bias").source.singles == 1
    assert jitact.gated("dyt").activation.source.singles == 1
    assert jitact.define("first", "tanh(a * x) * w", a=one, w=many).activation.source.singles == 0
    assert jitact.define("both", "tanh(a * x) * b", a=one, b=one).activation.source.singles == 2
    assert jitact.define("row", "tanh(a * x) * r", a=one, r=jitact.Row()).activation.source.singles == 0
    jitact.save_folder(tmp_path, "both")
    assert jitact.load_folder(tmp_path)["both"].activation.source.singles == 2


def test_a_choice_between_operands_of_any_kind() -> None:
    text = "x * (x > 0 ? (y > 0 ? b : w) : (y > 1 ? a : w)) + (y > x ? b : 2) * (x > 1 ? a : c)"
    cls = jitact.define("chosen", text, w=Channel(2.0), b=Channel(-3.0), a=0.5, c=7.0)
    x, y = leaves((6, 8), (6, 8))
    w, b = leaves((8,), (8,))
    exact = x * torch.where(x > 0, torch.where(y > 0, b, w), torch.where(y > 1, 0.5, w))
    exact = exact + torch.where(y > x, b, 2.0) * torch.where(x > 1, 0.5, 7.0)
    torch.testing.assert_close(jitact.chosen(x, y, w, b), exact)
    torch.testing.assert_close(cls.activation.reference(x, y, w, b, 0.5, 7.0), exact)


def test_dtypes_of_elements_promote() -> None:
    my_swiglu()
    gate, up = leaves((3, 4), (4,), dtype=torch.bfloat16)
    wide = up.detach().float().requires_grad_()
    y = jitact.my_swiglu(gate, wide)
    assert y.dtype is torch.float32
    assert [g.dtype for g in torch.autograd.grad(y.sum(), (gate, wide))] == [torch.bfloat16, torch.float32]
    close(y, F.silu(gate.double()) * wide.double(), torch.float32)


@pytest.mark.parametrize(("compiled", "step"), [(False, 1), (True, 2), SLOW(True, 1)])  # each pair is compiled anew
def test_tensors_without_dimensions_promote_as_pytorchs(compiled: bool, step: int) -> None:
    my_swiglu()
    narrow, wide, one = torch.randn(4, dtype=torch.bfloat16), torch.randn(4), torch.tensor(1.5, dtype=torch.float64)
    calls = [
        (jitact.my_swiglu, lambda x, y: F.silu(x) * y),
        (jitact.swiglu, lambda x, y: F.silu(x) * y),
        (lambda x, y: jitact.gelu(x, residual=y), lambda x, y: F.gelu(x) + y),
        (jitact.get("my_swiglu").Model(), lambda x, y: F.silu(x) * y),
    ]
    torch._dynamo.reset()
    for function, theirs in calls:
        ours = torch.compile(function, backend="aot_eager") if compiled else function
        for tensors in [*itertools.permutations((narrow, wide, one, one.float()), 2)][::step]:  # each is first and second
            found, expected = ours(*tensors), theirs(*tensors)
            assert found.dtype is expected.dtype and found.shape == expected.shape, [t.dtype for t in tensors]
            torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
        torch._dynamo.reset()


def test_second_derivatives() -> None:
    my_swiglu()
    dyt()
    x, up, w, b, alpha = leaves((5, 4), (4,), (4,), (4,), (1,))
    for function, tensors in ((jitact.my_swiglu, (x, up)), (jitact.dyt, (x, w, b, alpha))):
        assert torch.autograd.gradcheck(function, tensors) and torch.autograd.gradgradcheck(function, tensors)
    frozen = (x, w.detach(), b.detach(), alpha.detach())
    assert torch.autograd.gradgradcheck(jitact.dyt, frozen)


def test_transforms() -> None:
    my_swiglu()
    x, up = (t.detach() for t in leaves((5, 4), (5, 4)))

    def exact(x: Tensor, up: Tensor) -> Tensor:
        return F.silu(x) * up

    for transform in (
        lambda f: vmap(f)(x, up),
        lambda f: jvp(f, (x, up), (up, x))[1],
        lambda f: grad(lambda a, b: f(a, b).sum(), argnums=1)(x, up),
        lambda f: hessian(lambda a: f(a, up).sum())(x),
        lambda f: torch.compile(grad(lambda a: f(a, up).sum()), backend="aot_eager", fullgraph=True)(x),
    ):
        torch.testing.assert_close(transform(jitact.my_swiglu), transform(exact))


# Where x is chosen, for y = 1, and the first and second derivatives there.
CHOSEN = {
    "x > 0 ? sqrt(x) : y": lambda x: (x > 0, x.pow(-0.5) / 2, x.pow(-1.5) / -4),
    "max(log(x), y - 1) * 2": lambda x: (x > 1, 2 / x, -2 / x.square()),
    "min(y, clamp(log(x), 0, 9))": lambda x: ((x > 1) & (x < 2.7), 1 / x, -1 / x.square()),
    "y > 0 ? (x > 0 ? log(x) : 0) : 1 / x": lambda x: (x > 0, 1 / x, -1 / x.square()),
}


@pytest.mark.parametrize("text", CHOSEN)
def test_what_is_not_chosen_has_no_derivative(text: str) -> None:
    """Autograd of torch.where gives NaN where the slope of the other choice is infinite or NaN."""
    f = jitact.define("chosen_one", text).activation.function
    x, y = torch.tensor([0.0, 0.5, 1.5, 4.0], dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    where, *derivatives = CHOSEN[text](x)
    first, second = (torch.where(where, each, 0) for each in derivatives)
    a = x.clone().requires_grad_()
    (eager,) = torch.autograd.grad(f(a, y).sum(), a, create_graph=True)
    (batched,) = torch.autograd.grad(f(a, y), a, torch.eye(4, dtype=torch.float64), is_grads_batched=True)
    of_x = lambda x: f(x, y)  # noqa: E731
    compiled = torch.compile(grad(lambda x: of_x(x).sum()), backend="aot_eager", fullgraph=True)(x)
    forward = jvp(of_x, (x,), (torch.ones_like(x),))[1]
    for found in (eager, batched.diagonal(), grad(lambda x: of_x(x).sum())(x), compiled, forward):
        torch.testing.assert_close(found, first)
    torch.testing.assert_close(torch.autograd.grad(eager.sum(), a)[0], second)
    torch.testing.assert_close(hessian(lambda x: of_x(x).sum())(x), second.diag())


@pytest.mark.parametrize("make", [my_swiglu, dyt, block])
def test_compiled_and_exported(make: Callable[[], type[ActivationModule]]) -> None:
    cls = make()
    record = cls.activation
    module = cls(**{name: 4 for name in cls.__signature__.parameters if name in record.channels}).double().eval()
    tensors = tuple(leaves(*[(3, 4)] * record.layout.elements))

    def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
        y = function(*tensors)
        return [y, *torch.autograd.grad(y.sum(), [*tensors, *module.parameters()])]

    expected = gradients(module)
    torch.testing.assert_close(gradients(torch.compile(module, backend="aot_eager", fullgraph=True)), expected)
    program = torch.export.export(module, tensors)
    torch.testing.assert_close(program.module()(*tensors), expected[0])


# Modules.


def test_modules_own_their_channel_operands() -> None:
    cls = dyt()
    module = cls(w=8, b=8, dtype=torch.float64)
    assert repr(module) == "Dyt(w=8, b=8)" and list(module.state_dict()) == ["w", "b", "alpha"]
    assert [p.shape for p in module.parameters()] == [(8,), (8,), (1,)] and module.alpha.dtype is torch.float64
    assert module.w.eq(1).all() and module.b.eq(0).all() and module.alpha.eq(0.5).all()
    (x,) = leaves((3, 8))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand_like(parameter))
    model = cls.Model(8, 8, dtype=torch.float64)
    model.load_state_dict(module.state_dict())
    torch.testing.assert_close(model(x), module(x))
    torch.testing.assert_close(module(x), torch.tanh(module.alpha * x) * module.w + module.b)
    twins = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    for each in twins:
        assert type(each) is cls and torch.equal(each(x), module(x))
    for each in (module, model):
        each.reset_parameters()
        assert each.w.eq(1).all() and each.b.eq(0).all() and each.alpha.eq(0.5).all()
    assert not torch.equal(twins[0].w, module.w)
    with pytest.raises(ValueError, match="Dyt: w is how many channels there are, a positive number; got 0"):
        cls(w=0, b=8)
    with pytest.raises(TypeError, match=r"Dyt\(w, b, \*, .*missing a required argument: 'b'"):
        cls(8)
    with pytest.raises(TypeError, match=r"dyt\(x, w, b, alpha, \*, .*missing a required argument: 'w'"):
        jitact.dyt(x)
    with pytest.raises(TypeError, match="my_swiglu is applied to 2 tensors, gate, up; got 1"):
        my_swiglu()()(x)


@pytest.mark.parametrize("backend", [None, "eager"])
def test_modules_take_tensors_by_name(backend: str | None) -> None:
    cls = my_swiglu()
    ours = torch.compile(cls(), backend=backend, fullgraph=True) if backend else cls()
    gate, up, more = (torch.randn(3, 4, dtype=torch.float64) for _ in range(3))
    expected = F.silu(gate) * up
    for found in (ours(up=up, gate=gate), ours(gate, up=up), cls.Model()(gate, up)):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours(gate, up=up, residual=more), expected + more)
    own = jitact.define("own_residual", "residual + relu(x)")()
    torch.testing.assert_close(own(residual=up, x=gate), up + F.relu(gate))


@pytest.mark.parametrize(
    ("tensors", "named", "got"),
    [((), {"gate": 1}, "0 and gate="), ((1,), {"gate": 1}, "1 and gate="), ((1, 1), {"up": 1}, "2 and up=")],
)
def test_modules_are_given_each_tensor_once(tensors: tuple, named: dict[str, int], got: str) -> None:
    x = torch.ones(2)
    with pytest.raises(TypeError, match=f"my_swiglu is applied to 2 tensors, gate, up; got {got}"):
        my_swiglu()()(*[x for _ in tensors], **dict.fromkeys(named, x))


def test_definitions_with_channel_operands_are_called_too() -> None:
    dyt()
    my_swiglu()
    cls = jitact.define("both", "my_swiglu(dyt(z, w, 0.5, z * z), x) + w", w=Channel())
    x, z, w = leaves((5, 4), (5, 4), (4,))
    assert cls.activation.layout.tensors == ("x", "z", "w")
    y, exact = jitact.both(x, z, w), F.silu(torch.tanh(z * z * z) * w + 0.5) * x + w
    for own in (y, cls.activation.reference(x, z, w)):
        torch.testing.assert_close(own, exact)
    found, expected = (torch.autograd.grad(each.sum(), (x, z, w)) for each in (y, exact))
    torch.testing.assert_close(found, expected)
    with pytest.raises(ExpressionError, match=r"dyt takes \(x, w, b, alpha\), got 2 arguments"):
        jitact.define("both", "dyt(x, w)")


def test_a_channel_operand_of_another_dimension() -> None:
    cls = jitact.define("by_row", "x * w", w=Channel(init=2.0, dim=0))
    x, w = leaves((3, 4), (3,))
    assert torch.equal(cls(w=3, dtype=torch.float64)(x), 2 * x)
    dw = torch.autograd.grad(jitact.by_row(x, w).sum(), w)[0]
    torch.testing.assert_close(dw, x.sum(1))
    with pytest.raises(ValueError, match="by_row: the number of values of w must be 1 or 3, as dimension 0 of x has 3; got 4"):
        jitact.by_row(x, torch.ones(4, dtype=torch.float64))


def test_row_operands(tmp_path: Path) -> None:
    cls = jitact.define("scaled_rows", "silu(x) * w", w=jitact.Row())
    assert "Row<T> w" in cls.activation.source.text and cls.activation.layout.tensors == ("x", "w")
    x, w, dy = leaves((3, 5, 40), (3, 5), (3, 5, 40))
    expected = F.silu(x) * w.unsqueeze(-1)
    gradients = torch.autograd.grad(expected, (x, w), dy, retain_graph=True)
    jitact.save_folder(tmp_path)
    for each in (cls(), jitact.scaled_rows, cls.Model(), jitact.load_folder(tmp_path)["scaled_rows"]()):
        y = each(x, w)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(torch.autograd.grad(y, (x, w), dy), gradients)
    assert jitact.get("scaled_rows").activation.fingerprint == cls.activation.fingerprint
    torch.autograd.gradgradcheck(jitact.scaled_rows, leaves((2, 3), (2,)))
    assert jitact.check(cls, dtypes=[torch.bfloat16])
    fingerprints = {
        jitact.define("scaled_rows", "silu(x) * w", **given).activation.fingerprint for given in ({}, {"w": Channel()})
    }
    assert cls.activation.fingerprint not in fingerprints and len(fingerprints) == 2
    file = '#include "elementwise.cuh"\nELEMENTWISE T forward(T x, Row<T> w) { return x * w; }'
    assert jitact.define("by_row", source=file, w=jitact.Row()).activation.layout.tensors == ("x", "w")
    for given, error, message in (
        ({"sin": jitact.Row()}, ValueError, "sin given as a row operand, but not used in forward"),
        ({"w": jitact.Row}, TypeError, r"must be a number, got .*; write jitact.Row\(\)"),
        ({"dy": jitact.Row()}, ValueError, "a tensor cannot be called 'dy'"),
        ({"w": jitact.Row(), "operands": ("w", "x")}, ValueError, "with a tensor of elements, got the row operand w"),
    ):
        with pytest.raises(error, match=message):
            jitact.define("by_row", "x * w", **given)
    with pytest.raises(ValueError, match=r"w is declared as Row\(\); forward's arguments of type Row<T> are none"):
        jitact.define("by_row", source=file.replace("Row<T>", "Channel<T>"), w=jitact.Row())


@pytest.mark.slow
def test_row_operands_where_activations_are_called() -> None:
    jitact.define("scaled_rows", "silu(x) * w", w=jitact.Row())
    jitact.define("both_rows", "scaled_rows(x, w * w) + b + a", w=jitact.Row(), b=Channel(init=0.0), a=1.0)
    x, w, b = leaves((3, 4), (3,), (4,))
    expected = F.silu(x) * w.unsqueeze(-1) ** 2 + b + 1
    for y in (jitact.both_rows(x, w, b), jitact.get("both_rows").activation.reference(x, w.unsqueeze(-1), b, 1.0)):
        torch.testing.assert_close(y, expected)


def test_pickles_tell_channel_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = pickle.dumps(jitact.define("scaled", "silu(x) * w", w=Channel())(3))
    again = jitact.define("scaled", "silu(x) * w", w=Channel(init=2.0))  # another init is the same formula
    assert again.activation.fingerprint == pickle.loads(saved).activation.fingerprint
    other = jitact.define("scaled", "silu(x) * w", w=Channel(dim=0))
    two = jitact.define("scaled", "silu(x) * w")
    assert len({each.activation.fingerprint for each in (again, other, two)}) == 3
    monkeypatch.setattr(modules, "_made", WeakValueDictionary({("scaled", two.activation.fingerprint): two}))
    with pytest.raises(LookupError, match=re.escape("there scaled(x, w) = silu(x) * w, here scaled(x, w) = silu(x) * w")):
        pickle.loads(saved)


# Dropout.


def seeded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def drawn(*tensors: Tensor) -> Tensor:
        torch.manual_seed(3)
        return function(*tensors)

    return drawn


def test_dropout_in_training_and_outside(device: str) -> None:
    cls, n = block(), 1 << 14
    x, residual = leaves((4, n), (1, n), device=device)
    module = cls(bias=n, p=0.25, device=device, dtype=torch.float64)
    with torch.no_grad():
        module.bias.fill_(1.0)
    kept = seeded(module)(x, residual) - residual != 0
    assert abs(kept.double().mean() - 0.75) < 0.01
    exact = torch.where(kept, (x + 1) / 0.75, 0) + residual
    torch.testing.assert_close(seeded(module)(x, residual), exact)
    dy = torch.randn_like(exact)
    found = torch.autograd.grad(seeded(module)(x, residual), (x, residual, module.bias), dy)
    slope = dy * kept / 0.75
    for own, expected in zip(found, (slope, dy.sum(0, keepdim=True), slope.sum(0)), strict=True):
        torch.testing.assert_close(own, expected)
    module.eval()
    torch.testing.assert_close(module(x, residual), x + 1 + residual)
    torch.testing.assert_close(jitact.block(x, residual, module.bias), x + 1 + residual)
    assert not torch.equal(jitact.block(x, residual, module.bias, 0.25, training=True), jitact.block(x, residual, module.bias))
    assert torch.equal(jitact.block(x, residual, module.bias, 1.0, training=True), residual.expand_as(x))
    model = cls.Model(bias=n, p=0.5, device=device, dtype=torch.float64)
    assert abs((model(x, residual) == residual).double().mean() - 0.5) < 0.01
    torch.testing.assert_close(model.eval()(x, residual), x + residual)
    for p in (-0.1, 1.5):
        with pytest.raises(ValueError, match=rf"block: needs 0 <= p <= 1, got p={p}"):
            jitact.block(x, residual, module.bias, p, training=True)
    with pytest.raises(ValueError, match="block: needs 0 <= p <= 1, got p=2"):
        cls(4, p=2)


def test_derivatives_have_the_random_numbers_of_forward() -> None:
    """Also for a transposed x, where dy has other strides."""
    drop = jitact.define("drop_both", "dropout(x * z, p) + dropout(z * z, 1 - p) * w", w=Channel(), p=0.4)
    z, w = leaves((4, 6), (6,))
    (x,) = leaves((6, 4))
    function = seeded(lambda x, z, w: jitact.drop_both(x, z, w, training=True))
    tensors = (x.t(), z, w)
    y = function(*tensors)
    first = function(tensors[0], torch.zeros_like(z), w) == 0
    assert first.all()
    assert torch.autograd.gradcheck(function, (x.t().detach().requires_grad_(), z, w))
    assert torch.autograd.gradgradcheck(function, (x.t().detach().requires_grad_(), z, w))
    both = [torch.autograd.grad(y, z, dy, retain_graph=True)[0] for dy in (torch.ones_like(y), torch.ones(6, 4).double().t())]
    assert torch.equal(*both)
    batch = torch.randn(3, 4, 6, dtype=torch.float64)
    single = torch.stack([torch.autograd.grad(y, z, dy, retain_graph=True)[0] for dy in batch])
    torch.testing.assert_close(torch.autograd.grad(y, z, batch, is_grads_batched=True, retain_graph=True)[0], single)
    assert drop.activation.layout.draws and [share.text for share in drop.activation.expression.shares] == ["p", "1 - p"]
    streams = seeded(lambda x: jitact.drop_both(x, torch.ones_like(x), torch.ones(6).double(), 0.5, training=True))
    values = streams(torch.full((512, 6), 10.0, dtype=torch.float64))
    assert {round(v) for v in values.unique().tolist()} == {0, 2, 20, 22}, "each has numbers of its own"


# Kernel files.


def test_more_operands_than_operators_take() -> None:
    numbers = {f"p{i}": 1.0 for i in range(60)}
    with pytest.raises(ValueError, match="told: takes 61 tensors and parameters; there can be at most 60 of them"):
        jitact.define("told", f"x + {' + '.join(numbers)}", **numbers)


def test_a_kernel_file_of_many_operands() -> None:
    cls = statements()
    record = cls.activation
    assert str(inspect.signature(jitact.statements)).startswith("(x, scale, lambda_, weight, a=2.0, *")
    assert record.layout.tensors == ("x", "lambda_", "scale", "weight") and record.channels == {"scale": Channel(3.0, 1)}
    x, other, scale, weight = leaves((2, 3, 5), (3, 5), (3,), (2, 3))
    y = jitact.statements(x, scale, other, weight)
    torch.testing.assert_close(y, in_torch(x, other, scale, weight))
    module = cls(scale=3, dtype=torch.float64)
    torch.testing.assert_close(module(x, other, weight), in_torch(x, other, module.scale, weight))
    assert torch.autograd.gradcheck(jitact.statements, (x, scale, other, weight))


def product() -> type[ActivationModule]:
    return jitact.define("product", source="ELEMENTWISE T forward(T x, T z) { const T s = x * z; return s * s * z; }")


@pytest.mark.parametrize(("make", "shapes"), [
    (product, [(3, 4), (4,)]),
    SLOW(statements, [(2, 3, 5), (3,), (3, 5), (2, 3)]),  # its gradients take 20 s to compile
], ids=["product", "statements"])  # fmt: skip
def test_gradients_of_a_kernel_files_gradients(make: Callable[[], type[ActivationModule]], shapes: list) -> None:
    """And batched gradients; both use a separate build."""
    function, tensors = make().activation.function, leaves(*shapes)
    assert torch.autograd.gradgradcheck(function, tensors)
    y = function(*tensors)
    batch = torch.randn(3, *y.shape, dtype=torch.float64)
    found = torch.autograd.grad(y, tensors, batch, is_grads_batched=True, retain_graph=True)
    expected = [torch.autograd.grad(y, tensors, dy, retain_graph=True) for dy in batch]
    for own, singles in zip(found, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(own, torch.stack(singles))


@pytest.mark.parametrize(
    ("header", "options", "message"),
    [
        ("", {}, "forward's parameters are a, those with a default none; define(..., a=1.0)"),
        ("// parameters: a = 1, scale = 2\n", {}, "scale is a Channel<T> in the kernel file, declared as 2.0; declare it as"),
        (
            "",
            {"a": 1.0, "weight": Channel()},
            "weight is declared as Channel(init=1.0, dim=-1, one=False); forward's arguments of type Row<T> are weight",
        ),
        ("// parameters: a = 1, scale = Channel(2, 1, True, 4)\n", {}, "in the file's header is no parameter with a default"),
        ("// parameters: a = 1e400\n", {}, "'a = 1e400' in the file's header is no parameter with a default"),
        (
            "// parameters: a = 1, scale = Channel(size=2)\n",
            {},
            "no operand such as w = Channel(init=1.0, dim=-1, one=False) or w = Row()",
        ),
        ("", {"a": 1.0, "operands": ("x",)}, "takes the operands from the source; leave out operands"),
    ],
)
def test_headers_that_will_not_do(header: str, options: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match="statements") as caught:
        jitact.define("statements", source=header + STATEMENTS, **options)
    assert message in str(caught.value)


def test_parameters_that_are_not_marked() -> None:
    text = "ELEMENTWISE T forward(T x, T z, T a) { return x * z * a; }"
    cls = jitact.define("told", source=text, a=2.0)
    assert cls.activation.params == (("a", 2.0),) and cls.activation.layout.tensors == ("x", "z")
    cls = jitact.define("told", source=text)
    assert cls.activation.params == () and cls.activation.layout.tensors == ("x", "z", "a")
    with pytest.raises(ValueError, match="told: forward's parameters are z, a, those with a default z; define"):
        jitact.define("told", source=text, z=2.0)
    with pytest.raises(ValueError, match="told: line 1: z is a parameter, and not among the last; make it a Number<T> z"):
        jitact.define("told", source=text.replace("T a", "Number<T> a"), z=2.0, a=1.0)


def test_folders(tmp_path: Path) -> None:
    made = [my_swiglu(), dyt(), block(), statements()]
    paths = jitact.save_folder(tmp_path)
    assert "// parameters: p = 0.1, bias = Channel(init=0.0, dim=-1, one=False)\n" in (tmp_path / "block.cu").read_text()
    loaded = jitact.load_folder(tmp_path)
    assert len(paths) == 4
    for old in made:
        new = loaded[old.activation.name]
        assert new is not old and new.__signature__ == old.__signature__
        assert inspect.signature(new.activation.function) == inspect.signature(old.activation.function)
        for field in ("params", "channels", "saves", "formula", "fingerprint", "has_reference"):
            assert getattr(new.activation, field) == getattr(old.activation, field)
    x, residual = leaves((3, 4), (3, 4))
    torch.testing.assert_close(loaded["block"](4).eval()(x, residual), x + residual)
    (tmp_path / "block.cu").write_text("// parameters: p = 0.1, w = Channel()\n" + (tmp_path / "block.cu").read_text())
    with pytest.raises(ValueError, match=r"block\.cu: .*twice"):
        jitact.load_folder(tmp_path)


@pytest.mark.parametrize(("order", "kind"), [
    ("xwz", Channel), SLOW("xwz", Row), SLOW("xzw", Channel), ("xzw", Row), ("zwx", Channel), SLOW("zwx", Row),
    SLOW("zxw", Channel), ("zxw", Row),
])  # fmt: skip
def test_folders_keep_definitions_in_any_order_of_operands(order: str, kind: type, tmp_path: Path) -> None:
    formula = "z + dropout(silu(x * w), p) * pow(x + 1, 3)"
    old = jitact.define("mixed", formula, operands=tuple(order), w=kind(), p=0.5).activation
    jitact.save_folder(tmp_path)
    new = jitact.load_folder(tmp_path)["mixed"].activation
    assert new is not old and old.has_reference and old.reads
    for field in ("layout", "fingerprint", "has_reference", "reads", "passed"):
        assert getattr(new, field) == getattr(old, field)
    tensors = dict(zip("xwz", leaves((3, 4), (4,) if kind is Channel else (3, 1), (3, 4)), strict=True))
    x, w, z = tensors.values()
    undrawn = jitact.mixed(*(tensors[name] for name in order), training=False)
    torch.testing.assert_close(undrawn, z + F.silu(x * w) * (x + 1) ** 3)
    with pytest.raises(ValueError, match=r"mixed: needs 0 <= p <= 1, got p=1\.5"):
        jitact.mixed(*(tensors[name] for name in order), p=1.5)


@pytest.mark.parametrize("name", ["prelu", *map(SLOW, ["rrelu", "xielu", "gelu_10"])])
def test_kernel_files_of_the_library_compute_the_same(name: str) -> None:
    record = jitact.get(name).activation
    own = jitact.define(f"own_{name}", source=Path(record.source.path), **dict(record.params), **record.channels)
    (x,) = leaves((5, 4, 3))
    weights = leaves(*[(4,) if name == "prelu" else (1,)] * len(record.learned))
    training = {"training": True} if name == "rrelu" else {}
    pair = (own.activation.function, {}), (record.function, training)
    results = []
    for function, options in pair:
        y = seeded(lambda *tensors, f=function, o=options: f(*tensors, **o))(x, *weights)
        results.append([y, *torch.autograd.grad(y, [x, *weights], torch.full_like(y, 0.7))])
    assert all(map(torch.equal, *results))


# What else definitions have.


def test_check_judges_every_gradient(capsys: pytest.CaptureFixture) -> None:
    assert jitact.check(my_swiglu()) and jitact.check(dyt()(2, 2), dtypes=[torch.float32])
    assert jitact.check(block(), dtypes=[torch.bfloat16]) and jitact.check(statements(), dtypes=[torch.float32])
    out = capsys.readouterr().out
    assert out.count(" pass") == 7 and "sums over channels" in out and "random numbers" in out


@pytest.mark.parametrize(
    ("backward", "by"),
    [SLOW("{dy * up, dy * up}", "up"), ("{dy * 1.001 * up, dy * gate}", "gate"), SLOW("{dy * up, dy * abs(gate)}", "up")],
)
def test_check_rejects_a_wrong_gradient_of_any_operand(backward: str, by: str, capsys: pytest.CaptureFixture) -> None:
    forward = "ELEMENTWISE T forward(T gate, T up) { return gate * up; }\n"
    text = f"{forward}ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up) {{ return {backward}; }}"
    result = jitact.check(jitact.define("wrong", source=text), dtypes=[torch.float32])
    assert not result and result.lines[0].gradient.by == by
    assert re.search(rf"gradient by {by} at gate = .*, up = .* where it should be", capsys.readouterr().out)


@pytest.mark.parametrize("tool", ["check", "plot"])
def test_check_and_plot_need_something_to_compare_with(tool: str) -> None:
    if tool == "plot":
        pytest.importorskip("matplotlib")
    cls = jitact.define("own_rrelu", source=Path(jitact.get("rrelu").activation.source.path), lower=0.1, upper=0.3)
    with pytest.raises(ValueError, match="own_rrelu draws random numbers outside of training too"):
        getattr(jitact, tool)(cls)


def test_plot_has_a_curve_for_each_operand() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    figure = jitact.plot(my_swiglu(), "relu", dyt()(4, 4), error=True)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    of_dyt = [f"dyt(w=4, b=4), by {name}" for name in ("x", "w", "b", "alpha")]
    assert labels == ["my_swiglu, by gate", "my_swiglu, by up", "relu", *of_dyt]
    by_up = figure.axes[1].lines[1]  # the gradient by up, where gate is 1
    torch.testing.assert_close(torch.tensor(by_up.get_ydata()), F.silu(torch.ones(801, dtype=torch.float64)))


def test_what_classes_tell() -> None:
    text = describe(dyt())
    assert text.startswith("Dyt: dyt(x, w, b, alpha) = tanh(alpha * x) * w + b\n") and "learned: w, from 1, b, from 0" in text
    for cls in (my_swiglu(), dyt(), block()):
        assert describe_html(cls).count("<polyline") == 4
    nowhere = jitact.define("nowhere", "sqrt(-1 - x * x)")
    assert "<polyline" not in describe_html(nowhere) and "sqrt" in describe_html(nowhere)
    assert jitact.dyt.__doc__.startswith("dyt(x, w, b, alpha) = ")


def test_the_magic() -> None:
    pytest.importorskip("IPython")
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    try:
        shell.run_line_magic("load_ext", "jitact")
        line = "%%activation dyt operands=x w=Channel() b=Channel(init=0.0, dim=-1) alpha=jitact.Channel(0.5, one=True)"
        done = shell.run_cell(f"{line}\ntanh(alpha * x) * w + b\n")
        assert done.success and done.result.activation.channels == dyt().activation.channels
        assert not shell.run_cell("%%activation dyt w=Chanel()\nx * w\n").success
    finally:
        InteractiveShell.clear_instance()
