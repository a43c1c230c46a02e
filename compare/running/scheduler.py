"""The scheduler of turns: two or more sides, freshly started, take turns on the same machines.

Shared machines drift by tens of percent within minutes, and the goal is half a percent. So all
sides of a comparison are up at once, but only one runs: while it makes a turn of some steps, all
processes of the other sides are paused (SIGSTOP). A slow minute then affects all sides alike. A
turn in which other processes kept cores busy is repeated once the machine is quiet: two ranks that
wait for each other suffer more from such load than two that do not.

A block starts each side, in the block's own order, warms all of them up, and goes through the
turns, forwards and backwards alternately. Every few rounds there is a round of turns without the
exchange of gradients, which shows what the exchange costs. All turns are recorded, including those
that did not count, with each trainer's own counts. A block's ratio of two sides is the ratio of
their total throughputs: all images over all seconds. The unit of evidence is the block, because
whatever chance decides at a launch (how pages and threads are placed) holds for all its turns.
compare/evidence/paired.py makes the estimate and the interval from the blocks' ratios.
compare/for_scripts/comparison_side.py is the part beside and inside each rank.
"""

import contextlib
import math
import os
import secrets
import signal
import socket
import struct
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from compare.evidence.reading import read_object
from compare.evidence.record import BlockLine, SideLine
from compare.evidence.runs import NO_SETTINGS
from compare.evidence.stopping import BlockCost
from compare.evidence.turns import Block, Purpose, Turn, quiet_load
from compare.for_scripts import comparison_side
from compare.for_scripts.comparison_side import (
    LEAD_IN_STEPS,
    SCHEDULER,
    UNREACHABLE,
    UNREADABLE,
    VERSION,
    VERSIONED,
    State,
    receive,
    send,
)
from compare.plan.blocks import RUN_MARK
from compare.plan.environment import ROOT, path_from_here, shell_line
from compare.plan.launchers import START_COMMANDS, has_daemons, pass_on
from compare.plan.plan import SIDE_RUN, Plan, Run
from compare.running.checks import visible_gpus
from compare.running.launch import (
    Launches,
    clear_folder,
    duration,
    failed_folder,
    forking,
    print_line,
    print_live,
    shown_tail,
)
from compare.running.ranks import Rank, StartedSide
from compare.running.take_turns import WITHOUT_TIMEOUTS
from recipe.errors import UserError
from recipe.files import replace_file
from recipe.world import place_variables, read_world

TAKE_TURNS = "compare/running/take_turns.py"
SIDE_FILE = Path(comparison_side.__file__)  # alone in its folder, which scripts get on PYTHONPATH
END_SECONDS = 10.0
HELLO_SECONDS = 5  # for a new connection to identify itself
NO_ROOM = (
    " (the sides do not fit into the GPU's memory together: give --measure runs, which starts one "
    "after the other)"
)
IMPORT = " (write `from comparison_side import Side`, which needs nothing installed)"
# Texts in the output of a failed side, and the hint for the user. The first match counts.
HINTS_BY_OUTPUT = {
    UNREACHABLE: " (that host does not reach this one)",
    "busy or unavailable": " (the GPU's compute mode admits only one process: give --measure runs, "
    "which starts one side after the other)",
    "out of memory": NO_ROOM,  # torch; also CUDA's own text, in messages of NCCL and Horovod
    "STATUS_ALLOC_FAILED": NO_ROOM,  # cuBLAS, cuDNN
    "DEVICE_ALLOCATION_FAILED": NO_ROOM,  # cuDNN 9
    "STATUS_NOT_INITIALIZED": NO_ROOM,  # cuBLAS, cuDNN: no memory for a handle
    "Failed to CUDA": NO_ROOM,  # NCCL: malloc, calloc, calloc async, host alloc
    "unhandled cuda error": NO_ROOM,  # all that Horovod learns from NCCL
    "bytes on device": NO_ROOM,  # DALI
    "No module named 'comparison_side'": " (something in it replaces the PYTHONPATH that run.py "
    f"sets: add {SIDE_FILE.parent} there, or copy {SIDE_FILE.name} into the script's folder)",
    "No module named 'compare'": IMPORT,
    "'compare' is not a package": IMPORT,
}
# The target length of a turn without its lead-in, where the plan does not fix its steps: the more
# often sides change, the more evenly disturbances hit them. On a slow machine a turn takes longer:
# its lead-in, which does not count, is at most a quarter of it.
TURN_SECONDS = 0.5
MIN_STEPS = 3 * LEAD_IN_STEPS
TRIAL_STEPS = 2  # of the trial turns, from which the steps of a turn are found
PATIENCE = 2.0  # seconds to wait after a disturbed turn for other processes to go idle
ABLATION_EVERY = 3  # rounds: after each of so many, a round without the exchange of gradients
LISTEN_SECONDS = 0.2  # of measuring the load of other processes, while all sides are paused
SILENT_SECONDS = 60.0  # for which nothing came of a side that is waited for: then a line says so
HOPELESS_SECONDS = 300.0  # the same, if waiting seems not to help: some ranks may compile for long


