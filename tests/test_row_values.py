"""Kernel files of rows with operands: numbers, and tensors with a value for each row."""

from __future__ import annotations

import copy
import ctypes
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from common import SLOW
from rows_common import CODE, GRADIENT, OPERATIONS, emulated_library, folder_of_all, smallest
from torch import Tensor

import jitact
from jitact.kernels import KernelSource
from jitact.kernels.loader.signature import read_signature
from jitact.measuring.limits import SHARES_OF_LOGARITHMS
from jitact.rows import kernels as row_kernels
from jitact.rows.definition import RowDefinition
from jitact.rows.records import TABLE, Beside

SINK = """
#include "rows.cuh"

// exp(x_i) / (exp(s) + sum_j exp(x_j)): the sink s takes a share, and has no result
ELEMENTWISE T forward(T kept, LogSumExp<T> row, Row<T> sink) {
  return exp(row.log_share(kept)) * sigmoid(-row.log_share(sink));
}

ELEMENTWISE Many<T, 2> fold_from_output(T dy, T y, Row<T>) { return {dy * y, y}; }

ELEMENTWISE T backward_from_output(T dy, T y, Sum<T, 2> row, Row<T>) { return y * (dy - row.total); }

ELEMENTWISE T backward_of_row(Sum<T, 2> row, Row<T>) { return (row.of[1] - 1) * row.total; }
"""
LINE = """
#include "rows.cuh"

// a r log_share(x_i) + b
ELEMENTWISE T forward(T kept, LogSumExp<T> row, Number<T> a_, Row<T> r, Row<T> b) { return a_ * r * row.log_share(kept) + b; }

ELEMENTWISE Many<T, 2> fold_from_output(T dy, T y, Number<T>, Row<T>, Row<T> b) { return {dy, dy * (y - b)}; }

ELEMENTWISE T backward_from_output(T dy, T y, Sum<T, 2> row, Number<T> a_, Row<T> r, Row<T> b) {
  return a_ * r * (dy - exp((y - b) / (a_ * r)) * row.total);
}

ELEMENTWISE Many<T, 2> backward_of_row(Sum<T, 2> row, Number<T>, Row<T> r, Row<T>) { return {row.of[1] / r, row.of[0]}; }
"""
NUMBER = """
#include "rows.cuh"
ELEMENTWISE T forward(T kept, SumOfExp<T> row, Number<T> a) { return a * row.share(kept); }
ELEMENTWISE T fold_from_output(T dy, T y, Number<T>) { return dy * y; }
ELEMENTWISE T backward_from_output(T dy, T y, Sum<T> row, Number<T> a) { return y * (dy - row.total / a); }
"""
LOG_SINK = """
#include "rows.cuh"

// x_i - log(exp(s) + sum_j exp(x_j)), a term of whose gradients is not 0 where dy is
ELEMENTWISE T forward(T kept, LogSumExp<T> row, Row<T> sink) { return row.log_share(kept) - softplus(row.log_share(sink)); }

ELEMENTWISE Many<T, 2> fold_from_output(T dy, T y, Row<T>) { return {dy, exp(y)}; }

ELEMENTWISE T backward_from_output(T dy, T y, Sum<T, 2> row, Row<T>) { return dy - row.times_exp(y); }

ELEMENTWISE T backward_of_row(Sum<T, 2> row, Row<T>) { return (row.of[1] - 1) * row.total; }
"""


def with_sink(x: Tensor, sink: Tensor, dim: int) -> Tensor:
    beside = sink.expand([1 if i == dim % x.dim() else size for i, size in enumerate(x.shape)])
    return torch.softmax(torch.cat([x, beside], dim), dim).narrow(dim, 0, x.shape[dim])


def log_with_sink(x: Tensor, sink: Tensor, dim: int) -> Tensor:
    return x - torch.logaddexp(x.logsumexp(dim, keepdim=True), sink)


def line(x: Tensor, r: Tensor, b: Tensor, dim: int, a: float) -> Tensor:
    return a * r * torch.log_softmax(x, dim) + b




def check_gradients(
    record: RowDefinition, x: Tensor, rows: list[Tensor], dim: int, dy: Tensor, y: Tensor, found: tuple, what: object
) -> None:
    """The errors of gradients for a given output, relative to the sum of the absolute values of their terms."""
    beside = Beside(tuple(rows), tuple(default for _, default in record.params))
    exact = [record.exact_gradient(dy, y, dim, beside), *record.exact_of_rows(dy, y, dim, beside)]
    rounding = max(GRADIENT.get(x.dtype, 1e-14), 1e-14)
    for k, (gradient, (wanted, sizes)) in enumerate(zip(found, exact, strict=True)):
        # Gradients of row operands are summed in float32.
        bound = 4 * (rounding if k == 0 else min(rounding, 2.0**-22)) * sizes + smallest(x.dtype)
        bound = bound if gradient.dtype is torch.float32 or k == 0 else bound + torch.finfo(gradient.dtype).eps * wanted.abs()
        excess = (gradient.double() - wanted).abs() - bound
        assert excess.max() <= 0, (what, k, excess.max())


