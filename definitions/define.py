"""Activations that users define: from an expression, from a kernel file's text, from a folder of kernel files.

Definitions are compiled and run in this process, with its privileges: use only definitions and folders from sources whose
programs you would run.
"""

from __future__ import annotations

import keyword
import os
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from .. import registry
from ..modules import ActivationModule
from ..modules import make_module as make_elementwise
from ..records import Channel, Row
from ..rows.definition import RowDefinition, read_rows, rows_with_header
from ..rows.modules import RowModule, forget, make_module
from ..rows.modules import names as row_names
from . import kernel_file
from .definition import Definition, read_definition, with_header
from .expression import DROPOUT, FUNCTIONS, Expression, ExpressionError, in_cpp
from .operands import Declared, check_element, check_operands, declared, reserves_arguments

__all__ = ["Channel", "Definition", "Row", "define", "load_folder", "save_folder", "unregistered"]

Defined = Definition | RowDefinition


@reserves_arguments
def define(
    name: str,
    expression: str | None = None,
    backward: str | None = None,
    *,
    operands: Iterable[str] | None = None,
    backward_from_output: str | None = None,
    source: str | Path | None = None,
    saves: str | Iterable[str] | None = None,
    reference: Callable[..., Tensor] | None = None,
    formula: str | None = None,
    **params: float | Channel | Row,
) -> type[ActivationModule] | type[RowModule]:
    """Makes an activation and registers it: ``define("swoosh", "x * sin(x)")``, ``define("my_swiglu", "silu(gate) * up")``.

    The result is a module class like the library's own. From then on :func:`jitact.get` knows the name, and ``jitact.<name>``
    is the function. The kernel is compiled at first use. Defining a name again replaces it; modules of the old class keep
    working.

    Definitions are compiled and run in this process, with its privileges.

    Args:
        name: the name, an identifier that no activation of the library has.
        expression: forward, as text: arithmetic, comparisons, ``condition ? a : b``, ``pi``, the functions that
            kernels/device/math.cuh lists, activations by their names, and ``dropout(value, p)``. A name before a parenthesis
            is a function, a name in ``params`` is a parameter or an operand of that kind, and any other name is a tensor.
            Numbers have the type of the tensors: ``1 / 2`` is 0.5.
        backward: the gradient as an expression of ``dy``, the tensor and the parameters. By default the compiler derives it;
            with gradients of several operands it always does.
        operands: the names of the tensors in the order of a call's arguments; by default ``x``, then the others in order of
            occurrence. Channel and row operands follow the tensors unless they are listed too.
        backward_from_output: the gradient as an expression of ``dy``, the output ``y`` and the parameters, for
            ``save="output"``.
        source: a whole kernel file, as its text or a Path, in place of the expressions; docs/adding.md describes kernel files.
            One that includes ``rows.cuh`` makes a function and a module class like softmax's. A kernel file of the library,
            unchanged, has the library's defaults.
        saves: what can be kept for backward, one or several of "input", "output" and "bit", the default first. By default all
            that the kernel file has functions for.
        reference: the same function in PyTorch, which :func:`jitact.check` compares with: ``reference(*tensors, *params)``,
            elementwise tensors first; for rows ``reference(x, *rows, dim, *params)``. By default the expression evaluated in
            PyTorch, and for a kernel file its compiled forward in float64.
        formula: the formula as text, for documents and messages; by default the expression.
        params: parameters with their defaults, in the order of the constructor's arguments; a learned operand with a value for
            each channel as :class:`Channel`; an operand with a value for each row as :class:`Row`.

    Returns:
        The module class.

    Raises:
        ExpressionError: an expression is invalid; the message marks the place. It is a ValueError.
        ValueError: the name, a parameter or the kernel file is invalid; the message says why.
        TypeError: an argument has the wrong type.
    """
    _check_arguments(name, expression, source, saves, reference, formula, backward, backward_from_output)
    given = declared(name, params)
    if (expression is None) == (source is None):
        raise TypeError(f"define({name!r}, ...) takes an expression or source=, one of the two")
    if source is not None and (backward, backward_from_output) != (None, None):
        raise TypeError(f"define({name!r}, source=...) takes the gradient from the source; leave out backward")
    if source is not None and operands is not None:
        raise TypeError(f"define({name!r}, source=...) takes the operands from the source; leave out operands")
    fields = {"parameters": (given.params | given.beside) or None, "keeps": _listed(name, saves), "formula": formula}
    expressions, path = None, f"<{name}>"
    if expression is not None:
        gradients = {"backward": backward, "backward_from_output": backward_from_output}
        gradients = {key: body for key, body in gradients.items() if body is not None}
        expressions, source = _written(name, expression, gradients, operands, given)
        fields["formula"] = formula or expressions["forward"].text
    elif isinstance(source, Path):
        source, path = kernel_file.read_file(source), str(source.resolve())
    fields = {key: value for key, value in fields.items() if value is not None}
    with registry.lock:
        _check_name(name)
        return _register(_read(name, source, path, fields, reference, expressions))


