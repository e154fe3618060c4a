"""The cases of ``python bench.py --operands``: fused operands, gated activations, definitions by formulas, and rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import jitact
from jitact.definitions.define import unregistered
from jitact.kernels import KernelSource
from jitact.modules import ActivationModule
from jitact.records import Channel
from jitact.registry import REGISTRY, record_named
from jitact.rows.records import TABLE

__all__ = ["CASES", "FORMULAS", "GATED", "Case", "Function", "Shape", "by_rows", "cases_of"]

Shape = tuple[int, ...]
Function = Callable[..., Tensor]

AROUND: dict[str, tuple[Shape, ...]] = {"cuda": ((16384, 14336), (65536, 2048)), "cpu": ((1024, 4096),)}
ELEMENTS = 2**28  # of a GPU's tensors of rows whose length is a power of two
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
RAGGED: tuple[Shape, ...] = ((1331968, 197), (65536, 1001), (16384, 50257))  # attention over 197 tokens; vocabularies
LONGEST: dict[int, tuple[Shape, ...]] = {2: ((16384, 131072),), 4: ((4096, 393216),)}  # by the bytes of an element
VOCABULARIES: tuple[Shape, ...] = ((8192, 128256), (4096, 256000))  # of logits that are converted
ROWS_ON_CPU: tuple[Shape, ...] = ((4096, 4096), (16384, 1000), (32, 131072))
COLUMNS: dict[str, tuple[Shape, ...]] = {"cuda": ((8192, 8192), (8192, 8191)), "cpu": ((4096, 4096),)}
IMAGES: dict[str, tuple[Shape, ...]] = {
    "cuda": ((64, 19, 512, 512), (64, 19, 513, 513), (65536, 64, 17)),
    "cpu": ((4, 64, 256, 256),),
}
FORMULAS: dict[str, tuple[str, dict[str, float | Channel]]] = {
    "my_swiglu": ("silu(gate) * up", {}),
    "dyt": (
        "tanh(alpha * x) * w + b",
        {"w": Channel(), "b": Channel(init=0.0), "alpha": Channel(init=0.5, one=True)},
    ),
    "block": ("residual + dropout(x + bias, p)", {"bias": Channel(init=0.0), "p": 0.1}),
}
"""Definitions that are measured; they are not registered, so their names may be in use."""
LIGER: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "softmax": ("softmax", "LigerSoftmaxFunction", (0,)),
    "swiglu": ("swiglu", "LigerSiLUMulFunction", (0, 1)),
    "my_swiglu": ("swiglu", "LigerSiLUMulFunction", (0, 1)),
    "geglu_tanh": ("geglu", "LigerGELUMulFunction", (0, 1)),
    "dyt": ("dyt", "LigerDyTFunction", (0, 3, 1, 2)),
}
"""Liger-Kernel's counterparts by the name of a case: module, autograd function, and order of the tensors."""


