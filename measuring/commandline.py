"""What all commands share: arguments, names, exit codes, the description of the machine, result files.

Exit codes: 0 success, 1 something measured or checked is wrong or failed, 2 the command line is wrong, 130 interrupted by
Ctrl-C, 141 the reader of the output is gone (``| head``), 143 ended by SIGTERM (``timeout``, or a scheduler).
"""

from __future__ import annotations

import argparse
import datetime
import errno
import io
import json
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from .. import registry
from ..definitions.kernel_file import write_file
from ..rows.modules import names as row_names
from .progress import progress, say

__all__ = [
    "CLOSED",
    "DTYPES",
    "CommandParser",
    "Parser",
    "dtype_name",
    "dtypes_named",
    "exit_code",
    "first_line",
    "keeping",
    "machine",
    "progress",
    "say",
    "stopped_at_once",
    "with_kept",
    "write_json",
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
WRITERS = {"wrong": "jitact bench", "us": "jitact bench --calls", "block": "jitact bench --models", "broken": "jitact accuracy"}
"""The commands that write files of results, by a key that only their rows have."""
INTERRUPTED, CLOSED, ENDED = 130, 141, 143  # as shells count ends by SIGINT, SIGPIPE and SIGTERM


def exit_code(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit code, also if Ctrl-C, a closed pipe or a full disk stops it.

    Stdout prints characters that its encoding lacks as question marks.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        code = command()
        if sys.stdout is not None:  # it was closed before Python started
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return CLOSED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"jitact: {error}", file=sys.stderr)
        _discard_output()
        return 1
    return code


def _discard_output() -> None:
    """Discards what stdout still holds: else Python's flush at exit would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class _Ended(KeyboardInterrupt):
    """SIGTERM, treated as Ctrl-C is."""


class _Ends:
    """Raises Ctrl-C and SIGTERM as exceptions, outside of torch's own code if that takes no long time.

    What torch calls from C++ or for weak references must not raise: the process aborts, or the exception is lost. Each was seen
    within a hundred tries while torch.compile ran. An exception that was lost is raised again.
    """

    PATIENCE = 2.0  # seconds for which torch's code, such as a compiler, may go on
    AGAIN = 5.0  # seconds after which an exception must have ended the measurement
    TORCH = str(Path(torch.__file__).parent) + os.sep

    def __enter__(self) -> None:
        self.first: tuple[int, float] | None = None  # the signal and its time
        self.over = False
        chosen = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not signal.SIG_IGN]
        self.before = {each: signal.signal(each, self._handle) for each in chosen}

    def __exit__(self, *_: object) -> None:
        self.over = True  # what was measured is written now
        if self.first:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for each, handler in self.before.items():
            signal.signal(each, handler or signal.SIG_DFL)  # None if it was not set from Python

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.over:
            return
        if self.first is None:
            self.first = signum, time.monotonic()
            self.before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._handle)
        while frame and not frame.f_code.co_filename.startswith(self.TORCH):
            frame = frame.f_back
        raises = not frame or time.monotonic() - self.first[1] > self.PATIENCE
        signal.setitimer(signal.ITIMER_REAL, self.AGAIN if raises else 0.05)  # calls this again
        if raises:
            raise _Ended if self.first[0] == signal.SIGTERM else KeyboardInterrupt


@contextmanager
def keeping(results: dict[str, Any]) -> Iterator[None]:
    """Lets Ctrl-C, SIGTERM or a closed pipe end a long measurement, keeping what it has put into ``results`` so far.

    ``results["stopped"]`` is then the exit code, else 0.
    """
    results["stopped"] = 0
    handles = threading.current_thread() is threading.main_thread()  # signals cannot be handled elsewhere
    try:
        with _Ends() if handles else nullcontext():
            yield
    except _Ended:
        results["stopped"] = ENDED
    except KeyboardInterrupt:
        results["stopped"] = INTERRUPTED
    except BrokenPipeError:
        results["stopped"] = CLOSED


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: ``"bf16"`` for ``torch.bfloat16``."""
    return next(name for name, known in DTYPES.items() if known is dtype)


class CommandParser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line, without the usage, and exits with 2."""

    def __init__(self, **kwargs: Any) -> None:
        """Takes what ArgumentParser takes."""
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuses unknown arguments, so that the error names the subcommand and not the whole program."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Ends the program."""
        self.exit(2, f"{self.prog}: {message}\n")

    def canonical(
        self, names: list[str], of_rows: bool = False, around: bool = False, others: Iterable[str] = ()
    ) -> list[str]:
        """Canonical names of activations without duplicates; all of them if none is given. Unknown names are an error.

        Args:
            names: in any spelling.
            of_rows: whether softmax and its relatives are included.
            around: whether names may include fused operands: "gelu+bias".
            others: further names that are accepted unchanged.
        """

        def resolve(name: str) -> str:
            if name in others:
                return name
            if around and "+" in name:
                return registry.record_named(name).name
            return (registry.resolve_any if of_rows else registry.resolve)(name)

        try:
            return list(dict.fromkeys(map(resolve, names))) or [*registry.names(), *(row_names() if of_rows else ()), *others]
        except (KeyError, ValueError) as error:
            self.error(str(error))

    @staticmethod
    def add_folder(parser: argparse.ArgumentParser) -> None:
        """Adds ``--from`` to any parser, for ``load_folder(args.folder)``."""
        parser.add_argument("--from", dest="folder", type=Path, help="a folder of kernel files to define first")

    @staticmethod
    def output_file(text: str) -> Path:
        """A path for ``type=``, checked to be writable before the run rather than after it."""
        path, reason = Path(text), ""
        try:
            if path.is_dir() or not path.parent.is_dir():
                reason = "is a directory" if path.is_dir() else f"there is no directory {str(path.parent)!r}"
            elif not os.access(path if path.exists() else path.parent, os.W_OK):
                reason = os.strerror(errno.EACCES)
        except OSError as error:  # the name is too long, or a folder on the way may not be searched
            reason = os.strerror(error.errno or 0)
        if reason:
            raise argparse.ArgumentTypeError(f"cannot write {text!r}: {reason}")
        return path

    @classmethod
    def results_file(cls, text: str) -> Path:
        """The same for a file of results, which keeps those that are not measured again, and must not hold anything else."""
        path = cls.output_file(text)
        if _results_in(path) is None:
            raise argparse.ArgumentTypeError(f"{text!r} holds something else than results, which would be lost")
        return path

    def refuse_results_of_others(self, path: Path | None, mark: str, device: torch.device, fact: str = "device") -> None:
        """An error for a file with rows of another command or machine, which cannot be kept beside the new ones.

        Args:
            path: a :meth:`results_file`.
            mark: the key of :data:`WRITERS` for the rows that are going to be written.
            device: where they are going to be measured.
            fact: of the machine, which must be the same; if the file lacks it, the device counts.
        """
        results = (path and _results_in(path)) or {}
        writers = _writers(results)
        if not writers:
            return
        if others := writers - {WRITERS[mark]}:
            written = " and ".join(sorted(f"`{other}`" for other in others))
            self.error(f"{str(path)!r} holds results of {written}; write those of `{WRITERS[mark]}` to another file")
        then, now = results["machine"], machine(device)
        fact = fact if fact in then else "device"
        if then[fact] != now[fact]:
            self.error(f"{str(path)!r} holds results of {then['device']}; write those of {now['device']} to another file")


class Parser(CommandParser):
    """A command line of activation names, ``--dtype`` and ``--device``."""

    def __init__(self, **kwargs: Any) -> None:
        """Takes what ArgumentParser takes."""
        super().__init__(**kwargs)
        self.add_choices(self)

    @classmethod
    def add_choices(cls, parser: argparse.ArgumentParser) -> None:
        """Adds these arguments to any parser."""
        parser.add_argument("names", nargs="*", metavar="NAME", help="activations, by any name that they have; all by default")
        parser.add_argument("--dtype", type=dtypes_named, action="extend", help=f"some of {','.join(DTYPES)}, joined by commas")
        parser.add_argument("--device", type=cls._device, help="cpu, cuda or cuda:1; the GPU by default, if there is one")

    def _refer_to_operands(self, names: list[str], operands: bool, others: Iterable[str]) -> None:
        """An error for names of what only ``--operands`` measures, or that it measures with another name."""
        for name in names:
            if operands and name in others:
                continue
            plain, plus, _ = name.partition("+")
            of_rows = registry.of_rows(plain) is not None
            if (plus and (of_rows or plain in registry.names())) or (of_rows and not operands):
                self.error(f"{name!r} is measured by --operands {plain}")

    def parse(
        self, arguments: list[str] | None, of_rows: bool = False, others: Iterable[str] = ()
    ) -> argparse.Namespace:
        """The arguments, with canonical names and the device filled in.

        Args:
            arguments: the command line.
            of_rows: whether names of row activations are accepted, as they are with ``--operands``.
            others: further names that are accepted with ``--operands``.
        """
        args = self.parse_args(arguments)
        operands = getattr(args, "operands", False)
        if hasattr(args, "operands"):
            self._refer_to_operands(args.names, operands, others)
        args.names = self.canonical(args.names, of_rows or operands, others=others if operands else ())
        args.device = args.device or self._device("cuda" if torch.cuda.is_available() else "cpu")
        return args

    @staticmethod
    def _device(text: str) -> torch.device:
        try:
            device = torch.device(text)
        except RuntimeError:
            device = torch.device("meta")
        if device.type not in ("cpu", "cuda"):
            raise argparse.ArgumentTypeError(f"no device {text!r}; choose from cpu, cuda, cuda:0, ...")
        if device.type == "cuda":
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if (device.index or 0) >= count:
                raise argparse.ArgumentTypeError(f"no device {text!r}: this machine has {count} usable GPUs")
            device = torch.device("cuda", device.index or 0)
            torch.cuda.set_device(device)
        return device


def dtypes_named(text: str) -> list[torch.dtype]:
    """The dtypes that a command line names, joined by commas: as keys of :data:`DTYPES`, or as torch does.

    Raises:
        argparse.ArgumentTypeError: there is no dtype of such a name.
    """
    dtypes = [DTYPES.get(name) or getattr(torch, name, None) for name in text.split(",")]
    for name, dtype in zip(text.split(","), dtypes, strict=True):
        if dtype not in DTYPES.values():
            raise argparse.ArgumentTypeError(f"no dtype {name!r}; choose from {', '.join(DTYPES)}")
    return list(dict.fromkeys(dtypes))


def machine(device: torch.device) -> dict[str, Any]:
    """The facts that measurements depend on: device, driver, versions, date."""
    from .. import __version__

    facts = {"device": _cpu_name(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts = {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    facts |= {"kind": device.type, "cuda": torch.version.cuda, "torch": torch.__version__, "python": platform.python_version()}
    return facts | {"jitact": __version__, "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds")}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"


def _first_line(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def first_line(error: Exception) -> str:
    """An exception in one line: its type, and the first error line of a compiler's output or the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {next((line for line in lines if 'error:' in line), lines[0])}"


def stopped_at_once(results: dict[str, Any]) -> bool:
    """Whether a measurement was stopped before its first row: then files of earlier ones, also of other machines, stay."""
    return bool(results["stopped"]) and not (results.get("rows") or results.get("operands"))


def write_json(path: Path, results: dict[str, Any]) -> None:
    """Writes results with the rows last, one per line: compact, and a changed row is one line of a diff."""
    results = _strict(results)
    lists = [key for key in ("operands", "rows") if results.get(key) is not None]
    head = json.dumps({key: value for key, value in results.items() if key not in lists}, indent=1)
    text = head[:-2]
    for name in lists:
        text += f',\n "{name}": [\n  ' + ",\n  ".join(json.dumps(row) for row in results[name]) + "\n ]"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, f"{text}\n}}\n")  # else a kill meanwhile would cost the earlier results, too


def _results_in(path: Path) -> dict[str, Any] | None:
    """The results that a file holds, or is going to hold: none yet; None if it holds something else."""
    if not path.is_file() or not path.stat().st_size:  # /dev/stdout holds nothing, and reading it waits for input
        return {}
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        rows, operands = (list(results.get(key, ())) for key in ("rows", "operands"))
        has_parts = all(isinstance(results.get(key, {}), dict) for key in ("dtypes", "first_use"))
        valid = "device" in results["machine"] and has_parts and all(row["name"] and row["dtype"] for row in rows + operands)
        known = all(not WRITERS.keys().isdisjoint(row) for row in rows)
    except (ValueError, TypeError, LookupError, AttributeError):
        return None
    return results if valid and known else None


def _writers(results: dict[str, Any]) -> set[str]:
    """The commands, of :data:`WRITERS`, that wrote the rows of results."""
    found = {next(WRITERS[mark] for mark in WRITERS if mark in row) for row in results.get("rows", ())}
    return found | {WRITERS["wrong"]} if results.get("operands") else found


def with_kept(
    results: dict[str, Any], path: Path | None, facts: Iterable[str] = ("device", "torch", "jitact")
) -> dict[str, Any]:
    """Results, merged with those rows of a file that were not measured again.

    Rows of the file are dropped if one of the ``facts`` of the machine or the shape differs; if an older file lacks a fact, the
    device counts. Rows measured again keep their place. Kept rows of another version or device, which ``facts`` may allow, say
    so in ``"by"``. The caller recomputes what depends on all rows, such as means.
    """
    if path is None or not path.is_file():
        return results
    try:
        before, now = json.loads(path.read_text(encoding="utf-8")), results["machine"]
        then = before["machine"]
        other = any(then[each] != now[each] for each in (fact if fact in then else "device" for fact in facts))
    except (ValueError, TypeError, LookupError):  # not a file of results; it is overwritten
        return results
    if other:
        return results
    both = dict(results)
    other_device, other_version = (then[fact] != now[fact] for fact in ("device", "jitact"))

    def kept(row: dict[str, Any]) -> dict[str, Any]:
        if other_device or other_version:
            row = {"by": f"jitact {then['jitact']}, {then['date'][:10]}"} | row
        if other_device and row["by"].startswith("jitact"):  # else it is of a third device
            row["by"] = f"{then['device']}, {row['by']}"
        return row

    for key in {"dtypes", "first_use"} & before.keys():
        both[key] = before[key] | results.get(key, {})
    for key in {"operands", "rows"} & before.keys():
        old = _by_line([kept(row) for row in before[key] if _line(row, before) == _line(row, both)], both)
        both[key] = [row for rows in (old | _by_line(results.get(key, []), both)).values() for row in rows]
    return both


def _by_line(rows: list[dict[str, Any]], results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rows grouped by :func:`_line`, such as those for several choices of ``save``."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(_line(row, results), []).append(row)
    return found


def _line(row: dict[str, Any], results: dict[str, Any]) -> str:
    """The key of a row: block, name, dtype and shape, which may be given once for all rows of a dtype."""
    common = results.get("dtypes", {}).get(row["dtype"], {}).get("shape")
    return json.dumps([row.get("block"), row["name"], row["dtype"], row.get("shape", common)])


def _strict(value: Any) -> Any:
    """``value`` with infinities and NaNs, which JSON lacks, as strings that ``float`` reads."""
    if isinstance(value, dict):
        return {key: _strict(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
