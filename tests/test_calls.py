"""Finding the functions that a module's forward calls in its source, for every way to write a call."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.functional import gelu as imported

from jitact.replacing.calls import Call, calls

KNOWN = {
    F.relu: "relu", F.gelu: "gelu", torch.tanh: "tanh", Tensor.tanh: "tanh", torch.sigmoid: "sigmoid",
    Tensor.sigmoid: "sigmoid", F.silu: "silu",
}  # fmt: skip


def found(cls: type[nn.Module]) -> set[str]:
    """The calls, as text."""
    return {f"{call.name} in {call.where}" if call.where else call.name for call in calls(cls(), KNOWN, Tensor, "torch")}


class Base(nn.Module):
    """Base of the objects with a forward that the tests define."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.sigmoid = nn.ReLU(), nn.Identity()
        self.weight = nn.Parameter(torch.ones(1))
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.helper = free
        self.lambda_ = lambda x: torch.sigmoid(x)
        self.partial = functools.partial(free, scale=2)
        self.gelu, self.silu = F.gelu, F.silu
        self.register_buffer("scale", torch.ones(1))


def free(x: Tensor, scale: int = 1) -> Tensor:
    return torch.tanh(x) * scale


def deep(x: Tensor) -> Tensor:
    return free(x)


def apart(x: Tensor) -> Tensor:
    return x.helper(x)


def recursive(x: Tensor) -> Tensor:
    return recursive(torch.relu(x)) if x.sum() > 0 else F.silu(x)


def decorated(forward):
    @functools.wraps(forward)
    def wrapper(self, x: Tensor) -> Tensor:
        return F.silu(forward(self, x))

    return wrapper


def decorated_plainly(forward):
    def wrapper(*args):
        return forward(*args)

    return wrapper


TABLE = {"silu": F.silu}
CONSTANT = torch.ones(1)
module = ModuleType("made")
module.act = F.silu


class Functions(Base):
    """Functions of packages, by every name."""

    def forward(self, x):
        return F.relu(functional.gelu(torch.tanh(nn.functional.silu(x))))


class Imported(Base):
    """Functions imported under other names."""

    def forward(self, x):
        return imported(x, approximate="tanh") + module.act(x)


class Methods(Base):
    """Methods of values."""

    def forward(self, x):
        y = (x + 1).tanh()
        return y.sigmoid() + self.layers[0](x).tanh() + self.weight.sigmoid()


class Stored(Base):
    """Methods of a buffer and of a global variable."""

    def forward(self, x):
        return self.scale.sigmoid() + CONSTANT.tanh()


class ClassMethod(Base):
    """Functions of the class Tensor."""

    def forward(self, x):
        return Tensor.tanh(x)


class Submodules(Base):
    """Submodules are not functions, whatever their names."""

    def forward(self, x):
        for layer in self.layers:
            x = layer.relu(x) if hasattr(layer, "relu") else layer(x)
        return apart(self.relu(self.sigmoid(x)).reshape(2).relu_like(x, self.layers[0].tanh(x)))


class Free(Base):
    """Functions called by forward, and functions called by those."""

    def forward(self, x):
        return deep(x) + recursive(x)


class Passed(Base):
    """A function passed as an argument."""

    def forward(self, x):
        interface = {"eager": free}.get("eager", F.relu)
        return interface(x)


class Own(Base):
    """Methods, properties, static and class methods."""

    def forward(self, x):
        return self.method(self.cached(x)) + self.static(x) + self.of_class(x) + self.property

    def method(self, x):
        return F.relu(x)

    @functools.cached_property
    def cached(self):
        return F.gelu

    @staticmethod
    def static(x):
        return torch.tanh(x)

    @classmethod
    def of_class(cls, x):
        return F.silu(x)

    @property
    def property(self):
        return self.weight.sigmoid()


class Parent(Base):
    """super() in a child class."""

    def forward(self, x):
        return F.silu(x)


class Child(Parent):
    """Calls super()."""

    def forward(self, x):
        return super().forward(x) + torch.tanh(x)


class ChildByName(Parent):
    """Calls the parent by name; methods called there are the child's."""

    def forward(self, x):
        return Parent.forward(self, x)


class Decorated(Base):
    """The wrapper and what it wraps."""

    @decorated
    def forward(self, x):
        return self.gate(x)

    def gate(self, x):
        return torch.tanh(x)


class DecoratedPlainly(Base):
    """A decorator without functools.wraps."""

    @decorated_plainly
    def forward(self, x):
        return self.gate(x)

    def gate(self, x):
        return torch.tanh(x)


class NoGrad(Base):
    """A decorator of PyTorch."""

    @torch.no_grad()
    def forward(self, x):
        return torch.tanh(x)


class Held(Base):
    """Functions held by the module: known ones are reported as held, others are searched."""

    def forward(self, x):
        return self.silu(self.gelu(self.helper(self.lambda_(x))))


class HeldPartly(Base):
    """A partial of a function."""

    def forward(self, x):
        return self.partial(x)


class Inside(Base):
    """Functions, lambdas and comprehensions in a forward."""

    def forward(self, x):
        def inner(y):
            return F.relu(y)

        return [F.gelu(each) for each in map(lambda y: torch.tanh(y), inner(x))]


class Assigned(Base):
    """A lambda as forward."""

    forward = lambda self, x: self.gate(F.relu(x))  # noqa: E731

    def gate(self, x):
        return torch.tanh(x)


