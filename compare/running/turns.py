"""Blocks of measurement: two or more sides, started afresh, take turns on the same machines.

A machine of which nobody knows who else uses it drifts by tens of percent in minutes; goals are at
half a percent. So the sides of a comparison run at once, but not at the same time: while one does a
turn of half a second, all processes of the others are stopped (SIGSTOP). What a slow minute does
to one side, it does to the others. A turn in which others kept cores busy is taken again, as soon
as it is quiet: two ranks that wait for each other suffer more from a neighbour than two that do
not.

A block starts each side, in an order of its own, lets all warm up, and goes through the turns,
forwards and backwards alternately. Its ratio of two sides is the Hodges-Lehmann estimate over its
rounds. The unit of evidence is the block, since what chance decides once a launch (how pages and
threads are placed) stays for all turns of it: compare/evidence/paired.py makes the estimate and the
interval from the blocks' ratios. sides.py says what is started, stage.py holds the processes,
agent.py is beside each of them, and turn_client.py inside.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from compare.evidence.load import quiet_load
from compare.evidence.run_folder import read_block
from compare.evidence.turns import Block, Turn
from compare.plan.sources import trainers_sha256
from compare.running.launch import busy_cpu_seconds
from compare.running.sides import NoTurns, Side, why_not_by_turns
from compare.running.stage import LIMIT_SECONDS, Stage
from recipe.files import write_json

# That a turn is to take beside its lead-in, where no side says how many steps it makes. Turns of 2
# steps are as noisy as turns of 6 (a ratio of two varies by 9 %; three blocks of each, on two cores
# that others share): the more often sides change, the better they share what disturbs them.
TURN_SECONDS = 0.5
TRIAL_STEPS = 2  # by which that is found
PATIENCE = 2.0  # seconds that a disturbed turn waits for others to leave the cores alone
LISTEN_SECONDS = 0.2  # to learn what others do, while all sides stand still


def say(text: str) -> None:
    """A line of progress, apart from the results."""
    print(text, file=sys.stderr, flush=True)


def in_turn(sides: Sequence[Side], round_: int) -> Sequence[Side]:
    """The order of a round: forwards and backwards alternately."""
    return sides if round_ % 2 == 0 else sides[::-1]


def run_block(
    sides: Sequence[Side],
    rounds: int,
    folder: Path,
    number: int,
    label: str,
    patience: float,
    report: Callable[[str], None] = say,
    timeout: float = LIMIT_SECONDS,
) -> Block:
    """Start the sides in this order, warm them up, and let them take turns.

    A turn that others disturb is taken again, after at most `patience` seconds; at most `rounds`
    turns of each side are, on the average. `timeout`: seconds for the start, and for a turn.

    Raises NoTurns where the sides cannot take turns, MeasurementError where one of them fails.
    """
    if reason := why_not_by_turns():
        raise NoTurns(reason)
    load, began = os.getloadavg()[0], time.monotonic()
    with Stage(folder, sides, timeout) as stage:
        report(f"{label}: starting {', '.join(side.name for side in sides)}")
        stage.start(*sides)
        sides = with_steps(stage, sides)
        taker = Taker(stage, patience, spare=rounds * len(sides))
        turns: list[Turn] = []
        for round_ in range(rounds):
            these = [taker.take(side, round_) for side in in_turn(sides, round_)]
            turns += these
            told = ", ".join(f"{turn.side} {turn.images_per_second:.4g}" for turn in these)
            report(f"{label}, round {round_ + 1} of {rounds}: {told} images/s{taker.told()}")
    block = Block(
        number,
        tuple(side.name for side in sides),
        round(load, 2),
        tuple(turns),
        {side.name: side.steps for side in sides},
        round(taker.disturbed_seconds, 3),
        round(time.monotonic() - began, 3),
        stage.quiet_cores,
    )
    write_json(folder / "block.json", {**origin(sides, rounds), **asdict(block)})
    return block


@dataclass
class Taker:
    """Takes turns, and takes those again that others disturbed."""

    stage: Stage
    patience: float  # seconds that a turn waits for others to be quiet
    spare: int  # turns that may yet be taken again
    disturbed_seconds: float = 0.0
    disturbed: int = 0  # since it was told last

    def take(self, side: Side, round_: int) -> Turn:
        """A side's turn: an undisturbed one, if that comes about."""
        while True:
            began = time.monotonic()
            turn = self.stage.take_turn(side, round_)
            if turn.other_load <= self.stage.quiet_cores:
                return turn
            self.disturbed += 1
            if self.spare:
                wait_for_quiet(self.patience)
            self.disturbed_seconds += time.monotonic() - began
            if not self.spare:
                return turn
            self.spare -= 1

    def told(self) -> str:
        """What to add to a line about these turns."""
        number, self.disturbed = self.disturbed, 0
        again = "taken again" if self.spare else "do not count"
        return f"; {number} turns disturbed by other processes, {again}" if number else ""


def with_steps(stage: Stage, sides: Sequence[Side]) -> Sequence[Side]:
    """The sides, each with the number of steps that makes a turn: by the pace of a trial, which is
    also their first turn with the cores to themselves. All get the same number, or the work would
    not be the same."""
    if all(side.steps for side in sides):
        return sides
    trials = [stage.take_turn(replace(side, steps=TRIAL_STEPS), 0) for side in sides]
    pace = median(turn.seconds for turn in trials) / TRIAL_STEPS
    steps = max(1, round(TURN_SECONDS / pace))
    return [replace(side, steps=side.steps or steps) for side in sides]


def origin(sides: Sequence[Side], rounds: int) -> dict[str, Any]:
    """What a finished block must have in common with one that it is to stand for."""
    commands = [side.shown() for side in sides]
    return {"commands": commands, "rounds": rounds, "sources": trainers_sha256()}


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
    return read_block(path, [side.name for side in sides])


def wait_for_quiet(seconds: float) -> None:
    """Wait until others leave this machine's cores alone, but no longer than `seconds`; call it
    while all sides stand still."""
    deadline, cores = time.monotonic() + seconds, quiet_load(os.cpu_count() or 1)
    while time.monotonic() < deadline:
        began, busy = time.monotonic(), busy_cpu_seconds()
        time.sleep(LISTEN_SECONDS)
        if (busy_cpu_seconds() - busy) / (time.monotonic() - began) <= cores:
            return
