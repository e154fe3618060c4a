"""Extracts what a kernel file needs from the library's headers, reduced to what is called, for exported files."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ..kernels.loader.source import DEVICE, KernelSource
from .conditions import Facts
from .cpp import Block, If, Node, bare, parse, words
from .cut import assigned, declared_names, simplified, tidied, without_empty_conditions, without_template
from .lines import joined
from .preprocess import Line, Macro, expanded, included

__all__ = ["Extract", "extract"]

_TYPES = ("Double", "Single", "Narrow", "Dual")
_STORED = {"Dtype::f64": "double", "Dtype::f32": "float", "Dtype::f16": "Half", "Dtype::bf16": "Bfloat16"}
_COMPUTED = {"Dtype::f64": "Double", "Dtype::f32": "Single", "Dtype::f16": "Narrow", "Dtype::bf16": "Narrow"}
_NOT_NAMES = re.compile(r'__attribute__\(\(.*?\)\)|__launch_bounds__\([^)]*\)|alignas\(\w+\)|\[\[\w+\]\]|extern "C"')
_FUNCTION = re.compile(r"(operator\s*[^\s(]+|operator\(\)|~?\w+(?:::~?\w+)*)\s*\(")
_GIVEN_TYPES = r"<(?:[^;{}()<>]|<(?:[^;{}()<>]|<[^;{}()<>]*>)*>)*>"  # template arguments, nested two levels deep
_CALLED = re.compile(rf"(?<!std::)\b(\w+)\s*(?:{_GIVEN_TYPES})?\s*\(")
_LOOPS = ("jitact::loops", "jitact::rows")  # namespaces that use the kernel file's functions
_SHARED = ("Elements", "Broadcasts", "Call", "Operands")  # the structs of a call
_VALUE = re.compile(r"(?<![-=!<>+*/%&|^])=(?!=)")  # before an initial value or a default
_COMPUTES = re.compile(r"\b(?:gradient|derivative|slope)")  # code of the loops that computes with numbers
_OF_NUMBERS = re.compile(r"\b(?:[TA]|auto|Real|Dual|Double|Single|Narrow|Brain)\b")
_USING = re.compile(r"using jitact::\w+;?$")  # makes a name of the library visible in kernel files
_TOGETHER = 2  # line breaks in a declaration that needs no blank line before it
_KERNEL = Path("the kernel file")
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


@dataclass(eq=False)
class Item:
    """A declaration at namespace scope, or a member function or class of a class.

    Attributes:
        node: its syntax tree; of a class, with all members.
        namespace: the namespace that it is in.
        names: what it declares; empty for directives and the like, which belong to the code around them.
        place: what compiles it: "common", "cuda" or "cpu", or "first_cuda" or "first_cpu" before everything else.
        file: the file that it is from.
        owner: the class that it is a member of.
        members: its member functions and classes.
        overloads: whether the namespace has other declarations of its name.
    """

    node: Node
    namespace: str
    names: list[str]
    place: str
    file: Path
    owner: Item | None = None
    members: list[Item] = field(default_factory=list)
    overloads: bool = False

    def __post_init__(self) -> None:
        """Counts its words before anything is removed."""
        self.before = Counter(re.findall(r"\w+", bare(self.node.text)))

    @cached_property
    def head(self) -> str:
        """Its declaration, without comments and bodies."""
        return (self.node.head if self.node.head.startswith("#") else bare(self.node.head)).strip()

    @cached_property
    def words(self) -> set[str]:
        """The names that it uses; of a class, without those in its member functions."""
        if self.head.startswith("enum"):
            return set()
        if self.head.startswith("#define"):
            return set(re.findall(r"\w+", self.node.text)[2:])
        return words(self.own_text) - set(self.names)

    @cached_property
    def free_words(self) -> set[str]:
        """The same without names of members (after ``.`` and ``->``)."""
        return self.words if self.head.startswith("#") else self.words & words(self.own_text, members=False)

    @cached_property
    def own_text(self) -> str:
        """Its text; of a class, without member functions and classes."""
        return _text(self.node, {id(member.node) for member in self.members})

    @cached_property
    def calls(self) -> set[str]:
        """The names of functions that it calls."""
        found = Counter(_CALLED.findall(bare(self.own_text)))
        if not _is_class(self.node):
            found.subtract(self.names)  # the declaration itself looks like a call
        return {name for name, count in found.items() if count > 0}

    @cached_property
    def signs(self) -> set[str]:
        """The operators in it that may be those of number types."""
        text = bare(self.own_text)
        of_numbers = _COMPUTES if self.namespace == "jitact::loops" else _OF_NUMBERS
        if (self.owner or self).names == ["Real"] or self.namespace == "jitact::ptx":
            return set()
        if self.file is not _KERNEL and not of_numbers.search(text):
            return set()
        computes = text.partition("{")[2] or re.sub(r"<[\w:, ]*>", "", text.partition("=")[2])
        return set(re.findall(r"[-+*/]=?|[=!<>]=|[<>]", computes))

    @cached_property
    def types(self) -> set[str]:
        """The number types that a function or specialisation is for."""
        if self.owner is not None or re.match(r"using|constexpr", self.head):
            return set()
        return {each for each in _TYPES if re.search(rf"\b{each}\b(?!>)|<{each}<", self.head)}


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
        _drop_members(wanted)
        for item in wanted:
            if not _is_class(item.node):
                tidied(item.node, item.before)
    linked = {name for item in wanted if item.head.startswith("extern") and any(item.node.blocks()) for name in item.names}
    declared = [item for item in wanted if roots & linked & set(item.names) and not any(item.node.blocks())]
    text = _printed([item for item in wanted if item not in declared and not item.owner])
    classes = [item for item in wanted if _is_class(item.node) and not item.head.startswith("template")]
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
    for file, lines in itertools.groupby(included(text, _KERNEL, folders, macros, read), lambda line: _librarys(line.file)):
        yield "common", file, expanded("".join(line.text for line in lines), macros, functions)
    for device in devices:
        seen[device] |= read
    yield from header("launch.cuh", "")


def _librarys(file: Path) -> Path:
    """The file itself if it is a header of the library; _KERNEL for the kernel file and its own headers."""
    return file if file.parent == DEVICE else _KERNEL


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
        if file is not _KERNEL:
            (node,) = simplified(node, facts) or [None]
            if node is None:
                continue
        item = Item(node, namespace, _names(node), place, file)
        item.before = before
        yield item
        yield from _members_of(item)


def _members_of(item: Item) -> Iterator[Item]:
    """Adds the functions and classes in a class to its ``members``, and yields them, recursively."""
    if not _is_class(item.node):
        return
    for node in _class_block(item.node).nodes:
        if _is_class(node) or (_is_function(node) and _names(node)):
            member = Item(node, item.namespace, _names(node), item.place, item.file, item)
            item.members.append(member)
            yield member
            yield from _members_of(member)


def _is_class(node: Node) -> bool:
    return bool(re.match(r"(?:template\b.*>\s*)?(?:struct|class)\b", bare(node.head).strip(), re.DOTALL)) and any(node.blocks())


def _class_block(node: Node) -> Block:
    return next(node.blocks())


def _is_function(node: Node) -> bool:
    head = without_template(bare(node.text if not any(node.blocks()) else node.head))
    declared = _VALUE.split(_NOT_NAMES.sub("", head))[0]
    return bool(_FUNCTION.search(declared)) and not head.startswith(("using", "static_assert", "struct", "class"))


def _names(node: Node) -> list[str]:
    """The names that a declaration declares."""
    if re.match(r"\s*extern\s+$", bare(node.head)):  # a block of declarations, which is kept as a whole
        return [name for each in next(node.blocks()).nodes for name in _names(each)]
    head = _NOT_NAMES.sub("", without_template(bare(node.head) if not node.head.startswith("#") else node.head)).strip()
    patterns = (r"#define (\w+)", r"namespace (\w+) =", r"(?:friend )?(?:struct|class|enum class|enum|concept)\s+(\w+)")
    for pattern in (*patterns, r"using (\w+) =", r"using (?:\w+::)*(\w+);"):
        found = re.match(pattern, head)
        if found:
            return [found[1]]
    if head.startswith(("#", "static_assert", "public:", "private:", "protected:")) or not head:
        return []
    if _is_function(node):
        name = _FUNCTION.search(head)[1]
        return [name if name.startswith("operator") else name.partition("::")[0]]
    variable = re.match(r"[^=]*?(\w+)(?:<.*?>+)?\s*(?:\[.*?\])?\s*(?:[={;]|$)", head, re.DOTALL)
    return declared_names(node) or ([variable[1]] if variable else [])


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
                each is not item and each.namespace == item.namespace and _goes_with(each, item) for each in several
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
            for each in _TYPES
            if each in user.words and re.search(rf"(?<!<)\b{each}\b|\b{each}\b(?!>)", bare(user.node.text))
        }
        used = {item for word in user.free_words for item in _named(word, user, by_name, aliases)}
        later |= used | set(user.members)
        if user.owner is None and user.names:  # its other declarations
            later |= {
                item for item in by_name.get(user.names[0], []) if item.namespace == user.namespace and _goes_with(item, user)
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


def _drop_members(items: list[Item]) -> None:
    """Removes member functions that nothing calls and data members that nothing reads."""
    wanted = {id(item.node) for item in items}
    for item in items:
        unwanted = {id(member.node) for member in item.members} - wanted
        if unwanted:
            block = _class_block(item.node)
            block.nodes = [node for node in block.nodes if id(node) not in unwanted]
            item.members = [member for member in item.members if id(member.node) in wanted]
    classes = [item for item in items if _is_class(item.node)]
    outermost = [_Outermost(item) for item in items if item.owner is None]
    text = "".join(each.text for each in outermost)
    made_by_names = {name for names in re.findall(r"\b(\w+)(?:<[^;{}]*>)?\s*(\w*)\s*\{\s*\.", text) for name in names}
    for item in classes:
        block, name = _class_block(item.node), item.names[0]
        may_lose_all = name in made_by_names or any(member.names == [name] for member in item.members)  # it has a constructor
        for node in [*block.nodes]:
            names = [] if _is_function(node) or _is_class(node) else declared_names(node)
            is_optional = bool(names) and (may_lose_all or _may_lose(item, node))
            if is_optional and not any(_is_read(each, item, node, outermost) for each in names):
                block.nodes.remove(node)
                for lost, other in itertools.product(names, outermost):
                    other.drop_values(lost, item)
    _drop_usings(classes)


def _drop_usings(classes: list[Item]) -> None:
    """Removes declarations like ``using Base::first, Base::second;`` of names that no class has any more."""
    blocks = [_class_block(item.node) for item in classes]
    usings = {
        id(node): set(re.findall(r"\bBase::(\w+)", node.text)) for block in blocks for node in block.nodes if _is_using(node)
    }
    text = " ".join(str(node) for block in blocks for node in block.nodes if id(node) not in usings)
    there = set(re.findall(r"\w+", bare(text)))
    for block in blocks:
        block.nodes = [node for node in block.nodes if id(node) not in usings or usings[id(node)] & there]


def _is_using(node: Node) -> bool:
    """Whether a node brings members of a base class."""
    return node.text.startswith("using Base::")


def _derives(node: Node, name: str) -> bool:
    """Whether a node is a class that derives from a class template of a name."""
    return _is_class(node) and bool(re.search(rf":[^:{{]*\b{name}<", node.head))


def _may_lose(item: Item, node: Node) -> bool:
    """Whether a data member can be removed in any case without changing how its class is initialised."""
    declaration = bare(node.text).strip()
    return declaration.startswith(("using", "static")) or item.names[0] == "Call" or bool(re.search(r"[={]", declaration))


class _Outermost:
    """An item that has no owner, with what is asked of it for each member of each class; it only loses code."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.words = set(re.findall(r"\w+", item.node.text))
        self.assigned = set(_all_assigned(item.node))

    @cached_property
    def text(self) -> str:
        return bare(self.item.node.text)

    def may_use(self, name: str, of: Item) -> bool:
        """Whether it may use a member of a class."""
        return name in self.words and (self.item is of or _goes_with(self.item, of))

    def text_without_values(self, name: str, of: Item, own: bool) -> str:
        """The text without assignments to a member of a class."""
        if name not in self.assigned:
            return self.text
        return bare(_without_values(self.item.node, name, own or _holds(self.item.node, of.node)))

    def drop_values(self, name: str, of: Item) -> None:
        """Removes assignments to a member that a class has lost."""
        if self.may_use(name, of):
            own = self.item.names == of.names or _holds(self.item.node, of.node)
            _drop_values(self.item.node, name, own, of.names[0])
            vars(self).pop("text", None)  # found anew when it is asked for


