"""The modules of a file: ``ModelNew``, which calls what is compiled, and ``Model``, PyTorch's."""

from __future__ import annotations

import math
import textwrap
from typing import Any

from ..definitions.define import Definition
from ..records import Activation
from .build import DTYPES
from .lines import LONGEST
from .reference import reference
from .text import wrapped
from .wrapper import Wrapper

__all__ = ["Modules"]

_PROMOTED = '''\
def promoted(*tensors):
    """The tensors in the dtype that holds those of all."""
    devices = [str(tensor.device) for tensor in tensors]
    if len(set(devices)) > 1:
        raise ValueError(f"@WHERE@: expected one device, got {devices}")
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    return [tensor.to(dtype) for tensor in tensors]

'''


class Modules:
    """What a file has of an activation's modules.

    Args:
        record: the activation.
        params: its parameters, the defaults in the file.
        wrapper: what the file calls.
        passed: expressions for numbers that are not simply parameters.

    Raises:
        ValueError: nothing tells what PyTorch's counterpart is.
    """

    def __init__(self, record: Activation, params: dict[str, float], wrapper: Wrapper, passed: dict[str, str]) -> None:
        """Writes the modules."""
        tensors = [_in_model(name, record) for name in record.layout.tensors]
        helpers: dict[str, str] = {}
        returned = reference(record, [*tensors, *(f"self.{name}" for name in params)], helpers)
        sizes = [name for name, channel in record.channels.items() if not channel.one]
        if record.channels and record.module:
            arguments = [f"{name}={_default(value)}" for name, value in record.own_arguments.items()]
            self.init_inputs = _up_to_dtype(record.own_arguments, wrapper.build.dtypes)
        else:
            arguments = [*sizes, *(f"{name}={_default(value)}" for name, value in params.items())]
            arguments += ["device=None", "dtype=None"] if record.channels else []
            self.init_inputs = ", ".join("dim" if record.channels[name].dim == -1 else "1" for name in sizes)
        lines = [wrapped("    def __init__(", ["self", *arguments], "):"), "        super().__init__()"]
        lines += [_made(name, record) for name in record.channels]
        lines += [f"        self.{name} = {name}" for name in params] + ["", ""]
        given = [name for name in (*wrapper.elements, *wrapper.broadcast) if name not in record.channels]
        own = {name: f"self.{name}" for name in record.channels} | {name: name for name in wrapper.rows}
        own = {name: f"{operand}.to({wrapper.elements[0]}.dtype)" for name, operand in own.items()}
        before, learned = _together(record, wrapper)
        own |= {name: name for name in learned}
        calls = [own.get(name, name) for name in (*wrapper.elements, *wrapper.broadcast)]
        if wrapper.draws:
            x = wrapper.elements[0]
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
        self.text = _PROMOTED.replace("@WHERE@", wrapper.where) if "promoted(" in text else ""
        self.text += (
            f"class ModelNew(nn.Module):  # as compiled above\n{constructor}{forward}\n"
            f"{text}{wrapped(f'        return {wrapper.title}.apply(', calls, ')')}\n\n"
            f"class Model(nn.Module):  # as PyTorch has it{drawing}\n{constructor}{forward}\n{_returned(returned)}\n"
        )
        self.text += "".join(f"\n{text}\n" for text in helpers.values())


def _together(record: Activation, wrapper: Wrapper) -> tuple[list[str], tuple[str, ...]]:
    """The lines that bring elements into one dtype and one shape; and the learned operands that are in that dtype then."""
    learned = record.learned if record.dtypes == "promoted" else ()
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


def _up_to_dtype(arguments: dict[str, Any], dtypes: tuple[str, ...]) -> str:
    """A constructor's arguments for tensors of a file's first dtype, where that is not its default; none if it has none."""
    if arguments.get("dtype") is None:
        return ""
    before = list(arguments)[: list(arguments).index("dtype")]
    return ", ".join([*(_default(arguments[name]) for name in before), DTYPES[dtypes[0]][0]])


def _in_model(name: str, record: Activation) -> str:
    """A tensor in Model: of an expression, values by channel broadcast along their dimension; those by row, along the last."""
    if name in record.source.signature.of("row"):
        return f"{name}.reshape(*{record.layout.tensors[0]}.shape[:-1], 1)"
    channel = record.channels.get(name)
    if channel is None:
        return name
    dim = channel.dim
    if channel.one or dim == -1 or not isinstance(record, Definition):  # PyTorch's take them so
        return f"self.{name}"
    after = f"*[1] * ({record.layout.tensors[0]}.dim() - {dim + 1})" if dim >= 0 else ", ".join(["1"] * (-1 - dim))
    return f"self.{name}.view(-1, {after})"


def _returned(expression: str) -> str:
    """A line that returns it, or several."""
    line = f"        return {expression}"
    if len(line) <= LONGEST:
        return line
    parts = textwrap.wrap(expression, LONGEST - 12, break_long_words=False, break_on_hyphens=False)
    return "\n".join(["        return (", *(f"            {part}" for part in parts), "        )"])


def _made(name: str, record: Activation) -> str:
    """The line that makes an operand with a value for each channel."""
    channel = record.channels[name]
    values = f"torch.full(({'1' if channel.one else name},), {_default(channel.init)}, device=device, dtype=dtype)"
    values = record.in_python[name] if record.module else values
    if name in record.learned:
        return f"        self.{name} = nn.Parameter({values})"
    return f'        self.register_buffer("{name}", {values})'


def _default(value: object) -> str:
    """A constructor's default as Python reads it."""
    return f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)
