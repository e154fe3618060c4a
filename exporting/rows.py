"""Exports softmax, its relatives and definitions of rows: the loops over rows, and PyTorch for unsupported calls."""

from __future__ import annotations

from typing import NamedTuple

from ..kernels.loader.source import KernelSource
from ..rows.definition import RowDefinition
from ..rows.kernels import (
    ACROSS_IN_A_BLOCK,
    ALIGNED,
    CLUSTERS,
    LONGEST_ACROSS,
    MOST_ACROSS,
    NARROW,
    VECTORS,
    VECTORS_OF_A_BLOCK,
    WORD,
)
from ..rows.modules import RowModule, class_of_rows, record_of_rows
from .build import DEVICES, DTYPES
from .conditions import Facts
from .extract import Extract, extract
from .reference import written
from .text import assembled, class_title, default, inputs, wrapped
from .wrapper import called, enumerators, structs

__all__ = ["DTYPES_OF_ROWS", "RowsToExport", "rows_file", "to_export"]

DTYPES_OF_ROWS = ("fp32", "fp16", "bf16")


class RowsToExport(NamedTuple):
    """An activation of rows, as a file has it.

    Attributes:
        name: in Python.
        title: of its class.
        source: its kernel file.
        formula: for the file's docstring.
        model: the Python that computes it, of ``x`` and ``self``.
        otherwise: the same where the kernels do not.
        scale: the factor of x.
        save: what backward keeps: "output" or "input".
        rows: the names of operands with a value for each row.
        params: its numbers.
        helpers: the text of functions that ``model`` calls.
        is_defined: whether it is a user's definition.
    """

    name: str
    title: str
    source: KernelSource
    formula: str
    model: str
    otherwise: str
    scale: float = 1.0
    save: str = "output"
    rows: tuple[str, ...] = ()
    params: tuple[tuple[str, float], ...] = ()
    helpers: tuple[str, ...] = ()
    is_defined: bool = False

    @property
    def has_operands(self) -> bool:
        """Whether it takes anything but x."""
        return bool(self.rows or self.params)

    @property
    def tensors(self) -> str:
        """The arguments of the module."""
        return ", ".join(["x", *self.rows])

    @property
    def numbers(self) -> str:
        """The module's numbers, as a tuple."""
        return "(" + "".join(f"self.{name}, " for name, _ in self.params).strip() + ")"


_SHARE = "softmax(x)_i = exp(x_i) / sum_j exp(x_j)"
_LOGARITHM = "log_softmax(x)_i = x_i - log(sum_j exp(x_j))"
_OF_NEGATIVES = "softmin(x)_i = exp(-x_i) / sum_j exp(-x_j)"
_KINDS = {  # of each class: its name, kernel file, factor of x, and formula
    "Softmax": ("softmax", "softmax", 1.0, _SHARE),
    "LogSoftmax": ("log_softmax", "log_softmax", 1.0, _LOGARITHM),
    "Softmin": ("softmin", "softmax", -1.0, _OF_NEGATIVES),
}


def to_export(activation: object) -> RowsToExport | None:
    """What a file has of an activation of rows; None if it is not of rows.

    Raises:
        ValueError: it cannot be exported.
    """
    cls, record = class_of_rows(activation), record_of_rows(activation)
    if cls is None:
        return None
    if isinstance(record, RowDefinition):
        return _definition(record, getattr(activation, "save", None) if isinstance(activation, RowModule) else None)
    if cls.__name__ not in _KINDS:
        known = ", ".join(name for name, *_ in _KINDS.values())
        raise ValueError(f"{cls.__name__} cannot be exported: of rows, {known} and definitions can, along any dimension")
    name, kernel, scale, formula = _KINDS[cls.__name__]
    otherwise = f"torch.{kernel}({'-x' if scale < 0 else 'x'}, self.dim)"
    return RowsToExport(name, cls.__name__, KernelSource.from_file(kernel), formula, f"F.{name}(x, self.dim)", otherwise, scale)


def _definition(record: RowDefinition, save: str | None) -> RowsToExport:
    """The same of a user's definition, with what backward keeps if that was chosen."""
    helpers: dict[str, str] = {}
    arguments = ["x", *record.rows, "self.dim", *(f"self.{name}" for name, _ in record.params)]
    model = written(record.name, record.reference, arguments, helpers)
    title = class_title(record.title, record.name, ("Call", "Operands", "OperatedCall"))
    return RowsToExport(
        name=record.name,
        title=title,
        source=record.source,
        formula=f"{record.name}(x)_i = {record.formula}",
        model=model,
        otherwise=f"({model}).to(x.dtype)",
        save=save or record.saves[0],
        rows=record.rows,
        params=record.params,
        helpers=tuple(helpers.values()),
        is_defined=True,
    )


