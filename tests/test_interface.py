"""What type checkers, editors, help() and readers are told of the interface."""

from __future__ import annotations

import ast
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import jitact
from jitact import report

CHECKOUT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", report.WRITTEN)
def test_what_is_written_is_current(name: str) -> None:
    assert (CHECKOUT / name).read_text(encoding="utf-8") == report.WRITTEN[name](CHECKOUT), "stale: run `jitact report`"


def test_the_stub_has_every_public_name() -> None:
    tree = ast.parse((CHECKOUT / "__init__.pyi").read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    imported = {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names if alias.asname}
    assert imported == set(jitact.PUBLIC) and defined | imported == set(jitact.__all__)
    assignments = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)]
    aliases = {node.targets[0].id: node.value.id for node in assignments}
    assert aliases["swish"] == "silu"
    assert all(getattr(jitact, alias) is getattr(jitact, name) for alias, name in aliases.items())


def test_help_shows_functions_and_activations() -> None:
    text = pydoc.plain(pydoc.render_doc(jitact))
    functions = text.partition("\nFUNCTIONS\n")[2].partition("\nDATA\n")[0]
    shown = {
        line.strip().partition("(")[0] for line in functions.splitlines() if line.startswith("    ") and line[4:5].isalpha()
    }
    assert shown == set(jitact.__all__) - {"REGISTRY"}


def test_only_what_is_meant_to_be_used_is_shown(only_here: None) -> None:
    before = set(jitact.__all__)
    assert {"registry", "load_ipython_extension", "PUBLIC", "sys"}.isdisjoint(before | set(dir(jitact)))
    jitact.define("swoosh", "x * sin(x)")
    assert set(jitact.__all__) - before == {"swoosh"} and "swoosh" in dir(jitact)


def test_importing_it_filters_no_warnings() -> None:
    program = (
        "import warnings; before = list(warnings.filters); import torch, jitact; assert warnings.filters[-1] == before[-1]\n"
    )
    program += "assert not [f for f in warnings.filters if f[1] and 'jitact' in f[1].pattern]"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "jitact.registry", "export", "softsing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
