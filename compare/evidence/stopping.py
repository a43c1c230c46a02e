"""When a measurement knows enough: run.py asks after each block, and the report asks again.

Both call the same functions, so that the live line says what the report will say. The simulations
behind the rule are in docs/statistics.md; tests/test_compare_coverage.py repeats most of them.
"""

import math
from collections.abc import Iterable, Sequence

from compare.evidence.group import Group
from compare.evidence.paired import MIN_BLOCKS, Estimate, student_quantile
from compare.plan.plan import Plan, percentage

MIN_DEGREES_TO_STOP = 9  # degrees of freedom an interval needs to end a measurement: ten blocks
# Standard error from blocks / standard error from their turns, in the records under results/:
# launches add to it.
BLOCKS_OVER_TURNS = math.sqrt(1.2)


def reason_to_stop(
    estimates: Iterable[Estimate],
    blocks: int,
    seconds_used: float,
    block_seconds: float,
    plan: Plan,
) -> str:
    """Return why no further block is needed; empty if one is.

    `blocks` have been measured in `seconds_used`; the next one takes about `block_seconds`. The
    estimates are those of all judged pairs.
    """
    if plan.blocks is not None:
        return "as many blocks as were asked for" if blocks >= plan.blocks else ""
    if is_enough(estimates, plan):
        return f"the interval of every pair is within +-{percentage(plan.until_interval)}"
    if blocks >= MIN_BLOCKS and seconds_used + block_seconds > 60 * plan.minutes:
        return f"stopped after {blocks} blocks, as another would exceed --minutes {plan.minutes:g}"
    return ""


def is_enough(estimates: Iterable[Estimate], plan: Plan) -> bool:
    """Return whether enough blocks were measured: for every estimate, the half-width is at most the
    plan's `until_interval`, there are enough degrees of freedom, and the scatter of the turns
    predicts no wider interval (one of few blocks may be narrow by chance).

    Only the width of an interval may end a measurement, never its position. A rule that stops as
    soon as an interval lies beyond the margin selects the intervals that miss a true ratio of the
    margin's size (92.6 of 100 cover it instead of 94.2).
    """
    return all(
        ratio.degrees >= MIN_DEGREES_TO_STOP
        and ratio.relative_half_width <= plan.until_interval
        and student_quantile(ratio.confidence, ratio.degrees) * BLOCKS_OVER_TURNS * ratio.turn_error
        <= math.log1p(plan.until_interval)
        for ratio in estimates
    )


def estimates_of(groups: Sequence[Group]) -> list[Estimate]:
    """Return the estimates of all pairs."""
    return [estimate for group in groups for estimate in group.estimates.values()]


def next_groups(plan: Plan, groups: Sequence[Group]) -> Sequence[Group]:
    """Return the groups to measure next: where they share a launch, all that have the fewest blocks
    (an interruption may have left them unequal); all where whole runs are made; else, of those that
    need more blocks, the one with the fewest."""
    if plan.measure == "runs":
        return groups
    if plan.shares_launch:
        fewest = min(group.num_blocks for group in groups)
        return [group for group in groups if group.num_blocks == fewest]
    wide = [
        group
        for group in groups
        if not group.num_blocks or not is_enough(group.estimates.values(), plan)
    ]
    return [min((plan.blocks is None and wide) or groups, key=lambda group: group.num_blocks)]


def reason_to_end(plan: Plan, groups: Sequence[Group]) -> str:
    """Return why the measurement ends; empty if another block follows."""
    if not plan.pairs() and plan.blocks is None:
        return "there is nothing to compare: one configuration only"
    blocks = min(group.num_blocks for group in groups)
    if not blocks:
        return ""
    return reason_to_stop(
        estimates_of(groups),
        blocks,
        sum(group.seconds for group in groups),
        sum(group.block_seconds for group in next_groups(plan, groups)),
        plan,
    )


def unfinished(plan: Plan, groups: Sequence[Group]) -> dict[tuple[str, int], str]:
    """Return the unfinished groups by case and number of workers, each with how far it is."""
    if not plan.pairs() and plan.blocks is None:
        return {}
    if plan.blocks is not None:
        return {
            group.place: f"{group.num_blocks} of {plan.blocks} blocks"
            for group in groups
            if group.num_blocks < plan.blocks
        }
    if reason_to_end(plan, groups):
        return {}
    used = sum(group.seconds for group in groups) / 60
    so_far = f"{used:.1f} of {plan.minutes:g} minutes are used"
    return {group.place: so_far for group in groups}  # all share the plan's minutes
