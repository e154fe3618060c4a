"""Softmax and its relatives with masks and conversions.

What builds for particular types compute, on a CPU, on a GPU and with the GPU's code emulated; which calls they are used for;
and that these behave as in PyTorch.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rows_common import CODE, GRADIENT, OPERATIONS, ULP, emulated_library, folder_of_all, needs_vectors, smallest
from torch import Tensor

import jitact
from jitact.kernels import KernelSource
from jitact.kernels.loader.source import RowPart, RowTypes
from jitact.measuring.row_errors import exact_gradient, exact_output
from jitact.measuring.ulp import ulp_error
from jitact.rows import kernels as row_kernels
from jitact.rows.kernels import collapsed
from jitact.rows.records import TABLE, RowActivation
from jitact.rows.typed import types_of

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
INF, NAN = math.inf, math.nan

# The types of x, the result and the mask: vectors of 8 and of 4 elements, with and without rounding.
BUILDS = {
    "added": ("softmax", F32, F32, F32),
    "added in 16 bits": ("softmax", BF16, BF16, BF16),
    "added to 16 bits": ("softmax", F16, F16, F32),
    "bool": ("softmax", F32, F32, torch.bool),
    "bool in 16 bits": ("softmax", BF16, BF16, torch.bool),
    "converted": ("log_softmax", BF16, F32, None),
    "converted to shares": ("softmax", F16, F32, None),
    "converted and added": ("log_softmax", F16, F32, F16),
    "added to a logarithm in 16 bits": ("log_softmax", BF16, BF16, BF16),
    "of integers": ("softmax", torch.int64, F32, None),
    "of integers of 16 bits": ("softmax", torch.int16, F32, None),
}

Run = Callable[..., Tensor]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, RowTypes], Run]:
    """``run(kind, tensors..., rows of a mask or None, scale, shares)`` for the emulated GPU code."""
    folder, libraries = folder_of_all(tmp_path_factory), {}

    def build(name: str, types: RowTypes) -> Run:
        key = "_".join([name, *types])
        if key not in libraries:
            libraries[key] = emulated_library(folder / f"emulated_{key}", name, types.defines())
        library = libraries[key]

        def run(kind: str, *given: object, shares: bool = True) -> Tensor:
            *tensors, rows, scale = given
            x = tensors[-1]
            assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)
            written = getattr(torch, types.output if kind == "forward" else types.input)
            y = torch.full_like(x, 7, dtype=written)
            if rows is not None:
                set_mask(library, rows, shares)
            data = [ctypes.c_void_p(t.data_ptr()) for t in (tensors[0], x, y)]
            sizes = [ctypes.c_int64(size) for size in (x.numel() // x.shape[-1], x.shape[-1], 1)]
            assert library.run(OPERATIONS.index(kind), CODE[written], *sizes, ctypes.c_float(scale), *data) is None
            return y

        return run

    return build


def set_mask(library: ctypes.CDLL, rows: Tensor, shares: bool) -> None:
    """Sets the mask for the next call of an emulated library, and whether the kept results are shares."""
    sizes, strides = (ctypes.c_int64 * 2)(*rows.shape[1:3]), (ctypes.c_int64 * 3)(*rows.stride()[:3])
    library.set_mask(ctypes.c_void_p(rows.data_ptr()), sizes, strides, ctypes.c_int64(rows.stride(3)), ctypes.c_bool(shares))


SLOWLY = pytest.param("emulated", marks=pytest.mark.slow)


@pytest.fixture(params=[SLOWLY, "cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def build(request: pytest.FixtureRequest) -> Callable[[str, RowTypes], Run]:
    """The same, taking and returning CPU tensors wherever it runs."""
    if request.param == "emulated":
        return request.getfixturevalue("emulated")

    def on_device(name: str, types: RowTypes) -> Run:
        made = TABLE[name].built_for(types)

        def run(kind: str, *given: object, shares: bool = True) -> Tensor:
            *tensors, rows, scale = given
            if rows is not None:  # keeps strides and offset
                whole = rows.as_strided((rows.untyped_storage().nbytes() // rows.itemsize,), (1,), 0).to(request.param)
                tensors.append(whole.as_strided(rows.shape, rows.stride(), rows.storage_offset()))
            tensors = [t.to(request.param) for t in tensors]
            of_mask = [shares] if rows is not None and kind != "forward" else []
            return row_kernels.operate(made, kind, *tensors, *of_mask, -1, scale).cpu()

        return run

    return on_device


def masks(shape: tuple[int, int, int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Masks for a shape, by layout; the last element of each row takes part."""
    b, h, s, k = shape

    def made(*sizes: int) -> Tensor:
        mask = torch.rand(sizes) > 0.4 if dtype is torch.bool else (torch.randn(sizes) * 4).to(dtype)
        if dtype is not torch.bool:
            mask[torch.rand(sizes) > 0.8] = -INF
        if sizes[-1] > 1:
            mask[..., -1] = 1
        return mask

    return {
        "whole": made(b, h, s, k),
        "heads": made(b, 1, s, k),
        "batches": made(1, 1, s, k),
        "rows": made(b, 1, 1, k),
        "one row": made(k),
        "one": torch.ones(1, 1, 1, 1, dtype=dtype),
        "columns": torch.ones(b, h, s, 1, dtype=dtype) if dtype is torch.bool else torch.randn(b, h, s, 1).to(dtype),
        "a part": made(b, 1, s + 2, k + 5)[:, :, 1:-1, 2 : 2 + k].flip(-1).contiguous().flip(-1),
        "inside": made(1, 1, s + 2, k + 5)[:, :, 1:-1, 5:],
        "aligned inside": made(1, 1, s + 2, k + 8 - k % 8 + 16)[:, :, 1:-1, -k:],
        "transposed": made(s, h, b, k).transpose(0, 2),
    }


