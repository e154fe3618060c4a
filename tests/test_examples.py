"""The examples run, and type checkers find nothing in them, but find what is wrong."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import jitact

CHECKOUT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, CHECKOUT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_training(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert example("train_hugging_face").main(["--steps", "3"]) < 5.5  # log(256) at the start
    assert "SiLUActivation() -> jitact SwiGLU with the product" in capsys.readouterr().out


def test_submission(exported_builds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(exported_builds))
    file = tmp_path / "softsign.py"
    assert example("kernelbench_submission").main(["softsign", "-o", str(file)])
    assert file.read_text(encoding="utf-8") == jitact.export("softsign")


def test_fused_activation() -> None:
    assert example("fused_activation").main((32, 64))


WRONG = {
    "jitact.reluu(x)": 'Module has no attribute "reluu"',
    "jitact.leaky_relu(x, negative_slop=0.1)": 'Unexpected keyword argument "negative_slop" for "leaky_relu"',
    'jitact.gelu(x, approximate="tan")': 'Argument "approximate" to "gelu" has incompatible type',
    'jitact.silu(x, save="bit")': 'Argument "save" to "silu" has incompatible type',
    'reveal_type(jitact.get("gelu"))': "ActivationModule]",
    "reveal_type(jitact.names())": '"list[str]"',
}


def test_types(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    folder = tmp_path / "jitact"  # as a checkout may not be called
    folder.mkdir()
    for path in CHECKOUT.iterdir():
        if path.name != "__pycache__" and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    (folder / "wrong.py").write_text("\n".join(["import torch", "import jitact", "x = torch.ones(2)", *WRONG]))
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "wrong.py", "examples"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    said = done.stdout.splitlines()
    for line, (code, message) in enumerate(WRONG.items(), 4):
        assert any(text.startswith(f"wrong.py:{line}: ") and message in text for text in said), (
            code,
            done.stdout + done.stderr,
        )
    assert all(text.startswith("wrong.py:") for text in said[:-1]), done.stdout
