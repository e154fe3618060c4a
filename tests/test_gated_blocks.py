"""Gated blocks, which `replace` fuses: those of transformers, and blocks written here."""

from __future__ import annotations

import ast
import contextlib
import copy
import itertools
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import jitact
from jitact.replacing import changes, uses
from jitact.replacing.gates import Gate
from jitact.replacing.pending import Pending

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 50, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "Llama": ("SwiGLU", {}),
    "Mistral": ("SwiGLU", {}),
    "Qwen2": ("SwiGLU", {}),
    "Gemma": ("GEGLUTanh", {"head_dim": 8}),
    "Phi3": ("SwiGLU", {}),  # one projection for both
    "Glm": ("SwiGLU", {"head_dim": 8}),
    "ModernBert": ("GEGLU", {}),  # likewise, with dropout after the product
    "Mixtral": ("SwiGLU", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def results(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """The output of a model, and the gradients of its weights."""
    model.zero_grad()
    y = model(*inputs)
    y = y if isinstance(y, Tensor) else y.last_hidden_state
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    gated, more = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(getattr(transformers, f"{name}Config")(**SMALL, **more)).eval()
    ids = torch.randint(1, 50, (2, 9))
    expected, keys = results(model, ids), list(model.state_dict())
    report = jitact.replace(model)
    gates = [module for module in model.modules() if isinstance(module, Gate)]
    assert len(gates) == len(report.replaced) == 2 and not report.unfused, report
    assert all(f"jitact {gated} with the product" == each.new for each in report.replaced)
    assert_same(results(model, ids), expected)
    assert list(model.state_dict()) == keys
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert_same(results(other, ids), expected)
    assert jitact.restore(model) == 2 == jitact.restore(other) and not any(isinstance(m, Gate) for m in model.modules())
    assert torch.equal(results(model, ids)[0], expected[0])


class Block(nn.Module):
    """With two projections."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 10), nn.Linear(6, 10), nn.Linear(10, 6)
        self.act = act or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class ByName(Block):
    """With local variables for intermediate results."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        activated = self.act(gate)
        up = self.up(x)
        return self.down(up * activated)


class Packed(nn.Module):
    """With one projection that holds both halves; ``split`` returns gate and up."""

    def __init__(self, split: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.both, self.down, self.act, self.split = nn.Linear(6, 20), nn.Linear(10, 6), nn.GELU(), split

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.split(self.both(x))
        return self.down(up * self.act(gate))


def halves(t: Tensor) -> tuple[Tensor, Tensor]:
    return t.chunk(2, -1)


def gate_last(t: Tensor) -> tuple[Tensor, Tensor]:
    return t[..., 10:], t[..., :10]


def interleaved(t: Tensor) -> tuple[Tensor, Tensor]:
    return t[..., ::2], t[..., 1::2]


def of_the_middle(t: Tensor) -> tuple[Tensor, Tensor]:
    return t[..., 5:15], t[..., 10:]


class InElse(Block):
    """With the product in one of two branches, and the activation's variable assigned again there."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 1:
            h = self.up(x)
        else:
            h = self.act(self.gate(x))
            h = h * self.up(x)
        return self.down(h)


class Twice(Block):
    """Uses the activation's result for more than the product."""

    def forward(self, x: Tensor) -> Tensor:
        activated = self.act(self.gate(x))
        return self.down(activated * self.up(x) + activated)


class Normed(Block):
    """Applies another operation between activation and product."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.layer_norm(self.act(self.gate(x)), (10,)) * self.up(x))


FUSED = {
    "two projections": Block,
    "by name": ByName,
    "in else": InElse,
    "an activation of no gate of its own": lambda: Block(nn.Mish()),
    "with a number": lambda: Block(nn.LeakyReLU(0.3)),
    "halves": lambda: Packed(halves),
    "gate last": lambda: Packed(gate_last),
    "interleaved": lambda: Packed(interleaved),
}


@pytest.mark.parametrize("what", FUSED)
def test_blocks(what: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(FUSED[what]())
    x = torch.randn(3, 6)
    expected = results(model, x)
    assert isinstance(model[0].act, nn.Module) and not jitact.replace(model).unfused and isinstance(model[0].act, Gate)
    assert_same(results(model, x), expected)
    y = model(x)  # a reference that keeps the graph alive
    node = y.grad_fn.next_functions[1][0]  # the node before down
    packed = isinstance(model[0], Packed)
    assert type(node).__name__ == ("ActivatePackedBackward" if packed else "_ActivateBackward")
    before = [type(each).__name__ for each, _ in node.next_functions if each is not None]
    assert before == ["AddmmBackward0"] * (1 if packed else 2)
    assert str(model[0].act).startswith("jitact ") and jitact.replace(model).replaced == ()
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected[0])
    torch._dynamo.reset()
    assert_same(results(torch.compile(model, backend="aot_eager", fullgraph=True), x), expected)
    assert jitact.restore(model) == 1 and torch.equal(model(x), expected[0])


@pytest.mark.parametrize("what", ["of the middle", "broadcast"])
def test_other_products(what: str) -> None:
    """Views that do not cover a whole tensor, and factors that broadcast."""
    torch.manual_seed(0)
    model = nn.Sequential(Packed(of_the_middle) if what == "of the middle" else Block())
    if what == "broadcast":
        model[0].up = nn.Linear(6, 1)
    x = torch.randn(3, 6)
    expected = results(model, x)
    jitact.replace(model)
    assert_same(results(model, x), expected)


class Weighed(torch.autograd.Function):
    """Returns views, with gradients that are not those of views."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(2, -1)

    @staticmethod
    def backward(ctx: object, a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a * 3, b * 5], -1)


class Scaled(torch.autograd.Function):
    """The same for a single view."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> Tensor:
        return dy * 7


def under_no_grad(t: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return t.chunk(2, -1)


def one_under_no_grad(t: Tensor) -> tuple[Tensor, Tensor]:
    return under_no_grad(t)[0], t[..., 10:]


def in_inference_mode(t: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        up = t[..., 10:]
    return t[..., :10], up


def doubled_in_place(t: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = interleaved(t)
    return gate.mul_(2), up


APART: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "of a function": Weighed.apply,
    "of a function of all": lambda t: halves(Scaled.apply(t)),
    "one of a function": lambda t: (Scaled.apply(t[..., :10]), t[..., 10:]),
    "under no_grad": under_no_grad,
    "one under no_grad": one_under_no_grad,
    "one in inference mode": in_inference_mode,
    "one detached": lambda t: (t[..., :10], t[..., 10:].detach()),
    "one a leaf of its own": lambda t: (t[..., :10].detach().requires_grad_(), t[..., 10:]),
    "doubled in place": doubled_in_place,
    "views of a view": lambda t: t.unflatten(-1, (2, 10)).unbind(-2),
    "as_strided": lambda t: (t.as_strided((3, 10), (20, 1)), t.as_strided((3, 10), (20, 1), 10)),
    "detached since": lambda t: (t[..., :10], t[..., 10:], t.detach_())[:2],
}


@pytest.mark.parametrize("order", ["gate first", "gate last"])
@pytest.mark.parametrize("what", APART)
def test_halves_with_a_history_of_their_own(what: str, order: str) -> None:
    """Gradients pass through the halves' own history, not directly to the tensor of which they are views."""
    torch.manual_seed(0)
    model = nn.Sequential(Packed(lambda t: APART[what](t)[:: 1 if order == "gate first" else -1]))
    x = torch.randn(3, 6)
    expected = results(model, x)
    assert not jitact.replace(model).unfused
    assert_same(results(model, x), expected)


def parts_of(x: Tensor, of: str) -> list[Tensor]:
    """Many views of a 4x4 tensor, also some that reach beyond it."""
    if of == "strides":
        begin, ways = x.storage_offset(), [(4, 1), (4, 2), (2, 1), (1, 2), (1, 4), (2, 4)]
        quarters = [x.as_strided((2, 2), (4, 1), begin + k) for k in (0, 2, 8)]
        places = [(way, k) for way in ways for k in range(-begin, 16 - 3 * way[0] - way[1] + begin)]
        return quarters + [x.as_strided((4, 2), way, begin + k) for way, k in places]
    bounds = [slice(*each) for each in itertools.product(range(4), range(1, 5), (1, 2)) if each[0] < each[1]]
    return [x[each] if of == "rows" else x[:, each] for each in bounds]


@pytest.mark.parametrize("of", ["rows", "columns", "strides"])
@pytest.mark.parametrize("memory", ["in order", "transposed", "a part"])
def test_any_two_parts_of_a_tensor(memory: str, of: str) -> None:
    """Only halves are read together, and all have the gradients of their product."""
    leaf = torch.linspace(-3, 3, 20, dtype=torch.float64)[2:-2].view(4, 4)
    x = leaf.detach().requires_grad_() if memory == "a part" else leaf.clone().requires_grad_() * 1
    x = x.detach().t().clone().requires_grad_() * 1 if memory == "transposed" else x
    act, together = jitact.get("silu")(), 0
    for gate, up in itertools.product(parts_of(x, of), repeat=2):
        if any(a != b and 1 not in (a, b) for a, b in zip(gate.shape, up.shape, strict=True)):
            continue
        y, exact = Pending(act, gate) * up, F.silu(gate) * up
        torch.testing.assert_close(y, exact)
        dy = torch.linspace(1, 2, y.numel(), dtype=torch.float64).view_as(y)
        found, expected = (torch.autograd.grad(each, x, dy)[0] for each in (y, exact))
        torch.testing.assert_close(found, expected)
        together += type(y.grad_fn).__name__ == "ActivatePackedBackward"
    assert together >= 2


@pytest.mark.parametrize("how", ["hooked", "retained"])
@pytest.mark.parametrize("whose", ["gate", "up", "both", "the projection"])
@pytest.mark.parametrize("split", [halves, interleaved])
def test_hooks_of_halves(split: Callable[[Tensor], tuple[Tensor, Tensor]], whose: str, how: str) -> None:
    """Hooks see the gradient of a half and change it; retain_grad of the whole tensor works."""
    seen: list[Tensor] = []
    held: list[Tensor] = []

    def watched(t: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = split(t)
        for each in {"gate": [gate], "up": [up], "both": [gate, up], "the projection": [t]}[whose]:
            if how == "hooked":
                each.register_hook(lambda dy: seen.append(dy.clone()) or dy * 2)
            else:
                each.retain_grad()
                held.append(each)
        return gate, up

    def run(model: nn.Module) -> list[Tensor]:
        seen.clear()
        held.clear()
        return [*results(model, x), *seen, *(each.grad for each in held)]

    torch.manual_seed(0)
    model, x = nn.Sequential(Packed(watched)), torch.randn(3, 6)
    expected = run(model)
    assert not jitact.replace(model).unfused
    assert_same(run(model), expected)


@pytest.mark.parametrize("learned", [False, True])
def test_halves_with_tangents_of_their_own(learned: bool) -> None:
    """In forward-mode AD, if the tensor of which they are views has no tangent."""
    act, found = jitact.get("silu")(), []
    for times in (lambda gate, up: F.silu(gate) * up, lambda gate, up: Pending(act, gate) * up):
        x = torch.linspace(-2, 2, 24, dtype=torch.float64).view(3, 8).requires_grad_(learned)
        with forward_ad.dual_level():
            gate, up = (x * 1).chunk(2, -1)
            gate = forward_ad.make_dual(gate, torch.ones_like(gate))
            found.append(forward_ad.unpack_dual(times(gate, up)))
    torch.testing.assert_close(*found)


class Zeroed(Block):
    """Overwrites the gate before the product."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        activated = self.act(gate)
        gate.zero_()
        return self.down(activated * self.up(x))


class Halted(Block):
    """Computes the gate under no_grad."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            activated = self.act(self.gate(x))
        return self.down(activated * self.up(x))


class Optional(Block):
    """Multiplies by ``up`` if asked to."""

    is_gated = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.gate(x))
        if self.is_gated:
            h = h * self.up(x)
        return self.down(h)


class OfLast(Block):
    """Reads what the last turn of a loop has left."""

    def forward(self, x: Tensor) -> Tensor:
        h, total = torch.zeros(10), torch.zeros(())
        for _ in range(2):
            total = total + h
            h = self.act(self.gate(x))
            total = total + h * self.up(x)
        return self.down(total)


class Halting(Block):
    """May leave a loop before the product."""

    stops = True

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            h = self.act(self.gate(x))
            if self.stops:
                break
            h = h * self.up(x)
        return self.down(h)


class Trying(Block):
    """Reads the activation where the product fails."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            h = self.act(self.gate(x))
            h = h * self.missing(x)
        except AttributeError:
            return self.down(h)
        return self.down(h)


class Added(Block):
    """Adds to what was the result, which has another name too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.gate(x))
        y = h * self.up(x).detach()
        h += 1
        return self.down(y)


class Enclosed(Block):
    """Reads the result in a function that is defined before."""

    def forward(self, x: Tensor) -> Tensor:
        def own() -> Tensor:
            return h.sum()

        h = self.act(self.gate(x))
        return self.down(h * self.up(x)) + own()


class Inner(Block):
    """Calls its parent's forward, which is overridden."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.gate(x))


class OfProperty(Block):
    """Reads the activation in a property, too."""

    @property
    def own(self) -> Tensor:
        return self.act(self.gate(torch.ones(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x) + torch.stack([self.own])[0])


class Outer(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(super().forward(x) + self.act(self.gate(x)) * self.up(x))


class Passing(Block):
    """Gives the gate to what overwrites it."""

    def __init__(self, change: Callable[[Block, Tensor], Tensor] = lambda _, t: t) -> None:
        super().__init__(nn.Sigmoid())  # which saves its output
        self.extra, self.change = nn.ReLU(inplace=True), change

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        part = gate[..., :4]
        activated = self.act(gate)
        change = self.change
        change(self, part)
        return self.down(activated * self.up(x))


class Extra(Passing):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        activated = self.act(gate)
        rest = self.extra(gate)
        return self.down(activated * self.up(x) + rest)


class Clamped(Block):
    """Changes the other half, which has the gate's version counter."""

    def __init__(self) -> None:
        super().__init__(nn.Sigmoid())
        self.both = nn.Linear(6, 20)

    def forward(self, x: Tensor) -> Tensor:
        both = self.both(x)
        gate, up = both[..., :10], both[..., 10:]
        activated = self.act(gate)
        up[..., 0] = 0.5
        return self.down(activated * up)


class Data(Passing):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        activated = self.act(gate)
        gate.data.mul_(3)
        return self.down(activated * self.up(x))


class Scaling(nn.Module):
    inplace = True

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(3)


class InLines(Passing):
    """The factor that overwrites the gate is on another line; it gets there through a module that hands it on."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.same = Scaling(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        same = self.same(gate)
        return self.down(
            self.act(same)
            * self.extra(gate)
        )  # fmt: skip


class Afterwards(Passing):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        y = self.act(gate) * self.up(x).detach()
        return self.down(y + self.extra(gate))


class AfterwardsByAnother(Passing):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        y = self.act(gate) * self.up(x).detach()
        return self.down(y + self.others[0](gate))

    def __init__(self, *arguments: nn.Module) -> None:
        super().__init__(*arguments)
        self.others = nn.ModuleList([nn.ReLU(inplace=True)])


class InALoop(Passing):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        y = self.act(gate) * self.up(x).detach()
        for _, each in enumerate([gate]):
            each.data.mul_(3)
        return self.down(y)


class AboveInALoop(Passing):
    def forward(self, x: Tensor) -> Tensor:
        gate, total, up = self.gate(x), torch.zeros(()), self.up(x).detach()
        while total.dim() == 0:
            gate.data.mul_(3)
            total = total + self.act(gate) * up
        return self.down(total)


class AfterwardsByKeyword(Passing):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        y = self.act(input=gate) * self.up(x).detach()
        gate.data.mul_(3)
        return self.down(y)


class Annotated(Passing):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        y = self.act(gate) * self.up(x).detach()
        other: Tensor = gate
        other.data.mul_(3)
        return self.down(y)


class OnALine(Block):
    def forward(self, x: Tensor) -> Tensor:
        # fmt: off
        h = self.act(self.gate(x)); k = h  # noqa: E702
        # fmt: on
        y = h * self.up(x)
        return self.down(y + torch.stack([k])[0])


class Elsewhere(Block):
    """Has another method that uses the activation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x) + torch.stack([self.own(x)])[0])