def as_added(x: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """The argument of the exponentials, rounded once where a mask is added."""
    if mask is None:
        return scale * x.double()
    if mask.dtype is torch.bool:
        return (scale * x.double()).masked_fill(~mask, -INF)
    return (scale * x.double() + mask.double()).float().double()


def check(y: Tensor, name: str, t: Tensor, what: object) -> None:
    """Compares a result with float64."""
    exact = exact_output(name, t)
    dead = t.amax(-1, keepdim=True) == -INF
    exact = exact.masked_fill(dead, NAN)
    there = t.isfinite() & exact.isfinite()
    assert torch.equal(y.isnan(), exact.isnan()), what
    at_minus_infinity = ~there & ~exact.isnan()
    assert y[at_minus_infinity].eq(-INF if name == "log_softmax" else 0).all(), what
    errors = ulp_error(y[there], exact[there], y.dtype)
    assert errors.numel() == 0 or errors.max() <= ULP[y.dtype], (what, errors.max())


def check_gradient(run: Run, name: str, y: Tensor, scale: float, input: torch.dtype) -> None:
    """Compares the gradient of a conversion with float64's, of the output that it is computed from."""
    dy = torch.randn(y.shape)
    exact, sizes = exact_gradient(name, dy, y)
    dx = run("backward_from_output", dy, y, None, scale)
    assert dx.dtype is input
    assert ((dx.double() / scale - exact).abs() <= GRADIENT[input] * sizes + smallest(input)).all(), y.shape


@pytest.mark.parametrize("kind", BUILDS)
def test_builds_are_as_exact_as_their_type(kind: str, build: Callable) -> None:
    torch.manual_seed(0)
    name, input, output, mask_dtype = BUILDS[kind]
    types = types_of(input, output, mask_dtype)
    run = build(name, types)
    # Lengths for parts of a warp, a warp, a block, clusters; ragged ones; and with several vectors per thread.
    for length in (1, 7, 60, 129, 512, 1030, 4096, 16400, 40000):
        shape = (2, 3, 2, length) if length < 2000 else (1, 1, 2, length)
        x = (torch.randn(shape) * 8).to(input)
        lying = masks(shape, mask_dtype) if mask_dtype else {"none": None}
        if length > 200:
            lying = {how: lying[how] for how in ("heads", "inside", "columns") if how in lying} or lying
        for how, mask in lying.items():
            scale = 0.25 if length % 2 else -1.0
            rows = None if mask is None else collapsed(mask.expand(shape), 3)
            assert mask is None or rows is not None
            y = run("forward", x, rows, scale)
            assert y.dtype is output
            check(y, name, as_added(x, scale, mask), (kind, length, how))
        if input is not output and input.is_floating_point:
            check_gradient(run, name, run("forward", x, rows, scale).nan_to_num(0, neginf=-80), scale, input)


@pytest.mark.parametrize("kind", ["added", "added in 16 bits", "bool", "bool in 16 bits", "converted", "converted to shares"])
def test_long_rows(kind: str, build: Callable) -> None:
    """Rows of which the threads of a cluster hold many vectors each."""
    torch.manual_seed(0)
    name, input, output, mask_dtype = BUILDS[kind]
    run = build(name, types_of(input, output, mask_dtype))
    for length in (150_000, 270_003, 393_216):
        shape = (1, 3, 1, length)
        x = (torch.randn(shape) * 4).to(input)
        mask = masks(shape, mask_dtype)["heads"] if mask_dtype else None
        rows = None if mask is None else collapsed(mask.expand(shape), 3)
        y = run("forward", x, rows, 0.5)
        check(y, name, as_added(x, 0.5, mask), (kind, length))
        if input is not output and mask is None:
            check_gradient(run, name, y, 0.5, input)


@pytest.mark.parametrize("kind", ["converted", "converted to shares"])
def test_long_rows_that_are_converted(kind: str, build: Callable) -> None:
    """A GPU's threads hold what they read from some length on, and scale it and find its peak as they go."""
    torch.manual_seed(0)
    name, input, output, _ = BUILDS[kind]
    run = build(name, types_of(input, output, None))
    lengths = (28_671, 28_672, 28_679) if name == "log_softmax" else (196_608, 196_609, 196_613)
    for length in lengths:
        x = (torch.randn(9, length) * 4).to(input)
        x[1] *= 3000  # far peaks
        x[2] = 5.0  # all are peaks
        x[3, [0, -1]] = x[3].max() * 2  # so are the first and the last
        x[4, 1::2] = -INF
        x[5], x[6, -1], x[7, 3], x[8, 0] = -INF, INF, NAN, -INF
        for scale in (1.0, -0.3, 2.0**90):
            y, t = run("forward", x, None, scale), (x.float() * scale).double()  # rounded before exponentials are
            dead = t.isnan().any(-1) | (t.amax(-1) == INF) | (t.amax(-1) == -INF)
            assert y[dead].isnan().all() and dead.sum() == (3 if scale > 0 else 4), (length, scale)
            y, t = y[~dead], t[~dead]
            if scale < 1e9:
                check(y, name, t, (length, scale))
            else:  # an element that is not at the peak has no weight
                at_peak = t == t.amax(-1, keepdim=True)
                share = (1 / at_peak.sum(-1, keepdim=True)).expand(t.shape)[at_peak]
                torch.testing.assert_close(y[at_peak], share.log() if name == "log_softmax" else share)


STAGED = ["converted", "converted to shares", "added", "added in 16 bits", "added to 16 bits", "bool", "bool in 16 bits"]


@pytest.mark.parametrize("kind", STAGED)
def test_short_rows(kind: str, build: Callable) -> None:
    """A GPU's blocks copy rows to shared memory that do not fill vectors, each thread a part of one row or several rows."""
    torch.manual_seed(0)
    name, input, output, mask_dtype = BUILDS[kind]
    run = build(name, types_of(input, output, mask_dtype))
    for length in (3, 8, 9, 31, 49, 65, 72, 104, 197, 256, 260, 333, 577, 599, 601):
        for n in (1, 37, 260):
            x = (torch.randn(1, 1, n, length) * 6).to(input)
            x[..., -1, -1] = NAN
            for how, mask in masks(x.shape, mask_dtype).items() if mask_dtype else [("none", None)]:
                rows = None if mask is None else collapsed(mask.expand(x.shape), 3)
                for scale in (1.0, -0.25):
                    x[..., 0, :] = -INF * scale
                    y, t = run("forward", x, rows, scale), as_added(x, scale, mask)
                    check(y, name, t, (length, n, how, scale))


def test_rows_that_have_the_same_one_of_a_large_mask(build: Callable) -> None:
    """A GPU processes such rows one after another, and of short ones some that are side by side."""
    torch.manual_seed(0)
    for kind, shape in (
        ("added", (2, 3, 7, 230_000)),
        ("added", (2, 2, 70_016, 24)),
        ("bool in 16 bits", (1, 2, 51, 131_072)),
    ):
        name, input, output, mask_dtype = BUILDS[kind]
        x, mask = torch.randn(shape).to(input), masks((shape[0], 1, *shape[2:]), mask_dtype)["heads"]
        assert mask[0].nbytes > 6 * 2**20
        y = build(name, types_of(input, output, mask_dtype))("forward", x, collapsed(mask.expand(shape), 3), 1.0)
        for of_x, of_mask, of_y in zip(x.unbind(1), mask.expand(shape).unbind(1), y.unbind(1), strict=True):
            check(of_y, name, as_added(of_x, 1.0, of_mask), kind)


STRANGE = [
    ([INF, 0.0], [0.0, 0.0]),
    ([INF, 0.0], [-INF, 0.0]),
    ([NAN, 1.0, 2.0], [-INF, 0.0, 0.0]),
    ([1.0, 2.0], [NAN, 0.0]),
    ([1.0, 2.0, 3.0], [-INF, -INF, -INF]),
    ([1.0, 2.0, 3.0], [-6e4, -6e4, -6e4]),
    ([1.0, 2.0, 3.0], [-3.3e38, -3.3e38, -3.3e38]),
    ([1.0, 2.0, 3.0], [3e6, 0.0, 3e6]),
    ([-INF, -INF], [0.0, 0.0]),
    ([-INF, 1.0], [INF, 0.0]),
]


@pytest.mark.parametrize("kind", ["added", "added in 16 bits", "bool", "bool in 16 bits"])
def test_builds_do_with_strange_rows_what_pytorch_does(kind: str, build: Callable) -> None:
    name, input, output, mask_dtype = BUILDS[kind]
    run = build(name, types_of(input, output, mask_dtype))
    for length in (8, 300, 1029):
        x, mask = torch.zeros(len(STRANGE), length), torch.zeros(len(STRANGE), length)
        for i, (values, added) in enumerate(STRANGE):
            x[i], mask[i] = x[i].fill_(-INF), mask[i].fill_(-INF if added[0] == -INF else 0)
            x[i, : len(values)], mask[i, : len(added)] = torch.tensor(values), torch.tensor(added)
        x = x.to(input)
        mask = mask.eq(0) if mask_dtype is torch.bool else mask.to(mask_dtype)
        for scale in (1.0, -1.0):
            y = run("forward", x, collapsed(mask, 1), scale)
            exact = F.softmax(as_added(x, scale, mask), -1)
            torch.testing.assert_close(y, exact.to(output), equal_nan=True)


def test_a_row_is_the_same_whatever_stands_in_the_others(build: Callable) -> None:
    for kind, length in (("added", 1029), ("bool in 16 bits", 1024)):
        name, input, output, mask_dtype = BUILDS[kind]
        run = build(name, types_of(input, output, mask_dtype))
        x, wild = torch.randn(6, length).to(input), torch.full((6, length), NAN).to(input)
        mask = masks((1, 1, 6, length), mask_dtype)["whole"][0, 0]
        others = torch.ones_like(mask) if mask_dtype is torch.bool else torch.full_like(mask, INF)
        wild[3], others[3] = x[3], mask[3]
        assert torch.equal(run("forward", wild, collapsed(others, 1), 1.0)[3], run("forward", x, collapsed(mask, 1), 1.0)[3])


def test_how_masks_lie() -> None:
    mask = torch.empty(2, 3, 4, 8)
    for given, sizes, strides in (
        (mask, (1, 1, 24, 8), (0, 0, 8, 1)),
        (mask[:, :1].expand(2, 3, 4, 8), (2, 3, 4, 8), (96, 0, 8, 1)),
        (mask[:1, :1].expand(2, 3, 4, 8), (1, 6, 4, 8), (0, 0, 8, 1)),
        (mask[:1, :1, :1, :1].expand(2, 3, 4, 8), (1, 1, 24, 8), (0, 0, 0, 0)),
        (mask[..., 1:5], (1, 1, 24, 4), (0, 0, 8, 1)),
        (mask[:, :, :, 2:3], (1, 1, 24, 1), (0, 0, 8, 0)),
    ):
        rows = collapsed(given, 3)
        assert rows.shape == sizes and rows.stride() == strides and rows.data_ptr() == given.data_ptr()
    assert collapsed(mask[..., ::2], 3) is None
    assert collapsed(torch.empty(3, 2, 3, 2, 8).permute(3, 2, 1, 0, 4)[:, :, :, :2], 4) is None
    assert collapsed(mask.transpose(2, 3)[..., :1].contiguous(), 3).shape == (1, 1, 48, 1)


def test_which_types_there_are() -> None:
    assert types_of(BF16, BF16, torch.bool) == ("bfloat16", "bfloat16", "bool")
    assert types_of(BF16, F32, None) == ("bfloat16", "float32", "none")
    assert types_of(F16, F32, F32) == ("float16", "float32", "float32")
    assert types_of(torch.uint8, F32, torch.bool) == ("uint8", "float32", "bool")
    for refused in (
        (F32, BF16, None),
        (F16, BF16, None),
        (torch.float64, F32, None),
        (torch.bool, F32, None),
        (torch.int32, BF16, None),
        (torch.int64, torch.int64, None),
        (F32, F32, torch.float64),
        (BF16, BF16, F16),
        (torch.complex64, F32, None),
    ):
        assert types_of(*refused) is None


# Which calls go to them.


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The operators that calls used."""
    found, operator, operate = [], row_kernels._operator, row_kernels.operate

    def plain(name: str, kind: str, part: RowPart) -> Callable:
        found.append((name, kind))
        return operator(name, kind, part)

    def of_types(name: str, kind: str, *arguments: object) -> Tensor:
        found.append((name, kind))
        return operate(name, kind, *arguments)

    monkeypatch.setattr(row_kernels, "_operator", plain)
    monkeypatch.setattr(row_kernels, "operate", of_types)
    monkeypatch.setattr(row_kernels, "LARGE", 2**21)
    return found


@needs_vectors
@pytest.mark.parametrize("how", ["whole", "heads", "batches", "rows", "one row", "columns", "inside", "transposed"])
def test_masks_in_the_pass_of_the_kernels(how: str, device: str, taken: list) -> None:
    torch.manual_seed(0)
    shape = (2, 4, 64, 1032)
    x = torch.randn(shape, device=device).requires_grad_()
    for dtype, scale in ((torch.bool, 0.5), (F32, 0.5), (F32, 1.0)):
        mask = masks(shape, dtype)[how].to(device)
        mask = mask.requires_grad_() if dtype is F32 else mask
        taken.clear()
        y = jitact.softmax(x, -1, scale=scale, mask=mask)
        dy = torch.randn_like(x)
        wanted = (x,) if dtype is torch.bool else (x, mask)
        found = torch.autograd.grad(y, wanted, dy)
        build = f"softmax_float32_float32_{'bool' if dtype is torch.bool else 'float32'}"
        assert taken == [(build, "forward"), (build if dtype is torch.bool else "softmax", "backward_from_output")], how
        wide, wide_mask = x.detach().double().requires_grad_(), mask.detach()
        if dtype is F32:
            wide_mask = wide_mask.double().requires_grad_()
        t = (scale * wide).masked_fill(~mask, -INF) if dtype is torch.bool else scale * wide + wide_mask
        exact = torch.softmax(t, -1)
        torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-9)
        expected = torch.autograd.grad(exact, (wide,) if dtype is torch.bool else (wide, wide_mask), dy.double())
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype is F32 and ours.shape == theirs.shape
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_gradients_of_wide_masks_are_not_rounded_to_the_type_of_x(device: str) -> None:
    x, dy = torch.randn(2, 4096, 1024, device=device).bfloat16()
    mask = torch.zeros(1024, device=device, requires_grad=True)
    jitact.softmax(x, -1, mask=mask).backward(dy)
    assert mask.grad.dtype is torch.float32 and (mask.grad != mask.grad.bfloat16()).any()


@needs_vectors
@pytest.mark.parametrize("create_graph", [False, True], ids=["", "differentiable"])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_what_a_mask_leaves_out_has_no_gradient(name: str, create_graph: bool, device: str, taken: list) -> None:
    """Nor does a row in which no element takes part, whose outputs are NaN."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, 300, 1024, device=device)
    mask = torch.rand(300, 1024, device=device) > 0.4
    mask[7] = mask[8, 5] = mask[9, 0] = False
    dy[8, 5], dy[9, 0] = INF, NAN  # at masked-out elements
    function, leaf, wide = getattr(jitact, name), x.clone().requires_grad_(), x.double().requires_grad_()
    y = function(leaf, -1, mask=mask)
    assert taken == [(f"{name}_float32_float32_bool", "forward")] and y[7].isnan().all()
    (found,) = torch.autograd.grad(y, leaf, dy, create_graph=create_graph)
    exact = getattr(torch, name)(wide.masked_fill(~mask, -INF), -1)
    (expected,) = torch.autograd.grad(exact, wide, dy.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("types", [(F32, F32), (BF16, BF16), (F16, F32)], ids=str)
def test_gradients_that_masks_hide(types: tuple[torch.dtype, torch.dtype], name: str, build: Run) -> None:
    """They are 0, others as if all elements took part, in rows of every kind and for every layout of the mask."""
    torch.manual_seed(0)
    run = build(name, types_of(*types, torch.bool))
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    for shape in ((2, 3, 25, 70), (1, 2, 7, 2100), (1, 1, 3, 40001)):
        for how, mask in masks(shape, torch.bool).items():
            if mask.shape[-2:] == shape[-2:]:
                mask[..., ::7, :] = False  # rows in which no element takes part
            mask = mask.expand(shape)
            y = getattr(torch, name)(torch.randn(shape).masked_fill(~mask, -INF), -1).to(types[1])
            dy = torch.randn(shape).to(types[1])
            dy[..., 1::8, 3] = INF
            dy[..., 2::8, :5] = NAN
            dy[..., 3::8, :] = torch.finfo(types[1]).max  # dy - sum is infinite where dy is negative
            dy[..., 3::8, :4] *= -1
            y, dy = y.contiguous(), dy.contiguous()
            given = run("backward_from_output", dy, y, collapsed(everything.expand(shape), 3), 1.0, shares=name == "softmax")
            found = run("backward_from_output", dy, y, collapsed(mask, 3), 1.0, shares=name == "softmax")
            assert torch.equal(found[~mask], torch.zeros_like(found[~mask])), (shape, how)
            assert torch.equal(found[mask].nan_to_num(7.0), given[mask].nan_to_num(7.0)), (shape, how)


@needs_vectors
def test_conversions_in_the_pass_of_the_kernels(device: str, taken: list) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 2000, device=device).bfloat16().requires_grad_()
    dy = torch.randn(300, 2000, device=device)
    build = "log_softmax_bfloat16_float32_none"
    for scale in (1.0, 2.0):
        taken.clear()
        y = jitact.log_softmax(x, -1, F32, scale=scale)
        (dx,) = torch.autograd.grad(y, x, dy)
        assert taken == [(build, "forward"), (build, "backward_from_output")]
        assert y.dtype is F32 and dx.dtype is BF16
        torch.testing.assert_close(y.double(), F.log_softmax(scale * x.detach().double(), -1), rtol=1e-6, atol=1e-6)
        exact, sizes = exact_gradient("log_softmax", dy, y.detach())
        assert ((dx.double() - scale * exact).abs() <= scale * (2.0**-8 * sizes + smallest(BF16))).all()
    x = torch.randn(4100, 2050, device=device).bfloat16()  # large enough for non-temporal stores on a CPU
    torch.testing.assert_close(jitact.log_softmax(x, -1, F32), F.log_softmax(x, -1, dtype=F32))
    taken.clear()
    turned = x.detach().t()  # contiguous, it has strided rows
    torch.testing.assert_close(jitact.log_softmax(turned, 0, F32), F.log_softmax(turned, 0, dtype=F32))
    torch.testing.assert_close(jitact.log_softmax(turned, 1, F32), F.log_softmax(turned, 1, dtype=F32))
    assert taken == [(build, "forward")]
    numbers = torch.randint(-9, 9, (300, 2000), device=device)
    torch.testing.assert_close(jitact.softmax(numbers, -1, F32), torch.softmax(numbers, -1, dtype=F32))
    assert taken[1:] == [("softmax_int64_float32_none", "forward")]


def test_lengths_of_rows_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_kernels, "_has_clusters", lambda device: True)
    for kinds, length, expected in (
        ((BF16, F32, None), 8, True),
        ((BF16, F32, None), 333, True),
        ((BF16, F32, None), 3, True),
        ((torch.int64, F32, None), 333, True),
        ((torch.int64, F32, None), 7, False),
        ((torch.int16, F32, None), 7, False),
        ((F16, F32, None), 192, True),
        ((F16, F32, None), 191, True),
        ((F16, F32, None), 197, False),  # PyTorch's converts in the same pass
        ((F16, F32, None), 333, True),
        ((F16, F32, None), 385, False),
        ((F16, F32, None), 449, True),
        ((F16, F32, F16), 385, True),
        ((F16, F32, None, 0.5), 385, True),  # but not the scale
        ((F32, F32, torch.bool), 8, True),
        ((BF16, BF16, torch.bool), 9, True),
        ((BF16, BF16, BF16), 7, False),
        ((BF16, BF16, BF16), 393_216, True),
        ((BF16, BF16, BF16), 393_217, False),
        ((BF16, BF16, torch.bool), 786_432, True),
        ((BF16, BF16, torch.bool), 786_440, False),
    ):
        sizes = {"shape": (2**18, length), "numel": lambda n=length: 2**18 * n, "itemsize": kinds[0].itemsize}
        x = SimpleNamespace(dtype=kinds[0], device="cuda", is_cuda=True, data_ptr=lambda: 0, **sizes)
        call = x, 1, *(kinds[3:] or (1.0,)), types_of(*kinds[:3])
        assert row_kernels.takes_types("log_softmax", *call) is expected, (kinds, length)
        assert row_kernels.takes_types("softmax", *call) is (expected or kinds == (F16, F32, None)), (kinds, length)


