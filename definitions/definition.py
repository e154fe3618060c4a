"""The record of a user's activation, read from a kernel file: operands, what is kept for backward, PyTorch reference."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..kernels import KernelSource, Work
from ..kernels.loader import signature
from ..kernels.loader.signature import Signature
from ..kernels.loader.slopes import slope_source
from ..kernels.loader.source import NEXT_TO_NOTHING
from ..modules import title_of
from ..records import Activation, Channel, Requirement, Row
from ..running import run, run_fitted
from . import kernel_file
from .expression import Expression, ExpressionError
from .operands import Declared, check_element, declared, in_header, read_header
from .reads import read_by_gradients

__all__ = ["NO_FORMULA", "Definition", "channels_declared", "read_definition", "with_header"]

NO_FORMULA = "see its kernel file"
MOST_OPERANDS = 60  # PyTorch's operators take 64 arguments, of which four are those of gradients, such as dy


@dataclass(eq=False)
class Definition(Activation):
    """The record of a user's activation; its ``kernel`` holds the kernel file's text.

    Attributes:
        functions: the functions that the text defines, of those that elementwise.cuh names.
        expression: forward, if its body is a single expression.
    """

    functions: frozenset[str] = frozenset()
    expression: Expression | None = None

    def gradient_reference(self, dy: Tensor, kept: Tensor, params: tuple[float, ...], save: str) -> Tensor:
        """Backward as ``dy`` times the slope. The slope is an activation itself, so it can be differentiated again."""
        slope = self.slope_from_output if save == "output" else self.slope_from_input
        return dy * run(kept, slope, params, False, None, False)

    @cached_property
    def slope_from_input(self) -> Definition:
        """The activation that computes its slope at an input."""
        return self._slope(from_output=False)

    @cached_property
    def slope_from_output(self) -> Definition:
        """The activation that computes its slope from an output."""
        return self._slope(from_output=True)

    def _slope(self, *, from_output: bool) -> Definition:
        kernel = slope_source(self.source, from_output)
        return replace(
            self,
            name=kernel.name,
            declared_saves=("input",),
            kernel=kernel,
            functions=frozenset({"forward"}),
            has_reference=False,  # the definition's reference is the function, not its slope
            passed=(),
            reads={},
        )


def read_definition(
    name: str,
    text: str,
    path: str,
    fields: dict[str, Any],
    reference: Callable[..., Tensor] | None,
    expressions: dict[str, Expression] | None = None,
    beside: Mapping[str, Activation] = MappingProxyType({}),
) -> Definition:
    """The definition in a kernel file's text; ``fields`` override those of the file's header.

    ``expressions`` are the return values of its functions, if they are known; ``beside`` the definitions in the same folder.

    Raises:
        ValueError: the text is not a valid kernel file, or does not match the fields.
        TypeError: the reference does not take the operands and parameters.
    """
    try:
        text = kernel_file.checked(text)
        functions, fields = signature.functions(text), kernel_file.header(text) | fields
        given = fields.get("parameters", {})
        given = kernel_file.librarys_defaults(text) | dict(read_header(given) if isinstance(given, str) else given)
        unmarked = kernel_file.unmarked_numbers(functions, given)
        saves = kernel_file.read_saves(functions, fields.get("keeps", ()))
        used = kernel_file.definitions_used(text, beside)
        kernel = KernelSource(name, text, path, unmarked, given=used)
        names = kernel_file.parameter_names(kernel.signature, given)
        channels = channels_declared(kernel.signature, names, given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    params, channels = declared(name, {each: given[each] for each in names} | channels)
    taken = len(kernel.signature.tensors) + len(params)
    if taken > MOST_OPERANDS:
        raise ValueError(f"{name}: takes {taken} tensors and parameters; there can be at most {MOST_OPERANDS} of them")
    count = signature.prepared(text)
    if "row" in [each.role for each in kernel.signature.operands if each.role in ("channel", "row")][-count:] and count:
        raise ValueError(f"{name}: prepare transforms the last {count} of forward's channels and rows; put each Row<T> before")
    for element in kernel.signature.of("element", "row"):
        check_element(name, element)
    if reference:
        kernel_file.check_reference(name, reference, [*kernel.signature.tensors, *names])
    if expressions is None:
        expressions = _expressions_there(kernel, functions, beside)
    forward = expressions.get("forward")
    kernel = kernel._replace(work=_work(expressions), singles=_singles(kernel.signature, channels))
    definition = Definition(
        name,
        title=title_of(name),
        formula=fields.get("formula") or _on_one_line(functions["forward"].body or "") or NO_FORMULA,
        reference=reference or forward,
        declared_saves=saves,
        params=tuple((param, params[param]) for param in names),
        kernel=kernel,
        fingerprint=_fingerprint(kernel, functions, expressions, names, channels),
        functions=frozenset(functions),
        expression=forward,
        has_reference=bool(reference or forward),
        channels=channels,
        requires=_requirements(forward, names) if forward else (),
        **_gradients_read(kernel.signature, {} if reference else expressions),  # a given reference may read other tensors
    )
    definition.check(tuple([default for _, default in definition.params]), False, None, False)
    if not definition.has_reference:
        definition.reference = _in_float64(definition)
    if forward and forward.random:
        undrawn = _without_dropout(definition, functions["forward"].body or "", beside)
        definition.in_eval = lambda *params: (undrawn, params)
    return definition


def channels_declared(there: Signature, numbers: tuple[str, ...], given: Mapping[str, object]) -> dict[str, Channel]:
    """The channel operands of a kernel file; those that are not declared get the defaults of :class:`Channel`.

    Raises:
        ValueError: a declaration matches no operand of ``forward``, or a parameter has no default.
    """
    channels, rows = there.of("channel"), there.of("row")
    for name, value in given.items():
        if isinstance(value, Row) != (name in rows):
            known = ", ".join(rows) or "none"
            raise ValueError(f"{name} is declared as {value!r}; forward's arguments of type Row<T> are {known}")
        if isinstance(value, Channel) and name not in channels:
            known = ", ".join(channels) or "none"
            raise ValueError(f"{name} is declared as a Channel; forward's arguments of type Channel<T> are {known}")
        if name in channels and not isinstance(value, Channel):
            raise ValueError(f"{name} is a Channel<T> in the kernel file, declared as {value!r}; declare it as a Channel()")
    params = [name for name in given if name not in (*channels, *rows)]
    if set(params) != set(numbers):
        missing = [name for name in numbers if name not in params]
        unknown = [name for name in params if name not in numbers]
        arguments, header = (", ".join(f"{name}{equals}1.0" for name in missing) for equals in ("=", " = "))
        how = f"define(..., {arguments}) or // parameters: {header}" if missing else f"leave out {', '.join(unknown)}"
        every, with_default = (", ".join(each) or "none" for each in (numbers, params))
        raise ValueError(f"forward's parameters are {every}, those with a default {with_default}; {how}")
    return {name: given.get(name, Channel()) for name in channels}


def _in_files_names(there: Signature, *roles: str) -> list[str]:
    return [operand.in_file for operand in there.operands if operand.role in roles]


def _expression(
    there: Signature, body: str, elements: Iterable[str], beside: Mapping[str, Activation], draws: bool = True
) -> Expression:
    """The return value of a kernel file's function, as an expression in its operands.

    Raises:
        ExpressionError: ``body`` is not in the grammar of expressions.
    """
    return Expression(
        body,
        elements,
        _in_files_names(there, "number"),
        channels=_in_files_names(there, "channel", "row"),
        random=_in_files_names(there, "random"),
        of_kernel_file=True,
        draws=draws,
        beside=beside,
    )


def _expressions_there(
    kernel: KernelSource, functions: dict[str, signature.Function], beside: Mapping[str, Activation]
) -> dict[str, Expression]:
    """The return values of a kernel file's functions whose body is a single expression, keyed by function."""
    there, found, own = kernel.signature, {}, _names_defined(signature.code(kernel.text), functions)
    if signature.prepared(kernel.text):  # the functions' arguments are then prepared values, not the operands
        return {}
    elements = _in_files_names(there, "element")
    before = {"forward": elements, "backward": ["dy", *elements], "backward_from_output": ["dy", "y"]}
    for name, function in functions.items():
        if function.body and name in before and not own & {*re.findall(r"\w+", function.body)} - {*function.arguments}:
            try:
                found[name] = _expression(there, function.body, _elements_of(function, before[name]), beside)
            except (ExpressionError, SyntaxError):  # C++ beyond the grammar of expressions, or names that are none in Python
                continue
    return found