def unregistered(name: str, expression: str, **params: float | Channel | Row) -> type[ActivationModule]:
    """The class that :func:`define` makes of an expression, without registering it under its name."""
    given = declared(name, params)
    expressions, source = _written(name, expression, {}, None, given)
    fields = {"parameters": given.params | given.beside, "formula": expressions["forward"].text}
    return make_elementwise(read_definition(name, source, f"<{name}>", fields, None, expressions))


def _written(
    name: str, expression: str, gradients: dict[str, str], operands: Iterable[str] | None, given: Declared
) -> tuple[dict[str, Expression], str]:
    """The expressions of a definition, keyed by kernel function, and the text of its kernel file."""
    listed = None if operands is None else check_operands(name, operands, given)
    expressions = _read_expressions(name, expression, gradients, listed, given)
    return expressions, _write_kernel(expressions, listed or (), given)


def _read(
    name: str,
    text: str,
    path: str,
    fields: dict[str, Any],
    reference: Callable[..., Tensor] | None = None,
    expressions: dict[str, Expression] | None = None,
    beside: Mapping[str, Defined] = MappingProxyType({}),
) -> Defined:
    """The definition in a kernel file's text, elementwise or of rows; see ``read_definition`` and ``read_rows``."""
    if kernel_file.is_of_rows(text):
        return read_rows(name, text, path, fields, reference)
    beside = {key: record for key, record in beside.items() if isinstance(record, Definition)}
    return read_definition(name, text, path, fields, reference, expressions, beside)


def _register(record: Defined) -> type[ActivationModule] | type[RowModule]:
    """Registers a definition under its name, in place of an earlier one."""
    forget(record.name)
    if isinstance(record, Definition):
        return registry.register(record)
    if record.name in registry.REGISTRY:
        registry.unregister(record.name)
    return make_module(record)


def save_folder(folder: str | Path, names: str | Iterable[str] | None = None) -> list[Path]:
    """Writes definitions to a folder, a kernel file ``<name>.cu`` each, which :func:`load_folder` reads back.

    The file holds the whole definition, parameters and ``saves`` in the comments at its top, except a ``reference``, which
    is Python.

    Args:
        folder: created if it does not exist; files of the same names are overwritten.
        names: the definitions to write, one or several, with those that they use; by default all.

    Raises:
        KeyError: unknown name.
        TypeError: ``folder`` is no path, or the names are neither a string nor several.
        ValueError: a name is one of the library's own; or a definition uses another that has been defined again since.
    """
    _check_folder("save_folder", folder)
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, Iterable | None):
        raise TypeError(f"save_folder: names are strings, by default all definitions; got {names!r}")
    every = [*registry.REGISTRY.values(), *map(registry.get, row_names())]
    records = [cls.activation for cls in (every if names is None else map(registry.get, names))]
    if names is None:
        records = [record for record in records if isinstance(record, Defined)]
    for record in records:
        if not isinstance(record, Defined):
            file = f"kernels/{record.source.name}.cu"
            raise ValueError(f"{record.name} is one of jitact's own activations; its kernel file is {file}")
    used = [(record, source) for record in records for source in record.source.all_used if not source.is_librarys]
    for record, source in used:
        now = registry.REGISTRY.get(source.name)
        if now is None or now.activation.source != source:
            what = "is not defined any more" if now is None else "has been defined again since"
            if source.name == record.name:
                raise ValueError(f"{record.name} uses an earlier definition of that name; give one of the two another name")
            raise ValueError(f"{record.name} uses {source.name}, which {what}; define {record.name} again, or leave it out")
    records = list(dict.fromkeys([*records, *(registry.REGISTRY[source.name].activation for _, source in used)]))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{record.name}.cu" for record in records]
    for path, record in zip(paths, records, strict=True):
        text = rows_with_header(record) if isinstance(record, RowDefinition) else with_header(record)
        kernel_file.write_file(path, text)
    return paths


def load_folder(folder: str | Path) -> dict[str, type[ActivationModule] | type[RowModule]]:
    """Defines an activation from every ``.cu`` file of a folder, and returns the module classes by name.

    The files' code is compiled and run in this process: load only what you would run as a program. If one of the files is
    invalid, nothing is defined.

    Raises:
        FileNotFoundError: there is no such folder.
        TypeError: ``folder`` is no path.
        ValueError: a file is invalid; the message names it and says why.
    """
    _check_folder("load_folder", folder)
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {str(folder)!r}")
    with registry.lock:
        definitions = _read_folder(folder)
        return {definition.name: _register(definition) for definition in definitions}


