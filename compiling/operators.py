"""The operators that graphs hold: torch.compile's, torch.export's, those of a program that was saved.

An activation N has, under names that are the same in every process,

  jitact::N(Tensor x, others..., Scalar a, ..., *, str save, str version) -> Tensor
  jitact::N_gradient(Tensor dy, Tensor x, others..., Scalar a, ..., *, str version) -> Tensor
  jitact::N_gradient_from_output(Tensor dy, Tensor y, others..., Scalar a, ..., *, str version) -> Tensor

where ``others`` are the tensors beside ``x``; with gradients of several tensors ``N_gradient`` takes ``int wanted`` too, with a
bit for each, and returns ``Tensor[]``. They exist without a kernel: one is compiled, or loaded, when they are called on tensors
that hold something. Inductor does not call them where the kernel file can be read as torch operations: it gets those, and fuses
them with what is around.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._decomp import register_decomposition
from torch._guards import detect_fake_mode

from .. import kernels
from ..kernels.loader.lock import ThreadLock
from ..kernels.loader.source import DEVICE
from ..records import Activation
from .formulas import SELECTING, Formula, Unreadable
from .inductor import dissolve

__all__ = ["Operators", "operators"]

_made: dict[str, Operators] = {}
_lock = ThreadLock()


def operators(record: Activation, fast_math: bool, recorded: Callable[..., Tensor]) -> Operators:
    """The operators of an activation, made at the first call.

    Args:
        record: of the activation.
        fast_math: whether its kernels are built with ``-use_fast_math``.
        recorded: ``recorded(record, arguments, fast_math)`` is the activation as autograd records it outside of graphs.
    """
    # A definition is called by what it computes: in another process, another may have its name.
    name = "_".join(filter(None, [record.source.name, record.fingerprint, "fast_math" if fast_math else ""]))
    with _lock:
        if name not in _made:
            _made[name] = Operators(name, record, fast_math, recorded)
    return _made[name]


class Operators:
    """The operators of one activation.

    They stay for as long as the process runs, as there may be graphs that call them. A definition's record does not.

    Attributes:
        name: of the first of them, with which the others' names begin.
        record: of the activation; of a definition a copy, so that its own is collected when its name is defined again.
        formula: what Inductor gets in their place; None where they stay whole.
        version: changes with that, so that a compiler's cache does not take one for the other.
    """

    def __init__(self, name: str, record: Activation, fast_math: bool, recorded: Callable[..., Tensor]) -> None:
        """Registers them."""
        self.name, self.fast_math, self.recorded = name, fast_math, recorded
        try:
            self.formula = Formula(record.source, fast_math)
        except Unreadable:
            self.formula = None
        self.version = hashlib.sha256((_implementation() + record.source.full_text).encode()).hexdigest()[:8]
        self._library = torch.library.Library("jitact", "FRAGMENT")
        signature = record.source.signature
        others = [f"Tensor {each}_" for each in signature.tensors[1:]]
        if record.layout.draws:
            others.append("Tensor seed")
        others += [f"Scalar {each}_" for each in signature.of("number")]
        rest, version = "".join(f", {other}" for other in others), "str version=''"
        self._add("", f"(Tensor x{rest}, *, str save='', {version}) -> Tensor", self._forward, _like_first)
        self._library.impl(name, self._differentiable, "Autograd")
        self.record = record = _copied(record, self.operator()) if record.fingerprint else record
        if not record.layout.draws and (record.has_reference or self.formula):
            register_decomposition(self.operator())(self._in_pytorch)
        if self.formula is None:
            return
        several = len(record.layout.places) > 1
        wanted, result = (", int wanted", "Tensor[]") if several else ("", "Tensor")
        self._add(
            "_gradient",
            f"(Tensor dy, Tensor x{rest}, *{wanted}, {version}) -> {result}",
            self._gradients if several else self._gradient,
            self._fake_gradients if several else _like_first,
        )
        formulas = {"": self.formula.forward, "_gradient": self.formula.gradients if several else self.formula.gradient}
        if "output" in self.formula.saves:
            schema = f"(Tensor dy, Tensor y{rest}, *, {version}) -> Tensor"
            self._add("_gradient_from_output", schema, self._gradient_from_output, _like_first)
            formulas["_gradient_from_output"] = self.formula.gradient_from_output
        # What is kept of a few operations is better found among them; a sum over elements is not elementwise.
        elementwise, by_bit = not signature.of("channel", "row"), "keeps" in signature.functions
        for kind, formula in formulas.items():
            late = elementwise and record.source.name not in SELECTING and not (by_bit and kind)
            dissolve(self.operator(kind), formula, late=late)

    def _add(self, kind: str, schema: str, real: Callable, fake: Callable) -> None:
        # What dissolves takes any strides, and may be fused.
        of_layout = torch.Tag.pointwise if self.formula else torch.Tag.needs_exact_strides
        self._library.define(f"{self.name}{kind}{schema}", tags=(torch.Tag.pt2_compliant_tag, of_layout))
        self._library.impl(f"{self.name}{kind}", real, "CompositeExplicitAutograd")
        self._library.impl(f"{self.name}{kind}", fake, "Meta")

    def operator(self, kind: str = "") -> torch._ops.OpOverload:
        """``jitact::<name><kind>``."""
        return getattr(torch.ops.jitact, self.name + kind).default

    def _kernel(self, kind: str) -> Callable:
        """A compiled operator."""
        library = kernels.load(self.record.source, fast_math=self.fast_math)
        return getattr(torch.ops.jitact, f"{library.name}_{kind}").default

    def _forward(self, *operands: Tensor | float, save: str = "", version: str = "") -> Tensor:
        return self._kernel("forward")(*operands)

    def _in_pytorch(self, *operands: Tensor | float, save: str = "", version: str = "") -> Tensor:
        """What programs get that are to hold PyTorch's operators alone, such as those for ONNX."""
        return (self.record.reference if self.record.has_reference else self.formula.forward)(*operands)

    def _gradient(self, dy: Tensor, *operands: Tensor | float, version: str = "") -> Tensor:
        return self._kernel("backward")(dy, *operands)

    def _gradients(self, dy: Tensor, *operands: Tensor | float, wanted: int, version: str = "") -> list[Tensor]:
        return list(self._kernel("backward")(dy, *operands, wanted))

    def _gradient_from_output(self, dy: Tensor, y: Tensor, *others: Tensor | float, version: str = "") -> Tensor:
        there = "backward_from_output" in self.record.source.signature.functions  # else y does as well as x
        return self._kernel("backward_from_output" if there else "backward")(dy, y, *others)

    def _fake_gradients(self, dy: Tensor, *operands: Tensor | float, wanted: int, version: str = "") -> list[Tensor]:
        layout, found = self.record.layout, []
        for g, place in enumerate(layout.places):
            like = operands[0 if place < layout.elements else place]
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
        return _Recorded.apply(self, save or self._save(tensors), *arguments)

    def _save(self, tensors: tuple[Tensor, ...]) -> str:
        """What backward starts from in a graph, where nobody says: the output, where its slope is exact or the first choice.

        An output tells the gradient of the first tensor alone.
        """
        by_output = self.record.saves[0] in ("output", "bit") and "output" in self.formula.saves
        others = any(tensors[place].requires_grad for place in self.record.layout.places[1:])
        return "output" if by_output and not others else "input"


