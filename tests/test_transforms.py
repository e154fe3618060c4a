"""Tracing and transforms: torch.func under torch.compile, batched gradients, torch.fx, functionalize, torch.export."""

from __future__ import annotations

import functools
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from common import CASE_IDS, CASES, SLOW
from test_row_definitions import SINK
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import jitact
from jitact.configs import BEFORE_2_13
from jitact.records import Activation

WEIGHT = torch.full((1,), 0.3, dtype=torch.float64)
SOURCE = '#include "elementwise.cuh"\nELEMENTWISE T forward(T x) { const T s = sin(x); return x * s; }\n'


def defined(t: Tensor) -> Tensor:
    if "by_expression" not in jitact.names():
        jitact.define("by_expression", "x * sin(x)")
    return jitact.by_expression(t)


def sourced(t: Tensor) -> Tensor:
    if "by_source" not in jitact.names():
        jitact.define("by_source", source=SOURCE)
    return jitact.by_source(t)


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "relu": (jitact.relu, F.relu),
    "gelu": (jitact.gelu, F.gelu),
    "tanh": (jitact.tanh, torch.tanh),
    "leaky_relu": (lambda t: jitact.leaky_relu(t, 0.2), lambda t: F.leaky_relu(t, 0.2)),
    "silu, in place": (lambda t: jitact.silu(t * 1, inplace=True), F.silu),
    "prelu": (lambda t: jitact.prelu(t, WEIGHT), lambda t: F.prelu(t, WEIGHT)),
    "rrelu": (lambda t: jitact.rrelu(t, 0.25, 0.25, training=True), lambda t: F.leaky_relu(t, 0.25)),
    "xielu": (lambda t: jitact.xielu(t, WEIGHT, WEIGHT), lambda t: jitact.get("xielu").activation.reference(
        t, WEIGHT, WEIGHT, torch.tensor(0.5, dtype=t.dtype), torch.tensor(-1e-6, dtype=t.dtype))),
    "defined": (defined, lambda t: t * torch.sin(t)),
    "defined by source": (sourced, lambda t: t * torch.sin(t)),
}  # fmt: skip


def in_forward_mode(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def tangent(x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent

    return tangent


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]] = {
    "grad": lambda f: grad(lambda t: f(t).sum()),
    "vjp": lambda f: lambda x: vjp(f, x)[1](x)[0],
    "jvp": lambda f: lambda x: jvp(f, (x,), (x,))[1],
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": lambda f: hessian(lambda t: f(t).sum()),
    "grad of grad": lambda f: grad(lambda t: grad(lambda s: f(s).sum())(t).sum()),
    "vmap of grad": lambda f: lambda x: vmap(grad(lambda t: f(t).sum()))(torch.stack([x, x + 0.1])),
    "forward mode": in_forward_mode,
}


def sample() -> Tensor:
    return torch.tensor([-1.3, -0.4, 0.3, 2.0], dtype=torch.float64)


@pytest.fixture(autouse=True)
def _what_is_defined() -> None:
    torch._dynamo.reset()


# All transforms of one activation, grad of all, and each other transform of one more; the others by -m slow.
OF_OTHERS = {
    ("relu", "vmap of grad"), ("tanh", "hessian"), ("leaky_relu", "jacrev"), ("silu, in place", "forward mode"),
    ("prelu", "jvp"), ("rrelu", "jvp"), ("rrelu", "jacfwd"), ("xielu", "vjp"), ("defined", "grad of grad"),
    ("defined by source", "jacfwd"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "transform"), [
    (pytest.param if name == "gelu" or transform == "grad" or (name, transform) in OF_OTHERS else SLOW)(name, transform)
    for name in FUNCTIONS for transform in TRANSFORMS
])  # fmt: skip
def test_compiled_transforms(name: str, transform: str) -> None:
    """An activation without a formula runs uncompiled; before torch 2.13 that is an error."""
    ours, theirs = FUNCTIONS[name]
    ours(sample())
    compiled = torch.compile(TRANSFORMS[transform](ours), backend="aot_eager", fullgraph=name != "defined by source")
    if name == "defined by source" and BEFORE_2_13:
        with pytest.raises(Exception, match="define it with reference="):
            compiled(sample())
        return
    if name == "rrelu" and transform in ("jacfwd", "hessian", "vmap of grad"):
        with pytest.raises(RuntimeError, match="random"):  # as without torch.compile
            compiled(sample())
        return
    torch.testing.assert_close(compiled(sample()), TRANSFORMS[transform](theirs)(sample()))


