"""Loads built libraries into this process and registers their operators with PyTorch's dispatcher."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import build, cache, log
from .cache import Entry
from .errors import BuildError
from .lock import ThreadLock
from .plan import Plan, make_plan
from .signature import Signature
from .source import KernelSource, RowPart, RowTypes, state_of

__all__ = ["Library", "load", "load_part", "schema"]


class Library(NamedTuple):
    """A loaded build. Its operators are ``torch.ops.jitact.<name>_<kind>``.

    Kinds are ``forward``, ``forward_`` and ``backward``, and if the kernel file has functions for them, ``backward_packed``,
    ``backward_from_output``, ``forward_bit``, ``forward_bit_``, ``backward_from_bit`` and ``copy_``; of a file of rows,
    ``forward``, ``backward`` and ``backward_from_output``. ``binding.cpp`` and ``rows_binding.h`` document their arguments.

    Attributes:
        name: the prefix of the operators' names.
        path: the library's file.
        cuda_problem: why the operators raise BuildError for CUDA tensors; None if they accept them.
    """

    name: str
    path: Path
    cuda_problem: str | None

    @property
    def has_cuda(self) -> bool:
        """Whether the operators take CUDA tensors."""
        return self.cuda_problem is None


_lock = ThreadLock()
_copies = itertools.count()
_by_state: dict[tuple, Library] = {}  # by source, options and state of the headers, for repeated calls
_by_library: dict[tuple[str, str], Library] = {}  # by the plan's name and the library's checksum


def load(source: KernelSource, *, fast_math: bool = False) -> Library:
    """Loads the operators of ``source``, and compiles them if no suitable build is cached.

    A repeated call returns the same library, or a new one under a new name if a header has changed.

    Args:
        source: the kernel file.
        fast_math: whether to build with ``-use_fast_math``, which is cached separately.

    Raises:
        BuildError: it cannot be compiled or loaded; the message says why and what to do.
    """
    headers = {path: state_of(path) for path in source.headers().values()}
    state = (source, fast_math, *headers.items())
    library = _by_state.get(state)
    if library is None:
        with _lock:
            library = _by_state.get(state) or _load(source, fast_math)
            _by_state[state] = library
    return library


def load_part(source: KernelSource, part: RowPart) -> Library:
    """Loads operators for a part of a file of rows.

    They are of a build of the whole file if one is cached, else of a build of the part, which takes a fraction of the time.

    Raises:
        BuildError: as :func:`load`.
    """
    return load(build.first_choice(make_plan(source), make_plan(source._replace(rows=part))).source)


def _load(source: KernelSource, fast_math: bool) -> Library:
    log.configure()
    plan = make_plan(source, fast_math=fast_math)
    entry, made = build.obtain(plan)
    log.logger.debug("%s: %s", plan.name, entry.folder)
    known = _by_library.get((plan.name, entry.build.sha256))
    if known is not None:
        return known
    try:
        register = _open(entry)
    except (OSError, AttributeError) as error:
        if made:
            raise _unloadable(plan, entry, error) from None
        log.logger.warning("%s in %s cannot be loaded (%s); compiling it again", plan.name, entry.folder, error)
        entry, _ = build.obtain(plan, rejected=entry.build.sha256)
        try:
            register = _open(entry)
        except (OSError, AttributeError) as error:
            raise _unloadable(plan, entry, error) from None
    cache.mark_used(entry)
    library = _register(plan, entry, register)
    _by_library[plan.name, entry.build.sha256] = library
    return library


def _unloadable(plan: Plan, entry: Entry, error: Exception) -> BuildError:
    return BuildError(f"the library made for {plan.name} cannot be loaded: {error}\nit is {entry.library}")


def _open(entry: Entry) -> Callable[[bytes, bytes, bytes, bytes], bytes | None]:
    """Loads the library, and returns its entry point, which registers the operators and returns an error message or None.

    The library is loaded from a copy in memory of the bytes whose checksum was verified, so that no later change of the file,
    by a crash, a full disk or another host of a network file system, affects the running process.

    Raises:
        OSError, AttributeError: it cannot be loaded here, or has no such entry point.
    """
    try:
        handle = _open_copy(entry)
    except (OSError, AttributeError):  # no memfd here, or not executable
        handle = ctypes.CDLL(str(entry.library))
    handle.jitact_register.restype = ctypes.c_char_p
    return handle.jitact_register


def _open_copy(entry: Entry) -> ctypes.CDLL:
    copy = os.memfd_create(entry.build.library, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(copy, "wb", closefd=False) as file:
            file.write(entry.content)
        # Sealed: a forked child inherits the descriptor, and even one that drops its privileges could write to our code.
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        # The loader takes a path that it knows for the library that it had. The descriptor stays open, but a program may close
        # all that there are, as daemons do, so that its number is given out again: each path is spelled in another way, by the
        # slashes for the binary digits of a count.
        spelled = format(next(_copies), "b").replace("0", "./").replace("1", ".//")
        return ctypes.CDLL(f"/proc/self/fd/{spelled}{copy}")
    except BaseException:
        os.close(copy)
        raise


def _register(plan: Plan, entry: Entry, register: Callable[[bytes, bytes, bytes, bytes], bytes | None]) -> Library:
    """Registers the operators of a build under a name that is not yet used in this process.

    Raises:
        BuildError: PyTorch refuses them.
    """
    # Names of custom activations get a hash of the sources, as another process may define another one of that name.
    own = plan.source.is_librarys or plan.source.label
    name = _free_name(plan.name if own else f"{plan.name}_{plan.sources[:8]}")
    problem = register(*(each.encode() for each in (plan.source.name, name, *schema(plan.source.signature))))
    if problem:
        raise BuildError(f"the operators of {plan.name} cannot be registered: {problem.decode(errors='replace')}")
    library = Library(name, entry.library, None if plan.runs_cuda(entry.build) else _cuda_problem(plan, entry))
    signature = plan.source.signature
    fakes = _fakes_of_rows(signature, plan.source.rows) if signature.folds else _fakes(signature)
    for kind, fake in fakes.items():
        _definitions().impl(f"{name}_{kind}", fake, "Meta")
        if not library.has_cuda:
            _definitions().impl(f"{name}_{kind}", _refuse(library), "CUDA", allow_override=bool(entry.build.archs))
    return library


def _free_name(base: str) -> str:
    name, version = base, 1
    while any(hasattr(torch.ops.jitact, f"{name}_{kind}") for kind in ("forward", "backward")):
        version += 1
        name = f"{base}_v{version}"
    return name


def _cuda_problem(plan: Plan, entry: Entry) -> str:
    if plan.missing_cuda:
        why = plan.missing_cuda
    elif torch.version.cuda is None:
        why = f"this torch ({torch.__version__}) is built without CUDA"
    elif entry.build.archs:
        gpus = ", ".join(map(str, plan.gpus))
        why = f"the build in {entry.folder} is for {', '.join(entry.build.archs)}, the GPU is of compute capability {gpus}"
    else:
        why = "no GPU was in sight when it was loaded; name its compute capability, as in JITACT_ARCHS=9.0, and start again"
    return f"{plan.name} has no CUDA kernels here: {why}\nCPU tensors work"


def _refuse(library: Library) -> Callable:
    def refuse(*_: object) -> None:
        raise BuildError(library.cuda_problem)

    return refuse


_library: torch.library.Library | None = None


def _definitions() -> torch.library.Library:
    """The owner of registrations made in Python, which last as long as the process."""
    global _library
    if _library is None:
        _library = torch.library.Library("jitact", "FRAGMENT")
    return _library


def _fake_mask(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)


def schema(signature: Signature) -> tuple[str, str]:
    """The element and the other arguments of the operators' schemas. A trailing underscore avoids clashes with fixed names."""
    elements = ", ".join(f"Tensor {name}_" for name in signature.of("element"))
    others = [f"Tensor {name}_" for name in signature.of("channel", "row")]
    others += ["Tensor seed"] if signature.of("random") else []
    others += [f"float {name}_" for name in signature.of("number")]
    return elements, "".join(f", {other}" for other in others)