class Defaults(Base):
    """Default values count; annotations and local names do not."""

    def forward(self, x: F.silu, act=F.relu, *, other=torch.sigmoid):
        gelu: F.gelu = act
        tanh = x
        functional = [lambda: functional]
        return gelu(tanh) + functional.gelu(x)


class Keywords(Base):
    """A function in an argument given by name."""

    def forward(self, x):
        return self.layers[0](input=torch.tanh(x))


class Statements(Base):
    """Newer statements, and a string that is indented less than the code."""

    def forward(self, x):
        """Text
        at the margin."""  # noqa: D205
        if (y := torch.tanh(x)) is not None:
            match x.dim():
                case 1:
                    return F.relu(y)
                case _:
                    pass
        with torch.no_grad():
            return f"{F.gelu(y)}"


class Asynchronous(Base):
    """A coroutine and a generator."""

    async def forward(self, x):
        return self.generate(F.relu(x))

    def generate(self, x):
        yield from torch.tanh(x)


class Unknown(Base):
    """Expressions that only running the code could resolve, and undefined names."""

    def forward(self, x):
        return TABLE["silu"](x) + nothing_of_that_name.relu(x) + self.no_such.relu(x)  # noqa: F821


def closed_over():
    act = F.relu

    class Closed(Base):
        """Functions of the scope in which the class was defined."""

        def forward(self, x):
            return act(later(x))

    def later(x):
        return torch.tanh(x)

    return Closed


FOUND = {
    Functions: {"relu", "gelu", "tanh", "silu"},
    Imported: {"gelu", "silu"},
    Methods: {"tanh", "sigmoid"},
    Stored: {"tanh", "sigmoid"},
    ClassMethod: {"tanh"},
    Submodules: set(),
    Free: {"tanh in free", "silu in recursive"},
    Passed: {"relu", "tanh in free"},
    Own: {"relu", "gelu", "tanh", "silu", "sigmoid"},
    Child: {"silu", "tanh"},
    ChildByName: {"silu"},
    Decorated: {"silu", "tanh"},
    DecoratedPlainly: {"tanh"},
    NoGrad: {"tanh"},
    Held: {"tanh in free", "sigmoid in <lambda>"},
    HeldPartly: {"tanh in free"},
    Inside: {"relu", "gelu", "tanh"},
    Assigned: {"relu", "tanh"},
    Defaults: {"relu", "sigmoid"},
    Keywords: {"tanh"},
    Statements: {"tanh", "relu", "gelu"},
    Asynchronous: {"relu", "tanh"},
    Unknown: set(),
    closed_over(): {"relu", "tanh in later"},
}


@pytest.mark.parametrize("cls", FOUND, ids=lambda cls: cls.__name__)
def test_calls_are_found(cls: type[nn.Module]) -> None:
    assert found(cls) == FOUND[cls]


def test_a_forward_that_was_set_on_the_module() -> None:
    model = Functions()
    model.forward = lambda x: free(x)
    assert calls(model, KNOWN, Tensor, "torch") == {Call("tanh", "free")}


def test_a_forward_that_was_wrapped_on_the_module() -> None:
    """A forward replaced as accelerate's hooks do."""
    model = Functions()

    def hooked(module: nn.Module, *args):
        return module._old_forward(*args)

    model._old_forward = model.forward
    model.forward = functools.update_wrapper(functools.partial(hooked, model), model._old_forward)
    assert calls(model, KNOWN, Tensor, "torch") == {Call(name) for name in ("relu", "gelu", "tanh", "silu")}


def test_no_source_is_said() -> None:
    space: dict = {"nn": nn, "torch": torch}
    exec("class Made(nn.Module):\n    def forward(self, x):\n        return torch.tanh(x)", space)
    assert calls(space["Made"](), KNOWN, Tensor, "torch") == {Call("Made.forward", hidden=True)}


def net_of(path: Path, text: str) -> type[nn.Module]:
    """The class Net defined in a file."""
    path.write_text(text)
    space: dict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(text, str(path), "exec"), space)
    return space["Net"]


NET = "class Net(torch.nn.Module):\n  def forward(self, x):\n    return torch.tanh(x)\n"


@pytest.mark.parametrize("changed", ["", "(\n" * 30, '"""\n' * 29, "\0" * 30], ids=["empty", "open", "quotes", "zeros"])
def test_a_file_that_has_changed(changed: str, tmp_path: Path) -> None:
    cls = net_of(tmp_path / "net.py", "import torch\n" * 20 + NET)
    (tmp_path / "net.py").write_text(changed)
    assert calls(cls(), KNOWN, Tensor, "torch") == {Call("Net.forward", hidden=True)}


def test_warnings_of_the_source_are_not_given_again(tmp_path: Path) -> None:
    cls = net_of(tmp_path / "net.py", "import torch\n" + NET.replace("(x)\n", "(x) if x else '\\d'\n"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calls(cls(), KNOWN, Tensor, "torch") == {Call("tanh")}


def test_what_cannot_be_hashed_or_called() -> None:
    class Odd(Base):
        forward = [F.relu]

    assert calls(Odd(), KNOWN, Tensor, "torch") == set()
    assert calls(nn.Identity(), KNOWN, Tensor, "torch") == calls(nn.Module(), KNOWN, Tensor, "torch") == set()
