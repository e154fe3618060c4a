"""Runs the code in README.md and docs/*.md. The word after the fence selects how:

python       run, all blocks of a file in one namespace
python gpu   the same if there is a GPU; otherwise it is only compiled to bytecode
cuda         a kernel file: defined, compiled and called
sh           run by bash in an empty folder, line by line, with -m slow; $REPOSITORY is this checkout; lines that match
             NOT_HERE are left to CI
text         not code
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import jitact

ROOT = Path(__file__).parents[1]
FILES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if path.exists()]
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")
# Commands that install something or take too long for a test; CI runs the README's commands word for word.
NOT_HERE = re.compile(
    r"pip install|git clone|pytest|python bench\.py|jitact (bench|accuracy)$|jitact (clear|build)"
)


SHELL = ("sh", "bash")


class Block(NamedTuple):
    """A code block of a document."""

    kind: str
    code: str
    line: int


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        indent = len(match[1])
        code = "".join(line[indent:] for line in match[3].splitlines(keepends=True))
        found.append(Block(match[2].strip(), code, text.count("\n", 0, match.start()) + 2))
    return found


def commands(path: Path) -> list[Block]:
    return [block for block in blocks(path) if block.kind in SHELL]


def run_shell(block: Block, folder: Path) -> None:
    lines = [line for line in block.code.splitlines() if not NOT_HERE.search(line)]
    environment = os.environ | {"REPOSITORY": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    program = 'jitact() { python -m jitact "$@"; }'  # works if the package is not installed too
    command = ["bash", "-euo", "pipefail", "-c", "\n".join([program, *lines])]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"line {block.line}: {done.stderr}"


@pytest.fixture
def set_apart(exported_builds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(exported_builds))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_code_runs(path: Path, set_apart: None) -> None:
    space: dict = {"__name__": "__main__"}
    for block in blocks(path):
        where = f"{path.relative_to(ROOT)}, line {block.line}"
        if block.kind in ("python", "python gpu"):
            code = compile("\n" * (block.line - 1) + block.code, str(path), "exec")
            if block.kind == "python" or torch.cuda.is_available():
                if "plot(" in block.code:
                    pytest.importorskip("matplotlib")
                exec(code, space)
        elif block.kind == "cuda":
            cls = jitact.define(f"line_{block.line}", source=block.code)
            assert cls(*cls.get_init_inputs())(torch.zeros(3)).shape == (3,), where
        else:
            assert block.kind in (*SHELL, "text", "dockerfile"), f"{where}: no such kind of code, {block.kind!r}"


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in FILES if commands(path)], ids=lambda path: path.name)
def test_commands_run(path: Path, set_apart: None, tmp_path: Path) -> None:
    for block in commands(path):
        run_shell(block, tmp_path)


def test_lines_of_the_table_are_shown_as_they_are() -> None:
    table, page = (ROOT / "activations.py").read_text(), (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
    shown = re.findall(r"`(\w+)`'s line of the table [^`]*`([^`]*)`", page)
    assert dict(shown).keys() == {"prelu"}
    for name, code in shown:
        assert code in table.partition(f'Activation("{name}"')[2].partition(" Activation(")[0]


def test_kernel_files_are_shown_as_they_are() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"This is all of `(kernels/\w+\.cu)`[^`]*```cuda\n([^`]*)```", page)
    assert shown
    for path, text in shown:
        assert text == (ROOT / path).read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in LINK.findall(path.read_text(encoding="utf-8")):
        if not re.match(r"https?:", target):
            assert (path.parent / target).exists(), target
            text = (path.parent / target).read_text(encoding="utf-8") if anchor else ""
            headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
            assert not anchor or anchor[1:] in [re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings]
