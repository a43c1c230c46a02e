"""Blocks of turns: what each side did in its turns, and the ratios that follow from it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

from compare.evidence.paired import Estimate, estimate_ratio

QUIET_CORES = 0.15  # that others may keep busy in a round that counts
MIN_SHARE_OF_ROUNDS = 1 / 3  # that count; if fewer were quiet, the quietest


@dataclass(frozen=True)
class Turn:
    """What a side did in one turn."""

    side: str
    round: int  # from 0
    seconds: float  # of the slowest rank
    images_per_second: float  # of all copies together
    cpu_seconds_per_image: float
    other_load: float = 0.0  # cores that others kept busy meanwhile
    began: float | None = None  # seconds since 1970; None: not written down


@dataclass(frozen=True)
class Block:
    """The turns of one launch of each side."""

    number: int  # from 1
    order: tuple[str, ...]
    load_before: float  # the system's one-minute average
    turns: tuple[Turn, ...]
    steps: dict[str, int] = field(default_factory=dict)  # of each side, in a turn
    # Wall time of turns that others disturbed, and of waiting for quiet. Such turns are not here,
    # unless others were never quiet for long.
    disturbed_seconds: float = 0.0

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