def _check_folder(caller: str, folder: object) -> None:
    """Raises TypeError if the ``folder`` that ``caller`` was given is no path."""
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"{caller}: folder is a path, got {folder!r}")


def _read_folder(folder: Path) -> list[Defined]:
    """The definitions in a folder's files."""
    definitions, paths, texts, files = {}, {}, {}, {}
    for path in sorted(path for path in folder.glob("*.cu") if not path.is_dir()):
        text = kernel_file.read_file(path)
        with _errors_name(path):
            name = kernel_file.header(text).get("activation", path.stem)
            _check_name(name, of_folder=True)
        other = paths.setdefault(registry.normalise(name), path)
        if other is not path:
            raise ValueError(f"{other} and {path} both define {name!r}; give one of them another name, or remove it")
        texts[name], files[name] = text, path
    with _errors_name(folder):
        names = kernel_file.in_order_of_use(texts)
    for name in names:
        with _errors_name(files[name]):
            path = str(files[name].resolve())
            definitions[name] = _read(name, texts[name], path, {}, beside=definitions)
    return [definitions[name] for name in texts]


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Prefixes the messages of ValueErrors with a path."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


LONGEST_NAME = 100  # it is a part of file names, which may have up to 255 characters


def _check_name(name: str, *, of_folder: bool = False) -> None:
    if not isinstance(name, str) or not name.isidentifier() or not name.isascii() or keyword.iskeyword(name) or name[0] == "_":
        raise ValueError(f"{name!r} cannot be an activation's name: it must be an identifier, such as 'swoosh'")
    if name.endswith("_fast_math"):
        raise ValueError(f"{name!r} cannot be an activation's name: builds with fast_math=True have such names")
    if len(name) > LONGEST_NAME:
        raise ValueError(f"{name[:20]}... cannot be an activation's name: it is longer than {LONGEST_NAME} characters")
    rows = registry.of_rows(name)
    if rows and isinstance(rows.activation, RowDefinition):
        if rows.activation.name != name:
            raise ValueError(f"{name!r} is another spelling of {rows.activation.name!r}, which is defined; choose one of them")
        return
    if rows:
        raise ValueError(f"an activation cannot be called {name!r}: jitact.get({name!r}) is jitact's own {rows.__name__}")
    try:
        known = registry.resolve(name)
    except KeyError:
        if not of_folder and name in (*FUNCTIONS, DROPOUT):
            raise ValueError(f"an activation cannot be called {name!r}: expressions have a function of that name") from None
        if name in _reserved_names() or registry.normalise(name) in registry.NOTHING_TO_COMPILE:
            raise ValueError(f"an activation cannot be called {name!r}: jitact.{name} is something else") from None
        return
    record = registry.REGISTRY[known].activation
    if of_folder and record.since:
        warnings.warn(
            f"{name!r} names {known} since jitact {record.since}; here it stands for what the folder defines", stacklevel=5
        )
        return
    if not isinstance(record, Definition):
        raise ValueError(f"{name!r} names {known}, one of jitact's own activations; choose another name")
    if known != name:
        raise ValueError(f"{name!r} is another spelling of {known!r}, which is defined; choose one of them")


@cache
def _reserved_names() -> frozenset[str]:
    """Names that are attributes of the package ``jitact``, or become so when a module of the library is imported."""
    package = sys.modules[registry.__package__]
    modules = (module.name for module in pkgutil.iter_modules(package.__path__))
    return frozenset({*vars(package), *package.PUBLIC, *package.HOOKS, *modules})


