"""The blocks of a row: measured by turns (compare/running/turns.py), and kept in its record."""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from compare.evidence.turns import Block
from compare.plan.blocks import drawn, seconds_left
from compare.running.launch import duration
from compare.running.sides import Side
from compare.running.turns import finished_block, run_block, say


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    out: Path  # the record's folder
    blocks: int
    turns: int  # of each side in a block
    patience: float = 2.0  # seconds to wait for quiet before a disturbed turn is taken again
    quick: bool = False
    gpu: bool = False
    profile: bool = False
    seed: int = 0
    blocks_given: bool = False  # by the user, as the turns; if not, a benchmark may take fewer
    turns_given: bool = False


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
