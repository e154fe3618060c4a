"""How far results may be off, and why each number is what it is. There is no other table of tolerances.

Where nothing else is said they count in units in the last place (ulp) of the dtype, beside float64. Three uses, from strict to
wide: what the tests hold the library's kernels to, what every measurement of them holds them to, and what tells any right
formula from a wrong one. Tests that hold two ways to one result beside each other, such as a model before and after
``replace``, say in place how near these are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

__all__ = [
    "BOUNDS",
    "DEFINED_ROWS",
    "DISSOLVED",
    "DRAWN",
    "EXTREMES",
    "FORMULA",
    "FORMULA_FROM_OUTPUT",
    "GRADIENT_FLOOR",
    "OF_GATES",
    "OF_ROWS",
    "OF_SUMS",
    "OTHER_PARAMETERS",
    "SHARES_OF_LOGARITHMS",
    "SMALL_SLOPE",
    "SURROUNDED",
    "TESTED",
    "TESTED_FROM_OUTPUT",
    "UNUSUAL",
    "Bound",
    "Extreme",
    "Limit",
]

GRADIENT_FLOOR = 2.0**-8
"""Where a gradient of a 16-bit type is smaller, its unit is the ulp there: what adds up to it is of the size of 1, and rounded
in float32, 2^-24; half an ulp of float16 at 2^-8 is 2^-20."""


@dataclass(frozen=True)
class Bound:
    """What the library's results in a dtype are held to, in ulp.

    Attributes:
        usual: forward, for all but :data:`UNUSUAL` of the inputs.
        forward: forward, for all of them.
        gradient: with dy = 1, for all of them.
        floor: where the exact gradient is smaller than this, its unit is the ulp at this.
    """

    usual: float
    forward: float
    gradient: float
    floor: float


UNUSUAL = 0.001  # the share of inputs that may be off by more than Bound.usual

BOUNDS = {
    # Computed in float32 and rounded once: 1/2, and what an error of some 2^-21 adds where a result lies near the middle
    # between two numbers. float16 has 3 bits more than bfloat16, so that happens more often.
    torch.float16: Bound(0.55, 1, 1, GRADIENT_FLOOR),
    torch.bfloat16: Bound(0.51, 1, 1, GRADIENT_FLOOR),
    # Two or three roundings, each up to 1, and a function of 1 to 2 ulp. A gradient is a sum of terms up to about 1, so below
    # that its unit is that at 1. There is no usual error: no float32 result is computed in more.
    torch.float32: Bound(math.inf, 4, 8, 1.0),
    # The formula in PyTorch beside which it is held is float64 too, and as wrong in tails and differences: this tells a right
    # formula from a wrong one.
    torch.float64: Bound(math.inf, 2**16, 2**16, 1.0),
}

OF_GATES = {
    # Of gated activations, forward and gradients, where the factors are normal float32 numbers. 16 bits: 1/2, and the errors
    # of a function and its slope, below 2^-16, which count 2^-8 of that in bfloat16, and 2^-5 in float16.
    torch.float16: 0.55,
    torch.bfloat16: 0.51,
    # As of the activation at the gate, and two more roundings.
    torch.float32: 4.0,
    torch.float64: 2.0**16,
}

OF_ROWS = {
    # Of the kernels of softmax and its kin: forward in ulp; gradients, of the output that is kept or of the exact one, in
    # epsilons of the sum of the sizes of their terms: half of one is the result's own rounding.
    torch.float16: Bound(0.55, 1, 0.5, 0.0),
    torch.bfloat16: Bound(0.55, 1, 0.5, 0.0),
    torch.float32: Bound(math.inf, 4, 2, 0.0),
}

SMALL_SLOPE = {torch.float16: 2.0**-5, torch.bfloat16: 2.0**-5, torch.float32: 1.0, torch.float64: 1.0}
"""Where the slope at a gate is smaller, a gradient's error counts as if it were this: where it crosses 0, it is a difference of
terms of the size of 1, each with an error of some 2^-19 in 16 bits."""

TESTED = BOUNDS | {
    # The tests' inputs are dense but not all: they do not meet the very worst, so slopes are held to ulp further down.
    torch.float32: replace(BOUNDS[torch.float32], floor=2.0**-3),
    # They leave out the tails in which the formula beside is no good.
    torch.float64: Bound(math.inf, 2**12, 64, 2.0**-3),
}

TESTED_FROM_OUTPUT = {
    torch.float16: 2.0**-9,
    torch.bfloat16: 2.0**-6,
    torch.float32: 2.0**-21,
    torch.float64: 2.0**-28,
}
"""The same for save="output", as a difference relative to max(1, |gradient|): the output was rounded, by 2^-11 or 2^-8 of it,
times the slope's own change with it, up to 4; of float64 the root of an ulp, as relu2's slope is the root of its output."""

OTHER_PARAMETERS = Bound(math.inf, 64, 256, 2.0**-3)
"""float32 with parameters other than the defaults: beta x and alpha x are rounded before they go into an exponent or a sine, of
up to 60, which loses 6 bits; the slope of laplace with sigma = 1/20 loses 2 more."""

DISSOLVED = TESTED[torch.float32].forward * 2
"""float32 in a compiled graph, forward: sums of products are rounded twice, where kernels have fma."""

OF_SUMS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 1e-6, torch.float64: 1e-14}
"""Of a gradient that is summed over what its operand is broadcast over, in parts of the sum of the sizes of its terms: in 16
bits the result's own rounding, half an epsilon; else that of each term and of a tree of sums, 8 and 45 epsilons."""