def _all_assigned(node: Node) -> Iterator[str]:
    """The names of the members that statements within a node assign to."""
    if isinstance(node, If):
        for branch in (node.then, node.otherwise):
            if branch is not None:
                yield from _all_assigned(branch)
        return
    if (name := assigned(node)) is not None:
        yield name
    for block in node.blocks():
        for each in block.nodes:
            yield from _all_assigned(each)


def _is_read(name: str, item: Item, node: Node, outermost: list[_Outermost]) -> bool:
    """Whether a data member is used other than by its declaration and assignments to it."""
    is_static = re.match(r"\s*(?:using|static)\b", bare(node.text))
    access = re.compile(rf"(?:\.|->{'|::' if is_static else ''}){name}\b(?!\s*(?:<[^;{{}}()]*>)?\()")
    word = re.compile(rf"(?<![.>:\w]){name}\b")
    found = -len(word.findall(bare(node.text))) - len(access.findall(bare(node.text)))
    for each in outermost:
        if each.may_use(name, item):
            own = each.item is item or each.item.names == item.names or _derives(each.item.node, name=item.names[0])
            text = each.text_without_values(name, item, own)
            if f".{name} = " in text:
                text = re.sub(rf"(?<=[{{,])\s*\.{name} = ", " ", text)
            found += len(access.findall(text)) + (len(word.findall(text)) if own else 0)
    if item.owner is not None:
        found += len(word.findall(bare(_without_values(item.node, name, True))))
    return found > 0


