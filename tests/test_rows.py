"""Softmax and its relatives.

What the kernels compute, on a CPU, on a GPU and with the GPU's code emulated; which calls they are used for; and that all calls
behave as PyTorch's functions.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import pickle
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from common import SLOW
from rows_common import CODE, GRADIENT, OPERATIONS, ULP, emulated_library, folder_of_all, smallest
from torch import Tensor, nn

import jitact
from jitact import kernels, rows
from jitact.kernels.loader.signature import read_signature
from jitact.kernels.loader.source import DEVICE, RowPart
from jitact.measuring.row_errors import exact_gradient, exact_output
from jitact.measuring.ulp import ulp_error
from jitact.rows import kernels as row_kernels
from jitact.rows.modules import forget

NAMES = ("softmax", "log_softmax", "softmin")
KERNELS = ("softmax", "log_softmax")
INF, NAN = math.inf, math.nan
F32, BF16 = torch.float32, torch.bfloat16
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="which calls go to the GPU's kernels")

Operator = Callable[..., Tensor]
Request = pytest.FixtureRequest


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    """``library(name)``: the emulated GPU code, which runs the threads of a cluster in shuffled order."""
    folder = folder_of_all(tmp_path_factory)
    return functools.cache(lambda name: emulated_library(folder / f"emulated_{name}", name))


@pytest.fixture(scope="module")
def emulated(library: Callable[[str], ctypes.CDLL]) -> Callable[[str, str], Operator]:
    """The same, as operators."""

    def operator(name: str, kind: str) -> Operator:
        def run(*tensors_and_numbers: object) -> Tensor:
            *tensors, dim, scale = tensors_and_numbers
            x = tensors[-1]
            assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)
            y = torch.full_like(x, 7)
            data = [ctypes.c_void_p(t.data_ptr()) for t in (tensors[0], tensors[-1], y)]
            length, inner = x.shape[dim], x[(0,) * (dim % x.dim() + 1)].numel()
            sizes = [ctypes.c_int64(size) for size in (x.numel() // length // inner, length, inner)]
            kinds = OPERATIONS.index(kind), CODE[x.dtype]
            assert library(name).run(*kinds, *sizes, ctypes.c_float(scale), *data) is None
            return y

        return run

    return operator


PLACES = ["emulated", "cpu", *(["cuda"] if torch.cuda.is_available() else [])]
# Devices, kernels and dtypes for tests that are slow when emulated: one 32-bit and one 16-bit case; the others with -m slow.
EVERYWHERE = [
    (SLOW if place == "emulated" and (name, dtype) not in (("softmax", F32), ("log_softmax", BF16)) else pytest.param)(
        place, name, dtype, id=f"{place}-{name}-{dtype}"
    )
    for dtype in CODE
    for name in KERNELS
    for place in PLACES
]


@pytest.fixture(params=PLACES)
def operator(request: pytest.FixtureRequest) -> Callable[[str, str], Operator]:
    """``operator(name, kind)``, which takes and returns CPU tensors wherever it runs."""
    if request.param == "emulated":
        return request.getfixturevalue("emulated")

    def on_device(name: str, kind: str) -> Operator:
        run = row_kernels._operator(name, kind)
        return lambda *given: run(*(t.to(request.param) if isinstance(t, Tensor) else t for t in given)).cpu()

    return on_device


def fits(dtype: torch.dtype, length: int) -> bool:
    a_block = length * dtype.itemsize <= 2**14 - 16
    return a_block or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= 9


def check(operator: Callable, name: str, x: Tensor, dim: int = -1, scale: float = 1.0, what: object = "") -> None:
    """Compares forward and both kinds of backward with float64."""
    dtype, t = x.dtype, scale * x.double()
    y = operator(name, "forward")(x, dim, scale)
    errors = ulp_error(y, exact_output(name, t, dim), dtype)
    assert errors.max() <= ULP[dtype], (what, errors.max())
    dy = torch.randn_like(x)
    # From the input, gradients have the output's rounding as well: in float32 that of the output that forward gives.
    computed = y if dtype is torch.float32 else exact_output(name, t, dim)
    for kind, kept, known in (("backward_from_output", y, y), ("backward", x, computed)):
        exact, sizes = exact_gradient(name, dy, known, dim)
        dx = operator(name, kind)(dy, kept, dim, scale).double() / scale
        excess = ((dx - exact).abs() / (GRADIENT[dtype] * sizes + smallest(dtype) / abs(scale))).max()
        assert excess <= 1, (what, kind, excess)


# The kernels.

# Lengths for one thread, part of a warp, a warp, some warps, a block, and clusters; and a vector more and less.
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 28, 30, 31, 33, 44, 56, 60, 63, 64, 65, 72, 84, 88, 97, 100, 104, 120,
           127, 128, 129, 136, 152, 168, 184, 192, 197, 255, 257, 264, 300, 385, 512, 577, 770, 1000, 1001, 1025, 1032, 1099,
           1101, 2047, 2048, 2055, 4090, 4100, 5001, 8192, 8200, 16400, 30001, 60000)  # fmt: skip


@pytest.mark.parametrize(("operator", "name", "dtype"), EVERYWHERE, indirect=["operator"])
def test_kernels_are_as_exact_as_their_type(name: str, dtype: torch.dtype, operator: Callable) -> None:
    torch.manual_seed(0)
    for length in LENGTHS:
        if not fits(dtype, length):
            continue
        # For scales that are not powers of two, the rounding of the product is another error.
        for spread, scale in ((1, 1.0), (8, 0.25), (30, -1.0)) if length < 400 else ((8, 1.0),):
            count = max(5 if length < 20000 else 3, 1200 // length)  # several rows per thread
            x = (torch.randn(count, length) * spread / abs(scale)).to(dtype)
            check(operator, name, x, scale=scale, what=(length, spread))


@pytest.mark.parametrize(("operator", "name", "dtype"), EVERYWHERE, indirect=["operator"])
def test_threads_have_several_short_rows(name: str, dtype: torch.dtype, operator: Callable, request: Request) -> None:
    """There have to be enough of them to keep all multiprocessors busy, of which the emulated GPU has 1."""
    torch.manual_seed(0)
    on_gpu = request.node.callspec.params["operator"] == "cuda"
    processors = torch.cuda.get_device_properties(0).multi_processor_count if on_gpu else 1
    for length in (3, 8, 9, 12, 16, 21):
        x = torch.randn(2 * 4 * processors * 128 + 77, length) * 8
        check(operator, name, x.to(dtype), scale=-0.5, what=length)


@pytest.mark.parametrize(("operator", "name", "dtype"), EVERYWHERE, indirect=["operator"])
def test_threads_hold_many_elements_of_long_rows(name: str, dtype: torch.dtype, operator: Callable) -> None:
    torch.manual_seed(0)
    for vectors in (33_001, 50_000, 70_000) if fits(dtype, 1 << 20) else ():  # smallest blocks, and twice as large
        for length in (16 // dtype.itemsize * vectors, 16 // dtype.itemsize * vectors - 3):
            check(operator, name, (torch.randn(5, length) * 8).to(dtype), scale=-0.5, what=length)  # several rows for a cluster


@pytest.mark.parametrize(("operator", "name", "dtype"), EVERYWHERE, indirect=["operator"])
def test_clusters_of_many_blocks_fetch_ahead(name: str, dtype: torch.dtype, operator: Callable, request: Request) -> None:
    """There have to be more rows than half of those that a GPU processes at the same time: two, of the emulated one."""
    torch.manual_seed(0)
    count, each = 60 if request.node.callspec.params["operator"] == "cuda" else 5, 16 // dtype.itemsize
    for length in (17_003 * each, 17_003 * each - 3, 12_565 * each - 3) if fits(dtype, 1 << 20) else ():
        check(operator, name, (torch.randn(count, length) * 8).to(dtype), what=length)


# Strided rows: in one block, of tiles from 128 words wide to a cache line, and in clusters; planes that share a tile; rows that
# are too long to be held in registers.
ACROSS = (((5, 1, 8), 1), ((2, 3, 1024), 1), ((3, 19, 520), 1), ((40, 24), 0), ((2, 300, 3, 8), 1), ((1025, 72), 0),
          ((9, 60, 14), 1), ((4500, 8), 0), ((2, 9000, 16), 1), ((20_000, 4), 0), ((70_000, 2), 0),
          ((8300, 264), 0), ((70, 31, 6), 1), ((20, 1100, 4), 1), ((9, 100, 50), 1), ((5, 6, 130), 1), ((3, 12, 258), 1),
          # odd numbers of adjacent rows
          ((5, 1, 3), 1), ((2, 19, 301), 1), ((40, 23), 0), ((3, 300, 3, 5), 1), ((1025, 67), 0), ((2, 4500, 9), 1),
          ((20_001, 3), 0), ((70_001, 5), 0), ((2, 8300, 33), 1),
          ((9, 33, 17), 1), ((70, 31, 3), 1), ((30, 8, 63), 1),
          # of few elements: tiles that end with a plane, within it, or with half a word
          ((4, 1, 95), 1), ((3, 3, 127), 1), ((5, 12, 125), 1), ((2, 5, 257), 1), ((3, 7, 189), 1), ((2, 2, 1001), 1),
          ((11, 12, 99), 1), ((12, 221), 0),
          # in small planes: of one thread and of several; tiles that end within vectors; planes that share banks
          ((90, 10, 9), 1), ((31, 8, 7), 1), ((70, 64, 3), 1), ((5, 500, 3), 1), ((20, 15, 31), 1), ((3, 120, 5), 1),
          ((300, 3, 5), 1), ((40, 31, 15), 1), ((9, 256, 7), 1), ((3, 1024, 5), 1), ((200, 10, 2), 1), ((60, 31, 14), 1),
          ((50, 16, 4), 1),
          # of 2 to 12 elements, of which each number has code of its own
          *(((4, n, columns), 1) for n in range(2, 13) for columns in (70, 127)),
          ((300, 12, 3), 1), ((200, 5, 2), 1))  # fmt: skip


@pytest.mark.parametrize(("operator", "name", "dtype"), EVERYWHERE, indirect=["operator"])
def test_kernels_walk_rows_that_lie_across_memory(name: str, dtype: torch.dtype, operator: Callable) -> None:
    torch.manual_seed(0)
    full = [((8000, 64), 0)] * torch.cuda.is_available()  # blocks of as many threads as there can be
    for shape, dim in (*ACROSS, *full):
        if shape[dim] <= 256 or fits(dtype, 1 << 20):
            check(operator, name, (torch.randn(shape) * 8).to(dtype), dim, scale=-0.5, what=(shape, dim))
    for length in (500, 4500, 70_000):
        if length <= 256 or fits(dtype, 1 << 20):
            few = torch.full((length, 2), -20.0, dtype=dtype)  # they decide the sum; all errors have one sign
            few[7] = 0
            y = operator(name, "forward")(few, 0, 1.0)
            assert ulp_error(y, exact_output(name, few, 0), dtype).max() <= ULP[dtype], length
    if fits(dtype, 1 << 20):  # rows that are not held in registers, and are read twice
        x = torch.randn(70_000, 4) * 8
        x[::7, 0] += 6e4
        x[5, 1], x[9, 3] = NAN, INF
        x[:, 2] -= 6e4
        x, exact = x.to(dtype), getattr(F, name)(x.to(dtype).double(), 0)
        y, dy = operator(name, "forward")(x, 0, 1.0), torch.randn(70_000, 4).to(dtype)
        torch.testing.assert_close(y, exact.to(dtype), equal_nan=True)
        kept = exact if name == "softmax" else exact.exp()
        dx = kept * (dy - (kept * dy).sum(0)) if name == "softmax" else dy - kept * dy.double().sum(0)
        found = operator(name, "backward")(dy, x, 0, 1.0)
        torch.testing.assert_close(found, dx.to(dtype), equal_nan=True, rtol=4 * GRADIENT[dtype], atol=1e-6)
    for length, apart in ((20, 1), (20_000, 300)) if fits(dtype, 1 << 20) else ((20, 1),):
        x = torch.full((len(STRANGE), length), -INF, dtype=torch.float64)
        for row, values in zip(x, STRANGE, strict=True):
            row[: len(values) * apart : apart] = torch.tensor(values, dtype=torch.float64)
        x = torch.cat([x.t(), x[:1].t().expand(-1, -len(x) % 8)], 1).to(dtype).contiguous()
        y, exact = operator(name, "forward")(x, 0, 1.0), getattr(F, name)(x.double(), 0)
        torch.testing.assert_close(y, exact.to(dtype), equal_nan=True)
        errors = ulp_error(y, exact_output(name, x.double(), 0), dtype)
        assert errors[exact.isfinite()].max() <= ULP[dtype], (length, apart)


STRANGE = [
    [INF, 0.0],
    [-INF, -INF],
    [NAN, 1.0],
    [1.0, NAN, INF],
    [-INF, 1.0, 2.0],
    [-6e4, -6e4],
    [6e4, -6e4],
    [0.0, -20.0, -60.0],
    [0.0, -88.0, -100.0],
    [-3e6, -3e6 - 1, -3e6 - 2],
    [1048575.0, 1048577.0, 1048576.5],
    [-3.3e38, -3.3e38],
    [3.3e38, -3.3e38],
]


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_do_with_strange_rows_what_pytorch_does(name: str, operator: Callable) -> None:
    for dtype in CODE:
        for scale in (1.0, -1.0):
            for length in (3, 8, 300, 2050):
                x = torch.full((len(STRANGE), length), -INF, dtype=torch.float64)
                for row, values in zip(x, STRANGE, strict=True):
                    row[: len(values)] = torch.tensor(values, dtype=torch.float64)
                x = (scale * x).to(dtype)
                y, exact = operator(name, "forward")(x, -1, scale), getattr(F, name)(scale * x.double(), -1)
                torch.testing.assert_close(y, exact.to(dtype), equal_nan=True)
                errors = ulp_error(y, exact_output(name, scale * x.double()), dtype)
                assert errors[exact.isfinite()].max() <= ULP[dtype]


@pytest.mark.parametrize("name", KERNELS)
def test_rows_with_the_peak_everywhere_or_at_the_end(name: str, operator: Callable) -> None:
    for dtype in CODE:
        for length in (5, 13, 15, 63, 127, 257, 300, 577, 1029):
            at_the_end = -torch.rand(5, length) - 0.5
            at_the_end[:, -1] = 0
            for x in (torch.zeros(5, length), at_the_end):
                check(operator, name, x.to(dtype), what=length)


@pytest.mark.parametrize("name", KERNELS)
def test_elements_that_a_scale_rounds_by_more_than_their_distance(name: str, operator: Callable) -> None:
    for shape, dim in (((4, 3), 1), ((4, 300), 1), ((4, 9000), 1), ((300, 4), 0), ((20_000, 4), 0)):
        if shape[dim] > 256 and not fits(torch.float32, 1 << 20):
            continue
        for scale in (0.3, -2.5):
            rows = torch.full((4, shape[dim]), 1e37)
            rows[:2, 1], rows[2], rows[3] = 5e36, -1e38, 7e8  # like rows that a large negative additive mask masks out
            x = (rows if dim == 1 else rows.t()).contiguous()
            y, exact = operator(name, "forward")(x, dim, scale), getattr(F, name)(scale * x, dim)
            torch.testing.assert_close(y, exact, rtol=1e-5, atol=0, msg=f"{shape} {scale}")


@pytest.mark.parametrize("dtype", CODE, ids=str)
def test_a_row_is_the_same_whatever_stands_in_the_others(dtype: torch.dtype, operator: Callable) -> None:
    for length in (37, 1029):
        x, dy = torch.randn(6, length).to(dtype), torch.randn(6, length).to(dtype)
        wild, wild_dy = torch.full_like(x, NAN), torch.full_like(x, INF)
        wild[3], wild_dy[3] = x[3], dy[3]
        for name in KERNELS:
            y = operator(name, "forward")(x, -1, 1.0)
            assert torch.equal(operator(name, "forward")(wild, -1, 1.0)[3], y[3])
            for kind, kept in (("backward", x), ("backward_from_output", y)):
                beside = wild if kind == "backward" else torch.where(wild.isnan(), wild, y)
                run = operator(name, kind)
                assert torch.equal(run(wild_dy, beside, -1, 1.0)[3], run(dy, kept, -1, 1.0)[3])


@pytest.mark.parametrize("dtype", CODE, ids=str)
def test_a_row_is_the_same_whatever_stands_in_those_beside_it(dtype: torch.dtype, operator: Callable) -> None:
    shapes = ((60, 4), (5, 99), (200, 4), (200, 33), (5000, 6), (20_000, 4), (20_000, 17))
    for length, columns in shapes if fits(dtype, 1 << 20) else shapes[:2]:
        x, dy = (torch.randn(length, columns) * 3).to(dtype), torch.randn(length, columns).to(dtype)
        for value in (NAN, -INF, 6e4):
            wild, wild_dy = torch.full_like(x, value), torch.full_like(dy, INF)
            wild[:, 2], wild_dy[:, 2] = x[:, 2], dy[:, 2]
            for name in KERNELS:
                y, beside = (operator(name, "forward")(each, 0, 1.0) for each in (x, wild))
                assert torch.equal(beside[:, 2], y[:, 2]), (name, length, columns, value)
                for kind, kept, other in (("backward", x, wild), ("backward_from_output", y, beside)):
                    dx, beside_dx = operator(name, kind)(dy, kept, 0, 1.0), operator(name, kind)(wild_dy, other, 0, 1.0)
                    assert torch.equal(beside_dx[:, 2], dx[:, 2]), (name, kind, length, columns, value)


@pytest.mark.parametrize("dtype", CODE, ids=str)
def test_a_row_is_the_same_in_a_wide_and_in_a_narrow_tensor(dtype: torch.dtype, operator: Callable) -> None:
    """Both are too wide for tiles of whole planes, and both fill sectors of memory, or neither does."""
    for length, columns in itertools.product((300, 5000, 9000), (288, 290)):  # for a block, a cluster, and strips
        y, dy = torch.rand(length, columns).to(dtype), torch.randn(length, columns).to(dtype)
        for name in KERNELS:
            run = operator(name, "backward_from_output")
            narrow = [t[:, 16:].contiguous() for t in (dy, y)]
            assert torch.equal(run(dy, y, 0, 1.0)[:, 16:], run(*narrow, 0, 1.0)), (name, length, columns)


# Rows that do not fit in registers, which are folded by chunks, relative to a running peak.


@pytest.fixture(params=["emulated", *(["cuda"] if torch.cuda.is_available() else [])])
def in_chunks(request: pytest.FixtureRequest, library: Callable[[str], ctypes.CDLL]) -> Callable[[str, str], Operator]:
    """``operator(name, kind)`` for long rows, or for rows processed as if long, by clusters of blocks of ``threads``."""

    def on_gpu(name: str, kind: str) -> Operator:
        run = row_kernels._operator(name, kind)
        return lambda *given, **_: run(*(t.to("cuda") if isinstance(t, Tensor) else t for t in given)).cpu()

    def in_turns(name: str, kind: str) -> Operator:
        def run(*tensors_and_numbers: object, log_threads: int = 7, blocks: int = 2) -> Tensor:
            *tensors, _, scale = tensors_and_numbers
            y = torch.full_like(tensors[-1], 7)
            data = [ctypes.c_void_p(t.data_ptr()) for t in (tensors[0], tensors[-1], y)]
            given = log_threads, blocks, OPERATIONS.index(kind), CODE[y.dtype]
            sizes = [ctypes.c_int64(size) for size in y.shape]
            assert library(name).run_in_chunks(*given, *sizes, ctypes.c_float(scale), *data) is None
            return y

        return run

    return on_gpu if request.param == "cuda" else in_turns


APART = (0, 3.5, 20, 31, 45, 90, 150, 200)
FAR = (2.0**19, -(2.0**19), -0.75 * 2**20, 2.0**20, -(2.0**20), 3e6, -3.3e38)


def uneven_rows(length: int) -> dict[str, Tensor]:
    """Rows in which chunks and threads have very different peaks, and rows that are far from 0 or not finite."""
    i, around = torch.arange(length), torch.randn(length, dtype=torch.float64)
    third, few = i * 3 // length, i // 8 % 7 == 0
    rows = {"wide": around * 8, "very wide": around * 30}
    for apart in APART:
        rows[f"rising by {apart}"] = around + apart * third / 2
        rows[f"falling by {apart}"] = around - apart * third / 2
        rows[f"of threads that are {apart} apart"] = around + apart * few
        rows[f"one element {apart} above"] = torch.where(i == length // 2, apart, 0.0).double()
    for far in FAR:
        rows[f"part at {far}"] = torch.where(third == 1, far, around)
        rows[f"peak {far}"] = torch.where(few, far, far - 30 * torch.rand(length).double())
        rows[f"around {far}"] = far + (i % 11 - 5.0).double() / 2
    for value in (0, 1, -700, 5e5):
        rows[f"all {value}"] = torch.full((length,), value).double()
    rows["second half left out"] = torch.where(i < length // 2, around, -INF)
    rows["first two thirds left out"] = torch.where(third < 2, -INF, around)
    rows["all left out but one"] = torch.where(i == length - 1, 0.25, -INF).double()
    rows["all left out"] = torch.full((length,), -INF).double()
    for value in (NAN, INF):
        for place in (0, length // 2, length - 1):
            rows[f"{value} at {place}"] = torch.where(i == place, value, around)
    return rows


def check_uneven(in_chunks: Callable, name: str, x: Tensor, names: list[str], scale: float, **shape: int) -> None:
    """Compares forward with float64, and both kinds of backward where that is finite."""
    dtype, t = x.dtype, scale * x.double()
    y, known, exact = in_chunks(name, "forward")(x, -1, scale, **shape), exact_output(name, t), getattr(F, name)(t, -1)
    assert torch.equal(y.isnan(), exact.isnan())
    errors = ulp_error(y, known, dtype).where(exact.isfinite(), 0).amax(1)
    assert errors.max() <= ULP[dtype], (names[errors.argmax()], errors.max())
    assert torch.equal(y.double().where(exact == -INF, 0), exact.where(exact == -INF, 0))
    finite = exact.isfinite().all(1)
    dy = torch.randn_like(x)
    computed = y if dtype is torch.float32 else known  # see check
    for kind, kept, value in (("backward_from_output", y, y), ("backward", x, computed)):
        gradient, sizes = exact_gradient(name, dy, value, -1)
        dx = in_chunks(name, kind)(dy, kept, -1, scale, **shape).double() / scale
        excess = (dx - gradient).abs() / (GRADIENT[dtype] * sizes + smallest(dtype) / abs(scale))
        excess = excess.amax(1).where(finite, 0)
        assert excess.max() <= 1, (kind, names[excess.argmax()], excess.max())


@pytest.mark.parametrize(("name", "dtype"), [
    ("log_softmax", torch.bfloat16),  # the test below also has float32
    (pytest.param if torch.cuda.is_available() else SLOW)("softmax", torch.float32),
    SLOW("softmax", torch.float16),
    SLOW("softmax", torch.bfloat16),
    SLOW("log_softmax", torch.float16),
    SLOW("log_softmax", torch.float32),
], ids=str)  # fmt: skip
def test_long_rows_are_folded_as_they_come(
    name: str, dtype: torch.dtype, in_chunks: Callable, request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(0)
    on_gpu = request.node.callspec.params["in_chunks"] == "cuda"
    length = (262_144 if on_gpu else 8200) * 4 // dtype.itemsize
    for more, scale in ((8, 1.0), (6, -0.5)):  # of whole vectors, and ragged
        rows = uneven_rows(length + more)
        names, x = [*rows], (torch.stack([*rows.values()]) / scale).to(dtype)
        check_uneven(in_chunks, name, x, names, scale)
        if more == 8:  # only then do rows keep their alignment
            run, other = in_chunks(name, "forward"), torch.randperm(len(x))
            assert torch.equal(run(x[other], -1, scale).nan_to_num(7), run(x, -1, scale)[other].nan_to_num(7))


@pytest.mark.parametrize("scale", [-(2.0**40), *map(SLOW, [2.0**-120, 2.0**-40, 2.0**120])])
def test_long_rows_of_any_scale(scale: float, in_chunks: Callable) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8208).mul(torch.tensor([[1.0], [8.0], [0.0], [1.0]]))
    x[3, 100:] = -INF
    for name in KERNELS:
        for dtype in (torch.float32, torch.bfloat16):
            check_uneven(in_chunks, name, (x / scale).to(dtype), ["1", "8", "0", "-inf"], scale)


@pytest.mark.parametrize("name", KERNELS)
def test_a_cpu_walks_any_dimension_with_any_number_of_threads(name: str) -> None:
    def on_cpu(name: str, kind: str) -> Operator:
        return row_kernels._operator(name, kind)

    torch.manual_seed(0)
    threads = torch.get_num_threads()
    for dtype in CODE:
        for shape, dim in (((5, 1), 0), ((3, 70), 0), ((2, 40, 33), 1), ((2, 3, 40, 9), 1), ((40, 3, 5), 0)):
            x = (torch.randn(shape) * 8).to(dtype)
            check(on_cpu, name, x, dim, what=(shape, dim))
        for shape, dim in (((512, 600), 1), ((130, 3000), 0)):
            x, found = torch.randn(shape).to(dtype), []
            try:
                for count in (1, 2, 3):
                    torch.set_num_threads(count)
                    found.append(on_cpu(name, "forward")(x, dim, 1.0))
            finally:
                torch.set_num_threads(threads)
            assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    x = torch.tensor([[0.0, INF, 1e7], [1.0, 2.0, 1e7], [NAN, -INF, -1e7], [0.0, -INF, 1e7 - 3]])
    expected = getattr(F, name)(x.double(), 0).float()
    torch.testing.assert_close(on_cpu(name, "forward")(x, 0, 1.0), expected, equal_nan=True)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rows_of_400000(seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(1, 400_000) * 3
    for name in KERNELS:
        for dtype in (torch.float32, torch.bfloat16):
            check(row_kernels._operator, name, x.to(dtype), what=dtype)
        assert not row_kernels._has_vectors() or torch.equal(getattr(jitact, name)(x, 1), row_kernels.forward(name, x, 1, 1.0))


@pytest.mark.parametrize("dtype", CODE, ids=str)
def test_a_gradient_that_is_next_to_nothing(dtype: torch.dtype, operator: Callable) -> None:
    """Where dy is 0, the gradient of log_softmax is e^y times a sum, down to the smallest normal number."""
    x = torch.linspace(0, -92, 64).expand(3, 64).to(dtype).contiguous()
    y, dy = operator("log_softmax", "forward")(x, -1, 1.0), torch.zeros_like(x)
    dy[:, 0] = 3.0
    exact, sizes = exact_gradient("log_softmax", dy, y)
    dx = operator("log_softmax", "backward_from_output")(dy, y, -1, 1.0).double()
    assert ((dx - exact).abs() <= GRADIENT[dtype] * sizes + smallest(dtype)).all()


def test_the_operators_refuse_what_they_cannot_read(device: str) -> None:
    forward, backward = (row_kernels._operator("softmax", kind) for kind in ("forward", "backward_from_output"))
    x = torch.randn(8, 128, device=device)
    refused = [
        ((x.double(), 1, 1.0), "float64|float32"),
        ((x.t(), 1, 1.0), "contiguous"),
        ((x, 2, 1.0), "no dimension"),
        ((x, 1, 0.0), "finite and not 0"),
        ((x, 1, INF), "finite and not 0"),
    ]
    if device == "cuda":
        refused += [((x.new_empty(2, 4 * 196608 + 4), 1, 1.0), "3 MB"), ((x.flatten()[1:897].view(7, 128), 1, 1.0), "16 bytes")]
    for given, message in refused:
        with pytest.raises(RuntimeError, match=message):
            forward(*given)
    with pytest.raises(RuntimeError, match="dy must be as"):
        backward(x[:4], x, 1, 1.0)
    assert forward(x[:0], 1, 1.0).shape == (0, 128)


def test_limits_of_gpus_are_those_of_the_device_code() -> None:
    found = re.findall(r"\b(k\w+) = ([\d<() int64_t]+)[,;]", (DEVICE / "rows_call.h").read_text())
    stated = {name: eval(value.replace("int64_t", "")) for name, value in found}
    for name, value in {
        "kMostVectors": row_kernels.VECTORS,
        "kHeldVectors": row_kernels.HELD_VECTORS,
        "kMostAcross": row_kernels.MOST_ACROSS,
        "kLongestAcross": row_kernels.LONGEST_ACROSS,
    }.items():
        assert stated[name] == value, name


# Which calls the kernels compute.


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The operators that calls used."""
    found, operator = [], row_kernels._operator

    def counted(name: str, kind: str, part: RowPart):
        found.append((name, kind))
        return operator(name, kind, part)

    monkeypatch.setattr(row_kernels, "_operator", counted)
    return found