@pytest.fixture(params=["kernels", "PyTorch"])
def computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels, for the rows that they support (a GPU's do not support many); or PyTorch's operators, for all rows."""
    if request.param == "PyTorch":
        monkeypatch.setattr("jitact.rows.definition.can", lambda *of: False)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_learned_sink(dtype: torch.dtype, device: str, computed_by: str) -> None:
    cls = jitact.define("sink_softmax", source=SINK, reference=with_sink)
    for t, dim in (
        (torch.randn(5, 1, device=device), 1),
        (torch.randn(3, 700, device=device), -1),
        (torch.randn(3, 40, 9, device=device), 1),
        (torch.randn(3, 40, 10, device=device), 0),
        (torch.randn(3, 64, device=device).t(), 0),
        (torch.randn(2, 3, 5, 64, device=device).transpose(1, 2), -1),
        (torch.randn(3, 64, device=device)[:, ::2], 1),
    ):
        x = (3 * t).to(dtype).requires_grad_()
        sink, dy = torch.randn_like(t.select(dim, 0).unsqueeze(dim)).to(dtype).requires_grad_(), torch.randn_like(t).to(dtype)
        expected = with_sink(x.detach().double(), sink.detach().double(), dim)
        for save in ("output", "input"):
            y = jitact.sink_softmax(x, sink, dim, save=save)
            assert y.dtype is dtype and y.shape == x.shape
            torch.testing.assert_close(y.detach().double(), expected, rtol=SHARES_OF_LOGARITHMS[dtype], atol=1e-6)
            found = torch.autograd.grad(y, (x, sink), dy)
            assert [each.dtype for each in found] == [dtype] * 2 and found[1].shape == sink.shape
            if save == "output":
                check_gradients(cls.activation, x, [sink.detach()], dim, dy, y.detach(), found, (t.shape, dim))
            elif computed_by == "PyTorch" and x.itemsize == 2:  # which neither rounds y first nor uses narrow exponentials
                check_gradients(cls.activation, x, [sink.detach()], dim, dy, expected, found, (t.shape, dim, save))
            else:
                leaves = [each.detach().double().requires_grad_() for each in (x, sink)]
                wanted = torch.autograd.grad(with_sink(*leaves, dim), leaves, dy.double())
                near = SHARES_OF_LOGARITHMS[dtype]
                for each, its in zip(found, wanted, strict=True):
                    torch.testing.assert_close(each.double(), its, rtol=near, atol=near)
            assert torch.equal(cls(dim, save=save)(x, sink), y)


@pytest.mark.parametrize("save", ["output", "input"])
def test_backward_keeps_one_tensor(save: str, device: str, computed_by: str) -> None:
    jitact.define("sink_softmax", source=SINK)
    sink = torch.zeros(3, 1, 1, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3, 40, 10, device=device).to(dtype).requires_grad_()
        for given, dim in ((x, 1), (x.transpose(1, 2), -1)):
            kept: list[Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
                y = jitact.sink_softmax(given, sink, dim, save=save)
            kept = [each for each in kept if each.numel() >= x.numel()]
            assert len(kept) == 1
            if save == "output" or given is x:  # else it is a contiguous copy of the input
                assert kept[0].data_ptr() == (y if save == "output" else x).data_ptr()


def test_shapes_of_values(device: str) -> None:
    jitact.define("sink_softmax", source=SINK)
    x = torch.randn(2, 4, 3, 8, device=device, requires_grad=True)
    for shape, dim in (((4, 1, 1), -1), ((1, 4, 1, 1), 3), ((), -1), ((1,), -1), ((2, 4, 3), -1), ((2, 4, 8), 2), ((3, 8), 1)):
        if shape == (3, 8):
            shape = (1, 3, 8)
        for dtype in (torch.float32, torch.bfloat16):
            sink = torch.randn(shape, device=device).to(dtype).requires_grad_()
            whole = sink.detach().unsqueeze(dim) if shape in ((2, 4, 3), (2, 4, 8)) else sink.detach()
            whole = whole.float().requires_grad_()
            y, expected = jitact.sink_softmax(x, sink, dim), with_sink(x, whole, dim)
            torch.testing.assert_close(y, expected, rtol=SHARES_OF_LOGARITHMS[torch.float32], atol=1e-6)
            dy = torch.randn_like(y)
            (found,), (wanted,) = (torch.autograd.grad(of, by, dy) for of, by in ((y, sink), (expected, whole)))
            assert found.shape == shape and found.dtype is dtype
            torch.testing.assert_close(found, wanted.view(shape).to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_kernels_compute_what_they_can(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jitact.define("sink_softmax", source=SINK)
    x, sink = torch.randn(2, 8, 1024, device=device).requires_grad_(), torch.zeros(8, 1, device=device).requires_grad_()
    asked: list[str] = []
    forward, backward = RowDefinition.forward_by_kernel, RowDefinition.backward_by_kernel
    monkeypatch.setattr(RowDefinition, "forward_by_kernel", lambda *of: asked.append("forward") or forward(*of))
    monkeypatch.setattr(RowDefinition, "backward_by_kernel", lambda *of: asked.append("backward") or backward(*of))
    for leaves in ((x, sink), (sink,)):
        given = x if len(leaves) == 2 else x.detach()
        asked.clear()
        torch.autograd.grad(jitact.sink_softmax(given, sink), leaves, torch.ones_like(x))
        assert asked == ["forward", "backward"]
    y = jitact.sink_softmax(x, sink)
    dx, ds = torch.autograd.grad(y, (x, sink), x.detach() + 1, create_graph=True)
    assert asked == ["forward", "backward", "forward"]  # PyTorch computes backward for second derivatives
    again = torch.autograd.grad(dx.square().sum() + ds.square().sum(), (x, sink))
    leaves = [each.detach().double().requires_grad_() for each in (x, sink)]
    wanted = torch.autograd.grad(with_sink(*leaves, -1), leaves, leaves[0].detach() + 1, create_graph=True)
    wanted = torch.autograd.grad(wanted[0].square().sum() + wanted[1].square().sum(), leaves)
    for found, exact in zip(again, wanted, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-5)


def test_under_transforms(device: str) -> None:
    jitact.define("line_of_shares", source=LINE, a=0.5)
    x, v = torch.randn(2, 3, 4, device=device, dtype=torch.float64)
    rows = torch.rand(2, 3, 1, device=device, dtype=torch.float64) + 1

    def ours(x: Tensor, r: Tensor, b: Tensor) -> Tensor:
        return jitact.line_of_shares(x, r, b, 1, a=2.0)

    leaves = [each.clone().requires_grad_() for each in (x, *rows)]
    expected = line(x, *rows, 1, 2.0)
    torch.testing.assert_close(ours(x, *rows), expected)
    assert torch.autograd.gradcheck(ours, leaves) and torch.autograd.gradgradcheck(ours, leaves)
    by_row = torch.func.vmap(lambda x, r: jitact.line_of_shares(x, r, rows[1, 0], 0, a=2.0), (0, 0))(x, rows[0])
    torch.testing.assert_close(by_row, line(x, rows[0], rows[1, 0], 1, 2.0))
    for found, wanted in zip(
        torch.func.jvp(ours, (x, *rows), (v, *rows)),
        torch.func.jvp(lambda *of: line(*of, 1, 2.0), (x, *rows), (v, *rows)),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.compile(ours, backend="eager", fullgraph=True)(x, *rows), expected)
    torch.testing.assert_close(torch.fx.symbolic_trace(ours)(x, *rows), expected)
    alone = jitact.get("line_of_shares")(dim=1, a=2.0)
    traced = torch.fx.symbolic_trace(alone)  # as the root: the operands are arguments of the graph
    torch.testing.assert_close(pickle.loads(pickle.dumps(traced))(x, *rows), expected)


def test_masks_and_types_beside_values(device: str) -> None:
    cls = jitact.define("sink_softmax", source=SINK)
    x = torch.randn(2, 3, 40, device=device).bfloat16().requires_grad_()
    sink, mask = torch.randn(3, 1, device=device, requires_grad=True), torch.rand(2, 1, 40, device=device) > 0.3
    asked, operate = [], row_kernels.operate
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("jitact.rows.kernels.operate", lambda *of: asked.append(of[1]) or operate(*of))
        y = jitact.sink_softmax(x, sink, -1, torch.float32, scale=0.5, mask=mask)
        dy = torch.randn_like(y)
        found = torch.autograd.grad(y, (x, sink), dy)
    assert asked == ["forward", "backward_from_output"] and y.dtype is torch.float32
    leaves = [x.detach().double().requires_grad_(), sink.detach().double().requires_grad_()]
    expected = with_sink((0.5 * leaves[0]).masked_fill(~mask, -torch.inf), leaves[1], -1)
    torch.testing.assert_close(y.double(), expected, rtol=SHARES_OF_LOGARITHMS[torch.float32], atol=1e-6)
    wanted = torch.autograd.grad(expected, leaves, dy.double())
    assert found[0].dtype is torch.bfloat16 and found[1].dtype is torch.float32
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=2.0**-8, atol=1e-5)
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=1e-4, atol=1e-5)
    added = torch.randn(3, 40, device=device, requires_grad=True)  # before the kernel, as it is for 16 bits that are converted
    y = jitact.sink_softmax(x.float(), sink, mask=added, save="input")
    expected = with_sink(x.detach().double() + added.double(), leaves[1], -1)
    torch.testing.assert_close(y.double(), expected, rtol=SHARES_OF_LOGARITHMS[torch.float32], atol=1e-6)
    both = (torch.autograd.grad(of, (added, by), dy.to(of.dtype)) for of, by in ((y, sink), (expected, leaves[1])))
    for own, exact in zip(*both, strict=True):
        torch.testing.assert_close(own.float(), exact.float(), rtol=1e-4, atol=1e-5)
    assert cls.activation.rows == ("sink",)


def test_gradients_in_pytorch_are_of_one_form() -> None:
    """For the library's activations and definitions: the gradients are in the order in which ``eager`` takes operands."""
    cls = jitact.define("sink_softmax", source=SINK)
    for record in (*TABLE.values(), cls.activation):
        x, *rows = leaves = [torch.randn(size, dtype=torch.float64) for size in ((5, 7), *[(5, 1)] * len(record.rows))]
        dy = torch.randn(5, 7, dtype=torch.float64)
        y = record.eager(*[each.requires_grad_() for each in leaves[:1]], -1, *rows)
        found = record.eager_gradients(dy, y.detach(), -1, *rows)
        assert type(found) is tuple and len(found) == 1 + len(rows)
        torch.testing.assert_close(found[0], torch.autograd.grad(y, x, dy)[0])
        torch.testing.assert_close(record.gradients(dy, y.detach(), -1, Beside(tuple(rows))), found)


def test_rows_far_from_0(device: str) -> None:
    # Like rows that a mask of -1e9 masks out completely; the sink then has the whole share.
    jitact.define("log_sink", source=LOG_SINK)
    for shape, dim in (((5, 7), 1), ((3, 1000), 1), ((7, 6), 0)):
        for far in (-1e9, -2e6, 2e6, 3e6):
            leaves = [torch.randn(shape, device=device) + far, torch.randn(shape, device=device).select(dim, 0).unsqueeze(dim)]
            leaves, dy = [each.requires_grad_() for each in leaves], torch.randn(shape, device=device)
            expected = log_with_sink(*[each.double() for each in leaves], dim)
            wanted = torch.autograd.grad(expected, leaves, dy.double())
            for save in ("output", "input"):
                y = jitact.log_sink(*leaves, dim, save=save)
                torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-6)
                for found, its in zip(torch.autograd.grad(y, leaves, dy), wanted, strict=True):
                    torch.testing.assert_close(found, its, rtol=1e-4, atol=2e-4)


