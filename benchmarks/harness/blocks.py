"""Blocks of measurement: two or more sides, started afresh, take turns on one machine.

A machine of which nobody knows who else uses it drifts by tens of percent in minutes; goals are at
half a percent. So the sides of a comparison run at once, but not at the same time: while one does a
turn of a second or two, all processes of the others are stopped (SIGSTOP). What a slow minute does
to one side, it does to the others. Turns begin in a quiet moment, if one comes in time, and rounds
in which others kept cores busy all the same do not count, as long as enough are left: two ranks
that wait for each other suffer more from a neighbour than two that do not.

A block starts each side, in random order, lets all warm up, and goes through the turns, forwards
and backwards alternately. Its ratio of two sides is the median over its rounds. The unit of
evidence is the block, since what chance decides once a launch (where pages and threads come to lie)
stays for all turns of it: compare/evidence/paired.py makes the estimate and
the interval from the blocks' ratios.
"""

import contextlib
import json
import math
import os
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil

from compare.errors import UserError
from compare.evidence.paired import Estimate, estimate_ratio
from compare.plan.blocks import drawn, seconds_left
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.environment import RUN_MARK, run_environment
from compare.plan.sources import ROOT
from compare.running.launch import (
    busy_cpu_seconds,
    clear_folder,
    duration,
    end_processes,
    start_watchdog,
)
from recipe.files import write_json

QUIET_CORES = 0.15  # that others may keep busy in a round that counts
MIN_SHARE_OF_ROUNDS = 1 / 3  # that count; if fewer were quiet, the quietest
MOST_ROUNDS = 2  # times those that were asked for: in place of rounds that were not quiet
LISTEN_SECONDS = 0.2  # to learn what others do, while all sides are stopped
START_SECONDS = 300.0  # for a side to import, compile kernels, and warm up
TURN_SECONDS = 600.0
END_SECONDS = 10.0
TAIL_LINES = 20

TAKE_TURNS = "benchmarks/harness/take_turns.py"
ENGINES = {"ddp": "DDP", "horovod": "Horovod"}
TRAINERS = {"ddp": "ddp_train/train.py", "horovod": "horovod_train/train.py"}
LAUNCHED_BY = {"ddp": "ddp-torchrun", "horovod": "horovod-mpi"}  # in compare's table


class BenchmarkError(UserError):
    """Something that keeps a benchmark from being measured; told without a traceback."""


@dataclass(frozen=True)
class Side:
    """One of those that are compared: what starts it, and how much it does in a turn."""

    name: str  # a folder's, too
    launcher: tuple[str, ...]  # up to and with `python`, or torchrun's words
    program: tuple[str, ...]  # the script and its arguments; {folder} is where it may write
    images_per_step: int  # of one copy, over all its ranks
    steps: int  # optimizer steps a turn
    ranks: int = 1  # processes that train together
    copies: int = 1  # started at once, knowing nothing of each other
    warm_up: int = 3  # steps
    with_instruments: bool = True
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, folder: Path, copy: int, turns: Sequence[str] = ()) -> list[str]:
        """What starts a copy: as a person would, or with `turns`, the wrapper's flags."""
        program = [word.replace("{folder}", str(folder)) for word in self.program]
        if not turns:
            return [*self.launcher, *program]
        flags = [*turns, "--side", self.name, "--copy", str(copy), "--warm-up", str(self.warm_up)]
        if self.copies > 1:
            flags.append("--overruns")
        if not self.with_instruments:
            flags.append("--without-instruments")
        return [*self.launcher, TAKE_TURNS, *flags, "--", *program]

    def shown(self) -> str:
        """The command for a reader, who may paste it."""
        words = [f"{name}={value}" for name, value in self.environment.items()]
        text = shlex.join([*words, *self.command(Path("runs/bench-by-hand"), 0)])
        if not self.with_instruments:
            text += "   # its Recorder replaced by nothing"
        return text if self.copies == 1 else f"{text}   # {self.copies} of them at once"


@dataclass(frozen=True)
class Workload:
    """What is trained: enough to give a trainer and a bare loop the same work."""

    arch: str
    image_size: int
    batch_size: int  # per worker
    flags: tuple[str, ...] = ()  # that trainers and bare_loop.py share
    threads: int | None = 1  # per worker; None: the trainer's own choice

    def words(self) -> list[str]:
        """Flags that trainers and bare_loop.py share."""
        words = ["--arch", self.arch, "--train-crop-size", str(self.image_size)]
        words += ["--batch-size", str(self.batch_size), *self.flags]
        return words if self.threads is None else [*words, "--threads", str(self.threads)]

    def __str__(self) -> str:
        threads = "" if self.threads is None else f", {self.threads} thread"
        flags = f", {' '.join(self.flags)}" if self.flags else ""
        return f"{self.arch} at {self.image_size} pixels, batch {self.batch_size}{threads}{flags}"


