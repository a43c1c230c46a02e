"""A rank ends when a signal asks for it, when its launcher is gone, and when the run is frozen. It
finishes a checkpoint that it is writing."""

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
from contextlib import ExitStack, suppress
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
    words_of,
)
from making import CPU, a_config, a_world
from torch import nn

from recipe import watch, world
from recipe.errors import LostPeer, UserError
from recipe.record.probes import StepProfiler
from recipe.record.resume import load_on_all_ranks
from recipe.session import Session
from recipe.training.metrics import evaluate

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
# Like a launcher, it waits for its rank; if it is killed, the rank goes on.
LAUNCHER = "import subprocess, sys; subprocess.run(sys.argv[1:])"


class Started:
    """A launcher of this name, and the rank that it has started."""

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
        """Wait for the end of the rank; return what it printed to standard error."""
        psutil.wait_procs([self.rank], timeout=GUARD_S)
        assert not self.rank.is_running()
        assert self.checkpoint.read_text() == "whole"
        return self.launcher.communicate()[1]

    def kill(self) -> None:
        """Kill both, as far as they still run."""
        self.launcher.kill()
        with suppress(psutil.NoSuchProcess):
            self.rank.kill()
        self.launcher.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    with ExitStack() as at_end:

        def start(launcher: str, stall_timeout: int = 0) -> Started:
            started = Started(tmp_path, launcher, stall_timeout)
            at_end.callback(started.kill)
            return started

        yield start


@pytest.mark.parametrize(
    ("launcher", "number", "message"),
    [
        ("none", signal.SIGINT, "interrupted: `--resume auto`"),
        ("torchrun", signal.SIGTERM, "asked to end by SIGTERM: `--resume auto`"),
        ("torchrun", None, "the launcher is gone: `--resume auto`"),
    ],
)
def test_a_rank_ends_after_a_signal_or_with_its_launcher(
    launcher: str, number: signal.Signals | None, message: str, start: Callable[..., Started]
) -> None:
    started = start(launcher)
    if number is None:
        started.launcher.kill()
    else:
        started.rank.send_signal(number)
    assert started.wait().startswith(message)


# A rank that trains until another rank is lost.
LOSES_ANOTHER = """
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


def test_a_rank_that_has_lost_another_ends_when_its_launcher_asks() -> None:
    """It does not wait until the lost rank has printed its error, to print its own."""
    words = [sys.executable, "-c", LOSES_ANOTHER]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None and rank.stdout.readline()
        rank.terminate()
        assert rank.wait() == 128 + signal.SIGTERM


def test_a_rank_leaves_before_mpirun_kills_it(start: Callable[..., Started]) -> None:
    """mpirun kills one second after it has asked."""
    started = start("mpirun")
    started.rank.terminate()
    assert started.launcher.communicate()[1].startswith("asked to end by SIGTERM")
    # The checkpoint takes a second: nothing is left of it.
    assert [path.name for path in started.checkpoint.parent.iterdir()] == ["mpirun"]


def test_a_run_without_batches_is_frozen(start: Callable[..., Started]) -> None:
    """The message names the rank that is stopped, and that rank ends, too."""
    variables = RANK_VARIABLES["torchrun"] | {"RANK": "1"}
    with subprocess.Popen(["sleep", "900"], env=variables) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        output = start("torchrun", stall_timeout=2).wait()
        assert stopped.wait(GUARD_S) == -signal.SIGKILL
    host = socket.gethostname()
    own = re.escape(f"[rank 0 on {host}] before its first step: <module> (<string>:")
    place = f"rank 1 on {host}, process {stopped.pid}, is stopped"
    words = re.escape("error: no batch for 2 s (--stall-timeout): another rank")
    assert re.fullmatch(rf"{own}\d+\)\n{words}.*{place}.*\n", output)


@pytest.mark.launch
def test_ranks_that_wait_in_the_code_of_an_engine_end(tmp_path: Path) -> None:
    """As on a GPU, where Horovod's main thread waits in C for a peer that NCCL does not miss."""

    def stop_rank_1(launcher: subprocess.Popen) -> None:
        metrics = tmp_path / "run/metrics.jsonl"
        wait_until(lambda: metrics.exists() and '"step": 20' in metrics.read_text())
        ranks = [
            process
            for process in psutil.Process(launcher.pid).children(recursive=True)
            if process.environ().get("OMPI_COMM_WORLD_RANK") == "1"
        ]
        assert len(ranks) == 1
        ranks[0].suspend()

    options = f"{SMALL} --epochs 9999 --max-steps 99999 --stall-timeout 5 --no-sleeping-poll"
    words = [*words_of("mpirun", TRAINERS["horovod"]), *options.split()]
    finished = run([*words, "--log-dir", str(tmp_path), "--name", "run"], meanwhile=stop_rank_1)
    assert finished.returncode != 0
    waits = r"\[rank 0 on .*, after .*: synchronize \(mpi_ops\.py:\d+\), "
    assert re.search(waits, finished.output), finished.output
    assert re.search(r"error: no batch for 5 s .*rank 1 on .* is stopped", finished.output)