class Positional(Elsewhere):
    def own(self, x: Tensor, /) -> Tensor:
# a comment that begins the line
        return self.act(self.gate(x))  # fmt: skip


class Unnamed(Elsewhere):
    def own(*given: object) -> Tensor:
        return given[0].act(given[0].gate(given[1]))


class OfLambda(Elsewhere):
    own = lambda self, x: self.act(self.gate(x))  # noqa: E731


class Catching(Block):
    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(AttributeError):
            h = self.act(self.gate(x))
            h = h * self.missing(x)
        return self.down(h)


def replaced_forward() -> nn.Module:
    block = Block()
    block.forward = lambda x: block.down(block.act(block.gate(x)))
    return block


def double_in_place(t: Tensor) -> None:
    t.mul_(2.0)


class OverwritingUp(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        double_in_place(x)
        return super().forward(x)


class OfOverwritten(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.gate(x)
        return self.down(self.act(h) * self.up(h))


def of_overwritten() -> nn.Module:
    block = OfOverwritten(nn.Sigmoid())
    block.up = OverwritingUp(block.up.out_features, block.up.out_features)
    return block


UNFUSED = {
    "the product is conditional": (Optional, r"forward does more with it than multiply"),
    "read in the next turn": (OfLast, r"forward does more with it than multiply"),
    "left before the product": (Halting, r"forward does more with it than multiply"),
    "read after an exception": (Trying, r"forward does more with it than multiply"),
    "added to": (Added, r"forward does more with it than multiply"),
    "read in a function": (Enclosed, r"forward does more with it than multiply"),
    "read in a parent's forward": (Outer, r"forward does more with it than multiply"),
    "changed by .data": (Data, r"forward changes gate in place"),
    "given to a module on the next line": (InLines, r"forward gives gate to self.extra in between"),
    "changed afterwards": (Afterwards, r"forward gives gate to self.extra, which changes it"),
    "changed afterwards by another": (AfterwardsByAnother, r"forward gives gate to self.others[0], which may change it"),
    "changed in a loop": (InALoop, r"forward changes each in place"),
    "changed above in a loop": (AboveInALoop, r"forward changes gate in place"),
    "changed afterwards, given by name": (AfterwardsByKeyword, r"forward changes gate in place"),
    "changed by an annotated name": (Annotated, r"forward changes other in place"),
    "read on the same line": (OnALine, r"forward does more with it than multiply"),
    "read in a method of positional arguments": (Positional, r"own does more with it than multiply"),
    "read in a method of any arguments": (Unnamed, r"own passes it on"),
    "read in a lambda": (OfLambda, r"<lambda> passes it on"),
    "read after an exception that with catches": (Catching, r"forward does more with it than multiply"),
    "read in a property": (OfProperty, r"own does more with it than multiply"),
    "another forward": (replaced_forward, r"the forward of Block was replaced on the module"),
    "a view is given to a function": (lambda: Passing(lambda _, t: t.mul_(3)), r"forward gives part to change in between"),
    "given to a module": (Extra, r"forward gives gate to self.extra in between"),
    "the other half is changed": (Clamped, r"forward changes up in place"),
    "changed in between": (lambda: Zeroed(nn.Sigmoid()), r"forward changes gate in place"),
    "used twice": (Twice, r"forward does more with it than multiply"),
    "a module's function changes it": (of_overwritten, r"forward gives h to self.up in between"),
    "in place": (lambda: Block(nn.SiLU(inplace=True)), r"it overwrites its input"),
    "learned": (lambda: Block(nn.PReLU()), r"it takes more than one tensor, or draws random numbers"),
}


@pytest.mark.parametrize("what", UNFUSED)
def test_what_is_not_fused(what: str) -> None:
    torch.manual_seed(0)
    make, why = UNFUSED[what]
    model, x = nn.Sequential(make()), torch.randn(3, 6)
    expected = results(model, x)
    report = jitact.replace(model)
    (left,) = report.unfused
    assert left.path == "0.act" and left.why == why and "not fused with the product:" in repr(report)
    assert not isinstance(model[0].act, Gate)
    assert_same(results(model, x), expected)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), expected[0])