@pytest.mark.parametrize(("backend", "name"), [
    ("eager", "gelu"),
    ("inductor", "gelu"),
    SLOW("eager", "relu"),
    SLOW("inductor", "relu"),
])  # fmt: skip
def test_compiled_transforms_on_other_backends(backend: str, name: str) -> None:
    ours, theirs = FUNCTIONS[name]
    for transform in ("grad", "jvp", "hessian", "vmap of grad", "forward mode"):
        torch._dynamo.reset()
        compiled = torch.compile(TRANSFORMS[transform](ours), backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(sample()), TRANSFORMS[transform](theirs)(sample()), rtol=1e-6, atol=1e-6)


def test_what_a_definition_calls_is_looked_at_while_tracing() -> None:
    """The first use of the activation that it calls is while tracing."""
    jitact.define("calls_another", "silu(x) * w", w=jitact.Row())
    vars(jitact.get("silu").activation).pop("layout", None)
    x, w = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    loss = lambda x, w: jitact.calls_another(x, w).sum()  # noqa: E731
    found = torch.compile(lambda x, w: grad(loss, (0, 1))(x, w), fullgraph=True, backend="eager")(x, w)
    expected = grad(lambda x, w: (F.silu(x) * w[:, None]).sum(), (0, 1))(x, w)
    torch.testing.assert_close(found, expected)


def test_a_kernel_file_without_a_formula_says_so() -> None:
    sourced(sample())
    with pytest.raises(Exception, match=r"by_source: transforms inside torch.compile.*define it with reference="):
        torch.compile(TRANSFORMS["grad"](sourced), backend="eager", fullgraph=True)(sample())
    with pytest.raises(RuntimeError, match=r"by_source: .*reference="):
        functionalize(sourced)(sample())


# Each transform and each preceding call once; the others by -m slow.
AFTER = {("grad", "a plain call"), ("jvp", "nothing"), ("vmap of grad", "jvp"), ("grad of grad", "a plain call"),
         ("forward mode", "forward mode"), ("grad", "forward mode")}  # fmt: skip


@pytest.mark.parametrize(("transform", "before"), [
    (pytest.param if (transform, before) in AFTER else SLOW)(transform, before)
    for before in ("nothing", "a plain call", "jvp", "forward mode")
    for transform in ("grad", "jvp", "vmap of grad", "grad of grad", "forward mode")
])  # fmt: skip
def test_transforms_of_compiled_functions(transform: str, before: str) -> None:
    """A graph compiled outside of a transform is not reused inside, or the reverse."""
    for name in ("relu", "gelu"):
        torch._dynamo.reset()
        ours, theirs = FUNCTIONS[name]
        compiled = torch.compile(ours, backend="aot_eager")
        if before == "a plain call":
            compiled(sample())
        elif before != "nothing":
            TRANSFORMS[before](compiled)(sample())
        torch.testing.assert_close(TRANSFORMS[transform](compiled)(sample()), TRANSFORMS[transform](theirs)(sample()))
        torch.testing.assert_close(compiled(sample()), theirs(sample()))


@pytest.mark.parametrize("name", ["elu", "celu", "selu", "prelu", "clamped_swiglu", "swiglu_step", "gelu_10"])
def test_gradients_at_a_kink_are_the_same_in_a_transform(name: str) -> None:
    """Also with PyTorch 2.14, where clamp's gradient at its bounds is 0 and no longer 1."""
    function = getattr(jitact, name)
    if name == "prelu":
        function = functools.partial(function, weight=WEIGHT)
    elif name in ("clamped_swiglu", "swiglu_step"):
        function = lambda t, of=function: of(t, t.flip(0), limit=7.0) + of(t, t, limit=7.0)  # noqa: E731
    x = torch.tensor([0.0, -0.0, 7.0, -7.0, 10.0, -10.0, 1.0, 2.0], dtype=torch.float64)
    learned = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(function(learned).sum(), learned)
    torch.testing.assert_close(grad(lambda t: function(t).sum())(x), expected)


# Batches of gradients.

LAYOUTS = {
    "contiguous": lambda: torch.randn(2, 3, 4, 5, dtype=torch.float64),
    "channels_last": lambda: torch.randn(2, 3, 4, 5, dtype=torch.float64).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(4, 6, dtype=torch.float64).t(),
    "sliced": lambda: torch.randn(4, 6, dtype=torch.float64)[::2, ::2],
}


def drawn(t: Tensor) -> Tensor:
    torch.manual_seed(0)
    return jitact.rrelu(t, training=True)


