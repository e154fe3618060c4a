"""The records of activations of rows, and how their calls run: by kernels or by PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import KernelSource
from ..kernels.loader.source import RowTypes
from ..measuring.row_errors import exact_gradient, exact_output
from . import kernels

__all__ = ["NOTHING", "TABLE", "Beside", "RowActivation", "can"]

ANY_LENGTH = kernels.Lengths((range(1, kernels.LONGEST),), (range(1, kernels.LONGEST),), across=1)


def can(x: Tensor, dim: int, reads: int) -> bool:
    """Whether the operators support the rows of contiguous tensors, of which they read ``reads``, even if PyTorch is faster."""
    if x.dtype not in kernels.DTYPES or x.numel() == 0:
        return False
    return not x.is_cuda or kernels.fits_a_gpu(x, dim, reads, ANY_LENGTH)


class Beside(NamedTuple):
    """The arguments of a call other than x: the operands of its kernel file.

    Attributes:
        rows: tensors that broadcast to x's shape, of size 1 in the dimension of the rows.
        numbers: floats.
    """

    rows: tuple[Tensor, ...] = ()
    numbers: tuple[float, ...] = ()


NOTHING = Beside()


@dataclass(frozen=True, eq=False)
class RowActivation:
    """The record of an activation of rows.

    Attributes:
        name: of the function.
        title: of the module class.
        formula: for documentation.
        kernel: the kernel file's name.
        theirs: the activation in PyTorch, ``theirs(x, dim, _stacklevel=3, dtype=None)``.
        eager: the kernel file in PyTorch, which is applied to x after scale and mask; called in the same way. Both take
            :class:`Beside`'s rows and numbers after ``dim``.
        eager_gradients: its gradients in PyTorch, of x and of each row operand, from the output:
            ``eager_gradients(dy, y, dim, rows..., numbers...)``.
        factor: the factor of x, in addition to the scale.
        saves: what can be saved for backward, the default first.
        gives_shares: whether outputs are shares of their row, so that the gradient of an element with share 0 is 0.
        own_gradient: whether ``gradients`` computes gradients from the saved tensors where no kernel does; else they are those
            of ``theirs``.
        rows: the names of row operands.
        params: the names of numbers, with defaults.
        builds: results of :meth:`built_for`, by types.
        beside: names and defaults of the fused operands that the function takes: none.
        needs_dim: whether a call has to give a dimension; else PyTorch chooses without one.
        is_cast: whether PyTorch computes it in float32 under a GPU's autocast; that of a CPU leaves rows as they are.
    """

    beside: ClassVar[dict[str, Any]] = {}
    needs_dim: ClassVar[bool] = False
    is_cast: ClassVar[bool] = True
    name: str
    title: str
    formula: str
    kernel: str
    theirs: Callable[..., Tensor]
    eager: Callable[..., Tensor]
    eager_gradients: Callable[..., tuple[Tensor, ...]]
    factor: float = 1.0
    saves: tuple[str, ...] = ("output", "input")
    gives_shares: bool = False
    own_gradient: bool = False
    rows: tuple[str, ...] = ()
    params: tuple[tuple[str, float], ...] = ()
    builds: dict[RowTypes, str | None] = field(default_factory=dict, repr=False)

    def built_for(self, types: RowTypes) -> str | None:
        """The prefix of the operator names of a build for particular types; None if it cannot be compiled."""
        if types not in self.builds:
            self.builds[types] = kernels.built(self.source._replace(rows=types))
        return self.builds[types]

    @property
    def yardstick(self) -> str:
        """What :meth:`exact` computes."""
        return "PyTorch"

    @property
    def source(self) -> KernelSource:
        """What is compiled."""
        return KernelSource.from_file(self.kernel)

    def takes_forward(self, x: Tensor, dim: int, scale: float) -> bool:
        """Whether a kernel should compute the rows of a contiguous tensor for which :func:`kernels.sees_all` is true."""
        return kernels.takes_forward(self.kernel, x, dim, scale)

    def takes_backward(self, y: Tensor, dim: int, in_passes: bool) -> bool:
        """The same for backward, given a contiguous output or input; ``in_passes``: whether PyTorch needs a pass more."""
        return kernels.takes_backward(self.kernel, y, dim, in_passes)

    def takes_types(self, x: Tensor, dim: int, scale: float, types: RowTypes) -> bool:
        """The same for a build for particular types, if it is no slower than a mask or conversion before the usual kernel."""
        return kernels.takes_types(self.kernel, x, dim, scale, types)

    def forward_by_kernel(self, x: Tensor, dim: int, scale: float, beside: Beside = NOTHING) -> Tensor:
        """The activation of ``scale x``, for a supported tensor."""
        return kernels.forward(self.kernel, x, dim, scale)

    def backward_by_kernel(
        self, dy: Tensor, kept: Tensor, dim: int, scale: float, from_output: bool, beside: Beside = NOTHING
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The gradient, from the output or the input, for supported tensors; as the operators return it."""
        return kernels.backward(self.kernel, dy, kept, dim, scale, from_output)

    def gradients(self, dy: Tensor, y: Tensor, dim: int, beside: Beside = NOTHING) -> tuple[Tensor, ...]:
        """The gradients of x and of each row operand in PyTorch, from the output."""
        return self.eager_gradients(dy, y, dim, *beside.rows, *beside.numbers)

    def in_pytorch(self, x: Tensor, dim: int, beside: Beside) -> Tensor:
        """The kernel file in PyTorch, in x's dtype."""
        return self.eager(x, dim, *beside.rows, *beside.numbers)

    def exact(self, t: Tensor, dim: int, beside: Beside = NOTHING) -> Tensor:
        """The kernel file in float64."""
        return exact_output(self.kernel, t, dim)

    def exact_gradient(self, dy: Tensor, y: Tensor, dim: int, beside: Beside = NOTHING) -> tuple[Tensor, Tensor]:
        """In float64, the gradient for a given output, and the sum of the absolute values of its terms."""
        return exact_gradient(self.kernel, dy, y, dim)

    def exact_of_rows(self, dy: Tensor, y: Tensor, dim: int, beside: Beside) -> list[tuple[Tensor, Tensor]]:
        """The same for the gradient of each row operand."""
        return []


def _softmax_gradients(dy: Tensor, y: Tensor, dim: int) -> tuple[Tensor]:
    return (torch._softmax_backward_data(dy, y, dim, y.dtype),)


def _log_softmax_gradients(dy: Tensor, y: Tensor, dim: int) -> tuple[Tensor]:
    return (torch._log_softmax_backward_data(dy, y, dim, y.dtype),)


TABLE: dict[str, RowActivation] = {
    record.name: record
    for record in (
        RowActivation("softmax", "Softmax", "exp(x_i) / sum_j exp(x_j)", "softmax",
                      F.softmax, F.softmax, _softmax_gradients, gives_shares=True),
        RowActivation("log_softmax", "LogSoftmax", "x_i - log(sum_j exp(x_j))", "log_softmax",
                      F.log_softmax, F.log_softmax, _log_softmax_gradients),
        RowActivation("softmin", "Softmin", "exp(-x_i) / sum_j exp(-x_j)", "softmax",
                      F.softmin, F.softmax, _softmax_gradients, factor=-1.0, gives_shares=True),
    )
}  # fmt: skip
"""The library's own, by name."""
