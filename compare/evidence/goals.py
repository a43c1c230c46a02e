"""A plan's goals and their verdicts: the ratio of two sides' speeds, or a speed, and its goal."""

import math
from dataclasses import dataclass

from compare.evidence.paired import Estimate
from compare.evidence.records import Comparison
from compare.evidence.turns import estimate

REACHED, AT_GOAL, MISSED, OPEN = "reached", "at the goal", "not reached", "not shown"
# An interval that contains its goal is also a result, AT_GOAL, if its lower end is at most this
# share below the goal: it could take hours to show on which side the truth lies, and no choice
# would depend on it. For a ratio the tolerance is at most half the goal's distance from 1. That
# distance is the cost that the goal allows, or the gain that it asks for; twice the cost, or no
# gain at all, would be another answer. So a goal of 1, which allows no cost, has no tolerance. A
# speed has no such reference value of 1.
NEAR = 0.02


@dataclass(frozen=True)
class Goal:
    """A goal, and the estimate to judge it by."""

    question: str
    name: str  # first:second, or one side
    least: float  # the value to reach, as in the plan
    found: Estimate
    unit: str  # "" for a ratio

    @property
    def verdict(self) -> str:
        """Whether the goal is reached, by the interval."""
        low, high = self.found.low, self.found.high
        if low is None or high is None:
            return OPEN
        if low >= self.least:
            return REACHED
        if high < self.least:
            return MISSED
        allowed = math.inf if self.unit else abs(1 - self.least) / 2
        return AT_GOAL if low >= self.least - min(NEAR * self.least, allowed) else OPEN

    @property
    def interval(self) -> str | None:
        """The ends of the interval, if there is one."""
        low, high = self.found.low, self.found.high
        return None if low is None or high is None else f"{self.shown(low)} – {self.shown(high)}"

    def shown(self, value: float) -> str:
        """Return a figure with its unit."""
        return f"{value:,.0f} {self.unit}" if self.unit else f"{value:.3f}"


def goals_of(comparison: Comparison) -> list[Goal]:
    """Return a comparison's goals at each case and number of workers that has blocks to judge them
    by."""
    question = comparison.plan.question or comparison.folder.name
    goals = []
    for place in comparison.plan.groups():
        for name, least in comparison.plan.goals.items():
            first, _, second = name.partition(":")
            powers = {first: 1, second: -1} if second else {first: 1}
            if blocks := [b for b in comparison.blocks(*place) if powers.keys() <= {*b.order}]:
                measured = estimate(blocks, powers, confidence=comparison.confidence)
                unit = "" if second else f"{comparison.unit}/s"
                goals.append(Goal(question, name, least, measured, unit))
    return goals
