"""A rank ends when a signal asks it to, with its launcher, and when the run is frozen; a checkpoint
that is being written then is finished."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import psutil
import pytest
from launching import LAUNCHERS, ROOT, SLOW_DISK, SMALL, TRAINERS, rarely, run, wait_until
from making import a_world

from recipe import watch, world
from recipe.watch import is_launcher, launchers_of

RANK_VARIABLES: dict[str, dict[str, str]] = {
    "none": {},
    **{
        name: dict(zip(world.LAUNCHERS[name].variables, "0101", strict=True))
        for name in ("torchrun", "mpirun")
    },
}
# A rank that hangs in native code, as engines do, while a thread writes its checkpoint.
RANK = """
import ctypes, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from recipe import errors
from recipe.watch import heartbeat, start_watchdog
from recipe.world import read_world

def write():
    time.sleep(1)
    open(sys.argv[1], "w").write("whole")

start_watchdog(read_world(), int(sys.argv[2]))
errors.WRITES.append(ThreadPoolExecutor(1).submit(write))
heartbeat()
print(os.getpid(), flush=True)
while True:
    ctypes.CDLL(None).pause()
"""
# As launchers are: it waits for its rank, and when it is killed the rank is left.
LAUNCHER = "import subprocess, sys; subprocess.run(sys.argv[1:])"


class Started:
    """A launcher of that name, and the rank that it started."""

    def __init__(self, folder: Path, launcher: str, stall_timeout: int) -> None:
        script = folder / launcher
        script.write_text(LAUNCHER)
        self.checkpoint = folder / "checkpoint"
        words = [sys.executable, "-c", RANK, str(self.checkpoint), str(stall_timeout)]
        variables = {name for names in RANK_VARIABLES.values() for name in names}
        environ = {name: value for name, value in os.environ.items() if name not in variables}
        self.launcher = subprocess.Popen(
            [sys.executable, str(script), *words],
            env=environ | RANK_VARIABLES[launcher], cwd=ROOT, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self.launcher.stdout is not None
        self.rank = psutil.Process(int(self.launcher.stdout.readline()))

    def wait(self) -> str:
        """Wait for the end of the rank; return what it said."""
        psutil.wait_procs([self.rank], timeout=30)
        assert not self.rank.is_running()
        assert self.checkpoint.read_text() == "whole"
        return self.launcher.communicate()[1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def start(launcher: str, stall_timeout: int = 0) -> Started:
        started.append(Started(tmp_path, launcher, stall_timeout))
        return started[-1]

    yield start
    for one in started:
        one.launcher.kill()
        with suppress(psutil.NoSuchProcess):
            one.rank.kill()
        one.launcher.communicate()


@pytest.mark.parametrize(
    ("launcher", "number", "said"),
    [
        ("none", signal.SIGINT, "interrupted: `--resume auto`"),
        ("torchrun", signal.SIGTERM, "asked to end by SIGTERM: `--resume auto`"),
        ("torchrun", None, "the launcher is gone: `--resume auto`"),
    ],
)
def test_a_rank_ends_by_a_signal_and_with_its_launcher(
    launcher: str, number: signal.Signals | None, said: str, start: Callable[..., Started]
) -> None:
    one = start(launcher)
    one.launcher.kill() if number is None else one.rank.send_signal(number)
    assert one.wait().startswith(said)


# A rank that trains, and loses another one.
LOSES = """
from recipe.errors import one_message
from recipe.watch import obey_signals, start_watchdog
from recipe.world import read_world

world = read_world()
start_watchdog(world)
obey_signals()
with one_message(world):
    print("trains", flush=True)
    raise RuntimeError("Connection closed by peer")
"""


def test_a_rank_that_has_lost_another_ends_when_its_launcher_says_so() -> None:
    """Rather than wait for who tells the cause, and then tell of its own loss."""
    words = [sys.executable, "-c", LOSES]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None and rank.stdout.readline()
        rank.terminate()
        assert rank.wait() == 128 + signal.SIGTERM


def test_a_rank_leaves_before_mpirun_kills_it(start: Callable[..., Started]) -> None:
    """A second after it has asked."""
    started = start("mpirun")
    started.rank.terminate()
    assert started.launcher.communicate(timeout=30)[1].startswith("asked to end by SIGTERM")
    assert not started.checkpoint.exists()  # it was written for a second, and is not half there


def test_without_a_launcher_nothing_is_watched(start: Callable[..., Started]) -> None:
    """Started by hand, whatever started it may go: a shell, nohup, tmux."""
    started = start("none")
    started.launcher.kill()
    with pytest.raises(psutil.TimeoutExpired):
        started.rank.wait(3)  # the watch looks every second
    started.rank.terminate()
    started.wait()


def test_a_run_without_batches_is_frozen(start: Callable[..., Started]) -> None:
    """Another rank of the job is stopped: the message names it."""
    variables = RANK_VARIABLES["torchrun"] | {"RANK": "1"}
    with subprocess.Popen(["sleep", "60"], env=variables) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        said = start("torchrun", stall_timeout=2).wait()
        stopped.kill()
    place = f"rank 1 on {socket.gethostname()}, process {stopped.pid}, is stopped"
    words = re.escape("error: no batch for 2 s (--stall-timeout): another rank")
    assert re.fullmatch(f"{words}.*{place}.*\n", said)


def test_launchers_below_another_user_s_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc is mounted with hidepid=1."""
    above = mock.Mock(pid=1, **{"cmdline.return_value": ["python", "tmux"]})
    above.parent.side_effect = psutil.AccessDenied(1)
    launcher = mock.Mock(pid=os.getpid(), **{"cmdline.return_value": ["python", "torchrun"]})
    launcher.parent.return_value = above
    rank = mock.Mock(**{"parent.return_value": launcher})
    monkeypatch.setattr(watch.psutil, "Process", lambda: rank)
    assert list(launchers_of(a_world(0, 2))) == [os.getpid()]


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "7"),
        (PermissionError(), "7"),
        (FileNotFoundError(), None),
        (ProcessLookupError(), None),  # it ends while its file is read
    ],
)
def test_a_launcher_that_is_not_to_be_seen_is_not_gone(
    error: OSError, answer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch.Path, "read_text", mock.Mock(side_effect=error))
    assert watch._started(os.getppid(), "7") == answer
    assert watch._started(os.getppid()) is None


