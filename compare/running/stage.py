"""The stage of a block: its processes, and who of them may run."""

import contextlib
import os
import secrets
import shlex
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from compare.evidence.load import quiet_load
from compare.evidence.turns import Turn
from compare.plan.environment import RUN_MARK, run_environment
from compare.plan.sources import ROOT
from compare.running import launch
from compare.running.agent import STAGE, UNREACHABLE, hear, tell
from compare.running.launch import (
    clear_folder,
    end_processes,
    failed_folder,
    kill_marked,
    start_watchdog,
)
from compare.running.sides import MeasurementError, NoTurns, Side
from compare.running.turn_client import LEAD_IN_STEPS

LIMIT_SECONDS = 600.0  # for all sides to start and warm up, and for a turn
END_SECONDS = 10.0
HELLO_SECONDS = 5  # for who connects to say who it is
# What a side writes that cannot be on a GPU together with others, and what that means.
NO_ROOM = {
    "CUDA out of memory": "the sides do not fit into the GPU's memory at once",
    "CUDA error: out of memory": "the sides do not fit into the GPU's memory at once",
    "busy or unavailable": "the GPU lets in one process only (its compute mode)",
}


@dataclass(frozen=True)
class Performer:
    """A process that takes turns, as seen from here."""

    side: str
    copy: int
    rank: int
    host: str
    machine: str  # hosts that share a kernel share its cores
    cores: int  # of the machine
    connection: Connection


Told = tuple[Performer, dict[str, Any]]  # a message, and whose


