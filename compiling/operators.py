"""The operators that graphs of torch.compile and torch.export contain.

The operators of an activation N, whose names are the same in every process so that saved programs find them, are

  jitact::N(Tensor x, others..., Scalar a, ..., *, str save, str version) -> Tensor
  jitact::N_gradient(Tensor dy, Tensor x, others..., Scalar a, ..., *, str version) -> Tensor
  jitact::N_gradient_from_output(Tensor dy, Tensor y, others..., Scalar a, ..., *, str version) -> Tensor

where ``others`` are the tensors other than ``x``. If several tensors have gradients, ``N_gradient`` also takes a bit mask,
``int wanted``, and returns ``Tensor[]``. No kernel is compiled or loaded before an operator is called on real tensors. If the
kernel file can be translated to torch operations, Inductor compiles those instead, and fuses them with their neighbours.
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
from ..configs import is_transformed
from ..kernels.loader.lock import ThreadLock
from ..kernels.loader.source import DEVICE
from ..records import Activation
from . import seeds as seeds  # registers the operator that draws them
from .formulas import SELECTING, Formula, Unreadable
from .inductor import dissolve

__all__ = ["Operators", "operators"]

_made: dict[str, Operators] = {}
_lock = ThreadLock()


def operators(record: Activation, fast_math: bool, recorded: Callable[..., Tensor]) -> Operators:
    """The operators of an activation, registered at the first call.

    Args:
        record: the activation's record.
        fast_math: whether its kernels are built with ``-use_fast_math``.
        recorded: ``recorded(record, arguments, fast_math)`` applies the activation with autograd outside of graphs.
    """
    # The fingerprint is that of a custom activation's definition: in another process its name may mean another one.
    name = "_".join(filter(None, [record.source.name, record.fingerprint, "fast_math" if fast_math else ""]))
    with _lock:
        if name not in _made:
            _made[name] = Operators(name, record, fast_math, recorded)
    return _made[name]


class Operators:
    """The operators of one activation.

    They live as long as the process, as graphs may call them; the record of a custom activation does not.

    Attributes:
        name: the name of the forward operator, and the prefix of the others' names.
        record: the activation's record; for a custom activation a copy, so that its own is freed when its name is redefined.
        formula: the torch operations that replace them in Inductor; None if there are none.
        version: a hash of the formula's sources, an argument of calls so that compilers' caches tell versions apart.
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
            self._fake_gradients if several else _like_kept,
        )
        formulas = {"": self.formula.forward, "_gradient": self.formula.gradients if several else self.formula.gradient}
        if "output" in self.formula.saves:
            schema = f"(Tensor dy, Tensor y{rest}, *, {version}) -> Tensor"
            self._add("_gradient_from_output", schema, self._gradient_from_output, _like_kept)
            formulas["_gradient_from_output"] = self.formula.gradient_from_output
        # Gradients that read only a comparison's outcome are replaced before partitioning, which then saves that, as one byte.
        # Sums over channels and rows cannot be lowered as elementwise.
        elementwise, by_bit = not signature.of("channel", "row"), "keeps" in signature.functions
        for kind, formula in formulas.items():
            late = elementwise and record.source.name not in SELECTING and not (by_bit and kind)
            dissolve(self.operator(kind), formula, late=late)

    def _add(self, kind: str, schema: str, real: Callable, fake: Callable) -> None:
        # Operators that Inductor replaces take any strides, and may be fused.
        of_layout = torch.Tag.pointwise if self.formula else torch.Tag.needs_exact_strides
        self._library.define(f"{self.name}{kind}{schema}", tags=(torch.Tag.pt2_compliant_tag, of_layout))
        self._library.impl(f"{self.name}{kind}", real, "CompositeExplicitAutograd")
        self._library.impl(f"{self.name}{kind}", fake, "Meta")

    def operator(self, kind: str = "") -> torch._ops.OpOverload:
        """``jitact::<name><kind>``."""
        return getattr(torch.ops.jitact, self.name + kind).default

    def _kernel(self, kind: str) -> Callable:
        """An operator of the compiled kernel, which is built or loaded if need be."""
        library = kernels.load(self.record.source, fast_math=self.fast_math)
        return getattr(torch.ops.jitact, f"{library.name}_{kind}").default

    def _forward(self, *operands: Tensor | float, save: str = "", version: str = "") -> Tensor:
        return self._kernel("forward")(*operands)

    def _in_pytorch(self, *operands: Tensor | float, save: str = "", version: str = "") -> Tensor:
        """The decomposition for programs that may contain only PyTorch's operators, such as those for ONNX."""
        return (self.record.reference if self.record.has_reference else self.formula.forward)(*operands)

    def _gradient(self, dy: Tensor, *operands: Tensor | float, version: str = "") -> Tensor:
        return self._kernel("backward")(dy, *operands)

    def _gradients(self, dy: Tensor, *operands: Tensor | float, wanted: int, version: str = "") -> list[Tensor]:
        return list(self._kernel("backward")(dy, *operands, wanted))

    def _gradient_from_output(self, dy: Tensor, y: Tensor, *others: Tensor | float, version: str = "") -> Tensor:
        has_own = "backward_from_output" in self.record.source.signature.functions  # else the slope is the same at y as at x
        return self._kernel("backward_from_output" if has_own else "backward")(dy, y, *others)

    def _fake_gradients(self, dy: Tensor, *operands: Tensor | float, wanted: int, version: str = "") -> list[Tensor]:
        layout, found = self.record.layout, []
        for g, place in enumerate(layout.places):
            like = operands[0 if place < layout.elements else place]
            found.append(torch.empty_like(like) if wanted >> g & 1 else like.new_empty(0))
        return found

    def _differentiable(self, *arguments: Any, save: str = "", version: str = "") -> Tensor:
        """The implementation for the Autograd dispatch key."""
        tensors = arguments[: len(self.record.layout.tensors)]
        transformed = is_transformed()
        if not transformed and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            with torch._C._AutoDispatchBelowAutograd():
                return self.operator()(*arguments, save=save, version=version)
        if self.formula is None or transformed or detect_fake_mode(tensors) is None:
            return self.recorded(self.record, arguments, self.fast_math)
        return _Recorded.apply(self, save or self._save(tensors), *arguments)

    def _save(self, tensors: tuple[Tensor, ...]) -> str:
        """What backward saves in a graph by default: the output, where eager mode saves it or a bit, else the input.

        The output suffices only for the gradient of the first tensor.
        """
        by_output = self.record.saves[0] in ("output", "bit") and "output" in self.formula.saves
        others = any(tensors[place].requires_grad for place in self.record.layout.places[1:])
        return "output" if by_output and not others else "input"


