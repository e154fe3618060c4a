"""Lets tests run in a checkout of any name and place, whatever packages are installed.

Built kernels are kept in pytest's cache directory, if there is one, for the next run.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The checkout is the package itself: on the path, where `python -m pytest` puts it, its `kernels` would hide other packages'.
# Subprocesses of tests use the same path, in any working directory.
sys.path[:] = [folder for folder in map(os.path.abspath, sys.path) if Path(folder).resolve() != ROOT]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)

# With several workers, more threads and compilers than cores slow each other down: some tests take eight times as long.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    for variable in ("OMP_NUM_THREADS", "JITACT_JOBS"):
        os.environ.setdefault(variable, str(max(1, len(os.sched_getaffinity(0)) // int(workers))))

import torch
from common import registered_as_before

import jitact
from jitact.exporting import build, rows
from jitact.exporting import extract as extracting
from jitact.exporting.conditions import Facts
from jitact.kernels.loader import memory as loader_memory
from jitact.kernels.loader.source import KernelSource

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Checkout:
    """Makes pytest treat the checkout as a folder, not as a package, which it would import under the folder's name."""

    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path.resolve() == ROOT else None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Checkout())
    tested = Path(jitact.__file__).resolve().parent
    if tested != ROOT:
        message = f"these are the tests of {ROOT}, but `import jitact` finds {tested}: that is what is tested"
        config.issue_config_time_warning(pytest.PytestConfigWarning(message), stacklevel=2)
    kernels = os.environ.get("JITACT_CACHE_DIR") or kept_folder(config, "kernels")
    if kernels is None:
        kernels = tempfile.mkdtemp(prefix="jitact-tests-")
        config.add_cleanup(lambda: shutil.rmtree(kernels, ignore_errors=True))
    os.environ["JITACT_CACHE_DIR"] = os.path.abspath(kernels)


def kept_folder(config: pytest.Config, name: str) -> Path | None:
    """A folder in pytest's cache, which persists; None with `-p no:cacheprovider` or in a read-only checkout."""
    if not config.pluginmanager.has_plugin("cacheprovider"):
        return None
    try:
        folder = config.cache.mkdir(name)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


@pytest.fixture(autouse=True, scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory):
    """Runs tests and their subprocesses outside of the checkout, which `python -c` would put on the path."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    yield
    os.chdir(before)


@pytest.fixture(scope="session")
def exported_builds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache directory for exported files' builds; persistent, like that of the kernels."""
    return kept_folder(request.config, "exported") or tmp_path_factory.mktemp("exported")


@pytest.fixture
def extracted_once(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps what is extracted for exported files, by all that it depends on, for all tests and workers of this run.

    The sources of softmax take some seconds.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "extracted"
    folder.mkdir(exist_ok=True)

    def extract(
        source: KernelSource, facts: Facts, roots: Collection[str], dtypes: Collection[str], devices: Collection[str]
    ) -> extracting.Extract:
        known = [(name, sorted(map(repr, values))) for name, values in sorted(facts.items())]
        key = repr([source, source.full_text, source.defines(), known, sorted(roots), list(dtypes), list(devices)])
        file = folder / hashlib.sha256(key.encode()).hexdigest()
        if not file.exists():
            made = extracting.extract(source, facts, roots, dtypes, devices)
            part = file.with_suffix(f".{os.getpid()}")
            part.write_bytes(pickle.dumps(made))
            part.rename(file)
        return pickle.loads(file.read_bytes())

    for module in (build, rows):
        monkeypatch.setattr(module, "extract", extract)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Each available device."""
    return request.param


@pytest.fixture(autouse=True)
def only_here() -> Iterator[None]:
    """Removes the activations that a test defines."""
    with registered_as_before():
        yield


@pytest.fixture(autouse=True)
def unsaved(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is remembered in the process, which is nothing at first, and forgotten after the test."""
    known: dict[str, Any] = {}
    monkeypatch.setattr(loader_memory, "_unsaved", known)
    return known
