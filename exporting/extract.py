"""Extracts what a kernel file needs from the library's headers, reduced to what is called, for exported files."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from ..kernels.loader.source import DEVICE, KernelSource
from .conditions import Facts
from .cpp import Block, Node, bare, parse
from .cut import simplified, tidied, without_empty_conditions
from .items import KERNEL, TYPES, Item, class_block, goes_with, is_class, is_function, names_of
from .lines import joined
from .members import drop_members
from .preprocess import Line, Macro, expanded, included

__all__ = ["Extract", "extract"]

_STORED = {"Dtype::f64": "double", "Dtype::f32": "float", "Dtype::f16": "Half", "Dtype::bf16": "Bfloat16"}
_COMPUTED = {"Dtype::f64": "Double", "Dtype::f32": "Single", "Dtype::f16": "Narrow", "Dtype::bf16": "Narrow"}
_LOOPS = ("jitact::loops", "jitact::rows")  # namespaces that use the kernel file's functions
_SHARED = ("Elements", "Broadcasts", "Call", "Operands")  # the structs of a call
_USING = re.compile(r"using jitact::\w+;?$")  # makes a name of the library visible in kernel files
_TOGETHER = 2  # line breaks in a declaration that needs no blank line before it
_STANDARD = {  # standard headers, and what uses them
    "sys/mman.h": r"\bmadvise\b",
    "algorithm": r"\bstd::(?:min|max|clamp|copy|fill)\b",
    "utility": r"\bstd::(?:\w*index_sequence|declval|integral_constant)",
    "cmath": r"\bstd::is(?:nan|inf|finite)\b|\b(?:f?abs|copysign|fma|sqrt|exp|log)f?\b|INFINITY|NAN",
    "cstring": r"\bmem\w+\b",
    "type_traits": r"_[vt]<|\bstd::type_identity",
}


class Extract(NamedTuple):
    """The extracted source.

    Attributes:
        text: C++ and CUDA, in the order in which it is compiled; for two devices, with ``#ifdef __CUDACC__``.
        structs: the members of ``Call`` and of the structs in it: type, name and, for arrays, length.
    """

    text: str
    structs: dict[str, list[tuple[str, str, str]]]


def extract(
    source: KernelSource, facts: Facts, roots: Collection[str], dtypes: Collection[str], devices: Collection[str]
) -> Extract:
    """The parts of the library's headers and of a kernel file that ``roots`` need.

    Args:
        source: the kernel file.
        facts: the known values of names in conditions.
        roots: functions that are called from outside.
        dtypes: of elements, as enumerators of ``Dtype``.
        devices: "cuda", "cpu" or both.
    """
    items: list[Item] = []
    roots = set(roots)
    known = dict(facts)
    for place, file, text in _sections(source, devices):
        items += _items(parse(text), "", place, file, known)
    absent = {f"<{stored}>" for dtype, stored in _STORED.items() if dtype not in dtypes}
    for name, values in facts.items():
        absent |= {f"{enum}::{each}" for enum, each in _enumerators(items) if name == enum and f"{enum}::{each}" not in values}
    wanted, before = [item for item in items if not _is_absent(item, absent)], None
    while before != (before := "".join(item.node.text for item in wanted)):
        wanted = _reached(wanted, roots, {_COMPUTED[dtype] for dtype in dtypes})
        drop_members(wanted)
        for item in wanted:
            if not is_class(item.node):
                tidied(item.node, item.before)
    linked = {name for item in wanted if item.head.startswith("extern") and any(item.node.blocks()) for name in item.names}
    declared = [item for item in wanted if roots & linked & set(item.names) and not any(item.node.blocks())]
    text = _printed([item for item in wanted if item not in declared and not item.owner])
    classes = [item for item in wanted if is_class(item.node) and not item.head.startswith("template")]
    shared = [item for item in classes if item.names[0] in _SHARED]
    structs = {item.names[0]: [*_members(item.node)] for item in shared}
    return Extract(text, structs)


def _sections(source: KernelSource, devices: Collection[str]) -> Iterator[tuple[str, Path, str]]:
    """The sources in the order in which they are compiled, in pieces: place (see :class:`Item`), file and text."""
    absent = "JITACT_FAST_MATH", "JITACT_LIBMVEC", "JITACT_STAGED", "JITACT_PART", "__AVX2__", "__AVX512F__", "__F16C__"
    macros: dict[str, str | None] = dict.fromkeys(absent)
    macros |= {"JITACT_CUDA": "" if "cuda" in devices else None, "JITACT_NO_CPU": None if "cpu" in devices else ""}
    macros |= {"JITACT_UNMARKED_NUMBERS": "0", "JITACT_SINGLES": "0", "JITACT_EXPORTED": ""}
    for flag in source.defines():
        name, _, value = flag.removeprefix("-D").partition("=")
        macros[name] = value
    if "cuda" not in devices:
        macros["__CUDA_ARCH__"] = None
    if source.signature.folds:
        macros["JITACT_ROWS"] = ""
    folders = [source.folder, DEVICE]
    seen: dict[str, set[Path]] = {device: set() for device in devices}
    functions: dict[str, Macro] = {}

    def header(name: str, place: str) -> Iterator[tuple[str, Path, str]]:
        passes = {}
        for device in devices:
            defined = macros | {"__CUDACC__": "" if device == "cuda" else None}
            passes[device] = [*included((DEVICE / name).read_text(), DEVICE / name, folders, defined, seen[device])]
        for (file, device), lines in itertools.groupby(_merged(passes), lambda pair: (pair[0].file, pair[1])):
            text = "".join(line.text for line, _ in lines)
            yield f"{place}{device}" if device else "common", file, expanded(text, macros, functions)

    yield from header("elementwise.cuh", "first_")
    read = set().union(*seen.values())
    text = re.sub(r"^#line.*\n", "", source.full_text, flags=re.MULTILINE)
    for file, lines in itertools.groupby(included(text, KERNEL, folders, macros, read), lambda line: _librarys(line.file)):
        yield "common", file, expanded("".join(line.text for line in lines), macros, functions)
    for device in devices:
        seen[device] |= read
    yield from header("launch.cuh", "")


def _librarys(file: Path) -> Path:
    """The file itself if it is a header of the library; KERNEL for the kernel file and its own headers."""
    return file if file.parent == DEVICE else KERNEL


def _merged(passes: dict[str, list[Line]]) -> Iterator[tuple[Line, str]]:
    """The lines for one or two devices, each with its device, or "" if common to both."""
    if len(passes) == 1:
        yield from ((line, "") for lines in passes.values() for line in lines)
        return
    cpu = iter(passes["cpu"])
    common = set(passes["cpu"]) & set(passes["cuda"])
    for line in passes["cuda"]:
        if line not in common:
            yield line, "cuda"
            continue
        for other in cpu:
            if other == line:
                break
            yield other, "cpu"
        yield line, ""
    yield from ((line, "cpu") for line in cpu)


def _items(block: Block, namespace: str, place: str, file: Path, facts: dict) -> Iterator[Item]:
    """The declarations of a piece of the sources, simplified."""
    for node in block.nodes:
        opening = re.match(r"\s*(?:inline )?namespace ?([\w:]*) $", bare(node.head))
        if opening:
            inner = next(node.blocks())
            within = f"{namespace}::{opening[1]}" if namespace and opening[1] else namespace or opening[1]
            yield from _items(inner, within, place, file, facts)
            continue
        before = Counter(re.findall(r"\w+", bare(node.text)))
        if file is not KERNEL:
            (node,) = simplified(node, facts) or [None]
            if node is None:
                continue
        item = Item(node, namespace, names_of(node), place, file)
        item.before = before
        yield item
        yield from _members_of(item)


def _members_of(item: Item) -> Iterator[Item]:
    """Adds the functions and classes in a class to its ``members``, and yields them, recursively."""
    if not is_class(item.node):
        return
    for node in class_block(item.node).nodes:
        if is_class(node) or (is_function(node) and names_of(node)):
            member = Item(node, item.namespace, names_of(node), item.place, item.file, item)
            item.members.append(member)
            yield member
            yield from _members_of(member)


def _enumerators(items: list[Item]) -> set[tuple[str, str]]:
    found = set()
    for item in items:
        if item.head.startswith("enum class"):
            found |= {(item.names[0], each) for each in re.findall(r"\w+", item.node.text.partition("{")[2])}
    return found


def _is_absent(item: Item, absent: set[str]) -> bool:
    """Whether a specialisation is for a dtype or an enumerator that the file does not have."""
    head = item.head if any(item.node.blocks()) else item.head.partition(" = ")[0]
    return head.startswith("template") and any(each in head for each in absent)


def _reached(items: list[Item], roots: set[str], types: set[str]) -> list[Item]:
    """The items that the roots need, in their order; member functions only if something names them.

    ``types`` are the number types that elements are computed in.
    """
    by_name: dict[str, list[Item]] = {}
    aliases = {}
    for item in items:
        item.overloads = False
        for name in item.names if item.owner is None else ():
            by_name.setdefault(name, []).append(item)
        alias = re.match(r"namespace (\w+) = (\w+);", item.head)
        if alias:
            aliases[alias[1]] = alias[2]
    for several in by_name.values():
        for item in several:
            item.overloads = any(
                each is not item and each.namespace == item.namespace and goes_with(each, item) for each in several
            )
    wanted: set[Item] = {item for item in items if roots & set(item.names) and not item.owner}
    called: set[str] = set()
    named: set[str] = set()
    waiting: list[Item] = [*wanted]
    later: set[Item] = set()  # candidates whose types are not used yet, or that are not called yet
    for item in items:
        for cached in ("words", "free_words", "own_text", "calls", "signs"):
            vars(item).pop(cached, None)
    while waiting:
        user = waiting.pop()
        called |= user.calls | user.signs
        named |= user.words
        types |= {
            each
            for each in TYPES
            if each in user.words and re.search(rf"(?<!<)\b{each}\b|\b{each}\b(?!>)", bare(user.node.text))
        }
        used = {item for word in user.free_words for item in _named(word, user, by_name, aliases)}
        later |= used | set(user.members)
        if user.owner is None and user.names:  # its other declarations
            later |= {
                item for item in by_name.get(user.names[0], []) if item.namespace == user.namespace and goes_with(item, user)
            }
        ready = {
            item
            for item in later
            if item not in wanted
            and (item.types <= types or not item.overloads)
            and (not item.owner or _is_called(item, called, named))
        }
        wanted |= ready
        later -= ready
        waiting += ready
    return [item for item in items if item in wanted or _is_structure(item)]


def _is_structure(item: Item) -> bool:
    """Whether it is a directive that is always kept: ``#if`` and the like, and includes, but for torch's."""
    return not item.names and item.head.startswith("#") and not item.head.startswith("#include <torch/")


