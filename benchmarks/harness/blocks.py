"""Blocks of measurement: two or more sides, started afresh, take turns on one machine.

A machine of which nobody knows who else uses it drifts by tens of percent in minutes; goals are at
half a percent. So the sides of a comparison run at once, but not at the same time: while one does a
turn of a second or two, all processes of the others are stopped (SIGSTOP). What a slow minute does
to one side, it does to the others. Turns begin in a quiet moment, if one comes in time, and rounds
in which others kept cores busy all the same do not count, as long as enough are left: two ranks
that wait for each other suffer more from a neighbour than two that do not.

A block starts each side, in random order, lets all warm up, and goes through the turns, forwards
and backwards alternately. Its ratio of two sides is the median over its rounds. The unit of
evidence is the block, since what chance decides once a launch (how pages and threads are placed)
stays for all turns of it: compare/evidence/paired.py makes the estimate and the interval from the
blocks' ratios. sides.py says what is started, stage.py holds the processes.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.harness.sides import Side
from benchmarks.harness.stage import Stage, Turn
from compare.evidence.paired import Estimate, estimate_ratio
from compare.plan.blocks import drawn, seconds_left
from compare.running.launch import busy_cpu_seconds, duration
from recipe.files import write_json

QUIET_CORES = 0.15  # that others may keep busy in a round that counts
MIN_SHARE_OF_ROUNDS = 1 / 3  # that count; if fewer were quiet, the quietest
MOST_ROUNDS = 2  # times those that were asked for: in place of rounds that were not quiet
LISTEN_SECONDS = 0.2  # to learn what others do, while all sides are stopped


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
