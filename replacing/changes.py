"""Whether a tensor may be changed in place between two points of a method, from its source code. Nothing is run."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import FunctionType

import torch.nn.functional as F
from torch import Tensor, nn

from .syntax import function_of, is_name, is_own_call, names, own_calls, parsed

__all__ = ["change"]

_HARMLESS = {"bool", "float", "getattr", "hasattr", "int", "isinstance", "len", "type"}  # functions
_PYTORCH = {"F", "functional", "nn", "torch"}  # what modules of such functions are called
# Functions whose result may be their argument, or a view of it.
_VIEWS = {
    "adjoint", "alpha_dropout", "as_strided", "as_tensor", "asarray", "atleast_1d", "atleast_2d", "atleast_3d",
    "broadcast_tensors", "broadcast_to", "chunk", "conj", "detach", "diagonal", "dropout", "dropout1d", "dropout2d",
    "dropout3d", "dsplit", "feature_alpha_dropout", "flatten", "hsplit", "imag", "moveaxis", "movedim", "narrow", "permute",
    "positive", "ravel", "real", "reshape", "resolve_conj", "resolve_neg", "select", "split", "split_with_sizes", "squeeze",
    "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsafe_chunk", "unsafe_split",
    "unsqueeze", "view_as_complex", "view_as_real", "vsplit",
}  # fmt: skip
# Methods of tensors that change none; not of lists, dictionaries and sets, which may hand their arguments on.
_OF_TENSORS = {name for name in dir(Tensor) if not name.endswith("_")} - {*dir(list), *dir(dict), *dir(set)}
_SAID_OF_TENSORS = {"device", "dtype", "is_cuda", "itemsize", "layout", "ndim", "requires_grad", "shape"}  # no views
_CONTAINERS = "enumerate", "iter", "list", "reversed", "tuple", "zip"  # functions that give what is in their arguments
_NEVER = (sys.maxsize, 0)  # a line that is not reached
_HANDING_ON = nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.Flatten, nn.Unflatten


def change(
    definition: ast.FunctionDef,
    self_name: str,
    given: Sequence[ast.expr],
    between: Iterable[ast.AST],
    after: Iterable[ast.AST],
    children: Mapping[str, nn.Module | None],
) -> str:
    """What may change a tensor in place, as text; "" if nothing does.

    Changes of any variable count, as it may be a view of the tensor, or share its version counter; and calls that are given the
    tensor, or a view, and are neither PyTorch's nor of modules that are not seen to work in place.

    Args:
        definition: the method.
        self_name: the name of its first argument.
        given: expressions whose values are the tensor.
        between: the nodes of what runs between the two points.
        after: the nodes of what runs later, until backward, where only changes of the tensor and of its views count.
        children: the module's submodules.
    """
    roots = set().union(*[_roots(each, self_name, children) for each in given])
    shared, numbers = _sharing(definition, roots, self_name, children), _numbers(definition)
    of_state = _of_state(given, self_name)
    for node in between:
        if changed := _changed(node, self_name, children, numbers):
            return f"changes {min(changed)} in place"
        if passed := _passed(node, self_name, shared, children):
            return f"gives {min(passed)} to {ast.unparse(node.func)} in between"
        if of_state and is_own_call(node, self_name) and node.func.attr not in children:
            return f"calls {ast.unparse(node.func)} in between, which may change {ast.unparse(of_state[0])}"
    after = list(after)
    others = _others_from(definition, given, shared, set(after), self_name, children)
    still = [(node, {name for name in shared if _place(node) < others.get(name, _NEVER)}) for node in after]
    for node, names_of_it in still:
        if changed := _changed(node, self_name, children, numbers) & names_of_it:
            return f"changes {min(changed)} in place"
    for node, names_of_it in still:
        if passed := _passed(node, self_name, names_of_it, children):
            seen = "changes" if is_own_call(node, self_name) else "may change"
            return f"gives {min(passed)} to {ast.unparse(node.func)}, which {seen} it"
    return ""


def _place(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _others_from(
    definition: ast.FunctionDef,
    given: Sequence[ast.expr],
    shared: set[str],
    after: set[ast.AST],
    self_name: str,
    children: Mapping[str, nn.Module | None],
) -> dict[str, tuple[int, int]]:
    """Where variables have got other values, whichever way the method runs, from statements in ``after``."""
    found: dict[str, tuple[int, int]] = {}
    for node in _always_reached(definition, set(given)):
        if node in after and isinstance(node, ast.Assign) and not _roots(node.value, self_name, children) & shared:
            for each in node.targets:
                if isinstance(each, ast.Name):
                    found.setdefault(each.id, (node.end_lineno, node.end_col_offset))
    return found


def _always_reached(definition: ast.FunctionDef, given: set[ast.expr]) -> Iterator[ast.stmt]:
    """The statements that follow, in its block and those around it, on the one that has these expressions."""
    for block in [of for node in ast.walk(definition) for _, of in ast.iter_fields(node) if isinstance(of, list)]:
        statements = [each for each in block if isinstance(each, ast.stmt)]
        having = [i for i, each in enumerate(statements) if given.intersection(ast.walk(each))]
        for each in statements[having[0] + 1 :] if having else ():
            if any([isinstance(part, (ast.Break, ast.Continue)) for part in ast.walk(each)]):
                break
            yield each


def _numbers(definition: ast.FunctionDef) -> set[str]:
    """The variables that are numbers, such as counters: nothing but constants is assigned to them."""
    of_all = {each.arg for each in ast.walk(definition) if isinstance(each, ast.arg)}
    constant: set[str] = set()
    for node in ast.walk(definition):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            constant |= names(*(node.targets if isinstance(node, ast.Assign) else [node.target]))
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.comprehension, ast.withitem)):
            assigned = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            of_all |= names(*[each for each in assigned if each is not None])
    return constant - of_all


def _changed(node: ast.AST, self_name: str, children: Mapping[str, nn.Module | None], numbers: set[str]) -> set[str]:
    """The variables that a node may change in place: ``x += y``, ``x[0] = y``, ``x.data = y``, ``x.zero_()``, ``relu_(x)``."""
    changed: list[ast.expr] = []
    if isinstance(node, ast.AugAssign):
        changed = [] if is_name(node.target, *numbers) else [node.target]
    elif isinstance(node, ast.Assign):
        places = [each for target in node.targets for each in ast.walk(target)]
        changed = [each for each in places if isinstance(each, ast.Subscript) or getattr(each, "attr", "") == "data"]
    elif isinstance(node, ast.Call):
        changed = [each.value for each in node.keywords if each.arg == "out"]
        if isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
            changed += [node.func.value, *_first(node)]
        elif any(each.arg == "inplace" for each in node.keywords) or _is_in_place(node):
            changed += _first(node)
    named = set().union(*[_roots(each, self_name, children) for each in changed])
    return (named - _PYTORCH) | {ast.unparse(each) for each in _of_state(changed, self_name)}


def _of_state(nodes: Iterable[ast.expr], self_name: str) -> list[ast.Attribute]:
    """Those that are attributes of the module: ``self.x``."""
    return [each for each in nodes if isinstance(each, ast.Attribute) and is_name(each.value, self_name)]


def _first(node: ast.Call) -> list[ast.expr]:
    """The first argument of a call; all, if it is given by name."""
    return node.args[:1] or [each.value for each in node.keywords]


def _is_in_place(node: ast.Call) -> bool:
    """Whether a call's positional arguments may ask for in place: anything but False there, or True anywhere."""
    place = _place_of_inplace(getattr(node.func, "attr", getattr(node.func, "id", "")))
    return any(
        each.value is True if isinstance(each, ast.Constant) else at == place for at, each in enumerate(node.args) if at > 0
    )


