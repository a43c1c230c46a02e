"""The scheduler of turns: two or more sides, started afresh, take turns on the same machines.

A machine of which nobody knows who else uses it drifts by tens of percent in minutes; goals are at
half a percent. So the sides of a comparison run at once, but not at the same time: while one does a
turn of half a second, all processes of the others are paused (SIGSTOP). What a slow minute does
to one side, it does to the others. A turn in which others kept cores busy is taken again, as soon
as it is quiet: two ranks that wait for each other suffer more from a neighbour than two that do
not.

A block starts each side, in an order of its own, lets all warm up, and goes through the turns,
forwards and backwards alternately. Now and then comes a round of turns without the exchange of
gradients, which shows what that costs. All turns are written down, those that did not count as
well, with what each trainer counted. A block's ratio of two sides is that of all their images over
all their seconds. The unit of evidence is the block, since what chance decides once a launch (how
pages and threads are placed) stays for all turns of it: compare/evidence/paired.py makes the
estimate and the interval from the blocks' ratios. take_turns.py is beside and inside each rank.
"""

import contextlib
import functools
import math
import os
import secrets
import shlex
import socket
import struct
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from compare.evidence.reading import read_block
from compare.evidence.turns import Block, Purpose, Turn, quiet_load
from compare.plan.blocks import LEAD_IN_STEPS, RUN_MARK
from compare.plan.environment import ROOT, path_from_here
from compare.plan.plan import Plan, Run
from compare.running.checks import visible_gpus
from compare.running.launch import (
    Launches,
    clear_folder,
    failed_folder,
    shown_tail,
)
from compare.running.take_turns import PATIENT, SCHEDULER, UNREACHABLE, State, receive, send
from recipe.errors import UserError
from recipe.files import replace_file, write_json
from recipe.settings.config import read_flags

TAKE_TURNS = "compare/running/take_turns.py"
PLACE = "0"  # of a side in its folder
END_SECONDS = 10.0
HELLO_SECONDS = 5  # for who connects to say who it is
NO_ROOM = (
    " (the sides do not fit into the GPU's memory at once: --measure runs has one after the other)"
)
# What a side writes that cannot take turns with others, and what that means. The first one that is
# found counts.
MEANINGS = {
    UNREACHABLE: " (that host does not reach this one)",
    "busy or unavailable": " (the GPU lets in one process only, by its compute mode: --measure "
    "runs has one after the other)",
    "out of memory": NO_ROOM,  # torch, CUDA's own name for it in NCCL and Horovod
    "STATUS_ALLOC_FAILED": NO_ROOM,  # cuBLAS, cuDNN
    "DEVICE_ALLOCATION_FAILED": NO_ROOM,  # cuDNN 9
    "STATUS_NOT_INITIALIZED": NO_ROOM,  # both, where a handle finds no room
    "Failed to CUDA": NO_ROOM,  # NCCL: malloc, calloc, calloc async, host alloc
    "unhandled cuda error": NO_ROOM,  # all that NCCL tells Horovod
    "bytes on device": NO_ROOM,  # DALI
    "No module named 'psutil'": ", whose Python has no psutil: `pip install psutil` there",
    "No module named 'compare'": f", whose Python does not find {ROOT}: put it on PYTHONPATH there",
    "'compare' is not a package": ", which has a compare.py of its own: rename that",
}
# That a turn is to take beside its lead-in, where no side says how many steps it makes. Turns of 2
# steps are as noisy as turns of 6 (a ratio of two varies by 9 %; three blocks of each, on two cores
# that others share): the more often sides change, the better they share what disturbs them.
TURN_SECONDS = 0.5
TRIAL_STEPS = 2  # by which that is found
PATIENCE = 2.0  # seconds that a disturbed turn waits for others to leave the cores alone
ABLATION_EVERY = 3  # rounds: then comes one without the exchange of gradients
LISTEN_SECONDS = 0.2  # to learn what others do, while all sides are paused


class MeasurementError(UserError):
    """Something that keeps sides from being measured; said without a traceback. `side` is the name
    of the one that failed."""

    def __init__(self, text: str, side: str | None = None) -> None:
        super().__init__(text)
        self.side = side


