"""When a measurement knows enough, and how many rounds its next block has.

run.py asks before each block, and the report asks again, by the same functions, so that the live
line says what the report will say. Only times and scatter decide anything here, never where a ratio
lies: whoever stops, or measures more, where it suits, finds differences that do not exist. The
simulations behind the rules are in docs/statistics.md; tests/test_compare_coverage.py repeats most
of them.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import harmonic_mean
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from compare.evidence.group import Group
from compare.evidence.paired import (
    CONFIDENCE,
    LAUNCH_DEGREES,
    LAUNCH_SHARE,
    Estimate,
    student_quantile,
)
from compare.for_scripts.comparison_side import LEAD_IN_STEPS
from compare.plan.blocks import MIN_BLOCKS, ROUNDS
from compare.plan.plan import Plan, percentage

MIN_BLOCKS_TO_STOP = 10  # that the width of an interval needs to end a measurement
# Standard error from blocks / standard error from their turns, in blocks of ROUNDS.
BLOCKS_OVER_TURNS = math.sqrt(1 + LAUNCH_SHARE * ROUNDS)
MIN_ROUNDS, MOST_ROUNDS = 4, 200  # in a block, where they follow from what was measured
# The rounds' time / the time of start and end, in blocks that must be made though time is up.
ROUNDS_OVER_START = 1 / 3
MOST_STRETCH = 2  # times --minutes: where other processes use the cores, blocks end after so long


class BlockCost(NamedTuple):
    """The seconds of a block without other processes."""

    start: float  # of start, trial turns and end
    round: float  # of each round, with its share of the turns without exchange


def cost_of(group: Group) -> BlockCost:
    """Return the mean cost of a group's blocks. Where no quiet came, turns that other processes
    disturbed were kept, and are no part of the group's seconds: rounds take as long as turns do."""
    start = sum(block.start_seconds for block in group.blocks)
    rounds = sum(block.num_rounds for block in group.blocks)
    turns = sum(
        turn.seconds * (1 + LEAD_IN_STEPS / block.steps.get(turn.side, 1))
        for block in group.blocks
        for turn in (*block.of("speed"), *block.of("ablation"))
    )
    return BlockCost(start / len(group.blocks), max(group.seconds - start, turns) / rounds)


def launch_share(estimates: Iterable[Estimate], sides: int, taken: Sequence[int]) -> float:
    """Return the variance of launches / the variance of turns, as blocks of so many sides, with the
    rounds `taken`, let one expect it: by how much more each pair's ratio scatters from block to
    block than its turns predict. At least LAUNCH_SHARE: blocks that scatter little by chance must
    not lead to fewer of them, or intervals that are narrow by chance are selected."""
    pairs = [one for one in estimates if one.blocks >= MIN_BLOCKS and one.turn_error]
    if not pairs:
        return LAUNCH_SHARE
    scatter = sum(float(np.var(np.log(one.ratios), ddof=1)) / one.blocks for one in pairs)
    share = (scatter / sum(one.turn_error**2 for one in pairs) - 1) / harmonic_mean(taken)
    degrees = min(len(pairs), sides - 1) * (pairs[0].blocks - 1)
    known = LAUNCH_DEGREES * LAUNCH_SHARE + degrees * share
    return max(LAUNCH_SHARE, known / (LAUNCH_DEGREES + degrees))


def rounds_of_block(
    plan: Plan, groups: Sequence[Group], place: tuple[str, int], first: BlockCost
) -> int:
    """Return how many rounds the next block of the group at `place` has: as many as the plan says,
    or as make the group's intervals narrowest when --minutes are over. `first`: what the group's
    first block costs, by its start and its trial turns; later ones cost what earlier ones did.

    Few long blocks have narrow ratios and a wide quantile, many short ones spend their time on
    starts. The groups that still need blocks share the time.
    """
    if plan.rounds is not None:
        return plan.rounds
    if plan.blocks is not None:
        return ROUNDS
    group = next(group for group in groups if group.place == place)
    cost = cost_of(group) if group.num_blocks else first
    used = sum(group.used_seconds for group in groups)
    stretch = 1 + sum(group.disturbed_seconds for group in groups) / max(1.0, used)
    most = 60 * plan.minutes * min(1, MOST_STRETCH / stretch)
    seconds = (most - used) / len(in_need(plan, groups))
    taken = [len(block.quiet_rounds) for block in group.blocks]
    launches = launch_share(group.estimates.values(), len(plan.names), taken)
    return narrowest_rounds(cost, seconds, taken, launches)


