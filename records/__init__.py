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
from .arguments import (
    AROUND,
    DTYPES,
    GATED,
    OF_MODULES,
    OPTIONS,
    Arguments,
    as_number,
    by_name_hint,
    check_tensor,
    shown,
    what_it_is,
)

__all__ = [
    "NEXT_TO_NOTHING",
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
    "promoted",
    "rows_together",
]

NEXT_TO_NOTHING = Work(1, 1)

by_token: weakref.WeakValueDictionary[str, Activation] = weakref.WeakValueDictionary()
"""Every record by its token, a constant string, which is all that torch.compile can carry to the loader."""
library: dict[str, Activation] = {}
"""The library's own records by name, of which nothing is defined again."""
_naming = ThreadLock()


class Requirement(NamedTuple):
    """A condition on parameters, as text for people and as a test; only for one ``save`` if that is given."""

    text: str
    holds: Callable[..., bool]
    save: str | None = None


class Gating(NamedTuple):
    """How one tensor holds the two of a gated activation, unless a call says otherwise.

    Attributes:
        gate: which of the two it is, "first" or "last".
        layout: "halves", or "interleaved" where the two take turns.
        preset_of: the name of the activation that this one is, but for its defaults.
        of: the name of the activation at the gate, where that times the other is all: what ``jitact.gated`` of it is.
    """

    gate: str = "first"
    layout: str = "halves"
    preset_of: str = ""
    of: str = ""


class Channel(NamedTuple):
    """An operand with one value for each channel of ``x``, or one for all: a learned weight, where it has a gradient.

    Attributes:
        init: what a new module fills it with.
        dim: the dimension of ``x`` that its values belong to.
        one: whether it holds one value for all, whatever ``x`` is.
    """

    init: float = 1.0
    dim: int = -1
    one: bool = False


@dataclass(frozen=True)
class Row:
    """An operand with one value for each row of ``x``, which is all its dimensions but the last; calls give it."""


