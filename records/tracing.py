"""What torch.compile does with functions of this library while it traces others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["as_constant"]

F = TypeVar("F", bound=Callable)


def as_constant(function: F) -> F:
    """Makes torch.compile call a function while it traces others, not trace it, and take its result as a constant.

    As torch.compiler.assume_constant_result, without importing the whole compiler.
    """
    function._dynamo_marked_constant = True
    return function
