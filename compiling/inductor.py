"""How Inductor gets torch operations in place of operators: before it divides a training graph, or after.

Dividing decides what is kept for backward and what is computed again, by the number of operations among other things. So most
activations are one operation until then, as PyTorch's own are not, and are told to be elementwise. Those of a few operations,
such as relu, are replaced before: what they keep may be a comparison's outcome, of a byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import SymFloat

__all__ = ["dissolve"]


def dissolve(operator: torch._ops.OpOverload, formula: Callable, *, late: bool) -> None:
    """Makes ``formula`` what Inductor compiles in place of an elementwise operator.

    Args:
        operator: of tensors and numbers.
        formula: takes the same; but not ``save`` and ``version``, which are for others.
        late: whether after the graph is divided; before, in any case, where a number is none yet that is known.
    """
    from torch._functorch.partitioners import pointwise_ops
    from torch._inductor.decomposition import decompositions, fast_random_decomps
    from torch._inductor.fx_passes.post_grad import pass_patterns
    from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match, register_graph_pattern

    def early(*operands: Any, save: str = "", version: str = "", **options: int) -> Any:
        if late and not any(isinstance(operand, SymFloat) for operand in operands):
            return NotImplemented
        return formula(*operands, **options)

    # The second table is a copy of the first, made when Inductor first ran.
    decompositions[operator] = fast_random_decomps()[operator] = early
    if late:
        pointwise_ops().append(operator.overloadpacket)

        @register_graph_pattern(CallFunctionVarArgs(operator), pass_dict=pass_patterns[0])
        def expand(match: Match, *operands: Any, save: str = "", version: str = "", **options: int) -> None:
            match.replace_by_example(lambda *values: formula(*values, **options), operands)
