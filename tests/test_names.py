"""What denotes an activation, alike for get, check, plot and export; and unknown attributes of the package."""

from __future__ import annotations

import functools
import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from common import registered_as_before
from torch import nn

import jitact
from jitact import registry
from jitact.exporting.onefile import main
from jitact.kernels import KernelSource

ONE = {"device": "cpu", "dtype": "fp32"}  # for exported files of which the kernels do not matter: fewer take less time
pytestmark = pytest.mark.usefixtures("extracted_once")


class MyGELU(nn.GELU):
    """A subclass, which is not PyTorch's class."""


GIVEN = {
    "gelu": ["GELU", jitact.gelu, nn.GELU, nn.GELU(), nn.GELU("tanh"), F.gelu, jitact.get("gelu"), jitact.get("gelu")()],
    "relu": [jitact.relu, nn.ReLU, nn.ReLU(inplace=True), F.relu, torch.relu, torch.relu_, torch.Tensor.relu, F.relu_],
    "silu": ["swish", jitact.swish, F.silu, nn.SiLU],
    "sigmoid": [torch.sigmoid, torch.special.expit, F.sigmoid, nn.Sigmoid],
    "threshold": [F.threshold, nn.Threshold(0.5, 1.0), nn.Threshold],
    "prelu": [jitact.prelu, nn.PReLU, nn.PReLU(3), F.prelu],
    "rrelu": [jitact.rrelu, nn.RReLU, F.rrelu],
    "xielu": [jitact.xielu],
    "glu": [jitact.glu, nn.GLU, nn.GLU(0), F.glu],
    "relu2": [jitact.relu2],
}


def plain(value: object) -> str:
    """A test id that is the same in every process: without addresses."""
    return re.sub(r" at 0x\w+", "", repr(value))


@pytest.mark.parametrize(("name", "given"), [(name, each) for name in GIVEN for each in GIVEN[name]], ids=plain)
def test_get_takes_what_stands_for_an_activation(name: str, given) -> None:
    assert jitact.get(given) is jitact.get(name)


def test_get_takes_the_classes_of_transformers() -> None:
    activations = pytest.importorskip("transformers.activations")
    assert jitact.get(activations.NewGELUActivation) is jitact.get("gelu_tanh")
    assert jitact.get(activations.ACT2FN["gelu_10"]) is jitact.get("gelu_10")
    with pytest.raises(KeyError, match="ClippedGELUActivation"):
        jitact.get(activations.ClippedGELUActivation(-1, 1))


def test_tests_leave_the_registry_as_it_was() -> None:
    names, relu6 = list(jitact.REGISTRY), jitact.relu6
    with registered_as_before():
        jitact.define("swoosh", "x * sin(x)")
        jitact.define("my_rows", source=KernelSource.from_file("softmax").text)
        registry.unregister("relu6")
        assert jitact.swoosh and jitact.my_rows and not hasattr(jitact, "relu6")
    assert list(jitact.REGISTRY) == names and jitact.relu6 is relu6
    assert not hasattr(jitact, "swoosh") and not hasattr(jitact, "my_rows") and "my_rows" not in dir(jitact)


def test_what_was_defined_goes_on_standing_for_itself() -> None:
    old = jitact.define("swoosh", "x * sin(x)")
    function = jitact.swoosh
    new = jitact.define("swoosh", "x * cos(x)")
    for given, cls in ((old, old), (old(), old), (function, old), (new, new), (jitact.swoosh, new), ("swoosh", new)):
        assert jitact.get(given) is cls
    assert "torch.sin" in jitact.export(function, **ONE) and "torch.cos" in jitact.export(new, **ONE)