class Layout(NamedTuple):
    """What calls need to know of a kernel file's signature, and of what backward can keep.

    Attributes:
        tensors: the operands that are tensors, as operators take them.
        saves: what backward can keep, the default first.
        elements: how many of the tensors, the first, are elements.
        draws: whether there are random numbers, and so a seed.
        places: of the tensors, those that backward gives gradients of, in its order.
        passed: of the tensors, those whose gradient is ``dy``.
        reads: for each tensor, which of them its gradient reads, as bits; empty where each may read all.
        from_bit: of ``places``, those that a bit is enough for.
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
    """What is made of a record when it is asked for, as attributes: of a dict torch.compile sees no item that is new."""


@dataclass(eq=False)  # not frozen: torch.compile reads no attributes of a frozen one
class Activation:
    """One activation: everything that Python knows of it. The maths, and what its arguments are, is in ``kernels/<name>.cu``.

    Attributes:
        name: canonical name, also the kernel file's.
        title: class name, the ``torch.nn`` counterpart's where there is one.
        formula: forward, for people.
        reference: the same function in PyTorch, ``reference(*tensors, *params)``; second derivatives and transforms use it.
        params: parameters after the tensors, with their defaults, in the order of ``torch.nn``'s constructor.
        inplace: whether the constructor takes ``inplace``, as ``torch.nn``'s does.
        declared_saves: what :attr:`saves` is, where that is not simply what the kernel file has functions for.
        gradient_from_output: ``dx`` from ``(dy, y, *params)`` in PyTorch, for second derivatives with ``save="output"``.
        module: the ``torch.nn`` class; None makes :attr:`Model` from ``reference``.
        notes: for the docstring: what else a user should know.
        exact: the function in PyTorch as tests want it in float64, where ``reference`` loses digits even there.
        requires: what parameters must satisfy.
        aliases: further names; the title, and spellings that differ in case, ``_`` or ``-``, need none.
        variant: a constructor argument that chooses among activations, and the names that its values lead to.
        work: how much a GPU computes for an element, as ``python -m jitact tune`` shows.
        kernel: what to compile, where that is not ``kernels/<name>.cu``; a preset's is that of the activation that it is.
        has_reference: whether ``reference`` is PyTorch's arithmetic. Else it is the compiled forward in float64.
        zero_crossing: where a difference of larger terms passes through 0, float32 errors count in ulp of this magnitude.
        fingerprint: what pickles tell definitions of one name by; the library's own have none, as their names say it all.
        channels: the operands with a value for each channel, by name; the module's own parameters or buffers.
        dtypes: of those operands: "same" as x's, or an error; "promoted" with x to the dtype of the result; or each its "own".
        spans: what of the parameters must be finite in the type that is computed in: as text, and as a function of them.
        in_eval: the record and the parameters of the activation that this one is outside of training, from its parameters.
        in_python: what exported files have in Python: for a channel operand, what the constructor of ``module`` makes it of;
            for a parameter, what stands in its place outside of training.
        transformers: transformers' module classes that it stands for, by name.
        added: the operands that stand around the activation, whose dtypes are their own.
        passed: of the tensors, those of elements whose gradient is ``dy`` itself.
        reads: by the name of a tensor, those whose values its gradient reads, so that nothing is kept of the others; of a
            tensor that is not named, all.
        gating: of a gated activation, which takes two tensors, ``gate`` and ``up``, or one that holds both.
        since: the version that brought the name, where folders may have been saved before that define another of it.
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
        """Completes the record, and gives it a token, a constant that torch.compile can carry.

        That is the name, numbered when it is defined again.

        Raises:
            ValueError: the functions of ``kernel`` are not declared as they must be.
        """
        if self.kernel is not None:  # the library's own files are read when they are first needed
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
        self.make_function: Callable[[Activation], Callable[..., Tensor]] | None = None  # by who makes the module class
        self.configs: dict[tuple[bool, str, bool], Any] = {}  # of configs.configured

    @cached_property
    def source(self) -> KernelSource:
        """What the loader compiles."""
        file = (self.gating and self.gating.preset_of) or self.name
        return self.kernel or KernelSource.from_file(file, self.work)

    def _read_signature(self) -> Signature:
        """The kernel file's.

        Raises:
            ValueError: its functions are not declared as they must be.
        """
        try:
            return self.source.signature
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    @cached_property
    def layout(self) -> Layout:
        """What calls need to know of the kernel file's signature."""
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
        """Whether it takes ``x`` and numbers alone."""
        return not self.channels and self.in_eval is None and len(self.layout.tensors) == 1

    @property
    def saves(self) -> tuple[str, ...]:
        """What backward can keep, the default first."""
        return self.layout.saves

    @cached_property
    def gradients(self) -> Activation:
        """Its gradients as an activation, of the operands, ``dy``, the parameters and the number of one of them."""
        return self._derived(gradients_source(self.source), (*self.params, ("which", 0.0)))

    @cached_property
    def from_output(self) -> Activation:
        """Its gradient from the output as an activation, of the output, ``dy`` and the operands that are no elements."""
        return self._derived(from_output_source(self.source), self.params)

    @cached_property
    def from_bit(self) -> Activation:
        """Its gradients from a bit as an activation, of that, ``dy``, the other operands and the number of one of them."""
        return self._derived(from_bit_source(self.source), (*self.params, ("which", 0.0)))

    def _derived(self, kernel: KernelSource, params: tuple[tuple[str, float], ...]) -> Activation:
        told = (kernel.name, self.title, self.formula, self.reference)
        return Activation(*told, params=params, kernel=kernel, has_reference=False)

    @property
    def unread(self) -> tuple[str, ...]:
        """The tensors whose values no gradient reads that is not ``dy`` itself."""
        laid = self.layout
        computed = [laid.reads[place] for place in laid.places if place not in laid.passed] if laid.reads else [-1]
        return tuple(name for place, name in enumerate(laid.tensors) if not any(each >> place & 1 for each in computed))

    @cached_property
    def by_formula(self) -> bool:
        """Whether second derivatives are the reference's, which can be told the random numbers if there are any."""
        if not self.has_reference or not self.layout.draws:
            return self.has_reference
        try:
            return "keep" in inspect.signature(self.reference).parameters
        except ValueError:  # it is built in, and takes what PyTorch's functions take
            return False

    @property
    def equation(self) -> str:
        """What it is of its operands, for people."""
        operands = self.source.signature.of("element", "channel", "row") if self.fingerprint else ("x",)
        return f"{self.name}({', '.join(operands)}) = {self.formula}"

    @property
    def equation_with_numbers(self) -> str:
        """What it is of its operands and parameters, for people."""
        operands = self.source.signature.of("element", "channel", "row")
        return f"{self.name}({', '.join([*operands, *(name for name, _ in self.params)])}) = {self.formula}"

    @cached_property
    def given_in_calls(self) -> tuple[str, ...]:
        """The names of the operands that a module does not own."""
        return tuple(name for name in self.source.signature.of("element", "channel", "row") if name not in self.channels)

    @property
    def learned(self) -> tuple[str, ...]:
        """The channel operands that have gradients."""
        tensors, places = self.layout.tensors, self.layout.places
        return tuple(name for name in self.channels if tensors.index(name) in places)

    @cached_property
    def own_arguments(self) -> dict[str, Any]:
        """The constructor's arguments but for those that all have: sizes of channel operands, parameters, ``inplace``."""
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
        """Of the constructor: its own arguments, in the order of ``torch.nn``'s, then the options that all have."""
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
        """What a call of a gated activation chooses, with defaults: the constructor's arguments but for its weights'.

        And ``training``, where that makes a difference, as modules have it.
        """
        of_weights = {*self.channels, "device", "dtype"}
        chosen = {name: each.default for name, each in self.signature.parameters.items() if name not in of_weights}
        return chosen | ({"training": False} if self.in_eval else {})

    @cached_property
    def beside(self) -> dict[str, Any]:
        """What functions take that stands around the activation, with defaults; its own arguments of such names win."""
        if self.gating:
            return {}
        own = {*self.layout.tensors, *(name for name, _ in self.params)}
        return {name: default for name, default in AROUND.items() if name not in own}

    @cached_property
    def function(self) -> Callable[..., Tensor]:
        """``jitact.<name>``, as long as the name stands for this record."""
        return self.make_function(self)

    def label_of(self, build: str) -> str:
        """What ``jitact build`` knows a build by; "" for a definition's, whose name no other process knows."""
        return "" if self.fingerprint else build

    @cached_property
    def of_constructor(self) -> Arguments:
        """What the constructor takes."""
        return Arguments(self.title, self.signature)

    def check(self, params: tuple, inplace: bool, save: str | None, fast_math: bool) -> tuple[float, ...]:
        """Checks options as a constructor gets them, and returns the parameters as floats.

        Raises:
            TypeError: a parameter is not a number, or an option that is on or off is not a bool.
            ValueError: ``save`` is not one of the activation's, or a parameter is out of its range.
        """
        if type(inplace) is not bool or type(fast_math) is not bool:
            option, value = ("inplace", inplace) if type(inplace) is not bool else ("fast_math", fast_math)
            raise TypeError(f"{self.name}: {option} must be True or False, got {shown(value)}{by_name_hint(self, value)}")
        if save is not None and save not in layout(self.token).saves:
            choices = ", ".join(map(repr, layout(self.token).saves))
            raise ValueError(f"{self.name}: save={shown(save)} is not possible; choose from {choices}")
        if not params:
            return ()
        values = params
        for value in params:
            if type(value) is not float:  # seldom
                values = tuple([as_number(self, name, p) for (name, _), p in zip(self.params, params, strict=True)])
                break
        for requirement in self.requires:
            if requirement.save in (None, save) and not requirement.holds(*values):
                given = ", ".join(f"{name}={value}" for (name, _), value in zip(self.params, params, strict=True))
                where = f" with save={save!r}" if requirement.save else ""
                raise ValueError(f"{self.name}: needs {requirement.text}{where}, got {given}")
        return values

    def check_span(self, params: tuple[float, ...], dtype: torch.dtype) -> None:
        """Checks :attr:`spans`, for inputs of a dtype.

        Raises:
            ValueError: it is not finite.
        """
        text, of = self.spans
        if of(*params) > torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).max:
            given = ", ".join(f"{name}={value}" for (name, _), value in zip(self.params, params, strict=True))
            raise ValueError(f"{self.name}: {text} must be finite for {str(dtype).removeprefix('torch.')}, got {given}")

    def fitted(self, given: dict[str, Any]) -> tuple[Tensor, ...]:
        """The tensors of a call as operators take them: elements of one shape and dtype, channel operands that broadcast.

        Raises:
            TypeError: one is no tensor that kernels take, or of another dtype than it has to be.
            ValueError: one is on another device, or does not broadcast.
        """
        laid = layout(self.token)  # of which torch.compile of torch 2.11 reads fields, and unpacks nothing
        names, elements, places = laid.tensors, laid.elements, laid.places
        x = given[names[0]]
        check_tensor(self, x)
        numbers = [name for place, name in enumerate(names) if place >= elements and place not in places]
        learned = [given[name] for name in names[elements:] if name not in numbers and name not in self.added]
        promoting = [given[name] for name in names[:elements]] + (learned if self.dtypes == "promoted" else [])
        dtype = promoted([each for each in promoting if isinstance(each, Tensor)])
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
            tensors, dtype = self._of_same_dtype(names, tensors)
        for place, each in enumerate(tensors):
            # Operands that are no elements may be wider than those of 16 bits.
            own = (self.dtypes == "own" or names[place] in self.added) and place >= elements and dtype.itemsize == 2
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
                operand = self._by_row(name, operand, tensors[0])
            else:
                operand = self.by_channel(name, channel, operand, tensors[0], x.dim())
            # A formula's result would have a dimension where that has one and x none.
            tensors[place] = operand.reshape(()) if x.dim() < operand.dim() and operand.numel() == 1 else operand
        return tuple(tensors)

    def fitting(self, given: dict[str, Any]) -> tuple[Tensor, ...] | None:
        """What :meth:`fitted` returns, in a fraction of its time, where operators take the tensors as they are.

        So it is in almost every call. None where it is not, or is yet to be found out, as under torch.compile.
        """
        if torch.compiler.is_compiling():
            return None
        laid = self.layout
        tensors = tuple([given[name] for name in laid.tensors])
        x = tensors[0]
        if not isinstance(x, Tensor) or x.is_nested or (self.dtypes == "same" and _is_cast(x)):
            return None
        dtype, device, shape = x.dtype, x.device, x.shape
        if dtype not in DTYPES or x.layout is not torch.strided:
            return None
        for place in range(1, len(tensors)):
            each = tensors[place]
            if not isinstance(each, Tensor) or each.dtype is not dtype or each.device != device:
                return None
            if each.layout is not torch.strided or each.is_nested:
                return None
            if place < laid.elements:
                if each.shape != shape:
                    return None
                continue
            channel = self.channels.get(laid.tensors[place])
            if channel is None or channel.one or channel.dim not in (-1, len(shape) - 1) or each.shape != shape[-1:]:
                return None
            if each.requires_grad and place not in laid.places:
                return None
        return tensors

    def _of_same_dtype(self, names: tuple[str, ...], tensors: list[Tensor]) -> tuple[list[Tensor], torch.dtype]:
        """Tensors that have to be of x's dtype, or that autocast casts, as it does for PyTorch's function of the name.

        What is added keeps its own, and promotes.
        """
        added = self.added
        if _is_cast(tensors[0]):
            chosen = torch.get_autocast_dtype(tensors[0].device.type)
            kept = [t.dtype is torch.float64 or name in added for name, t in zip(names, tensors, strict=True)]
            tensors = [t if keep else t.to(chosen) for keep, t in zip(kept, tensors, strict=True)]
        x = tensors[0]
        for name, each in zip(names, tensors, strict=True):
            if each.dtype != x.dtype and name not in added:
                wanted = str(x.dtype).removeprefix("torch.")
                got = f"got {what_it_is(each)}; convert it, as with .to(x.dtype)"
                raise TypeError(f"{self.name}: {name} must be of x's dtype, {wanted}, {got}")
        return tensors, promoted([x, *(t for name, t in zip(names, tensors, strict=True) if name in self.passed)])

    def _broadcast(self, names: tuple[str, ...], tensors: list[Tensor]) -> list[Tensor]:
        """Elements of one shape; those of another are expanded, without a copy."""
        if all([t.shape == tensors[0].shape for t in tensors]):
            return tensors
        try:
            shape = torch.broadcast_shapes(*[t.shape for t in tensors])
        except RuntimeError:
            given = ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip(names, tensors, strict=True))
            raise ValueError(f"{self.name}: the tensors' shapes do not broadcast: {given}") from None
        return [t if t.shape == shape else t.expand(shape) for t in tensors]

    def _by_row(self, name: str, operand: Tensor, x: Tensor) -> Tensor:
        """A row operand in a shape that broadcasts to x's."""
        if operand.shape == x.shape[:-1]:
            return operand.unsqueeze(-1)
        if operand.shape == (*x.shape[:-1], 1):
            return operand
        expected = f"{tuple(x.shape[:-1])} or {(*x.shape[:-1], 1)}, the rows of x"
        raise ValueError(f"{self.name}: {name} must be of shape {expected}; got {tuple(operand.shape)}")

    def by_channel(self, name: str, channel: Channel, operand: Tensor, x: Tensor, dims: int) -> Tensor:
        """A channel operand in a shape that broadcasts to x's, which had ``dims`` dimensions before it was expanded.

        Raises:
            ValueError: it has other than one value, or one for each index of that dimension of ``x``.
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
        """What backward keeps in place, when nobody says: the output where that is possible and the first is the input.

        Keeping the output of an in-place call costs no memory, where keeping the input would mean a copy of it.
        """
        saves = layout(self.token).saves
        if saves[0] == "input" and "output" in saves:
            return "output" if all([r.holds(*params) for r in self.requires]) else "input"
        return saves[0]

    def gradient_reference(self, dy: Tensor, kept: Tensor, params: tuple[float, ...], save: str) -> Tensor:
        """Backward of one tensor in PyTorch, for ``save`` "input" or "output", differentiable as often as wanted."""
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


def _written_layout(token: str) -> str:
    """The same as text, which every torch.compile carries."""
    tensors, saves, elements, draws, *places = by_token[token].layout
    return ";".join(",".join(map(str, each)) for each in (tensors, saves, [elements], [int(draws)], *places))


# What torch.compiler.assume_constant_result sets, without its import of the whole compiler: tracing looks no further inside.
_written_layout._dynamo_marked_constant = True


def given_in_calls(token: str) -> tuple[str, ...]:
    """:attr:`Activation.given_in_calls`, by the record's token."""
    if not torch.compiler.is_compiling():
        return by_token[token].given_in_calls
    return tuple(_written_names(token).split(","))