def _holds(node: Node, inner: Node) -> bool:
    return any(each is inner or _holds(each, inner) for block in node.blocks() for each in block.nodes)


def _without_values(node: Node, name: str, own: bool) -> str:
    """A node's text without assignments to a member: ``a.name = ...`` or, in its own class, ``name = ...``."""
    if isinstance(node, If):
        branches = [_without_values(each, name, own) for each in (node.then, node.otherwise) if each is not None]
        return f"{node.head} {' else '.join(branches)}"
    if _gives_value(node, name, own):
        return ";"
    return "".join(
        part if isinstance(part, str) else "{" + "\n".join(_without_values(each, name, own) for each in part.nodes) + "}"
        for part in node.parts
    )


def _gives_value(node: Node, name: str, own: bool) -> bool:
    if isinstance(node, If) or any(node.blocks()) or assigned(node) != name:
        return False
    return own or not re.match(rf"\s*{name}\b", node.head)


def _drop_values(node: Node, name: str, own: bool, of: str) -> None:
    """Removes assignments to a member of a class, and its designated initializers."""
    for at, part in enumerate(node.parts):
        if isinstance(part, str) and re.search(rf"\b{of}\b", part):
            node.parts[at] = re.sub(rf"\n *\.{name} = [^\n]*,(?=\n)", "", part)
    for block in node.blocks():
        for each in [*block.nodes]:
            value = each.then if isinstance(each, If) and each.otherwise is None else each
            if _gives_value(value, name, own):
                block.nodes.remove(each)
            else:
                _drop_values(each, name, own, of)


