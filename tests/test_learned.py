"""The activations with tensors beside x: prelu and xielu, whose weights are learned, and rrelu, whose slopes are random."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from common import DTYPES, slow_but
from torch import Tensor

import jitact
from jitact import prelu, rrelu, xielu
from jitact.accuracy import every_16bit_value, ulp_error
from jitact.configs import load
from jitact.measuring.limits import OF_SUMS
from jitact.modules import ActivationModule
from jitact.references import XIELU as XIELUModel

RECORDS = {name: jitact.get(name).activation for name in ("prelu", "rrelu", "xielu")}
PReLU, RReLU, XIELU = map(jitact.get, RECORDS)


def gradients(function: Callable[..., Tensor], dy: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The value of a function, and its gradients with respect to all arguments."""
    tensors = tuple(t.detach().requires_grad_() for t in tensors)
    y = function(*tensors)
    return y.detach(), *torch.autograd.grad(y, tensors, dy)


def assert_prelu(x: Tensor, weight: Tensor, dy: Tensor | None = None) -> None:
    """Forward and dx bitwise, dw within the rounding of its sum, for every combination of arguments that require gradients."""
    dy = torch.randn(x.shape, device=x.device, dtype=x.dtype) if dy is None else dy
    y, dx, dw = gradients(prelu, dy, x, weight)
    exact_y, exact_dx, exact_dw = gradients(F.prelu, dy.double(), x.double(), weight.double())
    assert torch.equal(y, exact_y.to(x.dtype)) and torch.equal(dx, exact_dx.to(x.dtype))
    assert y.stride() == dx.stride() == torch.empty_like(x).stride()
    terms = gradients(F.prelu, dy.double().abs(), -x.double().abs(), weight.double())[2].abs()
    assert dw.dtype == weight.dtype and dw.shape == weight.shape
    assert ((dw.double() - exact_dw).abs() <= OF_SUMS[x.dtype] * terms + 1e-7).all()
    assert torch.equal(gradients(lambda x: prelu(x, weight), dy, x)[1], dx), "with one bit kept"
    assert torch.equal(gradients(lambda w: prelu(x, w), dy, weight)[1], dw), "without dx"
    assert torch.equal(prelu(x.detach(), weight.detach()), y)


# fmt: off
# Planes shorter and longer than a vector, a warp and a block; numbers of channels that are multiples of vectors or not.
SHAPES = [(7,), (1025,), (40_001,), (5, 1), (1, 5), (3000, 3), (300, 64), (2, 3000), (700, 5, 3), (90, 3, 7), (50, 16, 8),
          (9, 257, 31), (11, 3, 49), (6, 3, 33), (3, 3, 2047), (2, 2, 2048), (2, 3, 1537), (2, 1, 4099), (4, 64, 4, 7)]
# fmt: on


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prelu(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device=device).to(dtype)
    for channels in {1, shape[1] if len(shape) > 1 else 1}:
        assert_prelu(x, torch.randn(channels, device=device).to(dtype))


