"""A kernel file to compile, with its options and the local headers that it includes."""

from __future__ import annotations

import hashlib
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from .signature import Signature, prepared, read_signature, sees_places, terms_vanish
from .uses import in_namespace, line_directive, names_used

__all__ = [
    "DEVICE",
    "ELEMENTS",
    "FOLDER",
    "NEXT_TO_NOTHING",
    "KernelSource",
    "RowPart",
    "RowTypes",
    "Work",
    "digest",
    "state_of",
]

FOLDER = Path(__file__).resolve().parents[1]
"""The folder of the library's kernel files."""

DEVICE = FOLDER / "device"
"""The folder of the headers that every kernel file is compiled with, and of the binding."""

_INCLUDE = r'(?m)^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"'


class Work(NamedTuple):
    """How much a GPU computes per element, from 1, next to nothing, to 5, as much as memory bandwidth can hide.

    More work needs more loads in flight, so a thread takes more 16-byte vectors; with little work, one vector is faster. With
    5, loads are staged through shared memory, as the compiler would sink loads to registers until they are late; this applies
    to a forward that reads one tensor and a backward that reads two, all dense. Such a forward is compiled for full occupancy,
    with 32 registers per thread, where these suffice.
    """

    forward: int = 4
    backward: int = 4

    @staticmethod
    def vectors(work: int, size: int) -> int:
        """The number of vectors per thread, for elements of ``size`` bytes."""
        return {2: (1, 1, 2, 2, 2), 4: (1, 2, 2, 3, 3), 8: (2, 2, 2, 3, 3)}[size][work - 1]

    def defines(self) -> list[str]:
        """Preprocessor definitions for the kernels, as compiler flags."""
        works = {direction.upper(): work for direction, work in self._asdict().items()}
        vectors = [f"-DJITACT_{d}_VECTORS_{size}={self.vectors(work, size)}" for d, work in works.items() for size in (2, 4, 8)]
        staged = (self.forward == 5) + 2 * (self.backward == 5)
        return vectors + ([f"-DJITACT_STAGED={staged}"] if staged else [])


NEXT_TO_NOTHING = Work(1, 1)


class RowTypes(NamedTuple):
    """The types that a build of a file of rows is for, if not one dtype for all: names in :data:`ELEMENTS`.

    Attributes:
        input: the type of x and of its gradient.
        output: the type of the result and of the incoming gradient.
        mask: "bool", the type of an additive mask, or "none".
    """

    input: str
    output: str
    mask: str

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of operators that the build has: only forward, where the gradient is another build's or there is none."""
        has_gradient = (self.input != self.output or self.mask == "bool") and self.input in FLOATS
        return ("forward", "backward_from_output") if has_gradient else ("forward",)

    @property
    def shapes(self) -> int:
        """The shapes of rows whose kernels for GPUs can be compiled separately, kShapes of parts.cuh."""
        return 3

    def defines(self) -> list[str]:
        """Preprocessor definitions for the loops, as compiler flags."""
        return [f"-DJITACT_ROW_{role.upper()}={ELEMENTS[name]}" for role, name in self._asdict().items()]


class RowPart(NamedTuple):
    """The part of a file of rows that a build is for, if not all of it, which takes nvcc several times as long.

    Attributes:
        dtype: of all tensors, a name in :data:`ELEMENTS`.
        rows: "along" the last dimension, or "across" it.
        keeps: what backward reads: the "output", and there is ``forward`` too; or the "input", a rare choice, and it is alone.
    """

    dtype: str
    rows: str
    keeps: str

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of operators that the build has."""
        return ("forward", "backward_from_output") if self.keeps == "output" else ("backward",)

    @property
    def shapes(self) -> int:
        """The shapes of rows whose kernels for GPUs can be compiled separately, kShapes of parts.cuh."""
        if self.rows == "along":
            return 3
        return 1 if self.keeps == "input" else 2

    def defines(self) -> list[str]:
        """Preprocessor definitions for the loops, as compiler flags."""
        across, from_input = int(self.rows == "across"), int(self.keeps == "input")
        values = {"ONLY": ELEMENTS[self.dtype], "ACROSS": across, "INPUT_KEPT": from_input}
        return [f"-DJITACT_ROW_{name}={value}" for name, value in values.items()]


FLOATS = {"float32": "float", "float16": "Half", "bfloat16": "Bfloat16"}
ELEMENTS = FLOATS | {
    "bool": "bool",
    "none": "void",
    **{name: f"{name}_t" for name in ("uint8", "int8", "int16", "int32", "int64")},
}
"""C++ types of elements in memory by the names of PyTorch's dtypes."""


