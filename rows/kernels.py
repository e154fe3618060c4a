"""Which calls the kernels of rows compute (those measured to be no slower than PyTorch), and their operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import kernels
from ..configs import call, is_batched
from ..kernels import KernelSource, ToolchainError
from ..kernels.loader.load import load_part
from ..kernels.loader.source import RowPart, RowTypes
from ..records.operands import is_cast

__all__ = [
    "ACROSS_IN_A_BLOCK",
    "ALIGNED",
    "CLUSTERS",
    "LONGEST_ACROSS",
    "MOST_ACROSS",
    "NARROW",
    "VECTORS",
    "VECTORS_OF_A_BLOCK",
    "WORD",
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
    "part_for",
    "readable",
    "sees_all",
    "sees_rows",
    "takes_backward",
    "takes_forward",
    "takes_types",
]

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALVES)
SMALL = 2**20  # bytes; for smaller tensors, calling a kernel takes longer than the work
LARGE = 2**25  # bytes; from here on, memory bandwidth is the limit on a CPU
NARROW = 32  # adjacent rows (columns) that a CPU processes together
HELD = 2**13  # elements of that many rows that stay in the cache
ALIGNED, WORD = 16, 4  # bytes that a GPU's thread reads at once, of contiguous and of strided rows
CLUSTERS = (9, 10)  # major compute capabilities with clusters of 16 blocks: older have none, later graphics GPUs 8
VECTORS_OF_A_BLOCK = 2**10  # 16-byte vectors that a row may span without clusters
VECTORS = 196608  # kMostVectors of rows_call.h: with clusters, in all tensors read
HELD_VECTORS = 98304  # kHeldVectors: with clusters, for rows with a mask or conversion
SECTOR = 32  # bytes of memory that a GPU reads and writes at once
ACROSS_IN_A_BLOCK = 256  # elements that a strided row may have without clusters, in all tensors read
MOST_ACROSS = 2**31  # kMostAcross: words that the first elements of all strided rows take
LONGEST_ACROSS = 2**30  # kLongestAcross: elements of a strided row
LONG_AND_ODD = 2**12  # elements of such a row of 16 bits where fewer than 16 are adjacent, and no whole words
SMALLEST, LARGEST = 2.0**-126, torch.finfo(torch.float32).max  # of scales, of either sign
SCALES = SMALLEST, 2.0**100  # of either sign; between them, everything that kernels derive from a scale is a normal number
LONGEST = 2**63 - 1  # elements of any row


class Lengths(NamedTuple):
    """The lengths of the rows for which a GPU's kernels are used.

    Attributes:
        whole: of rows along the last dimension that fill a thread's vectors (of 16 bytes, of float32 if x is converted).
        ragged: of those that do not.
        across: the fewest elements of strided rows.
    """

    whole: tuple[range, ...]
    ragged: tuple[range, ...]
    across: int = 2


EVERY = range(3, LONGEST)
GPU_EVERY = Lengths((EVERY,), (EVERY,))
GPU_FORWARD = {
    ("softmax", 2): GPU_EVERY,
    ("softmax", 4): GPU_EVERY,
    ("log_softmax", 2): GPU_EVERY,
    ("log_softmax", 4): Lengths(
        (range(3, 100), range(101, 108), range(109, 116), range(117, LONGEST)),
        (range(3, 113), range(117, 193), range(209, 385), range(417, 577), range(733, LONGEST)),
    ),
}
GPU_BACKWARD = {
    ("softmax", 2): GPU_EVERY,
    ("softmax", 4): GPU_EVERY,
    ("log_softmax", 2): GPU_EVERY,
    ("log_softmax", 4): Lengths((EVERY,), (range(3, 512), range(577, LONGEST))),
}
"""The rows, by kernel and bytes per element, for which the GPU's kernels were measured to be no slower than PyTorch's.
GPU_EVERY is also for where PyTorch needs another pass, for a scale."""

GPU_MASKED = Lengths((range(8, LONGEST),), (range(8, LONGEST),))
GPU_CONVERTED = {
    "softmax": GPU_EVERY,
    "log_softmax": Lengths((EVERY,), (range(3, 193), range(225, 385), range(449, LONGEST))),
}
"""The same for masks and conversions. Those from bfloat16 are always taken, those from float16, which PyTorch does in the same
pass, where GPU_CONVERTED says so."""

CPU_FORWARD: dict[tuple[str, int], tuple[int, int]] = {
    ("softmax", 2): (512, 128),
    ("softmax", 4): (4096, 512),
    ("log_softmax", 2): (2048, 512),
    ("log_softmax", 4): (4096, 512),
}
CPU_SCALED = {
    ("softmax", 2): (128, 128),
    ("softmax", 4): (256, 128),
    ("log_softmax", 2): (512, 128),
    ("log_softmax", 4): (256, 128),
}
CPU_ACROSS = {
    ("softmax", 2): (32, 32),
    ("softmax", 4): (32, 32),
    ("log_softmax", 2): (2048, 512),
    ("log_softmax", 4): (128, 32),
}
CPU_MASKED = {"none": (LONGEST, 256), "bool": (64, 64), "added": (512, 128)}
"""The same for a CPU: the shortest rows, in tensors of less than LARGE bytes and of more; with a scale; across memory, without
a scale and with one; and by mask, where "none" is a conversion alone."""


def sees_all(x: Tensor) -> bool:
    """Whether x is a plain tensor of a supported dtype, and no mode or transform has to see PyTorch's operators."""
    return x.dtype in DTYPES and is_plain(x)