def _written_names(token: str) -> str:
    """The same as text."""
    return ",".join(by_token[token].given_in_calls)


_written_names._dynamo_marked_constant = True


def is_plain(token: str) -> bool:
    """:attr:`Activation.is_plain`, by the record's token."""
    return by_token[token].is_plain


is_plain._dynamo_marked_constant = True


def _is_cast(x: Tensor) -> bool:
    """Whether autocast is on for ``x``."""
    return x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)


def promoted(tensors: Sequence[Tensor]) -> torch.dtype:
    """What PyTorch promotes tensors of floats to: one without dimensions counts where no other is."""
    dtypes = [t.dtype for t in tensors if t.dim() > 0] or [t.dtype for t in tensors]
    dtype = dtypes[0]
    for each in dtypes[1:]:
        dtype = torch.promote_types(dtype, each)
    return dtype


def rows_together(x: Tensor) -> Tensor:
    """A tensor whose rows lie side by side in memory, in any order; a copy where elements of rows lie between them.

    What there is for each row is read once for a stretch of memory.
    """
    if x.is_contiguous():
        return x
    *strides, within = torch.empty_like(x, device="meta").stride()
    beside = [stride for stride, size in zip(strides, x.shape[:-1], strict=True) if size > 1]
    apart = x.shape[-1] > 1 and beside and min(beside) < within < max(beside)
    return x.contiguous() if apart else x


