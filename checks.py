"""Whether an activation computes what it should: its forward and its gradient beside PyTorch's in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .accuracy import GRADIENT_FLOOR, every_16bit_value, ulp_error, value_and_gradient
from .activations import DTYPES, ActivationModule
from .learned import Learned
from .registry import Named, module_of, record_of
from .report import figure

__all__ = ["Check", "Row", "check"]

SAMPLE = 2**16


@dataclass(frozen=True)
class Limit:
    """What the results of a right formula stay within: it tells right from wrong, not good from better.

    Attributes:
        ulp: the error.
        floor: the magnitude below which an ulp counts as the one there, since what is computed on the way may be larger.
    """

    ulp: float
    floor: float


LIMITS = {
    torch.float64: Limit(2.0**16, 1.0),
    torch.float32: Limit(64, 1.0),
    torch.float16: Limit(2, 2.0**-8),
    torch.bfloat16: Limit(2, 2.0**-8),
}


@dataclass(frozen=True)
class Worst:
    """The largest error among many results.

    Attributes:
        ulp: the error, in units in the last place of the dtype; of a gradient below 2^-8, in those at 2^-8.
        x: the input where it occurs.
        actual: the result there.
        exact: what it should have been.
        wrong: for how many inputs the result is wrong.
    """

    ulp: float
    x: float
    actual: float
    exact: float
    wrong: int


@dataclass(frozen=True)
class Row:
    """What was found for a dtype and what backward keeps; ``forward`` is None where there is nothing to compare with."""

    dtype: torch.dtype
    save: str
    inputs: int
    forward: Worst | None
    gradient: Worst

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.gradient.wrong and not (self.forward and self.forward.wrong)

    @property
    def lossy(self) -> bool:
        """Whether forward is off by far more than its formula need be: small results of subtractions, or vanished ones."""
        return self.forward is not None and self.forward.ulp > LIMITS[self.dtype].ulp


@dataclass(frozen=True)
class Check:
    """The result of :func:`check`; true if all is well. As text, the table."""

    title: str
    method: str
    rows: tuple[Row, ...]

    def __bool__(self) -> bool:
        """Whether all rows passed."""
        return all(row.passed for row in self.rows)

    def __repr__(self) -> str:
        """One line, as the table has been printed."""
        return f"<check of {self.title}: {'passed' if self else 'FAILED'}>"

    def __str__(self) -> str:
        """The table."""
        lines = [self.title, self.method, f"  {'dtype':9} {'keeps':7} {'forward, worst':24} {'gradient, worst':24}"]
        for row in self.rows:
            cells = [_cell(row.forward), _cell(row.gradient)]
            name = str(row.dtype).removeprefix("torch.")
            verdict = "FAIL" if not row.passed else "pass, but loses digits" if row.lossy else "pass"
            lines.append(f"  {name:9} {row.save:7} {cells[0]:24} {cells[1]:24} {verdict}")
            for kind, worst in (("forward", row.forward), ("gradient", row.gradient)):
                if worst and worst.wrong:
                    was = f"{worst.actual:.8g} where it should be {worst.exact:.8g}"
                    lines.append(f"    {kind} at x = {worst.x:.8g} is {was}; {worst.wrong} of {row.inputs} inputs are wrong")
        return "\n".join(lines)


def _cell(worst: Worst | None) -> str:
    if worst is None:
        return "(the yardstick)"
    return f"{figure(worst.ulp)} ulp at {worst.x:.6g}" if worst.ulp else "exact"


def check(
    activation: Named,
    *,
    low: float = -100.0,
    high: float = 100.0,
    dtypes: Iterable[torch.dtype] = DTYPES,
    device: str | torch.device | None = None,
) -> Check:
    """Compares an activation's forward and gradient with its reference in float64, prints a table, and returns it.

    An activation without a reference (one defined by a kernel file that is more than an expression) is compared with its
    own forward in float64, and its gradient with that forward's finite differences, kinks left out.

    A result is wrong if it is further off than rounding explains: by more than :data:`LIMITS`, and by more than a change of
    ``x`` in the last bits of a register makes. A pass that loses digits is a right formula with large relative errors
    somewhere, such as ``x - tanh(x)`` near 0; docs/numerics.md tells what to do about them.

    Args:
        activation: anything that :func:`jitact.get` takes; of a module, the parameters are those checked.
        low: the smallest input.
        high: the largest. 16-bit types are checked on every value between, the others on a sample.
        dtypes: what to check; all four by default.
        device: the GPU by default, if there is one.

    Raises:
        KeyError, TypeError: as :func:`jitact.get`.
        kernels.BuildError: it does not compile.
    """
    module = module_of(activation)
    record, device = record_of(module), default_device(device)
    oracle = _Oracle(module)
    rows = [row for dtype in dtypes for row in _rows(module, _inputs(dtype, low, high, device))]
    settings = ", ".join(f"{name}={value:g}" for (name, _), value in zip(record.params, oracle.params, strict=True))
    title = f"{record.name}{f'({settings})' * bool(settings)}: {record.formula}"
    result = Check(title, f"against {oracle.name}, {low:g} <= x <= {high:g}, on {device}", tuple(rows))
    print(result)
    return result


def default_device(device: str | torch.device | None) -> torch.device:
    """What is asked for, else the GPU, if there is one."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def exact_function(module: ActivationModule) -> Callable[[Tensor], Tensor]:
    """What a module computes, with its parameters, as a function in PyTorch that is exact in float64."""
    record = record_of(module)
    if isinstance(record, Learned) and record.learned:
        weights = [weight.detach() for weight in (*module.parameters(), *module.buffers())]
        return lambda x: record.formula_of(x, *(weight.to(x.device, x.dtype) for weight in weights))
    function, params = record.exact or record.reference, module._params()
    return lambda x: function(x, *params)


