"""Removes statements that cannot be reached with the operations, numbers and operands of an exported file."""

from __future__ import annotations

import re
from collections import Counter
from typing import Protocol, TypeVar

from ..kernels.loader.signature import split
from .conditions import evaluate
from .cpp import Block, If, Node, bare

__all__ = ["assigned", "declared_names", "simplified", "tidied", "without_empty_conditions", "without_template"]

_BRACKETS = "([{<", ")]}>"
_CONSTANT = re.compile(r"\s*(template\s*<Op op>\s*)?(?:static )?constexpr (?:bool|int|int64_t) (\w+ = .*);$", re.DOTALL)
_LOOP = re.compile(r"(?:JITACT_UNROLL )?for \(\w+ (\w+) = (\w+); \1 < ([^;]+); (?:\1\+\+|\+\+\1)\)$")
_ENDS = re.compile(r"(?:return|continue|break)\b")
_NO_DECLARATION = re.compile(r"(?:return|continue|break|using|delete|throw|else|case|goto|public|private)\b")
_DECLARATION = re.compile(r"(?:\[\[\w+\]\] )?[\w:<>,\s&*]*?[\w>][\s&*]+(?:const )?\(?&?(\w+)\)?\s*(?:=(?!=)|\{|\[|\(|,|;)")
_IS_CLASS = re.compile(r"\s*(?:struct|class)\b")
_USING = re.compile(r"using (\w+) =")
_ASSIGNMENT = re.compile(r"(?:\w+(?:\[\w+\])?\.)*(\w+)(?:\[\w+\])*(?:\.\w+)* = (?!=)")
_FOR_EACH = re.compile(r"for_each<(.*?)>\(")


class _Headed(Protocol):
    @property
    def head(self) -> str: ...


_Any = TypeVar("_Any", bound=_Headed)


def simplified(node: Node, facts: dict) -> list[Node]:
    """A declaration without the branches that ``facts`` rule out; adds the constants that it defines to ``facts``."""
    return _simplified(node, facts, True)


def tidied(node: Node, before: Counter) -> bool:
    """Removes variables that are no longer used but were when words were counted; returns whether there were any."""
    found = False
    for block in node.blocks():
        while _drop_unused(block, node, before):
            found = True
    return found


def without_empty_conditions(nodes: list[_Any]) -> list[_Any]:
    """The nodes without empty ``#if`` and ``#else`` blocks."""
    left: list[_Any] = []
    for node in nodes:
        if node.head.startswith("#endif") and left and left[-1].head.startswith("#else"):
            del left[-1]
        if node.head.startswith("#endif") and left and left[-1].head.startswith("#if"):
            del left[-1]
            continue
        left.append(node)
    return left


def without_template(head: str) -> str:
    """A declaration without ``template <...>``."""
    head = head.strip()
    if not head.startswith("template"):
        return head
    depth = 0
    for at, sign in enumerate(head):
        depth += (sign == "<") - (sign == ">")
        if sign == ">" and depth == 0:
            return without_template(head[at + 1 :])
    return head


def declared_names(node: Node) -> list[str]:
    """The names of the variables, or of the type, that a statement declares."""
    if isinstance(node, If):
        return []
    text = without_template(bare(node.text if not any(node.blocks()) else node.head))
    text = re.sub(r"alignas\(\w+\) ", "", text)
    using = _USING.match(text)
    if using:
        return [using[1]]
    first = None if _NO_DECLARATION.match(text) else _DECLARATION.match(text)
    if not first:
        return []
    others = [re.match(r"\s*[&*]*(\w+)", each) for each in split(text.partition(first[1])[2], ",", *_BRACKETS)[1:]]
    return [first[1], *(each[1] for each in others if each)]


def assigned(node: Node) -> str | None:
    """The member, or the array member, that a statement assigns to."""
    found = _ASSIGNMENT.match(bare(node.head).strip())
    return found and found[1]


def _simplified(node: Node, facts: dict, at_top: bool = False) -> list[Node]:
    _learn(node, facts, at_top)
    if not isinstance(node, If):
        none = _FOR_EACH.match(bare(node.head).strip())
        if none and evaluate(none[1], facts) == {0}:
            return []
        for block in node.blocks():
            _simplify_block(block, dict(facts))
        return [node]
    if not node.head.startswith("if"):
        loop = _LOOP.match(bare(node.head))
        if loop:
            begin, end = evaluate(loop[2], facts), evaluate(loop[3], facts)
            if begin and end and all(isinstance(each, int) for each in begin | end) and max(end) <= min(begin):
                return []
        return _with_branches(node, facts)
    known = evaluate(bare(node.condition), facts)
    if known == {True}:
        return _in_place(node, node.then, facts)
    if known == {False}:
        return _in_place(node, node.otherwise, facts) if node.otherwise else []
    return _with_branches(node, facts)


def _with_branches(node: If, facts: dict) -> list[Node]:
    """The statement with its branches simplified; nothing if they are empty."""
    before = facts
    node.then = _branch(node.then, _narrowed(node, before, True))
    node.otherwise = _branch(node.otherwise, _narrowed(node, before, False)) if node.otherwise else None
    if node.otherwise is not None and _is_empty(node.otherwise):
        node.otherwise = None
    if _is_empty(node.then) and node.otherwise is None and not re.search(r"\+\+|--|[^=!<>]=[^=]", _condition(node)):
        return []
    return [node]


