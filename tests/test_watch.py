"""A rank ends when a signal asks it to, with its launcher, and when the run is frozen; a checkpoint
that is being written then is finished."""

import errno
import inspect
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from launching import (
    GUARD_S,
    LAUNCHERS,
    ROOT,
    SLOW_DISK,
    SMALL,
    TRAINERS,
    before_the_launchers_words,
    rarely,
    run,
    wait_until,
)
from making import CPU, a_config, a_world
from torch import nn

from recipe import watch, world
from recipe.errors import LostPeer, UserError
from recipe.record.probes import StepProfiler
from recipe.record.resume import load_on_all_ranks
from recipe.session import Session
from recipe.training.metrics import evaluate
from recipe.watch import launcher_program, rightful_world

RANK_VARIABLES: dict[str, dict[str, str]] = {
    "none": {},
    **{
        name: dict(zip(world.LAUNCHERS[name].variables, "0101", strict=True))
        for name in ("torchrun", "mpirun")
    },
}
# A rank that hangs in native code, as engines do, while a thread writes its checkpoint.
RANK = """
import ctypes, os, pathlib, sys, time
from concurrent.futures import ThreadPoolExecutor
from recipe import errors
from recipe.files import whole_file
from recipe.watch import heartbeat, start_watchdog
from recipe.world import read_world

def write():
    with whole_file(pathlib.Path(sys.argv[1])) as file:
        time.sleep(1)
        file.write(b"whole")

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
            env=environ | RANK_VARIABLES[launcher],
            cwd=ROOT,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.launcher.stdout is not None
        self.rank = psutil.Process(int(self.launcher.stdout.readline()))

    def wait(self) -> str:
        """Wait for the end of the rank; return what it said."""
        psutil.wait_procs([self.rank], timeout=GUARD_S)
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
    assert started.launcher.communicate()[1].startswith("asked to end by SIGTERM")
    # It was written for a second: nothing is there of it.
    assert [path.name for path in started.checkpoint.parent.iterdir()] == ["mpirun"]


def test_without_a_launcher_nothing_is_watched() -> None:
    """Started by hand, whatever started it may go: a shell, nohup, tmux."""
    assert watch.launchers_of(a_world(launcher="none")) == {}


def test_a_run_without_batches_is_frozen(start: Callable[..., Started]) -> None:
    """Another rank of the job is stopped: the message names it, and it is not left behind."""
    variables = RANK_VARIABLES["torchrun"] | {"RANK": "1"}
    with subprocess.Popen(["sleep", "900"], env=variables) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        said = start("torchrun", stall_timeout=2).wait()
        assert stopped.wait(GUARD_S) == -signal.SIGKILL
    host = socket.gethostname()
    own = re.escape(f"[rank 0 on {host}] before its first step: <module> (<string>:")
    place = f"rank 1 on {host}, process {stopped.pid}, is stopped"
    words = re.escape("error: no batch for 2 s (--stall-timeout): another rank")
    assert re.fullmatch(rf"{own}\d+\)\n{words}.*{place}.*\n", said)


@pytest.mark.parametrize(
    ("gaps", "given", "seconds"),
    [
        ([], None, 600),
        ([1.0] * 19, None, 600),  # the first batches are slow at times
        ([1.0] * 20, None, 60),
        ([5.0] * 20, None, 100),
        ([1.0] * 10 + [500.0] + [1.0] * 9, None, 60),
        ([1.0] * 20, 7, 7),
        ([], 0, math.inf),
    ],
)
def test_how_long_no_batch_may_come(
    gaps: list[float], given: int | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_paused_at", -math.inf)  # whatever other tests have trained here
    assert watch._patience_s(list(accumulate(gaps, initial=3.0)), given) == seconds


def test_batches_are_late_after_an_evaluation_or_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until some have come again: with a checkpoint every few steps the limit stays a minute."""
    signs = deque[float](maxlen=watch.BATCHES + 1)
    monkeypatch.setattr(watch, "_signs_of_life", signs)
    monkeypatch.setattr(watch, "_paused_at", -math.inf)
    for _ in range(30):
        watch.heartbeat()
    assert watch._patience_s(list(signs), None) == 60
    for _ in range(3):
        watch.expect_pause()
        for _ in range(3):
            assert watch._patience_s(list(signs), None) == 600
            watch.heartbeat()
        assert watch._patience_s(list(signs), None) == 60
    watch.expect_delay()
    for _ in range(watch.BATCHES):
        assert watch._patience_s(list(signs), None) == 600
        watch.heartbeat()
    assert watch._patience_s(list(signs), None) == 60