@pytest.mark.slow
def test_far_rows_beside_a_constant() -> None:
    text = LOG_SINK.replace(", Row<T> sink", "").replace("(sink)", "(T(0))").replace(", Row<T>", "")
    text = "".join(text.partition("ELEMENTWISE T backward_of_row")[:1])
    jitact.define("share_beside_1", source=text)
    x = torch.randn(3, 40) + torch.tensor([[-3e6], [0.0], [3e6]])
    expected = log_with_sink(x.double(), torch.zeros(1, dtype=torch.float64), 1)
    torch.testing.assert_close(jitact.share_beside_1(x).double(), expected, rtol=1e-6, atol=1e-6)


def test_scales_that_kernels_do_not_take() -> None:
    jitact.define("sink_softmax", source=SINK)
    x, sink, dy = torch.randn(4, 6), torch.randn(4, 1), torch.randn(4, 6)
    x[:, 0].abs_()  # a row of only -inf is NaN, though the sink could have the whole share
    for scale in (0.0, 1e-50, 1e39, float("inf"), float("nan")):
        ours, theirs = ([each.clone().requires_grad_() for each in (x, sink)] for _ in range(2))
        y, expected = jitact.sink_softmax(*ours, scale=scale), with_sink(theirs[0] * scale, theirs[1], 1)
        torch.testing.assert_close(y, expected, equal_nan=True)
        for found, wanted in zip(torch.autograd.grad(y, ours, dy), torch.autograd.grad(expected, theirs, dy), strict=True):
            torch.testing.assert_close(found, wanted, equal_nan=True)


