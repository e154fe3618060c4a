"""The operators that graphs hold: torch.compile's, torch.export's, those of a program that was saved.

An activation N has, under names that are the same in every process,

  jitact::N(Tensor x, others..., Scalar a, ..., *, str save, str version) -> Tensor
  jitact::N_gradients(Tensor dy, Tensor x, others..., Scalar a, ..., *, int wanted) -> Tensor[]
  jitact::N_gradient_from_output(Tensor dy, Tensor y, others..., Scalar a, ...) -> Tensor

They exist without a kernel: one is compiled, or loaded, when they are called on tensors that hold something. Inductor does not call
them where the kernel file can be read as torch operations, but fuses those with what is around. What has several tensors or numbers
takes them as the kernel's operators do; ``wanted`` has a bit for each gradient.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from .. import kernels
from ..kernels.loader.source import DEVICE
from ..records import Activation
from .formulas import Formula, Unreadable

__all__ = ["Operators", "operators"]

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_made: dict[tuple[str, bool], Operators] = {}
_lock = threading.RLock()


def operators(record: Activation, fast_math: bool, recorded: Callable[..., Tensor]) -> Operators:
    """The operators of an activation, made at the first call.

    Args:
        record: of the activation.
        fast_math: whether its kernels are built with ``-use_fast_math``.
        recorded: ``recorded(record, arguments, fast_math)`` is the activation where autograd records it, on real tensors.
    """
    key = _name(record, fast_math), fast_math
    with _lock:
        if key not in _made:
            _made[key] = Operators(record, fast_math, recorded)
    return _made[key]


def _name(record: Activation, fast_math: bool) -> str:
    """What its operators are called: a definition's by what it computes, as others may have its name elsewhere."""
    return "_".join(filter(None, [record.name, record.fingerprint, "fast_math" if fast_math else ""]))


