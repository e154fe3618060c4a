"""``python -m jitact.kernels``: builds kernels in advance, and lists, clears and diagnoses cached builds.

``jitact build``, ``jitact list`` and so on are the same commands.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .. import registry
from ..measuring.commandline import CommandParser, exit_code
from ..records import Activation
from ..rows.modules import names as row_names
from ..rows.records import RowActivation
from .loader import cache, folders
from .loader.build import find
from .loader.errors import BuildError
from .loader.gpu import Arch, parse_archs
from .loader.plan import Plan, make_plan
from .loader.source import ELEMENTS, KernelSource, RowPart, RowTypes


def main(arguments: Sequence[str] | None = None, prog: str = "python -m jitact.kernels") -> int:
    """Runs one command and returns the exit code: 0 for success, 1 for a failure, 2 for an unknown name."""
    return exit_code(lambda: _run(_parser(prog).parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    try:
        return options.run(options)
    except LookupError as error:
        print(f"{options.prog}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise
    except (BuildError, ValueError, OSError) as error:
        print(f"{options.prog}: {error}", file=sys.stderr)
        return 1


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = CommandParser(prog=prog, description="Compiled kernels, and what compiling takes.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], description: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=description, description=description)
        sub.set_defaults(run=run, prog=sub.prog)
        return sub

    build = command("build", _build, "Compiles the activations that are not cached, all or those named.")
    build.add_argument("names", nargs="*", metavar="NAME")
    parser.add_folder(build)
    build.add_argument(
        "--arch",
        action="extend",
        type=_archs,
        default=[],
        metavar="9.0",
        help="a compute capability to compile for, beside those of this machine's GPUs; may be repeated",
    )
    build.add_argument("--fast-math", action="store_true", help="the builds for fast_math=True")
    build.add_argument(
        "--jobs", type=_positive, metavar="N", help="compilers at once; JITACT_JOBS, or what cores and memory allow"
    )
    command("list", _list, "Lists what is cached.")
    command("where", _where, "Tells where builds are kept, and why there.")
    clear = command("clear", _clear, "Removes builds from the cache, all or those named. Other files are never touched.")
    clear.add_argument("names", nargs="*", metavar="NAME")
    clear.add_argument(
        "--unused", type=_positive, metavar="DAYS", help="only builds that no process of yours used for so many days"
    )
    command("doctor", _doctor, "Checks what compiling needs, and how to fix it. Compiles nothing; exits with 0 if all is well.")
    tune = command("tune", _tune, "Measures on a GPU how many vectors its threads should take, for all or those named.")
    tune.add_argument("names", nargs="*", metavar="NAME")
    bench = command("bench", _bench, "Measures first use and hits beside torch's load_inline.")
    bench.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return int(text)


def _archs(text: str) -> tuple[Arch, ...]:
    if not text.strip(";, "):
        raise argparse.ArgumentTypeError(f"must name a compute capability, such as 9.0, got {text!r}")
    try:
        return parse_archs(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _build(options: argparse.Namespace) -> int:
    from ..definitions.define import load_folder
    from .loader.prebuild import prebuild

    try:
        if options.folder:
            load_folder(options.folder)
    except (OSError, ValueError) as error:
        raise LookupError(str(error)) from None
    plans = [_plan(name, options.fast_math, options.arch) for name in _registered(options.names)]
    return prebuild(plans, options.jobs)


def _registered(names: Sequence[str], of_rows: bool = True) -> list[str]:
    """The kernels of the named activations, or of all, each once; without those that work on rows unless ``of_rows``.

    Raises:
        LookupError: a name is unknown; the message suggests similar ones.
    """

    def kernel(name: str) -> str:
        found = registry.of_rows(name) if of_rows else None
        if "+" in name:
            _record(name)
            return name
        return found.activation.source.name if found else registry.resolve(name)

    return list(dict.fromkeys(map(kernel, names or [*registry.names(), *(row_names() if of_rows else ())])))


def _record(name: str) -> Activation | RowActivation:
    """The record of an activation, which may be fused with other operations, as in "gelu+bias".

    Raises:
        LookupError: the name is unknown, or the operation cannot be fused with the activation.
    """
    of_rows = registry.of_rows(name)
    try:
        return of_rows.activation if of_rows else registry.record_named(name)
    except ValueError as error:
        raise LookupError(str(error)) from None


def _plan(name: str, fast_math: bool = False, archs: Sequence[Arch] = ()) -> Plan:
    return make_plan(_record(name).source, fast_math=fast_math, archs=archs)


def _list(options: argparse.Namespace) -> int:
    known = _registered([])
    rows = [("NAME", "KEY", "ARCHS", "CPU", "SIZE", "AGE", "USED", "STATE")]
    found = {folder: list(cache.entries(folder)) for folder in folders.readable()}
    current = _current({entry.folder.name.rpartition("-")[0] for entries in found.values() for entry in entries}, known)
    for folder, entries in found.items():
        for entry in entries:
            name, _, key = entry.folder.name.rpartition("-")
            if entry.problem:
                rows.append((name, key, "", "", "", "", "", entry.problem))
                continue
            state = "current" if entry.folder in current else "superseded" if _activation_of(name) in known else "usable"
            archs = " ".join(entry.build.archs) or "none"
            try:
                size = f"{entry.library.stat().st_size / 1024:.0f} KB"
                ages = [_age(time.time() - then) for then in (entry.build.created, cache.used(entry))]
            except FileNotFoundError:  # another process removed it meanwhile
                continue
            rows.append((name, key, archs, entry.build.cpu, size, *ages, state))
        rows += [(*title.rpartition("-")[::2], "", "", "", "", "", "being built") for title in cache.at_work(folder)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    why = _configured_problem(writing=False)
    if why:
        print(f"jitact: not looked into: {why}", file=sys.stderr)
    return 0


def _current(builds: set[str], known: list[str]) -> set[Path]:
    """The folders of those builds of known activations, by names of builds, that calls would use now."""
    current = set()
    for build in builds:
        name = _activation_of(build)
        if name in known:
            kind = build.removeprefix(name)
            entry = find(make_plan(_for_kind(_record(name).source, kind), fast_math=kind == "_fast_math"))
            current |= {entry.folder} if entry else set()
    return current


def _for_kind(source: KernelSource, kind: str) -> KernelSource:
    """A kernel file for the row types, or the part of rows, in the suffix of a build's name."""
    words = kind.removeprefix("_").split("_")
    if kind in ("", "_fast_math"):
        return source
    return source._replace(rows=(RowPart if words[1] in ROWS else RowTypes)(*words))