LAYOUTS = {
    "channels last": lambda: torch.randn(5, 6, 7, 9).to(memory_format=torch.channels_last),
    "channels last, many": lambda: torch.randn(3, 300, 4, 3).to(memory_format=torch.channels_last),
    "channels outermost": lambda: torch.randn(6, 40, 50).transpose(0, 1),
    "transposed": lambda: torch.randn(33, 65).t(),
    "permuted": lambda: torch.randn(4, 5, 6, 7).permute(2, 0, 3, 1),
    "sliced": lambda: torch.randn(40, 50, 6)[::2, 1::3],
    "offset": lambda: torch.randn(5001)[1:].view(10, 5, 100),
    "expanded": lambda: torch.randn(9, 1, 7).expand(9, 5, 7),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_prelu_layouts(layout: str, dtype: torch.dtype, device: str) -> None:
    x = LAYOUTS[layout]()
    if layout != "expanded":
        size = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1 + x.storage_offset()
        memory = torch.randn(size, device=device).to(dtype)
        x = memory.as_strided(x.shape, x.stride(), x.storage_offset())
    else:
        x = x.to(device, dtype)
    weight = torch.randn(2 * x.shape[1], device=device).to(dtype)
    assert_prelu(x, weight[: x.shape[1]])
    assert_prelu(x, weight[::2], torch.ones((), device=device, dtype=dtype).expand_as(x))
    assert_prelu(x, weight[:1].expand(x.shape[1]), torch.randn(x.mT.shape, device=device, dtype=dtype).mT)


def test_the_order_of_sums_does_not_depend_on_threads() -> None:
    threads = torch.get_num_threads()
    x, dy = torch.randn(2, 40, 3, 3001)
    results = []
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        results.append(gradients(prelu, dy, x, torch.full((3,), 0.3))[2])
    torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_the_same_call_gives_the_same_bits(device: str) -> None:
    x, dy = torch.randn(2, 300, 8, 50, device=device)
    first, *others = [gradients(prelu, dy, x, torch.full((8,), 0.3, device=device))[2] for _ in range(5)]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", RECORDS)
def test_empty_and_scalar_inputs(name: str, device: str) -> None:
    module = jitact.get(name)().to(device, torch.float32)
    for shape in ((), (0,), (0, 3), (4, 0, 5), (1,)):
        x = torch.randn(shape, device=device, requires_grad=True)
        y = module(x)
        for gradient in torch.autograd.grad(y.sum(), [x, *module.parameters()]):
            assert gradient.isfinite().all() and (x.numel() or not gradient.any())
        assert y.shape == x.shape


def test_special_values(device: str) -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-30, -1e-30], device=device)
    weight = torch.tensor([0.25], device=device)
    for ours, theirs in zip(gradients(prelu, torch.ones_like(values), values, weight)[:2],
                            gradients(F.prelu, torch.ones_like(values), values, weight)[:2], strict=True):  # fmt: skip
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(ours.signbit()[1:], theirs.signbit()[1:])
    torch.manual_seed(0)
    y, slope = gradients(lambda x: rrelu(x, training=True), torch.ones_like(values), values)
    assert slope[:2].eq(1).all() and slope[3:5].lt(0.34).all(), "as PyTorch: 1 at NaN, the random slope at 0"
    assert y[0].isnan() and y[1] == math.inf and y[2] == -math.inf and y[4].signbit()
    y, slope, *_ = gradients(xielu, torch.ones_like(values), values, weight, weight)
    assert y[0].isnan() and y[1] == y[2] == math.inf and slope[0].isnan()


# xielu.


def exact_xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """The formula without cancellation of terms in x, and with the whole slope at eps, where PyTorch's autograd gives half."""
    n = F.softplus(alpha_n)
    bounded = torch.where(x <= eps, x, eps)
    return torch.where(x > 0, F.softplus(alpha_p) * x * x + beta * x, (n + beta) * torch.expm1(bounded) - n * x)


