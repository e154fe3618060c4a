"""The modules of an exported file: ``ModelNew``, which calls the kernels, and ``Model``, in PyTorch."""

from __future__ import annotations

import ast
import math
import re
import textwrap
from typing import Any

from ..definitions.define import Definition
from ..records import Activation
from .build import DTYPES
from .lines import LONGEST
from .reference import reference
from .text import default, wrapped
from .wrapper import Wrapper

__all__ = ["Modules"]

_PROMOTED = '''\
def promoted(*tensors):
    """The tensors in the dtype that holds those of all, or of all with dimensions."""
    devices = [str(tensor.device) for tensor in tensors]
    if len(set(devices)) > 1:
        raise ValueError(f"@WHERE@: expected one device, got {devices}")
    dtypes = [tensor.dtype for tensor in tensors]
    if not all(dtype.is_floating_point for dtype in dtypes):
        raise TypeError(f"@WHERE@: expected floating-point tensors, got {dtypes}")
    counting = [tensor.dtype for tensor in tensors if tensor.dim() > 0] or dtypes
    dtype = functools.reduce(torch.promote_types, counting)
    return [tensor.to(dtype) for tensor in tensors]

'''


_CHECK_DTYPE = '''\
def check_dtype(name, values, x):
    """Checks that values are of x's dtype."""
    if not x.is_floating_point():
        raise TypeError(f"@WHERE@: expected a floating-point tensor, got {x.dtype}")
    if values.dtype != x.dtype:
        raise TypeError(f"@WHERE@: {name} must be of x's dtype, {x.dtype}, got {values.dtype}")

'''


class Modules:
    """The text of an activation's modules.

    Args:
        record: the activation.
        params: its parameters with the defaults for the file.
        wrapper: the Python that calls the kernels.
        passed: expressions for numbers that are not simply parameters.

    Raises:
        ValueError: the activation has no PyTorch counterpart to write out.
    """

    def __init__(self, record: Activation, params: dict[str, float], wrapper: Wrapper, passed: dict[str, str]) -> None:
        """Makes ``text`` and ``init_inputs``."""
        tensors = [_in_model(name, record) for name in record.layout.tensors]
        helpers: dict[str, str] = {}
        returned = reference(record, [*tensors, *(f"self.{name}" for name in params)], helpers)
        sizes = [name for name, channel in record.channels.items() if not channel.one]
        if record.channels and record.module:
            required, optional = {}, record.own_arguments
        else:
            required = {name: "dim" if record.channels[name].dim == -1 else "1" for name in sizes}
            optional = params | ({"device": None, "dtype": None} if record.channels else {})
        self.init_inputs = _init_inputs(required, optional, wrapper.build.dtypes)
        arguments = [*required, *(f"{name}={default(value)}" for name, value in optional.items())]
        lines = [wrapped("    def __init__(", ["self", *arguments], "):"), "        super().__init__()"]
        lines += [_made(name, record) for name in record.channels]
        lines += [f"        self.{name} = {name}" for name in params]
        lines += [*_checks(record, params, wrapper), "", ""]
        given = [name for name in (*wrapper.elements, *wrapper.broadcast) if name not in record.channels]
        own = {name: f"self.{name}" for name in record.channels} | {name: name for name in wrapper.rows}
        x, wide = wrapper.elements[0], wrapper.build.wide
        own = {name: f"beside({t}, {x})" if name in wide else f"{t}.to({x}.dtype)" for name, t in own.items()}
        same = [name for name in record.channels if name not in record.added] if record.dtypes == "same" else []
        before, learned = _together(record, wrapper)
        before[:0] = [f'        check_dtype("{name}", self.{name}, {x})' for name in same]
        own |= {name: name for name in learned}
        calls = [own.get(name, name) for name in (*wrapper.elements, *wrapper.broadcast)]
        if wrapper.draws:
            of_none = f" if self.training else {x}.new_zeros(1, dtype=torch.int64)" if passed else ""
            before.append(f"        seed = torch.randint(2**63 - 1, (1,), device={x}.device){of_none}")
            calls.append("seed")
        for name in [*params, *wrapper.numbers[len(params) :]]:
            calls.append(name if name in passed else f"self.{name}")
            if name in passed:
                before.append(f"        {name} = {passed[name]}")
        calls += wrapper.counted
        text = "".join(f"{line}\n" for line in before)
        constructor = "\n".join(lines) if arguments else ""
        forward = f"    def forward({', '.join(['self', *given])}):"
        drawing = ", which draws other random numbers" if wrapper.draws else ""
        helpers_of_calls = (("promoted(", _PROMOTED), ("check_dtype(", _CHECK_DTYPE))
        self.text = "".join(helper.replace("@WHERE@", wrapper.where) for call, helper in helpers_of_calls if call in text)
        self.text += (
            f"class ModelNew(nn.Module):  # as compiled above\n{constructor}{forward}\n"
            f"{text}{wrapped(f'        return {wrapper.title}.apply(', calls, ')')}\n\n"
            f"class Model(nn.Module):  # as PyTorch has it{drawing}\n{constructor}{forward}\n{_returned(returned)}\n"
        )
        self.text += "".join(f"\n{text}\n" for text in helpers.values())


