"""The command ``jitact``: its subcommands, exit codes, interruption, progress."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from building import answer

import jitact
from jitact import accuracy, bench
from jitact.__main__ import COMMANDS, main
from jitact.kernels.loader import build, cache, log
from jitact.kernels.loader.plan import make_plan
from jitact.measuring import activation_rows, commandline, models, operand_rows, text, timing
from jitact.measuring import progress as progress_module
from jitact.measuring.commandline import keeping, progress, say, write_json
from jitact.measuring.others import Others

pytest_plugins = ["building"]
NAMES = [command.name for command in COMMANDS]
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
TAKING_NAMES = ["bench", "check", "accuracy", "export", "build", "clear", "tune"]


def test_without_a_command_it_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    said = capsys.readouterr()
    assert said.err == "" and all(said.out.count(f"\n  {name} ") == 2 for name in NAMES)
    assert {"bench", "check", "export", "build", "list", "where", "clear", "doctor", "accuracy", "report", "tune"} < set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_command_has_help_under_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0 and capsys.readouterr().out.startswith(f"usage: jitact {name} ")


def code_of(arguments: list[str]) -> int:
    """The exit code of a command line, whether it is returned or raised."""
    try:
        return main(arguments)
    except SystemExit as stopped:
        return stopped.code


@pytest.mark.parametrize("name", TAKING_NAMES)
def test_a_wrong_name_is_the_same_everywhere(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of([name, "softsing"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("jitact") and said.err.count("\n") == 1
    assert "no activation named 'softsing': did you mean 'softsign'" in said.err


@pytest.mark.parametrize("given", ["gelu+biass", "swiglu+row_weihgt", "gelu+"])
@pytest.mark.parametrize("name", TAKING_NAMES)
def test_a_wrong_part_of_a_name_is_the_same_everywhere(name: str, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of([name, given]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"jitact {name}: ") and said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bnech"], "jitact: no command 'bnech'"),
        (["list", "--all"], "jitact list: unrecognized arguments: --all"),
        (["bench", "relu", "--all"], "jitact bench: unrecognized arguments: --all"),
        (["clear", "--unused", "-1"], "jitact clear: argument --unused: must be a positive number"),
        (["check", "relu", "--low", "2", "--high", "1"], "jitact check: needs low <= high"),
        (["check", "relu", "--low", "inf"], "jitact check: there is no float32 from low=inf to high=inf"),
        (["check", "softmax", "--low", "1e5", "--dtype", "fp16"], "jitact check: there is no float16 from low=100000"),
        (["build", "relu", "--arch", "nine"], "jitact build: argument --arch: 'nine' is no compute capability"),
        (["build", "relu", "--arch", ""], "jitact build: argument --arch: must name a compute capability, such as 9.0, got ''"),
        (["build", "gelu+foo"], "jitact build: 'gelu+foo': 'foo' cannot be fused with an activation"),
        (["clear", "gelu+foo"], "jitact clear: 'gelu+foo': 'foo' cannot be fused with an activation"),
        (["export", "gelu+foo"], "jitact export: 'gelu+foo': 'foo' cannot be fused with an activation"),
        (["export", "relu", "--shape", "3"], "jitact export: argument --shape: no shape '3'; write it like 8192x8192"),
        (["export", "relu", "-o", "no/such.py"], "jitact export: argument -o/--output: cannot write 'no/such.py'"),
        (["check", "softmx"], "jitact check: no activation named 'softmx': did you mean 'softmax'"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and said.err.startswith(message), said.err


@pytest.mark.parametrize("line", ["bench relu --json", "bench relu --html", "accuracy relu --json", "export relu -o"])
def test_where_nothing_can_be_written_nothing_is_measured(line: str, tmp_path: Path, monkeypatch, capsys) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.touch()
    (tmp_path / "old.md").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    for path in (new, old):
        assert code_of([*line.split(), str(path)]) == 2
        said = capsys.readouterr()
        assert not said.out and said.err.endswith(f"cannot write {str(path)!r}: Permission denied\n"), said.err
    assert code_of([*line.split(), "n" * 300]) == 2 and "File name too long" in capsys.readouterr().err


def test_a_table_that_cannot_be_written_is_told_before(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "r.json").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).resolve() != tmp_path)
    assert code_of(["export", "relu", "-o", "-"]) == 0 and capsys.readouterr().out == jitact.export("relu")
    assert code_of(["accuracy", "relu", "--json", str(tmp_path / "r.json")]) == 2
    assert f"cannot write {str(tmp_path / 'r.md')!r}: Permission denied" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0 and main(["version"]) == 0
    short, *long = capsys.readouterr().out.splitlines()
    assert short == f"jitact {jitact.__version__}" and long[0].startswith(short) and f"torch {torch.__version__}" in long[1]


def test_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["check", "Softsign", "--dtype", "bf16", "--high", "4"]) == 0
    assert "softsign: x / (1 + |x|)" in capsys.readouterr().out
    (tmp_path / "slip.cu").write_text(
        "// activation: slip\nELEMENTWISE T forward(T x) { return x; }\nELEMENTWISE T backward(T dy, T x) { return -dy; }\n"
    )
    assert main(["check", "slip", "--from", str(tmp_path), "--dtype", "bf16"]) == 1
    assert "FAIL" in capsys.readouterr().out
    assert code_of(["check", "--from", str(tmp_path / "nowhere")]) == 2


def test_export_and_module_commands_are_the_same_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "softsign"]) == 0
    assert capsys.readouterr().out == jitact.export("softsign")
    assert main(["export", "softsign", "-o", "-"]) == 0 and not Path("-").exists()
    assert capsys.readouterr().out == jitact.export("softsign")


def test_output_that_nobody_reads_ends_it_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "jitact", "list"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


# Ctrl-C.


@pytest.fixture
def stopped_after(monkeypatch: pytest.MonkeyPatch):
    """Lets a function of a module run so many times, then has it raise KeyboardInterrupt."""

    def stop(module: object, name: str, times: int) -> None:
        works, calls = getattr(module, name), iter(range(times))

        def interrupted(*args):
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return works(*args)

        monkeypatch.setattr(module, name, interrupted)

    return stop


def test_bench_keeps_what_there_is_when_it_is_interrupted(stopped_after, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(timing, "RUNS", {"cpu": (3, 3, 0.0)})
    stopped_after(activation_rows, "measure_row", 1)
    file, page = tmp_path / "bench.json", tmp_path / "bench.html"
    files = ["--json", str(file), "--html", str(page)]
    assert main(["bench", "relu", "softsign", "--shape", "8x64", "--dtype", "fp32", "--device", "cpu", *files]) == 130
    results = json.loads(file.read_text())
    assert [row["name"] for row in results["rows"]] == ["relu"] and results["stopped"] == 130
    assert "Speed in fp32" in page.read_text(encoding="utf-8")
    said = capsys.readouterr()
    assert "STOPPED after 1 rows" in said.out and said.err == ""


def test_accuracy_that_is_interrupted_at_once_writes_nothing(stopped_after, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    stopped_after(accuracy, "rows_of", 0)
    assert main(["accuracy", "relu", "--dtype", "bf16", "--device", "cpu"]) == 130
    said = capsys.readouterr().out
    assert said.endswith("STOPPED before the first row\n") and "holds" not in said
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_bench_keeps_what_there_is_when_it_is_ended(tmp_path: Path, monkeypatch, capsys) -> None:
    """By SIGTERM, as ``timeout`` and schedulers send it."""
    monkeypatch.setattr(timing, "RUNS", {"cpu": (3, 3, 0.0)})
    before, measured = signal.getsignal(signal.SIGTERM), []

    def line(*args):
        measured.append(operand_rows_line(*args))
        signal.raise_signal(signal.SIGTERM)

    operand_rows_line = operand_rows._line
    monkeypatch.setattr(operand_rows, "_line", line)
    file = tmp_path / "bench.json"
    command = ["bench", "--operands", "swiglu", "--dtype", "fp32", "--shape", "8x64", "--device", "cpu"]
    assert main([*command, "--json", str(file)]) == 143
    results = json.loads(file.read_text())
    assert results["stopped"] == 143 and len(results["operands"]) == len(measured) == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_blocks_of_models_can_be_ended_while_they_are_compiled_ahead(monkeypatch, capsys) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def ended(*_: object) -> None:
        assert signal.getsignal(signal.SIGTERM) is not before, "the processes that compile would outlive this one"
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(models, "compile_ahead", ended)
    results = models.measure_models(["relu"], [torch.float32], torch.device("cpu"), ["mlp"], 1)
    assert results["stopped"] == 143 and not results["rows"] and signal.getsignal(signal.SIGTERM) is before


AHEAD = """
import os, signal, sys, time
from jitact.measuring.models import compile_ahead