@pytest.mark.skipif(not row_kernels._has_vectors(), reason="a CPU without AVX2, whose rows are PyTorch's")
@pytest.mark.parametrize("name", NAMES)
def test_calls_that_kernels_take_on_a_cpu(name: str, taken: list, monkeypatch: pytest.MonkeyPatch) -> None:
    function, kernel = getattr(jitact, name), name.replace("softmin", "softmax")
    monkeypatch.setattr(row_kernels, "LARGE", 2**21)
    both = [(kernel, "forward"), (kernel, "backward_from_output")]
    for x, dim, plain, scaled in (
        (torch.randn(1024, 513), -1, both, both),
        (torch.randn(400, 600, dtype=torch.float32).t()[None], 1, [], []),  # 1 MB, strided rows
        (torch.randn(3, 100, 2000).transpose(1, 2), 1, both[:1], both[:1]),  # made contiguous, as by PyTorch
        (torch.randn(300, 1000), 1, [], both),
        (torch.randn(500, 1024).bfloat16(), 1, [], []),
        (torch.randn(600, 1024).bfloat16(), 1, both[:1] if kernel == "softmax" else [], both),
        (torch.randn(130, 4100), 0, both[:1], both[:1]),
        (torch.randn(100, 5300), 0, both[:1] if kernel == "softmax" else [], both[:1]),
        (torch.randn(520, 2100).bfloat16(), 0, both[:1] if kernel == "softmax" else [], both[:1]),
        (torch.randn(600, 1000).half()[:, ::2], 1, [], []),
        (torch.randn(1800, 300).half(), 1, [], both if kernel == "softmax" else both[1:]),
    ):
        x = x.requires_grad_()
        for scale in (1.0, -0.5):
            expected = plain if scale == 1 and name != "softmin" else scaled
            taken.clear()
            y = function(x, dim, scale=scale)
            dy = torch.randn_like(y)
            (dx,) = torch.autograd.grad(y, x, dy)
            assert taken == expected, (x.shape, dim)
            torch.testing.assert_close(y, getattr(F, name)(scale * x.detach().double(), dim).to(x.dtype))
            gradient, sizes = exact_gradient(kernel, dy, y.detach(), dim)
            factor = -scale if name == "softmin" else scale
            unit = (1 if len(taken) == 2 else 4) * GRADIENT[x.dtype]  # the latter for PyTorch's kernels
            assert ((dx.double() - factor * gradient).abs() <= unit * abs(factor) * sizes + smallest(x.dtype)).all()
    x = torch.randn(1024, 1024).requires_grad_()
    taken.clear()
    torch.autograd.grad(function(x, 1, save="input"), x, torch.randn_like(x))
    assert taken == [(kernel, "forward"), (kernel, "backward")]


