"""Activations of rows that users define, by a kernel file as ``rows.cuh`` describes it.

The file is compiled, and read as torch operations too: these compute what no kernel takes, and are what it is checked against.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..compiling.functions import functions
from ..compiling.reader import Unreadable, read
from ..configs import call
from ..definitions import kernel_file
from ..kernels import KernelSource
from ..kernels.loader.signature import code, read_signature
from ..kernels.loader.source import RowTypes
from . import kernels
from .records import RowActivation, can

__all__ = ["RowDefinition", "read_rows", "rows_with_header"]


@dataclass(frozen=True, eq=False)
class RowDefinition(RowActivation):
    """The record of a user's activation of rows.

    Attributes:
        text: of the kernel file.
        path: where that came from.
        formulas: the file as torch operations.
        reference: forward in PyTorch, ``reference(x, dim)``, to check against, if one is given.
    """

    text: str = ""
    path: str = ""
    formulas: _Formulas | None = None
    reference: Callable[[Tensor, int], Tensor] | None = None
    fingerprint: str = field(default="")

    @property
    def source(self) -> KernelSource:
        """What is compiled."""
        return KernelSource(self.name, self.text, self.path)

    @property
    def yardstick(self) -> str:
        """What :meth:`exact` computes."""
        return "the reference" if self.reference else "its own formula in PyTorch"

    def takes_forward(self, x: Tensor, dim: int, scale: float) -> bool:
        """Whether the kernel can: there is nothing else that could be faster."""
        return 2**-126 <= abs(scale) < float("inf") and can(x, dim, 1)

    def takes_backward(self, y: Tensor, dim: int) -> bool:
        """The same of backward."""
        return can(y, dim, 2)

    def takes_operands(self, x: Tensor, dim: int, scale: float, types: RowTypes) -> bool:
        """The same of a build for some types."""
        return 2**-126 <= abs(scale) < float("inf") and kernels.fits_operands(x, dim, types)

    def forward_by_kernel(self, x: Tensor, dim: int, scale: float) -> Tensor:
        """The activation of ``scale x``, for a tensor that is taken."""
        return call(kernels.operator(self.source, "forward"), x, dim, scale)

    def backward_by_kernel(self, dy: Tensor, kept: Tensor, dim: int, scale: float, from_output: bool) -> Tensor:
        """The gradient, from the output or the input, for tensors that are taken."""
        operator = kernels.operator(self.source, kernels.kind_of_backward(from_output))
        return call(operator, kernels.readable(dy), kept, dim, scale)

    def exact(self, t: Tensor, dim: int) -> Tensor:
        """In float64 what the kernel file computes, or the reference."""
        return (self.reference or self.eager)(t.double(), dim)

    def exact_gradient(self, dy: Tensor, y: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """In float64 the gradient that follows from an output, and the sum of the sizes of its terms."""
        return self.formulas.gradient_and_sizes(dy.double(), y.double(), dim)


def read_rows(
    name: str, text: str, path: str, fields: dict[str, Any], reference: Callable[[Tensor, int], Tensor] | None
) -> RowDefinition:
    """The definition in the text of a kernel file of rows; ``fields`` come before those of the file's header.

    Raises:
        ValueError: the text will not do.
        TypeError: the reference will not do.
    """
    try:
        text = kernel_file.checked(text)
        fields = kernel_file.header(text) | fields
        read_signature(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if reference:
        kernel_file.check_reference(name, reference, ["x", "dim"])
    if fields.get("parameters"):
        raise ValueError(f"{name}: a file of rows takes no parameters: write a number as #define NAME 1.0")
    formulas = _Formulas(name, text)
    return RowDefinition(
        name,
        title="".join(part[:1].upper() + part[1:] for part in name.split("_")),
        formula=fields.get("formula") or formulas.formula,
        kernel=name,
        theirs=formulas.forward,
        eager=formulas.forward,
        gradient=formulas.gradient,
        saves=_saves(name, fields.get("keeps", ())),
        text=text,
        path=path,
        formulas=formulas,
        reference=reference,
        fingerprint=hashlib.sha256(" ".join(code(text).split()).encode()).hexdigest()[:16],
    )


def rows_with_header(definition: RowDefinition) -> str:
    """A definition's kernel file with all its fields in the comments at its top."""
    formula = "" if definition.formula == definition.formulas.formula else kernel_file.quoted(definition.formula)
    fields = {"activation": definition.name, "keeps": ", ".join(definition.saves), "formula": formula}
    return kernel_file.with_header(definition.text, fields)


