"""Random programs of activations, views and changes in place, under autograd's transforms, against PyTorch's in float64.

Each feature has tests of its own; these look for features that are wrong together. A failure names its seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from common import SLOW
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import jitact

ACTIVATIONS = {"relu": F.relu, "silu": F.silu, "gelu": F.gelu, "tanh": torch.tanh}  # which keep a bit, the input, or the output
IN_PLACE = ("relu", "silu")
GATES: dict[str, Callable] = {"swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu}
SHAPES = [(3, 4, 6), (2, 8), (4, 6), (2, 3, 4, 4), (6,), (1, 8), (5, 2)]
Step = Callable[[Any, list[Tensor], list[Tensor]], Tensor]  # of a library, results so far, and leaves


class Ours:
    """The library's functions."""

    @staticmethod
    def activation(name: str, x: Tensor, in_place: bool, bias: Tensor | None, dim: int, residual: Tensor | None) -> Tensor:
        given = {} if bias is None else {"bias": bias, "channel_dim": dim}
        return getattr(jitact, name)(x, **given, **({"inplace": True} if in_place else {}), residual=residual)

    @staticmethod
    def gated(name: str, x: Tensor, up: Tensor | None, weight: Tensor | None, **options: Any) -> Tensor:
        return getattr(jitact, name)(x, *([] if up is None else [up]), row_weight=weight, **options)

    softmax = staticmethod(jitact.softmax)
    log_softmax = staticmethod(jitact.log_softmax)
    prelu = staticmethod(jitact.prelu)


def _with_scale_and_mask(of_rows: Callable) -> Callable:
    def function(x: Tensor, dim: int, scale: float, mask: Tensor | None, save: str) -> Tensor:
        return of_rows(scale * x if mask is None else scale * x + mask, dim)

    return function


class PyTorch:
    """The same by PyTorch's functions."""

    @staticmethod
    def activation(name: str, x: Tensor, in_place: bool, bias: Tensor | None, dim: int, residual: Tensor | None) -> Tensor:
        h = x.clone() if in_place else x  # x's old values are needed for its gradient
        y = ACTIVATIONS[name](h if bias is None else h + bias.view([-1 if d == dim % x.dim() else 1 for d in range(x.dim())]))
        y = y if residual is None else residual + y
        return x.copy_(y) if in_place else y

    @staticmethod
    def gated(name: str, x: Tensor, up: Tensor | None, weight: Tensor | None, **options: Any) -> Tensor:
        first, second = x, up
        if up is None:
            dim = options["dim"] % x.dim()
            halves = options["layout"] == "halves"
            first, second = x.chunk(2, dim) if halves else x.unflatten(dim, (-1, 2)).unbind(dim + 1)
        gate, other = (second, first) if options.get("gate") == "last" else (first, second)
        y = GATES[name](gate) * other
        return y if weight is None else y * weight.unsqueeze(-1)

    softmax = staticmethod(_with_scale_and_mask(torch.softmax))
    log_softmax = staticmethod(_with_scale_and_mask(torch.log_softmax))
    prelu = staticmethod(F.prelu)


