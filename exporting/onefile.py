"""Exports an activation as one file that does not need jitact: in KernelBench's form, with the library's CUDA source inside.

``jitact export softsign -o softsign.py``
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import registry
from ..definitions.define import load_folder
from ..definitions.kernel_file import write_file
from ..measuring.commandline import CommandParser, dtypes_named
from ..modules import ActivationModule, bias_around, drops
from ..records import Activation, is_plain
from .build import DEVICES, DTYPES, OF_TORCH, Build
from .modules import Modules
from .rows import DTYPES_OF_ROWS, rows_file, to_export
from .shares import with_shares
from .text import assembled, class_title, inputs
from .wrapper import Wrapper

__all__ = ["export", "main"]


def export(
    activation: registry.Named,
    *,
    dtype: str | torch.dtype | Iterable[str | torch.dtype] | None = None,
    forward_only: bool = False,
    device: str | None = None,
    shape: tuple[int, int] = (4096, 393216),
) -> str:
    """The text of a Python file with an activation: ``ModelNew``, ``Model``, ``get_inputs``, ``get_init_inputs``.

    The file compiles its source with ``load_inline`` at first use. It supports training, saves for backward what the library
    saves by default, and runs the library's own loops, reduced to what it needs. A gated activation takes two tensors.

    Args:
        activation: anything that :func:`jitact.get` takes, or a name with fused operations, as "gelu+bias+dropout" or
            "swiglu+row_weight"; a residual is one more tensor. A module's parameters become the defaults in the file, and its
            ``save`` what the file saves.
        dtype: "fp32", "fp64", "fp16" or "bf16", or PyTorch's dtype or its name, or several of them: what the file supports; all
            four if left out. The kernels of softmax and its relatives do not support fp64.
        forward_only: whether to leave out backward.
        device: "cuda" or "cpu": the device that the file is for; if left out, a GPU, or the CPU if there is none.
        shape: ``batch_size`` and ``dim`` of the tensors that ``get_inputs`` makes.

    Raises:
        KeyError, TypeError: as :func:`jitact.get`; or ``forward_only`` is no bool.
        ValueError: the activation has no PyTorch counterpart to write as ``Model``, its text has a word that the form does
            not allow, a module has a setting that files do not support, or an option is not one of those above.
    """
    if type(forward_only) is not bool:
        raise TypeError(f"export: forward_only must be True or False, got {forward_only!r}")
    of_rows = None if isinstance(activation, str) and "+" in activation else to_export(activation)
    if of_rows is not None:
        dim = getattr(activation, "dim", 1) if isinstance(activation, nn.Module) else 1
        name = of_rows.name
        if dim is None:
            raise ValueError(f"{name} cannot be exported without a dimension; got {activation!r}")
        options = _dtypes(name, dtype, DTYPES_OF_ROWS), _devices(name, device), _shape(name, shape)
        return rows_file(of_rows, dim, *options, not forward_only)
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
    name = record.name
    options = _save(record, save, forward_only), _dtypes(name, dtype), _devices(name, device)
    build = Build(record.source, *options, _of_own_dtype(record))
    return _file(record, build, params, passed, _shape(name, shape))


def _output(text: str) -> Path | None:
    """The file to write; None for stdout."""
    return None if text == "-" else CommandParser.output_file(text)


def main(arguments: list[str] | None = None, prog: str = "python -m jitact.registry") -> int:
    """``jitact export NAME [-o FILE]``, and ``python -m jitact.registry export``; returns the exit code."""
    parser = CommandParser(prog=prog, description="Writes an activation as one file.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="export")
    command = commands.add_parser("export", help=(export.__doc__ or "").partition("\n")[0])
    command.add_argument("name", help="an activation, by any name that it is known by")
    command.add_argument("-o", "--output", type=_output, help="the file to write; printed if left out, or -")
    parser.add_folder(command)
    command.add_argument(
        "--dtype", nargs="+", type=dtypes_named, action="extend", help=f"some of {','.join(DTYPES)}; all if left out"
    )
    command.add_argument("--forward-only", action="store_true", help="leave out backward")
    command.add_argument("--device", choices=DEVICES, help="what the file is for; both if left out")
    command.add_argument(
        "--shape", type=_two_numbers, default="4096x393216", help="batch_size and dim, as 8192x8192; %(default)s if left out"
    )
    args = parser.parse_args(arguments)
    try:
        if args.folder:
            load_folder(args.folder)
        dtype = args.dtype and list(itertools.chain(*args.dtype))
        text = export(args.name, dtype=dtype, forward_only=args.forward_only, device=args.device, shape=args.shape)
        if args.output:
            write_file(args.output, text)
        else:
            print(text, end="")
    except (KeyError, ValueError, OSError) as error:
        print(f"{command.prog}: {error}", file=sys.stderr)
        return 2
    return 0


def _two_numbers(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"[1-9][0-9]*x[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"no shape {text!r}; write it like 8192x8192")
    rows, columns = map(int, text.split("x"))
    return rows, columns


def _check_settings(module: ActivationModule) -> None:
    """Checks that a file can have a module's settings.

    Raises:
        ValueError: it cannot.
    """
    name, given = module.activation.name, f"{type(module).__name__}({module.extra_repr()})"
    refused = [option for option in ("inplace", "fast_math") if getattr(module, option)]
    if refused:
        raise ValueError(f"{name} cannot be exported with {refused[0]}=True, which files do not have; got {given}")
    if module.surrounded:
        present = {"bias": bias_around(module) is not None, "dropout": drops(module)}
        parts = "+".join([name, *(part for part, there in present.items() if there)])
        raise ValueError(f"{name} with bias or dropout is exported by name, as {parts!r}; got the module {given}")
    if not is_plain(module.activation.token):
        raise ValueError(f"{name} is exported as a class, with its defaults, and loads a state_dict; got the module {given}")


def _save(record: Activation, save: str | None, forward_only: bool) -> str | None:
    """What the file saves for backward: the input if several tensors have gradients, as these need it."""
    if forward_only:
        return None
    return save or ("input" if len(record.layout.places) > 1 else record.saves[0])


def _of_own_dtype(record: Activation) -> tuple[str, ...]:
    """The broadcast operands whose dtype may differ from the elements'."""
    signature = record.source.signature
    return tuple(n for n in signature.of("channel", "row") if record.dtypes == "own" or n in record.added)


