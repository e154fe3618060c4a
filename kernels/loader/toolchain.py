"""Finds the compilers. Errors say what is missing, where it was looked for and how to install it."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from .errors import ToolchainError
from .gpu import Arch
from .memory import Memory
from .source import DEVICE

__all__ = ["Compiler", "Nvcc", "find_cudart", "find_cxx", "find_ninja", "find_nvcc", "nvcc_command"]


class Compiler(NamedTuple):
    """A C++ compiler.

    Attributes:
        path: its path.
        version: its version line.
        flags: those that follow the command in CXX.
        libmvec: whether it vectorises calls of mathematical functions, by glibc's libmvec.
    """

    path: str
    version: str
    flags: tuple[str, ...] = ()
    libmvec: bool = False


class Nvcc(NamedTuple):
    """A CUDA compiler.

    Attributes:
        path: its path.
        version: its version line, with that of the host compiler in CC, if any.
        release: the CUDA version, as ``"13.0"``.
        root: the folder of its toolkit, which torch calls CUDA_HOME.
        archs: the archs that it can compile for, as ``"90"``; empty if it cannot list them.
        origin: where it was found, for messages.
    """

    path: str
    version: str
    release: str
    root: str
    archs: tuple[str, ...]
    origin: str

    def knows(self, arch: Arch) -> bool:
        """Whether it can compile for ``arch``."""
        return not self.archs or arch.number in self.archs or f"{arch.major}{arch.minor}" in self.archs


def find_cxx(memory: Memory) -> Compiler:
    """The C++ compiler: ``$CXX``, else the first of c++, g++ and clang++ on the PATH that works.

    Raises:
        ToolchainError: there is none.
    """
    wanted = os.environ.get("CXX")
    names = [wanted] if wanted else ["c++", "g++", "clang++"]
    others = []
    for name in names:
        path = _program(name)
        version = _version(memory, path) if path else None
        if version:
            flags = tuple(_words(name)[1:])
            return Compiler(path, version, flags, _has_libmvec(memory, path, flags))
        others += [path] if path else []
    tried = f"{wanted} (from CXX)" if wanted else ", ".join(names)
    looked = f"{', '.join(others)} is there and does not compile C++; " if others else ""
    raise ToolchainError(
        f"no C++ compiler\n{looked}looked for {tried} on PATH={os.environ.get('PATH', '')}\n"
        f"install one: {_install('g++', 'gcc-c++', 'gxx')}, or name one with CXX"
    )


def find_ninja() -> str:
    """The path of ninja, which may not be on the PATH, as in notebooks that run in a virtual environment.

    Raises:
        ToolchainError: there is none.
    """
    folders = [os.path.dirname(sys.executable), os.path.join(sys.prefix, "bin")]
    spec = importlib.util.find_spec("ninja")
    if spec and spec.submodule_search_locations:
        package = spec.submodule_search_locations[0]
        folders += [os.path.join(package, "data", "bin"), os.path.join(package, *[os.pardir] * 4, "bin")]
    path = _program("ninja") or shutil.which("ninja", path=os.pathsep.join(folders))
    if path is None:
        raise ToolchainError(
            "no ninja, which torch compiles with\n"
            f"looked for it on PATH={os.environ.get('PATH', '')} and in {', '.join(dict.fromkeys(folders))}\n"
            f"install it: {_pip_install('ninja')}"
        )
    return path


def find_nvcc(memory: Memory) -> Nvcc:
    """An nvcc of torch's major CUDA version: in PYTORCH_NVCC, CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda or pip packages.

    Raises:
        ToolchainError: there is none, or only of another major version.
    """
    wanted = torch.version.cuda
    if wanted is None:
        raise ToolchainError(
            f"this torch ({torch.__version__}) is built without CUDA\n"
            "install one that is: https://pytorch.org/get-started/locally prints the command"
        )
    others, looked = [], []
    for origin, path in _nvcc_candidates(wanted.split(".")[0]):
        looked.append(f"{origin} ({path or 'none'})")
        if path is None or not os.access(path, os.X_OK):
            continue
        facts = _ask_once(memory, path, lambda path=path: _ask_nvcc(path), {"version", "release", "root", "archs"})
        if facts is None:
            others.append(f"{path} does not run")
        elif facts["release"].split(".")[0] != wanted.split(".")[0]:
            others.append(f"{path} is of CUDA {facts['release']}")
        elif misfits := _misfits(facts):
            others.append(f"{path} is of CUDA {facts['release']}, but beside it pip installed {' and '.join(misfits)}")
        else:
            host = _program(os.environ.get("CC", ""))  # torch passes it to nvcc
            version = facts["version"] + (f"; {_version(memory, host)}" if host else "")
            return Nvcc(path, version, facts["release"], facts["root"], tuple(facts["archs"]), origin)
    what = f"no nvcc of CUDA {wanted.split('.')[0]}, which this torch ({torch.__version__}) is built with"
    found = f"found: {'; '.join(others)}\n" if others else ""
    raise ToolchainError(f"{what}\n{found}looked in {', '.join(looked)}\ninstall it: {nvcc_command()}")


def nvcc_command() -> str:
    """The command that installs an nvcc of this torch's CUDA version."""
    release = torch.version.cuda or "13.0"
    if int(release.split(".")[0]) >= 13:  # older pip packages have no nvcc
        return _pip_install(*(f'"{part}=={release}.*"' for part in ("nvidia-cuda-nvcc", *_PARTS, "nvidia-cuda-cccl")))
    return f"conda install -c nvidia cuda-nvcc={release} cuda-cudart-dev={release}"