def _names_defined(code: str, functions: dict[str, signature.Function]) -> set[str]:
    """Names that a kernel file defines beside the functions, as macros, constants and helpers: there they mean what it says."""
    for start, end in sorted((function.span for function in functions.values()), reverse=True):
        code = code[:start] + code[end:]
    return {*re.findall(r"#\s*define\s+(\w+)|$", code), *re.findall(r"\b(\w+)\s*(?:=(?!=)|\{|\([^()]*\)\s*\{)", code)} - {""}


def _elements_of(function: signature.Function, usual: list[str]) -> list[str]:
    """The names of a function's elementwise arguments, ``usual`` where it gives none.

    Operands of other types may stand between them, and numbers that are not declared as ``Number<T>`` behind them.
    """
    elements = [name for name, type_ in zip(function.arguments, function.types, strict=True) if type_ == "T"]
    return [name or each for name, each in zip(elements, usual, strict=False)]


def _requirements(forward: Expression, names: tuple[str, ...]) -> tuple[Requirement, ...]:
    """Requirements that dropout probabilities which depend on parameters are from 0 to 1."""
    in_file = forward.variables[len(forward.variables) - len(names) :]

    def requirement(text: str, of: Callable[..., float]) -> Requirement:
        for written, name in zip(in_file, names, strict=True):
            text = re.sub(rf"\b{written}\b", name, text)
        return Requirement(f"0 <= {text} <= 1", lambda *params: 0 <= of(*params) <= 1)

    return tuple(requirement(*share) for share in forward.shares)


