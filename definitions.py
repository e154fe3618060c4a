"""Activations that users define: from an expression, from a kernel file's text, from a folder of kernel files.

What is defined is compiled and run in this process, with all the rights that it has: define, and load folders, only from
those whose programs you would run.
"""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import registry
from .activations import OPTIONS, Activation, ActivationModule, run
from .expression import CONSTANTS, FUNCTIONS, Expression, ExpressionError
from .kernels import KernelSource

__all__ = ["Definition", "define", "load_folder", "save_folder"]


@dataclass(eq=False)
class Definition(Activation):
    """The record of a user's activation; its ``kernel`` holds the kernel file's text.

    Attributes:
        functions: the functions that the text defines, of those that elementwise.cuh names.
        expression: forward, where it is no more than an expression.
        has_reference: whether ``reference`` is PyTorch's arithmetic. Else it is the compiled forward in float64.
    """

    functions: frozenset[str] = frozenset()
    expression: Expression | None = None
    has_reference: bool = True

    def gradient_reference(self, dy: Tensor, kept: Tensor, params: tuple[float, ...], save: str) -> Tensor:
        """Backward as ``dy`` times the slope: an activation too, whose derivative the compiler finds."""
        return dy * run(kept, _slope(self, save), params, False, None, False)


@lru_cache(maxsize=256)
def _slope(definition: Definition, save: str) -> Definition:
    """The activation that computes another's slope, from the input or from the output."""
    names, kernel = [name for name, _ in definition.params], definition.source
    if save == "output":
        slope = f"activation::backward_from_output({', '.join(['T(1)', 'x', *names])})"
    elif "backward" in definition.functions:
        slope = f"activation::backward({', '.join(['T(1)', 'x', *names])})"
    else:
        duals = ["jitact::Dual<T>(x, T(1))", *(f"jitact::Dual<T>({name})" for name in names)]
        slope = f"activation::forward({', '.join(duals)}).derivative"
    includes = "\n".join(re.findall(r"^[ \t]*#[ \t]*include.*", kernel.text, re.MULTILINE))
    arguments = ", ".join(f"T {name}" for name in ["x", *names])
    text = f"""{includes}
namespace activation {{
#line 1 "{kernel.path}"
{kernel.text}
}}
ELEMENTWISE T forward({arguments}) {{ return {slope}; }}
"""
    name = f"{definition.name}_slope{'_from_output' if save == 'output' else ''}"
    return replace(
        definition,
        name=name,
        saves=("input",),
        kernel=kernel._replace(name=name, saves=("input",), text=text),
        functions=frozenset({"forward"}),
        has_reference=False,  # that of the definition is of another function
    )


def define(
    name: str,
    expression: str | None = None,
    backward: str | None = None,
    *,
    backward_from_output: str | None = None,
    source: str | None = None,
    saves: Iterable[str] | None = None,
    reference: Callable[..., Tensor] | None = None,
    formula: str | None = None,
    **params: float,
) -> type[ActivationModule]:
    """Makes an activation and registers it: ``define("swoosh", "x * sin(x)")``.

    The result is a module class like the library's own, known to :func:`jitact.get` and as ``jitact.<name>``, compiled at
    first use. A name that is defined again stands for the new activation; modules of the old one go on working.

    What is given here is compiled and run in this process: it can do whatever a program of yours can.

    Args:
        name: an identifier.
        expression: forward, in ``x`` and the parameters: arithmetic, comparisons, ``condition ? a : b``, ``pi``, and the
            functions that kernels/math.cuh lists.
        backward: the gradient, in ``dy``, ``x`` and the parameters; derived from forward by the compiler if left out.
        backward_from_output: the gradient in ``dy``, ``y`` and the parameters, for ``save="output"``.
        source: a whole kernel file, in place of the expressions; docs/adding.md describes one.
        saves: what backward can keep, the default first. From the functions that there are, if left out.
        reference: the same in PyTorch, ``reference(x, *params)``, to check against. If left out, and forward is an
            expression, that is evaluated in PyTorch; else the compiled forward in float64 stands in.
        formula: forward, for people; the expression if left out.
        params: the parameters with their defaults, in the order of the constructor's arguments.

    Raises:
        ExpressionError: an expression will not do; the message points at the place.
        ValueError: the name, a parameter or the kernel file will not do; the message says why.
    """
    _check_name(name)
    if (expression is None) == (source is None):
        raise TypeError(f"define({name!r}, ...) takes an expression or source=, one of the two")
    if source is not None and (backward, backward_from_output) != (None, None):
        raise TypeError(f"define({name!r}, source=...) takes the gradient from the source; leave out backward")
    if expression is not None:
        _check_params(name, params)
        bodies = {"forward": expression, "backward": backward, "backward_from_output": backward_from_output}
        source = _write_kernel(name, {key: body for key, body in bodies.items() if body is not None}, tuple(params))
    fields = {"parameters": params or None, "keeps": saves and tuple(saves), "formula": formula}
    definition = _read(name, source, f"<{name}>", {key: value for key, value in fields.items() if value is not None}, reference)
    return registry.register(definition)