def find_cudart(nvcc: Nvcc) -> Path:
    """The CUDA runtime to link with: ``libcudart.so``, or ``libcudart.so.<major>`` from pip packages.

    Raises:
        ToolchainError: there is none.
    """
    root, major = Path(nvcc.root), nvcc.release.split(".")[0]
    folders = [root / "lib64", root / "lib", *root.glob("targets/*/lib"), *_pip_folders(f"cu{major}/lib")]
    folders += [*_pip_folders("cuda_runtime/lib"), Path(torch.__file__).parent / "lib"]
    for name in ("libcudart.so", f"libcudart.so.{major}"):
        for folder in folders:
            if (folder / name).exists():
                return folder / name
    looked = ", ".join(map(str, folders))
    raise ToolchainError(f"no libcudart.so, which CUDA kernels link with\nlooked in: {looked}\ninstall it: {nvcc_command()}")


_PARTS = ("nvidia-nvvm", "nvidia-cuda-crt")  # must match nvcc's version, which pip does not enforce


def _misfits(facts: dict) -> list[str]:
    """The pip packages next to an nvcc whose versions do not match it, as ``nvidia-nvvm 13.5.37``."""
    packages, misfits = Path(facts["root"]).parent.parent, []
    for part in _PARTS:
        for record in packages.glob(f"{part.replace('-', '_')}-*.dist-info"):
            version = record.name.removesuffix(".dist-info").rpartition("-")[2]
            if not version.startswith(facts["release"] + "."):
                misfits.append(f"{part} {version}")
    return misfits


_nvcc_default = "/usr/local/cuda/bin/nvcc"


def _nvcc_candidates(major: str) -> Iterator[tuple[str, str | None]]:
    """Candidates for nvcc in order of preference: the name of the place, and the path or None."""
    if os.environ.get("PYTORCH_NVCC"):  # torch runs it instead of that in CUDA_HOME
        yield "PYTORCH_NVCC", _program(os.environ["PYTORCH_NVCC"])
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        yield variable, os.path.abspath(os.path.join(home, "bin", "nvcc")) if home else None
    yield "PATH", _program("nvcc")
    yield "/usr/local/cuda", _nvcc_default if os.path.exists(_nvcc_default) else None
    installed = [str(folder / "nvcc") for folder in _pip_folders(f"cu{major}/bin") if (folder / "nvcc").exists()]
    yield "pip packages", installed[0] if installed else None


def _pip_folders(relative: str) -> list[Path]:
    """Folders ``relative`` in NVIDIA's pip packages, next to torch or where Python finds them."""
    spec = importlib.util.find_spec("nvidia")
    bases = [*(spec.submodule_search_locations or [] if spec else []), str(Path(torch.__file__).parent.parent / "nvidia")]
    return [Path(base) / relative for base in dict.fromkeys(bases)]


def _words(command: str) -> list[str]:
    """The words of a command like CXX, without a compiler cache before the program, as torch adds one itself."""
    try:
        words = shlex.split(command)
    except ValueError:  # a quote that is not closed
        return []
    return [word for word in words if os.path.basename(word) not in ("ccache", "sccache")]


def _program(command: str) -> str | None:
    """The absolute path of a command's program, as torch runs it in another folder; None if there is none."""
    words = _words(command)
    path = shutil.which(words[0]) if words else None
    return path and os.path.abspath(path)


def _version(memory: Memory, path: str) -> str | None:
    """The version line of a C++ compiler; None if it does not run or is not one."""
    facts = _ask_once(memory, path, lambda: _ask_cxx(path), {"version"})
    return facts and facts["version"]


_VECTORS = DEVICE / "math_libmvec.h"
_A_VECTOR = "_ZGVbN2v_tan"  # of two doubles, on any x86-64


