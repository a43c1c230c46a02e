"""A fork of a process that has loaded torch is to the tests what a start of Python is."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from launching import ROOT, wait_until, warm_python

from compare.plan.configurations import CONFIGURATIONS
from compare.plan.plan import Run
from compare.running.launch import forking, kill_marked, marked_processes
from recipe.errors import UserError

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
    ("code", "ends"),
    [
        ("import os; os._exit(7)", 7),
        ("1 / 0", 1),
        ("import os; os.abort()", -6),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ],
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


IN_SESSION = "import os, time\nprint(os.getsid(0), os.getpgid(0) == os.getpid(), flush=True)\n"


def test_forks_share_a_session_as_the_processes_that_ask_do(tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text(IN_SESSION + "time.sleep(0.5)\n")
    python = warm_python()
    both = "import subprocess, sys; [p.wait() for p in [subprocess.Popen(sys.argv[1:])"
    starting = [sys.executable, "-c", f"{both} for _ in range(2)]]", python, f"{tmp_path}/ask.py"]
    launchers = [started(*starting, start_new_session=True) for _ in range(2)]
    sessions = [launcher.communicate()[0].split() for launcher in launchers]
    assert all(of_both[0] == of_both[2] for of_both in sessions)
    assert sessions[0][0] != sessions[1][0]
    assert {said for of_both in sessions for said in of_both[1::2]} == {"True"}


def forked(words: list[str], group: str, **variables: str) -> subprocess.Popen:
    environ = os.environ | {"FORK_SERVERS": group, "RANK_START": "fork", **variables}
    script = [sys.executable, str(ROOT / "compare/running/forked_rank.py"), *words]
    return subprocess.Popen(script, env=environ, stdout=subprocess.PIPE, text=True)


def servers_of(group: str) -> list[psutil.Process]:
    """The servers that no process of a session made: each has loaded torch for itself."""
    all_ = marked_processes(group, "FORK_SERVERS")
    return [process for process in all_ if process.ppid() not in {own.pid for own in all_}]


def test_ranks_of_a_block_have_a_server_for_each_environment(tmp_path: Path) -> None:
    """What libraries read when they are loaded makes another server; a rank's number does not."""
    script = tmp_path / "rank.py"
    script.write_text("import sys, os\nprint('torch' in sys.modules, os.environ['RANK_START'])")
    group, like = f"test-{os.getpid()}", {"OMP_NUM_THREADS": "1"}
    try:
        ranks = [
            {"RANK": "0"},
            {"RANK": "1", "OMPI_COMM_WORLD_RANK": "1"},
            {"MKL_CBWR": "COMPATIBLE"},
        ]
        forks = [forked([str(script)], group, **like, **variables) for variables in ranks]
        assert {fork.communicate()[0] for fork in forks} == {"True fork\n"}
        assert len(servers_of(group)) == 2
    finally:
        kill_marked(group)
    assert not marked_processes(group, "FORK_SERVERS")


@pytest.mark.parametrize(
    ("default", "shell", "own", "forks"),
    [
        ("exec", None, None, False),
        ("fork", None, None, True),
        ("exec", "fork", None, True),
        ("fork", "fork", "exec", False),
    ],
)
def test_how_ranks_start(
    default: str, shell: str | None, own: str | None, forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration's variable comes before the shell's, and that before the default."""
    if shell:
        monkeypatch.setenv("RANK_START", shell)
    configuration = replace(
        CONFIGURATIONS["ddp-mpi"], environment={"RANK_START": own} if own else {}
    )
    run = Run(1, configuration, 2, 42)
    through, variables = forking(run, "the-servers", default)
    assert bool(through) == forks
    assert variables == ({"FORK_SERVERS": "the-servers", "RANK_START": "fork"} if forks else {})
    assert forking(run, "", default) == ([], {})


def test_a_wrong_way_to_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_START", "spoon")
    with pytest.raises(UserError, match="RANK_START=spoon: set it to exec or fork"):
        forking(Run(1, CONFIGURATIONS["ddp-mpi"], 2, 42), "the-servers", "exec")


def test_a_fork_finds_the_launcher_of_the_process_that_asked(tmp_path: Path) -> None:
    (tmp_path / "who.py").write_text(
        "from recipe.ancestors import ancestors\nprint([*ancestors()][:2])"
    )
    process = started(warm_python(), f"{tmp_path}/who.py")
    assert process.communicate()[0].startswith(f"[{os.getpid()}, ")


@pytest.mark.parametrize("modules", ["None", "['no_such_module']"])
def test_a_server_that_is_missing_or_cannot_load_is_an_error(modules: str) -> None:
    code = f"from recipe.fork_server import run; run('broken-{os.getpid()}', ['a.py'], {modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    # A server that ends early is missing, or has ended, as fast as this process asks.
    assert re.search(r"RuntimeError: (there is no fork server|the fork server) broken", done.stderr)
    assert ("No module named 'no_such_module'" in done.stderr) == ("no_such" in modules)


def test_an_asker_that_goes_away_does_not_end_the_server(tmp_path: Path) -> None:
    (tmp_path / "quick.py").write_text("print('done')")
    python = warm_python()
    name = Path(python).read_text().split(" run ")[1].split()[0]
    for nonsense in (b"", b".", b".not JSON\n"):
        with socket.socket(socket.AF_UNIX) as asker:
            asker.connect(f"\0{name}")
            asker.sendall(nonsense)
    assert started(python, f"{tmp_path}/quick.py").communicate()[0] == "done\n"


SERVES = """
import runpy, sys
from recipe import fork_server
{but}
fork_server.serve(sys.argv[1], 60.0, [])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
NOT_FOR_THE_FIRST = """
others, is_own = [True], fork_server.is_own
fork_server.is_own = lambda asker: not (others and others.pop()) and is_own(asker)
"""
NO_SCRIPT = """
fork_process, made = fork_server.fork_process, []
def fork_process_once():
    made.append(1)
    if len(made) > 1:  # the first fork is the server of the session
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork_process()
fork_server.fork_process = fork_process_once
"""


@contextlib.contextmanager
def serving(name: str, but: str) -> Iterator[list[str]]:
    """A server that differs so from ours; the words of a command that asks it."""
    words = [sys.executable, "-c", SERVES.format(but=but), name]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=ROOT) as server:
        try:
            assert server.stdout.read() == b""  # it listens
            yield [sys.executable, str(ROOT / "recipe/fork_server.py"), "run", name]
        finally:
            server.kill()


def test_another_user_who_says_nothing_does_not_hold_the_server_up(tmp_path: Path) -> None:
    (tmp_path / "quick.py").write_text("print('done')")
    name = f"for-one-user-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as silent, serving(name, NOT_FOR_THE_FIRST) as asking:
        silent.connect(f"\0{name}")
        words = [*asking, str(tmp_path / "quick.py")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert done.stdout == "done\n"


def test_a_server_that_cannot_fork_says_so(tmp_path: Path) -> None:
    (tmp_path / "quick.py").write_text("print('done')")
    with serving(f"without-forks-{os.getpid()}", NO_SCRIPT) as asking:
        words = [*asking, str(tmp_path / "quick.py")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.endswith("cannot fork: Resource temporarily unavailable\n")