@needs_gpu
@pytest.mark.parametrize("name", NAMES)
def test_calls_that_kernels_take_on_a_gpu(name: str, taken: list) -> None:
    function, kernel = getattr(jitact, name), name.replace("softmin", "softmax")
    both = [(kernel, "forward"), (kernel, "backward_from_output")]
    for dtype, n, expected in (
        (torch.bfloat16, 1024, both),
        (torch.float16, 32768, both),
        (torch.bfloat16, 333, both),
        (torch.float32, 512, both),
        (torch.float32, 555, both[:1] if name == "log_softmax" else both),
        (torch.float32, 4096, both),
        (torch.float32, 1048576, []),
    ):
        if not fits(dtype, n):
            continue
        taken.clear()
        x = torch.randn(3, 2**20 // n, n, device="cuda", dtype=dtype).requires_grad_()
        y, dy = function(x, 2), torch.randn_like(x).transpose(0, 1).contiguous().transpose(0, 1)
        (dx,) = torch.autograd.grad(y, x, dy)
        assert taken == expected, (dtype, n)
        torch.testing.assert_close(y, getattr(F, name)(x.detach().double(), 2).to(dtype))
        if not taken:  # then PyTorch computes it
            assert torch.equal(dx, torch.autograd.grad(getattr(F, name)(x, 2), x, dy)[0])
            continue
        exact, sizes = exact_gradient(kernel, dy, y.detach(), 2)
        sign = -1 if name == "softmin" else 1
        assert ((dx.double() - sign * exact).abs() <= GRADIENT[dtype] * sizes + smallest(dtype)).all(), (dtype, n)


def test_rows_that_a_gpu_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    for clusters, dtype, length, tensors, expected in (
        (True, torch.float32, 393216, 2, True),
        (True, torch.float32, 393215, 2, False),  # spans a vector more
        (True, torch.float32, 393210, 2, True),
        (True, torch.float32, 786432, 1, True),
        (True, torch.bfloat16, 786431, 2, False),
        (True, torch.bfloat16, 50257, 2, True),
        (False, torch.float32, 4096, 2, True),
        (False, torch.float32, 4095, 2, False),
        (False, torch.float32, 4090, 2, True),
        (False, torch.float32, 4100, 1, False),
        (True, torch.float32, 555, 2, False),
    ):
        monkeypatch.setattr(row_kernels, "_has_clusters", lambda device, has=clusters: has)
        x, lengths = torch.empty(1, length, dtype=dtype), row_kernels.GPU_BACKWARD["log_softmax", dtype.itemsize]
        assert row_kernels.fits_a_gpu(x, 1, tensors, lengths) is expected, (clusters, dtype, length)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_lengths_for_which_a_gpus_kernels_are_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of log_softmax in float32 are PyTorch's, unless it needs another pass."""
    monkeypatch.setattr(row_kernels, "_has_clusters", lambda device: True)
    is_softmax = name == "softmax"
    of_16_bits = {n: (n > 2, n > 2) for n in (2, 3, 7, 8, 13, 33, 64, 127, 129, 197, 200, 257, 333, 1000)}
    own = (2, 3, 4, 12, 31, 64, 96, 104, 112, 120, 129, 256, 300, 500, 580, 733, 999, 1000, 1001)
    of_float32 = {n: (n > 2, n > 2) for n in own} | {n: (True, is_softmax) for n in (513, 575)}
    of_float32 |= {n: (is_softmax, True) for n in (100, 108, 113, 116, 197, 401, 577, 731)}
    for dtype, table in ((torch.bfloat16, of_16_bits), (torch.float16, of_16_bits), (torch.float32, of_float32)):
        for n, expected in table.items():
            sizes = {"shape": (2**18, n), "nbytes": 2**18 * n * dtype.itemsize, "itemsize": dtype.itemsize}
            x = SimpleNamespace(dtype=dtype, device="cuda", is_cuda=True, data_ptr=lambda: 0, **sizes)
            used = row_kernels.takes_forward(name, x, 1, 1.0), row_kernels.takes_backward(name, x, 1, False)
            assert used == expected, (dtype, n)
            assert row_kernels.takes_forward(name, x, 1, 0.5) is row_kernels.takes_backward(name, x, 1, True) is (n >= 3), n
    for dtype, columns in itertools.product(CODE, (3, 16, 62, 63, 289)):
        for n in (1, 2, 3):
            x = torch.empty(2**18, n, columns, dtype=dtype, device="meta")
            x = SimpleNamespace(dtype=dtype, device="cuda", is_cuda=True, data_ptr=lambda: 0, shape=x.shape, nbytes=x.nbytes,
                                itemsize=x.itemsize, numel=x.numel)  # fmt: skip
            used = row_kernels.takes_forward(name, x, 1, 1.0), row_kernels.takes_backward(name, x, 1, False)
            assert used == (n >= 2, n >= 2), (dtype, columns, n)


def test_rows_across_memory_that_a_gpu_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    for clusters, dtype, shape, dim, tensors, expected in (
        (True, torch.float32, (8192, 8192), 0, 2, True),
        (True, torch.bfloat16, (2, 8, 64, 8), 1, 1, True),
        (True, torch.bfloat16, (2, 2, 63, 8), 1, 1, True),
        (True, torch.bfloat16, (2, 1, 63, 8), 1, 1, False),  # too short
        (True, torch.bfloat16, (2, 2, 15), 1, 1, True),
        (True, torch.bfloat16, (2, 2, 63, 9), 1, 2, True),
        (True, torch.bfloat16, (64, 8, 8), 1, 1, True),
        (True, torch.float32, (64, 1021), 0, 1, True),
        (True, torch.bfloat16, (64, 1021), 0, 1, True),
        (True, torch.bfloat16, (256, 17), 0, 1, True),
        (True, torch.bfloat16, (256, 15), 0, 1, True),
        (True, torch.bfloat16, (5000, 15), 0, 1, False),  # adjacent elements of few rows are read one after another
        (True, torch.bfloat16, (5000, 17), 0, 1, True),
        (True, torch.bfloat16, (256, 14), 0, 1, True),
        (True, torch.float32, (400_000, 8), 0, 2, True),
        (False, torch.float32, (256, 8), 0, 1, True),
        (False, torch.float32, (256, 8), 0, 2, False),
    ):
        monkeypatch.setattr(row_kernels, "_has_clusters", lambda device, has=clusters: has)
        x = torch.empty(shape, dtype=dtype)
        assert row_kernels.fits_a_gpu(x, dim, tensors, row_kernels.GPU_EVERY) is expected, (clusters, dtype, shape)


def test_pytorch_takes_all_else(taken: list, device: str) -> None:
    x = torch.randn(512, 2048, device=device)
    for other in (x[:16], x.double(), x.to("meta")):
        assert other.is_meta or torch.equal(jitact.softmax(other, -1), torch.softmax(other, -1))
    with torch.autocast(device):
        assert jitact.softmax(x.bfloat16(), -1).dtype is torch.softmax(x.bfloat16(), -1).dtype
    torch.func.vmap(lambda row: jitact.softmax(row, -1))(x)
    torch.func.jvp(lambda x: jitact.softmax(x, -1), (x,), (x,))
    for scale in (0.0, INF, 2.0**-140):
        torch.testing.assert_close(jitact.softmax(x, -1, scale=scale), torch.softmax(x * scale, -1), equal_nan=True)
    assert not taken


@pytest.mark.parametrize("name", NAMES)
def test_second_gradients_of_the_kernels(name: str, device: str, taken: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_kernels, "LARGE", 2**20)
    x = torch.randn(128, 4096, device=device).requires_grad_()
    dy, ddx = torch.randn_like(x).requires_grad_(), torch.randn_like(x)
    for save in ("output", "input"):
        found = []
        for function in (lambda x: getattr(jitact, name)(x, -1, save=save), lambda x: getattr(F, name)(x, -1)):
            (dx,) = torch.autograd.grad(function(x), x, dy, create_graph=True)
            found.append([dx, *torch.autograd.grad(dx, (x, dy), ddx)])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert taken or not row_kernels._has_vectors()


# Behaviour on every device and path.


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
    x = torch.randn(3, 4, device=device)
    torch.testing.assert_close(ours(x, 1, scale=-1), theirs(-x, 1))
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
    added = torch.randn(2, 1, 4, device=device, dtype=torch.float64).requires_grad_()
    sign = -1 if name == "softmin" else 1
    softmax = F.log_softmax if name == "log_softmax" else F.softmax
    function = getattr(jitact, name)
    for y, terms, dim in (
        (function(x, -1, scale=0.25), 0.25 * sign * x, -1),
        (function(x, 1, mask=keep, scale=3), (3 * sign * x).masked_fill(~keep, -INF), 1),
        (function(x, 1, mask=keep, scale=-2), (-2 * sign * x).masked_fill(~keep, -INF), 1),
        (function(x, 1, mask=keep, scale=0), (0 * x).masked_fill(~keep, -INF), 1),
        (function(x, -1, mask=added), sign * x + added, -1),
        (function(x, -1, mask=added, scale=0.5), 0.5 * sign * x + added, -1),
    ):
        torch.testing.assert_close(y, softmax(terms, dim), equal_nan=True)
    dy = torch.randn_like(x)
    found = torch.autograd.grad(function(x, -1, mask=added, scale=0.5), (x, added), dy)
    for ours, theirs in zip(found, torch.autograd.grad(softmax(0.5 * sign * x + added, -1), (x, added), dy), strict=True):
        torch.testing.assert_close(ours, theirs)
    y = function(x, -1, mask=keep)
    assert y[:, 2].isnan().all() and (y[:, :2].exp() if name == "log_softmax" else y[:, :2])[:, ~keep[:2]].eq(0).all()
    kept = function(x[:, :2], -1, mask=keep[:2])
    (dx,) = torch.autograd.grad(kept.masked_fill(~keep[:2], 0).square().sum(), x)
    assert dx.isfinite().all() and dx[:, :2][:, ~keep[:2]].eq(0).all() and dx[:, :2].ne(0).any()
    assert function(x.half(), -1, torch.float32, mask=keep, scale=2).dtype is torch.float32


def test_masks_before_the_kernels(device: str, taken: list) -> None:
    x, keep = torch.randn(512, 1024, device=device, dtype=torch.bfloat16), (torch.rand(2048, device=device) > 0.5)[::2]
    y = jitact.softmax(x, -1, scale=0.5, mask=keep)
    exact = torch.softmax((0.5 * x.double()).masked_fill(~keep, -INF), -1)
    assert ulp_error(y.cpu(), exact.cpu(), x.dtype).max() <= 1
    assert taken == [("softmax", "forward")] or not row_kernels._has_vectors()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((torch.arange(3), 0), {}, TypeError, "softmax: without dtype=, x is float32, .*; got an int64 tensor"),
        (([1.0], 0), {}, TypeError, "softmax: expected a tensor, got a list; convert it with torch.as_tensor"),
        ((torch.eye(2).to_sparse(), 0), {}, TypeError, "softmax: expected a dense tensor, got a sparse_coo float32 tensor"),
        ((torch.ones(2), 0), {"mask": [True, False]}, TypeError, "softmax: mask is a bool tensor, or a dense float32"),
        ((torch.ones(2), 0), {"mask": torch.ones(2, dtype=torch.int64)}, TypeError, "mask is a bool tensor, or a dense"),
        ((torch.ones(2), 0), {"mask": torch.ones(2).to(torch.float8_e5m2)}, TypeError, "or bfloat16 tensor, got a float8_e5m2"),
        ((torch.ones(2), 0), {"mask": torch.ones(3, 2)}, ValueError, r"must broadcast to \(2,\).*got \(3, 2\)"),
        ((torch.ones(2, 1), 0), {"mask": torch.ones(2)}, ValueError, "must broadcast"),
        ((torch.ones(2), 0), {"scale": torch.ones(2)}, TypeError, "softmax: scale must be a number"),
        ((torch.ones(2), 0), {"save": "bit"}, ValueError, "softmax: save must be 'output' or 'input', got 'bit'"),
        ((torch.ones(2), 0), {"save": torch.ones(3)}, ValueError, "'output' or 'input', got a float32 tensor"),
        ((torch.ones(2), 0, torch.ones(3)), {}, TypeError, "or None, got a float32 tensor; give mask by name"),
        ((torch.ones(2), 1), {}, IndexError, "Dimension out of range"),
        ((torch.ones(2), 0.0), {}, TypeError, "softmax: dim is an int, got a float"),
        ((torch.ones(2), 0), {"mask": torch.ones(2, device="meta")}, ValueError, "mask must be on the device of x, cpu, got"),
        ((torch.ones(2).long(), 0), {"mask": torch.ones(2)}, TypeError, "without dtype=, x is float32, .*; got an int64"),
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
        compiled = torch.compile(lambda x, f=ours: f(x, 1, scale=0.5), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), theirs(0.5 * x, 1))
        masked = lambda x, scale, f=ours: f(x, 1, scale=scale, mask=x > -1)  # noqa: E731
        compiled = torch.compile(masked, backend="eager", fullgraph=True, dynamic=True)
        torch.testing.assert_close(compiled(x, 0.7), masked(x, 0.7))


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax", "Softmin", "Softmax2d"])
def test_modules_stand_where_pytorchs_stand(name: str, device: str) -> None:
    ours, theirs = getattr(rows, name), getattr(nn, name)
    x, arguments = torch.randn(2, 3, 4, 4, device=device), () if name == "Softmax2d" else (1,)
    module = ours(*arguments)
    assert isinstance(module, theirs) and repr(module) == repr(theirs(*arguments))
    torch.testing.assert_close(pickle.loads(pickle.dumps(module))(x), theirs(*arguments)(x))
    model = nn.Sequential(nn.Linear(4, 4, device=device), theirs(*arguments))
    expected, calls = model(x), []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    report = jitact.replace(model)
    assert type(model[1]) is ours and [(each.paths, each.new) for each in report.replaced] == [(("1",), f"jitact {module!r}")]
    torch.testing.assert_close(model(x), expected)
    assert calls == [1] and not report.left and not report.calls
    assert jitact.restore(model) == 1 and type(model[1]) is theirs and repr(model[1]) == repr(module)


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
def test_the_form_of_kernelbench(name: str) -> None:
    ours, theirs = getattr(rows, name), getattr(nn, name)
    model_new, model = ours(*ours.get_init_inputs()), theirs(*ours.get_init_inputs())
    (x,) = ours.get_inputs(300, 2000)
    assert x.shape == (300, 2000) and x.dtype is torch.float32
    torch.testing.assert_close(model_new(x), model(x), rtol=1e-4, atol=1e-4)


