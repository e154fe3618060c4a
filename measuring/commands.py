"""The commands ``jitact check`` and ``jitact version``."""

from __future__ import annotations

import argparse
import math
import platform
import sys
from pathlib import Path

import torch

from .commandline import CommandParser, Parser, exit_code

__all__ = ["main"]


def main(arguments: list[str] | None = None, prog: str = "jitact") -> int:
    """Runs ``check`` or ``version``; returns the exit code: 1 if a check failed, 2 for an unknown name."""
    parser = CommandParser(prog=prog)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    version = commands.add_parser("version", description="Versions of jitact and of what it depends on, for bug reports.")
    version.set_defaults(run=_version)
    check = commands.add_parser("check", description=_check.__doc__)
    Parser.add_choices(check)
    parser.add_folder(check)
    check.add_argument(
        "--low", type=float, default=-math.inf, help="the smallest input; the end of the type's range by default"
    )
    check.add_argument("--high", type=float, default=math.inf, help="the largest")
    check.set_defaults(run=_check, parser=check)
    options = parser.parse_args(arguments)
    return exit_code(lambda: options.run(options))


def _check(options: argparse.Namespace) -> int:
    """Compares forward and gradient of activations with their reference in float64: all of them, or those named."""
    from ..definitions.define import load_folder
    from ..kernels import BuildError
    from .checks import DTYPES, check

    failed = False
    try:
        if options.folder:
            load_folder(options.folder)
        for name in options.parser.canonical(options.names, of_rows=True, around=True):
            try:
                passed = check(name, low=options.low, high=options.high, dtypes=options.dtype or DTYPES, device=options.device)
            except BuildError as error:
                print(f"{options.parser.prog}: {name}: {error}", file=sys.stderr)
                passed = False
            failed |= not passed
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        options.parser.error(str(error).removeprefix("check: "))
    return 1 if failed else 0


def _version(options: argparse.Namespace) -> int:
    from .. import __file__ as place
    from .. import __version__

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    print(f"jitact {__version__} in {Path(place).resolve().parent}")
    print(f"torch {torch.__version__} ({cuda}), Python {platform.python_version()}, {platform.platform()}")
    return 0
