"""How the methods of a module use the result of one of its submodules, from their source code. Nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import NamedTuple

from torch import nn

from .changes import change
from .syntax import assigns, function_of, is_name, names, own_calls, parsed, targets

__all__ = ["Result", "Uses", "assigned_from", "result_of", "uses_of"]

# Nodes that may catch exceptions; TryStar is Python 3.11's.
_TRIES = ast.Try, getattr(ast, "TryStar", ast.Try), ast.With, ast.AsyncWith
_METHODS = ast.FunctionDef, ast.AsyncFunctionDef
_LOOPS = ast.For, ast.While
_LATER = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp  # which run after they are defined
# Nodes that are compiled as functions of their own, with these names, or may be.
_UNNAMED = {
    ast.Lambda: "<lambda>",
    ast.GeneratorExp: "<genexpr>",
    ast.ListComp: "<listcomp>",
    ast.SetComp: "<setcomp>",
    ast.DictComp: "<dictcomp>",
}


class Uses:
    """Whether a submodule's result is used by one kind of operation, and by nothing else.

    Attributes:
        found: whether the operation was found.
        involved: names of the other submodules that take part in it.
        callers: the code that calls the submodule for it, see :meth:`Result.callers`.
        otherwise: another use of the result, as text; "" if there is none.
    """

    def __init__(self, module: nn.Module) -> None:
        """Starts without any use, unless the module, which has the submodule, runs a forward that is not its class's."""
        self.involved: set[str] = set()
        self.callers: set[tuple[str, str, int]] = set()
        self.found, self.otherwise = False, ""
        if "forward" in vars(module):
            self.otherwise = f"the forward of {type(module).__name__} was replaced on the module"


class Result(NamedTuple):
    """The result of a call in a method, such as ``self.<name>(...)``, and where it is used.

    Attributes:
        definition: the method's syntax tree; None if it is not known, though the method mentions the submodule.
        function: the method.
        self_name: the name of its first argument.
        call: the call; None where the submodule is mentioned and not called.
        values: the expressions whose value is the result, each with its parent node.
    """

    definition: ast.FunctionDef | None
    function: FunctionType
    self_name: str
    call: ast.Call | None
    values: list[tuple[ast.expr, ast.AST | None]]

    def callers(self) -> set[tuple[str, str, int]]:
        """The code that has the call: the module where it is, and names and first lines of the functions around the call."""
        functions = [node for node in ast.walk(self.definition) if isinstance(node, (*_METHODS, *_UNNAMED))]
        names = {_UNNAMED.get(type(node)) or node.name for node in functions if self.call in ast.walk(node)}
        module, found, pending = self.function.__globals__.get("__name__", ""), set(), [self.function.__code__]
        while pending:
            code = pending.pop()
            pending += [each for each in code.co_consts if isinstance(each, CodeType)]
            if code.co_name in names:
                found.add((module, code.co_name, code.co_firstlineno))
        return found

    def otherwise(self, what: str) -> str:
        """Text: the method does more with the result than ``what``, or passes the submodule on."""
        done = "passes it on" if self.call is None else f"does more with it than {what}"
        return f"{self.function.__name__ if self.definition is None else self.definition.name} {done}"

    def input_changed(self, children: Mapping[str, nn.Module | None]) -> str:
        """What may change an argument of the call in place until backward, as text; "" if nothing does."""
        first = self.call.lineno
        last = max((getattr(by, "end_lineno", value.end_lineno) for value, by in self.values), default=0)
        before = set(ast.walk(self.call))  # runs before the call or is it; what contains a use runs after it
        uses = {value for value, _ in self.values}
        loops = [node for node in ast.walk(self.definition) if isinstance(node, _LOOPS) and self.call in ast.walk(node)]
        begin = min([first, *(loop.lineno for loop in loops)])  # what is above the call in a loop runs again after it
        rest = [node for node in ast.walk(self.definition) if getattr(node, "lineno", 0) >= begin and node not in before]
        around = {node for node in rest if uses.intersection(ast.walk(node))}
        rest = [node for node in rest if node not in around]
        between, after = [[node for node in rest if (first <= node.lineno <= last) is early] for early in (True, False)]
        after += [each for node in around if (each := _without(node, uses)) is not None]
        given = [*self.call.args, *[each.value for each in self.call.keywords]]
        what = change(self.definition, self.self_name, given, between, after, children)
        return what and f"{self.definition.name} {what}"


def _without(node: ast.AST, uses: set[ast.expr]) -> ast.AST | None:
    """What a node that contains some of these expressions may do to others: a call without them, an assignment; else None."""
    if not isinstance(node, ast.Call):
        return node if isinstance(node, (ast.Assign, ast.AugAssign)) else None
    apart = [[each for each in of if uses.isdisjoint(ast.walk(each))] for of in (node.args, node.keywords)]
    return ast.copy_location(ast.Call(node.func, *apart), node)


