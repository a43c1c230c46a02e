"""What `make test` does with both halves of the tests."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import run
from launching import ROOT, wait_until
from making import write_program


@pytest.mark.parametrize(
    ("command", "marks"),
    [("test", '"not full"'), ("test-all", '"full or not full"'), ("test-full", "full")],
)
def test_make_runs_both_halves(command: str, marks: str) -> None:
    words = ["make", "--dry-run", "--no-print-directory", "PYTHON=true", command, "ARGS=-m gpu"]
    told = subprocess.check_output(words, cwd=ROOT, text=True)
    assert told.strip().endswith(f"python tests/run.py {marks} -m gpu")


@pytest.mark.parametrize(
    ("unit", "launch", "is_good"),
    [
        (0, "exit 0", True),
        (0, "exit 5", True),
        (5, "exit 0", True),
        (5, "exit 5", False),
        (1, "exit 0", False),
        (0, "exit 1", False),
        (2, "exec sleep 900", False),
    ],
)
def test_it_fails_if_a_test_does_or_if_none_is_selected(
    unit: int, launch: str, is_good: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / "asked"
    program = write_program(
        tmp_path / "pytest",
        f'echo "$@" >>{asked}\ncase "$*" in *"not launch"*)\n'
        f'until grep -q "part launch" {asked}; do sleep 0.01; done\nexit {unit} ;; esac\n'
        f"{launch}\n",
    )
    code = run.main(["not full", "-k", "one"], [str(program)], tmp_path)
    assert (code == 0) == is_good
    assert ("  nothing" in capsys.readouterr().out.partition("== what was skipped")[0]) == is_good
    assert asked.read_text().count("-k one") == asked.read_text().count("not full") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_ends_both_halves(number: signal.Signals, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = write_program(tmp_path / "pytest", f"echo $$ >>{pids}\nexec sleep 900\n")
    code = f"import run; run.main(['full'], ['{program}'], run.Path('{tmp_path}'))"
    environ = os.environ | {"PYTHONPATH": "tests"}
    command = [sys.executable, "-c", f"{code} and exit(1)"]
    both = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL)
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    both.send_signal(number)
    assert both.wait() == 1
    assert not any(map(psutil.pid_exists, map(int, pids.read_text().split())))


TESTS = """
import os
import pytest
from launching import run

def test_good():
    assert os.access(os.environ["HOME"], os.W_OK)

def test_bad():
    print("more of it")
    assert 1 == 2, "no"

@pytest.mark.parametrize("text", ["a b", "c"])
def test_skipped(text):
    pytest.skip("needs a thing: get it")

@pytest.mark.launch
def test_hangs():
    run(["sh", "-c", "echo said before; exec sleep 900"], timeout=5)

@pytest.mark.launch
@pytest.mark.timeout(10)
def test_hangs_elsewhere():
    run(["sh", "-c", "echo said then; exec sleep 900"])
"""


def test_the_end_says_what_failed_and_what_was_skipped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And --skipped-in runs what was."""
    (tmp_path / "test_it.py").write_text(TESTS)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    pytest_there = [sys.executable, "-m", "pytest", f"--rootdir={tmp_path}", "-c"]
    pytest_there += [str(ROOT / "pyproject.toml"), "-p", "conftest", str(tmp_path)]
    logs = tmp_path / "logs"
    assert run.main(["not full"], pytest_there, logs) == 1
    told = capfd.readouterr().out
    assert told.index("== unit tests") < told.index("== launch tests") < told.index("== what fai")
    failed, skipped = told.partition("== what failed\n")[2].split("== what was skipped\n")
    assert skipped == "    2 needs a thing: get it\n"
    assert [line.split(" - ")[0].strip() for line in failed.splitlines()] == [
        "FAILED test_it.py::test_bad",
        f"the unit tests ended with exit code 1: see {os.path.relpath(logs / 'unit.log')}",
        "FAILED test_it.py::test_hangs",
        "FAILED test_it.py::test_hangs_elsewhere",
        f"the launch tests ended with exit code 1: see {os.path.relpath(logs / 'launch.log')}",
    ]
    assert "test_bad - AssertionError: no" in failed
    assert "said before" in (logs / "launch.log").read_text()
    assert "said then" in (logs / "launch.log").read_text()
    assert "more of it" in (logs / "unit.log").read_text()

    assert run.main(["not full", "--skipped-in", str(logs)], pytest_there, tmp_path / "again") == 0
    told = capfd.readouterr().out
    assert "= 2 skipped in" in told and "  nothing\n== what was skipped" in told
