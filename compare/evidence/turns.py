"""Blocks of turns: what each side did in its turns, and the ratios computed from them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, harmonic_mean
from typing import Literal

import numpy as np

from compare.evidence.paired import CONFIDENCE, Estimate, estimate_logs
from recipe.record.schema import Amount, Count, Positive, Text, Whole

QUIET_CORES = 0.15  # cores that other processes may keep busy on a small, quiet machine
MIN_SHARE_OF_ROUNDS = 1 / 3  # so many rounds count at least: if fewer were quiet, the quietest


Purpose = Literal["speed", "disturbed", "ablation", "trial"]


@dataclass(frozen=True)
class Turn:
    """What a side did in one turn. A whole run counts as one turn of its configuration."""

    side: Text
    round: Whole  # from 0
    seconds: Positive  # of its steps without the lead-in, as the mean over ranks
    images: Positive  # in these steps, over all ranks, as the trainer counts them
    cpu_seconds_per_image: Positive
    other_load: Amount = 0.0  # cores that other processes kept busy during the turn
    began: Amount | None = None  # seconds since 1970; None: not recorded
    # "speed": for speed ratios; "disturbed": not used, because other processes disturbed it;
    # "ablation": times steps without gradient exchange; "trial": finds how many steps fill a turn.
    purpose: Purpose = "speed"
    phases: dict[str, Amount] = field(default_factory=dict)  # seconds, means over steps and ranks
    # The slowest rank's time for forward and backward without exchange / the median rank's.
    straggler_ratio: Amount | None = None
    # At the turn's end, of all ranks with their child processes; None: not recorded, or no GPU.
    memory_bytes: Whole | None = None  # resident, without files and memory mapped to be shared
    gpu_memory_bytes: Whole | None = None  # allocated by torch
    # Without reading a file, as for newly allocated memory; during the turn with its lead-in, the
    # mean over ranks without their child processes. None: not recorded.
    page_faults: Amount | None = None

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds


@dataclass(frozen=True)
class Block:
    """The turns of one launch of each side; or one whole run of each configuration, as a single
    round."""

    number: Count  # from 1
    order: tuple[Text, ...]  # of the sides
    turns: tuple[Turn, ...]  # all of them, in the order in which they ran
    steps: dict[str, Count] = field(default_factory=dict)  # steps in a turn, by side
    disturbed_seconds: Amount = 0.0  # disturbed turns, and waiting until the machine is quiet
    seconds: Amount = 0.0  # of the whole block, starts and ends included; 0: not recorded
    start_seconds: Amount = 0.0  # of start, trial turns and end; 0: not recorded
    quiet_cores: Amount = QUIET_CORES  # most that others may keep busy in a round that counts
    # Digests by side after the last round; for a user's own scripts, after their first steps.
    weights: dict[str, Text] = field(default_factory=dict)
    unit: Text = "images"  # what `images` of turns counts; a user's own scripts may name another

    @cached_property
    def quiet_rounds(self) -> dict[int, float]:
        """The rounds that count: the quiet ones, or the quietest third if fewer were quiet. The
        values are the cores that others kept busy in the most disturbed turn of the round."""
        load: dict[int, float] = {}
        for turn in self.of("speed"):
            load[turn.round] = max(load.get(turn.round, 0.0), turn.other_load)
        quiet = sum(value <= self.quiet_cores for value in load.values())
        counted = max(quiet, math.ceil(MIN_SHARE_OF_ROUNDS * len(load)))
        return dict(sorted(load.items(), key=lambda item: item[1])[:counted])

    @cached_property
    def num_rounds(self) -> int:
        return len({turn.round for turn in self.of("speed")})

    @property
    def other_load(self) -> float:
        """Cores that other processes kept busy in the most disturbed turn that counts."""
        return max(self.quiet_rounds.values())

    def of(self, purpose: str) -> list[Turn]:
        """Return the turns for a purpose."""
        return [turn for turn in self.turns if turn.purpose == purpose]

    def counted(self, side: str) -> list[Turn]:
        """Return one side's turns in the rounds that count, in the order of rounds."""
        turns = [t for t in self.of("speed") if t.side == side and t.round in self.quiet_rounds]
        return sorted(turns, key=lambda turn: turn.round)

    @cached_property
    def counted_seconds(self) -> float:
        """The seconds of the turns that count."""
        return math.fsum(turn.seconds for side in self.order for turn in self.counted(side))

    def phases(self, side: str) -> dict[str, float]:
        """Return the seconds of one side's mean step by phase, over the rounds that count. Exposed
        communication is included if turns without exchange were measured. The step time is the one
        behind `rate`. Empty if phases were not measured."""
        turns = self.counted(side)
        if not all(turn.phases for turn in turns):
            return {}
        seconds = {name: fmean(turn.phases[name] for turn in turns) for name in turns[0].phases}
        step = fmean(turn.seconds for turn in turns) / self.steps[side]
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
        """Return one side's rate over all rounds that count, such as all images / all seconds: the
        harmonic mean over turns, weighted by images if turns have unequal numbers of them."""
        turns = self.counted(side)
        amounts = [turn.images for turn in turns]
        weights = amounts if max(amounts) > 1.001 * min(amounts) else None
        return harmonic_mean([value(turn) for turn in turns], weights)

    def log_contrast(self, powers: Mapping[str, float], value: Callable[[Turn], float]) -> float:
        """Return the logarithm of the product of the sides' rates, each raised to its power:
        {"a": 1, "b": -1} gives the ratio a / b."""
        return math.fsum(power * math.log(self.rate(side, value)) for side, power in powers.items())


def quiet_load(cores: int) -> float:
    """Return how many cores other processes may keep busy on a quiet machine. A large machine is
    never quite idle. A higher load is also worth a warning before a measurement."""
    return max(QUIET_CORES, 0.05 * cores)


def throughput(turn: Turn) -> float:
    """Return the images per second of wall time."""
    return turn.images_per_second


def work_per_cpu_second(turn: Turn) -> float:
    """Return the images per second of CPU time."""
    return 1 / turn.cpu_seconds_per_image


def estimate(
    blocks: Sequence[Block],
    powers: Mapping[str, float],
    value: Callable[[Turn], float] = throughput,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """Estimate the product of the sides' rates, each raised to its power, over blocks that have all
    these sides: {"a": 1, "b": -1} gives the ratio a / b, {"a": 1} the rate of a."""
    return estimate_logs([block.log_contrast(powers, value) for block in blocks], confidence)


def turn_error(blocks: Sequence[Block], powers: Mapping[str, float]) -> float:
    """Return the standard error of the logarithm of such a product of throughputs, predicted from
    the scatter of the turns within blocks. It lacks what launches add. 0 for whole runs."""
    scatter = [
        sum(
            power
            * block.rate(side, throughput)
            / np.array([turn.images_per_second for turn in block.counted(side)])
            for side, power in powers.items()
        )
        for block in blocks
    ]
    return math.hypot(
        *(np.std(turns) / math.sqrt(max(1, np.size(turns) - 1)) for turns in scatter)
    ) / len(scatter)
