"""Activations of rows defined by users, with a kernel file as ``rows.cuh`` describes it.

The file is compiled, and also translated to torch operations: these compute calls that kernels do not support, and the kernel
is checked against them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..compiling.functions import functions
from ..compiling.reader import Unreadable, read
from ..configs import call
from ..definitions import kernel_file
from ..definitions.definition import channels_declared
from ..definitions.operands import Declared, check_element, declared, in_header, read_header
from ..kernels import KernelSource
from ..kernels.loader.signature import Signature, code, read_signature
from ..kernels.loader.signature import functions as functions_of
from ..kernels.loader.source import RowTypes
from ..modules import title_of
from ..records.dtypes import wider
from . import kernels
from .records import NOTHING, Beside, RowActivation, can

__all__ = ["RowDefinition", "read_rows", "rows_with_header"]


@dataclass(frozen=True, eq=False)
class RowDefinition(RowActivation):
    """The record of a user's activation of rows.

    Attributes:
        text: of the kernel file.
        path: where it was read from.
        formulas: the file as torch operations.
        reference: forward in PyTorch, ``reference(x, *rows, dim, *numbers)``, to check against, if given.
    """

    needs_dim: ClassVar[bool] = True
    is_cast: ClassVar[bool] = False
    text: str = ""
    path: str = ""
    formulas: _Formulas | None = None
    reference: Callable[..., Tensor] | None = None
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
        """Whether the kernel supports it: PyTorch has no operator of its own that could be faster."""
        return kernels.is_scale(scale) and can(x, dim, 1)

    def takes_backward(self, y: Tensor, dim: int, in_passes: bool) -> bool:
        """The same for backward."""
        return can(y, dim, 2)

    def takes_types(self, x: Tensor, dim: int, scale: float, types: RowTypes) -> bool:
        """The same for a build for particular types."""
        return kernels.is_scale(scale) and kernels.fits_types(x, dim, types)

    def forward_by_kernel(self, x: Tensor, dim: int, scale: float, beside: Beside = NOTHING) -> Tensor:
        """The activation of ``scale x``, for a tensor that the kernel supports."""
        operator = kernels.operator(self.source, "forward", kernels.part_for(x, dim, "forward"))
        return call(operator, x, *beside.rows, *beside.numbers, dim, scale)

    def backward_by_kernel(
        self, dy: Tensor, kept: Tensor, dim: int, scale: float, from_output: bool, beside: Beside = NOTHING
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The gradient, from the output or the input, for supported tensors; and those of all row operands in one tensor."""
        kind = kernels.kind_of_backward(from_output)
        operator = kernels.operator(self.source, kind, kernels.part_for(kept, dim, kind))
        return call(operator, kernels.readable(dy), kept, *beside.rows, *beside.numbers, dim, scale)

    def in_pytorch(self, x: Tensor, dim: int, beside: Beside) -> Tensor:
        """The reference or, without one, the kernel file in PyTorch."""
        if self.reference:
            return self.reference(x, *beside.rows, dim, *beside.numbers)
        return super().in_pytorch(x, dim, beside)

    def exact(self, t: Tensor, dim: int, beside: Beside = NOTHING) -> Tensor:
        """The same in float64."""
        return self.in_pytorch(t.double(), dim, _in_float64(beside))

    def exact_gradient(self, dy: Tensor, y: Tensor, dim: int, beside: Beside = NOTHING) -> tuple[Tensor, Tensor]:
        """In float64, the gradient for a given output, and the sum of the absolute values of its terms."""
        return self.formulas.gradient_and_sizes(dy.double(), y.double(), dim, *_in_float64(beside).rows, *beside.numbers)

    def exact_of_rows(self, dy: Tensor, y: Tensor, dim: int, beside: Beside) -> list[tuple[Tensor, Tensor]]:
        """The same for each row operand."""
        return self.formulas.of_rows_and_sizes(dy.double(), y.double(), dim, *_in_float64(beside).rows, *beside.numbers)


