"""The record of an activation: everything that Python knows about it, and the checks of its options."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels import KernelSource, Work
from ..kernels.loader.lock import ThreadLock
from ..kernels.loader.signature import Signature
from ..kernels.loader.slopes import from_bit_source, from_output_source, gradients_source
from ..kernels.loader.source import NEXT_TO_NOTHING
from .arguments import (
    AROUND,
    GATED,
    OF_MODULES,
    OPTIONS,
    Arguments,
    as_number,
    check_switch,
    shown,
)
from .tracing import as_constant

__all__ = [
    "Activation",
    "Channel",
    "Gating",
    "Requirement",
    "Row",
    "by_token",
    "given_in_calls",
    "is_plain",
    "layout",
    "library",
]


by_token: weakref.WeakValueDictionary[str, Activation] = weakref.WeakValueDictionary()
"""Every record by its token: a string constant, as torch.compile can put into a graph, where it cannot put a record."""
library: dict[str, Activation] = {}
"""The records of the library itself by name; their names cannot be defined again."""
_naming = ThreadLock()


class Requirement(NamedTuple):
    """A condition on parameters, as text for messages and as a predicate. With ``save``, it applies to that choice only."""

    text: str
    holds: Callable[..., bool]
    save: str | None = None


class Gating(NamedTuple):
    """How a single tensor holds ``gate`` and ``up`` of a gated activation, by default.

    Attributes:
        gate: which of the two is the gate, "first" or "last".
        layout: "halves", or "interleaved" where elements of the two alternate.
        preset_of: the name of the activation that this one is with other defaults.
        of: the activation applied to the gate, where the formula is ``of(gate) * up``, as that of ``jitact.gated(of)`` is.
    """

    gate: str = "first"
    layout: str = "halves"
    preset_of: str = ""
    of: str = ""


class Channel(NamedTuple):
    """An operand with one value per channel of ``x``, or one for all channels. If it has a gradient, it is a learned weight.

    Attributes:
        init: the value that a new module fills it with.
        dim: the dimension of ``x`` that indexes its values.
        one: whether it always holds a single value, whatever the shape of ``x``. Kernels are faster if such operands come last.
    """

    init: float = 1.0
    dim: int = -1
    one: bool = False


@dataclass(frozen=True)
class Row:
    """An operand with one value per row of ``x``, of shape ``x.shape[:-1]``. It is an argument of calls, as ``x`` is."""


class Layout(NamedTuple):
    """The part of a kernel file's signature, and of what can be kept for backward, that calls need.

    Attributes:
        tensors: the names of the tensor operands, in the operators' order.
        saves: what can be kept for backward, the default first.
        elements: how many of the tensors are elementwise operands; these come first.
        draws: whether the kernel draws random numbers, so that the operator takes a seed.
        places: indices into ``tensors`` of those that backward returns gradients for, in the order in which it does.
        passed: indices of the tensors whose gradient is ``dy`` itself.
        reads: per tensor, a bit mask of the tensors that its gradient reads; empty if every gradient may read all of them.
        from_bit: the indices among ``places`` whose gradient needs only the saved bit.
    """

    tensors: tuple[str, ...]
    saves: tuple[str, ...]
    elements: int
    draws: bool
    places: tuple[int, ...]
    passed: tuple[int, ...]
    reads: tuple[int, ...]
    from_bit: tuple[int, ...]


class Made:
    """Holds what is derived from a record on demand, as attributes: torch.compile does not notice items added to a dict."""


@dataclass(eq=False)  # not frozen: torch.compile cannot read attributes of a frozen dataclass
class Activation:
    """One activation: everything that Python knows of it. The maths and the operands are declared in ``kernels/<name>.cu``.

    Attributes:
        name: canonical name, also the kernel file's.
        title: class name, the ``torch.nn`` counterpart's where there is one.
        formula: forward as text, for documents and messages.
        reference: the same function in PyTorch, ``reference(*tensors, *params)``; second derivatives and transforms use it.
        params: parameters after the tensors, with their defaults, in the order of ``torch.nn``'s constructor.
        inplace: whether the constructor takes ``inplace``, as ``torch.nn``'s does.
        declared_saves: overrides :attr:`saves`, which otherwise follows from the functions in the kernel file.
        gradient_from_output: ``dx`` from ``(dy, y, *params)`` in PyTorch, for second derivatives with ``save="output"``.
        module: the ``torch.nn`` class; None if there is none; then the module's ``Model`` is made from ``reference``.
        notes: further text for the docstring.
        exact: the function in PyTorch for float64 comparisons, if ``reference`` loses digits even in float64.
        requires: conditions on the parameters.
        aliases: further names; the title, and spellings that differ in case, ``_`` or ``-``, need none.
        variant: a constructor argument that selects among activations, and the activation's name for each of its values.
        work: how much a GPU computes per element, found by ``python -m jitact tune``.
        kernel: the source to compile, if not ``kernels/<name>.cu``; a preset uses the file of the activation it is a preset of.
        has_reference: whether ``reference`` is written in PyTorch operations. If not, it is the compiled forward in float64.
        zero_crossing: float32 errors count in ulp of at least this magnitude, as near a zero the result is a difference of
            larger terms.
        fingerprint: distinguishes definitions of one name in pickles; "" for the library's own, whose names are unique.
        channels: the operands with a value per channel, by name; a module owns them as parameters or buffers.
        dtypes: of those operands: "same" as x's, or an error; "promoted" with x to the dtype of the result; or each its "own".
        spans: an expression of the parameters that must be finite in the compute type: as text, and as a function of them.
        in_eval: from the parameters, the record and the parameters of the activation that this one is outside of training.
        in_python: Python expressions for exported files: the initial values of a channel operand, made of the arguments of
            ``module``'s constructor; for a parameter, what replaces it outside of training.
        transformers: names of the module classes in ``transformers`` that compute the same.
        added: the fused operands around the activation, such as a bias, which may be of another dtype than x.
        passed: the elementwise tensors whose gradient is ``dy`` itself.
        reads: per tensor, the tensors whose values its gradient reads; those that no gradient reads are not saved. A tensor
            that is not a key reads all.
        gating: set for gated activations, which take two tensors, ``gate`` and ``up``, or one that holds both.
        since: the version that added the name; folders saved before that may define another activation of this name.
    """

    name: str
    title: str
    formula: str
    reference: Callable[..., Tensor]
    params: tuple[tuple[str, float], ...] = ()
    inplace: bool = False
    declared_saves: tuple[str, ...] = ()
    gradient_from_output: Callable[..., Tensor] | None = None
    module: type[nn.Module] | None = None
    notes: str = ""
    exact: Callable[..., Tensor] | None = None
    requires: tuple[Requirement, ...] = ()
    aliases: tuple[str, ...] = ()
    variant: tuple[str, dict[str, str]] | None = None
    work: Work = NEXT_TO_NOTHING
    kernel: KernelSource | None = None
    zero_crossing: float = 0.0
    fingerprint: str = ""
    has_reference: bool = True
    channels: dict[str, Channel] = field(default_factory=dict)
    dtypes: str = "own"
    spans: tuple[str, Callable[..., float]] | None = None
    in_eval: Callable[..., tuple[Activation, tuple[float, ...]]] | None = None
    in_python: dict[str, str] = field(default_factory=dict)
    transformers: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    reads: dict[str, tuple[str, ...]] = field(default_factory=dict)
    gating: Gating | None = None
    since: str = ""

    def __post_init__(self) -> None:
        """Completes the record, and gives it a token: its name, with a number appended if a record of that name is alive.

        Raises:
            ValueError: ``kernel`` does not declare its functions correctly.
        """
        if self.kernel is not None:  # the library's own files are read at first use instead
            self._read_signature()
        with _naming:
            self.token, version = self.name, 1
            while self.token in by_token:
                version += 1
                self.token = f"{self.name}.{version}"
            by_token[self.token] = self
            if self.kernel is None:
                library[self.name] = self
        self.made = Made()
        self.make_function: Callable[[Activation], Callable[..., Tensor]] | None = None  # set with the module class
        self.configs: dict[tuple, Any] = {}  # the cache of configs.configured, and of gating.packed.packing

    @cached_property
    def source(self) -> KernelSource:
        """The source that the loader compiles."""
        file = (self.gating and self.gating.preset_of) or self.name
        return self.kernel or KernelSource.from_file(file, self.work)

    def _read_signature(self) -> Signature:
        """The kernel file's signature.

        Raises:
            ValueError: the file does not declare its functions correctly.
        """
        try:
            return self.source.signature
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    @cached_property
    def layout(self) -> Layout:
        """The part of the kernel file's signature that calls need."""
        signature = self._read_signature()
        tensors, saves = signature.tensors, self.declared_saves or signature.saves
        places = tuple(tensors.index(operand.name) for operand in signature.differentiable)
        passed = tuple(tensors.index(name) for name in self.passed)
        reads = tuple(sum(1 << tensors.index(read) for read in self.reads.get(name, tensors)) for name in tensors)
        reads = reads if any(each + 1 != 1 << len(tensors) for each in reads) else ()
        from_bit, draws = places[: signature.bit_gradients], bool(signature.of("random"))
        return Layout(tensors, saves, len(signature.of("element")), draws, places, passed, reads, from_bit)

    @cached_property
    def is_plain(self) -> bool:
        """Whether it takes only ``x`` and numbers, and computes the same in training and evaluation."""
        return not self.channels and self.in_eval is None and len(self.layout.tensors) == 1

    @property
    def saves(self) -> tuple[str, ...]:
        """What can be kept for backward, the default first."""
        return self.layout.saves

    @cached_property
    def gradients(self) -> Activation:
        """An activation that computes one gradient from the operands, ``dy`` and the parameters; ``which`` selects it."""
        return self._derived(gradients_source(self.source), (*self.params, ("which", 0.0)))

    @cached_property
    def from_output(self) -> Activation:
        """An activation that computes the gradient from the output, ``dy`` and the operands that are not elementwise."""
        return self._derived(from_output_source(self.source), self.params)

    @cached_property
    def from_bit(self) -> Activation:
        """An activation that computes one gradient from the saved bit, ``dy`` and the other operands; ``which`` selects it."""
        return self._derived(from_bit_source(self.source), (*self.params, ("which", 0.0)))

    def _derived(self, kernel: KernelSource, params: tuple[tuple[str, float], ...]) -> Activation:
        fields = (kernel.name, self.title, self.formula, self.reference)
        return Activation(*fields, params=params, kernel=kernel, has_reference=False)

    @property
    def unread(self) -> tuple[str, ...]:
        """The tensors whose values no gradient reads, leaving aside gradients that are ``dy`` itself."""
        tensors, reads = self.layout.tensors, self.layout.reads
        computed = [reads[place] for place in self.layout.places if place not in self.layout.passed] if reads else [-1]
        return tuple(name for place, name in enumerate(tensors) if not any(each >> place & 1 for each in computed))

    @cached_property
    def by_formula(self) -> bool:
        """Whether second derivatives come from the reference. If forward draws, the reference must take the mask, ``keep``."""
        if not self.has_reference or not self.layout.draws:
            return self.has_reference
        try:
            return "keep" in inspect.signature(self.reference).parameters
        except ValueError:  # a built-in function, whose signature cannot be inspected
            return False

    @property
    def equation(self) -> str:
        """The formula as an equation in its operands, for documents."""
        operands = self.source.signature.of("element", "channel", "row") if self.fingerprint else ("x",)
        return f"{self.name}({', '.join(operands)}) = {self.formula}"

    @property
    def equation_with_numbers(self) -> str:
        """The formula as an equation in its operands and parameters, for documents."""
        operands = self.source.signature.of("element", "channel", "row")
        return f"{self.name}({', '.join([*operands, *(name for name, _ in self.params)])}) = {self.formula}"

    @cached_property
    def given_in_calls(self) -> tuple[str, ...]:
        """The tensor operands that a module is called with: all but the channel operands, which it owns."""
        return tuple(name for name in self.source.signature.of("element", "channel", "row") if name not in self.channels)

    @property
    def learned(self) -> tuple[str, ...]:
        """The channel operands that have gradients."""
        tensors, places = self.layout.tensors, self.layout.places
        return tuple(name for name in self.channels if tensors.index(name) in places)

    @cached_property
    def own_arguments(self) -> dict[str, Any]:
        """The constructor's arguments that not all activations have: sizes of channel operands, parameters, ``inplace``."""
        if self.gating:
            return {"dim": -1} | {name: 1 for name, channel in self.channels.items() if not channel.one}
        if self.channels and self.module:
            taken = inspect.signature(self.module.__init__).parameters.values()
            return {each.name: each.default for each in taken if each.name != "self"}
        own: dict[str, Any] = {name: Parameter.empty for name, channel in self.channels.items() if not channel.one}
        own |= dict(self.params) | ({"inplace": False} if self.inplace else {})
        return own | ({self.variant[0]: next(iter(self.variant[1]))} if self.variant else {})

    @cached_property
    def signature(self) -> inspect.Signature:
        """The constructor's signature: its own arguments, in the order of ``torch.nn``'s, then the options that all have."""
        positional = [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD, default=d) for n, d in self.own_arguments.items()]
        options = OPTIONS | OF_MODULES
        if self.gating:
            layout, gate = self.gating.layout, self.gating.gate
            options = dict(self.params) | dict(zip(GATED, (layout, gate, "once"), strict=True)) | OPTIONS
            options |= {"device": None, "dtype": None} if self.channels else {}
        by_name = self.layout.tensors if self.fingerprint and not self.gating else ()
        taken = {*self.own_arguments, *self.channels, *by_name}
        options = {n: d for n, d in options.items() if n not in taken}
        keyword = [Parameter(n, Parameter.KEYWORD_ONLY, default=d) for n, d in options.items()]
        return inspect.Signature([*positional, *keyword])

    @cached_property
    def options_of_calls(self) -> dict[str, Any]:
        """The options of the function of a gated activation, with defaults: the constructor's arguments but for its weights'.

        They include ``training`` if the activation differs in evaluation.
        """
        of_weights = {*self.channels, "device", "dtype"}
        chosen = {name: each.default for name, each in self.signature.parameters.items() if name not in of_weights}
        return chosen | ({"training": False} if self.in_eval else {})

    @cached_property
    def beside(self) -> dict[str, Any]:
        """The fused operands that the function takes, with defaults, but for names that the activation uses itself."""
        if self.gating:
            return {}
        own = {*self.layout.tensors, *(name for name, _ in self.params)}
        return {name: default for name, default in AROUND.items() if name not in own}

    @cached_property
    def function(self) -> Callable[..., Tensor]:
        """The function ``jitact.<name>`` of this record."""
        return self.make_function(self)

    def label_of(self, build: str) -> str:
        """The label of a build for ``jitact build``; "" for definitions, whose names no other process knows."""
        return "" if self.fingerprint else build

    @cached_property
    def of_constructor(self) -> Arguments:
        """The arguments of the constructor."""
        return Arguments(self.title, self.signature)

    def check(self, params: tuple, inplace: bool, save: str | None, fast_math: bool) -> tuple[float, ...]:
        """Checks the options of a constructor, and returns the parameters as floats.

        Raises:
            TypeError: a parameter is not a number, or an option that is on or off is not a bool.
            ValueError: ``save`` is not one of the activation's, or a parameter is out of its range.
        """
        if type(inplace) is not bool or type(fast_math) is not bool:
            check_switch(self, "inplace", inplace)
            check_switch(self, "fast_math", fast_math)
        if save is not None and save not in layout(self.token).saves:
            choices = ", ".join(map(repr, layout(self.token).saves))
            raise ValueError(f"{self.name}: save={shown(save)} is not possible; choose from {choices}")
        if not params:
            return ()
        values = params
        for value in params:
            if type(value) is not float:  # rare
                values = tuple([as_number(self, name, p) for (name, _), p in zip(self.params, params, strict=True)])
                break
        for requirement in self.requires:
            if requirement.save in (None, save) and not requirement.holds(*values):
                given = ", ".join(f"{name}={value}" for (name, _), value in zip(self.params, params, strict=True))
                where = f" with save={save!r}" if requirement.save else ""
                raise ValueError(f"{self.name}: needs {requirement.text}{where}, got {given}")
        return values

    def check_span(self, params: tuple[float, ...], dtype: torch.dtype) -> None:
        """Checks that :attr:`spans` is finite in the type that inputs of a dtype are computed in.

        Raises:
            ValueError: it is not.
        """
        text, of = self.spans
        if of(*params) > torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).max:
            given = ", ".join(f"{name}={value}" for (name, _), value in zip(self.params, params, strict=True))
            raise ValueError(f"{self.name}: {text} must be finite for {str(dtype).removeprefix('torch.')}, got {given}")

    def default_save(self, params: tuple[float, ...]) -> str:
        """What an in-place call keeps for backward by default: the output, if the usual default is the input and it can be.

        The output of an in-place call costs no memory to keep; keeping the input would need a copy of it.
        """
        saves = layout(self.token).saves
        if saves[0] == "input" and "output" in saves:
            return "output" if all([r.holds(*params) for r in self.requires]) else "input"
        return saves[0]

    def gradient_reference(self, dy: Tensor, kept: Tensor, params: tuple[float, ...], save: str) -> Tensor:
        """Backward for one tensor in PyTorch operations, for ``save`` "input" or "output"; differentiable repeatedly."""
        if save == "output":
            return self.gradient_from_output(dy, kept, *params)
        return torch.func.vjp(lambda x: self.reference(x, *params), kept)[1](dy)[0]


