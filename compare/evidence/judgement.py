"""What may be judged, and which of several findings hold together: one rule, which verdicts on
speeds and accuracies, goals, and the all-reduces' speeds obey."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TypeVar

from compare.evidence.equality import Fact
from compare.evidence.group import Group
from compare.evidence.paired import CONFIDENCE, Estimate, PointDifference
from compare.evidence.record import Record

UNDECIDED = "undecided"  # the decision of a finding until another one is shown
Tested = Estimate | PointDifference
F = TypeVar("F", bound="Finding")


class Obstacle(Enum):
    """Why nothing may be concluded. (Stopping whenever the figures look good finds differences that
    do not exist, so the measurement must be finished.)"""

    OTHER_WORK = auto()  # the sides differ in more than the plan varies
    SHARED_GPU = auto()  # by ranks, whose speeds then mean nothing
    FAILED = auto()  # trainings: the others alone would favour the side that fails
    ENDED_EARLY = auto()  # trainings, by --desired-acc: final accuracies then say nothing
    NOT_REACHED = auto()  # the accuracy, by trainings, so that there is no ratio of times to it
    UNFINISHED = auto()  # the plan needs more blocks
    NO_BLOCKS = auto()  # that both sides completed
    FEW_BLOCKS = auto()  # too few for an interval


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the blocks of one case at one number of workers show of some sides. A kind of findings
    that `decided` decides has `p_values` and `decision_by`."""

    case: str = ""
    workers: int = 0
    differences: tuple[Fact, ...] = ()  # that the plan does not vary
    ranks_per_gpu: int | None = None  # None: no rank shares a GPU
    is_finished: bool = True
    speed: Estimate | None = None  # of a ratio, or a speed; None: no blocks, or one of the above
    family: int = 1  # number of findings that Holm's correction covers
    decision: str = UNDECIDED

    @property
    def place(self) -> tuple[str, int]:
        """The case and the number of workers."""
        return self.case, self.workers

    @property
    def estimate(self) -> Tested | None:
        """What was found, with its interval."""
        return self.speed

    @property
    def own_obstacle(self) -> Obstacle | None:
        """An obstacle that only this kind of findings has."""
        return None

    @property
    def obstacle(self) -> Obstacle | None:
        """The first reason for which nothing may be concluded; None if something may."""
        if self.differences:
            return Obstacle.OTHER_WORK
        if self.ranks_per_gpu:
            return Obstacle.SHARED_GPU
        if self.own_obstacle:
            return self.own_obstacle
        if not self.is_finished:
            return Obstacle.UNFINISHED
        if self.estimate is None:
            return Obstacle.NO_BLOCKS
        return Obstacle.FEW_BLOCKS if self.estimate.ends is None else None

    @property
    def tested(self) -> Tested | None:
        """The estimate that decides; None if there is nothing to test."""
        return None if self.obstacle else self.estimate

    def p_values(self, tested: Tested) -> tuple[float, float]:
        """Return the p-values of two hypotheses: that there is no difference, and that there is one
        that matters."""
        raise NotImplementedError

    def decision_by(self, is_different: bool, is_near: bool) -> str:
        """Return the decision: `is_different`, `is_near`: whether these hypotheses are rejected."""
        raise NotImplementedError


def find(record: Record, group: Group, powers: Mapping[str, float]) -> Finding:
    """Return what the blocks of a group show of the product of these sides' speeds, each raised to
    its power (as in `estimate`)."""
    between = group.facts_between([*powers])
    differences = {fact.field: fact for fact in between if fact.is_confounder}
    return Finding(
        case=group.case,
        workers=group.workers,
        differences=tuple(differences.values()),
        ranks_per_gpu=group.ranks_per_gpu,
        is_finished=group.place not in record.unfinished,
        speed=None if differences else group.estimate(powers),
    )


def decided(findings: Sequence[F]) -> list[F]:
    """Return the findings with their decisions. In all of them together the probability of any
    false difference is at most 1 - CONFIDENCE (in extended comparisons less), and so is that of any
    false "equal"; that of any false "at the goal" is half of that, as it has one side only.

    Holm's step-down test runs twice: over the hypotheses of no difference, and over those of a
    difference that matters. It may reject both for a finding whose difference is certain but small.
    """
    tested = {i: one.tested for i, one in enumerate(findings) if one.tested is not None}
    error = 1 - min((estimate.confidence for estimate in tested.values()), default=CONFIDENCE)
    p_values = {i: findings[i].p_values(estimate) for i, estimate in tested.items()}
    different = holm({i: p_value for i, (p_value, _) in p_values.items()}, error)
    # Half the error: a single verdict is then "equal" if and only if its interval lies within the
    # margin.
    near = holm({i: p_value for i, (_, p_value) in p_values.items()}, error / 2)
    return [
        replace(one, decision=one.decision_by(i in different, i in near), family=len(tested) or 1)
        for i, one in enumerate(findings)
    ]


def holm(p_values: Mapping[int, float], error: float) -> set[int]:
    """Return which hypotheses Holm's test rejects (Scandinavian Journal of Statistics 6, 1979). It
    takes them by rising p-value, compares each p-value with the error divided by the number of
    hypotheses left, and stops at the first that it does not reject."""
    rejected: set[int] = set()
    for index in sorted(p_values, key=lambda index: p_values[index]):
        if p_values[index] > error / (len(p_values) - len(rejected)):
            break
        rejected.add(index)
    return rejected
