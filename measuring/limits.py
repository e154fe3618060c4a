"""The tolerances of all results, and the reason for each. There is no other table of tolerances.

Unless stated otherwise, errors are in units in the last place (ulp) of the dtype, against float64. There are three uses, from
strict to wide: limits for the library's kernels in the tests, limits for them in every measurement, and limits that tell any
correct formula from a wrong one. Tests that compare two ways to one result, such as a model before and after ``replace``, state
their tolerance in place.
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
"""Gradients of 16-bit types smaller than this are measured in the ulp at this magnitude: they are sums of terms of magnitude 1,
each rounded in float32, 2^-24; half an ulp of float16 at 2^-8 is 2^-20."""


@dataclass(frozen=True)
class Bound:
    """The limits of the library's results in a dtype, in ulp.

    Attributes:
        usual: of forward, for all but a share :data:`UNUSUAL` of the inputs.
        forward: of forward, for all inputs.
        gradient: of the gradient with dy = 1, for all inputs.
        floor: exact gradients smaller than this are measured in the ulp at this magnitude.
    """

    usual: float
    forward: float
    gradient: float
    floor: float


UNUSUAL = 0.001  # the share of inputs that may be off by more than Bound.usual

BOUNDS = {
    # Computed in float32 and rounded once: 1/2 ulp, plus the effect of an error of about 2^-21 on results near the midpoint of
    # two numbers. float16 has 3 bits more than bfloat16, so that happens more often.
    torch.float16: Bound(0.55, 1, 1, GRADIENT_FLOOR),
    torch.bfloat16: Bound(0.51, 1, 1, GRADIENT_FLOOR),
    # Two or three roundings of up to 1 ulp each, and a function of 1 to 2 ulp. A gradient is a sum of terms up to about 1, so
    # below 1 its unit is the ulp at 1. There is no usual error, as float32 is not computed in a wider type.
    torch.float32: Bound(math.inf, 4, 8, 1.0),
    # The PyTorch reference is float64 too, with errors as large in tails and differences: this only tells a correct formula
    # from a wrong one.
    torch.float64: Bound(math.inf, 2**16, 2**16, 1.0),
}

OF_GATES = {
    # Gated activations, forward and gradients, where the factors are normal float32 numbers. 16 bits: 1/2 ulp, plus the errors
    # of a function and its slope, below 2^-16, which count 2^-8 of that in bfloat16, and 2^-5 in float16.
    torch.float16: 0.55,
    torch.bfloat16: 0.51,
    # The limit of the activation at the gate, plus two roundings.
    torch.float32: 4.0,
    torch.float64: 2.0**16,
}

OF_ROWS = {
    # The kernels of softmax and its relatives: forward in ulp; gradients, computed from the saved output or from the input, in
    # epsilons of the sum of the magnitudes of their terms, of which half of one is the result's own rounding.
    torch.float16: Bound(0.55, 1, 0.5, 0.0),
    torch.bfloat16: Bound(0.55, 1, 0.5, 0.0),
    torch.float32: Bound(math.inf, 4, 2, 0.0),
}

SMALL_SLOPE = {torch.float16: 2.0**-5, torch.bfloat16: 2.0**-5, torch.float32: 1.0, torch.float64: 1.0}
"""Where the slope at a gate is smaller than this, a gradient's error is measured as if it were this: near its zeros, the slope
is a difference of terms of magnitude 1, each with an error of about 2^-19 in 16 bits."""

TESTED = BOUNDS | {
    # The tests' inputs are dense but not exhaustive, so they miss the worst cases: ulp of smaller slopes count.
    torch.float32: replace(BOUNDS[torch.float32], floor=2.0**-3),
    # The tests leave out the tails in which the reference is inaccurate.
    torch.float64: Bound(math.inf, 2**12, 64, 2.0**-3),
}

TESTED_FROM_OUTPUT = {
    torch.float16: 2.0**-9,
    torch.bfloat16: 2.0**-6,
    torch.float32: 2.0**-21,
    torch.float64: 2.0**-28,
}
"""The same for save="output", as a difference relative to max(1, |gradient|): the output was rounded, by 2^-11 or 2^-8 of it,
times the derivative of the slope with respect to it, up to 4; in float64 the square root of an ulp, as relu2's slope is the
square root of its output."""

OTHER_PARAMETERS = Bound(math.inf, 64, 256, 2.0**-3)
"""float32 with parameters other than the defaults: beta x and alpha x are rounded before they go into an exponent or a sine, of
up to 60, which loses 6 bits; the slope of laplace with sigma = 1/20 loses 2 more."""

DISSOLVED = TESTED[torch.float32].forward * 2
"""float32 in a compiled graph, forward: sums of products are rounded twice; kernels use fma."""

OF_SUMS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 1e-6, torch.float64: 1e-14}
"""A gradient that is summed over the dimensions its operand is broadcast along, relative to the sum of the magnitudes of its
terms: in 16 bits the result's own rounding, half an epsilon; else the rounding of each term and of a tree of sums, 8 and 45
epsilons."""

SURROUNDED = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6, torch.float32: 2.0**-21, torch.float64: 2.0**-50}
"""With a bias, dropout and a residual, relative to 1 + the magnitude of the result: forward; for gradients, sums of up to a few
hundred terms, 32 times as much. The residual may cancel the rest, so the two or four epsilons are relative to the terms rather
than to the result."""

DRAWN = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-7, torch.float64: 1e-15}
"""A random slope times a number, as a relative error: the slope that it is compared with was rounded to the dtype, and so was
the product, half an epsilon each; up to 2 epsilons in float16, 1.3 in bfloat16."""

SHARES_OF_LOGARITHMS = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2e-5, torch.float64: 1e-13}
"""exp(log_softmax), as a relative error: it equals the absolute rounding error of the logarithm, in float32 up to 65 ulp, 8e-6,
at a logarithm of -80, and twice that for a product of two; in 16 bits the result's own rounding is within one epsilon."""