def check_xielu(x: Tensor, module: XIELU, bounds: tuple[float, float]) -> None:
    """Forward and slope in ulp, below 2^-8 in the ulp at 2^-8, as both are differences near their zeros."""
    weights = [w.double() for w in (module.alpha_p, module.alpha_n, module.beta, module.eps)]
    y, slope = gradients(module, torch.ones_like(x), x)
    exact_y, exact_slope = gradients(lambda x: exact_xielu(x, *weights), torch.ones_like(x).double(), x.double())
    assert ulp_error(y.cpu(), exact_y.cpu(), x.dtype, floor=2.0**-8).max() <= bounds[0]
    assert ulp_error(slope.cpu(), exact_slope.cpu(), x.dtype, floor=2.0**-8).max() <= bounds[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_xielu_on_every_16_bit_value(dtype: torch.dtype, device: str) -> None:
    x = every_16bit_value(dtype).to(device)
    x = x[x.isfinite()]
    check_xielu(x, XIELU(dtype=dtype).to(device), (0.6, 0.8))
    check_xielu(x, XIELU(0.2, 3.0, beta=0.1, dtype=dtype).to(device), (2.0, 4.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_xielu_wide(dtype: torch.dtype, device: str) -> None:
    """Within a few roundings of the terms that forward and slope are sums of."""
    x = torch.cat([torch.randn(100_000) * 3, -torch.logspace(-10, 4, 1001), torch.logspace(-10, 4, 1001)]).to(device, dtype)
    module = XIELU(dtype=dtype).to(device)
    y, slope = gradients(module, torch.ones_like(x), x)
    wide, weights = x.double(), [w.detach().double() for w in (module.alpha_p, module.alpha_n, module.beta, module.eps)]
    exact_y, exact_slope = gradients(lambda x: exact_xielu(x, *weights), torch.ones_like(wide), wide)
    bound = 4 * torch.finfo(dtype).eps
    assert ((y - exact_y).abs() <= bound * (exact_y.abs() + wide.abs().clamp(max=1e4))).all()
    assert ((slope - exact_slope).abs() <= bound * (exact_slope.abs() + 1)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_xielu_weight_gradients(dtype: torch.dtype, device: str) -> None:
    for n in (1, 1000, 100_003):
        x, dy = torch.randn(2, n, device=device).to(dtype)
        module = XIELU(dtype=dtype).to(device)
        weights = [module.alpha_p, module.alpha_n]
        fixed = [module.beta, module.eps]
        ours = gradients(lambda x, p, n: xielu(x, p, n, *fixed), dy, x, *weights)
        wide = [t.double() for t in (x, *weights, *fixed)]
        exact = gradients(lambda x, p, n: exact_xielu(x, p, n, *wide[3:]), dy.double(), *wide[:3])
        terms = (dy.double() * x.double().square()).abs().sum() + dy.double().abs().sum()
        for i in (2, 3):
            assert ours[i].dtype == dtype and (ours[i].double() - exact[i]).abs().item() <= 2 * OF_SUMS[dtype] * terms
        alone = gradients(lambda p, n: xielu(x, p, n, *fixed), dy, *weights)
        assert torch.equal(alone[1], ours[2]) and torch.equal(alone[2], ours[3])
        frozen = gradients(lambda x: xielu(x, *(w.detach() for w in weights), *fixed), dy, x)
        assert torch.equal(frozen[1], ours[1])


def test_xielu_stands_in_for_transformers(device: str) -> None:
    ours, theirs = XIELU().to(device), XIELUModel().to(device)
    shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    assert {k: (v.shape, v.dtype) for k, v in ours.state_dict().items()} == {k: (v, torch.bfloat16) for k, v in shapes.items()}
    theirs.load_state_dict({k: v + 1 for k, v in ours.state_dict().items()})
    ours.load_state_dict(theirs.state_dict())
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(100, 3, device=device, dtype=dtype)
        assert ours(x).dtype == theirs(x).dtype == dtype
        torch.testing.assert_close(ours(x), theirs(x), rtol=0.05, atol=0.05)
    x = torch.randn(10, device=device, dtype=torch.bfloat16)
    assert ours.to(torch.float32)(x).dtype == theirs.to(torch.float32)(x).dtype == torch.float32
    alphas = (ours.alpha_p, ours.alpha_n)
    tensors = (torch.tensor(value, device=device) for value in (1.5, -0.2))
    assert torch.equal(xielu(x, *alphas, 1.5, -0.2), xielu(x, *alphas, *tensors))


# Derivatives, transforms, torch.compile.


def cases(device: str) -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    x = torch.tensor([-3.1, -1.2, -0.4, 0.3, 0.9, 2.2], dtype=torch.float64, device=device, requires_grad=True)
    one, three = (torch.linspace(0.1, 0.9, n, dtype=torch.float64, device=device, requires_grad=True) for n in (1, 3))

    def drawn(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return rrelu(x, 0.2, 0.4, training=True)

    return {
        "prelu": (prelu, (x, one)),
        "prelu, channels": (prelu, (x.detach().view(2, 3).requires_grad_(), three)),
        "prelu, frozen": (lambda x: prelu(x, three.detach()), (x.detach().view(2, 3).requires_grad_(),)),
        "xielu": (lambda x, p, n: xielu(x, p, n), (x, one, one.detach().neg().requires_grad_())),
        "rrelu": (drawn, (x,)),
    }


@pytest.mark.parametrize("name", cases("cpu"))
def test_derivatives(name: str, device: str) -> None:
    function, arguments = cases(device)[name]
    transforms = {"check_forward_ad": True, "check_batched_forward_grad": True} if name != "rrelu" else {}
    assert torch.autograd.gradcheck(function, arguments, check_batched_grad=True, **transforms)
    assert torch.autograd.gradgradcheck(function, arguments, check_fwd_over_rev=name != "rrelu")


def test_func_transforms(device: str) -> None:
    x, weight = torch.randn(6, 4, 3, 2, device=device), torch.rand(3, device=device)
    ours = torch.func.vmap(torch.func.grad(lambda w, x: prelu(x, w).sum()), in_dims=(None, 0))(weight, x)
    theirs = torch.func.vmap(torch.func.grad(lambda w, x: F.prelu(x, w).sum()), in_dims=(None, 0))(weight, x)
    torch.testing.assert_close(ours, theirs)
    module = XIELU(dtype=torch.float32).to(device)
    call = torch.func.grad(lambda p, x: torch.func.functional_call(module, p, x).sum())
    per_sample = torch.func.vmap(call, in_dims=(None, 0))
    for name, gradient in per_sample(dict(module.named_parameters()), x).items():
        one_by_one = [torch.autograd.grad(module(row).sum(), module.get_parameter(name))[0] for row in x]
        torch.testing.assert_close(gradient, torch.stack(one_by_one), rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="random"):
        torch.func.vmap(lambda x: rrelu(x, training=True))(x)
    y = torch.func.vmap(lambda x: rrelu(x, training=True), randomness="different")(-x.abs())
    assert ((y / -x.abs() > 0.12) & (y / -x.abs() < 0.34)).all()


def test_prelu_of_stacked_weights_and_single_samples(device: str) -> None:
    """Nested vmap, of which only the outer one has a weight for each index: F.prelu's gradients are wrong there."""
    weight, x = torch.randn(3, 4, device=device), torch.randn(3, 5, 2, 4, device=device)

    def each(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        one = torch.func.grad(lambda w, x: function(x, w).square().sum(), argnums=(0, 1))
        return torch.func.vmap(torch.func.vmap(one, in_dims=(None, 0)))

    gates = jitact.gated("prelu").activation.function
    for ours in (prelu, lambda x, w: prelu(x, w, bias=w), lambda x, w: gates(x, x, weight=w)):
        pairs = [(one, w) for w, xs in zip(weight, x, strict=True) for one in xs]
        one_by_one = [gradients(lambda x, w, f=ours: f(x, w).square().sum(), None, *pair)[1:] for pair in pairs]
        for found, expected in zip(each(ours)(weight, x), reversed(list(zip(*one_by_one, strict=True))), strict=True):
            torch.testing.assert_close(found, torch.stack(expected).view_as(found))


@pytest.mark.parametrize("name", slow_but(RECORDS, ["prelu", "rrelu"]))
def test_compile_fullgraph(name: str, device: str) -> None:
    torch._dynamo.reset()
    module = jitact.get(name)().to(device, torch.float32)
    compiled = torch.compile(lambda x: module(x * 2) + 1, fullgraph=True)
    for shape in ((40, 30), (20, 7, 3, 3)):
        x = torch.randn(shape, device=device, requires_grad=True)
        y = compiled(x)
        ours = torch.autograd.grad(y.sum(), [x, *module.parameters()])
        if name == "rrelu":
            torch.testing.assert_close(y, 1 + ours[0] * x)
            assert ours[0].min() > 0.24 and (ours[0][x < 0] < 0.67).all()
        else:
            expected = torch.autograd.grad((module.Model.forward(module, x * 2) + 1).sum(), [x, *module.parameters()])
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert compiled(x).shape == x.shape


@pytest.mark.parametrize("name", RECORDS)
def test_opcheck(name: str, device: str) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    library, params = load(name, False), tuple(default for _, default in RECORDS[name].params)

    def operator(kind: str) -> Callable:
        return getattr(torch.ops.jitact, f"{library}_{kind}").default

    x = torch.randn(5, 3, 7, device=device).transpose(0, 2)
    scalars = [torch.full((), value, device=device) for value in (0.1, 0.2, 0.5, -1e-6)]
    extras = {"prelu": [torch.rand(3, 1, device=device)], "rrelu": [torch.tensor([17], device=device)], "xielu": scalars}[name]
    kinds = {"forward": (x,), "forward_": (x.clone(),), "backward": (torch.randn(x.shape, device=device), x)}
    learned = len(RECORDS[name].learned)
    wanted = [[1], [2], [(2 << learned) - 1]] if learned else [[]]  # dx only, the weight's only, all
    if name != "xielu":
        mask = operator("forward_bit")(x, *extras, *params)[1]
        kinds |= {"forward_bit": (x,), "forward_bit_": (x.clone(),), "backward_from_bit": (torch.randn_like(x), mask)}
    for kind, tensors in kinds.items():
        for last in wanted if kind == "backward" else [[]]:
            torch.library.opcheck(operator(kind), (*tensors, *extras, *params, *last), test_utils=tests)


def kept_bytes(function: Callable[[], Tensor]) -> int:
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        function()
    return sum(sizes)


def test_what_is_kept(device: str) -> None:
    x = torch.randn(8000, device=device, requires_grad=True)
    weight = torch.rand(1, device=device)
    assert kept_bytes(lambda: rrelu(x, training=True)) == 1000 + 8
    assert kept_bytes(lambda: prelu(x, weight)) == 1000 + 4
    assert kept_bytes(lambda: prelu(x, weight.clone().requires_grad_())) == x.nbytes + 4
    assert kept_bytes(lambda: prelu(x, weight, save="input")) == x.nbytes + 4, "if that is asked for"


def test_autocast(device: str) -> None:
    module, theirs = PReLU().to(device), torch.nn.PReLU().to(device)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(50, device=device, dtype=dtype, requires_grad=True)
        with torch.autocast(device, torch.bfloat16):
            y, expected = module(x), theirs(x)
        assert y.dtype == expected.dtype == torch.bfloat16 and torch.equal(y, expected)
        dx, dw = torch.autograd.grad(y.sum(), [x, module.weight])
        assert dx.dtype == x.dtype and dw.dtype == torch.float32


def test_weights_and_buffers_are_reset() -> None:
    module, new = XIELU(alpha_p_init=0.5).to("meta").to_empty(device="cpu"), XIELU(alpha_p_init=0.5)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.fill_(7)
    module.reset_parameters()
    torch.testing.assert_close(module.state_dict(), new.state_dict(), rtol=0, atol=0)
    assert (module.beta, module.eps) == (new.beta, new.eps)


def test_meta_tensors() -> None:
    x = torch.randn(4, 3, 6, device="meta").mT.requires_grad_()
    for module in (PReLU(6, device="meta"), RReLU(), XIELU().to("meta", torch.float32)):
        y = module(x)
        y.sum().backward()
        assert y.device.type == "meta" and y.shape == x.shape == x.grad.shape and y.stride() == x.stride()


# Modules and errors.


@pytest.mark.parametrize("name", RECORDS)
def test_modules(name: str) -> None:
    cls = jitact.get(name)
    module, theirs = cls(), cls.Model()
    assert isinstance(module, (ActivationModule, cls.Model)) and cls.activation is RECORDS[name]
    assert str(cls.__signature__).startswith(str(cls.activation.signature)[:20]) and cls.get_init_inputs() == []
    assert cls(*cls.get_init_inputs())(*cls.get_inputs(2, 5)).shape == (2, 5)
    theirs.load_state_dict(module.state_dict())
    module.load_state_dict(theirs.state_dict())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module.eval())), cls(save=cls.activation.saves[0])):
        assert type(other) is cls and other.state_dict().keys() == module.state_dict().keys()
    assert not pickle.loads(pickle.dumps(module)).training
    assert repr(theirs).split("(")[1][:5] in repr(cls()) and "fast_math=True" in repr(cls(fast_math=True))
    with pytest.raises(ValueError, match=f"{name}.*save='output'"):
        cls(save="output")


def test_constructors() -> None:
    assert PReLU(3, 0.5, dtype=torch.float64).weight.tolist() == [0.5] * 3 and PReLU(num_parameters=2).weight.shape == (2,)
    module = RReLU(0.2, upper=0.3, inplace=True)
    assert (module.lower, module.upper, module.inplace, module.training) == (0.2, 0.3, True, True)
    module = XIELU(0.7, 0.9, beta=0.4, dtype=torch.float64)
    assert F.softplus(module.alpha_p).item() == pytest.approx(0.7) and F.softplus(module.alpha_n).item() == pytest.approx(0.5)
    assert PReLU(fast_math=True)(torch.tensor([-1.0])).item() == -0.25


X = torch.randn(4, 3)
W = torch.rand(3)
ERRORS = [
    (lambda: jitact.get("xielu")(alpha_p_init=-1.0), ValueError, "xielu: alpha_p_init must be above 0, .*alpha_p_init=-1.0"),
    (lambda: jitact.get("xielu")(alpha_n_init=0.4), ValueError, "alpha_n_init above beta=0.5; got .*alpha_n_init=0.4"),
    (lambda: prelu([1.0], W), TypeError, "prelu: expected .*bfloat16 tensor, got a list"),
    (lambda: prelu(X.int(), W), TypeError, "prelu: expected .*, got an int32 tensor"),
    (lambda: prelu(X, 0.25), TypeError, "prelu: weight must be .*tensor, got a float"),
    (lambda: prelu(X, W.double()), TypeError, "prelu: weight must be of x's dtype, float32, got a float64 tensor"),
    (lambda: prelu(X, W.view(3, 1)), ValueError, r"prelu: weight must have at most 1 dimension, got 2: \(3, 1\)"),
    (lambda: prelu(X, torch.rand(4)), ValueError, "prelu: .* weight must be 1 or 3, as dimension 1 of x has 3; got 4"),
    (lambda: prelu(X[0], W), ValueError, "prelu: the number of values of weight must be 1, as x has 1 dimensions; got 3"),
    (lambda: prelu(X.sum(), W), ValueError, "1, as x has 0 dimensions; got 3"),
    (lambda: prelu(X, W.to("meta")), ValueError, "prelu: weight must be on the device of x, cpu, got one on meta"),
    (lambda: prelu(X, W, save="output"), ValueError, "prelu: save='output' is not possible; choose from 'bit', 'input'"),
    (lambda: prelu(X, W.clone().requires_grad_(), save="bit"), ValueError, "not enough for the gradient of weight, .*'input'"),
    (lambda: xielu(X, W[0], 0.3), TypeError, "xielu: alpha_n must be .*, got a float"),
    (lambda: xielu(X, W, W[0]), ValueError, r"xielu: alpha_p must hold one value, got 3: \(3,\)"),
    (lambda: xielu(X, W[0], W[0], W[:1].clone().requires_grad_()), ValueError, "xielu: beta is not learned"),
    (lambda: xielu(None, W[0], W[0]), TypeError, "xielu: expected .*, got None"),
    (lambda: rrelu(X, 0.4, 0.3), ValueError, "rrelu: needs -inf < lower <= upper < inf, got lower=0.4, upper=0.3"),
    (lambda: RReLU(0.1, math.inf), ValueError, "rrelu: needs -inf < .*upper=inf"),
    (lambda: RReLU("a"), TypeError, "rrelu: lower must be a number, got 'a'"),
    (lambda: rrelu(X.to_sparse()), TypeError, "rrelu: expected .*, got a sparse_coo float32 tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), ERRORS, ids=[message for *_, message in ERRORS])
def test_errors(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# GPUs.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_cuda_graphs() -> None:
    """The device reads weights and seeds, so a replay uses their current values."""
    x = torch.randn(5000, device="cuda", requires_grad=True)
    modules = [PReLU().cuda(), XIELU(dtype=torch.float32).cuda(), RReLU()]

    def run() -> list[Tensor]:
        found = []
        for module in modules:
            y = module(x)
            found += [y, *torch.autograd.grad(y.sum(), [x, *module.parameters()])]
        return found

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        for module in modules[:2]:
            for parameter in module.parameters():
                parameter.add_(0.1)
    graph.replay()
    expected = run()
    torch.testing.assert_close(captured[:-2], expected[:-2])
    first = captured[-2].clone()
    torch.testing.assert_close(captured[-2], captured[-1] * x)
    graph.replay()
    assert not torch.equal(captured[-2], first), "each replay draws anew"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("channels", [1, 4])
def test_more_than_2_to_the_31_elements(channels: int) -> None:
    n = 2**31 + 4096
    if torch.cuda.mem_get_info()[0] < 10 * n:
        pytest.skip("less than 21 GB of GPU memory is free")
    x = torch.zeros(n, device="cuda", dtype=torch.bfloat16)
    x[-2048:] = torch.randn(2048, device="cuda", dtype=torch.bfloat16)
    shape = (-1, channels) if channels > 1 else (-1,)
    weight = torch.rand(channels, device="cuda", dtype=torch.bfloat16)
    dy = torch.ones((), device="cuda", dtype=torch.bfloat16)
    y, dx, dw = gradients(prelu, dy.expand(n).view(shape), x.view(shape), weight)
    tail = [t.reshape(-1)[-2048:].view(shape) for t in (x, y, dx)]
    expected = gradients(prelu, dy.expand(2048).view(shape), tail[0], weight)
    assert torch.equal(tail[1], expected[0]) and torch.equal(tail[2], expected[1])
    torch.testing.assert_close(dw, expected[2])