class Tripling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.tripled(x)

    def tripled(self, t: Tensor) -> Tensor:
        return t.mul_(3)


class TriplingACopy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        return x.mul_(3)


METHOD = """
def forward(self, x, n=0):
    gate, up = self.both(x).chunk(2, -1)
    h = self.act(gate)
    {}
    {}
    {}
    return y
"""
PRODUCT = "y = h * up"
# Statements before, with and after a product, and what is said of the activation's input.
CHANGES = [
    ("k = 0; k += 1", PRODUCT, "", ""),
    ("k = x; k += 1", PRODUCT, "", "changes k in place"),
    ("n += 1", PRODUCT, "n = 0", "changes n in place"),
    ("x[0] = 1", PRODUCT, "", "changes x in place"),
    ("torch.mul(x, 2, out=gate)", PRODUCT, "", "changes gate in place"),
    ("torch.relu_(gate)", PRODUCT, "", "changes gate in place"),
    ("torch.relu_(input=gate)", PRODUCT, "", "changes gate in place"),
    ("F.relu(gate, inplace=True)", PRODUCT, "", "changes gate in place"),
    ("F.relu(input=gate, inplace=True)", PRODUCT, "", "changes gate in place"),
    ("F.relu(gate, True)", PRODUCT, "", "changes gate in place"),
    ("F.silu(gate, self.fast)", PRODUCT, "", "changes gate in place"),
    ("F.dropout(gate, 0.5, self.training)", PRODUCT, "", ""),
    ("self.state.mul_(2)", PRODUCT, "", "changes self.state in place"),
    ("", PRODUCT, "x.mul_(2)", ""),
    ("", PRODUCT, "self.state.mul_(2)", ""),
    ("", PRODUCT, "gate.sum(); len(gate); F.relu(gate)", ""),
    ("", PRODUCT, "v = torch.chunk(gate, 2)[0]; v.mul_(2)", "changes v in place"),
    ("", PRODUCT, "v = torch.swapdims(gate, 0, 1); v.mul_(2)", "changes v in place"),
    ("", PRODUCT, "v = torch.transpose(input=gate, dim0=0, dim1=1); v.mul_(2)", "changes v in place"),
    ("", PRODUCT, "v = F.relu(gate); v.mul_(2)", ""),
    ("", PRODUCT, "v = nn.functional.relu(gate); k = nn.functional.relu(x); k.mul_(2); v.mul_(2)", ""),
    ("", PRODUCT, "v = torch.nn.functional.dropout(gate); v.mul_(2)", "changes v in place"),
    ("", PRODUCT, "gate = nn.functional.linear(gate, gate).t(); y = nn.functional.linear(y, y); x.add_(y)", ""),
    ("", PRODUCT, "v = self.same(input=gate); v.mul_(2)", "changes v in place"),
    ("", PRODUCT, "v = y if x.any() else gate; v.mul_(2)", "changes v in place"),
    ("", PRODUCT, "v = gate if x.any() else y; v.mul_(2)", "changes v in place"),
    ("", PRODUCT, "(v := gate).mul_(2)", "changes gate in place"),
    ("", PRODUCT, "len(v := gate); v.mul_(2)", "changes v in place"),
    ("", PRODUCT, "[e.mul_(2) for e in (gate, y)]", "changes e in place"),
    ("", PRODUCT, "up.mul_(2)", "changes up in place"),
    ("", PRODUCT, "d = dict(a=gate)", "gives gate to dict, which may change it"),
    ("", PRODUCT, "d = {'a': gate}; d['a'].mul_(2)", "changes d in place"),
    ("", PRODUCT, "self.relu(gate)", "gives gate to self.relu, which changes it"),
    ("", PRODUCT, "self.tripling(gate)", "gives gate to self.tripling, which changes it"),
    ("", PRODUCT, "self.of_copy(gate)", ""),
    ("", PRODUCT, "gate.mul_(2); gate = y", "changes gate in place"),
    ("", PRODUCT, "gate = self.relu(gate)", "gives gate to self.relu, which changes it"),
    ("", PRODUCT, "gate = gate[0]; gate.mul_(2)", "changes gate in place"),
    ("", PRODUCT, "gate = y + 1; gate.mul_(2)", ""),
    ("", PRODUCT, "\n    if x.any(): gate = y + 1\n    gate.mul_(2)", "changes gate in place"),
    ("", "y = tripled(h * up, gate)", "", "gives gate to tripled, which may change it"),
    ("", "y = tripled(h * up, t=gate)", "", "gives gate to tripled, which may change it"),
    ("", "y = self.relu(h * up) + (h * up).sum()", "", ""),
    ("", "gate += h * up", "", "changes gate in place"),
    ("", "gate[0] = h * up", "", "changes gate in place"),
    ("", "gate = self.down(h * up)", "gate.mul_(2)", ""),
    ("", "y = (h.float() * up.float()).to(gate.dtype)", "", ""),
    ("", PRODUCT, "y = y.new_zeros(gate.shape).type_as(gate) + tripled(gate.shape[0])", ""),
    ("", PRODUCT, "y.kept(gate[gate.shape[0] - 1])", "gives gate to y.kept, which may change it"),
    ("", PRODUCT, "seen = set(); seen.add(gate)", "gives gate to seen.add, which may change it"),
    ("", PRODUCT, "self.down.cache.index_add(gate)", "gives gate to self.down.cache.index_add, which may change it"),
]