class MeasurementError(UserError):
    """The sides could not be measured; shown without a traceback."""


def run_blocks(
    cases: Sequence[Sequence[Run]],
    plan: Plan,
    folder: Path,
    report: Callable[[str], None],
    choose_rounds: Callable[[BlockCost, str, int], int],
) -> list[BlockLine]:
    """Start the sides and warm them up; let them take turns at one case after the other, and return
    what the record is to hold of each. `cases`: the sides of each case in its order. The first
    case's order is that of the starts. `choose_rounds` returns the number of rounds, from what the
    block costs by its start and its trial turns, its case, and its number of workers.

    A turn that other processes disturb is repeated, after at most PATIENCE seconds of waiting for
    quiet. In all there are at most as many repetitions as regular turns. The seconds of starts and
    ends are shared by the cases.

    Raises MeasurementError if a side fails.
    """
    began, first = time.monotonic(), cases[0]
    with Scheduler(folder, plan, first) as scheduler:
        report(f"starting {', '.join(side.side for side in first)}")
        scheduler.start(*first)
        unit, of_scripts = scheduler.unit(), scheduler.facts()
        of_start = (time.monotonic() - began) / len(cases)
        measured = [scheduler.measure(sides, of_start, choose_rounds, report) for sides in cases]
    shared = (time.monotonic() - began - sum(block.seconds for block in measured)) / len(cases)
    return [
        BlockLine(
            case=sides[0].case,
            workers=sides[0].workers,
            block=replace(
                block,
                seconds=round(block.seconds + shared, 3),
                start_seconds=round(block.start_seconds + shared, 3),
                unit=unit,
            ),
            sides={side.side: side_line(side, folder, of_scripts) for side in sides},
        )
        for sides, block in zip(cases, measured, strict=True)
    ]


def side_line(side: Run, folder: Path, of_scripts: dict[str, dict[str, Any]]) -> SideLine:
    """Return what the record is to hold of a side: of a trainer, what it wrote into its folder; of
    a user's own script, which writes none, the environment that it reported."""
    command = shell_line(side.command(Path("runs/by-hand"), "run"))
    if side.is_script:
        environment = of_scripts[side.side]
        return SideLine(command=command, settings=NO_SETTINGS, environment=environment)
    place = folder / side.side / SIDE_RUN
    return SideLine(
        command=command,
        settings=read_object(place / "config.json"),
        environment=read_object(place / "environment.json"),
    )


