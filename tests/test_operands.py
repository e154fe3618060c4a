"""The operands of the loops: several elements, channels, rows, numbers and random numbers, for each operator."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from common import DTYPES
from emulated import emulate
from torch import Tensor

import jitact
from jitact import kernels
from jitact.compiling.formulas import Formula, Unreadable
from jitact.kernels import KernelSource
from jitact.kernels.loader.signature import read_signature

# The gate is scaled, up is not; all gradients are derived.
TWO = """
#include "elementwise.cuh"
ELEMENTWISE T forward(T gate, T up, Channel<T> scale, Row<T> weight, Channel<T> shift, Number<T> a) {
  return gate * scale * (up + a * shift) * weight;
}
"""
# A sum for the gate alone: operands after the last one with a gradient have none.
GATED = """
#include "elementwise.cuh"
ELEMENTWISE T forward(T gate, T up) { return gate * sigmoid(gate) * up; }
ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up) {
  const T s = sigmoid(gate);
  return {dy * up * s * (1 + gate * (1 - s)), dy * gate * s};
}
"""
# Two operations, each rounded in an unfused build, and their gradients by autograd.
CHAIN = """
#include "elementwise.cuh"
#include "rounded.cuh"
ELEMENTWISE T forward(T a, T b) { return rounded(rounded(a * b) + b) * a; }
ELEMENTWISE Many<T, 2> backward(T dy, T a, T b) {
  const T by_sum = rounded(dy * a);
  return {rounded(dy * rounded(rounded(a * b) + b)) + rounded(by_sum * b), by_sum + rounded(by_sum * a)};
}
"""
DRAWS = """
#include "elementwise.cuh"
ELEMENTWISE T forward(T x, Random<T> u, Random<T> v, Number<T> which) {
  return x * (which == 0 ? u.between(0, 1) : v.between(0, 1));
}
"""


def operators(name: str, text: str, unfused: bool = False):
    """The operators of a kernel file, keyed by kind."""
    library = kernels.load(KernelSource(f"operators_{name}", text, f"<{name}>", unfused=unfused)).name
    return lambda kind: getattr(torch.ops.jitact, f"{library}_{kind}").default


@pytest.fixture(scope="module")
def two():
    return operators("two", TWO)


@pytest.fixture(scope="module")
def gated():
    return operators("gated", GATED)


def two_in_torch(gate: Tensor, up: Tensor, scale: Tensor, weight: Tensor, shift: Tensor, a: float) -> Tensor:
    return gate * scale * (up + a * shift) * weight


def tolerances(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 4 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}


# Sizes of x, of scale and of shift: a value for each index of a dimension, or one for all.
CUTS = {
    "last dimension": ((6, 70, 40), (40,), (40,)),
    "two dimensions": ((6, 70, 40), (70, 1), (40,)),
    "one for all beside channels": ((6, 70, 40), (1,), (70, 1)),
    "one for all": ((6, 70, 40), (1,), (1,)),
    "long planes": ((2, 5, 3000), (5, 1), (1,)),
    "long planes and columns": ((3, 4, 1100), (4, 1), (1100,)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", CUTS)
def test_gradients_of_all_operands(two, cut: str, dtype: torch.dtype, device: str) -> None:
    shape, scale_shape, shift_shape = CUTS[cut]
    shapes = {"gate": shape, "up": shape, "scale": scale_shape, "weight": (*shape[:-1], 1), "shift": shift_shape}
    given = [(torch.rand(sizes) + 0.5).to(device, dtype) for sizes in shapes.values()]
    y = two("forward")(*given, 0.5)
    exact = [t.double().requires_grad_() for t in given]
    expected = two_in_torch(*exact, 0.5)
    torch.testing.assert_close(y.double(), expected.detach(), **tolerances(dtype))
    dy = torch.randn(shape).to(device, dtype)
    gradients = torch.autograd.grad(expected, exact, dy.double())
    magnitudes = torch.autograd.grad(two_in_torch(*exact, 0.5), exact, dy.double().abs())
    for wanted in (0b11111, 0b00011, 0b00100, 0b10001, 0b01000):
        found = two("backward")(dy, *given, 0.5, wanted)
        for g, (own, gradient, magnitude) in enumerate(zip(found, gradients, magnitudes, strict=True)):
            if not wanted >> g & 1:
                assert own.numel() == 0
                continue
            share, info = 2.0**-48 if dtype is torch.float64 else max(2.0**-20, torch.finfo(dtype).eps), torch.finfo(dtype)
            bound = share * magnitude + info.tiny * info.eps  # the spacing of subnormal numbers
            assert own.shape == gradient.shape and ((own.double() - gradient).abs() <= bound).all(), (g, wanted)
    first, again = (two("backward")(dy, *given, 0.5, 0b11111) for _ in range(2))
    assert all(map(torch.equal, first, again)), "the same bits"


HALVES = {
    "halves": lambda t: t.chunk(2, -1),
    "odd halves": lambda t: (t[..., :33], t[..., 33:66]),
    "every second row": lambda t: (t[::2, ..., :32], t[1::2, ..., :32]),
    "halves of channels": lambda t: t.chunk(2, 1),
    "one half, one dense": lambda t: (t[..., :34], t[..., 34:].contiguous()),
    "one repeated along rows": lambda t: (t[..., :34], t[..., :1].expand(*t.shape[:-1], 34)),
    "one row for all": lambda t: (t[..., :34], t[0, 0, 34:].expand(*t.shape[:-1], 34)),
    "permuted": lambda t: t.permute(2, 0, 1).chunk(2, 0),
    "interleaved": lambda t: (t[..., ::2], t[..., 1::2]),
    "interleaved, swapped": lambda t: (t[..., 1::2], t[..., ::2]),
    "interleaved in odd rows": lambda t: (t[..., 1:67:2], t[..., 2:67:2]),
    "one interleaved, one dense": lambda t: (t[..., ::2], t[..., 34:].contiguous()),
    "interleaved with others": lambda t: (t[..., :66:2], t[..., 2::2]),
    "from an odd element on": lambda t: (t.flatten()[1:6001], t.flatten()[7002:13002]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("halves", HALVES)
def test_elements_are_read_where_they_are(gated, halves: str, dtype: torch.dtype, device: str) -> None:
    gate, up = HALVES[halves](torch.randn(64, 6, 68).to(device, dtype))
    dense = gate.contiguous(), up.contiguous()
    y = gated("forward")(gate, up)
    assert y.stride() == torch.empty_like(gate).stride() and torch.equal(y, gated("forward")(*dense))
    for dy in (torch.randn(y.shape).to(device, dtype), torch.ones((), device=device, dtype=dtype).expand(y.shape)):
        expected = gated("backward")(dy.contiguous(), *dense, 0b11)
        for wanted in (0b11, 0b01, 0b10):
            found = gated("backward")(dy, gate, up, wanted)
            for g, own in enumerate(found):
                assert torch.equal(own, expected[g]) if wanted >> g & 1 else own.numel() == 0


def pack(first: Tensor, second: Tensor, layout: int, dim: int) -> Tensor:
    """A single tensor of both, in the layout of backward_packed."""
    both = (second, first) if layout & 2 else (first, second)
    dim %= first.dim()
    return torch.stack(both, dim + 1).flatten(dim, dim + 1) if layout & 1 else torch.cat(both, dim)


def take_apart(x: Tensor, layout: int, dim: int) -> tuple[Tensor, Tensor]:
    """Views of the two halves."""
    size = x.shape[dim] // 2
    rows = x.movedim(dim, -1)
    first, second = (rows[..., ::2], rows[..., 1::2]) if layout & 1 else (rows[..., :size], rows[..., size:])
    first, second = first.movedim(-1, dim), second.movedim(-1, dim)
    return (second, first) if layout & 2 else (first, second)


# Shapes, and permutations of the dimensions in memory.
PACKED = {
    "rows of vectors": ((5, 3, 64), None),
    "odd rows": ((5, 7, 33), None),
    "permuted": ((4, 32, 6, 2), (0, 2, 3, 1)),
    "one element": ((1,), None),
    "none": ((3, 0), None),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", PACKED)
def test_two_gradients_in_one_tensor(gated, case: str, dtype: torch.dtype, device: str) -> None:
    shape, permuted = PACKED[case]
    gate, up, dy = (torch.randn(shape).to(device, dtype) for _ in range(3))
    if permuted is not None:
        gate, up, dy = (t.permute(permuted).contiguous().permute([permuted.index(i) for i in range(4)]) for t in (gate, up, dy))
    apart = gated("backward")(dy, gate, up, 0b11)
    for layout, dim in itertools.product(range(4), {0, -1, -2 % len(shape)}):
        expected = pack(*apart, layout, dim)
        for operands in ((gate, up), take_apart(pack(gate, up, layout, dim), layout, dim)):
            found = gated("backward_packed")(dy, *operands, layout, dim)
            assert torch.equal(found, expected), (layout, dim)
            fake = gated("backward_packed")(*(t.to("meta") for t in (dy, *operands)), layout, dim)
            order = [torch.empty_like(t, device="meta").stride() for t in (found, fake)]
            assert fake.shape == found.shape and (order[0] == order[1] or found.numel() == 0)


def test_channels_that_begin_off_16_bytes(device: str) -> None:
    """Vectors of them cannot be loaded: on a GPU that is an error, after which nothing works."""
    for dtype in DTYPES:
        x, dy = torch.randn(2, 5, 4096, device=device).to(dtype)
        apart = torch.randn(4097, device=device).to(dtype)[1:]
        found, expected = [], []
        for results, bias in ((found, apart), (expected, apart.clone())):
            leaves = [x.clone().requires_grad_(), bias.detach().requires_grad_()]
            y = jitact.gelu(leaves[0], bias=leaves[1])
            results += [y.detach(), *torch.autograd.grad(y, leaves, dy)]
        torch.testing.assert_close(found, expected)


def gradients_in_one_tensor_beside_sums(two, dtype: torch.dtype, device: str) -> Iterator[tuple[tuple, list[Tensor]]]:
    """Calls and their results. Sums run over strided and interleaved rows as over dense memory, to the same bits."""
    shape = (6, 70, 36)
    x, dy = torch.rand(*shape[:-1], 72).to(device, dtype) + 0.5, torch.randn(shape).to(device, dtype)
    others = [(torch.rand(sizes) + 0.5).to(device, dtype) for sizes in ((36,), (6, 70, 1), (70, 1))]
    for layout in range(4):
        gate, up = take_apart(x, layout, -1)
        by_gate, by_up, *sums = two("backward")(dy, gate.contiguous(), up.contiguous(), *others, 0.5, 0b11111)
        for wanted in (0b111, 0b010, 0):
            call = (dy, gate, up, *others, 0.5, wanted, layout, -1)
            both, *found = two("backward_packed")(*call)
            assert torch.equal(both, pack(by_gate, by_up, layout, -1)), (layout, wanted)
            for k, (own, expected) in enumerate(zip(found, sums, strict=True)):
                assert torch.equal(own, expected) if wanted >> k & 1 else own.numel() == 0
            yield call, [both, *found]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_gradients_in_one_tensor_beside_sums(two, dtype: torch.dtype, device: str) -> None:
    for call, found in gradients_in_one_tensor_beside_sums(two, dtype, device):
        fakes = two("backward_packed")(*(each.to("meta") if isinstance(each, Tensor) else each for each in call))
        assert [fake.shape for fake in fakes] == [t.shape for t in found]


@pytest.mark.slow
def test_gpu_loops_sum_beside_two_gradients_in_one_tensor(tmp_path: Path) -> None:
    emulate(KernelSource("operators_two", TWO, "<two>"), "emulated_two", tmp_path)
    two = lambda kind: getattr(torch.ops.jitact, f"emulated_two_{kind}")  # noqa: E731
    for dtype in DTYPES:
        assert len([*gradients_in_one_tensor_beside_sums(two, dtype, "cpu")]) == 12


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unfused_is_what_eager_gives(dtype: torch.dtype, device: str) -> None:
    """For all values of 16-bit types; any NaN equals any NaN."""
    unfused = operators("chain", CHAIN, unfused=True)
    if dtype.itemsize == 2:
        a = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).to(device).repeat(4)
        b = a[torch.randperm(a.numel(), generator=torch.Generator().manual_seed(0)).to(device)]
    else:
        a, b = torch.randn(2, 2**18).to(device, dtype)
    dy = torch.randn(a.shape).to(device, dtype)
    tensors = [t.clone().requires_grad_() for t in (a, b)]
    y = (tensors[0] * tensors[1] + tensors[1]) * tensors[0]
    expected = (y.detach(), *torch.autograd.grad(y, tensors, dy))
    found = (unfused("forward")(a, b), *unfused("backward")(dy, a, b, 0b11))
    for own, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(own, eager, rtol=0, atol=0, equal_nan=True)


def test_unfused_stays_whole_in_graphs() -> None:
    """Inductor's fusion of its formula would round only once."""
    text = GATED.split("ELEMENTWISE Many")[0]
    assert Formula(KernelSource("once", text, "<once>"), False)
    with pytest.raises(Unreadable, match="rounds on the way"):
        Formula(KernelSource("once", text, "<once>", unfused=True), False)