def _saves(name: str, wanted: Any) -> tuple[str, ...]:
    wanted = re.findall(r"\w+", wanted) if isinstance(wanted, str) else list(wanted)
    for save in wanted:
        if save not in ("output", "input"):
            raise ValueError(f"{name}: backward cannot keep {save!r} of rows, only output, input")
    return tuple(dict.fromkeys([*wanted, "output", "input"]))


class _Formulas:
    """A kernel file of rows as torch operations."""

    def __init__(self, name: str, text: str) -> None:
        """Reads the file.

        Raises:
            ValueError: there is more in it than arithmetic.
        """
        self.name = name
        known = functions(torch.float64, torch.device("cpu"))  # PyTorch's own, of whatever type
        try:
            self.there = read(_as_elements(text), known | SMOOTH | OF_ROWS)
        except Unreadable as error:
            raise ValueError(f"{name}: a file of rows is arithmetic, for PyTorch computes it, too: {error}") from None
        self.logarithms = "LogSumExp<T>" in code(text)
        body = re.search(r"\bforward\s*\([^()]*\)\s*\{\s*return\s+([^;]*);", code(text))
        self.formula = " ".join(body[1].split()) if body else "see its kernel file"

    def forward(self, x: Tensor, dim: int = -1, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
        """What the file computes of the rows along a dimension, as ``torch.softmax`` is called."""
        x = x if dtype is None else x.to(dtype)
        if not x.is_floating_point():
            raise TypeError(f"{self.name}: expected a floating tensor, got one of {x.dtype}; dtype= converts it")
        t = x.to(torch.promote_types(x.dtype, torch.float32))
        if t.numel() == 0:
            return x.clone()
        peak, place = t.detach().max(dim, keepdim=True)  # which shares do not depend on
        terms = (t - peak).exp()
        if not self.logarithms:
            return self.there["forward"](terms, terms.sum(dim, keepdim=True)).to(x.dtype)
        highest = terms.gather(dim, place)  # 1: the sum beside it is kept apart
        rest = terms.scatter(dim, place, 0.0).sum(dim, keepdim=True) + (highest - highest.detach())
        return self.there["forward"](t, (peak, rest.log1p())).to(x.dtype)

    def gradient(self, dy: Tensor, y: Tensor, dim: int) -> Tensor:
        """The gradient from the output."""
        return self._of_total(dy, y, self._terms(dy, y).sum(dim, keepdim=True)).to(y.dtype)

    def gradient_and_sizes(self, dy: Tensor, y: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """The gradient, and the sum of the sizes of its terms: of dy's own, and of those that come by the row's total."""
        none, total = torch.zeros_like(dy), torch.ones_like(y.select(dim, 0).unsqueeze(dim))
        by_total = self._of_total(none, y, total).abs()
        own = self._of_total(dy, y, 0 * total).abs()
        return self.gradient(dy, y, dim), own + by_total * self._terms(dy, y).abs().sum(dim, keepdim=True)

    def _terms(self, dy: Tensor, y: Tensor) -> Tensor:
        """What each element adds to its row's total."""
        wide = torch.promote_types(y.dtype, torch.float32)
        return self.there["fold_from_output"](dy.to(wide), y.to(wide))

    def _of_total(self, dy: Tensor, y: Tensor, total: Tensor) -> Tensor:
        wide = torch.promote_types(y.dtype, torch.float32)
        return self.there["backward_from_output"](dy.to(wide), y.to(wide), total)


OF_ROWS: dict[str, Callable[..., Tensor]] = {
    "share": lambda total, kept: kept / total,
    "log_share": lambda row, kept: kept - row[0] - row[1],
    "total": lambda total: total,
    "times_exp": lambda total, y: torch.exp(y) * total,
}
"""What ``rows.cuh`` has, with the fold as their first argument: SumOfExp's total; LogSumExp's peak, and how far the logarithm
of the sum is above it; Sum's total."""


SMOOTH: dict[str, Callable[..., Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "times_sigmoid": lambda a, x: a * torch.sigmoid(x),
}
"""What is differentiated here. The forms for files of elements, whose gradients are found otherwise, have a kink at 0."""


def _as_elements(text: str) -> str:
    """A file of rows in the words of a file of elements."""
    text = re.sub(r"\b(?:SumOfExp|LogSumExp|Sum)<T>", "Row<T>", code(text)).replace('"rows.cuh"', '"elementwise.cuh"')
    text = re.sub(r"\b(\w+)\.(share|log_share|times_exp)\s*\(", r"\2(\1, ", text)
    return re.sub(r"\b(\w+)\.total\b", r"total(\1)", text)
