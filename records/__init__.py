"""The record of an activation: everything that Python knows about it, and the checks and broadcasting of a call's operands."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
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
    DTYPES,
    GATED,
    OF_MODULES,
    OPTIONS,
    Arguments,
    as_number,
    check_switch,
    check_tensor,
    is_sharded,
    shown,
    what_it_is,
)
from .dtypes import wider
from .tracing import as_constant

__all__ = [
    "Activation",
    "Channel",
    "Gating",
    "Requirement",
    "Row",
    "by_token",
    "given_in_calls",
    "is_cast",
    "is_plain",
    "layout",
    "library",
    "promoted",
    "rows_together",
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

    def fitted(self, given: dict[str, Any]) -> tuple[Tensor, ...]:
        """The tensors of a call as operators take them: elements of one shape and dtype, channel operands that broadcast.

        Raises:
            TypeError: an operand is not a tensor that kernels take, or not of the dtype it must have.
            ValueError: an operand is on another device, or does not broadcast.
        """
        operands = layout(self.token)  # fields by name: torch.compile in torch 2.11 cannot unpack a NamedTuple here
        names, elements, places = operands.tensors, operands.elements, operands.places
        x = given[names[0]]
        check_tensor(self, x)
        numbers = [name for place, name in enumerate(names) if place >= elements and place not in places]
        learned = [given[name] for name in names[elements:] if name not in numbers and self._is_weight(name)]
        promoting = [given[name] for name in names[:elements]] + (learned if self.dtypes == "promoted" else [])
        # Others are refused by name below; of float8, PyTorch's own error would not say which tensor it is.
        dtype = promoted([each for each in promoting if isinstance(each, Tensor) and each.dtype in DTYPES])
        for name in names[1:]:
            value = given[name]
            if name in numbers and not isinstance(value, Tensor):
                given[name] = value = x.new_full((), as_number(self, name, value), dtype=dtype)
            elif name in numbers and value.requires_grad:
                raise ValueError(f"{self.name}: {name} is not learned, got a tensor that requires a gradient")
            check_tensor(self, value, f"{name} must be")
            if value.device != x.device:
                raise ValueError(f"{self.name}: {name} must be on the device of x, {x.device}, got one on {value.device}")
        tensors = [given[name] for name in names]
        if self.dtypes == "same":
            tensors = self._of_same_dtype(names, tensors)
            dtype = promoted(tensors[:elements])
        for place, each in enumerate(tensors):
            # Beside 16-bit elements, the other operands may be float32.
            own = place >= elements and dtype.itemsize == 2 and (self.dtypes == "own" or not self._is_weight(names[place]))
            if each.dtype is not dtype and not (own and each.dtype is torch.float32):
                tensors[place] = each.to(torch.float32 if own else dtype)
        if elements > 1:
            tensors[:elements] = self._broadcast(names[:elements], tensors[:elements])
        if any([name not in self.channels for name in names[elements:]]):
            tensors[0] = rows_together(tensors[0])
        for place in range(elements, len(tensors)):
            name = names[place]
            channel, operand = self.channels.get(name), tensors[place]
            if channel is None:
                operand = self.by_row(name, operand, tensors[0])
            else:
                operand = self.by_channel(name, channel, operand, tensors[0], x.dim())
            # With a 0-dimensional x, an operand of shape (1,) would give a formula's result a dimension.
            tensors[place] = operand.reshape(()) if x.dim() < operand.dim() and operand.numel() == 1 else operand
        return tuple(tensors)

    def fitting(self, given: dict[str, Any]) -> tuple[Tensor, ...] | None:
        """A fast path of :meth:`fitted` for the usual call, in which operators take the tensors as they are; else None.

        Always None under torch.compile, which traces :meth:`fitted`.
        """
        if torch.compiler.is_compiling():
            return None
        names, elements, places = self.layout.tensors, self.layout.elements, self.layout.places
        x = given[names[0]]
        if not isinstance(x, Tensor) or x.is_nested or (self.dtypes == "same" and is_cast(x)):
            return None
        dtype, device, shape = x.dtype, x.device, x.shape
        if dtype not in DTYPES or x.layout is not torch.strided or (type(x) is not Tensor and is_sharded(x)):
            return None
        tensors = [x]
        for place in range(1, len(names)):
            each = given[names[place]]
            if not isinstance(each, Tensor) or each.dtype is not dtype or each.device != device:
                return None
            if each.layout is not torch.strided or each.is_nested or (type(each) is not Tensor and is_sharded(each)):
                return None
            tensors.append(each)
            if place < elements:
                if each.shape != shape:
                    return None
                continue
            channel = self.channels.get(names[place])
            if channel is None or each.dim() != 1 or not shape or (each.requires_grad and place not in places):
                return None
            count = each.shape[0]
            if count != 1 and (channel.one or channel.dim not in (-1, len(shape) - 1) or count != shape[-1]):
                return None
        return tuple(tensors)

    def _of_same_dtype(self, names: tuple[str, ...], tensors: list[Tensor]) -> list[Tensor]:
        """The tensors, cast under autocast as for PyTorch's counterpart. Weights must be of x's dtype then.

        Added operands, and those by which the activation is multiplied, may have others.
        """
        added, first = self.added, names[0]
        if is_cast(tensors[0]):
            chosen = torch.get_autocast_dtype(tensors[0].device.type)
            kept = [t.dtype is torch.float64 or name in added for name, t in zip(names, tensors, strict=True)]
            tensors = [t if keep else t.to(chosen) for keep, t in zip(kept, tensors, strict=True)]
        x = tensors[0]
        for name, each in zip(names, tensors, strict=True):
            if each.dtype != x.dtype and self._is_weight(name):
                wanted = str(x.dtype).removeprefix("torch.")
                got = f"got {what_it_is(each)}; convert it, as with .to({first}.dtype)"
                raise TypeError(f"{self.name}: {name} must be of {first}'s dtype, {wanted}, {got}")
        return tensors

    def _is_weight(self, name: str) -> bool:
        """Whether a tensor is one that the activation itself learns, whose dtype :attr:`dtypes` says."""
        return name in self.channels and name not in self.added

    def _broadcast(self, names: tuple[str, ...], tensors: list[Tensor]) -> list[Tensor]:
        """Broadcasts the elementwise tensors to one shape, as views."""
        if all([t.shape == tensors[0].shape for t in tensors]):
            return tensors
        shape = self.broadcast_shape(names, tensors)
        return [t if t.shape == shape else t.expand(shape) for t in tensors]

    def broadcast_shape(self, names: Sequence[str], tensors: Sequence[Tensor]) -> torch.Size:
        """The shape that the elementwise tensors broadcast to.

        Raises:
            ValueError: they do not.
        """
        try:
            return torch.broadcast_shapes(*[t.shape for t in tensors])
        except RuntimeError:
            given = ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip(names, tensors, strict=True))
            raise ValueError(f"{self.name}: the tensors' shapes do not broadcast: {given}") from None

    def by_row(self, name: str, operand: Tensor, x: Tensor) -> Tensor:
        """A row operand as a view that broadcasts to x.

        Raises:
            ValueError: it has not one value for each row of ``x``.
        """
        if operand.shape == x.shape[:-1]:
            return operand.unsqueeze(-1)
        if operand.shape == (*x.shape[:-1], 1):
            return operand
        expected = f"{tuple(x.shape[:-1])} or {(*x.shape[:-1], 1)}, the rows of x"
        raise ValueError(f"{self.name}: {name} must be of shape {expected}; got {tuple(operand.shape)}")

    def by_channel(self, name: str, channel: Channel, operand: Tensor, x: Tensor, dims: int) -> Tensor:
        """A channel operand as a view that broadcasts to x, which had ``dims`` dimensions before it was broadcast.

        Raises:
            ValueError: it has neither one value nor one for each index of its dimension of ``x``.
        """
        count = operand.numel()
        if channel.one:
            if count != 1:
                raise ValueError(f"{self.name}: {name} must hold one value, got {count}: {tuple(operand.shape)}")
            return operand
        if operand.dim() > 1:
            shape = tuple(operand.shape)
            raise ValueError(f"{self.name}: {name} must have at most 1 dimension, got {operand.dim()}: {shape}")
        dim = channel.dim if channel.dim < 0 else channel.dim - dims  # from the end, as shapes broadcast
        there = -x.dim() <= dim < 0
        if count != 1 and not (there and count == x.shape[dim]):
            size = f", as x has {dims} dimensions"
            if there:
                size = f" or {x.shape[dim]}, as dimension {channel.dim} of x has {x.shape[dim]}"
            raise ValueError(f"{self.name}: the number of values of {name} must be 1{size}; got {count}")
        return operand if count == 1 or dim == -1 else operand.view(-1, *[1] * (-1 - dim))

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


def is_cast(x: Tensor) -> bool:
    """Whether autocast is on for ``x``."""
    device = "cuda" if x.is_cuda else "cpu" if x.is_cpu else ""
    return device != "" and torch.is_autocast_enabled(device)


def promoted(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype that PyTorch promotes floating-point tensors to: 0-dimensional tensors count only if all are."""
    dtypes = [t.dtype for t in tensors if t.dim() > 0] or [t.dtype for t in tensors]
    dtype = dtypes[0]
    for each in dtypes[1:]:
        dtype = wider(dtype, each)
    return dtype


def rows_together(x: Tensor) -> Tensor:
    """``x``, or a contiguous copy if its last dimension lies between the others in memory, or if elements overlap.

    Kernels read a row operand once per stretch of memory, so the last dimension must be the innermost or the outermost one.
    """
    if x.is_contiguous():
        return x
    if not torch.compiler.is_compiling() and _overlaps_itself(x):
        return x.contiguous()
    *strides, within = torch.empty_like(x, device="meta").stride()
    others = [stride for stride, size in zip(strides, x.shape[:-1], strict=True) if size > 1]
    apart = x.shape[-1] > 1 and others and min(others) < within < max(others)
    return x.contiguous() if apart else x


def _overlaps_itself(x: Tensor) -> bool:
    """Whether dimensions of ``x`` share elements, other than by being expanded."""
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size < 2 or stride == 0:
            continue
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