@pytest.mark.parametrize(("before", "product", "after", "told"), CHANGES)
def test_changes_of_the_input(before: str, product: str, after: str, told: str) -> None:
    definition = ast.parse(METHOD.format(before, product, after)).body[0]
    children = {
        "act": nn.Sigmoid(), "both": nn.Linear(6, 20), "relu": nn.ReLU(inplace=True), "down": nn.Linear(10, 6),
        "same": nn.Identity(), "tripling": Tripling(), "of_copy": TriplingACopy(),
    }  # fmt: skip
    (result,) = uses._results(definition, None, "act")
    assert result.input_changed(children) == (told and f"forward {told}")


def test_functions_that_return_views_are_known() -> None:
    """Those of torch and of torch.nn.functional, by the schemas of PyTorch's operators."""
    schemas = [each for each in torch._C._jit_get_all_schemas() if each.name.startswith("aten::")]
    views = {
        each.name[6:] for each in schemas for result in each.returns if result.alias_info and not result.alias_info.is_write
    }
    named = {name for name in views if name[0] != "_" and (hasattr(torch, name) or hasattr(F, name))}
    assert named - {"cpu", "cuda", "slice_inverse"} <= changes._VIEWS  # the first two are modules in torch


class OfFeatures(nn.Module):
    """The gate is an argument, which has no gradient where it is made by a frozen part of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(6, 10), nn.SiLU()

    def forward(self, features: Tensor, x: Tensor) -> Tensor:
        return self.act(features) * self.up(x)


def test_a_gate_without_a_gradient_is_not_kept() -> None:
    block, x = OfFeatures(), torch.randn(3, 6)
    found: list[list[Tensor]] = []
    for _ in range(2):
        with torch.inference_mode():
            features = torch.ones(3, 10)
        for given in (features, torch.ones(3, 10)):
            y = block(given, x)
            if given is not features:
                given.zero_()
            found.append([y.detach(), *torch.autograd.grad(y.sum(), block.parameters())])
        jitact.replace(block)
    assert isinstance(block.act, Gate)
    for each in found[1:]:
        assert_same(each, found[0])


class Residual(Block):
    """Adds the product in place, and goes through a loop, with the variable assigned again."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        for _ in range(2):
            h = self.act(self.gate(x))
            h = h * self.up(x.float()) * 0.5
            y += self.down(h)
        return y