def converted(module: ActivationModule, x: Tensor, save: str | None = None) -> ActivationModule:
    """The like of a module for inputs such as ``x``, in eval mode."""
    if isinstance(module.activation, Learned):
        own = copy.deepcopy(module).to(x.device, x.dtype)
        own.save = save
    else:
        variant = module.activation.variant
        chosen = {variant[0]: getattr(module, variant[0])} if variant else {}
        own = type(module)(*module._params(), **chosen, save=save)
    return own.eval()


class _Oracle:
    """What an activation with given parameters should compute, in float64."""

    def __init__(self, module: ActivationModule) -> None:
        record, self.params = record_of(module), module._params()
        self.has_reference = record.has_reference
        self.name = "PyTorch in float64" if self.has_reference else "its own float64, gradient by finite differences"
        self.value = exact_function(module)

    def gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The slope at ``x``, NaN where it cannot tell, and how far from it the true one may be."""
        if not self.has_reference:
            return _finite_differences(self.value, x)
        slope = value_and_gradient(self.value, x)[1]
        if (
            slope.isnan().any()
        ):  # torch.where gives NaN in reverse mode, but not in forward mode, if a branch not taken overflows
            slope = torch.where(slope.isnan(), torch.func.jvp(self.value, (x,), (torch.ones_like(x),))[1], slope)
        return slope, torch.zeros_like(slope)


def _finite_differences(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """The derivative of ``f`` by central differences of fourth order, NaN at kinks, and its error."""
    h = (x.abs() * 2.0**-20).clamp(min=2.0**-13)
    left2, left, middle, right, right2 = (f(x + k * h) for k in (-2, -1, 0, 1, 2))
    near, far = (right - left) / (2 * h), (right2 - left2) / (4 * h)
    truncation, rounding = (near - far).abs(), 8 * torch.finfo(x.dtype).eps * middle.abs() / h
    scale = 1 + near.abs()
    smooth = (truncation < 1e-3 * scale) & (((right - 2 * middle + left) / h).abs() < 1e-2 * scale)
    return ((4 * near - far) / 3).masked_fill(~smooth, torch.nan), truncation + rounding + 1e-7 * scale


def _inputs(dtype: torch.dtype, low: float, high: float, device: torch.device) -> Tensor:
    """Every value of a 16-bit type from ``low`` to ``high``, or of both 16-bit types and evenly spread ones."""
    own = [dtype] if dtype.itemsize == 2 else [torch.float16, torch.bfloat16]
    values = [every_16bit_value(each, device).to(dtype) for each in own]
    if dtype.itemsize > 2:
        generator = torch.Generator(device).manual_seed(0)
        bounds = (max(low, -1e30), min(high, 1e30))
        values.append(torch.empty(SAMPLE, device=device, dtype=dtype).uniform_(*bounds, generator=generator))
    x = torch.cat(values)
    return x[(x >= low) & (x <= high)]


def _rows(module: ActivationModule, x: Tensor) -> Iterable[Row]:
    """A row for each thing that backward can keep."""
    record, exact_x, oracle = record_of(module), x.double(), _Oracle(converted(module, x))
    exact_y = oracle.value(exact_x).detach()
    exact_dx, doubt = (each.detach() for each in oracle.gradient(exact_x))
    yardstick = x.dtype is torch.float64 and not oracle.has_reference
    eps = torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32).eps  # of registers
    for save in dict.fromkeys([module.save or record.saves[0], *record.saves]):
        y, dx = _value_and_gradient(converted(module, x, save), x)
        exact_own = converted(module, exact_x, save)
        beside = [_value_and_gradient(exact_own, exact_x * (1 + step)) for step in (-eps, eps)]
        y_spread, dx_spread = ((a - b).abs() for a, b in zip(*beside, strict=True))
        wanted = exact_dx
        if save == "output" and x.dtype is not torch.float64:  # judged as a function of the y that was kept, which is rounded
            wanted = record.gradient_reference(torch.ones_like(exact_y), y.double(), oracle.params, "output").detach()
        forward = None if yardstick else _worst(x, y, exact_y, y_spread, torch.zeros_like(exact_y), None)
        yield Row(x.dtype, save, x.numel(), forward, _worst(x, dx, wanted, dx_spread, doubt, GRADIENT_FLOOR))


def _value_and_gradient(module: ActivationModule, x: Tensor) -> tuple[Tensor, Tensor]:
    """``module(x)`` and its slope, from gradients of 1 and -1/2 by turns: a backward that is not linear in dy shows."""
    x = x.detach().requires_grad_()
    dy = torch.ones_like(x)
    dy[1::2] = -0.5
    y = module(x)
    return y.detach(), torch.autograd.grad(y, x, dy)[0] / dy


def _worst(x: Tensor, actual: Tensor, exact: Tensor, spread: Tensor, doubt: Tensor, floor: float | None) -> Worst:
    """The largest error beyond ``doubt``, of the wrong results if there are any."""
    limit, off = LIMITS[x.dtype], actual.double() - exact
    beyond = torch.where(off.abs() <= doubt, exact, actual.double() - off.sign() * doubt)
    error = ulp_error(beyond, exact, x.dtype, floor).masked_fill(exact.isnan(), 0.0)
    wrong = (ulp_error(beyond, exact, x.dtype, limit.floor) > limit.ulp) & ~exact.isnan()
    wrong &= ~(off.abs() <= 4 * spread.nan_to_num(nan=0.0, posinf=0.0))
    where = (error.where(wrong, -1.0) if wrong.any() else error).argmax()
    values = (float(each[where]) for each in (error, x, actual, exact))
    return Worst(*values, wrong=int(wrong.sum()))
