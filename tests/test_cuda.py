"""What only a GPU shows: streams, devices, graphs, sizes beyond 2^31."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import jitact

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

# Of x, 4000 x 5000, a bias of 5000 and a seed: what has kernels of its own.
FUNCTIONS = {
    "alone": lambda x, bias, seed: jitact.gelu(x),
    "transposed": lambda x, bias, seed: jitact.gelu(x.t()).t(),
    "strided": lambda x, bias, seed: jitact.glu(x[:, 1:-1]) + bias[:2499],
    "bias": lambda x, bias, seed: jitact.gelu(x, bias=bias),
    "all three": lambda x, bias, seed: jitact.silu(x, bias=bias, dropout=0.3, residual=x, seed=seed),
    "by plane": lambda x, bias, seed: jitact.relu(x.view(20, 5000, 200), bias=bias, channel_dim=1),
    "gated": lambda x, bias, seed: jitact.swiglu(x) + bias[:2500],
    "rows": lambda x, bias, seed: jitact.softmax(x, -1) + bias,
    "short rows": lambda x, bias, seed: jitact.softmax(x.view(-1, 125), -1).view(x.shape) + bias,
    "columns": lambda x, bias, seed: jitact.log_softmax(x, 0) + bias,
    "few columns": lambda x, bias, seed: jitact.softmax(x.view(2, -1, 8), 1).view(x.shape) + bias,
    "short columns": lambda x, bias, seed: jitact.softmax(x.view(-1, 10, 100), 1).view(x.shape) + bias,
}


def with_gradients(function: Callable[..., Tensor], x: Tensor, bias: Tensor, seed: Tensor) -> list[Tensor]:
    """The result, and the gradients of x and of the bias if it is used."""
    y = function(x, bias, seed)
    dy = torch.linspace(-1, 1, y.numel(), device=x.device, dtype=x.dtype).view(y.shape)
    return [y, *[each for each in torch.autograd.grad(y, (x, bias), dy, allow_unused=True) if each is not None]]


def test_the_current_stream_is_used() -> None:
    """A kernel on another stream must wait for that stream's work, not for the default one's."""
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 24, device="cuda")
    jitact.relu(x)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
        y = jitact.relu(x)
    stream.synchronize()
    assert (y == 3).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_the_tensors_device_is_used() -> None:
    """Also by kernels that are told for each device how much shared memory they may have; results are the same, to the bit."""
    x, bias, seed = torch.randn(4000, 5000), torch.randn(5000), torch.tensor([7])
    for name, function in FUNCTIONS.items():
        found = []
        for device in ("cuda:0", "cuda:1"):
            on = [each.to(device) for each in (x, bias, seed)]
            tensors = with_gradients(function, on[0].requires_grad_(), on[1].requires_grad_(), on[2])
            assert {each.device for each in tensors} == {on[0].device} and torch.cuda.current_device() == 0
            found.append([each.cpu() for each in tensors])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True)), name
    x = x.to("cuda:1")
    torch.testing.assert_close(jitact.gelu(x), torch.nn.functional.gelu(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_wait_for_those_before(name: str, dtype: torch.dtype) -> None:
    """They are launched early: what a matrix product writes is read after its end, and overwritten later."""
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(shape, device="cuda", dtype=dtype, generator=generator) for shape in ((4000, 512), (512, 5000)))
    bias, seed = torch.randn(5000, device="cuda", dtype=dtype).requires_grad_(), torch.tensor([7], device="cuda")
    x = torch.empty(4000, 5000, device="cuda", dtype=dtype, requires_grad=True)

    def run(between: Callable[[], None]) -> list[list[Tensor]]:
        found = []
        for factor in range(1, 6):
            torch.mm(a, b * (factor / 64), out=x.detach())
            between()
            found.append(with_gradients(FUNCTIONS[name], x, bias, seed))
            between()
        return found

    expected = run(torch.cuda.synchronize)
    for _ in range(3):
        for one, other in zip(run(lambda: None), expected, strict=True):
            assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_cuda_graphs_of_all_kernels(name: str) -> None:
    """Also at the begin of a graph, after the work of two streams, and after what is no kernel."""
    x = torch.randn(4000, 5000, device="cuda", requires_grad=True)
    bias, seed = torch.randn(5000, device="cuda", requires_grad=True), torch.tensor([7], device="cuda")
    side, other = torch.cuda.Stream(), torch.empty_like(x)

    def run() -> list[Tensor]:
        first = with_gradients(FUNCTIONS[name], x, bias, seed)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            of_side = with_gradients(FUNCTIONS[name], x, bias, seed)
        again = with_gradients(FUNCTIONS[name], x, bias, seed)
        torch.cuda.current_stream().wait_stream(side)
        joined = with_gradients(FUNCTIONS[name], x, bias, seed)
        other.copy_(x.detach())
        return [*first, *of_side, *again, *joined, *with_gradients(FUNCTIONS[name], other.requires_grad_(), bias, seed)]

    run()
    torch.cuda.synchronize()
    other = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    for _ in range(2):
        graph.replay()
    expected = with_gradients(FUNCTIONS[name], x, bias, seed)
    for k, each in enumerate(captured):
        assert torch.equal(each, expected[k % len(expected)]), k


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4096, 4096), (9000, 1000), (30000, 200)])
def test_copies_do_not_overtake_those_that_read(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Loops that sum copy ahead to memory that threads have just read; what the cache still has arrives soon."""
    x, dy = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    x.requires_grad_()
    bias = torch.zeros(shape[1], device="cuda", dtype=dtype, requires_grad=True)
    kept = torch.where(x.detach() > 0, dy, 0)
    expected, rtol = kept.double().sum(0), 2**-8 if dtype is torch.bfloat16 else 1e-5
    for save in ("bit", "input"):
        y, sums = jitact.relu(x, bias=bias, save=save), []
        for _ in range(5):
            dx, found = torch.autograd.grad(y, (x, bias), dy, retain_graph=True)
            assert torch.equal(dx, kept)
            sums.append(found)
        assert all(torch.equal(sums[0], other) for other in sums)
        torch.testing.assert_close(sums[0].double(), expected, rtol=rtol, atol=1e-3)


