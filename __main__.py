"""The command ``jitact``, and ``python -m jitact``: dispatches to the modules that have a command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple, TextIO


class Command(NamedTuple):
    """A command, and the module whose ``main(arguments, prog)`` runs it.

    Attributes:
        name: the first word of the command line.
        does: the description in the help.
        module: the module, relative to this package.
        takes_name: whether ``main`` runs several commands, and takes the name as its first argument.
    """

    name: str
    does: str
    module: str
    takes_name: bool = False


COMMANDS = (
    Command("bench", "measures correctness, speed and memory of activations and of PyTorch's", "bench"),
    Command("check", "compares forward and gradient of activations with float64", "measuring.commands", True),
    Command("accuracy", "measures the worst error of every activation over all inputs of a dtype", "accuracy"),
    Command("export", "writes an activation as one file that needs PyTorch only", "exporting.onefile", True),
    Command("build", "compiles activations ahead of their first use", "kernels.__main__", True),
    Command("list", "shows the builds in the cache", "kernels.__main__", True),
    Command("where", "shows the folders of the cache, and why they are used", "kernels.__main__", True),
    Command("clear", "removes builds: all, those named, or those not used lately", "kernels.__main__", True),
    Command("doctor", "checks compilers, CUDA, GPUs and folders, and says how to fix what is wrong", "kernels.__main__", True),
    Command("tune", "measures how many vectors each thread of a GPU should process", "kernels.__main__", True),
    Command("report", "writes the files of a checkout that are generated from tables and measurements", "report"),
    Command("version", "shows the versions of jitact and of what it depends on, for bug reports", "measuring.commands", True),
)


def usage() -> str:
    """The text of ``jitact --help``."""
    lines = ["usage: jitact COMMAND ...", "", "Activation kernels for PyTorch, compiled at first use.", ""]
    lines += [f"  {command.name:10}{command.does}" for command in COMMANDS]
    return "\n".join([*lines, "", "`jitact COMMAND --help` shows the options. `python -m jitact` is the same program."])


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0 success, 1 failure, 2 wrong usage."""
    words = sys.argv[1:] if arguments is None else arguments
    name, rest = (words[0], words[1:]) if words else ("--help", [])
    from jitact.measuring.commandline import exit_code

    return exit_code(_chosen(name, rest))


def _chosen(name: str, rest: list[str]) -> Callable[[], int]:
    """The function that runs the command; it returns the exit code."""
    if name in ("-h", "--help", "help"):
        return lambda: _print(usage(), sys.stdout, 0)
    if name in ("-V", "--version"):
        from jitact import __version__

        return lambda: _print(f"jitact {__version__}", sys.stdout, 0)
    for command in COMMANDS:
        if command.name == name:
            run = import_module(f"jitact.{command.module}").main
            if command.takes_name:
                return lambda: run([name, *rest], prog="jitact")
            return lambda: run(rest, prog=f"jitact {name}")
    names = ", ".join(command.name for command in COMMANDS)
    return lambda: _print(f"jitact: no command {name!r}; there are {names}", sys.stderr, 2)


def _print(text: str, file: TextIO, code: int) -> int:
    print(text, file=file)
    return code


if __name__ == "__main__":
    sys.exit(main())
