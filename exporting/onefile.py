"""One activation as one file that needs nothing of jitact: KernelBench's form, with the CUDA source inside.

``python -m jitact.registry export softsign -o softsign.py``
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import math
import re
import sys
import textwrap
from pathlib import Path
from string import Template

import torch
import torch.nn.functional as F
from torch import nn

from .. import registry
from ..definitions.define import Definition, load_folder
from ..definitions.expression import in_cpp
from ..kernels import KernelSource
from ..kernels.loader.source import Work
from ..measuring.commandline import CommandParser
from ..modules import ActivationModule
from ..records import Activation, is_plain
from . import onefile_weights as weights
from .extract import extract
from .onefile_text import CLASSES, CPU, CPU_STORAGE, ELEMENTS, FILE, FUNCTION, GPU, GPU_STORAGE, RANDOM

__all__ = ["export", "main"]

KINDS = {  # of activations, and of lines of the templates, by what backward keeps
    "input": ("tensor", "input", "params"),
    "output": ("tensor", "output", "params"),
    "bit": ("bits", "bit", "params"),
    "random": ("bits", "random", "params"),
    "channels": ("weights", "channels"),
    "single": ("weights", "single"),
    "staged": ("staged",),  # beside one of the others: by how forward loads
    "direct": ("direct",),
}
MARK = re.compile(rf"@({'|'.join({mark for marks in KINDS.values() for mark in marks})})\b ?")
VECTORS = """\
constexpr int kThreads = 128;
template <typename S, bool forward>
constexpr int kVectors = sizeof(S) == 8 ? {} : sizeof(S) == 4 ? {} : {};
"""
QUOTES = '"' * 3
FORBIDDEN = re.compile("try|except|pass", re.IGNORECASE)  # what KernelBench's checker takes for a fallback


def export(activation: registry.Named) -> str:
    """The text of a Python file that is an activation: ``ModelNew``, ``Model``, ``get_inputs``, ``get_init_inputs``.

    The file compiles its CUDA source with ``load_inline`` at first use, trains, keeps for backward what the library's
    default keeps, and runs the same arithmetic at the same speed. Without a GPU it compiles for the CPU.

    Args:
        activation: anything that :func:`jitact.get` takes. A module's parameters are the defaults in the file, and its
            ``save`` is what the file keeps.

    Raises:
        KeyError, TypeError: as :func:`jitact.get`.
        ValueError: the activation has no PyTorch counterpart to write as ``Model``, its text has a word that the form does
            not allow, or a module has what a file cannot hold.
    """
    module = registry.module_of(activation)
    record = registry.record_of(module)
    if record.gating:
        raise ValueError(f"{record.name} cannot be exported as a file: files have no gated activations")
    if isinstance(activation, nn.Module):
        _check_settings(module)
    kind = _kind(record, module.save)
    params = record.params if _has_operands(record) else zip(dict(record.params), module._params(), strict=True)
    marks = {*KINDS[kind], "staged" if record.source.work.forward == 5 else "direct"}
    text = Template(_lines(FILE, marks)).substitute(_fields(record, dict(params), kind, marks))
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    # Comments are free to say what they like in the library; here a few words are not allowed in them either.
    text = "\n".join(
        line for line in text.split("\n") if not (FORBIDDEN.search(line) and line.lstrip().startswith(("//", "#")))
    )
    found = FORBIDDEN.search(text)
    if found:
        line = text[text.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0].strip()
        raise ValueError(f"{record.name} cannot be exported: {found[0]!r} may not occur in the file, and does in {line!r}")
    return text


def main(arguments: list[str] | None = None, prog: str = "python -m jitact.registry") -> int:
    """``jitact export NAME [-o FILE]``, and ``python -m jitact.registry export``; returns the exit code."""
    parser = CommandParser(prog=prog, description="Writes an activation as one file.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="export")
    command = commands.add_parser("export", help=(export.__doc__ or "").partition("\n")[0])
    command.add_argument("name", help="an activation, by any name that it is known by")
    command.add_argument("-o", "--output", type=Path, help="the file to write; printed if left out")
    command.add_argument("--from", dest="folder", type=Path, help="a folder of kernel files to define activations from first")
    args = parser.parse_args(arguments)
    try:
        if args.folder:
            load_folder(args.folder)
        text = export(args.name)
        if args.output:
            args.output.write_text(text, encoding="utf-8")
        else:
            print(text, end="")
    except (KeyError, ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


def _check_settings(module: ActivationModule) -> None:
    """Checks that a file can be of a module as it is.

    Raises:
        ValueError: it cannot.
    """
    name, given = module.activation.name, f"{type(module).__name__}({module.extra_repr()})"
    refused = [option for option in ("inplace", "fast_math") if getattr(module, option)]
    if refused:
        raise ValueError(f"{name} cannot be exported with {refused[0]}=True, which files do not have; got {given}")
    if _has_operands(module.activation):
        raise ValueError(f"{name} is exported as a class, with its defaults, and loads a state_dict; got the module {given}")


def _has_operands(record: Activation) -> bool:
    """Whether an activation takes more than ``x`` and numbers."""
    return not is_plain(record.token)


def _kind(record: Activation, save: str | None) -> str:
    """Which of :data:`KINDS` an activation is of."""
    if not _has_operands(record):
        return save or record.saves[0]
    if record.layout.draws:
        return "random"
    return "single" if all(channel.one for channel in record.channels.values()) else "channels"


def _fields(record: Activation, params: dict[str, float], kind: str, marks: set[str]) -> dict[str, str]:
    """What the template's placeholders stand for."""
    own = [] if kind == "random" else list(params)
    names = [in_cpp(name) for name in own]
    listed = "".join(f", {name}" for name in names)
    values = {
        "version": sys.modules[registry.__package__].__version__,
        "name": record.name,
        "title": record.title,
        "formula": _in_a_string(textwrap.fill(f"{record.name}(x) = {record.formula}", 127)),
        "fields": "".join(f"  T {name};\n" for name in names),
        "listed": listed,
        "values": ", ".join(f"T(params[{i}])" for i in range(len(names))),
        "signature": "".join(f", {name}={_number(value)}" for name, value in params.items()),
        "assigned": "".join(f"        self.{name} = {name}\n" for name in own),
        "given": "".join(f", self.{name}" for name in own),
        "vectors": VECTORS.format(*(_vectors(record.source.work, size) for size in (8, 4, 2))),
        "init_inputs": "",
        **dict.fromkeys(("taken", "seed", "seed_taken", "seed_typed"), ""),
    }
    if kind == "random":
        values |= {"taken": ", T slope", "listed": ", Random<T>{slope}, T(), T()", "seed": ", seed"}
        values |= {"seed_taken": ", void* seed", "seed_typed": ", const int64_t* seed"}
    if kind in ("channels", "single"):
        values |= {"weights": str(len(record.channels)), "learned": str(len(record.learned)), "sizes": "", "sizes_taken": ""}
        values |= {"given": ", ".join(f"w.of[{i}]" for i in range(len(record.channels)))}
        if kind == "channels":
            values |= {"sizes": ", channels, inner", "sizes_taken": ", int64_t channels, int64_t inner"}
    values |= _maths(record, kind, values["listed"], names)
    values |= _modules(record, values)
    templates = {"elements": ELEMENTS, "gpu": GPU_STORAGE + GPU, "cpu": CPU_STORAGE + CPU, "function": FUNCTION}
    if "weights" in marks:
        templates = {
            "elements": weights.ELEMENTS,
            "gpu": GPU_STORAGE + weights.GPU,
            "cpu": weights.CPU_HEADERS + CPU_STORAGE + weights.CPU,
            "function": weights.FUNCTION,
        }
    values |= {key: Template(_lines(template, marks)).substitute(values) for key, template in templates.items()}
    for key in ("maths", "kernel", "elements"):
        values[key] = values[key].replace("JITACT_INLINE", "INLINE").replace("jitact", "numbers")
    return values | {"key": hashlib.sha256("".join(values.values()).encode()).hexdigest()[:8]}


