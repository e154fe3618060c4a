"""Parses C++ into a tree of declarations and statements, as far as the library's headers and kernel files need.

A node keeps its source text and the comments above it, so that what is left after cutting reads as before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Block", "If", "Node", "bare", "parse", "words"]

UNROLL = "JITACT_UNROLL"  # before a loop
_TOKEN = re.compile(
    r"""(?P<space>\s+)
    | (?P<comment>//[^\n]*|/\*.*?\*/)
    | (?P<string>R"(?P<delimiter>\w*)\(.*?\)(?P=delimiter)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+')
    | (?P<directive>\#(?:[^\n]*\\\n)*[^\n]*)
    | (?P<word>\w+(?:[.']\w+)*)
    | (?P<sign>::|->|\+\+|--|&&|\|\||[-+*/%&|^=!<>]=|.)""",
    re.VERBOSE | re.DOTALL,
)
_NO_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^[ \t]*#[^\n]*', re.DOTALL | re.MULTILINE)
_WORD = re.compile(r"(?:\b\w+::)*\b[A-Za-z_]\w*")
_MEMBER = re.compile(r"(?:(?:\.|->|::)\s*template\s+|(?<!\.)\.(?=[A-Za-z_])|->(?=[A-Za-z_]))\w+")
_CLASS = re.compile(
    r"(?:template\b.*?>\s*)?(?:friend\s+)?(?:struct|class|union)\b(?!.*[=(]\s*$)[^=(]*(?:alignas\(\w+\))?[^=(]*$", re.DOTALL
)
_LAMBDA = re.compile(r"(?:\)|(?<![\w\]])\[[^\[\]]*\]|\)\s*->\s*[\w:<>]+)\s*(?:mutable\s*)?$")


@dataclass(eq=False)
class Node:
    """A declaration or a statement: text, and the blocks of functions, classes, namespaces and lambdas in it.

    Attributes:
        lead: the whitespace and comments before it.
        parts: text and blocks, in order.
        tail: a comment after it on the same line.
    """

    lead: str = ""
    parts: list[str | Block] = field(default_factory=list)
    tail: str = ""

    def __str__(self) -> str:
        """The source text with ``lead`` and ``tail``."""
        return self.lead + self.text + self.tail

    @property
    def text(self) -> str:
        """The source text without ``lead`` and ``tail``."""
        return "".join(map(str, self.parts))

    @property
    def head(self) -> str:
        """The text before the first block."""
        return self.parts[0] if self.parts and isinstance(self.parts[0], str) else ""

    def blocks(self) -> Iterator[Block]:
        """Its direct blocks."""
        return (part for part in self.parts if isinstance(part, Block))


@dataclass(eq=False)
class Block:
    """The nodes between braces."""

    nodes: list[Node]
    end: str = ""  # spaces and comments before the closing brace

    def __str__(self) -> str:
        """The source text with its braces."""
        return "{" + "".join(map(str, self.nodes)) + self.end + "}"


@dataclass(eq=False)
class If(Node):
    """``if``, ``for`` or ``while``; ``parts`` are only the keyword and its condition."""

    then: Node | None = None
    otherwise: Node | None = None
    between: str = ""  # spaces and comments before else

    @property
    def text(self) -> str:
        """The source text without ``lead`` and ``tail``, with the branches."""
        text = "".join(map(str, self.parts)) + str(self.then)
        return text + (f"{self.between}else{self.otherwise}" if self.otherwise else "")

    @property
    def condition(self) -> str:
        """The text in the parentheses."""
        return self.head[self.head.index("(") + 1 : self.head.rindex(")")]

    def blocks(self) -> Iterator[Block]:
        """The blocks of its branches."""
        for branch in (self.then, self.otherwise):
            if branch is not None:
                yield from branch.blocks()


def parse(text: str) -> Block:
    """Parses a file's declarations into one block."""
    return _Parser(text).block("namespace")


def bare(text: str) -> str:
    """The text without comments, strings and directives."""
    return _NO_CODE.sub(" ", text)


def words(text: str, members: bool = True) -> set[str]:
    """The names in a text, with their scopes, as ``single::exp``; if ``members``, including those after ``.`` and ``->``."""
    text = bare(text)
    if not members:
        text = _MEMBER.sub(" ", text)
    return set(_WORD.findall(text))


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens = [(match.lastgroup, match[0]) for match in _TOKEN.finditer(text)]
        self.tokens = [("string" if kind == "delimiter" else kind, each) for kind, each in self.tokens]
        self.at = 0

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")

    def next(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1][1]

    def trivia(self) -> str:
        found = ""
        while self.peek()[0] in ("space", "comment"):
            found += self.next()
        return found

    def tail(self) -> str:
        """Takes a comment on the rest of the line."""
        start, found = self.at, ""
        while self.peek()[0] in ("space", "comment") and "\n" not in self.peek()[1]:
            found += self.next()
        if "//" in found or "/*" in found:
            return found
        self.at = start
        return ""

    def block(self, kind: str) -> Block:
        """Takes nodes up to and including a closing brace, or up to the end."""
        nodes: list[Node] = []
        while True:
            lead = self.trivia()
            if self.peek()[1] in ("}", ""):
                if self.peek()[1]:
                    self.next()
                return Block(nodes, lead)
            node = self.statement() if kind == "function" else self.declaration(kind)
            node.lead, node.tail = lead, node.tail + self.tail()
            nodes.append(node)

    def declaration(self, kind: str) -> Node:
        if self.peek()[0] == "directive":
            return Node(parts=[self.next()])
        parts: list[str | Block] = [""]
        depth = 0
        while self.peek()[1]:
            group, token = self.peek()
            text = bare(parts[0] if len(parts) == 1 else "") if token == "{" else ""
            if token == "{" and depth == 0:
                head = re.sub(r"alignas\(\w+\)", "", text)
                inside = (
                    "namespace" if re.match(r"\s*(?:inline )?namespace\b|extern\s+$", head)
                    else "raw" if re.search(r"\benum\b|[^=!<>]=\s*$|\bconcept\b|\brequires\b", head) or len(parts) > 1
                    else "class" if _CLASS.match(head)
                    else "function" if ")" in head
                    else "raw"
                )  # fmt: skip
                self.next()
                if inside == "raw":
                    parts[-1] += "{" + self.raw("}")
                    continue
                parts += [self.block(inside), ""]
                if inside in ("function", "namespace"):
                    return Node(parts=parts[:-1])
                continue
            if group == "directive":
                parts[-1] += "\n" if not parts[-1].endswith("\n") else ""
            parts[-1] += self.next()
            depth += (token == "(") - (token == ")")
            if depth == 0 and (token == ";" or (kind == "class" and token == ":" and parts[0].strip() in _ACCESS)):
                break
        return Node(parts=parts)

    def raw(self, end: str) -> str:
        """Takes text up to and including a closing bracket."""
        text, opening = "", {"}": "{", ")": "("}[end]
        while self.peek()[1]:
            token = self.next()
            text += token
            if token == opening:
                text += self.raw(end)
            elif token == end:
                break
        return text

    def statement(self) -> Node:
        group, token = self.peek()
        if group == "directive":
            return Node(parts=[self.next()])
        if token == "{":
            self.next()
            return Node(parts=[self.block("function")])
        if token in ("if", "for", "while", UNROLL):
            return self.control()
        if token in ("case", "default"):
            text = ""
            while not text.endswith(":"):
                text += self.next()
            return Node(parts=[text])
        return self.expression()

    def control(self) -> Node:
        text = ""
        while self.peek()[1] != "(":
            text += self.next()
        text += self.next() + self.raw(")")
        then_lead = self.tail() + self.trivia()
        then = self.statement()
        then.lead = then_lead
        then.tail += self.tail()
        node = If(parts=[text], then=then)
        start, between = self.at, self.trivia()
        if text.startswith("if") and self.peek()[1] == "else":
            self.next()
            lead = self.trivia()
            node.otherwise, node.between = self.statement(), between
            node.otherwise.lead = lead
        else:
            self.at = start
        return node

    def expression(self) -> Node:
        parts: list[str | Block] = [""]
        depth = 0
        while self.peek()[1]:
            group, token = self.peek()
            if token == "}" and depth == 0:  # a statement without its semicolon, in a macro
                break
            if token == "{":
                text = bare(parts[-1])
                self.next()
                if _LAMBDA.search(text) or (depth == 0 and text.strip().endswith("do")):
                    parts += [self.block("function"), ""]
                elif len(parts) == 1 and re.match(r"\s*(?:struct|class)\b[^=(]*$", text):
                    parts += [self.block("class"), ""]
                else:
                    parts[-1] += "{" + self.raw("}")
                continue
            if group == "directive" and not parts[-1].endswith("\n"):
                parts[-1] += "\n"
            parts[-1] += self.next()
            depth += (token == "(") - (token == ")")
            if token == ";" and depth == 0:
                break
        return Node(parts=parts)


_ACCESS = ("public:", "private:", "protected:")
