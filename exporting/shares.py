"""The numbers that an exported module passes to its kernel: in evaluation, it drops nothing and draws no slopes."""

from __future__ import annotations

import ast
import re
from dataclasses import replace

from .. import registry
from ..definitions.define import Definition
from ..definitions.expression import DROPOUT, in_cpp
from ..modules import GENERATED
from ..records import Activation

__all__ = ["with_shares"]


def with_shares(record: Activation) -> tuple[Activation, dict[str, str]]:
    """Makes each dropout probability a number of the kernel file, so that a module can pass 0 in evaluation.

    Args:
        record: the activation.

    Returns:
        The record, whose kernel file takes more numbers if probabilities were literals; and, for numbers that differ between
        evaluation and training, the Python expression for them, in which parameters are attributes of ``self``.

    Raises:
        ValueError: a kernel file with a backward of its own, or unmarked numbers, has a probability that is not a parameter; or
            an activation with dropout of its own is fused with other operations, or gated.
    """
    name, *parts = record.name.split("+")
    passed = {"dropout": "self.dropout if self.training else 0.0"} if "dropout" in parts else {}
    in_eval = {each: record.in_python[each] for each, _ in record.params if each in record.in_python}
    if in_eval:
        return record, passed | {each: f"self.{each} if self.training else {other}" for each, other in in_eval.items()}
    if parts and registry.class_of(name).activation.in_eval is not None:
        raise ValueError(f"{record.name} cannot be exported: {name} drops by itself; define the whole as one expression")
    if record.gating and record.in_eval is not None:
        at_gate = name.removeprefix(GENERATED)
        raise ValueError(f"{record.name} cannot be exported: {at_gate} drops by itself; define the whole as one expression")
    if not isinstance(record, Definition) or record.in_eval is None:
        return record, passed
    python = record.expression.renamed(*record.layout.tensors, *(f"self.{name}" for name, _ in record.params))
    calls = [node for node in ast.walk(ast.parse(python)) if isinstance(node, ast.Call) and _is_dropout(node)]
    shares = {node.args[3].value: ast.unparse(node.args[1]) for node in calls}
    text, added = record.source.text, []
    for stream, share in sorted(shares.items()):
        in_training = f"{share} if self.training else 0.0"
        parameter = share.removeprefix("self.")
        if parameter in dict(record.params) and len(re.findall(rf"{share}\b", python)) == [*shares.values()].count(share):
            passed[parameter] = in_training
            continue
        if record.functions > {"forward"} or record.source.numbers:
            why = "a kernel file with a backward, or unmarked numbers, takes what it drops as a parameter that is nothing else"
            raise ValueError(f"{record.name} cannot be exported with dropout of {share}: {why}")
        name = f"share{stream + 1}"
        while in_cpp(name) in text:
            name += "_of"
        start, end = _share(text, record.expression.random[stream])
        text = f"{text[:start]} {in_cpp(name)}{text[end:]}"
        added.append(f", Number<T> {in_cpp(name)}")
        passed[name] = in_training
    text = re.sub(r"(\bforward\([^()]*)\)", rf"\1{''.join(added)})", text, count=1)
    return replace(record, kernel=record.source._replace(text=text)), passed


def _is_dropout(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == DROPOUT and len(node.args) == 4


def _share(text: str, random: str) -> tuple[int, int]:
    """The start and end, in a kernel file, of the last argument of the dropout call with this random number."""
    for call in re.finditer(rf"\b{DROPOUT}\s*\(", text):
        depth, commas = 1, [call.end() - 1]
        for at in range(call.end(), len(text)):
            depth += (text[at] in "([{") - (text[at] in ")]}")
            if depth == 0 or (depth == 1 and text[at] == ","):
                commas.append(at)
            if depth == 0:
                break
        if text[commas[1] + 1 : commas[2]].strip() == random:
            return commas[2] + 1, commas[3]
    raise ValueError(f"no dropout of {random} in the kernel file")