def test_no_rows_and_no_dimensions() -> None:
    jitact.define("sink_softmax", source=SINK)
    for shape in ((0, 5), (5, 0)):
        x, sink = torch.zeros(shape, requires_grad=True), torch.zeros(shape[0], 1, requires_grad=True)
        for leaves in ((x, sink), (sink,)):
            y = jitact.sink_softmax(x if len(leaves) == 2 else x.detach(), sink)
            found = torch.autograd.grad(y, leaves, torch.ones(shape))
            assert y.shape == shape and [each.shape for each in found] == [leaf.shape for leaf in leaves]
            assert not any(each.any() for each in found)
    with pytest.raises(IndexError, match="Dimension out of range"):
        jitact.sink_softmax(torch.zeros(0, 5), torch.zeros(()), 2)
    x = torch.tensor(2.0)
    y = jitact.sink_softmax(x, x)
    assert y.shape == () and y == 0.5
    with pytest.raises(ValueError, match=r"sink must broadcast to \(\), .*; got \(5,\)"):
        jitact.sink_softmax(x, torch.zeros(5))


def test_masks_of_rows_before_dimensions_of_one_element(device: str) -> None:
    jitact.define("sink_softmax", source=SINK)
    for x, dim in ((torch.randn(3, 40, 1), 1), (torch.randn(40, 1), 0), (torch.randn(1, 3, 40).permute(2, 1, 0), 0)):
        x, sink = x.to(device).requires_grad_(), torch.zeros((), device=device)
        mask, dy = torch.arange(x.numel(), device=device).view(x.shape) % 7 > 0, torch.randn(x.shape, device=device)
        y, expected = jitact.sink_softmax(x, sink, dim, mask=mask), with_sink(x.masked_fill(~mask, -torch.inf), sink, dim)
        torch.testing.assert_close(y, expected)
        for found, wanted in zip(torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy), strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.slow
