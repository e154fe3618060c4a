"""Many processes and threads at once, and builds that are killed or interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from building import answer, in_child, run_python

from jitact import records, registry
from jitact.compiling import operators
from jitact.kernels.loader import build, cache
from jitact.kernels.loader import load as loader
from jitact.kernels.loader.plan import make_plan

pytest_plugins = ["building"]
pytestmark = pytest.mark.slow  # many processes, some killed

TORTURE = """
import json, sys
from contextlib import suppress
from pathlib import Path
from torture import Torture
torture = Torture(Path(sys.argv[1]), small=sys.argv[2] == "small", seed=int(sys.argv[3]))
{task}
"""


def test_one_builds_for_many_processes_and_threads(tmp_path: Path) -> None:
    program = TORTURE.format(task="print(json.dumps(torture.crowd(32, threads=8)))")
    done = run_python(program, str(tmp_path / "crowd"), "small", "0")
    builds, wrong, _ = json.loads(done.stdout.splitlines()[-1])
    assert (builds, wrong) == (1, 0), done.stderr


@pytest.mark.parametrize("kind", ["small", "real"])
def test_killed_builds_are_recovered(tmp_path: Path, kind: str) -> None:
    """JITACT_KILLS sets how many; the default is small."""
    kills = int(os.environ.get("JITACT_KILLS", "16" if kind == "small" else "2"))
    program = TORTURE.format(task=f"print(json.dumps(torture.kill({kills})))")
    done = run_python(program, str(tmp_path / "kills"), kind, str(time.time_ns() % 1000))
    recovered, moments, problems = json.loads(done.stdout.splitlines()[-1])
    assert recovered == kills and not problems, (recovered, moments, problems, done.stderr)


INTERRUPTED = """
import signal, sys
from jitact import kernels
from jitact.kernels import KernelSource
text = open(sys.argv[1]).read()
signal.signal(signal.SIGINT, signal.default_int_handler)  # inherited as ignored where a shell runs the tests in the background
print("ready", flush=True)
try:
    kernels.load(KernelSource("interrupted", text, "x.cu"))
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize("group", [False, True], ids=["as in a notebook", "as in a terminal"])
def test_ctrl_c_leaves_nothing_behind(folder: Path, tmp_path: Path, group: bool) -> None:
    text = tmp_path / "text"
    text.write_text('#include "elementwise.cuh"\nELEMENTWISE T forward(T x) { return exp(x) * tanh(x); }\n')
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", INTERRUPTED, str(text)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 60
    while not list(folder.glob(".staging/*/*.d")) and time.monotonic() < deadline:  # until the compilers are at work
        time.sleep(0.01)
    (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
    assert process.communicate(timeout=30)[0] == "interrupted\n" and process.returncode == 3
    assert not list((folder / ".staging").iterdir()), "its own folder is gone"
    assert not _working_in(folder), "and so are the compilers"
    assert not list(cache.entries(folder))


MANY = """
import os, signal, sys, types
from jitact.kernels.loader import prebuild
def obtain(plan):
    try:
        os.write(1, b"begun\\n")  # in one piece
        signal.pause()
    finally:
        os.write(1, b"cleared\\n")
prebuild.build.obtain = obtain
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    prebuild._build_all([types.SimpleNamespace(name=str(i)) for i in range(9)], 2, 0, 9)
except KeyboardInterrupt:
    sys.exit(3)
"""


@pytest.mark.parametrize("group", [False, True], ids=["as in a notebook", "as in a terminal"])
def test_ctrl_c_ends_the_builds_of_many(group: bool) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", MANY], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert [process.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
    (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
    try:
        assert process.communicate(timeout=30)[0] == "cleared\n" * 2, "and no other was begun"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 3


def _working_in(folder: Path) -> list[str]:
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{process}/cwd").startswith(str(folder)):
                found.append(process)
        except OSError:
            continue
    return found


def test_a_child_forked_during_a_build_builds_too(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork copies the locks of a thread that will never release them in the child."""

    def use() -> None:
        signal.alarm(60)  # seconds, after which a child that waits is killed
        with locks_of_threads():
            assert build.obtain(make_plan(answer(7)))[0].problem is None

    held, ended = threading.Event(), threading.Event()

    def hold() -> None:
        with locks_of_threads():
            held.set()
            ended.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert held.wait(60)
        in_child(use)
    finally:
        ended.set()
        holder.join()


@contextmanager
def locks_of_threads() -> Iterator[None]:
    with loader._lock, registry.lock, operators._lock, records._naming:
        yield


WORKERS = """
import sys, torch, jitact
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return jitact.softsign(torch.tensor([float(i)]))

if __name__ == "__main__":
    for start in ("fork", "spawn"):
        loader = DataLoader(Numbers(), batch_size=1, num_workers=2, multiprocessing_context=start)
        print([round(batch.item(), 4) for batch in loader])
"""


def test_workers_of_a_data_loader(folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "workers.py"
    program.write_text(WORKERS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.splitlines() == ["[0.0, 0.5, 0.6667, 0.75]"] * 2, done.stderr
    assert done.stderr.count("compiled in") == 1


RANK = """
import os, torch, jitact
os.write(1, f"{jitact.softsign(torch.ones(1)).item()}\\n".encode())  # at once, or ranks print into each other's lines
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_ranks_of_torchrun(folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.split() == ["0.5"] * 3, done.stderr
    assert done.stderr.count("compiled in") == 1
