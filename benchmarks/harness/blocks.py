"""The blocks of a row: measured by turns (compare/running/turns.py), and kept in its record."""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from compare.evidence.turns import Block, Turn, estimate, throughput
from compare.plan.blocks import drawn, seconds_left
from compare.running.launch import duration
from compare.running.sides import Side
from compare.running.turns import PATIENCE, finished_block, run_block, say

# Numbers of blocks after which a row's verdict is looked for, unless the user gives a number. Each
# look could be wrong, so each has an interval that is the wider the more there are (Bonferroni).
LOOKS = (4, 8, 16)

REACHED, AT_GOAL, MISSED, OPEN = "reached", "at the goal", "not reached", "not shown"
# An interval that contains its goal decides too if it lies within this share of it: what is nearer
# to its goal could be told from it only by many hours of measuring, and nobody would choose by it.
NEAR = 0.02

Judged = tuple[str, str, float]  # a ratio's first and second side, and its goal


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    out: Path  # the record's folder
    blocks: int
    turns: int  # of each side in a block
    patience: float = PATIENCE  # seconds to wait for quiet before a disturbed turn comes again
    quick: bool = False
    gpu: bool = False
    profile: bool = False
    seed: int = 0
    blocks_given: bool = False  # by the user, as the turns; if not, a benchmark may take fewer
    turns_given: bool = False

    @property
    def looks(self) -> tuple[int, ...]:
        """The numbers of blocks after which it is asked whether they are enough."""
        return (self.blocks,) if self.blocks_given or self.quick else LOOKS

    @property
    def confidence(self) -> float:
        """Of the interval at each look: all of them hold in 95 of 100 measurements."""
        return 1 - 0.05 / len(self.looks)


def run_blocks(
    sides: Sequence[Side],
    options: Options,
    case: str,
    judged: Sequence[Judged] = (),
    value: Callable[[Turn], float] = throughput,
    rounds: int | None = None,
) -> list[Block]:
    """Measure the blocks that the options ask for, or as many as it takes until each ratio that is
    judged is known to reach its goal, to miss it or to be near it; write each below the record's
    folder.

    `case` is the row's number, with a name behind it if the row has several: "5 DDP".
    """
    num_blocks, rounds = options.looks[0], rounds or options.turns
    folder = options.out / "blocks" / case.replace(" ", "-")
    blocks: list[Block] = []
    durations: list[tuple[Hashable, float]] = []
    for number in range(1, options.looks[-1] + 1):
        if number > num_blocks:
            if is_decided(blocks, options, judged, value):
                break
            num_blocks = next(look for look in options.looks if look >= number)
            say(f"row {case}: not decided, going on to {num_blocks} blocks")
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


def is_decided(
    blocks: Sequence[Block],
    options: Options,
    judged: Sequence[Judged],
    value: Callable[[Turn], float],
) -> bool:
    """Whether each interval gives a verdict."""
    for first, second, goal in judged:
        found = estimate(blocks, first, second, value, options.confidence)
        if verdict_of(found.low, found.high, goal) == OPEN:
            return False
    return True


def verdict_of(low: float | None, high: float | None, goal: float, at_least: bool = True) -> str:
    """What an interval says of a goal, which is a lower bound, or an upper one."""
    if low is None or high is None:
        return OPEN
    if low >= goal if at_least else high <= goal:
        return REACHED
    if high < goal if at_least else low > goal:
        return MISSED
    return AT_GOAL if goal * (1 - NEAR) <= low and high <= goal * (1 + NEAR) else OPEN


def say_left(case: str, durations: Sequence[tuple[Hashable, float]], blocks: int) -> None:
    """Say how long the blocks will take that are left."""
    if left := seconds_left(durations, [case] * blocks):
        say(f"row {case}: about {duration(left)} left")
