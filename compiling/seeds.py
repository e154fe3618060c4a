"""The operator that draws a seed in graphs of torch.compile: ``jitact::seed(Tensor x, int place=0) -> Tensor``.

To save memory (``activation_memory_budget``, ``aggressive_recomputation``), compilers compute parts of forward again in
backward. They would draw other random numbers then, and gradients would be wrong, so the seed is marked as what is kept. A
place, different for each call in a graph, keeps two calls from being taken for the same value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, track_tensor_tree
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from ..configs import drawn_seed

__all__: list[str] = []


def _marked(mode: ProxyTorchDispatchMode, function: Any, types: Any, args: tuple, kwargs: Any = None) -> Tensor:
    """Traces a call, with a place and with a mark that keeps it from being computed again."""
    tracer = mode.tracer
    args = (args[0], sum(node.target is function for node in tracer.graph.nodes))
    proxy = tracer.create_proxy("call_function", function, pytree.tree_map(tracer.unwrap_proxy, args), {})
    proxy.node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return track_tensor_tree(function(*args), proxy, constant=None, tracer=tracer)


_library = torch.library.Library("jitact", "FRAGMENT")
_library.define("seed(Tensor x, int place=0) -> Tensor", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded))
_library.impl("seed", lambda x, place=0: drawn_seed(x), "CompositeExplicitAutograd")
_library.impl("seed", torch.library.fallthrough_kernel, "Autograd")
_library.impl("seed", lambda x, place=0: x.new_empty((1,), dtype=torch.int64), "Meta")
torch.library.register_torch_dispatch("jitact::seed", ProxyTorchDispatchMode, _marked, lib=_library)