def _fakes(signature: Signature) -> dict[str, Callable]:
    """Implementations for meta and fake tensors, which torch.compile uses, by kind of operator."""
    fakes: dict[str, Callable] = {
        "forward": lambda x, *others: torch.empty_like(x),
        "forward_": lambda x, *others: None,
        "backward": lambda dy, x, *others: torch.empty_like(x),
    }
    if signature.gradients > 1:
        fakes["backward"] = _fake_gradients(signature)
    if signature.packs:
        fakes["backward_packed"] = _fake_packed(signature)
    if "output" in signature.saves:
        fakes["backward_from_output"] = lambda dy, y, *others: torch.empty_like(y)
    if "bit" in signature.saves:
        fakes["forward_bit"] = lambda x, *others: (torch.empty_like(x), _fake_mask(x))
        fakes["forward_bit_"] = lambda x, *others: _fake_mask(x)
        fakes["backward_from_bit"] = lambda dy, mask, *others: torch.empty_like(dy)
        fakes["copy_"] = lambda to, other: None
    if signature.bit_gradients > 1:
        fakes["backward_from_bit"] = _fake_gradients(signature, from_bit=True)
    return fakes


def _fakes_of_rows(signature: Signature, rows: RowTypes | RowPart | None) -> dict[str, Callable]:
    """The same for a file of rows."""
    read, written = (getattr(torch, name) for name in rows[:2]) if isinstance(rows, RowTypes) else (None, None)

    def forward(x: torch.Tensor, *others: object) -> torch.Tensor:
        return torch.empty_like(x, dtype=written)

    backward = _fake_gradient_of_rows(signature, read)
    fakes = {"forward": forward, "backward": backward, "backward_from_output": backward}
    return {kind: fakes[kind] for kind in (rows.kinds if rows else fakes)}


