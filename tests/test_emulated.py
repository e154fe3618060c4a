"""The library's GPU loops, emulated, against its CPU loops: strided rows, halves, sums and random numbers."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from emulated import HERE, device_headers, emulate
from torch import Tensor

import jitact
from jitact import registry
from jitact.configs import load
from jitact.definitions.define import unregistered
from jitact.kernels.loader.signature import Signature, read_signature
from jitact.measuring import operand_cases

SHAPES = [(3, 33), (40, 41), (17, 64), (2, 3, 8), (1, 1), (1, 7), (5, 1), (3, 2056), (1500, 8)]
"""The last but one is longer than a block; the last has many rows, of which threads have several."""
LAYOUTS = {
    "dense": lambda *sizes: torch.randn(sizes),
    "off 16 bytes": lambda *sizes: torch.randn(torch.Size(sizes).numel() + 1)[1:].view(sizes),
    "first half": lambda *sizes: torch.randn(*sizes[:-1], 2 * sizes[-1])[..., : sizes[-1]],
    "second half": lambda *sizes: torch.randn(*sizes[:-1], 2 * sizes[-1])[..., sizes[-1] :],
    "rows apart": lambda *sizes: torch.randn(*sizes[:-1], sizes[-1] + 8)[..., : sizes[-1]],
    "every second": lambda *sizes: torch.randn(*sizes[:-1], 2 * sizes[-1])[..., ::2],
    "one row for all": lambda *sizes: torch.randn(sizes[-1]).expand(sizes),
    "one value a row": lambda *sizes: torch.randn(*sizes[:-1], 1).expand(sizes),
}
SINGLES = {"xielu+bias": (0.5, 0.5, 1000.0, 0.5), "dyt": (0.5,), "mixed": (0.5,)}
"""Values of single-valued operands for which no slope crosses 0."""
DYT = operand_cases.FORMULAS["dyt"]
MIXED = (
    "tanh(s * x * x) * abs(w) + tanh(abs(c) * x * x)",  # no terms that cancel: functions of 16 bits round differently
    {"w": jitact.Channel(), "c": jitact.Channel(), "s": jitact.Channel(init=0.5, one=True)},
)
FIRST = ("dense", "off 16 bytes", "first half", "every second")
GRADIENTS = ("dense", "rows apart", "one row for all")


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype, with the same strides: ``to`` would make some dense."""
    base = tensor if tensor._base is None else tensor._base
    shift = tensor.storage_offset()
    return base.to(dtype).as_strided(tensor.shape, tensor.stride(), shift)


def close(found: object, expected: object, n: int, what: object) -> None:
    """Compares results: equal layouts and mask bits, and values equal but for contraction and the order of sums."""
    pairs = zip(*[each if isinstance(each, (tuple, list)) else [each] for each in (found, expected)], strict=True)
    for k, (a, b) in enumerate(pairs):
        assert (a.shape, a.stride()) == (b.shape, b.stride()), (what, k)
        if a.dtype is torch.uint8:
            assert torch.equal(a, b), (what, k)
            continue
        eps = torch.finfo(a.dtype).eps
        atol = 2 * eps * n**0.5 if k > 0 else 1e-6
        rtol = max(4 * eps, 2.0**-20) if k > 0 else 4 * eps  # sums of terms of one sign: the documented tolerance
        torch.testing.assert_close(a, b, rtol=rtol, atol=max(atol, 1e-6), msg=lambda text, k=k: f"{what}, {k}: {text}")


def calls(signature: Signature, elements: list[Tensor], others: list[object], dy: Tensor) -> Iterator[tuple[str, tuple]]:
    """The operators of an activation, with their arguments."""
    yield "forward", (*elements, *others)
    if signature.gradients == 1:
        yield "backward", (dy, *elements, *others)
    else:
        every, alone = (1 << signature.gradients) - 1, [1 << k for k in range(signature.gradients)]
        for wanted in {every, *alone, *(every ^ one for one in alone)}:
            yield "backward", (dy, *elements, *others, wanted)
    if signature.packs:
        sums = [1] * (signature.gradients > 2)
        yield from (("backward_packed", (dy, *elements, *others, *sums, layout, -1)) for layout in range(4))


