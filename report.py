"""``jitact report``: writes the generated files of a checkout, from results/ and the table of activations.

The formats are in measuring/: ``text`` is bench.py's output, ``picture`` its pictures, ``page`` its HTML, ``markdown`` the
tables, ``interface`` the public interface.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from jitact.definitions.kernel_file import write_file
from jitact.measuring import interface
from jitact.measuring.commandline import CommandParser, exit_code
from jitact.measuring.markdown import (
    accuracy_markdown,
    activations_markdown,
    current_activations_markdown,
    current_comparison,
    current_headline,
    current_readme,
)
from jitact.measuring.picture import can_plot, draw
from jitact.measuring.text import (
    DIRECTIONS,
    PEERS,
    Entry,
    bench_heading,
    bench_row,
    bench_summary,
    classic,
    describe_machine,
    figure,
    geometric_means,
    size,
)

__all__ = [
    "DIRECTIONS",
    "PEERS",
    "ROOT",
    "WRITTEN",
    "Entry",
    "accuracy_markdown",
    "activations_markdown",
    "bench_heading",
    "bench_row",
    "bench_summary",
    "can_plot",
    "classic",
    "current_activations_markdown",
    "describe_machine",
    "draw",
    "figure",
    "geometric_means",
    "main",
    "size",
]

ROOT = Path(__file__).resolve().parent

WRITTEN: dict[str, Callable[[Path], str]] = {
    "ACTIVATIONS.md": current_activations_markdown,
    "README.md": current_readme,
    "__init__.pyi": lambda checkout: interface.stub(),
    "docs/comparison.md": current_comparison,
    "docs/api.md": lambda checkout: interface.api_markdown(),
    "results/headline.svg": current_headline,
}
"""The generated files of a checkout, and the functions of their whole text, which is "" if nothing was measured yet."""


def main(arguments: list[str] | None = None, prog: str = "python -m jitact.report") -> int:
    """The command line. Returns the exit code: 2 for bad arguments or outside a checkout."""
    parser = CommandParser(prog=prog, description=f"Writes {', '.join(WRITTEN)}, from the table of activations and results/.")
    parser.parse_args(arguments)
    return exit_code(lambda: _write(prog))


def _write(prog: str) -> int:
    if not (ROOT / "pyproject.toml").exists():
        print(f"{prog}: {ROOT} is no checkout, and has no measurements: run it in one", file=sys.stderr)
        return 2
    for name, content in WRITTEN.items():
        path = ROOT / name
        text = content(ROOT)
        if not text:
            print(f"{path} is not written: nothing was measured")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(exist_ok=True)
            write_file(path, text)
            print(f"wrote {path}")
        else:
            print(f"{path} is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