def _dtypes(name: str, given: Any, possible: Sequence[str] = tuple(DTYPES)) -> tuple[str, ...]:
    several = possible if given is None else given
    several = several if isinstance(several, Iterable) and not isinstance(several, str) else [several]
    chosen = [OF_TORCH.get(str(each), each) for each in several]
    wrong = [each for each in chosen if each not in possible]
    if wrong or not chosen:
        got = ", ".join(map(repr, wrong)) or repr(given)
        raise ValueError(f"{name}: dtype must be of {', '.join(possible)}; got {got}")
    return tuple(each for each in possible if each in chosen)


def _devices(name: str, given: str | None) -> tuple[str, ...]:
    if given is not None and given not in DEVICES:
        raise ValueError(f"{name}: device must be {' or '.join(map(repr, DEVICES))}; got {given!r}")
    return DEVICES if given is None else (given,)


def _shape(name: str, given: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(given, list | tuple) or len(given) != 2 or any(type(size) is not int or size < 1 for size in given):
        raise ValueError(f"{name}: shape must be two positive numbers, batch_size and dim; got {given!r}")
    return given


def _file(record: Activation, build: Build, params: dict[str, float], passed: dict[str, str], shape: tuple[int, int]) -> str:
    """The text of the file."""
    name = record.name.replace("+", "_")
    title = class_title(record.title, name, build.extract.structs)
    dims = {name: channel.dim for name, channel in record.channels.items()}
    wrapper = Wrapper(build, record.name, title, dims, f"{name}.py: {record.name}", record.passed, record.unread)
    modules = Modules(record, params, wrapper, passed)
    return assembled(
        name,
        f"{record.name}(x) = {record.formula}",
        "Forward and backward" if build.save else "Forward",
        build.extract.text,
        build.dtypes,
        build.devices,
        [
            *wrapper.parts(),
            modules.text,
            inputs(build.dtypes, shape, len(wrapper.elements), modules.init_inputs, len(wrapper.rows)),
        ],
    )
