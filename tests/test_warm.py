"""A fork of a process that has loaded torch is to the tests what a start of Python is."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from launching import wait_until, warm_python

pytestmark = pytest.mark.launch
TELLS = """
import os, sys, customized
print(__name__, sys.argv, os.getcwd(), sys.path[:3], os.sched_getaffinity(0))
print(os.environ["CUSTOMIZED"], ascii(os.environ["ODD"]), sys.stdin.read())
print("an error", file=sys.stderr)
sys.exit(3)
"""
SIGNALLED = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(os.getpid(), flush=True)
signal.pause()
"""


def started(python: str, *words: str, **more: object) -> subprocess.Popen:
    return subprocess.Popen([python, *words], stdout=subprocess.PIPE, text=True, **more)


def test_a_program_finds_what_python_shows_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['CUSTOMIZED'] = 'yes'\n")
    (tmp_path / "customized.py").touch()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/tells.py").write_text(TELLS)
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}:/nowhere", "ODD": os.fsdecode(b"\xe9")}
    found = []
    for python in (sys.executable, warm_python()):
        words = ["taskset", "-c", str(min(os.sched_getaffinity(0))), python, "-u"]
        done = subprocess.run(
            [*words, "scripts/tells.py", "--flag", "two words"],
            input="asked",
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        found.append((done.returncode, done.stdout, done.stderr))
    assert found[0] == found[1] and found[0][0] == 3


@pytest.mark.parametrize(
    ("code", "ends"), [("import os; os._exit(7)", 7), ("1 / 0", 1), ("import os; os.abort()", -6)]
)
def test_it_ends_as_the_program_does(code: str, ends: int, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(code)
    assert started(warm_python(), f"{tmp_path}/ends.py", stderr=subprocess.DEVNULL).wait() == ends


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_program_and_it_dies_with_who_asked(number: int, tmp_path: Path) -> None:
    (tmp_path / "signalled.py").write_text(SIGNALLED)
    with started(warm_python(), f"{tmp_path}/signalled.py") as process:
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait() == (5 if number == signal.SIGTERM else -number)
        wait_until(lambda: not psutil.pid_exists(pid))


def test_no_two_have_the_same_random_numbers(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text(
        "import torch, numpy\nprint(torch.rand(1), numpy.random.rand())"
    )
    both = [started(warm_python(), f"{tmp_path}/random.py") for _ in range(2)]
    first, second = (process.communicate()[0].split() for process in both)
    assert len({*first, *second}) == 4
