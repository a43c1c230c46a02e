"""Accuracy over seeds: how accurate whole trainings became, how soon they reached an accuracy, and
how far two configurations differ in both.

Each block of whole runs has a seed of its own, with which all its configurations train. They are
compared within each block, paired by seed, also if their trainings differ (fp16 on the wire against
fp32). Pairs are right however much two trainings of one seed have in common. Were they independent,
pairs would only cost degrees of freedom: n - 1 in place of 2 n - 2. Two independent samples would
be too wide where seeds have something in common, and too narrow where the opposite is true.
docs/statistics.md reports the simulations; tests/test_compare_accuracy.py repeats them.

Where both sides of a pair computed the same weights, bit by bit, their accuracies are equal in each
seed, and nothing is to be tested. Only their times differ.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev
from typing import NamedTuple

from scipy.special import chdtri, nctdtr, ndtri

from compare.evidence.group import Group
from compare.evidence.judgement import UNDECIDED, Finding, Obstacle, Tested, decided, find
from compare.evidence.paired import (
    CONFIDENCE,
    Estimate,
    PointDifference,
    estimate_logs,
    point_difference,
    student_quantile,
    with_error,
)
from compare.evidence.record import Record
from compare.evidence.rows import Row, cell_fields, cells_of
from compare.evidence.runs import RunRecord
from compare.evidence.verdicts import FailedRun, NotReached, OnPair, Verdict, equal_weights
from compare.plan.blocks import MIN_BLOCKS

SIZES = (0.5, 0.2, 0.1)  # differences of top-1, in points, for which the seeds needed are told
IDENTICAL, UNEQUAL = "identical", ("higher", "lower")  # decisions
POWER = 0.8  # probability with which so many seeds show such a difference


# ------------------------------------------------------------------------------ the cells, by seed


def has_seeds(record: Record) -> bool:
    """Return whether a comparison repeats whole trainings with several seeds. A null test asks
    something else."""
    return record.plan.run_blocks > 1 and not record.plan.null


def target_of(group: Group, configurations: Collection[str]) -> float | None:
    """Return the top-1 whose time is compared of these configurations, percent: the plan's, or that
    at which the same --desired-acc ended all their trainings; None if there is none."""
    if group.plan.target_top1 is not None:
        return group.plan.target_top1
    desired = {run.desired_acc for run in group.complete if run.configuration in configurations}
    return desired.pop() if len(desired) == 1 else None


def ended_at(group: Group, configurations: Collection[str]) -> tuple[float, ...]:
    """Return each --desired-acc with which these configurations trained, percent."""
    runs = (run for run in group.complete if run.configuration in configurations)
    return tuple(sorted({run.desired_acc for run in runs if run.desired_acc is not None}))


def not_reached(group: Group) -> list[NotReached]:
    """Return a group's complete trainings that never reached the accuracy whose time is
    compared."""
    return [
        NotReached(
            *group.place,
            run.block,
            run.config.seed,
            run.configuration,
            target,
            max(line.top1 for line in run.evaluations),
            run.epochs_at(run.evaluations[-1]),
            run.evaluations[-1].train_seconds_so_far,
        )
        for run in group.complete
        for target in [target_of(group, [run.configuration])]
        if target is not None and run.has_accuracy and run.first_to_reach(target) is None
    ]


def accuracy_rows(record: Record) -> list[Row]:
    """Return how accurate the trainings of each cell became over their seeds:

    top1: of the last evaluation, percent: median, lowest and highest; deviation: its standard
    deviation, points, None of one seed; target, percent; reached: the seeds that reached it;
    epochs_to_target, seconds_to_target: median, lowest and highest over all seeds, where a training
    that did not reach it counts as infinite (None without a target); seeds.
    """
    rows = []
    for group, name in cells_of(record) if has_seeds(record) else ():
        runs = [run for run in group.complete_runs(name) if run.has_accuracy]
        if not runs:
            continue
        target, top1 = target_of(group, [name]), [run.evaluations[-1].top1 for run in runs]
        to_target = [to_reach(run, target) for run in runs] if target is not None else []
        rows.append(
            {
                **cell_fields(group, name),
                "top1": median_and_range(top1),
                "deviation": stdev(top1) if len(top1) > 1 else None,
                "target": target,
                "reached": sum(math.isfinite(found.seconds) for found in to_target),
                "epochs_to_target": median_and_range([found.epochs for found in to_target]),
                "seconds_to_target": median_and_range([found.seconds for found in to_target]),
                "seeds": len(runs),
                "are_disturbed": any(run.is_disturbed for run in runs),
            }
        )
    return rows


class ToReach(NamedTuple):
    """What a training needed to reach an accuracy; infinite if it did not."""

    epochs: float
    seconds: float  # on the training clock, evaluations included
    resolution: float = 0.0  # the time since the evaluation before / `seconds`


def to_reach(run: RunRecord, top1: float) -> ToReach:
    """Return what a training needed until an evaluation first showed this top-1, percent. One that
    failed never showed it."""
    line = run.first_to_reach(top1)
    if line is None:
        return ToReach(math.inf, math.inf)
    seconds = line.train_seconds_so_far
    before = [other.train_seconds_so_far for other in run.evaluations if other.step < line.step]
    return ToReach(run.epochs_at(line), seconds, 1 - max(before, default=0.0) / seconds)


def median_and_range(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the median, the lowest and the highest of some values; None of none."""
    return (median(values), min(values), max(values)) if values else None


