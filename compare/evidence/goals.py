"""A plan's goals and their verdicts: the ratio of two sides' speeds, or a speed, and its goal; the
difference of two sides' final accuracies, and its goal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from compare.evidence.accuracy import AccuracyVerdict, judge_accuracy
from compare.evidence.group import Group
from compare.evidence.judgement import UNDECIDED, Finding, Obstacle, Tested, decided, find
from compare.evidence.record import Record

# Decisions, beside UNDECIDED.
REACHED, AT_GOAL, MISSED = "reached", "at the goal", "not reached"
# What the goals of one or of several comparisons say together, for who lets a change pass or not;
# or they are UNDECIDED.
PASSED, FAILED, NOT_JUDGED = "passed", "failed", "not judged"
# An interval that contains its goal is also a result, AT_GOAL, if its lower end is at most this
# share below the goal: it could take hours to show on which side the truth lies, and no choice
# would depend on it. For a ratio the tolerance is at most half the goal's distance from 1. That
# distance is the cost that the goal allows, or the gain that it asks for; twice the cost, or no
# gain at all, would be another answer. So a goal of 1, which allows no cost, has no tolerance. A
# speed has no such reference value of 1.
NEAR = 0.02
POINTS = "points"  # the unit of a difference of top-1: percentage points


class Found(NamedTuple):
    """What was found of the sides of a goal, in the goal's unit."""

    value: float
    ends: tuple[float, float] | None  # of its interval; None: too few blocks, or an exact value


@dataclass(frozen=True, kw_only=True)
class Goal(Finding):
    """A goal, and the finding to judge it by. Its decision is one of those above."""

    question: str
    name: str  # first:second, or one side
    least: float  # the value to reach, as in the plan
    unit: str = ""  # "" for a ratio
    accuracy: AccuracyVerdict | None = None  # of a goal of accuracy; its unit is then POINTS

    @property
    def obstacle(self) -> Obstacle | None:
        if self.accuracy is None:
            return super().obstacle
        return self.accuracy.obstacle or (None if self.is_finished else Obstacle.UNFINISHED)

    @property
    def tested(self) -> Tested | None:
        return super().tested if self.accuracy is None else self.accuracy.tested

    @property
    def is_exact(self) -> bool:
        """Whether the difference of accuracies is exactly 0, which needs no test."""
        return self.accuracy is not None and self.accuracy.is_exact and self.obstacle is None

    @property
    def found(self) -> Found | None:
        """The ratio, speed or difference of the sides; None if there is none."""
        if self.accuracy is None:
            return Found(self.speed.ratio, self.speed.ends) if self.speed else None
        if self.accuracy.is_exact:
            return Found(0.0, None)
        points = self.accuracy.points
        return Found(points.mean, points.ends) if points else None

    @property
    def tolerated(self) -> float:
        """The smallest value that still counts as being at the goal. A difference of accuracies is
        given in points, so its goal is itself the tolerance."""
        if self.accuracy is not None:
            return self.least
        allowed = math.inf if self.unit else abs(1 - self.least) / 2
        return self.least - min(NEAR * self.least, allowed)

    def p_values(self, tested: Tested) -> tuple[float, float]:
        return tested.p_difference(self.least), tested.p_below(self.tolerated)

    def decision_by(self, is_different: bool, is_near: bool) -> str:
        if self.found and (is_different or self.is_exact):
            return REACHED if self.found.value >= self.least else MISSED
        return AT_GOAL if is_near else UNDECIDED


def goals_of(record: Record) -> list[Goal]:
    """Return a comparison's goals in each group, with their verdicts; none of a null test, which
    asks something else. Goals of accuracy are decided by themselves."""
    plan, groups = record.plan, [] if record.plan.null else record.groups
    of_speed = [
        goal_of_speed(record, group, name, least)
        for group in groups
        for name, least in plan.goals.items()
    ]
    of_accuracy = [
        goal_of_accuracy(record, group, name, least)
        for group in groups
        for name, least in plan.top1_goals.items()
    ]
    return [*decided(of_speed), *decided(of_accuracy)]


def goal_of_speed(record: Record, group: Group, name: str, least: float) -> Goal:
    """Return a goal for the ratio of two sides' speeds, or for a side's own."""
    first, _, second = name.partition(":")
    powers = {first: 1, second: -1} if second else {first: 1}
    return Goal(
        **vars(find(record, group, powers)),
        question=question_of(record),
        name=name,
        least=least,
        unit="" if second else f"{record.unit}/s",
    )


def goal_of_accuracy(record: Record, group: Group, name: str, least: float) -> Goal:
    """Return a goal for the difference of two sides' final accuracies."""
    first, _, second = name.partition(":")
    labels = {side: side for side in record.configurations}
    verdict = judge_accuracy(record, group, (first, second), labels)
    return Goal(
        case=verdict.case,
        workers=verdict.workers,
        differences=verdict.differences,
        is_finished=verdict.is_finished,
        question=question_of(record),
        name=name,
        least=least,
        unit=POINTS,
        accuracy=verdict,
    )


def question_of(record: Record) -> str:
    """Return what a comparison asks, or else its name."""
    return record.plan.question or record.folder.name


def gate_result(comparisons: Sequence[Sequence[Goal]]) -> str:
    """Return what the goals of each comparison say together. One that is missed is "failed",
    whatever else is open; a goal that nothing could judge, or a comparison without goals, is "not
    judged"; one that is neither reached nor missed "undecided". At the goal is passed."""
    goals = [goal for own in comparisons for goal in own]
    decisions = {goal.decision for goal in goals}
    if MISSED in decisions:
        return FAILED
    if not all(comparisons) or any(goal.obstacle for goal in goals):
        return NOT_JUDGED
    return UNDECIDED if UNDECIDED in decisions else PASSED