def rows_file(
    exported: RowsToExport,
    dim: int,
    dtypes: tuple[str, ...],
    devices: tuple[str, ...],
    shape: tuple[int, int],
    backward: bool,
) -> str:
    """The text of a file.

    Args:
        exported: the activation.
        dim: the dimension that ``get_init_inputs`` returns.
        dtypes: of :data:`DTYPES_OF_ROWS`.
        devices: of :data:`~jitact.exporting.build.DEVICES`.
        shape: ``batch_size`` and ``dim`` of the tensors that ``get_inputs`` makes.
        backward: whether the file has a backward.
    """
    of_backward = "backward_from_output" if exported.save == "output" else "backward"
    operations = ("forward", of_backward) if backward else ("forward",)
    cut = _extract(exported, operations, dtypes, devices)
    where = f"{exported.name}.py: {exported.name}"
    counts = {"kNumbers": len(exported.params), "kRowValues": len(exported.rows)}
    if not exported.has_operands:
        cut.structs.pop("Operands", None)
    python = [enumerators(cut, operations, dtypes), *structs(cut, counts)]
    if exported.has_operands:
        python.append('class OperatedCall(Call):\n    _fields_ = [("operands", Operands)]')
    python += [_takes(exported, devices), _run(exported, cut, devices, where)]
    if exported.rows:
        python.append(_BY_ROW.replace("@WHERE@", where))
    if backward:
        python.append(_function(exported, of_backward, devices, where))
    python += [*exported.helpers, _modules(exported, backward), inputs(dtypes, shape, 1, str(dim), len(exported.rows))]
    scope = "Forward and backward" if backward else "Forward"
    other = "the same in PyTorch" if exported.is_defined else "torch's own operator's"
    more = f"What they do not take, as takes() tells, is {other}."
    return assembled(exported.name, exported.formula, scope, cut.text, dtypes, devices, python, more)


def _extract(exported: RowsToExport, operations: tuple[str, ...], dtypes: tuple[str, ...], devices: tuple[str, ...]) -> Extract:
    """The C++ and CUDA of the file."""
    known = frozenset(f"Op::{each}" for each in operations)
    stored = frozenset(f"Dtype::{DTYPES[each][1]}" for each in dtypes)
    facts: Facts = {name: known for name in ("Op", "op", "call.op")}
    facts |= {name: stored for name in ("Dtype", "dtype", "call.dtype")}
    sizes = frozenset(DTYPES[each][2] for each in dtypes)
    facts |= {"kRowValues": frozenset([len(exported.rows)]), "kOperands": frozenset([len(exported.rows + exported.params)])}
    if not exported.is_defined:
        facts |= {"kVanishing": frozenset([True]), "kPlaced": frozenset([False])}
    facts |= {"sizeof(S)": sizes, "std::is_same_v<S,double>": frozenset([False]), "std::is_same_v<V,float>": frozenset([True])}
    # Non-temporal stores, whose instructions the exporting machine may have but another not.
    facts |= {name: frozenset([False]) for name in ("kStreams", "loops::kStreams", "past_cache", "past_cache_")}
    roots = [f"run_{device}" for device in devices]
    roots += ["workspace_bytes"] if "cuda" in devices else []
    return extract(exported.source, facts, roots, sorted(stored), devices)