def test_softmax2d_wants_images() -> None:
    with pytest.raises(ValueError, match="expected 3 or 4 dimensions, got 2"):
        rows.Softmax2d()(torch.ones(2, 3))


def test_get_knows_them() -> None:
    for given in ("softmax", "Softmax", nn.Softmax, nn.Softmax(1), F.softmax, torch.softmax, jitact.softmax, rows.Softmax):
        assert jitact.get(given) is rows.Softmax
    assert jitact.get("log_softmax") is rows.LogSoftmax and jitact.get("LogSoftmax").Model is nn.LogSoftmax
    for name in ("softmax", "LogSoftmax"):
        with pytest.raises(KeyError, match=f"{name!r} works on rows, not on elements"):
            jitact.registry.class_of(name)
    with pytest.raises(KeyError, match="Softmax: works on rows, not on elements"):
        jitact.registry.class_of(nn.Softmax(1))
    with pytest.raises(ValueError, match="an activation cannot be called 'softmax'"):
        jitact.define("softmax", "x")


def test_what_a_file_of_rows_declares() -> None:
    text = kernels.KernelSource.from_file("softmax").text
    assert read_signature(text).folds and read_signature(text).of("element") == ("kept",)
    assert not kernels.KernelSource.from_file("relu").signature.folds
    for old, new, message in (
        ("ELEMENTWISE T fold_from_output(T dy, T y) { return dy * y; }", "", "a file of rows defines forward, fold_from"),
        ("fold_from_output(T dy, T y)", "fold_from_output(T dy, T y, T z)", r"fold_from_output must take \(T, T\)"),
        ("Sum<T> row", "Number<T> row", r"backward_from_output must take \(T, T, Sum<T>\)"),
    ):
        assert old in text
        with pytest.raises(ValueError, match=message):
            read_signature(re.sub(re.escape(old), new, text).replace("row.total", "row" if "Number" in new else "row.total"))
    try:
        assert jitact.define("my_softmax", source=text).activation.source.signature.folds
    finally:
        forget("my_softmax")
