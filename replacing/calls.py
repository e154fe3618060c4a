"""Finds which of given functions a module's forward calls, from its source code. Nothing is run."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cached_property, lru_cache, partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from .syntax import tree_of

__all__ = ["Call", "calls", "is_hashable"]


class Call(NamedTuple):
    """A call of a known function, or of one whose source is not available.

    Attributes:
        name: of the function.
        where: the function that calls it; "" if it is one of the module's own methods.
        hidden: ``name`` has no source, so what it calls is unknown.
    """

    name: str
    where: str = ""
    hidden: bool = False


class Mention(NamedTuple):
    """A name in source code with its attributes: ``F``, ``("gelu",)`` for ``F.gelu``.

    Attributes:
        root: the name; :data:`SUPER` for ``super()``; "" for any other expression.
        attributes: the attributes that follow it.
        called_bare: whether it is called without arguments, as methods of tensors are: ``x.tanh()``.
    """

    root: str
    attributes: tuple[str, ...] = ()
    called_bare: bool = False


SUPER = "super()"
VALUE = object()  # the meaning of a name that only running the code would show


def calls(
    module: Any,
    known: Mapping[Callable, str],
    value: type,
    foreign: str,
    apart: Set[str] = frozenset(),
    stands_in: tuple[type, ...] = (),
) -> set[Call]:
    """The known functions that a module's forward calls, itself or through other methods and functions.

    A function that is only mentioned counts as called, as it may be passed on. One held by the module does not count.

    Args:
        module: the module.
        known: the functions to look for, with their names.
        value: the class of values whose type is unknown: ``(x + 1).tanh()`` is its method.
        foreign: the package whose functions are not followed, nor are those of the standard library.
        apart: methods of the module that are not followed.
        stands_in: classes of objects in the place of a method, for which the method of the module's class is followed.
    """
    found: set[Call] = set()
    seen: set[FunctionType] = set()
    resolver = _Resolver(module, known, value, apart, stands_in)
    pending = [(target, is_method, "") for target, is_method in resolver.of_module(("forward",), False)]
    while pending:
        target, is_method, caller = pending.pop()
        target = _plain(target)
        if is_hashable(target) and target in known:
            found.add(Call(known[target], caller))
        elif isinstance(target, FunctionType) and target not in seen:
            seen.add(target)
            if "__wrapped__" in vars(target):
                pending.append((target.__wrapped__, is_method, caller))
            home = target.__globals__.get("__name__", "")  # not __module__: functools.wraps copies that
            package = home.split(".")[0]
            is_foreign = package in sys.stdlib_module_names or (package == foreign and not is_method)
            if is_foreign or home == "torch.nn.modules.module":
                continue
            mentions = _mentions(target)
            if mentions is None:
                found.add(Call(_label(target), caller, hidden=True))
            label = "" if is_method else _label(target)
            for mention in mentions or ():
                pending += [(*meant, label) for meant in resolver.meant(target, is_method, mention)]
    return found


def _plain(target: Any) -> Any:
    """The function inside a method, property or partial."""
    while True:
        if isinstance(target, (staticmethod, classmethod, MethodType)):
            target = target.__func__
        elif isinstance(target, property):
            target = target.fget
        elif isinstance(target, partial):
            target = vars(target).get("__wrapped__", target.func)
        elif isinstance(target, cached_property):
            target = target.func
        else:
            return target


def _label(function: FunctionType) -> str:
    return function.__qualname__.rpartition("<locals>.")[2]


def is_hashable(target: Any) -> bool:
    """Whether an object can be a key of a dictionary."""
    try:
        hash(target)
    except TypeError:
        return False
    return True


class _Resolver:
    """Resolves mentions in a module's code to objects, and decides whether these are methods of the module."""

    def __init__(
        self, module: Any, known: Mapping[Callable, str], value: type, apart: Set[str], stands_in: tuple[type, ...]
    ) -> None:
        self.module, self.known, self.value, self.apart, self.stands_in = module, known, value, apart, stands_in
        self.classes = {cls.__qualname__ for cls in type(module).__mro__}

    def meant(self, function: FunctionType, is_method: bool, mention: Mention) -> Iterator[tuple[Any, bool]]:
        """The objects that a mention in a function refers to."""
        root, attributes, called_bare = mention
        code = function.__code__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        if root == SUPER:
            parent = _contents(cells.get("__class__"))
            if isinstance(parent, type) and isinstance(self.module, parent):
                yield getattr(super(parent, type(self.module)), attributes[0], None), True
        elif is_method and attributes and (root,) == code.co_varnames[:1]:
            yield from self.of_module(attributes, called_bare)
        elif root in cells:
            yield from self.attribute(_contents(cells[root]), attributes, called_bare)
        elif root in code.co_varnames + code.co_cellvars:
            yield from self.attribute(VALUE, attributes, called_bare)
        else:
            yield from self.attribute(function.__globals__.get(root, VALUE), attributes, called_bare)

    def of_module(self, attributes: tuple[str, ...], called_bare: bool) -> Iterator[tuple[Any, bool]]:
        """The object that an attribute of the module refers to."""
        first, *others = attributes
        own = vars(self.module)
        if first in own.get("_parameters", ()) or first in own.get("_buffers", ()):
            yield from self.attribute(VALUE, others, called_bare)
        elif first not in own.get("_modules", ()) and first not in self.apart and not others:
            held = _plain(own.get(first))
            if held is None or isinstance(held, self.stands_in):
                yield inspect.getattr_static(type(self.module), first, None), True
            elif isinstance(held, FunctionType) and held not in self.known:
                yield held, self.is_own(held)

    def attribute(self, of: Any, attributes: Sequence[str], called_bare: bool) -> Iterator[tuple[Any, bool]]:
        """The object that attributes refer to: a function of a package or class, or a method of a value."""
        for attribute in attributes:
            if isinstance(of, ModuleType):
                of = vars(of).get(attribute)
            elif isinstance(of, type):
                of = inspect.getattr_static(of, attribute, None)
            elif called_bare and (of is VALUE or isinstance(of, self.value)):
                of = getattr(self.value, attributes[-1], None)
                break
            else:
                return
        yield of, self.is_own(_plain(of))

    def is_own(self, function: Any) -> bool:
        """Whether a function was written as a method of the module's class, or of a parent."""
        return isinstance(function, FunctionType) and function.__qualname__.rpartition(".")[0] in self.classes


