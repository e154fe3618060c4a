"""jitact: activation kernels for PyTorch, compiled at first use, at the speed of memory.

``jitact.get("softsign")`` is a module class, ``jitact.softsign(x)`` the function, ``jitact.names()`` what there is.
"""

from . import registry
from .registry import REGISTRY, get, names

__version__ = "0.1.0"
__all__ = ["REGISTRY", "get", "names", "registry"]


def __getattr__(name: str):
    if name in REGISTRY:
        return registry.function(name)
    raise AttributeError(f"module 'jitact' has no attribute {name!r}; activations are {', '.join(names())}")


def __dir__() -> list[str]:
    return sorted([*globals(), *names()])