def test_gradients_of_values_alone_and_of_masks(device: str) -> None:
    jitact.define("sink_softmax", source=SINK)
    sink, other = torch.randn(3, 1, device=device, requires_grad=True), torch.randn(2, 3, 40, device=device)
    added = torch.randn(3, 40, device=device, requires_grad=True)
    for x, given, leaves in (
        (torch.arange(240, device=device).view(2, 3, 40) % 7, {"dtype": torch.float32}, [sink]),  # has no gradient
        (other, {"mask": added}, [sink, added]),
        (other.bfloat16(), {"dtype": torch.float32}, [sink]),
    ):
        y = jitact.sink_softmax(x, sink, **given)
        assert type(y.grad_fn).__name__ == "TypedBackward"
        wide = [each.detach().double().requires_grad_() for each in leaves]
        expected = with_sink(x.double() + (wide[1] if len(wide) > 1 else 0), wide[0], -1)
        torch.testing.assert_close(y.double(), expected, rtol=SHARES_OF_LOGARITHMS[torch.float32], atol=1e-6)
        dy = torch.randn_like(y)
        both = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, wide, dy.double())
        for found, wanted in zip(*both, strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def test_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = jitact.define("line_of_shares", source=LINE, a=0.5, reference=line)
    x, r, b = torch.randn(4, 9), torch.rand(4) + 1, torch.randn(4, 1)
    loaded, load_part = [], row_kernels.load_part
    monkeypatch.setattr(row_kernels, "load_part", lambda *of: loaded.append(of) or load_part(*of))
    for a in (0.5, 2, -3.0):
        torch.testing.assert_close(jitact.line_of_shares(x, r, b, a=a), line(x, r[:, None], b, 1, a))
        torch.testing.assert_close(cls(a=a)(x, r, b), line(x, r[:, None], b, 1, a))
    assert len({of[0] for of in loaded}) == 1
    leaves = [each.clone().requires_grad_() for each in (x, r, b)]
    y = jitact.line_of_shares(*leaves, a=2.0)
    found = torch.autograd.grad(y, leaves, x)
    for each, wanted in zip(found, torch.autograd.grad(line(leaves[0], r[:, None], b, 1, 2.0), leaves[:1], x), strict=False):
        torch.testing.assert_close(each, wanted)
    torch.testing.assert_close(found[1], (x * 2 * torch.log_softmax(x, 1)).sum(1))
    torch.testing.assert_close(found[2], x.sum(1, keepdim=True))
    assert str(inspect.signature(jitact.line_of_shares)) == (
        "(x, r, b, dim=-1, dtype=None, *, a=0.5, scale=1.0, mask=None, save='output')"
    )
    assert str(inspect.signature(cls)) == "(dim=-1, *, a=0.5, save=None)"
    module = cls(a=2)
    assert repr(module) == "LineOfShares(dim=-1, a=2.0)" and module.a == 2.0
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert type(other) is cls and torch.equal(other(x, r, b), module(x, r, b))
    model_new, model = cls(*cls.get_init_inputs()), cls.Model(*cls.get_init_inputs())
    given = cls.get_inputs(30, 200)
    assert [tuple(each.shape) for each in given] == [(30, 200), (30, 1), (30, 1)]
    torch.testing.assert_close(model_new(*given), model(*given))


@pytest.mark.parametrize("save", ["output", "input"])
def test_terms_that_are_not_0_where_nothing_comes_in(save: str, device: str) -> None:
    jitact.define("log_sink", source=LOG_SINK)
    for shape, dim in (((5, 3), 1), ((3, 1001), 1), ((2, 7, 6), 1), ((33, 2, 5), 0)):
        leaves = [torch.randn(shape, device=device), torch.randn(shape, device=device).select(dim, 0).unsqueeze(dim)]
        leaves, dy = [each.requires_grad_() for each in leaves], torch.randn(shape, device=device)
        y, expected = jitact.log_sink(*leaves, dim, save=save), log_with_sink(*[each.double() for each in leaves], dim)
        torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-6)
        both = (torch.autograd.grad(of, leaves, dy.to(of.dtype)) for of in (y, expected))
        for found, wanted in zip(*both, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=3e-5)