def test_products_in_loops_are_fused() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Residual()), torch.randn(3, 6)
    expected = results(model, x)
    assert not jitact.replace(model).unfused and isinstance(model[0].act, Gate)
    assert_same(results(model, x), expected)


@pytest.mark.parametrize("cast", [False, True])
def test_modes_are_those_of_the_call(cast: bool) -> None:
    """no_grad around the activation alone applies to it alone, with and without autocast around everything."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Halted(nn.Softplus())), torch.randn(3, 6)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        expected = results(model, x)
        assert jitact.replace(model).replaced[0].new.endswith("with the product")
        assert_same(results(model, x), expected)
        assert model[0].gate.weight.grad is None


class Around(nn.Module):
    """What checkpoint_wrapper and its like put around a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_put_around_an_activation_gets_tensors(inside: bool) -> None:
    """Around the gate, or around the activation in it, as by tools that wrap each module without submodules."""
    torch.manual_seed(0)
    model, x = Block(), torch.randn(3, 6)
    expected = results(model, x)
    jitact.replace(model)
    assert isinstance(model.act, Gate)
    if inside:
        model.act.act = Around(model.act.act)
    else:
        model.act = Around(model.act)
    assert_same(results(model, x), expected)
    assert "Around" in repr(model)


class InLambdas(Block):
    """With the product in a function within forward."""

    def forward(self, x: Tensor) -> Tensor:
        product = lambda up: self.act(self.gate(x)) * up  # noqa: E731
        return self.down(sum([product(up) for up in (self.up(x), x.sum())]))


