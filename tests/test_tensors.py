"""Shapes, strides, offsets and devices of tensors, and the tensors that are refused."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from common import DTYPES, PLAIN_IDS
from emulated import without_launches

import jitact
from jitact.configs import call
from jitact.kernels.loader.source import DEVICE

KINDS = ["relu", "selu", "softsign", "gelu", "hardtanh"]  # one bit, parameters, both saves, input alone

SHAPES = [(), (0,), (1,), (7,), (8,), (255,), (1024,), (1025,), (3, 0, 5), (2, 3, 5, 7), (4099,), (1, 1, 1)]


def both(name: str, x: torch.Tensor, dy: torch.Tensor | None = None, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = jitact.get(name)(**options)(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y) if dy is None else dy)
    return y.detach(), dx


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_shapes(name: str, dtype: torch.dtype, device: str) -> None:
    for shape in SHAPES:
        x = torch.randn(shape, device=device, dtype=dtype)
        y, dx = both(name, x)
        wide_y, wide_dx = both(name, torch.cat([x.flatten(), x.new_zeros(4096)]))
        assert y.shape == dx.shape == x.shape and y.dtype == dx.dtype == dtype
        assert torch.equal(y.flatten(), wide_y[: x.numel()]), shape
        assert torch.equal(dx.flatten(), wide_dx[: x.numel()]), shape


LAYOUTS = {
    "channels_last": lambda: torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.randn(2, 3, 5, 7, 3).to(memory_format=torch.channels_last_3d),
    "transposed": lambda: torch.randn(33, 65).t(),
    "permuted": lambda: torch.randn(4, 5, 6).permute(2, 0, 1),
    "sliced": lambda: torch.randn(40, 50)[::2, 1::3],
    "expanded": lambda: torch.randn(9, 1, 7).expand(9, 5, 7),
    "offset": lambda: torch.randn(5000)[3:],
    "size one": lambda: torch.randn(8, 6)[:, 2:3],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", KINDS)
def test_layouts(name: str, layout: str, dtype: torch.dtype, device: str) -> None:
    x = LAYOUTS[layout]()
    x = (
        torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device).copy_(x)
        if "expanded" not in layout
        else x.to(device, dtype)
    )
    dy = torch.randn(x.shape, device=device, dtype=dtype)
    for save in jitact.get(name).activation.saves:
        y, dx = both(name, x, dy, save=save)
        plain_y, plain_dx = both(name, x.contiguous(), dy.contiguous(), save=save)
        assert torch.equal(y, plain_y) and torch.equal(dx, plain_dx)
        assert y.stride() == dx.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize(("shape", "strides"), [((1, 5, 6), (0, 6, 1)), ((1, 5, 6), (7, 6, 1)), ((5, 1, 6), (6, 99, 1))])
def test_dimensions_of_size_one_have_the_usual_strides(shape: tuple, strides: tuple, device: str) -> None:
    """As results of torch.relu, and of jitact's own in graphs. PyTorch ignores these strides; other readers may not."""
    x = torch.randn(600, device=device).as_strided(shape, strides)
    usual = torch.relu(x).stride()
    for given in (x, x.detach().requires_grad_()):
        assert jitact.relu(given).stride() == jitact.gelu(given).stride() == usual
    assert jitact.swiglu(x, x).stride() == jitact.gelu(x, residual=x).stride() == usual