WRONG = [
    (None, TypeError, r"expected an activation, a name such as 'gelu', or a class, module or function.*; got None"),
    (3, TypeError, "got 3, of type int"),
    (["gelu"], TypeError, r"got \['gelu'\], of type list"),
    (b"gelu", TypeError, "of type bytes"),
    (int, TypeError, "got the class int"),
    (torch.float32, TypeError, "got torch.float32, of type dtype"),
    (torch.ones(2), TypeError, "got a float32 tensor"),
    (torch.exp, KeyError, "no activation for the function exp: expected a name"),
    (lambda x: x, KeyError, "the function <lambda>"),
    (functools.partial(F.gelu, approximate="tanh"), KeyError, "of type partial"),
    (nn.Identity(), KeyError, "it returns its input"),
    (nn.Linear(2, 2), KeyError, "Linear: it is none that jitact knows"),
    (MyGELU, KeyError, "is a subclass of GELU, whose forward may differ"),
    (MyGELU(), KeyError, "is a subclass of GELU, whose forward may differ"),
    (jitact.modules.ActivationModule, KeyError, "ActivationModule: it is none that jitact knows"),
    (nn.CELU(-1.0), ValueError, r"celu: needs alpha > 0, got alpha=-1.0"),
    ("", KeyError, "no activation named ''"),
    ("leaky relu", KeyError, "did you mean 'leaky_relu'"),
    ("torch.nn.GELU", KeyError, "did you mean 'gelu'"),
    ("gelü", KeyError, "did you mean 'gelu'"),
    ("identity", KeyError, "returns its input; use torch.nn.Identity"),
]


@pytest.mark.parametrize("caller", [jitact.get, jitact.check, jitact.export, jitact.plot], ids=lambda caller: caller.__name__)
@pytest.mark.parametrize(("given", "error", "message"), WRONG, ids=lambda value: plain(value)[:30])
def test_an_error_names_what_was_given(caller, given, error: type, message: str) -> None:
    if caller is jitact.plot:
        pytest.importorskip("matplotlib")
    with pytest.raises(error, match=message) as caught:
        caller(given)
    assert "\n" not in str(caught.value)


# The parameters of modules are used by check, plot and export.


def test_module_of_takes_over_settings_and_weights() -> None:
    theirs = nn.PReLU(3, 0.7)
    ours = registry.module_of(theirs)
    assert ours.weight is theirs.weight and repr(ours) == repr(theirs)
    assert repr(registry.module_of(nn.Hardtanh(-2, 3, True))) == "Hardtanh(min_val=-2, max_val=3, inplace=True)"
    own = jitact.get("elu")(0.5)
    assert registry.module_of(own) is own
    assert repr(registry.module_of(F.gelu)) == "GELU(approximate='none')"


@pytest.mark.parametrize("given", [jitact.softsign, nn.Softsign, nn.Softsign(), F.softsign])
def test_check_takes_them(given, capsys: pytest.CaptureFixture) -> None:
    assert jitact.check(given, dtypes=[torch.bfloat16])
    assert capsys.readouterr().out.startswith("softsign: x / (1 + |x|)\n")


def test_check_is_of_the_settings(capsys: pytest.CaptureFixture) -> None:
    assert jitact.check(nn.LeakyReLU(0.3), dtypes=[torch.bfloat16])
    assert capsys.readouterr().out.startswith("leaky_relu(negative_slope=0.3): ")


def exported(activation) -> dict:
    space: dict = {}
    exec(jitact.export(activation, **ONE), space)
    return space


@pytest.mark.parametrize("given", [nn.LeakyReLU(0.3), jitact.get("leaky_relu")(0.3)])
def test_export_is_of_the_settings(given) -> None:
    space = exported(given)
    assert space["ModelNew"]().negative_slope == 0.3
    assert torch.equal(space["Model"]()(torch.tensor([-1.0])), torch.tensor([-0.3]))


def test_export_keeps_what_the_module_keeps() -> None:
    assert "ctx.save_for_backward(y)" in jitact.export("tanh", **ONE)
    text = jitact.export(jitact.get("tanh")(save="input"), **ONE)
    assert "ctx.save_for_backward(x)" in text and 'run("backward_from_output"' not in text


def test_export_of_a_variant() -> None:
    tanh, plain = (jitact.export(name, **ONE) for name in ("gelu_tanh", "gelu"))
    assert tanh != plain and jitact.export(nn.GELU("tanh"), **ONE) == tanh
    assert jitact.export(nn.GELU, **ONE) == jitact.export(nn.GELU(), **ONE) == plain