# ---------------------------------------------------------------------------- the time to accuracy


def pairs_of(
    group: Group, pair: tuple[str, str], with_failures: bool = False
) -> list[tuple[RunRecord, RunRecord]]:
    """Return the planned trainings of two configurations that both completed, seed by seed; or
    those that both ended, also by a failure, if any training of the group has an accuracy."""
    with_failures = with_failures and any(run.has_accuracy for run in group.complete)
    first, second = (
        {
            run.block: run
            for run in group.runs
            if run.configuration == name
            if run.has_accuracy or (with_failures and run.has_failed)
        }
        for name in pair
    )
    return [(first[block], second[block]) for block in sorted(first.keys() & second.keys())]


def failed_runs(group: Group, pair: tuple[str, str]) -> tuple[FailedRun, ...]:
    """Return the planned trainings of two configurations that failed."""
    return tuple(
        FailedRun(run.seed, run.configuration)
        for run in group.runs
        if run.configuration in pair and run.has_failed
    )


def find_trained(record: Record, group: Group, pair: tuple[str, str]) -> Finding:
    """Return what may be judged of the whole trainings of two configurations: nothing before all
    that are planned have ended, also where turns measure speed."""
    first, second = pair
    finding = find(record, group, {first: 1, second: -1})
    have_ended = all(
        run.is_complete or run.has_failed for run in group.runs if run.configuration in pair
    )
    return replace(finding, is_finished=finding.is_finished and have_ended, speed=None)


def is_bit_equal(group: Group, pair: tuple[str, str]) -> bool:
    """Return whether two configurations ended with bit-equal weights and one accuracy in each
    seed."""
    equal = equal_weights(group, pair)
    accuracies = [{run.evaluations[-1].top1 for run in both} for both in pairs_of(group, pair)]
    return bool(equal) and all(equal) and all(len(both) == 1 for both in accuracies)


def judge_times(record: Record, labels: Mapping[str, str]) -> list[Verdict]:
    """Return a verdict on the times to the accuracy for each group that has one, and each pair of
    configurations."""
    return decided(
        [
            judge_time(record, group, pair, target, labels)
            for group in (record.groups if has_seeds(record) else ())
            for pair in record.plan.pairs()
            for target in [target_of(group, pair)]
            if target is not None
        ]
    )