class Scheduler(Launches):
    """Starts the sides of a block and decides which one runs. Used as a context, it leaves no
    process behind, whatever ends it. If a side fails, the folder is put aside, with all output.

    `sides` are the sides that will be started; they need only be given if one of them has processes
    on other hosts. The plan gives the time-out for the start and for each turn.
    """

    def __init__(self, folder: Path, plan: Plan, sides: Sequence[Run] = ()) -> None:
        super().__init__()
        self.folder, self.plan = folder, plan
        self.steps = dict[str, int]()  # of a turn, by side
        self.paces = dict[str, float]()  # seconds of a step, by side, in the trial turns
        self.aside, self.key = failed_folder(folder), secrets.token_bytes(32)
        self.listener, self.address = listen(sides)
        self.sides = dict[str, StartedSide]()  # by name
        self.on_turn = ""  # the name of the side whose turn it is; "" while sides start

    def __enter__(self) -> "Scheduler":
        clear_folder(self.folder)
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        for rank in self.ranks:
            send(rank.connection, State.ENDED)
        self.wait(END_SECONDS)  # launchers clean up when they see their ranks end
        super().__exit__()
        self.listener.close()
        if isinstance(exception[1], MeasurementError):
            replace_file(self.folder / "output.log", f"{exception[1]}\n")
            self.folder.rename(self.aside)

    @property
    def ranks(self) -> list[Rank]:
        """All ranks that have connected."""
        return [rank for side in self.sides.values() for rank in side.ranks]

    @property
    def quiet_cores(self) -> float:
        """The largest load by other processes, in cores, of a turn that counts: that of the
        smallest machine."""
        return quiet_load(min(rank.cores for rank in self.ranks))

    def start(self, *sides: Run) -> None:
        """Start these sides and let them make their first steps. Each is paused after its warm-up,
        which leaves the cores to the others.

        A side is started as soon as all ranks of the previous one have connected. If all started at
        once, ranks that wait for each other would poll and slow the other sides' start. On a
        machine with GPUs, a side is started when the previous one is paused: in the warm-up cuDNN
        times its kernels to find the fastest, and on a GPU in use it would choose by chance.
        """
        started, on_gpus = list[StartedSide](), visible_gpus() > 0
        while len(started) < len(sides) or not all(side.are(State.PAUSED) for side in started):
            are_there = all(
                side.are(State.PAUSED) if on_gpus else len(side.ranks) == side.num_ranks
                for side in started
            )
            if are_there and len(started) < len(sides):
                started.append(self.launch_side(sides[len(started)]))
                deadline = time.monotonic() + self.plan.timeout
            self.receive(started, deadline)
            for side in started:
                if side.are(State.READY):
                    side.send(State.PAUSED)

    def launch_side(self, run: Run) -> StartedSide:
        """Start a side's command, and return the side, of which no rank has connected yet."""
        who = f"{self.address} {self.key.hex()} {run.side} {self.plan.warm_up_steps}"
        launcher = start_side(run, self.folder / run.side / SIDE_RUN.parent, self, who)
        self.sides[run.side] = StartedSide(run, launcher)
        return self.sides[run.side]

    def measure(
        self,
        sides: Sequence[Run],
        of_start: float,
        choose_rounds: Callable[[BlockCost, str, int], int],
        report: Callable[[str], None],
    ) -> Block:
        """Let sides make trial turns and then take turns, and return all of it. `of_start`: their
        part of the seconds of the start. The block's own seconds begin with the trial turns."""
        began, first = time.monotonic(), sides[0]
        trials = self.find_steps(sides)
        of_trials = time.monotonic() - began
        cost = BlockCost(of_start + of_trials, self.round_seconds(sides))
        rounds = choose_rounds(cost, first.case, first.workers)
        turns, disturbed = self.take_rounds(sides, rounds, report)
        return Block(
            first.block,
            tuple(side.side for side in sides),
            (*trials, *turns),
            steps={side.side: self.steps_of(side) for side in sides},
            disturbed_seconds=round(disturbed, 3),
            seconds=time.monotonic() - began,
            start_seconds=of_trials,
            quiet_cores=self.quiet_cores,
            weights=self.weights(),
        )

    def find_steps(self, sides: Sequence[Run]) -> list[Turn]:
        """Set the steps of a turn: the plan's, or as many as last TURN_SECONDS at the pace of the
        trial turns, but at least MIN_STEPS.

        A trial is also a side's first turn with the cores to itself. All sides get the same number
        of steps, or they would not do the same work. Not so where cases share a launch: a step of
        one side may take a hundred times as long as another's. Return the trial turns."""
        self.steps = dict.fromkeys((side.side for side in sides), TRIAL_STEPS)
        trials = [self.take_turn(side, 0, "trial") for side in sides]
        self.paces = paces = {side.side: self.pace(side) for side in sides}
        if not self.plan.shares_launch:
            paces = dict.fromkeys(paces, median(paces.values()))
        self.steps = {
            name: self.plan.steps or max(MIN_STEPS, round(TURN_SECONDS / pace))
            for name, pace in paces.items()
        }
        return trials

    def steps_of(self, side: Run) -> int:
        """Return the steps of each of a side's turns."""
        return self.steps.get(side.side, self.plan.steps or TRIAL_STEPS)

    def pace(self, side: Run) -> float:
        """Return the seconds from one step's end to the next, in a side's last turn."""
        ranks = self.sides[side.side].ranks
        seconds = fmean(rank.measured["wall_seconds"] for rank in ranks)
        return seconds / self.steps_of(side)

    def round_seconds(self, sides: Sequence[Run]) -> float:
        """Return about how long a round takes, with its share of the turns without exchange, from
        the pace of the trial turns."""
        return sum(
            self.paces[side.side]
            * (LEAD_IN_STEPS + self.steps_of(side))
            * (1 + self.is_ablated(side) / ABLATION_EVERY)
            for side in sides
        )

    def is_ablated(self, side: Run) -> bool:
        """Return whether a side takes turns without the exchange of gradients, too."""
        return side.ablates and not self.plan.no_phases

    def take_rounds(
        self, sides: Sequence[Run], rounds: int, report: Callable[[str], None]
    ) -> tuple[list[Turn], float]:
        """Let sides take turns, forwards and backwards alternately. Return the turns, and the
        seconds spent on disturbed turns and on waiting for quiet."""
        turns, disturbed_seconds, of_round = list[Turn](), 0.0, self.round_seconds(sides)
        spare = most = rounds * len(sides)
        for round_ in range(rounds):
            place = f"{sides[0].case}, " if self.plan.shares_launch else ""
            left = duration((rounds - round_) * of_round)
            report(
                f"{place}round {round_ + 1} of {rounds}, {most - spare} turns taken again, "
                f"about {left} more of this block"
            )
            order = sides if round_ % 2 == 0 else sides[::-1]
            for side in order:
                # Of scripts that of the warm-up counts: their turns may differ in steps.
                digest = round_ == rounds - 1 and not side.is_script
                taken, seconds = self.take_until_quiet(side, round_, spare, digest)
                turns += taken
                spare -= len(taken) - 1
                disturbed_seconds += seconds
            if round_ % ABLATION_EVERY == ABLATION_EVERY - 1:
                turns += [
                    self.take_turn(side, round_, "ablation", exchange=False)
                    for side in order
                    if self.is_ablated(side)
                ]
        return turns, disturbed_seconds

    def take_until_quiet(
        self, side: Run, round_: int, spare: int, digest: bool
    ) -> tuple[list[Turn], float]:
        """Let a side take a turn; where other processes disturb it, again, at most `spare` times.
        Return all these turns, and the seconds spent on disturbed ones and on waiting for quiet."""
        turns, disturbed_seconds = list[Turn](), 0.0
        while True:
            began = time.monotonic()
            turn = self.take_turn(side, round_, digest=digest)
            if turn.other_load <= self.quiet_cores:
                return [*turns, turn], disturbed_seconds
            if len(turns) == spare:
                return [*turns, turn], disturbed_seconds + time.monotonic() - began
            turns.append(replace(turn, purpose="disturbed"))
            wait_for_quiet(PATIENCE)
            disturbed_seconds += time.monotonic() - began

    def take_turn(self, side: Run, round_: int, purpose: Purpose = "speed", **how: bool) -> Turn:
        """Let one side run for a turn's steps, and return the turn. `how` may set `exchange` of
        gradients (default: True) and `digest` of the weights at the end (default: False)."""
        self.on_turn, began = side.side, time.time()
        started, steps = self.sides[side.side], self.steps_of(side)
        ask = {"steps": steps, "case": side.case, "exchange": True, "digest": False}
        self.request(started, State.RUNNING, State.READY, **ask | how)
        cpu_seconds = sum(rank.measured["cpu_seconds"] for rank in started.ranks)
        self.request(started, State.PAUSED, State.PAUSED)
        turn = make_turn(side, steps, round_, round(began, 2), started.ranks, cpu_seconds)
        return replace(turn, purpose=purpose)

    def request(self, side: StartedSide, wanted: State, until: State, **values: Any) -> None:
        """Tell all ranks of a side to take a state; return when all are in state `until`."""
        deadline = time.monotonic() + self.plan.timeout
        side.send(wanted, **values)
        while not side.are(until):
            self.receive([side], deadline)

    def weights(self) -> dict[str, str]:
        """Return the digest of each side's weights, where its ranks reported one. MeasurementError
        if the ranks of a side have different ones: then their gradients were not averaged."""
        by_side = {
            name: {rank.measured["weights"] for rank in side.ranks if "weights" in rank.measured}
            for name, side in self.sides.items()
        }
        for name, digests in by_side.items():
            if len(digests) > 1:
                raise MeasurementError(
                    f"{name}: its ranks ended with {len(digests)} different weights, so it does "
                    "not average gradients over all ranks, and does less work than it should"
                )
        return {name: digests.pop() for name, digests in by_side.items() if digests}

    def unit(self) -> str:
        """Return the unit that all sides count; MeasurementError if they count different ones."""
        units = {
            name: rank.measured.get("unit", "images")
            for name, side in self.sides.items()
            for rank in side.ranks
        }
        if len({*units.values()}) > 1:
            counts = ", ".join(f"{side} {unit}" for side, unit in units.items())
            raise MeasurementError(
                f"the sides count different things: {counts}; call step() with the same unit in all"
            )
        return next(iter(units.values()))

    def facts(self) -> dict[str, Any]:
        """Return each script's environment. MeasurementError if a script runs another work tree's
        code."""
        scripts = {name: side for name, side in self.sides.items() if side.run.is_script}
        by_side = {name: side.facts() for name, side in scripts.items()}
        for side in scripts.values():
            check_imports(side.run, by_side)
        return {
            name: {field: value for field, value in facts.items() if field != "imports"}
            for name, facts in by_side.items()
        }

    def receive(self, awaited: Sequence[StartedSide], deadline: float) -> None:
        """Receive messages of the ranks for up to half a second. MeasurementError if a side has
        ended, or if one of those that are waited for will not be ready until the deadline."""
        for side in self.sides.values():
            if side.launcher.poll() is not None:
                raise self.failure(side)
        self.check_silent(awaited, deadline)
        by_connection: dict[Any, tuple[StartedSide, Rank]] = {
            rank.connection: (side, rank) for side in self.sides.values() for rank in side.ranks
        }
        for ready in wait([self.listener, *by_connection], timeout=0.5):
            if ready is self.listener:
                self.accept()
                continue
            side, rank = by_connection[ready]
            state, values = receive(rank.connection)
            if state is State.READY and not is_measured(values):
                state, values = State.ENDED, {"problem": UNREADABLE}
            if state is State.ENDED:
                who, name = f"rank {rank.number} on {rank.host}", side.run.side
                with contextlib.suppress(subprocess.TimeoutExpired):  # the launcher may write more
                    side.launcher.wait(END_SECONDS)
                if problem := values.get("problem"):
                    text = f"{name}: {who}: {problem}{self.hint(name)}"
                    raise MeasurementError(f"{text}:\n{self.tail(name)}")
                raise self.failure(side, f"{who} ended, but its launcher did not")
            rank.state, rank.measured = state, rank.measured | values
            side.hear()
            if state is State.WARMING_UP:
                rank.steps = 1
            elif state is State.READY:
                rank.steps = rank.steps_asked

    def check_silent(self, awaited: Sequence[StartedSide], deadline: float) -> None:
        """Say for how long sides have been silent, and what their ranks have not done.
        MeasurementError if waiting cannot help, or if the deadline is over."""
        now, live, guilty = time.monotonic(), list[str](), list[str]()
        for side in awaited:
            name, silent, is_over = side.run.side, now - side.heard, now > deadline
            if silent <= SILENT_SECONDS and not is_over:
                continue
            lag = side.lag
            if lag is None:
                continue
            if is_over or (lag.is_hopeless and silent > HOPELESS_SECONDS):
                limit = f"{self.plan.timeout} s (--timeout)" if is_over else duration(silent)
                guilty.append(f"{name}: after {limit} {lag.text}; {lag.remedy}:\n{self.tail(name)}")
            else:
                live.append(f"waiting for {name} ({duration(silent)}): {lag.text}")
                if not side.is_told:  # logs, too, show that it waits, and for what
                    print_line(live[-1])
                side.is_told = True
        if guilty:
            raise MeasurementError("\n".join(guilty))
        if live:
            print_live(live)

    def accept(self) -> None:
        """Accept the connection of a rank's agent, which must prove that it knows the key."""
        accepted, _ = self.listener.accept()
        limit = struct.pack("ll", HELLO_SECONDS, 0)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(accepted.detach())
        # TypeError, LookupError: its first message lacks something, or is of no side.
        with contextlib.suppress(OSError, EOFError, AuthenticationError, TypeError, LookupError):
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            state, values = receive(connection)
            if state is State.STARTING:
                rank = rank_of(connection, steps_asked=self.plan.warm_up_steps, **values)
                side = self.sides[values["side"]]
                side.ranks.append(rank)
                side.hear()
                if len(side.ranks) > side.num_ranks:
                    raise MeasurementError(
                        f"{side.run.side}: {len(side.ranks)} of its processes take part, but its "
                        f"launcher's variables say {side.num_ranks}; if the script starts its own "
                        "ranks, give their number, as in Side(ranks=2)"
                    )

    def failure(self, side: StartedSide, what: str = "") -> MeasurementError:
        """Return the error for a side that has ended, with the end of its output."""
        name, code = side.run.side, side.launcher.returncode
        what = f"{name}: {what}" if code is None else ended_text(name, code)
        when = "" if self.on_turn in ("", name) else " while it was paused"
        hint = self.hint(name) or (side.ended_early() if code == 0 else "")
        return MeasurementError(f"{what}{when}{hint}:\n{self.tail(name)}")

    def hint(self, side: str) -> str:
        """Return what a text in a failed side's output means for the user; "" if none is known."""
        # All of the output: the launcher may have written much after the error.
        output = (self.folder / side / SIDE_RUN.parent / "output.log").read_text(errors="replace")
        return next((hint for sign, hint in HINTS_BY_OUTPUT.items() if sign in output), "")

    def tail(self, side: str) -> str:
        """Return the end of a side's output, and the path of all of it."""
        place = side / SIDE_RUN.parent
        return shown_tail(self.folder / place, kept=self.aside / place)