def run_block(
    sides: Sequence[Run],
    plan: Plan,
    folder: Path,
    number: int,
    report: Callable[[str], None],
    patience: float = PATIENCE,
    seal: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Block:
    """Start the sides in this order, warm them up, let them take turns, and write block.json.

    A turn that others disturb is taken again, after at most `patience` seconds; at most as many
    turns of each side are as the plan has rounds, on the average. `seal` returns what block.json is
    to hold with the digests that guard it.

    Raises MeasurementError where a side fails.
    """
    began, order = time.monotonic(), [side.side for side in sides]
    with Scheduler(folder, plan, sides) as scheduler:
        report(f"starting {', '.join(order)}")
        scheduler.start(*sides)
        told = {"unit": scheduler.unit(), "facts": scheduler.facts()}
        trials = [] if plan.steps else scheduler.find_steps(sides)
        turns, disturbed = scheduler.take_rounds(sides, patience, report)
        measured = {
            "number": number,
            "order": order,
            "rounds": plan.rounds,
            "commands": [shlex.join(side.command(Path("runs/by-hand"), "run")) for side in sides],
            "turns": [asdict(turn) for turn in (*trials, *turns)],
            "steps": dict.fromkeys(order, scheduler.steps),
            "disturbed_seconds": round(disturbed, 3),
            "quiet_cores": scheduler.quiet_cores,
            "weights": scheduler.weights(),
            **told,
        }
    measured["seconds"] = round(time.monotonic() - began, 3)
    write_json(folder / "block.json", seal(measured))
    return read_block(folder / "block.json")


@dataclass
class Rank:
    """A handle of a process that takes turns: who it is, what it does, and its last turn."""

    side: str
    number: int
    host: str
    machine: str  # hosts that share a kernel share its cores
    cores: int  # of the machine
    connection: Connection
    state: State = State.STARTING
    measured: dict[str, Any] = field(default_factory=dict)
    size: int = 1  # of its world, as its launcher says


class Scheduler(Launches):
    """The sides of a block, and who of them may run; used as a context, it leaves no process behind
    whatever ends it. If a side fails, the folder is put aside, with all output.

    `sides` are those that will be started; they need only be named if one of them has processes on
    other hosts. The plan says how many steps and rounds there are, and how long all may take to
    start and warm up, and a turn.
    """

    def __init__(self, folder: Path, plan: Plan, sides: Sequence[Run] = ()) -> None:
        super().__init__()
        self.folder, self.plan, self.steps = folder, plan, plan.steps or 0
        self.aside, self.key = failed_folder(folder), secrets.token_bytes(32)
        self.listener, self.address = listen(sides)
        self.started: dict[str, subprocess.Popen[bytes]] = {}  # each side's launcher
        self.ranks: list[Rank] = []
        self.sides = dict[str, Run]()  # that were started
        self.on_turn = ""  # the name of the side that is; "" while sides start

    def __enter__(self) -> "Scheduler":
        clear_folder(self.folder, keep_failure=False)
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        for rank in self.ranks:
            send(rank.connection, State.ENDED)
        self.wait(END_SECONDS)  # launchers that see their ranks end tidy up after them
        super().__exit__()
        self.listener.close()
        if isinstance(exception[1], MeasurementError):
            replace_file(self.folder / "output.log", f"{exception[1]}\n")
            self.folder.rename(self.aside)

    @property
    def quiet_cores(self) -> float:
        """What others may keep busy in a turn that counts: on the smallest machine."""
        return quiet_load(min(rank.cores for rank in self.ranks))

    def start(self, *sides: Run) -> None:
        """Start these sides and let them make their first steps; each is paused from then on, and
        leaves the cores to the others.

        The next one is started as soon as all ranks of the one before are there: with all at once,
        those that wait for each other poll, and keep the others from getting ahead. On a machine
        with GPUs it is started when the one before is paused: cuDNN tries in the warm-up which of
        its kernels are the fastest, and on a GPU that others use, too, it would choose by chance.
        """
        place = f"{self.address} {self.key.hex()}"
        started, on_gpus = list[Run](), visible_gpus() > 0
        while not all(self.are(State.PAUSED, side) for side in sides):
            are_there = all(
                self.are(State.PAUSED, side)
                if on_gpus
                else len(self.of(side)) == self.ranks_of(side)
                for side in started
            )
            if are_there and len(started) < len(sides):
                started.append(side := sides[len(started)])
                self.sides[side.side] = side
                who = f"{place} {side.side} {self.plan.warm_up_steps}"
                self.started[side.side] = start_side(
                    side, self.folder / side.side / PLACE, self, who
                )
                deadline = time.monotonic() + self.plan.timeout
            self.receive(deadline)
            for side in started:
                if self.are(State.READY, side):
                    self.send(side, State.PAUSED)

    def find_steps(self, sides: Sequence[Run]) -> list[Turn]:
        """Take as many steps a turn from now on as fill it, by the pace of a trial, which is also
        the sides' first turn with the cores to themselves. All take the same number, or the work
        would not be the same. Return the trials."""
        self.steps = TRIAL_STEPS
        trials = [self.take_turn(side, 0, "trial") for side in sides]
        pace = median(turn.seconds for turn in trials) / TRIAL_STEPS
        self.steps = max(1, round(TURN_SECONDS / pace))
        return trials

    def take_rounds(
        self, sides: Sequence[Run], patience: float, report: Callable[[str], None]
    ) -> tuple[list[Turn], float]:
        """Let sides take turns, forwards and backwards alternately. Return the turns, and how many
        seconds those took that others disturbed, and waiting for quiet."""
        turns, disturbed_seconds, rounds = list[Turn](), 0.0, self.plan.rounds
        spare = most = rounds * len(sides)
        for round_ in range(rounds):
            report(f"round {round_ + 1} of {rounds}, {most - spare} turns taken again")
            order = sides if round_ % 2 == 0 else sides[::-1]
            for side in order:
                while True:
                    began = time.monotonic()
                    turn = self.take_turn(side, round_, digest=round_ == rounds - 1)
                    is_disturbed, is_last = turn.other_load > self.quiet_cores, spare == 0
                    if is_disturbed and not is_last:
                        spare -= 1
                        turn = replace(turn, purpose="disturbed")
                        wait_for_quiet(patience)
                    turns.append(turn)
                    disturbed_seconds += is_disturbed * (time.monotonic() - began)
                    if is_last or not is_disturbed:
                        break
            if round_ % ABLATION_EVERY == ABLATION_EVERY - 1 and not self.plan.no_phases:
                turns += [
                    self.take_turn(side, round_, "ablation", exchange=False)
                    for side in order
                    if side.ablates
                ]
        return turns, disturbed_seconds

    def take_turn(self, side: Run, round_: int, purpose: Purpose = "speed", **how: bool) -> Turn:
        """Let a side alone go on for a turn's steps, and return what it measured. `how`: with
        `exchange` of gradients (the default), and a `digest` of the weights at its end."""
        self.on_turn, began = side.side, time.time()
        ask = {"steps": self.steps, "exchange": True, "digest": False}
        ranks = self.request(side, State.RUNNING, State.READY, **ask | how)
        cpu_seconds = sum(rank.measured["cpu_seconds"] for rank in ranks)
        self.request(side, State.PAUSED, State.PAUSED)
        turn = make_turn(side, self.steps, round_, round(began, 2), ranks, cpu_seconds)
        return replace(turn, purpose=purpose)

    def weights(self) -> dict[str, str]:
        """Return the digest of each side's weights, where a trainer told it; MeasurementError for
        a side whose ranks hold different ones: their gradients were not averaged."""
        digests = defaultdict[str, set[str]](set)
        for rank in self.ranks:
            if "weights" in rank.measured:
                digests[rank.side].add(rank.measured["weights"])
        for side, found in digests.items():
            if len(found) > 1:
                raise MeasurementError(
                    f"{side}: its ranks ended with {len(found)} different weights, so it does not "
                    "average the gradients of all: it does less work than it is to be compared by",
                    side,
                )
        return {side: found.pop() for side, found in digests.items()}

    def request(self, side: Run, wanted: State, until: State, **values: Any) -> list[Rank]:
        """Send all ranks of a side which state to take; return them when all are in `until`."""
        deadline = time.monotonic() + self.plan.timeout
        self.send(side, wanted, **values)
        while not self.are(until, side):
            self.receive(deadline)
        return self.of(side)

    def send(self, side: Run, wanted: State, **values: Any) -> None:
        """Send all ranks of a side which state to take; they run until they say that they have."""
        for rank in self.of(side):
            rank.state = State.RUNNING
            send(rank.connection, wanted, **values)

    def of(self, side: Run) -> list[Rank]:
        """Return a side's ranks that are there."""
        return [rank for rank in self.ranks if rank.side == side.side]

    def ranks_of(self, side: Run) -> int:
        """Return how many ranks a side has, as its plan or else its launcher says; -1: not known
        before the first one is there."""
        return side.workers or next((rank.size for rank in self.of(side)), -1)

    def are(self, state: State, side: Run) -> bool:
        """Tell whether all ranks of a side are there, and in this state."""
        states = [rank.state for rank in self.of(side)]
        return len(states) == self.ranks_of(side) and {*states} == {state}

    def unit(self) -> str:
        """Return what all sides count; MeasurementError if it is not the same."""
        units = {rank.side: rank.measured.get("unit", "images") for rank in self.ranks}
        if len({*units.values()}) > 1:
            told = ", ".join(f"{side} {unit}" for side, unit in units.items())
            raise MeasurementError(
                f"the sides count different things: {told}; let all call step() with the same unit"
            )
        return next(iter(units.values()))

    def facts(self) -> dict[str, Any]:
        """Return what the first rank of each script says that it runs on, and where all are."""
        found = dict[str, Any]()
        for rank in sorted(self.ranks, key=lambda rank: rank.number):
            side = self.sides[rank.side]
            if side.is_script and "facts" in rank.measured and rank.side not in found:
                hosts = [one.host for one in sorted(self.of(side), key=lambda one: one.number)]
                own = {"world_size": len(hosts), "rank_hosts": hosts, "hosts": sorted({*hosts})}
                found[rank.side] = rank.measured["facts"] | own
        return found

    def receive(self, deadline: float) -> None:
        """Take what ranks have sent, within half a second; MeasurementError if a side has ended, or
        if it is past the deadline."""
        for side, launcher in self.started.items():
            if launcher.poll() is not None:
                raise self.failure(side)
        if time.monotonic() > deadline:
            tails = [f"{side}{self.joined(side)}:\n{self.tail(side)}" for side in self.started]
            raise MeasurementError(
                f"not ready after the {self.plan.timeout} s that --timeout allows; the sides last "
                "wrote\n" + "\n".join(tails)
            )
        by_connection: dict[Any, Rank] = {rank.connection: rank for rank in self.ranks}
        for ready in wait([self.listener, *by_connection], timeout=0.5):
            if ready is self.listener:
                self.accept()
                continue
            rank = by_connection[ready]
            rank.state, values = receive(rank.connection)
            rank.measured |= values
            if rank.state is State.ENDED:
                with contextlib.suppress(subprocess.TimeoutExpired):  # its launcher has more to say
                    self.started[rank.side].wait(END_SECONDS)
                raise self.failure(rank.side, f"rank {rank.number} on {rank.host} ended")

    def accept(self) -> None:
        """Let a rank's agent in, if it has the key; whoever else connects is turned away."""
        accepted, _ = self.listener.accept()
        limit = struct.pack("ll", HELLO_SECONDS, 0)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection = Connection(accepted.detach())
        with contextlib.suppress(OSError, EOFError, AuthenticationError):
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            state, values = receive(connection)
            if state is State.STARTING:
                self.ranks.append(Rank(connection=connection, **values))
        for side in self.sides.values():
            if len(self.of(side)) > self.ranks_of(side) >= 0:
                raise MeasurementError(
                    f"{side.side}: {len(self.of(side))} of its processes take part, and its "
                    f"launcher's variables tell of {self.ranks_of(side)}; a script that starts its "
                    "own ranks says how many, as in Side(ranks=2)",
                    side.side,
                )

    def failure(self, side: str, what: str = "") -> MeasurementError:
        """Return the error of a side that has ended: with the end of what it wrote."""
        if (code := self.started[side].returncode) is not None:
            what = f"ended with exit code {code}"
        when = "" if self.on_turn in ("", side) else " while it was paused"
        # A launcher may have said much since.
        whole = (self.folder / side / PLACE / "output.log").read_text(errors="replace")
        found = (meaning for sign, meaning in MEANINGS.items() if sign in whole)
        hint = next(found, "" if code else self.joined(side))
        return MeasurementError(f"{side} {what}{when}{hint}:\n{self.tail(side)}", side)

    def joined(self, side: str) -> str:
        """Say which ranks of a script of a user's own take part, and what such a script does."""
        one = self.sides[side]
        if not one.is_script:
            return ""
        all_ = max(self.ranks_of(one), 0) or "its"
        return (
            f", with {len(self.of(one))} of {all_} ranks taking part: each makes one `side = "
            "Side()`, or Side(ranks=N) says that there are fewer, calls side.step() after each "
            "step, and trains on until it is ended, for more epochs say"
        )

    def tail(self, side: str) -> str:
        """Return the end of what a side wrote, and where all of it will be."""
        place = Path(side, PLACE)
        return shown_tail(self.folder / place, kept=self.aside / place)


def listen(sides: Sequence[Run]) -> tuple[socket.socket, str]:
    """Return what agents connect to, and where they find it: a port, on this host alone if all
    sides are. Both ends prove that they know the key, which travels in the environment.

    (horovodrun over Gloo writes the environment into a command line. Who reads it there can spoil
    the block, no more: nothing that comes in is executed.)
    """
    here, bound = ["127.0.0.1"], "127.0.0.1"
    if any(is_over_hosts(side) for side in sides):
        interface = next(filter(None, (side.configuration.interface for side in sides)), None)
        here = [
            address.address
            for name, addresses in psutil.net_if_addrs().items()
            for address in addresses
            if interface in (None, name)
            and address.family == socket.AF_INET
            and not address.address.startswith("127.")
        ]
        if not here:
            where = f"--network-interface {interface}" if interface else "this host"
            raise MeasurementError(f"{where} has no IPv4 address that other hosts could reach")
        bound = here[0] if interface else ""
    listener = socket.create_server((bound, 0), backlog=64)
    return listener, f"{','.join(here)}:{listener.getsockname()[1]}"


def is_over_hosts(side: Run) -> bool:
    """Tell whether some of its ranks are on other hosts, or may be."""
    elsewhere = side.hosts is not None if side.is_script else side.leaves_this_host
    return elsewhere or side.configuration.has_daemons


def start_side(side: Run, folder: Path, launches: Launches, who: str) -> subprocess.Popen[bytes]:
    """Start a side's command, its output in `folder`, which is emptied first: what an earlier call
    left there would be taken for this one's. `who` tells its ranks who they are, and to whom."""
    clear_folder(folder, keep_failure=False)
    command = side.command(folder.resolve(), "run", [path_from_here(TAKE_TURNS)])
    # Steps of a Slurm job share its cores, rather than wait for each other's end.
    variables = {"SLURM_OVERLAP": "1", SCHEDULER: who}
    if side.is_script:
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
        variables |= {"PYTHONPATH": path, **PATIENT}
    if is_over_hosts(side) and "mpirun" in command:  # others take the environment along
        at = command.index("mpirun") + 1
        names = [RUN_MARK, SCHEDULER, *["PYTHONPATH"] * side.is_script]
        command[at:at] = [word for name in names for word in ("-x", name)]
    return launches.launch(command, folder, variables)


@functools.cache
def images_per_step(engine: str, workers: int, arguments: tuple[str, ...]) -> int:
    """Images between two optimizer steps, over all workers, as the trainer's flags say."""
    config, *_ = read_flags(engine, workers, list(arguments), talk=False)
    return config.batch_size * config.batches_per_allreduce * workers


def make_turn(
    side: Run, steps: int, round_: int, began: float, ranks: Sequence[Rank], cpu_seconds: float
) -> Turn:
    """Return what a side's ranks have measured in a turn, which took all of them `cpu_seconds`.

    Ranks that train together take the same time from one step's end to another's, but for a few
    milliseconds by which one of them is ahead: their mean counts. What the cores of a machine did
    beside all of the side's processes is others'. CPU time is that of the lead-in as well.
    MeasurementError for a trainer that counts other images than its flags promise.
    """
    by_machine = defaultdict(list)
    for rank in ranks:
        by_machine[rank.machine].append(rank.measured)
    told = [rank.measured for rank in ranks]
    images = sum(one["images"] for one in told)
    if not side.is_script:
        step = images_per_step(side.configuration.engine, side.workers, side.arguments)
        if not math.isclose(images, steps * step):
            raise MeasurementError(
                f"{side.side}: its trainer counted {images} images in {steps} steps of {step}",
                side.side,
            )
    elif not images > 0:
        raise MeasurementError(f"{side.side}: its steps have done {images:g} {told[0]['unit']}")
    phases = [one["phases"] for one in told if one.get("phases") and not side.is_script]
    computing = [one["forward"] + one["backward"] for one in phases]
    loads = [
        (max(m["busy"] for m in of_ranks) - sum(m["cpu_seconds"] for m in of_ranks))
        / max(m["window"] for m in of_ranks)
        for of_ranks in by_machine.values()
    ]
    return Turn(
        side=side.side,
        round=round_,
        seconds=fmean(one["seconds"] for one in told),
        images=images,
        cpu_seconds_per_image=cpu_seconds / images * steps / (LEAD_IN_STEPS + steps),
        other_load=max(0.0, round(max(loads), 3)),
        began=began,
        phases={name: fmean(one[name] for one in phases) for name in phases[0]} if phases else {},
        straggler_ratio=max(computing) / median(computing) if len(computing) > 1 else None,
    )


def wait_for_quiet(seconds: float) -> None:
    """Wait until others leave this machine's cores alone, but no longer than `seconds`; call it
    while all sides are paused."""
    deadline, cores, busy = time.monotonic() + seconds, os.cpu_count() or 1, math.inf
    while busy > quiet_load(cores) and time.monotonic() < deadline:
        busy = psutil.cpu_percent(LISTEN_SECONDS) / 100 * cores