def _is_called(member: Item, called: set[str], named: set[str]) -> bool:
    name = member.names[0]
    if is_class(member.node):
        return name in named
    sign = name.removeprefix("operator")
    if sign != name and member.file.name == "number.cuh" and sign != "=":
        return sign in called
    return name in called or name.startswith(("operator", "~")) or name == member.owner.names[0]


def _named(word: str, user: Item, by_name: dict[str, list[Item]], aliases: dict[str, str]) -> Iterator[Item]:
    """The items that a name may refer to where it is used."""
    *scope, name = word.split("::")
    if scope and scope[0]:
        yield from _named("::".join(scope), user, by_name, aliases)
        place = aliases.get(scope[-1], scope[-1])  # a used kernel file's text is in the namespace `file` within its own
        found = [item for item in by_name.get(name, []) if f"::{item.namespace}".endswith((f"::{place}", f"::{place}::file"))]
    else:
        candidates = [item for item in by_name.get(name, []) if goes_with(item, user)]
        here = user.namespace.split("::")
        around = ["::".join(here[:depth]) for depth in range(len(here), 0, -1)]
        around += ["", "jitact"] if user.namespace in ("", *_LOOPS) or user.file is KERNEL else [""]
        around += [_LOOPS[0]] if user.namespace in _LOOPS else []  # found from jitact::rows by argument-dependent lookup
        nearest = next((each for each in around if any(item.namespace == each for item in candidates)), None)
        places = set(around) if user.namespace in ("jitact", *_LOOPS, "") or user.file is KERNEL else {nearest}
        found = [item for item in candidates if item.namespace in places]
    is_brought = user.file is not KERNEL and user.namespace != ""
    yield from (item for item in found if goes_with(item, user) and not (is_brought and _USING.match(item.head)))


