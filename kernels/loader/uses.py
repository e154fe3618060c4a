"""Kernel files that call each other's functions: those of silu.cu are ``silu_::forward`` and ``silu_::backward`` in others."""

from __future__ import annotations

import re
from functools import lru_cache

from .signature import Signature, code, prepared

__all__ = ["INCLUDE", "in_namespace", "line_directive", "names_used", "namespace", "prepare_through", "without_macros"]

_USE = re.compile(r"\b([A-Za-z]\w*)_\s*::\s*\w")
_OWN = re.compile(r"\bnamespace\s+(\w+)_\s*[={]")
INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b[^\n]*", re.MULTILINE)
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)


def namespace(name: str) -> str:
    """The namespace of a kernel file's functions in other files. The underscore avoids clashes with functions."""
    return f"{name}_"


@lru_cache(maxsize=256)
def names_used(text: str) -> tuple[str, ...]:
    """The names before ``_::`` in a kernel file, in order of occurrence, except its own namespaces."""
    text = code(text)
    own = set(_OWN.findall(text))
    return tuple(name for name in dict.fromkeys(_USE.findall(text)) if name not in own)


def in_namespace(name: str, text: str, path: str, signature: Signature, used: str = "") -> str:
    """A kernel file for use by others: its text in a namespace, with the functions that ``uses.cuh`` derives from its own.

    Args:
        name: the file's name.
        text: the file's text.
        path: the file's path in errors of compilers.
        signature: the file's declarations.
        used: the text of the files that it uses itself, in namespaces.
    """
    gradients = {operand.name: str(g) for g, operand in enumerate(signature.differentiable)}
    slope = "own" if "backward" in signature.functions else "derived"
    if slope == "derived" and "bit" in signature.saves and len(signature.of("element")) == 1:
        slope = "bit"
    arguments = [str(len(gradients)), slope, *(gradients.get(operand.name, "-1") for operand in signature.operands)]
    includes = "\n".join(INCLUDE.findall(used + text))  # all in front, as headers must not be in a namespace
    return f"""{includes}
namespace {namespace(name)} {{
{INCLUDE.sub("", used)}namespace file {{
{line_directive(path)}
{INCLUDE.sub("", text)}
}}
using namespace file;
JITACT_USED({", ".join(arguments)})
}}
{without_macros(text)}"""


def without_macros(text: str) -> str:
    """Directives that end the macros that a text defines, of whose names what follows may have variables."""
    return "".join(f"#undef {macro}\n" for macro in dict.fromkeys(_MACRO.findall(text)))


def prepare_through(name: str, text: str, operands: list[tuple[str, str]]) -> str:
    """A ``prepare`` that calls that of the used file, for operands given as (type, name); empty if that file has none."""
    if not prepared(text):
        return ""
    changed, given = ", ".join(f"{kind}& {operand}" for kind, operand in operands), ", ".join(each for _, each in operands)
    return f"ELEMENTWISE void prepare({changed}) {{ {namespace(name)}::prepare({given}); }}"


def line_directive(path: str) -> str:
    """The #line directive with which compilers report errors in the following lines as in ``path``."""
    path = path.encode(errors="replace").decode()  # a path that is not UTF-8
    path = path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    return f'#line 1 "{path}"'
