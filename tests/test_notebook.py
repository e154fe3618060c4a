"""IPython: the cell magic, completion, the display of classes; and the tour notebook, executed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import jitact
from jitact.magics import describe, describe_html

pytestmark = pytest.mark.slow
TOUR = Path(__file__).parents[1] / "notebooks" / "tour.ipynb"


@pytest.fixture(scope="module")
def shell():
    pytest.importorskip("IPython")
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "jitact")
    yield shell
    InteractiveShell.clear_instance()


def run(shell, cell: str):
    return shell.run_cell(cell, silent=False)


def test_magic_takes_an_expression(shell, capsys: pytest.CaptureFixture) -> None:
    done = run(shell, "%%activation swoosh --check\nx * sin(x)\nbackward: dy * (sin(x) + x * cos(x))\n")
    assert done.success and shell.user_ns["Swoosh"] is jitact.get("swoosh") is done.result
    assert "backward" in done.result.activation.functions
    assert " pass" in capsys.readouterr().out
    done = run(shell, "%%activation snake2 a=1.5\nx + pow(sin(a * x), 2) / a\n")
    assert done.result.activation.params == (("a", 1.5),)


def test_magic_takes_expressions_of_several_lines(shell) -> None:
    done = run(shell, "%%activation swoosh b=2\nx > 0 ?\nx\n: x > -1 ?\nb : sin(x)\n\n backward :\n  b\n  * dy\n")
    x = torch.tensor([3.0, -0.5, -2.0], requires_grad=True)
    y = done.result()(x)
    assert torch.allclose(y, torch.tensor([3.0, 2.0, -0.9092974]))
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [2.0] * 3


def test_the_magic_tells_what_it_takes(shell) -> None:
    text = shell.find_cell_magic("activation").__doc__
    assert "%%activation NAME [PARAMETER=DEFAULT ...] [--check]" in text and "backward_from_output:" in text
    assert "%%activation snake2 a=1.0 --check" in text


def test_magic_takes_a_kernel_file(shell) -> None:
    done = run(shell, "%%activation soft a=1\nELEMENTWISE T forward(T x, T a) {\n  return x / (1 + a * abs(x));\n}\n")
    x = torch.randn(5)
    torch.testing.assert_close(done.result()(x), x / (1 + x.abs()))


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("%%activation swoosh\nx * sine(x)\n", "did you mean sin or sinh?\n    x * sine(x)\n        ^^^^"),
        ("%%activation swoosh\nELEMENTWISE T forward(T x) {\n  return x * sine(x);\n}\n", "<swoosh>:2:"),
        ("%%activation\nx\n", "%%activation NAME"),
        ("%%activation swoosh now\nx\n", "not 'now'"),
        ("%%activation swoosh a=much\na * x\n", "'much'"),
        ("%%activation swoosh a=q\na * x\n", "swoosh: the default of a must be a number, got 'q'"),
        ("%%activation swoosh a=1 a=2\na * x\n", "swoosh: the parameter a is there twice"),
        ("%%activation swoosh name=1\nname * x\n", "swoosh: a parameter cannot be called 'name': it is an argument of define"),
        (
            "%%activation swoosh\nx * x\nbakward: 2 * x * dy\n",
            "there is no 'bakward', only 'backward:' and 'backward_from_output:'",
        ),
        ("%%activation swoosh\nx\nbackward: dy\nbackward: 2 * dy\n", "swoosh: 'backward:' is there twice"),
        ("%%activation swoosh\nx\nbackward: 2\n", "swoosh, backward: does not use dy"),
    ],
)
def test_mistakes_are_told_without_a_traceback(shell, cell: str, message: str, capsys: pytest.CaptureFixture) -> None:
    done = run(shell, cell)
    told = capsys.readouterr().err
    assert not done.success and message in told and "Traceback" not in told


def test_a_cell_that_fails_leaves_what_was_defined(shell) -> None:
    kept = run(shell, "%%activation kept\nx * x\n").result
    for name in ("kept", "never"):
        assert not run(shell, f"%%activation {name}\nELEMENTWISE T forward(T x) {{ return absolute(x); }}\n").success
    assert jitact.get("kept") is kept and jitact.kept(torch.full((2,), 3.0)).tolist() == [9.0, 9.0]
    with pytest.raises(KeyError, match="never"):
        jitact.get("never")


def test_define_shows_the_expression_alone(shell, capsys: pytest.CaptureFixture) -> None:
    run(shell, "import jitact\njitact.define('swoosh', 'x * sine(x)')")
    captured = capsys.readouterr()
    told = captured.out + captured.err
    assert "ExpressionError: swoosh, forward: unknown function 'sine'" in told and "Traceback" not in told


def test_completion(shell) -> None:
    run(shell, "import jitact")
    for line in ('jitact.get("so', "jitact.plot('gelu', 'so", "%%activation so", "jitact.export('so"):
        assert "softsign" in shell.complete(None, line, len(line))[1], line
    assert "softsign" not in shell.complete(None, 'print("so', 9)[1]
    assert "softsign" in dir(jitact) and "define" in dir(jitact)


def test_classes_show_themselves(shell) -> None:
    formats, _ = shell.display_formatter.format(jitact.get("softplus"))
    assert formats["text/plain"] == describe(jitact.get("softplus")) and formats["text/html"].startswith("<div")
    formats, _ = shell.display_formatter.format([jitact.get("softplus"), int])
    assert formats["text/plain"].endswith("int]") and "text/html" not in formats
    assert shell.display_formatter.format(int)[0] == {"text/plain": "int"}


@pytest.mark.parametrize("name", jitact.names())
def test_describe(name: str) -> None:
    text, html = describe(jitact.get(name)), describe_html(jitact.get(name))
    assert text.startswith(f"{jitact.get(name).activation.title}: {name}(x) = ") and "backward keeps: " in text
    assert "<svg" in html and html.count("<polyline") == 4 and "nan" not in html


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "softmin"])
def test_rows_show_themselves(shell, name: str) -> None:
    """They depend on more than one element, so that they have no curve."""
    formats, _ = shell.display_formatter.format(jitact.get(name))
    assert formats["text/plain"].startswith(f"{jitact.get(name).__name__}: {jitact.get(name).activation.formula}\n")
    assert "backward keeps: the output (default) or the input" in formats["text/plain"] and "bf16" in formats["text/plain"]
    assert formats["text/html"].startswith("<div") and "<svg" not in formats["text/html"]


def test_worst_errors_come_from_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jitact import magics

    errors = {"forward": {"ulp": 0.5}, "gradient": {"ulp": 0.75}}
    rows = [{"name": "relu", "dtype": "bf16", "save": "bit", "fast_math": False, "ours": errors}]
    monkeypatch.setattr(magics, "_rows", lambda: rows)
    assert "worst error, forward / gradient: bf16 0.50 / 0.75 ulp" in describe(jitact.get("relu"))


def test_the_tour_runs() -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(TOUR, as_version=4)
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert outputs and all(cell.get("execution_count") for cell in notebook.cells if cell.cell_type == "code"), (
        "committed unrun"
    )
    folder = {"metadata": {"path": str(TOUR.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=folder).execute()