def _takes(exported: RowsToExport, devices: tuple[str, ...]) -> str:
    """The function that tells which calls the kernels support."""
    of_rows = bool(exported.rows)
    recorded = "any(each.requires_grad for each in (x, *rows))" if of_rows else "x.requires_grad"
    on_gpu = [
        f"recorded = torch.is_grad_enabled() and {recorded}",
        "tensors = 2 if recorded else 1  # that are read: backward reads dy too",
        f"clusters = torch.cuda.get_device_capability(x.device)[0] in {CLUSTERS}  # of blocks",
        f"across = clusters or x.shape[dim] * tensors <= {ACROSS_IN_A_BLOCK}",
        f"words = x.numel() // x.shape[dim] // columns * -(-columns * x.itemsize // {WORD})",
        f"most = words < {MOST_ACROSS} and x.shape[dim] < {LONGEST_ACROSS}  # or indices are beyond 32 bits",
        f"row = x.shape[dim] * x.itemsize + ({2 * ALIGNED} if x.shape[dim] * x.itemsize % {ALIGNED} else 0)  # bytes, at most",
        f"along = row <= ({ALIGNED * VECTORS} // tensors if clusters else {ALIGNED * VECTORS_OF_A_BLOCK})",
        f"return x.data_ptr() % {ALIGNED} == 0 and (along if columns == 1 else across and most)",
    ]
    on_cpu = f"return columns == 1 or columns >= {NARROW}"
    device = "x.device.type not in " + str(DEVICES) if devices == DEVICES else f'x.device.type != "{devices[0]}"'
    refused = [f"type(x) not in (torch.Tensor, nn.Parameter) or x.dtype not in DTYPES or {device}".replace("'", '"')]
    if of_rows:
        all_plain = "all(type(each) in (torch.Tensor, nn.Parameter) for each in (x, *rows))"
        refused = [f"not {all_plain}", f"x.dtype not in DTYPES or {device}".replace("'", '"')]
    by_device = [*(f"    {line}" for line in on_gpu)] if devices == ("cuda",) else [f"    {on_cpu}"]
    if devices == DEVICES:
        by_device = ["    if x.is_cuda:", *(f"        {line}" for line in on_gpu), f"    {on_cpu}"]
    return "\n".join([
        f"def takes(x, dim{', *rows' if of_rows else ''}):",
        f'    """Whether what is compiled computes x along dim{", beside values of its rows" if of_rows else ""}."""',
        *(f"    if {condition}:\n        return False" for condition in refused),
        "    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):",
        "        return False",
        "    if torch._C._len_torch_dispatch_stack() or x._is_zerotensor():  # modes see PyTorch's operations",
        "        return False",
        "    if not x.is_contiguous() or x.is_neg() or x.numel() == 0 or not -x.dim() <= dim < x.dim():",
        "        return False",
        "    columns = x.shape[dim:][1:].numel()  # side by side, along which rows lie across each other",
        *by_device,
    ])  # fmt: skip


_BY_ROW = '''\
def by_row(name, values, x, dim):
    """The values, of which there is one for each row of x along dim, with 1 in place of that dimension."""
    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        raise TypeError(f"@WHERE@: {name} must be a floating tensor, got {getattr(values, 'dtype', type(values))}")
    if values.device != x.device:
        raise ValueError(f"@WHERE@: {name} is on {values.device}, not {x.device}")
    at = dim % max(x.dim(), 1)
    before, after = x.shape[:at], x.shape[at + 1 :]
    if values.shape == before + after:
        return values.unsqueeze(at) if x.dim() else values
    fits = all(size in (1, other) for size, other in zip(values.shape[::-1], (*before, 1, *after)[::-1]))
    if values.dim() > x.dim() or not fits:
        given = f"{tuple(values.shape)} does not fit the rows of shape {tuple(x.shape)} along {dim}"
        raise ValueError(f"@WHERE@: {name} of shape {given}")
    return values

def for_kernels(values, x, dim):
    """The same in float32, with memory for each row."""
    return values.float().expand(x.narrow(dim, 0, 1).shape).resolve_neg().contiguous()
'''


def _run(exported: RowsToExport, cut: Extract, devices: tuple[str, ...], where: str) -> str:
    """The function that calls the kernels."""
    given = {
        "op": "OPERATIONS[operation]",
        "dtype": "DTYPES[x.dtype]",
        "outer": "x.shape[:dim].numel()",
        "length": "x.shape[dim]",
        "inner": "x.shape[dim:][1:].numel()",
        "scale": str(exported.scale),
        "read": "tuple(tensor.data_ptr() for tensor in read)",
        "written": "written.data_ptr()",
    }
    members = [member for _, member, _ in cut.structs["Call"]]
    fields = [f"{member}={given[member]}" for member in members if member in given]
    operands, checked, taken = [], "read", ""
    if exported.params:
        taken += ", numbers"
        operands += ["    for place, number in enumerate(numbers):", "        call.operands.numbers[place] = number"]
    if exported.rows:
        taken += ", rows, gradients=None"
        checked = "(*read, *rows)"
        operands += ["    for place, values in enumerate(rows):", "        call.operands.of_rows[place] = values.data_ptr()"]
        operands += ["    call.operands.gradients = None if gradients is None else gradients.data_ptr()"]
    return "\n".join([
        f"def run(operation, read, written, dim{taken}):",
        '    """Runs an operation on the rows of contiguous tensors, on their device and its current stream."""',
        "    x = read[0]",
        f"    if not all(tensor.data_ptr() for tensor in {checked}):",
        f'        raise RuntimeError("{where}: a tensor has elements, but its data is not allocated")',
        wrapped(f"    call = {'OperatedCall' if exported.has_operands else 'Call'}(", fields, ")"),
        *operands,
        *called(devices, where, "call.inner > 1"),
    ])  # fmt: skip