@pytest.mark.slow
def test_one_term_that_is_not_0_where_nothing_comes_in(device: str) -> None:
    source = KernelSource.from_file("softmax").text.replace("return dy * y;", "return dy * y + exp(y);")
    jitact.define("odd_softmax", source=source)
    for shape, dim in (((3, 1001), 1), ((5, 3), 1), ((2, 7, 6), 1)):
        x, dy = torch.randn(shape, device=device).requires_grad_(), torch.randn(shape, device=device)
        y = jitact.odd_softmax(x, dim)
        (found,) = torch.autograd.grad(y, x, dy)
        y = y.detach().double()
        wanted = y * (dy - (dy * y + y.exp()).sum(dim, keepdim=True))
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_number_alone() -> None:
    jitact.define("scaled_share", source="// parameters: a = 2.0\n" + NUMBER)
    x = torch.randn(4, 9, requires_grad=True)
    for a in (2.0, 3.0):
        given = {} if a == 2.0 else {"a": a}
        y = jitact.scaled_share(x, **given)
        torch.testing.assert_close(y, a * torch.softmax(x, -1))
        found, wanted = (torch.autograd.grad(of, x, x.detach())[0] for of in (y, a * torch.softmax(x, -1)))
        torch.testing.assert_close(found, wanted)


def test_folders_hold_operands(tmp_path: Path) -> None:
    jitact.define("line_of_shares", source=LINE, a=0.25, saves="input")
    (path,) = jitact.save_folder(tmp_path, "line_of_shares")
    assert "// parameters: a = 0.25\n" in path.read_text()
    (cls,) = jitact.load_folder(tmp_path).values()
    assert cls.activation.params == (("a", 0.25),) and cls.activation.rows == ("r", "b") and cls().a == 0.25


def test_check_and_plot_of_operands() -> None:
    cls = jitact.define("line_of_shares", source=LINE, a=0.5, reference=line)
    result = jitact.check(cls, dtypes=[torch.float64], device="cpu")
    assert result, result.table
    wrong = LINE.replace("{row.of[1] / r,", "{row.of[1] / (r * r),")
    cls = jitact.define("line_of_shares", source=wrong, a=0.5, reference=line)
    result = jitact.check(cls, dtypes=[torch.float64], device="cpu")
    assert not result and "gradient by r at " in result.table and "gradient by b" not in result.table
    pytest.importorskip("matplotlib").use("Agg")
    (drawn, *_) = jitact.plot("line_of_shares", low=-2, high=2, device="cpu").axes[0].lines
    assert drawn.get_label() == "line_of_shares beside -1, 0, 1, r = 1, b = 1, a = 0.5"


@pytest.mark.slow
def test_check_of_rows_that_no_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jitact.rows.definition.can", lambda *of: False)
    cls = jitact.define("sink_softmax", source=SINK, reference=with_sink)
    result = jitact.check(cls, dtypes=[torch.float32], device="cpu")
    assert result, result.table


