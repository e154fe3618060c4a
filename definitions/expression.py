"""The expressions that :func:`jitact.define` takes: arithmetic in C++ notation.

A name before a parenthesis is a function or an activation; any other name is what it is declared to be, by default a tensor.
An expression is translated twice: to C++, which becomes the kernel, and to PyTorch, which the kernel is compared with.
All numbers are of type ``T``. Constant subexpressions are computed here, in float64, so that both translations get the same
value, and so that C++'s integer rules (``1 / 2`` is 0, ``010`` is 8, ``65536 * 65536`` is 0) do not apply.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from ..fusing.drop import dropped
from ..records import Activation
from ..records.operands import promoted
from .choices import CHOICES, compiled
from .functions import ARITHMETIC, FUNCTIONS
from .helpers import HELPERS
from .parser import parse
from .syntax import CONSTANTS, DROPOUT, KEEP, ExpressionError, in_cpp

__all__ = ["CONSTANTS", "DROPOUT", "FUNCTIONS", "Expression", "ExpressionError", "in_cpp"]


class Expression:
    """A checked expression in some variables. Called with their values, it is evaluated in PyTorch.

    Attributes:
        text: as the user wrote it, on one line.
        elements: the elementwise tensors that may occur in it.
        variables: all names that may occur in it: elements, channel operands, parameters, in the order of a call's arguments.
        names: the names that do occur.
        random: the C++ names of the random numbers that it draws.
        shares: the dropout probabilities that depend on parameters.
        helpers: the entries of :data:`HELPERS` that :attr:`python` calls.
        activations: the activations that it calls.
        is_arithmetic: whether it draws no random numbers and calls no functions beyond those of one or two instructions.
        python: the expression in Python, with the names ``torch``, ``math``, ``dropout`` and those of helpers and activations.
        cpp: the expression in C++, where operands other than ``x``, ``dy`` and an output ``y`` are renamed by :func:`in_cpp`.
        key: a normal form: it does not depend on spaces, needless parentheses, the spelling of numbers, or variable names.
    """

    def __init__(
        self,
        text: str,
        elements: Iterable[str] | None,
        parameters: Iterable[str] = (),
        *,
        channels: Iterable[str] = (),
        random: Iterable[str] = (),
        of_kernel_file: bool = False,
        draws: bool = True,
        beside: Mapping[str, Activation] = MappingProxyType({}),
    ) -> None:
        """Parses ``text``.

        Args:
            text: the expression.
            elements: the names of the elementwise tensors; if None, all names not declared here, ``x`` first.
            parameters: the names of numbers.
            channels: the names of channel and row operands.
            random: with ``of_kernel_file``, the names of random numbers.
            of_kernel_file: whether ``text`` is the return value of a kernel file's function, with the names used there. Then
                what C++ computes differently, such as a quotient of integers, is an error.
            draws: whether ``dropout`` drops; if not, it returns its first argument.
            beside: activations that it may call, which take precedence over the registry's.

        Raises:
            ExpressionError: ``text`` is not an expression in these names.
            TypeError: ``text`` is not a string.
        """
        if not isinstance(text, str):
            raise TypeError(f"an expression is text, such as 'x * sigmoid(x)', not {text!r}")
        channels, parameters = tuple(channels), tuple(parameters)
        given = None if elements is None else tuple(elements)
        parsed = parse(text.strip(), given, channels, parameters, tuple(random), of_kernel_file, draws, beside)
        self.text = " ".join(text.split())
        self.elements, self.names, self.random, self.shares, self.activations, self.python, self.cpp, self.key = parsed
        self.variables = self.elements + channels + parameters
        self.helpers = {name: HELPERS[name] for name in HELPERS if name in self.names}
        self.is_arithmetic = not (self.activations or self.random or self.names & FUNCTIONS.keys() - ARITHMETIC)
        names = {"torch": torch, "math": math, DROPOUT: dropped, **CHOICES}
        names |= {helper.__name__: helper for helper in self.helpers.values()}
        names |= {activation.python: activation for activation in self.activations}
        arguments = ", ".join([*self.variables, f"{KEEP}=None"] if self.random else self.variables)
        code = compiled(f"lambda {arguments}: {self.python}", {*self.elements, *channels}, draws=bool(self.random))
        self._function = eval(code, names)
        self._of_one = len(self.elements) == 1 and not channels

    def __call__(self, *values: Tensor | float, keep: Callable[[int, float], Tensor] | None = None) -> Tensor:
        """Evaluates the expression in PyTorch for values of the variables, in their order.

        ``keep(stream, p)`` returns a dropout's factors, from the index of its random numbers and its probability; without it,
        they are drawn.
        """
        value = self.value(*values, keep=keep)
        return value if self._of_one else self._as_elements(value, values[: len(self.elements)])

    def value(self, *values: Tensor | float, keep: Callable[[int, float], Tensor] | None = None) -> Tensor:
        """The value in the shape and dtype that all operands, including channel operands, broadcast and promote to."""
        drawn = {KEEP: keep} if self.random else {}
        return self._function(*[value if isinstance(value, Tensor) else float(value) for value in values], **drawn)

    def _as_elements(self, value: Tensor, elements: tuple[Tensor, ...]) -> Tensor:
        """A value expanded to the shape, and converted to the dtype, of the elementwise tensors."""
        shape = torch.broadcast_shapes(*[each.shape for each in elements])
        value = value.to(promoted(elements))
        return value.expand(shape) if value.dim() <= len(shape) else value.reshape(shape)

    def renamed(self, *names: str) -> str:
        """:attr:`python` with the variables renamed to ``names``, in their order."""
        new = dict(zip(self.variables, names, strict=True))
        return re.sub(r"(?<![\w.])[A-Za-z_]\w*", lambda name: new.get(name[0], name[0]), self.python)