class Operators:
    """The operators of one activation.

    Attributes:
        name: of the first of them, with which the others' names begin.
        formula: what Inductor gets in their place; None where they stay whole.
        version: changes with that, so that a compiler's cache does not take one for the other.
    """

    def __init__(self, record: Activation, fast_math: bool, recorded: Callable[..., Tensor]) -> None:
        """Registers them."""
        self.record, self.fast_math, self.recorded = record, fast_math, recorded
        self.name = _name(record, fast_math)
        try:
            self.formula = Formula(record.source, fast_math)
        except Unreadable:
            self.formula = None
        self.version = hashlib.sha256((_implementation() + record.source.text).encode()).hexdigest()[:8]
        self._library = torch.library.Library("jitact", "FRAGMENT")
        self._register()

    def _register(self) -> None:
        signature = self.record.source.signature
        others = [f"Tensor {name}_" for name in signature.tensors[1:]]
        others += ["Tensor seed"] if signature.of("random") else []
        others += [f"Scalar {name}_" for name in signature.of("number")]
        rest = "".join(f", {other}" for other in others)
        self._add("", f"(Tensor x{rest}, *, str save='', str version='') -> Tensor", self._forward, _like_first)
        self._library.impl(self.name, self._differentiable, "Autograd")
        if self.formula is None:
            return
        self._add("_gradients", f"(Tensor dy, Tensor x{rest}, *, int wanted) -> Tensor[]", self._gradients, self._fake_gradients)
        self._dissolve("", lambda *operands, **_: self.formula.forward(*operands))
        self._dissolve("_gradients", self.formula.backward)
        if "output" in self.formula.saves:
            self._add("_gradient_from_output", f"(Tensor dy, Tensor y{rest}) -> Tensor", self._gradient_from_output, _like_first)
            self._dissolve("_gradient_from_output", self.formula.backward_from_output)

    def _add(self, kind: str, schema: str, real: Callable, fake: Callable) -> None:
        self._library.define(f"{self.name}{kind}{schema}", tags=_TAGS)
        self._library.impl(f"{self.name}{kind}", real, "CompositeExplicitAutograd")
        self._library.impl(f"{self.name}{kind}", fake, "Meta")

    def _dissolve(self, kind: str, formula: Callable) -> None:
        """Gives Inductor what to put in place of an operator: also in the copy of its table that it made when it first ran."""
        from torch._inductor import decomposition

        for table in (decomposition.decompositions, decomposition.fast_random_decomps()):
            table[self.operator(kind)] = formula

    def operator(self, kind: str = "") -> torch._ops.OpOverload:
        """``jitact::<name><kind>``."""
        return getattr(torch.ops.jitact, self.name + kind).default

    def _kernel(self, kind: str) -> Callable:
        """The compiled operator."""
        library = kernels.load(self.record.source, fast_math=self.fast_math)
        return getattr(torch.ops.jitact, f"{library.name}_{kind}").default

    def _forward(self, *operands: Tensor | float, **_: str) -> Tensor:
        return self._kernel("forward")(*operands)

    def _gradients(self, dy: Tensor, *operands: Tensor | float, wanted: int) -> list[Tensor]:
        if len(self.record.layout.places) == 1:
            return [self._kernel("backward")(dy, *operands)]
        return list(self._kernel("backward")(dy, *operands, wanted))

    def _gradient_from_output(self, dy: Tensor, y: Tensor, *others: Tensor | float) -> Tensor:
        has_kernel = "backward_from_output" in self.record.source.signature.functions  # else y stands for x, as it may
        return self._kernel("backward_from_output" if has_kernel else "backward")(dy, y, *others)

    def _fake_gradients(self, dy: Tensor, *operands: Tensor | float, wanted: int) -> list[Tensor]:
        found, (tensors, elements, _, places) = [], self.record.layout
        for g, place in enumerate(places):
            like = operands[0] if place < elements else operands[place]
            found.append(torch.empty_like(like) if wanted >> g & 1 else like.new_empty(0))
        return found

    def _differentiable(self, *arguments: Any, save: str = "", version: str = "") -> Tensor:
        """What is run where autograd looks on."""
        tensors = arguments[: len(self.record.layout.tensors)]
        transformed = torch._C._functorch.maybe_current_level() is not None
        if not transformed and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            with torch._C._AutoDispatchBelowAutograd():
                return self.operator()(*arguments, save=save, version=version)
        if self.formula is None or transformed or detect_fake_mode(tensors) is None:
            return self.recorded(self.record, arguments, self.fast_math)
        return _Recorded.apply(self, save or self._save(), *arguments)

    def _save(self) -> str:
        """What backward starts from, where nobody says: from what the compiler need not keep, or can make again, if it is exact."""
        return "output" if self.record.saves[0] in ("output", "bit") and "output" in self.formula.saves else "input"


def _like_first(x: Tensor, *_: Any, **__: str) -> Tensor:
    return torch.empty_like(x)


class _Recorded(torch.autograd.Function):
    """An activation that is traced for a graph: forward and backward are an operator each."""

    @staticmethod
    def forward(ctx: Any, of: Operators, save: str, *arguments: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            y = of.operator()(*arguments)
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if save == "output":
            tensors[0] = y
        ctx.save_for_backward(*tensors)
        ctx.of, ctx.save, ctx.numbers = of, save, arguments[len(tensors) :]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple:
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        operands = (*ctx.saved_tensors, *ctx.numbers)
        if ctx.save == "output":
            found[2] = ctx.of.operator("_gradient_from_output")(dy, *operands)
            return tuple(found)
        places = [place + 2 for place in ctx.of.record.layout.places]
        wanted = sum(1 << g for g, place in enumerate(places) if ctx.needs_input_grad[place])
        for place, gradient in zip(places, ctx.of.operator("_gradients")(dy, *operands, wanted=wanted), strict=True):
            found[place] = gradient if ctx.needs_input_grad[place] else None
        return tuple(found)


@cache
def _implementation() -> str:
    """What turns kernel files into torch operations, as text."""
    here = Path(__file__).parent
    return "".join(path.read_text() for path in (*sorted(here.glob("*.py")), DEVICE / "math_dual.cuh"))