def test_halves_are_not_copied(gated, device: str) -> None:
    gate, up = torch.randn(400, 600, device=device).chunk(2, -1)
    gated("forward")(gate, up)
    with torch.profiler.profile(profile_memory=True) as profile:
        gated("forward")(gate, up)
    usage = [max(e.cpu_memory_usage, getattr(e, "device_memory_usage", 0)) for e in profile.events()]
    assert max(usage) <= gate.numel() * 4 + 512 and not any("copy" in e.name or "clone" in e.name for e in profile.events())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_operands_are_streams_of_their_own(dtype: torch.dtype, device: str) -> None:
    forward, n = operators("draws", DRAWS)("forward"), 1 << 16
    x, seed = torch.ones(n, device=device, dtype=dtype), torch.tensor([7], device=device)
    u, v = (forward(x, seed, float(which)).double().cpu() for which in (0, 1))
    assert torch.equal(u, forward(x, seed, 0.0).double().cpu())
    for numbers, other in itertools.permutations((u, v)):
        correlation = torch.corrcoef(torch.stack([numbers, other]))[0, 1]
        assert abs(numbers.mean() - 0.5) < 0.01 and abs(correlation) < 0.02


def test_what_operators_refuse(two, gated) -> None:
    x, one = torch.ones(4, 6), torch.ones(1)
    for operands, why in (
        ((x, x, torch.ones(5), one, one), "broadcast to the sizes of x"),
        ((x, x, torch.ones(1, 4, 6), one, one), "more dimensions than x"),
        ((x, x, one.double(), one, one), "neither x.s nor, beside 16 bits, float32"),
        ((torch.ones(2, 3, 4), torch.ones(2, 3, 4), torch.ones(2, 1, 4), one, one), "side by side"),
    ):
        with pytest.raises(RuntimeError, match=why):
            two("forward")(*operands, 1.0)
    no_dim = "dim is no dimension"
    for layout, dim, why in ((4, 0, "layout must be from 0 to 3"), (0, 2, no_dim), (0, -3, no_dim)):
        with pytest.raises(RuntimeError, match=why):
            gated("backward_packed")(x, x, x, layout, dim)
    for up, why in ((torch.ones(4, 5), "shape"), (x.double(), "dtype")):
        with pytest.raises(RuntimeError, match=f"differ in {why}"):
            gated("forward")(x, up)


