"""One activation as one file that needs nothing of jitact: KernelBench's form, with the CUDA source inside.

``python -m jitact.registry export softsign -o softsign.py``
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import re
import sys
import textwrap
from pathlib import Path
from string import Template

import torch
import torch.nn.functional as F

from . import registry
from .activations import Activation
from .definitions import Definition, load_folder
from .extract import extract, geometry
from .learned import Learned
from .onefile_text import CPU, ELEMENTS, FILE, FUNCTION, GPU

__all__ = ["export", "main"]

FORBIDDEN = re.compile("try|except|pass", re.IGNORECASE)  # what KernelBench's checker takes for a fallback


def export(name: str) -> str:
    """The text of a Python file that is an activation: ``ModelNew``, ``Model``, ``get_inputs``, ``get_init_inputs``.

    The file compiles its CUDA source with ``load_inline`` at first use, trains, keeps for backward what the library's
    default keeps, and runs the same arithmetic at the same speed. Without a GPU it compiles for the CPU.

    Args:
        name: any name of an activation, one that was defined included.

    Raises:
        KeyError: unknown name.
        ValueError: the activation takes tensors beside ``x`` (prelu, rrelu, xielu), or has no PyTorch counterpart to write
            as ``Model``, or its text has a word that the form does not allow.
    """
    record = registry.get(name).activation
    if isinstance(record, Learned):
        raise ValueError(f"{record.name} cannot be exported: it takes tensors beside x, weights or random numbers")
    text = Template(FILE).substitute(_fields(record))
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


def main(arguments: list[str] | None = None) -> int:
    """``python -m jitact.registry export NAME [-o FILE]``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jitact.registry", description="Writes an activation as one file.")
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
            args.output.write_text(text)
    except (KeyError, ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if not args.output:
        print(text, end="")
    return 0


def _fields(record: Activation) -> dict[str, str]:
    """What the template's placeholders stand for."""
    save, functions = record.saves[0], set(re.findall(r"\bELEMENTWISE \w+ (\w+)\(", record.source.text))
    names = [name for name, _ in record.params]
    listed = "".join(f", {name}" for name in names)
    kept = {"input": "x", "output": "y", "bit": "bit"}[save]
    backward = "backward" if save == "input" else f"backward_from_{save}"
    gradient, roots = f"{backward}(dy, {kept}{listed})", {"forward", backward}
    if save == "bit":
        roots |= {"keeps"}
    elif backward not in functions:
        duals = ["numbers::Dual<T>(x, T(1))", *(f"numbers::Dual<T>({name})" for name in names)]
        gradient = f"dy * forward({', '.join(duals)}).derivative"
        roots = {"forward", "Dual"}
    maths, kernel = extract(record.source.text, {*roots, "Double", "Single", "Narrow"})
    fields = "".join(f"  T {name};\n" for name in names)
    values = {
        "version": sys.modules[__package__].__version__,
        "name": record.name,
        "title": record.title,
        "formula": record.formula.replace("\\", "\\\\"),
        "maths": maths,
        "kernel": kernel,
        "fields": fields,
        "listed": listed,
        "gradient": gradient,
        "kept": kept,
        "values": ", ".join(f"T(params[{i}])" for i in range(len(names))),
        "signature": "".join(f", {name}={value!r}" for name, value in record.params),
        "assigned": "".join(f"        self.{name} = {name}\n" for name in names),
        "given": "".join(f", self.{name}" for name in names),
        "geometry": geometry(),
        **_reference(record),
    }
    for key, template in (("elements", ELEMENTS), ("gpu", GPU), ("cpu", CPU), ("function", FUNCTION)):
        values[key] = Template(_lines(template, save)).substitute(values)
    for key in ("maths", "kernel", "elements"):
        values[key] = values[key].replace("JITACT_INLINE", "INLINE").replace("jitact", "numbers")
    return values | {"key": hashlib.sha256("".join(values.values()).encode()).hexdigest()[:8]}


def _lines(template: str, save: str) -> str:
    """A template's lines for what is kept: those that start with ``@`` and a name are for that alone."""
    marked = [re.match(r"(?:@(\w+) ?)?(.*)", line).groups() for line in template.split("\n")]
    return "\n".join(line for mark, line in marked if mark in (None, save) or (mark == "tensor" and save != "bit"))


def _reference(record: Activation) -> dict[str, str]:
    """Model's expression in PyTorch, the helpers that it calls and the imports that it needs."""
    helpers, own = "", [f"self.{name}" for name, _ in record.params]
    expression = record.expression if isinstance(record, Definition) else None
    if expression:
        python = _renamed(expression.python, dict(zip(expression.variables, ["x", *own], strict=True)), {})
        helpers = "".join(f"{inspect.getsource(helper)}\n\n" for helper in expression.helpers.values())
        helpers = re.sub(r": Tensor(?: \| float)?| -> Tensor", "", helpers)
    elif getattr(F, record.name, None) is record.reference:
        python = f"F.{record.name}({', '.join(['x', *own])})"
    elif getattr(torch, record.name, None) is record.reference:
        python = f"torch.{record.name}(x)"
    else:
        python = _one_line(record, ["x", *own])
    used = python + helpers
    return {
        "reference": python,
        "helpers": helpers,
        "imports": "import math\n" * ("math." in used),
        "functional": "import torch.nn.functional as F\n" * ("F." in used),
    }


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