def save_folder(folder: str | Path, names: Iterable[str] | None = None) -> list[Path]:
    """Writes definitions to a folder, a kernel file ``<name>.cu`` each, which :func:`load_folder` reads back.

    All of a definition is in its file, parameters and what backward keeps in the comments at its top, except a
    ``reference``, which is Python.

    Args:
        folder: made if it is not there; files of the same names are overwritten.
        names: what to write; all that has been defined, if left out.

    Raises:
        KeyError: unknown name.
        ValueError: a name is one of the library's own.
    """
    records = [cls.activation for cls in (registry.REGISTRY.values() if names is None else map(registry.get, names))]
    if names is None:
        records = [record for record in records if isinstance(record, Definition)]
    for record in records:
        if not isinstance(record, Definition):
            raise ValueError(f"{record.name} is one of jitact's own activations; its kernel file is kernels/{record.name}.cu")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{record.name}.cu" for record in records]
    for path, record in zip(paths, records, strict=True):
        path.write_text(_with_header(record))
    return paths


def load_folder(folder: str | Path) -> dict[str, type[ActivationModule]]:
    """Defines an activation from every ``.cu`` file of a folder, and returns the module classes by name.

    The files' code is compiled and run in this process: load only what you would run as a program. If one of the files will
    not do, nothing is defined.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: a file will not do; the message names it and says why.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {str(folder)!r}")
    definitions = []
    for path in sorted(folder.glob("*.cu")):
        text = path.read_text()
        name = _header(text).get("activation", path.stem)
        try:
            _check_name(name)
            definitions.append(_read(name, text, str(path.resolve()), {}, None))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return {definition.name: registry.register(definition) for definition in definitions}


# What C++, kernel files or a module's attributes already mean by a name, so that no parameter can have it.
CPP_WORDS = frozenset(
    """alignas alignof asm auto bool break case catch char class const constexpr continue default delete do double dynamic_cast
    else enum explicit extern false float for friend goto if inline int long mutable namespace new noexcept nullptr operator
    private protected public register requires return short signed sizeof static struct switch template this throw true try
    typedef typename union unsigned using virtual void volatile while activation forward backward backward_from_output
    backward_from_bit keeps jitact std T ELEMENTWISE x y dy torch math minimum maximum round_half_up exact_tanhshrink""".split()  # noqa: SIM905
)


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name.isidentifier() or not name.isascii() or keyword.iskeyword(name) or name[0] == "_":
        raise ValueError(f"{name!r} cannot be an activation's name: it must be an identifier, such as 'swoosh'")
    try:
        known = registry.resolve(name)
    except KeyError:
        if hasattr(sys.modules[__package__], name):
            raise ValueError(f"an activation cannot be called {name!r}: jitact.{name} is something else") from None
        return
    if not isinstance(registry.REGISTRY[known].activation, Definition):
        raise ValueError(f"{name!r} names {known}, one of jitact's own activations; choose another name")
    if known != name:
        raise ValueError(f"{name!r} is another spelling of {known!r}, which is defined; choose one of them")


def _check_params(name: str, params: Mapping[str, float]) -> None:
    for param, value in params.items():
        taken = param in CPP_WORDS or param in FUNCTIONS or param in CONSTANTS or param in OPTIONS or param == "inplace"
        if taken or not param.isidentifier() or not param.isascii() or keyword.iskeyword(param) or "__" in param:
            raise ValueError(f"{name}: a parameter cannot be called {param!r}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name}: the default of {param} must be a number, got {value!r}")


class Signature(NamedTuple):
    """What a kernel file's function takes first; the parameters follow."""

    returns: str
    first: tuple[str, ...]