def is_measured(values: Mapping[str, Any]) -> bool:
    """Return whether a message has all measurements of a turn."""
    times = ("seconds", "wall_seconds", "cpu_seconds", "busy", "window", "images")
    facts = values.get("facts", {})
    return (
        all(isinstance(values.get(name), int | float) for name in times)
        and isinstance(values.get("unit"), str)
        and isinstance(facts, dict)
    )


def ended_text(side: str, code: int) -> str:
    if code < 0:
        return f"{side} was ended by signal {-code} ({signal.strsignal(-code)})"
    return f"{side} ended with exit code {code}"


def rank_of(
    connection: Connection,
    side: str,
    version: int = 1,  # which did not say it
    file: str = "",
    place: Mapping[str, str] | None = None,
    ranks: int | None = None,
    **values: Any,
) -> Rank:
    """Return the rank that has sent its identity: its launcher's variables, and the number of ranks
    if the script gives it. MeasurementError if the rank speaks another version of the protocol."""
    if version != VERSION:
        theirs, remedy = file, f"copy {SIDE_FILE} over it"
        if version == 1:
            theirs = "the checkout of this project that it imports"
            remedy = (
                f"let a script import comparison_side; for a trainer of that checkout copy "
                f"{SIDE_FILE.parent} into its compare/, and {ROOT / TAKE_TURNS} into its "
                "compare/running/"
            )
        raise MeasurementError(
            f"{side}: {theirs} has version {version} of the protocol of turns, but this run.py "
            f"has {VERSION}: {remedy}"
        )
    world = read_world(place or {})
    return Rank(
        number=world.rank,
        size=ranks or world.size,
        launcher=world.launcher,
        connection=connection,
        **values,
    )