BITS = """ELEMENTWISE T forward(T x, Channel<T> b) { return x + b < 0 ? 0 : x + b; }
ELEMENTWISE bool keeps(T x, Channel<T> b) { return !(x + b <= 0); }
ELEMENTWISE Many<T, 2> backward_from_bit(T dy, bool positive"""


def test_files_with_several_gradients_from_a_bit(device: str) -> None:
    text = f"{BITS}, Channel<T>) {{ return {{positive ? dy : 0, positive ? dy : 0}}; }}"
    assert read_signature(text).gradients == read_signature(text).bit_gradients == 2
    defined = jitact.define("biased_relu", source=f'#include "elementwise.cuh"\n{text}')
    x, b, dy = torch.randn(7, 5, device=device), torch.randn(5, device=device), torch.randn(7, 5, device=device)
    x.requires_grad_(), b.requires_grad_()
    for save in (None, "input"):  # its gradients can be computed from the bit too
        for function in (jitact.biased_relu, torch.compile(jitact.biased_relu, backend="aot_eager")):
            found = torch.autograd.grad(function(x, b, save=save), [x, b], dy)
            torch.testing.assert_close(found, torch.autograd.grad((x + b).relu(), [x, b], dy))
    assert defined.activation.saves == ("bit", "input") and defined.activation.layout.from_bit == (0, 1)