def _narrowed(node: If, facts: dict, holds: bool) -> dict:
    """The facts in the branch where a condition holds, or does not."""
    if not node.head.startswith("if"):
        return facts
    condition, narrowed = bare(node.condition), dict(facts)
    for name in [each for each, values in facts.items() if len(values) > 1 and each in re.sub(r"\s+", "", condition)]:
        left = [value for value in facts[name] if evaluate(condition, {**facts, name: frozenset([value])}) != {not holds}]
        narrowed[name] = frozenset(left)
    return narrowed


def _condition(node: If) -> str:
    """The condition's text, to look for side effects; empty for a usual loop, whose only one is its counter."""
    return "" if _LOOP.match(bare(node.head)) else bare(node.condition)


def _branch(node: Node, facts: dict) -> Node:
    lead, left = node.lead, _simplified(node, dict(facts))
    if len(left) == 1:
        left[0].lead = lead
        return left[0]
    return Node(lead=" ", parts=[Block(left, "\n")])


def _is_empty(node: Node) -> bool:
    return len(node.parts) == 1 and isinstance(node.parts[0], Block) and not isinstance(node, If) and not node.parts[0].nodes


def _in_place(node: If, branch: Node, facts: dict) -> list[Node]:
    """The nodes of a branch, to replace the whole statement."""
    _shift(branch, _indentation(node.lead) - _indentation(branch.lead) if "\n" in branch.lead else 0)
    block = branch.parts[0] if isinstance(branch.parts[0], Block) and not isinstance(branch, If) else None
    if block is None:
        branch.lead = node.lead
        return _simplified(branch, facts)
    _simplify_block(block, facts)
    if block.nodes:
        for each in block.nodes:
            _shift(each, _indentation(node.lead) - _indentation(block.nodes[0].lead), False)
        difference = _indentation(node.lead) - _indentation(block.nodes[0].lead)
        for each in block.nodes:
            each.lead = _shifted(each.lead, difference)
        own = block.nodes[0].lead
        block.nodes[0].lead = node.lead.rstrip(" ").removesuffix("\n") + own if own.startswith("\n") else node.lead
    return block.nodes


def _simplify_block(block: Block, facts: dict) -> None:
    left: list[Node] = []
    ended, compiled_always = False, True
    for node in block.nodes:
        is_directive = node.head.startswith("#")
        if ended and not is_directive and not re.match(r"(case|default)\b", node.head):
            continue
        new = _simplified(node, facts)
        while not new and not is_directive and left and left[-1].head.startswith("#pragma"):
            del left[-1]
        left += new
        compiled_always &= not is_directive
        for each in new if compiled_always else ():
            if isinstance(each, If) and each.otherwise is None and _returns(each.then):
                facts.update(_narrowed(each, facts, False))  # for the statements after it
        ended = (ended and not is_directive) or any(_ENDS.match(each.head) for each in new if not isinstance(each, If))
    block.nodes = without_empty_conditions(left)


def _returns(branch: Node) -> bool:
    """Whether a branch ends with ``return``."""
    block = branch.parts[0] if isinstance(branch.parts[0], Block) and not isinstance(branch, If) else None
    last = branch if block is None else block.nodes[-1] if block.nodes else None
    return last is not None and not isinstance(last, If) and bool(re.match(r"return\b", last.head.strip()))


def _learn(node: Node, facts: dict, at_top: bool) -> None:
    """Adds the value of a constant to the facts; an inner declaration shadows an outer one."""
    found = _CONSTANT.match(bare(node.text))
    if not found:
        return
    for part in split(found[2], ",", *_BRACKETS):
        name, _, value = (each.strip() for each in part.partition("="))
        name += "<op>" if found[1] else ""
        known = evaluate(value, facts)
        if known is not None and name not in facts:
            facts[name] = known
        elif not at_top:
            facts.pop(name, None)
            if known is not None:
                facts[name] = known


def _drop_unused(block: Block, whole: Node, before: Counter) -> bool:
    """Removes one declaration of variables that are no longer used but were before; returns whether it found one."""
    now, here = (Counter(re.findall(r"\w+", bare(str(text)))) for text in (whole, block))
    for at, node in enumerate(block.nodes):
        names = declared_names(node)
        own = Counter(re.findall(r"\w+", bare(node.text)))
        if names and all(here[name] == own[name] and now[name] < before[name] for name in names):
            del block.nodes[at]
            return True
        if not _IS_CLASS.match(node.head) and any(_drop_unused(inner, whole, before) for inner in node.blocks()):
            return True
    return False


def _indentation(lead: str) -> int:
    return len(lead) - len(lead.rstrip(" "))


def _shift(node: Node, by: int, with_lead: bool = True) -> None:
    """Changes the indentation of a node's lines."""
    if with_lead:
        node.lead = _shifted(node.lead, by)
    node.tail = _shifted(node.tail, by)
    for at, part in enumerate(node.parts):
        if isinstance(part, str):
            node.parts[at] = _shifted(part, by)
        else:
            _shift_block(part, by)
    if isinstance(node, If):
        node.between = _shifted(node.between, by)
        _shift(node.then, by)
        if node.otherwise:
            _shift(node.otherwise, by)


def _shift_block(block: Block, by: int) -> None:
    block.end = _shifted(block.end, by)
    for node in block.nodes:
        _shift(node, by)


def _shifted(text: str, by: int) -> str:
    return re.sub(rf"\n {{{-by}}}(?=\S| )", "\n", text) if by < 0 else text.replace("\n", "\n" + " " * by)
