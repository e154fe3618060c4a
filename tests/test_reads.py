"""What the gradients of definitions read: other tensors are not saved, may change before backward, and do not matter."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from common import SLOW
from torch import Tensor

import jitact
from jitact import Channel
from jitact.autograd import _keep
from jitact.definitions.expression import Expression
from jitact.definitions.reads import read_by_gradients
from jitact.measuring.timing import kept_bytes
from jitact.modules import ActivationModule
from jitact.records.operands import fitted

SHAPE = (6, 8)


def block() -> type[ActivationModule]:
    return jitact.define("block", "residual + dropout(x + bias, p)", bias=Channel(init=0.0), p=0.1)


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def kept_by(call: Callable[[], Tensor]) -> list[Tensor]:
    """The tensors that autograd saves for the backward of a call."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return kept


@pytest.mark.parametrize(
    ("text", "reads", "passed"),
    [
        ("x + y - z", {}, "x y"),
        ("x - 2 + x", {}, ""),
        ("-x * 2 / p - y * 0.5", {}, ""),
        ("x * y + z", {"x": "y", "y": "x"}, "z"),
        ("x / y", {"x": "y", "y": "x y"}, ""),
        ("x * (y + z)", {"x": "y z", "y": "x", "z": "x"}, ""),
        ("(x > y) * z + x", {"z": "x y"}, "x"),
        ("x > 0 && !(y > 1) ? z : x + z", {"x": "x y", "z": "x y"}, "z"),
        ("x > 0 ? y + z : y - z", {"y": "x", "z": "x"}, "y"),
        ("fma(x, y, z)", {"x": "y", "y": "x"}, "z"),
        ("x + dropout(y * z, p)", {"y": "z", "z": "y"}, "x"),
        ("silu(x + y) - z", {"x": "x y", "y": "x y"}, ""),
        ("x + sin(y) + y", {"y": "y"}, "x"),
        ("exp(p) * x + pow(p, 2)", {}, ""),
    ],
)
def test_what_gradients_read(text: str, reads: dict[str, str], passed: str) -> None:
    expression = Expression(text, None, ["p"])
    names = expression.elements
    found = read_by_gradients(expression.key)
    told = {names[place]: " ".join(names[each] for each in sorted(read)) for place, read in found.reads.items() if read}
    assert told == reads and " ".join(names[place] for place in sorted(found.passed)) == passed


@pytest.mark.parametrize(
    ("text", "wanted", "kept"),
    [
        ("x + y - z * 2", "x y z", ""),
        ("x * y + z", "x y z", "x y"),
        ("x * y + z", "x z", "y"),
        ("x * y + z", "y", "x"),
        ("x * y + z", "z", ""),
        ("x * w + b", "x w b", "x w"),
        ("x * w + b", "w b", "x"),
        ("x + w", "x w", ""),
        ("x > y ? x : z", "x z", "x y"),
        ("silu(x) * y", "x y", "x y"),
        ("silu(x) * y", "y", "x"),
    ],
)
def test_what_is_kept(text: str, wanted: str, kept: str) -> None:
    channels = {name: Channel() for name in "wb" if name in text}
    cls = jitact.define("told", text, **channels)
    names = cls.activation.layout.tensors
    tensors = {name: t for name, t in zip(names, leaves(*[SHAPE[1:] if n in channels else SHAPE for n in names]), strict=True)}
    tensors = {name: t if name in wanted.split() else t.detach() for name, t in tensors.items()}
    called = [tensors[name] for name in names]
    found = kept_by(lambda: jitact.told(*called))
    assert sorted(id(t) for t in found) == sorted(id(tensors[name]) for name in kept.split())
    if not {"silu", "?"} & {*text.replace("(", " ").split()}:  # for these, PyTorch saves a result or the mask of a comparison
        in_torch = kept_bytes(lambda: cls.activation.reference(*called))
        assert sum(t.nbytes for t in found) == in_torch


def test_a_block_keeps_its_seed() -> None:
    block()
    x, residual, bias = leaves(SHAPE, SHAPE, SHAPE[1:])
    (seed,) = kept_by(lambda: jitact.block(x, residual, bias, training=True))
    assert seed.dtype is torch.int64 and seed.numel() == 1
    assert not kept_by(lambda: jitact.block(x, residual, bias)), "outside of training it is a sum"
    assert not kept_by(lambda: jitact.block(x.detach(), residual, bias.detach(), training=True))


