"""When a measurement knows enough: run.py asks after each block, the report asks again.

Both ask the same functions, so that the live line says what the report will say. What shares blocks
is a group: the configurations of one case at one number of workers.

What was chosen, and why. On two cores that others share, the logarithm of one side's turn of two
steps varies by 6 to 8 % from round to round; a launch adds about 0.7 %. Four sides take some 33 s a
block to start and end, 4.5 s a round, and 3 s a round without exchange. Half-widths in % by rounds
a block, in the median of 3000 simulations that nothing but the ten minutes ended:

                                  four sides                two sides
    one side's turn varies by     5     6     8     10      5     6     8     10
    3 %                           1.6   1.6   1.5   1.7     0.98  0.97  0.92  0.96
    4.5 %                         2.1   2.1   2.0   2.2     1.39  1.35  1.27  1.31
    6.5 %                         2.9   2.9   2.7   3.0     1.96  1.89  1.77  1.81
    9 %                           4.1   4.0   3.7   4.1     2.69  2.59  2.41  2.45

Whoever stops at the first narrow interval prefers those that are narrow by chance. So the scatter
of the turns within the blocks has a say: their number is eight times that of the blocks, and in the
records it foretells how blocks scatter (78 series: 1.02 times as much in the median, 1.2 in
variance). Of 100 intervals of each reason to end so many cover the truth (40,000 simulations, in
brackets the share of measurements; a launch adds 0.65 % to a side, turns the rest):

                                  noise of a block's ratio
                                  1 %        2 %        3 %        4 %        5 %
    two sides, 20 blocks
      width, nine blocks          94.8 (100) 94.8 (100) 91.6 (72)  83.5 (16)  70 (2)
      minutes                                           98.5       96.2       95.1
      width and turns, nine       95.2 (100) 94.8 (100) 93.4 (44)  - (0)      - (0)
      width and turns, ten        95.0 (100) 94.9 (100) 93.6 (44)  - (0)      - (0)
      minutes                                           96.1       95.2       95.2
    four sides, 12 blocks
      width, nine blocks          95.0 (100) 93.5 (55)  84.5 (0.7) - (0)      - (0)
      minutes                                96.6       95.0       95.0       95.0
      width and turns, nine       94.9 (100) 93.4 (53)  - (0)      - (0)      - (0)
      width and turns, ten        95.0 (100) 93.7 (53)  - (0)      - (0)      - (0)
      minutes                                96.4       95.1       95.0       95.0

The rule is that of ten blocks. In the mean of two sides it takes 10.0, 11.1, 19.5, 20 and 20 blocks
where the width alone took 9.0, 10.4, 16.2, 19.3 and 19.9. No rule makes an interval of +-1.5 % from
20 blocks cover more than 91 % at a noise of 4 %, and 82 % at 5 %: it can only end none there. With
the width alone, two narrow looks in a row cover 91.2, 82.2 and 73 % at 3, 4 and 5 %; twelve blocks
at first 92.5, 85.1 and 75 %; an interval twice as wide as Student's would do (99.7, 98.8 and 95.8
%), and hardly ever show equal speeds to be equal. Where launches make half of the variance, turns
tell less (92.4 % at 3 %, 86 % at 4 %, in 9 of 100 measurements); of whole runs they tell nothing.

Over all ends 94.5 to 95.8 of 100 intervals cover the truth (4000 simulations): over all of the
noise of the first table, with drift, with correlated turns, with a tenth of the turns slowed, and
with one engine twice as noisy. What slows one engine alone is in the ratio: with a tenth of its
turns slowed by 10 to 50 %, 94.1 to 95.4 cover the ratio of total throughputs. Drawn from recorded
rounds it is 93.5 at the least. Equal engines are shown as different in 1.3 to 4.1 of 100 reports.
At a noise of 3 % a turn two sides all end as equal within ten minutes, and three pairs of four do.
Blocks of which each resembles the one before break it: with AR(1) of 0.3 86 % cover, of 0.5 75 %.
tests/test_compare_coverage.py simulates most of it again.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from compare.evidence.paired import MIN_BLOCKS, Estimate, student_quantile
from compare.evidence.records import Comparison
from compare.evidence.turns import Block, estimate, turn_error
from compare.plan.plan import Plan, percentage

MIN_DEGREES_TO_STOP = 9  # of freedom, of each interval that is to end a measurement: ten blocks
# An error by blocks over that by their turns: what launches add, in the records under results/.
BLOCKS_OVER_TURNS = math.sqrt(1.2)


def reason_to_stop(
    estimates: Iterable[Estimate],
    blocks: int,
    seconds_used: float,
    block_seconds: float,
    plan: Plan,
) -> str:
    """Say why no further block is to be measured; empty if one is.

    `blocks` are measured, in `seconds_used`; the next one takes about `block_seconds`. The
    estimates are those of all verdicts on pairs.
    """
    if plan.blocks is not None:
        return "as many blocks as were asked for" if blocks >= plan.blocks else ""
    if is_enough(estimates, plan):
        return f"the interval of every pair is within +-{percentage(plan.until_interval)}"
    if blocks >= MIN_BLOCKS and seconds_used + block_seconds > 60 * plan.minutes:
        return f"another block would pass the {plan.minutes:g} minutes"
    return ""


def is_enough(estimates: Iterable[Estimate], plan: Plan) -> bool:
    """Tell whether blocks enough were measured: no interval is wider than the plan's
    `until_interval`, its degrees of freedom are not few, and its turns let one expect no wider one:
    an interval of few blocks may be narrow by chance.

    Only the width may end a measurement, never where an interval lies: whoever looks after each
    block and stops when all of it is beyond the margin keeps the very intervals that have missed a
    ratio of the margin's size (92.6 of 100 cover it instead of 94.2).
    """
    return all(
        one.degrees >= MIN_DEGREES_TO_STOP
        and one.relative_half_width <= plan.until_interval
        and student_quantile(one.confidence, one.degrees) * BLOCKS_OVER_TURNS * one.turn_error
        <= math.log1p(plan.until_interval)
        for one in estimates
    )


@dataclass(frozen=True)
class Group:
    """What the blocks of one case and number of workers say so far."""

    case: str
    workers: int
    blocks: int
    seconds: float  # of measuring; those in which others used the cores are not among them
    disturbed_seconds: float
    estimates: dict[tuple[str, str], Estimate]  # by pair: first / second

    @property
    def block_seconds(self) -> float:
        """What a block usually takes."""
        return self.seconds / max(1, self.blocks)


def group_of(
    plan: Plan, case: str, workers: int, blocks: Sequence[Block], confidence: float
) -> Group:
    """Return what blocks say of one case and number of workers."""
    estimates = {
        (a, b): replace(
            estimate(blocks, {a: 1, b: -1}, confidence=confidence),
            turn_error=turn_error(blocks, {a: 1, b: -1}),
        )
        for a, b in plan.pairs()
        if any({a, b} <= {*block.order} for block in blocks)
    }
    whole = sum(len(block.order) == len(plan.names) for block in blocks)
    seconds = sum(block.measuring_seconds for block in blocks)
    disturbed = sum(block.disturbed_seconds for block in blocks)
    return Group(case, workers, whole, seconds, disturbed, estimates)


def estimates_of(groups: Sequence[Group]) -> list[Estimate]:
    """Return the estimates of all pairs."""
    return [estimate for group in groups for estimate in group.estimates.values()]


def next_group(plan: Plan, groups: Sequence[Group]) -> Group:
    """Return the group whose turn it is: with the fewest blocks of those that need more."""
    wide = [
        group
        for group in groups
        if not group.blocks or not is_enough(group.estimates.values(), plan)
    ]
    return min((plan.blocks is None and wide) or groups, key=lambda group: group.blocks)


def reason_to_end(plan: Plan, groups: Sequence[Group]) -> str:
    """Say why no further block is measured; empty if one is."""
    if not plan.pairs() and plan.blocks is None:
        return "there is nothing to compare: one configuration only"
    blocks = min(group.blocks for group in groups)
    if not blocks:
        return ""
    # Whole runs are measured a block of all groups at a time.
    following = [next_group(plan, groups)] if plan.measure == "turns" else groups
    return reason_to_stop(
        estimates_of(groups),
        blocks,
        sum(group.seconds for group in groups),
        sum(group.block_seconds for group in following),
        plan,
    )


def unfinished(comparison: Comparison) -> dict[tuple[str, int], str]:
    """Say of which cases and numbers of workers the plan would measure more, and how far they are,
    or what is damaged. Minutes are shared: where a block is damaged, none of them are known."""
    plan = comparison.plan
    damaged = {(case, workers): why for case, workers, why in comparison.damaged_blocks}
    if not plan.pairs():
        return damaged
    groups = [
        group_of(plan, *place, comparison.blocks(*place), comparison.confidence)
        for place in plan.groups()
    ]
    if plan.blocks is not None:
        left = {
            (group.case, group.workers): f"{group.blocks} of {plan.blocks} blocks"
            for group in groups
            if group.blocks < plan.blocks
        }
        return left | damaged
    so_far = f"{sum(one.seconds for one in groups) / 60:.1f} of {plan.minutes:g} minutes are used"
    is_over = not damaged and reason_to_end(plan, groups)
    return {} if is_over else dict.fromkeys(plan.groups(), so_far) | damaged
