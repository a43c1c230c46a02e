"""With horovodrun --host-discovery-script a run continues when hosts come and go, or ranks die."""

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from elastic import (
    LOG_INTERVAL,
    audited,
    check_audit,
    checked_steps,
    command,
    images_of,
    ranks_among,
    steps_in,
    steps_without_figures,
    write_slots,
)
from launching import (
    GUARD_S,
    ROOT,
    SMALL,
    TRAINERS,
    rarely,
    resumed_at,
    run,
    wait_until,
    words_of,
)
from making import a_config, a_world
from torch import nn

from ddp_train import elastic
from horovod_train.announcements import Announcements
from recipe.record.checkpoint import step_path
from recipe.record.kept_state import KeptState


def ranks_below(launcher: subprocess.Popen) -> dict[int, psutil.Process]:
    """The processes that train, by their rank."""
    return ranks_among(psutil.Process(launcher.pid).children(recursive=True))


def train_until_stopped(
    folder: Path, slots: str, flags: str, meanwhile: Callable[[subprocess.Popen, Path], None]
) -> list[dict[str, Any]]:
    """The steps of a run in which `meanwhile` is called after 20 steps, and which is asked to stop
    in its second epoch. Checks that its stream of images has no gap, and none of them twice."""
    write_slots(folder, slots)

    def happen(launcher: subprocess.Popen) -> None:
        wait_until(lambda: len(steps_in(folder)) > 20)
        meanwhile(launcher, folder)
        wait_until(lambda: steps_in(folder)[-1]["epoch"] > 0)
        (folder / "stop").touch()

    words = command(folder, f"{flags} --checkpoint-steps 10")
    finished = run(words, meanwhile=happen, **audited(folder)).checked()
    steps = checked_steps(folder)
    check_audit(folder)
    assert len(steps_without_figures(folder)) <= LOG_INTERVAL * len(resumed_at(folder))
    assert f"stopped after step {steps[-1]['step']}" in finished.output, finished.output
    return steps


def kill_then_change_hosts(launcher: subprocess.Popen, folder: Path) -> None:
    """Kill one of two ranks; then allow one rank, then three."""
    ranks_below(launcher)[1].kill()
    wait_until(lambda: len(resumed_at(folder)) == 1)
    for number in (1, 3):
        write_slots(folder, f"localhost:{number}")
        wait_until(lambda number=number: images_of(steps_in(folder)[-1]) == 12 * number)


def lose_host(launcher: subprocess.Popen, folder: Path) -> None:
    """End a rank's watcher: Horovod removes its host from the job."""
    ranks_below(launcher)[1].parent().kill()
    wait_until(lambda: images_of(steps_in(folder)[-1]) == 12)


def freeze_rank(launcher: subprocess.Popen, folder: Path) -> None:
    """Stop a rank: it ends with the others."""
    ranks_below(launcher)[1].suspend()
    wait_until(lambda: resumed_at(folder) and len(steps_in(folder)) > resumed_at(folder)[-1])


@pytest.mark.launch
@pytest.mark.parametrize(
    ("slots", "flags", "happens", "resumes", "ranks"),
    [
        ("localhost:2", "", kill_then_change_hosts, 3, 3),
        rarely("localhost:1\n127.0.0.1:1", "", lose_host, 1, 1),
        rarely("localhost:2", "--stall-timeout 10", freeze_rank, 1, 2),
    ],
)
def test_ranks_are_lost_and_hosts_change(
    slots: str,
    flags: str,
    happens: Callable[[subprocess.Popen, Path], None],
    resumes: int,
    ranks: int,
    tmp_path: Path,
) -> None:
    steps = train_until_stopped(tmp_path, slots, flags, happens)
    assert len(resumed_at(tmp_path)) == resumes
    assert images_of(steps[-1]) == 12 * ranks


@pytest.mark.launch
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--resume none.pt", "error: horovodrun --host-discovery-script: after a change"),
        ("--data /nowhere", "error: /nowhere/train: no such folder"),
    ],
)
def test_an_error_ends_all_ranks(flags: str, said: str, tmp_path: Path) -> None:
    write_slots(tmp_path, "localhost:2")
    finished = run(command(tmp_path, flags))
    assert finished.returncode != 0 and finished.output.count(said) == 1, finished.output