def is_plain(x: Tensor) -> bool:
    """The same for any dtype."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, nn.Parameter)
        and x.device.type in ("cpu", "cuda")
        and x.layout is torch.strided
        and not x.is_nested
        and not is_batched(x)
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)  # a wrapper that outlived its transform
        and not is_cast(x)
        and not torch._C._len_torch_dispatch_stack()
        and not x._is_zerotensor()
    )


def sees_rows(rows: tuple[Tensor, ...], x: Tensor) -> bool:
    """The same for the row operands of x, which must be on its device."""
    return all([is_plain(values) and values.device == x.device and not values.is_neg() for values in rows])


def collapsed(mask: Tensor, dim: int) -> Tensor | None:
    """A view of a mask with three dimensions of rows and one of the elements along ``dim``; None if there is no such view."""
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
    """Whether the operators support a scale: in float32 a normal number, so that not all products with it are 0."""
    return SMALLEST <= abs(scale) <= LARGEST


def takes_forward(kernel: str, x: Tensor, dim: int, scale: float) -> bool:
    """Whether a kernel should compute the rows of a contiguous tensor for which :func:`sees_all` is true."""
    if not SCALES[0] <= abs(scale) <= SCALES[1] or x.nbytes < SMALL:
        return False
    length, columns = x.shape[dim], _columns(x, dim)
    if x.is_cuda:
        return fits_a_gpu(x, dim, 1, GPU_FORWARD[kernel, x.itemsize] if scale == 1 else GPU_EVERY)
    if not _has_vectors():
        return False
    if columns > 1:
        return x.nbytes >= LARGE and columns >= NARROW and CPU_ACROSS[kernel, x.itemsize][scale != 1] <= length <= HELD
    shortest = CPU_FORWARD if scale == 1 else CPU_SCALED
    return length >= shortest[kernel, x.itemsize][x.nbytes >= LARGE]


def takes_backward(kernel: str, y: Tensor, dim: int, in_passes: bool) -> bool:
    """The same for backward, given a contiguous output or input.

    ``in_passes``: whether PyTorch needs a pass more, for a scale or a conversion.
    """
    if y.nbytes < SMALL:
        return False
    if y.is_cuda:
        return fits_a_gpu(y, dim, 2, GPU_EVERY if in_passes else GPU_BACKWARD[kernel, y.itemsize])
    is_large = y.nbytes >= LARGE
    return _columns(y, dim) == 1 and (is_large or in_passes) and y.shape[dim] >= (128 if is_large else 256) and _has_vectors()


def fits_types(x: Tensor, dim: int, types: RowTypes) -> bool:
    """Whether a build for particular types supports the rows of a contiguous tensor."""
    if x.numel() == 0 or _columns(x, dim) > 1 or x.numel() // x.shape[dim] >= 2**31:
        return False
    if not x.is_cuda:
        return True
    touched = _vectors_touched(x.shape[dim], _elements_of_a_vector(x, types))
    most = HELD_VECTORS if _has_clusters(x.device) else VECTORS_OF_A_BLOCK
    return x.data_ptr() % ALIGNED == 0 and touched <= most


def takes_types(kernel: str, x: Tensor, dim: int, scale: float, types: RowTypes) -> bool:
    """The same, and whether it is no slower than PyTorch's operators."""
    size = x.numel() * max(x.itemsize, getattr(torch, types.output).itemsize)
    if not SCALES[0] <= abs(scale) <= SCALES[1] or size < SMALL or not fits_types(x, dim, types):
        return False
    length = x.shape[dim]
    if x.is_cuda:
        lengths = GPU_MASKED
        if types.mask == "none" and x.dtype in HALVES:
            is_fused = scale == 1 and x.dtype is torch.float16
            lengths = GPU_CONVERTED[kernel] if is_fused else GPU_EVERY
        return _has(lengths, length, _elements_of_a_vector(x, types))
    mask = types.mask if types.mask in ("none", "bool") else "added"
    return length >= CPU_MASKED[mask][size >= LARGE] and _has_vectors()