def _work(expressions: Mapping[str, Expression]) -> Work:
    """The work per element: NEXT_TO_NOTHING for arithmetic alone, as for the library's activations, else the default."""
    usual, forward = Work(), expressions.get("forward")
    if forward is None or not forward.is_arithmetic:
        return usual
    return NEXT_TO_NOTHING if expressions.get("backward", forward).is_arithmetic else usual._replace(forward=1)


def _singles(there: Signature, channels: Mapping[str, Channel]) -> int:
    """How many of the last channel and row operands always have a single value."""
    ones = [name in channels and channels[name].one for name in reversed(there.of("channel", "row"))]
    return [*ones, False].index(False)


def _gradients_read(there: Signature, expressions: Mapping[str, Expression]) -> dict[str, Any]:
    """The record's fields ``reads`` and ``passed``, where they follow from the expressions; else empty."""
    tensors = there.tensors
    alone = len(there.operands) == 1 + len(there.of("number"))  # else second derivatives come from forward's formula
    if expressions.keys() == {"forward"} == there.functions:
        _, reads, passed = read_by_gradients(expressions["forward"].key)
        read = {name: tuple(tensors[by] for by in sorted(reads.get(place, ()))) for place, name in enumerate(tensors)}
        return {"reads": read, "passed": tuple(name for name in there.of("element") if tensors.index(name) in passed)}
    if "backward" in expressions and alone:
        _, x, *_ = expressions["backward"].variables
        return {"reads": {tensors[0]: tensors if x in expressions["backward"].names else ()}, "passed": ()}
    return {"reads": {}, "passed": ()}


def _without_dropout(definition: Definition, body: str, beside: Mapping[str, Activation]) -> Definition:
    """The definition as it is outside of training: without dropout."""
    kernel, there = definition.source, definition.source.signature
    expression = _expression(there, body, _in_files_names(there, "element"), beside, draws=False)
    arguments = ", ".join(f"{each.type} {each.in_file}" for each in there.operands if each.role != "random")
    text = f'#include "elementwise.cuh"\n\nELEMENTWISE T forward({arguments}) {{ return {expression.cpp}; }}\n'
    name = f"{definition.name}_in_eval"
    kernel = kernel._replace(name=name, text=text, path=f"<{name}>")
    return replace(
        definition,
        name=name,
        kernel=kernel,
        reference=expression,
        expression=expression,
        has_reference=True,
        requires=(),
        **_gradients_read(kernel.signature, {"forward": expression}),
    )


def _fingerprint(
    kernel: KernelSource,
    functions: dict[str, signature.Function],
    expressions: dict[str, Expression],
    names: tuple[str, ...],
    channels: dict[str, Channel],
) -> str:
    """A hash of a definition's formula, parameter names, channels and rows, which tells definitions of one name apart.

    If the file consists of expressions alone, their keys stand for the formula, so that spelling makes no difference.
    """
    code = signature.code(kernel.text)
    used = [signature.code(source.text) for source in kernel.all_used if not source.is_librarys]
    formula = " ".join("".join([code, *used]).split())
    for start, end in sorted((function.span for function in functions.values()), reverse=True):
        code = code[:start] + code[end:]
    if expressions.keys() == functions.keys() and re.fullmatch(r'\s*#\s*include\s*"elementwise\.cuh"\s*|\s*', code):
        formula = sorted((name, expression.key) for name, expression in expressions.items())
    hashed = (names, formula, *((name, channel.dim, channel.one) for name, channel in channels.items()))
    hashed += tuple((name, "row") for name in kernel.signature.of("row"))
    return hashlib.sha256(repr(hashed).encode()).hexdigest()[:16]


def _in_float64(definition: Definition) -> Callable[..., Tensor]:
    count = len(definition.layout.tensors)

    def reference(*given: Tensor | float) -> Tensor:
        tensors = tuple([tensor.to(torch.float64) for tensor in given[:count]])
        return run_fitted(definition, tensors, given[count:], False, None, False).to(given[0].dtype)

    return reference


def with_header(definition: Definition) -> str:
    """A definition's kernel file with its name, parameters, saves and formula in the comments at its top."""
    text = definition.source.text
    body = signature.functions(text)["forward"].body or ""
    fields = {
        "activation": definition.name,
        "parameters": in_header(Declared(dict(definition.params), definition.channels)),
        "keeps": ", ".join(definition.saves),
        "formula": "" if definition.formula in (_on_one_line(body), NO_FORMULA) else kernel_file.quoted(definition.formula),
    }
    return kernel_file.with_header(text, fields)


def _on_one_line(text: str) -> str:
    return " ".join(text.split())