@pytest.mark.launch
@pytest.mark.full
def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    write_slots(tmp_path, "localhost:2")

    def interrupt(launcher: subprocess.Popen) -> None:
        wait_until(lambda: len(steps_in(tmp_path)) > 5)
        ranks_below(launcher)[1].send_signal(signal.SIGUSR1)

    finished = run(command(tmp_path), meanwhile=interrupt)
    assert finished.returncode != 0 and not resumed_at(tmp_path)
    last = len(steps_in(tmp_path))
    assert f"stopped after step {last}, as a signal asked" in finished.output, finished.output
    assert (tmp_path / "checkpoints" / f"step-{last:09d}.pt").exists()


@pytest.fixture
def announcements() -> Iterator[Announcements]:
    server = Announcements("lo")
    yield server
    server.shutdown()
    server.server_close()


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_the_driver_s_announcements_arrive(announcements: Announcements) -> None:
    """Through Horovod's own client, made as the driver makes it."""
    from horovod.runner.common.util.codec import loads_base64
    from horovod.runner.elastic.worker import HostUpdateResult, WorkerNotificationClient

    addresses, key = loads_base64(announcements.for_driver)
    assert addresses == {"lo": [announcements.server_address]}
    client = WorkerNotificationClient(addresses, key, 0)
    assert not announcements.changed.is_set()
    client.notify_hosts_updated(1, HostUpdateResult.added)
    assert announcements.changed.wait(GUARD_S)


@pytest.mark.parametrize("is_signed", [True, False])
def test_received_messages_are_not_unpickled(
    is_signed: bool, announcements: Announcements, tmp_path: Path
) -> None:
    from horovod.runner.common.util.secret import compute_digest

    message = pickle.dumps(Bomb(tmp_path / "harm"))
    digest = compute_digest(announcements.key if is_signed else b"a guess", message)
    with socket.create_connection(announcements.server_address) as sender:
        sender.sendall(digest + struct.pack("i", len(message)) + message)
        assert bool(sender.recv(1)) == is_signed
    assert announcements.changed.is_set() == is_signed and not (tmp_path / "harm").exists()


def kill_ranks_of_torchrun(times: int, folder: Path) -> Callable[[subprocess.Popen], None]:
    """Kill DDP's ranks in turn, each some steps after the last loss."""

    def kill(launcher: subprocess.Popen) -> None:
        wait_until(lambda: steps_in(folder))
        for number in range(times):
            wait_until(lambda: len(steps_in(folder)) > sum(resumed_at(folder)[-1:]) + 3)
            watcher = psutil.Process(launcher.pid).children()[number % 2]
            # Its rank has the same command line, unlike the processes of multiprocessing.
            words = watcher.cmdline()
            next(child for child in watcher.children() if child.cmdline() == words).kill()
            wait_until(lambda n=number: len(resumed_at(folder)) > n or launcher.poll() is not None)

    return kill


@pytest.mark.launch
def test_torchrun_ends_after_a_loss_when_the_restarts_are_used_up(tmp_path: Path) -> None:
    launcher = words_of("torchrun --max-restarts", TRAINERS["ddp"])
    launcher[launcher.index("--max-restarts") + 1] = "2"
    place = f"--log-dir {tmp_path} --name run --resume auto --log-interval 1"  # no checkpoint
    words = [*launcher, *f"{SMALL} {place} --epochs 100000".split(), "--max-steps", "100000"]
    words += ["--num-groups", "2"]
    folder = tmp_path / "run"
    finished = run(words, meanwhile=kill_ranks_of_torchrun(3, folder))
    assert finished.returncode != 0
    assert finished.output.count("resuming after step") == 2, finished.output
    assert finished.output.count("warning: --num-groups has no effect") == 1  # by the watcher alone
    # The state had only been in the ranks' memory.
    assert step_path(folder / "checkpoints", resumed_at(folder)[0]).exists()