DEFINED_ROWS = {torch.bfloat16: 2, torch.float32: 16, torch.float64: 16}
"""Gradients of users' row activations, in epsilons of the sum of the magnitudes of their terms: exponents, of up to about 20,
are rounded in the compute type first."""


@dataclass(frozen=True)
class Extreme:
    """The limits for extreme values of inputs and parameters. The three allowances add up.

    Attributes:
        ulp: the error in ulp.
        relative: allows the change of the result under a relative change of this size of the input and of each parameter.
        gradient: allows this absolute error of a gradient with dy = 1.
    """

    ulp: float
    relative: float
    gradient: float


EXTREMES = {
    # A few intermediate roundings, in float32 for 16 bits too, change a result as much as a change of its operands by two to
    # four epsilons would, however ill-conditioned the formula is there. Gradients are sums of terms up to about 1, with a few
    # roundings in float32; in 16 bits a 512th of the epsilon.
    torch.float16: Extreme(1.0, 2.0**-22, 2.0**-19),
    torch.bfloat16: Extreme(1.0, 2.0**-22, 2.0**-16),
    torch.float32: Extreme(4.0, 2.0**-22, 2.0**-21),
    torch.float64: Extreme(8.0, 2.0**-50, 2.0**-50),
}


@dataclass(frozen=True)
class Limit:
    """The limit of any correct formula, users' included: it tells correct from wrong, not good from better.

    Attributes:
        ulp: the error in ulp.
        floor: results smaller than this are measured in the ulp at this magnitude, as intermediate values may be larger.
    """

    ulp: float
    floor: float


FORMULA = {
    torch.float64: Limit(2.0**16, 1.0),  # as above: the reference is no more accurate
    torch.float32: Limit(64, 1.0),  # sums and products of a dozen functions, of a few ulp each
    torch.float16: Limit(2, GRADIENT_FLOOR),  # the same errors are far below half an ulp: 1/2, doubled twice for kinks
    torch.bfloat16: Limit(2, GRADIENT_FLOOR),
}
FORMULA_FROM_OUTPUT = FORMULA | {torch.float64: Limit(2.0**24, 1.0)}  # Newton's method finds the input to 1e-8