class KernelSource(NamedTuple):
    """A kernel file to compile.

    Attributes:
        name: the activation's name; operators are registered as ``jitact::<name>_forward`` and so on.
        text: the kernel file's text.
        path: the origin of the text, for compilers' errors and for headers in the same folder.
        numbers: the last arguments of ``forward`` that are numbers but of type ``T``, not ``Number<T>``.
        singles: how many of the last channel and row operands always have a single value, which kernels then need not look up.
        work: how much a GPU computes per element.
        label: the name for ``python -m jitact build``, if that is another.
        given: other kernel files that the text may use by name; they take precedence over the library's.
        unfused: whether ``rounded`` of rounded.cuh rounds, as eager PyTorch does after each operation.
        rows: what a build of a file of rows is for, if not every dtype, input and output alike.
    """

    name: str
    text: str
    path: str
    numbers: tuple[str, ...] = ()
    work: Work = Work()
    given: tuple[KernelSource, ...] = ()
    label: str = ""
    unfused: bool = False
    rows: RowTypes | RowPart | None = None
    singles: int = 0

    @classmethod
    def from_file(cls, name: str, work: Work = NEXT_TO_NOTHING) -> KernelSource:
        """The library's own ``kernels/<name>.cu``."""
        path = FOLDER / f"{name}.cu"
        return cls(name, path.read_text(), str(path), work=work)

    @property
    def is_librarys(self) -> bool:
        """Whether it is one of the library's own kernel files."""
        return self.path == str(FOLDER / f"{self.name}.cu")

    @property
    def signature(self) -> Signature:
        """The declarations of the file's functions.

        Raises:
            ValueError: they are not declared as required.
        """
        return read_signature(self.text, self.numbers)

    @property
    def uses(self) -> tuple[KernelSource, ...]:
        """The kernel files whose functions the text calls."""
        given = {source.name: source for source in self.given}
        known = [name for name in names_used(self.text) if name in given or (FOLDER / f"{name}.cu").is_file()]
        return tuple(given.get(name) or KernelSource.from_file(name) for name in known)

    @property
    def all_used(self) -> list[KernelSource]:
        """The kernel files that it uses, directly and indirectly."""
        return [each for used in self.uses for each in (used, *used.all_used)]

    @property
    def used_text(self) -> str:
        """The text of the files that it uses, in namespaces, to be placed before its own.

        Raises:
            ValueError: a file cannot be used by this one.
        """
        for used in self.uses:
            if prepared(used.text) and not prepared(self.text):
                why = "its functions want operands that were prepared, and there is no prepare"
                raise ValueError(f"{used.name} cannot be used by another kernel file: {why}")
        return "".join(in_namespace(*used[:3], used.signature, used.used_text) for used in self.uses)

    @property
    def full_text(self) -> str:
        """All text that is compiled except the library's headers, with #line directives for the origins."""
        header = f'#include "{DEVICE}/uses.cuh"\n' if self.uses else ""
        return f"{header}{self.used_text}{line_directive(self.path)}\n{self.text}"

    def defines(self) -> list[str]:
        """Preprocessor definitions for the file, as compiler flags."""
        unmarked = self.signature.unmarked_numbers if self.numbers else 0
        flags = [f"-DJITACT_UNMARKED_NUMBERS={unmarked}"] if unmarked else []
        flags += [f"-DJITACT_SINGLES={self.singles}"] if self.singles else []
        flags += ["-DJITACT_UNFUSED"] if self.unfused else []
        flags += ["-DJITACT_ROW_COUNTED"] if "fold_from_output" in self.text and not terms_vanish(self.text) else []
        flags += ["-DJITACT_ROW_PLACED"] if "LogSumExp" in self.text and sees_places(self.text) else []
        return flags + (self.rows or self.work).defines()

    @property
    def folder(self) -> Path:
        """The folder that ``#include "..."`` searches first: the file's, or the current directory if there is no file."""
        path = Path(self.path)
        try:
            return path.parent.absolute() if os.path.isfile(path) else Path.cwd()
        except OSError:  # the current directory was removed
            return DEVICE

    def headers(self) -> dict[str, Path]:
        """Every local file that the build reads besides the text, by its name in the cache key."""
        found = {}
        for entry in os.scandir(DEVICE):
            if entry.name.endswith((".h", ".cuh", ".cpp")):
                found[entry.name] = Path(entry.path)
        for used in self.all_used:
            if used.is_librarys:
                found[f"{used.name}.cu"] = Path(used.path)
        for n, beside in enumerate(self._headers_beside().values()):
            found |= {f"{n or ''}{label}": path for label, path in beside.items()}
        return dict(sorted(found.items()))

    def include_folders(self) -> list[Path]:
        """The folders for ``-I``, the user's first; the library's headers include each other relative to their own folder."""
        return [*self._headers_beside(), DEVICE]

    def _headers_beside(self) -> dict[Path, dict[str, Path]]:
        """The user's headers by the folders that they are included from, the file's own folder first."""
        folders: dict[Path, dict[str, Path]] = {}
        for source in (self, *self.all_used):
            if not source.is_librarys:
                _follow(source.text, source.folder, source.folder, folders.setdefault(source.folder, {}))
        return {folder: found for folder, found in folders.items() if found}


_USERS = "./"  # prefix of the names of the user's headers, which distinguishes them from the library's


def _follow(text: str, folder: Path, base: Path, found: dict[str, Path]) -> None:
    """Adds to ``found`` the headers that ``text`` includes, directly or indirectly, if they are local files of the user."""
    for name in re.findall(_INCLUDE, text):
        for place in dict.fromkeys((folder, base)):
            path = place / name
            if os.path.isfile(path):  # false also if it may not be looked for, as in a current directory of another user
                label = _USERS + os.path.relpath(path, base)
                if label not in found and path.parent != DEVICE:
                    found[label] = path
                    _follow(_read(path, state_of(path)), path.parent, base, found)
                break


@lru_cache(maxsize=256)
def _read(path: Path, state: tuple[int, ...] | None) -> str:
    return path.read_text(errors="replace")


def state_of(path: Path) -> tuple[int, ...] | None:
    """The modification time, size and inode of a file, which change when it does; None if there is no file."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def digest(source: KernelSource) -> str:
    """The hash of all text that is compiled, without absolute paths, so that a cache can move with an installation."""
    used = [(each.name, each.numbers, each.text) for each in source.all_used if not each.is_librarys]
    digest = hashlib.sha256(repr((source.name, source.defines(), source.text, *used)).encode())
    for name, path in source.headers().items():
        content = path.read_bytes()
        digest.update(f"\n{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