def test_batch_norm_s_statistics_of_three_steps_are_kept(tmp_path: Path) -> None:
    with (tmp_path / "state").open("w+b") as state, (tmp_path / "notes").open("w+b") as notes:
        files = state.fileno(), notes.fileno()
        model, another = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        earlier = KeptState(model, files)
        assert not earlier.step
        means = {}
        for step in range(4, 9):
            model(torch.randn(5, 3))
            earlier.note_statistics(step)
            means[step] = model.running_mean.clone()
        earlier.keep({"weights": torch.ones(2)}, 7)
        kept_state = KeptState(another, files)  # the rank that takes its place
        assert kept_state.step == 7 and torch.load(kept_state.state)["weights"].sum() == 2
        for step in (8, 7, 6):
            kept_state.take_statistics(step)
            assert torch.equal(another.running_mean, means[step])
        assert another.num_batches_tracked == 3  # after steps 4, 5 and 6
        kept_state.take_statistics(5)  # that is no longer there
        assert torch.equal(another.running_mean, means[6])
        kept_state.forget()
        assert not earlier.step


# A forker in a process of its own, which starts a rank for each way of ending.
FORKER = """
import os, signal, sys, threading, time
from recipe import fork_server, rank_forker as module
from recipe import watch
from recipe.marks import marks
module.NOTICE_S, BUSY = 0.5, ("batch", "write")
forker, codes = module.RankForker("recipe.ranks"), []
def train(how):
    marks.has_made_step = "step" in how
    marks.is_complete = "complete" in how
    if "kill" in how:
        os.kill(os.getpid(), signal.SIGKILL)
    if "hang" in how:
        os.kill(os.getpid(), signal.SIGSTOP)
    if how in BUSY:
        marks.is_writing = how == "write"
        marks.batch_s = 2.0
        while not marks.is_asked:
            time.sleep(0.01)
        time.sleep(6 if how == "write" else 2)
    sys.exit(3 if how == "exit" else 76)
for how in sys.argv[1:]:
    if how == "thread that ends":  # it is waited for
        threading.Thread(target=time.sleep, args=(0.1,)).start()
    if forker.start():
        assert len(os.listdir("/proc/self/task")) == 1 and os.getsid(0) == os.getpid()
        train(how)
    forker.wait(0.1 if how == "hang" or how in BUSY else 60.0)
    while how in BUSY and not marks.batch_s:
        time.sleep(0.01)
    code = forker.end()
    codes.append((code, forker.is_lost(code)))
print(codes, flush=True)
threading.Thread(target=threading.Event().wait, daemon=True).start()
assert forker.start() and forker.start()  # with a second thread, or CUDA, it does not fork ...
assert marks.is_watched  # ... but resumes as all other ranks do ...
watch.heartbeat()  # ... and nothing asks it to end, though the rank before was asked
fork_server.leave_like(-9)  # as some rank has
"""
KILLED = int(-signal.SIGKILL)
LOST = KILLED, True
ENDS = [
    ("exit", (3, False)),
    ("kill", LOST),
    ("kill after a step", LOST),
    # Its own error, as long as no other rank's watcher reports a loss.
    ("seems lost", (76, False)),
    ("lost after a step", (76, True)),
    # What kills it before its first step may kill it again and again.
    ("kill", LOST),
    ("kill", LOST),
    ("kill", (KILLED, False)),
    ("kill after a step", LOST),
    # Complete: no other rank waits for it.
    ("kill after a step, complete", (KILLED, False)),
    ("hang", LOST),
    # These take longer than the notice, but are not killed.
    ("batch", (76, True)),
    ("write", (76, True)),
    ("thread that ends", (76, False)),
]


def test_a_forker_starts_ranks_and_knows_how_they_end(tmp_path: Path) -> None:
    (tmp_path / "forker.py").write_text(FORKER)
    told = subprocess.run(
        [sys.executable, tmp_path / "forker.py", *(how for how, _ in ENDS)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert told.returncode == KILLED, told
    assert told.stdout == f"{[end for _, end in ENDS]}\n", told
    assert told.stderr.count("cannot fork its rank") == 2, told


def test_no_watcher_replaces_ranks_of_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host may be lost with its watchers."""
    started: list[str] = []
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(elastic, "parse_args", lambda *_: a_config(resume="auto", name="run"))
    monkeypatch.setattr(elastic, "RankForker", lambda *_: started.append("a forker") or sys.exit())
    for local_size, expected in ((1, []), (2, ["a forker"])):
        world = replace(a_world(0, 2), local_size=local_size)
        monkeypatch.setattr(elastic, "own_world", lambda world=world: world)
        with suppress(SystemExit):
            elastic.supervise()
        assert started == expected
