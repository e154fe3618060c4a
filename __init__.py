"""jitact: activation kernels for PyTorch, compiled at first use, at the speed of memory.

- ``jitact.gelu(x, bias=b, dropout=0.1, residual=r)`` is a function, ``jitact.get("gelu")`` the ``torch.nn.Module`` class, and
  ``jitact.names()`` lists all activations. ``help(jitact.gelu)`` explains the arguments.
- ``jitact.swiglu(gate, up)`` and others are gated; ``jitact.gated`` makes the gated form of any activation.
- ``jitact.softmax``, ``log_softmax`` and ``softmin`` take a scale and a mask.
- ``jitact.define`` makes your own, ``jitact.check`` compares one with float64, ``jitact.plot`` draws it.
- ``jitact.replace`` puts them into a model, ``jitact.restore`` takes them out, ``jitact.patched`` replaces function calls.
- ``jitact.export`` writes one as a single file. The command ``jitact`` measures, checks, builds and exports.
"""

import sys
import warnings
from difflib import get_close_matches
from importlib import import_module

from . import registry

if sys.argv[:1] == ["-m"]:  # `python -m jitact.registry` imports this package first, and so the module that it then runs
    warnings.filterwarnings("ignore", "'jitact.registry' found in sys.modules", RuntimeWarning)

__version__ = "0.2.0"

# Public names and their modules, imported on first access, so that importing jitact costs little more than importing torch.
# `jitact report` writes __init__.pyi, for type checkers and editors, from this.
PUBLIC = {
    "REGISTRY": "registry",
    "Channel": "records",
    "Row": "records",
    "check": "measuring.checks",
    "define": "definitions.define",
    "export": "exporting.onefile",
    "gated": "gating.generated",
    "get": "registry",
    "load_folder": "definitions.define",
    "load_operators": "compiling.programs",
    "log_softmax": "rows",
    "names": "registry",
    "patched": "replacing.swap",
    "plot": "plots",
    "replace": "replacing.swap",
    "restore": "replacing.swap",
    "save_folder": "definitions.define",
    "softmax": "rows",
    "softmin": "rows",
}
HOOKS = {"load_ipython_extension": "magics"}  # called by %load_ext


def __getattr__(name: str):
    place = PUBLIC.get(name) or HOOKS.get(name)
    if place:
        value = globals()[name] = getattr(import_module(f".{place}", __name__), name)
        return value
    if name == "__all__":  # for `from jitact import *` and help(); not cached, as users define activations
        return sorted({*PUBLIC, *registry.names(), *(cls.activation.name for cls in list(registry.users_rows.values()))})
    # Other names with capitals are classes, which get() returns.
    if not name.startswith("_") and (name == name.lower() or name in registry.names()):
        try:
            return registry.attribute(name)
        except KeyError:
            pass
    # obj=None keeps Python from adding a suggestion of its own.
    raise AttributeError(f"module 'jitact' has no attribute {name!r}{_hint(name)}", name=name, obj=None)


def _hint(name: str) -> str:
    """A suggestion for an unknown name: the end of the error message."""
    if name.startswith("_"):
        return ""
    try:
        return f"; did you mean jitact.{registry.resolve(name)}, the function, or jitact.get({name!r}), the class?"
    except KeyError:
        near = get_close_matches(name.lower(), [*PUBLIC, *registry.names()], n=3)
    meant = f"did you mean {' or '.join(near)}?" if near else f"activations are {', '.join(registry.names())}"
    return f"; {meant}"


def __dir__() -> list[str]:
    facts = [name for name in globals() if name.startswith("__") and name not in ("__getattr__", "__dir__")]
    return sorted({*__getattr__("__all__"), *facts})