def narrowest_rounds(cost: BlockCost, seconds: float, taken: Sequence[int], launches: float) -> int:
    """Return the rounds of each block to come with which the mean over all blocks has the narrowest
    interval: an even number, as turns go forwards and backwards. The blocks to come fit into
    `seconds`; with those measured, of the rounds `taken`, there are at least MIN_BLOCKS. So many
    are made even if they do not fit: then rounds take ROUNDS_OVER_START of the time of a start, for
    it would be wasted on fewer. `launches`: variance of launches / of turns."""
    rounds, needed = np.arange(MIN_ROUNDS, MOST_ROUNDS + 1, 2), max(1, MIN_BLOCKS - len(taken))
    more = seconds // (cost.start + rounds * cost.round)  # blocks to come
    rounds, more = rounds[more >= needed], more[more >= needed]
    if not len(rounds):
        affordable = 2 * round(ROUNDS_OVER_START * cost.start / cost.round / 2)
        return min(max(MIN_ROUNDS, affordable), MOST_ROUNDS)
    blocks = len(taken) + more
    variance = sum(launches + 1 / one for one in taken) + more * (launches + 1 / rounds)
    width = stdtrit(blocks - 1, 0.5 + CONFIDENCE / 2) * np.sqrt(variance) / blocks
    return int(rounds[width.argmin()])


def reason_to_stop(
    estimates: Iterable[Estimate],
    blocks: int,
    seconds_used: float,
    block_seconds: float,
    plan: Plan,
    disturbed_seconds: float = 0.0,
) -> str:
    """Return why no further block is needed; empty if one is.

    `blocks` have been measured; with the whole runs they took `seconds_used`. The next one takes
    at least `block_seconds`.
    `disturbed_seconds` went by in addition, in which other processes used the cores. The estimates
    are those of all judged pairs.
    """
    if plan.blocks is not None:
        return "as many blocks as were asked for" if blocks >= plan.blocks else ""
    if is_enough(estimates, plan):
        return f"the interval of every pair is within +-{percentage(plan.until_interval)}"
    if blocks < MIN_BLOCKS:
        return ""
    seconds, most = seconds_used + block_seconds, 60 * plan.minutes
    if seconds > most:
        return f"stopped after {blocks} blocks, as another would exceed --minutes {plan.minutes:g}"
    stretch = 1 + disturbed_seconds / max(1.0, seconds_used)
    if stretch * seconds > MOST_STRETCH * most:
        return (
            f"stopped after {blocks} blocks: with the time in which other processes used the "
            f"cores, another would end later than {MOST_STRETCH} times --minutes {plan.minutes:g}"
        )
    return ""


def is_enough(estimates: Iterable[Estimate], plan: Plan) -> bool:
    """Return whether enough blocks were measured: for every estimate there are MIN_BLOCKS_TO_STOP,
    Student's half-width is at most the plan's `until_interval`, and the scatter of the turns
    predicts no wider interval (one of few blocks may be narrow by chance). The interval that the
    report gives may be another; the rule needs the blocks' own degrees of freedom.

    Only the width of an interval may end a measurement, never its position. A rule that stops as
    soon as an interval lies beyond the margin selects the intervals that miss a true ratio of the
    margin's size (92.6 of 100 cover it instead of 94.2).
    """
    return all(
        ratio.blocks >= MIN_BLOCKS_TO_STOP
        and student_quantile(ratio.confidence, ratio.blocks - 1)
        * max(ratio.block_error, BLOCKS_OVER_TURNS * ratio.turn_error)
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
    needing = in_need(plan, groups)
    fewest = min(group.num_blocks for group in needing)
    found = [group for group in needing if group.num_blocks == fewest]
    return found if plan.shares_launch else found[:1]


def in_need(plan: Plan, groups: Sequence[Group]) -> Sequence[Group]:
    """Return the groups among which the time that is left is shared: those that need more blocks;
    all where their number is fixed, where they share a launch, or if none needs more."""
    if plan.blocks is not None or plan.shares_launch:
        return groups
    wide = [
        group
        for group in groups
        if not group.num_blocks or not is_enough(group.estimates.values(), plan)
    ]
    return wide or groups


def reason_to_end(plan: Plan, groups: Sequence[Group]) -> str:
    """Return why the measurement ends; empty if another block follows."""
    if not plan.pairs() and plan.blocks is None:
        return "there is nothing to compare: one configuration only"
    if not all(group.num_blocks for group in groups):
        return ""
    judged = [group for group in groups if not group.ranks_per_gpu]
    if plan.blocks is None and not judged:
        return "ranks share a GPU, so more blocks would decide nothing"
    return reason_to_stop(
        estimates_of(groups),
        min(group.num_blocks for group in judged or groups),
        sum(group.used_seconds for group in groups),
        sum(least_seconds(plan, group) for group in next_groups(plan, groups)),
        plan,
        sum(group.disturbed_seconds for group in groups),
    )


def least_seconds(plan: Plan, group: Group) -> float:
    """Return how long a group's next block takes at least."""
    if plan.measure == "runs" or plan.rounds is not None:
        return group.block_seconds
    cost = cost_of(group)
    return cost.start + MIN_ROUNDS * cost.round


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
    used = sum(group.used_seconds for group in groups) / 60
    so_far = f"{used:.1f} of {plan.minutes:g} minutes are used"
    return {group.place: so_far for group in groups}  # all share the plan's minutes
