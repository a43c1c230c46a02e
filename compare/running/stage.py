"""The stage of a block: its processes, and who of them may run."""

import contextlib
import json
import os
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from compare.evidence.turns import Turn
from compare.plan.environment import RUN_MARK, run_environment
from compare.plan.sources import ROOT
from compare.running.launch import busy_cpu_seconds, clear_folder, end_processes, start_watchdog
from compare.running.sides import MeasurementError, Side

START_SECONDS = 300.0  # for a side to import, compile kernels, and warm up
TURN_SECONDS = 600.0
END_SECONDS = 10.0
TAIL_LINES = 20


@dataclass
class Performer:
    """A process that takes turns, as seen from here."""

    side: str
    copy: int
    connection: socket.socket
    pid: int = 0
    unread: bytes = b""
    messages: list[dict[str, Any]] = field(default_factory=list)


class Stage:
    """The sides of a block, their processes and connections; used as a context, it leaves no
    process behind whatever ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"{os.getpid()}-{time.time_ns()}"
        self.sides: list[Side] = []
        self.processes: list[tuple[Side, subprocess.Popen[bytes], Path]] = []
        self.performers: list[Performer] = []

    def __enter__(self) -> "Stage":
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        # Not below the record's folder: a Unix socket's path has 108 bytes at most.
        self.temporary = tempfile.TemporaryDirectory(prefix="turns-")
        self.address = str(Path(self.temporary.name) / "socket")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.address)
        self.listener.listen(64)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.watchdog = start_watchdog(self.mark)
        return self

    def __exit__(self, *exception: object) -> None:
        for side in self.sides:
            self.dismiss(side)
        # Launchers that see their ranks end tidy up after them; what is left is killed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            deadline = time.monotonic() + END_SECONDS
            for _side, process, _folder in self.processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        for _side, process, _folder in self.processes:
            end_processes(process, self.mark)
        for performer in self.performers:
            performer.connection.close()
        self.selector.close()
        self.listener.close()
        self.temporary.cleanup()
        if self.watchdog.stdin is not None:
            self.watchdog.stdin.close()
        self.watchdog.wait()

    def start(self, side: Side) -> None:
        """Start a side's copies."""
        self.sides.append(side)
        for copy in range(side.copies):
            folder = self.folder / side.name / str(copy)
            command = side.command(folder.resolve(), copy, turns=["--socket", self.address])
            process, _ = start_process(side, command, folder, self.mark)
            self.processes.append((side, process, folder))

    def warm_up(self, *sides: Side) -> None:
        """Wait until these sides, all by default, have made their first steps, then stop them."""
        chosen = sides or tuple(self.sides)
        expected = sum(side.ranks * side.copies for side in chosen)
        for _ in self.receive("ready", expected, START_SECONDS):
            pass
        for side in chosen:
            self.stop(side)

    def end(self, side: Side) -> None:
        """End one side, while the others stay stopped."""
        ending = [one for one in self.processes if one[0].name == side.name]
        performers = [one for one in self.performers if one.side == side.name]
        own = self.trees(side)
        self.dismiss(side)
        deadline = time.monotonic() + END_SECONDS
        for _, process, _ in ending:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        send_signal(own, signal.SIGKILL)  # whoever is left
        for _, process, _ in ending:
            process.wait()
        for performer in performers:
            with contextlib.suppress(KeyError):  # it has been read to its end
                self.selector.unregister(performer.connection)
            performer.connection.close()
        self.sides = [one for one in self.sides if one.name != side.name]
        self.processes = [one for one in self.processes if one not in ending]
        self.performers = [one for one in self.performers if one not in performers]

    def dismiss(self, side: Side) -> None:
        """Let a side go on, and tell it to end."""
        self.go_on(side)
        for performer in self.performers:
            if performer.side == side.name:
                with contextlib.suppress(OSError):
                    performer.connection.sendall(b'{"kind": "end"}\n')

    def take_turn(self, side: Side, round_: int) -> Turn:
        """Let a side alone go on for its number of steps, and return what it measured."""
        performers = [one for one in self.performers if one.side == side.name]
        self.go_on(side)
        began, busy = time.monotonic(), busy_cpu_seconds()
        tell(performers, {"kind": "go", "steps": side.steps})
        told = dict[int, list[dict[str, Any]]]()
        for performer, message in self.receive("turn", len(performers), TURN_SECONDS):
            told.setdefault(performer.copy, []).append(message)
        own = sum(message["cpu_seconds"] for messages in told.values() for message in messages)
        if side.copies > 1:
            tell(performers, {"kind": "hold"})
            # Who was done first has gone on: that, too, is the side's own load.
            held = self.receive("held", len(performers), TURN_SECONDS)
            own = sum(message["cpu_seconds"] for _, message in held)
        seconds, busy = time.monotonic() - began, busy_cpu_seconds() - busy
        self.stop(side)
        turn = make_turn(side, round_, told)
        return replace(turn, other_load=max(0.0, round((busy - own) / seconds, 3)))

    def receive(
        self, kind: str, number: int, seconds: float
    ) -> Iterator[tuple[Performer, dict[str, Any]]]:
        """Yield so many messages of a kind, or fail when a side ends or takes too long."""
        deadline = time.monotonic() + seconds
        while number:
            for performer in self.performers:
                while performer.messages and number:
                    message = performer.messages.pop(0)
                    if message["kind"] != kind:
                        raise MeasurementError(f"{performer.side}: {message['kind']}, not {kind}")
                    number -= 1
                    yield performer, message
            if number:
                self.look_after(deadline, seconds)
                for key, _ in self.selector.select(timeout=0.5):
                    self.read(key.data)

    def read(self, performer: Performer | None) -> None:
        """Take what has come on a connection; None is the listener's."""
        if performer is None:
            connection, _ = self.listener.accept()
            new = Performer("", 0, connection)
            self.selector.register(connection, selectors.EVENT_READ, new)
            return
        try:
            received = performer.connection.recv(65536)
        except ConnectionResetError:
            received = b""
        if not received:  # the process has ended: look_after finds its launcher
            self.selector.unregister(performer.connection)
            return
        *lines, performer.unread = (performer.unread + received).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message["kind"] == "hello":
                performer.side, performer.copy = message["side"], message["copy"]
                performer.pid = message["pid"]
                self.performers.append(performer)
            else:
                performer.messages.append(message)

    def look_after(self, deadline: float, seconds: float) -> None:
        """Raise MeasurementError if a side has ended, or if the time is over."""
        for side, process, folder in self.processes:
            if process.poll() is not None:
                raise MeasurementError(
                    f"{side.name} ended with exit code {process.returncode}:\n{tail(folder)}"
                )
        if time.monotonic() > deadline:
            told = "\n".join(f"{side.name}:\n{tail(path)}" for side, _, path in self.processes)
            raise MeasurementError(
                f"nothing came for {seconds:.0f} s; the sides last wrote\n{told}"
            )

    def stop(self, side: Side) -> None:
        """Stop all processes of a side where they stand."""
        self.signal(side, signal.SIGSTOP)

    def go_on(self, side: Side) -> None:
        """Undo `stop`."""
        self.signal(side, signal.SIGCONT)

    def signal(self, side: Side, number: signal.Signals) -> None:
        """Send all processes of a side a signal."""
        send_signal(self.trees(side), number)

    def trees(self, side: Side) -> list[psutil.Process]:
        """All processes of a side.

        Ranks on another host are no descendants of their launcher, but of an sshd, even where both
        hosts are on this machine: they are known since they said hello.
        """
        launchers = [process.pid for one, process, _ in self.processes if one.name == side.name]
        ranks = [one.pid for one in self.performers if one.side == side.name]
        return find_trees([*launchers, *ranks])


