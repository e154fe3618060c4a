"""The Python of an exported file that calls the kernels: structs and the autograd function, from the signature."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from .build import DEVICES, DTYPES, Build
from .extract import Extract
from .lines import LONGEST
from .text import wrapped

__all__ = ["Wrapper", "called", "enumerators", "structs"]

_LAID_OUT_LIKE = '''\
def laid_out_like(like, t):
    """The tensor, copied only if it does not lie in memory as `like` does: it may be zeros without any, or negated."""
    return t if t.stride() == like.stride() and t.data_ptr() and not t.is_neg() else torch.empty_like(like).copy_(t)
'''

_BY_CHANNEL = '''\
def by_channel(name, values, dim, y@DIMS@):
    """One value for all elements of y, or one for each index of a dimension; and how many side by side have each."""
    at = dim if dim < 0 else dim - @COUNT@
    if values.numel() > 1 and not (-y.dim() <= at < 0 and values.numel() == y.shape[at]):
        given = f"{values.numel()} values of {name} do not fit dimension {dim} of an input of shape {tuple(y.shape)}"
        raise ValueError(f"@WHERE@: {given}")
    if values.device != y.device:
        raise ValueError(f"@WHERE@: {name} is on {values.device}, not {y.device}")
    return values.resolve_neg().contiguous(), y.stride(at) if values.numel() > 1 else 1
'''

_BY_ROW = '''\
def by_row(name, values, y):
    """One value for each row of y; and how many elements side by side have each."""
    if values.shape not in (y.shape[:-1], (*y.shape[:-1], 1)[: y.dim()]):
        raise ValueError(f"@WHERE@: {name} of shape {tuple(values.shape)} does not fit the rows of shape {tuple(y.shape)}")
    if values.device != y.device:
        raise ValueError(f"@WHERE@: {name} is on {values.device}, not {y.device}")
    return values.resolve_neg().contiguous(), y.shape[-1] if y.dim() else 1
'''

_BESIDE = '''\
def beside(values, x):
    """The values in x's dtype or, where theirs is another than one of 16 bits, in float32."""
    return values if values.dtype == x.dtype else values.to(torch.float32 if x.itemsize == 2 else x.dtype)
