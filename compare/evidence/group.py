"""A group: the configurations of one case at one number of workers. They share blocks, and are
compared with each other and with no other group."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from compare.evidence.equality import Fact, compare_facts
from compare.evidence.paired import Estimate, Scatter, moderated
from compare.evidence.runs import RunRecord
from compare.evidence.turns import Block, Turn, estimate, throughput, turn_error
from compare.plan.plan import Plan


@dataclass(frozen=True, eq=False)
class Group:
    """All that was measured of one group, and what follows from it. Everything is computed at most
    once: a group does not change, another block makes another one."""

    plan: Plan
    case: str  # "" in a plan without cases
    workers: int  # 0 for a user's own scripts, which do not state them
    confidence: float  # of each interval
    turns: list[Block]  # blocks of turns
    sides: list[RunRecord]  # of these blocks
    runs: list[RunRecord]  # the planned whole runs

    @property
    def place(self) -> tuple[str, int]:
        """The case and the number of workers."""
        return self.case, self.workers

    @cached_property
    def complete(self) -> list[RunRecord]:
        """The complete whole runs."""
        return [run for run in self.runs if run.is_complete]

    def complete_runs(self, configuration: str) -> list[RunRecord]:
        return [run for run in self.complete if run.configuration == configuration]

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks that measure speed, of turns or of whole runs, in the order in which they
        ran."""
        return self.turns if self.plan.measure == "turns" else blocks_of_runs(self.complete)

    def blocks_with(self, configurations: Collection[str]) -> list[Block]:
        """Return the blocks that contain all these configurations."""
        return [block for block in self.blocks if {*configurations} <= {*block.order}]

    @cached_property
    def num_blocks(self) -> int:
        """The number of blocks that contain all configurations."""
        return len(self.blocks_with(self.plan.names))

    @cached_property
    def seconds(self) -> float:
        """The time of its blocks, without the time in which other processes used the cores."""
        return sum(max(0.0, block.seconds - block.disturbed_seconds) for block in self.blocks)

    @property
    def used_seconds(self) -> float:
        """The time that counts for --minutes: of its blocks, and of the whole runs beside turns."""
        beside = self.complete if self.plan.measure == "turns" else []
        return self.seconds + sum(run.seconds for run in beside)

    @cached_property
    def disturbed_seconds(self) -> float:
        """The time in which other processes used the cores."""
        return sum(block.disturbed_seconds for block in self.blocks)

    @property
    def block_seconds(self) -> float:
        """The mean time that a block takes."""
        return self.seconds / max(1, self.num_blocks)

    @property
    def is_as_recorded(self) -> bool:
        """Whether this is training on CPUs, from whose records it is known how well turns predict
        the scatter of blocks, and how much occasions differ. Not on GPUs, where launches made the
        variance 83 to 120 times as large as predicted; not for all-reduces alone (up to 13 times);
        not for scripts that do not show that they ran torch on CPUs."""
        environments = [run.environment for run in (*self.complete, *self.sides)]
        return not any(block.unit == "bytes" for block in self.turns) and all(
            environment.device == "cpu" and environment.torch for environment in environments
        )

    @cached_property
    def ranks_per_gpu(self) -> int | None:
        """The most ranks that shared a GPU, in any of its runs; None if none did."""
        runs = (*self.complete, *self.sides)
        return max((run.environment.ranks_per_gpu or 0 for run in runs), default=0) or None

    @cached_property
    def scatter(self) -> Scatter | None:
        """How much more the blocks scatter than their turns predict: the variance of each side's
        logarithm less the block's mean, summed over sides, over the same as the turns predict it.
        None in whole runs, and where turns predict too little.
        """
        names, blocks = self.plan.names, self.blocks_with(self.plan.names)
        rounds = sum(len(block.quiet_rounds) for block in blocks)
        turn_degrees = rounds - len(blocks)
        if len(blocks) < 2 or len(names) < 2 or not turn_degrees or not self.is_as_recorded:
            return None
        found = predicted = 0.0
        for name in names:
            powers = {other: (other == name) - 1 / len(names) for other in names}
            found += np.var([block.log_contrast(powers, throughput) for block in blocks], ddof=1)
            predicted += turn_error(blocks, powers) ** 2 * len(blocks)
        degrees = (len(names) - 1) * (len(blocks) - 1)
        if not predicted:
            return None
        return Scatter(found / predicted, degrees, turn_degrees, rounds / len(blocks))

    @cached_property
    def estimates(self) -> dict[tuple[str, str], Estimate]:
        """The speed ratio first / second of each judged pair that has a block."""
        found = {pair: self.estimate({pair[0]: 1, pair[1]: -1}) for pair in self.plan.pairs()}
        return {pair: ratio for pair, ratio in found.items() if ratio is not None}

    def estimate(
        self, powers: Mapping[str, float], value: Callable[[Turn], float] = throughput
    ) -> Estimate | None:
        """Estimate the product of the sides' rates, each raised to its power, as `turns.estimate`
        does; None if no block has all these sides, or if ranks shared a GPU: their processes take
        turns on it, so that rates say nothing about engines. Turns predict the error of a ratio of
        throughputs: what they have in common within a block cancels."""
        blocks = self.blocks_with(powers)
        if not blocks or self.ranks_per_gpu:
            return None
        found = estimate(blocks, powers, value, self.confidence)
        is_ratio = sum(powers.values()) == 0
        if value is not throughput or not is_ratio:
            return found
        found = replace(found, turn_error=turn_error(blocks, powers))
        return moderated(found, self.scatter) if self.scatter else found

    @cached_property
    def facts(self) -> list[Fact]:
        """What must be equal among its runs, and whether it is."""
        return compare_facts(self.plan, self.case, self.workers, self.complete, self.sides)

    def facts_between(self, configurations: Collection[str]) -> list[Fact]:
        """Return the facts of these configurations, in the blocks that have all of them."""
        blocks_of = [{run.block for run in self.complete_runs(name)} for name in configurations]
        whole, turns = set.intersection(*blocks_of), {side.block for side in self.sides}
        return [
            fact.between({*configurations}, turns if fact.is_of_sides else whole)
            for fact in self.facts
        ]


def blocks_of_runs(runs: Iterable[RunRecord]) -> list[Block]:
    """Return blocks of whole runs, in which each run is one turn of a single round."""
    turns, seconds = defaultdict[int, list[Turn]](list), defaultdict[int, float](float)
    for run in runs:
        summary = run.summary
        turns[run.block].append(
            Turn(
                run.configuration,
                0,
                summary.train_seconds,
                summary.images_per_second * summary.train_seconds,
                summary.cpu_seconds_per_image,
            )
        )
        seconds[run.block] += run.seconds
    return [
        Block(number, tuple(turn.side for turn in sides), tuple(sides), seconds=seconds[number])
        for number, sides in turns.items()
    ]
