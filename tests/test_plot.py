"""Plots: what is drawn, and the error without matplotlib."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

import jitact

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")


def lines(ax) -> dict[str, torch.Tensor]:
    return {line.get_label(): torch.as_tensor(line.get_ydata()) for line in ax.lines}


def test_functions_and_gradients() -> None:
    figure = jitact.plot("softsign", jitact.get("leaky_relu"), jitact.get("leaky_relu")(0.5), low=-2, high=2)
    forward, gradient = figure.axes
    assert list(lines(forward)) == ["softsign", "leaky_relu", "leaky_relu(negative_slope=0.5)"]
    x = torch.linspace(-2, 2, 801, dtype=torch.float64)
    torch.testing.assert_close(lines(forward)["softsign"], x / (1 + x.abs()))
    torch.testing.assert_close(lines(gradient)["softsign"], 1 / (1 + x.abs()) ** 2)
    assert forward.get_legend() and forward.get_xlim() == (-2, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_errors(dtype: torch.dtype, tmp_path) -> None:
    figure = jitact.plot("softsign", error=True, dtype=dtype)
    assert len(figure.axes) == 4
    for ax in figure.axes[2:]:
        theirs, ours, half = (torch.as_tensor(line.get_ydata()) for line in ax.lines[:3])
        assert theirs.shape == ours.shape == (120,) and (half == 0.5).all()
        assert 0.3 < ours.nan_to_num().max() <= (0.51 if dtype is torch.bfloat16 else 4)
        assert ax.get_yscale() == "log"
    figure.savefig(tmp_path / "softsign.png", dpi=50)
    assert (tmp_path / "softsign.png").stat().st_size > 5000


def test_learned_and_arguments() -> None:
    assert jitact.plot("prelu", error=True)
    with pytest.raises(ValueError, match="at least one"):
        jitact.plot()
    with pytest.raises(KeyError, match="did you mean 'gelu'"):
        jitact.plot("gelo")


def test_a_step_has_a_gradient_of_0() -> None:
    forward, gradient = jitact.plot(jitact.define("swoosh", "x > 0"), error=True).axes[:2]
    assert set(lines(forward)["swoosh"].tolist()) == {0, 1} and not lines(gradient)["swoosh"].any()


def test_what_stands_for_an_activation() -> None:
    forward, _ = jitact.plot(jitact.softsign, torch.nn.Softsign, torch.nn.LeakyReLU(0.3), torch.nn.GELU("tanh"), F.relu).axes
    labels = ["softsign", "softsign", "leaky_relu(negative_slope=0.3)", "gelu(approximate='tanh')", "relu"]
    assert [line.get_label() for line in forward.lines] == labels
    x = torch.linspace(-6, 6, 801, dtype=torch.float64)
    for line, y in zip(forward.lines[2:4], (F.leaky_relu(x, 0.3), F.gelu(x, approximate="tanh")), strict=True):
        torch.testing.assert_close(torch.as_tensor(line.get_ydata()), y)


@pytest.mark.parametrize("options", [{"low": 1, "high": 1}, {"high": float("inf")}, {"low": float("nan")}])
def test_a_range_that_is_none(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"low < high, both finite; got low="):
        jitact.plot("relu", **options)


@pytest.mark.parametrize(
    ("options", "message"), [({"low": "a"}, "low must be a number"), ({"error": "yes"}, "error must be True")]
)
def test_an_option_of_another_type(options: dict[str, str], message: str) -> None:
    with pytest.raises(TypeError, match=f"plot: {message}.*, got '"):
        jitact.plot("relu", **options)


def test_a_dtype_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"plot\(\) measures errors in .*torch.bfloat16; got dtype=torch.int32"):
        jitact.plot("relu", error=True, dtype=torch.int32)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'jitact\[plot\]'"):
        jitact.plot("relu")
