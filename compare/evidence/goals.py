"""A plan's goals and their verdicts: the ratio of two sides' speeds, or a speed, and its goal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from compare.evidence.judgement import Finding, find, holm, judged_together
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


@dataclass(frozen=True, kw_only=True)
class Goal(Finding):
    """A goal, and the finding to judge it by."""

    question: str
    name: str  # first:second, or one side
    least: float  # the value to reach, as in the plan
    unit: str = ""  # "" for a ratio
    decision: str = UNDECIDED  # see `decided`

    @property
    def tolerated(self) -> float:
        """The smallest value that still counts as being at the goal."""
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
    return decided(goals)


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
