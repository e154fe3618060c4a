"""The functions of kernel files as torch operations; ``kernels/device/math.cuh`` documents what each computes, and its domain.

Values are tensors, or Python numbers if they depend on no tensor: literals, parameters, and results computed from those.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from ctypes import c_float

import torch
from torch import Tensor

from ..records.dtypes import wider
from .precisions import Narrow, Single, Value, Wide, least, most

__all__ = ["functions"]


def functions(dtype: torch.dtype, device: torch.device, *, fast_math: bool = False) -> dict[str, Callable]:
    """The functions that a kernel file may call, by name, for elements of ``dtype``. 16-bit types are computed in float32."""
    computed = wider(dtype)
    new = functools.partial(torch.full, (), dtype=computed, device=device)
    of = Wide if computed is torch.float64 else Narrow if dtype.itemsize == 2 or fast_math else Single
    found = {name: getattr(of, name) for name in dir(of) if not name.startswith("_")}
    order = {"min": least, "max": most, "clamp": lambda x, low, high: least(most(x, low), high)}
    order["right_part"] = lambda x: most(x, -0.0)
    called = {name: _with_numbers(each, new) for name, each in found.items()}
    return called | order | _language(new) | _of_gates(new, called)


def _with_numbers(function: Callable[..., Tensor], new: Callable[[float], Tensor]) -> Callable[..., Tensor]:
    """``function`` with numbers converted to tensors."""

    @functools.wraps(function)
    def with_numbers(*values: Tensor | float) -> Tensor:
        return function(*[value if isinstance(value, Tensor) else new(value) for value in values])

    return with_numbers


def _language(new: Callable[[float], Tensor]) -> dict[str, Callable]:
    """The functions that the reader calls for C++'s operators, by the type that they compute in, and for its conversions.

    Constants are computed as Python numbers; those of type ``T`` are rounded to it.
    """
    computed, dtypes = new.keywords["dtype"], {"bool": torch.bool, "int": torch.int32, "double": torch.float64}

    def rounded(a: float) -> float:
        return c_float(a).value if computed is torch.float32 else float(a)

    def of_t(a: Value) -> Value:
        if not isinstance(a, Tensor):
            return rounded(a)
        return torch.where(a, new(1), 0.0) if a.dtype is torch.bool else a.to(computed)

    def rest(rounded: float, a: float) -> float:
        return of_t(a - rounded)

    def negate(condition: Tensor | bool) -> Tensor | bool:
        return ~condition if isinstance(condition, Tensor) else not condition

    language = {"select": _selection(new), "negate": negate, "T": of_t, "rest": rest}
    language |= {f"{name}_T": function for name, function in _arithmetic(rounded).items()} | {"select_T": language["select"]}
    for type_, dtype in dtypes.items():
        number = {"bool": bool, "int": int, "double": float}[type_]
        language[type_] = functools.partial(_converted, dtype, number)
        language[f"select_{type_}"] = _selection(functools.partial(new, dtype=dtype))
        language |= {f"{name}_{type_}": function for name, function in _arithmetic(number).items()}
    return language


def _converted(dtype: torch.dtype, number: Callable[[float], float], a: Value) -> Value:
    return a.to(dtype) if isinstance(a, Tensor) else number(a)


def _selection(new: Callable[[float], Tensor]) -> Callable[..., Value]:
    def select(condition: Tensor | bool, a: Value, b: Value) -> Value:
        if isinstance(condition, bool):
            return a if condition else b
        return torch.where(condition, a if isinstance(a, Tensor) or isinstance(b, Tensor) else new(a), b)

    return select


def _arithmetic(rounded: Callable[[float], float]) -> dict[str, Callable[..., Value]]:
    """Sums, differences, products and quotients; ``rounded`` converts those of constants to their type."""

    def of(function: Callable[[Value, Value], Value]) -> Callable[[Value, Value], Value]:
        def of_both(a: Value, b: Value) -> Value:
            y = function(a, b)
            return y if isinstance(y, Tensor) else rounded(y)

        return of_both

    return {"add": of(operator.add), "subtract": of(operator.sub), "multiply": of(operator.mul), "divide": of(quotient_of)}


def quotient_of(a: Value, b: Value) -> Value:
    """a / b. A tensor divided by a number is multiplied by its reciprocal, in two steps where that could over- or underflow.

    For 0 the reciprocal is an infinity of its sign, which gives C's result.
    """
    if isinstance(b, Tensor):
        return a / b
    if not isinstance(a, Tensor):
        return a / b if b else a * math.copysign(math.inf, b)
    if b == 0 or 2.0**-100 < abs(b) < 2.0**100:
        return a * (1 / b if b else math.copysign(math.inf, b))
    step = 2.0**64 if abs(b) < 1 else 2.0**-64
    return a * step * (1 / (b * step))


def _of_gates(new: Callable[[float], Tensor], called: dict[str, Callable]) -> dict[str, Callable]:
    """The functions of gated.cuh and capped.cuh, without the compensation of rounding errors that kernels have in float32."""

    def product(a: Tensor, b: Tensor, c: Tensor, *others: Tensor) -> Tensor:
        c = c * others[0] if others else c
        in_order = a.abs() >= b.abs()
        large, small = torch.where(in_order, a, b), torch.where(in_order, b, a)
        smallest = small.abs() <= c.abs()
        return large * torch.where(smallest, small, c) * torch.where(smallest, c, small)

    def capped(x: Tensor, c: Tensor, t: Tensor) -> Tensor:
        return torch.where(x.abs() < 2.0**-100 * c, x, c * t)  # x / c may underflow where x does not

    def tanh_slope(q: Tensor, t: Tensor) -> Tensor:
        return torch.where(t.abs() < 0.7, 1 - t * t, called["tanh_slope"](q))

    def capped_product(gate: Tensor, up: Tensor, beta: Tensor, beta2: Tensor) -> Tensor:
        t, t2 = (called["tanh"](x * called["one_over"](c)) for x, c in ((gate, beta), (up, beta2)))
        act = called["times_sigmoid"](capped(gate, beta, t), most(gate, -1000.0))
        return act * torch.where(beta2 == 0, up, capped(up, beta2, t2))

    def capped_gradients(dy: Tensor, gate: Tensor, up: Tensor, beta: Tensor, beta2: Tensor) -> tuple[Tensor, Tensor]:
        q, q2 = gate * called["one_over"](beta), up * called["one_over"](beta2)
        t, t2 = called["tanh"](q), called["tanh"](q2)
        held, a = most(gate, -1000.0), capped(gate, beta, t)
        slope = called["times_sigmoid"](a * called["sigmoid"](-gate) + tanh_slope(q, t), held)
        by_gate = product(dy, torch.where(beta2 == 0, up, capped(up, beta2, t2)), slope)
        act = called["times_sigmoid"](a, held)
        return by_gate, product(dy, act, torch.where(beta2 == 0, 1.0, tanh_slope(q2, t2)))

    product = _with_numbers(product, new)
    return {
        "capped_product": _with_numbers(capped_product, new),
        "capped_gradients": _with_numbers(capped_gradients, new),
        "product": product,
        "rounded": lambda v: v,
        "into_gate": lambda dy, up: new(1),
        "from_gate": lambda slope, dy, up: product(dy, up, slope),
        "times_normal_tail_closely": called["times_normal_tail"],
        "one_over_one_plus": lambda e: called["reciprocal"](1 + e),
        "x_times_sigmoid_slope_closely": called["x_times_sigmoid_slope"],
    }
