"""horovodrun --host-discovery-script: hosts come and go, ranks die, and the run goes on."""

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import SMALL, TRAINERS, resumed_at, run, wait_until

from horovod_train.announcements import Announcements
from recipe.record.resume import lines_by_step

ELASTIC = "horovodrun -np 2 --min-np 1 --max-np 3 --network-interfaces lo --host-discovery-script"


def command(slots: Path, arguments: str) -> list[str]:
    """Start ranks where the file `slots` says."""
    return [*ELASTIC.split(), f"cat {slots}", sys.executable, TRAINERS["horovod"],
            *arguments.split()]  # fmt: skip


def write_slots(slots: Path, text: str) -> None:
    """At once, for it is read each second."""
    new = slots.with_suffix(".new")
    new.write_text(f"{text}\n")
    new.replace(slots)


def ranks_below(launcher: subprocess.Popen) -> dict[int, psutil.Process]:
    """The processes that train, by their rank: each below one that watches over it."""
    found = {}
    for process in psutil.Process(launcher.pid).children(recursive=True):
        with suppress(psutil.Error):
            if "HOROVOD_ELASTIC" in process.parent().environ():
                found[int(process.environ()["HOROVOD_RANK"])] = process
    return found


def steps_in(folder: Path) -> list[dict[str, Any]]:
    """A run's steps so far."""
    return [line for lines in lines_by_step(folder, "step").values() for line in lines]


def images(step: dict[str, Any]) -> int:
    """Of all ranks."""
    return round(step["images_per_second"] * step["seconds"])


@pytest.mark.launch
def test_hosts_come_and_go_and_a_rank_is_killed(tmp_path: Path) -> None:
    """Two ranks, of which one is killed, then one, then three: each image once an epoch."""
    slots, folder = tmp_path / "slots", tmp_path / "run"
    write_slots(slots, "localhost:2")

    def meanwhile(launcher: subprocess.Popen) -> None:
        wait_until(lambda: len(steps_in(folder)) > 20)
        ranks_below(launcher)[1].kill()
        wait_until(lambda: len(resumed_at(folder)) == 1)
        for ranks in (1, 3):
            write_slots(slots, f"localhost:{ranks}")
            wait_until(lambda ranks=ranks: images(steps_in(folder)[-1]) == 12 * ranks)

    words = f"{SMALL.partition('--max-steps')[0]} --epochs 12 --log-interval 1"
    place = f"--log-dir {tmp_path} --name run --resume auto --checkpoint-steps 5"
    finished = run(command(slots, f"{words} {place}"), 200, meanwhile).checked()
    assert len(resumed_at(folder)) == 3, finished.output
    assert finished.output.count("hosts have come or gone") == 2, finished.output
    seen = 0
    for step in steps_in(folder):
        seen += images(step)
        assert step["samples_seen"] == seen, step
    assert seen >= 12 * 1438


@pytest.mark.launch
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--resume auto", "error: horovodrun --host-discovery-script: a change of hosts"),
        ("--resume auto --name run --data /nowhere", "error: --data /nowhere"),
    ],
)
def test_an_error_ends_all_of_it(flags: str, said: str, tmp_path: Path) -> None:
    write_slots(tmp_path / "slots", "localhost:2")
    finished = run(command(tmp_path / "slots", f"{SMALL} --log-dir {tmp_path} {flags}"), 60)
    assert finished.returncode != 0 and finished.output.count(said) == 1, finished.output


@pytest.mark.launch
def test_a_signal_ends_it_with_a_checkpoint(tmp_path: Path) -> None:
    slots, folder = tmp_path / "slots", tmp_path / "run"
    write_slots(slots, "localhost:2")

    def meanwhile(launcher: subprocess.Popen) -> None:
        wait_until(lambda: len(steps_in(folder)) > 5)
        ranks_below(launcher)[1].send_signal(signal.SIGUSR1)

    words = f"{SMALL.partition('--max-steps')[0]} --epochs 1000 --log-interval 1"
    place = f"--log-dir {tmp_path} --name run --resume auto"
    finished = run(command(slots, f"{words} {place}"), 100, meanwhile)
    assert finished.returncode != 0 and "stopped after step" in finished.output, finished.output
    assert list((folder / "checkpoints").glob("step-*.pt")) and not resumed_at(folder)


@pytest.fixture
def announcements() -> Iterator[Announcements]:
    server = Announcements("lo")
    yield server
    server.shutdown()
    server.server_close()


class Bomb:
    """What does harm as it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_what_the_driver_announces_is_heard(announcements: Announcements) -> None:
    """By Horovod's own client, as the driver makes it of what it was told."""
    from horovod.runner.common.util.codec import loads_base64
    from horovod.runner.elastic.worker import HostUpdateResult, WorkerNotificationClient

    addresses, key = loads_base64(announcements.for_driver)
    assert addresses == {"lo": [announcements.server_address]}
    client = WorkerNotificationClient(addresses, key, 0)
    assert not announcements.changed.is_set()
    client.notify_hosts_updated(1, HostUpdateResult.added)
    assert announcements.changed.wait(10)


@pytest.mark.parametrize("is_signed", [True, False])
def test_nothing_that_comes_is_unpickled(
    is_signed: bool, announcements: Announcements, tmp_path: Path
) -> None:
    from horovod.runner.common.util.secret import compute_digest

    message = pickle.dumps(Bomb(tmp_path / "harm"))
    digest = compute_digest(announcements.key if is_signed else b"a guess", message)
    with socket.create_connection(announcements.server_address, timeout=10) as sender:
        sender.sendall(digest + struct.pack("i", len(message)) + message)
        assert bool(sender.recv(1)) == is_signed
    assert announcements.changed.is_set() == is_signed and not (tmp_path / "harm").exists()