def _contents(cell: Any) -> Any:
    try:
        return VALUE if cell is None else cell.cell_contents
    except ValueError:  # it is empty
        return VALUE


@lru_cache(maxsize=1024)
def _mentions(function: FunctionType) -> tuple[Mention, ...] | None:
    """The mentions in a function's source; None if there is no source."""
    try:
        tree = tree_of(inspect.getsource(function.__code__))
    except Exception:  # no file, a changed one, or lines of a lambda that do not parse: the report is only a hint
        return None
    reader = _Reader()
    for node in _lambdas(tree, function) if function.__name__ == "<lambda>" else [tree]:
        reader.visit(node)
    return tuple(dict.fromkeys(reader.found))


def _lambdas(tree: ast.AST, function: FunctionType) -> Iterator[ast.Lambda]:
    """The lambdas in a statement that may be the function: those with its argument names, as nothing else identifies it."""
    names = list(function.__code__.co_varnames[: function.__code__.co_argcount])
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda) and [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)] == names:
            yield node


class _Reader(ast.NodeVisitor):
    """Collects mentions, except in annotations and decorators."""

    def __init__(self) -> None:
        self.found: list[Mention] = []

    def visit_Name(self, node: ast.Name) -> None:
        self.found.append(Mention(node.id))

    def visit_Attribute(self, node: ast.Attribute, called_bare: bool = False) -> None:
        attributes: list[str] = []
        base: ast.AST = node
        while isinstance(base, ast.Attribute):
            attributes.insert(0, base.attr)
            base = base.value
        root = base.id if isinstance(base, ast.Name) else ""
        if isinstance(base, ast.Call) and isinstance(base.func, ast.Name) and base.func.id == "super":
            root = SUPER
        if not root:
            self.visit(base)
        self.found.append(Mention(root, tuple(attributes), called_bare))

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            self.visit_Attribute(node.func, called_bare=not node.args and not node.keywords)
        else:
            self.visit(node.func)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for each in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(each)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)
