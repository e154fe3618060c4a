"""Builds of a part of a file of rows, which a first call compiles in place of the whole file."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rows_common import CODE, OPERATIONS, emulated_library

import jitact
from jitact import kernels
from jitact.kernels.loader import build
from jitact.kernels.loader.gpu import Arch
from jitact.kernels.loader.plan import make_plan
from jitact.kernels.loader.source import RowPart, RowTypes
from jitact.rows import kernels as row_kernels

PARTS = [
    RowPart("bfloat16", "along", "output"),
    RowPart("float32", "across", "output"),
    RowPart("float16", "across", "output"),
    RowPart("float32", "along", "input"),
]


SHAPES = {"along": ((300, 1001), (300, 1024)), "across": ((3, 500, 257), (3, 500, 256))}


@pytest.mark.parametrize("part", PARTS, ids="_".join)
@pytest.mark.parametrize("which", [0, 1], ids=["ragged", "of whole vectors"])
def test_a_part_computes_what_the_whole_does(part: RowPart, which: int, device: str) -> None:
    source = kernels.KernelSource.from_file("log_softmax")
    alone = kernels.load(source._replace(rows=part)).name
    assert alone == f"log_softmax_{'_'.join(part)}"
    shape, dim = SHAPES[part.rows][which], 1
    torch.manual_seed(0)
    x, dy = (torch.randn(shape, device=device).to(getattr(torch, part.dtype)) for _ in range(2))
    y = torch.log_softmax(x, dim)
    given = {"forward": (x,), "backward": (dy, x), "backward_from_output": (dy, y)}
    for kind, tensors in given.items():
        has = hasattr(torch.ops.jitact, f"{alone}_{kind}")
        assert has == (kind in part.kinds)
        if has:
            run = getattr(torch.ops.jitact, f"{alone}_{kind}").default
            assert torch.equal(run(*tensors, dim, 2.0), row_kernels._operator("log_softmax", kind)(*tensors, dim, 2.0))
            assert run(*(t.to("meta") for t in tensors), dim, 2.0).shape == x.shape


# For each part: lengths, and adjacent rows, of the shapes of rows, which have a part each, forward and backward.
APART = {"along": ((24, 1), (31, 1), (1000, 1), (1001, 1)), "across": ((13, 70), (5, 70), (13, 33), (8, 33))}


@pytest.mark.parametrize("rows", APART)
def test_parts_that_are_compiled_at_the_same_time_are_not_mixed_up(rows: str, tmp_path: Path) -> None:
    """Functions of one name become one when the parts are joined, so none may do what depends on the part."""
    part = RowPart("bfloat16", rows, "output")
    source = kernels.KernelSource.from_file("softmax")._replace(rows=part)
    library = emulated_library(tmp_path, "softmax", source.defines(), parts=len(part.kinds) * part.shapes)
    for length, inner in APART[rows]:
        torch.manual_seed(0)
        x, dy = (torch.randn(3, length, inner).bfloat16() for _ in range(2))  # each begins on 16 bytes
        y, dx = torch.empty_like(x), torch.empty_like(x)
        for kind, first, second, to in (("forward", x, x, y), ("backward_from_output", dy, y, dx)):
            sizes = [ctypes.c_int64(size) for size in (3, length, inner)]
            data = [ctypes.c_void_p(t.data_ptr()) for t in (first, second, to)]
            assert library.run(OPERATIONS.index(kind), CODE[x.dtype], *sizes, ctypes.c_float(1), *data) is None
        z = x.double().requires_grad_()
        expected = torch.softmax(z, 1)
        torch.testing.assert_close(y.double(), expected.detach(), rtol=2**-8, atol=0)
        torch.testing.assert_close(dx.double(), torch.autograd.grad(expected, z, dy.double())[0], rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("mask", ["none", pytest.param("bool", marks=pytest.mark.slow)])
def test_parts_for_types_are_not_mixed_up(mask: str, tmp_path: Path) -> None:
    """Of rows that threads hold as results are and, from some length on, as they read them."""
    types = RowTypes("bfloat16", "float32", mask)
    library = emulated_library(tmp_path, "log_softmax", types.defines(), parts=len(types.kinds) * types.shapes)
    for length in (24, 31, 1000, 1001, 28_668, 28_680, 28_683):
        torch.manual_seed(0)
        x, dy = torch.randn(3, length).bfloat16(), torch.randn(3, length)
        taking_part = torch.rand(1, 1, 1, length) < 0.7
        if mask == "none":
            taking_part[:] = True
        sizes, strides = (ctypes.c_int64 * 2)(1, 3), (ctypes.c_int64 * 3)(0, 0, 0)
        library.set_mask(ctypes.c_void_p(taking_part.data_ptr()), sizes, strides, ctypes.c_int64(1), ctypes.c_bool(False))
        y, dx = torch.empty_like(dy), torch.empty_like(x)
        for kind, first, second, to in (("forward", x, x, y), ("backward_from_output", dy, y, dx)):
            data = [ctypes.c_void_p(t.data_ptr()) for t in (first, second, to)]
            of_rows = [ctypes.c_int64(size) for size in (3, length, 1)]
            assert library.run(OPERATIONS.index(kind), CODE[to.dtype], *of_rows, ctypes.c_float(1), *data) is None
        z = x.double().requires_grad_()
        expected = torch.log_softmax(z.masked_fill(~taking_part[0, 0], -torch.inf), 1)
        torch.testing.assert_close(y.double(), expected.detach(), rtol=2**-20, atol=2**-20)
        gradient = torch.autograd.grad(expected, z, dy.double())[0]
        torch.testing.assert_close(dx.double(), gradient, rtol=2**-6, atol=2**-8)


def test_what_a_part_refuses(device: str) -> None:
    name = kernels.load(kernels.KernelSource.from_file("log_softmax")._replace(rows=PARTS[0])).name
    forward = getattr(torch.ops.jitact, f"{name}_forward").default
    x = torch.randn(8, 128, device=device).bfloat16()
    for given, message in (((x.float(), 1, 1.0), "of the dtype that this is"), ((x, 0, 1.0), "along a dimension that this is")):
        with pytest.raises(RuntimeError, match=message):
            forward(*given)


def test_each_call_asks_for_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, load_part = [], row_kernels.load_part

    def noted(source: kernels.KernelSource, part: RowPart) -> kernels.Library:
        asked.append((source.name, *part))
        return load_part(source, part)

    monkeypatch.setattr(row_kernels, "load_part", noted)
    row_kernels.operator.cache_clear(), row_kernels._operator.cache_clear()
    x = torch.randn(1024, 8200, requires_grad=True)
    jitact.softmin(x, -1).sum().backward()
    jitact.log_softmax(x, -1, scale=2.0, save="input").sum().backward()
    if row_kernels._has_vectors():
        long, kept = ("log_softmax", "float32", "along", "output"), ("log_softmax", "float32", "along", "input")
        assert asked == [("softmax", "float32", "along", "output"), ("softmax", "float32", "along", "output"), long, kept]
    cls = jitact.define("shares", source=SHARES)
    asked.clear()
    jitact.shares(torch.randn(4, 9, 5, dtype=torch.float16, requires_grad=True), 1).sum().backward()
    assert asked == [(cls.activation.name, "float16", "across", "output")] * 2


def test_a_build_with_cuda_kernels_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be compiled for the GPU, a part made elsewhere is better than a whole build for the CPU alone."""
    source = kernels.KernelSource.from_file("softmax")
    gpu = (Arch.parse("9.0"),)
    whole, part = (
        make_plan(each)._replace(gpus=gpu, archs=gpu, missing_cuda="no nvcc", missing=None)
        for each in (source, source._replace(rows=PARTS[0]))
    )
    cached, elsewhere = {}, {}
    monkeypatch.setattr(build, "find", lambda plan: cached.get(plan.name))
    monkeypatch.setattr(build, "cannot_compile", lambda plan: "JITACT_NO_BUILD is set")
    monkeypatch.setattr(build, "_find_made_elsewhere", lambda plan, _, *, with_cuda: elsewhere.get((plan.name, with_cuda)))
    with_cuda, without = (SimpleNamespace(build=SimpleNamespace(archs=archs)) for archs in (("9.0",), ()))
    assert build.first_choice(whole, part) is whole, "for the error's message"
    for found, expected in (
        ({whole: with_cuda, part: with_cuda}, whole),
        ({whole: without, part: with_cuda}, part),
        ({whole: without, part: without}, whole),
        ({part: without}, part),
    ):
        cached.clear(), elsewhere.clear()
        cached.update({plan.name: entry for plan, entry in found.items()})
        assert build.first_choice(whole, part) is expected
        cached.clear()
        elsewhere.update({(plan.name, cuda): entry for plan, entry in found.items() for cuda in (entry is with_cuda, False)})
        assert build.first_choice(whole, part) is expected