SURROUNDED = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6, torch.float32: 2.0**-21, torch.float64: 2.0**-50}
"""With a bias, dropout and a residual, relative to 1 + the size of the result: forward; gradients, which are sums of up to some
hundred terms, 32 times as much. The residual may cancel the rest: two or four epsilons, of the terms rather than the result."""

DRAWN = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-7, torch.float64: 1e-15}
"""Of a random slope times a number, in parts of it: the slope that it is compared with was rounded to the dtype, and so was the
product, half an epsilon each; up to 2 epsilons in float16, 1.3 in bfloat16."""

SHARES_OF_LOGARITHMS = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2e-5, torch.float64: 1e-13}
"""Of an exponential of a logarithm of a row's share, in parts of it: it is off by as much as the logarithm was rounded, in
float32 up to 65 ulp, 8e-6, at a distance of 80, and twice that of a product of two; in 16 bits the result's own rounding is
within one epsilon."""

DEFINED_ROWS = {torch.bfloat16: 2, torch.float32: 16, torch.float64: 16}
"""Gradients of users' activations of rows, in epsilons of the sum of the sizes of their terms: exponents, of up to some 20, are
rounded in the type that is computed in, before they are one in 16 bits."""


@dataclass(frozen=True)
class Extreme:
    """What results are held to for extreme values of inputs and parameters.

    Attributes:
        ulp: the error.
        relative: besides, what comes of so much a relative change of the input and of each parameter.
        gradient: besides, the absolute error of a gradient with dy = 1.
    """

    ulp: float
    relative: float
    gradient: float


EXTREMES = {
    # A few roundings on the way, in float32 for 16 bits too, change a result as much as changing what it is made of by two to
    # four epsilons would, however ill-conditioned the formula is there. Gradients are sums of terms up to about 1, with a few
    # roundings in float32; in 16 bits a 512th of the epsilon.
    torch.float16: Extreme(1.0, 2.0**-22, 2.0**-19),
    torch.bfloat16: Extreme(1.0, 2.0**-22, 2.0**-16),
    torch.float32: Extreme(4.0, 2.0**-22, 2.0**-21),
    torch.float64: Extreme(8.0, 2.0**-50, 2.0**-50),
}


@dataclass(frozen=True)
class Limit:
    """What the results of a right formula stay within, whoever wrote it: it tells right from wrong, not good from better.

    Attributes:
        ulp: the error.
        floor: the magnitude below which an ulp counts as the one there, since what is computed on the way may be larger.
    """

    ulp: float
    floor: float


FORMULA = {
    torch.float64: Limit(2.0**16, 1.0),  # as above: the formula beside is no better
    torch.float32: Limit(64, 1.0),  # sums and products of a dozen functions, of a few ulp each
    torch.float16: Limit(2, GRADIENT_FLOOR),  # the same is far below half an ulp here: 1/2, doubled twice for what meets a kink
    torch.bfloat16: Limit(2, GRADIENT_FLOOR),
}
FORMULA_FROM_OUTPUT = FORMULA | {torch.float64: Limit(2.0**24, 1.0)}  # Newton's method finds the input to 1e-8