# Two ranks whose main threads hang in C: the one of rank 1 also keeps every Python thread from
# running, and so its watch.
HOLDS_THE_LOCK = """
import ctypes
from recipe.watch import heartbeat, start_watchdog
from recipe.world import read_world
world = read_world()
start_watchdog(world, 2)
heartbeat()
(ctypes.PyDLL if world.rank == 1 else ctypes.CDLL)(None).pause()
"""


@pytest.mark.launch
def test_a_rank_that_holds_python_s_lock_ends_with_another_s_watch(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(HOLDS_THE_LOCK)
    finished = run(words_of("mpirun", str(tmp_path / "rank.py")))
    assert finished.returncode != 0
    assert "[rank 0 on " in finished.output and "[rank 1 on " not in finished.output
    assert finished.output.count("error: no batch for 2 s (--stall-timeout)") == 1


@pytest.mark.parametrize(
    ("gaps", "given", "seconds"),
    [
        ([], None, 600),
        ([1.0] * 19, None, 600),  # the first batches may be slow
        ([1.0] * 20, None, 60),
        ([5.0] * 20, None, 100),
        ([1.0] * 10 + [500.0] + [1.0] * 9, None, 60),
        ([1.0] * 20, 7, 7),
        ([], 0, math.inf),
    ],
)
def test_how_long_a_rank_may_be_without_a_batch(
    gaps: list[float], given: int | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_paused_at", -math.inf)  # other tests may have set it
    assert watch._patience_s(list(accumulate(gaps, initial=3.0)), given) == seconds


def test_batches_may_be_late_after_an_evaluation_or_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a checkpoint only the next few: one every few steps does not lengthen the limit."""
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


def test_a_rank_that_its_watcher_asks_ends_when_a_batch_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in an evaluation, but not while it makes a checkpoint."""
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
        (Session.end_step, "expect_pause()", "self.parts.unsharded()"),
        (Session.end_step, "expect_pause()", "self.keep_checkpoint("),
        # So that other ranks wait for a slow disk here, and not several batches later.
        (Session.keep_checkpoint, "finish_checkpoint()", "align_batch_norm("),
        (load_on_all_ranks, "expect_delay()", "content.write("),
        (StepProfiler._start, "expect_delay()", "profile.start()"),
        (StepProfiler._stop, "expect_delay()", "profile.stop()"),
    ],
)
def test_long_tasks_are_announced_before_they_begin(
    function: Callable[..., object], announced: str, slow: str
) -> None:
    """Otherwise ranks that wait for them would count as frozen after a minute."""
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
    """With its ranks, and without hosts of other jobs."""
    monkeypatch.setattr(watch.Path, "read_text", lambda path: PROC_NET_TCP)
    for peers, named in (
        ({"10.213.7.11": ("node1", [2, 3]), "10.213.7.12": ("node2", [4])}, ["node1 (rank 2, 3)"]),
        ({"10.213.7.12": ("node2", [4])}, []),
    ):
        monkeypatch.setattr(watch, "peers", peers)
        assert watch._unanswering() == named