def forward(name: str, x: Tensor, dim: int, scale: float) -> Tensor:
    """``name`` of ``scale x`` along ``dim``, for a supported tensor."""
    return call(_operator(name, "forward", part_for(x, dim, "forward")), x, dim, scale)


def backward(name: str, dy: Tensor, kept: Tensor, dim: int, scale: float, from_output: bool) -> Tensor:
    """The gradient, from the output or the input, for supported tensors."""
    kind = kind_of_backward(from_output)
    return call(_operator(name, kind, part_for(kept, dim, kind)), readable(dy), kept, dim, scale)


def kind_of_backward(from_output: bool) -> str:
    """The kind of backward operator."""
    return "backward_from_output" if from_output else "backward"


def readable(dy: Tensor) -> Tensor:
    """The tensor, contiguous and aligned for the GPU's vector loads."""
    dy = dy.contiguous()
    return dy.clone() if dy.data_ptr() % ALIGNED else dy


def _columns(x: Tensor, dim: int) -> int:
    """The stride of rows: how many strided rows are adjacent; 1 if rows are contiguous."""
    return math.prod(x.shape[dim + 1 :])


def _elements_of_a_vector(x: Tensor, types: RowTypes) -> int:
    """The elements that a GPU's thread reads at once in a build for particular types, as kVectorSize of rows_call.h."""
    as_it_is = types.input == types.output and types.mask in ("none", "bool")
    return ALIGNED // x.itemsize if as_it_is else 4


def _vectors_touched(length: int, each: int) -> int:
    """How many vectors of ``each`` elements a row spans at most: no less than rows_call.h's, which knows where rows begin."""
    return (length + 2 * (each - 1) if length % each else length) // each


def _has(lengths: Lengths, length: int, each: int) -> bool:
    """Whether rows are among those for which kernels are used; ``each``: elements of a vector."""
    return any([length in some for some in (lengths.ragged if length % each else lengths.whole)])


def fits_a_gpu(x: Tensor, dim: int, tensors: int, lengths: Lengths) -> bool:
    """Whether the GPU's kernels support the rows of a contiguous tensor.

    Args:
        x: the tensor.
        dim: the dimension of its rows.
        tensors: how many tensors of its shape are read.
        lengths: of the rows for which to use them.
    """
    length, each, columns = x.shape[dim], ALIGNED // x.itemsize, _columns(x, dim)
    if x.data_ptr() % ALIGNED:
        return False
    if columns > 1:
        bytes_across = columns * x.itemsize
        longest = LONG_AND_ODD if bytes_across % WORD and bytes_across < SECTOR else LONGEST_ACROSS
        words = x.numel() // (length * columns) * -(-bytes_across // WORD)
        if not lengths.across <= length < longest or words >= MOST_ACROSS:
            return False
        return length * tensors <= ACROSS_IN_A_BLOCK or _has_clusters(x.device)
    if not _has(lengths, length, each):
        return False
    touched = _vectors_touched(length, each)
    return touched <= VECTORS_OF_A_BLOCK or (tensors * touched <= VECTORS and _has_clusters(x.device))


@cache
def _has_clusters(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] in CLUSTERS


@cache
def _has_vectors() -> bool:
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def part_for(x: Tensor, dim: int, kind: str) -> RowPart:
    """The part of a kernel file that computes an operation for x, or for a saved tensor."""
    dtype, rows = str(x.dtype).removeprefix("torch."), "across" if _columns(x, dim) > 1 else "along"
    return RowPart(dtype, rows, "input" if kind == "backward" else "output")


@cache
def _operator(name: str, kind: str, part: RowPart | None = None) -> Callable[..., Tensor]:
    """An operator of one of the library's kernel files."""
    return operator(kernels.KernelSource.from_file(name), kind, part)


@cache
def operator(source: kernels.KernelSource, kind: str, part: RowPart | None = None) -> Callable[..., Tensor]:
    """An operator of ``rows_binding.h``, for all tensors or those of a part; compiles it if necessary."""
    library = load_part(source, part) if part else kernels.load(source)
    return getattr(torch.ops.jitact, f"{library.name}_{kind}").default


def built(source: KernelSource) -> str | None:
    """The prefix of a build's operator names; None if it is not cached and cannot be compiled."""
    try:
        return kernels.load(source).name
    except ToolchainError:
        return None


def operate(name: str, kind: str, *arguments: Any) -> Tensor:
    """Calls an operator of such a build."""
    return call(getattr(torch.ops.jitact, f"{name}_{kind}").default, *arguments)
