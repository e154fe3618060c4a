"""Exports softmax and its relatives: the library's loops over rows, and PyTorch's operators for unsupported calls."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..kernels.loader.source import DEVICE, KernelSource
from ..rows.kernels import (
    ACROSS_IN_A_BLOCK,
    ALIGNED,
    CLUSTERS,
    LONGEST_ACROSS,
    MOST_ACROSS,
    NARROW,
    VECTORS_OF_A_BLOCK,
    WORD,
)
from ..rows.modules import RowModule
from .build import DEVICES, DTYPES
from .conditions import Facts
from .extract import Extract, extract
from .text import assembled, inputs, wrapped
from .wrapper import called, enumerators, structs

__all__ = ["DTYPES_OF_ROWS", "kind_of", "rows_file"]

DTYPES_OF_ROWS = ("fp32", "fp16", "bf16")


class _Kind(NamedTuple):
    """An activation of rows.

    Attributes:
        name: in Python.
        kernel: the name of its kernel file.
        scale: the factor of x.
        formula: for the file's docstring.
    """

    name: str
    kernel: str
    scale: float
    formula: str


_KINDS = {
    "Softmax": _Kind("softmax", "softmax", 1.0, "softmax(x)_i = exp(x_i) / sum_j exp(x_j)"),
    "LogSoftmax": _Kind("log_softmax", "log_softmax", 1.0, "log_softmax(x)_i = x_i - log(sum_j exp(x_j))"),
    "Softmin": _Kind("softmin", "softmax", -1.0, "softmin(x)_i = exp(-x_i) / sum_j exp(-x_j)"),
}


def kind_of(cls: type[RowModule]) -> _Kind:
    """The activation of a class.

    Raises:
        ValueError: the class cannot be exported.
    """
    if cls.__name__ not in _KINDS:
        known = ", ".join(kind.name for kind in _KINDS.values())
        raise ValueError(f"{cls.__name__} cannot be exported: of rows, {known} can, along any dimension")
    return _KINDS[cls.__name__]


def rows_file(
    cls: type[RowModule], dim: int, dtypes: tuple[str, ...], devices: tuple[str, ...], shape: tuple[int, int], backward: bool
) -> str:
    """The text of a file.

    Args:
        cls: the library's class.
        dim: the dimension that ``get_init_inputs`` returns.
        dtypes: of :data:`DTYPES_OF_ROWS`.
        devices: of :data:`~jitact.exporting.build.DEVICES`.
        shape: ``batch_size`` and ``dim`` of the tensors that ``get_inputs`` makes.
        backward: whether the file has a backward.

    Raises:
        ValueError: the class cannot be exported.
    """
    kind, title = kind_of(cls), cls.__name__
    operations = ("forward", "backward_from_output") if backward else ("forward",)
    cut = _extract(kind, operations, dtypes, devices)
    where = f"{kind.name}.py: {kind.name}"
    python = [enumerators(cut, operations, dtypes), *structs(cut, {}), _takes(devices), _run(kind, cut, devices, where)]
    if backward:
        python.append(_function(title, devices, where))
    python += [_modules(kind, title, backward), inputs(dtypes, shape, 1, str(dim))]
    scope = "Forward and backward" if backward else "Forward"
    more = "What they do not take, as takes() tells, is torch's own operator's."
    return assembled(kind.name, kind.formula, scope, cut.text, dtypes, devices, python, more)


def _extract(kind: _Kind, operations: tuple[str, ...], dtypes: tuple[str, ...], devices: tuple[str, ...]) -> Extract:
    """The C++ and CUDA of the file."""
    known = frozenset(f"Op::{each}" for each in operations)
    stored = frozenset(f"Dtype::{DTYPES[each][1]}" for each in dtypes)
    facts: Facts = {name: known for name in ("Op", "op", "call.op")}
    facts |= {name: stored for name in ("Dtype", "dtype", "call.dtype")}
    sizes = frozenset(DTYPES[each][2] for each in dtypes)
    facts |= {name: frozenset([0]) for name in ("kOperands", "kRowValues")}
    facts |= {"kVanishing": frozenset([True]), "kPlaced": frozenset([False])}
    facts |= {"sizeof(S)": sizes, "std::is_same_v<S,double>": frozenset([False]), "std::is_same_v<V,float>": frozenset([True])}
    # Non-temporal stores, whose instructions the exporting machine may have but another not.
    facts |= {name: frozenset([False]) for name in ("kStreams", "loops::kStreams", "past_cache", "past_cache_")}
    roots = [f"run_{device}" for device in devices]
    roots += ["workspace_bytes"] if "cuda" in devices else []
    return extract(KernelSource.from_file(kind.kernel), facts, roots, sorted(stored), devices)


def _takes(devices: tuple[str, ...]) -> str:
    """The function that tells which calls the kernels support."""
    vectors = int(re.search(r"kMostVectors = (\d+);", (DEVICE / "rows_call.h").read_text())[1])
    on_gpu = [
        "tensors = 2 if x.requires_grad and torch.is_grad_enabled() else 1  # that are read: backward reads dy too",
        f"clusters = torch.cuda.get_device_capability(x.device)[0] in {CLUSTERS}  # of blocks",
        f"across = clusters or x.shape[dim] * tensors <= {ACROSS_IN_A_BLOCK}",
        f"words = x.numel() // x.shape[dim] // columns * -(-columns * x.itemsize // {WORD})",
        f"most = words < {MOST_ACROSS} and x.shape[dim] < {LONGEST_ACROSS}  # or indices are beyond 32 bits",
        f"row = x.shape[dim] * x.itemsize + ({2 * ALIGNED} if x.shape[dim] * x.itemsize % {ALIGNED} else 0)  # bytes, at most",
        f"along = row <= ({ALIGNED * vectors} // tensors if clusters else {ALIGNED * VECTORS_OF_A_BLOCK})",
        f"return x.data_ptr() % {ALIGNED} == 0 and (along if columns == 1 else across and most)",
    ]
    on_cpu = f"return columns == 1 or columns >= {NARROW}"
    device = "x.device.type not in " + str(DEVICES) if devices == DEVICES else f'x.device.type != "{devices[0]}"'
    by_device = [*(f"    {line}" for line in on_gpu)] if devices == ("cuda",) else [f"    {on_cpu}"]
    if devices == DEVICES:
        by_device = ["    if x.is_cuda:", *(f"        {line}" for line in on_gpu), f"    {on_cpu}"]
    return "\n".join([
        "def takes(x, dim):",
        '    """Whether what is compiled computes x along dim."""',
        f"    if type(x) not in (torch.Tensor, nn.Parameter) or x.dtype not in DTYPES or {device}:".replace("'", '"'),
        "        return False",
        "    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):",
        "        return False",
        "    if torch._C._len_torch_dispatch_stack() or x._is_zerotensor():  # modes see PyTorch's operations",
        "        return False",
        "    if not x.is_contiguous() or x.is_neg() or x.numel() == 0 or not -x.dim() <= dim < x.dim():",
        "        return False",
        "    columns = x.shape[dim:][1:].numel()  # side by side, along which rows lie across each other",
        *by_device,
    ])  # fmt: skip


def _run(kind: _Kind, cut: Extract, devices: tuple[str, ...], where: str) -> str:
    """The function that calls the kernels."""
    given = {
        "op": "OPERATIONS[operation]",
        "dtype": "DTYPES[x.dtype]",
        "outer": "x.shape[:dim].numel()",
        "length": "x.shape[dim]",
        "inner": "x.shape[dim:][1:].numel()",
        "scale": str(kind.scale),
        "read": "tuple(tensor.data_ptr() for tensor in read)",
        "written": "written.data_ptr()",
    }
    members = [member for _, member, _ in cut.structs["Call"]]
    return "\n".join([
        "def run(operation, read, written, dim):",
        '    """Runs an operation on the rows of contiguous tensors, on their device and its current stream."""',
        "    x = read[0]",
        "    if not all(tensor.data_ptr() for tensor in read):",
        f'        raise RuntimeError("{where}: a tensor has elements, but its data is not allocated")',
        wrapped("    call = Call(", [f"{member}={given[member]}" for member in members if member in given], ")"),
        *called(devices, where, "call.inner > 1"),
    ])  # fmt: skip


def _function(title: str, devices: tuple[str, ...], where: str) -> str:
    """The autograd function."""
    aligned = f"dy.contiguous() if dy.data_ptr() % {ALIGNED} == 0 else dy.clone(memory_format=torch.contiguous_format)"
    return f'''\
class {title}(torch.autograd.Function):  # keeps the output for backward
    @staticmethod
    def forward(ctx, x, dim):
        y = torch.empty_like(x)
        run("forward", [x], y, dim)
        ctx.save_for_backward(y)
        ctx.dim = dim
        return y

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise RuntimeError("{where}: no second derivative")
        (y,) = ctx.saved_tensors
        dy = dy.resolve_neg() if dy.data_ptr() else torch.empty_like(y).copy_(dy)  # zeros may be without memory
        dy = {aligned if "cuda" in devices else "dy.contiguous()"}
        dx = torch.empty_like(y)
        run("backward_from_output", [dy, y], dx, ctx.dim)
        return dx, None
'''


def _modules(kind: _Kind, title: str, backward: bool) -> str:
    """``ModelNew`` and ``Model``."""
    made = "    def __init__(self, dim):\n        super().__init__()\n        self.dim = dim\n\n    def forward(self, x):\n"
    x = "-x" if kind.scale < 0 else "x"
    if backward:
        by_kernel = f"            return {title}.apply(x, self.dim)\n"
    else:
        by_kernel = '            y = torch.empty_like(x)\n            run("forward", [x], y, self.dim)\n            return y\n'
        x += ".detach()"
    return (
        f"class ModelNew(nn.Module):  # as compiled above\n{made}        if takes(x, self.dim):\n{by_kernel}"
        f"        return torch.{kind.kernel}({x}, self.dim)\n\n"
        f"class Model(nn.Module):  # as PyTorch has it\n{made}        return F.{kind.name}(x, self.dim)\n"
    )
