"""Softmax and its kin: what the kernels compute on a GPU, and which calls they take; everywhere, what PyTorch's do."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jitact
from jitact import kernels, rows
from jitact.kernels.loader.signature import read_signature
from jitact.measuring.ulp import ulp_error
from jitact.rows import functions

NAMES = ("softmax", "log_softmax", "softmin")
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ULP = {torch.float32: 4, torch.float16: 1, torch.bfloat16: 1}
INF, NAN = math.inf, math.nan
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels are the GPU's")

# For vectors of a row: shared by part of a warp, a warp, some warps, a block, and clusters of 2, 4 and 8.
VECTORS = (1, 2, 3, 13, 16, 31, 125, 128, 130, 500, 1024, 2047, 2048, 2049, 5000, 8192, 16001, 16384)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The operators that calls took."""
    found, operator = [], functions._operator

    def counted(name: str, kind: str):
        found.append((name, kind))
        return operator(name, kind)

    monkeypatch.setattr(functions, "_operator", counted)
    return found


def fits_the_gpu(vectors: int) -> bool:
    return vectors <= 2048 or torch.cuda.get_device_capability()[0] >= 9


def exact_output(name: str, x: Tensor) -> Tensor:
    """In float64, where log_softmax of a value far above the others needs log1p."""
    x = x.double() * (-1 if name == "softmin" else 1)
    highest, place = x.max(-1, keepdim=True)
    terms = (x - highest).exp()
    rest = terms.scatter(-1, place, 0.0).sum(-1, keepdim=True)
    return x - highest - rest.log1p() if name == "log_softmax" else terms / (1 + rest)


