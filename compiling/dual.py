"""Forward-mode derivatives of kernel files that define no gradient: dual numbers made of torch values.

The derivatives of elementary functions are read from ``kernels/device/math_dual.cuh``, so that kernels and the torch operations
that replace them use the same formulas.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ..kernels.loader.signature import split
from ..kernels.loader.source import DEVICE
from .precisions import LN2, Value
from .reader import read

__all__ = ["Dual", "derivative", "of_duals", "times_derivative"]

OF_NUMBERS = ("bool", "int", "double")  # types whose values are constants, without a derivative


@dataclass(frozen=True, eq=False)
class Dual:
    """``value + derivative * epsilon``, with ``epsilon^2 = 0``. The derivative of a constant is the number 0, not a tensor.

    ``by_choice`` tells that it may also be 0 because a constant was chosen, which may be infinite or NaN.
    """

    value: Value
    derivative: Value = 0
    by_choice: bool = False

    def __neg__(self) -> Dual:
        return Dual(-self.value, -self.derivative, self.by_choice)

    def __add__(self, other: Dual | Value) -> Dual:
        other = _dual(other)
        return Dual(self.value + other.value, self.derivative + other.derivative, self.by_choice or other.by_choice)

    def __mul__(self, other: Dual | Value) -> Dual:
        other = _dual(other)
        by_self, by_other = times_derivative(other.value, self.derivative), times_derivative(self.value, other.derivative)
        return Dual(self.value * other.value, by_self + by_other, self.by_choice or other.by_choice)

    def __sub__(self, other: Dual | Value) -> Dual:
        return self + -_dual(other)

    def __rsub__(self, other: Value) -> Dual:
        return -self + other

    __radd__, __rmul__ = __add__, __mul__

    def __lt__(self, other: Dual | Value) -> Tensor | bool:
        return self.value < _dual(other).value

    def __le__(self, other: Dual | Value) -> Tensor | bool:
        return self.value <= _dual(other).value

    def __gt__(self, other: Dual | Value) -> Tensor | bool:
        return self.value > _dual(other).value

    def __ge__(self, other: Dual | Value) -> Tensor | bool:
        return self.value >= _dual(other).value

    def __eq__(self, other: object) -> Tensor | bool:
        return self.value == _dual(other).value

    def __ne__(self, other: object) -> Tensor | bool:
        return self.value != _dual(other).value


def _dual(value: Dual | Value) -> Dual:
    return value if isinstance(value, Dual) else Dual(value)


def derivative(value: Dual | Value) -> Value:
    """The derivative of a result computed from dual numbers; 0 for a plain value, which depends on none of them."""
    return _dual(value).derivative


def _is_constant(dual: Dual) -> bool:
    return not isinstance(dual.derivative, Tensor) and dual.derivative == 0


def times_derivative(slope: Value, derivative: Value) -> Value:
    """One term of the chain rule. It is 0 where ``derivative`` is, even if the slope is infinite or NaN there."""
    if not isinstance(derivative, Tensor):
        return slope * derivative if derivative else 0
    return _unless_zero(derivative, slope * derivative, isinstance(slope, Tensor) or not math.isfinite(slope))


def _unless_zero(derivative: Tensor, made: Tensor, differs: bool) -> Tensor:
    """``made``, but 0 where ``derivative`` is 0. The select is left out unless ``made`` may be something else there."""
    return torch.where(derivative == 0, derivative, made) if differs else made


@cache
def _slopes() -> tuple[str, dict[str, tuple[str, ...]], set[str]]:
    """The derivatives in the header.

    Returns:
        The text of a kernel file of them; the names that it gives those of each function, of which step functions have none;
        and the functions whose derivative is finite for every finite argument.
    """
    header = (DEVICE / "math_dual.cuh").read_text()
    written = re.findall(r"^template <typename T>\nJITACT_INLINE (T \w+\(.*?^\}$)", header, re.MULTILINE | re.DOTALL)
    names, finite = {}, set()
    for kind, line in re.findall(r"^JITACT_CHAIN(_2|_FINITE|_FINITE_BESIDE|)\((.*)\)$", header, re.MULTILINE):
        function, *slopes = map(str.strip, split(line, ","))
        if kind.startswith("_FINITE"):
            finite.add(function)
        taken = "T x, T y" if len(slopes) == 1 else "T a, T b, T y"
        names[function] = tuple(f"{function}_slope_{k}" for k in range(len(slopes)))
        written += [f"T {name}({taken}) {{ return {slope}; }}" for name, slope in zip(names[function], slopes, strict=True)]
    names |= dict.fromkeys(re.findall(r"^JITACT_STEPS\((\w+)\)$", header, re.MULTILINE), ())
    return "\n".join(f"ELEMENTWISE {each}" for each in written), names, finite


def of_duals(functions: Mapping[str, Callable]) -> dict[str, Callable]:
    """The functions that a kernel file may call, for dual numbers; ``functions`` are those for plain values."""
    text, names, finite = _slopes()
    select, divide = functions["select"], functions["divide_T"]
    slopes = read(text, {**functions, "times_derivative": times_derivative})

    def chained(function: str) -> Callable[..., Dual]:
        def of(*arguments: Dual | Value) -> Dual:
            duals = [_dual(argument) for argument in arguments]
            values = [dual.value for dual in duals]
            y, made = functions[function](*values), 0
            if not names[function]:  # a step function, which is constant almost everywhere
                return Dual(y)
            for dual, slope in zip(duals, names[function], strict=True):
                if not _is_constant(dual):
                    by, is_finite = slopes[slope](*values, y), function in finite and not dual.by_choice
                    made = made + (by * dual.derivative if is_finite else times_derivative(by, dual.derivative))
            return Dual(y, made, any(dual.by_choice for dual in duals))

        return of

    def choose(condition: Tensor | bool, a: Dual | Value, b: Dual | Value) -> Dual:
        a, b = _dual(a), _dual(b)
        if _is_constant(a) and _is_constant(b):
            return Dual(select(condition, a.value, b.value))
        by_choice = a.by_choice or b.by_choice or _is_constant(a) or _is_constant(b)
        return Dual(select(condition, a.value, b.value), select(condition, a.derivative, b.derivative), by_choice)

    def quotient(a: Dual | Value, b: Dual | Value) -> Dual:
        a, b = _dual(a), _dual(b)
        q = divide(a.value, b.value)
        difference = a.derivative - times_derivative(q, b.derivative)
        if not isinstance(difference, Tensor):
            return Dual(q, divide(difference, b.value) if difference else 0, a.by_choice or b.by_choice)
        differs = isinstance(b.value, Tensor) or not abs(b.value) > 0
        return Dual(q, _unless_zero(difference, divide(difference, b.value), differs), a.by_choice or b.by_choice)

    def least(a: Dual | Value, b: Dual | Value) -> Dual:
        return choose((_dual(a) < b) | (_dual(a) != a), a, b)

    def most(a: Dual | Value, b: Dual | Value) -> Dual:
        return choose((_dual(a) > b) | (_dual(a) != a), a, b)

    def magnitude(x: Dual | Value) -> Dual:
        x = _dual(x)
        sign = select(x > 0, 1.0, select(x < 0, -1.0, x.value * 0))  # 0 or NaN, without a derivative
        return Dual(functions["abs"](x.value), times_derivative(sign, x.derivative), x.by_choice)

    def signed(size: Dual | Value, sign: Dual | Value) -> Dual:
        size, copysign, sign = magnitude(size), functions["copysign"], _dual(sign).value
        return Dual(copysign(size.value, sign), times_derivative(copysign(1.0, sign), size.derivative), size.by_choice)

    def cdf(x: Dual | Value, *of: Dual | Value) -> Dual:
        z = quotient(_dual(x) - of[0], of[1]) if of else x
        values = [_dual(each).value for each in (x, *of)]
        return replace(chained("normal_cdf")(z), value=functions["normal_cdf"](*values))

    def sigmoid_product(a: Dual | Value, *of: Dual | Value) -> Dual:
        if len(of) == 1:
            return chained("times_sigmoid")(a, *of)
        left, t, low = of
        values = [_dual(each).value for each in (a, t, low)]
        x = _dual(t) + low
        y = functions["times_sigmoid"](values[0], left, *values[1:])
        return replace(chained("times_sigmoid")(a, choose(left, -x, x)), value=y)

    def sigmoid_of_power(x: Dual | Value, *of: Dual | Value) -> Dual:
        if len(of) == 1:
            return chained("x_times_sigmoid")(x, *of)
        t, w, low = of
        values = [_dual(each).value for each in (x, t, w, low)]
        a = choose(_dual(x) < -_dual(t), -_dual(t), x)  # x where both are 0, for its derivative
        y = functions["x_times_sigmoid"](*values)
        return replace(chained("times_sigmoid")(a, a * (_dual(w) + low) * LN2), value=y)

    return {
        **{name: chained(name) for name in names},
        **{name: function for name, function in functions.items() if name.rpartition("_")[2] in OF_NUMBERS},
        "add_T": lambda a, b: _dual(a) + b,
        "subtract_T": lambda a, b: _dual(a) - b,
        "multiply_T": lambda a, b: _dual(a) * b,
        "divide_T": quotient,
        "select_T": choose,
        "select": choose,
        "negate": functions["negate"],
        "T": lambda x: x if isinstance(x, Dual) else functions["T"](x),
        "rest": functions["rest"],
        "min": least,
        "max": most,
        "clamp": lambda x, low, high: least(most(x, low), high),
        "abs": magnitude,
        "folded": lambda x: choose(_dual(x) < 0, -_dual(x), x),
        "right_part": lambda x: choose(_dual(x) < 0, -0.0, x),
        "copysign": signed,
        "isnan": lambda x: _dual(x) != x,
        "fma": lambda a, b, c: _dual(a) * b + c,
        "normal_cdf": cdf,
        "times_sigmoid": sigmoid_product,
        "x_times_sigmoid": sigmoid_of_power,
    }