class Program:
    """One to four steps on a tensor, and the other tensors that they take."""

    def __init__(self, seed: int) -> None:
        """Draws the steps."""
        self.random, self.seed = random.Random(seed), seed
        self.leaves: list[tuple[Sequence[int], bool, str]] = []  # shapes, whether gradients are wanted, and layouts
        self.steps: list[Step] = []
        self.shapes: list[list[int]] = []
        first = self._leaf(self.random.choice(SHAPES), wanted=True)
        self._add(lambda library, values, leaves: leaves[first].clone(), self.leaves[first][0])
        kinds = [self._activation, self._activation, self._gated, self._softmax, self._prelu, self._view, self._change]
        for _ in range(self.random.randint(1, 4)):
            self.random.choice(kinds)()

    def inputs(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [1.5 * torch.randn(*shape, generator=generator, dtype=torch.float64) for shape, *_ in self.leaves]

    def run(self, library: Any, leaves: Sequence[Tensor]) -> Tensor:
        laid_out = [_laid_out(leaf, layout) for leaf, (_, _, layout) in zip(leaves, self.leaves, strict=True)]
        values: list[Tensor] = []
        for step in self.steps:
            values.append(step(library, values, laid_out))
        return values[-1]

    def _add(self, step: Step, shape: Sequence[int]) -> None:
        self.steps.append(step)
        self.shapes.append([*shape])

    def _leaf(self, shape: Sequence[int], wanted: bool | None = None) -> int:
        wanted = self.random.random() < 0.8 if wanted is None else wanted
        self.leaves.append((shape, wanted, self.random.choice(["dense", "transposed", "apart", "shifted"])))
        return len(self.leaves) - 1

    def _broadcasting(self, shape: Sequence[int]) -> int:
        return self._leaf([1 if self.random.random() < 0.4 else size for size in shape])

    def _current(self) -> tuple[int, list[int]]:
        return len(self.shapes) - 1, self.shapes[-1]

    def _activation(self) -> None:
        (h, shape), draw = self._current(), self.random
        name, dim = draw.choice([*ACTIVATIONS]), draw.randrange(-len(shape), len(shape))
        in_place = name in IN_PLACE and draw.random() < 0.4
        bias = self._leaf([shape[dim]]) if draw.random() < 0.4 else None
        residual = self._broadcasting(shape) if draw.random() < 0.4 else None
        earlier = [place for place, each in enumerate(self.shapes) if each == shape]  # results that a residual may be
        result = draw.choice(earlier) if residual is None and draw.random() < 0.2 else None

        def step(library: Any, values: list[Tensor], leaves: list[Tensor]) -> Tensor:
            added = _at(values, result) if residual is None else leaves[residual]
            return library.activation(name, values[h], in_place, _at(leaves, bias), dim, added)

        self._add(step, shape)

    def _gated(self) -> None:
        (h, shape), draw = self._current(), self.random
        name, even = draw.choice([*GATES]), [d for d, size in enumerate(shape) if size % 2 == 0]
        options: dict[str, Any] = {"gate": "last"} if draw.random() < 0.3 else {}
        result, up = [*shape], None
        if even and draw.random() < 0.6:
            dim = draw.choice(even)
            result[dim] //= 2
            options |= {"dim": dim - draw.choice([0, len(shape)]), "layout": draw.choice(["halves", "interleaved"])}
        else:
            up = self._broadcasting(shape)
        weight = self._leaf(result[:-1]) if len(shape) > 1 and draw.random() < 0.3 else None

        def step(library: Any, values: list[Tensor], leaves: list[Tensor]) -> Tensor:
            return library.gated(name, values[h], _at(leaves, up), _at(leaves, weight), **options)

        self._add(step, result)

    def _softmax(self) -> None:
        (h, shape), draw = self._current(), self.random
        name, dim = draw.choice(["softmax", "log_softmax"]), draw.randrange(-len(shape), len(shape))
        mask = self._broadcasting(shape) if draw.random() < 0.3 else None
        scale, save = draw.choice([1.0, 0.5, -2.0]), draw.choice(["output", "input"])

        def step(library: Any, values: list[Tensor], leaves: list[Tensor]) -> Tensor:
            return getattr(library, name)(values[h], dim, scale=scale, mask=_at(leaves, mask), save=save)

        self._add(step, shape)

    def _prelu(self) -> None:
        h, shape = self._current()
        weight = self._leaf([shape[1]] if len(shape) > 1 and self.random.random() < 0.7 else [1])
        self._add(lambda library, values, leaves: library.prelu(values[h], leaves[weight]), shape)

    def _view(self) -> None:
        (h, shape), draw = self._current(), self.random
        views: list[tuple[Callable[[Tensor], Tensor], list[int]]] = [
            (lambda x: x.reshape(-1), [math.prod(shape)]),
            (lambda x: x.flip(0), shape),
            (lambda x: x.expand(2, *x.shape), [2, *shape]),
            (lambda x: x[..., : x.shape[-1] // 2], [*shape[:-1], shape[-1] // 2]),
            (lambda x: x.movedim(0, -1), [*shape[1:], shape[0]]),
        ]
        view, result = draw.choice([each for each in views if 0 < math.prod(each[1]) < 500])
        self._add(lambda library, values, leaves: view(values[h]), result)

    def _change(self) -> None:
        h, shape = self._current()
        by = self._leaf(shape)
        change = self.random.choice([lambda x, _: x.mul_(1.5), lambda x, t: x.add_(t), lambda x, t: x.clone().mul_(t)])
        self._add(lambda library, values, leaves: change(values[h], leaves[by]), shape)


def _at(tensors: list[Tensor], place: int | None) -> Tensor | None:
    return None if place is None else tensors[place]


def _laid_out(leaf: Tensor, layout: str) -> Tensor:
    """A copy of the leaf in another memory layout."""
    if layout == "transposed" and leaf.dim() > 1:
        return leaf.mT.clone(memory_format=torch.contiguous_format).mT
    if layout == "apart":
        return torch.stack((leaf, leaf.detach()), -1)[..., 0]
    if layout == "shifted":
        return torch.cat((leaf.detach().reshape(-1)[:1], leaf.reshape(-1)))[1:].view(leaf.shape)
    return leaf


def _weights(y: Tensor) -> Tensor:
    return torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)


def _weighed(y: Tensor) -> Tensor:
    return (y * _weights(y)).sum()


def _backward(f: Callable, leaves: list[Tensor], twice: bool = False) -> list[Tensor | None]:
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y = f(*leaves)
    found = torch.autograd.grad(_weighed(y), leaves, allow_unused=True, create_graph=twice)
    terms = [_weighed(g) for g in found if twice and g is not None]
    second: Sequence[Tensor | None] = [None] * len(leaves)
    if terms and sum(terms).requires_grad:
        second = torch.autograd.grad(sum(terms), leaves, allow_unused=True)
    return [y.detach(), *found, *second]


def _loss(f: Callable) -> Callable:
    return lambda *leaves: _weighed(f(*leaves))


def _gradients(f: Callable, leaves: list[Tensor]) -> Callable:
    return grad(_loss(f), argnums=tuple(range(len(leaves))))


def _pulled_back(f: Callable, leaves: list[Tensor]) -> list[Tensor]:
    y, pull = vjp(f, *leaves)
    return [y, *vmap(pull)(torch.stack((_weights(y), 2 - _weights(y))))]


CONTEXTS: dict[str, Callable[[Callable, list[Tensor]], Sequence[Tensor | None]]] = {
    "backward": _backward,
    "second": lambda f, leaves: _backward(f, leaves, twice=True),
    "checkpoint": lambda f, leaves: _backward(lambda *given: checkpoint(f, *given, use_reentrant=False), leaves),
    "compile": lambda f, leaves: _backward(torch.compile(f, backend="aot_eager"), leaves),
    "grad": lambda f, leaves: _gradients(f, leaves)(*leaves),
    "vmap of grad": lambda f, leaves: vmap(_gradients(f, leaves))(*[torch.stack((leaf, leaf / 2)) for leaf in leaves]),
    "vmap": lambda f, leaves: [vmap(lambda first: f(first, *leaves[1:]))(torch.stack((leaves[0], leaves[0] / 2)))],
    "vmap of vjp": _pulled_back,
    "jvp": lambda f, leaves: jvp(f, tuple(leaves), tuple(map(_weights, leaves))),
    "jacrev": lambda f, leaves: [jacrev(f)(*leaves)],
    "jacfwd": lambda f, leaves: [jacfwd(f)(*leaves)],
    "hessian": lambda f, leaves: [hessian(_loss(f))(*leaves)],
}
SAME_IN_PYTORCH = {"checkpoint": "backward", "compile": "backward"}  # there, changes in place of what is saved are errors


def check(context: str, seed: int) -> bool:
    """Compares a program's results; returns whether PyTorch accepts it."""
    program = Program(seed)
    inputs = program.inputs()
    wanted = [place for place, (_, is_wanted, _) in enumerate(program.leaves) if is_wanted]

    def found(library: Any, context: str) -> Sequence[Tensor | None]:
        def f(*leaves: Tensor) -> Tensor:
            given = dict(zip(wanted, leaves, strict=True))
            return program.run(library, [given.get(place, each) for place, each in enumerate(inputs)])

        return CONTEXTS[context](f, [inputs[place].clone() for place in wanted])

    torch._dynamo.reset()
    try:
        expected = found(PyTorch, SAME_IN_PYTORCH.get(context, context))
    except RuntimeError:  # a change in place of what overlaps, or of what was saved
        return False
    try:
        found(Ours, "backward")
    except RuntimeError as error:  # an activation may save its output where PyTorch's saves its input
        assert "modified by an inplace operation" in str(error), f"seed {seed}"
        return False
    for ours, theirs in zip(found(Ours, context), expected, strict=True):
        if ours is None or theirs is None:
            other = theirs if ours is None else ours
            assert other is None or not other.any(), f"seed {seed}, {context}: a gradient is missing"
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8, msg=lambda text: f"seed {seed}, {context}: {text}")
    return True


@pytest.mark.parametrize("many", [False, SLOW(True)])
@pytest.mark.parametrize("context", CONTEXTS)
def test_random_programs(context: str, many: bool) -> None:
    programs = ((12, 240) if context == "compile" else (120, 4000))[many]
    assert sum(check(context, seed) for seed in range(programs)) > programs / 2  # the others are errors in PyTorch too