def exact_gradient(name: str, dy: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient that follows from an output, and the sum of the sizes of its terms, which roundings are parts of."""
    dy, y = dy.double(), y.double()
    if name == "log_softmax":
        p = y.exp()
        return dy - p * dy.sum(-1, keepdim=True), dy.abs() + p * dy.abs().sum(-1, keepdim=True)
    sign = -1 if name == "softmin" else 1
    exact = sign * y * (dy - (dy * y).sum(-1, keepdim=True))
    return exact, y * (dy.abs() + (dy.abs() * y).sum(-1, keepdim=True))


# The kernels.


@needs_gpu
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_as_exact_as_their_type(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    forward, backward = functions._operator(name, "forward"), functions._operator(name, "backward_from_output")
    half_ulp, tiny = torch.finfo(dtype).eps / 2, 16 * torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    for vectors in filter(fits_the_gpu, VECTORS):
        n = vectors * 16 // dtype.itemsize
        count = max(3, min(1001, 2**19 // n))  # more than one block's, and an odd number
        for spread in (1, 8, 30):
            x = (torch.randn(count, n, device="cuda") * spread).to(dtype)
            y = forward(x)
            errors = ulp_error(y, exact_output(name, x), dtype)
            assert errors.max() <= ULP[dtype], (n, spread, errors.max())
            dy = torch.randn_like(x)
            exact, sizes = exact_gradient(name, dy, y)
            # Rounded in float32: a term, 2 sums within a vector, their total, a difference, a product. In 16 bits: the result.
            bound = (6 if dtype is torch.float32 else 1.05) * half_ulp * sizes + tiny
            excess = ((backward(dy, y).double() - exact).abs() / bound).max()
            assert excess <= 1, (n, spread, excess)


STRANGE = [
    [INF, 0.0],
    [-INF, -INF],
    [NAN, 1.0],
    [-INF, 1.0, 2.0],
    [-6e4, -6e4],
    [6e4, -6e4],
    [0.0, -20.0, -60.0],
    [-3e6, -3e6 - 1, -3e6 - 2],
    [1048575.0, 1048577.0, 1048576.5],
    [-3.3e38, -3.3e38],
    [3.3e38, -3.3e38],
]


@needs_gpu
@pytest.mark.parametrize("vectors", [1, 300, 3000])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_do_with_strange_rows_what_pytorch_does(name: str, vectors: int) -> None:
    if not fits_the_gpu(vectors):
        pytest.skip("a GPU without clusters")
    sign = -1.0 if name == "softmin" else 1.0
    for dtype in KERNEL_DTYPES:
        x = torch.full((len(STRANGE), vectors * 16 // dtype.itemsize), -INF, dtype=torch.float64)
        for row, values in zip(x, STRANGE, strict=True):
            row[: len(values)] = torch.tensor(values, dtype=torch.float64)
        x = (sign * x).to(dtype).cuda()
        expected = getattr(F, name)(x.double(), -1).to(dtype)
        torch.testing.assert_close(functions._operator(name, "forward")(x), expected, equal_nan=True)


@needs_gpu
def test_equal_rows_have_equal_results() -> None:
    x = torch.randn(1, 2048, device="cuda").expand(77, -1).contiguous()
    y = functions._operator("softmax", "forward")(x)
    assert torch.equal(y, y[:1].expand_as(y))


@needs_gpu
def test_the_operators_refuse_what_they_cannot_read() -> None:
    forward, backward = (functions._operator("softmax", kind) for kind in ("forward", "backward_from_output"))
    x = torch.randn(8, 128, device="cuda")
    for wrong, message in (
        (x.double(), "float64|float32"),
        (x.t(), "contiguous"),
        (x[:, :127].contiguous(), "16-byte vectors"),
        (x.flatten()[1:897].view(7, 128), "aligned"),
        (x.new_empty(2, 4 * 16384 + 4), "16384"),
        (x[0, 0], "dimension"),
    ):
        with pytest.raises(RuntimeError, match=message):
            forward(wrong)
    with pytest.raises(RuntimeError, match="dy must be as y"):
        backward(x[:4], x)
    assert forward(x[:0]).shape == (0, 128)


# Which calls go to them.


@needs_gpu
@pytest.mark.parametrize("name", NAMES)
def test_kernels_take_what_they_were_measured_at(name: str, taken: list) -> None:
    function, both = getattr(jitact, name), [(name, "forward"), (name, "backward_from_output")]
    for dtype, n, expected in (
        (torch.bfloat16, 1024, both),
        (torch.float16, 32768, both[1:]),
        (torch.float32, 1024, both[1:]),
        (torch.float32, 4096, both[1:] if name == "log_softmax" else both),
    ):
        if not fits_the_gpu(n * dtype.itemsize // 16):
            continue
        taken.clear()
        x = torch.randn(3, 2**20 // n, n, device="cuda", dtype=dtype).requires_grad_()
        y, dy = function(x, 2), torch.randn_like(x).transpose(0, 1).contiguous().transpose(0, 1)
        (dx,) = torch.autograd.grad(y, x, dy)
        assert taken == expected, (dtype, n)
        theirs = getattr(F, name)(x, 2)
        torch.testing.assert_close(y, theirs)
        torch.testing.assert_close(dx, torch.autograd.grad(theirs, x, dy)[0])
        taken.clear()
        with torch.no_grad():
            assert torch.equal(function(x, -1), y) and taken == [each for each in expected if each[1] == "forward"]


@needs_gpu
def test_pytorch_takes_all_else(taken: list) -> None:
    x = torch.randn(512, 2048, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(jitact.softmax(x, 0), torch.softmax(x, 0))
    for other in (x.t(), x[:, :2047].contiguous(), x[:, ::2], x[:16], x.double(), torch.nn.functional.pad(x, (1, 0))[:, 1:]):
        assert torch.equal(jitact.softmax(other, -1), torch.softmax(other, -1))
    assert torch.equal(jitact.softmax(x, -1, torch.float32), torch.softmax(x, -1, torch.float32))
    with torch.autocast("cuda"):
        assert jitact.softmax(x, -1).dtype is torch.float32
    torch.func.vmap(lambda row: jitact.softmax(row, -1))(x)
    torch.func.jvp(lambda x: jitact.softmax(x, -1), (x,), (x,))
    assert not taken


@needs_gpu
@pytest.mark.parametrize("name", NAMES)
def test_second_gradients(name: str, taken: list) -> None:
    x = torch.randn(512, 4096, device="cuda").requires_grad_()
    dy, ddx = torch.randn_like(x).requires_grad_(), torch.randn_like(x)
    found = []
    for function in (getattr(jitact, name), getattr(F, name)):
        (dx,) = torch.autograd.grad(function(x, -1), x, dy, create_graph=True)
        found.append([dx, *torch.autograd.grad(dx, (x, dy), ddx)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    # The first gradient, which is differentiated, is PyTorch's; what it gives y goes on to x by the kernel.
    assert taken == [*([] if name == "log_softmax" else [(name, "forward")]), (name, "backward_from_output")]


# Everywhere.


@pytest.mark.parametrize("name", NAMES)
def test_functions_do_what_pytorchs_do(name: str, device: str) -> None:
    ours, theirs = getattr(jitact, name), getattr(F, name)
    for x in (
        torch.randn(3, 4, 5, device=device),
        torch.randn(5, device=device, dtype=torch.float64),
        torch.randn(0, 4, device=device),
        torch.randn(4, 0, device=device),
        torch.tensor(2.0, device=device),
        torch.randn(2, 3, device="meta"),
    ):
        for dim in range(-x.dim(), x.dim()):
            y = ours(x, dim)
            expected = theirs(x, dim)
            assert y.shape == expected.shape and y.dtype is expected.dtype and y.device == expected.device
            assert x.is_meta or torch.equal(y, expected)
    x = torch.arange(6, device=device).view(2, 3)
    assert torch.equal(ours(x, 1, torch.float64), theirs(x, 1, dtype=torch.float64))
    with pytest.warns(UserWarning, match="Implicit dimension choice"):
        assert torch.equal(ours(x.float()), theirs(x.float(), 1))


@pytest.mark.parametrize("name", NAMES)
def test_scale_and_masks(name: str, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, device=device, dtype=torch.float64).requires_grad_()
    keep = torch.rand(3, 4, device=device) > 0.4
    keep[:, 0], keep[2] = True, False
    added = torch.randn(2, 1, 4, device=device)
    sign = -1 if name == "softmin" else 1
    softmax = F.log_softmax if name == "log_softmax" else F.softmax
    function = getattr(jitact, name)
    for y, terms in (
        (function(x, -1, scale=0.25), 0.25 * sign * x),
        (function(x, 1, mask=keep, scale=3), (3 * sign * x).masked_fill(~keep, -INF)),
        (function(x, -1, mask=added), sign * x + added),
    ):
        expected = softmax(terms, 1 if y.shape == () or (terms == -INF).any() else -1)
        torch.testing.assert_close(y, expected, equal_nan=True)
    y = function(x, -1, mask=keep)
    assert y[:, 2].isnan().all() and (y[:, :2].exp() if name == "log_softmax" else y[:, :2])[:, ~keep[:2]].eq(0).all()
    kept = function(x[:, :2], -1, mask=keep[:2])
    (dx,) = torch.autograd.grad(kept.masked_fill(~keep[:2], 0).square().sum(), x)
    assert dx.isfinite().all() and dx[:, :2][:, ~keep[:2]].eq(0).all() and dx[:, :2].ne(0).any()
    assert function(x.half(), -1, torch.float32, mask=keep, scale=2).dtype is torch.float32


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([1.0], 0), {}, TypeError, "softmax: expected a tensor, got"),
        ((torch.ones(2), 0), {"mask": [True, False]}, TypeError, "softmax: mask is a tensor of bool or floating"),
        ((torch.ones(2), 0), {"mask": torch.ones(2, dtype=torch.int64)}, TypeError, "mask is a tensor of bool or floating"),
        ((torch.ones(2), 0), {"mask": torch.ones(3, 2)}, ValueError, r"must broadcast to \(2,\).*got \(3, 2\)"),
        ((torch.ones(2, 1), 0), {"mask": torch.ones(2)}, ValueError, "must broadcast"),
        ((torch.ones(2), 0), {"scale": torch.ones(2)}, TypeError, "scale is a number"),
        ((torch.ones(2), 1), {}, IndexError, "Dimension out of range"),
    ],
)
def test_errors(arguments: tuple, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        jitact.softmax(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_transforms_and_compile(device: str) -> None:
    x, v = torch.randn(2, 3, 4, device=device, dtype=torch.float64)
    for name in NAMES:
        ours, theirs = getattr(jitact, name), getattr(F, name)
        assert torch.equal(torch.func.vmap(lambda row, f=ours: f(row, 0))(x), theirs(x, 1))
        expected = torch.func.jvp(lambda x, f=theirs: f(x, 1), (x,), (v,))
        torch.testing.assert_close(torch.func.jvp(lambda x, f=ours: f(x, 1), (x,), (v,)), expected)
        assert torch.autograd.gradgradcheck(lambda x, f=ours: f(x, 1), x.clone().requires_grad_())
        compiled = torch.compile(lambda x, f=ours: f(x, 1), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), theirs(x, 1))


@pytest.mark.parametrize(("ours", "theirs"), [(getattr(rows, name), getattr(nn, name)) for name in
                                              ("Softmax", "LogSoftmax", "Softmin", "Softmax2d")])  # fmt: skip
def test_modules_stand_where_pytorchs_stand(ours: type, theirs: type, device: str) -> None:
    x, arguments = torch.randn(2, 3, 4, 4, device=device), () if ours is rows.Softmax2d else (1,)
    module = ours(*arguments)
    assert isinstance(module, theirs) and repr(module) == repr(theirs(*arguments))
    torch.testing.assert_close(pickle.loads(pickle.dumps(module))(x), theirs(*arguments)(x))


def test_get_tells_where_they_are() -> None:
    for name, function in (("softmax", "softmax"), ("LogSoftmax", "log_softmax")):
        with pytest.raises(KeyError, match=f"{name!r} works on rows, not on elements: call jitact.{function}, "):
            jitact.get(name)
    with pytest.raises(ValueError, match="an activation cannot be called 'softmax'"):
        jitact.define("softmax", "x")


def test_what_a_file_of_rows_declares() -> None:
    text = kernels.KernelSource.from_file("softmax").text
    assert read_signature(text).folds and read_signature(text).of("element") == ("x",)
    assert not kernels.KernelSource.from_file("relu").signature.folds
    for old, new, message in (
        ("ELEMENTWISE T fold(T x) { return x; }", "", "a file of rows defines fold, forward"),
        ("forward(T x, SumOfExp<T> row)", "forward(T x, Number<T> row)", r"forward must take \(T, SumOfExp<T>\)"),
        ("fold(T x) {", "fold(T x, T z) {", r"fold must take \(T\)"),
    ):
        assert old in text
        with pytest.raises(ValueError, match=message):
            read_signature(text.replace(old, new))
    with pytest.raises(ValueError, match="my_softmax: line 7: fold"):
        jitact.define("my_softmax", source=text)
