"""Activations that users define: from an expression, from a kernel file's text, from a folder of kernel files.

What is defined is compiled and run in this process, with all the rights that it has: define, and load folders, only from
those whose programs you would run.
"""

from __future__ import annotations

import hashlib
import inspect
import keyword
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .. import registry
from ..autograd import run
from ..kernels import KernelSource
from ..kernels.loader import signature
from ..modules import ActivationModule
from ..records import OPTIONS, Activation
from . import kernel_file
from .expression import CONSTANTS, FUNCTIONS, HELPERS, Expression, ExpressionError, in_cpp

__all__ = ["Definition", "check_params", "define", "load_folder", "save_folder"]


@dataclass(eq=False)
class Definition(Activation):
    """The record of a user's activation; its ``kernel`` holds the kernel file's text.

    Attributes:
        functions: the functions that the text defines, of those that elementwise.cuh names.
        expression: forward, where it is no more than an expression.
    """

    functions: frozenset[str] = frozenset()
    expression: Expression | None = None

    def gradient_reference(self, dy: Tensor, kept: Tensor, params: tuple[float, ...], save: str) -> Tensor:
        """Backward as ``dy`` times the slope: an activation too, whose derivative the compiler finds."""
        return dy * run(kept, _slope(self, save), params, False, None, False)


@lru_cache(maxsize=256)
def _slope(definition: Definition, save: str) -> Definition:
    """The activation that computes another's slope, from the input or from the output."""
    names, kernel = [in_cpp(name) for name, _ in definition.params], definition.source
    marked = [operand.type != "T" for operand in kernel.signature.operands[1:]]
    numbers = [name if mark else f"T({name})" for name, mark in zip(names, marked, strict=True)]
    if save == "output":
        slope = f"activation::backward_from_output({', '.join(['T(1)', 'x', *numbers])})"
    elif "backward" in definition.functions:
        slope = f"activation::backward({', '.join(['T(1)', 'x', *numbers])})"
    else:
        duals = [f"jitact::Dual<T>({name})" for name in names]
        duals = [f"Number<jitact::Dual<T>>({dual})" if mark else dual for dual, mark in zip(duals, marked, strict=True)]
        slope = f"activation::forward({', '.join(['jitact::Dual<T>(x, T(1))', *duals])}).derivative"
    includes = "\n".join(re.findall(r"^[ \t]*#[ \t]*include.*", kernel.text, re.MULTILINE))
    arguments = ", ".join(["T x", *(f"Number<T> {name}" for name in names)])
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
        kernel=kernel._replace(name=name, text=text, numbers=()),
        functions=frozenset({"forward"}),
        has_reference=False,  # that of the definition is of another function
    )