def check_imports(side: Run, by_side: dict[str, Any]) -> None:
    """Raise MeasurementError if a script imports packages from another work tree than its own, and
    nothing says that it should, as where `pip install -e` was run there: two commits would both run
    that one's code. `by_side`: all sides' facts."""
    imports = by_side[side.side]["imports"]
    # Both sides would run such a work tree's code, also if one PYTHONPATH for both says so.
    roots_of_sides = {facts["imports"]["root"] for facts in by_side.values()}
    wrong = [
        stranger
        for stranger in imports["strangers"]
        if not is_compared(stranger, side.side, by_side)
        and (stranger["root"] in roots_of_sides or not is_asked_for(stranger, side, imports))
    ]
    if wrong:
        names, there = ", ".join(one["package"] for one in wrong), wrong[0]["folder"]
        needed = wrong[0]["own_folder"]
        if side.configuration.commit:  # one command serves all commits
            needed = os.path.relpath(needed, os.path.realpath(side.configuration.place))
        raise MeasurementError(
            f"{side.side} imports {names} from {there}, another work tree than its script's, so it "
            f"does not run its own code: set PYTHONPATH={needed} for it, or give it an environment "
            "of its own"
        )


def is_compared(stranger: dict[str, Any], name: str, by_side: dict[str, Any]) -> bool:
    """Return whether another side runs the same script without this package of another work tree:
    then it is the packages that are compared."""
    own = by_side[name]
    return any(
        facts["script"] == own["script"]
        and facts["imports"]["root"] == own["imports"]["root"]
        and stranger["folder"] not in {one["folder"] for one in facts["imports"]["strangers"]}
        for facts in by_side.values()
    )