@cache
def _place_of_inplace(name: str) -> int | None:
    """Which argument of PyTorch's function of this name is ``inplace``; None if none is."""
    try:
        return list(inspect.signature(getattr(F, name, None)).parameters).index("inplace")
    except (TypeError, ValueError):
        return None


def _roots(node: ast.expr, self_name: str, children: Mapping[str, nn.Module | None]) -> set[str]:
    """The variables of which an expression may be a view: of ``x[0].chunk(2)``, x; none if it is computed."""
    within: list[ast.expr] = []
    if isinstance(node, ast.Name):
        return set() if node.id == self_name else {node.id}
    if isinstance(node, ast.Call) and is_name(node.func, *_CONTAINERS):
        within = node.args
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        child = children.get(node.func.attr) if is_name(node.func.value, self_name) else None
        if _is_pytorchs(node.func.value):
            within = _first(node) if node.func.attr in _VIEWS else []
        else:
            within = _first(node) if isinstance(child, _HANDING_ON) else [node.func.value]
    elif isinstance(node, ast.Attribute):
        within = [] if is_name(node.value, self_name) else [node.value]
    elif isinstance(node, (ast.Subscript, ast.Starred)):
        within = [node.value]
    elif isinstance(node, ast.IfExp):
        within = [node.body, node.orelse]
    elif isinstance(node, ast.NamedExpr):
        within = [node.target, node.value]
    elif isinstance(node, (ast.Tuple, ast.List)):
        within = node.elts
    elif isinstance(node, ast.Dict):
        within = node.values
    return set().union(*[_roots(each, self_name, children) for each in within])