def test_gradients_that_come_in_are_handed_on() -> None:
    block()
    x, residual, bias, small = leaves(SHAPE, SHAPE, SHAPE[1:], SHAPE[1:])
    dy = torch.randn(SHAPE, dtype=torch.float64)
    y = jitact.block(x, residual, bias, training=True)
    assert torch.autograd.grad(y, residual, dy)[0].data_ptr() == dy.data_ptr()
    assert torch.equal(torch.autograd.grad(jitact.block(x, small, bias, training=True), small, dy)[0], dy.sum(0))
    narrow = residual.detach().bfloat16().requires_grad_()
    (found,) = torch.autograd.grad(jitact.block(x, narrow, bias, training=True), narrow, dy)
    assert found.dtype is torch.bfloat16 and torch.equal(found, dy.bfloat16())
    seen = []
    residual.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
    jitact.block(x, residual, bias).backward(dy)
    assert torch.equal(seen[0], dy) and torch.equal(residual.grad, 2 * dy) and torch.equal(x.grad, dy)
    x.grad.zero_()
    assert dy.any() and residual.grad.any(), "what is accumulated is no one else's"


def test_graphs_keep_no_more() -> None:
    block()
    compiled = torch.compile(lambda *t: jitact.block(*t, training=True), fullgraph=True, backend="aot_eager")
    x, residual, bias = leaves(SHAPE, SHAPE, SHAPE[1:], dtype=torch.float32)
    (seed,) = kept_by(lambda: compiled(x, residual, bias))
    assert seed.dtype is torch.int64
    jitact.define("told", "x * w + y", w=Channel())
    compiled = torch.compile(jitact.told, fullgraph=True, backend="aot_eager")
    assert [t.shape for t in kept_by(lambda: compiled(x, residual, bias.detach()))] == [SHAPE[1:]]
    dy = torch.randn(SHAPE)
    found = torch.autograd.grad(compiled(x, residual, bias), (x, residual, bias), dy)
    for gradient, exact in zip(found, (dy * bias, dy, (dy * x).sum(0)), strict=True):
        torch.testing.assert_close(gradient, exact)


def test_one_tensor_whose_given_gradient_reads_nothing() -> None:
    jitact.define("told", "x < 0 ? 0 * x : x", "dy")
    (x,) = leaves(SHAPE)
    assert not kept_by(lambda: jitact.told(x))
    dy = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(jitact.told(x), x, dy, create_graph=True)
    assert torch.equal(dx, dy) and torch.equal(torch.autograd.grad((dx * dx).sum(), dy)[0], 2 * dy)


def test_a_formula_of_ones_own_may_read_all() -> None:
    jitact.define("told", "x * 2 + y", reference=lambda x, y: torch.sinh(torch.asinh(x)) * 2 + y)
    x, y = leaves(SHAPE, SHAPE)
    assert torch.autograd.gradgradcheck(jitact.told, (x, y))


def test_what_stands_around_a_definition(tmp_path: Path) -> None:
    jitact.define("told", "x * 2 + y")
    x, y, bias, residual = leaves(SHAPE, SHAPE, SHAPE[1:], SHAPE)
    assert not kept_by(lambda: jitact.told(x, y, bias=bias, residual=residual))
    dy = torch.randn(SHAPE, dtype=torch.float64)
    found = torch.autograd.grad(jitact.told(x, y, bias=bias, residual=residual), (x, y, bias, residual), dy)
    for gradient, exact in zip(found, (2 * dy, dy, 2 * dy.sum(0), dy), strict=True):
        torch.testing.assert_close(gradient, exact)
    jitact.save_folder(tmp_path, "told")
    record = jitact.get("told").activation
    loaded = jitact.load_folder(tmp_path)["told"].activation
    assert loaded.layout == record.layout and loaded.unread == ("x", "y") and loaded.passed == ("y",)


# Random formulas.

FUNCTIONS = ("tanh", "sigmoid", "sin", "silu", "abs", "softplus", "gelu")