def uses_of(cls: type, name: str) -> Iterator[Result]:
    """The results of ``self.<name>`` in the methods of a class."""
    for function in _methods(cls):
        if name not in _used(function.__code__):
            continue
        tree = parsed(function)
        definitions = [node for node in ast.walk(tree) if isinstance(node, _METHODS)] if tree is not None else []
        known = [node for node in definitions if node.args.posonlyargs or node.args.args]
        if not known:  # a lambda, *arguments alone, or no source
            yield Result(None, function, "", None, [])
        for definition in known:
            yield from _results(definition, function, name)


def _results(definition: ast.FunctionDef, function: FunctionType, name: str) -> Iterator[Result]:
    self_name = (definition.args.posonlyargs + definition.args.args)[0].arg
    parents = _parents(definition)
    for node in ast.walk(definition):
        if not (isinstance(node, ast.Attribute) and node.attr == name and is_name(node.value, self_name)):
            continue
        if isinstance(node.ctx, ast.Store):
            continue
        call = parents[node]
        if isinstance(call, ast.Call) and call.func is node:
            yield result_of(call, definition, function, parents)
        else:
            yield Result(definition, function, self_name, None, [])


def _parents(definition: ast.FunctionDef) -> dict[ast.AST, ast.AST]:
    return {child: parent for parent in ast.walk(definition) for child in ast.iter_child_nodes(parent)}


def result_of(
    call: ast.Call, definition: ast.FunctionDef, function: FunctionType, parents: dict[ast.AST, ast.AST] | None = None
) -> Result:
    """The result of a call in a method, of whatever function."""
    self_name = (definition.args.posonlyargs + definition.args.args)[0].arg
    parents = parents or _parents(definition)
    shared = {each for node in parents if isinstance(node, (ast.Global, ast.Nonlocal)) for each in node.names}
    values, parent = [call], parents[call]
    if isinstance(parent, ast.Assign) and not shared.isdisjoint(targets(parent)):
        values = []
    elif isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name):
        values = _uses(definition, parent, parents)
    return Result(definition, function, self_name, call, [(value, parents.get(value)) for value in values])


def _methods(cls: type) -> Iterator[FunctionType]:
    """The methods and properties of a class and its parents, without decorators and without PyTorch's own.

    Those that are overridden are among them only where some method may call its parents'.
    """
    seen, calls_parents = set(), False
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == "torch":
            continue
        for key, member in vars(base).items():
            function = function_of(member)
            if function is not None and (key not in seen or calls_parents):
                yield function
                parents = {"super", *[each.__name__ for each in cls.__mro__]}
                calls_parents |= key != "__init__" and not parents.isdisjoint(_used(function.__code__))
            seen.add(key)


def _used(code: CodeType) -> set[str]:
    """The names of attributes and global variables in a function, and in those within it."""
    within = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*map(_used, within))


def _uses(definition: ast.FunctionDef, assign: ast.Assign, parents: dict[ast.AST, ast.AST]) -> list[ast.Name]:
    """Where the assigned value may be read, whichever way the method runs: until the variable is assigned again in any case.

    ``x += y`` reads x, as do functions within the method, whenever they are called, and what is earlier in a loop.
    """
    name, again = assign.targets[0].id, _assigned_again(assign, parents)
    loops = [node for node in _around(assign, parents) if isinstance(node, _LOOPS)]
    within = {node for loop in loops for node in ast.walk(loop)} if again is None else set()
    for node in ast.walk(definition):
        if isinstance(node, _LATER) and node is not definition:
            within |= set(ast.walk(node))
    uses = []
    for node in ast.walk(definition):
        if not is_name(node, name) or node is assign.targets[0]:
            continue
        is_read = isinstance(node.ctx, ast.Load) or isinstance(parents[node], ast.AugAssign)
        is_after = _end(assign) <= _begin(node) and (again is None or _begin(node) < _end(again))
        if is_read and (is_after or node in within):
            uses.append(node)
    return uses


def _begin(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset


def _around(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    """The nodes that contain it, the innermost first."""
    while node in parents:
        node = parents[node]
        yield node


def _assigned_again(assign: ast.Assign, parents: dict[ast.AST, ast.AST]) -> ast.Assign | None:
    """The statement that assigns to the variable again whenever ``assign`` has run, unless the method ends; or None."""
    if any(isinstance(node, _TRIES) for node in _around(assign, parents)):
        return None
    parent, name = parents[assign], assign.targets[0].id
    block = parent.body if assign in parent.body else parent.orelse
    for statement in block[block.index(assign) + 1 :]:
        if isinstance(statement, ast.Assign) and any(is_name(target, name) for target in statement.targets):
            return statement
        if any(isinstance(node, (ast.Break, ast.Continue)) for node in ast.walk(statement)):
            return None
    return None


def assigned_from(definition: ast.FunctionDef, local: str, self_name: str) -> set[str]:
    """The names of own calls in all assignments from which a local variable gets its value, also through other variables."""
    found, seen, pending, known = set(), {local}, [local], assigns(definition)
    while pending:
        name = pending.pop()
        for assign in known:
            if name in targets(assign):
                found |= own_calls(assign.value, self_name)
                more = names(assign.value) - seen - {self_name}
                seen |= more
                pending += more
    return found