SIGNATURES = {
    "forward": Signature("T", ("T",)),
    "backward": Signature("T", ("T", "T")),
    "backward_from_output": Signature("T", ("T", "T")),
    "keeps": Signature("bool", ("T",)),
    "backward_from_bit": Signature("T", ("T", "bool")),
}


class Function(NamedTuple):
    """A function as a kernel file defines it."""

    arguments: tuple[str, ...]  # names
    body: str | None  # what it returns, where that is all it does
    line: int


FUNCTION = re.compile(r"\bELEMENTWISE\s+(T|bool)\s+(\w+)\s*\(([^()]*)\)\s*(?:\{\s*return\s+([^;{}]*);\s*\})?")
ARGUMENT = re.compile(r"\s*(?:const\s+)?(T|bool)\s+(\w+)\s*")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def _functions(text: str) -> dict[str, Function]:
    """The functions of a kernel file that the loops call.

    Raises:
        ValueError: one is not declared as elementwise.cuh says.
    """
    found: dict[str, Function] = {}
    text = COMMENT.sub(lambda comment: re.sub(r"[^\n]", " ", comment[0]), text)
    for match in FUNCTION.finditer(text):
        returns, name, declared, body = match.groups()
        if name not in SIGNATURES:
            continue
        line = text.count("\n", 0, match.start()) + 1
        arguments = [ARGUMENT.fullmatch(argument) for argument in declared.split(",")]
        expected = SIGNATURES[name]
        first = tuple(argument[1] for argument in arguments[: len(expected.first)] if argument)
        if None in arguments or returns != expected.returns or first != expected.first:
            declaration = f"{expected.returns} {name}({', '.join(f'{each} ...' for each in expected.first)}, T parameters...)"
            raise ValueError(f"line {line}: {name} must be declared as ELEMENTWISE {declaration}")
        body = None if name in found else body  # two, one for each branch of an #if: no telling which
        found[name] = Function(tuple(argument[2] for argument in arguments), body, line)
    if "forward" not in found:
        raise ValueError("the kernel file defines no function ELEMENTWISE T forward(T x)")
    return found


TOP = re.compile(r"(?:[ \t]*//[^\n]*\n|[ \t]*\n)*")  # comments and blank lines
NO_FORMULA = "see its kernel file"
HEADER = re.compile(r"^// *(activation|parameters|keeps|formula): *(.*?) *$\n?", re.MULTILINE)


def _header(text: str) -> dict[str, str]:
    """The fields in the comments at the top of a kernel file, such as ``// parameters: a = 1.0, b = 2``."""
    return dict(HEADER.findall(TOP.match(text)[0]))


def _with_header(definition: Definition) -> str:
    """A definition's kernel file with all its fields in the comments at its top."""
    text = definition.source.text
    fields = {
        "activation": definition.name,
        "parameters": ", ".join(f"{name} = {value!r}" for name, value in definition.params),
        "keeps": ", ".join(definition.saves),
        "formula": "" if definition.formula in (_functions(text)["forward"].body, NO_FORMULA) else definition.formula,
    }
    header = "".join(f"// {key}: {value}\n" for key, value in fields.items() if value)
    top = len(TOP.match(text)[0])
    rest = HEADER.sub("", text[:top]) + text[top:]
    return f"{header}\n{rest.strip()}\n"