def is_asked_for(stranger: dict[str, Any], side: Run, imports: dict[str, Any]) -> bool:
    """Return whether a side's own PYTHONPATH, not only the shell's, leads to a package."""
    words = (*side.configuration.assignments, *side.configuration.command)
    is_given = any(word.startswith("PYTHONPATH=") for word in words)
    is_changed = imports["PYTHONPATH"] != with_side_file(os.environ.get("PYTHONPATH", ""))
    return stranger["is_on_path"] and (is_given or is_changed)


def listen(sides: Sequence[Run]) -> tuple[socket.socket, str]:
    """Return the socket to which agents connect, and its address as `ADDRESS,ADDRESS:PORT`. It is
    open to this host only if all sides run here. UserError if other hosts cannot reach this one:
    nothing was started then that could have failed.

    Both ends prove that they know the key, which the ranks get in their environment. (horovodrun
    over Gloo writes the environment into a command line. Somebody who reads the key there can spoil
    the block, but no more: nothing that is received is executed.)
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
            raise UserError(
                f"{where} has no IPv4 address that other hosts can reach; name another "
                "--network-interface"
            )
        bound = here[0] if interface else ""
    listener = socket.create_server((bound, 0), backlog=4096)
    return listener, f"{','.join(here)}:{listener.getsockname()[1]}"


def is_over_hosts(side: Run) -> bool:
    """Return whether some of the side's ranks are, or may be, on other hosts."""
    elsewhere = side.hosts is not None if side.is_script else side.leaves_this_host
    return elsewhere or has_daemons(side.configuration)


