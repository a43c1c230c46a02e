"""Blocks of turns: what each side did in its turns, and the ratios that follow from it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import mean, median

import numpy as np

from compare.evidence.paired import (
    CONFIDENCE,
    MIN_BLOCKS,
    Estimate,
    estimate_logs,
    hodges_lehmann,
)
from recipe.record.schema import Amount, Count, Positive, Text, Whole

QUIET_CORES = 0.15  # that others may keep busy, on a small machine
MIN_SHARE_OF_ROUNDS = 1 / 3  # that count; if fewer were quiet, the quietest


@dataclass(frozen=True)
class Turn:
    """What a side did in one turn. A whole run is one, too: that of its configuration in its
    block."""

    side: Text
    round: Whole  # from 0
    seconds: Positive  # of its steps, the lead-in aside; the mean over ranks, of the slowest copy
    images_per_second: Positive  # of all copies together
    cpu_seconds_per_image: Positive
    other_load: Amount = 0.0  # cores that others kept busy meanwhile
    began: Amount | None = None  # seconds since 1970; None: not written down


@dataclass(frozen=True)
class Block:
    """The turns of one launch of each side; or whole runs, one of each configuration, as one
    round."""

    number: Count  # from 1
    order: tuple[Text, ...]
    load_before: Amount  # the system's one-minute average
    turns: tuple[Turn, ...]
    steps: dict[str, int] = field(default_factory=dict)  # of each side, in a turn
    # Wall time of turns that others disturbed, and of waiting for quiet. Such turns are not here,
    # unless others were never quiet for long.
    disturbed_seconds: Amount = 0.0
    seconds: Amount = 0.0  # that all of it took, starts and ends included; 0: not written down
    quiet_cores: Amount = QUIET_CORES  # that others may keep busy in a round that counts

    @property
    def measuring_seconds(self) -> float:
        """What it took, without the time in which others used the cores."""
        return max(0.0, self.seconds - self.disturbed_seconds)

    @property
    def quiet_rounds(self) -> dict[int, float]:
        """The rounds that count, and the cores that others kept busy in the most disturbed turn of
        each: those in which others were quiet, or the quietest third."""
        load: dict[int, float] = {}
        for turn in self.turns:
            load[turn.round] = max(load.get(turn.round, 0.0), turn.other_load)
        quiet = sum(value <= self.quiet_cores for value in load.values())
        counted = max(quiet, math.ceil(MIN_SHARE_OF_ROUNDS * len(load)))
        return dict(sorted(load.items(), key=lambda item: item[1])[:counted])

    @property
    def other_load(self) -> float:
        """Cores that others kept busy in the most disturbed turn that counts."""
        return max(self.quiet_rounds.values())

    def log_contrast(self, powers: Mapping[str, int], value: Callable[[Turn], float]) -> float:
        """The logarithm of the product of the sides' values, each to its power, over the rounds
        that count: {"a": 1, "b": -1} is the ratio a / b."""
        rounds = dict.fromkeys(self.quiet_rounds, 0.0)
        for turn in self.turns:
            if turn.round in rounds and turn.side in powers:
                rounds[turn.round] += powers[turn.side] * math.log(value(turn))
        return hodges_lehmann(list(rounds.values()))

    def median(self, side: str, value: Callable[[Turn], float]) -> float:
        """The median over the rounds that count of one side's value."""
        rounds = self.quiet_rounds
        return median(
            value(turn) for turn in self.turns if turn.side == side and turn.round in rounds
        )


def quiet_load(cores: int) -> float:
    """Return the load by others, in cores, up to which a machine is quiet: a large one always does
    something. It is also what is worth a warning before a measurement."""
    return max(QUIET_CORES, 0.05 * cores)


def throughput(turn: Turn) -> float:
    """Images per second of wall time."""
    return turn.images_per_second


def work_per_cpu_second(turn: Turn) -> float:
    """Images per second of CPU time."""
    return 1 / turn.cpu_seconds_per_image


def estimate(
    blocks: Sequence[Block],
    first: str,
    second: str,
    value: Callable[[Turn], float] = throughput,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """The ratio first / second over all blocks."""
    return estimate_contrast(blocks, {first: 1, second: -1}, value, confidence)


def estimate_contrast(
    blocks: Sequence[Block],
    powers: Mapping[str, int],
    value: Callable[[Turn], float] = throughput,
    confidence: float = CONFIDENCE,
    is_pooled: bool = True,
) -> Estimate:
    """The product of the sides' values, each to its power, over the blocks that have them all;
    `is_pooled`: a part of the variance is that of all pairs of sides."""
    logs = [
        block.log_contrast(powers, value) for block in blocks if powers.keys() <= {*block.order}
    ]
    sides = sorted({side for block in blocks for side in block.order})
    pooled = pooled_variance(blocks, sides, value) if is_pooled else None
    if pooled is not None:  # of a difference of two sides, each of which counts once
        pooled *= sum(power**2 for power in powers.values()) / 2
    return estimate_logs(logs, pooled, len(sides), confidence)


def pooled_variance(
    blocks: Sequence[Block], sides: Sequence[str], value: Callable[[Turn], float]
) -> float | None:
    """The variance over blocks of the logarithm of two sides' ratio, in the mean of all pairs of
    sides; None where a pair has too few blocks.

    With all sides in all blocks it is twice the residual variance of block plus side.
    """
    found = []
    for first, second in combinations(sides, 2):
        both = [block for block in blocks if {first, second} <= {*block.order}]
        if len(both) < MIN_BLOCKS:
            return None
        logs = [block.log_contrast({first: 1, second: -1}, value) for block in both]
        found.append(float(np.var(logs, ddof=1)))
    return mean(found) if found else None


def estimate_value(
    blocks: Sequence[Block], side: str, value: Callable[[Turn], float] = throughput
) -> Estimate:
    """One side's own value over all blocks, as a ratio to 1."""
    return estimate_logs([math.log(block.median(side, value)) for block in blocks])