'''

_CTYPES = {"Op": "int", "Dtype": "int", "int64_t": "int64", "bool": "bool", "float": "float"}


def enumerators(extract: Extract, operations: tuple[str, ...], dtypes: tuple[str, ...]) -> str:
    """The values of the operations' and dtypes' enumerators in C++."""
    found = {enum: re.findall(r"\w+", inside) for enum, inside in re.findall(r"enum class (\w+) \{(.*?)\}", extract.text)}
    lines = [wrapped("OPERATIONS = {", [f'"{each}": {found["Op"].index(each)}' for each in operations], "}")]
    if "Dtype" in found:
        numbered = [f"{DTYPES[each][0]}: {found['Dtype'].index(DTYPES[each][1])}" for each in dtypes]
        lines += [wrapped("DTYPES = {", numbered, "}")]
    return "\n".join(lines)


def structs(extract: Extract, numbers: Mapping[str, int]) -> Iterator[str]:
    """The C++ structs of a call as ctypes; one that has only a pointer becomes a pointer.

    Args:
        extract: the extracted C++.
        numbers: the values of constants in array lengths, as in "kElements + 1".
    """
    for name, members in extract.structs.items():
        if len(members) > 1:
            fields = [f'("{member}", {_ctype(type_, length, extract, numbers)})' for type_, member, length in members]
            yield f"class {name}(Structure):\n" + wrapped("    _fields_ = [", fields, "]")


def _ctype(type_: str, length: str, extract: Extract, numbers: Mapping[str, int]) -> str:
    is_pointer = type_.endswith("*") or len(extract.structs.get(type_, "  ")) == 1
    name = "c_void_p" if is_pointer else f"c_{_CTYPES[type_]}" if type_ in _CTYPES else type_
    return f"{name} * {eval(length, {}, dict(numbers))}" if length else name

_WORKSPACE = (
    "library().workspace_bytes.restype = c_int64",
    "needed = library().workspace_bytes(byref(call))",
    "workspace = torch.empty(needed, dtype=torch.uint8, device=x.device)",
    "call.workspace = workspace.data_ptr()",
)


def called(devices: tuple[str, ...], where: str, workspace_if: str | None) -> list[str]:
    """The lines that run ``call`` on the device of ``x``.

    Args:
        devices: of :data:`~jitact.exporting.build.DEVICES`.
        where: the start of error messages.
        workspace_if: the condition for a workspace on a GPU, if some calls need one.
    """
    on_cpu = "library().run_cpu(byref(call))"
    if devices == ("cpu",):
        return [f"    {on_cpu}"]
    return [
        *(["    if not x.is_cuda:", f"        return {on_cpu}"] if "cpu" in devices else []),
        "    with torch.cuda.device(x.device):",
        *([f"        if {workspace_if}:", *(f"            {line}" for line in _WORKSPACE)] if workspace_if else []),
        "        library().run_cuda.restype = c_char_p",
        "        error = library().run_cuda(byref(call), c_void_p(torch.cuda.current_stream().cuda_stream))",
        "    if error:",
        f'        raise RuntimeError(f"{where}: {{error.decode()}}")',
    ]


class Wrapper:
    """The parts of a file that depend on a kernel file's signature.

    Args:
        build: what is compiled.
        name: of the activation.
        title: the name of the autograd function.
        dims: the dimensions of channel operands, by name.
        where: the start of error messages.
        through: the elements whose gradient is dy.
        unread: the tensors that backward does not read.

    Attributes:
        taken: the arguments of the autograd function.
        counted: of these, the number of dimensions of the first tensor before it is expanded, if channels are counted in them.
    """

    def __init__(
        self,
        build: Build,
        name: str,
        title: str,
        dims: dict[str, int],
        where: str,
        through: tuple[str, ...] = (),
        unread: tuple[str, ...] = (),
    ) -> None:
        """Reads the signature."""
        self.build, self.name, self.title, self.dims, self.where = build, name, title, dims, where
        self.through, self.unread = through, unread
        signature = build.source.signature
        self.elements = signature.of("element")
        self.broadcast = signature.of("channel", "row")
        self.rows = signature.of("row")
        self.numbers = signature.of("number")
        self.draws = bool(signature.of("random"))
        seeds = ["seed"] if self.draws else []
        from_the_left = any(dim >= 0 for dim in dims.values())
        self.counted = ["dims"] if from_the_left and len(self.elements) > 1 else []
        self.taken = [*self.elements, *self.broadcast, *seeds, *self.numbers, *self.counted]

    def parts(self) -> list[str]:
        """All parts, in order."""
        build = self.build
        known = [enumerators(build.extract, build.operations, build.dtypes), *structs(build.extract, build.numbers)]
        return [*known, self.run(), *self.helpers(), self.function()]

    def run(self) -> str:
        """The function that calls the kernels."""
        given = {
            "numbers": ("numbers", "numbers=addressof(values)"),
            "mask": ("mask=None", "mask=None if mask is None else mask.data_ptr()"),
            "seed": ("seed", "seed=seed.data_ptr()"),
            "broadcast": ("broadcast", ""),
            "sums": ("sums=()", ""),
            "columns": ("", "columns=x.numel()"),
            "dense": ("", "dense=True"),
        }
        of_elements = [member for _, member, _ in self.build.extract.structs["Elements"]]
        assert of_elements == ["data"], f"loops use these, or members called so: {of_elements}"
        members = [member for _, member, _ in self.build.extract.structs["Call"]]
        has = {key: values for key, values in given.items() if key in members and (key != "broadcast" or self.broadcast)}
        taken = sorted((argument for argument, _ in has.values() if argument), key=lambda argument: "=" in argument)
        fields = ["op=OPERATIONS[operation]"]
        if "dtype" in members:
            fields.append("dtype=DTYPES[x.dtype]")
        fields += ["n=x.numel()", *(field for _, field in has.values() if field)]
        pointer = (
            "None if tensor is None else tensor.data_ptr()"
            if self.build.sums or len(self.elements) > 1
            else "tensor.data_ptr()"
        )
        fields += ["read=tuple(tensor.data_ptr() for tensor in read)", f"written=tuple({pointer} for tensor in written)"]
        lines = [
            f"def run({', '.join(['operation', 'read', 'written', *taken])}):",
            '    """Runs an operation on the memory of tensors that lie alike, on their device and its current stream."""',
            "    x = read[0]",
            *self._check(),
        ]
        if "numbers" in has:
            lines.append("    values = (c_double * len(numbers))(*numbers)")
        lines.append(wrapped("    call = Call(", fields, ")"))
        if "broadcast" in has:
            lines += [
                "    for place, (tensor, inner) in zip(call.broadcast, broadcast):",
                "        place.data, place.count, place.inner = tensor.data_ptr(), tensor.numel(), inner",
            ]
            if self.build.wide:
                lines.append("        place.wide = tensor.dtype != x.dtype")
        if "sums" in has:
            lines += [
                "    for place, tensor in enumerate(sums):",
                "        call.sums[place] = None if tensor is None else tensor.data_ptr()",
            ]
        lines += ["    if x.numel() == 0:", "        return"]
        workspace_if = 'operation == "backward_sums"' if self.build.sums else None
        return "\n".join([*lines, *called(self.build.devices, self.where, workspace_if)])

    @property
    def _numbers_dtypes(self) -> bool:
        """Whether the struct of a call has a dtype."""
        return any(member == "dtype" for _, member, _ in self.build.extract.structs["Call"])

    def _check(self) -> list[str]:
        """The check that the file supports a tensor, and that no graph is made: it would not have what kernels compute."""
        names = [DTYPES[each][0].removeprefix("torch.") for each in self.build.dtypes]
        expected = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
        accepted = "not in DTYPES" if self._numbers_dtypes else f"!= {DTYPES[self.build.dtypes[0]][0]}"
        condition, got = f"x.dtype {accepted}", "{x.dtype}"
        if len(self.build.devices) < len(DEVICES):
            expected += f" tensor on a {'GPU' if self.build.devices == ('cuda',) else 'CPU'}"
            condition, got = f'{condition} or x.device.type != "{self.build.devices[0]}"', "{x.dtype} on {x.device}"
        else:
            expected += " tensor"
        expected += ", outside of make_fx"
        error = f'        raise TypeError(f"{self.where}: expected a {expected}, got {got}")'
        if len(error) > LONGEST:
            error = f'        what = "expected a {expected}"\n        raise TypeError(f"{self.where}: {{what}}, got {got}")'
        return [f"    if {condition} or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY):", error]

    def helpers(self) -> list[str]:
        """The helpers of the autograd function, other than run()."""
        texts = [_LAID_OUT_LIKE]
        if self.dims:
            dims = ", dims" if self.counted else ""
            texts.append(_BY_CHANNEL.replace("@DIMS@", dims).replace("@COUNT@", "dims" if dims else "y.dim()"))
        if self.rows:
            texts.append(_BY_ROW)
        if self.build.wide:
            texts.append(_BESIDE)
        return [text.replace("@WHERE@", self.where) for text in texts]

    def function(self) -> str:
        """The autograd function."""
        x, y, save = self.elements[0], self._local("y"), self.build.save
        layout = ", memory_format=torch.contiguous_format" if self.rows else ""
        lines = [f"class {self.title}(torch.autograd.Function):  # {self._told()}"]
        lines += [
            "    @staticmethod",
            f"    def forward(ctx, {', '.join(self.taken)}):",
            f"        {y} = torch.empty_like({x}{layout})",
        ]
        if save == "bit":
            bits, reads = self._local("bits"), f"[{', '.join(f'laid_out_like({y}, {each})' for each in self.elements)}]"
            lines += [
                f"        {bits} = {x}.new_empty(({x}.numel() + 7) // 8, dtype=torch.uint8) if "
                "ctx.needs_input_grad[0] else None",
                self._call(f'"forward" if {bits} is None else "forward_bit"', reads, f"[{y}]", y, f"mask={bits}"),
            ]
        else:
            lines += [f"        {each} = laid_out_like({y}, {each})" for each in self.elements]
            reads = f"[{', '.join(self.elements)}]"
            lines += [self._call('"forward"', reads, f"[{y}]", y)]
        if save is None:
            return "\n".join([*lines, f"        ctx.mark_non_differentiable({y})", f"        return {y}"]) + "\n"
        kept = {"bit": [self._local("bits")], "output": [y], "input": self._read}[save]
        kept = [*kept, *self.broadcast]
        if self.draws:
            kept.append("seed")
        lines.append(f"        ctx.save_for_backward({', '.join(kept)})")
        numbers = [*self.numbers, *self.counted]
        if numbers:
            lines.append(f"        ctx.numbers = ({_tuple(numbers)})")
        if save == "bit" or (save == "input" and not self._read and self._computed):
            lines.append(f"        ctx.strides = {y}.stride()")
        lines += [f"        return {y}", "", "    @staticmethod", "    def backward(ctx, dy):"]
        lines += [
            "        if torch.is_grad_enabled():",
            f'            raise RuntimeError("{self.where}: no second derivative")',
        ]
        if kept and kept != [self._local("bits")]:
            lines.append(f"        ({_tuple(kept)}) = ctx.saved_tensors")
        if numbers:
            lines.append(f"        ({_tuple(numbers)}) = ctx.numbers")
        return "\n".join([*lines, *self._backward()]) + "\n"

    def _local(self, name: str) -> str:
        """A name for a variable of the autograd function that differs from all operands' and the incoming gradient's."""
        while name in (*self.taken, "dy"):
            name += "_"
        return name

    @property
    def _read(self) -> list[str]:
        """The elements that backward reads."""
        return [each for each in self.elements if each not in self.unread]

    @property
    def _computed(self) -> list[str]:
        """The operands with gradients: elements, and broadcast ones, whose gradients are summed."""
        written, sums = self.build.numbers["kElementGradients"], self.build.numbers["kSums"]
        return [each for each in (*self.elements[:written], *self.broadcast[:sums]) if each not in self.through]

    def _told(self) -> str:
        """What forward saves."""
        several = "s" if len(self.elements) > 1 else ""
        of_input = f"the input{several}" if self._read == list(self.elements) else ", ".join(self._read) or "no tensor"
        kept = {"bit": "one bit of each element", "input": of_input, "output": "the output"}
        return f"keeps {kept[self.build.save]} for backward" if self.build.save else "without a gradient"

    def _backward(self) -> list[str]:
        """The body of backward after the saved tensors are unpacked."""
        save, y = self.build.save, self._local("y")
        if save != "input":
            like = (
                "torch.empty_strided(dy.shape, ctx.strides, dtype=dy.dtype, device=dy.device)"
                if save == "bit"
                else f"torch.empty_like({y})"
            )
            bits = self._local("bits") if self.broadcast or self.draws else "ctx.saved_tensors[0]"
            others, kept = ([f"mask={bits}"], "") if save == "bit" else ([], f", {y}")
            dx = self._local("dx")
            call = self._call(f'"backward_from_{save}"', f"[laid_out_like({dx}, dy){kept}]", f"[{dx}]", dx, *others)
            lines = [f"        {dx} = {like}", call]
            rest = f", *[None] * {len(self.taken) - 1}" if len(self.taken) > 1 else ""
            if self.through:
                rest = "".join(f", {'dy' if each in self.through else 'None'}" for each in self.taken[1:])
            return [*lines, f"        return {dx}{rest}"]
        made = {each: self._local(f"d{each}") for each in self._computed}
        gradients = [made.get(each) or ("dy" if each in self.through else "None") for each in self.taken]
        returned = f"        return {', '.join(gradients)}"
        if not self._computed:
            return [returned]
        written = self.elements[: self.build.numbers["kElementGradients"]]
        sums = self.broadcast[: self.build.numbers["kSums"]]
        if self._read:
            lines = [f"        dy = laid_out_like({self._read[0]}, dy)"]
        else:
            like = "torch.empty_strided(dy.shape, ctx.strides, dtype=dy.dtype, device=dy.device)"
            lines = ["        if dy.stride() != ctx.strides or not dy.data_ptr() or dy.is_neg():"]
            lines += [f"            dy = {like}.copy_(dy)"]
        for each in self._computed:
            new = "empty_like" if each in written else "zeros_like"
            like = "dy" if each in written and each in self.unread else each
            needed = f" if ctx.needs_input_grad[{self.taken.index(each)}] else None" if len(written) + len(sums) > 1 else ""
            lines += [f"        {made[each]} = torch.{new}({like}){needed}"]
        read = ["dy" if each in self.unread else each for each in self.elements]
        reads, writes = (f"[{', '.join(each)}]" for each in (["dy", *read], [made.get(each, "None") for each in written]))
        if sums:
            local, operation = self._local("sums"), self._local("operation")
            lines += [f"        {local} = [{', '.join(made[each] for each in sums)}]"]
            lines += [f'        {operation} = "backward" if all(each is None for each in {local}) else "backward_sums"']
            lines += [self._call(operation, reads, writes, "dy", f"sums={local}")]
        else:
            lines += [self._call('"backward"', reads, writes, "dy")]
        return [*lines, returned]

    def _call(self, operation: str, reads: str, writes: str, like: str, *others: str) -> str:
        """A call of run(), after the lines that prepare the broadcast operands."""
        given = [operation, reads, writes]
        if self.numbers:
            given.append(f"numbers=[{', '.join(self.numbers)}]")
        if self.draws:
            given.append("seed=seed")
        places = [
            f'by_row("{each}", {each}, {like})'
            if each in self.rows
            else f'by_channel({", ".join([chr(34) + each + chr(34), each, str(self.dims[each]), like, *self.counted])})'
            for each in self.broadcast
        ]
        if not places:
            return wrapped("        run(", [*given, *others], ")")
        local = self._local("places")
        before = wrapped(f"        {local} = [", places, "]")
        return "\n".join([before, wrapped("        run(", [*given, f"broadcast={local}", *others], ")")])


def _tuple(names: Iterable[str]) -> str:
    """Names as a tuple without parentheses."""
    names = list(names)
    return f"{names[0]}," if len(names) == 1 else ", ".join(names)