def test_lengths_of_rows_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_kernels, "_has_vectors", lambda: True)
    for kinds, rows, length, expected in (
        ((F32, F32, torch.bool), 2**13, 64, True),
        ((F32, F32, torch.bool), 2**13, 63, False),
        ((F32, F32, torch.bool), 2**11, 64, False),  # less than 1 MB
        ((F32, F32, F32), 2**13, 511, False),
        ((BF16, BF16, BF16), 2**13, 512, True),
        ((F32, F32, F32), 2**16, 128, True),  # 32 MB
        ((F32, F32, F32), 2**18, 127, False),
        ((BF16, F32, None), 2**12, 1024, False),
        ((BF16, F32, None), 2**15, 256, True),
    ):
        x = torch.empty(rows, length, dtype=kinds[0], device="meta")
        assert row_kernels.takes_types("softmax", x, 1, 1.0, types_of(*kinds)) is expected, (kinds, rows, length)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_short_rows_on_a_gpu(taken: list) -> None:
    torch.manual_seed(0)
    for length in (8, 33, 64, 197, 250, 999):
        shape = (4, 8, 2**16 // length, length)
        for input, output, mask_dtype in (*((d, d, m) for d in (F32, F16, BF16) for m in (torch.bool, d)), (BF16, F32, None)):
            x = torch.randn(shape, device="cuda").to(input)
            mask = masks(shape, mask_dtype)["heads"].cuda() if mask_dtype else None
            taken.clear()
            y = jitact.softmax(x, -1, output, mask=mask)
            assert taken == [("_".join(["softmax", *types_of(input, output, mask_dtype)]), "forward")]
            check(y, "softmax", as_added(x, 1.0, mask), (length, input, mask_dtype))


@needs_vectors
def test_what_stays_before_the_kernels(device: str, taken: list, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, keep = torch.randn(512, 1024, device=device), torch.rand(512, 1024, device=device) > 0.5
    added = torch.randn(512, 2048, device=device)[:, ::2]
    for given, options in (
        (x, {"mask": added}),
        (x, {"mask": added.contiguous().double()}),
        (x, {"mask": keep, "save": "input"}),
        (x.double(), {"dtype": F32, "mask": keep}),
        (x, {"dtype": BF16}),
        (x[:20], {"mask": keep[:20]}),
        (x, {"mask": keep, "dim": 0}),
    ):
        taken.clear()
        y = jitact.softmax(given, **{"dim": -1} | options)
        assert all(name == "softmax" for name, _ in taken)
        dtype, mask = options.get("dtype", given.dtype), options.get("mask")
        t = given.to(dtype)
        if mask is not None:
            t = t.masked_fill(~mask, -INF) if mask.dtype is torch.bool else t + mask.to(dtype)
        torch.testing.assert_close(y, torch.softmax(t, options.get("dim", -1)))
    monkeypatch.setattr(RowActivation, "built_for", lambda record, types: None)  # as without a compiler
    taken.clear()
    torch.testing.assert_close(jitact.softmax(x, -1, mask=keep), torch.softmax(x.masked_fill(~keep, -INF), -1))
    assert taken == [("softmax", "forward")]


@needs_vectors
def test_a_single_row_and_its_mask(device: str, taken: list) -> None:
    torch.manual_seed(0)
    x, keep = torch.randn(2**18, device=device).requires_grad_(), torch.rand(2**18, device=device) > 0.5
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        y = jitact.softmax(x, -1, mask=keep)
    assert [t.data_ptr() for t in kept] == [y.data_ptr(), keep.data_ptr()]
    torch.testing.assert_close(y, torch.softmax(x.masked_fill(~keep, -INF), -1))
    assert taken == [("softmax_float32_float32_bool", "forward")]
    for dim in (1, -2):
        with pytest.raises(IndexError, match="Dimension out of range"):
            jitact.softmax(x, dim, mask=keep)


@needs_vectors
def test_masks_that_are_not_what_is_in_memory(device: str, taken: list) -> None:
    x, added = torch.randn(2, 512, 1024, device=device)
    for mask, terms in ((added._neg_view(), -added), (torch._efficientzerotensor(x.shape, device=device), 0)):
        torch.testing.assert_close(jitact.softmax(x, -1, mask=mask), torch.softmax(x + terms, -1))
    assert taken[0] == ("softmax_float32_float32_float32", "forward")  # PyTorch copies a negative view for operators


def test_nothing_is_built_where_nothing_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITACT_NO_BUILD", "1")
    source = KernelSource.from_file("softmax")._replace(rows=RowTypes("int8", "float32", "bfloat16"))
    assert row_kernels.built(source) is None


@needs_vectors
def test_second_gradients_transforms_and_autocast(device: str, taken: list) -> None:
    x = torch.randn(300, 1024, device=device).requires_grad_()
    mask, dy, ddx = (torch.randn_like(x).requires_grad_() for _ in range(3))
    found = []
    for function in (lambda x, m: jitact.softmax(x, -1, mask=m, scale=0.5), lambda x, m: torch.softmax(0.5 * x + m, -1)):
        dx, dm = torch.autograd.grad(function(x, mask), (x, mask), dy, create_graph=True)
        found.append([dx, dm, *torch.autograd.grad((dx * ddx).sum() + (dm * dy).sum(), (x, mask, dy))])
    assert taken[0] == ("softmax_float32_float32_float32", "forward")
    assert all(name == "softmax" for name, _ in taken[1:])  # by second derivatives, if a kernel computes the plain gradient
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    taken.clear()
    x, mask = x.detach(), mask.detach()
    expected = torch.softmax(x + mask, -1)
    torch.testing.assert_close(torch.func.vmap(lambda x, m: jitact.softmax(x, -1, mask=m))(x, mask), expected)
    tangents = (torch.randn_like(x), torch.randn_like(x))
    ours = torch.func.jvp(lambda x, m: jitact.softmax(x, -1, mask=m), (x, mask), tangents)
    theirs = torch.func.jvp(lambda x, m: torch.softmax(x + m, -1), (x, mask), tangents)
    torch.testing.assert_close(ours, theirs)
    compiled = torch.compile(lambda x, m: jitact.softmax(x, -1, mask=m), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, mask), expected)
    half = torch.compile(lambda x: jitact.softmax(x, -1, F32), backend="eager", fullgraph=True)
    torch.testing.assert_close(half(x.half()), torch.softmax(x.half(), -1, dtype=F32))
    with torch.autocast(device, BF16):
        torch.testing.assert_close(jitact.softmax(x, -1, mask=mask), torch.softmax(x + mask, -1))
    assert not taken


def test_the_operators_refuse_what_they_cannot_read(device: str) -> None:
    made = TABLE["softmax"].built_for(types_of(F32, F32, F32))
    x, rows = torch.randn(8, 128, device=device), torch.randn(1, 2, 4, 128, device=device)
    refused = [
        ((x.half(), rows, 1, 1.0), "dtype that this is built for"),
        ((x, rows.half(), 1, 1.0), "mask of four dimensions"),
        ((x, rows[0], 1, 1.0), "mask of four dimensions"),
        ((x, rows[:, :1], 1, 1.0), "the rows of x"),
        ((x, torch.randn(1, 2, 4, 256, device=device)[..., ::2], 1, 1.0), "rows lie in one piece"),
        ((x, rows, 1, 0.0), "finite and not 0"),
    ]
    if device == "cuda":
        long = torch.empty(1, 400000, device=device)
        refused += [((long, long[None, None], 1, 1.0), "a cluster holds"), ((x, rows.cpu(), 1, 1.0), "where x is|device")]
    for given, message in refused:
        with pytest.raises(RuntimeError, match=message):
            row_kernels.operate(made, "forward", *given)
    assert row_kernels.operate(made, "forward", x.to("meta"), rows.to("meta"), 1, 1.0).shape == (8, 128)
    converted = TABLE["log_softmax"].built_for(types_of(BF16, F32, None))
    y = torch.empty(8, 128, device="meta")
    assert row_kernels.operate(converted, "forward", y.bfloat16(), 1, 1.0).dtype is F32
    assert row_kernels.operate(converted, "backward_from_output", y, y, 1, 1.0).dtype is BF16
    masked = TABLE["softmax"].built_for(types_of(BF16, F32, torch.bool))
    of_mask = rows.to("meta") > 0, True
    assert row_kernels.operate(masked, "backward_from_output", y, y, *of_mask, 1, 1.0).dtype is BF16


def test_definitions_take_masks(device: str, taken: list) -> None:
    jitact.define("masked_softmax", source=KernelSource.from_file("softmax").text)
    x, keep = torch.randn(3, 40, device=device), torch.arange(40, device=device) % 3 > 0
    y = jitact.masked_softmax(x, -1, mask=keep, scale=2.0)
    torch.testing.assert_close(y, torch.softmax((2 * x).masked_fill(~keep, -INF), -1))
    ((name, kind),) = taken
    assert name.startswith("masked_softmax_float32_float32_bool_") and kind == "forward"
    for given in (x, x[:0], x[:, :0]):  # rows across memory, and no elements
        mask = given > -1
        y = jitact.masked_softmax(given, 0, mask=mask)
        torch.testing.assert_close(y, torch.softmax(given.masked_fill(~mask, -INF), 0), equal_nan=True)