def interrupted(task):
    signal.raise_signal(signal.SIGINT)
    return f"goes on with {task}"

def killed(task):
    os.kill(os.getpid(), signal.SIGKILL)

def endless(task):
    print("compiles", flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    compile_ahead(globals()[sys.argv[1]], ["relu", "mish"], 1)
"""


def _ahead(tmp_path: Path, kind: str) -> subprocess.Popen:
    (tmp_path / "ahead.py").write_text(AHEAD)
    command = [sys.executable, "-P", str(tmp_path / "ahead.py"), kind]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow  # two processes import torch anew
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("interrupted", "goes on with relu\ngoes on with mish\n"),  # tracebacks of each would cover what was measured
        ("killed", "a process that compiles was killed, perhaps for want of memory; the rest is compiled one by one\n"),
    ],
)
def test_processes_that_compile_ahead_leave_it_to_the_measuring_one(kind: str, said: str, tmp_path: Path) -> None:
    """A terminal interrupts all of them; and what is killed must not be waited for."""
    with _ahead(tmp_path, kind) as process:
        assert process.communicate(timeout=100) == (said, "") and process.returncode == 0


@pytest.mark.slow
def test_processes_that_compile_ahead_end_with_the_measuring_one(tmp_path: Path) -> None:
    with _ahead(tmp_path, "endless") as process:
        assert process.stdout.readline() == "compiles\n"
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=100)  # which ends when no process has the pipe
    assert (said, errors.splitlines()[-1]) == ("", "KeyboardInterrupt")


@pytest.fixture
def takes_ctrl_c() -> Iterator[None]:
    """Lets the process take Ctrl-C, which is ignored where a shell runs the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_torch_is_not_interrupted_where_that_would_be_lost(number: int, code: int, takes_ctrl_c: None) -> None:
    """As in a callback of a weak reference, of which torch.compile has many: the exception is printed, and nothing else."""
    source = "def called(*_):\n  raise_signal(number)\n  done.append('called')"
    done, results = [], {}
    names = {"number": number, "done": done, "raise_signal": signal.raise_signal}
    exec(compile(source, commandline._Ends.TORCH + "made_up.py", "exec"), names)
    before = [signal.getsignal(each) for each in ENDS]
    with keeping(results):
        made = torch.nn.ReLU()
        kept = weakref.ref(made, names["called"])
        del made
        for _ in range(6000):
            time.sleep(0.01)
        done.append("went on")
    assert kept() is None and done == ["called"] and results["stopped"] == code
    assert [signal.getsignal(each) for each in ENDS] == before and signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.parametrize("patience", [0.0, 3600.0])
def test_torch_is_interrupted_if_it_takes_long_and_again_if_that_was_lost(patience: float, monkeypatch) -> None:
    monkeypatch.setattr(commandline._Ends, "PATIENCE", patience)
    monkeypatch.setattr(commandline._Ends, "AGAIN", 0.1)
    source = "try:\n  raise_signal(15)\n  sleep(0.2)\nexcept KeyboardInterrupt:\n  lost = 1"
    names, results = {"raise_signal": signal.raise_signal, "sleep": time.sleep}, {}
    with keeping(results):
        exec(compile(source, commandline._Ends.TORCH + "made_up.py", "exec"), names)
        for _ in range(6000):
            time.sleep(0.01)
    assert results["stopped"] == 143 and names.get("lost") == (1 if patience == 0 else None)


def test_ctrl_c_that_is_ignored_stays_so() -> None:
    """As of a program that a shell runs in the background."""
    results, before = {}, signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with keeping(results):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert results["stopped"] == 0


def test_bench_keeps_what_there_is_when_first_uses_are_interrupted(stopped_after, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(timing, "RUNS", {"cpu": (3, 3, 0.0)})
    stopped_after(bench, "first_use", 0)
    file = tmp_path / "bench.json"
    assert main(["bench", "relu", "--shape", "8x64", "--dtype", "fp32", "--device", "cpu", "--json", str(file)]) == 130
    assert len(json.loads(file.read_text())["rows"]) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-P", "-m", "jitact", "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr == f"jitact: [Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}\n"


@pytest.mark.parametrize("there", ["notes.json", "notes.md"])
def test_accuracy_overwrites_nothing_else(there: str, tmp_path: Path, capsys) -> None:
    (tmp_path / there).write_text("notes")
    with pytest.raises(SystemExit, match="2"):
        accuracy.main(["relu", "--json", str(tmp_path / "notes.json")])
    assert "holds something else" in capsys.readouterr().err and (tmp_path / there).read_text() == "notes"


@pytest.mark.parametrize("there", ["results", "results/accuracy-cpu.json", "results/accuracy-cpu.md"])
def test_accuracy_says_what_is_in_its_usual_place(there: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path(there).parent.mkdir(exist_ok=True)
    Path(there).write_text("notes")
    assert code_of(["accuracy", "relu", "--device", "cpu"]) == 2 and Path(there).read_text() == "notes"
    said = capsys.readouterr()
    assert not said.out and there in said.err and said.err.endswith("; choose another file with --json\n")
    assert said.err.count("\n") == 1


def test_accuracy_keeps_the_rows_of_others(tmp_path: Path, capsys) -> None:
    file = tmp_path / "accuracy.json"
    for names in (["relu", "softsign"], ["relu"]):
        assert accuracy.main([*names, "--dtype", "bf16", "--device", "cpu", "--json", str(file)]) == 0
    results = json.loads(file.read_text())
    rows = [(row["name"], row["save"]) for row in results["rows"]]
    assert sorted(rows) == [("relu", "bit"), ("relu", "input"), ("softsign", "input"), ("softsign", "output")]
    results["machine"]["torch"] = "another"
    file.write_text(json.dumps(results))
    assert accuracy.main(["relu", "--dtype", "bf16", "--device", "cpu", "--json", str(file)]) == 0
    assert {row["name"] for row in json.loads(file.read_text())["rows"]} == {"relu"}


def test_accuracy_keeps_what_there_is_when_it_is_interrupted(stopped_after, tmp_path: Path, monkeypatch, capsys) -> None:
    works = accuracy.rows_of
    stopped_after(accuracy, "rows_of", 1)
    monkeypatch.chdir(tmp_path)
    command = ["accuracy", "relu", "softsign", "--dtype", "bf16", "--device", "cpu"]
    assert main([*command, "--json", "here.json"]) == 130
    assert {row["name"] for row in json.loads(Path("here.json").read_text())["rows"]} == {"relu"}
    assert "STOPPED" in capsys.readouterr().out
    monkeypatch.setattr(accuracy, "rows_of", works)
    stopped_after(accuracy, "rows_of", 1)
    assert main(command) == 130  # partial results do not go to the file of complete runs
    assert [path.name for path in sorted(Path("results").iterdir())] == ["accuracy-cpu.part.json", "accuracy-cpu.part.md"]


# Unused builds.


def test_clear_takes_what_was_not_used_lately(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = {name: build.obtain(make_plan(answer(1, name)))[0] for name in ("answer", "other", "third")}
    old = time.time() - 40 * cache.DAY
    for name in ("answer", "other"):
        os.utime(entries[name].folder, (old, old))
    cache.mark_used(entries["other"])
    assert main(["list"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("answer "))
    assert " 40 d " in row
    assert main(["clear", "--unused", "41"]) == 0 and "removed 0 builds" in capsys.readouterr().out
    assert main(["clear", "--unused", "30", "other"]) == 0 and "removed 0 builds" in capsys.readouterr().out
    assert main(["clear", "--unused", "30"]) == 0 and "removed 1 build," in capsys.readouterr().out
    assert {entry.build.name for entry in cache.entries(stand_in)} == {"other", "third"}


def test_a_use_is_kept_in_mind_once_a_day(stand_in: Path) -> None:
    entry, _ = build.obtain(make_plan(answer(1)))
    just_now = time.time() - cache.DAY / 2
    os.utime(entry.folder, (just_now, just_now))
    cache.mark_used(entry)
    assert cache.used(entry) == pytest.approx(just_now, abs=1)


# Progress, and the detection of other work.


def test_progress_is_shown_where_a_person_watches(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(progress_module, "_watched", lambda: True)
    monkeypatch.setattr(progress_module, "PATIENCE", 0.0)
    for name in progress(["relu", "gelu"], 2, str):
        say(f"row of {name}")
    said = capsys.readouterr()
    assert "] 0/2 relu" in said.err and "] 1/2 gelu, 0:00 left" in said.err and said.err.endswith("\r\033[K")
    assert said.out == "row of relu\nrow of gelu\n"
    monkeypatch.setattr(progress_module, "PATIENCE", 60.0)
    assert list(progress([1, 2], 2)) == [1, 2] and capsys.readouterr().err == ""


def test_nothing_is_shown_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress([1, 2], 2)) == [1, 2]
    with log.working("compiling relu"):
        say("row")
    assert capsys.readouterr() == ("row\n", "")


def test_a_build_shows_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(log.logging.getLogger(), "handlers", [])
    log.configure()
    with log.working("compiling relu"):
        time.sleep(1.2)
    assert "jitact: compiling relu ... 1 s" in terminal.getvalue() and terminal.getvalue().endswith("\r\033[K")


def test_others() -> None:
    others = Others()
    assert others.cpus() >= 0 and others.disturb(10**6) and not others.disturb(-(10**6))


def test_the_summary_says_that_the_machine_was_busy() -> None:
    row = {"name": "relu", "dtype": "fp32", "wrong": [], "ours": dict.fromkeys(text.DIRECTIONS, 1.0), "busy": True}
    row |= {"floor": dict.fromkeys(text.DIRECTIONS, 0.9)}
    results = {"machine": {"kind": "cpu"}, "rows": [row], "first_use": {}, "import_ms": None, "geometric_means": []}
    said = text.bench_summary(results)
    assert "NOT TO BE TRUSTED: this machine did other work during 1 of 1 rows" in said
    assert "97 %" not in said, "that line is for GPUs"
    row["busy"] = False
    assert "TRUSTED" not in text.bench_summary(results)


@pytest.mark.parametrize("kind", ["rows", "operands"])
def test_results_are_written_a_row_a_line(kind: str, tmp_path: Path) -> None:
    results = {"stopped": 0, "machine": {"device": "x"}, kind: [{"name": "relu", "ulp": float("inf")}, {"name": "gelu"}]}
    write_json(tmp_path / "r.json", results)
    text = (tmp_path / "r.json").read_text(encoding="utf-8")
    assert json.loads(text) == results | {kind: [{"name": "relu", "ulp": "inf"}, {"name": "gelu"}]}
    assert '\n  {"name": "relu", "ulp": "inf"},\n  {"name": "gelu"}\n' in text


def test_results_that_cannot_be_written_leave_the_earlier_ones(tmp_path: Path, monkeypatch) -> None:
    earlier, file = {"machine": {"device": "x"}, "rows": [{"name": "relu"}]}, tmp_path / "r.json"
    write_json(file, earlier)

    def killed(*_: object) -> None:
        assert len(list(tmp_path.iterdir())) == 2  # all is written
        assert json.loads(file.read_text()) == earlier
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write_json(file, earlier | {"stopped": 0})
    assert json.loads(file.read_text()) == earlier and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("export relu -o r.py", "r.py"),
        ("accuracy relu --dtype bf16 --device cpu --json r.json", "r.md"),
        ("bench relu --shape 8x64 --device cpu --html r.html", "r.html"),
    ],
)
def test_what_cannot_be_written_whole_leaves_what_was_there(line: str, written: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "first_use", lambda *_: {})
    monkeypatch.setattr(timing, "RUNS", dict.fromkeys(("cpu", "cuda"), (3, 3, 0.0)))
    assert code_of(line.split()) == 0
    earlier, replace = Path(written).read_text(encoding="utf-8"), os.replace

    def full(there: Path, path: Path) -> None:
        if path.name == written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(there, path)

    monkeypatch.setattr(os, "replace", full)
    assert code_of(line.split()) not in (0, None)
    assert Path(written).read_text(encoding="utf-8") == earlier and not list(tmp_path.glob(".*"))


def test_results_are_written_where_a_link_leads_with_the_same_permissions(tmp_path: Path) -> None:
    file, link = tmp_path / "r.json", tmp_path / "link.json"
    file.touch(0o600)
    link.symlink_to(file)
    write_json(link, {"stopped": 0})
    assert link.is_symlink() and json.loads(file.read_text()) == {"stopped": 0} and file.stat().st_mode & 0o777 == 0o600


def test_results_go_into_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_json(tmp_path / "pipe", {"stopped": 0})
    assert json.loads(os.read(reader, 1000)) == {"stopped": 0}
    os.close(reader)


def test_results_go_into_a_pipe_without_a_name() -> None:
    """As /dev/stdout is before ``| jq``."""
    reader, writer = os.pipe()
    write_json(Path(f"/dev/fd/{writer}"), {"stopped": 0})
    assert json.loads(os.read(reader, 1000)) == {"stopped": 0}
    os.close(reader)
    os.close(writer)
