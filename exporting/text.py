"""The parts of an exported file that are common to all activations: docstring, imports, source, inputs."""

from __future__ import annotations

import ast
import hashlib
import math
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable

from .build import DEVICES, DTYPES
from .lines import LONGEST
from .preprocess import OLDEST_GPU

__all__ = ["FORBIDDEN", "assembled", "class_title", "default", "inputs", "wrapped"]

FORBIDDEN = re.compile("try|except|pass", re.IGNORECASE)  # what KernelBench's checker mistakes for a fallback
QUOTES = '"' * 3
CFLAGS = ["-O3", "-std=c++20", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
CUDA_FLAGS = ["-O3", "-std=c++20"]
_CTYPES = ("CDLL", "Structure", "addressof", "byref")
_CTYPES += ("c_bool", "c_char_p", "c_double", "c_float", "c_int", "c_int64", "c_void_p")
_ROOT = 'os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()'


def assembled(
    name: str,
    formula: str,
    scope: str,
    source: str,
    dtypes: tuple[str, ...],
    devices: tuple[str, ...],
    python: Iterable[str],
    more: str = "",
) -> str:
    """The whole text of a file.

    Args:
        name: of the activation and, with ".py", of the file.
        formula: for the docstring.
        scope: for the docstring, what is compiled: "Forward and backward".
        source: C++ and CUDA.
        dtypes: keys of :data:`~jitact.exporting.build.DTYPES`.
        devices: of :data:`~jitact.exporting.build.DEVICES`.
        python: the parts after the function that compiles.
        more: another sentence for the docstring.

    Raises:
        ValueError: the text has a word that KernelBench's form does not allow, or defines a name twice.
    """
    file, python, source = f"{name}.py", [part.strip("\n") for part in python], _allowed(source)
    key = hashlib.sha256("".join([source, *CFLAGS, *CUDA_FLAGS]).encode()).hexdigest()[:8]
    library = _library(f"{name}_{key}", file, devices)
    parts = [
        _docstring(formula, scope, dtypes, devices, more),
        _imports("\n".join([library, *python])),
        f'SOURCE = r"""\n#line @LINE@ "@FILE@"\n{source.strip()}\n"""',
        library,
        *python,
    ]
    lines = "\n\n".join(parts).split("\n")
    text = "\n".join(line.replace("@LINE@", str(number + 2)).replace("@FILE@", file) for number, line in enumerate(lines))
    found = FORBIDDEN.search(text)
    if found:
        line = text[text.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0].strip()
        raise ValueError(f"{name} cannot be exported: {found[0]!r} may not occur in the file, and does in {line!r}")
    clashing = _clashing(ast.parse(text))
    if clashing:
        raise ValueError(f"{name} cannot be exported: the file has a {clashing[0]!r} of its own; give that another name")
    return text + "\n"


def _clashing(file: ast.Module) -> list[str]:
    """The names that a file gives to two things, and those of arguments that hide what a method uses."""
    called: list[str] = []
    numbers: list[str] = []
    for node in file.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            called.append(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            called += [each.asname or each.name.partition(".")[0] for each in node.names]
        elif isinstance(node, ast.Assign):
            numbers += [each.id for each in node.targets if isinstance(each, ast.Name)]
    clashing = [each for each, count in Counter(called + numbers).items() if count > 1]
    for method in [node for node in ast.walk(file) if isinstance(node, ast.FunctionDef)]:
        given = Counter([each.arg for each in method.args.args])
        run = {node.func.id for node in ast.walk(method) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        clashing += [name for name, count in given.items() if count > 1 or name in run]
    for node in file.body:
        if isinstance(node, ast.ClassDef) and node.name in ("Model", "ModelNew"):
            for method in [each for each in node.body if isinstance(each, ast.FunctionDef)]:
                hidden = [each.arg for each in method.args.args if each.arg in called]
                if method.name == "__init__":  # sizes and numbers: what has attributes is meant to be the file's
                    parts = [each.value for each in ast.walk(method) if isinstance(each, ast.Attribute)]
                    hidden = [name for name in hidden if any(isinstance(each, ast.Name) and each.id == name for each in parts)]
                clashing += hidden
    return clashing


def inputs(dtypes: tuple[str, ...], shape: tuple[int, int], count: int, init_inputs: str, rows: int = 0) -> str:
    """The functions that return the inputs, ``count`` tensors and ``rows`` row operands, and the constructor's arguments."""
    dtype = "" if "fp32" in dtypes else f", dtype={DTYPES[dtypes[0]][0]}"
    widths = ["dim"] * count + ["1"] * rows
    tensors = ", ".join(f"torch.randn(batch_size, {width}{dtype})" for width in widths)
    return f"""\
batch_size = {shape[0]}
dim = {shape[1]}

def get_inputs():
    return [{tensors}]

def get_init_inputs():
    return [{init_inputs}]
"""


def default(value: object) -> str:
    """A constructor's default in Python."""
    return f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)


def class_title(title: str, name: str, structs: Iterable[str]) -> str:
    """A title for an activation's class which no other class of the file has, nor a module that it imports."""
    title = title if title.isidentifier() else name
    while title in ("F", "Model", "ModelNew", "Structure", *structs):
        title += "_"
    return title


def wrapped(start: str, parts: list[str], end: str) -> str:
    """A list of parts on one line if it is short enough, else wrapped."""
    line = f"{start}{', '.join(parts)}{end}"
    indent = " " * (len(start) - len(start.lstrip()))
    if len(line) <= LONGEST:
        return line
    lines = [f"{indent}    {parts[0]},"]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 2 <= LONGEST:
            lines[-1] += f" {part},"
        else:
            lines.append(f"{indent}    {part},")
    return "\n".join([start.rstrip(), *lines, indent + end])


def _docstring(formula: str, scope: str, dtypes: tuple[str, ...], devices: tuple[str, ...], more: str) -> str:
    names = [DTYPES[each][0].removeprefix("torch.") for each in dtypes]
    several = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    kernels = f"as CUDA kernels (compute capability {OLDEST_GPU // 100}.0 and up)"
    where = {DEVICES: f"{kernels} or, without a GPU, for the CPU", ("cuda",): kernels, ("cpu",): "for the CPU"}[devices]
    version = sys.modules[__package__.partition(".")[0]].__version__
    sentences = [f"{scope} {where} for {several} tensors.", more, f"Cut from jitact {version} (MIT licence)."]
    scope = " ".join(sentence for sentence in sentences if sentence)
    return f"{QUOTES}{_in_a_string(textwrap.fill(formula, LONGEST))}\n\n{textwrap.fill(scope, LONGEST)}\n{QUOTES}"


def _imports(python: str) -> str:
    called = ", ".join(name for name in _CTYPES if re.search(rf"\b{name}\b", python))
    lines = ["import functools"]
    if "math." in python:
        lines.append("import math")
    lines += ["import os", "import sys", f"from ctypes import {called}", "", "import torch"]
    if re.search(r"\bF\.", python):
        lines.append("import torch.nn.functional as F")
    return "\n".join([*lines, "from torch import nn", "from torch.utils import cpp_extension"])


def _allowed(text: str) -> str:
    """C++ without comments that have words that the form does not allow; in code, they are an error later.

    A string with such a word, as in the name of an instruction, is split in two, which is the same in C++.
    """
    text = text.replace("JITACT_", "").replace(QUOTES, '"" "')  # so that it does not end the Python string; the same in C++
    text = re.sub(
        r"(?:^[ \t]*//[^\n]*\n)+", lambda comment: "" if FORBIDDEN.search(comment[0]) else comment[0], text, flags=re.MULTILINE
    )
    text = re.sub(r"[ \t]*//[^\n]*", lambda comment: "" if FORBIDDEN.search(comment[0]) else comment[0], text)
    parted = lambda string: FORBIDDEN.sub(lambda word: f'{word[0][:-1]}" "{word[0][-1]}', string[0])  # noqa: E731
    return re.sub(r'"(?:\\.|[^"\\\n])*"', parted, text)


def _library(key: str, file: str, devices: tuple[str, ...]) -> str:
    """The text of the function that compiles the source."""
    given = [f'"{key}"', f"cpp_sources={'SOURCE' if 'cpu' in devices else QUOTES[:2]}"]
    if "cuda" in devices:
        given += [f"cuda_sources=SOURCE{' if torch.cuda.is_available() else None' if 'cpu' in devices else ''}"]
    for device, option, flags in (("cpu", "extra_cflags", CFLAGS), ("cuda", "extra_cuda_cflags", CUDA_FLAGS)):
        if device in devices:
            given.append(f"{option}={flags!r}".replace("'", '"'))
    given += ["build_directory=folder", "is_python_module=False", "no_implicit_headers=True"]
    return f'''\
@functools.cache
def library():
    """The functions of SOURCE, which is compiled at first use."""
    root = {_ROOT}
    folder = os.path.join(root, f"{key}_{{torch.__version__}}_{{torch.cuda.is_available()}}")
    if not os.path.exists(os.path.join(folder, "{key}.so")):
        print("{file}: compiling, at first use", file=sys.stderr, flush=True)
    os.makedirs(folder, exist_ok=True)
{wrapped("    path = cpp_extension.load_inline(", given, ")")}
    return CDLL(path)'''


def _in_a_string(text: str) -> str:
    """A text escaped for a triple-quoted Python string, without words that the form does not allow."""
    escaped = "".join(
        f"\\{each}" if each in '"\\' else each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )
    return FORBIDDEN.sub(lambda word: f"{word[0][:-1]}\\x{ord(word[0][-1]):02x}", escaped)