def _members(node: Node) -> Iterator[tuple[str, str, str]]:
    """The data members of a struct: type, name and array length."""
    for each in class_block(node).nodes:
        type_ = re.match(r"(?:const )?\w+\*?", bare(each.text).strip())[0]
        for declaration in bare(each.text).strip()[len(type_) :].rstrip("; ").split(","):
            found = re.match(r"\s*(\w+)(?:\[(.*?)\])?", declaration)
            yield type_, found[1], found[2] or ""


def _printed(items: list[Item]) -> str:
    """The text of items: standard headers first, then the contents of each namespace."""
    code = "\n".join(bare(item.node.text) for item in items)
    headers = dict.fromkeys(item.head for item in items if item.head.startswith("#include"))
    used = [header for header in headers if re.search(_STANDARD.get(header.partition("<")[2].rstrip(">"), ""), code)]
    items = [item for item in items if item.head not in headers]
    common, namespace = _in_namespaces([item for item in items if item.place == "common"], "")
    lines = [*used, *_by_device(items, "first_", ""), *common, *_by_device(items, "", namespace), *_switched(namespace, "")]
    text = re.sub(r"(namespace [\w:]+ \{\n|#ifdef __CUDACC__\n|#else\n)\n+", r"\1", "\n".join(lines))
    return re.sub(r"\n+(?=\n(?:\}\n|#endif|#else))", "", re.sub(r"\n{3,}", "\n\n", text)).strip() + "\n"


