"""The blocks of a row: measured by turns (compare/running/turns.py), and kept in its record."""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from compare.evidence.turns import Block, Turn, estimate, throughput
from compare.plan.blocks import drawn, seconds_left
from compare.running.launch import duration
from compare.running.sides import Side
from compare.running.turns import PATIENCE, finished_block, run_block, say

# Numbers of blocks after which a row's verdict is looked for, unless the user gives a number. Each
# look could be wrong, so each has an interval that is the wider the more there are (Bonferroni).
LOOKS = (4, 8, 16)

REACHED, AT_GOAL, MISSED, OPEN = "reached", "at the goal", "not reached", "not shown"
# An interval that contains its goal decides, too, if it ends no more than this share beyond it, on
# the wrong side: on which side the truth lies could take hours to show, and would change no choice.
NEAR = 0.02

T = TypeVar("T")
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
    blocks_given: bool = False  # by the user, as the turns; if not, a benchmark may take others
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
    rounds = rounds or options.turns
    folder = options.out / "blocks" / case.replace(" ", "-")

    def order(number: int) -> list[Side]:
        return drawn(sides, options.seed, case, number)

    return until_decided(
        options,
        case,
        finished=lambda number: finished_block(order(number), rounds, folder / f"block-{number}"),
        run=lambda number, about: run_block(
            order(number), rounds, folder / f"block-{number}", number, about, options.patience
        ),
        is_decided=lambda blocks: is_decided(blocks, options, judged, value),
    )


def until_decided(
    options: Options,
    case: str,
    finished: Callable[[int], T | None],
    run: Callable[[int, str], T],
    is_decided: Callable[[list[T]], bool],
) -> list[T]:
    """Measure blocks up to the first look at which they give a verdict, or to the last look.

    `finished` returns the block of a number if an interrupted call has left it; else `run`, which
    also gets what to call it, measures it.
    """
    num_blocks = options.looks[0]
    blocks: list[T] = []
    durations: list[tuple[Hashable, float]] = []
    for number in range(1, options.looks[-1] + 1):
        if number > num_blocks:
            if is_decided(blocks):
                break
            num_blocks = next(look for look in options.looks if look >= number)
            say(f"row {case}: not decided, going on to {num_blocks} blocks")
        about = f"row {case}: block {number} of {num_blocks}"
        if (kept := finished(number)) is not None:
            say(f"{about}: is there already")
            blocks.append(kept)
            continue
        began = time.monotonic()
        blocks.append(run(number, about))
        durations.append((case, time.monotonic() - began))
        if left := seconds_left(durations, [case] * (num_blocks - number)):
            say(f"row {case}: about {duration(left)} left")
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
    near = low >= goal * (1 - NEAR) if at_least else high <= goal * (1 + NEAR)
    return AT_GOAL if near else OPEN