def test_products_in_functions_within_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = InLambdas(), torch.randn(3, 6)
    expected, fused = results(model, x), []
    report = jitact.replace(model)
    monkeypatch.setattr(Pending, "__mul__", lambda self, up, mul=Pending.__mul__: fused.append(up) or mul(self, up))
    assert_same(results(model, x), expected)
    assert isinstance(model.act, Gate) and len(fused) == 2 == 2 * len(report.replaced)


def test_what_is_pending_keeps_its_modes() -> None:
    act, x, up = jitact.get("silu")(), torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    with torch.no_grad():
        pending = [Pending(act, x) for _ in range(2)]
    assert not (pending[0] * up).requires_grad and not pending[1].value().requires_grad and (Pending(act, x) * up).requires_grad
    with torch.inference_mode():
        made, other = Pending(act, x), Pending(act, x)
    with torch.no_grad():
        assert other.value().is_inference()
    assert made.value().is_inference() and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("name", ["silu", "softplus"])
@pytest.mark.parametrize("around", ["activation", "product"])
def test_autocast_around_one_of_both(around: str, name: str) -> None:
    act, gate, up = jitact.get(name)(), torch.randn(3, 4), torch.randn(3, 4)
    found = []
    for call in (act, lambda t: Pending(act, t)):
        with torch.autocast("cpu", torch.bfloat16, enabled=around == "activation"):
            made = call(gate)
        with torch.autocast("cpu", torch.bfloat16, enabled=around == "product"):
            found.append(made * up)
    torch.testing.assert_close(*found)


class Labelled(Tensor):
    """A subclass."""


def test_factors_of_another_type_or_dtype() -> None:
    """Products are PyTorch's, of the activation in its own dtype."""
    act, gate, up = jitact.get("silu")(), torch.randn(300, dtype=torch.bfloat16), torch.randn(300)
    assert torch.equal(Pending(act, gate) * up, act(gate) * up)
    for found in (Pending(act, up) * up.as_subclass(Labelled), up.as_subclass(Labelled) * Pending(act, up)):
        assert type(found) is Labelled and torch.equal(found, act(up) * up)


def test_a_value_that_was_computed_is_kept() -> None:
    act, gate, up = jitact.get("silu")(), torch.randn(3, 4), torch.randn(3, 4)
    pending = Pending(act, gate)
    expected = pending.value().clone()
    gate.zero_()
    assert torch.equal(pending * up, expected * up)
    assert torch.equal(pending.dropped(1.0, training=False), expected) and torch.equal(pending.dropped(0.0), expected)
    share = pending.dropped(0.5)
    torch.testing.assert_close(share, torch.where(share == 0, 0.0, 2 * expected))


def test_tensors_that_activations_let_go_of_are_not_kept() -> None:
    """Of a part of a tensor the activation alone keeps its output or a bit; a fused gate would keep the whole tensor."""
    whole, up = torch.randn(3, 20, requires_grad=True).mul(1), torch.randn(3, 10, requires_grad=True)
    part, alone = whole[:, :10], torch.randn(3, 10, requires_grad=True).mul(1)
    for name, gate, other, kept in (
        ("sigmoid", part, up, False), ("relu", part, up, False), ("silu", part, up, True), ("sigmoid", alone, up, True),
        ("sigmoid", alone.view(10, 3), up.view(10, 3), True), ("sigmoid", torch.randn(3, 20)[:, :10], up.detach(), True),
        ("sigmoid", part, whole[:, 5:15], True),
    ):  # fmt: skip
        pending = Pending(jitact.get(name)(), gate)
        y = pending * other
        assert (pending._value is None) == kept, (name, gate.shape)
        torch.testing.assert_close(y, pending.value() * other)


def test_what_changes_before_the_product_is_an_error() -> None:
    """Changes in place that the source does not show are detected at run time."""
    act, x = jitact.get("silu")(), torch.randn(3, 4)
    for use in (lambda pending: pending * x, lambda pending: pending + x):
        gate = torch.randn(3, 4)
        pending = Pending(act, gate)
        gate.view(-1)[0] = 1
        with pytest.raises(RuntimeError, match="silu together with what follows it, but its input was changed in place"):
            use(pending)


def test_factors_that_are_no_tensors() -> None:
    class Doubling:
        def __mul__(self, other: object) -> object:
            return 2 * other if isinstance(other, Tensor) else NotImplemented

    act, gate = jitact.get("silu")(), torch.randn(3, 4)
    torch.testing.assert_close(Doubling() * Pending(act, gate), 2 * F.silu(gate))


class Global(Block):
    """Leaves the activation's result to others."""

    def forward(self, x: Tensor) -> Tensor:
        global LAST
        LAST = self.act(self.gate(x))
        return self.down(LAST * self.up(x))


