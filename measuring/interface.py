"""Writes the public interface for type checkers and editors (``__init__.pyi``) and as a document (``docs/api.md``)."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from inspect import Parameter, Signature
from typing import Any

from .. import PUBLIC, registry
from ..definitions.define import Definition
from ..gating.halves import LAYOUTS, ORDERS, ROUNDINGS
from ..modules import ActivationModule
from ..records import Activation
from ..records.arguments import AROUND

__all__ = ["api_markdown", "stub"]

PACKAGE = registry.__package__
MODULES = ("registry", "accuracy", "kernels")  # docs/api.md lists their public names in addition to the package's
LONGEST = 24  # longer defaults, in characters, are shown as "..."
OF_GATED = {"layout": LAYOUTS, "gate": ORDERS, "rounding": ROUNDINGS}  # the options of gated activations, and their choices
CONSTANTS = {  # descriptions of names that have no docstring
    "jitact.REGISTRY": "Every activation's class by its canonical name; read-only.",
    "jitact.registry.REGISTRY": "Every activation's class by its canonical name; read-only.",
    "jitact.registry.Named": "An activation as a name, a class, a module or a function.",
}
HEAD = """\
# Written by `jitact report` from the table of activations and the public functions; tests compare it. Not to be edited.

from typing import Literal

from torch import Tensor

"""


def stub() -> str:
    """The text of ``__init__.pyi``: the public names, and every function of the library with its parameters."""
    places: dict[str, list[str]] = {}
    for name, place in PUBLIC.items():
        places.setdefault(place, []).append(name)
    lines = [f"from .{place} import {name} as {name}" for place in sorted(places) for name in sorted(places[place])]
    quoted = [f'"{name}"' for name in sorted([*PUBLIC, *_names()], key=lambda name: (not name.isupper(), name))]  # as ruff does
    everything = textwrap.fill(", ".join(quoted), 120, initial_indent=" " * 4)
    lines += ["", "__version__: str", "__all__ = [", everything.replace("\n", "\n    ") + ",", "]", ""]
    for name in _names():
        record, function = registry.class_of(name).activation, registry.function(name)
        lines += [f"def {name}{_signature(function, record)}:", f'    """{name}(x) = {record.formula}"""', ""]
        if record.aliases:
            lines += [*(f"{alias} = {name}" for alias in record.aliases), ""]
    return HEAD + "\n".join(lines).rstrip() + "\n"


def api_markdown() -> str:
    """The text of ``docs/api.md``: every public function in a line, with its signature."""
    lines = [
        "# The interface",
        "",
        "Written by `jitact report`. `help(jitact.gelu)` explains the arguments; [the guide](guide.md) shows all in use.",
        "An argument `activation` is a name, a class, a module or a function, jitact's or PyTorch's.",
        "",
        "## Functions of the package",
        "",
        *_table((f"jitact.{name}", getattr(import_module(f"{PACKAGE}.{PUBLIC[name]}"), name)) for name in sorted(PUBLIC)),
        "",
        "## Classes of `jitact.get`, in addition to `torch.nn.Module`",
        "",
        "The constructor takes the arguments of the `torch.nn` class, and `save` and `fast_math`, as the functions below do;",
        "those of `Softmax`, `LogSoftmax` and `Softmin` take the dimension alone.",
        "",
        *_table((f"ModelNew.{name}", getattr(ActivationModule, name)) for name in ("forward", "get_inputs", "get_init_inputs")),
        "| `ModelNew.Model` | PyTorch's counterpart, a module class. |",
        "| `ModelNew.activation` | The record: name, formula, parameters, what backward can keep. |",
        "",
        "## Activations",
        "",
        "`x` is a dense tensor of any shape; `save` is what backward keeps, by default the first choice. All take these too,",
        f"by name only: {', '.join(f'`{name}`' for name in ('fast_math', *AROUND))}.",
        "[ACTIVATIONS.md](../ACTIVATIONS.md) has errors and speed.",
        "",
        "| function | computes |",
        "| --- | --- |",
    ]
    for name in _names():
        record = registry.class_of(name).activation
        also = f"; also called {', '.join(record.aliases)}" if record.aliases else ""
        shown = f"jitact.{name}{_signature(registry.function(name), record, without=('fast_math', *AROUND))}"
        lines.append(_row(shown, f"`{_cell(record.formula)}`{also}"))
    for module in MODULES:
        found = import_module(f"{PACKAGE}.{module}")
        lines += ["", f"## jitact.{module}", "", _prose(_first_line(found)), ""]
        lines += _table((f"jitact.{module}.{name}", getattr(found, name)) for name in sorted(found.__all__))
    return "\n".join(lines) + "\n"


def _names() -> list[str]:
    """The activations of the library, without definitions."""
    return sorted(name for name, cls in registry.REGISTRY.items() if not isinstance(cls.activation, Definition))


class _Text(str):
    """A string whose repr is itself, so that it appears unquoted in a signature."""

    def __repr__(self) -> str:
        return str(self)


def _signature(function: Callable[..., Any], record: Activation | None = None, without: Collection[str] = ()) -> str:
    """A signature with types and defaults in Python syntax."""
    signature = inspect.signature(function)
    shown = []
    for parameter in signature.parameters.values():
        if parameter.name in without:
            continue
        type_, default = _type_in(parameter, record), parameter.default
        default = default if default is Parameter.empty else _Text(_default(default))
        shown.append(parameter.replace(annotation=_Text(type_) if type_ else Parameter.empty, default=default))
    result = "Tensor" if record else _type(signature.return_annotation)
    return str(signature.replace(parameters=shown, return_annotation=_Text(result) if result else Signature.empty))


def _type_in(parameter: Parameter, record: Activation | None) -> str:
    """The type of a parameter; for an activation's function it is derived from the record where there is no annotation."""
    if record is None:
        return _type(parameter.annotation)
    if parameter.name == "save":
        return f"{_one_of(record.saves)} | None"
    if record.variant and parameter.name == record.variant[0]:
        return _one_of(record.variant[1])
    if parameter.name in OF_GATED and isinstance(parameter.default, str):
        by_name = " | Tensor" if parameter.name == "gate" else ""  # the gate tensor can be given by this name too
        return _one_of(OF_GATED[parameter.name]) + by_name
    if parameter.annotation is not Parameter.empty:
        return _type(parameter.annotation)
    if parameter.default is Parameter.empty:
        return "Tensor"
    return "Tensor | None" if parameter.default is None else type(parameter.default).__name__