def _checks(record: Activation, params: dict[str, float], wrapper: Wrapper) -> list[str]:
    """The lines that check the conditions on parameters which can be written in Python."""
    lines = []
    for requirement in record.requires:
        if requirement.save not in (None, wrapper.build.save):
            continue
        try:
            names = {node.id for node in ast.walk(ast.parse(requirement.text, mode="eval")) if isinstance(node, ast.Name)}
        except SyntaxError:  # of an expression of a definition
            continue
        if not names <= {*params, "inf"}:
            continue
        condition = re.sub(r"\binf\b", default(math.inf), requirement.text)
        given = ", ".join(f"{name}={{{name}}}" for name in params if name in names)
        error = f'raise ValueError(f"{wrapper.where}: needs {requirement.text}, got {given}")'
        lines += [f"        if not {condition}:", f"            {error}"]
    return lines


def _together(record: Activation, wrapper: Wrapper) -> tuple[list[str], list[str]]:
    """The lines that convert elements to one dtype and shape, and the names of learned operands converted with them."""
    learned = [name for name in record.learned if record.dtypes == "promoted" and name not in record.added]
    elements, lines = ", ".join(wrapper.elements), []
    if wrapper.counted:
        lines.append(f"        dims = {wrapper.elements[0]}.dim()  # before it is expanded")
    if learned:
        given = ", ".join([*wrapper.elements, *(f"self.{name}" for name in learned)])
        lines.append(f"        {', '.join([elements, *learned])} = promoted({given})")
    if len(wrapper.elements) > 1:
        given = elements if learned else f"*promoted({elements})"
        lines.append(f"        {elements} = torch.broadcast_tensors({given})")
    return lines, learned


def _init_inputs(required: dict[str, str], optional: dict[str, Any], dtypes: tuple[str, ...]) -> str:
    """The constructor's arguments for the file's first dtype: the required ones and, for another dtype than the default, it."""
    given = [*required.values()]
    if "dtype" in optional and not (optional["dtype"] is None and "fp32" in dtypes):
        before = list(optional)[: list(optional).index("dtype")]
        given += [*(default(optional[name]) for name in before), DTYPES[dtypes[0]][0]]
    return ", ".join(given)


def _in_model(name: str, record: Activation) -> str:
    """The expression for a tensor in Model, shaped to broadcast: channels of expressions along their dimension, and rows."""
    if name in record.source.signature.of("row"):
        elements = record.source.signature.of("element")
        shape, dims = f"{elements[0]}.shape", f"{elements[0]}.dim()"
        if len(elements) > 1:  # of the result
            shape = f"torch.broadcast_shapes({', '.join(f'{each}.shape' for each in elements)})"
            dims = f"max({', '.join(f'{each}.dim()' for each in elements)})"
        return f"{name}.reshape((*{shape}[:-1], 1)[: {dims}])"
    channel = record.channels.get(name)
    if channel is None:
        return name
    dim = channel.dim
    if channel.one or dim == -1 or not isinstance(record, Definition):  # PyTorch's take them so
        return f"self.{name}"
    after = f"*[1] * ({record.layout.tensors[0]}.dim() - {dim + 1})" if dim >= 0 else ", ".join(["1"] * (-1 - dim))
    return f"self.{name}.view(-1, {after})"


def _returned(expression: str) -> str:
    """The line, or lines, that return an expression."""
    line = f"        return {expression}"
    if len(line) <= LONGEST:
        return line
    parts = textwrap.wrap(expression, LONGEST - 12, break_long_words=False, break_on_hyphens=False)
    return "\n".join(["        return (", *(f"            {part}" for part in parts), "        )"])


def _made(name: str, record: Activation) -> str:
    """The line that creates a channel operand."""
    channel = record.channels[name]
    values = f"torch.full(({'1' if channel.one else name},), {default(channel.init)}, device=device, dtype=dtype)"
    values = record.in_python[name] if record.module else values
    if name in record.learned:
        return f"        self.{name} = nn.Parameter({values})"
    return f'        self.register_buffer("{name}", {values})'