def formula(chosen: random.Random, depth: int, names: list[str]) -> str:
    def part() -> str:
        return formula(chosen, depth - 1, names)

    kind = chosen.random() if depth else 0.0
    if kind < 0.1:
        return chosen.choice([*names, *names, "p", "0.5"])
    if kind < 0.6:
        return f"({part()} {chosen.choice('++-*')} {part()})"
    if kind < 0.7:
        return f"({part()} / (2 + sigmoid({part()})))"
    if kind < 0.8:
        return f"dropout({part()}, q)"
    if kind < 0.9:
        return f"({chosen.choice(names)} > {chosen.choice(names)} ? {part()} : {part()})"
    return f"{chosen.choice(FUNCTIONS)}({part()})"


def defined(chosen: random.Random) -> tuple[type[ActivationModule], dict[str, tuple[int, ...]]]:
    """A definition, and shapes of its tensors by name."""
    while True:
        elements, channels = ["x", "y", "z"][: chosen.randint(1, 3)], chosen.sample(["w", "b"], chosen.randint(0, 2))
        text = formula(chosen, chosen.randint(2, 4), [*elements, *channels])
        used = [name for name in elements if name in Expression(text, None, ["p", "q"]).names]
        options = {name: Channel(dim=chosen.choice([-1, 0])) for name in channels} | {"p": 1.5, "q": 0.4}
        options = {name: value for name, value in options.items() if name in Expression(text, None, ["p", "q"]).names}
        if used:
            break
    shapes = {name: SHAPE if name == used[0] else chosen.choice([SHAPE, SHAPE, (6, 1), (8,)]) for name in used}
    shapes |= {name: (SHAPE[each.dim],) for name, each in options.items() if isinstance(each, Channel)}
    return jitact.define("told", text, operands=used, **options), shapes


@pytest.mark.parametrize("seed", [*range(4), *map(SLOW, range(4, 30))])
def test_formulas_at_random(seed: int) -> None:
    """Values, gradients and second derivatives agree with PyTorch's; changes before backward are refused or have no effect."""
    chosen = random.Random(seed)
    cls, shapes = defined(chosen)
    record, names = cls.activation, cls.activation.layout.tensors
    given = cls.activation.source.signature.of("element", "channel")
    made = dict(zip(names, leaves(*[shapes[name] for name in names]), strict=True))
    needed = [name for name in names if chosen.random() < 0.7] or [names[0]]
    tensors = {name: t if name in needed else t.detach() for name, t in made.items()}
    seeded = {"training": True, "seed": torch.tensor([chosen.randrange(2**40)])} if record.layout.draws else {}
    params = [default for _, default in record.params]
    keep = {"keep": _keep(torch.empty(SHAPE, dtype=torch.float64), seeded["seed"])} if seeded else {}

    def ours(of: dict[str, Tensor]) -> Tensor:
        return jitact.told(*[of[name] for name in given], **seeded)

    y, exact = ours(tensors), record.reference(*fitted(record, tensors), *params, **keep)
    leaf = [tensors[name] for name in needed]
    dy = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(y, exact)
    if not exact.requires_grad:  # such as for a comparison alone
        return
    options = {"allow_unused": True, "materialize_grads": True}
    first = [torch.autograd.grad(each, leaf, dy, create_graph=True, **options) for each in (y, exact)]
    for found, expected in zip(*first, strict=True):
        torch.testing.assert_close(found, expected)
    squares = [sum((g * g.sin()).sum() for g in each if g.requires_grad) for each in first]
    second = [torch.autograd.grad(each, [*leaf, dy], retain_graph=True, **options) for each in squares]
    for found, expected in zip(*second, strict=True):
        torch.testing.assert_close(found, expected)
    batch = torch.randn(3, *SHAPE, dtype=torch.float64)
    batched = [torch.autograd.grad(e, leaf, batch, is_grads_batched=True, retain_graph=True, **options) for e in (y, exact)]
    for found, expected in zip(*batched, strict=True):
        torch.testing.assert_close(found, expected)
    for name in names:
        copies = {each: t.clone() for each, t in tensors.items()}
        y = ours(copies)
        with torch.no_grad():
            copies[name].fill_(torch.nan)
        try:
            found = torch.autograd.grad(y, leaf, dy, **options)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            continue
        for gradient, expected in zip(found, first[1], strict=True):
            torch.testing.assert_close(gradient, expected)