def _has_libmvec(memory: Memory, path: str, flags: Sequence[str]) -> bool:
    """Whether the compiler makes calls of libmvec's vectors of the functions in math_libmvec.h, cached as the compiler's facts.

    This process must have the vectors, too: a compiler may link with another C library.
    """
    if not _is_symbol("libmvec.so.1", _A_VECTOR):
        return False
    file = f"{os.confstr('CS_GNU_LIBC_VERSION')} {hashlib.sha256(_VECTORS.read_bytes()).hexdigest()}"
    key = f"libmvec {shlex.join(flags)} {file} {_identity(path)}"
    found = memory.get(key)
    if not isinstance(found, bool):
        found = _calls_vectors(path, flags)
        memory.put(key, found)
    return found


def _is_symbol(library: str, name: str) -> bool:
    try:
        return hasattr(ctypes.CDLL(library), name)
    except OSError:
        return False


def _calls_vectors(path: str, flags: Sequence[str]) -> bool:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        made = Path(folder) / "probe.so"
        vectors = ["-O2", "-ftree-vectorize", "-fno-math-errno", "-DJITACT_PROBE"]
        linked = ["-shared", "-fPIC", "-Wl,-z,defs", "-o", str(made)]
        _answers(path, [*flags, *vectors, *linked, "-x", "c++", str(_VECTORS)])
        return made.is_file() and _A_VECTOR.encode() in made.read_bytes()


def _ask_once(memory: Memory, path: str, ask: Callable[[], dict | None], wanted: set[str]) -> dict | None:
    """The facts that ``ask`` finds about the tool at ``path``, cached while the file is the same; None if it is unusable."""
    key = _identity(path)
    facts = memory.get(key)
    if not isinstance(facts, dict) or not wanted <= facts.keys():
        facts = ask()
        if facts is not None:
            memory.put(key, facts)
    return facts


def _identity(path: str) -> str:
    """A cache key that changes with the tool; for a script also with the programs that it names."""
    real = os.path.realpath(path)
    if os.path.basename(real) in ("ccache", "sccache"):  # such a link runs the next compiler of its name on the PATH
        folders = [f for f in os.environ.get("PATH", "").split(os.pathsep) if f != os.path.dirname(path)]
        real = shutil.which(os.path.basename(path), path=os.pathsep.join(folders)) or real
    files = [path, real]
    with suppress(OSError), open(real, "rb") as file:  # it may be executable and not readable
        if file.read(2) == b"#!":
            files += re.findall(r"/[\w./+-]+", file.read(4096).decode(errors="replace"))
    stats = [f"{f} {s.st_size} {s.st_mtime_ns}" for f in dict.fromkeys(files) if os.path.isfile(f) for s in [os.stat(f)]]
    return f"tool {'; '.join(stats)}"


def _ask_cxx(path: str) -> dict | None:
    said, preprocessed = _answers(path, ["--version"], ["-E", "-x", "c++", os.devnull])
    version = said.partition("\n")[0]
    return {"version": version} if version and preprocessed else None


def _ask_nvcc(path: str) -> dict | None:
    said, dry_run, codes = _answers(path, ["--version"], ["--dryrun", "-x", "cu", os.devnull], ["--list-gpu-code"])
    lines = said.strip().splitlines()
    release = re.search(r"release (\d+\.\d+)", "\n".join(lines))
    if not release:
        return None
    top = re.search(r"^#\$ TOP=(.*)$", dry_run, re.MULTILINE)
    root = os.path.realpath(top[1].strip() if top else os.path.join(os.path.dirname(path), os.pardir))
    return {"version": lines[-1], "release": release[1], "root": root, "archs": re.findall(r"sm_(\w+)", codes)}


def _answers(path: str, *questions: list[str]) -> list[str]:
    """The output of a program for each list of arguments, run in parallel; empty where it fails or cannot be run."""
    import subprocess  # imported here, as a cache hit starts no process

    try:
        running = [subprocess.Popen([path, *q], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for q in questions]
    except (OSError, subprocess.SubprocessError):
        return [""] * len(questions)
    answers = []
    for process in running:
        try:
            printed, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        answers.append(printed.decode(errors="replace") if process.returncode == 0 else "")
    return answers


def _pip_install(*packages: str) -> str:
    """The command that installs packages for this Python."""
    return f"{sys.executable} -m pip install {' '.join(packages)}"


def _install(apt: str, dnf: str, conda: str) -> str:
    """The command that installs a system package with the package manager of this system."""
    commands = {
        "apt-get": f"apt-get install -y {apt}",
        "dnf": f"dnf install -y {dnf}",
        "yum": f"yum install -y {dnf}",
        "zypper": f"zypper install -y {dnf}",
        "apk": f"apk add {apt}",
        "pacman": "pacman -S gcc",
        "conda": f"conda install -c conda-forge {conda}",
    }
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/bin", "/bin", "/sbin"])
    return next((command for manager, command in commands.items() if shutil.which(manager, path=path)), commands["conda"])
