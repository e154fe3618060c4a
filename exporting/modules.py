"""The modules of a file: ``ModelNew``, which calls what is compiled, and ``Model``, PyTorch's."""

from __future__ import annotations

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Callable
from types import FunctionType, ModuleType

import torch
import torch.nn.functional as F

from ..definitions.define import Definition
from ..records import Activation
from .wrapper import LONGEST, Wrapper

__all__ = ["Modules"]

PRELU = '''\
class ModelNew(nn.Module):
    """PReLU, as compiled above."""

    def __init__(self, num_parameters=1, init=0.25, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.full((num_parameters,), init, device=device, dtype=dtype))

    def forward(self, x):
        return PReLU.apply(x, self.weight.to(x.dtype))


class Model(nn.Module):
    """PReLU, as PyTorch has it."""

    def __init__(self, num_parameters=1, init=0.25, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.full((num_parameters,), init, device=device, dtype=dtype))

    def forward(self, x):
        return F.prelu(x, self.weight)
'''

RRELU = '''\
class ModelNew(nn.Module):
    """RReLU, as compiled above."""

    def __init__(self, lower=1 / 8, upper=1 / 3):
        super().__init__()
        self.lower = lower
        self.upper = upper

    def forward(self, x):
        if self.training:
            return RReLU.apply(x, torch.randint(2**63 - 1, (1,), device=x.device), self.lower, self.upper)
        mean = (self.lower + self.upper) / 2
        return RReLU.apply(x, x.new_zeros(1, dtype=torch.int64), mean, mean)


class Model(nn.Module):
    """RReLU, as PyTorch has it, which in training draws other slopes."""

    def __init__(self, lower=1 / 8, upper=1 / 3):
        super().__init__()
        self.lower = lower
        self.upper = upper

    def forward(self, x):
        return F.rrelu(x, self.lower, self.upper, self.training)
'''