def test_export_of_numbers_without_a_literal() -> None:
    assert exported(nn.Threshold(0, -float("inf")))["ModelNew"]().value == -float("inf")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (nn.ReLU(inplace=True), r"relu cannot be exported with inplace=True.*; got ReLU\(inplace=True\)"),
        (jitact.get("silu")(fast_math=True), "silu cannot be exported with fast_math=True"),
        (nn.PReLU(3), r"prelu is exported as a class.*got the module PReLU\(num_parameters=3\)"),
        (nn.RReLU(0.2, 0.4), "rrelu is exported as a class"),
        (jitact.get("gelu")(bias=8, dropout=0.1), r"gelu with bias or dropout is exported by name, as 'gelu\+bias\+dropout'"),
    ],
)
def test_export_refuses_what_a_file_does_not_have(given: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jitact.export(given)


def test_export_where_it_cannot_be_printed(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path) -> None:
    jitact.define("swoosh", "x * sin(x)", formula="x · sin(x)")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    command = ["export", "swoosh", "--device", "cpu", "--dtype", "fp32"]
    assert main(command) == 2
    assert "can't encode character" in capsys.readouterr().err
    assert main([*command, "-o", str(tmp_path / "swoosh.py")]) == 0
    assert "x · sin(x)" in (tmp_path / "swoosh.py").read_text(encoding="utf-8")


def test_plot_leaves_no_figure_open_where_it_fails() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    with pytest.raises(KeyError):
        jitact.plot("relu", "no_such")
    assert pyplot.get_fignums() == before


# Attributes of the package.


def test_functions_have_all_names_that_are_not_classes() -> None:
    assert jitact.swish is jitact.silu and jitact.hard_silu is jitact.hardswish and jitact.soft_sign is jitact.softsign
    assert not hasattr(jitact, "ReLU") and not hasattr(jitact, "Swish")


SUGGESTIONS = {
    "ReLU": "; did you mean jitact.relu, the function, or jitact.get('ReLU'), the class?",
    "LeakyReLU": "; did you mean jitact.leaky_relu, the function, or jitact.get('LeakyReLU'), the class?",
    "rellu": "; did you mean relu or rrelu or relu6?",
    "repalce": "; did you mean replace?",
    "Chek": "; did you mean check?",
    "chek": "; did you mean check?",
    "_relu": "",
    "__wrapped__": "",
}


@pytest.mark.parametrize("name", SUGGESTIONS)
def test_suggestions(name: str) -> None:
    with pytest.raises(AttributeError) as error:
        getattr(jitact, name)
    assert str(error.value) == f"module 'jitact' has no attribute {name!r}{SUGGESTIONS[name]}" and error.value.name == name
    assert not hasattr(jitact, name) and getattr(jitact, name, None) is None


def test_a_suggestion_comes_once() -> None:
    done = subprocess.run([sys.executable, "-c", "import jitact; jitact.repalce"], capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1].endswith("no attribute 'repalce'; did you mean replace?")


def test_completion_shows_what_is_meant_to_be_used() -> None:
    shown = [name for name in dir(jitact) if not name.startswith("_")]
    assert shown == sorted({*jitact.__all__, *jitact.names()})
    assert all(hasattr(jitact, name) for name in dir(jitact))


def test_star_and_submodule_imports() -> None:
    space: dict = {}
    exec("from jitact import *\nfrom jitact import gelu, swish, accuracy, kernels\nimport jitact.bench", space)
    assert space["swish"] is jitact.silu and space["replace"] is jitact.replace
    assert space["accuracy"].__name__ == "jitact.accuracy"
    with pytest.raises(ImportError, match="repalce"):
        exec("from jitact import repalce")


def test_the_registry_has_canonical_names() -> None:
    assert "swish" not in jitact.REGISTRY and "silu" in jitact.REGISTRY and None not in jitact.REGISTRY
    with pytest.raises(KeyError) as error:
        jitact.REGISTRY["swish"]
    assert str(error.value) == "REGISTRY has canonical names, 'silu' for 'swish'; get() takes every name"
    with pytest.raises(KeyError, match="no activation named 'slu': did you mean 'silu'"):
        jitact.REGISTRY["slu"]


def test_functions_are_attributes_until_a_name_gets_another_meaning() -> None:
    """A look through all names takes half as long as a small kernel. What a program has put in their place stays."""
    with registered_as_before():
        for change in (
            lambda: jitact.define("swoosh", "x * sin(x)"),
            lambda: jitact.define("my_rows", source=KernelSource.from_file("softmax").text),
            lambda: registry.unregister("swoosh"),
        ):
            silu, swish = jitact.silu, jitact.swish
            assert vars(jitact)["silu"] is vars(jitact)["swish"] is silu is swish
            change()
            assert not {"silu", "swish"} & vars(jitact).keys() and jitact.silu is silu
        jitact.define("swoosh", "x * sin(x)")
        first, gelu = jitact.swoosh, jitact.gelu
        with mock.patch("jitact.gelu", first), mock.patch("jitact.swoosh"):
            jitact.define("swoosh", "x * cos(x)")
            assert jitact.gelu is first
        assert jitact.gelu is gelu and jitact.swoosh is jitact.swoosh is not first
        registry.unregister("swoosh")
        assert "gelu" not in vars(jitact) and not hasattr(jitact, "swoosh")


# In new processes.

FORKS = """
import sys
import torch, torch._dynamo, torch._functorch.aot_autograd, jitact
from building import in_child
for line in sys.stdin:
    try:
        in_child(lambda: exec(eval(line), {"__name__": "__main__"}))
    except AssertionError:
        print("wrong", flush=True)
    else:
        print("right", flush=True)
"""


@pytest.fixture(scope="module")
def runs() -> Iterator[Callable[[str], bool]]:
    """``runs(code)``: whether a program runs without errors in a process that has imported jitact, and done nothing else."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", FORKS], stdin=pipe, stdout=pipe, text=True) as process:

        def runs(code: str) -> bool:
            process.stdin.write(f"{code!r}\n")
            process.stdin.flush()
            return process.stdout.readline().strip() == "right"

        yield runs
        process.stdin.close()


def test_a_program_that_fails_is_noticed(runs: Callable[[str], bool]) -> None:
    assert runs("import jitact; jitact.silu") and not runs("import jitact; jitact.repalce") and not runs("raise SystemExit(0)")


def test_a_name_that_is_taken_out_and_given_again(runs: Callable[[str], bool]) -> None:
    """Earlier lookups are not cached. In a process of its own, as it changes the order of the library's names."""
    code = (
        "import jitact; from jitact import registry; before = jitact.relu6; registry.unregister('relu6')\n"
        "assert not hasattr(jitact, 'relu6') and not hasattr(jitact, 'library')\n"
        "jitact.define('relu6', 'x * 100')\n"
        "assert jitact.relu6 is jitact.get('relu6').activation.function is not before"
    )
    assert runs(code)


def test_a_package_that_is_no_longer_imported(runs: Callable[[str], bool]) -> None:
    """As where a program imports it within mock.patch.dict(sys.modules)."""
    code = "import sys, jitact; del sys.modules['jitact']; assert jitact.silu is jitact.swish"
    assert runs(code)


@pytest.mark.parametrize("call", ["jitact.gelu(x, 'tanh')", "make(approximate='tanh')(x)"])
def test_a_variant_is_first_called_inside_torch_compile(call: str, runs: Callable[[str], bool]) -> None:
    """In a new process: a first look at a record may take a lock, which torch.compile does not trace."""
    code = (
        "import torch, jitact; make = jitact.get('gelu')\n"
        f"f = torch.compile(lambda x: {call}, backend='aot_eager', fullgraph=True)\n"
        "x = torch.randn(8); torch.testing.assert_close(f(x), torch.nn.functional.gelu(x, approximate='tanh'))"
    )
    assert runs(code)


def test_a_class_is_first_constructed_inside_torch_compile(runs: Callable[[str], bool]) -> None:
    """In a new process, as later constructions find everything already made."""
    code = (
        "import torch, jitact; make = jitact.get('leaky_relu')\n"
        "f = torch.compile(lambda x: make(0.3)(x), backend='eager', fullgraph=True)\n"
        "assert f(-torch.ones(2)).tolist() == (-0.3 * torch.ones(2)).tolist()"
    )
    assert runs(code)