def read_rows(
    name: str, text: str, path: str, fields: dict[str, Any], reference: Callable[..., Tensor] | None
) -> RowDefinition:
    """Reads the definition in a kernel file of rows; ``fields`` override those of the file's header.

    Raises:
        ValueError: the text is invalid.
        TypeError: the reference is invalid.
    """
    try:
        text = kernel_file.checked(text)
        fields = kernel_file.header(text) | fields
        given = fields.get("parameters", {})
        given = read_header(given) if isinstance(given, str) else given
        signature = read_signature(text)
        if not signature.folds:
            raise ValueError("forward of a file of rows must take (T, SumOfExp<T> or LogSumExp<T>, operands...)")
        numbers = kernel_file.parameter_names(signature, given)
        channels_declared(signature, numbers, given)
        _check_kept(text)
        _check_totals(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    rows = signature.of("row")
    params, _ = declared(name, {each: given[each] for each in numbers})
    for operand in rows:
        check_element(name, operand)
    for operand in (*rows, *numbers):
        if operand in OF_CALLS:
            raise ValueError(f"{name}: an operand cannot be called {operand!r}: it is an argument of every activation of rows")
    if reference:
        kernel_file.check_reference(name, reference, ["x", *rows, "dim", *numbers])
    formulas = _Formulas(name, text, signature)
    return RowDefinition(
        name,
        title=title_of(name),
        formula=fields.get("formula") or formulas.formula,
        kernel=name,
        theirs=formulas.forward,
        eager=formulas.forward,
        eager_gradients=formulas.gradients,
        saves=_saves(name, fields.get("keeps", ())),
        own_gradient=True,
        rows=rows,
        params=tuple((number, params[number]) for number in numbers),
        text=text,
        path=path,
        formulas=formulas,
        reference=reference,
        fingerprint=hashlib.sha256(" ".join(code(text).split()).encode()).hexdigest()[:16],
    )


def _check_kept(text: str) -> None:
    """Raises ValueError if ``forward`` uses what SumOfExp keeps as a number: it is e^t times a factor of the row."""
    found = re.search(r"\bforward\s*\(\s*T\s+(\w+)\s*,\s*SumOfExp<T>\s*(\w+)[^)]*\)\s*\{([^}]*)\}", code(text))
    if found and re.search(rf"\b{found[1]}\b", re.sub(rf"\b{found[2]}\.share\(\s*{found[1]}\s*\)", "", found[3])):
        use = f"{found[2]}.share({found[1]})"
        raise ValueError(f"forward uses {found[1]} otherwise than as {use}; LogSumExp<T> gives elements themselves")


def _check_totals(text: str) -> None:
    """Raises ValueError if a function reads a total that ``fold_from_output`` does not return: it would be any number."""
    sums, plain = functions_of(text)["fold_from_output"].results, code(text)
    for found in re.finditer(r"\.of\s*\[\s*(\d+)\s*\]", plain):
        if int(found[1]) >= sums:
            line = plain.count("\n", 0, found.start()) + 1
            raise ValueError(f"line {line}: there is no {found[0]}: fold_from_output returns {sums}, counted from 0")


def rows_with_header(definition: RowDefinition) -> str:
    """A definition's kernel file with all fields in its header comments."""
    formula = "" if definition.formula == definition.formulas.formula else kernel_file.quoted(definition.formula)
    parameters = in_header(Declared(dict(definition.params), {}))
    fields = {"activation": definition.name, "parameters": parameters, "keeps": ", ".join(definition.saves), "formula": formula}
    return kernel_file.with_header(definition.text, fields)


def _saves(name: str, wanted: Any) -> tuple[str, ...]:
    wanted = kernel_file.listed(wanted)
    for save in wanted:
        if save not in ("output", "input"):
            raise ValueError(f"{name}: backward cannot keep {save!r} of rows, only output, input")
    return tuple(dict.fromkeys([*wanted, "output", "input"]))


class _Formulas:
    """A kernel file of rows as torch operations."""

    def __init__(self, name: str, text: str, signature: Signature) -> None:
        """Translates the file. The methods take its operands in this order: row operands, then numbers.

        Raises:
            ValueError: the file has more than arithmetic.
        """
        self.name, self.rows = name, signature.of("row")
        given = [*self.rows, *signature.of("number")]
        self.order = [given.index(operand.name) for operand in signature.operands[2:]]
        known = functions(torch.float64, torch.device("cpu"))  # PyTorch's functions, which serve every dtype
        try:
            self.there = read(_as_elements(text), known | SMOOTH | OF_ROWS, only=_only)
        except Unreadable as error:
            raise ValueError(f"{name}: a file of rows is arithmetic, for PyTorch computes it, too: {error}") from None
        self.logarithms = "LogSumExp<T>" in code(text)
        body = re.search(r"\bforward\s*\([^()]*\)\s*\{\s*return\s+([^;]*);", code(text))
        self.formula = " ".join(body[1].split()) if body else "see its kernel file"

    def _in_order(self, x: Tensor, operands: tuple[Tensor | float, ...]) -> list[Tensor]:
        """The operands as tensors, in the order of the file's functions."""
        wide = wider(x.dtype)
        tensors = [
            given.to(wide) if isinstance(given, Tensor) else torch.full((), given, dtype=wide, device=x.device)
            for given in operands
        ]
        return [tensors[k] for k in self.order]

    def forward(
        self, x: Tensor, dim: int = -1, *operands: Tensor | float, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Computes the activation of rows along a dimension; the arguments are as of ``torch.softmax``."""
        x = x if dtype is None else x.to(dtype)
        if not x.is_floating_point():
            raise TypeError(f"{self.name}: expected a floating tensor, got one of {x.dtype}; dtype= converts it")
        t = x.to(wider(x.dtype))
        if t.numel() == 0:
            y = torch.softmax(t, dim)  # checks the dimension
            return sum((values for values in operands if isinstance(values, Tensor)), y).to(x.dtype)
        peak, place = t.detach().max(dim, keepdim=True)  # results do not depend on it
        terms, given = (t - peak).exp(), self._in_order(x, operands)
        if not self.logarithms:
            return self.there["forward"](terms, terms.sum(dim, keepdim=True), *given).to(x.dtype)
        highest = terms.gather(dim, place)  # 1: the sum of the others is kept separate
        rest = terms.scatter(dim, place, 0.0).sum(dim, keepdim=True) + (highest - highest.detach())
        return self.there["forward"](t, (peak, rest.log1p()), *given).to(x.dtype)

    def gradients(self, dy: Tensor, y: Tensor, dim: int, *operands: Tensor | float) -> tuple[Tensor, ...]:
        """The gradients from the output: of x, not rounded to its dtype, and of row operands."""
        totals = self._totals(dy, y, dim, operands)
        return self._of_totals(dy, y, totals, operands), *self._of_rows(y, totals, operands)

    def gradient_and_sizes(self, dy: Tensor, y: Tensor, dim: int, *operands: Tensor | float) -> tuple[Tensor, Tensor]:
        """The gradient, and the sum of the absolute values of its terms: the one of dy itself, and one for each total."""
        sizes = [term.abs().sum(dim, keepdim=True) for term in self._terms(dy, y, operands)]
        nothing = [torch.zeros_like(size) for size in sizes]
        found = self._of_totals(dy, y, nothing, operands).abs()
        for k, size in enumerate(sizes):
            one = [*nothing[:k], torch.ones_like(size), *nothing[k + 1 :]]
            found = found + self._of_totals(torch.zeros_like(dy), y, one, operands).abs() * size
        return self.gradients(dy, y, dim, *operands)[0], found

    def of_rows_and_sizes(self, dy: Tensor, y: Tensor, dim: int, *operands: Tensor | float) -> list[tuple[Tensor, Tensor]]:
        """The same for row operands; the effect of each total's error is another term."""
        totals = [total.detach().requires_grad_() for total in self._totals(dy, y, dim, operands)]
        sizes = [term.abs().sum(dim, keepdim=True) for term in self._terms(dy, y, operands)]
        found = []
        with torch.enable_grad():
            for gradient in self._of_rows(y, totals, operands):
                there = gradient.requires_grad
                slopes = torch.autograd.grad(gradient.sum(), totals, allow_unused=True, retain_graph=True) if there else ()
                terms = [slope.abs() * size for slope, size in zip(slopes, sizes, strict=False) if slope is not None]
                found.append((gradient.detach(), sum(terms, gradient.detach().abs())))
        return found

    def _terms(self, dy: Tensor, y: Tensor, operands: tuple[Tensor | float, ...]) -> tuple[Tensor, ...]:
        """Each element's terms of its row's totals."""
        wide = wider(y.dtype)
        return _several(self.there["fold_from_output"](dy.to(wide), y.to(wide), *self._in_order(y, operands)), y.to(wide))

    def _totals(self, dy: Tensor, y: Tensor, dim: int, operands: tuple[Tensor | float, ...]) -> list[Tensor]:
        return [term.sum(dim, keepdim=True) for term in self._terms(dy, y, operands)]

    def _of_totals(self, dy: Tensor, y: Tensor, totals: list[Tensor], operands: tuple[Tensor | float, ...]) -> Tensor:
        wide = wider(y.dtype)
        return self.there["backward_from_output"](dy.to(wide), y.to(wide), totals, *self._in_order(y, operands))

    def _of_rows(self, y: Tensor, totals: list[Tensor], operands: tuple[Tensor | float, ...]) -> list[Tensor]:
        """The gradients of row operands, summed to their shapes."""
        if not self.rows:
            return []
        found = _several(self.there["backward_of_row"](totals, *self._in_order(y, operands)), totals[0])
        return [each.sum_to_size(values.shape).to(values.dtype) for each, values in zip(found, operands, strict=False)]


def _only(condition: Tensor | bool, value: Any) -> Any:
    """A value whose derivative is that of ``value`` where a condition holds, and 0 elsewhere, even times infinity."""
    if isinstance(value, tuple | list):
        return [_only(condition, each) for each in value]
    if not isinstance(condition, Tensor) or not isinstance(value, Tensor):
        return value
    return torch.where(condition, value, value.detach())


def _several(results: object, like: Tensor) -> tuple[Tensor, ...]:
    """A function's result or results, each of which may be a number, as tensors of the shape of ``like``."""
    several = results if isinstance(results, tuple) else (results,)
    return tuple([each.expand_as(like) if isinstance(each, Tensor) else torch.full_like(like, each) for each in several])


def _in_float64(beside: Beside) -> Beside:
    return Beside(tuple(values.double() for values in beside.rows), beside.numbers)


OF_ROWS: dict[str, Callable[..., Tensor]] = {
    "share": lambda total, kept: kept / total,
    "log_share": lambda row, kept: kept - row[0] - row[1],
    "total": lambda totals: totals[0],
    "times_exp": lambda totals, y: torch.exp(y) * totals[0],
}
"""The methods of ``rows.cuh``, with the fold as first argument: SumOfExp's total; LogSumExp's peak, and the difference between
the logarithm of the sum and it; Sum's totals."""

OF_CALLS = ("x", "input", "dim", "dtype", "scale", "mask", "save")
"""Names that operands cannot have."""


SMOOTH: dict[str, Callable[..., Tensor]] = {
    "expm1": torch.expm1,
    "sigmoid": torch.sigmoid,
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "times_sigmoid": lambda a, x: a * torch.sigmoid(x),
}
"""Functions that autograd must differentiate correctly at 0. Those for elementwise files, which are not differentiated by
autograd, have a kink there."""


def _as_elements(text: str) -> str:
    """A file of rows rewritten as an elementwise file, for the reader."""
    text = code(text).replace('"rows.cuh"', '"elementwise.cuh"')
    text = re.sub(r"\b(?:SumOfExp|LogSumExp|Sum)<T(?:,\s*\d+)?>", "Row<T>", text)
    text = re.sub(r"\b(\w+)\.(share|log_share|times_exp)\s*\(", r"\2(\1, ", text)
    return re.sub(r"\b(\w+)\.total\b", r"total(\1)", text)
