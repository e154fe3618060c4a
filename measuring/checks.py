"""``check``: compares the forward and the gradient of an activation with PyTorch's in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from functools import partial
from numbers import Real

import torch
from torch import Tensor

from ..kernels.loader.signature import prepared
from ..modules import ActivationModule, bias_around, drops
from ..records import Activation, is_plain
from ..records.arguments import DTYPES, what_it_is
from ..registry import Named, module_of, record_of
from .limits import FORMULA, FORMULA_FROM_OUTPUT, GRADIENT_FLOOR
from .oracle import Judge, Oracle, check_reference
from .row_checks import check_rows
from .sampling import incoming, inputs, kinks
from .several import fixed_values, in_eval, lines_of_several, named, of_several, surrounded
from .verdicts import FAR, Check, Line, name_of, worst_of

__all__ = ["DTYPES", "check", "check_determined", "check_ends", "converted", "default_device"]


@torch.inference_mode(False)
@torch.enable_grad()
def check(
    activation: Named,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    dtypes: Iterable[torch.dtype] = DTYPES,
    device: str | torch.device | None = None,
) -> Check:
    """Compares an activation's forward and gradients with its reference in float64, prints a table, and returns it.

    An activation without a reference (one defined by a kernel file that is more than an expression) is compared with its
    own forward in float64, and its gradient with finite differences of that forward, kinks left out. With ``save="output"``,
    the gradient is compared with the slope at the input whose exact output is the saved, rounded one.

    If there are several tensors, the first takes the inputs described below, and samples are drawn for the others, for channel
    operands of definitions and for a module's bias. The gradients with respect to all of them are judged, and the worst is
    shown. The activation is checked in evaluation mode, without dropout.

    Softmax and its relatives are judged on random and extreme rows of several lengths. The unit of a gradient's error is then
    the sum of the magnitudes of its terms, times the dtype's epsilon.

    A result is wrong if its error exceeds what rounding explains: both the limit ``FORMULA`` in measuring/limits.py, and the
    change of the result when the last bits of ``x`` in a register change. "pass, but loses digits" means a correct formula
    with large relative errors somewhere, such as ``x - tanh(x)`` near 0; docs/numerics.md has remedies.

    Args:
        activation: anything that :func:`jitact.get` takes, or a name with fused operands, such as "gelu+bias+residual" or
            "swiglu+row_weight"; a module is checked with its parameters.
        low: the smallest input; by default the end of the dtype's range.
        high: the largest. 16-bit types are checked on every value between, wider ones on a sample that includes values near 0,
            near the ends of the range, and near the numbers that occur in the kernel file.
        dtypes: the dtypes to check; by default all four.
        device: by default the GPU, if there is one.

    Returns:
        The result, which is true if every line passed.

    Raises:
        KeyError: as :func:`jitact.get`.
        TypeError: as :func:`jitact.get`; or ``dtypes`` is not a list of supported dtypes, or a bound is not a number.
        ValueError: there are no dtypes, no inputs from ``low`` to ``high``, or the activation is random in evaluation too; or a
            module's weight has several values, as that of ``nn.PReLU(3)``; or ``device`` is none of this machine; or a
            definition's reference returns something else than a tensor of x's shape, or changes its arguments in place.
        kernels.BuildError: the kernel does not compile.
    """
    dtypes, device = _checked(dtypes, low, high), default_device(device)
    result = check_rows(activation, low, high, dtypes, device)
    if result is not None:
        print(result.table)
        return result
    is_named = isinstance(activation, str) and "+" in activation
    module, parts = named(activation) if is_named else (module_of(activation), [])
    check_determined(record_of(module))
    oracle, whole = Oracle(module), surrounded(module, parts)
    record, params = whole or (record_of(module), oracle.params)
    x = torch.ones(3, dtype=torch.float64, device=device)
    check_reference(record.name, record.reference(*[x for _ in record.layout.tensors], *params), x)
    if x._version:
        raise ValueError(
            f"check: the reference of {record.name} changes its arguments in place; it must return a new tensor, as "
            "torch.relu(x) does and torch.relu_(x) does not"
        )
    near = kinks("\n".join(each.text for each in (record.source, *record.source.all_used)), params)
    samples = {dtype: inputs(dtype, low, high, near, device) for dtype in dtypes}
    for dtype, x in samples.items():
        if not x.numel():
            raise ValueError(f"check: there is no {name_of(dtype)} from low={low:g} to high={high:g}")
    judged = partial(_lines, module)
    if of_several(record):
        judged = partial(lines_of_several, *(whole or in_eval(module)), fixed_values(module, record))
    else:
        _check_weights(module)
    lines = tuple(line for x in samples.values() for line in judged(x))
    settings = ", ".join(f"{name}={value:g}" for (name, _), value in zip(record.params, params, strict=True))
    title = f"{record.name}({settings}): {record.formula}" if settings else f"{record.name}: {record.formula}"
    span = "all finite x" if (low, high) == (-math.inf, math.inf) else f"{low:g} <= x <= {high:g}"
    result = Check(title, f"against {oracle.name}, {span}, on {device}", lines, _unseen(module, record, lines, device))
    print(result.table)
    return result


def check_ends(caller: str, low: float, high: float) -> None:
    """Raises TypeError if an end of the range that ``caller`` was given is no number."""
    for name, value in (("low", low), ("high", high)):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{caller}: {name} must be a number, got {value!r}")


def _checked(dtypes: Iterable[torch.dtype], low: float, high: float) -> tuple[torch.dtype, ...]:
    """Validates the arguments, and returns ``dtypes`` as a tuple."""
    choices = ", ".join(map(str, DTYPES))
    if isinstance(dtypes, (torch.dtype, str)) or not isinstance(dtypes, Iterable):
        raise TypeError(f"check: dtypes must be a list, such as [torch.float32], got {dtypes!r}")
    dtypes = tuple(dtypes)
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise TypeError(f"check: dtypes may be {choices}, got {dtype!r}")
    if not dtypes:
        raise ValueError(f"check: there are no dtypes to check; choose from {choices}")
    check_ends("check", low, high)
    if not low <= high:
        raise ValueError(f"check: needs low <= high, got low={low}, high={high}")
    for dtype in dtypes:
        if low > torch.finfo(dtype).max or high < torch.finfo(dtype).min:
            raise ValueError(f"check: there is no {name_of(dtype)} from low={low:g} to high={high:g}")
    return dtypes


def _unseen(module: ActivationModule, record: Activation, lines: tuple[Line, ...], device: torch.device) -> str:
    """What the check does not cover, for the last line of the table."""
    saves = {line.save for line in lines}
    unseen = ["infinite and NaN x or dy", "second derivatives", "in place", "fast_math"]
    unseen += ["most inputs of wider types, which are a sample"] if any(line.dtype.itemsize > 2 for line in lines) else []
    unseen += ["other parameters"] if record.params else []
    unseen += ["gradients of the weights"] if record.channels and (record.module or prepared(record.source.text)) else []
    unseen += ["sums over channels"] if record.channels and not record.module else []
    unseen += ["sums over rows"] if record.source.signature.of("row") else []
    unseen += ["random numbers" if record.fingerprint else "random slopes"] if record.layout.draws else []
    biased = bias_around(module) is not None
    unseen += ["dropout, which is for training"] if drops(module) else []
    why = "which does not give the gradient of the bias" if biased else "which these parameters do not allow"
    unseen += [f'save="{save}", {why}' for save in record.saves if save not in saves]
    unseen += ["the GPU"] if device.type == "cpu" else ["the CPU"] if device.type == "cuda" else []
    untold = max(line.untold for line in lines)
    unseen += [f"gradients of {untold} inputs, at kinks or beyond the range"] if untold else []
    return "; ".join(unseen)


def _check_weights(module: ActivationModule) -> None:
    record = record_of(module)
    for name in record.channels:
        values = getattr(module, name, None)
        if isinstance(values, Tensor) and values.numel() > 1:
            raise ValueError(f"check: {record.name} is checked with a {name} of one value, got a module with {values.numel()}")


def check_determined(record: Activation) -> None:
    """Checks that an activation is deterministic, at least outside of training.

    Raises:
        ValueError: it draws random numbers in evaluation too.
    """
    if record.layout.draws and record.in_eval is None:
        raise ValueError(f"{record.name} draws random numbers outside of training too, so there is nothing to compare it with")


def default_device(device: str | torch.device | None) -> torch.device:
    """``device``, or by default the GPU, if there is one.

    Raises:
        TypeError: it is neither a name nor a torch.device.
        ValueError: it is neither "cpu" nor a GPU of this machine.
    """
    if not isinstance(device, str | torch.device | None):
        raise TypeError(f"device must be a name, as 'cuda:0', or a torch.device; got {what_it_is(device)}")
    gpus = torch.cuda.device_count()
    try:
        chosen = torch.device(device or ("cuda" if gpus else "cpu"))
    except RuntimeError:  # PyTorch knows no such device, and would list all that it was ever built for
        chosen = torch.device("meta")
    if chosen.type != "cpu" and not (chosen.type == "cuda" and (chosen.index or 0) < gpus):
        raise ValueError(f"device must be 'cpu' or a GPU, as 'cuda:0', of which PyTorch sees {gpus}; got {device!r}")
    return chosen


def converted(module: ActivationModule, x: Tensor, save: str | None = None) -> ActivationModule:
    """A copy of a module for the device and dtype of ``x``, in eval mode; a gated one as a function of the gate with up = 1."""
    if module.activation.gating:
        own = copy.deepcopy(module)
        own.save, own.forward = save, lambda x: type(own).forward(own, gate=x, up=torch.ones_like(x))
        return own.eval()
    if not is_plain(module.activation.token):
        own = copy.deepcopy(module).to(x.device, x.dtype).requires_grad_(False)  # or not all that x needs could be kept
        own.save, own.surrounded = save, ()  # the activation alone
    else:
        variant = module.activation.variant
        chosen = {variant[0]: getattr(module, variant[0])} if variant else {}
        own = type(module)(*module._params(), **chosen, save=save)
    return own.eval()


def _lines(module: ActivationModule, x: Tensor) -> Iterable[Line]:
    """A line for each choice of ``save`` that these parameters allow."""
    record, dtype, exact_x, oracle = record_of(module), x.dtype, x.double(), Oracle(converted(module, x))
    exact_y = oracle.value(exact_x).detach()
    exact_dx, doubt = oracle.gradient(exact_x)
    eps = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps  # of registers
    moved = [(oracle.value(at).detach(), oracle.gradient(at)[0]) for at in (exact_x * (1 - eps), exact_x * (1 + eps))]
    y_spread, dx_spread = ((a - b).abs() for a, b in zip(*moved, strict=True))
    if dtype is torch.float64:  # what the oracle's own formula may have overflowed for
        exact_dx = exact_dx.masked_fill(~(exact_dx.isfinite() & exact_y.isfinite()), torch.nan)
        exact_y = exact_y.masked_fill(~exact_y.isfinite(), torch.nan)
    yardstick = dtype is torch.float64 and not oracle.has_reference
    dy, none = incoming(exact_dx, dtype, FORMULA[dtype].floor), torch.zeros_like(exact_y)
    for save in dict.fromkeys([module.save or record.saves[0], *record.saves]):
        if not all(r.holds(*oracle.params) for r in record.requires if r.save == save):
            continue
        y, dx = _value_and_gradient(converted(module, x, save), x, dy)
        wanted, unsure, limit = exact_dx, doubt, FORMULA[dtype]
        if save == "output":
            (wanted, unsure), limit = oracle.gradient_of_output(exact_x, y.double()), FORMULA_FROM_OUTPUT[dtype]
            wanted = wanted.masked_fill(exact_dx.isnan(), torch.nan)
        if dtype in (torch.float32, torch.bfloat16):  # kernels may flush a subnormal x to 0, where the slope may be infinite
            flushed = (exact_x.abs() < torch.finfo(dtype).tiny) & (exact_x != 0) & ~dx.isfinite()
            wanted = wanted.masked_fill(flushed, torch.nan)
        judges = [Judge(exact_y, y_spread, none, FORMULA[dtype], dtype), Judge(wanted, dx_spread, unsure, limit, dtype)]
        far = exact_x.abs() > torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).max ** FAR
        slips = [torch.zeros_like(far), torch.zeros_like(far)]
        if dtype is not torch.float64:  # the kernel in float64 tells a wrong formula from a lack of precision or range
            wide = _value_and_gradient(converted(module, exact_x, save), exact_x, torch.ones_like(exact_x))
            limits = FORMULA[torch.float64], (FORMULA_FROM_OUTPUT if save == "output" else FORMULA)[torch.float64]
            exact = (exact_y, y_spread, none), (exact_dx, dx_spread, doubt)
            slips = [Judge(*e, to, torch.float64).wrong(w) for e, to, w in zip(exact, limits, wide, strict=True)]
            far &= ~(slips[0] | slips[1])
        forward, gradient = (
            worst_of(x, actual, judge, slip, far, floor)[0]
            for actual, judge, slip, floor in zip((y, dx), judges, slips, (None, GRADIENT_FLOOR), strict=True)
        )
        yield Line(dtype, save, x.numel(), None if yardstick else forward, gradient, int(wanted.isnan().sum()))


def _value_and_gradient(module: ActivationModule, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """``module(x)``, and the gradient for ``dy`` divided by that, in float64."""
    x = x.detach().requires_grad_()
    y = module(x)
    return y.detach(), torch.autograd.grad(y, x, dy)[0].double() / dy.double()
