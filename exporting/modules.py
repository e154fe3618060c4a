"""The modules of a file: ``ModelNew``, which calls what is compiled, and ``Model``, PyTorch's."""

from __future__ import annotations

import math
import textwrap

from ..definitions.define import Definition
from ..records import Activation
from .lines import LONGEST
from .reference import reference
from .wrapper import Wrapper

__all__ = ["Modules"]

PRELU = '''\
class ModelNew(nn.Module):  # as compiled above
    def __init__(self, num_parameters=1, init=0.25, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.full((num_parameters,), init, device=device, dtype=dtype))

    def forward(self, x):
        return PReLU.apply(x, self.weight.to(x.dtype))

class Model(nn.Module):  # as PyTorch has it
    def __init__(self, num_parameters=1, init=0.25, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.full((num_parameters,), init, device=device, dtype=dtype))

    def forward(self, x):
        return F.prelu(x, self.weight)
'''

RRELU = '''\
class ModelNew(nn.Module):  # as compiled above
    def __init__(self, lower=1 / 8, upper=1 / 3):
        super().__init__()
        self.lower = lower
        self.upper = upper

    def forward(self, x):
        if self.training:
            return RReLU.apply(x, torch.randint(2**63 - 1, (1,), device=x.device), self.lower, self.upper)
        mean = (self.lower + self.upper) / 2
        return RReLU.apply(x, x.new_zeros(1, dtype=torch.int64), mean, mean)

class Model(nn.Module):  # as PyTorch has it, which in training draws other slopes
    def __init__(self, lower=1 / 8, upper=1 / 3):
        super().__init__()
        self.lower = lower
        self.upper = upper

    def forward(self, x):
        return F.rrelu(x, self.lower, self.upper, self.training)
'''

XIELU = '''\
class ModelNew(nn.Module):  # as compiled above
    def __init__(self, alpha_p_init=0.8, alpha_n_init=0.8, beta=0.5, eps=-1e-6, dtype=torch.bfloat16):
        super().__init__()
        # The inverse of softplus.
        self.alpha_p = nn.Parameter(torch.tensor([math.log(math.expm1(alpha_p_init))], dtype=dtype))
        self.alpha_n = nn.Parameter(torch.tensor([math.log(math.expm1(alpha_n_init - beta))], dtype=dtype))
        self.register_buffer("beta", torch.tensor(beta, dtype=dtype))
        self.register_buffer("eps", torch.tensor(eps, dtype=dtype))

    def forward(self, x):
        dtype = torch.promote_types(x.dtype, self.alpha_p.dtype)
        return XIELU.apply(*(tensor.to(dtype) for tensor in (x, self.alpha_p, self.alpha_n, self.beta, self.eps)))

class Model(nn.Module):  # as transformers' XIELUActivation has it in PyTorch
    def __init__(self, alpha_p_init=0.8, alpha_n_init=0.8, beta=0.5, eps=-1e-6, dtype=torch.bfloat16):
        super().__init__()
        self.alpha_p = nn.Parameter(torch.tensor([math.log(math.expm1(alpha_p_init))], dtype=dtype))
        self.alpha_n = nn.Parameter(torch.tensor([math.log(math.expm1(alpha_n_init - beta))], dtype=dtype))
        self.register_buffer("beta", torch.tensor(beta, dtype=dtype))
        self.register_buffer("eps", torch.tensor(eps, dtype=dtype))

    def forward(self, x):
        p, n = F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n)
        left = (torch.expm1(torch.min(x, self.eps)) - x) * n + self.beta * x
        return torch.where(x > 0, p * x * x + self.beta * x, left)
'''

# Of the library's own whose constructors are not simply their parameters: the text, and get_init_inputs' list.
OWN = {"prelu": (PRELU, ""), "rrelu": (RRELU, ""), "xielu": (XIELU, "0.8, 0.8, 0.5, -1e-6, torch.float32")}


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
        if record.name in OWN and not isinstance(record, Definition):
            self.text, self.init_inputs = OWN[record.name]
            return
        tensors = [_in_model(name, record) for name in record.layout.tensors]
        helpers: dict[str, str] = {}
        returned = reference(record, [*tensors, *(f"self.{name}" for name in params)], helpers)
        made = [name for name, channel in record.channels.items()]
        sizes = [name for name in made if not record.channels[name].one]
        self.init_inputs = ", ".join("dim" if record.channels[name].dim == -1 else "1" for name in sizes)
        arguments = [*sizes, *(f"{name}={_number(value)}" for name, value in params.items())]
        arguments += ["device=None", "dtype=None"] if made else []
        lines = [f"    def __init__({', '.join(['self', *arguments])}):", "        super().__init__()"]
        lines += [_made(name, record) for name in made]
        lines += [f"        self.{name} = {name}" for name in params] + ["", ""]
        given = [name for name in (*wrapper.elements, *wrapper.broadcast) if name not in record.channels]
        x = wrapper.elements[0]
        own = {name: f"self.{name}.to({x}.dtype)" for name in made}
        calls = [own.get(name, name) for name in (*wrapper.elements, *wrapper.broadcast)]
        before = []
        if wrapper.draws:
            of_none = f" if self.training else {x}.new_zeros(1, dtype=torch.int64)" if passed else ""
            before.append(f"        seed = torch.randint(2**63 - 1, (1,), device={x}.device){of_none}")
            calls.append("seed")
        for name in [*params, *wrapper.numbers[len(params) :]]:
            calls.append(name if name in passed else f"self.{name}")
            if name in passed:
                before.append(f"        {name} = {passed[name]}")
        text = "".join(f"{line}\n" for line in before)
        constructor = "\n".join(lines) if arguments else ""
        forward = f"    def forward({', '.join(['self', *given])}):"
        self.text = (
            f"class ModelNew(nn.Module):  # as compiled above\n{constructor}{forward}\n"
            f"{text}        return {wrapper.title}.apply({', '.join(calls)})\n\n"
            f"class Model(nn.Module):  # as PyTorch has it\n{constructor}{forward}\n{_returned(returned)}\n"
        )
        self.text += "".join(f"\n{text}\n" for text in helpers.values())


def _in_model(name: str, record: Activation) -> str:
    """A tensor in Model: of an expression, values by channel broadcast along their dimension; those by row, along the last."""
    if name in record.source.signature.of("row"):
        return f"{name}.reshape(*{record.layout.tensors[0]}.shape[:-1], 1)"
    channel = record.channels.get(name)
    if channel is None:
        return name
    dim = channel.dim
    if channel.one or dim == -1 or not (isinstance(record, Definition) and record.expression):
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
    values = f"torch.full(({'1' if channel.one else name},), {_number(channel.init)}, device=device, dtype=dtype)"
    if name in record.learned:
        return f"        self.{name} = nn.Parameter({values})"
    return f'        self.register_buffer("{name}", {values})'


def _number(value: float) -> str:
    """A number as Python reads it."""
    return repr(value) if math.isfinite(value) else f'float("{value}")'