def _maths(record: Activation, kind: str, listed: str, names: list[str]) -> dict[str, str]:
    """What the file has of the headers and of the kernel file, and the expression of the gradient."""
    if "weights" in KINDS[kind]:
        roots = {"forward", "backward"}
        gradient = kept = ""
    else:
        save = "bit" if kind == "random" else kind
        kept = {"input": "x", "output": "y", "bit": "bit"}[save]
        backward = "backward" if save == "input" else f"backward_from_{save}"
        gradient, roots = f"{backward}(dy, {kept}{listed})", {"forward", backward}
        if save == "bit":
            roots |= {"keeps"} | ({"philox", "Mantissa"} if kind == "random" else set())
        elif backward not in record.source.signature.functions:
            duals = ["numbers::Dual<T>(x, T(1))", *(f"numbers::Dual<T>({name})" for name in names)]
            gradient = f"dy * forward({', '.join(duals)}).derivative"
            roots = {"forward", "Dual"}
    # The loops here hand over plain numbers, whatever the operand is.
    text = re.sub(r"\b(?:Number|Channel)<T>", "T", _with_used(record.source))
    maths, kernel = extract(text, {*roots, "Double", "Single", "Narrow"})
    kernel = kernel.replace(QUOTES, '"" "')  # ends no string of Python, and is the same in C++
    if "weights" in KINDS[kind]:
        maths += weights.RESULTS
    elif kind == "random":
        maths += RANDOM
    return {"maths": maths, "kernel": kernel, "gradient": gradient, "kept": kept}