def start_side(side: Run, folder: Path, launches: Launches, who: str) -> subprocess.Popen[bytes]:
    """Start a side's command, with its output in `folder`. The folder is emptied first, so that
    nothing of an earlier call remains. `who` is the value of the ranks' variable SCHEDULER."""
    clear_folder(folder)
    forked, variables = forking(side, "" if side.is_script else launches.mark, default="exec")
    through = [*forked, path_from_here(TAKE_TURNS)]
    command = side.command(folder.resolve(), SIDE_RUN.name, through)
    variables |= {SCHEDULER: who, VERSIONED: f"{VERSION} {','.join(place_variables())}"}
    for launcher in START_COMMANDS.values():
        variables |= launcher.sharing
    if side.is_script:
        variables |= {"PYTHONPATH": with_side_file(os.environ.get("PYTHONPATH", ""))}
        variables |= WITHOUT_TIMEOUTS
        command = reaching_side_file(command)
    if is_over_hosts(side):
        of_side = side.configuration.variables if side.is_script else ()
        command = pass_on(command, [RUN_MARK, *variables, *of_side])
    return launches.launch(command, folder, variables)


def reaching_side_file(command: list[str]) -> list[str]:
    """Return the command of a user's own script with the folder of what scripts import added to the
    side's own PYTHONPATH, in words of env, or of mpirun's -x."""
    own = "PYTHONPATH="
    return [
        own + with_side_file(word.removeprefix(own)) if word.startswith(own) else word
        for word in command
    ]