def check_batches(function: Callable[[Tensor], Tensor], layout: str) -> None:
    """Compares with one gradient at a time, and checks that there is no warning, as about a slow fallback."""
    torch.manual_seed(1)
    x = LAYOUTS[layout]().requires_grad_()
    y = function(x)
    batch = torch.randn(3, *y.shape, dtype=y.dtype)
    expected = torch.stack([torch.autograd.grad(y, x, dy, retain_graph=True)[0] for dy in batch])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for more in (False, True):
            options = {"retain_graph": True, "create_graph": more}
            explicit = vmap(lambda dy, options=options: torch.autograd.grad(y, x, dy, **options)[0])(batch)
            (implicit,) = torch.autograd.grad(y, x, batch, is_grads_batched=True, **options)
            torch.testing.assert_close(explicit, expected)
            torch.testing.assert_close(implicit, expected)
            jacobians = [
                torch.autograd.functional.jacobian(function, x[0], vectorize=v, create_graph=more) for v in (True, False)
            ]
            torch.testing.assert_close(*jacobians)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("activation", "save"), CASES, ids=CASE_IDS)
def test_batched_gradients(activation: Activation, save: str, layout: str) -> None:
    check_batches(jitact.get(activation.name)(save=save), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batched_gradients_with_tensors_beside_x(layout: str) -> None:
    check_batches(lambda t: jitact.prelu(t, WEIGHT), layout)
    check_batches(lambda t: jitact.prelu(t, WEIGHT.clone().requires_grad_()), layout)
    check_batches(lambda t: jitact.xielu(t, WEIGHT, WEIGHT), layout)
    check_batches(drawn, layout)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_batched_gradients_round_as_single_ones(dtype: torch.dtype) -> None:
    x = torch.randn(100).to(dtype).requires_grad_()
    batch = torch.randn(3, 100).to(dtype)
    for function in (jitact.leaky_relu, lambda t: jitact.prelu(t, WEIGHT.to(dtype))):
        y = function(x)
        for dy, dx in zip(batch, vmap(lambda dy, y=y: torch.autograd.grad(y, x, dy, retain_graph=True)[0])(batch), strict=True):
            assert torch.equal(dx, torch.autograd.grad(y, x, dy, retain_graph=True)[0])
    infinite = torch.full((1, 100), torch.inf, dtype=dtype)
    y = jitact.relu(x)
    assert not vmap(lambda dy: torch.autograd.grad(y, x, dy)[0])(infinite).isnan().any()


# torch.fx, functionalize.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.activations = nn.Sequential(
            jitact.get("gelu")("tanh"),
            jitact.get("leaky_relu")(0.3, inplace=True),
            jitact.get("prelu")(4),
            jitact.get("rrelu")().eval(),
            jitact.get("xielu")(dtype=torch.float32),
        )

    def forward(self, x):  # without annotations, which torch.fx cannot pickle where they are strings
        return self.activations(self.linear(x)) + jitact.elu(x, 0.5, save="input")


def test_torch_fx() -> None:
    """Traced models contain calls of jitact's functions, and run, train and pickle."""
    model, x = Net(), torch.randn(3, 4)
    traced = torch.fx.symbolic_trace(model)
    names = [node.target.__name__ for node in traced.graph.nodes if node.op == "call_function"]
    assert names == ["gelu_tanh", "leaky_relu", "prelu", "rrelu", "xielu", "elu", "add"]
    for each in (traced, pickle.loads(pickle.dumps(traced))):
        torch.testing.assert_close(each(x), model(x), rtol=0, atol=0)
        weights = [torch.autograd.grad(m(x).sum(), list(m.parameters())) for m in (each, model)]
        torch.testing.assert_close(*weights)
    replaced = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Softmax(-1), nn.Unflatten(1, (1, 2, 2)), nn.Softmax2d())
    assert len(jitact.replace(replaced).replaced) == 3
    torch.testing.assert_close(torch.fx.symbolic_trace(replaced)(x), replaced(x))


def test_torch_fx_of_an_activation_alone() -> None:
    """The traced module accepts the activation's tensors, and no other arguments, which it would ignore."""
    x, y = torch.randn(2, 3, 4)
    for name, arguments in (("gelu", {"bias": 4}), ("prelu", {}), ("xielu", {"dtype": torch.float32}), ("rrelu", {})):
        model = jitact.get(name)(**arguments).eval()
        traced = torch.fx.symbolic_trace(model)
        assert torch.equal(traced(x), model(x)) and torch.equal(pickle.loads(pickle.dumps(traced))(x), model(x))
        with pytest.raises(TypeError, match="residual"):
            traced(x, residual=y)
    for model in (jitact.get("swiglu")(), jitact.get("softmax")(-1), jitact.get("softmin")(-1)):
        assert torch.equal(pickle.loads(pickle.dumps(torch.fx.symbolic_trace(model)))(x), model(x))
    model = jitact.define("silu_times", "silu(x) * y")()
    assert torch.equal(torch.fx.symbolic_trace(model)(x, y), model(x, y))


class OnBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.randn(3, 4))
        self.biased, self.buffered, self.act = jitact.get("gelu")(bias=4), jitact.get("gelu")(bias=4), nn.SiLU()
        del self.buffered.bias
        self.buffered.register_buffer("bias", torch.randn(4))

    def forward(self, x):
        return x * self.act(self.held) + self.biased(self.held) + self.buffered(self.held) + self.buffered(x)


def test_torch_fx_of_buffers() -> None:
    """Buffers are tensors while torch.fx traces; parameters and inputs are proxies."""
    model, x = nn.Sequential(OnBuffers()), torch.randn(3, 4)
    assert jitact.replace(model).replaced[0].new == "jitact SwiGLU with the product"
    nn.init.normal_(model[0].biased.bias)
    traced = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(traced(x), model(x))
    torch.testing.assert_close(*[torch.autograd.grad(m(x).sum(), m.parameters()) for m in (traced, model)])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.randn(3, 4))

    def forward(self, scores, mask):
        shares = jitact.softmax(scores, -1, scale=0.5, mask=mask, save="input")
        return shares + jitact.log_softmax(self.seen, -1, mask=mask) + jitact.sink_softmax(scores, 0)


def test_torch_fx_of_rows() -> None:
    """Calls of row functions, also of user-defined ones, are traced with their options, even if only the mask is a proxy."""
    jitact.define("sink_softmax", source=SINK)
    model, scores, mask = Attention(), torch.randn(3, 4), torch.randn(3, 4)
    traced = torch.fx.symbolic_trace(model)
    nodes = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert [node.target.__name__ for node in nodes] == ["softmax", "log_softmax", "add", "sink_softmax", "add"]
    assert nodes[0].kwargs["scale"] == 0.5 and nodes[0].kwargs["save"] == "input"
    for each in (traced, pickle.loads(pickle.dumps(traced))):
        torch.testing.assert_close(each(scores, mask), model(scores, mask), rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "defined by source"])
def test_functionalize(name: str) -> None:
    ours, theirs = FUNCTIONS[name]
    for x in (sample(), sample().requires_grad_()):
        torch.testing.assert_close(functionalize(ours)(x), theirs(x))
        torch.testing.assert_close(make_fx(functionalize(ours))(x)(x), theirs(x))
        if x.requires_grad:
            gradients = [torch.autograd.grad(f(x).sum(), x)[0] for f in (functionalize(ours), theirs)]
            torch.testing.assert_close(*gradients)
    inner = grad(lambda t: ours(t).sum())
    torch.testing.assert_close(functionalize(inner)(sample()), grad(lambda t: theirs(t).sum())(sample()))
    torch.testing.assert_close(make_fx(functionalize(inner))(sample())(sample()), inner(sample()))


# torch.export.


class Residual(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(4, 4), activation

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return h * 2 + self.activation(h * 1)


EXPORTED: dict[str, Callable[[], nn.Module]] = {
    "relu": jitact.get("relu"),
    "gelu": jitact.get("gelu"),
    "hardsigmoid": jitact.get("hardsigmoid"),
    "leaky_relu": lambda: jitact.get("leaky_relu")(0.2),
    "silu, in place": lambda: jitact.get("silu")(inplace=True),
    "prelu": jitact.get("prelu"),
    "rrelu": lambda: jitact.get("rrelu")(0.2, 0.2),
    "xielu": lambda: jitact.get("xielu")(dtype=torch.float32),
}


@pytest.mark.parametrize(("name", "strict"), [
    (pytest.param if name in always else SLOW)(name, strict, id=f"{name}-{'strict' if strict else 'traced'}")
    for name in EXPORTED
    for strict, always in ((False, EXPORTED.keys() - {"hardsigmoid", "leaky_relu", "rrelu"}), (True, {"gelu", "prelu"}))
])  # fmt: skip
def test_export(name: str, strict: bool) -> None:
    """With a dynamic dimension, results and gradients of the exported program are the model's."""
    torch.manual_seed(0)
    model, x = Residual(EXPORTED[name]()), torch.randn(5, 4)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    shapes = {"x": {0: torch.export.Dim("n")}}
    program = torch.export.export(model, (torch.randn(3, 4),), dynamic_shapes=shapes, strict=strict)
    drawing = ["jitact.seed.default"] if name == "rrelu" else []
    ours = [str(n.target) for n in program.graph.nodes if "jitact" in str(n.target)]
    assert ours == [*drawing, f"jitact.{name.split(',')[0]}.default"]
    for module in (program.module(), program.run_decompositions().module()):
        torch.testing.assert_close(module(x), model(x))
    module = program.module()
    torch.testing.assert_close(torch.autograd.grad(module(x).sum(), list(module.parameters())), expected)
    compiled = torch.compile(module, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), list(module.parameters())), expected)
    torch.testing.assert_close(grad(lambda t: module(t).sum())(x), grad(lambda t: model(t).sum())(x))
    with torch.no_grad():
        torch.testing.assert_close(module(x[:2]), model(x[:2]))
        torch.testing.assert_close(in_forward_mode(module)(x), in_forward_mode(model)(x))


