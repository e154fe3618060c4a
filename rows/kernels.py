"""Which calls our kernels compute, where they were measured to be no slower than PyTorch's; and those calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .. import kernels
from ..configs import call, is_transformed
from ..kernels import KernelSource, ToolchainError
from ..kernels.loader.source import RowTypes

__all__ = [
    "as_it_lies",
    "backward",
    "built",
    "collapsed",
    "fits_a_gpu",
    "fits_types",
    "forward",
    "is_plain",
    "is_scale",
    "kind_of_backward",
    "operate",
    "operator",
    "readable",
    "sees_all",
    "sees_rows",
    "takes_backward",
    "takes_forward",
    "takes_types",
    "turned_back",
]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALL = 2**20  # bytes; a smaller tensor takes no longer than it takes to call a kernel
LARGE = 2**25  # bytes; on a CPU, from here on memory is what counts
NARROW = 32  # columns that are walked at once on a CPU
HELD = 2**13  # elements of as many columns that stay in a cache
ALIGNED, WORD = 16, 4  # bytes; what threads of a GPU read at once, in rows and across them
RAGGED = 1000  # elements of the shortest row that may begin and end within what threads read
CLUSTERS = (9, 10)  # compute capabilities where 16 blocks can be joined: before, none, and 8 in GPUs for graphics after
VECTORS_OF_A_BLOCK = 2**10  # of 16 bytes, that a row touches, where blocks are not joined
VECTORS = 196608  # kMostVectors of rows_call.h: those of a row, in all tensors that are read
HELD_VECTORS = 98304  # kHeldVectors: those of a row with a mask, or of another dtype
ACROSS_IN_A_BLOCK = 256  # the same of elements of rows across memory
MOST_ACROSS = 2**34  # kMostAcross: bytes of all rows across memory that lie side by side
LONGEST_ACROSS = 2**30  # kLongestAcross: elements of such a row
SMALLEST, LARGEST = 2.0**-126, torch.finfo(torch.float32).max  # of scales, of either sign
SCALES = SMALLEST, 2.0**100  # of either sign, between which what kernels make of a scale is a normal number
TILE = 1024  # elements, of all rows side by side; fewer are too little work for a block

GPU_FORWARD = {2: 128, 4: 1000}
GPU_BACKWARD = {2: 128, 4: 128}
GPU_ACROSS = {2: 8, 4: 8}
"""The shortest rows, in elements of so many bytes, where a GPU's kernels were measured to be no slower than PyTorch's."""

GPU_MASKED, GPU_CONVERTED = 64, 128
"""The same with a mask, which is a pass of its own to PyTorch, and converted alone."""


def sees_all(x: Tensor) -> bool:
    """Whether a tensor is what it seems to be, and nothing is at work that has to see PyTorch's operators."""
    return x.dtype in DTYPES and is_plain(x)


def is_plain(x: Tensor) -> bool:
    """The same of a tensor of any dtype."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, nn.Parameter)
        and x.device.type in ("cpu", "cuda")
        and x.layout is torch.strided
        and not x.is_nested
        and not is_transformed()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)  # it outlived its transform, and has no history
        and not torch.is_autocast_enabled(x.device.type)
        and not torch._C._len_torch_dispatch_stack()
    )


def sees_rows(rows: tuple[Tensor, ...], x: Tensor) -> bool:
    """The same of what there is for each row of x."""
    return all([is_plain(values) and values.device == x.device and not values.is_neg() for values in rows])


def as_it_lies(x: Tensor, dim: int) -> tuple[Tensor, int, list[int] | None]:
    """The tensor with its dimensions in the order of memory, where ``dim`` is then, and the order, if it is another."""
    if x.is_contiguous():
        return x, dim % x.dim(), None
    order = sorted(range(x.dim()), key=lambda i: (-x.stride(i), i))
    return x.permute(order), order.index(dim % x.dim()), order


def turned_back(y: Tensor, order: list[int] | None) -> Tensor:
    """A result with its dimensions in the order that those of :func:`as_it_lies` had before."""
    return y if order is None else y.permute(sorted(range(y.dim()), key=order.__getitem__))


def collapsed(mask: Tensor, dim: int) -> Tensor | None:
    """A mask of x's shape as three dimensions of rows along ``dim``, and one of their elements; None if it does not lie so."""
    found: list[tuple[int, int]] = []  # sizes and strides of the dimensions of rows, innermost first
    for size, stride in zip(reversed(mask.shape[:dim]), reversed(mask.stride()[:dim]), strict=True):
        if size == 1:
            continue
        if found and stride == found[-1][0] * found[-1][1]:
            found[-1] = found[-1][0] * size, found[-1][1]
        else:
            found.append((size, stride))
    step = mask.stride(dim) if mask.shape[dim] > 1 else 0
    if len(found) > 3 or step > 1:
        return None
    sizes, strides = zip(*[*[(1, 0)] * (3 - len(found)), *reversed(found), (mask.shape[dim], step)], strict=True)
    return mask.as_strided(sizes, strides)


def is_scale(scale: float) -> bool:
    """Whether the kernels' operators take such a number: as float32 a normal one, so that products with it are not all 0."""
    return SMALLEST <= abs(scale) <= LARGEST


