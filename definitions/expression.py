"""The expressions that :func:`jitact.define` takes: arithmetic in C++'s notation, read here.

A name before a parenthesis is a function, or an activation; others are tensors, or what they are declared to be. What is read
is written twice: in C++, for the compiler to make the kernel of, and in PyTorch, to compare the kernel with.
Every number in it is a number of ``T``. What is made of numbers alone is computed here, in float64, so that both get the same
value, and so that C++'s rules for whole numbers (``1 / 2`` is 0, ``010`` is 8, ``65536 * 65536`` is 0) play no part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from ..fusing.drop import dropped
from ..records import Activation, promoted
from .functions import ARITHMETIC, FUNCTIONS
from .helpers import HELPERS
from .parser import CONSTANTS, DROPOUT, KEEP, ExpressionError, _Parser, bare, in_cpp

__all__ = ["CONSTANTS", "DROPOUT", "FUNCTIONS", "Expression", "ExpressionError", "in_cpp"]


class Expression:
    """A checked expression in some variables. Called with their values, it is evaluated in PyTorch.

    Attributes:
        text: as the user wrote it, on one line.
        elements: the tensors of elements that may occur in it.
        variables: all names that may occur in it: elements, channel operands, parameters, in the order of a call's arguments.
        names: the names that do occur.
        random: the random numbers that it draws, as C++ calls them.
        shares: of what is dropped.
        helpers: those of :data:`HELPERS` that :attr:`python` calls.
        activations: the activations that it calls.
        is_arithmetic: whether it calls, and draws, nothing, but for functions that are an instruction or two.
        python: the same in Python, with the names ``torch``, ``math``, ``dropout`` and those of helpers and activations.
        cpp: the same in C++, where operands but ``x``, ``dy`` and an output ``y`` are called as :func:`in_cpp` says.
        key: equal for expressions that differ in spaces, needless parentheses, the spelling of numbers, or names of variables.
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
        """Reads ``text``, in which these names may occur.

        Args:
            text: the expression.
            elements: the tensors; if left out, all names but those declared here are, ``x`` before the others.
            parameters: numbers.
            channels: operands with a value for each channel.
            random: with ``of_kernel_file``, the names of random numbers.
            of_kernel_file: whether it is what a kernel file's function returns, with names as they are there. What means
                something else in C++ is then no expression, such as a quotient of whole numbers.
            draws: whether ``dropout`` drops anything, else it is its first argument.
            beside: activations that it may call, before those of the registry.

        Raises:
            ExpressionError: ``text`` is not an expression in them.
        """
        if not isinstance(text, str):
            raise TypeError(f"an expression is text, such as 'x * sigmoid(x)', not {text!r}")
        channels, parameters = tuple(channels), tuple(parameters)
        given = None if elements is None else tuple(elements)
        parser = _Parser(text.strip(), given, channels, parameters, tuple(random), of_kernel_file, draws, beside)
        root = parser.number(parser.parse())
        self.text = " ".join(text.split())
        self.elements = parser.elements
        self.variables = self.elements + channels + parameters
        self.names = frozenset(parser.names)
        self.random, self.shares = tuple(parser.drawn), tuple(parser.shares)
        self.helpers = {name: HELPERS[name] for name in HELPERS if name in parser.names}
        self.activations = tuple(parser.activations.values())
        self.is_arithmetic = not (self.activations or self.random or self.names & FUNCTIONS.keys() - ARITHMETIC)
        self.python, self.cpp, self.key = bare(parser.as_tensor(root)), bare(root.cpp), root.key
        names = {"torch": torch, "math": math, DROPOUT: dropped}
        names |= {helper.__name__: helper for helper in self.helpers.values()}
        names |= {activation.python: activation for activation in self.activations}
        arguments = ", ".join([*self.variables, f"{KEEP}=None"] if self.random else self.variables)
        self._function = eval(f"lambda {arguments}: {self.python}", names)
        self._of_one = len(self.elements) == 1 and not channels

    def __call__(self, *values: Tensor | float, keep: Callable[[int, float], Tensor] | None = None) -> Tensor:
        """The expression's value for values of the variables, in their order.

        ``keep`` gives, of a stream of random numbers and a share to drop, what values are multiplied by; else they are drawn.
        """
        value = self.value(*values, keep=keep)
        return value if self._of_one else self._as_elements(value, values[: len(self.elements)])

    def value(self, *values: Tensor | float, keep: Callable[[int, float], Tensor] | None = None) -> Tensor:
        """The same in whatever shape and dtype the operands broadcast to."""
        drawn = {KEEP: keep} if self.random else {}
        return self._function(*[value if isinstance(value, Tensor) else float(value) for value in values], **drawn)

    def _as_elements(self, value: Tensor, elements: tuple[Tensor, ...]) -> Tensor:
        """A value in the shape and dtype of the elements, whatever those of channel operands are."""
        shape = torch.broadcast_shapes(*[each.shape for each in elements])
        value = value.to(promoted(elements))
        return value.expand(shape) if value.dim() <= len(shape) else value.reshape(shape)

    def renamed(self, *names: str) -> str:
        """:attr:`python` with other names for the variables, in their order."""
        new = dict(zip(self.variables, names, strict=True))
        return re.sub(r"(?<![\w.])[A-Za-z_]\w*", lambda name: new.get(name[0], name[0]), self.python)