def _copied(record: Activation, operator: Callable[..., Tensor]) -> Activation:
    """A copy of a record that holds nothing of it, whose operator is in graphs; which call it with what is checked."""
    reference = record.reference if record.has_reference else operator  # else the record's own compiled forward, in float64
    return replace(record, reference=reference, exact=None, requires=(), in_eval=None)


def _like_first(x: Tensor, *_: Any, **__: str) -> Tensor:
    return torch.empty_like(x)


class _Recorded(torch.autograd.Function):
    """An activation as a training graph has it: an operator forward and one backward."""

    @staticmethod
    def forward(ctx: Any, of: Operators, save: str, *arguments: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            y = of.operator()(*arguments, version=of.version)
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        ctx.of, ctx.save, ctx.numbers = of, save, arguments[len(tensors) :]
        laid, tensors[0] = of.record.layout, y if save == "output" else tensors[0]
        wanted = [place for place in laid.places if place not in laid.passed and ctx.needs_input_grad[place + 2]]
        # Of what none of these reads nothing is kept, and others may change it.
        ctx.unread = {
            place: (each.shape, each.dtype)
            for place, each in enumerate(tensors)
            if laid.reads and not any(laid.reads[by] >> place & 1 for by in wanted) and (place or save == "input")
        }
        ctx.save_for_backward(*[each for place, each in enumerate(tensors) if place not in ctx.unread])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple:
        of, laid, tensors = ctx.of, ctx.of.record.layout, list(ctx.saved_tensors)
        for place, (shape, dtype) in sorted(ctx.unread.items()):
            tensors.insert(place, dy if place < laid.elements else dy.new_empty(shape, dtype=dtype))
        operands = (*tensors, *ctx.numbers)
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for place in laid.passed:
            found[place + 2] = dy
        wanted = [place not in laid.passed and ctx.needs_input_grad[place + 2] for place in laid.places]
        if not any(wanted):
            return tuple(found)
        if ctx.save == "output":
            found[2] = of.operator("_gradient_from_output")(dy, *operands, version=of.version)
        elif len(wanted) == 1:
            found[laid.places[0] + 2] = of.operator("_gradient")(dy, *operands, version=of.version)
        else:
            bits = sum(1 << g for g, each in enumerate(wanted) if each)
            gradients = of.operator("_gradient")(dy, *operands, wanted=bits, version=of.version)
            for place, gradient, each in zip(laid.places, gradients, wanted, strict=True):
                if each:
                    found[place + 2] = gradient
        return tuple(found)


@cache
def _implementation() -> str:
    """What turns kernel files into torch operations, as text."""
    here = Path(__file__).parent
    return "".join(path.read_text() for path in (*sorted(here.glob("*.py")), DEVICE / "math_dual.cuh"))