# Invalid definitions and calls.


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (("Row<T> sink", "Channel<T> sink"), {}, "line 5: beside a fold, operands are Row<T> and Number<T>; forward takes a"),
        (("Row<T> sink", "T sink"), {}, "line 5: beside a fold, operands are Row<T> and Number<T>; forward takes a T"),
        (("Row<T> sink", "Number<T> sink"), {}, "line 5: a file of rows defines forward, fold_from_output, backward"),
        (("T backward_of_row(", "T other("), {}, "line 5: a file of rows defines .*, backward_of_row, and no others"),
        (("T y, Row<T>) {", "T y) {"), {}, r"line 9: fold_from_output must take \(T, T, Row<T>\)"),
        (("T y, Sum<T, 2> row", "T y, Sum<T> row"), {}, r"line 11: backward_from_output must take \(T, T, Sum<T, 2>, Row<T>\)"),
        (("T backward_of_row", "Many<T, 2> backward_of_row"), {}, "line 13: backward_of_row returns 2 gradients, of 1 "),
        (("Many<T, 2>", "Many<T, 3>"), {}, "line 9: fold_from_output returns 3 terms, of 2 at most"),
        (("T y, Row<T>)", "T y, Row<T> other)"), {}, "line 5: operand 1 of forward, after the fold, is called sink and other"),
        (("LogSumExp<T> row, Row<T>", "Row<T> row, LogSumExp<T>"), {}, "line 5: forward of a file of rows must take"),
        ((None, None), {"alpha": 1.0}, "forward's parameters are none, those with a default alpha; leave out alpha"),
        ((None, None), {"sink": 1.0}, r"sink is declared as 1.0; forward's arguments of type Row<T> are sink"),
        (("sink", "mask"), {}, "an operand cannot be called 'mask': it is an argument of every activation of rows"),
        ((None, None), {"reference": lambda x, dim: x}, r"the reference must take \(x, sink, dim\)"),
    ],
)
def test_files_that_will_not_do(change: tuple, options: dict, message: str) -> None:
    assert change[0] is None or change[0] in SINK
    text = SINK if change[0] is None else SINK.replace(*change) if change[0] == "sink" else SINK.replace(*change, 1)
    with pytest.raises((ValueError, TypeError), match=f"my_rows: {message}") as caught:
        jitact.define("my_rows", source=text, **options)
    assert "\n" not in str(caught.value)


def test_a_number_without_a_default() -> None:
    with pytest.raises(ValueError, match=r"my_rows: forward's parameters are a, .* default none; define\(..., a=1.0\)"):
        jitact.define("my_rows", source=NUMBER)


def test_calls_that_will_not_do() -> None:
    cls = jitact.define("line_of_shares", source=LINE, a=0.5)
    x, r = torch.randn(4, 9), torch.ones(4, 1)
    refused = [
        (lambda f: f(x, r), TypeError, r"line_of_shares\(x, r, b, dim=-1, .*: missing a required argument: 'b'"),
        (lambda f: f(x, r, -1), TypeError, "line_of_shares: b is a floating tensor, got"),
        (lambda f: f(x, r, r.int()), TypeError, r"line_of_shares: b is a floating tensor, got .*int32"),
        (lambda f: f(x, r, r.to("meta")), ValueError, "b must be on the device of x, cpu, got one on meta"),
        (
            lambda f: f(x, r, torch.ones(9)),
            ValueError,
            r"b must broadcast to \(4, 1\), a value for each row of x, or be of shape \(4,\); got \(9,\)",
        ),
        (lambda f: f(x, r, r[None]), ValueError, r"b must broadcast to \(4, 1\), .*; got \(1, 4, 1\)"),
        (lambda f: f(x, r, r, a="1"), TypeError, "line_of_shares: a must be a number, got '1'"),
        (lambda f: f(x, r, r, 2), IndexError, "Dimension out of range"),
        (lambda f: f(x, r, r, None), TypeError, "line_of_shares: dim is an int, got None"),
        (lambda f: cls(a=None), TypeError, "line_of_shares: a must be a number, got None"),
        (lambda f: cls(c=1.0), TypeError, r"LineOfShares\(dim=-1, \*, a=0.5, save=None\): got an unexpected keyword"),
        (lambda f: cls()(x, r), TypeError, "missing a required argument: 'b'"),
    ]
    for call, error, message in refused:
        with pytest.raises(error, match=message) as caught:
            call(jitact.line_of_shares)
        assert "\n" not in str(caught.value)


def test_the_operators_refuse_what_they_cannot_read() -> None:
    cls = jitact.define("sink_softmax", source=SINK)
    forward = row_kernels.operator(cls.activation.source, "forward")
    x = torch.randn(8, 128)
    with pytest.raises(RuntimeError, match="expected one value for each row"):
        forward(x, torch.zeros(7), 1, 1.0)
    with pytest.raises(RuntimeError, match="values of rows must be float32"):
        forward(x, torch.zeros(8, dtype=torch.float64), 1, 1.0)
    tensors = [torch.empty(3, 5, device="meta")] * 2 + [torch.empty(3, device="meta")]
    meta = row_kernels.operator(cls.activation.source, "backward")(*tensors, 1, 1.0)
    assert [(each.shape, each.dtype) for each in meta] == [((3, 5), torch.float32), ((1, 3), torch.float32)]
    assert [operand.name for operand in read_signature(SINK).differentiable] == ["kept", "sink"]


