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
blocks' ratios. sides.py says what is started, stage.py holds the processes,
turn_client.py is the side of who is measured.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compare.evidence.turns import QUIET_CORES, Block, Turn
from compare.running.launch import busy_cpu_seconds
from compare.running.sides import Side
from compare.running.stage import Stage
from recipe.files import write_json

MOST_ROUNDS = 2  # times those that were asked for: in place of rounds that were not quiet
LISTEN_SECONDS = 0.2  # to learn what others do, while all sides are stopped


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