def judge_time(
    record: Record,
    group: Group,
    pair: tuple[str, str],
    target: float,
    labels: Mapping[str, str],
) -> Verdict:
    """Compare the times that two configurations needed to reach an accuracy."""
    first, second = pair
    finding = find_trained(record, group, pair)
    speed = None
    if not (finding.differences or finding.ranks_per_gpu):
        found = [
            (to_reach(of_first, target), to_reach(of_second, target))
            for of_first, of_second in pairs_of(group, pair, with_failures=True)
        ]
        speed = time_ratio(
            [(a.seconds, b.seconds) for a, b in found],
            None if is_bit_equal(group, pair) else resolution_of(found),
            record.confidence,
        )
    return Verdict(
        **vars(replace(finding, speed=speed)),
        first=first,
        second=second,
        first_label=labels[first],
        second_label=labels[second],
        margin=record.plan.margin_of(pair),
        target_top1=target,
        unreached=tuple(one for one in not_reached(group) if one.configuration in pair),
        failed=failed_runs(group, pair),
    )


def resolution_of(found: Sequence[tuple[ToReach, ToReach]]) -> float:
    """Return the time between two evaluations as a share of the time to the accuracy: the mean over
    seeds, of the side where it is larger."""
    sides = list(zip(*found, strict=True))
    return max((fmean(one.resolution for one in of_side) for of_side in sides), default=0.0)


def time_ratio(
    seconds: Sequence[tuple[float, float]],
    resolution: float | None,
    confidence: float = CONFIDENCE,
) -> Estimate | None:
    """Return how many times as fast the first one reached an accuracy: time of the second / time of
    the first, from both times of each seed. None if they do not tell it.

    `resolution`: the time between two evaluations / the time to the accuracy; None if both are the
    same training bit by bit, which reach it in the same evaluation with each seed. Else times have
    steps of that size, and few seeds may agree by chance. So the standard error is at least the one
    of seeds of which half need one evaluation more. (docs/statistics.md reports the simulation.)

    A training that did not reach it has no time, only a lower bound: here it is infinite. Where
    both are the same training, it is missing on both sides whatever their speeds, and the other
    seeds tell the ratio. Where they differ, or one side alone failed, there is no ratio at all: the
    other seeds are those that learnt well on both sides, and dropping the rest would favour the
    side that fails.
    """
    reached = [both for both in seconds if all(map(math.isfinite, both))]
    one_sided = any(math.isfinite(first) != math.isfinite(second) for first, second in seconds)
    if not reached or one_sided or (resolution is not None and len(reached) < len(seconds)):
        return None
    found = estimate_logs([math.log(second / first) for first, second in reached], confidence)
    least = (resolution or 0.0) / 2 / math.sqrt(len(reached))
    if found.low is None or found.error >= least:
        return found
    return with_error(found, least, found.degrees)


# ------------------------------------------------------------------------------ the final accuracy


class SeedsNeeded(NamedTuple):
    """How many seeds show a difference of top-1: by the standard deviation as it was measured, and
    by the ends of its interval."""

    points: float
    seeds: int
    fewest: int
    most: int


@dataclass(frozen=True)
class Power:
    """How far the difference of two trainings with one seed varies, and what follows from it."""

    deviation: float  # points
    low: float  # ends of its interval
    high: float
    needed: tuple[SeedsNeeded, ...]


@dataclass(frozen=True, kw_only=True)
class AccuracyVerdict(OnPair):
    """The verdict on the final top-1 of two configurations; the margin is in points, `speed` is not
    used. Its decision is "identical", "equal", "higher", "lower" or "undecided"."""

    seeds: int  # that both completed
    ended_at: tuple[float, ...]  # each --desired-acc, percent
    is_bit_equal: bool
    points: PointDifference | None
    power: Power | None

    @property
    def is_exact(self) -> bool:
        """Whether both are the same training with each seed, bit by bit: then the difference is
        exactly 0, and there is nothing to test."""
        return self.is_bit_equal and not self.differences and not self.failed

    @property
    def estimate(self) -> Tested | None:
        return self.points

    @property
    def own_obstacle(self) -> Obstacle | None:
        if self.failed:
            return Obstacle.FAILED
        return Obstacle.ENDED_EARLY if self.ended_at and not self.is_bit_equal else None

    @property
    def obstacle(self) -> Obstacle | None:
        return None if self.is_exact and self.seeds else super().obstacle

    @property
    def tested(self) -> Tested | None:
        return None if self.is_exact else super().tested

    def decision_by(self, is_different: bool, is_near: bool) -> str:
        if self.is_exact:
            return IDENTICAL
        if is_near:
            return "equal"
        if is_different:
            return "higher" if self.points and self.points.mean > 0 else "lower"
        return UNDECIDED