def _beside(exported: RowsToExport, rows: str, numbers: str) -> tuple[str, str]:
    """The further arguments of run() and, in their order, those of the autograd function."""
    given = [numbers] * bool(exported.params) + [rows] * bool(exported.rows)
    return "".join(f", {each}" for each in given), "".join(f", {'*' if each == rows else ''}{each}" for each in given)


def _function(exported: RowsToExport, operation: str, devices: tuple[str, ...], where: str) -> str:
    """The autograd function."""
    aligned = f"dy.contiguous() if dy.data_ptr() % {ALIGNED} == 0 else dy.clone(memory_format=torch.contiguous_format)"
    given, taken = _beside(exported, "rows", "numbers")
    kept, ctx_given = "y" if exported.save == "output" else "x", given.replace("numbers", "ctx.numbers")
    saved = f"{kept}, *rows" if exported.rows else f"{kept},"
    in_memory = f"dy.resolve_neg() if dy.data_ptr() else torch.empty_like({kept}).copy_(dy)"
    lines = [
        f"class {exported.title}(torch.autograd.Function):  # keeps the {exported.save} for backward",
        "    @staticmethod",
        f"    def forward(ctx, x, dim{taken}):",
        "        y = torch.empty_like(x)",
        f'        run("forward", [x], y, dim{given})',
        f"        ctx.save_for_backward({saved.rstrip(',')})",
        f"        ctx.dim{', ctx.numbers' if exported.params else ''} = dim{', numbers' if exported.params else ''}",
        "        return y",
        "",
        "    @staticmethod",
        "    def backward(ctx, dy):",
        "        if torch.is_grad_enabled():",
        f'            raise RuntimeError("{where}: no second derivative")',
        f"        ({saved}) = ctx.saved_tensors",
        f"        dy = {in_memory}  # zeros may be without memory",
        f"        dy = {aligned if 'cuda' in devices else 'dy.contiguous()'}",
        f"        dx = torch.empty_like({kept})",
    ]
    none = ", None" * (1 + bool(exported.params))
    if not exported.rows:
        lines += [f'        run("{operation}", [dy, {kept}], dx, ctx.dim{ctx_given})', f"        return dx{none}"]
        return "\n".join(lines) + "\n"
    lines += [
        "        gradients = rows[0].new_empty(len(rows), *rows[0].shape)",
        f'        run("{operation}", [dy, {kept}], dx, ctx.dim{ctx_given}, gradients)',
        f"        return dx{none}, *gradients",
    ]
    return "\n".join(lines) + "\n"


def _modules(exported: RowsToExport, backward: bool) -> str:
    """``ModelNew`` and ``Model``."""
    numbers = "".join(f", {name}={default(value)}" for name, value in exported.params)
    own = "".join(f"        self.{name} = {name}\n" for name, _ in exported.params)
    made = f"    def __init__(self, dim{numbers}):\n        super().__init__()\n        self.dim = dim\n{own}\n"
    made += f"    def forward(self, {exported.tensors}):\n"
    made += "".join(f'        {name} = by_row("{name}", {name}, x, self.dim)\n' for name in exported.rows)
    detached = "" if backward else "".join(f"        {name} = {name}.detach()\n" for name in ("x", *exported.rows))
    taken = "        if x.numel() == 0:\n            return x.clone()\n" if exported.is_defined else ""
    taken += f"        if takes({exported.tensors.replace('x', 'x, self.dim', 1)}):\n"
    given, of_function = _beside(exported, "rows", exported.numbers)
    if exported.rows:
        taken += f"            rows = [for_kernels(each, x, self.dim) for each in ({', '.join(exported.rows)},)]\n"
    if backward:
        taken += f"            return {exported.title}.apply(x, self.dim{of_function})\n"
    else:
        taken += "            y = torch.empty_like(x)\n"
        taken += f'            run("forward", [x], y, self.dim{given})\n            return y\n'
    return (
        f"class ModelNew(nn.Module):  # as compiled above\n{made}{detached}{taken}        return {exported.otherwise}\n\n"
        f"class Model(nn.Module):  # as PyTorch has it\n{made}        return {exported.model}\n"
    )