def channels_of(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes of one channel operand: a value for each index of the last dimension, for each plane, and a single value."""
    return [(sizes[-1],), (*sizes[:-1], 1)[-2:], (1,)]


@pytest.mark.parametrize("name", [
    "gelu+bias+dropout+residual",  # sums with random numbers, and a residual of another layout
    "relu+bias+dropout+residual",  # mask bits with random numbers, and sums of the gradients from them
    "swiglu",  # gradients in one tensor
    "swiglu+row_weight",  # sums over rows
    "xielu+bias",  # channel values together with prepared operands
    "gated_prelu",  # gradients in one tensor, and sums over rows
    "dyt",  # operands of a single value that no prepare takes, and sums for several operands
    "mixed",  # several operands of different shapes, whose values gradients read
])  # fmt: skip
@pytest.mark.slow
def test_gpu_loops_compute_what_those_of_the_cpu_do(name: str, tmp_path: Path) -> None:
    made = {
        "gated_prelu": lambda: jitact.gated("prelu"),
        "dyt": lambda: unregistered("dyt", DYT[0], **DYT[1]),
        "mixed": lambda: unregistered("mixed", MIXED[0], **MIXED[1]),
    }
    record = made[name]().activation if name in made else registry.record_named(name)
    signature, tag = record.source.signature, f"emulated_{record.source.name}"
    emulate(record.source, tag, tmp_path)
    library = load(record.token, False)
    run = lambda of, kind, *args: getattr(torch.ops.jitact, f"{of}_{kind}")(*args)  # noqa: E731
    torch.manual_seed(0)
    narrow = (*SHAPES[1:3], *SHAPES[-2:])
    sizes_of_dtypes = [*((torch.float32, sizes) for sizes in SHAPES), *((torch.bfloat16, sizes) for sizes in narrow)]
    layouts = [*itertools.product(FIRST[:2], LAYOUTS), *((each, each) for each in FIRST[2:])]
    for (dtype, sizes), (k, (first, second)) in itertools.product(sizes_of_dtypes, enumerate(layouts)):
        make = partial(in_dtype, dtype=dtype)
        elements = [make(LAYOUTS[first](*sizes)), *(make(LAYOUTS[second](*sizes)) for _ in signature.of("element")[1:])]
        changed = SINGLES.get(name, ())
        shapes = channels_of(sizes) if changed else [(sizes[-1],)]
        count = len(signature.of("channel")) - len(changed)
        of_channels = torch.float32 if name == "mixed" and k % 2 else dtype
        others: list[object] = [torch.randn(shapes[(k + b) % len(shapes)]).to(of_channels) for b in range(count)]
        others += [torch.full((1,), value, dtype=dtype) for value in changed]
        others += [torch.randn(*sizes[:-1], 1).to(dtype) for _ in signature.of("row")]
        others += [torch.tensor([12345])] * bool(signature.of("random")) + [0.3] * len(signature.of("number"))
        gradient = GRADIENTS[k % len(GRADIENTS)]
        n, what = elements[0].numel(), (dtype, sizes, first, second, gradient)
        dy = make(LAYOUTS[gradient](*sizes))
        if changed:  # gradients contain x squared: with terms of one sign, sums hardly depend on their order
            (dy if dy._base is None else dy._base).abs_()
        for kind, args in calls(signature, elements, others, dy):
            close(run(tag, kind, *args), run(library, kind, *args), n, (kind, *what))
        if "bit" in signature.saves:
            found, expected = (run(of, "forward_bit", *elements, *others) for of in (tag, library))
            close(found, expected, n, ("forward_bit", *what))
            dy = torch.empty_like(expected[0]).copy_(torch.randn(sizes))
            if signature.bit_gradients == 1:
                given = (dy, expected[1], *others)
                close(run(tag, "backward_from_bit", *given), run(library, "backward_from_bit", *given), n, ("from bit", *what))
                continue
            for shape, wanted in itertools.product(channels_of(sizes), (1, 2, 3)):
                given = (dy, expected[1], torch.randn(shape).to(dtype), *others[1:], wanted)
                found, its = (run(of, "backward_from_bit", *given) for of in (tag, library))
                close(found, its, n, ("from bit", shape, wanted, *what))


@pytest.mark.parametrize(("tag", "old", "new"), [
    ("emulated_folds", "kSumsPerBlock = 8192", "kSumsPerBlock = 64"),  # more sums than one fold adds up
    ("emulated_tiles", "kLarge = 1 << 23, kWave = 1 << 17", "kLarge = 1 << 16, kWave = 1 << 11"),  # tiles of many rows
])  # fmt: skip
def test_sums_of_large_tensors(tag: str, old: str, new: str, tmp_path: Path) -> None:
    """As those of tensors of gigabytes are: here, with other bounds."""
    record = unregistered("dyt", DYT[0], **DYT[1]).activation
    emulate(record.source, tag, tmp_path, old, new)
    library = load(record.token, False)
    torch.manual_seed(0)
    alpha = torch.full((1,), 0.5)
    of_sizes = {(19, 8, 4610): [(8, 1), (4610,), (1,)], (2200, 33): [(33,)], (900, 96): [(96,)]}
    many_values = {(3, 9001): [(9001,)], (9000, 3): [(9000, 1)], (9000, 4): [(9000, 1)], (1100, 31): [(1100, 1)]}
    many_tiles = {(8192, 33): [(33,)]}  # of few values: their fold begins before they have ended
    of_16_bits = {(18, 896): [(896,)]}  # nine sums for each column of a tile: a thread loads eight at once
    cases = [(torch.float32, *case) for case in (of_sizes | many_values | many_tiles).items()]
    cases += [(torch.bfloat16, *case) for case in of_16_bits.items()]
    for dtype, sizes, shapes in cases:
        x, dy = torch.randn(sizes, dtype=dtype), torch.rand(sizes, dtype=dtype)
        for shape in shapes:
            given = (dy, x, torch.rand(shape, dtype=dtype), torch.randn(shape, dtype=dtype), alpha.to(dtype), 15)
            found, expected = (getattr(torch.ops.jitact, f"{of}_backward")(*given) for of in (tag, library))
            close(found, expected, x.numel(), (sizes, shape))


@pytest.mark.parametrize("name", ["silu+bias", "relu+bias", "dyt"])
def test_planes(name: str, tmp_path: Path) -> None:
    """The values and sums of planes of one to many threads, of whole vectors or not, and of operands of a single value.

    And values along a last dimension of odd length, which lie beside vectors; values of float32 beside 16 bits.
    """
    record = unregistered("dyt", DYT[0], **DYT[1]).activation if name == "dyt" else registry.record_named(name)
    tag, library = f"planes_{record.source.name}", load(record.token, False)
    emulate(record.source, tag, tmp_path)
    torch.manual_seed(0)
    whole = ((2, 3, 132), (5, 2, 1024), (1, 3, 4100), (1, 30, 8), (2, 2, 20000))
    others = ((2, 3, 130), (2, 3, 35), (1, 30, 13), (2, 2, 1999), (130, 3, 49), (3, 70, 33), (5, 1021), (3, 40000))
    of_16_bits = ((2, 3, 264), (2, 2, 9000), (2, 3, 196), (2, 300, 9), (129, 2, 50))
    of_64_bits, along_the_last = ((3, 400, 3), (2, 5, 999)), ((5, 2057), (4, 4099), (3, 2048), (3, 700, 3), (2, 1500, 2))
    sizes_of_dtypes = [(torch.float32, sizes) for sizes in (*whole, *others, *along_the_last, (300, 128), (7,), (1, 1))]
    sizes_of_dtypes += [(torch.bfloat16, sizes) for sizes in (*of_16_bits, *along_the_last)]
    sizes_of_dtypes += [(torch.float64, sizes) for sizes in (*of_64_bits, (3, 1301))]
    for (dtype, sizes), layout in itertools.product(sizes_of_dtypes, ("dense", "off 16 bytes")):
        x, dy = (in_dtype(LAYOUTS[layout](*sizes), dtype) for _ in range(2))
        x, dy = x.abs_(), dy.abs_()
        shapes = [(sizes[-2], 1)] if len(sizes) > 1 else []
        shapes += [(sizes[-1],)] if sizes in (*along_the_last, (3, 1301)) else []
        for shape in (*shapes, (1,)):
            is_wide = dtype is torch.bfloat16 and (len(sizes) > 2) == (layout == "dense")
            value = in_dtype(LAYOUTS[layout](*shape).abs_(), torch.float32 if is_wide else dtype)
            operands = [value] if name != "dyt" else [value, value, torch.full((1,), 0.5, dtype=dtype)]
            every = 2 ** (1 + len(operands)) - 1
            runs = [("forward", (x, *operands)), *(("backward", (dy, x, *operands, wanted)) for wanted in (1, every))]
            if name == "relu+bias":
                kept = getattr(torch.ops.jitact, f"{library}_forward_bit")(x, *operands)[1]
                runs += [("forward_bit", (x, *operands)), ("backward_from_bit", (dy, kept, *operands, every))]
            for kind, given in runs:
                found, expected = (getattr(torch.ops.jitact, f"{of}_{kind}")(*given) for of in (tag, library))
                close(found, expected, x.numel(), (kind, dtype, sizes, layout, shape))


DIVISIONS = """
#include "memory_cuda.cuh"
#include <cstdio>
#include <cstdlib>
using jitact::loops::Divisor;
void check(bool right, int64_t n, int64_t d) {
  if (!right) std::printf("%lld / %lld\\n", (long long)n, (long long)d), std::exit(1);
}
int main() {
  const int64_t most = int64_t(1) << 62, small = int64_t(1) << 31;
  std::mt19937_64 random;
  for (int shift = 0; shift <= 62; shift++) {
    const int64_t power = int64_t(1) << shift;
    for (int64_t d : {power - 1, power, power + 1, int64_t(power + random() % power)}) {
      if (d < 1 || d > most) continue;
      const Divisor by(d);
      for (int64_t q : {int64_t(0), int64_t(1), int64_t(random() % ((INT64_MAX - d) / d + 1)), (INT64_MAX - d) / d})
        for (int64_t n : {q * d - 1, q * d, q * d + d / 2, int64_t(random() >> 1), int64_t(random() % small), INT64_MAX}) {
          if (n < 0) continue;
          check(by.divide(n) == n / d, n, d);
          if (n < small && d <= small) check(by.divide_small(uint32_t(n)) == n / d, n, d);
          if (d > 1 || n == 0) check(by.divide_by_many(n) == n / d, n, d);
          if (n < small && d <= small && (d > 1 || n == 0)) check(by.divide_small_by_many(uint32_t(n)) == n / d, n, d);
        }
    }
  }
}
"""


def test_divisions_by_a_constant(tmp_path: Path) -> None:
    """By 1 too: a shift by a negative number is undefined."""
    device_headers(tmp_path)
    (tmp_path / "main.cpp").write_text(f'#define __CUDACC__\n#include "{HERE}/emulated_cuda.h"\n{DIVISIONS}')
    command = ["g++", "-std=c++20", "-O1", "-w", "-fsanitize=undefined", "-fno-sanitize-recover=all", "main.cpp"]
    subprocess.run([*command, "-o", "divisions"], cwd=tmp_path, check=True)
    found = subprocess.run([tmp_path / "divisions"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_gradients_are_not_packed_beside_random_numbers() -> None:
    text = "ELEMENTWISE T forward(T x, T z, Channel<T> w{}) {{ return x * z * w; }}"
    packs = [read_signature(text.format(more), ()).packs for more in ("", ", Random<T> u")]
    assert packs == [True, False]  # with random operands, sums need dense memory
