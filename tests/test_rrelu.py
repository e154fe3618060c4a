"""rrelu: the distribution of its random slopes, their dependence on the seed, and their reproduction in backward."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from common import DTYPES
from test_compiled import DEVICE, compile_text
from test_learned import gradients
from torch import Tensor

import jitact
from jitact import rrelu
from jitact.configs import load
from jitact.kernels.loader.plan import CPU_LEVELS
from jitact.measuring.limits import DRAWN

RReLU = jitact.get("rrelu")


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_philox_gives_the_known_answer(tmp_path: Path) -> None:
    """From Random123's kat_vectors, for philox4x32 with 10 rounds: the counter is digits of pi, the key the one used here."""
    text = """
        #include "random.cuh"
        constexpr auto r = jitact::philox<10>(0x85a308d3243f6a88u, 0x0370734413198a2eu, 0);
        static_assert(r.w[0] == 0xd16cfe09 && r.w[1] == 0x94fdcceb && r.w[2] == 0x5001e420 && r.w[3] == 0x24126ea1);
    """
    compile_text(text, tmp_path, ["c++", "-x", "c++", "-std=c++20", "-fsyntax-only", f"-I{DEVICE}"])


LEVELS = {"DEFAULT": 0, "AVX2": 1, "AVX512": 2}


@pytest.mark.parametrize("level", LEVELS)
def test_a_cpu_makes_the_same_numbers_by_any_instructions(level: str, tmp_path: Path) -> None:
    if LEVELS[level] > LEVELS.get(torch.backends.cpu.get_cpu_capability(), 0):
        pytest.skip(f"this processor has no {level}")
    text = """
        #include "random_cpu.h"
        int main() {
          const uint64_t seeds[] = {0, 1, 0x123456789abcdef0, ~0ull >> 1};
          const uint64_t places[] = {0, 8, 0xfffffff8, 0x1fffffff8, 1ull << 58};
          const uint32_t streams[] = {0, 1, 15};
          for (uint64_t seed : seeds)
            for (uint64_t place : places)
              for (uint32_t stream : streams) {
                uint64_t words[64];
                jitact::loops::fill_philox(words, place, seed, stream, 32);
                for (int i = 0; i < 32; i++) {
                  const jitact::Random16 expected = jitact::philox(place + i, seed, stream);
                  if (std::memcmp(words + 2 * i, &expected, 16)) return 1;
                }
              }
        }
    """
    command = ["c++", "-x", "c++", "-std=c++20", "-O2", *CPU_LEVELS[level], f"-I{DEVICE}", "-o", "program"]
    compile_text(text, tmp_path, command)
    subprocess.run([tmp_path / "program"], check=True)