class TwoNames(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = k = self.act(self.gate(x))
        return self.down(h * self.up(x) + torch.stack([k])[0])


class Scaled1(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.scale)


SCALE = 3.0


class Scaled2(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * SCALE)


class Scaled3(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(-2 * self.act(self.gate(x)))


def test_an_activation_of_two_blocks() -> None:
    act = nn.SiLU()
    model = nn.Sequential(Block(act), nn.Sequential(act))
    (left,) = jitact.replace(model).unfused
    assert left.why == "Sequential does not multiply it" and not isinstance(model[0].act, Gate)


def test_what_is_no_gate() -> None:
    kinds = Normed, Global, TwoNames, Scaled1, Scaled2, Scaled3
    model = nn.Sequential(*[kind() for kind in kinds], nn.Linear(6, 6), nn.SiLU())
    x = torch.randn(3, 6)
    expected = results(model, x)
    report = jitact.replace(model)
    assert not report.unfused and not any(isinstance(module, Gate) for module in model.modules())
    assert_same(results(model, x), expected)


def test_torch_compile_of_a_vectorised_block() -> None:
    """torch.vmap asks for the module's text, which torch.compile traces if it is one line."""
    model, x = Block(nn.SiLU()), torch.randn(3, 6)
    expected = model(x)
    jitact.replace(model)
    assert repr(model.act).startswith("jitact SwiGLU(") and "\n" not in repr(model.act)
    compiled = torch.compile(torch.func.vmap(model), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)


def test_settings_are_the_activations() -> None:
    act = nn.LeakyReLU(0.1)
    act.label = "first"
    model, x = Block(act), torch.randn(3, 6)
    jitact.replace(model)
    assert isinstance(model.act, Gate) and model.act.negative_slope == 0.1 and model.act.label == "first"
    model.act.negative_slope, model.act.label = 2.0, "second"
    assert model.act.act.label == "second"
    fused = model(x)
    assert jitact.restore(model) == 1 and model.act is act
    assert act.negative_slope == 2.0 and "negative_slope=2.0" in repr(model)
    torch.testing.assert_close(fused, model(x))
    with pytest.raises(AttributeError, match="missing"):
        getattr(Gate(jitact.get("relu")()), "missing")  # noqa: B009


def test_settings_that_are_tensors_are_the_activations() -> None:
    model = Block(nn.LeakyReLU(0.1))
    model.act.mask = torch.zeros(2)
    jitact.replace(model)
    model.act.mask = torch.ones(2)
    assert isinstance(model.act, Gate) and model.act.act.mask is model.act.mask
    model.act.negative_slope = torch.tensor(0.5)
    with pytest.raises(TypeError, match="negative_slope must be a number"):
        model(torch.randn(3, 6))
    model.act.register_buffer("number", torch.zeros(()))
    model.act.number = torch.ones(())
    assert model.act.state_dict() == {"number": torch.ones(())}
    del model.act.number
    assert jitact.restore(model) == 1
    assert model.act.mask.sum() == 2 and model.act.negative_slope == 0.5


class Both(nn.Module):
    """Products of two activations, each the second one once."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.gate = nn.Sigmoid(), nn.Tanh(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(self.gate(x)) * self.two(x) + self.two(self.gate(x)) * self.one(x)


class OneOfTwo(Both):
    """The second one cannot be fused."""

    def forward(self, x: Tensor) -> Tensor:
        two = self.two(x)
        return self.one(self.gate(x)) * two + two.sin()


@pytest.mark.parametrize(("kind", "fused"), [(Both, ["one", "two"]), (OneOfTwo, ["one"])])
def test_products_of_two_activations(kind: type[nn.Module], fused: list[str]) -> None:
    model, x = kind(), torch.randn(3, 6)
    expected = results(model, x)
    report = jitact.replace(model)
    assert [name for name in ("one", "two") if isinstance(getattr(model, name), Gate)] == fused
    assert not any("which is fused" in each.why for each in report.unfused)
    assert_same(results(model, x), expected)


def test_a_product_lies_in_memory_as_its_first_factor() -> None:
    act, gate = jitact.get("silu")(), torch.randn(2, 4, 3).transpose(1, 2)
    up = torch.randn(2, 3, 4)
    for found, expected in ((Pending(act, gate) * up, gate), (up * Pending(act, gate), up)):
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, F.silu(gate) * up)
    with torch.no_grad():
        torch.testing.assert_close((Pending(act, gate) * up.to_sparse()).to_dense(), F.silu(gate) * up)


def test_what_is_put_on_an_activation_since() -> None:
    model = Block()
    jitact.replace(model)
    model.act.label = 1
    del model.act.label
    assert not hasattr(model.act, "label")
    model.act.register_buffer("scale", torch.ones(1))
    with pytest.raises(RuntimeError, match=r"restore\(\): cannot put back act: it has other buffers than its class: scale"):
        jitact.restore(model)


def test_another_forward_than_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.act(self.gate(x))

    model, x = Block(), torch.randn(3, 6)
    jitact.replace(model)
    monkeypatch.setattr(Block, "forward", forward)
    assert type(model(x)) is Tensor


def test_a_shared_activation_that_was_replaced_twice() -> None:
    act, seen = nn.SiLU(), []
    model = nn.Sequential(Block(act), Block(act))
    jitact.replace(model[0])
    jitact.replace(model)
    handles = [block.act.register_forward_hook(lambda *_, k=k: seen.append(k)) for k, block in enumerate(model)]
    jitact.restore(model)
    assert model[0].act is model[1].act is act
    act(torch.ones(3))
    handles[0].remove()
    assert seen == [0, 1]


def test_hooks_of_one_of_two_replacements() -> None:
    act, seen = nn.SiLU(), []
    model = nn.Sequential(Block(act), Block(act))
    jitact.replace(model[0])
    jitact.replace(model)
    handle = model[1].act.register_forward_pre_hook(lambda *_: seen.append(1))
    jitact.restore(model)
    act(torch.ones(3))
    handle.remove()
    act(torch.ones(3))
    assert seen == [1]


class Renamed(Block):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        same = gate
        return self.down(self.act(same) * up)


@pytest.mark.parametrize("kind", [Block, Renamed])
@pytest.mark.parametrize("name", ["act", "gate", "up"])
def test_hooks_are_left_alone(name: str, kind: type[Block]) -> None:
    model, x, seen = nn.Sequential(kind()), torch.randn(3, 6), []
    getattr(model[0], name).register_forward_hook(lambda module, args, y: seen.append(type(y)))
    report = jitact.replace(model)
    assert report.unfused[0].why == ("it has hooks" if name == "act" else f"{name} has hooks")
    model(x)
    assert seen == [Tensor]


def test_hooks_that_come_later() -> None:
    """Hooks registered after replace see tensors, and are passed on by restore."""
    model, x, seen = nn.Sequential(Block()), torch.randn(3, 6), []
    jitact.replace(model)
    model[0].act.register_forward_hook(lambda module, args, y: seen.append(type(y)))
    model(x)
    jitact.restore(model)
    model(x)
    assert seen == [Tensor, Tensor] and type(model[0].act) is nn.SiLU


@pytest.mark.parametrize("pre", ["", "pre_"])
def test_backward_hooks_that_come_later(pre: str) -> None:
    """Full backward hooks, which change the gradient, on the replacement and after restore."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Block()), torch.randn(3, 6)
    plain = results(model, x)
    jitact.replace(model)
    handle = getattr(model[0].act, f"register_full_backward_{pre}hook")(lambda module, *gradients: (gradients[0][0] * 2,))
    hooked = results(model, x)
    jitact.restore(model)
    assert_same(results(model, x), hooked)
    assert not torch.equal(hooked[1], plain[1])
    handle.remove()
    assert_same(results(model, x), plain)


def test_backward_hooks_that_are_not_full() -> None:
    """These need a flag that is False, which restore takes along."""
    model, x, seen = nn.Sequential(Block()), torch.randn(3, 6), []
    jitact.replace(model)
    model[0].act.register_backward_hook(lambda module, dx, dy: seen.append(type(module)))
    jitact.restore(model)
    model(x).sum().backward()
    assert seen == [nn.SiLU]


def test_hooks_look_on_once() -> None:
    """Global hooks and hooks on the activation inside the gate run once; state_dict hooks are restored."""
    model, x, seen = nn.Sequential(Block()), torch.randn(3, 6), []
    model[0].act.register_state_dict_post_hook(lambda *_: seen.append("state_dict"))
    jitact.replace(model)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, y: seen.append(module))
    model(x)
    handle.remove()
    assert [type(each) for each in seen] == [nn.Linear, Gate, nn.Linear, nn.Linear, Block, nn.Sequential]
    seen.clear()
    model[0].act.act.register_forward_hook(lambda module, args, y: seen.append(type(y)))
    model(x)
    assert seen == [Tensor]
    jitact.restore(model)
    seen.clear()
    model.state_dict()
    assert seen == ["state_dict"]


def test_the_report() -> None:
    model = nn.Sequential(Block(), Block())
    assert repr(jitact.replace(model)) == (
        "replaced 2 activations, left 0\n  *.act (2)  SiLU() -> jitact SwiGLU with the product"
    )


def test_projections_are_called_as_modules() -> None:
    """Even if they were replaced after jitact.replace."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.low = base, nn.Linear(6, 10, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.low(x)

    model, x = nn.Sequential(Block()), torch.randn(3, 6)
    jitact.replace(model)
    model[0].gate = Adapted(model[0].gate)
    expected = model[0].down(F.silu(model[0].gate(x)) * model[0].up(x))
    torch.testing.assert_close(model(x), expected)


def test_what_is_pending_has_the_value() -> None:
    x = torch.randn(3, 4)
    made = lambda: Pending(jitact.get("silu")(), x)  # noqa: E731
    y = F.silu(x)
    for own, expected in (
        (made() + 1, y + 1), (2 - made(), 2 - y), (made() * 2, y * 2), (torch.exp(made()), y.exp()), (made().sum(), y.sum()),
        (made()[0], y[0]), (torch.cat([made(), x]), torch.cat([y, x])), (made() @ x.t(), y @ x.t()), (x * made(), x * y),
        (torch.mul(x, made()), x * y), (made() * x.double(), y * x.double()), (-made(), -y), (made() > 0, y > 0),
    ):  # fmt: skip
        torch.testing.assert_close(own, expected)
    assert made().shape == (3, 4) and len(made()) == 3


def test_glu_of_torch() -> None:
    model, x = nn.Sequential(nn.Linear(6, 8), nn.GLU(), nn.GLU(0)), torch.randn(4, 6)
    expected = results(model, x)
    report = jitact.replace(model)
    assert [each.old for each in report.replaced] == ["GLU(dim=-1)", "GLU(dim=0)"]
    assert_same(results(model, x), expected)
    assert jitact.restore(model) == 2 and type(model[1]) is nn.GLU
    with jitact.patched() as calls:
        y = F.glu(x, 0)
    assert calls.replaced["glu"] == 1
    torch.testing.assert_close(y, F.glu(x, 0))


def test_methods_that_wrap_themselves_have_no_source() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.act = nn.Linear(8, 16), nn.Linear(8, 16), nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.gate(x)) * self.up(x)

    Block.forward.__wrapped__ = Block.forward
    block, x = Block(), torch.randn(2, 8)
    expected = results(block, x)
    assert "SwiGLU" not in str(jitact.replace(block))
    for found, wanted in zip(results(block, x), expected, strict=True):
        torch.testing.assert_close(found, wanted)
