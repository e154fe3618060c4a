"""One activation as one file that needs nothing of jitact: KernelBench's form, with the library's own CUDA source inside.

``python -m jitact.registry export softsign -o softsign.py``
"""

from __future__ import annotations

import hashlib
import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from .. import registry
from ..definitions.define import load_folder
from ..measuring.commandline import CommandParser
from ..modules import ActivationModule
from ..records import Activation, is_plain
from .build import DEVICES, DTYPES, Build
from .modules import Modules
from .preprocess import OLDEST_GPU
from .shares import with_shares
from .wrapper import Wrapper

__all__ = ["export", "main"]

FORBIDDEN = re.compile("try|except|pass", re.IGNORECASE)  # what KernelBench's checker takes for a fallback
QUOTES = '"' * 3
CFLAGS = ["-O3", "-std=c++20", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
CUDA_FLAGS = ["-O3", "-std=c++20"]


def export(
    activation: registry.Named,
    *,
    dtype: str | Iterable[str] | None = None,
    forward_only: bool = False,
    device: str | None = None,
    shape: tuple[int, int] = (4096, 393216),
) -> str:
    """The text of a Python file that is an activation: ``ModelNew``, ``Model``, ``get_inputs``, ``get_init_inputs``.

    The file compiles its source with ``load_inline`` at first use, trains, keeps for backward what the library's default
    keeps, and runs the library's own loops, cut down to what it needs of them. A gated activation takes two tensors.

    Args:
        activation: anything that :func:`jitact.get` takes, or a name with what stands around it, as "gelu+bias+dropout" or
            "swiglu+row_weight"; a residual is one more tensor. A module's parameters are the defaults in the file, and its
            ``save`` is what the file keeps.
        dtype: "fp32", "fp64", "fp16" or "bf16", or several of them: what the file is for; all four if left out.
        forward_only: whether to leave out backward.
        device: "cuda" or "cpu": what the file is for; a GPU, and a CPU where there is none, if left out.
        shape: ``batch_size`` and ``dim`` of what ``get_inputs`` makes.

    Raises:
        KeyError, TypeError: as :func:`jitact.get`.
        ValueError: the activation has no PyTorch counterpart to write as ``Model``, its text has a word that the form does
            not allow, a module has what a file cannot hold, or an option is not one of those above.
    """
    if isinstance(activation, str) and "+" in activation:
        record, save = registry.record_named(activation), None
        params = dict(record.params)
    else:
        module = registry.module_of(activation)
        record, save = registry.record_of(module), module.save
        if isinstance(activation, nn.Module):
            _check_settings(module)
        plain = is_plain(record.token)
        params = dict(zip(dict(record.params), module._params(), strict=True)) if plain else dict(record.params)
    record, passed = with_shares(record)
    build = Build(record.source, _save(record, save, forward_only), _dtypes(record, dtype), _devices(record, device))
    text = _file(record, build, params, passed, _shape(record, shape))
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
    command.add_argument("--dtype", nargs="+", choices=list(DTYPES), help="what the file is for; all if left out")
    command.add_argument("--forward-only", action="store_true", help="leave out backward")
    command.add_argument("--device", choices=DEVICES, help="what the file is for; both if left out")
    command.add_argument("--shape", default="4096x393216", help="batch_size and dim, as 8192x8192; %(default)s if left out")
    args = parser.parse_args(arguments)
    try:
        if args.folder:
            load_folder(args.folder)
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", args.shape):
            raise ValueError(f"--shape must be two numbers, as 8192x8192; got {args.shape!r}")
        shape = tuple(map(int, args.shape.split("x")))
        text = export(args.name, dtype=args.dtype, forward_only=args.forward_only, device=args.device, shape=shape)
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
    if not is_plain(module.activation.token):
        raise ValueError(f"{name} is exported as a class, with its defaults, and loads a state_dict; got the module {given}")


def _save(record: Activation, save: str | None, forward_only: bool) -> str | None:
    """What the file keeps for backward: the input where operands that broadcast have gradients, which need it."""
    if forward_only:
        return None
    return save or ("input" if record.learned else record.saves[0])


def _dtypes(record: Activation, given: str | Iterable[str] | None) -> tuple[str, ...]:
    chosen = list(DTYPES) if given is None else [given] if isinstance(given, str) else list(given)
    wrong = [each for each in chosen if each not in DTYPES]
    if wrong or not chosen:
        raise ValueError(f"{record.name}: dtype must be of {', '.join(DTYPES)}; got {given!r}")
    return tuple(each for each in DTYPES if each in chosen)


def _devices(record: Activation, given: str | None) -> tuple[str, ...]:
    if given is not None and given not in DEVICES:
        raise ValueError(f"{record.name}: device must be {' or '.join(map(repr, DEVICES))}; got {given!r}")
    return DEVICES if given is None else (given,)


def _shape(record: Activation, given: tuple[int, int]) -> tuple[int, int]:
    if len(given) != 2 or any(type(size) is not int or size < 1 for size in given):
        raise ValueError(f"{record.name}: shape must be two positive numbers, batch_size and dim; got {given!r}")
    return given


def _file(record: Activation, build: Build, params: dict[str, float], passed: dict[str, str], shape: tuple[int, int]) -> str:
    """The whole text."""
    name = record.name.replace("+", "_")
    file = f"{name}.py"
    title = record.title if record.title.isidentifier() else name
    dims = {name: channel.dim for name, channel in record.channels.items()}
    wrapper = Wrapper(build, record.name, title, dims, f"{file}: {record.name}", record.passed)
    modules = Modules(record, params, wrapper, passed)
    source = _allowed(build.extract.text)
    python = [
        wrapper.enumerators(),
        wrapper.structs().rstrip("\n") + "\n",
        wrapper.run(),
        wrapper.helpers().rstrip("\n") + "\n",
        wrapper.function(),
        modules.text,
        _inputs(build, shape, len(wrapper.elements), modules.init_inputs),
    ]
    key = hashlib.sha256("".join([source, *CFLAGS, *CUDA_FLAGS]).encode()).hexdigest()[:8]
    parts = [
        _docstring(record, build),
        _imports(modules.text),
        _source(source),
        _library(f"{name}_{key}", file, build.devices),
    ]
    text = "\n\n".join(["\n".join(parts[:-1]), parts[-1], *python]).replace("\n\n\n\n", "\n\n\n")
    lines = text.split("\n")
    return "\n".join(line.replace("@LINE@", str(number + 2)).replace("@FILE@", file) for number, line in enumerate(lines))


def _docstring(record: Activation, build: Build) -> str:
    names = [DTYPES[each][0].removeprefix("torch.") for each in build.dtypes]
    dtypes = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    what = "Forward and backward" if build.save else "Forward"
    kernels = f"as CUDA kernels for compute capability {OLDEST_GPU // 100}.0 and newer, compiled at first use"
    where = {
        DEVICES: f"{kernels}; without a GPU, for the CPU",
        ("cuda",): kernels,
        ("cpu",): "for the CPU, compiled at first use",
    }[build.devices]
    version = sys.modules[registry.__package__].__version__
    told = f"{what} {where}. For {dtypes} tensors of any shape. Cut from jitact {version} (MIT licence)."
    formula = _in_a_string(textwrap.fill(f"{record.name}(x) = {record.formula}", 127))
    return f"{QUOTES}{formula}\n\n{textwrap.fill(told, 127)}\n{QUOTES}\n"


def _imports(modules: str) -> str:
    lines = ["import ctypes", "import functools", *["import math"] * ("math." in modules), "import os", "import sys", ""]
    lines += ["import torch", *["import torch.nn.functional as F"] * bool(re.search(r"\bF\.", modules)), "from torch import nn"]
    return "\n".join([*lines, "from torch.utils import cpp_extension", ""])


def _allowed(text: str) -> str:
    """C++ without comments that have words that the form does not allow; in code, they are an error later."""
    text = text.replace("JITACT_", "").replace(QUOTES, '"" "')  # the latter ends no string of Python, and is the same in C++
    text = re.sub(
        r"(?:^[ \t]*//[^\n]*\n)+", lambda comment: "" if FORBIDDEN.search(comment[0]) else comment[0], text, flags=re.MULTILINE
    )
    return re.sub(r"[ \t]*//[^\n]*", lambda comment: "" if FORBIDDEN.search(comment[0]) else comment[0], text)


def _source(text: str) -> str:
    """C++ as Python has it."""
    return f'SOURCE = r"""\n#line @LINE@ "@FILE@"\n{text.strip()}\n"""\n'


def _library(key: str, file: str, devices: tuple[str, ...]) -> str:
    sources = [f"cpp_sources={'SOURCE' if 'cpu' in devices else QUOTES[:2]}"]
    if "cuda" in devices:
        sources += [f"cuda_sources=SOURCE{' if torch.cuda.is_available() else None' if 'cpu' in devices else ''}"]
    flags = "".join(
        f"        {option}={flags!r},\n".replace("'", '"')
        for option, flags in (("extra_cflags", CFLAGS), ("extra_cuda_cflags", CUDA_FLAGS))
        if option == "extra_cflags" or "cuda" in devices
    )
    return f'''\
@functools.cache
def library():
    """The compiled functions."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    folder = os.path.join(root, f"{key}_{{torch.__version__}}_{{torch.cuda.is_available()}}")
    if not os.path.exists(os.path.join(folder, "{key}.so")):
        print("{file}: compiling, at first use", file=sys.stderr, flush=True)
    os.makedirs(folder, exist_ok=True)
    path = cpp_extension.load_inline(
        "{key}", {", ".join(sources)},
{flags}        build_directory=folder, is_python_module=False, no_implicit_headers=True,
    )
    return ctypes.CDLL(path)
'''


def _inputs(build: Build, shape: tuple[int, int], count: int, init_inputs: str) -> str:
    dtype = "" if "fp32" in build.dtypes else f", dtype={DTYPES[build.dtypes[0]][0]}"
    tensors = ", ".join([f"torch.randn(batch_size, dim{dtype})"] * count)
    return f"""\
batch_size = {shape[0]}
dim = {shape[1]}


def get_inputs():
    return [{tensors}]


def get_init_inputs():
    return [{init_inputs}]
"""


def _in_a_string(text: str) -> str:
    """A text as it stands between three quotation marks in Python, without the words that the form does not allow."""
    escaped = "".join(
        f"\\{each}" if each in '"\\' else each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )
    return FORBIDDEN.sub(lambda word: f"{word[0][:-1]}\\x{ord(word[0][-1]):02x}", escaped)