@pytest.mark.parametrize("name", ["relu", "gelu", "selu"])
def test_cuda_graphs(name: str) -> None:
    module, x = jitact.get(name)(), torch.randn(5000, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.autograd.grad(module(x).sum(), x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(y, module(x))
    torch.testing.assert_close(dx, torch.autograd.grad(module(x).sum(), x)[0])


def test_reduce_overhead() -> None:
    torch._dynamo.reset()
    module = jitact.get("relu")()
    compiled = torch.compile(lambda t: module(t) * 2, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        x = torch.randn(300, device="cuda", requires_grad=True)
        (dx,) = torch.autograd.grad(compiled(x).sum(), x)
        torch.testing.assert_close(dx, 2 * (x.detach() > 0).float())


def test_reduce_overhead_draws_anew() -> None:
    """Each replay of the graphs has random numbers of its own, and backward those of its forward."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: jitact.gelu(t, dropout=0.5) * 2, mode="reduce-overhead", fullgraph=True)
    dropped = []
    for _ in range(6):
        x = torch.ones(3000, device="cuda", requires_grad=True)
        torch.compiler.cudagraph_mark_step_begin()
        y = compiled(x)
        zeros = y.detach() == 0
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(zeros, dx == 0)
        assert 0.4 < zeros.float().mean() < 0.6
        dropped.append(zeros.cpu())
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(dropped, 2))


@pytest.mark.parametrize("name", ["relu", "softsign"])
def test_more_than_2_to_the_31_elements(name: str) -> None:
    n = 2**31 + 1000
    if torch.cuda.mem_get_info()[0] < 8 * n:
        pytest.skip("less than 16 GB of GPU memory is free")
    x = torch.zeros(n, device="cuda", dtype=torch.bfloat16)
    tail = torch.randn(2000, device="cuda", dtype=torch.bfloat16)
    x[-2000:] = tail
    x.requires_grad_()
    y = jitact.get(name)()(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones((), device="cuda", dtype=torch.bfloat16).expand(n))
    small = tail.clone().requires_grad_()
    expected = jitact.get(name)()(small)
    assert torch.equal(y[-2000:], expected)
    assert torch.equal(dx[-2000:], torch.autograd.grad(expected.sum(), small)[0])


@pytest.mark.parametrize("name", ["relu", "selu", "gelu", "softplus", "tanh"])
def test_cpu_and_gpu_agree(name: str) -> None:
    x = torch.randn(10_000)
    for save in jitact.get(name).activation.saves:
        module = jitact.get(name)(save=save)
        torch.testing.assert_close(module(x.cuda()).cpu(), module(x), rtol=1e-6, atol=1e-7)