def with_side_file(path: str) -> str:
    """Return a value of PYTHONPATH with the folder of what scripts import added at its end."""
    return os.pathsep.join(filter(None, [path, str(SIDE_FILE.parent)]))


def make_turn(
    side: Run, steps: int, round_: int, began: float, ranks: Sequence[Rank], cpu_seconds: float
) -> Turn:
    """Return a turn from the measurements of the side's ranks; `cpu_seconds` is their CPU time.

    Ranks that train together take the same time from one step's end to the next, except for a few
    milliseconds by which one is ahead, so their mean counts. CPU time includes the lead-in.
    MeasurementError as `check_work` has it.
    """
    measured = [rank.measured for rank in ranks]
    images = sum(values["images"] for values in measured)
    check_work(side, steps, images, measured[0].get("unit", "images"))
    phases = [] if side.is_script else [m["phases"] for m in measured if m.get("phases")]
    computing = [seconds["forward"] + seconds["backward"] for seconds in phases]
    return Turn(
        side=side.side,
        round=round_,
        seconds=fmean(values["seconds"] for values in measured),
        images=images,
        cpu_seconds_per_image=cpu_seconds / images * steps / (LEAD_IN_STEPS + steps),
        other_load=load_by_others(ranks),
        began=began,
        phases={name: fmean(seconds[name] for seconds in phases) for name in (phases or [{}])[0]},
        straggler_ratio=max(computing) / median(computing) if len(computing) > 1 else None,
        memory_bytes=of_all(measured, "memory_bytes", sum),
        gpu_memory_bytes=of_all(measured, "gpu_memory_bytes", sum),
        page_faults=of_all(measured, "page_faults", fmean),
    )


def check_work(side: Run, steps: int, images: float, unit: str) -> None:
    """Raise MeasurementError if a trainer counted another number of images in a turn than its flags
    imply, or a script no work."""
    if side.is_script:
        if not images > 0:
            raise MeasurementError(f"{side.side}: its steps did {images:g} {unit}")
        return
    step = side.config.batch_size * side.config.batches_per_allreduce * side.workers
    if not math.isclose(images, steps * step):
        raise MeasurementError(
            f"{side.side}: its trainer counted {images} images in {steps} steps of {step}"
        )


def load_by_others(ranks: Sequence[Rank]) -> float:
    """Return how many cores other processes kept busy in a turn, on the busiest machine."""
    by_machine = defaultdict[str, list[dict[str, Any]]](list)
    for rank in ranks:
        by_machine[rank.machine].append(rank.measured)
    loads = [
        (max(m["busy"] for m in of_ranks) - sum(m["cpu_seconds"] for m in of_ranks))
        / max(m["window"] for m in of_ranks)
        for of_ranks in by_machine.values()
    ]
    return max(0.0, round(max(loads), 3))


def of_all(
    measured: Sequence[Mapping[str, Any]], name: str, together: Callable[[list[Any]], Any]
) -> Any:
    """Return what the ranks measured, taken `together`; None unless all of them measured it."""
    values = [of_rank.get(name) for of_rank in measured]
    return None if None in values else together(values)


def wait_for_quiet(seconds: float) -> None:
    """Wait until other processes leave this machine's cores idle, but at most `seconds`. All sides
    must be paused."""
    deadline, cores, busy = time.monotonic() + seconds, os.cpu_count() or 1, math.inf
    while busy > quiet_load(cores) and time.monotonic() < deadline:
        busy = psutil.cpu_percent(LISTEN_SECONDS) / 100 * cores