def test_dense_tensors_are_not_copied(device: str) -> None:
    """Only the output is allocated, for any dense strides."""
    x = torch.randn(64, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    jitact.gelu(x)
    with torch.profiler.profile(profile_memory=True) as profile:
        jitact.gelu(x)
    allocated = [e for e in profile.events() if max(e.cpu_memory_usage, getattr(e, "device_memory_usage", 0)) > 1000]
    assert not any("copy" in e.name or "clone" in e.name for e in profile.events())
    assert max(max(e.cpu_memory_usage, getattr(e, "device_memory_usage", 0)) for e in allocated) <= x.nbytes + 512


@pytest.mark.parametrize("offset", range(1, 9))
def test_every_misalignment(offset: int, device: str) -> None:
    for dtype in DTYPES:
        x, dy = torch.randn(2, 3000, device=device).to(dtype)
        for name in ("relu", "softsign"):
            y, dx = both(name, x[offset:], dy[2 * offset :].clone()[: 3000 - offset] if offset == 0 else dy[offset:])
            plain = both(name, x[offset:].clone(), dy[offset:].clone())
            assert torch.equal(y, plain[0]) and torch.equal(dx, plain[1])


@pytest.mark.parametrize("name", KINDS)
def test_gradients_that_lie_otherwise(name: str, device: str) -> None:
    """dy expanded, transposed, or with other strides than y."""
    x = torch.randn(34, 34, device=device)
    for dy in (torch.ones((), device=device).expand(34, 34), torch.randn(34, 34, device=device).t(),
               torch.randn(68, 68, device=device)[::2, ::2]):  # fmt: skip
        for save in jitact.get(name).activation.saves:
            assert torch.equal(both(name, x, dy, save=save)[1], both(name, x, dy.contiguous(), save=save)[1])
            assert torch.equal(both(name, x.t(), dy, save=save)[1], both(name, x.t().contiguous(), dy, save=save)[1])


TRANSPOSITIONS = [(1, 1, 2), (3, 2, 4), (2, 6, 35 * 2), (1, 64, 64), (2, 66, 130), (5, 1000, 6), (1, 7, 33), (2, 65, 31)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_in_another_memory_format(dtype: torch.dtype, device: str) -> None:
    """dy is channels_last and x is not, and the reverse."""
    for n, channels, pixels in TRANSPOSITIONS:
        x, dy = torch.randn(2, n, channels, pixels, device=device).to(dtype)
        last, dy_last = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x, dy))
        for name in ("relu", "gelu"):
            expected = both(name, x, dy)[1]
            found = both(name, x, dy_last)[1], both(name, last, dy)[1]
            assert torch.equal(found[0], expected) and torch.equal(found[1], expected), (n, channels, pixels)
            assert found[0].stride() == torch.empty_like(x).stride() and found[1].stride() == torch.empty_like(last).stride()


def test_the_gpus_copy_into_another_memory_order(tmp_path: Path) -> None:
    """Runs its code in CPU threads."""
    for header in DEVICE.glob("*.*h"):
        (tmp_path / header.name).write_text(without_launches(header.read_text()))
    (tmp_path / "ptx.cuh").write_text("#pragma once\n")  # emulated_cuda.h defines the same functions
    (tmp_path / "copy.cpp").write_text("""
        #define __CUDACC__
        #define JITACT_CUDA
        #include "emulated_cuda.h"
        #include "elementwise.cuh"
        #include "transpose_cuda.cuh"
        extern "C" bool copy(int64_t batch, int64_t rows, int64_t columns, int bytes, const void* from, void* to) {
          const jitact::loops::Transposition t{batch, rows, columns, bytes, from, to};
          return jitact::loops::takes_transposition(t) && !jitact::loops::transpose(t, nullptr);
        }
    """)
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", f"-I{tmp_path}", f"-I{Path(__file__).parent}"]
    subprocess.run([*command, "copy.cpp", "-o", "copy.so"], cwd=tmp_path, check=True)
    copy = ctypes.CDLL(str(tmp_path / "copy.so")).copy
    copy.restype = ctypes.c_bool
    for dtype in DTYPES:
        for batch, rows, columns in TRANSPOSITIONS:
            x = torch.randn(batch, columns, rows).to(dtype)
            y = torch.full((batch, rows, columns), torch.nan, dtype=dtype)
            sizes = [ctypes.c_int64(size) for size in (batch, rows, columns)]
            taken = copy(*sizes, dtype.itemsize, ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()))
            assert taken is (dtype.itemsize > 2 or rows % 2 == columns % 2 == 0), (dtype, batch, rows, columns)
            assert not taken or torch.equal(y, x.transpose(1, 2)), (dtype, batch, rows, columns)


REFUSED = {
    "an int64 tensor": lambda: torch.ones(3, dtype=torch.int64),
    "a bool tensor": lambda: torch.ones(3, dtype=torch.bool),
    "a complex64 tensor": lambda: torch.ones(3, dtype=torch.complex64),
    "a sparse_coo float32 tensor": lambda: torch.ones(3).to_sparse(),
    "a nested float32 tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "None": lambda: None,
    "a list": lambda: [1.0, 2.0],
    "a float": lambda: 1.0,
}


@pytest.mark.parametrize("given", REFUSED)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["relu", "gelu", "prelu", "rrelu", "xielu"])
def test_what_is_refused(name: str, given: str) -> None:
    with pytest.raises(TypeError) as error:
        jitact.get(name)()(REFUSED[given]())
    message = str(error.value)
    assert name in message and "float32, float64, float16 or bfloat16" in message
    assert given.removeprefix("an ").removeprefix("a ") in message
    assert ("layout=torch.jagged" in message) == ("nested" in given)


