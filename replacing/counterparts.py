"""The counterparts of jitact's activations in PyTorch and transformers: classes, modules with their settings, functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import registry
from ..activations import TABLE
from ..definitions.define import Definition
from ..modules import ActivationModule
from ..rows.modules import COUNTERPARTS

__all__ = [
    "counterpart",
    "counterpart_class",
    "is_activation",
    "reason_to_leave",
    "share_weights",
    "torch_classes",
    "torch_functions",
]

NOT_REPLACED = {"LinearActivation": "the identity: nothing to compute"}  # of transformers


@cache
def _transformers() -> dict[str, str]:
    """Activations by class name of transformers' modules, so that it need not be imported."""
    return {theirs: record.name for record in TABLE for theirs in record.transformers}


def torch_classes() -> dict[type[nn.Module], str]:
    """The ``torch.nn`` classes with a counterpart, and its name."""
    records = [cls.activation for cls in registry.REGISTRY.values() if not isinstance(cls.activation, Definition)]
    return {record.module: record.name for record in records if record.module is not None}


@cache
def torch_functions() -> dict[Callable, tuple[str, bool]]:
    """PyTorch's activation functions, with the name of jitact's, and whether the function works in place."""
    found: dict[Callable, tuple[str, bool]] = {torch.special.expit: ("sigmoid", False), F.threshold: ("threshold", False)}
    for name in (record.name for record in TABLE if record.module is not None):  # their functions take the same arguments
        for owner in (F, torch, Tensor, torch._C._nn):
            for suffix in ("", "_"):
                function = getattr(owner, name + suffix, None)
                if function is not None:
                    found[function] = (name, bool(suffix))
    return {function: ours for function, ours in found.items() if ours[0] in registry.REGISTRY}


def _is_transformers(cls: type) -> bool:
    return cls.__module__ == "transformers.activations"


def is_activation(cls: type[nn.Module]) -> bool:
    """Whether a class of PyTorch or transformers has a counterpart, for some settings at least."""
    return cls in torch_classes() or (_is_transformers(cls) and cls.__name__ not in NOT_REPLACED)


def reason_to_leave(cls: type[nn.Module]) -> str:
    """Why modules of a class that looks like an activation are not replaced; "" for other classes."""
    if cls in COUNTERPARTS:  # which elementwise classes are no counterparts of
        return "works on rows, not on elements"
    if _is_transformers(cls) and cls.__name__ in NOT_REPLACED:
        return NOT_REPLACED[cls.__name__]
    for base in cls.__mro__[1:]:
        if base in torch_classes() or base in COUNTERPARTS or (_is_transformers(base) and base.__name__ in _transformers()):
            return f"is a subclass of {base.__name__}, whose forward may differ"
    looks = cls.__module__ == "torch.nn.modules.activation" and cls is not nn.MultiheadAttention
    return "jitact has no counterpart" if looks else ""


def counterpart_class(cls: type[nn.Module]) -> type[ActivationModule] | None:
    """jitact's class for a class of PyTorch or transformers; None if there is none."""
    name = _transformers().get(cls.__name__, "") if _is_transformers(cls) else torch_classes().get(cls, "")
    return registry.class_of(name) if name in registry.REGISTRY else None


def counterpart(module: nn.Module) -> ActivationModule | None:
    """jitact's module for an activation module, with its settings; None if there is none.

    Raises:
        TypeError, ValueError: jitact's does not accept its settings.
    """
    cls = type(module)
    ours = counterpart_class(cls)
    if ours is None:
        return None
    if _is_transformers(cls):
        clipped_otherwise = cls.__name__ == "ClippedGELUActivation" and (module.min, module.max) != (-10, 10)
        return None if clipped_otherwise else ours()
    signature = ours.activation.signature.parameters
    return ours(**{key: value for key, value in vars(module).items() if key in signature})


def share_weights(new: nn.Module, old: nn.Module) -> None:
    """Makes ``new`` share the parameters and buffers of ``old``: the same tensors, not copies."""
    for name in new._parameters.keys() & old._parameters:
        new._parameters[name] = old._parameters[name]
    for name in new._buffers.keys() & old._buffers:
        new._buffers[name] = old._buffers[name]
