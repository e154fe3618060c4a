"""The house: what lies where, and that arrows between its modules run one way."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import jitact
from jitact.activations import TABLE

ROOT = Path(jitact.__file__).parent
PACKAGES = ("kernels", *(path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "kernels"))
MODULES = [
    path
    for path in ROOT.rglob("*.py")
    if path.parent == ROOT or (path.relative_to(ROOT).parts[0] in PACKAGES and path.relative_to(ROOT).parts[0] != "tests")
]


def name_of(path: Path) -> tuple[str, ...]:
    return tuple(part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__")


HEADERS = sorted(path for path in (ROOT / "kernels" / "device").iterdir() if path.suffix in (".h", ".cuh", ".cpp"))
KNOWN = {name_of(path) for path in MODULES}


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """What runs when a module is imported."""
    for node in ast.iter_child_nodes(tree):
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not is_for_types:
            yield node
            yield from statements(node)


def imported(path: Path, *, later: bool = False) -> set[tuple[str, ...]]:
    """The package's modules that a module imports; with ``later`` also those that its functions do when they are called."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path)[:-1]
    found, tree = set(), ast.parse(path.read_text())
    for node in ast.walk(tree) if later else statements(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1] + tuple((node.module or "").split(".") if node.module else ())
            elif node.module and node.module.split(".")[0] == "jitact":
                base = tuple(node.module.split(".")[1:])
            else:
                continue
            found |= {(*base, each.name) if (*base, each.name) in KNOWN else base for each in node.names}
        elif isinstance(node, ast.Import):
            found |= {tuple(each.name.split(".")[1:]) for each in node.names if each.name.split(".")[0] == "jitact"}
    return (found & KNOWN) - {name_of(path)}


def test_modules_import_what_others_offer() -> None:
    """What one module imports from another is in the other's ``__all__``, if it has one. Pickles name one that is not."""
    offered = {name_of(path): public_names(path) for path in MODULES}
    assert len([names for names in offered.values() if names]) > 80
    hidden = set()
    for path in MODULES:
        package = name_of(path) if path.name == "__init__.py" else name_of(path)[:-1]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level and node.module:
                base = package[: len(package) - node.level + 1] + tuple(node.module.split("."))
                names = {each.name for each in node.names if (*base, each.name) not in KNOWN}
                hidden |= {(*base, name) for name in names - (offered[base] or names)}
    assert hidden == {("modules", "_revive")}


def public_names(path: Path) -> set[str] | None:
    """A module's ``__all__``; None if it has none."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" and isinstance(node.value, ast.List):
            return set(ast.literal_eval(node.value))
    return None


def test_no_circle_of_imports() -> None:
    """A module that nothing left to place imports can be placed: what cannot be is in a circle, or above one."""
    arrows = {name_of(path): imported(path) for path in MODULES}
    assert len(arrows) > 100 and arrows["registry",] > {("activations",), ("records",)}
    while placeable := [name for name, below in arrows.items() if not below & arrows.keys()]:
        for name in placeable:
            del arrows[name]
    assert not arrows


def test_functions_import_nothing_from_above() -> None:
    """What a function imports when it is called is below its module, too, but for what is named here."""
    arrows = {name_of(path): imported(path) for path in MODULES}

    def below(name: tuple[str, ...], seen: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
        for each in arrows.get(name, set()) - seen:
            seen.add(each)
            below(each, seen)
        return seen

    upwards = set()
    for path in MODULES:
        name = name_of(path)
        for other in imported(path, later=True) - arrows[name]:
            if name in below(other, set()):
                upwards.add((".".join(name), ".".join(other)))
    assert upwards == {
        ("registry", "replacing.counterparts"),  # get() takes PyTorch's classes and functions, whose table is that of replace
        ("registry", "exporting.onefile"),  # as a program
        ("modules", "gating.generated"),  # pickles of gated("mish") look in modules
    }


def test_the_loader_imports_nothing_above_it() -> None:
    """Nor does it a tool."""
    loader = [path for path in MODULES if name_of(path)[:2] == ("kernels", "loader")]
    assert len(loader) > 15
    for path in loader:
        assert {name[:2] for name in imported(path)} <= {("kernels", "loader")}, path


def test_lines_of_the_table_repeat_nothing_of_what_files_keep() -> None:
    """What backward can keep follows from a file's functions; a line says it where that is not the default."""
    tree = ast.parse((ROOT / "activations.py").read_text())
    lines = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Activation"]
    given = {ast.literal_eval(line.args[0]) for line in lines if any(each.arg == "declared_saves" for each in line.keywords)}
    assert len(lines) == sum(not (record.gating and record.gating.preset_of) for record in TABLE)
    assert given == {record.name for record in TABLE if record.saves != record.source.signature.saves}
    assert all(set(record.saves) <= set(record.source.signature.saves) for record in TABLE)


def test_forms_in_pytorch_repeat_no_defaults() -> None:
    """Those of parameters are the table's."""
    forms = [form for record in TABLE for form in (record.reference, record.exact) if form and isinstance(form, FunctionType)]
    own = [form for form in forms if form.__module__.startswith("jitact.") and form.__module__.endswith("references")]
    assert len(own) > 40
    for form in own:
        given = inspect.signature(form).parameters.values()
        assert not [each.name for each in given if isinstance(each.default, float)], form.__name__


def is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return is_number(node.left) and is_number(node.right)
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def test_tolerances_are_in_one_table() -> None:
    """What has a number for each dtype, and is no such table, is named here."""
    found = set()
    for path in (*MODULES, *(ROOT / "tests").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            by_dtype = isinstance(node, ast.Dict) and all(ast.unparse(key).startswith("torch.") for key in node.keys if key)
            if by_dtype and node.keys and all(map(is_number, node.values)):
                found.add("/".join(path.relative_to(ROOT).parts))
    codes, steps_of_random_numbers, bits_of_mantissas = "tests/rows_common.py", "fusing/drop.py", "measuring/pairs.py"
    assert found == {"measuring/limits.py", codes, steps_of_random_numbers, bits_of_mantissas}


def test_first_levels() -> None:
    files = {path.name for path in (ROOT / "kernels").iterdir() if path.is_file() and path.suffix != ".cu"}
    assert files == {"__init__.py", "__main__.py"}
    assert len(list(ROOT.glob("*.py"))) <= 15


def test_public_classes_share_no_name() -> None:
    """What users call ``Row``, no other module has for something else."""
    classes: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(".".join(name_of(path)))
    public = {name: classes[name] for name in jitact.__all__ if name in classes}
    assert public == {"Channel": ["records"], "Row": ["records"]}


def test_headers_have_each_helper_once() -> None:
    """A short function that two device headers define alike belongs in one that both include.

    Not those of math_*.cuh, which call functions of their number type.
    """
    lines: dict[str, set[str]] = {}
    for path in HEADERS:
        if path.name.startswith("math"):
            continue
        for line in path.read_text().splitlines():
            if re.match(r"JITACT_(INLINE|DEVICE) .*\}$", line):
                lines.setdefault(line, set()).add(path.name)
    assert len(lines) > 20
    assert not {line: names for line, names in lines.items() if len(names) > 1}


def test_lines_of_headers() -> None:
    """ruff looks at Python alone."""
    assert len(HEADERS) > 30
    for path in HEADERS:
        assert not [line for line in path.read_text().splitlines() if len(line) > 132], path