def _listed(name: str, saves: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """What ``saves=`` lists; None if it is not given.

    Raises:
        ValueError: it lists nothing.
    """
    if saves is None:
        return None
    listed = kernel_file.listed(saves)
    if not listed:
        raise ValueError(f"{name}: saves= lists nothing; leave it out for all that the functions allow")
    return listed


def _check_arguments(
    name: str,
    expression: object,
    source: object,
    saves: object,
    reference: object,
    formula: object,
    backward: object,
    from_output: object,
) -> None:
    """Checks the types of arguments of :func:`define`: a user may have meant one as a parameter of the activation.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``source`` is a path as a string, or ``formula`` cannot be encoded in UTF-8.
    """
    for argument, value, kind, type_ in (
        ("source", source, "the text of a kernel file, or its Path", (str, Path)),
        ("saves", saves, "what backward can keep, such as 'input'", Iterable),
        ("reference", reference, "a function in PyTorch", Callable),
        ("formula", formula, "text", str),
        ("expression", expression, "text, such as 'x * sigmoid(x)'", str),
        ("backward", backward, "an expression of the gradient", str),
        ("backward_from_output", from_output, "an expression of the gradient", str),
    ):
        if value is not None and not isinstance(value, type_):
            raise TypeError(f"{name}: {argument}= is {kind}, not {value!r}; a parameter cannot be called {argument!r}")
    kernel_file.check_encodable(formula or "", f"{name}: formula=")
    if isinstance(source, str) and re.fullmatch(r".+\.(cu|cuh|h|txt)", source.strip()):
        raise ValueError(f"{name}: source= is a kernel file's text, and {source!r} a path; give Path({source!r})")


def _read_expressions(
    name: str, forward: str, gradients: dict[str, str], listed: tuple[str, ...] | None, given: Declared
) -> dict[str, Expression]:
    """The expressions of a definition, keyed by kernel function: "forward", "backward", "backward_from_output".

    Raises:
        ExpressionError: an expression is wrong.
        ValueError: an operand is unused or has a name it cannot have, or a gradient cannot be given as an expression.
    """
    elements = None if listed is None else [operand for operand in listed if operand not in given.beside]
    if listed and listed[0] in given.beside:
        kind = "channel" if listed[0] in given.channels else "row"
        raise ValueError(f"{name}: operands= must begin with a tensor of elements, got the {kind} operand {listed[0]}")
    order = dict.fromkeys([*(operand for operand in listed or () if operand in given.beside), *given.beside])
    expressions: dict[str, Expression] = {}

    def read(function: str, text: str, elements: Iterable[str] | None) -> Expression:
        try:
            return Expression(text, elements, given.params, channels=order)
        except ExpressionError as error:
            raise ExpressionError(f"{name}, {function}: {error.message}", *error.place) from None

    expressions["forward"] = first = read("forward", forward, elements)
    for element in first.elements:
        check_element(name, element)
    if first.random and "seed" in {*given.params, *given.beside, *first.elements}:
        raise ValueError(f"{name}: nothing can be called 'seed' where {DROPOUT} is: it is the argument with the seed")
    several = [*first.elements, *order]
    if gradients and (len(several) > 1 or first.random):
        why = f"{', '.join(several)} have gradients" if len(several) > 1 else "forward draws random numbers"
        raise ValueError(
            f"{name}: {next(iter(gradients))}= is for one tensor, and {why}; leave it out, to have all gradients derived, or "
            "give a kernel file as source="
        )
    for function, text in gradients.items():
        expressions[function] = found = read(function, text, ["dy", *(first.elements if function == "backward" else ["y"])])
        if found.random:
            raise ValueError(f"{name}: {function}= draws random numbers; a gradient cannot")
        if "dy" not in found.names:
            message = f"{name}, {function}: does not use dy, the gradient that comes in; write dy * ({found.text})"
            raise ExpressionError(message, text.strip(), 0, len(text.strip()))
    used = frozenset().union(*(expression.names for expression in expressions.values()))
    rows = [operand for operand in order if operand not in given.channels]
    kinds = {"a parameter": given.params, "a channel operand": given.channels, "a row operand": rows}
    for kind, names in (kinds | {"an operand": listed or ()}).items():
        unused = [operand for operand in names if operand not in used]
        if unused:
            where = " or ".join(expressions)
            raise ValueError(f"{name}: {', '.join(unused)} given as {kind}, but not used in {where}; use it, or leave it out")
    return expressions


def _write_kernel(expressions: dict[str, Expression], listed: tuple[str, ...], given: Declared) -> str:
    """The text of a kernel file whose functions return the expressions."""
    forward = expressions["forward"]
    types = {name: "T" for name in forward.elements}
    types |= {name: f"{type(operand).__name__}<T>" for name, operand in given.beside.items()}
    tensors = [(types[name], name) for name in dict.fromkeys([*listed, *types])]
    random = [("Random<T>", name) for name in forward.random]
    numbers = [("Number<T>", in_cpp(name)) for name in given.params]
    functions = []
    for function, expression in expressions.items():
        taken = {"forward": tensors, "backward": [("T", "dy"), *tensors]}.get(function, [("T", "dy"), ("T", "y")])
        literal = ("x",) if function == "forward" else ("x", "dy", "y")
        in_file = [(type_, name if name in literal else in_cpp(name)) for type_, name in taken]
        arguments = ", ".join(f"{type_} {name}" for type_, name in [*in_file, *random, *numbers])
        functions.append(f"ELEMENTWISE T {function}({arguments}) {{ return {expression.cpp}; }}\n")
    return "\n".join(['#include "elementwise.cuh"\n', *functions])
