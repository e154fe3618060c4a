"""Compiles kernel files at first use and hands out their operators.

This is the one place that knows compilers, caches and locks. :func:`load` turns the text of a kernel file into a loaded
library whose operators are registered with PyTorch's dispatcher; everything above works with those operators.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["KernelSource", "Library", "load"]

FOLDER = Path(__file__).resolve().parent
SCHEMA = 1  # part of every key: raise it when the meaning of a cached build changes


@dataclass(frozen=True)
class KernelSource:
    """What is compiled: one kernel file and what is declared of it.

    Attributes:
        name: the activation's name; operators are registered as ``jitact::<name>_forward`` and so on.
        params: names of the scalar parameters, in the order in which the file's functions take them.
        saves: what backward can keep: any of ``"input"``, ``"output"``, ``"bit"``.
        text: the kernel file's text.
        path: where the text came from; compilers report errors against it.
    """

    name: str
    params: tuple[str, ...]
    saves: tuple[str, ...]
    text: str
    path: str

    @classmethod
    def from_file(cls, name: str, params: tuple[str, ...], saves: tuple[str, ...]) -> KernelSource:
        """The library's own ``kernels/<name>.cu``."""
        path = FOLDER / f"{name}.cu"
        return cls(name, params, saves, path.read_text(), str(path))


@dataclass(eq=False)
class Library:
    """A loaded build: its operators, as ``torch.ops.jitact.<name>_<operator>.default``.

    ``forward_bit``, ``forward_bit_`` and ``backward_from_bit`` exist if ``"bit"`` is among the source's saves, and
    ``backward_from_output`` if ``"output"`` is.
    """

    name: str
    path: Path
    has_cuda: bool
    forward: Callable
    forward_: Callable
    backward: Callable
    backward_from_output: Callable | None = None
    forward_bit: Callable | None = None
    forward_bit_: Callable | None = None
    backward_from_bit: Callable | None = None


_lock = threading.RLock()
_libraries: dict[tuple[KernelSource, bool], Library] = {}
_registered: set[str] = set()


def load(source: KernelSource, *, fast_math: bool = False) -> Library:
    """Returns the operators of ``source``, compiling it if no cached build exists.

    Args:
        source: what to compile.
        fast_math: build with ``-use_fast_math`` (a separately cached build).
    """
    key = (source, fast_math)
    library = _libraries.get(key)
    if library is None:
        with _lock:
            library = _libraries.get(key) or _register(source, _build(source, fast_math), fast_math)
            _libraries[key] = library
    return library


def _archs() -> list[str]:
    """Compute capabilities of the GPUs that this process sees, as ``"90"``."""
    if not torch.cuda.is_available():
        return []
    majors = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return sorted(f"{major}{minor}" for major, minor in majors)


def _cpu_flags() -> list[str]:
    """Instruction sets, at the level that torch itself uses on this processor."""
    level = torch.backends.cpu.get_cpu_capability()
    flags = ["-mavx2", "-mfma", "-mf16c"] if level in ("AVX2", "AVX512") else []
    return flags + (["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"] if level == "AVX512" else [])


def _build(source: KernelSource, fast_math: bool) -> Path:
    archs = _archs()
    defines = [f"-DJITACT_PARAMS={len(source.params)}", *(f"-DJITACT_SAVES_{s.upper()}" for s in source.saves)]
    if fast_math:
        defines.append("-DJITACT_FAST_MATH")
    if archs:
        defines += ["-DJITACT_CUDA", "-DUSE_CUDA"]
    cflags = ["-O3", "-std=c++20", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fvisibility=hidden",
              "-DTORCH_TARGET_VERSION=0x020a000000000000", *_cpu_flags(), *defines]  # fmt: skip
    cuda_cflags = ["-O3", "-std=c++20", "-Xcompiler=-fvisibility=hidden", *defines]
    cuda_cflags += ["-use_fast_math"] if fast_math else []
    cuda_cflags += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]

    kernel = f'#include "elementwise.cuh"\n#line 1 "{source.path}"\n{source.text}\n#include "launch.cuh"\n'
    files = sorted(p for p in FOLDER.iterdir() if p.suffix in (".h", ".cuh", ".cpp"))
    parts = [SCHEMA, torch.__version__, cflags, cuda_cflags, kernel, *(p.read_text() for p in files)]
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("JITACT_CACHE_DIR") or Path.home() / ".cache" / "jitact")
    name = f"jitact_{source.name}"
    directory = cache / f"{source.name}-{key}"
    path = directory / f"{name}.so"
    if not path.exists():
        from torch.utils.cpp_extension import load_inline

        directory.mkdir(parents=True, exist_ok=True)
        load_inline(
            name,
            [(FOLDER / "binding.cpp").read_text(), kernel],
            cuda_sources=[kernel] if archs else None,
            extra_cflags=cflags,
            extra_cuda_cflags=cuda_cflags,
            extra_include_paths=[str(FOLDER)],
            build_directory=str(directory),
            is_python_module=False,
            no_implicit_headers=True,
        )
    return path


def _register(source: KernelSource, path: Path, fast_math: bool) -> Library:
    """Loads a built library and registers its operators, under a name that this process has not used yet."""
    base = source.name + ("_fast_math" if fast_math else "")
    name, version = base, 1
    while name in _registered:
        version += 1
        name = f"{base}_v{version}"
    _registered.add(name)
    ctypes.CDLL(str(path)).jitact_register(name.encode(), "".join(f", float {p}" for p in source.params).encode())

    kinds = ["forward", "forward_", "backward"]
    if "output" in source.saves:
        kinds.append("backward_from_output")
    if "bit" in source.saves:
        kinds += ["forward_bit", "forward_bit_", "backward_from_bit"]
    operators = {}
    for kind in kinds:
        torch.library.register_fake(f"jitact::{name}_{kind}", _FAKES[kind])
        operators[kind] = getattr(torch.ops.jitact, f"{name}_{kind}").default
    return Library(name=name, path=path, has_cuda=bool(_archs()), **operators)


def _fake_mask(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)


# What each operator returns, in shape, strides and dtype: what torch.compile and meta tensors see.
_FAKES: dict[str, Callable] = {
    "forward": lambda x, *params: torch.empty_like(x),
    "forward_": lambda x, *params: None,
    "backward": lambda dy, x, *params: torch.empty_like(x),
    "backward_from_output": lambda dy, y, *params: torch.empty_like(y),
    "forward_bit": lambda x, *params: (torch.empty_like(x), _fake_mask(x)),
    "forward_bit_": lambda x, *params: _fake_mask(x),
    "backward_from_bit": lambda dy, mask, *params: torch.empty_like(dy),
}