def _sharing(
    definition: ast.FunctionDef, shared: set[str], self_name: str, children: Mapping[str, nn.Module | None]
) -> set[str]:
    """The variables that may share memory with some of the method's: views, and what they are views of."""
    groups = [names(*bound) | _roots(value, self_name, children) for bound, value in _bindings(definition)]
    found = set(shared)
    while more := set().union(*[group for group in groups if group & found]) - found:
        found |= more
    return found


def _bindings(definition: ast.FunctionDef) -> Iterator[tuple[list[ast.expr], ast.expr]]:
    """The targets and the value of all that gives variables their values; of a loop the value is what it runs through."""
    for node in ast.walk(definition):
        if isinstance(node, ast.Assign):
            yield node.targets, node.value
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            yield [node.target], node.value
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            yield [node.target], node.iter


def _passed(node: ast.AST, self_name: str, shared: set[str], children: Mapping[str, nn.Module | None]) -> set[str]:
    """Which of these variables are given to a call that may change them."""
    passed = _named_in(*node.args, *node.keywords) & shared if isinstance(node, ast.Call) else set()
    return set() if passed and _is_harmless(node, self_name, shared, children) else passed


def _named_in(*nodes: ast.AST) -> set[str]:
    """The variables in these nodes, but for those of which only a property such as ``x.dtype`` is meant."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif not (isinstance(node, ast.Attribute) and node.attr in _SAID_OF_TENSORS):
            found |= _named_in(*ast.iter_child_nodes(node))
    return found


def _is_harmless(node: ast.Call, self_name: str, shared: set[str], children: Mapping[str, nn.Module | None]) -> bool:
    """Whether a call does not change its arguments."""
    func = node.func
    if not isinstance(func, ast.Attribute):
        return is_name(func, *_HARMLESS)
    if is_own_call(node, self_name):
        child = children.get(func.attr)
        return child is not None and not any(getattr(each, "inplace", False) or _overwrites(each) for each in child.modules())
    of_tensor = func.attr in _OF_TENSORS and self_name not in names(func.value)
    return of_tensor or _is_pytorchs(func.value) or bool(_roots(func.value, self_name, children) & shared)


def _is_pytorchs(node: ast.expr) -> bool:
    """Whether it is one of PyTorch's modules of functions, such as ``torch.nn.functional``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return is_name(node, *_PYTORCH)


def _overwrites(module: nn.Module) -> bool:
    """Whether forward, or a method that it calls, changes an argument in place, as far as its source shows it."""
    cls, seen, pending = type(module), {"forward"}, ["forward"]
    if cls.__module__.partition(".")[0] == "torch":
        return False  # those that do so have an attribute
    while pending:
        function = function_of(inspect.getattr_static(cls, pending.pop(), None))
        tree = parsed(function) if function is not None else None
        for definition in _functions(tree):
            first, *others = _arguments(definition) or [""]
            if _changes_some(definition, set(others), first, module._modules) or _calls_what_changes(definition, function):
                return True
            found = own_calls(definition, first) - seen - module._modules.keys()
            seen |= found
            pending += found
    return False


def _functions(tree: ast.AST | None) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree or ast.Module()) if isinstance(node, ast.FunctionDef)]


def _arguments(definition: ast.FunctionDef) -> list[str]:
    return [each.arg for each in ast.walk(definition.args) if isinstance(each, ast.arg)]


def _calls_what_changes(definition: ast.FunctionDef, method: FunctionType) -> bool:
    """Whether a method calls a function of its module, by its name, that changes one of its own arguments in place."""
    called = {node.func.id for node in ast.walk(definition) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    for function in [method.__globals__.get(name) for name in called]:
        tree = parsed(function) if isinstance(function, FunctionType) else None
        if any(_changes_some(each, set(_arguments(each)), "", {}) for each in _functions(tree)):
            return True
    return False


def _changes_some(
    definition: ast.FunctionDef, given: set[str], self_name: str, children: Mapping[str, nn.Module | None]
) -> bool:
    """Whether a method changes one of these variables in place, or a view, before it assigns something else to it."""
    shared, numbers = _sharing(definition, given, self_name, children), _numbers(definition)
    for statement in definition.body:
        if any(_changed(node, self_name, children, numbers) & shared for node in ast.walk(statement)):
            return True
        if isinstance(statement, ast.Assign) and not _roots(statement.value, self_name, children) & shared:
            shared -= {each.id for each in statement.targets if isinstance(each, ast.Name)}
    return False
