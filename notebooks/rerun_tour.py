"""Runs tour.ipynb and keeps what comes out in it: ``python notebooks/rerun_tour.py``, on a machine that does nothing else."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat

TOUR = Path(__file__).resolve().with_name("tour.ipynb")


def main() -> None:
    """Runs every cell, in order, in a new kernel."""
    notebook = nbformat.read(TOUR, as_version=4)
    resources = {"metadata": {"path": str(TOUR.parent)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when each began and ended, which would change every time
    nbformat.write(notebook, TOUR)


if __name__ == "__main__":
    main()