def test_a_rank_that_is_asked_ends_where_a_batch_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an evaluation, too, and not while it makes a checkpoint."""
    monkeypatch.setattr(watch, "_signs_of_life", deque[float]())
    monkeypatch.setattr(watch, "_paused_at", -math.inf)
    monkeypatch.setattr(watch.marks, "batch_s", 0.0)
    for now, longest in ((0, 0), (1, 1), (4, 3), (5, 3)):
        monkeypatch.setattr(watch.time, "monotonic", lambda now=now: now)
        watch.heartbeat()
        assert watch.marks.batch_s == longest
    monkeypatch.setattr(watch.marks, "is_asked", True)
    for announce in (watch.expect_pause, watch.expect_delay):
        announce()
    images = torch.zeros(1, 3, 4, 4), torch.zeros(1, dtype=torch.int64)
    for begin in (watch.heartbeat, lambda: evaluate(nn.Flatten(), [images], a_config(), CPU)):
        with pytest.raises(LostPeer):
            begin()


@pytest.mark.parametrize(
    ("function", "announced", "slow"),
    [
        (Session.roll_back, "expect_delay()", "finish_checkpoint()"),
        (Session.end_step, "expect_pause()", "parts.unsharded()"),
        (Session.end_step, "expect_pause()", "self.keep_checkpoint("),
        # In the checkpoint, not several batches later, other ranks wait for a slow disk.
        (Session.keep_checkpoint, "finish_checkpoint()", "align_batch_norm("),
        (load_on_all_ranks, "expect_delay()", "content.write("),
        (evaluate, "if config.compile", "network(images)"),
        (StepProfiler._start, "expect_delay()", "profile.start()"),
        (StepProfiler._stop, "expect_delay()", "profile.stop()"),
    ],
)
def test_what_takes_long_is_announced(
    function: Callable[..., object], announced: str, slow: str
) -> None:
    """Before it begins, or ranks that wait for it would be taken for frozen after a minute."""
    text = inspect.getsource(function)
    assert 0 < text.find(announced) < text.find(slow)


PROC_NET_TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0A07D50A:1F90 0B07D50A:C350 01 00000400:00000000 01:00000A00 00000005     0        0 1 2
   1: 0A07D50A:1F91 0B07D50A:C351 01 00000400:00000000 01:00000A00 00000004     0        0 2 2
   2: 0A07D50A:1F92 0C07D50A:C352 01 00000400:00000000 01:00000A00 00000001     0        0 3 2
   3: 0100007F:1F93 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4 2
"""


