"""A plan's goals and their verdicts: the ratio of two sides' speeds, or a speed, and its goal; the
difference of two sides' final accuracies, and its goal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from compare.evidence.accuracy import AccuracyVerdict, has_seeds, judge_accuracy
from compare.evidence.judgement import Finding, find, holm, judged_together
from compare.evidence.paired import CONFIDENCE
from compare.evidence.record import Record

REACHED, AT_GOAL, MISSED, UNDECIDED = "reached", "at the goal", "not reached", "undecided"
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
    """A goal, and the finding to judge it by."""

    question: str
    name: str  # first:second, or one side
    least: float  # the value to reach, as in the plan
    unit: str = ""  # "" for a ratio
    accuracy: AccuracyVerdict | None = None  # of a goal of accuracy; its unit is then POINTS
    decision: str = UNDECIDED  # see `decided`

    @property
    def is_judged(self) -> bool:
        if self.accuracy is None:
            return super().is_judged
        is_known = self.accuracy.is_exact and self.is_finished and self.accuracy.seeds > 0
        return is_known or self.accuracy.is_judged

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


def goals_of(record: Record) -> list[Goal]:
    """Return a comparison's goals in each group, with their verdicts; none of a null test, which
    asks something else."""
    plan, goals = record.plan, list[Goal]()
    for group in () if plan.null else record.groups:
        for name, least in plan.goals.items():
            first, _, second = name.partition(":")
            powers = {first: 1, second: -1} if second else {first: 1}
            goals.append(
                Goal(
                    **vars(find(record, group, powers)),
                    question=plan.question or record.folder.name,
                    name=name,
                    least=least,
                    unit="" if second else f"{record.unit}/s",
                )
            )
    return [*decided(goals), *decided_by_accuracy(goals_of_accuracy(record))]


def goals_of_accuracy(record: Record) -> list[Goal]:
    """Return a comparison's goals of accuracy in each group."""
    names = {name: name for name in record.configurations}
    goals = []
    for group in record.groups if has_seeds(record) else ():
        for name, least in record.plan.top1_goals.items():
            first, _, second = name.partition(":")
            verdict = judge_accuracy(record, group, (first, second), names)
            goals.append(
                Goal(
                    case=verdict.case,
                    workers=verdict.workers,
                    differences=verdict.differences,
                    is_finished=verdict.is_finished,
                    question=record.plan.question or record.folder.name,
                    name=name,
                    least=least,
                    unit=POINTS,
                    accuracy=verdict,
                )
            )
    return goals


def decided(goals: Sequence[Goal]) -> list[Goal]:
    """Return the goals with their decisions. As with verdicts, Holm's test runs twice: in all goals
    together the probability of any false "reached" or "not reached" is at most 1 - CONFIDENCE, and
    that of any false "at the goal" half of that, as it has one side only."""
    judged, error = judged_together(goals)
    beside = holm({i: speed.p_difference(goals[i].least) for i, speed in judged.items()}, error)
    near = holm({i: speed.p_below(goals[i].tolerated) for i, speed in judged.items()}, error / 2)
    with_decisions = []
    for index, goal in enumerate(goals):
        decision = AT_GOAL if index in near else UNDECIDED
        if index in beside and judged[index].ratio > goal.least:
            decision = REACHED
        elif index in beside:
            decision = MISSED
        with_decisions.append(replace(goal, decision=decision, family=len(judged) or 1))
    return with_decisions


def decided_by_accuracy(goals: Sequence[Goal]) -> list[Goal]:
    """Return the goals of accuracy with their decisions: in all together the probability of any
    false "reached" or "not reached" is at most 1 - CONFIDENCE. A difference that is exactly 0 needs
    no test."""
    tested = {
        index: goal.accuracy.points
        for index, goal in enumerate(goals)
        if goal.accuracy and goal.accuracy.is_judged and goal.accuracy.points
    }
    error = 1 - min((points.confidence for points in tested.values()), default=CONFIDENCE)
    beside = holm({i: own.p_difference(goals[i].least) for i, own in tested.items()}, error)
    with_decisions = []
    for index, goal in enumerate(goals):
        decision, found = UNDECIDED, goal.found
        if found and (index in beside or (goal.is_judged and index not in tested)):
            decision = REACHED if found.value >= goal.least else MISSED
        with_decisions.append(replace(goal, decision=decision, family=len(tested) or 1))
    return with_decisions


def gate_result(comparisons: Sequence[Sequence[Goal]]) -> str:
    """Return what the goals of each comparison say together. One that is missed is "failed",
    whatever else is open; a goal that nothing could judge, or a comparison without goals, is "not
    judged"; one that is neither reached nor missed "undecided". At the goal is passed."""
    goals = [goal for own in comparisons for goal in own]
    decisions = {goal.decision for goal in goals}
    if MISSED in decisions:
        return FAILED
    if not all(comparisons) or not all(goal.is_judged for goal in goals):
        return NOT_JUDGED
    return UNDECIDED if UNDECIDED in decisions else PASSED