def _fake_gradient_of_rows(signature: Signature, dtype: torch.dtype | None) -> Callable:
    """For backward of rows, which returns the gradient, and those of row operands in one tensor."""
    operands = len(signature.of("row"))

    def fake(dy: torch.Tensor, kept: torch.Tensor, *others: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        dx, dim = torch.empty_like(kept, dtype=dtype), others[-2]
        if not operands:
            return dx
        return dx, kept.new_empty(operands, kept.select(dim, 0).numel(), dtype=torch.float32)

    return fake


def _fake_sum(operand: torch.Tensor) -> torch.Tensor:
    return operand.new_empty(operand.shape)


def _fake_gradients(signature: Signature, *, from_bit: bool = False) -> Callable:
    """For ``backward`` or ``backward_from_bit`` with several gradients; the latter takes the mask in place of the elements."""
    elements, operands = len(signature.of("element")), signature.differentiable
    if from_bit:
        elements, operands = 1, operands[: signature.bit_gradients]
    of_others = signature.of("channel", "row")

    def fake(dy: torch.Tensor, *rest: object) -> tuple[torch.Tensor, ...]:
        x, others, wanted = dy if from_bit else rest[0], rest[elements:], rest[-1]
        gradients = []
        for g, operand in enumerate(operands):
            if not wanted >> g & 1:
                gradients.append(x.new_empty(0))
            else:
                is_element = operand.role == "element"
                gradients.append(torch.empty_like(x) if is_element else _fake_sum(others[of_others.index(operand.name)]))
        return tuple(gradients)

    return fake


def _fake_packed(signature: Signature) -> Callable:
    places = [signature.tensors.index(operand.name) for operand in signature.differentiable if operand.role != "element"]

    def fake(dy: torch.Tensor, x: torch.Tensor, *rest: object) -> torch.Tensor | tuple[torch.Tensor, ...]:
        tensors, dim = (x, *rest), rest[-1]
        sizes = list(x.shape)
        sizes[dim] *= 2
        # empty_like keeps the order of these strides, and closes their gaps.
        whole = torch.empty_like(x.new_empty_strided(sizes, [2 * stride for stride in x.stride()]))
        sums = [_fake_sum(tensors[place]) if rest[-3] >> k & 1 else x.new_empty(0) for k, place in enumerate(places)]
        return (whole, *sums) if sums else whole

    return fake
