"""Removes what no other code calls or reads from classes: member functions, data members and assignments to them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import cached_property

from .cpp import If, Node, bare
from .cut import assigned, declared_names
from .items import Item, class_block, goes_with, is_class, is_function

__all__ = ["drop_members"]


def drop_members(items: list[Item]) -> None:
    """Removes member functions that nothing calls and data members that nothing reads."""
    wanted = {id(item.node) for item in items}
    for item in items:
        unwanted = {id(member.node) for member in item.members} - wanted
        if unwanted:
            block = class_block(item.node)
            block.nodes = [node for node in block.nodes if id(node) not in unwanted]
            item.members = [member for member in item.members if id(member.node) in wanted]
    classes = [item for item in items if is_class(item.node)]
    outermost = [_Outermost(item) for item in items if item.owner is None]
    text = "".join(each.text for each in outermost)
    made_by_names = {name for names in re.findall(r"\b(\w+)(?:<[^;{}]*>)?\s*(\w*)\s*\{\s*\.", text) for name in names}
    for item in classes:
        block, name = class_block(item.node), item.names[0]
        may_lose_all = name in made_by_names or any(member.names == [name] for member in item.members)  # it has a constructor
        for node in [*block.nodes]:
            names = [] if is_function(node) or is_class(node) else declared_names(node)
            is_optional = bool(names) and (may_lose_all or _may_lose(item, node))
            if is_optional and not any(_is_read(each, item, node, outermost) for each in names):
                block.nodes.remove(node)
                for lost, other in itertools.product(names, outermost):
                    other.drop_values(lost, item)
    _drop_usings(classes)


def _drop_usings(classes: list[Item]) -> None:
    """Removes declarations like ``using Base::first, Base::second;`` of names that no class has any more."""
    blocks = [class_block(item.node) for item in classes]
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
    return is_class(node) and bool(re.search(rf":[^:{{]*\b{name}<", node.head))


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
        return name in self.words and (self.item is of or goes_with(self.item, of))

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