def takes_forward(x: Tensor, dim: int, scale: float) -> bool:
    """Whether a kernel computes the rows of a contiguous tensor that :func:`sees_all` is true of."""
    if not SCALES[0] <= abs(scale) <= SCALES[1] or x.nbytes < SMALL:
        return False
    length, columns = x.shape[dim], _columns(x, dim)
    if x.is_cuda:
        return fits_a_gpu(x, dim, 1, GPU_FORWARD if columns == 1 else GPU_ACROSS)
    if not _has_vectors():
        return False
    if x.nbytes >= LARGE:
        return length >= 256 if columns == 1 else columns >= NARROW and NARROW <= length <= HELD
    return columns == 1 and length >= 512


def takes_backward(y: Tensor, dim: int) -> bool:
    """The same of backward, of a contiguous output or input."""
    if y.nbytes < SMALL:
        return False
    columns = _columns(y, dim)
    if y.is_cuda:
        return fits_a_gpu(y, dim, 2, GPU_BACKWARD if columns == 1 else GPU_ACROSS)
    return columns == 1 and y.nbytes >= LARGE and y.shape[dim] >= 256 and _has_vectors()


def fits_types(x: Tensor, dim: int, types: RowTypes) -> bool:
    """Whether a build for some types takes the rows of a contiguous tensor."""
    if x.numel() == 0 or _columns(x, dim) > 1 or x.numel() // x.shape[dim] >= 2**31:
        return False
    if not x.is_cuda:
        return True
    as_it_is = types.input == types.output and types.mask in ("none", "bool")
    length, each = x.shape[dim], ALIGNED // x.itemsize if as_it_is else 4
    touched = (length + 2 * (each - 1) if length % each else length) // each
    most = HELD_VECTORS if _has_clusters(x.device) else VECTORS_OF_A_BLOCK
    if x.data_ptr() % ALIGNED or (length % each and length < RAGGED):
        return False
    return touched <= most


def takes_types(x: Tensor, dim: int, scale: float, types: RowTypes) -> bool:
    """The same, where that is no slower than PyTorch's operators."""
    size = x.numel() * max(x.itemsize, getattr(torch, types.output).itemsize)
    if not SCALES[0] <= abs(scale) <= SCALES[1] or size < SMALL or not fits_types(x, dim, types):
        return False
    length = x.shape[dim]
    if x.is_cuda:
        return length >= (GPU_CONVERTED if types.mask == "none" else GPU_MASKED)
    if size >= LARGE:
        return length >= 256 and _has_vectors()
    return types.mask != "none" and length >= 512 and _has_vectors()


def forward(name: str, x: Tensor, dim: int, scale: float) -> Tensor:
    """``name`` of ``scale x`` along ``dim``, for a tensor that is taken."""
    return call(_operator(name, "forward"), x, dim, scale)


def backward(name: str, dy: Tensor, kept: Tensor, dim: int, scale: float, from_output: bool) -> Tensor:
    """The gradient, from the output or the input, for tensors that are taken."""
    return call(_operator(name, kind_of_backward(from_output)), readable(dy), kept, dim, scale)


def kind_of_backward(from_output: bool) -> str:
    """The kind of the operator."""
    return "backward_from_output" if from_output else "backward"


def readable(dy: Tensor) -> Tensor:
    """The tensor, contiguous and where threads of a GPU can read it."""
    dy = dy.contiguous()
    return dy.clone() if dy.data_ptr() % ALIGNED else dy


def _columns(x: Tensor, dim: int) -> int:
    """How many rows lie across each other; 1 where each lies in one piece."""
    return math.prod(x.shape[dim + 1 :])


def fits_a_gpu(x: Tensor, dim: int, tensors: int, shortest: dict[int, int]) -> bool:
    """Whether a GPU's kernels take the rows of a contiguous tensor.

    Args:
        x: the tensor.
        dim: along which its rows lie.
        tensors: how many of its shape are read.
        shortest: the shortest rows that are wanted, by the bytes of an element.
    """
    length, each, columns = x.shape[dim], ALIGNED // x.itemsize, _columns(x, dim)
    if length < shortest[x.itemsize] or x.data_ptr() % ALIGNED:
        return False
    if columns > 1:
        is_short = length * tensors <= ACROSS_IN_A_BLOCK
        if columns * x.itemsize % WORD or length * columns < TILE:
            return False
        if x.nbytes // length >= MOST_ACROSS or length >= LONGEST_ACROSS:
            return False
        return is_short or _has_clusters(x.device)
    ragged = length % each != 0
    touched = (length + 2 * (each - 1) if ragged else length) // each
    if ragged and length < RAGGED:
        return False
    return touched <= VECTORS_OF_A_BLOCK or (tensors * touched <= VECTORS and _has_clusters(x.device))


@cache
def _has_clusters(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] in CLUSTERS


@cache
def _has_vectors() -> bool:
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@cache
def _operator(name: str, kind: str) -> Callable[..., Tensor]:
    """An operator of the library's."""
    return operator(kernels.KernelSource.from_file(name), kind)


@cache
def operator(source: kernels.KernelSource, kind: str) -> Callable[..., Tensor]:
    """An operator of ``rows_binding.h``, compiled unless it is there."""
    return getattr(torch.ops.jitact, f"{kernels.load(source).name}_{kind}").default


def built(source: KernelSource) -> str | None:
    """The first part of the operators' names of a build; None where it is neither cached nor can be made."""
    try:
        return kernels.load(source).name
    except ToolchainError:
        return None


def operate(name: str, kind: str, *arguments: Any) -> Tensor:
    """An operator of such a build."""
    return call(getattr(torch.ops.jitact, f"{name}_{kind}").default, *arguments)