SHARES = """#include "rows.cuh"
ELEMENTWISE T forward(T kept, SumOfExp<T> row) { return row.share(kept); }
ELEMENTWISE T fold_from_output(T dy, T y) { return dy * y; }
ELEMENTWISE T backward_from_output(T dy, T y, Sum<T> row) { return y * (dy - row.total); }
"""


FIRST_USE = """
import sys
import torch
import jitact
from jitact import kernels
from jitact.rows import kernels as row_kernels

def run(dtype):
    x = torch.randn(64, 256).to(dtype)
    row_kernels.forward("softmax", x, 1, 1.0)

what = sys.argv[1]
if what == "whole":
    kernels.load(kernels.KernelSource.from_file("softmax"))
else:
    run(getattr(torch, what))
"""


def test_a_build_of_the_whole_file_serves_all_calls(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)

    def use(what: str, no_build: str = "0") -> tuple[int, str]:
        command = [sys.executable, "-c", FIRST_USE, what]
        env = os.environ | {"JITACT_CACHE_DIR": str(cache), "JITACT_NO_BUILD": no_build}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        return done.returncode, done.stderr

    def builds() -> set[str]:
        return {path.name.rpartition("-")[0] for path in cache.iterdir() if path.is_dir() and "-" in path.name}

    code, said = use("float32")
    assert code == 0 and said.startswith("jitact: softmax_float32_along_output compiled in ")
    assert builds() == {"softmax_float32_along_output"}
    assert use("float32", no_build="1") == (0, "")
    code, said = use("float16", no_build="1")
    assert code == 1 and "to build it: python -m jitact build softmax\n" in said
    assert use("whole")[0] == 0
    assert use("float16", no_build="1") == (0, "")
    assert builds() == {"softmax_float32_along_output", "softmax"}