class Stage:
    """The sides of a block, their processes and connections; used as a context, it leaves no
    process behind whatever ends it. If a side fails, the folder is put aside, with all output.

    `sides` are those that will be started; they need only be named if one of them has processes on
    other hosts. `timeout`: seconds for all to start and warm up, and for a turn.
    """

    def __init__(
        self, folder: Path, sides: Sequence[Side] = (), timeout: float = LIMIT_SECONDS
    ) -> None:
        self.folder, self.expected, self.timeout = folder, sides, timeout
        self.aside = failed_folder(folder)
        self.mark = f"{os.getpid()}-{time.time_ns()}"
        self.sides: list[Side] = []
        self.processes: list[tuple[Side, subprocess.Popen[bytes], Path]] = []
        self.performers: list[Performer] = []
        self.unread: list[Told] = []
        self.on_turn = ""  # the name of the side that is; "" while sides start

    def __enter__(self) -> "Stage":
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.temporary = tempfile.TemporaryDirectory(prefix="turns-")
        self.listener, self.place, self.key = listen(Path(self.temporary.name), self.expected)
        self.watchdog = start_watchdog(self.mark, self.temporary.name)
        return self

    def __exit__(self, *exception: object) -> None:
        for performer in self.performers:
            tell(performer.connection, "end")
        # Launchers that see their ranks end tidy up after them; what is left is killed.
        deadline = time.monotonic() + END_SECONDS
        for _side, process, _folder in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        for _side, process, _folder in self.processes:
            if process.poll() is None:
                end_processes(process, self.mark)
        kill_marked(self.mark)
        for performer in self.performers:
            performer.connection.close()
        self.listener.close()
        self.temporary.cleanup()
        if self.watchdog.stdin is not None:
            self.watchdog.stdin.close()
        self.watchdog.wait()
        if isinstance(exception[1], MeasurementError):
            (self.folder / "output.log").write_text(f"{exception[1]}\n")
            self.folder.rename(self.aside)

    @property
    def quiet_cores(self) -> float:
        """What others may keep busy in a turn that counts: on the smallest machine."""
        return quiet_load(min(performer.cores for performer in self.performers))

    def start(self, *sides: Side) -> None:
        """Start these sides and let them make their first steps; each stands still from then on,
        and leaves the cores to the others.

        The next one is started as soon as all processes of the one before are there: with all at
        once, those that wait for each other poll, and keep the others from getting ahead.
        """
        self.on_turn = ""
        waiting, pending = list(sides), dict[tuple[str, str], int]()
        while waiting or pending:
            if waiting and not any(kind == "hello" for _, kind in pending):
                side = waiting.pop(0)
                self.start_copies(side)
                for kind in ("hello", "ready", "stopped"):
                    pending[side.name, kind] = side.ranks * side.copies
                deadline = time.monotonic() + self.timeout
            performer, message = self.receive(deadline)
            name, kind = key = performer.side, message["kind"]
            pending[key] -= 1
            if not pending[key]:
                del pending[key]
                if kind == "ready":
                    self.tell(name, "stop")

    def start_copies(self, side: Side) -> None:
        """Start a side's copies."""
        self.sides.append(side)
        place = {STAGE: f"{self.place} {self.key.hex()}"}
        for copy in range(side.copies):
            folder = self.folder / side.name / str(copy)
            command = side.command(folder.resolve(), copy, by_turns=True)
            process, _ = start_process(side, command, folder, self.mark, place)
            self.processes.append((side, process, folder))

    def end(self, side: Side) -> None:
        """End one side, while the others stand still."""
        ending = [one for one in self.processes if one[0].name == side.name]
        performers = [one for one in self.performers if one.side == side.name]
        self.processes = [one for one in self.processes if one not in ending]
        self.performers = [one for one in self.performers if one not in performers]
        self.sides = [one for one in self.sides if one.name != side.name]
        for performer in performers:
            tell(performer.connection, "end")
        deadline = time.monotonic() + END_SECONDS
        for performer in performers:
            while performer.connection.poll(max(0.0, deadline - time.monotonic())):
                if hear(performer.connection)["kind"] == "end":
                    break
            performer.connection.close()
        for _, process, _ in ending:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def take_turn(self, side: Side, round_: int) -> Turn:
        """Let a side alone go on for its number of steps, and return what it measured."""
        self.on_turn, began = side.name, time.time()
        self.tell(side.name, "go", steps=side.steps)
        told = spent = self.collect("turn", side)
        if side.copies > 1:
            # Who was done first has gone on: that, too, is the side's own load.
            self.tell(side.name, "hold")
            spent = self.collect("held", side)
        self.tell(side.name, "stop")
        self.collect("stopped", side)
        return replace(make_turn(side, round_, told, spent), began=round(began, 2))

    def tell(self, name: str, kind: str, **values: Any) -> None:
        """Send all processes of a side a message."""
        for performer in self.performers:
            if performer.side == name:
                tell(performer.connection, kind, **values)

    def collect(self, kind: str, side: Side) -> list[Told]:
        """Wait for one message of this kind from each process of a side."""
        deadline = time.monotonic() + self.timeout
        told: list[Told] = []
        while len(told) < side.ranks * side.copies:
            performer, message = self.receive(deadline)
            if (performer.side, message["kind"]) != (side.name, kind):
                raise MeasurementError(f"{performer.side}: {message['kind']}, not {kind}")
            told.append((performer, message))
        return told

    def receive(self, deadline: float) -> Told:
        """Wait for the next message of any process; MeasurementError when one has ended, or when it
        takes too long."""
        while not self.unread:
            self.look_after(deadline)
            by_connection = {one.connection: one for one in self.performers}
            for ready in wait([self.listener, *by_connection], timeout=0.5):
                if ready is self.listener:
                    self.accept()
                    continue
                performer = by_connection[ready]  # type: ignore[index]
                message = hear(performer.connection)
                if message["kind"] == "end":
                    self.report_end(performer)
                self.unread.append((performer, message))
        return self.unread.pop(0)

    def accept(self) -> None:
        """Let a process's agent in, if it has the key; whoever else connects is turned away."""
        accepted, _ = self.listener.accept()
        limit = struct.pack("ll", HELLO_SECONDS, 0)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection = Connection(accepted.detach())
        try:
            if self.key:
                deliver_challenge(connection, self.key)
                answer_challenge(connection, self.key)
        except (OSError, EOFError, AuthenticationError):
            connection.close()
            return
        message = hear(connection)
        if message.pop("kind") == "hello":
            self.performers.append(Performer(connection=connection, **message))
            self.unread.append((self.performers[-1], {"kind": "hello"}))

    def report_end(self, performer: Performer) -> None:
        """Raise MeasurementError for a process that has ended; its launcher, if that ends, too, has
        more to say."""
        for side, process, folder in self.processes:
            if (side.name, folder.name) == (performer.side, str(performer.copy)):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS)
                    raise self.failure(side, f"ended with exit code {process.returncode}", folder)
                raise self.failure(side, f"rank {performer.rank} on {performer.host} ended", folder)

    def look_after(self, deadline: float) -> None:
        """Raise MeasurementError if a side has ended, or if the time is over."""
        for side, process, folder in self.processes:
            if process.poll() is not None:
                raise self.failure(side, f"ended with exit code {process.returncode}", folder)
        if time.monotonic() > deadline:
            told = "\n".join(
                f"{side.name}:\n{self.output(path)}" for side, _, path in self.processes
            )
            raise MeasurementError(
                f"not ready after the {self.timeout:.0f} s that --timeout allows; the sides last "
                f"wrote\n{told}"
            )

    def failure(self, side: Side, what: str, folder: Path) -> MeasurementError:
        """The error of a side that has ended: with the end of what it wrote."""
        when = "" if self.on_turn in ("", side.name) else " while it stood still"
        text = f"{side.name} {what}{when}:\n{self.output(folder)}"
        # A launcher may have said much since.
        whole = (folder / "output.log").read_text(errors="replace")
        if UNREACHABLE in whole:
            return NoTurns(f"a host does not reach this one: {text}", side.name)
        if len(self.sides) > 1:
            for sign, meaning in NO_ROOM.items():
                if sign in whole:
                    return NoTurns(f"{meaning}: {text}", side.name)
        return MeasurementError(text, side.name)

    def output(self, folder: Path) -> str:
        """The end of what a side wrote, and where all of it will be."""
        log = self.aside / folder.relative_to(self.folder) / "output.log"
        return f"{tail(folder)}\n  all of it: {log}"


