"""jitact: activation kernels for PyTorch, compiled at first use, at the speed of memory.

``jitact.get("softsign")`` is a module class, ``jitact.softsign(x)`` the function, ``jitact.names()`` what there is.
``jitact.define`` makes your own, ``jitact.replace`` puts them into a model, ``jitact.export`` takes one away as one file.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

from . import registry
from .registry import REGISTRY, get, names

if TYPE_CHECKING:
    from .checks import check
    from .definitions import define, load_folder, save_folder
    from .magics import load_ipython_extension
    from .onefile import export
    from .plots import plot
    from .swap import patched, replace, restore

# `python -m jitact.registry` imports this package first, and with it the module that it is about to run, which is no harm.
warnings.filterwarnings("ignore", "'jitact.registry' found in sys.modules", RuntimeWarning)

__version__ = "0.1.0"
__all__ = [
    "REGISTRY",
    "check",
    "define",
    "export",
    "get",
    "load_folder",
    "load_ipython_extension",
    "names",
    "patched",
    "plot",
    "registry",
    "replace",
    "restore",
    "save_folder",
]

# Imported when they are first asked for, so that importing jitact costs little more than importing torch.
_LAZY = {
    "check": "checks",
    "define": "definitions",
    "export": "onefile",
    "load_folder": "definitions",
    "load_ipython_extension": "magics",
    "patched": "swap",
    "plot": "plots",
    "replace": "swap",
    "restore": "swap",
    "save_folder": "definitions",
}


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    if name in REGISTRY:
        return registry.function(name)
    raise AttributeError(f"module 'jitact' has no attribute {name!r}; activations are {', '.join(names())}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *names()})
