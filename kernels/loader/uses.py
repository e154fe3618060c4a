"""Kernel files that call each other's functions: those of silu.cu are ``silu_::forward`` and ``silu_::backward`` in others."""

from __future__ import annotations

import re
from functools import lru_cache

from .signature import Signature, code, prepared

__all__ = [
    "in_namespace",
    "includes_of",
    "line_directive",
    "names_used",
    "namespace",
    "prepare_through",
    "with_own_macros",
]

_USE = re.compile(r"\b([A-Za-z]\w*)_\s*::\s*\w")
_OWN = re.compile(r"\bnamespace\s+(\w+)_\s*[={]")
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b[^\n]*", re.MULTILINE)
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(if|ifdef|ifndef|elif|else|endif|include)\b(?:\\\n|[^\n])*", re.MULTILINE)
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
    includes = includes_of(used + text)  # all in front, as headers must not be in a namespace
    file = f"""namespace {namespace(name)} {{
{_INCLUDE.sub("", used)}namespace file {{
{line_directive(path)}
{_INCLUDE.sub("", text)}
}}
using namespace file;
JITACT_USED({", ".join(arguments)})
}}"""
    return f"{includes}\n{with_own_macros(text, file)}"


def includes_of(text: str) -> str:
    """The ``#include`` lines of a text, in the conditions around them, except those of macros that the text defines itself."""
    clean = code(text)
    own = set(_MACRO.findall(clean))
    around: list[list[tuple[str, bool]]] = [[]]  # of each #if around, the lines, and whether they are the condition itself
    for match in _DIRECTIVE.finditer(clean):
        line = match[0].rstrip()
        if match[1] == "include":
            around[-1].append((text[match.start() : match.start() + len(line)], False))
            continue
        if match[1] in ("if", "ifdef", "ifndef"):
            around.append([])
        if len(around) > 1:
            around[-1].append((line, True))
        if match[1] == "endif" and len(around) > 1:
            lines = around.pop()
            conditions = [line for line, is_condition in lines if is_condition]
            needless = len(conditions) == len(lines) or own & set(re.findall(r"\w+", " ".join(conditions)))
            around[-1] += [(line, False) for line, is_condition in lines if not (needless and is_condition)]
    return "\n".join(line for lines in around for line, is_condition in lines if not is_condition)


def with_own_macros(text: str, placed: str) -> str:
    """``placed``, which has the file ``text`` in it, and after which the file's macros are what they were before.

    What follows may have variables of their names. Those that a file only defines if they are missing, like M_PI, may be
    others', for whom they are kept.
    """
    text = code(text)
    macros = dict.fromkeys(_MACRO.findall(text))
    others = [macro for macro in macros if re.search(rf"^[ \t]*#[ \t]*if[^\n]*\b{macro}\b", text, re.MULTILINE)]
    before = "".join(f'#pragma push_macro("{macro}")\n' for macro in others)
    after = "".join(f'#pragma pop_macro("{macro}")\n' if macro in others else f"#undef {macro}\n" for macro in macros)
    return f"{before}{placed}\n{after}"


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