def _one_of(choices: Iterable[str]) -> str:
    return f"Literal[{', '.join(map(_text, choices))}]"


def _type(annotation: Any) -> str:
    """An annotation in Python syntax."""
    if annotation in (Parameter.empty, Signature.empty):
        return ""
    if isinstance(annotation, str):
        return annotation
    return inspect.formatannotation(annotation).replace("torch.Tensor", "Tensor")


def _text(value: str) -> str:
    return f'"{value}"'


def _default(value: Any) -> str:
    shown = _text(value) if isinstance(value, str) else repr(value)
    return "..." if len(shown) > LONGEST or "<" in shown or shown in ("inf", "-inf") else shown


def _table(entries: Iterable[tuple[str, Any]]) -> list[str]:
    """A row for each function, class or constant: its name, and the first line of its docstring."""
    rows = ["| | |", "| --- | --- |"]
    for name, value in entries:
        signature = _signature(value) if inspect.isroutine(value) else ""
        documented = signature or inspect.isclass(value)
        rows.append(_row(name + signature, _prose(_first_line(value)) if documented else CONSTANTS[name]))
    return rows


def _row(code: str, text: str) -> str:
    return f"| `{_cell(code)}` | {text} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _prose(text: str) -> str:
    """A line of a docstring, converted to Markdown."""
    return _cell(re.sub(r":\w+:`", "`", text.replace("``", "`")))


def _first_line(value: Any) -> str:
    return (inspect.getdoc(value) or "").partition("\n")[0]