def _with_used(source: KernelSource) -> str:
    """A kernel file after what it uses, where ``silu_::forward`` is called ``silu_forward``: all in one namespace."""
    text = source.text
    for used in source.uses:
        theirs = _with_used(used).replace('#include "elementwise.cuh"\n', "")
        for name in re.findall(r"\bELEMENTWISE\s+\S+\s+(\w+)\(", theirs):
            theirs = re.sub(rf"\b{name}\(", f"{used.name}_{name}(", theirs)
        text = f"{theirs}\n{text}".replace(f"{used.name}_::", f"{used.name}_")
    return text


def _in_a_string(text: str) -> str:
    """A text as it stands between three quotation marks in Python, without the words that the form does not allow."""
    escaped = "".join(
        f"\\{each}" if each in '"\\' else each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )
    return FORBIDDEN.sub(lambda word: f"{word[0][:-1]}\\x{ord(word[0][-1]):02x}", escaped)


def _number(value: float) -> str:
    """A number as Python reads it."""
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def _vectors(work: Work, size: int) -> str:
    """How many vectors of elements of ``size`` bytes a thread takes, in C++."""
    forward, backward = (work.vectors(each, size) for each in work)
    return f"{forward}" if forward == backward else f"(forward ? {forward} : {backward})"


def _lines(template: str, marks: set[str]) -> str:
    """A template's lines: those that start with ``@`` and a word are for that mark alone."""
    lines = []
    for line in template.split("\n"):
        mark = MARK.match(line)
        if mark is None or mark[1] in marks:
            lines.append(line[mark.end() :] if mark else line)
    return "\n".join(lines)


def _modules(record: Activation, values: dict[str, str]) -> dict[str, str]:
    """ModelNew and Model, what get_init_inputs gives, and the imports that they need.

    Raises:
        ValueError: nothing tells what they are like.
    """
    if record.name in weights.MODULES and _has_operands(record):
        classes, init_inputs = weights.MODULES[record.name]
        helpers = classes
    elif _has_operands(record):
        raise ValueError(f"{record.name} cannot be exported: nothing tells what its modules are like")
    else:
        reference = _reference(record)
        classes, init_inputs, helpers = Template(CLASSES).substitute(values | reference), "", "".join(reference.values())
    return {
        "classes": classes,
        "init_inputs": init_inputs,
        "imports": "import math\n" * ("math." in helpers),
        "functional": "import torch.nn.functional as F\n" * ("F." in helpers),
    }


def _reference(record: Activation) -> dict[str, str]:
    """Model's expression in PyTorch, and the helpers that it calls."""
    helpers, own = "", [f"self.{name}" for name, _ in record.params]
    expression = record.expression if isinstance(record, Definition) else None
    if expression:
        if expression.activations:
            called = ", ".join(each.name for each in expression.activations)
            raise ValueError(f"{record.name} cannot be exported: it calls {called}; write out what they compute")
        python = expression.renamed("x", *own)
        helpers = "".join(f"{inspect.getsource(helper)}\n\n" for helper in expression.helpers.values())
        helpers = re.sub(r": Tensor(?: \| float)?| -> Tensor", "", helpers)
    elif getattr(F, record.name, None) is record.reference:
        python = f"F.{record.name}({', '.join(['x', *own])})"
    elif getattr(torch, record.name, None) is record.reference:
        python = f"torch.{record.name}(x)"
    else:
        python = _one_line(record, ["x", *own])
    return {"reference": python, "helpers": helpers}


def _one_line(record: Activation, arguments: list[str]) -> str:
    """What a reference that only returns something returns, with the numbers that it has from its module.

    Raises:
        ValueError: it is not of that kind.
    """
    refusal = ValueError(f"{record.name} cannot be exported without a PyTorch counterpart: define it with reference=, one line")
    function = record.reference
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        raise refusal from None
    found = [node for node in ast.walk(tree) if isinstance(node, (ast.Lambda, ast.FunctionDef))]
    if len(found) != 1:
        raise refusal
    body = found[0].body if isinstance(found[0].body, list) else [ast.Return(found[0].body)]
    body = [node for node in body if not isinstance(node, ast.Expr)]  # a docstring
    if len(body) != 1 or not isinstance(body[0], ast.Return):
        raise refusal
    names = dict(zip([argument.arg for argument in found[0].args.args], arguments, strict=False))
    numbers = {name: value for name, value in function.__globals__.items() if isinstance(value, (int, float))}
    python = _renamed(ast.unparse(body[0].value), names, numbers)
    if {node.id for node in ast.walk(ast.parse(python)) if isinstance(node, ast.Name)} - {"x", "self", "torch", "math", "F"}:
        raise refusal
    return python


def _renamed(python: str, names: dict[str, str], numbers: dict[str, float]) -> str:
    """An expression with other names for variables, and numbers for names of numbers."""

    class Rename(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            if node.id in names:
                return ast.Name(names[node.id])
            return ast.Constant(numbers[node.id]) if node.id in numbers else node

    return ast.unparse(Rename().visit(ast.parse(python, mode="eval")))
