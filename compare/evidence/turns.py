"""Blocks of turns: what each side did in its turns, and the ratios that follow from it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, harmonic_mean
from typing import Any, Literal

import numpy as np

from compare.evidence.paired import CONFIDENCE, Estimate, estimate_logs
from recipe.record.schema import Amount, Count, Positive, Text, Whole

QUIET_CORES = 0.15  # that others may keep busy, on a small machine
MIN_SHARE_OF_ROUNDS = 1 / 3  # that count; if fewer were quiet, the quietest


Purpose = Literal["speed", "disturbed", "ablation", "trial"]


@dataclass(frozen=True)
class Turn:
    """What a side did in one turn. A whole run is one, too: that of its configuration in its
    block."""

    side: Text
    round: Whole  # from 0
    seconds: Positive  # of its steps, the lead-in aside; the mean over ranks
    images: Positive  # in these steps, as its trainer counts them, of all ranks
    cpu_seconds_per_image: Positive
    other_load: Amount = 0.0  # cores that others kept busy meanwhile
    began: Amount | None = None  # seconds since 1970; None: not written down
    # What it is for: a ratio of speeds; nothing, as others disturbed it; the time of a step that
    # exchanges no gradients; the number of steps that fill a turn.
    purpose: Purpose = "speed"
    phases: dict[str, Amount] = field(default_factory=dict)  # seconds of the mean step and rank
    # Of forward and backward without exchange: the slowest rank's seconds over the median rank's.
    straggler_ratio: Amount | None = None

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds


@dataclass(frozen=True)
class Block:
    """The turns of one launch of each side; or whole runs, one of each configuration, as one
    round."""

    number: Count  # from 1
    order: tuple[Text, ...]
    turns: tuple[Turn, ...]  # all that there were, in their order
    steps: dict[str, Count] = field(default_factory=dict)  # of each side, in a turn
    disturbed_seconds: Amount = 0.0  # of turns that others disturbed, and of waiting for quiet
    seconds: Amount = 0.0  # that all of it took, starts and ends included; 0: not written down
    quiet_cores: Amount = QUIET_CORES  # that others may keep busy in a round that counts
    commands: tuple[Text, ...] = ()  # of the sides, in their order
    # Of sides, digest after the last round; of a user's own scripts after their first steps.
    weights: dict[str, Text] = field(default_factory=dict)
    unit: Text = "images"  # what `images` of turns are: what a user's own scripts count
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # what these scripts ran on

    @property
    def measuring_seconds(self) -> float:
        """What it took, without the time in which others used the cores."""
        return max(0.0, self.seconds - self.disturbed_seconds)

    @cached_property
    def quiet_rounds(self) -> dict[int, float]:
        """The rounds that count, and the cores that others kept busy in the most disturbed turn of
        each: those in which others were quiet, or the quietest third."""
        load: dict[int, float] = {}
        for turn in self.of("speed"):
            load[turn.round] = max(load.get(turn.round, 0.0), turn.other_load)
        quiet = sum(value <= self.quiet_cores for value in load.values())
        counted = max(quiet, math.ceil(MIN_SHARE_OF_ROUNDS * len(load)))
        return dict(sorted(load.items(), key=lambda item: item[1])[:counted])

    @property
    def other_load(self) -> float:
        """Cores that others kept busy in the most disturbed turn that counts."""
        return max(self.quiet_rounds.values())

    def of(self, purpose: str) -> list[Turn]:
        """The turns for this purpose."""
        return [turn for turn in self.turns if turn.purpose == purpose]

    def counted(self, side: str) -> list[Turn]:
        """One side's turns in the rounds that count, by round."""
        turns = [t for t in self.of("speed") if t.side == side and t.round in self.quiet_rounds]
        return sorted(turns, key=lambda turn: turn.round)

    def phases(self, side: str) -> dict[str, float]:
        """Where the time of one side's mean step goes, in seconds, in the rounds that count; with
        the exposed communication where turns without exchange show it. Its step is that of `rate`.
        Empty where it was not measured."""
        own = self.counted(side)
        if not all(turn.phases for turn in own):
            return {}
        seconds = {name: fmean(turn.phases[name] for turn in own) for name in own[0].phases}
        step = fmean(turn.seconds for turn in own) / self.steps[side]
        seconds["other"] = step - math.fsum(seconds.values())
        ablated = [
            turn.phases["backward"]
            for turn in self.of("ablation")
            if turn.side == side and turn.other_load <= self.quiet_cores
        ]
        if ablated:
            seconds["exposed_communication"] = seconds["backward"] - fmean(ablated)
            seconds["backward"] = fmean(ablated)
        return {f"{name}_seconds": value for name, value in {**seconds, "step": step}.items()}

    def rate(self, side: str, value: Callable[[Turn], float]) -> float:
        """One side's rate over all rounds that count, such as all images over all seconds: the
        harmonic mean, weighted by images where turns have unequal numbers of them."""
        turns = self.counted(side)
        amounts = [turn.images for turn in turns]
        weights = amounts if max(amounts) > 1.001 * min(amounts) else None
        return harmonic_mean([value(turn) for turn in turns], weights)

    def log_contrast(self, powers: Mapping[str, int], value: Callable[[Turn], float]) -> float:
        """The logarithm of the product of the sides' rates, each to its power: {"a": 1, "b": -1} is
        the ratio a / b."""
        return math.fsum(power * math.log(self.rate(side, value)) for side, power in powers.items())


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
    powers: Mapping[str, int],
    value: Callable[[Turn], float] = throughput,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """The product of the sides' rates, each to its power, over the blocks that have them all:
    {"a": 1, "b": -1} is the ratio a / b, {"a": 1} the rate of a as a ratio to 1."""
    whole = (block for block in blocks if powers.keys() <= {*block.order})
    return estimate_logs([block.log_contrast(powers, value) for block in whole], confidence)


def turn_error(blocks: Sequence[Block], powers: Mapping[str, int]) -> float:
    """The standard error of such a product of throughputs, on logarithms, by the scatter of the
    turns within the blocks: what launches add is not in it. 0 for whole runs."""
    scatter = [
        sum(
            power
            * block.rate(side, throughput)
            / np.array([turn.images_per_second for turn in block.counted(side)])
            for side, power in powers.items()
        )
        for block in blocks
        if powers.keys() <= {*block.order}
    ]
    return math.hypot(
        *(np.std(one) / math.sqrt(max(1, np.size(one) - 1)) for one in scatter)
    ) / len(scatter)