def slopes(x: Tensor, seed: int = 0, **options: object) -> Tensor:
    """The slopes that x is multiplied by, from backward."""
    torch.manual_seed(seed)
    return gradients(lambda x: rrelu(x, training=True, **options), torch.ones_like(x), x)[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rrelu_slopes_are_uniform_and_independent(dtype: torch.dtype, device: str) -> None:
    n = 1 << 18
    r = slopes(torch.full((n,), -1.0, device=device, dtype=dtype)).double().cpu()
    lower, upper = 1 / 8, 1 / 3
    slack = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11 if dtype is torch.float16 else 1e-7
    assert r.min() >= lower - slack and r.max() <= upper + slack and r.max() - r.min() > 0.99 * (upper - lower)
    u = (r - lower) / (upper - lower)
    sigma = 1 / math.sqrt(12 * n)
    assert abs(u.mean() - 0.5) < 5 * sigma + slack
    assert abs(u.var() * 12 - 1) < 5 * math.sqrt(0.8 / n) + slack
    bins = torch.histc(u, 7, 0, 1) / n  # coarser than bfloat16
    assert (bins - 1 / 7).abs().max() < 0.006 if dtype is torch.bfloat16 else 5 * math.sqrt(6 / 49 / n) + slack
    for lag in (1, 2, 3, 4, 7, 8, 16, 1024, 2048):
        assert abs(torch.corrcoef(torch.stack([u[lag:], u[:-lag]]))[0, 1]) < 5 / math.sqrt(n), lag
    other = slopes(torch.full((n,), -1.0, device=device, dtype=dtype), seed=1).double().cpu()
    assert abs(torch.corrcoef(torch.stack([u, other]))[0, 1]) < 5 / math.sqrt(n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rrelu_backward_has_the_slopes_of_forward(dtype: torch.dtype, device: str) -> None:
    for n in (1, 5, 1000, 4099):
        x, dy = torch.randn(2, n, device=device).to(dtype)
        y, dx = gradients(lambda x: rrelu(x, training=True), dy, x)
        torch.manual_seed(0)
        r = slopes(torch.full_like(x, -1))
        torch.manual_seed(0)
        y, dx = gradients(lambda x: rrelu(x, training=True), dy, x)
        torch.testing.assert_close(y, torch.where(x > 0, x, r * x), rtol=DRAWN[dtype], atol=0)
        torch.testing.assert_close(dx, torch.where(x > 0, dy, r * dy), rtol=DRAWN[dtype], atol=0)
        torch.manual_seed(0)
        assert torch.equal(rrelu(x, training=True), y), "with nothing recorded"


def test_rrelu_follows_the_generator_and_the_order_of_memory() -> None:
    x = torch.full((6, 5, 4, 7), -1.0)
    assert torch.equal(slopes(x), slopes(x)) and not torch.equal(slopes(x), slopes(x, seed=1))
    torch.manual_seed(0)
    assert not torch.equal(rrelu(x, training=True), rrelu(x, training=True)), "each call draws anew"
    last = x.to(memory_format=torch.channels_last)
    assert torch.equal(slopes(last).permute(0, 2, 3, 1).flatten(), slopes(x).flatten())
    assert torch.equal(slopes(x[:3]).flatten(), slopes(x).flatten()[: x[:3].numel()])
    assert torch.equal(slopes(x, lower=0.2, upper=0.2), torch.full_like(x, 0.2))
    half, brain = slopes(x.half()).double(), slopes(x.bfloat16()).double()
    assert (half - brain).abs().max() <= 2.0**-9, "the same 16 bits, rounded differently"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_rrelu_is_the_same_on_cpu_and_gpu() -> None:
    library = getattr(torch.ops.jitact, f"{load('rrelu', False)}_forward").default
    seed = torch.tensor([1234567890123456789])
    for dtype in DTYPES:
        x = torch.randn(10_001).to(dtype)
        assert torch.equal(library(x.cuda(), seed.cuda(), 0.1, 0.3).cpu(), library(x, seed, 0.1, 0.3)), dtype


def test_rrelu_in_evaluation_is_leaky_relu(device: str) -> None:
    module, theirs = RReLU(0.1, 0.5).eval(), torch.nn.RReLU(0.1, 0.5).eval()
    x, dy = torch.randn(2, 1000, device=device)
    for ours, expected in zip(gradients(module, dy, x), gradients(theirs, dy, x), strict=True):
        torch.testing.assert_close(ours, expected)
    assert torch.equal(module(x), jitact.leaky_relu(x, 0.3))
    traced = torch.fx.symbolic_trace(lambda x, training: rrelu(x, training=training))
    assert torch.equal(traced(x, False), rrelu(x))
    with pytest.raises(TypeError, match=r"^rrelu: training must be True or False, got 'yes'$"):
        rrelu(x, training="yes")


@pytest.mark.parametrize("training", [True, False])
def test_rrelu_in_place(training: bool, device: str) -> None:
    for gaps in (False, True) if training else (False,):
        x = torch.randn(20, 30, device=device, requires_grad=True)
        torch.manual_seed(0)
        expected, expected_dx = gradients(lambda x: rrelu(x, training=training), torch.ones_like(x), x)
        for record in (False, True):
            hidden = torch.zeros(40, 60, device=device)[::2, ::2] if gaps else torch.zeros(20, 30, device=device)
            torch.manual_seed(0)
            with torch.set_grad_enabled(record):
                hidden.copy_(x)
                address = hidden.data_ptr()
                assert rrelu(hidden, training=training, inplace=True) is hidden and hidden.data_ptr() == address
            assert torch.equal(hidden, expected)
            if record:
                torch.testing.assert_close(torch.autograd.grad(hidden.sum(), x)[0], expected_dx)
    if training:
        x = torch.randn(4, 6, device=device, requires_grad=True)
        y = rrelu((x * 1).view(-1), training=True, inplace=True)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0] * x, y.view_as(x))
    leaf = torch.randn(5, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"relu: a leaf|a leaf Variable"):
        rrelu(leaf, training=training, inplace=True)
