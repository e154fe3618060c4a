"""What kernel files use of each other: silu.cu's functions are ``silu_::forward`` and ``silu_::backward`` to another."""

from __future__ import annotations

import re
from functools import lru_cache

from .signature import Signature, code, prepared

__all__ = ["in_namespace", "names_used", "namespace", "prepare_through"]

_USE = re.compile(r"\b([A-Za-z]\w*)_\s*::\s*\w")
_OWN = re.compile(r"\bnamespace\s+(\w+)_\s*[={]")
INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b[^\n]*", re.MULTILINE)
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)


def namespace(name: str) -> str:
    """Where the functions of a kernel file are to others. No function is called like that, so it hides none."""
    return f"{name}_"


@lru_cache(maxsize=256)
def names_used(text: str) -> tuple[str, ...]:
    """The names before ``_::`` in a kernel file, in the order of occurrence, but for namespaces of its own."""
    text = code(text)
    own = set(_OWN.findall(text))
    return tuple(name for name in dict.fromkeys(_USE.findall(text)) if name not in own)


def in_namespace(name: str, text: str, path: str, signature: Signature, used: str = "") -> str:
    """A kernel file as others see it: its text in a namespace, with the functions that ``uses.cuh`` makes of its own.

    Args:
        name: of the file.
        text: of the file.
        path: where compilers report its errors.
        signature: of the file.
        used: what it uses itself, in namespaces.
    """
    gradients = {operand.name: str(g) for g, operand in enumerate(signature.differentiable)}
    slope = "own" if "backward" in signature.functions else "derived"
    if slope == "derived" and "bit" in signature.saves and len(signature.of("element")) == 1:
        slope = "bit"
    arguments = [str(len(gradients)), slope, *(gradients.get(operand.name, "-1") for operand in signature.operands)]
    includes = "\n".join(INCLUDE.findall(text))
    macros = "".join(f"#undef {macro}\n" for macro in dict.fromkeys(_MACRO.findall(text)))
    return f"""{includes}
namespace {namespace(name)} {{
{used}namespace file {{
{line_directive(path)}
{INCLUDE.sub("", text)}
}}
using namespace file;
JITACT_USED({", ".join(arguments)})
}}
{macros}"""


def prepare_through(name: str, text: str, operands: list[tuple[str, str]]) -> str:
    """The ``prepare`` of a file that calls another's functions, of operands by type and name; empty if that has none."""
    if not prepared(text):
        return ""
    changed, given = ", ".join(f"{kind}& {operand}" for kind, operand in operands), ", ".join(each for _, each in operands)
    return f"ELEMENTWISE void prepare({changed}) {{ {namespace(name)}::prepare({given}); }}"


def line_directive(path: str) -> str:
    """What has compilers report errors in the next lines as those of a file."""
    path = path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    return f'#line 1 "{path}"'