def listen(folder: Path, sides: Sequence[Side]) -> tuple[socket.socket, str, bytes]:
    """Return what agents connect to, where they find it, and the key that they must have.

    If all run on this host, that is a socket in a folder of the user's own, and needs no key. Else
    it is a port, and both ends prove that they know the key, which travels in the environment.
    (horovodrun over Gloo writes the environment into a command line. Who reads it there can spoil
    the block, no more: nothing that comes in is executed.)
    """
    if not any(side.over_hosts for side in sides):
        listener = socket.socket(socket.AF_UNIX)
        # Not below the record's folder: the path may have 108 bytes at most.
        listener.bind(str(folder / "socket"))
        listener.listen(64)
        return listener, str(folder / "socket"), b""
    interface = next((side.interface for side in sides if side.interface), None)
    own = own_addresses(interface)
    if not own:
        where = f"--network-interface {interface}" if interface else "this host"
        raise NoTurns(f"{where} has no IPv4 address that other hosts could reach")
    listener = socket.create_server((own[0] if interface else "", 0), backlog=64)
    place = f"{','.join(own)}:{listener.getsockname()[1]}"
    return listener, place, secrets.token_bytes(32)


def own_addresses(interface: str | None) -> list[str]:
    """This host's IPv4 addresses, loopback's aside; those of one interface, if it is named."""
    return [
        address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if interface in (None, name)
        and address.family == socket.AF_INET
        and not address.address.startswith("127.")
    ]


def start_process(
    side: Side,
    command: list[str],
    folder: Path,
    mark: str | None = None,
    variables: dict[str, str] | None = None,
) -> tuple[subprocess.Popen[bytes], str]:
    """Start a side's command, its output in `folder`, which is emptied first: what an earlier call
    left there would be taken for this one's. Returns it with the mark by which
    compare.running.launch.end_processes finds all that it starts."""
    clear_folder(folder, keep_failure=False)
    mark = mark or f"{os.getpid()}-{time.time_ns()}"
    (folder / "command.txt").write_text(shlex.join(command) + "\n")
    environment = run_environment()
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), environment.get("PYTHONPATH")))
    )
    # Steps of a Slurm job share its cores, rather than wait for each other's end.
    environment |= {RUN_MARK: mark, "SLURM_OVERLAP": "1", **(variables or {}), **side.environment}
    with (folder / "output.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=side.directory,
            start_new_session=True,
        )
    return process, mark


def tail(folder: Path) -> str:
    """The end of what a side wrote."""
    return "\n".join(f"  | {line}" for line in launch.tail(folder / "output.log"))


def make_turn(side: Side, round_: int, told: list[Told], spent: list[Told]) -> Turn:
    """What the messages of a side's processes come to.

    Ranks that train together take the same time from one step's end to another's, but for a few
    milliseconds by which one of them is ahead: their mean counts. Independent copies add up.
    `spent` are the messages whose CPU time, of all processes of a machine, is the side's own: what
    more its cores did is others'. CPU time is that of the lead-in as well.
    """
    images = side.steps * side.images_per_step
    by_copy: dict[int, list[float]] = {}
    for performer, message in told:
        by_copy.setdefault(performer.copy, []).append(message["seconds"])
    seconds = [mean(of_ranks) for of_ranks in by_copy.values()]
    all_images = (LEAD_IN_STEPS + side.steps) * side.images_per_step * len(seconds)
    cpu_seconds = sum(message["cpu_seconds"] for _, message in told)
    by_machine: dict[str, list[dict[str, Any]]] = {}
    for performer, message in spent:
        by_machine.setdefault(performer.machine, []).append(message)
    loads = [
        (max(m["busy"] for m in ms) - sum(m["cpu_seconds"] for m in ms))
        / max(m["window"] for m in ms)
        for ms in by_machine.values()
    ]
    return Turn(
        side.name,
        round_,
        max(seconds),
        sum(images / each for each in seconds),
        cpu_seconds / all_images,
        max(0.0, round(max(loads), 3)),
    )