XIELU = '''\
class ModelNew(nn.Module):
    """xIELU, as compiled above."""

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


class Model(nn.Module):
    """xIELU, as transformers' XIELUActivation has it in PyTorch."""

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


_MODULES = ("torch", "math", "F")  # that a file imports under these names


class Modules:
    """What a file has of an activation's modules.

    Args:
        record: the activation.
        params: its parameters, the defaults in the file.
        wrapper: what the file calls.

    Raises:
        ValueError: nothing tells what PyTorch's counterpart is.
    """

    def __init__(self, record: Activation, params: dict[str, float], wrapper: Wrapper) -> None:
        """Writes the modules."""
        if record.name in OWN and not isinstance(record, Definition):
            self.text, self.init_inputs = OWN[record.name]
            return
        reference, helpers = _reference(record)
        made = [name for name, channel in record.channels.items()]
        sizes = [name for name in made if not record.channels[name].one]
        self.init_inputs = ", ".join("dim" if record.channels[name].dim == -1 else "1" for name in sizes)
        arguments = [*sizes, *(f"{name}={_number(value)}" for name, value in params.items())]
        arguments += ["device=None", "dtype=None"] if made else []
        lines = [f"    def __init__({', '.join(['self', *arguments])}):", "        super().__init__()"]
        lines += [_made(name, record) for name in made]
        lines += [f"        self.{name} = {name}" for name in params] + ["", ""]
        given = [name for name in (*wrapper.elements, *wrapper.broadcast) if name not in record.channels]
        own = {name: f"self.{name}.to({wrapper.elements[0]}.dtype)" for name in made} | {
            name: f"self.{name}" for name in params
        }
        calls = [own.get(name, name) for name in (*wrapper.elements, *wrapper.broadcast)]
        calls += ["torch.randint(2**63 - 1, (1,), device=x.device)"] * wrapper.draws
        calls += [f"self.{name}" for name in params]
        constructor = "\n".join(lines) if arguments else ""
        forward = f"    def forward({', '.join(['self', *given])}):"
        self.text = (
            f'class ModelNew(nn.Module):\n    """{record.title}, as compiled above."""\n\n{constructor}{forward}\n'
            f"        return {wrapper.title}.apply({', '.join(calls)})\n\n\n"
            f'class Model(nn.Module):\n    """{record.title}, as PyTorch has it."""\n\n{constructor}{forward}\n'
            f"{_returned(reference)}\n"
        )
        if helpers:
            self.text += f"\n\n{helpers.rstrip()}\n"


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


def _reference(record: Activation) -> tuple[str, str]:
    """Model's expression in PyTorch, and the helpers that it calls."""
    tensors = [f"self.{name}" if name in record.channels else name for name in record.source.signature.tensors]
    own = [*tensors, *(f"self.{name}" for name, _ in record.params)]
    expression = record.expression if isinstance(record, Definition) else None
    if expression:
        if expression.activations:
            called = ", ".join(each.name for each in expression.activations)
            raise ValueError(f"{record.name} cannot be exported: it calls {called}; write out what they compute")
        helpers = "".join(f"{inspect.getsource(helper)}\n\n" for helper in expression.helpers.values())
        return expression.renamed(*own), re.sub(r": Tensor(?: \| float)?| -> Tensor", "", helpers)
    if getattr(F, record.name, None) is record.reference:
        return f"F.{record.name}({', '.join(own)})", ""
    if getattr(torch, record.name, None) is record.reference:
        return f"torch.{record.name}(x)", ""
    line = _one_line(record, own)
    if line:
        return line, ""
    helpers: dict[str, str] = {}
    if not _add_helper(record.reference, helpers):
        what = f"{record.name} cannot be exported without a PyTorch counterpart"
        raise ValueError(f"{what}: define it with reference=, one line, or a function of torch's alone")
    return f"{record.reference.__name__}({', '.join(own)})", "".join(f"{text}\n\n\n" for text in helpers.values())


def _definition(function: Callable) -> ast.Lambda | ast.FunctionDef | None:
    """The one function in the source that a function comes from."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    found = [node for node in ast.walk(tree) if isinstance(node, (ast.Lambda, ast.FunctionDef))]
    return found[0] if len(found) == 1 else None


def _one_line(record: Activation, arguments: list[str]) -> str | None:
    """What a reference that only returns something returns, with the numbers that it has from its module."""
    function = record.reference
    found = _definition(function)
    if found is None:
        return None
    body = found.body if isinstance(found.body, list) else [ast.Return(found.body)]
    body = [node for node in body if not isinstance(node, ast.Expr)]  # a docstring
    if len(body) != 1 or not isinstance(body[0], ast.Return):
        return None
    names = dict(zip([argument.arg for argument in found.args.args], arguments, strict=False))
    numbers = {name: value for name, value in function.__globals__.items() if isinstance(value, (int, float))}
    python = _renamed(ast.unparse(body[0].value), names, numbers)
    known = {"self", *_MODULES, *arguments}
    return None if {node.id for node in ast.walk(ast.parse(python)) if isinstance(node, ast.Name)} - known else python


def _add_helper(function: object, helpers: dict[str, str]) -> bool:
    """Adds a function as a file has it, and those of Python that it calls; False where it cannot stand in one."""
    found = _definition(function) if isinstance(function, FunctionType) else None
    if not isinstance(found, ast.FunctionDef):
        return False
    helpers.setdefault(found.name, "")
    found.returns = None
    found.body = [node for node in found.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    local = {argument.arg for argument in found.args.args}
    local |= {node.id for node in ast.walk(found) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for argument in found.args.args:
        argument.annotation = None
    space, called = function.__globals__, {}

    class Written(ast.NodeTransformer):
        def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
            module = space.get(node.value.id) if isinstance(node.value, ast.Name) else None
            if isinstance(module, ModuleType) and node.value.id not in _MODULES:  # of another module of the package
                called[node.attr] = getattr(module, node.attr)
                return ast.Name(node.attr)
            return self.generic_visit(node)

        def visit_Name(self, node: ast.Name) -> ast.AST:
            value = space.get(node.id)
            if node.id in local or node.id in _MODULES or value is None:
                return node
            if isinstance(value, (int, float)):
                return ast.Constant(value)
            called[node.id] = value
            return node

    helpers[found.name] = ast.unparse(ast.fix_missing_locations(Written().visit(found)))
    return all(name in helpers or _add_helper(each, helpers) for name, each in called.items())


def _renamed(python: str, names: dict[str, str], numbers: dict[str, float]) -> str:
    """An expression with other names for variables, and numbers for names of numbers."""

    class Rename(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            if node.id in names:
                return ast.Name(names[node.id])
            return ast.Constant(numbers[node.id]) if node.id in numbers else node

    return ast.unparse(Rename().visit(ast.parse(python, mode="eval")))