def test_the_signature() -> None:
    two = read_signature(TWO)
    assert two.of("element") == ("gate", "up") and two.of("channel", "row") == ("scale", "weight", "shift")
    assert two.of("number") == ("a",) and two.gradients == 5 and two.saves == ("input",)
    assert read_signature(GATED).gradients == 2
    unmarked = "ELEMENTWISE T forward(T x, T a) { return x * a; }\n"
    assert read_signature(unmarked, ("a",)).of("number") == ("a",) and read_signature(unmarked).of("element") == ("x", "a")
    for text, why in (
        ("ELEMENTWISE T backward(T dy, T x) { return dy; }", "defines no function"),
        ("ELEMENTWISE T forward(Number<T> a) { return a; }", "line 1: the first argument of forward must be a T"),
        ("ELEMENTWISE T forward(T x, Number<T> a) { return x; }\nELEMENTWISE T backward(T dy, T x, T a) { return dy; }",
         r"line 2: backward must take \(T ..., T x, Number<T> a\)"),
        ("ELEMENTWISE T forward(T x) { return x; }\nELEMENTWISE Many<T, 2> backward(T dy, T x) { return {dy, dy}; }",
         "line 2: backward returns 2 gradients, of 1"),
        ("ELEMENTWISE T forward(T x, Chanel<T> w) { return x; }", "line 1: forward must be declared as"),
        (f"{BITS}, Channel<T> b) {{ return {{dy, dy, dy}}; }}".replace("Many<T, 2>", "Many<T, 3>"),
         "line 3: backward returns 3 gradients, of 2"),
        (f"{BITS}, Channel<T> b) {{ return {{dy, dy}}; }}\nELEMENTWISE T backward(T dy, T x, Channel<T> b) {{ return dy; }}",
         "line 3: backward_from_bit returns 2 gradients; it can return 1, as backward does"),
        (f"{BITS}) {{ return {{dy, dy}}; }}".replace("Channel<T> b", "T b"),
         "line 3: backward_from_bit returns 2 gradients; it can return one, as the next operand is an element"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            read_signature(text)


def test_x_times_sigmoid_of_a_factor() -> None:
    """The function, its slope, a literal factor; derivatives by both arguments, compiled and in graphs."""
    terms = "x_times_sigmoid(x, a) + x_times_sigmoid_slope(x, a) + x_times_sigmoid(x, 1.5)"
    function = jitact.define("swished", source=f"ELEMENTWISE T forward(T x, T a) {{ return {terms}; }}")
    x, a = torch.linspace(-30, 30, 99, dtype=torch.float64), torch.linspace(0.1, 3, 99, dtype=torch.float64).flip(0)

    def exact(x: Tensor, a: Tensor) -> Tensor:
        s = torch.sigmoid(a * x)
        return x * s + s * (1 + a * x * (1 - s)) + x * torch.sigmoid(1.5 * x)

    compiled = torch.compile(jitact.swished, backend="aot_eager")
    for dtype, called in itertools.product((torch.float64, torch.float32), (function(), compiled)):
        given = [t.to(dtype).requires_grad_() for t in (x, a)]
        wide = [t.detach().double().requires_grad_() for t in given]
        y, wanted = called(*given), exact(*wide)
        own, slopes = torch.autograd.grad(y.sum(), given), torch.autograd.grad(wanted.sum(), wide)
        for found, expected in zip((y, *own), (wanted, *slopes), strict=True):
            torch.testing.assert_close(found, expected.to(dtype))