def _write_kernel(name: str, bodies: dict[str, str], params: tuple[str, ...]) -> str:
    """A kernel file with functions that return expressions.

    Raises:
        ExpressionError: one of them will not do.
    """
    first = {"forward": ("x",), "backward": ("dy", "x"), "backward_from_output": ("dy", "y")}
    functions, constants = [], set()
    for function, text in bodies.items():
        arguments = (*first[function], *params)
        try:
            expression = Expression(text, first[function], params)
        except ExpressionError as error:
            raise ExpressionError(f"{name}, {function}: {error.message}", *error.place) from None
        constants |= expression.constants
        declared = ", ".join(f"T {argument}" for argument in arguments)
        functions.append(f"ELEMENTWISE T {function}({declared}) {{ return {expression.text}; }}\n")
    lines = [f"constexpr double {constant} = {CONSTANTS[constant]!r};\n" for constant in sorted(constants)]
    return "\n".join(['#include "elementwise.cuh"\n', *lines, *functions])


def _read(name: str, text: str, path: str, fields: dict[str, Any], reference: Callable[..., Tensor] | None) -> Definition:
    """The definition in a kernel file's text; ``fields`` come before those of the file's header.

    Raises:
        ValueError: the text will not do.
    """
    try:
        functions, fields = _functions(text), _header(text) | fields
        x, *names = functions["forward"].arguments
        params = _read_parameters(fields.get("parameters", {}))
        _check_parameters(functions, params)
        saves = _read_saves(functions, fields.get("keeps", ()))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    _check_params(name, params)
    body = functions["forward"].body
    expression = _expression(body, x, names)
    definition = Definition(
        name,
        title="".join(part[:1].upper() + part[1:] for part in name.split("_")),
        formula=fields.get("formula") or body or NO_FORMULA,
        reference=reference or expression,
        saves=saves,
        params=tuple((param, params[param]) for param in names),
        kernel=KernelSource(name, tuple(names), saves, text, path),
        functions=frozenset(functions),
        expression=expression,
        has_reference=bool(reference or expression),
    )
    if not definition.has_reference:
        definition.reference = _in_float64(definition)
    return definition


def _check_parameters(functions: dict[str, Function], params: dict[str, float]) -> None:
    """Checks that all functions take the same parameters, and that each of those has a default."""
    names = functions["forward"].arguments[1:]
    for function, (arguments, _, line) in functions.items():
        given = arguments[len(SIGNATURES[function].first) :]
        if given != names:
            told = [", ".join(each) or "no parameters" for each in (given, names)]
            raise ValueError(f"line {line}: {function} takes {told[0]} where forward takes {told[1]}")
    if set(params) != set(names):
        how = f"define(..., {names[0]}=1.0) or // parameters: {names[0]} = 1.0" if names else "leave them out"
        told = [", ".join(each) or "none" for each in (names, params)]
        raise ValueError(f"forward's parameters are {told[0]}, those with a default {told[1]}; {how}")


def _read_parameters(given: dict[str, float] | str) -> dict[str, float]:
    if not isinstance(given, str):
        return given
    params = {}
    for item in filter(None, map(str.strip, given.split(","))):
        param, _, value = map(str.strip, item.partition("="))
        try:
            params[param] = float(value)
        except ValueError:
            raise ValueError(f"{item!r} in the file's header is no parameter with a default, such as a = 1.0") from None
    return params


def _read_saves(functions: dict[str, Function], wanted: tuple[str, ...] | str) -> tuple[str, ...]:
    """What backward can keep, the default first: what is wanted, else all that the functions allow."""
    possible = ["bit"] if {"keeps", "backward_from_bit"} <= functions.keys() else []
    possible += ["input", *(["output"] if "backward_from_output" in functions else [])]
    wanted = tuple(re.findall(r"\w+", wanted)) if isinstance(wanted, str) else wanted
    for save in wanted:
        if save not in possible:
            raise ValueError(f"backward cannot keep {save!r} with the functions that there are, only {', '.join(possible)}")
    return tuple(dict.fromkeys([*(wanted or possible), "input"]))


def _expression(body: str | None, x: str, params: list[str]) -> Expression | None:
    try:
        return body and Expression(body, (x,), params)
    except ExpressionError:  # C++ that is more than an expression
        return None


def _in_float64(definition: Definition) -> Callable[..., Tensor]:
    def reference(x: Tensor, *params: float) -> Tensor:
        return run(x.to(torch.float64), definition, params, False, "input", False).to(x.dtype)

    return reference