def _is_structure(item: Item) -> bool:
    """Whether it is a directive that is always kept: ``#if`` and the like, and includes, but for torch's."""
    return not item.names and item.head.startswith("#") and not item.head.startswith("#include <torch/")


def _goes_with(item: Item, user: Item) -> bool:
    """Whether two different items can be compiled for the same device."""
    devices = {each.place.removeprefix("first_") for each in (item, user)} - {"common"}
    return item is not user and len(devices) < 2


def _is_called(member: Item, called: set[str], named: set[str]) -> bool:
    name = member.names[0]
    if _is_class(member.node):
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
        candidates = [item for item in by_name.get(name, []) if _goes_with(item, user)]
        here = user.namespace.split("::")
        around = ["::".join(here[:depth]) for depth in range(len(here), 0, -1)]
        around += ["", "jitact"] if user.namespace in ("", *_LOOPS) or user.file is _KERNEL else [""]
        around += [_LOOPS[0]] if user.namespace in _LOOPS else []  # found from jitact::rows by argument-dependent lookup
        nearest = next((each for each in around if any(item.namespace == each for item in candidates)), None)
        places = set(around) if user.namespace in ("jitact", *_LOOPS, "") or user.file is _KERNEL else {nearest}
        found = [item for item in candidates if item.namespace in places]
    is_brought = user.file is not _KERNEL and user.namespace != ""
    yield from (item for item in found if _goes_with(item, user) and not (is_brought and _USING.match(item.head)))


def _text(node: Node, without: set[int]) -> str:
    """A node's text without some of the nodes in it, by id."""
    if id(node) in without:
        return ""
    if isinstance(node, If):
        return node.text
    return "".join(
        part if isinstance(part, str) else "{" + "\n".join(_text(each, without) for each in part.nodes) + "}"
        for part in node.parts
    )


def _members(node: Node) -> Iterator[tuple[str, str, str]]:
    """The data members of a struct: type, name and array length."""
    for each in _class_block(node).nodes:
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