def layout(token: str) -> Layout:
    """:attr:`Activation.layout`, by the record's token."""
    if not torch.compiler.is_compiling():
        return by_token[token].layout
    tensors, saves, *numbers = _written_layout(token).split(";")
    elements, draws, places, passed, reads, from_bit = [tuple([int(n) for n in each.split(",") if n]) for each in numbers]
    named = tuple(tensors.split(",")), tuple(saves.split(","))
    return Layout(*named, elements[0], bool(draws[0]), places, passed, reads, from_bit)


@as_constant
def _written_layout(token: str) -> str:
    """The layout as text: a constant that every supported torch.compile can put into a graph."""
    tensors, saves, elements, draws, *places = by_token[token].layout
    return ";".join(",".join(map(str, each)) for each in (tensors, saves, [elements], [int(draws)], *places))


def given_in_calls(token: str) -> tuple[str, ...]:
    """:attr:`Activation.given_in_calls`, by the record's token."""
    if not torch.compiler.is_compiling():
        return by_token[token].given_in_calls
    return tuple(_written_names(token).split(","))


@as_constant
def _written_names(token: str) -> str:
    """:attr:`Activation.given_in_calls` as text."""
    return ",".join(by_token[token].given_in_calls)


@as_constant
def is_plain(token: str) -> bool:
    """:attr:`Activation.is_plain`, by the record's token."""
    return by_token[token].is_plain
