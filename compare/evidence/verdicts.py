"""Verdicts: which of two configurations is faster, within a case and a number of workers."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from compare.evidence.equality import Fact, compare_facts, compared_text
from compare.evidence.paired import MIN_BLOCKS, Estimate, estimate_ratio
from compare.evidence.records import Comparison, RunRecord
from compare.evidence.words import count, interval_text, label_of, ratio_text


@dataclass(frozen=True)
class LossGap:
    """Where the training losses of two runs are farthest apart."""

    largest: float
    block: int
    step: int
    steps: int


@dataclass(frozen=True)
class Verdict:
    """What is said of two configurations in one case at one number of workers."""

    case: str
    workers: int
    first: str
    second: str
    first_label: str
    second_label: str
    speed: Estimate | None  # first / second, images a second
    cpu: Estimate | None  # first / second, CPU time an image
    differences: tuple[Fact, ...]
    missing_blocks: tuple[int, ...]
    equal_weights: tuple[bool, ...]  # block by block
    loss_gap: LossGap | None
    compared: str  # what the plan has differ between the two, in words
    is_null_test: bool  # both are the same: a difference would be the machine's, or the plan's

    @property
    def place(self) -> str:
        """Say where this was measured, as the beginning of a sentence."""
        workers = count(self.workers, "worker")
        return f"{self.case}, {workers}:" if self.case else f"At {workers}"

    def sentence(self) -> str:
        """Say the verdict in hyperfine's manner, or why there is none."""
        at = self.place
        if self.differences:
            return (
                f"{at} no verdict on {self.first_label} and {self.second_label}: the runs "
                f"differ in more than {self.compared}."
            )
        if self.speed is None:
            return (
                f"{at} no verdict: no block holds a complete run of both "
                f"{self.first_label} and {self.second_label}."
            )
        blocks = count(self.speed.blocks, "block")
        if self.speed.low is None:
            return (
                f"{at} {self.first_label} trained at {ratio_text(self.speed)} times the speed "
                f"of {self.second_label} in {blocks}: too few for an interval, which needs "
                f"{MIN_BLOCKS}, so no difference is shown."
            )
        if self.is_null_test:
            return f"{at} {self.null_text(self.speed)}"
        if not self.speed.shows_difference:
            return (
                f"{at} no difference was shown between {self.first_label} and "
                f"{self.second_label}: speed ratio {ratio_text(self.speed)}, "
                f"{interval_text(self.speed)}, {blocks}."
            )
        faster, slower, speed = self.first_label, self.second_label, self.speed
        if speed.ratio < 1:
            faster, slower, speed = slower, faster, speed.inverse()
        return (
            f"{at} {faster} trained {ratio_text(speed)} times as fast as {slower}, "
            f"{interval_text(speed)}, {blocks}."
        )

    def null_text(self, speed: Estimate) -> str:
        """Say what a configuration's comparison with itself showed, which has an interval."""
        figures = (
            f"speed ratio {ratio_text(speed)}, {interval_text(speed)}, "
            f"{count(speed.blocks, 'block')}"
        )
        if not speed.shows_difference:
            return (
                f"no difference was shown between {self.first_label} and itself, as it should be: "
                f"{figures}."
            )
        percent = 100 * (math.exp(abs(math.log(speed.ratio))) - 1)
        return (
            f"a difference was shown between {self.first_label} and itself: {figures}. This "
            f"machine or this plan is not fit to tell differences of {percent:.2g} % (by chance "
            "alone this comes about in one null test of twenty: run it again)."
        )

    def cpu_sentence(self) -> str:
        """Say which of the two used less CPU time; empty when there is no verdict."""
        if self.differences or self.cpu is None:
            return ""
        if self.cpu.low is None:
            return (
                f"{self.first_label} used {ratio_text(self.cpu)} times the CPU time per image "
                f"of {self.second_label}."
            )
        if not self.cpu.shows_difference:
            return (
                f"No difference in CPU time per image was shown: ratio "
                f"{ratio_text(self.cpu)}, {interval_text(self.cpu)}."
            )
        more, less, cpu = self.first_label, self.second_label, self.cpu
        if cpu.ratio < 1:
            more, less, cpu = less, more, cpu.inverse()
        return (
            f"{more} used {ratio_text(cpu)} times the CPU time per image of {less}, "
            f"{interval_text(cpu)}."
        )

    def training_sentence(self) -> str:
        """Say whether both did the same training, by their final weights and their losses."""
        if not self.equal_weights:
            return ""
        equal, blocks = sum(self.equal_weights), len(self.equal_weights)
        if equal == blocks:
            return f"Final weights bit-equal in {equal} of {count(blocks, 'block')}."
        text = f"Final weights bit-equal in only {equal} of {count(blocks, 'block')}"
        if gap := self.loss_gap:
            return (
                f"{text}; the training losses differ by at most {gap.largest:.2g} "
                f"(step {gap.step} of {gap.steps}, block {gap.block})."
            )
        return f"{text}; they have no training step in common."


def judge(comparison: Comparison) -> list[Verdict]:
    """Return a verdict for each case, number of workers, and pair of configurations."""
    return [
        judge_pair(comparison, case, workers, first, second)
        for case in comparison.cases
        for workers in comparison.workers
        for first, second in comparison.pairs
    ]


def judge_pair(comparison: Comparison, case: str, workers: int, first: str, second: str) -> Verdict:
    """Compare two configurations over the blocks in which both are complete."""
    blocks = sorted({run.block for run in comparison.runs})
    pairs, missing = [], []
    for block in blocks:
        a = comparison.find(block, first, workers, case)
        b = comparison.find(block, second, workers, case)
        if a.is_complete and b.is_complete:
            pairs.append((a, b))
        else:
            missing.append(block)
    facts = compare_facts(comparison, (run for pair in pairs for run in pair))
    differences = tuple(fact for fact in facts if fact.forbids_verdict)
    speed = cpu = gap = None
    if pairs and not differences:
        speed = estimate(pairs, "images_per_second")
        cpu = estimate(pairs, "cpu_seconds_per_image")
    equal = tuple(a.summary.weights_sha256 == b.summary.weights_sha256 for a, b in pairs)
    if not all(equal):
        gap = largest_loss_gap(pair for pair, same in zip(pairs, equal, strict=True) if not same)
    return Verdict(
        case=case,
        workers=workers,
        first=first,
        second=second,
        first_label=label_of(comparison, first),
        second_label=label_of(comparison, second),
        speed=speed,
        cpu=cpu,
        differences=differences,
        missing_blocks=tuple(missing),
        equal_weights=equal,
        loss_gap=gap,
        compared=compared_text(comparison, first, second),
        is_null_test=comparison.plan["null"],
    )


def estimate(pairs: list[tuple[RunRecord, RunRecord]], field: str) -> Estimate:
    first, second = zip(
        *((getattr(a.summary, field), getattr(b.summary, field)) for a, b in pairs), strict=True
    )
    return estimate_ratio(first, second)


def largest_loss_gap(pairs: Iterable[tuple[RunRecord, RunRecord]]) -> LossGap | None:
    """Find where two runs' training losses are farthest apart, over the steps both have."""
    gap = None
    for a, b in pairs:
        losses = {line.step: line.loss for line in b.steps}
        steps = [line for line in a.steps if line.step in losses]
        for line in steps:
            difference = abs(line.loss - losses[line.step])
            # `not <=` so that a loss that became NaN counts as the largest gap, not as none
            if gap is None or not difference <= gap.largest:
                gap = LossGap(difference, a.block, line.step, steps[-1].step)
    return gap