@pytest.mark.parametrize("given", REFUSED)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_refused_beside_another_tensor(given: str) -> None:
    x = REFUSED[given]()
    what = re.escape(given.removeprefix("an ").removeprefix("a "))
    with pytest.raises(TypeError, match=rf"^relu.*float16 or bfloat16.*{what}"):
        jitact.relu(x, bias=torch.ones(3))
    if isinstance(x, torch.Tensor):  # of all else keywords may be meant
        with pytest.raises(TypeError, match=rf"^swiglu.*float16 or bfloat16.*{what}"):
            jitact.swiglu(x, torch.ones(3))


@pytest.mark.parametrize("name", ["relu", "silu", "prelu", "rrelu"])
def test_memory_that_is_short_is_torchs_own_error(name: str, device: str) -> None:
    x = torch.zeros((), device=device).expand(2**45)
    with pytest.raises(RuntimeError) as theirs:
        torch.empty_like(x)
    for requires_grad in (False, True):
        with pytest.raises(type(theirs.value), match=re.escape(str(theirs.value)[:40])):
            jitact.get(name)().to(device)(x.detach().requires_grad_(requires_grad))


def test_other_errors_are_no_shortage_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's own error is raised unchanged, even if memory is short."""
    x = torch.zeros(())
    jitact.relu(x)
    monkeypatch.setattr(torch, "empty_like", lambda *_, **__: pytest.fail("asked for memory"))
    with pytest.raises(RuntimeError, match="relu: expected a float64, float32, float16 or bfloat16 tensor"):
        call(torch.ops.jitact.relu_forward.default, x.int())


FREED = {
    "plain": lambda: torch.randn(4, 3),
    "offset": lambda: torch.randn(10, 3)[2:6],
    "with gaps": lambda: torch.randn(8, 6)[::2, ::2],
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
}
FREED_CALLS = {
    "gelu": jitact.gelu,
    "relu": jitact.relu,
    "silu": lambda x: jitact.silu(x, inplace=True),
    "leaky_relu": lambda x: jitact.leaky_relu(x, inplace=True),
    "prelu": lambda x: jitact.prelu(x, torch.ones(3)),
    "xielu": lambda x: jitact.xielu(x, torch.ones(1), torch.ones(1)),
    "rrelu": lambda x: jitact.rrelu(x, training=True, inplace=True),
}


def freed(t: torch.Tensor) -> torch.Tensor:
    """Frees the storage, as FSDP does between uses of parameters."""
    t.untyped_storage().resize_(0)
    return t


@pytest.mark.parametrize("layout", FREED)
@pytest.mark.parametrize("name", FREED_CALLS)
def test_freed_storage_is_an_error(name: str, layout: str) -> None:
    error = pytest.raises(RuntimeError, match=f"{name}: a tensor has elements, but its data is not allocated")
    with error:
        FREED_CALLS[name](freed(FREED[layout]()))
    x = FREED[layout]().requires_grad_()
    hidden = x * 1
    with error:
        FREED_CALLS[name](freed(hidden))


@pytest.mark.parametrize("name", ["gelu", "tanh", "relu", "prelu", "rrelu", "xielu"])
def test_freed_storage_in_backward_is_an_error(name: str) -> None:
    module = jitact.get(name)()
    error = pytest.raises(RuntimeError, match=f"{name}: a tensor has elements, but its data is not allocated")
    x, kept = torch.randn(5, 3).bfloat16().float().requires_grad_(), []
    module = module.to(torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.detach()) or t, lambda t: t):
        y = module(x * 1)
    freed(kept[0])
    with error:
        torch.autograd.grad(y, x, torch.ones(5, 3))
    with error:
        torch.autograd.grad(module(x), x, freed(torch.ones(5, 3)))


def test_tensors_without_elements_need_no_storage() -> None:
    for function in FREED_CALLS.values():
        assert function(freed(torch.ones(0, 3))).shape == (0, 3)
        x = torch.ones(0, 3, requires_grad=True)
        function(freed(x * 1)).sum().backward()
        assert x.grad.shape == (0, 3)


def test_weights_whose_storage_was_freed() -> None:
    with pytest.raises(RuntimeError, match="prelu: a tensor has elements"):
        jitact.prelu(torch.ones(3), freed(torch.ones(1)))


def test_arguments_are_let_go_where_a_call_fails() -> None:
    """A weight that cannot be copied: 16 failing calls with 16 MB each leak almost nothing."""

    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def fail() -> int:
        for _ in range(16):
            with pytest.raises(RuntimeError, match="prelu: out of memory"):
                torch.ops.jitact.prelu_forward(torch.ones(1 << 22), weight)
        return held()

    jitact.prelu(torch.ones(1), torch.ones(1))
    weight = torch.zeros(1).expand(2**45)
    before = fail()  # warms up the allocator's cache
    assert fail() - before < 64 << 20