def _configured_problem(*, writing: bool) -> str | None:
    """Why the configured folder cannot be used; None if it can, or does not exist."""
    folder = folders.configured()
    why = folders.problem(folder, writing=writing) if os.path.lexists(folder) else None
    return f"{folder} {why}" if why else None


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _where(options: argparse.Namespace) -> int:
    for folder, use in folders.explain():
        print(f"{folder}  {use}")
    return 0


def _clear(options: argparse.Namespace) -> int:
    wanted = _cached_names(options.names)
    why, left = _configured_problem(writing=True), 0
    if why:
        left = 1
        print(f"jitact: not cleared: {why}", file=sys.stderr)
    places = [folder for folder in folders.readable() if folders.problem(folder, writing=True) is None]
    for folder in places:
        left += _clear_in(folder, wanted, options.unused)
    if not places and not left:
        print(f"{folders.configured()}: nothing to remove")
    return 1 if left else 0


def _cached_names(names: Sequence[str]) -> set[str]:
    """The names of the builds to clear, for names of activations or of builds that ``list`` shows; empty if none is given.

    Raises:
        LookupError: a name is neither that of an activation nor that of a build.
    """
    cached = {entry.folder.name.rpartition("-")[0] for folder in folders.readable() for entry in cache.entries(folder)}
    known = cached | {_activation_of(each) for each in cached}
    wanted = {name if name in known else _record(name).source.name for name in names}
    return wanted | {each for each in cached if _activation_of(each) in wanted}


# The suffix of a build's name for fast_math, for particular row types, or for a part of a file of rows.
ROWS = "along", "across"
_KIND = re.compile(rf"_fast_math$|(_({'|'.join(ELEMENTS)})){{3}}$|_({'|'.join(ELEMENTS)})_({'|'.join(ROWS)})_(output|input)$")


def _activation_of(build: str) -> str:
    return _KIND.sub("", build)


def _clear_in(folder: Path, wanted: set[str], unused_days: int | None) -> int:
    """Removes builds: all or those wanted, and of these only the unused if days are given. Returns how many it failed to."""
    removed, freed, left = 0, 0, 0
    for entry in cache.entries(folder):
        if wanted and entry.folder.name.rpartition("-")[0] not in wanted:
            continue
        try:
            if unused_days is not None and time.time() - cache.used(entry) < unused_days * cache.DAY:
                continue
            size = _size(entry.folder)
            if cache.remove(entry):
                removed, freed = removed + 1, freed + size
                continue
            print(f"{entry.folder.name} is being built: left alone")
        except OSError as error:
            if not os.path.lexists(entry.folder):  # another process removed it meanwhile
                continue
            print(f"jitact: not cleared: {entry.folder} ({error.strerror})", file=sys.stderr)
        left += 1
    if not wanted and unused_days is None:
        try:
            cache.tidy(folder)
        except OSError as error:
            print(f"jitact: not cleared: {error.filename or folder} ({error.strerror})", file=sys.stderr)
            left += 1
    print(f"{folder}: removed {removed} {'build' if removed == 1 else 'builds'}, {freed / 1024:.0f} KB")
    return left


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _doctor(options: argparse.Namespace) -> int:
    from .loader.doctor import diagnose

    return diagnose([_plan(name) for name in _registered([])])


def _tune(options: argparse.Namespace) -> int:
    from ..measuring.tune import tune

    records = [registry.class_of(name).activation for name in _registered(options.names, of_rows=False)]
    return tune([(record.source, tuple(value for _, value in record.params)) for record in records])


def _bench(options: argparse.Namespace) -> int:
    from ..measuring.beside_load_inline import bench

    return bench(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
