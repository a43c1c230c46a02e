"""When a measurement by turns knows enough: run.py asks after each block, the report asks again.

Both ask the same functions, so that the live line says what the report will say.

What was chosen, and why. On two cores that others share, the logarithm of one side's turn of two
steps varies by 6 to 8 % from round to round; a launch adds about 0.7 %. Four sides take some 33 s a
block to start and end, and 4.5 s a round. Ten rounds a block make the narrowest interval after 8
minutes, of 6, 8, 10, 12 and 16 (half-widths in %, in the median of 1500 simulations):

    one side's turn varies by     6 rounds   8     10    12    16
    3.2 %                         1.6        1.8   1.6   1.7   1.9
    4.5 %                         2.2        2.4   2.1   2.2   2.4
    6.4 %                         3.0        3.2   2.9   3.0   3.3
    9 %                           4.2        4.4   4.0   4.1   4.5

Whoever stops at the first narrow interval prefers those that are narrow by chance. From
MIN_DEGREES_TO_STOP on (five blocks of four sides, seven of two) little is left of that: where the
width or the ten minutes end a measurement, 94 to 96 of 100 intervals cover the truth: over all of
the noise above, with rounds drawn from the recorded ones, with drift, with correlated turns, and
with a tenth of the turns slowed (tests/test_compare_coverage.py). What slows one
engine alone is no noise: with a tenth of one engine's turns slowed by 10 to 50 %, 86 of 100 cover
the ratio without. Where one engine is twice as noisy as the other, intervals of two configurations
of the noisier one cover in 92 to 93 of 100, of the quieter one in 98.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from statistics import NormalDist

from compare.evidence.paired import (
    HALF_WIDTHS_OF_80_PERCENT,
    MIN_BLOCKS,
    Estimate,
    student_quantile,
)
from compare.plan.plan import Plan

MIN_DEGREES_TO_STOP = 6  # of freedom, of each interval that is to end a measurement
MOST_BLOCKS = 1000  # beyond which nobody waits


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
    if is_enough(estimates, plan.until_interval):
        return f"every interval is within +-{100 * plan.until_interval:g} %"
    if blocks >= MIN_BLOCKS and seconds_used + block_seconds > 60 * plan.minutes:
        return f"another block would pass the {plan.minutes:g} minutes"
    return ""


def is_enough(estimates: Iterable[Estimate], until_interval: float) -> bool:
    """Tell whether blocks enough were measured: every interval's half-width, in proportion, is at
    most `until_interval` (0.02 is 2 %), and its degrees of freedom are not few."""
    return all(
        one.degrees >= MIN_DEGREES_TO_STOP and one.relative_half_width <= until_interval
        for one in estimates
    )


def minutes_to_narrow(
    estimate: Estimate, until_interval: float, block_seconds: float | None
) -> float | None:
    """Return how many more minutes would bring the interval to this half-width, if the noise stays
    as it is; None without an interval, if it would take too many, or if `block_seconds`, that a
    block takes, are not known."""
    if estimate.low is None or block_seconds is None:
        return None
    spread = estimate.error * math.sqrt(estimate.blocks)  # of one block
    quantile = NormalDist().inv_cdf(0.5 + estimate.confidence / 2)  # of many blocks: the least
    least = (quantile * spread / math.log1p(until_interval)) ** 2
    if least > MOST_BLOCKS:
        return None
    for blocks in range(max(estimate.blocks, math.ceil(least)), 2 * MOST_BLOCKS):
        degrees = estimate.degrees * (blocks - 1) // (estimate.blocks - 1)
        quantile = student_quantile(estimate.confidence, degrees)
        if quantile * spread / math.sqrt(blocks) <= math.log1p(until_interval):
            return (blocks - estimate.blocks) * block_seconds / 60
    return None


def minutes_to_show(
    estimate: Estimate, margin: float, block_seconds: float | None, family: int = 1
) -> float | None:
    """Return after how many more minutes a difference of `margin` (0.03 is 3 %) would be shown with
    80 % probability, as one of a `family` of verdicts; None: not known."""
    # As it is once the measurement is extended; of a family, at the first step of Holm's method.
    extended = replace(estimate, confidence=1 - (1 - estimate.confidence) / 2 / family)
    return minutes_to_narrow(extended, margin / HALF_WIDTHS_OF_80_PERCENT, block_seconds)