def test_a_host_that_is_cut_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its ranks, and none of those with which other jobs are connected."""
    monkeypatch.setattr(watch.Path, "read_text", lambda path: PROC_NET_TCP)
    for peers, named in (
        ({"10.213.7.11": ("node1", [2, 3]), "10.213.7.12": ("node2", [4])}, ["node1 (rank 2, 3)"]),
        ({"10.213.7.12": ("node2", [4])}, []),
    ):
        monkeypatch.setattr(watch, "peers", peers)
        assert watch._unanswering() == named


@pytest.mark.parametrize(("waited_s", "tells"), [(0.0, False), (14.0, False), (16.0, True)])
def test_a_rank_that_waits_little_for_a_core_says_nothing(
    waited_s: float,
    tells: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock, waited = iter([100.0, 159.0, 160.0]), iter([5.0, 5.0 + waited_s])
    monkeypatch.setattr(watch, "time", mock.Mock(monotonic=lambda: next(clock)))
    monkeypatch.setattr(watch, "_waited_for_core_s", lambda: next(waited))
    assert len(list(watch._observe_cores(a_world()))) == 1  # a tick in which it waits on
    said = r"warning: rank 0 on \S+ waited for a core for \d+% of 60 s: .* it may use, or this host"
    assert bool(re.match(said, capsys.readouterr().err)) == tells


def test_a_rank_that_trains_observes_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_signs_of_life", [1.0])
    monkeypatch.setattr(watch, "POLL_S", 0.01)
    monkeypatch.setattr(watch, "_observe_cores", lambda world: map(int, ["observed"]))
    monkeypatch.setattr(watch, "_end_frozen", mock.Mock(side_effect=TimeoutError))
    ours, _theirs = socket.socketpair()
    with pytest.raises(ValueError, match="observed"):
        watch._watch(a_world(), ours, {}, stall_timeout=1)


@pytest.mark.parametrize(
    ("schedstat", "waited_s"), [(["5 7000000000 9"], 7.0), (FileNotFoundError("no such file"), 0.0)]
)
def test_how_long_a_rank_waited_for_a_core_is_what_the_kernel_says(
    schedstat: Exception | list[str], waited_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = mock.create_autospec(Path.read_text, side_effect=schedstat)
    monkeypatch.setattr(watch.Path, "read_text", read)
    assert watch._waited_for_core_s() == waited_s
    read.assert_called_once_with(Path("/proc/self/schedstat"))


@pytest.mark.parametrize(
    ("launcher", "parent", "above", "nearest"),
    [
        ("torchrun", ["python", "torchrun"], ["slurmstepd: [12.batch]"], "parent"),
        ("torchrun", ["sh", "-c", "python train.py"], ["python", "torchrun"], "above"),
        # Horovod's elastic driver, here or on another host, and the watcher that it has started.
        ("horovodrun", ["python", "-u", "train.py"], ["python", "horovodrun"], "above"),
        ("horovodrun", ["python", "-u", "train.py"], ["sshd"], "parent"),
        ("horovodrun", ["python", "train.py"], ["sshd"], "own"),
        ("none", ["python", "torchrun"], ["slurmstepd: [12.batch]"], "own"),
        ("torchrun", ["python", "torchrun"], [], "parent"),  # another user's is not to be seen
    ],
)
def test_the_process_that_starts_ranks_anew(
    launcher: str,
    parent: list[str],
    above: list[str],
    nearest: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = {"own": ["/bin/python", "-u", "train.py"], "parent": parent, "above": above}
    found = {name: mock.Mock(pid=pid) for pid, name in enumerate(words)}
    for name, following in (("own", "parent"), ("parent", "above"), ("above", None)):
        found[name].cmdline.return_value = words[name]
        found[name].as_dict.return_value = {"cmdline": words[name]}
        found[name].parent.return_value = found.get(following or "")
    if not above:  # where /proc is mounted with hidepid=1
        found["parent"].parent.side_effect = psutil.AccessDenied(2)
    monkeypatch.setattr(watch.psutil, "Process", lambda pid=0: [*found.values()][pid])
    assert watch.nearest_launcher(a_world(0, 2, launcher=launcher)) is found[nearest]


# As mpirun, which binds each rank to a core; and the rank says which it uses in the end.
BINDING = """
import os, subprocess, sys
own = sorted(os.sched_getaffinity(0))
subprocess.run(sys.argv[1:], check=True, preexec_fn=lambda: os.sched_setaffinity(0, own[:1]))
"""
USES = """
import os
from recipe.start import undo_mpirun_binding
from recipe.world import read_world
undo_mpirun_binding(read_world())
print(len(os.sched_getaffinity(0)))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("variables", "bound"),
    [
        ({"OMPI_MCA_orte_bound_at_launch": "1"}, False),
        ({}, True),  # by something else
        *(
            ({"OMPI_MCA_orte_bound_at_launch": "1", f"OMPI_MCA_{name}": value}, True)
            for name, value in {
                "hwloc_base_binding_policy": "core",
                "rmaps_base_mapping_policy": "slot:PE=1",
                "orte_rankfile": "/ranks",
            }.items()
        ),
    ],
)
def test_a_rank_that_mpirun_binds_unasked_uses_all_cores(
    variables: dict[str, str], bound: bool, tmp_path: Path
) -> None:
    """Or else jobs of two ranks each would share two cores of many."""
    (tmp_path / "mpirun").write_text(BINDING)
    words = [sys.executable, str(tmp_path / "mpirun"), "sh", "-c", '"$@" ; true', "sh"]
    environ = {**os.environ, **RANK_VARIABLES["mpirun"], **variables}
    finished = subprocess.run(
        [*words, sys.executable, "-c", USES],
        env=environ,
        cwd=ROOT,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    assert int(finished.stdout) == (1 if bound else len(os.sched_getaffinity(0)))


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
    monkeypatch.setattr(watch.Path, "read_bytes", mock.Mock(side_effect=error))
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
    assert bool(launcher_program(words)) == launches


TORCHRUN, HOROVODRUN = ["python", "/venv/bin/torchrun"], ["python", "horovodrun", "--gloo"]
MPIRUN, ORTED, SLURM = ["mpirun", "-np", "2"], ["orted"], ["slurmstepd: [12.0]"]
HYDRA, SHELL = ["hydra_pmi_proxy"], ["sh", "-c", "RANK=0 python ddp_train/train.py; true"]


@pytest.mark.parametrize(
    ("places", "above", "rightful"),
    [
        # What another job has left, of torchrun: each rank would train alone.
        ("torchrun 0/1, mpirun 1/2", [MPIRUN], "mpirun"),
        ("torchrun 0/1, mpirun 1/2", [SHELL, ORTED], "mpirun"),
        ("torchrun 0/1, mpirun 1/2", [], "mpirun"),  # in a container of its own
        ("torchrun 0/1, mpirun 1/2", [SHELL], "mpirun"),
        ("torchrun 0/1, horovodrun 1/2", [["/bin/bash", "-c", "..."], HOROVODRUN], "horovodrun"),
        ("torchrun 0/1, srun 1/2", [SLURM], "srun"),
        ("torchrun 0/8, mpirun 1/2", [MPIRUN], "mpirun"),  # or wait for ranks that never come
        ("torchrun 0/2, mpirun 1/2", [MPIRUN], "mpirun"),
        ("torchrun 0/1, mpirun 0/2", [MPIRUN, TORCHRUN], "mpirun"),  # started by one of torchrun's
        # Of other launchers.
        ("horovodrun 0/1, mpirun 1/2", [MPIRUN], "mpirun"),
        ("mpirun 0/1, srun 1/2", [SLURM], "srun"),
        ("mpirun 0/4, mpich 1/2", [HYDRA, ["mpirun"]], "mpich"),
        ("mpirun 0/1, mpich 1/2, srun 0/1", [HYDRA, SLURM], "mpich"),
        # One inside another.
        ("torchrun 3/4, srun 1/2", [TORCHRUN, SLURM], "torchrun"),
        ("torchrun 3/4, mpirun 1/2", [TORCHRUN, MPIRUN], "torchrun"),
        ("torchrun 0/1, srun 1/2", [TORCHRUN, SLURM], "torchrun"),  # each task trains another model
        ("torchrun 3/4, srun 1/2", [], "torchrun"),
        ("mpirun 1/2, srun 0/1", [MPIRUN, SLURM], "mpirun"),  # from an interactive step
        ("mpirun 1/2, srun 0/1", [ORTED, SLURM], "mpirun"),
        ("mpirun 1/2, srun 0/1", [["mpiexec", "-n", "2"]], "mpirun"),  # Open MPI's other name
        ("horovodrun 3/4, srun 0/1", [HOROVODRUN, SLURM], "horovodrun"),
        ("horovodrun 3/4, srun 0/2", [["sshd: me@notty"]], "horovodrun"),
        ("srun 1/2, mpich 1/2", [SLURM], "srun"),  # srun --mpi=pmi2
        # Set by hand.
        ("torchrun 1/2, mpirun 1/2", [SHELL, MPIRUN], "torchrun"),
        ("torchrun 1/2, srun 0/1", [SHELL, SLURM], "torchrun"),
        ("torchrun 3/4, mpirun 1/2", [["python", "accelerate", "launch"], MPIRUN], "torchrun"),
        ("torchrun 0/1, none 0/1", [SHELL], "torchrun"),
        # Slurm's batch step has a place of nobody; nobody but a shell is there.
        ("torchrun 0/2, none 0/1", [SHELL, SLURM], "torchrun"),
        ("none 0/1", [], "none"),
    ],
)
def test_the_innermost_launcher_decides(places: str, above: list[list[str]], rightful: str) -> None:
    worlds = [
        a_world(*map(int, place.split("/")), launcher=name)
        for name, place in (one.split() for one in places.split(", "))
    ]
    assert rightful_world(worlds, above).launcher == rightful


@pytest.mark.parametrize(
    ("variables", "code", "said"),
    [
        (
            "RANK=abc WORLD_SIZE=2 LOCAL_RANK=0",
            2,
            "RANK=abc WORLD_SIZE=2 LOCAL_RANK=0: these do "
            "not describe a rank of a job; unset or correct them\n",
        ),
        ("PMI_RANK=2 PMI_SIZE=2", 2, "PMI_RANK=2 PMI_SIZE=2: these do not describe a rank .*\n"),
        (
            "RANK=0 WORLD_SIZE=1 MASTER_PORT=29500 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2",
            2,
            "RANK=0 WORLD_SIZE=1 MASTER_PORT=29500: left over from another job, since mpirun "
            "started this process as rank 0 of 2; unset them\n",
        ),
        ("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=4", 2, ".*: these do not describe a rank .*\n"),
        (
            "WORLD_SIZE=2",
            2,
            "WORLD_SIZE=2: RANK is not set, so this process would train alone; "
            "start it with a launcher, which sets both, or unset WORLD_SIZE\n",
        ),
        ("WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1", 0, ""),  # a script's own
        ("RANK= WORLD_SIZE=", 0, ""),
        ("RANK=0 WORLD_SIZE=1", 0, ""),
    ],
)
def test_variables_of_another_job_are_refused(variables: str, code: int, said: str) -> None:
    named = {name for one in world.LAUNCHERS.values() for name in (*one.variables, *one.job)}
    environ = {name: value for name, value in os.environ.items() if name not in named}
    environ |= dict(one.split("=") for one in variables.split())
    done = subprocess.run(
        [sys.executable, "-c", "from recipe.watch import own_world; print(own_world().size)"],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code and re.fullmatch(f"error: {said}" if said else "", done.stderr)


# A rank that waits for others for too long, until its input ends.
LATE = """
import sys
from recipe import watch
from recipe.world import read_world
watch.LATE_S = watch.POLL_S = 0.01
world = read_world()
watch.start_watchdog(world)
def late():
    print("late", flush=True)
    return f"rank {world.rank} waits"
watch.begin("meeting the other ranks", late)
sys.stdin.read()
"""


@pytest.mark.parametrize("present", [[0], [1, 2]])
def test_ranks_that_do_not_come_are_told_once(present: list[int]) -> None:
    """By rank 0; if it is missing itself, by one of each host."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LATE],
            cwd=ROOT,
            text=True,
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_PORT": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in present
    ]
    assert all(rank.stdout is not None and rank.stdout.readline() == "late\n" for rank in ranks)
    time.sleep(0.5)  # what each prints then
    told = "".join(rank.communicate()[1] for rank in ranks)
    assert re.fullmatch(r"warning: rank [012] waits\n", told)


def test_how_long_mpirun_waits_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(watch.MPIRUN_WAITS, "abc")
    with pytest.raises(UserError, match=f"{watch.MPIRUN_WAITS}=abc: not a number of seconds"):
        watch.start_watchdog(a_world())


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
        [*command.split(), *options.split()], meanwhile=end_it, PYTHONPATH=f"{tmp_path}:{ROOT}"
    )
    assert finished.returncode != 0
    assert before_the_launchers_words(finished.output).count("`--resume auto` with the --name") == 1
    if finishes:
        wait_until(lambda: any(checkpoints.glob("step-*.pt")))
    for file in checkpoints.glob("step-*.pt"):  # a part of it has a temporary name
        assert zipfile.ZipFile(file).testzip() is None