def define(
    name: str,
    expression: str | None = None,
    backward: str | None = None,
    *,
    backward_from_output: str | None = None,
    source: str | Path | None = None,
    saves: str | Iterable[str] | None = None,
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
            functions that kernels/math.cuh lists. A number is one of the tensor's type: ``1 / 2`` is 0.5.
        backward: the gradient, in ``dy``, ``x`` and the parameters; derived from forward by the compiler if left out.
        backward_from_output: the gradient in ``dy``, ``y`` and the parameters, for ``save="output"``.
        source: a whole kernel file, its text or its Path, in place of the expressions; docs/adding.md describes one.
        saves: what backward can keep, one or several, the default first. From the functions that there are, if left out.
        reference: the same in PyTorch, ``reference(x, *params)``, to check against. If left out, and forward is an
            expression, that is evaluated in PyTorch; else the compiled forward in float64 stands in.
        formula: forward, for people; the expression if left out.
        params: the parameters with their defaults, in the order of the constructor's arguments.

    Raises:
        ExpressionError: an expression will not do; the message points at the place.
        ValueError: the name, a parameter or the kernel file will not do; the message says why.
        TypeError: an argument is of another kind than it says here.
    """
    _check_arguments(name, source=source, saves=saves, reference=reference, formula=formula)
    if (expression is None) == (source is None):
        raise TypeError(f"define({name!r}, ...) takes an expression or source=, one of the two")
    if source is not None and (backward, backward_from_output) != (None, None):
        raise TypeError(f"define({name!r}, source=...) takes the gradient from the source; leave out backward")
    params = check_params(name, params)
    fields = {"parameters": params or None, "keeps": saves, "formula": formula}
    expressions, path = None, f"<{name}>"
    if expression is not None:
        bodies = {"forward": expression, "backward": backward, "backward_from_output": backward_from_output}
        expressions = _read_expressions(name, {key: body for key, body in bodies.items() if body is not None}, tuple(params))
        fields["formula"] = formula or expressions["forward"].text
        source = _write_kernel(expressions)
    elif isinstance(source, Path):
        source, path = kernel_file.read_file(source), str(source.resolve())
    fields = {key: value for key, value in fields.items() if value is not None}
    with registry.lock:
        _check_name(name)
        return registry.register(_read(name, source, path, fields, reference, expressions))


def save_folder(folder: str | Path, names: str | Iterable[str] | None = None) -> list[Path]:
    """Writes definitions to a folder, a kernel file ``<name>.cu`` each, which :func:`load_folder` reads back.

    All of a definition is in its file, parameters and what backward keeps in the comments at its top, except a
    ``reference``, which is Python.

    Args:
        folder: made if it is not there; files of the same names are overwritten.
        names: what to write, one or several, with what these use; all that has been defined, if left out.

    Raises:
        KeyError: unknown name.
        ValueError: a name is one of the library's own.
    """
    names = [names] if isinstance(names, str) else names
    records = [cls.activation for cls in (registry.REGISTRY.values() if names is None else map(registry.get, names))]
    if names is None:
        records = [record for record in records if isinstance(record, Definition)]
    for record in records:
        if not isinstance(record, Definition):
            raise ValueError(f"{record.name} is one of jitact's own activations; its kernel file is kernels/{record.name}.cu")
    used = [source.name for record in records for source in record.source.all_used if not source.is_librarys]
    records = list(dict.fromkeys([*records, *(registry.get(name).activation for name in used)]))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{record.name}.cu" for record in records]
    for path, record in zip(paths, records, strict=True):
        path.write_text(_with_header(record), encoding="utf-8")
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
    with registry.lock:
        definitions = _read_folder(folder)
        return {definition.name: registry.register(definition) for definition in definitions}


def _read_folder(folder: Path) -> list[Definition]:
    """The definitions in a folder's files."""
    definitions, paths, texts, files = {}, {}, {}, {}
    for path in sorted(folder.glob("*.cu")):
        text = kernel_file.read_file(path)
        with _told_of(path):
            name = kernel_file.header(text).get("activation", path.stem)
            _check_name(name, of_folder=True)
        other = paths.setdefault(registry.normalise(name), path)
        if other is not path:
            raise ValueError(f"{other} and {path} both define {name!r}; give one of them another name, or remove it")
        texts[name], files[name] = text, path
    with _told_of(folder):
        names = kernel_file.in_order_of_use(texts)
    for name in names:
        with _told_of(files[name]):
            definitions[name] = _read(name, texts[name], str(files[name].resolve()), {}, None, beside=definitions)
    return [definitions[name] for name in texts]


@contextmanager
def _told_of(path: Path) -> Iterator[None]:
    """Has errors begin with the path that they are of."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


# What C++ or kernel files already mean by a name, so that no parameter can have it.
CPP_WORDS = frozenset(
    """alignas alignof asm auto bool break case catch char class const constexpr continue default delete do double dynamic_cast
    else enum explicit extern false float for friend goto if inline int long mutable namespace new noexcept nullptr operator
    private protected public register requires return short signed sizeof static struct switch template this throw true try
    typedef typename union unsigned using virtual void volatile while activation forward backward backward_from_output
    backward_from_bit keeps jitact std T ELEMENTWISE x y dy""".split()  # noqa: SIM905
)
LONGEST_NAME = 100  # files are called by it, and by more; the longest name of a file has 255 characters


def _check_name(name: str, *, of_folder: bool = False) -> None:
    if not isinstance(name, str) or not name.isidentifier() or not name.isascii() or keyword.iskeyword(name) or name[0] == "_":
        raise ValueError(f"{name!r} cannot be an activation's name: it must be an identifier, such as 'swoosh'")
    if len(name) > LONGEST_NAME:
        raise ValueError(f"{name[:20]}... cannot be an activation's name: it is longer than {LONGEST_NAME} characters")
    try:
        known = registry.resolve(name)
    except KeyError:
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
    """What ``jitact.<name>`` is, or becomes when a module of the library is imported."""
    package = sys.modules[registry.__package__]
    modules = (module.name for module in pkgutil.iter_modules(package.__path__))
    return frozenset({*vars(package), *package.PUBLIC, *package.HOOKS, *modules})


@cache
def _reserved_parameters() -> dict[str, str]:
    """The names that no parameter can have, and why."""
    relu, options = registry.get("relu"), inspect.signature(define).parameters
    return {
        **dict.fromkeys(dir(relu()), "modules have something else of that name"),
        **dict.fromkeys(["self", "inplace", *OPTIONS], "it is an argument of every activation"),
        **dict.fromkeys(options.keys() - {"params"}, "it is an argument of define"),
        **dict.fromkeys([*FUNCTIONS, *CONSTANTS], "expressions have something else of that name"),
        **dict.fromkeys(["torch", "math", *(helper.__name__ for helper in HELPERS.values())], "PyTorch's form needs the name"),
        **dict.fromkeys(CPP_WORDS, "kernel files have something else of that name"),
    }


def check_params(name: str, params: Mapping[str, object]) -> dict[str, float]:
    """The parameters with their defaults, as Python's own numbers.

    Raises:
        ValueError: a parameter has a name that it cannot have.
        TypeError: a default is not a number.
    """
    checked = {}
    for param, value in params.items():
        why = _reserved_parameters().get(param)
        if not param.isidentifier() or not param.isascii() or keyword.iskeyword(param) or "__" in param:
            why = "it must be an identifier, such as alpha"
        if why:
            raise ValueError(f"{name}: a parameter cannot be called {param!r}: {why}")
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name}: the default of {param} must be a number, got {value!r}")
        try:
            checked[param] = int(value) if isinstance(value, Integral) and float(value) == int(value) else float(value)
        except OverflowError:
            raise ValueError(f"{name}: the default of {param} is too large for a number") from None
    return checked


def _check_arguments(name: str, *, source: object, saves: object, reference: object, formula: object) -> None:
    """Checks arguments of :func:`define` that people may have meant as parameters, or given in another form.

    Raises:
        TypeError: one is not of its kind.
        ValueError: ``source`` is a path, or ``formula`` no text that a file could hold.
    """
    for argument, value, kind, type_ in (
        ("source", source, "the text of a kernel file, or its Path", (str, Path)),
        ("saves", saves, "what backward can keep, such as 'input'", Iterable),
        ("reference", reference, "a function in PyTorch", Callable),
        ("formula", formula, "text", str),
    ):
        if value is not None and not isinstance(value, type_):
            raise TypeError(f"{name}: {argument}= is {kind}, not {value!r}; a parameter cannot be called {argument!r}")
    kernel_file.check_encodable(formula or "", f"{name}: formula=")
    if isinstance(source, str) and re.fullmatch(r".+\.(cu|cuh|h|txt)", source.strip()):
        raise ValueError(f"{name}: source= is a kernel file's text, and {source!r} a path; give Path({source!r})")


def _check_reference(name: str, reference: Callable[..., Tensor], names: Iterable[str]) -> None:
    """Checks that a reference takes what it will be given.

    Raises:
        TypeError: it does not.
    """
    arguments = ["x", *names]
    try:
        inspect.signature(reference).bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{name}: the reference must take ({', '.join(arguments)}): {error}") from None
    except ValueError:  # it is built in, and nothing tells
        return


NO_FORMULA = "see its kernel file"


def _with_header(definition: Definition) -> str:
    """A definition's kernel file with all its fields in the comments at its top."""
    text = definition.source.text
    body = signature.functions(text)["forward"].body or ""
    fields = {
        "activation": definition.name,
        "parameters": ", ".join(f"{name} = {value!r}" for name, value in definition.params),
        "keeps": ", ".join(definition.saves),
        "formula": "" if definition.formula in (_on_one_line(body), NO_FORMULA) else kernel_file.quoted(definition.formula),
    }
    return kernel_file.with_header(text, fields)


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


TENSORS = {"forward": ("x",), "backward": ("dy", "x"), "backward_from_output": ("dy", "y")}
"""What the functions take that can be given as expressions."""


def _read_expressions(name: str, bodies: dict[str, str], params: tuple[str, ...]) -> dict[str, Expression]:
    """The expressions of a definition, by the functions that return them.

    Raises:
        ExpressionError: one of them will not do.
        ValueError: a parameter occurs in none.
    """
    expressions = {}
    for function, text in bodies.items():
        try:
            expressions[function] = Expression(text, TENSORS[function], params)
            if function != "forward" and "dy" not in expressions[function].names:
                message = f"does not use dy, the gradient that comes in; write dy * ({expressions[function].text})"
                raise ExpressionError(message, text.strip(), 0, len(text.strip()))
        except ExpressionError as error:
            raise ExpressionError(f"{name}, {function}: {error.message}", *error.place) from None
    used = frozenset().union(*(expression.names for expression in expressions.values()))
    unused = [param for param in params if param not in used]
    if unused:
        raise ValueError(f"{name}: {', '.join(unused)} given as a parameter, but not used in {' or '.join(expressions)}")
    return expressions


def _write_kernel(expressions: dict[str, Expression]) -> str:
    """A kernel file with functions that return expressions."""
    functions = []
    for function, expression in expressions.items():
        tensors = TENSORS[function]
        params = [f"Number<T> {in_cpp(param)}" for param in expression.variables[len(tensors) :]]
        declared = ", ".join([*(f"T {tensor}" for tensor in tensors), *params])
        functions.append(f"ELEMENTWISE T {function}({declared}) {{ return {expression.cpp}; }}\n")
    return "\n".join(['#include "elementwise.cuh"\n', *functions])


def _read(
    name: str,
    text: str,
    path: str,
    fields: dict[str, Any],
    reference: Callable[..., Tensor] | None,
    expressions: dict[str, Expression] | None = None,
    beside: Mapping[str, Activation] = MappingProxyType({}),
) -> Definition:
    """The definition in a kernel file's text; ``fields`` come before those of the file's header.

    ``expressions`` are what its functions return, where that is known; ``beside`` the definitions in its folder.

    Raises:
        ValueError: the text will not do.
        TypeError: the reference will not do.
    """
    try:
        text = kernel_file.checked(text)
        functions, fields = signature.functions(text), kernel_file.header(text) | fields
        params = kernel_file.read_parameters(fields.get("parameters", {}))
        names_there = kernel_file.names_there(functions)
        names = kernel_file.parameter_names(names_there, params)
        _check_defaults(names, params)
        saves = kernel_file.read_saves(functions, fields.get("keeps", ()))
        used = kernel_file.definitions_used(text, beside)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    params = check_params(name, params)
    if reference:
        _check_reference(name, reference, names)
    if expressions is None:
        expressions = _expressions_there(functions, names_there, beside)
    forward = expressions.get("forward")
    kernel = KernelSource(name, text, path, names_there, given=used)
    definition = Definition(
        name,
        title="".join(part[:1].upper() + part[1:] for part in name.split("_")),
        formula=fields.get("formula") or _on_one_line(functions["forward"].body or "") or NO_FORMULA,
        reference=reference or forward,
        saves=saves,
        params=tuple((param, params[param]) for param in names),
        kernel=kernel,
        fingerprint=_fingerprint(kernel, functions, expressions, names),
        functions=frozenset(functions),
        expression=forward,
        has_reference=bool(reference or forward),
    )
    if not definition.has_reference:
        definition.reference = _in_float64(definition)
    return definition


def _check_defaults(names: tuple[str, ...], params: Mapping[str, float]) -> None:
    """Checks that each parameter has a default."""
    if set(params) != set(names):
        how = f"define(..., {names[0]}=1.0) or // parameters: {names[0]} = 1.0" if names else "leave them out"
        told = [", ".join(each) or "none" for each in (names, params)]
        raise ValueError(f"forward's parameters are {told[0]}, those with a default {told[1]}; {how}")


def _expressions_there(
    functions: dict[str, signature.Function], names: tuple[str, ...], beside: Mapping[str, Activation]
) -> dict[str, Expression]:
    """What the functions of a kernel file return, of those that do no more than return an expression."""
    found = {}
    for name, function in functions.items():
        if function.body and name in TENSORS:
            given = function.arguments[: len(TENSORS[name])]
            tensors = [argument or usual for argument, usual in zip(given, TENSORS[name], strict=True)]
            try:
                found[name] = Expression(function.body, tensors, names, of_kernel_file=True, beside=beside)
            except ExpressionError:  # C++ that is more than an expression
                continue
    return found


def _fingerprint(
    kernel: KernelSource,
    functions: dict[str, signature.Function],
    expressions: dict[str, Expression],
    names: tuple[str, ...],
) -> str:
    """What tells a definition from others of its name: a hash of its formula and of its parameters' names.

    Where its functions are expressions, and there is nothing else, their keys are its formula, however they are written.
    """
    code = signature.code(kernel.text)
    used = [signature.code(source.text) for source in kernel.all_used if not source.is_librarys]
    formula = " ".join("".join([code, *used]).split())
    for start, end in sorted((function.span for function in functions.values()), reverse=True):
        code = code[:start] + code[end:]
    if expressions.keys() == functions.keys() and re.fullmatch(r'\s*#\s*include\s*"elementwise\.cuh"\s*|\s*', code):
        formula = sorted((name, expression.key) for name, expression in expressions.items())
    return hashlib.sha256(repr((names, formula)).encode()).hexdigest()[:16]


def _in_float64(definition: Definition) -> Callable[..., Tensor]:
    def reference(x: Tensor, *params: float) -> Tensor:
        return run(x.to(torch.float64), definition, params, False, "input", False).to(x.dtype)

    return reference