@pytest.mark.parametrize(
    ("words", "launches"),
    [
        (["/venv/bin/python", "/venv/bin/torchrun", "--nproc-per-node", "2"], True),
        (["python", "-m", "torch.distributed.run", "train.py"], True),
        (["python", "-u", "-m", "torch.distributed.run", "train.py"], True),
        (["python3", "-X", "faulthandler", "-W", "ignore", "/venv/bin/torchrun", "a.py"], True),
        (["python", "-um", "torch.distributed.run", "train.py"], True),
        (["python", "-u", "compare/run.py", "--launcher", "torchrun"], False),
        (["python"], False),
        (["mpirun", "-np", "2", "python", "train.py"], True),
        (["/bin/sh", "-c", "mpirun --allow-run-as-root -np 2 python train.py"], True),
        (["timeout", "60", "horovodrun", "-np", "2"], True),
        (["/usr/bin/orted", "-mca", "ess", "env"], True),
        (["slurmstepd: [12.batch]"], True),
        (["bash", "-c", "mpirun -np 2 python train.py & sleep 5"], False),
        (["bash", "-c", "cd project; nohup torchrun train.py"], False),
        (["bash", "train_with_torchrun.sh"], False),
        (["tmux", "new", "-s", "torchrun"], False),
        (["python", "compare/run.py", "--configurations", "ddp-torchrun"], False),
        (["bash", ""], False),
        ([], False),
    ],
)
def test_what_starts_ranks(words: list[str], launches: bool) -> None:
    assert is_launcher(words) == launches


def listens_at(launcher: subprocess.Popen) -> set[str]:
    """The addresses at which the ranks listen; the launcher itself listens where it likes."""
    ranks = [
        process
        for process in psutil.Process(launcher.pid).children(recursive=True)
        if any(word.endswith("_train/train.py") for word in process.cmdline()[1:3])
    ]
    assert len(ranks) == 2
    connections = [one for rank in ranks for one in rank.net_connections("inet")]
    return {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}


@pytest.mark.launch
@pytest.mark.parametrize(
    ("launcher", "engine", "number", "whole_group", "finishes"),
    [
        rarely("torchrun", "ddp", signal.SIGKILL, False, True),
        ("horovodrun --mpi", "horovod", signal.SIGTERM, False, False),  # mpirun kills soon
        rarely("horovodrun --gloo", "horovod", signal.SIGINT, True, True),
    ],
)
def test_a_launcher_takes_its_ranks_along_and_waits_for_the_checkpoint(
    launcher: str,
    engine: str,
    number: signal.Signals,
    whole_group: bool,
    finishes: bool,
    tmp_path: Path,
) -> None:
    """Killed; or ended in a way that reaches no rank, or not in time: horovodrun over MPI is but a
    shell that waits, and Ctrl-C in a terminal reaches the whole group of processes."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    checkpoints = tmp_path / "run" / "checkpoints"

    def end_it(process: subprocess.Popen) -> None:
        wait_until(lambda: any(checkpoints.glob(".*.partial")) or process.poll() is not None)
        assert not any(checkpoints.glob("step-*.pt"))
        assert launcher.endswith("--gloo") or listens_at(process) <= {"127.0.0.1"}
        (os.killpg if whole_group else os.kill)(process.pid, number)

    command = LAUNCHERS[launcher].format(python="python", trainer=TRAINERS[engine], ranks=2)
    options = f"{SMALL} --checkpoint-steps 5 --log-dir {tmp_path} --name run"
    finished = run(
        [*command.split(), *options.split()], 60, end_it, PYTHONPATH=f"{tmp_path}:{ROOT}"
    )
    assert finished.returncode != 0
    assert finished.output.count("`--resume auto` with the --name") == 1
    if finishes:
        wait_until(lambda: any(checkpoints.glob("step-*.pt")), 30)
    for file in checkpoints.glob("step-*.pt"):  # a part of it has a temporary name
        assert zipfile.ZipFile(file).testzip() is None
