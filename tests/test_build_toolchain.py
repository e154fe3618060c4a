"""Compilers and GPUs: where they are found, and the messages if they are missing or incompatible."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from building import answer, kernel, run_python

from jitact import kernels
from jitact.kernels import BuildError, ToolchainError
from jitact.kernels.loader import build, cache, gpu, plan, toolchain
from jitact.kernels.loader import memory as loader_memory
from jitact.kernels.loader.gpu import Arch, covered, parse_archs
from jitact.kernels.loader.memory import Memory
from jitact.kernels.loader.plan import make_plan

pytest_plugins = ["building"]

NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release {release}, V{release}.1"; echo "Build cuda_{release}.r{release}" ;;
  --dryrun) echo "#\\$ TOP={root}" ;;
  --list-gpu-code) echo sm_80; echo sm_90; echo sm_100 ;;
esac
"""


def fake_nvcc(home: Path, release: str) -> Path:
    """A toolkit whose nvcc prints versions and compiles nothing."""
    (home / "bin").mkdir(parents=True)
    (home / "lib64").mkdir()
    (home / "lib64" / "libcudart.so").write_text("")
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(NVCC.format(release=release, root=home))
    nvcc.chmod(0o755)
    return nvcc


@pytest.fixture
def cuda(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Simulates a torch built with CUDA 13.0 and a GPU of compute capability 9.0, without any nvcc."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(plan, "visible_archs", lambda memory: (Arch(9, 0),))
    monkeypatch.setattr(toolchain, "_nvcc_default", str(tmp_path / "usr-local-cuda" / "bin" / "nvcc"))
    monkeypatch.setattr(toolchain, "_pip_folders", lambda relative: [tmp_path / "site-packages" / "nvidia" / relative])
    for name in ("CUDA_HOME", "CUDA_PATH", "PYTORCH_NVCC", "CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("c++", "ninja"):
        (tools / tool).symlink_to(shutil.which(tool))
    monkeypatch.setenv("PATH", f"{tools}:/bin")
    return tmp_path


def memory() -> Memory:
    """One that knows nothing."""
    loader_memory._unsaved.clear()
    return Memory([])


def test_what_cannot_be_saved_is_remembered_in_the_process(tmp_path: Path, unsaved: dict[str, Any]) -> None:
    Memory([tmp_path]).put("saved", 1)
    Memory([tmp_path / "missing"]).put("not saved", 2)
    Memory([]).put("nowhere", 3)
    assert [Memory([]).get(key) for key in ("saved", "not saved", "nowhere")] == [None, 2, 3]
    assert Memory([tmp_path]).get("saved") == 1 and "saved" not in unsaved


def test_the_first_folder_that_knows_something_is_right(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for value, folder in enumerate(folders, 1):
        folder.mkdir()
        Memory([folder]).put("both", value)
    assert Memory(folders).get("both") == 1


@pytest.mark.parametrize("remembered", [[], {"release": "1"}, 5], ids=str)
def test_tools_are_asked_again_if_no_answer_is_remembered(
    cuda: Path, monkeypatch: pytest.MonkeyPatch, remembered: Any
) -> None:
    found = toolchain.find_cxx(memory())
    monkeypatch.setattr(Memory, "get", lambda self, key: remembered)
    assert toolchain.find_cxx(memory()) == found


def test_a_link_to_ccache_changes_with_the_compiler_that_it_runs(cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cuda / "ccache").write_text("")
    (cuda / "links").mkdir()
    (cuda / "links" / "c++").symlink_to(cuda / "ccache")
    monkeypatch.setenv("PATH", f"{cuda / 'links'}:{os.environ['PATH']}")
    assert f"{cuda / 'tools' / 'c++'} " in toolchain._identity(str(cuda / "links" / "c++"))


def test_nvcc_is_found_in_order(cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = fake_nvcc(cuda / "site-packages" / "nvidia" / "cu13", "13.0")
    assert toolchain.find_nvcc(memory()).path == str(pip)
    default = fake_nvcc(cuda / "usr-local-cuda", "13.0")
    assert toolchain.find_nvcc(memory()).path == str(default)
    on_path = fake_nvcc(cuda / "on-path", "13.0")
    monkeypatch.setenv("PATH", f"{on_path.parent}:{os.environ['PATH']}")
    assert toolchain.find_nvcc(memory()).path == str(on_path)
    home = fake_nvcc(cuda / "home", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(cuda / "home"))
    found = toolchain.find_nvcc(memory())
    assert (found.path, found.release, found.root) == (str(home), "13.0", str(cuda / "home"))
    assert found.archs == ("80", "90", "100") and found.origin == "CUDA_HOME"
    monkeypatch.chdir(cuda)
    monkeypatch.setenv("CUDA_HOME", "home")
    assert toolchain.find_nvcc(memory()) == found
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", f"on-path/bin:{os.environ['PATH']}")
    assert toolchain.find_nvcc(memory()).path == str(on_path)


def test_an_nvcc_of_another_cuda_is_passed_over(cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = fake_nvcc(cuda / "old", "12.8")
    monkeypatch.setenv("CUDA_HOME", str(cuda / "old"))
    monkeypatch.setenv("CUDA_PATH", str(cuda / "missing"))
    with pytest.raises(ToolchainError) as raised:
        toolchain.find_nvcc(memory())
    assert "does not run" not in str(raised.value)
    assert f"{old} is of CUDA 12.8" in str(raised.value) and "no nvcc of CUDA 13" in str(raised.value)
    assert '-m pip install "nvidia-cuda-nvcc==13.0.*" "nvidia-nvvm==13.0.*"' in str(raised.value)
    pip = fake_nvcc(cuda / "site-packages" / "nvidia" / "cu13", "13.0")
    assert toolchain.find_nvcc(memory()).path == str(pip)


def test_the_command_fits_torchs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    parts = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl")
    assert toolchain.nvcc_command().endswith("-m pip install " + " ".join(f'"{part}==13.2.*"' for part in parts))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert toolchain.nvcc_command() == "conda install -c nvidia cuda-nvcc=12.8 cuda-cudart-dev=12.8"


def test_the_runtime_of_the_pip_packages_is_found(cuda: Path) -> None:
    fake_nvcc(cuda / "site-packages" / "nvidia" / "cu13", "13.0")
    (cuda / "site-packages" / "nvidia" / "cu13" / "lib64" / "libcudart.so").unlink()
    found = toolchain.find_nvcc(memory())
    with pytest.raises(ToolchainError, match="no libcudart"):
        toolchain.find_cudart(found)
    lib = cuda / "site-packages" / "nvidia" / "cu13" / "lib"
    lib.mkdir()
    (lib / "libcudart.so.13").write_text("")
    assert toolchain.find_cudart(found) == lib / "libcudart.so.13"


def test_parts_of_different_versions_are_told_of(cuda: Path) -> None:
    """``pip install nvidia-cuda-nvcc==13.0.*`` alone installs the newest nvvm, whose output an older ptxas rejects."""
    packages = cuda / "site-packages"
    fake_nvcc(packages / "nvidia" / "cu13", "13.0")
    (packages / "nvidia_nvvm-13.0.88.dist-info").mkdir()
    assert toolchain.find_nvcc(memory()).release == "13.0"
    (packages / "nvidia_nvvm-13.0.88.dist-info").rename(packages / "nvidia_nvvm-13.5.37.dist-info")
    with pytest.raises(ToolchainError, match=r"beside it pip installed nvidia-nvvm 13\.5\.37"):
        toolchain.find_nvcc(memory())


def test_a_script_changes_with_what_it_starts(tmp_path: Path) -> None:
    inner = fake_nvcc(tmp_path / "toolkit", "13.0")
    wrapper = tmp_path / "nvcc"
    wrapper.write_text(f'#!/bin/sh\nexec {inner} "$@"\n')
    before = toolchain._identity(str(wrapper))
    assert toolchain._identity(str(wrapper)) == before
    inner.write_text(inner.read_text().replace("13.0", "13.11"))
    assert toolchain._identity(str(wrapper)) != before


def test_without_nvcc_cpu_tensors_work_and_cuda_tensors_say_why(quick: Path, cuda: Path) -> None:
    source = kernel()
    library = kernels.load(source)
    assert getattr(torch.ops.jitact, f"{library.name}_forward")(torch.ones(2)).tolist() == [0.5, 0.5]
    assert not library.has_cuda
    assert "no nvcc of CUDA 13" in library.cuda_problem and "CUDA_HOME (none)" in library.cuda_problem
    assert "pip install" in library.cuda_problem and library.cuda_problem.endswith("CPU tensors work")
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    operator = getattr(torch.ops.jitact, f"{library.name}_forward").default
    with pytest.raises(BuildError, match="no nvcc of CUDA 13"):
        operator.redispatch(key, torch.ones(2))  # as the dispatcher does for a CUDA tensor


def test_a_gpu_that_nvcc_does_not_know(cuda: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fake_nvcc(cuda / "usr-local-cuda", "13.0")
    assert make_plan(answer(1)).made_archs == (Arch(9, 0),)
    assert "capability 12.1" in make_plan(answer(1), archs=[Arch(12, 1)]).missing_cuda
    monkeypatch.setattr(plan, "visible_archs", lambda memory: (Arch(12, 1),))
    unknown = make_plan(answer(1))
    assert unknown.made_archs == () and "cannot compile for compute capability 12.1" in unknown.missing_cuda
    assert "it knows 8.0 to 10.0" in unknown.missing_cuda and "torch of a newer CUDA" in unknown.missing_cuda
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    assert "pip install" in make_plan(answer(1)).missing_cuda
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(plan, "visible_archs", lambda memory: (Arch(7, 0),))
    assert "torch of an older CUDA" in make_plan(answer(1)).missing_cuda

    monkeypatch.setattr(plan, "visible_archs", lambda memory: (Arch(9, 0),))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0 9.0+PTX")
    assert make_plan(answer(1)).made_archs == (Arch(9, 0, "", True),)
    assert "does not know 7.0: left out" in caplog.text


def test_gpus_that_may_be_hidden(cuda: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fake_nvcc(cuda / "usr-local-cuda", "13.0")
    monkeypatch.setattr(plan, "visible_archs", lambda memory: (Arch(6, 1), Arch(9, 0)))
    assert "cannot compile for compute capability 6.1" in make_plan(answer(1)).missing_cuda
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    made = make_plan(answer(1))
    assert made.gpus == made.made_archs == (Arch(9, 0),) and "does not know 6.1: left out" in caplog.text


def made_for(entry: cache.Entry, *archs: str) -> cache.Entry:
    """Changes the metadata of a build so that it has CUDA kernels for ``archs``."""
    key = "1" * 16
    folder = entry.folder.rename(entry.folder.parent / f"{entry.build.name}-{key}")
    described = entry.build._replace(key=key, archs=archs, nvcc="Build cuda_13.0")
    (folder / cache.RECORD).write_text(described.to_json())
    return cache.read(folder)


def test_an_image_filled_elsewhere_serves_a_gpu_machine(
    stand_in: Path, cuda: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(plan, "visible_archs", lambda memory: ())
        entry = made_for(build.obtain(make_plan(answer(1)))[0], "9.0", "10.0")
    assert build.obtain(make_plan(answer(1))) == (entry, False), "no nvcc here: the other build serves better"
    assert make_plan(answer(1)).runs_cuda(entry.build)

    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    found, made = build.obtain(make_plan(answer(1)))
    assert found == entry and not made, "nor a compiler"

    monkeypatch.setattr(plan, "visible_archs", lambda memory: (Arch(8, 0),))
    other = make_plan(answer(1))
    assert build.obtain(other) == (entry, False), "CPU tensors work"
    assert not other.runs_cuda(entry.build)


def test_a_build_for_more_archs_serves(stand_in: Path, cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(plan, "visible_archs", lambda memory: ())
        entry = made_for(build.obtain(make_plan(answer(1)))[0], "9.0", "10.0")
    fake_nvcc(cuda / "usr-local-cuda", "13.0")
    wanted = make_plan(answer(1))
    record = entry.build._replace(nvcc=wanted.nvcc.version)
    (entry.folder / cache.RECORD).write_text(record.to_json())
    assert build.obtain(wanted)[0].folder == entry.folder
    assert build.find(make_plan(answer(1), archs=[Arch(8, 0)])) is None
    (entry.folder / cache.RECORD).write_text(record._replace(nvcc="another").to_json())
    assert build.find(wanted) is None, "what is compiled here would be of the nvcc that is here"


@pytest.mark.parametrize("cxx", ["g++-99", "g++ '"], ids=["unknown", "not closed"])
def test_no_compiler(stand_in: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cxx: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(ToolchainError) as raised:
        build.obtain(make_plan(answer(1)))
    said = str(raised.value)
    assert "answer is not compiled yet" in said and "no C++ compiler" in said
    assert f"looked for {cxx} (from CXX)" in said and f"PATH={tmp_path}" in said and "install" in said
    assert len(said.splitlines()) <= 4


@pytest.mark.parametrize("jobs", ["1", "16"])
def test_relative_paths_of_tools(stand_in: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, jobs: str) -> None:
    """They are relative to the current folder, though torch runs the tools in another one."""
    ninja = toolchain.find_ninja()
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "ninja").symlink_to(ninja)
    (tmp_path / "tools" / "mine").symlink_to(shutil.which("c++"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JITACT_JOBS", jobs)
    monkeypatch.setenv("CXX", "tools/mine")
    monkeypatch.setenv("PATH", f"tools:{os.environ['PATH']}")
    assert build.obtain(make_plan(answer(7)))[1]
    assert toolchain.find_ninja() == str(tmp_path / "tools" / "ninja")


def test_flags_of_cxx(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are passed to the C++ compiler, also by nvcc, and give a separate build."""
    monkeypatch.setenv("CXX", "c++")
    without = make_plan(answer(1))
    monkeypatch.setenv("CXX", "ccache c++ -DVALUE='5 + 1' -pthread")
    plan = make_plan(answer(0)._replace(text=answer(0).text.replace("return 0", "return VALUE")))
    assert plan.cxx == without.cxx._replace(flags=("-DVALUE=5 + 1", "-pthread"))
    assert make_plan(answer(1)).title != without.title
    entry, made = build.obtain(plan)
    assert made and ctypes.CDLL(str(entry.library)).answer() == 6


def test_flags_of_cxx_for_nvcc(stand_in: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They reach the host compiler as they are, through a shell for each of the two compilers."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on the PATH")
    monkeypatch.setenv("CXX", "c++ '-DVALUE=sum(5, 1)' -pthread")
    plan = make_plan(answer(0))
    own = [flag for flag in plan.nvcc_flags() if "-Xcompiler" in flag and "visibility" not in flag]
    assert len(own) == 2 and own[1] == "-Xcompiler=-pthread"
    (tmp_path / "sum.cu").write_text("int sum(int a, int b) { return a + b; }\nint answer() { return VALUE; }\n")
    command = f"{shlex.quote(nvcc)} {' '.join(own)} -c sum.cu -o sum.o"
    subprocess.run(command, shell=True, cwd=tmp_path, check=True, capture_output=True)


@pytest.mark.parametrize("program", ["false", "true", "ls"])
def test_a_program_that_is_no_compiler(stand_in: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    path = shutil.which(program)
    monkeypatch.setenv("CXX", path)
    with pytest.raises(ToolchainError, match=f"no C\\+\\+ compiler\n{path} is there and does not compile C\\+\\+; looked for"):
        build.obtain(make_plan(answer(1)))


def test_ninja_is_found_beside_python(stand_in: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a notebook in a virtual environment that is not activated."""
    for tool in ("c++", "ld", "as"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    beside = os.path.join(os.path.dirname(sys.executable), "ninja")
    if os.path.exists(beside):
        assert toolchain.find_ninja() == beside
    assert build.obtain(make_plan(answer(1)))[1]

    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match="-m pip install ninja"):
        build.obtain(make_plan(answer(2)))


def test_the_c_plus_plus_compiler_may_have_any_name(stand_in: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "g++").symlink_to(shutil.which("c++"))
    (tmp_path / "ninja").symlink_to(toolchain.find_ninja())
    for tool in ("ld", "as"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert toolchain.find_cxx(memory()).path == str(tmp_path / "g++")


def test_python_headers_are_not_needed(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sysconfig

    monkeypatch.setattr(sysconfig, "get_path", lambda *_, **__: "/nonexistent/include")
    assert build.obtain(make_plan(answer(1)))[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9.0", "9.0"),
        ("sm_90", "9.0"),
        ("90", "9.0"),
        ("100", "10.0"),
        ("10.0a", "10.0a"),
        ("compute_121f", "12.1f"),
        ("8.0;9.0+PTX", "8.0 9.0+PTX"),
        ("9.0 8.6,8.0", "8.0 8.6 9.0"),
        ("9.0;9.0+PTX;9.0", "9.0+PTX"),
        ("Hopper", "9.0+PTX"),
        ("Ampere;native", "8.0 8.6+PTX"),
        ("Volta Ampere+Tegra", "7.0+PTX 8.7"),
        ("", ""),
    ],
)
def test_arch_lists(text: str, expected: str) -> None:
    assert " ".join(map(str, parse_archs(text))) == expected


@pytest.mark.parametrize("text", ["nine", "9", "9.0b", "9.0+", "sm_", "1000"])
def test_arch_lists_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"write it as 9\.0"):
        parse_archs(text)


@pytest.mark.parametrize(
    ("arch", "device", "runs"),
    [
        ("8.0", "8.0", True),
        ("8.0", "8.6", True),
        ("8.6", "8.0", False),
        ("8.0", "9.0", False),
        ("8.0+PTX", "9.0", True),
        ("9.0+PTX", "8.0", False),
        ("9.0a", "9.0", True),
        ("10.0a", "10.3", False),
        ("10.0f", "10.3", True),
        ("10.0f", "12.0", False),
        ("10.0f+PTX", "12.0", False),
    ],
)
def test_which_code_runs_where(arch: str, device: str, runs: bool) -> None:
    assert Arch.parse(arch).runs_on(Arch.parse(device)) is runs
    assert covered([Arch.parse(device)], [Arch(7, 5), Arch.parse(arch)]) is runs


def test_a_wrong_arch_in_the_environment_is_named(folder: Path, cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITACT_ARCHS", "hopper!")
    with pytest.raises(ValueError, match="JITACT_ARCHS: 'hopper!' is no compute capability"):
        make_plan(answer(1))


def test_flags_of_an_arch() -> None:
    assert Arch(9, 0, "", True).flags == ["-gencode=arch=compute_90,code=sm_90", "-gencode=arch=compute_90,code=compute_90"]


def test_hidden_gpus_are_not_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    asked = []
    monkeypatch.setattr(gpu, "_ask_driver", lambda: asked.append(1) or [("0x2335", Arch(9, 0)), ("0x2335", Arch(9, 0))])
    monkeypatch.setattr(gpu, "_kinds", lambda: ["0x2335", "0x2335"])
    for value in ("", "-1", "-1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert gpu.visible_archs(memory()) == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    kept = memory()
    assert gpu.visible_archs(kept) == (Arch(9, 0),) and gpu.visible_archs(kept) == (Arch(9, 0),)
    assert asked == [1], "what kind of GPU has which capability is remembered"
    monkeypatch.setattr(gpu, "_kinds", lambda: ["0x9999"])
    gpu.visible_archs(kept)
    assert asked == [1, 1]


def test_the_driver_is_asked_without_cuda() -> None:
    program = "import torch; from jitact.kernels.loader import gpu; print(len(gpu._ask_driver()), torch.cuda.is_initialized())"
    done = run_python(program)
    assert done.stdout.split() == [str(len(gpu._ask_driver())), "False"], done.stderr
    assert all(isinstance(arch, Arch) and kind.startswith("0x") for kind, arch in gpu._ask_driver())


def test_the_cache_remembers_compilers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_plan(answer(1))
    kept = folder / "machine.json"
    assert stat.S_ISREG(kept.stat().st_mode)
    monkeypatch.setattr(toolchain, "_answers", lambda *_: pytest.fail("asked again"))
    make_plan(answer(1))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the C library is not glibc")
def test_libmvec_is_used_if_the_compiler_calls_it(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = make_plan(answer(1))
    assert ("-DJITACT_LIBMVEC" in found.cflags()) is found.cxx.libmvec
    if not found.cxx.libmvec:
        pytest.skip("this compiler or C library has no vectors of functions")
    assert "-DJITACT_LIBMVEC" not in found.nvcc_flags(), "the host code of CUDA files has no loops"

    def of(flag: str) -> plan.Plan:
        script = tmp_path / f"c++{flag}"
        script.write_text(f'#!/bin/sh\nexec {found.cxx.path} "$@" {flag}\n')
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return make_plan(answer(1))

    assert of("-g0").cxx.libmvec and "libmvec" in of("-g0").compilers[0]
    for flag in ("-fno-tree-vectorize", "-nostdlib"):  # it calls no vectors; it links with none
        without = of(flag)
        assert not without.cxx.libmvec and "-DJITACT_LIBMVEC" not in without.cflags(), flag
    monkeypatch.setattr(toolchain, "_is_symbol", lambda *_: False)
    without = of("-g0")
    assert not without.cxx.libmvec and without.title != found.title, "a process of another C library cannot load it"


ON_A_GPU = """
import os, torch
from jitact import kernels
from jitact.kernels.loader.gpu import visible_archs
from jitact.kernels.loader.memory import Memory

archs = visible_archs(Memory([]))
library = kernels.load(kernels.KernelSource.from_file("softsign"))
y = torch.ops.jitact.softsign_forward(torch.ones(3))
assert not torch.cuda.is_initialized(), "neither looking nor compiling nor loading starts CUDA"
child = os.fork()
if not child:
    os._exit(0 if torch.ones(3, device="cuda").sum().item() == 3 else 1)
assert os.waitpid(child, 0)[1] == 0, "so a forked child can"
found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
assert found <= {(arch.major, arch.minor) for arch in archs}, archs
assert library.has_cuda, library.cuda_problem
assert torch.equal(torch.ops.jitact.softsign_forward(torch.ones(3, device="cuda")).cpu(), y)
print("fine")
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(folder: Path) -> None:
    done = run_python(ON_A_GPU)
    assert done.stdout == "fine\n", done.stderr