STEPS_OF_AN_EPOCH = 20_000  # more than a benchmark makes: no evaluation comes in between


def trainer_side(
    name: str,
    engine: str,
    workload: Workload,
    steps: int,
    workers: int = 1,
    copies: int = 1,
    flags: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    data: str = "synthetic",
    **others: Any,
) -> Side:
    """A trainer as a side: `engine` is "ddp" or "horovod"; one worker is started by python."""
    launcher = ["python"]
    if workers > 1:
        launcher = CONFIGURATIONS[LAUNCHED_BY[engine]].launch_words(workers, None)
    program = [TRAINERS[engine], "--data", data, *workload.words()]
    program += ["--val-crop-size", str(workload.image_size), "--epochs", "1000"]
    if data == "synthetic":
        images = workload.batch_size * workers * STEPS_OF_AN_EPOCH
        program += ["--synthetic-images", str(images)]
    if "--checkpoint-steps" not in flags:
        program += ["--keep-checkpoints", "0"]
    program += ["--log-dir", "{folder}", "--name", "run", *flags]
    return Side(
        name=name,
        launcher=tuple(launcher),
        program=tuple(program),
        images_per_step=workload.batch_size * workers,
        steps=steps,
        ranks=workers,
        copies=copies,
        environment=environment or {},
        **others,
    )


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    out: Path  # the record's folder
    blocks: int
    turns: int  # of each side in a block
    patience: float = 2.0  # seconds that a turn waits for others to be quiet
    quick: bool = False
    gpu: bool = False
    profile: bool = False
    seed: int = 0
    blocks_given: bool = False  # by the user, as the turns; if not, a benchmark may take fewer
    turns_given: bool = False


@dataclass(frozen=True)
class Turn:
    """What a side did in one turn."""

    side: str
    round: int  # from 0
    seconds: float  # of the slowest rank
    images_per_second: float  # of all copies together
    cpu_seconds_per_image: float
    other_load: float = 0.0  # cores that others kept busy meanwhile


@dataclass(frozen=True)
class Block:
    """The turns of one launch of each side."""

    number: int  # from 1
    order: tuple[str, ...]
    load_before: float  # the system's one-minute average
    turns: tuple[Turn, ...]

    @property
    def quiet_rounds(self) -> set[int]:
        """The rounds that count: those in which others were quiet, or the quietest third."""
        load = dict[int, float]()
        for turn in self.turns:
            load[turn.round] = max(load.get(turn.round, 0.0), turn.other_load)
        by_load = sorted(load, key=lambda round_: load[round_])
        quiet = sum(value <= QUIET_CORES for value in load.values())
        return set(by_load[: max(quiet, math.ceil(MIN_SHARE_OF_ROUNDS * len(load)))])

    @property
    def other_load(self) -> float:
        """Cores that others kept busy, in the mean turn that counts."""
        return mean(turn.other_load for turn in self.turns if turn.round in self.quiet_rounds)

    def ratio(self, first: str, second: str, value: Callable[[Turn], float]) -> float:
        """The median over the rounds that count of first / second."""
        rounds: dict[int, dict[str, float]] = {round_: {} for round_ in self.quiet_rounds}
        for turn in self.turns:
            if turn.round in rounds:
                rounds[turn.round][turn.side] = value(turn)
        return median(sides[first] / sides[second] for sides in rounds.values())

    def median(self, side: str, value: Callable[[Turn], float]) -> float:
        """The median over the rounds that count of one side's value."""
        rounds = self.quiet_rounds
        return median(
            value(turn) for turn in self.turns if turn.side == side and turn.round in rounds
        )


def throughput(turn: Turn) -> float:
    """Images per second of wall time."""
    return turn.images_per_second


def work_per_cpu_second(turn: Turn) -> float:
    """Images per second of CPU time."""
    return 1 / turn.cpu_seconds_per_image


def estimate(
    blocks: Sequence[Block], first: str, second: str, value: Callable[[Turn], float] = throughput
) -> Estimate:
    """The ratio first / second over all blocks."""
    ratios = [block.ratio(first, second, value) for block in blocks]
    return estimate_ratio(ratios, [1.0] * len(ratios))


def estimate_value(
    blocks: Sequence[Block], side: str, value: Callable[[Turn], float] = throughput
) -> Estimate:
    """One side's own value over all blocks, as a ratio to 1."""
    values = [block.median(side, value) for block in blocks]
    return estimate_ratio(values, [1.0] * len(values))


