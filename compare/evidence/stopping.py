"""When a measurement knows enough: run.py asks after each block, and the report asks again.

Both call the same functions, so that the live line says what the report will say. A group is the
configurations of one case at one number of workers: they share blocks.

Rounds per block. On two cores that other processes share, the logarithm of a side's throughput in a
turn of two steps has a standard deviation of 6 to 8 % between rounds; a launch adds about 0.7 %.
With four sides a block takes some 33 s to start and end, 4.5 s for each round, and 3 s for each
round without exchange. Half-widths of the intervals in %, by rounds per block; medians of 3000
simulations that only the limit of ten minutes ended:

                                  four sides                two sides
    one side's turn varies by     5     6     8     10      5     6     8     10
    3 %                           1.6   1.6   1.5   1.7     0.98  0.97  0.92  0.96
    4.5 %                         2.1   2.1   2.0   2.2     1.39  1.35  1.27  1.31
    6.5 %                         2.9   2.9   2.7   3.0     1.96  1.89  1.77  1.81
    9 %                           4.1   4.0   3.7   4.1     2.69  2.59  2.41  2.45

When to stop. A rule that stops at the first narrow interval selects intervals that are narrow by
chance. So the scatter of the turns within blocks counts, too: there are eight times as many turns
as blocks, and in the records the turns predict the scatter of the blocks (78 series: blocks scatter
1.02 times as much as predicted in the median, and 1.2 times in variance). The table shows, for each
rule, how many of 100 intervals cover the truth where their width ended the measurement, and where
the minutes did (40,000 simulations; in brackets the percentage of measurements that ended so; a
launch adds 0.65 % to a side's noise, turns the rest):

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

The rule in use is width and turns, from ten blocks on. For two sides it takes 10.0, 11.1, 19.5, 20
and 20 blocks on average; the width alone took 9.0, 10.4, 16.2, 19.3 and 19.9. Whatever the rule, of
100 intervals of +-1.5 % from 20 blocks at most 91 cover the truth at a noise of 4 %, and at most 82
at 5 %: a rule can only avoid ending a measurement there.

Rejected alternatives, with the width alone, at a noise of 3, 4 and 5 %: two narrow intervals in a
row cover 91.2, 82.2 and 73 %; at least twelve blocks, 92.5, 85.1 and 75 %; intervals twice as wide
as Student's, 99.7, 98.8 and 95.8 %, but they would hardly ever show equal speeds to be equal. If
launches cause half of the variance, turns predict less (92.4 % cover at a noise of 3 %; 86 % at
4 %, in 9 of 100 measurements). For whole runs they predict nothing.

Coverage. Whatever ends the measurement, 94.5 to 95.8 of 100 intervals cover the truth (4000
simulations): at every noise of the first table, with drift, with correlated turns, with a tenth of
the turns slowed, and with one engine twice as noisy. What slows one engine alone is part of the
ratio: with a tenth of its turns slowed by 10 to 50 %, 94.1 to 95.4 of 100 cover the ratio of total
throughputs. With rounds drawn from records at least 93.5 do. Equal engines are shown as different
in 1.3 to 4.1 of 100 reports. At a noise of 3 % per turn, all comparisons of two equal sides end as
"equal" within ten minutes, and so do three of the four pairs of four sides. Correlated blocks break
the coverage: with an AR(1) coefficient of 0.3, 86 % cover the truth, with 0.5, 75 %.
tests/test_compare_coverage.py simulates most of this again.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from compare.evidence.paired import MIN_BLOCKS, Estimate, student_quantile
from compare.evidence.records import Comparison
from compare.evidence.turns import Block, estimate, turn_error
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
        return f"another block would exceed the {plan.minutes:g} minutes"
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
        one.degrees >= MIN_DEGREES_TO_STOP
        and one.relative_half_width <= plan.until_interval
        and student_quantile(one.confidence, one.degrees) * BLOCKS_OVER_TURNS * one.turn_error
        <= math.log1p(plan.until_interval)
        for one in estimates
    )


@dataclass(frozen=True)
class Group:
    """What the blocks of one case and number of workers show so far."""

    case: str
    workers: int
    blocks: int
    seconds: float  # of measuring; time in which other processes used the cores does not count
    disturbed_seconds: float
    estimates: dict[tuple[str, str], Estimate]  # by pair: first / second

    @property
    def block_seconds(self) -> float:
        """The mean time that a block takes."""
        return self.seconds / max(1, self.blocks)


def group_of(
    plan: Plan, case: str, workers: int, blocks: Sequence[Block], confidence: float
) -> Group:
    """Return what the blocks of one case and number of workers show."""
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
    """Return the group to measure next: of those that need more blocks, the one with the fewest."""
    wide = [
        group
        for group in groups
        if not group.blocks or not is_enough(group.estimates.values(), plan)
    ]
    return min((plan.blocks is None and wide) or groups, key=lambda group: group.blocks)


def reason_to_end(plan: Plan, groups: Sequence[Group]) -> str:
    """Return why the measurement ends; empty if another block follows."""
    if not plan.pairs() and plan.blocks is None:
        return "there is nothing to compare: one configuration only"
    blocks = min(group.blocks for group in groups)
    if not blocks:
        return ""
    # In whole runs, a block of every group is measured at a time.
    following = [next_group(plan, groups)] if plan.measure == "turns" else groups
    return reason_to_stop(
        estimates_of(groups),
        blocks,
        sum(group.seconds for group in groups),
        sum(group.block_seconds for group in following),
        plan,
    )


def unfinished(comparison: Comparison) -> dict[tuple[str, int], str]:
    """Return the unfinished cases and numbers of workers, each with how far it is, or with what is
    damaged there. All share the plan's minutes: if one block is damaged, the minutes used are not
    known, and all are unfinished."""
    plan = comparison.plan
    damaged = {(case, workers): why for case, workers, why in comparison.damaged_blocks}
    if not plan.pairs() and plan.blocks is None:
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