def _by_device(items: list[Item], before: str, namespace: str) -> list[str]:
    """The lines for single devices, after code in ``namespace``; ``before`` is the prefix of their places."""
    branches = []
    for device in ("cuda", "cpu"):
        printed, after = _in_namespaces([item for item in items if item.place == before + device], namespace)
        branches.append(printed + _switched(after, namespace))
    cuda, cpu = branches
    return ["#ifdef __CUDACC__", *cuda, "#else", *cpu, "#endif"] if cuda and cpu else cuda + cpu


def _in_namespaces(items: list[Item], namespace: str) -> tuple[list[str], str]:
    """The lines of items that follow code in ``namespace``, and the namespace in which they end."""
    lines: list[str] = []
    for item in without_empty_conditions(items):
        lines += _switched(namespace, item.namespace)
        namespace = item.namespace
        own = joined(_comment(item.node.lead) + item.node.text + item.node.tail)
        is_long = own.count("\n") > _TOGETHER
        is_apart = is_long and bool(lines and lines[-1].count("\n") > _TOGETHER)
        if is_apart and "\n\n" in item.node.lead:
            lines.append("")
        lines.append(own)
    return lines, namespace


def _switched(namespace: str, to: str) -> list[str]:
    """The lines that switch from one namespace to another."""
    if namespace == to:
        return []
    closing = ["}"] if namespace else []
    opening = [f"namespace {to} {{"] if to else []
    return [*closing, "", *opening]


def _comment(lead: str) -> str:
    """The comment directly above a declaration."""
    last = lead.rpartition("\n\n")[2].strip("\n")
    return last.strip() + "\n" if last.strip() else ""