def run_blocks(
    sides: Sequence[Side], options: Options, case: str, rounds: int | None = None
) -> list[Block]:
    """Measure the blocks that the options ask for, writing each below the record's folder.

    `case` is the row's number, with a name behind it if the row has several: "5 DDP".
    """
    num_blocks, rounds = options.blocks, rounds or options.turns
    folder = options.out / "blocks" / case.replace(" ", "-")
    blocks: list[Block] = []
    durations: list[tuple[Hashable, float]] = []
    for number in range(1, num_blocks + 1):
        order = drawn(sides, options.seed, case, number)
        about = f"row {case}: block {number} of {num_blocks}"
        path = folder / f"block-{number}"
        if kept := finished_block(order, rounds, path):
            say(f"{about}: is there already")
            blocks.append(kept)
            continue
        began = time.monotonic()
        blocks.append(run_block(order, rounds, path, number, about, options.patience))
        durations.append((case, time.monotonic() - began))
        say_left(case, durations, num_blocks - number)
    return blocks


def say_left(case: str, durations: Sequence[tuple[Hashable, float]], blocks: int) -> None:
    """Say how long the blocks will take that are left."""
    if left := seconds_left(durations, [case] * blocks):
        say(f"row {case}: about {duration(left)} left")


def in_turn(sides: Sequence[Side], round_: int) -> Sequence[Side]:
    """The order of a round: forwards and backwards alternately."""
    return sides if round_ % 2 == 0 else sides[::-1]


def run_block(
    sides: Sequence[Side], rounds: int, folder: Path, number: int, label: str, patience: float
) -> Block:
    """Start the sides in this order, warm them up, and let them take turns."""
    load = os.getloadavg()[0]
    turns: list[Turn] = []
    with Stage(folder) as stage:
        say(f"{label}: starting {len(sides)} sides")
        for side in sides:
            stage.start(side)
        stage.warm_up()
        round_ = quiet = 0
        while quiet < rounds and round_ < MOST_ROUNDS * rounds:
            for side in in_turn(sides, round_):
                wait_for_quiet(patience)
                turns.append(stage.take_turn(side, round_))
            these = turns[-len(sides) :]
            load_now = max(turn.other_load for turn in these)
            quiet += load_now <= QUIET_CORES
            round_ += 1
            told = ", ".join(f"{turn.side} {turn.images_per_second:.4g}" for turn in these)
            noise = f"; others kept {load_now:.1f} cores busy" if load_now > QUIET_CORES else ""
            say(f"{label}, round {round_}, {quiet} of {rounds} quiet: {told} images/s{noise}")
    block = Block(number, tuple(side.name for side in sides), round(load, 2), tuple(turns))
    write_json(folder / "block.json", {**origin(sides, rounds), **asdict(block)})
    return block


def origin(sides: Sequence[Side], rounds: int) -> dict[str, Any]:
    """What a finished block must have in common with one that it is to stand for."""
    from recipe.record.environment import git_commit

    commands = [side.shown() for side in sides]
    return {"commands": commands, "rounds": rounds, "git_commit": git_commit()}


def finished_block(sides: Sequence[Side], rounds: int, folder: Path) -> Block | None:
    """The block that an interrupted call has left in this folder, if it was of the same sides
    and sources."""
    path = folder / "block.json"
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    expected = origin(sides, rounds)
    if {name: record.get(name) for name in expected} != expected:
        return None
    turns = tuple(Turn(**turn) for turn in record["turns"])
    return Block(record["number"], tuple(record["order"]), record["load_before"], turns)


def wait_for_quiet(seconds: float) -> None:
    """Wait until others leave this machine's cores alone, but no longer than `seconds`; call it
    while all sides are stopped."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        began, busy = time.monotonic(), busy_cpu_seconds()
        time.sleep(LISTEN_SECONDS)
        if (busy_cpu_seconds() - busy) / (time.monotonic() - began) <= QUIET_CORES:
            return


def say(text: str) -> None:
    """A line of progress, apart from the results."""
    print(text, file=sys.stderr, flush=True)


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
                        raise BenchmarkError(f"{performer.side}: {message['kind']}, not {kind}")
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
        """Raise BenchmarkError if a side has ended, or if the time is over."""
        for side, process, folder in self.processes:
            if process.poll() is not None:
                raise BenchmarkError(
                    f"{side.name} ended with exit code {process.returncode}:\n{tail(folder)}"
                )
        if time.monotonic() > deadline:
            told = "\n".join(f"{side.name}:\n{tail(path)}" for side, _, path in self.processes)
            raise BenchmarkError(f"nothing came for {seconds:.0f} s; the sides last wrote\n{told}")

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