def _copied(record: Activation, operator: Callable[..., Tensor]) -> Activation:
    """A copy of a record without references to its objects, for operators in graphs, whose arguments were checked before."""
    reference = record.reference if record.has_reference else operator  # not the record's compiled forward in float64
    return replace(record, reference=reference, exact=None, requires=(), in_eval=None)


def _like_first(x: Tensor, *_: Any, **__: str) -> Tensor:
    return torch.empty_like(x)


def _like_kept(dy: Tensor, kept: Tensor, *_: Any, **__: str) -> Tensor:
    return torch.empty_like(kept)  # a gradient has the saved tensor's strides, whatever dy's are


class _Recorded(torch.autograd.Function):
    """An activation in a training graph: one operator forward and one backward."""

    @staticmethod
    def forward(ctx: Any, of: Operators, save: str, *arguments: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            y = of.operator()(*arguments, version=of.version)
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        ctx.of, ctx.save, ctx.numbers = of, save, arguments[len(tensors) :]
        layout, tensors[0] = of.record.layout, y if save == "output" else tensors[0]
        wanted = [place for place in layout.places if place not in layout.passed and ctx.needs_input_grad[place + 2]]
        # Tensors that none of these gradients reads are not saved, so they may be changed in place.
        ctx.unread = {
            place: (each.shape, each.dtype)
            for place, each in enumerate(tensors)
            if layout.reads and not any(layout.reads[by] >> place & 1 for by in wanted) and (place or save == "input")
        }
        ctx.save_for_backward(*[each for place, each in enumerate(tensors) if place not in ctx.unread])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple:
        of, layout, tensors = ctx.of, ctx.of.record.layout, list(ctx.saved_tensors)
        for place, (shape, dtype) in sorted(ctx.unread.items()):
            tensors.insert(place, dy if place < layout.elements else dy.new_empty(shape, dtype=dtype))
        operands = (*tensors, *ctx.numbers)
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for place in layout.passed:
            found[place + 2] = dy
        wanted = [place not in layout.passed and ctx.needs_input_grad[place + 2] for place in layout.places]
        if not any(wanted):
            return tuple(found)
        if ctx.save == "output":
            found[2] = of.operator("_gradient_from_output")(dy, *operands, version=of.version)
        elif len(wanted) == 1:
            found[layout.places[0] + 2] = of.operator("_gradient")(dy, *operands, version=of.version)
        else:
            bits = sum(1 << g for g, each in enumerate(wanted) if each)
            gradients = of.operator("_gradient")(dy, *operands, wanted=bits, version=of.version)
            for place, gradient, each in zip(layout.places, gradients, wanted, strict=True):
                if each:
                    found[place + 2] = gradient
        return tuple(found)


@cache
def _implementation() -> str:
    """The source text of all that translates kernel files to torch operations."""
    here = Path(__file__).parent
    return "".join(path.read_text() for path in (*sorted(here.glob("*.py")), DEVICE / "math_dual.cuh"))