def judge_accuracies(record: Record, labels: Mapping[str, str]) -> list[AccuracyVerdict]:
    """Return a verdict on the final top-1 for each group and pair of configurations whose trainings
    were repeated with several seeds."""
    return decided(
        [
            judge_accuracy(record, group, pair, labels)
            for group in (record.groups if has_seeds(record) else ())
            for pair in record.plan.pairs()
            if pairs_of(group, pair, with_failures=True)
        ]
    )


def judge_accuracy(
    record: Record, group: Group, pair: tuple[str, str], labels: Mapping[str, str]
) -> AccuracyVerdict:
    """Compare the final accuracies of two configurations over the seeds that both completed."""
    first, second = pair
    # Sharing a GPU changes no accuracy.
    finding = replace(find_trained(record, group, pair), ranks_per_gpu=None)
    ends = [[run.evaluations[-1] for run in both] for both in pairs_of(group, pair)]
    ended, is_equal = ended_at(group, pair), is_bit_equal(group, pair)
    failed = failed_runs(group, pair)
    points = found_power = None
    if ends and not finding.differences and not failed:
        image = 100 / max(1, ends[0][0].num_images)
        points = point_difference([a.top1 - b.top1 for a, b in ends], image, record.confidence)
        deviation = points.deviation
        if is_equal and len(ends) > 1:
            # Another training, with other weights, would have as much scatter of its own.
            of_seeds = max(stdev([a.top1 for a, _ in ends]), image / math.sqrt(len(ends)))
            deviation = math.sqrt(2) * of_seeds
        if len(ends) >= MIN_BLOCKS and not ended:
            found_power = power_of(deviation, points.degrees)
    return AccuracyVerdict(
        **vars(finding),
        first=first,
        second=second,
        first_label=labels[first],
        second_label=labels[second],
        margin=record.plan.top1_margin,
        seeds=len(ends),
        ended_at=ended,
        is_bit_equal=is_equal,
        failed=failed,
        points=points if is_equal or not ended else None,
        power=found_power,
    )


# --------------------------------------------------------------------------------- how many seeds


def power_of(deviation: float, degrees: int) -> Power:
    """Return how many seeds show differences of SIZES if a seed's difference varies by this
    standard deviation, > 0 points, which was estimated with so many degrees of freedom."""
    low, high = deviation_interval(deviation, degrees)
    needed = tuple(
        SeedsNeeded(size, *(seeds_to_show(size, one) for one in (deviation, low, high)))
        for size in SIZES
    )
    return Power(deviation, low, high, needed)


def deviation_interval(deviation: float, degrees: int) -> tuple[float, float]:
    """Return the interval of a standard deviation that was estimated from values with a normal
    distribution: degrees x (estimated / true variance) is a chi-square variable (Helmert 1876)."""
    ends = [chdtri(degrees, 0.5 + side * CONFIDENCE / 2) for side in (-1, 1)]
    low, high = (deviation * math.sqrt(degrees / end) for end in ends)
    return low, high


def seeds_to_show(size: float, deviation: float) -> int:
    """Return the least number of seeds, at least MIN_BLOCKS, with which Student's paired test shows
    a true difference of `size` points with a probability of POWER, if a seed's difference varies by
    `deviation`."""
    # By the normal distribution, which asks for less than Student's.
    normal = (ndtri(0.5 + CONFIDENCE / 2) + ndtri(POWER)) * deviation / size
    least = max(MIN_BLOCKS, math.ceil(normal**2))
    return next(n for n in itertools.count(least) if power(size, deviation, n) >= POWER)


def power(size: float, deviation: float, seeds: int) -> float:
    """Return the probability that Student's paired test shows a true difference of `size` with the
    right sign: t has a noncentral distribution (Owen, Journal of the American Statistical
    Association 60, 1965)."""
    degrees, shift = seeds - 1, size / deviation * math.sqrt(seeds)
    return 1 - float(nctdtr(degrees, shift, student_quantile(CONFIDENCE, degrees)))