def through_grad(f: Callable[[Tensor], Tensor], x: Tensor) -> None:
    grad(lambda t: f(t).sum())(x)


LEAKS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "grad": through_grad,
    "grad in grad": lambda f, x: grad(lambda t: grad(lambda s: f(s).sum())(t).sum())(x),
    "vjp": vjp,
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),)),
}
USES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "x": (lambda t, b: jitact.gelu(t), lambda t, b: F.gelu(t)),
    "a module": (lambda t, b: jitact.get("relu")()(t), lambda t, b: F.relu(t)),
    "in place": (lambda t, b: jitact.silu(t, inplace=True), lambda t, b: F.silu(t.clone())),
    "bias": (lambda t, b: jitact.gelu(b, bias=t[0]), lambda t, b: F.gelu(b + t[0])),
    "residual": (lambda t, b: jitact.gelu(b, residual=t), lambda t, b: F.gelu(b) + t),
    "beside a learned bias": (lambda t, b: jitact.gelu(t, bias=b[0]), lambda t, b: F.gelu(t + b[0])),
    "a weight": (lambda t, b: jitact.prelu(b, t.flatten()[:6]), lambda t, b: F.prelu(b, t.flatten()[:6])),
    "gate and up": (lambda t, b: jitact.swiglu(t, t), lambda t, b: F.silu(t) * t),
    "both in one": (lambda t, b: jitact.swiglu(t), lambda t, b: F.silu(t[:, :3]) * t[:, 3:]),
    "row_weight": (
        lambda t, b: jitact.swiglu(b.flatten()[:8].view(4, 2), row_weight=t.flatten()[:4]),
        lambda t, b: F.silu(b.flatten()[:8:2]).unsqueeze(-1) * b.flatten()[1:8:2].unsqueeze(-1) * t.flatten()[:4].unsqueeze(-1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("leak", LEAKS)
def test_tensors_that_outlived_their_transform(leak: str, use: str, learned: bool) -> None:
    """Such tensors hide their history, and after jvp also that they require a gradient."""
    found = []
    for f in USES[use]:
        x = torch.linspace(-2, 2, 24, dtype=torch.float64).view(4, 6).requires_grad_()
        beside = torch.linspace(-1, 2, 24, dtype=torch.float64).view(4, 6).requires_grad_(learned)
        made: list[Tensor] = []
        LEAKS[leak](lambda t, made=made: made.append(t * 2) or t * 2, x)
        y = f(made[0], beside)
        wanted = (x, beside) if learned else (x,)
        found.append((y.detach(), *torch.autograd.grad((y * y).sum(), wanted, allow_unused=True)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("inplace", [False, True])
def test_tensors_that_outlived_vmap_are_an_error(inplace: bool) -> None:
    made: list[Tensor] = []
    torch.vmap(lambda t: made.append(t * 2) or t)(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match=r"relu: a tensor outlived the torch\.vmap in which it was made"):
        jitact.relu(made[0], inplace=inplace)


def test_what_is_changed_in_place_after_its_transform_is_no_wrapper() -> None:
    out = []
    torch.func.grad(lambda a: (out.append(a * 1), a.sum())[1])(torch.randn(5))
    with torch.no_grad():
        assert not torch._C._functorch.is_functorch_wrapped_tensor(jitact.relu(out[0], inplace=True))


@pytest.mark.parametrize("leak", LEAKS)
def test_rows_that_outlived_their_transform(leak: str) -> None:
    """With tensors large enough for the kernel."""
    found = []
    for f in (jitact.softmax, F.softmax):
        x = torch.linspace(-9, 9, 512 * 512).sin().view(512, 512).requires_grad_()
        made: list[Tensor] = []
        LEAKS[leak](lambda t, made=made: made.append(t * 2) or t * 2, x)
        y = f(made[0], -1)
        found.append((y.detach(), *torch.autograd.grad((y * x.detach()).sum(), x)))
    torch.testing.assert_close(*found)
