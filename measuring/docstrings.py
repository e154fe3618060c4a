"""The docstrings of activations, as ``help(jitact.gelu)`` shows them: every argument with its default, and the errors."""

from __future__ import annotations

import textwrap
from functools import cache
from inspect import Parameter, Signature

from ..records import Activation, Channel, Requirement
from ..records.arguments import AROUND

__all__ = ["describe_class", "describe_function"]

TENSOR = "a float32, float64, float16 or bfloat16 tensor, on CPU or CUDA"
WIDTH = 100
SAVES = {"input": "the inputs", "output": "the output, rounded", "bit": "one bit per element"}
ARGUMENTS = {  # descriptions common to all activations
    "inplace": "write the result into x.",
    "fast_math": "use a build of its own, compiled with -use_fast_math, which is less exact.",
    "bias": "a tensor that is added to x before the activation: one value for each index of channel_dim, or one for all.",
    "dropout": "the probability, from 0 to 1, with which an element of the result is set to 0; the others are scaled.",
    "residual": "a tensor that is added to the result, after dropout. It broadcasts and promotes.",
    "channel_dim": "the dimension of x that bias belongs to. An error without a bias.",
    "seed": "a tensor of one int64 on x's device that random numbers follow from; by default torch.manual_seed's.",
    "training": "whether random numbers are drawn, as in a module in training mode.",
    "device": "of bias and weights. An error where there are none.",
    "dtype": "of bias and weights. An error where there are none.",
    "row_weight": "a tensor with one value for each row, all dimensions but the last; the result is multiplied by it.",
    "dim": "the dimension of a single tensor that holds gate and up. It has to be of even size.",
    "layout": '"halves", or "interleaved" where gate and up alternate in a single tensor.',
    "rounding": '"once" rounds the result alone; "unfused" rounds after each operation, as separate operations do.',
}
OF_CLASSES = {
    "bias": "how many channels there are: the module owns a learned bias of zeros with a value for each.",
    "dropout": "the probability of dropout after the activation, in training mode.",
    "gate": '"first" or "last": which of two tensors, or of the two in one tensor, is the gate.',
    "num_parameters": "how many weights there are: one, or one for each index of dimension 1 of x.",
    "init": "the value of the weights in a new module.",
}
OF_GATED_FUNCTIONS = {
    "x": f"{TENSOR}. It holds gate and up, or is the first of the two.",
    "other": "the second of the two, which broadcast and promote.",
    "gate": '"first" or "last", which of the two is the gate; or the gate itself, a tensor.',
    "up": "the tensor that the activated gate is multiplied by, where it is given by name.",
}


def describe_function(record: Activation, signature: Signature) -> str:
    """The docstring of the function ``jitact.<name>`` with the given signature."""
    result = "A tensor of x's shape and dtype, or of what the tensors broadcast and promote to."
    return _described(record, signature, OF_GATED_FUNCTIONS if record.gating else {}, f"Returns:\n    {result}")


def describe_class(record: Activation) -> str:
    """The docstring of the module class, with the arguments of the constructor."""
    called = ", ".join(record.given_in_calls)
    calls = f"Modules are called with {called}{' or with one tensor that holds both' if record.gating else ''}"
    calls += "." if record.gating else ", and may be with a residual, which is added to the result."
    sizes = {name: f"how many values it has: {_values(channel)}." for name, channel in record.channels.items()}
    return _described(record, record.signature, OF_CLASSES | sizes, calls)


def _described(record: Activation, signature: Signature, own: dict[str, str], after: str) -> str:
    """A docstring: formula, notes, arguments (``own`` overrides their descriptions), ``after``, errors."""
    arguments = [_argument(record, each, own) for each in signature.parameters.values()]
    lines = [
        record.equation,
        "",
        "Forward and backward are compiled kernels, built at first use and cached.",
        *(_wrapped(record.notes, "") if record.notes else ()),
        "",
        "Args:",
        *(line for each in arguments for line in _wrapped(each, "    ")),
        "",
        *(line for text in after.split("\n") for line in _wrapped(text, text[: len(text) - len(text.lstrip())])),
        "",
        "Raises:",
        "    TypeError: an argument of another type or dtype.",
        *_wrapped(f"ValueError: a shape, a device or a value that does not fit.{_needs(record.requires)}", "    "),
        "    RuntimeError: there is no compiler, or compilation failed; the message says what to install.",
    ]
    return "\n".join(lines) + "\n"


def _argument(record: Activation, parameter: Parameter, own: dict[str, str]) -> str:
    """The description of an argument, with its default."""
    name, default = parameter.name, parameter.default
    if name == "save":
        choices = " | ".join(f'"{save}" ({SAVES[save]})' for save in record.saves)
        return f'save: what is kept for backward: {choices}. Default: "{record.saves[0]}".'
    text = own.get(name) or _of_operand(record, name) or ARGUMENTS.get(name)
    if text is None and record.variant and name == record.variant[0]:
        text = f"{' or '.join(map(repr, record.variant[1]))}."
    shown = "" if default in (Parameter.empty, None) else f" Default: {default!r}."
    return f"{name}: {text or 'a number.'}{shown}"


def _of_operand(record: Activation, name: str) -> str | None:
    """The description of a tensor operand; None if the argument is something else."""
    channel = record.channels.get(name)
    if channel is not None:
        return f"a tensor with {_values(channel)}{', learned' if name in record.learned else ''}."
    if name not in record.layout.tensors or (name in AROUND and record.source.signature.of("element")[:1] != (name,)):
        return None
    if name in record.source.signature.of("row"):
        return "a tensor with one value for each row, all dimensions of x but the last."
    return f"{TENSOR}, of any shape and strides."


def _values(channel: Channel) -> str:
    """How many values a channel operand has."""
    return "one value" if channel.one else f"one value, or one for each index of dimension {channel.dim} of x"


def _needs(requirements: tuple[Requirement, ...]) -> str:
    """The conditions on parameters as a sentence."""
    texts = [each.text + (f' with save="{each.save}"' if each.save else "") for each in requirements]
    return f" Needs {'; '.join(texts)}." if texts else ""


@cache  # most arguments are common to all activations
def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text.strip(), WIDTH, initial_indent=indent, subsequent_indent=indent + ("    " if indent else ""))