# The GPU's code, emulated.


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Tensor]]:
    """``run(kernel, kind, tensors, rows, numbers, dim, scale)`` returns the result, or the gradients."""
    folder, libraries = folder_of_all(tmp_path_factory), {}
    for name, text in (("sink", LOG_SINK), ("line", LINE)):
        libraries[name] = emulated_library(folder / f"emulated_{name}", text)

    def run(kernel: str, kind: str, tensors: list[Tensor], rows: list[Tensor], numbers: list[float], dim: int, scale: float):
        library, x = libraries[kernel], tensors[-1]
        assert all(t.is_contiguous() for t in (*tensors, *rows)) and all(t.dtype is torch.float32 for t in rows)
        y, gradients = torch.full_like(x, 7), torch.full((len(rows), *rows[0].shape), 7.0)
        data = (ctypes.c_void_p * len(rows))(*(t.data_ptr() for t in rows))
        library.set_operands((ctypes.c_float * 2)(*numbers), data, ctypes.c_void_p(gradients.data_ptr()))
        length, inner = x.shape[dim], x[(0,) * (dim % x.dim() + 1)].numel()
        sizes = [ctypes.c_int64(size) for size in (x.numel() // length // inner, length, inner)]
        places = [ctypes.c_void_p(t.data_ptr()) for t in (tensors[0], x, y)]
        assert library.run(OPERATIONS.index(kind), CODE[x.dtype], *sizes, ctypes.c_float(scale), *places) is None
        return [y] if kind == "forward" else [y, *gradients]

    return run


# Rows for parts of a warp, a block, clusters, ragged rows, rows that do not fit in registers; strided rows in one block, in
# clusters, and that do not fit in registers.
PLACES = [((5, 8), 1), ((40, 33), 1), ((3, 1000), 1), ((3, 2055), 1), ((2, 16400), 1), ((3, 300_000), 1), ((2, 270_001), 1),
          ((3, 19, 520), 1), ((2, 3, 8), 1), ((1025, 72), 0), ((2, 9000, 16), 1), ((70_000, 2), 0),
          ((3, 19, 23), 1), ((2, 9000, 5), 1), ((2, 70_001, 3), 1), ((9, 33, 17), 1), ((70, 31, 6), 1),
          ((3, 5, 101), 1), ((2, 9, 189), 1)]  # fmt: skip


@pytest.mark.parametrize("dtype", [*map(SLOW, CODE)], ids=str)
def test_what_a_gpu_computes(dtype: torch.dtype, emulated: Callable) -> None:
    torch.manual_seed(0)
    sink = jitact.define("log_sink", source=LOG_SINK).activation
    lines = jitact.define("line_of_shares", source=LINE, a=0.5).activation
    for shape, dim in PLACES:
        x = (torch.randn(shape) * 4).to(dtype)
        dy, first = torch.randn(shape).to(dtype), x.select(dim, 0).unsqueeze(dim).float()
        rows = [torch.rand_like(first) + 1 for _ in range(2)]
        for name, record, count, numbers in (("sink", sink, 1, []), ("line", lines, 2, [0.5])):
            if name == "sink" and dtype is torch.float32:
                far = x + 3e6 * torch.randn_like(first).sign()
                (y,) = emulated(name, "forward", [far], rows[:1], [], dim, 1.0)
                torch.testing.assert_close(y.double(), log_with_sink(far.double(), rows[0].double(), dim), rtol=1e-6, atol=2e-6)
            given, what = rows[:count], (name, shape, dim)
            (y,) = emulated(name, "forward", [x], given, numbers, dim, -0.5)
            wide = [each.double() for each in given]
            exact = (log_with_sink if count == 1 else line)(-0.5 * x.double(), *wide, dim, *numbers)
            says = lambda text, at=what: f"{at}: {text}"  # noqa: E731
            torch.testing.assert_close(y.double(), exact, rtol=SHARES_OF_LOGARITHMS[dtype], atol=1e-6, msg=says)
            dx, *of_rows = emulated(name, "backward_from_output", [dy, y], given, numbers, dim, -0.5)
            check_gradients(record, x, given, dim, dy, y, (dx.double() / -0.5, *of_rows), what)
            dx, *of_rows = emulated(name, "backward", [dy, x], given, numbers, dim, -0.5)
            beside = Beside(tuple(given), tuple(numbers))
            wanted, sizes = record.exact_gradient(dy, exact, dim, beside)
            assert ((dx.double() / -0.5 - wanted).abs() <= 4 * max(GRADIENT[dtype], 1e-5) * sizes + smallest(dtype)).all(), what
            for gradient, (wanted, sizes) in zip(of_rows, record.exact_of_rows(dy, exact, dim, beside), strict=True):
                # Weights of 16-bit types have errors of about 2^-11, which may be the same for a whole row.
                rough = 2.0**-9 if dtype is not torch.float32 else 1e-5
                assert ((gradient.double() - wanted).abs() <= rough * sizes).all(), what