@pytest.mark.parametrize(("waited_s", "warns"), [(0.0, False), (14.0, False), (16.0, True)])
def test_a_rank_warns_if_it_waits_long_for_a_core(
    waited_s: float,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock, waited = iter([100.0, 159.0, 160.0]), iter([5.0, 5.0 + waited_s])
    monkeypatch.setattr(watch, "time", mock.Mock(monotonic=lambda: next(clock)))
    monkeypatch.setattr(watch, "_waited_for_core_s", lambda: next(waited))
    assert len(list(watch._observe_cores(a_world()))) == 1  # the tick before the minute is over
    warning = r"warning: rank 0 on \S+ waited for a core for \d+% of 60 s: .* it may use, or this"
    assert bool(re.match(warning, capsys.readouterr().err)) == warns


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
def test_the_kernel_reports_the_wait_for_a_core(
    schedstat: Exception | list[str], waited_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = mock.create_autospec(Path.read_text, side_effect=schedstat)
    monkeypatch.setattr(watch.Path, "read_text", read)
    assert watch._waited_for_core_s() == waited_s
    read.assert_called_once_with(Path("/proc/self/schedstat"))


# A rank that waits for others for too long, until its standard input ends.
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
def test_one_rank_warns_of_missing_ranks(present: list[int]) -> None:
    """Rank 0 does; if it is itself missing, one rank of each host."""
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
    time.sleep(0.5)  # for their warnings
    output = "".join(rank.communicate()[1] for rank in ranks)
    assert re.fullmatch(r"warning: rank [012] waits\n", output)


def test_mpirun_s_time_to_kill_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(watch.MPIRUN_WAITS, "abc")
    with pytest.raises(UserError, match=f"{watch.MPIRUN_WAITS}=abc: not a number of seconds"):
        watch.start_watchdog(a_world())


def listens_at(launcher: subprocess.Popen) -> set[str]:
    """The addresses at which the ranks listen; the launcher's own do not count."""
    ranks = [
        process
        for process in psutil.Process(launcher.pid).children(recursive=True)
        if any(word.endswith("_train/train.py") for word in process.cmdline()[1:3])
    ]
    assert len(ranks) == 2
    sockets = [socket for rank in ranks for socket in rank.net_connections("inet")]
    return {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}


@pytest.mark.launch
@pytest.mark.parametrize(
    ("launcher", "engine", "number", "whole_group", "finishes"),
    [
        rarely("torchrun", "ddp", signal.SIGKILL, False, True),
        ("horovodrun --mpi", "horovod", signal.SIGTERM, False, False),  # mpirun kills soon
        rarely("horovodrun --gloo", "horovod", signal.SIGINT, True, True),
    ],
)
def test_ranks_end_with_their_launcher_which_waits_for_the_checkpoint(
    launcher: str,
    engine: str,
    number: signal.Signals,
    whole_group: bool,
    finishes: bool,
    tmp_path: Path,
) -> None:
    """A launcher that is killed, or that passes no signal on: horovodrun over MPI is a shell that
    waits. Ctrl-C in a terminal reaches the launcher's whole process group."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    checkpoints = tmp_path / "run" / "checkpoints"

    def end(process: subprocess.Popen) -> None:
        wait_until(lambda: any(checkpoints.glob(".*.partial")) or process.poll() is not None)
        assert not any(checkpoints.glob("step-*.pt"))
        assert launcher.endswith("--gloo") or listens_at(process) <= {"127.0.0.1"}
        (os.killpg if whole_group else os.kill)(process.pid, number)

    command = LAUNCHERS[launcher].format(python="python", trainer=TRAINERS[engine], ranks=2)
    options = f"{SMALL} --checkpoint-steps 5 --log-dir {tmp_path} --name run"
    finished = run(
        [*command.split(), *options.split()],
        meanwhile=end,
        PYTHONPATH=f"{tmp_path}:{ROOT}",
    )
    assert finished.returncode != 0
    assert before_the_launchers_words(finished.output).count("`--resume auto` with the --name") == 1
    if finishes:
        wait_until(lambda: any(checkpoints.glob("step-*.pt")))
    for file in checkpoints.glob("step-*.pt"):  # incomplete files have temporary names
        assert zipfile.ZipFile(file).testzip() is None