def start_process(
    side: Side, command: list[str], folder: Path, mark: str | None = None
) -> tuple[subprocess.Popen[bytes], str]:
    """Start a side's command, its output in `folder`, which is emptied first: what an earlier call
    left there would be taken for this one's. Returns it with the mark by which
    compare.running.launch.end_processes finds all that it starts."""
    clear_folder(folder, keep_failure=False)
    mark = mark or f"{os.getpid()}-{time.time_ns()}"
    (folder / "command.txt").write_text(shlex.join(command) + "\n")
    with (folder / "output.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=run_environment() | {"PYTHONPATH": str(ROOT), RUN_MARK: mark} | side.environment,
            cwd=ROOT,
            start_new_session=True,
        )
    return process, mark


def find_trees(roots: Sequence[int]) -> list[psutil.Process]:
    """These processes and all their descendants, each once: launchers put ranks into sessions of
    their own, which a signal to a group would not reach."""
    found: dict[int, psutil.Process] = {}
    for pid in roots:
        if pid not in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(pid)
                found |= {one.pid: one for one in [root, *root.children(recursive=True)]}
    return list(found.values())


def send_signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Send processes a signal; those that have ended are left out."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def tell(performers: Sequence[Performer], message: dict[str, Any]) -> None:
    """Send processes a message; of one that has ended `Stage.look_after` finds the launcher."""
    for performer in performers:
        with contextlib.suppress(ConnectionError):
            performer.connection.sendall((json.dumps(message) + "\n").encode())


def tail(folder: Path) -> str:
    """The end of what a side wrote."""
    lines = (folder / "output.log").read_text(errors="replace").splitlines()
    return "\n".join(f"  | {line}" for line in lines[-TAIL_LINES:])


def make_turn(side: Side, round_: int, told: dict[int, list[dict[str, Any]]]) -> Turn:
    """What the messages of a side's processes, by copy, come to.

    Ranks that train together are as fast as the slowest of them, from the first one's start on.
    Independent copies add up.
    """
    images = side.steps * side.images_per_step
    seconds = [max(m["end"] for m in ms) - min(m["start"] for m in ms) for ms in told.values()]
    cpu_seconds = sum(message["cpu_seconds"] for ms in told.values() for message in ms)
    return Turn(
        side.name,
        round_,
        max(seconds),
        sum(images / each for each in seconds),
        cpu_seconds / (images * len(seconds)),
    )
