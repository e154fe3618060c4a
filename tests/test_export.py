"""One activation as one file: its form, that it computes what the library does, that nvcc takes it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import jitact
from jitact import onefile, registry
from jitact.learned import LEARNED

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NAMES = sorted(set(jitact.names()) - {record.name for record, *_ in LEARNED})
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def builds(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What exported files compile goes beside the kernels that tests keep."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(request.config.cache.mkdir("exported")))


@pytest.fixture
def swoosh():
    jitact.define("swoosh", "x * sin(a * x)", a=2.0)
    yield "swoosh"
    registry.unregister("swoosh")


def load(name: str) -> dict:
    """Runs the text as KernelBench does: with no file."""
    space = {"__name__": "exported"}
    exec(jitact.export(name), space)
    return space


def compare(name: str, device: str, x: torch.Tensor, *args: float) -> None:
    """The file's module beside the library's: forward and gradient, equal but for the compiler's choice of fused operations."""
    space = load(name)
    a, b = (x.detach().to(device).requires_grad_() for _ in range(2))
    y, expected = space["ModelNew"](*args).to(device)(a), jitact.get(name)(*args)(b)
    assert y.stride() == expected.stride()
    dy = torch.randn(x.shape, device=device).to(x.dtype)
    y.backward(dy)
    expected.backward(dy)
    for ours, theirs in ((y, expected), (a.grad, b.grad)):
        torch.testing.assert_close(ours, theirs, rtol=4 * torch.finfo(x.dtype).eps, atol=1e-7)
    near = 1e-5 if x.dtype in (torch.float32, torch.float64) else 2e-2
    torch.testing.assert_close(space["Model"](*args)(x), y.detach().cpu(), rtol=near, atol=near)


@pytest.mark.parametrize("name", NAMES)
def test_form(name: str) -> None:
    text = jitact.export(name)
    assert not re.search("try|except|pass", text, re.IGNORECASE)
    assert "import jitact" not in text and "JITACT" not in text and "__file__" not in text
    assert max(map(len, text.splitlines())) <= 132 and len(text.splitlines()) < 650
    space = load(name)  # compiles nothing
    assert (space["batch_size"], space["dim"]) == (4096, 393216) and space["get_init_inputs"]() == []
    space["batch_size"], space["dim"] = 2, 3
    (x,) = space["get_inputs"]()
    assert x.shape == (2, 3) and space["Model"]()(x).shape == (2, 3)


@pytest.mark.parametrize("name", ["softsign", "sigmoid", "leaky_relu"])  # one for each thing that backward keeps
@pytest.mark.parametrize("dtype", DTYPES)
def test_computes_what_the_library_does(name: str, dtype: torch.dtype) -> None:
    compare(name, "cpu", (4 * torch.randn(33, 1001)).to(dtype), *([0.3] if name == "leaky_relu" else []))


def test_defined_activation(swoosh: str) -> None:
    compare(swoosh, "cpu", torch.randn(1001), 3.0)
    assert "return x * torch.sin(self.a * x)" in jitact.export(swoosh)


def test_helpers_and_constants_come_along(swoosh: str) -> None:
    jitact.define("swoosh", "max(x_minus_tanh(x), 0) * sqrt(2 / pi)")
    space = load(swoosh)
    x = torch.randn(100, dtype=torch.float64)
    torch.testing.assert_close(space["ModelNew"]()(x), space["Model"]()(x))


@pytest.mark.parametrize("make", [
    lambda: torch.randn(()), lambda: torch.randn(0, 3), lambda: torch.randn(4, 6, 5).transpose(0, 2),
    lambda: torch.randn(7, 9)[:, ::2], lambda: torch.randn(3, 1).expand(3, 4),
    lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
])  # fmt: skip
def test_layouts(make) -> None:
    compare("leaky_relu", "cpu", make())
    compare("softsign", "cpu", make())


@pytest.mark.parametrize("name", [record.name for record, *_ in LEARNED])
def test_activations_of_more_than_x(name: str) -> None:
    with pytest.raises(ValueError, match="tensors beside x"):
        jitact.export(name)


def test_refuses_what_it_cannot_run() -> None:
    module = load("softsign")["ModelNew"]()
    with pytest.raises(TypeError, match="softsign: expected a float32"):
        module(torch.arange(3))


def test_words_that_the_form_forbids(swoosh: str) -> None:
    jitact.define("retry", "x")
    with pytest.raises(ValueError, match="'try' may not occur"):
        jitact.export("retry")
    registry.unregister("retry")
    jitact.define("opaque", source="ELEMENTWISE T forward(T x) { T y = x; return y; }")
    with pytest.raises(ValueError, match="define it with reference="):
        jitact.export("opaque")
    jitact.define("opaque", source="ELEMENTWISE T forward(T x) { T y = x; return y; }", reference=lambda x: x * 1)
    assert "return x * 1" in jitact.export("opaque")
    registry.unregister("opaque")


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("name", ["gelu", "hardtanh", "tanh"])
def test_nvcc_takes_it(name: str, tmp_path: Path) -> None:
    space = load(name)
    (tmp_path / "kernel.cu").write_text(space["MATHS"] + space["GPU"])
    archs = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in (80, 90)]
    command = ["nvcc", "-O3", "-std=c++20", "-Werror=all-warnings", *archs, "-c", "kernel.cu", "-o", "kernel.o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "softsign.py"
    assert onefile.main(["export", "softsign", "-o", str(out)]) == 0
    assert out.read_text() == jitact.export("soft_sign")
    assert onefile.main(["export", "ReLU"]) == 0 and "class ModelNew" in capsys.readouterr().out
    assert onefile.main(["export", "sofsign"]) == 2 and "did you mean 'softsign'" in capsys.readouterr().err
    (tmp_path / "own.cu").write_text("ELEMENTWISE T forward(T x) { return x * x; }\n")
    assert onefile.main(["export", "own", "--from", str(tmp_path)]) == 0 and "x * x" in capsys.readouterr().out
    registry.unregister("own")


def test_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jitact.registry", "export", "softsign", "-o", "softsign.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "softsign.py").read_text() == jitact.export("softsign")


@GPU
@pytest.mark.parametrize("name", ["softsign", "sigmoid", "leaky_relu", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    for n in (1, 1023, 2**20 + 3):
        compare(name, "cuda", (4 * torch.randn(n)).to(dtype))
    shifted = (4 * torch.randn(2**20)).to(dtype).cuda()[1:]
    space = load(name)
    torch.testing.assert_close(space["ModelNew"]()(shifted), jitact.get(name)()(shifted))


@GPU
@pytest.mark.parametrize("name", ["softsign", "leaky_relu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_fast_as_the_library(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(2**28, device="cuda", dtype=dtype).requires_grad_()
    dy = torch.randn_like(x)
    modules = {"ours": jitact.get(name)(), "exported": load(name)["ModelNew"]()}
    times: dict[str, list[float]] = {key: [] for key in modules}
    for _ in range(12):
        for key, module in modules.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.autograd.grad(module(x), x, dy)
            end.record()
            end.synchronize()
            times[key].append(start.elapsed_time(end))
    ours, exported = (sorted(times[key])[len(times[key]) // 2] for key in ("ours", "exported"))
    assert exported <= 1.03 * ours, f"{exported:.3f} ms, the library {ours:.3f} ms"