class Case(NamedTuple):
    """One line of the table.

    Attributes:
        name: the name in the table.
        ours: jitact's function of the tensors.
        theirs: the same function in PyTorch.
        extra: makes the tensors other than ``x``, from x's shape, and dtype and device as keywords.
        forward: the minimum memory traffic of forward, reads and writes, in tensors of x's size.
        backward: the same for backward.
        is_random: whether results are random, and so not compared with PyTorch's.
        rows: for row activations, the name and the dimension along which the rows lie.
        masked: whether ``extra`` makes a mask, which adds to the traffic of forward and has no gradient.
        converts: whether the result is float32, so that x must be of 16 bits.
        multiple: the number of elements must be a multiple of this.
        written: how many of the tensors in ``backward`` are written.
        packed: whether ``x`` holds two tensors of the shape, concatenated in the last dimension.
    """

    name: str
    ours: Function
    theirs: Function
    extra: Callable[[Shape, dict[str, Any]], list[Tensor]]
    forward: float
    backward: float
    is_random: bool = False
    rows: tuple[str, int] | None = None
    masked: bool = False
    converts: bool = False
    multiple: int = 1
    written: int = 1
    packed: bool = False

    @property
    def activation(self) -> str:
        """The name of the activation."""
        return re.split("[+,]", self.name)[0]

    @property
    def source(self) -> KernelSource:
        """The kernel file that ``ours`` runs."""
        if self.rows:
            return TABLE[self.rows[0]].source
        defined = self.activation in FORMULAS
        return (_formula(self.activation).activation if defined else record_named(self.name.split(",")[0])).source

    def inputs(self, xs: list[Tensor]) -> list[Tensor]:
        """The inputs ``x``, made of tensors of the measured shape."""
        return [torch.cat((x, xs[i - 1]), -1) for i, x in enumerate(xs)] if self.packed else xs

    def shapes(self, device: torch.device, dtype: torch.dtype) -> tuple[Shape, ...]:
        """The shapes at which it is measured."""
        if self.rows is None:
            return AROUND[device.type]
        if self.rows[1] >= 0:
            return (COLUMNS, IMAGES)[self.rows[1]][device.type]
        if device.type == "cpu":
            return ROWS_ON_CPU
        longest = VOCABULARIES if self.converts else () if self.masked else LONGEST.get(dtype.itemsize, ())
        return *((ELEMENTS // length, length) for length in LENGTHS), *RAGGED, *longest

    def others(self, device: torch.device) -> dict[str, Function]:
        """The counterparts in other installed libraries."""
        if self.name not in LIGER or device.type != "cuda" or find_spec("liger_kernel") is None:
            return {}
        module, function, order = LIGER[self.name]

        def liger(*tensors: Tensor) -> Tensor:
            return getattr(import_module(f"liger_kernel.ops.{module}"), function).apply(*[tensors[place] for place in order])

        return {"liger": liger}


def _bias(shape: Shape, made: dict[str, Any]) -> list[Tensor]:
    return [torch.randn(shape[-1], **made)]


def _like(shape: Shape, made: dict[str, Any]) -> list[Tensor]:
    return [torch.randn(shape, **made)]


def _both(shape: Shape, made: dict[str, Any]) -> list[Tensor]:
    return [*_bias(shape, made), *_like(shape, made)]


def _nothing(shape: Shape, made: dict[str, Any]) -> list[Tensor]:
    return []


def _by_channel(name: str, ours: Function, theirs: Function, read: float, channels: int, *plane: int) -> Case:
    """A function of a tensor with so many channels, each a contiguous ``plane`` of elements, and of a value for each channel.

    ``read`` is the size of the saved tensor that backward reads.
    """

    def of_channels(function: Function) -> Function:
        return lambda x, values: function(x.view(-1, channels, *plane), values)

    return Case(
        f"{name}, {channels} channels",
        of_channels(ours),
        of_channels(theirs),
        lambda shape, made: [torch.full((channels,), 0.25, **made)],
        2,
        2 + read,
        multiple=channels * torch.Size(plane).numel(),
    )


def _plain(name: str) -> tuple[Function, Function, float]:
    """An activation, PyTorch's, and the size of the saved tensor that backward reads, relative to x in 16 bits."""
    theirs = jitact.get("gelu_tanh").activation.reference if name == "gelu_tanh" else getattr(F, name)
    return getattr(jitact, name), theirs, 1 / 16 if name == "relu" else 1


def _bias_of_channels(name: str) -> Case:
    """An activation with a bias for each of the 64 channels of images of 32 x 32."""
    ours, theirs, read = _plain(name)
    return _by_channel(
        f"{name}+bias",
        lambda x, b: ours(x, bias=b, channel_dim=1),
        lambda x, b: theirs(x + b.view(-1, 1)),
        read,
        64,
        1024,
    )


def _around(name: str) -> list[Case]:
    """An activation with its fused operands. Dropout adds no memory traffic, as its mask is not stored."""
    ours, theirs, bit = _plain(name)
    return [
        Case(f"{name}+bias", lambda x, b: ours(x, bias=b), lambda x, b: theirs(x + b), _bias, 2, 2 + bit),
        Case(f"{name}+residual", lambda x, r: ours(x, residual=r), lambda x, r: r + theirs(x), _like, 3, 2 + bit),
        Case(
            f"{name}+dropout", lambda x: ours(x, dropout=0.1), lambda x: F.dropout(theirs(x), 0.1), _nothing, 2, 2 + bit, True
        ),
        Case(
            f"{name}+bias+dropout+residual",
            lambda x, b, r: ours(x, bias=b, dropout=0.1, residual=r),
            lambda x, b, r: r + F.dropout(theirs(x + b), 0.1),
            _both,
            3,
            2 + bit,
            True,
        ),
    ]


def _clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float, beta: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def _swiglu_step(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


AS_WRITTEN: dict[str, Function] = {"clamped_swiglu": _clamped_swiglu, "swiglu_step": _swiglu_step}
"""What users write, where the reference takes more operators to have the same gradient at a limit with every PyTorch."""


def _gated(name: str) -> list[Case]:
    """A gated activation with default parameters, of two tensors and of one that holds both, and its formula in PyTorch."""
    record = REGISTRY[name].activation
    numbers = [default for _, default in record.params]
    reference, gate_first = AS_WRITTEN.get(name, record.reference), record.gating.gate == "first"

    def ours(gate: Tensor, up: Tensor) -> Tensor:
        return record.function(*((gate, up) if gate_first else (up, gate)))

    def theirs(gate: Tensor, up: Tensor) -> Tensor:  # compiled as a whole, so it reads nothing of the record
        return reference(*((gate, up) if gate_first else (up, gate)), *numbers)

    def of_one(layout: str, split: Callable[[Tensor], tuple[Tensor, ...]]) -> Case:
        def their_own(x: Tensor) -> Tensor:
            return theirs(*(split(x) if gate_first else reversed(split(x))))

        its = (lambda x: record.function(x, layout=layout)), their_own, _nothing
        return Case(f"{name}, {layout}", *its, 3, 5, written=2, packed=True)

    return [
        Case(name, ours, theirs, _like, 3, 5, written=2),
        of_one("halves", lambda x: x.chunk(2, -1)),
        of_one("interleaved", lambda x: (x[..., ::2], x[..., 1::2])),
    ]


@cache
def _formula(name: str) -> type[ActivationModule]:
    """The module class of one of :data:`FORMULAS`."""
    expression, operands = FORMULAS[name]
    return unregistered(name, expression, **operands)


def _formulas() -> list[Case]:
    """The definitions and their formulas in PyTorch. The gradient of an added tensor is dy itself, which is not copied."""

    def ours(name: str) -> Function:
        return lambda *tensors: _formula(name).activation.function(*tensors)

    def dropped(x: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
        return _formula("block").activation.function(x, residual, bias, training=True)

    def residual_and_bias(shape: Shape, made: dict[str, Any]) -> list[Tensor]:
        return [*_like(shape, made), *_bias(shape, made)]

    def learned(shape: Shape, made: dict[str, Any]) -> list[Tensor]:
        return [*_bias(shape, made), *_bias(shape, made), torch.full((1,), 0.5, **made)]

    return [
        Case("my_swiglu", ours("my_swiglu"), lambda gate, up: F.silu(gate) * up, _like, 3, 5, written=2),
        Case("dyt", ours("dyt"), lambda x, w, b, alpha: torch.tanh(alpha * x) * w + b, learned, 2, 3),
        Case("block", dropped, lambda x, r, b: r + F.dropout(x + b, 0.1), residual_and_bias, 3, 2, is_random=True),
    ]


def _of_rows(name: str) -> list[Case]:
    """Contiguous rows, strided ones (``dim=0``, ``dim=1``), and a float32 result of 16-bit rows."""
    ours, theirs = getattr(jitact, name), getattr(F, name)
    return [
        Case(name, lambda x: ours(x, -1), lambda x: theirs(x, -1), _nothing, 2, 3, rows=(name, -1)),
        Case(f"{name}, dim=0", lambda x: ours(x, 0), lambda x: theirs(x, 0), _nothing, 2, 3, rows=(name, 0)),
        Case(f"{name}, dim=1", lambda x: ours(x, 1), lambda x: theirs(x, 1), _nothing, 2, 3, rows=(name, 1)),
        Case(
            f"{name}, dtype=float32",
            lambda x: ours(x, -1, torch.float32),
            lambda x: theirs(x, -1, dtype=torch.float32),
            _nothing,
            3,
            5,
            rows=(name, -1),
            converts=True,
        ),
    ]


def _by_heads(x: Tensor) -> Tensor:
    """``x`` viewed as attention scores: batches of 16 heads of rows."""
    rows = x.numel() // x.shape[-1]
    heads = gcd(rows, 16)
    return x.view(gcd(rows // heads, 2), heads, -1, x.shape[-1])


def by_rows(mask: Tensor, x: Tensor) -> Tensor:
    """A mask broadcast to the shape of x."""
    return mask.expand(_by_heads(x).shape).reshape(x.shape)


def _mask(shape: Shape, made: dict[str, Any]) -> Tensor:
    """A boolean mask shared by all heads, which masks a quarter of the elements but never the first one of a row."""
    sizes = _by_heads(torch.empty(shape, device="meta"))[:, :1].shape
    mask = torch.rand(sizes, device=made["device"]) < 0.75
    mask[..., 0] = True
    return mask


def _with_bools(shape: Shape, made: dict[str, Any]) -> list[Tensor]:
    return [_mask(shape, made)]


def _with_numbers(shape: Shape, made: dict[str, Any]) -> list[Tensor]:
    mask = _mask(shape, made)
    return [torch.randn(mask.shape, **made).masked_fill(~mask, -torch.inf)]


def _masked_rows() -> list[Case]:
    """Softmax with attention masks."""

    def ours(x: Tensor, mask: Tensor) -> Tensor:
        return jitact.softmax(_by_heads(x), -1, mask=mask).view_as(x)

    def added(x: Tensor, mask: Tensor) -> Tensor:
        return F.softmax(_by_heads(x) + mask, -1).view_as(x)

    def chosen(x: Tensor, mask: Tensor) -> Tensor:
        return F.softmax(_by_heads(x).masked_fill(~mask, -torch.inf), -1).view_as(x)

    rows = ("softmax", -1)
    return [
        Case("softmax+mask", ours, added, _with_numbers, 2, 3, rows=rows, masked=True),
        Case("softmax+bool mask", ours, chosen, _with_bools, 2, 3, rows=rows, masked=True),
    ]


GATED = tuple(name for name, cls in sorted(REGISTRY.items()) if cls.activation.gating)
CASES: tuple[Case, ...] = (
    *_around("gelu"),
    *_around("gelu_tanh"),
    *_around("silu"),
    *_around("relu"),
    *_around("mish"),
    *(_bias_of_channels(name) for name in ("gelu", "silu", "relu")),
    _by_channel("prelu", jitact.prelu, F.prelu, 1, 64, 1024),
    _by_channel("prelu", jitact.prelu, F.prelu, 1, 4096),
    *(case for name in GATED for case in _gated(name)),
    *_formulas(),
    *_of_rows("softmax"),
    *_masked_rows(),
    *_of_rows("log_softmax"),
)  # fmt: skip


def cases_of(names: list[str]) -> list[Case]:
    """The cases of some activations, or with some names, as ``gelu+bias``."""
    return [case for case in CASES if case.activation in names or case.name in names]
