"""Verdicts: which of two configurations is faster, within a case and a number of workers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from compare.evidence.equality import Fact
from compare.evidence.group import Group
from compare.evidence.judgement import UNDECIDED, Finding, Obstacle, Tested, decided, find
from compare.evidence.paired import Estimate
from compare.evidence.record import Record
from compare.evidence.turns import work_per_cpu_second

DIFFERENT = ("faster", "slower")


@dataclass(frozen=True, kw_only=True)
class EqualWork:
    """Whether two scripts of a user's own do equal work, judged by the size of their steps and by
    the digests of weights that they give, and in what else they differ."""

    step_sizes: tuple[float, float]  # of first and second, in the scripts' unit, over all ranks
    silent: list[str]  # the sides that gave no digest
    equal_blocks: int  # with bit-equal weights after the first steps
    blocks: int
    varied: list[Fact]  # fields that differ, as the plan allows


class NotReached(NamedTuple):
    """A training that ended without the accuracy: its time to it is longer than `seconds`."""

    case: str
    workers: int
    block: int
    seed: int | None
    configuration: str
    target: float  # top-1, percent
    best_top1: float
    epochs: float
    seconds: float  # on the training clock, to the last evaluation


class FailedRun(NamedTuple):
    """A planned training that ended in a failure, as if it diverged."""

    seed: int | None
    configuration: str


@dataclass(frozen=True, kw_only=True)
class OnPair(Finding):
    """The verdict on two configurations, in one case at one number of workers."""

    first: str
    second: str
    first_label: str
    second_label: str
    margin: float  # largest difference that counts as "equal"
    failed: tuple[FailedRun, ...] = ()  # of its whole trainings, if they are judged

    def p_values(self, tested: Tested) -> tuple[float, float]:
        return tested.p_difference(), tested.p_equality(self.margin)


@dataclass(frozen=True, kw_only=True)
class Verdict(OnPair):
    """The verdict on two configurations' speeds, that of the first / that of the second; a margin
    of 0.03 is 3 %. Its decision is "faster", "slower", "equal" or "undecided"."""

    unit: str = "images"  # what speeds count, per second
    is_null_test: bool = False  # both sides are the same: any difference comes from the machine
    delay: float | None = None  # in a null test's control: the second's steps take this share more
    cpu: Estimate | None = None  # first / second, CPU time per image
    equal_weights: tuple[bool, ...] = ()  # of the full runs, block by block
    equal_work: EqualWork | None = None  # of a user's own scripts
    # Of times to an accuracy (accuracy.py), whose ratio is then the speed: top-1, percent, and the
    # trainings that ended without it.
    target_top1: float | None = None
    unreached: tuple[NotReached, ...] = ()

    @property
    def own_obstacle(self) -> Obstacle | None:
        is_missed = self.target_top1 is not None and bool(self.unreached or self.failed)
        return Obstacle.NOT_REACHED if is_missed and self.speed is None else None

    @property
    def tested(self) -> Tested | None:
        """A null test's control tests the measurement, by a rule of its own: `finds_delay`."""
        return super().tested if self.delay is None else None

    def decision_by(self, is_different: bool, is_near: bool) -> str:
        """Return "equal" if the difference is certain but too small to matter, except in a null
        test, which looks for any difference."""
        if is_near and not (self.is_null_test and is_different):
            return "equal"
        if is_different:
            return "faster" if self.speed and self.speed.ratio > 1 else "slower"
        return "faster" if self.finds_delay else UNDECIDED

    @property
    def finds_delay(self) -> bool:
        """Whether the interval contains the known delay and excludes 1."""
        if self.delay is None or self.obstacle or self.speed is None:
            return False
        low, high = self.speed.low or 0, self.speed.high or 0
        return 1 < low <= 1 + self.delay <= high


def judge(record: Record, labels: Mapping[str, str]) -> list[Verdict]:
    """Return a verdict for each group and pair of configurations. `labels`: of all configurations,
    by name."""
    return decided(
        [
            judge_pair(record, group, pair, labels)
            for group in record.groups
            for pair in record.plan.pairs()
        ]
    )


def judge_pair(
    record: Record, group: Group, pair: tuple[str, str], labels: Mapping[str, str]
) -> Verdict:
    """Compare two configurations over the blocks in which both are complete."""
    first, second = pair
    plan, powers = record.plan, {first: 1, second: -1}
    finding = find(record, group, powers)
    work = group.estimate(powers, work_per_cpu_second) if finding.speed else None
    return Verdict(
        **vars(finding),
        first=first,
        second=second,
        first_label=labels[first],
        second_label=labels[second],
        margin=plan.margin_of(pair),
        unit=record.unit,
        is_null_test=plan.null,
        delay=plan.delay if pair == plan.pairs()[-1] else None,
        cpu=work.inverse() if work else None,
        equal_weights=equal_weights(group, pair),
        equal_work=equal_work(group, pair) if plan.side else None,
    )


def equal_weights(group: Group, pair: tuple[str, str]) -> tuple[bool, ...]:
    """Return whether the whole trainings of a pair ended with bit-equal weights, block by block."""
    weights = [
        {run.block: run.summary.weights_sha256 for run in group.complete_runs(name)}
        for name in pair
    ]
    both = sorted(weights[0].keys() & weights[1].keys())
    return tuple(weights[0][block] == weights[1][block] for block in both)


def interaction(record: Record, group: Group, verdicts: Iterable[Verdict]) -> Estimate | None:
    """Return how far engine and transport depend on each other: the engines' ratio over one
    transport divided by that over the other. None unless judged pairs that differ in nothing else
    connect all corners of a square: only for such pairs is it known that nothing else differs."""
    corners = [*record.square.values()]
    known = [
        {verdict.first, verdict.second}
        for verdict in verdicts
        if verdict.speed is not None and verdict.place == group.place
    ]
    joined = {*corners[:1]}
    for _ in corners:
        joined = joined.union(*(pair for pair in known if pair & joined and pair <= {*corners}))
    if not corners or joined != {*corners}:
        return None
    powers = dict(zip(corners, (1, -1, -1, 1), strict=True))
    return group.estimate(powers)


def equal_work(group: Group, pair: tuple[str, str]) -> EqualWork:
    """Return whether two scripts of a user's own do equal work."""
    blocks = group.blocks
    digests = [[block.weights.get(name) for name in pair] for block in blocks]
    first, second = (
        fmean(turn.images / block.steps[name] for block in blocks for turn in block.counted(name))
        for name in pair
    )
    return EqualWork(
        step_sizes=(first, second),
        silent=[name for i, name in enumerate(pair) if any(both[i] is None for both in digests)],
        equal_blocks=sum(of_first == of_second for of_first, of_second in digests),
        blocks=len(blocks),
        varied=[fact for fact in group.facts_between(pair) if fact.is_varied],
    )
