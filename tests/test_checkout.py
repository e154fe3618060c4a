"""A checkout, or the unpacked source distribution, of any name: its tests run, and it hides no other package."""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from shutil import copytree

import pytest
from building import run_python
from common import SLOW

from jitact import report

CHECKOUT = Path(__file__).resolve().parents[1]
NOT_SOURCES = (".*", "__pycache__", "build", "dist", "*.egg-info")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
SOME_TESTS = (
    "tests/test_checkout.py::test_no_other_package_is_hidden_from_tests",
    "tests/test_docs.py::test_links_lead_somewhere",
    "tests/test_page.py::test_page",
    "tests/test_bench.py::TestReport",
)


def sources(folder: str, names: list[str]) -> list[str]:
    """Of the names in a folder those that are no sources, for ``copytree``: a virtual environment is one of them."""
    hidden = {name for pattern in NOT_SOURCES for name in fnmatch.filter(names, pattern)}
    return [name for name in names if name in hidden or Path(folder, name, "pyvenv.cfg").exists()]


def build(kind: str, folder: Path, out: Path) -> Path:
    """A distribution of the sources in a folder."""
    out.mkdir()
    done = subprocess.run([sys.executable, "-c", BUILD, kind, str(out)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout, which builds may write to."""
    return copytree(CHECKOUT, tmp_path_factory.mktemp("copy") / "jitact", ignore=sources)


@pytest.fixture(scope="module")
def unpacked(copied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of this checkout, unpacked."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(build("build_sdist", copied, tmp_path_factory.mktemp("sdist") / "out")) as archive:
        archive.extractall(folder)
    (made,) = folder.iterdir()
    return made


@pytest.mark.parametrize(
    ("name", "options"),
    [
        SLOW("jitact-main", []),
        ("jitact-0.1.0", ["--import-mode=prepend"]),
        SLOW("my jitact (2)", ["-p", "no:cacheprovider"]),
        SLOW("copy", ["-p", "no:cacheprovider"]),
    ],
)
def test_tests_run_in_a_folder_of_any_name(name: str, options: list[str], unpacked: Path, tmp_path: Path) -> None:
    checkout = copytree(unpacked, tmp_path / name)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "jitact").symlink_to(checkout)  # found by its right name, as if it were installed
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path])}
    environment.pop("JITACT_CACHE_DIR")
    command = [sys.executable, "-m", "pytest", "-W", "error::pytest.PytestConfigWarning", *options, *SOME_TESTS]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (checkout / ".pytest_cache").exists() == ("no:cacheprovider" not in options)


def test_source_distribution_is_complete(copied: Path, unpacked: Path) -> None:
    pages = ("README.md", "ACTIVATIONS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE")
    for place in ("tests", "docs", "examples", "notebooks", "results", "kernels", "bench.py", "py.typed", *pages):
        for path in (copied / place, *(copied / place).rglob("*")):
            assert (unpacked / path.relative_to(copied)).exists(), path


def test_wheel_is_the_same_from_both_and_holds_the_package_alone(copied: Path, unpacked: Path, tmp_path: Path) -> None:
    found = []
    for i, folder in enumerate((copied, unpacked)):
        with zipfile.ZipFile(build("build_wheel", folder, tmp_path / str(i))) as wheel:
            found.append({name for name in wheel.namelist() if ".dist-info/" not in name})
            (commands,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("entry_points.txt"))
            assert commands == "[console_scripts]\njitact = jitact.__main__:main\n"
    inside = (path for packages in copied.glob("*/__init__.py") for path in packages.parent.rglob("*") if path.is_file())
    facts = [copied / name for name in ("py.typed", "__init__.pyi", "results/accuracy-cuda.json")]
    package = [*copied.glob("*.py"), *inside, *facts]
    assert found[0] == found[1] == {f"jitact/{path.relative_to(copied).as_posix()}" for path in package}


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with a package that is called like a folder of the checkout."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    return tmp_path


def test_no_other_package_is_hidden_from_tests(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(stand_in)])
    found = [importlib.util.find_spec("kernels").origin, run_python("import kernels; print(kernels.__file__)").stdout]
    assert not [path for path in found if Path(path.strip()).is_relative_to(CHECKOUT)]


def test_no_other_package_is_hidden_from_bench(stand_in: Path) -> None:
    (stand_in / "sitecustomize.py").write_text(
        "import atexit\natexit.register(lambda: print('\\n' + __import__('kernels').__file__))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(stand_in), *sys.path])}
    command = [sys.executable, report.ROOT / "bench.py", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == str(stand_in / "kernels" / "__init__.py"), done.stderr


def test_bench_refuses_another_jitact(tmp_path: Path) -> None:
    (tmp_path / "jitact").mkdir()
    (tmp_path / "jitact" / "__init__.py").touch()
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, CHECKOUT / "bench.py", "relu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"bench.py: `import jitact` finds {tmp_path / 'jitact'}, not {CHECKOUT}: pip install -e ")


def test_bench_says_that_jitact_is_not_installed() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", CHECKOUT / "bench.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("bench.py: there is no package jitact: pip install -e ")