def test_memory_that_runs_short_in_a_thread_is_an_error() -> None:
    """A row that needs a float32 buffer, in a process whose memory is limited."""
    script = """
        import resource, torch, jitact
        x = torch.randn(1, 24 << 20)
        jitact.softmax(x[:, : 1 << 20], 1)
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + x.nbytes + (4 << 20),) * 2)
        try:
            print(float(jitact.softmax(x, 1).sum()))
        except RuntimeError as error:
            print(error)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "softmax: out of memory"


def test_inputs_are_not_copied_where_they_are_shared_until_written() -> None:
    x, weight = torch.randn(100), torch.ones(1)
    lazy = torch._lazy_clone(x)
    for function in (jitact.gelu, jitact.relu, lambda t: jitact.prelu(t, weight), lambda t: jitact.rrelu(t, training=True)):
        leaf = lazy.detach().requires_grad_()
        function(lazy)
        function(leaf).backward(torch._lazy_clone(torch.ones(100)))
        assert torch._C._is_cow_tensor(lazy)
    before = x.clone()
    jitact.relu(lazy, inplace=True)
    assert torch.equal(x, before) and torch.equal(lazy, before.clamp(min=0))


@pytest.mark.parametrize("name", ["relu", "gelu", "tanh", "prelu"])
def test_tensors_that_are_not_in_memory(name: str, device: str) -> None:
    """Zero tensors without storage, and views with the negative bit."""
    module = jitact.get(name)().to(device)
    for x in (torch.randn(2, 3, device=device), torch.randn(3, 2, device=device).t()):
        x.requires_grad_()
        (dx,) = torch.autograd.grad(module(x), x, torch._efficientzerotensor((2, 3), device=device))
        assert not dx.any()
    assert not module(torch._efficientzerotensor((3,), device=device)).sub(module(torch.zeros(3, device=device))).any()
    negated = torch.randn(8, dtype=torch.complex64, device=device).conj().imag
    assert negated.is_neg() and torch.equal(module(negated), module(negated.clone()))


def test_meta_tensors() -> None:
    for name in KINDS:
        x = torch.randn(4, 6, device="meta").t().requires_grad_()
        y = jitact.get(name)()(x)
        assert y.device.type == "meta" and y.shape == x.shape and y.stride() == x.stride()
        y.sum().backward()
        assert x.grad.shape == x.shape


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "selu", "elu", "silu", "hardswish", "mish"])
def test_in_place(name: str, device: str) -> None:
    module, plain = jitact.get(name)(inplace=True), jitact.get(name)()
    for x in (torch.randn(100, device=device), torch.randn(20, 30, device=device)[::2, ::3]):
        before, address = x.clone(), x.data_ptr()
        y = module(x)
        assert y is x and x.data_ptr() == address
        torch.testing.assert_close(y, plain(before), rtol=0, atol=0)
        leaf = before.clone().requires_grad_()
        hidden = leaf * 1
        module(hidden).sum().backward()
        reference = before.clone().requires_grad_()
        plain(reference).sum().backward()
        torch.testing.assert_close(leaf.grad, reference.grad, rtol=1e-5, atol=1e-6)
    leaf = torch.randn(5, device=device, requires_grad=True)
    kept = leaf.detach().clone()
    with pytest.raises(RuntimeError, match=name):
        module(leaf)
    assert torch.equal(leaf.detach(), kept), "nothing was changed before the error"


@pytest.mark.parametrize("name", ["relu", "selu", "silu"])
def test_in_place_on_a_view(name: str, device: str) -> None:
    for view in (lambda t: t.view(-1), lambda t: t[:, ::2]):
        x = torch.randn(6, 8, device=device, requires_grad=True)
        reference = x.detach().clone().requires_grad_()
        for leaf, act in ((x, jitact.get(name)(inplace=True)), (reference, jitact.get(name).Model(inplace=True))):
            hidden = leaf * 1
            act(view(hidden))
            (hidden * 3).sum().backward()
        torch.testing.assert_close(x.grad, reference.grad)


def test_one_bit_is_kept(device: str) -> None:
    """Bytes kept for backward: an eighth of a byte per element, and never more than PyTorch keeps."""
    n = 8000
    for name in PLAIN_IDS:
        module = jitact.get(name)
        if "bit" in module.activation.saves:
            kept = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.nbytes) or t, lambda t: t):
                module()(torch.randn(n, device=device, requires_grad=True))
            assert sum(kept) == n // 8, name
