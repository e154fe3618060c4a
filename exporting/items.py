"""The declarations of the library's headers and of a kernel file, and what each of them uses."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from .cpp import Block, If, Node, bare, words
from .cut import declared_names, without_template

__all__ = ["KERNEL", "TYPES", "Item", "class_block", "goes_with", "is_class", "is_function", "names_of"]

TYPES = ("Double", "Single", "Narrow", "Dual")
_NOT_NAMES = re.compile(r'__attribute__\(\(.*?\)\)|__launch_bounds__\([^)]*\)|alignas\(\w+\)|\[\[\w+\]\]|extern "C"')
_FUNCTION = re.compile(r"(operator\s*[^\s(]+|operator\(\)|~?\w+(?:::~?\w+)*)\s*\(")
_GIVEN_TYPES = r"<(?:[^;{}()<>]|<(?:[^;{}()<>]|<[^;{}()<>]*>)*>)*>"  # template arguments, nested two levels deep
_CALLED = re.compile(rf"(?<!std::)\b(\w+)\s*(?:{_GIVEN_TYPES})?\s*\(")
_VALUE = re.compile(r"(?<![-=!<>+*/%&|^])=(?!=)")  # before an initial value or a default
_COMPUTES = re.compile(r"\b(?:gradient|derivative|slope)")  # code of the loops that computes with numbers
_OF_NUMBERS = re.compile(r"\b(?:[TA]|auto|Real|Dual|Double|Single|Narrow|Brain)\b")
KERNEL = Path("the kernel file")


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
        return _text_without(self.node, {id(member.node) for member in self.members})

    @cached_property
    def calls(self) -> set[str]:
        """The names of functions that it calls."""
        found = Counter(_CALLED.findall(bare(self.own_text)))
        if not is_class(self.node):
            found.subtract(self.names)  # the declaration itself looks like a call
        return {name for name, count in found.items() if count > 0}

    @cached_property
    def signs(self) -> set[str]:
        """The operators in it that may be those of number types."""
        text = bare(self.own_text)
        of_numbers = _COMPUTES if self.namespace == "jitact::loops" else _OF_NUMBERS
        if (self.owner or self).names == ["Real"] or self.namespace == "jitact::ptx":
            return set()
        if self.file is not KERNEL and not of_numbers.search(text):
            return set()
        computes = text.partition("{")[2] or re.sub(r"<[\w:, ]*>", "", text.partition("=")[2])
        return set(re.findall(r"[-+*/]=?|[=!<>]=|[<>]", computes))

    @cached_property
    def types(self) -> set[str]:
        """The number types that a function or specialisation is for."""
        if self.owner is not None or re.match(r"using|constexpr", self.head):
            return set()
        return {each for each in TYPES if re.search(rf"\b{each}\b(?!>)|<{each}<", self.head)}


def is_class(node: Node) -> bool:
    """Whether it is the definition of a class."""
    return bool(re.match(r"(?:template\b.*>\s*)?(?:struct|class)\b", bare(node.head).strip(), re.DOTALL)) and any(node.blocks())


def class_block(node: Node) -> Block:
    """What is between the braces of a class."""
    return next(node.blocks())


def is_function(node: Node) -> bool:
    """Whether it declares a function."""
    head = without_template(bare(node.text if not any(node.blocks()) else node.head))
    declared = _VALUE.split(_NOT_NAMES.sub("", head))[0]
    return bool(_FUNCTION.search(declared)) and not head.startswith(("using", "static_assert", "struct", "class"))


def names_of(node: Node) -> list[str]:
    """The names that a declaration declares."""
    if re.match(r"\s*extern\s+$", bare(node.head)):  # a block of declarations, which is kept as a whole
        return [name for each in next(node.blocks()).nodes for name in names_of(each)]
    head = _NOT_NAMES.sub("", without_template(bare(node.head) if not node.head.startswith("#") else node.head)).strip()
    patterns = (r"#define (\w+)", r"namespace (\w+) =", r"(?:friend )?(?:struct|class|enum class|enum|concept)\s+(\w+)")
    for pattern in (*patterns, r"using (\w+) =", r"using (?:\w+::)*(\w+);"):
        found = re.match(pattern, head)
        if found:
            return [found[1]]
    if head.startswith(("#", "static_assert", "public:", "private:", "protected:")) or not head:
        return []
    if is_function(node):
        name = _FUNCTION.search(head)[1]
        return [name if name.startswith("operator") else name.partition("::")[0]]
    variable = re.match(r"[^=]*?(\w+)(?:<.*?>+)?\s*(?:\[.*?\])?\s*(?:[={;]|$)", head, re.DOTALL)
    return declared_names(node) or ([variable[1]] if variable else [])


def _text_without(node: Node, without: set[int]) -> str:
    """A node's text without some of the nodes in it, by id."""
    if id(node) in without:
        return ""
    if isinstance(node, If):
        return node.text
    return "".join(
        part if isinstance(part, str) else "{" + "\n".join(_text_without(each, without) for each in part.nodes) + "}"
        for part in node.parts
    )


def goes_with(item: Item, user: Item) -> bool:
    """Whether two different items can be compiled for the same device."""
    devices = {each.place.removeprefix("first_") for each in (item, user)} - {"common"}
    return item is not user and len(devices) < 2
