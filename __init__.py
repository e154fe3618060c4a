"""jitact: activation kernels for PyTorch, compiled at first use, at the speed of memory.

``jitact.get("softsign")`` is a module class, ``jitact.softsign(x)`` the function, ``jitact.names()`` what there is.
``jitact.define`` makes your own, ``jitact.replace`` puts them into a model, ``jitact.export`` takes one away as one file.
"""

import warnings
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

from . import registry
from .registry import REGISTRY, get, names

if TYPE_CHECKING:
    from .definitions.define import define, load_folder, save_folder
    from .exporting.onefile import export
    from .gating.generated import gated
    from .magics import load_ipython_extension
    from .measuring.checks import check
    from .plots import plot
    from .replacing.swap import patched, replace, restore

# `python -m jitact.registry` imports this package first, and with it the module that it is about to run, which is no harm.
warnings.filterwarnings("ignore", "'jitact.registry' found in sys.modules", RuntimeWarning)

__version__ = "0.1.0"
__all__ = [
    "REGISTRY",
    "check",
    "define",
    "export",
    "gated",
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
    "check": "measuring.checks",
    "define": "definitions.define",
    "export": "exporting.onefile",
    "gated": "gating.generated",
    "load_folder": "definitions.define",
    "load_ipython_extension": "magics",
    "patched": "replacing.swap",
    "plot": "plots",
    "replace": "replacing.swap",
    "restore": "replacing.swap",
    "save_folder": "definitions.define",
}


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    if not name.startswith("_") and name == name.lower():  # capitals are for classes, which get() gives
        try:
            return registry.function(name)
        except KeyError:
            pass
    # obj=None: else Python would add a suggestion of its own to the one here.
    raise AttributeError(f"module 'jitact' has no attribute {name!r}{_hint(name)}", name=name, obj=None)


def _hint(name: str) -> str:
    """What a name may have been meant to be, to end an error with."""
    if name.startswith("_"):
        return ""
    try:
        return f"; did you mean jitact.{registry.resolve(name)}, the function, or jitact.get({name!r}), the class?"
    except KeyError:
        near = get_close_matches(name.lower(), [*__all__, *names()], n=3)
    meant = f"did you mean {' or '.join(near)}?" if near else f"activations are {', '.join(names())}"
    return f"; {meant}"


def __dir__() -> list[str]:
    return sorted({*__all__, *names(), *(name for name in globals() if name.startswith("__"))})
